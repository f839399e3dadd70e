"""Located origins of values that are not finite: planted faults, their fixes, and healthy steps."""

import ast
import inspect
import itertools
import json
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from grids import fast_cases
from jaxmp._core._compat import cudnn_version
from jaxmp._programs._jaxprs import equations
from jaxmp._programs._locations import Lines
from jaxmp._tools.audit._trace import trace
from jaxmp._tools.nonfinite import NonfiniteReport, _record, _walk
from planted_nonfinite import HEAD, PLANTS
from processes import run_script
from sources import code_of, load_module, replace_expression, text_of
from training_steps import new_state, state_step

BY_NAME = {plant.name: plant for plant in PLANTS}


# The planted programs and their fixes rely on promotion, as user programs do.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")


def loaded(program, folder):
    """Returns the function `make` of a module with this source."""
    return load_module(program, folder).make


def replaced(program, report):
    """Returns a program in which the code of the fix replaces the expression of the line."""
    is_wanted = lambda node: ast.unparse(node) == report.expression
    return replace_expression(program, report.line, is_wanted, code_of(report.fix))


def with_statement(program, variable, code):
    """Returns a program with a statement after the one that computes a variable."""
    pattern = rf"^( *)({variable} = .*)$"
    new = re.sub(r"\bdenominator\b", variable, code)
    return re.sub(pattern, rf"\1\2\n\1{new}", program, count=1, flags=re.MULTILINE)


def fixed(plant, report, folder):
    """Returns the step and the arguments after the printed fix was applied."""
    code, make = code_of(report.fix), loaded(plant.program, folder)
    if plant.repair == "line":
        return loaded(replaced(plant.program, report), folder)()
    names = {"jnp": jnp, "jaxmp": jaxmp, "optax": optax, "learning_rate": 0.1}
    if plant.repair in ("recipe", "tx"):
        names["recipe"] = jaxmp.load_recipe("fp16")
        exec(code, names)
        return make(names[plant.repair])
    if plant.repair == "arguments":
        step, *args = make()
        parameters = list(inspect.signature(step).parameters)
        healthy = jax.tree.map(lambda x: jnp.nan_to_num(x, posinf=1.0), args)
        with jaxmp.checkpoint.Checkpointer(folder / "run") as checkpointer:
            root = parameters.index(re.match(r"\w+", report.argument)[0])
            checkpointer.save(1, healthy[root], recipe="fp32")
            checkpointer.wait()
            names |= {"checkpointer": checkpointer, **dict(zip(parameters, args, strict=True))}
            exec(code, names)
        return step, *(names[parameter] for parameter in parameters)
    return loaded(with_statement(plant.program, plant.repair, code), folder)()


