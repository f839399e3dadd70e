"""Runs the GPU benchmarks on one GPU, the most valuable first, in one call or in several.

    python benchmarks/run_gpu.py --minutes 150        # everything, in one call
    python benchmarks/run_gpu.py                      # ten minutes; repeat until nothing is left
    python benchmarks/run_gpu.py --list               # the jobs, and how they ended
    python benchmarks/run_gpu.py --toy --out DIRECTORY    # rehearsal on a CPU at small sizes

Each job is one of the other benchmarks in a separate process. All results, logs and the list of
jobs that ended are in one archive, gpu_results.tar.gz in --out (or JAXMP_GPU_OUT; default:
benchmarks/results/gpu). It is replaced as a whole after each job and every ten seconds, so that a
killed call leaves a complete archive with the results of the job that ran. On a fresh machine,
--continue-from names the archive of an earlier call.

The archive has a directory for each device and each set of versions (benchmarks/gpu_record.py):
results of different ones are never pooled, and the list of jobs begins anew. JAXMP_GPU_DEVICE
replaces the name of the device.

The archive also has the kernels that XLA chose by timing them, which the next call on the same kind
of GPU does not time again: the first FP8 program took 290 s of it.

A job is done if it exits with 0. Every other job runs in the next call: one that was interrupted,
which keeps the results that it has written; one whose package was not installed; and, after all
others, one that failed, took more than LIMIT times its minutes or was interrupted twice. A job is
not started if less time is left than it usually takes.

CALLS has the jobs of two calls, of at most 8 and 4.5 minutes: where the time of a GPT-2 step
goes, which form of the loss is the fastest, the step beside PyTorch's, FP32 and TF32; then FP8.
"""

import argparse
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gpu_record

HERE = Path(__file__).parent
OUT = "JAXMP_GPU_OUT"
RESULTS = HERE / "results" / "gpu"
ARCHIVE = "gpu_results.tar.gz"
REQUIRED = ("jax", "flax", "optax", "scipy", "typer", "rich")
LIMIT = 1.3  # a job may take this many times its minutes
SAVE_SECONDS = 10
LOG_BYTES = 500_000  # the end of a log that the archive contains


class Job(NamedTuple):
    """A benchmark: `{out}` is the file it writes, and `minutes` is the time that it usually takes.

    It runs if all packages that `package` names, separated by spaces, are installed.
    """

    name: str
    command: str
    minutes: float
    package: str = "jax"
    file: str = ""  # name of the file if several jobs add to it


def step(
    workload: str, arms: str, minutes: float, rounds: int = 7, steps: int = 6, package: str = "jax"
) -> Job:
    """Returns a job of train_step.py, or of torch_step.py for programs of PyTorch."""
    script = "torch_step.py" if package.startswith("torch") else "train_step.py"
    command = f"{script} {workload} --arms {arms} --rounds {rounds} --steps {steps}"
    name, file = f"{workload} {arms}", f"step_{workload}"
    return Job(name, f"{command} --out {{out}}", minutes, package, file)


def torch(workload: str, minutes: float, steps: int = 6) -> Job:
    """Returns a job with the programs of PyTorch in bfloat16."""
    return step(workload, "torch-cudnn torch", minutes, steps=steps, package="torch")


def peers(workload: str, minutes: float = 3) -> tuple[Job, ...]:
    """Returns the jobs of packages that may be absent, one for each package.

    All have jaxmp-bf16, so that the ratios are those of a round; its compiled program is in the
    cache.
    """
    engine = "te-bf16 te-fp8 te-fp8_delayed"
    return (
        step(workload, "jaxmp-bf16 qwix-fp8", minutes, 5, package="qwix"),
        step(workload, f"jaxmp-bf16 {engine}", minutes, 5, package="transformer_engine"),
        step(workload, "torch-fp8", minutes, 5, package="torch torchao"),
    )


