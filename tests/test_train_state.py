"""TrainState: the values that applied and skipped steps change."""

import functools
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state as flax_train_state

import jaxmp
from arrays import changed
from grids import REST, each_value, fast_cases
from relaxed import relaxed
from training_steps import new_state, state_step, with_small_scale

RECIPES = ["fp32", "tf32", "bf16", "bf16_params", "fp16", "fp16_params"]


class State(jaxmp.TrainState):
    """TrainState with batch statistics and an average of the parameters."""

    batch_stats: Any
    ema: Any


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dense(1, name="head")(nn.relu(x))[:, 0]


def setup(recipe, tx=None):
    recipe = with_small_scale(recipe)  # these tests count steps
    model = recipe.wrap(Net())
    x = jax.random.normal(jax.random.key(1), (16, 4))
    variables = Net().init(jax.random.key(0), x)
    tx = recipe.optimizer(relaxed(optax.adamw(1e-2)) if tx is None else tx)
    ema = jax.tree.map(jnp.copy, variables["params"])
    state = State.create(apply_fn=model.apply, tx=tx, ema=ema, **variables)
    return state, (x, jnp.sin(x.sum(-1)))


def make_step(microbatches=1, poison_loss=False):
    def step(state, batch):
        def loss_fn(params, batch, batch_stats):
            x, y = batch
            with jax.numpy_dtype_promotion("standard"):  # flax's norms mix bf16 and f32
                out, new = state.apply_fn(
                    {"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"]
                )
            loss = jnp.mean((out.astype(jnp.float32) - y) ** 2)
            if poison_loss:
                loss = loss + jax.lax.stop_gradient(y[0])
            return loss, (new["batch_stats"], None)

        run = state.value_and_grad(loss_fn, microbatches=microbatches, mutable_argnum=2)
        (loss, (batch_stats, _)), grads = run(batch, state.batch_stats)
        ema = jax.tree.map(lambda e, g: 0.9 * e + 0.1 * g, state.ema, grads)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats, ema=ema), loss

    return step


@pytest.mark.parametrize("recipe", RECIPES)
@fast_cases("bf16", "fp16_params")
def test_every_recipe_trains_without_a_second_trace(recipe):
    state, batch = setup(recipe)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    step = jax.jit(make_step(), donate_argnums=0)
    losses = []
    for _ in range(30):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]
    assert step._cache_size() <= 1
    assert int(state.step) == 30
    assert state.batch_stats["BatchNorm_0"]["mean"].dtype == jnp.float32
    jaxmp.check(state)


BAD = {
    "nonfinite gradient": (1, False, lambda x, y: (x.at[3, 0].set(jnp.nan), y)),
    "nan loss, finite gradients": (1, True, lambda x, y: (x, y.at[0].set(jnp.nan))),
    "inf in one microbatch": (4, False, lambda x, y: (x.at[9, 1].set(jnp.inf), y)),
}


PACKED = jaxmp.load_recipe("bf16_params").replace(master="packed")
RUNS = [(recipe, True) for recipe in (*RECIPES, "packed")] + [("fp16", False)]
# Each eager case compiles hundreds of operations.
EAGER = [pytest.param(("packed", False), kind, marks=REST) for kind in BAD]


@pytest.mark.parametrize(
    ("run", "kind"),
    [*each_value(RUNS, BAD), *EAGER],
    ids=lambda x: x if type(x) is str else f"{x[0]}-{'jit' if x[1] else 'eager'}",
)
@fast_cases(
    *("fp16-jit-nan loss, finite gradients", "fp16_params-jit-inf in one microbatch"),
    "packed-jit-nonfinite gradient",
)
def test_a_skipped_step_changes_only_scale_and_counters(run, kind):
    recipe, jitted = run
    microbatches, poison_loss, spoil = BAD[kind]
    state, batch = setup(PACKED if recipe == "packed" else recipe)
    good = make_step(microbatches)
    bad = make_step(microbatches, poison_loss)
    if jitted:
        good, bad = jax.jit(good), jax.jit(bad)
    state, _ = good(state, batch)
    skipped, _ = bad(state, spoil(*batch))
    moved = changed(state, skipped)
    assert moved and all("loss_scale" in path or "stats" in path for path in moved), moved
    assert int(skipped.step) == 1 and int(jaxmp.get_skip_stats(skipped).total) == 1
    after, _ = good(skipped, batch)
    assert int(after.step) == 2 and bool(jaxmp.get_skip_stats(after).last_finite)


