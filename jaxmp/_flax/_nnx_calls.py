"""Calls of methods of NNX modules under a policy."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmp._core._compat import context, current_context
from jaxmp._core._dtypes import is_16bit
from jaxmp._core._trees import cast
from jaxmp._core._typing import PyTree
from jaxmp._core._wide_dot import wide_product
from jaxmp._flax._casts import (
    ModulePolicy,
    cast_inputs,
    cast_outputs,
    explain_mismatch,
    ignores_dtype,
    is_complex,
    keeps_dtype,
    named_arguments,
    restores_inputs,
    split_carry,
    widen_outputs,
)
from jaxmp._flax._fp8_use import fp8_decisions, note_weights, warn_of_model
from jaxmp._flax._nnx_bound import ATTRIBUTE, Bound, Path, bound_of
from jaxmp._flax._nnx_cast_on_read import is_member
from jaxmp._flax._originals import Originals, noted, originals_of, with_originals
from jaxmp._flax._share import Suspect, are_many, matrix_elements, returns_float32, warn_if_low
from jaxmp._policies._device import check_device
from jaxmp._policies._precision import matmul_precision, precision_scope
from jaxmp._policies._resolve import PolicyMap
from jaxmp.errors import RecipeWarning


class _Frame(NamedTuple):
    bound: Bound
    precision: str | None
    # The operands of the layer require the dtype that the author of the model chose.
    keeps_dtype: bool
    # The call is part of a forward pass of the module, whose arguments have been cast.
    is_forward: bool


class _Frames(threading.local):
    """Calls of wrapped modules that a thread is running, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Frame] = []
        # Modules of the running model that appear to ignore the dtype of their policy.
        self.suspects: dict[Path, Suspect] = {}
        # The precision of FP32 matmuls outside of all these calls.
        self.ambient: str | None = None


_frames = _Frames()
_WITHIN = contextlib.nullcontext(())

# Modules, and the parts into which they are split, are pytrees that must not be cast.
_OPAQUE = (nnx.Pytree, nnx.Variable, nnx.State, nnx.GraphDef)


def _is_opaque(value: object) -> bool:
    return isinstance(value, _OPAQUE)


def _is_param(value: object) -> bool:
    return isinstance(value, nnx.Param)


