"""The audit of training steps: masters, loss scales, accumulators, reductions, and their fixes."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
from findings import the_only
from jaxmp import audit
from jaxmp._tools.report._section import fix_parts
from programs import with_own_gradient
from relaxed import relaxed
from training_steps import new_state, state_step

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
W = jax.ShapeDtypeStruct((64, 64), F32)
X = jax.ShapeDtypeStruct((16, 64), F32)
SCALAR = jax.ShapeDtypeStruct((), F32)
BATCHES = jax.ShapeDtypeStruct((4, 16, 64), F32)


# optax and the tested mistakes promote implicitly.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def half(spec, dtype=BF16):
    return jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, dtype), spec)


def loss(w, x, dtype=BF16, around=lambda f: f):
    product = around(lambda w, x: x.astype(dtype) @ w.astype(dtype))
    return jnp.mean(product(w, x).astype(F32) ** 2)


def scanned(fn):
    """Returns the function inside a loop of one iteration."""
    return lambda w, x: lax.scan(lambda _, __: (fn(w, x), None), fn(w, x), length=1)[0]


AROUND = [lambda f: f, jax.jit, jax.checkpoint, scanned, with_own_gradient]


def test_the_forward_pass_of_an_initialization_is_not_checked():
    """The compiler removes it from a function that also trains."""
    model = jaxmp.load_recipe("bf16").wrap(nn.Dense(8))

    def train(key, x):
        loss = lambda params: jnp.square(model.apply(params, x)).mean()
        return jax.grad(loss)(model.init(key, x))

    assert audit(train, jax.random.key(0), X, recipe="bf16").findings == ()


def test_a_callback_without_results_beside_a_product_with_a_vector():
    def fn(w, x):
        jax.debug.print("{}", x[0, 0])
        return jnp.log(x @ w)

    report = audit(fn, jax.ShapeDtypeStruct((64, 1), F32), X, recipe="bf16")
    assert the_only(report.errors, "fp32_matmul").count == 1


def code_of(finding):
    """Returns the first code that a finding suggests."""
    return next(text for is_code, text in fix_parts(finding.fix) if is_code)


def counts(step, *args, **options):
    report = audit(step, *args, **options)
    assert all(finding.message and finding.fix for finding in report.errors)
    return report.counts()


# ---------------------------------------------------------------------------
# Masters
# ---------------------------------------------------------------------------


def sgd(w, x, **options):
    return w - (0.1 * jax.grad(loss)(w, x, **options)).astype(w.dtype)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_16_bit_parameters_without_masters(around, wrap):
    step = wrap(functools.partial(sgd, around=around))
    assert counts(step, half(W), X) == {"missing_master": 1}
    assert counts(step, W, X) == {}


def test_16_bit_parameters_that_are_perturbed():
    """As of sharpness-aware minimization, or in the inner step of a meta-gradient."""

    def sam(w, x):
        grads = jax.grad(loss)(w, x)
        nearby = w + (0.05 * grads / jnp.linalg.norm(grads.astype(F32))).astype(w.dtype)
        return jax.grad(loss)(nearby, x).astype(F32)

    def muon(momentum, w, x):
        momentum += jax.grad(loss)(w, x)
        x = momentum.astype(BF16)
        return momentum, w - 3.5 * x + (x @ x.T - 4.8 * x) @ x

    assert audit(sam, W, X).findings == audit(muon, W, W, X).findings == ()
    for step, w in ((sam, half(W)), (lambda w, x: sam(w.astype(BF16), x), W)):
        (finding,) = audit(step, w, X).findings
        assert (finding.check, finding.severity) == ("missing_master", "warning")


def test_gradients_alone_update_nothing():
    for dtype in (BF16, F16):
        grads = lambda w, x, dtype=dtype: jax.grad(loss)(w, x, dtype)
        regularised = lambda w, x, dtype=dtype: grads(w, x, dtype) + (0.1 * w).astype(dtype)
        for step in (grads, jax.jit(grads), regularised):
            assert counts(step, half(W, dtype), X) == {}


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(1e-3),
        optax.chain(optax.clip(1.0), optax.lion(1e-4)),
    ],
)
@pytest.mark.parametrize("recipe", [None, "bf16_params"])
def test_optax_without_masters(tx, recipe):
    step, params = functools.partial(optax_step, tx=tx), {"w": half(W)}
    report = audit(step, params, jax.eval_shape(tx.init, params), X, recipe=recipe)
    finding = the_only(report.errors, "missing_master")
    assert "['w']" in finding.message and finding.file == __file__
    assert "optimizer(tx)" in finding.fix
    wide = {"w": W}
    assert counts(step, wide, jax.eval_shape(tx.init, wide), X) == {}


def optax_step(params, state, x, tx):
    updates, state = tx.update(jaxmp.grad(lambda p: loss(p["w"], x))(params), state, params)
    return optax.apply_updates(params, updates), state


def test_the_printed_recipe_keeps_masters():
    """With an optax state, the fix is a recipe whose optimizer stores masters."""
    tx, params = relaxed(optax.adam(1e-3)), {"w": jnp.ones((64, 64))}
    half_params = {"w": params["w"].astype(BF16)}
    report = audit(functools.partial(optax_step, tx=tx), half_params, tx.init(half_params), X)
    finding = the_only(report.errors, "missing_master")
    scope = {"tx": tx, "jaxmp": jaxmp}
    exec(code_of(finding), scope)
    state = scope["tx"].init(params)
    assert counts(functools.partial(optax_step, tx=scope["tx"]), half_params, state, X) == {}


@pytest.mark.parametrize("master", ["fp32", "packed", "none"])
def test_masters_of_jaxmp(master):
    recipe = jaxmp.load_recipe("bf16_params").replace(master=master)
    tx = recipe.optimizer(relaxed(optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3))))
    params = {"w": jnp.ones((64, 64))}
    state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)

    step = state_step(lambda p, x: loss(p["w"], x))
    plain = functools.partial(optax_step, tx=tx)
    for report in (
        audit(step, state, X, recipe=recipe),
        audit(plain, recipe.cast_params(params), tx.init(params), X, recipe=recipe),
    ):
        # A recipe without masters is a choice.
        assert report.ok, str(report)
        found = {f.check: f.severity for f in report.findings}
        assert found.get("missing_master") == ("warning" if master == "none" else None)
        assert "implicit_promotion" not in found


def test_stochastic_rounding_needs_no_masters():
    inner = (
        jaxmp.load_recipe("bf16_params").replace(master="none").optimizer(relaxed(optax.adam(1e-3)))
    )
    tx = jaxmp.optim.stochastic_rounding(inner)

    def step(w, state, x):
        updates, state = tx.update(jaxmp.grad(loss)(w, x), state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.ones((64, 64), BF16)
    assert "missing_master" not in counts(step, w, tx.init(w), X)
    # The averages in the state of an optimizer are those of the optimizer.
    tx = optax.contrib.schedule_free_sgd(1e-3)
    assert counts(step, w, tx.init(w), X).keys() == {"optimizer_state_16bit"}


def test_masters_by_hand():
    def step(params, masters, x):
        masters = masters - 0.1 * jax.grad(loss)(params, x).astype(F32)
        return masters.astype(BF16), masters

    assert counts(step, half(W), W, X) == {}


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_16_bit_parameters_of_a_model(framework):
    tx = optax.sgd(0.1)
    if framework == "linen":
        model = nn.Dense(64, dtype=BF16, param_dtype=BF16)
        params = jax.eval_shape(model.init, jax.random.key(0), X)
        args = params, jax.eval_shape(tx.init, params), X

        def step(params, state, x):
            grads = jax.grad(lambda p: jnp.mean(model.apply(p, x).astype(F32) ** 2))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state
    else:
        model = nnx.Linear(64, 64, dtype=BF16, param_dtype=BF16, rngs=nnx.Rngs(0))
        args = model, nnx.Optimizer(model, tx, wrt=nnx.Param), X

        def step(model, optimizer, x):
            optimizer.update(model, nnx.grad(lambda m: jnp.mean(m(x).astype(F32) ** 2))(model))

        step = nnx.jit(step)
    assert set(counts(step, *args)) == {"missing_master"}


# ---------------------------------------------------------------------------
# Loss scales
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("around", AROUND)
def test_float16_without_a_loss_scale(around):
    step = functools.partial(sgd, dtype=F16, around=around)
    assert counts(step, W, X) == {"missing_loss_scale": 1}


def test_fixes_name_the_recipe_of_most_values():
    def loss_fn(w, x):
        logits = (x.astype(BF16) @ w.astype(BF16)).astype(F32)
        return jax.nn.logsumexp(logits) * x[0, 0].astype(F16).astype(F32)

    (finding,) = audit(jax.grad(loss_fn), W, X).errors
    assert "jaxmp.autocast(loss_fn, 'bf16')" in finding.fix


def by_constant(w, x):
    return w - 0.1 * jax.grad(lambda w: 1024 * loss(w, x, F16))(w) / 1024


def by_vjp(w, x):
    value, vjp = jax.vjp(lambda w: loss(w, x, F16), w)
    return w - 0.1 * vjp(jnp.full_like(value, 4096))[0] / 4096


def by_static_scale(w, x):
    return w - 0.1 * jaxmp.grad(loss, loss_scale=jaxmp.StaticLossScale(4096.0))(w, x, F16)


@pytest.mark.parametrize("step", [by_constant, by_vjp, by_static_scale])
def test_constant_loss_scales(step):
    assert counts(step, W, X) == {}
    assert counts(jax.jit(step), W, X) == {}


def test_a_loss_scale_in_the_state():
    def step(w, scale, x):
        grads = jax.grad(lambda w: scale * loss(w, x, F16))(w) / scale
        return w - 0.1 * grads, scale + jnp.where(jnp.isfinite(grads).all(), 1, -scale / 2)

    def learned(w, temperature, x):
        scaled = lambda w, temperature: temperature * loss(w, x, F16)
        grads = jax.grad(scaled, (0, 1))(w, temperature)
        return w - jnp.clip(grads[0], -1, 1), temperature - grads[1]

    assert counts(step, W, SCALAR, X) == {}
    # Clipped gradients are proportional to the temperature, which is no loss scale.
    assert counts(learned, W, SCALAR, X) == {"missing_loss_scale": 1}


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


@pytest.mark.parametrize(
    ("of_loss", "is_scaled"),
    [
        # Weights of terms, temperatures and numbers of tokens.
        (lambda s, h, y: jnp.mean(y**2) + s * jnp.mean(h**2), False),
        (lambda s, h, y: s * jnp.mean(y**2) + jnp.mean(h**2), False),
        (lambda s, h, y: (1 - s) * jnp.mean(y**2) + s * jnp.mean(h**2), False),
        (lambda s, h, y: jnp.mean(jnp.exp(y / s)), False),
        (lambda s, h, y: jnp.sum(y**2) / s, False),
        (lambda s, h, y: s * (jnp.mean(y**2) + 0.1 * jnp.mean(h**2)), True),
        (lambda s, h, y: s * jnp.mean(clipped(y.astype(F16)).astype(F32) ** 2), True),
        (lambda s, h, y: jnp.minimum(s, 2.0**15) * jnp.mean(y**2), True),
        (lambda s, h, y: jnp.where(jnp.isfinite(s), s, 1.0) * jnp.mean(y**2), True),
        (lambda s, h, y: 2.0**s * jnp.mean(y**2), True),
    ],
)
def test_a_scale_multiplies_the_whole_loss(of_loss, is_scaled):
    def step(w, s, x):
        def loss_fn(w):
            hidden = x.astype(F16) @ w.astype(F16)
            outputs = lax.fori_loop(0, 2, lambda _, z: z @ w.astype(F16), hidden)
            return of_loss(s, hidden.astype(F32), outputs.astype(F32))

        return w - 0.1 * jax.grad(loss_fn)(w) / (s if is_scaled else 10)

    found = counts(step, W, SCALAR, X)
    assert "scaled_gradients" not in found and ("missing_loss_scale" in found) is not is_scaled


@pytest.mark.parametrize("recipe", ["fp16", "fp16_params"])
def test_the_recipes_scale(recipe):
    state = new_state({"w": jnp.ones((64, 64))}, recipe, relaxed(optax.adamw(1e-3)))

    assert counts(state_step(lambda p, x: loss(p["w"], x, F16)), state, X, recipe=recipe) == {}


# ---------------------------------------------------------------------------
# Accumulators
# ---------------------------------------------------------------------------


def by_scan(w, xs, dtype, **options):
    def add(total, x):
        return total + jax.grad(loss)(w, x, **options).astype(dtype), None

    total, _ = lax.scan(add, jnp.zeros(w.shape, dtype), xs)
    return w - 0.1 * total.astype(F32)


def by_fori(w, xs, dtype, **options):
    def add(i, total):
        return total + jax.grad(loss)(w, xs[i], **options).astype(dtype)

    return w - lax.fori_loop(0, len(xs), add, jnp.zeros(w.shape, dtype)).astype(F32)


def by_hand(w, xs, dtype, **options):
    total = jnp.zeros(w.shape, dtype)
    for x in xs:
        total = total + jax.grad(loss)(w, x, **options).astype(dtype)
    return w - 0.1 * total.astype(F32)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("accumulate", [by_scan, by_fori, by_hand])
def test_gradients_accumulated_over_microbatches(accumulate, around):
    step = functools.partial(accumulate, dtype=BF16, around=around)
    assert set(counts(step, W, BATCHES)) == {"accumulator_16bit"}
    assert counts(functools.partial(accumulate, dtype=F32, around=around), W, BATCHES) == {}


def gradients_of_calls(total, w, x):
    return total + jax.grad(loss)(w, x).astype(total.dtype)


def average_new(average, w, x):
    w = w - 0.1 * jax.grad(loss)(w, x)
    return (0.99 * average + 0.01 * w).astype(average.dtype), w


def average_old(average, w, x):
    new = w - 0.1 * jax.grad(loss)(w, x)
    return optax.incremental_update(w.astype(average.dtype), average, 1e-2), new


def average_by_difference(average, w, x):
    w = w - 0.1 * jax.grad(loss)(w, x)
    return average + ((w.astype(average.dtype) - average) * 0.01).astype(average.dtype), w


def moment(moment, w, x):
    moment = (0.9 * moment + jax.grad(loss)(w, x).astype(moment.dtype)).astype(moment.dtype)
    return moment, w - 0.1 * moment.astype(F32)


@pytest.mark.parametrize(
    "step", [gradients_of_calls, average_new, average_old, average_by_difference, moment]
)
def test_state_by_hand(step):
    check = "optimizer_state_16bit" if step is moment else "accumulator_16bit"
    assert counts(step, half(W), W, X) == {check: 1}
    assert counts(step, W, W, X) == {}


def average_of_the_last_step(state, ema, x, new=False):
    """Averages the parameters before or after the update, which are rounded masters."""
    grads = state.value_and_grad(lambda p, x: loss(p["w"], x))(x)[1]
    after = state.apply_gradients(grads=grads)
    params = after.params if new else state.params
    return after, optax.incremental_update(params, ema, 0.005)


@pytest.mark.parametrize("form", ["arguments", "dict", "optax.ema", "new", "packed", "packed new"])
def test_averages_beside_masters_are_reported_and_the_fix_is_clean(form):
    params, recipe = {"w": jnp.ones((64, 64))}, jaxmp.load_recipe("bf16_params")
    if "packed" in form:
        recipe = recipe.replace(master="packed")
    tx = optax.sgd(0.1) if form in ("dict", "packed") else relaxed(optax.adam(1e-3))
    state = new_state(params, recipe, tx)
    step, ema = functools.partial(average_of_the_last_step, new="new" in form), state.params
    if form == "dict":
        step = lambda s, x: average_of_the_last_step(s["train"], s["ema"], x)
    if form == "optax.ema":
        averaging = relaxed(optax.ema(0.995))
        ema = averaging.init(state.params)
        step = lambda state, ema, x: (
            average_of_the_last_step(state, state.params, x)[0],
            averaging.update(state.params, ema)[1],
        )
    args = ({"train": state, "ema": ema}, X) if form == "dict" else (state, ema, X)
    (finding,) = audit(step, *args).errors
    id = "optimizer_state_16bit" if form == "optax.ema" else "accumulator_16bit"
    assert finding.check == id and "ema = " in finding.fix
    if form != "optax.ema":
        assert "average parameters" in finding.message
        assert "jaxmp.optim.incremental_update(params, ema, step_size)" in finding.fix
    scope = {"jaxmp": jaxmp, "params": state, "step_size": 0.005}
    exec(code_of(finding), scope)
    assert scope["ema"]["w"].dtype == F32

    def fixed(state, ema, x):
        state, _ = average_of_the_last_step(state, state.params, x)
        return state, jaxmp.optim.incremental_update(state, ema, 0.005)

    assert audit(fixed, state, scope["ema"], X).ok


def test_an_fp32_average_of_rounded_parameters_is_clean():
    params = {"w": jnp.ones((64, 64)), "frozen": jnp.ones((1, 64))}
    state = new_state(params, "bf16_params")

    def step(state, ema, x):
        total = lambda p, x: loss(p["w"] + jax.lax.stop_gradient(p["frozen"]), x)
        grads = state.value_and_grad(total)(x)[1]
        state = state.apply_gradients(grads=grads)
        return state, optax.incremental_update(state.params, ema, 0.005)

    assert counts(step, state, params, X) == {}
    assert counts(step, state, state.params, X) == {"accumulator_16bit": 2}


@pytest.mark.parametrize(
    ("guard", "update", "shape"),
    [
        ("recipe", lambda old, x: 0.9 * old + 0.1 * x.mean(0, keepdims=True), (1, 64)),
        ("by hand", lambda old, x: 0.9 * old + 0.1 * x.mean(0, keepdims=True), (1, 64)),
        ("none", lambda old, x: 0.9 * old + 0.1 * x.mean(0, keepdims=True), (1, 64)),
        ("by hand", lambda old, x: 0.9 * old + 0.1 * x.mean(), ()),
        # A maximum, and a queue of examples; values that are replaced are NaN for one step.
        ("by hand", lambda old, x: jnp.maximum(old, x.max(0, keepdims=True)), (1, 64)),
        ("by hand", lambda old, x: jnp.concatenate([old[16:], x]), (32, 64)),
        ("", lambda old, x: x.mean(0, keepdims=True), (1, 64)),
        # No loss reads the scalar.
        ("unread", lambda old, x: 0.9 * old + 0.1 * x.mean(), ()),
    ],
)
def test_statistics_that_a_skipped_step_does_not_keep(guard, update, shape):
    state = new_state({"w": jnp.ones((64, 64))}, "fp32")
    state = state if guard == "recipe" else state.params
    args = state, {"mean": jnp.zeros(shape)}, jnp.ones((16, 64))

    def step(state, old, x, fix=""):
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -9, 9), x)  # a cast that saturates
        names = {"old": old, "stats": {"mean": update(old["mean"], x)}}
        mean = 0 if guard == "unread" else jnp.atleast_2d(names["stats"]["mean"])[:16]
        total = lambda p: loss(p["w"], x - mean)
        if guard == "recipe":
            state = state.apply_gradients(grads=state.value_and_grad(total)()[1])
        else:
            new = state["w"] - jax.grad(total)(state)["w"]
            finite = jnp.isfinite(new).all() if guard != "none" else True
            state = {"w": jnp.where(finite, new, state["w"])}
        names |= {"jax": jax, "jnp": jnp, "jaxmp": jaxmp, "state": state}
        exec(fix, names)
        return state, names["stats"]

    findings = audit(step, *args).findings
    expected = ["unguarded_state"] * (guard in ("recipe", "by hand"))
    assert [finding.check for finding in findings] == expected
    for finding in findings:
        fixed = functools.partial(step, fix=code_of(finding))
        assert "old['mean']" in finding.message and not audit(fixed, *args).findings
        assert not fixed(*args[:2], args[2] * jnp.nan)[1]["mean"].any()


def test_hyperparameters_that_a_step_replaces_may_have_16_bits():
    tx = optax.inject_hyperparams(optax.sgd, hyperparam_dtype=BF16)(0.1)

    def step(state, w, x, *rates):
        state.hyperparams.update(zip(["learning_rate"], rates, strict=False))
        updates, state = tx.update(jax.grad(loss)(w, x), state, w)
        return state, optax.apply_updates(w, updates)

    state = jax.eval_shape(tx.init, W)
    assert counts(step, state, W, X) == {"optimizer_state_16bit": 1}
    assert counts(step, state, W, X, jax.ShapeDtypeStruct((), BF16)) == {}


def test_microbatches_of_jaxmp():
    def step(w, xs):
        return w - 0.1 * jaxmp.grad(loss, microbatches=4)(w, xs)

    assert counts(step, W, jax.ShapeDtypeStruct((16, 64), F32), recipe="bf16") == {}


def test_gradients_inside_of_a_loss_are_activations():
    """The model computes a score as the gradient of an energy."""

    def step(w, x):
        score = jax.grad(lambda x: loss(w, x))

        def value(w):
            first, second, third = (score(n * x).astype(BF16) for n in (1.0, 2.0, 3.0))
            total = first + second + third
            return jnp.mean((total @ w.astype(BF16)).astype(F32) ** 2)

        return w - 0.1 * jax.grad(value)(w)

    assert counts(step, W, X) == {}


def test_forward_sums_and_caches_are_no_accumulators():
    def decode(cache, w, x):
        return cache + (x.astype(BF16) @ w).sum(0)[None], jax.grad(loss)(w, x)

    def add(x, y):
        return x + y

    cache = jax.ShapeDtypeStruct((1, 64), BF16)
    assert counts(decode, cache, half(W), X) == {}
    assert counts(add, half(W), half(W)) == {}


# ---------------------------------------------------------------------------
# Reductions over devices
# ---------------------------------------------------------------------------


def over_devices(step, *axes, **options):
    """Returns a step that each of four devices runs for its rows of the batch."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec(*axes)
    specs = dict(in_specs=(spec, PartitionSpec("data")), out_specs=spec)
    return jax.shard_map(step, mesh=mesh, **specs, **options)


