"""Compiling a traced program for a GPU, which may be one that is not there."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from typing import Any, NamedTuple

import jax
import jax.extend.core
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxmp._audit._gpus import GPUS
from jaxmp._audit._trace import Traced
from jaxmp._core._compat import current_mesh, described_gpus
from jaxmp._core._jaxprs import equations, is_literal, with_parameters
from jaxmp._core._locations import Lines
from jaxmp.errors import AuditError, did_you_mean, missing_dependency

_CALLBACKS = frozenset(
    ("debug_callback", "debug_print", "io_callback", "pure_callback", "inspect_sharding")
)
# Autotuning needs the card. Without it XLA would pick a Triton kernel for every matmul and never
# try cuBLAS, whose FP8 kernels it finds by pattern; operand dtypes are what the card would run.
_WITHOUT_THE_CARD = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


class Compiled(NamedTuple):
    """An optimized program."""

    text: str
    memory: Any  # CompiledMemoryStats of each device
    gpu: str
    devices: int
    # Whether the card was there; then `gpu` is its own name for itself.
    is_real: bool


def check_target(target: Any) -> None:
    """Refuses what is no card, before anything is traced.

    Raises:
      AuditError: naming the cards.
    """
    if not isinstance(target, str) or target not in GPUS:
        given = str(target).lower()
        known = ", ".join(map(repr, GPUS))
        if given in GPUS:
            raise AuditError(f"target={target!r}: names of cards are in lower case: {given!r}.")
        raise AuditError(
            f"target={target!r} is no card that jaxmp can compile for.{did_you_mean(given, GPUS)} "
            f"Allowed: {known}; for example audit(train_step, state, batch, target='h200')."
        )


def compile_for(target: str, traced: Traced) -> Compiled:
    """Compiles a traced program.

    On a machine with such a card the real compiler does it; elsewhere XLA's GPU compiler
    does, from a description of the card.

    Args:
      target: a name of `GPUS`.
      traced: its arrays may be sharded over a mesh of any devices, and so may what is inside; that
        many cards are meant.

    Raises:
      AuditError: if there are several meshes, or host callbacks without the card; if XLA cannot
        compile.
      MissingDependencyError: if there is neither the card nor XLA's GPU compiler.
    """
    mesh = _mesh_of(traced)
    count = 1 if mesh is None else mesh.size
    real = _real_gpus(target, mesh, count)
    devices = real or _described(target, count)
    move = _Move(mesh, devices)
    asked = _asked_shardings(traced.jaxpr)
    shapes = [move.shape(array, asked.get(n)) for n, array in enumerate(traced.arrays)]
    closed = traced.closed if mesh is None else with_parameters(_in_jit(traced), move.parameter)
    run = jax.extend.core.jaxpr_as_fun(closed)
    donated = _donated(traced.jaxpr)
    options = None if real else _WITHOUT_THE_CARD
    try:
        with move.context():
            staged = jax.jit(run, donate_argnums=donated, keep_unused=True).trace(*shapes)
            compiled = staged.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise AuditError(f"XLA cannot compile this for {GPUS[target].name}: {error}") from error
    except RuntimeError as error:
        if real or "Unknown backend" not in str(error):
            raise
        raise _no_callbacks(target, traced) from error
    name = devices[0].device_kind if real else GPUS[target].name
    return Compiled(compiled.as_text() or "", compiled.memory_analysis(), name, count, bool(real))


def _in_jit(traced: Traced) -> Any:
    """Returns the program as one call of a jitted function.

    The body of a `shard_map` records the mesh that it was traced for, in each equation. JAX lowers
    what is inside `jit` as it is recorded, whereas it would trace the body again for the new mesh.
    """
    run = jax.jit(jax.extend.core.jaxpr_as_fun(traced.closed), inline=False)
    return jax.make_jaxpr(run)(*traced.arrays)


# ---------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------


def _real_gpus(target: str, mesh: Any, count: int) -> list[Any]:
    """That many of this process's devices, if they are the card; else none.

    The arguments' own mesh is taken in its own order. Devices of other processes are none of ours:
    a program for them is compiled by all processes together.
    """
    if jax.default_backend() != "gpu":
        return []
    found = [device for device in jax.local_devices() if _is_card(target, device.device_kind)]
    own = _devices_of(mesh)
    if own and set(own) <= set(found):
        return own
    return found[:count] if len(found) >= count else []


def _is_card(target: str, check: str) -> bool:
    """Whether a device calls itself that card, as in "NVIDIA A100-SXM4-80GB", whole.

    A slice of one, "NVIDIA A100-SXM4-80GB MIG 1g.10gb", has fewer cores and less memory.
    """
    words = re.split(r"[^a-z0-9]+", check.lower())
    return target in words and "mig" not in words


def _devices_of(mesh: Any) -> list[Any]:
    """The devices of a mesh, in its order; none of an abstract one."""
    return list(mesh.devices.flat) if isinstance(mesh, Mesh) else []


def _described(target: str, count: int) -> list[Any]:
    try:
        found = any(
            importlib.util.find_spec(f"jax_plugins.xla_{cuda}") for cuda in ("cuda13", "cuda12")
        )
    except ModuleNotFoundError:
        found = False
    if not found:
        raise missing_dependency("jax-cuda13-plugin", f"XLA's compiler for {target}", "aot")
    try:
        return described_gpus(GPUS[target].description, count)
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        raise AuditError(
            f"XLA's GPU compiler does not start ({error}). Install the packages of one version:\n"
            '    pip install --upgrade "jaxmp[aot]"'
        ) from error


# ---------------------------------------------------------------------------
# From the user's mesh to the target's
# ---------------------------------------------------------------------------


def _mesh_of(traced: Traced) -> Any:
    """Returns the mesh of the arguments, or else the largest that the program names.

    Without either, it is the mesh that the caller has made the current one. A mesh of one device
    counts, too: the program names that device, which is not the target.
    """
    meshes = dict.fromkeys(
        mesh for array in traced.arrays for mesh in _meshes_in(getattr(array, "sharding", None))
    )
    if len([mesh for mesh in meshes if mesh.size > 1]) > 1:
        raise AuditError(
            f"the arguments are sharded over {len(meshes)} meshes: {', '.join(map(str, meshes))}. "
            "Put all of them on one: jax.device_put(state, NamedSharding(mesh, spec))."
        )
    if any(mesh.size > 1 for mesh in meshes):
        return max(meshes, key=lambda mesh: mesh.size)
    values = (one for equation in equations(traced.jaxpr) for one in equation.params.values())
    named = (mesh for value in values for mesh in _meshes_in(value))
    current = _meshes_in(current_mesh())
    return max((*meshes, *named, *current), key=lambda mesh: mesh.size, default=None)


def _meshes_in(value: Any) -> list[Any]:
    """Returns the meshes, abstract ones too, of a sharding or a parameter."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    meshes = (one.mesh if isinstance(one, NamedSharding) else one for one in values)
    return [m for m in meshes if isinstance(m, (Mesh, AbstractMesh)) and not m.empty]


