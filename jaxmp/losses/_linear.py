"""Softmax cross entropy of a linear layer, computed in chunks without storing the logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jaxmp import _core
from jaxmp._core import DTypeLike, _compat
from jaxmp.errors import JaxmpError
from jaxmp.losses import _arguments
from jaxmp.losses._arguments import LossTerms, Reduction
from jaxmp.losses._softmax import forward, slope_of


def linear_cross_entropy(
    hidden: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    transposed: bool = False,
    num_classes: int | None = None,
    chunk: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
    precision: lax.PrecisionLike = None,
    logits_dtype: DTypeLike | None = None,
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
    docs/attention.md.

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
      num_classes: number of classes if the kernel has more, as a vocabulary that is padded to a
        multiple of 128 for the tiles of a Tensor Core: the classes from this one on have
        probability 0, and their gradients are 0. Unlike a bias of -inf, this reads no array.
      chunk: number of rows per chunk. None: the largest power of two whose logits take at most
        2.2 GB and a sixteenth of the memory of the chip, as the matmul writes them: 8,192 rows for
        the 50,304 classes of GPT-2 in FP32, 4,096 for the 128,256 of Llama 3, and twice as many in
        bfloat16. On a CPU, they take at most 134 MB in FP32. Each chunk reads and writes the FP32
        gradient of the kernel once, so that fewer chunks move fewer bytes.
      label_smoothing, z_loss, ignore_index, weights, reduction: as in `softmax_cross_entropy`.
      precision: precision of the three matmuls, as in `jax.lax.dot_general`.
      logits_dtype: dtype in which the logits of a chunk are stored between the passes that read
        them; losses, their sums and the logsumexp are FP32 in each case. None or float32: exact.
        float16: half the memory, and gradients nearly as exact as with float32; what is stored is
        the difference from the logit of the label, times 2**-8, so that magnitudes up to 1.6e7 are
        finite. bfloat16: half the memory with 8 bits of precision, as PyTorch trains under
        autocast. docs/attention.md has the errors and times of each.

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
    reduction = _arguments.check_reduction(reduction)
    hidden, kernel = _core.floating_array(hidden, "hidden"), _core.floating_array(kernel, "kernel")
    size = columns = _arguments.check_layer(hidden, kernel, transposed)
    bias = None if bias is None else _core.floating_array(bias, "bias")
    if bias is not None and bias.shape != (size,):
        raise JaxmpError(
            f"bias has shape {list(bias.shape)}, and the kernel {list(kernel.shape)} has {size} "
            f"classes. Pass one number for each class: bias.reshape({size})."
        )
    if num_classes is not None:
        size = _arguments.check_num_classes(num_classes, size)
    terms = _arguments.make_terms(label_smoothing, z_loss)
    stored = _check_logits_dtype(logits_dtype, hidden.dtype)
    labels = jnp.asarray(labels)
    rows = hidden.shape[:-1]
    read = _arguments.read_indices(labels, size, ignore_index, "hidden", hidden.shape)
    labels, counted, valid = read
    wide = _core.wide_dtype(hidden.dtype)
    factors = _arguments.row_factors(weights, counted, rows, wide)
    if precision is None:  # the backward pass is traced where the caller's setting has ended
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    per_row = reduction == "none"
    layer = _Layer(
        terms,
        size,
        chunk_rows(chunk, math.prod(rows), columns, _written(stored, hidden.dtype).itemsize),
        transposed,
        precision,
        stored,
        weighted=per_row or factors is not None,
    )
    compute = functools.partial(_each_loss if per_row else _total_loss, layer)
    compute = _automatic(compute, hidden, kernel, like=labels if per_row else None)
    weight = _arguments.total_weight(factors, rows, wide)
    if reduction == "mean" and factors is None and math.prod(rows):
        # With the factor 1 / N in each row, the gradients of the sum are those of the mean: the
        # backward pass does not read and write them again to divide them.
        factors, reduction = jnp.full(rows, 1 / math.prod(rows), wide), "sum"
    result = compute(_Arrays(hidden, kernel, bias, labels, valid), factors)
    return result if per_row else _arguments.reduce_sum(result, weight, reduction)


class _Layer(NamedTuple):
    """Static settings of the loss of a linear layer."""

    terms: LossTerms
    # The kernel may have more classes, which are padding.
    classes: int
    chunk: int
    transposed: bool
    precision: Any
    # Dtype of the logits between the passes that read them.
    stored: np.dtype
    # True if rows may have the factor 0 although their label is valid.
    weighted: bool


class _Arrays(NamedTuple):
    """Arrays of the loss of a linear layer: `[..., D]`, a kernel, `[V]`, `[...]`, `[...]`."""

    hidden: jax.Array
    kernel: jax.Array
    bias: jax.Array | None
    labels: jax.Array
    # True for labels that are class indices; None if all are known to be.
    valid: jax.Array | None


def _flat(arrays: _Arrays, factors: jax.Array | None) -> Any:
    """Flattens the rows of arrays and factors to one dimension, `[N]`."""
    rows = lambda array: None if array is None else array.reshape(-1)
    hidden = arrays.hidden.reshape(arrays.labels.size, arrays.hidden.shape[-1])
    flat = arrays._replace(hidden=hidden, labels=rows(arrays.labels), valid=rows(arrays.valid))
    return _arguments.vary_alike(flat, rows(factors))


def _each_loss(layer: _Layer, arrays: _Arrays, factors: jax.Array | None) -> jax.Array:
    """Returns the loss of each row times its factor, in the shape of the labels."""
    shape = arrays.labels.shape
    arrays, factors = _flat(arrays, factors)
    losses: Any = _layer_losses(layer, arrays)
    weighted = losses if factors is None else _arguments.apply_factors(losses, factors)
    return weighted.reshape(shape)


def _total_loss(layer: _Layer, arrays: _Arrays, factors: jax.Array | None) -> Any:
    """Returns the sum of the losses of all rows times their factors."""
    arrays, factors = _flat(arrays, factors)
    if factors is None:
        ones = jnp.ones(arrays.labels.shape, _core.wide_dtype(arrays.hidden.dtype))
        (factors,) = _arguments.vary_alike(ones, like=arrays)
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


def _scaled(gradients: _Arrays, arrays: _Arrays, factor: ArrayLike) -> _Arrays:
    """Returns FP32 gradients times `factor`, as cotangents in the dtypes of `arrays`."""

    def cast(slope: jax.Array | None, array: Any) -> Any:
        return None if slope is None else (slope * factor).astype(array.dtype)

    return _Arrays(*map(cast, gradients, arrays))


def _check_logits_dtype(dtype: DTypeLike | None, hidden: DTypeLike) -> np.dtype:
    """Returns the dtype of stored logits."""
    wide = _core.wide_dtype(hidden)
    if dtype is None:
        return wide
    allowed = (wide, *sorted(_core.FLOATS_16BIT, key=str))
    for known in allowed:
        if dtype in (known, known.name):
            return known
    raise JaxmpError(
        f"logits_dtype={dtype!r} is not a dtype of stored logits. With hidden states in "
        f"{np.dtype(hidden).name}, allowed are {', '.join(known.name for known in allowed)}, for "
        "example logits_dtype=jnp.float16."
    )


def _written(stored: np.dtype, hidden: DTypeLike) -> np.dtype:
    """Returns the dtype in which the matmul writes the logits; float16 is computed from FP32."""
    return stored if stored == hidden != np.float16 else _core.wide_dtype(hidden)


# Bytes of the logits of a chunk at most; on other chips also a sixteenth of their memory.
_LOGITS_BYTES, _LOGITS_BYTES_ON_CPU = 2.2e9, 2**27


def chunk_rows(chunk: int | None, rows: int, classes: int, itemsize: int = 4) -> int:
    """Returns the number of rows per chunk, with chunks of equal size to minimize padding.

    A symbolic number of rows, as in `jax.export`, is one chunk.

    Args:
      chunk: the number that the caller sets; None for the default.
      rows, classes: shape of all logits.
      itemsize: bytes of a logit.
    """
    if chunk is None:
        most = min(_LOGITS_BYTES, (_core.target_memory() or math.inf) / 16)
        if _compat.target() == "cpu":
            # XLA for CPU multiplies 16-bit operands in FP32, and stores the products in FP32.
            most, itemsize = _LOGITS_BYTES_ON_CPU, max(itemsize, 4)
        chunk = 1 << max(int(most // (itemsize * classes)).bit_length() - 1, 0)
    elif not _core.is_integer(chunk, 1):
        raise JaxmpError(
            f"chunk={chunk!r} is not a number of rows. Give an integer of 1 or more, for example "
            "chunk=512, or leave it out."
        )
    if not isinstance(rows, int):
        return rows
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
) -> tuple[jax.Array, _Arrays | None]:
    """Returns the loss of each row, `[N]`, and the gradients of the sum weighted with `factors`.

    Without `factors`, the gradients are None.
    """
    dtype, wide = arrays.hidden.dtype, _core.wide_dtype(arrays.hidden.dtype)
    # Cast once, before the loop.
    kernel = arrays.kernel.astype(dtype)
    bias = None if arrays.bias is None else arrays.bias.astype(wide)
    inner = 1 if layer.transposed else 0
    stretch: Any = None if factors is None else _stretch(factors, dtype)

    def multiply(
        lhs: jax.Array, rhs: jax.Array, left: int, right: int, out: DTypeLike = wide
    ) -> jax.Array:
        dimensions = (((left,), (right,)), ((), ()))
        product = functools.partial(
            lax.dot_general, dimension_numbers=dimensions, precision=layer.precision
        )
        if left == 0 and lhs.dtype != out and _compat.target() == "cpu":
            # Under `vmap`, XLA's CPU compiler has no kernel for 16-bit operands.
            return _core.widened_product(product, lhs, rhs)
        return product(lhs, rhs, preferred_element_type=out)

    def logits_of(hidden: jax.Array, labels: jax.Array) -> jax.Array:
        written = _written(layer.stored, dtype)
        logits = multiply(hidden, kernel, 1, inner, written).astype(wide)
        if layer.stored == written:
            return logits
        factor, shift = np.ones((), wide), 0.0
        if layer.stored == np.float16:
            # Differences from the logit of the label: the probabilities that matter are precise.
            # A power of two is exact, and the smallest steps of float16 remain far below 1.
            factor = np.array(2.0**-8, wide)
            columns = jnp.moveaxis(jnp.take(kernel, labels[:, 0], axis=1 - inner), 1 - inner, 0)
            products = hidden.astype(wide) * columns.astype(wide)
            shift = jnp.sum(products, axis=1, keepdims=True)
        # Without a barrier, XLA may omit the rounding, and store FP32.
        stored = lax.optimization_barrier(((logits - shift) * factor).astype(layer.stored))
        return stored.astype(wide) / factor + shift

    def one_chunk(sums: Any, chunk: tuple[jax.Array, ...]) -> Any:
        hidden, labels, factors = chunk
        logits = logits_of(hidden, labels)
        if bias is not None:
            logits += bias[None]
        if logits.shape[1] > layer.classes:
            is_class = lax.broadcasted_iota(np.int32, logits.shape, 1) < layer.classes
            logits = jnp.where(is_class, logits, jnp.full_like(logits, -jnp.inf))
        losses, rows = forward(layer.terms, logits, labels, small=True)
        if factors is None:
            return sums, (losses, None)
        slope = slope_of(layer.terms, rows, logits, labels, factors)
        rounded = (slope * stretch).astype(dtype)
        d_hidden = multiply(rounded, kernel, 1, 1 - inner) / stretch
        if layer.weighted:
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
        (sums,) = _arguments.vary_alike(sums, like=(arrays, factors))
    labels = arrays.labels[:, None]
    split = jax.tree.map(lambda array: _split(array, layer.chunk), (arrays.hidden, labels, factors))
    sums, (losses, d_hidden) = lax.scan(one_chunk, sums, split)
    losses = _arguments.mark_invalid(_join(losses, arrays.hidden.shape[0]), arrays.valid)
    if sums is None:
        return losses, None
    d_hidden = _join(d_hidden, arrays.hidden.shape[0])
    none: Any = None  # of labels, and of the rows that count
    return losses, _Arrays(d_hidden, sums[0] / stretch, sums[1], none, none)


def _stretch(factors: jax.Array, dtype: DTypeLike) -> Any:
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
    unity = jnp.ones((), wide)
    return lax.stop_gradient(jnp.where(usable, jnp.ldexp(unity, exponent), unity))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_total(layer: _Layer, arrays: _Arrays, factors: jax.Array) -> jax.Array:
    """Computes `sum(factors * losses)`; the forward pass also computes its gradients."""
    return _arguments.weighted_sum(_over_chunks(layer, arrays, None)[0], factors)


def _layer_total_fwd(layer: _Layer, arrays: _Arrays, factors: jax.Array) -> Any:
    known = factors if arrays.valid is None else jnp.where(arrays.valid, factors, 0)
    losses, gradients = _over_chunks(layer, arrays, known)
    total = _arguments.weighted_sum(losses, factors)
    return total, (arrays, _arguments.zero_unweighted(losses, factors), gradients)


def _layer_total_bwd(layer: _Layer, saved: tuple[Any, ...], cotangent: jax.Array) -> Any:
    arrays, losses, gradients = saved
    return _scaled(gradients, arrays, cotangent), losses * cotangent


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
    return (_scaled(gradients, arrays, 1),)


_layer_losses.defvjp(_layer_losses_fwd, _layer_losses_bwd)
