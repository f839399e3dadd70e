"""FP8 attention by cuDNN's kernel, or by its emulation on a CPU, and the choice of all scales.

The kernel reads and writes E4M3 only, and multiplies by scales that the caller passes. Each array
`x` is stored as `x * 2**n`. Scaling by powers of two does not round, and products of such scales
are exact.

**Operands** and the gradient of the result are scaled just in time by their amax. The **weights**
are at most 1 and are scaled by 256. The **result** has the scale of the values: it is a weighted
mean of them, so `|out| <= max |value|`, and saturation at 448 only removes rounding errors.

**Gradients** lack a useful bound: for long rows, the bound of the logits' gradient is a thousand
times too large. TransformerEngine scales this gradient by the amax of the previous step
(`NVTE_DPA_FP8DS_AMAX_HISTLEN=1` in its `dot_product_attention.py`), which requires state. Here, the
backward pass runs the kernel up to three times:

1. `_first_guess` estimates the scales of all gradients. The estimate may be off by several octaves,
   because E4M3 has four significant bits over 14 octaves.
2. The kernel returns the amax of each gradient before scaling. If one is beyond 448 after scaling,
   or far below, the kernel runs again with scales from these amaxes (`_better`).
3. If a gradient still saturates after the last run, all gradients become NaN, so that the step is
   skipped.

**Order of the scales.** JAX and XLA disagree on the order of the backward scales. JAX passes them
in the order of `fp8_params_keys_bwd`: after those of query, key and value come descale_o,
descale_dO, descale_s; at the end scale_dQ, scale_dK, scale_dV, scale_dP. XLA reads the same
positions as descale_s, descale_o, descale_dO and as scale_dP, scale_dQ, scale_dK, scale_dV
(`set_uid` in `GetCudnnFlashAttentionBackwardF8OperationGraph`,
xla/stream_executor/cuda/cuda_dnn.cc at a51b0f5). JAX's test of the backward pass does not detect
this, because it sets all scales to one. This module passes equal values for the three scales, and
equal values for the four, and so is correct for both orders. All other factors are in descale_q,
descale_k, descale_v and descale_dP, whose positions are the same in both.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._attention import _fp8_emulation
from jaxmp._attention._arguments import Arguments, with_scaled_query
from jaxmp._core import _compat
from jaxmp._core._dtypes import FLOAT32
from jaxmp.errors import AttentionError
from jaxmp.fp8._quantize import compute_scale, quantize

_FORMAT = "e4m3fn"
# The weights are scaled by 2**8, the largest power of two in E4M3.
_WEIGHTS = 8
# Maximum number of runs of the backward kernel: the first, one that corrects the scale of the
# logits' gradient, and one that corrects the scales of the gradients computed from it.
_RUNS = 3
# The kernel runs again if so many octaves below 448 are unused by the gradients of logits and
# values, or by those of query and key. The limit for the former is lower under a causal mask, where
# the gradients of long rows are much smaller than those of the first rows.
_LOOSE_LOGITS, _LOOSE_CAUSAL, _LOOSE_RESULTS = 6, 4, 9


class _Static(NamedTuple):
    """Static settings. Hashable."""

    scale: float
    is_causal: bool
    emulated: bool


class _Scaled(NamedTuple):
    """Scaled array: `x = data * 2**-exponent`."""

    data: jax.Array  # E4M3
    exponent: jax.Array  # int32 scalar
    finite: jax.Array  # bool scalar: True if all elements of x are finite


class _Saved(NamedTuple):
    """Residuals of the forward pass, saved for the backward pass."""

    query: _Scaled
    key: _Scaled
    value: _Scaled
    out: jax.Array  # E4M3 `[B, T, N, H]`, with the scale of the values
    largest_out: jax.Array  # float32 scalar: amax of `out`
    logsumexp: jax.Array  # float32 `[B, N, T]`


class _Exponents(NamedTuple):
    """Exponents of the scales for the gradients that the backward kernel rounds, int32 scalars.

    The gradients of logits and values are scaled by `2**logits`. The matmuls of the scaled and
    rounded gradient of the logits with the key and query data give the gradients of query and key,
    which are scaled by `2**query` and `2**key`.
    """

    logits: jax.Array
    query: jax.Array
    key: jax.Array


class _Run(NamedTuple):
    """Scales and results of one run of the backward kernel."""

    exponents: _Exponents
    gradients: tuple[jax.Array, ...]  # of query, key and value; E4M3
    # float32 `[3]`: the larger amax of the gradients of logits and values; that of query; that of
    # key. They do not include the last factor before rounding, 2**exponents.logits.
    largest: jax.Array
    number: jax.Array  # int32 scalar: 1 for the first run


def fp8_attention(args: Arguments) -> jax.Array:
    """Computes attention in FP8.

    Returns:
      `[B, T, N, H]` in the operands' dtype; all elements are NaN if an operand is not finite.
    """
    args, settings = with_scaled_query(args), args.settings
    static = _Static(settings.scale, settings.is_causal, _compat.target() != "gpu")
    return _attention(static, args.query, args.key, args.value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return _folding(_forward, static, False)(query, key, value)[0]


def _forward_rule(static: _Static, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    # First-order reverse mode never passes tangents through this function or the backward rule. A
    # tangent implies a second derivative, which raises an error.
    return _folding(_forward, static, True)(*_differentiated_once(query, key, value))


def _backward_rule(static: _Static, saved: _Saved, d_out: jax.Array) -> Any:
    return _folding(_backward, static, True)(saved, *_differentiated_once(d_out))


@jax.custom_jvp
def _differentiated_once(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays


@_differentiated_once.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise AttentionError(
        "implementation='cudnn_fp8' has no second derivative: what quantises gradients cannot be "
        "differentiated. Write implementation='xla', which has all derivatives."
    )


_attention.defvjp(_forward_rule, _backward_rule)


# ---------------------------------------------------------------------------
# Powers of two
# ---------------------------------------------------------------------------


def _power(exponent: jax.Array) -> jax.Array:
    """Returns `2**exponent` in float32; the exponent is clipped to -126 .. 127."""
    exponent = jnp.clip(exponent, -126, 127)
    return lax.bitcast_convert_type((exponent + 127) << 23, FLOAT32)


def _room(amax: jax.Array) -> jax.Array:
    """Returns the largest int32 n with `amax * 2**n <= 448`; 0 if `amax` is 0 or not finite."""
    scale = compute_scale(amax, _FORMAT, power_of_two=True)
    return (lax.bitcast_convert_type(scale, jnp.int32) >> 23) - 127


def _scaled(x: jax.Array) -> _Scaled:
    amax = jnp.abs(x).astype(FLOAT32).max()
    exponent = _room(amax)
    # Checked for each element, since a maximum may ignore NaN.
    finite = jnp.isfinite(x).all()
    return _Scaled(quantize(x, _power(exponent), _FORMAT), exponent, finite)


def _wide(data: jax.Array) -> jax.Array:
    # Without the barrier, XLA would remove a cast to FP8 and back, and so the rounding.
    return lax.optimization_barrier(data).astype(FLOAT32)


def _unscaled(data: jax.Array, exponent: jax.Array, usable: jax.Array, dtype: Any) -> jax.Array:
    """Returns `data * 2**-exponent` in `dtype`; all elements are NaN if not `usable`."""
    half = exponent // 2
    # Two factors, since `2**-exponent` may be out of range in FP32 although the result is not.
    first = jnp.where(usable, _power(-half), np.float32(np.nan))
    return (_wide(data) * first * _power(half - exponent)).astype(dtype)


# ---------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------


def _forward(
    static: _Static, training: bool, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, _Saved | None]:
    operands = [_scaled(array) for array in (query, key, value)]
    one = jnp.ones((), FLOAT32)
    product = _product_exponent(operands[0].exponent, operands[1].exponent)
    scales = {
        "descale_q": _power(product // 2),
        "descale_k": _power(product - product // 2),
        "descale_v": one,
        "scale_s": one * 2.0**_WEIGHTS,
        "descale_s": one * 2.0**-_WEIGHTS,
        "scale_o": one,
    }
    kernel = _fp8_emulation.forward if static.emulated else _compat.fp8_attention_forward
    out, largest, *logsumexp = kernel(
        (operands[0].data, operands[1].data, operands[2].data),
        scales,
        scale=static.scale,
        is_causal=static.is_causal,
        training=training,
    )
    usable = jnp.stack([operand.finite for operand in operands]).all()
    result = _unscaled(out, operands[2].exponent, usable, query.dtype)
    if not training:
        return result, None
    return result, _Saved(operands[0], operands[1], operands[2], out, largest, logsumexp[0])


def _product_exponent(query: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the exponent that removes the scales of query and key from their matmul.

    It is clipped, so that intermediate values of the kernel are in the range of FP32. Clipping has
    no effect on the weights: logits below 2**-35 are equivalent to 0, and logits above 2**80 are
    equivalent to 2**80.
    """
    return jnp.clip(-query - key, -60, 60)


