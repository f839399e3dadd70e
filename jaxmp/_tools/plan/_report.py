"""The plan of a training step as plain data and as text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

from jaxmp._tools.plan._bound import MEASURED
from jaxmp._tools.report._section import Fix, Section, bytes_text, grouped, table
from jaxmp._tools.report._views import Report
from jaxmp.errors import AuditError

_BOUND = (
    "The bound is the least time that the kernels of the compiled program take for their FLOPs and"
    " bytes, per example of the batch, relative to {} on the same chip: less is faster. The"
    " interval behind it comes from the errors of {} measured ratios (docs/choose.md)."
)
_LINKS = "GB/s of each device, both directions together: of the data sheet, or those of `links`."
_COST = "Of a billion tokens, at your prices. From the bound, it is the least that the cost can be."


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One program: a recipe on a chip, with a batch size and a form of remat.

    Args:
      recipe: name of the recipe.
      target: name of the chip.
      batch: number of examples; None if the function has no such argument.
      remat: argument of the function, as text; "" without one.
      fits: True if the program fits into the usable memory; None if it is not known.
      memory: bytes that the program requires on each device, the upper end of the range if they are
        estimated; 0 if they are not known.
      usable: bytes of each device that JAX allocates.
      bound: roofline of the program per example, relative to the first program of the plan's
        baseline on this chip; None if it is not known, see `problem`.
      interval: the least and the largest value of the bound, by the errors of measured ratios;
        empty without a bound.
      narrow: True if most FLOPs are those of matmuls with a dimension below 4,096.
      devices: number of devices of the program; 0 if it is not known.
      hosts: number of hosts, or of other domains of links; 0 if it is not known.
      links: "within" and "between" hosts -> bytes per second of each device, in both directions.
      tokens: elements of the largest integer array of the last argument, with two axes or more.
      cost: price of a billion tokens; None without the price of the chip, or tokens.
      cost_from: "measured" tokens per second, the "bound", or why there is no cost.
      kernels: number of kernels that one step starts.
      flops: dtype in which the chip multiplies, or "attention" -> FLOPs per device.
      bytes: "matmuls", "attention", "collectives" or "other" kernels -> bytes that they access.
      fallbacks: why kernels of the recipe's formats, or fused attention, are not used; and that the
        search for the largest batch ended at its limit.
      lacking: the format of the recipe that the chip does not multiply natively, and a recipe that
        fits; "" if there is none.
      problem: why the program was not compiled, or has no bound because the network between its
        hosts is not known; "" with a bound.
      warning: the first warning of jaxmp about the program, which is then not recommended.
    """

    recipe: str
    target: str
    batch: int | None = None
    remat: str = ""
    fits: bool | None = None
    memory: int = 0
    usable: int = 0
    bound: float | None = None
    interval: tuple[float, ...] = ()
    narrow: bool = False
    devices: int = 0
    hosts: int = 0
    links: dict[str, float] = dataclasses.field(default_factory=dict)
    tokens: int = 0
    cost: float | None = None
    cost_from: str = ""
    kernels: int = 0
    flops: dict[str, int] = dataclasses.field(default_factory=dict)
    bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    lacking: str = ""
    problem: str = ""
    warning: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """The recommended program for a chip.

    Args:
      target: name of the chip.
      recipe: name of the recipe; "" if no program fits without a warning.
      batch: number of examples; None without batch sizes.
      remat: argument of the function, as text.
      reason: one or more sentences.
      check: the command that trains with the recipe and compares its loss; "" if no program fits,
        or for fp32.
    """

    target: str
    recipe: str = ""
    batch: int | None = None
    remat: str = ""
    reason: str = ""
    check: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanReport(Report):
    """Programs of a training step for several recipes and chips. Frozen; contains plain data.

    `print(report)` shows the recommendation for each chip and a table of the programs.

    Args:
      function: name of the function that makes the step.
      baseline: name of the recipe that bounds refer to.
      rows: the programs.
      choices: the recommendation for each chip.

    Example:
      >>> def make_step(recipe):
      ...     step = lambda w, x: jax.grad(lambda w: jnp.sum(x @ w))(w)
      ...     return step, jnp.ones((8, 8)), jnp.ones((2, 8))
      >>> report = jaxmp.plan(make_step, recipes=["fp16"], targets=["v100"])
      >>> report.rows[0].fits, report.choices[0].recipe
      (True, 'fp16')
    """

    _subject = "plan"
    _title = "Plan"
    _command = "jaxmp plan my_package.train:make_step --json plan.json"
    _error = AuditError
    _schema: ClassVar = {"schema_version": 1}

    function: str = ""
    baseline: str = ""
    rows: tuple[PlanRow, ...] = ()
    choices: tuple[PlanChoice, ...] = ()

    def _sections(self, full: bool) -> list[Section]:
        del full
        lacking = ", ".join(each.target for each in self.choices if not each.recipe)
        title = f"Plan of {self.function}" + f": nothing for {lacking}" * bool(lacking)
        ordered = sorted(self.choices, key=lambda each: bool(each.recipe))
        choices = [(each.target, _name(each) or "none", each.reason) for each in ordered]
        checks = "\n".join(dict.fromkeys(each.check for each in self.choices if each.check))
        fixes = (Fix("Compare the loss", ((True, checks),)),) if checks else ()
        bounds = _BOUND.format(self.baseline, len(MEASURED["cases"]))
        priced = (row for row in self.rows if row.cost_from)
        costs = [
            (row.target, _name(row), "" if row.cost is None else f"{row.cost:,.2f}", row.cost_from)
            for row in priced
        ]
        joined = (row for row in self.rows if row.devices > 1 and row.links)
        links = dict.fromkeys(
            (row.target, f"{row.devices} devices", f"{row.hosts} hosts" * (row.hosts > 1), *speeds)
            for row in joined
            for speeds in [[f"{speed / 1e9:,g}" if speed else "" for speed in row.links.values()]]
        )
        remarks: dict[str, list[PlanRow]] = {}
        for row in self.rows:
            problem = row.problem and f"{_state(row)}: {row.problem}"
            for remark in filter(None, (problem, *row.fallbacks, row.lacking, row.warning)):
                remarks.setdefault(remark, []).append(row)
        shared = [
            ("all" if len(rows) == len(self.rows) else _programs(rows), remark)
            for remark, rows in remarks.items()
        ]
        of_choices = ("chip", "recommended", "reason")
        of_links = ("chip", "devices", "hosts", "within", "between")
        sections = [
            Section(title, "", of_choices, tuple(choices), fixes, "bad" if lacking else "good"),
            table("Programs", self.rows, _COLUMNS, bounds),
            Section("Costs", _COST, ("chip", "program", "cost", "from"), tuple(costs)),
            Section("Links", _LINKS, of_links, tuple(links)),
            Section("Remarks", "", ("programs", "remark"), tuple(shared)),
        ]
        return [section for section in sections if section.rows]


