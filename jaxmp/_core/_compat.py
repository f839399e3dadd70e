"""Every branch on a JAX or Flax version, every private import, and the compile target."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, pjit
from jax._src import mesh as mesh_lib
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.interpreters import ad, batching, partial_eval
from jax.core import Tracer
from jax.experimental import topologies

from jaxmp.errors import CompositionError


class Context(NamedTuple):
    """What traced code may depend on besides its arguments; part of the jit cache key."""

    # The policies that are being applied, with the path they are rooted at; None outside.
    policies: Hashable = None
    # "cpu", "gpu" or "tpu": what is compiled for. None: the default backend.
    target: str | None = None
    # Compute capability of the GPU that is compiled for, such as (9, 0). None: of the one here.
    capability: tuple[int, int] | None = None


_context = jax.make_user_context(default_value=Context())


def current_context() -> Context:
    """The active context."""
    return _context.value


@contextlib.contextmanager
def context(**changes: Any) -> Iterator[None]:
    """Runs a block, and whatever it traces, under a changed context."""
    with _context(_context.value._replace(**changes)):
        yield


def target() -> str:
    """The kind of device that is compiled for: "cpu", "gpu" or "tpu"."""
    backend = current_context().target or jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(backend, backend)


def current_mesh() -> Any:
    """Returns the mesh of `jax.set_mesh`, else that of `with mesh:`; it may be empty."""
    mesh = mesh_lib.get_concrete_mesh()
    return mesh_lib.thread_resources.env.physical_mesh if mesh.empty else mesh


def described_gpus(description: str, count: int) -> list[Any]:
    """Devices of an NVIDIA GPU that need not be there: XLA compiles for them and runs nothing.

    Args:
      description: the card in XLA's text form.
      count: how many, on one host.
    """

    def describe() -> list[Any]:
        text, shape = description, f"1x1x{count}"
        topology = topologies.get_topology_desc("", "cuda", target_config=text, topology=shape)
        return list(topology.devices)

    with unchecked_cuda():
        try:
            return describe()
        except NotImplementedError:
            # The plugin refused to start, earlier in this process, over a library that only
            # running needs.
            plugins = [f"jax_plugins.xla_{cuda}" for cuda in ("cuda13", "cuda12")]
            found = [name for name in plugins if importlib.util.find_spec(name)]
            importlib.import_module(found[0]).initialize()
            return describe()


@contextlib.contextmanager
def unchecked_cuda() -> Iterator[None]:
    """A block in which JAX's CUDA plugin may start without the libraries that only running needs.

    JAX asks for cuFFT, cuPTI and cuSPARSE, which have no part in compiling, and prints a traceback
    where they are missing.
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
    """The version of cuDNN that JAX would lower attention for, such as 91200; None: none here."""
    try:
        return fused_attention_stablehlo.check_cudnn_version()
    except Exception:
        # RuntimeError without the CUDA plugin; whatever a broken installation raises.
        return None


def compute_capability() -> tuple[int, int] | None:
    """That of the GPU here, such as (9, 0); None without one, where JAX assumes the least."""
    try:
        (gpu, *_) = jax.local_devices(backend="gpu")
        major, _, minor = gpu.compute_capability.partition(".")
        return int(major), int(minor)
    except (RuntimeError, AttributeError, ValueError):
        return None


def target_capability() -> tuple[int, int] | None:
    """That of the GPU that is compiled for, which need not be here; None if it is not known."""
    return current_context().capability or compute_capability()


