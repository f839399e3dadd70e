"""Layouts of arrays in compiled programs."""

from __future__ import annotations

import jax
from jax.experimental.layout import Layout, with_layout_constraint


def row_major(x: jax.Array) -> jax.Array:
    """Requires the row-major layout for an array in the compiled program.

    On JAX 0.10, an array on several devices is returned as it is, because XLA would gather it
    before the constraint, and divide it again.
    """
    mesh = getattr(jax.typeof(x).sharding, "mesh", None)
    if jax.__version_info__ < (0, 11) and mesh is not None and mesh.size > 1:
        return x
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
