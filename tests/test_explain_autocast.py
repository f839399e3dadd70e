"""`explain`: each matmul with its dtype and the reason."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jaxmp
from jaxmp import PolicyMap, Rule, autocast, full_precision
from programs import dtypes, products, trace, with_own_gradient

MIXED = "p=f32,c=bf16,o=f32"
W, X = jnp.ones((8, 8)) / 8, jnp.ones((4, 8))
FLOPS = 2 * 4 * 8 * 8


own = with_own_gradient(lambda w, x: x @ w)


def reasons(fn, *args, policies=MIXED, ops=None):
    rows = jaxmp.explain(fn, jaxmp.load_recipe(policies).replace(ops=ops))(*args).autocast.rows
    return [(row.path, row.dtype, row.count, row.reason) for row in rows]


def test_each_reason():
    def fn(w, x):
        with jax.named_scope("body"):
            x = x @ w
        with jax.named_scope("head"):
            x = x @ w
        with full_precision():
            x = x @ w
        x = jnp.matmul(x, w, precision="highest")
        bytes_ = jnp.ones((2, 2), jnp.int8)
        return own(w, x), bytes_ @ bytes_

    policies = PolicyMap(MIXED, [Rule("head", "c=f32", why="the loss reads it")])
    explanation = jaxmp.explain(fn, policies)(W, X).autocast
    assert [(row.path, row.dtype, row.reason) for row in explanation.rows] == [
        ("body", "bfloat16", f"default policy {MIXED}"),
        ("head", "float32", "Rule('head', compute_dtype='float32', why='the loss reads it')"),
        ("", "float32", "inside jaxmp.full_precision()"),
        ("", "float32", "its author asked for precision=HIGHEST"),
        ("", "float32", "inside a custom_vjp, which runs as its author wrote it"),
        ("", "int8", "int8 is never cast"),
    ]
    assert (explanation.flops, explanation.low_flops, explanation.share) == (5 * FLOPS, FLOPS, 0.2)
    assert {row.shapes for row in explanation.rows[:5]} == {((4, 8), (8, 8))}
    assert {row.file for row in explanation.rows} == {__file__}
    first, _, body, *_ = str(explanation).splitlines()
    assert first.startswith("20.0% of the matmul FLOPs run in 16 bits or FP8: 1 of 6 matmuls")
    assert (
        "bfloat16  body" in body and f"test_explain_autocast.py:{explanation.rows[0].line}" in body
    )


def test_the_op_table():
    assert reasons(jnp.matmul, X, W, ops={"dot_general": "fp32"}) == [
        ("", "float32", 1, "the op table: dot_general = 'fp32'")
    ]
    ((_, dtype, _, reason),) = reasons(solved, W, X)
    assert dtype == "float32" and reason.startswith("inside custom_linear_solve: ")


def solved(w, x):
    return lax.custom_linear_solve(lambda v: 2 * v, x[0], solve=lambda _, b: b @ w, symmetric=True)


def loop(fn, **kwargs):
    return lambda w, x: lax.scan(lambda c, _: (fn(w, c), None), x, None, **kwargs)[0]


def matmul(w, x):
    return x @ w


def over_devices(w, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    return jax.shard_map(matmul, mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec)(w, x)


NESTED = {
    "jit": (jax.jit(matmul), 1),
    "scan": (loop(matmul, length=5), 5),
    "scan in scan": (loop(loop(matmul, length=5), length=3), 15),
    "fori_loop": (lambda w, x: lax.fori_loop(0, 3, lambda _, c: c @ w, x), 3),
    "while": (lambda w, x: lax.while_loop(lambda c: c[0, 0] < 0, lambda c: c @ w, x), 1),
    "cond": (lambda w, x: lax.cond(x[0, 0] < 0, matmul, lambda w, x: x, w, x), 1),
    "remat": (jax.checkpoint(matmul), 1),
    "vmap": (lambda w, x: jax.vmap(matmul, (None, 0))(w, x), 1),
    "shard_map": (over_devices, 2),
    "custom_jvp": (lambda w, x: jax.nn.relu(x @ w), 1),
    "twice": (lambda w, x: jax.jit(matmul)(w, jax.jit(matmul)(w, x)), 2),
}


@pytest.mark.parametrize("name", NESTED)
def test_what_is_inside_counts_as_often_as_it_runs(name):
    fn, count = NESTED[name]
    explanation = jaxmp.explain(fn, MIXED)(W, X).autocast
    assert {row.dtype for row in explanation.rows} == {"bfloat16"}
    assert sum(row.count for row in explanation.rows) == count
    assert explanation.share == 1.0
    per_device = 2 if name == "shard_map" else 1
    assert explanation.flops == count * FLOPS // per_device
    assert bool(explanation.notes) == (name in ("while", "cond"))


def loss(w, x):
    with jax.named_scope("layer"):
        hidden = own(w, jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x))
    return jnp.square(loop(matmul, length=2)(w, hidden)).sum()


def test_the_dtypes_are_those_of_the_program():
    """The listed dtypes are those of the jaxpr, for `grad(autocast(f))` and `autocast(grad(f))`."""
    for fn in (loss, jax.grad(loss)):
        listed = jaxmp.explain(fn, MIXED)(W, X).autocast.rows
        traced = [dtypes(e)[0] for e in products(trace(autocast(fn, MIXED), W, X))]
        assert sorted(row.dtype for row in listed) == sorted(traced)
    phases = {(row.phase, row.dtype) for row in listed if "custom_vjp" in row.reason}
    assert phases == {("forward", "float32"), ("backward", "float32")}
    assert {row.phase for row in listed} == {"forward", "backward", "recompute"}


def test_a_function_that_is_all_custom_vjp_says_so():
    text = str(jaxmp.explain(own, MIXED)(W, X).autocast)
    assert text.startswith("0.0% of the matmul FLOPs") and "inside a custom_vjp" in text


def test_shapes_are_enough_and_nothing_is_computed():
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (W, X)]
    assert jaxmp.explain(matmul, "fp16")(*shapes).autocast.rows[0].dtype == "float16"
    assert str(jaxmp.explain(lambda x: x + 1, "bf16")(X).autocast) == "No matmul or convolution."


def test_fp8():
    w, x = jnp.ones((256, 256)), jnp.ones((16, 256))
    low, narrow = jaxmp.explain(lambda: (x @ w, X @ W), "fp8")().autocast.rows
    assert (low.dtype, low.is_low) == ("float8_e4m3fn", True)
    assert narrow.dtype == "bfloat16" and "see .fp8" in narrow.reason


def test_mistakes_are_refused_as_by_autocast():
    fns = "bf16", nn.Dense, nn.Dense(2), matmul
    texts = r"explain\(loss_fn, 'bf16'\)", "Pass an instance", "requires a recipe", "not a chip"
    for fn, text in zip(fns, texts, strict=True):
        with pytest.raises(jaxmp.JaxmpError, match=text):
            jaxmp.explain(fn, target="h20")(W, X)
    with pytest.raises(jaxmp.errors.RuleError, match="absent"):
        jaxmp.explain(matmul, PolicyMap(MIXED, [Rule("absent", "c=f32")]))(W, X)
