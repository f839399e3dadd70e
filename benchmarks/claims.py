"""Measures common claims about mixed precision with this library.

    python benchmarks/claims.py                        # all rows
    python benchmarks/claims.py --only master_weights  # one row
    python benchmarks/claims.py --out claims.json      # also writes the figures
    python benchmarks/claims.py --page                 # writes docs/claims.md from the results

Each row is a claim, the reading under which it can be checked, and the measured figures. Rows about
numerics are run on this machine. Rows about memory are counted from shapes, or from the recorded
results of other benchmarks, which compile for a GPU. Rows about speed require a GPU; until their
benchmark has been run on one, they state its command and no figure. Requires pip install
-e ".[examples]".
"""

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


import claims_ablations
import claims_cost
import claims_precision
from claims_result import Result
from result_file import parser_of, table, write_result

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/claims_cpu.json"
PAGE = ROOT / "docs/claims.md"
COMMAND = "python benchmarks/claims.py"

# ---------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim, and the function that measures it."""

    name: str
    claim: str  # as it is often stated
    reading: str  # the form in which it can be checked
    measure: Callable[[], Result]


CLAIMS = [
    Claim(
        "formats",
        "FP16 has more precision than BF16 and less range. FP8 has two formats, for values and for "
        "gradients.",
        "Smallest and largest values, spacing at 1, and the result of a cast beyond the maximum.",
        claims_precision.formats,
    ),
    Claim(
        "power_of_two_scale",
        "A loss scale preserves the direction of the gradients.",
        "Gradients that are scaled and unscaled by a power of two have the same bits, as long as "
        "none overflows or underflows. Other factors round every gradient once more.",
        claims_precision.power_of_two_scale,
    ),
    Claim(
        "fp16_underflow",
        "More than half of the FP16 gradients underflow without a loss scale.",
        "The share depends on the model, the batch and the progress of training. Gradients of a "
        "byte-level GPT on real text: the share that FP32 does not round to zero and FP16 does. A "
        "scale of 2^-8 has the effect of 256 times more tokens in the mean loss.",
        claims_precision.fp16_underflow,
    ),
    Claim(
        "master_weights",
        "In 16 bits, 1.0 plus a small number remains 1.0.",
        "A parameter of 1.0 receives 1,000 updates of 0.0001, with and without FP32 masters.",
        claims_precision.master_weights,
    ),
    Claim(
        "fp32_baseline",
        "Mixed precision is 1.5 to 3 times as fast as FP32.",
        "There are two baselines. JAX multiplies FP32 operands in TF32 on Tensor Cores unless the "
        "program requests another precision. Comparisons of speed name the `tf32` recipe as FP32; "
        "the `fp32` recipe requests full precision, which does not use Tensor Cores.",
        claims_precision.fp32_baseline,
    ),
    Claim(
        "mixed_precision_speed",
        "Mixed precision is 1.5 to 3 times as fast as FP32.",
        "Training steps per second of GPT-2, over `tf32` and over `fp32`.",
        claims_cost.mixed_precision_speed,
    ),
    Claim(
        "fp8_speed",
        "FP8 is about twice as fast as BF16.",
        "This is the ratio of matmuls of operands that are already in FP8. A training step also "
        "quantizes, and multiplies the last layer and attention in 16 bits.",
        claims_cost.fp8_speed,
    ),
    Claim(
        "flash_memory",
        "Flash attention requires O(n) memory, and permits 4 to 8 times longer sequences.",
        "Temporary memory of causal attention with its gradients over the sequence length, one "
        "sequence of 16 heads of 128 in BF16.",
        claims_cost.flash_memory,
    ),
    Claim(
        "flash_speed",
        "Flash attention reaches up to 75 % of the peak of an H100.",
        "This is the best forward case of FlashAttention 3. The figure to compare is the rate of "
        "cuDNN's kernel, called directly on the same GPU.",
        claims_cost.flash_speed,
    ),
    Claim(
        "state_memory",
        "Mixed precision halves the memory of a model.",
        "Not that of the training state, because FP32 masters and moments remain. State of a "
        "decoder with 6.7 billion parameters under AdamW.",
        claims_cost.state_memory,
    ),
    Claim(
        "activation_memory",
        "Mixed precision halves the memory of activations.",
        "Bytes that the compiled training step of GPT-2 (124 million parameters, 8 sequences of "
        "1,024 tokens) allocates in addition to its arguments and results.",
        claims_cost.activation_memory,
    ),
    Claim(
        "grad_scaler",
        "A dynamic loss scale starts at 65536, doubles after N finite steps, and halves and skips "
        "after a NaN or infinity.",
        "The preset of torch, with N = 3, against the rule of `GradScaler.update` in plain Python; "
        "the optimizer clips to a norm of 1.",
        claims_ablations.grad_scaler,
    ),
    Claim(
        "without_fp32",
        "Softmax, norms, accumulation and attention logits must be in FP32.",
        "Each of the four in 16 bits, on inputs of a size that occurs in training, against FP64.",
        claims_ablations.without_fp32,
    ),
    Claim(
        "scale_changes",
        "A loss scale must be adjusted all the time.",
        "A GPT is trained in FP16 with static scales, and with dynamic ones that double after "
        "between 1 and 2,000 finite steps.",
        claims_ablations.scale_changes,
    ),
    Claim(
        "alignment",
        "Dimensions must be multiples of 8 for Tensor Cores.",
        "A matmul of 8,192 rows with its gradients in BF16, of widths 500, 504 and 512.",
        claims_cost.alignment,
    ),
    Claim(
        "peaks",
        "GPUs reach their published peaks.",
        "Rates of a large matmul and of training steps over the dense peak of the data sheet.",
        claims_cost.peaks,
    ),
    Claim(
        "seven_billion",
        "A model of 7 billion parameters requires 28 GB in FP32, and 14 GB in BF16.",
        "That is the size of its parameters. Training Llama 2 7B with AdamW, one sequence of 4,096 "
        "tokens and donated state, in GB.",
        claims_cost.seven_billion,
    ),
    Claim(
        "int8_training",
        "INT8 training is twice as fast as FP16.",
        "Its matmuls are. INT8 has evenly spaced values, so that small gradients become zero: the "
        "share for a byte-level GPT, with one scale per parameter array.",
        claims_ablations.int8_training,
    ),
    Claim(
        "cost",
        "Mixed precision reduces the cost of a training.",
        "The price of a billion tokens on a chip at your price of an hour.",
        claims_cost.cost,
    ),
]


