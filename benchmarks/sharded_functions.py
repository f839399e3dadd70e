"""Counts the sums over devices of functions that compute weights, compiled for 8 H200.

    python benchmarks/sharded_functions.py --out sharded_functions.json
    python benchmarks/sharded_functions.py --only relu cond --out some.json

Each function computes the weight of a matmul from parameters in another way: with functions that
have their own derivative, control flow, `jax.checkpoint`, or data. Its gradient comes from
`jaxmp.value_and_grad`, for replicated parameters ("data parallel") and for split ones ("FSDP").

Nothing is run, and no GPU is required, but XLA's GPU compiler: pip install -e ".[aot]". Each row
has the bytes of the all-reduce and reduce-scatter operations of arrays from 4 kB:

    sums_16_bit, sums_fp32     by dtype
    reported                   lines of the error `all_reduce_16bit` of the audit

The script fails if a sum is in 16 bits, and the audit does not report it.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from result_file import parser_of, write_result

WIDTH, ROWS = 256, 64
LAYOUTS = ("data parallel", "FSDP")
MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
Params = dict[str, jax.Array]

# ---------------------------------------------------------------------------
# Weights: (FP32 parameters, batch in FP32, 16-bit dtype) -> weight
# ---------------------------------------------------------------------------


@jax.custom_jvp
def gained(w: jax.Array, gain: jax.Array) -> jax.Array:
    """Multiplies columns."""
    return w * gain[None]


gained.defjvp(lambda p, t: (gained(*p), t[0] * p[1][None] + p[0] * t[1][None]))


@jax.custom_vjp
def rounded(w: jax.Array) -> jax.Array:
    """Rounds to multiples of 1/16; its gradient is that of the identity."""
    return jnp.round(w * 16) / 16


rounded.defvjp(lambda w: (rounded(w), None), lambda _, g: (g,))


@jax.custom_vjp
def identity(w: jax.Array) -> jax.Array:
    """Returns the argument; halves its gradient."""
    return w


identity.defvjp(lambda w: (w, None), lambda _, g: (g * jnp.asarray(0.5, g.dtype),))


def relu(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return jax.nn.relu(p["w"].astype(dtype))


def softplus(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return jax.nn.softplus(p["w"].astype(dtype))


def scaled_by_relu(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return p["w"].astype(dtype) * jax.nn.relu(p["gain"].astype(dtype))[None]


def own_jvp(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return gained(p["w"].astype(dtype), p["gain"].astype(dtype))


def straight_through(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return rounded(p["w"].astype(dtype))


def straight_through_in_fp32(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return rounded(p["w"]).astype(dtype)


def straight_through_by_stop_gradient(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    w = p["w"].astype(dtype)
    return w + jax.lax.stop_gradient(jnp.round(w * 16) / 16 - w)


def straight_through_rows(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return jax.vmap(rounded)(p["w"].astype(dtype))


def scaled_gradient(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return identity(p["w"].astype(dtype))


def cond(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    w = p["w"].astype(dtype)
    return jax.lax.cond(x[0, 0] > 0, lambda w: w * 2, lambda w: w, w)


def scan(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    w = p["w"].astype(dtype)
    total = jax.lax.scan(lambda s, _: (s * 0.5 + w, None), jnp.zeros_like(w), None, length=3)
    return total[0]


def fori_loop(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.fori_loop(0, 3, lambda n, w: 1.5 * w - 0.5 * w * w, p["w"].astype(dtype))


def orthogonal(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    """Orthogonalizes a weight by Newton-Schulz iterations, whose matmuls contract split axes."""
    step = lambda n, w: 1.5 * w - 0.5 * w @ (w.T @ w)
    return jax.lax.fori_loop(0, 3, step, p["w"].astype(dtype) * jnp.asarray(2**-6, dtype))


def checkpoint(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return jax.checkpoint(lambda w: w * jnp.asarray(0.5, w.dtype))(p["w"].astype(dtype))


def relu_in_checkpoint(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return jax.checkpoint(jax.nn.relu)(p["w"].astype(dtype))


def softmax(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return jax.nn.softmax(p["w"].astype(dtype))


def product(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return p["w"].astype(dtype) @ p["w"].astype(dtype)


def normalized(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    w = p["w"].astype(dtype)
    return w / jnp.linalg.norm(w, axis=0, keepdims=True)


def masked_by_data(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return p["w"].astype(dtype) * (x[:1] > 0).astype(dtype)


def masked_by_data_in_fp32(p: Params, x: jax.Array, dtype: Any) -> jax.Array:
    return (p["w"] * (x[:1] > 0).astype(jnp.float32)).astype(dtype)


WEIGHTS: dict[str, Callable[[Params, jax.Array, Any], jax.Array]] = {
    fn.__name__: fn
    for fn in (
        relu,
        softplus,
        scaled_by_relu,
        own_jvp,
        straight_through,
        straight_through_in_fp32,
        straight_through_by_stop_gradient,
        straight_through_rows,
        scaled_gradient,
        cond,
        scan,
        fori_loop,
        orthogonal,
        checkpoint,
        relu_in_checkpoint,
        softmax,
        product,
        normalized,
        masked_by_data,
        masked_by_data_in_fp32,
    )
}
# Weights that also depend on data are not followed in FP32; the audit reports their sums.
REPORTED = {"masked_by_data_in_fp32"}


def loss_of(name: str, dtype: Any = jnp.bfloat16) -> Callable[[Params, jax.Array], jax.Array]:
    """Returns a loss whose matmul reads a weight of WEIGHTS."""

    def loss_fn(params: Params, x: jax.Array) -> jax.Array:
        y = x.astype(dtype) @ WEIGHTS[name](params, x, dtype)
        return jnp.sum(y.astype(jnp.float32)) * 4000

    return loss_fn


# ---------------------------------------------------------------------------
# Measurement
# ---------------------------------------------------------------------------


def measure(name: str, layout: str) -> dict[str, Any]:
    """Compiles the step of a function and returns its row."""
    spec = P("data") if layout == "FSDP" else P()
    rows, where = NamedSharding(MESH, P("data")), NamedSharding(MESH, spec)

    def loss_fn(params: Params, x: jax.Array) -> jax.Array:
        if layout == "FSDP":
            params = jax.lax.with_sharding_constraint(params, where)
            x = jax.lax.with_sharding_constraint(x, rows)
        return loss_of(name)(params, x)

    def step(params: Params, x: jax.Array) -> Any:
        loss, grads = jaxmp.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    shapes = {"w": (WIDTH, WIDTH), "gain": (WIDTH,)}
    params = {
        key: jax.ShapeDtypeStruct(shape, np.float32, sharding=where)
        for key, shape in shapes.items()
    }
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32, sharding=rows)
    report = jaxmp.audit(
        jax.jit(step, donate_argnums=0), params, x, recipe="p=f32,c=bf16,o=f32", target="h200"
    )
    sums: Counter[str] = Counter()
    for row in report.collectives:
        is_sum = row.operation in ("all-reduce", "reduce-scatter")
        if is_sum and row.bytes >= 4096 * row.count:
            sums["sums_fp32" if row.dtype == "float32" else "sums_16_bit"] += row.bytes
    findings = [f for f in report.findings if f.check == "all_reduce_16bit"]
    return {
        "function": name,
        "layout": layout,
        "sums_16_bit": sums["sums_16_bit"],
        "sums_fp32": sums["sums_fp32"],
        "reported": sorted({f.line for f in findings if f.severity == "error"}),
    }


def main() -> None:
    """Compiles the functions and writes their rows."""
    args = parser_of(__doc__, WEIGHTS).parse_args()
    rows = [measure(name, layout) for layout in LAYOUTS for name in args.only]
    for row in rows:
        print(row)
    write_result(args.out, target="NVIDIA H200 141GB HBM3e", rows=rows)
    silent = [row["function"] for row in rows if row["sums_16_bit"] and not row["reported"]]
    sys.exit(f"sums in 16 bits without a message: {silent}" if silent else 0)


if __name__ == "__main__":
    main()
