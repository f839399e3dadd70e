"""Rows of `claims.py` about memory and speed, from shapes and recorded results."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gpt
import jaxmp
import llama
from claims_result import NOT_MEASURED, Result
from gpu_record import archived
from jaxmp._core._targets import find_target

RESULTS = Path(__file__).parent / "results"
GB, MIB = 1e9, 2**20


def recorded(pattern: str) -> list[dict[str, Any]]:
    """Returns the recorded results whose file name matches a pattern."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob(pattern))]


def measured(pattern: str, archived_as: str) -> list[dict[str, Any]]:
    """Returns the results of GPUs, of single benchmarks and in the archives of run_gpu.py.

    Results of different devices, or of different versions, stay apart.
    """
    return [*recorded(pattern), *archived(RESULTS / "gpu", archived_as)]


def evidence_of(report: dict[str, Any]) -> str:
    """Returns the target of a recorded result, and the command that measured it."""
    return f"{report['target']}; `{report['command']}`"


# ---------------------------------------------------------------------------
# Training state
# ---------------------------------------------------------------------------

LAYERS, WIDTH, HIDDEN, VOCABULARY = 32, 4096, 11008, 32000  # Llama 7B (arXiv:2302.13971)
RECIPES = ("fp32", "bf16", "fp16", "fp8", "bf16_params", "fp16_params")


def decoder_shapes(
    layers: int = LAYERS, width: int = WIDTH, hidden: int = HIDDEN, vocabulary: int = VOCABULARY
) -> dict[str, Any]:
    """Returns the parameters of a Llama-shaped decoder as shapes, FP32."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    square, wide = array(layers, width, width), array(layers, width, hidden)
    blocks = {name: {"kernel": square} for name in ("query", "key", "value", "out")}
    blocks |= {"gate": {"kernel": wide}, "up": {"kernel": wide}}
    blocks |= {"down": {"kernel": array(layers, hidden, width)}}
    blocks |= {name: {"scale": array(layers, width)} for name in ("attention_norm", "mlp_norm")}
    return {
        "token_embedding": {"embedding": array(vocabulary, width)},
        "blocks": blocks,
        "final_norm": {"scale": array(width)},
        "lm_head": {"kernel": array(width, vocabulary)},
    }


def state_bytes(recipe: jaxmp.Recipe, params: Any) -> dict[str, int]:
    """Returns the bytes of each part of the training state, without allocating it."""
    tx = recipe.optimizer(optax.adamw(1e-3))
    create = lambda params: jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
    state = jax.eval_shape(create, params)
    loss_fn = lambda params: sum(jnp.sum(p.astype(jnp.float32)) for p in jax.tree.leaves(params))
    _, grads = jax.eval_shape(lambda state: state.value_and_grad(loss_fn)(), state)
    parts = {"parameters": nbytes(state.params)}
    moments = sum(nbytes(optax.tree.get(state.opt_state, name)) for name in ("mu", "nu"))
    other = nbytes(state.opt_state) - moments
    # All of the remaining optimizer state but a few scalars belongs to the masters.
    return parts | {"masters": other, "moments": moments, "gradients": nbytes(grads)}


def nbytes(tree: Any) -> int:
    """Returns the bytes of all arrays or shapes of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def state_memory() -> Result:
    """Tabulates the training state of a 6.7-billion-parameter model under each recipe."""
    params = decoder_shapes()
    count = nbytes(params) // 4
    recipes = {name: jaxmp.load_recipe(name) for name in RECIPES}
    recipes["bf16_params, packed"] = recipes["bf16_params"].replace(master="packed")
    recipes["bf16_params, no masters"] = recipes["bf16_params"].replace(master="none")
    table, totals = [], {}
    for name, recipe in recipes.items():
        sizes = state_bytes(recipe, params)
        totals[name] = sum(sizes.values())
        ratio = totals[name] / totals["fp32"]
        cells = [f"{size / GB:.1f}" for size in (*sizes.values(), totals[name])]
        table.append([name, *cells, f"{totals[name] / count:.1f}", f"{ratio:.3f}"])
    columns = ["recipe", "parameters", "masters", "moments", "gradients", "total GB"]
    columns += ["bytes per parameter", "of fp32"]
    finding = (
        f"{count / 1e9:.2f} billion parameters: {totals['fp32'] / GB:.0f} GB under `fp32` and "
        f"`bf16`, {totals['bf16_params'] / GB:.0f} GB under `bf16_params`, "
        f"{totals['bf16_params, packed'] / GB:.0f} GB with packed masters."
    )
    return Result(finding, "shapes of the train state and the gradients", columns, table)


