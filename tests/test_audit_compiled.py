"""The audit of programs that XLA's GPU compiler cross-compiles."""

import contextlib
import functools
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxmp
from arrays import shape
from byte_gpt import GPT
from findings import the_only
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, fast_cases
from jaxmp import audit
from jaxmp._core._targets import targets
from jaxmp._tools.audit import _compile
from jaxmp._tools.audit._trace import trace
from language_models import byte_gpt_step
from processes import run_script
from sources import line_of

pytestmark = needs_compiler

HERE = Path(__file__)
BF16 = "p=f32,c=bf16,o=f32"
H200 = "NVIDIA H200 141GB HBM3e"


def operands(report):
    return {(row.lhs, row.rhs) for row in report.gemms}


@functools.cache
def example():
    step = byte_gpt_step("linen", "bf16", GPT())
    return audit(*step, shape(16, 65, dtype=jnp.int32), recipe="bf16", target="h200")


# ---------------------------------------------------------------------------
# The step of the example
# ---------------------------------------------------------------------------

SMALL = GPT(layers=1, width=32, heads=2, max_length=16)
SMALL_BATCH = jax.ShapeDtypeStruct((4, 17), jnp.int32)


@EXPENSIVE
def test_the_example_runs_in_bf16_and_says_where_each_matmul_comes_from():
    report = example()
    assert report.ok and report.gpu == "NVIDIA H200 141GB HBM3e (no such GPU on this machine)"
    assert operands(report) == {("bfloat16", "bfloat16")}
    # The compiled matmuls have as many FLOPs as the traced ones.
    kernels = (*report.gemms, *report.attention)
    assert sum(row.flops for row in kernels) == report.flops
    assert {row.module for row in kernels} == {row.module for row in report.matmuls}
    assert all(Path(row.file).name == "byte_gpt.py" and row.line for row in report.gemms)
    # Once forward, and backward for each operand.
    phases = [
        row.phase for row in report.gemms if row.module == "lm_head" for _ in range(row.count)
    ]
    assert sorted(phases) == ["backward", "backward", "forward"]
    assert {(row.module, row.phase, row.dtype) for row in report.attention} == {
        (f"block_{number}/attention", phase, "bfloat16")
        for number in range(3)
        for phase in ("forward", "backward")
    }
    assert {row.count for row in report.attention} == {1} and len(report.attention) == 6
    assert report.collectives == ()
    assert "unfused_attention" not in {finding.check for finding in report.findings}


@EXPENSIVE
def test_the_update_of_the_example_moves_what_it_must():
    memory = example().memory
    _, state = byte_gpt_step("linen", "bf16", GPT())
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert memory.parameters == parameters
    # Reads and writes of FP32 parameters and two moments, 24 bytes, and an FP32 gradient.
    assert 27.5 <= memory.update_floor / parameters <= 28.5
    assert memory.update_floor <= memory.update_bytes <= 1.02 * memory.update_floor
    # All results except the loss and the counters use the donated memory.
    assert 0 <= memory.outputs - memory.aliased < 4096 < memory.temporary


@pytest.mark.parametrize(("recipe", "dtype"), [("fp32", "float32"), ("tf32", "tf32")])
def test_fp32_products_round_to_tf32_unless_the_recipe_says_highest(recipe, dtype):
    plain, x = nn.Dense(64), shape(128, 64, dtype=jnp.float32)
    model = jaxmp.load_recipe(recipe).wrap(plain)
    params = jax.eval_shape(plain.init, jax.random.key(0), x)
    gradient = jax.grad(lambda params, x: jnp.square(model.apply(params, x)).sum())
    report = audit(gradient, params, x, recipe=recipe, target="h200")
    assert operands(report) == {(dtype, dtype)}


# The first GPU of each compute capability.
CHIPS = [chip for chip in targets().values() if chip.multiprocessors]
GPUS = {chip.capability: chip.name for chip in reversed(CHIPS)}.values()
# GPU -> the dtypes in which it multiplies bfloat16, float16 and FP32 operands.
OPERANDS = {gpu: ("bfloat16", "float16", "tf32") for gpu in GPUS} | {
    # No Tensor Cores for bfloat16 and TF32; XLA converts bfloat16 to FP32.
    "t4": ("float32", "float16", "float32")
}


