"""Losses that compute in FP32 and keep 16-bit operands in 16 bits.

They compute in float64 if the operands are float64. No array of the size of the logits is stored in
FP32. `softmax_cross_entropy` takes logits, and `linear_cross_entropy` takes the input and the
kernel of the layer that computes them. `mse`, `kl_divergence` and `sigmoid_binary_cross_entropy`
take the usual operands. All losses share the arguments `weights` and `reduction`:

- `"mean"`: the sum of weighted losses, divided by the sum of weights (without weights: by the
  number of rows that are not ignored); 0 if the divisor is 0, as in a batch of padding only.
- `"sum"`: the sum of weighted losses. `"none"`: the loss of each row times its weight, 0 for
  ignored rows.
- `"sum_and_weight"`: numerator and denominator of "mean". `jaxmp.value_and_grad(fn, weighted=True)`
  accepts this pair instead of the loss, so that means over microbatches or devices of unequal
  weight are correct.

A row of weight 0 has loss 0 and a gradient of exactly 0, even if it contains inf or NaN.

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

from jaxmp._core import _compat
from jaxmp._core._dtypes import FLOAT32, FLOAT64, floating_array, wide_dtype
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
    """Computes softmax cross entropy in FP32, without storing 16-bit logits in FP32.

    The loss of a row with label distribution `q` is `-sum(q log softmax(logits))`. The backward
    pass reads the logits and two FP32 numbers per row, and writes the gradient in the dtype of the
    logits. Logits that are sharded over devices along V are not gathered: each sum over V is
    computed as a sum over devices.

    An entry of -inf (a masked class) has probability 0, gradient 0 and no share of the label
    smoothing. If the logit of a label is -inf, the loss is inf. The gradient contains no NaN in
    either case.

    Reverse mode and forward-over-reverse mode are supported; `jax.jvp` of the loss itself raises.

    Args:
      logits: `[..., V]` (V at `axis`), floating, 16 bits or more.
      labels: class indices, integers of shape `[...]`; or probabilities, floating, of the shape of
        the logits. A class index outside `[0, V)` raises if its value is known. Under `jit`, the
        loss of its row is NaN and the gradient of its row is 0.
      label_smoothing: fraction of `q` that is distributed evenly over all classes, in `[0, 1]`, as
        in Szegedy et al. 2016 (arXiv:1512.00567) and in torch. A number, not an array.
      z_loss: adds `z_loss * logsumexp(logits) ** 2`, as in PaLM (arXiv:2204.02311, section 5:
        1e-4). A number, not an array.
      ignore_index: class index of rows to ignore; torch's default is -100.
      weights: weight of each row, `[...]`; floating, integer or bool.
      reduction: "mean", "sum", "none" or "sum_and_weight", as described in the docstring of this
        module.
      axis: axis of the classes.

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
        counted, valid = None, None
    else:
        _check_indices(labels, rows, size, ignore_index, "logits", logits.shape)
        labels, counted, valid = _read_indices(labels, size, ignore_index)
        labels = jnp.expand_dims(labels, axis)
    factors = _factors(weights, counted, rows, wide)
    logits, labels, factors, valid = _vary_alike(logits, labels, factors, valid)
    losses = _known(_row_losses(terms, logits, labels), valid)
    return _reduce(losses, factors, reduction)


class _Terms(NamedTuple):
    """Static settings of the loss of a row."""

    label_smoothing: float
    z_loss: float
    axis: int


class _Rows(NamedTuple):
    """Statistics of each row that its gradient requires: FP32, with size 1 on the class axis.

    `top` and `log_sum` are separate, although their sum would be sufficient: next to a logit of
    65504, FP32 has steps of 0.004, and `exp(x - top - log_sum)` preserves what
    `exp(x - (top + log_sum))` would lose.
    """

    # Largest logit; 0 if all are -inf.
    top: jax.Array
    # log(sum(exp(logits - top))); -inf if all logits are -inf.
    log_sum: jax.Array
    # sum(q): 1, unless the labels are probabilities with another sum.
    mass: jax.Array | float
    # Target probability that label smoothing adds to each class that is not masked.
    share: jax.Array | None

    @property
    def logsumexp(self) -> jax.Array:
        return self.top + self.log_sum


