"""What a policy does to the NNX modules of one model, and to one call of their methods."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as flax_promote_dtype
from jax import lax

from jaxmp._attention._layer import Stated, Weights, layer_attention, operands
from jaxmp._audit._share import Suspect, are_many, matrix_elements, returns_float32, warn_if_low
from jaxmp._core._compat import context, current_context, declares_pytree
from jaxmp._core._dtypes import is_16bit
from jaxmp._core._trees import cast, cast_floating, is_castable
from jaxmp._core._wide_dot import wide_product
from jaxmp._flax._attention import policied_function
from jaxmp._flax._casts import (
    LayerTraits,
    ModulePolicy,
    cast_inputs,
    cast_outputs,
    explain_mismatch,
    ignores_dtype,
    is_complex,
    keeps_dtype,
    named_arguments,
    resolve_module,
    restores_inputs,
    split_carry,
    wide_operator,
    written_back,
)
from jaxmp._flax._fp8_layers import LayerEinsum, LayerProduct, einsum_sizes
from jaxmp._flax._originals import Boundary, Rerun, boundary_of, noted, with_originals
from jaxmp._overwritten import OVERWRITE
from jaxmp._policies._device import check_device
from jaxmp._policies._precision import matmul_precision, precision_scope
from jaxmp._policies._resolve import PolicyMap
from jaxmp.errors import CompositionError, RecipeWarning
from jaxmp.fp8._state import NAMES, PREFIX, init_state

Path = tuple[str, ...]

# ---------------------------------------------------------------------------
# LayerTraits: what is true of a module class under every policy
# ---------------------------------------------------------------------------

# Statistics, scale and bias in FP32; the result is handed on in the compute dtype.
_NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm)
# Wrappers that normalise another layer's weights; in FP32 too.
_WEIGHT_NORMS = (nnx.SpectralNorm, nnx.WeightNorm)
# Their `promote_dtype` casts what they read.
_SELF_CASTING = (
    *(nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.ConvTranspose, nnx.Embed),
    *_NORMS,
    *_WEIGHT_NORMS,
)


@functools.cache
def traits_of(cls: type) -> LayerTraits:
    """What holds for the modules of a class."""
    return LayerTraits(
        takes_dtype=_takes_dtype(cls),
        is_norm=issubclass(cls, _NORMS),
        upcasts_params=issubclass(cls, _NORMS + _WEIGHT_NORMS),
        casts_params=cls in _SELF_CASTING,
        is_cell=issubclass(cls, nnx.RNNCellBase),
        is_rnn=issubclass(cls, (nnx.RNN, nnx.Bidirectional)),
        is_attention=issubclass(cls, nnx.MultiHeadAttention),
    )


def _is_flax(value: Any) -> bool:
    return getattr(value, "__module__", "").partition(".")[0] == "flax"


def _takes_dtype(cls: type) -> bool:
    """Whether a class that Flax defines, `cls` or a base of it, has an argument `dtype`."""
    return _default_dtype(cls) is not inspect.Parameter.empty


@functools.cache
def _default_dtype(cls: type) -> Any:
    """What a Flax layer's `dtype` is when its author says nothing; `empty`: it has none."""
    for base in cls.__mro__:
        if _is_flax(base) and base not in nnx.Module.__mro__ and "__init__" in vars(base):
            parameter = inspect.signature(vars(base)["__init__"]).parameters.get("dtype")
            if parameter is not None:
                return parameter.default
    return inspect.Parameter.empty


def _is_explicit(module: Any, dtype: Any) -> bool:
    """Whether the author of a model chose the `dtype` of a Flax layer."""
    embedding = vars(module).get("embedding")
    implied = [_default_dtype(type(module)), getattr(embedding, "dtype", None)]
    return dtype is not None and not any(
        other is not None and np.dtype(other) == np.dtype(dtype) for other in implied
    )


# ---------------------------------------------------------------------------
# Bound: which policies, and where; kept on every module as a static attribute
# ---------------------------------------------------------------------------

# Flax leaves attributes of this prefix out where it lists those of a user: the items of an
# `nnx.Dict`, the variables of a `ToNNX`, a `repr`.
ATTRIBUTE = "_pytree__jaxmp"


