"""Charts of a validation as inline SVG, in the colours of the page's light or dark scheme."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

# A page on a phone shows a chart at about 340 pixels, in which text of 12 units has 10 pixels.
WIDTH, HEIGHT = 400, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 36
_TICKS = 5  # at most, per axis
_POINTS = 250  # of a curve; longer ones are averaged in bins

# Dash patterns distinguish the curves without colours. `.s0` to `.s5` of the style sheet are the
# colours; the reference is `.s0`, solid.
_DASHES = ("", "", "6 3", "2 2", "8 3 2 3", "10 4")

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
.jaxmp svg text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.jaxmp .grid { stroke: var(--rule); stroke-width: 1; }
.jaxmp .limit { stroke: var(--bad); stroke-width: 1; stroke-dasharray: 4 3; }
.jaxmp .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.jaxmp .key { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .5rem 0; padding: 0; }
.jaxmp .key svg { display: inline; width: 32px; height: 10px; margin-right: .35rem; }
.jaxmp .key li { list-style: none; overflow-wrap: anywhere; }
""" + "\n".join(
    f".jaxmp .s{n} {{ stroke: var(--s{n}); }} .jaxmp .b{n} {{ fill: var(--s{n}); opacity: .16; }} "
    f".jaxmp .d{n} {{ fill: var(--s{n}); }}"
    for n in range(6)
)


class Curve(NamedTuple):
    """Curve of a chart.

    Args:
      x: increasing positions.
      y: values; non-finite ones interrupt the curve.
      style: index of colour and dashes; 0 is the reference.
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
    marks: bool = False,
) -> str:
    """Returns a figure with curves over the training step; "" without a finite value.

    Args:
      title: the quantity.
      note: its unit, or the meaning of the band.
      curves: the curves; those behind others first.
      log: 0 for a linear vertical axis; 2 or 10 for a logarithmic one with powers of this number,
        which shows positive values only.
      limits: values at which a dashed horizontal line is drawn.
      label: the text of a value on the vertical axis.
      marks: True to draw every value as a dot, too.
    """
    curves = [_thinned(curve) for curve in curves]
    values = [v for curve in curves for v in (*curve.y, *curve.low, *curve.high)] + list(limits)
    values = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not values:
        return ""
    axis = {0: _linear_axis, 2: _binary_axis, 10: _log_axis}[log](values)
    label = label or {0: "{:.4g}".format, 2: _binary_label, 10: _power_label}[log]
    last = max((x for curve in curves for x in curve.x), default=1) or 1
    across = lambda x: _LEFT + (WIDTH - _LEFT - _RIGHT) * x / last
    up = lambda value: _vertical(value, axis, log)
    parts = [_frame(axis, last, across, up, label)]
    parts += [_line(_LEFT, WIDTH - _RIGHT, up(limit), "limit") for limit in limits]
    for curve in curves:
        parts.append(_band(curve, across, up, log))
    for curve in curves:
        parts.append(_path(curve, across, up, log))
        parts += _dots(curve, across, up, log) if marks else []
    name = html.escape(f"{title}, {note}" if note else title, quote=True)
    caption = html.escape(title) + (f" <span>{html.escape(note)}</span>" if note else "")
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">'
        f"{''.join(parts)}</svg></figure>"
    )


def key(names: Sequence[str]) -> str:
    """Returns the legend of all charts; the style of a name is its index."""
    items = "".join(
        f'<li><svg viewBox="0 0 32 10" aria-hidden="true"><path d="M1 5H31" '
        f"{_stroke(style)}/></svg>{html.escape(name)}</li>"
        for style, name in enumerate(names)
    )
    return f'<ul class="key">{items}</ul>'


# ---------------------------------------------------------------------------
# Axes
# ---------------------------------------------------------------------------


class _Axis(NamedTuple):
    low: float
    high: float
    ticks: tuple[float, ...]


def _linear_axis(values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    step = _round_step((high - low) / (_TICKS - 1))
    low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    return _Axis(low, high, tuple(low + step * n for n in range(round((high - low) / step) + 1)))


def _round_step(size: float) -> float:
    """Returns the smallest of 1, 2, 2.5 and 5 times a power of ten that is at least `size`."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= size * (1 - 1e-9))


