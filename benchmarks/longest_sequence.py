"""Finds the longest sequence that GPT-2 trains on one GPU, with fused and with plain attention.

    python benchmarks/longest_sequence.py --out longest_sequence.json
    python benchmarks/longest_sequence.py --toy      # small, on any machine

The search begins at the length that programs compiled for an H200 predict. The length of a batch of
one doubles until a step fails for lack of memory, or is halved until a step succeeds. Each length
runs in a separate process, because memory that a failed step has allocated is not returned.
Programs that --out contains are not measured again, except those that failed for another reason
than too little memory.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

if "--toy" in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import jax

import by_hand
import gpt
from gpu_record import (
    earlier_report,
    environment,
    failure,
    gpu_state,
    is_out_of_memory,
    write_json,
)
from gpu_smoke import describe_hardware, in_own_process
from result_file import parser_of
from train_step import model_of
from workload_sizes import TOY, WORKLOADS


def run_step(length: int, attention: str, remat: bool, toy: bool) -> None:
    """Trains two steps; raises an error if the memory is too small."""
    size = dataclasses.replace((TOY if toy else WORKLOADS)["w1"], batch=1, length=length)
    size = dataclasses.replace(size, unroll=False)
    tokens = jax.random.randint(jax.random.key(0), (1, length + 1), 0, size.vocabulary)
    if attention == "plain":
        model = model_of(size).clone(remat=remat)
        loss_fn = by_hand.gpt_loss(model, "xla")
        init, step = by_hand.make_training(loss_fn, gpt.make_optimizer())
        start = lambda: model.init(jax.random.key(0), tokens[:, :8])["params"]
        state = jax.jit(lambda: init(start()))()
    else:
        make_init, step = gpt.linen_training(
            "bf16", model_of(size).clone(remat=remat), gpt.make_optimizer()
        )
        state = jax.jit(make_init)()
    for _ in range(2):
        state, loss = step(state, tokens)
    print(json.dumps({"length": length, "loss": float(loss)}))


# (attention, remat) -> tokens that fit into 141 GB, from the sizes of compiled programs.
PREDICTED = {
    ("plain", False): 8192,
    ("fused", False): 131072,
    ("plain", True): 16384,
    ("fused", True): 262144,
}
LIMIT = 2**18  # a step takes minutes beyond it


def trains(length: int, attention: str, remat: bool, toy: bool) -> str:
    """Trains in a new process; returns the error, or "" if there is none."""
    command = [sys.executable, __file__, "--run", str(length), attention, str(int(remat))]
    done = subprocess.run(
        [*command, *(["--toy"] if toy else [])], capture_output=True, text=True, check=False
    )
    if not done.returncode:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    line = next((line for line in reversed(lines) if is_out_of_memory(line)), None)
    if line is None:
        raise RuntimeError(f"length {length}: " + "\n".join(lines[-20:]))
    return line[:300]


def longest(attention: str, remat: bool, toy: bool) -> dict[str, object]:
    """Returns the longest length that trains, and the error of the next one."""
    limit, length = (32, 32) if toy else (LIMIT, PREDICTED[attention, remat])
    trained, error = 0, ""
    while 16 <= length <= limit and (trained == 0 or not error):
        too_long = trains(length, attention, remat, toy)
        error = too_long or error
        trained = trained if too_long else length
        length = length // 2 if too_long else 2 * length
    return {"attention": attention, "remat": remat, "longest": trained, "next_failed": error}


def main() -> int:
    """Prints and writes the longest length of each program; returns 1 if one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        length, attention, remat = options.run
        run_step(int(length), attention, bool(int(remat)), options.toy)
        return 0
    # The processes of the steps use the GPU, so this one does not.
    report: dict[str, Any] = {
        "environment": environment(in_own_process(describe_hardware)["device"])
    }
    earlier = earlier_report(options.out, report["environment"]).get("rows", [])
    rows = report["rows"] = [row for row in earlier if "failed" not in row]
    measured = {(row["attention"], row["remat"]) for row in rows}
    for attention, remat in PREDICTED:
        if (attention, remat) in measured:
            continue
        try:
            row = longest(attention, remat, options.toy)
        except RuntimeError as error:
            print(error)
            row = {"attention": attention, "remat": remat, **failure(error)}
        rows.append({**row, "gpu": gpu_state()})
        print(json.dumps(rows[-1]), flush=True)
        write_json(options.out, report)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
