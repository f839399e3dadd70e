"""`matmul = "fp8"` in policies and recipes: Linen and NNX models, and excluded layers."""

import copy
import dataclasses
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
import models_linen
import models_nnx
from byte_gpt import GPT, NnxGPT, even_batches, in_nnx, random_batch, standard_library_text
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, REST, fast_cases
from jaxmp import PolicyMap, Rule, audit, fp8, load_recipe
from jaxmp._core import _compat
from jaxmp.errors import CompositionError, RecipeError, RecipeWarning
from programs import dtypes, named, trace
from train_lm import TRAININGS

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
HEAD = Rule("**/lm_head", "o=f32,matmul=default", required=False)


def policies(scaling=None, *rules):
    # The last layer of a model would stay in 16 bits; most models here are parts of one.
    every = Rule("**", "matmul=fp8")
    return PolicyMap("p=f32,c=bf16,o=f32,matmul=fp8", (*rules, HEAD, every), scaling)


def products(fn, *args):
    """Returns the dtypes of the operands and the result of every matmul."""
    return [dtypes(equation) for equation in named(trace(fn, *args), "dot_general")]


def in_fp8(found):
    return [row for row in found if row[0].startswith("float8")]


SMALL = GPT(layers=2, width=32, heads=2, max_length=16)
TOKENS = jnp.arange(32).reshape(2, 16)
# The linear layers of the first block.
PARTS = (f"attention/{name}" for name in ("query", "key", "value", "out"))
LINEARS = {f"block_0/{name}" for name in (*PARTS, "mlp_up", "mlp_down")}


@functools.cache
def parameters():
    return jax.jit(SMALL.init)(jax.random.key(0), TOKENS)["params"]


def linen_loss(policy_map):
    """Returns the loss of a Linen model, and the shapes of its parameters."""
    model = jaxmp.load_recipe(policy_map).wrap(SMALL)
    shapes = jax.eval_shape(SMALL.init, jax.random.key(0), TOKENS)["params"]
    return lambda params: model.apply({"params": params}, TOKENS).sum(), shapes


def nnx_loss(policy_map):
    recipe = jaxmp.load_recipe(policy_map)
    model = nnx.eval_shape(lambda: recipe.wrap(NnxGPT(SMALL, rngs=nnx.Rngs(0))))
    graph, state = nnx.split(model)
    return lambda state: nnx.merge(graph, state)(TOKENS).sum(), state


each_framework = pytest.mark.parametrize("loss_of", [linen_loss, nnx_loss], ids=["linen", "nnx"])

# ---------------------------------------------------------------------------
# Matmuls in FP8
# ---------------------------------------------------------------------------


@each_framework
@fast_cases("nnx")
def test_every_linear_layer_multiplies_in_fp8_three_times(loss_of):
    loss, params = loss_of(policies(fp8.CurrentScaling(min_width=0)))
    with _compat.context(target="gpu"):
        on_gpu = products(jax.grad(loss), params)
    # Six layers in each of two blocks.
    bf16 = "bfloat16"
    assert on_gpu.count((E4M3, E4M3, bf16)) == 12
    # The gradients of FP32 kernels are results of the matmuls.
    assert on_gpu.count((E5M2, E4M3, bf16)) == on_gpu.count((E4M3, E5M2, "float32")) == 12
    found = products(jax.grad(loss), params)
    assert len(in_fp8(found)) == len(in_fp8(on_gpu)) == 36
    # The matmul of the head, which returns its FP32 sums, and two of attention in each block.
    assert len(found) - len(in_fp8(found)) == 3 + 2 * 6
    assert (bf16, bf16, "float32") in found and "float32" not in {row[0] for row in found}


@each_framework
def test_explain_lists_every_layer_and_its_reason(loss_of):
    loss, params = loss_of(policies(None, Rule("block_1/**", "matmul=default")))
    rows = jaxmp.explain(loss)(params).fp8.rows
    assert {row.path: row.exclusion_reason for row in rows} == dict.fromkeys(LINEARS, "")
    assert {(row.k, row.n) for row in rows} == {(32, 32), (32, 128), (128, 32)}
    on_gpu = jaxmp.explain(loss, target="h200")(params).fp8.rows
    assert {row.path for row in on_gpu} == LINEARS
    assert all("too narrow for 8192 tokens" in row.exclusion_reason for row in on_gpu)


