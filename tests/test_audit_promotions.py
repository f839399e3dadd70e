"""Promotions to FP32: those that do harm are errors, and those that are cast back are not."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxmp
from byte_gpt import GPT
from findings import the_only
from grids import EXPENSIVE
from jaxmp import audit
from language_models import byte_gpt_step
from programs import with_own_gradient

BF16 = jnp.bfloat16
X = jax.ShapeDtypeStruct((8, 16, 64), BF16)
W = jax.ShapeDtypeStruct((64, 64), BF16)


# Flax's norms and the tested mistakes promote implicitly.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")


def kinds(report):
    return {finding.check for finding in report.findings}


def matmul(x, w):
    return (x @ w).astype(BF16)


# ---------------------------------------------------------------------------
# jaxmp's own code
# ---------------------------------------------------------------------------


@EXPENSIVE
@pytest.mark.parametrize(
    ("framework", "recipe"), [("linen", "bf16"), ("nnx", "fp16"), ("linen", "fp8"), ("nnx", "tf32")]
)
def test_a_wrapped_model_is_ok_at_a_length_that_attends_block_by_block(framework, recipe):
    model = GPT(layers=1, width=32, heads=2, max_length=1024)
    args = *byte_gpt_step(framework, recipe, model), jax.ShapeDtypeStruct((4, 1025), jnp.int32)
    report = audit(*args, recipe=recipe)
    assert report.ok, str(report)
    assert recipe == "tf32" or report.low_precision_share == 1
    assert audit(*args).ok


@pytest.mark.parametrize("implementation", ["xla", "blockwise"])
@pytest.mark.parametrize("policy", [None, "p=f32,c=bf16,o=f32"])
def test_attention_is_never_faulted(implementation, policy):
    def loss(q, bias):
        out = jaxmp.dot_product_attention(
            q, q, q, bias, is_causal=True, implementation=implementation, policy=policy
        )
        return out.astype(jnp.float32).sum()

    args = jax.ShapeDtypeStruct((2, 128, 2, 64), BF16), jnp.ones((1, 2, 128, 128))
    for policies in (None, "bf16"):
        report = audit(jax.grad(loss, (0, 1)), *args, recipe=policies)
        assert report.ok, str(report)


def test_attention_in_fp32_is_faulted():
    def fn(q):
        return jaxmp.dot_product_attention(q, q, q)

    q = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.float32)
    assert "fp32_matmul" in audit(fn, q, recipe="bf16").counts()


# ---------------------------------------------------------------------------
# Statistics, tables and losses in FP32
# ---------------------------------------------------------------------------

# Name -> classes of Linen and NNX, and arguments of both.
NORMS = {
    "layer": (nn.LayerNorm, nnx.LayerNorm, {}),
    "rms": (nn.RMSNorm, nnx.RMSNorm, {}),
    "group": (nn.GroupNorm, nnx.GroupNorm, {"num_groups": 4}),
    "batch": (nn.BatchNorm, nnx.BatchNorm, {"use_running_average": False}),
}


@pytest.mark.parametrize("policies", [None, "bf16"])
@pytest.mark.parametrize("name", NORMS)
def test_norms_with_a_dtype_set_by_hand(name, policies):
    linen, in_nnx, options = NORMS[name]
    layer = linen(dtype=BF16, **options)
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)

    def loss(variables, x):
        return layer.apply(variables, x, mutable=["batch_stats"])[0].astype(jnp.float32).sum()

    def nnx_loss(layer, x):
        return layer(x).astype(jnp.float32).sum()

    assert audit(jax.grad(loss), variables, X, recipe=policies).findings == ()
    layer = in_nnx(64, dtype=BF16, rngs=nnx.Rngs(0), **options)
    assert audit(nnx.grad(nnx_loss), layer, X, recipe=policies).findings == ()


def rotary(x):
    angles = jnp.arange(16.0)[:, None] * jnp.ones(32)
    low, high = jnp.split(x, 2, axis=-1)
    turned = low * jnp.cos(angles) - high * jnp.sin(angles), high * jnp.cos(angles)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def fp32_softmax(x):
    logits = jnp.einsum("btd,bsd->bts", x, x) + jnp.zeros((16, 16), jnp.float32)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(logits).astype(x.dtype), x)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: rotary(x) @ jnp.ones((64, 64), BF16),
        fp32_softmax,
        lambda x: optax.sigmoid_binary_cross_entropy(x, jnp.ones(x.shape)).mean(),
        lambda x: jnp.mean((x - jnp.ones(x.shape)) ** 2),
        lambda x: (x * np.float32(2)).astype(BF16) @ jnp.ones((64, 64), BF16),
    ],
)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_what_is_cast_back_or_reduced_is_no_fault(fn, around):
    report = audit(around(fn), X)
    assert "implicit_promotion" not in kinds(report), str(report)
    gradient = jax.grad(lambda x: around(fn)(x).astype(jnp.float32).sum())
    report = audit(gradient, X)
    assert "implicit_promotion" not in kinds(report), str(report)


def test_derivatives_of_an_exact_gelu_are_no_exponentials():
    """The derivative of erf is exp(-x**2), which JAX computes in the forward pass."""

    def loss(w, x, activation):
        return matmul(activation(x @ w), w).astype(jnp.float32).sum()

    for around in (lambda f: f, jax.checkpoint):
        exact = functools.partial(loss, activation=lambda x: jax.nn.gelu(x, approximate=False))
        assert audit(jax.grad(around(exact)), W, X).findings == ()
        report = audit(jax.grad(around(functools.partial(loss, activation=jnp.exp))), W, X)
        assert report.counts() == {"exp_16bit": 1}


# ---------------------------------------------------------------------------
# Harmful promotions
# ---------------------------------------------------------------------------


def into_matmul(x, w):
    return matmul(x * np.float32(0.5), w)


def into_stream(x, w):
    x = x + jnp.ones(64)
    return matmul((x + matmul(x.astype(BF16), w)).astype(BF16), w)


def into_scanned_stream(x, ws):
    x = x + np.float32(1)
    return lax.scan(lambda x, w: (x + matmul(x.astype(BF16), w), None), x, ws[None])[0].astype(BF16)


@pytest.mark.parametrize("fn", [into_matmul, into_stream, into_scanned_stream])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint, with_own_gradient])
def test_an_fp32_constant_that_does_harm_is_one_fault(fn, around):
    gradient = jax.grad(lambda x, w: around(fn)(x, w).astype(jnp.float32).sum())
    for step in (around(fn), gradient):
        finding = the_only(audit(step, X, W).errors, "implicit_promotion")
        assert ", and " in finding.message and finding.file == __file__


@pytest.mark.parametrize("policies", [None, "bf16"])
def test_the_matmuls_of_a_promotion_have_its_fix(policies):
    """One change removes the promotion and all matmuls in FP32 that it causes."""
    gradient = jax.grad(lambda x, w: into_matmul(x, w).astype(jnp.float32).sum(), (0, 1))
    errors = audit(gradient, X, W, recipe=policies).errors
    here = lambda x, w: (x * np.float32(0.5) @ w).astype(jnp.float32)
    assert "This is the promotion" not in str(audit(here, X, W, recipe=policies))
    assert {f.check for f in errors} >= {"implicit_promotion", "mixed_operands"}
    assert all("which does not promote:\n    x * 0.5" in f.fix for f in errors)
    mended = lambda x, w: matmul(x * 0.5, w).astype(jnp.float32).sum()
    assert audit(jax.grad(mended, (0, 1)), X, W, recipe=policies).ok


def test_fp32_logits_that_promote_a_bias_are_returned_as_probabilities():
    logits = lambda x, w: jnp.matmul(x, w, preferred_element_type=jnp.float32) + x
    assert audit(lambda x, w: jax.nn.softmax(logits(x, w)), X, W).ok
    assert not audit(logits, X, W).ok


class NormWithoutDtype(nn.Module):
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            branch = nn.Dense(64, use_bias=False, dtype=BF16)(x)
            x = nn.LayerNorm(dtype=self.dtype)(x + branch)
        return x.astype(BF16)


def test_the_fix_of_a_promotion_by_zeros_is_no_number():
    """`jnp.concatenate` reads zeros, a literal in the program, and takes arrays alone."""

    def fn(x, w):
        return matmul(jnp.concatenate([x, jnp.zeros(x.shape, jnp.float32)]), w)

    finding = the_only(audit(fn, X, W).errors, "implicit_promotion")
    assert finding.message.startswith("concatenate of bfloat16 and float32 is computed in float32")
    code = "jnp.concatenate([x, jnp.zeros(x.shape, jnp.float32).astype(jnp.bfloat16)])"
    assert finding.fix == f"Cast the wide operand:\n    {code}" and finding.trial == "works"


@pytest.mark.parametrize(
    "fn, code",
    [
        (lambda x, y: jnp.where(x > 0, x, y), "jnp.where(x > 0, x, y.astype(jnp.bfloat16))"),
        (lambda x, y: jnp.where(x > 0, y, x), "jnp.where(x > 0, y.astype(jnp.bfloat16), x)"),
    ],
)
def test_the_fix_of_a_promotion_by_a_choice_casts_the_wide_case(fn, code):
    report = audit(lambda x, y, w: matmul(fn(x, y), w), X, X.update(dtype=jnp.float32), W)
    finding = the_only(report.errors, "implicit_promotion")
    assert finding.fix == f"Cast the wide operand:\n    {code}" and finding.trial == "works"


def test_a_layer_without_a_dtype_that_makes_the_stream_fp32():
    model = NormWithoutDtype()
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    (finding,) = audit(model.apply, variables, X).errors
    assert finding.check == "implicit_promotion" and finding.module == "LayerNorm_0"
    assert finding.primitive == "sub"
    assert "dtype=jnp.bfloat16" in finding.fix
    assert audit(NormWithoutDtype(BF16).apply, variables, X).findings == ()


def test_an_fp32_residual_stream_is_a_note():
    """The residual stream is FP32 from the start, and 16-bit branches are added to it."""

    def fn(table, tokens, w):
        x = table[tokens]
        for _ in range(2):
            x = x + matmul(x.astype(BF16), w)
        return x.astype(BF16)

    args = jnp.ones((32, 64)), jnp.zeros((8, 16), int), W
    report = audit(fn, *args)
    assert report.ok and {f.check for f in report.findings} == {"implicit_promotion"}


def test_the_fp32_state_of_a_recurrent_cell_is_a_note():
    cell = nn.OptimizedLSTMCell(64, dtype=BF16)
    model = nn.RNN(cell)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    assert audit(model.apply, variables, X).ok


def test_float64_that_promotes():
    def fn(x, table):
        return matmul(x * table, jnp.ones((64, 64), x.dtype))

    with jax.enable_x64(True):
        wide = jax.ShapeDtypeStruct((8, 16, 64), jnp.float32)
        for x in (X, wide):
            report = audit(fn, x, jnp.ones(64, jnp.float64))
            finding = the_only(report.errors, "implicit_promotion")
            assert f"{x.dtype.name} * float64 is computed in float64" in finding.message
        assert audit(fn, wide, jnp.ones(64, jnp.float32)).ok