class Bound:
    """A module's place under the policies of its root. Hashable, so part of every jit cache key.

    Args:
      policies: those of the root.
      path: from the root to this module.
      cls: the module's class as its author wrote it.
      ancestors: classes of the modules above it, the nearest first.
      author: attributes, by name, that the policy has set, as they were before.
    """

    __slots__ = ("_hash", "ancestors", "author", "cls", "module_policy", "path", "policies")

    def __init__(
        self,
        policies: PolicyMap,
        path: Path,
        cls: type,
        ancestors: tuple[type, ...],
        author: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        self.policies, self.path, self.cls = policies, path, cls
        self.ancestors, self.author = ancestors, author
        self.module_policy = resolve_module(policies, path, cls, ancestors, traits_of(cls))
        self._hash = hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.policies, self.path, self.cls, self.ancestors, self.author

    @property
    def follows(self) -> bool:
        """Whether the module computes as its policy says, not as its author wrote."""
        return ("followed", False) not in self.author

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Bound) and self._hash == other._hash and self._key == other._key

    def __reduce__(self) -> Any:
        return Bound, self._key

    def __repr__(self) -> str:
        return f"Bound({'/'.join(self.path)!r}, {self.module_policy.policy})"


def bound_of(module: Any) -> Bound | None:
    """The place of a module under a policy; None for a module without one."""
    return vars(module).get(ATTRIBUTE)


def author_class(module: Any) -> type:
    """The class of a module as its author wrote it."""
    return getattr(type(module), "_jaxmp_class", type(module))


# ---------------------------------------------------------------------------
# Setting up one module
# ---------------------------------------------------------------------------


def bind(module: Any, policies: PolicyMap, path: Path, ancestors: tuple[type, ...]) -> None:
    """Puts a module, which is nobody else's, under its policy."""
    cls = type(module)
    module_policy = Bound(policies, path, cls, ancestors).module_policy
    changes = _changes(module, module_policy, path)
    author = tuple((name, vars(module)[name]) for name in changes)
    if not _follows(module, module_policy):
        changes, author = {}, (("followed", False),)
    for name, value in changes.items():
        object.__setattr__(module, name, value)
    _set_state(module, changes)
    setattr(module, ATTRIBUTE, Bound(policies, path, cls, ancestors, author))
    object.__setattr__(
        module, "__class__", wrapped_class(cls, cast_on_read(module, module_policy.traits))
    )


def unbind(module: Any) -> None:
    """Gives a module back the class and the attributes that its author gave it."""
    bound = bound_of(module)
    if bound is None:
        return
    object.__setattr__(module, "__class__", bound.cls)
    delattr(module, ATTRIBUTE)
    for name, value in bound.author if bound.follows else ():
        object.__setattr__(module, name, value)


def _follows(module: Any, module_policy: ModulePolicy) -> bool:
    if not (module_policy.traits.takes_dtype and module_policy.policy.respect_explicit):
        return True
    dtype = vars(module).get("dtype")
    return not _is_explicit(module, dtype) or np.dtype(dtype) == module_policy.policy.compute_dtype


def _changes(module: Any, module_policy: ModulePolicy, path: Path) -> dict[str, Any]:
    """The attributes of Flax's own layers that a module_policy sets."""
    changes: dict[str, Any] = {}
    attributes = vars(module)
    if module_policy.traits.takes_dtype and "dtype" in attributes:
        changes["dtype"] = module_policy.field_dtype
    if module_policy.traits.is_attention and "attention_fn" in attributes:
        own, flax = attributes["attention_fn"], nnx.dot_product_attention
        function = policied_function(own, flax, AttentionFunction, module_policy.policy, path)
        changes["attention_fn"] = function
    if attributes.get("promote_dtype") is flax_promote_dtype:
        quantising = (
            _quantising(module, module_policy, path)
            if module_policy.resolved.scaling is not None
            else {}
        )
        widening = (
            {}
            if module_policy.resolved.wide_output is None
            else _widening(module, module_policy.resolved.wide_output)
        )
        # An FP8 product is as wide as it is asked to be.
        changes |= widening | quantising
    return changes


# ---------------------------------------------------------------------------
# FP8 products
# ---------------------------------------------------------------------------


def _quantising(module: Any, module_policy: ModulePolicy, path: Path) -> dict[str, Any]:
    """The attributes by which a Flax linear layer multiplies in FP8, unless its author set them."""
    attributes, name = vars(module), "/".join(path)
    scaling = module_policy.resolved.scaling
    assert scaling is not None
    if isinstance(module, (nnx.Linear, nnx.LinearGeneral)):
        if attributes.get("dot_general") in (None, lax.dot_general):
            return {"dot_general": LayerProduct(scaling, module_policy.resolved.wide_output, name)}
    elif isinstance(module, nnx.Einsum) and attributes.get("einsum_op") is jnp.einsum:
        return {"einsum_op": LayerEinsum(scaling, module_policy.resolved.wide_output, name)}
    return {}


