"""Report on the statistics of a step: losses in other formats, and the first loss scale."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import jax
import numpy as np

from jaxmp import _programs
from jaxmp._tools.report._section import Section, grouped, module_text, share_text, table
from jaxmp._tools.report._views import Report
from jaxmp._tools.stats._measure import LAST, POWERS, TensorStats

if TYPE_CHECKING:
    from jaxmp._tools.stats._with_stats import TrainingStats

# Largest share of the gradient that a suggested loss scale loses.
MAX_LOST = 0.001
# Powers of two of the compared scales: from the default `min_scale` of `DynamicLossScale`.
_POWERS = range(-14, 25)
# Factor between the gradients and the largest number of float16 that a suggestion leaves.
_HEADROOM = 4
_SMALLEST, _LARGEST = -25, 15  # exponents at the ends of float16's range


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRow:
    """Statistics of a tensor, over all iterations and devices.

    Args:
      kind: such as "gradients".
      name: the module or the parameter.
      amax: largest magnitude; of a gradient, without the loss scale.
      rms: root mean square; of a gradient, without the loss scale.
      zero: share of elements that are zero.
      nonfinite: share of elements that are infinite or NaN.
      formats: format -> (share of the elements other than zero that become zero, share of them
        that exceed the range, signal-to-noise ratio in decibels), of a gradient with the loss
        scale of the step. The format "actual" is the FP8 format of the program, with its scale.
    """

    kind: str
    name: str
    amax: float
    rms: float
    zero: float
    nonfinite: float
    formats: dict[str, tuple[float, float, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatsReport(Report):
    """Comparison of formats and loss scales for a step. Frozen; contains plain data.

    Args:
      loss_scale: the loss scale for float16 to start with; None if each scale loses 0.1 % of the
        gradients or more.
      scales: the curve of the lost share against the scale: rows of (scale, share of the gradient
        elements other than zero that becomes zero in float16, share that becomes infinite, with
        which a step is skipped).
      tensors: the tensors.
      errors: format of `what_if` -> "gradients" or "activations" -> module -> relative error.
      unknown: operations that contain functions, whose tensors are not measured.

    Example:
      >>> stats = jaxmp.with_stats(jax.grad(lambda w: jnp.square(w).sum()))(jnp.ones(4))
      >>> report = stats.report()
      >>> report.loss_scale, report.to_dict() == type(report).from_json(report.to_json()).to_dict()
      (1024.0, True)
    """

    _subject = "statistics"
    _title = "Statistics of a training step"
    _command = "pathlib.Path('statistics.json').write_text(stats.report().to_json())"
    _schema: ClassVar = {"schema": "jaxmp.statistics", "schema_version": 1}

    loss_scale: float | None
    scales: tuple[tuple[float, float, float], ...]
    tensors: tuple[TensorRow, ...]
    errors: dict[str, dict[str, dict[str, float]]] = dataclasses.field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    def _sections(self, full: bool) -> list[Section]:
        # The scales that lose a part of the gradient, and those beside them that lose nothing.
        lost = [row[1] + row[2] for row in self.scales]
        is_near = [any(0 < x < 1 for x in lost[max(n - 1, 0) : n + 2]) for n in range(len(lost))]
        some = [row for n, row in enumerate(self.scales) if is_near[n] and lost[n] < 1]
        near = self.scales if full else some or self.scales[:1]
        scales = tuple((_power(x), *map(share_text, row)) for x, *row in near)
        is_usable = self.loss_scale is not None and not self._nonfinite()
        mood = "" if not self.tensors else "good" if is_usable else "bad"
        inside = f"The tensors inside of {', '.join(self.unknown)} are not measured. "
        advice = inside * bool(self.unknown) + self._advice()
        sections = [
            Section("Loss scale for float16", advice, _SCALE_COLUMNS, scales, mood=mood),
            *self._errors(full),
            Section("Losses in each format", _LEGEND),
        ]
        for kind, rows in grouped(self.tensors, lambda row: row.kind).items():
            rows.sort(
                key=lambda row: (-row.nonfinite, min(snr for *_, snr in row.formats.values()))
            )
            shown = rows if full else rows[:_ROWS]
            more = len(rows) - len(shown)
            text = f"report.tensors has {more} more." if more else ""
            columns = [*_TENSOR_COLUMNS]
            for name in dict.fromkeys(name for row in rows for name in row.formats):
                columns.append((name.removeprefix("float8_"), functools.partial(_losses, name)))
            if shown[0].nonfinite:
                columns.append(("nan/inf", lambda row: share_text(row.nonfinite)))
            sections.append(table(kind.replace("_", " ").capitalize(), shown, columns, text))
        return sections

    def _errors(self, full: bool) -> list[Section]:
        """Returns the errors of modules in the order of the forward pass.

        Without `full`, they are those of the modules with the largest errors of gradients.
        """
        names = [(name, kind) for name, kinds in self.errors.items() for kind in sorted(kinds)]
        columns = [self.errors[name][kind] for name, kind in names]
        if not columns:
            return []
        modules = dict.fromkeys(module for column in columns for module in column)
        gradients = [kinds.get(_programs.GRADIENTS, {}) for kinds in self.errors.values()]
        largest = lambda module: max(column.get(module, 0) for column in gradients)
        worst = sorted(modules, key=largest, reverse=True)[: None if full else _ROWS]
        share = lambda column, module: f"{column[module]:.2%}" if module in column else ""
        cells = tuple(
            (module_text(module), *(share(column, module) for column in columns))
            for module in modules
            if module in worst
        )
        labels = [
            f"{name} {'outputs' if kind != _programs.GRADIENTS else kind}" for name, kind in names
        ]
        return [Section("What if: errors of modules", _ERRORS, ("", *labels), cells)]

    def _nonfinite(self) -> TensorRow | None:
        """Returns the gradient with the largest share of elements that are infinite or NaN."""
        rows = [row for row in self.tensors if row.kind == _programs.GRADIENTS and row.nonfinite]
        return max(rows, key=lambda row: row.nonfinite, default=None)

    def _advice(self) -> str:
        broken = self._nonfinite()
        if broken is not None:
            return (
                f"{share_text(broken.nonfinite)} of the elements of the gradient {broken.name} are "
                f"infinite or NaN, so no loss scale follows. {_LOCATE}"
            )
        if not self.scales:
            is_zero = any(row.kind == _programs.GRADIENTS for row in self.tensors)
            text = "All gradients of the step are zero, so it trains nothing: the loss does not "
            text += "depend on the parameters, a value in it is infinite, or the gradients are too "
            text += f"small for their format. {_LOCATE}"
            return text if is_zero else "The step has no gradients."
        lost = {scale: underflow + overflow for scale, underflow, overflow in self.scales}
        scale = self.loss_scale or min(lost, key=lambda scale: lost[scale])
        share = f"{share_text(lost[scale])} of the gradient elements that are not zero"
        if self.loss_scale is None:
            return f"No scale loses less than 0.1%: {_power(scale)} loses {share}. Use bfloat16."
        return f"jaxmp.DynamicLossScale({_power(scale)}) loses {share}."


_LOCATE = "jaxmp.locate_nonfinite(step, *args) names the cause."
_SCALE_COLUMNS = ("scale", "becomes zero", "exceeds the range")
_LEGEND = (
    "Share of the elements other than zero that become zero or exceed the range, and the "
    "signal-to-noise ratio in dB. FP8 formats have a scale for each tensor. The magnitudes of "
    "gradients are without the loss scale of the step, and the roundings with it."
)
_ERRORS = (
    "Norm of the difference that the format makes to the outputs and gradients of a module, over "
    "their norm, in one step that was run again in this format."
)
# Rows of each table of the short report: those with the lowest signal-to-noise ratio.
_ROWS = 8


def _power(scale: float) -> str:
    return f"2.0**{math.log2(scale):.0f}"


# Without a finite element, a tensor has no magnitude and no losses.
_TENSOR_COLUMNS: tuple[tuple[str, Callable[[TensorRow], str]], ...] = (
    ("", lambda row: module_text(row.name)),
    ("largest", lambda row: "" if row.nonfinite == 1 else f"{row.amax:.3g}"),
    ("rms", lambda row: "" if row.nonfinite == 1 else f"{row.rms:.3g}"),
)


def _losses(name: str, row: TensorRow) -> str:
    """Returns the share that a format loses, and its signal-to-noise ratio."""
    if row.nonfinite == 1 or name not in row.formats:
        return ""
    underflow, overflow, snr = row.formats[name]
    return f"{share_text(underflow + overflow)} {snr:.0f}"


# ---------------------------------------------------------------------------
# From the arrays
# ---------------------------------------------------------------------------


def make_stats_report(stats: TrainingStats) -> StatsReport:
    """Returns the report on the statistics of a step."""
    stats = jax.device_get(stats)
    flat = [(kind, name, x) for kind, group in stats.tensors.items() for name, x in group.items()]
    # Code in a branch that was not taken has no elements.
    scale, rows, counts = float(np.max(stats.loss_scale)), [], np.zeros((256, 3))
    for kind, name, x in flat:
        is_scaled = kind == _programs.GRADIENTS or (
            kind == _programs.OPERANDS and ":output_grad" in name
        )
        if x.exponents.any():
            rows.append(_row(kind, name, x, scale if is_scaled else 1.0))
        if is_scaled:
            counts += x.exponents.reshape(-1, 256, 3).sum(0, dtype=np.float64)
    scales = _scales(counts, round(math.log2(scale)))
    # JAX sorts the keys of a dict.
    errors = {
        name: {
            kind: {module: float(group[module]) for module in stats.modules if module in group}
            for kind, group in kinds.items()
        }
        for name, kinds in stats.errors.items()
    }
    return StatsReport(
        loss_scale=_first(scales),
        scales=scales,
        tensors=tuple(rows),
        errors=errors,
        unknown=stats.unknown,
    )


def _scales(counts: np.ndarray, shift: int) -> tuple[tuple[float, float, float], ...]:
    """Returns the lost shares for each scale.

    Args:
      counts: elements by exponent and fraction, as in `TensorStats.exponents`.
      shift: binary logarithm of the loss scale that they contain.
    """
    counts = counts[:255]
    counts[0, POWERS] = 0
    total, columns, rows = counts.sum(), np.arange(3), []
    for power in _POWERS if total else ():
        exponents = np.arange(255)[:, None] - 127 - shift + power
        # Half of the smallest number rounds to zero, and 65520 to infinity.
        zero = exponents + (columns != POWERS) <= _SMALLEST
        over = exponents + (columns == LAST) > _LARGEST
        shares = (float(counts[flags].sum() / total) for flags in (zero, over))
        rows.append((2.0**power, *shares))
    return tuple(rows)


def _first(scales: tuple[tuple[float, float, float], ...]) -> float | None:
    """Returns the largest scale with headroom that loses little, otherwise the smallest one."""
    allowed = [scale for scale, underflow, over in scales if not over and underflow < MAX_LOST]
    if not allowed:
        return None
    return max(allowed[0], allowed[-1] * 2.0 ** -(_HEADROOM if scales[-1][2] else 0))


def _row(kind: str, name: str, stats: TensorStats, scale: float) -> TensorRow:
    """Returns the row of a tensor; its magnitudes are divided by the loss scale in it."""
    total = lambda x: float(np.sum(x, dtype=np.float64))
    size, finite, nonzero = total(stats.size), total(stats.finite), total(stats.nonzero)
    squared_unit = np.square(stats.unit, dtype=np.float64)
    power = total(stats.power * squared_unit)
    share = lambda count, of: count / max(of, 1)
    formats = {}
    for label, sums in stats.sums.items():
        underflow, noise = total(sums.zeros) - (size - nonzero), total(sums.noise * squared_unit)
        snr = 10 * math.log10(power / noise) if noise else math.inf
        formats[label] = share(underflow, nonzero), share(total(sums.overflow), nonzero), snr
    return TensorRow(
        kind=kind,
        name=name,
        amax=float(np.max(stats.amax)) / scale,
        rms=math.sqrt(share(power, finite)) / scale,
        zero=share(finite - nonzero, size),
        nonfinite=share(size - finite, size),
        formats=formats,
    )
