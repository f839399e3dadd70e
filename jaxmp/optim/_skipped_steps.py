"""Counters of skipped steps, and the checks that read them on the host."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import jax
import numpy as np
from jax.core import Tracer

from jaxmp import _core
from jaxmp._core import Array, PyTree, _compat
from jaxmp._gradients import _loss_scale
from jaxmp.errors import JaxmpError, MasterOverflowError, ScaleCollapsedError, SkippedStepsWarning
from jaxmp.fp8 import _overwritten
from jaxmp.optim._assign import warn_of_replaced
from jaxmp.optim._find import check_plain_loop, find, only, params_of_model, plain
from jaxmp.optim._layout import leaves_by_path, master_states
from jaxmp.optim._skip import SkipNonfiniteState, SkipStats

# Number of consecutive skipped steps after which a dynamic scale of 2**16 has fallen to 64.
_SKIPPED_IN_A_ROW = 10


def get_skip_stats(state: PyTree) -> SkipStats:
    """Returns the counters of skipped steps: `.total .consecutive .at_floor .last_finite`.

    `.zero_gradients` counts consecutive steps whose gradients were all zero.

    Args:
      state: an optimizer state, a train state or any other tree that contains counters.

    Returns:
      The counters, as scalar arrays.

    Raises:
      JaxmpError: if there are none, or more than one set, with their paths.

    Example:
      >>> tx = jaxmp.load_recipe("bf16").optimizer(optax.sgd(0.1))
      >>> int(get_skip_stats(tx.init({"w": jnp.ones(2)})).total)
      0
    """
    return only(find(state, SkipStats), "set of skip counters")


def check(state: PyTree, *, skipped_in_a_row: int = _SKIPPED_IN_A_ROW) -> None:
    """Raises if training cannot continue, and warns if steps are no longer applied.

    Call it on the host from time to time. It waits for the last step to finish.

    Args:
      state: a train state, optimizer state, or any other tree that contains one.
      skipped_in_a_row: warn if at least this number of consecutive steps were skipped, or had
        gradients that were all zero.

    Warns:
      SkippedStepsWarning: with the number of steps, the loss scale, the first parameter whose
        gradient was not finite, and the possible causes, most likely first.
      RecipeWarning: if a parameter of a train state or NNX optimizer is not its rounded master.

    Raises:
      ScaleCollapsedError: if gradients still overflow at the minimum scale.
      MasterOverflowError: if a master became too large for the 16-bit dtype of its parameter in
        the last step.
      JaxmpError: if the state has no counters.
      CompositionError: as `jaxmp.get_loss_scale`.

    Example:
      >>> tx = jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1))
      >>> check(tx.init({"w": jnp.ones(2)}))
    """
    check_plain_loop(state)
    nodes = find(state, SkipNonfiniteState)
    for _, node in nodes or [only([], "set of skip counters")]:
        stats = plain(node.stats)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(stats)):
            raise JaxmpError(
                "check reads values, but this state is traced. Call it on the host, outside of "
                "jax.jit: state = train_step(state, batch); jaxmp.check(state)."
            )
        # Replicated and vmapped states have one value per member; report the worst.
        stats = jax.tree.map(lambda x: int(np.max(x)), jax.device_get(stats))
        if stats.overflow_leaf >= 0:
            raise _master_overflow(node, stats.overflow_leaf)
        if stats.at_floor > 0:
            scale = float(np.min(_compat.plain_array(node.loss_scale.scale_value)))
            raise ScaleCollapsedError(
                f"The loss scale is at its minimum, {scale:g}, and {stats.at_floor} consecutive "
                f"step(s) still overflowed ({stats.total} skipped in total)."
                f"{_first_nonfinite(node, stats)} The loss scale is therefore not the cause. Look "
                "for a NaN in the batch or an overflow in the forward pass, or train with "
                "jaxmp.load_recipe('bf16')."
            )
        if stats.consecutive >= skipped_in_a_row:
            warnings.warn(_skipped(node, stats), SkippedStepsWarning, stacklevel=2)
        if stats.zero_gradients >= skipped_in_a_row:
            text = _ALL_ZERO.format(stats.zero_gradients)
            warnings.warn(text, SkippedStepsWarning, stacklevel=2)
    warn_of_replaced(_pairs(state))


def _pairs(state: PyTree) -> Iterator[tuple[str, Array, Array]]:
    """Yields path, parameter and master of each train state and NNX optimizer in a tree."""
    has_state = lambda node: _core.has_fields(node, "opt_state")
    for node in filter(has_state, jax.tree.leaves(state, is_leaf=has_state)):
        params, _ = _overwritten.split(getattr(node, "params", params_of_model(node)))
        by_path = leaves_by_path(params)
        for masters in master_states(plain(node.opt_state)):
            for _, path, master in masters.values():
                if path in by_path:
                    yield path, by_path[path], master


def _skipped(node: SkipNonfiniteState, stats: SkipStats) -> str:
    """Returns the message about consecutive skipped steps; `stats` contains integers."""
    scale = ""
    if not isinstance(node.loss_scale, _loss_scale.NoLossScale):
        value = np.min(jax.device_get(_compat.plain_array(node.loss_scale.scale_value)))
        scale = f" The loss scale is {float(value):g}."
    causes = enumerate(_causes(node.loss_scale), start=1)
    return (
        f"The last {stats.consecutive} steps were skipped ({stats.total} in total), because their "
        "gradients were not finite. The parameters no longer change."
        f"{scale}{_first_nonfinite(node, stats)} Name the operation and its cause on this state by "
        "print(jaxmp.locate_nonfinite(train_step, state, batch)). "
        "Possible causes, most likely first:"
        + "".join(f"\n  {number}. {cause}" for number, cause in causes)
    )


def _storage(node: SkipNonfiniteState) -> list[tuple[str, str]]:
    """Returns the path and the storage dtype of each parameter of an optimizer."""
    return [row for each in master_states(node.inner_state) for row in each.layout.storage]


def _first_nonfinite(node: SkipNonfiniteState, stats: SkipStats) -> str:
    """Returns a sentence about the first non-finite gradient, with a leading space, or ""."""
    leaf = stats.nonfinite_leaf
    paths = [path for path, _ in _storage(node)]
    if not 0 <= leaf < len(paths):
        return ""
    all_nan = "" if leaf else ", the first parameter: a non-finite loss makes all gradients NaN"
    return f" The first non-finite gradient is that of {paths[leaf]!r}{all_nan}."


_ALL_ZERO = (
    "The gradients of the last {} steps were all zero, so the loss no longer trains any parameter. "
    "In float16, the derivative of a norm, a variance or a quotient is zero where a value in it "
    "exceeded 65504 and became infinite. Compute it in FP32, such as jnp.linalg.norm(x.astype("
    "jnp.float32)); let its module do so by jaxmp.Rule('path/of/module', 'c=f32'); or use "
    "jaxmp.load_recipe('bf16'). In any format, a stop_gradient, a rounding, or a mask that leaves "
    "no example between the parameters and the loss has this effect too."
)
_NOT_FINITE = "The batch or the loss is not finite: check jnp.isfinite(loss)."
_DIVERGED = (
    "The parameters have diverged: lower the learning rate, clip gradients by "
    "recipe.optimizer(optax.chain(optax.clip_by_global_norm(1.0), inner)), and restart from an "
    "earlier checkpoint."
)
_FORWARD = (
    "An activation exceeds 65504, the largest float16 number: compute its module in FP32 by "
    'jaxmp.Rule("path/of/module", "c=f32"), or use jaxmp.load_recipe("bf16").'
)

_SATURATED = (
    "A sigmoid or softmax is 0 or 1 in 16 bits, and a logarithm or quotient of it is infinite: use "
    "the function of the logits, such as jax.nn.log_sigmoid, or let the module return FP32 by "
    'jaxmp.Rule("path/of/module/**", "c=f32,o=f32"). jaxmp.audit names the line.'
)


def _causes(loss_scale: _loss_scale.LossScale) -> tuple[str, ...]:
    """Returns possible causes of non-finite gradients, most likely first."""
    if isinstance(loss_scale, _loss_scale.NoLossScale):
        return _NOT_FINITE, _SATURATED, _DIVERGED
    if isinstance(loss_scale, _loss_scale.StaticLossScale):
        fixed = (
            "The loss scale is too large for these gradients: use a dynamic one, "
            "recipe.replace(loss_scale=jaxmp.DynamicLossScale())."
        )
        return fixed, _FORWARD, _NOT_FINITE, _SATURATED, _DIVERGED
    high = (
        "If these are the first steps, the loss scale is still too large, and decreases with each "
        "skipped step. Start with a smaller one: recipe.replace(loss_scale=jaxmp.DynamicLossScale("
        "init_scale=2.0**8))."
    )
    return _FORWARD, _NOT_FINITE, _SATURATED, high, _DIVERGED


def _master_overflow(node: SkipNonfiniteState, leaf: int) -> MasterOverflowError:
    path, dtype = _storage(node)[leaf]
    consequence = "the step was skipped" if dtype == "f16" else "it was saturated"
    return MasterOverflowError(
        f"The FP32 master of {path!r} is too large for {dtype}, the dtype of the parameter, so "
        f"{consequence}. Store it in FP32: Rule({path!r}, 'p=f32'), or lower the learning rate."
    )