# ---------------------------------------------------------------------------
# The state of FP8 products
# ---------------------------------------------------------------------------


class OverwriteWithGradient(nnx.Variable):
    """State whose gradient is its next value, as of `fp8.DelayedScaling`; no parameter.

    `jaxmp.nnx.value_and_grad` differentiates it beside the parameters, and never scales, averages
    or clips it; `jaxmp.nnx.Optimizer.update` assigns it. Flax's bridges take it for the collection
    `_overwrite_with_gradient` of Linen.

    Example:
      >>> model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
      >>> model = jaxmp.load_recipe("fp8").replace(fp8="delayed").wrap(model)
      >>> nnx.state(model, OverwriteWithGradient)["fp8_age"][...].shape
      ()
    """


# A Linen model with such a state may have gone through a bridge before this module was imported.
nnx.register_variable_name(OVERWRITE, OverwriteWithGradient, overwrite=True)


def _is_stateful(value: Any) -> bool:
    return isinstance(value, (LayerProduct, LayerEinsum)) and value.scaling.is_stateful


def _set_state(module: Any, changes: dict[str, Any]) -> None:
    """Gives a layer the state that its product needs, and takes from it what no product needs.

    A state that fits stays, shared with the model that it came from like all other Variables.
    """
    products = [value for value in changes.values() if _is_stateful(value)]
    wanted = _fresh_state(module, products[0]) if products else {}
    held = {name for name, value in vars(module).items() if _is_state(name, value)}
    shapes = {name: vars(module)[name].get_raw_value().shape for name in held}
    if shapes == {name: leaf.shape for name, leaf in wanted.items()}:
        return
    for name in held:
        delattr(module, name)
    for name, leaf in wanted.items():
        setattr(module, name, OverwriteWithGradient(leaf))


def _is_state(name: str, value: Any) -> bool:
    return name.startswith(PREFIX) and isinstance(value, OverwriteWithGradient)


def _fresh_state(module: Any, product: Any) -> dict[str, Any]:
    """The state of a layer before its first step; empty for one that will never be in FP8.

    Device and target play no part: a checkpoint of one fits the others.
    """
    kernel = module.kernel.get_raw_value()
    stack, k, n = _sizes(module, kernel.shape)
    if k % 16 or n % 16:
        return {}

    def fresh() -> dict[str, jax.Array]:
        state = init_state(product.scaling)
        return {
            f"{PREFIX}{name}": jnp.broadcast_to(leaf, (*stack, *leaf.shape))
            for name, leaf in state.items()
        }

    # A model of shapes has a state of shapes.
    return jax.eval_shape(fresh) if isinstance(kernel, jax.ShapeDtypeStruct) else fresh()


