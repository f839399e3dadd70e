"""Training runs of a Flax model, a loss function, batches and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.errors import InvalidRngError

from jaxmp import nnx as mp_nnx
from jaxmp._core._typing import ArrayLike, PyTree
from jaxmp._recipe import Recipe
from jaxmp._train_state import TrainState
from jaxmp._validate._run import MakeRun, TrainingRun, check_model_arguments
from jaxmp.errors import ValidationError

ModelLike: TypeAlias = nn.Module | Callable[[int], nn.Module | nnx.Module]
# loss_fn(model, batch) -> scalar loss. A Linen model is bound to its variables.
LossFn: TypeAlias = Callable[[Any, Any], ArrayLike]


def make_model_runs(
    model: ModelLike,
    loss_fn: LossFn,
    batches: Callable[[int], Iterable[PyTree]] | Iterable[PyTree],
    optimizer: optax.GradientTransformation,
    held_out: Sequence[PyTree],
) -> MakeRun:
    """Returns a `make_run` for a model without mutable collections.

    Args:
      model: a Linen module, or a function from the seed to a Linen or NNX module.
      loss_fn: `loss_fn(model, batch)` returns the mean loss, in both frameworks.
      batches: the batches, or a function from the seed to the batches.
      optimizer: an optax transformation.
      held_out: batches of which the mean loss is the held-out loss.

    Raises:
      ValidationError: if an argument has another type.
    """
    check_model_arguments(model, loss_fn, batches, optimizer, held_out)

    def make_run(recipe: Recipe, seed: int) -> TrainingRun:
        made = model if isinstance(model, nn.Module) else model(seed)
        stream = batches(seed) if callable(batches) else batches
        tx = recipe.optimizer(optimizer)
        if isinstance(made, nn.Module):
            state, step, loss = _linen_run(recipe, seed, made, loss_fn, tx, held_out[0])
        else:
            state, step, loss = _nnx_run(recipe, made, loss_fn, tx)

        def evaluate(*state: PyTree) -> dict[str, PyTree]:
            losses = [jnp.asarray(each, np.float32) for each in loss(*state, held_out)]
            return {"loss": jnp.mean(jnp.stack(losses))}

        return TrainingRun(state=state, step=step, batches=stream, evaluate=evaluate)

    return make_run


# State, step, and a function of the state and the held-out batches that returns their losses.
_Parts: TypeAlias = tuple[PyTree, Callable[..., PyTree], Callable[..., list[ArrayLike]]]


def _linen_run(
    recipe: Recipe, seed: int, model: Any, loss_fn: LossFn, tx: Any, batch: PyTree
) -> _Parts:
    wrapped = recipe.wrap(model)
    # The wrapped model may have FP8 state in addition to the parameters.
    init = lambda module: nn.init(loss_fn, module)(jax.random.key(seed), batch)
    variables = init(wrapped)
    variables = {**variables, "params": init(model)["params"]}
    others = set(variables) - {"params", "_overwrite_with_gradient"}
    if others:
        raise ValidationError(
            f"The model has the mutable collections {sorted(others)}, which this form does not "
            "train. Pass a function make_run(recipe, seed) that returns a jaxmp.TrainingRun."
        )
    apply = nn.apply(loss_fn, wrapped)
    state = TrainState.create(apply_fn=wrapped.apply, params=variables, tx=tx)

    def call(variables: PyTree, batch: PyTree) -> jax.Array:
        try:
            return apply(variables, batch)
        except InvalidRngError as error:
            raise ValidationError(
                f"The model draws random numbers, for which this form passes no keys ({error}). "
                "Pass a function make_run(recipe, seed) that returns a jaxmp.TrainingRun, and pass "
                "the keys in its step: model.apply(params, x, rngs={'dropout': key})."
            ) from None

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, PyTree]]:
        loss, grads = state.value_and_grad(call)(batch)
        return state.apply_gradients(grads=grads), {"loss": loss, "grads": grads}

    return state, step, lambda state, batches: [call(state.params, batch) for batch in batches]


def _nnx_run(recipe: Recipe, model: Any, loss_fn: LossFn, inner: Any) -> _Parts:
    if not isinstance(model, nnx.Module):
        raise ValidationError(
            f"The model is a {type(model).__name__}, not a Flax module. Pass a Linen module, or a "
            "function: model=lambda seed: Net(rngs=nnx.Rngs(seed))."
        )
    wrapped = recipe.wrap(model)
    tx = mp_nnx.Optimizer(wrapped, inner)

    def step(model: nnx.Module, tx: mp_nnx.Optimizer, batch: PyTree) -> dict[str, PyTree]:
        loss, grads = tx.value_and_grad(loss_fn)(model, batch)
        tx.update(model, grads)
        return {"loss": loss, "grads": grads}

    def losses(model: nnx.Module, tx: Any, batches: Sequence[PyTree]) -> list[ArrayLike]:
        del tx
        # Without dropout and with running averages, where the model has them.
        fixed = nnx.view(
            model, raise_if_not_found=False, deterministic=True, use_running_average=True
        )
        return [loss_fn(fixed, batch) for batch in batches]

    return (wrapped, tx), step, losses