# ---------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------


def _backward(static: _Static, training: bool, saved: _Saved, d_out: jax.Array) -> Any:
    del training
    above = _scaled(d_out)
    # If the weights are nearly uniform, the result is small. It is scaled up as far as possible,
    # and the factor of the values with it. This brings the gradients of logits and values, which
    # share one scale, closer to each other.
    lift = jnp.clip(_room(saved.largest_out), 0, 15)
    out = (_wide(saved.out) * _power(lift)).astype(saved.out.dtype)
    run = functools.partial(_kernel, static, saved, out, above.data, lift)

    first = run(_first_guess(static, saved, above.data, lift), jnp.ones((), jnp.int32))
    last = lax.while_loop(
        lambda done: _again(static, done) & (done.number < _RUNS),
        lambda done: run(_better(static, done), done.number + 1),
        first,
    )
    operands = (saved.query, saved.key, saved.value)
    usable = jnp.stack([above.finite, *(x.finite for x in operands)]).all() & ~_saturated(last)
    logits = last.exponents.logits
    of_logits = logits + lift + above.exponent + saved.value.exponent
    exponents = (
        last.exponents.query + of_logits + saved.key.exponent,
        last.exponents.key + of_logits + saved.query.exponent,
        logits + above.exponent + _WEIGHTS,
    )
    return tuple(
        _unscaled(gradient, exponent, usable, d_out.dtype)
        for gradient, exponent in zip(last.gradients, exponents, strict=True)
    )


