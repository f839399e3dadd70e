"""The table of chips, and the target of a program."""

import functools
import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from gpu_compiler import needs_compiler, needs_libtpu
from grids import EXPENSIVE
from jaxmp._core import _compat
from jaxmp._core._targets import (
    BFLOAT16_MATMULS,
    FP8_MATMULS,
    find_target,
    get_target,
    targets,
)
from jaxmp._tools.audit import _compile
from jaxmp._tools.audit._trace import trace
from jaxmp.errors import RecipeWarning
from processes import run_python

X = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)

# ---------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("target", targets().values(), ids=targets())
def test_a_chip_has_numbers_with_a_source(target):
    assert target.source.startswith("https://")
    assert target.memory > 2**30 and target.bandwidth > 1e11
    # Matmuls of narrower formats are not slower.
    fastest = [target.peak.get(dtype, 0) for dtype in ("float32", "bfloat16", "float8_e4m3fn")]
    present = [peak for peak in fastest if peak]
    assert present == sorted(present)
    assert (target.link > 0) == (target.platform != "cpu")
    # Both count both directions. Vendors name a network for systems with NVLink or ICI alone.
    assert target.network <= target.link
    assert not target.network or target.platform == "tpu" or target.link >= 300e9


@pytest.mark.parametrize("target", targets().values(), ids=targets())
def test_the_formats_of_gpus_are_those_of_their_compute_capability(target):
    if target.platform != "gpu":
        assert target.capability is None and "tf32" not in target.peak
        return
    assert ("tf32" in target.peak) == (target.capability >= BFLOAT16_MATMULS)
    assert ("bfloat16" in target.native) == (target.capability >= BFLOAT16_MATMULS)
    assert ("float8_e5m2" in target.native) == (target.capability >= FP8_MATMULS)
    assert "tf32" not in target.native and "float32" in target.native


def test_the_page_has_the_table_of_chips():
    path = Path(__file__).parent.parent / "docs" / "chip_table.py"
    chip_table = runpy.run_path(str(path))
    page = chip_table["PAGE"].read_text("utf-8")
    advice = "run python docs/chip_table.py, which writes the table from jaxmp/_core/chips.toml"
    assert chip_table["replace_table"](page) == page, advice


