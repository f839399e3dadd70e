"""A norm that creates its learned scale in the compute dtype."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Block(nn.Module):
    dtype = jnp.bfloat16
    param_dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.dtype)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        x = (x * scale).astype(self.dtype)
        return nn.Dense(64, dtype=self.dtype)(x).astype(jnp.float32)


def make_step():
    tx, x = optax.adamw(3e-4), jax.random.normal(jax.random.key(0), (32, 64))
    params = Block().init(jax.random.key(1), x)

    def train_step(params, opt_state, x):
        grads = jax.grad(lambda params: jnp.square(Block().apply(params, x)).mean())(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(train_step), params, tx.init(params), x