def assert_finite(step, args):
    report = jaxmp.locate_nonfinite(step, *args)
    assert not report.reproduced, report
    results = jax.tree.leaves(step(*args))
    floats = [x for x in results if jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(jnp.isfinite(x).all() for x in floats)


@fast_cases(
    "log of zero",
    "jax#26796: log of a negative number under shard_map",
    "jax#5798: gradient of the unused branch of a where",
    "quotient in a while loop",
    "softmax of a masked row in FP32",
    "range of float16 in one microbatch",
    "unused branch of a where in a rematerialized function",
    "Linen: poisoned parameter",
)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_planted_fault_is_named_and_its_fix_removes_it(name, tmp_path):
    plant = BY_NAME[name]
    step, *args = loaded(plant.program, tmp_path)()
    report = jaxmp.locate_nonfinite(step, *args)
    assert report.reproduced
    assert (report.cause, report.phase) == (plant.cause, plant.phase), report
    assert report.module == plant.module, report
    assert bool(report.text) == report.text.endswith("# fault") == (not plant.argument), report
    assert (report.iteration, report.device) == (plant.iteration, plant.device), report
    assert plant.argument in report.argument
    step, *args = fixed(plant, report, tmp_path)
    assert_finite(step, args)


def test_a_step_whose_gradient_is_not_finite_leaves_no_checkpoint(tmp_path):
    """The story of marin#7271, whose job ended with a poisoned checkpoint."""
    (plant,) = (plant for plant in PLANTS if plant.name.startswith("marin#7271"))
    step, params, x = loaded(plant.program, tmp_path)()
    _, grads = step(params, x)
    poisoned = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    checkpointer = jaxmp.checkpoint.Checkpointer(tmp_path / "run")
    checkpointer.save(1, params, recipe="fp32")
    checkpointer.save(2, poisoned, recipe="fp32")
    with pytest.raises(jaxmp.errors.CheckpointError, match="NaN or infinity in 'down'"):
        checkpointer.close()
    assert checkpointer.all_steps() == [1]
    report = jaxmp.locate_nonfinite(step, checkpointer.restore(params, recipe="fp32"), x)
    assert (report.module, report.phase) == ("w_down", "backward")


NORMALIZED = """
def loss(w, x):
    y = w * x
    y = y / {length}
    return y.sum()

ARGUMENTS = jnp.ones(3), jnp.array([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
"""


@pytest.mark.parametrize(
    "length",
    [
        "jnp.sqrt(jnp.sum(y * y, axis=-1, keepdims=True))",
        "jnp.linalg.norm(y, axis=-1, keepdims=True)",
    ],
)
def test_a_quotient_by_a_root_keeps_the_root_positive(length, tmp_path):
    """A root of zero has an infinite derivative, even if its result is replaced."""
    program = HEAD + NORMALIZED.format(length=length)
    step, *args = loaded(program, tmp_path)()
    report = jaxmp.locate_nonfinite(step, *args)
    assert report.cause == "division_by_zero"
    step, *args = loaded(replaced(program, report), tmp_path)()
    assert_finite(step, args)


# ---------------------------------------------------------------------------
# Healthy steps
# ---------------------------------------------------------------------------


def masked_attention(x, mask):
    logits = jnp.where(mask, x @ x.T, -jnp.inf)
    return (jax.nn.softmax(logits) @ x).sum()


def running_softmax(x):
    def body(carry, row):
        largest, total = carry
        new = jnp.maximum(largest, row.max())
        return (new, total * jnp.exp(largest - new) + jnp.exp(row - new).sum()), None

    (largest, total), _ = lax.scan(body, (-jnp.inf, 0.0), x)
    return largest + jnp.log(total)


def safe_where(x):
    safe = jnp.where(x > 0, x, 1.0)
    return jnp.where(x > 0, jnp.sqrt(safe), 0.0).sum()


def untaken_branch(x):
    return lax.cond(x.sum() > 100, lambda x: jnp.log(x - x), jnp.sin, x).sum()


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID").sum()


def scaled_float16(x):
    y = (x.astype(jnp.float16) * 2).astype(jnp.float32)
    return jnp.mean(y**2)


def with_infinite_constant(x):
    distance = jnp.minimum(x, jnp.inf)
    return jnp.exp(-jnp.inf) + distance.sum()


def unread_log(x):
    ratios = jnp.log(x)
    return jnp.where(jnp.isfinite(ratios), x, 0.0).sum()


def saturated_exponential(x):
    return jnp.tanh(x * 1e30).sum() + jax.nn.logsumexp(x)


X = jnp.array([[1.0, 0.0], [2.0, 3.0]])
HEALTHY = {
    "masked softmax": (masked_attention, X, jnp.array([[True, False], [True, True]])),
    "running softmax": (running_softmax, X),
    "safe where": (safe_where, X),
    "untaken branch": (untaken_branch, X),
    "pooling": (pooled, X),
    "float16": (scaled_float16, X),
    "infinite constant": (with_infinite_constant, X),
    "discarded logarithm": (lambda x: lax.stop_gradient(unread_log(x)) + x.sum(), X),
    "saturated": (saturated_exponential, X),
    "while loop": (lambda x: lax.stop_gradient(lax.fori_loop(0, x.size, jnp.add, x)).sum(), X),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_is_not_reproduced(name):
    loss, *args = HEALTHY[name]
    report = jaxmp.locate_nonfinite(jax.value_and_grad(loss), *args)
    assert not report.reproduced and not report.cause, report
    assert "The step is finite for these arguments" in str(report).replace("\n", " ")


# ---------------------------------------------------------------------------
# Divergence
# ---------------------------------------------------------------------------


def growing(w, x):
    y, _ = lax.scan(lambda y, _: (y @ w, None), x, length=40)
    return y.sum()


def half_cast(w, x):
    return jnp.mean((x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32) * w.sum())


def polynomial(w, x):
    return jnp.sum((w @ x) ** 8)


def squares(w, x):
    return jnp.mean(jnp.square(x @ w.astype(jnp.bfloat16).astype(jnp.float32)))


def weighted(w, x):
    return jnp.sum(w.astype(jnp.bfloat16) * w.astype(jnp.bfloat16)).astype(jnp.float32) * x.sum()


DIVERGED = {
    "recurrence": (growing, jnp.full((2, 2), 50.0), X),
    "float16 weights": (half_cast, jnp.full((2, 2), 3e38), X),
    "polynomial": (polynomial, jnp.full((2, 2), 1e6), X),
    "squares": (squares, jnp.full((2, 2), 1e25), X),
    "bfloat16": (weighted, jnp.full((2, 2), 1e25), X),
}


@pytest.mark.parametrize("name", DIVERGED)
def test_divergence_in_fp32_has_no_other_cause(name):
    loss, *args = DIVERGED[name]
    report = jaxmp.locate_nonfinite(jax.value_and_grad(loss), *args)
    assert report.cause == "diverged", report
    assert "in FP32 overflows too" in report.message
    assert "that" in report.fix and "tx" not in report.fix  # There is no optimizer.


def test_the_fix_of_a_divergence_changes_the_optimizer():
    loss, weights, x = DIVERGED["squares"]
    tx = optax.adam(1.0)

    def step(weights, state, x):
        updates, state = tx.update(jax.grad(loss)(weights, x), state)
        return optax.apply_updates(weights, updates), state

    report = jaxmp.locate_nonfinite(step, weights, tx.init(weights), x)
    assert report.cause == "diverged" and "clip_by_global_norm" in code_of(report.fix)


# ---------------------------------------------------------------------------
# After a skipped step
# ---------------------------------------------------------------------------


def fp16_training(scale, size):
    def loss_fn(params, x):
        y = (x.astype(jnp.float16) @ params["w"].astype(jnp.float16)).astype(jnp.float32)
        return 4 * jnp.mean(y**2)

    state = new_state({"w": jnp.full((4, 4), size)}, "fp16", optax.sgd(1e-3), loss_scale=scale)
    return jax.jit(state_step(loss_fn)), state, jnp.ones((4, 4))


def test_a_skipped_step_is_reproduced_from_the_returned_state():
    step, state, x = fp16_training(jaxmp.DynamicLossScale(2.0**15), 1.0)
    after, _ = step(state, x)
    assert not after.opt_state.stats.last_finite
    report = jaxmp.locate_nonfinite(step, after, x)
    assert report.reproduced and report.cause == "loss_scale"
    assert report.loss_scale == 2.0**15
    assert "The loss scale 32768 is too high" in report.message
    assert "with 16384, the step is finite" in report.message
    # After an applied step, the scale is that of the state.
    applied, _ = step(after, x)
    report = jaxmp.locate_nonfinite(step, applied, x)
    assert not report.reproduced and "loss scale 16384" in report.reason


# Of the second size, the largest passing scale has more digits than `f"{scale:g}"` prints.
@pytest.mark.parametrize("size", [1.0, 2.0**-6])
def test_the_largest_passing_scale_is_exact(size):
    step, state, x = fp16_training(jaxmp.DynamicLossScale(2.0**24), size)
    report = jaxmp.locate_nonfinite(step, state, x)
    scale = float(re.search(r"DynamicLossScale\((\d+)\)", report.fix)[1])
    start = lambda scale: fp16_training(jaxmp.DynamicLossScale(scale), size)[1]
    finite = lambda scale: step(start(scale), x)[0].opt_state.stats.last_finite
    assert finite(scale) and not finite(2 * scale)


@pytest.mark.parametrize("init_scale", [2.0**15, 2.0**16])
def test_no_scale_below_the_minimum_is_suggested(init_scale):
    # 2**14 passes.
    scale = jaxmp.DynamicLossScale(init_scale, min_scale=2.0**15)
    step, state, x = fp16_training(scale, 1.0)
    report = jaxmp.locate_nonfinite(step, state, x)
    assert (report.cause, report.phase) == ("float16_range", "backward"), report


def test_a_forward_overflow_is_not_blamed_on_the_loss_scale():
    step, state, x = fp16_training(jaxmp.DynamicLossScale(2.0**17), 30000.0)
    report = jaxmp.locate_nonfinite(step, state, x)
    assert (report.cause, report.phase) == ("float16_range", "forward"), report
    assert "1.83 times the largest float16 number, 65504" in report.message


def test_a_donated_batch_is_named():
    x = jnp.ones(3)
    jax.jit(lambda x: x * 2, donate_argnums=0)(x)
    with pytest.raises(
        jaxmp.errors.AuditError, match="batch was donated to an earlier call"
    ) as caught:
        jaxmp.locate_nonfinite(lambda batch: jnp.sum(batch), x)
    assert "donate_argnums=0" in code_of(str(caught.value))


def test_an_iterator_with_several_states_is_refused(command, write):
    file = write("def make_step():\n    return print, 1, 2, iter([3])\n", "several.py")
    message = " ".join(command("locate", f"{file}:make_step")[2].split())
    assert "2 states and an iterator of batches" in message
    assert "return train_step, model, optimizer, batch" in message


def test_a_state_may_contain_functions(command, write):
    file = write(
        "import jax.numpy as jnp\n"
        "def make_step():\n"
        "    step = lambda state, x: ((state[0], jnp.log(x)), 0)\n"
        "    return step, (print, jnp.ones(2)), iter([jnp.ones(2), jnp.zeros(2)])\n",
        "functions.py",
    )
    code, out, _ = command("locate", f"{file}:make_step")
    assert code == 1 and "Log of zero" in out


def test_shapes_are_refused(command, write):
    file = write(
        "import jax\nimport jax.numpy as jnp\n"
        "def make_step():\n"
        "    return jnp.add, jnp.ones(2), jax.ShapeDtypeStruct((2,), jnp.float32)\n",
        "shapes.py",
    )
    code, _, error = command("locate", f"{file}:make_step")
    assert code == 2 and "is a shape" in error and "jnp.zeros((2,), jnp.float32)" in error


# ---------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------


def logarithm(w, x):
    return jnp.log(w * x).sum()


def test_the_report_measures_operands():
    x = jnp.array([0.0, 1e-7, 60000.0, 1.0], jnp.float16)
    report = jaxmp.locate_nonfinite(lambda x: jnp.log(x).astype(jnp.float32).sum(), x)
    (operand,), (result,) = report.operands, report.results
    shares = operand.zero, operand.subnormal, operand.near_largest, operand.nonfinite
    assert shares == (0.25, 0.25, 0.25, 0)
    assert (operand.low, operand.high, operand.value) == (0, 60000, 0)
    assert (result.nonfinite, result.index, report.index) == (0.25, (0,), (0,))


def test_the_report_prints_and_round_trips():
    x = jnp.array([0.0, 1.0])
    report = jaxmp.locate_nonfinite(jax.value_and_grad(logarithm), jnp.float32(1), x)
    assert type(report).from_json(report.to_json()) == report
    fields = json.loads(report.to_json())
    assert fields["cause"] == "log_of_zero" and fields["results"][0]["value"] == "-inf"
    gradient = jaxmp.locate_nonfinite(jax.grad(logarithm), jnp.float32(1), x)
    assert gradient.message == report.message and "50.0%" in report.message
    text = str(report)
    where = f"log in the forward pass, {report.location}, index [0]"
    assert text.startswith(f"Not finite: {where}\nreturn jnp.log(w * x).sum()")
    assert re.search(r"0 +float32\[2\] +0 to 1 +50.0%", text)
    assert "Log of zero\nThe logarithm reads 0 (50.0%" in text
    assert "jnp.log(jnp.maximum(w * x, jnp.finfo((w * x).dtype).tiny))" in text
    assert report.to_html().startswith("<!doctype html>")


def test_a_step_whose_gradients_are_all_zero_is_named():
    """The norm overflows float16 inside of the loss, whose gradient is then zero."""

    def loss(w, x):
        h = x @ w
        return jnp.mean((h / jnp.linalg.norm(h, axis=-1, keepdims=True)).astype(jnp.float32))

    w, x = jnp.full((4, 8), 100, jnp.float16), jnp.ones((2, 4), jnp.float16)
    report = jaxmp.locate_nonfinite(jax.jit(jax.value_and_grad(loss)), w, x)
    assert report.reproduced and report.cause == "float16_range"
    assert "all gradients are zero, so that no step is skipped" in report.message
    assert code_of(report.fix) == "jnp.linalg.norm(h.astype(jnp.float32), axis=-1, keepdims=True)"
    # A smaller step, and one whose gradient is zero without such a value.
    assert not jaxmp.locate_nonfinite(jax.value_and_grad(loss), w / 100, x).reproduced
    report = jaxmp.locate_nonfinite(jax.grad(lambda w, x: jnp.sum(0 * (x @ w))), w, x)
    assert not report.reproduced and "All its gradients are zero" in report.reason


def test_a_poisoned_argument_that_is_not_read_is_only_listed():
    report = jaxmp.locate_nonfinite(lambda w, unused: w.sum(), X, X * jnp.nan)
    assert not report.reproduced
    (row,) = report.arguments
    assert (row.name, row.count) == ("unused", 4)


def test_an_origin_that_is_not_recorded_is_not_invented():
    report = jaxmp.locate_nonfinite(lambda x: x * jnp.inf, X)
    assert report.reproduced and report.cause == "" and report.primitive == "mul"

    def late(x):
        body = lambda carry: (carry[0] + 1, carry[1] / (carry[0] - 300))
        return lax.while_loop(lambda carry: carry[0] < x.sum(), body, (0.0, 1.0))

    report = jaxmp.locate_nonfinite(late, jnp.full(4, 100.0))
    assert report.reproduced and report.cause == ""
    assert "a while loop after its first 255 iterations" in report.message
    assert "Not finite: not a recorded operation" in str(report)


MISSING = np.array([1.0, np.nan, 1.0, 1.0], np.float32)
CONSTANTS = {
    "full": (lambda x: jnp.full(2, jnp.nan), "bad_constant"),
    "literal": (lambda x: jnp.where(x > 1, jnp.nan, x).sum(), "bad_constant"),
    "array": (lambda x: (x * MISSING).sum(), "bad_constant"),
    "carry": (
        lambda x: lax.scan(lambda c, y: (c, y * c), jnp.nan, jnp.repeat(x, 2000))[1],
        "bad_constant",
    ),
    "gradient": (
        jax.grad(lambda x: jnp.where(jnp.isnan(MISSING), 0, (x - MISSING) ** 2).sum()),
        "where_gradient",
    ),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_nan_of_the_program_has_a_line(name):
    fn, cause = CONSTANTS[name]
    report = jaxmp.locate_nonfinite(fn, jnp.arange(4.0))
    assert (report.cause, Path(report.file).name) == (cause, "test_nonfinite.py")
    assert "NaN" in report.message


def test_a_product_that_differentiation_moves_out_of_a_loop_has_a_line():
    pad = np.zeros((1, 4), int)
    loss = lambda x: optax.ctc_loss(x, pad, pad, pad, log_epsilon=-np.inf).sum()
    report = jaxmp.locate_nonfinite(jax.grad(loss), jnp.ones((1, 4, 4)))
    assert report.primitive == "mul" and Path(report.file).name == "test_nonfinite.py"


@pytest.mark.parametrize("length", [5, 100], ids=["alone", "compiled"])
def test_the_iteration_of_a_reversed_scan_is_found(length):
    cell = lambda carry, row: (jnp.exp(carry * row), None)
    fn = lambda rows: lax.scan(cell, jnp.float32(1), rows, reverse=True)[0]
    report = jaxmp.locate_nonfinite(fn, jnp.zeros(length).at[jnp.array([1, 3])].set(200))
    assert (report.primitive, report.iteration) == ("exp", (3,))


def with_loops(x):
    """Has branches, random keys and a checkpoint in loops, one of them reversed."""

    def cell(carry, row):
        inner = lambda c, n: (lax.cond(n > row, lambda c: jnp.log(c - c), jnp.sin, c), c)
        carry, seen = lax.scan(jax.checkpoint(inner), carry, jnp.arange(3.0))
        return carry, (seen, jax.random.split(jax.random.key(1)))

    carry, (seen, keys) = lax.scan(cell, x.sum(), x, reverse=True)
    return carry + seen.sum() * jax.random.uniform(keys[0, 0])


def test_iterations_that_run_alone_are_those_of_a_compiled_loop(monkeypatch):
    x = jnp.array([0.5, 3.0, 4.0])
    closed = trace(jax.value_and_grad(with_loops), (x,), {}).closed
    alone = _record.Recorder().record(closed, [x])
    monkeypatch.setattr(_record, "MOST_ITERATIONS", 0)
    compiled = _record.Recorder().record(closed, [x])
    assert len(compiled) > 8 and alone.keys() <= compiled.keys()
    for key, codes in compiled.items():
        np.testing.assert_array_equal(alone.get(key, np.zeros_like(codes)), codes)


def test_operands_in_fp64_are_measured_in_fp64():
    with jax.enable_x64(True):
        report = jaxmp.locate_nonfinite(lambda x: x / (x - x), jnp.array([1e300, 1e-310, 1e308]))
    row = report.operands[0]
    assert (row.dtype, row.high, row.nonfinite) == ("float64", 1e308, 0)
    assert (row.subnormal, row.near_largest) == pytest.approx((1 / 3, 1 / 3))


@pytest.mark.parametrize("option", [jax.debug_nans, jax.debug_infs, jax.transfer_guard])
def test_options_of_jax_that_raise_do_not_stop_the_search(option):
    def step(x, n):
        return lax.cond(n > 2, jnp.log, jnp.exp, x * 0) * jnp.array([1, jnp.nan])

    args = jnp.ones(2), jnp.int32(4)
    with option("disallow" if option is jax.transfer_guard else True):
        assert jaxmp.locate_nonfinite(step, *args).cause == "log_of_zero"


def test_values_are_deleted_after_their_last_reader():
    live = []

    class Counter(_record.Recorder):
        def equation(self, *args):
            live.append(sum(array.shape == (13, 17) for array in jax.live_arrays()))
            return super().equation(*args)

    def step(x):
        for _ in range(20):
            x = jnp.tanh(x) + 1
        return x

    x = jnp.ones((13, 17))
    Counter().record(trace(step, (x,), {}).closed, [x])
    assert len(live) >= 40 and max(live) < 6


def sum_in_reference(x, ref):
    """Writes the exponentials of the rows into a reference, one after another."""

    def body(carry, row):
        ref[...] += jnp.exp(row)
        return carry, None

    lax.scan(body, 0, x)
    return jnp.sum(ref[...] * 2)


def test_values_are_followed_through_a_reference():
    x, ref = jnp.array([1.0, 200.0, 1.0]), jax.new_ref(jnp.zeros(()))
    for step, args in (
        (lambda x: sum_in_reference(x, jax.new_ref(jnp.zeros(()))), ()),
        (jax.jit(sum_in_reference), (ref,)),
    ):
        report = jaxmp.locate_nonfinite(step, x, *args)
        assert (report.primitive, report.iteration) == ("exp", (1,))
    # The step and its fix ran several times, in references of their own.
    assert ref[...] == 0
    report = jaxmp.locate_nonfinite(sum_in_reference, x[:1], jax.new_ref(jnp.float32(jnp.nan)))
    assert report.argument == "ref"
    with pytest.raises(jaxmp.errors.AuditError, match="Pass it as an argument"):
        jaxmp.locate_nonfinite(lambda x: sum_in_reference(x, ref), x)


def test_values_in_the_memory_of_the_host_are_read():
    save = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    block = jax.checkpoint(lambda w: checkpoint_name(w * w, "h") ** 2, policy=save)
    step = jax.jit(jax.grad(lambda w: jnp.log(block(w)).sum()))
    report = jaxmp.locate_nonfinite(step, jnp.array([1.0, 0.0]))
    assert (report.cause, report.index) == ("log_of_zero", (1,)), report


def test_an_opaque_kernel_is_named():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] / (x_ref[...] - 1.0)

    @jax.jit
    def step(x):
        with jax.named_scope("kernel"):
            call = pl.pallas_call(
                kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
            )
            return call(x)

    report = jaxmp.locate_nonfinite(step, jnp.array([3.0, 1.0]))
    assert (report.primitive, report.module, report.cause) == ("pallas_call", "kernel", "")
    assert report.index == (1,)
    assert "pallas_call returns values that are not finite" in report.message
    ((operand,), (result,)) = report.operands, report.results
    assert (operand.low, operand.high, result.nonfinite, result.high) == (1, 3, 0.5, 1.5)


@pytest.mark.skipif(cudnn_version() is None, reason="JAX requires cuDNN to trace it")
def test_kernels_of_cudnn_are_single_operations():
    """They do not run on this machine, so that their results are zeros."""

    class Zeros(_record.Recorder):
        def bound(self, equation, operands):
            return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in equation.outvars]

    def loss(x):
        y = jax.nn.dot_product_attention(x, x, x, implementation="cudnn")
        return y.astype(jnp.float32).sum()

    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    with jaxmp.default_target("h100"):
        closed = trace(jax.grad(loss), (x,), {}).closed
    recorder = Zeros()
    walk = _walk.Walk(recorder, recorder.record(closed, [x]))
    names = {op.name: op for _, op in walk.operations()}
    for side in ("fwd", "bwd"):
        assert len(names[f"dot_product_attention_{side}_wrapper"].operands) >= 3


def test_a_select_between_a_scalar_and_a_literal():
    def step(x, n):
        return jnp.log(x).sum() * lax.select(n > 2, 5, n).astype(x.dtype)

    report = jaxmp.locate_nonfinite(jax.jit(step), jnp.array([1.0, 0.0]), 3)
    assert report.cause == "log_of_zero"


def selected(w, x):
    y = w * x
    return jnp.log(lax.select(x > 1.0, y, y * 0)).sum()


def test_locating_leaves_the_lines_of_other_programs():
    """JAX caches traces of functions such as `jnp.where`, with the lines of the first caller."""
    jaxmp.locate_nonfinite(jax.value_and_grad(selected), jnp.float32(1), jnp.zeros(7))
    lines = range(selected.__code__.co_firstlineno, selected.__code__.co_firstlineno + 3)
    for dtype in (jnp.float32, jnp.int8):
        clip = lambda x: jnp.where(x > 0, x, x[0] * 0)
        closed = jax.make_jaxpr(clip)(jnp.zeros(7, dtype))
        assert all(Lines().of((equation,))[1] not in lines for equation in equations(closed))


# ---------------------------------------------------------------------------
# Documents and command
# ---------------------------------------------------------------------------


PAGE = text_of("docs/debugging.md")


def blocks(language):
    """Returns the blocks of the page in a language; "" for outputs."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


EIGHT_DEVICES = """
import jax, jax.numpy as jnp, jaxmp
from jax import lax
from jax.sharding import PartitionSpec as P

axis_types = (jax.sharding.AxisType.Auto,) * 2
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=axis_types)

