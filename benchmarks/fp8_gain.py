"""Compiles an MLP block in BF16 and in FP8 for an H200, and compares its roofline.

    python benchmarks/fp8_gain.py                                   # prints the table
    python benchmarks/fp8_gain.py --out benchmarks/results/fp8_gain_h200.json
    python benchmarks/fp8_gain.py --widths 768 4096 --tokens 8192   # some of the cells
    python benchmarks/fp8_gain.py --run --cells 768x2048 4096x8192  # times cells on this GPU

Without --run, nothing is run, and no GPU is required, but XLA's GPU compiler:
pip install -e ".[aot]". With it, both programs run in turn in each of five rounds. The block
is `x + down(gelu(up(x)))` with widths W and 4 W, FP32 parameters, forward and backward pass with
the gradient of x, and AdamW. `fp8` quantizes both layers with `CurrentScaling`, whatever the rule
of `fp8.CurrentScaling(tokens=...)` decides. Each kernel takes the larger of the times of its FLOPs
and of its bytes, and 2 microseconds to start, at rates that were measured on an H200: 737 TFLOP/s
in bfloat16, 1,337 in FP8 and 4.22 TB/s (`benchmarks/ceilings.py`).

The exit status is 1 if the rule admits a block of which FP8 loses more than 5 %, or excludes one of
which it gains more than 5 %.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

if "--run" in sys.argv and "--toy" not in sys.argv:
    # As the programs that are compiled: the matmuls are those of cuBLAS.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_triton_gemm=false"
else:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmp
from gpu_record import environment, write_json
from jaxmp import fp8, functional
from jaxmp._core import _compat
from jaxmp._tools.audit._compile import compile_for
from jaxmp._tools.audit._hlo import Program
from jaxmp._tools.audit._hlo_kernels import accessed, kernels
from jaxmp._tools.audit._hlo_matmuls import DataFlow, matmul_of_instruction, parts
from jaxmp._tools.audit._trace import trace
from jaxmp.fp8._explain import explain_exclusion
from result_file import parser_of, write_result

WIDTHS = (768, 1024, 2048, 4096, 8192)
TOKENS = (2048, 8192, 32768)
BF16, FP8, BANDWIDTH, LAUNCH = 737e12, 1337e12, 4.22e12, 2e-6
POLICY = "p=f32,c=bf16,o=bf16"
NEAR = 0.05


class Block(nn.Module):
    """Residual block of two linear layers without biases."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of x."""
        hidden = functional.gelu(nn.Dense(4 * self.width, use_bias=False, name="up")(x))
        return x + nn.Dense(self.width, use_bias=False, name="down")(hidden)


class Cost(NamedTuple):
    """Roofline of one compiled step."""

    seconds: float
    kernels: int
    fp8: int  # matmuls with FP8 operands
    temporary: int  # bytes that the program allocates in addition to arguments and results


def training_of(recipe: jaxmp.Recipe, width: int) -> tuple[Any, Any]:
    """Returns a function of the inputs that makes the initial state, and the jitted step."""
    model, tx = recipe.wrap(Block(width)), optax.adamw(1e-3)

    def init(x: jax.Array) -> Any:
        variables = model.init(jax.random.key(0), x)
        return variables, tx.init(variables)

    def step(variables: Any, opt_state: Any, x: jax.Array, slope: jax.Array) -> Any:
        out, backward = jax.vjp(model.apply, variables, x)
        grads, d_x = backward(slope)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return optax.apply_updates(variables, updates), opt_state, out, d_x

    return init, jax.jit(step, donate_argnums=(0, 1))


def cost_of(recipe: jaxmp.Recipe, width: int, tokens: int) -> Cost:
    """Compiles a training step of a block."""
    init, step = training_of(recipe, width)
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    with _compat.context(target="gpu", capability=(9, 0)):
        traced = trace(step, (*jax.eval_shape(init, x), x, x), {})
    compiled = compile_for("h200", traced)
    program = Program(compiled.text)
    flow, seconds, count, in_fp8 = DataFlow(program), 0.0, 0, 0
    for kernel in kernels(program):
        flops = {True: 0, False: 0}
        for part in parts(program, kernel):
            matmul = matmul_of_instruction(flow, kernel, part)
            if matmul is not None:
                is_fp8 = "float8" in matmul.lhs and "float8" in matmul.rhs
                flops[is_fp8] += matmul.flops
                in_fp8 += kernel.times * is_fp8
        compute = flops[True] / FP8 + flops[False] / BF16
        time = max(compute, accessed(program, kernel) / BANDWIDTH) + LAUNCH
        seconds, count = seconds + kernel.times * time, count + kernel.times
    return Cost(seconds, count, in_fp8, compiled.memory.temp_size_in_bytes)


