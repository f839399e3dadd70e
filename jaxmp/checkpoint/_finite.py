"""Test for NaN and infinity in the leaves of a state, while its arrays are written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

# Smaller parts are read on the host: compiling a program for each of their shapes takes longer.
_HOST_ELEMENTS = 2**15


def start_tests(leaves: dict[str, Any]) -> dict[str, list[Any]]:
    """Starts to test leaves; devices continue after this function has returned.

    Args:
      leaves: path -> array of JAX or NumPy, without PRNG keys.

    Returns:
      For each path a boolean of each part on this process, which is True if the part is finite.
      They stay valid when the leaves are donated.
    """
    return {path: list(map(_is_finite, _parts(leaf))) for path, leaf in leaves.items()}


def not_finite(tests: dict[str, list[Any]]) -> tuple[str, ...]:
    """Returns the paths of the leaves that are not finite, which are the same on all processes."""
    bad = np.array([not all(map(bool, parts)) for parts in tests.values()], np.bool_)
    if jax.process_count() > 1 and len(bad):
        bad = np.any(multihost_utils.process_allgather(bad), axis=0)
    return tuple(path for path, is_bad in zip(tests, np.atleast_1d(bad), strict=True) if is_bad)


def _parts(leaf: Any) -> list[Any]:
    if not isinstance(leaf, jax.Array):
        return [leaf]
    return [shard.data for shard in leaf.addressable_shards if shard.replica_id == 0]


def _is_finite(part: Any) -> Any:
    if not jnp.issubdtype(part.dtype, jnp.inexact):
        return True
    if part.size > _HOST_ELEMENTS and isinstance(part, jax.Array):
        return _on_device(part)
    return np.isfinite(np.asarray(part)).all()


@jax.jit
def _on_device(part: jax.Array) -> jax.Array:
    return jnp.isfinite(part).all()
