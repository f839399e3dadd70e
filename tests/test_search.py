"""Results that models compare or return keep their FP32 sums, whatever their layers are called."""

import re
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from programs import dtypes, products, trace

WIDTH, CLASSES = 16, 48
X = jax.random.normal(jax.random.key(1), (4, WIDTH))


# ---------------------------------------------------------------------------
# Models: each has one decision, of CLASSES columns, and healthy layers of WIDTH columns
# ---------------------------------------------------------------------------


def cap(z):
    return 30 * jnp.tanh(z / 30)


class Decoder(nn.Module):
    """Head below another module, with a soft-cap, a mask and a slice."""

    @nn.compact
    def __call__(self, x):
        z = cap(nn.Dense(CLASSES, name="output")(x))
        return jnp.where(jnp.arange(CLASSES) < 40, z, -1e9)[:, :40]


class Body(nn.Module):
    """Residual block with attention, a gate by sigmoid, and a result that feeds other layers."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2)(x[None], x[None])[0]
        return x + nn.Dense(WIDTH)(x) * nn.sigmoid(nn.Dense(WIDTH, name="gate")(x))


class Head(nn.Module):
    transform: str = ""

    @nn.compact
    def __call__(self, x):
        body = nn.remat(Body) if self.transform == "remat" else Body
        if self.transform == "scan":
            step = lambda module, carry, _: (module(carry), None)
            options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(step, length=2, **options)(Body(), x, None)
        else:
            x = body()(x)
        z = Decoder(name="decoder")(x)
        if self.transform == "norm":
            return z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        return nn.softplus(z).sum(-1) - z[:, 0] if self.transform == "terms" else z


class Hidden(nn.Module):
    """Model that also returns a hidden state, which feeds its head."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH)(x)
        return x, nn.Dense(CLASSES)(x)


class Tied(nn.Module):
    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(CLASSES, WIDTH)
        return embed.attend(Body()(x + embed(jnp.arange(4))))


class Routed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Body()(x)
        weights, index = jax.lax.top_k(jax.nn.softmax(nn.Dense(CLASSES, name="gate")(x)), 2)
        return nn.LayerNorm()(x + nn.Dense(WIDTH)(x) * weights[:, :1] * (index[:, :1] < 40))


class NnxBody(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, WIDTH, rngs=rngs, decode=False)
        self.up, self.gate = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        x = x + self.attention(x[None])[0]
        return x + self.up(x) * nnx.sigmoid(self.gate(x))


class NnxHead(nnx.Module):
    def __init__(self, rngs, kind="head"):
        self.body, self.kind = NnxBody(rngs), kind
        self.embed = nnx.Embed(CLASSES, WIDTH, rngs=rngs)
        self.gate, self.norm = nnx.Linear(WIDTH, CLASSES, rngs=rngs), nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, x):
        x = nnx.remat(NnxBody.__call__)(self.body, x) if self.kind == "remat" else self.body(x)
        if self.kind == "tied":
            return self.embed.attend(x)
        z = self.gate(x)
        if self.kind == "routed":
            weights, _ = jax.lax.top_k(nnx.softmax(z), 2)
            return jnp.mean(x, axis=-1) * weights[:, 0]
        return cap(z)


def linen(model):
    return lambda recipe: (lambda m: (m, m.init(jax.random.key(0), X)))(recipe.wrap(model))


def nnx_model(kind):
    def make(recipe):
        graph, state = nnx.split(recipe.wrap(NnxHead(nnx.Rngs(0), kind)))
        return SimpleNamespace(apply=lambda state, x: nnx.merge(graph, state)(x)), state

    return make


MODELS = {
    **{f"linen-{name}": linen(Head(name)) for name in ("", "remat", "scan", "norm", "terms")},
    **{f"linen-{cls.__name__}": linen(cls()) for cls in (Hidden, Tied, Routed)},
    **{f"nnx-{kind}": nnx_model(kind) for kind in ("head", "tied", "routed", "remat")},
}


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def results(model, variables):
    """Returns (columns, dtypes) of all matmuls of a model."""
    traced = products(trace(model.apply, variables, X))
    return [(e.outvars[0].aval.shape[-1], *dtypes(e)) for e in traced]


