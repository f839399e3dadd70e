"""Log-probabilities of a trainer for reinforcement learning, whose logits a matmul rounds."""

import jax
import jax.numpy as jnp


def log_probs(params, tokens):
    hidden = params["embedding"][tokens[:-1]].astype(jnp.bfloat16)
    logits = jnp.matmul(hidden, params["head"].astype(jnp.bfloat16)).astype(jnp.float32)
    target = jnp.take_along_axis(logits, tokens[1:, None], axis=-1)[:, 0]
    return target - jax.nn.logsumexp(logits, axis=-1)


def loss_fn(params, batch):
    ratio = jnp.exp(log_probs(params, batch["tokens"]) - batch["sampled"])
    clipped = jnp.clip(ratio, 0.8, 1.2)
    return -jnp.minimum(ratio * batch["advantages"], clipped * batch["advantages"]).mean()


def make_step():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"embedding": (512, 64), "head": (64, 512)}
    params = {n: jax.random.normal(k, shapes[n]) for n, k in zip(shapes, keys, strict=False)}
    tokens = jax.random.randint(keys[2], (129,), 0, 512)
    batch = {"tokens": tokens, "sampled": -6 * jnp.ones(128), "advantages": jnp.ones(128)}
    return jax.jit(jax.grad(loss_fn)), params, batch