@pytest.mark.parametrize("target", GPUS)
@fast_cases("t4", "l4")
@pytest.mark.filterwarnings("ignore:The policies compute in bfloat16:jaxmp.errors.RecipeWarning")
def test_each_gpu_multiplies_in_its_own_formats(target):
    x = shape(256, 256, dtype=jnp.float32)
    found = [
        operands(audit(jaxmp.autocast(lambda x: x @ x, recipe), x, recipe=recipe, target=target))
        for recipe in ("bf16", "fp16", "tf32")
    ]
    assert found == [{(dtype, dtype)} for dtype in OPERANDS[target]]


@EXPENSIVE
def test_nnx_steps():
    step = byte_gpt_step("nnx", "bf16", SMALL)
    report = audit(*step, SMALL_BATCH, recipe="bf16", target="h200")
    assert operands(report) == {("bfloat16", "bfloat16")}
    assert "block_0/mlp_up" in {row.module for row in report.gemms}
    # The step updates model and optimizer and returns only the loss. The backward pass is included.
    rows = [row.phase for row in report.gemms if row.module == "lm_head" for _ in range(row.count)]
    assert sorted(rows) == ["backward", "backward", "forward"]
    # Two products forward and five backward, over a dense mask: B 4, N 2, T and S 16, H 16.
    attention = {row.phase: row.flops for row in report.attention}
    forward = 4 * (4 * 2 * 16 * 16 * 16)
    assert attention == {"forward": forward, "backward": 2.5 * forward}
    total = sum(row.flops for row in report.gemms) + sum(attention.values())
    assert total == report.flops


# ---------------------------------------------------------------------------
# FP8 matmuls and fallbacks
# ---------------------------------------------------------------------------


def fp8_dot(x, w):
    with jax.named_scope("lin"):
        dims = (((1,), (0,)), ((), ()))
        return lax.dot_general(x, w, dims, preferred_element_type=jnp.bfloat16)  # FP8 dot


FP8 = shape(512, 512, dtype=jnp.float8_e4m3fn)


def test_fp8_products_are_real_where_the_card_has_them():
    report = audit(fp8_dot, FP8, FP8, target="h200")
    (row,) = report.gemms
    assert (row.lhs, row.rhs, row.kernel) == ("float8_e4m3fn", "float8_e4m3fn", "cublas fp8")
    assert "fp8_fallback" not in {finding.check for finding in report.findings}


def test_fp8_products_fall_back_where_the_card_has_none():
    finding = the_only(audit(fp8_dot, FP8, FP8, target="a100").findings, "fp8_fallback")
    assert (finding.module, finding.file, finding.line) == (
        "lin",
        str(HERE),
        line_of(HERE, "FP8 dot"),
    )
    assert "float8_e4m3fn" in finding.message and "float16" in finding.message


def quantized(x):
    return jnp.clip(x, -448, 448).astype(jnp.float8_e4m3fn).astype(jnp.bfloat16)


@pytest.mark.parametrize(("between", "falls_back"), [(lambda x: x, False), (jnp.abs, True)])
def test_quantized_and_dequantized_dots(between, falls_back):
    """XLA rewrites the pattern to an FP8 matmul; an operation in between breaks the pattern."""

    def f(x, w):
        with jax.named_scope("lin"):
            return between(quantized(x)) @ quantized(w)  # QDQ dot

    report = audit(f, shape(512, 512), shape(512, 512), target="h200")
    assert operands(report) == {
        ("bfloat16", "bfloat16") if falls_back else ("float8_e4m3fn", "float8_e4m3fn")
    }
    checks = {finding.check for finding in report.errors}
    assert ("fp8_fallback" in checks) == falls_back
    if falls_back:
        finding = the_only(report.findings, "fp8_fallback")
        assert (finding.module, finding.line) == ("lin", line_of(HERE, "QDQ dot"))
        assert "float8_e4m3fn" in finding.message


