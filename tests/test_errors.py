"""Messages of errors: their length, whatever is passed."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp.checkpoint import Checkpointer


class Deep(nnx.Module):
    def __init__(self, rngs):
        for number in range(12):
            setattr(self, f"layer{number}", nnx.Linear(4, 4, rngs=rngs))


MODEL = Deep(nnx.Rngs(0))
TREE = {f"layer{number}": np.ones((4, 4)) for number in range(60)}


@pytest.mark.parametrize("value", [MODEL, TREE], ids=["model", "tree"])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: jaxmp.load_recipe("bf16").wrap({"model": x}),
        lambda x: jaxmp.autocast(x, "bf16"),
        lambda x: jaxmp.autocast([x], "bf16"),
        lambda x: jaxmp.load_recipe([x]),
        lambda x: jaxmp.Policy(x, "bf16", "f32"),
        lambda x: jaxmp.Policy("f32", "bf16", "f32", window=x),
        lambda x: jaxmp.DynamicLossScale(init_scale=x),
        lambda x: jaxmp.Budget(loss=x),
        lambda x: Checkpointer("x", keep=x),
        lambda x: jaxmp.fp8._scaling.as_scaling(x),
        lambda x: jaxmp.losses.softmax_cross_entropy(jnp.ones((2, 2)), jnp.ones(2, int), z_loss=x),
    ],
)
def test_no_error_contains_a_whole_model(call, value):
    with pytest.raises(jaxmp.JaxmpError) as error:
        call(value)
    text = str(error.value)
    assert len(text) < 1700 and text.count("\n") < 60
    if len(text) > 1000:
        assert " characters) ... " in text


def test_long_messages_are_shortened_in_the_middle():
    text = "first" + "x" * 5000 + "last"
    short = str(jaxmp.JaxmpError(text))
    assert short.startswith("firstx") and short.endswith("xlast") and "(3,709 characters)" in short
    assert str(jaxmp.JaxmpError("x" * 1600)) == "x" * 1600
    # Reports of failed checks list all of them.
    assert str(jaxmp.errors.AuditFailedError(text)) == text
    assert str(jaxmp.errors.ValidationFailedError(text)) == text


def test_a_state_without_counters_cannot_be_checked():
    for read in (jaxmp.check, jaxmp.get_skip_stats):
        with pytest.raises(jaxmp.JaxmpError, match="contains no set of skip counters"):
            read({"params": jnp.ones(2)})


def test_two_states_cannot_be_read_as_one():
    tx = jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1))
    states = [tx.init({"w": jnp.ones(2)}) for _ in range(2)]
    with pytest.raises(jaxmp.JaxmpError, match="contains more than one set of skip counters, at "):
        jaxmp.get_skip_stats(states)


@pytest.mark.parametrize(("first", "second"), [("fp16", "bf16"), ("fp8_delayed", "fp32")])
def test_the_last_recipe_of_a_model_replaces_the_first(first, second):
    x = jnp.ones((2, 4))
    first, second = map(jaxmp.load_recipe, (first, second))
    twice, once = second.wrap(first.wrap(MODEL)), second.wrap(MODEL)
    program = lambda model: str(jax.make_jaxpr(lambda x: model.layer0(x))(x))
    assert program(twice) == program(once)
    paths = lambda model: jax.tree.structure(nnx.to_pure_dict(nnx.state(model)))
    assert paths(twice) == paths(once)
    linen = flax.linen.Dense(32)
    twice, once = second.wrap(first.wrap(linen)), second.wrap(linen)
    variables = once.init(jax.random.key(0), x)
    program = lambda model: str(jax.make_jaxpr(model.apply)(variables, x))
    assert program(twice) == program(once)
    shapes = lambda model: jax.eval_shape(model.init, jax.random.key(0), x)
    assert shapes(twice) == shapes(once)


def test_names_of_commands_lead_to_functions():
    with pytest.raises(AttributeError, match=r"'locate'. Use jaxmp.locate_nonfinite.$"):
        _ = jaxmp.locate