def test_it_is_created_under_jit_and_scanned():
    state = jax.jit(lambda p: new_state(p, "fp16_params"))({"w": jnp.ones((3, 1))})
    loss_fn = lambda p, x: jnp.mean((x.astype(jnp.float16) @ p["w"]).astype(jnp.float32) ** 2)
    step = state_step(loss_fn)
    xs = jnp.ones((5, 2, 3))
    scanned, losses = jax.lax.scan(step, state, xs)
    looped = state
    for x in xs:
        looped, _ = jax.jit(step)(looped, x)
    assert not changed(scanned, looped)
    assert losses[-1] < losses[0]


def test_code_written_for_flax_runs_unchanged():
    params = {"w": jnp.full((3, 1), 0.5, jnp.float32)}
    apply_fn, tx = lambda p, x: x @ p["w"], relaxed(optax.adam(0.1))
    loss_fn = lambda p: jnp.mean(apply_fn(p, jnp.ones((2, 3))) ** 2)
    finals = []
    for cls in (flax_train_state.TrainState, jaxmp.TrainState):
        state = cls.create(apply_fn=apply_fn, params=params, tx=tx)
        for _ in range(5):
            state = state.apply_gradients(grads=jax.grad(loss_fn)(state.params))
        assert int(state.step) == 5
        finals.append(state.params["w"])
        state.replace(params=params)
    np.testing.assert_array_equal(*finals)


def test_plain_optimizers_have_no_scale_and_full_gradients():
    state = jaxmp.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
    assert isinstance(state.loss_scale, jaxmp.NoLossScale)
    loss, grads = state.value_and_grad(lambda p, x: jnp.sum(p["w"] * x))(jnp.ones(2))
    assert float(loss) == 2.0 and grads["w"].dtype == jnp.float32


def test_recipe_dtypes_of_accumulation_reach_value_and_grad():
    state = new_state({"w": jnp.float32(1.0)}, "fp32", accumulate_dtype="bfloat16")
    x = jnp.where(jnp.arange(512) < 256, 1.0, 2.0**-9)
    fn = lambda p, x: jnp.sum(p["w"] * x)
    assert float(state.value_and_grad(fn, microbatches=512)(x)[1]["w"]) == 0.5


def test_the_dtypes_of_gradients_do_not_change_the_update():
    """A recipe records them in its optimizer, whose parameters are still assigned."""
    results = []
    for dtype in ("float32", "float64"):
        params = {"w": jnp.full(3, 1 + 2.0**-12)}
        state = new_state(params, "bf16_params", optax.sgd(2.0**-12), reduce_dtype=dtype)
        results.append(state.apply_gradients(grads={"w": jnp.ones(3)}))
    plain, recorded = results
    assert recorded.opt_state.settings.gradients.reduce_dtype == "float64"
    assert not changed(plain.opt_state, recorded.opt_state)
    assert jaxmp.get_master_params(recorded)["w"].tolist() == [1, 1, 1]


def test_replaced_statistics_stay_finite():
    zero, tx = jnp.zeros(2), jaxmp.load_recipe("fp32").optimizer(optax.sgd(0.1))
    state = State.create(apply_fn=None, params=zero, tx=tx, batch_stats=zero, ema=None)
    new = state.replace(batch_stats=jnp.array([jnp.nan, 2.0]))
    assert new.batch_stats.tolist() == [0, 2]


def test_unknown_and_reshaped_mutables_are_refused():
    state, _ = setup("fp32")
    grads = jax.tree.map(jnp.zeros_like, state.params)
    with pytest.raises(jaxmp.JaxmpError, match=r"no field 'stats'.*class State"):
        state.apply_gradients(grads=grads, stats={})
    for stats in ({}, jax.tree.map(lambda a: jnp.stack([a, a]), state.batch_stats)):
        with pytest.raises(jaxmp.JaxmpError, match=r"another structure.*batch_stats .*argnum=2"):
            state.apply_gradients(grads=grads, batch_stats=stats)
    with pytest.raises(jaxmp.JaxmpError, match=r"computes step.*state\.replace\(step="):
        state.apply_gradients(grads=grads, step=3)


def test_random_keys_move_on_when_a_step_is_skipped():
    tx, key = jaxmp.load_recipe("fp32").optimizer(optax.sgd(0.1)), jax.random.key(0)
    state = State.create(apply_fn=None, params=jnp.ones(2), tx=tx, batch_stats=None, ema=key)
    fresh = jax.random.split(state.ema)[0]
    new = state.apply_gradients(grads=jnp.array([1.0, jnp.nan]), ema=fresh)
    assert bool(jnp.all(jax.random.key_data(new.ema) == jax.random.key_data(fresh)))


