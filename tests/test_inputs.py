"""Inputs that are not rounded: `keep_inputs`, and inputs of modules that compute in FP32."""

import dataclasses
import functools
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxmp
from grids import EXPENSIVE
from jaxmp import Policy, PolicyMap, Rule, get_policy, load_recipe
from jaxmp.errors import PolicyError, RecipeError, RuleError
from programs import dtypes, trace

MIXED = "p=f32,c=bf16,o=f32"
# 257 is 256 in bfloat16.
T = jnp.array([257.0, 3.0])
X = jnp.ones((2, 4))


SCALES = np.linspace(0.9, 1.0, 8) / 256


def powers(t):
    """Features of a time step that decide nothing, so that it is cast without a rule."""
    return (t[:, None] * SCALES[None].astype(t.dtype)) ** 8


# Half a step of bfloat16 below 1: a result in 16 bits. That of a rounded time step is off by 0.03.
ROUNDING = 2**-9
PRODUCTS = np.asarray(T, np.float64)[:, None] * SCALES
EXACT = (PRODUCTS**8).astype(np.float32)


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
    model = jaxmp.load_recipe(policies).wrap(LinenNet())
    variables = nn.Dense(3).init(jax.random.key(0), X)
    variables = {"params": {"layer": variables["params"]}}
    _, state = model.apply(variables, *args, method=method, mutable=["dtypes"], **kwargs)
    ((seen,),) = state["dtypes"].values()
    return {name: str(value.dtype) for name, value in seen.items()}


@pytest.mark.parametrize("names", [["t", "sigma"], ["sigma", "t", "absent"]])
def test_kept_arguments_are_not_cast_however_they_are_passed(names):
    rule = Rule("", keep_inputs=names, required=False)
    policies = PolicyMap(MIXED, [rule])
    kept = {"x": "bfloat16", "t": "float32"}
    assert linen_dtypes(policies, X, T) == kept
    assert linen_dtypes(policies, X, t=T) == kept
    assert linen_dtypes(policies, X, T, sigma=T) == {**kept, "sigma": "float32"}
    forward = PolicyMap(MIXED, [dataclasses.replace(rule, forward_methods=["encode"])])
    other = {"other": "bfloat16", "t": "float32"}
    assert linen_dtypes(forward, X, T, method="encode") == other
    assert linen_dtypes(MIXED, X, T) == dict.fromkeys(kept, "bfloat16")
    assert linen_dtypes("bf16", X, T, sigma=T) == {**kept, "sigma": "float32"}


def test_kept_arguments_of_nnx_modules():
    class Net(NNXNet):
        def __call__(self, x, t):
            dtypes.append((str(x.dtype), str(t.dtype)))
            return self.layer(x)

    dtypes, policies = [], PolicyMap(MIXED, [Rule("", keep_inputs=["t"])])
    model = jaxmp.load_recipe(policies).wrap(Net(nnx.Rngs(0)))
    model(X, T)
    model(X, t=T)
    nnx.jit(lambda model, x, t: model(x, t))(model, X, T)
    assert set(dtypes) == {("bfloat16", "float32")}


def test_a_rule_without_keep_inputs_has_those_of_the_default():
    policies = PolicyMap(MIXED + ",keep_inputs=t", [Rule("a", "c=f32"), Rule("b", keep_inputs=[])])
    assert policies.resolve("a", LinenNet).keep_inputs == ("t",)
    assert policies.resolve("b", LinenNet).keep_inputs == ()
    # Only the arguments that a module has; without a class only those that its rule names.
    assert policies.resolve("c", nn.Dense) == get_policy(MIXED)
    assert policies.resolve("c") == get_policy(MIXED)


