"""Writes docs/benchmarks.md from the files in benchmarks/results/.

python benchmarks/tables.py
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpu_record import archived, label_of
from workload_sizes import WORKLOADS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"

INTRODUCTION = """# Benchmarks

`python benchmarks/tables.py` writes this page from the files in `benchmarks/results/`. `make bench`
repeats the measurements that require only a CPU.
"""

PROGRAM = """
## Compiled steps over hand-written ones

`python benchmarks/program.py` compiles the training steps of `examples/gpt.py` and
`examples/llama.py`, and hand-written steps of the same models (`benchmarks/by_hand.py`), for an
H200 that is not present. Nothing is run. *Bytes* are those that all kernels read and write, without
the effect of caches. The hand-written steps clip by the global norm and skip non-finite gradients,
as the recipe does.
"""

ARCHITECTURES = """
Seven models of `benchmarks/architectures.py`, each over the same model with `dtype=bfloat16`, the
same clipping and the same attention. *Apart*: with gradients of kernels and embeddings, and with
logits, that are rounded to bfloat16, as by hand; beside it the gigabytes that FP32 takes there. The
gradients of experts are an exception: XLA transposes them if they are in bfloat16, and not as jaxmp
computes them. ResNet is compared with a hand-written step whose BatchNorm gets FP32, as that of a
recipe: the two parts of the gradient of its input are then added before they are rounded.

"""

OVERHEAD = """
## What a recipe adds on a CPU

`python benchmarks/overhead.py` compares steps in bfloat16 with a dynamic loss scale with a
hand-written step without one, for a byte-level GPT with 12 layers of width 256. All columns are
ratios. qwix has no loss scale; its step is the hand-written one, interpreted by qwix with a rule
that matches nothing.

The recipe computes weight gradients with FP32 results; the other steps round them to bfloat16. For
a CPU, which has no such matmuls of bfloat16, it converts the operands to FP32: these are the bytes.
"""

GPU = """
## Times on a GPU

