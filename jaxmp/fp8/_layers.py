"""Products for the layers of Flax models, under a recipe that says `matmul = "fp8"`."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp import _compat
from jaxmp._products import wide_product
from jaxmp.errors import CompositionError, JaxmpError
from jaxmp.fp8._dims import make_dims
from jaxmp.fp8._dot_general import dot_general
from jaxmp.fp8._einsum import einsum, plan_einsum
from jaxmp.fp8._eligible import why_not
from jaxmp.fp8._recipes import Scaling, as_recipe

# ---------------------------------------------------------------------------
# Decisions
# ---------------------------------------------------------------------------


class LayerDecision(NamedTuple):
    """Whether one linear layer runs in FP8, and why not."""

    # The module's path.
    path: str
    # Inputs and outputs of the layer; 0 where they cannot be told.
    k: int
    n: int
    # "" for layers in FP8.
    why_not: str


_record: contextvars.ContextVar[list[LayerDecision] | None] = contextvars.ContextVar(
    "jaxmp_fp8_record", default=None
)


def explain(
    fn: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any
) -> tuple[LayerDecision, ...]:
    """Which linear layers run in FP8, of those for which a recipe says `matmul = "fp8"`.

    Layers that a rule keeps out are not among them. Nothing is computed.

    Args:
      fn: calls a policied Flax model: the function that you would jit, not the jitted one, whose
        trace JAX may have kept.
      *args, **kwargs: what it is called with: arrays, or their shapes.
      target: "gpu" to decide as for an NVIDIA GPU, "cpu"; None: the device that is there.

    Returns:
      A row for each layer, in the order in which they are called.

    Example:
      >>> model = jaxmp.linen.apply_policy(nn.Dense(10), "p=f32,c=bf16,matmul=fp8")
      >>> variables = model.init(jax.random.key(0), jnp.ones((2, 32)))
      >>> explain(model.apply, variables, jnp.ones((2, 32)))[0].why_not
      'N = 10 is no multiple of 16'
    """
    rows: list[LayerDecision] = []
    token = _record.set(rows)
    try:
        # Another function each time: JAX keeps the traces of those that it has seen.
        fresh = lambda *args, **kwargs: fn(*args, **kwargs)
        if target is None:
            jax.eval_shape(fresh, *args, **kwargs)
        else:
            with _compat.context(target=target):
                jax.eval_shape(fresh, *args, **kwargs)
    finally:
        _record.reset(token)
    return tuple(rows)


def _decide(scaling: Scaling, path: str, k: int, n: int, why: str = "") -> bool:
    """Whether a layer runs in FP8; on record."""
    target = _compat.target()
    if target == "gpu" and not scaling.emulate:
        _check_device(path)
    why = why or why_not(max(k, 1), max(n, 1), scaling, "cpu" if scaling.emulate else target)
    rows = _record.get()
    if rows is not None:
        rows.append(LayerDecision(path, k, n, why))
    return not why


def _check_device(path: str) -> None:
    """Refuses a GPU that is there and has no FP8 products (before compute capability 8.9)."""
    if _compat.current_context().target is not None:
        return  # a card that need not be there; the audit of the compiled program judges
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", "") or "")
    parts = capability.split(".")
    known = len(parts) == 2 and all(part.isdigit() for part in parts)
    if known and tuple(map(int, parts)) < (8, 9):
        raise CompositionError(
            f'matmul = "fp8" for {path!r}: {device.device_kind} (compute capability '
            f"{capability}) has no FP8 products, which begin with 8.9. Use the recipe without "
            'it, such as "bf16"; to round as FP8 does and multiply in 16 bits, write\n'
            "    [fp8]\n    emulate = true"
        )


def layer_scaling(scaling: Any, *, has_state: bool = False) -> Scaling:
    """The scaling of a model's layers; None: current scaling.

    Args:
      scaling: of the policies.
      has_state: whether the layers can keep a state.

    Raises:
      CompositionError: if it needs a state, and the layers keep none.
    """
    scaling = as_recipe(scaling)
    if scaling.is_stateful and not has_state:
        raise CompositionError(
            f"{type(scaling).__name__} needs a state for each layer, which NNX models do not carry "
            "in this version. Use fp8.CurrentScaling(), or fp8.dot_general with a state of your "
            "own."
        )
    return scaling


# ---------------------------------------------------------------------------
# Products
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LayerProduct:
    """In the place of a Flax layer's `dot_general`. Hashable; path and state are no part of it."""

    scaling: Scaling
    # The dtype of the result; None: that of the operands.
    wide: Any = None
    path: str = dataclasses.field(default="", compare=False)
    # Reads the layer's state, where its scaling has one.
    state: Callable[[], Any] | None = dataclasses.field(default=None, compare=False)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        **options: Any,
    ) -> jax.Array:
        dims = make_dims(lhs, rhs, dimension_numbers)
        sizes = lambda axes: math.prod(rhs.shape[axis] for axis in axes)
        if _decide(self.scaling, self.path, sizes(dims.contract[1]), sizes(dims.free(1))):
            wide = preferred_element_type if self.wide is None else self.wide
            if self.state is not None:
                options["state"] = self.state()
            return dot_general(self.scaling)(
                lhs, rhs, dimension_numbers, precision, wide, **options
            )
        product = functools.partial(
            lax.dot_general, dimension_numbers=dimension_numbers, precision=precision, **options
        )
        return _plain(product, lhs, rhs, self.wide, preferred_element_type)


@dataclasses.dataclass(frozen=True)
class LayerEinsum:
    """In the place of a Flax layer's `jnp.einsum`. Hashable; path and state are no part of it."""

    scaling: Scaling
    wide: Any = None
    path: str = dataclasses.field(default="", compare=False)
    state: Callable[[], Any] | None = dataclasses.field(default=None, compare=False)

    def __call__(
        self,
        equation: str,
        lhs: jax.Array,
        rhs: jax.Array,
        precision: Any = None,
        preferred_element_type: Any = None,
        **options: Any,
    ) -> jax.Array:
        k = n = 0
        try:
            (_, contract), (_, batch) = plan_einsum(equation, lhs.ndim, rhs.ndim).numbers
        except JaxmpError as error:
            why = str(error)
        else:
            why = ""
            k = math.prod(rhs.shape[axis] for axis in contract)
            n = rhs.size // max(k * math.prod(rhs.shape[axis] for axis in batch), 1)
        if _decide(self.scaling, self.path, k, n, why):
            wide = preferred_element_type if self.wide is None else self.wide
            if self.state is not None:
                options["state"] = self.state()
            return einsum(self.scaling)(equation, lhs, rhs, precision, wide, **options)
        product = functools.partial(jnp.einsum, equation, precision=precision, **options)
        return _plain(product, lhs, rhs, self.wide, preferred_element_type)


def _plain(product: Callable[..., jax.Array], lhs: Any, rhs: Any, wide: Any, preferred: Any) -> Any:
    """The product as it would be without FP8."""
    if wide is not None and lhs.dtype == rhs.dtype != wide:
        return wide_product(product, lhs, rhs, wide)
    return product(lhs, rhs, preferred_element_type=preferred)