def data_parallel(cast, *, check_vma, map=jax.shard_map):
    def step(w, x):
        grads = lax.pmean(jax.grad(loss)(w, x).astype(cast), "data")  # devices
        return w - 0.1 * grads.astype(F32)

    if map is jax.pmap:
        mapped = jax.pmap(step, axis_name="data", in_axes=(None, 0), out_axes=None)
        return lambda w, x: mapped(w, x.reshape(4, -1, x.shape[-1]))
    return over_devices(step, check_vma=check_vma)


@pytest.mark.parametrize("map", [jax.shard_map, jax.pmap])
def test_gradients_reduced_in_16_bits(map):
    step = data_parallel(BF16, check_vma=False, map=map)
    report = audit(step, W, X, recipe="bf16")
    (finding,) = report.errors
    assert finding.check == "all_reduce_16bit" and "gradients" in finding.message
    assert finding.fix.endswith("    jax.grad(loss)(w, x).astype(jnp.float32)")
    line = inspect.getsource(inspect.getmodule(test_state_by_hand)).splitlines()[finding.line - 1]
    assert line.endswith("# devices")
    # Without policies, FP32 is not requested.
    assert audit(step, W, X).ok
    assert audit(data_parallel(F32, check_vma=False, map=map), W, X, recipe="bf16").findings == ()


