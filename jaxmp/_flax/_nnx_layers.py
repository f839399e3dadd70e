"""Table of NNX's layer classes."""

from __future__ import annotations

import inspect

import numpy as np
from flax import nnx

from jaxmp._flax._fp8_layers import einsum_sizes
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


def matrix_sizes(module: nnx.Module, shape: tuple[int, ...]) -> Sizes:
    """Returns the sizes of a kernel `[..., inputs, outputs]`."""
    del module
    return shape[:-2], shape[-2], shape[-1]


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
    if traits.registered is None:
        return
    examples = {traits.dtype: "dtype", traits.attention_fn: "flax.nnx.dot_product_attention"}
    if traits.dot is not None:
        is_einsum = traits.dot.fp8 is EINSUM_OP.fp8
        examples[traits.dot.name] = "jax.numpy.einsum" if is_einsum else "jax.lax.dot_general"
    for name, example in examples.items():
        if name and name not in vars(module):
            raise CompositionError(
                f"{traits.registered.__name__} was registered with an attribute {name!r}, but the "
                f"{type(module).__name__} at {path!r} has none. Set it in __init__: "
                f"self.{name} = {example}."
            )


NNX_LAYERS = LayerTable(nnx.Module, ROWS, _flax_dtype)
