"""Delayed scaling in NNX models: location, updates and exclusions of its state."""

import copy
import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jaxmp
import models_linen
import models_nnx
from arrays import of_size
from grids import EXPENSIVE, fast_cases
from jaxmp import PolicyMap, Rule, fp8, load_recipe
from jaxmp._flax._nnx_model import apply_policy
from jaxmp.errors import CompositionError, RecipeWarning
from jaxmp.nnx import Optimizer, OverwriteWithGradient, value_and_grad
from relaxed import relaxed
from training_steps import new_state, nnx_step, state_step

DELAYED = fp8.DelayedScaling(amax_history_len=3)
# Also the last layer of a model, because most models here are parts of one.
POLICIES = PolicyMap("p=f32,c=bf16,o=f32", Rule("**", "matmul=fp8"), fp8=DELAYED)
LEAVES = {f"fp8_{name}": leaf.shape for name, leaf in fp8.init_state(DELAYED).items()}
STATE = "_overwrite_with_gradient"


class Layers(models_nnx.OfEachKind):
    """Model with one layer of each class, and attention."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.out = nnx.Linear(32, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.out(self.attention(super().__call__(x)))


IN_FP8 = ("einsum", "general", "attention/query", "attention/key", "attention/value")
IN_FP8 += ("attention/out", "out")


class LinenLayers(models_linen.OfEachKind):
    """The same model in Linen."""

    @nn.compact
    def __call__(self, x):
        x = super().__call__(x)
        x = nn.MultiHeadDotProductAttention(2, name="attention")(x)
        return nn.Dense(16, use_bias=False, name="out")(x)


def rngs():
    return nnx.Rngs(0)


@functools.cache
def layers():
    return Layers(rngs())


def states(model):
    """Returns layer path -> leaf name -> array of the FP8 states."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, OverwriteWithGradient)):
        found.setdefault("/".join(map(str, path[:-1])), {})[path[-1]] = variable.get_value()
    return found


def newest(model, path, operand="input"):
    return states(model)[path][f"fp8_{operand}_amax_history"][..., 0].tolist()


def linear(**options):
    return apply_policy(nnx.Linear(32, 16, use_bias=False, rngs=rngs()), POLICIES, **options)


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


# ---------------------------------------------------------------------------
# The state of a model
# ---------------------------------------------------------------------------


def test_every_layer_in_fp8_has_a_state_and_the_original_has_none():
    plain = layers()
    before = nnx.to_flat_state(nnx.state(plain))
    model = apply_policy(plain, POLICIES)
    assert {
        path: {name: leaf.shape for name, leaf in state.items()}
        for path, state in states(model).items()
    } == dict.fromkeys(IN_FP8, LEAVES)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(states(model)))
    after = nnx.to_flat_state(nnx.state(plain))
    assert [path for path, _ in after] == [path for path, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))
    assert model.out.kernel is plain.out.kernel


def test_it_has_the_names_that_linen_gives_it():
    """The states of one framework can therefore be loaded into the other."""
    linen = jaxmp.load_recipe(POLICIES).wrap(LinenLayers())
    made = jax.eval_shape(linen.init, jax.random.key(0), jnp.ones((2, 16, 32)))[STATE]
    own = nnx.to_pure_dict(nnx.state(apply_policy(layers(), POLICIES), OverwriteWithGradient))
    assert jax.tree.structure(own) == jax.tree.structure(made)


def test_another_policy_takes_it_away_and_the_same_one_keeps_it():
    model = linear()
    nnx.update(model, {"fp8_input_amax": jnp.float32(7)})
    again = apply_policy(model, POLICIES)
    assert again.fp8_input_amax is model.fp8_input_amax
    assert states(apply_policy(model, "bf16")) == states(apply_policy(model, "fp8")) == {}
    assert states(model)[""]["fp8_input_amax"] == 7
    longer = PolicyMap(POLICIES, fp8=fp8.DelayedScaling(amax_history_len=5))
    assert states(apply_policy(model, longer))[""]["fp8_input_amax_history"].shape == (5,)


def test_copies_and_shapes_alone():
    model = linear()
    x = of_size(4, 8, 32)
    run = nnx.jit(value_and_grad(loss_fn))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), nnx.clone(model)):
        assert twin.fp8_age is not model.fp8_age
        jax.tree.map(np.testing.assert_array_equal, run(twin, x), run(model, x))
    shapes = nnx.eval_shape(linear)
    assert {name: leaf.shape for name, leaf in states(shapes)[""].items()} == LEAVES
    wrapped = apply_policy(nnx.eval_shape(lambda: nnx.Linear(32, 16, rngs=rngs())), POLICIES)
    assert states(wrapped) == {"": states(shapes)[""]}