def test_gradients_that_jax_itself_reduces():
    """With `check_vma`, JAX sums the gradient after the cast of the parameter."""
    report = audit(data_parallel(F32, check_vma=True), W, X, recipe="bf16")
    (finding,) = report.errors
    assert finding.check == "all_reduce_16bit" and "to='varying'" in finding.fix

    def step(w, x):
        scope = {"params": w, "jax": jax}
        exec(code_of(finding), scope)
        return lax.pmean(jax.grad(loss)(scope["params"], x), "data")

    assert audit(over_devices(step), W, X, recipe="bf16").findings == ()


def test_gradients_of_parameters_that_are_gathered():
    """In FSDP, the gradient of a parameter gathered in 16 bits is summed in 16 bits."""

    def audited(gather):
        def step(w, x):
            grads = jax.grad(lambda w: jnp.mean((x.astype(BF16) @ gather(w)).astype(F32) ** 2))(w)
            return w - 0.1 * grads

        return audit(over_devices(step, "data"), W, X, recipe="bf16")

    (finding,) = audited(lambda w: lax.all_gather(w.astype(BF16), "data", tiled=True)).errors
    assert finding.check == "all_reduce_16bit"
    scope = {"jax": jax, "jnp": jnp}
    exec(code_of(finding), scope)
    assert audited(scope["gather"]).findings == ()