Each table has the training steps of one workload, measured by `python benchmarks/run_gpu.py`. Times
are medians of rounds in which all programs run in turn; a ratio is the median of the ratios of the
rounds, with their range. The programs of PyTorch (`torch.compile`, autocast to bfloat16, fused
AdamW; `torch-cudnn` has cuDNN's attention) ran in a process of their own on the same machine. Their
logits are in bfloat16, and they do not check gradients for non-finite values; the logits of the
other programs are in FP32, unless their names end in a dtype (`jaxmp-bf16-bfloat16`). `hand` is
written by hand in JAX, with cuDNN's attention. Tables of different versions come from different
machines with such a GPU, whose speed differs by several percent: compare the programs of one table.

The programs of JAX ran with `XLA_FLAGS=--xla_gpu_enable_triton_gemm=false`, with which cuBLAS adds
biases and computes GELUs while it writes the results of matmuls.
"""

HOW = """
### Measure them

One command measures them on one GPU with 141 GB, such as an H200:

```sh
pip install -e ".[examples,cuda13]"                # optional: pip install torch torchao qwix
python benchmarks/run_gpu.py --minutes 150         # everything
python benchmarks/tables.py                        # writes this page
```

A GPU that is available for a few minutes at a time measures the same in several calls:

```sh
export JAXMP_GPU_OUT=results                       # default: benchmarks/results/gpu
python benchmarks/run_gpu.py                       # ten minutes; --only w1 selects jobs by name
python benchmarks/run_gpu.py --list                # the jobs, their minutes, and how they ended
python benchmarks/run_gpu.py --continue-from results/gpu_results.tar.gz --out more
```

- All results and logs are in one archive, `gpu_results.tar.gz` in the directory of the results. It
  is complete at any time: a call that is killed loses at most ten seconds. On a fresh machine,
  `--continue-from` continues the archive of an earlier call.
- The first call, of eight minutes, shows which kernels take the time of a GPT-2 step, which form of
  the loss is the fastest, the step beside PyTorch's, and bf16 beside TF32 and FP32. The second
  compares FP8 with bf16.
- The archive contains the kernels that XLA chose by timing them, so that a later call on the same
  kind of GPU and version of JAX compiles faster.
- A job that was interrupted runs again in the next call and keeps its results; one that failed, or
  took more than 1.3 times its minutes, runs again after all others. The archive has its output.
- Libraries that are not installed (PyTorch, torchao, qwix, Transformer Engine) are skipped, and
  their jobs run in the first call in which they are installed.
- Each result contains clocks, power and temperature of the GPU, its driver and the versions.
  Results of different devices or different versions, also of jaxmp, are kept in different
  directories of the archive and never pooled. `JAXMP_GPU_DEVICE` replaces the name of the device.
- `python benchmarks/run_gpu.py --toy --out DIRECTORY` rehearses everything on a CPU at small sizes.
- `benchmarks/train_step.py` describes workloads and programs; `benchmarks/peer_steps.py` and
  `benchmarks/torch_step.py` contain those of other libraries.
"""

# Comparison, aim, and how the archive is read: workloads, program, and the program whose
# milliseconds are divided by those of the first; "" for TFLOP/s.
AIMS = (
    ("bf16 over the hand-written step", "at least 0.99", "w1 w5", "jaxmp-bf16", "hand"),
    ("PyTorch over bf16", "at most 1.05", "w1", "torch-cudnn", "jaxmp-bf16"),
    ("PyTorch over bf16 with bf16 logits", "at most 1", "w1", "torch-cudnn", "jaxmp-bf16-bfloat16"),
    ("PyTorch over bf16, all logits stored", "at most 1", "w1", "torch-cudnn", "jaxmp-bf16-stored"),
    ("bf16 over TF32", "at least 1.5", "w1s", "jaxmp-bf16", "jaxmp-tf32"),
    ("bf16 over FP32", "at least 3", "w1s", "jaxmp-bf16", "jaxmp-fp32"),
    ("FP8 over bf16, Llama 3 8B", "at least 1.28", "w5", "jaxmp-fp8", "jaxmp-bf16"),
    ("FP8 over bf16, GPT-2 1.5B", "at least 1.30", "w2", "jaxmp-fp8", "jaxmp-bf16"),
    ("bf16 step of GPT-2 1.5B, TFLOP/s", "at least 600", "w2", "jaxmp-bf16", ""),
)
OTHER_AIMS = """
The optimizer's time over its byte limit (at most 1.05, job `optimizer`) and the longest sequence
with fused over plain attention (at least 16 times, job `longest sequence`) were not measured yet.
[Attention](measurements.md#attention) has the rates of attention.
"""


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a table in Markdown, with numbers aligned to the right."""
    names = list(header)
    lines = [f"| {' | '.join(names)} |", f"|{'---|' + '---:|' * (len(names) - 1)}"]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def read(name: str) -> dict[str, Any] | None:
    """Returns a report; None if it was not measured."""
    file = RESULTS / name
    return json.loads(file.read_text("utf-8")) if file.exists() else None


def program_section(report: dict[str, Any]) -> str:
    """Returns the tables of program.py."""
    values: dict[tuple[str, str], dict[str, Any]] = {}
    for check in report["checks"]:
        values.setdefault((check["section"], check["program"]), {})[check["quantity"]] = check
    cell = lambda row, name: row[name]["value"]
    steps, fp8, models, optimizer = [], [], [], []
    for (section, name), row in values.items():
        if section in ("gpt", "llama"):
            model = "GPT-2 124M" if section == "gpt" else "Llama 1B widths, 4 layers"
            figures = (
                f"{cell(row, 'bytes') / 1e9:.2f} GB",
                f"{cell(row, 'bytes / hand'):.4f}",
                f"{cell(row, 'kernels'):,}",
                f"{cell(row, 'kernels / hand'):.3f}",
                f"{cell(row, 'temporary memory / hand'):.3f}",
            )
            steps.append((f"{model}, {name}", *figures))
        elif section == "fp8":
            figures = ("FLOPs in FP8", "bytes / bf16", "kernels / bf16")
            fp8.append((f"`{name}`", *(f"{cell(row, figure):.3f}" for figure in figures)))
        elif section == "architectures":
            reference = next(key.partition(" / ")[2] for key in row if key.startswith("bytes / "))
            figures = (
                f"{cell(row, 'bytes') / 1e9:.2f} GB",
                f"{cell(row, 'bytes of everything / hand'):.3f}",
                f"{cell(row, f'bytes / {reference}'):.3f}",
                f"{cell(row, f'kernels / {reference}'):.3f}",
                f"{cell(row, 'bytes of FP32 gradients') / 1e9:.2f}",
                f"{cell(row, 'bytes of FP32 logits') / 1e9:.2f}",
            )
            models.append((name, *figures))
        else:
            bound = row["bytes"]
            optimizer.append((name, f"{bound['value']:.2f}", f"{bound['limit'] - 0.02:.0f}"))
    parts = [PROGRAM, f"\nJAX {report['versions']['jax']}, bf16 recipe:\n"]
    header = ("step", "bytes", "over hand", "kernels", "over hand", "temporary memory over hand")
    parts.append("\n" + table(header, steps))
    parts.append("\nThe Llama step in FP8:\n\n")
    parts.append(table(("recipe", "FLOPs in FP8", "bytes over bf16", "kernels over bf16"), fp8))
    if models:
        header = ("model", "bytes", "over hand", "apart", "kernels apart", "gradients", "logits")
        parts += [ARCHITECTURES, table(header, models)]
    parts.append("\nBytes per parameter of AdamW, and the least that the layout allows:\n\n")
    parts.append(table(("layout", "bytes", "least"), optimizer))
    return "".join(parts)


def overhead_section(report: dict[str, Any]) -> str:
    """Returns the table of overhead.py."""
    keys = ("stablehlo_ops", "hlo_ops", "flops", "bytes", "temp_bytes", "step_time")
    names = ("traced ops", "compiled ops", "FLOPs", "bytes", "temporary memory", "time")
    if not any("step_time" in row for row in report["rows"].values()):  # --pairs 0
        keys, names = keys[:-1], names[:-1]
    rows = []
    for name, row in report["rows"].items():
        if "skipped" in row:
            rows.append((name, row["skipped"], *[""] * (len(keys) - 1)))
        else:
            rows.append((name, *(f"{row[key]:.3f}" if key in row else "" for key in keys)))
    head = f"{OVERHEAD}\nJAX {report['versions']['jax']}:\n\n"
    return head + table(("step", *names), rows)


def gpu_section() -> str:
    """Returns the tables of the training steps and optimizers that were timed, for each GPU."""
    parts = [GPU]
    for report in archived(RESULTS / "gpu", "step_*.json"):
        rows = []
        for arm, row in report["summary"].items():
            if "milliseconds" not in row:
                reason = ", ".join(f"{name}: {text}" for name, text in row.items())
                rows.append((arm, reason, "", "", "", ""))
                continue
            low, high = row["range"]
            times = f"{row['milliseconds']:.1f}", f"{low:.1f} to {high:.1f}"
            rows.append((arm, *times, f"{row['tokens_per_second']:,}"))
            for other in ("hand", "jaxmp-bf16"):
                ratio, bounds = row.get(f"rate_over_{other}", ""), row.get(f"range_over_{other}")
                spread = " ({:.3f} to {:.3f})".format(*bounds) if bounds and arm != other else ""
                rows[-1] += (f"{ratio:.3f}{spread}" if ratio else "",)
        header = ("program", "ms", "range", "tokens/s", "speed over hand-written")
        size = WORKLOADS[report["workload"]]
        tokens = f"{size.batch} x {size.length:,} tokens"
        device = label_of(report["runs"][-1]["environment"])
        title = f"{report['workload']}: {size.size}, {size.layers} layers, {tokens}, on {device}"
        parts.append(f"\n{title}:\n\n{table((*header, 'speed over bf16'), rows)}")
    parts += [profile_table(report) for report in archived(RESULTS / "gpu", "profile_*.json")]
    parts += [loss_table(report) for report in archived(RESULTS / "gpu", "loss.json")]
    for report in archived(RESULTS / "gpu", "optimizer.json"):
        for model in report["models"]:
            rows = [
                [row["program"], row["bytes"], row.get("milliseconds", row.get("failed"))]
                + [row.get(ratio, "") for ratio in ("over_limit", "over_hand")]
                for row in model["rows"]
            ]
            header = ("optimizer step", "bytes", "ms", "over byte limit", "over hand-written")
            title = f"{model['model']} on {label_of(report['environment'])}"
            parts.append(f"\n{title}:\n\n{table(header, rows)}")
    return "".join([*parts, "\nAims, and what was measured:\n\n", aims(), OTHER_AIMS, HOW])


def profile_table(report: dict[str, Any]) -> str:
    """Returns the table of step_profile.py."""
    parts = []
    for name, program in report["programs"].items():
        rows = [
            (part, f"{row['kernels']:,}", f"{row['milliseconds']:.1f}")
            for part, row in program.get("classes", {}).items()
        ]
        total = program.get("milliseconds_of_kernels", 0)
        rows.append(("sum", f"{sum(row['calls'] for row in program['kernels']):,}", f"{total:.1f}"))
        title = f"Kernels of one step of {name}, {report['workload']}, on "
        title += (
            f"{label_of(report['environment'])} (`python benchmarks/step_profile.py`). Without "
        )
        title += (
            f"the profiler, which slows it down, the step takes {program['milliseconds']:.1f} ms"
        )
        parts.append(f"\n{title}:\n\n{table(('class', 'kernels', 'ms'), rows)}")
    return "".join(parts)


def loss_table(report: dict[str, Any]) -> str:
    """Returns the table of loss_time.py."""
    rows = [
        (f"{row['workload']}: {way}", f"{time:.1f}", f"{1e3 * row['tokens'] / time:,.0f}")
        for row in report["rows"]
        for way, time in row["milliseconds"].items()
    ]
    title = f"Last layer and loss, forward and backward, on {label_of(report['environment'])} "
    title += (
        "(`python benchmarks/loss_time.py`). *Two passes*: the maximum of the logits, then the "
    )
    title += "sum of exponentials"
    return f"\n{title}:\n\n{table(('shape and logits', 'ms', 'tokens/s'), rows)}"


def aims() -> str:
    """Returns the table of what was aimed at and what was measured."""
    reports = archived(RESULTS / "gpu", "step_*.json")
    reports.sort(key=lambda report: report["runs"][-1]["environment"]["date"])
    rows = []
    for comparison, aim, workloads, arm, base in AIMS:
        found = {}  # the last measurement of each workload
        for report in reports:
            summary, name = report["summary"], report["workload"]
            timed = [summary.get(arm, {}), summary.get(base or arm, {})]
            if name in workloads.split() and all("milliseconds" in row for row in timed):
                ratio = timed[1]["milliseconds"] / timed[0]["milliseconds"]
                found[name] = f"{name}: {ratio if base else timed[0]['tflops']:.4g}"
        rows.append((comparison, aim, ", ".join(found.values()) or "not measured yet"))
    return table(("comparison", "aim", "measured"), rows)


def page() -> str:
    """Returns the page."""
    parts = [INTRODUCTION]
    program, overhead = read("program_h200.json"), read("overhead_cpu.json")
    if program:
        parts.append(program_section(program))
    if overhead:
        parts.append(overhead_section(overhead))
    return "".join([*parts, gpu_section()])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