def test_keep_inputs_in_policies_and_files(write):
    policy = Policy("f32", "bf16", "f32", keep_inputs=["t", "x", "t"])
    assert policy.keep_inputs == ("t", "x")
    assert str(policy) == "p=f32,c=bf16,o=f32,keep_inputs=t+x"
    assert get_policy(str(policy)) == policy == pickle.loads(pickle.dumps(policy))
    assert hash(get_policy(str(policy))) == hash(policy)
    assert Rule("a", "keep_inputs=t+x") == Rule("a", keep_inputs=("t", "x"))
    assert Rule("a", "keep_inputs=none").fields == {"keep_inputs": ()}
    recipe = load_recipe("bf16").replace(policies=PolicyMap(policy, [Rule("a", keep_inputs=["x"])]))
    assert load_recipe(write(recipe.to_toml())) == recipe
    assert eval(repr(recipe.policies.rules[0])) == recipe.policies.rules[0]


@pytest.mark.parametrize(
    "value, reason",
    [([1], "1 is not a name"), (["a b"], "'a b' is not"), (3, "a list"), ("t+1", "'1' is not a")],
)
def test_bad_values_are_refused(value, reason, write):
    with pytest.raises(PolicyError, match=reason) as error:
        Rule("a", keep_inputs=value)
    assert repr(value) in str(error.value) and "keep_inputs=('t', 'positions')" in str(error.value)
    with pytest.raises(PolicyError, match=reason):
        Policy("f32", "bf16", "f32", keep_inputs=value)
    if not isinstance(value, str):
        literal = str(value).replace("'", '"').lower()
        file = write(f'extends = "bf16"\n[policy]\nkeep_inputs = {literal}\n')
        with pytest.raises(RecipeError, match=r"line 3.*keep_inputs"):
            load_recipe(file)


@pytest.mark.parametrize(
    "rule, words",
    [
        (Rule("", keep_inputs=["tt"]), r"keep_inputs contains 'tt'.*nearest: t\."),
        (Rule("layer", keep_inputs=["t"]), "keep_inputs contains 't'.*inputs"),
    ],
)
def test_an_argument_that_no_module_has_is_refused(rule, words):
    with pytest.raises(RuleError, match=words):
        jaxmp.load_recipe(PolicyMap(MIXED, [rule])).wrap(NNXNet(nnx.Rngs(0)))
    lenient = dataclasses.replace(rule, required=False)
    _ = jaxmp.load_recipe(PolicyMap(MIXED, [lenient])).wrap(NNXNet(nnx.Rngs(0)))


def test_explain_shows_the_arguments_that_a_module_has():
    rows = jaxmp.explain(LinenNet(), "bf16")(X, T).policies.rows
    assert {row.path: row.policy.keep_inputs for row in rows} == {"": ("t", "sigma"), "layer": ()}


# ---------------------------------------------------------------------------
# Shipped rules
# ---------------------------------------------------------------------------

EMBEDDINGS = ["temb", "time_mlp", "time_mlp/layers_0", "unet/time_embedding", "t_embedder"]
EMBEDDINGS += ["time_mlp/layers/0", "dit/TimestepEmbedder_0", "FlaxTimesteps_0", "sigma_embed"]
EMBEDDINGS += ["SinusoidalPosEmb_0", "GaussianFourierProjection_0", "fourier_features"]
OTHERS = ["pos_embed", "embed", "token_embed", "block_0/time_emb_proj", "time_mlp/layers_2", ""]
OTHERS += ["TimestepEmbedder_0/Dense_0", "time_mixing", "FourierLayer_0", "TimeMixing_0"]


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


# ---------------------------------------------------------------------------
# Modules that compute in FP32 receive inputs uncast
# ---------------------------------------------------------------------------

UNCAST = PolicyMap(MIXED, [Rule("emb", "c=f32,o=f32")])


class LinenEmbedding(nn.Module):
    @nn.compact
    def __call__(self, v):
        scale = self.param("scale", nn.initializers.ones, ())
        return powers(v.reshape(2)) * scale.astype(v.dtype)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x, c):
        x = nn.Dropout(0.5, deterministic=False)(nn.BatchNorm(use_running_average=False)(x))
        out = LinenEmbedding(name="emb")(c)
        return out + 0 * nn.Dense(8)(x).astype(out.dtype)


