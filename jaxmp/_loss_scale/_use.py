"""Warns of float16 trainings whose parts do not fit, at their first call.

Model, gradient and optimizer are different objects, and the program that combines them is not known
to any of them. Each notes that it is present in this process, and warns if what it requires has
never been present.
"""

from __future__ import annotations

import dataclasses
import re
import warnings

from jaxmp.errors import RecipeWarning


@dataclasses.dataclass
class Present:
    """Parts of a float16 training that have been used in this process.

    Attributes:
      scale: a static or dynamic loss scale was made.
      scaled_gradient: a loss or gradient was scaled by one.
      float16: a policy that computes in float16 was applied, or a scaled loss contains float16.
      expects_float16: an optimizer was made whose policies compute in float16.
    """

    scale: bool = False
    scaled_gradient: bool = False
    float16: bool = False
    expects_float16: bool = False


present = Present()

_GRADIENTS = (
    "compute the gradients with it: loss, grads = state.value_and_grad(loss_fn)(batch) with a "
    "jaxmp.TrainState, optimizer.value_and_grad(loss_fn)(model, batch) with a jaxmp.nnx.Optimizer, "
    "or jaxmp.value_and_grad(loss_fn, loss_scale=jaxmp.get_loss_scale(opt_state))(params, batch)."
)


def check_scaled_step(expects_float16: bool) -> None:
    """Warns of an update whose gradients were not scaled, or not computed in float16.

    Args:
      expects_float16: the policies of the optimizer compute in float16.
    """
    if not present.scaled_gradient:
        _warn(
            "The optimizer has a loss scale, but no gradient has been scaled, so that small "
            "float16 gradients are lost. Instead of jax.value_and_grad or nnx.value_and_grad, "
            f"{_GRADIENTS}"
        )
    elif expects_float16 and not present.float16:
        _warn(
            "The recipe of the optimizer computes in float16, but it was not applied to a model "
            "or a function, and the loss contains no float16. Apply it: "
            "model = recipe.wrap(model), or loss_fn = jaxmp.autocast(loss_fn, recipe)."
        )


def check_float16_gradient() -> None:
    """Warns of a float16 model whose gradient is computed without a loss scale."""
    if not present.scale:
        _warn(
            "The gradient of a float16 model is computed, but this program has no loss scale, so "
            "that small gradients become zero. Make the optimizer with the recipe, "
            f"tx = recipe.optimizer(inner), and {_GRADIENTS} Or use the recipe 'bf16', which needs "
            "no loss scale."
        )


def contains_float16(program: object) -> bool:
    """Returns True if a traced program has a float16 array."""
    return re.search(r"\bf16\[", str(program)) is not None


def _warn(message: str) -> None:
    warnings.warn(message, RecipeWarning, stacklevel=3)
