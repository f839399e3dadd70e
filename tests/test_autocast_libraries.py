"""autocast with libraries for which jaxmp has no adapter: Equinox, Haiku and plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from arrays import floats
from grids import EXPENSIVE
from jaxmp import PolicyMap, Rule, autocast, full_precision
from jaxmp.errors import RuleError
from models import MIXED
from programs import (
    dtypes,
    leaf_dtypes,
    module_path,
    named,
    operands,
    products,
    relative_error,
    trace,
)
from relaxed import relaxed
from training_steps import new_state

eqx = pytest.importorskip("equinox", reason="Equinox is not installed")
hk = pytest.importorskip("haiku", reason="dm-haiku is not installed")

BF16, F32 = "bfloat16", "float32"


X, Y = floats(6, 5, 8), floats(6, 5, 4, seed=1)
TX = relaxed(optax.adam(1e-2))


def in_scope(traced, scope):
    return [equation for equation in traced if scope in module_path(equation)]


def assert_fp32_in(scope, traced, count):
    """Checks that of the matmuls, those in a scope are in FP32, and that there are `count`."""
    inside = in_scope(products(traced), scope)
    assert len(inside) == count
    for equation in products(traced):
        expected = F32 if equation in inside else BF16
        assert dtypes(equation)[:2] == (expected, expected), module_path(equation)


def trained(step, *state):
    """Returns the losses of eight steps, and the final parameters, which are the first state."""
    losses = []
    for _ in range(8):
        loss, *state = step(*state)
        losses.append(float(loss))
    return np.array(losses), state[0]


def trained_with_adam(loss_fn, params, state):
    """Trains the parameters of a loss function that also returns its state."""

    @jax.jit
    def step(params, state, opt_state):
        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state)
        updates, opt_state = TX.update(grads, opt_state, params)
        return loss, optax.apply_updates(params, updates), state, opt_state

    return trained(step, params, state, TX.init(params))


def assert_trains_alike(low, exact):
    """Checks eight steps of Adam with bfloat16 matmuls against the same in FP32.

    A matmul rounds each operand by up to 2**-9 = 0.002, and about six of them follow each other, so
    the loss differs by up to 2 %. Adam's first steps are the signs of the gradients, and only
    entries near zero change their sign: 8 steps of 0.01 change a parameter of order 0.3 by at most
    0.08.
    """
    (losses, params), (exact_losses, exact_params) = low, exact
    assert (losses != exact_losses).any()
    np.testing.assert_allclose(losses, exact_losses, rtol=0.02)
    assert losses[-1] < 0.9 * losses[0]
    assert relative_error(params, exact_params) < 0.02


# ---------------------------------------------------------------------------
# Equinox
# ---------------------------------------------------------------------------


class Encoder(eqx.Module):
    """Linear layer, attention, norm and MLP; some leaves are functions and integers."""

    embed: eqx.nn.Linear
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    full: bool = eqx.field(static=True)

    def __init__(self, key, full=False):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Linear(8, 16, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(2, 16, key=keys[1])
        self.norm = eqx.nn.LayerNorm(16)
        self.mlp = eqx.nn.MLP(16, 4, 32, depth=2, activation=jax.nn.silu, key=keys[2])
        self.full = full

    def __call__(self, x):
        x = jax.vmap(self.embed)(x)
        x = jax.vmap(self.norm)(x + self.attention(x, x, x))
        if self.full:
            with full_precision():
                return jax.vmap(self.mlp)(x)
        return jax.vmap(self.mlp)(x)


def encoder_loss(model, x, y):
    return jnp.square(jax.vmap(model)(x) - y).mean()


@functools.cache
def encoder():
    return Encoder(jax.random.key(0))


def equinox_gradients(loss_fn, model):
    """Returns a traceable gradient function of arrays, and the arrays of the model."""
    arrays, rest = eqx.partition(model, eqx.is_array)

    def gradients(arrays):
        grads = eqx.filter_grad(loss_fn)(eqx.combine(arrays, rest), X, Y)
        return eqx.filter(grads, eqx.is_array)

    return gradients, arrays


@EXPENSIVE
def test_equinox_products_norms_and_softmax():
    gradients, arrays = equinox_gradients(autocast(encoder_loss, MIXED), encoder())
    traced = trace(gradients, arrays)
    # 1 + 4 + 3 linear layers and 2 matmuls of the attention, each with two derivatives, except that
    # of the first layer with respect to the data.
    assert len(products(traced)) == 3 * 10 - 1
    assert {dtypes(equation)[:2] for equation in products(traced)} == {(BF16, BF16)}
    for equation in in_scope(named(traced, "sub", "exp", "rsqrt", "reduce_sum"), "jvp(eqx"):
        assert dtypes(equation)[0] == F32, module_path(equation)
    assert {dtypes(equation)[0] for equation in named(traced, "exp", "rsqrt")} == {F32}
    grads = eqx.filter_jit(gradients)(arrays)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype(F32)}


@EXPENSIVE
def test_equinox_autocast_of_the_gradient():
    gradients, arrays = equinox_gradients(encoder_loss, encoder())
    exact = jax.jit(gradients)(arrays)
    assert set(operands(autocast(gradients, MIXED), arrays)) == {(BF16, BF16)}
    assert relative_error(jax.jit(autocast(gradients, MIXED))(arrays), exact) < 0.02


def test_equinox_vectors_with_few_outputs():
    """XLA's CPU compiler refuses `vmap(w @ x)` with an FP32 result after another such product."""
    model = eqx.nn.MLP(2, 4, 32, 1, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (64, 2))
    loss = lambda model, x: jnp.square(jax.vmap(model)(x)).mean()
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    run = lambda loss: jax.jit(jax.value_and_grad(lambda a, x: loss(eqx.combine(a, rest), x)))
    result, exact = run(autocast(loss, "bf16"))(arrays, x), run(loss)(arrays, x)
    compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=2e-3)
    jax.tree.map(compare, result, exact)