def loss(w, x):
    def part(w, x):
        def layer(h, _):
            with jax.named_scope("dense"):
                h = lax.psum(h.astype(jnp.float16) @ w.astype(jnp.float16), "model")
            start = 4 * lax.axis_index("model")
            return lax.dynamic_slice_in_dim(h.astype(jnp.float32), start, 4, 1), None

        h, _ = lax.scan(jax.remat(layer), x, length=3)
        return lax.pmean(jnp.mean(h), ("data", "model"))

    specs = P("model"), P("data", "model")
    return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(w, x)

step = jax.jit(jax.value_and_grad(loss))
x = jnp.ones((8, 8)).at[5, 3].set(4000.0)
print(jaxmp.locate_nonfinite(step, jnp.ones((8, 8)), x).to_json())
"""


def test_a_step_is_run_in_the_explicit_mesh_of_its_arguments():
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:2])
    x = jax.device_put(jnp.ones((4, 8)).at[3, 2].set(0), NamedSharding(mesh, P("data")))
    log = jax.sharding.auto_axes(lambda x: jnp.log(x) * 2, out_sharding=x.sharding)
    w = jax.device_put(jnp.ones(8), NamedSharding(mesh, P()))
    report = jaxmp.locate_nonfinite(jax.grad(lambda w, x: log(w * x).sum()), w, x)
    assert (report.cause, report.index) == ("log_of_zero", (3, 2))


@pytest.mark.expensive
def test_a_scan_on_a_mesh_of_eight_devices(tmp_path):
    """Rows 4 and 5 are on devices 4 and 5. Row 5 reaches 4,007, 32,056 and 128,224 per device."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"

    def diagnosis(program):
        (tmp_path / "run.py").write_text(program)
        done = run_script("run.py", cwd=tmp_path, XLA_FLAGS=flags)
        assert done.returncode == 0, done.stderr
        return NonfiniteReport.from_json(done.stdout)

    report = diagnosis(EIGHT_DEVICES)
    where = report.device, report.iteration, report.index, report.module, report.primitive
    assert where == (4, (2,), (1, 0), "dense", "dot_general")
    assert (report.cause, report.phase) == ("float16_range", "forward")
    assert not diagnosis(replaced(EIGHT_DEVICES, report)).reproduced


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Changes to a directory with the program of the page, and returns its other programs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    sys.modules.pop("run", None)
    program, *others = blocks("python")
    (tmp_path / "run.py").write_text(program)
    yield program, others
    sys.modules.pop("run", None)