def _log_axis(values: Sequence[float]) -> _Axis:
    """Returns an axis of powers of ten; within a decade or two, of other round values, too."""
    low, high = math.log10(min(values)), math.log10(max(values))
    first, last = math.floor(low + 1e-9), math.ceil(high - 1e-9)
    last = max(last, first + 1)
    if last - first > 2:
        stride = max(1, math.ceil((last - first) / (_TICKS - 1)))
        return _Axis(first, last, tuple(10.0**n for n in range(first, last + 1, stride)))
    ticks = [step * 10.0**n for n in range(first, last + 1) for step in (1, 2, 5)]
    logs = [math.log10(tick) for tick in ticks]
    start = max((x for x in logs if x <= low + 1e-9), default=logs[0])
    end = min((x for x in logs if x >= high - 1e-9 and x > start), default=logs[-1])
    inside = tuple(tick for tick, x in zip(ticks, logs, strict=True) if start <= x <= end)
    return _Axis(start, end, inside)


def _binary_axis(values: Sequence[float]) -> _Axis:
    """Returns an axis of powers of two, with at least one beyond each end."""
    first, last = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    first, last = first - 1, last + 1
    stride = math.ceil((last - first) / (_TICKS - 1))
    ticks = tuple(2.0**n for n in range(first, last + 1, stride))
    return _Axis(first * math.log10(2), last * math.log10(2), ticks)


def _vertical(value: float, axis: _Axis, log: int) -> float:
    share = ((math.log10(value) if log else value) - axis.low) / (axis.high - axis.low)
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * share


def _power_label(value: float) -> str:
    return f"{value:g}" if 1e-3 <= value < 1e4 else f"{value:.0e}".replace("e-0", "e-")


def _binary_label(value: float) -> str:
    return f"2^{round(math.log2(value))}"


def _frame(
    axis: _Axis,
    last: float,
    across: Callable[[float], float],
    up: Callable[[float], float],
    label: Callable[[float], str],
) -> str:
    parts = []
    for tick in axis.ticks:
        y = up(tick)
        parts.append(_line(_LEFT, WIDTH - _RIGHT, y, "grid"))
        text = html.escape(label(0.0 if abs(tick) < 1e-12 else tick))
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for tick in _linear_axis([0, last]).ticks:
        if tick <= last and tick == int(tick):
            parts.append(
                f'<text x="{across(tick):.1f}" y="{HEIGHT - _BOTTOM + 15}" '
                f'text-anchor="middle">{int(tick)}</text>'
            )
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>')
    return "".join(parts)


def _line(left: float, right: float, y: float, name: str) -> str:
    return f'<path class="{name}" d="M{left} {y:.1f}H{right}"/>'


# ---------------------------------------------------------------------------
# Curves
# ---------------------------------------------------------------------------


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


def _drawn(value: float, log: int) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _stroke(style: int) -> str:
    dashes = _DASHES[style % len(_DASHES)]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'class="curve s{style % 6}"{dashed}'


def _path(
    curve: Curve, across: Callable[[float], float], up: Callable[[float], float], log: int
) -> str:
    commands, pen = [], "M"
    for x, y in zip(curve.x, curve.y, strict=True):
        if _drawn(y, log):
            commands.append(f"{pen}{across(x):.1f} {up(y):.1f}")
            pen = "L"
        else:
            pen = "M"
    return f'<path {_stroke(curve.style)} d="{"".join(commands)}"/>' if commands else ""


def _dots(
    curve: Curve, across: Callable[[float], float], up: Callable[[float], float], log: int
) -> list[str]:
    return [
        f'<circle class="d{curve.style % 6}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="3"/>'
        for x, y in zip(curve.x, curve.y, strict=True)
        if _drawn(y, log)
    ]


def _band(
    curve: Curve, across: Callable[[float], float], up: Callable[[float], float], log: int
) -> str:
    rows = [
        (across(x), up(low), up(high))
        for x, low, high in zip(curve.x, curve.low, curve.high, strict=False)
        if _drawn(low, log) and _drawn(high, log)
    ]
    if len(rows) < 2:
        return ""
    there = [f"{x:.1f} {high:.1f}" for x, _, high in rows]
    back = [f"{x:.1f} {low:.1f}" for x, low, _ in reversed(rows)]
    return f'<path class="b{curve.style % 6}" d="M{"L".join(there + back)}Z"/>'