@each_framework
@pytest.mark.parametrize(
    ("scaling", "count"),
    [(None, 0), (fp8.CurrentScaling(min_width=32), 12), (fp8.CurrentScaling(min_width=33), 0)],
)
@fast_cases("None-0-linen", "scaling1-12-nnx", "scaling2-0-linen")
@pytest.mark.filterwarnings("ignore:The policies of:jaxmp.errors.RecipeWarning")
def test_narrow_layers_stay_in_16_bits_on_a_gpu(loss_of, scaling, count):
    loss, params = loss_of(policies(scaling))
    with _compat.context(target="gpu"):
        assert len(in_fp8(products(loss, params))) == count


@each_framework
def test_the_scaling_is_that_of_the_policies(loss_of):
    loss, params = loss_of(policies(fp8.CurrentScaling(wgrad="high", dgrad="e4m3fn", min_width=0)))
    # On a CPU, FP8 dots return FP32, which is scaled and then rounded.
    assert set(in_fp8(products(jax.grad(loss), params))) == {(E4M3, E4M3, "float32")}
    with _compat.context(target="gpu"):
        assert set(in_fp8(products(jax.grad(loss), params))) == {(E4M3, E4M3, "bfloat16")}


@each_framework
def test_wide_results(loss_of):
    scaling = fp8.CurrentScaling(min_width=0)
    loss, params = loss_of(policies(scaling, Rule("block_*/mlp_up", "o=f32")))
    with _compat.context(target="gpu"):
        found = in_fp8(products(loss, params))
    assert found.count((E4M3, E4M3, "float32")) == 2 and len(found) == 12


def both_layers(policy_map):
    """Returns the Linen and the NNX model as functions of x, with the same parameters."""
    x = jax.random.normal(jax.random.key(1), (2, 16, 32))
    plain = models_linen.OfEachKind()
    params = plain.init(jax.random.key(0), x)["params"]
    numbers = models_nnx.OfEachKind(nnx.Rngs(0))
    nnx.update(numbers, params)
    linen = jaxmp.load_recipe(policy_map).wrap(plain)
    return (
        x,
        lambda x: linen.apply({"params": params}, x),
        jaxmp.load_recipe(policy_map).wrap(numbers),
    )


@EXPENSIVE
@pytest.mark.parametrize("which", [1, 2], ids=["linen", "nnx"])
def test_layers_of_each_kind(which):
    x, *models = both_layers(policies())
    rows = jaxmp.explain(lambda x: models[which - 1](x))(x).fp8.rows
    assert [dataclasses.astuple(row) for row in rows] == [
        ("odd", 32, 30, "N = 30 is not a multiple of 16"),
        ("einsum", 64, 64, ""),
        ("general", 64, 32, ""),
    ]
    assert len(in_fp8(products(models[which - 1], x))) == 2


@EXPENSIVE
def test_layers_of_each_kind_compute_what_they_should():
    x, linen, flax_nnx = both_layers(policies())
    _, exact, _ = both_layers("p=f32,c=f32,o=f32")
    got, twin, want = jax.jit(lambda x: (linen(x), flax_nnx(x), exact(x)))(x)
    error = lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))
    # A difference in the last bit of BF16 may change the rounding to FP8.
    assert error(got, twin) < 0.02
    # Two layers at 28.5 dB each leave 25.5 dB: 5% of the norm.
    assert 0.03 < error(got, want) < 0.07


def test_an_einsum_of_linen_stays_in_16_bits_and_is_reported():
    layer = nn.Einsum((32, 16), "bd,df->bf", use_bias=False)
    model, x = jaxmp.load_recipe(policies()).wrap(nn.Sequential([layer])), jnp.ones((16, 32))
    variables = model.init(jax.random.key(0), x)
    with pytest.warns(jaxmp.errors.RecipeWarning, match="Einsum has no dot that jaxmp replaces"):
        model.apply(variables, x)
    assert in_fp8(products(model.apply, variables, x)) == []


# ---------------------------------------------------------------------------
# Under Flax's transformations
# ---------------------------------------------------------------------------


class ScannedDense(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(x.shape[-1], name="dense")(x), None


class Scanned(nn.Module):
    axes: tuple[str, ...] = ("params",)

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(ScannedDense, prevent_cse=False),
            variable_axes=dict.fromkeys(self.axes, 0),
            split_rngs={"params": True},
            length=3,
        )
        return layers(name="layers")(x, None)[0]


