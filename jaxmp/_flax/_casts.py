"""Casts at the boundary of a Flax module, common to Linen and NNX."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmp import _core
from jaxmp._core import Array, DTypeLike, PyTree
from jaxmp._flax._layer_table import LayerTraits, author_class, is_flax
from jaxmp._policies import _device, _load, _patterns, _policy, _resolve

# ---------------------------------------------------------------------------
# Policies of modules
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Method:
    """Method of a module under a policy: all that does not depend on the call.

    Attributes:
      is_forward: its arguments and results are cast.
      kept: positions and names of the arguments that are not cast.
      carried: those of recurrent state, which keeps its dtypes.
      is_dot: it is the method by which Flax, or a registered class, multiplies by the kernel or the
        table of a layer. One that a user overrides may multiply by the kernel itself.
    """

    is_forward: bool
    kept: frozenset[int | str]
    carried: frozenset[int | str]
    is_dot: bool


@dataclasses.dataclass(frozen=True, eq=False)
class ModulePolicy:
    """Resolved policy of a Flax module, with the traits of its class.

    `resolve_module` makes it once for each module; calls only read the attributes.

    Attributes:
      resolved: the resolved policy of the module.
      traits: traits of its class.
      of_class: weak reference to its class, with which the cache of a `Root` loses this object.
      policies: the policies that were resolved.
      outputs: number of outputs of a linear layer; None for other modules.
      policy: the policy of the module.
      upcast_dtype: FP32 if the policy computes in 16 bits, otherwise the compute dtype.
      input_dtype: dtype of the inputs. Norms compute their statistics in FP32, and so is the sum of
        the two parts of their input's gradient, which can cancel: through the statistics, and not.
      field_dtype: value of the `dtype` field or attribute that Flax defined for the class.
    """

    resolved: _resolve.ResolvedPolicy
    traits: LayerTraits
    of_class: weakref.ref[type]
    policies: _load.PolicyMap
    outputs: int | None
    policy: _policy.Policy
    upcast_dtype: np.dtype
    input_dtype: np.dtype
    field_dtype: np.dtype
    _methods: dict[str, Method] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def cls(self) -> type:
        """The class of the module."""
        cls = self.of_class()
        assert cls is not None
        return cls

    def method(self, name: str) -> Method:
        """Returns the properties of a method."""
        if name not in self._methods:
            self._methods[name] = _method_of(self, name)
        return self._methods[name]

    @functools.cached_property
    def is_wide(self) -> bool:
        """True if the module computes in more than 16 bits."""
        return _core.bits(self.policy.compute_dtype) > 16

    @functools.cached_property
    def decision(self) -> ModulePolicy:
        """The policy of a linear layer whose result is not rounded."""
        path, layer = self.resolved.path, (self.cls, self.traits, self.outputs)
        return resolve_module(self.policies, path, *layer, is_decision=True)

    def param_dtype(self, name: str) -> np.dtype:
        """Returns the dtype in which the module reads a parameter."""
        if self.traits.upcasts_params:
            return self.upcast_dtype
        wide, traits = self.resolved.wide_output, self.traits
        # A layer adds its bias, and a registered one all its other parameters, to the result of its
        # dot.
        is_added = name == "bias" or (traits.registered is not None and name != traits.kernel)
        if wide is not None and is_added and traits.dot is not None:
            return wide
        path = f"{self.resolved.path}:{name}"
        return _resolve.resolve_policy(self.policies, path, self.of_class()).policy.compute_dtype


def _method_of(module_policy: ModulePolicy, name: str) -> Method:
    traits, policy = module_policy.traits, module_policy.policy
    cls = author_class(module_policy.cls)
    is_of_flax = is_flax(next((base for base in cls.__mro__ if name in vars(base)), None))
    is_named = name in ("__call__", *policy.forward_methods)
    names, carried = policy.keep_inputs, ()
    if traits.is_cell and name == "__call__":
        carried = 0, "carry"
    elif traits.is_rnn:
        carried = ("initial_carry",)
    has_dot = bool(traits.kernel or traits.embedding) and not traits.is_convolution
    is_dot = has_dot and name == ("attend" if traits.embedding else "__call__")
    owner = traits.registered() if traits.registered else traits.layer
    return Method(
        is_forward=is_named or is_of_flax,
        kept=_patterns.kept_inputs(module_policy.cls, name, names) if names else frozenset(),
        carried=frozenset(carried),
        is_dot=is_dot and getattr(cls, name) is getattr(owner, name, None),
    )


def resolve_module(
    policies: _load.PolicyMap,
    path: str | tuple[str, ...],
    cls: type,
    traits: LayerTraits,
    outputs: int | None = None,
    *,
    is_decision: bool = False,
) -> ModulePolicy:
    """Resolves the policy of a Flax module.

    Args:
      policies: those of the model.
      path: path of the module.
      cls: its class.
      traits: traits of `cls`.
      outputs: number of outputs of a linear layer; None for other modules.
      is_decision: as in `resolve_policy`.
    """
    resolved = _resolve.resolve_policy(policies, path, cls, outputs, is_decision=is_decision)
    compute_dtype = resolved.policy.compute_dtype
    upcast_dtype = _core.wide_dtype(compute_dtype)
    return ModulePolicy(
        resolved=resolved,
        traits=traits,
        of_class=weakref.ref(cls),
        policies=policies,
        outputs=outputs,
        policy=resolved.policy,
        upcast_dtype=upcast_dtype,
        input_dtype=upcast_dtype if traits.is_norm else compute_dtype,
        field_dtype=upcast_dtype if traits.upcasts_params else compute_dtype,
    )


# ---------------------------------------------------------------------------
# Casts
# ---------------------------------------------------------------------------

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
# Objects of NNX, and the parts into which they are split.
_OPAQUE = (nnx.Pytree, nnx.Variable, nnx.State, nnx.GraphDef)


def is_opaque(value: object) -> bool:
    """Returns True for pytrees whose leaves are not cast.

    They are objects of Flax, to which a function may write, or arrays of other libraries, which
    have an `astype`. Those of e3nn have state beside their leaves.
    """
    is_array = isinstance(value, (*ARRAYS, type))
    return isinstance(value, _OPAQUE) or (not is_array and hasattr(value, "astype"))


def cast_tree(
    tree: PyTree, dtype: DTypeLike, cast_leaf: Callable[[Any, Any], Any] = _core.saturating_cast
) -> PyTree:
    """Casts the floating arrays of arguments or results; finite values stay finite.

    Modules in `tree` are not cast, and objects with an `astype` cast themselves. Parameters and
    cotangents are cast by `cast_floating`.
    """

    def cast_array(leaf: object) -> object:
        if not isinstance(leaf, ARRAYS):
            array: Any = None if isinstance(leaf, _OPAQUE) else leaf
            is_own = is_opaque(array) and _core.is_castable(array)
            return array.astype(dtype) if is_own else leaf
        leaf = _core.canonical(leaf) if leaf.dtype == _core.FLOAT64 else leaf
        return cast_leaf(leaf, dtype) if _core.is_castable(leaf) else leaf

    return jax.tree.map(cast_array, tree, is_leaf=is_opaque)


_COMPLEX = frozenset(map(np.dtype, ("complex64", "complex128")))


def is_complex(dtype: DTypeLike | None) -> bool:
    """Returns True for a complex dtype."""
    return dtype is not None and np.dtype(dtype) in _COMPLEX


def keeps_dtype(operands: PyTree) -> bool:
    """Returns True if a Flax layer with these operands computes in its author's dtype.

    The dtype of its policy would drop an imaginary part, or the precision of float64.
    """
    uncast = _COMPLEX | {_core.FLOAT64}
    leaves = jax.tree.leaves(operands, is_leaf=is_opaque)
    return any(
        isinstance(leaf, ARRAYS) and _core.canonical(leaf).dtype in uncast for leaf in leaves
    )


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Casts a tree to the dtypes of another tree with the same structure and shapes.

    Without such a tree, `tree` is returned unchanged.
    """
    leaves, structure = jax.tree.flatten(tree)
    models, model_structure = jax.tree.flatten(like)
    if structure != model_structure or list(map(jnp.shape, leaves)) != list(map(jnp.shape, models)):
        return tree
    pairs = zip(leaves, models, strict=True)
    return structure.unflatten(
        _core.saturating_cast(leaf, model.dtype)
        if _core.is_castable(leaf) and _core.is_castable(model)
        else leaf
        for leaf, model in pairs
    )