LOGITS = "jaxmp-bf16 jaxmp-bf16-bfloat16"
FP8 = "jaxmp-fp8_delayed jaxmp-fp8"
SHORT = "--recipes bf16,fp32,fp16,tf32,bf16_params,fp16_params --steps 30 --seconds 45"
TORCH = "torch_step.py w1 --arms torch-cudnn --rounds 3 --steps 10 --profile --out {out}"
# The jobs of the first two calls. Those of a table are in one call, at one temperature.
CALLS = (
    (
        Job("profile w1", f"step_profile.py w1 --arms {LOGITS} --out {{out}}", 1.1),
        Job("loss", "loss_time.py --out {out}", 1.1),
        step("w1", f"{LOGITS} jaxmp-bf16-stored hand", 2.2, rounds=3, steps=10),
        Job("w1 torch-cudnn", TORCH, 1, "torch", "step_w1"),
        step("w5", LOGITS, 0.9, rounds=3, steps=5),
        step("w1s", "jaxmp-bf16 jaxmp-tf32 jaxmp-fp32", 0.8, rounds=3, steps=5),
    ),
    (
        Job("fp8 transpose", "fp8_transpose.py --out {out}", 0.7),
        Job("fp8 gain", "fp8_gain.py --run --out {out}", 0.7),
        step("w5", "jaxmp-bf16 jaxmp-fp8", 1.8, rounds=3, steps=5),
        Job("profile w5", "step_profile.py w5 --arms jaxmp-bf16 jaxmp-fp8 --out {out}", 1.2),
    ),
)
LATER = (
    step("w5", f"jaxmp-bf16 {FP8} hand", 6.5, 5),  # most of it compiles FP8
    step("w2", f"jaxmp-bf16 hand {FP8}", 4),
    torch("w1", 1.5, steps=20),
    torch("w5", 2.5),
    torch("w2", 2),
    step("w5", "jaxmp-bf16 flax-cudnn", 2, 5),
    Job("ceilings", "ceilings.py --out {out}", 0.7),
    Job("short attention", "attention_gpu.py --longest 2048 --out {out}", 2, file="attention"),
    Job("short recipes", f"gpu_smoke.py {SHORT} --out {{out}}", 4, "orbax"),
    Job("optimizer", "optimizer_time.py --out {out}", 3),
    Job("longest sequence", "longest_sequence.py --out {out}", 3.5),
    Job("attention", "attention_gpu.py --out {out}", 4),
    Job("odd attention", "attention_grid.py --run --out {out}", 2),
    Job("fp8_linear", "fp8_linear.py --out {out}", 3),
    step("w3", f"jaxmp-bf16 hand {FP8}", 4),
    torch("w3", 3),
    step("w4", f"jaxmp-bf16 hand {FP8}", 4),
    torch("w4", 3),
    *peers("w5"),
    step("w1", f"jaxmp-bf16 plain {FP8} jaxmp-bf16_params jaxmp-tf32", 4),
    step("w1", "jaxmp-bf16 flax flax-cudnn", 2),
    step("w2", "jaxmp-bf16 jaxmp-fp8_rowwise", 3.5, 5),
    step("w2", "jaxmp-bf16 flax flax-cudnn", 3, 5),
    *peers("w2"),
    step("w4", "jaxmp-bf16 flax flax-cudnn", 3),
    step("w5", "jaxmp-bf16 jaxmp-fp8_rowwise flax jaxmp-bf16_params", 3),
    step("w3b", "jaxmp-bf16 hand flax", 3),
    torch("w3b", 3),
    step("w5b", f"jaxmp-bf16 hand flax {FP8}", 5),
    torch("w5b", 3),
    step("w2b", "jaxmp-bf16 hand", 4),
    torch("w2b", 3),
    *peers("w1"),
    *peers("w4"),
    Job("recipes", "gpu_smoke.py --out {out}", 8, "orbax"),
)
JOBS = (*CALLS[0], *CALLS[1], *LATER)


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