def test_sums_of_activations_are_notes():
    """Tensor parallelism sums partial results of matmuls in the compute dtype, forward and
    backward.
    """
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    columns, rows = PartitionSpec(None, "model"), PartitionSpec("model", None)

    def layer(x, up, down):
        return lax.psum(jnp.tanh(x @ up) @ down, "model")

    spread = jax.shard_map(
        layer, mesh=mesh, in_specs=(PartitionSpec(), columns, rows), out_specs=PartitionSpec()
    )

    def step(weights, x):
        value = lambda ws: jnp.mean(spread(spread(x, *ws), *ws).astype(F32))
        return jax.grad(value)(weights)

    report = audit(step, (half(W), half(W)), half(X), recipe="bf16")
    assert report.findings == ()
    note = "activations are summed over devices in bfloat16, as in tensor parallelism"
    assert report.notes.count(note) == 1


def test_the_reductions_of_jaxmp():
    recipe = jaxmp.load_recipe("bf16")
    state = new_state({"w": jnp.ones((64, 64))}, recipe, relaxed(optax.sgd(0.1)), axis_name="data")
    step = state_step(lambda p, x: loss(p["w"], x))
    for check_vma in (False, True):
        assert counts(over_devices(step, check_vma=check_vma), state, X, recipe=recipe) == {}


