"""Losses whose arithmetic is in FP32, or in float64 where the operands are, and whose half operands
stay half: no array of the logits' size is ever held in FP32.

`softmax_cross_entropy` takes logits, `linear_cross_entropy` the layer before them, `mse`,
`kl_divergence` and `sigmoid_binary_cross_entropy` what their namesakes elsewhere take. All share
`weights` and `reduction`:

- `"mean"`: the sum over the sum of weights (without weights: over the number of rows that are not
  ignored); 0 where that is 0, as in a batch of padding only.
- `"sum"`, and `"none"`: every row's loss times its weight, 0 where ignored.
- `"sum_and_weight"`: the pair that "mean" divides. `jaxmp.value_and_grad(fn, weighted=True)` takes
  such a pair in the place of the loss, and then means over microbatches or devices of unequal
  weight are right.

A row of weight 0 has loss 0 and a gradient of exactly 0, whatever it holds: inf and NaN too.

Shape suffixes: ... any dimensions, V classes, D features, N rows, C rows of one chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jaxmp import _compat
from jaxmp._dtypes import FLOAT32, FLOAT64, floating_array, wide_dtype
from jaxmp.errors import JaxmpError, did_you_mean

__all__ = [
    "kl_divergence",
    "linear_cross_entropy",
    "mse",
    "sigmoid_binary_cross_entropy",
    "softmax_cross_entropy",
]

Reduction = Literal["mean", "sum", "none", "sum_and_weight"]
_REDUCTIONS = ("mean", "sum", "none", "sum_and_weight")


# ---------------------------------------------------------------------------
# Softmax cross entropy
# ---------------------------------------------------------------------------


def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    axis: int = -1,
) -> Any:
    """`-sum(q log softmax(logits))` in FP32, from half logits that are never held in FP32.

    The backward pass reads the logits and two FP32 numbers a row, and writes the gradient in the
    logits' dtype. Logits split over devices along V are not gathered: every sum over V is a sum
    over devices.

    An entry of -inf (a masked class) has probability 0, gradient 0 and no share in label smoothing.
    A label whose own logit is -inf costs inf. The gradient holds no NaN in either case.

    Derivatives: reverse mode, and forward over reverse; `jax.jvp` of the loss itself raises.

    Args:
      logits: `[..., V]` (V at `axis`), floating, 16 bits or more.
      labels: class indices, integers of the shape `[...]`; or probabilities, floating, of the
        logits' shape. A class index outside `[0, V)` raises where its value is known; under `jit`
        the loss of its row is NaN and the gradient of its row 0.
      label_smoothing: the part of `q` that is spread evenly over all classes, in `[0, 1]`, as in
        Szegedy et al. 2016 (arXiv:1512.00567) and in torch. A number, not an array.
      z_loss: adds `z_loss * logsumexp(logits) ** 2`, as in PaLM (arXiv:2204.02311, section 5:
        1e-4). A number, not an array.
      ignore_index: rows of this class index count for nothing; torch's default is -100.
      weights: of every row, `[...]`; floating, integer or bool.
      reduction: "mean", "sum", "none" or "sum_and_weight", as this module's first lines say.
      axis: where V is.

    Returns:
      FP32 (float64 for float64 logits): a scalar; `[...]` for "none"; `(sum, weight)` for
      "sum_and_weight".

    Raises:
      JaxmpError: if dtypes, shapes or options do not fit, or a known class index is out of range.

    Example:
      >>> logits = jnp.array([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]], jnp.bfloat16)
      >>> jaxmp.losses.softmax_cross_entropy(logits, jnp.array([0, 2]), reduction="none").round(4)
      Array([0.2395, 1.0986], dtype=float32)
      >>> loss = lambda logits: jaxmp.losses.softmax_cross_entropy(logits, jnp.array([0, 2]))
      >>> jax.grad(loss)(logits).dtype
      dtype(bfloat16)
    """
    logits, reduction = floating_array(logits, "logits"), _reduction(reduction)
    axis = _axis(axis, logits)
    terms = _terms(label_smoothing, z_loss, axis)
    size = logits.shape[axis]
    if not size:
        raise JaxmpError(f"logits have shape {_shape(logits)}: no classes at axis={axis}.")
    rows = logits.shape[:axis] + logits.shape[axis + 1 :]
    wide = wide_dtype(logits.dtype)
    labels = jnp.asarray(labels)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        if ignore_index is not None:
            raise JaxmpError(
                f"ignore_index={ignore_index} needs class indices, and the labels are "
                f"probabilities ({labels.dtype}). Give what counts: weights=rows_that_count."
            )
        labels = _same_shape(floating_array(labels, "labels"), logits, "logits")
        kept, valid = None, None
    else:
        _check_indices(labels, rows, size, ignore_index, "logits", logits.shape)
        labels, kept, valid = _read_indices(labels, size, ignore_index)
        labels = jnp.expand_dims(labels, axis)
    factors = _factors(weights, kept, rows, wide)
    logits, labels, factors, valid = _vary_alike(logits, labels, factors, valid)
    losses = _known(_row_losses(terms, logits, labels), valid)
    return _reduce(losses, factors, reduction)


class _Terms(NamedTuple):
    """What the loss of a row is made of; static."""

    label_smoothing: float
    z_loss: float
    axis: int


class _Rows(NamedTuple):
    """What a row's gradient needs beside its logits: FP32, of size 1 at the class axis.

    Two numbers where one logsumexp would do: next to a logit of 65504 FP32 has steps of 0.004, and
    `exp(x - top - log_sum)` keeps what `exp(x - (top + log_sum))` would lose.
    """

    # The largest logit; 0 where all are -inf.
    top: jax.Array
    # log(sum(exp(logits - top))); -inf where all are -inf.
    log_sum: jax.Array
    # sum(q): 1, unless the labels are probabilities that add up to something else.
    mass: jax.Array | float
    # What label smoothing adds to the target of every class that is not masked.
    share: jax.Array | None

    @property
    def logsumexp(self) -> jax.Array:
        return self.top + self.log_sum


def _masked(logits: jax.Array) -> jax.Array:
    return logits == -jnp.inf


def _hits(labels: jax.Array, logits: jax.Array, axis: int) -> jax.Array:
    """Labels as probabilities in FP32, to be fused with their use."""
    wide = wide_dtype(logits.dtype)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        return labels.astype(wide)
    # A comparison, not a gather: along a V that is split over devices it stays where it is.
    sharding = jax.typeof(logits).sharding
    explicit = sharding if any(sharding.spec) else None
    classes = lax.broadcasted_iota(labels.dtype, logits.shape, axis, out_sharding=explicit)
    return (classes == labels).astype(wide)


def _forward(
    terms: _Terms, logits: jax.Array, labels: jax.Array, *, small: bool
) -> tuple[jax.Array, _Rows]:
    """The losses of all rows, without the class axis, and what their gradient needs.

    Small: logits of which FP32 copies do no harm. XLA for CPU then sums their powers in a library
    call, which is faster, and wants such a copy.
    """
    wide = wide_dtype(logits.dtype)
    # In the logits' own dtype: a maximum is never rounded. Any constant gives the same derivative.
    top = lax.stop_gradient(jnp.max(logits, terms.axis, keepdims=True)).astype(wide)
    top = jnp.where(_masked(top), jnp.zeros_like(top), top)
    raised, hits = logits.astype(wide), _hits(labels, logits, terms.axis)
    shifted, zero = raised - top, jnp.zeros_like(raised)
    soft = jnp.issubdtype(labels.dtype, jnp.floating)
    # 0 log 0 = 0. Of class indices one logit is left, which can be shifted afterwards.
    parts = {"hit": jnp.where(hits == 0, zero, hits * (shifted if soft else raised))}
    if soft or small:
        parts["mass"] = hits
    if terms.label_smoothing:
        parts["even"] = jnp.where(_masked(logits), zero, shifted)
        parts["live"] = (~_masked(logits)).astype(wide)
    powers = jnp.exp(shifted)
    if small:
        sums = {**_sums(terms.axis, parts), "exp": jnp.sum(powers, terms.axis, keepdims=True)}
    else:
        sums = _sums(terms.axis, {**parts, "exp": powers})
    if not soft:
        sums["hit"] -= top

    log_sum, hit = jnp.log(sums["exp"]), sums["hit"]
    mass, share = sums["mass"] if soft else 1.0, None
    if terms.label_smoothing:
        keep = 1 - terms.label_smoothing
        share = terms.label_smoothing / jnp.maximum(sums["live"], jnp.ones_like(top))
        hit = (keep * hit if keep else 0.0) + share * sums["even"]
        mass = keep * mass + terms.label_smoothing
    losses = mass * log_sum - hit
    losses = jnp.where(log_sum == -jnp.inf, jnp.full_like(losses, jnp.inf), losses)
    rows = _Rows(top, log_sum, mass, share)
    if terms.z_loss:
        losses += terms.z_loss * jnp.square(rows.logsumexp)
    return jnp.squeeze(losses, terms.axis), rows


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sums(axis: int, parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sums of two parts or more along `axis`, which stays with size 1, in one pass.

    One reduction of several operands, which XLA for CPU fuses with what makes them. Of reductions
    of one operand it makes library calls there, which want the operand in memory, in FP32.
    """
    arrays = list(parts.values())
    zero = np.zeros((), arrays[0].dtype)
    add = lambda left, right: [a + b for a, b in zip(left, right, strict=True)]
    sums = lax.reduce(arrays, [zero] * len(arrays), add, (axis,))
    return {key: jnp.expand_dims(one, axis) for key, one in zip(parts, sums, strict=True)}


