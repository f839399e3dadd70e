"""Statistics of the tensors of a training step, and the loss scale that they suggest."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

import jaxmp
import models_nnx
import training_stats
from arrays import normal
from grids import EXPENSIVE
from jaxmp import fp8
from jaxmp._programs import rounded_to
from jaxmp._tools.audit._trace import trace
from jaxmp._tools.stats._measure import FORMATS, measure_tensor
from jaxmp._tools.stats._with_stats import _Program
from jaxmp.errors import AuditError
from models_linen import Perceptron
from sources import results_of
from training_steps import new_state, state_step

pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")

LINEAR = (((1,), (0,)), ((), ()))


W, X = normal(0, 32, 64), normal(1, 48, 32)


# ---------------------------------------------------------------------------
# One tensor, compared with NumPy
# ---------------------------------------------------------------------------


def spread(seed, size=4000):
    """Returns FP32 numbers over the range of FP32, also of the edges of each format."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size) * 2.0 ** rng.uniform(-140, 120, size)
    edges = [0.0, np.inf, -np.inf, np.nan, 2.0**-149, 65504, 65519.996, 65520, -65520, 464, 465]
    for name in FORMATS:
        info = ml_dtypes.finfo(name)
        half = float(info.smallest_subnormal) / 2
        edges += [half, -half, half * 1.001, half * 3, float(info.max)]
    return np.concatenate([x, edges]).astype(np.float32)


def scale_of(x, name):
    if not name.startswith("float8"):
        return np.float32(1)
    amax = np.abs(x[np.isfinite(x)]).max()
    return np.float32(2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(name).max) / amax)))


@pytest.mark.parametrize("kind", ["spread", "one", "small"])
@pytest.mark.parametrize("name", FORMATS)
def test_fractions_are_those_of_numpy(name, kind):
    x = spread(0)
    if kind == "one":
        x = np.float32([[3.0, -1e-9], [0.0, 1.0]])
    if kind == "small":
        x = x[np.isfinite(x) & (np.abs(x) < 2.0**-20)]
    stats = jax.jit(measure_tensor)(x)
    with np.errstate(all="ignore"):
        scaled = x * scale_of(x, name)
        rounded = scaled.astype(name).astype(np.float32)
        known = np.isfinite(x) & (x != 0)
        count = np.float32(known.sum())
        underflow = np.float32((known & (rounded == 0)).sum()) / count
        overflow = np.float32((known & ~np.isfinite(rounded)).sum()) / count
    assert float(stats.formats[name].underflow) == underflow
    assert float(stats.formats[name].overflow) == overflow
    assert float(stats.zero) == np.float32((x == 0).sum()) / np.float32(x.size)
    assert float(stats.nonfinite) == np.float32((~np.isfinite(x)).sum()) / np.float32(x.size)
    assert float(stats.amax) == np.abs(x[np.isfinite(x)]).max()


def test_exponents_are_counted_as_numpy_reads_them():
    x = spread(1)
    bits = x.view(np.uint32) & 0x7FFFFFFF
    column = (bits & 0x7FFFFF != 0).astype(int) + (bits & 0x7FFFFF >= 0x7FF000)
    want = np.zeros((256, 3), np.uint32)
    np.add.at(want, (bits >> 23, column), 1)
    np.testing.assert_array_equal(jax.jit(measure_tensor)(x).exponents, want)


@pytest.mark.parametrize("magnitude", [1.0, 2.0**-100, 2.0**90])
def test_noise_and_power_of_a_tensor_of_any_magnitude(magnitude):
    x = np.asarray(normal(2, 64, 32)) * np.float32(magnitude)
    stats = jax.jit(measure_tensor)(x)
    wide = x.astype(np.float64)
    assert float(stats.rms) == pytest.approx(np.sqrt(np.mean(wide**2)), rel=1e-5)
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        scale = scale_of(x, name)
        error = (x * scale).astype(name).astype(np.float64) / scale - wide
        want = 10 * np.log10(np.sum(wide**2) / np.sum(error**2))
        assert float(stats.formats[name].snr) == pytest.approx(want, abs=1e-2)


