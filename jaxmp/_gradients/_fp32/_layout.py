"""Weights that are split over devices, and where they are gathered.

A weight remains split until an operation reads all of it, such as a matmul. Casts, scales and other
operations on single elements come first, so that the weight is gathered in the dtype of the matmul:
16 bits, or FP8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmp import _core, _programs
from jaxmp._core import Array, _compat
from jaxmp._core._compat import ClosedJaxpr, JaxprEqn, Literal, Var
from jaxmp._programs import PROGRAM, Frame, Interpreter, Start

# Axes over which each dimension of an array is split.
_Entries: TypeAlias = tuple[Any, ...]

# Operations on single elements, which a device can apply to its part of a weight.
ELEMENTWISE = _core.named(
    "abs add bitcast_convert_type clamp convert_element_type copy div eq exp2 ge gt is_finite"
    " layout_constraint le lt max min mul name ne neg not or and optimization_barrier"
    " reduce_precision round select_n sign sub"
)
REDUCTIONS = frozenset({"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"})
_SHAPES = frozenset({"broadcast_in_dim", "reshape", "squeeze"})


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Sharding of a weight, and the sharding in which operations read it.

    stored: the sharding of the weight; None: unknown.
    gathered: its sharding in matmuls; None: unknown.
    batch_axes: mesh axes over which the batch is split, so that weights are gathered over them.
    again: gather again in the backward pass, instead of keeping the gathered weight.
    """

    stored: NamedSharding | None = None
    gathered: NamedSharding | None = None
    batch_axes: tuple[Any, ...] = ()
    again: bool = True

    @property
    def is_split(self) -> bool:
        """True if matmuls read the weight in another sharding than it has."""
        return self.stored not in (None, self.gathered) and self.stored.mesh.size > 1

    @property
    def is_explicit(self) -> bool:
        """True if the sharding is part of the type of the array."""
        return self.stored is not None and AxisType.Explicit in self.stored.mesh.axis_types

    def constrained(self, sharding: NamedSharding, ndim: int) -> WeightLayout:
        """Returns the layout of a weight after a sharding constraint.

        The first constraint is the sharding of the weight. If a second one leaves out some of its
        axes, matmuls read that sharding.
        """
        stored = _entries(sharding, ndim)
        gathered = (_without(entry, self.batch_axes) for entry in stored)
        new = self._with(sharding.mesh, stored, gathered)
        if self.stored is None or new.stored == self.stored:
            return new if self.stored is None else self
        own = zip(stored, _entries(self.stored, ndim), strict=True)
        if all(set(_names(entry)) <= set(_names(before)) for entry, before in own):
            return dataclasses.replace(self, gathered=new.stored)
        return new

    def moved(self, equation: JaxprEqn) -> WeightLayout | None:
        """Returns the layout after an operation that moves elements; None: it cannot be applied."""
        if self.stored is None or self.gathered is None:
            return self
        ndim = _programs.array_aval(equation.invars[0]).ndim
        stored, gathered = (
            _moved(equation, _entries(sharding, ndim)) for sharding in (self.stored, self.gathered)
        )
        if stored is None or gathered is None:
            return None
        return self._with(self.stored.mesh, stored, gathered)

    def unplaced(self) -> WeightLayout:
        """Returns the layout of an array whose sharding is unknown."""
        return WeightLayout(batch_axes=self.batch_axes, again=self.again)

    def of_a_slice(self, ndim: int) -> WeightLayout:
        """Returns the layout of `array[i]`, where the array has `ndim` dimensions."""
        if self.stored is None or self.gathered is None:
            return self
        first, *stored = _entries(self.stored, ndim)
        _, *gathered = _entries(self.gathered, ndim)
        if first is not None:
            return self.unplaced()
        return self._with(self.stored.mesh, stored, gathered)

    def _with(self, mesh: Any, stored: Iterable[Any], gathered: Iterable[Any]) -> WeightLayout:
        """Returns the layout with other axes of the dimensions, before and in matmuls."""
        on_mesh = lambda entries: NamedSharding(mesh, PartitionSpec(*entries))
        return dataclasses.replace(self, stored=on_mesh(stored), gathered=on_mesh(gathered))


