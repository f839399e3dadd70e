"""The migration guide: both sides of every diff run, with the documented results."""

import contextlib
import functools
import re

import flax.training.dynamic_scale
import flax.training.train_state
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxmp
from grids import EXPENSIVE, fast_cases
from programs import relative_error
from sources import text_of

GUIDE, TABLES = text_of("docs/migration.md"), text_of("docs/names.md")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
SETUP, *PATTERNS, INFERENCE = [text for language, text in BLOCKS if language == "python"]
DIFFS = [text for language, text in BLOCKS if language == "diff"]
NAMES = ["dynamic_scale", "jmp", "linen", "nnx", "flax_state", "flax_optimizer", "optax"]
DIFF = dict(zip(NAMES, DIFFS, strict=True))
BEFORE, AFTER = "-", "+"

# Documented tolerance of losses in bfloat16 and float16; measured: up to 0.0014.
HALF_BUDGET = 0.005


def side(diff, sign):
    """Returns the program before (`-`) or after (`+`) the change."""
    lines = [line for line in diff.splitlines() if line[:1] in (" ", sign)]
    return "\n".join(line[1:] for line in lines)


def unedited(code):
    return code


@functools.cache
def run(name, sign, batches=None, edit=unedited, compiled=False):
    """Runs one side of a diff, with JAX's default promotion, which optax requires.

    Unless `compiled`, the operations run one by one, because XLA fuses the two programs
    differently, which changes the last bits of FP32 results. (Both sides of `linen` are the same
    program in FP32.)
    """
    compiled = compiled or name == "linen"
    namespace = {"__name__": "guide", "flax": flax, "jmp": jmp}
    model, loop = edit(side(DIFF[name], sign)).split("\n\nlosses = ")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(SETUP, namespace)
        namespace["batches"] = batches() if batches else namespace["batches"]
        exec(model, namespace)
        with contextlib.nullcontext() if compiled else jax.disable_jit():
            exec(f"losses = {loop}", namespace)
    return namespace


def setup_batches():
    namespace = {}
    exec(SETUP, namespace)
    return namespace["batches"]


def without_the_third():
    batches = setup_batches()
    del batches[2]
    return batches


def with_an_overflow():
    """Returns batches of which the third overflows."""
    batches = setup_batches()
    batches[2] = {**batches[2], "x": batches[2]["x"].at[0, 0].set(jnp.inf)}
    return batches


def flat(value):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(value)])


def assert_equal(before, after, *names):
    for name in names:
        np.testing.assert_array_equal(flat(before[name]), flat(after[name]))


def full_precision(code):
    """Returns the program with all dtypes replaced by FP32."""
    code = re.sub(r'"(bf16|fp16|bf16_params)"', '"fp32"', code)
    return re.sub(r"\b(jnp\.)?b?float16\b", r"\1float32", code)


def rounded(code):
    """Returns the program with gradients of weights that are rounded to float16."""
    changes = '.replace(reduce_dtype="float16")'
    code = code.replace('load_recipe("fp16")', f'load_recipe("fp16"){changes}')
    return code.replace("loss_scale=loss_scale)", 'loss_scale=loss_scale, reduce_dtype="float16")')


# ---------------------------------------------------------------------------
# The diffs
# ---------------------------------------------------------------------------


def test_each_diff_deletes_more_than_signs():
    for name, diff in DIFF.items():
        assert all(line[:1] in (" ", "+", "-") for line in diff.splitlines()), name
        assert side(diff, BEFORE) != side(diff, AFTER)
        assert "jaxmp" in side(diff, AFTER) and "jaxmp" not in side(diff, BEFORE)
    for name in ("dynamic_scale", "jmp", "linen"):
        lines = [len(side(DIFF[name], sign).splitlines()) for sign in (BEFORE, AFTER)]
        assert lines[1] < lines[0]


@pytest.mark.parametrize("name", NAMES)
@fast_cases("jmp")
def test_in_fp32_both_sides_are_bit_identical(name):
    before, after = (run(name, sign, edit=full_precision) for sign in (BEFORE, AFTER))
    assert_equal(before, after, "losses", "params")
    assert before["losses"][-1] < before["losses"][0]


@pytest.mark.parametrize("name", ["dynamic_scale", "nnx"])
@fast_cases("dynamic_scale")
def test_compiled_they_agree_to_the_last_digits_of_fp32(name):
    sides = [run(name, sign, edit=full_precision, compiled=True) for sign in (BEFORE, AFTER)]
    for found in ("losses", "params"):
        assert relative_error(sides[1][found], sides[0][found]) < 1e-6


