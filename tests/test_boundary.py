"""Casts at module boundaries: range, exceptions, and error messages."""

import itertools
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from grids import EXPENSIVE
from jaxmp._core._trees import saturating_cast
from models_linen import Outer

FLOAT32_MIN = float(jnp.finfo(jnp.float32).min)
BF16, FP16 = "p=f32,c=bf16,o=f32", "p=f32,c=f16,o=f32"

# ---------------------------------------------------------------------------
# Saturation
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_boundary_casts_keep_finite_numbers_finite(dtype, make):
    values = np.float32([FLOAT32_MIN, -1e9, -65520, 1.5, 3.4e38, np.inf, -np.inf, np.nan])
    out = np.float32(saturating_cast(make(values), dtype))
    largest = float(jnp.finfo(dtype).max)
    clipped = np.clip(values, -largest, largest).astype(dtype)
    np.testing.assert_array_equal(out, np.where(np.isfinite(values), clipped, values))


def test_bfloat16_saturates_to_the_largest_float16():
    values = jnp.asarray([65280, -65536, 1e9, -jnp.inf], jnp.bfloat16)
    assert saturating_cast(values, jnp.float16).tolist() == [65280, -65504, 65504, -jnp.inf]


def test_saturating_cast_widens_plainly_and_keeps_scalars_and_shapes():
    assert type(saturating_cast(np.float32(1e9), np.float16)) is np.float16
    assert saturating_cast(jnp.float16(jnp.inf), jnp.float32) == jnp.inf
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert saturating_cast(shape, jnp.float16) == jax.ShapeDtypeStruct((2,), jnp.float16)
    jaxpr = jax.make_jaxpr(lambda x: saturating_cast(x, jnp.float32))(jnp.ones(2, jnp.float16))
    assert [equation.primitive.name for equation in jaxpr.eqns] == ["convert_element_type"]


def test_the_backward_of_a_saturating_cast_is_a_plain_cast():
    x = jnp.float32([1.0, 1e9])
    out, backward = jax.vjp(lambda x: saturating_cast(x, jnp.float16), x)
    assert out.tolist() == [1, 65504]
    # A gradient where the value was clipped, and an overflow that the finite check must see.
    assert backward(jnp.float16([2.0, 3.0]))[0].tolist() == [2, 3]
    assert backward(jnp.float16([jnp.inf, jnp.nan]))[0][0] == jnp.inf
    up = jax.vjp(lambda x: saturating_cast(x, jnp.float32), jnp.float16([1.0]))[1]
    assert up(jnp.float32([1e9]))[0].tolist() == [jnp.inf]


class MaskedSoftmax(nn.Module):
    """Attention with rows that `bias` masks entirely."""

    def __call__(self, bias):
        weights = jax.nn.softmax(jnp.zeros(bias.shape, bias.dtype) + bias)
        return weights @ jnp.eye(bias.shape[-1], dtype=weights.dtype)


class MaskedSoftmaxNnx(nnx.Module):
    __call__ = MaskedSoftmax.__call__


@pytest.mark.parametrize(("policy", "value"), [(BF16, FLOAT32_MIN), (FP16, -1e9)])
def test_rows_that_a_finite_mask_hides_stay_finite(policy, value):
    mask = jnp.full((2, 4), value, jnp.float32)
    linen = jaxmp.load_recipe(policy).wrap(MaskedSoftmax())
    for model in (
        lambda mask: linen.apply({}, mask),
        jaxmp.load_recipe(policy).wrap(MaskedSoftmaxNnx()),
    ):
        np.testing.assert_array_equal(model(mask), np.full((2, 4), 0.25))
        np.testing.assert_array_equal(jax.jit(model)(mask), np.full((2, 4), 0.25))
        assert jnp.isnan(model(jnp.full((2, 4), -jnp.inf))).all()


@pytest.mark.parametrize("norm", ["linen", "nnx"])
def test_outputs_of_norms_saturate_in_float16(norm):
    x, policy = jnp.float32([[-1.0, 1.0]]), "p=f32,c=f16,o=f16"
    scale = jnp.float32([1e6, 1.0])
    if norm == "linen":
        params = {"scale": scale, "bias": jnp.zeros(2)}
        out = jaxmp.load_recipe(policy).wrap(nn.LayerNorm()).apply({"params": params}, x)
    else:
        layer = nnx.LayerNorm(2, rngs=nnx.Rngs(0))
        layer.scale[...] = scale
        out = jaxmp.load_recipe(policy).wrap(layer)(x)
    assert out[0, 0] == -65504


