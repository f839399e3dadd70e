"""FP8 matmuls on explicit mesh axes, where shardings are part of the types of arrays."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from arrays import assert_close, f64, floats
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, fast_cases
from jaxmp import fp8
from jaxmp._core import _compat
from jaxmp._core._compat import described_gpus
from jaxmp._core._targets import get_target
from jaxmp._programs._jaxprs import equations
from jaxmp._tools.audit._compile import describe
from training_steps import new_state

MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
LINEAR = (((2,), (0,)), ((), ()))
DELAYED = fp8.DelayedScaling(amax_history_len=4)
SCALINGS = {"current": "current", "rowwise": "rowwise", "delayed": DELAYED, "mx": "mx"}

# Shardings of x[B, T, K] and w[K, N], and the `out_sharding` of their product.
LAYOUTS = {
    "data parallel": (P("data"), P(), None),
    "FSDP": (P("data"), P("data", None), P("data", None, None)),
    "columns": (P("data"), P(None, "model"), None),
    "rows": (P("data", None, "model"), P("model", None), P("data", None, None)),
    "one contracted axis": (P("data", None, "model"), P(), None),
    "FSDP x TP": (P("data"), P("data", "model"), P("data", None, "model")),
    "result in parts": (P("data", None, "model"), P("model", None), P(None, "data", "model")),
    "of a mesh": (P("data"), P("data", "model"), NamedSharding(MESH.abstract_mesh, P("data"))),
}


# Sums differ in order before a rounding to bfloat16, and FP8 values with them.
RTOL_OF_LOSSES = 0.02

X, W = floats(8, 4, 32), floats(32, 64, seed=1)


def placed(array, spec, dtype=jnp.bfloat16):
    return jax.device_put(jnp.asarray(array, dtype), NamedSharding(MESH, spec))


def step_of(scaling, out_sharding):
    """Returns a function of x, w and a state that returns result, loss and gradients."""
    is_stateful = isinstance(scaling, fp8.DelayedScaling)

    def loss_fn(x, w, state):
        if scaling is None:
            y = jax.lax.dot_general(x, w, LINEAR, out_sharding=out_sharding)
        else:
            product = fp8.dot_general(scaling)
            options = {"state": state} if is_stateful else {}
            y = product(x, w, LINEAR, out_sharding=out_sharding, **options)
        return jnp.sum(y.astype(jnp.float32) ** 2), y

    def step(x, w):
        state = fp8.init_state(DELAYED) if is_stateful else None
        argnums = (0, 1, 2) if is_stateful else (0, 1)
        (loss, y), grads = jax.value_and_grad(loss_fn, argnums, has_aux=True)(x, w, state)
        return y, loss, *grads[:2]

    return step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shardings_are_those_of_a_bf16_matmul(layout):
    of_x, of_w, out_sharding = LAYOUTS[layout]
    x, w = placed(X, of_x), placed(W, of_w)
    with jax.set_mesh(MESH):
        expected = jax.make_jaxpr(step_of(None, out_sharding))(x, w).out_avals
        for scaling in SCALINGS.values():
            avals = jax.make_jaxpr(step_of(scaling, out_sharding))(x, w).out_avals
            assert list(map(str, avals)) == list(map(str, expected))


@pytest.mark.parametrize("name", SCALINGS)
@fast_cases("current", "delayed")
def test_results_are_those_of_one_device(name):
    step = jax.jit(step_of(SCALINGS[name], P("data", None, "model")))
    with jax.set_mesh(MESH):
        results = step(placed(X, P("data")), placed(W, P("data", "model")))
    one_device = jax.jit(step_of(SCALINGS[name], None))(
        X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)
    )
    # The order of sums differs before a rounding to bfloat16.
    assert_close(*jax.tree.map(f64, (results, one_device)), 2**-7)


def test_ambiguous_shardings_are_refused_as_by_jax():
    x, w = placed(X, P("data", None, "model")), placed(W, P("model", None))
    with jax.set_mesh(MESH):
        for scaling in (None, "current"):
            with pytest.raises(
                Exception, match="specify the output sharding via the `out_sharding"
            ):
                jax.make_jaxpr(step_of(scaling, None))(x, w)


def test_einsum_takes_the_sharding_of_its_result():
    x, w = placed(X, P("data")), placed(W.reshape(32, 4, 16), P(None, "model"))
    equation, out = "btd,dnh->bnth", P("data", "model")
    with jax.set_mesh(MESH):
        product = lambda x, w: fp8.einsum("current")(equation, x, w, out_sharding=out)
        y = jax.jit(product)(x, w)
        expected = jax.jit(lambda x, w: jnp.einsum(equation, x, w, out_sharding=out))(x, w)
    assert jax.typeof(y) == jax.typeof(expected)
    exact, y = (np.asarray(a, np.float32) for a in (expected, y))
    assert 0 < np.linalg.norm(y - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["current", "rowwise"])
def test_weight_gradients_are_summed_in_fp32(name, kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    out_sharding = P("data", None, None) if kind == AxisType.Explicit else None

    def loss_fn(w, x):
        pair = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        y = fp8.dot_general(name)(*pair, LINEAR, out_sharding=out_sharding)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh), _compat.context(target="gpu"):
        run = jaxmp.value_and_grad(loss_fn)
        jaxpr = jax.make_jaxpr(run)(place(W, P("data", None)), place(X, P("data")))
    rows = [
        ([v.aval.dtype.name for v in equation.invars], equation.outvars[0].aval)
        for equation in equations(jaxpr)
        if equation.primitive.name == "dot_general"
    ]
    assert all(dtype.startswith("float8") for operands, _ in rows for dtype in operands)
    assert [str(aval.dtype) for _, aval in rows if aval.ndim == 2] == ["float32"]
    assert [str(aval.dtype) for _, aval in rows if aval.ndim == 3] == ["bfloat16"] * 2


# ---------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------


class Model(nn.Module):
    """Residual block of two layers."""

    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(64, name="up")(nn.LayerNorm(name="norm")(x)))
        return x + nn.Dense(32, name="down")(h)


class NnxModel(nnx.Module):
    """Residual block of two layers, which pass `out_sharding` on."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x, out_sharding=None):
        h = nnx.gelu(self.up(self.norm(x), out_sharding=out_sharding))
        return x + self.down(h, out_sharding=out_sharding)


