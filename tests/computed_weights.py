"""Functions that compute the weight of a matmul from parameters, and losses that read it."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

WIDTH, ROWS = 256, 64


@jax.custom_jvp
def gained(w, gain):
    return w * gain[None]


gained.defjvp(lambda p, t: (gained(*p), t[0] * p[1][None] + p[0] * t[1][None]))


@jax.custom_vjp
def rounded(w):
    """Rounds to multiples of 1/16; its gradient is that of the identity."""
    return jnp.round(w * 16) / 16


rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (g,))


@jax.custom_vjp
def halved(w):
    """Returns the argument; halves its gradient."""
    return w


halved.defvjp(lambda w: (w, None), lambda _, g: (g * jnp.asarray(0.5, g.dtype),))


def orthogonal(w, *_):
    """Orthogonalizes a weight by Newton-Schulz iterations, whose matmuls contract split axes."""
    step = lambda n, w: 1.5 * w - 0.5 * w @ (w.T @ w)
    return lax.fori_loop(0, 3, step, w * jnp.asarray(2**-6, w.dtype))


def scanned(w, *_):
    return lax.scan(lambda s, _: (s * 0.5 + w, None), jnp.zeros_like(w), None, length=3)[0]


# Functions of a weight and a gain in 16 bits, and of the batch in FP32.
WEIGHTS = {
    "relu": lambda w, *_: jax.nn.relu(w),
    "softplus": lambda w, *_: jax.nn.softplus(w),
    "scaled_by_relu": lambda w, gain, x: w * jax.nn.relu(gain)[None],
    "own_jvp": lambda w, gain, x: gained(w, gain),
    "straight_through": lambda w, *_: rounded(w),
    "straight_through_by_stop_gradient": lambda w, *_: (
        w + lax.stop_gradient(jnp.round(w * 16) / 16 - w)
    ),
    "straight_through_rows": lambda w, *_: jax.vmap(rounded)(w),
    "scaled_gradient": lambda w, *_: halved(w),
    "cond": lambda w, gain, x: lax.cond(x[0, 0] > 0, lambda w: w * 2, lambda w: w, w),
    "scan": scanned,
    "fori_loop": lambda w, *_: lax.fori_loop(0, 3, lambda n, w: 1.5 * w - 0.5 * w * w, w),
    "orthogonal": orthogonal,
    "checkpoint": lambda w, *_: jax.checkpoint(lambda w: w * jnp.asarray(0.5, w.dtype))(w),
    "relu_in_checkpoint": lambda w, *_: jax.checkpoint(jax.nn.relu)(w),
    "softmax": lambda w, *_: jax.nn.softmax(w),
    "product": lambda w, *_: w @ w,
    "normalized": lambda w, *_: w / jnp.linalg.norm(w, axis=0, keepdims=True),
    "masked_by_data": lambda w, gain, x: w * (x[:1] > 0).astype(w.dtype),
}
# The same of a weight in FP32, which is then cast.
IN_FP32 = {
    "straight_through_in_fp32": lambda w, x: rounded(w),
    "masked_by_data_in_fp32": lambda w, x: w * (x[:1] > 0).astype(jnp.float32),
}
NAMES = (*WEIGHTS, *IN_FP32)
# Weights that also depend on data are not followed in FP32; the audit reports their sums.
REPORTED = {"masked_by_data_in_fp32"}


def loss_of(name, dtype=jnp.bfloat16):
    """Returns a loss whose matmul reads a computed weight."""

    def loss_fn(params, x):
        if name in IN_FP32:
            weight = IN_FP32[name](params["w"], x).astype(dtype)
        else:
            weight = WEIGHTS[name](params["w"].astype(dtype), params["gain"].astype(dtype), x)
        return jnp.sum((x.astype(dtype) @ weight).astype(jnp.float32)) * 4000

    return loss_fn


def compiled_sums(name, is_split):
    """Returns dtype -> bytes of the sums over 8 H200, and the lines of `all_reduce_16bit`."""
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, where = (
        NamedSharding(mesh, P("data")),
        NamedSharding(mesh, P("data") if is_split else P()),
    )

    def loss_fn(params, x):
        if is_split:
            params = lax.with_sharding_constraint(params, where)
            x = lax.with_sharding_constraint(x, rows)
        return loss_of(name)(params, x)

    def step(params, x):
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    shape = lambda *sizes, at: jax.ShapeDtypeStruct(sizes, np.float32, sharding=at)
    params = {"w": shape(WIDTH, WIDTH, at=where), "gain": shape(WIDTH, at=where)}
    step = jax.jit(step, donate_argnums=0)
    x = shape(ROWS, WIDTH, at=rows)
    report = jaxmp.audit(step, params, x, recipe="p=f32,c=bf16,o=f32", target="h200")
    sums = Counter()
    for row in report.collectives:
        if row.operation in ("all-reduce", "reduce-scatter") and row.bytes >= 4096 * row.count:
            sums[row.dtype] += row.bytes
    return sums, {f.line for f in report.errors if f.check == "all_reduce_16bit"}
