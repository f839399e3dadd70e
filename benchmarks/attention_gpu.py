"""Measures attention on one NVIDIA GPU: speed relative to cuDNN, accuracy, and masks that caused
NaN.

    python benchmarks/attention_gpu.py
    python benchmarks/attention_gpu.py --longest 8192 --rounds 5
    python benchmarks/attention_gpu.py --toy     # small run on any machine, writes nothing

Requires pip install -e ".[examples,cuda13]" (or cuda12). Writes each row to
benchmarks/results/attention_gpu-DEVICE.json as soon as it is measured; a later run with --out adds
the rows that the file does not contain or that failed.

- numbers: results and gradients in bfloat16 against FP32. At most twice the errors of bfloat16
  attention that stores all logits and computes its softmax in FP32 are allowed, or two roundings of
  the largest entry to bfloat16, because the kernel rounds in another order.
- masks: gradients under a bool mask where T % 128 == 64 (pytorch issue 196678 has NaN there),
  from jaxmp and from `jax.nn.dot_product_attention(implementation="cudnn")`.
- speed: `jaxmp.dot_product_attention` and a direct call of that function, alternating on the same
  arrays: median, minimum and maximum of TFLOP/s over the rounds, and the ratio in each round.

A forward pass counts as 4 B N T T H operations, a backward pass as 2.5 times as many, and causal
attention as half. The exit status is 1 if an error is too large, a gradient is not finite, jaxmp
does not use the kernel of cuDNN, or a row failed.
"""

import dataclasses
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

import jaxmp
from gpu_record import earlier_report, failure, gpu_state, write_json
from gpu_smoke import describe_hardware, file_for, header, spread

BF16, FP32 = jnp.bfloat16, jnp.float32
# Operations of forward and backward pass over those of the forward pass.
PASSES = {"forward": 1.0, "forward+backward": 3.5}
TWO_ROUNDINGS = 2 * 2.0**-8


@dataclasses.dataclass(frozen=True)
class Size:
    """Shapes and lengths to measure."""

    # (query heads, key heads, size of a head)
    heads: tuple[tuple[int, int, int], ...] = ((64, 8, 128), (16, 16, 64))
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)
    tokens: int = 32768  # of a batch
    small: int = 512  # length at which numbers are compared
    masked: tuple[int, ...] = (64, 192, 320, 576, 1088, 2112)  # each is a multiple of 128 plus 64
    rounds: int = 9
    seconds: float = 0.1  # approximate duration of a round
    matmul: int = 8192


TOY = Size(((4, 2, 16),), (64,), 128, 64, (64,), 2, 0.005, 128)


