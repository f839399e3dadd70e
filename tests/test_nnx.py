"""The NNX optimizer: masters, loss scale, and skipped steps that restore all Variables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from arrays import changed
from grids import fast_cases
from relaxed import relaxed
from training_steps import nnx_step, with_small_scale


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        with jax.numpy_dtype_promotion("standard"):  # flax promotes FP32 inputs and bf16 kernels
            return self.head(self.dropout(nnx.relu(self.norm(self.inner(x)))))[:, 0]


def setup(recipe):
    model = Net(nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(relaxed(optax.adamw(1e-2))))
    x = jax.random.normal(jax.random.key(0), (16, 4))
    return model, optimizer, x, jnp.sin(x.sum(-1))


def loss_fn(model, x, y):
    return jnp.mean((model(x).astype(jnp.float32) - y) ** 2)


def make_step(microbatches):
    return nnx.jit(nnx_step(loss_fn, microbatches=microbatches, batch_argnums=(1, 2)))


def values(nodes):
    return nnx.as_pure(nnx.state(nodes))


RECIPES = ["fp32", "bf16_params", "fp16_params"]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
@fast_cases("bf16_params-2", "fp16_params-1")
def test_it_trains_and_a_skipped_step_restores_everything_but_random_state(name, microbatches):
    model, optimizer, x, y = setup(with_small_scale(name))
    stored = jnp.float32 if name == "fp32" else jaxmp.load_recipe(name).policies.default.param_dtype
    assert model.inner.kernel[...].dtype == stored
    assert model.norm.mean[...].dtype == jnp.float32
    step = make_step(microbatches)
    cached = nnx.cached_partial(step, model, optimizer)
    losses = [float(cached(x, y)) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    assert int(optimizer.step[...]) == 20
    masters, params = jaxmp.get_master_params(optimizer), nnx.as_pure(nnx.state(model, nnx.Param))
    assert not changed(jax.tree.map(lambda m, p: m.astype(p.dtype), masters, params), params)
    before = values((model, optimizer))
    step(model, optimizer, x.at[0, 0].set(jnp.inf), y)
    moved = changed(before, values((model, optimizer)))
    assert any("stats" in key for key in moved)
    assert all("count" in key or "loss_scale" in key or "stats" in key for key in moved), moved
    assert int(jaxmp.get_skip_stats(optimizer).total) == 1 and int(optimizer.step[...]) == 20
    jaxmp.check(optimizer)


def test_reading_an_optimizer_returns_fp32_parameters_and_draws_no_random_numbers():
    model, optimizer, _, _ = setup(with_small_scale("fp16"))
    masters, params = jaxmp.get_master_params(optimizer), nnx.as_pure(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, masters, params)
    rngs = nnx.Rngs(0)
    for read in (jaxmp.check, jaxmp.get_loss_scale, jaxmp.get_skip_stats):
        read((optimizer, rngs))
    assert int(rngs.default.count[...]) == 0


def test_a_breaking_nesting_is_refused():
    tx = with_small_scale("bf16_params").optimizer(optax.sgd(0.1))
    with pytest.raises(jaxmp.errors.CompositionError, match="MultiSteps"):
        jaxmp.nnx.Optimizer(Net(nnx.Rngs(0)), optax.MultiSteps(tx, 2))
    with pytest.raises(jaxmp.errors.CompositionError, match=r"optax.chain\(inner"):
        jaxmp.nnx.Optimizer(Net(nnx.Rngs(0)), optax.chain(tx, optax.scale(0.5)))


@pytest.mark.parametrize("front", [optax.zero_nans, lambda: optax.clip(1.0)])
def test_an_overflow_that_a_transformation_hides_is_skipped(front):
    tx = optax.chain(front(), jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1)))
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, tx)
    before = values(model)
    optimizer.update(model, jax.tree.map(lambda x: x * jnp.inf, nnx.state(model, nnx.Param)))
    assert not changed(before, values(model))
    assert int(jaxmp.get_skip_stats(optimizer).total) == 1
    assert float(optimizer.loss_scale.scale_value) == 2.0**15
    jaxmp.check(optimizer)


def test_a_flax_optimizer_is_a_plain_loop():
    tx = optax.MultiSteps(jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1)), 2)
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx.gradient_transformation(), wrt=nnx.Param)
    with pytest.raises(jaxmp.errors.CompositionError, match="MultiSteps"):
        jaxmp.get_loss_scale(optimizer)


# Flax deprecates `sow` outside of `nnx.capture`; models that do it still exist.
def test_statistics_of_accumulated_gradients_are_restored():
    model, optimizer, x, y = setup(with_small_scale("fp32"))
    before = np.asarray(model.norm.mean[...])
    run = optimizer.value_and_grad(loss_fn)
    _, first = run(model, x * jnp.nan, y)
    _, second = run(model, x, y)
    optimizer.update(model, jax.tree.map(jnp.add, first, second))
    np.testing.assert_array_equal(np.asarray(model.norm.mean[...]), before)
    param, average = nnx.Param(jnp.ones(())), nnx.Variable(jnp.ones(2))

    def total(param, average, x):
        average[...] = 0.9 * average[...] + x
        return param[...] * x.sum()

    jaxmp.nnx.value_and_grad(total)(param, average, jnp.array([jnp.nan, 1.0]))
    assert average[...].tolist() == pytest.approx([1.0, 1.9])