KINDS = ("parameters", "masters", "moments", "temporary")
SEVEN_BILLION = llama.Shape(32, 4096, 32, 32, 11008, 32000, 4096, rope_base=10000.0)


def seven_billion(shape: llama.Shape = SEVEN_BILLION) -> Result:
    """Compiles the training step of Llama 2 7B for an H200, with one sequence of 4,096 tokens."""
    table, totals, compilers = [], {}, set()
    for recipe in ("fp32", "bf16", "bf16_params", "fp8"):
        for remat in ("none", "full"):
            made = llama.make_step(recipe, dataclasses.replace(shape, remat=remat), 1)
            estimate = jaxmp.estimate_memory(*made, target="h200")
            sizes = [*(estimate.kinds.get(kind, 0) for kind in KINDS), estimate.total]
            totals[recipe, remat] = f"{estimate.total / GB:.1f}"
            compilers.add(estimate.compiler)
            table.append([f"`{recipe}`", remat, *(f"{size / GB:.1f}" for size in sizes)])
    finding = (
        f"The total is {totals['fp32', 'none']} GB under `fp32`, {totals['bf16', 'none']} GB "
        f"under `bf16` and {totals['bf16', 'full']} GB with remat: FP32 parameters or masters and "
        "moments remain under every recipe."
    )
    columns = ["recipe", "remat", *KINDS, "total"]
    evidence = "estimated from the traced step, nothing was run"
    if all(compilers):
        evidence = f"compiled for an H200 by {', '.join(compilers)}, nothing was run"
    return Result(finding, evidence, columns, table)


# ---------------------------------------------------------------------------
# Memory of compiled programs
# ---------------------------------------------------------------------------


def alignment() -> Result:
    """Reads the programs of matmuls of aligned and misaligned widths."""
    table, evidence = [], []
    for report in recorded("alignment_*.json"):
        evidence.append(evidence_of(report))
        for row in report["rows"]:
            sizes = (f"{row[name] / 1e6:,.1f}" for name in ("accessed", "temporary"))
            time = f"{row['milliseconds']:.3f}" if "milliseconds" in row else "not measured here"
            table.append([f"{row['width']}", f"{row['kernels']}", *sizes, time])
    rows = {row[0]: row for row in table}
    finding = (
        f"For a width of 500, XLA pads the operands of each matmul: {rows['500'][1]} kernels that "
        f"move {rows['500'][2]} MB, instead of {rows['512'][1]} that move {rows['512'][2]} MB for "
        "512. A multiple of 8 suffices: 504 is not padded."
    )
    columns = ["width", "kernels", "MB moved", "temporary, MB", "ms"]
    return Result(finding, "; ".join(evidence), columns, table)


def activation_memory() -> Result:
    """Reads the temporary memory of training steps compiled for a GPU."""
    (report,) = recorded("gpt_programs_h200.json")
    rows = {row["recipe"]: row for row in report["rows"] if row["framework"] == "linen"}
    plain = rows["fp32"]["temporary"]
    table = [
        [name, *(f"{size:.2f}" for size in (row["state"] / GB, row["temporary"] / GB, share))]
        for name, row in rows.items()
        for share in [row["temporary"] / plain]
    ]
    shares = {name: row["temporary"] / plain for name, row in rows.items()}
    finding = (
        f"`bf16` uses {shares['bf16']:.0%} of the temporary memory of `fp32`, and `bf16_params` "
        f"{shares['bf16_params']:.0%}."
    )
    columns = ["recipe", "state, GB", "temporary, GB", "of fp32"]
    return Result(finding, evidence_of(report), columns, table)


def flash_memory() -> Result:
    """Reads the temporary memory of attention compiled for a GPU, over the sequence length."""
    (report,) = recorded("attention_memory_h200_compiled.json")
    temporary: dict[str, dict[int, int]] = {}
    for row in report["rows"]:
        if row["layout"] == "single":
            temporary.setdefault(row["implementation"], {})[row["length"]] = row["temp_bytes"]
    flash, plain = temporary["auto"], temporary["xla"]
    longer = [
        max(other for other, size in flash.items() if size <= plain[length]) / length
        for length in plain
        if plain[length] <= flash[max(flash)]  # both lengths were measured
    ]
    table = [
        [f"{number:,.0f}" for number in (length, fused / MIB, other / MIB, other / fused)]
        for length, fused, other in zip(flash, flash.values(), plain.values(), strict=True)
    ]
    ends = min(flash), max(flash)
    growth, growth_of_plain = (sizes[ends[1]] / sizes[ends[0]] for sizes in (flash, plain))
    finding = (
        f"From {ends[0]:,} to {ends[1]:,} positions, the memory of cuDNN's kernel grows "
        f"{growth:.0f} times and that of the unfused form {growth_of_plain:.0f} times. In the "
        f"memory of the unfused form, it reads {min(longer):.0f} times longer "
        "sequences, counting attention alone."
    )
    columns = ["length", "cuDNN, MiB", "unfused, MiB", "ratio"]
    return Result(finding, evidence_of(report), columns, table)


