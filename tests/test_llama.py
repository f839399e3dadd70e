"""Llama of examples/llama.py: sizes, results in both frameworks, and the compiled step."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

import language_models
import llama
from arrays import assert_close
from gpt_programs import count_step
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, fast_cases

TOY = llama.Shape(2, 32, 4, 2, 48, 128, 16)
TOKENS_BS = np.random.default_rng(0).integers(0, TOY.vocabulary, (2, 17)).astype(np.int32)


# `optax.clip_by_global_norm` and schedules mix dtypes.
pytestmark = pytest.mark.usefixtures("standard_promotion")


@functools.cache
def params(shape=TOY):
    return language_models.initial_params(llama.Llama(shape))


@functools.cache
def loss_and_gradient(recipe, framework, shape=TOY):
    make_nnx = lambda: llama.NnxLlama(shape, rngs=nnx.Rngs(0))
    apply = language_models.make_apply(recipe, framework, llama.Llama(shape), make_nnx)
    return language_models.loss_and_gradient(apply, params(shape), TOKENS_BS)


@pytest.mark.parametrize("size", llama.SIZES)
@fast_cases("tiny", "llama-3-8b")
def test_parameters_of_each_size(size):
    shape = llama.SIZES[size]
    _, state, tokens_BS = llama.make_step("bf16", shape)
    _, model, _, _ = llama.make_nnx_step("bf16", shape)
    assert tokens_BS.shape == (1, shape.max_length + 1)
    assert nnx.as_pure(nnx.state(model, nnx.Param)) == state.params["params"]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    row = re.search(rf"^    {size} .*$", llama.__doc__, re.MULTILINE)[0].split()
    sizes = (shape.layers, shape.width, shape.heads, shape.key_heads, shape.hidden)
    known = (f"{parameters:,}", *map(str, sizes), f"{shape.vocabulary:,}")
    assert tuple(row[1:]) == known


def reference_loss(params, shape=TOY):
    """Computes the mean loss in FP64 with NumPy, for each layer and query head."""
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    table = tree["token_embedding"]["embedding"]
    output = table if shape.tied else tree["output_embedding"]["embedding"]
    size, group = shape.head_size, shape.heads // shape.key_heads
    rates = shape.rope_base ** (-np.arange(0, size, 2) / size)

    def norm(x, p):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"]

    def rotate(x):
        turned = (x[:, : size // 2] + 1j * x[:, size // 2 :]) * np.exp(
            1j * np.arange(len(x))[:, None] * rates
        )
        return np.concatenate([turned.real, turned.imag], -1)

    losses = []
    for tokens in TOKENS_BS:
        x = table[tokens[:-1]]
        for layer in range(shape.layers):
            p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], tree["blocks"])
            qkv = norm(x, p["attention_norm"]) @ p["qkv"]["kernel"]
            qkv, heads = qkv.reshape(len(x), shape.key_heads, group + 2, size), []
            for head in range(shape.heads):
                q, k, v = (qkv[:, head // group, i] for i in (head % group, -2, -1))
                scores = rotate(q) @ rotate(k).T / np.sqrt(size)
                heads.append(language_models.softmax(np.where(np.tri(len(x)), scores, -np.inf)) @ v)
            x = x + np.concatenate(heads, axis=-1) @ p["attention_out"]["kernel"]
            h = norm(x, p["mlp_norm"])
            gate = h @ p["mlp_gate"]["kernel"]
            h = gate / (1 + np.exp(-gate)) * (h @ p["mlp_up"]["kernel"])
            x = x + h @ p["mlp_down"]["kernel"]
        probabilities = language_models.softmax(norm(x, tree["final_norm"]) @ output.T)
        losses.append(-np.log(probabilities[np.arange(len(x)), tokens[1:]]))
    return np.mean(losses)


@pytest.mark.parametrize(
    ("framework", "recipe", "shape", "tolerance"),
    [
        ("linen", "fp32", TOY, 1e-6),
        ("nnx", "fp32", dataclasses.replace(TOY, tied=True), 1e-6),
        pytest.param("nnx", "fp16", TOY, 2e-3, marks=EXPENSIVE),
    ],
)
@fast_cases("linen-fp32-shape0-1e-06")
def test_loss_and_gradient_against_fp64(framework, recipe, shape, tolerance):
    loss, gradient = loss_and_gradient(recipe, framework, shape)
    assert float(loss) == pytest.approx(reference_loss(params(shape), shape), rel=tolerance)
    reference = functools.partial(reference_loss, shape=shape)
    language_models.check_gradient(reference, params(shape), gradient, tolerance)


@pytest.mark.parametrize("remat", ["mlp", "full"])
@EXPENSIVE
def test_remat_changes_no_result(remat):
    loss, gradient = loss_and_gradient("fp32", "linen")
    shape = dataclasses.replace(TOY, remat=remat)
    again, again_gradient = loss_and_gradient("fp32", "linen", shape)
    assert float(again) == pytest.approx(float(loss), rel=1e-6)
    assert_close(again_gradient, gradient, 1e-5)


@pytest.mark.parametrize(("framework", "recipe"), [("linen", "fp16"), ("nnx", "bf16_params")])
@EXPENSIVE
def test_its_loss_falls(framework, recipe, tmp_path):
    language_models.check_training(llama, TOY, framework, recipe, tmp_path / "tokens.bin")


# ---------------------------------------------------------------------------
# The program for an H200
# ---------------------------------------------------------------------------

COMPILED = llama.Shape(2, 256, 4, 2, 512, 512, 256)
FUSED = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
MAKERS = {"linen": llama.make_step, "nnx": llama.make_nnx_step}


def counts(framework, recipe="bf16", **changes):
    shape = dataclasses.replace(COMPILED, **changes)
    return count_step(recipe, framework, *MAKERS[framework](recipe, shape, 2))


@needs_compiler
@EXPENSIVE
def test_both_frameworks_compile_to_the_same_kernels():
    linen, in_nnx = (counts(framework) for framework in MAKERS)
    assert linen._replace(framework="nnx") == in_nnx
    assert linen.matmuls.keys() == {"bfloat16 x bfloat16"}
    assert linen.attention == dict.fromkeys(FUSED, COMPILED.layers)


@needs_compiler
@pytest.mark.slow
def test_remat_computes_again_what_it_names():
    none, mlp, full = (counts("linen", remat=remat) for remat in llama.SAVED)
    assert full.temporary < mlp.temporary < none.temporary
    forward, backward = FUSED
    layers = COMPILED.layers
    assert mlp.attention == none.attention
    assert full.attention == {forward: 2 * layers, backward: layers}
    flops = [item.matmuls["bfloat16 x bfloat16"] for item in (none, mlp, full)]
    tokens = 2 * COMPILED.max_length
    assert flops[1] - flops[0] == 2 * tokens * layers * 2 * COMPILED.width * COMPILED.hidden
    assert flops[2] > flops[1]
