"""Norms, rotary position embeddings and activations for 16-bit models.

Norms and rotary embeddings lose precision if they are computed in 16 bits. The functions accept
16-bit operands, compute in FP32 (float64 for float64 operands), and round once, to the dtype of the
operand. They save the 16-bit operand for the backward pass, with FP32 statistics of size 1 per row,
and never an FP32 copy of the operand. Gradients of FP32 scales and biases are summed in FP32.

Activations have the results of `jax.nn`, and save only their inputs for the backward pass.

Shape suffixes: ... any dimensions, D features, T positions, N heads, H features of a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.typing import ArrayLike

from jaxmp._core._dtypes import FLOAT32, FLOAT64, floating_array, is_16bit, wide_dtype
from jaxmp.errors import JaxmpError

__all__ = ["gelu", "layer_norm", "rms_norm", "rotary_embedding", "silu", "swiglu"]


# ---------------------------------------------------------------------------
# Norms
# ---------------------------------------------------------------------------


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    epsilon: float = 1e-6,
    axis: int | Sequence[int] = -1,
) -> jax.Array:
    """Applies RMS normalization in FP32, and rounds once.

    Computes `x / sqrt(mean(x**2) + epsilon) * scale`, as in Zhang and Sennrich 2019
    (arXiv:1910.07467). In float16, the square of 300 and therefore the mean would be infinite; in
    bfloat16, a mean of 1000 squares is accurate to two digits. In FP32, squares are finite up to
    x = 1.8e19.

    Args:
      x: `[..., D]` (D at `axis`), floating, 16 bits or more.
      scale: `[D]`, of any floating dtype; multiplied in FP32. None: 1.
      epsilon: added to the mean square; 1e-6 is Flax's default.
      axis: axis or axes of the mean. With several axes, `scale` has their sizes, in the order of x.

    Returns:
      `[..., D]` in the dtype of x.

    Raises:
      JaxmpError: if dtypes or shapes do not fit.

    Example:
      >>> jaxmp.functional.rms_norm(jnp.full((2, 4), 300.0, jnp.float16))[0]
      Array([1., 1., 1., 1.], dtype=float16)
    """
    return _normalize(x, scale, None, epsilon, axis, centered=False)


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    epsilon: float = 1e-6,
    axis: int | Sequence[int] = -1,
) -> jax.Array:
    """Applies layer normalization in FP32, and rounds once.

    Computes `(x - mean) / sqrt(variance + epsilon) * scale + bias`, as in Ba et al. 2016
    (arXiv:1607.06450). The variance is the mean square of `x - mean`. `mean(x**2) - mean(x)**2`
    takes one pass less, but loses the variance if the mean is large: with mean 5000 and standard
    deviation 1, squares in FP32 have steps of 2.

    Args:
      x: `[..., D]` (D at `axis`), floating, 16 bits or more.
      scale: `[D]`, of any floating dtype; multiplied in FP32. None: 1.
      bias: `[D]`, of any floating dtype; added in FP32. None: 0.
      epsilon: added to the variance; 1e-6 is Flax's default.
      axis: axis or axes of mean and variance. With several axes, `scale` and `bias` have their
        sizes, in the order of x.

    Returns:
      `[..., D]` in the dtype of x.

    Raises:
      JaxmpError: if dtypes or shapes do not fit.

    Example:
      >>> x = jnp.array([[5000.0, 5004.0]], jnp.float16)
      >>> jaxmp.functional.layer_norm(x)
      Array([[-1.,  1.]], dtype=float16)
    """
    return _normalize(x, scale, bias, epsilon, axis, centered=True)


# Name of the saved statistics, with which the backward pass does not reduce x again.
_STATISTICS = "jaxmp_norm_statistics"


def _normalize(
    x: ArrayLike,
    scale: ArrayLike | None,
    bias: ArrayLike | None,
    epsilon: float,
    axis: int | Sequence[int],
    *,
    centered: bool,
) -> jax.Array:
    x = floating_array(x, "x")
    axes = _axes(axis, x)
    parameters = [
        None if parameter is None else _spread(floating_array(parameter, name), name, x, axes)
        for name, parameter in (("scale", scale), ("bias", bias))
    ]
    wide = wide_dtype(x.dtype)

    def normalize(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
        out = x.astype(wide)
        if centered:
            out -= checkpoint_name(jnp.mean(out, axes, keepdims=True), _STATISTICS)
        square = checkpoint_name(jnp.mean(jnp.square(out), axes, keepdims=True), _STATISTICS)
        out *= lax.rsqrt(square + wide.type(epsilon))
        if scale is not None:
            out *= scale.astype(wide)
        if bias is not None:
            out += bias.astype(wide)
        return out.astype(x.dtype)

    saved = jax.checkpoint_policies.save_only_these_names(_STATISTICS)
    return jax.checkpoint(normalize, policy=saved)(x, *parameters)


def _axes(axis: int | Sequence[int], x: jax.Array) -> tuple[int, ...]:
    items = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
            raise JaxmpError(f"axis={axis!r}: {item!r} is not an integer, such as axis=-1.")
        if not -x.ndim <= item < x.ndim:
            raise JaxmpError(
                f"axis={axis!r} does not fit x of shape {list(x.shape)}. Allowed: {-x.ndim} to "
                f"{x.ndim - 1}; for example axis=-1."
            )
    axes = tuple(sorted({int(item) % x.ndim for item in items}))
    if not items or len(axes) != len(items):
        raise JaxmpError(f"axis={axis!r} must name one axis or several different ones: axis=-1.")
    return axes


def _spread(parameter: jax.Array, name: str, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Reshapes a parameter to the rank of x, with size 1 outside of `axes`."""
    sizes = tuple(x.shape[axis] for axis in axes)
    if parameter.shape != sizes:
        raise JaxmpError(
            f"{name} has shape {list(parameter.shape)}, and x of shape {list(x.shape)} has "
            f"{list(sizes)} at axis {axes}. Pass one {name} for each feature: "
            f"{name}.reshape({sizes})."
        )
    return parameter.reshape([x.shape[i] if i in axes else 1 for i in range(x.ndim)])