@pytest.mark.parametrize("name", [*FORMATS, "float8_e5m2fnuz"])
def test_numbers_are_rounded_as_numpy_casts_them(name):
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    x = (upper | np.uint32([0, 1, 0xFFF, 0x1000, 0x3000, 0x7FFF, 0x8000, 0x8001])).view(np.float32)
    with np.errstate(all="ignore"):
        want = x.astype(name).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(rounded_to, static_argnums=1)(x, name), want)


def test_one_reduction_sums_the_losses_of_all_formats():
    names = [e.primitive.name for e in jax.make_jaxpr(measure_tensor.__wrapped__)(X).eqns]
    assert [n for n in names if n in ("reduce", "reduce_sum", "reduce_max")] == [
        "reduce_max",
        "reduce",
    ]


# ---------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------


def loss_fn(params, x):
    with jax.named_scope("up"):
        hidden = jnp.tanh(x @ params["up"])
    with jax.named_scope("down"):
        y = hidden @ params["down"]
    return jnp.mean(jnp.square(y))


PARAMS = {"up": normal(3, 32, 16) / 6, "down": normal(4, 16, 8) / 4}


def plain_step(**options):
    state = new_state(PARAMS, "fp16", optax.adam(1e-2))
    return jax.jit(state_step(loss_fn, **options)), state


@functools.cache
def stats_of(is_scaled):
    """Returns the statistics of a step with a loss scale, or of the gradients alone."""
    step, state = plain_step() if is_scaled else (jax.grad(loss_fn), PARAMS)
    return jaxmp.with_stats(step)(state, X)


def shapes_of(step, *args):
    """Returns the tensors that are measured of a step, without compiling it."""
    program, leaves = _Program(trace(step, args, {})), jax.tree.leaves(args)
    return jax.eval_shape(program, [leaves[n] for n in program.traced.positions]).tensors


def one_layer(w, x):
    with jax.named_scope("up"):
        return jnp.mean(jnp.square(x @ w))


def test_all_kinds_of_tensors_of_a_training_step():
    step, state = plain_step()
    stats = stats_of(is_scaled=True)
    tensors = stats.tensors
    names = {f"state.params['{name}']" for name in PARAMS}
    assert set(tensors["parameters"]) == set(tensors["gradients"]) == names
    assert set(tensors["updates"]) == names and set(tensors["activations"]) == {"up", "down"}
    sides = {"up:lhs", "up:rhs", "up:output_grad", "down:lhs", "down:rhs", "down:output_grad"}
    assert {name.partition("#")[0] for name in tensors["operands"]} == sides
    scale = float(jaxmp.get_loss_scale(state).scale_value)
    assert float(stats.loss_scale) == scale > 1
    grads = jax.grad(loss_fn)(PARAMS, X)
    new, _ = step(state, X)
    for name, x in PARAMS.items():
        at = f"state.params['{name}']"
        assert float(tensors["parameters"][at].amax) == float(jnp.abs(x).max())
        want = scale * float(jnp.abs(grads[name]).max())
        assert float(tensors["gradients"][at].amax) == pytest.approx(want, rel=1e-4)
        update = float(jnp.abs(new.params[name] - x).max())
        assert float(tensors["updates"][at].amax) == pytest.approx(update, rel=1e-4)
    hidden = jnp.tanh(X @ PARAMS["up"])
    assert float(tensors["activations"]["up"].rms) == pytest.approx(
        float(jnp.sqrt(jnp.mean(hidden**2))), rel=1e-4
    )


def test_the_training_is_the_same_with_and_without():
    results = []
    for measured in (False, True):
        step, state = plain_step()
        measure_step = jaxmp.with_stats(step)
        text = step.lower(state, X).as_text()
        for number in range(100):
            if measured and number % 25 == 0:
                measure_step(state, X)
            state, _ = step(state, X)
        assert step.lower(state, X).as_text() == text and step._cache_size() <= 1
        results.append(state)
    jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, results))


def test_a_reference_is_measured_and_not_changed():
    ref = jax.new_ref(jnp.ones(4))

    def step(w, ref):
        ref[...] += w
        return jnp.sum(w * ref[...])

    measure = jaxmp.with_stats(jax.jit(step))
    for value in (1.0, 3.0):
        ref[...] = jnp.full(4, value)
        stats = measure(jnp.ones(4), ref).tensors["parameters"]
        assert float(stats["ref"].amax) == value and np.all(ref[...] == value)


