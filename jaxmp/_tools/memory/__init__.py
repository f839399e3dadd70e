"""The memory that a training step requires: of the compiled program, or a range from shapes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from jax.sharding import NamedSharding

from jaxmp import _core
from jaxmp._core import PyTree
from jaxmp._core._compat import _watch_jit
from jaxmp._tools.audit import _compile, _trace
from jaxmp._tools.memory._cache import compiler_of, folder_of
from jaxmp._tools.memory._liveness import Liveness, ShardedArgument
from jaxmp._tools.report import _section
from jaxmp._tools.report._progress import busy
from jaxmp._tools.report._views import Report
from jaxmp.errors import AuditError, MissingDependencyError, TargetError
from jaxmp.optim import _roles

_MASTERS = (_roles.MASTER, _roles.REMAINDER)
_KINDS = {
    **dict.fromkeys((_roles.PARAMETER, _roles.AVERAGE, _roles.STATISTICS), "parameters"),
    **dict.fromkeys(_MASTERS, "masters"),
    _roles.FP8: "FP8 state",
}
_MEANING = {
    "parameters": "as the step receives them",
    "masters": "FP32 parameters, or their low bits, in the optimizer's state",
    "moments": "the rest of the optimizer's state",
    "FP8 state": "scales and their histories",
    "inputs": "the batch, and other arguments",
    "temporary": "gradients, activations, working copies and workspaces",
    "results": "that do not replace donated arguments",
}
# Bytes of temporary memory that cuBLAS uses on an H100, however small the matmuls are.
_WORKSPACE = 2**25
STATE = tuple(_MEANING)[:5]
# "one" or "several" devices -> the measured range of XLA's temporary memory relative to the
# estimate, which `python benchmarks/memory_estimates.py --calibrate` writes.
ERRORS = tomllib.loads(Path(__file__).with_name("errors.toml").read_text("utf-8"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate(Report):
    """Memory of a training step on each device. Frozen; contains plain data.

    Args:
      function: name of the step.
      target: name of the chip; "" without one.
      memory: bytes of the chip's memory; 0 without a target.
      preallocates: True if JAX allocates a share of the memory when it starts, as it does on GPUs.
      share: the share that JAX allocates, 0.75 or that of XLA_PYTHON_CLIENT_MEM_FRACTION.
      kinds: kind -> bytes: parameters, masters, moments, FP8 state and inputs are arguments;
        results are those that do not replace donated arguments; everything else is temporary.
      least, most: bytes that the step requires at least and at most; both are those of the program
        if it was compiled.
      compiler: the compiler, such as "jaxlib 0.12.0"; "" if the temporary memory is estimated.
      reason: why the program was not compiled; "" if it was.
      unknown: what the estimate does not count, or not as a whole: operations that contain
        functions, and arrays that XLA may gather on several devices.

    Example:
      >>> step = lambda w, x: jax.grad(lambda w: jnp.sum(x @ w))(w)
      >>> estimate = jaxmp.estimate_memory(step, jnp.ones((8, 8)), jnp.ones((2, 8)), target="h200")
      >>> estimate.arguments, estimate.fits
      (320, True)
    """

    _subject = "memory estimate"
    _title = "Memory"
    _command = "jaxmp memory my_package.train:make_step --json memory.json"
    _error = AuditError
    _schema: ClassVar = {"schema_version": 2}
    _summary = ("total", "usable", "fits")

    function: str = ""
    target: str = ""
    memory: int = 0
    preallocates: bool = False
    share: float = 0.75
    kinds: dict[str, int] = dataclasses.field(default_factory=dict)
    least: int = 0
    most: int = 0
    compiler: str = ""
    reason: str = ""
    unknown: tuple[str, ...] = ()

    @property
    def arguments(self) -> int:
        """Bytes of the arguments, which are exact."""
        return sum(self.kinds.get(kind, 0) for kind in STATE)

    @property
    def temporary(self) -> int:
        """Bytes of temporary arrays: of the compiled program, or estimated."""
        return self.kinds.get("temporary", 0)

    @property
    def total(self) -> int:
        """Bytes that the step requires: of the compiled program, or estimated."""
        return sum(self.kinds.values())

    @property
    def usable(self) -> int:
        """Bytes that JAX allocates; 0 without a target."""
        return int(self.memory * (self.share if self.preallocates else 1))

    @property
    def fits(self) -> bool | None:
        """True if the step fits into the usable memory; None without a target, or if it may."""
        may_fit = self.least <= self.usable
        does_fit = self.most <= self.usable and not self.unknown
        return None if not self.target or does_fit != may_fit else does_fit

    def __repr__(self) -> str:
        return f"<MemoryEstimate of {_section.bytes_text(self.total)}>"

    def _sections(self, full: bool) -> list[_section.Section]:
        del full
        rows = tuple(
            (kind, _section.bytes_text(size), _section.share_text(size, self.total), _MEANING[kind])
            for kind, size in self.kinds.items()
        )
        columns = ("kind", "bytes", "share", "content")
        return [self._verdict(), _section.Section("By kind", "", columns, rows)]

    def _verdict(self) -> _section.Section:
        text, usable = _section.bytes_text, _section.bytes_text(self.usable)
        if not self.target:
            fits = "The bytes are those of one device."
        elif self.fits:
            left = text(self.usable - self.most)
            fits = f"It fits in {self.target}, and leaves {left} of the usable {usable}."
        elif self.fits is None:
            fits = f"It may fit in {self.target}, of which {usable} are usable."
        else:
            lack = text(self.least - self.usable) + " or more" * (not self.compiler)
            fits = f"It does not fit in {self.target}: it lacks {lack} beside the usable {usable}."
        if self.preallocates:
            fits += f" JAX uses {self.share:.0%} of {text(self.memory)};"
            fits += " XLA_PYTHON_CLIENT_MEM_FRACTION sets the share."
        size = f"{text(self.most)} (compiled by {self.compiler})"
        if not self.compiler:
            size = f"{text(self.least)} to {text(self.most)} (estimated)"
            inside = [f"{each['inside']} of {each['programs']}" for each in ERRORS.values()]
            fits += f" The arguments are exact; the range of the rest contains {inside[0]} programs"
            fits += f" that were compiled for one device, and {inside[1]} for several."
            fits += f" Not compiled: {self.reason}."
        if self.unknown:
            fits = f"Not all memory of {', '.join(self.unknown)} is counted. {fits}"
        mood = "bad" if self.fits is False else "good" if self.fits else ""
        return _section.Section(f"Memory of {self.function or 'the step'}: {size}", fits, mood=mood)


def estimate_memory(
    fn: Callable[..., Any],
    *args: PyTree,
    target: _core.TargetLike | None = None,
    exact: bool | None = None,
    cache: str | os.PathLike[str] | None = "~/.cache/jaxmp",
    progress: bool | None = None,
    **kwargs: PyTree,
) -> MemoryEstimate:
    """Returns the memory of a training step on each device, by kind, without allocating it.

    With XLA's compiler for the target, the program is compiled, and the figures are XLA's.
    Otherwise, the step is traced for its shapes: parameters, masters, moments and FP8 state are its
    arguments, whose bytes are exact, and the temporary memory is a range, from the errors of
    `benchmarks/results/memory_estimates_h200.json`.

    Args:
      fn: a train step, jitted or not. If it donates its state, results occupy no more memory.
      *args: its arguments, which may be `jax.ShapeDtypeStruct`, such as
        `jax.eval_shape(init)`, with shardings for several devices.
      target: a chip such as "h200" or "v6e", or its description, as in `jaxmp.audit`. The
        result then says whether the step fits. None: the step is traced for this machine.
      exact: True to compile the program, and to raise if that is not possible; False to estimate.
        None compiles for a GPU if its compiler is installed; for a TPU it takes minutes.
      cache: folder for compiled programs; None for none.
      progress: True for a progress bar on standard error. None: if it is a terminal.
      **kwargs: keyword arguments of `fn`.

    Returns:
      The memory, with `.kinds`, `.total`, `.least`, `.most` and `.fits`; it prints as a table.

    Raises:
      AuditError: if `fn` is not a function, or `exact` is True and XLA cannot compile the program.
      TargetError: if `target` is not a known chip, XLA_PYTHON_CLIENT_MEM_FRACTION is not a share,
        or `exact` is True and no program can be compiled for the target.
      NotADirectoryError: if `cache` is a file.
      MissingDependencyError: if `exact` is True and XLA's compiler is not installed.

    Example:
      >>> def step(params, x):
      ...     return jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))(params)
      >>> params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
      >>> estimate = estimate_memory(step, params, jax.ShapeDtypeStruct((8, 64), jnp.float32))
      >>> estimate.kinds["parameters"]
      16384
    """
    _trace.check_function(fn, "estimate_memory")
    chip = None if target is None else _core.get_target(target)
    name, share = _watch_jit.title_of(fn), _core.usable_share()
    folder = folder_of(cache)
    with _compile.compiling_for(chip):
        traced = _trace.trace(fn, args, kwargs)
        arguments = _arguments(traced)
        state = Counter[str]()
        for each in arguments:
            state[each.kind] += each.bytes
        try:
            compiled_for = _check_compiled(chip, exact)
            with busy(f"compiling {name} for {compiled_for.name}", progress):
                fields = _compiled(compiled_for, traced, state, folder)
        except (AuditError, TargetError, MissingDependencyError) as error:
            if exact:
                raise
            fields = _estimated(traced, state, arguments, brief(error))
            fields["most"] += 0 if chip is not None and chip.platform != "gpu" else _WORKSPACE
    kinds = fields.pop("kinds")
    return MemoryEstimate(
        function=name,
        target=chip.name if chip else "",
        memory=chip.memory if chip else 0,
        preallocates=chip is not None and chip.preallocates,
        share=share,
        kinds={kind: kinds[kind] for kind in _MEANING if kinds[kind] or kind == STATE[0]},
        **fields,
    )


def brief(error: Exception) -> str:
    """Returns the reason why a program was not compiled: of long errors, the first sentence."""
    text = str(error)
    if isinstance(error, (AuditError, TargetError)):
        text = text.partition("\n")[0].partition(". ")[0]
    return " ".join(text.split()).rstrip(".")


def _check_compiled(chip: _core.Target | None, exact: bool | None) -> _core.Target:
    """Returns the chip that a program is compiled for.

    Raises:
      TargetError: if none is asked for, no program can be compiled for it, or that takes minutes.
      MissingDependencyError: if the compiler is not installed.
    """
    if exact is False:
        raise TargetError("exact=False (--estimate)")
    if chip is None:
        raise TargetError("no chip is named. Write exact=True, target='h200' (--target h200).")
    if chip.uncompiled:
        raise TargetError(
            f"no program can be compiled for {chip.name!r}: {chip.uncompiled}. For an estimate, "
            "leave out exact=True (--exact)."
        )
    if chip.platform == "tpu" and not exact:
        raise TargetError("it takes minutes for a TPU, and requires exact=True (--exact).")
    _compile.check_compiler(chip)
    return chip


def _arguments(traced: _trace.Traced) -> list[ShardedArgument]:
    """Returns the arrays among the arguments of the step."""
    asked, donated = _compile.asked_by(traced.jaxpr)
    arguments = []
    rows = zip(traced.variables, traced.leaves, traced.roles(), strict=True)
    for n, (var, leaf, role) in enumerate(rows):
        is_moment = leaf.in_optimizer and role not in _MASTERS
        kind = "moments" if is_moment else _KINDS.get(role, "inputs")
        own = getattr(leaf.value, "sharding", None)
        sharding = own if isinstance(own, NamedSharding) else asked.get(n)
        # Without x64, a float64 array of NumPy is an FP32 argument of the program.
        arguments.append(ShardedArgument(var.aval, sharding, kind, n in donated))
    return arguments


def _compiled(
    chip: _core.Target, traced: _trace.Traced, state: Counter[str], folder: Path | None
) -> dict[str, Any]:
    """Returns fields of the report on the program that XLA compiles."""
    memory, kinds = _compile.compile_for(chip, traced, compiler_of(folder, chip)).memory, +state
    # Padding, as in the layouts of TPUs.
    kinds["inputs"] += memory.argument_size_in_bytes - state.total()
    kinds["temporary"] = memory.temp_size_in_bytes
    kinds["results"] = memory.output_size_in_bytes - memory.alias_size_in_bytes
    compiler = f"jaxlib {importlib.metadata.version('jaxlib')}"
    return {"kinds": kinds, "least": kinds.total(), "most": kinds.total(), "compiler": compiler}


def _estimated(
    traced: _trace.Traced, state: Counter[str], arguments: list[ShardedArgument], reason: str
) -> dict[str, Any]:
    """Returns fields of the report from shapes, and why the program is not compiled."""
    liveness = Liveness(arguments)
    temporary, outputs = liveness.measure(traced.closed)
    results = max(0, outputs - sum(each.bytes for each in arguments if each.is_donated))
    kinds = state + Counter(temporary=temporary, results=results)
    error = ERRORS["several" if any(each.parts > 1 for each in arguments) else "one"]
    least, most = (state.total() + results + int(temporary * error[end]) for end in ("low", "high"))
    fields = {"kinds": kinds, "least": least, "most": most, "reason": reason}
    return fields | {"unknown": tuple(sorted(liveness.unknown))}
