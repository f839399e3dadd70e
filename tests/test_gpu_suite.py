"""The GPU benchmarks: hand-written steps, rounds, what is pooled, and rehearsals on a CPU."""

import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import by_hand
import claims_cost
import gpt
import gpu_record
import llama
import longest_sequence
import peer_steps
import run_gpu
import tables
import train_step
from grids import EXPENSIVE
from processes import run_script
from rounds import Rounds
from train_step import Arm, model_of
from workload_sizes import TOY, WORKLOADS

BENCHMARKS = Path(run_gpu.__file__).parent
ROUNDING = 5e-2  # of bfloat16, relative to the largest gradient of an array


# optax mixes dtypes, and code by hand broadcasts ranks.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")


# ---------------------------------------------------------------------------
# Workloads
# ---------------------------------------------------------------------------


def test_workloads_have_the_sizes_of_the_examples():
    for size in WORKLOADS.values():
        model = model_of(size)
        if size.is_llama:
            layers = {"layers": size.layers, "max_length": size.length, "unroll": size.unroll}
            assert model == dataclasses.replace(llama.SIZES[size.size], **layers)
        else:
            named = gpt.SIZES[size.size]
            for name in ("layers", "width", "heads", "max_length"):
                assert getattr(model, name) == getattr(named, name)
            assert model.vocabulary == gpt.padded(named.vocabulary)
            assert size.hidden == 4 * size.width


def test_flops_of_a_workload_count_each_matrix_six_times_per_token():
    size = WORKLOADS["w5"]
    shapes = jax.eval_shape(
        llama.Llama(model_of(size)).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32)
    )["params"]
    matrices = sum(leaf.size for leaf in jax.tree.leaves(shapes["blocks"]) if leaf.ndim == 3)
    matrices += shapes["output_embedding"]["embedding"].size
    pairs = size.length * size.length / 2 * size.batch * size.layers
    # Per pair and layer: two matmuls of `width`, each with two operations, three times.
    assert size.flops == 6 * size.tokens * matrices + 12 * pairs * size.width


# ---------------------------------------------------------------------------
# Hand-written steps
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", ["w1", "w5"])
@EXPENSIVE
def test_the_hand_written_model_is_that_of_the_example(name, chunked):
    size = dataclasses.replace(TOY[name], unroll=False)
    model = model_of(size)
    module = llama.Llama(model) if size.is_llama else model
    params = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    tokens = jax.random.randint(jax.random.key(1), (size.batch, size.length + 1), 0, 250)
    loss = by_hand.llama_loss if size.is_llama else by_hand.gpt_loss
    own = jax.jit(jax.value_and_grad(loss(model, "xla", chunked)))(params, tokens)
    apply = lambda params: module.apply({"params": params}, tokens[:, :-1], tokens[:, 1:])
    exact = jax.jit(jax.value_and_grad(apply))(params)
    assert float(own[0]) == pytest.approx(float(exact[0]), rel=1e-3)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(exact[1]))
    for got, want in zip(*map(jax.tree.leaves, (own[1], exact[1])), strict=True):
        # The gradient of the bias of keys is zero, because a softmax ignores what all logits share.
        scale = max(np.abs(want).max(), 1e-3 * largest)
        np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDING * scale)


def test_the_hand_written_step_skips_a_gradient_that_is_not_finite():
    loss_fn = lambda params, x: jnp.sum(params["w"] * x)
    init, step = by_hand.make_training(loss_fn, gpt.make_optimizer(steps=10))
    state = init({"w": jnp.ones(4)})
    before = jax.tree.map(np.asarray, state)
    state, _ = step(state, jnp.float32([1, jnp.inf, 1, 1]))
    assert jax.tree.all(jax.tree.map(np.array_equal, before, state))


# ---------------------------------------------------------------------------
# Steps of other libraries
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w1", "w3", "w5"])
def test_the_flax_model_has_the_parameters_of_the_example(name):
    size = TOY[name]
    init, step = peer_steps.flax_training(size, None)
    (variables, _), tokens = jax.eval_shape(init), jnp.zeros((2, size.length + 1), jnp.int32)
    module = llama.Llama(model_of(size)) if size.is_llama else model_of(size)
    example = jax.eval_shape(module.init, jax.random.key(0), tokens[:, :8])["params"]
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(jnp.shape, example)
    # Linear layers and logits are bfloat16; attention has FP32 logits of four dimensions or more.
    program = str(jax.make_jaxpr(step)(jax.eval_shape(init), tokens))
    dots = re.findall(r":(\w+)\[([\d,]+)\] = dot_general\[", program)
    linear = [dtype for dtype, sizes in dots if sizes.count(",") < 3]
    assert len(linear) > 12 and set(linear) == {"bf16"}


