"""Activations of 16-bit operands, against FP64 and JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arrays import f64
from grids import fast_cases
from jaxmp import JaxmpError, functional

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


# ---------------------------------------------------------------------------
# Activations
# ---------------------------------------------------------------------------

ACTIVATIONS = {
    "gelu": (functional.gelu, jax.nn.gelu),
    "gelu_erf": (
        functools.partial(functional.gelu, approximate=False),
        functools.partial(jax.nn.gelu, approximate=False),
    ),
    "silu": (functional.silu, jax.nn.silu),
    "swiglu": (
        lambda x: functional.swiglu(x, x[..., ::-1]),
        lambda x: jax.nn.silu(x) * x[..., ::-1],
    ),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@fast_cases("float32-gelu", "bfloat16-gelu_erf", "float16-silu", "bfloat16-swiglu")
def test_activations_are_those_of_jax(name, dtype):
    own, reference = ACTIVATIONS[name]
    x = jnp.linspace(-8, 8, 257).astype(dtype)
    np.testing.assert_array_equal(own(x), reference(x))
    slope, expected = (
        jax.grad(lambda x, fn=fn: fn(x).astype(jnp.float32).sum())(x) for fn in (own, reference)
    )
    assert slope.dtype == dtype
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    # The slope of `jax.nn.gelu` has an error of 1e-5 in FP32, where 1 + tanh is almost 0.
    absolute = max(2 * tolerance, 1.5e-5 if name == "gelu" else 0.0)
    np.testing.assert_allclose(f64(slope), f64(expected), rtol=tolerance, atol=absolute)


@pytest.mark.parametrize("dtype", DTYPES)
@fast_cases("bfloat16")
def test_the_slope_of_gelu_is_that_of_fp64_and_finite_for_any_operand(dtype):
    x = jnp.linspace(-12, 12, 257).astype(dtype)
    slope = lambda x: jax.grad(lambda x: functional.gelu(x).astype(jnp.float32).sum())(x)
    wide = f64(x)
    gate = 1 / (1 + np.exp(-np.sqrt(8 / np.pi) * (wide + 0.044715 * wide**3)))
    expected = gate + wide * gate * (1 - gate) * np.sqrt(8 / np.pi) * (1 + 0.134145 * wide**2)
    eps = float(jnp.finfo(dtype).eps)
    # The error of `jax.nn.gelu` is 3.4e-6 here in FP32.
    np.testing.assert_allclose(f64(slope(x)), expected, rtol=eps, atol=2.5e-6)
    # JAX's slope of float16 is NaN from 256 on, where the square overflows.
    info = jnp.finfo(dtype)
    x = jnp.array([-jnp.inf, info.min, -300, 300, info.max, jnp.inf, jnp.nan], dtype)
    np.testing.assert_array_equal(f64(slope(x)), [0, 0, 0, 1, 1, 1, np.nan])


@pytest.mark.parametrize("name", ACTIVATIONS)
@fast_cases("gelu", "swiglu")
def test_activations_save_their_inputs_alone_and_can_be_transformed(name):
    own, reference = ACTIVATIONS[name]
    x = jnp.linspace(-3, 3, 12, dtype=jnp.float32).reshape(3, 4)
    saved = sum(leaf.size for leaf in jax.tree.leaves(jax.vjp(own, x)[1]))
    assert saved == x.size * (2 if name == "swiglu" else 1)
    assert saved < sum(leaf.size for leaf in jax.tree.leaves(jax.vjp(reference, x)[1]))
    np.testing.assert_allclose(jax.vmap(own)(x), reference(x), rtol=1e-6)
    total, plain = (lambda x, fn=fn: fn(x).sum() for fn in (own, reference))
    forward = jax.jvp(total, (x,), (jnp.ones_like(x),))[1]
    np.testing.assert_allclose(forward, jax.grad(plain)(x).sum(), rtol=1e-5)
    second, expected = (
        jax.grad(lambda x, fn=fn: jax.grad(fn)(x).sum())(x) for fn in (total, plain)
    )
    np.testing.assert_allclose(second, expected, rtol=1e-4, atol=1e-5)
    scanned = lambda fn: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (fn(c), None), x, None, 3)[0].sum()
    )
    np.testing.assert_allclose(jax.jit(scanned(own))(x), scanned(reference)(x), 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: functional.gelu(jnp.arange(4)), r"x is int32 of shape \[4\]"),
        (lambda: functional.silu(jnp.arange(4)), "x is int32"),
        (lambda: functional.swiglu(jnp.ones(4), jnp.ones(3)), r"\[4\].*\[3\].*jnp.split"),
        (lambda: functional.swiglu(jnp.ones(4), jnp.ones(4, jnp.bfloat16)), "bfloat16"),
    ],
)
def test_activations_refuse_what_does_not_fit(call, message):
    with pytest.raises(JaxmpError, match=message):
        call()
