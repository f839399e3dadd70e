"""A BF16 baseline that computes in FP32: the layer has no dtype, so it promotes its inputs."""

import flax.linen as nn
import jax
import jax.numpy as jnp

layer = nn.Dense(2048)


def loss_fn(params, x):
    return layer.apply({"params": params}, x).astype(jnp.float32).mean()


def make_step():
    x = jax.random.normal(jax.random.key(0), (256, 512), jnp.bfloat16)
    params = layer.init(jax.random.key(1), x)["params"]
    return jax.jit(jax.value_and_grad(loss_fn)), params, x
