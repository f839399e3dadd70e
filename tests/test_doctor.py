"""`jaxmp doctor`: recipes and problems of machines that are described, and of this one."""

import json

import jax
import pytest

import jaxmp
from jaxmp._core._targets import targets
from jaxmp._tools.plan import _doctor
from jaxmp._tools.plan._doctor import Machine, report_of

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


UNUSED = H100._replace(platform="cpu")
UPGRADE = 'pip install --upgrade "jax[cuda13]"'


def gpu(name, capability):
    return H100._replace(devices={name: 1}, gpus=(name,), capability=capability)


def tpu(kind, libtpu="0.0.50"):
    return Machine(VERSIONS | {"libtpu": libtpu}, {kind: 4}, "tpu", libtpu="0.0.50")


# Machine -> chip of the table, recipe, kernels that are available.
MACHINES = {
    "T4": (gpu("Tesla T4", (7, 5)), "t4", "fp16", set()),
    "A100": (gpu("NVIDIA A100-SXM4-40GB", (8, 0)), "a100-40", "bf16", {"attention"}),
    "L4": (gpu("NVIDIA L4", (8, 9)), "l4", "bf16", {"attention", "FP8"}),
    "H100": (H100, "h100", "bf16", {"attention", "FP8"}),
    "B200": (gpu("NVIDIA B200", (10, 0)), "b200", "bf16", {"attention", "FP8", "MX"}),
    # Not in the table: the compute capability decides.
    "RTX A6000": (gpu("NVIDIA RTX A6000", (8, 6)), "", "bf16", {"attention"}),
    "MIG": (gpu("NVIDIA H100 MIG 1g.10gb", (9, 0)), "", "bf16", {"attention", "FP8"}),
    "RTX 2080": (gpu("NVIDIA GeForce RTX 2080", (7, 5)), "", "fp16", set()),
    "v5e": (tpu("TPU v5 lite"), "v5e", "bf16", {"attention"}),
    "TPU7x": (tpu("TPU7x"), "tpu7x", "bf16", {"attention", "FP8"}),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_recipe_and_the_kernels_follow_the_chip(name):
    machine, target, recipe, available = MACHINES[name]
    report = report_of(machine)
    assert (report.target, report.recipe) == (target, recipe)
    assert (targets()[target].kind if target else "compute capability") in report.reason
    for feature, text in report.features.items():
        assert (text == "available") == any(word in feature for word in available), feature
    assert report.problems == ()
    assert "No problem was found." in str(report)
    assert 'compiled for: none: pip install "jaxmp[aot]"' in str(report)
    assert (f"target '{target}': " in str(report)) == bool(target)


def test_the_recipe_is_that_of_a_gpu_that_jax_does_not_use():
    report = report_of(gpu("Tesla V100-SXM2-32GB", None)._replace(platform="cpu"))
    assert (report.target, report.recipe) == ("v100", "fp16")
    assert "not in bfloat16" in report.reason
    # It has no Tensor Cores.
    assert report_of(gpu("Tesla P100-PCIE-16GB", (6, 0))).recipe == "fp32"
    # The chip multiplies other formats of FP8.
    assert "float8_e4m3fn" in report_of(gpu("AMD Instinct MI300X", None)).reason


PROBLEMS = {
    "driver too old for all": (H100._replace(driver="470.82"), "too old for CUDA 13", "nvidia-smi"),
    "driver too old for CUDA 13": (
        UNUSED._replace(driver="550.54"),
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
    "no plugin": (UNUSED._replace(versions=VERSIONS), "its plugin is not installed", UPGRADE),
    "a GPU without support of CUDA 13": (
        gpu("Tesla V100-SXM2-32GB", (7, 0)),
        "CUDA 13 does not support compute capability 7.0",
        'pip uninstall jax-cuda13-plugin jax-cuda13-pjrt; pip install "jax[cuda12]"',
    ),
    "libtpu of another version": (
        tpu("TPU v6 lite", "0.0.42"),
        "libtpu is 0.0.42, and jax 0.12.0 requires 0.0.50",
        'pip install "jax[tpu]==0.12.0"',
    ),
    "a CPU was chosen": (
        UNUSED._replace(environment={"JAX_PLATFORMS": "cpu"}),
        "JAX_PLATFORMS is 'cpu'",
        "unset JAX_PLATFORMS",
    ),
    "a plugin that fails": (UNUSED, "although its plugin is installed", UPGRADE),
    "no cuDNN": (H100._replace(cudnn=None), "JAX finds no cuDNN", UPGRADE),
    "another CUDA": (
        H100._replace(environment={"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}),
        "LD_LIBRARY_PATH names a folder of CUDA",
        "unset LD_LIBRARY_PATH",
    ),
    "a share in percent": (
        H100._replace(environment={"XLA_CLIENT_MEM_FRACTION": "95"}),
        "XLA_CLIENT_MEM_FRACTION='95' is not a share of the memory",
        "export XLA_CLIENT_MEM_FRACTION=0.95",
    ),
    "no device": (
        UNUSED._replace(failure="Unknown backend tpu"),
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
    assert not machine.failure or "JAX computes on" not in str(report_of(machine))


def test_the_compiler_for_gpus_is_no_problem_without_a_gpu_and_its_messages_are_explained():
    machine = Machine(VERSIONS | CUDA13, {"cpu": 1}, "cpu")
    report = report_of(machine)
    assert report.problems == ()
    assert "JAX computes on a CPU" in report.features["FP8 matmuls"]
    assert "JAX_PLATFORMS=cpu" in str(report)
    for other in (machine._replace(environment={"JAX_PLATFORMS": "cpu"}), H100):
        assert "cuFFT" not in str(report_of(other))


def test_the_report_describes_this_machine():
    machine = jaxmp.doctor().machine
    assert machine.versions["jax"] == jax.__version__ and machine.libtpu.startswith("0.0.")
    assert sum(machine.devices.values()) == jax.device_count()
    assert machine.platform == jax.default_backend()


def test_a_platform_that_does_not_start_is_a_problem(monkeypatch):
    def fail():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setattr(jax, "local_devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert "JAX_PLATFORMS='cuda'" in _doctor.read_machine().failure


def test_nvidia_smi_is_read(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    rows = "NVIDIA L4, 580.65.06, 23034, 2040", "NVIDIA L4, 580.65.06, [N/A], [N/A]"
    command.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    _doctor._nvidia.cache_clear()
    facts = "580.65.06", 23034 * 2**20, 2.04
    assert (*_doctor._nvidia().values(),) == (("NVIDIA L4", "NVIDIA L4"), *facts)
    command.write_text(f"#!/bin/sh\necho '{rows[1]}'\n")
    _doctor._nvidia.cache_clear()
    assert (*_doctor._nvidia().values(),) == (("NVIDIA L4",), "580.65.06", 0, 0.0)
    command.write_text("#!/bin/sh\nexit 9\n")
    _doctor._nvidia.cache_clear()
    assert (*_doctor._nvidia().values(),) == ((), "", 0, 0.0)
    _doctor._nvidia.cache_clear()


def test_a_short_name_is_one_of_several_chips_until_memory_and_clock_tell_them_apart():
    machine = gpu("NVIDIA H100", (9, 0))
    report = report_of(machine)
    assert (report.target, report.recipe) == ("", "bf16")
    text = str(report)
    assert "target: one of 'h100' (84.9 GB at 3,352 GB/s, 989 TFLOP/s" in text
    assert "'h100-pcie' (84.9 GB at 2,039 GB/s, 756 TFLOP/s" in text and "'h100-nvl'" in text
    assert [chip.name for chip in machine._replace(total=81559 * 2**20).chips] == [
        "h100",
        "h100-pcie",
    ]
    assert report_of(machine._replace(total=81559 * 2**20, clock=1.755)).target == "h100-pcie"
    assert report_of(machine._replace(total=95830 * 2**20)).target == "h100-nvl"
    unknown = report_of(gpu("NVIDIA H800", (9, 0)))
    assert "target: not in the table of chips; describe it" in str(unknown)


def test_the_command_prints_the_report_and_its_json(monkeypatch, command):
    machine = H100._replace(cudnn=None)
    monkeypatch.setattr(_doctor, "read_machine", lambda: machine)
    code, out, _ = command("doctor")
    assert code == 1 and "JAX finds no cuDNN" in out
    report = json.loads(command("doctor", "--json", "-")[1])
    assert report["recipe"] == "bf16"
    assert report["machine"]["driver"] == "580.65.06"
    assert report["problems"][0]["message"] == "JAX finds no cuDNN."


def test_measured_memory_and_compilers_are_printed():
    machine = H100._replace(memory=63_500_000_000, compilers=("NVIDIA's GPUs", "TPUs"))
    text = str(report_of(machine))
    assert "memory that JAX may allocate: 63.5 GB" in text
    assert "programs can be compiled for: NVIDIA's GPUs and TPUs" in text
    assert isinstance(_doctor.read_machine().compilers, tuple)
