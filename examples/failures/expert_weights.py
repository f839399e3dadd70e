"""Expert weights that a second initialization casts to BF16, beside layers in FP32."""

import jax
import jax.numpy as jnp
import optax

tx = optax.adamw(1e-5)


def initialize_weights(params, dtype=jnp.bfloat16):
    return params | {"experts": params["experts"].astype(dtype)}


@jax.jit
def train_step(params, opt_state, x):
    def loss_fn(params):
        hidden = x.astype(jnp.bfloat16) @ params["dense"].astype(jnp.bfloat16)
        out = jnp.einsum("td,edf->tf", hidden, params["experts"].astype(jnp.bfloat16))
        return jnp.square(out.astype(jnp.float32)).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def make_step():
    params = {"dense": jnp.ones((64, 64)) / 64, "experts": jnp.ones((4, 64, 32)) / 64}
    params = initialize_weights(params)
    return train_step, params, tx.init(params), jnp.ones((128, 64))