# ---------------------------------------------------------------------------
# Speed, measured on a GPU
# ---------------------------------------------------------------------------


def not_measured(*command: str) -> Result:
    """Returns a row without a figure, which names the command for it."""
    return Result(f"Not measured here. On a GPU: `{shlex.join(command)}`.", NOT_MEASURED)


def measured_on(report: dict[str, Any]) -> str:
    """Returns the GPU, date and command of a recorded result."""
    command = report.get("command", "python benchmarks/run_gpu.py").partition(" --out ")[0]
    date = report.get("date") or environment_of(report)["date"][:10]
    return f"{device_of(report)}, {date}; `{command}`"


def environment_of(report: dict[str, Any]) -> dict[str, Any]:
    """Returns the environment of a report, or that of the last run of its rounds."""
    return report["runs"][-1]["environment"] if "runs" in report else report["environment"]


def device_of(report: dict[str, Any]) -> str:
    if "hardware" in report:
        return report["hardware"]["device"]
    return environment_of(report)["device"]


def speeds_of(report: dict[str, Any]) -> dict[str, float]:
    """Returns recipe -> tokens per second in a result of gpu_smoke.py or of train_step.py."""
    if "results" in report:
        return {row["recipe"]: row["tokens_per_second"]["median"] for row in report["results"]}
    return {
        arm.removeprefix("jaxmp-"): row["tokens_per_second"]
        for arm, row in report["summary"].items()
        if arm.startswith("jaxmp-") and "tokens_per_second" in row
    }


def mixed_precision_speed() -> Result:
    """Reads the throughput of training GPT-2 under each recipe, on each GPU."""
    reports = measured("gpu_smoke-*.json", "recipes.json")
    reports += archived(RESULTS / "gpu", "step_*.json")
    # An interrupted run has not measured the baselines yet.
    reports = [one for one in reports if {"bf16", "tf32", "fp32"} <= speeds_of(one).keys()]
    if not reports:
        return not_measured("python", "benchmarks/gpu_smoke.py")
    findings, table = [], []
    for report in reports:
        speed = speeds_of(report)
        table += [
            [device_of(report), name, f"{value:,.0f}"]
            + [f"{value / speed[base]:.2f}" for base in ("tf32", "fp32")]
            for name, value in speed.items()
        ]
        findings.append(
            f"On {device_of(report)}, `bf16` trains {speed['bf16'] / speed['tf32']:.2f} times as "
            f"fast as `tf32` and {speed['bf16'] / speed['fp32']:.2f} times as fast as `fp32`."
        )
    columns = ["GPU", "recipe", "tokens per second", "over tf32", "over fp32"]
    evidence = "; ".join(dict.fromkeys(map(measured_on, reports)))
    return Result(" ".join(findings), evidence, columns, table)


def fp8_speed() -> Result:
    """Reads the time of training steps in FP8 relative to BF16, on each GPU."""
    command = {"command": "python benchmarks/fp8_step.py"}
    reports = [report | command for report in recorded("fp8_step-*.json")]
    reports += archived(RESULTS / "gpu", "step_*.json")
    table = [
        [device_of(report), report["workload"], arm, f"{row['rate_over_jaxmp-bf16']:.2f}"]
        for report in reports
        for arm, row in report["summary"].items()
        if arm.startswith("jaxmp-fp8") and "rate_over_jaxmp-bf16" in row
    ]
    if not table:
        return not_measured("python", "benchmarks/fp8_step.py")
    best = max(table, key=lambda row: float(row[-1]))
    finding = f"The fastest FP8 training step is {best[-1]} times as fast as BF16, on {best[0]}."
    evidence = "; ".join(dict.fromkeys(map(measured_on, reports)))
    return Result(finding, evidence, ["GPU", "model", "FP8", "steps per second over BF16"], table)


