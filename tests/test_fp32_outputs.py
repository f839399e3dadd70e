"""Linear layers with few outputs return FP32, and 16-bit results that a loss subtracts."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from arrays import assert_close
from jaxmp import Policy, PolicyMap, Rule, audit

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
X = np.random.default_rng(0).normal(size=(16, 8)).astype("f4")
# The roundings of a program as it is written: XLA omits some of them by default.
AS_WRITTEN = {"xla_allow_excess_precision": False}
# BF16 represents neither; float16 has steps of 0.25 there.
BIAS = 301.3


class Critic(nn.Module):
    """Gates its activation, and returns values from a module inside of it."""

    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(32, name="hidden")(x))
        h = h * nn.sigmoid(nn.Dense(1, name="gate")(h))
        self.sow("intermediates", "activation", h)
        return Values(name="values")(h)


class Values(nn.Module):
    """Removes the axis of a head, whose name no shipped rule knows."""

    @nn.compact
    def __call__(self, h):
        bias = nn.initializers.constant(BIAS)
        return jnp.squeeze(nn.Dense(1, bias_init=bias, name="head")(h), -1)


class NnxCritic(nnx.Module):
    def __init__(self, rngs):
        bias = nnx.initializers.constant(BIAS)
        self.hidden = nnx.Linear(8, 32, rngs=rngs)
        self.gate = nnx.LinearGeneral(32, (1,), rngs=rngs)
        self.head = nnx.Linear(32, 1, bias_init=bias, rngs=rngs)

    def __call__(self, x):
        h = nnx.relu(self.hidden(x))
        h = h * nnx.sigmoid(self.gate(h))
        self.activation = nnx.Intermediate(h)
        return jnp.squeeze(self.head(h), -1)


def linen_values(policies):
    """Returns the values, the dtype of the activation, and the values in FP32."""
    model = jaxmp.load_recipe(policies).wrap(Critic())
    variables = model.init(jax.random.key(0), X)
    run = jax.jit(functools.partial(model.apply, mutable="intermediates"), **compiled())
    values, state = run({"params": variables["params"]}, X)
    exact = Critic().apply(variables, X)
    return values, state["intermediates"]["activation"][0].dtype, exact


def nnx_values(policies):
    model = NnxCritic(nnx.Rngs(0))
    exact = model(X)
    del model.activation
    wrapped = jaxmp.load_recipe(policies).wrap(model)
    definition, state = nnx.split(wrapped)

    def run(state, x):
        model = nnx.merge(definition, state)
        return model(x), model.activation.get_value()

    values, activation = jax.jit(run, **compiled())(state, X)
    return values, activation.dtype, exact


def compiled():
    return {"compiler_options": AS_WRITTEN}


# ---------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("values_of", [linen_values, nnx_values])
@pytest.mark.parametrize(
    "recipe", ["bf16", "fp16", PolicyMap("bf16", Rule("**", fp32_outputs_below=1))], ids=repr
)
def test_a_head_returns_the_sums_of_its_matmul(values_of, recipe):
    values, activation, exact = values_of(recipe)
    assert values.dtype == F32 and not values.aval.weak_type
    # The gate is FP32 too, but does not promote the activation that it is multiplied with.
    assert activation == jaxmp.load_recipe(recipe).policies.default.compute_dtype
    # The values vary by about 1, with the relative error of 16-bit operands: 2**-8 and three times.
    np.testing.assert_allclose(values, exact, rtol=0, atol=0.05)
    assert len(np.unique(values)) == len(X)


@pytest.mark.parametrize("values_of", [linen_values, nnx_values])
@pytest.mark.parametrize(
    "rules", [Rule("**", fp32_outputs_below=0), Rule("**/head", "o=bf16")], ids=repr
)
def test_a_rule_disables_it(values_of, rules):
    values, _, exact = values_of(PolicyMap("bf16", rules))
    assert np.abs(values - exact).max() > 0.5


def test_the_limit_is_a_number_of_outputs():
    for width, dtype in ((1, F32), (15, F32), (16, BF16)):
        model = jaxmp.load_recipe("bf16").wrap(nn.Sequential([nn.Dense(width), jnp.sin]))
        layer = model.bind(model.init(jax.random.key(0), X)).layers[0]
        assert layer(X).dtype == dtype, width
        linear = jaxmp.load_recipe("bf16").wrap(Pair(width)).first
        assert linear(X).dtype == dtype, width
    # A policy string contains what it says: the limit is a setting of the shipped recipes.
    assert jaxmp.load_recipe("p=f32,c=bf16,o=f32").policies.default.fp32_outputs_below == 0


class Pair(nnx.Module):
    def __init__(self, width):
        self.first = nnx.Linear(8, width, rngs=nnx.Rngs(0))


def test_an_ensemble_of_critics_counts_the_outputs_of_each():
    ensemble = nn.vmap(
        nn.Dense,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=None,
        axis_size=32,
    )
    model = jaxmp.load_recipe("bf16").wrap(nn.Sequential([ensemble(1), lambda x: x[..., 0]]))
    variables = model.init(jax.random.key(0), X)
    out = jax.jit(model.apply, **compiled())(variables, X)
    assert out.dtype == F32 and np.any(out != out.astype(BF16).astype(F32))


def test_the_author_chooses_the_root_dtype():
    out = jaxmp.load_recipe("p=f32,c=bf16,o=bf16,fp32_outputs_below=16").wrap(nn.Dense(1))
    variables = out.init(jax.random.key(0), X)
    assert out.apply(variables, X).dtype == BF16


def test_float64_mode_returns_float32():
    with jax.enable_x64(True):
        model = jaxmp.load_recipe("bf16").wrap(nn.Sequential([nn.Dense(1), lambda x: 2.0 * x]))
        variables = model.init(jax.random.key(0), X)
        assert model.apply(variables, X).dtype == F32


def test_gradients_agree_with_fp32():
    def loss(model, params):
        return jnp.mean((model.apply({"params": params}, X) - BIAS) ** 2)

    params = Critic().init(jax.random.key(0), X)["params"]
    wrapped = jaxmp.load_recipe("bf16").wrap(Critic())
    grads, exact = (
        jax.jit(jax.grad(functools.partial(loss, m)))(params) for m in (wrapped, Critic())
    )
    # A few roundings of 2**-8, relative to the largest element.
    assert_close(grads, exact, 0.05)


# ---------------------------------------------------------------------------
# Autocast
# ---------------------------------------------------------------------------


def linear_regression(w, v, x, y):
    return jnp.mean(((x @ w) @ v - y) ** 2)


@pytest.mark.parametrize("shape", [(8,), (8, 1)], ids=["vector", "matrix"])
def test_autocast_returns_the_sums_of_narrow_matmuls(shape):
    # BF16 represents all operands, and not their sums of about 300.
    x, w = np.float32(np.random.default_rng(2).integers(0, 16, (16, 8))), np.eye(8, dtype="f4")
    v = np.full(shape, 5.03125, "f4")
    y = x @ v + np.float32(0.25)

    def run(policies):
        return jax.jit(jaxmp.autocast(linear_regression, policies), **compiled())(w, v, x, y)

    assert run("bf16") == 0.25**2
    explained = str(jaxmp.explain(linear_regression, "bf16")(w, v, x, y).autocast)
    assert "FP32 result of 1 output: fp32_outputs_below=16" in explained


def test_autocast_does_not_promote_what_a_narrow_result_meets():
    def gated(p, x):
        h = x @ p["w"]
        return (h * jax.nn.sigmoid(h @ p["v"][:, None])) @ p["w"].T

    p = {"w": np.ones((8, 32), "f4"), "v": np.ones(32, "f4")}
    jaxpr = jax.make_jaxpr(jaxmp.autocast(gated, "bf16"))(p, X)
    products = [e for e in jaxpr.eqns if e.primitive.name == "mul"]
    assert [e.outvars[0].aval.dtype for e in products] == [BF16]


def test_autocast_keeps_matmuls_of_attention_as_they_were():
    def attend(w, x):
        q = x @ w
        return jax.nn.softmax(q @ q.T) @ q

    short = X[:4]
    jaxprs = [
        str(jax.make_jaxpr(jaxmp.autocast(attend, policies))(np.ones((8, 32), "f4"), short))
        for policies in ("bf16", "p=f32,c=bf16,o=f32")
    ]
    assert jaxprs[0] == jaxprs[1]


# ---------------------------------------------------------------------------
# Explanations
# ---------------------------------------------------------------------------


def test_explanations_name_the_limit():
    text = "FP32 result of 1 output: fp32_outputs_below=16"
    for explanation in (
        jaxmp.explain(Critic(), "bf16")(X).policies,
        jaxmp.explain(NnxCritic(nnx.Rngs(0)), "bf16")().policies,
    ):
        narrow = {row.path for row in explanation.rows if row.narrow == text}
        assert {path.rpartition("/")[2] for path in narrow} == {"gate", "head"}
        assert text in str(explanation)
    named = jaxmp.explain(Critic(), PolicyMap("bf16", Rule("**/head", "o=f32")))(X).policies
    assert [row.path for row in named.rows if row.narrow] == ["gate"]


# ---------------------------------------------------------------------------
# Audit
# ---------------------------------------------------------------------------


def rounded(fn, *args, policies=None):
    report = audit(fn, *args, recipe=policies)
    return [finding for finding in report.findings if finding.check == "rounded_output"]


def squared_error(model, variables, y):
    return jnp.mean((model.apply(variables, X) - y) ** 2)


def test_a_difference_of_a_rounded_result_is_reported_with_its_fix():
    plain, y = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(64)]), np.zeros((16, 64), "f4")
    variables = plain.init(jax.random.key(0), X)

    def findings(policies):
        model = jaxmp.load_recipe(policies).wrap(plain)
        loss = functools.partial(squared_error, model)
        return rounded(jax.grad(loss), variables, y, policies=policies)

    rounding = Rule("**", fp32_outputs_below=0)
    assert not findings("bf16")
    (finding,) = findings(PolicyMap("bf16", rounding))
    assert finding.severity == "error" and finding.module == "layers_2"
    assert "bfloat16, with steps of 2 around 300" in finding.message
    scope = {"jaxmp": jaxmp, "recipe": jaxmp.load_recipe(PolicyMap("bf16", rounding))}
    exec(finding.fix.splitlines()[1].strip(), scope)
    assert not findings(scope["recipe"])
    # A head needs no rule.
    head, y = nn.Dense(1), np.zeros((16, 1), "f4")
    variables = head.init(jax.random.key(0), X)
    for policies, count in (("bf16", 0), (PolicyMap("bf16", rounding), 1), ("fp32", 0)):
        loss = functools.partial(squared_error, jaxmp.load_recipe(policies).wrap(head))
        assert len(rounded(loss, variables, y, policies=policies)) == count


class Unembed(nn.Module):
    """Head of a user's own class, which the user repairs as the audit prints."""

    is_wide: bool = False

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (64, 48))
        if self.is_wide:
            return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
        return x @ kernel.astype(x.dtype)