def test_scan_and_remat():
    model = jaxmp.load_recipe(policies()).wrap(Scanned())
    x = jax.random.normal(jax.random.key(1), (16, 32))
    variables = model.init(jax.random.key(0), x)
    loss = lambda v: jnp.sum(model.apply(v, x) ** 2)
    found = in_fp8(products(jax.grad(loss), variables))
    assert {row[:2] for row in found} == {(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)}
    grads = jax.jit(jax.grad(loss))(variables)
    exact = jax.jit(jax.grad(lambda v: jnp.sum(Scanned().apply(v, x).astype(jnp.float32) ** 2)))(
        variables
    )
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        assert float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)) < 0.2


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(nn.Dense)(32, name="dense")(x)


def test_no_trace_of_another_scaling_is_used():
    """`nn.jit` caches traces for the whole process."""
    x = jax.random.normal(jax.random.key(1), (16, 32))
    variables = Jitted().init(jax.random.key(0), x)
    maps = [
        "bf16",
        policies(),
        policies(fp8.RowwiseScaling(power_of_two=False)),
        "bf16",
        policies(fp8.CurrentScaling(power_of_two=False)),
    ]
    outputs = [jaxmp.load_recipe(m).wrap(Jitted()).apply(variables, x) for m in maps]
    same = lambda a, b: bool(jnp.array_equal(outputs[a], outputs[b]))
    assert same(0, 3)
    assert not any(same(a, b) for a, b in [(0, 1), (1, 2), (0, 2), (1, 4)])


def test_wrapped_models_stay_equal_and_can_be_copied():
    model = jaxmp.load_recipe(policies()).wrap(SMALL)
    assert model == jaxmp.load_recipe(policies()).wrap(SMALL)
    assert model != jaxmp.load_recipe(policies(fp8.RowwiseScaling())).wrap(SMALL)
    flax_nnx = jaxmp.load_recipe(policies()).wrap(in_nnx(SMALL, parameters()))
    twin = copy.deepcopy(flax_nnx)
    assert in_fp8(products(twin, TOKENS)) == in_fp8(products(flax_nnx, TOKENS)) != []
    layer = jaxmp.load_recipe(policies()).wrap(nnx.Linear(32, 32, rngs=nnx.Rngs(0)))
    x = jnp.ones((16, 32))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
    plain = jaxmp.load_recipe("bf16").wrap(flax_nnx)
    assert in_fp8(products(plain, TOKENS)) == []
    assert plain.block_0.mlp_up.dot_general is jax.lax.dot_general


# ---------------------------------------------------------------------------
# Recipes
# ---------------------------------------------------------------------------

TOML = """
extends = "bf16"

[policy]
matmul = "fp8"

[fp8]
"""


@pytest.mark.parametrize(
    ("lines", "scaling"),
    [
        ('scaling = "current"', fp8.CurrentScaling()),
        ('wgrad = "high"\nmin_width = 512', fp8.CurrentScaling(wgrad="high", min_width=512)),
        (
            'scaling = "rowwise"\ndgrad = ["e5m2", "e4m3fn"]\nfast_accumulation = []',
            fp8.RowwiseScaling(dgrad=("e5m2", "e4m3fn"), fast_accumulation=()),
        ),
        (
            'scaling = "delayed"\namax_history_len = 16\namax_compute = "most_recent"',
            fp8.DelayedScaling(amax_history_len=16, amax_compute="most_recent"),
        ),
        ('scaling = "mx"\nrounding = "down"', fp8.MXScaling(rounding="down")),
    ],
)
def test_recipe_files(write, lines, scaling):
    recipe = load_recipe(write(TOML + lines))
    assert recipe.fp8 == recipe.policies.fp8 == scaling
    assert recipe.policies.default.matmul == "fp8"
    assert load_recipe(write(recipe.to_toml())) == recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    hash(recipe)


def test_recipes_without_a_table():
    recipe = load_recipe("p=f32,c=bf16,o=f32,matmul=fp8")
    assert recipe.fp8 is None and "[fp8]" not in recipe.to_toml()
    assert recipe.replace(fp8="rowwise").fp8 == fp8.RowwiseScaling()
    assert recipe.replace(fp8="rowwise") != recipe


