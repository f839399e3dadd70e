"""All test networks under policies, in both frameworks.

The tests check the traced program and its results.
"""

import collections
import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
import jaxmp.nnx
from grids import EXPENSIVE, REST, fast_cases
from models import BUILDS, BY_NAME, MIXED, NORM, SECOND, TWINS, LinenBuild, NNXBuild, tokens
from programs import dtypes, leaf_dtypes, module_path, named, products, relative_error

FLOAT16 = "p=f32,c=f16,o=f32"
HALF_PARAMS = "p=bf16,c=bf16,o=f32"

# |bf16 - fp32| / |fp32| in the 2-norm for all networks; measured: results 0.002 to 0.010.
RESULT_BUDGET = 0.02
GRADIENT_BUDGET = 0.04
# float16 has 3 more bits of mantissa.
F16_BUDGET = RESULT_BUDGET / 8

every_build = pytest.mark.parametrize("build", BUILDS, ids=str)
every_linen_build, every_nnx_build = (
    pytest.mark.parametrize("build", [b for b in BUILDS if isinstance(b, kind)], ids=str)
    for kind in (LinenBuild, NNXBuild)
)


def every_twin(marks=lambda case: ()):
    names = ("linen", "nnx")
    pairs = [(case, tuple(BY_NAME[f"{case}-{name}"] for name in names)) for case in TWINS]
    twins = [pytest.param(pair, marks=marks(case)) for case, pair in pairs]
    return pytest.mark.parametrize("twins", twins, ids=lambda twins: str(twins[0].case))


def slow(case):
    return pytest.param(case, marks=REST)


# Networks whose programs take a second to compile. Their layers are those of the others or resemble
# them, and tests of traced programs have them too.
LARGE = {
    *("bidirectional", "cnn_wide", "conv_lstm", "encoder_decoder", "ensemble", "fast_lstm"),
    *("grouped_queries", "gru", "mgu", "qk_norm", "scanned", "simple_cell", "tied_wide"),
    *("transformer", "unet", "vit"),
}


def marks(build):
    return REST if str(build) in SECOND else EXPENSIVE if build.case.name in LARGE else ()


# For tests that take long.
one_build_of_twins = pytest.mark.parametrize(
    "build", [pytest.param(build, marks=marks(build)) for build in BUILDS], ids=str
)


# ---------------------------------------------------------------------------
# Unchanged by a policy
# ---------------------------------------------------------------------------


@every_linen_build
@fast_cases(
    "mlp-linen",
    "einsum-linen",
    "tied_wide-linen",
    "cnn-linen",
    "lstm-linen",
    "attention-linen",
    "scanned-linen",
    "moe-linen",
)
def test_init_is_the_plain_models_program(build):
    """The programs are equal, so the results are bit-identical."""
    with build.case.promotion():
        plain, wrapped = (
            jax.make_jaxpr(model.init, return_shape=True)(jax.random.key(0), *build.case.args())
            for model in (build.model(), build.model(MIXED))
        )
    assert str(wrapped) == str(plain)


@every_nnx_build
def test_the_original_is_untouched_and_its_variables_are_shared(build):
    plain = build.model()
    before = nnx.graphdef(plain), nnx.to_flat_state(nnx.state(plain))
    wrapped = build.model(MIXED)
    after = nnx.graphdef(plain), nnx.to_flat_state(nnx.state(wrapped))
    assert after[0] == before[0] != nnx.graphdef(wrapped)
    assert [path for path, _ in after[1]] == [path for path, _ in before[1]]
    assert all(a is b for (_, a), (_, b) in zip(after[1], before[1], strict=True))


@one_build_of_twins
def test_fp32_policies_change_nothing(build):
    """The program has the equations of the unwrapped model, and those that keep state finite."""
    plain, wrapped = (list(map(signature, build.program(each))) for each in (None, "f32"))
    added = collections.Counter(wrapped) - collections.Counter(plain)
    assert {name for name, *_ in added} <= {"is_finite", "select_n", "broadcast_in_dim"}
    assert not collections.Counter(plain) - collections.Counter(wrapped)
    assert added or wrapped == plain