@pytest.mark.usefixtures("standard_promotion")
def test_the_fix_of_an_own_layer_is_its_line_and_no_rule():
    def findings(is_wide):
        plain = nn.Sequential([nn.Dense(64), nn.relu, Unembed(is_wide)])
        variables = plain.init(jax.random.key(0), X)
        model = jaxmp.load_recipe("bf16").wrap(plain)
        loss = lambda variables: -jax.nn.log_softmax(model.apply(variables, X))[:, 3].mean()
        return rounded(loss, variables, policies="bf16")

    (finding,) = findings(False)
    assert "Rule(" not in finding.fix
    code = "jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)"
    assert finding.fix.splitlines()[1].strip() == code
    assert not findings(True)


def test_differences_of_one_result_are_not_reported():
    def features(w, x):
        return (x.astype(BF16) @ w.astype(BF16)).astype(F32)

    def normalized(w, x):
        h = features(w, x)
        return jnp.square(h - h.mean(-1, keepdims=True)).mean()

    def regression(w, x):
        return jnp.mean((features(w, x)[:, 0] - x[:, 0]) ** 2)

    def running_maximum(w, x):
        largest = jnp.float32(-100)
        shifted = jnp.maximum(largest, features(w, x).max())
        return jnp.exp(largest - shifted) ** 2

    def centered(w, x):
        outputs = jnp.tanh(features(w, x))
        return ((outputs - outputs.mean(-1, keepdims=True).astype(BF16).astype(F32)) ** 2).mean()

    def rotated(w, x):
        q, angle = features(w, x), jnp.arange(16.0)[None]
        parts = q[:, :16] * jnp.cos(angle) - q[:, 16:] * jnp.sin(angle)
        return jnp.mean(parts**2) + jnp.square(jnp.cross(q[:, 1:4], q[:, 2:5])).mean()

    w = np.ones((8, 32), "f4")
    assert not any(rounded(loss, w, X) for loss in (normalized, running_maximum, rotated))
    assert audit(jax.grad(centered), w, X).ok and len(rounded(regression, w, X)) == 1