def test_the_command_prints_what_the_page_shows(page, command):
    code, out, error = command("locate", "run.py:make_step")
    assert code == 1, error
    assert "\n".join(map(str.rstrip, out.splitlines())).strip() == blocks("")[0].strip()


def test_the_command_reproduces_from_a_checkpoint(page, command, tmp_path):
    names = {}
    exec(page[0], names)
    step, state, batches = names["make_step"]()
    for batch in itertools.islice(batches, 10):
        state, _ = step(state, batch)
    with jaxmp.checkpoint.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(10, state, recipe="bf16", extra={"position": 10})
    arguments = "run.py:make_step", "--checkpoint", "checkpoints", "--json", "-"
    code, out, error = command("locate", *arguments, "--step", "10")
    assert code == 1, error
    fields = json.loads(out)
    assert (fields["cause"], fields["index"]) == ("division_by_zero", [2, 0])
    # The first three batches are healthy.
    code, out, _ = command("locate", *arguments, "--batches", "3")
    assert code == 0 and not json.loads(out)["reproduced"]


def test_the_command_restores_all_arguments_of_a_saved_tuple(page, command, tmp_path):
    (tmp_path / "run.py").write_text(
        """
import jax, jax.numpy as jnp, jaxmp, optax
from flax import nnx

def make_step():
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def train_step(model, optimizer, x):
        grads = nnx.grad(lambda model: model(x).sum())(model)
        optimizer.update(model, grads)

    return train_step, model, optimizer, jnp.ones((2, 4))
"""
    )
    names = {}
    exec((tmp_path / "run.py").read_text(), names)
    _, model, optimizer, _ = names["make_step"]()
    moments = optimizer.opt_state[0]
    moments.mu.bias[...] = moments.mu.bias[...].at[1].set(jnp.nan)
    with jaxmp.checkpoint.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, (model, optimizer), recipe="fp32", allow_nonfinite=True)
    arguments = "run.py:make_step", "--checkpoint", "checkpoints", "--json", "-"
    code, out, error = command("locate", *arguments)
    assert code == 1, error
    fields = json.loads(out)
    assert (fields["cause"], fields["index"]) == ("poisoned_moment", [1])
    assert fields["message"].startswith("Before the first step")
    assert "mu" in fields["argument"] and "bias" in fields["argument"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.py:make_step", "--step", "3"], "--step requires --checkpoint DIR"),
        (["run.py:make_stop"], "Did you mean 'make_step'?"),
        (["run.py:np[ones]"], "does not name a function"),
        (["run.py:empty"], "Return those after the checkpoint"),
        (["run.py:state"], "returned dict, not a function and its arguments"),
    ],
)
def test_the_command_refuses_bad_input(page, command, tmp_path, arguments, message):
    more = (
        "def empty():\n    return jnp.sum, jnp.ones(2), iter([])\n\ndef state():\n    return {}\n"
    )
    (tmp_path / "run.py").write_text(page[0] + more)
    code, _, error = command("locate", *arguments)
    assert code == 2 and message in " ".join(error.split())