def flash_speed() -> Result:
    """Reads the rate of attention relative to a direct call of cuDNN, on each GPU."""
    reports = measured("attention_gpu-*.json", "attention.json")
    table, findings = [], []
    for report in reports:
        rows = [row for row in report["speed"] if "ratio" in row]
        if not rows:  # interrupted before its first speed
            continue
        table += [
            [device_of(report), row["pass"], "causal" if row["causal"] else "full"]
            + ["{} queries, {} keys of {}".format(*row["heads"]), f"{row['length']:,}"]
            + [f"{row[name]['median']:,.2f}" for name in ("jaxmp_tflops", "direct_tflops", "ratio")]
            for row in rows
        ]
        least = min(row["ratio"]["median"] for row in rows)
        findings.append(
            f"On {device_of(report)}, at least {least:.2f} times the rate of cuDNN called directly."
        )
    if not table:
        return not_measured("python", "benchmarks/attention_gpu.py")
    columns = ["GPU", "pass", "mask", "heads", "length", "TFLOP/s", "cuDNN directly", "ratio"]
    return Result(" ".join(findings), "; ".join(map(measured_on, reports)), columns, table)


def peaks() -> Result:
    """Reads the rates of matmuls, attention and training steps, over the published peak."""
    table, evidence = [], []
    for report in archived(RESULTS / "gpu", "ceilings.json"):
        evidence.append(f"{environment_of(report)['device']}; `python benchmarks/ceilings.py`")
        for name, kind in (("bf16", "bfloat16"), ("fp8", "float8_e4m3fn")):
            rate = report[f"{name}_tflops"]["median"]
            table.append(peak_row(report, f"matmul of width {report['size']:,}", name, rate, kind))
    for report in archived(RESULTS / "gpu", "step_*.json"):
        evidence.append(f"{device_of(report)}; `python benchmarks/run_gpu.py`")
        for arm, row in report["summary"].items():
            # The peak of a step with matmuls in several formats is between several peaks.
            if "tflops" in row and not re.search("fp8|tf32|fp32", arm):
                name = f"step of {report['workload']}, {arm}"
                table.append(peak_row(report, name, "bf16", row["tflops"], "bfloat16"))
    if not table:
        return not_measured("python", "benchmarks/ceilings.py")
    steps = [row for row in table if row[1].startswith("step") and "jaxmp-bf16" in row[1]]
    matmul = next(row for row in table if row[1].startswith("matmul"))
    low, high = (pick(steps, key=lambda row: float(row[-1][:-1])) for pick in (min, max))
    finding = (
        f"A large matmul in {matmul[2]} reaches {matmul[-1]} of the published peak, and training "
        f"steps of jaxmp {low[-1]} to {high[-1]}."
    )
    columns = ["GPU", "program", "format", "TFLOP/s", "published peak", "share"]
    return Result(finding, "; ".join(dict.fromkeys(evidence)), columns, table)


def peak_row(report: dict[str, Any], program: str, name: str, rate: float, kind: str) -> list[str]:
    """Returns a rate beside the dense peak of its GPU."""
    chip = find_target(device_of(report))
    assert chip is not None
    peak = chip.peak[kind] / 1e12
    return [device_of(report), program, name, f"{rate:.0f}", f"{peak:.0f}", f"{rate / peak:.0%}"]


PRICE = 2.10
PRICED = ("fp32", "tf32", "bf16", "fp8")


def cost(recipes: tuple[str, ...] = PRICED) -> Result:
    """Prices a billion tokens of GPT-2 on an H100 that is not present."""
    command = f"jaxmp plan examples/gpt.py:make_step --recipes {','.join(recipes)}"
    command += f" --targets h100 --price h100={PRICE:.2f}"
    options = {"targets": ["h100"], "prices": {"h100": PRICE}, "cache": None, "progress": False}
    try:
        report = jaxmp.plan(gpt.make_step, recipes=list(recipes), **options)
    except jaxmp.errors.MissingDependencyError:
        finding = f"Not measured here. With the extra `aot`: `{command}`."
        return Result(finding, NOT_MEASURED)
    costs = {row.recipe: row.cost for row in report.rows if row.cost is not None}
    table = [[f"`{recipe}`", f"{value:.2f}"] for recipe, value in costs.items()]
    finding = (
        f"GPT-2 124M on an H100 at {PRICE:.2f} per hour: {costs['bf16']:.2f} or more for a billion "
        f"tokens in `bf16`, and {costs['fp32']:.2f} in `fp32`, from bounds of the compiled steps."
    )
    compiler = f"compiled by jaxlib {jax.lib.__version__}, nothing was run"
    return Result(finding, f"{compiler}; `{command}`", ["recipe", "price"], table)
