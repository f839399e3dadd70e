"""Current scaling whose kernels the optimizer step measures, against measuring them in the dot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from grids import EXPENSIVE, fast_cases
from jaxmp import PolicyMap, fp8
from models_linen import TwoResiduals

WIDTH = 64
LINEAR = (((1,), (0,)), ((), ()))
STORED = fp8.CurrentScaling(kernel_amax="optimizer")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def mean_square(y):
    return jnp.mean((y.astype(jnp.float32) - 1) ** 2)


def make_state(form, scaling, recipe="bf16", policy="p=f32,c=bf16,o=bf16,matmul=fp8", axis_name=()):
    model = jaxmp.load_recipe(PolicyMap(policy, fp8=scaling)).wrap(TwoResiduals(form, WIDTH))
    inner = optax.sgd(0.1, momentum=0.9)
    tx = jaxmp.load_recipe(recipe).optimizer(inner, axis_name=axis_name)
    variables = model.init(jax.random.key(1), normal(0, 128, WIDTH))
    return jaxmp.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)


@functools.partial(jax.jit, static_argnames="microbatches")
def train_step(state, x, microbatches=1):
    loss_fn = lambda variables, x: mean_square(state.apply_fn(variables, x))
    loss, grads = state.value_and_grad(loss_fn, microbatches=microbatches)(x)
    return state.apply_gradients(grads=grads), loss


def train(state, microbatches=1, sizes=(1, 1, 1)):
    losses = []
    for size in sizes:
        state, loss = train_step(state, normal(0, 128, WIDTH) * size, microbatches)
        losses.append(loss)
    return state, losses


def amaxes(state):
    return jax.tree.leaves(state.params["_overwrite_with_gradient"])


def assert_equal(result, expected):
    jax.tree.map(np.testing.assert_array_equal, result, expected)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("form", ["plain", "remat", "scan", "scan remat", "scan axis 1"])
@fast_cases("scan remat-2")
def test_training_equals_that_of_measured_kernels(form, microbatches):
    state, losses = train(make_state(form, STORED), microbatches)
    expected, expected_losses = train(make_state(form, fp8.CurrentScaling()), microbatches)
    assert_equal(losses, expected_losses)
    assert_equal(state.params["params"], expected.params["params"])
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(state.params["params"]))
    assert max(float(x.max()) for x in amaxes(state)) == largest


@pytest.mark.parametrize("wgrad", ["e5m2", "high"])
@pytest.mark.parametrize("recipe", ["bf16_params", "fp16"])
@fast_cases("fp16-high")
def test_casts_and_skipped_steps(recipe, wgrad):
    """A kernel in 16 bits has the rounded amax; a skipped step keeps kernels and amaxes."""
    params = "bf16" if recipe == "bf16_params" else "f32"
    formats = wgrad if wgrad == "high" else ("e4m3fn", wgrad)
    policy = f"p={params},c=bf16,o=bf16,matmul=fp8"
    sizes = (1, 1, jnp.inf, 1) if recipe == "fp16" else (1, 1, 1)
    run = lambda **options: train(
        make_state("plain", fp8.CurrentScaling(wgrad=formats, **options), recipe, policy),
        sizes=sizes,
    )
    state, losses = run(kernel_amax="optimizer")
    expected, expected_losses = run()
    assert_equal(losses, expected_losses)
    assert_equal(state.params["params"], expected.params["params"])
    assert state.step == 3
    for kernel, amax in zip(jax.tree.leaves(state.params["params"]), amaxes(state), strict=True):
        assert amax == jnp.abs(kernel.astype(jnp.float32)).max()


def test_the_stored_amax_is_read_in_value_and_grad_only():
    state, _ = train(make_state("plain", STORED), sizes=(1,))
    x = normal(0, 128, WIDTH)
    of_amaxes = lambda factor: {
        **state.params,
        "_overwrite_with_gradient": jax.tree.map(
            lambda leaf: leaf * factor, state.params["_overwrite_with_gradient"]
        ),
    }
    # With half of the amax, large elements saturate.
    loss_fn = lambda variables, x: mean_square(state.apply_fn(variables, x))
    gradient = jax.jit(jaxmp.value_and_grad(loss_fn))
    assert gradient(of_amaxes(0.5), x)[0] != gradient(of_amaxes(1.0), x)[0]
    # Unknown amaxes are measured, also if those of other layers are known.
    assert gradient(of_amaxes(0.0), x)[0] == gradient(of_amaxes(1.0), x)[0]
    partly, unknown = of_amaxes(1.0), of_amaxes(0.0)["_overwrite_with_gradient"]
    partly["_overwrite_with_gradient"]["ResidualDense_0"] = unknown["ResidualDense_0"]
    assert gradient(partly, x)[0] == gradient(of_amaxes(1.0), x)[0]
    # Evaluation may use other kernels, such as averages.
    evaluate = jax.jit(loss_fn)
    assert evaluate(of_amaxes(0.5), x) == evaluate(of_amaxes(1.0), x)
    # The gradient of the state is the unknown amax of the kernel of the next step.
    grads = gradient(state.params, x)[1]
    assert all(not leaf.any() for leaf in jax.tree.leaves(grads["_overwrite_with_gradient"]))


def test_training_in_nnx_equals_that_of_measured_kernels():
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def run(scaling):
        policies = PolicyMap("p=f32,c=bf16,o=bf16,matmul=fp8", fp8=scaling)
        model = jaxmp.load_recipe(policies).wrap(Layers(nnx.Rngs(0)))
        tx = jaxmp.load_recipe("bf16").optimizer(optax.sgd(0.1, momentum=0.9))
        optimizer = jaxmp.nnx.Optimizer(model, tx)

        @nnx.jit
        def step(model, optimizer, x):
            loss, grads = optimizer.value_and_grad(lambda m, x: mean_square(m(x)))(model, x)
            optimizer.update(model, grads)
            return loss

        return model, [step(model, optimizer, normal(0, 128, WIDTH)) for _ in range(3)]

    model, losses = run(STORED)
    expected, expected_losses = run(fp8.CurrentScaling())
    assert_equal(losses, expected_losses)
    for layer, other in zip(model.layers, expected.layers, strict=True):
        assert_equal(layer.kernel[...], other.kernel[...])
        assert layer.fp8_exact_kernel_amax[...] == jnp.abs(layer.kernel[...]).max()
    loss_fn = nnx.jit(
        lambda m, x: jaxmp.nnx.value_and_grad(lambda m, x: mean_square(m(x)))(m, x)[0]
    )
    before = loss_fn(model, normal(0, 128, WIDTH))
    # With half of the amax, large elements saturate.
    model.layers[0].fp8_exact_kernel_amax[...] *= 0.5
    assert loss_fn(model, normal(0, 128, WIDTH)) != before


# ---------------------------------------------------------------------------
# Own training loops
# ---------------------------------------------------------------------------


def test_an_own_loop_measures_kernels():
    product = fp8.dot_general(STORED)
    loss_fn = lambda variables, x: mean_square(
        product(x, variables["params"]["up"], LINEAR, state=variables["_overwrite_with_gradient"])
    )
    variables = {"params": {"up": normal(1, 64, 48)}}
    states = fp8.init_state(STORED)
    x = normal(0, 32, 64)
    expected = jax.grad(lambda w: mean_square(fp8.dot_general()(x, w, LINEAR)))
    for _ in range(2):
        variables = {**variables, "_overwrite_with_gradient": states}
        grads = jax.jit(jaxmp.grad(loss_fn))(variables, x)
        assert_equal(grads["params"]["up"], expected(variables["params"]["up"]))
        assert set(grads["_overwrite_with_gradient"]) == {"exact_kernel_amax"}
        states = fp8.measure_kernels(variables["params"]["up"], states)
        assert states["exact_kernel_amax"] == jnp.abs(variables["params"]["up"]).max()


def test_kernels_are_located():
    zero = jnp.zeros(())
    states = {
        "a": {"fp8_exact_kernel_amax": zero},
        "b": {"exact_kernel_amax": zero},
        "c": {"exact_kernel_amax": zero},
    }
    params = {"a": {"kernel": normal(0, 4, 8), "bias": 99 * jnp.ones(8)}, "b": -3 * jnp.ones(5)}
    result = fp8.measure_kernels(params, states)
    assert result["a"]["fp8_exact_kernel_amax"] == jnp.abs(params["a"]["kernel"]).max()
    assert (result["b"]["exact_kernel_amax"], result["c"]["exact_kernel_amax"]) == (3, 0)
    delayed = {"a": fp8.init_state()}
    assert fp8.measure_kernels(params, delayed) is delayed


@pytest.mark.parametrize(
    ("shape", "stack", "axes"),
    [((3, 4, 5), (3,), (1, 2)), ((4, 3, 5), (3,), (0, 2)), ((3, 3, 5), (3,), None)],
)
def test_axes_of_stacked_layers(shape, stack, axes):
    kernel = normal(0, *shape)
    states = {"exact_kernel_amax": jnp.zeros(stack)}
    result = fp8.measure_kernels(kernel, states)["exact_kernel_amax"]
    # Axes of equal size are ambiguous, so that the amax is unknown.
    expected = jnp.zeros(stack) if axes is None else jnp.abs(kernel).max(axes)
    assert_equal(result, expected)


def test_the_state_is_checked():
    x, w = jnp.ones((16, 16)), jnp.ones((16, 16))
    product = fp8.dot_general(STORED)
    with pytest.raises(jaxmp.JaxmpError, match="CurrentScaling needs its state"):
        product(x, w, LINEAR)
    with pytest.raises(jaxmp.JaxmpError, match=r"The state of CurrentScaling has the keys"):
        product(x, w, LINEAR, state=fp8.init_state())
    with pytest.raises(jaxmp.JaxmpError, match=r"it must have shape \(\) and dtype float32"):
        product(x, w, LINEAR, state={"exact_kernel_amax": jnp.zeros(3)})
    with pytest.raises(jaxmp.errors.RecipeError, match="must be 'matmul' or 'optimizer'"):
        fp8.CurrentScaling(kernel_amax="step")


# ---------------------------------------------------------------------------
# Several devices
# ---------------------------------------------------------------------------


def make_mesh(types):
    return jax.make_mesh((2,), ("data",), (types,), devices=jax.devices()[:2])


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
@fast_cases("Auto")
def test_sharded_kernels(axes):
    mesh = make_mesh(AxisType[axes])
    state = make_state("plain", STORED)
    place = lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P("data") if leaf.ndim else P()))
    state = jax.tree.map(place, state)
    x = jax.device_put(normal(0, 128, WIDTH), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        for _ in range(2):
            state, _ = train_step(state, x)
    for kernel, amax in zip(jax.tree.leaves(state.params["params"]), amaxes(state), strict=True):
        assert amax == jnp.abs(kernel).max()


@EXPENSIVE
@pytest.mark.parametrize("check_vma", [True, False])
def test_kernels_in_shard_map(check_vma):
    """Parts of a kernel on several devices share one amax; without types it stays unknown."""
    mesh = make_mesh(AxisType.Auto)
    kernel, states = normal(0, 8, 16), {"exact_kernel_amax": jnp.zeros(())}
    mapped = jax.shard_map(
        fp8.measure_kernels,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    expected = jnp.abs(kernel).max() if check_vma else 0
    assert jax.jit(mapped)(kernel, states)["exact_kernel_amax"] == expected


@EXPENSIVE
def test_a_step_in_shard_map():
    mesh = make_mesh(AxisType.Auto)
    x = normal(0, 128, WIDTH)

    def step(state, x):
        loss_fn = lambda variables, x: mean_square(state.apply_fn(variables, x))
        loss, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads=grads), loss

    specs = P(), P("data")
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), P())))
    state = make_state("plain", STORED, axis_name="data")
    expected = make_state("plain", fp8.CurrentScaling(), axis_name="data")
    for _ in range(3):
        state, _ = step(state, x)
        expected, _ = step(expected, x)
    assert_equal(state.params["params"], expected.params["params"])


# ---------------------------------------------------------------------------
# States without amaxes
# ---------------------------------------------------------------------------


def test_a_state_of_measured_kernels_is_refused():
    state, before = make_state("plain", STORED), make_state("plain", fp8.CurrentScaling())
    with pytest.raises(jaxmp.errors.CompositionError) as error:
        train(state.replace(params=before.params))
    fix = "Pass all variables that `init` returned, including '_overwrite_with_gradient'"
    assert fix in str(error.value)
    params = {**state.params, "params": before.params["params"]}
    assert_equal(train(state.replace(params=params))[1], train(before)[1])


def test_a_checkpoint_of_measured_kernels_is_migrated(tmp_path):
    """Without `migrate=True`, `restore` raises an error that names it."""
    policies = "p=f32,c=bf16,o=bf16,matmul=fp8"
    recipes = [
        jaxmp.load_recipe(PolicyMap(policies, fp8=each)) for each in (fp8.CurrentScaling(), STORED)
    ]
    before, _ = train(make_state("plain", fp8.CurrentScaling()))
    state = make_state("plain", STORED)
    with jaxmp.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, before, recipe=recipes[0])
        with pytest.raises(jaxmp.errors.CheckpointError) as error:
            checkpointer.restore(state, recipe=recipes[1])
        assert "fp8_exact_kernel_amax: absent in the checkpoint" in str(error.value)
        assert "restore(state, recipe=recipe, migrate=True)" in str(error.value)
        state = checkpointer.restore(state, recipe=recipes[1], migrate=True)
    assert amaxes(state) == [0, 0]
    (state, losses), (before, expected) = train(state), train(before)
    assert_equal(losses, expected)
    assert_equal(state.params["params"], before.params["params"])
    assert all(amax > 0 for amax in amaxes(state))
