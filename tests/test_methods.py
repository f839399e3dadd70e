"""Methods other than the forward pass: losses, training steps, encoders, decoders."""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp import PolicyMap, Rule, get_policy
from jaxmp.errors import PolicyError, RecipeWarning, RuleError
from programs import dtypes, operands, products, trace
from relaxed import relaxed

BF16, F32 = np.dtype("bfloat16"), np.dtype("float32")
X = jax.random.normal(jax.random.key(0), (32, 8))
# bfloat16 represents multiples of 4 near 1000.
TARGETS = 1000.0 + X.sum(1)


def operand_dtypes(fn, *args):
    return {name for pair in operands(fn, *args) for name in pair}


class Critic(nnx.Module):
    def __init__(self, rngs):
        self.value = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.value(x)[:, 0]

    def loss(self, x, targets):
        assert x.dtype == targets.dtype == F32
        return jnp.mean((self(x).astype(F32) - targets) ** 2)


class LinenCritic(nn.Module):
    def setup(self):
        self.value = nn.Dense(1)

    __call__, loss = Critic.__call__, Critic.loss


def linen_loss(policies):
    model = LinenCritic()
    variables = model.init(jax.random.key(1), X)
    wrapped = model if policies is None else jaxmp.load_recipe(policies).wrap(model)
    return lambda x, y: wrapped.apply(variables, x, y, method="loss")


def nnx_loss(policies):
    model = Critic(nnx.Rngs(1))
    return model.loss if policies is None else jaxmp.load_recipe(policies).wrap(model).loss


@pytest.mark.parametrize("make_loss", [linen_loss, nnx_loss])
@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_a_loss_that_is_a_method_receives_its_targets_in_float32(make_loss, recipe):
    loss = make_loss(recipe)
    value = loss(X, TARGETS)
    assert value.dtype == F32
    # The targets exceed the predictions 500 times, whose rounding therefore changes little.
    np.testing.assert_allclose(value, make_loss(None)(X, TARGETS), rtol=1e-4)
    assert operand_dtypes(loss, X, TARGETS) == {
        jaxmp.load_recipe(recipe).policies.default.compute_dtype.name
    }


# ---------------------------------------------------------------------------
# Encoders, decoders, generation
# ---------------------------------------------------------------------------


# Dtypes of the arguments of the methods below, in the order of the calls.
# Dtypes in searches, of which there are two under strict promotion, and in calls.
SEEN = []


class Codes:
    """A base class that is no module, whose methods Flax does not intercept."""

    def __call__(self, x):
        SEEN.append(x.dtype)
        return self.decode(self.encode(x))

    def encode(self, x):
        SEEN.append(x.dtype)
        return nn.relu(self.down(x))

    def decode(self, z):
        SEEN.append(z.dtype)
        return self.up(z)


class Autoencoder(nnx.Module):
    def __init__(self, rngs):
        self.down, self.up = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

    __call__, encode, decode = Codes.__call__, Codes.encode, Codes.decode


class LinenAutoencoder(nn.Module):
    def setup(self):
        self.down, self.up = nn.Dense(16), nn.Dense(16)

    __call__, encode, decode = Codes.__call__, Codes.encode, Codes.decode


class MixedAutoencoder(Codes, nn.Module):
    setup, __call__ = LinenAutoencoder.setup, Codes.__call__


def nnx_autoencoder(policies):
    model = jaxmp.load_recipe(policies).wrap(Autoencoder(nnx.Rngs(0)))
    return lambda name, x: getattr(model, name)(x)


def linen_autoencoder(policies, cls=LinenAutoencoder, method_of=lambda cls, name: name):
    model = cls()
    variables = model.init(jax.random.key(0), X)
    model = jaxmp.load_recipe(policies).wrap(model)
    return lambda name, x: model.apply(variables, x, method=method_of(cls, name))


def mixed_autoencoder(policies):
    return linen_autoencoder(policies, MixedAutoencoder)


def functions_of_mixed_autoencoder(policies):
    return linen_autoencoder(policies, MixedAutoencoder, getattr)


AUTOENCODERS = [nnx_autoencoder, linen_autoencoder, mixed_autoencoder]
AUTOENCODERS += [functions_of_mixed_autoencoder]


