"""Rotary positions and activations of 16-bit operands, against FP64 and JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grids import EXPENSIVE, fast_cases
from jaxmp import functional
from jaxmp.errors import JaxmpError

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
HALVES = DTYPES[1:]


def f64(array):
    return np.asarray(array).astype(np.float64)


def half_ulp(dtype):
    """Returns half of the relative and of the absolute spacing of a dtype."""
    info = jnp.finfo(dtype)
    return float(info.eps) / 2, float(info.smallest_subnormal) / 2


def assert_rounded_once(found, exact, *, fp32=4e-6):
    """Checks that the error is half a unit in the last place, plus `fp32` for FP32 rounding."""
    relative, absolute = half_ulp(found.dtype)
    allowed = 1.01 * relative * np.abs(exact) + absolute + fp32 * (1 + np.abs(exact))
    error = np.abs(f64(found) - exact)
    assert (error <= allowed).all(), (error / allowed).max()


# ---------------------------------------------------------------------------
# Rotary positions
# ---------------------------------------------------------------------------


def rotary_64(x, positions, *, base=10000.0, scaling=1.0, interleaved=False):
    """Returns rotary embeddings `[..., T, N, H]`, with angles in extended precision."""
    size = x.shape[-1]
    rates = np.longdouble(base) ** -(np.arange(0, size, 2) / np.longdouble(size)) / scaling
    angles = np.asarray(positions).astype(np.longdouble)[..., None] * rates
    cos, sin = (fn(angles)[..., None, :] for fn in (np.cos, np.sin))
    x = f64(x)
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


# Compiled: of operations that run one by one, each would be compiled by itself.
rotate = jax.jit(
    functional.rotary_embedding, static_argnames=("base", "scaling", "interleaved", "rotary_dim")
)

FAR = np.array([0, 1, 255, 257, 2049, 2**17, 2**17 + 1, 2**24 + 1, 2**31 - 1, -1, -(2**20)])


def activations(dtype, size=64, rows=11):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(2, rows, 3, size)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@fast_cases("False-bfloat16", "True-float16", "True-float32")
def test_every_int32_position_is_rotated_as_in_fp64(dtype, interleaved):
    x = activations(dtype)
    options = {"interleaved": interleaved, "base": 500000.0, "scaling": 4.0}
    found = rotate(x, FAR, **options)
    assert found.dtype == dtype
    # The longdouble reference has 64 bits: 2**31 radians are accurate to 1e-10.
    assert_rounded_once(found, rotary_64(x, FAR, **options).astype(np.float64), fp32=2e-6)


def test_what_goes_wrong_elsewhere():
    x = activations(jnp.float32)
    exact = rotary_64(x, FAR).astype(np.float64)
    rates = 10000.0 ** -(np.arange(0, 64, 2) / 64)

    def usual(positions, angle_dtype):
        angles = positions.astype(angle_dtype)[:, None] * jnp.asarray(rates, angle_dtype)[None]
        angles = angles.astype(jnp.float32)[:, None]
        cos, sin = jnp.cos(angles)[None], jnp.sin(angles)[None]
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    positions = jnp.asarray(FAR, jnp.int32)
    error = lambda found, row: np.abs(f64(found) - exact)[:, row].max()
    ours = rotate(x, positions)
    assert max(error(ours, row) for row in range(len(FAR))) < 4e-6
    # bfloat16 positions: 257 is 256.
    assert jnp.bfloat16(257) == jnp.bfloat16(256)
    assert error(usual(positions, jnp.bfloat16), 3) > 0.5
    # float16 angles: 2049 is 2048, and 2**17 is infinite.
    assert error(usual(positions, jnp.float16), 4) > 0.5
    assert np.isnan(usual(positions, jnp.float16)[:, 5]).any()
    # FP32 angles at 2**17: off by more than the rounding of a bfloat16 result.
    assert error(usual(positions, jnp.float32), 5) > 2.0**-9


def test_gradient_is_the_rotation_back():
    x = activations(jnp.bfloat16, rows=4)
    positions = jnp.array([0, 1, 300, 2**17])
    cotangent = activations(jnp.bfloat16, rows=4)[::-1]
    (slope,) = jax.jit(lambda x, c: jax.vjp(lambda x: rotate(x, positions), x)[1](c))(x, cotangent)
    assert slope.dtype == jnp.bfloat16
    assert_rounded_once(slope, rotary_64(cotangent, -positions).astype(np.float64))


def test_scores_depend_on_distance_alone():
    q, k = activations(jnp.float32, rows=4), activations(jnp.float32, rows=4)[::-1]
    score = lambda start: jnp.einsum(
        "btnh,btnh->btn",
        rotate(q, jnp.arange(4) + start),
        rotate(k, jnp.arange(4) * 2 + start),
    )
    np.testing.assert_allclose(score(0), score(2**20), rtol=1e-4, atol=1e-4)


@EXPENSIVE
def test_shapes_of_positions_part_of_the_features_and_given_frequencies():
    x = activations(jnp.bfloat16, rows=5)
    row = jnp.arange(5) * 1000
    whole = rotate(x, row)
    each = rotate(x, jnp.stack([row, row]))
    np.testing.assert_array_equal(each, whole)
    np.testing.assert_array_equal(rotate(x[0], row), whole[0])
    mapped = jax.vmap(rotate, (0, None))(x, row)
    np.testing.assert_array_equal(mapped, whole)

    part = rotate(x, row, rotary_dim=16)
    np.testing.assert_array_equal(part[..., 16:], x[..., 16:])
    alone = rotate(x[..., :16], row)
    np.testing.assert_array_equal(part[..., :16], alone)

    rates = 10000.0 ** -(np.arange(0, 64, 2) / 64)
    given = functional.rotary_embedding(x, row, frequencies=rates)
    np.testing.assert_array_equal(given, whole)
    # Fractions of positions, in FP32.
    halves = rotate(x, jnp.arange(5) / 2)
    scaled = rotate(x, jnp.arange(5), scaling=2.0)
    np.testing.assert_allclose(f64(halves), f64(scaled), rtol=2**-7, atol=1e-6)
    small = rotate(x, row.astype(jnp.int16))
    np.testing.assert_array_equal(small, whole)


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------

X, T = jnp.zeros((1, 4, 2, 6)), jnp.arange(4)
rotary = functional.rotary_embedding


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rotary(X, T.astype(jnp.bfloat16)), r"bfloat16.*above 256.*jnp.arange\(4\)"),
        (lambda: rotary(X, T.astype(jnp.float16)), "float16.*above 2048"),
        (lambda: rotary(X, T > 0), "bool cannot represent"),
        (lambda: rotary(X, jnp.arange(3)), r"\[3\].*\[1, 4\].*jnp.arange\(4\)"),
        (lambda: rotary(X, jnp.zeros((2, 4), int)), r"\[2, 4\]"),
        (lambda: rotary(X[0, 0], T), r"\[\.\.\., T, N, H\]"),
        (lambda: rotary(X[..., :5], T), "must be even.*rotary_dim=4"),
        (lambda: rotary(X, T, rotary_dim=8), "from 2 to 6"),
        (lambda: rotary(X, T, rotary_dim=2.0), "not an integer"),
        (lambda: rotary(X, T, base=0), "base=0 must be a number above 0"),
        (lambda: rotary(X, T, scaling="2x"), "scaling='2x'.*scaling=1.0"),
        (lambda: jax.jit(lambda b: rotary(X, T, base=b))(2.0), "known when the program is traced"),
        (lambda: rotary(X, T, frequencies=[1.0]), r"shape \[1\].*shape \[3\]"),
        (lambda: rotary(X, T, frequencies=[1.0] * 3, base=5.0), "frequencies replace base"),
        (lambda: jax.jit(lambda f: rotary(X, T, frequencies=f))(jnp.ones(3)), "NumPy array"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(JaxmpError, match=message):
        call()


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


# ---------------------------------------------------------------------------
# Linear layers
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_layers_are_those_of_fp64_and_gradients_of_parameters_are_not_rounded(dtype):
    rng = np.random.default_rng(0)
    draw = lambda *shape, dtype=jnp.float32: jnp.asarray(rng.normal(size=shape), dtype)
    x, d_out = draw(3, 5, 24, dtype=dtype), draw(3, 5, 16, dtype=dtype)
    # FP32 parameters that the compute dtype represents exactly.
    kernel, bias = (draw(*shape).astype(dtype).astype(jnp.float32) for shape in ((24, 16), (16,)))
    out, backward = jax.vjp(functional.linear, x, kernel, bias)
    d_x, d_kernel, d_bias = backward(d_out)
    assert (out.dtype, d_x.dtype, d_kernel.dtype, d_bias.dtype) == (dtype, dtype, *["float32"] * 2)
    rows, d_rows = f64(x).reshape(-1, 24), f64(d_out).reshape(-1, 16)
    np.testing.assert_allclose(d_kernel, rows.T @ d_rows, rtol=0, atol=2e-5)
    np.testing.assert_allclose(d_bias, d_rows.sum(0), rtol=0, atol=2e-5)
    assert_rounded_once(d_x, f64(d_out) @ f64(kernel).T, fp32=1e-5)
    # The product is rounded before the bias is added.
    exact, eps = f64(x) @ f64(kernel) + f64(bias), float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(f64(out), exact, rtol=eps, atol=eps * 16)


def test_linear_layers_multiply_in_16_bits_and_convert_no_gradient():
    x, kernel, d_out = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 6)), jnp.ones((4, 6))

    def gradients(x, kernel, d_out):
        _, backward = jax.vjp(functional.linear, x, kernel)
        return backward(d_out.astype(x.dtype))

    equations = jax.make_jaxpr(jax.vmap(gradients))(x[None], kernel[None], d_out[None]).eqns
    dots = [e for e in equations if e.primitive.name == "dot_general"]
    assert [str(v.aval.dtype) for e in dots for v in e.invars] == ["bfloat16"] * 2 * len(dots)
    assert sorted(str(e.outvars[0].aval.dtype) for e in dots) == ["bfloat16"] * 2 + ["float32"]
    converted = [e for e in equations if e.primitive.name == "convert_element_type"]
    assert all(e.params["new_dtype"] == jnp.bfloat16 for e in converted)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 8), (6, 8)), r"x must be \[\.\.\., K\]"),
        (((4, 8), (8,)), r"kernel\.T"),
        (((4, 8), (8, 6), (8,)), r"bias\.reshape\(6\)"),
    ],
)
def test_linear_layers_refuse_what_does_not_fit(shapes, message):
    with pytest.raises(JaxmpError, match=message):
        functional.linear(*map(jnp.ones, shapes))
