"""Warnings about devices that compute slowly in the dtypes of a recipe."""

import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmp
from jaxmp._core import _compat
from jaxmp._policies import _device

X = jnp.ones((2, 4))


@pytest.fixture(autouse=True)
def fresh_warnings():
    """Resets the record of warnings that are shown once in a process."""
    _device._warn_of.cache_clear()


def linen(recipe):
    model = recipe.wrap(nn.Dense(3))
    jax.eval_shape(model.init_with_output, jax.random.key(0), X)
    variables = jax.eval_shape(nn.Dense(3).init, jax.random.key(0), X)
    jax.eval_shape(model.apply, variables, X)


def in_nnx(recipe):
    model = recipe.wrap(nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0))))
    nnx.jit(lambda model, x: model(x)).trace(model, X)


def autocast(recipe):
    jax.eval_shape(jaxmp.autocast(lambda x: x @ x.T, recipe), X)


def shown(use, recipe, target, capability):
    """Returns the warnings, at lines of this file, of using a recipe twice on a device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _compat.context(target=target, capability=capability):
            for _ in range(2):
                use(jaxmp.load_recipe(recipe))
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("use", [linen, in_nnx, autocast])
@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_bf16_on_a_gpu_without_it_warns_once_and_names_fp16(use, capability):
    (message,) = shown(use, "bf16", "gpu", capability)
    assert f"compute capability {capability[0]}.{capability[1]}" in message
    fix = re.search(r"recipe = (.*)\.$", message)[1]
    assert eval(fix, {"jaxmp": jaxmp}) == jaxmp.load_recipe("fp16")


@pytest.mark.parametrize(
    ("recipe", "target", "capability"),
    [
        ("bf16", "gpu", (8, 0)),
        ("bf16", "gpu", None),
        ("bf16", "cpu", None),
        ("bf16", "tpu", None),
        ("fp16", "gpu", (7, 0)),
        ("fp32", "gpu", (7, 0)),
        ("tf32", "gpu", (7, 0)),
    ],
)
@pytest.mark.parametrize("use", [linen, in_nnx, autocast])
def test_devices_and_recipes_without_a_warning(use, recipe, target, capability):
    assert shown(use, recipe, target, capability) == []


@pytest.mark.parametrize("use", [linen, in_nnx, autocast])
@pytest.mark.parametrize(("recipe", "fitting"), [("fp16", "bf16"), ("fp16_params", "bf16_params")])
def test_fp16_on_a_tpu_warns_and_names_bf16(use, recipe, fitting):
    (message,) = shown(use, recipe, "tpu", None)
    assert "not float16" in message and f"recipe = jaxmp.load_recipe({fitting!r})." in message


def test_16_bit_parameters_are_kept_by_the_recipe_that_is_named():
    (message,) = shown(linen, "bf16_params", "gpu", (7, 0))
    assert "load_recipe('fp16_params')" in message


def test_one_rule_in_bfloat16_is_enough():
    policies = jaxmp.PolicyMap("fp16", [jaxmp.Rule("head", "c=bf16", required=False)])
    assert len(shown(linen, policies, "gpu", (7, 0))) == 1