# ---------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["cudnn", "xla"])
@fast_cases("cudnn")
def test_attention_kernels(implementation):
    def loss_fn(q):
        with jax.named_scope("attend"):
            out = jax.nn.dot_product_attention(  # attention
                q, q, q, is_causal=True, implementation=implementation
            )
        return out.astype(jnp.float32).sum()

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        report = audit(jax.grad(loss_fn), shape(2, 256, 4, 64), target="h200")
    found = {(row.module, row.phase, row.kernel, row.dtype) for row in report.attention}
    if implementation == "xla":
        assert found == set()
        assert "unfused_attention" in {finding.check for finding in report.findings}
    else:
        assert found == {
            ("attend", "forward", "__cudnn$fmhaSoftmax", "bfloat16"),
            ("attend", "backward", "__cudnn$fmhaSoftmaxBackward", "bfloat16"),
        }
        assert {row.line for row in report.attention} == {line_of(HERE, "attention")}


def test_what_keeps_a_gpu_from_the_fused_kernel():
    def loss_fn(q, mask):
        with jax.named_scope("attend"):
            out = jaxmp.dot_product_attention(q, q, q, mask=mask)  # odd attention
        return out.astype(jnp.float32).sum()

    args = shape(2, 1, 4, 64), shape(1, 1, 1, 1, dtype=jnp.bool_)
    report = audit(jax.grad(loss_fn), *args, target="h200")
    assert report.attention == ()
    finding = the_only(report.findings, "unfused_attention")
    assert (finding.module, finding.line) == ("attend", line_of(HERE, "odd attention"))
    assert "mask: the kernel's backward pass" in finding.message and "device" not in finding.message
    assert "use two queries" in finding.fix


# ---------------------------------------------------------------------------
# Several devices
# ---------------------------------------------------------------------------


def sharded(mesh, *sizes, dtype=jnp.float32, over="data"):
    spec = NamedSharding(mesh, PartitionSpec(over))
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=spec)


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def test_collectives_that_xla_combines_are_told_apart(mesh):
    whole = NamedSharding(mesh, PartitionSpec())

    def step(weights, x):
        weights = lax.optimization_barrier(lax.with_sharding_constraint(weights, whole))
        for name, w in weights.items():
            with jax.named_scope("Net"), jax.named_scope(name):
                x = jnp.tanh(x @ w.astype(jnp.bfloat16))
        return x

    weights = {"first": sharded(mesh, 512, 512), "second": sharded(mesh, 512, 256)}
    args = weights, sharded(mesh, 64, 512, dtype=jnp.bfloat16)
    text = _compile.compile_for("h200", trace(step, args, {})).text
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 1
    report = audit(step, *args, recipe=BF16, target="h200")
    assert {(row.module, row.dtype, row.bytes, row.count) for row in report.collectives} == {
        ("first", "float32", 512 * 512 * 4, 1),
        ("second", "float32", 512 * 256 * 4, 1),
    }
    found = [finding for finding in report.findings if finding.check == "fp32_all_gather"]
    assert {finding.module for finding in found} == {"first", "second"}


