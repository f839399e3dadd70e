"""Finds transformations in a state at any nesting, reads their loss scale and masters, and checks
that no transformation around a recipe's optimizer breaks training silently.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import optax

from jaxmp import _core
from jaxmp._core import PyTree, _compat
from jaxmp._gradients import _dynamic_loss_scale, _loss_scale
from jaxmp.errors import CompositionError, JaxmpError
from jaxmp.fp8 import _overwritten
from jaxmp.optim._layout import MasterParamsState, leaves_by_path, map_by_path, master_states
from jaxmp.optim._master import read_master
from jaxmp.optim._skip import SkipNonfiniteState, SkipStats

# The classes of the nodes in the state of a recipe's optimizer.
STATES = (
    *(SkipStats, SkipNonfiniteState, MasterParamsState, _dynamic_loss_scale.DynamicLossScale),
    *(_loss_scale.NoLossScale, _loss_scale.StaticLossScale),
)


def find(state: PyTree, classes: type | tuple[type, ...]) -> list[tuple[str, Any]]:
    """Returns `[(path, node), ...]` of all nodes of the given classes, outermost first."""
    # Of a train state or NNX optimizer, only the state of the optimizer is searched.
    tree, is_node = getattr(state, "opt_state", state), lambda x: isinstance(x, classes)
    flat = jax.tree.leaves_with_path(tree, is_leaf=is_node)
    return [(jax.tree_util.keystr(path), node) for path, node in flat if is_node(node)]


def find_loss_scales(state: PyTree) -> list[tuple[str, _loss_scale.LossScale]]:
    """Returns `[(path, loss scale), ...]` of a state."""
    return find(state, _loss_scale.LossScale)


def guard_of(opt_state: PyTree) -> SkipNonfiniteState | None:
    """Returns the state of `recipe.optimizer` in an optimizer state; None if there is none.

    Raises:
      CompositionError: if there are several.
    """
    nodes = find(opt_state, SkipNonfiniteState)
    if len(nodes) > 1:
        raise CompositionError(
            f"This optimizer has {len(nodes)} states of recipes, at "
            f"{', '.join(path for path, _ in nodes)}. One backward pass has one loss scale, and "
            "all parameters skip the same steps. Put the groups inside: "
            "recipe.optimizer(optax.partition({...}, labels)). Rules of the recipe set the "
            "dtypes of single parameters, such as jaxmp.Rule('head', 'p=f32')."
        )
    return nodes[0][1] if nodes else None


def gradient_options(opt_state: PyTree, options: dict[str, Any]) -> dict[str, Any]:
    """Adds the options of `value_and_grad` that an optimizer determines.

    These are the loss scale, the dtypes of sums, and the mapped axes.

    Args:
      opt_state: the optimizer state.
      options: options of the caller, which take precedence.

    Returns:
      All options.

    Raises:
      CompositionError: if `axis_name` differs from that of the optimizer.
    """
    guard, defaults = guard_of(opt_state), {"loss_scale": own_loss_scale(opt_state)}
    if guard is not None:
        axes = guard.settings.axis_name
        if "axis_name" in options and _core.as_tuple(options["axis_name"]) != axes:
            shown = axes[0] if len(axes) == 1 else axes or None
            raise CompositionError(
                f"value_and_grad(axis_name={options['axis_name']!r}), but the optimizer has "
                f"axis_name={shown!r}. Specify it once, in the optimizer: "
                f"recipe.optimizer(inner, axis_name={options['axis_name']!r}), and leave it out "
                "of value_and_grad, which then averages over this axis."
            )
        defaults |= guard.settings.options()
    return {**defaults, **options}


def own_loss_scale(opt_state: PyTree) -> _loss_scale.LossScale:
    """Returns the loss scale of an optimizer state; `NoLossScale()` if it has none."""
    guard = guard_of(opt_state)
    scale = _loss_scale.NoLossScale() if guard is None else guard.loss_scale
    return plain(scale)


def only(nodes: list[tuple[str, Any]], description: str) -> Any:
    """Returns the node of a list with one `(path, node)`, with plain arrays as leaves."""
    if not nodes:
        raise JaxmpError(
            f"This state contains no {description}. Make the optimizer with "
            "recipe.optimizer(inner) of a recipe."
        )
    if len(nodes) > 1:
        paths = ", ".join(path or "(top)" for path, _ in nodes)
        raise JaxmpError(
            f"This state contains more than one {description}, at {paths}. Pass the part of the "
            "state that contains the one to read."
        )
    return plain(nodes[0][1])


def plain(tree: PyTree) -> PyTree:
    """Returns a tree with arrays in place of the Variables of Flax NNX."""
    is_variable = lambda node: hasattr(type(node), "get_value")
    return jax.tree.map(_compat.plain_array, tree, is_leaf=is_variable)


def get_loss_scale(state: PyTree) -> _loss_scale.LossScale:
    """Returns the loss scale in an optimizer state, train state or any other tree.

    Args:
      state: the state, or an NNX optimizer.

    Returns:
      The loss scale, with plain arrays as leaves.

    Raises:
      JaxmpError: if there is none, or more than one, with their paths.
      CompositionError: if a transformation around `recipe.optimizer`, or in front of it, would
        hide overflows from the loss scale, or keep them.

    Example:
      >>> tx = jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1))
      >>> float(get_loss_scale(tx.init({"w": jnp.ones(2)})).scale_value)
      65536.0
    """
    check_plain_loop(state)
    return only(find_loss_scales(state), "loss scale")


def get_master_params(state: PyTree) -> PyTree:
    """Returns the parameters in full precision, with masters for those stored in 16 bits.

    Args:
      state: a train state (an object with `params` and `opt_state`), a `jaxmp.nnx.Optimizer`
        outside of `nnx.jit`, or an optimizer state in which every parameter has an FP32 master.

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
    if _core.has_fields(state, "params", "opt_state"):
        full = lambda params: replace_by_masters(params, state.opt_state)
        return _overwritten.map_params(full, state.params)
    if (params := params_of_model(state)) is not None:
        return replace_by_masters(params, plain(state.opt_state))
    node = only(find(state, MasterParamsState), "set of master parameters")
    _check_complete(node)
    return node.masters


