"""Casts at the boundaries of modules: their range, what they leave alone, and error messages."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmp import linen as jl
from jaxmp import nnx as jn
from jaxmp._trees import saturating_cast

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


def _attend(bias):
    """Softmax over rows that `bias` masks entirely."""
    return jax.nn.softmax(jnp.zeros(bias.shape, bias.dtype) + bias)


class MaskedSoftmax(nn.Module):
    def __call__(self, bias):
        return _attend(bias)


class MaskedSoftmaxNnx(nnx.Module):
    def __call__(self, bias):
        return _attend(bias)


@pytest.mark.parametrize(("policy", "value"), [(BF16, FLOAT32_MIN), (FP16, -1e9)])
def test_rows_that_a_finite_mask_hides_stay_finite(policy, value):
    mask = jnp.full((2, 4), value, jnp.float32)
    linen = jl.apply_policy(MaskedSoftmax(), policy)
    for model in (
        lambda mask: linen.apply({}, mask),
        jn.apply_policy(MaskedSoftmaxNnx(), policy),
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
        out = jl.apply_policy(nn.LayerNorm(), policy).apply({"params": params}, x)
    else:
        layer = nnx.LayerNorm(2, rngs=nnx.Rngs(0))
        layer.scale[...] = scale
        out = jn.apply_policy(layer, policy)(x)
    assert out[0, 0] == -65504