def _sizes(module: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
    """How many such layers `nnx.vmap` stacked, and the inputs and outputs of one; 0: not known."""
    if isinstance(module, nnx.Einsum):
        stack, own = _unstacked(shape, tuple(module.kernel_shape))
        if module.einsum_str is None:
            return stack, 0, 0
        k, n, why = einsum_sizes(module.einsum_str, None, own)
        return stack, (1 if why else k), n
    inputs, outputs = np.atleast_1d(module.in_features), np.atleast_1d(module.out_features)
    batch = getattr(module, "batch_axis", {}).values()
    stack, _ = _unstacked(shape, (*batch, *inputs.tolist(), *outputs.tolist()))
    return stack, int(np.prod(inputs)), int(np.prod(outputs))


def _unstacked(
    shape: tuple[int, ...], own: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A kernel's shape as (axes that a transformation added, its own)."""
    left, added = list(own), []
    for size in reversed(shape):
        if left and left[-1] == size:
            left.pop()
        else:
            added.insert(0, size)
    return ((), own) if left else (tuple(added), own)


def _read_state(module: Any, product: Any) -> dict[str, Any]:
    """The state of delayed scaling of one layer; its gradient is its next value."""
    held = vars(module)
    try:
        found = {name: held[f"{PREFIX}{name}"].get_value() for name in NAMES}
    except KeyError:
        raise CompositionError(
            f"DelayedScaling finds no state for {product.path!r}: its attributes "
            f"{PREFIX}* are gone. Apply the policy anew: "
            "jaxmp.nnx.apply_policy(model, policies)."
        ) from None
    if jnp.ndim(found["age"]):
        raise CompositionError(
            f"The state of DelayedScaling of {product.path!r} is that of {found['age'].shape[0]} "
            "layers, and the transformation that calls one of them does not split it. Where it "
            "names axes, name this one too: nnx.StateAxes({nnx.Param: 0, "
            "jaxmp.nnx.OverwriteWithGradient: 0, ...: None})."
        )
    return found


# ---------------------------------------------------------------------------
# Wide outputs: 16-bit operands, FP32 result
# ---------------------------------------------------------------------------


def _widening(module: Any, wide: np.dtype) -> dict[str, Any]:
    """The attributes by which the product of a Flax layer emits `wide`."""
    attributes = vars(module)
    if attributes.get("preferred_element_type") is not None:
        return {}
    for name, product in (
        ("dot_general", lax.dot_general),
        ("conv_general_dilated", lax.conv_general_dilated),
    ):
        if name in attributes and attributes[name] in (None, product):
            if attributes.get(f"{name}_cls") is not None:
                return {}
            return {name: wide_operator(product, wide), "promote_dtype": _wide_promote(wide)}
    if attributes.get("einsum_op") is jnp.einsum:
        return {"einsum_op": _wide_einsum(wide), "promote_dtype": _wide_promote(wide)}
    if "preferred_element_type" in attributes:
        return {"preferred_element_type": wide, "promote_dtype": _wide_promote(wide)}
    return {}


@functools.cache
def _wide_promote(wide: np.dtype) -> Callable[..., Any]:
    """Flax's `promote_dtype`, with the bias as wide as the sum it is added to."""

    def promote(arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> tuple[Any, ...]:
        promoted = flax_promote_dtype(arrays[:2], dtype=dtype, inexact=inexact)
        biases = (None if bias is None else jnp.asarray(bias, wide) for bias in arrays[2:])
        return (*promoted, *biases)

    return promote


@functools.cache
def _wide_einsum(wide: np.dtype) -> Callable[..., jax.Array]:
    def einsum(equation: str, lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
        return wide_product(functools.partial(jnp.einsum, equation, **options), lhs, rhs, wide)

    return einsum


def _wide_attend(module: Any, wide: np.dtype) -> Callable[..., Any]:
    """`Embed.attend` has no attribute for its product."""

    def attend(query: jax.Array, out_sharding: Any = None) -> jax.Array:
        arrays = query, module.embedding[...]
        query, embedding = module.promote_dtype(arrays, dtype=module.dtype)
        product = functools.partial(jnp.dot, out_sharding=out_sharding)
        return wide_product(product, query, embedding.T, wide)

    return attend


# ---------------------------------------------------------------------------
# Parameters in the compute dtype
# ---------------------------------------------------------------------------


def cast_on_read(module: Any, traits: LayerTraits) -> frozenset[str]:
    """Returns the names of the attributes of a module that are cast when they are read."""
    if traits.is_attention:
        return frozenset({"cached_key", "cached_value"})
    return frozenset(name for name, value in vars(module).items() if _is_cast_on_read(value))


def _is_cast_on_read(value: Any) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=_is_param_or_module)
    return any(isinstance(leaf, nnx.Param) or _is_stateful(leaf) for leaf in leaves)


def _is_param_or_module(value: Any) -> bool:
    return isinstance(value, (nnx.Variable, nnx.Module))


class CastOnRead:
    """Attribute that user code reads in the compute dtype while its module runs.

    Parameters are read in the compute dtype. A dot that requires a state is read with the state of
    its module, which is a different module in each trace. Other values, and the attributes of a
    module that does not run, are returned as they are stored.

    Args:
      owner: the wrapped class that has this attribute.
      name: of the attribute.
    """

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __getattribute__(self, attribute: str) -> Any:
        # Flax does not record an attribute that has a setter as data or static. Python takes the
        # setter from the class, so it calls `__set__`, which Flax does not find.
        if attribute == "__set__":
            raise AttributeError(attribute)
        return object.__getattribute__(self, attribute)

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return getattr(super(self.owner, owner), self.name, self)
        if self.name not in vars(module):
            # Another instance of the class has a parameter of this name.
            try:
                return getattr(super(self.owner, module), self.name)
            except AttributeError:
                raise AttributeError(
                    f"{type(module).__name__!r} object has no attribute {self.name!r}"
                ) from None
        value = vars(module)[self.name]
        bound = bound_of(module)
        if bound is None or not bound.follows or current_context().policies != bound.policies:
            return value
        dtype, wide = (
            bound.module_policy.param_dtype(self.name),
            bound.module_policy.policy.cast_float64,
        )

        def view(leaf: Any) -> Any:
            if isinstance(leaf, (nnx.Param, nnx.Cache)):
                return variable_view(leaf, dtype, wide)
            if _is_stateful(leaf):
                state = functools.partial(_read_state, module, leaf)
                return dataclasses.replace(leaf, state=state)
            return leaf

        return jax.tree.map(view, value, is_leaf=_is_param_or_module)

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self.name] = value

    def __delete__(self, module: Any) -> None:
        del vars(module)[self.name]


def variable_view(source: Any, dtype: Any, cast_float64: bool = False) -> Any:
    """A Variable of the same kind that reads in `dtype`; what is written to it goes to `source`."""
    value = source.get_raw_value()
    castable = isinstance(value, (jax.Array, np.ndarray)) and is_castable(value, cast_float64)
    if not castable or value.dtype == dtype or not _is_ordinary(source):
        return source
    view = _view_class(type(source)).from_metadata(cast(value, dtype), source.get_metadata())
    object.__setattr__(view, "_source", source)
    return view


def _is_ordinary(variable: Any) -> bool:
    """Not one that lives in a `jax.Ref` or as a hijax type."""
    return not (getattr(variable, "ref", False) or getattr(variable, "hijax", False))


@functools.cache
def _view_class(cls: type) -> Any:
    class View(cls):
        __slots__ = ("_source",)

        def __setattr__(self, name: str, value: Any) -> None:
            source = _source_of(self)
            if name != "_raw_value" or source is None:
                super().__setattr__(name, value)
                return
            read = object.__getattribute__(self, "_raw_value")
            source.set_raw_value(written_back(value, read, source.get_raw_value()))
            object.__setattr__(self, name, cast(value, read.dtype))

        def set_value(self, value: Any, **index: Any) -> None:
            source = _source_of(self)
            if source is None:
                super().set_value(value, **index)
                return
            read, kept = object.__getattribute__(self, "_raw_value"), source.get_raw_value()
            whole = index.get("index", ...) is ...
            if whole:
                value = written_back(value, read, kept)
            else:
                value = cast_floating(value, kept.dtype, cast_float64=True)
            source.set_value(value, **index)
            object.__setattr__(self, "_raw_value", cast(source.get_raw_value(), read.dtype))

    View.__name__ = View.__qualname__ = cls.__name__
    View.__module__ = cls.__module__
    return View


def _source_of(view: Any) -> Any:
    """What a view writes to; a view that a transformation rebuilt writes to itself."""
    try:
        return object.__getattribute__(view, "_source")
    except AttributeError:
        return None


# ---------------------------------------------------------------------------
# Wrapped classes
# ---------------------------------------------------------------------------

_classes: dict[type, type] = {}
_classes_lock = threading.Lock()


def wrapped_class(cls: type, names: frozenset[str]) -> type:
    """Returns the subclass of `cls` whose methods run under the policy of their module.

    There is one such subclass, so a module that gets its parameters inside a transformation has
    the same class inside and outside of it. The attributes of all its instances accumulate in it.

    Args:
      cls: the class that the author of the model wrote.
      names: attributes of an instance that are cast when they are read.
    """
    with _classes_lock:
        wrapped = _classes.get(cls)
        if wrapped is None:
            wrapped = _classes[cls] = _make_class(cls)
        for name in sorted(names):
            if name not in vars(wrapped):
                setattr(wrapped, name, CastOnRead(wrapped, name))
        return wrapped


def _make_class(cls: Any) -> type:
    members = {name: _under_policy(name, member) for name, member in _methods(cls).items()}
    if issubclass(cls, nnx.MultiHeadAttention):
        members["init_cache"] = _make_init_cache(cls.init_cache)
    members |= {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce__": _reduce,
        "__setattr__": _make_setattr(cls.__setattr__),
        "_jaxmp_class": cls,
    }
    pytree = declares_pytree(cls, nnx.Module)
    options = {} if pytree is None else {"pytree": pytree}
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), members, **options)


