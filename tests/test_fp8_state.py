"""The state of delayed scaling, step by step, and under transformations that combine gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jaxmp
from arrays import of_size
from grids import EXPENSIVE, fast_cases
from jaxmp import fp8
from jaxmp._core._compat import jaxpr_body
from jaxmp._programs._constructs import sub_jaxprs
from jaxmp._programs._jaxprs import equations
from jaxmp.errors import CompositionError
from jaxmp.fp8._operands import partial_maxima
from training_steps import new_state, state_step

LINEAR = (((1,), (0,)), ((), ()))
OPERANDS = ("input", "kernel", "output_grad")
RECIPE = fp8.DelayedScaling(amax_history_len=3)


@functools.partial(jax.jit, static_argnums=0)
def step(recipe, state, x, w, g):
    """Returns the next state, and the result, for the output gradient `g`."""
    product = fp8.dot_general(recipe)
    y, backward = jax.vjp(lambda s: product(x, w, LINEAR, state=s), state)
    return backward(g)[0], y


def run(recipe, sizes, state=None):
    """Returns states and results of steps whose operands have amaxes `(input, kernel,
    output_grad)`.
    """
    state = fp8.init_state(recipe) if state is None else state
    found = []
    for x, w, g in sizes:
        state, y = step(recipe, state, of_size(x, 8, 16), of_size(w, 16, 8), of_size(g, 8, 8))
        found.append((jax.tree.map(np.asarray, state), np.asarray(y)))
    return found


# ---------------------------------------------------------------------------
# All layers together
# ---------------------------------------------------------------------------


def test_layers_in_a_scan_have_no_branches():
    """Each step measures their tensors, and the states are those of layers in a Python loop."""
    product, count = fp8.dot_general(RECIPE), 3
    kernels = jax.random.normal(jax.random.key(0), (count, 16, 16)) / 4

    def layer(x, row):
        kernel, state = row
        return jnp.maximum(product(x, kernel, LINEAR, state=state), 0.0), None

    def loss(variables, x, is_scanned):
        states = variables["_overwrite_with_gradient"]
        if is_scanned:
            x = lax.scan(layer, x, (variables["params"], states))[0]
        else:
            for n in range(count):
                x = layer(x, (variables["params"][n], states[n]))[0]
        return jnp.mean(jnp.square(x))

    step = jax.jit(jaxmp.grad(loss), static_argnums=2)
    states = [fp8.init_state(RECIPE)] * count
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    closed = jax.make_jaxpr(jaxmp.grad(lambda *args: loss(*args, True)))(
        {"params": kernels, "_overwrite_with_gradient": stacked}, of_size(1, 8, 16)
    )
    assert not any(each.primitive.name == "cond" for each in equations(closed))
    for size in (np.inf, 1.0, 0.0, 8.0):
        x, name = of_size(size, 8, 16), "_overwrite_with_gradient"
        stacked = step({"params": kernels, name: stacked}, x, True)[name]
        states = step({"params": kernels, name: states}, x, False)[name]
        expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        jax.tree.map(np.testing.assert_array_equal, stacked, expected)


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        fp8.DelayedScaling(amax_history_len=3, calibrate=False, amax_compute="most_recent"),
        fp8.DelayedScaling(amax_history_len=2, margin=1),
    ],
    ids=["max", "most_recent", "margin"],
)
@fast_cases("max")
def test_states_of_a_model_are_updated_as_each_layer_updates_its_own(recipe):
    product = fp8.dot_general(recipe)
    states = {"a": fp8.init_state(recipe), "b": fp8.init_state(recipe)}
    states["unused"] = fp8.init_state(recipe)
    params = {"a": of_size(0.5, 16, 48), "b": of_size(2, 48, 16)}

    def loss(variables, x):
        params, states = variables["params"], variables["_overwrite_with_gradient"]
        hidden = product(x, params["a"], LINEAR, state=states["a"])
        return jnp.sum(product(hidden, params["b"], LINEAR, state=states["b"]) ** 2)

    together = jax.jit(jaxmp.grad(loss))
    # Without value_and_grad of jaxmp, each layer reads and updates its own state.
    alone = jax.jit(jax.grad(loss))
    found, expected = states, states
    for size in (1.0, 8.0, 2.0, float("inf"), 4.0):
        x = of_size(1, 24, 16).at[0, 0].set(size)
        found = together({"params": params, "_overwrite_with_gradient": found}, x)
        expected = alone({"params": params, "_overwrite_with_gradient": expected}, x)
        jax.tree.map(np.testing.assert_array_equal, found["params"], expected["params"])
        found, expected = (tree["_overwrite_with_gradient"] for tree in (found, expected))
        expected["unused"] = states["unused"]
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found["a"]["input_amax_history"][0] == 4


def traced_step(recipe, layers):
    """Returns the program of a training step."""
    product, state_of = fp8.dot_general(recipe), {}
    if recipe.is_stateful:
        state_of = {str(n): fp8.init_state(recipe) for n in range(layers)}
    params = {str(n): of_size(0.5, 16, 16) for n in range(layers)}
    variables = {"params": params, "_overwrite_with_gradient": state_of}
    state = new_state(variables, "bf16")

    def loss(variables, x):
        for name, w in variables["params"].items():
            state = variables["_overwrite_with_gradient"].get(name)
            x = product(x, w, LINEAR, state=state)
        return jnp.sum(x)

    return jax.make_jaxpr(state_step(loss))(state, of_size(1, 24, 16))


def counted_step(recipe, layers):
    """Returns the numbers of equations of a training step: of its own, and of its functions."""
    closed = traced_step(recipe, layers)
    bodies = {id(sub): sub for e in equations(closed) for sub in sub_jaxprs(e)}
    return len(closed.eqns), sum(len(jaxpr_body(sub)[0].eqns) for sub in bodies.values())


def test_equal_steps_are_equal_programs_as_caches_of_compilers_require():
    texts = [re.sub("0x[0-9a-f]+", "", str(traced_step(RECIPE, 2))) for _ in range(4)]
    assert len(set(texts)) == 1


def test_a_further_layer_adds_few_equations_to_the_step():
    """The time of tracing does not depend on the number of leaves of the states."""
    of = {
        (recipe.kind, layers): counted_step(recipe, layers)
        for recipe in (fp8.DelayedScaling(), fp8.CurrentScaling())
        for layers in (2, 3)
    }
    own, inside = (
        {kind: of[kind, 3][n] - of[kind, 2][n] for kind in ("delayed", "current")} for n in (0, 1)
    )
    assert own["delayed"] <= own["current"] + 8
    # Layers of equal shapes share the traces of all functions; only the optimizer's grows.
    assert inside["delayed"] == inside["current"]


@pytest.mark.parametrize(
    ("shape", "count"), [((24, 16), 8), ((24, 16), 4096), ((7, 5), 16), ((3, 4, 6), 1), ((0, 4), 4)]
)
def test_the_largest_of_partial_maxima_is_the_amax(shape, count):
    x = jax.random.normal(jax.random.key(0), shape)
    maxima = partial_maxima(x, 0, count)
    assert maxima.shape == (count,)
    assert maxima.max() == np.abs(np.asarray(x)).max(initial=0)
    symbolic = jax.export.symbolic_shape(", ".join("abc"[: x.ndim]))
    program = jax.jit(lambda x: partial_maxima(x, 0, count))
    exported = jax.export.export(program)(jax.ShapeDtypeStruct(symbolic, x.dtype))
    assert exported.out_avals[0].shape == (count,)
    assert not x.size or exported.call(x).max() == maxima.max()


# ---------------------------------------------------------------------------
# Step by step
# ---------------------------------------------------------------------------


def reference(recipe, amaxes):
    """Returns, for one operand, the active amax of each step and the history after it."""
    history, rows = [0.0] * recipe.amax_history_len, []
    for amax in amaxes:
        known = max(history) if recipe.amax_compute == "max" else history[0]
        held = known if known > 0 else amax if recipe.calibrate else known
        held = held if np.isfinite(held) else 0.0
        if np.isfinite(amax):
            history = [amax, *history[:-1]]
        rows.append((held, list(history)))
    return rows


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        fp8.DelayedScaling(amax_history_len=3, amax_compute="most_recent"),
        fp8.DelayedScaling(amax_history_len=3, calibrate=False),
    ],
    ids=["max", "most_recent", "uncalibrated"],
)
def test_states_follow_the_rule(recipe):
    """Covers growth, decay, zeros and non-finite values, in the first and in later steps."""
    inputs = [np.inf, 4.0, 8.0, 2.0, np.nan, 1.0, 0.5, 0.0, 0.0, 0.0, 0.25, 16.0]
    sizes = [(x, 1.0 + i, 2.0**-i) for i, x in enumerate(inputs)]
    for operand, amaxes in zip(OPERANDS, zip(*sizes, strict=True), strict=True):
        rows = reference(recipe, amaxes)
        for (state, _), (held, history) in zip(run(recipe, sizes), rows, strict=True):
            np.testing.assert_array_equal(state[f"{operand}_amax"], np.float32(held))
            np.testing.assert_array_equal(
                state[f"{operand}_amax_history"], np.array(history, np.float32)
            )
            assert state["age"] == 1


def test_the_first_step_is_scaled_by_its_own_maximum():
    """Without a history, a scale of 1 would saturate 1e6 and lose 1e-6."""
    for size in (1e6, 1e-6):
        x, w = of_size(size, 8, 16), of_size(1.0, 16, 8)
        (_, first), (_, second) = run(RECIPE, [(size, 1.0, 1.0)] * 2)
        np.testing.assert_array_equal(first, fp8.dot_general("current")(x, w, LINEAR))
        np.testing.assert_array_equal(first, second)
    ((_, bare),) = run(fp8.DelayedScaling(calibrate=False), [(1e6, 1.0, 1.0)])
    assert np.abs(bare).max() < 1e4


def test_later_steps_are_scaled_by_earlier_maxima():
    """A tensor that has grown saturates; the next step uses its amax."""
    (_, small), (_, grown), (_, known) = run(RECIPE, [(1, 1, 1), (16, 1, 1), (16, 1, 1)])
    np.testing.assert_array_equal(known, 16 * small)
    assert np.abs(grown).max() < 0.5 * np.abs(known).max() and np.isfinite(grown).all()


def test_evaluation_leaves_the_state_alone():
    state = run(RECIPE, [(4, 1, 1)])[0][0]
    x, w = of_size(8, 8, 16), of_size(1, 16, 8)
    gradients = jax.grad(lambda x: fp8.dot_general(RECIPE)(x, w, LINEAR, state=state).sum())(x)
    assert gradients.shape == x.shape and state["input_amax_history"].tolist() == [4, 0, 0]


# ---------------------------------------------------------------------------
# Combination by max
# ---------------------------------------------------------------------------


def amaxes(state):
    return {name: float(state[f"{name}_amax_history"][0]) for name in OPERANDS}


def test_microbatches():
    """The rows of one microbatch are ten times those of the other."""
    x = jnp.concatenate([of_size(1, 4, 16), of_size(10, 4, 16)])
    w = of_size(2, 16, 8)
    old = run(RECIPE, [(1, 2, 1)])[0][0]
    variables = {"params": w, "_overwrite_with_gradient": old}

    def loss(variables, x):
        state = variables["_overwrite_with_gradient"]
        y = fp8.dot_general(RECIPE)(x, variables["params"], LINEAR, state=state)
        return jnp.sum(y * x[:, :8])

    _, grads = jax.jit(jaxmp.value_and_grad(loss, loss_scale=4.0, microbatches=2))(variables, x)
    new = grads["_overwrite_with_gradient"]
    # The gradient is that of the scaled loss: 10 * 8 / 15 of the last row, times 4.
    assert amaxes(new) == pytest.approx({"input": 10, "kernel": 2, "output_grad": 40}, rel=1e-6)
    assert new["input_amax_history"][1] == 1 and new["age"] == 2 - 1
    assert new["input_amax"] == 1  # of the step before, in both
    # Outside of jit, states are in float32.
    new = jaxmp.grad(loss, loss_scale=4.0)(variables, x)["_overwrite_with_gradient"]
    assert amaxes(new) == pytest.approx({"input": 10, "kernel": 2, "output_grad": 40}, rel=1e-6)


def shared(product, state, w, xs):
    """Applies one layer to each of `xs`."""
    return sum(jnp.sum(product(x, w, LINEAR, state=state)) for x in xs)


def scanned(product, state, w, xs):
    body = jax.checkpoint(lambda x: jnp.sum(product(x, w, LINEAR, state=state)))
    return lax.scan(lambda total, x: (total + body(x), None), jnp.float32(0), jnp.stack(xs))[0]


@pytest.mark.parametrize("uses", [shared, scanned])
def test_shared_layers_whose_gradients_are_added_up(uses):
    """With plain `jax.grad`, the newest amax is the sum, which does not grow from step to step."""
    xs = [of_size(size, 8, 16) for size in (2.0, 7.0, 3.0)]
    w, product = of_size(1, 16, 8), fp8.dot_general(RECIPE)
    grad = jax.jit(jax.grad(lambda state: uses(product, state, w, xs)))
    state = fp8.init_state(RECIPE)
    for step_number in range(1, 6):
        state = grad(state)
        assert state["uses"] == 3 and state["age"] == 3
        history = fp8._state.settled(state)["input_amax_history"].tolist()
        assert history == [12.0 * (n < step_number) for n in range(3)]


def differentiated(state, fn):
    """Returns the next state from `jaxmp.value_and_grad`."""
    variables = {"params": of_size(1, 16, 8), "_overwrite_with_gradient": {"layer": state}}

    def loss(variables):
        return fn(variables["_overwrite_with_gradient"]["layer"], variables["params"])

    return jaxmp.value_and_grad(loss)(variables)[1]["_overwrite_with_gradient"]["layer"]


@pytest.mark.parametrize("uses", [shared, scanned])
def test_the_largest_of_several_uses(uses):
    """The amax is exact, unlike the sum that plain `jax.grad` computes."""
    xs = [of_size(size, 8, 16) for size in (2.0, 7.0, 3.0)]
    product = fp8.dot_general(RECIPE)
    step = jax.jit(lambda state: differentiated(state, lambda s, w: uses(product, s, w, xs)))
    new = step(step(fp8.init_state(RECIPE)))
    assert new["input_amax_history"].tolist() == [7, 7, 0]
    assert (float(new["uses"]), float(new["age"])) == (1, 1)


def test_a_state_that_is_not_used_stays():
    old = run(RECIPE, [(5, 1, 1), (3, 1, 1)])[-1][0]
    unused = lambda state: differentiated(state, lambda s, w: jnp.sum(w))
    for new in (unused(old), jax.jit(unused)(old)):
        jax.tree.map(np.testing.assert_array_equal, new, old)


@pytest.mark.parametrize("taken", [True, False])
def test_a_state_of_a_branch(taken):
    old, x, product = run(RECIPE, [(5, 1, 1)])[0][0], of_size(2, 8, 16), fp8.dot_general(RECIPE)

    def branched(state, w):
        run = lambda s: jnp.sum(product(x, w, LINEAR, state=s))
        return lax.cond(jnp.asarray(taken), run, lambda _: jnp.float32(0), state)

    new = jax.jit(lambda state: differentiated(state, branched))(old)
    assert new["input_amax_history"].tolist() == ([2, 5, 0] if taken else [5, 0, 0])


def test_outside_of_jit_gradients_are_summed():
    xs = [of_size(size, 8, 16) for size in (2.0, 7.0)]
    product = fp8.dot_general(RECIPE)
    new = differentiated(fp8.init_state(RECIPE), lambda s, w: shared(product, s, w, xs))
    assert (float(new["uses"]), new["input_amax_history"].tolist()) == (2, [9, 0, 0])


def test_a_loss_that_computes_with_the_state_converts_it():
    """The loss is traced once; the error without a conversion contains the fix."""
    xs = [of_size(size, 8, 16) for size in (2.0, 7.0)]
    product, calls = fp8.dot_general(RECIPE), []

    def loss(state, w, convert):
        calls.append(convert)
        return shared(product, state, w, xs) + convert(state["age"]) * 0

    def step(state, convert):
        return jax.jit(lambda state: differentiated(state, lambda s, w: loss(s, w, convert)))(state)

    with pytest.raises((TypeError, ValueError)) as error:
        step(fp8.init_state(RECIPE), lambda leaf: leaf)
    assert "jaxmp.fp8.to_float32(variables)" in error.value.__notes__[0]
    assert len(calls) == 1
    new = step(fp8.init_state(RECIPE), lambda leaf: lax.stop_gradient(fp8.to_float32(leaf)))
    assert (float(new["uses"]), new["input_amax_history"].tolist()) == (1, [7, 0, 0])
    assert len(calls) == 2


def per_device(check_vma, convert):
    """The newest amax after a step whose loss contains `shard_map`."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jnp.concatenate([of_size(size, 8, 16) for size in (1.0, 2.0, 9.0, 4.0)])
    product, specs = fp8.dot_general(RECIPE), (PartitionSpec(), PartitionSpec("data"))

    def loss(state, w):
        local = lambda s, x: lax.psum(jnp.sum(product(x, w, LINEAR, state=s)), "data")
        run = jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma
        )
        return run(convert(state), x)

    new = jax.jit(lambda state: differentiated(state, loss))(fp8.init_state(RECIPE))
    return new["input_amax_history"].tolist()


