"""Gradients of functions of Flax objects, and the Variables that a skipped step restores."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from arrays import plain
from grids import EXPENSIVE
from training_steps import nnx_step

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
Y = jnp.asarray(np.sin(np.asarray(X).sum(-1)))


class Net(nnx.Module):
    """Model with batch statistics, and dropout with the `nnx.Rngs` of the call."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x, rngs):
        return self.head(self.dropout(nnx.relu(self.norm(self.inner(x))), rngs=rngs))[:, 0]


class Encoder(nnx.Module):
    """Model with batch statistics, and a counter that is a plain array."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.count = nnx.data(jnp.zeros(()))

    def __call__(self, x):
        self.count = self.count + 1
        return self.norm(x)


def loss_fn(model, x, y, rngs, encoder, more):
    loss = jnp.mean((model(encoder(x), rngs) - y) ** 2)
    more["metrics"].update(loss=loss)
    return loss


def objects():
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    return Net(nnx.Rngs(0)), nnx.Rngs(1), Encoder(nnx.Rngs(2)), {"metrics": metrics}


def arrays(tree):
    return jax.tree.map(plain, nnx.as_pure(tree))


def assert_equal(ours, expected):
    ours, expected = arrays(ours), arrays(expected)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, ours, expected)


# ---------------------------------------------------------------------------
# Flax objects in any argument, as in flax.nnx.value_and_grad
# ---------------------------------------------------------------------------

KERNELS = nnx.DiffState(0, nnx.PathContains("kernel"))


@EXPENSIVE
def test_any_argument_is_a_flax_object():
    results = []
    for value_and_grad in (nnx.value_and_grad, jaxmp.nnx.value_and_grad):

        @nnx.jit
        def every(model, rngs, encoder, more, value_and_grad=value_and_grad):
            numbers = ((0, 4), (1, 0), KERNELS)
            runs = [value_and_grad(loss_fn, argnums=argnums) for argnums in numbers]
            return [run(model, X, Y, rngs, encoder, more=more) for run in runs]

        nodes = objects()
        results.append((every(*nodes), nnx.state(nodes)))
    assert_equal(results[1], results[0])


def test_a_model_metrics_and_rngs_train_through_the_optimizer():
    model, rngs, encoder, more = objects()
    recipe = jaxmp.load_recipe("fp16").replace(loss_scale=jaxmp.DynamicLossScale(2.0**8))
    model = recipe.wrap(model)
    optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.sgd(0.1)))

    step = nnx.jit(nnx_step(loss_fn, microbatches=2, batch_argnums=(1, 2)))
    losses = [float(step(model, optimizer, X, Y, rngs, encoder, more)) for _ in range(30)]
    assert losses[-1] < losses[0]
    # Each microbatch receives the state of the previous one.
    assert int(encoder.count) == 60 and int(rngs.default.count[...]) == 60
    np.testing.assert_allclose(more["metrics"].loss.total[...], 2 * sum(losses), rtol=1e-5)


class Head(nnx.Module):
    """Model whose parameters have as many rows as the batch."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs(), (8, 4)))

    def __call__(self, x):
        return (x @ self.kernel[...].T)[:, 0]


