"""Finding loss scale, masters and counters in any state, under any nesting."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer

from jaxmp import _overwritten
from jaxmp._core import _compat, _trees
from jaxmp._loss_scale import DynamicLossScale, NoLossScale, StaticLossScale
from jaxmp.errors import (
    CompositionError,
    JaxmpError,
    MasterOverflowError,
    ScaleCollapsedError,
    SkippedStepsWarning,
)
from jaxmp.optim._gradient_dtypes import GradientDtypesState
from jaxmp.optim._master import MasterParamsState, master_states, unpack_masters
from jaxmp.optim._skip import SkipNonfiniteState, SkipSettings, SkipStats, as_axes

_LOSS_SCALES = (NoLossScale, StaticLossScale, DynamicLossScale)


def find(state: Any, kinds: Any) -> list[tuple[str, Any]]:
    """`[(path, node)]` of every node of one of `kinds`, outermost first."""
    flat, _ = jax.tree_util.tree_flatten_with_path(
        _tree(state), is_leaf=lambda x: isinstance(x, kinds)
    )
    return [(jax.tree_util.keystr(path), node) for path, node in flat if isinstance(node, kinds)]


def _tree(state: Any) -> Any:
    """The part of `state` to search; an NNX optimizer keeps it in `opt_state`."""
    return getattr(state, "opt_state", state)


def gradient_options(opt_state: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `value_and_grad` that an optimizer decides: loss scale, dtypes, mapped axes.

    Args:
      opt_state: the optimizer state.
      options: those that the caller gave.

    Returns:
      `options`, with what the optimizer says added.

    Raises:
      CompositionError: for an `axis_name` that is not the optimizer's, or several loss scales.
    """
    settings = [node.settings for _, node in find(opt_state, SkipNonfiniteState)]
    decided: dict[str, Any] = {}
    if settings:
        decided["axis_name"] = _the_axes(settings, options)
    for _, node in find(opt_state, GradientDtypesState)[:1]:
        decided.update(dataclasses.asdict(node.dtypes))
    if "loss_scale" not in options:
        decided["loss_scale"] = shared_loss_scale(opt_state)
    return {**decided, **options}


def _the_axes(settings: list[SkipSettings], options: dict[str, Any]) -> tuple[Any, ...]:
    axes = settings[0].axis_name
    for other in settings[1:]:
        if other.axis_name != axes:
            raise CompositionError(
                f"The groups of this optimizer name different axes: {_shown(axes)} and "
                f"{_shown(other.axis_name)}. Give all of them the same axis_name."
            )
    if "axis_name" in options and as_axes(options["axis_name"]) != axes:
        raise CompositionError(
            f"value_and_grad(axis_name={options['axis_name']!r}), but the optimizer says "
            f"axis_name={_shown(axes)}. State it once, in the optimizer: "
            f"recipe.optimizer(inner, axis_name={options['axis_name']!r}), and leave it out of "
            "value_and_grad, which then averages over that axis."
        )
    return axes


def _shown(axes: tuple[Any, ...]) -> str:
    return repr(axes[0] if len(axes) == 1 else axes or None)


def shared_loss_scale(opt_state: Any) -> Any:
    """The loss scale for gradients of all parameters; `NoLossScale()` if the optimizer keeps none.

    Several groups of parameters, each with its own optimizer, share one backward pass and so one
    scale. `apply_update` adjusts the scales of all groups together, so equal scales stay equal.

    Raises:
      CompositionError: if groups keep loss scales of different settings.
    """
    scales = [
        (path, scale)
        for path, scale in find(opt_state, _LOSS_SCALES)
        if not isinstance(scale, NoLossScale)
    ]
    if not scales:
        return NoLossScale()
    first = scales[0][1]
    for path, scale in scales[1:]:
        if not _alike(first, scale):
            raise CompositionError(
                f"The groups of this optimizer keep different loss scales: {first!r} at "
                f"{scales[0][0]} and {scale!r} at {path}. One backward pass has one scale: give "
                "every group the same one, or put the groups inside: "
                "recipe.optimizer(optax.multi_transform({...}, labels))."
            )
    return jax.tree.map(_compat.plain_array, first, is_leaf=_is_variable)


