"""The memory that a training step requires: by kind, from shapes, or from the compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from jax.sharding import NamedSharding

from jaxmp._core import _compat
from jaxmp._core._targets import Target, TargetLike, default_target, get_target, usable_share
from jaxmp._core._typing import PyTree
from jaxmp._programs._constructs import unknown_constructs
from jaxmp._programs._interpreter import warn_of_unknown
from jaxmp._tools.audit._compile import asked_by, compile_for
from jaxmp._tools.audit._trace import Traced, check_function, trace
from jaxmp._tools.hlo import Program
from jaxmp._tools.memory._liveness import Liveness, Value
from jaxmp._tools.report._section import Section, bytes_text, share_text
from jaxmp._tools.report._views import Report
from jaxmp.errors import AuditError, TargetError
from jaxmp.optim._roles import AVERAGE, FP8, MASTER, PARAMETER, REMAINDER, STATISTICS

STATE = ("parameters", "masters", "moments", "FP8 state", "inputs")
_MASTERS = (MASTER, REMAINDER)
_KINDS = {
    **dict.fromkeys((PARAMETER, AVERAGE, STATISTICS), "parameters"),
    **dict.fromkeys(_MASTERS, "masters"),
    FP8: "FP8 state",
}
TEMPORARY = ("working copies", "gradients", "activations", "logits")
KINDS = (*STATE, *TEMPORARY, "results")
_MEANING = {
    "parameters": "as the step receives them",
    "masters": "FP32 parameters, or their low bits, in the optimizer's state",
    "moments": "the rest of the optimizer's state",
    "FP8 state": "scales and their histories",
    "inputs": "the batch, and other arguments",
    "working copies": "of parameters, in the dtype of the computation",
    "gradients": "of parameters",
    "activations": "and other temporary arrays",
    "logits": "the result of the last matmul of the forward pass, and its gradient",
    "results": "that do not replace donated arguments",
}


class CompiledMemory(NamedTuple):
    """Bytes on each device that XLA reports for the compiled program.

    Args:
      arguments: bytes of the arguments.
      results: bytes of the results that do not replace donated arguments.
      temporary: all other memory.
      kinds: kind -> bytes of the arguments of the compiled program.
    """

    arguments: int
    results: int
    temporary: int
    kinds: dict[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate(Report):
    """Memory of a training step on each device. Frozen; contains plain data.

    Args:
      function: name of the step.
      target: name of the chip; "" without one.
      memory: bytes of the chip's memory; 0 without a target.
      preallocates: True if JAX allocates a share of the memory when it starts, as it does on GPUs.
      kinds: kind -> bytes at the moment of the largest use: parameters, masters, moments, FP8 state
        and inputs are arguments; working copies, gradients, activations and logits are temporary;
        results are those that do not replace donated arguments.
      compiled: the figures of XLA; None without `exact=True`.
      share: the share that JAX allocates, 0.75 or that of XLA_PYTHON_CLIENT_MEM_FRACTION.

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
    _schema: ClassVar = {"schema_version": 1}
    _summary = ("total", "usable", "fits")

    function: str = ""
    target: str = ""
    memory: int = 0
    preallocates: bool = False
    kinds: dict[str, int] = dataclasses.field(default_factory=dict)
    compiled: CompiledMemory | None = None
    share: float = 0.75

    @property
    def arguments(self) -> int:
        """Bytes of the arguments, which are exact."""
        return sum(self.kinds.get(kind, 0) for kind in STATE)

    @property
    def temporary(self) -> int:
        """Estimated bytes of temporary arrays."""
        return sum(self.kinds.get(kind, 0) for kind in TEMPORARY)

    @property
    def total(self) -> int:
        """Bytes that the step requires: those of the compiled program if they are known."""
        return sum(self.kinds.values()) if self.compiled is None else sum(self.compiled[:3])

    @property
    def usable(self) -> int:
        """Bytes that JAX allocates; 0 without a target."""
        return int(self.memory * (self.share if self.preallocates else 1))

    @property
    def fits(self) -> bool | None:
        """True if the step fits into the usable memory; None without a target."""
        return self.total <= self.usable if self.target else None

    def __repr__(self) -> str:
        return f"<MemoryEstimate of {bytes_text(self.total)}>"

    def _sections(self, full: bool) -> list[Section]:
        del full
        return [self._verdict(), self._table()]

    def _verdict(self) -> Section:
        by = "estimated" if self.compiled is None else "compiled"
        title = f"Memory of {self.function or 'the step'}: {bytes_text(self.total)} ({by})"
        if not self.target:
            return Section(title, "On each device, at the moment of the largest use.")
        room = self.usable - self.total
        text = f"It fits in {self.target}, and leaves {bytes_text(room)}" if self.fits else ""
        text = text or f"It does not fit in {self.target}: it lacks {bytes_text(-room)}"
        text += f" of the usable {bytes_text(self.usable)}."
        if self.preallocates:
            text += f" JAX uses {self.share:.0%} of {bytes_text(self.memory)};"
            text += " XLA_PYTHON_CLIENT_MEM_FRACTION sets the share."
        return Section(title, text, mood="good" if self.fits else "bad")

    def _table(self) -> Section:
        whole, columns = sum(self.kinds.values()), ("kind", "bytes", "share")
        rows = [
            (kind, bytes_text(size), share_text(size, whole)) for kind, size in self.kinds.items()
        ]
        if self.compiled is None:
            cells = tuple((*row, _MEANING[row[0]]) for row in rows)
            return Section("By kind", "", (*columns, "content"), cells)
        known = self.compiled.kinds | {"results": self.compiled.results}
        cells = tuple((*row, bytes_text(known[row[0]]) if row[0] in known else "") for row in rows)
        text = f"XLA reports {bytes_text(self.compiled.temporary)} of temporary arrays; estimated: "
        return Section("By kind", text + bytes_text(self.temporary), (*columns, "XLA"), cells)


