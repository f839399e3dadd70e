"""FP32 losses of 16-bit operands, against FP64 and in compiled programs."""

import functools
import json
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
import loss_errors
import loss_memory
from arrays import f64, floats, half_ulp
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, fast_cases
from jaxmp import JaxmpError, losses
from jaxmp._core import _compat
from jaxmp._core._targets import get_target
from jaxmp._tools.audit._hlo import Program
from processes import run_python
from programs import products, relative_error, trace
from sources import results_of, text_of

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
HALVES = DTYPES[1:]
F32_EPS = 2.0**-24  # half a unit in the last place, relative


# ---------------------------------------------------------------------------
# FP64 reference
# ---------------------------------------------------------------------------


def oracle(logits, labels, label_smoothing=0.0, z_loss=0.0):
    """Returns losses `[...]`, gradients of the logits `[..., V]` and logsumexp, in FP64."""
    logits = f64(logits)
    masked = logits == -np.inf
    top = np.where(masked, -1e300, logits).max(-1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    labels = np.asarray(labels)
    soft = labels.ndim == logits.ndim
    q = f64(labels) if soft else (np.arange(logits.shape[-1]) == labels[..., None]) * 1.0
    if label_smoothing:
        even = ~masked / np.maximum((~masked).sum(-1, keepdims=True), 1)
        q = (1 - label_smoothing) * q + label_smoothing * even
    with np.errstate(invalid="ignore"):
        loss = -np.where(q == 0, 0, q * (logits - lse)).sum(-1) + z_loss * lse[..., 0] ** 2
    slope = np.exp(logits - lse) * (q.sum(-1, keepdims=True) + 2 * z_loss * lse) - q
    return loss, np.where(masked, 0, slope), lse


close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


# Compiled: of operations that run one by one, each would be compiled by itself.
compiled = functools.partial(
    jax.jit, static_argnames=("label_smoothing", "z_loss", "ignore_index", "reduction")
)
softmax = compiled(losses.softmax_cross_entropy)


# ---------------------------------------------------------------------------
# softmax_cross_entropy
# ---------------------------------------------------------------------------


@st.composite
def cases(draw):
    rows, classes = 5, 64
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.sampled_from([0.1, 3.0, 200.0, 60000.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = np.clip(rng.normal(size=(rows, classes)) * size, -65504, 65504)
    logits[:, 1:][rng.random((rows, classes - 1)) < draw(st.sampled_from([0.0, 0.3]))] = -np.inf
    labels = np.array([rng.choice(np.flatnonzero(row > -np.inf)) for row in logits], np.int32)
    kind = draw(st.sampled_from(["indices", "float32", jnp.bfloat16]))
    if kind != "indices":
        labels = (rng.dirichlet(np.ones(classes), rows) * (logits > -np.inf)).astype(kind)
    smoothing, z_loss = draw(st.sampled_from([(0.0, 0.0), (0.1, 1e-4), (1.0, 0.0)]))
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    weights = draw(
        st.sampled_from(
            [np.ones(rows), rng.gamma(1.0, size=rows), rng.random(rows) < 0.5, np.zeros(rows)]
        )
    )
    return jnp.asarray(logits, dtype), labels, options, weights.astype(np.float32)


@functools.partial(jax.jit, static_argnames=("label_smoothing", "z_loss"))
def with_slope(logits, labels, weights, **options):
    loss_fn = lambda logits: losses.softmax_cross_entropy(
        logits, labels, weights=weights, **options
    )
    return jax.value_and_grad(loss_fn)(logits)


@hypothesis.given(cases())
@hypothesis.settings(max_examples=20)
def test_losses_and_gradients_are_those_of_fp64(case):
    logits, labels, options, weights = case
    losses_64, slopes, lse = oracle(logits, labels, **options)
    factors = f64(weights)
    total = factors.sum() or 1.0

    loss, slope = with_slope(logits, labels, weights, **options)
    assert loss.dtype == jnp.float32 and slope.dtype == logits.dtype

    spread = np.abs(np.where(np.isfinite(f64(logits)), f64(logits), 0)).max()
    squares = options["z_loss"] * np.square(lse).max()
    # A handful of FP32 roundings of the largest terms, and of a sum of V.
    allowed = F32_EPS * (4 * logits.shape[1] + 8 * spread + 8 * squares)
    np.testing.assert_allclose(
        loss, (factors * losses_64).sum() / total, rtol=4 * F32_EPS, atol=allowed
    )
    exact = slopes * (factors / total)[:, None]
    relative, absolute = half_ulp(logits.dtype)
    # One rounding to the logits' dtype, on top of FP32 rounding of p (at most 1, or 1 + 2 z lse).
    steep = 1 + 2 * options["z_loss"] * np.abs(lse).max()
    in_fp32 = 32 * F32_EPS * steep * (factors / total).max()
    error = np.abs(f64(slope) - exact)
    assert (error <= 1.01 * relative * np.abs(exact) + absolute + in_fp32).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_probabilities_of_logits_next_to_the_largest_float16(dtype):
    logits = jnp.array([[65504.0, 65472.0, 65504.0, -65504.0, -jnp.inf]]).astype(dtype)
    exact, slopes, _ = oracle(logits, np.array([1]))
    loss_fn = lambda logits: losses.softmax_cross_entropy(logits, jnp.array([1]))
    loss, slope = jax.jit(jax.value_and_grad(loss_fn))(logits)
    # Next to 65504 FP32 has steps of 0.004; a loss made of logsumexp would be that far off.
    np.testing.assert_allclose(loss, exact[0], rtol=4 * F32_EPS, atol=4 * F32_EPS)
    np.testing.assert_allclose(f64(slope), slopes, rtol=half_ulp(dtype)[0] * 1.01, atol=1e-7)


@pytest.mark.parametrize(
    ("soft", "options"),
    [
        (False, {}),
        (False, {"label_smoothing": 0.1, "z_loss": 1e-3}),
        (True, {"label_smoothing": 0.1, "z_loss": 1e-3}),
    ],
)
def test_masked_classes_never_make_nan_in_a_gradient(soft, options):
    inf = jnp.inf
    # A normal row, a masked label, only masked classes.
    logits = jnp.array([[1.0, -inf, 2.0], [-inf, 1.0, 2.0], [-inf, -inf, -inf]], jnp.float16)
    labels = jnp.array([0, 0, 0])
    if soft:
        labels = jax.nn.one_hot(labels, 3, dtype=jnp.float16)
    loss_fn = functools.partial(softmax, reduction="none", **options)
    found, pull = jax.vjp(lambda logits: loss_fn(logits, labels), logits)
    (slope,) = pull(jnp.ones(3))
    assert np.isfinite(found[0]) and found[1] == inf and found[2] == inf
    assert np.isfinite(slope).all()
    assert (slope[logits == -inf] == 0).all()
    exact = oracle(logits[:1], labels[:1], **options)
    np.testing.assert_allclose(found[:1], exact[0], rtol=1e-6)
    np.testing.assert_allclose(f64(slope[:1]), exact[1], rtol=1e-3)
    if soft:  # the labels' gradient, as in distillation
        (by_labels,) = jax.vjp(lambda labels: loss_fn(logits, labels), labels)[1](jnp.ones(3))
        assert np.isfinite(by_labels).all()


def test_gradient_by_soft_labels():
    logits = jnp.array([[3.0, -1.0, 0.5]])
    labels = jnp.array([[0.2, 0.5, 0.3]])
    loss_fn = lambda labels: softmax(logits, labels, label_smoothing=0.25)
    by_hand = -0.75 * jax.nn.log_softmax(logits)
    np.testing.assert_allclose(jax.jit(jax.grad(loss_fn))(labels), by_hand, rtol=1e-6)


def test_an_infinite_or_nan_logit_is_not_hidden():
    run = jax.jit(jax.value_and_grad(softmax))
    for bad in (jnp.inf, jnp.nan):
        loss, slope = run(jnp.array([[1.0, bad, 0.0]]), jnp.array([0]))
        assert np.isnan(loss) and np.isnan(slope).any()


# ---------------------------------------------------------------------------
# Ignored rows
# ---------------------------------------------------------------------------


@compiled
def by_logits(hidden, kernel, labels, **options):
    logits = jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32).astype(hidden.dtype)
    return losses.softmax_cross_entropy(logits, labels, **options)


@compiled
def by_chunks(hidden, kernel, labels, **options):
    return losses.linear_cross_entropy(hidden, kernel, labels, chunk=2, **options)


both = pytest.mark.parametrize("loss_fn", [by_logits, by_chunks])


def layer(dtype=jnp.float32, rows=5, features=8, classes=11):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(rows, features)), dtype)
    kernel = jnp.asarray(rng.normal(size=(features, classes)), jnp.float32)
    return hidden, kernel.astype(dtype), jnp.asarray(rng.integers(0, classes, rows))