@EXPENSIVE
def test_devices_inside_of_a_loss():
    """Unchecked, JAX can only sum over devices, which the loss must request."""
    assert per_device(True, lambda state: state) == [9, 0, 0]
    with pytest.raises(CompositionError, match=r"check_vma=True.*fp8.to_float32\(variables\)"):
        per_device(False, lambda state: state)
    assert per_device(False, fp8.to_float32) == [16, 0, 0]


def test_examples_share_a_state_and_models_do_not():
    xs = jnp.stack([of_size(size, 8, 16) for size in (2.0, 7.0)])
    w, g, product = of_size(1, 16, 8), of_size(1, 8, 8), fp8.dot_general(RECIPE)
    state = run(RECIPE, [(5, 1, 1)])[0][0]
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), state)

    def loss(state, xs):
        return jnp.sum(jax.vmap(lambda x: product(x, w, LINEAR, state=state) * g)(xs))

    @jax.jit
    def grads():
        models = lambda s: jnp.sum(jax.vmap(lambda s, x: product(x, w, LINEAR, state=s) * g)(s, xs))
        both = jax.vmap(jax.grad(loss), in_axes=(0, None))(states, xs)
        return jax.grad(loss)(state, xs), jax.grad(models)(states), both

    examples, models, both = grads()
    assert examples["input_amax_history"].tolist() == [7, 5, 0]
    assert models["input_amax_history"].tolist() == [[2, 5, 0], [7, 10, 0]]
    assert both["input_amax_history"].tolist() == [[7, 5, 0], [7, 10, 0]]


def test_devices():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jnp.concatenate([of_size(size, 8, 16) for size in (1.0, 2.0, 9.0, 4.0)])
    w, product = of_size(1, 16, 8), fp8.dot_general(RECIPE)
    specs = (PartitionSpec(), PartitionSpec("data"))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    def grad(state, x):
        return jax.grad(lambda s: jnp.sum(product(x, w, LINEAR, state=s)))(state)

    new = grad(fp8.init_state(RECIPE), x)
    assert amaxes(new) == {"input": 9, "kernel": 1, "output_grad": 1}
    # The first step is scaled by the maximum of all.
    assert new["input_amax"] == 9


# ---------------------------------------------------------------------------
# In a train state
# ---------------------------------------------------------------------------