def cast_outputs(
    module_policy: ModulePolicy, out: PyTree, unrounded: Container[int] = frozenset()
) -> PyTree:
    """Casts the results of a module to its output dtype, except arrays with `unrounded` ids.

    The output of a norm is at most its scale times the square root of its width, which bfloat16 can
    represent. Its cast does not saturate, so the cast in a residual block stays one operation.
    """
    resolved = module_policy.resolved
    dtype = resolved.output_dtype
    is_bounded = module_policy.traits.is_norm and jnp.finfo(dtype).maxexp >= 128
    cast_array = _core.cast if is_bounded else _core.saturating_cast

    def cast_leaf(leaf: Any, dtype: DTypeLike) -> Any:
        if resolved.casts_output or not _core.is_16bit(module_policy.policy.compute_dtype):
            if _device.computes_in_16_bits(module_policy.policies):
                leaf = _core.strongly_typed(leaf)  # the result of a narrow layer
            return cast_array(leaf, dtype)
        if id(leaf) in unrounded:
            return leaf
        result = cast_array(leaf, dtype)
        return _core.weakly_typed(result) if resolved.narrow else result

    return cast_tree(out, dtype, cast_leaf)


def widen_outputs(module_policy: ModulePolicy, out: PyTree, incoming: PyTree) -> PyTree:
    """Casts 16-bit results of a method that is not a forward pass to a wider output dtype.

    Results with the shape and dtype of an argument, such as a cache in 16 bits, are not cast.

    Args:
      module_policy: of the module.
      out: result of the method.
      incoming: its arguments.
    """
    arguments = jax.tree.leaves(incoming, is_leaf=is_opaque)
    known = {(leaf.shape, leaf.dtype) for leaf in arguments if isinstance(leaf, ARRAYS)}
    resolved = module_policy.resolved

    def widen(leaf: Any, dtype: Any) -> Any:
        leaf = _core.strongly_typed(leaf) if resolved.casts_output else leaf
        is_known = (leaf.shape, leaf.dtype) in known
        if is_known or _core.bits(leaf.dtype) >= _core.bits(dtype):
            return leaf
        return _core.cast(leaf, dtype)

    return cast_tree(out, resolved.output_dtype, widen)


def written_back(value: Array, read: Array, stored: Array) -> Array:
    """Returns the new value of a variable that is read in a narrower dtype.

    Elements that did not change since they were read keep their stored precision.

    Args:
      value: the value that is written.
      read: the value that was read.
      stored: the stored value, from which `read` was cast.
    """
    if not _core.is_float(value):
        return value
    wide = _core.cast(value, stored.dtype)
    if value.dtype != read.dtype or value.shape != read.shape:
        return wide
    return jnp.where(value == read, stored, wide)
