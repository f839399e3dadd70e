"""Arrays of FP8 dots that policies of `jax.checkpoint` can save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmp import _core
from jaxmp.errors import JaxmpError

# Name of the quantized operands (one byte per element) for a rematerialization policy such as
# `jax.checkpoint_policies.save_only_these_names`.
CHECKPOINT_NAME = "jaxmp_fp8"

# Names of results, without and with batch dimensions.
_RESULTS = "jaxmp_fp8_result", "jaxmp_fp8_batched_result"
_AMAX = "jaxmp_fp8_amax"
_KERNEL = "jaxmp_fp8_kernel"


def saveable(x: jax.Array, *, is_kernel: bool) -> jax.Array:
    """Names an array so that a policy of `jax.checkpoint` can save it."""
    return checkpoint_name(checkpoint_name(x, _KERNEL) if is_kernel else x, CHECKPOINT_NAME)


def named_values(values: jax.Array, *, is_kernel: bool) -> tuple[jax.Array, jax.Array]:
    """Names FP8 values; returns them for the backward pass and for the forward dot.

    The bytes are named, and bitcast back in a separate equation for each pass: `jax.checkpoint`
    applies `lax.reduce_precision` to saved values that the forward pass also reads, which turns
    E4M3 values from 248 up into NaN.
    """
    saved = saveable(lax.bitcast_convert_type(values, jnp.uint8), is_kernel=is_kernel)
    back = lambda: lax.bitcast_convert_type(saved, values.dtype)
    return back(), back()


def named_result(out: jax.Array, *, batched: bool) -> jax.Array:
    """Names the scaled result of a forward dot; see `checkpoint_policy`."""
    return checkpoint_name(out, _RESULTS[batched])


def named_amax(amax: jax.Array) -> jax.Array:
    """Names the amax of an operand of a forward dot, which `checkpoint_policy` saves."""
    return checkpoint_name(amax, _AMAX)


def checkpoint_policy(policy: Callable[..., Any], *, kernels: bool = False) -> Callable[..., Any]:
    """Returns a policy of `jax.checkpoint` that treats FP8 dots as `policy` treats other dots.

    An FP8 dot multiplies quantized operands and then applies their scales. A policy such as
    `dots_with_no_batch_dims_saveable` saves the result of each `lax.dot_general`, which is the
    product before the scales: the backward pass then applies them again. The returned policy saves
    the scaled product instead. With `CurrentScaling`, it also saves the amax of each operand, one
    number, which the backward pass would otherwise measure again. Programs without FP8 do not
    change.

    Args:
      policy: a function from `jax.checkpoint_policies`, or one with the same arguments.
      kernels: also save quantized kernels, in one byte per parameter. The backward pass would
        otherwise read the parameters and quantize them again. Inside a loop over layers, storing
        the kernels costs as much time as this saves.

    Returns:
      A policy for `jax.checkpoint`, `nn.remat` or `nnx.remat`.

    Raises:
      JaxmpError: if `policy` is not a function.

    Example:
      >>> policy = checkpoint_policy(jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
      >>> from jaxmp import fp8
      >>> layer = lambda x, w: jnp.tanh(fp8.dot_general()(x, w, (((1,), (0,)), ((), ()))))
      >>> layer = jax.checkpoint(layer, policy=policy)
      >>> layer(jnp.ones((16, 16)), jnp.eye(16)).shape
      (16, 16)
    """
    if not callable(policy):
        raise JaxmpError(
            f"fp8.checkpoint_policy: {policy!r} is not a function. Pass a policy of JAX: "
            "fp8.checkpoint_policy(jax.checkpoint_policies.nothing_saveable)."
        )

    saved = (_AMAX, _KERNEL) if kernels else (_AMAX,)

    def is_saved(primitive: Any, *args: Any, **params: Any) -> Any:
        if primitive is lax.dot_general_p and _core.is_fp8(args[0].dtype):
            return False
        name = params.get("name") if primitive.name == "name" else None
        if name in saved:
            return True
        if name in _RESULTS:
            batch = tuple(range(_RESULTS.index(name)))
            numbers = (((), ()), (batch, batch))
            if saves := policy(lax.dot_general_p, *args, *args, dimension_numbers=numbers):
                return saves
        return policy(primitive, *args, **params)

    return is_saved
