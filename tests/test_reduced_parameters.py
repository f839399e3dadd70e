"""Microbatches on explicit mesh axes, and gradients that are summed over devices after the loop."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from grids import fast_cases
from jaxmp._core import _compat
from training_steps import new_state

ROWS, WIDTH, PARTS = 16, 8, 2
REDUCED = P(None, None, reduced={"data"})
X = np.random.default_rng(2).normal(size=(ROWS, WIDTH)).astype(np.float32)
W = np.random.default_rng(3).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4
B = np.random.default_rng(4).normal(size=(1, WIDTH)).astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def mesh():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        yield mesh


def spread(tree, spec):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, spec), tree)


def in_parts(loss_fn, **options):
    return jaxmp.value_and_grad(loss_fn, microbatches=PARTS, interleave=True, **options)


def carries(fn, *args):
    """Returns for each array that the last loop accumulates True if it is unreduced."""
    (*_, loop) = [e for e in jax.make_jaxpr(fn)(*args).eqns if e.primitive.name == "scan"]
    carried = loop.outvars[: _compat.scan_counts(loop.params)[1]]
    return [bool(var.aval.sharding.spec.unreduced) for var in carried]


def assert_close(actual, expected, tolerance):
    def check(actual, expected):
        expected = np.asarray(expected)
        assert actual.dtype == np.float32 and not jax.typeof(actual).sharding.spec.unreduced
        atol = tolerance * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(actual), expected, atol=atol)

    jax.tree.map(check, actual, expected)


def loss_of(dtype=jnp.float32):
    """The loss of a weight of two matmuls, of which one is transposed, and a bias."""

    def loss_fn(params, x):
        w, b = (leaf.astype(dtype) for leaf in params)
        return jnp.mean((jnp.tanh(x.astype(dtype) @ w + b) @ w.T).astype(jnp.float32) ** 2)

    return loss_fn


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", [REDUCED, P()])
def test_gradients_of_reduced_parameters_are_summed_after_the_loop(spec, dtype):
    args = (spread(W, spec), spread(B, P())), spread(X, P("data"))
    run = in_parts(loss_of(dtype))
    assert carries(run, *args) == [spec == REDUCED, False]
    expected = jax.jit(jax.value_and_grad(loss_of()))((W, B), X)
    assert_close(jax.jit(run)(*args), expected, 1e-5 if dtype == jnp.float32 else 0.05)
    whole = jax.jit(jaxmp.value_and_grad(loss_of(dtype)))(*args)
    assert_close(jax.jit(run)(*args), whole, 1e-5)


@pytest.mark.parametrize(
    ("spec", "inside"),
    [(P("data"), P(None, None)), (P(None, "data"), P(None, None)), (P(), REDUCED)],
)
def test_gradients_of_resharded_weights_are_summed_in_each_microbatch(spec, inside):
    args = spread(W, spec), spread(X, P("data"))
    loss_fn = lambda w, x: jnp.mean((x @ jax.reshard(w, inside)) ** 2)
    assert carries(in_parts(loss_fn), *args) == [False]
    expected = jax.jit(jax.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2)))(W, X)
    assert_close(jax.jit(in_parts(loss_fn))(*args), expected, 1e-5)


def test_weights_aux_and_random_keys():
    args = spread(W, REDUCED), spread((X, X[:, 0] > 0), P("data")), jax.random.key(0)

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
    _, grads = jax.jit(run)(spread(W, REDUCED), spread(x, P("data")))
    assert np.isnan(grads).all()


def test_axes_of_tensor_parallelism_remain():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    place = lambda array, *spec, **axes: jax.device_put(
        array, NamedSharding(mesh, P(*spec, **axes))
    )

    def loss_fn(weights, x):
        h = jnp.tanh(x @ weights[0])
        return jnp.mean(jnp.dot(h, weights[1], out_sharding=P("data")) ** 2)

    specs = (None, "model"), ("model", None)
    weights = [place(W, *spec, reduced={"data"}) for spec in specs]
    args = weights, place(X, "data")
    with jax.set_mesh(mesh):
        assert carries(in_parts(loss_fn), *args) == [True, True]
        loss, grads = jax.jit(in_parts(loss_fn))(*args)
    assert [tuple(g.sharding.spec) for g in grads] == [(None, "model"), ("model", None)]
    reference = lambda w, x: jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)
    assert_close((loss, grads), jax.value_and_grad(reference)([W, W], X), 1e-5)


@pytest.mark.parametrize("recipe", ["fp16_params", "fp8_delayed"])
@fast_cases("fp16_params")
@pytest.mark.filterwarnings("ignore:The policies of:jaxmp.errors.RecipeWarning")
def test_a_linen_step_equals_that_without_microbatches(recipe):
    recipe = jaxmp.load_recipe(recipe).replace(loss_scale=jaxmp.StaticLossScale(2.0**6))
    model = recipe.wrap(nn.Sequential([nn.LayerNorm(), nn.Dense(WIDTH), nn.gelu, nn.Dense(WIDTH)]))
    variables = model.init(jax.random.key(0), X[:1])
    state = new_state(variables, recipe, optax.sgd(1e-2), apply_fn=model.apply)
    state, x = spread(state, P()), spread(X, P("data"))

    def step(state, x, **options):
        loss_fn = lambda params, x: jnp.mean(model.apply(params, x).astype(jnp.float32) ** 2)
        loss, grads = state.value_and_grad(loss_fn, **options)(x)
        return (loss, grads), state.apply_gradients(grads=grads)

    results, new = jax.jit(lambda s, x: step(s, x, microbatches=2, interleave=True))(state, x)
    expected, _ = jax.jit(step)(state, x)
    params = lambda tree: tree.get("params", tree)
    assert_close((results[0], params(results[1])), (expected[0], params(expected[1])), 2e-5)
    assert int(new.step) == 1