def test_a_sample_traces_the_step_once():
    calls = []

    def step(w, x):
        calls.append(1)
        return jax.grad(one_layer)(w, x)

    measure_step = jaxmp.with_stats(step)
    first = measure_step(PARAMS["up"], X)
    second = measure_step(PARAMS["up"], 2 * X)
    assert len(calls) == 1
    amax = [float(stats.tensors["operands"]["up:lhs"].amax) for stats in (first, second)]
    assert amax[1] == 2 * amax[0]


def test_microbatches_have_an_axis():
    step, state = plain_step(microbatches=3)
    tensors = jaxmp.with_stats(step)(state, X).tensors
    gradients = {n: x for n, x in tensors["gradients"].items() if x.amax.shape == (3,)}
    scale = float(jaxmp.get_loss_scale(state).scale_value)
    for name in PARAMS:
        (stats,) = (x for n, x in gradients.items() if f"'{name}'" in n and "#" not in n)
        parts = [jax.grad(loss_fn)(PARAMS, x)[name] for x in jnp.split(X, 3)]
        # The mean over microbatches may be taken before or after the backward pass.
        want = np.array([float(jnp.abs(x).max()) * scale for x in parts])
        ratio = np.asarray(stats.amax) / want
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-3)
        assert round(float(ratio[0]), 3) in (1.0, 0.333)


def stacked(ws, x, remat):
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w)

    layer = jax.checkpoint(layer) if remat else layer
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0])


@pytest.mark.parametrize("remat", [False, True])
def test_a_scan_has_a_row_for_each_layer(remat):
    ws = normal(5, 3, 32, 32) * jnp.array([1.0, 2.0, 4.0])[:, None, None] / 6
    stats = jaxmp.with_stats(jax.grad(functools.partial(stacked, remat=remat)))(ws, X)
    operands = stats.tensors["operands"]
    # The backward pass has two matmuls; a matmul that is computed again is not counted.
    assert set(operands) == {
        "layer:lhs",
        "layer:rhs",
        "layer:output_grad",
        "layer:output_grad#2",
    }
    np.testing.assert_array_equal(operands["layer:rhs"].amax, jnp.abs(ws).max((1, 2)))
    x, outputs = X, []
    for w in ws:
        x = jnp.tanh(x @ w)
        outputs.append(float(jnp.sqrt(jnp.mean(x**2))))
    np.testing.assert_allclose(stats.tensors["activations"]["layer"].rms, outputs, rtol=1e-5)
    gradient = jax.grad(functools.partial(stacked, remat=remat))(ws, X)
    rows = [float(each.amax.max()) for each in stats.tensors["gradients"].values()]
    assert any(np.isclose(row, float(jnp.abs(gradient).max()), rtol=1e-5) for row in rows)


def test_linen_modules_have_their_paths():
    model = Perceptron()
    variables = model.init(jax.random.key(0), X)
    grad = jax.grad(lambda v, x: jnp.mean(jnp.square(model.apply(v, x))))
    tensors = shapes_of(grad, variables, X)
    assert set(tensors["activations"]) >= {"hidden", "out"}
    assert {f"v['params']['{n}']['kernel']" for n in ("hidden", "out")} <= set(tensors["gradients"])
    assert {"hidden:lhs", "out:output_grad"} <= set(tensors["operands"])


@pytest.mark.parametrize("is_nnx", [False, True])
def test_networks_with_the_same_modules_have_rows_of_their_own(is_nnx):
    """The first network is called twice."""
    wrap = jaxmp.load_recipe("fp32").wrap
    call = (lambda model, x: model(x)) if is_nnx else Perceptron().apply
    first, second = (
        wrap(models_nnx.Perceptron(nnx.Rngs(n), 32))
        if is_nnx
        else Perceptron().init(jax.random.key(n), X)
        for n in range(2)
    )

    def loss(first, second, batch):
        x = batch["x"]
        return jnp.mean(call(first, x) ** 2 + call(second, 2 * x) ** 2 - call(first, 3 * x) ** 2)

    grad = (nnx if is_nnx else jax).grad(loss, argnums=(0, 1))
    tensors = jaxmp.with_stats(grad)(first, second, {"x": X}).tensors
    names = ("args[0]", "args[1]") if is_nnx else ("first", "second")
    modules = {f"{name}{module}" for name in names for module in ("", "/hidden", "/out")}
    assert set(tensors["activations"]) == modules
    largest = jnp.abs(X).max()
    assert tensors["operands"][f"{names[1]}/hidden:lhs"].amax == 2 * largest
    assert f"{names[1]}/hidden:lhs#2" not in tensors["operands"]
    assert tensors["operands"][f"{names[0]}/hidden:lhs#2"].amax == 3 * largest
    expected = [float(jnp.abs(x).max()) for x in jax.tree.leaves(grad(first, second, {"x": X})[1])]
    rows = [x.amax for name, x in tensors["gradients"].items() if name.startswith(names[1])]
    np.testing.assert_allclose(sorted(map(float, rows)), sorted(expected), rtol=1e-5)