class NNXEmbedding(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, v):
        return powers(v.reshape(2)) * self.scale[...].astype(v.dtype)


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.emb = NNXEmbedding()
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.layer = nnx.Linear(4, 8, rngs=rngs)

    def __call__(self, x, c):
        x = self.drop(self.norm(x))
        out = self.emb(c)
        return out + 0 * self.layer(x).astype(out.dtype)


def linen_function(model, policies=UNCAST):
    model = jaxmp.load_recipe(policies).wrap(model)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = model.init(rngs, X, T)
    rngs = {"dropout": jax.random.key(2)}
    return lambda c: model.apply(variables, X, c, rngs=rngs, mutable=["batch_stats", "seen"])[0]


def nnx_function(model, policies=UNCAST):
    model = jaxmp.load_recipe(policies).wrap(model)
    graph, state = nnx.split(model)
    return lambda c: nnx.merge(graph, state, copy=True)(X, c)


MODELS = {
    "linen": functools.cache(lambda: linen_function(LinenModel())),
    "nnx": functools.cache(lambda: nnx_function(NNXModel(nnx.Rngs(0)))),
}
GRADIENT = (8 * PRODUCTS**7 * SCALES).sum(-1)


def with_gradient(model):
    return lambda t: (model(t), jax.grad(lambda t: model(t).sum())(t))


@pytest.mark.parametrize("framework", MODELS)
def test_a_module_in_fp32_receives_the_uncast_input(framework):
    model = MODELS[framework]()
    np.testing.assert_allclose(model(T), EXACT, atol=1e-5)
    out, gradient = jax.jit(with_gradient(model))(T)
    np.testing.assert_allclose(out, EXACT, atol=1e-5)
    np.testing.assert_allclose(gradient, GRADIENT, atol=1e-5)


@EXPENSIVE
@pytest.mark.parametrize("framework", MODELS)
def test_transformations_around_the_model(framework):
    model = MODELS[framework]()
    eager = jax.grad(lambda t: model(t).sum())(T)
    mapped = jax.jit(jax.vmap(with_gradient(model)))(jnp.stack([T, T]))
    _, scanned = lax.scan(lambda _, t: (None, with_gradient(model)(t)), None, T[None])
    saved = jax.jit(jax.grad(jax.checkpoint(lambda t: model(t).sum())))(T)
    for out, gradient in ((EXACT, eager), (mapped[0][0], mapped[1][1]), (EXACT, saved)):
        np.testing.assert_allclose(out, EXACT, atol=1e-5)
        np.testing.assert_allclose(gradient, GRADIENT, atol=1e-5)
    np.testing.assert_allclose(scanned[0][0], EXACT, atol=1e-5)
    np.testing.assert_allclose(scanned[1][0], GRADIENT, atol=1e-5)


class MovedModel(nn.Module):
    """Model that reshapes its time step before the embedding."""

    @nn.compact
    def __call__(self, x, c):
        return LinenEmbedding(name="emb")(c[:, None])


def test_a_reshaped_input_is_kept_by_its_name():
    rounded = powers(T.astype("bfloat16").astype("float32"))
    kept = PolicyMap(MIXED, [Rule("", keep_inputs=["c"]), *UNCAST.rules])
    for policies, expected in ((UNCAST, rounded), (kept, EXACT)):
        model = linen_function(MovedModel(), policies)
        np.testing.assert_allclose(model(T), expected, atol=1e-5)
        np.testing.assert_allclose(jax.jit(model)(T), expected, atol=1e-5)


def test_boundaries_within_boundaries():
    """Modules nested in the model receive the time step uncast too."""

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, c):
            return LinenEmbedding(name="emb")(c["time"])

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x, c):
            made = c.astype("float32") * 0 + T
            return Inner(name="a")({"time": c}), Inner(name="b")({"time": made})

    rules = [Rule("*/emb", "c=f32,o=f32"), Rule("a", "c=f16")]
    model = linen_function(Outer(), PolicyMap(MIXED, rules))
    for function in (model, jax.jit(model)):
        for out in function(T):
            np.testing.assert_allclose(out, EXACT, atol=2**-9)