def gathered(array: Array, layout: WeightLayout | None) -> Array:
    """Returns a weight in the sharding in which matmuls read it."""
    return gathered_again(as_stored(array, layout), layout)


def as_stored(array: Array, layout: WeightLayout | None) -> Array:
    """Constrains a weight, or its gradient, to the sharding of the weight.

    Otherwise XLA may gather the weight before it was cast.

    Backward passes that gather again must save this result. XLA (Shardy) replaces later uses of an
    array that two constraints follow by the result of the second one, which is the gathered weight.
    """
    if layout is None or not layout.is_split or layout.is_explicit:
        return array
    assert layout.stored is not None
    return lax.with_sharding_constraint(array, layout.stored)


def gathered_again(array: Array, layout: WeightLayout | None) -> Array:
    """Returns the result of `as_stored` in the sharding in which matmuls read it."""
    if layout is None or not layout.is_split:
        return array
    assert layout.gathered is not None
    if layout.is_explicit:
        return jax.reshard(array, layout.gathered)
    return lax.with_sharding_constraint(array, layout.gathered)


def as_gathered(array: Array, layout: WeightLayout | None) -> Array | jax.ShapeDtypeStruct:
    """Returns an array or the shape of one for tracing a function that reads a gathered weight."""
    if layout is None or not (layout.is_split and layout.is_explicit):
        return array
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=layout.gathered)


# ---------------------------------------------------------------------------
# Axes of the batch
# ---------------------------------------------------------------------------


def batch_axes(closed: ClosedJaxpr, is_param: list[bool]) -> tuple[Any, ...]:
    """Returns the mesh axes to which the first constrained activation splits its first dimension.

    Args:
      closed: traced loss function.
      is_param: for each argument, True for a parameter. Constraints of arrays that depend on
        parameters and constants alone do not count.
    """
    analysis = _BatchAxes()
    if "sharding_constraint" in _programs.primitives(closed):
        analysis.run(closed, is_param)
    return analysis.axes


class _BatchAxes(_programs.Forward):
    """For each variable, True if it depends on parameters and constants alone."""

    nothing = False

    def __init__(self) -> None:
        super().__init__()
        self.axes: tuple[Any, ...] = ()

    def literal(self, var: Literal) -> bool:
        return True

    def equation(self, equation: JaxprEqn, operands: list[bool], frame: Frame) -> list[bool]:
        if self.axes or all(operands):
            return [all(operands)] * len(equation.outvars)
        if equation.primitive.name == "sharding_constraint":
            sharding = _programs.sharding_of_result(equation)
            if isinstance(sharding, NamedSharding) and sharding.spec:
                self.axes = _names(sharding.spec[0])
        self.enter(equation, operands, frame)
        return self.bound(equation, operands)


# ---------------------------------------------------------------------------
# Partition specs
# ---------------------------------------------------------------------------


def _entries(sharding: NamedSharding, ndim: int) -> _Entries:
    spec = sharding.spec
    return (*spec, *(None,) * (ndim - len(spec)))


def _names(entry: object) -> tuple[Any, ...]:
    return () if entry is PartitionSpec.UNCONSTRAINED else _core.as_tuple(entry)


def _without(entry: object, axes: Sequence[object]) -> object:
    rest = tuple(name for name in _names(entry) if name not in axes)
    return rest if len(rest) > 1 else rest[0] if rest else None


def _moved(equation: JaxprEqn, entries: _Entries) -> _Entries | None:
    """Returns the entries of a partition spec after an operation; None if there are none."""
    dimensions = _programs.dimensions_of(equation)
    if dimensions is not None:
        return tuple(None if n is None else entries[n] for n in dimensions)
    name = equation.primitive.name
    avals: list[Any] = [equation.invars[0].aval, equation.outvars[0].aval]
    operand, result = (tuple(aval.shape) for aval in avals)
    if name == "reshape":
        return _reshaped(operand, result, entries)
    if name in ("slice", "dynamic_slice", "split", "unstack") and len(operand) == len(result):
        cut = (
            entry is not None and before != after
            for entry, before, after in zip(entries, operand, result, strict=True)
        )
        return None if any(cut) else entries
    return None


