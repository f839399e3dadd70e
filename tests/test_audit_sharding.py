"""The audit of the collectives of sharded steps that are compiled for H200."""

import contextlib
import dataclasses
import functools
import json
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from findings import the_only
from gpu_compiler import needs_compiler
from grids import fast_cases
from jaxmp import audit
from relaxed import relaxed
from sources import code_of
from training_steps import new_state, state_step

pytestmark = needs_compiler

BF16 = "p=f32,c=bf16,o=f32"
WIDTH, ROWS, LAYERS = 512, 2048, 3
CHECKS = {"all_reduce_16bit", "fp32_all_gather", "activation_all_gather", "kept_weights"}
CHECKS |= {"reduction_per_microbatch"}


def mesh_of(axis_type=AxisType.Auto, **axes):
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes))


MESH = mesh_of(data=8)
MESH_2D = mesh_of(data=4, model=2)
SPLIT = P("data", None)


def shape(sizes, spec, dtype=jnp.float32, mesh=MESH):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))


def constrain(x, spec=SPLIT, mesh=MESH):
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def low(w):
    return w.astype(jnp.bfloat16)


def unchanged(x):
    return x


def mlp(params, x, *, cast=low, block=unchanged, rows=constrain):
    """Mean square of the output of one matmul for each parameter."""

    @block
    def layer(x, w):
        return rows(jax.nn.relu(x @ cast(w)))

    x = rows(low(x))
    for n, w in enumerate(params):
        with jax.named_scope("Net"), jax.named_scope(f"layer_{n}"):
            x = layer(x, w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def step_of(loss_fn, value_and_grad=jaxmp.value_and_grad):
    def step(params, batch):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        return [p - 0.1 * g.astype(p.dtype) for p, g in zip(params, grads, strict=True)], loss

    return step


PARAMS = [shape((WIDTH, WIDTH), SPLIT)] * LAYERS
BATCH = shape((ROWS, WIDTH), P("data"))
ONE = WIDTH * WIDTH  # elements of a parameter


def compiled(step, params=PARAMS, batch=BATCH, policies=BF16):
    return audit(step, params, batch, recipe=policies, target="h200")


def severities(report):
    """Returns check -> severity of the findings about collectives."""
    return {f.check: f.severity for f in report.findings if f.check in CHECKS}


def sent(report, content, operation=""):
    """Returns dtype -> bytes of the arrays above 4 kB with a content."""
    sums = {}
    for row in report.collectives:
        is_large = row.bytes >= 4096 * row.count
        if is_large and row.content == content and row.operation.startswith(operation):
            sums[row.dtype] = sums.get(row.dtype, 0) + row.bytes
    return sums


# ---------------------------------------------------------------------------
# Sums
# ---------------------------------------------------------------------------


def test_reduce_dtype_decides_whether_gradients_in_16_bits_are_an_error():
    plain = step_of(mlp, jax.value_and_grad)
    report = compiled(plain, policies="bf16")
    assert severities(report)["all_reduce_16bit"] == "error"
    assert sent(report, "gradient") == {"bfloat16": 2 * LAYERS * ONE}
    sums = [row for row in report.collectives if row.content == "gradient"]
    assert {(row.phase, row.axes) for row in sums} == {("backward", ("data",))}
    # The compiler alone inserts them. Without policies, FP32 is not requested.
    assert audit(plain, PARAMS, BATCH, recipe="bf16").ok
    allowed = jaxmp.load_recipe("bf16").replace(reduce_dtype="bfloat16")
    for policies in (allowed, None):
        assert severities(compiled(plain, policies=policies))["all_reduce_16bit"] == "warning"
    report = compiled(step_of(mlp), policies="bf16")
    assert "all_reduce_16bit" not in severities(report)
    assert sent(report, "gradient") == {"float32": 4 * LAYERS * ONE}


def test_the_gradients_of_sharded_convolutions_are_scattered_although_a_norm_reads_them():
    def loss_fn(kernels, x):
        for kernel in kernels:
            operands = low(x), low(kernel), (1,), "SAME"
            x = lax.conv_general_dilated(*operands, dimension_numbers=("NWC", "WIO", "NWC"))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    kernel = shape((3, 256, 256), P(None, "data"))
    inner = relaxed(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    state = jax.eval_shape(lambda: new_state([jnp.zeros(kernel.shape)] * 3, "bf16", inner))
    state = jax.tree.map(lambda leaf: kernel if leaf.shape == kernel.shape else leaf, state)
    report = compiled(state_step(loss_fn), state, shape((256, 8, 256), P("data")))
    assert sent(report, "gradient", "reduce-scatter") == {"float32": 3 * 4 * 3 * 256 * 256}
    assert sent(report, "gradient", "all-reduce") == {}


def test_the_fix_of_a_sum_that_remains_is_a_backward_pass():
    def step_with(matmul):
        def loss_fn(params, x):
            w = (params[0] * (x[:1] > 0).astype(jnp.float32)).astype(jnp.bfloat16)
            return jnp.mean(matmul(low(x), w).astype(jnp.float32) ** 2)

        return step_of(loss_fn)

    args = [shape((WIDTH, WIDTH), P())], BATCH
    report = audit(step_with(jnp.matmul), *args, recipe=BF16, target="h200")
    finding = the_only(report.findings, "all_reduce_16bit")
    assert finding.severity == "error" and finding.file == __file__
    assert "loss, grads = jaxmp.value_and_grad(loss_fn)(params, batch)" in finding.fix
    code = finding.fix.splitlines()[-1].strip()

    def backward(saved, g):
        x, w = saved
        exec(code, {"jnp": jnp, "x": x, "g": g}, scope := {})
        return g @ w.T, scope["d_w"].astype(w.dtype)

    matmul = jax.custom_vjp(jnp.matmul)
    matmul.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    report = audit(step_with(matmul), *args, recipe=BF16, target="h200")
    assert "all_reduce_16bit" not in severities(report)
    assert sent(report, "gradient") == {"float32": 4 * ONE + 4}  # and the loss


def test_the_gradient_of_an_activation_that_only_a_scale_reads_is_no_error():
    """In tensor parallelism, the gradient of the first layer's input is summed in 16 bits."""

    def loss_fn(params, x):
        scale, up, down = map(low, params)
        with jax.named_scope("Net"), jax.named_scope("mlp"):
            y = jax.nn.relu((low(x) * scale[None]) @ up) @ down
        return jnp.mean(y.astype(jnp.float32) ** 2)

    params = [
        shape((WIDTH,), P(), mesh=MESH_2D),
        shape((WIDTH, 4 * WIDTH), P(None, "model"), mesh=MESH_2D),
        shape((4 * WIDTH, WIDTH), P("model", None), mesh=MESH_2D),
    ]
    report = compiled(step_of(loss_fn), params, shape((ROWS, WIDTH), P("data"), mesh=MESH_2D))
    assert severities(report) == {}
    rows = {(r.content, r.dtype, r.axes) for r in report.collectives if r.bytes > 4096}
    assert rows == {("activation", "bfloat16", ("model",)), ("gradient", "float32", ("data",))}
    assert len([note for note in report.notes if "as in tensor parallelism" in note]) == 1


def test_gradients_that_an_optimizer_multiplies_are_gradients():
    """Muon multiplies gradients; a loop over steps multiplies the parameters they update."""

    def muon(params, x):
        grads = jax.grad(mlp)(params, x)
        return [p - 0.1 * (g @ g.T) @ g for p, g in zip(params, grads, strict=True)]

    step = step_of(mlp, jax.value_and_grad)

    def steps(params, x):
        return lax.scan(lambda params, _: step(params, x), params, None, length=3)

    for fn, times in ((muon, 1), (steps, 3)):
        report = compiled(fn, [shape((WIDTH, WIDTH), P())] * LAYERS)
        assert severities(report) == {"all_reduce_16bit": "error"}
        assert sent(report, "gradient") == {"bfloat16": 2 * LAYERS * ONE * times}


# ---------------------------------------------------------------------------
# Gathers
# ---------------------------------------------------------------------------


def test_a_weight_gathered_wider_than_it_is_read_is_an_error():
    """The obvious constraint of the gathered weight lets XLA gather before it casts."""
    wide = functools.partial(mlp, cast=lambda w: constrain(low(w), P(None, None)))
    report = compiled(step_of(wide, jax.value_and_grad))
    errors = [f for f in report.errors if f.check == "fp32_all_gather"]
    assert [f.module for f in errors] == ["layer_1", "layer_2"]
    assert "1.05 MB of weights are gathered in float32 and read in bfloat16." in errors[0].message
    report = compiled(step_of(wide, jax.value_and_grad), policies=None)
    assert severities(report)["fp32_all_gather"] == "warning"

    code = [line.strip() for line in errors[0].fix.splitlines() if line.startswith("    ")]
    names = {"jax": jax, "jnp": jnp, "sharding_of_w": NamedSharding(MESH, SPLIT)}
    names["gathered_sharding_of_w"] = NamedSharding(MESH, P(None, None))

    def fixed(w):
        scope = names | {"w": w}
        exec("\n".join(code[:2]), scope)
        return scope["w"]

    report = compiled(step_of(functools.partial(mlp, cast=fixed), jax.value_and_grad))
    assert "fp32_all_gather" not in severities(report)
    assert sent(report, "weight") == {"bfloat16": 2 * LAYERS * ONE}


# Where no mesh is set: code that gathers a weight and casts it, and the part that the fix replaces.
GATHERED = {
    "before a cast": ("constrain({}, whole()).astype(bf)", "constrain({}, whole())", None),
    "after a cast": ("constrain({}.astype(bf), whole())", "", None),
    "a spec": ("constrain({}, P()).astype(bf)", "constrain({}, P())", MESH),
}
GATHERING_STEP = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from test_audit_sharding import MESH, step_of
constrain, bf = jax.lax.with_sharding_constraint, jnp.bfloat16
whole = lambda: NamedSharding(MESH, P())

def loss_fn(params, x):
    x = x.astype(bf)
    for w in params:
        x = jax.nn.relu(x @ {code})
    return jnp.mean(x.astype(jnp.float32) ** 2)

step = step_of(loss_fn, jax.value_and_grad)
"""


def gathering_step(code, folder):
    """Returns a step that reads the weight `code` in each layer."""
    file = folder / f"step_{len(list(folder.iterdir()))}.py"
    file.write_text(GATHERING_STEP.format(code=code))
    return runpy.run_path(str(file))["step"], str(file)


@fast_cases("before a cast")
@pytest.mark.parametrize("name", GATHERED)
def test_the_fix_of_a_gather_is_the_constraint_of_the_program(name, tmp_path):
    code, replaced, mesh = (x.format("w") if isinstance(x, str) else x for x in GATHERED[name])
    with jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
        step, file = gathering_step(code, tmp_path)
        report = compiled(step)
        finding = the_only(report.errors, "fp32_all_gather")
        assert finding.file == file and finding.text == f"x = jax.nn.relu(x @ {code})"
        fix = finding.fix.splitlines()[-1].strip()
        assert sent(report, "weight")["float32"] >= 4 * ONE
        report = compiled(gathering_step(code.replace(replaced or code, fix), tmp_path)[0])
    assert "fp32_all_gather" not in severities(report)
    assert sent(report, "weight") == {"bfloat16": 2 * LAYERS * ONE}


def test_a_constraint_that_the_batch_shares_is_not_the_fix_of_a_gather():
    """`constrain` would also split the rows that it gathers here."""

    def loss_fn(params, x):
        x = constrain(low(x), P(None, None))
        for w in params:
            x = jax.nn.relu(x @ constrain(w, P(None, None)).astype(jnp.bfloat16))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    x = shape((ROWS, WIDTH), P(None, "data"))
    report = compiled(step_of(loss_fn, jax.value_and_grad), batch=x)
    finding = the_only(report.errors, "fp32_all_gather")
    assert "gathered_sharding_of_w" in finding.fix


def test_weights_that_are_read_in_fp32_or_in_fp8_are_gathered_in_the_right_dtype():
    def loss_fn(params, x):
        scale, router, up = params
        x = constrain(x)
        with jax.named_scope("Net"):
            with jax.named_scope("norm"):
                x = low(x * constrain(scale, P(None))[None])
            with jax.named_scope("router"):
                gates = x.astype(jnp.float32) @ constrain(router, P(None, None))
            with jax.named_scope("up"):
                y = jaxmp.fp8.dot_general("current")(
                    x, low(constrain(up)), (((1,), (0,)), ((), ()))
                )
        return jnp.mean(constrain(y).astype(jnp.float32) ** 2) + jnp.mean(gates**2)

    sizes = (8 * WIDTH,), (8 * WIDTH, 64), (8 * WIDTH, WIDTH)
    params = [shape(size, P("data", *[None] * (len(size) - 1))) for size in sizes]
    recipe = jaxmp.load_recipe("fp8")
    rules = [jaxmp.Rule("router", "c=f32"), *recipe.policies.rules]
    policies = recipe.replace(policies=dataclasses.replace(recipe.policies, rules=rules))
    report = compiled(step_of(loss_fn), params, shape((256, 8 * WIDTH), P("data")), policies)
    assert report.ok and "fp32_all_gather" not in severities(report)
    gathered = {(r.module, r.dtype) for r in report.collectives if r.content == "weight"}
    assert {("router", "float32"), ("up", "float8_e4m3fn")} <= gathered


def test_rows_of_a_table_are_activations_if_the_batch_selects_them():
    """The table of positions is gathered as a weight, although its rows are looked up."""

    def loss_fn(params, tokens):
        tokens_table, positions_table, w = params
        x = low(tokens_table)[tokens] + low(positions_table)[jnp.arange(tokens.shape[1])][None]
        return jnp.mean((constrain(x, P("data")) @ low(w)).astype(jnp.float32) ** 2)

    params = [shape((4096, WIDTH), P(None, "data")), shape((256, WIDTH), P(None, "data")), *PARAMS]
    tokens = jax.ShapeDtypeStruct((64, 256), jnp.int32, sharding=NamedSharding(MESH, P("data")))
    report = compiled(step_of(lambda p, t: loss_fn(p[:3], t)), params, tokens)
    assert "activation_all_gather" not in severities(report)
    assert 256 * WIDTH * 2 in {r.bytes for r in report.collectives if r.content == "weight"}


@functools.cache
def zero_1(name):
    recipe = jaxmp.load_recipe(name)
    params = [jnp.zeros((WIDTH, WIDTH))] * LAYERS
    state = jax.eval_shape(lambda: new_state(params, recipe, optax.adam(1e-3)))
    whole = [NamedSharding(MESH, P())] * LAYERS
    shardings = jaxmp.state_shardings(state, whole, optimizer="data")
    state = jax.tree.map(lambda x, at: shape(x.shape, at.spec, x.dtype), state, shardings)
    step = jax.jit(state_step(mlp), donate_argnums=0, out_shardings=(shardings, None))
    with jax.numpy_dtype_promotion("standard"):  # optax.adam
        return compiled(step, state, policies=recipe)


def test_zero_1_gathers_updated_parameters_as_they_are_stored():
    report = zero_1("bf16")
    assert report.ok and severities(report) == {"fp32_all_gather": "warning"}
    assert sent(report, "update", "all-gather") == {"float32": 4 * LAYERS * ONE}
    finding = the_only(report.findings, "fp32_all_gather")
    assert "of updated parameters are gathered in float32" in finding.message
    exec(finding.fix.splitlines()[-1].strip(), {"jaxmp": jaxmp}, scope := {})
    report = zero_1(scope["recipe"].name)
    assert report.ok and severities(report) == {}
    assert sent(report, "update", "all-gather") == {"bfloat16": 2 * LAYERS * ONE}


def test_updates_that_xla_gathers_together_with_a_gradient_are_updates():
    """The gradient is that of a table, of which the head's part is gathered for its scatter."""
    shapes = {"down": (4 * WIDTH, WIDTH), "table": (2 * WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH)}
    params = {name: shape(sizes, P()) for name, sizes in shapes.items()}
    moments = {name: shape(sizes, SPLIT) for name, sizes in shapes.items()}

    def loss_fn(params, tokens):
        x = low(params["table"])[tokens]
        h = x + jax.nn.gelu(x @ low(params["up"])) @ low(params["down"])
        return jnp.mean((h @ low(params["table"]).T).astype(jnp.float32) ** 2)

    def step(params, moments, tokens):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, tokens)
        moments = jax.tree.map(lambda m, g: constrain(0.9 * m + g), moments, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments

    tokens = shape((8, ROWS), P("data"), jnp.int32)
    where = [jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (params, moments)]
    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=tuple(where))
    report = audit(step, params, moments, tokens, recipe=BF16, target="h200")
    size = sum(4 * np.prod(sizes) for sizes in shapes.values())
    assert sent(report, "update", "all-gather") == {"float32": size}


@pytest.mark.parametrize("is_placed", [True, False])
@fast_cases("True")
def test_activations_gathered_over_the_axis_of_the_weights(is_placed):
    """Few rows are cheaper to gather than weights, until the activations are constrained."""
    params = [
        shape((WIDTH, 4 * WIDTH), P(None, "data")),
        shape((4 * WIDTH, WIDTH), P("data", None)),
    ]
    batch = shape((64, WIDTH), P("data") if is_placed else P())
    step = jax.jit(step_of(functools.partial(mlp, rows=unchanged)))

    def placed_step(params, x):
        return step(params, constrain(x, P("data")))

    report = compiled(step if is_placed else jax.jit(placed_step), params, batch)
    finding = the_only(report.findings, "activation_all_gather")
    assert finding.severity == "warning" and finding.module == "layer_0"
    assert "65.5 kB of activations are gathered over the axis 'data'" in finding.message
    assert sent(report, "weight") == {}

    def rows(x):
        scope = {"jax": jax, "NamedSharding": NamedSharding, "P": P, "mesh": MESH, "x": x}
        exec(finding.fix.splitlines()[1].strip(), scope)
        return scope["x"]

    report = compiled(step_of(functools.partial(mlp, rows=rows)), params, batch)
    assert "activation_all_gather" not in severities(report)
    assert set(sent(report, "weight")) == {"bfloat16"}


def test_activations_gathered_although_they_are_constrained():
    """XLA gathers some activations of a plain function until it knows the weights' shardings."""
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "table": (2 * WIDTH, WIDTH)}
    specs = {"up": P(None, "data"), "down": SPLIT, "table": SPLIT}
    params = {name: shape(shapes[name], specs[name]) for name in shapes}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)

    def loss_fn(params, tokens):
        x = constrain(low(params["table"])[tokens], P("data"))
        h = constrain(x + jax.nn.gelu(x @ low(params["up"])) @ low(params["down"]), P("data"))
        return jnp.mean((h @ low(params["table"]).T).astype(jnp.float32) ** 2)

    def run(loss_fn):
        tokens = shape((8, ROWS), P("data"), jnp.int32)
        return compiled(jax.jit(jaxmp.value_and_grad(loss_fn)), params, tokens)

    report = run(loss_fn)
    assert severities(report)["activation_all_gather"] == "warning"
    fix = the_only(report.findings, "activation_all_gather").fix.splitlines()[-1]

    def fixed(params, tokens):
        scope = {"jax": jax, "params": params, "params_shardings": shardings}
        exec(fix.strip(), scope)
        return loss_fn(scope["params"], tokens)

    report = run(fixed)
    assert severities(report) == {}
    assert set(sent(report, "weight")) == {"bfloat16"}