# ---------------------------------------------------------------------------
# Tests
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_decisions_keep_their_sums_and_their_neighbours_are_rounded(name):
    with jax.numpy_dtype_promotion("standard"):
        rows = results(*MODELS[name](jaxmp.load_recipe("bf16")))
    assert {row[1:3] for row in rows} == {("bfloat16", "bfloat16")}
    assert {row[3] for row in rows if row[0] == CLASSES} == {"float32"}
    assert {row[3] for row in rows if row[0] == WIDTH} == {"bfloat16"}


def test_decisions_pass_through_modules():
    model, variables = MODELS["linen-"](jaxmp.load_recipe("bf16"))
    z = model.apply(variables, X)
    assert jnp.any(z != rounded(z))


@pytest.mark.parametrize(
    "layer",
    [nn.Einsum((8, 2, 4), "...i,ihd->...hd"), nn.ConvTranspose(4, (3,))],
    ids=["einsum", "conv"],
)
def test_the_gradient_of_a_last_layer_multiplies_16_bits(layer):
    model, x = jaxmp.load_recipe("bf16").wrap(layer), jnp.linspace(-1, 1, 48).reshape(2, 3, 8)
    params = jax.tree.map(lambda leaf: leaf + 0.5, model.init(jax.random.key(0), x))
    loss = lambda params, x: model.apply(params, x).sum()
    traced = products(trace(jax.grad(loss, (0, 1)), params, x))
    assert {dtypes(e)[:2] for e in traced} == {("bfloat16", "bfloat16")}
    np.testing.assert_allclose(model.apply(params, x), layer.apply(params, x), atol=0.05)


def test_xla_compiles_a_transposed_last_layer_on_a_cpu():
    """It refuses most matmuls of 16 bits with an FP32 result that sum the first dimension."""
    equation, x, wrap = "fcd,cb->dfb", jnp.ones((2, 3, 4)), jaxmp.load_recipe("bf16").wrap
    linen, own = wrap(nn.Einsum((3, 5), equation)), nnx.Einsum(equation, (3, 5), rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(wrap(own))
    nnx_loss = lambda state, x: nnx.merge(graphdef, state)(x).sum()
    linen_loss = lambda variables, x: linen.apply(variables, x).sum()
    for loss, params in ((linen_loss, linen.init(jax.random.key(0), x)), (nnx_loss, state)):
        assert jax.jit(jax.grad(loss, 1))(params, x).shape == x.shape


@pytest.mark.parametrize("policy", ["o=bf16", "c=f32"])
def test_a_rule_of_the_user_wins(policy):
    policies = jaxmp.PolicyMap("bf16", [jaxmp.Rule("re:(decoder/output|gate)", policy)])
    expected = "bfloat16" if policy == "o=bf16" else "float32"
    for name in ("linen-", "nnx-head"):
        rows = results(*MODELS[name](jaxmp.load_recipe(policies)))
        assert {(row[1], row[3]) for row in rows if row[0] == CLASSES} == {(expected, expected)}


def test_decisions_do_not_run_in_fp8_and_explain_names_the_reason():
    with jax.numpy_dtype_promotion("standard"):
        for model in (Routed(), NnxHead(nnx.Rngs(0), "routed")):
            explanation = jaxmp.explain(model, "fp8")(X)
            rows = {row.path: row for row in explanation.policies.rows}
            assert rows["gate"].narrow.startswith("FP32 sums without FP8: a softmax")
            (gate,) = (row for row in explanation.fp8.rows if row.exclusion_reason)
            assert (gate.path, gate.k, gate.n) == ("gate", WIDTH, CLASSES)
            assert "reads its FP32 sums" in str(explanation)


def test_a_model_is_searched_once_per_shape():
    calls = []

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x, time=0.0):
            calls.append(x.shape)
            return nn.Dense(CLASSES)(x * time)

    model, variables = linen(Counted())(jaxmp.load_recipe("bf16"))
    calls.clear()
    for x in (X, X + 1, X[:2], X):
        model.apply(variables, x)
    # A number that changes with each call is no reason for another search.
    for time in (1.0, 2.0, 3.0):
        model.apply(variables, X, time)
    assert len(calls) == 4 + 2 + 3 + 1