@pytest.mark.parametrize("make", AUTOENCODERS)
def test_layers_of_encoders_and_decoders_cast_their_operands(make):
    call = make("bf16")
    SEEN.clear()
    code = call("encode", X)
    image = call("decode", code)
    # The arguments are those of the caller; the output dtype of the recipe is float32.
    assert set(SEEN) == {F32}
    assert code.dtype == image.dtype == F32
    for name, value in (("encode", X), ("decode", code)):
        assert operand_dtypes(functools.partial(call, name), value) == {"bfloat16"}
    SEEN.clear()
    np.testing.assert_allclose(call("__call__", X), image, rtol=2e-2, atol=1e-2)
    assert set(SEEN) == {BF16}


@pytest.mark.parametrize("make", AUTOENCODERS)
def test_a_rule_declares_further_forward_passes(make):
    rule = Rule("", forward_methods=["encode"], why="the encoder alone is evaluated")
    call = make(PolicyMap("bf16", [rule]))
    SEEN.clear()
    assert call("encode", X).dtype == call("decode", jnp.ones((2, 16))).dtype == F32
    assert [dtype for dtype, _ in itertools.groupby(SEEN)] == [BF16, F32]
    call = make("p=f32,c=bf16,o=bf16,forward_methods=encode+decode")
    SEEN.clear()
    assert call("encode", X).dtype == call("decode", jnp.ones((2, 16))).dtype == BF16
    assert set(SEEN) == {BF16}


class Generator(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.cell(x)

    def generate(self, x, cache, weights):
        def body(carry, _):
            x, cache = carry
            x = self(x)
            return (x, cache + x[0].astype(cache.dtype)), x

        (x, cache), outs = jax.lax.scan(body, (x, cache), None, length=3)
        return x, cache, weights * 0.5, outs.astype(BF16)


def test_results_of_other_methods_are_widened_unless_the_caller_has_passed_such_arrays():
    model = jaxmp.load_recipe("bf16").wrap(Generator(nnx.Rngs(0)))
    cache, weights = jnp.zeros((8,), BF16), jnp.full((3,), 1 / 3)
    x, cache, weights, outs = model.generate(X, cache, weights)
    assert (x.dtype, cache.dtype, weights.dtype, outs.dtype) == (F32, BF16, F32, F32)
    np.testing.assert_array_equal(weights, jnp.full((3,), 1 / 3) * 0.5)
    low = jaxmp.load_recipe("p=f32,c=bf16,o=bf16").wrap(Generator(nnx.Rngs(0)))
    low_weights = low.generate(X.astype(BF16), jnp.zeros((8,), BF16), jnp.full((3,), 1 / 3))[2]
    assert low_weights.dtype == F32


def test_attend_of_an_embedding_is_a_forward_pass():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.lm_head = nnx.Embed(16, 8, rngs=rngs)

        def logits(self, x):
            return self.lm_head.attend(x)

    model = jaxmp.load_recipe("bf16").wrap(Tied(nnx.Rngs(0)))
    (product,) = products(trace(model.logits, X))
    assert dtypes(product) == ("bfloat16", "bfloat16", "float32")
    assert model.logits(X).dtype == F32


class Raw(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))

    def __call__(self, x):
        return self.embed(x)

    def embed(self, x):
        return x @ self.kernel

    def penalty(self):
        return jnp.sum(self.kernel[...] ** 2)

    def loss(self, x):
        return jnp.mean(self(x) ** 2)


class LinenRaw(nn.Module):
    @nn.compact
    def embed(self, x):
        return x @ self.param("kernel", nn.initializers.lecun_normal(), (8, 8))


def test_own_parameters_are_cast_in_the_forward_pass_only():
    model = Raw(nnx.Rngs(0))
    wrapped = jaxmp.load_recipe("p=f32,c=bf16,o=f32,forward_methods=embed").wrap(model)
    assert operand_dtypes(wrapped.embed, X) == {"bfloat16"}
    np.testing.assert_array_equal(wrapped.penalty(), model.penalty())


def test_the_call_of_a_module_by_its_own_loss_is_a_forward_pass():
    wrapped = jaxmp.load_recipe("p=f32,c=f16,o=f32").wrap(Raw(nnx.Rngs(0)))
    assert operand_dtypes(wrapped.loss, X) == {"float16"}
    assert wrapped.loss(X).dtype == F32


DECLARED = r"Rule\('', forward_methods=\['embed'\]\)"


def test_a_method_that_multiplies_by_its_own_parameters_is_reported():
    wrapped = jaxmp.load_recipe("p=f32,c=bf16,o=f32").wrap(Raw(nnx.Rngs(0)))
    with pytest.warns(RecipeWarning, match=DECLARED):
        wrapped.embed(X)


