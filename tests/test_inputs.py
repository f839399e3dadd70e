"""Inputs that must not be rounded: `keep_inputs`, and inputs of modules that compute in FP32."""

import dataclasses
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from jaxmp import Policy, PolicyMap, Rule, get_policy, load_recipe
from jaxmp.errors import PolicyError, RecipeError, RuleError

MIXED = "p=f32,c=bf16,o=f32"
# 257 is 256 in bfloat16.
T = jnp.array([257.0, 3.0])
X = jnp.ones((2, 4))


def sinusoid(t):
    angles = t[:, None] * jnp.exp(jnp.linspace(0.0, -3.0, 4))[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


# Half a step of bfloat16 below 1: a result in 16 bits. A rounded time step is off by 0.86.
ROUNDING = 2**-9
EXACT = np.asarray(sinusoid(T))


# ---------------------------------------------------------------------------
# keep_inputs
# ---------------------------------------------------------------------------


class LinenNet(nn.Module):
    def setup(self):
        self.layer = nn.Dense(3)

    def __call__(self, x, t, *, sigma=None):
        sown = {"x": x, "t": t, "sigma": sigma}
        self.sow("dtypes", "call", {k: v for k, v in sown.items() if v is not None})
        return self.layer(x)

    def encode(self, other, t):
        self.sow("dtypes", "encode", {"other": other, "t": t})
        return self.layer(other)


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x, t, *, sigma=None):
        return self.layer(x)


def linen_dtypes(policies, *args, method="__call__", **kwargs):
    model = jaxmp.linen.apply_policy(LinenNet(), policies)
    variables = nn.Dense(3).init(jax.random.key(0), X)
    variables = {"params": {"layer": variables["params"]}}
    _, state = model.apply(variables, *args, method=method, mutable=["dtypes"], **kwargs)
    ((seen,),) = state["dtypes"].values()
    return {name: str(value.dtype) for name, value in seen.items()}


@pytest.mark.parametrize("names", [["t", "sigma"], [1, "sigma"], ["sigma", "t", "absent"]])
def test_kept_arguments_are_not_cast_however_they_are_passed(names):
    rule = Rule("", keep_inputs=names, required=False)
    policies = PolicyMap(MIXED, [rule])
    kept = {"x": "bfloat16", "t": "float32"}
    assert linen_dtypes(policies, X, T) == kept
    assert linen_dtypes(policies, X, t=T) == kept
    assert linen_dtypes(policies, X, T, sigma=T) == {**kept, "sigma": "float32"}
    other = {"other": "bfloat16", "t": "float32"}
    assert linen_dtypes(policies, X, T, method="encode") == other
    assert linen_dtypes(MIXED, X, T) == dict.fromkeys(kept, "bfloat16")


@pytest.mark.parametrize("policies", [MIXED + ",keep_inputs=t", "bf16", "fp16", "fp8"])
def test_the_default_policy_keeps_inputs_of_every_module(policies):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x, t):
            return nn.remat(Inner)()(x, t)

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x, t):
            assert x.dtype != jnp.float32 or self.is_initializing()
            nn.Dense(1)(x)
            return sinusoid(t)

    model = jaxmp.linen.apply_policy(Outer(), policies)
    variables = model.init(jax.random.key(0), X, T)
    np.testing.assert_allclose(model.apply(variables, X, T), EXACT, atol=ROUNDING)


def test_kept_arguments_of_nnx_modules():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x, t):
            dtypes.append((str(x.dtype), str(t.dtype)))
            return self.layer(x)

    dtypes = []
    model = jaxmp.nnx.apply_policy(Net(nnx.Rngs(0)), PolicyMap(MIXED, [Rule("", keep_inputs=[1])]))
    model(X, T)
    model(X, t=T)
    nnx.jit(lambda model, x, t: model(x, t))(model, X, T)
    assert dtypes == [("bfloat16", "float32")] * 3


def test_a_rule_without_keep_inputs_has_those_of_the_default():
    policies = PolicyMap(MIXED + ",keep_inputs=t", [Rule("a", "c=f32"), Rule("b", keep_inputs=[])])
    assert policies.resolve("a", LinenNet).keep_inputs == ("t",)
    assert policies.resolve("b", LinenNet).keep_inputs == ()
    # Only the arguments that a module has; without a class only those that its rule names.
    assert policies.resolve("c", nn.Dense) == get_policy(MIXED)
    assert policies.resolve("c") == get_policy(MIXED)


