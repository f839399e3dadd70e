"""Effects of single roundings, forms of differences, and planted faults and healthy trainings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
import validate_healthy
import validate_sabotages
from grids import EXPENSIVE
from jaxmp._tools.validate import _diagnose
from jaxmp._tools.validate._probe import Probe, find_patterns, gradient_row, make_probe
from jaxmp._tools.validate._pure import as_pure, check_same_params
from jaxmp._tools.validate._trials import EXACT, MAX_LINES, ROUNDED, RoundedLines
from sources import results_of, text_of

# ---------------------------------------------------------------------------
# Emulation
# ---------------------------------------------------------------------------


KERNEL = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)


def gradients(step, *modes):
    """Returns the gradients of a step under modes of its lines, of itself, and the lines."""
    batch = {"x": np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)}
    state = {"params": {"w": KERNEL}}
    run = jaxmp.TrainingRun(state=state, step=step, batches=[batch], evaluate=lambda state: 0.0)
    pure = as_pure(run, "run", 1)
    emulation = RoundedLines(pure)
    options = {"xla_allow_excess_precision": False}
    compiled = jax.jit(emulation.pure_run.step, compiler_options=options)
    results = [compiled(pure.arrays, (each, pure.first))[1] for each in modes]
    results.append(jax.jit(pure.step, compiler_options=options)(pure.arrays, pure.first)[1])
    return *(np.asarray(result.grads["w"]) for result in results), emulation.origins


def emulated(dtype, numbers=(), default=ROUNDED):
    """Returns the gradient of an emulated step, one without emulation, and the lines.

    The lines in `numbers` are exact, or the only ones that round if `default` is `EXACT`.
    """

    def loss_fn(params, batch):
        y = batch["x"].astype(dtype) @ params["w"].astype(dtype)
        carry, _ = jax.lax.scan(lambda c, x: (c + x * x, None), jnp.zeros(3, dtype), y)
        return jnp.sum(jnp.square(carry.astype(jnp.float32))) * 1e-3

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        return state, {"loss": loss, "grads": grads}

    modes = np.full(MAX_LINES, default, np.int32)
    modes[list(numbers)] = EXACT if default == ROUNDED else ROUNDED
    return gradients(step, modes)


def rounds_as_emulated(dtype):
    """Returns True if this CPU rounds products before it adds them, and FP32 sums of matmuls once.

    Some have instructions for a 16-bit dtype, with which XLA rounds elsewhere: with AVX512-FP16 the
    sum of a multiply-add, and with AVX512-BF16 or AMX that of a loop, and parts of those of a
    matmul.
    """
    x = jnp.array([1 + jnp.finfo(dtype).eps, 0], dtype)
    multiply_add = jax.jit(lambda c: jax.lax.scan(lambda c, x: (c + x * x, None), c, x)[0])
    a, b = (jax.random.normal(jax.random.key(i), (8, 8), dtype) for i in range(2))
    product = jax.jit(jnp.matmul, compiler_options={"xla_allow_excess_precision": False})(a, b)
    once = np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(product.dtype)
    return not multiply_add(-x[0] * x[0]) and np.array_equal(product, once)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_emulated_roundings_are_those_of_the_step(dtype):
    result, plain, origins = emulated(dtype)
    exact, _, _ = emulated(dtype, default=EXACT)
    wide, _, _ = emulated(jnp.float32)
    np.testing.assert_allclose(exact, wide, rtol=1e-5)
    assert np.linalg.norm(plain - wide) > 1e-4 * np.linalg.norm(wide)
    tolerance = 0 if rounds_as_emulated(dtype) else 4 * float(jnp.finfo(dtype).eps)
    assert np.linalg.norm(result - plain) <= tolerance * np.linalg.norm(plain)
    assert origins[0].source == "'x' of the batch"
    assert {origin.dtype for origin in origins} == {jnp.dtype(dtype).name}


def test_sums_that_round_after_each_term_are_emulated():
    """The sum of 512 equal numbers in bfloat16 no longer grows when their last bit is too small."""

    def step(state, batch):
        terms = jnp.broadcast_to(batch["x"][0, 0].astype(jnp.bfloat16), 512)
        total = jax.ops.segment_sum(terms, jnp.zeros(512, int), 1)
        return state, {"loss": 0.0, "grads": {"w": total.astype(jnp.float32)}}

    modes = (np.full(MAX_LINES, mode, np.int32) for mode in (ROUNDED, EXACT))
    rounded, exact, plain, _ = gradients(step, *modes)
    np.testing.assert_array_equal(rounded, plain)
    assert abs(plain) < 0.8 * abs(exact)


def test_integers_of_the_batch_are_fixed_at_their_cast():
    """A rule that keeps inputs has no effect on them, because a policy casts no integers."""

    def step(state, batch):
        x = batch["x"].astype(jnp.int32).astype(jnp.bfloat16)
        return state, {"loss": 0.0, "grads": {"w": x.astype(jnp.float32)}}

    *_, (origin,) = gradients(step, np.full(MAX_LINES, ROUNDED, np.int32))
    assert origin.source == "integers"
    origin = origin._replace(source="the integer 'b/t' of the batch")
    fix = "t = t.astype(jnp.float32)  # instead of the cast in loss (a.py:1)"
    assert _diagnose._line_fix(origin, "loss", "loss (a.py:1)") == fix


def test_parameters_that_only_one_recipe_has_are_named():
    message = "for seed 0: only the reference has 'a:w'"
    with pytest.raises(jaxmp.errors.ValidationError, match=message):
        check_same_params({"a:w": np.zeros(2)}, {"b": {"w": jnp.zeros(2)}}, "bf16", 0)


def test_loops_and_parts_of_devices_are_emulated():
    """A step whose update runs a while loop and a `shard_map` in bfloat16."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")

    def halve(x):
        loop = lambda c: (c[0] + 1, c[1] * jnp.bfloat16(0.7))
        return jax.lax.while_loop(lambda c: c[0] < 3, loop, (0, x.astype(jnp.bfloat16)))[1]

    def step(state, batch):
        loss = jnp.square(batch["x"] @ state["params"]["w"]).mean()
        part = jax.shard_map(halve, mesh=mesh, in_specs=rows, out_specs=rows)
        return state, {"loss": loss, "grads": {"w": part(state["params"]["w"]).astype(jnp.float32)}}

    modes = (np.full(MAX_LINES, mode, np.int32) for mode in (ROUNDED, EXACT))
    rounded, exact, plain, origins = gradients(step, *modes)
    np.testing.assert_array_equal(rounded, plain)
    expected = np.asarray(KERNEL, np.float64) * float(jnp.bfloat16(0.7)) ** 3
    np.testing.assert_allclose(exact, expected, rtol=1e-6)
    assert {origin.dtype for origin in origins} == {"bfloat16"}


