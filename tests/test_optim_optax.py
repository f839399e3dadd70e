"""Optimizers and wrappers of optax: the same results inside a recipe as with FP32 parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from grids import fast_cases
from relaxed import relaxed
from training_steps import new_state

X = jax.random.normal(jax.random.key(0), (8, 4))
Y = jnp.sin(X.sum(-1))
LABELS = {"hidden": {"kernel": "a", "bias": "b"}, "head": "a"}

# BF16 parameters round the gradient's input to 8 bits; training follows within this part of the
# distance that plain FP32 training moves the parameters.
BF16_DISTANCE = 0.1
# FP16 and BF16 recipes with FP32 parameters compute the same FP32 function here, in another order.
SAME = 1e-4


def make_params():
    kernel, head = jax.random.split(jax.random.key(1))
    return {
        "hidden": {"kernel": jax.random.normal(kernel, (4, 3)) / 2, "bias": jnp.zeros(3)},
        "head": jax.random.normal(head, (3, 2)) / 2,
    }


def loss_fn(params):
    full = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    hidden = jnp.tanh(X @ full["hidden"]["kernel"] + full["hidden"]["bias"][None])
    return jnp.mean((hidden @ full["head"] - Y[:, None]) ** 2)


def no_arguments(loss, grads):
    return {}


def value(loss, grads):
    return {"value": loss}


def line_search(loss, grads):
    return {"value": loss, "grad": grads, "value_fn": loss_fn}


def objective(loss, grads):
    return {"obj_fn": loss_fn}


# Name -> optimizer, extra arguments of its update, recipes to try.
CASES = {
    "polyak_sgd": (lambda: optax.polyak_sgd(0.1), value, ("fp16", "bf16_params")),
    "momo": (lambda: optax.contrib.momo(), value, ("fp16", "bf16_params")),
    "lbfgs": (lambda: optax.lbfgs(memory_size=2), line_search, ("fp16",)),
    "reduce_on_plateau": (
        lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
        value,
        ("bf16", "bf16_params"),
    ),
    "sophia": (lambda: optax.contrib.sophia(1e-2), objective, ("bf16_params",)),
    "schedule_free": (
        lambda: optax.contrib.schedule_free_adamw(0.02),
        no_arguments,
        ("bf16_params",),
    ),
    "dowg": (lambda: optax.contrib.dowg(), no_arguments, ("bf16_params",)),
    "prodigy": (lambda: optax.contrib.prodigy(), no_arguments, ("bf16_params",)),
    "muon": (lambda: optax.contrib.muon(1e-2), no_arguments, ("bf16_params",)),
    "partition": (
        lambda: optax.partition({"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, LABELS),
        no_arguments,
        ("bf16_params",),
    ),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.sgd(0.1), 3), no_arguments, ("fp16",)),
    "flatten": (lambda: optax.flatten(optax.sgd(0.1)), no_arguments, ("bf16_params",)),
}


def train_plain(tx, extra_args, steps=3):
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params, **extra_args(loss, grads))
        return optax.apply_updates(params, updates), state

    params = make_params()
    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def train(tx, extra_args, recipe, steps=3):
    state = new_state(make_params(), recipe, tx)

    @jax.jit
    def step(state):
        loss, grads = state.value_and_grad(loss_fn)()
        return state.apply_gradients(grads=grads, extra_args=extra_args(loss, grads))

    for _ in range(steps):
        state = step(state)
    assert int(state.step) == steps and step._cache_size() <= 1
    return state


def distance(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
@fast_cases("reduce_on_plateau", "partition")
def test_optimizers_of_optax_follow_plain_fp32_training(name):
    make, extra_args, recipes = CASES[name]
    # optax mixes strong and weak dtypes, and adds scalars to arrays of another rank.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected = train_plain(make(), extra_args)
        states = {recipe: train(make(), extra_args, recipe) for recipe in recipes}
    moved = distance(expected, make_params())
    assert moved > 0
    for recipe, state in states.items():
        masters = jaxmp.get_master_params(state)
        tolerance = BF16_DISTANCE if recipe == "bf16_params" else SAME
        assert distance(masters, expected) <= tolerance * moved + 1e-6
        jax.tree.map(
            lambda param, master: np.testing.assert_array_equal(param, master.astype(param.dtype)),
            state.params,
            masters,
        )


SEARCH = relaxed(optax.scale_by_backtracking_linesearch(3, store_grad=True))


@pytest.mark.parametrize("around", [False, True])
def test_line_searches_differentiate_with_the_loss_scale(around):
    tx, recipe = optax.sgd(1.0), jaxmp.load_recipe("fp16")
    chain = lambda tx: optax.chain(tx, SEARCH)
    tx = chain(recipe.optimizer(tx)) if around else recipe.optimizer(chain(tx))
    small = lambda w: jnp.sum((w.astype(jnp.float16) * 2).astype(jnp.float32)) * 5e-10
    state = jaxmp.TrainState.create(apply_fn=None, params=jnp.ones(2), tx=tx)
    loss, grads = state.value_and_grad(small)()
    extra_args = {"value": loss, "grad": grads, "value_fn": small}
    state = state.apply_gradients(grads=grads, extra_args=extra_args)
    stored = optax.tree.get(state.opt_state, "grad")
    np.testing.assert_allclose(stored, np.full(2, 1e-9, np.float32), rtol=1e-3)


def test_a_step_whose_hessian_overflows_is_skipped():
    """Of cotangents in the range of float16, a scale of 2**16 leaves 2e-3, and not 2, finite."""
    tx = jaxmp.load_recipe("fp16").optimizer(relaxed(optax.contrib.sophia(1e-2, update_interval=1)))
    state = jaxmp.TrainState.create(apply_fn=None, params=jnp.full(2, 1e-3), tx=tx)
    fn = lambda w: jnp.sum(jnp.square(jax.lax.reduce_precision(w, 5, 10)))
    for skipped, scale in ((1, 2.0**15), (2, 2.0**14), (2, 2.0**14)):
        _, grads = state.value_and_grad(fn)()
        state = state.apply_gradients(grads=grads, extra_args={"obj_fn": fn})
        assert jaxmp.get_skip_stats(state).total == skipped
        assert jaxmp.get_loss_scale(state).scale_value == scale
    np.testing.assert_allclose(optax.tree.get(state.opt_state, "nu"), 0.02, rtol=1e-2)


def test_devices_agree_on_a_line_search():
    tx = optax.chain(optax.sgd(1e-3), SEARCH)
    tx = jaxmp.load_recipe("fp32").optimizer(tx, axis_name="data")
    state = jaxmp.TrainState.create(apply_fn=None, params=jnp.ones(2), tx=tx)
    distance_to = lambda w, x: jnp.sum((w - x) ** 4)

    def step(x):
        loss, grads = state.value_and_grad(distance_to)(x)
        extra_args = {"value": loss, "grad": grads, "value_fn": distance_to, "x": x}
        return state.apply_gradients(grads=grads, extra_args=extra_args).params

    first, second = jax.vmap(step, axis_name="data")(jnp.array([[1.0, 1.0], [9.0, 9.0]]))
    np.testing.assert_array_equal(first, second)
    assert np.any(first != 1)


LOOKAHEAD_SGD = relaxed(optax.lookahead(optax.sgd(0.1), 2, 0.5))


def lookahead_params():
    return optax.LookaheadParams.init_synced(make_params())


@pytest.mark.parametrize("recipe", ["fp32", "fp16", "bf16_params"])
@pytest.mark.parametrize("around", [False, True])
@fast_cases("True-bf16_params")
def test_lookahead_trains_two_copies_of_the_parameters(recipe, around):
    inner = relaxed(optax.lookahead(optax.adam(1e-2), 2, 0.5))
    rules = [jaxmp.Rule("hidden:bias", "p=f32")]
    recipe = jaxmp.load_recipe(recipe)
    recipe = recipe.replace(policies=jaxmp.PolicyMap(recipe, rules))
    inner = optax.chain(optax.identity(), inner) if around else inner
    state = new_state(lookahead_params(), recipe, inner)
    stored = recipe.policies.default.param_dtype
    for copy in state.params:
        assert copy["head"].dtype == stored and copy["hidden"]["bias"].dtype == jnp.float32

    plain, plain_state = lookahead_params(), inner.init(lookahead_params())
    for _ in range(3):
        # Gradients of both copies, of which the slow one has none, or of the fast one alone.
        _, grads = state.value_and_grad(lambda params: loss_fn(params.fast))()
        state = state.apply_gradients(grads=grads.fast if around else grads)
        _, grads = jax.value_and_grad(loss_fn)(plain.fast)
        updates, plain_state = inner.update(grads, plain_state, plain)
        plain = optax.apply_updates(plain, updates)
    moved = distance(plain, lookahead_params())
    tolerance = BF16_DISTANCE if stored == jnp.bfloat16 else SAME
    assert distance(jaxmp.get_master_params(state), plain) <= tolerance * moved
    skipped = state.apply_gradients(grads=jax.tree.map(lambda g: g + jnp.inf, grads))
    assert int(skipped.step) == 3 and distance(skipped.params, state.params) == 0


def test_lookahead_in_a_plain_loop_skips_with_zero_updates():
    tx = jaxmp.optim._skip.skip_nonfinite(LOOKAHEAD_SGD)
    params = lookahead_params()
    state = tx.init(params)
    for skip in ("cond", "select"):
        tx = jaxmp.optim._skip.skip_nonfinite(LOOKAHEAD_SGD, skip=skip)
        updates, _ = tx.update(jax.grad(loss_fn)(params.fast), state, params)
        assert isinstance(updates, optax.LookaheadParams) and np.any(updates.fast["head"])
        updates, new = tx.update(jax.tree.map(lambda p: p * jnp.nan, params.fast), state, params)
        assert not np.any(updates.fast["head"]) and int(new.stats.total) == 1


def test_gradients_of_single_examples_are_averaged_by_the_optimizer():
    """As by `optax.contrib.dpsgd`, whose updates have an axis less than the gradients."""
    average = lambda grads, *_: jax.tree.map(lambda g: -g.mean(0), grads)
    params, grads = jnp.ones((2, 4)), jnp.arange(24.0).reshape(3, 2, 4)
    for skip in ("cond", "select"):
        tx = jaxmp.optim._skip.skip_nonfinite(optax.stateless(average), skip=skip)
        updates, state = tx.update(grads, tx.init(params), params)
        np.testing.assert_array_equal(updates, -grads.mean(0))
        updates, state = tx.update(grads * jnp.nan, state, params)
        assert updates.shape == params.shape and not np.any(updates) and int(state.stats.total) == 1


def test_parameters_that_an_addition_made_wide_are_named_with_both_fixes():
    recipe = jaxmp.load_recipe("bf16_params")
    tx = recipe.optimizer(optax.sgd(0.1))
    state, params = tx.init(make_params()), recipe.cast_params(make_params())
    updates, state = tx.update(jax.tree.map(jnp.ones_like, make_params()), state, params)
    with jax.numpy_dtype_promotion("standard"):
        kept = optax.apply_updates(params, updates)
    tx.update(updates, state, kept)
    added = jax.tree.map(lambda p, u: p.astype(jnp.float32) + u, params, updates)
    for wide in (make_params(), added):
        with pytest.raises(jaxmp.errors.CompositionError) as error:
            tx.update(updates, state, wide)
        message = str(error.value)
        assert "':head' is float32, but its policy stores it in bfloat16" in message
        assert "params = recipe.cast_params(params)" in message
        assert "optax.apply_updates(params, updates), which keeps dtypes" in message


@pytest.mark.parametrize("skip", ["select", "cond", "none"])
def test_leaves_that_the_first_update_adds_to_the_state_are_kept(skip):
    inner = optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.sgd(0.5))
    state = new_state({"w": jnp.ones(4)}, "bf16_params", inner, skip=skip)
    for gradient in (1.0,) if skip == "none" else (jnp.nan, 1.0):
        state = state.apply_gradients(grads={"w": jnp.full(4, gradient)})
        skips = bool(jnp.isnan(gradient))
        assert optax.tree.get(state.opt_state, "norm") == (0 if skips else 2)
    np.testing.assert_array_equal(jaxmp.get_master_params(state)["w"], 0.5)


def test_a_structure_that_every_update_changes_raises():
    grow = optax.GradientTransformation(
        lambda params: (), lambda grads, state, params=None: (grads, (*state, jnp.zeros(())))
    )
    state = new_state({"w": jnp.ones(4)}, "bf16", grow)
    with pytest.raises(jaxmp.errors.CompositionError, match=r"replace\(skip='none'\)"):
        state.apply_gradients(grads={"w": jnp.ones(4)})
