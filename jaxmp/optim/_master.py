"""FP32 masters of the parameters that are stored in 16 bits."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxmp import _overwritten
from jaxmp._core import _trees
from jaxmp._core._dtypes import FLOAT32, bits, canonical_dtype, is_16bit, short_name
from jaxmp._policies._resolve import PolicyMap, storage_dtype
from jaxmp._recipe_files import _load
from jaxmp.errors import CompositionError, RecipeWarning
from jaxmp.optim import _storage

FLOAT16 = np.dtype(np.float16)
FORMS = ("auto", "fp32", "packed", "none")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """How each parameter is stored: static data inside the optimizer state."""

    # The policies that decided it; None where every leaf keeps the dtype it came with.
    policies: PolicyMap | None
    # "fp32", "packed" or "none".
    form: str
    # (path, name of the dtype it is stored in or "" where the policies leave it alone).
    storage: tuple[tuple[str, str], ...]
    # What `expand` has put beside the parameters: "" at rest, "masters", or "all" of them in FP32.
    expanded: str = ""

    def dtype(self, index: int) -> np.dtype | None:
        """Storage dtype of leaf `index`; None for a leaf that is no policy's business."""
        name = self.storage[index][1]
        return canonical_dtype(name) if name else None

    @property
    def held(self) -> list[int]:
        """Indices of the parameters that have something held beside them."""
        rows = range(len(self.storage))
        return [i for i in rows if self.expanded == "all" or self.has_master(i)]

    @property
    def can_overflow(self) -> bool:
        """Whether a step can be skipped because a float16 parameter cannot hold its new value."""
        return any(self.dtype(i) == FLOAT16 for i in self.held)

    def has_master(self, index: int) -> bool:
        """Whether leaf `index` is stored in 16 bits and has a master."""
        dtype = self.dtype(index)
        return self.form != "none" and dtype is not None and is_16bit(dtype)

    @property
    def key(self) -> str:
        """Name under which the masters appear in tree paths: see `MasterParamsState`."""
        has_any = any(self.has_master(i) for i in range(len(self.storage)))
        return f"{self.form}_masters" if has_any else "no_masters"


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class MasterParamsState:
    """State of `master_params`.

    In tree paths the masters are called `fp32_masters`, `packed_masters` or `no_masters`, by their
    layout. A checkpoint written by any library that stores paths therefore cannot be restored into
    a state of another layout: orbax would otherwise cast packed remainders to FP32 masters.

    Attributes:
      masters: a tree like the parameters: float32 masters, or int16 remainders when packed, and
        `optax.MaskedNode()` where a parameter has none.
      overflow: int32 scalar; index in `layout.storage` of the first parameter whose new master was
        too large for its storage dtype in the last update; -1: none.
      fits: bool scalar; whether no float16 parameter was among those.
      inner_state: the state of the inner transformation, which sees FP32 throughout.
      layout: how each parameter is stored (static).
    """

    masters: Any
    overflow: Any
    fits: Any
    inner_state: Any
    layout: Layout = dataclasses.field(metadata={"static": True})

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Layout]:
        names = (self.layout.key, "overflow", "fits", "inner_state")
        keys = map(jax.tree_util.GetAttrKey, names)
        return tuple(zip(keys, self._children, strict=True)), self.layout

    def tree_flatten(self) -> tuple[tuple[Any, ...], Layout]:
        return self._children, self.layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: Iterable[Any]) -> Self:
        masters, overflow, fits, inner_state = children
        return cls(masters, overflow, fits, inner_state, layout)

    @property
    def _children(self) -> tuple[Any, ...]:
        return self.masters, self.overflow, self.fits, self.inner_state


