"""All branches on versions of JAX and Flax, all private imports, and the compile target.

Private modules of JAX are loaded by `_load`, so that `import jaxmp` works if one of them moves.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.experimental import topologies
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxmp._core._typing import PyTree
from jaxmp.errors import CompositionError, JaxmpError

if TYPE_CHECKING:
    from flax import linen as nn
    from flax import nnx
    from jax.extend.source_info_util import SourceInfo


def _load(name: str) -> Any:
    """Imports a private module of JAX; returns None if this version does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_core, _pjit, _mesh = map(_load, ("jax._src.core", "jax._src.pjit", "jax._src.mesh"))


# ---------------------------------------------------------------------------
# Context of a trace
# ---------------------------------------------------------------------------


class Context(NamedTuple):
    """Values other than arguments on which a trace depends; part of the jit cache key."""

    # The active policies, with the path of their root; None if none are active.
    policies: Hashable = None
    # Compile target: "cpu", "gpu" or "tpu". None: the default backend.
    target: str | None = None
    # Compute capability of the target GPU, such as (9, 0). None: that of the local GPU.
    capability: tuple[int, int] | None = None


_context = jax.make_user_context(default_value=Context())


def current_context() -> Context:
    """Returns the active context."""
    return _context.value


@contextlib.contextmanager
def context(**changes: object) -> Iterator[None]:
    """Changes the context of a block, and of all that it traces."""
    with _context(_context.value._replace(**changes)):
        yield


def target() -> str:
    """Returns the type of the compile target: "cpu", "gpu" or "tpu"."""
    backend = current_context().target or jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(backend, backend)


def current_mesh() -> Any:
    """Returns the mesh of `jax.set_mesh`, else that of `with mesh:`; it may be empty."""
    if _mesh is None:
        return jax.sharding.get_mesh()
    mesh = _mesh.get_concrete_mesh()
    return _mesh.thread_resources.env.physical_mesh if mesh.empty else mesh


def described_gpus(description: str, count: int) -> list[Any]:
    """Returns devices of an NVIDIA GPU for cross-compilation; no such GPU is required.

    Args:
      description: the GPU in XLA's text form.
      count: number of devices, on one host.
    """

    def describe() -> list[Any]:
        text, shape = description, f"1x1x{count}"
        topology = topologies.get_topology_desc("", "cuda", target_config=text, topology=shape)
        return list(topology.devices)

    with unchecked_cuda():
        try:
            return describe()
        except NotImplementedError:
            # Earlier in this process, the plugin failed to start because a library was missing
            # that only execution requires.
            names = [f"jax_plugins.xla_{cuda}" for cuda in ("cuda13", "cuda12")]
            plugin = next(name for name in names if importlib.util.find_spec(name))
            importlib.import_module(plugin).initialize()
            return describe()


@contextlib.contextmanager
def unchecked_cuda() -> Iterator[None]:
    """Lets JAX's CUDA plugin start in a block without the libraries that only execution requires.

    JAX checks for cuFFT, cuPTI and cuSPARSE, which compilation does not use, and prints a traceback
    if they are missing.
    """
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def cudnn_version() -> int | None:
    """Returns the cuDNN version for which JAX lowers attention, such as 91200; None without it."""
    try:
        return _load("jax._src.cudnn.fused_attention_stablehlo").check_cudnn_version()
    except Exception:
        # RuntimeError without the CUDA plugin; any error if the installation is broken.
        return None


def compute_capability() -> tuple[int, int] | None:
    """Returns the compute capability of the local GPU, such as (9, 0); None without a GPU."""
    try:
        (gpu, *_) = jax.local_devices(backend="gpu")
        major, _, minor = gpu.compute_capability.partition(".")
        return int(major), int(minor)
    except (RuntimeError, AttributeError, ValueError):
        return None


def target_capability() -> tuple[int, int] | None:
    """Returns the compute capability of the target GPU; None if it is unknown."""
    return current_context().capability or compute_capability()


# ---------------------------------------------------------------------------
# Mapped axes
# ---------------------------------------------------------------------------


