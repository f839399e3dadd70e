"""Gradients of parts of weights, which a loss gathers from the devices by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxmp import _core, _programs
from jaxmp._core import PyTree, _compat
from jaxmp._programs import Frame

_MOVES = _programs.EXACT | _core.named("add_any")
_PRODUCTS = _core.named("mul div")


class _SummedAxes(_programs.Forward):
    """Finds the mesh axes over which a backward pass has summed the gradient of a gathered part."""

    nothing = frozenset[Any]()

    def __init__(self, through: frozenset[str]) -> None:
        super().__init__()
        self.through = through

    def join(self, first: frozenset[Any], second: frozenset[Any]) -> frozenset[Any]:
        return first | second

    def equation(self, equation: _compat.JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        name = equation.primitive.name
        if name not in self.through:
            return self.enter(equation, operands, frame)
        axes = _programs.mesh_axes_of(equation) if name == "reduce_scatter" else ()
        return [frozenset(axes).union(*operands)] * len(equation.outvars)


def summed_axes(
    backward: Callable[[jax.Array], PyTree], cotangent: jax.Array, params: PyTree
) -> list[PyTree]:
    """Returns a tree with the mesh axes over which each gradient is a sum already; [] for none.

    In FSDP by hand, each device has another part of a weight, and `jax.lax.all_gather` is
    transposed to a sum over the devices, of which each receives its part.

    Args:
      backward: the result of `jax.vjp`.
      cotangent: of the loss.
      params: the differentiated arguments of the call. A parameter that all devices share is not a
        part of a weight, although activations that it scales may be gathered. If JAX does not track
        over which axes arrays vary, only a weight that is gathered as it is counts as one.
    """
    forward = getattr(backward, "jaxpr", None)
    names = () if forward is None else _programs.primitives(forward)
    # Most losses gather nothing, and are not traced again.
    if forward is not None and not any("all_gather" in name for name in names):
        return []
    traced = _programs.trace(backward, (cotangent,), {})
    arguments = [frozenset[Any]()] * len(traced.closed.jaxpr.invars)
    if _compat.is_in_unchecked_shard_map():
        return [traced.results(_SummedAxes(_MOVES).run(traced.closed, arguments))]
    axes = traced.results(_SummedAxes(_MOVES | _PRODUCTS).run(traced.closed, arguments))
    return [jax.tree.map(lambda x, summed: summed & _compat.varying_axes(x), params, axes)]