def _alike(scale: Any, other: Any) -> bool:
    """Whether two loss scales have the same settings and, where they are known, values."""
    if jax.tree.structure(scale) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(scale), jax.tree.leaves(other), strict=True)
    known = [pair for pair in pairs if not any(_is_unknown(value) for value in pair)]
    return all(np.array_equal(a, b) for a, b in known)


def _is_unknown(value: Any) -> bool:
    return isinstance(value, (Tracer, jax.ShapeDtypeStruct))


def _the_only(found: list[tuple[str, Any]], what: str, fix: str) -> Any:
    if not found:
        raise JaxmpError(f"There is no {what} in this state. {fix}")
    if len(found) > 1:
        paths = ", ".join(path or "(top)" for path, _ in found)
        raise JaxmpError(
            f"There are {len(found)} of {what} in this state, at {paths}. Ask for one of them: "
            f"pass the part of the state that holds it."
        )
    return jax.tree.map(_compat.plain_array, found[0][1], is_leaf=_is_variable)


def _is_variable(node: Any) -> bool:
    return hasattr(node, "get_value")


_MAKE = (
    "Make the optimizer with recipe.optimizer(inner) or jaxmp.optim.mixed_precision(inner, ...)."
)


def get_loss_scale(state: Any) -> Any:
    """The loss scale in an optimizer state, train state or any tree that holds one.

    Args:
      state: the state; an NNX optimizer will do.

    Returns:
      The loss scale, with plain arrays for leaves.

    Raises:
      JaxmpError: if there is none, or more than one (naming their paths).

    Example:
      >>> tx = jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1))
      >>> float(get_loss_scale(tx.init({"w": jnp.ones(2)})).scale_value)
      65536.0
    """
    scales = find(state, _LOSS_SCALES)
    # Groups of parameters that keep no loss scale have one `NoLossScale` each.
    several = [pair for pair in scales if not isinstance(pair[1], NoLossScale)]
    return _the_only(several or scales[:1], "a loss scale", _MAKE)


def get_skip_stats(state: Any) -> SkipStats:
    """The counters of skipped steps: `.total .consecutive .at_floor .last_finite`.

    Args:
      state: an optimizer state, a train state or any tree that holds one.

    Returns:
      The counters, scalar arrays.

    Raises:
      JaxmpError: if there are none, or more than one (naming their paths).

    Warns:
      SkippedStepsWarning: once, if the last 10 steps or more were skipped and the counters are on
        the host already, so that nothing waits for the device.

    Example:
      >>> tx = jaxmp.load_recipe("bf16").optimizer(optax.sgd(0.1))
      >>> int(get_skip_stats(tx.init({"w": jnp.ones(2)})).total)
      0
    """
    _warn_where_known(state)
    return _the_only(find(state, SkipStats), "skip counters", _MAKE)


def get_master_params(state: Any) -> Any:
    """The FP32 truth of the parameters, as a tree like them.

    Args:
      state: a train state (anything with `params` and `opt_state`), or an optimizer state in which
        every parameter has an FP32 master.

    Returns:
      The parameters, with masters in the place of those that are stored in 16 bits.

    Example:
      >>> recipe = jaxmp.load_recipe("bf16_params")
      >>> state = jaxmp.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=recipe.optimizer(optax.sgd(0.1))
      ... )
      >>> get_master_params(state)["w"].dtype
      dtype('float32')

    Raises:
      JaxmpError: for an optimizer state alone, where FP32 parameters have no second copy and packed
        remainders are only half of the truth.
    """
    if hasattr(state, "params") and hasattr(state, "opt_state"):
        params, overwritten = _overwritten.split(state.params)
        full = _replace_by_masters(params, state.opt_state)
        return _overwritten.join(full, overwritten, state.params)
    found = find(state, MasterParamsState)
    node = _the_only(found, "master parameters", _MAKE)
    _refuse_partial(node)
    return node.masters


