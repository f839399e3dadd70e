"""Compiling a traced program for a GPU, which may be one that is not there."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any, NamedTuple

import jax
import jax.extend.core
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxmp._audit._arguments import Traced
from jaxmp._audit._gpus import GPUS
from jaxmp._compat import described_gpus
from jaxmp._jaxprs import is_literal, with_parameters
from jaxmp.errors import AuditError, did_you_mean, missing_dependency

# Autotuning needs the card. Without it XLA would pick a Triton kernel for every matmul and never
# try cuBLAS, whose FP8 kernels it finds by pattern; operand dtypes are what the card would run.
_WITHOUT_THE_CARD = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


class Compiled(NamedTuple):
    """An optimized program."""

    text: str
    memory: Any  # CompiledMemoryStats of each device
    gpu: str
    devices: int
    # Whether the card was there.
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
      traced: its arrays may be sharded over a mesh of any devices; that many cards are meant.

    Raises:
      AuditError: if the arguments are sharded over several meshes, or XLA cannot compile.
      MissingDependencyError: if there is neither the card nor XLA's GPU compiler.
    """
    mesh = _mesh_of(traced.arrays)
    count = 1 if mesh is None else mesh.size
    real = _real_gpus(target, count)
    devices = real or _described(target, count)
    move = _Move(mesh, devices)
    shapes = [move.shape(array) for array in traced.arrays]
    closed = traced.closed if mesh is None else with_parameters(traced.closed, move.parameter)
    run = jax.extend.core.jaxpr_as_fun(closed)
    donated = _donated(traced.jaxpr)
    options = None if real else _WITHOUT_THE_CARD
    try:
        with move.context():
            staged = jax.jit(run, donate_argnums=donated, keep_unused=True).trace(*shapes)
            compiled = staged.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise AuditError(f"XLA cannot compile this for {GPUS[target].name}: {error}") from error
    return Compiled(
        compiled.as_text() or "", compiled.memory_analysis(), GPUS[target].name, count, bool(real)
    )


# ---------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------


def _real_gpus(target: str, count: int) -> list[Any]:
    """That many devices here, if they are the card; else none."""
    if jax.default_backend() != "gpu":
        return []
    found = [d for d in jax.devices() if target.upper() in d.device_kind.upper().split()]
    return found[:count] if len(found) >= count else []


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


def _mesh_of(arrays: list[Any]) -> Mesh | None:
    """The mesh that arguments are sharded over; None if there is none."""
    meshes = {
        array.sharding.mesh: None
        for array in arrays
        if isinstance(getattr(array, "sharding", None), NamedSharding)
        and array.sharding.mesh.size > 1
    }
    if len(meshes) > 1:
        raise AuditError(
            f"the arguments are sharded over {len(meshes)} meshes: {', '.join(map(str, meshes))}. "
            "Put all of them on one: jax.device_put(state, NamedSharding(mesh, spec))."
        )
    return next(iter(meshes), None)


class _Move:
    """Puts shardings on other devices."""

    def __init__(self, mesh: Any, devices: list[Any]) -> None:
        self._devices = devices
        self._mesh = mesh
        self._new = None if mesh is None else self._moved(mesh)

    def _moved(self, mesh: Any) -> Mesh:
        old = list(getattr(self._mesh, "devices", np.empty(0)).flat)
        new = dict(zip(old, self._devices, strict=False))
        grid = np.array(
            [new[device] for device in mesh.devices.flat]
            if isinstance(mesh, Mesh)
            else self._devices,
            dtype=object,
        )
        sizes = tuple(mesh.shape.values())
        return Mesh(grid.reshape(sizes), mesh.axis_names, axis_types=mesh.axis_types)

    def context(self) -> Any:
        """Makes the new mesh the current one."""
        return jax.set_mesh(self._new) if self._new is not None else contextlib.nullcontext()

    def shape(self, array: Any) -> jax.ShapeDtypeStruct:
        """The shape of an array, sharded as it is over the new devices."""
        sharding = getattr(array, "sharding", None)
        if self._new is None:
            sharding = SingleDeviceSharding(self._devices[0])
        elif isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            sharding = NamedSharding(self._new, sharding.spec)
        else:
            sharding = NamedSharding(self._new, PartitionSpec())
        aval = jax.typeof(array) if not hasattr(array, "dtype") else array
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)

    def parameter(self, value: Any) -> Any:
        """A parameter of an equation, on the new devices."""
        if isinstance(value, Mesh) and value.size > 1:
            return self._moved(value)
        if isinstance(value, NamedSharding) and isinstance(value.mesh, Mesh):
            return NamedSharding(self._moved(value.mesh), value.spec)
        return value


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
