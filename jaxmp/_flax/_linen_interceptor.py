"""What a policy does to one call of a Linen module's method."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import Scope, apply, freeze
from flax.linen.dtypes import promote_dtype
from jax import lax

from jaxmp._attention._layer import Stated, Weights, layer_attention, operands
from jaxmp._audit._share import Suspect, are_many, matrix_elements, returns_float32
from jaxmp._core._compat import current_context, einsum_bias_shape
from jaxmp._core._dtypes import is_16bit
from jaxmp._core._trees import PARAMS, cast, cast_floating, is_castable
from jaxmp._core._wide_dot import wide_product
from jaxmp._flax._attention import policied_function
from jaxmp._flax._casts import (
    LayerTraits,
    ModulePolicy,
    cast_inputs,
    cast_like,
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
from jaxmp._flax._fp8_layers import LayerEinsum, LayerProduct
from jaxmp._flax._originals import Boundary, Rerun, boundary_of, noted, with_originals
from jaxmp._overwritten import OVERWRITE
from jaxmp._policies._device import check_device
from jaxmp._policies._precision import matmul_precision, precision_scope
from jaxmp._policies._resolve import PolicyMap
from jaxmp.errors import AttentionError, CompositionError
from jaxmp.fp8._state import AGE, NAMES, PREFIX, init_state

Path = tuple[str, ...]

# ---------------------------------------------------------------------------
# LayerTraits: what is true of a module class under every policy
# ---------------------------------------------------------------------------

# Statistics, scale and bias in FP32; the result is handed on in the compute dtype.
_NORMS = (nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm)
# Wrappers that normalise another layer's weights; in FP32 too.
_WEIGHT_NORMS = (nn.SpectralNorm, nn.WeightNorm)
# Their `promote_dtype` casts kernel and bias; nothing is left to do in `param`.
_SELF_CASTING = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv, nn.ConvLocal, nn.ConvTranspose)


def _author_class(module: Any) -> type:
    return getattr(type(module), "_jaxmp_class", type(module))


@functools.cache
def traits_of(cls: type[nn.Module]) -> LayerTraits:
    """Returns what holds for the modules of a class."""
    cls = getattr(cls, "_jaxmp_class", cls)
    return LayerTraits(
        takes_dtype=_is_flax_field(cls, "dtype"),
        is_norm=issubclass(cls, _NORMS),
        upcasts_params=issubclass(cls, _NORMS + _WEIGHT_NORMS),
        casts_params=cls in _SELF_CASTING,
        is_cell=issubclass(cls, nn.RNNCellBase),
        is_rnn=issubclass(cls, (nn.RNN, nn.Bidirectional)),
        is_attention=issubclass(cls, nn.MultiHeadDotProductAttention),
    )


def _is_flax_field(cls: type, name: str) -> bool:
    for base in cls.__mro__:
        if name in inspect.get_annotations(base):
            return base.__module__.partition(".")[0] == "flax"
    return False


@functools.cache
def _is_bridge(cls: type) -> bool:
    """Whether it is, or comes from, `flax.nnx.bridge.ToLinen`, which nobody may have imported."""
    names = ((base.__module__, base.__name__) for base in cls.__mro__)
    return ("flax.nnx.bridge.wrappers", "ToLinen") in names


def _check_bridge(module: Any, path: Path) -> None:
    """Paths and dtypes of an NNX module inside a Linen model are NNX's."""
    # A function may make a module that has policies; a class makes one that has none.
    if _is_bridge(type(module)) and isinstance(module.nnx_class, type):
        name = module.nnx_class.__name__
        raise CompositionError(
            f"The ToLinen at {'/'.join(path)!r} holds an NNX {name}, which Linen policies do not "
            "reach. Give it its policies inside the bridge: nnx.bridge.to_linen(lambda *args, "
            f"**kwargs: jaxmp.nnx.apply_policy({name}(*args, **kwargs), policies), ...)."
        )


# ---------------------------------------------------------------------------
# Inside a module
# ---------------------------------------------------------------------------