# ---------------------------------------------------------------------------
# Complex numbers and float64
# ---------------------------------------------------------------------------

WIDE_HEAD = jaxmp.PolicyMap(BF16, [jaxmp.Rule("**", "c=bf16,o=f32")])
FP8 = "p=f32,c=bf16,o=f32,matmul=fp8"


def _linen_layers(dtype):
    typed = {"param_dtype": dtype}
    return {
        "Dense": nn.Dense(16),
        "DenseGeneral": nn.DenseGeneral((2, 3), axis=(-2, -1)),
        "Einsum": nn.Einsum((16, 16), "...a,ab->...b"),
        "Conv": nn.Conv(2, (3,)),
        "ConvLocal": nn.ConvLocal(2, (3,)),
        "ConvTranspose": nn.ConvTranspose(2, (3,)),
        "BatchNorm": nn.BatchNorm(use_running_average=False),
        "LayerNorm": nn.LayerNorm(),
        "RMSNorm": nn.RMSNorm(),
        "GroupNorm": nn.GroupNorm(2),
        "WeightNorm": nn.WeightNorm(nn.Dense(3)),
        "attention": nn.MultiHeadDotProductAttention(2),
        "decode": nn.MultiHeadDotProductAttention(2, decode=True),
        "RNN of GRUCell": nn.RNN(nn.GRUCell(3, **typed)),
        "RNN of LSTMCell": nn.RNN(nn.LSTMCell(3, **typed)),
        "RNN of OptimizedLSTMCell": nn.RNN(nn.OptimizedLSTMCell(3, **typed)),
    }


def _nnx_layers(dtype):
    layers = {
        "Linear": lambda rngs: nnx.Linear(16, 16, rngs=rngs),
        "LinearGeneral": lambda rngs: nnx.LinearGeneral(16, (2, 3), rngs=rngs),
        "Einsum": lambda rngs: nnx.Einsum("...a,ab->...b", (16, 16), None, rngs=rngs),
        "Conv": lambda rngs: nnx.Conv(16, 2, (3,), rngs=rngs),
        "ConvTranspose": lambda rngs: nnx.ConvTranspose(16, 2, (3,), rngs=rngs),
        "BatchNorm": lambda rngs: nnx.BatchNorm(16, use_running_average=True, rngs=rngs),
        "LayerNorm": lambda rngs: nnx.LayerNorm(16, rngs=rngs),
        "RMSNorm": lambda rngs: nnx.RMSNorm(16, rngs=rngs),
        "GroupNorm": lambda rngs: nnx.GroupNorm(16, 2, rngs=rngs),
        "RNN of GRUCell": lambda rngs: nnx.RNN(nnx.GRUCell(16, 3, param_dtype=dtype, rngs=rngs)),
        "RNN of LSTMCell": lambda rngs: nnx.RNN(nnx.LSTMCell(16, 3, param_dtype=dtype, rngs=rngs)),
    }
    if dtype == "float64":  # JAX's attention refuses complex queries.
        layers["attention"] = lambda rngs: nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
    return layers


def _policies(name):
    """Returns the policies that change a layer; for linear layers also wide outputs and FP8."""
    return (BF16, WIDE_HEAD, FP8) if name in ("Dense", "Einsum", "Linear") else (BF16,)


def _assert_as_written(wrapped, plain):
    """Checks that both jaxprs compute in the same dtypes."""
    assert wrapped.out_avals == plain.out_avals
    assert "bf16" not in str(wrapped) and "f8" not in str(wrapped)


