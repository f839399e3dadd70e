"""All branches on versions of JAX and Flax, all private imports, and the compile target."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import importlib
import importlib.util
import inspect
import logging
import math
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import jax
from jax import lax
from jax.core import Tracer
from jax.experimental import topologies
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import batching, mlir
from jax.sharding import Mesh, PartitionSpec, Sharding

from jaxmp._core._typing import PyTree
from jaxmp.errors import CompositionError, RecipeWarning

if TYPE_CHECKING:
    from flax import nnx
    from jax.extend import source_info_util
    from jax.extend.core import (
        ClosedJaxpr,
        Jaxpr,
        JaxprEqn,
        Literal,
        Primitive,
        Var,
        jaxpr_as_fun,
    )

T = TypeVar("T")

# ---------------------------------------------------------------------------
# Private modules
# ---------------------------------------------------------------------------


def load_private(name: str) -> Any:
    """Imports a private module of JAX; returns None if this version does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def call_at_exit(fn: Callable[[], object]) -> None:
    """Calls a function when the program ends, while executors still accept work.

    Functions of `atexit` are called after executors have stopped.
    """
    getattr(threading, "_register_atexit", atexit.register)(fn)


# ---------------------------------------------------------------------------
# Jaxprs and sources of equations
# ---------------------------------------------------------------------------


if not TYPE_CHECKING:
    # `jax.extend` loads Pallas.
    source_info_util, _core = (
        load_private(f"jax._src.{name}") or importlib.import_module(f"jax.extend.{name}")
        for name in ("source_info_util", "core")
    )
    Jaxpr, JaxprEqn, Literal, Var = _core.Jaxpr, _core.JaxprEqn, _core.Literal, _core.Var
    Primitive, jaxpr_as_fun = _core.Primitive, _core.jaxpr_as_fun
    # JAX 0.12 has one class for both.
    ClosedJaxpr = getattr(_core, "ClosedJaxpr", Jaxpr)

# An open or a closed jaxpr.
AnyJaxpr: TypeAlias = "Jaxpr | ClosedJaxpr"


# The function in which JAX calls a `custom_vjp` function and its two rules.
_CUSTOM_VJP_CALL = inspect.unwrap(jax.custom_vjp.__call__)


def is_within(source_info: source_info_util.SourceInfo, function: Callable[..., Any]) -> bool:
    """Returns True for the source of an equation that a call of a Python function made."""
    traceback = source_info.traceback
    return traceback is not None and function.__code__ in traceback.raw_frames()[0]


def is_in_custom_vjp(source_info: source_info_util.SourceInfo) -> bool:
    """Returns True for the source of an equation that a `custom_vjp` function or its rules made.

    Differentiation replaces a `custom_vjp_call` equation by those of its rules. Their tracebacks
    still contain the call; JAX cuts each traceback off at the function that is being traced.
    """
    return is_within(source_info, _CUSTOM_VJP_CALL)


