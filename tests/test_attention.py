"""Attention: all implementations against FP64, the choice of implementation, and errors."""

import contextlib
import dataclasses
import functools
import inspect
import logging
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import jaxmp
from arrays import floats, shape
from grids import EXPENSIVE, fast_cases, pairwise
from jaxmp import dot_product_attention
from jaxmp._attention import _choice
from jaxmp._attention._arguments import arguments
from jaxmp._attention._blockwise import blockwise_attention
from jaxmp._attention._cudnn import one_sharding
from jaxmp._attention._plain import xla_attention
from jaxmp._core import _compat
from jaxmp.errors import AttentionError
from programs import named, products, trace

KEY = jax.random.key(0)


@contextlib.contextmanager
def standard():
    """Enables standard promotion of ranks and dtypes, for Flax and for references like it."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


IMPLEMENTATIONS = {
    "xla": xla_attention,
    # Blocks so small that a short sequence has many of them.
    "blockwise": functools.partial(blockwise_attention, block=16),
}


def inputs(queries, keys, heads=4, groups=4, size=8, value_size=8, dtype=jnp.float32, batch=2):
    rng = np.random.default_rng(queries * 1000 + keys)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    return (
        normal(batch, queries, heads, size),
        normal(batch, keys, groups, size),
        normal(batch, keys, groups, value_size),
    )


# ---------------------------------------------------------------------------
# FP64
# ---------------------------------------------------------------------------


def seen_by(given):
    """Returns the bool mask `[B|1, N|1, T, S]`, computed for each position separately."""
    _, _, queries, keys = given.logits_shape
    rows, columns = np.arange(queries)[:, None], np.arange(keys)[None, :]
    seen = np.ones((1, 1, queries, keys), bool)
    if given.settings.is_causal:
        seen = seen & (columns <= rows)
    if given.settings.window is not None:
        left, right = given.settings.window
        seen = seen & (columns >= rows - left) & (columns <= rows + right)
    if given.mask is not None:
        seen = seen & np.asarray(given.mask)
    for lengths, positions in ((given.query_lengths, rows), (given.key_lengths, columns)):
        if lengths is not None:
            seen = seen & (positions < np.asarray(lengths)[:, None, None, None])
    return seen


def oracle(given, d_out):
    """Returns the result and the gradients of query, key, value and bias in FP64."""
    q, k, v, d_out = (
        np.asarray(a, np.float64) for a in (given.query, given.key, given.value, d_out)
    )
    shared = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, shared, 2), np.repeat(v, shared, 2)
    logits = np.einsum("btnh,bsnh->bnts", q, k) * given.settings.scale
    if given.bias is not None:
        logits = logits + np.asarray(given.bias, np.float64)
    logits = np.where(seen_by(given), logits, -np.inf)
    most = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isneginf(most), 0, most))
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    out = np.einsum("bnts,bsnv->btnv", weights, v)
    d_weights = np.einsum("btnv,bsnv->bnts", d_out, v)
    shift = np.einsum("btnv,btnv->bnt", d_out, out)[..., None]
    d_logits = weights * (d_weights - shift)
    group = lambda a: a.reshape(*a.shape[:2], -1, shared, a.shape[3]).sum(3)
    gradients = [
        np.einsum("bnts,bsnh->btnh", d_logits, k) * given.settings.scale,
        group(np.einsum("bnts,btnh->bsnh", d_logits, q)) * given.settings.scale,
        group(np.einsum("bnts,btnv->bsnv", weights, d_out)),
    ]
    if given.bias is not None:
        axes = tuple(i for i in range(4) if given.bias.shape[i] == 1)
        gradients.append(d_logits.sum(axes, keepdims=True))
    return [out, *gradients]


def reference(given):
    """Computes attention as usual: 16-bit matmuls and weights, FP32 logits and softmax."""
    wide = jnp.promote_types(given.query.dtype, jnp.float32)
    shared = given.query.shape[2] // given.key.shape[2]
    key, value = (jnp.repeat(a, shared, 2) for a in (given.key, given.value))
    logits = jnp.einsum("btnh,bsnh->bnts", given.query, key, preferred_element_type=wide)
    logits = logits * given.settings.scale
    if given.bias is not None:
        logits = logits + given.bias.astype(wide)
    seen = jnp.asarray(seen_by(given))
    weights = jax.nn.softmax(jnp.where(seen, logits, -1e30))
    weights = jnp.where(seen.any(-1, keepdims=True), weights, 0).astype(given.query.dtype)
    return jnp.einsum("bnts,bsnv->btnv", weights, value)


def results(attend, given, d_out):
    """Returns the result and the gradients, converted to FP64 for comparison."""
    arrays = (given.query, given.key, given.value)
    arrays += () if given.bias is None else (given.bias,)

    def of(*arrays):
        names = ("query", "key", "value", "bias")
        return attend(dataclasses.replace(given, **dict(zip(names, arrays, strict=False))))

    @jax.jit
    def both(d_out, *arrays):
        out, backward = jax.vjp(of, *arrays)
        return out, *backward(d_out)

    return [np.asarray(a, np.float64) for a in both(d_out, *arrays)]


def check_errors(given, implementations=IMPLEMENTATIONS):
    """Checks that each implementation has at most twice the error of `reference`."""
    dtype = given.query.dtype
    d_out = jnp.asarray(
        np.random.default_rng(1).normal(size=(*given.query.shape[:3], given.value.shape[3])), dtype
    )
    exact = oracle(given, d_out)
    usual = results(reference, given, d_out)
    for name, attend in implementations.items():
        mine = results(attend, given, d_out)
        for what, got, want, other in zip(
            ("out", "query", "key", "value", "bias"), mine, exact, usual, strict=False
        ):
            # The reference can be exact by chance, for example for one key, where a gradient is a
            # sum over queries of differences of equal terms of order 1. Two roundings are always
            # allowed, and two FP32 roundings for each term of a sum.
            floor = 2 * float(jnp.finfo(dtype).eps) * max(np.abs(want).max(), 1)
            floor += 2 * float(jnp.finfo(jnp.float32).eps) * sum(given.logits_shape[2:])
            limit = max(2 * np.abs(other - want).max(), floor)
            assert np.isfinite(got).all(), (name, what)
            error = np.abs(got - want).max()
            assert error <= limit, f"{name} {what}: {error:.3g} of {np.abs(want).max():.3g}"


# No shrinking: each example compiles, and the first that fails is small enough to read.
GENERATE = (Phase.explicit, Phase.reuse, Phase.generate)
LENGTH = st.sampled_from([1, 2, 15, 16, 17, 40])


def drawn(lengths, heads, groups, dtype, sizes, seed, bias, mask, stated, uneven):
    """Generates the arguments of one attention call from a short description."""
    queries, keys = lengths
    size, value_size = sizes
    operands = inputs(queries, keys, heads, groups, size, value_size, dtype)
    rng = np.random.default_rng(seed)
    shape = lambda whole: [n if whole >> i & 1 else 1 for i, n in enumerate((2, heads, *lengths))]
    options = dict(stated)
    if bias is not None:
        options["bias"] = jnp.asarray(rng.normal(size=shape(bias)), jnp.float32)
    if mask is not None:
        options["mask"] = jnp.asarray(rng.random(shape(mask)) < 0.7)
    if uneven & 1:
        options["key_value_seq_lengths"] = jnp.asarray(rng.integers(0, keys + 1, 2))
    if uneven & 2:
        options["query_seq_lengths"] = jnp.asarray(rng.integers(0, queries + 1, 2))
    return arguments(*operands, **options, wide_gradients=True)


@st.composite
def calls(draw):
    """Returns a Hypothesis strategy of the arguments of one call."""
    groups = draw(st.sampled_from([1, 2]))
    stated = {"is_causal": True} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        stated["local_window_size"] = (draw(st.integers(0, 20)), draw(st.integers(0, 20)))
    # Dimensions in which a bias or mask is not broadcast: a bit for batch, heads, queries and keys.
    some = st.none() | st.integers(0, 15)
    return functools.partial(
        drawn,
        lengths=(draw(LENGTH), draw(LENGTH)),
        heads=groups * draw(st.sampled_from([1, 3])),
        groups=groups,
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        sizes=(draw(st.sampled_from([4, 8])), draw(st.sampled_from([4, 8]))),
        seed=draw(st.integers(0, 2**20)),
        bias=draw(some),
        mask=draw(some),
        stated=stated,
        uneven=draw(st.integers(0, 3)),
    )


STATED = [
    {},
    {"is_causal": True},
    {"local_window_size": (3, 2)},
    {"is_causal": True, "local_window_size": (20, 0)},
]
# Dimensions of bias and mask, as in `calls`, and the operands with lengths: keys 1, queries 2.
EXTRAS = [(None, None, 0), (15, None, 1), (None, 13, 2), (6, 9, 3)]


# Every pair of values occurs in a case, and every value in a fast one. Windows occur in a fast case
# with several blocks of queries, and with several blocks of keys; causality alone occurs with
# several blocks of queries.
FAST = {2, 6, 11, 12, 13}
ATTENTION = [
    pytest.param(*case, marks=() if number in FAST else EXPENSIVE)
    for number, case in enumerate(
        pairwise(
            STATED,
            [(17, 40), (40, 17), (2, 15)],
            EXTRAS,
            ["bfloat16", "float16", "float32"],
            [1, 2],
        )
    )
]


def test_every_value_occurs_in_a_fast_case():
    fast = [case.values for case in ATTENTION if not case.marks]
    assert [len({str(value) for value in values}) for values in zip(*fast, strict=True)] == [
        *(len(STATED), 3, len(EXTRAS), 3, 2)
    ]


@pytest.mark.parametrize(("stated", "lengths", "extras", "dtype", "groups"), ATTENTION)
def test_results_and_gradients_against_fp64(stated, lengths, extras, dtype, groups):
    bias, mask, uneven = extras
    options = dict(bias=bias, mask=mask, stated=stated, uneven=uneven)
    with standard():  # the reference is written as users write it
        check_errors(drawn(lengths, 2 * groups, groups, dtype, (8, 4), seed=0, **options))


@pytest.mark.slow
@given(calls())
@settings(max_examples=36, deadline=None, phases=GENERATE)
def test_many_results_and_gradients_against_fp64(call):
    with standard():
        check_errors(call())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "length"), [(jnp.bfloat16, 4096), (jnp.float16, 1024), (jnp.float32, 1024)]
)
def test_a_long_sequence_against_fp64(dtype, length):
    operands = inputs(length, length, heads=1, groups=1, size=32, dtype=dtype, batch=1)
    with standard():
        check_errors(arguments(*operands, is_causal=True, wide_gradients=True))


@pytest.mark.parametrize("left", [1, 16])
def test_a_window_reaches_into_the_block_before(left):
    """The first query of a block reads the last key of the block, or that of the one before."""
    stated = {"is_causal": True, "local_window_size": (left, 0)}
    options = dict(bias=None, mask=None, stated=stated, uneven=0)
    call = drawn((32, 32), 2, 2, "float32", (8, 4), seed=0, **options)
    result, expected = (IMPLEMENTATIONS[name](call) for name in ("blockwise", "xla"))
    np.testing.assert_allclose(result, expected, atol=1e-5)


# ---------------------------------------------------------------------------
# Compatibility with `jax.nn.dot_product_attention`
# ---------------------------------------------------------------------------


def test_every_argument_of_jax_has_its_name_kind_and_default():
    ours = inspect.signature(dot_product_attention).parameters
    for name, theirs in inspect.signature(jax.nn.dot_product_attention).parameters.items():
        assert (ours[name].kind, ours[name].default) == (theirs.kind, theirs.default), name


@EXPENSIVE
@pytest.mark.parametrize(
    "options",
    [
        {"scale": np.float32(0.3), "is_causal": True},
        {"scale": jnp.array([0.3]), "mask": [True] * 5 + [False] * 7},
        {"query_seq_lengths": jnp.array([3, 8]), "key_value_seq_lengths": jnp.array([5, 12])},
        {"bias": np.arange(12), "local_window_size": (np.int64(2), np.int64(1))},
    ],
    ids=lambda options: "-".join(options),
)
def test_result_residual_and_gradients_are_those_of_jax(options):
    operands = inputs(8, 12, groups=2, dtype=jnp.bfloat16)
    # JAX's masks and biases have four dimensions.
    jax_options = dict(options)
    for name in {"mask", "bias"} & set(options):
        jax_options[name] = jnp.asarray(options[name]).reshape(1, 1, 1, 12)

    def of(fn, **options):
        def loss(*operands):
            out, residual = fn(*operands, return_residual=True, **options)
            # The gradient of the residual is zero.
            return (out.astype(jnp.float32) ** 2).sum() + residual.max().astype("float32"), (
                out,
                residual,
            )

        value_and_grad = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
        (_, aux), gradients = value_and_grad(*operands)
        return *aux, *gradients

    with standard():
        expected = of(jax.nn.dot_product_attention, implementation="xla", **jax_options)
    for implementation in (None, "blockwise"):
        got = of(dot_product_attention, implementation=implementation, **options)
        for ours, theirs in zip(got, expected, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            np.testing.assert_allclose(
                np.float32(ours),
                np.float32(theirs),
                rtol=0.03,
                atol=0.03,
                err_msg=str(implementation),
            )


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
@fast_cases("blockwise")
def test_a_traced_scale_has_a_gradient(implementation):
    operands = inputs(8, 8)

    def loss(scale, fn, **options):
        return (fn(*operands, scale=scale, **options) ** 2).sum()

    got = jax.grad(loss)(0.3, dot_product_attention, implementation=implementation)
    with standard():
        expected = jax.grad(loss)(0.3, jax.nn.dot_product_attention)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_lists_and_arrays_without_elements_are_taken():
    query, key, value = (a[0] for a in inputs(2, 3, heads=1, groups=1))
    out, residual = dot_product_attention(
        query.tolist(), key.tolist(), np.asarray(value, np.float64), return_residual=True
    )
    np.testing.assert_allclose(out, dot_product_attention(query, key, value), rtol=1e-6)
    assert residual.shape == (2, 1)
    for implementation in (None, "blockwise"):
        empty = dot_product_attention(query[:0], key, value, implementation=implementation)
        assert empty.shape == (0, 1, 8)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@fast_cases("blockwise")
def test_the_residual_of_a_query_that_sees_no_key_is_finite(name):
    operands = inputs(20, 20)
    call = arguments(*operands, query_seq_lengths=jnp.array([20, 3]), return_residual=True)
    _, residual = IMPLEMENTATIONS[name](call)
    assert residual.dtype == jnp.float32 and residual.shape == (2, 20, 4)
    assert bool((residual[1, 3:] == -0.7 * jnp.finfo(jnp.float32).max).all())
    assert bool((jnp.abs(residual[0]) < 10).all())


def test_a_policy_widens_the_residual():
    operands = inputs(8, 8, dtype=jnp.bfloat16)
    fn = functools.partial(dot_product_attention, return_residual=True, implementation="xla")
    out, residual = fn(*operands, policy="c=bf16,o=f32")
    assert out.dtype == residual.dtype == jnp.float32
    # It was never rounded to 16 bits.
    assert not np.array_equal(residual, np.float32(residual.astype(jnp.bfloat16)))


@EXPENSIVE
def test_forward_mode_as_in_jax_while_the_logits_are_held():
    query, key, value = inputs(8, 8)
    ours = lambda query: dot_product_attention(query, key, value, is_causal=True)
    theirs = lambda query: jax.nn.dot_product_attention(query, key, value, is_causal=True)
    got = jax.jvp(ours, (query,), (query,))
    with standard():
        expected = jax.jvp(theirs, (query,), (query,))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------
# One sharding for the operands of cuDNN's kernel
# ---------------------------------------------------------------------------


def test_operands_get_one_sharding_and_keep_values_and_gradients():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    place = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))
    query, key, value = inputs(8, 12, groups=2)
    arrays = {
        "query": place(query, "data"),
        "key": place(key, None, None, "data"),
        "value": place(value, None, None, None, "data"),
        "bias": place(jnp.ones((1, 4, 8, 12)), None, None, "data"),
        "mask": None,
        "key_value_seq_lengths": place(jnp.array([3, 12]), "data"),
    }
    tied = jax.jit(one_sharding)(arrays)
    assert tied.pop("mask") is None
    specs = {name: array.sharding.spec for name, array in tied.items()}
    assert specs.pop("bias") == PartitionSpec()
    assert set(specs.values()) == {PartitionSpec("data")}
    for name, array in tied.items():
        np.testing.assert_array_equal(array, arrays[name])

    def loss(query, key, value):
        over_batch = jax.vmap(one_sharding)({"query": query, "key": key, "value": value})
        return (over_batch["query"] ** 2).sum() + 3 * over_batch["key"].sum()

    batched = [jnp.stack([a, a]) for a in (query, key, value)]
    d_query, d_key, d_value = jax.jit(jax.grad(loss, (0, 1, 2)))(*batched)
    np.testing.assert_array_equal(d_query, 2 * batched[0])
    assert bool((d_key == 3).all()) and not d_value.any()


# ---------------------------------------------------------------------------
# Queries that see no key, and logits that overflow float16
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("how", ["mask", "bias", "lengths"])
@fast_cases("mask-xla", "lengths-xla", "bias-blockwise")
def test_a_query_that_sees_no_key_gives_zero_and_no_gradient(name, how):
    operands = inputs(20, 20, dtype=jnp.bfloat16)
    blind = np.zeros((2, 1, 20, 20), bool)
    blind[1, :, 3] = True
    if how == "mask":
        options = {"mask": jnp.asarray(~blind)}
    elif how == "bias":
        options = {"bias": jnp.where(blind, -jnp.inf, 0.0)}
    else:
        options = {"query_seq_lengths": jnp.array([20, 3])}
    call = arguments(*operands, **options)
    out, d_query, *others = results(IMPLEMENTATIONS[name], call, jnp.ones_like(operands[0]))
    assert not out[1, 3].any() and not d_query[1, 3].any()
    assert out[0, 3].any() and out[1, 2].any()
    assert all(np.isfinite(other).all() for other in others[:2])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_float16_logits_beyond_65504_stay_finite(name):
    query, key, value = inputs(20, 20, dtype=jnp.float16)
    call = arguments(300 * query, 300 * key, value, scale=1.0)
    logits = np.einsum(
        "btnh,bsnh->bnts", *(np.asarray(a, np.float64) for a in (call.query, call.key))
    )
    assert np.abs(logits).max() > 2 * 65504
    out, *gradients = results(IMPLEMENTATIONS[name], call, jnp.ones_like(query))
    np.testing.assert_allclose(out, oracle(call, jnp.ones_like(query))[0], rtol=2e-3, atol=2e-3)
    assert all(np.isfinite(a).all() for a in gradients)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@fast_cases("blockwise")
def test_a_nan_is_not_hidden(name):
    query, key, value = inputs(20, 20)
    call = arguments(query.at[0, 5].set(jnp.nan), key, value, is_causal=True)
    out = IMPLEMENTATIONS[name](call)
    assert bool(jnp.isnan(out[0, 5]).all()) and bool(jnp.isfinite(out[0, 4]).all())


# ---------------------------------------------------------------------------
# Dropout
# ---------------------------------------------------------------------------


def dropped(name, rate=0.25, keys=48, broadcast=False):
    """Returns the weights `[B, N, T, S]` after dropout, by using unit vectors as values."""
    query, key, _ = inputs(keys, keys, heads=2, groups=2)
    value = jnp.broadcast_to(jnp.eye(keys)[None, :, None, :], (2, keys, 2, keys))
    options = {"dropout_rate": rate, "dropout_rng": KEY, "broadcast_dropout": broadcast}

    @jax.jit
    def weights():
        attend = IMPLEMENTATIONS[name]
        kept = attend(arguments(query, key, value, **options))
        return kept, attend(arguments(query, key, value))

    return [array.transpose(0, 2, 1, 3) for array in weights()]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@fast_cases("blockwise")
def test_dropout_drops_its_share_and_scales_the_rest(name):
    kept, whole = dropped(name)
    gone = kept == 0
    # For 9216 weights, the standard deviation of the share is 0.0045.
    assert abs(float(gone.mean()) - 0.25) < 0.02
    np.testing.assert_allclose(kept[~gone], (whole / 0.75)[~gone], rtol=1e-5)
    assert bool((gone[0] != gone[1]).any())


@EXPENSIVE
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_broadcast_dropout_is_one_mask_for_all_heads(name):
    kept, _ = dropped(name, broadcast=True)
    gone = kept == 0
    assert bool((gone == gone[:1, :1]).all()) and bool(gone.any())


@EXPENSIVE
def test_blockwise_dropout_drops_the_same_weights_backward():
    query, key, value = inputs(40, 40)
    call = lambda v: arguments(query, key, v, dropout_rate=0.5, dropout_rng=KEY)
    attend = jax.jit(lambda v: IMPLEMENTATIONS["blockwise"](call(v)))
    out, backward = jax.vjp(attend, value)
    weights = jnp.asarray(np.random.default_rng(2).normal(size=out.shape), jnp.float32)
    (d_value,) = backward(weights)
    # The result is linear in the values: <w, A v> = <A^T w, v>.
    np.testing.assert_allclose((weights * out).sum(), (d_value * value).sum(), rtol=1e-4)


# ---------------------------------------------------------------------------
# Transformations
# ---------------------------------------------------------------------------


def loss(query, key, value, **options):
    options = {"implementation": "blockwise", "is_causal": True} | options
    return (dot_product_attention(query, key, value, **options) ** 2).sum()


@EXPENSIVE
def test_vmap_scan_and_checkpoint_agree():
    query, key, value = inputs(20, 20)
    want = jax.grad(loss)(query, key, value)
    stacked = [jnp.stack([a, 2 * a]) for a in (query, key, value)]
    got = jax.vmap(jax.grad(loss))(*stacked)
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.grad(jax.checkpoint(loss))(query, key, value), want, rtol=1e-5)

    def body(carry, _):
        return carry + jax.grad(loss)(query, key, value), None

    # In the compiled program, FP32 sums of 20 terms of order 1 have another order.
    summed, _ = jax.lax.scan(body, jnp.zeros_like(query), length=2)
    np.testing.assert_allclose(summed, 2 * want, rtol=1e-5, atol=1e-5)


@EXPENSIVE
def test_second_derivatives_of_blocks_agree_with_the_whole():
    query, key, value = inputs(6, 6, heads=1, groups=1, size=4, value_size=4, batch=1)

    def second(implementation):
        first = jax.grad(functools.partial(loss, implementation=implementation))
        return jax.grad(lambda q: (first(q, key, value) ** 2).sum())(query)

    np.testing.assert_allclose(second("blockwise"), second("xla"), rtol=1e-4, atol=1e-5)


def test_blocks_in_64_bit_mode():
    query, key, value = inputs(40, 40, dtype=jnp.bfloat16, heads=1, groups=1, batch=1)
    bias = jnp.ones((1, 1, 1, 40), jnp.bfloat16)
    call = arguments(query, key, value, bias, is_causal=True)
    attend = IMPLEMENTATIONS["blockwise"]
    wanted = results(attend, call, jnp.ones_like(query))
    with jax.enable_x64(True):
        found = results(attend, call, jnp.ones_like(query))
    for result, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(result, want)


def test_blocks_under_shard_map():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    query, key, value = inputs(20, 20)
    want = jax.grad(loss)(query, key, value)
    spec = PartitionSpec("data")
    sharded = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)
    np.testing.assert_allclose(sharded(query, key, value), want, rtol=1e-5, atol=1e-6)


def test_layers_of_one_shape_are_traced_once():
    query, key, value = inputs(8, 8)

    def layers(q):
        for _ in range(3):
            q = dot_product_attention(q, key, value)
        return q

    found = [e for e in named(trace(layers, query), "jit", "pjit") if "jaxmp" in e.params["name"]]
    names = [e.params["name"] for e in found]
    assert names == ["jaxmp_attention_xla_device"] * 3
    assert len({id(e.params["jaxpr"]) for e in found}) == 1


# ---------------------------------------------------------------------------
# The choice
# ---------------------------------------------------------------------------


QUERY = shape(2, 64, 8, 64)


@pytest.fixture
def gpu(monkeypatch):
    """Simulates a machine with cuDNN and an H100; nothing is compiled."""
    monkeypatch.setattr(_compat, "cudnn_version", lambda: 91200)
    monkeypatch.setattr(_compat, "compute_capability", lambda: (9, 0))
    with _compat.context(target="gpu"):
        yield


def choice(*args, **options):
    return jaxmp.explain(jaxmp.dot_product_attention)(*args, **options).attention[0]


def blockers(*args, **options):
    return [blocker.argument for blocker in choice(*args, **options).rows]


def test_a_cpu_takes_the_whole_while_it_is_small():
    small, large = choice(QUERY, QUERY, QUERY), shape(2, 4096, 8, 64)
    assert small.implementation == "xla" and "0.2 MiB" in small.reason
    assert choice(large, large, large).implementation == "blockwise"
    assert blockers(QUERY, QUERY, QUERY) == ["device"]


def test_a_gpu_takes_cudnn(gpu):
    for options in (
        {},
        {"is_causal": True},
        {"local_window_size": (16, 0)},
        {"local_window_size": 16, "is_causal": True},
        {"key_value_seq_lengths": shape(2, dtype=jnp.int32)},
        {"mask": shape(1, 1, 1, 64, dtype=bool)},
        {"bias": shape(8, 64, 64)},
    ):
        chosen = choice(QUERY, QUERY, QUERY, **options)
        assert chosen.implementation == "cudnn", str(chosen)


def test_blocks_of_symbolic_sizes_are_refused():
    query = shape(*jax.export.symbolic_shape("batch, 64, 4, 64"))
    with pytest.raises(AttentionError, match="are symbolic"):
        choice(query, query, query, implementation="blockwise")


@pytest.mark.parametrize(
    ("query", "options", "blocker"),
    [
        (shape(2, 64, 8, 64, dtype=jnp.float32), {}, "policy"),
        (shape(2, 64, 8, 264), {}, "query"),
        (QUERY, {"dropout_rate": 0.1, "dropout_rng": KEY}, "dropout_rate"),
        (QUERY, {"local_window_size": (16, 16)}, "local_window_size"),
        (QUERY, {"bias": shape(8, 64, 64, dtype=jnp.float32)}, "bias"),
    ],
)
def test_what_cudnn_cannot_serve_is_named_and_refused(gpu, query, options, blocker):
    assert blockers(query, query, query, **options) == [blocker]
    chosen = choice(query, query, query, **options)
    assert chosen.implementation == "xla" and chosen.rows[0].change
    message = rf"does not support this call:\n  {blocker}: .*\n.*auto"
    with pytest.raises(AttentionError, match=message):
        choice(query, query, query, implementation="cudnn", **options)


def test_heads_are_padded_where_that_buys_the_kernel(gpu):
    query, value = shape(2, 64, 8, 20), shape(2, 64, 8, 12)
    chosen = choice(query, query, value)
    assert chosen.implementation == "cudnn" and "12 and 20 are padded to 24" in chosen.notes[0]


def test_a_note_names_automatic_axes_that_key_heads_cannot_follow(gpu):
    """XLA chooses the shardings after the kernel has been chosen, so that nothing can fall back."""
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    notes = []

    def note(query, key):
        notes.append(choice(query, key, key, is_causal=True).notes)

    whole = lambda heads: jax.ShapeDtypeStruct(
        (2, 64, heads, 64), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
    )
    jax.eval_shape(note, whole(8), whole(2))
    jax.eval_shape(note, whole(8), whole(4))
    assert "if XLA splits the 8 heads over {'model': 4}" in notes[0][0]
    assert "key = jnp.repeat(key, 4, axis=-2)" in notes[0][0]
    assert notes[1] == ()


def test_without_cudnn_or_on_an_old_gpu(gpu, monkeypatch):
    with _compat.context(capability=(7, 0)):
        assert blockers(QUERY, QUERY, QUERY) == ["device"]
    monkeypatch.setattr(_compat, "compute_capability", lambda: None)
    large = shape(2, 64, 8, 192)
    assert blockers(large, large, large) == ["query"]
    monkeypatch.setattr(_compat, "cudnn_version", lambda: None)
    assert "no cuDNN" in choice(QUERY, QUERY, QUERY).rows[0].reason


def test_a_choice_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(_choice, "_logged", set())
    query, key, value = inputs(4, 4)
    with caplog.at_level(logging.INFO, "jaxmp.attention"):
        for _ in range(2):
            dot_product_attention(query, key, value)
    assert len(caplog.records) == 1 and "attention runs as xla" in caplog.text


@pytest.mark.parametrize(
    ("implementation", "length", "level"),
    [("auto", 2048, "WARNING"), ("blockwise", 2048, "INFO"), ("auto", 4, "INFO")],
)
def test_a_slow_choice_of_the_library_is_a_warning(
    caplog, monkeypatch, implementation, length, level
):
    monkeypatch.setattr(_choice, "_logged", set())
    monkeypatch.setattr(_compat, "target", lambda: "gpu")
    shape = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
    attend = functools.partial(dot_product_attention, implementation=implementation)
    with caplog.at_level(logging.INFO, "jaxmp.attention"):
        jax.eval_shape(attend, shape, shape, shape)
    assert [record.levelname for record in caplog.records] == [level]


# ---------------------------------------------------------------------------
# Policies and errors
# ---------------------------------------------------------------------------


def test_a_policy_casts_operands_and_result():
    query, key, value = inputs(4, 4)
    assert dot_product_attention(query, key, value, policy="bfloat16").dtype == jnp.bfloat16
    out = dot_product_attention(query, key, value, policy="c=f16,o=f32")
    assert out.dtype == jnp.float32
    got = trace(functools.partial(dot_product_attention, policy="c=f16,o=f32"), query, key, value)
    (first, *_) = named(got, "dot_general")
    assert {v.aval.dtype.name for v in first.invars} == {"float16"}


def test_without_a_batch():
    query, key, value = (a[0] for a in inputs(4, 6))
    out = dot_product_attention(query, key, value, is_causal=True)
    batched = dot_product_attention(query[None], key[None], value[None], is_causal=True)
    np.testing.assert_array_equal(out, batched[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": shape(2, 64, 8, 64, dtype=jnp.float32)}, "share a dtype.*policy='float32'"),
        (dict.fromkeys(["query", "key", "value"], shape(2, 8, 8, 64, dtype=bool)), "Allowed:"),
        ({"query": shape(64, 64)}, r"query has shape \(64, 64\)"),
        ({"query": shape(3, 64, 8, 64)}, "batches differ"),
        ({"query": shape(2, 64, 8, 32)}, "head size"),
        ({"query": shape(2, 64, 12, 64)}, "cannot share 8 key heads"),
        ({"value": shape(2, 63, 8, 64)}, "key and value differ"),
        ({"key": shape(2, 0, 8, 64), "value": shape(2, 0, 8, 64)}, "is 0"),
        ({"mask": shape(2, 8, 64, 64)}, "not bool.*bias=mask"),
        ({"mask": shape(2, 3, 64, 64, dtype=bool)}, "does not broadcast"),
        ({"bias": shape(64, 64, dtype=bool)}, "mask=mask"),
        ({"key_value_seq_lengths": np.array([3, 65])}, "between 0 and the 64"),
        ({"query_seq_lengths": np.array([3.0, 5.0])}, "integers"),
        ({"query_seq_lengths": np.array([3])}, "one for each of the 2"),
        ({"scale": np.ones(2)}, "one element"),
        ({"scale": "0.1"}, "not a number"),
        ({"scale": float("inf")}, "not finite"),
        ({"is_causal": 1}, "neither True nor False"),
        ({"local_window_size": (1, 2, 3)}, "pair"),
        ({"local_window_size": -1}, "not negative"),
        ({"local_window_size": 1.5}, "neither an integer nor a pair"),
        ({"dropout_rate": 1.0}, "not a number with 0 <= dropout_rate < 1"),
        ({"dropout_rate": 0.5}, "dropout_rng=jax.random.key"),
        ({"implementation": "flash"}, "implementation='flash'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(changes, words):
    operands = {"query": QUERY, "key": QUERY, "value": QUERY, **changes}
    is_shape = lambda value: isinstance(value, jax.ShapeDtypeStruct)
    operands = {
        name: jnp.zeros(value.shape, value.dtype) if is_shape(value) else value
        for name, value in operands.items()
    }
    with pytest.raises(AttentionError, match=f"(?s){words}"):
        dot_product_attention(**operands)


# ---------------------------------------------------------------------------
# Flax
# ---------------------------------------------------------------------------

LAYERS = [nn.dot_product_attention, nnx.dot_product_attention]


@EXPENSIVE
@pytest.mark.parametrize("flax", LAYERS, ids=["linen", "nnx"])
def test_a_function_for_layers_computes_what_flax_computes_with_a_mask(flax):
    plain = inputs(12, 12)
    stacked = tuple(jnp.stack([a, a / 2, a / 3]) for a in plain)
    causal = jnp.tri(12, dtype=bool)[None, None]
    window = causal & (jnp.arange(12)[None, :] >= jnp.arange(12)[:, None] - 3)[None, None]
    blockwise = functools.partial(jaxmp.attention_fn, implementation="blockwise")
    for operands, got, mask in (
        (plain, blockwise(is_causal=True)(*plain), causal),
        (plain, blockwise(local_window_size=(3, 0))(*plain), window),
        (stacked, jaxmp.attention_fn()(*stacked, mask=causal[None]), causal[None]),
    ):
        with standard():
            want = flax(*operands, mask=mask)
        assert got.shape == operands[0].shape
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def attention_names(fn, *args):
    """Returns the attention implementations that a traced program contains."""
    found = [e.params.get("name", "") for e in named(trace(fn, *args), "jit", "pjit")]
    return {name.split("_")[2] for name in found if str(name).startswith("jaxmp_attention")}


def linen_names(policies, **fields):
    layer = nn.MultiHeadDotProductAttention(num_heads=2, **fields)
    x = floats(2, 6, 8)
    model = jaxmp.load_recipe(policies).wrap(layer)
    variables = jax.eval_shape(layer.init, KEY, x)
    return attention_names(model.apply, variables, x)


def nnx_names(policies, **fields):
    layer = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0), decode=False, **fields)
    return attention_names(jaxmp.load_recipe(policies).wrap(layer), floats(2, 6, 8))


@pytest.mark.parametrize("names", [linen_names, nnx_names])
def test_a_policy_chooses_the_implementation(names):
    assert names("c=bf16") == {"xla"}
    assert names("c=bf16,implementation=blockwise") == {"blockwise"}
    assert names("c=f32") == set()  # bit-identical to Flax
    assert names("c=f32,implementation=blockwise") == {"blockwise"}
    rule = jaxmp.Rule("", "implementation=xla")
    assert names(jaxmp.PolicyMap("c=bf16,implementation=blockwise", (rule,))) == {"xla"}


@pytest.mark.parametrize("names", [linen_names, nnx_names])
def test_a_policy_fills_in_what_a_layer_leaves_open(names):
    policies = "c=bf16,implementation=blockwise"
    assert names(policies, attention_fn=jaxmp.attention_fn()) == {"blockwise"}
    own = jaxmp.attention_fn(implementation="xla")
    assert names(policies, attention_fn=own) == {"xla"}


def test_a_recipe_says_it_in_toml(write):
    text = 'extends = "bf16"\n[attention]\nimplementation = "blockwise"\n'
    recipe = jaxmp.load_recipe(write(text))
    assert recipe.policies.default.implementation == "blockwise"
    assert jaxmp.load_recipe(write(recipe.to_toml())).policies == recipe.policies
    assert jaxmp.get_policy(str(recipe.policies.default)) == recipe.policies.default


def test_weights_that_are_asked_for_are_held_or_refused():
    x = floats(2, 6, 8)
    layer = nn.MultiHeadDotProductAttention(num_heads=2)
    variables = layer.init(KEY, x)
    sown = functools.partial(layer.apply, sow_weights=True, mutable=["intermediates"])
    assert sown(variables, x)[1]["intermediates"]
    model = jaxmp.load_recipe("c=bf16,implementation=blockwise").wrap(layer)
    with pytest.raises(AttentionError, match="sow_weights requires the attention weights"):
        model.apply(variables, x, sow_weights=True, mutable=["intermediates"])


def test_a_function_is_told_by_what_it_states_and_pickles():
    make = jaxmp.attention_fn
    mine = make(is_causal=True, local_window_size=[3, 0])
    assert (
        pickle.loads(pickle.dumps(mine)) == mine == make(is_causal=True, local_window_size=(3, 0))
    )
    assert hash(mine) != hash(make()) and mine != make()


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
def test_the_backward_pass_multiplies_at_the_precision_of_the_forward_pass(implementation):
    def fn(query, key, value):
        # A recipe sets this while its module runs; the backward pass is traced later.
        with jax.default_matmul_precision("highest"):
            out = dot_product_attention(
                query, key, value, is_causal=True, implementation=implementation
            )
        return out.sum()

    found = products(trace(jax.grad(fn, (0, 1, 2)), *inputs(32, 32)))
    assert len(found) >= 6
    assert {equation.params["precision"] for equation in found} == {
        (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    }
