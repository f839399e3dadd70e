"""Numbers with units, for reports."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, such as `1 cast` and `2 launches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{plural * (count != 1)}"


def flops_text(flops: float) -> str:
    """Returns FLOPs with a unit, such as `1.5 GFLOP`."""
    return f"{_scaled(flops)}FLOP"


def bytes_text(count: float) -> str:
    """Returns bytes with a unit, such as `1.5 MB`; a megabyte is 10**6 bytes."""
    return f"{_scaled(count)}B"


def share_text(part: float, whole: float = 1) -> str:
    """Returns a share such as `12.5%`; `""` of nothing.

    Only exact values are `0.0%` and `100.0%`.
    """
    if not whole:
        return ""
    share = part / whole
    if 0 < share < 0.0005:
        return "<0.1%"
    if 0.9995 <= share < 1:
        return ">99.9%"
    return f"{share:.1%}"


def module_text(module: str) -> str:
    """Returns a module path; `(root)` for the empty one."""
    return module or "(root)"


def _scaled(value: float) -> str:
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.3g} {prefix}"
