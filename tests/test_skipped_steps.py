"""Warnings about successive skipped steps: counts, causes, and functions that warn."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from gpu_compiler import needs_compiler
from jaxmp._core import _compat, _trees
from jaxmp._core._trees import all_finite
from jaxmp._tools.audit._compile import compile_for
from jaxmp._tools.audit._hlo import Program
from jaxmp._tools.audit._hlo_kernels import kernels
from jaxmp._tools.audit._trace import trace
from jaxmp.errors import CompositionError, ScaleCollapsedError, SkippedStepsWarning
from jaxmp.optim._skip import skip_nonfinite
from training_steps import new_state

PARAMS = {"a": jnp.ones(2), "b": {"w": jnp.ones(3), "x": jnp.ones(())}}
GOOD = jax.tree.map(jnp.ones_like, PARAMS)
BAD = {"a": jnp.ones(2), "b": {"w": jnp.array([1.0, jnp.nan, 1.0]), "x": jnp.array(jnp.inf)}}


def state_after(skipped, recipe="bf16", grads=BAD, skip="auto", **changes):
    """Returns a train state whose last `skipped` steps were skipped."""
    state = new_state(PARAMS, recipe, skip=skip, **changes)
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for index in range(1 + skipped):
        state = step(state, grads if index else GOOD)
    return state


def message_of(call):
    with pytest.warns(SkippedStepsWarning) as warned:
        call()
    (warning,) = warned
    assert warning.filename == __file__
    return str(warning.message)


# ---------------------------------------------------------------------------
# Text of the warnings
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("skip", ["cond", "select"])
def test_check_names_the_steps_the_scale_and_the_first_leaf(skip):
    state = state_after(12, "fp16", skip=skip)
    message = message_of(lambda: jaxmp.check(state))
    assert message.startswith("The last 12 steps were skipped (12 in total)")
    assert "The loss scale is 16." in message
    assert "that of 'b:w'." in message
    assert "by print(jaxmp.locate_nonfinite(train_step, state, batch))." in message
    causes = message.split("\n  ")[1:]
    assert [cause[:2] for cause in causes] == ["1.", "2.", "3.", "4.", "5."]
    assert "65504" in causes[0] and "not finite" in causes[1] and "sigmoid" in causes[2]
    assert "too large" in causes[3]


def test_without_a_loss_scale_the_batch_is_the_first_cause():
    grads = jax.tree.map(lambda leaf: leaf * jnp.nan, PARAMS)
    message = message_of(lambda: jaxmp.check(state_after(10, grads=grads)))
    assert "loss scale" not in message
    assert "1. The batch or the loss is not finite" in message
    assert "that of ':a', the first parameter: a non-finite loss" in message


def test_a_static_scale_is_the_first_cause():
    message = message_of(lambda: jaxmp.check(state_after(10, "fp16", loss_scale=1024.0)))
    assert "The loss scale is 1024." in message
    assert "1. The loss scale is too large" in message


def test_a_collapsed_scale_names_the_leaf_too():
    scale = jaxmp.DynamicLossScale(init_scale=2.0, min_scale=1.0)
    jaxmp.check(state_after(1, "fp16", loss_scale=scale))
    message = r"minimum, 1, and 2 consecutive step.* \(3 skipped in total\)\. .* that of 'b:w'\."
    with pytest.raises(ScaleCollapsedError, match=message):
        jaxmp.check(state_after(3, "fp16", loss_scale=scale))


@pytest.mark.parametrize("fix", ["DynamicLossScale())", "init_scale=2.0**8))"])
def test_the_fixes_are_code(fix):
    recipe = jaxmp.load_recipe("fp16")
    if "init" not in fix:
        recipe = recipe.replace(loss_scale=1024.0)
    text = message_of(lambda: jaxmp.check(state_after(10, recipe)))
    code = text[text.index("recipe.replace(") : text.index(fix) + len(fix)]
    changed = eval(code, {"recipe": recipe, "jaxmp": jaxmp})
    assert isinstance(changed.loss_scale, jaxmp.DynamicLossScale)


class Saturated(nn.Module):
    """Model whose probabilities are 1 in 16 bits."""

    @nn.compact
    def __call__(self, x):
        return jax.nn.sigmoid(nn.Dense(16, kernel_init=nn.initializers.constant(2.4))(x))


def test_the_rule_for_a_saturated_sigmoid_repairs_it():
    x = jnp.ones((2, 4))
    text = message_of(lambda: jaxmp.check(state_after(10)))
    code = text[text.index("jaxmp.Rule(") : text.index(" jaxmp.audit names")].rstrip(".")
    rule = eval(code.replace("path/of/module", "head"), {"jaxmp": jaxmp})

    def loss_under(policies):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return Saturated(name="head")(x)

        model = jaxmp.load_recipe(policies).wrap(Model())
        q = model.apply(model.init(jax.random.key(0), x), x)
        return -jnp.log(1 - q).mean()

    # Without a rule, a layer whose results a sigmoid and a loss read returns its FP32 sums.
    rounding = jaxmp.Rule("**", fp32_outputs_below=0)
    assert jnp.isinf(loss_under(jaxmp.PolicyMap("bf16", [rounding])))
    assert loss_under(jaxmp.PolicyMap("bf16", [rule, rounding])) == pytest.approx(9.6, rel=1e-4)


# ---------------------------------------------------------------------------
# Time of the warnings
# ---------------------------------------------------------------------------


def test_only_steps_in_a_row_are_reported():
    state = state_after(9)
    jaxmp.check(state)
    assert message_of(lambda: jaxmp.check(state, skipped_in_a_row=9))
    state = state.apply_gradients(grads=GOOD)
    jaxmp.check(state, skipped_in_a_row=1)
    stats = jaxmp.get_skip_stats(state)
    assert (stats.total, stats.consecutive, stats.nonfinite_leaf) == (9, 0, -1)


@pytest.mark.parametrize("skip", ["auto", "select"])
@pytest.mark.parametrize(("recipe", "scale"), [("fp16_params", 8.0), ("bf16", None)])
def test_gradients_that_are_all_zero_are_counted_and_named(recipe, scale, skip):
    """The norm of float16 values overflows, so the normalized values and all gradients are zero."""
    h = jnp.full((4,), 60000, jnp.float16)
    norm = {
        True: lambda h: jnp.linalg.norm(h.astype(jnp.float32)),  # the fix in the message
        False: lambda h: jnp.linalg.norm(h).astype(jnp.float32),
    }
    targets = jnp.arange(4.0)

    def loss(p, is_fixed):
        scaled = p["w"].astype(jnp.float16) * h
        quotient = scaled.astype(jnp.float32) / norm[is_fixed](scaled)
        return jax.lax.select(p["b"] > 5, p["b"].astype(jnp.float32), quotient @ targets)

    changes = {"loss_scale": scale or "none", "skip": skip}
    dtype = jnp.float16 if scale else jnp.float32
    params = {"w": jnp.ones(4, dtype), "b": jnp.zeros(())}
    step = jax.jit(
        lambda state, is_fixed: state.apply_gradients(
            grads=state.value_and_grad(functools.partial(loss, is_fixed=is_fixed))()[1]
        ),
        static_argnums=1,
    )
    for is_fixed in norm:
        state = new_state(params, recipe, optax.sgd(1e-3), **changes)
        for _ in range(10):
            state = step(state, is_fixed)
        stats = jaxmp.get_skip_stats(state)
        assert (stats.total, stats.zero_gradients) == (0, 0 if is_fixed else 10)
        if is_fixed:
            jaxmp.check(state)
            continue
        text = message_of(lambda state=state: jaxmp.check(state))
        assert "10 steps were all zero" in text and "jnp.linalg.norm(x.astype(" in text
        # The gradient of the smallest array alone ends the row.
        state = step(state.replace(params=params | {"b": jnp.full((), 9.0)}), is_fixed)
        assert jaxmp.get_skip_stats(state).zero_gradients == 0


@pytest.mark.parametrize("recipe", ["fp16", "bf16_params"])
def test_devices_that_could_skip_alone_are_an_error_and_its_fix_runs(recipe):
    """By hand, `w` is split over the devices, and each of them has a copy of `b`."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    recipe = jaxmp.load_recipe(recipe)
    params = {"w": jnp.ones(4), "b": jnp.ones(())}
    spec = {"w": jax.P("data"), "b": jax.P()}
    grads = {"w": jnp.array([1.0, 1.0, 1.0, jnp.inf]), "b": jnp.ones(())}

    def run(tx, split=lambda tree: tree):
        def step(params, grads):
            params, grads = split((params, grads))
            updates, _ = tx.update(grads, tx.init(params), recipe.cast_params(params))
            return jax.tree.map(lambda leaf: leaf[None], updates)

        mapped = jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=jax.P("data"))
        return jax.jit(mapped)(params, grads)

    inner = optax.sgd(0.1)
    with pytest.raises(CompositionError, match=r"axis_name=\('data',\)"):
        run(recipe.optimizer(inner))
    updates = run(recipe.optimizer(inner, axis_name=("data",)))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    # A device that trains alone skips alone.
    updates = run(recipe.optimizer(inner), lambda tree: _compat.vary(tree, ("data",)))
    assert updates["b"][0] != 0 and updates["b"][1] == 0