def _asked_shardings(jaxpr: Any) -> dict[int, NamedSharding]:
    """Number of an argument -> the sharding that the user's own jit asks for."""
    numbers = {var: number for number, var in enumerate(jaxpr.invars)}
    found: dict[int, NamedSharding] = {}
    for equation in jaxpr.eqns:
        asked = equation.params.get("in_shardings") or [None] * len(equation.invars)
        for var, sharding in zip(equation.invars, asked, strict=True):
            if isinstance(sharding, NamedSharding) and not is_literal(var) and var in numbers:
                found.setdefault(numbers[var], sharding)
    return found


class _Move:
    """Puts shardings on other devices."""

    def __init__(self, mesh: Any, devices: list[Any]) -> None:
        self._devices = devices
        self._mesh = mesh
        self._new = None if mesh is None else self._moved(mesh)

    def _moved(self, mesh: Any) -> Mesh:
        new = dict(zip(_devices_of(self._mesh), self._devices, strict=False))
        if new and not new.keys() >= set(_devices_of(mesh)):
            raise AuditError(
                f"the program uses two meshes of different devices: {self._mesh} and {mesh}. Use "
                "one, or meshes of the same devices."
            )
        moved = [new[device] for device in _devices_of(mesh)] if new else []
        grid = np.array(moved or self._devices, dtype=object)
        sizes = tuple(mesh.shape.values())
        return Mesh(grid.reshape(sizes), mesh.axis_names, axis_types=mesh.axis_types)

    def context(self) -> Any:
        """Makes the new mesh the current one."""
        return jax.set_mesh(self._new) if self._new is not None else contextlib.nullcontext()

    def shape(self, array: Any, asked: NamedSharding | None) -> jax.ShapeDtypeStruct:
        """The shape of an array, sharded as it is, or as it is asked for, over the new devices."""
        own = getattr(array, "sharding", None)
        sharding = own if _meshes_in(own) else asked
        if self._new is None:
            sharding = SingleDeviceSharding(self._devices[0])
        elif isinstance(sharding, NamedSharding):
            sharding = NamedSharding(self._moved(sharding.mesh), sharding.spec)
        else:
            sharding = NamedSharding(self._new, PartitionSpec())
        aval = jax.typeof(array) if not hasattr(array, "dtype") else array
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)

    def parameter(self, value: Any) -> Any:
        """A parameter of an equation, on the new devices."""
        if isinstance(value, Mesh) and not value.empty:
            return self._moved(value)
        if isinstance(value, NamedSharding) and isinstance(value.mesh, Mesh):
            return NamedSharding(self._moved(value.mesh), value.spec)
        return value


def _no_callbacks(target: str, traced: Traced) -> AuditError:
    """What to say of a program that calls the host: XLA asks the device for that."""
    calls = (e for e in equations(traced.jaxpr) if e.primitive.name in _CALLBACKS)
    locations = {e.primitive.name: Lines().of((e,)) for e in calls}
    words = ", ".join(f"{name} at {file}:{line}" for name, (file, line) in locations.items())
    return AuditError(
        f"the program calls Python on the host ({words}), which cannot be compiled for {target} "
        "where the card is not there. Leave it out for the audit, as in\n"
        "    if verbose:\n        jax.debug.print(...)"
    )


def _donated(jaxpr: Any) -> list[int]:
    """Numbers of the arguments that the user's own jit is given to reuse."""
    numbers = {var: number for number, var in enumerate(jaxpr.invars)}
    found: dict[int, None] = {}
    for equation in jaxpr.eqns:
        gives = equation.params.get("donated_invars") or [False] * len(equation.invars)
        for var, given in zip(equation.invars, gives, strict=True):
            if given and not is_literal(var) and var in numbers:
                found[numbers[var]] = None
    return sorted(found)
