"""The gradient of an FP32 kernel, rounded to BF16 before it is cast to FP32."""

import jax
import jax.numpy as jnp

LEARNING_RATE = 1e-3


def make_step():
    def loss_fn(w, x):
        return jnp.square((x @ w.astype(jnp.bfloat16)).astype(jnp.float32)).mean()

    step = jax.jit(lambda w, x: w - LEARNING_RATE * jax.grad(loss_fn)(w, x))
    x = jax.random.normal(jax.random.key(0), (4096, 128), jnp.bfloat16)
    return step, jax.random.normal(jax.random.key(1), (128, 128)) / 16, x