def test_required_path_rules_about_storage_are_judged_at_create():
    rule = jaxmp.Rule("hed", "p=f32", why="a typing error")
    policies = jaxmp.PolicyMap("p=bf16,c=bf16,o=f32", [rule])
    params = {"head": {"kernel": jnp.ones((2, 2))}, "body": {"kernel": jnp.ones((2, 2))}}
    with pytest.raises(jaxmp.errors.RuleError, match="'head'"):
        new_state(params, policies)
    compute_only = jaxmp.PolicyMap(policies.default, [jaxmp.Rule("hed", "c=f32")])
    new_state(params, compute_only)


def test_rules_leave_the_collection_out():
    policies = jaxmp.PolicyMap("p=bf16,c=bf16,o=f32", [jaxmp.Rule("head", "p=f32")])
    variables = {
        "params": {"head": {"kernel": jnp.ones((2, 2))}, "body": {"kernel": jnp.ones((2, 2))}},
        "batch_stats": {"mean": jnp.zeros(2)},
        "_overwrite_with_gradient": {"amax": jnp.zeros(4)},
    }
    state = new_state(variables, policies)
    dtypes = jax.tree.map(lambda p: str(p.dtype), state.params)
    assert dtypes["params"] == {"head": {"kernel": "float32"}, "body": {"kernel": "bfloat16"}}
    assert dtypes["_overwrite_with_gradient"] == {"amax": "float32"}
    assert dtypes["batch_stats"] == {"mean": "float32"}


def test_overwritten_state_is_assigned_and_reverted_on_a_skip():
    variables = {
        "params": {"w": jnp.ones(2)},
        "_overwrite_with_gradient": {"amax": jnp.zeros(4)},
    }
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    with jax.numpy_dtype_promotion("standard"):  # optax.clip_by_global_norm mixes types
        state = new_state(variables, "bf16_params", inner)
        history = jnp.arange(4.0) * 1e6
        grads = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"amax": history}}
        new = state.apply_gradients(grads=grads)
        np.testing.assert_array_equal(new.params["_overwrite_with_gradient"]["amax"], history)
        # The history is not a gradient, so it is not part of the norm that clips w to length 1.
        np.testing.assert_allclose(
            jaxmp.get_master_params(new)["params"]["w"], 1 - 0.1 / np.sqrt(2), rtol=1e-6
        )
        bad = {
            "params": {"w": jnp.array([1.0, jnp.inf])},
            "_overwrite_with_gradient": {"amax": history * 2},
        }
        skipped = new.apply_gradients(grads=bad)
    assert all("loss_scale" in p or "stats" in p for p in changed(new, skipped))


def test_partitioned_boxes_keep_their_names():
    params = {"w": nn.Partitioned(jnp.ones((4, 2)), names=("data", None))}
    state = new_state(params, "bf16_params")
    assert state.params["w"].names == ("data", None)
    assert state.params["w"].value.dtype == jnp.bfloat16
    masters = state.opt_state.inner_state.masters
    assert masters["w"].names == ("data", None) and masters["w"].value.dtype == jnp.float32
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
    np.testing.assert_allclose(jaxmp.get_master_params(state)["w"].value, 0.9, rtol=1e-6)


MOMENTS = jaxmp.load_recipe("fp16_params").replace(moment_dtype="bfloat16")


@pytest.mark.parametrize("recipe", ["bf16", MOMENTS, PACKED])
def test_flax_serialization_restores_what_it_wrote_without_casts(recipe):
    state, batch = setup(recipe)
    state, _ = jax.jit(make_step())(state, batch)
    blob = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(setup(recipe)[0], blob)
    assert not changed(state, jax.tree.map(jnp.asarray, restored))
    other, _ = setup("bf16_params" if recipe == "bf16" else "bf16")
    with pytest.raises(jaxmp.JaxmpError, match=r"Another recipe wrote[^$]*migrate=True"):
        flax.serialization.from_bytes(other, blob)
    masters = state.opt_state.inner_state
    rounded = jax.tree.map(lambda x: x.astype(jnp.float16), masters)
    rounded = flax.serialization.to_state_dict(rounded)
    with pytest.raises(jaxmp.JaxmpError, match=r"wrote this \w+: .*\(float16\)"):
        flax.serialization.from_state_dict(masters, rounded)


# ---------------------------------------------------------------------------
# Arguments of optax, shapes instead of arrays
# ---------------------------------------------------------------------------