@both
@pytest.mark.parametrize("how", ["ignore_index", "weights"])
@fast_cases("weights-by_logits")
def test_rows_that_do_not_count_may_hold_anything(loss_fn, how):
    hidden, kernel, labels = layer()
    bad = hidden.at[1].set(jnp.nan).at[3].set(jnp.inf)
    skip = jnp.array([False, True, False, True, False])
    options = {"weights": ~skip}
    given = labels
    if how == "ignore_index":
        options, given = {"ignore_index": -100}, jnp.where(skip, -100, labels)
    run = jax.jit(jax.value_and_grad(functools.partial(loss_fn, **options), (0, 1)))
    loss, slopes = run(bad, kernel, given)
    exact = layer_oracle(hidden, kernel, labels, weights=~skip)
    np.testing.assert_allclose(loss, exact[0], rtol=1e-6)
    if loss_fn is by_chunks:  # elsewhere the kernel meets the rows in the user's own product
        np.testing.assert_allclose(slopes[1], exact[2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slopes[0], exact[1], rtol=1e-5, atol=1e-6)
    assert (slopes[0][skip] == 0).all()
    if how == "ignore_index":
        each = loss_fn(bad, kernel, given, reduction="none", **options)
        assert (each[skip] == 0).all() and (each[~skip] > 0).all()


@both
def test_a_batch_of_padding_costs_nothing(loss_fn):
    hidden, kernel, labels = layer(jnp.float16)
    given = jnp.full_like(labels, 7)
    run = jax.jit(jax.value_and_grad(functools.partial(loss_fn, ignore_index=7), (0, 1)))
    loss, slopes = run(hidden, kernel, given)
    assert loss == 0 and all((slope == 0).all() for slope in slopes)
    assert loss_fn(hidden, kernel, labels, weights=jnp.zeros(5)) == 0
    empty = loss_fn(hidden[:0], kernel, labels[:0])
    assert empty == 0


@both
def test_reductions(loss_fn):
    hidden, kernel, labels = layer()
    weights = jnp.array([0.5, 2.0, 0.0, 1.0, 1.5])
    run = lambda reduction, **more: loss_fn(hidden, kernel, labels, reduction=reduction, **more)
    each = oracle(f64(hidden) @ f64(kernel), labels)[0]
    np.testing.assert_allclose(run("sum"), each.sum(), rtol=1e-6)
    np.testing.assert_allclose(run("none", weights=weights), each * f64(weights), rtol=2e-6)
    total, weight = run("sum_and_weight", weights=weights)
    assert weight == 5.0
    np.testing.assert_allclose(total, (each * f64(weights)).sum(), rtol=1e-6)
    np.testing.assert_allclose(run("mean", weights=weights), total / 5.0, rtol=1e-6)
    weight = run("sum_and_weight", ignore_index=int(labels[0]))[1]
    assert int(weight) == int((labels != labels[0]).sum())
    slope = jax.jit(jax.grad(lambda weights: run("mean", weights=weights)))(weights)
    np.testing.assert_allclose(slope, (each - total / 5.0) / 5.0, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------
# Class indices
# ---------------------------------------------------------------------------


@both
@pytest.mark.parametrize("wrong", [-1, 11, 2**31 - 1])
def test_a_class_index_out_of_range(loss_fn, wrong):
    hidden, kernel, labels = layer()
    labels = labels.at[2].set(wrong)
    with pytest.raises(JaxmpError, match=rf"labels\[2\] is {wrong}, .* 0 to 10.*ignore_index="):
        loss_fn.__wrapped__(hidden, kernel, labels)
    # If its value is not known, the loss is NaN.
    each = loss_fn(hidden, kernel, labels, reduction="none")
    assert np.flatnonzero(np.isnan(each)).tolist() == [2]
    loss, slope = jax.jit(jax.value_and_grad(loss_fn))(hidden, kernel, labels)
    assert np.isnan(loss)
    assert (slope[2] == 0).all() and np.isfinite(slope).all() and (slope[0] != 0).any()
    # And jaxmp's gradients of it are NaN: the step is skipped.
    assert np.isnan(jax.jit(jaxmp.grad(loss_fn))(hidden, kernel, labels)).any()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32"])
def test_labels_of_any_integer_dtype(dtype):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 300)), jnp.float32)
    labels = np.array([3, 120], dtype)  # beside 300 classes, which 8 bits cannot count
    np.testing.assert_allclose(softmax(logits, labels), oracle(logits, labels)[0].mean(), rtol=1e-6)


