"""A benchmark whose bfloat16 baseline computes in FP32, as that of a published tutorial did.

    python examples/accidental_fp32.py
    jaxmp audit examples/accidental_fp32.py:make_step --recipe bf16

The first version of Transformer Engine's tutorial for JAX compared MXFP8 with a dense layer of Flax
in bfloat16, and measured 2.5x on a GB200. The layer had bfloat16 inputs and no `dtype`, so that
Flax promoted them to the FP32 of the kernel. With `dtype=jnp.bfloat16`, the figure became 1.6x:
https://github.com/NVIDIA/TransformerEngine/pull/2976 (2026-05-19). The layer below has the sizes of
that first version; its arguments are shapes, so that the audit runs on any machine in a second.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxmp

BATCH, SEQUENCE, FEATURES, OUTPUTS = 4, 2048, 4096, 16384


Step = tuple[Callable, dict, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]


def step_of(layer: nn.Dense) -> Step:
    """Returns a forward and backward pass of a layer, and the shapes of its arguments."""
    x = jax.ShapeDtypeStruct((BATCH, SEQUENCE, FEATURES), jnp.bfloat16)
    dy = jax.ShapeDtypeStruct((BATCH, SEQUENCE, OUTPUTS), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    @jax.jit
    def step(variables: dict, x: jax.Array, dy: jax.Array) -> tuple[dict, jax.Array]:
        y, backward = jax.vjp(layer.apply, variables, x)
        return backward(dy.astype(y.dtype))

    return step, variables, x, dy


def make_step() -> Step:
    """Returns the baseline as it was published."""
    return step_of(nn.Dense(OUTPUTS, use_bias=False))


def make_repaired_step() -> Step:
    """Returns the baseline with the dtype that the authors added."""
    return step_of(nn.Dense(OUTPUTS, use_bias=False, dtype=jnp.bfloat16))


if __name__ == "__main__":
    for make in (make_step, make_repaired_step):
        print(f"{make.__name__}: {jaxmp.audit(*make(), recipe='bf16')}\n")