def test_nnx_modules_are_measured_and_not_changed():
    """The keys of dropout are not measured, and those of the step after it are the same."""
    model = models_nnx.Dropout(nnx.Rngs(0), 32)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(jnp.square(m(x))))(model)
        optimizer.update(model, grads)
        return loss

    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    tensors = jaxmp.with_stats(step)(model, optimizer, X).tensors
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model, nnx.Param), before)
    step(model, optimizer, X)
    names = {f"model.{name}.kernel.value" for name in ("hidden", "out")}
    assert set(tensors["parameters"]) == set(tensors["updates"]) == names
    want = jnp.abs(model.hidden.kernel[...] - before["hidden"]["kernel"][...]).max()
    update = tensors["updates"]["model.hidden.kernel.value"]
    assert float(update.amax) == pytest.approx(float(want), rel=1e-4)
    assert len(tensors["gradients"]) == 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_of_a_shard_map_have_an_axis(check_vma):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = PartitionSpec(), PartitionSpec("data")

    step = lambda w, x: lax.pmean(jax.grad(one_layer)(w, x), "data")
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma
    )
    tensors = jaxmp.with_stats(jax.jit(mapped))(PARAMS["up"], X).tensors
    want = [float(jnp.abs(x).max()) for x in jnp.split(X, 2)]
    np.testing.assert_array_equal(tensors["operands"]["up:lhs"].amax, want)


@pytest.mark.parametrize("enter", [jax.set_mesh, contextlib.nullcontext])
def test_explicit_axes_are_measured(enter):
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:2])
    place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    x, w = place(X, PartitionSpec("data")), place(PARAMS["up"], PartitionSpec())
    wave = jax.sharding.auto_axes(lambda x: jnp.sin(x) * 2, out_sharding=x.sharding)
    with enter(mesh):
        step = jax.grad(lambda w, x: one_layer(w, wave(x)))
        stats = jaxmp.with_stats(step, what_if=["float16"])(w, x)
    assert int(stats.tensors["operands"]["up:lhs"].exponents.sum()) == X.size
    assert 0 < stats.errors["float16"]["gradients"]["up"] < 2e-3


def test_a_branch_that_is_not_taken_has_no_elements():
    def loss(w, x, flag):
        with jax.named_scope("branch"):
            return jnp.sum(lax.cond(flag, lambda: jnp.sin(x @ w), lambda: x @ w * 2))

    measure_step = jaxmp.with_stats(jax.grad(loss))
    for flag in (True, False):
        stats = measure_step(W, X, jnp.array(flag))
        rows = [x for n, x in stats.tensors["operands"].items() if n.startswith("branch:lhs")]
        assert sorted(int(row.exponents.sum()) for row in rows) == [0, X.size]
        shown = [x.name for x in stats.report().tensors if x.name.startswith("branch:lhs")]
        assert len(shown) == 1


def test_operands_of_kernels_are_measured():
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    @jax.named_scope("kernel")
    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(double, out_shape=shape, interpret=True)(x) + 1

    tensors = jaxmp.with_stats(step)(X).tensors
    assert float(tensors["operands"]["kernel:operand_0"].amax) == float(jnp.abs(X).max())


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX requires cuDNN to trace it")
def test_kernels_of_cudnn_are_measured():
    """They do not run on this machine, so the program is traced for a GPU."""

    def loss(x):
        with jax.named_scope("attention"):
            y = jax.nn.dot_product_attention(x, x, x, implementation="cudnn")
        return y.astype(jnp.float32).sum()

    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    with jaxmp.default_target("h100"):
        tensors = shapes_of(jax.grad(loss), x)
    assert {f"attention:operand_{n}" for n in range(3)} <= set(tensors["operands"])
    assert "attention:output_grad" in tensors["operands"]
    assert set(tensors["activations"]) == {"attention"}