def params_of_model(optimizer: Any) -> PyTree:
    """Returns the parameters of the model that a `jaxmp.nnx.Optimizer` trains; None for others."""
    is_own = _core.has_fields(optimizer, "_trained_params")
    return optimizer._trained_params() if is_own else None


def _check_complete(node: MasterParamsState) -> None:
    layout = node.layout
    without = [path for i, (path, _) in enumerate(layout.storage) if not layout.has_master(i)]
    if without:
        raise JaxmpError(
            f"{len(without)} of {len(layout.storage)} parameters (such as {without[0]!r}) are "
            "stored in FP32 without a second copy in the optimizer state. "
            "Pass the train state: jaxmp.get_master_params(train_state); in NNX, the optimizer, "
            "outside of nnx.jit: jaxmp.get_master_params(optimizer)."
        )
    if layout.master == "packed":
        raise JaxmpError(
            "Packed masters consist of the 16-bit parameters and their remainders, and this state "
            "contains only the remainders. Pass the train state: "
            "jaxmp.get_master_params(train_state)."
        )


def replace_by_masters(params: PyTree, opt_state: PyTree) -> PyTree:
    """Returns the parameters, with the FP32 masters of an optimizer state where it has any."""
    stored = leaves_by_path(params)
    values = (value for node in master_states(opt_state) for value in node.values())
    masters = {path: read_master(stored[path], master) for _, path, master in values}
    return map_by_path(masters.get, params)


# ---------------------------------------------------------------------------
# Compositions
# ---------------------------------------------------------------------------


def check_composition(opt_state: PyTree, params: PyTree) -> None:
    """Checks that no transformation around a recipe's optimizer breaks it.

    Args:
      opt_state: the optimizer state (or its shapes) as `tx.init` returns it.
      params: the parameters from which it was made.

    Raises:
      CompositionError: with the wrapper, the reason, and the composition that works.
    """
    guard_of(opt_state)
    _check_node(opt_state)
    paths = {path for node in master_states(opt_state) for path, _ in node.layout.storage}
    if "" in paths and not jax.tree_util.all_leaves([params]):
        raise CompositionError(
            "optax.flatten around recipe.optimizer joins all parameters into one array, for which "
            "no rule has a path. Put it inside: recipe.optimizer(optax.flatten(inner))."
        )


