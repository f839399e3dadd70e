"""FP8 dots for the layers of Flax models whose policy sets `matmul = "fp8"`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._core._wide_dot import wide_product
from jaxmp.errors import JaxmpError
from jaxmp.fp8._dims import make_dims
from jaxmp.fp8._dot_general import dot_general
from jaxmp.fp8._einsum import einsum, plan_einsum
from jaxmp.fp8._explain import decide
from jaxmp.fp8._scaling import Scaling

# ---------------------------------------------------------------------------
# Dots
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LayerProduct:
    """Replacement of a Flax layer's `dot_general`. Hashable; ignores `path` and `state`."""

    scaling: Scaling
    # Result dtype; None: `preferred_element_type`, or by default the dtype of the operands.
    wide: Any = None
    path: str = dataclasses.field(default="", compare=False)
    # Returns the layer's state; None for a scaling without state.
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
        if decide(self.scaling, self.path, sizes(dims.contract[1]), sizes(dims.free(1))):
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
    """Replacement of a Flax layer's `jnp.einsum`. Hashable; ignores `path` and `state`."""

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
        if decide(self.scaling, self.path, k, n, why):
            wide = preferred_element_type if self.wide is None else self.wide
            if self.state is not None:
                options["state"] = self.state()
            return einsum(self.scaling)(equation, lhs, rhs, precision, wide, **options)
        product = functools.partial(jnp.einsum, equation, precision=precision, **options)
        return _plain(product, lhs, rhs, self.wide, preferred_element_type)


def einsum_sizes(
    equation: str, ndim: int | None, kernel_shape: tuple[int, ...]
) -> tuple[int, int, str]:
    """Returns the input and output features of an einsum layer.

    Args:
      equation: einsum equation of an input and a kernel.
      ndim: rank of the input; None: assume that an ellipsis covers one axis.
      kernel_shape: shape of the kernel.

    Returns:
      `(k, n, "")`, or `(0, 0, why)` with the reason why a single dot cannot compute the equation.
    """
    if ndim is None:
        term = equation.replace(" ", "").partition(",")[0]
        ndim = len(term.replace("...", "."))
    try:
        (_, contract), (_, batch) = plan_einsum(equation, ndim, len(kernel_shape)).numbers
    except JaxmpError as error:
        return 0, 0, str(error)
    k = math.prod(kernel_shape[axis] for axis in contract)
    n = math.prod(kernel_shape) // max(k * math.prod(kernel_shape[axis] for axis in batch), 1)
    return k, n, ""


def _plain(product: Callable[..., jax.Array], lhs: Any, rhs: Any, wide: Any, preferred: Any) -> Any:
    """Computes the dot without FP8."""
    if wide is not None and lhs.dtype == rhs.dtype != wide:
        return wide_product(product, lhs, rhs, wide)
    return product(lhs, rhs, preferred_element_type=preferred)