@pytest.mark.parametrize("ignored", [-100, -1, 0, 5, 10**6])
def test_an_ignored_index_may_be_any_integer(ignored):
    hidden, kernel, labels = layer()
    labels = labels.at[1].set(ignored)
    each = by_logits(hidden, kernel, labels, ignore_index=ignored, reduction="none")
    assert ((each == 0) == (labels == ignored)).all()


# ---------------------------------------------------------------------------
# Transformations
# ---------------------------------------------------------------------------


@EXPENSIVE
@both
def test_transformations(loss_fn):
    loss_fn = functools.partial(loss_fn.__wrapped__, label_smoothing=0.1, z_loss=1e-2)
    hidden, kernel, labels = layer(rows=6)
    run = jax.value_and_grad(loss_fn, (0, 1))
    plain = jax.jit(run)(hidden, kernel, labels)
    again = jax.jit(jax.value_and_grad(jax.checkpoint(loss_fn), (0, 1)))(hidden, kernel, labels)
    jax.tree.map(close, again, plain)

    parts = (hidden.reshape(3, 2, -1), labels.reshape(3, 2))
    one = lambda part: run(part[0], kernel, part[1])
    mapped = jax.jit(jax.vmap(one))(parts)
    jax.tree.map(close, mapped, jax.lax.scan(lambda carry, part: (carry, one(part)), 0, parts)[1])
    close(mapped[0].mean(), plain[0])
    close(mapped[1][1].mean(0), plain[1][1])


@both
def test_symbolic_rows(loss_fn):
    run = jax.jit(jax.grad(loss_fn, (0, 1)))
    hidden, kernel, labels = layer(rows=6)
    (rows,) = jax.export.symbolic_shape("rows")
    symbolic = lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
    exported = jax.export.export(run)(symbolic(hidden), kernel, symbolic(labels))
    jax.tree.map(close, exported.call(hidden, kernel, labels), run(hidden, kernel, labels))


def test_several_labels_of_the_same_states_in_16_bits_without_jit():
    """XLA's CPU compiler has no kernel for such a gradient of the kernel."""
    states, kernel = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 16), jnp.bfloat16)
    loss = lambda kernel, labels: losses.linear_cross_entropy(states, kernel, labels)
    grads = jax.vmap(jax.grad(loss), (None, 0))(kernel, jnp.array([[0] * 4, [1] * 4]))
    np.testing.assert_array_equal(grads[0, :, 0], grads[1, :, 1])


@EXPENSIVE
def test_forward_over_reverse_is_the_second_derivative():
    options = {"label_smoothing": 0.1, "z_loss": 1e-2}
    hidden, kernel, labels = layer(rows=3, classes=5)
    logits = hidden @ kernel

    def by_hand(logits):
        logp = jax.nn.log_softmax(logits)
        q = optax.smooth_labels(jax.nn.one_hot(labels, 5), options["label_smoothing"])
        z = jax.nn.logsumexp(logits, -1)
        return (-(q * logp).sum(-1) + options["z_loss"] * z**2).mean()

    found = jax.jit(jax.hessian(lambda x: softmax(x, labels, **options)))(logits)
    np.testing.assert_allclose(found, jax.jit(jax.hessian(by_hand))(logits), rtol=1e-4, atol=1e-6)
    direction = jnp.ones_like(kernel)
    product = lambda fn: jax.jit(lambda: jax.jvp(jax.grad(fn), (kernel,), (direction,))[1])()
    np.testing.assert_allclose(
        product(lambda kernel: by_chunks(hidden, kernel, labels, **options)),
        product(lambda kernel: by_hand(hidden @ kernel)),
        rtol=1e-4,
        atol=1e-5,
    )


def test_in_autocast():
    logits, labels = floats(3, 9).astype(jnp.bfloat16), jnp.array([0, 4, 8])
    cast = jax.jit(jaxmp.autocast(losses.softmax_cross_entropy, "bf16"))
    found = cast(logits.astype(jnp.float32), labels)
    np.testing.assert_allclose(found, softmax(logits, labels), rtol=1e-6)


