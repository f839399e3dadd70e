"""Plans of a training step: recipes, batch sizes and remat on chips that need not be present."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxmp import _core
from jaxmp._core._compat import _watch_jit
from jaxmp._policies import _recipe
from jaxmp._policies._load import RecipeLike
from jaxmp._tools.audit._compile import check_compiler
from jaxmp._tools.memory._cache import folder_of
from jaxmp._tools.plan import _programs
from jaxmp._tools.plan._report import PlanReport, PlanRow, recommend
from jaxmp._tools.report._progress import progress_bar
from jaxmp._tools.report._section import grouped
from jaxmp._tools.report._views import Interrupted
from jaxmp.errors import AuditError, TargetError

_LARGEST = "largest"


def plan(
    make_step: Callable[..., Any],
    *,
    recipes: Sequence[RecipeLike],
    targets: Sequence[str],
    batches: Sequence[int] | str | None = None,
    remat: Sequence[Any] | None = None,
    prices: Mapping[str, float] | None = None,
    rates: Mapping[str, float] | None = None,
    hosts: int | None = None,
    links: Mapping[str, float] | None = None,
    cache: str | os.PathLike[str] | None = "~/.cache/jaxmp",
    progress: bool | None = None,
) -> PlanReport:
    """Compiles a training step for recipes and chips, and recommends one for each chip.

    No chip has to be present, and nothing is run. For each program, the report has the memory, the
    FLOPs and bytes by kind, the kernels that were replaced, and a bound: the roofline of the
    compiled kernels relative to that of `bf16` on the same chip. The bound ranks recipes; it does
    not predict a time. `docs/choose.md` compares it with measured speeds, from whose errors the
    interval of each bound comes. A recipe is recommended instead of `bf16` if its interval is
    below that of `bf16`.

    Args:
      make_step: takes a recipe, and returns the train step and its arguments, which may be shapes.
        With `batches` or `remat`, it also takes `batch_size` or `remat`.
      recipes: recipes to compare. Bounds are relative to "bf16", or to the first of them. Each
        phase of a recipe is a recipe of its own, such as "mine@900".
      targets: chips, such as "h100" or "v6e".
      batches: batch sizes; "largest" to find the largest that fits, by compilation; None for the
        step as it is.
      remat: values of the argument `remat` to try.
      prices: chip -> price of one JAX device for an hour, such as {"h100": 2.10}. The report then
        has the cost of a billion tokens.
      rates: "chip/recipe" -> measured tokens per second of all devices, such as
        {"h100/bf16": 39000}. The cost uses them where there are some, and otherwise the bound.
      hosts: number of hosts among which the devices of the step are divided; None for as few as the
        links of the chip allow, such as hosts of eight H100.
      links: bytes per second of each device in both directions, {"within": 900e9, "between":
        100e9} hosts, instead of those of docs/chips.md.
      cache: folder for compiled programs; None for none.
      progress: True for a progress bar on standard error. None: if it is a terminal.

    Returns:
      The report, with `.rows` and `.choices`; it prints as a table.

    Raises:
      AuditError: if an argument is not valid, before anything is computed.
      TargetError, RecipeError: if a chip or a recipe is not known, or
        XLA_PYTHON_CLIENT_MEM_FRACTION is not a share.
      NotADirectoryError: if `cache` is a file.
      MissingDependencyError: if XLA's compiler for a chip is not installed.
      KeyboardInterrupt: by Ctrl-C. If a program is compiled, its attribute `report` is the plan of
        those that are.

    Example:
      >>> def make_step(recipe):
      ...     step = lambda w, x: jax.grad(lambda w: jnp.sum(x @ w))(w)
      ...     return step, jnp.ones((8, 8)), jnp.ones((2, 8))
      >>> plan(make_step, recipes=["fp16"], targets=["v100"]).choices[0].recipe
      'fp16'
    """
    lists = {"recipes": recipes, "targets": targets, "batches": batches, "remat": remat}
    tables = {"prices": prices, "rates": rates, "links": links}
    every_recipe, chips = check_plan(make_step, hosts=hosts, cache=cache, **lists, **tables)
    sizes = [None] if batches is None or isinstance(batches, str) else batches
    programs = list(itertools.product(chips, remat or [None], sizes, every_recipe))

    def measure() -> Iterator[PlanRow]:
        with progress_bar(len(programs), progress) as (on_program, on_end):
            for chip, form, size, recipe in programs:
                on_program(f"{chip.name}, {recipe.name}")
                program = _programs.Candidate(make_step, recipe, chip, form, cache, hosts)
                yield program.largest() if batches == _LARGEST else program.measure(size)
                on_end()

    return make_plan(_watch_jit.title_of(make_step), measure(), prices, rates)


def make_plan(
    function: str,
    programs: Iterable[PlanRow],
    prices: Mapping[str, float] | None = None,
    rates: Mapping[str, float] | None = None,
) -> PlanReport:
    """Returns the report on programs, which are measured during the iteration.

    Raises:
      Interrupted: by Ctrl-C after the first program, with the report on those before.
    """
    measured: list[PlanRow] = []
    is_interrupted = False
    try:
        measured.extend(programs)
    except KeyboardInterrupt:
        if not measured:
            raise
        is_interrupted = True
    baseline = next((row.recipe for row in measured if row.recipe == "bf16"), measured[0].recipe)
    groups = grouped(measured, lambda row: row.target).values()
    compared = [_programs.relative(own, baseline, prices or {}, rates or {}) for own in groups]
    report = PlanReport(
        function=function,
        baseline=baseline,
        rows=tuple(itertools.chain(*compared)),
        choices=tuple(recommend(rows[0].target, baseline, rows) for rows in compared),
    )
    if is_interrupted:
        raise Interrupted(report)
    return report


_EXAMPLE = (
    "recipes=['bf16', 'fp8'], targets=['h100'], remat=[False, True], batches=[8, 16], or "
    "batches='largest'"
)


def check_plan(
    make_step: object,
    *,
    prices: Mapping[str, float] | None = None,
    rates: Mapping[str, float] | None = None,
    hosts: int | None = None,
    links: Mapping[str, float] | None = None,
    cache: str | os.PathLike[str] | None = None,
    **lists: Any,
) -> tuple[list[_recipe.Recipe], list[_core.Target]]:
    """Checks the arguments of `plan`, and returns its recipes and chips."""
    optional = {"batches": "batch_size=8", "remat": "remat=False"}
    lists = {name: x for name, x in lists.items() if x is not None or name not in optional}
    for name, values in lists.items():
        is_valid = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
        if name == "batches":
            is_list = is_valid and all(type(size) is int and size > 0 for size in values)
            is_valid = is_list or values == _LARGEST
        if not is_valid:
            raise AuditError(f"{name}={values!r} is not valid. Write {_EXAMPLE}.")
    keywords = [text for name, text in optional.items() if name in lists]
    try:
        signature = inspect.signature(make_step)  # type: ignore[arg-type]
        signature.bind("bf16", **dict(text.split("=") for text in keywords))
    except (TypeError, ValueError) as error:
        name = getattr(make_step, "__name__", repr(make_step))
        form = f"{name if name.isidentifier() else 'make_step'}({', '.join(['recipe', *keywords])})"
        raise AuditError(
            f"plan received {name}, of type {type(make_step).__name__}, and cannot call {form}: "
            f"{error}. Write\n    def {form}:\n        return train_step, state, batch"
        ) from None
    default = getattr(signature.parameters.get("remat"), "default", None)
    for value in lists.get("remat", ()):
        if isinstance(default, bool) and not isinstance(value, bool):
            raise AuditError(
                f"remat={value!r}: the default of the parameter is {default}. Write"
                " remat=[False, True], or --remat false,true."
            )
    if hosts is not None and (type(hosts) is not int or hosts < 1):
        raise AuditError(f"hosts={hosts!r} is not a positive number. Write hosts=8, or --hosts 8.")
    _core.usable_share()  # raises if the environment names none
    folder_of(cache)  # raises if it is a file
    chips = [
        _core.with_links(chip, links)
        for chip in dict.fromkeys(map(_core.get_target, lists["targets"]))
    ]
    names = [chip.name for chip in chips]
    for chip in chips:
        if (count := names.count(chip.name)) > 1:
            raise TargetError(
                f"targets= has {count} chips of the name {chip.name!r}. Name each: targets=["
                "{'like': 'h100', 'name': 'h100-64', 'memory': 64e9}, ...]."
            )
        if not chip.uncompiled:
            check_compiler(chip)
    loaded = map(_recipe.load_recipe, lists["recipes"])
    recipes = list(dict.fromkeys(phase for recipe in loaded for phase in recipe.split_phases()))
    pairs = [f"{name}/{recipe.name}" for name in names for recipe in recipes]
    for option, values, known in (("prices", prices, names), ("rates", rates, pairs)):
        items = values.items() if isinstance(values, Mapping) else [("", values)]
        is_table = all(key in known and _core.is_between(value, 1e-9, 1e15) for key, value in items)
        if values is not None and not is_table:
            raise AuditError(
                f"{option}={values!r}: write positive numbers for {', '.join(known)} only, such as "
                f"{option}={{{known[0]!r}: 2.5}}, or --{option[:-1]} {known[0]}=2.5."
            )
    return recipes, chips
