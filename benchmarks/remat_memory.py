"""Measures the temporary memory of rematerialized blocks in a Python loop under FSDP, for 8 H200.

    python benchmarks/remat_memory.py --out remat_memory.json

The model is that of `sharded_programs.py`, with four and with eight `nn.remat` blocks in a Python
loop. Nothing is run, and no GPU is required, but XLA's GPU compiler: pip install -e ".[aot]". Each
row has:

    step           "bf16" for jaxmp, or "plain JAX", which casts the parameters and sums in bfloat16
    combined       False if XLA may not combine reduce-scatters
                   (xla_gpu_reduce_scatter_combine_threshold_bytes=0)
    temporary      memory beside arguments and results, in bytes
    deeper         the same with eight layers
    gradient       bytes of the whole FP32 gradient of the kernels of one layer
"""

import argparse
import json
from pathlib import Path
from unittest import mock

import flax
import flax.linen as nn
import jax

import sharded_programs

WIDTHS = (512, 1024, 4096)
STEPS = ("bf16", "plain JAX")
SEPARATE = {"xla_gpu_reduce_scatter_combine_threshold_bytes": 0}


class Loop(sharded_programs.Stack):
    """Rematerialized blocks in a Python loop, between an embedding and a head."""

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns the logits of tokens_BT."""
        width, vocabulary = sharded_programs.WIDTH, sharded_programs.VOCABULARY
        x_BTD = nn.Embed(vocabulary, width, name="embed", dtype=self.dtype)(tokens_BT)
        x_BTD = self.constrain(x_BTD)
        for n in range(sharded_programs.LAYERS):
            block = nn.remat(sharded_programs.Block)
            x_BTD, _ = block(self.constrain, self.dtype, name=f"block_{n}")(x_BTD, None)
        return nn.Dense(vocabulary, name="lm_head", dtype=self.dtype)(x_BTD)


def temporary(step: str, width: int, layers: int, combined: bool) -> int:
    """Returns the temporary memory of a step, in bytes."""
    options = {} if combined else SEPARATE
    with (
        mock.patch.multiple(sharded_programs, Stack=Loop, WIDTH=width, LAYERS=layers),
        mock.patch.dict(sharded_programs.WITHOUT_GPU, options),
    ):
        return sharded_programs.measure(step, "Linen", "plain", "FSDP", 8)["temporary"]


def main() -> None:
    """Compiles the programs, and writes a file after each of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rows = []
    for width in WIDTHS:
        for step in STEPS:
            for combined in (True, False):
                small, deep = (temporary(step, width, layers, combined) for layers in (4, 8))
                row = {"width": width, "step": step, "combined": combined}
                row |= {"temporary": small, "deeper": deep, "gradient": 8 * width**2 * 4}
                rows.append(row)
                print(row, flush=True)
                versions = {"jax": jax.__version__, "flax": flax.__version__}
                result = {"device": "8 H200, compiled without them", **versions, "rows": rows}
                out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
