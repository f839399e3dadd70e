"""`jaxmp.parity`: metrics, named causes, equal programs, and errors."""

import math
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
import parity_plants
from arrays import normal
from grids import EXPENSIVE
from jaxmp._tools.validate import _parity, _walk
from jaxmp._tools.validate._parity import ParityReport
from jaxmp._tools.validate._walk import ResultRecord, walk
from jaxmp.errors import ValidationError, ValidationFailedError
from sources import results_of

PLANTS = results_of("parity_plants_cpu")
BF16, FP32 = jnp.bfloat16, jnp.float32


W, X = normal(0, 16, 8), normal(1, 4, 16)


def head(w, x, softmax=FP32, outer=None):
    with jax.named_scope("head"):
        logits = (x @ w).astype(softmax)
        shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
        result = shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))
    return result.astype(FP32)


def in_bf16(w, x):
    return head(w, x, BF16)


def rounded(w, x):
    return head(w.astype(BF16).astype(FP32), x)


# ---------------------------------------------------------------------------
# Causes
# ---------------------------------------------------------------------------


def test_the_module_operation_and_dtype_of_a_softmax_in_16_bits():
    report = jaxmp.parity(head, in_bf16, [(W, X)])
    cause = report.cause
    assert (cause.module, cause.kind) == ("head", "dtype")
    assert "float32" in cause.train and "bfloat16" in cause.serve
    logits = head.__code__.co_firstlineno + 2
    assert Path(cause.file).name == "test_parity.py" and cause.line - logits in range(4)
    assert cause.after < 0.1 * cause.before and cause.before == report.by_operations
    assert "serving program in the dtypes of training" in cause.fix
    first, *lines = cause.fix.splitlines()
    assert "x.astype(jnp.float32)" in first
    assert f"    head (test_parity.py:{logits}): no cast to bfloat16" in lines
    assert f"    head (test_parity.py:{logits + 1}): sub in float32 instead of bfloat16" in lines
    assert all(line in str(report) for line in lines) and "/" not in str(report)
    assert ParityReport.from_json(report.to_json()) == report
    assert "0.999 to 1.002" in report.to_html() and "Cause" in report.to_text(full=True)


def test_a_coarser_dtype_in_training():
    cause = jaxmp.parity(in_bf16, head, [(W, X)]).cause
    assert (cause.module, cause.kind) == ("head", "dtype") and cause.after < 0.1 * cause.before


def test_weights_that_were_rounded_before():
    other = W.astype(BF16).astype(FP32)
    cause = jaxmp.parity(lambda x: head(W, x), lambda x: head(other, x), [X]).cause
    assert (cause.module, cause.operation, cause.kind) == ("head", "dot_general", "arguments")
    assert cause.fix.startswith("Pass the same values to head (test_parity.py:")
    assert "operand 1 is rounded to bfloat16 in serving" in cause.fix
    assert cause.after < 1e-6


def test_outside_of_modules_the_cause_is_a_line():
    cause = jaxmp.parity(lambda x: jnp.exp(x), lambda x: jnp.exp(x.astype(BF16)), [X]).cause
    assert cause.module == "" and "jnp.exp(x.astype(BF16))" in cause.text
    assert f"    test_parity.py:{cause.line}: " in cause.fix


def test_an_exported_program_on_either_side():
    exported = jax.export.export(jax.jit(lambda w, x: jax.jit(in_bf16)(w, x)))(W, X)
    for programs in ((head, exported), (exported, head)):
        cause = jaxmp.parity(*programs, [(W, X)]).cause
        assert cause.module == "head" and cause.after < 0.5 * cause.before
    same = jax.export.export(jax.jit(head))(W, X)
    assert jaxmp.parity(head, same, [(W, X)]).cause is None


def test_a_scale_that_depends_on_the_batch():
    def scaled(w, x):
        with jax.named_scope("quantize"):
            scale = jnp.max(jnp.abs(x)) / 448
            x = (x / scale).astype(jnp.float8_e4m3fn).astype(FP32) * scale
        return head(w, x)

    cause = jaxmp.parity(scaled, scaled, [(W, X)], batch_size=1).cause
    assert (cause.module, cause.operation) == ("quantize", "reduce_max")


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 2}, {"shift": 1}])
def test_another_batch_in_16_bits_has_no_cause(options):
    layer = lambda w, x: jax.nn.gelu(x.astype(BF16) @ w.astype(BF16)).astype(FP32)
    assert jaxmp.parity(layer, layer, [(W, X)], outputs="outputs", **options).cause is None