@EXPENSIVE
@pytest.mark.parametrize("dtype", ["complex64", "float64"])
def test_linen_layers_keep_complex_and_float64_operands(dtype):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for name, layer in _linen_layers(dtype).items():
            x = jax.ShapeDtypeStruct((1, 1 if name == "decode" else 3, 16), dtype)

            def run(layer, x=x):
                return jax.make_jaxpr(lambda x: layer.init_with_output(jax.random.key(0), x))(x)

            def apply(layer, variables, x=x):
                mutable = [collection for collection in variables if collection != "params"]
                fn = lambda variables, x: layer.apply(variables, x, mutable=mutable)
                return jax.make_jaxpr(fn)(variables, x)

            variables = jax.eval_shape(layer.init, jax.random.key(0), x)
            plain = apply(layer, variables)
            for policy in _policies(name):
                wrapped = jaxmp.load_recipe(policy).wrap(layer)
                _assert_as_written(apply(wrapped, variables), plain)
            if name == "decode":
                assert run(jaxmp.load_recipe(BF16).wrap(layer)).out_avals == run(layer).out_avals


@pytest.mark.parametrize("dtype", ["complex64", "float64"])
def test_nnx_layers_keep_complex_and_float64_operands(dtype):
    def run(model, x):
        graphdef, state = nnx.split(model)
        return jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        x = jax.ShapeDtypeStruct((1, 3, 16), dtype)
        for name, make in _nnx_layers(dtype).items():
            model = nnx.eval_shape(lambda make=make: make(nnx.Rngs(0)))
            plain = run(model, x)
            for policy in _policies(name):
                _assert_as_written(run(jaxmp.load_recipe(policy).wrap(model), x), plain)


@EXPENSIVE
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_complex_layers_give_plain_results(policy):
    x = jnp.asarray(
        np.random.default_rng(0).normal(size=(2, 4, 2)) @ np.array([1, 1j]), "complex64"
    )
    layer = nn.Dense(3, param_dtype="complex64")
    variables = layer.init(jax.random.key(0), x)
    linear = nnx.Linear(4, 3, param_dtype="complex64", rngs=nnx.Rngs(0))
    calls = (layer, lambda model, x: model.apply(variables, x)), (linear, lambda model, x: model(x))
    for (model, call), inputs in itertools.product(calls, (x, x.real)):
        with jax.numpy_dtype_promotion("standard"):
            out = call(jaxmp.load_recipe(policy).wrap(model), inputs)
            np.testing.assert_array_equal(out, call(model, inputs))
            assert jnp.abs(out.imag).max() > 0.1


def test_a_layer_called_with_complex_and_real_inputs_follows_each():
    class Twice(nn.Module):
        def setup(self):
            self.dense = nn.Dense(3)

        def __call__(self, x):
            return self.dense(x), self.dense(1j * x), self.dense(x)

    class TwiceNnx(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(4, 3, rngs=rngs)

        __call__ = Twice.__call__

    x, policy = jax.ShapeDtypeStruct((2, 4), jnp.float32), "p=f32,c=bf16,o=bf16"
    with jax.numpy_dtype_promotion("standard"):
        model = jaxmp.load_recipe(policy).wrap(Twice())
        linen = jax.eval_shape(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x)
        model = jaxmp.load_recipe(policy).wrap(TwiceNnx(nnx.Rngs(0)))
        for out in (linen, nnx.eval_shape(model, x)):
            assert [y.dtype for y in out] == [jnp.bfloat16, jnp.complex64, jnp.bfloat16]


# ---------------------------------------------------------------------------
# NumPy arrays and Python numbers
# ---------------------------------------------------------------------------


class Third(nn.Module):
    """Model whose result encodes the dtypes of the arguments."""

    def __call__(self, x, t):
        return x["a"][0] / 3, x["b"] * t, jnp.asarray(t) / 3


class ThirdNnx(nnx.Module):
    __call__ = Third.__call__


MODELS = {
    "linen": lambda policy: lambda *args: jaxmp.load_recipe(policy).wrap(Third()).apply({}, *args),
    "nnx": lambda policy: jaxmp.load_recipe(policy).wrap(ThirdNnx()),
}


@pytest.mark.parametrize("name", MODELS)
def test_eager_calls_compute_as_jitted_ones(name):
    model = MODELS[name]("p=f32,c=bf16,o=bf16")
    x = {"a": [np.ones(2)], "b": np.float64(2)}
    for out, jitted in zip(model(x, 257.3), jax.jit(model)(x, 257.3), strict=True):
        assert out.dtype == jitted.dtype == jnp.bfloat16
        np.testing.assert_array_equal(out, jitted)
    assert [out.dtype for out in model(x, np.float64(257.3))] == [jnp.bfloat16] * 3
    # A Python number is weakly typed, so it is not rounded before it is used.
    number = MODELS[name](BF16)(x, 257.3)[2]
    np.testing.assert_allclose(number, 257.3 / 3, rtol=1e-6)


# ---------------------------------------------------------------------------
# Caches and loops
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [BF16, FP16])
def test_linen_attention_reads_a_float32_cache(policy):
    layer = nn.MultiHeadDotProductAttention(2, decode=True)
    x = jax.ShapeDtypeStruct((1, 3, 4), jnp.float32)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    assert variables["cache"]["cached_key"].dtype == jnp.float32

    def decode(variables, x):
        return jaxmp.load_recipe(policy).wrap(layer).apply(variables, x, mutable=["cache"])

    out, written = jax.eval_shape(decode, variables, x.update(shape=(1, 1, 4)))
    assert out.dtype == jnp.float32 and written["cache"] == variables["cache"]


