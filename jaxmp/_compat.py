"""Every branch on a JAX or Flax version, every private import, and the compile target."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import jax
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies


class Context(NamedTuple):
    """What traced code may depend on besides its arguments; part of the jit cache key."""

    # The policies that are being applied, with the path they are rooted at; None outside.
    policies: Hashable = None
    # "cpu", "gpu" or "tpu": what is compiled for. None: the default backend.
    target: str | None = None


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


def agree(flag: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Whether the bool scalar `flag` holds on every device along `axes`."""
    return jax.lax.pmin(vary(flag.astype("int32"), axes), axes).astype(bool)


def largest(value: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """The maximum of an integer scalar over all devices along `axes`."""
    return jax.lax.pmax(vary(value, axes), axes)


def plain_array(leaf: Any) -> Any:
    """The array inside a Flax NNX Variable; any other leaf as it is."""
    return leaf.get_value() if hasattr(leaf, "get_value") else leaf


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
