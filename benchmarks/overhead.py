"""Measures what a recipe adds to a training step on a CPU, beside other libraries.

    python benchmarks/overhead.py --out benchmarks/results/overhead_cpu.json
    python benchmarks/overhead.py --pairs 0      # counts only

The steps are those of benchmarks/step_counts.py: a byte-level GPT in bfloat16 with a dynamic loss
scale, by a recipe, Flax's `DynamicScale`, jmp and MPX, and one that qwix wraps without quantizing.
Columns are ratios to the hand-written step without a loss scale: operations of the traced and of
the compiled program, FLOPs, bytes, temporary memory, and the median time ratio of steps that run in
turn. A library that is not installed has the reason instead. The exit status is 1 if another
library is ahead of the recipe in a column.
"""

import importlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax.training.train_state import TrainState

import step_counts as steps
from result_file import parser_of, write_result

COUNTS = ("stablehlo_ops", "hlo_ops", "flops", "bytes", "temp_bytes")
# Columns in which the recipe must be ahead of the other libraries with a loss scale. Bytes, memory
# and traced operations are not among them: the others round weight gradients to bfloat16. A recipe
# does not, and for a CPU it converts the operands of these matmuls to FP32.
ROWS = ("hlo_ops", "flops")


def qwix_wrapped() -> tuple[Callable[..., Any], TrainState]:
    """Returns the hand-written step, whose model qwix interprets with a rule that never matches."""
    qwix = importlib.import_module("qwix")
    rule = qwix.QtRule(module_path="no_such_module", weight_qtype="float8_e4m3fn")
    model = qwix.quantize_model(steps.GPT(jax.numpy.bfloat16), qwix.QtProvider([rule]))
    loss_fn = steps.loss_of(model.apply)

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens)
        return state.apply_gradients(grads=grads), loss

    return step, TrainState.create(apply_fn=model.apply, params=steps.init_params(), tx=steps.TX)


# Name -> function that makes the step and its state.
PROGRAMS: dict[str, Callable[[], Any]] = {
    "hand-written": steps.by_hand,
    "recipe bf16 with loss scale": steps.by_recipe(**steps.GUARDED),
    "hand-written, same guard": steps.by_hand_guarded,
    "Flax DynamicScale": steps.flax_dynamic_scale,
    "jmp": steps.jmp_scale,
    "MPX": steps.mpx_scale,
    "qwix, no rule matches": qwix_wrapped,
}
OURS = "recipe bf16 with loss scale"
PEERS = ("Flax DynamicScale", "jmp", "MPX")


def seconds_of(make: Callable[[], Any], base: Callable[[], Any], pairs: int) -> float:
    """Returns the median ratio of the times of two compiled steps that run in turn."""
    tokens = jax.numpy.zeros(steps.TOKENS.shape, steps.TOKENS.dtype)
    programs = []
    for maker in (make, base):
        step, state = steps.made(maker)
        programs.append((jax.jit(step), state))
    ratios = []
    for pair in range(pairs + 1):
        seconds = {}
        for index in (0, 1) if pair % 2 else (1, 0):
            run, state = programs[index]
            start = time.perf_counter()
            jax.block_until_ready(run(state, tokens))
            seconds[index] = time.perf_counter() - start
        ratios.append(seconds[0] / seconds[1])
    return float(np.median(ratios[1:]))  # the first pair compiles


def peers_ahead(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Returns a sentence for each column in which a library with a loss scale is ahead."""
    return [
        f"{peer} is ahead in {key}: {rows[peer][key]}, and the recipe has {rows[OURS][key]}"
        for peer in PEERS
        for key in ROWS
        if rows.get(peer, {}).get(key, np.inf) < rows[OURS].get(key, -np.inf)
    ]


def main() -> int:
    """Prints the ratios, and returns 1 if another library is ahead."""
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=30, help="timed pairs of steps")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    base = PROGRAMS["hand-written"]
    counted = steps.count(base)
    for name, make in PROGRAMS.items():
        if make is base:
            continue
        try:
            counts = steps.count(make)
        except ModuleNotFoundError as error:
            rows[name] = {"skipped": f"{error.name} is not installed"}
        else:
            rows[name] = {key: round(counts[key] / counted[key], 4) for key in COUNTS}
            if options.pairs:
                rows[name]["step_time"] = round(seconds_of(make, base, options.pairs), 3)
        print(f"{name}: {rows[name]}", flush=True)
        if options.out:
            write_result(options.out, rows=rows)
    behind = peers_ahead(rows)
    print("\n".join(behind) or "The recipe is ahead of each of the other libraries.")
    return 1 if behind else 0


if __name__ == "__main__":
    raise SystemExit(main())
