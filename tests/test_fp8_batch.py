"""Dependence of FP8 results on the rest of the batch, and warnings of models without FP8."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jaxmp
from gpu_compiler import needs_compiler
from grids import fast_cases
from jaxmp import audit, fp8
from jaxmp._core import _compat
from jaxmp.errors import RecipeWarning

LINEAR = (((1,), (0,)), ((), ()))

# ---------------------------------------------------------------------------
# Scales
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_larger_element_changes_only_elements_that_are_subnormal(dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=4096) * np.exp2(rng.uniform(-36, 0, 4096))).astype(np.float32)

    @jax.jit
    def values(x):
        scale = fp8._operands.compute_scale(jnp.abs(x).max(), dtype, power_of_two=True)
        values = jax.lax.optimization_barrier(fp8._operands.quantize(x, scale, dtype))
        return values.astype(jnp.float32) / scale, scale

    before, _ = values(x)
    for factor in (1.3, 4.0, 1000.0):
        y = np.append(x, factor * np.abs(x).max()).astype(np.float32)
        after, scale = values(y)
        is_normal = np.abs(x) * float(scale) >= float(ml_dtypes.finfo(dtype).smallest_normal)
        np.testing.assert_array_equal(after[:-1][is_normal], before[is_normal])
        assert (after[:-1] != before).any() == (factor > 2)


def row_changes(scaling, factor):
    """Multiplies the last row of input and output gradient; returns if other rows change."""
    x, w, g = (jax.random.normal(jax.random.key(i), (64, 64)) for i in range(3))
    # No element becomes subnormal.
    x, g = (jnp.sign(a) * jnp.maximum(jnp.abs(a), 0.01) for a in (x, g))
    multiplied = lambda a: a.at[-1].multiply(factor)

    @jax.jit
    def run(x, g):
        y, backward = jax.vjp(lambda x: fp8.dot_general(scaling)(x, w, LINEAR), x)
        return y[:-1], backward(g)[0][:-1]

    pairs = zip(run(x, g), run(multiplied(x), multiplied(g)), strict=True)
    return [float(jnp.mean(before != after)) for before, after in pairs]


@pytest.mark.parametrize("factor", [1.3, 4.0])
@fast_cases("4.0")
def test_other_rows_of_a_matmul_and_of_its_input_gradient(factor):
    assert row_changes(fp8.CurrentScaling(), factor) == [0, 0]
    assert row_changes(fp8.RowwiseScaling(), factor) == [0, 0]
    # With a factor of 1.3, another row may still have the largest element of the input.
    assert max(row_changes(fp8.CurrentScaling(power_of_two=False), factor)) > 0.5


class Causal(nn.Module):
    """Causal language model of one block; `gain` multiplies the input of the linear layers."""

    @nn.compact
    def __call__(self, tokens, gain):
        x, gain = nn.Embed(32, 32)(tokens), gain[:, None, None]
        h = nn.LayerNorm()(x)
        h = (h * gain.astype(h.dtype),) * 3
        x = x + nn.MultiHeadDotProductAttention(2)(*h, mask=nn.make_causal_mask(tokens))
        h = nn.LayerNorm()(x)
        x = x + nn.Dense(32)(nn.gelu(nn.Dense(128)(h * gain.astype(h.dtype))))
        return nn.log_softmax(nn.Dense(32, name="lm_head")(x).astype(jnp.float32))


@pytest.mark.parametrize("name", ["fp8", "fp8_delayed"])
@fast_cases("fp8")
def test_log_probabilities_do_not_depend_on_moderate_changes(name):
    tokens, ones = jax.random.randint(jax.random.key(0), (4, 8), 0, 32), jnp.ones(4)

    def changes(recipe):
        model = recipe.wrap(Causal())
        variables = jax.jit(model.init)(jax.random.key(0), tokens, ones)
        apply = jax.jit(model.apply)
        before = apply(variables, tokens, ones)
        after = apply(variables, tokens.at[:, -1].add(1) % 32, ones)
        gained = apply(variables, tokens, ones.at[0].set(1.3))
        earlier = before[:, :-1] != after[:, :-1]
        return float(jnp.mean(earlier)), float(jnp.mean(before[1:] != gained[1:]))

    recipe = jaxmp.load_recipe(name)
    exact = recipe.replace(fp8=dataclasses.replace(recipe.fp8, power_of_two=False))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert changes(recipe) == (0, 0)
        assert changes(exact)[1] > 0.5


@pytest.mark.parametrize("name", ["fp8", "fp8_delayed", "fp8_rowwise"])
def test_recipes_scale_by_powers_of_two(name):
    assert jaxmp.load_recipe(name).fp8.power_of_two


# ---------------------------------------------------------------------------
# Notes
# ---------------------------------------------------------------------------


class Dense(nn.Module):
    features: int = 32

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features, name="b")(nn.Dense(self.features, name="a")(x))


X = jnp.ones((2, 32))


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        (fp8.CurrentScaling(), r"^CurrentScaling .* elements below about 2\*\*-14 times"),
        (fp8.DelayedScaling(margin=2), r"^DelayedScaling .* elements below about 2\*\*-12 times"),
        (fp8.CurrentScaling(power_of_two=False), "determines the rounding of all elements"),
        (fp8.RowwiseScaling(), None),
        (fp8.MXScaling(), None),
    ],
)
def test_explain_and_audit_note_the_dependence_once(scaling, text):
    model = jaxmp.load_recipe("fp8").replace(fp8=scaling).wrap(Dense())
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    share, *notes = jaxmp.explain(model.apply)(variables, X).fp8.notes
    # The last layer computes in 16 bits.
    assert share == "50.0% of the FLOPs of all matmuls and convolutions are in FP8"
    expected = 0 if text is None else 1
    assert len(notes) == expected and all(re.search(text, n) for n in notes)
    report = audit(jax.grad(lambda v, x: model.apply(v, x).sum()), variables, X)
    assert sum("one scale for a tensor" in note for note in report.notes) == expected
    assert report.ok and not report.warnings


def test_layers_without_fp8_have_no_note():
    model = jaxmp.load_recipe("bf16").wrap(Dense())
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert jaxmp.explain(model.apply)(variables, X).fp8.notes == ()
    assert not any("scale" in note for note in audit(model.apply, variables, X).notes)


# ---------------------------------------------------------------------------
# Models of which nothing computes in FP8
# ---------------------------------------------------------------------------


class Own(nn.Module):
    """Experts that own their weights."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (4, x.shape[-1], 16))
        return jnp.einsum("bd,edf->bef", x, w).sum(1)


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("position", nn.initializers.ones, (1, 32))
        return nn.Dense(10, name="lm_head")(Own(name="experts")(x * scale))


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (3,), name="down")(x[None])
        return nn.ConvTranspose(16, (3,), name="up")(x)