def test_another_scaling_replaces_the_whole_table(write):
    write(TOML + 'scaling = "delayed"\namax_history_len = 2', "base.toml")
    recipe = load_recipe(write('extends = "base.toml"\n[fp8]\nscaling = "rowwise"'))
    assert recipe.fp8 == fp8.RowwiseScaling()
    recipe = load_recipe(write('extends = "base.toml"\n[fp8]\nmargin = 1'))
    assert recipe.fp8 == fp8.DelayedScaling(amax_history_len=2, margin=1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('rounding = "up"', r"key 'fp8.rounding': rounding requires scaling = \"mx\""),
        ("calibrate = false", r"(?s)key 'fp8.calibrate'.*scaling = \"delayed\"\n    calibrate = "),
        ("margin = -1", "key 'fp8.margin': CurrentScaling.margin=-1."),
        ('wgrad = ["e5m2", "e5m2"]', "key 'fp8.wgrad': .*not both 'e5m2'"),
        ('scaling = "tensorwise"', "key 'fp8.scaling'.*is not allowed"),
        ("width = 3", "(?s)unknown key 'width'.*min_width"),
    ],
)
def test_recipe_files_that_are_refused(write, lines, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(TOML + lines))


@pytest.mark.parametrize("emulate", [False, True])
def test_a_card_without_fp8_is_refused(card, emulate):
    loss, params = linen_loss(policies(fp8.CurrentScaling(emulate=emulate)))
    card("8.0")
    if emulate:
        assert len(jaxmp.explain(loss)(params).fp8.rows) == 12
    else:
        with pytest.raises(CompositionError, match=r"(?s)A100.*8\.0.*emulate = true"):
            jaxmp.explain(loss)(params)
    card("9.0")
    assert len(jaxmp.explain(loss)(params).fp8.rows) == 12


# ---------------------------------------------------------------------------
# Delayed scaling in Linen
# ---------------------------------------------------------------------------

DELAYED = fp8.DelayedScaling(amax_history_len=3)
STATE = "_overwrite_with_gradient"


def delayed(model, *args):
    """Returns the model under delayed scaling, and its variables."""
    model = jaxmp.load_recipe(policies(DELAYED)).wrap(model)
    return model, jax.jit(model.init)(jax.random.key(0), *args)


def test_init_adds_a_state_for_every_layer_in_fp8_and_nothing_else():
    x = jnp.ones((2, 16, 32))
    _, variables = delayed(models_linen.OfEachKind(), x)
    plain = jax.jit(models_linen.OfEachKind().init)(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], plain["params"])
    wanted = {f"fp8_{name}": leaf for name, leaf in fp8.init_state(DELAYED).items()}
    assert set(variables) == {"params", STATE}
    assert set(variables[STATE]) == {"einsum", "general"}  # the others are not in FP8
    for state in variables[STATE].values():
        jax.tree.map(np.testing.assert_array_equal, state, wanted)


def test_a_model_without_its_state_is_refused():
    x = jnp.ones((2, 16, 32))
    model, variables = delayed(models_linen.OfEachKind(), x)
    with pytest.raises(CompositionError, match=r"finds no state for 'einsum'.*wrapped"):
        jax.eval_shape(model.apply, {"params": variables["params"]}, x)


@EXPENSIVE
def test_the_state_of_scanned_layers():
    x = jax.random.normal(jax.random.key(1), (16, 32))
    model = jaxmp.load_recipe(policies(DELAYED)).wrap(Scanned())
    with pytest.raises(CompositionError, match=r"variable_axes=.'params': 0, '_overwrite"):
        model.init(jax.random.key(0), x)
    model, variables = delayed(Scanned(axes=("params", STATE)), x)
    grads = jax.jit(jax.grad(lambda v: jnp.sum(model.apply(v, x) ** 2)))(variables)
    history = grads[STATE]["layers"]["dense"]["fp8_input_amax_history"]
    assert history.shape == (3, 3) and len(set(history[:, 0].tolist())) == 3
    # 16 bits of the input's maximum.
    assert float(history[0, 0]) == float(jnp.max(jnp.abs(x.astype(jnp.bfloat16))))
    _, new = jax.jit(jaxmp.value_and_grad(lambda v: jnp.sum(model.apply(v, x) ** 2)))(variables)
    jax.tree.map(np.testing.assert_array_equal, new[STATE], grads[STATE])


class Repeated(nn.Module):
    """Model whose layer runs in each step of a scan, which may share its state."""

    shared: tuple[str, ...] = ("params",)

    @nn.compact
    def __call__(self, x):
        shared = {"variable_broadcast": list(self.shared), "split_rngs": {"params": False}}
        layer = nn.scan(ScannedDense, length=2, **shared)
        return layer(name="layer")(x, None)[0]


