"""Table of Linen's layer classes."""

from __future__ import annotations

import dataclasses
import inspect

import flax.linen as nn

from jaxmp._flax._layer_table import CONV, DOT_GENERAL, PREFERRED, LayerTable, LayerTraits
from jaxmp.errors import CompositionError

_NORM = LayerTraits(is_norm=True, upcasts_params=True)
_DENSE = LayerTraits(casts_params=True, kernel="kernel", dot=DOT_GENERAL, outputs="features")
_CONV = LayerTraits(casts_params=True, kernel="kernel", dot=CONV)
_OTHER_DOT = LayerTraits(casts_params=True, kernel="kernel", dot=PREFERRED)

ROWS = {
    nn.Dense: _DENSE,
    nn.DenseGeneral: _DENSE,
    nn.Einsum: _OTHER_DOT,
    nn.Conv: _CONV,
    nn.ConvLocal: _CONV,
    nn.ConvTranspose: _OTHER_DOT,
    nn.Embed: LayerTraits(embedding="embedding"),
    nn.BatchNorm: _NORM,
    nn.LayerNorm: _NORM,
    nn.RMSNorm: _NORM,
    nn.GroupNorm: _NORM,
    nn.InstanceNorm: _NORM,
    nn.SpectralNorm: LayerTraits(upcasts_params=True),
    nn.WeightNorm: LayerTraits(upcasts_params=True),
    nn.MultiHeadDotProductAttention: LayerTraits(attention_fn="attention_fn", caches=("cache",)),
    nn.RNNCellBase: LayerTraits(is_cell=True),
    nn.RNN: LayerTraits(is_rnn=True),
    nn.Bidirectional: LayerTraits(is_rnn=True),
}


def _flax_dtype(cls: type) -> str:
    """Returns "dtype" if a class of Flax, not one of a user, defines that field."""
    for base in cls.__mro__:
        if "dtype" in inspect.get_annotations(base):
            return "dtype" if base.__module__.partition(".")[0] == "flax" else ""
    return ""


def _check_field(cls: type, argument: str, name: str) -> None:
    fields = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    if argument != "kernel" and name not in fields:
        own = [field for field in fields if field not in ("parent", "name")]
        raise CompositionError(
            f"jaxmp.register_layer({cls.__name__}, {argument}={name!r}): the class has no "
            f"field {name!r}. Its fields are {', '.join(map(repr, own)) or 'none'}. Add the field "
            f"to {cls.__name__}, for example {_FIELDS[argument].format(name)}."
        )


_FIELDS = {
    "dtype": "{}: Any = None",
    "dot_general": "{}: Callable = jax.lax.dot_general",
    "einsum": "{}: Callable = jax.numpy.einsum",
    "attention_fn": "{}: Callable = flax.linen.dot_product_attention",
}

LINEN_LAYERS = LayerTable(nn.Module, ROWS, _flax_dtype, _check_field)
