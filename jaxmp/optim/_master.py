"""FP32 masters of parameters that are stored in 16 bits.

There are two forms of masters:

* ``fp32``: 32 bits in addition to the 16 bits of the parameter. The parameter is the master,
  rounded to nearest with ties to even, as by any cast.
* ``packed``: the 16 bits that bfloat16 drops, as a signed remainder. Parameter and remainder
  together represent the master exactly, in 4 bytes. The remainder is the lower half of the FP32
  bit pattern, so that ties round away from zero (a carry out of the lower half).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType

from jaxmp import _core
from jaxmp._core import Array, DTypeLike, PyTree
from jaxmp._policies import _load
from jaxmp._policies._load import PolicyMap
from jaxmp._policies._schema import MASTERS
from jaxmp.errors import CompositionError
from jaxmp.fp8 import _overwritten
from jaxmp.optim import _layout
from jaxmp.optim._layout import Layout, MasterParamsState, UnpackedMasters, entries_of, stored_dtype
from jaxmp.optim._rounding import OVERFLOW_THRESHOLD, pack, remainder_to, unpack


def to_storage(value: PyTree, dtype: DTypeLike, master: str) -> PyTree:
    """Casts one leaf to its storage dtype, with the rounding of the form of its master."""
    is_packed = master == "packed" and np.dtype(dtype) == _core.BFLOAT16
    is_array = not isinstance(value, jax.ShapeDtypeStruct)
    if is_packed and is_array and _core.dtype_of(value) == _core.FLOAT32:
        return pack(jnp.asarray(_core.cast(value, _core.FLOAT32)))[0]
    return _core.cast(value, dtype)


def cast_params(params: PyTree, policies: PolicyMap, master: str = "fp32") -> PyTree:
    """Casts each floating parameter to the dtype in which `policies` store it.

    Args:
      params: a tree of parameters, or a dict of Flax collections whose `params` are cast.
      policies: a PolicyMap.
      master: the form of the masters, "fp32" or "packed", which determines how ties round.
    """

    def cast_leaf(names: _core.Path, leaf: PyTree) -> PyTree:
        dtype = stored_dtype(params, names, leaf, policies)
        return leaf if dtype is None else to_storage(leaf, dtype, master)

    return _core.map_with_path(cast_leaf, params)


# A saturated master of a bfloat16 parameter: larger ones round to infinity.
_LARGEST_MASTER = np.nextafter(OVERFLOW_THRESHOLD[_core.BFLOAT16], np.float32(0), dtype=np.float32)


# ---------------------------------------------------------------------------
# Transformation
# ---------------------------------------------------------------------------


def master_params(
    inner: optax.GradientTransformation,
    *,
    recipe: _load.RecipeLike | None = None,
    master: str = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Updates FP32 masters of 16-bit parameters, which are cast from them.

    The inner transformation receives only FP32 parameters and FP32 gradients, so that its moments
    are FP32 and small updates are not lost (Micikevicius et al. 2018, section 3.1,
    arXiv:1710.03740). Parameters that are stored in FP32 have no second copy.

    A master that is too large for the dtype of its parameter is recorded in the state, and
    `jaxmp.check` names it. In float16 this happens at 65520, and `skip_nonfinite` skips the step.
    In bfloat16, whose range is that of FP32, it happens in the last 0.4 % before FP32 overflows;
    the master then saturates, because deciding before writing would read the whole optimizer state
    twice. `TrainState` and `jaxmp.nnx.Optimizer` record it in the next step, even if that step is
    skipped.

    `TrainState.apply_gradients` and `jaxmp.nnx.Optimizer` assign `params = cast(master)`, which is
    exact after every step. A parameter that is not its cast master when an update begins was
    replaced, and its value is the new master; see `set_master_params` for FP32 values. In a plain
    optax loop the emitted update is the best additive one: `optax.apply_updates` also gives
    `cast(master)`, unless a parameter shrinks by more than a factor of 2**13 in one step. The next
    step continues from that parameter, with an error as small as that of an FP32 sum.

    Args:
      inner: any optax transformation.
      recipe: a recipe or policies, whose `param_dtype` determines the storage dtype of each
        parameter. None: each leaf keeps its dtype.
      master: "fp32" (also "auto"): a float32 master for each 16-bit parameter; "packed": the 16
        bits that bfloat16 drops, which makes 4 bytes per parameter in total and rounds ties away
        from zero; "none": no masters, but the inner transformation still computes in FP32.

    Returns:
      An optax transformation; `init` accepts FP32 parameters, or 16-bit ones, and warns of those
      that were initialized in 16 bits, with few different values.

    Raises:
      CompositionError: for an unknown `master`, for "packed" with float16 parameters, and in
        `update` for parameters that are not in their storage dtype.

    Example:
      >>> params = {"w": jnp.ones(3)}
      >>> tx = master_params(optax.sgd(1e-3), recipe="bf16_params")
      >>> state = tx.init(params)
      >>> state.masters["w"].dtype
      dtype('float32')
    """
    if master not in MASTERS:
        raise CompositionError(
            f"Unknown master={master!r}. Allowed: {', '.join(map(repr, MASTERS))}; "
            "for example master='auto'."
        )
    check_inner(inner)
    master = "fp32" if master == "auto" else master
    policy_map = None if recipe is None else _load.as_policy_map(recipe)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: PyTree) -> PyTree:
        _overwritten.check_is_absent(params)
        layout = _layout.make_layout(params, policy_map, master)
        leaves, treedef = jax.tree.flatten(params)
        entries = [
            make_master(leaf, master) if layout.has_master(i) else optax.MaskedNode()
            for i, leaf in enumerate(leaves)
        ]
        masters = layout.tree(treedef, entries)
        _warn_of_few_values(leaves, layout)
        full = _core.cast_floating(params, _core.FLOAT32)
        inner_state = _core.owned(inner.init(full), (params, full, masters))
        none, fits = jnp.array(-1, jnp.int32), jnp.array(True)
        state = MasterParamsState(masters, none, fits, inner_state, layout)
        values = {
            index: value for index, _, value in state.values() if value.dtype == _core.FLOAT32
        }

        def first_overflow(values: dict[int, jax.Array]) -> jax.Array:
            too_large = {n: _is_too_large(v, layout.dtype(n)) for n, v in values.items()}
            return _first_index(too_large)

        return dataclasses.replace(state, overflow=_core.in_one_program(first_overflow, values))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        if params is None:
            raise CompositionError(
                "master_params requires the parameters: tx.update(grads, state, params)."
            )
        params_flat, treedef = jax.tree.flatten(params)
        _check_storage(params_flat, state.layout)
        masters_flat = entries_of(state.masters, treedef)
        is_unpacked = isinstance(state, UnpackedMasters)
        old = [
            m if is_unpacked and not isinstance(m, optax.MaskedNode) else read_master(p, m)
            for p, m in zip(params_flat, masters_flat, strict=True)
        ]
        deltas, inner_state = inner.update(
            _core.cast_floating(updates, _core.FLOAT32),
            state.inner_state,
            treedef.unflatten(old),
            **extra_args,
        )
        deltas = treedef.flatten_up_to(deltas)
        steps = [
            _step(p, m, full, delta, is_unpacked)
            for p, m, full, delta in zip(params_flat, masters_flat, old, deltas, strict=True)
        ]
        overflows = {i: over for i, (_, _, over) in enumerate(steps) if over is not None}
        of_float16 = {i: o for i, o in overflows.items() if state.layout.dtype(i) == _core.FLOAT16}
        first = _first_index(overflows)
        new_masters = treedef.unflatten(new for _, new, _ in steps)
        if isinstance(state.masters, optax.MaskedNode):
            new_masters = state.masters
        new_state = dataclasses.replace(state, masters=new_masters, inner_state=inner_state)
        if state.records_overflow:
            new_state = dataclasses.replace(
                new_state,
                overflow=lax.select(first >= 0, first, state.overflow) if is_unpacked else first,
                fits=_first_index(of_float16) < 0,
            )
        return treedef.unflatten(delta for delta, _, _ in steps), new_state

    def _step(
        param: Array, stored: Array | optax.MaskedNode, full: Array, delta: Array, is_unpacked: bool
    ) -> tuple[Array, Array | optax.MaskedNode, Array | None]:
        """Returns the emitted update, the new entry of `masters`, and True if it overflowed."""
        if isinstance(stored, optax.MaskedNode):
            return delta, stored, None
        new, over = add_update(full, delta), None
        if param.dtype == _core.FLOAT16 or (_core.is_16bit(param.dtype) and not is_unpacked):
            over = _is_too_large(new, param.dtype)
        if param.dtype == _core.BFLOAT16:
            new = lax.clamp(-_LARGEST_MASTER, new, _LARGEST_MASTER)
        if is_unpacked:
            return delta, new, over
        target = to_storage(new, param.dtype, master)
        emitted = target.astype(_core.FLOAT32) - param.astype(_core.FLOAT32)
        if stored.dtype != jnp.int16:
            return emitted, new, over
        assigned = (param.astype(_core.FLOAT32) + emitted).astype(param.dtype)
        return emitted, remainder_to(new, assigned), over

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _warn_of_few_values(params: list[Any], layout: Layout) -> None:
    """Warns of 16-bit parameters that were drawn in 16 bits, of which masters are made.

    `jax.random` draws them from as many values as the format has mantissas. Numbers that were
    rounded to 16 bits later, as those of a trained model, have many more.
    """
    for index, leaf in enumerate(params):
        is_known = isinstance(leaf, (jax.Array, np.ndarray)) and not isinstance(leaf, Tracer)
        if not (is_known and layout.has_master(index) and _core.is_16bit(leaf.dtype)):
            continue
        most = 2 ** (jnp.finfo(leaf.dtype).nmant + 1)
        if leaf.size < 8 * most or not getattr(leaf, "is_fully_addressable", True):
            continue
        sample = np.asarray(leaf.reshape(-1)[: 8 * most])
        if 16 < (values := len(np.unique(sample))) <= most:
            _core.warn_user(
                f"Parameter {layout.storage[index][0]!r} has {values} different values among "
                f"{len(sample)} elements, as if it was initialized in {leaf.dtype}, and so have "
                "its FP32 masters. Initialize in FP32, the default param_dtype of Flax's layers: "
                "TrainState.create and recipe.cast_params cast parameters afterwards.",
                repeats=True,
            )
            return


