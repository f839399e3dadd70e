"""The GPU benchmarks: hand-written steps, the rounds of a comparison, and a rehearsal on a CPU."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import by_hand
import gpt
import llama
import longest_sequence
import peer_steps
import run_gpu
import train_step
from grids import EXPENSIVE
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


@pytest.mark.parametrize(
    ("name", "chunked"),
    [
        ("w1", True),
        ("w5", False),
        pytest.param("w1", False, marks=EXPENSIVE),
        pytest.param("w5", True, marks=EXPENSIVE),
    ],
)
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
    for got, want in zip(*map(jax.tree.leaves, (own[1], exact[1])), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDING * np.abs(want).max())


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
    assert train_step.main() == 0
    report = json.loads(out.read_text())
    assert report["summary"]["te-fp8"] == {"skipped": "no_such_package is not installed"}
    assert report["summary"]["flax"] == {
        "failed": "AttributeError: module 'qwix' has no attribute 'QtRule'"
    }
    assert report["summary"]["hand"]["rounds"] == 2
    # The first round has three steps before the timed ones, the others have one.
    assert [row["losses"] for row in report["runs"][0]["rows"]["hand"]] == [[0, 1, 2], [0]]
    del arms["hand"]
    assert train_step.main() == 1


def test_maxtext_runs_only_workloads_with_the_shape_of_llama(monkeypatch):
    monkeypatch.setattr(peer_steps, "PACKAGES", {})
    assert peer_steps.refusal("maxtext", TOY["w1"]) == "only for workloads with the shape of Llama"
    assert peer_steps.refusal("maxtext", TOY["w5"]) is None


# ---------------------------------------------------------------------------
# Rounds
# ---------------------------------------------------------------------------


def test_ratios_are_those_of_a_round(tmp_path):
    file = tmp_path / "step.json"
    for speeds in ([(2.0, 1.0), (4.0, 2.2)], [(1.0, 0.5)]):
        rounds = Rounds(file, "w1", WORKLOADS["w1"])
        for hand, own in speeds:
            rounds.add("hand", {"seconds": hand, "losses": [1.0]})
            rounds.add("jaxmp-bf16", {"seconds": own, "losses": [1.0]})
        rounds.write()
    rounds = Rounds(file, "w1", WORKLOADS["w1"])
    rounds.add("torch", {"seconds": 4.0, "losses": [1.0]})
    rounds.add("torch-fp8", {"skipped": "torchao is not installed"})
    rounds.write()
    summary = json.loads(file.read_text())["summary"]
    assert summary["jaxmp-bf16"]["rate_over_hand"] == 2.0
    assert summary["jaxmp-bf16"]["rounds"] == 3
    assert summary["torch"]["rate_over_hand"] == 0.5  # medians: 2 and 4 seconds
    assert summary["torch-fp8"] == {"skipped": "torchao is not installed"}


# ---------------------------------------------------------------------------
# The suite
# ---------------------------------------------------------------------------


def run_suite(*options):
    command = [sys.executable, str(BENCHMARKS / "run_gpu.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_job_names_a_script_and_options_that_it_has():
    for job in run_gpu.JOBS:
        script = job.command.split()[0]
        text = (BENCHMARKS / script).read_text("utf-8")
        options = [option for option in job.command.split() if option.startswith("--")]
        for option in [*options, "--toy"]:
            assert f'"{option}"' in text or f" {option.removeprefix('--')}: Annotated" in text
    names = [job.name for job in run_gpu.JOBS]
    assert len(set(names)) == len(names)
    minutes = [job.minutes for job in run_gpu.JOBS]
    assert sum(minutes[:4]) <= 9.5  # the first slice answers the three questions
    assert sum(minutes[: len(run_gpu.FIRST)]) <= 28.5  # three slices


def test_a_job_is_resumed_or_skipped_with_the_reason(tmp_path, monkeypatch):
    jobs = (
        run_gpu.Job("missing", "none.py --out {out}", 1, "no_such_package"),
        run_gpu.Job("ceilings", "ceilings.py --out {out}", 0.01),
    )
    monkeypatch.setattr(run_gpu, "JOBS", jobs)
    ran = []
    monkeypatch.setattr(
        run_gpu.subprocess, "Popen", lambda command, **_: ran.append(command) or _Process()
    )
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["run_gpu.py", "--toy", "--out", str(tmp_path)])
        assert run_gpu.main() == 0
    assert len(ran) == 1 and ran[0][-1] == "--toy"
    state = json.loads((tmp_path / "run_gpu.json").read_text())
    assert state["missing"] == {"skipped": "no_such_package is not installed"}
    assert state["ceilings"]["status"] == 0


class _Process:
    def wait(self, timeout=None):
        return 0

    def poll(self):
        return 0


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Returns a function that runs these scripts, in order, as the jobs of the suite."""
    monkeypatch.setattr(run_gpu, "HERE", tmp_path)
    monkeypatch.setattr(run_gpu.signal, "signal", lambda *_: None)
    out = tmp_path / "out"

    def run(minutes, **scripts):
        for name, text in scripts.items():
            (tmp_path / f"{name}.py").write_text(text)
        jobs = tuple(run_gpu.Job(name, f"{name}.py {{out}}", 0) for name in scripts)
        monkeypatch.setattr(run_gpu, "JOBS", jobs)
        options = ["--minutes", str(minutes), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["run_gpu.py", *options])
        status = run_gpu.main()
        return status, json.loads((out / "run_gpu.json").read_text())

    return run


