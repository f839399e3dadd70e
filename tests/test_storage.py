"""Storage of parameters and masters, FP32 and packed, bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmp.optim._master import to_storage
from jaxmp.optim._rounding import OVERFLOW_THRESHOLD, pack, remainder_to, unpack


def bits(array):
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def edge_patterns():
    """Returns bit patterns around every power of two, ties, subnormals, NaN and the largest."""
    exponents = np.arange(256, dtype=np.uint32) << 23
    low = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x17FFF, 0x18000, 0x400000, 0x7F8000, 0x7FFFFF]
    magnitude = (exponents[:, None] | np.array(low, np.uint32)).ravel()
    return np.concatenate([magnitude, magnitude | np.uint32(0x80000000)])


@jax.jit
def wrong(patterns):
    """Returns the number of FP32 bit patterns that packing changes, except those of tiny values."""
    values = jax.lax.bitcast_convert_type(patterns, jnp.float32)
    high, low = pack(values)
    assert high.dtype == jnp.bfloat16 and low.dtype == jnp.int16
    back = unpack(high, low)
    tiny = (patterns & 0x7FFFFFFF) < 0x8000  # below 2**-134: zero
    expected = jnp.where(tiny, patterns & jnp.uint32(0x80000000), patterns)
    is_exact = jax.lax.bitcast_convert_type(back, jnp.uint32) == expected
    are_nan = jnp.isnan(high.astype(jnp.float32)) & jnp.isnan(back)
    return jnp.sum(~jnp.where(jnp.isnan(values), are_nan, is_exact))


def test_packed_gives_back_every_edge_pattern():
    assert int(wrong(edge_patterns())) == 0


@pytest.mark.slow
def test_packed_gives_back_every_finite_pattern():
    """Tests all 2**32 FP32 bit patterns, in chunks."""
    chunk = jnp.arange(2**24, dtype=jnp.uint32)
    assert sum(int(wrong(jnp.uint32(start << 24) + chunk)) for start in range(256)) == 0


def test_packed_ties_round_away_from_zero_and_nothing_else_differs_from_the_cast():
    patterns = edge_patterns()
    values = patterns.view(np.float32)
    finite = np.isfinite(values)
    packed, cast = (
        bits(pack(jnp.asarray(values))[0]),
        bits(jnp.asarray(values).astype(jnp.bfloat16)),
    )
    tie = (patterns & 0xFFFF) == 0x8000
    np.testing.assert_array_equal(packed[finite & ~tie], cast[finite & ~tie])
    away = (patterns >> 16) + 1
    np.testing.assert_array_equal(packed[finite & tie], away[finite & tie].astype(np.uint16))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_remainder_of_the_packed_parameter_is_the_packed_remainder(value):
    master = jnp.float32(value)
    high, low = pack(master)
    assert int(remainder_to(master, high)) == int(low)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_overflow_threshold_is_the_first_value_that_becomes_infinite(dtype):
    threshold = OVERFLOW_THRESHOLD[np.dtype(dtype)]
    below = np.nextafter(threshold, np.float32(0))
    assert np.isinf(np.float32(jnp.float32(threshold).astype(dtype)))
    assert np.isfinite(np.float32(jnp.float32(below).astype(dtype)))


def test_storage_follows_the_form():
    tie = jnp.asarray(np.array([0x3F808000], np.uint32).view(np.float32))
    assert bits(to_storage(tie, jnp.bfloat16, "fp32"))[0] == 0x3F80  # to even
    assert bits(to_storage(tie, jnp.bfloat16, "packed"))[0] == 0x3F81  # away from zero
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert to_storage(shape, jnp.bfloat16, "packed").dtype == jnp.bfloat16
