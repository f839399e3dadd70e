"""Compares transformers compiled for an H200 with causal masks as arrays, declared, and by hand.

    python benchmarks/mask_declaration.py
    python benchmarks/mask_declaration.py --out benchmarks/results/mask_declaration_h200.json

The models are those of `byte_gpt.py` in the examples, in Linen and in NNX. The programs compute
loss and gradients in bfloat16, in three variants:

    array      the model passes `nn.make_causal_mask(tokens)` to its attention layers
    declared   the same model, under a recipe with `mask = "causal"`
    by hand    the model passes no mask, and its layers have `attention_fn(is_causal=True)`

Prints the bytes of the operands and results of all kernels, the temporary memory that XLA reports,
and the attention kernels. Nothing is run. Compiling for an H200 requires XLA's GPU compiler: pip
install -e ".[aot]".
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

import byte_gpt
import jaxmp
from jaxmp._audit._compile import _WITHOUT_GPU
from jaxmp._audit._gpus import GPUS
from jaxmp._core import _compat
from optimizer_bytes import kernels

WAYS = ("array", "declared", "by hand")


class BlockByHand(byte_gpt.Block):
    """Block with `attention_fn(is_causal=True)`."""

    @nn.compact
    def __call__(self, x_BTD, mask_B1TT):
        del mask_B1TT
        width = x_BTD.shape[-1]
        h_BTD = nn.LayerNorm(name="attention_norm")(x_BTD)
        attention_fn = jaxmp.linen.attention_fn(is_causal=True)
        attention = nn.MultiHeadDotProductAttention(
            self.heads, attention_fn=attention_fn, name="attention"
        )
        x_BTD = x_BTD + attention(h_BTD)
        h_BTD = nn.LayerNorm(name="mlp_norm")(x_BTD)
        h_BTF = nn.gelu(nn.Dense(4 * width, name="mlp_up")(h_BTD))
        return x_BTD + nn.Dense(width, name="mlp_down")(h_BTF)


class GPTByHand(byte_gpt.GPT):
    """Model of blocks with `attention_fn(is_causal=True)`."""

    @nn.compact
    def __call__(self, tokens_BT):
        x_BTD = nn.Embed(byte_gpt.VOCABULARY, self.width, name="token_embedding")(tokens_BT)
        positions_1T = jnp.arange(tokens_BT.shape[1])[None]
        positions = nn.Embed(self.max_length, self.width, name="position_embedding")
        x_BTD = x_BTD + jnp.broadcast_to(positions(positions_1T), x_BTD.shape)
        for layer in range(self.layers):
            x_BTD = BlockByHand(self.heads, name=f"block_{layer}")(x_BTD, None)
        x_BTD = nn.LayerNorm(name="final_norm")(x_BTD)
        return nn.Dense(byte_gpt.VOCABULARY, use_bias=False, name="lm_head")(x_BTD)


class NnxBlockByHand(byte_gpt.NnxBlock):
    """NNX block with `attention_fn(is_causal=True)`."""

    def __init__(self, width, heads, *, rngs):
        super().__init__(width, heads, rngs=rngs)
        self.attention.attention_fn = jaxmp.nnx.attention_fn(is_causal=True)

    def __call__(self, x_BTD, mask_B1TT):
        return super().__call__(x_BTD, None)


def linen_step(sizes, way, recipe):
    """Returns the step as a function of parameters and tokens, and the parameter shapes."""
    gpt = (GPTByHand if way == "by hand" else byte_gpt.GPT)(**sizes)
    tokens = jax.ShapeDtypeStruct((1, sizes["max_length"]), jnp.int32)
    params = jax.eval_shape(gpt.init, jax.random.key(0), tokens)
    return recipe.wrap(gpt).apply, params


def nnx_step(sizes, way, recipe):
    """Returns the same for NNX."""

    def make():
        model = byte_gpt.NnxGPT(byte_gpt.GPT(**sizes), rngs=nnx.Rngs(0))
        for layer in range(sizes["layers"]) if way == "by hand" else ():
            block = NnxBlockByHand(sizes["width"], sizes["heads"], rngs=nnx.Rngs(0))
            setattr(model, f"block_{layer}", block)
        return recipe.wrap(model)

    definition, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    return lambda params, tokens: nnx.merge(definition, params, rest)(tokens), params


FRAMEWORKS = {"linen": linen_step, "nnx": nnx_step}


def compile_for_h200(apply, params, batch, length):
    """Compiles loss and gradients."""
    (device,) = _compat.described_gpus(GPUS["h200"].description, 1)
    place = lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=SingleDeviceSharding(device)
    )
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    params, tokens = jax.tree.map(place, (params, tokens))

    def loss(params, tokens):
        return jaxmp.losses.softmax_cross_entropy(apply(params, tokens), tokens).mean()

    step = jax.jit(jax.value_and_grad(loss))
    with _compat.context(target="gpu", capability=(9, 0)):
        lowered = step.trace(params, tokens).lower(lowering_platforms=("cuda",))
        return lowered.compile(compiler_options=_WITHOUT_GPU)


def moved(text):
    """Returns the bytes of the operands and results of all kernels of a program."""
    found, sizes = kernels(text)
    return sum(result + sum(sizes.get(name, 0) for name in names) for result, names in found)


def count(framework, way, *, layers=4, width=1024, heads=16, length=1024, batch=8):
    """Returns the bytes, temporary bytes and attention kernels of one program."""
    recipe = jaxmp.load_recipe("bf16")
    recipe = recipe.replace(mask="causal") if way == "declared" else recipe
    sizes = {"layers": layers, "width": width, "heads": heads, "max_length": length}
    program = compile_for_h200(*FRAMEWORKS[framework](sizes, way, recipe), batch, length)
    text = program.as_text()
    fused = {
        name: text.count(f'custom_call_target="__cudnn${name}"')
        for name in ("fmhaSoftmax", "fmhaScaleBiasSoftmax")
    }
    return {
        "framework": framework,
        "way": way,
        "bytes": moved(text),
        "temp_bytes": program.memory_analysis().temp_size_in_bytes,
        "kernels": {f"__cudnn${name}": number for name, number in fused.items() if number},
    }


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    sizes = {"layers": options.layers, "width": options.width, "length": options.length}
    print(f"{GPUS['h200'].name}, compiled and not run; jax {jax.__version__}; {sizes}")
    rows = []
    for framework in FRAMEWORKS:
        for way in WAYS:
            row = count(framework, way, **sizes)
            rows.append(row)
            print(
                f"{framework:6}{way:9}{row['bytes'] / 1e9:8.3f} GB moved"
                f"{row['temp_bytes'] / 2**20:10,.1f} MiB temporary  {row['kernels']}",
                flush=True,
            )
    if options.out:
        report = {
            "command": "python benchmarks/mask_declaration.py " + " ".join(sys.argv[1:]),
            "target": f"{GPUS['h200'].name} (compiled, nothing was run)",
            "versions": {
                "jax": jax.__version__,
                "jaxmp": jaxmp.__version__,
                "python": platform.python_version(),
            },
            "sizes": {**sizes, "heads": 16, "batch": 8},
            "rows": rows,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
