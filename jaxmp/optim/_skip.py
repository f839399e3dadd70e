"""Skips steps with non-finite gradients, and keeps the loss scale in the optimizer state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxmp import _core
from jaxmp._core import AxisNames, PyTree, _compat
from jaxmp._gradients import _dynamic_loss_scale, _loss_scale
from jaxmp._gradients._hints import is_in_loss
from jaxmp.errors import CompositionError
from jaxmp.optim import _assign
from jaxmp.optim._layout import MasterParamsState, map_master_states, master_states
from jaxmp.optim._losses import losses_of, stays_finite, with_scaled_losses


def overflow_leaf(state: PyTree) -> jax.Array:
    """Returns the index of the first overflow among all parameters; -1 if there is none."""
    first, offset = jnp.array(-1, jnp.int32), 0
    for node in master_states(state):
        index = jnp.where(node.overflow >= 0, node.overflow + offset, -1)
        first = lax.select(first >= 0, first, index)
        offset += len(node.layout.storage)
    return first


def agree_on_overflow(state: PyTree, axes: tuple[Hashable, ...]) -> PyTree:
    """Combines all reports over devices, which may have different parts of the parameters."""

    def agree(node: MasterParamsState) -> MasterParamsState:
        overflow, fits = _compat.largest(node.overflow, axes), _compat.agree(node.fits, axes)
        return dataclasses.replace(node, overflow=overflow, fits=fits)

    return map_master_states(agree, state)


# ---------------------------------------------------------------------------
# State
# ---------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SkipStats:
    """Counters of skipped steps; every field is a scalar array.

    Attributes:
      total: int32, number of skipped steps.
      consecutive: int32, number of steps skipped since the last applied one.
      at_floor: int32, number of these steps that overflowed with the dynamic loss scale at its
        minimum.
      last_finite: bool, True if the last step was applied; True before the first step.
      overflow_leaf: int32, index of the first parameter whose master was too large for its storage
        dtype in the last step with finite gradients, in the layout of the masters; -1 if there is
        none. bfloat16 parameters are reported one step later; see `master_params`.
      nonfinite_leaf: int32, index of the first parameter whose gradient was not finite in the last
        step (or too large, see `skip_nonfinite`), in the gradients; -1 if there is none, or if it
        is unknown.
      zero_gradients: int32, number of consecutive steps whose gradients had only zero squares.
    """

    total: jax.Array
    consecutive: jax.Array
    at_floor: jax.Array
    last_finite: jax.Array
    overflow_leaf: jax.Array
    nonfinite_leaf: jax.Array
    zero_gradients: jax.Array

    @classmethod
    def zero(cls, inner_state: PyTree = ()) -> SkipStats:
        """Returns the counters before the first step."""
        zero = lambda: jnp.zeros((), jnp.int32)
        first, none = overflow_leaf(inner_state), jnp.array(-1, jnp.int32)
        return cls(zero(), zero(), zero(), jnp.array(True), first, none, zero())

    def after(
        self, applied: jax.Array, loss_scale: _loss_scale.LossScale, **others: jax.Array
    ) -> SkipStats:
        """Returns the counters after another step; `others` are the last three of them."""
        zero = jnp.zeros((), jnp.int32)
        skipped = lax.bitwise_not(applied)
        at_floor = self.at_floor
        if not isinstance(loss_scale, _loss_scale.NoLossScale):
            at_floor += lax.bitwise_and(skipped, loss_scale.at_floor).astype(jnp.int32)
            at_floor = lax.select(applied, zero, at_floor)
        return SkipStats(
            total=self.total + skipped.astype(jnp.int32),
            consecutive=lax.select(applied, zero, self.consecutive + 1),
            at_floor=at_floor,
            last_finite=applied,
            **others,
        )


@dataclasses.dataclass(frozen=True)
class GradientSettings:
    """Settings of a recipe for `value_and_grad`.

    Attributes:
      accumulate_dtype: name of the dtype in which microbatches are accumulated.
      reduce_dtype: name of the dtype in which gradients are averaged over devices.
      regather: True if split weights are gathered again in the backward pass.
      widen_params: True if matmuls compute the gradients of 16-bit parameters in FP32.
    """

    accumulate_dtype: str
    reduce_dtype: str
    regather: bool
    widen_params: bool


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SkipSettings:
    """Static settings of an optimizer that a train state reads.

    Attributes:
      guarded: True if steps with non-finite gradients are skipped.
      axis_name: mapped axes over which `value_and_grad` averages, and along which all devices skip
        the same steps.
      gradients: further arguments of `value_and_grad`; None: its defaults.
      is_noted: True while a step of a train state runs: `stats.last_finite` is False if a gradient
        is not finite that other transformations hide from the guard.
      assigns: True while a step of a train state runs whose whole optimizer this is: the update
        then returns no updates, but the new parameters beside the new inner state.
    """

    guarded: bool
    axis_name: tuple[Hashable, ...]
    gradients: GradientSettings | None = None
    is_noted: bool = False
    assigns: bool = False

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `value_and_grad` that the optimizer determines."""
        gradients = {} if self.gradients is None else dataclasses.asdict(self.gradients)
        return {"axis_name": self.axis_name, "guarded": self.guarded, **gradients}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SkipNonfiniteState:
    """State of `skip_nonfinite`.

    Attributes:
      loss_scale: the loss scale (a pytree); read it with `jaxmp.get_loss_scale`.
      stats: the counters; read them with `jaxmp.get_skip_stats`.
      inner_state: the state of the inner transformation.
      settings: the settings that a train state reads (static).
    """

    loss_scale: _loss_scale.LossScale
    stats: SkipStats
    inner_state: PyTree
    settings: SkipSettings = dataclasses.field(metadata={"static": True})

    def __getattr__(self, name: str) -> NoReturn:
        # A parameter, or the state of another transformation, may have the name, too.
        values = optax.tree.get_all_with_path(self.__dict__.get("inner_state"), name)
        call = "get" if len(values) == 1 else "get_all_with_path"
        raise AttributeError(
            f"The optimizer state of a recipe has no attribute {name!r}; it contains the state of "
            f"your optimizer. Write:\n    optax.tree.{call}(opt_state, {name!r})"
        )


