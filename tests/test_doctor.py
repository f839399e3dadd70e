"""`jaxmp doctor`: recipes and problems of machines that are described, and of this one."""

import json

import jax
import pytest

import jaxmp
from jaxmp import _doctor
from jaxmp._doctor import Machine, report_of
from jaxmp.cli import main

VERSIONS = {"jax": "0.12.0", "jaxlib": "0.12.0.1"}
CUDA13 = {"jax-cuda13-plugin": "0.12.0", "jax-cuda13-pjrt": "0.12.0.1"}
# A healthy machine with an H100.
H100 = Machine(
    VERSIONS | CUDA13,
    {"NVIDIA H100 80GB HBM3": 8},
    "gpu",
    (9, 0),
    91200,
    ("NVIDIA H100 80GB HBM3",) * 8,
    "580.65.06",
)


@pytest.mark.parametrize(
    ("capability", "recipe", "available"),
    [
        ((7, 5), "fp16", set()),
        ((8, 0), "bf16", {"attention"}),
        ((8, 9), "bf16", {"attention", "FP8"}),
        ((9, 0), "bf16", {"attention", "FP8"}),
        ((10, 0), "bf16", {"attention", "FP8", "MX"}),
    ],
)
def test_the_recipe_and_the_kernels_follow_the_compute_capability(capability, recipe, available):
    report = report_of(H100._replace(capability=capability))
    assert report.recipe == recipe
    assert f"compute capability {capability[0]}.{capability[1]}" in report.reason
    for name in ("attention", "FP8", "MX"):
        (text,) = (text for feature, text in report.features.items() if name in feature)
        assert (text == "available") == (name in available), text
    assert report.problems == ()
    assert "No problem was found." in str(report)


PROBLEMS = {
    "driver too old for all": (H100._replace(driver="470.82"), "too old for CUDA 13", "nvidia-smi"),
    "driver too old for CUDA 13": (
        H100._replace(driver="550.54", platform="cpu"),
        "the plugin for CUDA 12",
        'pip install "jax[cuda12]"',
    ),
    "plugin of another version": (
        H100._replace(versions=H100.versions | {"jax-cuda13-plugin": "0.11.2"}),
        "jax-cuda13-plugin is 0.11.2, and jaxlib is 0.12.0.1",
        'pip install --upgrade "jax[cuda13]==0.12.0"',
    ),
    "half of a plugin": (
        H100._replace(versions=VERSIONS | {"jax-cuda13-plugin": "0.12.0"}),
        "jax-cuda13-pjrt is not installed",
        'pip install --upgrade "jax[cuda13]==0.12.0"',
    ),
    "both plugins": (
        H100._replace(
            versions=H100.versions | {"jax-cuda12-plugin": "0.12.0", "jax-cuda12-pjrt": "0.12.0"}
        ),
        "both installed",
        "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt",
    ),
    "no plugin": (
        H100._replace(versions=VERSIONS, platform="cpu"),
        "its plugin is not installed",
        'pip install --upgrade "jax[cuda13]"',
    ),
    "a CPU was chosen": (
        H100._replace(platform="cpu", environment={"JAX_PLATFORMS": "cpu"}),
        "JAX_PLATFORMS is 'cpu'",
        "unset JAX_PLATFORMS",
    ),
    "a plugin that fails": (
        H100._replace(platform="cpu"),
        "although its plugin is installed",
        'pip install --upgrade "jax[cuda13]"',
    ),
    "no cuDNN": (
        H100._replace(cudnn=None),
        "JAX finds no cuDNN",
        'pip install --upgrade "jax[cuda13]"',
    ),
    "another CUDA": (
        H100._replace(environment={"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}),
        "LD_LIBRARY_PATH names a folder of CUDA",
        "unset LD_LIBRARY_PATH",
    ),
    "no device": (
        H100._replace(platform="cpu", failure="Unknown backend tpu"),
        "Unknown backend tpu",
        "unset JAX_PLATFORMS",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_has_the_command_that_repairs_it(name):
    machine, message, command = PROBLEMS[name]
    (problem,) = report_of(machine).problems
    assert message in problem.message
    assert command in problem.command
    assert problem.command in str(report_of(machine))


def test_a_machine_without_a_gpu_has_no_problem_with_the_compiler_for_gpus():
    report = report_of(Machine(VERSIONS | CUDA13, {"cpu": 1}, "cpu"))
    assert report.problems == ()
    assert "JAX computes on a CPU" in report.features["FP8 matmuls"]


def test_the_report_describes_this_machine():
    machine = jaxmp.doctor().machine
    assert machine.versions["jax"] == jax.__version__
    assert sum(machine.devices.values()) == jax.device_count()
    assert machine.platform == jax.default_backend()


def test_nvidia_smi_is_read(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'NVIDIA L4, 580.65.06'\necho 'NVIDIA L4, 580.65.06'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    _doctor._nvidia.cache_clear()
    assert _doctor._nvidia() == (("NVIDIA L4", "NVIDIA L4"), "580.65.06")
    command.write_text("#!/bin/sh\nexit 9\n")
    _doctor._nvidia.cache_clear()
    assert _doctor._nvidia() == ((), "")
    _doctor._nvidia.cache_clear()


def test_the_command_prints_the_report_and_its_json(monkeypatch, capsys):
    machine = H100._replace(cudnn=None)
    monkeypatch.setattr(_doctor, "read_machine", lambda: machine)
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    assert stop.value.code == 1
    assert "JAX finds no cuDNN" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["doctor", "--json", "-"])
    report = json.loads(capsys.readouterr().out)
    assert report["recipe"] == "bf16"
    assert report["machine"]["driver"] == "580.65.06"
    assert report["problems"][0]["message"] == "JAX finds no cuDNN."
