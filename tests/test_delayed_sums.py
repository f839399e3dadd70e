"""Gradients of microbatches on explicit mesh axes, which are summed over devices after the loop."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from grids import EXPENSIVE, fast_cases
from jaxmp._core._jaxprs import equations
from jaxmp._core._programs._analysis import primitives

ROWS, WIDTH, VOCABULARY, PARTS = 16, 8, 12, 2

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="JAX 0.12 has rules for unreduced arrays."
)


@pytest.fixture(autouse=True, scope="module")
def mesh():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        yield mesh


def spread(tree, spec):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, spec), tree)


def make_params(layers=2):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32) / 2
    layer = {"scale": normal(layers, WIDTH), "kernel": normal(layers, WIDTH, WIDTH)}
    layer["bias"] = normal(layers, WIDTH)
    return {"table": normal(VOCABULARY, WIDTH), "layers": layer, "head": normal(WIDTH, VOCABULARY)}


def make_tokens():
    return np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, 3))


def loss_of(form="loop", dtype=jnp.float32):
    """Returns the loss of an embedding, normalized Dense layers with biases, and a head."""

    def layer(x, params):
        low = lambda name: params[name].astype(dtype)
        mean = jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)
        h = (x * lax.rsqrt(mean + 1e-3).astype(dtype)) * low("scale")[None, None]
        return x + jnp.tanh(h @ low("kernel") + low("bias")[None, None]), None

    layer = jax.checkpoint(layer) if form == "remat" else layer

    def loss_fn(params, tokens):
        out = P("data") if any(jax.typeof(tokens).sharding.spec) else None
        x = params["table"].astype(dtype).at[tokens].get(out_sharding=out)
        if form == "loop":
            for n in range(2):
                x, _ = layer(x, jax.tree.map(lambda leaf, n=n: leaf[n], params["layers"]))
        else:
            x, _ = lax.scan(layer, x, params["layers"])
        logits = (x @ params["head"].astype(dtype)).astype(jnp.float32)
        return jaxmp.losses.softmax_cross_entropy(logits, tokens).mean()

    return loss_fn


def in_parts(loss_fn, **options):
    return jaxmp.value_and_grad(loss_fn, microbatches=PARTS, interleave=True, **options)


def carries(fn, *args):
    """Returns for each array that the last loop accumulates True if it is unreduced."""
    (*_, loop) = [e for e in jax.make_jaxpr(fn)(*args).eqns if e.primitive.name == "scan"]
    return [bool(var.aval.sharding.spec.unreduced) for var in loop.outvars if var.aval.ndim]


def assert_close(actual, expected, tolerance):
    def check(actual, expected):
        expected = np.asarray(expected)
        assert actual.dtype == np.float32 and not jax.typeof(actual).sharding.spec.unreduced
        atol = tolerance * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(actual), expected, atol=atol)

    jax.tree.map(check, actual, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", ["loop", "scan", "remat"])
@fast_cases("loop-float32", "remat-bfloat16")
def test_all_gradients_are_summed_after_the_loop(form, dtype):
    params, tokens = make_params(), make_tokens()
    expected = jax.jit(jax.value_and_grad(loss_of()))(params, tokens)
    args = spread(params, P()), spread(tokens, P("data"))
    run = in_parts(loss_of(form, dtype))
    assert carries(run, *args) == [True] * 5
    # bfloat16 has 8 bits of precision; gradients are computed from several rounded arrays.
    assert_close(jax.jit(run)(*args), expected, 1e-5 if dtype == jnp.float32 else 0.05)


def test_rounding_differs_from_one_batch_only_by_the_order_of_sums():
    args = spread(make_params(), P()), spread(make_tokens(), P("data"))
    loss_fn = loss_of("scan", jnp.bfloat16)
    expected = jax.jit(jaxmp.value_and_grad(loss_fn))(*args)
    assert_close(jax.jit(in_parts(loss_fn))(*args), expected, 1e-5)


class Block(nn.Module):
    """Residual block in Linen."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(WIDTH)(nn.LayerNorm()(x)))), None


class Stack(nn.Module):
    """Scanned, rematerialized blocks in Linen."""

    @nn.compact
    def __call__(self, x):
        axes, rngs = {"params": 0}, {"params": True}
        x, _ = nn.scan(nn.remat(Block), axes, split_rngs=rngs, length=2)()(x, None)
        return nn.Dense(VOCABULARY)(x)


