"""Softmax cross entropy of logits."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxmp import _core
from jaxmp._core import _compat
from jaxmp.errors import JaxmpError
from jaxmp.losses import _arguments
from jaxmp.losses._arguments import LossTerms, Reduction


def softmax_cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    weights: ArrayLike | None = None,
    reduction: Reduction = "mean",
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
      logits: `[..., V]`, floating, 16 bits or more.
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
    logits = _core.floating_array(logits, "logits")
    reduction = _arguments.check_reduction(reduction)
    terms = _arguments.make_terms(label_smoothing, z_loss)
    if not logits.ndim or not logits.shape[-1]:
        raise JaxmpError(f"logits have shape {list(logits.shape)}: the last axis has no classes.")
    *rows, size = logits.shape
    wide = _core.wide_dtype(logits.dtype)
    labels = jnp.asarray(labels)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        if ignore_index is not None:
            raise JaxmpError(
                f"ignore_index={ignore_index} needs class indices, and the labels are "
                f"probabilities ({labels.dtype}). Pass weights instead: weights=rows_that_count."
            )
        labels = _core.floating_array(labels, "labels")
        if labels.shape != logits.shape:
            # Broadcasting [N] against [N, 1] would give N * N losses, a common bug.
            raise JaxmpError(
                f"logits has shape {list(logits.shape)}, but the array that it is compared with "
                f"has shape {list(labels.shape)} ({labels.dtype}). The shapes must be equal: "
                "reshape one, or use jnp.broadcast_to."
            )
        counted, valid = None, None
    else:
        read = _arguments.read_indices(labels, size, ignore_index, "logits", logits.shape)
        labels, counted, valid = read
        labels = jnp.expand_dims(labels, -1)
    factors = _arguments.row_factors(weights, counted, rows, wide)
    logits, labels, factors, valid = _arguments.vary_alike(logits, labels, factors, valid)
    losses = _arguments.mark_invalid(_row_losses(terms, logits, labels), valid)
    return _arguments.reduce_losses(losses, factors, reduction)


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
    # Target probability of the class index: 1, or 0 if that class is masked. None if the sums were
    # not computed in one pass.
    label: jax.Array | None

    @property
    def logsumexp(self) -> jax.Array:
        return self.top + self.log_sum


def _masked(logits: jax.Array) -> jax.Array:
    return logits == -jnp.inf


def _hits(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns the labels as probabilities in FP32, for XLA to fuse with their use."""
    wide = _core.wide_dtype(logits.dtype)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        return labels.astype(wide)
    # Compare instead of gathering: if V is sharded over devices, this needs no communication.
    sharding = jax.typeof(logits).sharding
    explicit = sharding if any(sharding.spec) else None
    classes = lax.broadcasted_iota(
        labels.dtype, logits.shape, logits.ndim - 1, out_sharding=explicit
    )
    return (classes == labels).astype(wide)


def forward(
    terms: LossTerms, logits: jax.Array, labels: jax.Array, *, small: bool
) -> tuple[jax.Array, _Rows]:
    """Computes the loss of each row, without the class axis, and statistics for its gradient.

    `small` means that FP32 copies of the logits are acceptable. XLA for CPU then sums the
    exponentials in a library call, which is faster and requires such a copy.
    """
    wide = _core.wide_dtype(logits.dtype)
    raised, hits = logits.astype(wide), _hits(labels, logits)
    zero, label = jnp.zeros_like(raised), None
    soft = jnp.issubdtype(labels.dtype, jnp.floating)
    if _compat.target() == "gpu" and not soft and not terms.label_smoothing:
        top, *totals = _sums_in_one_pass(raised, labels)
        sums: dict[str, jax.Array] = dict(zip(("exp", "hit"), totals, strict=True))
        label = jnp.where(_masked(sums["hit"]), jnp.zeros_like(top), jnp.ones_like(top))
    else:
        # The maximum is exact in the dtype of the logits. The loss does not depend on `top`, so
        # its gradient can be stopped.
        top = lax.stop_gradient(jnp.max(logits, -1, keepdims=True)).astype(wide)
        top = jnp.where(_masked(top), jnp.zeros_like(top), top)
        shifted = raised - top
        # 0 log 0 = 0. With class indices, the sum contains a single logit, which is shifted below.
        parts = {"hit": jnp.where(hits == 0, zero, hits * (shifted if soft else raised))}
        if soft or small:
            parts["mass"] = hits
        if terms.label_smoothing:
            parts["even"] = jnp.where(_masked(logits), zero, shifted)
            parts["live"] = (~_masked(logits)).astype(wide)
        powers = jnp.exp(shifted)
        if small:
            sums = {**_sums(parts), "exp": jnp.sum(powers, -1, keepdims=True)}
        else:
            sums = _sums({**parts, "exp": powers})
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
    rows = _Rows(top, log_sum, mass, share, label)
    if terms.z_loss:
        losses += terms.z_loss * jnp.square(rows.logsumexp)
    return jnp.squeeze(losses, -1), rows