# ---------------------------------------------------------------------------
# Transformation
# ---------------------------------------------------------------------------


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    loss_scale: _loss_scale.LossScale | None = None,
    skip: str = "auto",
    axis_name: AxisNames = None,
    gradients: GradientSettings | None = None,
    dtype: np.dtype | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Applies the inner transformation only to finite gradients, and adjusts the loss scale.

    A step with a non-finite gradient emits zero updates and does not change the inner state: no
    moment, schedule count or average. Only the loss scale and the counters change. A step after
    which a float16 parameter cannot represent its master also counts as such a step; see
    `master_params`, whose state records it.

    The check sums the squares of each array, as `optax.clip_by_global_norm` does, and XLA computes
    equal sums once, except in a branch. A gradient above 1.8e19, whose square overflows FP32, also
    counts as non-finite; its second moment and its norm would be infinite. With skip="none" such a
    step is applied, and `optax.clip_by_global_norm` divides all gradients by the infinite norm, to
    zero. Gradients whose squares are all zero in FP32 count as zero: below 1.1e-19 on a CPU, which
    flushes subnormal numbers.

    Args:
      inner: any optax transformation.
      loss_scale: the loss scale of the gradients, which is adjusted after each step. None: no
        scaling. `update` receives gradients that are already unscaled, as `jaxmp.value_and_grad`
        returns them.
      skip: "select" computes the update and discards it element by element; "cond" branches; "auto"
        is "cond" when compiling for CPU, where select multiplies the size of the program, and
        otherwise "select", which is fused with the update and causes no additional memory traffic;
        "none" disables skipping.
      axis_name: mapped axis (or axes) of `pmap`, `vmap` or `shard_map`. All devices along it skip
        the same steps, and the `value_and_grad` of a train state averages loss and gradients over
        it. `init` also works outside of the mapped function.
      gradients: settings for the `value_and_grad` of a train state; None: its defaults.
      dtype: the compute dtype of the recipe, if it has 16 bits; otherwise None.

    Returns:
      An optax transformation with a `SkipNonfiniteState`.

    Example:
      >>> tx = skip_nonfinite(optax.sgd(0.5))
      >>> state = tx.init(jnp.ones(2))
      >>> updates, state = tx.update(jnp.array([jnp.inf, 1.0]), state)
      >>> updates.tolist(), int(state.stats.total)
      ([0.0, 0.0], 1)
    """
    inner = optax.with_extra_args_support(inner)
    axes = _core.as_tuple(axis_name)
    settings = SkipSettings(skip != "none", axes, gradients)

    inside = _core.Mark()

    def init_fn(params: PyTree) -> PyTree:
        is_dynamic = isinstance(loss_scale, _dynamic_loss_scale.DynamicLossScale)
        if is_dynamic and not inside.is_checked:
            inside.is_checked = is_in_loss(params)
            if inside.is_checked:
                _core.warn_user(_INSIDE_LOSS, repeats=True)
        inner_state = agree_on_overflow(inner.init(params), _compat.bound_axes(axes))
        scale = (loss_scale or _loss_scale.NoLossScale()).fresh()
        scale = scale.with_leaves(_mark=_core.Mark(dtype))
        # Devices that train alone, each with its own parameters, have their own counters.
        own = frozenset.intersection(*_varying_axes(params) or [frozenset()]).difference(axes)
        scale, stats = _compat.vary((scale, SkipStats.zero(inner_state)), own)
        return SkipNonfiniteState(scale, stats, inner_state, settings)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        grads = _core.cast_floating(updates, _core.FLOAT32)
        _compat.check_axes(axes)
        extra_args = with_scaled_losses(extra_args, state)
        step = _Step(inner, skip, axes, updates, grads, state, params, extra_args)
        if skip == "none":
            emitted, inner_state = step.update(step.read())
            return emitted, dataclasses.replace(state, inner_state=step.write(inner_state))

        first, is_zero = _core.check_squares(grads)
        first = _compat.smallest(first, axes)
        _check_devices_agree(first, (params, state.stats.total))
        leaves = jnp.int32(len(jax.tree.leaves(grads)))
        finite = lax.eq(first, leaves)
        is_zero = _compat.agree(is_zero, axes)
        if state.settings.is_noted:
            finite = lax.bitwise_and(finite, _compat.agree(state.stats.last_finite, axes))
        try:
            applied, emitted, inner_state, overflow = step.guarded(finite)
        except _OtherStructureError as error:
            step = dataclasses.replace(step, completed=error.completed(step.read()))
            applied, emitted, inner_state, overflow = step.guarded(finite)
        if not any(node.records_overflow for node in master_states(state.inner_state)):
            overflow = state.stats.overflow_leaf
        is_applied, first, is_zero = _in_one_array(applied, first, is_zero)
        # Gradients of another structure than the parameters have other indices.
        nonfinite_leaf = state.stats.nonfinite_leaf
        if step.same_structure:
            nonfinite_leaf = lax.select(lax.eq(first, leaves), jnp.int32(-1), first)
        stats = state.stats.after(
            is_applied,
            state.loss_scale,
            overflow_leaf=overflow,
            nonfinite_leaf=nonfinite_leaf,
            zero_gradients=lax.select(is_zero, state.stats.zero_gradients + 1, jnp.int32(0)),
        )
        if not state.settings.assigns:
            # Train states select all parameters by it, if other transformations are outside.
            stats = dataclasses.replace(stats, last_finite=applied)
        scale = state.loss_scale.adjust(is_applied)
        return emitted, SkipNonfiniteState(scale, stats, inner_state, state.settings)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _in_one_array(
    applied: jax.Array, first: jax.Array, is_zero: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Passes what the counters of a step read through one array, if compiling for a GPU.

    XLA then updates all counters and the loss scale in one kernel. It starts a kernel for each if
    they have only scalars in common.
    """
    if _compat.target() != "gpu":
        return applied, first, is_zero
    scalars = [_core.cast(each, np.int32) for each in (applied, first, is_zero)]
    applied, first, is_zero = lax.optimization_barrier(jnp.stack(scalars))
    return applied != 0, first, is_zero != 0


