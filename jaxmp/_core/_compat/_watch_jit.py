"""Observes the calls of jitted functions."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.util
import inspect
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from jaxmp._core._compat import ClosedJaxpr, assigned, load_private
from jaxmp.errors import JaxmpError

_core, _pjit, _traceback = map(
    load_private, ("jax._src.core", "jax._src.pjit", "jax._src.traceback_util")
)
if _traceback is not None:
    # JAX leaves the frames of this file out of tracebacks, as it does its own.
    _traceback.register_exclusion(__file__)


def _is_untraced() -> bool:
    """Returns True outside of JAX's transformations."""
    return _core is None or _core.trace_state_clean()


class JitCall(NamedTuple):
    """Call of a jitted function from code that JAX does not trace.

    function: the jitted function, or the result of `jax.pmap` or `flax.nnx.jit`.
    args, kwargs: its arguments, including static ones.
    name: the name of the user's function.
    source: the user's function; None if it is unknown.
    jaxpr: the closed jaxpr.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    source: Any
    jaxpr: Any


# Current call of `jax.pmap` or `flax.nnx.jit`, which call `jax.jit`: function and arguments.
_wrapper = contextvars.ContextVar[Any]("wrapper", default=None)
# True in `jax.eval_shape`, which compiles no function.
_abstract = contextvars.ContextVar("abstract", default=False)


@contextlib.contextmanager
def watch_jit(on_call: Callable[[JitCall], bool], *, run_all: bool = False) -> Iterator[None]:
    """Calls a function whenever untraced code calls or lowers a jitted function.

    Later calls of a compiled function with the same shapes take JAX's fast path and are not
    reported.

    Args:
      on_call: function that is called after the jitted function was traced and before it is
        compiled. If it returns True, the function is neither compiled nor run, and its results are
        zeros; all its calls are reported.
      run_all: run these functions as well.

    Raises:
      JaxmpError: if this version of JAX has no hooks for calls of jitted functions.
    """
    pjit = _pjit
    if pjit is None or not hasattr(pjit, "_infer_params"):
        raise JaxmpError(
            f"jaxmp cannot observe the calls of jitted functions of JAX {jax.__version__}. Audit "
            "the training step itself: jaxmp.audit(train_step, state, batch)."
        )
    infer, run, pmap = pjit._infer_params, pjit._run_python_pjit, jax.pmap
    eval_shape = jax.eval_shape
    skipped: dict[int, Any] = {}

    def infer_params(
        fun: Callable[..., Any], info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        inferred = infer(fun, info, args, kwargs)
        if _is_untraced() and not _abstract.get():
            params = inferred[0].params
            jaxpr = params["jaxpr"]
            call: tuple[Any, Any, Any] = _wrapper.get() or (pjit._cpp_pjit(fun, info), args, kwargs)
            _wrapper.set(None)
            outer = fun if call[0] is None else call[0]
            name, source = getattr(outer, "__name__", params["name"]), python_function(outer)
            if source is None:
                inner = filter(None, map(python_function, _contained(outer, args)))
                source = next((f for f in inner if title_of(f) == name), None)
            name = name if source is None else title_of(source)
            is_chosen = on_call(JitCall(*call, name, source, jaxpr))
            if is_chosen and (run_all or not _has_keys(jaxpr)):
                # Storing the jaxpr keeps its id valid.
                skipped[id(jaxpr)] = jaxpr
        return inferred

    def run_pjit(params: Any, flat: Sequence[Any], *rest: object) -> Any:
        jaxpr = params.params["jaxpr"]
        if id(jaxpr) not in skipped or not _is_untraced():
            return run(params, flat, *rest)
        if run_all:
            # The last parts are what JAX's fast path requires.
            return (*run(params, flat, *rest)[:5], None, None, [])
        shardings = params.params["out_shardings"]
        pairs = zip(jaxpr.out_avals, shardings, strict=True)
        results = [_zeros(aval, sharding) for aval, sharding in pairs]
        tree = params.out_tree
        return jax.tree.unflatten(tree, results), results, tree, flat, jaxpr, None, None, []

    def watched_pmap(
        fun: Callable[..., Any], *args: object, **kwargs: object
    ) -> Callable[..., Any]:
        mapped = pmap(fun, *args, **kwargs)
        call = functools.partial(_watched(operator.call), mapped)
        return functools.update_wrapper(call, mapped)

    @functools.wraps(eval_shape)
    def abstract(*args: Any, **kwargs: Any) -> Any:
        with assigned(_abstract, True):
            return eval_shape(*args, **kwargs)

    pjit._infer_params, pjit._run_python_pjit, jax.pmap = infer_params, run_pjit, watched_pmap
    jax.eval_shape = abstract
    try:
        yield
    finally:
        pjit._infer_params, pjit._run_python_pjit, jax.pmap = infer, run, pmap
        jax.eval_shape = eval_shape


def watch_nnx() -> None:
    """Makes `watch_jit` report the arguments of `flax.nnx.jit` in the form that callers pass."""
    module = importlib.import_module("flax.nnx.transforms.compilation")
    for name in ("JitWrapped", "SimpleJitWrapped"):
        cls = getattr(module, name, None)
        if cls is not None:
            cls.__call__ = _watched(cls.__call__)


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def watched(self: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        with assigned(_wrapper, (self, args, kwargs) if _is_untraced() else _wrapper.get()):
            return call(self, *args, **kwargs)

    return watched


def python_function(function: Any) -> Callable[..., Any] | None:
    """Returns the Python function inside of wrappers; None if there is none.

    Of an object that can be called, it is the method `__call__` of its class.
    """
    function = _inside(function)
    if not hasattr(function, "__code__") and callable(function):
        function = _inside(type(function).__call__)
    code = getattr(function, "__code__", None)
    # The code of a wrapper with the name of another function does not belong to the user.
    return function if code is not None and code.co_name == function.__name__ else None


def title_of(function: Any) -> str:
    """Returns the name of the user's function inside of wrappers, or the class of an object."""
    source = python_function(function)
    if source is None:
        return getattr(function, "__name__", type(function).__name__)
    *_, owner, name = ("", *source.__qualname__.split("."))
    return owner if name == "__call__" else name