def test_a_single_line_rounds_alone():
    exact, _, origins = emulated(jnp.bfloat16, default=EXACT)
    alone, _, _ = emulated(jnp.bfloat16, [0], default=EXACT)
    others, _, _ = emulated(jnp.bfloat16, range(len(origins)))
    np.testing.assert_array_equal(others, exact)
    assert 0 < np.linalg.norm(alone - exact) < 0.02 * np.linalg.norm(exact)


# ---------------------------------------------------------------------------
# Forms
# ---------------------------------------------------------------------------


RNG = np.random.default_rng(0)
GRADS = {"fc1:kernel": RNG.normal(size=(8, 16)), "fc2:kernel": RNG.normal(size=(16, 4))}
PARAMS = {path: RNG.normal(size=grad.shape) for path, grad in GRADS.items()}
CHANGES = {"counter": np.ones(1), "ema/w": RNG.normal(size=64)}


def probe(grads=GRADS, rate=0.1, updates=None, changes=CHANGES, dtype="float32"):
    updates = {path: -rate * g for path, g in grads.items()} if updates is None else updates
    return Probe(
        loss=1.0,
        grads=grads,
        outputs={},
        stalled=0.0,
        update=float(np.linalg.norm(np.concatenate([u.ravel() for u in updates.values()]))),
        updates=updates,
        changes=changes,
        params=PARAMS,
        dtypes=dict.fromkeys(changes, dtype),
    )


def forms(candidate, reference=None):
    reference = reference or probe()
    row = gradient_row(7, reference, candidate)
    return {pattern.id: pattern for pattern in find_patterns(row, reference, candidate)}


def scaled(tree, factor):
    return {path: factor * leaf for path, leaf in tree.items()}


def test_healthy_differences_have_no_form():
    noisy = {p: g * (1 + 0.02 * RNG.normal(size=g.shape)) for p, g in GRADS.items()}
    assert forms(probe(noisy)) == {}
    assert forms(probe({p: g + RNG.normal(size=g.shape) for p, g in GRADS.items()})) == {}


def test_a_common_factor_of_gradients():
    result = forms(probe(scaled(GRADS, 4.0), rate=0.1))
    assert set(result) == {"gradient_factor"} and result["gradient_factor"].factor == 4
    assert (
        "4 times as large" in result["gradient_factor"].text and result["gradient_factor"].step == 7
    )


def test_another_learning_rate():
    result = forms(probe(rate=0.1 / 3))
    assert set(result) == {"update_factor"}
    assert "updates are 0.33 times" in result["update_factor"].text
    assert result["update_factor"].error == pytest.approx(2 / 3)


def test_another_learning_rate_of_adam():
    """All elements of the first update have the same magnitude, as if they were clipped."""
    signs = scaled({path: np.sign(g) for path, g in GRADS.items()}, -1.0)
    reference, candidate = (probe(updates=scaled(signs, rate)) for rate in (0.3, 0.1))
    assert set(forms(candidate, reference)) == {"update_factor"}


def test_clipping_by_value():
    updates = {path: -0.1 * np.clip(g, -0.5, 0.5) for path, g in GRADS.items()}
    result = forms(probe(updates=updates))
    assert set(result) == {"clipping"} and "clipped to 0.05" in result["clipping"].text