def varying_axes(tree: PyTree) -> frozenset[Any]:
    """Returns the axes of an enclosing `shard_map` over which a leaf of `tree` varies."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return frozenset().union(*(jax.typeof(array).mat.varying for array in arrays))


def vary(tree: PyTree, axes: Collection[Any]) -> PyTree:
    """Casts leaves to device-varying over mesh `axes`, so that JAX does not reduce their gradients.

    Inside `shard_map`, JAX sums the gradient of a replicated value over the mesh, in the dtype in
    which the forward pass used it. The gradient of a device-varying value is not summed. Axes of
    `vmap` and `pmap` are not mesh axes and are ignored.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes) if mesh is not None else set()

    def mark(leaf: jax.Array) -> jax.Array:
        missing = tuple(a for a in axes if a in manual and a not in varying_axes(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def bound_axes(axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns those `axes` over which an enclosing `vmap`, `pmap` or `shard_map` maps."""

    def is_bound(axis: Hashable) -> bool:
        try:
            jax.lax.axis_size(axis)
        except NameError:
            return False
        return True

    return tuple(axis for axis in axes if is_bound(axis))


def check_axes(axes: tuple[Any, ...]) -> None:
    """Checks that an enclosing function maps over each of `axes`.

    Raises:
      CompositionError: with the axis, and a call that binds it.
    """
    bound = bound_axes(axes)
    for axis in axes:
        if axis not in bound:
            raise CompositionError(
                f"axis_name={axis!r}: no enclosing function maps over an axis of that name. Map "
                f"the step, for example jax.pmap(train_step, axis_name={axis!r}). If jax.jit "
                "shards the batch, leave axis_name out, also of recipe.optimizer."
            )


def agree(flag: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Returns True if the bool scalar `flag` is True on every device along `axes`."""
    return jax.lax.pmin(vary(flag.astype("int32"), axes), axes).astype(bool)


def largest(value: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Returns the maximum of an integer scalar over all devices along `axes`."""
    return jax.lax.pmax(vary(value, axes), axes)


def smallest(value: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Returns the minimum of an integer scalar over all devices along `axes`."""
    return jax.lax.pmin(vary(value, axes), axes)


# ---------------------------------------------------------------------------
# Arrays and Flax objects
# ---------------------------------------------------------------------------


def is_on_host(leaf: object) -> bool:
    """Returns True for a value that can be read without waiting for a device or another host."""
    if not isinstance(leaf, jax.Array):
        return isinstance(leaf, (np.ndarray, np.generic))
    if isinstance(leaf, Tracer) or leaf.is_deleted():
        return False
    readable = leaf.is_fully_addressable or leaf.is_fully_replicated
    return readable and leaf.is_ready()  # pyright: ignore


def plain_array(leaf: Any) -> Any:
    """Returns the array of a Flax NNX Variable; any other leaf is returned unchanged."""
    return leaf.get_value() if hasattr(leaf, "get_value") else leaf


def can_update(variable: nnx.Variable) -> bool:
    """Returns True if a Flax NNX Variable belongs to the function that is being traced now."""
    return variable._can_update


def einsum_bias_shape(
    module: nn.Einsum, equation: str, inputs: jax.Array, kernel: jax.Array
) -> Any:
    """Returns the shapes in which a Flax Linen `Einsum` stores and adds its bias."""
    return module._get_bias_shape(equation, inputs, kernel)


def declares_pytree(cls: type, base: type) -> bool | None:
    """Returns the `pytree` option of a Flax NNX module class; None if it is that of `base`."""
    option = getattr(cls, "_pytree__is_pytree", True)
    return None if option == getattr(base, "_pytree__is_pytree", True) else option


# ---------------------------------------------------------------------------
# Jaxprs
# ---------------------------------------------------------------------------


# Code of the frame in which JAX calls a `custom_vjp` function and its two rules.
_CUSTOM_VJP_CALL = inspect.unwrap(jax.custom_vjp.__call__).__code__


def is_within(source_info: SourceInfo, function: Callable[..., Any]) -> bool:
    """Returns True for the source of an equation that a call of a Python function made."""
    traceback = source_info.traceback
    return traceback is not None and function.__code__ in traceback.raw_frames()[0]


def is_in_custom_vjp(source_info: SourceInfo) -> bool:
    """Returns True for the source of an equation that a `custom_vjp` function or its rules made.

    Differentiation replaces a `custom_vjp_call` equation by those of its rules. Their tracebacks
    still contain the call; JAX cuts each traceback off at the function that is being traced.
    """
    traceback = source_info.traceback
    return traceback is not None and _CUSTOM_VJP_CALL in traceback.raw_frames()[0]


def jaxpr_body(jaxpr: Jaxpr | ClosedJaxpr) -> tuple[Any, tuple[Any, ...]]:
    """Returns the jaxpr with equations, and its constants, of an open or a closed jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def jaxpr_like(new: ClosedJaxpr, old: Jaxpr | ClosedJaxpr) -> Any:
    """Converts a closed jaxpr to the form, open or closed, of the jaxpr that it replaces."""
    # JAX 0.12 has one class for both.
    if type(old) is type(new):
        return new
    if new.consts:
        raise ValueError("a jaxpr with constants cannot replace an open jaxpr")
    return new.jaxpr


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of constants and the number of carried operands of a `scan` equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # JAX 0.12: a tree of constants, carry and scanned operands.
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


# ---------------------------------------------------------------------------
# Tracers
# ---------------------------------------------------------------------------

# Tracers of derivatives and of `vmap`, and the attribute with the value that they wrap.
_WRAPPERS: list[tuple[type, str]] = [
    (getattr(module, name), attribute)
    for module, name, attribute in (
        (_load("jax._src.interpreters.ad"), "JVPTracer", "primal"),
        (_load("jax._src.interpreters.ad"), "LinearizeTracer", "primal"),
        (_load("jax._src.interpreters.batching"), "BatchTracer", "val"),
    )
    if hasattr(module, name)
]
_RECORDED: Any = getattr(_load("jax._src.interpreters.partial_eval"), "DynamicJaxprTracer", ())


def underlying(value: object) -> Any:
    """Returns the array or jaxpr tracer that the tracers of `grad` and `vmap` wrap."""
    while True:
        attribute = next((name for cls, name in _WRAPPERS if isinstance(value, cls)), None)
        if attribute is None or not hasattr(value, attribute):
            return value
        value = getattr(value, attribute)


def is_moved(tracer: object, sources: list[Any], names: frozenset[str]) -> bool:
    """Returns True if a tracer may result from `sources` by equations of only these names.

    Also returns True if this version of JAX does not record the equations.
    """
    known, seen = set(map(id, sources)), set[int]()
    pending: list[Any] = [tracer]
    while pending:
        value = pending.pop()
        if id(value) in known or id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, _RECORDED) or not hasattr(value, "parent"):
            return True
        equation = value.parent
        if equation is None or equation.primitive.name not in names:
            return False
        operands = equation.in_tracers
        pending += [v for v in operands if v.aval.dtype.kind not in "iub"]
    return True


# ---------------------------------------------------------------------------
# Calls of jitted functions
# ---------------------------------------------------------------------------


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


class _Wrappers(threading.local):
    """Current call of `jax.pmap` or `flax.nnx.jit` in a thread; these call `jax.jit`."""

    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None


_wrappers = _Wrappers()


@contextlib.contextmanager
def watch_jit(on_call: Callable[[JitCall], bool]) -> Iterator[None]:
    """Calls a function whenever untraced code calls or lowers a jitted function.

    Later calls of a compiled function with the same shapes take JAX's fast path and are not
    reported.

    Args:
      on_call: function that is called after the jitted function was traced and before it is
        compiled. If it returns True, the function is neither compiled nor run, and its results are
        zeros.

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
    skipped: dict[int, Any] = {}

    def infer_params(
        fun: Callable[..., Any], info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        inferred = infer(fun, info, args, kwargs)
        if _is_untraced():
            params = inferred[0].params
            jaxpr = params["jaxpr"]
            call = _wrappers.call
            _wrappers.call = None
            if call is None:
                call = pjit._cpp_pjit(fun, info), args, kwargs
            source = _source(call[0] if call[0] is not None else fun)
            name = getattr(source, "__name__", params["name"])
            if on_call(JitCall(*call, name, source, jaxpr)) and not _has_keys(jaxpr):
                # Storing the jaxpr keeps its id valid.
                skipped[id(jaxpr)] = jaxpr
        return inferred

    def run_pjit(params: Any, flat: Sequence[Any], *rest: object) -> Any:
        jaxpr = params.params["jaxpr"]
        if id(jaxpr) not in skipped or not _is_untraced():
            return run(params, flat, *rest)
        shardings = params.params["out_shardings"]
        pairs = zip(jaxpr.out_avals, shardings, strict=True)
        results = [_zeros(aval, sharding) for aval, sharding in pairs]
        tree = params.out_tree
        return jax.tree.unflatten(tree, results), results, tree, flat, jaxpr, None, None, []

    def watched_pmap(
        fun: Callable[..., Any], *args: object, **kwargs: object
    ) -> Callable[..., Any]:
        mapped = pmap(fun, *args, **kwargs)

        @functools.wraps(mapped)
        def call(*args: object, **kwargs: object) -> Any:
            with _within(mapped, args, kwargs):
                return mapped(*args, **kwargs)

        return call

    pjit._infer_params, pjit._run_python_pjit, jax.pmap = infer_params, run_pjit, watched_pmap
    try:
        yield
    finally:
        pjit._infer_params, pjit._run_python_pjit, jax.pmap = infer, run, pmap


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
        with _within(self, args, kwargs):
            return call(self, *args, **kwargs)

    return watched


@contextlib.contextmanager
def _within(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    before = _wrappers.call
    if _is_untraced():
        _wrappers.call = function, args, kwargs
    try:
        yield
    finally:
        _wrappers.call = before


def _source(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Returns the Python function inside of wrappers; None if there is none."""
    for _ in range(16):
        inner = next(
            (
                value
                for name in ("__wrapped__", "func", "fun", "f", "_fun")
                if callable(value := getattr(function, name, None))
            ),
            None,
        )
        if inner is None:
            break
        function = inner
    code = getattr(function, "__code__", None)
    # The code of a wrapper with the name of another function does not belong to the user.
    return function if code is not None and code.co_name == function.__name__ else None


def _zeros(aval: ShapedArray, sharding: object) -> jax.Array:
    zeros = jnp.zeros(aval.shape, aval.dtype)
    return jax.device_put(zeros, sharding) if isinstance(sharding, jax.sharding.Sharding) else zeros


def _has_keys(jaxpr: ClosedJaxpr) -> bool:
    return any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in jaxpr.out_avals)