def test_programs_in_loops_and_branches():
    def unrolled(w, x):
        for n in range(3):
            x = jnp.tanh(x @ w[n])
        return x

    def scanned(w, x, dtype=FP32):
        step = lambda x, w: (jnp.tanh((x @ w).astype(dtype)).astype(FP32), None)
        return jax.lax.cond(True, lambda x: jax.lax.scan(step, x, w)[0], lambda x: x, x)

    w = normal(2, 3, 16, 16)
    assert jaxmp.parity(unrolled, scanned, [(w, X)], outputs="outputs").cause is None
    cause = jaxmp.parity(
        unrolled, lambda w, x: scanned(w, x, BF16), [(w, X)], outputs="outputs"
    ).cause
    assert cause.operation in ("tanh", "convert_element_type") and cause.after < 0.1 * cause.before


def test_two_recipes():
    model = nn.Dense(8)
    params = model.init(jax.random.key(0), X)
    program = lambda recipe: lambda x: jax.nn.log_softmax(recipe.wrap(model).apply(params, x))
    cause = jaxmp.parity("fp32", "bf16", [X], program=program).cause
    assert cause.operation == "convert_element_type" and cause.kind == "dtype"
    assert "bfloat16" in cause.serve and cause.after < 0.1 * cause.before


def decoded(softmax=FP32, cache=FP32):
    """Returns attention of one position after the other, with a cache of keys."""

    def run(w, x):
        def step(keys, row):
            x, n = row
            with jax.named_scope("attention"):
                keys = jax.lax.dynamic_update_slice(keys, (x @ w).astype(cache)[:, None], (0, n, 0))
                scores = jnp.einsum("bd,bkd->bk", x, keys.astype(FP32))[:, None]
                scores = jnp.where(jnp.arange(6) <= n, scores, -1e30)
                return keys, jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), keys.astype(FP32))

        keys = jnp.zeros((2, 6, 16), cache)
        _, rows = jax.lax.scan(step, keys, (jnp.swapaxes(x, 0, 1), jnp.arange(6)))
        return jnp.swapaxes(rows[:, :, 0], 0, 1)[..., 0]

    return run


def attention(w, x):
    with jax.named_scope("attention"):
        keys = x @ w
        scores = jnp.einsum("bqd,bkd->bqk", x, keys)
        scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -1e30)
        return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), keys)[..., 0]


def test_decoding_with_a_cache():
    w, x = normal(2, 16, 16) / 8, normal(3, 2, 6, 16)
    assert jaxmp.parity(attention, decoded(), [(w, x)], outputs="outputs").cause is None
    report = jaxmp.parity(attention, decoded(cache=BF16), [(w, x)], outputs="outputs")
    assert report.cause.module == "attention" and "bfloat16" in report.cause.serve
    assert report.cause.after < 0.1 * report.cause.before
    assert [row.positions for row in report.rows] == ["all", "0", "1", "2", "3", "4", "5"]


def test_without_a_search_there_is_no_cause():
    report = jaxmp.parity(head, in_bf16, [(W, X)], search=False)
    assert report.cause is None and not report.searched and report.rows[0].difference > 0


# ---------------------------------------------------------------------------
# Planted mismatches
# ---------------------------------------------------------------------------


def test_recorded_plants():
    rows = {row["name"]: row for row in PLANTS["pairs"]}
    assert list(rows) == [*parity_plants.PLANTS, *parity_plants.EQUAL]
    outcomes = [rows[name]["outcome"] for name in parity_plants.PLANTS]
    assert len(outcomes) == 12 and outcomes.count("right") >= 10
    assert len(parity_plants.EQUAL) >= 6
    assert all(rows[name]["outcome"] == "none" for name in parity_plants.EQUAL)
    for name, row in rows.items():
        pair = (parity_plants.PLANTS | parity_plants.EQUAL)[name]
        cause = None if row["module"] is None else (row["module"], row["operation"])
        assert parity_plants.outcome(pair, cause) == row["outcome"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=EXPENSIVE) for name in ("head", "shift")]
)
def test_plants_are_named_as_recorded(name):
    recorded = next(row for row in PLANTS["pairs"] if row["name"] == name)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        assert parity_plants.measure(name)["outcome"] == recorded["outcome"]


# ---------------------------------------------------------------------------
# Criterion and metrics
# ---------------------------------------------------------------------------


def record(value, dtype):
    return ResultRecord((), "mul", np.dtype(dtype), ("", 0), (), (), jnp.asarray(value, FP32))


def test_the_criterion_accepts_last_bits_and_finds_roundings():
    x = np.float32(normal(4, 10_000))
    half = np.asarray(jnp.asarray(x).astype(BF16).astype(FP32))
    few = half.copy()
    few[:50] *= 1 + 2.0**-7  # the last bit of 0.5 % of the elements
    is_different = lambda a, b, s, t: _walk.is_different(record(a, s), record(b, t), jnp.asarray(b))
    assert not is_different(half, few, BF16, BF16)
    assert not is_different(x, half, FP32, BF16)  # the rounding of the coarser dtype
    coarse = x * (1 + 2.0**-9 * np.random.default_rng(0).choice([-1, 1], x.size)).astype(np.float32)
    assert is_different(coarse, half, FP32, BF16)
    assert is_different(x, half, FP32, FP32)
    assert not is_different(x, x * np.float32(1 + 1e-6), FP32, FP32)
    assert is_different(x, np.where(x > 2, np.inf, x), FP32, FP32)