def jaxpr_body(jaxpr: AnyJaxpr) -> tuple[Any, tuple[Any, ...]]:
    """Returns the jaxpr with equations, and its constants, of an open or a closed jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ()))


def parameters_of(equation: JaxprEqn) -> Iterable[Any]:
    """Returns the values of the parameters; those of its object for `lax.custom_root`."""
    operation = equation.params.get("_prim")
    return (equation.params if operation is None else operation.params).values()


def jaxpr_like(new: ClosedJaxpr, old: AnyJaxpr) -> Any:
    """Converts a closed jaxpr to the form, open or closed, of the jaxpr that it replaces."""
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
# Private attributes of objects
# ---------------------------------------------------------------------------


def plain_array(leaf: Any) -> Any:
    """Returns the array of a Flax NNX Variable; any other leaf is returned unchanged."""
    return leaf.get_value() if hasattr(type(leaf), "get_value") else leaf


def can_update(variable: nnx.Variable) -> bool:
    """Returns True if a Flax NNX Variable belongs to the function that is being traced now."""
    return variable._can_update


def declares_pytree(cls: type, base: type) -> bool | None:
    """Returns the `pytree` option of a Flax NNX module class; None if it is that of `base`."""
    option = getattr(cls, "_pytree__is_pytree", True)
    return None if option == getattr(base, "_pytree__is_pytree", True) else option


def trace_of(leaf: Any) -> Any:
    """Returns the trace that a value belongs to; None for other values."""
    return leaf._trace if isinstance(leaf, Tracer) else None


# ---------------------------------------------------------------------------
# Mapped axes, reductions over them, and layouts
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


def partition_spec(sharding: Sharding, mesh: Mesh, ndim: int) -> PartitionSpec | None:
    """Returns the partition spec of a sharding that XLA chose, over the axes of a mesh.

    Args:
      sharding: as `custom_partitioning` passes it with `decode_shardings=False`.
      mesh: the mesh of the program.
      ndim: dimensions of the array.

    Returns:
      A spec with `ndim` entries; None if a dimension is split over a part of a mesh axis.
    """
    parse: Any = load_private("jax._src.sharding_impls").parse_flatten_op_sharding
    flat = sharding._to_xla_hlo_sharding(ndim)
    try:
        spec = parse(flat, mesh)[0]
    except ValueError:
        return None
    return PartitionSpec(*spec, *(None,) * (ndim - len(spec)))


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
    return smallest(flag.astype("int32"), axes).astype(bool) if axes else flag


def largest(value: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Returns the maximum of an integer scalar over all devices along `axes`."""
    return jax.lax.pmax(vary(value, axes), axes) if axes else value