def _reshaped(
    operand: tuple[int, ...], result: tuple[int, ...], entries: _Entries
) -> _Entries | None:
    """Returns the entries after a reshape, if only leading dimensions of its groups are split."""
    before = [(n, size) for n, size in enumerate(operand) if size > 1]
    after = [(n, size) for n, size in enumerate(result) if size > 1]
    new: list[Any] = [None] * len(result)
    while before and after:
        (first, left), (target, right) = before.pop(0), after.pop(0)
        sizes = left, right
        while left != right:
            if left < right and before:
                n, size = before.pop(0)
                if entries[n] is not None:
                    return None
                left *= size
            elif right < left and after:
                right *= after.pop(0)[1]
            else:
                return None
        if entries[first] is not None and max(sizes) % min(sizes):
            return None
        new[target] = entries[first]
    return tuple(new)


# ---------------------------------------------------------------------------
# Functions of weights
# ---------------------------------------------------------------------------

# Mark of an array that a device can compute from its part of the weights and from scalars.
_LOCAL = WeightLayout()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Saved:
    """Weight that has not been gathered, and its layout: the backward pass gathers it again."""

    array: Array
    layout: WeightLayout = dataclasses.field(metadata={"static": True})


def whole(result: Array | Saved) -> Array:
    """Returns a result of `run_gathered` in the sharding in which matmuls read it."""
    return gathered(result.array, result.layout) if isinstance(result, Saved) else result


def run_gathered(
    closed: ClosedJaxpr, args: Sequence[Array], layouts: Sequence[WeightLayout | None]
) -> list[Array | Saved]:
    """Runs a jaxpr that is not differentiated, and gathers weights before their uses.

    Args:
      closed: the jaxpr.
      args: its arguments.
      layouts: for each argument, its layout if it is a weight that has not been gathered.

    Returns:
      The results. Weights that are gathered again in the backward pass are `Saved`.
    """
    results = _Gathering().run(closed, list(zip(args, layouts, strict=True)))
    return [
        Saved(array, mark) if mark is not None and mark.is_split else array
        for array, mark in results
    ]


_Marked: TypeAlias = tuple[Any, WeightLayout | None]


class _Gathered:
    """Arrays of one jaxpr that have been gathered, by the source of which they are bitcasts."""

    def __init__(self) -> None:
        self.sources: dict[Var, Var] = {}
        self.arrays: dict[tuple[Var, Any], Array] = {}

    def array(self, var: Var | Literal, value: _Marked) -> Array:
        """Returns an array in the sharding in which matmuls read it."""
        array, layout = value
        if isinstance(var, Literal) or layout is None or not layout.is_split:
            return array
        key = self.sources.get(var, var), array.dtype
        if key not in self.arrays:
            self.arrays[key] = gathered(array, layout)
        return self.arrays[key]


class _Gathering(Interpreter):
    """Interpreter whose values are arrays with the layouts of weights that are not gathered."""

    def constant(self, array: Array) -> _Marked:
        return array, None

    def literal(self, var: Literal) -> _Marked:
        return var.val, _LOCAL

    def run(self, jaxpr: Any, args: Sequence[Any], start: Start = PROGRAM) -> list[_Marked]:
        """Runs a jaxpr; the outermost one, whose results may be gathered, has no state."""
        own = _Gathered()
        results = super().run(jaxpr, args, start._replace(state=own))
        if start.state is not None:
            return results
        pairs = zip(_compat.jaxpr_body(jaxpr)[0].outvars, results, strict=True)
        return [
            (own.array(var, (array, mark)), None)
            if mark is not None and not mark.again
            else (as_stored(array, mark), mark)
            for var, (array, mark) in pairs
        ]

    def equation(self, equation: JaxprEqn, operands: list[_Marked], frame: Frame) -> list[_Marked]:
        own: _Gathered = frame.state
        if equation.primitive.name == "bitcast_convert_type":
            operand, result = equation.invars[0], equation.outvars[0]
            if isinstance(operand, Var) and isinstance(result, Var):
                own.sources[result] = own.sources.get(operand, operand)
        is_split = any(mark is not None and mark.is_split for _, mark in operands)
        if equation.primitive.name in _programs.CALLS and is_split:
            return self.enter(equation, operands, frame, state=own)
        if (
            equation.primitive.name in _programs.CUSTOM_DERIVATIVES
            and _programs.call_of(equation).is_empty
        ):
            # A function that returns arguments unchanged.
            out = self.bound(equation, [array for array, _ in operands])
            sources = _programs.returned_arguments(_programs.call_of(equation).jaxpr)
            marks = (None if n is None else operands[n][1] for n in sources)
            return list(zip(out, marks, strict=True))
        can_wait, mark = _mark(equation, operands)
        read = (lambda _, value: value[0]) if can_wait else own.array
        arrays = list(map(read, equation.invars, operands))
        if can_wait and mark is not None and mark.is_split:
            arrays = [_split_like(array, mark) for array in arrays]
        out = self.bound(equation, arrays)
        if mark is _LOCAL and any(m is not None and m.is_explicit for _, m in operands):
            out = list(map(_as_recorded_sharding, out, equation.outvars))
        return [(array, mark) for array in out]