def squares(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


# Loss -> the other arguments, and the numbers that an error names.
BATCHES = {
    "batch": (lambda m, b: squares(m, *b), lambda: ((X, Y),), None),
    "x, y": (squares, lambda: (X, Y), (1, 2)),
    "target, x, y": (
        lambda m, target, x, y: squares(m, x, target(x) * y),
        lambda: (Head(nnx.Rngs(1)), X, Y),
        (2, 3),
    ),
    "batch, rngs": (
        lambda m, b, rngs: squares(m, *b) + 0 * jax.random.uniform(rngs()),
        lambda: ((X, Y), nnx.Rngs(0)),
        None,
    ),
    "rngs, batch": (lambda m, rngs, b: squares(m, *b), lambda: (nnx.Rngs(0), (X, Y)), 2),
    "x, y, mask": (lambda m, x, y, mask: squares(m, x, y * mask), lambda: (X, Y, Y), (1, 2, 3)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_is_not_certain_is_refused_with_the_arguments_to_name(name):
    loss_fn, make, numbers = BATCHES[name]
    model = Head(nnx.Rngs(2))
    expected = jaxmp.nnx.value_and_grad(loss_fn)(model, *make())
    options = {}
    if numbers is not None:
        message = re.escape(f"microbatches=4, batch_argnums={numbers})")
        with pytest.raises(jaxmp.JaxmpError, match=message):
            jaxmp.nnx.value_and_grad(loss_fn, microbatches=4)(model, *make())
        options = {"batch_argnums": numbers}
    loss, grads = jaxmp.nnx.value_and_grad(loss_fn, microbatches=4, **options)(model, *make())
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(grads["kernel"][...], expected[1]["kernel"][...], rtol=1e-5)


def test_keyword_arguments_of_the_batch_are_not_overlooked():
    with pytest.raises(jaxmp.JaxmpError, match=r"batch_argnums=\(1, 2\)"):
        jaxmp.nnx.value_and_grad(squares, microbatches=2)(Head(nnx.Rngs(0)), X, y=Y)
    keyword = lambda model, x, *, y: squares(model, x, y)
    with pytest.raises(jaxmp.JaxmpError, match="by position"):
        jaxmp.nnx.value_and_grad(keyword, microbatches=2)(Head(nnx.Rngs(0)), X, y=Y)


class Sows(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        y = self.layer(x)
        self.seen = nnx.Intermediate(y)
        self.sow(nnx.Intermediate, "sown", y)
        return y[:, 0]


# Flax deprecates `sow` outside of `nnx.capture`; models that do it still exist.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_new_attributes_and_auxiliary_objects_come_out(microbatches):
    model = Sows(nnx.Rngs(0))

    def loss_fn(model, x):
        metric = nnx.metrics.Average()
        loss = jnp.mean(model(x) ** 2)
        metric.update(values=loss)
        return loss, {"model": model, "metric": metric}

    run = nnx.jit(jaxmp.nnx.value_and_grad(loss_fn, has_aux=True, microbatches=microbatches))
    for _ in range(2):  # the second call receives what the first has sown
        (loss, aux), grads = run(model, X)
    assert aux["model"] is model and set(grads) == {"layer"}
    seen = nnx.pop(model, nnx.Intermediate)["seen"][...]
    np.testing.assert_allclose(seen.reshape(8, 1), model.layer(X), rtol=1e-5)
    total = aux["metric"].total[...]
    assert total.shape == (() if microbatches == 1 else (2,))
    np.testing.assert_allclose(np.mean(total), loss, rtol=1e-5)


def test_modules_in_containers_and_functions_as_decorators():
    pair = {"a": nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "b": [nnx.Param(jnp.ones((1, 4))), 2.0]}

    def loss_fn(pair, x):
        return jnp.mean((pair["a"](x) * pair["b"][0] * pair["b"][1]) ** 2)

    expected = nnx.value_and_grad(loss_fn)(pair, X)
    assert_equal(jaxmp.nnx.value_and_grad()(loss_fn)(pair, x=X), expected)
    assert_equal(jaxmp.nnx.value_and_grad(loss_fn, loss_scale=4.0)(pair, X)[1], expected[1])
    models = (pair["a"], nnx.Linear(4, 1, rngs=nnx.Rngs(1)))
    optimizer = jaxmp.nnx.Optimizer(models, optax.sgd(0.1))

    @optimizer.value_and_grad(has_aux=True)
    def run(models, x):
        return jnp.mean(models[1](models[0](x)) ** 2), x.shape[0]

    (before, count), grads = run(models, X)
    optimizer.update(models, grads)
    assert count == 8 and run(models, X)[0][0] < before


def test_an_array_that_is_an_attribute_is_differentiated():
    class Arrays(nnx.Module):
        def __init__(self):
            self.w = nnx.data(X)

    run = jaxmp.nnx.value_and_grad(
        lambda model: jnp.sum(model.w**2), wrt=lambda path, _: "w" in path
    )
    np.testing.assert_allclose(run(Arrays())[1]["w"], 2 * X)


def test_a_module_shared_by_two_arguments():
    shared = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    one, two = nnx.Sequential(shared, jnp.tanh), nnx.Sequential(shared, nnx.relu)
    loss_fn = lambda one, two, x: jnp.mean((one(x) + two(x)) ** 2)
    _, ours = jaxmp.nnx.value_and_grad(loss_fn, argnums=(0, 1))(one, two, X)
    assert_equal(ours, nnx.grad(loss_fn, argnums=(0, 1))(one, two, X))
    for argnums in (0, 1):
        with pytest.raises(jaxmp.JaxmpError, match=r"'layers/0/\w+' of an argument that is diff"):
            jaxmp.nnx.value_and_grad(loss_fn, argnums=argnums)(one, two, X)
    jaxmp.nnx.value_and_grad(loss_fn)(one, nnx.clone(two), X)


def test_what_cannot_be_differentiated_is_refused():
    model = Head(nnx.Rngs(0))
    with pytest.raises(jaxmp.JaxmpError, match=r"'__call__', a bound method of a Head.*lambda"):
        jaxmp.nnx.value_and_grad(model.__call__)
    with pytest.raises(jaxmp.JaxmpError, match=r"argnums names argument 2.*with 2 positional"):
        jaxmp.nnx.value_and_grad(lambda m, x: m(x).sum(), argnums=2)(model, X)
    with pytest.raises(jaxmp.JaxmpError, match=r"batch_argnums names argument 2.*with 2 position"):
        run = jaxmp.nnx.value_and_grad(
            lambda m, x: m(x).sum(), microbatches=2, batch_argnums=(1, 2)
        )
        run(model, X)
    with pytest.raises(jaxmp.JaxmpError, match="loss scale by keyword"):
        jaxmp.nnx.value_and_grad(lambda m, x: m(x).sum(), 2.0**8)
    with pytest.raises(jaxmp.JaxmpError, match="microbatches=0"):
        jaxmp.nnx.value_and_grad(lambda m, x: m(x).sum(), microbatches=0)
    with pytest.raises(jaxmp.JaxmpError, match=r"must return .loss, aux., but it returned"):
        jaxmp.nnx.value_and_grad(lambda m, x: m(x).sum(), has_aux=True)(model, X)
    with pytest.raises(jaxmp.JaxmpError, match="has_aux=True"):
        jaxmp.nnx.value_and_grad(lambda m, x: (m(x).sum(), x))(model, X)


def test_microbatches_refuse_state_that_changes_its_structure():
    class Grows(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.ones(()))
            self.total = nnx.BatchStat(jnp.zeros(()))

    def wider(model, x):
        model.total[...] = model.total[...]
        model.total.set_value(jnp.zeros(4))
        return jnp.mean(model.scale * x)

    def new(model, x):
        model.fresh = nnx.BatchStat(x.mean())
        return jnp.mean(model.scale * x)

    with pytest.raises(jaxmp.JaxmpError, match=r"'total', from float32\[\] to float32\[4\]"):
        jaxmp.nnx.value_and_grad(wider, microbatches=2)(Grows(), X)
    with pytest.raises(jaxmp.JaxmpError, match=r"adds a BatchStat at 'fresh'.*before the first"):
        jaxmp.nnx.value_and_grad(new, microbatches=2)(Grows(), X)
    model = Grows()
    jaxmp.nnx.value_and_grad(new)(model, X)
    np.testing.assert_allclose(model.fresh[...], X.mean(), rtol=1e-6)


# ---------------------------------------------------------------------------
# The loss scale is read at each call
# ---------------------------------------------------------------------------


class Weight(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))


def half_loss(model, x):
    # The gradient of the 16-bit product is the loss scale, and overflows from 2**16 on.
    return jnp.sum((model.w * x).astype(jnp.float16).astype(jnp.float32))


def scaled(model):
    recipe = jaxmp.load_recipe("fp16").replace(loss_scale=jaxmp.DynamicLossScale(2.0**18))
    return jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.sgd(0.1)))


@pytest.mark.parametrize("compile_", ["eager", "nnx.jit", "cached_partial"])
def test_the_loss_scale_is_read_at_each_call(compile_):
    model = Weight()
    optimizer = scaled(model)
    made_once = optimizer.value_and_grad(half_loss)

    def step(model, optimizer, x):
        run = made_once if compile_ == "eager" else optimizer.value_and_grad(half_loss)
        loss, grads = run(model, x)
        optimizer.update(model, grads)
        return loss

    if compile_ == "nnx.jit":
        step = nnx.jit(step)
    elif compile_ == "cached_partial":
        cached = nnx.cached_partial(nnx.jit(step), model, optimizer)
        step = lambda model, optimizer, x: cached(x)
    for _ in range(5):
        step(model, optimizer, jnp.ones(2))
    assert int(jaxmp.get_skip_stats(optimizer).total) == 3
    assert int(optimizer.step[...]) == 2
    np.testing.assert_allclose(model.w[...], 0.8, rtol=1e-6)


def test_a_loss_scale_that_would_be_a_constant_is_refused():
    model = Weight()
    optimizer = scaled(model)
    run = optimizer.value_and_grad(half_loss)
    with pytest.raises(jaxmp.JaxmpError, match="its loss scale would never change"):
        nnx.jit(lambda model, x: run(model, x))(model, jnp.ones(2))
    fixed = optimizer.value_and_grad(half_loss, loss_scale=2.0)
    nnx.jit(lambda model, x: fixed(model, x))(model, jnp.ones(2))
    # It is not that of the optimizer which the function receives either.
    with pytest.raises(jaxmp.JaxmpError, match="call value_and_grad inside"):
        nnx.jit(lambda model, optimizer, x: run(model, x))(model, optimizer, jnp.ones(2))


# ---------------------------------------------------------------------------
# A skipped step restores the Variables of the optimizer's last call
# ---------------------------------------------------------------------------


class Players(nnx.Module):
    """Two parameters with separate optimizers, and statistics that both losses write."""

    def __init__(self):
        self.actor = nnx.Param(jnp.ones(2))
        self.critic = nnx.Param(jnp.ones(2))
        self.mean = nnx.BatchStat(jnp.zeros(()))
        self.rngs = nnx.Rngs(0)

    def loss(self, param, x):
        self.rngs()
        self.mean[...] = 0.5 * self.mean[...] + x.mean()
        return jnp.sum(param * x)


def actor_loss(model, x):
    return model.loss(model.actor, x)


def critic_loss(model, x):
    return model.loss(model.critic, x)


GOOD, BAD = jnp.array([1.0, 2.0]), jnp.array([1.0, jnp.inf])


def players(recipe="fp32"):
    recipe = jaxmp.load_recipe(recipe)
    model, tx = recipe.wrap(Players()), recipe.optimizer(optax.sgd(0.1))
    names = ("actor", "critic")
    optimizers = [jaxmp.nnx.Optimizer(model, tx, wrt=nnx.PathContains(name)) for name in names]
    return model, *optimizers


def interleaved(model, actor, critic, x_actor, x_critic, critic_first):
    _, grads_actor = actor.value_and_grad(actor_loss)(model, x_actor)
    _, grads_critic = critic.value_and_grad(critic_loss)(model, x_critic)
    steps = [(actor, grads_actor), (critic, grads_critic)]
    for optimizer, grads in reversed(steps) if critic_first else steps:
        optimizer.update(model, grads)


@pytest.mark.parametrize("critic_first", [False, True])
@pytest.mark.usefixtures("check_leaks")
def test_two_optimizers_undo_only_their_own_calls(critic_first):
    step = nnx.jit(functools.partial(interleaved, critic_first=critic_first))
    mean = float(GOOD.mean())
    for x_actor, x_critic, statistic in [
        (GOOD, GOOD, 1.5 * mean),
        (GOOD, BAD, mean),
        (BAD, GOOD, 0.0),  # the critic's statistics were computed from the actor's
        (BAD, BAD, 0.0),
    ]:
        model, actor, critic = players()
        step(model, actor, critic, x_actor, x_critic)
        moved = 1.0 - 0.1 * GOOD
        np.testing.assert_allclose(model.actor[...], 1.0 if x_actor is BAD else moved)
        np.testing.assert_allclose(model.critic[...], 1.0 if x_critic is BAD else moved)
        np.testing.assert_allclose(model.mean[...], statistic)
        assert int(model.rngs.default.count[...]) == 2


def test_a_call_without_update_leaves_nothing_to_restore():
    model, actor, critic = players()
    critic.value_and_grad(critic_loss)(model, GOOD)
    actor.value_and_grad(actor_loss)(model, GOOD)  # no update: a gradient to look at
    critic.update(model, critic.value_and_grad(critic_loss)(model, GOOD)[1])
    mean = float(model.mean[...])
    _, grads = actor.value_and_grad(actor_loss)(model, BAD)
    actor.update(model, grads)
    np.testing.assert_allclose(model.critic[...], 1.0 - 0.1 * GOOD)
    np.testing.assert_allclose(model.mean[...], mean)
    # A value that was set after the call is not restored.
    _, grads = actor.value_and_grad(actor_loss)(model, BAD)
    model.mean[...] = jnp.asarray(7.0)
    actor.update(model, grads)
    np.testing.assert_allclose(model.mean[...], 7.0)


def test_a_skip_restores_arrays_metrics_and_parameters_that_the_forward_pass_wrote():
    class Normalized(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.array([3.0, 4.0]))
            self.encoder = Encoder(nnx.Rngs(0))

        def __call__(self, x):
            self.w[...] = self.w[...] / jnp.linalg.norm(self.w[...])
            return self.encoder(x) @ jnp.tile(self.w[...], 2)

    model, metric = Normalized(), nnx.metrics.Average()
    tx = jaxmp.load_recipe("fp32").optimizer(optax.sgd(0.1))
    optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.PathContains("w"))

    @nnx.jit
    def step(model, optimizer, metric, x):
        def loss_fn(model, metric):
            loss = jnp.mean(model(x) ** 2)
            metric.update(values=loss)
            return loss

        _, grads = optimizer.value_and_grad(loss_fn)(model, metric)
        optimizer.update(model, grads)

    before = arrays(nnx.state((model, metric)))
    step(model, optimizer, metric, X.at[0, 0].set(jnp.inf))
    jax.tree.map(np.testing.assert_array_equal, arrays(nnx.state((model, metric))), before)
    step(model, optimizer, metric, X)
    assert int(model.encoder.count) == 1 and int(metric.count[...]) == 1
    np.testing.assert_allclose(jnp.linalg.norm(model.w[...]), 1.0, atol=0.1)