@_sums.defjvp
def _sums_jvp(axis: int, parts: Any, tangents: Any) -> Any:
    add = lambda tangent: jnp.sum(tangent, axis, keepdims=True)
    return _sums(axis, *parts), jax.tree.map(add, tangents[0])


def _slope_of(
    terms: _Terms, rows: _Rows, logits: jax.Array, labels: jax.Array, factors: jax.Array
) -> jax.Array:
    """The logits' gradient, each row times its factor; in FP32, to be rounded where it is used."""
    targets = _hits(labels, logits, terms.axis)
    if rows.share is not None:
        targets = targets * (1 - terms.label_smoothing) + rows.share
    chances = jnp.exp(logits.astype(targets.dtype) - rows.top - rows.log_sum)
    weight = rows.mass
    if terms.z_loss:
        weight += 2 * terms.z_loss * rows.logsumexp
    factors = jnp.expand_dims(factors, terms.axis)
    slope = (chances * weight - targets) * factors
    return jnp.where(_masked(logits) | (factors == 0), jnp.zeros_like(slope), slope)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_losses(terms: _Terms, logits: jax.Array, labels: jax.Array) -> jax.Array:
    return _forward(terms, logits, labels, small=False)[0]


def _row_losses_fwd(terms: _Terms, logits: jax.Array, labels: jax.Array) -> Any:
    losses, rows = _forward(terms, logits, labels, small=False)
    return losses, (rows, logits, labels)


