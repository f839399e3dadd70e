"""An MXFP8 matmul whose gradient is NaN where a block of 32 values is zero."""

import jax
import jax.numpy as jnp


def quantize(x):
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    amax = jnp.abs(blocks).max(-1, keepdims=True)
    scale = jnp.exp2(jnp.ceil(jnp.log2(amax / 448)))
    rounded = (blocks / scale).astype(jnp.float8_e4m3fn)
    return (rounded.astype(jnp.float32) * scale).reshape(x.shape)


@jax.custom_vjp
def dot(x, w):
    return quantize(x) @ quantize(w.T).T


dot.defvjp(lambda x, w: (dot(x, w), (x, w)), lambda s, g: (g @ s[1].T, quantize(s[0].T) @ g))


def make_step():
    def loss_fn(w_down, hidden):
        return (dot(hidden, w_down) ** 2).mean()

    hidden = jax.random.normal(jax.random.key(0), (64, 64)).at[32:, 5].set(0.0)  # a closed gate
    w_down = jax.random.normal(jax.random.key(1), (64, 32))
    step = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss_fn)(w, x))
    return step, w_down, hidden
