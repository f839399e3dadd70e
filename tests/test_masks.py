"""Declared attention masks: results, lengths, contradictions and audit."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from grids import EXPENSIVE, REST, fast_cases
from jaxmp import audit, load_recipe
from jaxmp._attention._layer import attention_under_policy
from jaxmp._programs._jaxprs import equations
from jaxmp._programs._static_values import Scope
from jaxmp.errors import AttentionError
from programs import relative_error
from sources import code_of

BATCH, LENGTH, WIDTH = 2, 16, 32
# Sequences of 16 and 11 tokens; 0 is padding.
TOKENS = jnp.asarray(np.where(np.arange(LENGTH)[None] < np.array([[16], [11]]), 1, 0), jnp.int32)
X = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH)), jnp.float32)
# The largest difference of two results of about 1 in bfloat16.
ROUNDINGS = 0.03


def windowed(tokens, left=3, right=0):
    rows, columns = jnp.arange(LENGTH)[:, None], jnp.arange(LENGTH)[None, :]
    return ((columns >= rows - left) & (columns <= rows + right))[None, None]


# Name -> (what declares it, the mask as a model makes it).
MASKS = {
    "causal": ({"mask": "causal"}, nn.make_causal_mask),
    "padding": ({"mask": "padding"}, lambda t: nn.make_attention_mask(t > 0, t > 0)),
    "padded keys": ({"mask": "padding"}, lambda t: (t > 0)[:, None, None, :]),
    "causal, padding": (
        {"mask": "causal+padding"},
        lambda t: nn.combine_masks(nn.make_causal_mask(t), nn.make_attention_mask(t > 0, t > 0)),
    ),
    "causal, padded keys": (
        {"mask": "causal+padding"},
        lambda t: nn.combine_masks(nn.make_causal_mask(t, dtype=bool), (t > 0)[:, None, None, :]),
    ),
    "full": ({"mask": "full"}, lambda t: jnp.ones((1, 1, LENGTH, LENGTH))),
    "window": ({"mask": "causal", "window": 3}, windowed),
    "window on both sides": ({"mask": "full", "window": (3, 2)}, lambda t: windowed(t, 3, 2)),
    "window, padding": (
        {"mask": "causal+padding", "window": 3},
        lambda t: nn.combine_masks(windowed(t), nn.make_attention_mask(t > 0, t > 0, dtype=bool)),
    ),
}


class Linen(nn.Module):
    """One attention layer that computes its mask from tokens."""

    make: object
    options: tuple = ()

    @nn.compact
    def __call__(self, x, tokens):
        layer = nn.MultiHeadDotProductAttention(4, name="attn", **dict(self.options))
        return layer(x, mask=self.make(tokens))


class Nnx(nnx.Module):
    """The same layer in NNX."""

    def __init__(self, make, **options):
        rngs = nnx.Rngs(0)
        self.make = make
        self.attn = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs, **options)

    def __call__(self, x, tokens):
        return self.attn(x, mask=self.make(tokens))


def linen(make, recipe, **options):
    model = Linen(make, tuple(options.items()))
    variables = jax.jit(model.init)(jax.random.key(1), X, TOKENS)
    rngs = {"dropout": jax.random.key(2)}
    return lambda x, tokens: recipe.wrap(model).apply(variables, x, tokens, rngs=rngs)


def in_nnx(make, recipe, **options):
    return recipe.wrap(Nnx(make, **options))


MAKERS = {"linen": linen, "nnx": in_nnx}


@pytest.fixture(params=MAKERS)
def model(request):
    return MAKERS[request.param]


def recipe(base="bf16", **settings):
    return load_recipe(base).replace(**settings)


def names_in(fn, *args):
    """Returns the names of jaxmp's functions in a traced program."""
    found = []
    for equation in equations(jax.make_jaxpr(fn)(*args)):
        name = str(equation.params.get("name", ""))
        if name.startswith("jaxmp_"):
            found.append((name, [v.aval.str_short() for v in equation.invars]))
    return found


# ---------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------


# Eager calls and compilation take long; the fast cases have each part of a mask once.
FAST = ("causal, padding", "window", "padded keys")
CASES = [
    pytest.param(linen, name, "bf16", marks=REST if name not in FAST else ()) for name in MASKS
]
CASES += [(in_nnx, "causal, padding", "bf16"), (linen, "causal", "fp32")]