def _row_losses_bwd(terms: _Terms, saved: Any, cotangent: jax.Array) -> Any:
    rows, logits, labels = saved
    slope = _slope_of(terms, rows, logits, labels, cotangent).astype(logits.dtype)
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        return slope, None
    surprise = rows.log_sum - (logits.astype(rows.top.dtype) - rows.top)
    surprise *= (1 - terms.label_smoothing) * jnp.expand_dims(cotangent, terms.axis)
    # A masked class is no class: nothing is to be gained by moving probability there.
    surprise = jnp.where(_masked(logits), jnp.zeros_like(surprise), surprise)
    return slope, surprise.astype(labels.dtype)


_row_losses.defvjp(_row_losses_fwd, _row_losses_bwd)


# ---------------------------------------------------------------------------
# A linear layer and its softmax cross entropy
# ---------------------------------------------------------------------------


def linear_cross_entropy(
    hidden: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    transposed: bool = False,
    chunk: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    precision: Any = None,
) -> Any:
    """`softmax_cross_entropy(hidden @ kernel + bias, labels)` without ever holding all logits.

    Rows are taken `chunk` at a time: their logits are made in FP32 by a product of operands in
    hidden's dtype, used and forgotten. The kernel's gradient is added up in FP32, hidden's is kept
    in FP32, and each is rounded once, to its argument's dtype. So an FP32 kernel beside bf16 hidden
    gets a gradient that was never rounded.

    Where one number is asked for ("mean", "sum"), gradients are made in the forward pass, while a
    chunk's logits are at hand, and the backward pass multiplies them by one number: three products
    in all, as without chunks. Making the logits again would cost a fourth, of the same size. What
    it saves is holding the two gradients from forward to backward; but this layer is the last one,
    its backward pass is the first, and there they would be made anyway. With `reduction="none"`
    each row's factor is known only in the backward pass: then the logits are made again. An
    evaluation that nobody differentiates makes one product.

    Rows that follow each other go to different chunks, so hidden that is split over devices along
    its first axis is worked on by all devices in every chunk; a kernel split along V stays split.
    In a data-parallel `jit` every device adds to the same kernel gradient: see docs/losses.md.

    Float16: the logits' gradient is multiplied by a power of two before it is rounded and divided
    by it after the product, so that its small entries are not lost whatever the loss scale.

    Args:
      hidden: `[..., D]`, floating, 16 bits or more. Its dtype is the products' dtype.
      kernel: `[D, V]`, or `[V, D]` with `transposed=True`, as an embedding table is stored.
      labels: class indices, integers of the shape `[...]`. Out of range: as in
        `softmax_cross_entropy`. Probabilities are refused: they would be as large as the logits.
      bias: `[V]`, floating; added in FP32.
      transposed: whether the kernel is `[V, D]`.
      chunk: how many rows at a time. None: D, rounded down to a power of two, between 256 and
        1024. A chunk's logits then take no more than the kernel's gradient in FP32, which has to
        be held anyway; beyond about 750 rows an H200's products take longer than reading and
        writing that gradient (8 bytes and 2 C operations an entry, at 4.3 TB/s and 790 TFLOP/s).
      label_smoothing, z_loss, ignore_index, weights, reduction: as in `softmax_cross_entropy`.
      precision: of the three products, as in `jax.lax.dot_general`.

    Returns:
      As `softmax_cross_entropy`.

    Raises:
      JaxmpError: as `softmax_cross_entropy`, or if the kernel's or bias's shape does not fit.

    Example:
      >>> hidden = jnp.ones((2, 6, 4), jnp.bfloat16)
      >>> table = jnp.zeros((10, 4), jnp.float32)
      >>> labels = jnp.zeros((2, 6), jnp.int32)
      >>> def loss(table):
      ...     return jaxmp.losses.linear_cross_entropy(hidden, table, labels, transposed=True)
      >>> value, gradient = jax.value_and_grad(loss)(table)
      >>> float(value), gradient.dtype
      (2.3025..., dtype('float32'))
    """
    reduction = _reduction(reduction)
    hidden, kernel = floating_array(hidden, "hidden"), floating_array(kernel, "kernel")
    size = _check_layer(hidden, kernel, transposed)
    bias = None if bias is None else floating_array(bias, "bias")
    if bias is not None and bias.shape != (size,):
        raise JaxmpError(
            f"bias has shape {_shape(bias)}, and the kernel {_shape(kernel)} has {size} classes. "
            f"Give one number a class: bias.reshape({size})."
        )
    terms = _terms(label_smoothing, z_loss, axis=1)
    labels = jnp.asarray(labels)
    rows = hidden.shape[:-1]
    _check_indices(labels, rows, size, ignore_index, "hidden", hidden.shape)
    labels, kept, valid = _read_indices(labels, size, ignore_index)
    wide = wide_dtype(hidden.dtype)
    factors = _factors(weights, kept, rows, wide)
    layer = _Layer(
        terms, _chunk_rows(chunk, math.prod(rows), hidden.shape[-1]), transposed, precision
    )
    each = reduction == "none"
    compute = functools.partial(_each_loss if each else _total_loss, layer)
    compute = _automatic(compute, hidden, kernel, like=labels if each else None)
    found = compute(hidden, kernel, bias, labels, valid, factors)
    return found if each else _finish(found, _total_weight(factors, rows, wide), reduction)


