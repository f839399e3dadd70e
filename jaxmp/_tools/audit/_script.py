"""Audit of a training script that is not edited.

The script runs in a separate process. After JAX has traced the train step and before it is
compiled, the process audits the step, writes the report to a file and exits: no `finally` or
`except` block of the script runs, and no later statement.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

import jaxmp
from jaxmp._core import _compat
from jaxmp._core._compat import _watch_jit
from jaxmp._core._typing import PyTree
from jaxmp._programs._jaxprs import equations
from jaxmp._programs._locations import Lines
from jaxmp._programs._matmuls import count_flops
from jaxmp._programs._static_values import Scope
from jaxmp._tools.audit import audit_call
from jaxmp._tools.audit._auditor import Auditor, PolicyContext
from jaxmp._tools.audit._dataflow import PLUS, From, Update
from jaxmp._tools.audit._report import AuditReport
from jaxmp.errors import AuditError, JaxmpError

# ---------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the audit of a script.

    Args:
      result: path of the result file.
      recipe: policies that the program is checked against, or None.
      target: GPU to compile for, or None.
      function: name of the function to audit; None for the train step with the most FLOPs.
      max_seconds: the script is stopped after this time.
    """

    result: str
    recipe: str | None = None
    target: str | None = None
    function: str | None = None
    max_seconds: float = 600.0


class ScriptAudit(NamedTuple):
    """Audit of a function of a script, and a sentence about this function."""

    sentence: str
    report: AuditReport


# ---------------------------------------------------------------------------
# The command's process
# ---------------------------------------------------------------------------


def audit_script(arguments: Sequence[str], *, module: bool = False, **options: Any) -> ScriptAudit:
    """Runs a script until its train step is traced, and audits the step.

    Args:
      arguments: path of the script, or name of a module, followed by the arguments of the script.
      module: True if the first argument is a module, as for `python -m`.
      **options: fields of `Options`, except `result`.

    Raises:
      AuditError: if the script fails, or exits before it compiles a function with matmuls.
    """
    script = arguments[0]
    if not module and not os.path.isfile(script):
        raise AuditError(
            f"the script {script!r} does not exist. Pass a file, or a module after -m:\n"
            "    jaxmp audit --script train.py\n    jaxmp audit --script -m my_package.train"
        )
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        settings: dict[str, Any] = {"module": module}
        settings["jaxmp"] = str(Path(jaxmp.__file__).parents[1])
        settings["watch"] = {**options, "result": str(result)}
        child = Path(__file__).with_name("_script_child.py")
        command = [sys.executable, str(child), json.dumps(settings), *arguments]
        status = _wait(command, options.get("target"))
        if not result.exists():
            raise AuditError(f"{script} failed (status {status}) before its train step was traced.")
        fields = json.loads(result.read_text("utf-8"))
    if fields["error"]:
        raise AuditError(fields["error"])
    return ScriptAudit(fields["sentence"], AuditReport.from_json(fields["report"]))


def _wait(command: list[str], target: str | None) -> int:
    """Runs a command and returns its exit status; its output goes to the error output."""
    with _compat.unchecked_cuda() if target else contextlib.nullcontext():
        process = subprocess.Popen(command, stdout=sys.stderr.fileno(), start_new_session=True)
    try:
        return process.wait()
    finally:
        # Data loaders may have left processes.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


# ---------------------------------------------------------------------------
# The script's process
# ---------------------------------------------------------------------------


# FLOPs that take a CPU seconds.
_LARGE = 10**10


class _Watched:
    """Jitted function with the shapes of one call."""

    def __init__(self, call: _watch_jit.JitCall) -> None:
        body = _compat.jaxpr_body(call.jaxpr)[0]
        self.location = _place(call.source, body)
        self.flops, self.takes_gradients = count_flops(body).total(), has_backward(body)
        self.updates = self.takes_gradients and updates_state(body)
        self.calls = 1
        self.call = call._replace(args=_shapes(call.args), kwargs=_shapes(call.kwargs))

    @property
    def is_left_out(self) -> bool:
        """True if the function is not executed; the script continues with zeros as results."""
        return self.takes_gradients or (self.flops > _LARGE and jax.default_backend() == "cpu")