class Recurrent(nn.Module):
    cell: type = nn.OptimizedLSTMCell

    @nn.compact
    def __call__(self, x):
        return nn.RNN(self.cell(16), name="rnn")(x[None])


class HeadOnly(nn.Module):
    """Model without layers that may compute in FP8."""

    def setup(self):
        self.position = self.param("position", nn.initializers.ones, (1, 32))
        self.conv, self.lm_head = nn.Conv(16, (3,)), nn.Dense(10)

    def __call__(self, x):
        return self.lm_head(x * self.position)

    def encode(self, x):
        return self.conv(x[None])


class Mixed(nn.Module):
    """Model of which one layer computes in FP8."""

    @nn.compact
    def __call__(self, x):
        return Own()(nn.Dense(32)(x))


class NnxOwn(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((32, 32)))

    def __call__(self, x):
        return x @ self.w[...]


def linen_call(model, recipe="fp8", method=None):
    model = jaxmp.load_recipe(recipe).wrap(model)
    with jax.numpy_rank_promotion("allow"):
        variables = jax.eval_shape(
            functools.partial(model.init, method=method), jax.random.key(0), X
        )
        apply = functools.partial(model.apply, method=method)
        return lambda: jax.eval_shape(lambda variables: apply(variables, X), variables)


UNUSED = {
    "experts": (Experts, r"Experts set matmul = 'fp8'.*'experts': Own has no dot.*register_layer"),
    "convolutions": (Convolutions, r"'down': FP8 has no convolutions; 'up'.*'bf16' computes"),
    "lstm": (Recurrent, r"OptimizedLSTMCell_0/.*DenseParams has no dot.*; and 5 more"),
    "odd widths": (functools.partial(Dense, 30), r"'a': N = 30 is not a multiple of 16; 'b'"),
}


@pytest.mark.parametrize("name", UNUSED)
def test_a_linen_model_without_fp8_warns_once(name):
    make, text = UNUSED[name]
    # Flax creates the carry of an LSTM in float32.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        call = linen_call(make())
        with pytest.warns(RecipeWarning, match=text) as warned:
            call()
        assert warned[0].filename == __file__ and len(warned) == 1
        call()


@pytest.mark.parametrize(
    "model",
    [
        Mixed(),
        Recurrent(nn.LSTMCell),
        nn.Dense(10),
        nn.Conv(8, (3,)),
        nn.LayerNorm(),
    ],
    ids=lambda model: type(model).__name__,
)
def test_parts_of_models_and_models_in_fp8_do_not_warn(model):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        linen_call(model)()
        jaxmp.explain(linen_call(Experts()))()  # which lists the layers instead