def _masked(logits: jax.Array) -> jax.Array:
    return logits == -jnp.inf


def _hits(labels: jax.Array, logits: jax.Array, axis: int) -> jax.Array:
    """Returns the labels as probabilities in FP32, for XLA to fuse with their use."""
    wide = wide_dtype(logits.dtype)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        return labels.astype(wide)
    # Compare instead of gathering: if V is sharded over devices, this needs no communication.
    sharding = jax.typeof(logits).sharding
    explicit = sharding if any(sharding.spec) else None
    classes = lax.broadcasted_iota(labels.dtype, logits.shape, axis, out_sharding=explicit)
    return (classes == labels).astype(wide)


def _forward(
    terms: _Terms, logits: jax.Array, labels: jax.Array, *, small: bool
) -> tuple[jax.Array, _Rows]:
    """Computes the loss of each row, without the class axis, and statistics for its gradient.

    `small` means that FP32 copies of the logits are acceptable. XLA for CPU then sums the
    exponentials in a library call, which is faster and requires such a copy.
    """
    wide = wide_dtype(logits.dtype)
    # The maximum is exact in the dtype of the logits. The loss does not depend on `top`, so its
    # gradient can be stopped.
    top = lax.stop_gradient(jnp.max(logits, terms.axis, keepdims=True)).astype(wide)
    top = jnp.where(_masked(top), jnp.zeros_like(top), top)
    raised, hits = logits.astype(wide), _hits(labels, logits, terms.axis)
    shifted, zero = raised - top, jnp.zeros_like(raised)
    soft = jnp.issubdtype(labels.dtype, jnp.floating)
    # 0 log 0 = 0. With class indices, the sum contains a single logit, which is shifted afterwards.
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
    """Sums two or more arrays along `axis`, kept with size 1, in one pass.

    XLA for CPU fuses a reduction of several operands with the operations that compute them. It
    replaces a reduction of one operand by a library call, which reads the operand in FP32 from
    memory.
    """
    arrays = list(parts.values())
    zero = np.zeros((), arrays[0].dtype)
    add = lambda left, right: [a + b for a, b in zip(left, right, strict=True)]
    sums = lax.reduce(arrays, [zero] * len(arrays), add, (axis,))
    return {key: jnp.expand_dims(total, axis) for key, total in zip(parts, sums, strict=True)}


@_sums.defjvp
def _sums_jvp(axis: int, parts: Any, tangents: Any) -> Any:
    add = lambda tangent: jnp.sum(tangent, axis, keepdims=True)
    return _sums(axis, *parts), jax.tree.map(add, tangents[0])


