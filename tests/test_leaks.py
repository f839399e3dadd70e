"""Tracers do not outlive their trace."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp
from grids import EXPENSIVE
from relaxed import relaxed

pytestmark = pytest.mark.usefixtures("check_leaks")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.remat(nn.Dense)(8)(x)
        return nn.Dense(1, name="lm_head")(nn.relu(nn.LayerNorm()(x)))[:, 0]


LEAKED = []


def test_a_tracer_that_outlives_its_trace_is_an_error():
    with pytest.raises(Exception, match="Leaked trace"):
        jax.make_jaxpr(lambda x: LEAKED.append(x) or x + 1)(1.0)
    LEAKED.clear()


@pytest.mark.parametrize("recipe", [pytest.param("bf16", marks=EXPENSIVE), "fp16_params"])
def test_a_linen_step_with_microbatches(recipe):
    recipe = jaxmp.load_recipe(recipe)
    model = recipe.wrap(Net())
    x = jnp.ones((4, 3))
    params = model.init(jax.random.key(0), x)["params"]
    tx = recipe.optimizer(relaxed(optax.adamw(1e-2)))
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def step(state, x):
        loss_fn = lambda p, x: jnp.mean(state.apply_fn({"params": p}, x) ** 2)
        loss, grads = state.value_and_grad(loss_fn, microbatches=2)(x)
        return state.apply_gradients(grads=grads), loss

    _, loss = step(state, x)
    assert bool(jnp.isfinite(loss))


def test_an_nnx_step():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.load_recipe("fp32").optimizer(optax.sgd(0.1)))

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = optimizer.value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))(model, x)
        optimizer.update(model, grads)
        return loss

    assert bool(jnp.isfinite(step(model, optimizer, jnp.ones((4, 3)))))