@pytest.mark.parametrize("recipe", ["bf16", "fp16_params", "fp8_delayed"])
@fast_cases("fp16_params")
@pytest.mark.filterwarnings("ignore:The policies of:jaxmp.errors.RecipeWarning")
def test_a_linen_step_equals_that_without_microbatches(recipe):
    recipe = jaxmp.load_recipe(recipe).replace(loss_scale=jaxmp.StaticLossScale(2.0**6))
    model = recipe.wrap(Stack())
    x = np.random.default_rng(0).normal(size=(ROWS, 3, WIDTH)).astype(np.float32)
    variables = model.init(jax.random.key(0), x[:1])
    tx = recipe.optimizer(optax.sgd(1e-2))
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    state = spread(state, P())
    x = spread(x, P("data"))

    def loss_fn(params, x):
        return jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)

    def step(state, x, **options):
        loss, grads = state.value_and_grad(loss_fn, **options)(x)
        return (loss, grads), state.apply_gradients(grads=grads)

    results, new = jax.jit(lambda s, x: step(s, x, microbatches=2, interleave=True))(state, x)
    expected, _ = jax.jit(step)(state, x)
    params = lambda tree: tree.get("params", tree)
    assert_close((results[0], params(results[1])), (expected[0], params(expected[1])), 2e-5)
    assert int(new.step) == 1


@EXPENSIVE
def test_an_nnx_step_equals_that_without_microbatches():
    recipe = jaxmp.load_recipe("bf16")
    layers = nnx.Sequential(
        nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0)), nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))
    )
    model = recipe.wrap(layers)
    graph, state = nnx.split(model)
    state = spread(state, P())
    x = np.random.default_rng(0).normal(size=(ROWS, 3, WIDTH)).astype(np.float32)
    x = spread(x, P("data"))

    def run(state, x, **options):
        model = nnx.merge(graph, state)
        loss_fn = lambda model, x: jnp.mean(model(x).astype(jnp.float32) ** 2)
        loss, grads = jaxmp.nnx.value_and_grad(loss_fn, **options)(model, x)
        return loss, nnx.to_pure_dict(grads)

    in_two = lambda state, x: run(state, x, microbatches=2, interleave=True)
    assert all(carries(in_two, state, x))
    assert_close(jax.jit(in_two)(state, x), jax.jit(run)(state, x), 2e-5)


# ---------------------------------------------------------------------------
# Gradients that are summed in each microbatch, or in part
# ---------------------------------------------------------------------------

X = np.random.default_rng(2).normal(size=(ROWS, WIDTH)).astype(np.float32)
W = np.random.default_rng(3).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4


def whole(w):
    return jax.reshard(w, P(None, None)) if any(jax.typeof(w).sharding.spec) else w


def tied(w, x):
    """The weight of two matmuls, of which one is transposed."""
    return jnp.mean((jnp.tanh(x @ w) @ w.T) ** 2)


def through_cumsum(w, x):
    """JAX does not define cumulative sums of unreduced arrays."""
    return jnp.mean((x @ jnp.cumsum(w, 0)) ** 2)


def both(w, x):
    """One of two gradients that are added is not a sum over rows."""
    return jnp.mean((x @ w) ** 2) + jnp.sum(jnp.sin(w))


def normalized(w, x):
    """The gradient of the norm depends on a matmul of the whole gradient of the matmul."""
    return jnp.mean((x @ (w / jnp.sqrt(jnp.sum(w**2)))) ** 2)


def of_parts(w, x):
    """Parts of a fused weight."""
    a, b = jnp.split(w, 2, 1)
    h = jnp.concatenate([x @ a, x @ b], 1)
    return jnp.mean((h @ w.reshape(2, -1, WIDTH)[0].repeat(2, 0)) ** 2)


def in_calls(w, x):
    """Jitted functions, a function with a custom derivative, and a branch."""
    h = jax.jit(lambda w, x: jax.nn.relu(x @ w.T))(w, x)
    return lax.cond(jnp.sum(h) > 0, lambda w: jnp.mean((h @ w) ** 2), lambda w: jnp.sum(w), w)


def in_a_loop(w, x):
    """A weight that all iterations share."""
    return jnp.mean(lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0] ** 2)


@pytest.mark.parametrize(
    ("loss_fn", "is_delayed"),
    [
        (tied, True),
        (through_cumsum, False),
        (both, True),
        (normalized, None),
        (of_parts, True),
        (in_calls, None),
        (in_a_loop, True),
    ],
)
def test_gradients_are_right_whatever_operations_compute_them(loss_fn, is_delayed):
    args = spread(W, P()), spread(X, P("data"))
    run = in_parts(loss_fn)
    if is_delayed is not None:
        assert carries(run, *args) == [is_delayed]
    assert_close(jax.jit(run)(*args), jax.jit(jax.value_and_grad(loss_fn))(W, X), 1e-5)


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
def test_gradients_of_split_weights_are_summed_in_each_microbatch(spec):
    args = spread(W, spec), spread(X, P("data"))
    run = in_parts(lambda w, x: tied(whole(w), x))
    assert carries(run, *args) == [False]
    assert_close(jax.jit(run)(*args), jax.jit(jax.value_and_grad(tied))(W, X), 1e-5)