def signature(equation):
    return equation.primitive.name, *(str(v.aval) for v in (*equation.invars, *equation.outvars))


@pytest.mark.parametrize("build", [BY_NAME["mlp-nnx"], BY_NAME["attention-linen"]], ids=str)
def test_a_jaxmp_free_program_would_be_caught(build):
    """The unwrapped model fails the test of operands, because its matmuls are in FP32."""
    assert {dtypes(e)[0] for e in products(build.program(None))} == {"float32"}


# ---------------------------------------------------------------------------
# Set by a policy
# ---------------------------------------------------------------------------


@every_build
def test_every_product_has_the_operands_that_the_rules_say(build):
    traced = products(build.program(MIXED))
    assert len(traced) >= 3
    for equation in traced:
        expected = "float32" if "/router" in module_path(equation) else "bfloat16"
        assert dtypes(equation)[:2] == (expected, expected), module_path(equation)


# Networks that return the result of their last linear layer, or only select or reshape it.
HEADS = {
    *("cnn", "cnn_wide", "einsum", "fast_lstm", "grouped_queries", "gru", "hard_coded", "lstm"),
    *("mgu", "mlp", "simple_cell", "tied", "vit"),
}


@every_build
def test_products_are_wide_only_where_a_rule_or_a_softmax_asks(build):
    """Only attention logits, heads, and modules with a rule have matmuls with FP32 results."""
    asked = [rule.path.strip("*/") for rule in build.case.rules]
    traced = products(build.forward(MIXED)[0])
    wide = {module_path(e) for e in traced if dtypes(e)[2] == "float32"}
    for equation in traced:
        path = module_path(equation)
        is_head = build.case.name in HEADS and equation is traced[-1]
        is_asked = any(f"/{name}" in path for name in asked)
        expected = is_head or is_asked or is_attention_logits(path)
        assert dtypes(equation)[2] == ("float32" if expected else "bfloat16"), path
    assert all(any(f"/{name}" in path for path in wide) for name in asked)


def is_attention_logits(path):
    """Returns True for Q K^T, the only matmul in the scope of the attention module itself."""
    return re.search(r"attention\w*$", path, re.IGNORECASE)


@every_build
def test_statistics_and_softmax_are_in_fp32(build):
    traced, classes = build.program(MIXED), " ".join(build.classes())
    roots, exponentials = named(traced, "rsqrt"), named(traced, "exp")
    arithmetic = named(traced, "reduce_sum", "mul", "add", "sub", "div")
    in_norms = [equation for equation in arithmetic if NORM.search(module_path(equation))]
    assert bool(roots) == bool(in_norms) == ("Norm" in classes or build.case.name == "qk_norm")
    assert bool(exponentials) >= bool(re.search("Attention|Router", classes))
    for equation in roots + exponentials + named(traced, "sin", "cos") + in_norms:
        assert equation.invars[0].aval.dtype == jnp.float32, module_path(equation)


@one_build_of_twins
def test_parameters_stored_in_half_trace_the_same_products(build):
    """Statistics and outputs stay in FP32."""
    mixed, *_ = build.forward(MIXED)
    half, out, state = build.forward(HALF_PARAMS)
    assert list(map(signature, products(half))) == list(map(signature, products(mixed)))
    assert out.dtype == jnp.float32
    floating = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert all(leaf.dtype == jnp.float32 for leaf in floating)
    assert bool(floating) == ("BatchNorm" in build.classes())


# ---------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------


@one_build_of_twins
@fast_cases("mlp-nnx", "tied-linen", "attention-linen", "hard_coded-nnx", "raw_param-linen")
def test_result_and_gradients_are_close_to_fp32(build):
    reference, state, reference_gradients = build.run(None)
    out, new_state, gradients = build.run(MIXED)
    assert out.dtype == jnp.float32
    assert leaf_dtypes(new_state) == leaf_dtypes(state)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {np.dtype("float32")}
    assert 0 < relative_error(out, reference) < RESULT_BUDGET
    assert 0 < relative_error(gradients, reference_gradients) < GRADIENT_BUDGET


CLOSER = ["mlp_wide_head", "cnn", "attention", "grouped_queries"]


