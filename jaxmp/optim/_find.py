"""Reads loss scale, masters and counters from a state at any nesting, and checks them."""

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
from jaxmp._core._typing import Array, PyTree
from jaxmp._loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from jaxmp.errors import (
    CompositionError,
    JaxmpError,
    MasterOverflowError,
    ScaleCollapsedError,
    SkippedStepsWarning,
)
from jaxmp.optim._assign import unpack_masters
from jaxmp.optim._gradient_dtypes import GradientDtypesState
from jaxmp.optim._master import MasterParamsState, master_states
from jaxmp.optim._skip import SkipNonfiniteState, SkipSettings, SkipStats, as_axes

_LOSS_SCALES = (NoLossScale, StaticLossScale, DynamicLossScale)


def find(state: PyTree, classes: type | tuple[type, ...]) -> list[tuple[str, Any]]:
    """Returns `[(path, node), ...]` of all nodes of the given classes, outermost first."""
    flat, _ = jax.tree_util.tree_flatten_with_path(
        _tree(state), is_leaf=lambda x: isinstance(x, classes)
    )
    return [(jax.tree_util.keystr(path), node) for path, node in flat if isinstance(node, classes)]


def _tree(state: PyTree) -> PyTree:
    """Returns the optimizer state of a train state or NNX optimizer; otherwise `state`."""
    return getattr(state, "opt_state", state)


def gradient_options(opt_state: PyTree, options: dict[str, Any]) -> dict[str, Any]:
    """Adds the options of `value_and_grad` that an optimizer determines.

    These are the loss scale, the dtypes of sums, and the mapped axes.

    Args:
      opt_state: the optimizer state.
      options: options of the caller, which take precedence.

    Returns:
      All options.

    Raises:
      CompositionError: if `axis_name` differs from that of the optimizer, or if the optimizer has
        several loss scales.
    """
    settings = [node.settings for _, node in find(opt_state, SkipNonfiniteState)]
    defaults: dict[str, Any] = {}
    if settings:
        defaults["axis_name"] = _the_axes(settings, options)
    for _, node in find(opt_state, GradientDtypesState)[:1]:
        defaults.update(dataclasses.asdict(node.dtypes))
    if "loss_scale" not in options:
        defaults["loss_scale"] = shared_loss_scale(opt_state)
    return {**defaults, **options}


def _the_axes(settings: list[SkipSettings], options: dict[str, Any]) -> tuple[Any, ...]:
    axes = settings[0].axis_name
    for other in settings[1:]:
        if other.axis_name != axes:
            raise CompositionError(
                f"The groups of this optimizer have different axes: {_shown(axes)} and "
                f"{_shown(other.axis_name)}. Use the same axis_name for all groups."
            )
    if "axis_name" in options and as_axes(options["axis_name"]) != axes:
        raise CompositionError(
            f"value_and_grad(axis_name={options['axis_name']!r}), but the optimizer has "
            f"axis_name={_shown(axes)}. Specify it once, in the optimizer: "
            f"recipe.optimizer(inner, axis_name={options['axis_name']!r}), and leave it out of "
            "value_and_grad, which then averages over this axis."
        )
    return axes


def _shown(axes: tuple[Any, ...]) -> str:
    return repr(axes[0] if len(axes) == 1 else axes or None)


