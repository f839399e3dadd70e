"""Compares the program of a training step with and without FP8: operations and tracing time.

    python benchmarks/fp8_counts.py
    python benchmarks/fp8_counts.py --pairs 20 --out fp8_counts.json

The workload is that of step_counts.py, a GPT of 12 layers in Flax Linen with AdamW, under the
recipe `bf16` and under the same recipe with `matmul = "fp8"` for every linear layer except the
head. Nothing is run or compiled. Counts of StableHLO operations are exact. Times are CPU seconds of
tracing and lowering, alternating between the two programs. Calls of Python functions, which do not
depend on the load of the machine, are also counted. The exit status is 1 if current or delayed
scaling exceeds 1.30 times the operations or 1.5 times the time. Other scalings are counted only; on
a CPU, the matmuls of `mx` are emulated.
"""

import argparse
import json
import platform
import sys
from pathlib import Path

import flax
import jax
import jax.numpy as jnp

import step_counts
from jaxmp import PolicyMap, Rule, TrainState, fp8, load_recipe

LIMITS = {"stablehlo_ops": 1.30, "trace_lower": 1.5}
HEAD = Rule("Dense_0", "o=f32,matmul=default", why="the last layer")
LIMITED = ("current", "delayed")
SCALINGS = {
    "current": fp8.CurrentScaling(),
    "delayed": fp8.DelayedScaling(),
    "rowwise": fp8.RowwiseScaling(),
    "mx": fp8.MXScaling(),
}


def step_of(recipe):
    """Returns (step, state) as in step_counts, where all variables of `init` are trained."""

    def make():
        model = recipe.wrap(step_counts.GPT())
        variables = model.init(jax.random.key(0), jnp.zeros((1, step_counts.LENGTH), jnp.int32))
        loss_fn = step_counts.loss_of(lambda given, tokens: model.apply(given["params"], tokens))

        def step(state, tokens):
            loss, grads = state.value_and_grad(loss_fn)(tokens)
            return state.apply_gradients(grads=grads), loss

        tx = recipe.optimizer(step_counts.TX)
        return step, TrainState.create(apply_fn=None, params=variables, tx=tx)

    return make


BF16 = step_of(load_recipe("bf16"))


def in_fp8(scaling):
    return step_of(load_recipe(PolicyMap("p=f32,c=bf16,o=f32,matmul=fp8", [HEAD], scaling)))


def operations(make):
    """Returns the numbers of lowered operations and of matmuls with FP8 operands."""
    text = step_counts.lower(make)[0].as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    return {
        "stablehlo_ops": len(step_counts._STABLEHLO_OP.findall(text)),
        "products": len(products),
        "products_in_fp8": sum("f8E" in line for line in products),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=6, help="alternations for each time ratio")
    parser.add_argument("--only", nargs="*", choices=SCALINGS, default=list(SCALINGS))
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    base, rows, failed = operations(BF16), [], False
    print(f"GPT of {step_counts.LAYERS} layers, jax {jax.__version__}; bf16: {base}")
    for name in options.only:
        make = in_fp8(SCALINGS[name])
        counted = operations(make)
        ratios = {"stablehlo_ops": counted["stablehlo_ops"] / base["stablehlo_ops"]}
        row = {"scaling": name, **counted, "ratios": ratios}
        span = ""
        if name in LIMITED:
            timed = step_counts.timed(make, BF16, options.pairs, step_counts.lowering_seconds)
            ratios["trace_lower"], row["trace_lower"] = timed["ratio"], timed
            calls = step_counts.python_calls
            ratios["python_calls"] = calls(make) / calls(BF16)
            span = ", time in {:.2f} to {:.2f}".format(*timed["interval"])
        over = [key for key in LIMITS if name in LIMITED and ratios[key] > LIMITS[key]]
        failed |= bool(over)
        shown = ", ".join(f"{key} {value:.3f}" for key, value in ratios.items())
        print(f"{name}: {shown}{span}, {counted}", f"OVER: {over}" if over else "", flush=True)
        rows.append(row)
    if options.out:
        report = {
            "command": "python " + " ".join(sys.argv),
            "machine": platform.machine(),
            "versions": {"jax": jax.__version__, "flax": flax.__version__},
            "limits": LIMITS,
            "bf16": base,
            "fp8": rows,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