def test_autocast_writes_to_flax_objects_in_the_dtypes_of_the_function():
    plain, cast = objects(), objects()
    policies = jaxmp.PolicyMap("fp32", [jaxmp.Rule("", "o=bf16")])
    for fn, (model, rngs, encoder, more) in (
        (loss_fn, plain),
        (jaxmp.autocast(loss_fn, policies), cast),
    ):
        loss = fn(model, X, Y, rngs, encoder, more=more)
    assert loss.dtype == jnp.bfloat16 and int(cast[2].count) == 1
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(compare, *(arrays(nnx.state(tree)) for tree in (cast, plain)))
    assert jax.tree.map(jnp.shape, nnx.state(cast)) == jax.tree.map(jnp.shape, nnx.state(plain))
    rngs = nnx.Rngs(0)
    jaxmp.autocast(lambda first, again: (first(), again()), "bf16")(rngs, again=rngs)
    assert int(rngs.default.count[...]) == 2
    frozen = nnx.Linear(4, 4, rngs=rngs)
    own = jaxmp.autocast(lambda m, x: [m, m.bias, nnx.Linear(4, 4, rngs=nnx.Rngs(0))], "bf16")
    *same, new = own(frozen, X)
    assert same[0] is frozen and same[1] is frozen.bias and isinstance(new, nnx.Linear)
    jax.jit(lambda x: jaxmp.autocast(lambda model, x: model(x), "bf16")(frozen, x))(X)
    for text, name, value in (
        ("adds 'new' to", "new", nnx.Param(X)),
        ("use_bias' of", "use_bias", 0),
    ):
        write = functools.partial(lambda name, value, m: setattr(m, name, value), name, value)
        with pytest.warns(jaxmp.errors.RecipeWarning, match=f"{text} a Flax object"):
            jaxmp.autocast(write, "bf16")(frozen)