def test_a_weight_gathered_together_with_fp8_ones_is_no_fallback(mesh):
    whole = NamedSharding(mesh, PartitionSpec())

    def step(weights, x):
        scaled = (weights["fp8"] * 16.0).astype(jnp.float8_e4m3fn)
        gathered = lax.with_sharding_constraint((scaled, weights["head"]), whole)
        low, head = lax.optimization_barrier(gathered)
        with jax.named_scope("Net"), jax.named_scope("first"):
            x = lax.dot(x, low, preferred_element_type=jnp.bfloat16)
        with jax.named_scope("Net"), jax.named_scope("head"):
            return jnp.tanh(x) @ head

    weights = {
        "fp8": sharded(mesh, 512, 512, dtype=jnp.bfloat16),
        "head": sharded(mesh, 512, 256, dtype=jnp.bfloat16),
    }
    args = weights, sharded(mesh, 64, 512, dtype=jnp.float8_e4m3fn)
    text = _compile.compile_for("h200", trace(step, args, {})).text
    assert re.search(r"\(bf16\[.*f8e4m3fn\[.* all-gather|f8e4m3fn\[.*bf16\[.* all-gather", text)
    report = audit(step, *args, recipe=BF16, target="h200")
    assert {row.dtype for row in report.collectives} == {"bfloat16", "float8_e4m3fn"}
    (head,) = (row for row in report.gemms if row.module == "head")
    assert (head.lhs, head.rhs, head.was_fp8) == ("bfloat16", "bfloat16", "")
    assert "fp8_fallback" not in {f.check for f in report.findings if f.module == "head"}


def test_shard_map_over_a_mesh_of_other_devices(mesh):
    def f(x):
        def shard(x):
            with jax.named_scope("sum"):
                return lax.psum(x @ x.T, "data")

        spec = PartitionSpec("data")
        return jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())(x)

    report = audit(jax.jit(f), sharded(mesh, 256, 128), target="h100")
    (row,) = report.collectives
    assert (row.operation, row.dtype, row.module) == ("all-reduce", "float32", "sum")
    assert row.bytes == 64 * 64 * 4 and report.gpu.startswith("4 x NVIDIA H100")


def test_two_meshes_are_refused(mesh):
    other = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    args = sharded(mesh, 8, 8), sharded(other, 8, 8, over="model")
    with pytest.raises(jaxmp.errors.AuditError, match=r"2 meshes.*device_put"):
        audit(lambda x, y: x @ y, *args, target="h200")


SPREAD = PartitionSpec("data")


def by_shard_map(mesh):
    inside = lambda x: lax.psum((x @ x.T).sum(), "data")
    return jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=SPREAD, out_specs=PartitionSpec()))


def by_shard_map_without_jit(mesh):
    return by_shard_map(mesh).__wrapped__


def by_vmap_of_shard_map(mesh):
    return lambda x: jax.vmap(by_shard_map_without_jit(mesh))(x[None])[0]


def by_gradient_of_shard_map(mesh):
    return jax.value_and_grad(by_shard_map_without_jit(mesh))


def by_pmap(mesh):
    inside = lambda x: lax.psum((x @ x.T).sum(), "data")
    return lambda x: jax.pmap(inside, axis_name="data")(x.reshape(4, -1, 64))[0]


def by_constraint(mesh):
    spread = NamedSharding(mesh, SPREAD)
    return lambda x: (lax.with_sharding_constraint(x, spread) @ x.T).sum()


def by_jit(mesh):
    return jax.jit(lambda x: (x @ x.T).sum(), in_shardings=NamedSharding(mesh, SPREAD))


@pytest.mark.parametrize(
    "make",
    [
        by_shard_map,
        by_shard_map_without_jit,
        by_vmap_of_shard_map,
        by_gradient_of_shard_map,
        by_pmap,
        by_constraint,
        by_jit,
    ],
)
def test_a_mesh_that_the_program_alone_names(mesh, make):
    report = audit(make(mesh), shape(256, 64, dtype=jnp.float32), target="h200")
    assert report.gpu.startswith("4 x NVIDIA H200")
    assert "all-reduce" in {row.operation for row in report.collectives}
    # Arguments with a sharding in jit or shard_map are sharded; all others are on each GPU.
    copies = 1 if make in (by_vmap_of_shard_map, by_pmap, by_constraint) else 4
    assert report.memory.arguments == 256 * 64 * 4 // copies


def jitted_over(mesh):
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.jit(jnp.matmul, in_shardings=(sharding, sharding)), (64, 64)


def mapped_over(mesh):
    return jax.pmap(jnp.matmul, devices=mesh.devices.ravel().tolist()), (1, 64, 64)