@pytest.mark.parametrize(("model", "name", "base"), CASES)
@fast_cases("in_nnx-causal, padding-bf16")
def test_declared_masks_compute_what_the_arrays_do(model, name, base):
    settings, make = MASKS[name]
    declared = model(make, recipe(base, **settings))
    seen = jnp.broadcast_to(make(TOKENS), (BATCH, 1, LENGTH, LENGTH)).any(-1)[:, 0]
    shown = lambda run: jnp.where(seen[..., None], run(X, TOKENS), 0)
    expected = shown(jax.jit(lambda *args: model(make, load_recipe(base))(*args)))
    # Eager calls compare the array with the declaration.
    for run in (declared, jax.jit(lambda *args: declared(*args))):
        assert jnp.abs(shown(run) - expected).max() < (ROUNDINGS if base == "bf16" else 1e-5)


def test_the_kernel_receives_the_structure_and_no_array(model):
    _, make = MASKS["causal, padding"]
    run = model(make, recipe(mask="causal+padding"))
    names = dict(names_in(run, X, TOKENS))
    (operands,) = [found for name, found in names.items() if name.startswith("jaxmp_attention")]
    assert not any("bool" in operand for operand in operands)
    assert operands.count("int32[2]") == 2  # the lengths of queries and keys


GRADIENTS = [("causal", "xla"), ("causal, padding", "blockwise"), ("window, padding", "xla")]


@pytest.mark.parametrize(("name", "implementation"), GRADIENTS)
@fast_cases("causal-xla")
def test_gradients_agree_with_float64(name, implementation):
    settings, make = MASKS[name]
    model = Linen(make)
    variables = jax.jit(model.init)(jax.random.key(1), X, TOKENS)

    def gradients(apply, variables, x):
        weight = jnp.where((TOKENS > 0)[..., None], jnp.cos(jnp.arange(WIDTH)), 0).astype(x.dtype)
        loss = lambda v: (apply(v, x, TOKENS) * weight).sum()
        return jax.jit(jax.grad(loss))(variables)

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype("float64"), variables)
        exact = gradients(model.apply, wide, X.astype("float64"))
    for base, tolerance in (("bf16", 0.02), ("fp32", 1e-5)):
        wrapped = recipe(base, implementation=implementation, **settings).wrap(model)
        result = gradients(wrapped.apply, variables, X)
        # Error of all leaves together: the gradient of the key bias consists of rounding errors.
        assert relative_error(result, exact) <= tolerance


def test_dropout_and_grouped_heads(model):
    _, make = MASKS["causal"]
    options = {"dropout_rate": 0.5, "deterministic": False}
    options |= {"num_kv_heads": 2} if model is in_nnx else {}
    run = lambda **settings: model(make, recipe(implementation="xla", **settings), **options)
    array, declared = jax.jit(lambda: (run()(X, TOKENS), run(mask="causal")(X, TOKENS)))()
    assert jnp.abs(array - declared).max() < ROUNDINGS


@EXPENSIVE
def test_a_bias_stays_beside_a_declared_mask():
    query = jax.random.normal(jax.random.key(3), (1, LENGTH, 2, 8), jnp.bfloat16)
    bias = jax.random.normal(jax.random.key(4), (1, 2, LENGTH, LENGTH), jnp.bfloat16)
    mask = nn.make_causal_mask(TOKENS[:1])
    declared = attention_under_policy(
        nn.dot_product_attention,
        nn.dot_product_attention,
        recipe(mask="causal").policies.default,
        "layer",
    )
    operands = query, query, query
    wide = bias.astype(jnp.float32)
    expected = nn.dot_product_attention(*operands, bias=wide, mask=mask, dtype=jnp.float32)
    out = declared(*operands, bias=bias, mask=mask)
    assert jnp.abs(out.astype(jnp.float32) - expected).max() < ROUNDINGS


@EXPENSIVE
def test_weights_that_are_sown_come_from_the_array():
    layer = nn.MultiHeadDotProductAttention(4)
    mask = nn.make_causal_mask(TOKENS)
    variables = layer.init(jax.random.key(0), X, mask=mask)
    wrapped = recipe(mask="causal").wrap(layer)
    _, state = wrapped.apply(variables, X, mask=mask, sow_weights=True, mutable="intermediates")
    (weights,) = state["intermediates"]["attention_weights"]
    assert (weights[0, 0, 0, 1:] == 0).all()
    with pytest.raises(AttentionError, match="contradicts"):
        wrapped.apply(variables, X, mask=mask > 2, sow_weights=True, mutable="intermediates")