def _split_like(array: Array, layout: WeightLayout) -> Array:
    """Gives an operand of a split weight the weight's sharding, on explicit axes."""
    stored = layout.stored
    if not layout.is_explicit or stored is None or jax.numpy.ndim(array) != len(stored.spec):
        return array
    entries = zip(stored.spec, jax.numpy.shape(array), strict=True)
    spec = PartitionSpec(*(entry if size > 1 else None for entry, size in entries))
    return array if jax.typeof(array).sharding.spec == spec else jax.reshard(array, spec)


def _as_recorded_sharding(array: Array, var: Var) -> Array:
    """Gives the result of a reduction the sharding that it has for a gathered weight."""
    aval: Any = var.aval
    return jax.reshard(array, aval.sharding.spec)


def _mark(equation: JaxprEqn, operands: Sequence[_Marked]) -> tuple[bool, WeightLayout | None]:
    """Returns True if an equation can read weights that are split, and the mark of its result."""
    name = equation.primitive.name
    is_local = all(mark is not None or jax.numpy.size(array) == 1 for array, mark in operands)
    layouts = {mark for _, mark in operands if mark is not None and mark.is_split}
    if not layouts:
        # A large array that was not made from weights or scalars is an activation.
        can_be_local = is_local and name in ELEMENTWISE | REDUCTIONS | {"broadcast_in_dim"}
        return True, _LOCAL if can_be_local else None
    if not is_local:
        return False, None
    (layout, *others) = layouts
    if name in REDUCTIONS or _is_reduction(equation):
        return True, _LOCAL
    if name in ELEMENTWISE and not others:
        return (True, layout) if _keeps_shape(equation, operands) else (False, None)
    moved = layout.moved(equation) if not others and operands[0][1] == layout else None
    return (True, moved) if moved is not None else (False, None)


def _is_reduction(equation: JaxprEqn) -> bool:
    """Returns True for a function with a custom batching rule that only reduces its arguments."""
    if equation.primitive.name != "custom_vmap_call":
        return False
    names = {inner.primitive.name for inner in _programs.equations_inside(equation)}
    return (
        not REDUCTIONS.isdisjoint(names)
        and names <= ELEMENTWISE | REDUCTIONS | _programs.CALLS | _SHAPES
    )


def _keeps_shape(equation: JaxprEqn, operands: Sequence[_Marked]) -> bool:
    shape = getattr(equation.outvars[0].aval, "shape", None)
    return all(
        jax.numpy.shape(array) == shape
        for array, mark in operands
        if mark is not None and mark.is_split
    )


# ---------------------------------------------------------------------------
# Properties of equations and jaxprs
# ---------------------------------------------------------------------------


def quantizes(equation: JaxprEqn) -> bool:
    """Returns True if a function casts to FP8."""
    return any(
        inner.primitive.name == "convert_element_type"
        and _core.is_fp8(_programs.new_dtype_of(inner))
        for inner in _programs.equations_inside(equation)
    )


def loops(equation: JaxprEqn) -> bool:
    """Returns True if a function contains a loop."""
    inside = _programs.equations_inside(equation)
    return any(inner.primitive.name in _programs.LOOPS for inner in inside)