def test_peaks_are_dense_and_of_one_device():
    # The data sheet of the H100 prints 1,979 and 3,958 TFLOP/s with sparsity.
    h100, v6e, tpu7x = map(get_target, ("h100", "v6e", "tpu7x"))
    assert h100.peak["bfloat16"] == 989.4e12 and h100.peak["float8_e4m3fn"] == 1978.9e12
    # Only the TPU7x multiplies FP8 faster than bfloat16; a chip is two devices.
    assert "float8_e4m3fn" not in v6e.native
    assert 2 * tpu7x.peak["float8_e4m3fn"] == 4614e12 and 2 * tpu7x.memory == 192 * 2**30


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h20", "Did you mean 'h200'"),
        ("H200", "in lower case: target='h200'"),
        ("NVIDIA H100 PCIe", "write its chip, one of 'h100-pcie' (84.9 GB at 2,039 GB/s"),
        (["h200"], "Known chips: v100, v100-16, v100-pcie, t4, a100-40, a100"),
    ],
)
def test_an_unknown_chip_is_refused(name, message):
    with pytest.raises(jaxmp.errors.TargetError, match=re.escape(message)):
        get_target(name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("NVIDIA GeForce RTX 4090 D", "rtx4090d"),
        # Parts and variants that the table does not have are no other chip.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_variants_of_a_chip_are_told_apart(kind, name):
    chip = find_target(kind)
    assert (chip and chip.name) == name


def test_no_two_chips_share_a_device_kind():
    kinds = [kind for chip in targets().values() for kind in chip.kinds]
    assert len(kinds) == len(set(kinds))


def test_a_user_describes_a_chip(write):
    chip = get_target({"like": "h100", "memory": 96e9, "peak": {"half": 800, "fp8": 1600}})
    assert (chip.memory, chip.bandwidth) == (96 * 10**9, get_target("h100").bandwidth)
    assert chip.peak["bfloat16"] == 800e12 and chip.capability == (9, 0)
    text = 'name = "mine"\nlike = "h100"\nmemory = 96e9\npeak = {half = 800, fp8 = 1600}\n'
    file = Path(write(text, "chip.toml"))
    assert get_target(file)._replace(name="", kinds=()) == chip._replace(name="", kinds=())
    other = get_target(write('[other]\nlike = "h100"\nmemory = 96e9\n'))
    assert (other.name, other.memory) == ("other", 96 * 10**9)
    with pytest.raises(jaxmp.errors.TargetError, match=r"has a, b\. A file describes one chip"):
        get_target(write('[a]\nlike = "h100"\n[b]\nlike = "h200"\n'))
    step = lambda w: jax.grad(jnp.sum)(w)
    estimate = jaxmp.estimate_memory(step, X, target=str(file), exact=False)
    assert (estimate.target, estimate.memory) == ("mine", 96 * 10**9)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"like": "h100", "memroy": 1e9}, "has the key 'memroy'. Did you mean 'memory'?"),
        ({"memory": 1e9}, "has no 'bandwidth'. Write it, or name a chip of the table"),
        ({"like": "h100", "memory": "96GB"}, "memory = '96GB'. It is a number of bytes, such as"),
        ({"like": "h100", "peak": {"half": "1"}}, "peak.half = '1'. It is a number of TFLOP/s"),
        ({"like": "h100", "peak": {"bf16": 989}}, "has peak = {'bf16': 989}. It is a table of"),
        ({"like": "h100", "peak": {"fp8": 1979}}, "such as peak = { half = 989, fp8 = 1979 }"),
        ({"like": "h100", "capability": [[9], 0]}, "has capability = [[9], 0]. It is one of"),
        ({"like": "h100", "capability": [6, 0]}, "has capability = [6, 0]. It is one of [7, 0]"),
        ({"like": "h100", "multiprocessors": {"cores": 9}}, "a table of cores, lanes, clock, l2"),
        ({"like": "h100", "platform": "cuda"}, "platform = 'cuda'. It is one of gpu, rocm, tpu"),
        ({"like": "h100", "kinds": "NVIDIA H100"}, "It is a list of names of devices, such as"),
        ({"like": "h100", "domain": 7.5}, "has domain = 7.5. It is a number of devices, such as"),
        ({"like": "h100", "uncompiled": True}, "It is the reason why programs cannot be compiled"),
        ({"like": {"like": "h100"}}, "has like = {'like': 'h100'}. Name a chip, such as 'h100'"),
        ({"like": "h100", "memory": 96}, "memory = 96. It is a number of bytes, such as 96e9"),
        ({"like": "h100", "network": 100}, "network = 100. It is a number of bytes per second in"),
        ({"like": "h100", "peak": {"half": 989e12}}, "peak.half = 989000000000000.0. It is a num"),
        ({"like": "h1000"}, "is not a chip that jaxmp knows. Did you mean 'h100'?"),
        ("missing.toml", "cannot be read"),
        (Path(sys.executable), "cannot be read"),  # It is no text.
    ],
)
def test_a_wrong_description_is_refused(description, message):
    with pytest.raises(jaxmp.errors.TargetError, match=re.escape(message)):
        get_target(description)


def test_a_description_without_a_compiler_says_why():
    facts = {"memory": 96e9, "bandwidth": 3e12, "peak": {"half": 989}, "link": 900e9}
    assert "no capability and multiprocessors" in get_target(facts).uncompiled
    old = get_target({"like": "h100", "capability": [7, 0]})
    assert "does not support its compute capability, 7.0" in old.uncompiled
    assert not get_target({"like": "h100", "capability": (8, 9)}).uncompiled
    assert "name it 'v5e'" in get_target({"like": "v5e", "network": 1e11}).uncompiled
    assert not get_target({"like": "v5e", "name": "v5e", "network": 1e11}).uncompiled
    plan = jaxmp.plan(lambda recipe: (lambda w: w @ w, X), recipes=["bf16"], targets=[facts])
    assert plan.rows[0].fits and plan.rows[0].bound is None