def varying_axes(tree: Any) -> frozenset[Any]:
    """Mesh axes of an enclosing `shard_map` over which some leaf of `tree` differs."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return frozenset().union(*(jax.typeof(array).mat.varying for array in arrays))


def vary(tree: Any, axes: Any) -> Any:
    """Marks leaves as differing over mesh `axes`, so that nothing is reduced over them unasked.

    Inside `shard_map` the gradient of a replicated value is summed over the mesh in whatever dtype
    the forward pass used it; a value marked as varying keeps its own gradient. Axes that are not
    mesh axes (those of `vmap` and `pmap`) need no mark.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(mesh.manual_axes) if mesh is not None else set()

    def mark(leaf: Any) -> Any:
        missing = tuple(a for a in axes if a in manual and a not in varying_axes(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def bound_axes(axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those of `axes` that an enclosing `vmap`, `pmap` or `shard_map` maps over."""

    def is_bound(axis: Any) -> bool:
        try:
            jax.lax.axis_size(axis)
        except NameError:
            return False
        return True

    return tuple(axis for axis in axes if is_bound(axis))


def check_axes(axes: tuple[Any, ...]) -> None:
    """Refuses to average over axes outside the function that maps over them.

    Raises:
      CompositionError: naming the axis, and the calls that bind it.
    """
    bound = bound_axes(axes)
    for axis in axes:
        if axis not in bound:
            raise CompositionError(
                f"axis_name={axis!r}: no enclosing function maps over an axis of that name. Map "
                f"the step, such as jax.pmap(train_step, axis_name={axis!r}); or, where jax.jit "
                "shards the batch, leave axis_name out, also of recipe.optimizer."
            )


def agree(flag: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Whether the bool scalar `flag` holds on every device along `axes`."""
    return jax.lax.pmin(vary(flag.astype("int32"), axes), axes).astype(bool)


def largest(value: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """The maximum of an integer scalar over all devices along `axes`."""
    return jax.lax.pmax(vary(value, axes), axes)


def smallest(value: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """The minimum of an integer scalar over all devices along `axes`."""
    return jax.lax.pmin(vary(value, axes), axes)


def is_on_host(leaf: Any) -> bool:
    """Returns True for a value that can be read without waiting for a device or another host."""
    if not isinstance(leaf, jax.Array):
        return isinstance(leaf, (np.ndarray, np.generic))
    if isinstance(leaf, Tracer) or leaf.is_deleted():
        return False
    readable = leaf.is_fully_addressable or leaf.is_fully_replicated
    return readable and leaf.is_ready()  # pyright: ignore


def plain_array(leaf: Any) -> Any:
    """The array inside a Flax NNX Variable; any other leaf as it is."""
    return leaf.get_value() if hasattr(leaf, "get_value") else leaf


def can_update(variable: Any) -> bool:
    """Whether a Flax NNX Variable belongs to the function that is being traced now."""
    return variable._can_update


# The code that runs while JAX calls a `custom_vjp` function, and its two rules.
_CUSTOM_VJP_CALL = inspect.unwrap(jax.custom_vjp.__call__).__code__


def is_within(source_info: Any, function: Any) -> bool:
    """Returns True for the source of an equation that a call of a Python function made."""
    traceback = source_info.traceback
    return traceback is not None and function.__code__ in traceback.raw_frames()[0]


def is_in_custom_vjp(source_info: Any) -> bool:
    """Returns True for the source of an equation that a `custom_vjp` function or its rules made.

    Differentiation replaces a `custom_vjp_call` equation by those of its rules. Their tracebacks
    still contain the call; JAX cuts each traceback off at the function that is being traced.
    """
    traceback = source_info.traceback
    return traceback is not None and _CUSTOM_VJP_CALL in traceback.raw_frames()[0]


def jaxpr_body(jaxpr: Any) -> tuple[Any, tuple[Any, ...]]:
    """`(jaxpr with equations, its constants)` of an open or a closed jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def jaxpr_like(new: Any, old: Any) -> Any:
    """A traced jaxpr in the form, open or closed, of the one whose place it takes."""
    # JAX 0.12 has one class for both.
    if type(old) is type(new):
        return new
    if new.consts:
        raise ValueError("a jaxpr with constants cannot take the place of an open one")
    return new.jaxpr


def scan_counts(params: Any) -> tuple[int, int]:
    """How many operands of a `scan` equation are constants, and how many are its carry."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # JAX 0.12: a tree of (constants, carry, scanned over).
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


# ---------------------------------------------------------------------------
# Tracers
# ---------------------------------------------------------------------------

# Tracers of derivatives and of `vmap`, and the attribute with the value that they stand for.
_WRAPPERS: list[tuple[type, str]] = [
    (getattr(module, name), attribute)
    for module, name, attribute in (
        (ad, "JVPTracer", "primal"),
        (ad, "LinearizeTracer", "primal"),
        (batching, "BatchTracer", "val"),
    )
    if hasattr(module, name)
]
_RECORDED: Any = getattr(partial_eval, "DynamicJaxprTracer", ())


def underlying(value: Any) -> Any:
    """The array, or the tracer of a jaxpr, in which a value is kept below `grad` and `vmap`."""
    while True:
        kind = type(value)
        attribute = next((name for cls, name in _WRAPPERS if issubclass(kind, cls)), None)
        if attribute is None or not hasattr(value, attribute):
            return value
        value = getattr(value, attribute)


def is_moved(tracer: Any, sources: list[Any], names: frozenset[str]) -> bool:
    """Whether a tracer may come from `sources` by nothing but equations of these names.

    True also where this JAX does not tell.
    """
    known, pending, seen = set(map(id, sources)), [tracer], set()
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


class JitCall(NamedTuple):
    """A call of a jitted function from code that JAX does not trace.

    function: the jitted function; for `jax.pmap` and `flax.nnx.jit` what these returned.
    args, kwargs: its arguments, static ones included.
    name: the name of the user's function.
    source: the user's function, or None if it is not known.
    jaxpr: what JAX traced, closed.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    source: Any
    jaxpr: Any


class _Wrappers(threading.local):
    """The call of `jax.pmap` or `flax.nnx.jit` that a thread is in; these call `jax.jit`."""

    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None


_wrappers = _Wrappers()


@contextlib.contextmanager
def watch_jit(on_call: Callable[[JitCall], bool]) -> Iterator[None]:
    """Calls a function each time that untraced code calls or lowers a jitted function.

    JAX's fast path skips calls of compiled functions with the shapes of an earlier call.

    Args:
      on_call: is called when the function was traced, before it is compiled. If it returns True,
        the function is neither compiled nor run, and its results are zeros.
    """
    infer, run, pmap = pjit._infer_params, pjit._run_python_pjit, jax.pmap
    skipped: dict[int, Any] = {}

    def infer_params(fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
        inferred = infer(fun, info, args, kwargs)
        if core.trace_state_clean():
            params = inferred[0].params
            jaxpr = params["jaxpr"]
            call = _wrappers.call
            _wrappers.call = None
            if call is None:
                call = pjit._cpp_pjit(fun, info), args, kwargs
            source = _source(call[0] if call[0] is not None else fun)
            name = getattr(source, "__name__", params["name"])
            if on_call(JitCall(*call, name, source, jaxpr)) and not _has_keys(jaxpr):
                # The jaxpr is stored beside its id, so that the id stays its own.
                skipped[id(jaxpr)] = jaxpr
        return inferred

    def run_pjit(params: Any, flat: Any, *rest: Any) -> Any:
        jaxpr = params.params["jaxpr"]
        if id(jaxpr) not in skipped or not core.trace_state_clean():
            return run(params, flat, *rest)
        shardings = params.params["out_shardings"]
        pairs = zip(jaxpr.out_avals, shardings, strict=True)
        results = [_zeros(aval, sharding) for aval, sharding in pairs]
        tree = params.out_tree
        return jax.tree.unflatten(tree, results), results, tree, flat, jaxpr, None, None, []

    def watched_pmap(fun: Any, *args: Any, **kwargs: Any) -> Any:
        mapped = pmap(fun, *args, **kwargs)

        @functools.wraps(mapped)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _within(mapped, args, kwargs):
                return mapped(*args, **kwargs)

        return call

    pjit._infer_params, pjit._run_python_pjit, jax.pmap = infer_params, run_pjit, watched_pmap
    try:
        yield
    finally:
        pjit._infer_params, pjit._run_python_pjit, jax.pmap = infer, run, pmap


def watch_nnx() -> None:
    """Makes `watch_jit` report the arguments of `flax.nnx.jit` as the caller passes them."""
    module = importlib.import_module("flax.nnx.transforms.compilation")
    for name in ("JitWrapped", "SimpleJitWrapped"):
        cls = getattr(module, name, None)
        if cls is not None:
            cls.__call__ = _watched(cls.__call__)


def _watched(call: Any) -> Any:
    @functools.wraps(call)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _within(self, args, kwargs):
            return call(self, *args, **kwargs)

    return watched


@contextlib.contextmanager
def _within(function: Any, args: Any, kwargs: Any) -> Iterator[None]:
    before = _wrappers.call
    if core.trace_state_clean():
        _wrappers.call = function, args, kwargs
    try:
        yield
    finally:
        _wrappers.call = before


def _source(function: Any) -> Any:
    """The Python function inside of wrappers; None if there is none with code of its own."""
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
    # The code of a wrapper that took over the name of another function is no user's.
    return function if code is not None and code.co_name == function.__name__ else None


def _zeros(aval: Any, sharding: Any) -> Any:
    zeros = jnp.zeros(aval.shape, aval.dtype)
    return jax.device_put(zeros, sharding) if isinstance(sharding, jax.sharding.Sharding) else zeros


def _has_keys(jaxpr: Any) -> bool:
    return any(jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) for aval in jaxpr.out_avals)
