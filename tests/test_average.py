"""Averages and copies of parameters: EMA, Polyak averages, target networks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from arrays import assert_close
from checkpoint_matrix import recipe_of
from jaxmp._tools.validate._pure import as_pure
from jaxmp.optim import fp32_copy, incremental_update
from training_steps import new_state

RECIPES = ["fp32", "bf16", "fp16", "bf16_params", "fp16_params", "packed"]
# A step rounds the average to FP32, by at most 2**-24 of it; 200 steps add up in the worst case.
TOLERANCE = 200 * 2.0**-24


def make_state(name):
    params = {"w": jax.random.normal(jax.random.key(0), (4, 3)), "b": jnp.ones(3)}
    return new_state(params, recipe_of(name), optax.sgd(1e-3))


@functools.cache
def jitted(step_size):
    return jax.jit(lambda new, old: incremental_update(new, old, step_size))


@pytest.mark.parametrize("name", RECIPES)
def test_a_train_state_is_averaged_from_its_masters(name):
    """The reference is computed in FP64 from the FP32 values of the parameters."""
    state = make_state(name)

    @jax.jit
    def step(state, target):
        grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5, jnp.float32), state.params)
        state = state.apply_gradients(grads=grads)
        return state, incremental_update(state, target, 0.005)

    target = fp32_copy(state)
    expected = jax.tree.map(np.float64, jaxmp.get_master_params(state))
    for _ in range(200):
        state, target = step(state, target)
        new = jax.tree.map(np.float64, jaxmp.get_master_params(state))
        expected = jax.tree.map(lambda n, e: e + 0.005 * (n - e), new, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(target)} == {jnp.dtype("float32")}
    assert_close(target, expected, TOLERANCE)


def test_averages_of_rounded_arrays_converge_and_those_of_optax_do_not():
    new, wide = {"w": jnp.full(3, 2.0, jnp.bfloat16)}, {"w": jnp.ones(3)}
    # The result for a 16-bit average is in FP32, so that it does not stall either.
    ours, stalled, biased = (
        fp32_copy(jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)),
        {"w": jnp.ones(3, jnp.bfloat16)},
        wide,
    )
    assert jitted(0.005)(new, stalled)["w"].dtype == jnp.float32
    theirs = jax.jit(functools.partial(optax.incremental_update, step_size=0.005))
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(2000):
            ours, stalled, biased = (
                jitted(0.005)(new, ours),
                theirs(new, stalled),
                theirs(new, biased),
            )
    limit = 2 - 0.995**2000
    assert abs(float(ours["w"][0]) - limit) < 2000 * 2.0**-24
    assert float(stalled["w"][0]) < 1.5 and abs(float(biased["w"][0]) - limit) > 1e-3


def test_a_step_size_of_one_copies_and_of_zero_keeps():
    rng = np.random.default_rng(0)
    new, old = ({"w": jnp.asarray(rng.normal(size=1000), jnp.float32)} for _ in range(2))
    np.testing.assert_array_equal(jitted(1)(new, old)["w"], new["w"])
    np.testing.assert_array_equal(jitted(0)(new, old)["w"], old["w"])
    traced = jax.jit(incremental_update)(new, old, jnp.bfloat16(1))
    np.testing.assert_array_equal(traced["w"], new["w"])


@pytest.mark.parametrize("name", ["bf16_params", "fp16_params", "packed"])
def test_a_cast_average_causes_no_warning(name, recwarn):
    average = {"ema": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}}
    cast = recipe_of(name).cast_params(average)
    assert all(leaf.dtype.itemsize == 2 for leaf in jax.tree.leaves(cast)) and not recwarn.list


def test_other_leaves_are_those_of_the_parameters():
    leaves = {"key": jax.random.key(0), "n": jnp.arange(2), "z": jnp.array([1j]), "none": None}
    new = {"params": {"w": jnp.ones(2)}, "_overwrite_with_gradient": {"a": jnp.ones(1)}}
    old = jax.tree.map(jnp.zeros_like, new)
    moved = incremental_update(new, old, 0.5)
    assert moved["params"]["w"][0] == 0.5 and moved["_overwrite_with_gradient"]["a"][0] == 1
    changed = {**fp32_copy(leaves), "n": jnp.zeros(2, int), "z": jnp.array([0j])}
    moved = incremental_update(leaves, changed, 0.5)
    assert moved["n"].tolist() == [0, 1] and moved["z"][0] == 0.5j and moved["key"] == leaves["key"]
    shapes = jax.eval_shape(lambda: {"w": jnp.ones(2, jnp.bfloat16)})
    assert fp32_copy(shapes)["w"].dtype == jnp.float32


def test_an_optimizer_is_averaged_if_it_has_all_masters():
    params = {"w": jnp.full(3, 1.001)}
    tx = recipe_of("bf16_params").optimizer(optax.sgd(1e-3))
    average = incremental_update(tx.init(params), {"w": jnp.zeros(3)}, 0.5)
    np.testing.assert_array_equal(average["w"], params["w"] / 2)
    for name in ("fp32", "packed"):
        with pytest.raises(jaxmp.JaxmpError, match=r"jaxmp.get_master_params\(train_state\)"):
            incremental_update(recipe_of(name).optimizer(optax.sgd(1e-3)).init(params), params, 0.5)


@pytest.mark.parametrize(
    ("old", "step_size", "message"),
    [
        ({"w": jnp.ones(2)}, 1.5, r"step_size=1.5 .* decay=0.999 is step_size=0.001"),
        ({"v": jnp.ones(2)}, 0.5, r"average = jaxmp.optim.fp32_copy\(new\)"),
    ],
)
def test_wrong_arguments_are_refused(old, step_size, message):
    with pytest.raises(jaxmp.JaxmpError, match=message):
        incremental_update({"w": jnp.ones(2)}, old, step_size)


def test_state_and_average_are_donated_and_keep_their_shardings():
    mesh = jax.make_mesh((2,), ("data",))
    rows = NamedSharding(mesh, P("data", None))
    state = make_state("bf16_params")
    by_rows = jax.tree.map(
        lambda leaf: rows if np.shape(leaf) == (4, 3) else NamedSharding(mesh, P()), state
    )
    state = jax.device_put(state, by_rows)
    target = fp32_copy(state)
    assert target["w"].sharding == rows

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state, target):
        grads = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), state.params)
        state = state.apply_gradients(grads=grads)
        return state, incremental_update(state, target, 0.5)

    for _ in range(2):
        state, target = step(state, target)
    assert target["w"].sharding.is_equivalent_to(rows, 2) and int(state.step) == 2


def test_averages_under_pmap():
    new = {"w": jnp.arange(2.0, dtype=jnp.bfloat16)}
    old = {"w": jnp.ones(2)}
    average = jax.pmap(lambda n, o: incremental_update(n, o, 0.25))(new, old)
    assert average["w"].tolist() == [0.75, 1.0]


# ---------------------------------------------------------------------------
# NNX
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp32", "bf16_params", "packed"])
def test_nnx_averages_are_those_of_the_masters(name):
    recipe = recipe_of(name)
    model = recipe.wrap(nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.relu))
    optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.sgd(1e-3)))
    target = jaxmp.nnx.EMA(model, decay=0.995)
    flaxs = nnx.EMA(model, decay=0.995, only=nnx.Param)
    kernel_of = lambda: np.float64(full_kernel(model, optimizer))
    expected = np.float64(target.params["layers"][0]["kernel"][...])
    np.testing.assert_allclose(expected, kernel_of(), rtol=2.0**-8)

    @nnx.jit
    def step(model, optimizer, target, flaxs):
        params = nnx.state(model, nnx.Param)
        grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5, jnp.float32), params)
        optimizer.update(model, grads)
        target.update(model, optimizer)
        flaxs.update(model)

    with jax.numpy_dtype_promotion("standard"):
        for _ in range(200):
            step(model, optimizer, target, flaxs)
            expected = expected + 0.005 * (kernel_of() - expected)
    averaged = target.apply_to(model)
    kernel = averaged.layers[0].kernel
    assert kernel[...].dtype == jnp.float32 and kernel is target.params["layers"][0]["kernel"]
    assert_close(kernel[...], expected, TOLERANCE)
    error = np.abs(np.float64(flaxs.params["layers"][0]["kernel"][...]) - expected).max()
    assert (error > 1e-3) == (name != "fp32")
    assert averaged(jnp.ones((1, 4))).dtype == model(jnp.ones((1, 4))).dtype


def full_kernel(model, optimizer):
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    pure = jaxmp.optim._find.replace_by_masters(params, nnx.as_pure(optimizer.opt_state))
    return pure["layers"][0]["kernel"]


def test_nnx_averages_of_a_part_and_of_everything():
    recipe = jaxmp.load_recipe("fp8_delayed").replace(policies="p=bf16,c=bf16,o=f32,matmul=fp8")
    model = recipe.wrap(
        nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.BatchNorm(16, rngs=nnx.Rngs(0)))
    )
    optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.sgd(1e-3)))
    for only, count in ((nnx.PathContains("kernel"), 1), (..., 6), (nnx.Param, 4)):
        average = jaxmp.nnx.EMA(model, 0.5, only=only)
        average.update(model, optimizer)
        leaves = jax.tree.leaves(average.params)
        assert len(leaves) == count and {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    with pytest.raises(jaxmp.JaxmpError, match=r"decay=2 is not between 0 and 1"):
        jaxmp.nnx.EMA(model, 2)


# ---------------------------------------------------------------------------
# Validation
# ---------------------------------------------------------------------------


def run_of(state, step):
    return jaxmp.TrainingRun(state=state, step=step, batches=[0.0] * 3, evaluate=lambda *_: 0.0)


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_a_validation_reads_the_parameters_beside_an_average(form):
    train = make_state("bf16_params")
    average = {name: jnp.zeros_like(leaf) for name, leaf in fp32_copy(train).items()}
    state = (average, train)
    if form == "dict":
        state = {"average": average, "key": jax.random.key(0), "train": train}
    pure = as_pure(run_of(state, lambda state, batch: (state, {"loss": batch})), "make_run", 2)
    full = pure.params(pure.arrays)
    np.testing.assert_array_equal(full["w"], jaxmp.get_master_params(train)["w"])
    ones = {f":{name}": jnp.ones_like(leaf) for name, leaf in full.items()}
    changed = jax.tree.structure(state).unflatten(pure.with_params(pure.arrays, ones))
    of_average, of_train = changed if form == "tuple" else (changed["average"], changed["train"])
    assert of_train.params["w"].dtype == jnp.bfloat16 and bool(jnp.all(of_train.params["w"] == 1))
    assert not of_average["w"].any()
    arrays, result = pure.step(pure.arrays, jnp.float32(2))
    assert len(arrays) == len(pure.arrays) and result.loss == 2


def test_a_validation_reads_the_model_of_the_optimizer():
    recipe = recipe_of("bf16_params")
    target, model = (recipe.wrap(nnx.Linear(4, 4, rngs=nnx.Rngs(seed))) for seed in (0, 1))
    optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.sgd(1e-3)))
    ema = jaxmp.nnx.EMA(model, 0.9)
    run = run_of((target, ema, model, optimizer), lambda *nodes: {"loss": nodes[-1]})
    pure = as_pure(run, "make_run", 2)
    expected = nnx.Linear(4, 4, rngs=nnx.Rngs(1)).kernel[...]
    np.testing.assert_array_equal(pure.params(pure.arrays)["kernel"], expected)