def definition_of(function: Any) -> tuple[str, int]:
    """Returns (file, line) of a function's definition; ("", 0) if it is not known."""
    code = getattr(python_function(function), "__code__", None)
    return ("", 0) if code is None else (code.co_filename, code.co_firstlineno)


def _inside(function: Any) -> Any:
    names = "__wrapped__", "__func__", "func", "fun", "f", "_fun"
    for _ in range(16):
        inner = next(filter(callable, (getattr(function, name, None) for name in names)), None)
        if inner is None:
            break
        function = inner
    return function


def _contained(function: Any, args: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the functions in the arguments and the closure of a function.

    Equinox compiles a wrapper with the name of the user's function, which is one of them, or whose
    class is that of a tree.
    """
    cells = getattr(_inside(function), "__closure__", None) or ()
    contents = [cell.cell_contents for cell in cells if cell != types.CellType()]
    for leaf in jax.tree.leaves([args, contents], is_leaf=callable):
        yield leaf
        if isinstance(leaf, jax.tree_util.PyTreeDef) and (node := leaf.node_data()):
            yield inspect.getattr_static(node[0], "__call__", None)
            yield from jax.tree.leaves(node[1:])


def _zeros(aval: ShapedArray, sharding: object) -> jax.Array:
    zeros = jnp.zeros(aval.shape, aval.dtype)
    return jax.device_put(zeros, sharding) if isinstance(sharding, jax.sharding.Sharding) else zeros


def _has_keys(jaxpr: ClosedJaxpr) -> bool:
    arrays = (aval for aval in jaxpr.out_avals if isinstance(aval, ShapedArray))
    return any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in arrays)