def _refuse_partial(node: MasterParamsState) -> None:
    layout = node.layout
    without = [path for i, (path, _) in enumerate(layout.storage) if not layout.has_master(i)]
    if without:
        raise JaxmpError(
            f"{len(without)} of {len(layout.storage)} parameters (such as {without[0]!r}) are "
            "stored in FP32 and are their own master; the optimizer state holds no second copy. "
            "Pass the train state: jaxmp.get_master_params(train_state)."
        )
    if layout.master == "packed":
        raise JaxmpError(
            "Packed masters are the 16-bit parameters and their remainders together; this state "
            "holds the remainders only. Pass the train state: jaxmp.get_master_params(train_state)."
        )


def _replace_by_masters(params: Any, opt_state: Any) -> Any:
    masters: dict[str, Any] = {}
    for node in master_states(unpack_masters(opt_state, params)):
        held = iter(jax.tree.leaves(node.masters))
        for index, (path, _) in enumerate(node.layout.storage):
            if node.layout.has_master(index):
                masters[path] = next(held)
    collections = _trees.has_collections(params)

    def read(names: _trees.Path, leaf: Any) -> Any:
        inside = _trees.strip_collection(names) if collections else names
        return masters.get(_trees.parameter_path(inside), leaf)

    return _trees.map_with_path(read, params)


# ---------------------------------------------------------------------------
# Checks on the host
# ---------------------------------------------------------------------------


# Steps in a row. A dynamic scale that starts at 2**16 falls to 64 in as many.
_SKIPPED_IN_A_ROW = 10


def check(state: Any, *, skipped_in_a_row: int = _SKIPPED_IN_A_ROW) -> None:
    """Raises if training cannot go on, and warns if no step is applied any more.

    Call it on the host, every so many steps. It waits for the last step to end.

    Args:
      state: a train state, optimizer state, or anything that holds one.
      skipped_in_a_row: warn if at least so many of the last steps were skipped.

    Warns:
      SkippedStepsWarning: with the number of steps, the loss scale, the first parameter whose
        gradient was not finite, and the likely causes, the most likely first.

    Raises:
      ScaleCollapsedError: if gradients still overflow at the minimum scale.
      MasterOverflowError: in the last step a master grew too large for the 16-bit dtype that its
        parameter is stored in.

    Example:
      >>> tx = jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1))
      >>> check(tx.init({"w": jnp.ones(2)}))
    """
    for _, node in find(state, SkipNonfiniteState):
        stats = jax.tree.map(_compat.plain_array, node.stats, is_leaf=_is_variable)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(stats)):
            raise JaxmpError(
                "check reads values, and these are being traced. Call it on the host, outside "
                "jax.jit: state = train_step(state, batch); jaxmp.check(state)."
            )
        # Replicated and vmapped states have a value for each member: the worst one speaks.
        overflow, at_floor, total = (
            int(np.max(jax.device_get(x)))
            for x in (stats.overflow_leaf, stats.at_floor, stats.total)
        )
        if overflow >= 0:
            raise _master_overflow(node, overflow)
        if at_floor > 0:
            scale = float(np.min(_compat.plain_array(node.loss_scale.scale_value)))
            raise ScaleCollapsedError(
                f"The loss scale is at its floor, {scale:g}, and {at_floor} step(s) in "
                f"a row still overflowed ({total} skipped in all).{_culprit(node, stats)} The "
                "gradients are not finite for another reason than the scale: look for a NaN in the "
                "batch or an overflow in the forward pass, or train with "
                "jaxmp.load_recipe('bf16')."
            )
        if int(np.max(jax.device_get(stats.consecutive))) >= skipped_in_a_row:
            warnings.warn(_skipped(node, stats), SkippedStepsWarning, stacklevel=2)