def test_gathered_weights_that_are_kept_until_the_backward_pass():
    report = compiled(step_of(mlp))
    finding = the_only(report.findings, "kept_weights")
    # The backward pass does not multiply by the first weight.
    kept = 2 * (LAYERS - 1) * ONE
    assert finding.severity == "warning" and f"{kept / 1e6:.2f} MB" in finding.message
    assert sum(row.bytes for row in report.collectives if row.is_kept) == kept
    assert report.ok and "jax.checkpoint(block)" in finding.fix

    remat = functools.partial(mlp, block=jax.checkpoint)
    split = functools.partial(mlp, cast=lambda w: low(constrain(w)))
    for loss_fn, passes in ((remat, 2 * LAYERS), (split, 2 * LAYERS - 1)):
        report = compiled(step_of(loss_fn))
        assert severities(report) == {}
        assert sent(report, "weight") == {"bfloat16": 2 * ONE * passes}

    recipe = jaxmp.load_recipe("bf16").replace(regather=False)
    step = step_of(split, functools.partial(jaxmp.value_and_grad, regather=recipe.regather))
    finding = the_only(compiled(step, policies=recipe).findings, "kept_weights")
    exec(finding.fix.splitlines()[-1].strip(), scope := {"recipe": recipe})
    assert scope["recipe"].regather


