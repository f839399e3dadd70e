"""Charts of a report: images in its page, drawn by matplotlib for the light and dark scheme."""

from __future__ import annotations

import base64
import html
import importlib
import io
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Dashes distinguish the curves without colors; the reference is 0, solid.
_DASHES = ("-", "-", "--", ":", "-.", (0, (10, 4)))
# Colors of the text and of the curves, with a contrast of at least 4.5 to the page (WCAG 2.2, AA).
_LIGHT = ("#59636e", "#1f2328", "#0067b0", "#b94700", "#00765a", "#9a3b7f", "#7a6200")
_DARK = ("#9198a1", "#e6edf3", "#56b4e9", "#f28c4a", "#2fbf95", "#dd8ec0", "#e0c341")


class Curve(NamedTuple):
    """Curve of a chart.

    Args:
      x: increasing positions.
      y: values; non-finite ones interrupt the curve.
      style: index of color and dashes; 0 is the reference.
      name: its name in the legend.
      low: lower bounds of a band around the curve; () without a band.
      high: upper bounds of the band.
    """

    x: Sequence[float]
    y: Sequence[float]
    style: int
    name: str
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def chart(
    title: str,
    note: str,
    curves: Sequence[Curve],
    *,
    log: int = 0,
    limits: Sequence[float] = (),
    label: Callable[[float], str] | None = None,
) -> str:
    """Returns a figure with curves over the training step; "" without a finite value.

    Args:
      title: the quantity.
      note: its unit, or the meaning of the band.
      curves: the curves, in the order in which they are drawn.
      log: 0 for a linear vertical axis; 2 or 10 for a logarithmic one with this base, which shows
        positive values only, unless they differ by less than this factor.
      limits: values at which a dashed horizontal line is drawn.
      label: the text of a value on the vertical axis.
    """
    values = [value for curve in curves for value in curve.y]
    values = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not values:
        return ""
    if log and max(values) < log * min(values):
        log = 0  # a logarithmic axis of this range would have a single label
    light, dark = (_drawn(curves, log, limits, label, *colors) for colors in (_LIGHT, _DARK))
    name = html.escape(f"{title}, {note}", quote=True)
    return (
        f"<figure><figcaption>{html.escape(title)} <span>{html.escape(note)}</span></figcaption>"
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{name}"></picture></figure>'
    )


def _drawn(
    curves: Sequence[Curve],
    log: int,
    limits: Sequence[float],
    label: Callable[[float], str] | None,
    ink: str,
    *colors: str,
) -> str:
    """Returns the image of a chart as a data URL."""
    names = ("matplotlib.figure", "matplotlib.ticker")  # an optional dependency
    figures, ticker = map(importlib.import_module, names)
    figure = figures.Figure(figsize=(4, 2.6), layout="constrained")
    axes: Any = figure.subplots()
    if log:
        axes.set_yscale("log", base=log, nonpositive="mask")
    if label is not None:
        axes.yaxis.set_major_formatter(lambda value, _: label(value))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    for limit in limits:
        axes.axhline(limit, color=ink, linewidth=0.8, linestyle="--")
    for curve in curves:
        style, text = curve.style % len(_DASHES), curve.name.replace("$", r"\$")
        if curve.low:
            band = {"color": colors[style], "alpha": 0.16, "linewidth": 0}
            axes.fill_between(curve.x, curve.low, curve.high, **band)
        line = {"color": colors[style], "linestyle": _DASHES[style], "linewidth": 1.3}
        axes.plot(curve.x, curve.y, label=text, **line)
    axes.grid(axis="y", color=ink, alpha=0.25)
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", left=False, bottom=False, labelcolor=ink)
    axes.set_xlabel("step", loc="right", color=ink)
    axes.legend(frameon=False, labelcolor=ink, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200, transparent=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