def assert_equal_but_for_rounding(printed, text):
    """Checks a text; JAX versions may round the last digit of a number differently."""
    number = r"\d+(?:\.\d+)?"
    assert re.sub(number, "#", printed) == re.sub(number, "#", text)
    values = [[float(value) for value in re.findall(number, each)] for each in (printed, text)]
    np.testing.assert_allclose(*values, rtol=5e-3)


def test_the_programs_of_the_page_print_its_outputs(page, capsys, tmp_path):
    names = {}
    texts = blocks("")[1:]
    for number, program in enumerate([page[0], *page[1]]):
        file = tmp_path / f"step_{number}.py"
        file.write_text(program)
        exec(compile(program, str(file), "exec"), names)
        printed = "\n".join(map(str.rstrip, capsys.readouterr().out.splitlines())).strip()
        if number >= 2:
            assert_equal_but_for_rounding(printed, texts[number - 2].strip())
        elif number:
            assert printed.startswith("Not finite: div in the forward pass, module normalize")


def test_the_page_names_every_cause():
    causes = {plant.cause for plant in PLANTS}
    causes |= {"bad_constant", "diverged", "outside_domain", "singular_matrix"}
    assert [cause for cause in causes if f"`{cause}`" not in PAGE] == []
    table = PAGE.partition("### Causes")[2].partition("\n## ")[0]
    named = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    documented = {name for row in named for name in re.findall(r"`(\w+)`", row)}
    assert documented - {"cause"} == causes


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (jax.grad(lambda x: jnp.arccos(x)), 1.0),
        (jax.grad(lambda x: jnp.arccosh(x)), 1.0),
        (lambda x: jax.scipy.special.logit(x), 1.0),
        (lambda x: jax.scipy.special.erfinv(x), -1.0),
        (jax.grad(lambda x: jax.scipy.special.gammaln(x)), 0.0),
    ],
)
def test_the_end_of_a_domain_is_bounded(fn, x):
    report = jaxmp.locate_nonfinite(fn, jnp.float32(x))
    assert (report.cause, report.trial) == ("outside_domain", "works")


