"""Branches of the first step of delayed scaling, which are outside of loops over layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jaxmp
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, fast_cases
from jaxmp import _overwritten, fp8
from jaxmp._audit._compile import compile_for
from jaxmp._audit._trace import trace
from jaxmp._core import _compat
from jaxmp._core._hlo import Program
from jaxmp._core._jaxprs import FIRST_STEP, equations

LINEAR = (((1,), (0,)), ((), ()))
LAYERS, WIDTH = 3, 16
SCALINGS = {
    "max": fp8.DelayedScaling(amax_history_len=3),
    "most_recent": fp8.DelayedScaling(amax_history_len=3, amax_compute="most_recent"),
    "interval": fp8.DelayedScaling(amax_history_len=3, interval=2, margin=1),
    "two formats": fp8.DelayedScaling(amax_history_len=3, wgrad="high"),
}


def variables_of(scaling, layers=LAYERS):
    states = [fp8.init_state(scaling) for _ in range(layers)]
    kernels = jax.random.normal(jax.random.key(0), (layers, WIDTH, WIDTH)) / 4
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    return {"params": {"w": kernels}, "_overwrite_with_gradient": {"w": stacked}}


def loss_of(scaling, remat=False):
    """Returns the loss of layers in a scan, which is counted at each trace."""
    product = fp8.dot_general(scaling)

    def layer(x, row):
        kernel, state = row
        return jnp.maximum(product(x, kernel, LINEAR, state=state), 0.0), None

    def loss(variables, x):
        loss.traces += 1
        rows = variables["params"]["w"], variables["_overwrite_with_gradient"]["w"]
        y, _ = lax.scan(jax.checkpoint(layer) if remat else layer, x, rows)
        return jnp.mean(jnp.square(y))

    loss.traces = 0
    return loss


@pytest.fixture
def inside(monkeypatch):
    """Returns a function that calls a function with all branches inside of the loops."""

    def call(fn, *args):
        with monkeypatch.context() as patch:
            patch.setattr(_overwritten, "with_branches_outside", lambda evaluate, _: evaluate())
            return fn(*args)

    return call


def batch(size, rows=8):
    return jnp.linspace(-size, size, rows * WIDTH).reshape(rows, WIDTH)


def first_steps(jaxpr):
    """Returns the branches in front of loops, at any depth."""
    branches = (
        each.params["branches"] for each in equations(jaxpr) if each.primitive.name == "cond"
    )
    is_first = lambda branch: any(e.params.get("name") == FIRST_STEP for e in equations(branch))
    return [pair for pair in branches if is_first(pair[0])]


@pytest.mark.parametrize(
    ("name", "microbatches", "remat"),
    [
        ("max", 1, True),
        ("max", 2, False),
        ("most_recent", 1, False),
        ("interval", 2, True),
        ("two formats", 1, False),
    ],
)
@fast_cases("max-1-True", "most_recent-1-False")
def test_steps_equal_those_with_branches_in_the_loop(name, remat, microbatches, inside):
    """Also after a step that measured nothing: zeros, and amaxes that are not finite."""
    loss, variables = loss_of(SCALINGS[name], remat), variables_of(SCALINGS[name])
    make = lambda: jax.jit(jaxmp.value_and_grad(loss, microbatches=microbatches))
    hoisted, plain = make(), make()
    assert first_steps(jax.make_jaxpr(hoisted)(variables, batch(1.0)))
    assert not first_steps(inside(jax.make_jaxpr(plain), variables, batch(1.0)))
    for size in (float("inf"), 1.0, 0.0, 8.0, 0.0, 0.0, 0.0, 2.0):
        ours, expected = hoisted(variables, batch(size)), inside(plain, variables, batch(size))
        jax.tree.map(np.testing.assert_array_equal, ours, expected)
        variables = {**variables, **{k: ours[1][k] for k in ("_overwrite_with_gradient",)}}


def test_the_loss_is_traced_once():
    loss = loss_of(SCALINGS["max"])
    jax.make_jaxpr(jaxmp.value_and_grad(loss))(variables_of(SCALINGS["max"]), batch(1.0))
    assert loss.traces == 1


def test_only_loops_have_two_versions():
    """The program of a model without a loop over layers does not change."""
    scaling = SCALINGS["max"]
    product = fp8.dot_general(scaling)
    state = {"w": fp8.init_state(scaling)}
    variables = {"params": {"w": jnp.ones((WIDTH, WIDTH))}, "_overwrite_with_gradient": state}

    def loss(variables, x):
        state = variables["_overwrite_with_gradient"]["w"]
        return jnp.sum(product(x, variables["params"]["w"], LINEAR, state=state))

    closed = jax.make_jaxpr(jaxmp.grad(loss))(variables, batch(1.0))
    assert not first_steps(closed)
    assert any(each.primitive.name == "cond" for each in equations(closed))


@pytest.mark.parametrize("jitted", [jax.jit, jax.checkpoint])
def test_loops_in_calls(jitted):
    loss = jitted(loss_of(SCALINGS["max"]))
    closed = jax.make_jaxpr(jaxmp.grad(loss))(variables_of(SCALINGS["max"]), batch(1.0))
    assert len(first_steps(closed)) >= 2


def test_auxiliary_data_is_returned_unchanged():
    loss = loss_of(SCALINGS["max"])
    with_aux = lambda variables, x: (loss(variables, x), {"name": "text", "x": x})
    names = []

    @jax.jit
    def step(variables, x):
        (value, aux), grads = jaxmp.value_and_grad(with_aux, has_aux=True)(variables, x)
        names.append(aux["name"])
        return value, aux["x"], grads

    _, x, _ = step(variables_of(SCALINGS["max"]), batch(1.0))
    assert names == ["text"] and (x == batch(1.0)).all()


# ---------------------------------------------------------------------------
# Transformations of the step
# ---------------------------------------------------------------------------


def test_vmap_of_a_step_keeps_one_branch(inside):
    """An example whose amaxes are known runs with one whose amaxes are not."""
    loss = loss_of(SCALINGS["max"])
    step = jax.vmap(jaxmp.value_and_grad(loss))
    new = variables_of(SCALINGS["max"])
    known = jax.jit(jaxmp.grad(loss))(new, batch(4.0))["_overwrite_with_gradient"]
    old = {**new, "_overwrite_with_gradient": known}
    pair = jax.tree.map(lambda *leaves: jnp.stack(leaves), new, old)
    xs = jnp.stack([batch(1.0), batch(2.0)])
    assert len(first_steps(jax.make_jaxpr(step)(pair, xs))) == 2
    ours, expected = jax.jit(step)(pair, xs), inside(jax.jit(lambda *args: step(*args)), pair, xs)
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


@EXPENSIVE
def test_shard_map_of_a_step(inside):
    """On several devices, each step measures a tensor before it is quantized, without branches."""
    scaling = SCALINGS["max"]
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    step = jaxmp.value_and_grad(loss_of(scaling), axis_name="data")
    specs = PartitionSpec(), PartitionSpec("data")
    make = lambda: jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[0]))
    hoisted, plain, variables = make(), make(), variables_of(scaling)
    assert len(first_steps(jax.make_jaxpr(hoisted)(variables, batch(1.0)))) == 2
    for size in (1.0, 8.0):
        ours, expected = hoisted(variables, batch(size)), inside(plain, variables, batch(size))
        jax.tree.map(np.testing.assert_array_equal, ours, expected)
        variables = {**variables, "_overwrite_with_gradient": ours[1]["_overwrite_with_gradient"]}


def test_statistics_of_layers_in_a_loop():
    scaling = SCALINGS["max"]
    step = jaxmp.value_and_grad(loss_of(scaling))
    stats = jaxmp.with_stats(step)(variables_of(scaling), batch(2.0)).tensors["operands"]
    assert sorted(stats) == [":input", ":kernel", ":output_grad"]
    assert stats[":input"].amax.shape == (LAYERS,) and stats[":input"].amax[0] == 2


@needs_compiler
@EXPENSIVE
def test_compiled_loops_contain_no_branch():
    scaling = SCALINGS["max"]
    step = jaxmp.value_and_grad(loss_of(scaling, remat=True))
    args = jax.eval_shape(lambda: (variables_of(scaling), batch(1.0, rows=WIDTH)))
    with _compat.context(target="gpu", capability=(9, 0)):
        traced = trace(step, args, {})
    program = Program(compile_for("h200", traced).text)
    branches = [step for step in program.steps() if step.instruction.opcode == "conditional"]
    assert len(branches) == 2
    assert all(each.computation is program.entry for each in branches)
