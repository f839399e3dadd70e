"""Training run that a user describes, and checks of it, with errors that show how to correct it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxmp import _core
from jaxmp._policies import _recipe
from jaxmp.errors import ValidationError

Metrics: TypeAlias = _core.ArrayLike | Mapping[str, _core.PyTree]


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

    state: _core.PyTree
    step: Callable[..., _core.PyTree]
    batches: Iterable[_core.PyTree]
    evaluate: Callable[..., Metrics]


# (recipe, seed) -> run.
MakeRun: TypeAlias = Callable[[_recipe.Recipe, int], TrainingRun]


RETURNED = "return jaxmp.TrainingRun(state=state, step=step, batches=batches, evaluate=evaluate)"


# ---------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------


def check_run(run: object, name: str) -> TrainingRun:
    """Returns what `make_run` returned, if it is a `TrainingRun` with functions and batches.

    Args:
      run: what it returned.
      name: the call, for error messages.

    Raises:
      ValidationError: if it is not.
    """
    if not isinstance(run, TrainingRun):
        raise ValidationError(
            f"{name} returned {type(run).__name__} instead of a jaxmp.TrainingRun. Return one:\n"
            f"    {RETURNED}"
        )
    for field, call in (("step", "step(state, batch)"), ("evaluate", "evaluate(state)")):
        value = getattr(run, field)
        if not callable(value):
            raise ValidationError(
                f"{name} returned a TrainingRun with {field}={value!r}, which is not a function. "
                f"Pass a function that is called as {call}:\n    {RETURNED}"
            )
    if isinstance(run.batches, Mapping) or not isinstance(run.batches, Iterable):
        raise ValidationError(
            f"{name} returned a TrainingRun whose batches are of type "
            f"{type(run.batches).__name__}. Pass a list, an array or a generator of batches."
        )
    return run


def check_state(old: _core.PyTree, new: _core.PyTree) -> None:
    """Checks that a step returns a state with the structure, shapes and dtypes of its argument.

    Raises:
      ValidationError: naming the first array that differs.
    """
    if path := first_difference(old, new):
        raise ValidationError(
            f"The step returned another state than it received; they differ in {path}. Return a "
            "state of the same type, with the same shapes and dtypes, such as "
            "state.apply_gradients(grads=grads)."
        )


def check_grads(params: _core.PyTree, grads: _core.PyTree) -> None:
    """Checks that gradients have the structure and the shapes of the parameters.

    Raises:
      ValidationError: naming the first gradient that differs.
    """
    wide = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), tree)
    if path := first_difference(_as_dict(wide(params)), _as_dict(wide(grads))):
        raise ValidationError(
            f"The gradients that the step returns differ from the parameters in {path}. Return "
            'those of all parameters: return state, {"loss": loss, "grads": grads}'
        )


def _as_dict(tree: _core.PyTree) -> dict[str, Any]:
    return {"/".join(path): leaf for path, leaf in _core.leaves_with_path(tree)}


def first_difference(expected: _core.PyTree, actual: _core.PyTree) -> str | None:
    """Returns the first difference of structure, shape or dtype; None if there is none.

    Example:
      >>> first_difference({"x": np.zeros(2)}, {"x": np.zeros(3)})
      "'x': float32[3] instead of float32[2]"
    """
    if type(expected) is not type(actual):
        return f"the type: {type(actual).__name__} instead of {type(expected).__name__}"
    old, new = (dict(_core.leaves_with_path(tree)) for tree in (expected, actual))
    for path in [*old, *(path for path in new if path not in old)]:
        name = repr("/".join(path)) if path else "the array"
        if path not in new:
            return f"{name}, which is missing"
        if path not in old:
            return f"{name}, which is new"
        before, after = _array_text(old[path]), _array_text(new[path])
        if before != after:
            return f"{name}: {after} instead of {before}"
    if jax.tree.structure(expected) != jax.tree.structure(actual):
        return "a static field, such as a function that is made again in each step"
    return None


def _array_text(leaf: Any) -> str:
    """Returns "float32[8,4]" for an array."""
    return f"{jnp.result_type(leaf)}[{','.join(map(str, jnp.shape(leaf)))}]"