# Guards whose skipped steps `get_skip_stats` has reported: (path, steps skipped before these).
_reported: set[tuple[str, int]] = set()


def _warn_where_known(state: Any) -> None:
    """Warns once of steps skipped in a row, where reading the counters costs nothing."""
    for path, node in find(state, SkipNonfiniteState):
        stats = jax.tree.map(_compat.plain_array, node.stats, is_leaf=_is_variable)
        if not all(_compat.is_on_host(leaf) for leaf in (stats.consecutive, stats.total)):
            continue
        consecutive, total = (int(np.max(x)) for x in (stats.consecutive, stats.total))
        key = path, total - consecutive
        if consecutive >= _SKIPPED_IN_A_ROW and key not in _reported:
            _reported.add(key)
            warnings.warn(_skipped(node, stats), SkippedStepsWarning, stacklevel=3)


def _skipped(node: SkipNonfiniteState, stats: SkipStats) -> str:
    """The message about steps skipped in a row."""
    consecutive, total = (int(np.max(jax.device_get(x))) for x in (stats.consecutive, stats.total))
    scale = ""
    if not isinstance(node.loss_scale, NoLossScale):
        value = np.min(jax.device_get(_compat.plain_array(node.loss_scale.scale_value)))
        scale = f" The loss scale is {float(value):g}."
    causes = enumerate(_causes(node.loss_scale), start=1)
    return (
        f"The last {consecutive} steps were skipped ({total} in all), because their gradients were "
        f"not finite, so the parameters do not change any more.{scale}{_culprit(node, stats)} "
        "Likely causes, the most likely first:"
        + "".join(f"\n  {number}. {cause}" for number, cause in causes)
    )


def _culprit(node: SkipNonfiniteState, stats: SkipStats) -> str:
    """A sentence about the first gradient that was not finite, with a leading blank, or ""."""
    leaf = int(np.max(jax.device_get(stats.nonfinite_leaf)))
    paths = [row[0] for each in master_states(node.inner_state) for row in each.layout.storage]
    if not 0 <= leaf < len(paths):
        return ""
    every = "" if leaf else ", the first parameter of all: a loss that is not finite makes all NaN"
    return f" The first gradient that is not finite is that of {paths[leaf]!r}{every}."


_NOT_FINITE = (
    "The batch, or the loss of it, is not finite: jnp.isfinite(loss), and "
    'jax.config.update("jax_debug_nans", True) to find the operation.'
)
_DIVERGED = (
    "The parameters have become very large: lower the learning rate, clip gradients inside, "
    "recipe.optimizer(optax.chain(optax.clip_by_global_norm(1.0), inner)), and restart from a "
    "checkpoint before it."
)
_FORWARD = (
    "An activation is above 65504, the largest number of float16: give its module "
    'jaxmp.Rule("path/of/module", "c=f32"), or use jaxmp.load_recipe("bf16").'
)


def _causes(loss_scale: Any) -> tuple[str, ...]:
    """What may have made gradients not finite, the most likely cause first."""
    if isinstance(loss_scale, NoLossScale):
        return _NOT_FINITE, _DIVERGED
    if isinstance(loss_scale, StaticLossScale):
        fixed = (
            "The loss scale is too large for these gradients: let it adapt, "
            "recipe.replace(loss_scale=jaxmp.DynamicLossScale())."
        )
        return fixed, _FORWARD, _NOT_FINITE, _DIVERGED
    high = (
        "The loss scale is still too high, if these are the first steps: it falls with each "
        "skipped step. Start lower: recipe.replace(loss_scale=jaxmp.DynamicLossScale("
        "init_scale=2.0**8))."
    )
    return _FORWARD, _NOT_FINITE, high, _DIVERGED