@pytest.mark.parametrize("name", ["dynamic_scale", "jmp"])
@pytest.mark.parametrize("batches", [setup_batches, with_an_overflow])
@fast_cases("with_an_overflow-dynamic_scale")
def test_a_loss_scale_gives_the_same_bits_and_skips_the_same_steps(name, batches):
    before, after = (run(name, sign, batches, rounded) for sign in (BEFORE, AFTER))
    assert_equal(before, after, "losses", "params", "scale")
    exact = run(name, AFTER, batches)
    assert relative_error(exact["params"], after["params"]) < HALF_BUDGET
    overflowed = batches is with_an_overflow
    assert np.all(np.isfinite(flat(after["params"])))
    assert np.isfinite(after["losses"][2]) != overflowed
    state = after.get("state", after.get("opt_state"))
    assert int(jaxmp.get_skip_stats(state).total) == overflowed


@EXPENSIVE
@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_policies_compute_what_dtype_arguments_computed(name):
    before, after = (run(name, sign) for sign in (BEFORE, AFTER))
    assert relative_error(after["losses"], before["losses"]) < HALF_BUDGET
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(after["params"])}
    assert dtypes == {"float32"}
    assert np.any(flat(before["losses"]) != flat(run(name, BEFORE, edit=full_precision)["losses"]))


@EXPENSIVE
def test_a_model_may_keep_its_dtype_arguments():
    keep = lambda code: code.replace(
        "model = Net(jnp.bfloat16)", 'model = jaxmp.load_recipe("bf16").wrap(Net(jnp.float32))'
    )
    kept, after = run("linen", BEFORE, edit=keep), run("linen", AFTER)
    assert kept["model"].dtype == jnp.float32  # the field of the model
    assert kept["losses"] != run("linen", BEFORE, edit=full_precision)["losses"]
    assert relative_error(kept["losses"], after["losses"]) < HALF_BUDGET


@pytest.mark.parametrize("name", ["flax_state", "flax_optimizer", "optax"])
@fast_cases("flax_state")
def test_a_loop_that_stays_trains_in_16_bits(name):
    before, after = (run(name, sign) for sign in (BEFORE, AFTER))
    assert relative_error(after["losses"], before["losses"]) < HALF_BUDGET
    stored = {str(leaf.dtype) for leaf in jax.tree.leaves(after["params"])}
    assert stored == {"bfloat16" if name == "optax" else "float32"}


# ---------------------------------------------------------------------------
# Properties of each loop
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nnx", "flax_state", "flax_optimizer", "optax"])
@fast_cases("flax_state", "flax_optimizer")
def test_a_step_that_overflows_is_skipped_in_every_loop(name):
    expected = run(name, AFTER, without_the_third)
    assert_equal(expected, run(name, AFTER, with_an_overflow), "params")
    broken = run(name, BEFORE, with_an_overflow)
    assert not np.all(np.isfinite(flat(broken["params"])))


@EXPENSIVE
def test_flax_loops_count_skipped_steps_and_ours_do_not():
    batches = with_an_overflow
    assert int(run("flax_state", AFTER, batches)["state"].step) == 6
    assert int(run("flax_optimizer", AFTER, batches)["optimizer"].step[...]) == 6
    assert int(run("nnx", AFTER, batches)["optimizer"].step[...]) == 5
    assert int(run("dynamic_scale", AFTER, batches)["state"].step) == 5
    assert int(run("dynamic_scale", BEFORE, batches)["state"].step) == 6


@EXPENSIVE
@pytest.mark.parametrize("ours", [True, False])
def test_batch_statistics_of_a_skipped_step(ours):
    flax_optimizer = lambda code: code.replace(
        "jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.sgd(0.1)))",
        "nnx.Optimizer(model, recipe.optimizer(optax.sgd(0.1)), wrt=nnx.Param)",
    ).replace("optimizer.value_and_grad(loss_fn)", "jaxmp.nnx.value_and_grad(loss_fn)")
    found = run("nnx", AFTER, with_an_overflow, unedited if ours else flax_optimizer)
    assert (type(found["optimizer"]) is jaxmp.nnx.Optimizer) == ours
    assert jnp.isfinite(found["model"].norm.mean[...]).all()


def test_masters_in_a_loop_that_adds_updates():
    """A parameter equals its master up to one rounding to the 8 bits of bfloat16."""
    found = run("optax", AFTER)
    masters = jaxmp.get_master_params(found["opt_state"])
    for param, master in zip(*map(jax.tree.leaves, (found["params"], masters)), strict=True):
        assert param.dtype == jnp.bfloat16 and master.dtype == jnp.float32
        np.testing.assert_allclose(param.astype(jnp.float32), master, rtol=2**-7)