def _prepare(module: Any, module_policy: ModulePolicy, path: Path, keeps_dtype: bool) -> bool:
    """Sets the fields and the `param` that `module` computes with; False: its author's stand."""
    policy, traits = module_policy.policy, module_policy.traits
    author = module.__dict__.get("_jaxmp_author", {})
    if traits.takes_dtype:
        dtype = author.get("dtype", module.dtype)
        explicit = policy.respect_explicit and dtype is not None
        if (
            keeps_dtype
            or is_complex(dtype)
            or (explicit and np.dtype(dtype) != policy.compute_dtype)
        ):
            _restore(module, author)
            return False
    if module.__dict__.get("_jaxmp_policy") is module_policy:
        return True
    object.__setattr__(module, "_jaxmp_policy", module_policy)
    object.__setattr__(module, "_jaxmp_author", author)

    def set_field(name: str, value: Any) -> None:
        author.setdefault(name, module.__dict__.get(name, _UNSET))
        object.__setattr__(module, name, value)

    if traits.takes_dtype:
        set_field("dtype", module_policy.field_dtype)
    if traits.is_attention:
        own, flax = module.attention_fn, nn.dot_product_attention
        function = policied_function(own, flax, AttentionFunction, policy, path)
        set_field("attention_fn", function)
        set_field("variable", _casting_variable(weakref.ref(module), module_policy))
    quantises = module_policy.resolved.scaling is not None and _quantise(
        module, module_policy, path, set_field
    )
    if module_policy.resolved.wide_output is not None and not quantises:
        _widen(module, module_policy.resolved.wide_output, set_field)
    if not traits.casts_params:
        set_field("param", _casting_param(weakref.ref(module), module_policy))
    return True


_UNSET = object()


def author_fields(module: Any) -> dict[str, Any]:
    """The fields that `_prepare` set, with their author's values."""
    author = module.__dict__.get("_jaxmp_author", {})
    fields = {field.name for field in dataclasses.fields(module)}
    return {name: value for name, value in author.items() if name in fields and value is not _UNSET}


def _restore(module: Any, author: dict[str, Any]) -> None:
    """Gives a module back what `_prepare` set, until it is prepared again."""
    if module.__dict__.pop("_jaxmp_policy", None) is None:
        return
    for name, value in author.items():
        if value is _UNSET:
            module.__dict__.pop(name, None)
        else:
            object.__setattr__(module, name, value)


def _casting_param(ref: Callable[[], Any], module_policy: ModulePolicy) -> Callable[..., Any]:
    """`module.param` in the compute dtype; what is stored keeps the dtype it was made in."""

    def param(name: str, init_fn: Callable[..., Any], *init_args: Any, **kwargs: Any) -> Any:
        module = ref()
        value = type(module).param(module, name, init_fn, *init_args, **kwargs)
        dtype, wide = module_policy.param_dtype(name), module_policy.policy.cast_float64
        return cast_floating(value, dtype, cast_float64=wide)

    return param


class _CastVariable(nn.Variable):
    """A variable that reads in one dtype and keeps the one that it is stored in."""

    def __init__(self, source: nn.Variable, dtype: np.dtype) -> None:
        super().__init__(source.scope, source.collection, source.name, source.unbox)
        self.dtype = dtype

    @property
    def value(self) -> Any:
        stored = super().value
        return cast(stored, self.dtype) if is_castable(stored) else stored

    @value.setter
    def value(self, value: Any) -> None:
        read, stored = self.value, super().value
        if is_castable(stored):
            value = written_back(value, read, stored)
        nn.Variable.value.fset(self, value)  # pyright: ignore


def _casting_variable(ref: Callable[[], Any], module_policy: ModulePolicy) -> Callable[..., Any]:
    """`module.variable`; attention reads its cache in the compute dtype."""

    def variable(collection: str, name: str, *args: Any, **kwargs: Any) -> Any:
        module = ref()
        source = type(module).variable(module, collection, name, *args, **kwargs)
        if collection != "cache" or not is_castable(source.value):
            return source
        return _CastVariable(source, module_policy.policy.compute_dtype)

    return variable


