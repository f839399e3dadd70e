"""Unedited models of other packages."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers
from flax import nnx

import compatibility
import jaxmp
from compatibility import AUTHOR, is_16_bit
from compatibility_models import INSTALLED, tokens
from grids import EXPENSIVE, REST, fast_cases
from jaxmp._policies._resolve import resolve_policy
from sources import results_of, text_of
from training_steps import nnx_step

# Tolerances of the outputs, with a margin for other machines. One rounding is at most 2**-9 and
# 2**-12.
OUTPUTS = {"bf16": 2e-2, "bf16_params": 2e-2, "fp16": 2.5e-3}

# Gradients jump where a rounding decides which pixel is the largest. XLA for CPUs adds the 510 rows
# of some gradients of bfloat16 weights in bfloat16.
JUMPS = {"ResNet, classifier": 20, "Wav2Vec2, speech recognition": 1.5}

pytestmark = [
    # The layers of GPT-2 cast their operands to float32, and the recipe warns.
    pytest.mark.filterwarnings("ignore::jaxmp.errors.RecipeWarning"),
    # These models rely on promotion of dtypes and ranks.
    pytest.mark.usefixtures("standard_promotion", "rank_promotion"),
]

# These models resemble faster ones among the others.
SLOW = ("BERT", "Llama", "ViT", "Whisper", "Wav2Vec2")
# The fast tests check the matmuls of these in the traced program.
LARGE = ("Mamba", "NanoMoE", "ResNet")

MODELS = {model.name: model for model in INSTALLED}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(SLOW)) for name in MODELS]


@functools.cache
def build(name):
    return MODELS[name].make()


@functools.cache
def reference(name):
    return compatibility.run(build(name), AUTHOR)


def wide_products(built, recipe):
    """Returns `(module path, dtype, dtype)` of the matmuls with an FP32 operand."""
    made = compatibility.products(built, jaxmp.load_recipe(recipe))
    return [product for product in made if not is_16_bit(product)]


def one_recipe_each():
    """Returns all models with all recipes; CI runs one recipe for each model."""
    models = [name for name in MODELS if not name.startswith(SLOW)]
    kept = set(zip(models, itertools.cycle(OUTPUTS), strict=False))
    return [
        pytest.param(
            *pair,
            marks=REST if pair not in kept else EXPENSIVE if pair[0].startswith(LARGE) else (),
        )
        for pair in itertools.product(MODELS, OUTPUTS)
    ]


@EXPENSIVE
@pytest.mark.parametrize(("name", "recipe"), one_recipe_each())
def test_outputs_and_gradients_stay_near_those_of_fp32(name, recipe):
    measured = compatibility.differences(build(name), jaxmp.load_recipe(recipe), reference(name))
    rounding = OUTPUTS[recipe]
    assert 0 < measured["logits"] < rounding
    assert 0 < measured["gradients_together"] < rounding * JUMPS.get(name, 1)


@pytest.mark.parametrize("recipe", ["bf16", pytest.param("fp16", marks=REST)])
@pytest.mark.parametrize("name", NAMES)
@fast_cases("Graph attention with LayerNorm-bf16", "Graph convolutions with BatchNorm-bf16")
def test_matmuls_have_16_bit_operands_but_where_the_author_says_otherwise(name, recipe):
    paths = [path for path, *_ in wide_products(build(name), recipe)]
    if name.startswith("NanoMoE"):  # Router_0: one matmul, two gradients
        assert len(paths) == 3 and all("/Router_0/Dense_0" in path for path in paths)
    elif MODELS[name].source != "transformers" or name.startswith("ResNet"):
        assert paths == []
    elif not name.startswith("GPT-2"):
        assert paths and all("attention" in path or "attn" in path for path in paths)


@EXPENSIVE
def test_the_authors_own_dtype_reaches_what_he_casts_himself():
    gpt2 = build("GPT-2, language model")
    assert any("c_fc" in path for path, *_ in wide_products(gpt2, "bf16"))
    typed = gpt2._replace(module=gpt2.typed(jnp.bfloat16))
    assert wide_products(typed, "bf16") == []


def hugging_face_gpt2():
    """Returns a model without parameters, and the shapes of its parameters."""
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    model = transformers.FlaxGPT2LMHeadModel(config, _do_init=False)
    return model, jax.eval_shape(lambda: model.init_weights(jax.random.key(0), (1, 1)))


def test_wrapping_a_model_of_transformers_names_the_line_that_works():
    model, params = hugging_face_gpt2()
    recipe = jaxmp.load_recipe("bf16")
    with pytest.raises(jaxmp.JaxmpError, match="FlaxGPT2LMHeadModel, which is not a Flax") as error:
        recipe.wrap(model)
    fix = str(error.value).partition("Wrap that module: ")[2].removesuffix(".")
    assert fix
    exec(fix)
    ids = jnp.ones((2, 12), jnp.int32)
    logits = jax.eval_shape(lambda params: model(ids, params=params).logits, params)
    assert logits.dtype == jnp.float32
    assert recipe.wrap(model.module).clone() == model.module  # it is wrapped already


def test_layers_that_ignore_the_recipe_are_reported_once_with_the_remedy():
    model, shapes = hugging_face_gpt2()
    recipe = jaxmp.load_recipe("bf16").replace(name="another")
    rules = (jaxmp.Rule("nothing", "c=f32", required=False), *recipe.policies.rules)
    policies = jaxmp.PolicyMap(recipe.policies.default, rules)
    model._module = jaxmp.load_recipe(policies).wrap(model.module)
    ids = jnp.ones((2, 12), jnp.int32)

    def loss_fn(params, ids):
        return model(ids, params=params).logits.mean()

    with pytest.warns(
        jaxmp.errors.RecipeWarning, match=r"^14% of the matmul FLOPs.*FlaxConv1D"
    ) as warned:
        alone = jaxmp.audit(jax.grad(loss_fn), shapes, ids)
        jax.eval_shape(jax.grad(loss_fn), shapes, ids)
    assert len(warned) == 1
    assert round(alone.low_precision_share, 2) == 0.14
    names = {"jaxmp": jaxmp, "recipe": recipe, "loss_fn": loss_fn}
    exec(str(warned[0].message).partition("operation: ")[2].removesuffix("."), names)
    both = jaxmp.audit(jax.grad(names["loss_fn"]), shapes, ids)
    assert both.low_precision_share == 1


def test_recipes_find_routers_by_their_usual_names():
    policies = jaxmp.load_recipe("fp16_params").policies
    names = "moe_router Moe/Router/dense Router_0 layers_3/TopKRouter_12/Dense_0 a/moe_router/b"
    for name in names.split():
        assert policies.resolve(name) == jaxmp.get_policy("p=f16,c=f32,o=f32")
    for name in ("router_mlp", "RouterMoE_0", "Routed_0", "gate", "Router"):
        assert resolve_policy(policies, name).rule is None


@EXPENSIVE
def test_a_rule_of_ones_own_goes_before_the_recipes():
    recipe = jaxmp.load_recipe("bf16")
    low = jaxmp.Rule("**/Router_*/**", "c=bf16", why="to measure what FP32 routing changes")
    rules = (low, *recipe.policies.rules)
    lowered = recipe.replace(policies=jaxmp.PolicyMap(recipe.policies.default, rules))
    assert wide_products(build("NanoMoE, language model"), lowered) == []


@EXPENSIVE
@pytest.mark.parametrize("name", ["GPT-2, language model", "Mamba-2, language model"])
def test_fp32_gives_what_the_author_gives(name):
    ours = compatibility.run(build(name), jaxmp.load_recipe("fp32"))
    jax.tree.map(np.testing.assert_array_equal, ours, reference(name))


@EXPENSIVE
def test_an_nnx_model_trains():
    model = jaxmp.load_recipe("bf16_params").wrap(build("Mamba-2, language model").module)
    tx = jaxmp.load_recipe("bf16_params").optimizer(optax.adam(1e-2))
    optimizer = jaxmp.nnx.Optimizer(model, tx)
    ids = tokens(2, 16)

    step = nnx.jit(nnx_step(lambda model, ids: model(ids, labels=ids)["loss"]))
    losses = [float(step(model, optimizer, ids)) for _ in range(4)]
    assert losses[3] < losses[0]
    assert model.backbone.embedder.embedding[...].dtype == jnp.bfloat16


@EXPENSIVE
def test_the_page_shows_what_was_measured_and_its_example_runs():
    page = text_of("docs/compatibility.md")
    for table in compatibility.tables(results_of("compatibility_jax_0.10.2_cpu")):
        assert table in page
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "docs/compatibility.md", "exec"), {})
