"""Measures the arguments of a step, and the operands and results of single operations."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp import _core, _programs
from jaxmp._core import Array, PyTree, _compat
from jaxmp._tools.audit import _trace
from jaxmp._tools.nonfinite import _record, _walk
from jaxmp.errors import AuditError
from jaxmp.optim import _find, _roles

# Smallest scale that a fix suggests: the default `min_scale` of `DynamicLossScale`.
_SMALLEST_SCALE = 2.0**-14
# Names of roles in reports that differ from them.
_ROLES = {_roles.FP8: "FP8 state", _roles.LOSS_SCALE: "loss scale"}

# Fields of Flax's train states and optimizers, and of the states of optax.
_COUNTS = {"step", "count"}
# True for the first step of a script, whose state may count no steps.
first_step = contextvars.ContextVar("first_step", default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgumentRow:
    """An argument with elements that are not finite.

    Args:
      name: the leaf as code, such as "state.params['w']".
      role: "parameter", "master", "moment", "average", "batch statistics", "loss scale", "counter",
        "FP8 state" or "input".
      index: index of its first element that is not finite.
      value: that element.
      count: number of such elements.
    """

    name: str
    role: str
    index: tuple[int, ...]
    value: float
    count: int


def bad_arguments(traced: _trace.Traced) -> dict[int, ArgumentRow]:
    """Returns number -> row of each argument with elements that are not finite."""
    rows = {}
    names, roles = traced.texts(), traced.roles()
    for number, array in enumerate(traced.arrays):
        if not _core.is_inexact(array) or bool(jnp.isfinite(array).all()):
            continue
        # An array of several hosts cannot be read as a whole.
        first = int(_first(array))
        index = tuple(map(int, np.unravel_index(first, np.shape(array))))
        value = float(np.real(jax.device_get(_core.flattened(array)[first])))
        rows[number] = ArgumentRow(
            name=names[number],
            role=_ROLES.get(roles[number], roles[number]),
            index=index,
            value=value,
            count=int((~jnp.isfinite(array)).sum()),
        )
    return rows


def is_first_step(traced: _trace.Traced) -> bool:
    """Returns True if the step is known as the first, or the state has counted none."""
    counts = [
        leaf.value
        for leaf in traced.leaves
        if _COUNTS.intersection(_core.path_names(leaf.path)[-2:]) and np.ndim(leaf.value) == 0
    ]
    return first_step.get() or (bool(counts) and not any(map(int, counts)))


def check_usable(traced: _trace.Traced) -> None:
    """Raises an error for arguments with which the step cannot run."""
    for name, array in zip(traced.texts(), traced.arrays, strict=True):
        if isinstance(array, jax.ShapeDtypeStruct):
            raise AuditError(
                f"{name} is a shape, and the step has to be run. Pass an array, as training does:\n"
                f"    jnp.zeros({array.shape}, jnp.{array.dtype})"
            )
        if isinstance(array, jax.Array) and array.is_deleted():
            raise AuditError(
                f"{name} was donated to an earlier call, which deleted it. Donate the state alone:"
                "\n    step = jax.jit(step, donate_argnums=0)"
            )


@dataclasses.dataclass(frozen=True)
class ScaleArgument:
    """Loss scale among the arguments.

    Attributes:
      number: number of its array.
      value: the scale.
      is_dynamic: True if it changes during training.
      minimum: smallest scale that a fix may suggest.
      of_skipped: the scale of the last step, if that step was skipped; None otherwise.
    """

    number: int
    value: float
    is_dynamic: bool
    minimum: float
    of_skipped: float | None


def scale_of(traced: _trace.Traced) -> ScaleArgument | None:
    """Returns the first loss scale of jaxmp or Flax among the arguments; None if there is none."""
    for number in traced.scales()[:1]:
        node, value = traced.leaves[number].owner, traced.arrays[number]
        value = float(np.max(jax.device_get(value)))
        factor = getattr(node, "backoff_factor", None)
        skipped = None
        if factor is not None and last_step_was_skipped(traced.arguments):
            skipped = value / factor
        minimum = getattr(node, "floor", getattr(node, "minimum_scale", None))
        minimum = max(minimum or 0.0, _SMALLEST_SCALE)
        return ScaleArgument(number, value, factor is not None, minimum, skipped)
    return None


def last_step_was_skipped(tree: PyTree) -> bool:
    """Returns True if the counters in a state are those of a skipped step."""
    states = _find.find(tree, _find.SkipNonfiniteState)
    flags = [_compat.plain_array(state.stats.last_finite) for _, state in states]
    return any(not np.all(jax.device_get(flag)) for flag in flags)


def has_failed(tree: PyTree) -> bool:
    """Returns True for arrays of a step that are not finite, or the counters of a skipped step."""
    return last_step_was_skipped(tree) or not bool(_core.all_finite(tree))


def copy_arrays(tree: PyTree) -> PyTree:
    """Copies the arrays among the arguments of a step, which may donate them."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def with_scale(arrays: list[Any], number: int, value: float) -> list[Any]:
    """Returns the arguments with another loss scale."""
    changed = list(arrays)
    changed[number] = jnp.full_like(arrays[number], value)
    return changed