def measure(names: list[str]) -> list[dict[str, Any]]:
    """Measures the rows with these names."""
    rows = []
    for claim in CLAIMS:
        if claim.name in names:
            row = {"name": claim.name, "claim": claim.claim, "reading": claim.reading}
            row |= {"command": f"{COMMAND} --only {claim.name}"}
            row |= dataclasses.asdict(claim.measure())
            rows.append(row)
            print(to_text(row), flush=True)
    return rows


# ---------------------------------------------------------------------------
# Text and page
# ---------------------------------------------------------------------------


def to_text(row: dict[str, Any]) -> str:
    """Returns a row as text for a terminal."""
    lines = [f"== {row['name']}: {row['claim']}", row["reading"], f"-> {row['finding']}"]
    lines += [table(row["columns"], row["table"])] if row["table"] else []
    return "\n".join([*lines, f"[{row['evidence']}]", ""])


INTRODUCTION = """# Claims about mixed precision, measured

This page checks statements that articles and talks about mixed precision repeat. Each section has
the statement, the reading under which it can be checked, the figures measured with jaxmp, and the
command that measures them. A statement about speed has no figure until its benchmark has been run
on a GPU.

`{command}` measures all sections, and `{command} --page` writes this page
from [the recorded figures](../benchmarks/results/{results}): {versions},
on a CPU ({machine}).
"""


def page(report: dict[str, Any]) -> str:
    """Returns the text of docs/claims.md."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    introduction = INTRODUCTION.format(
        command=COMMAND, results=RESULTS.name, versions=versions, machine=report["machine"]
    )
    sections = [_overview(report["rows"]), *map(_section, report["rows"])]
    return "\n".join([introduction, *sections])


def _overview(rows: list[dict[str, Any]]) -> str:
    links = (f"[{row['claim']}](#{row['name'].replace('_', '-')})" for row in rows)
    cells = [(link, row["finding"], row["evidence"]) for link, row in zip(links, rows, strict=True)]
    return table(("claim", "measured", "evidence"), cells) + "\n"


def _section(row: dict[str, Any]) -> str:
    lines = [f"## {_heading(row)}", "", f"> {row['claim']}", "", row["reading"], ""]
    lines += [f"**{row['finding']}** Evidence: {row['evidence']}.", ""]
    if row["table"]:
        lines += [_line(row["columns"]), _line(["---"] + ["---:"] * (len(row["columns"]) - 1))]
        lines += [*map(_line, row["table"]), ""]
    return "\n".join([*lines, "```sh", row["command"], "```", ""])


def _heading(row: dict[str, Any]) -> str:
    text = row["name"].replace("_", " ").replace("fp", "FP")
    return text[0].upper() + text[1:]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# ---------------------------------------------------------------------------
# Command
# ---------------------------------------------------------------------------


def main() -> None:
    names = [claim.name for claim in CLAIMS]
    parser = parser_of(__doc__, names)
    parser.add_argument("--page", action="store_true", help=f"write docs/{PAGE.name} and stop")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(json.loads(RESULTS.read_text("utf-8"))), "utf-8")
        return
    write_result(options.out, machine=platform.machine(), rows=measure(options.only))


if __name__ == "__main__":
    main()