# ---------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AttentionFunction:
    """What `jaxmp.linen.attention_fn` returns; equal, and pickled, by what is stated."""

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
        force_fp32_for_softmax: bool = True,
        qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
        attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    ) -> jax.Array:
        del force_fp32_for_softmax  # It always is.
        if (qk_attn_weights_einsum is None) != (attn_weights_value_einsum is None):
            raise AttentionError(
                "qk_attn_weights_einsum and attn_weights_value_einsum must be given together."
            )
        if precision and qk_attn_weights_einsum:
            raise AttentionError(
                "precision is not used by qk_attn_weights_einsum; give one of them."
            )
        sow = (
            functools.partial(module.sow, "intermediates", "attention_weights") if module else None
        )
        weights = Weights(
            dropout_rate=0.0 if deterministic else dropout_rate,
            dropout_rng=None if deterministic or not dropout_rate else dropout_rng,
            broadcast_dropout=broadcast_dropout,
            sow=sow,
            precision=precision,
            qk_einsum=qk_attn_weights_einsum,
            value_einsum=attn_weights_value_einsum,
        )
        promoted = operands(query, key, value, dtype)
        return layer_attention(promoted, bias, mask, self.jaxmp_stated, weights)


# Flax asks for the signature a dozen times in each call of an attention layer.
_parameters = list(inspect.signature(AttentionFunction.__call__).parameters.values())[1:]
AttentionFunction.__signature__ = inspect.Signature(_parameters)  # pyright: ignore


# ---------------------------------------------------------------------------
# FP8 products
# ---------------------------------------------------------------------------


def _quantise(
    module: Any, module_policy: ModulePolicy, path: Path, set_field: Callable[..., None]
) -> bool:
    """Makes a Flax linear layer multiply in FP8, unless its author gave it a product."""
    if getattr(module, "promote_dtype", None) is not promote_dtype:
        return False
    if not isinstance(module, (nn.Dense, nn.DenseGeneral)):
        return False
    # A clone, such as `nn.remat` makes, has the product of its original, and another state.
    own = module.dot_general is not None and not isinstance(module.dot_general, LayerProduct)
    if own or module.dot_general_cls is not None:
        return False
    set_field("dot_general", _layer_product(LayerProduct, module, module_policy, path))
    if module_policy.resolved.wide_output is not None:
        set_field("promote_dtype", _wide_promote(module_policy.resolved.wide_output))
    return True


def _layer_product(kind: Any, module: Any, module_policy: ModulePolicy, path: Path) -> Any:
    scaling = module_policy.resolved.scaling
    assert scaling is not None
    state = functools.partial(_read_state, weakref.ref(module), scaling)
    name = "/".join(path)
    return kind(
        scaling, module_policy.resolved.wide_output, name, state if scaling.is_stateful else None
    )


def _read_state(ref: Callable[[], Any], scaling: Any) -> dict[str, Any]:
    """The state of delayed scaling of one layer; its gradient is its next value."""
    module = ref()
    found = module.has_variable(OVERWRITE, f"{PREFIX}{AGE}")
    if not found and not module.is_mutable_collection(OVERWRITE):
        raise CompositionError(
            f"DelayedScaling finds no state for {'/'.join(module.scope.path)!r}. Give `apply` all "
            f"variables that `init` returned, {OVERWRITE!r} among them: model.apply(variables, x); "
            "TrainState.create(params=variables) trains it. Layers under nn.scan and "
            f"nn.vmap need variable_axes={{'params': 0, {OVERWRITE!r}: 0}}."
        )

    fresh = {} if found else init_state(scaling)

    def read(name: str) -> Any:
        return module.variable(OVERWRITE, f"{PREFIX}{name}", lambda: fresh[name]).value

    return {name: read(name) for name in NAMES}


def _is_fp8_einsum(module: Any, module_policy: ModulePolicy) -> bool:
    cls = _author_class(module)
    return module_policy.resolved.scaling is not None and cls.__call__ is nn.Einsum.__call__


