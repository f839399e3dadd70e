"""Tracers do not outlive their trace, and classes of models not their models."""

import gc
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp
from grids import EXPENSIVE
from relaxed import relaxed
from training_steps import new_state, state_step

check_leaks = pytest.mark.usefixtures("check_leaks")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.remat(nn.Dense)(8)(x)
        return nn.Dense(1, name="lm_head")(nn.relu(nn.LayerNorm()(x)))[:, 0]


LEAKED = []


@check_leaks
def test_a_tracer_that_outlives_its_trace_is_an_error():
    with pytest.raises(Exception, match="Leaked trace"):
        jax.make_jaxpr(lambda x: LEAKED.append(x) or x + 1)(1.0)
    LEAKED.clear()


@check_leaks
@pytest.mark.parametrize("recipe", [pytest.param("bf16", marks=EXPENSIVE), "fp16_params"])
def test_a_linen_step_with_microbatches(recipe):
    recipe = jaxmp.load_recipe(recipe)
    model = recipe.wrap(Net())
    x = jnp.ones((4, 3))
    params = model.init(jax.random.key(0), x)["params"]
    state = new_state(params, recipe, relaxed(optax.adamw(1e-2)))

    loss_fn = lambda p, x: jnp.mean(model.apply({"params": p}, x) ** 2)
    _, loss = jax.jit(state_step(loss_fn, microbatches=2))(state, x)
    assert bool(jnp.isfinite(loss))


def use_linen(wrap, x):
    """Returns references to classes of a Linen model that was differentiated."""

    class Scale(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("scale", nn.initializers.ones, ())

    class Local(nn.Module):
        def setup(self):
            self.body, self.scale = nn.remat(nn.Dense)(2), Scale()

        def __call__(self, x):
            return self.scale(self.body(x))

    jaxmp.register_layer(Scale, norm=True)
    model = wrap(Local())
    variables = model.init(jax.random.key(0), x)
    model.bind(variables).scale(x)
    jax.grad(lambda variables: model.apply(variables, x).sum())(variables)
    return weakref.ref(Local), weakref.ref(Scale)


def use_nnx(wrap, x):
    """Returns a reference to the class of an NNX model that was differentiated."""

    class Local(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.layer(x)

    nnx.grad(lambda model: model(x).sum())(wrap(Local()))
    return (weakref.ref(Local),)


@pytest.mark.parametrize(("use", "dies"), [(use_linen, True), (use_nnx, False)])
def test_a_class_dies_as_without_policies(use, dies):
    """Flax and JAX keep the classes of NNX."""
    for wrap in (jaxmp.load_recipe("bf16").wrap, lambda model: model):
        classes = use(wrap, jnp.ones((1, 2)))
        gc.collect()
        assert [cls() is None for cls in classes] == [dies] * len(classes)