def main(
    longest: Annotated[int | None, typer.Option(help="Omit longer lengths.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each speed.")] = None,
    toy: Annotated[bool, typer.Option("--toy", help="Small sizes; runs on any machine.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Measures attention on one NVIDIA GPU: speed relative to cuDNN, accuracy, and masks."""
    hardware = describe_hardware()
    size = TOY if toy else Size()
    lengths = tuple(length for length in size.lengths if longest is None or length <= longest)
    size = dataclasses.replace(size, lengths=lengths, rounds=rounds or size.rounds)
    continued, out = out, file_for(hardware, toy, out)
    # The expected implementation, and that of jax.nn for the comparison.
    kernel = "cudnn" if hardware["platform"] == "gpu" else "xla"
    # A small run on another machine compares "xla" with another implementation.
    implementation = "auto" if kernel == "cudnn" else "blockwise"
    report = {**header(hardware, size), "matmul_tflops": matmul_tflops(size)}
    sections = {
        "numbers": numbers(size, implementation),
        "masks": masks(size, kernel),
        "speed": speed(size, kernel),
    }
    earlier = earlier_report(continued, report["environment"])
    for section in sections:
        report[section] = [row for row in earlier.get(section, []) if "repeat" not in row]
    for section, rows in sections.items():
        done = [row["row"] for row in report[section]]
        for name, measure in rows:
            if name in done:
                continue
            try:
                row = {"row": name, **measure(), "gpu": gpu_state()}
            except Exception as error:  # the other rows are still of use
                row = {"row": name, **failure(error)}
            report[section].append(row)
            print(json.dumps({section: row}), flush=True)
            # Write after each row, so that an interrupted run keeps its results.
            write_json(out, report)
    if out is not None:
        print(f"Written: {out}")
    wrong = failures(report, kernel if kernel == "cudnn" else "blockwise", kernel)
    print("\n".join(wrong) or "accuracy and masks: all checks passed")
    if kernel == "cudnn":
        print(verdict(report["speed"]))
    else:
        print("small run: the speeds are not meaningful")
    raise typer.Exit(bool(wrong))


# ---------------------------------------------------------------------------
# Accuracy
# ---------------------------------------------------------------------------


def cases(length: int) -> dict[str, tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]]:
    """Returns name -> ((query heads, key heads, head size), static options, arrays)."""
    heads = (4, 4, 64)
    keys = jax.random.split(jax.random.key(1), 2)
    mask = jax.random.bernoulli(keys[0], 0.8, (2, 1, length, length))
    # One query sees no key; its result and its gradient are zero.
    mask = mask.at[:, :, 3].set(False)
    bias = jax.random.normal(keys[1], (1, 4, length, length), BF16)
    lengths = jnp.array([length, length // 2 + 1], jnp.int32)
    return {
        "full": (heads, {}, {}),
        "causal": (heads, {"is_causal": True}, {}),
        "grouped": ((4, 2, 64), {"is_causal": True}, {}),
        "padded": (heads, {}, dict(query_seq_lengths=lengths, key_value_seq_lengths=lengths)),
        "windowed": (heads, {"is_causal": True, "local_window_size": (length // 4, 0)}, {}),
        "mask": (heads, {}, {"mask": mask}),
        "bias": (heads, {}, {"bias": bias}),
        "heads of 20": ((4, 4, 20), {"is_causal": True}, {}),
        "heads of 128": ((4, 4, 128), {"is_causal": True}, {}),
    }


# Name of a row, and the function that measures it.
Rows = Iterator[tuple[str, Callable[[], dict[str, Any]]]]


def numbers(size: Size, implementation: str) -> Rows:
    """Yields the rows of errors, one for each case."""
    for name, (heads, options, arrays) in cases(size.small).items():
        case = functools.partial(number_row, size, implementation, name, heads, options, arrays)
        yield name, case


def number_row(
    size: Size, implementation: str, name: str, heads: Any, options: Any, arrays: Any
) -> dict[str, Any]:
    """Measures the errors of a case."""
    operands = random_operands(2, size.small, heads)
    d_out = jax.random.normal(jax.random.key(2), operands[0].shape, BF16)
    # A bias is differentiated; the other arguments only mask.
    inputs = (*operands, *(arrays[key] for key in arrays if key == "bias"))
    given = options | {key: array for key, array in arrays.items() if key != "bias"}
    exact = results("xla", FP32, inputs, d_out, given)
    allowed = results("xla", BF16, inputs, d_out, given)
    found = results(implementation, BF16, inputs, d_out, given)
    ran = jaxmp.explain(jaxmp.dot_product_attention)(
        *inputs, implementation=implementation, **given
    ).attention[0]
    parts = ("out", "query", "key", "value", "bias")[: len(inputs) + 1]
    return {
        "case": name,
        "ran": ran.implementation,
        "error": errors(parts, found, exact),
        "error_of_xla": errors(parts, allowed, exact),
    }


def results(implementation: str, dtype: Any, inputs: Any, d_out: Any, given: Any) -> Any:
    """Returns the result of attention in `dtype` and the gradient of each input, in FP32."""
    attention = functools.partial(
        jaxmp.dot_product_attention, implementation=implementation, **given
    )

    def both(inputs, d_out):
        out, pull = jax.vjp(attention, *inputs)
        return [array.astype(FP32) for array in (out, *pull(d_out))]

    with jax.default_matmul_precision("highest" if dtype == FP32 else "default"):
        return jax.jit(both)([array.astype(dtype) for array in inputs], d_out.astype(dtype))


def random_operands(batch: int, length: int, heads: tuple[int, int, int]) -> Any:
    """Returns query, key and value in bfloat16."""
    queries, keys, size = heads
    rngs = jax.random.split(jax.random.key(0), 3)
    counts = (queries, keys, keys)
    return tuple(
        jax.random.normal(rng, (batch, length, count, size), BF16)
        for rng, count in zip(rngs, counts, strict=True)
    )


def direct(kernel: str) -> Any:
    """Returns JAX's attention function with that kernel, without jaxmp."""
    attention: Any = jax.nn.dot_product_attention
    return functools.partial(attention, implementation=kernel)


def errors(parts: Any, found: Any, exact: Any) -> dict[str, float]:
    """Returns the largest error of each array over its largest magnitude."""
    return {
        part: float(jnp.abs(one - other).max() / jnp.abs(other).max())
        for part, one, other in zip(parts, found, exact, strict=True)
    }


# ---------------------------------------------------------------------------
# Masks
# ---------------------------------------------------------------------------


def masks(size: Size, kernel: str) -> Rows:
    """Yields the rows that show whether gradients under a bool mask are finite."""
    ways = {"jaxmp": jaxmp.dot_product_attention, f"jax.nn, {kernel}": direct(kernel)}
    for length, mask, way in itertools.product(size.masked, ("causal", "keys"), ways):
        measure = functools.partial(mask_row, length, mask, way, ways[way])
        yield f"{length}, {mask}, {way}", measure


def mask_row(length: int, name: str, way: str, attention: Any) -> dict[str, Any]:
    """Computes attention and its gradients under a mask."""
    query, key, value = random_operands(2, length, (4, 4, 64))
    d_out = jax.random.normal(jax.random.key(2), query.shape, BF16)
    positions = jnp.arange(length)
    if name == "causal":
        mask = (positions[None, :] <= positions[:, None])[None, None]
    else:
        mask = positions < length - 5
    mask = jnp.broadcast_to(mask, (2, 1, length, length))

    def both(query, key, value, mask, d_out):
        plain = functools.partial(attention, mask=mask)
        out, pull = jax.vjp(plain, query, key, value)
        return out, pull(d_out)

    result = jax.jit(both)(query, key, value, mask, d_out)
    finite = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(result))
    return {"length": length, "mask": name, "way": way, "finite": finite}


# ---------------------------------------------------------------------------
# Speed
# ---------------------------------------------------------------------------


def speed(size: Size, kernel: str) -> Rows:
    """Yields the rows of TFLOP/s of both functions for each head size, mask, length and pass."""
    settings = itertools.product(size.heads, (True, False), size.lengths, PASSES)
    for heads, causal, length, passes in settings:
        measure = functools.partial(speed_row, size, kernel, heads, causal, length, passes)
        yield f"{heads}, {'causal' if causal else 'full'}, {length}, {passes}", measure


def compiled_call(attention: Any, passes: str, operands: Any, d_out: Any) -> Any:
    """Returns jitted `attention`, with gradients of the operands unless `passes` is "forward"."""
    if passes == "forward":
        return functools.partial(jax.jit(attention), *operands)

    def both(query: Any, key: Any, value: Any, d_out: Any) -> Any:
        out, pull = jax.vjp(attention, query, key, value)
        return out, pull(d_out)

    return functools.partial(jax.jit(both), *operands, d_out)


def speed_row(size: Size, kernel: str, heads: Any, causal: bool, length: int, passes: str) -> Any:
    """Measures one row of the table."""
    batch = max(1, size.tokens // length)
    query, key, value = random_operands(batch, length, heads)
    d_out = jax.random.normal(jax.random.key(2), query.shape, BF16)
    ours = functools.partial(jaxmp.dot_product_attention, is_causal=causal)
    theirs = functools.partial(direct(kernel), is_causal=causal)
    calls = {}
    for name, attention in {"jaxmp": ours, "direct": theirs}.items():
        calls[name] = compiled_call(attention, passes, (query, key, value), d_out)
    seconds = paired(calls, size.rounds, size.seconds)
    work = 4 * batch * heads[0] * length**2 * heads[2] * PASSES[passes] / (2 if causal else 1)
    ratios = [d / j for j, d in zip(seconds["jaxmp"], seconds["direct"], strict=True)]
    ran = (
        jaxmp.explain(jaxmp.dot_product_attention)(query, key, value, is_causal=causal)
        .attention[0]
        .implementation
    )
    return {
        "heads": list(heads),
        "causal": causal,
        "length": length,
        "batch": batch,
        "pass": passes,
        "ran": ran,
        "jaxmp_tflops": spread([work / s / 1e12 for s in seconds["jaxmp"]]),
        "direct_tflops": spread([work / s / 1e12 for s in seconds["direct"]]),
        "ratio": spread(ratios),
    }


def paired(calls: dict[str, Any], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Returns the seconds per call in each round; every second round is reversed."""
    repeats = 1
    for call in calls.values():
        jax.block_until_ready(call())
        since = time.perf_counter()
        jax.block_until_ready(call())
        repeats = max(repeats, math.ceil(seconds / (time.perf_counter() - since)))
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: -1 if number % 2 else 1]:
            call, result = calls[name], None
            since = time.perf_counter()
            for _ in range(repeats):
                result = call()
            jax.block_until_ready(result)
            found[name].append((time.perf_counter() - since) / repeats)
    return found


def matmul_tflops(size: Size) -> dict[str, float]:
    """Measures a square bfloat16 matmul, to compare GPUs and runs."""
    square = jax.random.normal(jax.random.key(0), (size.matmul, size.matmul), BF16)
    call = functools.partial(jax.jit(jnp.matmul), square, square)
    seconds = paired({"matmul": call}, size.rounds, size.seconds)["matmul"]
    return spread([2 * size.matmul**3 / s / 1e12 for s in seconds])


# ---------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------


def failures(report: Any, expected: str, kernel: str) -> list[str]:
    """Returns descriptions of the failed checks."""
    sections = {
        name: [row for row in report[name] if "failed" not in row]
        for name in ("numbers", "masks", "speed")
    }
    found = [
        f"{row['row']}: {row['failed']}"
        for name, rows in sections.items()
        for row in report[name]
        if row not in rows
    ]
    for row in sections["numbers"]:
        for part, error in row["error"].items():
            allowed = max(2 * row["error_of_xla"][part], TWO_ROUNDINGS)
            # Also where it is NaN.
            if not error <= allowed:
                found.append(
                    f"{row['case']}: error of {part} is {error:.2e}, allowed {allowed:.2e}"
                )
        if row["ran"] != expected:
            found.append(f"{row['case']}: {row['ran']} was used, not {expected}")
    for row in sections["masks"]:
        if row["way"] == "jaxmp" and not row["finite"]:
            found.append(f"mask {row['mask']}, T {row['length']}: gradients are not finite")
    for row in sections["speed"]:
        if kernel == "cudnn" and row["ran"] != kernel:
            found.append(f"T {row['length']}: {row['ran']} was used, not {kernel}")
    return found


def verdict(rows: list[Any]) -> str:
    """Returns the slowest row and the median of all rows."""
    rows = [row for row in rows if "ratio" in row]
    if not rows:
        return "no speed was measured"
    ratios = [row["ratio"]["median"] for row in rows]
    slowest = min(rows, key=lambda row: row["ratio"]["median"])
    where = f"heads {slowest['heads']}, causal {slowest['causal']}, T {slowest['length']}"
    return (
        f"speed relative to cuDNN: median {statistics.median(ratios):.3f}, minimum "
        f"{min(ratios):.3f} ({where}, {slowest['pass']}); required: 0.99"
    )


if __name__ == "__main__":
    typer.run(main)