def shared_loss_scale(opt_state: PyTree) -> LossScale:
    """Returns the loss scale for all parameters; `NoLossScale()` if the optimizer has none.

    Several groups of parameters, each with an optimizer, share one backward pass and therefore one
    scale. `apply_update` adjusts the scales of all groups together, so that equal scales remain
    equal.

    Raises:
      CompositionError: if the loss scales of groups have different settings.
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
                f"The groups of this optimizer have different loss scales: {first!r} at "
                f"{scales[0][0]} and {scale!r} at {path}. One backward pass has one scale. Use the "
                "same one for all groups, or put the groups inside: "
                "recipe.optimizer(optax.multi_transform({...}, labels))."
            )
    return jax.tree.map(_compat.plain_array, first, is_leaf=_is_variable)


def _alike(scale: LossScale, other: LossScale) -> bool:
    """Returns True if two loss scales have the same settings and, if known, the same values."""
    if jax.tree.structure(scale) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(scale), jax.tree.leaves(other), strict=True)
    known = [pair for pair in pairs if not any(_is_unknown(value) for value in pair)]
    return all(np.array_equal(a, b) for a, b in known)


def _is_unknown(value: object) -> bool:
    return isinstance(value, (Tracer, jax.ShapeDtypeStruct))


def _only(nodes: list[tuple[str, Any]], description: str) -> Any:
    """Returns the node of a list with one `(path, node)`, with plain arrays as leaves."""
    if not nodes:
        raise JaxmpError(
            f"This state contains no {description}. Make the optimizer with "
            "recipe.optimizer(inner) or jaxmp.optim.mixed_precision(inner, ...)."
        )
    if len(nodes) > 1:
        paths = ", ".join(path or "(top)" for path, _ in nodes)
        raise JaxmpError(
            f"This state contains {len(nodes)} {description}s, at {paths}. Pass the part of the "
            "state that contains the one to read."
        )
    return jax.tree.map(_compat.plain_array, nodes[0][1], is_leaf=_is_variable)


def _is_variable(node: PyTree) -> bool:
    return hasattr(node, "get_value")


def get_loss_scale(state: PyTree) -> LossScale:
    """Returns the loss scale in an optimizer state, train state or any other tree.

    Args:
      state: the state, or an NNX optimizer.

    Returns:
      The loss scale, with plain arrays as leaves.

    Raises:
      JaxmpError: if there is none, or more than one, with their paths.

    Example:
      >>> tx = jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1))
      >>> float(get_loss_scale(tx.init({"w": jnp.ones(2)})).scale_value)
      65536.0
    """
    scales = find(state, _LOSS_SCALES)
    # Groups of parameters without a loss scale have a `NoLossScale` each.
    several = [pair for pair in scales if not isinstance(pair[1], NoLossScale)]
    return _only(several or scales[:1], "loss scale")


def get_skip_stats(state: PyTree) -> SkipStats:
    """Returns the counters of skipped steps: `.total .consecutive .at_floor .last_finite`.

    Args:
      state: an optimizer state, a train state or any other tree that contains counters.

    Returns:
      The counters, as scalar arrays.

    Raises:
      JaxmpError: if there are none, or more than one set, with their paths.

    Warns:
      SkippedStepsWarning: once, if the last 10 steps or more were skipped and the counters are
        already on the host, so that reading them does not wait for the device.

    Example:
      >>> tx = jaxmp.load_recipe("bf16").optimizer(optax.sgd(0.1))
      >>> int(get_skip_stats(tx.init({"w": jnp.ones(2)})).total)
      0
    """
    _warn_where_known(state)
    return _only(find(state, SkipStats), "set of skip counters")


def get_master_params(state: PyTree) -> PyTree:
    """Returns the parameters in full precision, with masters for those stored in 16 bits.

    Args:
      state: a train state (an object with `params` and `opt_state`), or an optimizer state in which
        every parameter has an FP32 master.

    Returns:
      A tree like the parameters.

    Example:
      >>> recipe = jaxmp.load_recipe("bf16_params")
      >>> state = jaxmp.TrainState.create(
      ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=recipe.optimizer(optax.sgd(0.1))
      ... )
      >>> get_master_params(state)["w"].dtype
      dtype('float32')

    Raises:
      JaxmpError: for an optimizer state alone that does not contain all values, because FP32
        parameters have no second copy and packed remainders contain only 16 of the 32 bits.
    """
    if hasattr(state, "params") and hasattr(state, "opt_state"):
        params, overwritten = _overwritten.split(state.params)
        full = replace_by_masters(params, state.opt_state)
        return _overwritten.join(full, overwritten, state.params)
    node = _only(find(state, MasterParamsState), "set of master parameters")
    _check_complete(node)
    return node.masters


def _check_complete(node: MasterParamsState) -> None:
    layout = node.layout
    without = [path for i, (path, _) in enumerate(layout.storage) if not layout.has_master(i)]
    if without:
        raise JaxmpError(
            f"{len(without)} of {len(layout.storage)} parameters (such as {without[0]!r}) are "
            "stored in FP32 without a second copy in the optimizer state. "
            "Pass the train state: jaxmp.get_master_params(train_state)."
        )
    if layout.master == "packed":
        raise JaxmpError(
            "Packed masters consist of the 16-bit parameters and their remainders, and this state "
            "contains only the remainders. Pass the train state: "
            "jaxmp.get_master_params(train_state)."
        )


def replace_by_masters(params: PyTree, opt_state: PyTree) -> PyTree:
    """Returns the parameters, with the FP32 masters of an optimizer state where it has any."""
    masters: dict[str, Any] = {}
    for node in master_states(unpack_masters(opt_state, params)):
        masters.update((path, value) for _, path, value in node.values())
    collections = _trees.has_collections(params)

    def read(names: _trees.Path, leaf: Array) -> Array:
        inside = _trees.strip_collection(names) if collections else names
        return masters.get(_trees.parameter_path(inside), leaf)

    return _trees.map_with_path(read, params)


# ---------------------------------------------------------------------------
# Checks on the host
# ---------------------------------------------------------------------------


# Number of consecutive skipped steps after which a dynamic scale of 2**16 has fallen to 64.
_SKIPPED_IN_A_ROW = 10


def check(state: PyTree, *, skipped_in_a_row: int = _SKIPPED_IN_A_ROW) -> None:
    """Raises if training cannot continue, and warns if steps are no longer applied.

    Call it on the host from time to time. It waits for the last step to finish.

    Args:
      state: a train state, optimizer state, or any other tree that contains one.
      skipped_in_a_row: warn if at least this number of consecutive steps were skipped.

    Warns:
      SkippedStepsWarning: with the number of steps, the loss scale, the first parameter whose
        gradient was not finite, and the possible causes, most likely first.

    Raises:
      ScaleCollapsedError: if gradients still overflow at the minimum scale.
      MasterOverflowError: if a master became too large for the 16-bit dtype of its parameter in
        the last step.

    Example:
      >>> tx = jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1))
      >>> check(tx.init({"w": jnp.ones(2)}))
    """
    for _, node in find(state, SkipNonfiniteState):
        stats = jax.tree.map(_compat.plain_array, node.stats, is_leaf=_is_variable)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(stats)):
            raise JaxmpError(
                "check reads values, but this state is traced. Call it on the host, outside of "
                "jax.jit: state = train_step(state, batch); jaxmp.check(state)."
            )
        # Replicated and vmapped states have one value per member; report the worst.
        overflow, at_floor, total = (
            int(np.max(jax.device_get(x)))
            for x in (stats.overflow_leaf, stats.at_floor, stats.total)
        )
        if overflow >= 0:
            raise _master_overflow(node, overflow)
        if at_floor > 0:
            scale = float(np.min(_compat.plain_array(node.loss_scale.scale_value)))
            raise ScaleCollapsedError(
                f"The loss scale is at its minimum, {scale:g}, and {at_floor} consecutive step(s) "
                f"still overflowed ({total} skipped in total).{_first_nonfinite(node, stats)} The "
                "loss scale is therefore not the cause. Look for a NaN in the batch or an overflow "
                "in the forward pass, or train with jaxmp.load_recipe('bf16')."
            )
        if int(np.max(jax.device_get(stats.consecutive))) >= skipped_in_a_row:
            warnings.warn(_skipped(node, stats), SkippedStepsWarning, stacklevel=2)


# Steps that `get_skip_stats` has reported: (path of the state, number of steps skipped before).
_reported: set[tuple[str, int]] = set()


def _warn_where_known(state: PyTree) -> None:
    """Warns once of consecutive skipped steps, if the counters are on the host."""
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
    """Returns the message about consecutive skipped steps."""
    consecutive, total = (int(np.max(jax.device_get(x))) for x in (stats.consecutive, stats.total))
    scale = ""
    if not isinstance(node.loss_scale, NoLossScale):
        value = np.min(jax.device_get(_compat.plain_array(node.loss_scale.scale_value)))
        scale = f" The loss scale is {float(value):g}."
    causes = enumerate(_causes(node.loss_scale), start=1)
    return (
        f"The last {consecutive} steps were skipped ({total} in total), because their gradients "
        "were not finite. The parameters no longer change."
        f"{scale}{_first_nonfinite(node, stats)} Possible causes, most likely first:"
        + "".join(f"\n  {number}. {cause}" for number, cause in causes)
    )


def _first_nonfinite(node: SkipNonfiniteState, stats: SkipStats) -> str:
    """Returns a sentence about the first non-finite gradient, with a leading space, or ""."""
    leaf = int(np.max(jax.device_get(stats.nonfinite_leaf)))
    paths = [row[0] for each in master_states(node.inner_state) for row in each.layout.storage]
    if not 0 <= leaf < len(paths):
        return ""
    all_nan = "" if leaf else ", the first parameter: a non-finite loss makes all gradients NaN"
    return f" The first non-finite gradient is that of {paths[leaf]!r}{all_nan}."


_NOT_FINITE = (
    "The batch or the loss is not finite: check jnp.isfinite(loss), and set "
    'jax.config.update("jax_debug_nans", True) to locate the operation.'
)
_DIVERGED = (
    "The parameters have diverged: lower the learning rate, clip gradients by "
    "recipe.optimizer(optax.chain(optax.clip_by_global_norm(1.0), inner)), and restart from an "
    "earlier checkpoint."
)
_FORWARD = (
    "An activation exceeds 65504, the largest float16 number: compute its module in FP32 by "
    'jaxmp.Rule("path/of/module", "c=f32"), or use jaxmp.load_recipe("bf16").'
)


def _causes(loss_scale: LossScale) -> tuple[str, ...]:
    """Returns possible causes of non-finite gradients, most likely first."""
    if isinstance(loss_scale, NoLossScale):
        return _NOT_FINITE, _DIVERGED
    if isinstance(loss_scale, StaticLossScale):
        fixed = (
            "The loss scale is too large for these gradients: use a dynamic one, "
            "recipe.replace(loss_scale=jaxmp.DynamicLossScale())."
        )
        return fixed, _FORWARD, _NOT_FINITE, _DIVERGED
    high = (
        "If these are the first steps, the loss scale is still too large, and decreases with each "
        "skipped step. Start with a smaller one: recipe.replace(loss_scale=jaxmp.DynamicLossScale("
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
        f"The FP32 master of {path!r} is too large for {dtype}, the dtype of the parameter, so "
        f"{consequence}. Store it in FP32: Rule({path!r}, 'p=f32'), or lower the learning rate."
    )


# ---------------------------------------------------------------------------
# Compositions that would break training silently
# ---------------------------------------------------------------------------


def check_composition(opt_state: PyTree) -> None:
    """Checks that no transformation around `mixed_precision` breaks it.

    Args:
      opt_state: the optimizer state (or its shapes) as `tx.init` returns it.

    Raises:
      CompositionError: with the wrapper, the reason, and the composition that works.
    """
    _check_node(opt_state)


# Wrappers that pass gradients and updates through unchanged, for their parameters.
_TRANSPARENT = (
    GradientDtypesState,
    optax.MaskedState,
    optax.PartitionState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)


def _check_node(node: PyTree) -> None:
    if isinstance(node, SkipNonfiniteState):
        if find(node.inner_state, SkipNonfiniteState):
            raise CompositionError(
                "mixed_precision inside mixed_precision: two guards and two loss scales for the "
                "same parameters. Apply the recipe once: tx = recipe.optimizer(inner)."
            )
        return
    if not find(node, SkipNonfiniteState) and not _has_masters(node):
        return
    if isinstance(node, optax.MultiStepsState):
        raise CompositionError(
            "optax.MultiSteps around mixed_precision: an overflow would remain in its accumulator "
            "forever. Accumulate inside: recipe.optimizer(optax.MultiSteps(inner, every_k)),"
            " or use value_and_grad(..., microbatches=k)."
        )
    if isinstance(node, optax.ApplyIfFiniteState):
        raise CompositionError(
            "optax.apply_if_finite around mixed_precision hides overflows from the loss scale, "
            "which would never back off. Remove it: recipe.optimizer(inner) already skips such "
            "steps."
        )
    if _has_masters(node):
        _check_assignable(node)
    for child in _children(node):
        _check_node(child)


def _has_masters(node: PyTree) -> bool:
    return any(jax.tree.leaves(state.masters) for state in master_states(node))


def _check_assignable(node: PyTree) -> None:
    """Raises if a wrapper changes updates, which assignment from masters would ignore."""
    if isinstance(node, (*_TRANSPARENT, MasterParamsState)):
        return
    if _is_chain(node):
        parts = list(node.values()) if isinstance(node, dict) else list(node)
        for index, part in enumerate(parts[:-1]):
            if _has_masters(part):
                raise CompositionError(
                    f"Part {index + 1} of {len(parts)} of an optax.chain has masters of 16-bit "
                    "parameters, and other parts follow it. The parameters are assigned from the "
                    "masters, so that the following parts would be ignored. Put them inside: "
                    "recipe.optimizer(optax.chain(inner, ...)); for groups of parameters use "
                    "optax.multi_transform."
                )
        return
    raise CompositionError(
        f"{type(node).__name__} around masters of 16-bit parameters: the parameters are assigned "
        "from the masters, so that changes of the updates by this wrapper would be ignored. Put it "
        "inside: recipe.optimizer(wrapper(inner)), or store the parameters in FP32."
    )


def _is_chain(node: PyTree) -> bool:
    plain_tuple = isinstance(node, tuple) and not hasattr(node, "_fields")
    return plain_tuple or isinstance(node, dict)


def _children(node: PyTree) -> list[Any]:
    """Returns the direct children of a pytree node; none for a leaf."""
    if isinstance(node, optax.PartitionState):
        return list(node.inner_states.values())
    flat = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
    return [] if len(flat) == 1 and flat[0] is node else flat