@pytest.mark.usefixtures("standard_promotion")
def test_a_bfloat16_momentum_is_a_warning():
    params = {"w": jnp.ones(4)}

    def severities(dtype):
        tx = optax.sgd(0.1, momentum=0.9, accumulator_dtype=dtype)
        report = audit(lambda state, grads: tx.update(grads, state), tx.init(params), params)
        return [f.severity for f in report.findings if f.check == "optimizer_state_16bit"]

    assert [severities(dtype) for dtype in (None, BF16, F16)] == [[], ["warning"], ["error"]]


def test_a_softmax_is_not_called_attention():
    def distribution(w, x, atoms):
        return (jax.nn.softmax((x @ w).reshape(16, 2, 51)) * atoms).sum(-1, dtype=F32)

    args = jnp.ones((8, 102), BF16), jnp.asarray(X, BF16), jnp.ones((1, 1, 51), BF16)
    messages = [
        f.message for f in audit(distribution, *args).findings if f.check == "softmax_16bit"
    ]
    assert messages == ["softmax in bfloat16: its probabilities have 8 bits of precision."]


def test_a_limit_is_a_setting():
    policy = Policy("f32", "bf16", "f32", fp32_outputs_below=4)
    assert jaxmp.get_policy(str(policy)) == policy
    recipe = jaxmp.load_recipe("bf16").replace(policies=PolicyMap(policy))
    assert "fp32_outputs_below = 4" in recipe.to_toml()


