"""Notes of speed: the largest avoidable copies of programs that XLA compiles for a GPU."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
from arrays import shape
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, fast_cases
from jaxmp import audit, default_target
from jaxmp._tools.audit._compile import compile_for
from jaxmp._tools.audit._hlo import Program
from jaxmp._tools.audit._hlo_kernels import accessed, kernels
from jaxmp._tools.audit._trace import trace

pytestmark = [needs_compiler, pytest.mark.usefixtures("standard_promotion", "rank_promotion")]

BF16, F32 = jnp.bfloat16, jnp.float32
BATCH, LENGTH, HEADS, WIDTH = 8, 256, 2, 128


def notes(fn, *args):
    """Returns check -> note about copies of a program compiled for an H200."""
    report = audit(fn, *args, target="h200")
    # One of the losses reads 16-bit logits.
    assert not report.counts().keys() - {"rounded_output"}
    return {f.check: f for f in copies(report)}


def copies(report):
    """Returns the notes of speed, without that of a program that donates nothing."""
    notes = (finding for finding in report.findings if finding.severity == "note")
    return [finding for finding in notes if finding.check != "undonated_state"]


def bytes_of(fn, *args):
    """Returns the bytes that the kernels of a program read and write."""
    with default_target("h200"):
        program = Program(compile_for("h200", trace(fn, args, {})).text)
    return sum(step.times * accessed(program, step) for step in kernels(program))


def bytes_in(message):
    """Returns the last number of bytes of a message."""
    number, unit = message.rpartition(",")[0].split()[-2:]
    return float(number) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


# ---------------------------------------------------------------------------
# Queries, keys and values
# ---------------------------------------------------------------------------


def split(x, w):
    return jnp.split(x @ w, 3, axis=-1)


def indexed(x, w):
    qkv = (x @ w).reshape(*x.shape[:2], 3, -1)
    return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]


def three(x, w):
    return (x @ w[:, n * WIDTH : (n + 1) * WIDTH] for n in range(3))


def shortened(x, w):
    """Queries of half of the positions: a part of an array that is not used otherwise."""
    q, k, v = three(x, w)
    return q[:, LENGTH // 2 :], k, v


def attention_gradient(project):
    def loss(w, x):
        heads = (part.reshape(*part.shape[:2], HEADS, -1) for part in project(x, w))
        return jaxmp.dot_product_attention(*heads).astype(F32).sum()

    return jax.grad(loss, (0, 1))


ATTENTION = shape(WIDTH, 3 * WIDTH), shape(BATCH, LENGTH, WIDTH)
ARRAYS = 3 * BATCH * LENGTH * WIDTH * 2  # bytes of queries, keys and values


@EXPENSIVE
@pytest.mark.parametrize("project", [split, indexed])
def test_a_split_before_attention_and_the_join_of_its_gradients(project):
    note = notes(attention_gradient(project), *ATTENTION)["split_attention"]
    # One kernel splits, the other joins. Each reads and writes the three arrays.
    assert note.count == 2 and bytes_in(note.message) == pytest.approx(4 * ARRAYS, rel=0.01)
    assert note.line == project.__code__.co_firstlineno + (1 if project is split else 2)
    assert "% of the bytes that all kernels move" in note.message


@EXPENSIVE
def test_kernels_in_a_loop_over_layers_count_once_for_each_layer():
    def layer(x, w):
        heads = (part.reshape(BATCH, LENGTH, HEADS, -1) for part in split(x, w))
        return x + jaxmp.dot_product_attention(*heads).reshape(x.shape), None

    fn = jax.grad(lambda w, x: jax.lax.scan(layer, x, w)[0].astype(F32).sum())
    note = notes(fn, shape(4, WIDTH, 3 * WIDTH), ATTENTION[1])["split_attention"]
    assert note.count == 2 and bytes_in(note.message) == pytest.approx(16 * ARRAYS, rel=0.01)


@pytest.mark.parametrize("project", [three, shortened])
@fast_cases("three")
def test_a_matmul_each_has_no_note_even_if_xla_merges_the_matmuls(project):
    assert "split_attention" not in notes(attention_gradient(project), *ATTENTION)


# ---------------------------------------------------------------------------
# Residuals
# ---------------------------------------------------------------------------


def residual_gradient(dimensions):
    def loss(w, x):
        x = x.reshape(-1, WIDTH) if dimensions == 2 else x
        for _ in range(3):
            x = x + jax.nn.relu(x @ w) @ w.T
        return x.astype(F32).sum()

    return jax.grad(loss, (0, 1))


def test_residuals_are_copied_in_three_dimensions_and_not_in_two():
    args = shape(WIDTH, 4 * WIDTH), shape(BATCH, LENGTH, WIDTH)
    note = notes(residual_gradient(3), *args)["residual_copy"]
    saved = bytes_of(residual_gradient(3), *args) - bytes_of(residual_gradient(2), *args)
    # The last of the three results is summed by the kernel that adds it.
    assert note.count == 2 and bytes_in(note.message) == pytest.approx(saved, rel=0.05)
    assert note.line == residual_gradient.__code__.co_firstlineno + 4
    assert "residual_copy" not in notes(residual_gradient(2), *args)


# ---------------------------------------------------------------------------
# Recomputation
# ---------------------------------------------------------------------------


def block(x, w):
    return jnp.tanh(jnp.tanh(x @ w) @ w.T)


def unrolled(block):
    def loss(w, x):
        for layer in range(2):
            x = block(x, w[layer])
        return x.astype(F32).sum()

    return jax.grad(loss)


def scanned(w, x):
    step = lambda x, w: (jax.checkpoint(block)(x, w), None)
    return jax.grad(lambda w: jax.lax.scan(step, x, w)[0].astype(F32).sum())(w)


LAYERS = shape(2, 256, 512)


@EXPENSIVE
def test_a_pass_that_is_recomputed_although_its_results_fit():
    rows = 4096
    args = LAYERS, shape(rows, 256)
    note = notes(unrolled(jax.checkpoint(block)), *args)["recomputed_pass"]
    saved = bytes_of(unrolled(jax.checkpoint(block)), *args) - bytes_of(unrolled(block), *args)
    assert bytes_in(note.message) == pytest.approx(saved, rel=0.3)
    assert "GB are free" in note.message and note.line == block.__code__.co_firstlineno + 1


@pytest.mark.parametrize(
    ("fn", "rows"),
    [(unrolled(block), 4096), (scanned, 4096), (unrolled(jax.checkpoint(block)), 2**27)],
    ids=["saved", "in a loop", "too large"],
)
@fast_cases("too large")
def test_recomputation_without_a_note(fn, rows):
    assert "recomputed_pass" not in notes(fn, LAYERS, shape(rows, 256))


# ---------------------------------------------------------------------------
# Logits
# ---------------------------------------------------------------------------


def stored(hidden, kernel, labels):
    logits = jnp.dot(hidden, kernel, preferred_element_type=F32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def widened(hidden, kernel, labels):
    logits = (hidden @ kernel).astype(F32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_gradient(loss):
    return jaxmp.autocast(jax.grad(loss, (0, 1)), "bf16")


def hidden_squares(hidden, kernel, labels):
    """A hidden layer as wide as logits, with exponentials."""
    wide = jax.nn.silu(jnp.dot(hidden, kernel, preferred_element_type=F32))
    return jnp.where(labels[:, None] > 0, wide / wide.max(1, keepdims=True), 0).sum()


LAST = shape(2048, 256), shape(256, 4096), shape(2048, dtype=jnp.int32)


@EXPENSIVE
@pytest.mark.parametrize("loss", [stored, widened])
def test_stored_logits_and_what_the_loss_of_the_layer_saves(loss):
    note = notes(loss_gradient(loss), *LAST)["stored_logits"]
    better = loss_gradient(jaxmp.losses.linear_cross_entropy)
    saved = bytes_of(loss_gradient(loss), *LAST) - bytes_of(better, *LAST)
    assert bytes_in(note.message) == pytest.approx(saved, rel=0.15)
    assert "2,048 x 4,096 logits" in note.message and "linear_cross_entropy" in note.fix
    assert note.line == loss.__code__.co_firstlineno + 1


def test_chunks_cost_bytes():
    """Each of the eight chunks reads the kernel, and reads and writes its FP32 gradient."""
    rows, width, classes = 65536, 8192, 50304
    wide = shape(rows, width), shape(width, classes), shape(rows, dtype=jnp.int32)
    note = notes(loss_gradient(stored), *wide)["stored_logits"]
    better = loss_gradient(jaxmp.losses.linear_cross_entropy)
    saved = bytes_of(loss_gradient(stored), *wide) - bytes_of(better, *wide)
    assert bytes_in(note.message) == pytest.approx(saved, rel=0.05)


@EXPENSIVE
@pytest.mark.parametrize(
    "loss", [jaxmp.losses.linear_cross_entropy, hidden_squares], ids=["linear", "hidden"]
)
def test_losses_without_stored_logits(loss):
    assert "stored_logits" not in notes(loss_gradient(loss), *LAST)


def test_few_classes_have_no_note():
    args = shape(2048, 256), shape(256, 512), shape(2048, dtype=jnp.int32)
    assert notes(loss_gradient(stored), *args) == {}


# ---------------------------------------------------------------------------
# The report
# ---------------------------------------------------------------------------


@EXPENSIVE
def test_the_report_prints_the_largest_notes_first():
    def loss(w, x, kernel, labels):
        for layer in range(2):
            x = jax.checkpoint(block)(x, w[layer])
        return stored(x, kernel, labels)

    args = LAYERS, *LAST
    report = audit(jaxmp.autocast(jax.grad(loss, (0, 2)), "bf16"), *args, target="h200")
    found = copies(report)
    assert [f.check for f in found] == ["stored_logits", "recomputed_pass"]
    sizes = [bytes_in(f.message) for f in found]
    assert sizes == sorted(sizes, reverse=True) and math.prod(sizes)
    assert report.findings[-2:] == tuple(found) and not {*found} & {*report.warnings}
    assert "Speed" in str(report) and "stored_logits" in str(report)
    with pytest.raises(jaxmp.errors.AuditFailedError, match="stored_logits"):
        report.check("stored_logits")
