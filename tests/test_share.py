"""The 16-bit share of the matmul FLOPs of a model: reports and warnings."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from grids import fast_cases

X = jnp.ones((2, 8))


# ---------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------


def own_product(x, w, how):
    if how == "wide":  # 16-bit operands, FP32 sums
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)
    return jnp.asarray(x, jnp.float32) @ jnp.asarray(w, jnp.float32)


class OwnLayer(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x):
        return own_product(x, self.param("w", nn.initializers.ones, (8, 8)), self.how)


class OwnNet(nn.Module):
    """Model with two layers that cast their operands, depending on `how`, and one Flax layer."""

    how: str = "cast"
    transform: str = ""
    traces = 0

    @nn.compact
    def __call__(self, x):
        OwnNet.traces += 1
        layer = nn.remat(OwnLayer) if self.transform == "remat" else OwnLayer
        for _ in range(2):
            x = layer(self.how)(x)
        return nn.Dense(8)(x)


class OwnNnxLayer(nnx.Module):
    def __init__(self, how):
        self.w, self.how = nnx.Param(jnp.ones((8, 8))), how

    def __call__(self, x):
        return own_product(x, self.w[...], self.how)


def own_nnx_net(how="cast"):
    dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return nnx.Sequential(OwnNnxLayer(how), OwnNnxLayer(how), dense)


def linen_loss(recipe, **options):
    """Returns a loss function of a new model class, and its arguments."""
    cls = type("Net", (OwnNet,), {})
    net = cls(**options)
    params, model = net.init(jax.random.key(0), X), jaxmp.load_recipe(recipe).wrap(net)
    return lambda params, x: model.apply(params, x).mean(), params


def nnx_loss(recipe, **options):
    model = jaxmp.load_recipe(recipe).wrap(own_nnx_net(**options))
    graphdef, params = nnx.split(model)
    return lambda params, x: nnx.merge(graphdef, params)(x).mean(), params


LOSSES = pytest.mark.parametrize("make", [linen_loss, nnx_loss])


def caught(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert all(warning.filename == __file__ for warning in found)
    return [str(warning.message) for warning in found]


# ---------------------------------------------------------------------------
# The warning
# ---------------------------------------------------------------------------


@LOSSES
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda f: jax.vmap(f, (None, 0))])
@fast_cases("jit-linen_loss", "grad-nnx_loss", "<lambda>-linen_loss")
def test_a_low_share_is_reported_once_with_a_remedy_that_works(make, transform):
    loss_fn, params = make("bf16")
    (message,) = caught(lambda: [transform(loss_fn)(params, X[None] + i) for i in range(2)])
    assert message.startswith("33% of the matmul FLOPs of ")
    assert "Own" in message and "layer" in message.lower()
    names = {"jaxmp": jaxmp, "recipe": jaxmp.load_recipe("bf16"), "loss_fn": loss_fn}
    exec(message.partition("operation: ")[2].removesuffix("."), names)
    assert jaxmp.audit(jax.grad(loss_fn), params, X).low_precision_share < 0.5
    assert jaxmp.audit(jax.grad(names["loss_fn"]), params, X).low_precision_share == 1


@LOSSES
@pytest.mark.parametrize("recipe", ["fp32", "tf32"])
def test_recipes_in_fp32_report_nothing(make, recipe):
    loss_fn, params = make(recipe)
    assert caught(lambda: loss_fn(params, X)) == []


@LOSSES
def test_16_bit_matmuls_with_fp32_results_are_no_reason(make):
    loss_fn, params = make("bf16", how="wide")
    assert caught(lambda: loss_fn(params, X)) == []


@LOSSES
def test_layers_with_a_rule_in_fp32_are_no_reason(make):
    rules = [jaxmp.Rule("re:(OwnLayer_|layers/).*", "c=f32", why="on purpose")]
    loss_fn, params = make(jaxmp.PolicyMap("bf16", rules))
    assert caught(lambda: loss_fn(params, X)) == []


@LOSSES
def test_the_remedy_reports_nothing_itself(make):
    loss_fn, params = make("bf16")
    loss_fn = jaxmp.autocast(loss_fn, "bf16")
    assert caught(lambda: jax.jit(jax.grad(loss_fn))(params, X)) == []


def test_layers_under_remat_are_reported():
    loss_fn, params = linen_loss("bf16", transform="remat")
    assert len(caught(lambda: jax.grad(loss_fn)(params, X))) == 1


def test_only_models_in_16_bits_are_traced_a_second_time_and_once_per_shape():
    for recipe, traces in (("bf16", [2, 3]), ("fp32", [1, 2])):
        loss_fn, params = linen_loss(recipe, how="wide")
        OwnNet.traces = 0
        for expected in traces:
            caught(lambda: jax.jit(lambda *args: loss_fn(*args))(params, X))
            assert expected == OwnNet.traces


def test_a_model_that_cannot_be_traced_again_runs():
    class Once(nn.Module):
        calls = 0

        @nn.compact
        def __call__(self, x):
            Once.calls += 1
            if Once.calls == 2:
                raise RuntimeError("a second call")
            return OwnLayer("cast")(x)

    params = Once().init(jax.random.key(0), X)
    model = jaxmp.load_recipe("bf16").wrap(Once())
    (message,) = caught(lambda: model.apply(params, X))
    assert "Once cannot be traced: RuntimeError: a second call. So" in message
    assert Once.calls == 3


# ---------------------------------------------------------------------------
# explain
# ---------------------------------------------------------------------------


def test_explain_reports_the_share():
    for explanation in (
        jaxmp.explain(OwnNet(), "bf16")(X).policies,
        jaxmp.explain(own_nnx_net(), "bf16")(X).policies,
        jaxmp.explain(own_nnx_net(), "bf16")(jax.ShapeDtypeStruct((2, 8), jnp.float32)).policies,
    ):
        np.testing.assert_allclose(explanation.low_precision_share, 1 / 3)
        _, first, second, *_ = str(explanation).splitlines()
        assert first == "33.3% of the matmul FLOPs run in 16 bits or fewer."
        assert second.endswith("loss_fn = jaxmp.autocast(loss_fn, recipe).")


def test_explain_of_a_model_that_follows_names_no_remedy():
    explanation = jaxmp.explain(nn.Dense(4), "fp16")(X).policies
    assert explanation.low_precision_share == 1
    assert "autocast" not in str(explanation)
    assert "autocast" not in str(jaxmp.explain(nn.Dense(4), "fp32")(X).policies)


def test_explain_without_inputs_or_matmuls_knows_no_share():
    assert jaxmp.explain(own_nnx_net(), "bf16")().policies.low_precision_share is None
    explanation = jaxmp.explain(nn.Embed(3, 4), "bf16")(jnp.array([1])).policies
    assert explanation.low_precision_share is None
    assert "FLOPs" not in str(explanation)


class Dropping(nn.Module):
    """Model with random numbers, batch statistics and keyword arguments."""

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "bf16_params"])
def test_explain_takes_random_numbers_and_state(recipe):
    explanation = jaxmp.explain(Dropping(), recipe)(X, train=True).policies
    assert explanation.low_precision_share == 1


# ---------------------------------------------------------------------------
# autocast around a wrapped model
# ---------------------------------------------------------------------------


class Headed(nn.Module):
    """Model whose head has a rule with an FP32 output dtype."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="lm_head")(nn.Dense(8)(x))


def scaled(loss_fn):
    return lambda *args: jaxmp.StaticLossScale(1.0).scale(loss_fn(*args))


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
@fast_cases("bf16")
def test_autocast_around_a_wrapped_model_keeps_the_backward_pass_in_16_bits(recipe):
    model, params = jaxmp.load_recipe(recipe).wrap(Headed()), Headed().init(jax.random.key(0), X)
    x = jax.random.normal(jax.random.key(1), X.shape)
    loss_fn = lambda params, x: jnp.square(model.apply(params, x)).mean()
    both = jax.grad(scaled(jaxmp.autocast(loss_fn, recipe)))
    assert jaxmp.audit(both, params, x).low_precision_share == 1
    for ours, theirs in zip(
        jax.tree.leaves(both(params, x)),
        jax.tree.leaves(jax.grad(scaled(loss_fn))(params, x)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=1e-3)