@pytest.mark.slow
def test_in_float64():
    code = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
from jaxmp import losses
x = np.random.default_rng(0).normal(size=(3, 9)); y = np.array([0, 4, 8])
exact = (np.log(np.exp(x).sum(1)) - x[range(3), y]).mean()
for loss in (losses.softmax_cross_entropy(x, y), losses.linear_cross_entropy(x, np.eye(9), y)):
    assert loss.dtype == np.float64 and abs(loss - exact) < 1e-15 * 8, (loss, exact)
assert losses.softmax_cross_entropy(jnp.asarray(x, jnp.bfloat16), y).dtype == np.float32
"""
    run_python(code)


# ---------------------------------------------------------------------------
# linear_cross_entropy
# ---------------------------------------------------------------------------


def layer_oracle(hidden, kernel, labels, bias=0.0, weights=None, **options):
    """Returns the loss and the gradients of hidden, kernel `[D, V]` and bias, in FP64."""
    hidden, kernel = f64(hidden), f64(kernel)
    each, slopes, _ = oracle(hidden @ kernel + f64(bias), labels, **options)
    factors = np.ones(len(each)) if weights is None else f64(weights)
    slopes = slopes * (factors / factors.sum())[:, None]
    loss = (each * factors).sum() / factors.sum()
    return loss, slopes @ kernel.T, hidden.T @ slopes, slopes.sum(0)


@pytest.mark.parametrize(
    ("rows", "chunk", "transposed", "reduction", "weighted", "options"),
    [
        (12, None, False, "mean", False, {}),
        (12, 3, True, "mean", True, {"label_smoothing": 0.1}),
        (7, 3, False, "sum", True, {"z_loss": 1e-3}),
        (7, 5, True, "none", True, {"z_loss": 1e-3, "label_smoothing": 0.1}),
        (7, 1, False, "none", False, {}),
        (1, 100, True, "sum_and_weight", True, {}),
    ],
)
def test_a_layer_in_fp32_is_that_of_fp64(rows, chunk, transposed, reduction, weighted, options):
    hidden, kernel, labels = layer(rows=rows)
    bias = jnp.linspace(-1.0, 1.0, kernel.shape[1])
    weights = jnp.linspace(0.5, 1.5, rows) if weighted else None
    scale = 1.0 if reduction == "mean" else float(rows if weights is None else weights.sum())

    def loss_fn(hidden, kernel, bias):
        given = kernel.T if transposed else kernel
        found = losses.linear_cross_entropy(
            hidden.reshape(1, rows, -1),
            given,
            labels.reshape(1, rows),
            bias=bias,
            transposed=transposed,
            chunk=chunk,
            weights=None if weights is None else weights.reshape(1, rows),
            reduction=reduction,
            precision="highest",
            **options,
        )
        found = found[0] if reduction == "sum_and_weight" else found
        return found.sum() / scale

    loss, slopes = jax.jit(jax.value_and_grad(loss_fn, (0, 1, 2)))(hidden, kernel, bias)
    exact = layer_oracle(hidden, kernel, labels, bias, weights, **options)
    # FP32 rounding of sums over at most 12 rows and 11 classes.
    for found, wanted in zip((loss, *slopes), exact, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [(jnp.bfloat16, "mean"), (jnp.float16, "mean"), (jnp.float16, "none")],
)
@fast_cases("bfloat16-mean", "float16-none")
def test_a_half_layer_is_as_near_to_fp64_as_the_plain_one(dtype, reduction):
    hidden, kernel, labels = layer(dtype, rows=96, features=64, classes=500)
    exact = layer_oracle(hidden, kernel, labels)

    def plain(hidden, kernel):
        logits = (hidden @ kernel).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    options = {"chunk": 40, "reduction": reduction}
    chunked = lambda *args: losses.linear_cross_entropy(*args, labels, **options).mean()
    run = lambda fn: jax.jit(jax.value_and_grad(fn, (0, 1)))(hidden, kernel)
    (ours, our_slopes), (theirs, their_slopes) = run(chunked), run(plain)
    assert abs(ours - exact[0]) <= abs(theirs - exact[0]) + 1e-5
    for our, their, wanted in zip(our_slopes, their_slopes, exact[1:3], strict=True):
        assert our.dtype == dtype
        assert relative_error(our, wanted) <= 1.05 * relative_error(their, wanted)


def test_an_fp32_kernel_beside_half_hidden_gets_a_gradient_that_was_not_rounded():
    hidden, kernel, labels = layer(jnp.bfloat16, rows=64)
    run = lambda kernel: jax.grad(by_chunks, 1)(hidden, kernel, labels)
    wide, narrow = run(kernel.astype(jnp.float32)), run(kernel)
    assert wide.dtype == jnp.float32 and narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), narrow)
    assert (wide != narrow.astype(jnp.float32)).any()


@pytest.mark.parametrize(("reduction", "heavy"), [("mean", 1.0), ("none", 3e4)])
@EXPENSIVE
def test_float16_keeps_gradients_that_a_plain_layer_loses(reduction, heavy):
    # Probabilities near 1 / 2000 over 4096 rows: 1.2e-7, where float16 has steps of 6e-8.
    hidden, kernel, labels = layer(jnp.float16, rows=4096, features=16, classes=2000)
    hidden, kernel = hidden * jnp.float16(0.1), kernel.astype(jnp.float32)
    labels %= 1000
    weights = jnp.where(jnp.arange(4096) % 2 == 0, 1.0, heavy)
    exact = layer_oracle(hidden, kernel.astype(jnp.float16), labels, weights=weights)[2]

    def plain(kernel):
        logits = (hidden @ kernel.astype(jnp.float16)).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return (each * weights).sum() / weights.sum()

    def ours(kernel):
        options = {"weights": weights, "reduction": reduction}
        found = losses.linear_cross_entropy(hidden, kernel, labels, **options)
        return found.sum() / weights.sum() if reduction == "none" else found

    # Classes that are not labels: their gradients consist of small probabilities only.
    error = lambda fn: relative_error(jax.jit(jax.grad(fn))(kernel)[:, 1000:], exact[:, 1000:])
    assert error(ours) < 2.0**-11  # each entry of the logits' gradient is rounded once
    assert error(plain) > 2.0**-7


@pytest.fixture(params=["cpu", "gpu"])
def target(request):
    """The form of the sums: two passes over the logits on a CPU, and one on a GPU."""
    with _compat.context(target=request.param):
        yield request.param


@pytest.mark.parametrize("name", ["random", "peaked", "large"])
@EXPENSIVE
def test_stored_logits_have_the_errors_that_the_document_states(name):
    """Gradients from float16 logits are those from FP32 logits; bfloat16 adds its rounding."""
    errors = loss_errors.measure(name)
    exact, before = errors["float32"], errors["float32, two passes"]
    for key in ("hidden", "kernel"):
        assert exact[key] <= 1.05 * before[key]
        # Beyond 16 from the logit of the label, float16 has steps of 2**-6.
        assert errors["float16"][key] <= (1.15 if name == "large" else 1.05) * exact[key]
        assert errors["bfloat16"][key] <= 1.05 * errors["stored bfloat16"][key]
    assert all(row["loss"] < 2.0**-11 for row in errors.values())
    assert errors["float16"]["loss"] < 2.0**-16
    committed = results_of("loss_errors_cpu")["rows"]
    for form, row in committed[name].items():
        for key in ("hidden", "kernel"):
            assert errors[form][key] == pytest.approx(row[key], rel=0.05)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_forms_of_stored_logits_agree_beyond_the_range_of_float16(target, dtype, reduction):
    """Logits beyond 65504, a masked class, a row of equal logits, and one of weight 0 with inf."""
    hidden, kernel, labels = layer(jnp.bfloat16, rows=8)
    hidden = hidden.at[3].multiply(1e5).at[5].set(jnp.inf).at[6].set(0)
    weights = jnp.ones(8).at[5].set(0)
    bias = jnp.zeros(kernel.shape[1]).at[-1].set(-jnp.inf)

    def loss_fn(hidden, kernel, logits_dtype):
        each = losses.linear_cross_entropy(
            hidden,
            kernel,
            labels % (kernel.shape[1] - 1),
            bias=bias,
            weights=weights,
            z_loss=1e-12,
            reduction=reduction,
            logits_dtype=logits_dtype,
        )
        return each.sum() / 7 if reduction == "none" else each

    run = lambda dtype: jax.value_and_grad(loss_fn, (0, 1))(hidden, kernel, dtype)
    (loss, slopes), (exact, exact_slopes) = run(dtype), run(None)
    assert float(jnp.abs(hidden[3].astype(jnp.float32) @ kernel.astype(jnp.float32)).max()) > 65504
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(loss, exact, rtol=step)
    for slope, wanted in zip(slopes, exact_slopes, strict=True):
        assert relative_error(slope, f64(wanted)) <= max(step, 2.0**-8)
    assert not np.asarray(slopes[0][5]).any() and not np.asarray(slopes[1][:, -1]).any()


@pytest.mark.parametrize("classes", [33, 256])
def test_one_pass_over_the_logits_has_the_sums_of_two(target, classes):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(4, classes)) * 30, jnp.float32)
    logits = logits.at[0].set(-jnp.inf).at[1, ::2].set(-jnp.inf).at[2].set(7.0)
    loss_fn = lambda logits: ce(logits, jnp.array([0, 1, 2, 3]), reduction="none")
    least = jnp.full_like(logits, jnp.finfo(jnp.float32).min)
    np.testing.assert_allclose(loss_fn(least), np.log(classes), rtol=1e-6)
    each, slopes, _ = oracle(logits[1:], np.array([1, 2, 3]))
    found = loss_fn(logits)
    assert found[0] == jnp.inf
    np.testing.assert_allclose(found[1:], each, rtol=1e-6)
    slope = jax.grad(lambda logits: loss_fn(logits)[1:].sum())(logits)
    np.testing.assert_allclose(slope[1:], slopes, rtol=1e-5, atol=1e-7)
    # Forward-over-reverse mode, against differences of the gradient in FP64.
    tangent = jnp.asarray(rng.normal(size=(3, classes)), jnp.float32)
    tangent = jnp.where(jnp.isinf(logits[1:]), 0, tangent)
    gradient = jax.grad(lambda logits: ce(logits, jnp.array([1, 2, 3]), reduction="sum"))
    second = jax.jvp(gradient, (logits[1:],), (tangent,))[1]
    chances = slopes + np.eye(classes)[[1, 2, 3]]
    wanted = chances * (tangent - (chances * tangent).sum(1, keepdims=True))
    np.testing.assert_allclose(second, wanted, rtol=1e-4, atol=1e-6)
    program = str(jax.make_jaxpr(loss_fn)(logits))
    assert ("reduce_max" in program) == (target == "cpu")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "none"}], ids=str)
def test_padded_classes_have_no_part_in_the_loss(target, transposed, options):
    hidden, bias = floats(12, 8).astype(jnp.bfloat16), floats(256, seed=1)
    kernel = floats(8, 256, seed=2).at[:, 250:].mul(100)  # their logits would be the largest
    labels = jnp.arange(12) * 20

    def loss_fn(hidden, kernel, bias, **more):
        kernel = kernel.T if transposed else kernel
        more |= {**options, "transposed": transposed, "chunk": 5}
        each = losses.linear_cross_entropy(hidden, kernel, labels, bias=bias, **more)
        return each.sum()

    both = jax.value_and_grad(loss_fn, (0, 1, 2))
    found, slopes = both(hidden, kernel, bias, num_classes=250)
    wanted, exact = both(hidden, kernel[:, :250], bias[:250])
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(f64(slopes[0]), f64(exact[0]), rtol=2**-7, atol=1e-6)
    for slope, whole in zip(slopes[1:], exact[1:], strict=True):
        np.testing.assert_allclose(slope[..., :250], whole, rtol=1e-5, atol=1e-6)
        assert not np.asarray(slope[..., 250:]).any()
    # A label in the padding is invalid.
    wrong = jax.jit(functools.partial(losses.linear_cross_entropy, num_classes=250))
    assert np.isnan(wrong(hidden, kernel, labels.at[3].set(251)))


@pytest.mark.parametrize(
    ("context", "classes", "rows"),
    [
        ({"target": "gpu", "chip": get_target("h200")}, 50304, 8192),
        ({"target": "gpu", "chip": get_target("h200")}, 128256, 4096),
        ({"target": "gpu", "chip": get_target("rtx4090")}, 50304, 4096),
        ({"target": "gpu", "chip": get_target("l4")}, 128256, 2048),
        ({"target": "tpu", "chip": get_target("v5e")}, 50304, 4096),
        ({"target": "gpu"}, 50304, 8192),
        ({"target": "cpu"}, 50304, 512),
    ],
)
def test_chunks_follow_the_memory_of_the_chip(context, classes, rows):
    shapes = [(2**17, 8), (8, classes)]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with _compat.context(**context):
        labels = jax.ShapeDtypeStruct((2**17,), jnp.int32)
        program = str(jax.make_jaxpr(losses.linear_cross_entropy)(*args, labels))
        few = [jax.ShapeDtypeStruct((rows, 8), jnp.bfloat16), args[1]]
        one = jax.make_jaxpr(losses.linear_cross_entropy)(*few, labels.update(shape=(rows,)))
        half = functools.partial(losses.linear_cross_entropy, logits_dtype="bfloat16")
        halves = str(jax.make_jaxpr(half)(*args, labels))
    assert f"f32[{rows},{classes}]" in program and f"length={2**17 // rows}" in program
    assert "length=1" in str(one)
    # On a GPU or TPU the matmul writes bfloat16, so that twice as many rows take the same memory.
    most = rows if context["target"] == "cpu" else 2 * rows
    assert f"bf16[{most},{classes}]" in halves and f"length={2**17 // most}" in halves


def test_products_have_half_operands_and_fp32_results():
    hidden, kernel, labels = layer(jnp.bfloat16, rows=6)
    run = jax.value_and_grad(lambda *args: by_chunks(*args, bias=jnp.zeros(11)), (0, 1))
    text = str(jax.make_jaxpr(run)(hidden, kernel.astype(jnp.float32), labels))
    report = jaxmp.audit(run, hidden, kernel.astype(jnp.float32), labels)
    assert {(row.lhs, row.rhs) for row in report.matmuls} == {("bfloat16", "bfloat16")}
    assert text.count("dot_general") == text.count("preferred_element_type=float32") == 3
    # Three matmuls for a loss with gradients, one without.
    assert report.flops == 3 * (2 * 6 * 8 * 11)
    alone = jaxmp.audit(by_chunks, hidden, kernel, labels)
    assert alone.flops == 2 * 6 * 8 * 11


# ---------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------


def wide_steps(program, elements):
    """Returns the instructions outside of fusions with FP32 arrays of at least `elements`."""
    found = []
    for step in Program(program.as_text()).steps():
        shapes = step.instruction.shapes
        if any(one.dtype == "float32" and one.elements >= elements for one in shapes):
            found.append(step.instruction.name)
    return found


LOSSES = {
    "indices": lambda x, y: losses.softmax_cross_entropy(x, y, ignore_index=-1),
    "smoothed": lambda x, y: losses.softmax_cross_entropy(x, y, label_smoothing=0.1, z_loss=1e-4),
    "soft": lambda x, y: losses.softmax_cross_entropy(x, jax.nn.one_hot(y, 4000, dtype=x.dtype)),
    "plain": lambda x, y: optax.softmax_cross_entropy_with_integer_labels(
        x.astype(jnp.float32), y
    ).mean(),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", LOSSES)
@fast_cases("indices-bfloat16", "smoothed-float16", "soft-bfloat16", "plain-bfloat16")
def test_no_fp32_logits_on_a_cpu(dtype, name):
    args = jax.ShapeDtypeStruct((256, 4000), dtype), jax.ShapeDtypeStruct((256,), jnp.int32)
    compiled = jax.jit(jax.value_and_grad(LOSSES[name])).lower(*args).compile()
    is_narrow = compiled.memory_analysis().temp_size_in_bytes < 256 * 4000 * 2 * 1.1
    assert (wide_steps(compiled, 256 * 4000) == []) == is_narrow == (name != "plain")


def test_saved_for_the_backward_pass_are_half_logits_and_a_few_numbers_a_row():
    logits, labels = jnp.zeros((8, 100), jnp.bfloat16), jnp.zeros(8, jnp.int32)
    saved = jax.tree.leaves(jax.vjp(lambda logits: softmax(logits, labels), logits)[1])
    assert max(array.size for array in saved if array.dtype == jnp.float32) == 8
    assert sum(array.size for array in saved if array.dtype == jnp.bfloat16) == 800


# Eight chunks of the H200; nothing is run.
SIZES = {"tokens": 2**19, "features": 128, "classes": 8192}


# On an H200, one array of the size of the logits for two in FP32, and a third of the bytes in
# bfloat16; beside them the workspace of the matmuls, which at these sizes is another 6 to 8 %.
# A CPU multiplies in FP32, so its bfloat16 layer stores FP32 logits independently of the loss.
@pytest.mark.parametrize(
    ("chip", "in_fp32", "in_bf16"),
    [("cpu", 0.8, 0.8), pytest.param("h200", 0.6, 0.45, marks=needs_compiler)],
)
@EXPENSIVE
def test_memory(chip, in_fp32, in_bf16):
    rows = loss_memory.measure(chip, **SIZES)
    found = {(row["dtype"], row["way"]): row["of_plain"] for row in rows}
    for dtype, most in (("float32", in_fp32), ("bfloat16", in_bf16)):
        assert found[dtype, "linear_cross_entropy"] <= 0.25
        assert found[dtype, "softmax_cross_entropy"] <= most


@needs_compiler
@EXPENSIVE
def test_no_fp32_logits_on_an_h200():
    in_chunks = functools.partial(loss_memory.from_hidden, chunk=256)
    sizes = {"tokens": 1024, "features": 64, "classes": 5000}
    for way in (loss_memory.from_logits, in_chunks, loss_memory.plain):
        program = loss_memory.compiled(way, jnp.bfloat16, "h200", **sizes)
        assert bool(wide_steps(program, 1024 * 5000)) == (way is loss_memory.plain)


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_the_committed_figures_hold_what_the_document_says(target):
    report = results_of(f"loss_memory_{target}")
    text = text_of("docs/attention.md", "docs/measurements.md")
    for name, workload in report["workloads"].items():
        for row in workload["rows"]:
            if row["way"] == "linear_cross_entropy" and row["chunk"] is None:
                assert row["of_plain"] <= 0.4
            figure = f"{row['temp_bytes'] / 1e9:.2f} GB"
            assert name != "gpt2" or figure in text, (row, figure)


def test_the_document_states_the_committed_errors():
    report = results_of("loss_errors_cpu")
    text = text_of("docs/measurements.md")
    for name, forms in report["rows"].items():
        for form in ("float32", "float16", "bfloat16"):
            row = " | ".join(f"{forms[form][key]:.1e}" for key in ("loss", "hidden", "kernel"))
            assert f"| {name}, {form} | {row} |" in text


# ---------------------------------------------------------------------------
# Many devices
# ---------------------------------------------------------------------------


def make_mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)


def collectives(program):
    """Returns the collectives as [(opcode, elements of the largest array, count)]."""
    found = []
    for step in Program(program.as_text()).steps():
        one = step.instruction
        if re.match("all-|reduce-scatter|collective", one.opcode) and "-done" not in one.opcode:
            found.append((one.opcode, max(shape.elements for shape in one.shapes), step.times))
    return found


def placed(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize("spec", [("data", None), (None, "model"), ("data", "model")])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@fast_cases("cpu-AxisType.Auto-spec0", "gpu-AxisType.Auto-spec1", "gpu-AxisType.Explicit-spec2")
def test_logits_stay_where_they_are(spec, kind, target):
    options = {"label_smoothing": 0.1, "z_loss": 1e-3} if target == "cpu" else {"z_loss": 1e-3}
    rows, classes, mesh = 16, 512, make_mesh(kind)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(rows, classes)), jnp.bfloat16)
    labels = jnp.arange(rows) * 7
    args = placed(mesh, logits, *spec), placed(mesh, labels, spec[0])
    run = jax.jit(jax.value_and_grad(functools.partial(losses.softmax_cross_entropy, **options)))
    # What is exchanged are a few numbers a row and device.
    program = run.lower(*args).compile()
    assert max(size for _, size, _ in collectives(program)) <= 4 * rows < classes
    loss, slope = program(*args)
    exact, slopes, _ = oracle(logits, labels, **options)
    np.testing.assert_allclose(loss, exact.mean(), rtol=1e-6)
    np.testing.assert_allclose(f64(slope), slopes / rows, rtol=2**-8, atol=1e-7)
    assert slope.sharding.is_equivalent_to(args[0].sharding, 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@fast_cases("AxisType.Explicit")
def test_a_layer_on_many_devices(kind):
    mesh = make_mesh(kind)
    hidden, kernel, labels = layer(jnp.bfloat16, rows=64, features=16, classes=512)
    args = (
        placed(mesh, hidden, "data"),
        placed(mesh, kernel, None, "model"),
        placed(mesh, labels, "data"),
    )
    run = jax.value_and_grad(lambda *args: losses.linear_cross_entropy(*args, chunk=16), (0, 1))
    program = jax.jit(run).lower(*args).compile()
    # The kernel's gradient is added over "data", half of it on each device. Beside that: no chunk
    # of logits, no kernel; C numbers of logsumexp and [C, D] of hidden's gradient.
    sizes = sorted(size for _, size, _ in collectives(program))
    assert sizes[-1] == kernel.size // 2 and sizes[-2] <= 16 * 16 < 16 * 512
    loss, slopes = program(*args)
    exact = layer_oracle(hidden, kernel, labels)
    np.testing.assert_allclose(loss, exact[0], rtol=1e-6)
    for found, wanted in zip(slopes, exact[1:3], strict=True):
        assert relative_error(found, wanted) < 2.0**-7
    assert slopes[1].sharding.is_equivalent_to(args[1].sharding, 2)
    each = jax.jit(lambda *args: losses.linear_cross_entropy(*args, reduction="none"))(*args)
    np.testing.assert_allclose(each.mean(), loss, rtol=1e-6)


@both
def test_in_shard_map_a_replicated_kernel_is_summed_once(loss_fn):
    hidden, kernel, labels = layer(rows=8)
    rows = PartitionSpec(("data", "model"))

    def local(hidden, kernel, labels):
        total, weight = loss_fn(hidden, kernel, labels, reduction="sum_and_weight")
        axes = ("data", "model")
        return jax.lax.psum(total, axes) / (weight * 4)

    specs = {"in_specs": (rows, PartitionSpec(), rows), "out_specs": PartitionSpec()}
    whole = jax.shard_map(local, mesh=make_mesh(), **specs)
    program = jax.jit(jax.value_and_grad(whole, (0, 1))).lower(hidden, kernel, labels).compile()
    loss, slopes = program(hidden, kernel, labels)
    loss_1, slopes_1 = jax.value_and_grad(loss_fn, (0, 1))(hidden, kernel, labels)
    np.testing.assert_allclose(loss, loss_1, rtol=1e-6)
    jax.tree.map(close, slopes, slopes_1)
    assert [times for _, size, times in collectives(program) if size >= kernel.size] == [1]


@needs_compiler
@EXPENSIVE
def test_data_parallel_on_h200s_adds_the_kernel_gradient_once_and_in_fp32(monkeypatch):
    code = """