def linen_run(recipe, out_sharding):
    model = recipe.wrap(Model())
    params = model.init(jax.random.key(0), X)
    state = new_state(params, recipe, optax.sgd(1.0), apply_fn=model.apply)

    def step(state, x):
        loss_fn = lambda params, x: jnp.mean((model.apply(params, x).astype(jnp.float32) - x) ** 2)
        loss, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads=grads), loss, grads

    return step, state


def nnx_run(recipe, out_sharding):
    model = recipe.wrap(NnxModel(nnx.Rngs(0)))
    optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.sgd(1.0)))
    graph, state = nnx.split((model, optimizer))

    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        loss_fn = lambda model, x: jnp.mean((model(x, out_sharding).astype(jnp.float32) - x) ** 2)
        loss, grads = optimizer.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss, nnx.to_pure_dict(grads)

    return step, state


def losses_of(make, recipe, is_on_mesh):
    step, state = make(recipe, P("data", None, None) if is_on_mesh else None)
    x = jnp.asarray(X)
    if is_on_mesh:
        state, x = jax.device_put(state, NamedSharding(MESH, P())), placed(X, P("data"), X.dtype)
    step, losses, grads = jax.jit(step), [], None
    for _ in range(3):
        state, loss, grads = step(state, x)
        losses.append(float(loss))
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads) if g.ndim)
    return losses


