"""value_and_grad: loss scaling, microbatches, and several devices."""

import functools
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from grids import fast_cases
from jaxmp._core import _compat


def loss_fn(params, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["w1"])
    return jnp.mean(((hidden @ params["w2"]).astype(jnp.float32) - y) ** 2)


def make(key, dtype=jnp.float32, rows=8):
    k1, k2, k3, k4 = jax.random.split(key, 4)
    params = {
        "w1": jax.random.normal(k1, (5, 4), dtype),
        "w2": jax.random.normal(k2, (4, 2), dtype),
    }
    return params, (jax.random.normal(k3, (rows, 5), dtype), jax.random.normal(k4, (rows, 2)))


def assert_trees_close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


SCALES = [None, 1.0, 2.0**12, jaxmp.StaticLossScale(2.0**-3), jaxmp.DynamicLossScale()]


@pytest.mark.parametrize("loss_scale", SCALES)
def test_power_of_two_scales_change_no_bit_in_fp32(getkey, loss_scale):
    # Sums of small integers are exact in every order, which depends on the processor.
    params, batch = jax.tree.map(jnp.round, make(getkey()))

    def linear_loss(params, batch):
        return jnp.mean((batch[0] @ params["w1"] @ params["w2"] - batch[1]) ** 2)

    expected = jax.value_and_grad(linear_loss)(params, batch)
    actual = jaxmp.value_and_grad(linear_loss, loss_scale=loss_scale)(params, batch)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
    ("loss", "dtype"),
    [
        (lambda w: jnp.sum(w).astype(jnp.bfloat16), "float32"),
        (jnp.sum, "bfloat16"),
        # The result of a model that contains its loss is cast to FP32.
        (lambda w: 1 + jnp.sum(w.astype(jnp.bfloat16)).astype(jnp.float32) / 3, "float32"),
        (jax.jit(lambda w: jnp.sum(w).astype(jnp.bfloat16).astype(jnp.float32)), "float32"),
    ],
)
def test_a_rounded_loss_warns_once_at_the_line_of_the_user(loss, dtype):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            jaxmp.value_and_grad(loss)(jnp.ones(3, dtype))
    (warning,) = caught
    assert "it, is computed in bfloat16" in str(warning.message) and warning.filename == __file__


def test_scalar_parameters_in_16_bits_are_no_rounded_loss():
    def loss(params):
        weight = params["weight"].astype(jnp.bfloat16).astype(jnp.float32)
        for _ in range(64):
            weight = weight + 0.01 * weight
        return jnp.sum(params["w"]) * jnp.exp(-weight) + weight

    for dtype in (jnp.float32, jnp.bfloat16):
        jaxmp.value_and_grad(loss)({"w": jnp.ones(3), "weight": jnp.ones((), dtype)})


def test_underflowing_gradients_survive_with_the_scale_and_not_without():
    """The gradient 1e-8 is smaller than half of the smallest subnormal of float16, 2**-25."""
    tiny = lambda w: (w * jnp.float16(1.0)).astype(jnp.float32) * 1e-8
    w = jnp.float16(1.0)
    plain, scaled = jaxmp.grad(tiny)(w), jaxmp.grad(tiny, loss_scale=2.0**16)(w)
    assert plain == 0 and plain.dtype == scaled.dtype == jnp.float32
    np.testing.assert_allclose(scaled, 1e-8, rtol=1e-3)


def test_the_scaled_loss_is_never_formed():
    """A loss of 1e35 times 2**16 would overflow FP32; its gradient does not."""
    fn = lambda w: w * 1e35
    loss, grad = jaxmp.value_and_grad(fn, loss_scale=2.0**16)(jnp.float32(1.0))
    np.testing.assert_allclose(loss, 1e35)
    assert not np.isfinite(float(grad))  # the cotangent itself is 1e35 * 2**16
    loss, grad = jaxmp.value_and_grad(lambda w: w + 1e38, loss_scale=2.0**16)(jnp.float32(1.0))
    assert np.isfinite(loss) and float(grad) == 1.0


