"""GPT-2 of examples/gpt.py: sizes, results in both frameworks, and the compiled step."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx

import gpt
import jaxmp
import language_models
from gpt_programs import accessed, count, kernels
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, REST, fast_cases
from jaxmp._tools.audit._hlo import Program
from language_models import FRAMEWORKS
from sources import results_of, text_of

# The table of tokens has 6 rows of padding.
TOY = gpt.GPT(layers=2, width=32, heads=2, vocabulary=250, max_length=16)
TOKENS_BS = np.random.default_rng(0).integers(0, TOY.vocabulary, (2, 17)).astype(np.int32)
ROUNDING = 1e-5  # FP32 sums in another order, relative to the largest entry


# `optax.clip_by_global_norm` and schedules mix dtypes.
pytestmark = pytest.mark.usefixtures("standard_promotion")


@functools.cache
def params():
    return language_models.initial_params(TOY)


def make_apply(recipe, framework):
    make_nnx = lambda: gpt.NnxGPT(TOY, rngs=nnx.Rngs(0))
    return language_models.make_apply(recipe, framework, TOY, make_nnx)


@functools.cache
def loss_and_gradient(recipe, framework):
    return language_models.loss_and_gradient(make_apply(recipe, framework), params(), TOKENS_BS)


# ---------------------------------------------------------------------------
# Sizes and initial values
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", gpt.SIZES)
@fast_cases("tiny", "gpt2")
def test_parameters_of_each_size(size):
    model = gpt.SIZES[size]
    _, state, tokens_BS = gpt.make_step("bf16", model)
    _, nnx_model, _, _ = gpt.make_nnx_step("bf16", model)
    # Shapes only: the largest of them would take 25 GB.
    leaves = jax.tree.leaves((state, nnx_model))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert tokens_BS.shape == (8, model.max_length + 1)
    padding = (gpt.padded(model.vocabulary) - model.vocabulary) * model.width
    row = re.search(rf"^    {size} .*$", gpt.__doc__, re.MULTILINE)[0].split()
    for tree in (state.params, nnx.state(nnx_model, nnx.Param)):
        parameters = sum(leaf.size for leaf in jax.tree.leaves(tree)) - padding
        assert row[1:] == [f"{parameters:,}", *map(str, (model.layers, model.width, model.heads))]


def test_both_frameworks_name_their_parameters_alike():
    linen = jax.eval_shape(TOY.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    model = nnx.eval_shape(lambda: gpt.NnxGPT(TOY, rngs=nnx.Rngs(0)))
    assert nnx.as_pure(nnx.state(model, nnx.Param)) == linen
    assert gpt.padded(50257) == 50304 and gpt.padded(256) == 256


@pytest.mark.parametrize("framework", FRAMEWORKS)
@fast_cases("linen")
def test_initial_values(framework):
    model = gpt.GPT(layers=8, width=64, heads=2, vocabulary=250, max_length=16)
    if framework == "linen":
        made = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    else:
        made = nnx.jit(lambda: gpt.NnxGPT(model, rngs=nnx.Rngs(0)))()
        made = nnx.as_pure(nnx.state(made, nnx.Param))
    blocks = made["blocks"]
    residual = ["attention_out", "mlp_down"]
    for name in ("query", "key", "value", "mlp_up", *residual):
        kernel = np.asarray(blocks[name]["kernel"])
        # The layers have different values: 0.02, or 0.02 / sqrt(2 * 8).
        deviation = 0.005 if name in residual else 0.02
        np.testing.assert_allclose(kernel.std((1, 2)), deviation, rtol=0.05)
        assert np.unique(kernel[:, 0, 0]).size == 8
        assert not np.asarray(blocks[name]["bias"]).any()
    for table in ("token_embedding", "position_embedding"):
        np.testing.assert_allclose(np.std(made[table]["embedding"]), 0.02, rtol=0.05)
    assert (np.asarray(blocks["mlp_norm"]["scale"]) == 1).all()


def test_only_matrices_decay():
    kinds = {"kernel": True, "embedding": True, "bias": False, "scale": False}
    model = nnx.eval_shape(lambda: gpt.NnxGPT(TOY, rngs=nnx.Rngs(0)))
    for tree in (params(), nnx.as_pure(nnx.state(model, nnx.Param)), nnx.state(model, nnx.Param)):
        flags = jax.tree_util.tree_leaves_with_path(gpt.matrices(tree))
        assert len(flags) == 20
        for path, flag in flags:
            (name,) = {getattr(key, "key", None) for key in path} & kinds.keys()
            assert flag == kinds[name]
    tx = gpt.make_optimizer(1.0, steps=2)
    zeros = jax.tree.map(jnp.zeros_like, params())
    state = tx.init(params())
    update = jax.jit(tx.update)
    for _ in range(2):  # the rate begins at zero
        updates, state = update(zeros, state, params())
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        assert update.any() == kinds[path[-1].key]


# ---------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------


def reference_loss(params):
    """Computes the mean loss in FP64 with NumPy, for each layer and head, without padding."""
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    table = tree["token_embedding"]["embedding"][: TOY.vocabulary]

    def norm(x, p):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    losses = []
    for tokens in TOKENS_BS:
        x = table[tokens[:-1]] + tree["position_embedding"]["embedding"]
        for layer in range(TOY.layers):
            p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], tree["blocks"])
            h, heads = norm(x, p["attention_norm"]), []
            names = ("query", "key", "value")
            qkv = (h @ p[name]["kernel"] + p[name]["bias"] for name in names)
            parts = (np.split(part, TOY.heads, axis=-1) for part in qkv)
            for q, k, v in zip(*parts, strict=True):
                scores = np.where(np.tri(len(x)), q @ k.T / np.sqrt(q.shape[-1]), -np.inf)
                heads.append(language_models.softmax(scores) @ v)
            attended = np.concatenate(heads, axis=-1)
            x = x + attended @ p["attention_out"]["kernel"] + p["attention_out"]["bias"]
            h = norm(x, p["mlp_norm"]) @ p["mlp_up"]["kernel"] + p["mlp_up"]["bias"]
            h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
            x = x + h @ p["mlp_down"]["kernel"] + p["mlp_down"]["bias"]
        probabilities = language_models.softmax(norm(x, tree["final_norm"]) @ table.T)
        losses.append(-np.log(probabilities[np.arange(len(x)), tokens[1:]]))
    return np.mean(losses)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("recipe", "tolerance"), [("fp32", 1e-6), ("fp16", 1e-3)])
@fast_cases("fp16-0.001-linen")
def test_loss_and_gradient_against_fp64(framework, recipe, tolerance):
    loss, gradient = loss_and_gradient(recipe, framework)
    assert float(loss) == pytest.approx(reference_loss(params()), rel=tolerance)
    language_models.check_gradient(reference_loss, params(), gradient, tolerance)


@pytest.mark.parametrize(("framework", "recipe"), [("linen", "fp32"), ("nnx", "bf16")])
def test_a_token_changes_no_earlier_logits(framework, recipe):
    tokens = TOKENS_BS[:1, :-1]
    changed = tokens.copy()
    changed[0, 9] += 1
    run = jax.jit(make_apply(recipe, framework))
    before, after = (np.asarray(run(params(), jnp.asarray(x))) for x in (tokens, changed))
    assert before.dtype == np.float32 and before.shape == (1, 16, TOY.vocabulary)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(axis=-1).all()


@pytest.mark.parametrize(("framework", "recipe"), [("linen", "fp16"), ("nnx", "fp32")])
@EXPENSIVE
def test_the_padding_of_the_vocabulary_has_no_part(framework, recipe):
    loss, gradient = loss_and_gradient(recipe, framework)
    rows = gradient["token_embedding"]["embedding"]
    assert rows.shape[0] == 256 and not rows[TOY.vocabulary :].any()
    assert rows[: TOY.vocabulary].any(axis=1).all()
    # Large values there would have all probability.
    table = params()["token_embedding"]["embedding"].at[TOY.vocabulary :].set(100.0)
    filled = params() | {"token_embedding": {"embedding": table}}
    run = jax.jit(make_apply(recipe, framework))
    args = jnp.asarray(TOKENS_BS[:, :-1]), jnp.asarray(TOKENS_BS[:, 1:])
    assert float(run(filled, *args)) == pytest.approx(float(loss), rel=1e-6)
    # The logits give the same loss.
    logits = run(filled, args[0])
    assert float(jaxmp.losses.softmax_cross_entropy(logits, args[1])) == pytest.approx(
        float(loss), rel=ROUNDING
    )


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(("framework", "recipe"), [("linen", "bf16_params"), ("nnx", "fp16")])
@EXPENSIVE
def test_its_loss_falls(framework, recipe, tmp_path):
    language_models.check_training(gpt, TOY, framework, recipe, tmp_path / "tokens.bin")


@pytest.mark.parametrize(
    ("length", "message"), [(31, "shorter than two texts of 16"), (64, "contains the token 250")]
)
def test_tokens_that_do_not_fit_are_refused(length, message, tmp_path):
    file = tmp_path / "tokens.bin"
    np.full(length, TOY.vocabulary, np.uint16).tofile(file)
    with pytest.raises(typer.BadParameter, match=message):
        gpt.read_tokens(file, TOY)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["linen", pytest.param("nnx", marks=REST)])
def test_the_default_run_learns_python(framework):
    losses = gpt.main("bf16", framework=gpt.Framework(framework))
    assert losses[0] > 5 and np.mean(losses[-5:]) < 2.8


# ---------------------------------------------------------------------------
# The audit
# ---------------------------------------------------------------------------


def test_the_audit_of_124_million_parameters_fits_a_screen():
    report = jaxmp.audit(*gpt.make_step("bf16"), recipe="bf16")
    assert report.ok
    lines = report.to_text().splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 80


@pytest.mark.parametrize("recipe", ["fp32", "fp16", "bf16_params", "fp8"])
@fast_cases("fp16", "fp8")
def test_the_audit_of_the_nnx_step_has_no_fault(recipe):
    # A length at which attention runs block by block.
    model = gpt.GPT(layers=2, width=64, heads=2, vocabulary=1000, max_length=1024)
    report = jaxmp.audit(*gpt.make_nnx_step(recipe, model), recipe=recipe)
    assert not report.errors


# ---------------------------------------------------------------------------
# The program for an H200
# ---------------------------------------------------------------------------

COMPILED = gpt.GPT(layers=2, width=128, heads=2, vocabulary=1000, max_length=256)
FUSED = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]


@functools.cache
def counts(recipe, framework, model=COMPILED):
    return count(recipe, framework, model, 4)


# XLA places the same buffers with other gaps between them: in such small programs, one of 1.8 MB in
# 45 MB. In steps of GPT-2's widths, the temporary memory of both frameworks differs by 0.01 %.
GAPS = 5e-2


def assert_same_program(linen, in_nnx):
    assert in_nnx.temporary == pytest.approx(linen.temporary, rel=GAPS)
    # XLA may copy two scalars, such as the loss scale: each copy reads and writes 4 bytes.
    copies = in_nnx.kernels - linen.kernels
    assert abs(copies) <= 2 and in_nnx.accessed - linen.accessed == 8 * copies
    allowed = {name: getattr(in_nnx, name) for name in ("temporary", "kernels", "accessed")}
    assert linen._replace(framework="nnx", **allowed) == in_nnx


@needs_compiler
@EXPENSIVE
def test_both_frameworks_compile_to_the_same_kernels():
    linen, in_nnx = (counts("bf16", framework) for framework in FRAMEWORKS)
    assert_same_program(linen, in_nnx)
    # All matmuls in BF16; attention without a dense bias, once for each layer.
    assert linen.matmuls.keys() == {"bfloat16 x bfloat16"}
    assert linen.attention == dict.fromkeys(FUSED, COMPILED.layers)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16_params", "fp16", "fp8"])
@pytest.mark.filterwarnings("ignore:The policies of:jaxmp.errors.RecipeWarning")
def test_both_frameworks_compile_to_the_same_kernels_under_each_recipe(recipe):
    linen, in_nnx = (counts(recipe, framework) for framework in FRAMEWORKS)
    assert_same_program(linen, in_nnx)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8_delayed"])
def test_bytes_of_the_perceptron(recipe, monkeypatch):
    # Its layers are wide enough to run in FP8 on a GPU.
    model = gpt.GPT(layers=2, width=768, heads=4, vocabulary=1000, max_length=512)
    own = count(recipe, "linen", model, 4)
    monkeypatch.setattr(jaxmp.functional, "gelu", jax.nn.gelu)
    plain = count(recipe, "linen", model, 4)
    # The sums of a gradient of a bias may take another small kernel in each layer.
    assert own.matmuls == plain.matmuls and own.kernels <= plain.kernels + model.layers
    hidden = 4 * 512 * 4 * model.width * 2  # bytes of the array behind the first layer
    # With delayed scaling, XLA measures the activation in the kernel that quantizes it.
    fewer = 1 if recipe == "fp8" else -0.01
    assert plain.accessed - own.accessed >= fewer * model.layers * hidden


@needs_compiler
@pytest.mark.slow
def test_what_remat_recomputes():
    saving = counts("bf16", "linen")
    recomputing, in_nnx = (
        counts("bf16", framework, COMPILED.clone(remat=True)) for framework in FRAMEWORKS
    )
    assert_same_program(recomputing, in_nnx)
    assert recomputing.temporary < saving.temporary
    forward, backward = FUSED
    layers = COMPILED.layers
    assert recomputing.attention == {forward: 2 * layers, backward: layers}
    # Without it, no matmul is computed twice.
    more = recomputing.matmuls["bfloat16 x bfloat16"] - saving.matmuls["bfloat16 x bfloat16"]
    kernels = 12 * COMPILED.width**2
    assert 0 < more <= 2 * 4 * COMPILED.max_length * kernels * layers


HLO = """HloModule m, entry_computation_layout={()->f32[]}