class Watcher:
    """Collects the jitted functions of a script, and ends the process with a result."""

    def __init__(self, options: Options) -> None:
        self.options, self.process = options, os.getpid()
        self.watched: dict[int, _Watched] = {}
        self.lock = threading.RLock()
        self.watching = _watch_jit.watch_jit(self._on_call)
        self.watching.__enter__()
        timer = threading.Timer(options.max_seconds, self.finish)
        timer.daemon = True
        timer.start()

    def _on_call(self, call: _watch_jit.JitCall) -> bool:
        """Records a call; returns True if the function is not to be compiled and executed."""
        # The script may have forked a process, which has inherited this object.
        if os.getpid() != self.process:
            return False
        watched = self.watched.get(id(call.jaxpr))
        if watched is None:
            watched = self.watched[id(call.jaxpr)] = _Watched(call)
        else:
            watched.calls += 1
        if self._is_enough(watched):
            self.finish()
        return watched.is_left_out

    def _is_enough(self, watched: _Watched) -> bool:
        if watched.takes_gradients and watched.calls > 1:
            return True
        if self.options.function is not None:
            return watched.call.name == self.options.function
        return watched.updates

    def finish(self, error: str = "") -> NoReturn:
        """Writes the result, and ends the process.

        Args:
          error: the way in which the script failed; "" if it did not.
        """
        with self.lock:
            self.watching.__exit__(None, None, None)
            try:
                fields = self._fields(error)
            except JaxmpError as failed:
                fields = {"error": str(failed)}
            except Exception as failed:
                traceback.print_exc()
                fields = {"error": f"the audit raised {type(failed).__name__}: {failed}"}
            file = Path(self.options.result)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(fields), "utf-8")
            partial.replace(file)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(0)

    def _fields(self, error: str) -> dict[str, Any]:
        every = list(self.watched.values())
        # Most functions are single operations outside of `jit`, such as `jnp.zeros`.
        kept = [w for w in every if w.flops or w.takes_gradients]
        watched = sorted(kept, key=lambda w: (not w.takes_gradients, -w.flops))
        if error and not any(w.takes_gradients for w in watched):
            raise AuditError(f"the script {error} before its train step was traced.")
        if not watched:
            raise AuditError(
                "the script compiled no function with matmuls. Compile the train step with"
                " jax.jit, jax.pmap, nnx.jit or eqx.filter_jit:\n    @jax.jit\n"
                "    def train_step(state, batch): ..."
            )
        chosen = self._named(watched)
        report = audit_call(
            chosen.call.function,
            chosen.call.args,
            chosen.call.kwargs,
            recipe=self.options.recipe,
            target=self.options.target,
        )
        sentence = f"Function {chosen.call.name}"
        sentence += f" ({chosen.location})" * bool(chosen.location)
        sentence += ", which takes no gradients" * (not chosen.takes_gradients)
        others = ", ".join(dict.fromkeys(w.call.name for w in watched if w is not chosen))
        sentence += f"; --function NAME audits another one: {others}" if others else ""
        return {"error": "", "sentence": sentence, "report": report.to_json()}

    def _named(self, watched: list[_Watched]) -> _Watched:
        """Returns the requested function, or the train step with the most FLOPs."""
        name = self.options.function
        if name is None:
            return watched[0]
        named_function = next((w for w in watched if w.call.name == name), None)
        if named_function is None:
            names = ", ".join(dict.fromkeys(w.call.name for w in watched))
            raise AuditError(f"the script compiled no function {name!r}. It compiled {names}.")
        return named_function


# ---------------------------------------------------------------------------
# Functions
# ---------------------------------------------------------------------------


def has_backward(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Returns True if a program contains a backward pass."""
    return any("transpose(" in str(e.source_info.name_stack) for e in equations(jaxpr))


def updates_state(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Returns True if a program returns an argument to which gradients or others were added.

    A train step returns parameters in this way. Gradients and predictions are computed from
    arguments by matmuls, and from each other by `add_any`.
    """
    body, auditor = _compat.jaxpr_body(jaxpr)[0], Auditor(PolicyContext(None))
    for number, var in enumerate(body.invars):
        auditor.flow.mark(var, From(number, PLUS))
    auditor.run(Scope(body))
    return any(
        _is_same(body.invars[label.number].aval, var.aval)
        for var in body.outvars
        for label in auditor.flow.labels(Update, var)
    )


def _is_same(before: Any, after: Any) -> bool:
    is_array = before.size > 1 and jax.numpy.issubdtype(before.dtype, np.floating)
    return is_array and before.shape == after.shape


def _place(source: Callable[..., Any] | None, jaxpr: Jaxpr | ClosedJaxpr) -> str:
    """Returns the line that defines a function, or of its first operation, as `train.py:12`."""
    file, line = "", 0
    if source is not None:
        code = source.__code__
        file, line = Lines().first_own([(code.co_filename, code.co_firstlineno)])
    if not file:
        locations = (Lines().of((equation,)) for equation in equations(jaxpr))
        file, line = next((location for location in locations if location[0]), ("", 0))
    return f"{Path(file).name}:{line}" if file else ""


def _shapes(tree: PyTree) -> PyTree:
    """Replaces arrays by shapes; NNX modules, which contain their arrays, are not changed."""
    return jax.tree.map(_shape, tree, is_leaf=_is_nnx)


def _shape(leaf: object) -> object:
    if isinstance(leaf, jax.Array):
        weak = getattr(jax.typeof(leaf), "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=weak)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else leaf


def _is_nnx(node: object) -> bool:
    return any(cls.__module__.startswith("flax.nnx") for cls in type(node).__mro__)