# ---------------------------------------------------------------------------
# What if
# ---------------------------------------------------------------------------


@jax.custom_vjp
def product(x, w):
    return x @ w


def product_gradient(saved, g):
    x, g = lax.optimization_barrier((saved[0], g))
    return g @ saved[1].T, x.T @ g


product.defvjp(lambda x, w: (x @ w, (x, w)), product_gradient)


# A backward pass also has values of the forward pass: operands of a function, or moved ones.
@pytest.mark.parametrize("matmul", [jnp.matmul, jax.jit(lambda x, w: x @ w), product])
def test_the_errors_of_a_format_are_those_of_a_step_in_it(matmul):
    """The reference is the same step, written in float16 with a loss scale."""

    def loss_fn(params, x, dtype):
        for name in ("up", "down"):
            with jax.named_scope(name):
                x = matmul(x.astype(dtype), params[name].astype(dtype))
        return jnp.mean(jnp.square(x.astype(jnp.float32))) * 2.0**-24

    def run(dtype, scale):
        loss = lambda params: loss_fn(params, X, dtype) * scale
        return jax.tree.map(lambda g: g / scale, jax.jit(jax.grad(loss))(PARAMS))

    step = functools.partial(jax.grad(loss_fn), dtype=jnp.float32)
    stats = jaxmp.with_stats(step, what_if=["float16", "float8"])(PARAMS, X)
    exact, narrow = run(jnp.float32, 1.0), run(jnp.float16, 2.0**24)
    norm = lambda x: float(jnp.linalg.norm(x))
    for name, x in exact.items():
        want = norm(narrow[name] - x) / norm(x)
        error = float(stats.errors["float16"]["gradients"][name])
        assert 0.3 < error / want < 3 and 1e-4 < error < 2e-3
        assert 10 * error < float(stats.errors["float8"]["gradients"][name]) < 0.2
    report = stats.report()
    assert report.loss_scale == 2.0**24
    assert type(report).from_json(report.to_json()) == report
    assert "float8 gradients" in report.to_text() and "float8 gradients" in report.to_html()
    # In the order of the forward pass, also after JAX has sorted the keys.
    report = jax.tree.map(lambda x: x, stats).report()
    assert list(report.errors["float16"]["activations"]) == ["up", "down"]
    text = report.to_text().partition("What if")[2]
    assert text.index("up ") < text.index("down ")


def test_the_logits_of_a_head_are_not_rounded():
    """The operands are integers that bfloat16 has, and FP8 has not."""
    x, w = (jnp.arange(-64.0, 64).reshape(shape) for shape in ((2, 64), (64, 2)))

    def loss_fn(w):
        with jax.named_scope("head"):
            logits = x @ w
        return jax.nn.logsumexp(logits * 1e-4)

    errors = jaxmp.with_stats(jax.grad(loss_fn), what_if=["float16", "float8"])(w).errors
    assert all(float(kinds["activations"]["head"]) == 0 for kinds in errors.values())


def test_a_head_leaves_other_matmuls_of_its_scope_in_fp8():
    a, b, c = (jax.random.normal(jax.random.key(n), (16, 16)) / 4 for n in range(3))

    def gradient_error(name):
        def loss_fn(a):
            x = jnp.tanh(jnp.tanh(jnp.eye(16) @ a) @ b)
            with jax.named_scope(name):
                logits = x @ c
            return -jax.nn.log_softmax(logits)[:, 0].mean()

        with jax.named_scope("net"):
            stats = jaxmp.with_stats(jax.grad(loss_fn), what_if=["float8"])(a)
        return [float(error) for error in stats.errors["float8"]["gradients"].values()]

    assert gradient_error("") == gradient_error("head") != [0.0]


@pytest.mark.parametrize("what_if", ["float16", ["bfloat16"]])
def test_a_format_that_is_not_emulated_is_refused(what_if):
    with pytest.raises(AuditError, match=r"what_if=\['float16'\]"):
        jaxmp.with_stats(jnp.sum, what_if=what_if)


# ---------------------------------------------------------------------------
# Cost
# ---------------------------------------------------------------------------


