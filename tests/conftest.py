"""Strict settings for all tests, cheap compilation, and shared fixtures.

Implicit dtype promotion and implicit rank promotion raise errors, there is more than one CPU
device, and warnings are errors (see pyproject.toml). JAX's check for leaked tracers disables its
trace caches and makes the tests five times slower. Only tests of code that stores objects while
tracing (the adapters, the train step) use it: `@pytest.mark.usefixtures("check_leaks")`. If Flax,
optax or JAX violates one of these settings, the test relaxes it locally and names the library.

JAX may drop compiled functions from its caches in a long run, so that a function that was traced
once has a `_cache_size()` of at most 1.
"""

import gc
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import jax
import pytest

from gpu_compiler import needs_compiler
from grids import mark_expensive_cases

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])

# Most of the time of a fast test is compilation. Without optimizations, and on JAX 0.10 without the
# fusion emitters, programs compile two to four times faster. Workers use one core each, so they do
# not divide the generation of code. The scripts that tests start inherit these settings.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
jax.config.update("jax_disable_most_optimizations", True)
XLA_FLAGS = "--xla_force_host_platform_device_count=4 --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"
# The flags of the user come last and win. A worker of pytest-xdist inherits all of them.
if XLA_FLAGS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()

# The first process to read this file creates a cache of compiled programs, which the workers and
# the scripts that tests start inherit, and removes it at its end. The steps of `.ci/run` share one.
CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    CACHE = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxmp-tests-")
for name, value in {
    "jax_compilation_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"],
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}.items():
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Fewer and larger collections of garbage: each one also calls JAX.
gc.set_threshold(20_000, 20, 20)

hypothesis.settings.register_profile("jaxmp", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("jaxmp")


# Files that depend on the versions of JAX and Flax, and are therefore tested on the oldest too. Of
# `jaxmp.validate`, that is the capture of outputs; the rest uses the public API alone. The oldest
# runs no expensive tests, and of the others the cases in which the value of a parameter is new: the
# newest runs its combinations.
VERSION_SENSITIVE = {
    # Private names of JAX and Flax, signatures that jaxmp copies, and what an import loads.
    *("attention", "attention_cudnn", "docs", "frame", "leaks", "ops"),
    # The Flax adapters, which intercept modules and subclass layers.
    *("boundary", "fp8_models", "fp8_nnx", "inputs", "linen", "linen_transforms", "masks"),
    *("models", "nnx", "nnx_gradients", "nnx_policies", "register_layer", "share"),
    *("fp32_outputs", "train_state"),
    # Interpreters and readers of jaxprs, whose primitives change between versions.
    *("autocast", "autocast_libraries", "autocast_linalg", "explain_autocast", "fp8_autocast"),
    *("audit", "audit_compiled", "audit_promotions", "audit_report", "audit_sharding"),
    *("audit_plants", "audit_steps", "hlo"),
    *("gathers", "nonfinite", "parity", "programs", "validate_capture", "validate_trials"),
    # Mapped axes, custom derivatives and extended dtypes.
    *("device", "fp8_dot_general", "fp8_state", "fp32_gradients", "gradients", "losses"),
    *("optim", "roles", "targets"),
}
# Files that test scripts of `benchmarks/` and their recorded results: they run with the slow tests,
# without optimizations of XLA. `test_benchmarks.py` checks that the scripts fit the package.
OF_BENCHMARKS = {
    *("claims", "field_report", "flax_suites", "gpu_suite", "overhead", "program", "scripts")
}


# Files whose programs are whole trainings, or which test the warnings about their parts. The others
# use the optimizer, the gradient or the model of a training alone.
WHOLE = {"docs", "examples", "hints"}
ABOUT_PARTS = ("The gradient of a float16 model is", "The recipe of the optimizer computes")


def pytest_ignore_collect(collection_path, config):
    # Two legs import half of the files at most.
    name, leg = collection_path.stem.removeprefix("test_"), config.option.markexpr
    if collection_path.match("test_*.py") and leg in ("versions", "slow and not exhaustive"):
        has_slow = name in OF_BENCHMARKS or "slow" in collection_path.read_text("utf-8")
        return None if (has_slow if leg.startswith("slow") else name in VERSION_SENSITIVE) else True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    mark_expensive_cases(items, is_complete=not any("::" in name for name in config.args))
    seen = set()
    for item in items:
        name = item.path.stem.removeprefix("test_")
        marks = {mark.name for mark in item.iter_markers()}
        if name in VERSION_SENSITIVE and not marks & {"slow", "expensive"}:
            params = item.callspec.params if hasattr(item, "callspec") else {"": None}
            test = item.nodeid.partition("[")[0]
            values = {(test, key, id(value)) for key, value in params.items()}
            if values - seen:
                item.add_marker("versions")
            seen |= values
        if name not in WHOLE:
            for message in ABOUT_PARTS:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))
        if name in OF_BENCHMARKS and "slow" not in marks:
            item.add_marker("slow")
            item.add_marker("expensive")
        if needs_compiler.mark in item.iter_markers("skipif"):
            item.add_marker("gpu_compiler")


def pytest_collection_finish(session):
    # The trials of fixes follow the references of a test file, which would lead through the loader
    # of pytest to all collected tests.
    for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
        module.__loader__ = module.__spec__.loader = None


def pytest_unconfigure():
    # Hints about gradients that the garbage collector has not found.
    warnings.simplefilter("ignore")
    if CACHE is not None:
        shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def compile_cheaply(request):
    """Disables the optimizations of XLA, except in slow tests that are no case of a faster one."""
    marks = {mark.name for mark in request.node.iter_markers()}
    is_optimized = "slow" in marks and "expensive" not in marks
    jax.config.update("jax_disable_most_optimizations", not is_optimized)


@pytest.fixture
def standard_promotion():
    """Enables standard dtype promotion, for tests of code that promotes implicitly."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def rank_promotion():
    """Allows rank promotion, for tests of code that broadcasts implicitly."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def command(capsys):
    """Returns a function that runs `jaxmp`; it returns (exit status, output, error output)."""
    from jaxmp._tools import cli  # noqa: PLC0415  (half a second, which most files do not need)

    def command(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([*map(str, arguments)])
        return stop.value.code, *capsys.readouterr()

    return command


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Changes to an empty directory; returns a function that writes a file and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="my.toml"):
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write


@pytest.fixture
def card(monkeypatch):
    """Returns a function that replaces the devices of JAX by a GPU of a compute capability."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def card(capability):
        gpu = SimpleNamespace(device_kind="NVIDIA A100-SXM4-80GB", compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda **_: [gpu])

    return card


@pytest.fixture
def getkey():
    """Returns a function that returns a new PRNG key at each call, the same ones in every run."""
    key = jax.random.key(0)

    def split():
        nonlocal key
        key, fresh = jax.random.split(key)
        return fresh

    return split


@pytest.fixture(autouse=True)
def default_share(monkeypatch):
    """Removes the share of GPU memory that some benchmarks set when they are imported."""
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)


@pytest.fixture(autouse=True, scope="module")
def freeze_heap():
    """Exempts live objects of earlier files from garbage collection, whose time grows with them."""
    with warnings.catch_warnings():
        # Gradients of Flax NNX models cause warnings when they are collected.
        warnings.simplefilter("ignore")
        gc.collect()
    gc.freeze()


@pytest.fixture
def check_leaks():
    """Makes leaked tracers errors in the tests that use this fixture.

    JAX searches the heap for tracers after every trace. Those of the test are never frozen.
    """
    gc.collect()
    gc.freeze()
    with jax.checking_leaks():
        yield