def test_keep_inputs_in_policies_and_files(tmp_path):
    policy = Policy("f32", "bf16", "f32", keep_inputs=["t", 1, "t"])
    assert policy.keep_inputs == ("t", 1)
    assert str(policy) == "p=f32,c=bf16,o=f32,keep_inputs=t+1"
    assert get_policy(str(policy)) == policy == pickle.loads(pickle.dumps(policy))
    assert hash(get_policy(str(policy))) == hash(policy)
    assert Rule("a", "keep_inputs=t+1") == Rule("a", keep_inputs=("t", 1))
    assert Rule("a", "keep_inputs=none").fields == {"keep_inputs": ()}
    recipe = load_recipe("bf16").replace(policies=PolicyMap(policy, [Rule("a", keep_inputs=[0])]))
    file = tmp_path / "kept.toml"
    file.write_text(recipe.to_toml())
    assert load_recipe(file) == recipe
    assert eval(repr(recipe.policies.rules[0])) == recipe.policies.rules[0]


@pytest.mark.parametrize(
    "value, reason",
    [
        ([-1], "position -1 is negative"),
        ([True], "True is neither an argument name nor a position"),
        ([1.5], "1.5 is neither an argument name nor a position"),
        (["a b"], "'a b' is not the name of an argument"),
        (3, "it must be a list"),
        ("t+-2", "position -2 is negative"),
    ],
)
def test_bad_values_are_refused(value, reason, tmp_path):
    with pytest.raises(PolicyError, match=reason) as error:
        Rule("a", keep_inputs=value)
    assert repr(value) in str(error.value) and "keep_inputs=('t', 'positions')" in str(error.value)
    with pytest.raises(PolicyError, match=reason):
        Policy("f32", "bf16", "f32", keep_inputs=value)
    if not isinstance(value, str):
        file = tmp_path / "bad.toml"
        literal = str(value).replace("'", '"').lower()
        file.write_text(f'extends = "bf16"\n[policy]\nkeep_inputs = {literal}\n')
        with pytest.raises(RecipeError, match=r"line 3.*keep_inputs"):
            load_recipe(file)


@pytest.mark.parametrize(
    "rule, words",
    [
        (Rule("", keep_inputs=["tt"]), "names 'tt'.*NNXNet(x, t, sigma).*Write keep_inputs=['t']"),
        (Rule("layer", keep_inputs=["t"]), "names 't'.*Linear(inputs"),
        (Rule(module_type="NNXNet", keep_inputs=[3]), "names position 3.*NNXNet(x, t"),
    ],
)
def test_an_argument_that_no_module_has_is_refused(rule, words):
    pattern = ".*".join(map(escaped, words.split(".*")))
    with pytest.raises(RuleError, match=pattern):
        jaxmp.nnx.apply_policy(NNXNet(nnx.Rngs(0)), PolicyMap(MIXED, [rule]))
    lenient = dataclasses.replace(rule, required=False)
    jaxmp.nnx.apply_policy(NNXNet(nnx.Rngs(0)), PolicyMap(MIXED, [lenient]))


def escaped(text):
    return "".join("\\" + char if char in "()[].+*" else char for char in text)


def test_explain_shows_the_arguments_that_a_module_has():
    rows = jaxmp.linen.explain(LinenNet(), "bf16", X, T).rows
    assert {row.path: row.policy.keep_inputs for row in rows} == {"": ("t", "sigma"), "layer": ()}


# ---------------------------------------------------------------------------
# Shipped rules
# ---------------------------------------------------------------------------

EMBEDDINGS = ["temb", "time_mlp", "time_mlp/layers_0", "unet/time_embedding", "t_embedder"]
EMBEDDINGS += ["time_mlp/layers/0", "dit/TimestepEmbedder_0", "FlaxTimesteps_0", "sigma_embed"]
EMBEDDINGS += ["SinusoidalPosEmb_0", "GaussianFourierProjection_0", "fourier_features"]
OTHERS = ["pos_embed", "embed", "token_embed", "block_0/time_emb_proj", "time_mlp/layers_2", ""]
OTHERS += [
    "TimestepEmbedder_0/Dense_0",
    "time_mixing",
    "FourierLayer_0",
    "TimeMixing_0",
    "item_emb",
]


@pytest.mark.parametrize("name", ["bf16", "bf16_params", "fp16", "fp16_params", "fp8_delayed"])
def test_shipped_recipes_embed_time_steps_in_fp32(name):
    policies = load_recipe(name).policies
    half = policies.default.compute_dtype
    for path in EMBEDDINGS:
        policy = policies.resolve(path)
        assert (policy.compute_dtype, policy.output_dtype) == (np.float32, half), path
        assert policy.matmul == "default"
    for path in OTHERS:
        assert policies.resolve(path).compute_dtype == half, path