def test_argument_numbers_count_the_parameters_as_0():
    state, _ = setup("bf16")
    x = jnp.float32(3.0)
    loss_fn = lambda params, x: (x**2 * params["head"]["bias"][0], x)
    loss, grads = state.value_and_grad(lambda *args: loss_fn(*args)[0], 1)(x)
    assert float(loss) == 0.0 and float(grads) == 0.0
    (_, aux), (grads, of_x) = state.value_and_grad(loss_fn, (0, 1), True)(x)
    assert float(grads["head"]["bias"][0]) == 9.0 and float(aux) == 3.0 and float(of_x) == 0.0
    with pytest.raises(jaxmp.JaxmpError, match="loss_scale="):
        state.value_and_grad(loss_fn, jaxmp.NoLossScale())


def test_extra_arguments_reach_the_optimizer():
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    params = {"w": jnp.ones(2)}
    for outer in (jaxmp.load_recipe("bf16_params").optimizer(tx), tx):
        state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=outer)
        _ = state.apply_gradients(grads=params, extra_args={"value": 3.0})
        assert seen == {"value": 3.0}
        seen.clear()
        _ = state.apply_gradients(grads=params)
        assert not seen
    # Optimizers that take no such arguments ignore them, as `optax.with_extra_args_support` does.
    _ = new_state(params, "bf16").apply_gradients(grads=params, extra_args={"value": 3.0})


@pytest.mark.parametrize("recipe", ["fp32", "bf16_params", "fp16_params", None])
def test_shapes_make_a_state_of_shapes(recipe):
    recipe = recipe and jaxmp.load_recipe(recipe)
    tx = optax.adamw(1e-2) if recipe is None else recipe.optimizer(relaxed(optax.adamw(1e-2)))
    x = jnp.ones((2, 4))
    variables = Net().init(jax.random.key(0), x)

    create = lambda variables: State.create(apply_fn=Net().apply, tx=tx, ema=None, **variables)
    apply_fn = create(variables).apply_fn
    abstract = create(jax.eval_shape(Net().init, jax.random.key(0), x)).replace(apply_fn=apply_fn)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
    described = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    concrete = create(variables).replace(apply_fn=apply_fn)
    assert described(abstract) == described(concrete)
    of_lambda = jax.eval_shape(lambda: create(variables)).replace(apply_fn=apply_fn)
    assert described(abstract) == described(of_lambda)
    # It has a place for the sharding of each leaf.
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.device_put(concrete, jax.tree.map(lambda _: sharding, abstract))
    assert jax.tree.structure(placed) == jax.tree.structure(concrete)


def test_shapes_keep_the_shardings_of_the_parameters():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    params = {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding), "b": jnp.ones(2)}
    state = new_state(params, "bf16_params")
    assert state.params["w"].sharding == sharding and state.params["w"].dtype == jnp.bfloat16
    assert isinstance(state.params["b"], jax.ShapeDtypeStruct)


# ---------------------------------------------------------------------------
# Frozen parameters
# ---------------------------------------------------------------------------


def frozen_and_trained(recipe):
    labels = {"frozen": "frozen", "head": "trained"}
    params = {"frozen": {"kernel": jnp.ones((4, 4))}, "head": {"kernel": jnp.ones((4, 2))}}
    parts = {"frozen": optax.set_to_zero(), "trained": recipe.optimizer(optax.sgd(0.1))}
    return params, optax.partition(parts, labels)


def stored_dtypes(params):
    return [leaf.dtype.name for leaf in jax.tree.leaves(params)]


@pytest.mark.parametrize("abstract", [False, True])
def test_frozen_parameters_in_fp32_are_reported_with_a_fix(abstract):
    recipe = jaxmp.load_recipe("bf16_params")
    params, tx = frozen_and_trained(recipe)
    if abstract:
        params = jax.eval_shape(lambda: params)
    with pytest.warns(
        jaxmp.errors.RecipeWarning, match="'frozen:kernel' is stored in float32"
    ) as warned:
        state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
    assert stored_dtypes(state.params) == ["float32", "bfloat16"]
    if abstract:
        return
    assert warned[0].filename == __file__
    names = {"state": state, "recipe": recipe}
    exec(str(warned[0].message).partition("before training: ")[2].partition(". If")[0], names)
    state = names["state"]
    assert stored_dtypes(state.params) == ["bfloat16", "bfloat16"]
    grads = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), state.params)
    after = jax.jit(lambda state: state.apply_gradients(grads=grads))(state)
    assert stored_dtypes(after.params) == ["bfloat16", "bfloat16"]
    assert after.params["frozen"]["kernel"].tolist() == state.params["frozen"]["kernel"].tolist()
    masters = jaxmp.get_master_params(after)
    np.testing.assert_allclose(masters["head"]["kernel"], 0.9, rtol=1e-6)


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_recipes_that_store_fp32_report_nothing(recipe):
    params, tx = frozen_and_trained(jaxmp.load_recipe(recipe))
    jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)