@pytest.mark.parametrize("build", [b for b in BUILDS if b.case.name in CLOSER], ids=str)
@fast_cases("mlp_wide_head-linen", "attention-nnx")
def test_float16_is_closer(build):
    assert 0 < relative_error(build.output(FLOAT16), build.output(None)) < F16_BUDGET


# ---------------------------------------------------------------------------
# Both frameworks
# ---------------------------------------------------------------------------


@every_twin()
def test_twins_have_the_same_parameters(twins):
    linen, nnx_build = twins
    paths = nnx.to_flat_state(nnx.state(nnx_build.model(), (nnx.Param, nnx.BatchStat)))
    assert {linen.case.linen_path(path) for path, _ in paths} == set(linen.numbers)


@every_twin()
@pytest.mark.parametrize("policies", [MIXED, slow(FLOAT16), slow("f32")])
def test_twins_trace_to_the_same_products(twins, policies):
    first, second = (collections.Counter(map(kind, products(b.program(policies)))) for b in twins)
    assert first == second


def kind(product):
    return product.primitive.name, *dtypes(product)


# Two orders of the same FP32 operations; measured: at most 2e-7.
SAME = 1e-6


@every_twin(lambda case: EXPENSIVE if case.name in LARGE else ())
@fast_cases("mlp", "tied", "attention", "raw_param")
def test_twins_have_the_same_numbers(twins):
    for policies, limit in ((None, SAME), (MIXED, RESULT_BUDGET)):
        first, second = (
            build.output(policies) if str(build) in SECOND else build.run(policies)[0]
            for build in twins
        )
        assert relative_error(second, first) < limit


# ---------------------------------------------------------------------------
# Comparison with hand-written mixed precision
# ---------------------------------------------------------------------------


class ByHand(nn.Module):
    """Hand-written mixed precision: `dtype` in every layer, softmax and statistics in FP32."""

    layers: int
    dtype: Any = None
    attention_fn: Any = nn.dot_product_attention

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16, dtype=self.dtype)(tokens)
        mask = nn.make_causal_mask(tokens, dtype=bool)
        for _ in range(self.layers):
            attention = nn.MultiHeadDotProductAttention(
                num_heads=2, dtype=self.dtype, attention_fn=self.attention_fn
            )
            x = x + attention(nn.LayerNorm(dtype=self.dtype)(x), mask=mask)
            y = nn.Dense(64, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            x = x + nn.Dense(16, dtype=self.dtype)(nn.gelu(y))
        return nn.Dense(32, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


def test_linen_takes_no_more_operations_than_by_hand():
    plain = ByHand(layers=2)
    by_hand = plain.clone(
        dtype=jnp.bfloat16,
        attention_fn=functools.partial(nn.dot_product_attention, force_fp32_for_softmax=True),
    )
    variables = jax.eval_shape(plain.init, jax.random.key(0), tokens(2, 6))
    wrapped = jaxmp.load_recipe(MIXED).wrap(plain)
    with jax.numpy_dtype_promotion("standard"):  # Flax's LayerNorm subtracts FP32 from bf16
        ours, theirs = (
            operations(lambda v, model=model: model.apply(v, tokens(2, 6)), variables)
            for model in (wrapped, by_hand)
        )
    assert ours <= 1.02 * theirs


def operations(fn, params):
    """Returns the number of lowered operations of the gradient of the sum of `fn(params)`."""
    loss = lambda params: fn(params).astype(jnp.float32).sum()
    return jax.jit(jax.grad(loss)).lower(params).as_text().count(" = stablehlo.")


def test_nnx_takes_no_more_operations_than_by_hand():
    build = BY_NAME["transformer-nnx"]
    by_hand = nnx.clone(build.model())
    by_hand.set_attributes(dtype=jnp.bfloat16)
    by_hand.set_attributes(attention_fn=jaxmp.attention_fn())

    def count(model):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        return operations(lambda p: nnx.merge(graphdef, p, rest)(tokens(2, 6)), params)

    wrapped = jaxmp.load_recipe(MIXED).wrap(build.model())
    with jax.numpy_dtype_promotion("standard"):  # Flax's LayerNorm subtracts FP32 from bf16
        assert count(wrapped) <= 1.02 * count(by_hand)
