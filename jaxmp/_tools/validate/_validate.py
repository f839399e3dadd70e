"""The function `validate`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.errors import InvalidRngError

from jaxmp._core import ArrayLike, PyTree
from jaxmp._flax._nnx_optimizer import Optimizer
from jaxmp._flax._train_state import TrainState
from jaxmp._policies import _load, _recipe
from jaxmp._tools.report import _progress, _views
from jaxmp._tools.validate import _budget, _driver, _report, _run
from jaxmp.errors import ValidationError

RecipesLike = Sequence[_load.RecipeLike] | Mapping[str, _load.RecipeLike]


def validate(
    make_run: _run.MakeRun | ModelLike,
    recipes: RecipesLike = ("bf16", "fp16", "fp8"),
    *,
    reference_recipe: _load.RecipeLike = "fp32",
    seeds: int | Sequence[int] = 3,
    steps: int,
    budgets: _budget.BudgetsLike = None,
    metrics: Mapping[str, str] | None = None,
    eval_every: int | None = None,
    compare_steps: Sequence[int] | None = None,
    progress: bool | None = None,
    resume: _report.ValidationReport | str | os.PathLike[str] | None = None,
    loss_fn: LossFn | None = None,
    batches: Callable[[int], Iterable[PyTree]] | Iterable[PyTree] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    held_out: Sequence[PyTree] | None = None,
) -> _report.ValidationReport:
    """Trains a reference and candidate precisions, and reports which of them are good enough.

    For each seed, all recipes start from the same FP32 parameters and see the same batches, so that
    the differences are paired. The held-out loss and the final training loss are compared with
    their budgets by a paired t test; gradients and outputs of modules are compared with those of
    the reference on the reference's own parameters. If a candidate fails, the first line of the
    report states where the error arises. The seeds are trained one after another.

    Args:
      make_run: `make_run(recipe, seed)` returns a `TrainingRun`; it receives a `Recipe`, or each
        phase of one. Or a Flax model: a Linen module, or a function from the seed to a Linen or NNX
        module, together with `loss_fn`, `batches`, `optimizer` and `held_out`.
      recipes: the candidates, in a list or a dict from names to recipes. A recipe with phases
        trains each of them in its steps, and the report names the first phase that fails.
      reference_recipe: the recipe to compare with.
      seeds: number of seeds, or the seeds. With one seed, no candidate passes.
      steps: number of training steps of each run.
      budgets: largest differences that pass. None: 0.5 % of the loss, 1 % in FP8; a number for the
        loss of all candidates; a `Budget`; or a dict of both by candidate.
      metrics: directions of the metrics that `evaluate` returns, such as `{"reward": "max", "loss":
        "min"}`; "two-sided" if a difference in either direction fails. All of them have a verdict,
        and the first one decides. None: the held-out loss decides, or the first metric; its
        direction is that of docs/validate.md, and "two-sided" for other names.
      eval_every: steps between two evaluations; None: a tenth of `steps`.
      compare_steps: numbers of updates before the steps at which gradients and activations of the
        first seed are compared; None: 0, a tenth of `steps`, `steps - 1`, and the first steps of
        phases.
      progress: True to show a progress bar; None: if standard error is a terminal.
      resume: an earlier report of the same steps, its JSON text, or a path that ends in `.json`.
        Its runs with the same step and initial parameters are taken instead of trained, except that
        of the reference's first seed, and of the first seed of a candidate without a verdict.
      loss_fn: with a Flax model: `loss_fn(model, batch)` returns the mean loss.
      batches: with a Flax model: the batches, or a function from the seed to the batches.
      optimizer: with a Flax model: the optax transformation.
      held_out: with a Flax model: batches of the held-out loss.

    Returns:
      The report. `report.ok` is False if a candidate fails or differs; `print(report)` shows the
      verdicts.

    Raises:
      ValidationError: if arguments or runs cannot be compared, such as other initial parameters,
        or a recipe has a phase after the last step.
      RecipeError, PolicyError: if a recipe cannot be loaded.
      KeyboardInterrupt: by Ctrl-C. If a run is finished, its attribute `report` is the report on
        the candidates and runs that are; `validate(..., resume=report)` goes on.

    Example:
      >>> x = np.random.default_rng(0).normal(size=(41, 8, 4)).astype(np.float32)
      >>> report = validate(
      ...     nn.Dense(4),
      ...     ["bf16"],
      ...     steps=40,
      ...     loss_fn=lambda model, x: jnp.mean((model(x) - 2 * x) ** 2),
      ...     batches=x[:40],
      ...     optimizer=optax.sgd(0.01),
      ...     held_out=x[40:],
      ... )
      >>> report["bf16"].verdict
      'pass'
    """
    model_arguments = {
        "loss_fn": loss_fn,
        "batches": batches,
        "optimizer": optimizer,
        "held_out": held_out,
    }
    make = _as_make_run(make_run, model_arguments)
    reference, candidates = _named([reference_recipe]), _named(recipes)
    for name in reference.keys() & candidates.keys():
        raise ValidationError(
            f"{name!r} is both the reference and a candidate. Name the candidate differently: "
            f"recipes={{'my_{name}': recipe}}."
        )
    recipes = reference | candidates
    settings = _driver.Settings(
        recipes=recipes,
        budgets=_budget.resolve_budgets(budgets, candidates),
        directions=_budget.check_directions({} if metrics is None else metrics),
        plan=_driver.planned_report(_as_seeds(seeds), steps, eval_every, compare_steps, recipes),
    )
    if resume is not None:
        settings = settings._replace(earlier=_as_earlier(resume, settings.plan))
    total = steps * len(settings.plan.seeds) * len(settings.recipes)
    with _progress.progress_bar(total, progress) as (on_run, on_step):
        return _driver.run_validation(make, settings, on_run, on_step)


def _as_earlier(
    resume: _report.ValidationReport | str | os.PathLike[str], plan: _report.ValidationReport
) -> _report.ValidationReport:
    """Reads the report whose runs are not repeated.

    Raises:
      ValidationError: if it has another reference or other steps.
    """
    earlier = _views.read_report(_report.ValidationReport, resume)
    for name in ("reference", "steps", "eval_steps", "compare_steps"):
        old, new = getattr(earlier, name), getattr(plan, name)
        if old != new:
            raise ValidationError(
                f"The report of resume= was made with {name}={old!r}, and this validation has "
                f"{new!r}. Pass the same arguments, or leave out resume."
            )
    return earlier


def _as_make_run(make_run: _run.MakeRun | ModelLike, arguments: dict[str, Any]) -> _run.MakeRun:
    """Returns a function of (recipe, seed) from either form of the arguments.

    Raises:
      ValidationError: if arguments of both forms are mixed.
    """
    passed = [name for name, value in arguments.items() if value is not None]
    is_model = isinstance(make_run, (nn.Module, nnx.Module, type))
    if not passed and callable(make_run) and not is_model:
        return cast("_run.MakeRun", make_run)
    missing = [name for name in arguments if name not in passed]
    if missing:
        raise ValidationError(
            f"validate got {_described(make_run, passed)} without {missing}. Pass all of them "
            "with a model:\n    jaxmp.validate(model, steps=500, loss_fn=loss_fn, batches=batches, "
            "optimizer=optax.adamw(3e-4), held_out=held_out)\nor a function alone:\n"
            "    jaxmp.validate(make_run, steps=500)"
        )
    return make_model_runs(cast("ModelLike", make_run), **arguments)


def _described(make_run: object, passed: Sequence[str]) -> str:
    if passed:
        return " and ".join(f"{name}=..." for name in passed)
    is_class = isinstance(make_run, type)
    return f"the class {make_run.__name__}" if is_class else f"a {type(make_run).__name__}"


def _named(recipes: RecipesLike) -> dict[str, _recipe.Recipe]:
    """Returns the candidates by name.

    Raises:
      ValidationError: if there are none, or two have the same name.
    """
    if isinstance(recipes, str):
        raise ValidationError(
            f"recipes={recipes!r} is a string. Pass a list: recipes=[{recipes!r}]."
        )
    if isinstance(recipes, _recipe.Recipe) or not isinstance(recipes, Iterable):
        raise ValidationError(
            f"recipes={recipes!r} is not a list of recipes. Pass a list or a dict: "
            'recipes=["bf16", recipe], recipes={"mine": recipe}.'
        )
    named: dict[str, _recipe.Recipe] = {}
    is_mapping = isinstance(recipes, Mapping)
    for key, each in recipes.items() if is_mapping else ((each, each) for each in recipes):
        recipe = _recipe.load_recipe(each)
        name = str(key) if is_mapping or isinstance(each, str) else recipe.name
        if name in named:
            raise ValidationError(
                f"Two recipes have the name {name!r}. Pass a dict: "
                f"recipes={{'first': ..., 'second': ...}}."
            )
        named[name] = recipe
    if not named:
        raise ValidationError('recipes is empty. Pass some: recipes=["bf16"].')
    return named


def _as_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    listed = range(seeds) if isinstance(seeds, int) else seeds
    values = tuple(listed) if isinstance(listed, Iterable) else ()
    are_integers = all(isinstance(value, (int, np.integer)) for value in values)
    if not values or not are_integers or len(set(values)) != len(values):
        raise ValidationError(
            f"seeds={seeds!r}: pass a positive number or different integers, such as seeds=3 or "
            "seeds=[0, 1, 2]."
        )
    return tuple(map(int, values))


# ---------------------------------------------------------------------------
# Runs of a Flax model
# ---------------------------------------------------------------------------


ModelLike: TypeAlias = nn.Module | Callable[[int], nn.Module | nnx.Module]
# loss_fn(model, batch) -> scalar loss. A Linen model is bound to its variables.
LossFn: TypeAlias = Callable[[Any, Any], ArrayLike]


def make_model_runs(
    model: ModelLike,
    loss_fn: LossFn,
    batches: Callable[[int], Iterable[PyTree]] | Iterable[PyTree],
    optimizer: optax.GradientTransformation,
    held_out: Sequence[PyTree],
) -> _run.MakeRun:
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
    _check_model_arguments(model, loss_fn, batches, optimizer, held_out)

    def make_run(recipe: _recipe.Recipe, seed: int) -> _run.TrainingRun:
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

        return _run.TrainingRun(state=state, step=step, batches=stream, evaluate=evaluate)

    return make_run


def _check_model_arguments(
    model: object, loss_fn: object, batches: object, optimizer: object, held_out: object
) -> None:
    """Checks the types of a model and of the arguments that come with it.

    Raises:
      ValidationError: naming the first argument of another type, and a correct one.
    """
    _check_model(model)
    if not callable(loss_fn):
        raise ValidationError(
            f"loss_fn={loss_fn!r} is not a function. Pass loss_fn=lambda model, batch: ..."
        )
    if isinstance(batches, (Iterator, Mapping)) or not isinstance(batches, (Iterable, Callable)):
        reason = "can be read only once" if isinstance(batches, Iterator) else "has no batches"
        raise ValidationError(
            f"batches is a {type(batches).__name__}, which {reason}: every recipe and seed reads "
            "the batches from the start. Pass a list, batches=list(...), or a function from the "
            "seed to the batches, batches=lambda seed: make_batches(seed)."
        )
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValidationError(
            f"optimizer={optimizer!r} is not an optax transformation. Pass one, such as "
            "optimizer=optax.adamw(3e-4)."
        )
    if isinstance(held_out, Mapping) or not hasattr(held_out, "__len__"):
        raise ValidationError(
            f"held_out is a {type(held_out).__name__}, not a list of batches. Pass a list, such as "
            "held_out=[batch]."
        )
    if not len(held_out):  # type: ignore[arg-type]
        raise ValidationError("held_out is empty. Pass at least one batch: held_out=[batch].")


def _check_model(model: object) -> None:
    if isinstance(model, nn.Module):
        return
    is_class = isinstance(model, type)
    cls = model if is_class else type(model)
    takes_rngs = is_class and "rngs" in inspect.signature(model.__init__).parameters
    if (
        takes_rngs
        or issubclass(cls, nn.Module)
        or isinstance(model, nnx.Module)
        or not callable(model)
    ):
        raise ValidationError(
            f"The model is {'the class' if is_class else 'of type'} {cls.__name__}. Pass a Linen "
            "module, such as Net(), or a function from the seed to an NNX module, of which every "
            "recipe and seed trains a new one: lambda seed: Net(rngs=nnx.Rngs(seed))."
        )


# State, step, and a function of the state and the held-out batches that returns their losses.
_Parts: TypeAlias = tuple[PyTree, Callable[..., PyTree], Callable[..., list[ArrayLike]]]


def _linen_run(
    recipe: _recipe.Recipe, seed: int, model: Any, loss_fn: LossFn, tx: Any, batch: PyTree
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


def _nnx_run(recipe: _recipe.Recipe, model: Any, loss_fn: LossFn, inner: Any) -> _Parts:
    if not isinstance(model, nnx.Module):
        raise ValidationError(
            f"The model is a {type(model).__name__}, not a Flax module. Pass a Linen module, or a "
            "function: model=lambda seed: Net(rngs=nnx.Rngs(seed))."
        )
    wrapped = recipe.wrap(model)
    tx = Optimizer(wrapped, inner)

    def step(model: nnx.Module, tx: Optimizer, batch: PyTree) -> dict[str, PyTree]:
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
