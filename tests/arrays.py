"""Arrays with reproducible elements, and measures of their errors."""

import jax
import jax.numpy as jnp
import numpy as np


def floats(*shape, seed=0):
    """Returns normally distributed FP32 numbers, from NumPy."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def normal(seed, *shape, dtype=jnp.float32):
    """Returns the numbers of `jax.random.normal`, which JAX compiles for few shapes here.

    An element depends on its position in the flat array, and not on the shape.
    """
    size = int(np.prod(shape))
    numbers = jax.random.normal(jax.random.key(seed), (max(4096, 1 << size.bit_length()),))
    return jnp.asarray(np.asarray(numbers)[:size].reshape(shape)).astype(dtype)


def shape(*sizes, dtype=jnp.bfloat16, **options):
    return jax.ShapeDtypeStruct(sizes, dtype, **options)


def of_size(size, *shape):
    """Returns values of magnitude at most `size`, one of which is `size`."""
    return jnp.linspace(-1.0, 1.0, int(np.prod(shape))).reshape(shape) * jnp.float32(size)


def uniform(shape, seed=0):
    """Returns FP32 numbers between 0.5 and 1.5, of NumPy."""
    return np.random.default_rng(seed).uniform(0.5, 1.5, shape).astype(np.float32)


def f64(array):
    return np.asarray(array).astype(np.float64)


def half_ulp(dtype):
    """Returns half of the relative and of the absolute spacing of a dtype."""
    info = jnp.finfo(dtype)
    return float(info.eps) / 2, float(info.smallest_subnormal) / 2


def signal_to_noise(exact, got):
    """Returns the signal-to-noise ratio in dB, over all elements."""
    exact, got = f64(exact), f64(got)
    return 10 * np.log10(np.sum(exact**2) / np.sum((exact - got) ** 2))


def plain(x):
    """Returns an array of NumPy; that of a PRNG key is its data."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def same_bits(a, b):
    a, b = plain(a), plain(b)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def assert_close(tree, exact, share):
    """Asserts that no element of a leaf is off by more than a share of the largest one."""
    for leaf, other in zip(*map(jax.tree.leaves, (tree, exact)), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=share * np.abs(other).max())


def changed(old, new):
    """Returns the paths of the leaves of two trees that are not bit-identical."""
    pairs = zip(jax.tree.leaves_with_path(old), jax.tree.leaves_with_path(new), strict=True)
    return [jax.tree_util.keystr(path) for (path, a), (_, b) in pairs if not same_bits(a, b)]