def smallest(value: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Returns the minimum of an integer scalar over all devices along `axes`."""
    return jax.lax.pmin(vary(value, axes), axes) if axes else value


def is_in_unchecked_shard_map() -> bool:
    """Returns True while tracing inside `shard_map(..., check_vma=False)`."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return bool(manual) and not varying_axes(lax.axis_index(manual[0]))


def row_major(x: jax.Array) -> jax.Array:
    """Requires the row-major layout for an array in the compiled program.

    On JAX 0.10, an array on several devices is returned as it is, because XLA would gather it
    before the constraint, and divide it again.
    """
    mesh = getattr(jax.typeof(x).sharding, "mesh", None)
    if jax.__version_info__ < (0, 11) and mesh is not None and mesh.size > 1:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


# ---------------------------------------------------------------------------
# Policies and compile target on which a trace depends, and the mesh
# ---------------------------------------------------------------------------


_mesh = load_private("jax._src.mesh")


class Context(NamedTuple):
    """Values other than arguments on which a trace depends; part of the jit cache key."""

    # The active policies, with the path of their root; None if none are active.
    policies: Hashable = None
    # Compile target: "cpu", "gpu" or "tpu". None: the default backend.
    target: str | None = None
    # Compute capability of the target GPU, such as (9, 0). None: that of the local GPU.
    capability: tuple[int, int] | None = None
    # The target chip, a `Target`; None if only its type is known.
    chip: Any = None
    # Labels of the values of the running model that are not rounded; None outside of a model.
    decisions: Hashable = None
    # Number of a version of the user's functions, so that each version is traced.
    version: int = 0


_context = jax.make_user_context(default_value=Context())


def current_context() -> Context:
    """Returns the active context."""
    return _context.value


def context(**changes: object) -> contextlib.AbstractContextManager[None]:
    """Changes the context of a block, and of all that it traces."""
    return _context(_context.value._replace(**changes))


def target() -> str:
    """Returns the type of the compile target: "cpu", "gpu" or "tpu"."""
    return platform_of(current_context().target or jax.default_backend())


def device_failure() -> str:
    """Returns the reason why JAX cannot use any device; "" if it can."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        # JAX asserts without a message that one of the platforms starts.
        platforms = os.environ.get("JAX_PLATFORMS")
        return str(error).partition("\n")[0] or f"JAX_PLATFORMS={platforms!r} does not start"
    return ""


def hide_plugin_errors() -> None:
    """Hides JAX's message that a plugin finds no CUDA, which the extra `aot` does not need.

    With NVIDIA's driver, the message is shown.
    """
    if shutil.which("nvidia-smi") is None:
        logging.getLogger("jax._src.xla_bridge").addFilter(_is_no_plugin_error)


def _is_no_plugin_error(record: logging.LogRecord) -> bool:
    return "plugin configuration error" not in record.getMessage()


def platform_of(backend: str) -> str:
    """Returns the type of the devices of a backend: "cpu", "gpu" or "tpu"."""
    return {"cuda": "gpu"}.get(backend, backend)


def current_mesh() -> Any:
    """Returns the mesh of `jax.set_mesh`, else that of `with mesh:`; it may be empty."""
    if _mesh is None:
        return jax.sharding.get_mesh()
    mesh = _mesh.get_concrete_mesh()
    return _mesh.thread_resources.env.physical_mesh if mesh.empty else mesh


def cudnn_version() -> int | None:
    """Returns the cuDNN version for which JAX lowers attention, such as 91200; None without it."""
    try:
        return load_private("jax._src.cudnn.fused_attention_stablehlo").check_cudnn_version()
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


def mark_target(x: jax.Array) -> jax.Array:
    """Returns `x`, and lets JAX warn when it lowers the program for another platform than assumed.

    Without a stated target, a trace assumes the platform of the default backend. The platform of
    `lower(lowering_platforms=...)` and `jax.export` is known only after the trace.
    """
    return x if current_context().target else _mark.bind(x, platform=target())


# The identity. Differentiation is not defined, because FP8 dots define theirs.
_mark = Primitive("jaxmp_mark_target")
_mark.def_impl(lambda x, *, platform: x)
_mark.def_abstract_eval(lambda x, *, platform: x)
batching.defvectorized(_mark)


def _lower(context: Any, x: Any, *, platform: str) -> list[Any]:
    others = [p for p in context.module_context.platforms or () if platform_of(p) != platform]
    if others:
        name = {"gpu": "h200", "tpu": "v6e"}.get(platform_of(others[0]), "cpu")
        warnings.warn(
            f"A program with FP8 matmuls was traced for a {platform.upper()}, the default backend, "
            f"and is lowered for {others[0]!r}: the results of its matmuls are wider, and it moves "
            "more bytes, than if it was traced for its chip. Name the chip around the trace:\n"
            f"    with jaxmp.default_target({name!r}):\n"
            f"        lowered = jax.jit(f).trace(x).lower(lowering_platforms=({others[0]!r},))",
            RecipeWarning,
            stacklevel=2,
        )
    return [x]


mlir.register_lowering(_mark, _lower)


# ---------------------------------------------------------------------------
# Devices that this machine does not have
# ---------------------------------------------------------------------------


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


def described_tpus(name: str, count: int) -> list[Any]:
    """Returns devices of Google TPUs for cross-compilation; no TPU is required, but libtpu.

    Args:
      name: "v5e", "v5p", "v6e" or "tpu7x".
      count: number of devices.
    """
    # A chip of a TPU7x is two devices.
    chips = -(-count // 2) if name == "tpu7x" else count
    sizes = [1, 1] if name in ("v5e", "v6e") else [1, 1, 1]
    while math.prod(sizes) < chips:
        sizes = sorted([*sizes[1:], sizes[0] * 2])
    # libtpu otherwise asks a server for the TPU of this machine, and refuses a second process.
    with environment(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1"):
        text = f"{name}:{'x'.join(map(str, sizes))}"
        return list(topologies.get_topology_desc(text, platform="tpu").devices)[:count]


def unchecked_cuda() -> contextlib.AbstractContextManager[None]:
    """Lets JAX's CUDA plugin start in a block without the libraries that only execution requires.

    JAX checks for cuFFT, cuPTI and cuSPARSE, which compilation does not use, and prints a traceback
    if they are missing.
    """
    return environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")


@contextlib.contextmanager
def assigned(variable: contextvars.ContextVar[Any], value: T) -> Iterator[T]:
    """Sets a context variable in a block; Python 3.14 has `with variable.set(value)`."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Sets environment variables in a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text
