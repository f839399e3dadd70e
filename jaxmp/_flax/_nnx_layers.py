"""Table of NNX's layer classes."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.filterlib import Filter

from jaxmp._flax._fp8_layers import LayerDot, LayerEinsum, einsum_sizes, is_stateful
from jaxmp._flax._layer_table import (
    CONV,
    DOT_GENERAL,
    EINSUM_OP,
    PREFERRED,
    LayerTable,
    LayerTraits,
    is_flax,
)
from jaxmp.errors import CompositionError
from jaxmp.fp8 import _overwritten, _state

# ---------------------------------------------------------------------------
# Sizes of kernels
# ---------------------------------------------------------------------------

Sizes = tuple[tuple[int, ...], int, int]


def _linear_sizes(module: nnx.Linear | nnx.LinearGeneral, shape: tuple[int, ...]) -> Sizes:
    inputs, outputs = np.atleast_1d(module.in_features), np.atleast_1d(module.out_features)
    batch = getattr(module, "batch_axis", {}).values()
    stack, _ = _unstacked(shape, (*batch, *inputs.tolist(), *outputs.tolist()))
    return stack, int(np.prod(inputs)), int(np.prod(outputs))


def _einsum_sizes(module: nnx.Einsum, shape: tuple[int, ...]) -> Sizes:
    stack, own = _unstacked(shape, tuple(module.kernel_shape))
    if module.einsum_str is None:
        return stack, 0, 0
    k, n, exclusion = einsum_sizes(module.einsum_str, None, own)
    return stack, (1 if exclusion else k), n


def _unstacked(
    shape: tuple[int, ...], own: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns a kernel's shape as (axes that a transformation added, its own axes)."""
    left, added = list(own), []
    for size in reversed(shape):
        if left and left[-1] == size:
            left.pop()
        else:
            added.insert(0, size)
    return ((), own) if left else (tuple(added), own)


# ---------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------

_NORM = LayerTraits(is_norm=True, upcasts_params=True)
_WEIGHT_NORM = LayerTraits(upcasts_params=True)
_LINEAR = LayerTraits(
    kernel="kernel", dot=DOT_GENERAL, kernel_sizes=_linear_sizes, outputs="out_features"
)

ROWS = {
    nnx.Linear: _LINEAR,
    nnx.LinearGeneral: _LINEAR,
    nnx.Einsum: LayerTraits(kernel="kernel", dot=EINSUM_OP, kernel_sizes=_einsum_sizes),
    nnx.Conv: LayerTraits(kernel="kernel", dot=CONV),
    nnx.ConvTranspose: LayerTraits(kernel="kernel", dot=PREFERRED),
    nnx.Embed: LayerTraits(embedding="embedding"),
    nnx.BatchNorm: _NORM,
    nnx.LayerNorm: _NORM,
    nnx.RMSNorm: _NORM,
    nnx.GroupNorm: _NORM,
    nnx.InstanceNorm: _NORM,
    nnx.SpectralNorm: _WEIGHT_NORM,
    nnx.WeightNorm: _WEIGHT_NORM,
    nnx.MultiHeadAttention: LayerTraits(
        attention_fn="attention_fn", caches=("cached_key", "cached_value")
    ),
    nnx.RNNCellBase: LayerTraits(is_cell=True),
    nnx.RNN: LayerTraits(is_rnn=True),
    nnx.Bidirectional: LayerTraits(is_rnn=True),
}


def _flax_dtype(cls: type) -> str:
    """Returns "dtype" if a class of Flax, not one of a user, has that constructor argument."""
    bases = (base for base in cls.__mro__ if is_flax(base) and base not in nnx.Module.__mro__)
    constructors = (vars(base)["__init__"] for base in bases if "__init__" in vars(base))
    has_dtype = any("dtype" in inspect.signature(init).parameters for init in constructors)
    return "dtype" if has_dtype else ""


def check_attributes(module: nnx.Module, traits: LayerTraits, path: str) -> None:
    """Checks that a module has the attributes that its class was registered with.

    Raises:
      CompositionError: with the attribute, the path and the fix.
    """
    registered = None if traits.registered is None else traits.registered()
    if registered is None:
        return
    examples = {traits.dtype: "dtype", traits.attention_fn: "flax.nnx.dot_product_attention"}
    if traits.dot is not None:
        is_einsum = traits.dot.fp8 is EINSUM_OP.fp8
        examples[traits.dot.name] = "jax.numpy.einsum" if is_einsum else "jax.lax.dot_general"
    for name, example in examples.items():
        if name and name not in vars(module):
            raise CompositionError(
                f"{registered.__name__} was registered with an attribute {name!r}, but the "
                f"{type(module).__name__} at {path!r} has none. Set it in __init__: "
                f"self.{name} = {example}."
            )