@EXPENSIVE
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (linen_run, "fp8"),
        (linen_run, "fp8_delayed"),
        (nnx_run, "fp8_delayed"),
        (nnx_run, "fp8_rowwise"),
    ],
)
def test_models_train_as_on_one_device(make, name):
    recipe = jaxmp.load_recipe(name)
    expected = losses_of(make, recipe, False)
    with jax.set_mesh(MESH):
        losses = losses_of(make, recipe, True)
    np.testing.assert_allclose(losses, expected, rtol=RTOL_OF_LOSSES)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", ["fp8", "fp8_rowwise"])
def test_autocast_passes_out_sharding_on(name):
    def loss_fn(w, x):
        y = jnp.einsum("btd,df->btf", x, w, out_sharding=P("data", None, "model"))
        return jnp.sum(y**2), y

    policies = jaxmp.load_recipe(name)
    with jax.set_mesh(MESH):
        args = placed(W, P("data", "model"), W.dtype), placed(X, P("data"), X.dtype)
        run = jaxmp.value_and_grad(jaxmp.autocast(loss_fn, policies), has_aux=True)
        (_, y), grad = jax.jit(run)(*args)
        jaxpr = jax.make_jaxpr(run)(*args)
    dtypes = [
        v.aval.dtype.name
        for equation in equations(jaxpr)
        if equation.primitive.name == "dot_general"
        for v in equation.invars
    ]
    assert len(dtypes) == 6 and all(dtype.startswith("float8") for dtype in dtypes)
    assert jax.typeof(y).sharding.spec == P("data", None, "model")
    assert jax.typeof(grad).sharding.spec == P("data", "model") and grad.dtype == jnp.float32
    exact = jax.grad(lambda w: jnp.sum(jnp.einsum("btd,df->btf", X, w) ** 2))(W)
    assert 0 < np.linalg.norm(grad - exact) < 0.1 * np.linalg.norm(exact)


# ---------------------------------------------------------------------------
# Compiled for a GPU
# ---------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("name", ["fp8", "fp8_delayed", "fp8_rowwise"])
def test_programs_for_eight_gpus_multiply_in_fp8_and_sum_in_fp32(name):
    """FSDP: kernels are split over the batch axis, and gathered in FP8."""
    width = 8192
    gpus = np.array(described_gpus(describe(get_target("h200")), 8))
    mesh = Mesh(gpus, ("data",), axis_types=(AxisType.Explicit,))
    on = lambda leaf, *spec: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(*spec))
    )
    recipe = jaxmp.load_recipe(name)
    model = recipe.wrap(nn.Dense(width, use_bias=False, name="layer"))
    x = jax.ShapeDtypeStruct((8, 2048, width), jnp.float32)

    def init():
        params = recipe.wrap(nn.Dense(width, use_bias=False)).init(
            jax.random.key(0), jnp.zeros((1, width))
        )
        return new_state(params, recipe, apply_fn=model.apply)

    def loss_fn(variables, x):
        kernel = jax.reshard(variables["params"]["kernel"], P(None, None))
        variables = {**variables, "params": {**variables["params"], "kernel": kernel}}
        return jnp.sum(model.apply(variables, x).astype(jnp.float32) ** 2)

    split = lambda leaf: on(leaf, "data", None) if leaf.ndim == 2 else on(leaf)
    with jax.set_mesh(mesh):
        state = jax.tree.map(split, jax.eval_shape(init))
        step = lambda state, x: state.value_and_grad(loss_fn)(x)
        report = jaxmp.audit(step, state, on(x, "data"), recipe=recipe, target="h200")
    gemms = {(row.phase, row.kernel) for row in report.gemms}
    assert gemms == {("forward", "cublas fp8"), ("backward", "cublas fp8")}
    sums = {
        row.dtype: row.bytes
        for row in report.collectives
        if row.operation in ("all-reduce", "reduce-scatter") and row.bytes > 2**20
    }
    assert sums == {"float32": 4 * width**2}
    gathered = [(r.dtype, r.bytes) for r in report.collectives if r.operation == "all-gather"]
    assert gathered == [("float8_e4m3fn", width**2)]