def test_parameters_that_are_reduced_already():
    args = spread(W, P(None, None, reduced={"data"})), spread(X, P("data"))
    run = in_parts(lambda w, x: jnp.mean((x @ w) ** 2), loss_scale=2.0**4)
    assert carries(run, *args) == [True]
    expected = jax.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))(W, X)
    assert_close(jax.jit(run)(*args), expected, 1e-5)
    whole_batch = jaxmp.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), loss_scale=2.0**4)
    assert_close(jax.jit(whole_batch)(*args), expected, 1e-5)


def test_parameters_that_the_loss_function_makes_reduced():
    args = spread(W, P()), spread(X, P("data"))

    def loss_fn(w, x):
        return jnp.mean((x @ jax.reshard(w, P(None, None, reduced={"data"}))) ** 2)

    assert carries(in_parts(loss_fn), *args) == [True]
    expected = jax.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))(W, X)
    assert_close(jax.jit(in_parts(loss_fn))(*args), expected, 1e-5)


def test_weights_aux_and_random_keys():
    args = spread(W, P()), spread((X, X[:, 0] > 0), P("data")), jax.random.key(0)

    def loss_fn(w, batch, key):
        x, mask = batch
        losses = jnp.mean((x @ w) ** 2, -1) * mask.astype(jnp.float32)
        return (losses.sum(), mask.sum()), jax.random.uniform(key, ())

    def run(**options):
        options |= {"weighted": True, "has_aux": True, "rng_argnums": 2}
        return jax.jit(jaxmp.value_and_grad(loss_fn, **options))(*args)

    (loss, aux), grads = run(microbatches=PARTS, interleave=True)
    (expected, _), expected_grads = run()
    assert_close((loss, grads), (expected, expected_grads), 1e-5)
    assert aux.shape == (PARTS,) and aux[0] != aux[1]


@pytest.mark.parametrize("loss_scale", [None, 2.0**4])
def test_a_bad_loss_of_one_microbatch_poisons_all_gradients(loss_scale):
    x = X.copy()
    x[0, 0] = np.inf

    def loss_fn(w, x):
        # The selection blocks the cotangent, so that all gradients of the microbatch are zero.
        mean = jnp.mean((jnp.where(jnp.isfinite(x), x, 0) @ w) ** 2)
        return jnp.where(jnp.all(jnp.isfinite(x)), mean, jnp.nan)

    run = in_parts(loss_fn, loss_scale=loss_scale)
    _, grads = jax.jit(run)(spread(W, P()), spread(x, P("data")))
    assert np.isnan(grads).all()


def test_sums_in_16_bits_are_not_delayed():
    args = spread(W, P()), spread(X, P("data"))
    assert carries(in_parts(tied, accumulate_dtype="bfloat16"), *args) == [False]
    assert carries(in_parts(tied, reduce_dtype="bfloat16"), *args) == [False]


def test_axes_of_tensor_parallelism_remain():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    place = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))

    def loss_fn(weights, x):
        h = jnp.tanh(x @ weights[0])
        return jnp.mean(jnp.dot(h, weights[1], out_sharding=P("data")) ** 2)

    weights = [place(W, None, "model"), place(W, "model", None)]
    args = weights, place(X, "data")
    with jax.set_mesh(mesh):
        assert carries(in_parts(loss_fn), *args) == [True, True]
        loss, grads = jax.jit(in_parts(loss_fn))(*args)
    assert [tuple(g.sharding.spec) for g in grads] == [(None, "model"), ("model", None)]
    expected = jax.value_and_grad(lambda w, x: jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2))(
        [W, W], X
    )
    assert_close((loss, grads), expected, 1e-5)


def test_the_calls_of_a_jitted_function_share_their_jaxprs():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def loss_fn(w, x):
        for n in range(6):
            x = layer(x, w[n])
        return jnp.square(x).mean()

    w = spread(jnp.ones((6, WIDTH, WIDTH)), P())
    x = spread(jnp.ones((ROWS, WIDTH)), P("data"))
    program = jax.make_jaxpr(in_parts(loss_fn))(w, x)
    is_sum = lambda each: any(var.aval.sharding.spec.unreduced for var in each.outvars)
    calls = [e for e in equations(program) if e.primitive.name == "jit" and is_sum(e)]
    calls = [e for e in calls if "dot_general" in primitives(e.params["jaxpr"])]
    # The call that reads the batch has no gradient of its first operand.
    assert len(calls) == 6 and len({id(e.params["jaxpr"]) for e in calls}) == 2