def check_inner(inner: object) -> None:
    """Refuses an object that is not an optax transformation, such as a learning rate."""
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        what = f"{inner!r}, a {type(inner).__name__},"
        if callable(inner):
            what = f"The function {getattr(inner, '__name__', inner)}, which was not called,"
        raise CompositionError(
            f"{what} is not an optax transformation, such as that of "
            "recipe.optimizer(optax.adam(1e-3))."
        )


def add_update(param: Array | None, update: Array) -> Any:
    """Adds an update as `optax.apply_updates` does, and to 16-bit parameters in FP32."""
    if param is None or update.dtype == jax.dtypes.float0:
        return param
    if _core.is_castable(param) and _core.is_16bit(param.dtype):
        return (param.astype(_core.FLOAT32) + update.astype(_core.FLOAT32)).astype(param.dtype)
    return param + update.astype(param.dtype)


def make_master(param: Array, master: str) -> jax.Array:
    """Returns the entry of an FP32 parameter in `MasterParamsState.masters`, as a new array."""
    if master == "packed":
        return pack(_core.cast(param, _core.FLOAT32))[1]
    # A copy of a weakly typed array would be one, too, and the second step would be traced again.
    is_copied = param.dtype == _core.FLOAT32 and not getattr(param, "weak_type", False)
    return _core.copied(param) if is_copied else param.astype(_core.FLOAT32)


