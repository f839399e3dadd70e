"""Losses and gradients of the language models in `examples/`, in Linen and NNX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gpt
import jaxmp
from relaxed import relaxed
from train_lm import prepare, prepare_nnx

FRAMEWORKS = ("linen", "nnx")


def byte_gpt_step(framework, recipe, model, inner=None):
    """Returns a train step of the byte-level GPT, and the shapes of its state, or NNX objects.

    `inner` is the optimizer of optax; None for `optax.adamw(1e-3)`.
    """
    steps, tx = [], relaxed(optax.adamw(1e-3) if inner is None else inner)

    def state():
        make = prepare_nnx if framework == "nnx" else prepare
        *state, step, _ = make(recipe, model, tx)
        steps.append(step)
        return state

    # To compile the initialization takes longer than an audit.
    shapes = nnx.eval_shape(state)
    return steps[0], *shapes


def initial_params(model):
    """Returns parameters with biases other than 0 and scales other than 1."""
    made = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    leaves, structure = jax.tree.flatten(made)
    draw = np.random.default_rng(1)
    moved = [leaf + np.float32(0.1) * draw.normal(size=leaf.shape) for leaf in leaves]
    return structure.unflatten([jnp.asarray(leaf, jnp.float32) for leaf in moved])


def make_apply(recipe, framework, model, make_nnx):
    """Returns a function of parameters and arguments that runs a model under a recipe.

    `make_nnx()` returns the NNX form of the Linen `model`, with the same parameters.
    """
    recipe = jaxmp.load_recipe(recipe)
    if framework == "linen":
        wrapped = recipe.wrap(model)
        return lambda params, *args: wrapped.apply({"params": params}, *args)

    def apply(params, *args):
        in_nnx = make_nnx()
        nnx.update(in_nnx, params)
        return recipe.wrap(in_nnx)(*args)

    return apply


def loss_and_gradient(apply, params, tokens_BS):
    """Returns the loss of predicting the next token, and its gradient."""
    inputs, labels = jnp.asarray(tokens_BS[:, :-1]), jnp.asarray(tokens_BS[:, 1:])
    scaled = jaxmp.StaticLossScale(1.0).scale
    loss = lambda params: scaled(apply(params, inputs, labels))
    return jax.jit(jax.value_and_grad(loss))(params)


def check_training(example, toy, framework, recipe, tokens):
    """Trains a toy by the command of an example on the tokens 1 to 8, in turn."""
    (np.arange(4000) % 8 + 1).astype(np.uint16).tofile(tokens)
    options = dict(steps=20, batch_size=4, lr=2e-2, tokens=tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(example.SIZES, "tiny", toy)
        losses = example.main(recipe, example.Size["tiny"], gpt.Framework(framework), **options)
    assert len(losses) == 20 and np.isfinite(losses).all()
    assert losses[0] > 4.5 and losses[-1] < 2.5


def softmax(x):
    """Computes a softmax over the last axis with NumPy."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def check_gradient(reference_loss, params, gradient, tolerance):
    """Compares a gradient with the slope of an FP64 loss along it, which is its squared norm."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (params, gradient))
    moved = [jax.tree.map(lambda p, g, step=step: p + step * g, *wide) for step in (-1e-5, 1e-5)]
    slope = (reference_loss(moved[1]) - reference_loss(moved[0])) / 2e-5
    square = sum((leaf**2).sum() for leaf in jax.tree.leaves(wide[1]))
    assert slope == pytest.approx(square, rel=10 * tolerance)