APPEND = "import sys\nwith open({file!r}, 'a') as file:\n    file.write({text!r})\n"


def test_a_job_that_fails_does_not_stop_the_others_and_is_repeated_last(suite, tmp_path):
    order = tmp_path / "order.txt"
    bad = APPEND.format(file=str(order), text="bad ") + "sys.exit(3)"
    good = APPEND.format(file=str(order), text="good ")
    status, state = suite(1, bad=bad, good=good)
    assert status == 1 and state["bad"]["status"] == 3 and state["good"]["status"] == 0
    more = APPEND.format(file=str(order), text="more ")
    suite(1, bad=APPEND.format(file=str(order), text="repaired "), good=good, more=more)
    assert order.read_text() == "bad good more repaired "


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
    assert status == 0 and state["child"]["status"] is None
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


def test_a_missing_package_is_named_before_a_job_starts(suite, monkeypatch):
    monkeypatch.setattr(run_gpu, "REQUIRED", ("jax", "no_such_package"))
    with pytest.raises(SystemExit, match="Not installed: no_such_package") as error:
        suite(1, job="raise SystemExit(1)")
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
@pytest.mark.parametrize("job", ["ceilings", "w5 jaxmp-bf16 jaxmp-fp8_delayed"])
def test_the_suite_rehearses(job, tmp_path):
    done = run_suite("--toy", "--out", str(tmp_path), "--only", job)
    logs = [log.read_text() for log in (tmp_path / "logs").glob("*")]
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    (file,) = set(tmp_path.glob("*.json")) - {tmp_path / "run_gpu.json"}
    report = json.loads(file.read_text())
    if job.startswith("w5"):
        for arm in ("jaxmp-bf16", "jaxmp-fp8", "jaxmp-fp8_delayed", "hand"):
            assert report["summary"][arm]["rounds"] == 2
        losses = [report["summary"][arm]["first_loss"] for arm in ("jaxmp-bf16", "hand")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("name", ["w1", "w5"])
def test_the_step_in_pytorch_rehearses(name, tmp_path):
    out = tmp_path / "step.json"
    script = str(BENCHMARKS / "torch_step.py")
    options = ["--toy", "--rounds", "1", "--steps", "1", "--out", str(out)]
    subprocess.run([sys.executable, script, name, *options], check=True)
    assert json.loads(out.read_text())["summary"]["torch"]["first_loss"] > 1
