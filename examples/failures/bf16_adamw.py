"""AdamW over parameters that were loaded in BF16, so that its moments are in BF16, too."""

import jax
import jax.numpy as jnp
import optax

LOADED = jnp.bfloat16
tx = optax.adamw(1e-4)


@jax.jit
def train_step(params, opt_state, x):
    def loss_fn(params):
        hidden = jnp.tanh(x.astype(jnp.bfloat16) @ params["up"].astype(jnp.bfloat16))
        return (hidden @ params["down"].astype(jnp.bfloat16)).astype(jnp.float32).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make_step():
    params = {"up": jnp.ones((128, 256), LOADED) / 128, "down": jnp.ones((256, 128), LOADED)}
    return train_step, params, tx.init(params), jnp.ones((64, 128))
