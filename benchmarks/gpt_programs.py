"""Counts memory, kernels and matmuls of a training step of GPT-2, compiled for an H200.

    python benchmarks/gpt_programs.py                           # 124M, prints the table
    python benchmarks/gpt_programs.py --out programs.json       # also writes it
    python benchmarks/gpt_programs.py --layers 4 --recipes bf16
    python benchmarks/gpt_programs.py --forms                   # all sizes, with and without a loop

The step is that of examples/gpt.py under each recipe, in Flax Linen and in Flax NNX, with donated
state. Nothing is run, and no GPU is required, but XLA's GPU compiler: pip install -e ".[aot]".
Columns:

    state      parameters, optimizer state and loss scale, in bytes
    temporary  bytes that the program allocates in addition to arguments and results, from XLA
    kernels    fused kernels, library calls and copies that one step starts; those in a loop count
               once per iteration
    accessed   bytes that these kernels read and write, without the effect of caches. If a kernel
               slices an array or updates it in place, only the accessed part counts.
    matmuls    FLOPs of matmuls by the dtypes in which the GPU multiplies
    attention  calls of cuDNN's fused attention, forward and backward
"""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import jax

import gpt
from jaxmp._core import _compat
from jaxmp._core._targets import get_target
from jaxmp._tools.audit._compile import compile_for
from jaxmp._tools.audit._hlo import Program
from jaxmp._tools.audit._hlo_kernels import accessed, kernels
from jaxmp._tools.audit._hlo_stats import read_program
from jaxmp._tools.audit._trace import trace
from result_file import parser_of, write_result

TARGET, BATCH = "h200", 8
RECIPES = ("fp32", "bf16", "bf16_params", "fp16", "fp8")
MAKERS = {"linen": gpt.make_step, "nnx": gpt.make_nnx_step}

# ---------------------------------------------------------------------------
# Counts of a step
# ---------------------------------------------------------------------------


class Counts(NamedTuple):
    """The counts of one compiled step."""

    recipe: str
    framework: str
    state: int
    temporary: int
    kernels: int
    accessed: int
    matmuls: dict[str, int]  # operand dtypes -> FLOPs
    attention: dict[str, int]  # kernel -> calls


def count(recipe: str, framework: str, model: gpt.GPT, batch_size: int) -> Counts:
    """Compiles the step of a recipe for the GPU, and returns its counts."""
    return count_step(recipe, framework, *MAKERS[framework](recipe, model, batch_size))


def count_step(recipe: str, framework: str, step: Any, *args: Any) -> Counts:
    """Compiles a step for the GPU, and returns its counts; its last argument is the batch."""
    *state, tokens = args
    chip = get_target(TARGET)
    with _compat.context(target="gpu", capability=chip.capability, chip=chip):
        traced = trace(step, (*state, tokens), {})
    compiled = compile_for(TARGET, traced)
    program = Program(compiled.text)
    unmarked = [False] * len(traced.arrays)
    rows = read_program(compiled, {}, (), unmarked, unmarked)
    matmuls, attention = Counter(), Counter()
    for row in rows.gemms:
        matmuls[f"{row.lhs} x {row.rhs}"] += row.flops
    for row in rows.attention:
        attention[row.kernel] += row.count
    run = list(kernels(program))
    return Counts(
        recipe=recipe,
        framework=framework,
        state=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        temporary=compiled.memory.temp_size_in_bytes,
        kernels=sum(one.times for one in run),
        accessed=sum(one.times * accessed(program, one) for one in run),
        matmuls=dict(matmuls),
        attention=dict(attention),
    )


FORMS = {
    f"{'unrolled' if unroll else 'loop'}{', remat' * remat}": {"unroll": unroll, "remat": remat}
    for unroll in (False, True)
    for remat in (False, True)
}


def write_forms(file: Path | None) -> None:
    """Prints and writes the counts of each size with and without a loop, and with remat."""
    rows = []
    for size, model in gpt.SIZES.items():
        for form, changes in FORMS.items() if size != "tiny" else ():
            row = count("bf16", "linen", model.clone(**changes), BATCH)
            rows.append({"size": size, "form": form, **row._asdict()})
            figures = f"{row.state:18,}{row.temporary:18,}{row.kernels:9,}{row.accessed:20,}"
            print(f"{size:14}{form:18}{figures}", flush=True)
            target = f"{get_target(TARGET).kind} (compiled, nothing was run)"
            write_result(file, target=target, batch=[BATCH, model.max_length], rows=rows)


def main() -> None:
    """Prints the table; with --out, also writes it as JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--remat", action="store_true", help="recompute each block")
    parser.add_argument("--unroll", action="store_true", help="layers without a loop")
    parser.add_argument("--forms", action="store_true", help="bf16 of all sizes in Linen")
    options = parser.parse_args()
    if options.forms:
        return write_forms(options.out)
    changes = {"remat": options.remat, "unroll": options.unroll, "layers": options.layers}
    model = gpt.SIZES["gpt2"].clone(**changes)
    print(f"{model.layers} layers, batch {BATCH} x {model.max_length}, {TARGET}")
    print(
        f"{'':20}{'state':>16}{'temporary':>16}{'kernels':>9}{'accessed':>18}  matmuls, attention"
    )
    rows = []
    for recipe in options.recipes:
        for framework in MAKERS:
            row = count(recipe, framework, model, BATCH)
            rows.append(row._asdict())
            print(
                f"{recipe:12}{framework:8}{row.state:16,}{row.temporary:16,}{row.kernels:9,}"
                f"{row.accessed:18,}  {row.matmuls} {row.attention}",
                flush=True,
            )
    names = ("layers", "width", "heads", "remat", "unroll")
    write_result(
        options.out,
        target=f"{get_target(TARGET).kind} (compiled, nothing was run)",
        model={name: getattr(model, name) for name in names},
        batch=[BATCH, model.max_length],
        rows=rows,
    )


if __name__ == "__main__":
    main()