NNX_LAYERS = LayerTable(nnx.Module, ROWS, _flax_dtype)


# ---------------------------------------------------------------------------
# FP8 state of a layer
# ---------------------------------------------------------------------------


class OverwriteWithGradient(nnx.Variable):
    """Variable whose gradient is its next value, such as the state of `fp8.DelayedScaling`.

    It is not a parameter. `jaxmp.nnx.value_and_grad` differentiates it together with the
    parameters, but never scales, averages or clips it; `jaxmp.nnx.Optimizer.update` assigns it.
    Flax's bridges convert it to the Linen collection `_overwrite_with_gradient`.

    Example:
      >>> model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
      >>> model = jaxmp.load_recipe("fp8").replace(fp8="delayed").wrap(model)
      >>> nnx.state(model, OverwriteWithGradient)["fp8_age"][...].shape
      ()
    """


def trained(wrt: Filter) -> Filter:
    """Excludes state that is overwritten by its gradient, which is not a parameter."""
    return nnx.All(wrt, nnx.Not(OverwriteWithGradient))


# A bridge may have converted a Linen model with such a state before this module was imported.
nnx.register_variable_name(_overwritten.OVERWRITE, OverwriteWithGradient, overwrite=True)


def set_fp8_state(module: nnx.Module, traits: LayerTraits, changes: dict[str, Any]) -> None:
    """Adds the state that the dot of a layer requires, and removes state that it does not require.

    An existing state of the right shapes is kept. Like all other Variables it is shared with the
    model from which the module was copied.

    Args:
      module: the layer.
      traits: traits of its class.
      changes: the attributes that the policy of the layer replaces.
    """
    dots = [value for value in changes.values() if is_stateful(value)]
    required = _init_state(module, traits, dots[0]) if dots else {}
    present = {
        name: value.get_raw_value().shape
        for name, value in vars(module).items()
        if name.startswith(_state.PREFIX) and isinstance(value, OverwriteWithGradient)
    }
    if present == {name: leaf.shape for name, leaf in required.items()}:
        return
    for name in present:
        delattr(module, name)
    for name, leaf in required.items():
        setattr(module, name, OverwriteWithGradient(leaf))


def _init_state(
    module: nnx.Module, traits: LayerTraits, dot: LayerDot | LayerEinsum
) -> dict[str, Any]:
    """Returns the state of a layer before its first step; {} if the layer never runs in FP8.

    It does not depend on the device or the compile target, so checkpoints are portable.
    """
    kernel = vars(module)[traits.kernel].get_raw_value()
    if traits.kernel_sizes is None:  # [..., inputs, outputs]
        stack, k, n = kernel.shape[:-2], *kernel.shape[-2:]
    else:
        stack, k, n = traits.kernel_sizes(module, kernel.shape)
    if k % 16 or n % 16:
        return {}

    init = lambda: {
        f"{_state.PREFIX}{name}": jnp.broadcast_to(leaf, (*stack, *leaf.shape))
        for name, leaf in _state.init_state(dot.scaling).items()
    }
    # An abstract model gets an abstract state.
    return jax.eval_shape(init) if isinstance(kernel, jax.ShapeDtypeStruct) else init()


def read_fp8_state(module: nnx.Module, dot: LayerDot | LayerEinsum) -> dict[str, jax.Array]:
    """Returns the FP8 state of one layer; its gradient is its next value."""
    attributes, scaling = vars(module), type(dot.scaling).__name__
    try:
        state = {name: attributes[f"{_state.PREFIX}{name}"].get_value() for name in _state.NAMES}
    except KeyError:
        raise CompositionError(
            f"{scaling} finds no state for {dot.path!r}: its attributes {_state.PREFIX}* have been "
            "removed. Apply the policy again: "
            "recipe.wrap(model)."
        ) from None
    first = state[_state.NAMES[0]]
    if jnp.ndim(first):
        raise CompositionError(
            f"The {scaling} state of {dot.path!r} belongs to {first.shape[0]} stacked "
            "layers, and the transformation that calls one of them does not split it. Specify its "
            "axis as well: nnx.StateAxes({nnx.Param: 0, jaxmp.nnx.OverwriteWithGradient: 0, "
            "...: None})."
        )
    return state
