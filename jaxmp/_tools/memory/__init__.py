"""The memory that a training step requires: of the compiled program, or a range from shapes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import math
import os
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from jax.sharding import NamedSharding

from jaxmp._core import _compat
from jaxmp._core._targets import Target, TargetLike, default_target, get_target, usable_share
from jaxmp._core._typing import PyTree
from jaxmp._programs._constructs import unknown_constructs
from jaxmp._programs._interpreter import warn_of_unknown
from jaxmp._tools.audit._compile import asked_by, check_compiler, compile_for
from jaxmp._tools.audit._hlo import Program
from jaxmp._tools.audit._trace import Traced, check_function, trace
from jaxmp._tools.memory._cache import compiler_of
from jaxmp._tools.memory._liveness import Value, largest_use
from jaxmp._tools.report._progress import progress_bar
from jaxmp._tools.report._section import Section, bytes_text, share_text
from jaxmp._tools.report._views import Report
from jaxmp.errors import AuditError, MissingDependencyError, TargetError
from jaxmp.optim._roles import AVERAGE, FP8, MASTER, PARAMETER, REMAINDER, STATISTICS

_MASTERS = (MASTER, REMAINDER)
_KINDS = {
    **dict.fromkeys((PARAMETER, AVERAGE, STATISTICS), "parameters"),
    **dict.fromkeys(_MASTERS, "masters"),
    FP8: "FP8 state",
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
KINDS = tuple(_MEANING)
_TENSOR_PARALLEL = (
    "The arguments are exact. They divide parameters along other axes than the batch, as tensor"
    " parallelism does, and XLA's compiler alone knows the rest: exact=True, or --exact."
)
# Bytes of temporary memory that cuBLAS uses on an H100, however small the matmuls are.
_WORKSPACE = 2**25
STATE = KINDS[:5]


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
        if it was compiled. With tensor parallelism, `most` is None without a compiler: `kinds` and
        `least` are then those of the arguments alone.
      compiler: the compiler, such as "jaxlib 0.12.0"; "" if the temporary memory is estimated.
      reason: why the program was not compiled; "" if it was.

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
    most: int | None = 0
    compiler: str = ""
    reason: str = ""

    @property
    def arguments(self) -> int:
        """Bytes of the arguments, which are exact."""
        return sum(self.kinds.get(kind, 0) for kind in STATE)

    @property
    def temporary(self) -> int:
        """Bytes of temporary arrays: of the compiled program, or estimated; 0 if not known."""
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
        if self.target and self.least > self.usable:
            return False
        is_enough = self.most is not None and self.most <= self.usable
        return True if self.target and is_enough else None

    def __repr__(self) -> str:
        return f"<MemoryEstimate of {bytes_text(self.total)}>"

    def _sections(self, full: bool) -> list[Section]:
        del full
        return [self._verdict(), self._table()]

    def _verdict(self) -> Section:
        if self.compiler:
            size = f"{bytes_text(self.total)} (compiled by {self.compiler})"
        elif self.most is None:
            size = f"at least {bytes_text(self.least)}"
        else:
            size = f"{bytes_text(self.least)} to {bytes_text(self.most)} (estimated)"
        title = f"Memory of {self.function or 'the step'}: {size}"
        known = _TENSOR_PARALLEL if self.most is None else _range_text()
        texts = [] if self.compiler else [f"{known} Not compiled: {self.reason}."]
        if not self.target:
            return Section(title, " ".join(["The bytes are those of one device.", *texts]))
        usable, lack = bytes_text(self.usable), bytes_text(abs(self.usable - self.least))
        if self.fits:
            left = bytes_text(self.usable - (self.most or 0))
            text = f"It fits in {self.target}, and leaves {left} of the usable {usable}."
        elif self.fits is None:
            text = f"It may fit in {self.target}, of which {usable} are usable."
        else:
            lack += " or more" * (not self.compiler)
            text = f"It does not fit in {self.target}: it lacks {lack} beside the usable {usable}."
        if self.preallocates:
            text += f" JAX uses {self.share:.0%} of {bytes_text(self.memory)};"
            text += " XLA_PYTHON_CLIENT_MEM_FRACTION sets the share."
        mood = "bad" if self.fits is False else "good" if self.fits else ""
        return Section(title, " ".join([text, *texts]), mood=mood)

    def _table(self) -> Section:
        rows = tuple(
            (kind, bytes_text(size), share_text(size, self.total), _MEANING[kind])
            for kind, size in self.kinds.items()
        )
        return Section("By kind", "", ("kind", "bytes", "share", "content"), rows)


@functools.cache
def _errors() -> dict[str, dict[str, Any]]:
    """Returns the measured range of XLA's temporary memory relative to the estimate.

    `python benchmarks/memory_estimates.py --calibrate` writes the file.
    """
    return tomllib.loads(Path(__file__).with_name("errors.toml").read_text("utf-8"))


def _range_text() -> str:
    single, several = _errors()["one"], _errors()["several"]
    return (
        "The arguments are exact; the range of the rest contains"
        f" {single['inside']} of {single['programs']} programs that were compiled for one device,"
        f" and {several['inside']} of {several['programs']} for several."
    )


def estimate_memory(
    fn: Callable[..., Any],
    *args: PyTree,
    target: TargetLike | None = None,
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
      TargetError: if `target` is not a known chip, or `exact` is True and no program can be
        compiled for it.
      MissingDependencyError: if `exact` is True and XLA's compiler is not installed.

    Example:
      >>> def step(params, x):
      ...     return jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))(params)
      >>> params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
      >>> estimate = estimate_memory(step, params, jax.ShapeDtypeStruct((8, 64), jnp.float32))
      >>> estimate.kinds["parameters"]
      16384
    """
    check_function(fn, "estimate_memory")
    chip = None if target is None else get_target(target)
    name, reason = getattr(fn, "__name__", ""), "exact=False"
    with contextlib.nullcontext() if chip is None else _compat.unchecked_cuda():
        with contextlib.nullcontext() if chip is None else default_target(chip):
            traced = trace(fn, args, kwargs)
        try:
            if exact is not False:
                chip = _check_compiled(chip, exact)
                with progress_bar(None, progress) as (on_program, _):
                    on_program(f"compiling {name} for {chip.name}")
                    kinds = _compiled(chip, traced, cache)
                compiler = f"jaxlib {importlib.metadata.version('jaxlib')}"
                total = sum(kinds.values())
                return _made(name, chip, kinds, total, total, compiler=compiler)
        except (AuditError, TargetError, MissingDependencyError) as error:
            if exact:
                raise
            text = " ".join(str(error).split())
            is_missing = isinstance(error, MissingDependencyError)
            reason = (text if is_missing else text.partition(". ")[0]).rstrip(".")
    for construct, equation in unknown_constructs(traced.closed).items():
        warn_of_unknown(construct, equation, "the memory of the operations inside is not counted")
    kinds, devices = _estimated(traced)
    if "temporary" not in kinds:
        return _made(name, chip, kinds, sum(kinds.values()), None, reason=reason)
    error = _errors()["one" if devices == 1 else "several"]
    known = sum(kinds.values()) - kinds["temporary"]
    least = known + int(kinds["temporary"] * error["low"])
    most = known + int(kinds["temporary"] * error["high"]) + _WORKSPACE
    return _made(name, chip, kinds, least, most, reason=reason)


