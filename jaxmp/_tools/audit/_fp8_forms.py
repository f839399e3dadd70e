"""Forms of matmuls that never run in FP8, and their share of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxmp import _core, _programs

# Form of a matmul that always runs in 16 bits -> its name, and the reason.
FORMS = {
    "ragged_dot_general": ("ragged_dot", "jaxmp quantizes no groups of rows"),
    "conv_general_dilated": ("convolution", "jaxmp quantizes linear layers only"),
    "dot_general": ("batched matmul", "its kernels, or activations, have a batch dimension"),
}


def excluded_form(equation: Any) -> tuple[str, str]:
    """Returns the name of a form that never runs in FP8, and the reason; ("", "") for others."""
    name = equation.primitive.name
    is_plain = name == "dot_general" and not _programs.dot_of(equation).batch[0]
    return ("", "") if is_plain else FORMS.get(name, ("", ""))


def share_notes(jaxpr: Any) -> Iterator[str]:
    """Yields the share of a program's FLOPs in FP8, and the forms of matmuls that are not."""
    flops = _programs.count_flops(jaxpr)
    fp8 = sum(count for dtypes, count in flops.items() if all(map(_core.is_fp8, dtypes)))
    if flops:
        yield f"{fp8 / flops.total():.1%} of the FLOPs of all matmuls and convolutions are in FP8"
    flat = list(_programs.equations(jaxpr))
    calls = (call for call in flat if _programs.name_of(call) == _programs.MX_MATMUL)
    in_fp8 = {id(equation) for call in calls for equation in _programs.equations_inside(call)}
    forms = Counter(excluded_form(equation) for equation in flat if id(equation) not in in_fp8)
    for (name, reason), count in forms.items():
        if name:
            yield f"{count} x {name} in 16 bits: {reason}"