import json, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxmp import losses
from jaxmp._core import _compat
from jaxmp._core._targets import get_target
from jaxmp._tools.audit._compile import describe
from jaxmp._tools.audit._hlo import Program
mesh = Mesh(np.array(_compat.described_gpus(describe(get_target("h200")), 8)), ("data",))
def shape(dtype, sizes, *spec):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
args = (shape(jnp.bfloat16, (1024, 64), "data"), shape(jnp.float32, (64, 4096)),
        shape(jnp.int32, (1024,), "data"))
run = jax.value_and_grad(lambda *args: losses.linear_cross_entropy(*args, chunk=128), (0, 1))
text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).compile().as_text()
found = [(s.instruction.opcode, [str(x.dtype) for x in s.instruction.shapes],
          max(x.elements for x in s.instruction.shapes), s.times)
         for s in Program(text).steps() if s.instruction.opcode.startswith(("all-", "reduce-s"))
         and not s.instruction.opcode.endswith("-done")]
print(json.dumps(found))
"""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    found = json.loads(run_python(code).splitlines()[-1])
    (large,) = (one for one in found if one[2] >= 64 * 4096)
    assert set(large[1]) == {"float32"} and large[3] == 1, found
    assert all(size <= 64 * 4096 + 1 for *_, size, _ in found), found


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------

X, Y = jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32)
K = jnp.zeros((3, 5))
ce, linear = losses.softmax_cross_entropy, losses.linear_cross_entropy


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ce(X.astype(jnp.int32), Y), r"logits is int32 of shape \[2, 3\].*astype"),
        (lambda: ce(X.astype("float8_e4m3fn"), Y), "16 bits or more"),
        (lambda: ce(X, Y[:, None]), r"labels have shape \[2, 1\].*labels.reshape\(\(2,\)\)"),
        (lambda: ce(X, Y.astype(jnp.float32)), r"must be equal"),
        (lambda: ce(X, Y > 0), "bool.*labels.astype"),
        (lambda: ce(X, X, ignore_index=0), "probabilities.*weights="),
        (lambda: ce(X, Y, ignore_index=0.5), "not an integer, such as -100"),
        (lambda: ce(jnp.float32(1), Y), r"shape \[\]: the last axis has no classes"),
        (lambda: ce(X, Y, label_smoothing=1.5), "from 0 to 1, for example label_smoothing="),
        (lambda: ce(X, Y, z_loss=-1), "0 or more"),
        (lambda: ce(X, Y, z_loss="x"), "z_loss='x'"),
        (lambda: ce(X, Y, reduction="sums"), "Did you mean 'sum'"),
        (lambda: ce(X, Y, weights=jnp.ones(3)), r"\[3\].*\[2\].*jnp.full"),
        (lambda: ce(X, Y, weights=jnp.ones(2, "complex64")), "complex64.*real weight"),
        (lambda: ce(X[:, :0], Y), "no classes"),
        (lambda: jax.jit(lambda s: ce(X, Y, z_loss=s))(0.1), "static_argnames='z_loss'"),
        (lambda: linear(X, K.T, Y), "transposed=True"),
        (lambda: linear(X, K, Y, transposed=True), "transposed=False"),
        (lambda: linear(X, jnp.zeros((4, 5)), Y), "3 features.*takes 4.*must be D"),
        (lambda: linear(X, K[0], Y), r"\[\.\.\., D\] and \[D, V\]"),
        (lambda: linear(X, K, Y, bias=jnp.zeros(3)), r"5 classes.*bias.reshape\(5\)"),
        (lambda: linear(X, K, Y, num_classes=6), "num_classes=6.*has 5.*from 1 to 5"),
        (lambda: ce(X, Y.at[1].set(7), ignore_index=0), r"labels\[1\] is 7, one of 1"),
        (lambda: linear(X, K, jnp.array([0, 3]), num_classes=3), r"labels\[1\] is 3.*0 to 2"),
        (lambda: linear(X, K, Y, chunk=0), "chunk=0.*chunk=512"),
        (lambda: linear(X, K, Y, logits_dtype="f16"), "logits_dtype='f16'.*=jnp.float16"),
        (lambda: linear(X, K, Y, logits_dtype=jnp.int8), "allowed are float32, bfloat16, float16"),
        (lambda: linear(X, K, jnp.zeros((2, 5))), "softmax_cross_entropy"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(JaxmpError, match=re.compile(message, re.DOTALL)):
        call()


def test_forward_mode_alone_is_refused():
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda x: ce(x, Y), (X,), (X,))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_backward_pass_multiplies_at_the_precision_of_the_forward_pass(reduction):
    def fn(hidden, kernel):
        with jax.default_matmul_precision("highest"):
            labels = jnp.zeros(4, jnp.int32)
            return losses.linear_cross_entropy(hidden, kernel, labels, reduction=reduction).sum()

    found = products(trace(jax.grad(fn, (0, 1)), jnp.ones((4, 8)), jnp.ones((8, 16))))
    assert len(found) >= 3
    highest = jax.lax.Precision.HIGHEST
    assert {equation.params["precision"] for equation in found} == {(highest, highest)}
