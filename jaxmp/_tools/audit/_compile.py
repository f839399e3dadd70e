"""Compilation of a traced program for a GPU or TPU, which does not have to be present."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.extend.core
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmp import _core, _programs
from jaxmp._core import _compat
from jaxmp.errors import AuditError, TargetError

if TYPE_CHECKING:
    from jaxmp._tools.audit._trace import Traced

_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: {threads}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {block_memory}
  shared_memory_per_core: {core_memory}
  core_count: {cores}
  fpus_per_core: {lanes}
  clock_rate_ghz: {clock}
  l2_cache_size: {l2}
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  ecc_enabled: true
  name: "{name}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""

# Compute capability -> threads and bytes of shared memory of a multiprocessor (CUDA C++ Programming
# Guide, table "Technical specifications per compute capability").
_MULTIPROCESSORS: dict[_core.Capability, tuple[int, int]] = {
    (7, 5): (1024, 65536),
    (8, 0): (2048, 167936),
    (8, 6): (1536, 102400),
    (8, 9): (1536, 102400),
    (9, 0): (2048, 233472),
    (10, 0): (2048, 233472),
    (10, 3): (2048, 233472),
    (12, 0): (1536, 102400),
}


def describe(gpu: _core.Target) -> str:
    """Returns the description that XLA's compiler reads."""
    assert gpu.capability and gpu.multiprocessors
    major, minor = gpu.capability
    threads, core_memory = _MULTIPROCESSORS[gpu.capability]
    # From Ampere on, the system reserves one kilobyte of the memory of each multiprocessor.
    return _DESCRIPTION.format(
        major=major,
        minor=minor,
        threads=threads,
        core_memory=core_memory,
        block_memory=core_memory - 1024 * (major >= 8),
        extension="feature_extension: ACCELERATED_FEATURES" if major >= 9 else "",
        name=gpu.kind,
        memory=gpu.memory,
        bandwidth=round(gpu.bandwidth),
        **gpu.multiprocessors._asdict(),
    )


_CALLBACKS = _core.named("debug_callback debug_print io_callback pure_callback inspect_sharding")
# Autotuning requires the GPU. Without it XLA would select a Triton kernel for every matmul and
# never cuBLAS, whose FP8 kernels it finds by pattern. The dtypes are the same as on the GPU.
_WITHOUT_GPU = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


class Compiled(NamedTuple):
    """Optimized program for a GPU or TPU."""

    text: str
    memory: Any  # CompiledMemoryStats of each device
    gpu: str
    devices: int
    # True if the chip is present; then `gpu` is its device kind.
    is_real: bool
    # Axis -> size, in the order of the devices, and the shardings of the arguments on this mesh.
    mesh: dict[str, int]
    shardings: list[Any]
    chip: _core.Target


def compile_lowered(lowered: Any, options: Any) -> tuple[str, Any]:
    """Returns the compiled program of a lowered one, as text, and its memory."""
    compiled = lowered.compile(compiler_options=options)
    return compiled.as_text() or "", compiled.memory_analysis()


@contextlib.contextmanager
def compiling_for(chip: _core.Target | None) -> Iterator[None]:
    """Traces for a chip in a block, in which its compiler may start; None: for this machine."""
    if chip is None:
        yield
        return
    with _compat.unchecked_cuda(), _core.default_target(chip):
        yield


def compile_for(
    target: _core.TargetLike,
    traced: Traced,
    compiler: Callable[[Any, Any], tuple[str, Any]] = compile_lowered,
) -> Compiled:
    """Compiles a traced program.

    On a machine with such a GPU, JAX compiles for that device. Otherwise XLA's GPU compiler uses a
    description of the GPU.

    Args:
      target: a chip, or its name.
      traced: the program. If its arrays or operations are sharded over a mesh of any devices, it is
        compiled for as many GPUs.
      compiler: is called with the lowered program and the options of the compiler.

    Raises:
      TargetError: if the program does not fit a TPU.
      AuditError: if there are several meshes, if there are host callbacks and no such GPU, or if
        XLA cannot compile the program.
      MissingDependencyError: if neither the GPU nor XLA's GPU compiler is installed.
    """
    mesh, chip = mesh_of(traced), _core.get_target(target)
    count = 1 if mesh is None else mesh.size
    real = _real_devices(chip, mesh, count)
    devices = real or _described(chip, count)
    move = _Move(mesh, devices)
    asked, donated = asked_by(traced.jaxpr)
    shapes = [move.shape(array, asked.get(n)) for n, array in enumerate(traced.arrays)]
    closed = traced.closed if mesh is None else _in_jit(traced, move)
    run = jax.extend.core.jaxpr_as_fun(closed)
    options = None if real or chip.platform == "tpu" else _WITHOUT_GPU
    platform = "cuda" if chip.platform == "gpu" else chip.platform
    try:
        with move.context():
            staged = jax.jit(run, donate_argnums=donated, keep_unused=True).trace(*shapes)
            text, memory = compiler(staged.lower(lowering_platforms=(platform,)), options)
    except jax.errors.JaxRuntimeError as error:
        need = re.search(r"required for.*?\((\S+)\) exceeds available HBM \((\S+)\)", str(error))
        if need:
            text = f"the program does not fit {chip.name!r}: it requires {need[1]} of {need[2]}."
            raise TargetError(text) from error
        reason = f"XLA cannot compile this for {chip.kind}: {_reason(str(error))}"
        raise AuditError(reason) from error
    except RuntimeError as error:
        if real or "Unknown backend" not in str(error):
            raise
        raise _no_callbacks(chip.name, traced) from error
    name = devices[0].device_kind if real else chip.kind
    sizes = {} if mesh is None else {str(axis): size for axis, size in mesh.shape.items()}
    shardings = [shape.sharding for shape in shapes]
    return Compiled(text, memory, name, count, bool(real), sizes, shardings, chip)


