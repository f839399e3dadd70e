"""Runs the tools on a training script that is not edited.

The script runs in a separate process. JAX reports each call of a jitted function there, after it
was traced and before it is compiled. When the steps of the script are known, the process runs the
tool on them, writes the result to a file and exits: no `finally` or `except` block of the script
runs, and no later statement.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jaxmp
from jaxmp import _core
from jaxmp._core import _compat
from jaxmp._core._compat import _watch_jit
from jaxmp._policies import _recipe
from jaxmp._tools.audit import _audit, _jitted
from jaxmp._tools.nonfinite import _measure
from jaxmp._tools.plan import PlanReport, _programs
from jaxmp._tools.report._views import Report
from jaxmp.errors import AuditError, JaxmpError

# ---------------------------------------------------------------------------
# The command's process
# ---------------------------------------------------------------------------


def run_script(
    tool: str,
    arguments: Sequence[str],
    *,
    function: str | None,
    max_seconds: float,
    **settings: Any,
) -> tuple[str, str]:
    """Runs a script until its train steps are traced, and a tool on these.

    Args:
      tool: "audit", "memory", "plan" or "locate".
      arguments: path of the script, or "-m" and the name of a module, followed by the arguments of
        the script.
      function: name of the only function to read; None for the train steps.
      max_seconds: the script is stopped after this time.
      **settings: settings of the tool.

    Returns:
      A sentence about the functions that the tool has read, and the JSON text of its report.

    Raises:
      AuditError: if the script fails, or exits before it compiles a function with matmuls.
    """
    is_module = arguments[0] == "-m"
    arguments = arguments[1:] if is_module else arguments
    if not arguments:
        raise JaxmpError(f"-m requires a module: jaxmp {tool} --script -m my_package.train")
    script = arguments[0]
    if not is_module and not os.path.isfile(script):
        raise AuditError(
            f"the script {script!r} does not exist. Pass a file, or a module after -m:\n"
            f"    jaxmp {tool} --script train.py\n    jaxmp {tool} --script -m my_package.train"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        watch = {"tool": tool, "file": str(file), "function": function}
        watch |= {"max_seconds": max_seconds, "settings": settings}
        run = {"module": is_module, "jaxmp": str(Path(jaxmp.__file__).parents[1]), "watch": watch}
        child = Path(__file__).with_name("_script_child.py")
        command = [sys.executable, str(child), json.dumps(run), *arguments]
        is_compiling = settings.get("target") or settings.get("targets")
        with _compat.unchecked_cuda() if is_compiling else contextlib.nullcontext():
            # The output of the script goes to the error output.
            process = subprocess.Popen(command, stdout=sys.stderr.fileno(), start_new_session=True)
        try:
            status = process.wait()
        finally:
            # Data loaders may have left processes.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if not file.exists():
            raise AuditError(f"{script} ended (status {status}) before its train step was traced.")
        result = json.loads(file.read_text("utf-8"))
    if result["error"]:
        raise AuditError(result["error"])
    return result["sentence"], result["report"]


# ---------------------------------------------------------------------------
# The script's process
# ---------------------------------------------------------------------------

# Calls of one step after which others are no longer awaited: an actor may be updated after several
# updates of its critic.
_PATIENCE = 10


@dataclasses.dataclass(kw_only=True)
class Watcher:
    """Collects the jitted functions of a script, and ends the process with a result.

    Args:
      tool, settings, function, max_seconds: as in `run_script`.
      file: path of the result file.
      calls: the last two calls of steps with their arrays, for `locate`.
    """

    tool: str
    settings: dict[str, Any]
    file: str = ""
    function: str | None = None
    max_seconds: float = 600.0
    process: int = dataclasses.field(default_factory=os.getpid)
    watched: dict[int, _jitted.Watched] = dataclasses.field(default_factory=dict)
    calls: list[_watch_jit.JitCall] = dataclasses.field(default_factory=list)
    recipes: list[str] = dataclasses.field(default_factory=list)
    is_busy: bool = False
    # " within 600 seconds (--max-seconds)" if the script was stopped, as a part of a sentence.
    late: str = ""

    def __post_init__(self) -> None:
        _compat.hide_plugin_errors()
        self.lock = threading.RLock()
        self.watching = contextlib.ExitStack()
        watch = _watch_jit.watch_jit(self._on_call, run_all=self.tool == "locate")
        self.watching.enter_context(watch)
        self.warned = self.watching.enter_context(_programs.collected_warnings())
        if self.tool == "plan":
            jaxmp.load_recipe = self._load_recipe
        timer = threading.Timer(self.max_seconds, self._stop)
        timer.daemon = True
        timer.start()

    def _stop(self) -> NoReturn:
        """Ends a script that takes too long."""
        self.late = f" within {self.max_seconds:g} seconds (--max-seconds)"
        self.finish()

    def _load_recipe(self, recipe: Any) -> _recipe.Recipe:
        """Returns the planned recipe instead of the script's; a loaded recipe is one already."""
        if isinstance(recipe, _recipe.Recipe):
            return recipe
        self.recipes.append(str(recipe))
        return _recipe.load_recipe(self.settings["recipe"])

    def _on_call(self, call: _watch_jit.JitCall) -> bool:
        """Records a call; returns True if the function is not to be compiled and executed."""
        # The script may have forked a process, which has inherited this object.
        if os.getpid() != self.process or self.is_busy:
            return False
        watched = self.watched.get(id(call.jaxpr))
        if watched is None:
            watched = self.watched[id(call.jaxpr)] = _jitted.Watched(call)
        watched.calls += 1
        if self.tool == "locate":
            return self._keep(watched, call)
        if self._is_enough(watched):
            self.finish()
        return watched.is_left_out

    def _is_enough(self, watched: _jitted.Watched) -> bool:
        name = self.function
        if name is not None and watched.call.name == name:
            return True
        if not watched.takes_gradients or watched.calls > _PATIENCE:
            return watched.takes_gradients
        is_whole = watched.updates or watched.calls > 1
        return name is None and is_whole and not self._missed()

    def _missed(self) -> list[str]:
        """Returns the steps that the script defines, and has not called."""
        every = self.watched.values()
        called = {w.call.source for w in every}
        names = {w.call.name for w in every if w.call.source is None}
        names.update(*(w.inner for w in every))
        missed = _jitted.defined_steps().items()
        return [text for f, text in missed if f not in called and f.__name__ not in names]

    def _keep(self, watched: _jitted.Watched, call: _watch_jit.JitCall) -> bool:
        """Copies the arrays of a step, and ends the script if the step before it has failed."""
        if not watched.takes_gradients or self.function not in (None, call.name):
            return False
        self.is_busy = True
        try:
            args, kwargs = _measure.copy_arrays((call.args, call.kwargs))
            self.calls = [*self.calls[-1:], call._replace(args=args, kwargs=kwargs)]
            failed = _measure.has_failed((args, kwargs))
        finally:
            self.is_busy = False
        if failed:
            self.finish()
        self.calls = self.calls[-1:]
        return True

    def finish(self, error: str = "") -> NoReturn:
        """Writes the result, and ends the process.

        Args:
          error: the way in which the script failed; "" if it did not.
        """
        with self.lock:
            self.watching.close()
            try:
                result = self.result(error)
            except JaxmpError as failed:
                result = {"error": str(failed)}
            except Exception as failed:
                traceback.print_exc()
                result = {"error": f"the {self.tool} raised {type(failed).__name__}: {failed}"}
            partial = Path(self.file).with_suffix(".partial")
            partial.write_text(json.dumps(result), "utf-8")
            partial.replace(self.file)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(0)

    def result(self, error: str = "") -> dict[str, Any]:
        """Runs the tool, and returns the fields of the result file."""
        # After a step, its results may be zeros, which a script may refuse.
        if error and not any(watched.takes_gradients for watched in self.watched.values()):
            raise AuditError(f"the script {error} before its train step was traced.")
        every = [w for w in self.watched.values() if w.flops or w.is_step]
        watched = sorted(every, key=lambda w: (not w.takes_gradients, -w.flops))
        if not watched:
            raise AuditError(
                f"the script compiled no function with matmuls{self.late}. Compile the train step"
                " with jax.jit, jax.pmap, nnx.jit or eqx.filter_jit:\n    @jax.jit\n"
                "    def train_step(state, batch): ..."
            )
        chosen = self._chosen(watched)
        sentence = f"Function{'s' * (len(chosen) > 1)} {', '.join(map(str, chosen))}"
        sentence += ", which takes no gradients" * (not any(w.takes_gradients for w in chosen))
        if missed := [] if self.function else self._missed():
            sentence += f"; not reached{self.late}: {', '.join(missed)}"
        sentence += f"; the script {error} after these" if error else ""
        names = {w.call.name for w in chosen}
        left = (w.call.name for w in watched if w.is_own and w.call.name not in names)
        others = ", ".join(dict.fromkeys(left))
        verb = {"audit": "audits", "locate": "follows"}.get(self.tool, "reads")
        sentence += f"; --function NAME {verb} another one: {others}" if others else ""
        return {"error": "", "sentence": sentence, "report": self._report(chosen).to_json()}

    def _chosen(self, watched: list[_jitted.Watched]) -> list[_jitted.Watched]:
        """Returns the requested function, the train steps, or the function with the most FLOPs."""
        name = self.function
        if name is not None:
            named = [w for w in watched if w.call.name == name]
            if not named:
                names = ", ".join(dict.fromkeys(w.call.name for w in watched))
                raise AuditError(
                    f"the script compiled no function {name!r}{self.late}. It compiled {names}."
                )
            return named[:1]
        if self.tool == "locate" and self.calls:
            return [self.watched[id(self.calls[0].jaxpr)]]
        # A function that was traced for several shapes counts once.
        steps: dict[str, _jitted.Watched] = {}
        for each in watched:
            steps |= {str(each): each} if each.is_step and str(each) not in steps else {}
        if self.tool == "plan" or not steps:
            return watched[:1]
        return list(steps.values())

    def _report(self, chosen: list[_jitted.Watched]) -> Report:
        """Returns the report of the tool on the chosen functions."""
        settings = self.settings
        if self.tool == "locate":
            if not self.calls:
                raise AuditError(
                    f"the script compiled no function that takes gradients{self.late}."
                )
            # The last step, or the one before it, whose results the last one has received.
            is_first = sum(w.calls for w in self.watched.values() if w.takes_gradients) == 1
            with _compat.assigned(_measure.first_step, is_first):
                reports = [jaxmp.locate_nonfinite(*_positional(call)) for call in self.calls]
            return next((each for each in reports if each.reproduced), reports[-1])
        if self.tool == "plan":
            self._check_recipes()
            return _plan(chosen[0].call, settings, next(iter(self.warned), ""))
        if self.tool == "memory":
            estimates = [jaxmp.estimate_memory(*_positional(w.call), **settings) for w in chosen]
            return max(estimates, key=lambda estimate: estimate.total)
        calls = [(w.call.function, w.call.args, w.call.kwargs) for w in chosen]
        reports = [_audit.audit_call(*call, **settings) for call in calls]
        return _audit.join_reports(reports)

    def _check_recipes(self) -> None:
        names = list(dict.fromkeys(self.recipes))
        if len(names) != 1:
            called = "does not call jaxmp.load_recipe"
            if names:
                called = f"calls jaxmp.load_recipe for {', '.join(names)}"
            raise AuditError(
                f"the script {called}, and a plan replaces the one recipe that a script loads. Pass"
                " a function that takes the recipe instead:\n    def make_step(recipe):\n"
                "        return train_step, state, batch"
            )


# ---------------------------------------------------------------------------
# Tools
# ---------------------------------------------------------------------------


def _positional(call: _watch_jit.JitCall) -> tuple[Any, ...]:
    """Returns a function and its arguments; a tool may have keyword arguments of the same names."""
    if not call.kwargs:
        return call.function, *call.args

    run = lambda args, kwargs: call.function(*args, **kwargs)
    run.__name__ = call.name
    return run, call.args, call.kwargs


def _plan(call: _watch_jit.JitCall, settings: dict[str, Any], warning: str) -> PlanReport:
    """Returns the programs of a step for each chip, with bounds in seconds."""
    recipe, cache = _recipe.load_recipe(settings["recipe"]), settings["cache"]
    rows, made = [], lambda _: _positional(call)
    for name in settings["targets"]:
        chip = _core.with_links(_core.get_target(name), settings["links"])
        program = _programs.Candidate(made, recipe, chip, None, cache, settings["hosts"])
        row = program.measure(None)
        rows.append(dataclasses.replace(row, warning=warning or row.warning))
    return PlanReport(rows=tuple(rows))
