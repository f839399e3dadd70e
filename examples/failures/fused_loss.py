"""A fused loss whose backward pass multiplies in FP32."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def cross_entropy(x, w, labels):
    return forward(x, w, labels)[0]


def forward(x, w, labels):
    logits = jnp.dot(x, w, preferred_element_type=jnp.float32)
    scores = jax.nn.log_softmax(logits)
    return -scores[jnp.arange(len(x)), labels].mean(), (x, w, labels, scores)


def backward(saved, g):
    x, w, labels, scores = saved
    delta = (jnp.exp(scores) - jax.nn.one_hot(labels, w.shape[1])) * (g / len(x))
    dx, dw = delta @ w.T.astype(delta.dtype), x.T.astype(delta.dtype) @ delta
    return dx.astype(x.dtype), dw.astype(w.dtype), None


cross_entropy.defvjp(forward, backward)


def make_step():
    x, w = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((128, 512), jnp.bfloat16)
    return jax.grad(cross_entropy, argnums=(0, 1)), x, w, jnp.zeros(256, jnp.int32)
