"""FP8 attention: numbers of its emulation, the choice of scales, what it refuses, what compiles."""

import collections
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from gpu_compiler import needs_compiler
from jaxmp import audit, cli, dot_product_attention, explain_attention
from jaxmp._attention import MARK, _choice, _fp8, _fp8_emulation, implementation_of
from jaxmp._core import _compat
from jaxmp._core._compat import context
from jaxmp.errors import AttentionError
from programs import named, trace

HEAD = 128
FP8 = functools.partial(dot_product_attention, implementation="cudnn_fp8")
PARTS = ("out", "query", "key", "value")


def shapes(queries=256, keys=256, heads=2, groups=1, size=HEAD, batch=1, dtype=jnp.bfloat16):
    query = jax.ShapeDtypeStruct((batch, queries, heads, size), dtype)
    key = jax.ShapeDtypeStruct((batch, keys, groups, size), dtype)
    return query, key, key


def operands(seed=0, **sizes):
    """Query, key, value and the result's gradient, from the normal distribution."""
    query, key, value = shapes(**sizes)
    keys = jax.random.split(jax.random.key(seed), 4)
    given = zip(keys, (query, key, value, query), strict=True)
    return [jax.random.normal(rng, like.shape, like.dtype) for rng, like in given]


def results(query, key, value, d_out, is_causal=True):
    """The result and the gradients of query, key and value."""
    return _results(query, key, value, d_out, is_causal)


# Compiled once for all tests of one shape: that takes far longer than to run it.
@functools.partial(jax.jit, static_argnums=4)
def _results(query, key, value, d_out, is_causal):
    out, pull = jax.vjp(functools.partial(FP8, is_causal=is_causal), query, key, value)
    return out, *pull(d_out)


