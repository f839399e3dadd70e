"""Runs the GPU benchmarks on one GPU in slices of ten minutes, the most valuable first.

    python benchmarks/run_gpu.py                      # a slice; repeat until nothing is left
    python benchmarks/run_gpu.py --minutes 25         # a longer slice
    python benchmarks/run_gpu.py --list               # the jobs, and which are done
    python benchmarks/run_gpu.py --toy --out DIRECTORY    # rehearsal on a CPU at small sizes

Each job is one of the other benchmarks in a process of its own, and writes its figures to --out
(default: benchmarks/results/gpu) after each result. A job that ended is recorded in run_gpu.json
there, and not repeated; one that was stopped at the end of a slice is, and keeps what it has
written. A job is not started if less time is left than it usually takes. Jobs of packages that are
not installed are skipped with the reason.

The first slice shows whether the steps run, whether they are as fast as the hand-written ones, and
whether FP8 gains.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu"


class Job(NamedTuple):
    """A benchmark: `{out}` is the file it writes, and `minutes` is the time that it may take."""

    name: str
    command: str
    minutes: float
    package: str = "jax"
    file: str = ""  # name of the file if several jobs add to it


def step(workload: str, arms: str, minutes: float, rounds: int = 7, steps: int = 20) -> Job:
    """Returns a job of train_step.py."""
    command = f"train_step.py {workload} --arms {arms} --rounds {rounds} --steps {steps}"
    return Job(f"{workload} {arms}", f"{command} --out {{out}}", minutes, file=f"step_{workload}")


def torch(workload: str, minutes: float, rounds: int = 4) -> Job:
    """Returns a job of torch_step.py."""
    command = f"torch_step.py {workload} --rounds {rounds} --out {{out}}"
    return Job(f"{workload} torch", command, minutes, "torch", f"step_{workload}")


JOBS = (
    Job("ceilings", "ceilings.py --out {out}", 1),
    step("w1", "jaxmp-bf16 hand", 2),
    step("w5", "jaxmp-bf16 jaxmp-fp8_delayed jaxmp-fp8 hand", 4.5, rounds=5, steps=10),
    torch("w1", 2.5),
    step("w2", "jaxmp-bf16 hand jaxmp-fp8_delayed jaxmp-fp8", 5, rounds=5, steps=10),
    torch("w2", 4, rounds=3),
    Job("fp8_linear", "fp8_linear.py --time --out {out}", 3),
    torch("w5", 3, rounds=3),
    Job("attention", "attention_gpu.py --out {out}", 5),
    Job("optimizer", "optimizer_time.py --out {out}", 3),
    Job("longest sequence", "longest_sequence.py --out {out}", 6),
    step("w1", "plain jaxmp-fp8 jaxmp-fp8_delayed jaxmp-bf16_params jaxmp-tf32", 4, rounds=5),
    step("w3", "jaxmp-bf16 hand jaxmp-fp8_delayed", 4, rounds=5, steps=10),
    torch("w3", 3, rounds=3),
    step("w4", "jaxmp-bf16 hand jaxmp-fp8_delayed", 4, rounds=5, steps=10),
    torch("w4", 3, rounds=3),
    step("w3b", "jaxmp-bf16 hand", 3, rounds=5, steps=10),
    step("w5b", "jaxmp-bf16 hand jaxmp-fp8_delayed", 4, rounds=5, steps=10),
    step("w2b", "jaxmp-bf16 hand", 4, rounds=5, steps=10),
    step("w1", "jaxmp-fp32", 2, rounds=3, steps=5),
    Job("recipes", "gpu_smoke.py --out {out}", 8),
)


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
    start = time.monotonic()
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            command_of(job, directory, toy), stdout=file, stderr=file, env=environment()
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "log": log.name}


def main() -> int:
    """Runs the jobs of a slice, and returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=9.5, help="duration of the slice")
    parser.add_argument("--only", nargs="+", help="words that the names of the jobs contain")
    parser.add_argument("--list", action="store_true", help="list the jobs")
    parser.add_argument("--toy", action="store_true", help="rehearse on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    state_file = options.out / "run_gpu.json"
    state = json.loads(state_file.read_text("utf-8")) if state_file.exists() else {}
    end, failed = time.monotonic() + 60 * options.minutes, False
    chosen = [job for job in JOBS if not options.only or any(w in job.name for w in options.only)]
    for job in chosen:
        ended = state.get(job.name, {})
        is_done = "skipped" in ended or ended.get("status") == 0
        if options.list:
            print(f"{job.name:60} {job.minutes:4} min  {'done' if is_done else ''}")
            continue
        left = end - time.monotonic()
        if is_done or left < (5 if options.toy else 60 * job.minutes * 0.6):
            continue
        print(f"{job.name} ...", flush=True)
        state[job.name] = run(job, options.out, options.toy, left)
        print(f"{job.name}: {state[job.name]}", flush=True)
        failed |= state[job.name].get("status") not in (0, None)
        state_file.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