class Block(nn.Module):
    """One layer, for a scan."""

    @nn.compact
    def __call__(self, x, mask):
        return x + nn.MultiHeadDotProductAttention(4, name="attn")(x, mask=mask), None


class Stack(nn.Module):
    """Layers under scan and remat that share a mask."""

    make: object = nn.make_causal_mask

    @nn.compact
    def __call__(self, x, tokens):
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=2,
        )
        return layers(name="layers")(x, self.make(tokens))[0]


@EXPENSIVE
def test_scan_and_remat_keep_nothing_of_the_array_when_compiled():
    variables = jax.jit(Stack().init)(jax.random.key(0), X, TOKENS)
    step = jax.grad(lambda v: recipe(mask="causal").wrap(Stack()).apply(v, X, TOKENS).sum())
    assert any(name == "jaxmp_mask_causal" for name, _ in names_in(step, variables))
    text = jax.jit(step).lower(variables).compile().as_text()
    assert f"pred[{BATCH},1,{LENGTH},{LENGTH}]" not in text


# ---------------------------------------------------------------------------
# Decoding and cross attention
# ---------------------------------------------------------------------------


@EXPENSIVE
def test_linen_decodes_with_the_mask_of_its_cache():
    layer = nn.MultiHeadDotProductAttention(4, decode=True)
    variables = layer.init(jax.random.key(0), X)
    whole = nn.MultiHeadDotProductAttention(4).apply(
        {"params": variables["params"]}, X, mask=nn.make_causal_mask(TOKENS)
    )
    wrapped, cache = recipe(mask="causal").wrap(layer), variables["cache"]
    for step in range(3):
        out, state = wrapped.apply(
            {"params": variables["params"], "cache": cache}, X[:, step : step + 1], mutable="cache"
        )
        cache = state["cache"]
        assert jnp.abs(out[:, 0] - whole[:, step]).max() < ROUNDINGS


def test_nnx_decodes_with_the_mask_of_its_cache():
    layer = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0))
    whole = layer(X, mask=nn.make_causal_mask(TOKENS))
    wrapped = recipe(mask="causal").wrap(layer)
    wrapped.init_cache(X.shape)
    for step in range(3):
        out = wrapped(X[:, step : step + 1], decode=True)
        assert jnp.abs(out[:, 0] - whole[:, step]).max() < ROUNDINGS


@EXPENSIVE
def test_cross_attention_takes_a_rule_of_its_own():
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x, context, tokens):
            own = nn.MultiHeadDotProductAttention(4, name="own")
            cross = nn.MultiHeadDotProductAttention(4, name="cross")
            x = own(x, mask=nn.make_causal_mask(tokens))
            return cross(x, context, mask=jnp.ones((1, 1, LENGTH, context.shape[1])))

    context = X[:, :12]
    variables = jax.jit(Decoder().init)(jax.random.key(0), X, context, TOKENS)
    with pytest.raises(AttentionError, match="from 16 queries to 12 keys") as error:
        jax.eval_shape(recipe(mask="causal").wrap(Decoder()).apply, variables, X, context, TOKENS)
    assert 'jaxmp.Rule("cross", mask="padding")' in str(error.value)
    # The fix of the message.
    policies = jaxmp.PolicyMap(recipe(mask="causal"), [jaxmp.Rule("cross", mask="padding")])
    models = [recipe().replace(policies=policies).wrap(Decoder()), recipe().wrap(Decoder())]
    apply = lambda: [model.apply(variables, X, context, TOKENS) for model in models]
    out, expected = map(np.asarray, jax.jit(apply)())
    assert np.abs(out - expected).max() < ROUNDINGS
    # With as many keys as queries, only the elements of the array contradict the declaration.
    with pytest.raises(AttentionError, match="'cross' declares"):
        recipe(mask="causal").wrap(Decoder()).apply(variables, X, X, TOKENS)


# ---------------------------------------------------------------------------
# Contradictions
# ---------------------------------------------------------------------------