def _master_overflow(node: SkipNonfiniteState, leaf: int) -> MasterOverflowError:
    storage = [
        (*row, state) for state in master_states(node.inner_state) for row in state.layout.storage
    ]
    path, dtype, _ = storage[leaf]
    consequence = "the step was skipped" if dtype == "f16" else "it was saturated"
    return MasterOverflowError(
        f"The FP32 master of {path!r} is too large for {dtype}, in which the parameter is stored, "
        f"so {consequence}. Store it in FP32: Rule({path!r}, 'p=f32'), or lower the learning rate."
    )


# ---------------------------------------------------------------------------
# Compositions that would break training silently
# ---------------------------------------------------------------------------


def check_composition(opt_state: Any) -> None:
    """Refuses a nesting around `mixed_precision` that would break it.

    Args:
      opt_state: the optimizer state (or its shapes) as `tx.init` returns it.

    Raises:
      CompositionError: naming the wrapper, why it breaks, and the nesting that works.
    """
    _check_node(opt_state)


# Wrappers that hand on what they are given, for the parameters that are theirs.
_TRANSPARENT = (
    GradientDtypesState,
    optax.MaskedState,
    optax.PartitionState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)


def _check_node(node: Any) -> None:
    if isinstance(node, SkipNonfiniteState):
        if find(node.inner_state, SkipNonfiniteState):
            raise CompositionError(
                "mixed_precision inside mixed_precision: two guards and two loss scales for the "
                "same parameters. Apply the recipe once: tx = recipe.optimizer(inner)."
            )
        return
    if not find(node, SkipNonfiniteState) and not _keeps_masters(node):
        return
    if isinstance(node, optax.MultiStepsState):
        raise CompositionError(
            "optax.MultiSteps around mixed_precision: an overflow would enter its accumulator and "
            "never leave it. Accumulate inside: recipe.optimizer(optax.MultiSteps(inner, every_k)),"
            " or use value_and_grad(..., microbatches=k)."
        )
    if isinstance(node, optax.ApplyIfFiniteState):
        raise CompositionError(
            "optax.apply_if_finite around mixed_precision hides overflows from the loss scale, "
            "which would never back off. Leave it out: recipe.optimizer(inner) skips such steps "
            "itself."
        )
    if _keeps_masters(node):
        _check_assignable(node)
    for child in _children(node):
        _check_node(child)


def _keeps_masters(node: Any) -> bool:
    return any(jax.tree.leaves(found.masters) for found in master_states(node))


def _check_assignable(node: Any) -> None:
    """Parameters are assigned from their masters: nothing may change the updates afterwards."""
    if isinstance(node, (*_TRANSPARENT, MasterParamsState)):
        return
    if _is_chain(node):
        parts = list(node.values()) if isinstance(node, dict) else list(node)
        for index, part in enumerate(parts[:-1]):
            if _keeps_masters(part):
                raise CompositionError(
                    f"Part {index + 1} of {len(parts)} of an optax.chain keeps masters of 16-bit "
                    "parameters, and other parts come after it. The parameters are assigned from "
                    "the masters, so what comes after would be ignored. Put it inside: "
                    "recipe.optimizer(optax.chain(inner, ...)); for groups of parameters use "
                    "optax.multi_transform."
                )
        return
    raise CompositionError(
        f"{type(node).__name__} around masters of 16-bit parameters: the parameters are assigned "
        "from the masters, so what that wrapper makes of the updates would be ignored. Put it "
        "inside: recipe.optimizer(wrapper(inner)), or store the parameters in FP32."
    )


def _is_chain(node: Any) -> bool:
    plain_tuple = isinstance(node, tuple) and not hasattr(node, "_fields")
    return plain_tuple or isinstance(node, dict)


def _children(node: Any) -> list[Any]:
    """Direct children of a pytree node; none for a leaf."""
    if isinstance(node, optax.PartitionState):
        return list(node.inner_states.values())
    flat = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
    return [] if len(flat) == 1 and flat[0] is node else flat