def test_the_operand_of_an_earlier_line_is_replaced_where_it_is_discarded(tmp_path):
    lines = "def fn(x):", " root = jnp.sqrt(x)", " is_positive = x > 0"
    program = "\n".join((HEAD, *lines, " return jnp.where(is_positive, 2 * root, 0.0)"))
    fn = load_module(program, tmp_path).fn
    report = jaxmp.locate_nonfinite(jax.grad(fn), jnp.float32(0))
    where = f"{Path(report.file).name}:{report.line - 2}"
    assert report.trial == "works" and report.fix.startswith(f"At {where}, replace the operand")
    fixed = load_module(program.replace("jnp.sqrt(x)", code_of(report.fix)), tmp_path).fn
    assert (jax.grad(fixed)(0.0), fixed(4.0)) == (0, fn(4.0))


def _steep(x):
    return 1e3 * jnp.log(x)


def test_a_bound_has_a_finite_gradient():
    report = jaxmp.locate_nonfinite(jax.grad(_steep), jnp.float32(0))
    assert (code_of(report.fix), report.trial) == (
        "jnp.log(jnp.maximum(x, jnp.finfo(x.dtype).eps))",
        "works",
    )


def test_a_singular_matrix_is_named():
    report = jaxmp.locate_nonfinite(jnp.linalg.cholesky, -jnp.eye(2))
    assert report.cause == "singular_matrix" and "not positive definite" in report.message