@EXPENSIVE
def test_a_cache_keeps_the_precision_of_what_is_not_written():
    layer = nn.MultiHeadDotProductAttention(1, decode=True)
    x = jnp.ones((1, 2, 2))
    variables = layer.init(jax.random.key(0), x)
    key = jnp.full((1, 2, 1, 2), 1 / 3)
    cache = {**variables["cache"], "cached_key": key}
    model = jaxmp.load_recipe(BF16).wrap(layer)
    _, written = model.apply({**variables, "cache": cache}, x[:, :1], mutable=["cache"])
    np.testing.assert_array_equal(written["cache"]["cached_key"][:, 1:], key[:, 1:])
    assert (written["cache"]["cached_key"][:, 0] != key[:, 0]).any()


def _sum_scan(linear, x, dtype):
    body = lambda carry, row: (linear(row), None)
    return jax.lax.scan(body, jnp.zeros(x.shape[1:], dtype), x)[0]


class Scanned(nn.Module):
    dtype: str | None = None

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.ones, (4, 4))
        return _sum_scan(lambda row: row @ kernel, x, self.dtype or x.dtype)


class ScannedNnx(nnx.Module):
    def __init__(self, dtype=None):
        self.kernel, self.dtype = nnx.Param(jnp.ones((4, 4))), dtype

    def __call__(self, x):
        return _sum_scan(lambda row: row @ self.kernel[...], x, self.dtype or x.dtype)


class Layer(nnx.Module):
    """Layer in the form of MaxText, which calls a copy of it in each iteration of a scan."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return x + self.linear(x)


class LayersNnx(nnx.Module):
    def __init__(self):
        self.layer = Layer()
        self.table = nnx.Param(jnp.ones((8, 4)))

    def run(self, layers, x):
        graph, params = nnx.split(layers)
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
        body = lambda x, row: (nnx.merge(graph, row)(x), None)
        return jax.lax.scan(body, x, stacked)[0]

    def __call__(self, tokens):
        # A lookup with the author's dtype, which the policy does not change.
        return self.run(self.layer, jnp.take(jnp.float32(self.table[...]), tokens, axis=0))


class Cached(nnx.Module):
    """Block whose caller creates the cache, as in bonsai's Qwen3."""

    def __call__(self, x, cache):
        for layer in cache:
            layer.keys[...] = jax.lax.dynamic_update_slice(layer.keys[...], x, (0, 0))
        return cache[0].keys[...]


class LayerCache(nnx.Module):
    def __init__(self, dtype):
        self.keys = nnx.Cache(jnp.zeros((8, 4), dtype))


class OuterNnx(nnx.Module):
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def _notes(call):
    with pytest.raises((AssertionError, TypeError, NotImplementedError)) as caught:
        call()
    (note,) = (note for note in caught.value.__notes__ if note.startswith("jaxmp: "))
    return note


class Asserting(nn.Module):
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x):
        assert x.dtype == self.dtype
        return nn.Dense(32)(x)