@pytest.mark.parametrize("kind", ["state", "optimizer"])
@pytest.mark.usefixtures("standard_promotion")  # optax adds FP32 updates to 16-bit parameters
def test_16_bit_parameters_in_flax_loops(kind):
    """Both create masters from the given parameters, and keep the dtypes of the parameters."""
    recipe = jaxmp.load_recipe("bf16_params")
    tx, params = recipe.optimizer(optax.sgd(0.1)), {"w": jnp.full((2, 2), 1.001)}
    if kind == "state":
        state = flax.training.train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
        state = state.replace(params=recipe.cast_params(state.params))
        state = state.apply_gradients(grads={"w": jnp.ones((2, 2))})
        param, master = state.params["w"], jaxmp.get_master_params(state)["w"]
    else:
        model = nnx.Dict(w=nnx.Param(params["w"]))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        model.w.set_value(recipe.cast_params({"w": model.w.get_value()})["w"])
        optimizer.update(model, nnx.State({"w": nnx.Param(jnp.ones((2, 2)))}))
        param, master = model.w[...], jaxmp.get_master_params(optimizer)["w"]
    assert param.dtype == jnp.bfloat16
    np.testing.assert_allclose(master, np.full((2, 2), 0.901), rtol=1e-6)
    np.testing.assert_allclose(param.astype(jnp.float32), master, rtol=2**-7)


# ---------------------------------------------------------------------------
# Statements about other libraries, and names
# ---------------------------------------------------------------------------


def test_flax_doubles_one_step_later():
    theirs = flax.training.dynamic_scale.DynamicScale(growth_interval=3)
    ours = jaxmp.DynamicLossScale(growth_interval=3)
    scales = []
    for _ in range(4):
        theirs = theirs.value_and_grad(lambda p: p)(1.0).dynamic_scale
        ours = ours.adjust(jnp.array(True))
        scales.append((float(theirs.scale), float(ours.scale_value)))
    assert scales == [(2**16, 2**16)] * 2 + [(2**16, 2**17), (2**17, 2**17)]


def test_floors():
    tiny = flax.training.dynamic_scale.DynamicScale().minimum_scale
    assert float(tiny) == 2.0**-126
    ours = jaxmp.DynamicLossScale(init_scale=2.0**-14)
    assert float(ours.adjust(jnp.array(False)).scale_value) == 2.0**-14
    theirs = jmp.DynamicLossScale(jnp.float32(8), min_loss_scale=jnp.float32(8))
    with jax.numpy_dtype_promotion("standard"):  # jmp counts with a bool
        adjusted = jax.jit(lambda scale: scale.adjust(jnp.array(False)))(theirs)
    assert float(adjusted.loss_scale) == 4.0


def test_flax_applies_a_step_whose_loss_alone_is_not_finite():
    loss_fn = lambda p: p + jnp.inf
    theirs = flax.training.dynamic_scale.DynamicScale().value_and_grad(loss_fn)(1.0)
    assert bool(theirs.finite)
    _, grads = jaxmp.value_and_grad(loss_fn, loss_scale=jaxmp.DynamicLossScale())(1.0)
    assert not np.isfinite(grads)


def test_every_name_in_the_guide_exists():
    names = set(re.findall(r"jaxmp(?:\.\w+)+", GUIDE + TABLES))
    assert len(names) > 12
    for name in names:
        value = jaxmp
        for part in name.split(".")[1:]:
            value = getattr(value, part)


def test_patterns_inference_and_export_run():
    namespace = {"__name__": "guide"}
    with jax.numpy_dtype_promotion("standard"):
        for block in (SETUP, *PATTERNS, INFERENCE):
            exec(block, namespace)
    assert namespace["predicted"].shape == (32, 1)


def test_the_code_in_the_tables_runs():
    model, tx = nn.Dense(2), optax.sgd(0.1)
    recipe = jaxmp.load_recipe("fp16")
    of_jmp = TABLES.partition("\n| jmp | ")[2].partition("\n\n")[0]
    assert all(f"jmp.{name}" in of_jmp for name in jmp.__all__ if name != "LossScale")
    table = TABLES.partition("## Sharding\n")[0]
    state = jaxmp.TrainState.create(
        apply_fn=model.apply, params={"w": jnp.ones(2)}, tx=recipe.optimizer(tx)
    )
    loss_fn = lambda params, batch: jnp.sum(params["w"]) * jnp.mean(batch)
    batch, grads = jnp.ones(4), {"w": jnp.ones(2)}
    known = {**globals(), **locals()}
    ours = [line.split(" | ")[1] for line in table.splitlines() if line.startswith("| ")]
    codes = [code for cell in ours for code in re.findall(r"`([^`]+)`", cell)]
    codes = [code for code in codes if re.match(r"~?[a-z]+\.|~?[A-Za-z_.]+\(", code)]
    assert len(codes) >= 140
    for code in codes:
        assert eval(code, known) is not None, code