_SUM = "x[1] + 1e-08"


def _distance(x):
    square = jnp.sum((x - x[::-1]) ** 2, -1)
    return jnp.arccosh(1 + 2 * square)


def _wide_logarithm(x):
    p = jax.nn.sigmoid(x * 1e4).astype(jnp.float32)
    return jnp.log(1 - p)


def _mixture(x):
    log_p = jnp.log(jax.nn.softmax(x * 2e4, axis=None)) - 1
    return jax.scipy.special.logsumexp(log_p)


@pytest.mark.parametrize(
    ("fn", "cause", "codes"),
    [
        (
            _distance,
            "outside_domain",
            [
                "jnp.sum((x - x[::-1]).astype(jnp.float32) ** 2, -1)",
                "jnp.arccosh((1 + 2 * square).astype(jnp.float32))",
            ],
        ),
        (_wide_logarithm, "log_of_zero", ["x.astype(jnp.float32) * 10000.0"]),
        # The exponentials underflow, and no mask hides the logits.
        (
            lambda x: jnp.log(jnp.sum(jnp.exp(-20.0 - x))),
            "log_of_zero",
            ["jax.scipy.special.logsumexp(-20.0 - x)"],
        ),
        # The code in FP32 does not help: the gradient of x overflows.
        (lambda x: jnp.exp(1.2e4 * x), "exp_overflow", ["jnp.exp(jnp.minimum(12000.0 * x, 11))"]),
        (
            lambda x: x / (x[1] + 1e-8),
            "division_by_zero",
            [f"x / jnp.where({_SUM} == 0, 1, {_SUM})"],
        ),
        # No `where` of the user's discards the logarithm.
        (_mixture, "log_of_zero", ["jax.nn.log_softmax(x * 20000.0, axis=None)"]),
    ],
)
def test_operands_that_16_bits_round_are_the_cause(fn, cause, codes):
    x = jnp.array([[0.001, 0.0]], jnp.float16).T
    report = jaxmp.locate_nonfinite(jax.grad(lambda x: fn(x).sum().astype(jnp.float32)), x)
    assert (report.cause, report.trial) == (cause, "works"), report
    assert "the precision is the cause" in report.message
    assert [line.strip() for line in report.fix.splitlines() if line[:4] == "    "] == codes