def test_a_state_that_is_gone():
    model = linear()
    del model.fp8_age
    with pytest.raises(CompositionError, match=r"finds no state for ''.*recipe.wrap"):
        model(jnp.ones((8, 32)))


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


def test_an_optimizer_carries_it():
    """The state is not scaled, clipped or decayed. It is combined by max, and restored on a skipped
    step.
    """
    recipe = load_recipe(POLICIES).replace(loss_scale=jaxmp.DynamicLossScale(init_scale=16.0))
    inner = optax.chain(optax.clip_by_global_norm(1e-3), relaxed(optax.adamw(1e-3, weight_decay=1)))
    model = linear()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        optimizer = Optimizer(model, recipe.optimizer(inner), wrt=nnx.Param)

        step = nnx.cached_partial(nnx.jit(nnx_step(loss_fn, microbatches=2)), model, optimizer)
        kinds = []
        x = jnp.concatenate([of_size(1, 8, 32), of_size(4, 8, 32)])
        for batch in (x, x.at[3].set(jnp.inf), x / 2):
            loss = step(batch)
            arrays = jax.tree.map(np.array, states(model)[""])
            kinds.append(
                (float(loss), arrays, np.array(model.kernel[...]), int(optimizer.step[...]))
            )
    (_, first, kernel, _), (skipped_loss, skipped, same, steps), (_, last, _, end) = kinds
    assert first["fp8_input_amax_history"].tolist() == [4, 0, 0]
    # Calibrated: each microbatch uses its amax, and the larger one is stored.
    assert first["fp8_input_amax"] == 4
    # The mean over 128 numbers; the loss scale is in the gradient that is quantized.
    y = 4 * np.abs(np.float32(jnp.max(jnp.abs(linear()(x / 4)))))
    assert first["fp8_output_grad_amax_history"][0] == pytest.approx(16 * 2 * y / 128, rel=0.05)
    assert not np.isfinite(skipped_loss) and (steps, end) == (1, 2)
    jax.tree.map(np.testing.assert_array_equal, (skipped, same), (first, kernel))
    assert last["fp8_input_amax_history"].tolist() == [2, 4, 0]
    assert last["fp8_input_amax"] == 4


@EXPENSIVE
def test_both_frameworks_train_alike():
    """Three steps with the same values give the same loss, and the same state up to rounding."""
    x = jax.random.normal(jax.random.key(1), (16, 32))
    linen = jaxmp.load_recipe(POLICIES).wrap(nn.Dense(16))
    variables = linen.init(jax.random.key(0), x)
    model = apply_policy(nnx.Linear(32, 16, rngs=rngs()), POLICIES)
    nnx.update(model, variables["params"])
    state = new_state(variables, POLICIES, optax.sgd(1.0))
    optimizer = Optimizer(model, load_recipe(POLICIES).optimizer(optax.sgd(1.0)))
    linen_step = jax.jit(state_step(lambda v, x: jnp.mean(linen.apply(v, x) ** 2)))
    step = nnx.jit(nnx_step(loss_fn))
    for _ in range(3):
        state, loss = linen_step(state, x)
        assert float(step(model, optimizer, x)) == pytest.approx(float(loss), rel=1e-5)
    ours = nnx.to_pure_dict(nnx.state(model, OverwriteWithGradient))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, dict(state.params[STATE])
    )
    assert all(np.all(leaf > 0) for leaf in jax.tree.leaves(ours))


def test_plain_flax_gradients():
    """`nnx.grad` of the parameters uses current amaxes in every step, with a warning; with the
    state, it is updated.
    """
    model, x = linear(), of_size(4, 8, 32)
    with pytest.warns(RecipeWarning, match="without that of its states"):
        nnx.grad(loss_fn)(model, x)
    assert newest(model, "") == 0
    both = nnx.DiffState(0, nnx.Any(nnx.Param, OverwriteWithGradient))
    grads = nnx.grad(loss_fn, argnums=both)(model, x)
    kernel = np.asarray(model.kernel[...])
    optimizer = Optimizer(model, load_recipe(POLICIES).optimizer(optax.sgd(0.1)))
    optimizer.update(model, nnx.state(grads, nnx.Param))
    assert newest(model, "") == 0 and np.any(model.kernel[...] != kernel)
    optimizer.update(model, grads)
    assert newest(model, "") == 4