def check_plain_loop(state: PyTree) -> None:
    """Checks the optimizers of a loop that calls `tx.update` itself.

    Train states and optimizers of jaxmp read all gradients, and restore all parts of the state
    after a skipped step. In a plain loop, the guard knows only the gradients that reach it.

    Args:
      state: an optimizer state, or any tree that contains some.

    Warns:
      RecipeWarning: for a part in front of the guard that may hide overflows.

    Raises:
      CompositionError: as `check_composition`, and for a part outside of the guard that hides
        overflows, or in which they would remain.
    """
    for node in jax.tree.leaves(state, is_leaf=_is_whole):
        if _is_optimizer(node) and guard_of(node):
            _check_node(node, plain=True)


def _is_whole(node: PyTree) -> bool:
    """Returns True for the state of one optimizer, and for a train state, which was checked."""
    # A tuple with several guards contains several optimizers.
    is_one = not _is_chain(node) or len(find(node, SkipNonfiniteState)) == 1
    return _core.has_fields(node, "value_and_grad") or (is_one and _is_optimizer(node))


def _is_optimizer(node: PyTree) -> bool:
    if _is_chain(node):
        return all(map(_is_optimizer, _children(node)))
    is_optax = re.fullmatch(r"optax\..*State", f"{type(node).__module__}.{type(node).__name__}")
    return isinstance(node, SkipNonfiniteState) or is_optax is not None


def _check_outside(node: PyTree) -> None:
    """Checks the parts of a chain or partition that are outside of the guard."""
    parts = _children(node) if _is_chain(node) or isinstance(node, optax.PartitionState) else []
    guards = [i for i, part in enumerate(parts) if find(part, SkipNonfiniteState)]
    is_link = bool(guards) and _is_chain(node)
    fix = (
        "Put it inside: recipe.optimizer(optax.chain(...)), or for groups of parameters "
        "recipe.optimizer(optax.partition({...}, labels)). jaxmp.TrainState and "
        "jaxmp.nnx.Optimizer restore it; pass them instead of their opt_state."
    )
    for i, part in enumerate(parts):
        is_group = isinstance(part, optax.MaskedState) and bool(part.inner_state)
        # A part behind the guard that stores updates changes the parameters in skipped steps, too.
        if i not in guards and (is_group or (is_link and _keeps_or_hides(part))):
            raise CompositionError(
                f"{type(part).__name__} outside of the recipe's optimizer: in a loop that calls "
                "tx.update, an overflow would be hidden from the loss scale, or remain in this "
                "state or its parameters, or a skipped step would change the parameters by this "
                f"state. {fix}"
            )
    if is_link and guards[0]:
        message = (
            "A transformation in front of the recipe's optimizer may hide overflows from it, as "
            "optax.clip does; optax.clip_by_global_norm does not."
        )
        _core.warn_user(f"{message} {fix}")


def _keeps_or_hides(state: PyTree) -> bool:
    """Returns True for a transformation that stores gradients, or replaces those not finite."""
    arrays = [x for x in jax.tree.leaves(state) if _core.is_inexact(x) and x.ndim]
    return bool(arrays or find(state, (optax.ZeroNansState, optax.ApplyIfFiniteState)))


# Wrappers that break training, and the reason.
_REFUSED = {
    optax.MultiStepsState: (
        "optax.MultiSteps around recipe.optimizer: an overflow would remain in its accumulator "
        "forever. Accumulate inside: recipe.optimizer(optax.MultiSteps(inner, every_k)), or use "
        "value_and_grad(..., microbatches=k)."
    ),
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite around recipe.optimizer hides overflows from the loss scale, which "
        "would never back off. Remove it: recipe.optimizer(inner) already skips such steps."
    ),
}
# Wrappers that pass gradients and updates through unchanged, for their parameters.
_TRANSPARENT = (
    optax.MaskedState,
    optax.PartitionState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)


def _check_node(node: PyTree, *, plain: bool = False) -> None:
    if isinstance(node, SkipNonfiniteState):
        if find(node.inner_state, SkipNonfiniteState):
            raise CompositionError(
                "recipe.optimizer inside recipe.optimizer: two guards and two loss scales for the "
                "same parameters. Apply the recipe once: tx = recipe.optimizer(inner)."
            )
        return
    if not find(node, SkipNonfiniteState) and not _has_masters(node):
        return
    if type(node) in _REFUSED:
        raise CompositionError(_REFUSED[type(node)])
    if _has_masters(node):
        _check_assignable(node)
    if plain:
        _check_outside(node)
    for child in _children(node):
        _check_node(child, plain=plain)


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
                    "optax.partition."
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