def test_a_walk_rounds_as_the_program():
    fn = lambda x: jnp.sum(jnp.exp(x.astype(BF16)) * jnp.asarray(0.3, BF16), axis=0)
    records, (result,), _ = walk(jax.make_jaxpr(fn)(X), [X])
    exact = jax.jit(fn).lower(X).compile({"xla_allow_excess_precision": False})(X)
    np.testing.assert_array_equal(result, exact.astype(FP32))
    assert [each.primitive for each in records][:2] == ["convert_element_type", "exp"]


def test_metrics_of_log_probabilities():
    x = np.log([[0.5, 0.5, 0.5, 0.5]])
    row = _parity.rows_of(x, x + np.log([1.001, 1.009, 0.96, 1.2]), "log_probs")[0]
    assert (row.count, row.band, row.within_1, row.within_5) == (4, 0.25, 0.5, 0.75)
    assert row.largest == pytest.approx(1.2)
    ratio = np.array([1.001, 1.009, 0.96, 1.2])
    assert row.kl == pytest.approx(np.mean(1 / ratio - 1 + np.log(ratio)))
    assert row.mult_error == pytest.approx(np.mean(np.maximum(ratio, 1 / ratio)))


def test_the_divergence_of_logits_is_exact_and_shifts_do_not_count():
    x, y = np.float32(normal(5, 2, 3, 7)), np.float32(normal(6, 2, 3, 7))
    p, q = jax.nn.log_softmax(x), jax.nn.log_softmax(y)
    row, *positions = _parity.rows_of(x, y, "logits")
    assert row.kl == pytest.approx(float(jnp.sum(jnp.exp(q) * (q - p)) / 6), rel=1e-5)
    assert row.count == 6 and [each.count for each in positions] == [2, 2, 2]
    assert _parity.rows_of(x, x + 3, "logits")[0].difference < 1e-6


def test_masked_positions_are_left_out():
    x = np.array([[-1.0, np.nan], [-2.0, -3.0]])
    row = _parity.rows_of(x, x, "log_probs")[0]
    assert row.count == 3 and row.band == 1 and math.isfinite(row.kl)


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


def refuse(*_):
    raise AssertionError("called")


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((refuse, refuse, []), {}, "batches is empty"),
        ((refuse, refuse, (X,)), {}, "batches is a tuple"),
        ((refuse, refuse, {"x": X}), {}, "batches is a dict"),
        ((refuse, 3, [X]), {}, "serve is 3, of type int"),
        ((refuse, "bf16", [X]), {}, "program=lambda recipe"),
        ((refuse, refuse, [X]), {"outputs": "logprobs"}, "Did you mean 'log_probs'"),
        ((refuse, refuse, [X]), {"batch_size": 0}, "batch_size=0"),
        ((refuse, refuse, [X]), {"batch_size": 3}, "a divisor of the number of examples"),
        ((refuse, refuse, [jnp.ones(())]), {"shift": 1}, "along the first axis"),
        (
            (lambda x: {"a": x, "b": x}, lambda x: x, [X]),
            {},
            "The training program returns float32[4, 16], float32[4, 16]",
        ),
        ((lambda x: x.astype(int), lambda x: x, [X]), {}, "training program returns int32[4, 16]"),
        (
            (lambda x: x, lambda x: x[1:], [X]),
            {},
            "float32[4, 16], and the serving program float32[3, 16]",
        ),
        (
            (lambda x: x[0], lambda x: x[0], [X]),
            {"outputs": "logits"},
            "Return one array of logits",
        ),
    ],
)
def test_bad_input_raises_before_anything_is_computed(arguments, options, text):
    with pytest.raises(ValidationError) as error:
        jaxmp.parity(*arguments, **options)
    assert text in str(error.value)


def test_a_nan_of_one_program_is_an_error():
    with pytest.raises(ValidationError, match=r"batch 0 at \(0, 0\).*locate_nonfinite"):
        jaxmp.parity(lambda x: x, lambda x: x.at[0, 0].set(jnp.nan), [X])


def test_assert_parity():
    report = jaxmp.assert_parity(head, jax.jit(head), [(W, X)])
    assert report.cause is None and report.rows[0].band == 1 and report.rows[0].difference == 0
    with pytest.raises(ValidationFailedError, match="of the outputs have a ratio") as error:
        jaxmp.assert_parity(head, in_bf16, [(W, X)])
    assert "first difference" in str(error.value)
    jaxmp.assert_parity(head, rounded, [(W, X)], band=(0.95, 1.05), share=0.9)
    with pytest.raises(ValidationError, match=r"band=\(0.9, 1.1\)"):
        jaxmp.assert_parity(refuse, refuse, [X], band=(0.9, 1.1))