def _kernel(
    static: _Static,
    saved: _Saved,
    out: jax.Array,
    d_out: jax.Array,
    lift: jax.Array,
    wanted: _Exponents,
    number: jax.Array,
) -> _Run:
    """Runs the backward kernel once.

    With the weights p, the E4M3 data of all other arrays, and one scale g = 2**wanted.logits, the
    kernel computes

        dV = g (256 p)^T dO        dS = g p (descale_v dO V^T - dO . O) scale
        dQ = g descale_dP descale_k (dS K)      dK = g descale_dP descale_q (dS^T Q)

    The product descale_q * descale_k is fixed, since it is a factor of the logits. So descale_dP
    and the ratio of descale_q and descale_k determine the scales of dQ and dK.
    """
    product = _product_exponent(saved.query.exponent, saved.key.exponent)
    logits = wanted.logits
    of_d_logits = (wanted.query + wanted.key - 2 * logits - product) // 2
    of_key = wanted.query - logits - of_d_logits
    of_query = product - of_key
    one = jnp.ones((), FLOAT32)
    scales = {
        "descale_q": _power(of_query),
        "descale_k": _power(of_key),
        "descale_v": _power(lift),
        "descale_dP": _power(of_d_logits),
        "scale_s": one * 2.0**_WEIGHTS,
        **dict.fromkeys(("descale_s", "descale_o", "descale_dO"), one),
        **dict.fromkeys(("scale_dQ", "scale_dK", "scale_dV", "scale_dP"), _power(logits)),
    }
    kernel = _fp8_emulation.backward if static.emulated else _compat.fp8_attention_backward
    *gradients, d_query, d_key, d_value, d_logits = kernel(
        (saved.query.data, saved.key.data, saved.value.data),
        out,
        d_out,
        saved.logsumexp,
        scales,
        scale=static.scale,
        is_causal=static.is_causal,
    )
    # The key's exponent is one lower than wanted if the sum that is halved above is odd.
    exponents = _Exponents(logits, wanted.query, logits + of_d_logits + of_query)
    largest = jnp.stack([jnp.maximum(d_logits, d_value), d_query, d_key])
    return _Run(exponents, tuple(gradients), largest, number)