@pytest.mark.usefixtures("check_leaks")
def test_a_gradient_without_update_in_a_compiled_function_does_not_leak():
    model, actor, _ = players()
    run = actor.value_and_grad(actor_loss, loss_scale=1.0)
    loss, _ = nnx.jit(lambda model, x: run(model, x))(model, GOOD)
    inside = lambda model, actor, x: actor.value_and_grad(actor_loss)(model, x)
    loss, _ = nnx.jit(inside)(model, actor, GOOD)
    assert bool(jnp.isfinite(loss))


# ---------------------------------------------------------------------------
# Frozen parameters
# ---------------------------------------------------------------------------


def adapted(recipe):
    base = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    model = recipe.wrap(nnx.LoRA(4, 2, 4, base_module=base, rngs=nnx.Rngs(1)))
    tx = recipe.optimizer(optax.sgd(0.1))
    return model, jaxmp.nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)


def train_adapter(model, optimizer, x):
    loss, grads = optimizer.value_and_grad(lambda model, x: jnp.mean(model(x)))(model, x)
    optimizer.update(model, grads)
    return loss


def test_frozen_parameters_in_fp32_are_reported_with_a_fix():
    recipe, x = jaxmp.load_recipe("bf16_params"), jnp.ones((2, 4))
    model, optimizer = adapted(recipe)
    with pytest.warns(jaxmp.errors.RecipeWarning) as warned:
        nnx.jit(train_adapter)(model, optimizer, x)
    assert warned[0].filename == __file__
    message = str(warned[0].message)
    assert "'base_module:bias' and 1 other parameters are stored in float32" in message
    fix = message.partition("before training: ")[2]
    assert fix.startswith("nnx.update(model, ")
    model, optimizer = adapted(recipe)
    exec(fix, {"nnx": nnx, "model": model, "recipe": recipe})
    nnx.jit(train_adapter)(model, optimizer, x)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model))} == {"bfloat16"}


def test_parameters_of_another_optimizer_are_not_frozen():
    model, actor, _ = players("bf16_params")
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.PathContains("actor")))
    actor.update(model, grads)
