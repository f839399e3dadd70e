"""A divergence between two distributions whose softmaxes are computed in BF16."""

import jax
import jax.numpy as jnp


def kl_loss(draft_logits, target_logits):
    log_q = jax.nn.log_softmax(draft_logits)
    p = jax.nn.softmax(target_logits)
    return jnp.mean(jnp.sum(p * (jnp.log(p + 1e-8) - log_q), axis=-1), dtype=jnp.float32)


def make_step():
    draft, target = jax.random.normal(jax.random.key(0), (2, 64, 1024), jnp.bfloat16)
    return jax.jit(jax.grad(kl_loss)), draft, target