_INSIDE_LOSS = (
    "The state of an optimizer is created inside of a loss, so its loss scale starts anew in each "
    "outer step, and the inner steps that overflow there are skipped each time. Scale the inner "
    "gradients by the loss scale of the outer state, which decreases if they overflow, and update "
    "by the optimizer without the recipe: grads = jaxmp.grad(inner_loss, loss_scale="
    "state.loss_scale)(params); updates, inner_state = inner.update(grads, inner_state, params)."
)


# ---------------------------------------------------------------------------
# Guarded updates
# ---------------------------------------------------------------------------

# (applied, emitted updates, inner state, overflow leaf)
_Outcome = tuple[jax.Array, PyTree, PyTree, jax.Array]


@dataclasses.dataclass(frozen=True)
class _Step:
    """One update of the inner transformation. Between `read` and `write`, masters are FP32.

    In a branch, XLA would pass masters that are read in front of it through memory, and those that
    are written behind it: 24 bytes more for each parameter.

    Attributes:
      inner: the inner transformation.
      skip: as in `skip_nonfinite`.
      axes: the mapped axes along which all devices skip the same steps.
      updates: the gradients, in the dtypes in which they arrive.
      grads: the gradients in FP32.
      state: the state before the step.
      params: the parameters, if there are some.
      extra_args: the other arguments of the update.
      completed: the state that `read` returns, if the first update adds leaves to it.
    """

    inner: optax.GradientTransformationExtraArgs
    skip: str
    axes: tuple[Hashable, ...]
    updates: PyTree
    grads: PyTree
    state: SkipNonfiniteState
    params: PyTree
    extra_args: dict[str, object]
    completed: PyTree = None

    @property
    def same_structure(self) -> bool:
        """True if the gradients have the structure of the parameters."""
        structure = jax.tree.structure
        return self.params is None or structure(self.grads) == structure(self.params)

    def read(self) -> PyTree:
        """Returns the inner state."""
        if self.completed is not None:
            return self.completed
        if not self.state.settings.assigns:
            return self.state.inner_state
        unpacked = _assign.unpack_parameters(self.state.inner_state, self.params)
        return agree_on_overflow(unpacked, self.axes)

    def write(self, inner_state: PyTree) -> PyTree:
        """Returns the new inner state, beside the new parameters if the update assigns them."""
        assigns = self.state.settings.assigns
        return _assign.assign(self.params, inner_state) if assigns else inner_state

    def update(self, old_state: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the emitted updates and the inner state of an applied step."""
        # In a branch, XLA would pass the FP32 copies of the check through memory.
        full = _core.cast_floating(self.updates, _core.FLOAT32)
        emitted, inner_state = self.inner.update(full, old_state, self.params, **self.extra_args)
        inner_state = agree_on_overflow(inner_state, self.axes)
        is_other = jax.tree.structure(inner_state) != jax.tree.structure(old_state)
        if is_other and self.skip != "none":
            raise _OtherStructureError(jax.eval_shape(lambda: inner_state))
        if self.state.settings.assigns:
            return (), inner_state
        if self.same_structure:
            # The zeros of a skipped step have the dtypes of the gradients.
            emitted = jax.tree.map(lambda g, u: _core.cast(u, g.dtype), self.grads, emitted)
        return emitted, inner_state

    def fits(self, old_state: PyTree, new_state: PyTree) -> jax.Array | None:
        """Returns whether the new inner state is valid; None if there is nothing to check."""
        flags = [node.fits for node in master_states(new_state) if node.can_overflow]
        is_scaled = not isinstance(self.state.loss_scale, _loss_scale.NoLossScale)
        if is_scaled and losses_of(self.extra_args):
            flags.append(_compat.agree(stays_finite(old_state, new_state), self.axes))
        return functools.reduce(lax.bitwise_and, flags) if flags else None

    def zeros(self, old_state: PyTree) -> PyTree:
        """Returns the updates of a skipped step.

        They have the form of the gradients, except under `optax.lookahead`, which has two copies of
        the parameters, and `optax.contrib.dpsgd`, which averages gradients of single examples.
        """
        if self.state.settings.assigns:
            return ()
        like = self.grads
        pairs = zip(jax.tree.leaves(like), jax.tree.leaves(self.params), strict=False)
        if not self.same_structure or any(jnp.shape(g) != jnp.shape(p) for g, p in pairs):
            like = jax.eval_shape(self.update, old_state)[0]
        return jax.tree.map(jnp.zeros_like, like)

    def guarded(self, finite: jax.Array) -> _Outcome:
        """Applies the step if the gradients are finite and the new state is valid."""
        branches = self.skip == "cond" or (self.skip == "auto" and _compat.target() == "cpu")
        return self._branch(finite) if branches else self._select(finite)

    def _select(self, finite: jax.Array) -> _Outcome:
        old_state = self.read()
        old_overflow = _compat.largest(overflow_leaf(old_state), self.axes)
        zeros = self.zeros(old_state)
        emitted, new_state = self.update(old_state)
        fits = self.fits(old_state, new_state)
        applied = finite if fits is None else lax.bitwise_and(finite, fits)
        if _compat.target() == "cpu":
            # Without the barrier XLA:CPU fuses the check into every select (eight times the HLO).
            applied = lax.optimization_barrier(applied)
        overflow = lax.select(finite, overflow_leaf(new_state), old_overflow)
        emitted = _core.select(applied, emitted, zeros)
        # PRNG keys of the inner transformation are restored, as they are by a branch.
        state = jax.tree.map(functools.partial(_core.select_leaf, applied), new_state, old_state)
        return applied, emitted, self.write(state), overflow

    def _branch(self, finite: jax.Array) -> _Outcome:
        def reject(old_state: PyTree, overflow: jax.Array | None = None) -> _Outcome:
            if overflow is None:
                overflow = _compat.largest(overflow_leaf(old_state), self.axes)
            return jnp.array(False), self.zeros(old_state), self.write(old_state), overflow

        def try_update() -> _Outcome:
            old_state = self.read()
            emitted, new_state = self.update(old_state)
            overflow = overflow_leaf(new_state)
            accept = lambda: (jnp.array(True), emitted, self.write(new_state), overflow)
            if (fits := self.fits(old_state, new_state)) is None:
                return accept()
            return lax.cond(fits, accept, lambda: reject(old_state, overflow))

        return lax.cond(finite, try_update, lambda: reject(self.read()))


class _OtherStructureError(CompositionError):
    """The first update adds leaves to the state, as that of `optax.monitor` does."""

    def __init__(self, shapes: PyTree) -> None:
        super().__init__(
            "Each update changes the structure of the optimizer's state, so that a step cannot be "
            "skipped. Keep the structure of init, or never skip: recipe.replace(skip='none')."
        )
        self._shapes = shapes

    def completed(self, state: PyTree) -> PyTree:
        """Adds the leaves as zeros, which a skipped first step leaves."""
        old = dict(jax.tree.leaves_with_path(state))
        return jax.tree.map_with_path(
            lambda path, new: old[path] if path in old else jnp.zeros(new.shape, new.dtype),
            self._shapes,
        )


def _varying_axes(tree: PyTree) -> list[frozenset[Hashable]]:
    """Returns for each leaf the axes of an enclosing `shard_map` over which it varies."""
    return list(map(_compat.varying_axes, jax.tree.leaves(tree)))


def _check_devices_agree(first: jax.Array, shared: PyTree) -> None:
    """Checks that all devices which share a parameter or a counter skip the same steps.

    Args:
      first: index of the first gradient that is not finite, from which the skip is decided.
      shared: the parameters and counters. In `shard_map`, JAX knows over which axes they vary.

    Raises:
      CompositionError: if the decision varies over an axis, and one of them does not.
    """
    varying = _varying_axes(shared)
    axes = sorted(a for a in _compat.varying_axes(first) if not all(a in v for v in varying))
    if axes:
        raise CompositionError(
            f"The optimizer runs in jax.shard_map. Gradients vary over the axes {axes}, so that "
            "each device would decide alone whether it skips a step, and a parameter or loss scale "
            "that all devices share would differ between them. Let them skip the same steps: "
            f"tx = recipe.optimizer(tx, axis_name={tuple(axes)}). "
            "If each device trains alone until it averages parameters: params = "
            f"jax.lax.pcast(params, {tuple(axes)}, to='varying'); opt_state = tx.init(params)."
        )