def test_a_carry_and_a_branch_keep_the_dtype_of_the_caller():
    class Loops(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            y = jax.lax.cond(x.sum() > 0, self.dense, lambda x: x, x)
            cell = lambda carry, _: (jnp.tanh(self.dense(carry)), None)
            return jax.lax.scan(cell, y, length=2)[0]

    assert jaxmp.load_recipe("bf16").wrap(Loops(nnx.Rngs(0)))(X).dtype == jnp.float32


class Repeated(nnx.Module):
    """Layer in a loop that also returns a sum of its carry in each iteration."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.output = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        def body(x, _):
            x = jnp.tanh(self.layer(x))
            return x, x.sum()

        x, sums = jax.lax.scan(body, x, None, length=2)
        return jax.nn.log_softmax(self.output(x)), sums


def test_a_value_that_is_also_a_carry_keeps_the_dtype_of_the_carry():
    plain = Repeated(nnx.Rngs(0))
    model = jaxmp.load_recipe("bf16").wrap(plain)
    for expected, result in zip(plain(X), model(X), strict=True):
        assert result.dtype == jnp.float32
        np.testing.assert_allclose(result, expected, rtol=0.05, atol=0.05)
    kinds = {e.outvars[0].aval.shape[-1]: dtypes(e)[2] for e in products(trace(model, X))}
    assert kinds == {WIDTH: "bfloat16", CLASSES: "float32"}


def test_objects_that_a_call_changes_are_changed_once():
    class Writes(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

        def __call__(self, x, cache):
            cache.values.append(x)
            return self.dense(x)

    cache = SimpleNamespace(values=[])
    jaxmp.load_recipe("bf16").wrap(Writes(nnx.Rngs(0)))(X, cache)
    (value,) = cache.values
    assert isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def test_layers_of_a_closure_are_reported():
    class UNet(nnx.Module):
        def __init__(self, rngs):
            a, b = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
            self.block, self.head = (lambda x: b(nnx.gelu(a(x)))), nnx.Linear(WIDTH, 8, rngs=rngs)

        def __call__(self, x):
            return self.head(self.block(x))

    model = jaxmp.load_recipe("bf16").wrap(UNet(nnx.Rngs(0)))
    warns = pytest.warns(jaxmp.errors.RecipeWarning, match=r"of a closure.*jaxmp.autocast\(loss")
    with warns, jax.numpy_dtype_promotion("standard"):
        model(X)


@pytest.mark.parametrize(
    ("name", "recipe"), [("mixed_bfloat16", "bf16"), ("16-mixed", "fp16"), ("O2", "fp16_params")]
)
def test_names_of_other_frameworks_are_translated(name, recipe):
    with pytest.raises(jaxmp.errors.RecipeError, match=f"Write load_recipe\\('{recipe}'\\)"):
        jaxmp.load_recipe(name)


def test_models_of_other_packages_are_refused():
    with pytest.raises(jaxmp.errors.JaxmpError, match=r"jaxmp.autocast\(loss_fn, recipe\)"):
        jaxmp.load_recipe("bf16").wrap({"w": X})
    with pytest.raises(jaxmp.errors.CompositionError, match=r"recipe.optimizer.*\.init\(params\)"):
        jaxmp.nnx.Optimizer({"w": X}, optax.sgd(1.0))


# ---------------------------------------------------------------------------
# Calls that choose, fail or differ
# ---------------------------------------------------------------------------


class Heads(nn.Module):
    """Model whose argument or field chooses one of two heads: a decision, or a hidden layer."""

    kind: str = "decision"

    @nn.compact
    def __call__(self, x, task=0):
        z = nn.Dense(CLASSES, name="decision")(x)
        hidden = nn.Dense(CLASSES, name="hidden")(x)
        return z if task == 0 and self.kind == "decision" else nn.sigmoid(hidden) * hidden

    def of(self, x, name):
        return nn.log_softmax(self(x)) if name == "decision" else self(x, 1)


class NnxHeads(nnx.Module):
    def __init__(self, rngs):
        self.kind = "decision"
        self.decision, self.hidden = (nnx.Linear(WIDTH, CLASSES, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        hidden = self.hidden(x)
        return self.decision(x) if self.kind == "decision" else nnx.sigmoid(hidden) * hidden


def wide_matmuls(fn, *args):
    """Returns the number of matmuls with FP32 results."""
    return sum(dtypes(product)[2] == "float32" for product in products(trace(fn, *args)))


def test_numbers_fields_functions_and_attributes_choose_a_head():
    model, variables = linen(Heads())(jaxmp.load_recipe("bf16"))
    apply = lambda model, *args, **kwargs: lambda v: model.apply(v, *args, **kwargs)
    head = lambda task: lambda model, x: model(x, task)
    for _ in range(2):
        for task, wide in ((1, 0), (0, 1), (np.int32(1), 0)):
            assert wide_matmuls(apply(model, X, task), variables) == wide
            assert wide_matmuls(apply(model, X, method=head(task)), variables) == wide
        for name, wide in (("hidden", 0), ("decision", 1)):
            assert wide_matmuls(apply(model.clone(kind=name), X), variables) == wide
            assert wide_matmuls(apply(model, X, name, method="of"), variables) == wide
    nnx_heads = jaxmp.load_recipe("bf16").wrap(NnxHeads(nnx.Rngs(0)))
    for nnx_heads.kind, wide in (("decision", 1), ("hidden", 0), ("decision", 1)):
        assert wide_matmuls(lambda x: nnx_heads(x), X) == wide


def test_a_call_that_failed_is_searched_again():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            noise = jax.random.uniform(self.make_rng("noise"), x.shape, x.dtype)
            return nn.Dense(CLASSES)(x + noise)

    model, key = jaxmp.load_recipe("bf16").wrap(Noisy()), jax.random.key(0)
    variables = model.init({"params": key, "noise": key}, X)
    with pytest.raises(Exception, match="noise"):
        model.apply(variables, X)
    apply = lambda v: model.apply(v, X, rngs={"noise": key})
    assert wide_matmuls(apply, variables) == 1


class Reads(nn.Module):
    """Model that reads the value of an array, which only an eager call can."""

    @nn.compact
    def __call__(self, x):
        calls.append(x)
        return nn.Dense(CLASSES, name="output")(x) * (2.0 if x.sum() > 0 else 3.0)


calls: list[object] = []


def test_a_model_that_cannot_be_traced_is_reported_with_its_fix():
    ruled = jaxmp.PolicyMap("bf16", [jaxmp.Rule("output", "o=f32")])
    for recipe in ("bf16", ruled):
        model, variables = linen(Reads())(jaxmp.load_recipe(recipe))
        calls.clear()
        with pytest.warns(jaxmp.errors.RecipeWarning, match="cannot be traced: Tracer") as warned:
            results = [model.apply(variables, X) for _ in range(5)]
        assert len(warned) == 1 and "Rule('output', 'o=f32')" in str(warned[0].message)
        assert len(calls) == 5 + 3  # Each of the first three calls is traced once more.
        assert bool(jnp.all(rounded(results[0]) == results[0])) == (recipe == "bf16")


def test_an_array_that_is_kept_from_the_search_is_named():
    tables = {}

    class Cached(nn.Module):
        @nn.compact
        def __call__(self, x):
            if "table" not in tables:
                tables["table"] = jnp.sin(x)
            return nn.Dense(CLASSES)(x + tables["table"])

    model, variables = linen(Cached())(jaxmp.load_recipe("bf16"))
    tables.clear()
    with pytest.raises(jax.errors.UnexpectedTracerError) as raised:
        model.apply(variables, X)
    assert "jax.ensure_compile_time_eval()" in "".join(raised.value.__notes__)


def test_functions_that_multiply_outside_of_all_modules():
    model = jaxmp.load_recipe("bf16").wrap(nn.Embed(CLASSES, WIDTH))
    variables = model.init(jax.random.key(0), jnp.arange(4))
    multiply = lambda module, x: x @ module.variables["params"]["embedding"].T
    assert model.apply(variables, X, method=multiply).dtype == jnp.float32
    assert model.apply(variables, X, method=nn.Embed.attend).dtype == jnp.float32


class Own(nn.Module):
    """Layer of a user's own class that returns FP32 sums, or multiplies FP32 operands."""

    is_wide: bool = True

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (WIDTH, CLASSES))
        if self.is_wide:
            return jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
        return x.astype(jnp.float32) @ kernel.astype(jnp.float32)