# ---------------------------------------------------------------------------
# Microbatches
# ---------------------------------------------------------------------------

PARTS = 4
WHOLE = [shape((WIDTH, WIDTH), P())] * LAYERS


def in_microbatches(loss_fn, **options):
    return jaxmp.value_and_grad(loss_fn, microbatches=PARTS, **options)


def free(params, x):
    """The loss without constraints, for `shard_map`."""
    return mlp(params, x, rows=unchanged)


def remedied(report, mesh=MESH):
    """Returns the step with the remedy of `reduction_per_microbatch` in a report."""
    fix = the_only(report.findings, "reduction_per_microbatch").fix
    scope = {"jax": jax, "jnp": jnp, "jaxmp": jaxmp, "P": P, "mesh": mesh, "loss_fn": free}
    split = [NamedSharding(mesh, SPLIT)] * LAYERS

    def run(params, batch):
        scope.update(params=params, batch=batch, params_shardings=split)
        exec(code_of(fix), scope)
        return scope["loss"], scope["grads"]

    return step_of(free, lambda _: run)


def test_microbatches_under_jit_are_summed_one_by_one_and_the_remedy_sums_once():
    whole = 4 * LAYERS * ONE
    report = compiled(step_of(mlp, in_microbatches), WHOLE)
    assert severities(report) == {"reduction_per_microbatch": "warning"}
    finding = the_only(report.findings, "reduction_per_microbatch")
    assert "12.6 MB of gradients" in finding.message and "a loop over 4" in finding.message
    # XLA adds the loss to the same array.
    assert sent(report, "gradient") == {"float32": pytest.approx(PARTS * whole, rel=1e-4)}

    report = compiled(remedied(report), WHOLE)
    assert severities(report) == {}
    assert sent(report, "gradient") == {"float32": pytest.approx(whole, rel=1e-4)}
    assert sum(row.count for row in report.collectives if row.bytes > 4096) == 1