def test_another_weight_decay():
    updates = {path: -0.1 * (g + 0.3 * PARAMS[path]) for path, g in GRADS.items()}
    result = forms(probe(updates=updates))
    assert set(result) == {"weight_decay"} and "by -0.03 times" in result["weight_decay"].text


def test_a_module_without_a_gradient():
    frozen = {**GRADS, "fc1:kernel": np.zeros((8, 16))}
    moments = {**CHANGES, "mu/fc1/kernel": np.ones(64)}
    still = {**moments, "mu/fc1/kernel": np.zeros(64)}
    result = forms(probe(frozen, changes=still), probe(changes=moments))
    assert set(result) == {"zero_gradient"}  # its moments do not change, either
    assert result["zero_gradient"].text == "the gradient of fc1 is zero"
    assert "zero_gradient" not in forms(probe(scaled(GRADS, 0.0)))


def test_changes_of_subnormal_float16_values_are_measured():
    average = jnp.float16([1e-6, 3e-5])

    def step(state, batch):
        return {**state, "average": 2 * state["average"]}, {"loss": batch.sum()}

    def nnx_step(model, batch):
        model.mean[...] = 2 * model.mean[...]
        return batch.sum()

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.mean = nnx.BatchStat(average)
    tree = {"params": {"w": jnp.ones(2)}, "average": average}
    for state, fn, path in ((tree, step, "average"), ((model,), nnx_step, "Linear[0]/mean")):
        batches = [np.ones(2, np.float32)]
        run = jaxmp.TrainingRun(state=state, step=fn, batches=batches, evaluate=lambda *_: 0.0)
        pure = as_pure(run, "run", 1)
        probe = make_probe(pure)(pure.arrays, pure.first)
        np.testing.assert_array_equal(probe.changes[path], average.astype(jnp.float32))
        assert probe.dtypes[path] == "float16"


@pytest.mark.parametrize(("dtype", "share", "expected"), [
    ("bfloat16", 1.0, "'ema/w' (bfloat16) does not change, as it does in the reference"),
    ("bfloat16", 0.5, "'ema/w' (bfloat16) does not change in 50 % of its elements, as it does"),
    ("bfloat16", 0.1, None),
    ("float32", 1.0, "'ema/w' (float32) does not change, as it does in the reference"),
    ("float32", 0.9, None),
])  # fmt: skip
def test_a_leaf_of_the_state_that_does_not_change(dtype, share, expected):
    still = CHANGES["ema/w"] * (np.arange(64) >= round(64 * share))
    result = forms(probe(changes={**CHANGES, "ema/w": still}, dtype=dtype))
    assert set(result) == (set() if expected is None else {"state"})
    assert expected is None or result["state"].text.startswith(expected)


def test_a_skipped_step_has_no_form_of_its_state():
    nothing = {path: np.zeros(g.shape) for path, g in GRADS.items()}
    still = {path: np.zeros(change.shape) for path, change in CHANGES.items()}
    assert forms(probe(updates=nothing, changes=still)) == {}


# ---------------------------------------------------------------------------
# Planted faults and healthy trainings
# ---------------------------------------------------------------------------

SABOTAGES, HEALTHY = (results_of(f"validate_{name}_cpu") for name in ("sabotages", "healthy"))


def test_recorded_faults_are_named():
    assert [row["name"] for row in SABOTAGES["faults"]] == list(validate_sabotages.FAULTS)
    counts = SABOTAGES["counts"]
    assert len(validate_sabotages.FAULTS) >= 20 and counts.get("wrong", 0) == 0
    page = text_of("docs/measurements.md")
    assert counts["right"] >= 17 and f"{counts['right']} of {len(SABOTAGES['faults'])}" in page
    for row in SABOTAGES["faults"]:
        arguments = (row["name"], row["verdict"], row["headline"], tuple(row["causes"]))
        assert validate_sabotages.outcome(*arguments) == row["outcome"]


@pytest.mark.parametrize(
    "name",
    ["labels", "layer_norm", "dropout_keys", "no_loss_scale", "temperature", "statistics"],
)
@EXPENSIVE
def test_a_planted_fault_is_named(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        result = validate_sabotages.measure(name, seeds=2)
    assert result.outcome == "right", result.headline


def test_recorded_healthy_trainings_do_not_fail():
    verdicts = {(row["training"], row["recipe"]): row["verdict"] for row in HEALTHY["trainings"]}
    assert len(validate_healthy.TRAININGS) == 10
    assert set(verdicts) == {
        (name, recipe) for name in validate_healthy.TRAININGS for recipe in ("bf16", "fp16")
    }
    assert set(verdicts.values()) <= {"pass", "inconclusive"}


@pytest.mark.parametrize("name", ["reward", "gaussian_nll"])
@EXPENSIVE
def test_a_healthy_training_does_not_fail(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rows = validate_healthy.measure(name, seeds=2, steps=30)
    assert {row["verdict"] for row in rows} <= {"pass", "inconclusive"}, rows