def test_equinox_full_precision():
    model = Encoder(jax.random.key(0), full=True)
    gradients, arrays = equinox_gradients(autocast(encoder_loss, MIXED), model)
    assert_fp32_in("full_precision", trace(gradients, arrays), 3 * 3)


def test_equinox_rules_name_the_class_of_a_layer():
    policies = PolicyMap(MIXED, [Rule("**/eqx.nn.MultiheadAttention/**", "c=f32")])
    gradients, arrays = equinox_gradients(autocast(encoder_loss, policies), encoder())
    assert_fp32_in("MultiheadAttention", trace(gradients, arrays), 3 * 6)


# ---------------------------------------------------------------------------
# Haiku
# ---------------------------------------------------------------------------


def haiku_network(x, training):
    """Network with BatchNorm, whose averages are Haiku state."""
    x = hk.Linear(16, name="embed")(x)
    x = jax.nn.relu(hk.LayerNorm(-1, create_scale=True, create_offset=True, name="norm")(x))
    x = hk.Linear(16, name="hidden")(x)
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9, name="batch")(
        x, is_training=training
    )
    return hk.nets.MLP([16, 4], name="mlp")(x)


@functools.cache
def haiku_model():
    return hk.without_apply_rng(hk.transform_with_state(haiku_network))


def haiku_loss(params, state):
    out, state = haiku_model().apply(params, state, X, True)
    return jnp.square(out - Y).mean(), state


@pytest.fixture
def haiku_variables():
    """Returns parameters and state, under standard promotion: Haiku computes `float ** int`."""
    with jax.numpy_dtype_promotion("standard"):
        yield haiku_model().init(jax.random.key(0), X, True)


def test_haiku_products_and_norms(haiku_variables):
    gradients = jax.grad(autocast(haiku_loss, MIXED), has_aux=True)
    traced = trace(gradients, *haiku_variables)
    # Four linear layers with their two derivatives; none with respect to the data.
    assert len(products(traced)) == 3 * 4 - 1
    assert {dtypes(equation)[:2] for equation in products(traced)} == {(BF16, BF16)}
    assert len(named(traced, "rsqrt")) == 2
    for scope in ("norm", "batch"):
        statistics = named(traced, "sub", "rsqrt", "reduce_sum", "square", "integer_pow")
        statistics = [e for e in statistics if f"jvp({scope}" in module_path(e)]
        assert len(statistics) > 3
        assert {dtypes(equation)[0] for equation in statistics} == {F32}


def test_haiku_state_is_written_and_stays_in_fp32(haiku_variables):
    params, state = haiku_variables
    _, new = autocast(haiku_loss, MIXED)(params, state)
    _, exact = haiku_loss(params, state)
    assert leaf_dtypes(new) == leaf_dtypes(state)
    assert relative_error(new, state) > 0.1
    # The averages are those of activations of one bfloat16 matmul.
    assert 0 < relative_error(new, exact) < 0.01


def test_haiku_transform_without_state():
    network = hk.without_apply_rng(
        hk.transform(lambda x: hk.Linear(4)(jax.nn.softmax(hk.Linear(16)(x))))
    )
    params = network.init(jax.random.key(0), X)
    forward = autocast(network.apply, MIXED)
    assert set(operands(forward, params, X)) == {(BF16, BF16)}
    assert 0 < relative_error(forward(params, X), network.apply(params, X)) < 0.01


def test_haiku_rules_name_modules(haiku_variables):
    policies = PolicyMap(MIXED, [Rule("hidden", "c=f32")])
    gradients = jax.grad(autocast(haiku_loss, policies), has_aux=True)
    assert_fp32_in("hidden", trace(gradients, *haiku_variables), 3)