def test_tracing_costs_at_most_twice_the_step():
    rows = training_stats.cost(16, (training_stats.byte_gpt_of,))
    own, stats = (row["equations"] for row in rows)
    assert own < stats <= 2 * own, (own, stats)


def recorded(part):
    return results_of(f"training_stats_{part}_cpu")[part]


def test_the_measured_cost_at_48_layers_is_at_most_twice_the_step():
    rows = {(row["model"], row["program"]): row for row in recorded("cost")}
    assert {row["layers"] for row in rows.values()} == {48}
    measured = [(model, "tracing_seconds") for model in ("byte_gpt_of", "llama_of")]
    for model, part in [*measured, ("byte_gpt_of", "equations"), ("llama_of", "bytes")]:
        own, stats = (rows[model, program][part] for program in ("step", "statistics"))
        assert 0 < stats <= 2 * own, (model, own, stats)


def test_formats_rank_modules_as_validate_measures_them():
    ranks = {(row["model"], row["format"], row["tensors"]): row for row in recorded("ranks")}
    assert len(ranks) == 12
    assert min(row["spearman"] for row in ranks.values()) >= 0.75


@pytest.mark.parametrize("name", ["Digits", "ByteGpt"])
def test_the_measured_first_loss_scale_skips_no_step(name):
    (row,) = (row for row in recorded("loss_scale") if row["training"] == name)
    good = [
        2.0 ** int(power.removeprefix("2**"))
        for power, (underflow, overflow) in row["lost_by_power"].items()
        if underflow < 0.001 and not overflow
    ]
    assert row["suggested"] in good and row["lost"] < 0.001
    assert (row["steps"], row["skipped"]) == (100, 0)


# ---------------------------------------------------------------------------
# FP8
# ---------------------------------------------------------------------------


def fp8_loss(w, x, recipe):
    with jax.named_scope("layer"):
        y = fp8.dot_general(recipe)(x, w, LINEAR)
    return jnp.square(y).mean()


ROLES = {"layer:input", "layer:kernel", "layer:output_grad"}


@pytest.mark.parametrize("recipe", ["current", pytest.param("rowwise", marks=EXPENSIVE)])
def test_fp8_operands_are_measured_with_their_own_scales(recipe):
    step = jax.grad(functools.partial(fp8_loss, recipe=recipe))
    tensors = jaxmp.with_stats(step)(W, X).tensors
    assert {name.partition("#")[0] for name in tensors["operands"]} == ROLES
    assert {name.partition("#")[0] for name in tensors["fp8_scales"]} == ROLES
    for name, stats in tensors["operands"].items():
        actual = stats.formats["actual"]
        assert float(actual.overflow) == 0
        if recipe == "current":
            dtype = "float8_e5m2" if "grad" in name else "float8_e4m3fn"
            np.testing.assert_allclose(actual, stats.formats[dtype], rtol=1e-5)


def test_stale_fp8_scales_overflow():
    recipe = fp8.DelayedScaling(amax_history_len=2)
    state = fp8.init_state(recipe)
    product = lambda x, state: fp8.dot_general(recipe)(x, W, LINEAR, state=state)
    _, state = jax.jit(jax.grad(lambda x, s: product(x, s).sum(), (0, 1)))(X, state)
    stats = jaxmp.with_stats(product)((4 * X).at[0, 0].set(jnp.nan), state)
    row = stats.tensors["operands"][":input"]
    finite = 4 * np.abs(np.delete(np.asarray(X).ravel(), 0))
    # 464 is halfway between 448, the largest number of the format, and the next one.
    largest = 464 / np.exp2(np.floor(np.log2(448 / np.abs(X).max())))
    want = np.float32((finite > largest).sum()) / np.float32(finite.size)
    assert float(row.formats["actual"].overflow) == want > 0.05
    assert float(row.formats["float8_e4m3fn"].overflow) == 0
    assert float(row.nonfinite) == np.float32(1 / X.size)
    assert stats.tensors["fp8_scales"]


# ---------------------------------------------------------------------------
# Loss scale and report
# ---------------------------------------------------------------------------

POWERS = range(-14, 25)


