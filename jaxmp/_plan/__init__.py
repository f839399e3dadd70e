"""Plans of a training step: recipes, batch sizes and remat on chips that need not be present."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxmp._audit._compile import check_compiler
from jaxmp._plan._programs import Program, relative
from jaxmp._plan._report import PlanChoice as PlanChoice
from jaxmp._plan._report import PlanReport as PlanReport
from jaxmp._plan._report import PlanRow as PlanRow
from jaxmp._plan._report import choose
from jaxmp._recipe import Recipe, load_recipe
from jaxmp._recipe_files._load import RecipeLike
from jaxmp._report._progress import progress_bar
from jaxmp._targets import Target, get_target
from jaxmp.errors import AuditError

_LARGEST = "largest"


def plan(
    make_step: Callable[..., Any],
    *,
    recipes: Sequence[RecipeLike],
    targets: Sequence[str],
    batches: Sequence[int] | str | None = None,
    remat: Sequence[Any] | None = None,
    cache: str | os.PathLike[str] | None = "~/.cache/jaxmp",
    progress: bool | None = None,
) -> PlanReport:
    """Compiles a training step for recipes and chips, and recommends one for each chip.

    No chip has to be present, and nothing is run. For each program, the report has the memory, the
    FLOPs and bytes by kind, the kernels that were replaced, and a bound: the roofline of the
    compiled kernels relative to that of `bf16` on the same chip. The bound ranks recipes; it does
    not predict a time. `docs/choose.md` compares it with published measurements.

    Args:
      make_step: takes a recipe, and returns the train step and its arguments, which may be shapes.
        With `batches` or `remat`, it also takes `batch_size` or `remat`.
      recipes: recipes to compare. Bounds are relative to "bf16", or to the first of them.
      targets: chips, such as "h100" or "v6e".
      batches: batch sizes; "largest" to find the largest that fits, by compilation; None for the
        step as it is.
      remat: values of the argument `remat` to try.
      cache: folder for compiled programs; None for none.
      progress: True for a progress bar on standard error. None: if it is a terminal.

    Returns:
      The report, with `.rows` and `.choices`; it prints as a table.

    Raises:
      AuditError: if an argument is not valid, before anything is computed.
      TargetError, RecipeError: if a chip or a recipe is not known.
      MissingDependencyError: if XLA's compiler for a chip is not installed.

    Example:
      >>> def make_step(recipe):
      ...     step = lambda w, x: jax.grad(lambda w: jnp.sum(x @ w))(w)
      ...     return step, jnp.ones((8, 8)), jnp.ones((2, 8))
      >>> plan(make_step, recipes=["fp16"], targets=["v100"]).choices[0].recipe
      'fp16'
    """
    loaded, chips = _checked(make_step, recipes, targets, batches, remat)
    names = [recipe.name for recipe in loaded]
    baseline = "bf16" if "bf16" in names else names[0]
    sizes = [None] if batches is None or batches == _LARGEST else list(batches)
    programs = list(itertools.product(remat or [None], sizes, loaded))
    folder = None if cache is None else Path(cache).expanduser()
    rows: list[PlanRow] = []
    choices = []
    with progress_bar(len(chips) * len(programs), progress) as (on_program, on_end):
        for chip in chips:
            measured = []
            for form, size, recipe in programs:
                on_program(f"{chip.name}, {recipe.name}")
                program = Program(make_step, recipe, chip, form, folder)
                is_search = batches == _LARGEST
                measured.append(program.largest() if is_search else program.measure(size))
                on_end()
            own = relative(measured, baseline)
            choices.append(choose(chip.name, baseline, own))
            rows += own
    return PlanReport(
        function=getattr(make_step, "__name__", "the step"),
        baseline=baseline,
        rows=tuple(rows),
        choices=tuple(choices),
    )


# ---------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------


def _checked(
    make_step: object, recipes: Any, targets: Any, batches: Any, remat: Any
) -> tuple[list[Recipe], list[Target]]:
    if not callable(make_step):
        raise AuditError(
            f"plan received an object of type {type(make_step).__name__} instead of a function "
            "that takes a recipe. Pass\n"
            "    def make_step(recipe):\n        return train_step, state, batch"
        )
    for name, values, example in (
        ("recipes", recipes, "['bf16', 'fp8']"),
        ("targets", targets, "['h100']"),
        ("batches", batches, "[8, 16], or batches='largest'"),
        ("remat", remat, "[False, True]"),
    ):
        is_optional = name in ("batches", "remat") and values is None
        if is_optional or (name == "batches" and values == _LARGEST):
            continue
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise AuditError(f"{name}={values!r} is not a list. Write {name}={example}.")
    for size in () if batches in (None, _LARGEST) else batches:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise AuditError(
                f"batches contains {size!r}, which is not a positive number of examples. Write "
                "batches=[8, 16], or batches='largest'."
            )
    parameters = inspect.signature(make_step).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for argument, parameter, example in (
        ("batches", "batch_size", "batch_size=8"),
        ("remat", "remat", "remat=False"),
    ):
        value = batches if argument == "batches" else remat
        if value is not None and parameter not in parameters and not takes_all:
            name = getattr(make_step, "__name__", "make_step")
            raise AuditError(
                f"{name} has no parameter {parameter!r}, which {argument}={value!r} requires. "
                f"Write\n    def {name}(recipe, {example}):"
            )
    loaded = list(dict.fromkeys(map(load_recipe, recipes)))
    chips = [get_target(name) for name in dict.fromkeys(targets)]
    for chip in chips:
        if not chip.uncompiled:
            check_compiler(chip)
    return loaded, chips