@pytest.mark.parametrize("make", [jitted_over, mapped_over])
def test_a_mesh_of_a_single_device(make):
    fn, sizes = make(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]))
    report = audit(fn, shape(*sizes), shape(*sizes), target="h200")

    assert operands(report) == {("bfloat16", "bfloat16")}


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
@pytest.mark.parametrize("enter", [jax.set_mesh, contextlib.nullcontext])
def test_the_current_mesh(enter):
    current = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    by_with = current if enter is contextlib.nullcontext else contextlib.nullcontext()
    with enter(current), by_with:
        report = audit(jnp.matmul, shape(64, 64), shape(64, 64), target="h200")

    assert operands(report) == {("bfloat16", "bfloat16")}


def test_a_constraint_to_a_mesh_without_devices():
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def f(x):
        return lax.with_sharding_constraint(x @ x.T, rows)

    step = jax.jit(f, in_shardings=rows, out_shardings=rows)
    report = audit(step, shape(256, 64), target="h200")
    assert report.gpu.startswith("4 x NVIDIA H200")
    assert report.memory.arguments == 256 * 64 * 2 // 4
    assert report.memory.outputs == 256 * 256 * 2 // 4


def test_meshes_of_different_devices_are_refused(mesh):
    pair = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    with pytest.raises(jaxmp.errors.AuditError, match="meshes of different devices"):
        audit(by_constraint(mesh), sharded(pair, 256, 64), target="h200")


def test_host_callbacks_are_refused_with_their_line():
    def f(x):
        jax.debug.print("{}", x[0, 0])  # print
        return x @ x

    place = (
        rf"test_audit_compiled\.py:{line_of(HERE, 'print')}\), which cannot be compiled for h200"
    )
    with pytest.raises(jaxmp.errors.AuditError, match=place):
        audit(f, shape(8, 8), target="h200")


# ---------------------------------------------------------------------------
# Other programs
# ---------------------------------------------------------------------------


def test_loops_multiply_what_is_inside():
    def f(w, x):
        def layer(x, w):
            with jax.named_scope("layer"):
                return x @ w, None

        return lax.scan(layer, x, w)[0]

    report = audit(f, shape(6, 64, 64), shape(128, 64), target="h200")
    (row,) = report.gemms
    assert (row.module, row.flops) == ("layer", 6 * 2 * 128 * 64 * 64)
    assert row.flops == report.flops


def test_convolutions_and_both_their_gradients():
    def loss_fn(x, w):
        with jax.named_scope("conv"):
            dims = ("NHWC", "HWIO", "NHWC")
            y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)
        return (y.astype(jnp.float32) ** 2).mean()

    images, filters = shape(8, 16, 16, 64), shape(3, 3, 64, 64)
    report = audit(jax.grad(loss_fn, (0, 1)), images, filters, target="h200")
    flops = 2 * 8 * 16 * 16 * 64 * 64 * 9
    assert sorted((row.phase, row.flops, row.count) for row in report.gemms) == [
        ("backward", 2 * flops, 2),
        ("forward", flops, 1),
    ]
    assert {row.kernel for row in report.gemms} == {"cudnn"} and len(operands(report)) == 1


def test_a_convolution_that_returns_its_fp32_sums_is_a_note():
    """cuDNN has none; the rule of `rounded_output` for a head must not lead to another error."""
    recipe = jaxmp.load_recipe(jaxmp.PolicyMap("bf16", jaxmp.Rule("**", "o=f32")))
    model = recipe.wrap(nn.Sequential([nn.Conv(64, (1, 1))]))
    images = shape(8, 16, 16, 64, dtype=jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    report = audit(model.apply, variables, images, recipe=recipe, target="h200")
    assert report.ok and any("cuDNN has no convolution" in note for note in report.notes)


def test_state_that_is_not_donated_is_a_note():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: (x @ w).sum())(w)

    args = shape(64, 64, dtype=jnp.float32), shape(8, 64, dtype=jnp.float32)
    kept = audit(step, *args, target="h200")
    given = audit(jax.jit(step, donate_argnums=0), *args, target="h200")
    assert the_only(kept.findings, "undonated_state").severity == "note"
    assert kept.memory.aliased == 0
    assert given.memory.aliased == 64 * 64 * 4
    assert "undonated_state" not in {finding.check for finding in given.findings}
    args = [jax.ShapeDtypeStruct((1, *arg.shape), arg.dtype) for arg in args]
    mapped = the_only(audit(jax.pmap(step), *args, target="h200").findings, "undonated_state")
    assert "jax.pmap(train_step, donate_argnums=0)" in mapped.fix


