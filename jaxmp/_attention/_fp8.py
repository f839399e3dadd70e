"""FP8 attention: cuDNN's kernel where there is one, its emulation on a CPU; and all the scales.

The kernel reads and writes E4M3 alone, and multiplies by scales that it is given. Each number `x`
is held as `x * 2**n`; such powers of two change no digit, and what they add up to is exact.

*Operands* and the gradient of the result are scaled just in time, by their largest magnitude. The
*weights* are at most 1 and are scaled by 256. The *result* keeps the scale of the values: it is a
mean of them, `|out| <= max |value|`, so that where rounding carries it beyond 448, 448 is right.

*Gradients* have no such bound that would be of use: over long rows that of the logits' gradient is
a thousand times too wide. TransformerEngine scales it by what the step before saw
(`NVTE_DPA_FP8DS_AMAX_HISTLEN=1` in its `dot_product_attention.py`); a function without state
cannot. Here `_first_guess` estimates them all, and E4M3 forgives much: it has its four digits
over 14 octaves. The kernel tells the largest magnitudes that it met, from before they were scaled.
If one was beyond 448, or far below, the kernel runs again with scales made of these (`_better`). A
gradient that still saturates after the last run becomes NaN, so that the step is skipped.

**Scales in any order.** JAX hands the scales of the backward pass on in the order
`fp8_params_keys_bwd`: after those of query, key and value, descale_o, descale_dO, descale_s; at the
end scale_dQ, scale_dK, scale_dV, scale_dP. XLA takes them by position, as descale_s, descale_o,
descale_dO and scale_dP, scale_dQ, scale_dK, scale_dV (`set_uid` in
`GetCudnnFlashAttentionBackwardF8OperationGraph`, xla/stream_executor/cuda/cuda_dnn.cc at a51b0f5).
JAX's own test of the backward pass sets all to one, and cannot tell. So this module gives the three
one value, and the four another, and is right in both orders: the factors that differ go into
descale_q, descale_k, descale_v and descale_dP, of whose places there is no doubt.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp import _compat
from jaxmp._attention import _fp8_emulation
from jaxmp._attention._arguments import Arguments, with_scaled_query
from jaxmp._dtypes import FLOAT32
from jaxmp.errors import AttentionError
from jaxmp.fp8._quantize import compute_scale, quantize

_FORMAT = "e4m3fn"
# The weights are scaled by 2**8, the largest power of two that E4M3 holds.
_WEIGHTS = 8
# How often the backward kernel runs at most: once; with good scales for the logits' gradient; with
# good ones for what is made of that.
_RUNS = 3
# The kernel runs again if so many octaves below 448 stay empty: of the logits' gradient, where
# under a causal mask what long rows give is far smaller than what the first ones do; and of the
# gradients that come out.
_LOOSE_LOGITS, _LOOSE_CAUSAL, _LOOSE_RESULTS = 6, 4, 9


class _Static(NamedTuple):
    """What is known before anything runs. Hashable."""

    scale: float
    is_causal: bool
    emulated: bool


class _Scaled(NamedTuple):
    """`x = data * 2**-exponent`."""

    data: jax.Array  # E4M3
    exponent: jax.Array  # int32 scalar
    finite: jax.Array  # bool scalar: whether x was


class _Saved(NamedTuple):
    """What the backward pass wants of the forward pass."""

    query: _Scaled
    key: _Scaled
    value: _Scaled
    out: jax.Array  # E4M3 `[B, T, N, H]`, scaled as the values are
    largest_out: jax.Array  # float32 scalar: of `out`
    logsumexp: jax.Array  # float32 `[B, N, T]`


class _Exponents(NamedTuple):
    """Of what the backward kernel rounds, int32 scalars.

    `logits` multiplies the gradients of logits and values; `query` and `key` multiply what the
    products of the rounded gradient of the logits with key and query give.
    """

    logits: jax.Array
    query: jax.Array
    key: jax.Array


class _Run(NamedTuple):
    """What the backward kernel was given, and gave."""

    exponents: _Exponents
    gradients: tuple[jax.Array, ...]  # of query, key and value; E4M3
    # Largest magnitudes float32 `[3]`: of the gradients of logits or values, of query, of key.
    # Before the last factor, 2**exponents.logits, with which they were rounded.
    largest: jax.Array
    number: jax.Array  # int32: 1 for the first run


def fp8_attention(given: Arguments) -> jax.Array:
    """`[B, T, N, H]` in the operands' dtype; NaN throughout if an operand is not finite."""
    given, settings = with_scaled_query(given), given.settings
    static = _Static(settings.scale, settings.is_causal, _compat.target() != "gpu")
    return _attention(static, given.query, given.key, given.value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return _folding(_forward, static, False)(query, key, value)[0]


def _forward_rule(static: _Static, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
    # Of a first derivative, tangents come neither here nor to the backward pass.
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
    """`2**exponent` in float32, within its normal numbers."""
    exponent = jnp.clip(exponent, -126, 127)
    return lax.bitcast_convert_type((exponent + 127) << 23, FLOAT32)


def _room(amax: jax.Array) -> jax.Array:
    """The largest n for which `amax * 2**n <= 448`, int32; 0 if `amax` is 0 or not finite."""
    scale = compute_scale(amax, _FORMAT, power_of_two=True)
    return (lax.bitcast_convert_type(scale, jnp.int32) >> 23) - 127


def _scaled(x: jax.Array) -> _Scaled:
    amax = jnp.abs(x).astype(FLOAT32).max()
    exponent = _room(amax)
    # Asked of each number: a maximum may pass over NaN.
    finite = jnp.isfinite(x).all()
    return _Scaled(quantize(x, _power(exponent), _FORMAT), exponent, finite)


def _wide(data: jax.Array) -> jax.Array:
    # XLA would drop a cast to FP8 and back, and with it the rounding.
    return lax.optimization_barrier(data).astype(FLOAT32)


def _unscaled(data: jax.Array, exponent: jax.Array, usable: jax.Array, dtype: Any) -> jax.Array:
    """`data * 2**-exponent` in `dtype`; NaN if not `usable`."""
    half = exponent // 2
    # Two factors: together they may be beyond FP32 where the product is not.
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
    """Of the product of an unscaled query and key.

    Bounded: logits below 2**-35 are as good as 0, those above 2**80 as good as these; and what
    the kernel multiplies on the way stays within FP32.
    """
    return jnp.clip(-query - key, -60, 60)


# ---------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------


def _backward(static: _Static, training: bool, saved: _Saved, d_out: jax.Array) -> Any:
    del training
    above = _scaled(d_out)
    # Where attention is flat its result is small. It is scaled up as far as it goes, and the
    # values' factor with it, so that the gradients of logits and values, which share one scale,
    # come closer to each other.
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
    usable = jnp.stack([above.finite, *(one.finite for one in operands)]).all() & ~_saturated(last)
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
    """One run of the backward kernel.

    It computes, p being the weights and all else in E4M3 as it is given, with one scale g for

        dV = g (256 p)^T dO        dS = g p (descale_v dO V^T - dO . O) scale
        dQ = g descale_dP descale_k (dS K)      dK = g descale_dP descale_q (dS^T Q)

    where descale_q * descale_k is what logits are made with. So descale_dP and the ratio of
    descale_q and descale_k set the scales of dQ and dK.
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
    # Where the sum above was odd the key's gradient is an octave lower.
    exponents = _Exponents(logits, wanted.query, logits + of_d_logits + of_query)
    largest = jnp.stack([jnp.maximum(d_logits, d_value), d_query, d_key])
    return _Run(exponents, tuple(gradients), largest, number)


def _first_guess(static: _Static, saved: _Saved, d_out: jax.Array, lift: jax.Array) -> _Exponents:
    """Exponents for the first run, from the sizes of operands, result and gradient alone.

    With v the values less their mean, a row of weights p turns them into a result less the mean,
    `sum p v`, of size `|v| sqrt(sum p**2)` if the values are as good as random: so the sharpness of
    attention, `sqrt(sum p**2)`, can be read off the result. The gradient of a logit,
    `p (1 - p) dO . (v - other v)`, is then at most about `sharpness * |dO| * spread of v`, and
    those of query and key are sums of it times keys and queries. All is taken four times as large
    as it is on average, for the largest of many, and then 2 to 16 times for safety.
    """
    query, key, value = (_wide(one.data) for one in (saved.query, saved.key, saved.value))
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
    # How much weight a key may get from all queries, and what their gradients have in common.
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
    """Over positions `[B, 1, K, H]`, and root mean square of what differs from it `[B, 1, K, 1]`.

    Not below what FP8 rounds off.
    """
    mean = x.mean(1, keepdims=True)
    squares = jnp.square(x - mean).mean((1, 3), keepdims=True)
    rounding = jnp.square(x).mean((1, 3), keepdims=True) * 2.0**-10
    return mean, jnp.sqrt(squares + rounding + 2.0**-20)


def _spare(run: _Run) -> jax.Array:
    """Octaves that were left below 448, int32, as in `_Run.largest`; negative: too few."""
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
    """From what a run met, an octave below what fits: rounding differs from run to run."""
    logits, query, key = _spare(run)
    good = (logits >= 0) & (logits < _loose(static))
    change = jnp.where(good, 0, logits - 1)
    # What was made of a gradient that saturated is too small.
    lower = change + 1 + jnp.where(logits < 0, 3, 0)
    old = run.exponents
    return _Exponents(old.logits + change, old.query + query - lower, old.key + key - lower)


# ---------------------------------------------------------------------------
# vmap
# ---------------------------------------------------------------------------


@functools.cache
def _folding(fn: Any, static: _Static, training: bool) -> Any:
    """`fn(static, training, ...)` which takes a dimension of vmap as part of the batch.

    The kernel has one scale for a whole array, and no rule for a vmap of scales.
    """
    bound = jax.custom_batching.custom_vmap(functools.partial(fn, static, training))

    @bound.def_vmap
    def rule(size: int, mapped: Any, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        pairs = list(zip(leaves, jax.tree.leaves(mapped), strict=True))
        if any(flag and leaf.ndim == 1 for leaf, flag in pairs):
            # Scales differ, as where branches of a vmapped cond joined: one after the other.
            def one(each: list[Any]) -> Any:
                rest = iter(each)
                whole = [next(rest) if flag else leaf for leaf, flag in pairs]
                return bound(*jax.tree.unflatten(tree, whole))

            result = lax.map(one, [leaf for leaf, flag in pairs if flag])
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