def _logarithm(x):
    p = jax.nn.sigmoid(2 * x)
    return jnp.log(1 - p)


def _changed(x):
    p = jax.nn.sigmoid(x)
    x = 2 * x
    return jnp.log(1 - p) + x


def _of_layer(x):
    p = jax.nn.softmax(_logarithm(-x), None)
    return jnp.log(p)


@pytest.mark.parametrize(
    ("fn", "code"),
    [
        (
            lambda x: jnp.log(jnp.sum(jnp.exp(x), -1, keepdims=True)),
            "jax.scipy.special.logsumexp(x, -1, keepdims=True)",
        ),
        (lambda x: jnp.log(jnp.exp(x).sum(axis=0)), "jax.scipy.special.logsumexp(x, axis=0)"),
        (lambda x: jnp.log(1 + jnp.exp(x)), "jax.nn.softplus(x)"),
        (lambda x: jnp.log1p(jnp.exp(x)), "jax.nn.softplus(x)"),
        (lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x)), "jax.nn.softmax(x, axis=None)"),
        (
            lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), axis=1, keepdims=True),
            "jax.nn.softmax(x, axis=1)",
        ),
        # Without `keepdims`, the sums of other rows divide a row.
        (lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), axis=1), "jnp.exp(jnp.minimum(x, 88))"),
        (lambda x: jnp.exp(x) / jnp.sum(jnp.exp(-x)), "jnp.exp(jnp.minimum(x, 88))"),
        (lambda x: jnp.log(jax.nn.softmax(-x, axis=0)), "jax.nn.log_softmax(-x, axis=0)"),
        (lambda x: jnp.log1p(-jax.nn.sigmoid(x)), "jax.nn.log_sigmoid(-x)"),
        (_logarithm, "jax.nn.log_sigmoid(-(2 * x))"),
        # A layer may have other parameters, and the variable has another value by then.
        (_of_layer, "jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny))"),
        (_changed, "jnp.log(jnp.maximum(1 - p, jnp.finfo((1 - p).dtype).tiny))"),
    ],
)
def test_steps_that_overflow_become_one_function(fn, code):
    x = jnp.array([[100.0, 300.0], [-100.0, 0.0]])
    report = jaxmp.locate_nonfinite(fn, x)
    assert (code_of(report.fix), report.trial) == (code, "works")
    if not re.search("minimum|maximum", code):
        healthy = x / 100
        new = eval(code, {"jax": jax, "jnp": jnp, "x": healthy})
        np.testing.assert_allclose(new, fn(healthy), rtol=1e-5)