def test_an_input_that_is_kept_below_a_module_that_cast_it():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, t):
            return powers(t)

    class Wrapper(nn.Module):
        @nn.compact
        def __call__(self, *args):
            return Inner(name="inner")(args[1])

    model = linen_function(Wrapper(), "bf16")
    for function in (model, jax.jit(model)):
        np.testing.assert_allclose(function(T), EXACT, atol=ROUNDING)


# ---------------------------------------------------------------------------
# Arguments and parameters that decide something
# ---------------------------------------------------------------------------

# Points with small distances, and the rows of a table between them.
Z = 20 + 0.01 * jax.random.normal(jax.random.key(1), (16, 3))
WEIGHTS = jnp.array([1.0, 1.0, -2.0])
TABLE = Z + 0.002 * jax.random.normal(jax.random.key(2), (16, 3))


def squares(a, b):
    return jnp.square(a[:, None] - b[None]).sum(-1)


def products(a, b):
    """Squared distances by a matmul."""
    return jnp.square(a).sum(-1)[:, None] + jnp.square(b).sum(-1)[None] - 2 * a @ b.T


# Functions of points, of a table with one point for each, and of a layer with 8 outputs.
READS = {
    "sine": lambda z, table, layer: jnp.sin(z * 9),
    "frequencies": lambda z, table, layer: jnp.cos(z * table),
    "distance": lambda z, table, layer: jnp.sin(20 * jnp.linalg.norm(z, axis=-1)),
    "highest": lambda z, table, layer: jnp.exp(jnp.dot(z, WEIGHTS, precision="highest")),
    "tangent": lambda z, table, layer: jax.jvp(jnp.square, (z,), (jnp.ones(z.shape),))[1] - 40,
    "deviation": lambda z, table, layer: jnp.exp(table),
    "layer": lambda z, table, layer: jnp.sin(30 * layer(z)),
    "neighbours": lambda z, table, layer: lax.top_k(-jnp.sqrt(squares(z, z)), 3)[1],
    "matmul": lambda z, table, layer: jnp.exp(-1e4 * products(z - 20, z - 20)),
    "differences": lambda z, table, layer: jnp.exp(-1e4 * squares(z[1:], z[:-1])),
    "codebook": lambda z, table, layer: jnp.abs(z[:, None] - table[None]).sum(-1).argmin(-1),
    "index": lambda z, table, layer: jnp.floor(z * 5000).astype(jnp.int32),
    "wave": lambda z, table, layer: jnp.exp(lax.complex(-z, z * 9)).real * 1e9,
    "comparison": lambda z, table, layer: z < table,
    "searched": lambda z, table, layer: jnp.searchsorted(jnp.sort(table[:, 0]), z[:, 0]),
    "remainder": lambda z, table, layer: jnp.mod(500 * z, 7.0),
    "phase": lambda z, table, layer: jnp.mod(jnp.cumsum(z, 0), 7.0),
    "carry": lambda z, table, layer: lax.scan(lambda p, _: (p + z, None), z, None, 9)[0] % 7.0,
    "logarithm": lambda z, table, layer: jnp.log1p(-z / 20.5) + 1 / (20.5 - z),
    "transform": lambda z, table, layer: jnp.abs(jnp.fft.rfft(z, axis=0)),
    "mean": lambda z, table, layer: jnp.exp(-1e4 * jnp.square(z - z.mean(0, keepdims=True))),
    "others": lambda z, table, layer: jnp.exp(-1e4 * squares(z, table)),
    "fraction": lambda z, table, layer: z * 50 - jnp.floor(z * 50),
    "solve": lambda z, table, layer: jnp.linalg.solve(
        jnp.exp(-1e4 * squares(z, z)) + 0.01 * jnp.eye(16), z - 20
    ),
    "sum": lambda z, table, layer: 100 * (z - table),
    "loss": lambda z, table, layer: jnp.square(100 * (z - 20)).mean(),
}