Target = tuple[_record.Key, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRow:
    """Elements of one operand or result.

    Args:
      dtype: its dtype.
      shape: its shape, on one device of a `shard_map`.
      low: smallest finite element; NaN if there is none.
      high: largest finite element; NaN if there is none.
      zero: share of elements that are zero.
      subnormal: share of elements that are smaller than the smallest normal number.
      near_largest: share of finite elements above half of the largest number of the dtype.
      nonfinite: share of elements that are infinite or NaN.
      index: index of the first element that is not finite; () if there is none, or for scalars.
      value: element at the first index at which the result is not finite; None for other shapes.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    zero: float
    subnormal: float
    near_largest: float
    nonfinite: float
    index: tuple[int, ...] = ()
    value: float | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """Operands and results of one operation, and the results for FP32 operands."""

    operands: tuple[ArrayRow, ...]
    results: tuple[ArrayRow, ...]
    in_fp32: tuple[ArrayRow, ...]


class _Operands(_record.Recorder):
    """Recorder of the elements of some operations."""

    consequence = ""

    def __init__(self, targets: Collection[Target]) -> None:
        super().__init__()
        self.types: dict[Target, Any] = dict.fromkeys(targets)

    def equation(
        self, equation: JaxprEqn, operands: list[Any], frame: _programs.Frame
    ) -> list[Any]:
        results = super().equation(equation, operands, frame)
        target = frame.state and (frame.state[0].key, frame.index)
        if target in self.types:
            # Random keys and other extended dtypes have no elements.
            groups = [operands, results, _programs.bind_in_fp32(equation, operands)]
            groups = [filter(_is_number, map(_record.on_device, group)) for group in groups]
            groups = [list(map(_programs.as_jax_array, group)) for group in groups]
            self.types[target] = [[(str(x.dtype), np.shape(x)) for x in each] for each in groups]
            position = _first(groups[1][0])
            rows = [[_elements(x, groups[1][0], position) for x in each] for each in groups]
            self.side[target] = _programs.vary_as_here(rows)
        return results


def _is_number(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return (dtype is not None and jnp.issubdtype(dtype, jnp.number)) or dtype == jnp.bool_


def measure(closed: Any, arrays: list[Any], operations: list[_walk.Operation]) -> list[Measured]:
    """Runs a program again and returns the elements of some of its operations."""
    targets = [(op.region.key, op.number) for op in operations]
    recorder = _Operands(targets)
    side = jax.device_get(recorder.record(closed, arrays))
    measured = []
    for op, target in zip(operations, targets, strict=True):
        rows = jax.tree.map(lambda x, at=op.at: x[at], side[target])
        groups = zip(recorder.types[target], rows, strict=True)
        measured.append(Measured(*(_rows(types, group) for types, group in groups)))
    return measured


def _rows(types: list[Any], group: list[Any]) -> tuple[ArrayRow, ...]:
    rows = []
    for (dtype, shape), (first, scalars) in zip(types, group, strict=True):
        numbers = {name: float(x) for name, x in scalars.items()}
        if numbers["low"] > numbers["high"]:
            numbers |= {"low": np.nan, "high": np.nan}
        index = np.unravel_index(int(first), shape) if numbers["nonfinite"] else ()
        rows.append(ArrayRow(dtype=dtype, shape=shape, index=tuple(map(int, index)), **numbers))
    return tuple(rows)


def _flat(x: Array) -> Array:
    """Returns the elements of an array as a vector in FP32 or FP64, without a sharded axis."""
    x = lax.abs(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
    dtype = _core.FLOAT64 if x.dtype == _core.FLOAT64 else _core.FLOAT32
    return lax.convert_element_type(_core.flattened(x), dtype)


def _first(x: Array) -> Array:
    """Returns the index of the first element that is not finite, in the order of the elements."""
    if x.size == 0:
        return jnp.int32(0)
    return lax.argmax(lax.bitwise_not(lax.is_finite(_flat(x))), 0, jnp.int32)


@jax.jit
def _elements(x: Array, result: Array, position: Array) -> tuple[Array, dict[str, Array]]:
    """Returns the first index at which an array is not finite, and fields of its `ArrayRow`.

    Args:
      x: the array.
      result: the result of the operation.
      position: index of the element that is returned, among those of the result. It is known if
        the array has the shape of the result, or is a scalar.
    """
    flat = _flat(x)
    finite = lax.is_finite(flat)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    info = jnp.finfo(x.dtype if is_float else flat.dtype)
    # The order of magnitudes is that of their bits. Floating-point operations of CPUs may take
    # subnormal numbers for zero.
    integers = np.dtype(f"int{8 * flat.dtype.itemsize}")
    bits = lax.bitcast_convert_type(flat, integers)
    bits = lax.bitwise_and(bits, lax.full_like(bits, np.iinfo(integers).max))
    of = lambda value: lax.full_like(bits, np.array(value, flat.dtype).view(integers))
    full = lambda value: lax.full_like(flat, value)
    count = jnp.float32(max(flat.size, 1))
    total = lambda flags: lax.reduce_sum(lax.convert_element_type(flags, _core.FLOAT32), (0,))
    share = lambda flags: lax.div(total(flags), count)
    is_zero, is_large = lax.eq(bits, of(0)), lax.gt(bits, of(float(info.max) / 2))
    is_small = lax.bitwise_and(lax.bitwise_not(is_zero), lax.lt(bits, of(float(info.tiny))))
    fields = {
        "low": lax.reduce_min(lax.select(finite, flat, full(np.inf)), (0,)),
        "high": lax.reduce_max(lax.select(finite, flat, full(-np.inf)), (0,)),
        "zero": share(is_zero),
        "subnormal": share(is_small),
        "near_largest": share(lax.bitwise_and(finite, is_large)),
        "nonfinite": share(lax.bitwise_not(finite)),
    }
    if x.size and np.shape(x) in (np.shape(result), ()):
        at = position if np.shape(x) == np.shape(result) else 0
        fields["value"] = lax.dynamic_index_in_dim(flat, at, 0, keepdims=False)
    return _first(x), fields