def estimate_memory(
    fn: Callable[..., Any],
    *args: PyTree,
    target: TargetLike | None = None,
    exact: bool = False,
    **kwargs: PyTree,
) -> MemoryEstimate:
    """Estimates the memory of a training step on each device, by kind, without allocating it.

    The step is traced for its shapes. Parameters, masters, moments and FP8 state are its arguments,
    whose bytes are exact. The rest is estimated with a model of the compiler: which values its
    kernels write into memory, and how long they remain there. `docs/measurements.md` states the
    measured errors.

    Args:
      fn: a train step, jitted or not. If it donates its state, results occupy no more memory.
      *args: its arguments, which may be `jax.ShapeDtypeStruct`, such as
        `jax.eval_shape(init)`, with shardings for several devices.
      target: a chip such as "h200" or "v6e", or its description, as in `jaxmp.audit`. The
        estimate then says whether the step fits. None:
        the step is traced for this machine.
      exact: True to compile the program for the target, too, and to report the memory that XLA
        allocates beside the estimate. It requires a target that programs can be compiled for.
      **kwargs: keyword arguments of `fn`.

    Returns:
      The estimate, with `.kinds`, `.total` and `.fits`; it prints as a table.

    Raises:
      AuditError: if `fn` is not a function, or XLA cannot compile the program.
      TargetError: if `target` is not a known chip, or no program can be compiled for it.
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
    if exact and chip is None:
        raise TargetError("exact=True compiles for a chip. Name it: exact=True, target='h200'.")
    if exact and chip is not None and chip.uncompiled:
        raise TargetError(f"no program can be compiled for {chip.name!r}: {chip.uncompiled}.")
    with contextlib.nullcontext() if chip is None else _compat.unchecked_cuda():
        with contextlib.nullcontext() if chip is None else default_target(chip):
            traced = trace(fn, args, kwargs)
        compiled = None
        if exact and chip is not None:
            program = compile_for(chip, traced)
            memory, kinds = program.memory, Counter[str]()
            parameters = Program(program.text).entry.parameters
            for n, kind in enumerate(_kinds_of_arguments(traced)):
                kinds[kind] += sum(shape.bytes for shape in parameters[n].shapes)
            compiled = CompiledMemory(
                memory.argument_size_in_bytes,
                memory.output_size_in_bytes - memory.alias_size_in_bytes,
                memory.temp_size_in_bytes,
                dict(kinds),
            )
    for name, equation in unknown_constructs(traced.closed).items():
        warn_of_unknown(name, equation, "the memory of the operations inside is not counted")
    return _estimate(traced, getattr(fn, "__name__", ""), chip, compiled)


def _estimate(
    traced: Traced, function: str, chip: Target | None, compiled: CompiledMemory | None
) -> MemoryEstimate:
    asked, donated = asked_by(traced.jaxpr)
    divisors = [
        _divisor(array, getattr(array, "sharding", None) or asked.get(n))
        for n, array in enumerate(traced.arrays)
    ]
    sizes = [_bytes(a) // d for a, d in zip(traced.arrays, divisors, strict=True)]
    kinds = _kinds_of_arguments(traced)
    counts: Counter[str] = Counter()
    for kind, size in zip(kinds, sizes, strict=True):
        counts[kind] += size
    # Arrays of the size of a parameter are divided as it is, and others as the batch is.
    weights = {
        array.size: divisor
        for array, divisor, kind in zip(traced.arrays, divisors, kinds, strict=True)
        if kind == "parameters"
    }
    rows = [d for d, kind in zip(divisors, kinds, strict=True) if kind == "inputs"]
    batch = max(rows, default=1)

    def size_of(aval: Any) -> int:
        return _bytes(aval) // weights.get(getattr(aval, "size", 0), batch)

    arguments = []
    for array, divisor, kind in zip(traced.arrays, divisors, kinds, strict=True):
        value = Value(tuple(array.shape), array.dtype, 0, kind)
        value.elements = array.size // divisor
        arguments.append(value)
    liveness = Liveness(size_of, (size // d for size, d in weights.items()))
    counts += liveness.peak(traced.closed, arguments)
    outputs = sum(size_of(var.aval) for var in traced.jaxpr.outvars)
    counts["results"] = max(0, outputs - sum(sizes[n] for n in donated))
    ordered = {kind: counts[kind] for kind in KINDS if counts[kind] or kind in STATE[:1]}
    return MemoryEstimate(
        function=function,
        target=chip.name if chip else "",
        memory=chip.memory if chip else 0,
        preallocates=chip is not None and chip.preallocates,
        kinds=ordered,
        compiled=compiled,
        share=usable_share(),
    )


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


def _bytes(aval: Any) -> int:
    """Returns the bytes of an array; 0 for values that are none."""
    dtype = getattr(aval, "dtype", None)
    # Flax's dtype of FP8 scales has no size; they are FP32.
    return 0 if dtype is None else math.prod(aval.shape) * getattr(dtype, "itemsize", 4)