def test_an_asserted_dtype_is_explained_and_the_fixes_work():
    x = jnp.ones((2, 4))
    params = Outer(Asserting()).init(jax.random.key(0), x)
    run = lambda policy, **dtype: (
        jaxmp.load_recipe(policy).wrap(Outer(Asserting(**dtype))).apply(params, x)
    )
    note = _notes(lambda: run(BF16))
    assert "dtype=jnp.bfloat16" in note and "Rule('inner/**', 'c=f32')" in note
    run(BF16, dtype="bfloat16")
    run(jaxmp.PolicyMap(BF16, [jaxmp.Rule("inner/**", "c=f32")]))


def test_a_float32_carry_is_explained_and_the_fixes_work():
    x = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    fixed = jaxmp.PolicyMap(BF16, [jaxmp.Rule("inner/**", "c=f32")])
    for name, run in {
        "Scanned": lambda dtype, policy: jax.eval_shape(
            lambda x: (
                jaxmp.load_recipe(policy)
                .wrap(Outer(Scanned(dtype)))
                .apply({"params": {"inner": {"kernel": jnp.ones((4, 4))}}}, x)
            ),
            x,
        ),
        "ScannedNnx": lambda dtype, policy: nnx.eval_shape(
            jaxmp.load_recipe(policy).wrap(OuterNnx(ScannedNnx(dtype))), x
        ),
    }.items():
        note = _notes(lambda run=run: run("float32", BF16))
        assert f"in {name}, the module 'inner', which computes in bfloat16" in note
        assert "jnp.zeros(shape, x.dtype)" in note and "Rule('inner/**', 'c=f32')" in note
        assert run(None, BF16).dtype == run("float32", fixed).dtype == jnp.float32


def test_a_float32_carry_of_modules_is_explained_and_the_fix_works():
    run = lambda policy: nnx.eval_shape(
        jaxmp.load_recipe(policy).wrap(OuterNnx(LayersNnx())), jax.ShapeDtypeStruct((3,), jnp.int32)
    )
    note = _notes(lambda: run(BF16))
    assert "Rule('inner/*', 'o=f32')" in note
    fixed = jaxmp.PolicyMap(BF16, [jaxmp.Rule("inner/*", "o=f32")])
    assert run(fixed).dtype == jnp.float32


def test_a_float32_cache_of_the_caller_is_explained_and_the_fixes_work():
    def run(dtype, policy):
        cache = [LayerCache(dtype) for _ in range(2)]
        return jaxmp.load_recipe(policy).wrap(OuterNnx(Cached()))(jnp.ones((1, 4)), cache=cache)

    note = _notes(lambda: run(jnp.float32, BF16))
    assert "in Cached, the module 'inner'" in note and "array.astype(x.dtype)" in note
    assert run(jnp.bfloat16, BF16)[0].tolist() == [1, 1, 1, 1]
    fixed = jaxmp.PolicyMap(BF16, [jaxmp.Rule("inner/**", "c=f32")])
    assert run(jnp.float32, fixed)[0].tolist() == [1, 1, 1, 1]


class LinenQuantile(nn.Module):
    cast: bool = False

    def __call__(self, x):
        return jax.scipy.special.ndtri(x.astype(jnp.float32) if self.cast else x)


class Spectrum(nnx.Module):
    def __call__(self, signal):
        return jnp.abs(jnp.fft.rfft(signal))


def test_an_operation_without_a_16_bit_form_is_named_and_the_fixes_work():
    x, narrow = (2 * jnp.eye(4, dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16))
    note = _notes(lambda: jaxmp.load_recipe(BF16).wrap(Outer(LinenQuantile())).apply({}, narrow))
    assert "in LinenQuantile, the module 'inner'" in note and "x.astype(jnp.float32)" in note
    assert "/**" not in note
    jaxmp.load_recipe(BF16).wrap(Outer(LinenQuantile(cast=True))).apply({}, narrow)
    with pytest.raises(ValueError, match="RFFT") as caught:
        jaxmp.load_recipe(BF16).wrap(Spectrum())(narrow)
    (note,) = (note for note in caught.value.__notes__ if note.startswith("jaxmp: "))
    assert "JAX has no 16-bit form of the operation" in note
    rule = eval(note[note.rindex("Rule(") :].rstrip("."), {"Rule": jaxmp.Rule})
    wide = jaxmp.load_recipe(jaxmp.PolicyMap(BF16, [rule]))
    np.testing.assert_array_equal(wide.wrap(Spectrum())(narrow), Spectrum()(x))
    # An FP32 argument is not cast.
    np.testing.assert_array_equal(jaxmp.load_recipe(BF16).wrap(Spectrum())(x), Spectrum()(x))
    wrapped = jaxmp.load_recipe(BF16).wrap(Outer(LinenQuantile()))
    np.testing.assert_array_equal(wrapped.apply({}, x), LinenQuantile().apply({}, x))


