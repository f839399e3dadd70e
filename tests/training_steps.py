"""Train states of any parameters, and training steps of a loss function."""

import optax

import jaxmp


def with_small_scale(recipe):
    """Returns a recipe under which the first float16 gradients do not overflow, as at 2**16."""
    recipe = jaxmp.load_recipe(recipe)
    if not isinstance(recipe.loss_scale, jaxmp.DynamicLossScale):
        return recipe
    return recipe.replace(loss_scale=jaxmp.DynamicLossScale(init_scale=2.0**8))


def new_state(params, recipe, inner=None, *, apply_fn=None, axis_name=None, **changes):
    """Returns a train state of parameters under a recipe, of which settings are replaced.

    Args:
      params: the parameters, or all variables of a model.
      recipe: the recipe, or what names one.
      inner: the optimizer of optax; None for `optax.sgd(0.1)`.
      apply_fn: the function of the model.
      axis_name: the mapped axis over which the optimizer averages.
      **changes: settings that replace those of the recipe.
    """
    recipe = jaxmp.load_recipe(recipe).replace(**changes)
    tx = recipe.optimizer(optax.sgd(0.1) if inner is None else inner, axis_name=axis_name)
    return jaxmp.TrainState.create(apply_fn=apply_fn, params=params, tx=tx)


def state_step(loss_fn, **options):
    """Returns a step of a train state and a batch, with `options` of its `value_and_grad`."""

    def step(state, *batch):
        loss, grads = state.value_and_grad(loss_fn, **options)(*batch)
        return state.apply_gradients(grads=grads), loss

    return step


def nnx_step(loss_fn, **options):
    """Returns a step of an NNX model, its optimizer and a batch, which updates both."""

    def step(model, optimizer, *batch):
        loss, grads = optimizer.value_and_grad(loss_fn, **options)(model, *batch)
        optimizer.update(model, grads)
        return loss

    return step
