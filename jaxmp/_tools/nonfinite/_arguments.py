"""Arguments of a step: their names, their roles, and those that are not finite."""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from jaxmp._core import _compat
from jaxmp._core._trees import all_finite, is_inexact
from jaxmp._core._typing import PyTree
from jaxmp._gradients._dynamic_loss_scale import DynamicLossScale
from jaxmp._gradients._loss_scale import StaticLossScale
from jaxmp._tools.audit._trace import Traced
from jaxmp.optim._skip import SkipNonfiniteState

# Smallest scale that a fix suggests: the default `min_scale` of `DynamicLossScale`.
_SMALLEST_SCALE = 2.0**-14
PARAMETER, MOMENT, FP8, INPUT = "parameter", "moment", "FP8 state", "input"
# Paths of masters, which the state of an optimizer contains.
MASTERS = re.compile(r"masters\b")
_FP8 = re.compile(r"_overwrite_with_gradient|amax|fp8", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgumentRow:
    """An argument with elements that are not finite.

    Args:
      name: the leaf as code, such as "state.params['w']".
      role: "parameter", "moment", "FP8 state" or "input".
      index: index of its first element that is not finite.
      value: that element.
      count: number of such elements.
    """

    name: str
    role: str
    index: tuple[int, ...]
    value: float
    count: int


def names_of(traced: Traced) -> list[str]:
    """Returns each array among the arguments as code, such as `batch['x']`."""
    leaves = jtu.tree_flatten_with_path(traced.arguments)[0]
    texts = []
    for number in traced.variables:
        _, first, *rest = leaves[number][0]
        position = getattr(first, "idx", None)
        if position is None:
            name = str(getattr(first, "key", first))
        elif position < len(traced.names):
            name = traced.names[position]
        else:
            name = f"args[{position}]"
        texts.append(name + jtu.keystr(tuple(rest)))
    return texts


def roles_of(traced: Traced) -> list[str]:
    """Returns the role of each array among the arguments."""
    written = [leaf in traced.written for leaf in traced.variables]
    weights = map(operator.or_, traced.may_be_weights(), written)
    return list(map(_role, names_of(traced), traced.optimizer_arrays(), weights))


def _role(name: str, is_moment: bool, is_weight: bool) -> str:
    if _FP8.search(name):
        return FP8
    if is_moment and not MASTERS.search(name):
        return MOMENT
    return PARAMETER if is_weight else INPUT


def bad_arguments(traced: Traced) -> dict[int, ArgumentRow]:
    """Returns number -> row of each argument with elements that are not finite."""
    rows = {}
    names, roles = names_of(traced), roles_of(traced)
    for number, array in enumerate(traced.arrays):
        if not is_inexact(array) or bool(jnp.isfinite(array).all()):
            continue
        values = np.asarray(jax.device_get(array))
        bad = np.argwhere(~np.isfinite(values.astype(np.complex128)))
        index = tuple(map(int, bad[0]))
        value = float(np.real(values[index]))
        rows[number] = ArgumentRow(
            name=names[number], role=roles[number], index=index, value=value, count=len(bad)
        )
    return rows


def unusable(traced: Traced) -> str:
    """Returns why the arguments cannot be used again; "" if they can."""
    for name, array in zip(names_of(traced), traced.arrays, strict=True):
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
    node, number = scale_and_number(traced)
    if number is None:
        return None
    value = float(np.max(jax.device_get(traced.arrays[number])))
    factor = getattr(node, "backoff_factor", None)
    skipped = None
    if factor is not None and last_step_was_skipped(traced.arguments):
        skipped = value / factor
    minimum = getattr(node, "floor", getattr(node, "minimum_scale", None))
    minimum = max(minimum or 0.0, _SMALLEST_SCALE)
    return ScaleArgument(number, value, factor is not None, minimum, skipped)


def scale_and_number(traced: Traced) -> tuple[Any, int | None]:
    """Returns the first loss scale among the arguments, and the number of its array, or None."""
    numbers = {leaf: n for n, leaf in enumerate(traced.variables)}
    first = 0
    for node in jax.tree.leaves(traced.arguments, is_leaf=_is_scale):
        paths = [jtu.keystr(path) for path, _ in jtu.tree_flatten_with_path(node)[0]]
        if _is_scale(node):
            leaf = first + next(n for n, path in enumerate(paths) if path.startswith(".scale"))
            if leaf in numbers:
                return node, numbers[leaf]
        first += len(paths)
    return None, None


def _is_scale(node: object) -> bool:
    cls = type(node)
    is_flax = (cls.__module__, cls.__name__) == ("flax.training.dynamic_scale", "DynamicScale")
    return isinstance(node, (StaticLossScale, DynamicLossScale)) or is_flax


def last_step_was_skipped(tree: PyTree) -> bool:
    """Returns True if the counters in a state are those of a skipped step."""
    is_state = lambda x: isinstance(x, SkipNonfiniteState)
    states = [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]
    flags = [_compat.plain_array(state.stats.last_finite) for state in states]
    return any(not np.all(jax.device_get(flag)) for flag in flags)


def has_failed(tree: PyTree) -> bool:
    """Returns True for arrays of a step that are not finite, or the counters of a skipped step."""
    return last_step_was_skipped(tree) or not bool(all_finite(tree))


def with_scale(arrays: list[Any], number: int, value: float) -> list[Any]:
    """Returns the arguments with another loss scale."""
    changed = list(arrays)
    changed[number] = jnp.full_like(arrays[number], value)
    return changed