@pytest.mark.parametrize("recipe", ["bf16", "bf16_params", PACKED])
@pytest.mark.parametrize("dtype", ["float64", "longdouble", "float16"])
def test_parameters_of_numpy_are_stored_and_trained_as_those_of_jax(dtype, recipe):
    recipe = jaxmp.load_recipe(recipe)
    params = {"w": np.linspace(-1.3, 1.7, 12, dtype=dtype).reshape(4, 3)}
    batch = np.linspace(-1, 1, 8, dtype=dtype).reshape(2, 4)

    def train(params, x):
        state = new_state(params, recipe, optax.sgd(1e-3))
        policy = recipe.policies.default
        for _ in range(2):  # outside of `jit`, which casts NumPy arrays by itself
            outputs = lambda p, x: jnp.matmul(*policy.cast_to_compute((x, p["w"])))
            loss = lambda p, x: jnp.square(outputs(p, x).astype(jnp.float32)).sum()
            _, grads = state.value_and_grad(loss)(x)
            state = state.apply_gradients(grads=grads)
        return state

    as_fp32 = lambda tree: jax.tree.map(lambda x: jnp.asarray(x.astype(np.float32)), tree)
    expected = train(*as_fp32((params, batch)))
    state = train(params, batch)
    assert not changed(expected, state)
    assert state.params["w"].dtype == recipe.policies.default.param_dtype


WRONG_CALLS = {
    "create(recipe=)": (
        lambda create, state, loss: create(recipe="bf16"),
        r"no field 'recipe'.*tx=recipe\.optimizer\(tx\)",
    ),
    "create(loss_scale=)": (
        lambda create, state, loss: create(loss_scale=8.0),
        r"no field 'loss_scale'.*recipe\.replace\(loss_scale=loss_scale\)\.optimizer\(tx\)",
    ),
    "create(ema=)": (lambda create, state, loss: create(ema=0), r"class State.*: ema: Any"),
    "create(tx=1e-3)": (
        lambda create, state, loss: create(tx=1e-3),
        r"0.001, a float, is not an optax.*recipe\.optimizer\(optax\.adam\(1e-3\)\)",
    ),
    "recipe.optimizer(optax.adam)": (
        lambda create, state, loss: jaxmp.load_recipe("bf16").optimizer(optax.adam),
        r"function adam, which was not called",
    ),
    "value_and_grad(params, batch)": (
        lambda create, state, loss: state.value_and_grad(loss)(state.params, jnp.ones(2)),
        r"Leave them out: state\.value_and_grad\(loss_fn\)\(batch\)",
    ),
    "value_and_grad(state, batch)": (
        lambda create, state, loss: jaxmp.value_and_grad(loss)(state, jnp.ones(2)),
        r"Argument 0 is a TrainState.*state\.value_and_grad\(loss_fn\)\(batch\)",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_calls_name_the_call_to_write(name):
    call, message = WRONG_CALLS[name]
    arguments = {"apply_fn": None, "params": {"w": jnp.ones(2)}, "tx": optax.sgd(0.1)}
    create = lambda **changes: jaxmp.TrainState.create(**(arguments | changes))
    with pytest.raises(jaxmp.errors.JaxmpError, match=message):
        call(create, create(), lambda params, batch: params["w"] @ batch)


def test_a_loss_may_take_the_parameters_of_the_state_as_data():
    state = new_state({"w": jnp.ones(2)}, "fp32")
    loss, _ = state.value_and_grad(lambda params, old: params["w"] @ old["w"])(state.params)
    assert loss == 2


@pytest.mark.parametrize(("recipe", "more"), [("bf16", 5), ("bf16_params", 7), ("fp16_params", 9)])
def test_creating_a_state_compiles_few_programs(recipe, more, caplog):
    """The number does not grow with the shapes of the parameters, beyond that of the optimizer."""
    params = {f"w{n}": jnp.ones((n + 2, 3)) for n in range(8)}
    recipe, inner = jaxmp.load_recipe(recipe), optax.adam(1e-3)

    def programs(call):
        jax.clear_caches()
        caplog.clear()
        with jax.log_compiles(), caplog.at_level("WARNING"):
            call()
        return sum(text.startswith("Compiling ") for text in caplog.messages)

    of_optimizer = programs(lambda: inner.init(params))
    tx = recipe.optimizer(inner)
    create = functools.partial(jaxmp.TrainState.create, apply_fn=None, params=params, tx=tx)
    assert of_optimizer >= 8
    assert programs(create) <= of_optimizer + more