class QuantileOfParameter(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jax.scipy.special.ndtri(self.param("w", nn.initializers.uniform(0.5), (4, 4)))


def test_the_note_has_a_rule_for_a_stored_parameter_without_a_16_bit_form():
    model, x, recipe = QuantileOfParameter(), jnp.ones((2, 4)), jaxmp.load_recipe("bf16_params")
    variables = recipe.cast_params(model.init(jax.random.key(0), x))
    note = _notes(lambda: recipe.wrap(model).apply(variables, x))
    (rule,) = re.findall(r"Rule\([^)]*'c=f32'\)", note)
    policies = jaxmp.PolicyMap("bf16_params", [eval(rule, {"Rule": jaxmp.Rule})])
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), variables)
    wrapped = jaxmp.load_recipe(policies).wrap(model)
    with pytest.warns(jaxmp.errors.RecipeWarning, match=r"Rule\(':w', 'p=f32'\)"):
        np.testing.assert_array_equal(wrapped.apply(variables, x), model.apply(wide, x))


def test_other_errors_have_no_note():
    with pytest.raises(TypeError) as caught:
        jaxmp.load_recipe(BF16).wrap(ScannedNnx())()
    assert not any("jaxmp" in note for note in getattr(caught.value, "__notes__", ()))


# ---------------------------------------------------------------------------
# Submodules that are taken out of a bound model
# ---------------------------------------------------------------------------


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.Dense(4)(x))


class Parts(nn.Module):
    def setup(self):
        self.encoder, self.heads = Encoder(), [nn.Dense(4) for _ in range(2)]

    def __call__(self, x):
        return self.heads[1](self.heads[0](self.encoder(x)))


RULES = [
    jaxmp.Rule("encoder/Dense_1", "c=f32"),
    jaxmp.Rule("heads_1", "c=bf16,o=f32"),
    jaxmp.Rule("encoder/**", "c=f16"),
]


@pytest.mark.parametrize("called", [False, True])
def test_unbound_submodules_keep_their_policy(called):
    x = jnp.ones((2, 4))
    model = jaxmp.load_recipe(jaxmp.PolicyMap(BF16, RULES)).wrap(Parts())
    variables = model.init(jax.random.key(0), x)
    bound = model.bind(variables)
    for get in (lambda m: m.encoder, lambda m: m.heads[0], lambda m: m.heads[1]):
        expected = get(bound)(x)
        part, own = (get(bound) if called else get(model.bind(variables))).unbind()
        assert part.scope is None and part.name is None and getattr(part, "dtype", None) is None
        copies = [part, part.clone(), part.bind(own).unbind()[0]]
        if isinstance(part, Encoder):  # The initialisers of a Dense cannot be pickled.
            copies.append(pickle.loads(pickle.dumps(part)))
        for copy in copies:
            out = copy.apply(own, x)
            assert out.dtype == expected.dtype
            np.testing.assert_array_equal(out, expected)
        assert part == copies[1] and hash(part) == hash(copies[-1])
        init = jax.eval_shape(part.init, jax.random.key(0), x)
        assert init == jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), own)
        out = Outer(part).apply({"params": {"inner": own["params"]}}, x)
        np.testing.assert_array_equal(out, expected)
    assert jaxmp.load_recipe("fp32").wrap(part).apply(own, x).dtype == jnp.float32


def test_a_call_of_the_whole_model_judges_rules_after_that_of_a_part():
    x = jnp.ones((2, 4))
    rules = jaxmp.PolicyMap(BF16, [jaxmp.Rule("heads_2", "c=f32")])
    variables, model = Parts().init(jax.random.key(0), x), jaxmp.load_recipe(rules).wrap(Parts())
    model.bind(variables).encoder(x)
    with pytest.warns(jaxmp.errors.RecipeWarning, match=r"'heads_2'.* matched nothing"):
        model.apply(variables, x)