def test_the_environment_sets_the_usable_share(monkeypatch):
    chip = get_target("h200")
    assert chip.usable == chip.memory * 3 // 4
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    assert chip.usable == int(0.95 * chip.memory)
    assert get_target("v6e").usable == get_target("v6e").memory
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "95%")
    with pytest.raises(jaxmp.errors.TargetError, match=r"write 0\.95"):
        print(chip.usable)


@pytest.mark.parametrize(("name", "fits"), [("v100", "fp16"), ("cpu", "bf16")])
def test_the_report_says_why_it_is_not_compiled_and_which_recipe_fits(name, fits):
    report = jaxmp.audit(lambda x: x @ x, X, recipe="fp8", target=name)
    assert report.target == name and report.memory is None and report.flops
    reason, recipe = report.notes
    assert get_target(name).uncompiled in reason
    fix = re.search(r"jaxmp\.load_recipe\(.*\)$", recipe)[0]
    assert eval(fix, {"jaxmp": jaxmp}) == jaxmp.load_recipe(fits)
    assert len(jaxmp.audit(lambda x: x @ x, X, recipe=fits, target=name).notes) == 1


@needs_compiler
def test_the_report_says_how_much_memory_is_missing():
    # Two arrays of 7.2 GB fit into 75 % of the 22 GiB of an L4, and not of the 14.8 GiB of a T4.
    x = jax.ShapeDtypeStruct((60000, 60000), jnp.float16)
    l4, t4 = (jaxmp.audit(lambda x: x @ x, x, target=name).notes for name in ("l4", "t4"))
    assert l4 == () and len(t4) == 1
    pattern = r"requires 14\.4 GB per device, 2\.53 GB too much: NVIDIA T4 has 15\.8 GB, of which"
    assert re.search(pattern, t4[0]), t4


# Programs for TPUs, in a process of their own, because libtpu prints.
FOR_TPUS = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
import jaxmp

def loss(q, k, v, w):
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits).astype(q.dtype), v)
    return jnp.square(jnp.einsum("bqhd,hde->bqe", out, w).astype(jnp.float32)).sum()

def shape(*sizes, dtype=jnp.bfloat16, **kwargs):
    return jax.ShapeDtypeStruct(sizes, dtype, **kwargs)

def operands(report):
    return [[row.lhs, row.rhs] for row in report.gemms]

chip = sys.argv[1]
args = [shape(4, 128, 8, 64)] * 3 + [shape(8, 64, 256)]
report = jaxmp.audit(jax.grad(loss, argnums=(0, 1, 2, 3)), *args, target=chip)
fp8 = shape(256, 256, dtype=jnp.float8_e4m3fn)
dot = lambda x, w: jax.lax.dot(x, w, preferred_element_type=jnp.bfloat16)
of_fp8 = jaxmp.audit(dot, fp8, fp8, target=chip)
wide = shape(256, 256, dtype=jnp.float32)
mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
split = shape(512, 512, sharding=NamedSharding(mesh, PartitionSpec("data")))
sharded = jaxmp.audit(lambda x, w: jax.nn.relu(x @ w), split, split, target=chip)
try:
    jaxmp.audit(lambda x: jnp.tanh(x @ x) @ x, shape(200000, 200000), target=chip)
except jaxmp.errors.TargetError as error:
    message = str(error)