def _reason(text: str) -> str:
    """Returns the message of a Python error in an error of XLA, which contains its traceback."""
    raised = re.search(r"^(?:\w+\.)*\w+Error: (.+)$", text, re.MULTILINE)
    return text if raised is None else raised[1]


def _in_jit(traced: Traced, move: _Move) -> Any:
    """Returns the program with new devices, as one call of a jitted function.

    Each equation in the body of a `shard_map` contains the mesh that it was traced for. JAX lowers
    the body of a `jit` without tracing it again.
    """
    run = jax.jit(jax.extend.core.jaxpr_as_fun(traced.closed), inline=False)
    return _programs.with_parameters(jax.make_jaxpr(run)(*traced.arrays), move.parameter)


# ---------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------


def _real_devices(chip: _core.Target, mesh: Mesh | AbstractMesh | None, count: int) -> list[Any]:
    """Returns `count` local devices if they are the target; otherwise none.

    A mesh of the arguments keeps its order. Devices of other processes are not used, because all
    processes would have to compile the program together.
    """
    if jax.default_backend() != chip.platform:
        return []
    gpus = [device for device in jax.local_devices() if device.device_kind in chip.kinds]
    in_mesh = _devices_of(mesh)
    if in_mesh and set(in_mesh) <= set(gpus):
        return in_mesh
    return gpus[:count] if len(gpus) >= count else []


def _devices_of(mesh: object) -> list[Any]:
    """Returns the devices of a mesh, in its order; an abstract mesh has none."""
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else []


def check_compiler(chip: _core.Target) -> None:
    """Checks that XLA's compiler for a chip is installed.

    Raises:
      MissingDependencyError: if it is not.
    """
    modules, package, extra = ["libtpu"], "libtpu", "tpu-aot"
    if chip.platform != "tpu":
        modules = ["jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"]
        package, extra = "jax-cuda13-plugin", "aot"
    with contextlib.suppress(ModuleNotFoundError):
        if any(map(importlib.util.find_spec, modules)):
            return
    raise _core.missing_dependency(package, f"XLA's compiler for {chip.name}", extra)


def _described(chip: _core.Target, count: int) -> list[Any]:
    check_compiler(chip)
    if chip.platform == "tpu":
        return _compat.described_tpus(chip.name, count)
    try:
        return _compat.described_gpus(describe(chip), count)
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        raise AuditError(
            f"XLA's GPU compiler does not start ({error}). Install packages of the same version:"
            f'\n    pip install --upgrade "jax[cuda13]=={jax.__version__}"'
        ) from error


# ---------------------------------------------------------------------------
# From the user's mesh to the target's
# ---------------------------------------------------------------------------


def mesh_of(traced: Traced) -> Any:
    """Returns the mesh of the arguments, or the largest mesh of the program, or the current mesh.

    A mesh of one device counts, too, because that device is not the target.
    """
    meshes = dict.fromkeys(
        mesh for array in traced.arrays for mesh in _meshes_in(getattr(array, "sharding", None))
    )
    if len([mesh for mesh in meshes if mesh.size > 1]) > 1:
        raise AuditError(
            f"the arguments are sharded over {len(meshes)} meshes: {', '.join(map(str, meshes))}. "
            "Use one mesh: jax.device_put(state, NamedSharding(mesh, spec))."
        )
    if any(mesh.size > 1 for mesh in meshes):
        return max(meshes, key=lambda mesh: mesh.size)
    values = (v for equation in _programs.equations(traced.jaxpr) for v in equation.params.values())
    named = (mesh for value in values for mesh in _meshes_in(value))
    current = _meshes_in(_compat.current_mesh())
    return max((*meshes, *named, *current), key=lambda mesh: mesh.size, default=None)