@pytest.fixture
def small_step(tmp_path):
    """Returns the argument of `jaxmp audit` for a step with one matmul and its gradient."""
    file = tmp_path / "train.py"
    file.write_text(
        "import jax\n"
        "def loss(w, x):\n"
        "    return (x @ w.astype(x.dtype)).astype('float32').sum()\n"
        "def make_step(recipe='bf16'):\n"
        "    shape = jax.ShapeDtypeStruct((64, 64), 'float32')\n"
        "    return jax.grad(loss), shape, jax.ShapeDtypeStruct((64, 64), 'bfloat16')\n"
    )
    return f"{file}:make_step"


def test_the_command_compiles(small_step, command):
    status, out, _ = command("audit", small_step, "--recipe", "bf16", "--target", "h200")
    assert status == 0
    assert "Matmuls in the compiled program" in out and "compiled for NVIDIA H200" in out


# ---------------------------------------------------------------------------
# Target GPU present on this machine
# ---------------------------------------------------------------------------


def test_a_program_of_the_real_compiler_reads_the_same(monkeypatch):
    """If the GPU is present, XLA may compile matmuls to Triton kernels."""

    def f(w, x):
        with jax.named_scope("Net"), jax.named_scope("lin"):
            return jax.nn.gelu(x @ w) @ w

    # With this many rows, no kernel computes partial sums in FP32 that another kernel completes.
    args = shape(512, 512), shape(16384, 512)
    described = audit(f, *args, target="h200")
    monkeypatch.setattr(
        _compile, "_real_devices", lambda chip, mesh, count: _compile._described(chip, count)
    )
    real = audit(f, *args, target="h200")
    assert (real.gpu, described.gpu) == (H200, f"{H200} (no such GPU on this machine)")
    assert {row.kernel for row in real.gemms} == {"triton"}
    assert {row.kernel for row in described.gemms} == {"cublas"}

    def told(report):
        rows = [(row.module, row.phase, row.line, row.lhs, row.rhs) for row in report.gemms]
        return set(rows), sum(row.flops for row in report.gemms)

    assert told(real) == told(described)
    assert {row.out for row in (*real.gemms, *described.gemms)} == {"bfloat16"}


@pytest.mark.parametrize("first", ["", "import jax; jax.devices()"])
@fast_cases("")
def test_starts_where_jax_is_told_no_platform_and_cuda_libraries_are_missing(first):
    script = (
        f"{first}\nimport jax, jaxmp\nx = jax.ShapeDtypeStruct((64, 64), 'bfloat16')\n"
        # An array that is made while `audit` traces starts the first backend there.
        "fn = lambda x: x @ x + jax.numpy.ones((), x.dtype)\n"
        "report = jaxmp.audit(fn, x, target='h200')\n"
        "print([(row.lhs, row.rhs) for row in report.gemms])"
    )
    done = run_script("-c", script, JAX_PLATFORMS=None)
    assert done.stdout.strip() == "[('bfloat16', 'bfloat16')]", done.stderr
    # If the script initializes JAX's backends, JAX reports missing libraries before the audit.
    assert first or done.stderr == ""


@EXPENSIVE
def test_the_command_prints_nothing_of_missing_cuda_libraries(small_step):
    # JAX warns of a cached program that was compiled for a GPU which is not present.
    unset = {"JAX_PLATFORMS": None, "JAX_COMPILATION_CACHE_DIR": None}
    command = ("-m", "jaxmp", "audit", small_step, "--recipe", "bf16", "--target", "h200")
    done = run_script(*command, **unset)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