# ---------------------------------------------------------------------------
# Rotary positions
# ---------------------------------------------------------------------------


def rotary_embedding(
    x: ArrayLike,
    positions: ArrayLike,
    *,
    base: float = 10000.0,
    scaling: float = 1.0,
    frequencies: Sequence[float] | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> jax.Array:
    """Rotates pairs of features by angles proportional to the position.

    Rotary embedding of Su et al. 2021 (arXiv:2104.09864): pair i of H / 2 is rotated by
    `position * base ** (-2 i / H) / scaling` radians. In bfloat16, positions above 256 are not
    all distinct, and an angle of 1000 has steps of 4, more than half a turn. In FP32, the angle of
    position 2**17 has an error of up to 0.004, twice the rounding error of a bfloat16 result. This
    function multiplies integer positions by turns per position in 64-bit fixed point, where whole
    turns overflow and are dropped. The angle is accurate to 4e-7 at every int32 position, including
    negative ones. Sine, cosine and rotation are in FP32; the result is rounded once.

    Args:
      x: queries or keys, `[..., T, N, H]`, floating, 16 bits or more.
      positions: `[T]` or `[..., T]`, or any shape that broadcasts to the dimensions of x before N.
        Integers; or float32 for positions between integers, whose product with the frequency is
        then in FP32. 16-bit positions raise an error.
      base: base of the geometric series of wavelengths. A number, not an array, like the following
        arguments.
      scaling: number by which positions are divided (position interpolation, arXiv:2306.15595).
      frequencies: radians per position of each pair, instead of `base` and `scaling`; for Llama 3,
        YaRN and other series.
      interleaved: pairs are features (2 i, 2 i + 1), as in GPT-J and the paper; otherwise
        (i, i + H / 2), as in GPT-NeoX and Llama.
      rotary_dim: number of leading features to rotate, which is H above; None: all.

    Returns:
      `[..., T, N, H]` in the dtype of x.

    Raises:
      JaxmpError: if dtypes, shapes or numbers do not fit.

    Example:
      >>> q = jnp.ones((1, 3, 1, 2), jnp.bfloat16)
      >>> positions = jnp.array([0, 1, 2**17])
      >>> jaxmp.functional.rotary_embedding(q, positions)[0, :, 0]
      Array([[1, 1],
             [-0.300781, 1.38281],
             [1.03906, -0.957031]], dtype=bfloat16)
    """
    x, positions = floating_array(x, "x"), _positions(positions)
    if x.ndim < 3:
        raise JaxmpError(
            f"x has shape {list(x.shape)}, and must be [..., T, N, H]. With one head: "
            "x[..., None, :]."
        )
    size = _rotary_dim(rotary_dim, x)
    radians = _frequencies(size, base, scaling, frequencies)
    try:
        fits = np.broadcast_shapes(positions.shape, x.shape[:-2]) == x.shape[:-2]
    except ValueError:
        fits = False
    if not fits:
        raise JaxmpError(
            f"positions have shape {list(positions.shape)}, and x of shape {list(x.shape)} has "
            f"positions of shape {list(x.shape[:-2])}, [..., T]. Give the last dimensions of that, "
            f"for example jnp.arange({x.shape[-3]})."
        )
    wide = wide_dtype(x.dtype)
    angles = _angles(positions, radians, wide)
    missing = x.ndim - 2 - positions.ndim
    # [..., T] -> [..., T, 1, H / 2], with as many dimensions as x.
    angles = angles.reshape(*(1,) * missing, *positions.shape, 1, size // 2)
    cos, sin = jnp.cos(angles).astype(wide), jnp.sin(angles).astype(wide)

    turned = x[..., :size].astype(wide)
    pairs = (*x.shape[:-1], size // 2, 2) if interleaved else (*x.shape[:-1], 2, size // 2)
    axis = -1 if interleaved else -2
    first, second = (jnp.squeeze(half, axis) for half in jnp.split(turned.reshape(pairs), 2, axis))
    out = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis)
    out = out.reshape(*x.shape[:-1], size).astype(x.dtype)
    return out if size == x.shape[-1] else jnp.concatenate([out, x[..., size:]], axis=-1)


def _angles(positions: jax.Array, radians: np.ndarray, wide: np.dtype) -> jax.Array:
    """Returns the angles, `[..., H / 2]`; modulo whole turns if positions are integers."""
    if jnp.issubdtype(positions.dtype, jnp.integer) and wide == FLOAT32:
        turns = _turns(positions.astype(jnp.int32), radians / (2 * math.pi))
        return turns.astype(FLOAT32) * np.float32(2 * math.pi / 2**32)
    exact = FLOAT64 if FLOAT64 in (wide, positions.dtype) else FLOAT32
    rates = radians.astype(exact).reshape((1,) * positions.ndim + radians.shape)
    return positions.astype(exact)[..., None] * rates


def _turns(positions: jax.Array, rates: np.ndarray) -> jax.Array:
    """Computes `positions * rates` modulo 1, in units of 2**-32, as int32 `[..., H / 2]`.

    A rate has 64 bits after the binary point, in two 32-bit words. The result is the first word of
    the product after the binary point. The bits before it are whole turns, which overflow and are
    dropped in 32-bit arithmetic.
    """
    fixed_point = [int(math.ldexp(rate, 64)) % 2**64 for rate in rates]
    shape = (1,) * positions.ndim + rates.shape
    high = np.array([value >> 32 for value in fixed_point], np.uint32).reshape(shape)
    low = np.array([value % 2**32 for value in fixed_point], np.uint32).reshape(shape)
    positions = positions[..., None]
    signed = lax.bitcast_convert_type(positions, jnp.uint32)
    carried = _high_word(signed, low)
    # As uint32, a negative position is too large by 2**32.
    carried -= jnp.where(positions < 0, low, np.zeros_like(low))
    return lax.bitcast_convert_type(signed * high + carried, jnp.int32)


def _high_word(a: jax.Array, b: np.ndarray) -> jax.Array:
    """Returns the upper half of the 64-bit product of uint32, minus up to 2 ignored carries."""
    upper, lower, sixteen = a >> 16, a & 0xFFFF, np.uint32(16)
    b_upper, b_lower = b >> sixteen, b & np.uint32(0xFFFF)
    return upper * b_upper + ((upper * b_lower) >> 16) + ((lower * b_upper) >> 16)


def _positions(positions: ArrayLike) -> jax.Array:
    array = jnp.asarray(positions)
    if jnp.issubdtype(array.dtype, jnp.integer) or array.dtype in (FLOAT32, FLOAT64):
        return array
    why = f"{array.dtype} cannot represent them"
    if is_16bit(array.dtype):
        exact = 256 if array.dtype != np.float16 else 2048
        why = f"{array.dtype} cannot represent all integers above {exact}"
    raise JaxmpError(
        f"positions are {array.dtype} of shape {list(array.shape)}: {why}. Use uncast integers, "
        f"such as jnp.arange({array.shape[-1] if array.ndim else 1}), which is int32."
    )


def _rotary_dim(size: int | None, x: jax.Array) -> int:
    if size is None:
        size = x.shape[-1]
    elif isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise JaxmpError(f"rotary_dim={size!r} is not an integer, such as rotary_dim=64.")
    if size % 2 or not 0 < size <= x.shape[-1]:
        raise JaxmpError(
            f"rotary_dim={size} of x {list(x.shape)}: features are rotated in pairs, so it must be "
            f"even, from 2 to {x.shape[-1]}; for example "
            f"rotary_dim={max(x.shape[-1] // 2 * 2, 2)}."
        )
    return int(size)


def _frequencies(
    size: int, base: float, scaling: float, frequencies: ArrayLike | Sequence[float] | None
) -> np.ndarray:
    """Returns the radians per position of each pair, float64 `[H / 2]`."""
    number = functools.partial(_number, least=0.0)
    if frequencies is None:
        exponents = np.arange(0, size, 2, dtype=np.float64) / size
        return number(base, "base") ** -exponents / number(scaling, "scaling")
    if (base, scaling) != (10000.0, 1.0):
        raise JaxmpError(
            f"frequencies replace base and scaling, but base={base!r} and scaling={scaling!r} were "
            "passed as well. Leave them out."
        )
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(frequencies)):
        raise JaxmpError(
            "frequencies are traced values, but must be known when the program is traced: pass a "
            "NumPy array."
        )
    array = np.asarray(frequencies, np.float64)
    if array.shape != (size // 2,) or not np.isfinite(array).all():
        raise JaxmpError(
            f"frequencies have shape {list(array.shape)}; {size} features have {size // 2} pairs, "
            f"and each has one finite number of radians per position: shape [{size // 2}]."
        )
    return array


# ---------------------------------------------------------------------------
# Activations
# ---------------------------------------------------------------------------


def gelu(x: ArrayLike, *, approximate: bool = True) -> jax.Array:
    """Applies the Gaussian error linear unit, and saves only its input for the backward pass.

    The result is that of `jax.nn.gelu` (Hendrycks and Gimpel 2016, arXiv:1606.08415). Its backward
    pass computes the derivative again from x. With `jax.nn.gelu`, XLA stores the derivative in the
    forward pass. Compiled for an H200, three MLP blocks of widths 2048 and 8192 in bfloat16 with
    4,096 tokens move 1,812 instead of 2,416 MB outside of the matmuls, because cuBLAS then computes
    the GELU as part of the matmul in front of it (`python benchmarks/fp8_program.py`).

    Args:
      x: any shape, floating, 16 bits or more.
      approximate: the tanh approximation, the default of JAX and Flax; False: the error function.

    Returns:
      Array of the shape and dtype of x.

    Raises:
      JaxmpError: if x is not floating.

    Example:
      >>> jaxmp.functional.gelu(jnp.array([-1.0, 0.0, 2.0], jnp.bfloat16))
      Array([-0.158203, 0, 1.95312], dtype=bfloat16)
    """
    x = floating_array(x, "x")
    # The barrier of `prevent_cse` keeps XLA from computing the derivative in the forward pass.
    return jax.checkpoint(functools.partial(jax.nn.gelu, approximate=approximate))(x)


def silu(x: ArrayLike) -> jax.Array:
    """Applies `x * sigmoid(x)`, and saves only its input for the backward pass.

    The result is that of `jax.nn.silu`, also called swish. `jax.nn.silu` in a scan over layers also
    stores the sigmoid of each layer.

    Args:
      x: any shape, floating, 16 bits or more.

    Returns:
      Array of the shape and dtype of x.

    Raises:
      JaxmpError: if x is not floating.

    Example:
      >>> jaxmp.functional.silu(jnp.array([0.0, 2.0]))
      Array([0.      , 1.761594], dtype=float32)
    """
    return jax.checkpoint(jax.nn.silu, prevent_cse=False)(floating_array(x, "x"))


def swiglu(gate: ArrayLike, up: ArrayLike) -> jax.Array:
    """Computes `silu(gate) * up`, and saves only the two operands for the backward pass.

    This is the gated activation of Shazeer 2020 (arXiv:2002.05202) in the MLPs of Llama, where
    `gate` and `up` are the results of two linear layers.

    Args:
      gate: any shape, floating, 16 bits or more.
      up: shape and dtype of `gate`.

    Returns:
      Array of that shape and dtype.

    Raises:
      JaxmpError: if an operand is not floating, or their shapes or dtypes differ.

    Example:
      >>> gate, up = jnp.array([0.0, 2.0]), jnp.array([3.0, 3.0])
      >>> jaxmp.functional.swiglu(gate, up)
      Array([0.       , 5.2847824], dtype=float32)
    """
    gate, up = floating_array(gate, "gate"), floating_array(up, "up")
    if (gate.shape, gate.dtype) != (up.shape, up.dtype):
        raise JaxmpError(
            f"gate is {gate.dtype} of shape {list(gate.shape)}, and up is {up.dtype} of shape "
            f"{list(up.shape)}. Both must have the same shape and dtype, as in "
            "gate, up = jnp.split(hidden, 2, axis=-1)."
        )
    return jax.checkpoint(_swiglu, prevent_cse=False)(gate, up)


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


# ---------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------


def _number(value: Any, name: str, least: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (number > least and math.isfinite(number)):
        raise JaxmpError(
            f"{name}={value!r} must be a number above {least:g}, known when the program is traced; "
            f"for example {name}={10000.0 if name == 'base' else 1.0}."
        )
    return number
