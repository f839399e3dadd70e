"""Arguments of a step: those that are not finite, and its loss scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._core import _compat
from jaxmp._core._trees import is_inexact
from jaxmp._core._typing import PyTree
from jaxmp._tools.audit._trace import Traced
from jaxmp.optim._roles import (
    AVERAGE,
    COUNTER,
    FP8,
    INPUT,
    LOSS_SCALE,
    MASTER,
    MOMENT,
    PARAMETER,
    REMAINDER,
    STATISTICS,
)
from jaxmp.optim._skip import SkipNonfiniteState

# Smallest scale that a fix suggests: the default `min_scale` of `DynamicLossScale`.
_SMALLEST_SCALE = 2.0**-14
# Role of an argument -> its name in reports.
ROLES = {
    role: role
    for role in (PARAMETER, MASTER, REMAINDER, MOMENT, AVERAGE, STATISTICS, COUNTER, INPUT)
} | {FP8: "FP8 state", LOSS_SCALE: "loss scale"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgumentRow:
    """An argument with elements that are not finite.

    Args:
      name: the leaf as code, such as "state.params['w']".
      role: "parameter", "master", "moment", "average", "batch statistics", "loss scale", "counter",
        "FP8 state" or "input".
      index: index of its first element that is not finite.
      value: that element.
      count: number of such elements.
    """

    name: str
    role: str
    index: tuple[int, ...]
    value: float
    count: int


def bad_arguments(traced: Traced) -> dict[int, ArgumentRow]:
    """Returns number -> row of each argument with elements that are not finite."""
    rows = {}
    names, roles = traced.texts(), traced.roles()
    for number, array in enumerate(traced.arrays):
        if not is_inexact(array) or bool(jnp.isfinite(array).all()):
            continue
        values = np.asarray(jax.device_get(array))
        bad = np.argwhere(~np.isfinite(values.astype(np.complex128)))
        index = tuple(map(int, bad[0]))
        value = float(np.real(values[index]))
        rows[number] = ArgumentRow(
            name=names[number],
            role=ROLES[roles[number]],
            index=index,
            value=value,
            count=len(bad),
        )
    return rows


def unusable(traced: Traced) -> str:
    """Returns why the arguments cannot be used again; "" if they can."""
    for name, array in zip(traced.texts(), traced.arrays, strict=True):
        if isinstance(array, jax.ShapeDtypeStruct):
            return f"{name} is a shape, and the step has to be run. Pass arrays."
        if isinstance(array, jax.Array) and array.is_deleted():
            return (
                f"{name} was donated to an earlier call, which deleted it. Donate the state alone:"
                "\n    step = jax.jit(step, donate_argnums=0)"
            )
    return ""


@dataclasses.dataclass(frozen=True)
class ScaleArgument:
    """Loss scale among the arguments.

    Attributes:
      number: number of its array.
      value: the scale.
      is_dynamic: True if it changes during training.
      minimum: smallest scale that a fix may suggest.
      of_skipped: the scale of the last step, if that step was skipped; None otherwise.
    """

    number: int
    value: float
    is_dynamic: bool
    minimum: float
    of_skipped: float | None


def scale_of(traced: Traced) -> ScaleArgument | None:
    """Returns the first loss scale of jaxmp or Flax among the arguments; None if there is none."""
    for number in traced.scales()[:1]:
        node, value = traced.leaves[number].owner, traced.arrays[number]
        value = float(np.max(jax.device_get(value)))
        factor = getattr(node, "backoff_factor", None)
        skipped = None
        if factor is not None and last_step_was_skipped(traced.arguments):
            skipped = value / factor
        minimum = getattr(node, "floor", getattr(node, "minimum_scale", None))
        minimum = max(minimum or 0.0, _SMALLEST_SCALE)
        return ScaleArgument(number, value, factor is not None, minimum, skipped)
    return None


def last_step_was_skipped(tree: PyTree) -> bool:
    """Returns True if the counters in a state are those of a skipped step."""
    is_state = lambda x: isinstance(x, SkipNonfiniteState)
    states = [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]
    flags = [_compat.plain_array(state.stats.last_finite) for state in states]
    return any(not np.all(jax.device_get(flag)) for flag in flags)


def with_scale(arrays: list[Any], number: int, value: float) -> list[Any]:
    """Returns the arguments with another loss scale."""
    changed = list(arrays)
    changed[number] = jnp.full_like(arrays[number], value)
    return changed
