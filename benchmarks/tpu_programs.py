"""Counts the matmuls of train steps that are compiled for Google TPUs, by the dtypes of operands.

    python benchmarks/tpu_programs.py                                     # prints the table
    python benchmarks/tpu_programs.py --chips v6e --models linen
    python benchmarks/tpu_programs.py --out benchmarks/results/tpu_programs.json

The steps are those of small GPTs in Linen and NNX (examples/gpt.py), and of a Llama of
`transformers`. Under bf16, they are also compiled for 4 devices, with parameters and optimizer
state split (FSDP), and in Linen with the results of modules split like the batch. Nothing is run,
and no TPU is required, but libtpu: pip install -e ".[tpu-aot]".
The text of the compiled program is read here, without the parser of jaxmp, and compared with the
report of `jaxmp.audit`:

    matmuls   dots and convolutions of the text, by the dtypes of their operands
    kernels   custom calls
    sent      collectives, by dtype, except those of scalars
    rounded   reductions over devices in bfloat16, by shape: no weight gradients
    wide      matmuls with an FP32 operand, which the recipes in 16 bits do not ask for
    agrees    the audit reports an error for FP32 matmuls if there are wide ones, and else the same
              dtypes

The attention of the Llama is wide, because its authors rotate queries and keys in FP32; `llama,
autocast` is the same step with the loss under `jaxmp.autocast`, which is the repair that the report
proposes. TPUs multiply FP32 operands in bfloat16 by default.

Under fp16, the recipe is refused: a warning, and a note of the report, name the recipe that fits.
With a file that exists, only the programs that it lacks are compiled.
"""

import argparse
import itertools
import json
import os
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import transformers
from transformers.models.llama import modeling_flax_llama

import jaxmp
from jaxmp._tools.audit import _audit
from memory_estimates import (
    ForeignModel,
    foreign_step,
    fsdp,
    gpt,
    ids,
    mask,
    positions,
    split_rows,
)
from result_file import write_result

CHIPS = ("v5e", "v6e", "tpu7x")
RECIPES = ("bf16", "bf16_params", "fp16")
GPT = gpt.GPT(layers=2, width=128, heads=2, vocabulary=512, max_length=64)
LLAMA: ForeignModel = (
    modeling_flax_llama.FlaxLlamaForCausalLMModule,
    transformers.LlamaConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        vocab_size=512,
        max_position_embeddings=128,
    ),
    ids(8, 64),
    lambda x: (x, mask(x), positions(x)),
)
MODELS = {
    "linen": lambda recipe: gpt.make_step(recipe, GPT, 8),
    "nnx": lambda recipe: gpt.make_nnx_step(recipe, GPT, 8),
    "llama": lambda recipe: foreign_step(LLAMA, jaxmp.load_recipe(recipe)),
    "llama, autocast": lambda recipe: foreign_step(LLAMA, jaxmp.load_recipe(recipe), autocast=True),
}

_DEFINITION = re.compile(
    r"^\s+(?:ROOT )?%?([\w.\-]+) = \(?(\w+)\[([\d,]*)\][^=]*? ([\w\-]+)\((.*)$"
)
_SENT = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def read_program(text: str) -> dict[str, dict[str, int]]:
    """Counts matmuls, custom calls and collectives in the text of a program for a TPU."""
    dtypes: dict[str, str] = {}
    kinds = ("matmuls", "kernels", "sent", "rounded")
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for line in text.splitlines():
        match = _DEFINITION.match(line)
        if not match:
            continue
        name, dtype, sizes, opcode, rest = match.groups()
        dtypes[name] = dtype
        if opcode in ("dot", "convolution"):
            operands = re.findall(r"%([\w.\-]+)", rest.partition(")")[0])[:2]
            counts["matmuls"][" x ".join(sorted(dtypes[each] for each in operands))] += 1
        elif opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', rest)
            counts["kernels"][target[1] if target else ""] += 1
        elif opcode.removesuffix("-start") in _SENT and sizes:
            counts["sent"][f"{opcode.removesuffix('-start')} {dtype}"] += 1
            if "reduce" in opcode and dtype == "bf16":
                counts["rounded"][f"[{sizes}]"] += 1
    return {key: dict(counter) for key, counter in counts.items()}


def measure(model: str, recipe: str, chip: str, devices: int) -> dict[str, Any]:
    """Audits one step for a chip, and reads the text of the same program."""
    step, *arguments = MODELS[model](recipe)
    if devices > 1:
        arguments = fsdp(arguments, devices)
        step = split_rows(step, arguments[-1]) if model != "nnx" else step
    texts: list[str] = []
    compiled = _audit.compile_for

    def keep(*args: Any) -> Any:
        result = compiled(*args)
        texts.append(result.text)
        return result

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", jaxmp.errors.RecipeWarning)
        with mock.patch.object(_audit, "compile_for", keep):
            report = jaxmp.audit(step, *arguments, recipe=recipe, target=chip)
    read = read_program(texts[0])
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    audited = {" x ".join(sorted(short.get(d, d) for d in (g.lhs, g.rhs))) for g in report.gemms}
    wide = sum(count for key, count in read["matmuls"].items() if "f32" in key.split(" x "))
    found = any(each.check in ("fp32_matmul", "mixed_operands") for each in report.errors)
    return {
        "model": model,
        "recipe": recipe,
        "chip": chip,
        "devices": devices,
        **read,
        "wide": wide,
        "agrees": found if wide else audited == set(read["matmuls"]),
        "refused": [
            *(str(each.message) for each in caught if "multiply" in str(each.message)),
            *(note for note in report.notes if "this one fits" in note),
        ],
    }


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what identifies a program."""
    return row["model"], row["recipe"], row["chip"], row["devices"]


def main() -> None:
    """Prints the table; with --out, also writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS)
    parser.add_argument("--known", action="store_true", help="compile nothing that --out lacks")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    if options.out is not None and options.out.exists():
        known = {key(row): row for row in json.loads(options.out.read_text("utf-8"))["rows"]}
    cases = itertools.product(options.chips, options.recipes, (1, 4), options.models)
    for chip, recipe, devices, model in cases:
        # The refusal of fp16 depends on the chip alone.
        if (recipe != "bf16" and devices > 1) or (recipe == "fp16" and model != options.models[0]):
            continue
        case = {"model": model, "recipe": recipe, "chip": chip, "devices": devices}
        if options.known and key(case) not in known:
            continue
        row = known[key(case)] = known.get(key(case)) or measure(**case)
        print(*row.values(), flush=True)
        rows = sorted(known.values(), key=lambda row: CHIPS.index(row["chip"]))
        write_result(options.out, rows=rows)


if __name__ == "__main__":
    main()