def read_master(param: Array, stored: Array | optax.MaskedNode) -> Array:
    """Returns the FP32 value of a parameter, from its entry in `MasterParamsState.masters`.

    A parameter that is not the rounded master was replaced since the last step: its own value is
    the new master. With a remainder, which fits any parameter, that is the value to half a unit in
    the last place of bfloat16.
    """
    if isinstance(stored, optax.MaskedNode) or not _core.is_16bit(param.dtype):
        return _core.cast(param, _core.FLOAT32) if _core.is_castable(param) else param
    master = placed_as(stored, param)
    if stored.dtype == jnp.int16:
        full = unpack(param, master)
    else:
        full = follow(_split_as(param, master), master.astype(param.dtype), master)
    return placed_as(full, stored)


def follow(param: Array, rounded: Array, master: Array) -> jax.Array:
    """Returns the master where a parameter has the bits of the rounded one, or else its value."""
    bits, kept = (lax.bitcast_convert_type(array, jnp.int16) for array in (param, rounded))
    # Made from its bits, the value is not a summand of the new parameter for the audit.
    value = lax.bitcast_convert_type(bits, param.dtype).astype(_core.FLOAT32)
    return jnp.where(bits == kept, master, value)


@jax.jit
def is_rounded(master: jax.Array, param: jax.Array) -> jax.Array:
    """Returns True if a parameter is the rounded FP32 master."""
    return jnp.array_equal(master.astype(param.dtype), param, equal_nan=True)