@pytest.mark.parametrize("recipe", ["fp32", "fp16", "bf16_params"])
def test_parts_of_parameters_on_each_device_share_the_counters(recipe):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    recipe, params = jaxmp.load_recipe(recipe), {"w": jnp.ones(4)}

    def run(tx, last):
        state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
        specs = jax.tree.map(lambda leaf: jax.P("data") if leaf.shape else jax.P(), state)
        grads = {"w": jnp.array([1.0, 1.0, 1.0, last])}
        step = lambda state, grads: state.apply_gradients(grads=grads)
        in_specs = specs, jax.P("data")
        mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=specs)
        return jax.jit(mapped)(state, grads)

    with pytest.raises(CompositionError, match=r"loss scale .* axis_name=\('data',\)"):
        run(recipe.optimizer(optax.sgd(0.1)), 1.0)
    tx = recipe.optimizer(optax.sgd(0.1), axis_name="data")
    assert jaxmp.get_skip_stats(run(tx, jnp.inf)).total == 1 and run(tx, 1.0).params["w"][3] < 1


def test_an_nnx_optimizer_reports_too():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.load_recipe("bf16").optimizer(optax.sgd(0.1)))
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), nnx.state(model, nnx.Param))
    for _ in range(10):
        optimizer.update(model, grads)
    assert "that of ':bias'" in message_of(lambda: jaxmp.check(optimizer))


