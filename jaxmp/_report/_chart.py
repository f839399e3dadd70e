"""Charts of a validation as inline SVG, in the colors of the page's light or dark scheme."""

from __future__ import annotations

import html
import importlib
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

_POINTS = 250  # largest number of points of a curve; longer curves are averaged in bins
# Dash patterns distinguish the curves without colors; the reference is 0, solid.
_DASHES = ((), (), (6, 3), (2, 2), (8, 3, 2, 3), (10, 4))
# matplotlib draws in colors that stand for properties of the style sheet.
_NAMES = ("s0", "s1", "s2", "s3", "s4", "s5", "soft", "rule", "bad")
_COLORS = {name: f"#00001{number}" for number, name in enumerate(_NAMES)}
_SETTINGS = {"svg.fonttype": "none", "font.size": 9, "lines.scale_dashes": False}
_SETTINGS |= {f"axes.spines.{side}": False for side in ("top", "left", "right", "bottom")}
# A page has several images: their identifiers would not be unique.
_REMOVED = re.compile(
    r'<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>|<!--.*?-->| xmlns(:xlink)?="[^"]*"'
    r'| id="(?!curve|band|limit)[^"]*"| (width|height)="[\d.]+pt"|font-family: [^;"]*;?',
    re.DOTALL,
)

STYLE = """
.jaxmp { --s0: #1f2328; --s1: #0067b0; --s2: #b94700; --s3: #00765a; --s4: #9a3b7f;
  --s5: #7a6200; }
@media (prefers-color-scheme: dark) {
  .jaxmp { --s0: #e6edf3; --s1: #56b4e9; --s2: #f28c4a; --s3: #2fbf95; --s4: #dd8ec0;
    --s5: #e0c341; }
}
.jaxmp .charts { display: grid; gap: 1rem 1.5rem; margin: .6rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); }
.jaxmp figure { margin: 0; min-width: 0; break-inside: avoid; }
.jaxmp figcaption { font-weight: 600; margin: 0 0 .1rem; }
.jaxmp figcaption span { color: var(--soft); font-weight: 400; }
.jaxmp svg { display: block; width: 100%; height: auto; max-width: 32rem; }
.jaxmp svg text { font-family: system-ui, sans-serif; }
.jaxmp .key { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .5rem 0; padding: 0; }
.jaxmp .key svg { display: inline; width: 32px; height: 10px; margin-right: .35rem; }
.jaxmp .key path { stroke-width: 1.8; }
.jaxmp .key li { list-style: none; overflow-wrap: anywhere; }
"""


class Curve(NamedTuple):
    """Curve of a chart.

    Args:
      x: increasing positions.
      y: values; non-finite ones interrupt the curve.
      style: index of color and dashes; 0 is the reference.
      low: lower bounds of a band around the curve; () without a band.
      high: upper bounds of the band.
    """

    x: Sequence[float]
    y: Sequence[float]
    style: int
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
    image = _inline(_drawn(list(map(_thinned, curves)), log, limits, label))
    name = html.escape(f"{title}, {note}" if note else title, quote=True)
    caption = html.escape(title) + (f" <span>{html.escape(note)}</span>" if note else "")
    image = image.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)
    return f"<figure><figcaption>{caption}</figcaption>{image}</figure>"


def _drawn(
    curves: Sequence[Curve],
    log: int,
    limits: Sequence[float],
    label: Callable[[float], str] | None,
) -> str:
    """Returns the SVG file of a chart.

    Nothing is clipped, since a clipping path needs an identifier, and the axes enclose all values.
    """
    names = ("matplotlib", "matplotlib.figure", "matplotlib.ticker")  # an optional dependency
    matplotlib, figures, ticker = map(importlib.import_module, names)
    with matplotlib.rc_context(_SETTINGS):
        figure = figures.Figure(figsize=(4, 2.5), layout="constrained")
        axes = figure.subplots()
        if log:
            axes.set_yscale("log", base=log, nonpositive="mask")
            axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        else:
            axes.yaxis.set_major_locator(ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        if label is not None:
            axes.yaxis.set_major_formatter(lambda value, _: label(value))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
        for limit in limits:
            line = {"color": _COLORS["bad"], "linewidth": 0.8, "linestyle": (0, (4, 3))}
            axes.axhline(limit, gid="limit", clip_on=False, **line)
        for curve in curves:
            name = f"s{curve.style % 6}"
            style = {"color": _COLORS[name], "clip_on": False}
            rows = zip(curve.x, curve.low, curve.high, strict=False)
            band = [row for row in rows if _is_finite(row)]
            if band:
                x, low, high = map(list, zip(*band, strict=True))
                around = {"alpha": 0.16, "linewidth": 0, "gid": f"band {name}"}
                axes.fill(x + x[::-1], high + low[::-1], **style, **around)
            (line,) = axes.plot(curve.x, curve.y, gid=f"curve {name}", linewidth=1.3, **style)
            line.set_dashes(_DASHES[curve.style % 6])
        axes.grid(axis="y", color=_COLORS["rule"], linewidth=0.7, clip_on=False)
        soft = _COLORS["soft"]
        axes.tick_params(which="both", left=False, bottom=False, labelcolor=soft)
        axes.set_xlabel("step", loc="right", color=soft)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return buffer.getvalue()


def _is_finite(row: Sequence[float]) -> bool:
    return all(map(math.isfinite, row))


def _inline(svg: str) -> str:
    """Returns an SVG file as an element of a page, in the colors of its style sheet."""
    text = _REMOVED.sub("", svg[svg.index("<svg") :]).replace(' id="', ' class="')
    return re.sub(r"#00001(\d)", lambda match: f"var(--{_NAMES[int(match[1])]})", text.strip())


def _thinned(curve: Curve) -> Curve:
    """Returns a curve of at most `_POINTS` values, each the mean of a bin."""
    size = math.ceil(len(curve.x) / _POINTS)
    if size <= 1:
        return curve
    mean = lambda values: [
        sum(part) / len(part)
        for part in (values[n : n + size] for n in range(0, len(values), size))
    ]
    return Curve(mean(curve.x), mean(curve.y), curve.style, mean(curve.low), mean(curve.high))


def key(names: Sequence[str]) -> str:
    """Returns the legend of all charts; the style of a name is its index."""
    items = "".join(
        f'<li><svg viewBox="0 0 32 10" aria-hidden="true"><path d="M1 5H31" '
        f'stroke="var(--s{style % 6})" stroke-dasharray="{" ".join(map(str, dashes))}"/></svg>'
        f"{html.escape(name)}</li>"
        for style, name in enumerate(names)
        for dashes in [_DASHES[style % 6]]
    )
    return f'<ul class="key">{items}</ul>'