class _Layer(NamedTuple):
    """How the layer's loss is computed; static."""

    terms: _Terms
    chunk: int
    transposed: bool
    precision: Any


class _Arrays(NamedTuple):
    """What the layer's loss is computed of: `[N, D]`, a kernel, `[V]`, `[N]`, `[N]`."""

    hidden: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    labels: jax.Array
    # Whether a label names a class; None where all are known to.
    valid: jax.Array | None


def _flat(hidden: Any, kernel: Any, bias: Any, labels: Any, valid: Any, factors: Any) -> Any:
    """Arrays and factors with rows in one dimension."""
    hidden = hidden.reshape(labels.size, hidden.shape[-1])
    valid, factors = (None if one is None else one.reshape(-1) for one in (valid, factors))
    return _vary_alike(_Arrays(hidden, kernel, bias, labels.reshape(-1), valid), factors)


def _each_loss(layer: _Layer, *given: Any) -> jax.Array:
    """The loss of every row, in the shape of the labels, times its factor."""
    arrays, factors = _flat(*given)
    losses: Any = _layer_losses(layer, arrays)
    weighted = losses if factors is None else _weighted(losses, factors)
    return weighted.reshape(given[3].shape)


def _total_loss(layer: _Layer, *given: Any) -> Any:
    """The sum of all rows' losses times their factors."""
    arrays, factors = _flat(*given)
    if factors is None:
        ones = jnp.ones(arrays.labels.shape, wide_dtype(arrays.hidden.dtype))
        (factors,) = _vary_alike(ones, like=arrays)
    return _layer_total(layer, arrays, factors)


def _automatic(fn: Callable[..., Any], *arrays: jax.Array, like: jax.Array | None) -> Any:
    """`fn`, and on a mesh of explicit axes with the partitioner choosing how its insides are split.

    The result is split as `like`; None: it is a scalar.
    """
    for mesh in (jax.typeof(array).sharding.mesh for array in arrays):
        if AxisType.Explicit in mesh.axis_types:
            spec = PartitionSpec() if like is None else jax.typeof(like).sharding.spec
            return jax.sharding.auto_axes(fn, out_sharding=NamedSharding(mesh, spec))
    return fn


class _Gradients(NamedTuple):
    """FP32 gradients of a sum of losses."""

    hidden: jax.Array
    kernel: jax.Array
    bias: jax.Array | None

    def scaled(self, arrays: _Arrays, factor: Any) -> _Arrays:
        """Times `factor`, in the dtypes of `arrays`; as the cotangent of `arrays`."""
        cast = lambda slope, array: (slope * factor).astype(array.dtype)
        bias = None if self.bias is None else cast(self.bias, arrays.bias)
        kernel = cast(self.kernel, arrays.kernel)
        return _Arrays(cast(self.hidden, arrays.hidden), kernel, bias, *_no_cotangents(arrays))


def _no_cotangents(arrays: _Arrays) -> tuple[Any, Any]:
    zeros = lambda array: None if array is None else np.zeros(array.shape, jax.dtypes.float0)
    return zeros(arrays.labels), zeros(arrays.valid)