SEGMENTS = jnp.asarray(np.repeat([[1, 2]], LENGTH // 2, axis=1).repeat(BATCH, 0), jnp.int32)
WRONG = {
    "segments": (
        {"mask": "causal"},
        lambda t: nn.combine_masks(
            nn.make_causal_mask(t), nn.make_attention_mask(SEGMENTS, SEGMENTS, jnp.equal)
        ),
        "query 8 .sequence 0, head 0. the mask hides key 0, which the declaration shows",
    ),
    "causal for full": ({"mask": "full"}, nn.make_causal_mask, "query 0 .* hides key 1, "),
    "full for causal": (
        {"mask": "causal"},
        lambda t: jnp.ones((LENGTH, LENGTH)),
        "query 0 .* shows key 1, ",
    ),
    "window": ({"mask": "causal", "window": 4}, windowed, "query 4 .* hides key 0, "),
    "left padding": (
        {"mask": "padding"},
        lambda t: (t[:, ::-1] > 0)[:, None, None, :],
        "sequence 1, head 0. the mask shows key",
    ),
    "one head": (
        {"mask": "causal"},
        lambda t: nn.make_causal_mask(t).repeat(4, 1).at[0, 2, 5, 5].set(0),
        "query 5 .sequence 0, head 2. the mask hides key 5",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_contradiction_names_the_layer_and_the_first_difference(name):
    settings, make, message = WRONG[name]
    model = in_nnx if name == "segments" else linen
    with pytest.raises(AttentionError, match=message) as error:
        model(make, recipe(**settings))(X, TOKENS)
    assert "'attn' declares mask = " in str(error.value)


def test_the_fix_of_a_contradiction_agrees_with_the_mask(model):
    with pytest.raises(AttentionError) as error:
        model(windowed, recipe(mask="full"))(X, TOKENS)
    assert 'jaxmp.Rule("attn", mask="causal", window=3)' in str(error.value)
    assert '    [[rules]]\n    path = "attn"\n    mask = "causal"\n    window = 3' in str(
        error.value
    )
    rule = jaxmp.Rule("attn", mask="causal", window=3)
    fixed = recipe().replace(policies=jaxmp.PolicyMap("bf16", [rule]))
    assert model(windowed, fixed)(X, TOKENS).shape == X.shape


def test_a_layer_without_a_mask_contradicts_causality(model):
    with pytest.raises(AttentionError, match="is called without a mask"):
        jax.eval_shape(model(lambda t: None, recipe(mask="causal")), X, TOKENS)
    assert model(lambda t: None, recipe(mask="padding"))(X, TOKENS).shape == X.shape


def test_what_the_author_states_is_part_of_the_mask():
    layer = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0))
    wrapped = recipe(mask="causal+padding").wrap(layer)
    padding = nn.make_attention_mask(TOKENS > 0, TOKENS > 0)
    out = wrapped(X, mask=padding, is_causal=True)
    expected = recipe().wrap(layer)(X, mask=padding, is_causal=True)
    assert jnp.abs(out - expected)[0].max() < ROUNDINGS
    with pytest.raises(AttentionError, match="contradicts its mask"):
        recipe(mask="padding").wrap(layer)(X, mask=padding, is_causal=True)


def test_a_constant_mask_is_compared_while_tracing(model):
    mask = np.tril(np.ones((1, 1, LENGTH, LENGTH), bool))
    run = model(lambda t: mask, recipe(mask="full"))
    with pytest.raises(AttentionError, match="contradicts"):
        jax.eval_shape(run, X, TOKENS)


# ---------------------------------------------------------------------------
# Audit
# ---------------------------------------------------------------------------


def dense(report):
    return [finding for finding in report.findings if finding.check == "dense_mask"]


def test_audit_reports_a_causal_array_and_its_fix_removes_the_finding(model):
    before = dense(audit(model(nn.make_causal_mask, recipe()), X, TOKENS))
    (finding,) = before
    assert (finding.severity, finding.module) == ("warning", "attn")
    assert "the mask is causal for every input" in finding.message
    assert '    recipe = recipe.replace(mask="causal")' in finding.fix
    assert '    [attention]\n    mask = "causal"' in finding.fix
    assert dense(audit(model(nn.make_causal_mask, recipe(mask="causal")), X, TOKENS)) == []


def test_audit_compares_declared_masks_that_depend_on_inputs(model):
    make, shapes = MASKS["causal, padding"][1], jax.eval_shape(lambda: (X, TOKENS))
    compiled = lambda **settings: jax.jit(model(make, recipe(**settings)))
    assert not any(
        "mask" in note for note in audit(compiled(mask="causal+padding"), X, TOKENS).notes
    )
    with pytest.raises(AttentionError, match="'attn' declares"):
        audit(compiled(mask="causal"), X, TOKENS)
    notes = audit(compiled(mask="causal"), *shapes).notes
    assert any("pass arrays instead of shapes" in note for note in notes)


@EXPENSIVE
def test_audit_of_a_step_proves_masks_inside_of_loops():
    variables = jax.jit(Stack().init)(jax.random.key(0), X, TOKENS)

    def step(chosen, make=nn.make_causal_mask):
        model = chosen.wrap(Stack(make))
        return jax.grad(lambda v, x, t: model.apply(v, x, t).sum())

    args = variables, X, TOKENS
    assert [finding.module for finding in dense(audit(step(recipe()), *args))] == ["layers/attn"]
    report = audit(step(recipe(mask="causal")), *args)
    assert dense(report) == [] and not any("mask" in note for note in report.notes)
    with pytest.raises(AttentionError, match="'layers/attn' declares mask = \"full\""):
        audit(step(recipe(mask="full")), *args)
    padded = MASKS["causal, padding"][1]
    report = audit(step(recipe(mask="causal+padding"), padded), *jax.eval_shape(lambda: args))
    assert any("depend on the program's inputs" in note for note in report.notes)
    assert dense(audit(step(recipe(), padded), *args)) == []


def test_audit_of_a_call_names_the_argument():
    mask = windowed(TOKENS)[0, 0]

    def attend(query):
        return jaxmp.dot_product_attention(query, query, query, mask=mask)

    (finding,) = dense(audit(attend, jnp.ones((1, LENGTH, 4, 8), jnp.bfloat16)))
    call = (
        "jaxmp.dot_product_attention(query, key, value, is_causal=True, local_window_size=(3, 0))"
    )
    assert call in finding.fix


def test_layers_with_other_masks_get_a_rule_each():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x, tokens):
            for name, make in (("a", nn.make_causal_mask), ("b", windowed)):
                x = nn.MultiHeadDotProductAttention(4, name=name)(x, mask=make(tokens))
            return x

    variables = Two().init(jax.random.key(0), X, TOKENS)
    report = audit(recipe().wrap(Two()).apply, variables, X, TOKENS)
    fixes = {finding.module: finding.fix for finding in dense(report)}
    assert 'jaxmp.Rule("a", mask="causal")' in fixes["a"]
    assert '    path = "b"\n    mask = "causal"\n    window = 3' in fixes["b"]


# ---------------------------------------------------------------------------
# Known values
# ---------------------------------------------------------------------------


def known_result(fn, *args):
    closed = jax.make_jaxpr(fn)(*args)
    return Scope(closed).value(closed.jaxpr.outvars[0])


@pytest.mark.parametrize(
    "fn",
    [
        nn.make_causal_mask,
        lambda t: jnp.tril(jnp.ones((LENGTH, LENGTH), bool)),
        lambda t: jnp.triu(jnp.full((LENGTH, LENGTH), -jnp.inf), 1) == 0,
        lambda t: jnp.arange(LENGTH)[None] // 4 == jnp.arange(LENGTH)[:, None] // 4,
        lambda t: jnp.where(windowed(t), 0.0, -1e9)[..., 2:9].swapaxes(2, 3) > -1,
        lambda t: jax.lax.dynamic_slice(nn.make_causal_mask(t), (0, 0, 4, 9), (1, 1, 8, 9)),
        lambda t: jax.lax.dynamic_slice(jnp.arange(LENGTH), (-LENGTH - 5,), (3,)),
        lambda t: jax.jit(lambda x: ~x)(nn.make_causal_mask(t, dtype=bool)),
        lambda t: jax.checkpoint(lambda x: x - 1)(jnp.eye(LENGTH, dtype=jnp.int32) * 3),
    ],
)
def test_values_that_follow_from_shapes_are_those_of_jax(fn):
    found = known_result(fn, TOKENS)
    assert found is not None and (found == np.asarray(fn(TOKENS))).all()
    assert found.dtype == fn(TOKENS).dtype


def test_values_that_depend_on_inputs_are_not_known():
    assert known_result(lambda t: t > 0, TOKENS) is None
    assert known_result(lambda t: jnp.arange(LENGTH) * t[0], TOKENS) is None
    loop = lambda t: jax.lax.fori_loop(0, 3, lambda i, x: x + i, jnp.arange(4))
    assert known_result(loop, TOKENS) is None
    large = lambda t: jnp.arange(2**17)[:, None] >= jnp.arange(2**17)[None, :]
    assert known_result(large, TOKENS) is None


def test_scans_know_what_is_the_same_in_each_step():
    def carried(t):
        mask = nn.make_causal_mask(t)
        body = lambda carry, row: ((carry[0], carry[1] + 1), carry[0] & row)
        return jax.lax.scan(body, (mask > 0, 0), jnp.ones((3, 1, 1, 1, LENGTH), bool))

    program = Scope(jax.make_jaxpr(carried)(TOKENS))
    (scan,) = [e for e in program.jaxpr.eqns if e.primitive.name == "scan"]
    (loop,) = program.inside(scan)
    (equation,) = [e for e in loop.jaxpr.eqns if e.primitive.name == "and"]
    assert all(loop.value(var) is not None for var in equation.invars)


# ---------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------


def test_settings_are_read_and_written(write):
    file = write(
        'extends = "bf16"\n[attention]\nmask = "causal"\nwindow = 127\n'
        '[[rules]]\npath = "cross"\nmask = "padding"\nrequired = false\n'
        '[[rules]]\npath = "local"\nwindow = [7, 0]\nimplementation = "xla"\nrequired = false\n'
    )
    loaded = load_recipe(file)
    settings = lambda name: (
        (policy := loaded.policies.resolve(name)).implementation,
        policy.mask,
        policy.window,
    )
    assert settings("any") == ("auto", "causal", (127, 0))
    assert settings("cross") == ("auto", "padding", None)
    assert settings("local") == ("xla", "causal", (7, 0))
    assert load_recipe(write(loaded.to_toml())) == loaded
    child = 'extends = "my.toml"\n[attention]\nmask = "causal+padding"\n'
    assert load_recipe(write(child, "child.toml")).policies.default.window is None
    policy = jaxmp.get_policy("p=f32,c=bf16,mask=full,window=3+1")
    assert policy.window == (3, 1) and jaxmp.get_policy(str(policy)) == policy
    assert recipe(mask="causal", window=5).replace(mask="full").policies.default.window is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[rules]]\npath = "a"\nattention = "xla"', "Did you mean 'implementation'"),
        ("[attention]\nwindow = 3", "window requires a declared mask"),
        ('[attention]\nmask = "casual"', "Did you mean 'causal'"),
        ("[attention]\nmask = 'causal'\nwindow = -1", "neither a nonnegative integer nor a pair"),
    ],
)
def test_settings_that_a_file_may_not_have(write, text, message):
    with pytest.raises(jaxmp.errors.RecipeError, match=message) as error:
        load_recipe(write(f'extends = "bf16"\n{text}\n'))
    fix = code_of(str(error.value))
    table = '[[rules]]\npath = "a"' if "rules" in text else "[attention]"
    mask = "" if "mask" in fix or "rules" in text else 'mask = "causal"'
    load_recipe(write(f'extends = "bf16"\n{table}\n{mask}\n{fix}\n'))


@pytest.mark.parametrize(
    "settings", [{"window": 3}, {"mask": "casual"}, {"mask": "causal", "window": (1, 2, 3)}]
)
def test_settings_that_replace_refuses(settings):
    with pytest.raises(jaxmp.errors.RecipeError, match=r"replace\("):
        recipe(**settings)


def test_a_rule_with_a_window_needs_a_declared_mask():
    with pytest.raises(jaxmp.errors.RuleError, match="requires a declared mask"):
        jaxmp.PolicyMap("bf16", [jaxmp.Rule("a", window=3)])
    policies = jaxmp.PolicyMap(recipe(mask="causal"), [jaxmp.Rule("a", window=3)])
    assert policies.resolve("a").window == (3, 0)