def test_a_split_model_requires_the_gradient_of_its_states():
    """As the warning says, for `jaxmp.value_and_grad` of a function of variables."""
    graph, params, own, rest = nnx.split(model := linear(), nnx.Param, OverwriteWithGradient, ...)
    x, value_and_grad = of_size(4, 8, 32), jaxmp.value_and_grad
    value_and_grad(lambda x: loss_fn(model, x))(x)  # The model, such as a teacher, is not trained.
    of_params = lambda p: loss_fn(nnx.merge(graph, p, own, rest), x)
    for transform in (jax.jit, jax.checkpoint):
        with pytest.warns(RecipeWarning, match="split the model"):
            value_and_grad(transform(of_params))(params)
    loss_of = lambda v: loss_fn(nnx.merge(graph, v["params"], v[STATE], rest), x)
    _, grads = value_and_grad(loss_of)({"params": params, STATE: own})
    assert newest(nnx.merge(graph, params, grads[STATE], rest), "") == 4


def test_flax_optimizers_leave_it_to_the_user():
    model, x = linear(), of_size(4, 8, 32)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    _, grads = value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    assert newest(model, "") == 0
    nnx.update(model, nnx.state(grads, OverwriteWithGradient))
    assert newest(model, "") == 4


def test_a_filter_of_everything_trains_parameters_only():
    model, x = linear(), of_size(4, 8, 32)
    momentum = load_recipe(POLICIES).optimizer(optax.sgd(0.1, momentum=0.9))
    optimizer = Optimizer(model, momentum, wrt=nnx.Variable)
    _, grads = optimizer.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    assert newest(model, "") == 4
    # Momentum and, in FP32, no second copy.
    floats = [leaf for leaf in jax.tree.leaves(optimizer.opt_state) if leaf.shape]
    assert [leaf.shape for leaf in floats] == [model.kernel.shape]