def _chunk_rows(chunk: int | None, rows: int, features: int) -> int:
    """Rows of one chunk: as many in each as can be, so that little is padded."""
    if chunk is None:
        chunk = min(max(1 << max(features.bit_length() - 1, 0), 256), 1024)
    elif isinstance(chunk, bool) or not isinstance(chunk, (int, np.integer)) or chunk < 1:
        raise JaxmpError(
            f"chunk={chunk!r} is not a number of rows. Give an integer of 1 or more, for example "
            "chunk=512, or leave it out."
        )
    even = -(-rows // max(-(-rows // chunk), 1))
    # Multiples of 64 fill a tensor core's tiles, and split over devices.
    return max(min(-(-even // 64) * 64, int(chunk), max(rows, 1)), 1)


def _split(array: jax.Array, chunk: int) -> jax.Array:
    """`[N, ...]` -> `[chunks, C, ...]`, row i in chunk `i % chunks`; zeros fill the last rows.

    Neighbours go to different chunks: where N is split over devices, so is C.
    """
    chunks = max(-(-array.shape[0] // chunk), 1)
    missing = chunks * chunk - array.shape[0]
    if missing:
        array = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
    return jnp.swapaxes(array.reshape(chunk, chunks, *array.shape[1:]), 0, 1)


def _join(array: jax.Array, rows: int) -> jax.Array:
    """Undoes `_split`."""
    return jnp.swapaxes(array, 0, 1).reshape(-1, *array.shape[2:])[:rows]


def _over_chunks(
    layer: _Layer, arrays: _Arrays, factors: jax.Array | None
) -> tuple[jax.Array, _Gradients | None]:
    """The loss of every row, `[N]`, and the gradients of their sum weighted with `factors`."""
    dtype, wide = arrays.hidden.dtype, wide_dtype(arrays.hidden.dtype)
    # Once, before the loop.
    kernel = arrays.kernel.astype(dtype)
    bias = None if arrays.bias is None else arrays.bias.astype(wide)
    inner = 1 if layer.transposed else 0
    stretch: Any = None if factors is None else _stretch(factors, dtype)

    def multiply(lhs: jax.Array, rhs: jax.Array, left: int, right: int) -> jax.Array:
        dimensions = (((left,), (right,)), ((), ()))
        return lax.dot_general(
            lhs, rhs, dimensions, precision=layer.precision, preferred_element_type=wide
        )

    def one_chunk(sums: Any, chunk: Any) -> Any:
        hidden, labels, factors = chunk
        logits = multiply(hidden, kernel, 1, inner)
        if bias is not None:
            logits += bias[None]
        losses, rows = _forward(layer.terms, logits, labels, small=True)
        if factors is None:
            return sums, (losses, None)
        slope = _slope_of(layer.terms, rows, logits, labels, factors)
        rounded = (slope * stretch).astype(dtype)
        d_hidden = multiply(rounded, kernel, 1, 1 - inner) / stretch
        # Against 0 * inf from rows that count for nothing.
        hidden = jnp.where(factors[:, None] == 0, jnp.zeros_like(hidden), hidden)
        pair = (rounded, hidden) if layer.transposed else (hidden, rounded)
        d_kernel, d_bias = sums
        d_kernel += multiply(*pair, 0, 0)
        if d_bias is not None:
            d_bias += jnp.sum(slope, axis=0)
        return (d_kernel, d_bias), (losses, d_hidden)

    sums = None
    if factors is not None:
        zeros = lambda array: None if array is None else jnp.zeros(array.shape, wide)
        sums = (zeros(arrays.kernel), zeros(arrays.bias))
        (sums,) = _vary_alike(sums, like=(arrays, factors))
    labels = arrays.labels[:, None]
    split = jax.tree.map(lambda array: _split(array, layer.chunk), (arrays.hidden, labels, factors))
    sums, (losses, d_hidden) = lax.scan(one_chunk, sums, split)
    losses = _known(_join(losses, arrays.hidden.shape[0]), arrays.valid)
    if sums is None:
        return losses, None
    d_hidden = _join(d_hidden, arrays.hidden.shape[0])
    return losses, _Gradients(d_hidden, sums[0] / stretch, sums[1])


def _stretch(factors: jax.Array, dtype: Any) -> Any:
    """A power of two: the logits' gradient times it fits float16 and keeps its small entries.

    A row's entries are at most its factor, or with z_loss `1 + 2 z_loss |logsumexp|` times that.
    The largest factor goes to 2**12, so 16 times it fits; softmax probabilities down to 1.5e-11
    are not lost. 1 for other dtypes, which have FP32's range.
    """
    wide = factors.dtype
    if dtype != np.float16:
        return np.ones((), wide)
    largest = jnp.max(jnp.abs(factors), initial=0)
    exponent = jnp.clip(12 - jnp.frexp(largest)[1], -126, 126)
    usable = (largest > 0) & (largest < jnp.inf)
    one = jnp.ones((), wide)
    return lax.stop_gradient(jnp.where(usable, jnp.ldexp(one, exponent), one))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_total(layer: _Layer, arrays: _Arrays, factors: jax.Array) -> jax.Array:
    """`sum(factors * losses)`; its gradients are made in the forward pass."""
    return _weighted_sum(_over_chunks(layer, arrays, None)[0], factors)


def _layer_total_fwd(layer: _Layer, arrays: _Arrays, factors: jax.Array) -> Any:
    known = factors if arrays.valid is None else jnp.where(arrays.valid, factors, 0)
    losses, gradients = _over_chunks(layer, arrays, known)
    total = _weighted_sum(losses, factors)
    return total, (arrays, _harmless(losses, factors), gradients)


def _layer_total_bwd(layer: _Layer, saved: Any, cotangent: jax.Array) -> Any:
    arrays, losses, gradients = saved
    return gradients.scaled(arrays, cotangent), losses * cotangent


_layer_total.defvjp(_layer_total_fwd, _layer_total_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_losses(layer: _Layer, arrays: _Arrays) -> jax.Array:
    """The loss of every row, `[N]`; the backward pass makes the logits again."""
    return _over_chunks(layer, arrays, None)[0]


def _layer_losses_fwd(layer: _Layer, arrays: _Arrays) -> Any:
    return _layer_losses(layer, arrays), arrays


def _layer_losses_bwd(layer: _Layer, arrays: _Arrays, cotangent: jax.Array) -> Any:
    known = cotangent if arrays.valid is None else jnp.where(arrays.valid, cotangent, 0)
    gradients = _over_chunks(layer, arrays, known)[1]
    assert gradients is not None
    return (gradients.scaled(arrays, 1),)


_layer_losses.defvjp(_layer_losses_fwd, _layer_losses_bwd)


# ---------------------------------------------------------------------------
# Other losses
# ---------------------------------------------------------------------------


def mse(
    predictions: ArrayLike,
    targets: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
) -> Any:
    """`(predictions - targets) ** 2`, subtracted and squared in FP32.

    In float16 a difference of 256 squares to infinity; `optax.squared_error` squares in the dtype
    that it is given. It computes here, on FP32 that is never held: the half operands are saved for
    the backward pass, and the gradient has their dtype.

    Args:
      predictions: `[...]`, floating, 16 bits or more.
      targets: `[...]`, the predictions' shape, floating.
      weights: of every entry `[...]`, or of the rows along its first dimensions; floating, integer
        or bool.
      reduction: "mean" (over entries), "sum", "none" or "sum_and_weight".

    Returns:
      FP32 (float64 for float64 operands): a scalar; `[...]` for "none"; `(sum, weight)` for
      "sum_and_weight".

    Raises:
      JaxmpError: if dtypes, shapes or options do not fit.

    Example:
      >>> predictions = jnp.array([300.0, 1.0], jnp.float16)
      >>> float(jaxmp.losses.mse(predictions, jnp.zeros(2, jnp.float16)))
      45000.5
    """
    predictions, reduction = floating_array(predictions, "predictions"), _reduction(reduction)
    targets = _same_shape(floating_array(targets, "targets"), predictions, "predictions")
    factors = _entry_factors(weights, predictions, targets)
    return _reduce(_from_half(optax.squared_error)(predictions, targets), factors, reduction)


def sigmoid_binary_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    label_smoothing: float = 0.0,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
) -> Any:
    """`-y log sigmoid(x) - (1 - y) log sigmoid(-x)` for every entry, in FP32 from half logits.

    `optax.sigmoid_binary_cross_entropy` computes, given FP32. One case is taken from it: an
    infinite logit on its label's side (a masked entry) would be 0 * inf; here loss and gradient
    are 0. On the other side the loss is inf and the gradient finite.

    Args:
      logits: `[...]`, floating, 16 bits or more.
      labels: `[...]`, the logits' shape: probabilities, floating; or integers or bools, 0 and 1.
      label_smoothing: labels are drawn to 1/2 by this part, in `[0, 1]`. A number, not an array.
      weights: as in `mse`.
      reduction: as in `mse`.

    Returns:
      As `mse`.

    Raises:
      JaxmpError: if dtypes, shapes or options do not fit.

    Example:
      >>> logits = jnp.array([-jnp.inf, 0.0, 60000.0], jnp.float16)
      >>> labels = jnp.array([0, 1, 0])
      >>> jaxmp.losses.sigmoid_binary_cross_entropy(logits, labels, reduction="none").round(4)
      Array([0.000e+00, 6.931e-01, 6.000e+04], dtype=float32)
    """
    logits, reduction = floating_array(logits, "logits"), _reduction(reduction)
    labels = _same_shape(jnp.asarray(labels), logits, "logits")
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        labels = labels.astype(wide_dtype(logits.dtype))
    smoothing = _number(label_smoothing, "label_smoothing", 1.0)

    def entries(logits: jax.Array, labels: jax.Array) -> jax.Array:
        # The masked entry first: smoothing would move its label off the side it is on.
        certain = jnp.isinf(logits) & (labels == (logits > 0).astype(labels.dtype))
        logits = jnp.where(certain, jnp.zeros_like(logits), logits)
        labels = labels * (1 - smoothing) + smoothing / 2
        losses = optax.sigmoid_binary_cross_entropy(logits, labels)
        return jnp.where(certain, jnp.zeros_like(losses), losses)

    factors = _entry_factors(weights, logits, labels)
    return _reduce(_from_half(entries)(logits, labels), factors, reduction)


def kl_divergence(
    log_predictions: ArrayLike,
    targets: ArrayLike,
    *,
    log_targets: bool = False,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    axis: int = -1,
) -> Any:
    """`sum(t (log t - log p))` of every row, in FP32 from half operands.

    With `0 log 0 = 0`: a class that targets rule out costs nothing, and gets gradient 0, even where
    its log prediction is -inf. There `optax.kl_divergence` is NaN, and its gradient by the targets
    is NaN at every 0, so this one does not call it; elsewhere they agree. A class that only the
    predictions rule out costs inf.

    Half predictions: a log probability of -10 has steps of 0.06 in bfloat16. Where both come from
    logits, `log_softmax` them in FP32 first.

    Args:
      log_predictions: `[..., V]` (V at `axis`), log probabilities; floating, 16 bits or more.
      targets: `[..., V]`, probabilities, or their logs with `log_targets=True`; floating.
      log_targets: whether the targets are logs.
      weights: of every row, `[...]`; floating, integer or bool.
      reduction: as in `mse`; "mean" is over rows (torch calls that "batchmean").
      axis: where V is.

    Returns:
      FP32 (float64 for float64 operands): a scalar; `[...]` for "none"; `(sum, weight)` for
      "sum_and_weight".

    Raises:
      JaxmpError: if dtypes, shapes or options do not fit.

    Example:
      >>> log_p = jnp.log(jnp.array([[0.5, 0.5, 0.0]])).astype(jnp.bfloat16)
      >>> float(jaxmp.losses.kl_divergence(log_p, jnp.array([[1.0, 0.0, 0.0]])))
      0.69140625
    """
    log_predictions = floating_array(log_predictions, "log_predictions")
    targets, reduction = floating_array(targets, "targets"), _reduction(reduction)
    targets = _same_shape(targets, log_predictions, "log_predictions")
    axis = _axis(axis, log_predictions)

    def rows(log_predictions: jax.Array, targets: jax.Array) -> jax.Array:
        none = jnp.zeros_like(targets)
        absent = targets == (-jnp.inf if log_targets else 0)
        # Both operands are made harmless before the formula, or its gradient would be 0 * inf.
        log_predictions = jnp.where(absent, none, log_predictions)
        targets = jnp.where(absent, none if log_targets else none + 1, targets)
        logs = targets if log_targets else jnp.log(targets)
        chances = jnp.exp(targets) if log_targets else targets
        return jnp.sum(jnp.where(absent, none, chances * (logs - log_predictions)), axis)

    shape = targets.shape[:axis] + targets.shape[axis + 1 :]
    factors = _factors(weights, None, shape, _widest(log_predictions, targets))
    return _reduce(_from_half(rows)(log_predictions, targets), factors, reduction)


def _from_half(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`fn` on operands in FP32; what is saved for its backward pass are the operands as given."""

    def widened(*operands: jax.Array) -> jax.Array:
        wide = _widest(*operands)
        return fn(*(one.astype(wide) for one in operands))

    return jax.checkpoint(widened)


def _widest(*operands: jax.Array) -> Any:
    return FLOAT64 if any(one.dtype == FLOAT64 for one in operands) else FLOAT32


def _entry_factors(weights: Any, *operands: jax.Array) -> jax.Array | None:
    """The factor of every entry; weights may be those of rows."""
    shape = operands[0].shape
    if weights is not None:
        weights = jnp.asarray(weights)
        if weights.ndim < len(shape) and weights.shape == shape[: weights.ndim]:
            missing = tuple(range(weights.ndim, len(shape)))
            weights = jnp.broadcast_to(jnp.expand_dims(weights, missing), shape)
    return _factors(weights, None, shape, _widest(*operands))


# ---------------------------------------------------------------------------
# Weights and reductions
# ---------------------------------------------------------------------------


def _factors(weights: Any, kept: jax.Array | None, rows: Any, wide: Any) -> jax.Array | None:
    """The factor of every row, in `wide`; None where all are 1."""
    if weights is None:
        return None if kept is None else kept.astype(wide)
    weights = jnp.asarray(weights)
    if jnp.issubdtype(weights.dtype, jnp.complexfloating) or weights.shape != tuple(rows):
        raise JaxmpError(
            f"weights are {weights.dtype} of shape {_shape(weights)}; the losses have shape "
            f"{list(rows)}, and each has one real weight. For one number of all rows: "
            f"weights=jnp.full({tuple(rows)}, weight)."
        )
    weights = weights.astype(wide)
    return weights if kept is None else jnp.where(kept, weights, jnp.zeros_like(weights))


def _known(losses: jax.Array, valid: jax.Array | None) -> jax.Array:
    """NaN where a label names no class; no gradient passes there."""
    if valid is None:
        return losses
    return jnp.where(valid, losses, jnp.full_like(losses, jnp.nan))


def _weighted(losses: jax.Array, factors: jax.Array) -> jax.Array:
    return _harmless(losses, factors) * factors


def _harmless(losses: jax.Array, factors: jax.Array) -> jax.Array:
    """Without what would make 0 * inf."""
    return jnp.where((factors == 0) & ~jnp.isfinite(losses), jnp.zeros_like(losses), losses)


def _weighted_sum(losses: jax.Array, factors: jax.Array) -> jax.Array:
    return jnp.sum(_weighted(losses, factors))


def _total_weight(factors: jax.Array | None, rows: Any, wide: Any) -> jax.Array:
    return jnp.asarray(math.prod(rows), wide) if factors is None else jnp.sum(factors)


def _reduce(losses: jax.Array, factors: jax.Array | None, reduction: Reduction) -> Any:
    weighted = losses if factors is None else _weighted(losses, factors)
    if reduction == "none":
        return weighted
    weight = _total_weight(factors, losses.shape, losses.dtype)
    return _finish(jnp.sum(weighted), weight, reduction)


def _finish(total: jax.Array, weight: jax.Array, reduction: Reduction) -> Any:
    if reduction == "sum":
        return total
    if reduction == "sum_and_weight":
        return total, weight
    return total / jnp.where(weight == 0, jnp.ones_like(weight), weight)


# ---------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------


def _shape(array: Any) -> list[int]:
    return list(array.shape)


def _same_shape(array: jax.Array, other: jax.Array, name: str) -> jax.Array:
    if array.shape != other.shape:
        # Broadcasting [N] against [N, 1] gives N * N losses, the best known bug of such functions.
        raise JaxmpError(
            f"{name} has shape {_shape(other)}, and what it is compared with {_shape(array)} "
            f"({array.dtype}). They must be equal: reshape one, or jnp.broadcast_to it."
        )
    return array


def _axis(axis: int, array: jax.Array) -> int:
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise JaxmpError(f"axis={axis!r} is not an integer. Give one axis, for example axis=-1.")
    if not -array.ndim <= axis < array.ndim:
        raise JaxmpError(
            f"axis={axis} is not an axis of shape {_shape(array)}. Allowed: {-array.ndim} to "
            f"{array.ndim - 1}; for example axis=-1."
        )
    return int(axis) % array.ndim


def _number(value: Any, name: str, largest: float) -> float:
    if isinstance(value, Tracer):
        raise JaxmpError(
            f"{name} is a traced value; it must be known when the program is built. Name it in "
            f"jax.jit(..., static_argnames={name!r})."
        )
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (0 <= number <= largest and math.isfinite(number)):
        allowed = "0 or more" if largest == math.inf else f"from 0 to {largest:g}"
        raise JaxmpError(f"{name}={value!r} must be a number {allowed}, for example {name}=0.1.")
    return number


def _terms(label_smoothing: Any, z_loss: Any, axis: int) -> _Terms:
    smoothing = _number(label_smoothing, "label_smoothing", 1.0)
    return _Terms(smoothing, _number(z_loss, "z_loss", math.inf), axis)


def _reduction(value: Any) -> Reduction:
    if value not in _REDUCTIONS:
        raise JaxmpError(
            f"Unknown reduction={value!r}.{did_you_mean(str(value), _REDUCTIONS)} Allowed: "
            f"{', '.join(_REDUCTIONS)}; for example reduction='mean'."
        )
    return value


def _check_layer(hidden: jax.Array, kernel: jax.Array, transposed: bool) -> int:
    """The number of classes."""
    layout = "[V, D]" if transposed else "[D, V]"
    if hidden.ndim < 1 or kernel.ndim != 2:
        raise JaxmpError(
            f"hidden has shape {_shape(hidden)} and kernel {_shape(kernel)}; allowed are [..., D] "
            f"and {layout}."
        )
    features, size = kernel.shape[::-1] if transposed else kernel.shape
    if features != hidden.shape[-1]:
        fix = " The last axis of hidden must be D."
        if size == hidden.shape[-1]:
            fix = f" The kernel is stored the other way: transposed={not transposed}."
        raise JaxmpError(
            f"hidden {_shape(hidden)} has {hidden.shape[-1]} features, and kernel "
            f"{_shape(kernel)}, read as {layout}, takes {features}.{fix}"
        )
    if not size:
        raise JaxmpError(f"kernel {_shape(kernel)}, read as {layout}, has no classes.")
    return size


def _check_indices(
    labels: jax.Array, rows: Any, size: int, ignore_index: Any, name: str, given: Any
) -> None:
    """Raises for labels that cannot be class indices of `rows`; reads them where it can."""
    if ignore_index is not None and (
        isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, np.integer))
    ):
        raise JaxmpError(f"ignore_index={ignore_index!r} is not an integer, such as -100.")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise JaxmpError(
            f"labels are {labels.dtype} of shape {_shape(labels)}; with {name} of shape "
            f"{list(given)} they must be class indices, integers of shape {list(rows)}: "
            "labels.astype(jnp.int32)."
            + (" For probabilities: softmax_cross_entropy." if name == "hidden" else "")
        )
    if labels.shape != tuple(rows):
        raise JaxmpError(
            f"labels have shape {_shape(labels)}, and {name} of shape {list(given)} has rows of "
            f"shape {list(rows)}. Give one class index a row: labels.reshape({tuple(rows)})."
        )
    if isinstance(labels, Tracer) or not labels.is_fully_addressable:
        return
    values = np.asarray(labels)
    wrong = (values < 0) | (values >= size)
    if ignore_index is not None:
        wrong &= values != ignore_index
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        found = values[place]
        raise JaxmpError(
            f"labels[{', '.join(map(str, place))}] is {found}, one of {int(wrong.sum())} that name "
            f"none of {size} classes. Allowed: 0 to {size - 1}. If {found} marks rows that do not "
            f"count: ignore_index={found}."
        )


def _read_indices(
    labels: jax.Array, size: int, ignore_index: int | None
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Labels that name a class, which rows count (None: all), and which labels were right."""
    labels = labels.astype("int64" if labels.dtype.itemsize == 8 else "int32")
    valid = (labels >= 0) & (labels < size)
    kept = None
    if ignore_index is not None:
        kept = labels != ignore_index
        valid |= ~kept
    return jnp.where(valid if kept is None else valid & kept, labels, 0), kept, valid


def _vary_alike(*trees: Any, like: Any = None) -> tuple[Any, ...]:
    """Inside `shard_map`: every array marked as differing over the axes that any of them does.

    A replicated kernel's gradient is then summed over the mesh once, after all chunks.
    """
    axes = _compat.varying_axes((trees, like))
    return _compat.vary(trees, axes) if axes else trees