class OwnRouter(nn.Module):
    is_wide: bool

    @nn.compact
    def __call__(self, x):
        z = Own(self.is_wide)(nn.Dense(WIDTH)(nn.Dense(8 * WIDTH)(x)))
        self.sow("intermediates", "logits", z)
        return nn.Dense(WIDTH)(x) * jax.lax.top_k(jax.nn.softmax(z), 2)[0][:, :1]


@pytest.mark.parametrize("is_wide", [True, False])
def test_modules_pass_the_fp32_results_of_own_layers_to_a_decision(is_wide):
    with jax.numpy_dtype_promotion("standard"):
        model, variables = linen(OwnRouter(is_wide))(jaxmp.load_recipe("bf16"))
        _, sown = model.apply({"params": variables["params"]}, X, mutable="intermediates")
    (z,) = sown["intermediates"]["logits"]
    assert jnp.any(z != rounded(z))


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_symbolic_shapes(recipe):
    (rows,) = jax.export.symbolic_shape("rows")
    model, variables = MODELS["linen-"](jaxmp.load_recipe(recipe))
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: model.apply(variables, x)))(x)
    np.testing.assert_allclose(exported.call(X), jax.jit(model.apply)(variables, X), atol=0.05)


class Printed(nn.Module):
    """Logits that the model also passes to Python, by an operation without results."""

    @nn.compact
    def __call__(self, x):
        logits = nn.Dense(CLASSES, name="output")(x)
        jax.debug.callback(lambda value: None, logits)
        return nn.log_softmax(logits)


