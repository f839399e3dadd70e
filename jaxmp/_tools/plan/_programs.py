"""Programs of a plan: their compilation, its cache, and the search for the largest batch."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmp import _core
from jaxmp._policies._recipe import Recipe
from jaxmp._tools.audit._audit import audit_program
from jaxmp._tools.audit._auditor import PolicyContext
from jaxmp._tools.audit._compile import compiling_for
from jaxmp._tools.audit._make_report import lacking_format
from jaxmp._tools.audit._report import AuditReport
from jaxmp._tools.memory import brief, estimate_memory
from jaxmp._tools.memory._cache import compiler_of, folder_of
from jaxmp._tools.plan._bound import MEASURED, cost_of, count_devices, error_of
from jaxmp._tools.plan._report import PlanRow
from jaxmp._tools.report import _section
from jaxmp.errors import JaxmpError, RecipeWarning, TargetError

# Findings of the audit about kernels that were replaced by slower ones.
_FALLBACKS = ("unfused_attention", "not_fp8", "fp8_fallback", "fp32_gemm")
# Those about a program that does not compute as its recipe does, such as one with casts by hand.
_WARNED = ("off_policy_matmul", "missing_loss_scale")
# The search for the largest batch ends here, and starts here without a default of the function.
_MAX_BATCH, _FIRST_BATCH = 2**20, 8
# Programs after which the search no longer trusts that memory grows linearly.
_LINEAR = 6
_NO_RATE = "; name measured tokens per second: --rate {}=39000"
_NO_TOKENS = "the last argument has no integer array of two axes, the tokens"


@contextlib.contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collects the first sentences of warnings of jaxmp, and shows each for every program."""
    sentences, show = list[str](), warnings.showwarning

    def collect(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if issubclass(category, RecipeWarning):
            sentences.append(f"{str(message).partition('. ')[0].rstrip('.')}.")
        show(message, category, *place)

    with warnings.catch_warnings():
        warnings.showwarning = collect
        yield sentences


class Candidate(NamedTuple):
    """A recipe on a chip, with an argument `remat`, the folder of the cache, and the hosts."""

    make_step: Callable[..., Any]
    recipe: Recipe
    chip: _core.Target
    remat: Any
    cache: str | os.PathLike[str] | None
    hosts: int | None = None

    def measure(self, batch: int | None) -> PlanRow:
        """Compiles the program for a batch size; the bound is in seconds until `relative`."""
        options = {} if batch is None else {"batch_size": batch}
        options |= {} if self.remat is None else {"remat": self.remat}
        try:
            with compiling_for(self.chip), collected_warnings() as warned:
                made = self.make_step(self.recipe, **options)
                if not (isinstance(made, (tuple, list)) and made and callable(made[0])):
                    raise TypeError(
                        f"the function of the plan returned {type(made).__name__}, not a step and "
                        "its arguments. Return them:\n    return train_step, state, batch"
                    )
                fields = (self._estimated if self.chip.uncompiled else self._compiled)(*made)
                fields["warning"] = next(iter(warned), fields.get("warning", ""))
        except JaxmpError as error:
            fields = _failed(error)
        return PlanRow(
            recipe=self.recipe.name,
            target=self.chip.name,
            batch=batch,
            remat=str(options.get("remat", "")),
            usable=self.chip.usable,
            lacking=lacking_format(self.chip, self.recipe),
            **fields,
        )

    def _estimated(self, step: Any, *args: Any) -> dict[str, Any]:
        """Returns fields of the row of a chip for which no program can be compiled."""
        estimate = estimate_memory(step, *args, target=self.chip)
        problem = f"{self.chip.uncompiled}; the memory is the upper end of the estimated range"
        # A program that only may fit does not count as one that fits.
        fits = estimate.fits if estimate.unknown else bool(estimate.fits)
        devices = count_devices(step, args)
        return {"fits": fits, "memory": estimate.most, "problem": problem, "devices": devices}

    def _compiled(self, step: Any, *args: Any) -> dict[str, Any]:
        """Returns fields of the row of a compiled program."""
        chip = self.chip
        context = PolicyContext(self.recipe, chip.platform, repr(self.recipe.name))
        compiler = compiler_of(folder_of(self.cache), chip)
        report, compiled = audit_program(context, step, args, {}, chip, compiler)
        assert compiled is not None and report.memory is not None
        memory = report.memory.required
        is_unused = {row.lhs for row in report.matmuls} == {"float32"}
        warned = (*_WARNED, "fp32_matmul") if is_unused else _WARNED
        try:
            cost = cost_of(compiled, report.attention, self.hosts)._asdict()
        except TargetError as error:
            cost = {"problem": str(error)}
        return {
            "memory": memory,
            "fits": memory <= chip.usable,
            "fallbacks": _fallbacks(report),
            "warning": next((f.message for f in report.findings if f.check in warned), ""),
            "devices": compiled.devices,
            "tokens": _tokens(args),
            "links": {"within": chip.link, "between": chip.network},
            **cost,
        }

    def largest(self) -> PlanRow:
        """Finds the largest batch that fits, by compiling batches around the limit.

        It interpolates linearly between the programs next to the limit, and bisects if that does
        not converge. The next batch does not fit; others may, because XLA computes arrays again in
        programs that exceed the memory. If no batch fits, the result is that of one example.
        """
        default = inspect.signature(self.make_step).parameters.get("batch_size")
        batch = getattr(default, "default", None)
        batch = batch if isinstance(batch, int) else _FIRST_BATCH
        low = high = None
        rows = [self.measure(batch)]
        while rows[-1].fits is not None:
            low, high = (rows[-1], high) if rows[-1].fits else (low, rows[-1])
            first, last = (row.batch or 0 if row else 0 for row in (low, high))
            if low and first >= _MAX_BATCH:
                remark = "it fits, and larger batches were not tried"
                return dataclasses.replace(low, fallbacks=(*low.fallbacks, remark))
            if last - first == 1:
                return low or rows[-1]
            guess = (first + last) // 2 if high else 2 * first
            if 1 < len(rows) < _LINEAR:
                before, after = (low, high) if low and high else rows[-2:]
                guess = _interpolated(before, after, self.chip.usable)
            batch = max(first + 1, min(guess, last - 1 if high else 4 * first))
            rows.append(self.measure(batch))
        return rows[-1]


def _failed(error: JaxmpError) -> dict[str, Any]:
    """Returns the fields of a row without a program. XLA names the memory that a TPU lacks."""
    problem = brief(error)
    need = re.search(r"does not fit .* requires ([\d.]+)([KMGT]?)", problem)
    if need is None or not isinstance(error, TargetError):
        return {"problem": problem}
    return {"fits": False, "memory": int(float(need[1]) * 1024 ** " KMGT".index(need[2] or " "))}


def _interpolated(first: PlanRow, second: PlanRow, limit: int) -> int:
    """Returns the largest batch below a limit of memory that grows linearly from two programs."""
    a, b = first.batch or 0, second.batch or 0
    slope = (second.memory - first.memory) / (b - a)
    return int(a + (limit - first.memory) / slope) if slope > 0 else 2 * max(a, b)


def _fallbacks(report: AuditReport) -> tuple[str, ...]:
    """Returns the findings about slower kernels, without repetitions in other layers."""
    findings = (finding for finding in report.findings if finding.check in _FALLBACKS)
    groups = _section.grouped(findings, lambda finding: finding.message)
    return tuple(
        f"{_section.abbreviate(sorted({f.module or 'the step' for f in group}))}: {message}"
        for message, group in groups.items()
    )


def _tokens(args: tuple[Any, ...]) -> int:
    """Returns the elements of the largest integer array of two or more axes of the batch."""
    arrays = (leaf for leaf in jax.tree.leaves(args[-1:]) if getattr(leaf, "ndim", 0) > 1)
    return max((x.size for x in arrays if jnp.issubdtype(x.dtype, jnp.integer)), default=0)


def relative(
    rows: list[PlanRow], baseline: str, prices: Mapping[str, float], rates: Mapping[str, float]
) -> list[PlanRow]:
    """Returns rows with bounds per example, relative to the first compiled row of the baseline.

    Args:
      rows: those of one chip, whose bounds are in seconds.
      baseline: name of a recipe.
      prices: chip -> price of one device for an hour.
      rates: "chip/recipe" -> measured tokens per second of all devices.
    """
    per_example = lambda row: (row.bound or 0.0) / (row.batch or 1)
    own = [row for row in rows if row.recipe == baseline]
    unit = next(filter(None, map(per_example, [*own, *rows])), 1.0)
    compared = list[PlanRow]()
    for row in rows:
        changes: dict[str, Any] = {"bound": None}
        if seconds := per_example(row):
            bound, error = seconds / unit, error_of(row.target, row.narrow, MEASURED["cases"])
            error = error if seconds != unit else (1.0, 1.0)
            interval = tuple(round(bound / factor, 4) for factor in error[::-1])
            changes = {"bound": round(bound, 4), "interval": interval}
        pair = f"{row.target}/{row.recipe}"
        timed = rates.get(pair)
        rate = timed or (row.tokens / row.bound if row.bound else 0)
        if row.target in prices and rate and row.devices:
            changes["cost"] = round(prices[row.target] * row.devices / 3600 / rate * 1e9, 4)
            changes["cost_from"] = "measured" if timed else "bound"
        elif row.target in prices:
            reason = _NO_TOKENS if row.bound else "not compiled, or no bound"
            changes["cost_from"] = f"no cost: {reason}" + _NO_RATE.format(pair) * (not timed)
        compared.append(dataclasses.replace(row, **changes))
    return compared