%sliced (p0: f32[4,8], p1: s32[], p2: f32[8]) -> f32[8] {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[8]{0} parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,8]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,8}
  %flat = f32[8]{0} bitcast(%row)
  ROOT %sum = f32[8]{0} add(%flat, %p2)
}

%stored (p0: f32[4,8], p1: s32[], p2: f32[1,8]) -> f32[4,8] {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[1,8]{1,0} parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[4,8]{1,0} dynamic-update-slice(%p0, %p2, %p1, %zero)
}

ENTRY %main (a: f32[4,8], i: s32[], b: f32[8], c: f32[1,8]) -> (f32[8], f32[4,8], f32[8,8]) {
  %a = f32[4,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[8]{0} parameter(2)
  %c = f32[1,8]{1,0} parameter(3)
  %first = f32[8]{0} fusion(%a, %i, %b), kind=kLoop, calls=%sliced
  %second = f32[4,8]{1,0} fusion(%a, %i, %c), kind=kLoop, calls=%stored
  %third = (f32[8,8]{1,0}, s8[4096]{0}) custom-call(%a, %second), custom_call_target="__cublas$gemm"
  %result = f32[8,8]{1,0} get-tuple-element(%third), index=0
  ROOT %out = (f32[8]{0}, f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%first, %second, %result)
}
"""


def test_the_table_in_the_documents_is_what_was_counted():
    read = lambda name: results_of(f"{name}_h200")
    recomputing = {
        row["recipe"]: row
        for row in read("gpt_programs_remat")["rows"]
        if row["framework"] == "linen"
    }
    rows = read("gpt_programs")["rows"]
    page = text_of("docs/measurements.md")
    for linen, in_nnx in zip(rows[::2], rows[1::2], strict=True):
        # XLA computes a scalar of the loss scale in a kernel of its own, or in another one.
        for name, most in (("temporary", 5_000_000), ("kernels", 1), ("accessed", 8)):
            assert abs(linen[name] - in_nnx[name]) <= most
        free = {name: in_nnx[name] for name in ("framework", "temporary", "kernels", "accessed")}
        assert linen | free == in_nnx
        memory = linen["state"], linen["temporary"], recomputing[linen["recipe"]]["temporary"]
        cells = [f"`{linen['recipe']}`", *(f"{size / 1e6:,.0f} MB" for size in memory)]
        cells += [f"{linen['accessed'] / 1e9:,.1f} GB", f"{linen['kernels']:,}"]
        assert f"| {' | '.join(cells)} |" in page


def test_bytes_of_kernels():
    program = Program(HLO)
    moved = {step.instruction.name: accessed(program, step) for step in kernels(program)}
    # A row, an index and b, and the sum; a row and an index, and the row; two arrays and a result.
    assert moved == {"first": 32 + 4 + 32 + 32, "second": 32 + 4 + 32, "third": 128 + 128 + 256}