def _split_as(param: Array, master: Array) -> Array:
    """Gives a parameter the sharding of its master on explicit mesh axes, where both must agree."""
    target = jax.typeof(master).sharding
    is_explicit = AxisType.Explicit in target.mesh.axis_types
    if not is_explicit or jax.typeof(param).sharding.spec == target.spec:
        return param
    is_traced = isinstance(param, Tracer) or isinstance(master, Tracer)
    return jax.reshard(param, target) if is_traced else jax.device_put(param, master.sharding)


def is_committed(array: Array) -> bool:
    """Returns True for an array whose placement was chosen."""
    return not isinstance(array, Tracer) and getattr(array, "committed", False)


def placed_as(array: Array, like: Array) -> Array:
    """Moves an array to the devices and the memory of another, unless it is there or traced."""
    if any(isinstance(x, Tracer) or not isinstance(x, jax.Array) for x in (array, like)):
        return array
    place, target = array.sharding, like.sharding
    same = place.device_set == target.device_set and place.memory_kind == target.memory_kind
    return array if same else jax.device_put(array, target)


def _check_storage(params: list[Any], layout: Layout) -> None:
    for index, leaf in enumerate(params):
        dtype = layout.dtype(index)
        if dtype is not None and _core.dtype_of(leaf) != dtype:
            raise CompositionError(
                f"Parameter {layout.storage[index][0]!r} is {leaf.dtype}, but its policy stores it "
                f"in {dtype}. Cast once, after tx.init(params): params = recipe.cast_params(params)"
                " (TrainState.create does this automatically), and apply updates with "
                "optax.apply_updates(params, updates), which keeps dtypes; params + updates, as in "
                "equinox.apply_updates, would be float32. To train other FP32 values: params, "
                "opt_state = jaxmp.optim.set_master_params(params, opt_state)."
            )


def _is_too_large(master: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    """Returns True if an element of the master becomes infinite in `dtype`, or is a NaN."""
    return ~jnp.all(lax.abs(master) < OVERFLOW_THRESHOLD[np.dtype(dtype)])


def first_saturated(state: MasterParamsState) -> jax.Array:
    """Returns the index of the first bfloat16 parameter with a saturated master; -1 if none.

    Before an update, the state has the old masters. A check of the new masters would be their third
    consumer, beside the parameter and the stored master. XLA:GPU then splits the update into two
    kernels, and the first one writes the new masters in FP32 for the second: 40 bytes per parameter
    instead of 28, if the optimizer clips.
    """
    if not state.records_overflow:
        return state.overflow
    flags = {}
    for index, _, value in state.values():
        if state.layout.has_master(index) and state.layout.dtype(index) == _core.BFLOAT16:
            flags[index] = ~jnp.all(lax.abs(value) < _LARGEST_MASTER)  # also True for a NaN
    return _first_index(flags)


def _first_index(flags: dict[int, jax.Array]) -> jax.Array:
    """Returns the smallest index whose flag is True; -1 if there is none."""
    first = jnp.array(-1, jnp.int32)
    for index in sorted(flags, reverse=True):
        first = lax.select(flags[index], jnp.full_like(first, index), first)
    return first