def test_layers_that_do_not_run_keep_their_state():
    class Two(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(32, 32, rngs=rngs())
            self.second = nnx.Linear(32, 32, rngs=rngs())

        def __call__(self, x, both):
            x = self.first(x)
            return self.second(x) if both else x

    model, x = apply_policy(Two(), POLICIES), of_size(4, 8, 32)

    @functools.partial(nnx.jit, static_argnums=1)
    def step(model, both):
        _, grads = value_and_grad(lambda m: jnp.mean(m(x, both) ** 2))(model)
        nnx.update(model, nnx.state(grads, OverwriteWithGradient))

    step(model, True)
    before = states(model)
    step(model, False)
    jax.tree.map(np.testing.assert_array_equal, states(model)["second"], before["second"])
    assert states(model)["first"]["fp8_input_amax_history"].tolist() == [4, 4, 0]


@EXPENSIVE
def test_devices():
    """The state is combined by max over devices, and gradients are averaged."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    model = linear()
    graph, state = nnx.split(model)
    x = jnp.concatenate([of_size(size, 8, 32) for size in (1.0, 2.0, 9.0, 4.0)])

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )
    def grads_of(state, x):
        _, grads = value_and_grad(loss_fn, axis_name="data")(nnx.merge(graph, state), x)
        return grads

    grads = grads_of(state, x)
    assert grads["fp8_input_amax_history"][...].tolist() == [9, 0, 0]
    assert grads["fp8_uses"][...] == 1


# ---------------------------------------------------------------------------
# Layers that are used several times, and Flax's transformations
# ---------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


class Stack(nnx.Module):
    """Three stacked blocks, run by `nnx.scan` and recomputed in the backward pass."""

    def __init__(self, axes=0):
        self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(Block))(rngs())
        self.axes = axes

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, self.axes), out_axes=nnx.Carry)
        def run(x, block):
            return nnx.remat(lambda block, x: block(x))(block, x)

        return run(x, self.blocks)


def run_once(model, x, around=lambda fn: fn):
    """Returns the model after one update of its state."""

    @nnx.jit
    @around
    def step(model, x):
        _, grads = value_and_grad(lambda m: jnp.sum(m(x)))(model)
        nnx.update(model, nnx.state(grads, OverwriteWithGradient))

    step(model, x)
    return model


@EXPENSIVE
def test_scanned_layers_have_a_state_each():
    model, x = apply_policy(Stack(), POLICIES), of_size(4, 8, 32)
    assert states(model)["blocks/dense"]["fp8_input_amax_history"].shape == (3, 3)
    inputs, y = [], np.asarray(x)
    for kernel in np.asarray(model.blocks.dense.kernel[...]):
        inputs.append(float(np.max(np.abs(y))))
        y = y @ kernel
    # Each layer has 28.5 dB, an error of 4 %.
    assert newest(run_once(model, x), "blocks/dense") == pytest.approx(inputs, rel=0.1)
    assert len(set(newest(model, "blocks/dense"))) == 3
    np.testing.assert_array_equal(states(model)["blocks/dense"]["fp8_age"], 1)


@EXPENSIVE
def test_an_optimizer_updates_the_states_of_scanned_layers():
    """Rematerialized functions return the states that are active during the step."""
    policies = load_recipe("fp8_delayed").replace(fp8=DELAYED, loss_scale="dynamic")
    model, x = policies.wrap(Stack()), of_size(4, 8, 32)
    optimizer = Optimizer(model, policies.optimizer(optax.sgd(1e-3)))

    step = nnx.jit(nnx_step(lambda model, x: jnp.sum(model(x))))
    history = lambda: states(model)["blocks/dense"]["fp8_input_amax_history"]
    step(model, optimizer, x)
    first = np.asarray(history())
    step(model, optimizer, 2 * x)
    assert first.shape == history().shape == (3, 3)
    # The newest amax is the first element, and that of the first step the second one.
    np.testing.assert_array_equal(history()[:, 1], first[:, 0])
    assert history()[0, 0] == 2 * first[0, 0]
    before = np.asarray(history())
    step(model, optimizer, x * jnp.inf)
    np.testing.assert_array_equal(history(), before)


def test_stacked_states_that_are_not_split_are_refused_with_the_axes_to_name():
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    model = apply_policy(Stack(axes), POLICIES)
    with pytest.raises(CompositionError, match=r"nnx.StateAxes.*OverwriteWithGradient: 0"):
        model(of_size(4, 8, 32))
    axes = nnx.StateAxes({nnx.Param: 0, OverwriteWithGradient: 0, ...: None})
    assert apply_policy(Stack(axes), POLICIES)(of_size(4, 8, 32)).shape == (8, 32)


def seven_times(x):
    return jnp.asarray(7, x.dtype) * x


def twice(model, x):
    return model(x) + model(seven_times(x))


def in_each_round(model, x):
    xs = jnp.stack([x, seven_times(x)])
    turn = nnx.remat(lambda total, model, x: total + model(x))
    scan = nnx.scan(turn, in_axes=(nnx.Carry, None, 0), out_axes=nnx.Carry)
    return scan(jnp.zeros_like(x), model, xs)


def examples(model, x):
    xs = jnp.stack([x, seven_times(x)])
    return nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, xs)


@pytest.mark.parametrize("uses", [twice, in_each_round, examples])
@fast_cases("twice", "in_each_round")
def test_a_layer_that_is_used_twice_has_the_larger_maximum(uses):
    class Model(nnx.Module):
        def __init__(self):
            self.block = Block(rngs())

        def __call__(self, x):
            return uses(self.block, x)

    model = run_once(apply_policy(Model(), POLICIES), of_size(1, 8, 32))
    state = states(model)["block/dense"]
    assert state["fp8_input_amax_history"].tolist() == [7, 0, 0]
    assert (state["fp8_uses"], state["fp8_age"]) == (1, 1)


@EXPENSIVE
def test_models_under_vmap_have_a_state_each():
    make = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: apply_policy(Block(rngs), POLICIES)))
    models = make(rngs())
    xs = jnp.stack([of_size(1, 8, 32), of_size(7, 8, 32)])
    assert newest(run_once(models, xs, nnx.vmap), "dense") == [1, 7]


# ---------------------------------------------------------------------------
# Bridges
# ---------------------------------------------------------------------------


def test_a_linen_model_in_nnx():
    linen = jaxmp.load_recipe(POLICIES).wrap(nn.Dense(16))
    x = of_size(4, 8, 32)
    model = nnx.bridge.ToNNX(linen, rngs=rngs()).lazy_init(x)
    run_once(model, x)
    assert newest(model, "") == 4


def test_an_nnx_model_in_linen():
    make = lambda rngs: apply_policy(nnx.Linear(32, 16, rngs=rngs), POLICIES)
    model, x = nnx.bridge.to_linen(make), of_size(4, 8, 32)
    variables = model.init(jax.random.key(0), x)
    assert set(variables) >= {"params", STATE}
    variables = {name: variables[name] for name in variables if name in ("params", STATE)}
    loss = lambda variables: jnp.sum(model.apply(variables, x))
    _, grads = jax.jit(jaxmp.value_and_grad(loss))(variables)
    assert jax.tree.leaves(grads[STATE]["fp8_input_amax_history"])[0].tolist() == [4, 0, 0]