class LinenLoop(nn.Module):
    """Loop whose carry, created in the dtype of its input, a layer with few outputs computes."""

    @nn.compact
    def __call__(self, x):
        layer, first = nn.Dense(8), jnp.zeros((4, 8), x.dtype)
        layer(first)
        return jax.lax.scan(lambda h, _: (jnp.tanh(layer(h)), None), first, None, length=2)[0]


class NnxLoop(nnx.Module):
    """The same loop in NNX."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        first = jnp.zeros((4, 8), x.dtype)
        return jax.lax.scan(lambda h, _: (jnp.tanh(self.layer(h)), None), first, None, length=2)[0]


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_the_note_on_a_carry_of_few_outputs_has_the_fix(framework):
    x = jnp.ones((4, 8))

    def run(recipe):
        if framework == "nnx":
            return jax.eval_shape(recipe.wrap(NnxLoop(nnx.Rngs(0))), x)
        model = recipe.wrap(LinenLoop())
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        return jax.eval_shape(model.apply, variables, x)

    recipe = jaxmp.load_recipe("bf16")
    with pytest.raises(TypeError, match="carry") as error:
        run(recipe)
    note = " ".join(error.value.__notes__)
    fix = "Rule('**', fp32_outputs_below=0)"
    assert f"unless you write {fix}." in note
    rule = eval(fix, {"Rule": jaxmp.Rule})
    assert run(recipe.replace(policies=jaxmp.PolicyMap("bf16", [rule]))).shape == (4, 8)


def test_the_audit_reports_a_matmul_of_two_results_of_few_outputs():
    class Product(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16)(nn.Dense(8)(x) @ nn.Dense(8)(x).T)

    model, x = jaxmp.load_recipe("bf16").wrap(Product()), jnp.ones((4, 32))
    variables = model.init(jax.random.key(0), x)
    report = jaxmp.audit(model.apply, variables, x, recipe="bf16")
    assert "fp32_matmul" in {finding.check for finding in report.findings}


def test_policies_in_fp32_keep_weakly_typed_results():
    double = jaxmp.load_recipe("fp32").wrap(nn.Sequential([lambda x: 2 * x]))
    # As Flax itself, so that a second call of a jitted function is not traced again.
    out = jax.eval_shape(lambda x: double.apply({}, x), 1.0)
    assert out.weak_type and out.dtype == F32