def test_microbatches_of_reduced_parameters_are_summed_once():
    mesh = mesh_of(AxisType.Explicit, data=8)
    batch = shape((ROWS, WIDTH), P("data"), mesh=mesh)
    in_parts = functools.partial(in_microbatches, interleave=True)
    spec = NamedSharding(mesh, P(None, None, reduced={"data"}))

    def of_reduced(loss_fn):
        run = in_parts(loss_fn)
        return lambda params, batch: run([jax.reshard(p, spec) for p in params], batch)

    params = [shape((WIDTH, WIDTH), P(), mesh=mesh)] * LAYERS
    report = compiled(step_of(free, of_reduced), params, batch)
    assert severities(report) == {}
    assert sent(report, "gradient") == {"float32": pytest.approx(4 * LAYERS * ONE, rel=1e-4)}
    # The loss is summed in each microbatch.
    assert not any(row.in_outer_loop and row.bytes > 4096 for row in report.collectives)
    summed_once = remedied(compiled(step_of(free, in_parts), params, batch), mesh)
    assert severities(compiled(summed_once, params, batch)) == {}


def test_chunks_of_the_loss_are_no_microbatches():
    """With two mesh axes, XLA summed the gradient of a split table in each chunk of the loss."""
    specs = P(("model", "data"), None), P("model", None)
    parts, whole = (functools.partial(constrain, spec=spec, mesh=MESH_2D) for spec in specs)
    table = shape((4 * WIDTH, WIDTH), specs[0], mesh=MESH_2D)
    batch = shape((4, ROWS, WIDTH), P("data"), mesh=MESH_2D)

    def loss_fn(table, x):
        x = constrain(low(x), P("data"), MESH_2D)
        labels = jnp.zeros(x.shape[:2], jnp.int32)
        gathered = whole(parts(low(table)))
        return jaxmp.losses.linear_cross_entropy(x, gathered, labels, transposed=True)

    report = compiled(jax.jit(jaxmp.value_and_grad(loss_fn)), table, batch)
    # Half of the FP32 gradient and the loss, once.
    assert sent(report, "gradient") == {"float32": pytest.approx(4 * 4 * ONE // 2, rel=1e-4)}


def test_the_remedy_for_microbatches_gathers_weights_in_16_bits():
    report = compiled(remedied(compiled(step_of(mlp, in_microbatches))))
    assert report.ok and severities(report) == {"kept_weights": "warning"}
    assert "before the loop over microbatches" in the_only(report.findings, "kept_weights").fix
    assert sent(report, "weight") == {"bfloat16": 2 * LAYERS * ONE}
    assert sent(report, "gradient") == {"float32": pytest.approx(4 * LAYERS * ONE, rel=1e-4)}


def test_the_remedy_for_microbatches_leaves_other_axes_automatic():
    mesh = MESH_2D
    columns = [P(None, "model"), P("model", None)]
    params = [shape((WIDTH, WIDTH), spec, mesh=mesh) for spec in columns]
    batch = shape((ROWS, WIDTH), P("data"), mesh=mesh)
    by_rows = functools.partial(
        mlp, rows=functools.partial(constrain, spec=P("data", P.UNCONSTRAINED), mesh=mesh)
    )
    summed_once = remedied(compiled(step_of(by_rows, in_microbatches), params, batch), mesh)
    report = compiled(summed_once, params, batch)
    assert severities(report) == {}
    # Each device has half of each gradient, and sums the activations of each microbatch.
    assert sent(report, "gradient") == {"float32": pytest.approx(4 * ONE, rel=1e-4)}
    sums = [r for r in report.collectives if r.content == "activation" and r.bytes > 4096]
    assert {(row.axes, row.count, row.in_outer_loop) for row in sums} == {(("model",), PARTS, True)}


def test_a_loop_over_steps_is_no_loop_over_microbatches():
    step = step_of(mlp)

    def steps(params, x):
        return lax.scan(lambda params, _: step(params, x), params, None, length=PARTS)

    assert severities(compiled(steps, WHOLE)) == {}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@fast_cases("AxisType.Explicit")
def test_interleaved_microbatches_leave_rows_on_their_devices(axis_type):
    mesh = mesh_of(axis_type, data=8)
    params = [shape((WIDTH, WIDTH), P(), mesh=mesh)]
    batch = shape((ROWS, WIDTH), P("data"), mesh=mesh)
    operations = []
    for interleave in (False, True):
        options = functools.partial(in_microbatches, interleave=interleave)
        report = compiled(step_of(free, options), params, batch)
        assert "reduction_per_microbatch" in severities(report)
        rows = [row for row in report.collectives if row.bytes >= 4096 * row.count]
        operations.append({row.operation for row in rows})
    assert operations[0] > {"all-reduce"} and operations[1] == {"all-reduce"}


# ---------------------------------------------------------------------------
# Rows of the report
# ---------------------------------------------------------------------------


def test_views_list_collectives_with_content_dtype_bytes_axes_and_module():
    report = compiled(step_of(mlp))
    rows = [line.split() for line in report.to_text(full=True, width=160).splitlines()]
    for n in range(LAYERS):
        gather = ["all-gather", "bfloat16", "524", "kB", "1", "array", "weight", "data", "forward"]
        assert any(row[:10] == [*gather, f"layer_{n}"] for row in rows)
        reduction = ["reduce-scatter", "float32", "1.05", "MB", "1", "array", "gradient", "data"]
        assert any(row[:10] == [*reduction, "backward", f"layer_{n}"] for row in rows)
    assert "all-gather" in report.to_html(full=True)
    fields = json.loads(report.to_json())["collectives"]
    assert {"operation", "content", "dtype", "bytes", "axes", "module"} <= set(fields[0])
    assert jaxmp.typing.AuditReport.from_json(report.to_json()) == report