print("RESULT" + json.dumps({
    "attention": [sum(row.flops for row in report.gemms), report.flops, report.gpu],
    "bf16": operands(report),
    "fp8": [operands(of_fp8), of_fp8.notes],
    "fp32": [operands(jaxmp.audit(lambda x: jnp.dot(x, x, precision=p), wide, target=chip))
             for p in ("default", "highest")],
    "sharded": [sharded.gpu, [row.dtype for row in sharded.collectives]],
    "memory": message,
}))
"""


@needs_libtpu
@EXPENSIVE
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_programs_for_tpus(chip):
    result = json.loads(run_python(FOR_TPUS, chip).rpartition("RESULT")[2])
    compiled, traced, device = result["attention"]
    kind = get_target(chip).kind
    assert compiled == traced and device == f"{kind} (no such TPU on this machine)"
    assert {dtype for pair in result["bf16"] for dtype in pair} == {"bfloat16"}
    rows, notes = result["fp8"]
    assert rows == [["float8_e4m3fn", "float8_e4m3fn"]]
    assert ("has no FP8 units" in "".join(notes)) == (chip != "tpu7x")
    assert result["fp32"] == [[["bfloat16", "bfloat16"]], [["float32", "float32"]]]
    sharded, sent = result["sharded"]
    assert sharded.startswith(f"4 x {kind}") and set(sent) == {"bfloat16"}
    assert re.search(rf"does not fit '{chip}': it requires [\d.]+G of [\d.]+G", result["memory"])


def test_tpus_require_libtpu(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "libtpu" else find(name, *a)
    )
    with pytest.raises(jaxmp.errors.MissingDependencyError, match="tpu-aot"):
        jaxmp.audit(lambda x: x @ x, X, target="v6e")


# ---------------------------------------------------------------------------
# The target of a program
# ---------------------------------------------------------------------------

MATMUL = (((1,), (0,)), ((), ()))
# Dtype of a dot's result -> the programs for a GPU and for a CPU.
NARROW, WIDE = (
    f"(tensor<64x64xf8E4M3FN>, tensor<64x64xf8E4M3FN>) -> tensor<64x64x{d}>"
    for d in ("bf16", "f32")
)


def fp8_step():
    """Returns a new function, with a gradient, of which JAX has no trace."""
    dot = jaxmp.fp8.dot_general("current")

    def loss(x, w):
        return jnp.square(dot(x, w, MATMUL).astype(jnp.float32)).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


def cuda_text(step):
    return step.trace(X, X).lower(lowering_platforms=("cuda",)).as_text()


def test_a_program_for_a_named_chip_has_its_dtypes():
    with jaxmp.default_target("h200"):
        text = cuda_text(fp8_step())
    assert NARROW in text and WIDE not in text


def test_the_fix_of_the_warning_gives_the_program_for_the_chip():
    step = fp8_step()
    with pytest.warns(RecipeWarning, match="traced for a CPU.*lowered for 'cuda'") as caught:
        assert WIDE in cuda_text(step)
    fix = str(caught[0].message).partition("around the trace:\n")[2]
    scope = {"jaxmp": jaxmp, "jax": jax, "f": lambda x: fp8_step()(x, x), "x": X}
    exec("if True:\n" + fix, scope)
    assert NARROW in scope["lowered"].as_text()


@pytest.mark.parametrize("transform", [lambda f: f, jax.vmap, jax.checkpoint])
def test_the_warning_survives_transformations(transform):
    dot = jaxmp.fp8.dot_general("current")
    loss = lambda x, w: transform(lambda x: dot(x, w, MATMUL))(x).astype(jnp.float32).sum()
    batch = jax.ShapeDtypeStruct((2, 64, 64), jnp.bfloat16)
    x = batch if transform is jax.vmap else X
    traced = jax.jit(jax.grad(loss)).trace(x, X)
    traced.lower()
    with pytest.warns(RecipeWarning, match=r"default_target\('v6e'\)"):
        traced.lower(lowering_platforms=("tpu",))


def test_exported_programs_are_for_the_chip():
    with jaxmp.default_target("h200"):
        exported = jax.export.export(fp8_step(), platforms=["cuda"])(X, X)
    assert NARROW in exported.mlir_module()
    with pytest.warns(RecipeWarning, match="lowered for 'cuda'"):
        jax.export.export(fp8_step(), platforms=["cpu", "cuda"])(X, X)


def test_a_second_chip_does_not_reuse_the_program_of_the_first():
    traced = []

    @jax.jit
    def step(x):
        traced.append(_compat.current_context().chip)
        return x

    for name in ("h100", "h200", "h100"):
        with jaxmp.default_target(name):
            step.trace(X)
    step.trace(X)
    # Both have the same compute capability.
    assert [chip and chip.name for chip in traced] == ["h100", "h200", None]


CUDNN, LOOP = "__cudnn$fmhaSoftmax", "stablehlo.while"


@needs_compiler
def test_attention_is_that_of_the_chip_and_of_no_earlier_one():
    x = jax.ShapeDtypeStruct((4, 1024, 8, 64), jnp.bfloat16)
    attention = jax.jit(functools.partial(jaxmp.dot_product_attention, is_causal=True))
    chips = {"h200": CUDNN, "t4": LOOP, "v6e": LOOP, "v100": LOOP, "a100": CUDNN, "cpu": LOOP}
    # JAX does not promise that a later version reads calls of cuDNN.
    allowed = [jax.export.DisabledSafetyCheck.custom_call(CUDNN)]
    for name, kernel in chips.items():
        platform = {"gpu": "cuda"}.get(get_target(name).platform, get_target(name).platform)
        with jaxmp.default_target(name):
            lowered = attention.trace(x, x, x).lower(lowering_platforms=(platform,)).as_text()
            made = jax.export.export(attention, platforms=[platform], disabled_checks=allowed)
            exported = made(x, x, x).mlir_module()
        for text in (lowered, exported):
            assert [each for each in (CUDNN, LOOP) if each in text] == [kernel], name


@needs_compiler
def test_a_program_of_jax_itself_is_that_of_the_audit():
    step = fp8_step()
    with jaxmp.default_target("h200"):
        of_audit = _compile.compile_for("h200", trace(step.__wrapped__, (X, X), {})).text
        with _compat.unchecked_cuda():
            (device,) = _compat.described_gpus(_compile.describe(get_target("h200")), 1)
        x = X.update(sharding=jax.sharding.SingleDeviceSharding(device))
        lowered = step.trace(x, x).lower(lowering_platforms=("cuda",))
    own = lowered.compile(compiler_options=_compile._WITHOUT_GPU).as_text()
    assert "__cublas$lt$matmul$f8" in own
    assert without_names(own) == without_names(of_audit)
    with pytest.warns(RecipeWarning):
        for_cpu = _compile.compile_for("h200", trace(fp8_step().__wrapped__, (X, X), {})).text
    assert without_names(own) != without_names(for_cpu)


def without_names(text):
    """Returns the computations of a program with numbered names and without source lines."""
    numbers = {}
    number = lambda name: numbers.setdefault(name[0].strip("%"), f"n{len(numbers)}")
    text = re.sub(r", metadata=\{[^}]*\}", "", text[text.index("\n%") :])
    return re.sub(r"%?\b[\w\-]+(\.[\w\-]+)*\.\d+\b", number, text)


@needs_compiler
def test_the_audit_compiles_for_the_named_chip_unless_it_has_a_target():
    with jaxmp.default_target("l4"):
        reports = [jaxmp.audit(lambda x: x @ x, X, **kw) for kw in ({}, {"target": "t4"})]
    assert [report.target for report in reports] == ["l4", "t4"]
    assert [report.gemms[0].lhs for report in reports] == ["bfloat16", "float32"]


def test_messages_name_the_chip():
    with jaxmp.default_target("v100"), pytest.warns(RecipeWarning, match="the GPU 'v100'"):
        jax.eval_shape(jaxmp.autocast(lambda x: x @ x, "bf16"), X)


def test_an_unknown_default_target_is_refused():
    with pytest.raises(jaxmp.errors.TargetError, match="'h200'"), jaxmp.default_target("h20"):
        pass


def test_an_unknown_target_is_refused_before_anything_is_traced():
    with pytest.raises(jaxmp.errors.AuditError, match="Did you mean 'h200'"):
        jaxmp.audit(lambda x: pytest.fail("traced"), jnp.ones(2), target="h20")


def test_without_the_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(_compile.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(jaxmp.errors.MissingDependencyError, match=r'pip install "jaxmp\[aot\]"'):
        jaxmp.audit(lambda x: x @ x, jnp.ones((8, 8)), target="h200")


# ---------------------------------------------------------------------------
# Target GPU present on this machine
# ---------------------------------------------------------------------------


class FakeDevice:
    """Device object with the attributes that JAX has for a GPU."""

    def __init__(self, check, number=0):
        self.device_kind, self.id = check, number


@pytest.fixture
def here(monkeypatch):
    """Makes GPUs of some checks the devices of this process; returns them."""

    def put(*checks):
        devices = [FakeDevice(check, number) for number, check in enumerate(checks)]
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", lambda: devices)
        # Devices of other processes, for which a single process cannot compile.
        monkeypatch.setattr(jax, "devices", lambda: [*devices, FakeDevice(checks[0], 99)])
        return devices

    return put


@pytest.mark.parametrize(
    ("target", "check", "is_it"),
    [
        # Names as CUDA reports them (`cudaDeviceProp.name`, `nvidia-smi -L`).
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("a100-40-pcie", "NVIDIA A100-PCIE-40GB", True),
        ("a100-pcie", "NVIDIA A100 80GB PCIe", True),
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("h100-pcie", "NVIDIA H100 PCIe", True),
        ("h100", "NVIDIA H100 PCIe", False),
        ("h200", "NVIDIA H200", True),
        ("h200", "NVIDIA H200 NVL", False),
        ("b200", "NVIDIA B200", True),
        ("a100-40", "NVIDIA A100-SXM4-40GB", True),
        ("t4", "Tesla T4", True),
        ("l4", "NVIDIA L4", True),
        ("rtx4090", "NVIDIA GeForce RTX 4090", True),
        ("l4", "NVIDIA L40S", False),
        ("a100-40", "NVIDIA A100-SXM4-80GB", False),
        ("rtx4090", "NVIDIA GeForce RTX 4090 Laptop GPU", False),
        ("h100", "NVIDIA H200", False),
        ("a100", "NVIDIA A10", False),
        ("h200", "NVIDIA GH200 480GB", False),
        ("b200", "NVIDIA GB200", False),
        ("a100", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", False),
        ("h100", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", False),
        ("h100", "AMD Instinct MI300X", False),
    ],
)
def test_which_card_a_device_is(here, target, check, is_it):
    devices = here(check)
    assert _compile._real_devices(get_target(target), None, 1) == (devices if is_it else [])


def test_cards_of_this_process_are_taken_if_they_are_enough(here):
    first, _, third = here("NVIDIA H200", "NVIDIA RTX A2000", "NVIDIA H200")
    assert _compile._real_devices(get_target("h200"), None, 1) == [first]
    assert _compile._real_devices(get_target("h200"), None, 2) == [first, third]
    assert _compile._real_devices(get_target("h200"), None, 3) == []


def test_a_mesh_of_the_cards_keeps_its_order(here):
    first, second = here("NVIDIA H200", "NVIDIA H200")

    def mesh_of(*devices):
        return jax.sharding.Mesh(np.array(devices, dtype=object), ("data",))

    assert _compile._real_devices(get_target("h200"), mesh_of(second, first), 2) == [second, first]
    # A mesh of other devices determines the number of devices.
    others = FakeDevice("cpu", 7), FakeDevice("cpu", 8)
    assert _compile._real_devices(get_target("h200"), mesh_of(*others), 2) == [first, second]
    assert _compile._real_devices(get_target("b200"), mesh_of(second, first), 2) == []


def test_a_card_that_jax_is_told_not_to_use_is_not_there(here, monkeypatch):
    here("NVIDIA H200")
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert _compile._real_devices(get_target("h200"), None, 1) == []
