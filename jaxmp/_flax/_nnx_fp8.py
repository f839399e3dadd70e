"""State of the FP8 dots of NNX layers."""

from __future__ import annotations

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmp._flax._fp8_layers import PREFIX, LayerDot, LayerEinsum, init_state, state_names
from jaxmp._flax._layer_table import LayerTraits
from jaxmp._flax._nnx_layers import matrix_sizes
from jaxmp.errors import CompositionError
from jaxmp.fp8._overwritten import OVERWRITE


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


# A bridge may have converted a Linen model with such a state before this module was imported.
nnx.register_variable_name(OVERWRITE, OverwriteWithGradient, overwrite=True)


def is_stateful(value: object) -> TypeGuard[LayerDot | LayerEinsum]:
    """Returns True for an FP8 dot that reads and writes a state."""
    return isinstance(value, (LayerDot, LayerEinsum)) and value.scaling.is_stateful


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
    present = {name for name, value in vars(module).items() if _is_state(name, value)}
    shapes = {name: vars(module)[name].get_raw_value().shape for name in present}
    if shapes == {name: leaf.shape for name, leaf in required.items()}:
        return
    for name in present:
        delattr(module, name)
    for name, leaf in required.items():
        setattr(module, name, OverwriteWithGradient(leaf))


def _is_state(name: str, value: object) -> bool:
    return name.startswith(PREFIX) and isinstance(value, OverwriteWithGradient)


def _init_state(
    module: nnx.Module, traits: LayerTraits, dot: LayerDot | LayerEinsum
) -> dict[str, Any]:
    """Returns the state of a layer before its first step; {} if the layer never runs in FP8.

    It does not depend on the device or the compile target, so checkpoints are portable.
    """
    kernel = vars(module)[traits.kernel].get_raw_value()
    stack, k, n = (traits.kernel_sizes or matrix_sizes)(module, kernel.shape)
    if k % 16 or n % 16:
        return {}

    def init() -> dict[str, jax.Array]:
        state = init_state(dot.scaling)
        return {
            f"{PREFIX}{name}": jnp.broadcast_to(leaf, (*stack, *leaf.shape))
            for name, leaf in state.items()
        }

    # An abstract model gets an abstract state.
    return jax.eval_shape(init) if isinstance(kernel, jax.ShapeDtypeStruct) else init()


def read_fp8_state(module: nnx.Module, dot: LayerDot | LayerEinsum) -> dict[str, jax.Array]:
    """Returns the FP8 state of one layer; its gradient is its next value."""
    attributes, scaling = vars(module), type(dot.scaling).__name__
    names = state_names(dot.scaling)
    try:
        state = {name: attributes[f"{PREFIX}{name}"].get_value() for name in names}
    except KeyError:
        raise CompositionError(
            f"{scaling} finds no state for {dot.path!r}: its attributes {PREFIX}* have been "
            "removed. Apply the policy again: "
            "recipe.wrap(model)."
        ) from None
    first = state[names[0]]
    if jnp.ndim(first):
        raise CompositionError(
            f"The {scaling} state of {dot.path!r} belongs to {first.shape[0]} stacked "
            "layers, and the transformation that calls one of them does not split it. Specify its "
            "axis as well: nnx.StateAxes({nnx.Param: 0, jaxmp.nnx.OverwriteWithGradient: 0, "
            "...: None})."
        )
    return state
