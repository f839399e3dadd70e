"""Calls of methods of NNX modules under a policy."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

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
    is_complex,
    keeps_dtype,
)
from jaxmp._flax._method_call import MethodCall
from jaxmp._flax._nnx_cast_on_read import ATTRIBUTE, Bound, bound_of, is_member
from jaxmp._flax._share import Suspect, are_many, fp8_decisions, warn_if_low, warn_of_model
from jaxmp._policies._device import check_device, check_gradient, matmul_precision, precision_scope
from jaxmp._recipe_files._load import PolicyMap
from jaxmp.errors import RecipeWarning


class _Frames(threading.local):
    """Calls of wrapped modules that a thread is running, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[MethodCall] = []
        # Modules of the running model that appear to ignore the dtype of their policy.
        self.suspects: dict[str, Suspect] = {}
        # The precision of FP32 matmuls outside of all these calls.
        self.ambient: str | None = None


_frames = _Frames()
_WITHIN = contextlib.nullcontext(())

# Modules, and the parts into which they are split, are pytrees that must not be cast.
_OPAQUE = (nnx.Pytree, nnx.Variable, nnx.State, nnx.GraphDef)


class _NnxCall(MethodCall):
    @staticmethod
    def is_leaf(value: object) -> bool:
        return isinstance(value, _OPAQUE)

    @staticmethod
    def own_params(module: Any) -> list[Any]:
        own = (value for value in vars(module).values() if isinstance(value, nnx.Param))
        return [value.get_raw_value() for value in own]


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
    caller = _frames.stack[-1] if _frames.stack else None
    caller = caller if caller and bound_of(caller.module) == bound else None
    if caller is None:
        _check_containers(bound, module)
    is_forward = caller is None or not caller.is_forward
    is_forward = is_forward and bound.module_policy.is_forward(name)
    as_author = is_forward and _keeps_dtype(module, bound, (args, kwargs))
    under_policy = _NnxCall(module, bound.module_policy, name, caller, as_author, _frames.suspects)
    call = _replaced(under_policy, bound, call)
    is_whole = not _frames.stack and name == "__call__"
    fp8 = fp8_decisions(bound.cls, bound.policies, bound.path) if is_whole else _WITHIN
    with fp8 as rows:
        out = under_policy.run(call, args, kwargs, _entered(under_policy, bound))
    if rows:
        again = _call_again, (module, name, args, kwargs), {}
        warn_of_model((bound.cls, bound.policies), rows, 3, again)
    if _frames.suspects and not _frames.stack:
        _report_suspects(bound, module, name, args, kwargs)
    return out


def _replaced(
    under_policy: MethodCall, bound: Bound, call: Callable[..., PyTree]
) -> Callable[..., PyTree]:
    """Returns the function that replaces `call`, a method of a Flax layer."""
    module, name = under_policy.module, under_policy.method
    wide = bound.module_policy.resolved.wide_output
    if under_policy.keeps_dtype:
        return functools.partial(_call_as_author, bound, module, name)
    if not under_policy.at_boundary:
        return call
    if name == "__call__" and _looks_up_float32(bound, module):
        return functools.partial(_lookup, bound, module)
    if wide is not None and name == "attend" and _is_flax_embedding(bound, name):
        return _wide_attend(module, wide)
    return call


# Models whose share of FLOPs in 16 bits was counted.
_counted: set[tuple[type, PolicyMap]] = set()


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
        if type(value) in (list, dict):
            warn_of_unwrapped(bound, name, value, stacklevel=5)


def warn_of_unwrapped(bound: Bound, name: str, value: PyTree, stacklevel: int = 3) -> None:
    """Warns about modules without policies in an attribute of a wrapped model."""
    for leaf in jax.tree.leaves(value, is_leaf=is_member):
        if isinstance(leaf, nnx.Module) and bound_of(leaf) is None:
            path = "/".join((*bound.path, name))
            warnings.warn(
                f"The {type(leaf).__name__} in {path!r} was added after the model was wrapped, so "
                "it computes in its author's dtypes. Wrap the model again: model = "
                "recipe.wrap(model).",
                RecipeWarning,
                stacklevel=stacklevel,
            )
            return


def _keeps_dtype(module: nnx.Module, bound: Bound, operands: PyTree) -> bool:
    """Returns True if a Flax layer, or an enclosing one, computes in its author's dtype."""
    if _frames.stack and _frames.stack[-1].keeps_dtype:
        return True
    name = bound.module_policy.traits.dtype
    if not name:
        return False
    author = dict(bound.author).get(name, vars(module).get(name))
    values = _NnxCall.own_params(module), operands
    return is_complex(author) or keeps_dtype(values, _NnxCall.is_leaf)


def _call_as_author(
    bound: Bound, module: nnx.Module, name: str, *args: PyTree, **kwargs: PyTree
) -> PyTree:
    """Calls a method of a Flax layer as if the layer had no policy."""
    plain = object.__new__(bound.cls)
    vars(plain).update({**vars(module), **dict(bound.author)})
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
def _entered(frame: MethodCall, bound: Bound) -> Iterator[None]:
    """Runs one method under its precision and name scope, and a forward pass under its policies."""
    stack = _frames.stack
    if not stack:
        check_device(bound.policies)
        check_gradient(bound.policies, lambda: nnx.state(frame.module, nnx.Param))
        _frames.ambient = jax.config.jax_default_matmul_precision  # pyright: ignore
    precision = lambda frame: matmul_precision(frame.module_policy.policy, _frames.ambient)
    outer = precision(stack[-1]) if stack else _frames.ambient
    active = current_context().policies == bound.policies
    policies = context(policies=bound.policies)
    policies = policies if frame.is_forward and not active else contextlib.nullcontext()
    scope = _named(bound, frame.method)
    stack.append(frame)
    try:
        with policies, precision_scope(precision(frame), outer), scope:
            yield
    finally:
        stack.pop()


def _named(bound: Bound, method: str) -> contextlib.AbstractContextManager[Any]:
    """Opens a name scope with the module's path below its caller, as Linen does."""
    caller = bound_of(_frames.stack[-1].module) if _frames.stack else None
    names = bound.path or (bound.cls.__name__,)
    if caller is not None and caller.policies == bound.policies:
        if caller.path == bound.path:
            return contextlib.nullcontext()
        depth = len(caller.path)
        if bound.path[:depth] == caller.path:
            names = bound.path[depth:]
    suffix = "" if method == "__call__" else f".{method}"
    return jax.named_scope("/".join(names) + suffix)