class LinenReader(nn.Module):
    """Model that passes an argument through a module to the function that reads it."""

    read: str
    depth: int = 1

    @nn.compact
    def __call__(self, x, inputs):
        if self.depth == 0:
            return inputs["z"] + 0.25
        z = LinenReader(self.read, self.depth - 1, name="reader")(x, inputs)
        seen.append(str(x.dtype))
        table = self.param("table", lambda key: TABLE)
        layer = nn.Dense(8, kernel_init=nn.initializers.constant(0.1))
        return READS[self.read](z - 0.25, table, layer), nn.Dense(3)(x)


class NNXReader(nnx.Module):
    def __init__(self, read, rngs):
        self.read, self.table = read, nnx.Param(TABLE)
        self.layer = nnx.Linear(3, 8, kernel_init=nnx.initializers.constant(0.1), rngs=rngs)
        self.other = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x, inputs):
        seen.append(str(x.dtype))
        return READS[self.read](inputs["z"], self.table[...], self.layer), self.other(x)


seen: list[str] = []


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("framework, name", [("linen", "bf16"), ("nnx", "fp16_params")])
def test_what_decides_something_is_not_rounded_under_any_name(read, framework, name):
    recipe, x, inputs = load_recipe(name), jnp.ones((2, 4)), {"z": Z}
    if framework == "linen":
        plain = LinenReader(read)
        variables = plain.init(jax.random.key(0), x, inputs)
        call = lambda model: model.apply(variables, x, inputs)
    else:
        plain, call = NNXReader(read, nnx.Rngs(0)), lambda model: model(x, inputs)
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = call(plain)
        model = recipe.wrap(plain)
        seen.clear()
        result, _ = call(model)
        compiled, _ = jax.jit(lambda: call(model))()
    # The other argument is read by a layer only.
    assert seen[-1] == recipe.policies.default.compute_dtype.name
    rows = Z.astype("bfloat16").astype("float32"), TABLE.astype("bfloat16").astype("float32")
    rounded = READS[read](*rows, lambda z: z @ jnp.full((3, 8), 0.1))
    assert not np.allclose(rounded, expected, rtol=1e-3, atol=1e-3)
    for each in (result, compiled):
        np.testing.assert_allclose(each, expected, rtol=1e-3, atol=1e-3)


def test_a_parameter_in_16_bits_that_a_sine_reads_is_reported_with_its_fix():
    recipe, model, inputs = load_recipe("bf16_params"), LinenReader("frequencies"), (X, {"z": Z})
    with jax.numpy_dtype_promotion("standard"):
        params = model.init(jax.random.key(0), *inputs)["params"]
        text = r"'table' of the model is stored in bfloat16, although a sine.*(Rule\(.*\))"
        with pytest.warns(jaxmp.errors.RecipeWarning, match=text) as warned:
            recipe.wrap(model).apply({"params": recipe.cast_params(params)}, *inputs)
    rules = [eval(re.search(text, str(warned[0].message))[1])]
    stored = recipe.replace(policies=PolicyMap(recipe.policies.default, rules)).cast_params(params)
    assert (stored["table"].dtype, stored["Dense_1"]["kernel"].dtype) == ("float32", "bfloat16")


class Mixes(nn.Module):
    """Model that needs an argument in 16 bits, although a sine or a loss reads it, too."""

    read: str

    @nn.compact
    def __call__(self, x, z):
        hidden = nn.Dense(16)(x)
        if self.read == "sum":
            return hidden + z, jnp.sin(x)
        if self.read == "bias":
            return jax.nn.softmax(hidden @ hidden.T - jnp.abs(z - z.T)) @ hidden
        if self.read == "carry":
            step = lambda z, _: (jnp.sin(z).astype(hidden.dtype), None)
            return hidden * lax.scan(step, z, None, length=2)[0]
        kernel = self.param("kernel", nn.initializers.normal(), (16, 16))
        return jnp.square((z @ kernel - z).astype(jnp.float32)).mean()