class Position(nn.Module):
    """Adds a position embedding."""

    @nn.compact
    def __call__(self, x):
        return x + self.param("position", nn.initializers.normal(), X.shape)


class JittedLayer(nn.Module):
    """Model whose second call reuses the trace of its layer in FP8."""

    @nn.compact
    def __call__(self, x):
        return nn.jit(nn.Dense)(32)(Position()(x))


@pytest.mark.parametrize("make", [Position, JittedLayer])
def test_weights_that_are_not_multiplied_do_not_warn(make):
    model = jaxmp.load_recipe("fp8").wrap(make())
    variables = model.init(jax.random.key(0), X)
    for _ in range(2):
        model.apply(variables, X)


class NnxPosition(nnx.Module):
    """Adds a position embedding."""

    def __init__(self):
        self.position = nnx.Param(jnp.ones(X.shape))

    def __call__(self, x):
        return x + self.position[...]


class NnxRemat(nnx.Sequential):
    """Model whose second call reuses the trace of its layers."""

    def __call__(self, x):
        for layer in self.layers:
            x = remat_layer(layer, x)
        return x


@nnx.remat
def remat_layer(layer, x):
    return layer(x)


def test_weights_that_are_not_multiplied_in_nnx_do_not_warn():
    recipe, linear = jaxmp.load_recipe("fp8"), nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    for model in map(recipe.wrap, (NnxPosition(), NnxRemat(NnxPosition(), linear))):
        for _ in range(2):
            model(X)


def test_a_part_of_a_call_does_not_warn():
    with jax.numpy_rank_promotion("allow"):
        linen_call(HeadOnly(), method="encode")()


def test_delayed_scaling_warns_too():
    with jax.numpy_rank_promotion("allow"), pytest.warns(RecipeWarning, match="'experts': Own"):
        linen_call(Experts(), "fp8_delayed")()


class Narrow(Dense):
    """Model that no other test uses, because a class warns once."""


def test_a_narrow_model_on_a_gpu_warns_with_the_limit():
    call = linen_call(Narrow(48))
    with _compat.context(target="gpu"), pytest.warns(RecipeWarning) as warned:
        call()
    text = str(warned[0].message)
    assert "K = 32 and N = 48 are too narrow for 8192 tokens" in text
    assert "write min_width = 0 in the table [fp8]" in text


@needs_compiler
@pytest.mark.parametrize(("rows", "is_noted"), [(16, True), (4096, False)])
def test_tools_compare_the_key_tokens_with_the_program(rows, is_noted):
    recipe = jaxmp.load_recipe("fp8").replace(fp8=fp8.CurrentScaling(tokens=8192))
    x, kernel = jnp.ones((rows, 1024)), jnp.ones((1024, 4096))

    def loss(kernel, x):
        with jax.named_scope("up"):
            return (x @ kernel).astype(jnp.float32).sum()

    explained = jaxmp.explain(loss, recipe, target="h200")(kernel, x).fp8
    cast = jaxmp.autocast(loss, recipe)
    audited = jaxmp.audit(jax.grad(cast), kernel, x, recipe=recipe, target="h200")
    (row,) = explained.rows
    assert row.exclusion_reason == ""
    for notes in (explained.notes, audited.notes):
        assert any(note.startswith("up has 16 rows") for note in notes) == is_noted
        assert any("write tokens = 16 in the table [fp8]" in note for note in notes) == is_noted


def test_nnx_models_without_fp8_warn_once():
    recipe, linear = jaxmp.load_recipe("fp8"), nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    model = recipe.wrap(nnx.Sequential(NnxOwn()))
    with pytest.warns(RecipeWarning, match="'layers/0': NnxOwn has no dot") as warned:
        model(X)
    assert warned[0].filename == __file__
    model(X)
    recipe.wrap(nnx.Sequential(NnxOwn(), linear))(X)
    recipe.wrap(linear)(X)


def test_functions_without_fp8_warn_and_the_fix_works():
    model = Convolutions()
    variables = model.init(jax.random.key(0), X)
    fn = jaxmp.autocast(model.apply, "fp8")
    with pytest.warns(RecipeWarning, match=r"autocast\(apply, ...\).*FP8 has no conv_general"):
        jax.eval_shape(fn, variables, X)
    jax.eval_shape(jaxmp.autocast(jnp.sin, "fp8"), X)
    # The fix for experts that own their weights.
    model = Experts()
    variables = model.init(jax.random.key(0), X)
    assert "f8_e4m3fn" in str(jax.make_jaxpr(jaxmp.autocast(model.apply, "fp8"))(variables, X))
