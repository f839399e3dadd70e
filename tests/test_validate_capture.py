"""Outputs of modules inside jitted functions, loops, branches and `shard_map`."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
import models_nnx
from grids import EXPENSIVE
from jaxmp._tools.validate._probe import make_probe, with_outputs
from jaxmp._tools.validate._pure import as_pure
from models_linen import Perceptron
from test_validate import data

# The defaults of JAX, as users of Flax and optax have them.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")

W, X = np.eye(2, dtype=np.float32) / 2, np.arange(8, dtype=np.float32).reshape(4, 2)
DENSE = np.sin(X / 2)


def captured(fn, *args):
    """Returns the computed outputs of a function by scope, after comparing its result."""
    result, outputs = jax.jit(with_outputs(fn))(*args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), result, fn(*args))
    return {
        name: np.asarray(output.values) for name, output in outputs.items() if output.is_computed
    }


def check(outputs, expected):
    assert list(outputs) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(outputs[name], np.ravel(values), rtol=1e-6)


def test_outputs_of_a_reversed_scan():
    def dense(carry, row):
        with jax.named_scope("dense"):
            carry = jnp.sin(carry @ W + row)
        return carry, carry

    fn = lambda x: lax.scan(dense, x[0], x, reverse=True)[1]
    check(captured(fn, X), {"dense": fn(X)})
    check(captured(jax.grad(lambda x: fn(x).sum()), X), {"dense": fn(X)})


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        for index in range(2):
            x = jnp.tile(nn.remat(Perceptron)(name=f"block_{index}")(x), 2) * jnp.arange(8.0)
        return nn.LayerNorm(name="norm")(x)


def test_captured_outputs_are_those_that_flax_captures():
    model, x = Stack(), jnp.asarray(data(0)[0])
    variables = model.init(jax.random.key(0), x)
    loss = lambda variables: jnp.sum(jnp.sin(model.apply(variables, x)))
    grads, outputs = jax.jit(with_outputs(jax.grad(loss)))(variables)
    check = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    jax.tree.map(check, grads, jax.grad(loss)(variables))
    _, captured = model.apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
    expected = {
        tuple(key.key for key in path[:-2]): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(captured["intermediates"])
    }
    expected.pop(())  # the output of the root
    assert len(expected) == 7
    for path, leaf in expected.items():
        check(outputs["/".join(path)].values, leaf.ravel())


@pytest.mark.parametrize("is_nnx", [False, True])
def test_a_teacher_with_the_modules_of_its_student_has_outputs_of_its_own(is_nnx):
    wrap, (x,) = jaxmp.load_recipe("fp32").wrap, data(0, 1)
    linen = lambda n: Perceptron().init(jax.random.key(n), x)["params"]
    models = [wrap(models_nnx.Perceptron(nnx.Rngs(n))) if is_nnx else linen(n) for n in range(2)]

    def call(model):
        return model(x) if is_nnx else wrap(Perceptron()).apply({"params": model}, x)

    def step(*args):
        student, teacher = args[:2] if is_nnx else (args[0]["params"], args[0]["teacher"])
        metrics = {"loss": jnp.mean((call(student) - call(teacher)) ** 2)}
        return metrics if is_nnx else (args[0], metrics)

    state = tuple(models) if is_nnx else dict(zip(("params", "teacher"), models, strict=True))
    run = jaxmp.TrainingRun(state=state, step=step, batches=[x], evaluate=lambda *_: 0.0)
    pure = as_pure(run, "run", 1)
    outputs = make_probe(pure)(pure.arrays, pure.first).outputs
    for name, model in zip(("", "Perceptron[1]/" if is_nnx else "teacher/"), models, strict=True):
        kernel = model.hidden.kernel if is_nnx else model["hidden"]["kernel"]
        np.testing.assert_allclose(outputs[f"{name}hidden"], (x @ kernel).ravel(), atol=1e-5)


# ---------------------------------------------------------------------------
# Branches and loops
# ---------------------------------------------------------------------------


def scoped(name, fn):
    def run(*args):
        with jax.named_scope(name):
            return fn(*args)

    return run


@pytest.mark.parametrize("is_first", [True, False])
def test_the_branch_that_is_taken_has_outputs(is_first):
    def loss(w, x, is_first):
        first = lambda x: 2 * scoped("first", lambda x: jnp.sin(x @ w))(x)
        second = lambda x: 1 + scoped("second", lambda x: x @ w @ w)(x)
        return jnp.sum(lax.cond(is_first, first, second, x))

    expected = {"first": DENSE} if is_first else {"second": np.asarray(X) / 4}
    check(captured(jax.grad(loss), W, X, is_first), expected)


def test_outputs_of_one_module_with_other_shapes_in_two_branches_are_not_compared():
    def loss(x, index):
        wide = lambda x: jnp.sum(scoped("module", lambda x: 2 * x)(x))
        narrow = lambda x: jnp.sum(scoped("module", lambda x: 2 * x)(x[:1]))
        return lax.switch(index, [wide, narrow, jnp.sum], x)

    assert captured(loss, X, 0) == captured(loss, X, 2) == {}


@pytest.mark.parametrize("count", [0, 2])
def test_a_while_loop_has_the_outputs_of_its_last_iteration(count):
    def loss(w, x, count):
        def body(carry):
            index, x = carry
            return index + 1, 2 * scoped("layer", lambda x: jnp.tanh(x @ w))(x)

        return jnp.sum(lax.while_loop(lambda carry: carry[0] < count, body, (0, x))[1])

    last = np.tanh(np.tanh(np.asarray(X) / 2))
    check(captured(loss, W, X, count), {"layer": last} if count else {})


def test_residuals_are_not_outputs():
    """The residual of a sine is its cosine, which only the backward pass reads."""

    def loss(w, x):
        module = jax.jit(scoped("module", lambda x: jnp.sin(x @ w)))
        return jnp.sum(lax.cond(x[0, 0] < 1, module, jnp.cos, module(x)))

    assert np.abs(DENSE - np.sin(DENSE / 2)).max() > 0.1
    check(captured(jax.grad(loss), W, X), {"module": np.sin(DENSE / 2)})


def test_platform_dependent_functions_have_the_outputs_of_this_platform():
    def loss(x):
        branches = {"cpu": lambda x: 2 * x, "cuda": lambda x: 3 * x}
        functions = {name: scoped(name, function) for name, function in branches.items()}
        return jnp.sum(lax.platform_dependent(x, **functions))

    check(captured(jax.grad(loss), X), {"cpu": 2 * X})


# ---------------------------------------------------------------------------
# Meshes
# ---------------------------------------------------------------------------


@EXPENSIVE
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("is_deep", [True, False])
def test_outputs_of_all_devices_are_joined(check_vma, is_deep):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec(), PartitionSpec("data"), PartitionSpec())

    @partial(
        jax.shard_map, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma
    )
    def loss(w, x, is_deep):
        y = scoped("dense", lambda x: jnp.sin(x @ w))(x)
        deep = lambda y: 1 + scoped("branch", lambda y: 3 * y)(y)
        y = lax.cond(is_deep, deep, lambda y: y, y)
        body = lambda y, _: (2 * scoped("layer", lambda y: y @ w)(y), None)
        y = lax.scan(body, y, None, length=2)[0]
        loop = lambda y: lax.fori_loop(0, y[0, 0].astype(int) + 2, lambda _, y: inner(y), y)
        inner = scoped("loop", lambda y: y @ w)
        return lax.psum(jnp.sum(y) + jnp.sum(lax.stop_gradient(loop(y))), "data")

    branch = 3 * DENSE + 1 if is_deep else DENSE
    outputs = captured(jax.grad(loss), W, X, is_deep)
    assert outputs.pop("loop").shape == (8,)
    layers = [rows for half in (branch[:2], branch[2:]) for rows in (half / 2, half / 2)]
    first = {"dense": DENSE} | ({"branch": 3 * DENSE} if is_deep else {})
    check(outputs, first | {"layer": layers})


def test_outputs_on_an_explicit_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec(None, "data")))
        loss = lambda x: jnp.sum(3 * scoped("module", jnp.sin)(x / 2))
        check(captured(jax.grad(loss), x), {"module": DENSE})