def test_the_state_of_a_layer_that_runs_in_each_step():
    x = jnp.ones((2, 3, 32))
    with pytest.raises(CompositionError, match=r"variable_broadcast=\['params', '_overwrite_with_"):
        delayed(Repeated(), x)
    models = {"layer": Repeated(("params", STATE)), "cell": nn.RNN(nn.SimpleCell(32))}
    for name, model in models.items():
        model, variables = delayed(model, x)
        loss = lambda v, model=model: jnp.sum(model.apply(v, x))
        (state, *_) = jax.jit(jax.grad(loss))(variables)[STATE][name].values()
        assert float(state["fp8_input_amax"]) >= 1 and state["fp8_input_amax"].shape == ()


@pytest.mark.parametrize("transform", [lambda loss: loss, jax.checkpoint])
def test_no_transformation_hides_a_gradient_without_that_of_the_states(transform):
    x = jnp.ones((16, 32))
    model, variables = delayed(Scanned(axes=("params", STATE)), x)
    loss = transform(lambda params, own: jnp.sum(model.apply({"params": params, STATE: own}, x)))
    jax.eval_shape(jax.grad(loss, argnums=(0, 1)), variables["params"], variables[STATE])
    with pytest.warns(RecipeWarning, match="without that of its states"):
        jax.eval_shape(jax.grad(loss), variables["params"], variables[STATE])


class Twice(nn.Module):
    """Model with a layer that is called twice, a BatchNorm, and an optional layer."""

    @nn.compact
    def __call__(self, x, whole):
        layer = nn.Dense(32, name="layer")
        x = layer(x) + layer(jnp.asarray(7, x.dtype) * x)
        x = nn.BatchNorm(use_running_average=False, name="norm")(x)
        return nn.Dense(32, name="last")(x) if whole else x


@EXPENSIVE
def test_the_state_of_a_layer_that_is_called_twice_and_of_one_that_is_not():
    x = jnp.linspace(-1.0, 1.0, 8 * 32).reshape(8, 32)
    model = jaxmp.load_recipe(policies(DELAYED)).wrap(Twice())
    variables = model.init(jax.random.key(0), x, True)
    stats = variables["batch_stats"]
    trained = {name: variables[name] for name in ("params", STATE)}

    def loss(trained, stats, whole):
        # All collections are mutable: the state that comes back must not count as a result.
        out, mutated = model.apply({**trained, "batch_stats": stats}, x, whole, mutable=True)
        return jnp.sum(out**2), mutated

    step = jax.jit(jaxmp.value_and_grad(loss, has_aux=True), static_argnums=2)
    (_, mutated), first = step(trained, stats, True)
    _, second = step({**trained, STATE: first[STATE]}, stats, False)
    assert first[STATE]["layer"]["fp8_input_amax_history"].tolist() == [7, 0, 0]
    assert first[STATE]["layer"]["fp8_uses"] == 1
    assert second[STATE]["layer"]["fp8_input_amax_history"].tolist() == [7, 7, 0]
    jax.tree.map(np.testing.assert_array_equal, second[STATE]["last"], first[STATE]["last"])
    jax.tree.map(np.testing.assert_array_equal, mutated[STATE], variables[STATE])


# ---------------------------------------------------------------------------
# Compiled for a GPU
# ---------------------------------------------------------------------------


STEP = GPT(layers=1, width=128, heads=2, max_length=128)
ANY_WIDTH = load_recipe(policies(fp8.CurrentScaling(min_width=0)))


@functools.cache
def compiled_gradients(framework, recipe, target):
    """Audits the compiled loss and gradients of the transformer."""
    tokens = jnp.zeros((8, 128), jnp.int32)
    if framework == "linen":
        model = recipe.wrap(STEP)
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)
        loss = lambda variables, tokens: jnp.sum(model.apply(variables, tokens) ** 2)
    else:
        graph, params = nnx.split(
            nnx.eval_shape(lambda: recipe.wrap(NnxGPT(STEP, rngs=nnx.Rngs(0))))
        )
        loss = lambda params, tokens: jnp.sum(nnx.merge(graph, params)(tokens) ** 2)
    return audit(jax.value_and_grad(loss), params, tokens, recipe=recipe, target=target)