@pytest.mark.parametrize("skip", ["cond", "select"])
def test_devices_agree_on_the_leaf(skip):
    state = new_state({"a": jnp.ones(2), "b": jnp.ones(2)}, "bf16", axis_name="data", skip=skip)

    def step(state, row):
        after = state.apply_gradients(grads={"a": jnp.zeros(2), "b": row})
        return jaxmp.get_skip_stats(after)

    for last, counts in ((jnp.nan, (1, 1, 0)), (1.0, (0, -1, 0)), (0.0, (0, -1, 1))):
        rows = jnp.array([[0.0, 0.0], [last, 0.0]])
        stats = jax.vmap(step, (None, 0), axis_name="data")(state, rows)
        results = stats.total, stats.nonfinite_leaf, stats.zero_gradients
        assert [each.tolist() for each in results] == [[count] * 2 for count in counts]


# ---------------------------------------------------------------------------
# Statistics, wherever the loop stores them
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_batch_statistics_stay_finite_in_any_loop(framework, recipe):
    """The optimizer sees neither the statistics nor the call that computes them."""
    recipe, good = jaxmp.load_recipe(recipe), jnp.arange(8.0).reshape(4, 2)
    bad = good.at[0, 0].set(jnp.inf)
    if framework == "linen":
        model = recipe.wrap(nn.Sequential([nn.BatchNorm(use_running_average=False)]))
        apply = jax.jit(functools.partial(model.apply, mutable=["batch_stats"]))
        states = [model.init(jax.random.key(0), good)]
        states += [apply(states[-1], x)[1] for x in (bad, good)]
    else:
        model = recipe.wrap(nnx.Sequential(nnx.BatchNorm(2, rngs=nnx.Rngs(0))))
        run = nnx.jit(lambda model, x: (model(x), nnx.as_pure(nnx.state(model, nnx.BatchStat)))[1])
        states = [nnx.as_pure(nnx.state(model, nnx.BatchStat)), run(model, bad), run(model, good)]
    first, kept, last = (jax.tree.leaves(state)[0] for state in states)  # the mean
    assert kept[0] == first[0] and kept[1] != first[1]
    assert np.isfinite(last).all() and last[0] != first[0]


# ---------------------------------------------------------------------------
# Cost
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "first"),
    [
        ([1.0, 2.0], 2),
        ([np.nan, 2.0], 0),
        ([1.0, np.inf], 1),
        ([1, 2.0, np.nan, np.nan], 2),
        ([1 + 1j, complex(0, np.inf)], 1),
        ([1, 2], 2),
        ([], 0),
    ],
)
def test_the_first_leaf_that_is_not_finite(tree, first):
    tree = [jnp.asarray(leaf) for leaf in tree]
    assert int(_trees.check_squares(tree)[0]) == first
    assert bool(_trees.all_finite(tree)) == (first == len(tree))


@pytest.mark.parametrize("skip", ["select", "cond"])
@pytest.mark.parametrize(("size", "leaf"), [(1e38, -1), (np.inf, 1)])
def test_gradients_in_fp32_and_fp64(skip, size, leaf):
    """Each array is tested in its own dtype: in FP64, the square of 1e38 is finite."""
    with jax.enable_x64(True):
        tx = skip_nonfinite(optax.sgd(0.1), skip=skip)
        grads = {"a": jnp.ones(3, jnp.float32), "b": jnp.array([1.0, size], jnp.float64)}
        _, state = jax.jit(tx.update)(grads, tx.init(grads))
    assert int(state.stats.nonfinite_leaf) == leaf