def recipe_of(scaling: fp8.CurrentScaling | None) -> jaxmp.Recipe:
    """Returns the recipe of one arm; None: BF16."""
    if scaling is None:
        return jaxmp.load_recipe(POLICY)
    return jaxmp.load_recipe(jaxmp.PolicyMap(f"{POLICY},matmul=fp8", fp8=scaling))


def compare(width: int, tokens: int) -> dict[str, Any]:
    """Returns the row of one block: speed of FP8 over BF16, kernels and temporary memory."""
    bf16 = cost_of(recipe_of(None), width, tokens)
    quantized = cost_of(recipe_of(fp8.CurrentScaling(min_width=0)), width, tokens)
    rule = fp8.CurrentScaling(tokens=tokens)
    speed = bf16.seconds / quantized.seconds
    is_admitted = explain_exclusion(width, 4 * width, rule, "gpu") == ""
    return {
        "width": width,
        "tokens": tokens,
        "speed": round(speed, 3),
        "kernels": [bf16.kernels, quantized.kernels],
        "temporary_mb": [round(bf16.temporary / 1e6), round(quantized.temporary / 1e6)],
        "fp8_matmuls": quantized.fp8,
        "is_admitted": is_admitted,
        "is_right": is_right(is_admitted, speed),
    }


def timed(recipe: jaxmp.Recipe, width: int, tokens: int) -> Iterator[float]:
    """Yields the seconds of a step on this GPU, each the mean of 50 after three others."""
    init, step = training_of(recipe, width)
    x, slope = (jax.random.normal(jax.random.key(s), (tokens, width), jnp.bfloat16) for s in (1, 2))
    state = jax.jit(init)(x)
    while True:
        for index in range(53):
            if index == 3:
                jax.block_until_ready(state)
                start = time.perf_counter()
            *state, _, _ = step(*state, x, slope)
        jax.block_until_ready(state)
        yield (time.perf_counter() - start) / 50


def run_cells(options: Any) -> int:
    """Times cells on this GPU; returns 1 if the rule decides wrongly for one of them."""
    device = environment(jax.devices()[0].device_kind)
    report: dict[str, Any] = {"environment": device, "rows": []}
    for cell in options.cells:
        width, tokens = map(int, cell.split("x"))
        rule = fp8.CurrentScaling(tokens=tokens)
        arms = [timed(recipe_of(s), width, tokens) for s in (None, fp8.CurrentScaling(min_width=0))]
        rounds = [[next(arm) for arm in arms] for _ in range(5)]
        speeds = [bf16 / quantized for bf16, quantized in rounds]
        is_admitted = explain_exclusion(width, 4 * width, rule, "gpu") == ""
        report["rows"].append(
            {
                "width": width,
                "tokens": tokens,
                "speed": round(statistics.median(speeds), 3),
                "range": [round(min(speeds), 3), round(max(speeds), 3)],
                "milliseconds": [
                    round(1e3 * statistics.median(times), 4) for times in zip(*rounds, strict=True)
                ],
                "is_admitted": is_admitted,
                "is_right": is_right(is_admitted, statistics.median(speeds)),
            }
        )
        print(report["rows"][-1], flush=True)
        write_json(options.out, report)
    return 0 if options.toy or all(row["is_right"] for row in report["rows"]) else 1


def is_right(is_admitted: bool, speed: float) -> bool:
    """Returns whether the rule's decision for a block is that of its measured speed."""
    return is_admitted == (speed > 1) or abs(speed - 1) < NEAR


def main() -> int:
    """Prints the table, and returns 1 if the rule decides wrongly."""
    parser = parser_of(__doc__)
    parser.add_argument("--run", action="store_true", help="time cells on this GPU")
    parser.add_argument("--toy", action="store_true", help="with --run: one small cell, on the CPU")
    cells = ("768x2048", "2048x8192", "4096x32768")
    parser.add_argument("--cells", nargs="+", default=cells, help="WIDTHxTOKENS to time")
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    options = parser.parse_args()
    if options.toy:
        options.cells = ["64x128"]
    if options.run:
        return run_cells(options)
    print(f"{'width':>6}{'tokens':>8}{'speed':>8}  kernels     temporary MB   rule")
    rows = []
    for width in options.widths:
        for tokens in options.tokens:
            rows.append(row := compare(width, tokens))
            old, new = row["kernels"]
            before, after = row["temporary_mb"]
            print(
                f"{width:6}{tokens:8}{row['speed']:8.3f}  {old:3} to {new:3}  {before:6} to "
                f"{after:6}  {'FP8' if row['is_admitted'] else 'BF16'}"
                f"{'' if row['is_right'] else '  WRONG'}",
                flush=True,
            )
    write_result(options.out, target="NVIDIA H200 (compiled, nothing was run)", rows=rows)
    return 0 if all(row["is_right"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
