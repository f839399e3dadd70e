"""Training run that a user describes for a validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from jaxmp._core._typing import ArrayLike, PyTree
from jaxmp._recipe import Recipe

Metrics: TypeAlias = ArrayLike | Mapping[str, PyTree]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """Training run with one recipe and one seed, which `make_run(recipe, seed)` returns.

    Every recipe has to get the same initial parameters and the same batches for the same seed, so
    `make_run` makes both from the seed alone; `validate` compares checksums of both. `step` and
    `evaluate` are traced by `jax.jit`. They may read the seed only through the state and the
    batches; otherwise the step is compiled again for every seed.

    Args:
      state: initial train state: a pytree such as `jaxmp.TrainState`, or a tuple of NNX objects,
        `(model, optimizer)`.
      step: `step(state, batch)` returns `(new_state, metrics)`. With NNX objects,
        `step(model, optimizer, batch)` updates them and returns `metrics`. The metrics are the
        scalar loss, or a dict with `"loss"` and, if gradients are to be compared, `"grads"`: the
        unscaled gradients that the optimizer receives.
      batches: batches in the order of training, at least as many as there are steps.
      evaluate: `evaluate(state)`, with NNX objects `evaluate(model, optimizer)`, returns the loss
        on held-out data, or a dict of metrics such as `{"loss": ..., "accuracy": ...}`. It is
        called eagerly if JAX cannot trace it.

    Example:
      >>> def make_run(recipe, seed):
      ...     x = jax.random.normal(jax.random.key(seed), (9, 4, 2))
      ...     model = nn.Dense(1)
      ...     params = model.init(jax.random.key(seed), x[0])
      ...     apply = recipe.wrap(model).apply
      ...     tx = recipe.optimizer(optax.sgd(0.1))
      ...     state = jaxmp.TrainState.create(apply_fn=apply, params=params, tx=tx)
      ...     def loss_fn(params, x):
      ...         return jnp.mean((apply(params, x)[:, 0] - x[:, 0]) ** 2)
      ...     def step(state, x):
      ...         loss, grads = state.value_and_grad(loss_fn)(x)
      ...         return state.apply_gradients(grads=grads), {"loss": loss, "grads": grads}
      ...     def evaluate(state):
      ...         return loss_fn(state.params, x[-1])
      ...     return jaxmp.TrainingRun(state=state, step=step, batches=x[:-1], evaluate=evaluate)
      >>> run = make_run(jaxmp.load_recipe("bf16"), seed=0)
      >>> _, metrics = run.step(run.state, run.batches[0])
      >>> metrics["loss"].dtype
      dtype('float32')
    """

    state: PyTree
    step: Callable[..., PyTree]
    batches: Iterable[PyTree]
    evaluate: Callable[..., Metrics]


# (recipe, seed) -> run.
MakeRun: TypeAlias = Callable[[Recipe, int], TrainingRun]