def _methods(cls: type) -> dict[str, Any]:
    """What is called on a module: all methods of a user's class, the computing ones of Flax's."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base in nnx.Module.__mro__:
            continue
        for name, member in vars(base).items():
            computes = name in ("__call__", "attend") or not (_is_flax(base) or name[:2] == "__")
            is_method = callable(member) and hasattr(member, "__get__")
            if computes and is_method and not isinstance(member, (type, staticmethod)):
                found[name] = member
            else:
                found.pop(name, None)
    return found


def _under_policy(name: str, inherited: Any) -> Callable[..., Any]:
    @functools.wraps(inherited)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = inherited.__get__(self, type(self))
        bound = bound_of(self)
        if bound is None:
            return call(*args, **kwargs)
        return _call(bound, self, name, call, args, kwargs)

    return method


def _make_init_cache(inherited: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(inherited)
    def init_cache(self: Any, input_shape: Any, dtype: Any = None) -> None:
        """As Flax's; without `dtype` the cache is kept in the compute dtype."""
        bound = bound_of(self)
        if dtype is None:
            dtype = jnp.float32 if bound is None else bound.module_policy.policy.compute_dtype
        inherited(self, input_shape, dtype)

    return init_cache


# The function that binds assigned modules. It walks whole models, so it is defined in
# `jaxmp.nnx`, which imports this module, and registers itself here.
_binder: list[Callable[[Any, str, Any], Any]] = []