# ---------------------------------------------------------------------------
# Printed fixes, applied
# ---------------------------------------------------------------------------


def test_autocast_mends_a_function():
    def fn(w, x):
        return jax.nn.relu(x @ w)

    (finding,) = audit(fn, W, X, recipe="bf16").errors
    scope = {"fn": fn, "jaxmp": jaxmp}
    exec(code_of(finding), scope)
    assert audit(scope["fn"], W, X, recipe="bf16").ok


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_wrap_mends_a_model(framework):
    if framework == "linen":
        model = nn.Dense(64)
        variables = jax.eval_shape(model.init, jax.random.key(0), X)
        run = lambda model: audit(model.apply, variables, X, recipe="bf16")
    else:
        # Flax does not create scopes for NNX modules; the user code has one here.
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

        def call(model, x):
            with jax.named_scope("linear"):
                return model(x)

        run = lambda model: audit(call, model, X, recipe="bf16")
    (finding,) = run(model).errors
    scope = {"model": model, "jaxmp": jaxmp}
    exec(code_of(finding), scope)
    assert run(scope["model"]).ok


def cast_by_name(x, w):
    y = jnp.astype(x, F32)
    return (y @ w).astype(BF16)


def widened(x):
    return x.astype(F32)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: (x.astype(F32) @ w).astype(BF16),
        lambda x, w: jnp.dot(F32(x), w).astype(BF16),
        lambda x, w: jnp.matmul(a=x.astype(F32), b=w).astype(BF16),
        lambda x, w: jnp.einsum("bi,io->ob", F32(x), w, precision=None).astype(BF16),
        lambda x, w: lax.convert_element_type(x, F32).dot(w).astype(BF16),
        lambda x, w: jnp.tensordot(widened(x), widened(w), 1).astype(BF16),
        lambda x, w: lax.dot(x, w).astype(BF16),
        cast_by_name,
    ],
)
def test_the_fix_of_a_matmul_casts_both_operands(fn):
    x = half(X)
    for recipe in ("bf16", None):
        (finding,) = audit(fn, x, W, recipe=recipe).errors
        assert finding.trial == "works"
        assert "jnp.bfloat16" in code_of(finding)