def master_params(
    inner: optax.GradientTransformation, *, policies: Any = None, master: str = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Updates FP32 masters of 16-bit parameters; the parameters follow them.

    The inner transformation sees FP32 parameters and FP32 gradients only, so its moments are FP32
    and small updates are not lost (Micikevicius et al. 2018, section 3.1, arXiv:1710.03740).
    Parameters that are stored in FP32 have no second copy.

    A master too large for its parameter's dtype is noted in the state, and `jaxmp.check` names it.
    In float16 that happens at 65520, and `skip_nonfinite` skips the step. In bfloat16, whose range
    is FP32's own, it happens in the last 0.4 % before FP32 overflows too; there the master
    saturates instead, because deciding first and writing after would read the whole optimizer
    state twice.

    `TrainState.apply_gradients` and `jaxmp.nnx.Optimizer` assign `params = cast(master)`: equal bit
    for bit after every step. In a plain optax loop the emitted update is the best additive one:
    `optax.apply_updates` gives `cast(master)` too unless a parameter shrinks by more than 2**16 in
    one step, and then the next step mends it, because each update starts from the parameter that
    is there.

    Args:
      inner: any optax transformation.
      policies: anything that names policies; their `param_dtype` says how each parameter is stored.
        None: each leaf is stored as it comes.
      master: "fp32" ("auto" means that): a float32 master for each 16-bit parameter; "packed": the
        16 bits that bfloat16 drops, 4 bytes a parameter in all, ties rounding away from zero;
        "none": no masters, the inner transformation still computes in FP32.

    Returns:
      An optax transformation; `init` takes the FP32 parameters (or 16-bit ones).

    Raises:
      CompositionError: for an unknown `master`, for "packed" with float16 parameters, and at
        `update` for parameters that are not in their storage dtype.

    Example:
      >>> params = {"w": jnp.ones(3)}
      >>> tx = master_params(optax.sgd(1e-3), policies="bf16_params")
      >>> state = tx.init(params)
      >>> state.masters["w"].dtype
      dtype('float32')
    """
    if master not in FORMS:
        raise CompositionError(
            f"Unknown master={master!r}. Allowed: {', '.join(map(repr, FORMS))}; "
            "for example master='auto'."
        )
    form = "fp32" if master == "auto" else master
    policy_map = None if policies is None else _load.as_policy_map(policies)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: Any) -> Any:
        check_parameters(params)
        layout = _layout(params, policy_map, form)
        leaves, treedef = jax.tree.flatten(params)
        masters = treedef.unflatten(
            _initial(leaf, form) if layout.has_master(i) else optax.MaskedNode()
            for i, leaf in enumerate(leaves)
        )
        full = _trees.cast_floating(params, FLOAT32)
        inner_state = _trees.owned(inner.init(full), (params, full, masters))
        overflows = {
            i: _fit(read_master(None, held), layout.dtype(i))[1]
            for i, held in zip(layout.held, jax.tree.leaves(masters), strict=True)
            if held.dtype == FLOAT32
        }
        return MasterParamsState(masters, _first(overflows), jnp.array(True), inner_state, layout)

    def update_fn(
        updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        if params is None:
            raise CompositionError(
                "master_params needs the parameters: tx.update(grads, state, params)."
            )
        params_flat, treedef = jax.tree.flatten(params)
        _check_storage(params_flat, state.layout)
        masters_flat = treedef.flatten_up_to(state.masters)
        old = [read_master(p, m) for p, m in zip(params_flat, masters_flat, strict=True)]
        deltas, inner_state = inner.update(
            _trees.cast_floating(updates, FLOAT32),
            state.inner_state,
            treedef.unflatten(old),
            **extra_args,
        )
        deltas = treedef.flatten_up_to(deltas)
        steps = [
            _step(p, m, full, delta, bool(state.layout.expanded))
            for p, m, full, delta in zip(params_flat, masters_flat, old, deltas, strict=True)
        ]
        overflows = {i: over for i, (_, _, over) in enumerate(steps) if over is not None}
        new_state = MasterParamsState(
            treedef.unflatten(new for _, new, _ in steps),
            _first(overflows),
            _first({i: o for i, o in overflows.items() if state.layout.dtype(i) == FLOAT16}) < 0,
            inner_state,
            state.layout,
        )
        return treedef.unflatten(delta for delta, _, _ in steps), new_state

    def _step(param: Any, held: Any, full: Any, delta: Any, expanded: bool) -> tuple[Any, Any, Any]:
        """The emitted update, what is held beside the parameter, and whether it overflowed."""
        if isinstance(held, optax.MaskedNode):
            return delta, held, None
        new, over = add_update(full, delta), None
        if is_16bit(param.dtype):
            new, over = _fit(new, param.dtype)
        if expanded:
            return delta, new, over
        target = _storage.to_storage(new, param.dtype, form)
        emitted = target.astype(FLOAT32) - param.astype(FLOAT32)
        if held.dtype != jnp.int16:
            return emitted, new, over
        landed = (param.astype(FLOAT32) + emitted).astype(param.dtype)
        return emitted, _storage.remainder_to(new, landed), over

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def add_update(param: Any, update: Any) -> Any:
    """`optax.apply_updates` for one leaf; for 16-bit parameters the sum is taken in FP32."""
    if param is None or update.dtype == jax.dtypes.float0:
        return param
    if _trees.is_castable(param) and param.dtype != FLOAT32:
        return (param.astype(FLOAT32) + update.astype(FLOAT32)).astype(param.dtype)
    return param + update.astype(param.dtype)


def check_parameters(params: Any) -> None:
    """Refuses variables whose state would be clipped, decayed and averaged as parameters are.

    Raises:
      CompositionError: saying what to give instead.
    """
    name = _overwritten.OVERWRITE
    if _overwritten.split(params)[1] is not None:
        raise CompositionError(
            f"The optimizer was given variables with the collection {name!r}, the state of FP8 "
            "scaling, which is no parameter: its gradient is its next value. Use "
            "jaxmp.TrainState.create(params=variables, tx=tx), which assigns it; or in a loop of "
            "your own tx.init(variables['params']) and tx.update(grads['params'], opt_state, "
            f"variables['params']), and carry grads[{name!r}] over into the next variables."
        )


def _initial(leaf: Any, form: str) -> jax.Array:
    full = jnp.array(leaf, dtype=FLOAT32, copy=True)
    return _storage.pack(full)[1] if form == "packed" else full


def read_master(param: Any, held: Any) -> Any:
    """The FP32 value of a parameter, given what the state holds beside it."""
    if isinstance(held, optax.MaskedNode):
        return _trees.cast(param, FLOAT32) if _trees.is_castable(param) else param
    return _storage.unpack(param, held) if held.dtype == jnp.int16 else held


def _layout(params: Any, policies: PolicyMap | None, form: str) -> Layout:
    collections = _trees.has_collections(params)
    storage: list[tuple[str, str]] = []
    seen: set[str] = set()
    for names, leaf in _trees.leaves_with_path(params):
        inside = _trees.strip_collection(names) if collections else names
        path = _trees.parameter_path(inside)
        if path in seen:
            raise CompositionError(
                f"Two parameters have the path {path!r}, because one has a '/' in its name; "
                "rules and masters could not tell them apart. Rename one of them."
            )
        seen.add(path)
        cast_float64 = policies is not None and policies.default.cast_float64
        is_param = not collections or names[0] == _trees.PARAMS
        if not is_param or not _trees.is_castable(leaf, cast_float64):
            storage.append((path, ""))
            continue
        rule_names = _trees.rule_names(params, names)
        dtype = leaf.dtype if policies is None else storage_dtype(policies, rule_names)
        if form == "packed" and np.dtype(dtype) == np.float16:
            raise CompositionError(
                f"master='packed' keeps the 16 bits that bfloat16 drops from FP32, but {path!r} is "
                "stored in float16, whose exponent differs. Use master='fp32', or store it in "
                f"bfloat16: Rule({path!r}, 'p=bf16')."
            )
        storage.append((path, short_name(dtype)))
    return Layout(policies, form, tuple(storage))


def _check_storage(params: list[Any], layout: Layout) -> None:
    for index, leaf in enumerate(params):
        dtype = layout.dtype(index)
        if dtype is not None and leaf.dtype != dtype:
            raise CompositionError(
                f"Parameter {layout.storage[index][0]!r} is {leaf.dtype}, but its policy stores it "
                f"in {dtype}. Cast once, after tx.init(params): params = recipe.cast_params(params)"
                " (TrainState.create does it for you), and apply updates with "
                "optax.apply_updates(params, updates), which keeps dtypes; params + updates, as "
                "equinox.apply_updates computes it, would be float32."
            )


def _fit(master: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The master, saturated where bfloat16 could not hold it, and whether any was too large."""
    threshold = _storage.OVERFLOW_THRESHOLD[np.dtype(dtype)]
    over = ~jnp.all(lax.abs(master) < threshold)  # a NaN is not below it either
    if dtype == FLOAT16:
        return master, over
    largest = np.nextafter(threshold, np.float32(0))
    return lax.clamp(-largest, master, largest), over


def _first(flags: dict[int, jax.Array]) -> jax.Array:
    """The smallest index whose flag holds; -1: none."""
    first = jnp.array(-1, jnp.int32)
    for index in sorted(flags, reverse=True):
        first = lax.select(flags[index], jnp.full_like(first, index), first)
    return first


# ---------------------------------------------------------------------------
# Assignment: params = cast(master)
# ---------------------------------------------------------------------------


def _is_master_state(node: Any) -> bool:
    return isinstance(node, MasterParamsState)


def map_master_states(fn: Any, state: Any) -> Any:
    """Applies `fn` to each MasterParamsState in `state`, under any nesting."""
    return jax.tree.map(
        lambda node: fn(node) if _is_master_state(node) else node, state, is_leaf=_is_master_state
    )


def master_states(state: Any) -> list[MasterParamsState]:
    """Every MasterParamsState in `state`, in flattening order."""
    leaves = jax.tree.leaves(state, is_leaf=_is_master_state)
    return [leaf for leaf in leaves if _is_master_state(leaf)]


def _by_path(params: Any) -> dict[str, Any]:
    collections = _trees.has_collections(params)
    return {
        _trees.parameter_path(_trees.strip_collection(names) if collections else names): leaf
        for names, leaf in _trees.leaves_with_path(params)
    }


def _held(state: MasterParamsState) -> list[tuple[int, str, Any]]:
    """(index, path, what is held) of each parameter that has something held beside it."""
    held, leaves = state.layout.held, jax.tree.leaves(state.masters)
    return [(i, state.layout.storage[i][0], x) for i, x in zip(held, leaves, strict=True)]


def expand(state: Any, params: Any, *, everything: bool = False) -> Any:
    """Puts FP32 masters into the state for the length of one update; `assign` takes them out.

    Args:
      state: an optimizer state at rest: packed remainders, FP32 masters.
      params: the parameters.
      everything: put the other parameters there too, so that the update writes them in the same
        pass; for a `MasterParamsState` that sees `params` themselves.
    """
    stored = _by_path(params)

    def expand_masters(node: MasterParamsState) -> MasterParamsState:
        full = [read_master(stored[path], held) for _, path, held in _held(node)]
        return dataclasses.replace(
            node,
            masters=jax.tree.structure(node.masters).unflatten(full),
            layout=dataclasses.replace(node.layout, expanded="masters"),
        )

    def expand_all(node: MasterParamsState) -> MasterParamsState:
        leaves, treedef = jax.tree.flatten(params)
        held = treedef.flatten_up_to(node.masters)
        full = [read_master(param, master) for param, master in zip(leaves, held, strict=True)]
        return dataclasses.replace(
            node,
            masters=treedef.unflatten(full),
            layout=dataclasses.replace(node.layout, expanded="all"),
        )

    return map_master_states(expand_all if everything else expand_masters, state)


def assign(params: Any, state: Any) -> tuple[Any, Any]:
    """Undoes `expand` after the update: parameters cast from FP32, and the state at rest."""
    written: dict[str, Any] = {}

    def assign_one(node: MasterParamsState) -> MasterParamsState:
        rest = []
        for i, path, full in _held(node):
            dtype = node.layout.dtype(i)
            if not node.layout.has_master(i):
                written[path] = full if dtype is None else _trees.cast(full, dtype)
                full = optax.MaskedNode()
            elif node.layout.form == "packed":
                written[path], full = _storage.pack(full)
            else:
                written[path] = _trees.cast(full, dtype)
            rest.append(full)
        return dataclasses.replace(
            node,
            masters=jax.tree.structure(node.masters).unflatten(rest),
            layout=dataclasses.replace(node.layout, expanded=""),
        )

    state = map_master_states(assign_one, state)
    collections = _trees.has_collections(params)

    def write(names: _trees.Path, leaf: Any) -> Any:
        inside = _trees.strip_collection(names) if collections else names
        return written.get(_trees.parameter_path(inside), leaf)

    return _trees.map_with_path(write, params), state


def store(params: Any, state: Any) -> Any:
    """Casts freshly initialised parameters to the storage dtypes that `state` records."""
    wanted = {
        path: (node.layout.dtype(i), node.layout.form)
        for node in master_states(state)
        for i, (path, name) in enumerate(node.layout.storage)
        if name
    }
    collections = _trees.has_collections(params)

    def cast_leaf(names: _trees.Path, leaf: Any) -> Any:
        inside = _trees.strip_collection(names) if collections else names
        dtype, form = wanted.get(_trees.parameter_path(inside), (None, "fp32"))
        return leaf if dtype is None else _storage.to_storage(leaf, dtype, form)

    return _trees.map_with_path(cast_leaf, params)


def warn_of_wide(params: Any, state: Any, fix: str, stacklevel: int) -> None:
    """Warns of parameters that the optimizer's policies store in fewer bits than they have.

    An optimizer casts the parameters that it trains; those that it does not train, such as the
    frozen ones of a model with LoRA, keep their dtype.

    Args:
      params: a tree of parameters.
      state: the optimizer state.
      fix: code that casts them.
      stacklevel: that of the caller's caller, as in `warnings.warn`.
    """
    maps = [node.layout.policies for node in master_states(state) if node.layout.policies]
    collections = _trees.has_collections(params)
    wide = []
    for names, leaf in _trees.leaves_with_path(params) if maps else ():
        is_param = not collections or names[0] == _trees.PARAMS
        if is_param and _trees.is_castable(leaf):
            rule_names = _trees.rule_names(params, names)
            dtypes = [np.dtype(storage_dtype(policies, rule_names)) for policies in maps]
            if all(bits(dtype) < bits(leaf.dtype) for dtype in dtypes):
                wide.append((_trees.parameter_path(rule_names), leaf, dtypes[0]))
    if not wide:
        return
    path, leaf, dtype = wide[0]
    size = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for _, leaf, _ in wide)
    others = f" and {len(wide) - 1} other parameters are" if len(wide) > 1 else " is"
    warnings.warn(
        f"{path!r}{others} stored in {leaf.dtype} ({size / 1e6:,.1f} MB), and the recipe stores "
        f"them in {dtype}. The optimizer casts only the parameters that it trains. If the others "
        f"are frozen, cast them once before training: {fix}",
        RecipeWarning,
        stacklevel=stacklevel + 1,
    )