def binds_assigned(fn: Callable[[Any, str, Any], Any]) -> Callable[[Any, str, Any], Any]:
    """Registers the function that puts modules under the policies of their new owner."""
    _binder[:] = [fn]
    return fn


def _make_setattr(inherited: Callable[[Any, str, Any], None]) -> Callable[[Any, str, Any], None]:
    """`__setattr__` that puts assigned modules and parameters under the policies of the model."""

    @functools.wraps(inherited)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        bound = bound_of(self)
        if bound is None or not isinstance(value, _HOLDERS) or name.startswith("_pytree__"):
            inherited(self, name, value)
            return
        before = vars(self).copy()
        inherited(self, name, value)
        # The setter of a property has assigned another attribute, which has been bound.
        if not isinstance(vars(self).get(name), _HOLDERS):
            return
        try:
            vars(self)[name] = _binder[0](self, name, vars(self)[name])
        except Exception:
            vars(self).clear()
            vars(self).update(before)
            raise
        if name in cast_on_read(self, bound.module_policy.traits):
            wrapped_class(bound.cls, frozenset({name}))

    return __setattr__


# Values that are, or may hold, modules and parameters. A field is what `nnx.data` returns.
_HOLDERS = (nnx.Module, nnx.Param, dataclasses.Field, list, tuple, dict)


def _reduce(self: Any) -> tuple[Any, ...]:
    members = vars(type(self)).items()
    names = frozenset(name for name, member in members if isinstance(member, CastOnRead))
    return _rebuild, (type(self)._jaxmp_class, names), self.__getstate__()


def _rebuild(cls: type, names: frozenset[str]) -> Any:
    return object.__new__(wrapped_class(cls, names))


# ---------------------------------------------------------------------------
# One call
# ---------------------------------------------------------------------------


class _Frame(NamedTuple):
    bound: Bound
    precision: str | None
    # Whether the operands of the layer made it keep its author's dtype.
    keeps_dtype: bool


