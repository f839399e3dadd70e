"""Attention in programs cross-compiled for an H200: kernels and memory."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmp
from arrays import shape
from byte_gpt import GPT, NnxGPT
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, fast_cases
from jaxmp import audit, dot_product_attention

pytestmark = needs_compiler

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
MASKED = ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]


def kernels(fn, *args):
    return [(row.kernel, row.count) for row in audit(fn, *args, target="h200").attention]


def gradients(**options):
    """Returns the gradients of query, key and value; lengths or a mask follow as arguments."""

    def loss(query, key, value, **given):
        return dot_product_attention(query, key, value, **options, **given).astype("float32").sum()

    def fn(query, key, value, given):
        return jax.grad(functools.partial(loss, **given), (0, 1, 2))(query, key, value)

    return fn


LENGTHS = shape(2, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("options", "given", "heads", "expected"),
    [
        ({"is_causal": True}, {}, (8, 64), [FORWARD, BACKWARD]),
        ({}, {"key_value_seq_lengths": LENGTHS}, (8, 64), [FORWARD, BACKWARD]),
        ({"local_window_size": (64, 0)}, {}, (8, 64), [FORWARD, BACKWARD]),
        ({"is_causal": True}, {}, (2, 64), [FORWARD, BACKWARD]),  # four queries share a key
        ({"is_causal": True}, {}, (8, 20), [FORWARD, BACKWARD]),  # padded to heads of 24
        ({}, {"mask": shape(2, 1, 1, 256, dtype=bool)}, (8, 64), MASKED),
        ({}, {"bias": shape(8, 256, 256)}, (8, 64), MASKED),
    ],
    ids=["causal", "lengths", "window", "grouped", "padded-heads", "mask", "bias"],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@fast_cases(
    "bfloat16-causal",
    "float16-lengths",
    "bfloat16-window",
    "float16-grouped",
    "bfloat16-padded-heads",
    "float16-mask",
    "bfloat16-bias",
)
def test_fused_forwards_and_backwards(options, given, heads, expected, dtype):
    query, key = shape(2, 256, 8, heads[1], dtype=dtype), shape(2, 256, *heads, dtype=dtype)
    if "bias" in given:
        given = {"bias": shape(8, 256, 256, dtype=dtype)}
    found = kernels(gradients(**options), query, key, key, given)
    assert found == [(kernel, 1) for kernel in expected]


def test_fused_under_scan_and_remat():
    def fn(query):
        @jax.checkpoint
        def body(q, _):
            return q + dot_product_attention(q, q, q, is_causal=True), None

        return jax.lax.scan(body, query, length=4)[0].astype("float32").sum()

    found = dict(kernels(jax.grad(fn), shape(2, 256, 8, 64)))
    # Only the forward kernel is recomputed.
    assert found[BACKWARD] == 4 and found[FORWARD] >= 4


class LinenBlock(nn.Module):
    """One attention layer, for a scan."""

    @nn.compact
    def __call__(self, x, _):
        fn = jaxmp.attention_fn(is_causal=True)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=fn, name="attention")(x)
        return x, None


class LinenModel(nn.Module):
    """Attention layers under scan and remat."""

    @nn.compact
    def __call__(self, x):
        block = nn.remat(LinenBlock, prevent_cse=False)
        layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers(name="layers")(x, None)[0]


def test_a_linen_model_by_its_recipe():
    model = jaxmp.load_recipe("bf16").wrap(LinenModel())
    x = shape(2, 128, 256, dtype=jnp.float32)
    params = jax.eval_shape(LinenModel().init, jax.random.key(0), x)
    report = audit(jax.grad(lambda p, x: model.apply(p, x).sum()), params, x, target="h200")
    assert {row.kernel for row in report.attention} == {FORWARD, BACKWARD}
    assert {row.module for row in report.attention} == {"layers/attention"}


def test_an_nnx_model_by_its_recipe():
    fn = jaxmp.attention_fn(is_causal=True)
    layer = nnx.MultiHeadAttention(4, 256, decode=False, attention_fn=fn, rngs=nnx.Rngs(0))
    model = jaxmp.load_recipe("bf16").wrap(layer)

    @nnx.jit
    def fn(model, x):
        return nnx.grad(lambda m: m(x).sum())(model)

    report = audit(fn, model, shape(2, 128, 256, dtype=jnp.float32), target="h200")
    assert sorted(row.kernel for row in report.attention) == [FORWARD, BACKWARD]


def test_a_mask_of_a_layer_goes_to_the_kernel_as_an_array():
    layer = nn.MultiHeadDotProductAttention(num_heads=4)
    model, x = jaxmp.load_recipe("c=bf16").wrap(layer), shape(2, 128, 256, dtype=jnp.float32)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)
    mask = shape(2, 1, 1, 128, dtype=bool)
    fn = jax.grad(lambda p, x, mask: model.apply(p, x, mask=mask).astype("float32").sum())
    assert [kernel for kernel, _ in kernels(fn, params, x, mask)] == MASKED


class Masked(nn.Module):
    """One attention layer whose mask is an array."""

    attention_fn: Callable[..., jax.Array] = nn.dot_product_attention

    @nn.compact
    def __call__(self, x, mask):
        options = {"attention_fn": self.attention_fn, "name": "attention"}
        return nn.MultiHeadDotProductAttention(num_heads=4, **options)(x, mask=mask)


def test_lengths_of_a_declared_mask_reach_the_kernel():
    x, tokens = shape(2, 128, 256, dtype=jnp.float32), shape(2, 128, dtype=jnp.int32)
    model = jaxmp.load_recipe("bf16").replace(mask="causal+padding").wrap(Masked())
    params = jax.eval_shape(Masked().init, jax.random.key(0), x, None)

    @jax.grad
    def step(params, x, tokens):
        padding = nn.make_attention_mask(tokens > 0, tokens > 0)
        return model.apply(params, x, nn.combine_masks(nn.make_causal_mask(tokens), padding)).sum()

    report = audit(step, params, x, tokens, target="h200")
    assert sorted(row.kernel for row in report.attention) == [FORWARD, BACKWARD]


def test_a_declared_causal_mask_compiles_to_what_is_written_by_hand():
    x = shape(2, 128, 256, dtype=jnp.float32)
    params = jax.eval_shape(Masked().init, jax.random.key(0), x, None)
    recipe = jaxmp.load_recipe("bf16")

    def compiled(recipe, mask, attention_fn=nn.dot_product_attention):
        model = recipe.wrap(Masked(attention_fn))
        step = jax.grad(lambda params, x: model.apply(params, x, mask).sum())
        return audit(step, params, x, target="h200")

    mask = nn.make_causal_mask(jnp.ones((2, 128)))
    array, declared = compiled(recipe, mask), compiled(recipe.replace(mask="causal"), mask)
    by_hand = compiled(recipe, None, jaxmp.attention_fn(is_causal=True))
    assert sorted(row.kernel for row in array.attention) == MASKED
    assert [row.kernel for row in declared.attention] == [row.kernel for row in by_hand.attention]
    assert declared.memory.temporary == by_hand.memory.temporary


def test_memory_has_no_term_of_all_pairs():
    def temporary(length):
        query = shape(8192 // length, length, 8, 64)
        args = (query, query, query, {})
        return audit(gradients(is_causal=True), *args, target="h200").memory.temporary

    # The number of tokens is the same; memory for all pairs would be eight times as large.
    assert temporary(8192) <= 1.1 * temporary(1024)


def test_what_the_kernel_cannot_serve_runs_otherwise():
    query = shape(2, 256, 8, 64)
    options = {"is_causal": True, "dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
    assert kernels(gradients(**options), query, query, query, {}) == []


# ---------------------------------------------------------------------------
# Eight GPUs
# ---------------------------------------------------------------------------


def sharded(leaf, mesh, *spec):
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )


def fully_sharded(tree, mesh):
    """Shards every array of at least two dimensions along its longest one, as plain FSDP does."""

    def place(leaf):
        spec = [None] * leaf.ndim
        if leaf.ndim > 1:
            spec[max(range(leaf.ndim), key=lambda axis: leaf.shape[axis])] = "data"
        return sharded(leaf, mesh, *spec)

    return jax.tree.map(place, tree)


@pytest.mark.parametrize("framework", ["linen", "nnx"])
@EXPENSIVE
def test_fully_sharded_parameters(framework):
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    # By default, XLA shards the key over the head size, and the query over the batch.
    gpt, tokens = GPT(layers=1, width=512, heads=8), shape(16, 64, dtype=jnp.int32)
    wrap = jaxmp.load_recipe("bf16").wrap
    if framework == "linen":
        model, params = wrap(gpt), jax.eval_shape(gpt.init, jax.random.key(0), tokens)
        apply = model.apply
    else:
        make = lambda: wrap(NnxGPT(gpt, rngs=nnx.Rngs(0)))
        definition, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
        apply = lambda params, tokens: nnx.merge(definition, params, rest)(tokens)

    @jax.grad
    def gradient(params, tokens):
        return apply(params, tokens).sum()

    args = fully_sharded(params, mesh), sharded(tokens, mesh, "data")
    found = kernels(gradient, *args)
    assert {
        kernel: sum(n for k, n in found if k == kernel) for kernel, _ in found
    } == dict.fromkeys(MASKED, 1)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [(8, (64, 64)), (2, (64, 64)), (1, (64, 64)), (8, (63, 77)), (2, (63, 77))],
)
@fast_cases("8-lengths0-False", "2-lengths1-True", "1-lengths2-False", "8-lengths3-True")
def test_operands_whose_shardings_differ(explicit, heads, lengths):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    queries, keys = lengths
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    query = sharded(shape(8, queries, 8, 64), mesh, "data", None, "model" if heads > 1 else None)
    key = sharded(shape(8, keys, heads, 64), mesh, None, None, None, "data")
    value = sharded(shape(8, keys, heads, 64), mesh, "data")
    found = functools.partial(kernels, gradients(is_causal=queries == keys), query, key, value)
    lengths_of_rows = sharded(shape(8, dtype=jnp.int32), mesh)
    if queries == keys:
        assert found({"key_value_seq_lengths": lengths_of_rows}) == [(FORWARD, 1), (BACKWARD, 1)]
    else:
        assert found({}) == [(FORWARD, 1), (BACKWARD, 1)]
        mask = sharded(shape(8, 1, queries, keys, dtype=bool), mesh, "data")
        assert found({"mask": mask}) == [(name, 1) for name in MASKED]


@pytest.mark.parametrize(
    ("query_spec", "spec"),
    [((None, "model"), (None, "model")), (("model",), ())],
    ids=["sequence", "only-the-query"],
)
def test_explicit_axes_of_any_dimension_reach_the_kernel(query_spec, spec):
    mesh = AbstractMesh((8,), ("model",), axis_types=(AxisType.Explicit,))
    query = sharded(shape(8, 256, 8, 64), mesh, *query_spec)
    key = sharded(shape(8, 256, 2, 64), mesh, *spec)
    report = audit(gradients(is_causal=True), query, key, key, {}, target="h200")
    assert [(row.kernel, row.count) for row in report.attention] == [(FORWARD, 1), (BACKWARD, 1)]
    # Positions are gathered.
    assert {row.operation for row in report.collectives} == {"all-gather"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_query_heads_that_the_key_heads_cannot_follow(kind):
    mesh = AbstractMesh((8,), ("model",), axis_types=(kind,))
    query = sharded(shape(8, 256, 8, 64), mesh, None, None, "model")
    key = sharded(shape(8, 256, 2, 64), mesh)
    with pytest.raises(jaxmp.errors.AuditError, match="the 8 heads of the query") as error:
        audit(gradients(is_causal=True), query, key, key, {}, target="h200")
    assert "the 2 heads of the key; the mesh is {'model': 8}" in str(error.value)
    assert "key = jnp.repeat(key, 4, axis=-2)" in str(error.value)
    repeat = lambda array: jnp.repeat(array, 4, axis=-2)
    fn = lambda q, k, v: gradients(is_causal=True)(q, repeat(k), repeat(v), {})
    assert kernels(fn, query, key, key) == [(FORWARD, 1), (BACKWARD, 1)]