def _check_compiled(chip: Target | None, exact: bool | None) -> Target:
    """Returns the chip that a program is compiled for.

    Raises:
      TargetError: if none is named, no program can be compiled for it, or that takes minutes.
      MissingDependencyError: if the compiler is not installed.
    """
    if chip is None:
        raise TargetError("no chip is named. Write exact=True, target='h200'.")
    if chip.uncompiled:
        raise TargetError(f"no program can be compiled for {chip.name!r}: {chip.uncompiled}.")
    if chip.platform == "tpu" and not exact:
        raise TargetError("it takes minutes for a TPU, and requires exact=True (--exact).")
    check_compiler(chip)
    return chip


def _made(
    function: str,
    chip: Target | None,
    kinds: Counter[str],
    least: int,
    most: int | None,
    **more: str,
) -> MemoryEstimate:
    return MemoryEstimate(
        function=function,
        target=chip.name if chip else "",
        memory=chip.memory if chip else 0,
        preallocates=chip is not None and chip.preallocates,
        share=usable_share(),
        kinds={kind: kinds[kind] for kind in KINDS if kinds[kind] or kind == KINDS[0]},
        least=least,
        most=most,
        **more,
    )


def _compiled(chip: Target, traced: Traced, folder: str | os.PathLike[str] | None) -> Counter[str]:
    """Returns the bytes of each kind in the program that XLA compiles."""
    program = compile_for(chip, traced, compiler_of(folder, chip))
    memory, kinds = program.memory, Counter[str]()
    parameters = Program(program.text).entry.parameters
    for n, kind in enumerate(_kinds_of_arguments(traced)):
        kinds[kind] += sum(shape.bytes for shape in parameters[n].shapes)
    # Padding, as in the layouts of TPUs.
    kinds["inputs"] += memory.argument_size_in_bytes - sum(kinds.values())
    kinds["temporary"] = memory.temp_size_in_bytes
    kinds["results"] = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return kinds