class _Frames(threading.local):
    """The policied calls that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Frame] = []
        # Modules of the model that is running that seem to ignore the dtype of their policy.
        self.suspects: dict[Path, Suspect] = {}
        # The precision of products outside of all of them.
        self.ambient: str | None = None


_frames = _Frames()

# Modules and what they are split into are pytrees, and nothing to cast.
_OPAQUE = (nnx.Pytree, nnx.Variable, nnx.State, nnx.GraphDef)


def _is_opaque(value: Any) -> bool:
    return isinstance(value, _OPAQUE)


def _call(bound: Bound, module: Any, name: str, call: Any, args: Any, kwargs: Any) -> Any:
    module_policy = bound.module_policy
    crosses = not _is_inside(bound)
    incoming = args, kwargs
    if crosses:
        _check_containers(bound, module)
    as_author = crosses and _keeps_dtype(module, module_policy, incoming)
    follows = bound.follows and not as_author
    boundary = None
    if crosses and follows:
        restores = restores_inputs(bound.policies)
        if restores:
            args, kwargs = with_originals(module_policy, bound.path, name, args, kwargs, _is_opaque)
        uncast = args, kwargs
        args, kwargs = cast_inputs(module_policy, name, args, kwargs, _is_opaque)
        if restores and is_16bit(module_policy.input_dtype):
            boundary = _boundary(module, name, uncast, (args, kwargs))
    if as_author:
        call = functools.partial(_call_as_author, bound, module, name)
    elif crosses and follows and name == "__call__" and _is_lookup(bound, module):
        call = functools.partial(_lookup, bound, module)
    elif (
        crosses
        and module_policy.resolved.wide_output is not None
        and name == "attend"
        and _is_flax_attend(bound.cls)
    ):
        call = _wide_attend(module, module_policy.resolved.wide_output)
    with _entered(bound, name, as_author), noted(boundary):
        try:
            out = call(*args, **kwargs)
        except (TypeError, ValueError) as error:
            arguments = named_arguments(call, args, kwargs)
            explain_mismatch(error, module_policy, bound.path, bound.cls, arguments)
            raise
    out, carry = split_carry(module_policy.traits, module, name, out, *incoming)
    if crosses and follows and returns_float32(out) and ignores_dtype(module_policy):
        _suspect(bound, module)
    if _frames.suspects and not _frames.stack:
        _report_suspects(bound, module, name, *incoming)
    if crosses and (follows or module_policy.resolved.casts_output):
        out = cast_outputs(module_policy, out, _is_opaque)
    return carry(out)


# Models whose share of FLOPs in 16 bits was counted.
_counted: set[tuple[type, PolicyMap]] = set()


def _suspect(bound: Bound, module: Any) -> None:
    own = (value for value in vars(module).values() if isinstance(value, nnx.Param))
    elements = matrix_elements(value.get_raw_value() for value in own)
    if elements:
        path = "/".join(bound.path)
        _frames.suspects[bound.path] = Suspect(path, bound.cls.__name__, elements)


def _report_suspects(bound: Bound, module: Any, name: str, args: Any, kwargs: Any) -> None:
    """Warns once if many of a model's layers ignore the dtype of their policies."""
    suspects = list(_frames.suspects.values())
    _frames.suspects.clear()
    key = bound.cls, bound.policies
    if key in _counted or not are_many(suspects, nnx.as_pure(nnx.state(module, nnx.Param))):
        return
    _counted.add(key)
    call = lambda module, args, kwargs: getattr(module, name)(*args, **kwargs)
    warn_if_low(bound.cls, suspects, 4, call, module, args, kwargs)


def _check_containers(bound: Bound, module: Any) -> None:
    """Warns of modules that were added to a Python list or dict after the model was wrapped."""
    for name, value in vars(module).items():
        if type(value) not in (list, dict):
            continue
        for leaf in jax.tree.leaves(value, is_leaf=_is_param_or_module):
            if isinstance(leaf, nnx.Module) and bound_of(leaf) is None:
                path = "/".join((*bound.path, name))
                warnings.warn(
                    f"The {type(leaf).__name__} in {path!r} was added to a Python "
                    f"{type(value).__name__} after the model was wrapped, so it computes in its "
                    "author's dtypes. Wrap the model again: model = recipe.wrap(model); or hold "
                    "the layers in an nnx.List or nnx.Dict, which wraps what is added.",
                    RecipeWarning,
                    stacklevel=4,
                )
                return


def _keeps_dtype(module: Any, module_policy: ModulePolicy, operands: Any) -> bool:
    """Whether a Flax layer, or one that it is a part of, computes in its author's dtype."""
    if _frames.stack and _frames.stack[-1].keeps_dtype:
        return True
    if not module_policy.traits.takes_dtype:
        return False
    bound, attributes = bound_of(module), vars(module)
    assert bound is not None
    author = dict(bound.author).get("dtype", attributes.get("dtype"))
    params = [v.get_raw_value() for v in attributes.values() if isinstance(v, nnx.Param)]
    wide = module_policy.policy.cast_float64
    return is_complex(author) or keeps_dtype((params, operands), wide, _is_opaque)