@jax.custom_jvp
def _sums(parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sums two or more arrays along their last axis, kept with size 1, in one pass.

    XLA for CPU fuses a reduction of several operands with the operations that compute them. It
    replaces a reduction of one operand by a library call, which reads the operand in FP32 from
    memory.
    """
    arrays = list(parts.values())
    zero = np.zeros((), arrays[0].dtype)
    add = lambda left, right: [a + b for a, b in zip(left, right, strict=True)]
    sums = lax.reduce(arrays, [zero] * len(arrays), add, (arrays[0].ndim - 1,))
    return {key: jnp.expand_dims(total, -1) for key, total in zip(parts, sums, strict=True)}


@_sums.defjvp
def _sums_jvp(parts: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    add = lambda tangent: jnp.sum(tangent, -1, keepdims=True)
    return _sums(*parts), jax.tree.map(add, tangents[0])


# Adjacent classes whose exponentials are added before a thread joins them with the others: 16 bytes
# in FP32. They are on one device if a class axis in multiples of 128 is sharded.
_GROUP, _ALIGNED = 4, 128


@jax.custom_jvp
def _sums_in_one_pass(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the largest logit of each row, `sum(exp(logits - largest))`, and that of its label.

    Two partial sums of exponentials are joined by multiplying the one with the smaller maximum by
    `exp(smaller - larger)` (Milakov and Gimelshein 2018, arXiv:1805.02867), so that a GPU reads the
    logits once. The largest logit is 0 if all are -inf.
    """
    size, axis, dtype = logits.shape[-1], logits.ndim - 1, logits.dtype
    is_explicit = any(jax.typeof(logits).sharding.spec)
    group = 1 if is_explicit or size % _ALIGNED else _GROUP
    take = functools.partial(lax.slice_in_dim, logits, limit_index=size, stride=group, axis=axis)
    parts = [take(start) for start in range(group)]
    # A finite start: the difference of two maxima is then never inf - inf.
    least, zero = np.array(np.finfo(dtype).min, dtype), np.zeros((), dtype)

    def join(left: Any, right: Any) -> Any:
        (top, exp), (other, its_exp) = left, right
        factor, is_less = jnp.exp(-jnp.abs(top - other)), top < other
        exp = jnp.where(is_less, exp * factor + its_exp, exp + its_exp * factor)
        return jnp.maximum(top, other), exp

    pairs = [(jnp.maximum(part, least), jnp.ones_like(part)) for part in parts]
    while len(pairs) > 1:
        pairs = [join(*two) for two in zip(pairs[::2], pairs[1::2], strict=True)]
    hit = parts[0]
    for index in range(1, group):
        hit = jnp.where(labels % group == index, parts[index], hit)
    hit = jnp.where(_hits(labels // group, hit) == 0, jnp.zeros_like(hit), hit)
    join_all = lambda left, right: (*join(left[:2], right[:2]), left[2] + right[2])
    top, exp, hit = lax.reduce((*pairs[0], hit), (least, zero, zero), join_all, (axis,))
    # A row whose logits are all `least`, and not -inf, has a finite loss: only its label differs.
    all_masked = (top == least) & _masked(hit)
    exp, top = (jnp.where(all_masked, jnp.zeros_like(total), total) for total in (exp, top))
    return tuple(jnp.expand_dims(total, -1) for total in (top, exp, hit))


@_sums_in_one_pass.defjvp
def _sums_in_one_pass_jvp(arrays: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    sums, (logits, labels) = _sums_in_one_pass(*arrays), arrays
    # The loss does not depend on the largest logit, so its tangent can be 0.
    slope = jnp.sum(jnp.exp(logits - sums[0]) * tangents[0], -1, keepdims=True)
    hit = jnp.sum(_hits(labels, logits) * tangents[0], -1, keepdims=True)
    return sums, (jnp.zeros_like(sums[0]), slope, hit)


def slope_of(
    terms: LossTerms, rows: _Rows, logits: jax.Array, labels: jax.Array, factors: jax.Array
) -> jax.Array:
    """Returns the FP32 gradient of the logits, each row times its factor; the caller rounds it."""
    targets, factors = _hits(labels, logits), jnp.expand_dims(factors, -1)
    shifted, weight = logits.astype(targets.dtype) - rows.top, rows.mass
    if terms.z_loss:
        weight += 2 * terms.z_loss * rows.logsumexp
    if rows.label is not None:
        # All that is the same for the classes of a row is multiplied first. A masked class has the
        # exponential 0. In two passes, XLA would store these exponentials for both.
        chance = jnp.exp(-rows.log_sum) * weight * factors
        chance = jnp.where(rows.log_sum == -jnp.inf, jnp.zeros_like(chance), chance)
        slope = jnp.exp(shifted) * chance
        slope = jnp.where(targets == 0, slope, slope - rows.label * factors)
        return jnp.where(factors == 0, jnp.zeros_like(slope), slope)
    if rows.share is not None:
        targets = targets * (1 - terms.label_smoothing) + rows.share
    slope = (jnp.exp(shifted - rows.log_sum) * weight - targets) * factors
    return jnp.where(_masked(logits) | (factors == 0), jnp.zeros_like(slope), slope)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_losses(terms: LossTerms, logits: jax.Array, labels: jax.Array) -> jax.Array:
    return forward(terms, logits, labels, small=False)[0]


def _row_losses_fwd(terms: LossTerms, logits: jax.Array, labels: jax.Array) -> Any:
    losses, rows = forward(terms, logits, labels, small=False)
    return losses, (rows, logits, labels)


def _row_losses_bwd(terms: LossTerms, saved: tuple[Any, ...], cotangent: jax.Array) -> Any:
    rows, logits, labels = saved
    slope = slope_of(terms, rows, logits, labels, cotangent).astype(logits.dtype)
    if not jnp.issubdtype(labels.dtype, jnp.floating):
        return slope, None
    surprise = rows.log_sum - (logits.astype(rows.top.dtype) - rows.top)
    surprise *= (1 - terms.label_smoothing) * jnp.expand_dims(cotangent, -1)
    # The derivative with respect to the label of a masked class is infinite. It is set to 0,
    # because the class cannot receive probability.
    surprise = jnp.where(_masked(logits), jnp.zeros_like(surprise), surprise)
    return slope, surprise.astype(labels.dtype)


_row_losses.defvjp(_row_losses_fwd, _row_losses_bwd)