def _meshes_in(value: object) -> list[Any]:
    """Returns the meshes, including abstract ones, of a sharding or a parameter."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    meshes = (v.mesh if isinstance(v, NamedSharding) else v for v in values)
    return [m for m in meshes if isinstance(m, (Mesh, AbstractMesh)) and not m.empty]


def asked_by(jaxpr: Jaxpr) -> tuple[dict[int, NamedSharding], list[int]]:
    """Returns what `jit` and `shard_map` set for arguments: shardings, and those it donates."""
    numbers: dict[Any, int] = {var: number for number, var in enumerate(jaxpr.invars)}
    shardings, donated = dict[int, NamedSharding](), list[int]()
    for reader in _programs.equations(jaxpr, inside=False):
        flags = _programs.jit_of(reader)
        is_call = reader.primitive.name in _programs.CALLS
        inside = asked_by(_programs.inners(reader)[0].jaxpr)[0] if is_call else {}
        rows = zip(reader.invars, flags.shardings, flags.donated, strict=True)
        for n, (var, sharding, is_donated) in enumerate(rows):
            number = None if _programs.is_literal(var) else numbers.get(var)
            sharding = sharding if isinstance(sharding, NamedSharding) else inside.get(n)
            if number is not None and sharding is not None:
                shardings.setdefault(number, sharding)
            if number is not None and is_donated and number not in donated:
                donated.append(number)
    return shardings, donated


class _Move:
    """Replaces the devices of shardings."""

    def __init__(self, mesh: Mesh | AbstractMesh | None, devices: list[Any]) -> None:
        self._devices = devices
        self._mesh = mesh
        self._new = None if mesh is None else self._moved(mesh)

    def _moved(self, mesh: Mesh | AbstractMesh) -> Mesh:
        new = dict(zip(_devices_of(self._mesh), self._devices, strict=False))
        if new and not new.keys() >= set(_devices_of(mesh)):
            raise AuditError(
                f"the program uses meshes of different devices: {self._mesh} and {mesh}. Use one "
                "mesh, or meshes of the same devices."
            )
        moved = [new[device] for device in _devices_of(mesh)] if new else []
        grid = np.array(moved or self._devices, dtype=object)
        sizes = tuple(mesh.shape.values())
        return Mesh(grid.reshape(sizes), mesh.axis_names, axis_types=mesh.axis_types)

    def context(self) -> Any:
        """Returns a context in which the new mesh is the current one."""
        return jax.set_mesh(self._new) if self._new is not None else contextlib.nullcontext()

    def shape(self, array: Any, asked: NamedSharding | None) -> jax.ShapeDtypeStruct:
        """Returns the shape of an array, with its or the requested sharding on the new devices."""
        own = getattr(array, "sharding", None)
        sharding = own if _meshes_in(own) else asked
        if self._new is None:
            sharding = jax.sharding.SingleDeviceSharding(self._devices[0])
        elif isinstance(sharding, NamedSharding):
            sharding = NamedSharding(self._moved(sharding.mesh), sharding.spec)
        else:
            sharding = NamedSharding(self._new, PartitionSpec())
        aval = jax.typeof(array)  # NumPy's float64 is float32 without x64
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)

    def parameter(self, value: object) -> object:
        """Returns a parameter of an equation with the new devices."""
        if isinstance(value, Mesh) and not value.empty:
            return self._moved(value)
        # Operations on explicit axes refer to an abstract mesh, whose devices are those of the
        # arguments.
        if isinstance(value, NamedSharding) and (
            isinstance(value.mesh, Mesh)
            or not (value.mesh.empty or AxisType.Explicit in value.mesh.axis_types)
        ):
            return NamedSharding(self._moved(value.mesh), value.spec)
        return value


def _no_callbacks(target: str, traced: Traced) -> AuditError:
    """Returns the error for a program with host callbacks, which XLA compiles for real devices."""
    calls = [e for e in _programs.equations(traced.jaxpr) if e.primitive.name in _CALLBACKS]
    text = ", ".join("{}:{}".format(*_programs.Lines().of((e,))) for e in calls)
    return AuditError(
        f"the program calls Python on the host ({text}), which cannot be compiled for {target} "
        "on a machine without this chip. Remove the call for this analysis, for example by\n"
        "    if verbose:\n        jax.debug.print(...)"
    )
