"""Attention on explicit mesh axes: operands of any sharding against FP64 on one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from grids import EXPENSIVE, fast_cases
from jaxmp import dot_product_attention
from jaxmp._attention._arguments import arguments
from test_attention import inputs, oracle

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "blockwise"])

# Query heads, key heads, spec of the query, spec of key and value.
CASES = {
    "heads over more devices than key heads": (4, 1, P(None, None, "model"), P()),
    "sequence": (4, 4, P(None, "model"), P(None, "model")),
    "sequence, grouped": (4, 1, P("data", "model"), P("data", "model")),
    "sequence that the heads cannot replace": (3, 3, P(None, "model"), P(None, "model")),
    "only the query": (4, 4, P("data"), P()),
    "only the key": (4, 4, P(), P("data", None, "model")),
    "head size": (4, 4, P("data", None, None, "model"), P(None, None, None, "model")),
    "batch and heads": (8, 4, P("data", None, "model"), P("data", None, "model")),
    "two axes on the heads": (8, 2, P(None, None, ("data", "model")), P("data")),
}


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


def put(mesh, array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))


def gradients(implementation, d_out, **options):
    """Returns a function that computes result and gradients of query, key, value and bias."""

    def loss(operands, bias):
        out = dot_product_attention(*operands, bias, implementation=implementation, **options)
        return (out * d_out).sum(), out

    @jax.jit
    def fn(operands, bias=None):
        argnums = 0 if bias is None else (0, 1)
        grads, out = jax.grad(loss, argnums, has_aux=True)(operands, bias)
        return out, *(grads if bias is None else (*grads[0], grads[1]))

    return fn


@pytest.mark.parametrize(
    ("implementation", "kind"),
    [
        ("xla", AxisType.Explicit),
        ("blockwise", AxisType.Explicit),
        ("blockwise", AxisType.Auto),
    ],
)
@pytest.mark.parametrize("case", CASES)
@fast_cases(
    "heads over more devices than key heads-xla-AxisType.Explicit",
    "sequence-blockwise-AxisType.Explicit",
    "sequence, grouped-blockwise-AxisType.Auto",
    "sequence that the heads cannot replace-xla-AxisType.Explicit",
    "only the query-blockwise-AxisType.Explicit",
    "only the key-blockwise-AxisType.Auto",
    "head size-xla-AxisType.Explicit",
    "batch and heads-blockwise-AxisType.Explicit",
    "two axes on the heads-blockwise-AxisType.Auto",
)
def test_result_and_gradients_are_those_of_one_device(case, implementation, kind):
    heads, groups, query_spec, spec = CASES[case]
    mesh, specs = mesh_of(kind), (query_spec, spec, spec)
    arrays = inputs(16, 16, heads=heads, groups=groups)
    d_out = np.random.default_rng(0).normal(size=arrays[0].shape).astype("float32")
    wanted = oracle(arguments(*arrays, is_causal=True), d_out)
    operands = tuple(put(mesh, a, s) for a, s in zip(arrays, specs, strict=True))
    fn = gradients(implementation, put(mesh, d_out, query_spec), is_causal=True)
    results = fn(operands)
    for result, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-5)
    if kind == AxisType.Explicit:
        for result, array in zip(results, (operands[0], *operands), strict=True):
            assert result.sharding.is_equivalent_to(array.sharding, 4)


@IMPLEMENTATIONS
def test_bias_mask_lengths_and_scale(implementation):
    mesh = mesh_of(AxisType.Explicit)
    arrays = inputs(16, 16, heads=4, groups=1)
    rng = np.random.default_rng(1)
    bias = rng.normal(size=(1, 4, 16, 16)).astype("float32")
    mask, lengths = rng.random((2, 1, 16, 16)) < 0.8, np.array([9, 16], np.int32)
    d_out = rng.normal(size=arrays[0].shape).astype("float32")
    options = {"mask": mask, "key_value_seq_lengths": lengths, "scale": 0.3}
    wanted = oracle(arguments(*arrays, bias, **options), d_out)
    spec = P("data", None, "model")
    operands = tuple(put(mesh, a, s) for a, s in zip(arrays, (spec, P(), P()), strict=True))
    fn = gradients(implementation, put(mesh, d_out, spec), **options)
    for result, want in zip(fn(operands, put(mesh, bias, P())), wanted, strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-5)


def test_a_16_bit_bias_has_a_gradient_that_is_summed_in_fp32():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    query, key, value = inputs(8, 8, batch=4, dtype=jnp.bfloat16)
    bias = put(mesh, jnp.zeros((1, 4, 8, 8), jnp.bfloat16), P())
    operands = tuple(put(mesh, array, P("data")) for array in (query, key, value))
    fn = gradients("xla", put(mesh, jnp.ones(query.shape, jnp.bfloat16), P("data")))
    jaxpr = str(jax.make_jaxpr(fn)(operands, bias))
    sums = re.findall(r":(\w+)\[1?,?4,8,8\S* = reduce_sum", jaxpr)
    assert sums and set(sums) == {"f32"}


@IMPLEMENTATIONS
def test_devices_drop_different_weights(implementation):
    mesh = mesh_of(AxisType.Explicit)
    ones = put(mesh, jnp.ones((2, 64, 4, 8)), P("data", None, "model"))
    options = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(3)}
    call = functools.partial(dot_product_attention, implementation=implementation, **options)
    out = np.asarray(jax.jit(call)(ones, ones, ones))[..., 0]
    parts = {out[b, :, n].tobytes() for b in range(2) for n in range(4)}
    assert len(parts) == 8
    np.testing.assert_allclose(out.mean(), 1, atol=0.05)


@EXPENSIVE
def test_transformations():
    mesh = mesh_of(AxisType.Explicit)
    query, key, value = inputs(16, 16, heads=4, groups=1, batch=4)
    want = dot_product_attention(query, key, value)
    sharded, *others = (
        put(mesh, query, P("data", "model")),
        put(mesh, key, P()),
        put(mesh, value, P()),
    )
    call = lambda *operands: dot_product_attention(*operands)
    with jax.set_mesh(mesh):
        results = [
            call(sharded, *others),
            jax.vmap(call)(*(put(mesh, a, P("data"))[:, None] for a in (query, key, value)))[:, 0],
            jax.checkpoint(call)(sharded, *others),
            jax.lax.scan(lambda c, _: (c, call(*c)), (sharded, *others), length=2)[1][1],
        ]
        residual = dot_product_attention(sharded, *others, return_residual=True)[1]
    for result in results:
        np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)
    assert jax.typeof(residual).sharding.spec == P("data", "model", None)
    whole = dot_product_attention(query, key, value, return_residual=True)[1]
    np.testing.assert_allclose(residual, whole, rtol=1e-5, atol=1e-6)


@EXPENSIVE
def test_a_layer_on_explicit_axes():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        layer = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
        model = jaxmp.load_recipe("bf16").wrap(layer)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16, 32)), jnp.float32)
        want = model(x)
        with jax.set_mesh(mesh):
            graph, state = nnx.split(model)
            state = jax.device_put(state, NamedSharding(mesh, P()))
            got = jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, put(mesh, x, P("data")))
    assert jax.typeof(got).sharding.spec[0] == "data"
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)