def gradients_of(exponents, size=3000):
    """Returns a step whose gradient has numbers of these magnitudes, and its gradient."""
    rng = np.random.default_rng(0)
    g = (rng.normal(size=size) * 2.0 ** rng.uniform(*exponents, size)).astype(np.float32)
    g[:50], g[50:90] = 0, 2.0**-25
    return jax.grad(lambda w: jnp.sum(w * g)), g


@pytest.mark.parametrize("exponents", [(-30, -10), (-20, 4), (-24, 14), (-60, -45), (-40, 8)])
def test_the_suggested_scale_is_confirmed_by_all_powers_of_two(exponents):
    step, g = gradients_of(exponents)
    report = jaxmp.with_stats(step)(jnp.ones(g.size)).report()
    good, nonzero = {}, g != 0
    with np.errstate(over="ignore"):
        for power, row in zip(POWERS, report.scales, strict=True):
            rounded = (g * np.float32(2.0**power)).astype(np.float16)
            underflow = (nonzero & (rounded == 0)).sum() / nonzero.sum()
            overflow = np.isinf(rounded).sum() / nonzero.sum()
            assert row == (2.0**power, underflow, overflow)
            if overflow == 0 and underflow < 0.001:
                good[2.0**power] = underflow
    assert (report.loss_scale is None) == (not good)
    assert bool(good) == (exponents in [(-30, -10), (-20, 4)])
    assert report.loss_scale is None or report.loss_scale in good
    text = (
        f"DynamicLossScale(2.0**{np.log2(report.loss_scale):.0f})"
        if good
        else "No scale loses less than 0.1%"
    )
    assert text in str(report)
    lossless = [scale for scale, *shares in report.scales if not any(shares)]
    assert not lossless or f"2.0**{np.log2(lossless[0]):.0f} " in str(report)


def test_gradients_that_are_not_finite_or_all_zero_are_named():
    def loss_fn(w, x, factor):
        y = x @ w
        return jnp.mean(jnp.sqrt(jnp.sum(jnp.square(y * factor), -1)) * factor + y[:, 0] * factor)

    measured = jaxmp.with_stats(jax.grad(loss_fn))
    report = measured(W, X, jnp.float32(0)).report()
    assert report.loss_scale is None
    (row,) = (row for row in report.tensors if row.kind == "gradients")
    text = report.to_text()
    assert row.nonfinite == 1 and "nan/inf" in text
    assert "100.0% of the elements of the gradient w are infinite or NaN" in " ".join(text.split())
    assert re.search(r"^  w +100.0%$", text, re.MULTILINE)
    report = jaxmp.with_stats(jax.grad(lambda w, x: jnp.sum(0 * (x @ w))))(W, X).report()
    assert "All gradients of the step are zero" in report.to_text()


def test_the_scale_of_the_step_is_taken_out():
    plain, scaled = (stats_of(is_scaled=x).report() for x in (False, True))
    assert scaled.loss_scale == plain.loss_scale
    of_gradients = lambda report: sorted(x.rms for x in report.tensors if x.kind == "gradients")
    np.testing.assert_allclose(of_gradients(scaled), of_gradients(plain), rtol=1e-3)


def test_a_training_with_the_suggested_scale_skips_no_step():
    step, state = plain_step()
    scale = stats_of(is_scaled=False).report().loss_scale
    recipe = jaxmp.load_recipe("fp16").replace(loss_scale=jaxmp.DynamicLossScale(scale))
    state = new_state(PARAMS, recipe, optax.adam(1e-2))
    for _ in range(100):
        state, _ = step(state, X)
    assert int(jaxmp.get_skip_stats(state).total) == 0 and float(scale) > 1


def test_views_of_the_report():
    stats = stats_of(is_scaled=True)
    report = stats.report()
    assert str(stats) == str(report)
    assert type(report).from_json(report.to_json()) == report
    assert "Loss scale for float16" in report.to_html() and "state.params" in report.to_html()
    text = report.to_text(full=True, width=200)
    assert {"Parameters", "Gradients", "Updates", "Activations", "Operands"} <= set(
        text.splitlines()
    )
    empty = jaxmp.with_stats(lambda x: x @ x.T)(X).report()
    assert empty.loss_scale is None and "no gradients" in str(empty)


def test_an_object_that_is_not_a_function_is_refused():
    with pytest.raises(AuditError, match=r"(?s)type dict.*jaxmp\.with_stats\(train_step\)"):
        jaxmp.with_stats({})
