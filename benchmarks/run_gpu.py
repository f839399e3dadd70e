"""Runs the GPU benchmarks on one GPU in slices of ten minutes, the most valuable first.

    python benchmarks/run_gpu.py                      # a slice; repeat until nothing is left
    python benchmarks/run_gpu.py --minutes 25         # a longer slice
    python benchmarks/run_gpu.py --list               # the jobs, and which are done
    python benchmarks/run_gpu.py --toy --out DIRECTORY    # rehearsal on a CPU at small sizes

Each job is one of the other benchmarks in a process of its own, and writes its figures to --out
(default: benchmarks/results/gpu) after each result. A job that ended is recorded in run_gpu.json
there, and not repeated; one that was stopped at the end of a slice is, and keeps what it has
written. A job that failed does not stop the others, and is repeated after them. A job is not
started if less time is left than it usually takes. Jobs of packages that are not installed are
skipped with the reason.

The first slice shows whether the steps run, whether they are as fast as the hand-written ones, and
whether FP8 gains. The first three slices contain the jobs of FIRST.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu"
REQUIRED = ("jax", "flax", "optax", "scipy", "typer", "rich")


class Job(NamedTuple):
    """A benchmark: `{out}` is the file it writes, and `minutes` is the time that it may take."""

    name: str
    command: str
    minutes: float
    package: str = "jax"
    file: str = ""  # name of the file if several jobs add to it


def step(workload: str, arms: str, minutes: float, rounds: int = 7, steps: int = 6) -> Job:
    """Returns a job of train_step.py."""
    command = f"train_step.py {workload} --arms {arms} --rounds {rounds} --steps {steps}"
    return Job(f"{workload} {arms}", f"{command} --out {{out}}", minutes, file=f"step_{workload}")


def torch(workload: str, minutes: float, rounds: int = 7, steps: int = 6) -> Job:
    """Returns a job of torch_step.py."""
    command = f"torch_step.py {workload} --rounds {rounds} --steps {steps} --out {{out}}"
    return Job(f"{workload} torch", command, minutes, "torch", f"step_{workload}")


FP8 = "jaxmp-fp8_delayed jaxmp-fp8"
SMOKE = "--recipes fp16,fp16_params,bf16_params --steps 20 --seconds 10"
# With jaxmp-bf16, so that the ratios are those of a round; its compiled program is in the cache.
FUSED_PEERS = "flax-cudnn qwix-fp8 te-bf16 te-fp8 te-fp8_delayed maxtext"
PEERS = f"jaxmp-bf16 flax {FUSED_PEERS}"
# The jobs of the first 30 minutes.
FIRST = (
    Job("ceilings", "ceilings.py --out {out}", 0.5),
    step("w1", "jaxmp-bf16 hand", 1.5, steps=20),
    step("w5", f"jaxmp-bf16 {FP8} hand", 4),
    torch("w1", 2.5, steps=20),
    step("w2", f"jaxmp-bf16 hand {FP8}", 4),
    torch("w2", 3),
    Job("optimizer", "optimizer_time.py --out {out}", 2),
    step("w5", f"jaxmp-bf16 jaxmp-fp8_pallas {FUSED_PEERS}", 3, 5),
    Job("short recipes", f"gpu_smoke.py {SMOKE} --out {{out}}", 2),
    torch("w5", 2.5),
    Job("longest sequence", "longest_sequence.py --out {out}", 3.5),
)
LATER = (
    Job("attention", "attention_gpu.py --out {out}", 4),
    Job("odd attention", "attention_grid.py --run --out {out}", 2),
    Job("fp8_linear", "fp8_linear.py --time --out {out}", 3),
    step("w3", f"jaxmp-bf16 hand {FP8}", 4),
    torch("w3", 3),
    step("w4", f"jaxmp-bf16 hand {FP8}", 4),
    torch("w4", 3),
    step("w1", f"jaxmp-bf16 plain {FP8} jaxmp-bf16_params jaxmp-tf32", 4),
    step("w1", PEERS, 4),
    step("w2", f"jaxmp-fp8_pallas jaxmp-fp8_measured jaxmp-fp8_rowwise {PEERS}", 5.5, 5),
    step("w4", PEERS, 4),
    step("w5", "jaxmp-bf16 jaxmp-fp8_rowwise flax jaxmp-bf16_params", 3),
    step("w3b", "jaxmp-bf16 hand flax", 3),
    torch("w3b", 3),
    step("w5b", f"jaxmp-bf16 hand flax {FP8}", 5),
    torch("w5b", 3),
    step("w2b", "jaxmp-bf16 hand", 4),
    torch("w2b", 3),
    step("w1", "jaxmp-bf16 jaxmp-fp32", 2, rounds=3),
    Job("recipes", "gpu_smoke.py --out {out}", 8),
)
JOBS = FIRST + LATER


def command_of(job: Job, directory: Path, toy: bool) -> list[str]:
    """Returns the command of a job; a rehearsal has few rounds of a few steps."""
    file = directory / f"{(job.file or job.name).replace(' ', '_')}.json"
    script, *options = job.command.format(out=file).split()
    if toy:
        options = [*options, "--toy"]
        for name, value in (("--rounds", "2"), ("--steps", "2")):
            if name in options:
                options[options.index(name) + 1] = value
    return [sys.executable, str(HERE / script), *options]


def environment() -> dict[str, str]:
    """Returns the environment of the jobs, which share compiled programs."""
    default = str(Path(tempfile.gettempdir()) / "run_gpu_cache")
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", default)
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    shared = {"JAX_COMPILATION_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch"}
    return {**os.environ, **shared, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(job: Job, directory: Path, toy: bool, seconds: float) -> dict[str, object]:
    """Runs a job for at most `seconds`; returns how it ended."""
    if importlib.util.find_spec(job.package) is None:
        return {"skipped": f"{job.package} is not installed"}
    log = directory / "logs" / f"{job.name.replace(' ', '_')}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    start, command = time.monotonic(), command_of(job, directory, toy)
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment(), process_group=0
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                # Its own processes too, which would keep the memory of the GPU.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "log": log.name}


def is_done(ended: dict[str, object]) -> bool:
    return "skipped" in ended or ended.get("status") == 0


def has_failed(ended: dict[str, object]) -> bool:
    return ended.get("status") not in (0, None)


def main() -> int:
    """Runs the jobs of a slice, and returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=9.5, help="duration of the slice")
    parser.add_argument("--only", nargs="+", help="words that the names of the jobs contain")
    parser.add_argument("--list", action="store_true", help="list the jobs")
    parser.add_argument("--toy", action="store_true", help="rehearse on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    options = parser.parse_args()
    if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
        sys.exit(
            f"Not installed: {', '.join(missing)}. Install the packages of the examples first:\n"
            '    pip install "jaxmp[examples,cuda13]"'
        )
    # The benchmark that runs is then stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    state_file = options.out / "run_gpu.json"
    state = json.loads(state_file.read_text("utf-8")) if state_file.exists() else {}
    end, failed = time.monotonic() + 60 * options.minutes, False
    chosen = [job for job in JOBS if not options.only or any(w in job.name for w in options.only)]
    if options.list:
        for job in chosen:
            mark = "done" if is_done(state.get(job.name, {})) else ""
            print(f"{job.name:100} {job.minutes:4} min  {mark}")
        return 0
    for job in sorted(chosen, key=lambda job: has_failed(state.get(job.name, {}))):
        left = end - time.monotonic()
        required = 5 if options.toy else 60 * job.minutes * 0.6
        if is_done(state.get(job.name, {})) or left < required:
            continue
        print(f"{job.name} ...", flush=True)
        state[job.name] = run(job, options.out, options.toy, left)
        print(f"{job.name}: {state[job.name]}", flush=True)
        failed |= has_failed(state[job.name])
        state_file.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