# ---------------------------------------------------------------------------
# Plain functions
# ---------------------------------------------------------------------------


def plain_params():
    return {"w1": floats(8, 16) / 3, "b1": jnp.zeros((1, 1, 16)), "w2": floats(16, 4, seed=2) / 4}


def plain_loss(params, x, y):
    """Loss with a hand-written RMS norm and softmax between matmuls."""
    x = jax.nn.gelu(x @ params["w1"] + params["b1"])
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    with jax.named_scope("head"):
        out = x @ params["w2"]
    weights = jnp.exp(out - out.max(-1, keepdims=True))
    return jnp.square(weights / weights.sum(-1, keepdims=True) - jax.nn.softmax(y)).sum(-1).mean()


@EXPENSIVE
@pytest.mark.parametrize("library", ["equinox", "haiku", "plain"])
def test_training(library, haiku_variables):
    def losses(transform):
        if library == "haiku":
            return transform(haiku_loss), *haiku_variables
        if library == "plain":
            loss_fn = transform(plain_loss)
            return lambda params, state: (loss_fn(params, X, Y), state), plain_params(), None
        loss_fn, (arrays, rest) = transform(encoder_loss), eqx.partition(encoder(), eqx.is_array)
        return lambda a, state: (loss_fn(eqx.combine(a, rest), X, Y), state), arrays, None

    low, exact = losses(lambda fn: autocast(fn, MIXED)), losses(lambda fn: fn)
    assert_trains_alike(trained_with_adam(*low), trained_with_adam(*exact))


@EXPENSIVE
def test_a_train_step_of_plain_functions_with_a_recipe():
    """Masters, loss scale and skipped steps work without an adapter for the loss."""
    recipe = jaxmp.load_recipe("fp16")
    params = plain_params()
    state = new_state(params, recipe, TX)

    @jax.jit
    def step(state):
        loss, grads = state.value_and_grad(autocast(plain_loss, recipe))(X, Y)
        return loss, state.apply_gradients(grads=grads)

    losses, state = trained(step, state)
    exact = trained_with_adam(lambda p, state: (plain_loss(p, X, Y), state), params, None)
    assert set(operands(lambda p: autocast(plain_loss, recipe)(p, X, Y), params)) == {
        ("float16", "float16")
    }
    assert jaxmp.get_skip_stats(state).total == 0
    assert_trains_alike((losses, state.params), exact)


def test_hand_written_norm_and_softmax_are_in_fp32():
    traced = trace(autocast(plain_loss, MIXED), plain_params(), X, Y)
    assert {dtypes(e)[0] for e in named(traced, "exp", "rsqrt", "reduce_sum", "sub")} == {F32}
    squares = [e for e in named(traced, "mul") if e.invars[0] is e.invars[1]]
    assert [dtypes(e)[0] for e in squares] == [F32]


def test_a_rule_that_matches_nothing_is_refused():
    misspelt = PolicyMap(MIXED, [Rule("haed", "c=f32")])
    with pytest.raises(RuleError, match=r"(?s)'haed'.*nearest paths: 'head'.*named_scope"):
        autocast(plain_loss, misspelt)(plain_params(), X, Y)
    optional = PolicyMap(MIXED, [Rule("haed", "c=f32", required=False)])
    assert set(operands(autocast(plain_loss, optional), plain_params(), X, Y)) == {(BF16, BF16)}


# ---------------------------------------------------------------------------
# diffrax
# ---------------------------------------------------------------------------


@EXPENSIVE
@pytest.mark.filterwarnings("ignore:No matmul of autocast:jaxmp.errors.RecipeWarning")
def test_the_gradient_of_an_implicit_diffrax_solve():
    """The backward pass repeats the solver in FP32, as in the forward pass; in 16 bits no step
    converges.

    The reference is a Runge-Kutta method of order 4 with a small step. The tolerance of 1e-3 in
    diffrax applies to one step, so both gradients agree to 1 %.
    """
    diffrax = pytest.importorskip("diffrax", reason="diffrax is not installed")
    y0, field = jnp.full(4, 0.3), lambda w, y: jnp.tanh(w @ y)

    def solve(w):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, w: field(w, y)),
            diffrax.Kvaerno3(),
            *(0.0, 1.0, 0.1, y0),
            args=w,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
            max_steps=16,
        )
        return jnp.square(solution.ys).sum()

    def reference(w):
        def step(y, _):
            h = 1 / 32
            k1 = field(w, y)
            k2 = field(w, y + h / 2 * k1)
            k3 = field(w, y + h / 2 * k2)
            k4 = field(w, y + h * k3)
            return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        return jnp.square(jax.lax.scan(step, y0, None, length=32)[0]).sum()

    w = floats(4, 4) / 2
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        gradient = jax.jit(autocast(jax.grad(solve), "fp16"))(w)
    assert relative_error(gradient, jax.grad(reference)(w)) < 0.01