def _first_guess(static: _Static, saved: _Saved, d_out: jax.Array, lift: jax.Array) -> _Exponents:
    """Estimates the exponents for the first run from operands, result and its gradient.

    Let v be the values minus their mean over positions. Then the result minus this mean is
    `sum p v` for a row of weights p. If the values are random, its size is `|v| sqrt(sum p**2)`.
    Hence the sharpness of the attention, `sqrt(sum p**2)`, follows from the size of the result. The
    gradient of a logit is `p (1 - p) dO . (v - mean of the other v)`, which is at most about
    `sharpness * |dO| * spread of v`. The gradients of query and key are sums of it times keys and
    queries. A factor of 4 accounts for the largest of many elements compared to a typical one, and
    a further factor of 2 to 16 is a safety margin.
    """
    query, key, value = (_wide(operand.data) for operand in (saved.query, saved.key, saved.value))
    batch, queries, heads, size = d_out.shape
    keys, groups = key.shape[1:3]
    out, above = (
        _wide(array).reshape(batch, queries, groups, heads // groups, size)
        for array in (saved.out, d_out)
    )
    mean, spread = _mean_and_spread(value)
    moved = jnp.sqrt(jnp.square(out - mean[:, :, :, None]).mean(-1)) / spread
    sharpness = jnp.clip(moved, 1 / keys, 1)  # [B, T, K, G]
    strength = jnp.sqrt(jnp.square(above).sum(-1))
    unit = _power(lift) * np.float32(4 * abs(static.scale))
    # p (1 - p) <= 1/4
    of_logits = unit * (strength * jnp.minimum(sharpness, 0.25) * spread).max()
    # Estimated total weight of a key over all queries, and the largest mean over queries of the
    # result's gradient.
    weight = queries * (heads // groups) * sharpness.mean()
    common = jnp.abs(above.mean((1, 3))).max()
    of_values = 2.0**_WEIGHTS * jnp.maximum(448, weight * common)
    logits = jnp.minimum(_room(2 * of_logits), _room(2 * of_values))
    of_query = 2 * of_logits * _mean_and_spread(key)[1].max()
    of_key = unit * spread.max() * jnp.sqrt(jnp.square(strength).mean())
    of_key *= sharpness.mean() * (queries * (heads // groups)) ** 0.5
    of_key *= jnp.sqrt(jnp.square(query).mean())
    return _Exponents(logits, _room(8 * of_query) - logits, _room(8 * of_key) - logits)


def _mean_and_spread(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean over positions `[B, 1, K, H]`, and the RMS deviation from it `[B, 1, K, 1]`.

    The deviation is at least the rounding error of FP8.
    """
    mean = x.mean(1, keepdims=True)
    squares = jnp.square(x - mean).mean((1, 3), keepdims=True)
    rounding = jnp.square(x).mean((1, 3), keepdims=True) * 2.0**-10
    return mean, jnp.sqrt(squares + rounding + 2.0**-20)


def _spare(run: _Run) -> jax.Array:
    """Returns the unused octaves below 448 for each `_Run.largest`, int32; negative: saturated."""
    return jnp.where(run.largest > 0, _room(run.largest) - run.exponents.logits, 0)


def _saturated(run: _Run) -> jax.Array:
    return ~jnp.isfinite(run.largest).all() | (_spare(run) < 0).any()


def _again(static: _Static, run: _Run) -> jax.Array:
    logits, query, key = _spare(run)
    loose = (logits >= _loose(static)) | (jnp.maximum(query, key) >= _LOOSE_RESULTS)
    return loose | _saturated(run)


def _loose(static: _Static) -> int:
    return _LOOSE_CAUSAL if static.is_causal else _LOOSE_LOGITS


def _better(static: _Static, run: _Run) -> _Exponents:
    """Returns exponents for the next run from the amaxes of a run.

    They leave one octave below 448 unused, since rounding differs between runs.
    """
    logits, query, key = _spare(run)
    good = (logits >= 0) & (logits < _loose(static))
    change = jnp.where(good, 0, logits - 1)
    # Gradients computed from a saturated gradient of the logits are too small: three octaves more.
    lower = change + 1 + jnp.where(logits < 0, 3, 0)
    old = run.exponents
    return _Exponents(old.logits + change, old.query + query - lower, old.key + key - lower)


# ---------------------------------------------------------------------------
# vmap
# ---------------------------------------------------------------------------


@functools.cache
def _folding(fn: Any, static: _Static, training: bool) -> Any:
    """Returns `fn(static, training, ...)` with a `vmap` rule that merges the axis into the batch.

    The kernel has one scale per array, and no batching rule for scales.
    """
    bound = jax.custom_batching.custom_vmap(functools.partial(fn, static, training))

    @bound.def_vmap
    def rule(size: int, mapped: Any, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        pairs = list(zip(leaves, jax.tree.leaves(mapped), strict=True))
        if any(flag and leaf.ndim == 1 for leaf, flag in pairs):
            # The scales differ between elements, such as after a vmapped cond. Run them in a loop.
            def run_element(each: list[Any]) -> Any:
                rest = iter(each)
                whole = [next(rest) if flag else leaf for leaf, flag in pairs]
                return bound(*jax.tree.unflatten(tree, whole))

            result = lax.map(run_element, [leaf for leaf, flag in pairs if flag])
            return result, jax.tree.map(lambda _: True, result)
        folded = [leaf if leaf.ndim == 0 else _fold(leaf, flag, size) for leaf, flag in pairs]
        result = bound(*jax.tree.unflatten(tree, folded))
        split = lambda a: a if a.ndim == 0 else a.reshape(size, a.shape[0] // size, *a.shape[1:])
        return jax.tree.map(split, result), jax.tree.map(lambda a: a.ndim > 0, result)

    return bound


def _fold(array: jax.Array, mapped: bool, size: int) -> jax.Array:
    if not mapped:
        array = jnp.broadcast_to(array, (size, *array.shape))
    return array.reshape(size * array.shape[1], *array.shape[2:])