def oracle(query, key, value, d_out, is_causal):
    """The same in FP64, written by hand."""
    query, key, value, d_out = (np.asarray(a, np.float64) for a in (query, key, value, d_out))
    groups, scale = key.shape[2], query.shape[-1] ** -0.5
    shared = query.shape[2] // groups
    key, value = np.repeat(key, shared, 2), np.repeat(value, shared, 2)
    logits = np.einsum("btnh,bsnh->bnts", query, key) * scale
    if is_causal:
        logits = np.where(np.tri(*logits.shape[-2:], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = np.einsum("btnh,bsnh->bnts", d_out, value)
    d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * scale
    d_key = np.einsum("bnts,btnh->bsnh", d_logits, query)
    d_value = np.einsum("bnts,btnh->bsnh", weights, d_out)
    joined = lambda a: a.reshape(*a.shape[:2], groups, shared, -1).sum(3)
    out = np.einsum("bnts,bsnh->btnh", weights, value)
    return out, np.einsum("bnts,bsnh->btnh", d_logits, key), joined(d_key), joined(d_value)


def decibels(found, exact, parts=PARTS):
    """Power of the error over that of what is exact, by part."""
    square = lambda a: np.mean(np.square(a))
    errors = {}
    for part, one, other in zip(parts, found, exact, strict=True):
        ratio = square(np.asarray(one, np.float64) - other) / square(other)
        errors[part] = round(float(10 * np.log10(ratio)), 1)
    return errors


# ---------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------

PLAIN = {"out": -24, "query": -22.3, "key": -22.3, "value": -24}


def scaled(*factors):
    return lambda *arrays: [a * f for a, f in zip(arrays, factors, strict=True)]


# Largest errors in dB, a little above what was measured on a CPU. E4M3 alone, with its 4 digits,
# errs by -31.5 dB where nothing is lost; a product of two of them, and sums of such, by -25.
CASES = {
    "normal": (scaled(1, 1, 1, 1), PLAIN),
    "large": (scaled(1, 1, 1e15, 1e15), PLAIN),
    "tiny": (scaled(1, 1, 1e-15, 1e-20), PLAIN),
    "query and key tiny": (scaled(1e-18, 1e-18, 1, 1), PLAIN),
    "query large, key tiny": (scaled(1e20, 1e-20, 1, 1), PLAIN),
    # The rounding of a logit is what it is of 9, and shifts weights by as much.
    "sharp": (scaled(3, 3, 1, 1), {"out": -18.7, "query": -12.5, "key": -12.5, "value": -18.5}),
    # All keys are rounded by what their mean is, while only differences between them count.
    "keys with a mean": (
        lambda q, k, v, d: (q, k + 4, v, d),
        {"out": -18, "query": -11.7, "key": -17.3, "value": -18},
    ),
    "one gradient for all": (
        lambda q, k, v, d: (q, k, v, d * 0 + 2),
        {"out": -24, "query": -22.5, "key": -24, "value": -30},
    ),
    # Of every operand one number is 50 times as large as the others.
    "outliers": (
        lambda *arrays: [a.at[0, 7, 0, 5].set(50) for a in arrays],
        {"out": -18.7, "query": -15.2, "key": -12.8, "value": -22},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "is_causal",
    [pytest.param(True, id="causal"), pytest.param(False, marks=pytest.mark.slow, id="full")],
)
def test_errors_against_fp64(name, is_causal):
    change, allowed = CASES[name]
    # Strict promotion: factors take the dtype of the arrays.
    arrays = [a.astype(jnp.bfloat16) for a in change(*operands())]
    found = decibels(results(*arrays, is_causal=is_causal), oracle(*arrays, is_causal))
    assert all(found[part] <= allowed[part] for part in PARTS), found


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_the_dtype_is_that_of_the_operands(dtype):
    query, key, value = shapes(dtype=dtype)
    assert [a.dtype for a in jax.eval_shape(results, query, key, value, query)] == [dtype] * 4


@pytest.mark.slow
def test_float16_and_uneven_lengths():
    arrays = operands(queries=128, keys=384, heads=4, groups=2, batch=2, dtype=jnp.float16)
    found = results(*arrays, is_causal=False)
    errors = decibels(found, oracle(*arrays, False))
    assert all(errors[part] <= PLAIN[part] for part in PARTS), errors


@pytest.mark.slow
def test_errors_do_not_grow_with_the_length():
    arrays = operands(queries=2048, keys=2048, heads=1)
    errors = decibels(results(*arrays), oracle(*arrays, True))
    assert all(errors[part] <= PLAIN[part] for part in PARTS), errors


def test_powers_of_two_change_no_digit():
    query, key, value, d_out = operands()
    plain = results(query, key, value, d_out)
    other = results(query * 2.0**9, key * 2.0**-9, value * 2.0**50, d_out * 2.0**-70)
    for one, two, exponent in zip(plain, other, (50, -29, -11, -70), strict=True):
        np.testing.assert_array_equal(one * 2.0**exponent, two)


def test_the_result_without_gradients_is_the_same():
    *arrays, d_out = operands()
    np.testing.assert_array_equal(FP8(*arrays, is_causal=True), results(*arrays, d_out)[0])


@pytest.fixture
def gpu(monkeypatch):
    """As on a machine with cuDNN and an H100; nothing is compiled."""
    monkeypatch.setattr(_choice, "cudnn_version", lambda: 91200)
    monkeypatch.setattr(_choice, "compute_capability", lambda: (9, 0))
    with context(target="gpu", capability=(9, 0)):
        yield


# ---------------------------------------------------------------------------
# Scales
# ---------------------------------------------------------------------------

# The order in which XLA gives the positions of the backward kernel's operands their names.
XLA_ORDER = (
    *("descale_q", "descale_k", "descale_v", "descale_s", "descale_o", "descale_dO"),
    *("descale_dP", "scale_s", "scale_dP", "scale_dQ", "scale_dK", "scale_dV"),
)


STATIC = _fp8._Static(HEAD**-0.5, is_causal=False, emulated=True)


@pytest.fixture(scope="module")
def saved():
    """Operands, and what the backward pass is given."""
    arrays = operands(queries=128, keys=128)
    forward = jax.jit(functools.partial(_fp8._forward, STATIC, True))
    return arrays, forward(*arrays[:3])[1]


def gradients_of_one_run(saved, d_out):
    """Of the kernel; traced anew at each call, so under whatever is patched."""

    def run(saved, d_out):
        lift, number = jnp.int32(2), jnp.int32(1)
        guess = _fp8._first_guess(STATIC, saved, d_out, lift)
        return _fp8._kernel(STATIC, saved, saved.out, d_out, lift, guess, number).gradients

    return jax.jit(run)(saved, d_out.astype(saved.out.dtype))


def in_xlas_order(scales):
    pairs = zip(_compat.FP8_BACKWARD_SCALES, XLA_ORDER, strict=True)
    return {theirs: scales[ours] for ours, theirs in pairs}


def test_scales_are_right_in_either_order(monkeypatch, saved):
    (*_, d_out), kept = saved
    plain = gradients_of_one_run(kept, d_out)
    monkeypatch.setattr(_fp8_emulation, "backward", permuted := swapped(_fp8_emulation.backward))
    for one, two in zip(plain, gradients_of_one_run(kept, d_out), strict=True):
        assert np.asarray(one, np.float32).any()
        np.testing.assert_array_equal(one, two)
    assert permuted.calls == 1


def swapped(backward):
    """The backward kernel as XLA reads its operands."""

    def read(*args, **options):
        *others, scales = args
        read.calls += 1
        assert set(XLA_ORDER) == set(scales) == set(_compat.FP8_BACKWARD_SCALES)
        return backward(*others, in_xlas_order(scales), **options)

    read.calls = 0
    return read


def test_the_order_matters_where_scales_differ(saved):
    (*_, d_out), kept = saved
    scales = {name: jnp.float32(2.0**n) for n, name in enumerate(_compat.FP8_BACKWARD_SCALES)}
    d_out = d_out.astype(kept.out.dtype)
    operands = kept.query.data, kept.key.data, kept.value.data
    run = jax.jit(
        lambda scales: _fp8_emulation.backward(
            operands, kept.out, d_out, kept.logsumexp, scales, scale=1.0, is_causal=True
        )
    )
    assert not np.array_equal(run(scales)[3:], run(in_xlas_order(scales))[3:])


def test_the_gpus_kernel_is_given_scales_that_may_change_places(gpu):
    query, key, value = shapes()
    loss = lambda *args: FP8(*args).astype("float32").sum()
    program = trace(jax.grad(loss, (0, 1, 2)), query, key, value)
    calls = named(program, "dot_product_attention_fp8_bwd_wrapper")
    makers = {var: equation for equation in program for var in equation.outvars}

    def source(var):
        maker = None if hasattr(var, "val") else makers.get(var)
        shaped = maker is not None and maker.primitive.name in ("reshape", "broadcast_in_dim")
        return source(maker.invars[0]) if shaped else getattr(var, "val", var)

    assert len(calls) == 2  # one in the loop
    for call in calls:
        e4m3, rows, *scales = call.invars[:5], call.invars[5], *call.invars[6:]
        assert {var.aval.dtype for var in e4m3} == {jnp.dtype("float8_e4m3fn")}
        assert rows.aval.shape == (1, 2, 256)
        assert {var.aval.shape for var in scales} == {(1, 1, 1, 1)}
        made = dict(zip(_compat.FP8_BACKWARD_SCALES, map(source, scales), strict=True))
        assert made["descale_o"] is made["descale_dO"] is made["descale_s"]
        assert made["scale_dQ"] is made["scale_dK"] is made["scale_dV"] is made["scale_dP"]
        assert made["descale_q"] is not made["descale_k"]


@pytest.fixture(scope="module")
def guessed(saved):
    """Gradients, and how often the kernel ran, after a first guess that is too high by octaves."""
    (*_, d_out), kept = saved

    def run(kept, d_out, octaves, most):
        first, kernel, seen = _fp8._first_guess, _fp8._kernel, []

        def counted(*args):
            done = kernel(*args)
            jax.debug.callback(lambda n: calls.append(int(n)), done.number)
            return done

        with pytest.MonkeyPatch.context() as patch:
            wrong = lambda *args: _fp8._Exponents(*(n + octaves for n in first(*args)))
            patch.setattr(_fp8, "_first_guess", wrong)
            patch.setattr(_fp8, "_kernel", counted)
            patch.setattr(_fp8, "_RUNS", most)
            return _fp8._backward(STATIC, True, kept, d_out), seen

    calls: list[int] = []
    jitted = jax.jit(lambda *args: run(*args)[0])

    def call(octaves, most=_fp8._RUNS):
        calls.clear()
        gradients = jax.block_until_ready(jitted(kept, d_out, jnp.int32(octaves), jnp.int32(most)))
        jax.effects_barrier()
        return gradients, max(calls)

    return call


@pytest.mark.parametrize(("octaves", "runs"), [(0, 1), (12, 2), (-8, 2), (-30, 3)])
def test_a_wrong_guess_is_put_right_by_another_run(saved, guessed, octaves, runs):
    arrays, _ = saved
    gradients, ran = guessed(octaves)
    errors = decibels(gradients, oracle(*arrays, False)[1:], PARTS[1:])
    assert all(errors[part] <= PLAIN[part] for part in PARTS[1:]), errors
    assert ran == runs


def test_a_gradient_that_saturates_to_the_last_is_nan(guessed):
    gradients, ran = guessed(12, most=1)
    assert ran == 1 and all(np.isnan(gradient).all() for gradient in gradients)


@pytest.mark.slow
def test_a_key_that_all_queries_attend_to():
    # A sink: its gradient is many times what the others' are.
    query, key, value, d_out = operands()
    query, key = query + 0.5, key.at[:, 0].set(1.5)
    arrays = (query, key, value.at[:, 0].multiply(0.01), d_out)
    errors = decibels(results(*arrays, is_causal=False), oracle(*arrays, False))
    assert max(errors["query"], errors["key"]) <= -18 and errors["value"] <= -26, errors


# ---------------------------------------------------------------------------
# What is not finite, and zeros
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", range(4), ids=["query", "key", "value", "d_out"])
def test_what_is_not_finite_is_not_hidden(bad, which):
    arrays = operands()
    arrays[which] = arrays[which].at[0, 3, 0, 5].set(bad)
    out, *gradients = results(*arrays)
    assert all(np.isnan(g).all() for g in gradients)
    assert np.isfinite(out).all() if which == 3 else np.isnan(out).all()


@pytest.mark.parametrize("which", range(4), ids=["query", "key", "value", "d_out"])
def test_zeros_give_what_zeros_give(which):
    arrays = operands()
    arrays[which] = jnp.zeros_like(arrays[which])
    for one, other in zip(results(*arrays), oracle(*arrays, True), strict=True):
        assert np.isfinite(one).all()
        largest = np.abs(other).max()
        np.testing.assert_allclose(np.float64(one), other, atol=max(largest, 1e-3) / 8)


# ---------------------------------------------------------------------------
# Transformations
# ---------------------------------------------------------------------------


def test_vmap_is_a_larger_batch():
    query, key, value, _ = operands(batch=2, queries=128, keys=128)
    apart = [a[:, None] for a in (query, key, value)]
    np.testing.assert_array_equal(FP8(query, key, value), jax.vmap(FP8)(*apart)[:, 0])
    axes = jax.vmap(results, in_axes=(0, None, None, 0))
    shared = jax.eval_shape(axes, apart[0], key[:1], value[:1], apart[0])
    assert [a.shape for a in shared] == [(2, 1, 128, n, HEAD) for n in (2, 2, 1, 1)]


@pytest.mark.slow
def test_vmap_of_a_choice_between_calls():
    arrays = operands(batch=2, queries=128, keys=128)

    def chosen(flag, query, key, value, d_out):
        attend = lambda scale: lambda q: FP8(q * scale, key, value)
        _, pull = jax.vjp(lambda q: jax.lax.cond(flag, attend(1), attend(2), q), query)
        return pull(d_out)[0]

    apart = [a[:, None] for a in arrays]
    flags = jnp.array([True, False])
    together = jax.vmap(chosen)(flags, *apart)
    # Its scales differ between examples, which go through the kernel one after the other.
    program = trace(jax.vmap(chosen), flags, *apart)
    assert {e.params["length"] for e in named(program, "scan")} == {2}
    for n in range(2):
        one = np.float64(chosen(flags[n], *(a[n] for a in apart)))
        assert np.linalg.norm(one - np.float64(together[n])) <= 0.1 * np.linalg.norm(one)


@pytest.mark.slow
def test_under_shard_map():
    arrays = operands(batch=2, queries=128, keys=128)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec("data")
    sharded = [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a in arrays]
    with jax.set_mesh(mesh):
        found = jax.shard_map(results, in_specs=(spec,) * 4, out_specs=(spec,) * 4)(*sharded)
    arrays = [np.asarray(a) for a in arrays]
    for n in range(2):
        alone = results(*(a[n : n + 1] for a in arrays))
        for one, other in zip(alone, found, strict=True):
            np.testing.assert_array_equal(one[0], np.asarray(other)[n])


# ---------------------------------------------------------------------------
# What it refuses
# ---------------------------------------------------------------------------


def refused(*args, **options):
    """The arguments that are named, and the words."""
    with pytest.raises(AttentionError, match="'cudnn_fp8' cannot serve this call") as caught:
        explain_attention(*args, implementation="cudnn_fp8", **options)
    lines = str(caught.value).splitlines()
    assert "implementation='auto'" in lines[-1]
    return [line.split(":")[0].strip() for line in lines[1:-1]], str(caught.value)


REFUSED = [
    (shapes(size=64), {}, "query", "heads are of 64"),
    (shapes(queries=200), {}, "query", "200 positions"),
    (shapes(200, 200), {"is_causal": True}, "query key", "Pad the text to 256"),
    (shapes(8192, 8192), {"is_causal": True}, "is_causal", "0.90 of bfloat16's speed at 8,192"),
    (shapes(), {"mask": jnp.ones((256, 256), bool)}, "mask", "is_causal=True"),
    (shapes(), {"bias": jnp.ones((256, 256))}, "bias", "Leave bias out"),
    (shapes(), {"query_seq_lengths": jnp.array([7])}, "query_seq_lengths", "full attention only"),
    (shapes(), {"key_value_seq_lengths": jnp.array([7])}, "key_value_seq_lengths", "Leave"),
    (shapes(), {"local_window_size": (64, 0)}, "local_window_size", "Leave"),
    (
        shapes(),
        {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)},
        "dropout_rate",
        "Write dropout_rate=0.0",
    ),
    (shapes(8192, 8192, size=64), {"is_causal": True}, "query is_causal", "heads of 128"),
]


@pytest.mark.parametrize(("args", "options", "names", "words"), REFUSED)
@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_what_it_cannot_serve_is_named_and_refused(request, where, args, options, names, words):
    if where == "gpu":
        request.getfixturevalue("gpu")
    found, message = refused(*args, **options)
    assert found == names.split() and words in message
    query, key, value = args
    if query.size < 2**20:
        with pytest.raises(AttentionError, match="'cudnn_fp8' cannot serve"):
            FP8(*(jnp.zeros(a.shape, a.dtype) for a in (query, key, value)), **options)


def test_full_attention_is_not_limited(gpu):
    args = shapes(32768, 32768, heads=64, groups=8)
    assert explain_attention(*args, implementation="cudnn_fp8").implementation == "cudnn_fp8"


def test_auto_never_takes_it(gpu):
    assert explain_attention(*shapes(), is_causal=True).implementation == "cudnn"
    asked = explain_attention(*shapes(), is_causal=True, implementation="cudnn_fp8")
    assert asked.blockers == () and "rounded to E4M3" in asked.notes[0]


@pytest.mark.parametrize(
    ("version", "capability", "words"),
    [
        (None, (9, 0), "JAX finds no cuDNN"),
        (91200, (8, 0), "needs an H100 or later"),
        (90000, (9, 0), "cuDNN 9.0 has no FP8 kernel"),
        (91000, (9, 0), "cuDNN 9.10 has no FP8 kernel"),
        (91200, (10, 0), "cuDNN 9.12 has no FP8 kernel"),
    ],
)
def test_devices_without_the_kernel(monkeypatch, version, capability, words):
    monkeypatch.setattr(_choice, "cudnn_version", lambda: version)
    with context(target="gpu", capability=capability):
        found, message = refused(*shapes())
    assert found == ["device"] and words in message


def test_other_devices_and_another_jax(monkeypatch, gpu):
    monkeypatch.setattr(_choice, "has_fp8_attention", lambda: False)
    assert "this version of JAX" in refused(*shapes())[1]
    with context(target="tpu"):
        assert "compiled for tpu" in refused(*shapes())[1]


def test_this_jax_has_the_kernel():
    assert _compat.has_fp8_attention()


def test_on_a_cpu_it_says_that_it_emulates():
    choice = explain_attention(*shapes(), implementation="cudnn_fp8")
    assert choice.implementation == "cudnn_fp8"
    assert [blocker.argument for blocker in choice.blockers] == ["device"]
    assert "emulated" in choice.notes[-1] and "0.5 MiB" in choice.notes[-1]


# ---------------------------------------------------------------------------
# Policies, layers, audit
# ---------------------------------------------------------------------------

TOML = """
extends = "bf16"

[attention]
implementation = "cudnn_fp8"
"""


def recipe(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    return jaxmp.load_recipe(path)


def linen_model(policies, **stated):
    fn = jaxmp.linen.attention_fn(**stated)
    layer = nn.MultiHeadDotProductAttention(2, qkv_features=2 * HEAD, attention_fn=fn)
    x = jax.ShapeDtypeStruct((1, 128, 16), jnp.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    model = jaxmp.linen.apply_policy(layer, policies)
    return jax.grad(lambda v, x, **m: model.apply(v, x, **m).astype("float32").sum()), variables, x


def nnx_model(policies, **stated):
    fn = jaxmp.nnx.attention_fn(**stated)
    layer = nnx.MultiHeadAttention(
        2, 16, qkv_features=2 * HEAD, decode=False, attention_fn=fn, rngs=nnx.Rngs(0)
    )
    model = jaxmp.nnx.apply_policy(layer, policies)
    graph, state = nnx.split(model)

    def loss(state, x, **given):
        return nnx.merge(graph, state)(x, **given).astype("float32").sum()

    x = jax.ShapeDtypeStruct((1, 128, 16), jnp.float32)
    return jax.grad(loss, allow_int=True), state, x


MODELS = {"linen": linen_model, "nnx": nnx_model}
each_framework = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def implementations(fn, *args):
    names = [str(e.params["name"]) for e in named(trace(fn, *args), "jit", "pjit")]
    return {implementation_of(name) for name in names if name.startswith(MARK)}


@each_framework
def test_a_recipe_chooses_it_for_layers(make, tmp_path):
    mine = recipe(tmp_path)
    assert mine.policies.default.implementation == "cudnn_fp8"
    assert jaxmp.get_policy(str(mine.policies.default)) == mine.policies.default
    assert implementations(*make(mine, is_causal=True)) == {("cudnn_fp8", "device")}
    own = {"is_causal": True, "implementation": "cudnn_fp8"}
    assert implementations(*make("c=bf16", **own)) == {("cudnn_fp8", "device")}


@each_framework
def test_a_layer_with_a_mask_is_refused(make):
    fn, variables, x = make("c=bf16,implementation=cudnn_fp8")
    with pytest.raises(AttentionError, match=r"cannot serve this call:\n  mask:"):
        jax.eval_shape(fn, variables, x, mask=jnp.ones((1, 1, 128, 128), bool))


def test_names_of_implementations():
    assert implementation_of(f"{MARK}_cudnn") == ("cudnn", "")
    assert implementation_of(f"{MARK}_cudnn_fp8") == ("cudnn_fp8", "")
    assert implementation_of(f"{MARK}_cudnn_fp8_device") == ("cudnn_fp8", "device")
    assert implementation_of(f"{MARK}_xla_dropout_rate") == ("xla", "dropout_rate")


def test_an_audit_shows_the_emulation():
    gradients = jax.grad(lambda *args: FP8(*args).astype("float32").sum(), (0, 1, 2))
    report = audit(gradients, *shapes())
    (found,) = [one for one in report.findings if one.kind == "unfused_attention"]
    assert "runs as 'cudnn_fp8', which emulates" in found.message
    assert "target='h200'" in found.fix
    e4m3 = "float8_e4m3fn"
    assert {(row.lhs, row.rhs) for row in report.matmuls} == {(e4m3, e4m3)}
    assert not report.faults


def test_show_explains_it(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    with pytest.raises(SystemExit):
        cli.main(["show", str(path)])
    assert "cuDNN's FP8 kernel, emulated on a CPU" in " ".join(capsys.readouterr().out.split())


# ---------------------------------------------------------------------------
# Compiled for an H200
# ---------------------------------------------------------------------------

FORWARD, BACKWARD = "__cudnn$fmhaSoftmaxF8", "__cudnn$fmhaSoftmaxBackwardF8"


def kernels(fn, *args):
    found = collections.Counter()
    for row in audit(fn, *args, target="h200").attention:
        found[row.kernel] += row.count
    return sorted(found.items())


@needs_compiler
@pytest.mark.parametrize(
    "is_causal",
    [pytest.param(True, id="causal"), pytest.param(False, marks=pytest.mark.slow, id="full")],
)
def test_compiled_forwards_and_backwards(is_causal):
    attend = functools.partial(FP8, is_causal=is_causal)
    args = shapes(heads=8, groups=2)
    assert kernels(attend, *args) == [(FORWARD, 1)]
    gradients = jax.grad(lambda *args: attend(*args).astype("float32").sum(), (0, 1, 2))
    # The second backward kernel is in the loop, which ends at once where the first guess was right.
    assert kernels(gradients, *args) == [(BACKWARD, 2), (FORWARD, 1)]
    report = audit(gradients, *args, target="h200")
    assert {row.dtype for row in report.attention} == {"float8_e4m3fn"} and not report.faults


@needs_compiler
@each_framework
def test_compiled_models_by_their_recipe(make, tmp_path):
    found = kernels(*make(recipe(tmp_path), is_causal=True))
    assert found == [(BACKWARD, 2), (FORWARD, 1)]


@needs_compiler
def test_compiled_under_vmap_scan_and_remat():
    query, key, value = shapes(128, 128)

    def loss(query, key, value):
        attend = jax.checkpoint(lambda q: FP8(q, key, value, is_causal=True))
        out, _ = jax.lax.scan(lambda q, _: (q + attend(q), None), query, length=3)
        return out.astype("float32").sum()

    batched = jax.ShapeDtypeStruct((4, *query.shape), query.dtype)
    fn = jax.vmap(jax.grad(loss), in_axes=(0, None, None))
    # Four examples are one batch; three steps; what is computed anew is the forward kernel.
    assert kernels(fn, batched, key, value) == [(BACKWARD, 6), (FORWARD, 6)]
    report = audit(fn, batched, key, value, target="h200")
    assert {row.shape for row in report.attention} == {(4, 128, 2, HEAD)}


@needs_compiler
def test_a_card_without_fp8_is_refused():
    with pytest.raises(AttentionError, match="needs an H100 or later"):
        audit(FP8, *shapes(), target="a100")


@pytest.mark.slow
@needs_compiler
def test_compiled_memory_has_no_term_of_all_pairs():
    def temporary(length):
        args = shapes(length, length, heads=4, groups=4, batch=8192 // length)
        gradients = jax.grad(lambda *args: FP8(*args).astype("float32").sum(), (0, 1, 2))
        return audit(gradients, *args, target="h200").memory.temporary

    # The same number of tokens: all pairs would take eight times as much.
    assert temporary(8192) <= 1.1 * temporary(1024)


def test_second_derivatives_are_refused():
    query = jnp.ones((1, 128, 1, 128), jnp.bfloat16)

    def loss(query):
        out = dot_product_attention(query, query, query, implementation="cudnn_fp8")
        return out.astype(jnp.float32).sum()

    slope = lambda query: jax.grad(loss)(query).astype(jnp.float32).sum()
    for derive in (
        lambda: jax.jvp(slope, (query,), (query,)),
        lambda: jax.jit(jax.grad(slope))(query),
    ):
        with pytest.raises(AttentionError, match="no second derivative"):
            derive()
