"""An update with zero gradients, which creates Adam's state, also advances its step counter."""

import jax
import jax.numpy as jnp
import optax

tx = optax.adamw(1e-3)


@jax.jit
def train_step(params, opt_state, x):
    grads = jax.grad(lambda params: jnp.square(x @ params["w"]).mean())(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def make_step():
    params = {"w": jnp.ones((64, 32))}
    opt_state = tx.init(params)
    _, opt_state = tx.update(optax.tree.zeros_like(params), opt_state, params)
    return train_step, params, opt_state, jnp.ones((16, 64))