def test_a_linen_method_that_multiplies_by_its_own_parameters_is_reported():
    variables = LinenRaw().init(jax.random.key(0), X, method="embed")

    def embed(policies):
        model = jaxmp.load_recipe(policies).wrap(LinenRaw())
        return lambda x: model.apply(variables, x, method="embed")

    policies = "p=f32,c=bf16,o=f32"
    # `self.param` of Linen returns the compute dtype in every method.
    with pytest.raises(ValueError, match="promotion") as error:
        embed(policies)(X)
    note = next(note for note in error.value.__notes__ if note.startswith("jaxmp"))
    assert "Rule('', forward_methods=['embed'])" in note and "in the compute dtype" not in note
    with jax.numpy_dtype_promotion("standard"), pytest.warns(RecipeWarning, match=DECLARED):
        embed(policies)(X)
    fixed = embed(PolicyMap(policies, [Rule("", forward_methods=["embed"])]))
    assert operand_dtypes(fixed, X) == {"bfloat16"}


# ---------------------------------------------------------------------------
# Agents
# ---------------------------------------------------------------------------


class Agent(nnx.Module):
    """An agent whose training step, losses and target network are methods and attributes."""

    def __init__(self, rngs):
        self.critic, self.target = Critic(rngs), Critic(rngs)
        self.scale = nnx.Param(jnp.full((3,), 1 / 3))

    @nnx.jit
    def train_step(self, optimizer, x, targets, average):
        def loss_fn(agent):
            return agent.critic.loss(x, targets)

        loss, grads = optimizer.value_and_grad(loss_fn)(self)
        optimizer.update(self, grads)
        online, old = nnx.state(self.critic, nnx.Param), nnx.state(self.target, nnx.Param)
        nnx.update(self.target, optax.incremental_update(online, old, 0.005))
        self.scale[...] = self.scale[...] * 0.999 + 0.001
        return loss, jax.tree.map(lambda a: 0.999 * a + 0.001, average)


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_an_agent_whose_step_is_a_method_trains(recipe):
    scaled, recipe = recipe == "fp16", jaxmp.load_recipe(recipe)
    agent = recipe.wrap(Agent(nnx.Rngs(0)))
    optimizer = jaxmp.nnx.Optimizer(
        agent,
        recipe.optimizer(relaxed(optax.adam(3e-2))),
        wrt=nnx.All(nnx.Param, nnx.PathContains("critic")),
    )
    targets, average = 20 + X.sum(1), {"w": jnp.full((3,), 1 / 3)}
    losses = []
    for _ in range(60):
        loss, average = agent.train_step(optimizer, X, targets, average)
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
    # The first gradients exceed the range of float16 at a loss scale of 65,536.
    stats = jaxmp.get_skip_stats(optimizer)
    assert stats.consecutive == 0 and stats.total < (10 if scaled else 1)
    # Averages in 16 bits would stall: 0.001 is less than half a step of bfloat16 at 1/3.
    exact = 1 - (2 / 3) * 0.999**60
    np.testing.assert_allclose(average["w"], exact, rtol=1e-5)
    np.testing.assert_allclose(agent.scale[...], exact, rtol=1e-5)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(agent, nnx.Param))} == {F32}


# ---------------------------------------------------------------------------
# The field
# ---------------------------------------------------------------------------


def test_the_field_is_parsed_and_printed():
    policy = get_policy("p=f32,c=bf16,o=f32,forward_methods=encode+decode")
    assert policy.forward_methods == ("encode", "decode")
    assert get_policy(str(policy)) == policy
    rule = Rule("vae", forward_methods={"encode"})
    assert eval(repr(rule), {"Rule": Rule}) == rule
    recipe = jaxmp.load_recipe("bf16").replace(policies=PolicyMap(policy, [rule]))
    assert "forward_methods" in recipe.to_toml()


@pytest.mark.parametrize("value", [["encode", 1], "encode decode", 3, [""]])
def test_other_values_are_refused(value):
    with pytest.raises(PolicyError, match=r"forward_methods=.*for example"):
        Rule("", forward_methods=value)


def test_a_required_rule_names_an_existing_method():
    rule = Rule("", forward_methods=["encoder"])
    with pytest.raises(RuleError, match=r"'encoder'.* nearest: encode") as error:
        jaxmp.load_recipe(PolicyMap("bf16", [rule])).wrap(Autoencoder(nnx.Rngs(0)))
    assert "required=False" in str(error.value)
    optional = dataclasses.replace(rule, required=False)
    _ = jaxmp.load_recipe(PolicyMap("bf16", [optional])).wrap(Autoencoder(nnx.Rngs(0)))