def _call_as_author(bound: Bound, module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a Flax layer as if the layer had no policy."""
    plain = object.__new__(bound.cls)
    vars(plain).update({**vars(module), **dict(bound.author if bound.follows else ())})
    del vars(plain)[ATTRIBUTE]
    before = dict(vars(plain))
    out = getattr(plain, name)(*args, **kwargs)
    # Variables are shared; attributes that are new, such as sown values, are not.
    for attribute, value in vars(plain).items():
        if before.get(attribute, before) is not value and not attribute.startswith("_pytree__"):
            setattr(module, attribute, value)
    return out


def _is_lookup(bound: Bound, module: Any) -> bool:
    """Whether a call looks up rows of an FP32 table for a policy in 16 bits."""
    if bound.cls.__call__ is not nnx.Embed.__call__:
        return False
    dtypes = vars(module)["embedding"].get_raw_value().dtype, dict(bound.author).get("dtype")
    return is_16bit(bound.module_policy.policy.compute_dtype) and dtypes == (np.float32, np.float32)


def _lookup(bound: Bound, module: Any, *args: Any, **kwargs: Any) -> jax.Array:
    """`Embed.__call__` that casts the rows and not the table: the same numbers.

    The gradient of a row is a sum over all positions that looked it up; this one is in FP32.
    """
    rows = _call_as_author(bound, module, "__call__", *args, **kwargs)
    return cast(rows, bound.module_policy.policy.compute_dtype)


def _boundary(module: Any, method: str, uncast: Any, cast: Any) -> Boundary | None:
    """The record of a call that cast some inputs; None if it cast none."""

    def rerun(leaves: list[Any], arrays: list[int], structure: Any) -> Rerun:
        objects = {i: leaf for i, leaf in enumerate(leaves) if _is_opaque(leaf)}
        graph, state = nnx.split((module, objects))
        values, state_structure = jax.tree.flatten(state)

        def call(inputs: list[Any], values: list[Any]) -> None:
            copy, objects = nnx.merge(graph, state_structure.unflatten(values))
            filled = dict(enumerate(leaves)) | objects | dict(zip(arrays, inputs, strict=True))
            args, kwargs = structure.unflatten(filled.values())
            with _outside():
                getattr(copy, method)(*args, **kwargs)

        return Rerun(values, call)

    return boundary_of(uncast, cast, _is_opaque, rerun)


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    """A block that stands in no policied call."""
    stack, ambient = _frames.stack, _frames.ambient
    _frames.stack = []
    try:
        yield
    finally:
        _frames.stack, _frames.ambient = stack, ambient


def _is_flax_attend(cls: Any) -> bool:
    return getattr(cls, "attend", None) is nnx.Embed.attend


def _is_inside(bound: Bound) -> bool:
    """Whether a module calls its own method: no boundary is crossed."""
    if not _frames.stack:
        return False
    return _frames.stack[-1].bound == bound


@contextlib.contextmanager
def _entered(bound: Bound, method: str, keeps_dtype: bool) -> Iterator[None]:
    """Runs one method under its policies, precision and name scope."""
    stack = _frames.stack
    if not stack:
        check_device(bound.policies)
        _frames.ambient = jax.config.jax_default_matmul_precision  # pyright: ignore
    outer = stack[-1].precision if stack else _frames.ambient
    precision = matmul_precision(bound.module_policy.policy, _frames.ambient)
    active = current_context().policies == bound.policies
    policies = contextlib.nullcontext() if active else context(policies=bound.policies)
    scope = _named(bound, method)
    stack.append(_Frame(bound, precision, keeps_dtype))
    try:
        with policies, precision_scope(precision, outer), scope:
            yield
    finally:
        stack.pop()


def _named(bound: Bound, method: str) -> contextlib.AbstractContextManager[Any]:
    """The module's path below its caller as a name scope, as Linen names its modules."""
    caller = _frames.stack[-1].bound if _frames.stack else None
    names = bound.path or (bound.cls.__name__,)
    if caller is not None and caller.policies == bound.policies:
        if caller.path == bound.path:
            return contextlib.nullcontext()
        depth = len(caller.path)
        if bound.path[:depth] == caller.path:
            names = bound.path[depth:]
    suffix = "" if method == "__call__" else f".{method}"
    return jax.named_scope("/".join(names) + suffix)


# ---------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AttentionFunction:
    """What `jaxmp.nnx.attention_fn` returns; equal, and pickled, by what is stated."""

    jaxmp_stated: Stated

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        if promote_dtype is None:
            promoted = operands(query, key, value, dtype)
        else:
            promoted = promote_dtype((query, key, value), dtype=dtype)
        sow = None if module is None else functools.partial(module.sow, nnx.Intermediate)
        weights = Weights(
            dropout_rate=0.0 if deterministic else dropout_rate,
            dropout_rng=None if deterministic or not dropout_rate else dropout_rng,
            broadcast_dropout=broadcast_dropout,
            sow=None if sow is None else functools.partial(sow, "attention_weights"),
            precision=precision,
        )
        known = self.jaxmp_stated
        if is_causal:
            known = dataclasses.replace(known, is_causal=True)
        return layer_attention(promoted, bias, mask, known, weights)