# ---------------------------------------------------------------------------
# Losses that are not finite
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize("loss_scale", [None, 2.0**8])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_loss_with_finite_gradients_poisons_the_gradients(loss_scale, bad, target):
    fn = lambda p, x: jnp.sum(p["w"] * 2.0) + p["b"] + jax.lax.stop_gradient(x)
    params = {"w": jnp.ones((3, 2)), "b": jnp.float32(0.0)}
    for run in (
        jaxmp.value_and_grad(fn, loss_scale=loss_scale),
        jax.jit(jaxmp.value_and_grad(fn, loss_scale=loss_scale)),
    ):
        with _compat.context(target=target):
            loss, grads = run(params, jnp.float32(bad))
        assert not np.isfinite(loss)
        assert all(np.all(np.isnan(g)) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("wrap", ["none", "chain", "partition"])
@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_one_nan_gradient_is_enough_for_the_guard(wrap, target):
    """The smallest parameter, whose gradient becomes NaN, may be frozen by the optimizer."""
    recipe = jaxmp.load_recipe("bf16")
    tx = recipe.optimizer(optax.sgd(0.1))
    if wrap == "chain":
        tx = optax.chain(optax.clip(1.0), tx)
    if wrap == "partition":
        frozen = {"trained": tx, "frozen": optax.set_to_zero()}
        tx = optax.partition(frozen, {"w": "trained", "b": "frozen"})
    params = {"w": jnp.ones((3, 2)), "b": jnp.float32(0.0)}
    state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
    fn = lambda p, x: jnp.sum(p["w"] * 2.0) + p["b"] + jax.lax.stop_gradient(x)

    @jax.jit
    def step(state, x):
        _, grads = state.value_and_grad(fn)(x)
        return state.apply_gradients(grads=grads), grads

    with _compat.context(target=target):
        skipped, grads = step(state, jnp.float32(np.inf))
        applied, _ = step(skipped, jnp.float32(1.0))
    assert np.isnan(grads["b"]) and np.isnan(grads["w"]).any() == (target == "cpu")
    jax.tree.map(np.testing.assert_array_equal, skipped.params, params)
    assert int(skipped.step) == 0 and int(applied.step) == 1


@pytest.mark.parametrize("loss_scale", [None, 2.0**8])
def test_a_where_that_stops_the_nan_does_not_hide_the_bad_loss(loss_scale):
    """The gradient passes through a mask that is False everywhere, where NaN becomes zero."""
    fn = lambda w, x: jnp.where(x > 0, w, 0.0) + jax.lax.stop_gradient(x)
    grad = jaxmp.grad(fn, loss_scale=loss_scale)(jnp.float32(1.0), jnp.float32(-np.inf))
    assert np.isnan(float(grad))


# ---------------------------------------------------------------------------
# Signature
# ---------------------------------------------------------------------------

ONE = jnp.float32(1)
WEIGHTED = {"weighted": True}


def test_aux_argnums_and_keywords(getkey):
    fn = lambda a, b, *, c: (jnp.sum(a * b) * c, {"seen": b})
    a, b = jnp.arange(3.0), jnp.arange(3.0) + 1
    (loss, aux), (da, db) = jaxmp.value_and_grad(fn, has_aux=True, argnums=(0, 1))(a, b, c=2.0)
    np.testing.assert_allclose(loss, 16.0)
    np.testing.assert_array_equal(aux["seen"], b)
    np.testing.assert_array_equal(da, 2 * b)
    np.testing.assert_array_equal(db, 2 * a)
    grads, aux = jaxmp.grad(fn, has_aux=True, argnums=1)(a, b, c=2.0)
    np.testing.assert_array_equal(grads, 2 * a)


def test_complex_gradients_keep_their_imaginary_part():
    fn = lambda z: jnp.real(z * jnp.conj(z))
    grad = jaxmp.grad(fn, loss_scale=2.0**10)(jnp.complex64(3 + 4j))
    np.testing.assert_allclose(grad, jax.grad(fn)(jnp.complex64(3 + 4j)))
    assert grad.dtype == jnp.complex64


@pytest.mark.parametrize("transform", [jaxmp.grad, jaxmp.value_and_grad])
@pytest.mark.parametrize(
    ("options", "fn", "argument", "message"),
    [
        ({}, lambda w: w, jnp.ones(3), r"shape \(3,\).*jnp.mean\(loss"),
        ({}, lambda w: (w, w, w), ONE, "tuple of 3.*has_aux=True"),
        ({}, lambda w: (w, {"aux": 1}), ONE, "has_aux=True"),
        ({}, lambda w: (w, w / 2), ONE, "fn, has_aux=True.*fn, weighted=True"),
        ({}, lambda w: "loss", ONE, "'loss'"),
        ({}, lambda w: jnp.int32(3), ONE, "int32"),
        ({}, lambda w: ONE, {"n": jnp.arange(3)}, r"\['n'\] is int32"),
        (WEIGHTED, lambda w: w, ONE, r"return \(loss_sum, weight\)"),
        (WEIGHTED, lambda w: (w, w, w), ONE, "tuple of 3"),
        (WEIGHTED, lambda w: (w, {"aux": 1}), ONE, "weight is"),
        (WEIGHTED | {"has_aux": True}, lambda w: (w, w), ONE, r"\(\(loss_sum, weight\), aux\)"),
        ({"has_aux": True}, lambda w: ((w, w), None), ONE, "fn, has_aux=True, weighted=True"),
        ({"has_aux": True}, lambda w: w, ONE, r"return \(loss, aux\)"),
        ({"argnums": 2}, lambda w: w, ONE, "argnums names argument 2"),
        ({"argnums": (0, -1)}, lambda w: w, ONE, "twice"),
        ({"microbatches": 0}, lambda w: w, ONE, "microbatches=0"),
        (
            {"microbatches": 2, "batch_argnums": 0},
            lambda w: w,
            ONE,
            "both differentiated and split",
        ),
        ({"accumulate_dtype": "float8_e4m3fn"}, lambda w: w, ONE, "16 bits or more"),
    ],
)
def test_mistakes_are_explained(options, fn, argument, message, transform):
    with pytest.raises(jaxmp.JaxmpError, match=message):
        transform(fn, **options)(argument)


def test_arguments_stand_in_the_order_of_jax():
    product = lambda a, b: a**2 * b
    args = jnp.float32(2.0), jnp.float32(3.0)
    for argnums in (0, 1, -1, (0, 1), (1,)):
        assert jaxmp.grad(product, argnums)(*args) == jax.grad(product, argnums)(*args)
        expected = jax.value_and_grad(product, argnums)(*args)
        assert jaxmp.value_and_grad(product, argnums)(*args) == expected
    with_aux = lambda a, b: (a * b, a)
    assert jaxmp.grad(with_aux, 1, True)(*args) == jax.grad(with_aux, 1, True)(*args)
    expected = jax.value_and_grad(with_aux, 1, True)(*args)
    assert jaxmp.value_and_grad(with_aux, 1, True)(*args) == expected


@pytest.mark.parametrize("transform", [jaxmp.grad, jaxmp.value_and_grad])
@pytest.mark.parametrize(
    "loss_scale",
    [2.0**10, jnp.float32(8), jaxmp.NoLossScale(), jaxmp.DynamicLossScale(), True, None, (0, 2.0)],
)
def test_a_loss_scale_given_by_position_is_refused(transform, loss_scale):
    with pytest.raises(jaxmp.JaxmpError, match=r"argnums=.*value_and_grad\(fn, loss_scale="):
        transform(lambda w: w, loss_scale)


# ---------------------------------------------------------------------------
# Microbatches
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("loss_scale", [None, 2.0**10])
def test_microbatches_give_the_whole_batch_gradient(getkey, loss_scale):
    params, batch = make(getkey())
    expected = jax.value_and_grad(loss_fn)(params, batch)
    actual = jax.jit(jaxmp.value_and_grad(loss_fn, loss_scale=loss_scale, microbatches=4))(
        params, batch
    )
    # Four partial means against one: FP32 summation order, a few ulp.
    assert_trees_close(actual, expected, rtol=2e-6, atol=1e-7)


def test_sixteen_bit_gradients_are_accumulated_in_fp32():
    """With 256 microbatches of gradient 1, a bfloat16 sum would stop growing at 256."""
    grad = jaxmp.grad(lambda w, x: jnp.sum(w.astype(jnp.float32) * x), microbatches=512)
    w = jnp.bfloat16(1.0)
    x = jnp.where(jnp.arange(512) < 256, 1.0, 2.0**-9)
    exact = (256 + 256 * 2.0**-9) / 512
    assert float(grad(w, x)) == exact
    half = jaxmp.grad(
        lambda w, x: jnp.sum(w.astype(jnp.float32) * x), microbatches=512, accumulate_dtype="bf16"
    )
    assert float(half(w, x)) == 0.5


def test_sum_and_weight_average_over_all_microbatches(getkey):
    params, (x, y) = make(getkey())
    mask = jnp.array([1, 1, 1, 0, 0, 0, 1, 0], jnp.float32)

    def masked(params, batch):
        x, y, mask = batch
        error = jnp.sum((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2, -1)
        return jnp.sum(error * mask), jnp.sum(mask)

    whole = lambda p: (lambda total, count: total / count)(*masked(p, (x, y, mask)))
    expected = jax.value_and_grad(whole)(params)
    for count in (1, 4):
        actual = jaxmp.value_and_grad(masked, weighted=True, loss_scale=2.0**6, microbatches=count)(
            params, (x, y, mask)
        )
        assert_trees_close(actual, expected, rtol=2e-6, atol=1e-7)
    with_aux = lambda p, b: (masked(p, b), jnp.sum(b[2]))
    (loss, aux), _ = jaxmp.value_and_grad(with_aux, has_aux=True, weighted=True, microbatches=4)(
        params, (x, y, mask)
    )
    np.testing.assert_allclose(loss, expected[0], rtol=2e-6)
    np.testing.assert_array_equal(aux, [2, 1, 0, 1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_constants_in_aux_have_the_types_that_jax_returns_outside_of_jit(dtype):
    """A literal of a jaxpr is a Python number, and an array of strings is no result of one."""

    def fn(w):
        aux = jnp.asarray(1), jnp.asarray(True), jnp.float32(2), np.arange(2), np.array(["a"])
        return jnp.sum((w.astype(dtype) ** 2).astype(jnp.float32)), aux

    described = []
    for value_and_grad in (jax.value_and_grad, jaxmp.value_and_grad):
        (_, aux), _ = value_and_grad(fn, has_aux=True)(jnp.ones(2))
        described.append([(type(x), x.dtype, getattr(x, "weak_type", None)) for x in aux])
    assert described[0] == described[1]


def test_aux_is_stacked_and_keys_are_folded():
    def fn(w, x, key):
        return jnp.sum(w * x), jax.random.key_data(key)

    key = jax.random.key(5)
    run = jaxmp.value_and_grad(fn, has_aux=True, microbatches=2, rng_argnums=2)
    (_, keys), _ = run(jnp.float32(1), jnp.ones((4, 3)), key)
    folded = [jax.random.key_data(jax.random.fold_in(key, i)) for i in range(2)]
    np.testing.assert_array_equal(keys, jnp.stack(folded))


def test_mutables_are_threaded():
    def fn(w, x, state):
        return jnp.sum(w * x), (
            {"count": state["count"] + 1, "sum": state["sum"] + jnp.sum(x)},
            x[0],
        )

    start = {"count": jnp.int32(0), "sum": jnp.float32(0)}
    x = jnp.arange(6.0)
    for count in (1, 3):
        run = jax.jit(jaxmp.value_and_grad(fn, microbatches=count, mutable_argnum=2))
        (_, (state, aux)), _ = run(jnp.float32(1), x, start)
        assert int(state["count"]) == count and float(state["sum"]) == 15.0
    np.testing.assert_array_equal(aux, [0.0, 2.0, 4.0])


def test_batches_that_do_not_split_are_refused(getkey):
    params, (x, y) = make(getkey(), rows=6)
    with pytest.raises(jaxmp.JaxmpError, match=r"Argument 1\['0'\] has 6 rows.*4 microbatches"):
        jaxmp.grad(loss_fn, microbatches=4)(params, (x, y))
    with pytest.raises(jaxmp.JaxmpError, match="nothing to split"):
        run = jaxmp.grad(lambda w, x: w * x, microbatches=4, batch_argnums=1)
        run(jnp.float32(1), jnp.float32(1))
    with pytest.raises(jaxmp.JaxmpError, match=r"batch_argnums names argument 2.* by position"):
        jaxmp.grad(lambda w, x: w, microbatches=4, batch_argnums=2)(jnp.float32(1), jnp.ones(4))


def test_arguments_that_are_not_split_are_handed_to_every_part():
    fn = lambda w, batch, mode: jnp.sum(w * batch["x"]) * batch["scale"] * {"train": 2.0}[mode]
    batch = {"x": jnp.arange(4.0), "scale": jnp.float32(3.0)}
    np.testing.assert_allclose(jaxmp.grad(fn, microbatches=2)(ONE, batch, "train"), 18.0)


# ---------------------------------------------------------------------------
# The arguments of the batch
# ---------------------------------------------------------------------------

ROWS = 4
# Four rows, as many as the batch has: the differentiated argument is not considered.
VECTOR = {"w": jnp.linspace(-1.0, 1.0, ROWS)}
X = jnp.arange(16.0).reshape(ROWS, 4) / 16
Y = jnp.cos(jnp.arange(4.0))
MASK = jnp.array([1.0, 0.0, 1.0, 1.0])
TARGET = {"w": jnp.ones(4), "v": jnp.ones(2)}
STATS = {"mean": jnp.zeros(4)}


def errors(params, x, y):
    return (x @ params["w"] - y) ** 2


def with_key(params, batch, key):
    return jnp.mean(errors(params, *batch)) + jax.random.uniform(key) * 0


def with_mask(params, x, y, mask):
    return jnp.sum(errors(params, x, y) * mask), jnp.sum(mask)


def with_target(params, target, x, y):
    return jnp.mean(errors(params, x, y) + (x @ target["w"]) * params["w"].sum())


def with_stats(params, stats, x, y):
    return jnp.mean(errors(params, x, y)), ({"mean": stats["mean"] + jnp.sum(x, 0)}, None)


def keyword(params, x, *, y):
    return jnp.mean(errors(params, x, y))


def with_other_rows(params, batch, other):
    return jnp.mean(errors(params, *batch)) * other.sum()


# Loss -> arguments, keyword arguments, options, and the numbers that an error names.
SIGNATURES = {
    "batch": (lambda p, b: jnp.mean(errors(p, *b)), ((X, Y),), {}, {}, None),
    "x, y": (lambda p, x, y: jnp.mean(errors(p, x, y)), (X, Y), {}, {}, (1, 2)),
    "target, x, y": (with_target, (TARGET, X, Y), {}, {}, (2, 3)),
    "copy, x, y": (with_target, ({"w": jnp.ones(4)}, X, Y), {}, {}, (2, 3)),
    "key": (with_key, ((X, Y), jax.random.key(0)), {}, {"rng_argnums": 2}, None),
    "raw key": (with_key, ((X[:2], Y[:2]), jax.random.PRNGKey(0)), {}, {}, None),
    "key, batch": (lambda p, k, b: with_key(p, b, k), (jax.random.key(0), (X, Y)), {}, {}, 2),
    "x, y, mask": (with_mask, (X, Y, MASK), {}, {"weighted": True}, (1, 2, 3)),
    "stats, x, y": (with_stats, (STATS, X, Y), {}, {"mutable_argnum": 1}, (2, 3)),
    "y by keyword": (keyword, (X,), {"y": Y}, {}, (1, 2)),
    "other rows": (with_other_rows, ((X, Y), Y[:3]), {}, {}, None),
    "unequal rows": (lambda p, b: jnp.mean(errors(p, *b[:2])), ((X, Y, Y[:3]),), {}, {}, 1),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_batch_that_is_not_certain_is_refused_with_the_arguments_to_name(name):
    loss, args, kwargs, options, numbers = SIGNATURES[name]
    called = []
    fn = lambda *args, **kwargs: called.append(None) or loss(*args, **kwargs)
    expected = jaxmp.value_and_grad(fn, **options)(VECTOR, *args, **kwargs)
    for parts in (2, ROWS) if name != "raw key" else (2,):
        split = options
        if numbers is not None:
            called.clear()
            message = rf"microbatches={parts}, batch_argnums={re.escape(str(numbers))}\)"
            with pytest.raises(jaxmp.JaxmpError, match=message):
                jaxmp.value_and_grad(fn, microbatches=parts, **options)(VECTOR, *args, **kwargs)
            assert not called
            split = {**options, "batch_argnums": numbers}
        if name in ("unequal rows", "y by keyword"):  # The call also has to change.
            continue
        actual = jaxmp.value_and_grad(fn, microbatches=parts, **split)(VECTOR, *args, **kwargs)
        assert_trees_close(actual, expected, rtol=2e-6, atol=1e-6)


# ---------------------------------------------------------------------------
# State that is overwritten by its gradient
# ---------------------------------------------------------------------------


@jax.custom_vjp
def observe(x, history):
    return x


observe.defvjp(
    lambda x, history: (x, jnp.max(jnp.abs(x))),
    lambda amax, cotangent: (cotangent, jnp.stack([amax, jnp.float32(0.5)])),
)


def with_history(variables, x):
    x = observe(x, variables["_overwrite_with_gradient"]["amax"])
    return jnp.mean(x * variables["params"]["w"])


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("loss_scale", [None, 2.0**10])
def test_overwritten_state_is_neither_unscaled_nor_averaged(microbatches, loss_scale):
    variables = {
        "params": {"w": jnp.float32(2.0)},
        "_overwrite_with_gradient": {"amax": jnp.zeros(2)},
    }
    x = jnp.array([1.0, -7.0, 3.0, 2.0])
    grads = jaxmp.grad(with_history, loss_scale=loss_scale, microbatches=microbatches)(variables, x)
    np.testing.assert_array_equal(grads["_overwrite_with_gradient"]["amax"], [7.0, 0.5])
    np.testing.assert_allclose(grads["params"]["w"], jnp.mean(x), rtol=1e-6)


# ---------------------------------------------------------------------------
# Devices
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2])
def test_vmap_averages_once(getkey, microbatches):
    params, batch = make(getkey())
    expected = jax.value_and_grad(loss_fn)(params, batch)
    run = jaxmp.value_and_grad(loss_fn, loss_scale=2.0**6, axis_name="d", microbatches=microbatches)
    split = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), batch)
    loss, grads = jax.vmap(run, (None, 0), axis_name="d")(params, split)
    first = lambda tree: jax.tree.map(lambda x: x[0], tree)
    assert_trees_close((loss[0], first(grads)), expected, rtol=2e-6, atol=1e-7)
    bad = split[0], split[1].at[0, 0].set(jnp.inf)  # on one of the devices
    _, grads = jax.vmap(run, (None, 0), axis_name="d")(params, bad)
    assert not any(jnp.isfinite(grad).any() for grad in jax.tree.leaves(grads))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_shard_map_averages_once_and_in_fp32(getkey, microbatches):
    """JAX would sum the gradient of a replicated parameter over the mesh in bfloat16."""
    params, batch = make(getkey())
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",), axis_types=(AxisType.Auto,))

    def half_loss(params, batch):
        x, y = batch
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return loss_fn(half, (x.astype(jnp.bfloat16), y))

    run = jaxmp.value_and_grad(
        half_loss, loss_scale=2.0**6, axis_name="d", microbatches=microbatches
    )
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    loss, grads = jax.jit(sharded)(params, batch)
    expected = jax.value_and_grad(half_loss)(params, batch)
    # bfloat16 products of different row counts: 2**-8 relative, a few of them.
    assert_trees_close((loss, grads), expected, rtol=3e-2, atol=3e-3)
    reductions = re.findall(
        r"(\w+)\[[\d,]*\][^=]*= psum", str(jax.make_jaxpr(sharded)(params, batch))
    )
    assert reductions and set(reductions) == {"f32"}


@pytest.mark.parametrize(("microbatches", "check_vma"), [(1, True), (2, False)])
def test_gradients_of_gathered_parts_are_sums_over_devices_already(getkey, microbatches, check_vma):
    """In FSDP by hand, each device has other rows of a weight, and a copy of smaller parameters."""
    params, batch = make(getkey())
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",), axis_types=(AxisType.Auto,))
    specs = jax.tree.map(lambda p: P() if p.shape[0] % 2 else P("d"), params)
    assert {P(), P("d")} == set(jax.tree.leaves(specs))

    @jax.checkpoint
    def fn(params, batch):
        gather = lambda p, spec: jax.lax.all_gather(p, "d", tiled=True) if any(spec) else p
        return loss_fn(jax.tree.map(gather, params, specs), batch)

    run = jaxmp.value_and_grad(fn, loss_scale=2.0**6, axis_name="d", microbatches=microbatches)
    options = {"in_specs": (specs, P("d")), "out_specs": (P(), specs), "check_vma": check_vma}
    result = jax.jit(jax.shard_map(run, mesh=mesh, **options))(params, batch)
    assert_trees_close(result, jax.value_and_grad(loss_fn)(params, batch), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_scale_that_devices_share_is_no_part_although_its_rows_are_gathered(getkey, check_vma):
    x, scale = jax.random.normal(getkey(), (8, 16)), jnp.linspace(1.0, 2.0, 64).reshape(4, 16)
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",), axis_types=(AxisType.Auto,))

    def fn(scale, x):
        return jnp.sum(jnp.tanh(jax.lax.all_gather(x * scale, "d", tiled=True)) ** 2)

    run = jaxmp.grad(fn, axis_name="d")
    options = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": check_vma}
    found = jax.jit(jax.shard_map(run, mesh=mesh, **options))(scale, x)
    expected = jax.grad(lambda scale: jnp.sum(jnp.tanh(x * jnp.tile(scale, (2, 1))) ** 2))(scale)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7)


def test_a_function_without_parameters_has_a_loss_and_no_gradients():
    loss, grads = jaxmp.value_and_grad(lambda params, x: x.sum(), loss_scale=8.0)({}, jnp.ones(3))
    assert loss == 3 and grads == {}


def mean_of_devices(params, batch):
    return jax.lax.pmean(loss_fn(params, batch), "d")


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("fn", [loss_fn, mean_of_devices])
def test_shard_map_returns_gradients_that_jax_sums_over_devices(getkey, fn, microbatches):
    """Without `axis_name`, `shard_map` knows which results have one value, as for `jax.grad`."""
    params, batch = make(getkey())
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",), axis_types=(AxisType.Auto,))

    def run(value_and_grad):
        def step(params, batch):
            loss, grads = value_and_grad(params, batch)
            return (loss if fn is mean_of_devices else jax.lax.pmean(loss, "d")), grads

        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
        return jax.jit(mapped)(params, batch)

    expected = run(jax.value_and_grad(fn))
    for guarded in (False, True):
        options = {"loss_scale": 2.0**6, "guarded": guarded, "microbatches": microbatches}
        assert_trees_close(run(jaxmp.value_and_grad(fn, **options)), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_one_bad_device_poisons_the_gradients_that_jax_sums(getkey, target, microbatches):
    """Otherwise one device alone skips the step, and parameters differ between devices."""
    params, (x, y) = make(getkey())
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",), axis_types=(AxisType.Auto,))

    def fn(params, batch):
        return loss_fn(params, (jnp.where(jnp.isfinite(batch[0]), batch[0], 0.0), batch[1])) + (
            jax.lax.stop_gradient(batch[0]).sum()
        )

    run = jaxmp.value_and_grad(fn, microbatches=microbatches)
    grads_of = lambda params, batch: jax.tree.map(lambda g: g[None], run(params, batch)[1])
    sharded = jax.shard_map(grads_of, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    with _compat.context(target=target):
        grads = jax.jit(sharded)(params, (x.at[0, 0].set(jnp.inf), y))
    poisoned = [np.isnan(g).any(axis=(1, 2)) for g in jax.tree.leaves(grads)]
    assert np.any(poisoned, axis=0).all()


def test_an_empty_parameter_does_not_swallow_the_poison():
    fn = lambda p: jnp.where(jnp.array(False), p["w"].sum(), jnp.nan)
    grads = jaxmp.grad(fn)({"w": jnp.ones(3), "empty": jnp.zeros((0, 3))})
    assert not bool(jaxmp._core._trees.all_finite(grads))


def test_interleaved_microbatches_take_every_kth_row(getkey):
    params, batch = make(getkey())
    rows = jnp.arange(8.0)
    fn = lambda p, b: (loss_fn(p, b[0]), b[1])
    run = jaxmp.value_and_grad(fn, has_aux=True, microbatches=4, interleave=True)
    (loss, seen), grads = run(params, (batch, rows))
    np.testing.assert_array_equal(seen, rows.reshape(2, 4).T)
    assert_trees_close(
        (loss, grads), jax.value_and_grad(loss_fn)(params, batch), rtol=2e-6, atol=1e-7
    )


@pytest.mark.parametrize("microbatches", [1, 2])
def test_meshes_with_explicit_axes(getkey, microbatches):
    params, batch = make(getkey())
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(batch, jax.NamedSharding(mesh, P("d")))
        params = {**params, "w2": jax.device_put(params["w2"], jax.NamedSharding(mesh, P("d")))}
        fn = lambda p, b: jnp.mean(jnp.square(jnp.tanh(b[0] @ p["w1"])))
        run = jaxmp.value_and_grad(fn, microbatches=microbatches, interleave=True)
        loss, grads = jax.jit(run)(params, sharded)
    expected = jax.value_and_grad(fn)(jax.device_get(params), jax.device_get(batch))
    assert_trees_close((loss, grads), expected, rtol=2e-6, atol=1e-7)


class Sized(eqx.Module):
    """A network with its width, a number that is not a parameter."""

    hidden: int
    mlp: eqx.nn.MLP

    def __call__(self, x):
        return self.mlp(x)


@pytest.mark.parametrize("leaf", ["activation.*not an array", "hidden.* is int"])
def test_a_leaf_that_is_no_parameter_is_named_with_the_way_to_split_it_off(leaf):
    model = eqx.nn.MLP(2, "scalar", 4, depth=1, key=jax.random.key(0))
    model = Sized(4, model) if "hidden" in leaf else model
    x = jnp.ones(2)

    def loss_fn(model):
        return model(x) ** 2

    with pytest.raises(jaxmp.JaxmpError, match=f"Argument 0.*{leaf}") as raised:
        jaxmp.value_and_grad(loss_fn)(model)
    assert "eqx.partition(model, eqx.is_inexact_array)" in str(raised.value)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss, grads = jaxmp.value_and_grad(lambda params: loss_fn(eqx.combine(params, static)))(params)
    expected = eqx.filter_value_and_grad(loss_fn)(model)
    assert loss == expected[0]
    jax.tree.map(np.testing.assert_array_equal, grads, expected[1])


@pytest.mark.parametrize(
    ("weight", "is_finite"),
    [
        (lambda w: jax.checkpoint(lambda w: w * 0.5)(w.astype(jnp.float16)), True),
        (lambda w: jnp.tanh(w.astype(jnp.float16)), True),
        (lambda w: jax.nn.softplus(jnp.maximum(w.astype(jnp.float16), 0.5) ** 3), True),
        (lambda w: _standardized(w.astype(jnp.float16)), True),
        (lambda w: w.astype(jnp.float16) @ w.astype(jnp.float16), False),
        (lambda w: (w @ w).astype(jnp.float16), True),  # as docs/recipes.md advises
    ],
)
def test_one_device_sums_float16_gradients_in_the_range_of_several(weight, is_finite):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, P("data"))
    replicated = jax.sharding.NamedSharding(mesh, P())
    x, w = jnp.ones((16, 8)), jnp.ones((8, 8))
    loss = lambda w, x: (x.astype(jnp.float16) @ weight(w)).astype(jnp.float32).sum() * 2.0**15
    grad = jax.jit(jaxmp.grad(loss))
    one, two = grad(w, x), grad(*jax.device_put((w, x), (replicated, sharding)))
    np.testing.assert_array_equal(one, two)
    assert np.isfinite(one).all() == is_finite
    messages = [f.message for f in jaxmp.audit(grad, w, x).warnings if f.check == "float16_range"]
    assert any("gradient of a product of weights" in text for text in messages) != is_finite


def _standardized(weight):
    """Returns a weight minus its mean, with the lengths of its columns as 1."""
    weight = weight - weight.mean(0, keepdims=True)
    return weight / jnp.sqrt(1 + jnp.sum(jnp.square(weight), 0, keepdims=True))


# ---------------------------------------------------------------------------
# Gradients and loops inside a loss
# ---------------------------------------------------------------------------


def net(params, x, dtype):
    x, w, v = (array.astype(dtype) for array in (x, params["w"], params["v"]))
    return (jnp.tanh(x @ w) @ v).astype(jnp.float32)


def penalty(params, x, dtype, loss_scale=None):
    """Loss with the gradient of small activations, which underflow in float16 without a scale."""
    inner = lambda x: net(params, x, dtype).mean() * 1e-5
    slope = jaxmp.grad(inner, loss_scale=loss_scale)(x)
    return jnp.square(slope * 1e5).mean()


def adapted(params, x, dtype, loss_scale=None):
    """Loss after two steps of gradient descent with a learned step size."""
    loss = lambda params: jnp.square(net(params, x, dtype) - 1).mean()
    inner = {"w": params["w"], "v": params["v"]}
    for _ in range(2):
        grads = jaxmp.grad(loss, loss_scale=loss_scale)(inner)
        inner = jax.tree.map(lambda p, g: p - params["rate"] * g, inner, grads)
    return loss(inner)


@pytest.mark.parametrize("fn", [penalty, adapted])
@pytest.mark.parametrize("outer", [jax.grad, jaxmp.grad, jax.jacfwd])
@fast_cases("grad0-adapted", "grad1-penalty")
def test_gradients_in_a_loss_are_differentiated_again(outer, fn, getkey):
    params = {
        "w": jax.random.normal(getkey(), (8, 8)) / 3,
        "v": jax.random.normal(getkey(), (8, 2)) / 3,
        "rate": jnp.float32(0.1),
    }
    x = jax.random.normal(getkey(), (4, 8))
    expected = jax.jit(jax.grad(lambda p: fn(p, x, jnp.float32)))(params)
    differentiated = outer(lambda p: fn(p, x, jnp.float16, 2.0**10))
    result = jax.jit(differentiated)(params)
    for full, low in zip(jax.tree.leaves(expected), jax.tree.leaves(result), strict=True):
        assert jnp.linalg.norm(full - low) <= 5e-3 * jnp.linalg.norm(full)
    # That of an FP32 weight gradient multiplies in 16 bits, too.
    assert set(jaxmp.audit(differentiated, params).matmul_flops) == {("float16", "float16")}


@pytest.mark.parametrize("differentiate", [jax.grad, jaxmp.grad])
def test_a_state_that_is_made_in_a_loss_is_named(differentiate):
    recipe = jaxmp.load_recipe("fp16")
    params = {"w": jnp.ones(2)}

    def outer(params, recipe=recipe):
        tx = recipe.optimizer(optax.sgd(0.1))
        state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
        return jnp.sum(state.apply_gradients(grads=params).params["w"])

    with pytest.warns(jaxmp.errors.RecipeWarning, match="inside of a loss") as warned:
        differentiate(outer)(params)
    assert [warning.filename for warning in warned] == [__file__]
    outer(params)  # no gradient
    differentiate(functools.partial(outer, recipe=jaxmp.load_recipe("bf16")))(params)


def test_a_library_that_takes_the_gradient_itself_trains_in_float16_with_a_fixed_scale():
    def fit(tx, loss, params):  # the library
        updates, opt_state = tx.update(jax.grad(loss)(params), tx.init(params), params)
        return optax.apply_updates(params, updates), opt_state

    recipe = jaxmp.load_recipe("fp16").replace(loss_scale=None)
    x = jnp.full((1, 2), 1e-5)
    loss = lambda w: jnp.square(x.astype(jnp.float16) @ w.astype(jnp.float16)).mean()
    scaled = lambda w: jaxmp.StaticLossScale(2.0**10).scale(loss(w))
    inner = optax.chain(optax.scale(2.0**-10), optax.sgd(1.0))
    expected = jax.grad(lambda w: jnp.square(x @ w).mean())(jnp.ones((2, 1)))
    params, state = fit(recipe.optimizer(inner), scaled, jnp.ones((2, 1)))
    np.testing.assert_allclose(1 - params, expected, atol=1e-7)
    overflowing = lambda w: scaled(w) * jnp.inf
    params, state = fit(recipe.optimizer(inner), overflowing, jnp.ones((2, 1)))
    assert jaxmp.get_skip_stats(state).total == 1 and (params == 1).all()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("form", ["jit", "shard_map"])
def test_microbatches_of_sharded_rows_have_the_gradients_of_the_batch(axis_type, form):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 4)).astype(np.float32)
    w = rng.normal(size=(4, 4)).astype(np.float32)
    loss_fn = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    expected = jax.value_and_grad(loss_fn)(w, x)
    on_mesh = jax.device_put(x, NamedSharding(mesh, P("data")))
    whole = jax.device_put(w, NamedSharding(mesh, P()))
    if form == "jit":
        run = jaxmp.value_and_grad(loss_fn, microbatches=4)
    else:
        run = jaxmp.value_and_grad(loss_fn, microbatches=4, axis_name="data")
        run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with jax.set_mesh(mesh):
        loss, grads = jax.jit(run)(whole, on_mesh)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(grads, expected[1], rtol=1e-5)