def _slope_of(
    terms: _Terms, rows: _Rows, logits: jax.Array, labels: jax.Array, factors: jax.Array
) -> jax.Array:
    """Returns the FP32 gradient of the logits, each row times its factor; the caller rounds it."""
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
    # The derivative with respect to the label of a masked class is infinite. It is set to 0,
    # because the class cannot receive probability.
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
    """Computes `softmax_cross_entropy(hidden @ kernel + bias, labels)` without storing all logits.

    Rows are processed in chunks of `chunk` rows. The logits of a chunk are computed in FP32 by a
    matmul with operands in the dtype of `hidden`, and discarded after use. The gradient of the
    kernel is accumulated in FP32, that of `hidden` is stored in FP32, and each is rounded once, to
    the dtype of its argument. With an FP32 kernel and bfloat16 `hidden`, the gradient of the kernel
    is therefore never rounded.

    If the result is a scalar ("mean", "sum"), the gradients are computed in the forward pass, while
    the logits of a chunk are available, and the backward pass multiplies them by a scalar. This
    takes three matmuls, as without chunks. Recomputing the logits would take a fourth matmul of the
    same size, to avoid storing the two gradients between the passes. But this layer is the last
    one, so its backward pass is the first and would compute them immediately anyway. With
    `reduction="none"`, the factor of each row is known only in the backward pass, which therefore
    recomputes the logits. Without differentiation, only one matmul is computed.

    Adjacent rows belong to different chunks. If `hidden` is sharded over devices along its first
    axis, all devices therefore work on every chunk. A kernel that is sharded along V stays sharded.
    In a data-parallel `jit`, every device adds to the same gradient of the kernel: see
    docs/losses.md.

    With float16, the gradient of the logits is multiplied by a power of two before it is rounded,
    and divided by it after the matmul, so that small entries are preserved for every loss scale.

    Args:
      hidden: `[..., D]`, floating, 16 bits or more. Its dtype is that of the matmul operands.
      kernel: `[D, V]`, or `[V, D]` with `transposed=True`, as an embedding table is stored.
      labels: class indices, integers of shape `[...]`. For indices out of range see
        `softmax_cross_entropy`. Probabilities raise an error, because they would be as large as the
        logits.
      bias: `[V]`, floating; added in FP32.
      transposed: the kernel is `[V, D]`.
      chunk: number of rows per chunk. None: D, rounded down to a power of two, between 256 and
        1024. For D >= 256, the logits of a chunk then take no more memory than the FP32 gradient of
        the kernel, which is stored anyway. Above about 750 rows, the matmuls on an H200 take longer
        than reading and writing that gradient (8 bytes and 2 C operations per element, at 4.3 TB/s
        and 790 TFLOP/s).
      label_smoothing, z_loss, ignore_index, weights, reduction: as in `softmax_cross_entropy`.
      precision: precision of the three matmuls, as in `jax.lax.dot_general`.

    Returns:
      As in `softmax_cross_entropy`.

    Raises:
      JaxmpError: as in `softmax_cross_entropy`, or if the shape of kernel or bias does not fit.

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
    labels, counted, valid = _read_indices(labels, size, ignore_index)
    wide = wide_dtype(hidden.dtype)
    factors = _factors(weights, counted, rows, wide)
    if precision is None:  # the backward pass is traced where the caller's setting has ended
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    layer = _Layer(
        terms, _chunk_rows(chunk, math.prod(rows), hidden.shape[-1]), transposed, precision
    )
    per_row = reduction == "none"
    compute = functools.partial(_each_loss if per_row else _total_loss, layer)
    compute = _automatic(compute, hidden, kernel, like=labels if per_row else None)
    result = compute(hidden, kernel, bias, labels, valid, factors)
    return result if per_row else _finish(result, _total_weight(factors, rows, wide), reduction)


class _Layer(NamedTuple):
    """Static settings of the loss of a linear layer."""

    terms: _Terms
    chunk: int
    transposed: bool
    precision: Any


class _Arrays(NamedTuple):
    """Arrays of the loss of a linear layer: `[N, D]`, a kernel, `[V]`, `[N]`, `[N]`."""

    hidden: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    labels: jax.Array
    # True for labels that are class indices; None if all are known to be.
    valid: jax.Array | None


def _flat(hidden: Any, kernel: Any, bias: Any, labels: Any, valid: Any, factors: Any) -> Any:
    """Flattens the rows of arrays and factors to one dimension."""
    hidden = hidden.reshape(labels.size, hidden.shape[-1])
    valid, factors = (None if array is None else array.reshape(-1) for array in (valid, factors))
    return _vary_alike(_Arrays(hidden, kernel, bias, labels.reshape(-1), valid), factors)


def _each_loss(layer: _Layer, *args: Any) -> jax.Array:
    """Returns the loss of each row times its factor, in the shape of the labels."""
    arrays, factors = _flat(*args)
    losses: Any = _layer_losses(layer, arrays)
    weighted = losses if factors is None else _weighted(losses, factors)
    return weighted.reshape(args[3].shape)


def _total_loss(layer: _Layer, *args: Any) -> Any:
    """Returns the sum of the losses of all rows times their factors."""
    arrays, factors = _flat(*args)
    if factors is None:
        ones = jnp.ones(arrays.labels.shape, wide_dtype(arrays.hidden.dtype))
        (factors,) = _vary_alike(ones, like=arrays)
    return _layer_total(layer, arrays, factors)


def _automatic(fn: Callable[..., Any], *arrays: jax.Array, like: jax.Array | None) -> Any:
    """Returns `fn`, with automatic partitioning inside if the mesh has explicit axes.

    The result is sharded like `like`, or a scalar if `like` is None.
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
        """Returns the gradients times `factor`, as cotangents in the dtypes of `arrays`."""
        cast = lambda slope, array: (slope * factor).astype(array.dtype)
        bias = None if self.bias is None else cast(self.bias, arrays.bias)
        kernel = cast(self.kernel, arrays.kernel)
        return _Arrays(cast(self.hidden, arrays.hidden), kernel, bias, *_no_cotangents(arrays))


