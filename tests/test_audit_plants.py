"""The audit by data flow: planted defects with their fixes, healthy steps, and where both end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import audit_decisions
import audit_healthy
import jaxmp
from audit_plants import BF16, F16, F32, audit_problem, error_of, error_problem, planted
from gpu_compiler import has_compiler
from grids import fast_cases
from jaxmp import audit, autocast

W = jax.ShapeDtypeStruct((64, 64), F32)
X = jax.ShapeDtypeStruct((16, 64), F32)
X16 = jax.ShapeDtypeStruct((16, 64), BF16)
SCALE = jaxmp.StaticLossScale(2.0**12)
SCALAR = jax.ShapeDtypeStruct((), F32)

# The planted mistakes promote implicitly.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")


def loss(w, x, dtype=BF16):
    return jnp.mean((x.astype(dtype) @ w.astype(dtype)).astype(F32) ** 2)


PLANTS = audit_decisions.all_plants()


def checks(fn, *args, **options):
    return audit(fn, *args, **options).counts()


# ---------------------------------------------------------------------------
# Plants
# ---------------------------------------------------------------------------

# One plant of each family.
FAST = (
    "teacher_probabilities",
    "summed_tokens",
    "codebook_usage",
    "linear_attention",
    "lost_epsilon",
    "clipped_values",
    "count_of_tokens",
    "quantized_matmul",
    "absolute_errors",
    "log_of_a_gate",
    "decayed_copies",
    "chunks_of_rows",
    "router_with_noise",
    "critic",
)


@pytest.mark.parametrize("case", PLANTS, ids=lambda case: case.name)
@fast_cases(*FAST)
def test_a_planted_defect_is_found_at_its_line_and_its_fix_removes_it(case):
    if case.target and not has_compiler():
        pytest.skip("XLA's GPU compiler is not installed")
    assert audit_problem(case) == ""


@pytest.mark.parametrize("case", [c for c in PLANTS if c.repeats], ids=lambda case: case.name)
@fast_cases("lost_epsilon", "log_of_a_gate")
def test_the_fix_brings_the_results_closer_to_fp64(case):
    assert error_problem(case) == ""


def test_errors_are_relative_and_nan_is_the_largest():
    exact = jnp.array([4.0, -8.0])
    assert error_of(jnp.array([4.0, -6.0]), exact) == 0.25
    assert error_of(jnp.array([4.0, jnp.nan]), exact) == float("inf")


@pytest.mark.parametrize("name", audit_healthy.STEPS)
@fast_cases("loss_scale_by_hand_in_float16", "state_space_layer", "lookahead")
def test_a_healthy_step_has_no_false_error(name):
    build, recipe = audit_healthy.STEPS[name]
    fn, args = build()
    assert not audit(fn, *args, recipe=recipe).errors


def in_shard_map(fn):
    """Returns a function in which all arrays vary over a mesh axis, whose results are sums."""
    mapped = lambda *args: lax.psum(fn(*lax.pcast(args, "i", to="varying")), "i")
    return jax.shard_map(mapped, mesh=jax.make_mesh((1,), ("i",)), in_specs=P(), out_specs=P())


@pytest.mark.parametrize("name", ["norm_of_scaled_gradients", "warmup_by_steps", "absolute_errors"])
def test_casts_to_varying_values_hide_no_defect(name):
    case = next(case for case in PLANTS if case.name == name)
    fn, args = planted(case)
    assert checks(in_shard_map(fn), *args) == checks(fn, *args)


def test_casts_to_varying_values_make_no_false_error():
    build, recipe = audit_healthy.STEPS["recipe_in_float16"]
    fn, args = build()
    assert audit(in_shard_map(fn), *args, recipe=recipe).ok


@pytest.mark.parametrize("fn", audit_decisions.NEIGHBORS)
def test_a_result_that_decides_nothing_may_be_rounded(fn):
    assert audit(fn, *audit_decisions.OPERANDS, recipe="bf16").ok


# ---------------------------------------------------------------------------
# Forward pass, backward pass and optimizer
# ---------------------------------------------------------------------------

OUTSIDE = {
    "softmax_16bit": lambda x: jax.nn.softmax(x.astype(BF16)),
    "loss_16bit": lambda x: jax.nn.log_softmax(x.astype(BF16)),
    "reduction_16bit": lambda x: jnp.cumsum(x.astype(BF16), axis=1),
    "norm_16bit": lambda x: lax.rsqrt(jnp.mean(x.astype(BF16) ** 2, -1) + 1e-6),
    "mixed_operands": lambda x: jnp.dot(x.astype(BF16), x.T),
    "fp32_matmul": lambda x: x @ x.T,
}


@pytest.mark.parametrize("check", OUTSIDE)
@pytest.mark.parametrize("is_after", [False, True])
def test_errors_before_the_gradient_and_after_the_update_are_of_the_function_alone(check, is_after):
    fn = OUTSIDE[check]

    def step(w, x):
        first = () if is_after else fn(x)
        w = w - 0.1 * jax.grad(loss)(w, x)
        return w, fn(x @ w if check != "fp32_matmul" else w) if is_after else first

    alone = {f.check for f in audit(fn, X, recipe="bf16").errors}
    errors = {f.check for f in audit(step, W, X, recipe="bf16").errors}
    assert check in alone and alone <= errors


def test_a_note_gives_the_share_of_the_optimizers_matmuls():
    def step(w, x):
        grads = jax.grad(loss)(w, x)
        return w - 0.1 * grads @ grads.T @ grads, w.astype(BF16) @ w.astype(BF16)

    report = audit(step, W, X, recipe="bf16")
    assert report.ok
    total = 2 * 64**3
    share = 2 * total / (2 * total + total + 4 * 16 * 64 * 64)
    (note,) = [note for note in report.notes if "optimizer" in note]
    assert f"({share:.1%} of the FLOPs)" in note and "test_audit_plants.py:" in note


def test_a_note_names_what_is_not_reported_in_the_optimizer():
    def step(w, x):
        grads = jax.grad(loss)(w, x).astype(BF16)
        return w - 0.1 * jnp.exp(grads).astype(F32)

    report = audit(step, W, X, recipe="bf16")
    assert report.ok
    assert any(note.startswith("exp_16bit at test_audit_plants.py:") for note in report.notes)


def evolved(params, key, x):
    noise = jax.random.normal(key, (8, params.size))
    score = lambda n: jnp.mean(autocast(jnp.matmul, "bf16")(x, params + n.reshape(64, 64)))
    return params + 0.1 * (noise.T @ jax.vmap(score)(noise)).reshape(64, 64)


def with_statistics(state, _, x):
    """A codebook, and statistics of activations for a preconditioner, inside of the loss."""

    def loss_fn(w):
        outputs = autocast(jnp.matmul, "bf16")(x, w).astype(F32)
        one_hot = jax.nn.one_hot(outputs.argmax(1), 64)
        codes = 0.9 * state["codes"] + 0.1 * one_hot.T @ outputs
        return jnp.mean(outputs**2), (codes, 0.9 * state["kron"] + (-x / 16).T @ x)

    grads, (codes, kron) = jax.grad(loss_fn, has_aux=True)(state["w"])
    return {"w": state["w"] - 0.1 * grads, "codes": codes, "kron": kron}


@pytest.mark.parametrize(
    ("step", "state", "is_ok"),
    [
        (evolved, W, True),
        (with_statistics, dict.fromkeys(("w", "codes", "kron"), W), True),
        # A model in FP32: a layer with a residual, and a loss of correlations.
        (lambda w, _, x: w + jnp.tanh(w @ w.T) @ w, W, False),
        (lambda w, _, x: w + jnp.sum(((x * w[0]).T @ x) ** 2) * jnp.tanh(w), W, False),
        (lambda w, _, x: w - jax.grad(lambda w: jnp.sum(((x * w[0]).T @ x) ** 2))(w), W, False),
    ],
)
def test_updates_without_gradients_are_not_the_models(step, state, is_ok):
    assert audit(step, state, jax.random.key(0), X, recipe="bf16").ok is is_ok


def test_a_measurement_of_gradients_is_not_the_optimizers():
    def step(w, x):
        grads = jax.grad(loss)(w, x)
        return w - 0.1 * grads, grads @ grads.T

    assert checks(step, W, X, recipe="bf16") == {"fp32_matmul": 1}


def test_a_16_bit_norm_of_gradients_is_reported_although_the_update_reads_it():
    def step(w, x):
        grads = jax.grad(loss)(w, x)
        half = grads.astype(F16)
        norm = jnp.sqrt(jnp.sum(half * half)).astype(F32)
        return w - 0.1 * grads / norm

    assert checks(step, W, X, recipe="bf16") == {"norm_16bit": 1}


# ---------------------------------------------------------------------------
# State and recurrences
# ---------------------------------------------------------------------------


def test_state_of_a_training_step():
    def step(w, state, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        mean = 0.9 * state["mean"] + (0.1 * value).astype(state["mean"].dtype)
        return w - 0.1 * grads, {"mean": mean, "steps": state["steps"] + 1}

    half, count = jax.ShapeDtypeStruct((), BF16), jax.ShapeDtypeStruct((), jnp.int32)
    (finding,) = audit(step, W, {"mean": half, "steps": count}, X).errors
    assert finding.check == "accumulator_16bit" and "changes below 2**-9" in finding.message
    (finding,) = audit(step, W, {"mean": SCALAR, "steps": half}, X).errors
    assert "stops at 256" in finding.message and "jnp.zeros((), jnp.int32)" in finding.fix
    assert checks(step, W, {"mean": SCALAR, "steps": count}, X) == {}


def test_state_of_a_program_that_trains_nothing():
    half = jax.ShapeDtypeStruct((4,), BF16)
    add = lambda total, x: {"total": total["total"] + x.astype(total["total"].dtype)}
    assert checks(add, {"total": half}, jax.ShapeDtypeStruct((4,), F32)) == {"accumulator_16bit": 1}
    assert checks(add, {"total": jax.ShapeDtypeStruct((4,), F32)}, half) == {}
    # A residual stream is not a state.
    assert checks(lambda x, y: x + y, half, half) == {}


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (lambda h, u: h * 0.99 + u, 1),
        (lambda h, u: h + 0.01 * (u - h), 1),
        (lambda h, u: jnp.where(u > 0, 0.99 * h + u, h), 1),
        # A gate that depends on the carry, a factor without a sum, and a short memory.
        (lambda h, u: jax.nn.relu(h) * h + u, 0),
        (lambda h, u: h * 0.99, 0),
        (lambda h, u: h * 0.5 + u, 0),
        (lambda h, u: h * (1 - jnp.tanh(h)) + jnp.tanh(h) * u, 0),
        # Running sums of a beam search and of the algorithms of Viterbi and Baum; no sums.
        (lambda h, u: lax.top_k((h[None] + u[:, None]).reshape(-1), 4)[0], 1),
        (lambda h, u: jnp.maximum(h, h.max()) + u, 1),
        (lambda h, u: jax.nn.logsumexp(h.astype(F32)).astype(u.dtype) + u, 1),
        (lambda h, u: jnp.logaddexp(h, h[0]) + u, 1),
        (lambda h, u: jax.nn.relu(h + u), 0),
        (lambda h, u: jnp.maximum(h, u) - jax.nn.logsumexp(h.astype(F32)).astype(u.dtype), 0),
    ],
)
def test_linear_recurrences(body, count):
    def run(check, dtype=BF16):
        rows = jax.ShapeDtypeStruct((256, 4), dtype)
        fn = lambda us: lax.scan(lambda h, u: (body(h, u), None), jnp.zeros(4, dtype), us)[0]
        return checks(fn, rows).get(check, 0)

    assert run("accumulator_16bit") + run("reduction_16bit") == count
    assert run("accumulator_16bit", F32) == run("reduction_16bit", F32) == 0


def test_loops_with_keys_and_counters_among_their_carries():
    def fn(us, key):
        def body(carry, u):
            key, count, total = carry
            key, _ = jax.random.split(key)
            return (key, count + 1, 0.99 * total + u), None

        return lax.scan(body, (key, 0, jnp.zeros(4, BF16)), us)[0][2]

    rows = jax.ShapeDtypeStruct((64, 4), BF16)
    assert checks(fn, rows, jax.random.key(0)) == {"accumulator_16bit": 1}


def test_short_loops_are_not_recurrences():
    fn = lambda us: lax.scan(lambda h, u: (h * 0.99 + u, None), jnp.zeros(4, BF16), us)[0]
    assert checks(fn, jax.ShapeDtypeStruct((4, 4), BF16)) == {}


def add_rows(total, row):
    return total.at[row[1]].add(row[0]), None


def set_rows(total, row):
    return total.at[row[1]].set(total[row[1]] + row[0]), None


def diagonals(matrix, row):
    return matrix, jnp.diag(matrix * row[0])


def one_pass(x):
    return jnp.mean(x * x, 0) - jnp.mean(x, 0) ** 2


def inverse_root(variance):
    return lax.rsqrt(variance.astype(F32) + 1e-5)


def loss_of_difference(term):
    return jax.grad(lambda m: term(m[0] - m[1]).sum().astype(F32))


def ball_radius(x):
    """Returns the hyperbolic distance of a point in the unit ball from its origin."""
    return jnp.arccosh(2 / (1 - jnp.sum(x**2)) - 1)


def integer_sums(x, dtype):
    codes = x.astype(jnp.int8)
    return lax.dot(codes.T, codes, preferred_element_type=jnp.int32).astype(dtype)


FREQUENCIES = 1e4 ** (-jnp.arange(32) / 32)
ROWS = jax.ShapeDtypeStruct((600, 4), BF16)
INDICES = jnp.zeros(600, jnp.int32)


@pytest.mark.parametrize(
    ("fn", "check"),
    [
        (lambda m: lax.scan(add_rows, jnp.zeros((4, 4), BF16), (m, INDICES)), "reduction_16bit"),
        (lambda m: lax.scan(set_rows, jnp.zeros((4, 4), BF16), (m, INDICES)), "reduction_16bit"),
        (lambda m: lax.scan(lambda c, r: (c + r + r, None), m[0], m), "reduction_16bit"),
        (lambda m: lax.scan(lambda c, r: (c + 1, None), m[0], m), "reduction_16bit"),
        (lambda m: lax.scan(lambda c, r: (c + 1, None), jnp.zeros(4, BF16), m), "reduction_16bit"),
        (lambda m: lax.fori_loop(0, 256, lambda i, c: c - 1, jnp.zeros(4, BF16)), None),
        (lambda m: lax.fori_loop(0, 9, lambda i, c: c + 1, 0 - m), "reduction_16bit"),
        (
            lambda m: lax.fori_loop(0, 20, lambda i, c: c + 0.1, jnp.zeros(4, BF16)),
            "reduction_16bit",
        ),
        (jax.grad(lambda m: lax.scan(diagonals, m[:4], m)[1].sum()), "reduction_16bit"),
        (lambda m: lax.scan(lambda c, r: (c + jnp.tanh(c) + r, None), m[0], m), None),
        (lambda m: lax.associative_scan(jnp.add, m), "accumulator_16bit"),
        (lambda m: inverse_root(one_pass(m)), "norm_16bit"),
        (lambda m: inverse_root(one_pass(m.astype(F32))), None),
        (lambda m: m / one_pass(m), "norm_16bit"),
        (jax.grad(lambda m: one_pass(m).sum().astype(F32)), "norm_16bit"),
        (jax.grad(lambda m: one_pass(m.astype(F32)).sum()), None),
        (loss_of_difference(lambda d: jnp.maximum(0.9 * d, -0.1 * d)), "loss_16bit"),
        (loss_of_difference(lambda d: jnp.where(d > 0, 0.9 * d, -0.1 * d)), "loss_16bit"),
        (loss_of_difference(lambda d: jnp.maximum(d, 0)), None),
        (lambda m: jnp.cos(m[:, :1].astype(F32) * FREQUENCIES.astype(BF16)), "rounded_input"),
        (lambda m: jnp.cos(m[:, :1].astype(F32) * FREQUENCIES), None),
        (
            lambda m: jnp.exp(lax.complex(*2 * [FREQUENCIES.astype(BF16).astype(F32)])).imag,
            "rounded_input",
        ),
        (lambda m: jnp.exp(1j * FREQUENCIES.astype(BF16)).imag, "rounded_input"),
        (lambda m: jnp.exp(1j * m[:, :1].astype(F32) * FREQUENCIES), None),
        (lambda m: m[:, :1] * jnp.sqrt(1 - FREQUENCIES.astype(BF16)), "rounded_input"),
        (lambda m: m[0, 0] * jnp.arccos(FREQUENCIES.astype(BF16)), "rounded_input"),
        (lambda m: m * ball_radius(FREQUENCIES.astype(BF16).astype(F32)), "rounded_input"),
        (lambda m: m.astype(F32) * ball_radius(FREQUENCIES), None),
        (lambda m: jnp.sin(m.astype(F16)).astype(BF16) * 2, "float16_range"),
        (lambda m: m.astype(F16).astype(BF16) * 2, "float16_range"),
        (lambda m: integer_sums(m, F16), "float16_range"),
        (lambda m: integer_sums(m, F32), None),
        (lambda m: 0.999 * m + 0.001 * m, None),
        (lambda m: (m @ m.T - jnp.diag(m @ m.T)).astype(F32), "rounded_output"),
        (lambda m: (m @ m.T - jnp.diag(jnp.diag(m @ m.T))).astype(F32), None),
        (lambda m: jnp.linalg.cholesky((m @ m.T).astype(F32)), "rounded_output"),
        (
            lambda m: jnp.linalg.inv(jnp.exp(m[:4].astype(F32)).astype(BF16).astype(F32)),
            "rounded_output",
        ),
        (lambda m: lax.top_k(m + jnp.log(m.astype(F32)).astype(BF16), 2)[1], "loss_16bit"),
        (lambda m: jnp.sort(m.astype(F32).astype(BF16)), None),
    ],
)
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")
def test_defects_in_parts_of_programs(fn, check):
    counts = checks(fn, ROWS)
    assert check in counts if check else counts == {}


def test_averages_of_bare_arrays_and_masters_that_a_step_rounds():
    half = jax.ShapeDtypeStruct((64, 64), BF16)
    average = lambda e, p: 0.9999 * e + 0.0001 * p.astype(BF16)
    assert checks(average, half, W) == {"accumulator_16bit": 1}
    update = lambda w, x: w - 0.1 * jax.grad(loss)(w, x)
    assert checks(lambda w, x: update(w, x).astype(BF16).astype(F32), W, X) == {"missing_master": 1}
    assert checks(update, W, X) == {}


def test_a_gradient_inside_of_a_loss_has_its_own_scale():
    value = lambda w, x: loss(w, x, F16)
    state = jax.ShapeDtypeStruct((), F32)

    def severities(inner):
        def outer(w, scale, x):
            return scale * jnp.sum(inner(w, x) ** 2)

        step = lambda w, scale, x: w - 0.1 * jax.grad(outer)(w, scale, x) / scale
        found = audit(step, W, state, X).findings
        return [f.severity for f in found if f.check == "missing_loss_scale"]

    scaled = lambda w, x: jax.grad(lambda x: 4096.0 * value(w, x))(x) / 4096.0
    assert severities(lambda w, x: jax.grad(value, 1)(w, x)) == ["warning"]
    assert severities(scaled) == []
    slope = jaxmp.grad(value, 1, loss_scale=SCALE)
    for inner in (slope, jax.vmap(slope, (None, 0)), jax.jit(jax.vmap(slope, (None, 0)))):
        assert severities(inner) == []
    # The scale is a constant of a jitted function, and one for each row.
    for scale in SCALE, jaxmp.StaticLossScale(1000.0):
        of_row = jaxmp.grad(value, loss_scale=scale)
        rows = lambda w, x, of_row=of_row: w - 0.1 * jax.vmap(of_row, (None, 0))(w, x)[0]
        assert checks(jax.jit(rows), W, X) == {}


def test_a_loss_may_select_log_probabilities_in_fp32():
    """Under autocast too, which the fix of an FP32 matmul would be."""

    def loss_fn(w, x):
        logits = jnp.matmul(x, w.astype(x.dtype), preferred_element_type=F32)
        one_hot = jax.nn.one_hot(jnp.arange(20), 64)
        log_p = jnp.einsum("btk,nk->btn", jax.nn.log_softmax(logits), one_hot)
        return -jax.nn.logsumexp(log_p, -1).mean()

    def matmuls(fn):
        findings = audit(jax.grad(fn), w, jnp.ones((4, 8, 16), BF16), recipe="bf16").findings
        return [f for f in findings if f.check == "fp32_matmul"]

    w = jnp.ones((16, 64))
    assert not matmuls(loss_fn) and not matmuls(autocast(loss_fn, "bf16"))
    # A selection of weights is a lookup.
    (lookup,) = matmuls(lambda w, x: (jax.nn.one_hot(jnp.arange(8), 16) @ w).std())
    assert lookup.count == 2


def test_a_matrix_that_is_factorized_and_a_router_may_be_fp32():
    def factor(x):
        rows = jnp.tanh(x.astype(BF16)).astype(F32)
        return jnp.linalg.cholesky(rows @ rows.T + jnp.eye(16))

    def route(x):
        rows = jnp.tanh(x.astype(BF16)).astype(F32)
        return jax.nn.softmax(lax.top_k(rows @ x.T[:, :8], 2)[0]).astype(BF16).astype(F32).max()

    def updated(c, covariance, x, y):
        gain = covariance @ c.T @ jnp.linalg.inv(c @ covariance @ c.T)
        return x + (y - x @ c.T) @ gain.T

    assert checks(factor, X) == checks(route, X) == checks(jax.grad(route), X) == {}
    rows, half = jax.ShapeDtypeStruct((16, 16), F32), jax.ShapeDtypeStruct((16, 16), BF16)
    assert checks(updated, X, W, X, half) == checks(updated, X, W, X, rows, recipe="bf16") == {}


# ---------------------------------------------------------------------------
# float16, integers and losses
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda x: 1 / (x + 1e-8), 1),
        (lambda x: x / jnp.maximum(jnp.abs(x).max(), 1e-8), 1),
        (lambda x: 1 / (x + 1e-3), 0),
        (lambda x: jnp.einsum("ij,ij->i", x, x), 1),
        (lambda x: jnp.where(x > 0, x, -1e9), 1),
        (lambda x: jnp.where(x > 0, x, -6e4), 0),
        (lambda x: jnp.where(x > 0, x, -jnp.inf), 0),
        pytest.param(lambda x: x - 1e9, 1, marks=pytest.mark.filterwarnings("ignore:overflow")),
        (lambda x: jnp.sum(x * x), 1),
        (lambda x: jnp.sum(x * (x + 1)), 0),
    ],
)
def test_the_range_of_float16(fn, count):
    with jax.numpy_dtype_promotion("standard"):
        found = [
            checks(lambda x: fn(x).astype(F32), jax.ShapeDtypeStruct((8, 8), dtype))
            for dtype in (F16, BF16)
        ]
    assert [counts.get("float16_range", 0) for counts in found] == [count, 0]


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda x, n: jnp.arange(300, dtype=BF16), 1),
        (lambda x, n: jnp.arange(257, dtype=BF16), 0),
        (lambda x, n: jnp.arange(300).astype(BF16), 1),
        (lambda x, n: (jnp.arange(300) * 2 % 4).astype(BF16), 0),
        (lambda x, n: jnp.concatenate([jnp.arange(9), jnp.arange(300)]).astype(BF16), 1),
        (lambda x, n: (2 ** jnp.arange(12)).astype(BF16), 0),
        (lambda x, n: (x > 0).sum().astype(BF16), 1),
        (lambda x, n: (x > 0).astype(BF16), 0),
        (lambda x, n: jax.nn.one_hot(x[:, 0].astype(int), 8).sum(0).astype(BF16), 0),
        (lambda x, n: n.astype(BF16), 1),
        (lambda x, n: (n % 100).astype(BF16), 0),
    ],
)
def test_integers_in_16_bits(fn, count):
    counts = checks(fn, X, jax.ShapeDtypeStruct((), jnp.int32))
    assert counts.get("rounded_integer", 0) == count


def test_a_rounded_loss_is_reported_if_it_is_returned():
    def value(w, x):
        return jnp.mean(jnp.abs(x.astype(BF16) @ w.astype(BF16))).astype(F32)

    assert checks(jax.value_and_grad(value), W, X).get("loss_16bit") == 1
    assert "loss_16bit" not in checks(jax.grad(value), W, X)


def test_a_step_may_return_a_key():
    step = lambda key, x: (jax.random.split(key, 1)[0], jnp.mean(x))
    assert checks(step, jax.random.key(0), X) == {}


def test_probabilities_without_a_logarithm_may_be_rounded():
    gates = lambda x: jax.nn.sigmoid(x.astype(BF16)).astype(F32)
    assert checks(gates, X) == {}
    for fn in (jnp.log, jnp.log2, jnp.arctanh, lambda p: jnp.log1p(-p), jax.scipy.special.logit):
        assert checks(lambda x, fn=fn: fn(gates(x)), X) == {"log_of_rounded": 1}
        harmless = lambda x, fn=fn: fn(jnp.clip(0.1 + 0.5 * gates(x), 0.1, 0.6))
        assert checks(harmless, X) == {}


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F32, BF16)])
def test_a_rounded_random_number_before_a_logarithm(dtypes):
    draw = lambda key: jax.random.uniform(key, (8,), dtypes[0]).astype(dtypes[1])
    (error,) = audit(
        lambda key: -jnp.log(-jnp.log(draw(key).astype(F32))), jax.random.key(0)
    ).errors
    assert "a uniform random number that is rounded" in error.message
    assert "jax.random.uniform(key, (8,), jnp.float32)" in error.fix or dtypes[0] == F32


def own_layer(x):
    """An FP32 layer of the author, whose cotangent is cast up from 16 bits."""
    return jax.grad(lambda x: loss(x, (x @ x.T @ x).astype(BF16)))(x)


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (lambda x, n: jnp.log(F32(jnp.diff(BF16(x)))), ["rounded_input"]),
        (lambda x, n: BF16(x) - jnp.floor(BF16(x)), ["rounded_input"]),
        (lambda x, n: jnp.sin(F32(BF16(n))), ["rounded_input"]),
        (lambda x, n: jax.grad(lambda x: jnp.cumprod(BF16(x)).sum())(x[0]), ["reduction_16bit"]),
        (lambda x, n: (F32(jnp.diff(BF16(x))) ** 2, x @ (1j * x), own_layer(x)), []),
    ],
)
def test_arguments_layers_and_products_in_16_bits(fn, names):
    assert list(checks(fn, W, jax.ShapeDtypeStruct((16,), jnp.int32))) == names


KEPT = 0.999


@pytest.mark.parametrize(
    ("fn", "severities"),
    [
        (lambda u: u(8, BF16) < 0.999, ["error"]),
        (lambda u: jnp.where(u(8, BF16) >= 0.001, 1, 0), ["error"]),
        (lambda u: jnp.floor(0.999 + u(8, BF16)) / 0.999, ["error"]),
        (lambda u: lax.map(lambda x: 1 - u(8, BF16) < 0.999 * x, jnp.ones(3, BF16)), ["error"]),
        (lambda u: (u(8, F16) * 3000).astype(int), ["error"]),
        (lambda u: jnp.argsort(u((2, 196), BF16)), ["error"]),
        # The constant is rounded before it is compared. It may also be 1.
        (lambda u: jnp.floor(KEPT + u(8, BF16)), ["note"]),
        (lambda u: u(8).astype(BF16) < 0.999, ["error"]),
        (lambda u: u(8).astype(BF16) < u(()).astype(BF16), ["warning"]),
        (lambda u: u(8, BF16) < u((), F32).astype(BF16), ["warning"]),
        (lambda u: (u(8).astype(BF16) < 1e-5, u(8) < 1.0, u(8, BF16) > 0, u(8, F16) < 0.999), []),
        (lambda u: (jnp.floor(0.99 + u(8).astype(F16)), jnp.floor(u(8, BF16) * 10)), []),
        (lambda u: (jax.nn.leaky_relu(u(8, BF16)), jnp.argsort(u((8, 196), BF16), axis=0)), []),
    ],
)
def test_outcomes_of_random_numbers(fn, severities):
    draw = lambda key: fn(lambda shape, *dtype: jax.random.uniform(key, shape, *dtype))
    findings = audit(draw, jax.random.key(0)).findings
    assert [each.severity for each in findings if each.check == "random_16bit"] == severities


def test_draws_of_a_probability_in_16_bits():
    fn = lambda key, x, mode: jax.random.bernoulli(key, jax.nn.sigmoid(x), mode=mode)
    findings = lambda mode: audit(lambda key, x: fn(key, x, mode), jax.random.key(0), X16).findings
    assert "bernoulli(key, jax.nn.sigmoid(x).astype(jnp.float32)" in findings("low")[0].fix
    assert not findings("high")


def rounded(fn, dtype):
    return lambda x: fn(x.astype(F32)).astype(dtype)


def distance(outputs, square=jnp.square):
    return lambda x, y: (
        square(outputs(x) - lax.stop_gradient(outputs(y))).sum(-1).mean().astype(F32)
    )


def with_values(weights):
    """Returns a loss whose weights multiply values, as those of attention."""
    return lambda x, y: jnp.square(
        lax.dot(weights(x), y.astype(BF16), preferred_element_type=F32) - y
    ).mean()


def steps_in_time(dtype):
    def loss(x, y):
        values = jnp.exp(x.mean(-1)).astype(dtype).astype(F32)
        return jnp.square(y[1:, 0] + values[1:] - values[:-1]).mean()

    return loss


def chosen(dtype):
    def loss(x, y):
        logits = lax.dot(x.astype(BF16), y.astype(BF16), preferred_element_type=F32)
        return -jax.nn.log_softmax(logits.astype(dtype).astype(F32))[:, 0].mean()

    return loss


PAIR = jax.ShapeDtypeStruct((64, 64), F32)
# name -> the loss for a dtype to which probabilities or similar values are rounded.
DIFFERENCES = {
    "softmax": lambda dtype: distance(rounded(jax.nn.softmax, dtype)),
    "distance": lambda dtype: distance(rounded(jax.nn.softmax, dtype), jnp.abs),
    "wide again": lambda dtype: distance(lambda x: rounded(jax.nn.sigmoid, dtype)(x).astype(F32)),
    "focal": lambda dtype: lambda x, y: jnp.square(1 - rounded(jax.nn.sigmoid, dtype)(x)).mean(),
    "cumulative": lambda dtype: distance(
        lambda x: jnp.cumsum(rounded(jax.nn.softmax, dtype)(x).astype(F32), -1)
    ),
    "steps in time": steps_in_time,
    "logits": chosen,
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_values_that_are_rounded_before_a_difference(name):
    case = DIFFERENCES[name]
    report = audit(jax.grad(case(BF16)), PAIR, PAIR)
    assert {error.check for error in report.errors} == {"loss_16bit"}
    assert all("do not round to 16 bits" in error.fix for error in report.errors)
    assert audit(jax.grad(case(F32)), PAIR, PAIR).ok


def sizes_of_boxes(outputs):
    boxes = jax.nn.sigmoid(outputs).astype(F32)
    return jnp.square(jnp.minimum(boxes[:, 32:], 0.9) - boxes[:, :32]).mean()


def soft_ranks(outputs):
    scores = outputs[:, 0].astype(F32)
    return jnp.square(jax.nn.sigmoid(10 * (scores[:, None] - scores[None])).sum(-1)).mean()


def cross_entropy(outputs):
    logits = outputs[:, 0].astype(F32)
    return (jnp.log1p(jnp.exp(-jnp.abs(logits))) + jnp.maximum(logits, 0) - logits).mean()


@pytest.mark.parametrize("loss", [sizes_of_boxes, soft_ranks, cross_entropy])
def test_differences_within_a_rounded_result(loss):
    def checks_of(dtype):
        matmul = lambda x, y: lax.dot(x.astype(BF16), y.astype(BF16), preferred_element_type=dtype)
        return checks(jax.grad(lambda x, y: loss(matmul(x, y))), PAIR, PAIR)

    assert checks_of(BF16) == {"rounded_output": 1}
    assert "rounded_output" not in checks_of(F32)


@pytest.mark.parametrize(
    "weights",
    [
        rounded(jax.nn.softmax, BF16),
        lambda x: jnp.where(x > -1, rounded(jax.nn.softmax, BF16)(x) / 0.9, 0),
        # A gate, and the estimate of a straight-through gradient.
        lambda x: (1 - rounded(jax.nn.sigmoid, BF16)(x)) * x.astype(BF16),
        lambda x: x.astype(BF16) + rounded(jnp.tanh, BF16)(x) - rounded(jnp.tanh, BF16)(x),
    ],
)
def test_rounded_weights_of_a_matmul_are_not_reported(weights):
    assert audit(jax.grad(with_values(weights)), PAIR, PAIR).ok


def test_noise_and_targets_may_be_rounded():
    def loss(x, y):
        noise = jax.random.normal(jax.random.key(0), x.shape).astype(BF16).astype(F32)
        outputs = lax.dot(x.astype(BF16), y.astype(BF16), preferred_element_type=F32)
        # The logarithm is a number.
        bits = (jnp.tanh(outputs).astype(BF16) / jnp.log(2.0).astype(BF16)).astype(F32)
        errors = jnp.square(outputs - noise).mean() + jnp.abs(outputs - y.astype(BF16)).mean()
        return errors + bits.mean()

    assert audit(jax.grad(loss), PAIR, PAIR).ok


# ---------------------------------------------------------------------------
# Loss scales
# ---------------------------------------------------------------------------


def scaled_step(use):
    return lambda w, scale, x: use(w, jax.grad(lambda w: scale * loss(w, x, F16))(w), scale)


def clipped(grads):
    return grads * jnp.minimum(1.0, 1.0 / (jnp.sqrt(jnp.sum(grads**2)) + 1e-6))


@pytest.mark.parametrize(
    ("use", "count"),
    [
        (lambda w, g, s: w - 0.1 * g / s, 0),
        (lambda w, g, s: w - 0.1 * (g * (1 / s)), 0),
        (lambda w, g, s: w - 0.1 * clipped(g / s), 0),
        (lambda w, g, s: w - 0.1 * clipped(g) / s, 1),
        (lambda w, g, s: w - 0.1 * g / s / s, 1),
        (lambda w, g, s: w - 0.1 * g, 1),
        (lambda w, g, s: (w - 0.1 * g / s, jnp.sum(g**2)), 1),
        (lambda w, g, s: (w - 0.1 * g / s, jnp.sum((g / s) ** 2)), 0),
        (lambda w, g, s: (w - 0.1 * g / s, jnp.where(jnp.isfinite(g).all(), s, s / 2)), 0),
        (lambda w, g, s: w - 0.1 * (g.astype(F16) / s.astype(F16)).astype(F32), 1),
        (lambda w, g, s: w - 0.1 * (g * (1 / s)).astype(F16).astype(F32), 1),
        (lambda w, g, s: w - 0.1 * (g.astype(F16) * (1 / s)), 0),
        (lambda w, g, s: ((new := w - 0.1 * g / s), new.astype(F16)), 0),
    ],
)
def test_gradients_and_their_scale(use, count):
    counts = checks(scaled_step(use), W, SCALAR, X)
    assert counts.get("scaled_gradients", 0) == count


def test_a_finding_names_the_first_of_its_arguments():
    """Labels are sorted, because the order of a set is another one in each process."""
    fn = lambda xs: jnp.sin(sum(x.astype(BF16) for x in xs)).astype(F32)
    assert {f.message[:16] for f in audit(fn, 32 * [X]).findings} == {"argument [0][0] "}


@pytest.mark.parametrize(
    ("scale", "unscale", "found"),
    [
        (jnp.exp2, lambda g, k: clipped(g * jnp.exp2(-k)), set()),
        (lambda k: 2.0**k, lambda g, k: clipped(g * 0.5**k), set()),
        (lambda k: 1 << k, lambda g, k: clipped(g / (1 << k)), set()),
        (lambda k: k, lambda g, k: clipped(g / k), set()),
        (lambda k: jnp.where(k < 9, 2.0**10, 2.0**14), lambda g, _: g / 2.0**10, set()),
        (lambda k: 2.0**k, lambda g, k: clipped(g) * 2.0**-k, {"scaled_gradients"}),
        (lambda k: jnp.minimum(1, k / 1000), lambda g, k: g * 0.99**k, {"missing_loss_scale"}),
    ],
)
def test_loss_scales_that_are_computed_from_an_integer(scale, unscale, found):
    def step(w, k, x):
        return w - unscale(jax.grad(lambda w: scale(k) * loss(w, x, F16))(w), k)

    assert set(checks(step, W, jax.ShapeDtypeStruct((), jnp.int32), X)) == found
    if scale is jnp.exp2:
        assert not checks(step, W, SCALAR, X)


@pytest.mark.parametrize(
    ("scale", "unscale", "count"),
    [
        (1024, lambda g: g / 1024, 1),
        (2.0**16, lambda g: g * 2.0**-16, 1),
        (np.float32(1000), lambda g: jnp.where(jnp.isfinite(g), g, 0) / np.float16(1000), 1),
        (1024, lambda g: g.astype(F32) / 1024, 0),
        # Microbatches, and the weight of a term.
        (1024, lambda g: (g / 128).astype(F32) / 1024, 0),
        (10, lambda g: g / 10, 0),
    ],
)
def test_a_loss_scale_that_is_a_constant(scale, unscale, count):
    def step(w, x):
        grads = jax.grad(lambda w: loss(w, x, F16) * scale)(w.astype(F16))
        return w - 0.1 * jax.jit(unscale)(grads).astype(F32)

    assert checks(step, W, X).get("scaled_gradients", 0) == count


def test_the_gradient_of_a_bias_with_one_element_is_no_norm_of_scaled_gradients():
    def scaled(params, x):
        return 256.0 * (loss(params["w"], x, F16) + jnp.sum(params["bias"] ** 2))

    params = {"w": W, "bias": jax.ShapeDtypeStruct((1,), F32)}
    assert "scaled_gradients" not in checks(jax.grad(scaled), params, X)


def test_a_learning_rate_and_a_weight_of_a_loss_are_not_loss_scales():
    def step(w, rate, weight, x):
        value = lambda w: loss(w, x) + weight * jnp.sum(w**2)
        return w - rate * clipped(jax.grad(value)(w)), rate / 2

    assert checks(step, W, SCALAR, SCALAR, X) == {}


def test_a_table_that_is_larger_than_its_lookups_is_not_cast():
    def step(w, tokens):
        rows = lambda w: jnp.sum(w[tokens].astype(BF16).astype(F32) ** 2)
        return jax.grad(rows)(w)

    few, many = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (64, 1024))
    assert "wide_gather" not in checks(step, W, few)
    (note,) = (f for f in audit(step, W, many).findings if f.check == "wide_gather")
    assert note.fix.endswith(":\n    w.astype(jnp.bfloat16)[tokens]") and note.trial == "works"