def _name(program: PlanRow | PlanChoice) -> str:
    """Returns the recipe with batch and remat, such as "bf16, batch 8"."""
    batch = f"batch {program.batch}" if program.batch else ""
    remat = f"remat {program.remat}" if program.remat else ""
    return ", ".join(filter(None, (program.recipe, batch, remat)))


_COLUMNS: tuple[tuple[str, Callable[[PlanRow], str]], ...] = (
    ("chip", lambda row: row.target),
    ("program", _name),
    ("fits", lambda row: {True: "yes", False: "no", None: ""}[row.fits]),
    ("memory", lambda row: bytes_text(row.memory) if row.memory else ""),
    ("moved", lambda row: _shares(row.bytes, bytes_text(sum(row.bytes.values())))),
    ("FLOPs", lambda row: _shares(row.flops)),
    ("bound", lambda row: _interval(row.bound, *row.interval)),
)


def _state(row: PlanRow) -> str:
    """Returns what a program without a bound lacks."""
    return "compiled without a bound" if row.links else "not compiled"


def _programs(rows: list[PlanRow]) -> str:
    """Returns programs with their chips, such as "bf16, batch 8 (a100, h100); fp8 (h100)"."""
    names = grouped(rows, _name)
    return "; ".join(f"{n} ({', '.join(row.target for row in each)})" for n, each in names.items())