def _no_cotangents(arrays: _Arrays) -> tuple[Any, Any]:
    zeros = lambda array: None if array is None else np.zeros(array.shape, jax.dtypes.float0)
    return zeros(arrays.labels), zeros(arrays.valid)


def _chunk_rows(chunk: int | None, rows: int, features: int) -> int:
    """Returns the number of rows per chunk, with chunks of equal size to minimize padding."""
    if chunk is None:
        chunk = min(max(1 << max(features.bit_length() - 1, 0), 256), 1024)
    elif isinstance(chunk, bool) or not isinstance(chunk, (int, np.integer)) or chunk < 1:
        raise JaxmpError(
            f"chunk={chunk!r} is not a number of rows. Give an integer of 1 or more, for example "
            "chunk=512, or leave it out."
        )
    even = -(-rows // max(-(-rows // chunk), 1))
    # Multiples of 64 fill the tiles of a Tensor Core, and can be split over devices.
    return max(min(-(-even // 64) * 64, int(chunk), max(rows, 1)), 1)


def _split(array: jax.Array, chunk: int) -> jax.Array:
    """Reshapes `[N, ...]` to `[chunks, C, ...]`, with row i in chunk `i % chunks` and zero padding.

    Adjacent rows belong to different chunks, so that C is sharded over devices if N is.
    """
    chunks = max(-(-array.shape[0] // chunk), 1)
    missing = chunks * chunk - array.shape[0]
    if missing:
        array = jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
    return jnp.swapaxes(array.reshape(chunk, chunks, *array.shape[1:]), 0, 1)


def _join(array: jax.Array, rows: int) -> jax.Array:
    """Inverts `_split`."""
    return jnp.swapaxes(array, 0, 1).reshape(-1, *array.shape[2:])[:rows]


def _over_chunks(
    layer: _Layer, arrays: _Arrays, factors: jax.Array | None
) -> tuple[jax.Array, _Gradients | None]:
    """Returns the loss of each row, `[N]`, and the gradients of the sum weighted with `factors`.

    Without `factors`, the gradients are None.
    """
    dtype, wide = arrays.hidden.dtype, wide_dtype(arrays.hidden.dtype)
    # Cast once, before the loop.
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
        # Rows with factor 0 may contain inf, and 0 * inf is NaN.
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
    """Returns a power of two that scales the gradient of the logits to the range of float16.
    The entries of a row are at most its factor, or with z_loss `1 + 2 z_loss |logsumexp|` times
    that. The largest factor is scaled to at most 2**12, so that 16 times it fits and softmax
    probabilities down to 1.5e-11 are not lost. Other dtypes have the range of FP32, so that the
    result is 1.
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
    """Computes `sum(factors * losses)`; the forward pass also computes its gradients."""
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
    """Computes the loss of each row, `[N]`; the backward pass recomputes the logits."""
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
    """Computes the squared error `(predictions - targets) ** 2` in FP32.

    In float16, the square of a difference of 256 is infinite, and `optax.squared_error` computes in
    the dtype of its operands. This function calls it with FP32 operands that are not stored:
    16-bit operands are saved for the backward pass, and the gradient has their dtype.

    Args:
      predictions: `[...]`, floating, 16 bits or more.
      targets: `[...]`, floating, of the shape of the predictions.
      weights: weights of all entries, `[...]`, or of the rows along the first dimensions; floating,
        integer or bool.
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
    """Computes the binary cross entropy of each entry in FP32.

    The loss of an entry is `-y log sigmoid(x) - (1 - y) log sigmoid(-x)`, computed by
    `optax.sigmoid_binary_cross_entropy` with FP32 operands that are not stored. Infinite logits on
    the side of their label (masked entries) are an exception: their loss would be 0 * inf, and is
    0 here, like its gradient. On the other side, the loss is inf and the gradient is finite.

    Args:
      logits: `[...]`, floating, 16 bits or more.
      labels: `[...]`, of the shape of the logits: probabilities, floating; or 0 and 1 as integers
        or bools.
      label_smoothing: fraction by which labels are moved towards 1/2, in `[0, 1]`. A number, not an
        array.
      weights: as in `mse`.
      reduction: as in `mse`.

    Returns:
      As in `mse`.

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
        # Before smoothing, which would change the label of a masked entry.
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
    """Computes the KL divergence `sum(t (log t - log p))` of each row in FP32.

    With `0 log 0 = 0`, a class whose target is 0 has loss 0 and gradient 0, even if its log
    prediction is -inf. There, `optax.kl_divergence` is NaN, and its gradient with respect to the
    targets is NaN at every 0, so it is not called here; elsewhere both agree. A class with
    prediction 0 and a positive target has loss inf.

    Near a log probability of -10, bfloat16 has steps of 0.06. If predictions and targets are
    computed from logits, apply `log_softmax` to the logits in FP32.

    Args:
      log_predictions: `[..., V]` (V at `axis`), log probabilities; floating, 16 bits or more.
      targets: `[..., V]`, probabilities, or log probabilities with `log_targets=True`; floating.
      log_targets: the targets are log probabilities.
      weights: weight of each row, `[...]`; floating, integer or bool.
      reduction: as in `mse`; "mean" is over rows ("batchmean" in torch).
      axis: axis of the classes.

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
        zero = jnp.zeros_like(targets)
        absent = targets == (-jnp.inf if log_targets else 0)
        # Mask both operands before the formula: masking only its result would leave 0 * inf in the
        # gradient.
        log_predictions = jnp.where(absent, zero, log_predictions)
        targets = jnp.where(absent, zero if log_targets else zero + 1, targets)
        logs = targets if log_targets else jnp.log(targets)
        chances = jnp.exp(targets) if log_targets else targets
        return jnp.sum(jnp.where(absent, zero, chances * (logs - log_predictions)), axis)

    shape = targets.shape[:axis] + targets.shape[axis + 1 :]
    factors = _factors(weights, None, shape, _widest(log_predictions, targets))
    return _reduce(_from_half(rows)(log_predictions, targets), factors, reduction)


def _from_half(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `fn` with operands cast to FP32; its backward pass saves the original operands."""

    def widened(*operands: jax.Array) -> jax.Array:
        wide = _widest(*operands)
        return fn(*(operand.astype(wide) for operand in operands))

    return jax.checkpoint(widened)


def _widest(*operands: jax.Array) -> Any:
    return FLOAT64 if any(operand.dtype == FLOAT64 for operand in operands) else FLOAT32


def _entry_factors(weights: Any, *operands: jax.Array) -> jax.Array | None:
    """Returns the factor of each entry; `weights` may be those of rows."""
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


def _factors(weights: Any, counted: jax.Array | None, rows: Any, wide: Any) -> jax.Array | None:
    """Returns the factor of each row, in `wide`; None if all are 1."""
    if weights is None:
        return None if counted is None else counted.astype(wide)
    weights = jnp.asarray(weights)
    if jnp.issubdtype(weights.dtype, jnp.complexfloating) or weights.shape != tuple(rows):
        raise JaxmpError(
            f"weights are {weights.dtype} of shape {_shape(weights)}; the losses have shape "
            f"{list(rows)}, and each has one real weight. For one number of all rows: "
            f"weights=jnp.full({tuple(rows)}, weight)."
        )
    weights = weights.astype(wide)
    return weights if counted is None else jnp.where(counted, weights, jnp.zeros_like(weights))


def _known(losses: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Replaces losses of invalid labels by NaN, through which no gradient passes."""
    if valid is None:
        return losses
    return jnp.where(valid, losses, jnp.full_like(losses, jnp.nan))


def _weighted(losses: jax.Array, factors: jax.Array) -> jax.Array:
    return _harmless(losses, factors) * factors


def _harmless(losses: jax.Array, factors: jax.Array) -> jax.Array:
    """Replaces non-finite losses of factor 0 by 0, because 0 * inf is NaN."""
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
        # Broadcasting [N] against [N, 1] would give N * N losses, a common bug in loss functions.
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
    """Checks the shapes of a linear layer and returns its number of classes."""
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
    labels: jax.Array, rows: Any, size: int, ignore_index: Any, name: str, shape: Any
) -> None:
    """Raises if the labels are not class indices of `rows`; checks their values if known."""
    if ignore_index is not None and (
        isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, np.integer))
    ):
        raise JaxmpError(f"ignore_index={ignore_index!r} is not an integer, such as -100.")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise JaxmpError(
            f"labels are {labels.dtype} of shape {_shape(labels)}; with {name} of shape "
            f"{list(shape)} they must be class indices, integers of shape {list(rows)}: "
            "labels.astype(jnp.int32)."
            + (" For probabilities: softmax_cross_entropy." if name == "hidden" else "")
        )
    if labels.shape != tuple(rows):
        raise JaxmpError(
            f"labels have shape {_shape(labels)}, and {name} of shape {list(shape)} has rows of "
            f"shape {list(rows)}. Give one class index a row: labels.reshape({tuple(rows)})."
        )
    if isinstance(labels, Tracer) or not labels.is_fully_addressable:
        return
    values = np.asarray(labels)
    wrong = (values < 0) | (values >= size)
    if ignore_index is not None:
        wrong &= values != ignore_index
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        label = values[index]
        raise JaxmpError(
            f"labels[{', '.join(map(str, index))}] is {label}, one of {int(wrong.sum())} that name "
            f"none of {size} classes. Allowed: 0 to {size - 1}. If {label} marks rows that do not "
            f"count: ignore_index={label}."
        )


def _read_indices(
    labels: jax.Array, size: int, ignore_index: int | None
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Returns the class indices, which rows count (None: all), and which labels are valid.

    Labels that are ignored or invalid become 0; ignored ones count as valid.
    """
    labels = labels.astype("int64" if labels.dtype.itemsize == 8 else "int32")
    valid = (labels >= 0) & (labels < size)
    counted = None
    if ignore_index is not None:
        counted = labels != ignore_index
        valid |= ~counted
    return jnp.where(valid if counted is None else valid & counted, labels, 0), counted, valid


def _vary_alike(*trees: Any, like: Any = None) -> tuple[Any, ...]:
    """Marks all arrays as varying over each `shard_map` axis over which one of them varies.
    The gradient of a replicated kernel is then summed over the mesh once, after all chunks.
    """
    axes = _compat.varying_axes((trees, like))
    return _compat.vary(trees, axes) if axes else trees