@pytest.mark.parametrize(
    ("read", "primitive", "dtype"),
    [
        ("sum", "sin", "float32"),  # Only the argument of the sum is cast.
        ("carry", "sin", "bfloat16"),
        ("bias", "abs", "float32"),
        ("bias", "dot_general", "bfloat16"),
        ("matmul", "dot_general", "bfloat16"),
    ],
)
def test_an_argument_that_must_be_narrow_is_cast(read, primitive, dtype):
    """Strict promotion and a carry refuse FP32, and matmuls outside of layers stay in 16 bits."""
    x, z = jnp.ones((16, 4)), jnp.full((16, 16), 257.0, jnp.float32)
    model = load_recipe("bf16").wrap(Mixes(read))
    with jax.numpy_dtype_promotion("strict" if read == "sum" else "standard"):
        variables = model.init(jax.random.key(0), x, z)
        traced = trace(model.apply, variables, x, z)
    assert {dtypes(e)[0] for e in traced if e.primitive.name == primitive} == {dtype}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=[], drop_fields=["name"]
)
@dataclasses.dataclass
class Irreps:
    """Array with a name that its pytree lacks, as the zero flags of e3nn's arrays."""

    array: jax.Array
    name: str = ""
    dtype = property(lambda self: self.array.dtype)
    astype = lambda self, dtype: Irreps(self.array.astype(dtype), self.name)


class Equivariant(nn.Module):
    depth: int = 1

    @nn.compact
    def __call__(self, x):
        if self.depth:
            return Equivariant(self.depth - 1, name="inner")(Irreps(x, "w")).array
        seen.append(str(x.dtype))
        return Irreps(x.array @ self.param(x.name, nn.initializers.ones, (4, 3)))


@pytest.mark.parametrize(("name", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_arrays_of_other_libraries_cast_themselves(name, dtype):
    seen.clear()
    variables = Equivariant().init(jax.random.key(0), X)
    assert load_recipe(name).wrap(Equivariant()).apply(variables, X).dtype == "float32"
    assert seen[-1] == dtype


def test_explain_names_the_modules_whose_inputs_are_not_cast():
    with jax.numpy_dtype_promotion("standard"):
        explanation = jaxmp.explain(LinenReader("layer"), "bf16")(X, {"z": Z})
    why = {row.path: row.narrow for row in explanation.policies.rows}
    text = "FP32 inputs: a sine, cosine or tangent of the value is computed"
    assert (why[""], why["reader"], why["Dense_0"]) == (text,) * 3
    assert "FP32 inputs" not in why["Dense_1"]


# ---------------------------------------------------------------------------
# The audit
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_audit_reports_a_rounded_input_of_a_sine(dtype):
    sine = lambda batch: jnp.sin(batch["time"].astype(dtype)[:, None] * 2)
    (error,) = jaxmp.audit(sine, {"time": T}).errors
    assert (error.check, error.primitive) == ("rounded_input", "sin")
    assert f"argument [0]['time'] is rounded to {dtype} before" in error.message
    assert "do not round to 16 bits:\n    batch['time'].astype(jnp.float32)" in error.fix


def test_no_report_of_activations_and_parameters():
    def wave(params, x, t):
        wide = jnp.tile(x.astype("bfloat16"), 4)
        hidden = wide @ params["params"]["w"].astype("bfloat16")
        return jnp.sin(hidden.astype("float32") + params["params"]["w"][:1]) + jnp.sin(t)[:, None]

    report = jaxmp.audit(wave, {"params": {"w": jnp.ones((16, 4))}}, X, T)
    assert "rounded_input" not in report.counts()