def test_programs_that_are_not_installed_or_fail_do_not_stop_the_others(tmp_path, monkeypatch):
    def fail(size):
        raise AttributeError("module 'qwix' has no attribute 'QtRule'")

    count = lambda state, tokens: (state + 1, jnp.float32(state))
    arms = {
        "te-fp8": fail,
        "flax": fail,
        "hand": lambda size: Arm(lambda: jnp.zeros(()), count),
    }
    monkeypatch.setattr(train_step, "arms", lambda: arms)
    missing = {"te": "no_such_package"}
    monkeypatch.setattr(peer_steps, "PACKAGES", missing)
    out, options = tmp_path / "step.json", ["--rounds", "2", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", ["train_step.py", "w1", "--toy", *options, "--out", str(out)])
    assert train_step.main() == 1  # a later run may succeed
    report = json.loads(out.read_text())
    assert report["summary"]["te-fp8"] == {"skipped": "no_such_package is not installed"}
    assert report["summary"]["flax"] == {
        "failed": "AttributeError: module 'qwix' has no attribute 'QtRule'"
    }
    assert report["summary"]["hand"]["rounds"] == 2
    # The first round has three steps before the timed ones, the others have one.
    assert [row["losses"] for row in report["runs"][0]["rows"]["hand"]] == [[0, 1, 2], [0]]


@pytest.mark.parametrize(
    ("message", "status"),
    [("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte", 0), ("INTERNAL: cuDNN", 1)],
)
def test_too_little_memory_is_a_result_and_another_error_is_repeated(
    tmp_path, monkeypatch, message, status
):
    def fail(size):
        raise jax.errors.JaxRuntimeError(message)

    arms = {"flax": fail, "hand": lambda size: Arm(lambda: jnp.zeros(()), lambda s, t: (s, s))}
    monkeypatch.setattr(train_step, "arms", lambda: arms)
    out, options = tmp_path / "step.json", ["--rounds", "1", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["train_step.py", "w1", "--toy", *options, "--out", str(out)])
    assert train_step.main() == status
    assert message in json.loads(out.read_text())["summary"]["flax"]["failed"]
    del arms["hand"]
    assert train_step.main() == 1  # nothing was timed


def test_each_round_begins_with_another_program(monkeypatch):
    order = []

    def arm(name):
        step = lambda state, tokens: (state, state)
        return lambda size: Arm(lambda: order.append(name) or jnp.zeros(()), step)

    monkeypatch.setattr(train_step, "arms", lambda: {name: arm(name) for name in "abc"})
    monkeypatch.setattr(sys, "argv", ["train_step.py", "w1", "--toy", "--rounds", "4"])
    assert train_step.main() == 0
    assert "".join(order) == "abcbcacababc"


# ---------------------------------------------------------------------------
# Rounds
# ---------------------------------------------------------------------------


def environment(device="NVIDIA H200", **versions):
    return {
        "device": device,
        "versions": {"jax": "0.11.2", "source": "0", **versions},
        "date": "2026-01-01 12:00 UTC",
    }


def rounds_in(file, **settings):
    return Rounds(file, "w1", WORKLOADS["w1"], environment(**settings))


def test_ratios_are_those_of_a_round(tmp_path):
    file = tmp_path / "step.json"
    for speeds in ([(2.0, 1.0), (4.0, 2.2)], [(1.0, 0.5)]):
        rounds = rounds_in(file)
        for hand, own in speeds:
            rounds.add("hand", {"seconds": hand, "losses": [1.0]})
            rounds.add("jaxmp-bf16", {"seconds": own, "losses": [1.0]})
        rounds.write()
    rounds = rounds_in(file)
    rounds.add("torch", {"seconds": 4.0, "losses": [1.0]})
    rounds.add("torch-fp8", {"skipped": "torchao is not installed"})
    rounds.write()
    summary = json.loads(file.read_text())["summary"]
    assert summary["jaxmp-bf16"]["rate_over_hand"] == 2.0
    assert summary["jaxmp-bf16"]["range_over_hand"] == [1.8182, 2.0]
    assert summary["jaxmp-bf16"]["rounds"] == 3
    assert summary["torch"]["rate_over_hand"] == 0.5  # medians: 2 and 4 seconds
    assert "range_over_hand" not in summary["torch"]
    assert summary["torch-fp8"] == {"skipped": "torchao is not installed"}


def test_a_round_that_was_interrupted_is_compared_with_its_own_round(tmp_path):
    rounds = rounds_in(tmp_path / "step.json")
    for name, seconds in (("hand", 1), ("jaxmp-bf16", 2), ("jaxmp-bf16", 8), ("hand", 4)):
        rounds.add(name, {"seconds": seconds, "losses": [1.0]})
    rounds.add("jaxmp-bf16", {"seconds": 100, "losses": [1.0]})
    assert rounds.summary("hand")["jaxmp-bf16"]["range_over_hand"] == [0.5, 0.5]


@pytest.mark.parametrize("other", [{"device": "NVIDIA H100"}, {"jax": "0.12.0"}, {"source": "1"}])
def test_devices_and_versions_are_not_pooled(tmp_path, other):
    file = tmp_path / "step.json"
    for seconds, settings in ((1.0, {}), (9.0, other), (3.0, {})):
        rounds = rounds_in(file, **settings)
        rounds.add("hand", {"seconds": seconds, "losses": [1.0]})
        rounds.write()
    summary = json.loads(file.read_text())["summary"]
    assert summary["hand"]["rounds"] == 2 and summary["hand"]["milliseconds"] == 2000
    with pytest.raises(SystemExit, match=r"step.json has results of .*Write to another file"):
        report = {"environment": environment(**other)}
        gpu_record.write_json(file, report)
        gpu_record.earlier_report(file, environment())


# ---------------------------------------------------------------------------
# Device, clocks, versions
# ---------------------------------------------------------------------------

SMI = "NVIDIA H200, 9.0, 580.159.04, 1980, 1980, 3201, 3201, 512.30, 700.00, 61, [N/A]"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Returns a function that replaces nvidia-smi by a script."""

    def replace(script):
        monkeypatch.setattr(gpu_record, "_broken", [])
        if script:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return gpu_record.gpu_state()

    return replace


def test_each_result_has_clocks_power_and_temperature(nvidia_smi, tmp_path):
    state = nvidia_smi(f"echo '{SMI}'")
    assert state["clocks.sm"] == 1980 and state["power.draw"] == 512.3
    assert state["temperature.gpu"] == 61 and state["driver_version"] == "580.159.04"
    assert state["memory.used"] == "[N/A]"
    rounds = rounds_in(None)
    rounds.add("hand", {"seconds": 1.0, "losses": [1.0]})
    assert rounds.rows["hand"][0]["gpu"] == state


# ---------------------------------------------------------------------------
# The suite
# ---------------------------------------------------------------------------


def files_of(directory):
    """Returns name -> text of the files in the archive in a directory."""
    with tarfile.open(directory / run_gpu.ARCHIVE) as tar:
        return {member.name: tar.extractfile(member).read().decode() for member in tar}


def jobs_of(directory):
    """Returns the jobs of the only device in an archive."""
    (state,) = [text for name, text in files_of(directory).items() if name.endswith("run_gpu.json")]
    return json.loads(state)["jobs"]


def test_each_job_names_a_script_and_options_that_it_has():
    for job in run_gpu.JOBS:
        files = job.command.split()[0], "result_file.py"
        text = "".join((BENCHMARKS / name).read_text("utf-8") for name in files)
        options = [option for option in job.command.split() if option.startswith("--")]
        for option in [*options, "--toy"]:
            assert f'"{option}"' in text or f" {option.removeprefix('--')}: Annotated" in text
    names = [job.name for job in run_gpu.JOBS]
    assert len(set(names)) == len(names)
    for call, most in zip(run_gpu.CALLS, (8, 4.5), strict=True):
        assert sum(job.minutes for job in call) <= most


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Returns a function that runs these scripts, in order, as the jobs of the suite."""
    monkeypatch.setattr(run_gpu, "HERE", tmp_path)
    monkeypatch.setattr(run_gpu.signal, "signal", lambda *_: None)
    # Scripts without JAX take milliseconds. Their seconds count as minutes.
    machine = environment("cpu", jax=jax.__version__)
    monkeypatch.setattr(run_gpu, "describe", lambda toy: machine)

    def run(minutes=1.0, usual=0.0001, package="jax", out="out", options=(), **scripts):
        for name, text in scripts.items():
            (tmp_path / f"{name}.py").write_text(text)
        jobs = tuple(run_gpu.Job(name, f"{name}.py {{out}}", usual, package) for name in scripts)
        monkeypatch.setattr(run_gpu, "JOBS", jobs)
        options = ["--minutes", str(minutes), "--out", str(tmp_path / out), *options]
        monkeypatch.setattr(sys, "argv", ["run_gpu.py", *options])
        status = run_gpu.main()
        assert os.listdir(tmp_path / out) == [run_gpu.ARCHIVE]
        return status, jobs_of(tmp_path / out)

    monkeypatch.setattr(run_gpu, "LIMIT", 10_000)
    return run


APPEND = "import sys\nwith open({file!r}, 'a') as file:\n    file.write({text!r})\n"


def test_a_job_that_fails_does_not_stop_the_others_and_is_repeated_last(suite, tmp_path):
    order = tmp_path / "order.txt"
    bad = APPEND.format(file=str(order), text="bad ") + "sys.exit('no such kernel')"
    good = APPEND.format(file=str(order), text="good ")
    status, state = suite(bad=bad, good=good)
    assert status == 1 and state["bad"]["status"] == 1 and state["good"]["status"] == 0
    assert "no such kernel" in state["bad"]["output"]
    more = APPEND.format(file=str(order), text="more ")
    suite(bad=APPEND.format(file=str(order), text="repaired "), good=good, more=more)
    assert order.read_text() == "bad good more repaired "


def test_a_job_ends_at_its_limit_and_the_others_run(suite, monkeypatch):
    monkeypatch.setattr(run_gpu, "LIMIT", 2)
    status, state = suite(usual=0.01, hangs="import time; time.sleep(60)", good="")
    assert status == 1 and state["hangs"]["ended"] == "over its limit"
    assert state["good"]["ended"] == "done"


def test_a_fresh_machine_continues_an_archive(suite, tmp_path):
    write = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('1')"
    suite(first=write)
    options = ["--continue-from", str(tmp_path / "out" / run_gpu.ARCHIVE)]
    _, state = suite(out="other", options=options, first="raise SystemExit(1)", second=write)
    assert state["first"]["attempts"] == 1 and state["second"]["ended"] == "done"
    assert sum(
        name.endswith(("first.json", "second.json")) for name in files_of(tmp_path / "other")
    )
    with pytest.raises(SystemExit, match="exists, and is continued without --continue-from"):
        suite(out="other", options=options, first=write)
    (tmp_path / "other" / run_gpu.ARCHIVE).write_bytes(b"incomplete")
    with pytest.raises(SystemExit, match="cannot be read"):
        suite(out="other", first=write)


@EXPENSIVE
def test_a_stopped_job_leaves_no_process_and_runs_again(suite, tmp_path):
    pid = tmp_path / "pid"
    child = f"""
import pathlib, subprocess, time
process = subprocess.Popen(["sleep", "60"])
pathlib.Path({str(pid)!r}).write_text(str(process.pid))
time.sleep(60)
"""
    status, state = suite(0.05, child=child)
    assert status == 0 and state["child"]["ended"] == "interrupted"
    for _ in range(50):
        # Without the file, the job was stopped before it started its process.
        stat = Path(f"/proc/{pid.read_text()}/stat") if pid.exists() else pid
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("The process of the stopped job runs on.")
    _, state = suite(1, child="")
    assert state["child"]["status"] == 0


# Runs the suite with two jobs, of which the first adds a round to a file; it stops before its
# second round in the first call, and the second belongs to a package that is then absent.
SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = [{benchmarks!r}]
import run_gpu
run_gpu.HERE, run_gpu.SAVE_SECONDS = Path({here!r}), 0.1
run_gpu.JOBS = (
    run_gpu.Job("steps", "steps.py {{out}}", 1),
    run_gpu.Job("peer", "steps.py {{out}}", 1, "jax late_package"),
)
sys.exit(run_gpu.main())
"""
STEPS = """
import sys, time
from pathlib import Path
sys.path[:0] = [{benchmarks!r}]
from gpu_record import environment
from rounds import Rounds
from workload_sizes import TOY
rounds = Rounds(Path(sys.argv[1]), "w1", TOY["w1"], environment("cpu"))
for index in range(2):
    seconds = 1.0 if "A" in environment("cpu")["device"] else 5.0
    rounds.add("hand", {{"seconds": seconds, "losses": [1.0]}})
    rounds.write()
    if index == 0 and Path({hang!r}).exists():
        time.sleep(60)
"""


def test_two_devices_and_a_killed_call_pool_nothing_and_skip_nothing_for_ever(tmp_path):
    hang, here, out = tmp_path / "hang", tmp_path / "here", tmp_path / "out"
    here.mkdir()
    places = {"benchmarks": str(BENCHMARKS), "here": str(here), "hang": str(hang)}
    (here / "suite.py").write_text(SCRIPT.format(**places))
    (here / "steps.py").write_text(STEPS.format(**places))

    def start(device, **more):
        shared = {**os.environ, "JAXMP_GPU_OUT": str(out), "JAXMP_GPU_DEVICE": device, **more}
        command = [sys.executable, str(here / "suite.py"), "--toy", "--minutes", "1"]
        return subprocess.Popen(command, env=shared, stdout=subprocess.DEVNULL)

    def by_device():
        """Returns device -> (jobs, summary of the steps)."""
        states, files = {}, files_of(out)
        for name, text in files.items():
            if name.endswith("/run_gpu.json"):
                state, folder = json.loads(text), name.split("/")[0]
                steps = json.loads(files.get(f"{folder}/steps.json", "{}"))
                states[state["calls"][-1]["device"]] = state["jobs"], steps.get("summary", {})
        return states

    # The call is killed while the first job runs, after its first round.
    hang.touch()
    call = start("GPU A")
    for _ in range(300):
        time.sleep(0.1)
        if (out / run_gpu.ARCHIVE).exists() and by_device()["GPU A"][1]:
            break
    os.kill(call.pid, signal.SIGKILL)
    call.wait()
    hang.unlink()
    jobs, steps = by_device()["GPU A"]
    assert jobs["steps"]["ended"] == "started" and steps["hand"]["rounds"] == 1

    assert start("GPU B").wait() == 0  # another device
    assert start("GPU A").wait() == 0  # the interrupted job continues
    states = by_device()
    assert set(states) == {"GPU A", "GPU B"}
    for device, rounds, milliseconds in (("GPU A", 3, 1000), ("GPU B", 2, 5000)):
        jobs, steps = states[device]
        assert jobs["steps"]["ended"] == "done" and jobs["peer"]["ended"] == "skipped"
        assert jobs["peer"]["reason"] == "late_package is not installed"
        assert steps["hand"]["rounds"] == rounds
        assert steps["hand"]["range"] == [milliseconds, milliseconds]

    # The package of the second job is installed later.
    (here / "late_package.py").touch()
    assert start("GPU A", PYTHONPATH=str(here)).wait() == 0
    jobs, steps = by_device()["GPU A"]
    assert jobs["peer"]["ended"] == "done" and jobs["peer"]["attempts"] == 1
    assert steps["hand"]["rounds"] == 3  # a job that is done does not run again
    assert by_device()["GPU B"][0]["peer"]["ended"] == "skipped"


def test_a_missing_package_is_named_before_a_job_starts(suite, monkeypatch):
    monkeypatch.setattr(run_gpu, "REQUIRED", ("jax", "no_such_package"))
    with pytest.raises(SystemExit, match="Not installed: no_such_package") as error:
        suite(job="raise SystemExit(1)")
    assert "pip install" in str(error.value)


def test_the_search_for_the_longest_sequence(monkeypatch):
    for fits in (4096, 8192, 65536, 2**20):
        lengths = []

        def trains(length, *_, fits=fits, lengths=lengths):
            lengths.append(length)
            return "" if length <= fits else "RESOURCE_EXHAUSTED"

        monkeypatch.setattr(longest_sequence, "trains", trains)
        row = longest_sequence.longest("plain", False, toy=False)
        assert row["longest"] == min(fits, longest_sequence.LIMIT)
        assert bool(row["next_failed"]) == (fits < longest_sequence.LIMIT)
        assert len(lengths) == len(set(lengths))


@pytest.mark.slow
@pytest.mark.parametrize("job", ["ceilings", "optimizer", "w5 jaxmp-bf16 jaxmp-fp8_delayed"])
def test_the_suite_rehearses(job, tmp_path):
    done = run_script(BENCHMARKS / "run_gpu.py", "--toy", "--out", str(tmp_path), "--only", job)
    files = files_of(tmp_path)
    assert done.returncode == 0, (done.stdout, done.stderr, files)
    reports = [json.loads(text) for name, text in files.items() if name.endswith(".json")]
    (report,) = [report for report in reports if "calls" not in report]
    if job.startswith("w5"):
        for arm in ("jaxmp-bf16", "jaxmp-fp8", "jaxmp-fp8_delayed", "hand"):
            assert report["summary"][arm]["rounds"] == 2
        losses = [report["summary"][arm]["first_loss"] for arm in ("jaxmp-bf16", "hand")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    if job == "optimizer":
        (model,) = report["models"]
        assert all(row["milliseconds"] > 0 for row in model["rows"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("name", ["w1", "w5"])
def test_the_step_in_pytorch_rehearses(name, tmp_path):
    out = tmp_path / "step.json"
    script = str(BENCHMARKS / "torch_step.py")
    options = ["--toy", "--rounds", "1", "--steps", "1", "--out", str(out)]
    subprocess.run([sys.executable, script, name, *options], check=True)
    assert json.loads(out.read_text())["summary"]["torch"]["first_loss"] > 1


# ---------------------------------------------------------------------------
# Pages
# ---------------------------------------------------------------------------


def archive_of(directory, **reports):
    """Writes an archive with these reports, as `device__file`."""
    files = directory / "files"
    for name, report in reports.items():
        device, _, file = name.partition("__")
        gpu_record.write_json(files / device / f"{file}.json", report)
    run_gpu.pack(files, directory / "gpu" / run_gpu.ARCHIVE)


def test_pages_have_a_table_for_each_device_and_none_of_rehearsals(tmp_path, monkeypatch):
    reports = {}
    for key, device, ratio in (("a", "NVIDIA H200", 1.4), ("b", "NVIDIA H100", 1.2)):
        rounds = rounds_in(None, device=device)
        rounds.add("jaxmp-bf16", {"seconds": ratio, "losses": [1.0]})
        rounds.add("jaxmp-fp8", {"seconds": 1.0, "losses": [1.0]})
        rounds.add("te-fp8", {"skipped": "transformer_engine is not installed"})
        rounds.write()
        reports[f"{key}__step_w1"] = rounds.report
        speed = {name: {"median": ratio} for name in ("jaxmp_tflops", "direct_tflops", "ratio")}
        row = {"pass": "forward", "causal": True, "length": 2048, "heads": [16, 16, 64], **speed}
        reports[f"{key}__attention"] = {"environment": environment(device), "speed": [row]}
        results = [
            {"recipe": name, "tokens_per_second": {"median": speed}}
            for name, speed in (("fp32", 1.0), ("tf32", 2.0), ("bf16", 4.0 * ratio))
        ]
        reports[f"{key}__recipes"] = {"environment": environment(device), "results": results}
    reports |= {f"toy-{name}": report for name, report in reports.items()}
    archive_of(tmp_path, **reports)
    for module in (tables, claims_cost):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    page = tables.gpu_section()
    for device, ratio in (("NVIDIA H200", 1.4), ("NVIDIA H100", 1.2)):
        assert page.count(f"w1: gpt2, 12 layers, 64 x 1,024 tokens, on {device}, JAX 0.11.2") == 1
        assert [device, "w1", "jaxmp-fp8", f"{ratio:.2f}"] in claims_cost.fp8_speed().table
        assert f"On {device}, at least {ratio:.2f}" in claims_cost.flash_speed().finding
        finding = claims_cost.mixed_precision_speed().finding
        assert f"On {device}, `bf16` trains {2 * ratio:.2f} times as fast as `tf32`" in finding
    assert len(claims_cost.fp8_speed().table) == 2
    assert "1.40 times as fast as BF16, on NVIDIA H200" in claims_cost.fp8_speed().finding
    skipped = [line for line in page.splitlines() if line.startswith("| te-fp8")]
    assert [line.count("|") for line in skipped] == [7, 7]