@needs_compiler
@pytest.mark.parametrize(
    ("framework", "scaling"),
    [
        ("linen", fp8.CurrentScaling),
        ("nnx", fp8.DelayedScaling),
        pytest.param("linen", fp8.DelayedScaling, marks=REST),
        pytest.param("nnx", fp8.CurrentScaling, marks=REST),
    ],
)
@EXPENSIVE
def test_every_linear_layer_of_a_transformer_is_three_real_fp8_products(framework, scaling):
    recipe = load_recipe(policies(scaling(min_width=0)))
    report = compiled_gradients(framework, recipe, "h200")
    traced, flops = {}, 0
    for row in report.matmuls:
        if row.lhs.startswith("float8"):
            traced[row.module] = traced.get(row.module, 0) + row.count
            flops += row.flops
    assert traced == dict.fromkeys(LINEARS, 3)
    # XLA merges matmuls that share an operand, such as those of query, key and value.
    real = [row for row in report.gemms if row.kernel == "cublas fp8"]
    assert sum(row.flops for row in real) == flops
    assert {dtype for row in real for dtype in (row.lhs, row.rhs)} == {E4M3, E5M2}
    rest = [row for row in report.gemms if row.kernel != "cublas fp8"]
    assert {(row.module, row.lhs, row.rhs) for row in rest} == {("lm_head", "bfloat16", "bfloat16")}
    assert "fp8_fallback" not in {finding.check for finding in report.findings}
    assert report.ok and "CPU" not in str(report), report


@needs_compiler
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_an_a100_is_refused(framework):
    with pytest.raises(CompositionError, match=r"'block_0/.*capability 8\.0\).*begin with 8\.9"):
        compiled_gradients(framework, ANY_WIDTH, "a100")


@needs_compiler
@EXPENSIVE
@pytest.mark.filterwarnings("ignore:The policies of:jaxmp.errors.RecipeWarning")
def test_layers_that_stay_in_16_bits_are_named_with_the_reason():
    report = compiled_gradients("linen", load_recipe("fp8"), "h200")
    found = {finding.module: finding for finding in report.findings if finding.check == "not_fp8"}
    assert set(found) == LINEARS  # not the matmuls of attention and the head
    assert "K = 128 and N = 512 are too narrow" in found["block_0/mlp_up"].message
    assert "min_width = 0" in found["block_0/mlp_up"].fix
    report = compiled_gradients("linen", ANY_WIDTH, "h200")
    assert "not_fp8" not in {finding.check for finding in report.findings}


def test_odd_sizes_and_products_by_hand_are_named_on_a_cpu():
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.ones, (32, 32)).astype(x.dtype)
            return nn.Dense(10, name="odd")(nn.Dense(32, name="even")(x) @ w)

    model = jaxmp.load_recipe(policies()).wrap(Odd())
    x = jnp.ones((16, 32))
    params = model.init(jax.random.key(0), x)
    report = audit(model.apply, params, x, recipe=policies())
    found = {finding.module: finding for finding in report.findings if finding.check == "not_fp8"}
    assert set(found) == {"odd", ""}
    assert "N = 10 is not a multiple of 16" in found["odd"].message
    assert "not that of a Flax layer" in found[""].message
    assert "FP8 matmuls are emulated on a CPU" in " ".join(report.to_text(full=True).split())
    assert "CPU" not in str(audit(Odd().apply, params, x))


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


def held_out_loss(framework, recipe, steps=60):
    """Returns the held-out loss of a small GPT; initial weights and batches are fixed."""
    gpt = GPT(layers=2, width=64, heads=2, max_length=32)
    text = standard_library_text()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        training = TRAININGS[framework](recipe, gpt, optax.adamw(3e-3))
        for step in range(steps):
            training.step(random_batch(text.train, 16, 32, 0, step))
        batches = even_batches(text.held_out, 4, 32, 32)
        losses = [training.loss(batch) for batch in batches]
    assert int(training.state.step[...]) == steps
    return float(np.mean(losses))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["linen", pytest.param("nnx", marks=REST)])
def test_training_is_within_a_percent_of_bf16(framework):
    """Runs on a CPU, where operands are rounded to FP8 and multiplied in a wider dtype."""
    bf16 = held_out_loss(framework, load_recipe("bf16"))
    for scaling in (fp8.CurrentScaling(), fp8.DelayedScaling(amax_history_len=16)):
        loss = held_out_loss(framework, load_recipe(policies(scaling)))
        assert loss == pytest.approx(bf16, rel=0.01)