def _estimated(traced: Traced) -> tuple[Counter[str], int]:
    """Returns the bytes of each kind from shapes, and the number of parts of the batch.

    With tensor parallelism, which divides parameters along axes of the mesh that do not divide the
    batch, there are no temporary bytes: XLA decides which activations are divided.
    """
    asked, donated = asked_by(traced.jaxpr)
    shardings = [
        getattr(array, "sharding", None) or asked.get(n) for n, array in enumerate(traced.arrays)
    ]
    divisors = list(map(_divisor, traced.arrays, shardings))
    sizes = [_bytes(a) // d for a, d in zip(traced.arrays, divisors, strict=True)]
    kinds, counts = _kinds_of_arguments(traced), Counter[str]()
    for kind, size in zip(kinds, sizes, strict=True):
        counts[kind] += size
    axes = {kind: set[str]() for kind in KINDS}
    for kind, sharding in zip(kinds, shardings, strict=True):
        axes[kind] |= _axes(sharding)
    if not axes["parameters"] <= axes["inputs"]:
        return counts, 0
    # Arrays of the size of a parameter are divided as it is, and others as the batch is.
    rows = list(zip(traced.arrays, divisors, kinds, strict=True))
    weights = {array.size: divisor for array, divisor, kind in rows if kind == "parameters"}
    batch = max((divisor for _, divisor, kind in rows if kind == "inputs"), default=1)

    def size_of(aval: Any) -> int:
        return _bytes(aval) // weights.get(getattr(aval, "size", 0), batch)

    arguments = [Value(0, read=size) for size in sizes]
    counts["temporary"] = largest_use(traced.closed, arguments, size_of)
    outputs = sum(size_of(var.aval) for var in traced.jaxpr.outvars)
    counts["results"] = max(0, outputs - sum(sizes[n] for n in donated))
    return counts, max(divisors, default=1)


def _kinds_of_arguments(traced: Traced) -> list[str]:
    """Returns the kind of each array among the arguments."""
    pairs = zip(traced.leaves, traced.roles(), strict=True)
    return [
        "moments" if leaf.in_optimizer and role not in _MASTERS else _KINDS.get(role, "inputs")
        for leaf, role in pairs
    ]


def _divisor(array: Any, sharding: Any) -> int:
    """Returns the number of parts into which the devices split an array."""
    if not isinstance(sharding, NamedSharding) or not array.size:
        return 1
    return array.size // math.prod(sharding.shard_shape(array.shape))


def _axes(sharding: Any) -> set[str]:
    """Returns the axes of the mesh, of more than one device, that divide an array."""
    if not isinstance(sharding, NamedSharding):
        return set()
    parts = (part if isinstance(part, tuple) else (part,) for part in sharding.spec)
    names = itertools.chain.from_iterable(parts)
    return {name for name in names if sharding.mesh.shape.get(name, 1) > 1}


def _bytes(aval: Any) -> int:
    """Returns the bytes of an array; 0 for values that are none."""
    dtype = getattr(aval, "dtype", None)
    # Flax's dtype of FP8 scales has no size; they are FP32.
    return 0 if dtype is None else math.prod(aval.shape) * getattr(dtype, "itemsize", 4)