@pytest.mark.parametrize("skip", ["select", "cond"])
@pytest.mark.parametrize(
    ("values", "skipped"),
    [([-1e18], 0), ([-1.7e19], 0), ([-1.9e19], 1), ([1.5e19] * 3, 1)],
    ids=["small", "largest", "square", "sum of squares"],
)
def test_a_gradient_whose_square_overflows_is_skipped(skip, values, skipped):
    # Adam's second moment would be infinite, and clipping by norm would set all gradients to zero.
    tx = skip_nonfinite(optax.adam(0.1), skip=skip)
    grads = {"a": jnp.ones(3), "b": jnp.float32([1.0, *values])}
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        _, state = jax.jit(tx.update)(grads, tx.init(grads))
    assert int(state.stats.total) == skipped
    assert int(state.stats.nonfinite_leaf) == (1 if skipped else -1)
    assert all_finite(state.inner_state)


@pytest.mark.parametrize("skip", ["select", "cond"])
@pytest.mark.parametrize(("size", "zeros"), [(1e-18, 0), (1e-25, 1), (0.0, 1)])
def test_gradients_whose_squares_are_zero_count_as_zero(skip, size, zeros):
    tx = skip_nonfinite(optax.sgd(0.1), skip=skip)
    grads = {"a": jnp.zeros(3, jnp.bfloat16), "b": jnp.complex64([0, size * 1j])}
    _, state = jax.jit(tx.update)(grads, tx.init(grads))
    assert int(state.stats.zero_gradients) == zeros


def test_the_check_is_part_of_the_clipped_norm():
    # With clipping, XLA reads the gradients once and sums no squares twice.
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    grads = {str(i): jnp.ones((64, 8 + i)) for i in range(4)}

    def sums(tx):
        with jax.numpy_dtype_promotion("standard"):
            text = jax.jit(tx.update).lower(grads, tx.init(grads)).compile().as_text()
        return len(re.findall(r"= f32\[\]\S* reduce\(", text))

    guarded = sums(skip_nonfinite(clip, skip="select"))
    assert guarded == sums(clip) == len(grads)


def test_the_index_costs_a_few_operations_whatever_the_number_of_leaves():
    def operations(fn, count):
        return len(jax.make_jaxpr(fn)([jnp.ones(2)] * count).eqns)

    more = [
        operations(_trees.check_squares, n) - operations(_trees.all_finite, n) for n in (2, 100)
    ]
    assert more[0] == more[1] <= 9


def test_counters_that_cannot_change_are_passed_through():
    """A GPU starts a kernel for each scalar of the state that a step computes."""
    state = new_state(PARAMS, "bf16", skip="select")
    step = lambda state, grads: state.apply_gradients(grads=grads).opt_state
    closed = jax.make_jaxpr(step)(state, GOOD)
    paths = [path for path, _ in jax.tree.leaves_with_path(step(state, GOOD))]
    kept = {
        path[-1].name
        for path, var in zip(paths, closed.jaxpr.outvars, strict=True)
        if var in closed.jaxpr.invars
    }
    counters = {field.name for field in dataclasses.fields(jaxmp.optim._skip.SkipStats)}
    changing = {"total", "consecutive", "last_finite", "nonfinite_leaf", "zero_gradients"}
    assert counters - kept == changing
    assert {"overflow", "fits"} <= kept


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_programs_for_a_gpu_count_the_same(recipe):
    """They pass what the counters read through one array."""
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    tx = jaxmp.load_recipe(recipe).replace(skip="select").optimizer(optax.sgd(0.1))
    states = {}
    for target in ("cpu", "gpu"):
        with _compat.context(target=target):
            state = jaxmp.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
            step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
            states[target] = [state := step(state, grads) for grads in (GOOD, zero, zero, BAD, BAD)]
    assert jaxmp.get_skip_stats(states["cpu"][2]).zero_gradients == 2
    assert jaxmp.get_skip_stats(states["cpu"][4]).consecutive == 2
    jax.tree.map(np.testing.assert_array_equal, states["cpu"], states["gpu"])


@needs_compiler
def test_one_kernel_updates_all_counters_and_the_loss_scale():
    tx = jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1))
    with _compat.context(target="gpu", capability=(9, 0)):
        traced = trace(tx.update, (GOOD, tx.init(PARAMS), PARAMS), {})
    program = Program(compile_for("h200", traced).text)
    results = [step.instruction.shapes for step in kernels(program)]
    # Four counters, that of overflows at the smallest scale, the scale, and its applied steps.
    counts = [len(shapes) for shapes in results if not any(shape.sizes for shape in shapes)]
    assert max(counts) == 7
