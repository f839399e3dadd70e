"""Scales and casts to FP8 against `ml_dtypes`, for all codes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmp import fp8
from jaxmp._core._compat import scan_counts
from jaxmp._programs._jaxprs import equations
from jaxmp.errors import PolicyError

FORMATS = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
SOURCES = ["float32", "bfloat16", "float16"]


def codes(dtype):
    """Returns the 256 values of a format, in float32."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def bits(x):
    return np.asarray(x).view(np.uint8)


def quantize(x, scale, dtype):
    return jax.jit(lambda x: fp8._operands.quantize(x, scale, dtype))(x)


def limit(dtype):
    return float(ml_dtypes.finfo(dtype).max)


# ---------------------------------------------------------------------------
# Casts
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("exponent", [-20, 0, 13])
def test_every_code_comes_back(dtype, exponent):
    """Power-of-two scales are exact, so each value is reproduced exactly."""
    numbers = codes(dtype)
    finite = np.isfinite(numbers)
    q = quantize(numbers * np.float32(2.0**-exponent), 2.0**exponent, dtype)
    np.testing.assert_array_equal(bits(q)[finite], np.arange(256, dtype=np.uint8)[finite])
    # Also the infinities of E5M2.
    assert np.isnan(np.asarray(q).astype(np.float32)[~finite]).all() and (~finite).any()


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("source", SOURCES)
def test_ties_go_to_even_and_their_neighbours_do_not(dtype, source):
    numbers = np.unique(codes(dtype)[np.isfinite(codes(dtype))])
    middle = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    x = np.concatenate(
        [
            middle,
            np.nextafter(middle, np.float32(np.inf)),
            np.nextafter(middle, np.float32(-np.inf)),
        ]
    )
    x = np.asarray(jnp.asarray(x).astype(source).astype(jnp.float32))
    np.testing.assert_array_equal(
        bits(quantize(jnp.asarray(x, source), 1.0, dtype)), bits(x.astype(dtype))
    )


@pytest.mark.parametrize(
    ("dtype", "x", "want"),
    [
        # A bare cast of 464 rounds to 448 (a tie) and of anything above is NaN; of 61440 is
        # infinity (a tie).
        ("e4m3fn", [448.0, 464.0, 464.01, 1e30, -480.0], [448.0, 448.0, 448.0, 448.0, -448.0]),
        ("e5m2", [57344.0, 61439.0, 61440.0, 1e30, -1e9], [57344.0] * 4 + [-57344.0]),
    ],
)
def test_what_is_too_large_saturates(dtype, x, want):
    assert quantize(jnp.array(x, jnp.float32), 1.0, dtype).tolist() == want


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("source", [*SOURCES, "float64"])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_what_is_not_finite_stays_so(dtype, source, scale):
    with jax.enable_x64(source == "float64"):
        q = quantize(jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0.0, 1.0], source), scale, dtype)
        assert np.isfinite(np.asarray(q).astype(np.float32)).tolist() == [False] * 3 + [True] * 2


def test_a_stale_scale_saturates_what_is_finite():
    """x * scale overflows FP32, although x is finite."""
    assert quantize(jnp.array([3e38, -3e38], jnp.float32), 1e10, "e4m3fn").tolist() == [
        448.0,
        -448.0,
    ]


def test_scales_broadcast():
    x = jnp.ones((2, 3), jnp.float32)
    q = fp8._operands.quantize(x, jnp.array([[2.0], [4.0]], jnp.float32), "e4m3fn")
    assert q.tolist() == [[2.0] * 3, [4.0] * 3]


@pytest.mark.parametrize("dtype", ["bf16", "float8_e8m0fnu", "e9m9", "int8", None])
def test_other_formats_are_refused(dtype):
    with pytest.raises(PolicyError, match="e4m3fn"):
        fp8._operands.quantize(jnp.ones(2), 1.0, dtype)
    with pytest.raises(PolicyError, match="e4m3fn"):
        fp8._operands.compute_scale(1.0, dtype)


# ---------------------------------------------------------------------------
# Scales
# ---------------------------------------------------------------------------

LARGEST = np.finfo(np.float32).max
SUBNORMAL = np.float32(1e-40)


def reference_scale(amax, dtype, margin=0, power_of_two=False):
    """Computes the scale in plain Python."""
    if amax == 0 or not np.isfinite(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(limit(dtype) * 2.0**-margin) / np.float32(amax)
    scale = np.clip(scale, np.finfo(np.float32).tiny, LARGEST)
    return np.float32(2.0 ** np.floor(np.log2(np.float64(scale)))) if power_of_two else scale


AMAXES = [0.0, -0.0, np.inf, np.nan, SUBNORMAL, 1e-45, 1.2e-38, 1e-20, 0.3, 1.0, 448.0, 1e5, 3e38]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("jitted", [False, True])
def test_scales_follow_the_rule(dtype, margin, power_of_two, jitted):
    amax = np.array(AMAXES, np.float32)
    fn = lambda x: fp8._operands.compute_scale(x, dtype, margin, power_of_two)
    scale = np.asarray((jax.jit(fn) if jitted else fn)(amax))
    want = [reference_scale(x, dtype, margin, power_of_two) for x in amax]
    np.testing.assert_array_equal(scale, np.array(want, np.float32))
    assert np.isfinite(scale).all() and (scale > 0).all() and scale.dtype == np.float32


def test_a_scan_reads_no_array_of_constants():
    """JAX computes arrays of constants outside of a scan, and each iteration reads them."""
    product = fp8.dot_general("current")

    def loss(x, kernels):
        layer = lambda x, w: (jnp.tanh(product(x, w, (((1,), (0,)), ((), ())))), None)
        return jax.lax.scan(layer, x, kernels)[0].sum()

    closed = jax.make_jaxpr(jax.grad(loss))(jnp.ones((8, 16)), jnp.ones((3, 16, 16)))
    scans = [each for each in equations(closed) if each.primitive.name == "scan"]
    constants = [scan_counts(each.params)[0] for each in scans]
    arrays = [v.aval for each, n in zip(scans, constants, strict=True) for v in each.invars[:n]]
    assert len(scans) == 2 and all(each.ndim == 0 for each in arrays)
