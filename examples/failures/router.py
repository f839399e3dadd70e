"""Scores of a router that a matmul rounds, and that are cast to FP32 afterwards."""

import jax
import jax.numpy as jnp


def loss_fn(params, x):
    x = x.astype(jnp.bfloat16)
    router, up = (params[name].astype(jnp.bfloat16) for name in ("router", "up"))
    scores = jnp.einsum("td,de->te", x, router).astype(jnp.float32)
    weights, experts = jax.lax.top_k(jax.nn.softmax(scores), 8)
    out = jnp.einsum("td,edf,te->tf", x, up, jax.nn.one_hot(experts, 64, dtype=x.dtype).sum(1))
    return (out * weights.sum(-1, keepdims=True)).astype(jnp.float32).mean()


def make_step():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"router": (256, 64), "up": (64, 256, 16)}
    params = {n: jax.random.normal(k, shapes[n]) / 16 for n, k in zip(shapes, keys, strict=False)}
    return jax.jit(jax.grad(loss_fn)), params, jax.random.normal(keys[2], (128, 256))
