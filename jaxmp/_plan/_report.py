"""The plan of a training step as plain data and as text."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmp._report._section import Section
from jaxmp._report._units import bytes_text, counted, flops_text, share_text
from jaxmp._report._views import Report
from jaxmp.errors import AuditError

# Smaller differences of two bounds are within the error of the roofline.
MARGIN = 0.05
_BOUND = (
    "The bound is the least time that the kernels of the compiled program take for their FLOPs and"
    " bytes, per example of the batch, relative to {} on the same chip: less is faster. Differences"
    f" of {MARGIN:.0%} are within its error, and of 15% for layers narrower than 4,096."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One program: a recipe on a chip, with a batch size and a form of remat.

    Args:
      recipe: name of the recipe.
      target: name of the chip.
      batch: number of examples; None if the function has no such argument.
      remat: argument of the function, as text; "" without one.
      fits: True if the program fits into the usable memory; None if it is not known.
      memory: bytes that the program requires on each device; 0 if they are not known.
      usable: bytes of each device that JAX allocates.
      bound: roofline of the program per example, relative to the first program of the plan's
        baseline on this chip; None if the program was not compiled.
      kernels: number of kernels that one step starts.
      flops: dtype in which the chip multiplies, or "attention" -> FLOPs per device.
      bytes: "matmuls", "attention", "collectives" or "other" kernels -> bytes that they access.
      fallbacks: why kernels of the recipe's formats, or fused attention, are not used.
      notes: what else the audit of the program states about the chip.
      problem: why the program was not compiled; "" if it was.
      is_native: False if the chip does not multiply the formats of the recipe natively.
    """

    recipe: str
    target: str
    batch: int | None = None
    remat: str = ""
    fits: bool | None = None
    memory: int = 0
    usable: int = 0
    bound: float | None = None
    kernels: int = 0
    flops: dict[str, int] = dataclasses.field(default_factory=dict)
    bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    is_native: bool = True

    @property
    def name(self) -> str:
        """The recipe with batch and remat, such as "bf16, batch 8"."""
        parts = [self.recipe, f"batch {self.batch}" if self.batch else "", self.remat and "remat "]
        return ", ".join(filter(None, parts)) + self.remat

    def flops_text(self) -> str:
        """Returns the shares of the formats, such as `62% bfloat16, 38% float8`."""
        total = sum(self.flops.values())
        shares = sorted(self.flops.items(), key=lambda item: -item[1])
        return ", ".join(f"{flops / total:.0%} {dtype}" for dtype, flops in shares if flops)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """The recommended program for a chip.

    Args:
      target: name of the chip.
      recipe: name of the recipe; "" if no program fits.
      batch: number of examples; None without batch sizes.
      remat: argument of the function, as text.
      reason: one or more sentences.
    """

    target: str
    recipe: str
    batch: int | None
    remat: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanReport(Report):
    """Programs of a training step for several recipes and chips. Frozen; contains plain data.

    `print(report)` shows the recommendation for each chip and a table of the programs;
    `report.to_text(full=True)` adds bytes by kind.

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
    _summary = ()

    function: str = ""
    baseline: str = ""
    rows: tuple[PlanRow, ...] = ()
    choices: tuple[PlanChoice, ...] = ()

    def __repr__(self) -> str:
        return f"<PlanReport of {counted(len(self.rows), 'program')}>"

    def _sections(self, full: bool) -> list[Section]:
        sections = [self._choices(), self._programs()]
        if full:
            sections.append(self._kinds())
        rows = [(row.target, row.name, text) for row in self.rows for text in _remarks(row)]
        return [*sections, Section("Remarks", "", ("chip", "program", "remark"), tuple(rows))]

    def _choices(self) -> Section:
        rows = [
            (choice.target, _named(choice) if choice.recipe else "none", choice.reason)
            for choice in self.choices
        ]
        mood = "good" if all(choice.recipe for choice in self.choices) else "bad"
        columns = ("chip", "recommended", "reason")
        return Section(f"Plan of {self.function}", "", columns, tuple(rows), mood=mood)

    def _programs(self) -> Section:
        rows = [
            (
                row.target,
                row.name,
                {True: "yes", False: "no", None: ""}[row.fits],
                bytes_text(row.memory) if row.memory else "",
                bytes_text(sum(row.bytes.values())) if row.bytes else "",
                row.flops_text(),
                "" if row.bound is None else f"{row.bound:.2f}",
            )
            for row in self.rows
        ]
        columns = ("chip", "program", "fits", "memory", "moved", "FLOPs", "bound")
        return Section("Programs", _BOUND.format(self.baseline), columns, tuple(rows))

    def _kinds(self) -> Section:
        rows = [
            (row.target, row.name, kind, bytes_text(size), share_text(size, total), "")
            for row in self.rows
            for total in [sum(row.bytes.values())]
            for kind, size in row.bytes.items()
        ]
        rows += [
            (row.target, row.name, kind, "", share_text(flops, total), flops_text(flops))
            for row in self.rows
            for total in [sum(row.flops.values())]
            for kind, flops in row.flops.items()
        ]
        columns = ("chip", "program", "kind", "moved", "share", "FLOPs")
        return Section("By kind", "", columns, tuple(rows))


def _named(choice: PlanChoice) -> str:
    return PlanRow(recipe=choice.recipe, target="", batch=choice.batch, remat=choice.remat).name


def _remarks(row: PlanRow) -> list[str]:
    problem = [f"not compiled: {row.problem}"] if row.problem else []
    return [*problem, *row.fallbacks, *row.notes]


def choose(target: str, baseline: str, rows: list[PlanRow]) -> PlanChoice:
    """Returns the recommendation for a chip: the least bound, or the baseline within the margin."""
    fitting = [row for row in rows if row.fits and row.is_native]
    if not fitting:
        return PlanChoice(target=target, recipe="", batch=None, remat="", reason=_why_none(rows))
    best = min(fitting, key=lambda row: 1.0 if row.bound is None else row.bound)
    base = next((row for row in fitting if row.recipe == baseline), best)
    bases = [row for row in fitting if row.recipe == baseline and row.bound is not None]
    if bases and best.bound is not None:
        base = min(bases, key=lambda row: row.bound or 0.0)
        best = best if best.bound < (1 - MARGIN) * (base.bound or 0.0) else base
    reasons = [_gain(best, base)] if best is not base else []
    others = {row.recipe for row in rows} - {best.recipe}
    for recipe in sorted(others):
        compiled = [r for r in rows if r.recipe == recipe and r.bound is not None]
        if compiled and best.bound is not None:
            other = min(compiled, key=lambda row: row.bound or 0.0)
            reasons += [_no_gain(other, best)] if other is not base else []
    if best.bound is None:
        reasons.append("The chip multiplies its formats natively, and it fits by the estimate.")
    text = " ".join(reasons) or "It fits."
    return PlanChoice(
        target=target, recipe=best.recipe, batch=best.batch, remat=best.remat, reason=text
    )


def _why_none(rows: list[PlanRow]) -> str:
    known = [row for row in rows if row.memory and row.is_native]
    if known:
        least = min(known, key=lambda row: row.memory)
        need, usable = bytes_text(least.memory), bytes_text(least.usable)
        return f"Nothing fits: {least.name} requires {need} of {usable}."
    return "No recipe fits the formats of the chip."


def _gain(best: PlanRow, base: PlanRow) -> str:
    ratio = (best.bound or 0.0) / (base.bound or 1.0)
    return f"Its bound is {ratio:.2f} of that of {base.name}: {_work(best, base)}."


def _no_gain(other: PlanRow, best: PlanRow) -> str:
    ratio = (other.bound or 0.0) / (best.bound or 1.0)
    if not other.fits:
        return f"{other.name} does not fit."
    if ratio < 1:
        return f"{other.name} gains less than {MARGIN:.0%}: {_work(other, best)}."
    return f"{other.name} gains nothing: {_work(other, best)}."


def _work(row: PlanRow, base: PlanRow) -> str:
    """Returns the bytes of two programs per example, and the formats of the first."""
    own, others = (sum(each.bytes.values()) / (each.batch or 1) for each in (row, base))
    per = " per example" if row.batch else ""
    return f"it moves {bytes_text(own)}{per} instead of {bytes_text(others)}, {row.flops_text()}"
