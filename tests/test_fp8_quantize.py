"""Scales and casts to FP8 against `ml_dtypes`, for all codes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmp import fp8
from jaxmp._core._compat import scan_counts
from jaxmp._core._jaxprs import equations
from jaxmp.errors import PolicyError

FORMATS = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
SOURCES = ["float32", "bfloat16", "float16"]


def codes(dtype):
    """Returns the 256 values of a format, in float32."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def bits(x):
    return np.asarray(x).view(np.uint8)


def quantize(x, scale, dtype):
    return jax.jit(lambda x: fp8._quantize.quantize(x, scale, dtype))(x)


def stats_of(x, scale, dtype):
    scaled = x.astype(jnp.float32) * jnp.float32(scale)
    return fp8._quantize.stats_of(x, scaled, jnp.dtype(getattr(ml_dtypes, f"float8_{dtype}")))


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
    q = fp8._quantize.quantize(x, jnp.array([[2.0], [4.0]], jnp.float32), "e4m3fn")
    assert q.tolist() == [[2.0] * 3, [4.0] * 3]


@pytest.mark.parametrize("dtype", ["bf16", "float8_e8m0fnu", "e9m9", "int8", None])
def test_other_formats_are_refused(dtype):
    with pytest.raises(PolicyError, match="e4m3fn"):
        fp8._quantize.quantize(jnp.ones(2), 1.0, dtype)
    with pytest.raises(PolicyError, match="e4m3fn"):
        fp8._quantize.compute_scale(1.0, dtype)


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
    fn = lambda x: fp8._quantize.compute_scale(x, dtype, margin, power_of_two)
    scale = np.asarray((jax.jit(fn) if jitted else fn)(amax))
    want = [reference_scale(x, dtype, margin, power_of_two) for x in amax]
    np.testing.assert_array_equal(scale, np.array(want, np.float32))
    assert np.isfinite(scale).all() and (scale > 0).all() and scale.dtype == np.float32


# ---------------------------------------------------------------------------
# Statistics
# ---------------------------------------------------------------------------


def test_statistics_count_what_is_lost():
    x = jnp.array([1.0, 449.0, -1e5, 2.0**-11, 1e-30, 0.0, jnp.inf, jnp.nan], jnp.float32)
    stats = jax.jit(lambda x: stats_of(x, 1.0, "e4m3fn"))(x)
    # Of the six finite numbers two are beyond 448, and two of them, the smallest number of the
    # format being 2**-9, round to zero.
    assert float(stats.saturated) == np.float32(2 / 6)
    assert float(stats.underflowed) == np.float32(2 / 6)
    assert (float(stats.finite), float(stats.amax)) == (0.75, 1e5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_statistics_are_those_of_the_cast(name, dtype):
    """Covers 20 powers of two beyond both ends of the format, as `ml_dtypes` counts."""
    rng = np.random.default_rng(0)
    fp8_type = getattr(ml_dtypes, f"float8_{name}")
    info = ml_dtypes.finfo(fp8_type)
    low, high = np.log2(float(info.smallest_subnormal)) - 20, np.log2(float(info.max)) + 20
    x = jnp.asarray(rng.normal(size=4000) * 2.0 ** rng.uniform(low, high, 4000), dtype)
    x = x.at[:40].set(0).at[40:50].set(jnp.inf)
    scale = 2.0**5
    stats = jax.jit(lambda x: stats_of(x, scale, name))(x)
    scaled = np.abs(np.asarray(x, np.float64)[np.isfinite(np.asarray(x, np.float64))]) * scale
    q = np.minimum(scaled, float(info.max)).astype(fp8_type).astype(np.float64)
    want = {
        "saturated": np.mean(scaled > float(info.max)),
        "underflowed": np.mean((q == 0) & (scaled != 0)),
        "subnormal": np.mean((q > 0) & (q < float(info.smallest_normal))),
        "finite": 1 - 10 / 4000,
        "amax": scaled.max() / scale,
    }
    assert min(want["saturated"], want["underflowed"], want["subnormal"]) > 0.02
    # Counts are exact; a fraction is rounded to FP32.
    for key, value in want.items():
        np.testing.assert_allclose(getattr(stats, key), value, rtol=2.0**-23)


@pytest.mark.parametrize("amax", np.linspace(0.1, 10, 23))
def test_a_scale_of_its_own_maximum_saturates_nothing(amax):
    """Rounded to FP32, `448 / amax * amax` may be the next value above 448."""
    x = jnp.asarray([amax, -amax / 3], jnp.float32)
    stats = stats_of(x, fp8._quantize.compute_scale(x[0], "e4m3fn"), "e4m3fn")
    assert float(stats.saturated) == 0


def test_statistics_of_nothing():
    stats = stats_of(jnp.full(3, jnp.nan), 1.0, "e5m2")
    assert (float(stats.saturated), float(stats.underflowed)) == (0.0, 0.0)


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