def test_the_fix_of_a_function_of_a_cast():
    (finding,) = audit(lambda x: jnp.exp(jnp.astype(x, BF16)), half(X)).errors
    assert audit(lambda x: eval(code_of(finding)), half(X)).ok


def attends(**options):
    attend = lambda x: nn.dot_product_attention(*3 * [x[:, None]], **options)
    return nn.Sequential([attend]), "mixed_operands" if options else "softmax_16bit"


@pytest.mark.parametrize(
    ("model", "check"),
    [
        (nn.MultiHeadDotProductAttention(2, dtype=BF16), "softmax_16bit"),
        attends(),
        attends(force_fp32_for_softmax=True),
    ],
)
def test_the_fix_of_attention_inside_flax(model, check):
    variables = jax.eval_shape(model.init, jax.random.key(0), half(X))
    scope = {"model": model, "jaxmp": jaxmp, "fn": lambda *args: scope["model"].apply(*args)}
    (finding,) = audit(scope["fn"], variables, half(X), recipe="bf16").errors
    assert finding.check == check
    exec(code_of(finding), scope)
    assert audit(scope["fn"], variables, half(X), recipe="bf16").ok


@pytest.mark.parametrize("count", [lambda: 2, lambda: lax.psum(1, "data")])
def test_the_fix_of_a_sum_over_devices_keeps_the_quotient(count):
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def mean(reduced):
        def gradient(w, x):
            return reduced(jax.grad(loss)(w, x))

        specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
        return jax.shard_map(gradient, mesh=mesh, check_vma=False, **specs)

    (finding,) = audit(mean(lambda g: lax.psum(g, "data") / count()), half(W), X).warnings
    assert finding.check == "all_reduce_16bit" and finding.trial == "works"
    assert code_of(finding).startswith("lax.psum(jax.tree.map(")
    wide = lambda g: lax.psum(g.astype(F32), "data") / count()
    assert not audit(mean(wide), half(W), X).warnings


def test_fixes_of_training_steps():
    (finding,) = audit(sgd, half(W), X).errors
    scope = {"loss_fn": lambda w: w, "params": jnp.ones(2), "jax": jax, "jnp": jnp}
    cast = eval(code_of(finding), scope)
    assert cast.dtype == BF16
    assert audit(lambda w, x: w - jax.grad(lambda w: loss(w.astype(BF16), x))(w), W, X).ok

    (finding,) = audit(functools.partial(sgd, dtype=F16), W, X).errors

    def step(params, x):
        scope = {"loss_fn": lambda w: loss(w, x, F16), "params": params, "jaxmp": jaxmp}
        exec(code_of(finding), scope)
        return params - 0.1 * scope["grads"]

    assert audit(step, W, X).ok


def test_matmuls_that_are_widened_for_the_cpu_count_as_16_bits():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    args = jax.device_put((jnp.ones((64, 64)), jnp.ones((16, 64))), replicated)
    report = audit(jaxmp.value_and_grad(loss), *args, recipe="bf16")
    assert not report.errors
    assert {(row.lhs, row.rhs) for row in report.matmuls} == {("bfloat16", "bfloat16")}