def call_method(
    bound: Bound,
    module: nnx.Module,
    name: str,
    call: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """Calls a method of a wrapped module under the policies of its model.

    Args:
      bound: location of the module.
      module: the module.
      name: name of the method.
      call: the method, bound to the module.
      args, kwargs: its arguments.
    """
    module_policy = bound.module_policy
    caller = _frames.stack[-1] if _frames.stack else None
    caller = caller if caller and caller.bound == bound else None
    is_inside = caller is not None and caller.is_forward
    at_boundary = not is_inside and module_policy.is_forward(name)
    incoming = args, kwargs
    if caller is None:
        _check_containers(bound, module)
    as_author = at_boundary and _keeps_dtype(module, module_policy, incoming)
    is_overridden = bound.is_overridden and not as_author
    originals: Originals = {}
    wide = module_policy.resolved.wide_output
    if at_boundary and is_overridden:
        restores = restores_inputs(bound.policies)
        if restores:
            args, kwargs = with_originals(module_policy, name, args, kwargs, _is_opaque)
        uncast = args, kwargs
        args, kwargs = cast_inputs(module_policy, name, args, kwargs, _is_opaque)
        if restores and is_16bit(module_policy.input_dtype):
            originals = originals_of(uncast, (args, kwargs), _is_opaque)
    if as_author:
        call = functools.partial(_call_as_author, bound, module, name)
    elif at_boundary and is_overridden and name == "__call__" and _looks_up_float32(bound, module):
        call = functools.partial(_lookup, bound, module)
    elif at_boundary and wide is not None and name == "attend" and _is_flax_embedding(bound, name):
        call = _wide_attend(module, wide)
    is_forward = is_inside or at_boundary
    is_whole = not _frames.stack and name == "__call__"
    fp8 = fp8_decisions(bound.cls, bound.policies, bound.path) if is_whole else _WITHIN
    with fp8 as rows, _entered(bound, name, as_author, is_forward), noted(originals):
        try:
            out = call(*args, **kwargs)
        except (TypeError, ValueError, NotImplementedError) as error:
            arguments = named_arguments(call, args, kwargs), _is_param, "" if is_forward else name
            explain_mismatch(error, module_policy, bound.path, bound.cls, *arguments)
            raise
        if at_boundary:
            note_weights(module_policy, bound.path, lambda: _own_params(module))
    if rows:
        again = _call_again, (module, name, *incoming), {}
        warn_of_model((bound.cls, bound.policies), rows, 3, again)
    out, carry = split_carry(module_policy.traits, module, name, out, *incoming)
    expects_16bit = is_overridden and ignores_dtype(module_policy)
    if expects_16bit and not is_inside and returns_float32(out):
        _suspect(bound, module, "" if at_boundary else name)
    if _frames.suspects and not _frames.stack:
        _report_suspects(bound, module, name, *incoming)
    if at_boundary and (is_overridden or module_policy.resolved.casts_output):
        out = cast_outputs(module_policy, out, _is_opaque)
    elif is_overridden and caller is None:
        out = widen_outputs(module_policy, out, incoming, _is_opaque)
    return carry(out)


# Models whose share of FLOPs in 16 bits was counted.
_counted: set[tuple[type, PolicyMap]] = set()


def _own_params(module: nnx.Module) -> Iterator[Any]:
    """Yields the parameters of a module without those of its submodules."""
    own = (value for value in vars(module).values() if isinstance(value, nnx.Param))
    return (value.get_raw_value() for value in own)


def _suspect(bound: Bound, module: nnx.Module, method: str) -> None:
    elements = matrix_elements(_own_params(module))
    if elements:
        path = "/".join(bound.path)
        _frames.suspects[bound.path] = Suspect(path, bound.cls.__name__, elements, method)


def _report_suspects(
    bound: Bound, module: nnx.Module, name: str, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> None:
    """Warns once if many layers of a model ignore the dtype of their policies."""
    suspects = list(_frames.suspects.values())
    _frames.suspects.clear()
    key = bound.cls, bound.policies
    if key in _counted or not are_many(suspects, nnx.as_pure(nnx.state(module, nnx.Param))):
        return
    _counted.add(key)
    warn_if_low(bound.cls, suspects, 4, _call_again, module, name, args, kwargs)


def _call_again(module: nnx.Module, name: str, args: tuple[PyTree, ...], kwargs: PyTree) -> PyTree:
    return getattr(module, name)(*args, **kwargs)


def _check_containers(bound: Bound, module: nnx.Module) -> None:
    """Warns about modules that were added to a Python list or dict of a wrapped model."""
    for name, value in vars(module).items():
        if type(value) not in (list, dict):
            continue
        for leaf in jax.tree.leaves(value, is_leaf=is_member):
            if isinstance(leaf, nnx.Module) and bound_of(leaf) is None:
                path = "/".join((*bound.path, name))
                warnings.warn(
                    f"The {type(leaf).__name__} in {path!r} was added to a Python "
                    f"{type(value).__name__} after the model was wrapped, so it computes in its "
                    "author's dtypes. Wrap the model again: model = recipe.wrap(model); or store "
                    "the layers in an nnx.List or nnx.Dict, which wraps layers that are added.",
                    RecipeWarning,
                    stacklevel=4,
                )
                return


def _keeps_dtype(module: nnx.Module, module_policy: ModulePolicy, operands: PyTree) -> bool:
    """Returns True if a Flax layer, or an enclosing one, computes in its author's dtype."""
    if _frames.stack and _frames.stack[-1].keeps_dtype:
        return True
    name = module_policy.traits.dtype
    if not name:
        return False
    bound, attributes = bound_of(module), vars(module)
    assert bound is not None
    author = dict(bound.author).get(name, attributes.get(name))
    params = [v.get_raw_value() for v in attributes.values() if isinstance(v, nnx.Param)]
    cast_float64 = module_policy.policy.cast_float64
    return is_complex(author) or keeps_dtype((params, operands), cast_float64, _is_opaque)


def _call_as_author(
    bound: Bound, module: nnx.Module, name: str, *args: PyTree, **kwargs: PyTree
) -> PyTree:
    """Calls a method of a Flax layer as if the layer had no policy."""
    plain = object.__new__(bound.cls)
    vars(plain).update({**vars(module), **dict(bound.author if bound.is_overridden else ())})
    del vars(plain)[ATTRIBUTE]
    before = dict(vars(plain))
    out = getattr(plain, name)(*args, **kwargs)
    # Variables are shared, but new attributes, such as sown values, are not.
    for attribute, value in vars(plain).items():
        if before.get(attribute, before) is not value and not attribute.startswith("_pytree__"):
            setattr(module, attribute, value)
    return out


def _is_flax_embedding(bound: Bound, method: str) -> bool:
    """Returns True for an embedding layer whose method is the one of Flax's class."""
    traits = bound.module_policy.traits
    return bool(traits.embedding) and getattr(bound.cls, method) is getattr(traits.layer, method)


def _looks_up_float32(bound: Bound, module: nnx.Module) -> bool:
    """Returns True if a call looks up rows of an FP32 table under a policy in 16 bits."""
    if not _is_flax_embedding(bound, "__call__"):
        return False
    table = vars(module)[bound.module_policy.traits.embedding].get_raw_value()
    dtypes = table.dtype, dict(bound.author).get("dtype")
    return is_16bit(bound.module_policy.policy.compute_dtype) and dtypes == (np.float32, np.float32)


def _lookup(bound: Bound, module: nnx.Module, *args: PyTree, **kwargs: PyTree) -> jax.Array:
    """Calls `Embed.__call__` and casts the rows and not the table, which has the same result.

    The gradient of a row is a sum over all positions that looked it up; this sum is in FP32.
    """
    rows = _call_as_author(bound, module, "__call__", *args, **kwargs)
    return cast(rows, bound.module_policy.policy.compute_dtype)


def _wide_attend(module: Any, wide: np.dtype) -> Callable[..., jax.Array]:
    """Returns `Embed.attend` with a wide result. The dot of the layer is not an attribute."""

    def attend(query: jax.Array, out_sharding: Any = None) -> jax.Array:
        arrays = query, module.embedding[...]
        query, embedding = module.promote_dtype(arrays, dtype=module.dtype)
        product = functools.partial(jnp.dot, out_sharding=out_sharding)
        return wide_product(product, query, embedding.T, wide)

    return attend


@contextlib.contextmanager
def _entered(bound: Bound, method: str, keeps_dtype: bool, is_forward: bool) -> Iterator[None]:
    """Runs one method under its precision and name scope, and a forward pass under its policies."""
    stack = _frames.stack
    if not stack:
        check_device(bound.policies)
        _frames.ambient = jax.config.jax_default_matmul_precision  # pyright: ignore
    outer = stack[-1].precision if stack else _frames.ambient
    precision = matmul_precision(bound.module_policy.policy, _frames.ambient)
    active = current_context().policies == bound.policies
    policies = context(policies=bound.policies)
    policies = policies if is_forward and not active else contextlib.nullcontext()
    scope = _named(bound, method)
    stack.append(_Frame(bound, precision, keeps_dtype, is_forward))
    try:
        with policies, precision_scope(precision, outer), scope:
            yield
    finally:
        stack.pop()


def _named(bound: Bound, method: str) -> contextlib.AbstractContextManager[Any]:
    """Opens a name scope with the module's path below its caller, as Linen does."""
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
