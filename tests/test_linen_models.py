"""Every model of the zoo under a policy, judged by the program it traces to, and by its numbers."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp._rules import PolicyMap
from jaxmp.linen import apply_policy
from models_linen import (
    CASES,
    MIXED,
    dtypes,
    leaf_dtypes,
    module_path,
    named,
    products,
    relative_error,
    tokens,
)

# |bf16 - fp32| / |fp32| in the 2-norm over the zoo; measured: results 0.002 to 0.010.
RESULT_BUDGET = 0.02
GRADIENT_BUDGET = 0.04
# float16 has 3 more bits of mantissa.
F16_BUDGET = RESULT_BUDGET / 8

every_case = pytest.mark.parametrize("case", CASES, ids=str)
BY_NAME = {case.name: case for case in CASES}


@functools.cache
def gradient_program(case, default):
    model = case.model if default is None else apply_policy(case.model, case.policies(default))
    return case.trace_gradient(model, case.variables())


@every_case
def test_init_is_the_plain_models_program(case):
    """One program, so one result, bit for bit."""
    with case.promotion():
        plain, policied = (
            jax.make_jaxpr(model.init)(jax.random.key(0), *case.args())
            for model in (case.model, apply_policy(case.model, case.policies()))
        )
    assert str(policied) == str(plain)


@pytest.mark.parametrize("name", ["mlp", "raw_param"])
def test_init_is_bit_identical(name):
    case = BY_NAME[name]
    with case.promotion():
        plain, policied = (
            jax.jit(model.init)(jax.random.key(0), *case.args())
            for model in (case.model, apply_policy(case.model, case.policies()))
        )
    assert jax.tree.structure(plain) == jax.tree.structure(policied)
    for mine, theirs in zip(jax.tree.leaves(policied), jax.tree.leaves(plain), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@every_case
def test_every_product_has_the_operands_that_the_rules_say(case):
    traced = products(gradient_program(case, MIXED))
    assert len(traced) >= 3
    for equation in traced:
        expected = "float32" if "router" in module_path(equation) else "bfloat16"
        assert dtypes(equation)[:2] == (expected, expected), module_path(equation)


@every_case
def test_statistics_and_softmax_are_in_fp32(case):
    traced = gradient_program(case, MIXED)
    in_norms = [
        equation
        for equation in named(traced, "reduce_sum", "mul", "add", "sub")
        if "Norm_" in module_path(equation).rsplit("/")[-1]
    ]
    for equation in named(traced, "rsqrt", "exp") + in_norms:
        assert equation.invars[0].aval.dtype == jnp.float32, module_path(equation)


@every_case
def test_result_and_gradients_are_close_to_fp32(case):
    variables = case.variables()
    reference, state, reference_gradients = case.run(case.model, variables)
    model = apply_policy(case.model, case.policies())
    out, new_state, gradients = case.run(model, variables)
    assert out.dtype == jnp.float32
    assert leaf_dtypes(new_state) == leaf_dtypes(state)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {np.dtype("float32")}
    assert 0 < relative_error(out, reference) < RESULT_BUDGET
    assert 0 < relative_error(gradients, reference_gradients) < GRADIENT_BUDGET


@pytest.mark.parametrize("name", ["mlp_wide_head", "cnn", "attention"])
def test_float16_is_closer(name):
    case = BY_NAME[name]
    variables = case.variables()
    reference, *_ = case.run(case.model, variables)
    out, *_ = case.run(apply_policy(case.model, case.policies("p=f32,c=f16,o=f32")), variables)
    assert 0 < relative_error(out, reference) < F16_BUDGET


@every_case
def test_fp32_policies_change_nothing(case):
    """The same program, equation by equation, as the plain model's."""
    plain, policied = gradient_program(case, None), gradient_program(case, "f32")
    assert list(map(signature, policied)) == list(map(signature, plain))


def signature(equation):
    return equation.primitive.name, *(str(v.aval) for v in (*equation.invars, *equation.outvars))


@every_case
def test_a_jaxmp_free_program_would_be_caught(case):
    """The plain model fails the test of operands: its products are in FP32."""
    assert all(dtypes(e)[0] == "float32" for e in products(gradient_program(case, None)))


def test_policies_by_default_alone_need_no_rules():
    case = BY_NAME["transformer"]
    traced = case.trace_gradient(
        apply_policy(case.model, PolicyMap("p=f32,c=bf16,o=bf16")), case.variables()
    )
    assert {dtypes(e)[:2] for e in products(traced)} == {("bfloat16", "bfloat16")}


class HandSet(nn.Module):
    """What a careful author writes by hand: `dtype` in every layer, FP32 softmax and statistics."""

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


def test_no_more_operations_than_by_hand():
    plain = HandSet(layers=4)
    by_hand = plain.clone(
        dtype=jnp.bfloat16,
        attention_fn=functools.partial(nn.dot_product_attention, force_fp32_for_softmax=True),
    )
    variables = jax.eval_shape(plain.init, jax.random.key(0), tokens(2, 6))

    def operations(model):
        loss = lambda v: model.apply(v, tokens(2, 6)).astype(jnp.float32).sum()
        return jax.jit(jax.grad(loss)).lower(variables).as_text().count(" = stablehlo.")

    with jax.numpy_dtype_promotion("standard"):  # Flax's LayerNorm subtracts FP32 from bf16
        assert operations(apply_policy(plain, MIXED)) <= 1.02 * operations(by_hand)