def _fp8_einsum(module: Any, module_policy: ModulePolicy, path: Path) -> Callable[..., jax.Array]:
    """`Einsum.__call__`, which has no field for its product."""
    product = _layer_product(LayerEinsum, module, module_policy, path)

    def call(inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        equation = nn.merge_param("einsum_str", module.einsum_str, einsum_str).replace(" ", "")
        if "->" not in equation or equation.count(",") != 1:
            raise ValueError(
                f"einsum_str={equation!r} must have two operands, one comma, and include '->'."
            )
        kernel = module.param("kernel", module.kernel_init, module.shape, module.param_dtype)
        bias, shown = None, None
        if module.use_bias:
            shape, shown = einsum_bias_shape(module, equation, inputs, kernel)
            bias = module.param("bias", module.bias_init, shape, module.param_dtype)
        inputs, kernel, bias = module.promote_dtype(inputs, kernel, bias, dtype=module.dtype)
        preferred = module.preferred_element_type
        out = product(equation, inputs, kernel, module.precision, preferred)
        return out if bias is None else out + jnp.reshape(bias, shown)

    return call


# ---------------------------------------------------------------------------
# Wide outputs: 16-bit operands, FP32 result
# ---------------------------------------------------------------------------


def _widen(module: Any, wide: np.dtype, set_field: Callable[..., None]) -> None:
    """Makes the product of a Flax layer emit `wide`, through the fields Flax has for it."""
    if getattr(module, "promote_dtype", None) is not promote_dtype:
        return
    for field, product in (
        ("dot_general", lax.dot_general),
        ("conv_general_dilated", lax.conv_general_dilated),
    ):
        if hasattr(module, field):
            if getattr(module, field) is None and getattr(module, f"{field}_cls") is None:
                set_field(field, wide_operator(product, wide))
                set_field("promote_dtype", _wide_promote(wide))
            return
    if getattr(module, "preferred_element_type", wide) is None:
        set_field("preferred_element_type", wide)
        set_field("promote_dtype", _wide_promote(wide))


@functools.cache
def _wide_promote(wide: np.dtype) -> Callable[..., Any]:
    """Flax's `promote_dtype`, with the bias as wide as the sum it is added to."""

    def promote(*arrays: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
        operands = promote_dtype(*arrays[:2], dtype=dtype, inexact=inexact)
        return operands + [None if bias is None else jnp.asarray(bias, wide) for bias in arrays[2:]]

    return promote


def _wide_attend(module: Any, wide: np.dtype, call: Callable[..., Any]) -> Any:
    """`Embed.attend` has no field for its product; another class's `attend` is left alone."""
    if getattr(type(module), "attend", None) is not nn.Embed.attend:
        return call

    def attend(query: jax.Array) -> jax.Array:
        query, embedding = module.promote_dtype(query, module.embedding, dtype=module.dtype)
        return wide_product(jnp.dot, query, embedding.T, wide)

    return attend


# ---------------------------------------------------------------------------
# Lookups
# ---------------------------------------------------------------------------


def _is_lookup(module: Any, module_policy: ModulePolicy, method: str) -> bool:
    """Whether a call looks up rows of an FP32 table for a policy in 16 bits."""
    cls = _author_class(module)
    if method != "__call__" or cls.__call__ is not nn.Embed.__call__:
        return False
    if (
        not is_16bit(module_policy.policy.compute_dtype)
        or module.promote_dtype is not promote_dtype
    ):
        return False
    return _stored_table(module).dtype == np.float32


def _stored_table(module: Any) -> jax.Array:
    return nn.unbox(module.get_variable(PARAMS, "embedding"))


def _lookup(
    module: Any, module_policy: ModulePolicy, call: Callable[..., Any]
) -> Callable[..., Any]:
    """`Embed.__call__` that casts the rows and not the table: the same numbers.

    The gradient of a row is a sum over all positions that looked it up; this one is in FP32.
    """
    stored = [_stored_table(module)]

    def lookup(*args: Any, **kwargs: Any) -> jax.Array:
        object.__setattr__(module, "promote_dtype", lambda *_, **__: stored)
        try:
            return cast(call(*args, **kwargs), module_policy.policy.compute_dtype)
        finally:
            object.__setattr__(module, "promote_dtype", promote_dtype)

    return lookup


# ---------------------------------------------------------------------------
# The interceptor
# ---------------------------------------------------------------------------


class Origin(NamedTuple):
    """The location, in the model that has the policies, of a module that was taken out of it."""

    path: Path = ()
    # Classes of the modules above it, the nearest first.
    above: tuple[type, ...] = ()


WHOLE = Origin()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Root:
    """Which policies are applied below which module; part of the jit cache key.

    JAX hashes its keys at every call of a jitted function: equal roots are one object, so that its
    identity will do.
    """

    policies: PolicyMap
    path: Path
    origin: Origin = WHOLE


@functools.cache
def root_of(policies: PolicyMap, path: Path, origin: Origin = WHOLE) -> Root:
    """The one root of these policies at this path."""
    return Root(policies, path, origin)


class Plain(NamedTuple):
    """In the place of a `Root`: the model runs as its author wrote it."""

    # A fresh object where no trace that `nn.jit` cached may be used.
    token: Any = None


class _Frame(NamedTuple):
    module: nn.Module
    path: Path
    precision: str | None
    # A function that a lifted transformation calls with the module stands outside of it.
    is_function: bool
    # Whether the operands of the layer made it keep its author's dtype.
    keeps_dtype: bool


class Applier:
    """The interceptor that carries out the policies in every method called below one root."""

    def __init__(self, root: Root, scope: Scope) -> None:
        check_device(root.policies)
        self.root = root
        self.scope = scope
        self.frames: list[_Frame] = []
        self.module_policies: dict[Any, ModulePolicy] = {}
        origin = root.origin
        self.types: dict[Path, type] = {
            origin.path[:length]: cls
            for length, cls in zip(reversed(range(len(origin.path))), origin.above, strict=False)
        }
        self.by_subtree = any(rule.subtree for rule in root.policies.rules)
        self.by_path = is_by_path(root.policies)
        # Modules that seem to ignore the dtype of their policy.
        self.suspects: dict[Path, Suspect] = {}
        self.restores = restores_inputs(root.policies)
        # While a copy of a module is traced by another interceptor, this one does nothing.
        self.suspended = False
        self.precision = jax.config.jax_default_matmul_precision  # pyright: ignore

    def __call__(
        self, call: Callable[..., Any], args: Any, kwargs: Any, where: nn.module.InterceptorContext
    ) -> Any:
        module, method = where.module, where.method_name
        # An inner root owns its subtree, and an unbound module has nothing to cast.
        foreign = self.suspended or current_context().policies != self.root
        if module.scope is None or foreign:
            return call(*args, **kwargs)
        path = self._relative(module.scope.path)
        module_policy = self._module_policy(module, path)
        keeps_dtype = self._keeps_dtype(module, module_policy, (args, kwargs))
        follows = _prepare(module, module_policy, path, keeps_dtype)
        if self.by_path:
            key_scopes(module)
        if method == "setup":
            return call(*args, **kwargs)
        body = self._lifted_body(module)
        is_function = not hasattr(type(module), method)
        crosses = not is_function and not self._is_inside(module, path)
        incoming = args, kwargs
        boundary = None
        if crosses and follows:
            if self.restores:
                args, kwargs = with_originals(module_policy, path, method, args, kwargs, None)
            uncast = args, kwargs
            args, kwargs = cast_inputs(module_policy, method, args, kwargs)
            if self.restores and is_16bit(module_policy.input_dtype):
                boundary = self._boundary(module, method, uncast, (args, kwargs))
        if (
            crosses
            and module_policy.resolved.wide_output is not None
            and method == "attend"
            and not keeps_dtype
        ):
            call = _wide_attend(module, module_policy.resolved.wide_output, call)
        if follows and method == "__call__" and _is_fp8_einsum(module, module_policy):
            call = _fp8_einsum(module, module_policy, path)
        elif crosses and follows and _is_lookup(module, module_policy, method):
            call = _lookup(module, module_policy, call)
        with self._frame(module, path, module_policy, is_function, keeps_dtype), noted(boundary):
            try:
                out = call(*args, **kwargs)
            except (TypeError, ValueError) as error:
                arguments = named_arguments(call, args, kwargs)
                explain_mismatch(error, module_policy, path, _author_class(module), arguments)
                raise
        out, carry = self._split_carry(module_policy, module, method, body, out, *incoming)
        if crosses and follows and returns_float32(out) and ignores_dtype(module_policy):
            self._suspect(module, path)
        if crosses and (follows or module_policy.resolved.casts_output):
            out = cast_outputs(module_policy, out)
        return carry(out)

    def _suspect(self, module: Any, path: Path) -> None:
        own = [leaf for leaf in _params(module.scope).values() if not isinstance(leaf, Mapping)]
        elements = matrix_elements(jax.tree.leaves(own))
        if elements:
            cls = _author_class(module)
            self.suspects[path] = Suspect("/".join(path), cls.__name__, elements)

    def many_suspects(self) -> list[Suspect]:
        """The modules that seem to ignore their policy, if they have many of the parameters."""
        suspects = list(self.suspects.values())
        return suspects if suspects and are_many(suspects, _params(self.scope)) else []

    def _split_carry(
        self,
        module_policy: ModulePolicy,
        module: Any,
        method: str,
        body: str,
        out: Any,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, Callable[[Any], Any]]:
        if "while_loop(" in body and args:
            carry = cast_like(out, args[0])
            return (), lambda _: carry
        return split_carry(module_policy.traits, module, method, out, args, kwargs, "scan(" in body)

    def _boundary(self, module: Any, method: str, uncast: Any, cast: Any) -> Boundary | None:
        """The record of a call that cast some inputs; None if it cast none."""

        def rerun(leaves: list[Any], arrays: list[int], structure: Any) -> Rerun:
            scope = module.scope
            state, state_structure = jax.tree.flatten(nested(module.variables, scope.path))
            rngs = {name: rng.as_jax_rng() for name, rng in scope.rngs.items()}

            def call(inputs: list[Any], state: list[Any]) -> None:
                filled = dict(enumerate(leaves)) | dict(zip(arrays, inputs, strict=True))
                args, kwargs = structure.unflatten(filled.values())

                def run(top: Scope) -> None:
                    for name in scope.path:
                        top = top.push(name)
                    copy = module.clone(
                        parent=top, _deep_clone=True, _reset_names=True, name=module.name
                    )
                    getattr(copy, method)(*args, **kwargs)

                with self._handed_over(), nn.intercept_methods(self._successor()):
                    variables = state_structure.unflatten(state)
                    apply(run, mutable=scope.mutable)(variables, rngs=rngs)

            return Rerun(state, call)

        return boundary_of(uncast, cast, None, rerun)

    def _successor(self) -> Applier:
        fresh = Applier(self.root, self.scope)
        fresh.types = dict(self.types)
        return fresh

    @contextlib.contextmanager
    def _handed_over(self) -> Iterator[None]:
        self.suspended = True
        try:
            yield
        finally:
            self.suspended = False

    # -- where are we -----------------------------------------------------------------------

    def _relative(self, path: Path) -> Path:
        """Below the root; a module that was handed in from elsewhere keeps its whole path."""
        depth = len(self.root.path)
        inside = path[:depth] == self.root.path
        return self.root.origin.path + path[depth:] if inside else path

    def _is_inside(self, module: nn.Module, path: Path) -> bool:
        """Whether a module calls its own method: no boundary is crossed."""
        callers = (frame for frame in reversed(self.frames) if not frame.is_function)
        caller = next(callers, None)
        return caller is not None and (caller.path, type(caller.module)) == (path, type(module))

    def _lifted_body(self, module: Any) -> str:
        """The transformation whose body this call is, such as "scan(block)"; "" if none."""
        lifted = isinstance(module.parent, Scope) and not (
            self.frames and self.frames[-1].module is module
        )
        debug_path = module.scope.debug_path
        return debug_path[-1] if lifted and debug_path else ""

    @contextlib.contextmanager
    def _frame(
        self,
        module: nn.Module,
        path: Path,
        module_policy: ModulePolicy,
        is_function: bool,
        keeps_dtype: bool,
    ) -> Iterator[None]:
        outer = self.frames[-1].precision if self.frames else self.precision
        precision = matmul_precision(module_policy.policy, self.precision)
        self.frames.append(_Frame(module, path, precision, is_function, keeps_dtype))
        try:
            with precision_scope(precision, outer):
                yield
        finally:
            self.frames.pop()

    # -- which policy -----------------------------------------------------------------------

    def _keeps_dtype(self, module: Any, module_policy: ModulePolicy, operands: Any) -> bool:
        """Whether a Flax layer, or one that it is a part of, computes in its author's dtype."""
        if self.frames and (self.frames[-1].keeps_dtype or self.frames[-1].module is module):
            return self.frames[-1].keeps_dtype
        if not module_policy.traits.takes_dtype:
            return False
        wide = module_policy.policy.cast_float64
        if keeps_dtype(operands, wide) or is_complex(getattr(module, "param_dtype", None)):
            return True
        return self._has_unusual_params and keeps_dtype(_params(module.scope), wide)

    @functools.cached_property
    def _has_unusual_params(self) -> bool:
        """Whether a parameter of the model may make its layer keep its author's dtype."""
        return keeps_dtype(_params(self.scope), False)

    def _module_policy(self, module: Any, path: Path) -> ModulePolicy:
        cls = type(module)
        ancestors = self._ancestors(module, path) if self.by_subtree else ()
        key = (path, cls, ancestors)
        if key not in self.module_policies:
            _check_bridge(module, path)
            self.module_policies[key] = resolve_module(
                self.root.policies, path, cls, ancestors, traits_of(cls)
            )
        return self.module_policies[key]

    def _ancestors(self, module: Any, path: Path) -> tuple[type, ...]:
        self.types.setdefault(path, type(module))
        parent, above = module.parent, path[:-1]
        while isinstance(parent, nn.Module) and parent.scope is not None:
            self.types.setdefault(self._relative(parent.scope.path), type(parent))
            parent = parent.parent
        prefixes = [above[:length] for length in range(len(above), -1, -1)] if path else []
        return tuple(self.types[prefix] for prefix in prefixes if prefix in self.types)


def _params(scope: Scope) -> Any:
    return scope.variables().get(PARAMS, {})


def nested(variables: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The variables of a module at `path` as those of the model around it."""
    found: dict[str, Any] = dict(variables)
    for name in reversed(path):
        found = {collection: {name: values} for collection, values in found.items()}
    return found


# ---------------------------------------------------------------------------
# Keys for nn.jit
# ---------------------------------------------------------------------------
#
# `nn.jit` shares one trace between equal modules, wherever they stand, so a rule by path would
# reach only the first of them. The flags of a scope are part of its cache key; there the path
# goes, of every scope below the root, before the module of that scope is called.


def is_by_path(policies: PolicyMap) -> bool:
    return any(rule.path is not None or rule.subtree for rule in policies.rules)


def _key_scope(scope: Scope) -> None:
    if "push" in vars(scope):
        return
    scope.flags = freeze({**scope.flags, "jaxmp_path": "/".join(scope.path)})
    scope.push = functools.partial(_push_keyed, weakref.ref(scope))


def _push_keyed(parent: Callable[[], Any], *args: Any, **kwargs: Any) -> Scope:
    child = Scope.push(parent(), *args, **kwargs)
    _key_scope(child)
    return child


def key_scopes(module: Any) -> None:
    """Keys a bound module and those it holds already, in fields or since `setup`."""
    _key_scope(module.scope)
    # A list: a look at a child may run its `setup`. Most of what a module holds is no container.
    for value in [value for value in vars(module).values() if _may_hold_modules(type(value))]:
        for child in modules_in(value):
            if child.scope is not None and "push" not in vars(child.scope):
                key_scopes(child)


def modules_in(value: Any) -> list[nn.Module]:
    if not _may_hold_modules(type(value)):
        return []
    return [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, nn.Module)]


@functools.cache
def _may_hold_modules(kind: type) -> bool:
    return issubclass(kind, (nn.Module, tuple, list, Mapping))
