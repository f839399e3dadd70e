"""Float16 trainings whose parts do not fit say so at their first call."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp

X = jnp.ones((4, 8))
NO_SCALED_GRADIENT = "has a loss scale, but no gradient has been scaled"
NO_SCALE = "this program has no loss scale"
NO_FLOAT16 = "not applied to a model or a function, and the loss contains no float16"


def linen_step(recipe, *, wraps=True, optimizer=True, scales=True, form="state"):
    """Makes a step of a Linen model with a TrainState, or as a plain loop of optax."""
    model = recipe.wrap(nn.Dense(8)) if wraps else nn.Dense(8)
    params = model.init(jax.random.key(0), X)["params"]
    tx = recipe.optimizer(optax.sgd(0.1)) if optimizer else optax.sgd(0.1)
    loss_fn = lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2)
    if form == "state":
        state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

        @jax.jit
        def step(state, x):
            gradient = state.value_and_grad(loss_fn) if scales else None
            plain = lambda x: jax.value_and_grad(loss_fn)(state.params, x)
            loss, grads = (gradient or plain)(x)
            return state.apply_gradients(grads=grads), loss

        return lambda: step(state, X)

    @jax.jit
    def loop(params, opt_state, x):
        scale = jaxmp.get_loss_scale(opt_state) if optimizer else None
        gradient = jaxmp.value_and_grad(loss_fn, loss_scale=scale) if scales else None
        loss, grads = (gradient or jax.value_and_grad(loss_fn))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return lambda: loop(params, tx.init(params), X)


def nnx_step(recipe, *, wraps=True, optimizer=True, scales=True):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model = recipe.wrap(model) if wraps else model
    tx = recipe.optimizer(optax.sgd(0.1)) if optimizer else optax.sgd(0.1)
    trainer = jaxmp.nnx.Optimizer(model, tx)
    loss_fn = lambda model, x: jnp.mean(model(x) ** 2)

    @nnx.jit
    def step(model, trainer, x):
        gradient = trainer.value_and_grad if scales else nnx.value_and_grad
        loss, grads = gradient(loss_fn)(model, x)
        trainer.update(model, grads)
        return loss

    return lambda: step(model, trainer, X)


def raw_step(recipe, **options):
    return linen_step(recipe, form="optax", **options)


FORMS = pytest.mark.parametrize("make", [linen_step, nnx_step, raw_step])


@FORMS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": False}, NO_SCALED_GRADIENT),
        ({"scales": False, "optimizer": False}, NO_SCALE),
        ({"wraps": False}, NO_FLOAT16),
    ],
    ids=["plain_gradient", "plain_optimizer", "plain_model"],
)
def test_what_does_not_fit_is_said_at_the_first_call(make, options, message):
    step = make(jaxmp.load_recipe("fp16"), **options)
    with pytest.warns(jaxmp.errors.RecipeWarning, match=message):
        step()


@FORMS
@pytest.mark.parametrize("recipe", ["fp16", "bf16"])
def test_whole_trainings_do_not_warn(make, recipe):
    with warnings.catch_warnings():
        warnings.simplefilter("error", jaxmp.errors.RecipeWarning)
        make(jaxmp.load_recipe(recipe))()


def test_a_model_of_the_author_in_float16_does_not_warn():
    model = nn.Dense(8, dtype=jnp.float16)
    params = model.init(jax.random.key(0), X)
    tx = jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1))
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    with jax.numpy_dtype_promotion("standard"):
        _, grads = state.value_and_grad(
            lambda params: jnp.mean(model.apply(params, X).astype(jnp.float32))
        )()
    state.apply_gradients(grads=grads)


def test_a_loss_without_float16_is_traced_once():
    scale, calls = jaxmp.DynamicLossScale(), []
    loss_fn = lambda w: calls.append(w) or jnp.sum(w)
    jax.jit(jaxmp.value_and_grad(loss_fn, loss_scale=scale)).lower(jnp.ones(8))
    assert len(calls) == 1


def test_a_model_in_float16_may_be_evaluated_without_a_loss_scale():
    model = jaxmp.load_recipe("fp16").wrap(nn.Dense(8))
    jax.jit(model.apply)(model.init(jax.random.key(0), X), X)


def test_a_function_under_autocast_is_checked_too():
    loss_fn = jaxmp.autocast(lambda w: jnp.sum(X @ w), "fp16")
    with pytest.warns(jaxmp.errors.RecipeWarning, match=NO_SCALE):
        jax.grad(loss_fn)(jnp.ones((8, 2)))