def test_operations_without_results_are_no_obstacle():
    model, variables = linen(Printed())(jaxmp.load_recipe("bf16"))
    wide = nn.log_softmax(rounded(X) @ rounded(variables["params"]["output"]["kernel"]))
    np.testing.assert_allclose(model.apply(variables, X), wide, atol=1e-5)


class Beside(nn.Module):
    """Logits to which a parameter that is read in 16 bits is added."""

    shift_dtype: jnp.dtype = jnp.bfloat16
    classes: int = CLASSES

    @nn.compact
    def __call__(self, x, is_shifted=True):
        shift = self.param("shift", nn.initializers.zeros, (self.classes,))
        logits = nn.Dense(self.classes, name="output")(x)
        if not is_shifted:
            return nn.log_softmax(logits)
        return nn.log_softmax(logits + shift[None].astype(self.shift_dtype))


@pytest.mark.parametrize("classes", [CLASSES, 4])
def test_a_decision_that_strict_promotion_rounds_is_named_and_the_fix_works(classes):
    recipe = jaxmp.load_recipe("bf16")
    model, exact = (Beside(dtype, classes) for dtype in (jnp.bfloat16, jnp.float32))
    variables = exact.init(jax.random.key(0), X)
    wrapped = recipe.wrap(model)
    wrapped.apply(variables, X, False)  # Without a warning.
    rounds = r"'output' is rounded.*test_search.py, line \d+\. .* Rule\('output', 'o=f32'\)"
    with pytest.warns(jaxmp.errors.RecipeWarning, match=rounds):
        wrapped.apply(variables, X)
    with jax.numpy_dtype_promotion("standard"):
        expected = recipe.wrap(model).apply(variables, X)
    rules = [jaxmp.Rule("output", "o=f32")]
    fixed = recipe.replace(policies=jaxmp.PolicyMap(recipe, rules)).wrap(exact)
    # Without a warning.
    np.testing.assert_array_equal(fixed.apply(variables, X), expected)
    assert np.any(expected != rounded(expected))


class CastRouter(nn.Module):
    """Router whose weights are cast to the dtype of the experts, and noise of the logits' dtype."""

    @nn.compact
    def __call__(self, x):
        logits = nn.Dense(CLASSES, name="gate")(x)
        logits = logits + jax.random.normal(jax.random.key(0), logits.shape, logits.dtype)
        weights, chosen = jax.lax.top_k(nn.softmax(logits), 1)
        experts = nn.DenseGeneral((CLASSES, WIDTH), name="experts")(x)
        return jnp.take_along_axis(experts, chosen[..., None], 1)[:, 0] * weights.astype(x.dtype)


def test_strict_promotion_accepts_a_router_with_explicit_casts():
    model, variables = linen(CastRouter())(jaxmp.load_recipe("bf16"))
    jaxpr = jax.make_jaxpr(model.apply)(variables, X)  # Without a warning.
    assert re.search(rf"f32\[{len(X)},{CLASSES}\] = exp", str(jaxpr))
