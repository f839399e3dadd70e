"""Dtypes of the gradient computation, recorded in the state of an optimizer."""

from __future__ import annotations

import dataclasses

import jax
import optax

from jaxmp._core._dtypes import sum_dtype
from jaxmp._core._typing import DTypeLike, PyTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class GradientDtypes:
    """Settings of the gradient computation.

    Attributes:
      accumulate_dtype: name of the dtype in which microbatches are accumulated.
      reduce_dtype: name of the dtype in which gradients are averaged over devices.
      regather: True if split weights are gathered again in the backward pass.
    """

    accumulate_dtype: str
    reduce_dtype: str
    regather: bool = True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientDtypesState:
    """State of `gradient_dtypes`.

    Attributes:
      inner_state: the state of the inner transformation.
      dtypes: the dtypes (static).
    """

    inner_state: PyTree
    dtypes: GradientDtypes = dataclasses.field(metadata={"static": True})


def gradient_dtypes(
    inner: optax.GradientTransformation,
    *,
    accumulate_dtype: DTypeLike = "float32",
    reduce_dtype: DTypeLike = "float32",
    regather: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Records the dtypes of the gradient computation, and passes everything to `inner`.

    The `value_and_grad` of a train state or NNX optimizer reads them as its defaults. They are in
    the optimizer state because a recipe reaches a train state only through its optimizer.

    Args:
      inner: any optax transformation.
      accumulate_dtype: dtype in which `value_and_grad` accumulates microbatches.
      reduce_dtype: dtype in which it averages gradients over devices.
      regather: gather split weights again in the backward pass, instead of keeping them.

    Returns:
      An optax transformation with a `GradientDtypesState`.

    Raises:
      PolicyError: for an unknown dtype, or one that is too narrow for sums.

    Example:
      >>> tx = gradient_dtypes(optax.sgd(0.1), accumulate_dtype="bfloat16")
      >>> tx.init(jnp.ones(2)).dtypes.accumulate_dtype
      'bfloat16'
    """
    inner = optax.with_extra_args_support(inner)
    dtypes = GradientDtypes(
        sum_dtype(accumulate_dtype).name, sum_dtype(reduce_dtype).name, regather
    )

    def init_fn(params: PyTree) -> PyTree:
        return GradientDtypesState(inner.init(params), dtypes)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        emitted, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        return emitted, GradientDtypesState(inner_state, state.dtypes)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
