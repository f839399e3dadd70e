# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false
"""Typed program of a user, checked by pyright in strict mode and by mypy.

It is checked and not run:

    pyright tests/typing/user_program.py
    mypy --strict tests/typing/user_program.py

The two exceptions concern the packages: functions of `jax.numpy` have partially unknown types, and
optax has no stubs.
"""

from typing import assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from flax import nnx

import jaxmp
import jaxmp.nnx

Params = dict[str, jax.Array]

# ---------------------------------------------------------------------------
# Linen
# ---------------------------------------------------------------------------


class Norm(nn.Module):
    dtype: jax.typing.DTypeLike | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        return x - x.mean()


class State(jaxmp.TrainState):
    batch_stats: Params


def predict(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["w"]


def train_linen(x: jax.Array) -> jax.Array:
    jaxmp.register_layer(Norm, norm=True, dtype="dtype")
    policies = jaxmp.PolicyMap("bf16", [jaxmp.Rule("head", "c=f32")])
    model = jaxmp.load_recipe(policies).wrap(Norm())
    assert_type(model, Norm)
    policies_of_modules = jaxmp.explain(model, "fp32")(x).policies
    assert policies_of_modules is not None
    assert_type(policies_of_modules.paths, tuple[str, ...])
    attention = jaxmp.attention_fn(is_causal=True, local_window_size=(128, 0))
    assert_type(attention(x, x, x), jax.Array)

    recipe = jaxmp.load_recipe("bf16_params")
    state = State.create(
        apply_fn=predict,
        params={"w": jnp.ones((3, 1))},
        tx=recipe.optimizer(optax.sgd(0.1)),
        batch_stats={"mean": jnp.zeros(3)},
    )
    assert_type(state, State)

    def loss_fn(params: Params, x: jax.Array) -> jax.Array:
        return predict(params, x).mean()

    loss, grads = state.value_and_grad(loss_fn)(x)
    state = state.apply_gradients(grads=grads, batch_stats=state.batch_stats)
    assert_type(state, State)
    assert_type(state.step, jax.Array)
    scale = state.loss_scale
    print(scale.scale_value, loss)
    return state.step


# ---------------------------------------------------------------------------
# NNX
# ---------------------------------------------------------------------------


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def nnx_loss(model: Model, x: jax.Array) -> jax.Array:
    return model(x).mean()


def train_step(model: Model, optimizer: jaxmp.nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = optimizer.value_and_grad(nnx_loss)(model, x)
    optimizer.update(model, grads)
    return jnp.asarray(loss)


def train_nnx(x: jax.Array) -> None:
    jaxmp.register_layer(Model, kernel="weight", dot_general="dot")
    model = jaxmp.load_recipe(jaxmp.Policy("f32", "bf16", "f32")).wrap(Model(nnx.Rngs(0)))
    assert_type(model, Model)
    policies = jaxmp.explain(model, "bf16")(x).policies
    assert policies is not None
    assert_type(policies.low_precision_share, float | None)
    recipe = jaxmp.load_recipe("fp16")
    optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.adamw(1e-3)), wrt=nnx.Param)
    train_step(model, optimizer, x)
    loss, grads = jaxmp.nnx.value_and_grad(nnx_loss, loss_scale=8.0)(model, x)
    print(loss, grads)
    print(optimizer.loss_scale.scale_value)