def _interval(bound: float | None, low: float = 0.0, high: float = 0.0) -> str:
    between = f" ({low:.2f} to {high:.2f})" if low < high else ""
    return "" if bound is None else f"{bound:.2f}{between}"


def _shares(counts: dict[str, int], total: str = "") -> str:
    """Returns the shares of kinds, such as `62% bfloat16, 38% float8`, after the total."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{count / sum(counts.values()):.0%} {kind}" for kind, count in ordered)
    return f"{total}: {shares}" if total and shares else shares


# ---------------------------------------------------------------------------
# Recommendations
# ---------------------------------------------------------------------------


def recommend(target: str, baseline: str, rows: list[PlanRow]) -> PlanChoice:
    """Returns the recommendation for a chip: the least bound, or the baseline if that may be 1."""
    fitting = [row for row in rows if row.fits and not row.lacking and not row.warning]
    if not fitting:
        return PlanChoice(target=target, reason=_why_none(rows))
    best = min(fitting, key=_value)
    base = min((row for row in fitting if row.recipe == baseline), key=_value, default=best)
    best = best if max(best.interval, default=_value(best)) < _value(base) else base
    size = "memory" if best.links else "estimate"
    reasons = [] if best.bound else [f"The chip multiplies its formats, and the {size} fits."]
    if best is not base:
        ratio = _interval(*(value / _value(base) for value in (_value(best), *best.interval)))
        reasons.append(f"Its bound is {ratio} of that of {_name(base)}: {_work(best, base)}.")
    for recipe in dict.fromkeys(row.recipe for row in rows if row.recipe != best.recipe):
        other = min((row for row in rows if row.recipe == recipe), key=_value)
        reasons += [_comparison(other, best)] * (other is not base)
    chosen = {name: getattr(best, name) for name in ("recipe", "batch", "remat")}
    reference = "fp32" if best is base else base.recipe
    # A phase, such as "mine@900", is validated with its recipe.
    own, reference = (name.partition("@")[0] for name in (best.recipe, reference))
    check = f"jaxmp validate run.py:make_run --recipes {own} --reference-recipe {reference}"
    check *= own not in ("fp32", reference)
    return PlanChoice(target=target, **chosen, reason=" ".join(reasons) or "It fits.", check=check)


def _value(row: PlanRow) -> float:
    return math.inf if row.bound is None else row.bound


def _why_none(rows: list[PlanRow]) -> str:
    warned = next((row for row in rows if row.fits and not row.lacking), None)
    if warned:
        return f"{_name(warned)} fits, but jaxmp warns of it: {warned.warning}"
    known = [row for row in rows if row.memory and not row.lacking]
    problems = [row.problem for row in rows if row.problem and not row.lacking]
    if not known:
        lacking = "The chip does not multiply the formats of these recipes."
        return f"No program was compiled: {problems[0]}." if problems else lacking
    least = min(known, key=lambda row: row.memory)
    need, usable = bytes_text(least.memory), bytes_text(least.usable)
    verdict = "It is not known what fits" if least.fits is None else "Nothing fits"
    at_least = "at least " * (least.fits is None)
    return f"{verdict}: {_name(least)} requires {at_least}{need} of {usable}."


def _comparison(other: PlanRow, best: PlanRow) -> str:
    """Returns why another recipe is not the recommended one."""
    if other.warning and not other.lacking:
        return f"jaxmp warns of {_name(other)}: {other.warning}"
    if other.lacking or other.bound is None or best.bound is None or not other.fits:
        cannot = "does not fit" if other.fits is False else f"was {_state(other)}"
        cannot = "computes in a format that the chip lacks" if other.lacking else cannot
        return f"{_name(other)} {cannot}."
    gain = f"has no clear gain, {_interval(other.bound, *other.interval)}"
    if min(other.interval, default=other.bound) >= best.bound:
        gain = "gains nothing"
    return f"{_name(other)} {gain}: {_work(other, best)}."


def _work(row: PlanRow, base: PlanRow) -> str:
    """Returns the bytes of two programs per example, and the formats of the first."""
    own, others = (bytes_text(sum(each.bytes.values()) / (each.batch or 1)) for each in (row, base))
    per = " per example" if row.batch else ""
    return f"it moves {own}{per} instead of {others}, and computes {_shares(row.flops)}"