def environment(device: str, chosen: Path) -> dict[str, str]:
    """Returns the environment of the jobs, which share compiled programs and the device's name.

    XLA writes the kernels that it chose by timing them to the directory `chosen`.
    """
    default = str(Path(tempfile.gettempdir()) / "run_gpu_cache")
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", default)
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    shared = {"JAX_COMPILATION_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch"}
    shared[gpu_record.DEVICE] = device
    # JAX would name a directory in its own cache, which does not survive the machine.
    shared["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"
    flags = f"--xla_gpu_per_fusion_autotune_cache_dir={chosen}"
    shared["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    chosen.mkdir(parents=True, exist_ok=True)
    return {**os.environ, **shared, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


# ---------------------------------------------------------------------------
# Device
# ---------------------------------------------------------------------------

DESCRIBE = """
import json, jax
device = jax.devices()[0]
print(json.dumps({
    "platform": device.platform,
    "device": device.device_kind,
    "compute_capability": str(getattr(device, "compute_capability", "unknown")),
    "runtime": device.client.platform_version.strip(),
}))
"""


def describe(toy: bool) -> dict[str, Any]:
    """Returns the record of this machine; ends the program if JAX sees no GPU."""
    facts = {"device": "cpu"}
    if not toy:
        # In a separate process, because JAX keeps the memory of the GPU.
        done = subprocess.run(
            [sys.executable, "-c", DESCRIBE], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"JAX cannot use its devices:\n{done.stderr[-3000:]}")
        facts = json.loads(done.stdout.splitlines()[-1])
        if facts["platform"] != "gpu":
            sys.exit(
                f"JAX sees no NVIDIA GPU here, only {facts['device']}. Install its plugin:\n"
                '    pip install -e ".[examples,cuda13]"\n'
                "For a rehearsal without a GPU, run\n"
                "    python benchmarks/run_gpu.py --toy --out DIRECTORY"
            )
    return {**facts, **gpu_record.environment(facts["device"]), "commit": gpu_record.commit()}


# ---------------------------------------------------------------------------
# Archive
# ---------------------------------------------------------------------------


def pack(directory: Path, archive: Path) -> None:
    """Writes all files of a directory to an archive, which replaces the previous one as a whole."""

    def write(new: Path) -> None:
        with tarfile.open(new, "w:gz") as tar:
            for file in sorted(directory.rglob("*")):
                if not file.is_file() or file.suffix == ".tmp":
                    continue
                try:
                    text = file.read_bytes()
                except FileNotFoundError:  # XLA renamed it after it was listed
                    continue
                if file.suffix == ".txt":
                    text = text[-LOG_BYTES:].replace(f"{HERE.parent}/".encode(), b"")
                member = tarfile.TarInfo(file.relative_to(directory).as_posix())
                member.size, member.mtime = len(text), int(file.stat().st_mtime)
                tar.addfile(member, io.BytesIO(text))

    gpu_record.write_whole(archive, write)


def unpack(archive: Path, directory: Path) -> None:
    """Extracts the files of an archive."""
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(directory, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        sys.exit(
            f"{archive} cannot be read ({error}). Continue from a copy of it:\n"
            f"    python benchmarks/run_gpu.py --out DIRECTORY --continue-from COPY"
        )


# ---------------------------------------------------------------------------
# Jobs
# ---------------------------------------------------------------------------


# Starts a command that Linux ends when its parent is killed, so that it does not keep the GPU.
START = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def chosen_in(directory: Path) -> Path:
    """Returns the directory of the kernels that XLA chose, for all versions of the source."""
    return directory.parent / f"xla_{directory.name.rpartition('-')[0]}"


def wait(process: Any, seconds: float, save: Callable[[], None]) -> int | None:
    """Waits for a process and saves meanwhile; returns its status, or None after `seconds`."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            return process.wait(min(left, SAVE_SECONDS))
        except subprocess.TimeoutExpired:
            save()
    return None


def run(
    job: Job, directory: Path, toy: bool, device: str, left: float, save: Callable[[], None]
) -> dict[str, Any]:
    """Runs a job for at most `left` seconds and at most its limit; returns how it ended."""
    log = directory / "logs" / f"{job.name.replace(' ', '_')}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    limit = left if toy else min(left, LIMIT * 60 * job.minutes)
    start, command = time.monotonic(), command_of(job, directory, toy)
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *command],
            stdout=file,
            stderr=file,
            env=environment(device, chosen_in(directory)),
            process_group=0,
        )
        try:
            status = wait(process, limit, save)
        finally:
            if process.poll() is None:
                # Its own processes too, which would keep the memory of the GPU.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    ended = "done" if status == 0 else "failed"
    if status is None:
        ended = "interrupted" if limit == left else "over its limit"
    row = {"ended": ended, "status": status, "seconds": round(time.monotonic() - start, 1)}
    if ended not in ("done", "interrupted"):
        row["output"] = log.read_text("utf-8", errors="replace")[-3000:]
    return {**row, "log": f"logs/{log.name}", "gpu": gpu_record.gpu_state()}


def is_done(row: dict[str, Any]) -> bool:
    return row.get("ended") == "done"


def has_failed(row: dict[str, Any]) -> bool:
    return row.get("ended") in ("failed", "over its limit")


def comes_last(row: dict[str, Any]) -> bool:
    """Returns whether a job runs after the others: it failed, or was stopped twice."""
    return has_failed(row) or row.get("attempts", 0) > 1


def missing(packages: tuple[str, ...] | list[str]) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


def run_jobs(
    jobs: list[Job], directory: Path, options: Any, device: str, save: Callable[[], None]
) -> int:
    """Runs the jobs that are not done for `options.minutes`; returns 1 if one failed."""
    file = directory / "run_gpu.json"
    state = json.loads(file.read_text("utf-8"))
    rows, failed = state["jobs"], False

    def record(job: Job, row: dict[str, Any]) -> None:
        attempts = rows.get(job.name, {}).get("attempts", 0) + (row["ended"] == "started")
        rows[job.name] = {**row, "attempts": attempts}
        gpu_record.write_json(file, state)
        save()

    end = time.monotonic() + 60 * options.minutes
    for job in sorted(jobs, key=lambda job: comes_last(rows.get(job.name, {}))):
        if is_done(rows.get(job.name, {})):
            continue
        if absent := missing(job.package.split()):
            record(job, {"ended": "skipped", "reason": f"{', '.join(absent)} is not installed"})
            continue
        left = end - time.monotonic()
        if left < (5 if options.toy else 60 * job.minutes * 0.6):
            continue
        print(f"{job.name} ...", flush=True)
        # A call that is killed leaves this entry, and the next call repeats the job.
        record(job, {"ended": "started"})
        record(job, run(job, directory, options.toy, device, left, save))
        row = rows[job.name]
        print(
            f"{job.name}: {row['ended']}, {row['seconds']} s\n{row.get('output', '')}", flush=True
        )
        failed |= has_failed(row)
    return int(failed)


def main() -> int:
    """Runs the jobs that the time allows, and returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=9.5, help="duration of this call")
    parser.add_argument("--only", nargs="+", help="words that the names of the jobs contain")
    parser.add_argument("--list", action="store_true", help="list the jobs")
    parser.add_argument("--toy", action="store_true", help="rehearse on a CPU")
    default = Path(os.environ.get(OUT) or RESULTS)
    parser.add_argument("--out", type=Path, default=default, help="directory of the archive")
    parser.add_argument("--continue-from", type=Path, help="an archive of an earlier call")
    options = parser.parse_args()
    if absent := missing(REQUIRED):
        sys.exit(
            f"Not installed: {', '.join(absent)}. Install the packages of the examples first:\n"
            '    pip install -e ".[examples,cuda13]"'
        )
    archive = options.out / ARCHIVE
    earlier = archive if archive.exists() else options.continue_from
    if options.continue_from and earlier != options.continue_from:
        sys.exit(
            f"{archive} exists, and is continued without --continue-from. To continue "
            f"{options.continue_from} instead, set another directory with --out DIRECTORY."
        )
    # The benchmark that runs is then stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = [job for job in JOBS if not options.only or any(w in job.name for w in options.only)]
    with tempfile.TemporaryDirectory(prefix="run_gpu_") as work:
        if earlier:
            unpack(earlier, Path(work))
        machine = describe(options.toy)
        key = f"{'toy-' if options.toy else ''}{gpu_record.key_of(machine)}"
        directory = Path(work) / key
        file = directory / "run_gpu.json"
        state = json.loads(file.read_text("utf-8")) if file.exists() else {"calls": [], "jobs": {}}
        print(f"{key}: {sum(map(is_done, state['jobs'].values()))} of {len(JOBS)} jobs are done")
        if options.list:
            for job in chosen:
                ended = state["jobs"].get(job.name, {}).get("ended", "")
                print(f"{job.name:100} {job.minutes:4} min  {ended}")
            return 0
        state["calls"].append({**machine, "minutes": options.minutes})
        gpu_record.write_json(file, state)
        save = lambda: pack(Path(work), archive)
        try:
            status = run_jobs(chosen, directory, options, machine["device"], save)
        finally:
            save()
        print(f"Written: {archive}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
