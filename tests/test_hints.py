"""Trainings whose parts do not fit say so, each of them, when their parts meet."""

import copy
import functools
import gc
import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp
from training_steps import new_state

X = jnp.ones((4, 8))
NO_SCALE = "gradient of a float16 model is computed without a loss scale"
NOT_APPLIED = "was not applied to a model or a function: all matmuls of the loss run in FP32"
DROPPED = "nothing else changes. Keep it: "
NO_MASTERS = "neither casts them nor keeps FP32 masters"


def linen_step(recipe, *, wraps=True, optimizer=True, scales=True, form="state"):
    """Makes a step of a Linen model with a TrainState, or as a plain loop of optax."""
    model = recipe.wrap(nn.Dense(8)) if wraps else nn.Dense(8)
    params = model.init(jax.random.key(0), X)["params"]
    tx = recipe.optimizer(optax.sgd(0.1)) if optimizer else optax.sgd(0.1)
    loss_fn = lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2)
    if form == "state":
        state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

        @jax.jit
        def step(state, x):
            gradient = state.value_and_grad(loss_fn) if scales else None
            plain = lambda x: jax.value_and_grad(loss_fn)(state.params, x)
            loss, grads = (gradient or plain)(x)
            return state.apply_gradients(grads=grads), loss

        return lambda: step(state, X)

    @jax.jit
    def loop(params, opt_state, x):
        scale = jaxmp.get_loss_scale(opt_state) if optimizer else None
        gradient = jaxmp.value_and_grad(loss_fn, loss_scale=scale) if scales else None
        loss, grads = (gradient or jax.value_and_grad(loss_fn))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return lambda: loop(params, tx.init(params), X)


def nnx_step(recipe, *, wraps=True, optimizer=True, scales=True):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model = recipe.wrap(model) if wraps else model
    tx = recipe.optimizer(optax.sgd(0.1)) if optimizer else optax.sgd(0.1)
    trainer = jaxmp.nnx.Optimizer(model, tx)
    loss_fn = lambda model, x: jnp.mean(model(x) ** 2)

    @nnx.jit
    def step(model, trainer, x):
        gradient = trainer.value_and_grad if scales else nnx.value_and_grad
        loss, grads = gradient(loss_fn)(model, x)
        trainer.update(model, grads)
        return loss

    return lambda: step(model, trainer, X)


def raw_step(recipe, **options):
    return linen_step(recipe, form="optax", **options)


def test_a_warning_has_the_line_of_the_user_and_not_of_a_library():
    loss_fn = jaxmp.autocast(lambda w, x: jnp.mean((x @ w) ** 2), "fp16")
    with pytest.warns(jaxmp.errors.RecipeWarning, match=NO_SCALE) as caught:
        eqx.filter_grad(loss_fn)(jnp.ones((8, 8)), X)
    assert caught[0].filename == __file__


FORMS = pytest.mark.parametrize("make", [linen_step, nnx_step, raw_step])


def hints_of(run):
    """Runs a function, and returns its hints: their texts, and that this file is their place."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
        gc.collect()  # Flax NNX refers to the trace of a gradient in cycles.
    assert all(each.category is jaxmp.errors.RecipeWarning for each in caught)
    assert all(each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


@FORMS
@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("fp16", {"scales": False}, NO_SCALE),
        ("fp16", {"scales": False, "optimizer": False}, NO_SCALE),
        ("fp16", {"wraps": False}, f"computes in float16, but {NOT_APPLIED}"),
        ("bf16", {"wraps": False}, f"computes in bfloat16, but {NOT_APPLIED}"),
    ],
    ids=["plain_gradient", "plain_optimizer", "plain_model", "plain_model_bf16"],
)
def test_each_training_whose_parts_do_not_fit_has_a_hint(make, recipe, options, message):
    for _ in range(2):
        step = make(jaxmp.load_recipe(recipe), **options)
        (hint,) = hints_of(step)
        assert message in hint
        assert hints_of(step) == []


@pytest.mark.parametrize("layers", [[], [jnp.tanh]], ids=["last_layer", "hidden_layer"])
def test_the_search_of_a_model_keeps_its_hint_for_the_call(layers):
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), *layers)
    model = jaxmp.load_recipe("fp16").wrap(model)
    gradient = jaxmp.nnx.value_and_grad(lambda model, x: model(x).mean())
    (hint,) = hints_of(lambda: gradient(model, X))
    assert NO_SCALE in hint


@FORMS
@pytest.mark.parametrize("recipe", ["fp16", "bf16"])
def test_whole_trainings_do_not_warn(make, recipe):
    assert hints_of(lambda: make(jaxmp.load_recipe(recipe))()) == []


def linen_energy(recipe):
    model = recipe.wrap(nn.Dense(8))
    return lambda params, x: model.apply(params, x).sum(), model.init(jax.random.key(0), X)


def nnx_energy(recipe):
    graphdef, params = nnx.split(recipe.wrap(nnx.Linear(8, 8, rngs=nnx.Rngs(0))))
    return lambda params, x: nnx.merge(graphdef, params)(x).sum(), params


@pytest.mark.parametrize("make", [linen_energy, nnx_energy])
@pytest.mark.parametrize("form", ["jaxmp", "by_hand", "unscaled"])
def test_forces_in_a_scaled_loss_have_no_hint(make, form):
    energy, params = make(jaxmp.load_recipe("fp16"))
    scale = jaxmp.StaticLossScale(8.0)
    forces = lambda params: jax.vmap(jax.grad(energy, 1), (None, 0))(params, X)
    loss_fn = lambda params: jnp.mean(forces(params).astype(jnp.float32) ** 2)
    gradient = {
        "jaxmp": lambda: jaxmp.grad(loss_fn, loss_scale=scale)(params),
        "by_hand": lambda: jax.grad(lambda params: scale.scale(loss_fn(params)))(params),
        "unscaled": lambda: jax.grad(loss_fn)(params),
    }[form]
    assert [NO_SCALE in hint for hint in hints_of(gradient)] == [True] * (form == "unscaled")


def test_a_recipe_that_computes_all_matmuls_in_float32_is_applied():
    policies = jaxmp.PolicyMap("bf16", jaxmp.Rule("layers_0", "c=f32"))
    model = jaxmp.load_recipe(policies).wrap(nn.Sequential([nn.Dense(8)]))
    params = model.init(jax.random.key(0), X)
    gram = lambda params: jnp.eye(4) + X @ params["params"]["layers_0"]["kernel"] @ X.T
    for loss_fn in (
        lambda params: jnp.mean(model.apply(params, X) ** 2),
        jaxmp.autocast(lambda params: jnp.linalg.cholesky(gram(params)).sum(), "bf16"),
    ):
        state = new_state(params, "bf16")
        assert hints_of(jax.jit(state.value_and_grad(loss_fn))) == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_matmuls_in_float64_are_said(dtype):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        recipe, x = jaxmp.load_recipe("bf16"), jnp.ones((4, 8), dtype)
        model = recipe.wrap(nn.Dense(8))
        params = model.init(jax.random.key(0), x)
        state = new_state(params, recipe, apply_fn=model.apply)
        hints = hints_of(state.value_and_grad(lambda params: jnp.mean(model.apply(params, x) ** 2)))
    assert ["x = x.astype(jnp.float32)" in hint for hint in hints] == [True] * (dtype == "float64")


def test_a_model_of_the_author_in_float16_does_not_warn():
    model = nn.Dense(8, dtype=jnp.float16)
    params = model.init(jax.random.key(0), X)
    state = new_state(params, "fp16", apply_fn=model.apply)
    with jax.numpy_dtype_promotion("standard"):
        _, grads = state.value_and_grad(
            lambda params: jnp.mean(model.apply(params, X).astype(jnp.float32))
        )()
    assert state.apply_gradients(grads=grads).step == 1


def test_a_loss_is_traced_once():
    tx, calls = jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1)), []
    scale = jaxmp.get_loss_scale(tx.init(jnp.ones(8)))
    loss_fn = lambda w: calls.append(w) or jnp.sum(w)
    jax.jit(jaxmp.value_and_grad(loss_fn, loss_scale=scale)).lower(jnp.ones(8))
    assert len(calls) == 1


def float16_loss():
    model = jaxmp.load_recipe("fp16").wrap(nn.Dense(8))
    params = model.init(jax.random.key(0), X)
    return model, params, lambda params: jnp.mean(model.apply(params, X) ** 2)


def test_a_model_in_float16_may_be_evaluated_without_a_loss_scale():
    _, params, loss_fn = float16_loss()
    assert hints_of(lambda: jax.jit(loss_fn)(params)) == []


REMATERIALIZED = lambda fn: jaxmp.grad(jax.checkpoint(fn))  # its residuals are FP32 alone


@pytest.mark.parametrize(
    "gradient", [jax.grad, jaxmp.grad, lambda fn: jax.jit(jax.grad(fn)), REMATERIALIZED]
)
def test_the_hint_is_given_once_for_each_model(gradient):
    model, params, loss_fn = float16_loss()
    assert len(hints_of(lambda: gradient(loss_fn)(params))) == 1
    for same in (model, model.clone(), copy.deepcopy(model)):
        loss_fn = lambda params, same=same: jnp.mean(same.apply(params, X) ** 2)
        assert hints_of(lambda: gradient(loss_fn)(params)) == []
    assert len(hints_of(lambda: gradient(float16_loss()[2])(params))) == 1


@pytest.mark.parametrize("passes", [True, False, None])  # None: with a stopped gradient
@pytest.mark.parametrize("is_linen", [True, False])
def test_a_teacher_in_float16_warns_only_if_the_gradient_passes_through_it(passes, is_linen):
    linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    teacher = jaxmp.load_recipe("fp16").wrap(nn.Dense(8) if is_linen else linear)
    params = teacher.init(jax.random.key(0), X) if is_linen else {}
    run = functools.partial(teacher.apply, params) if is_linen else teacher

    def distill(w, params, x):
        stopped = (lambda y: y) if passes else jax.lax.stop_gradient
        loss = lambda w: jnp.mean(run(x if passes is False else stopped(x @ w)) - x @ w)
        return jaxmp.value_and_grad(loss)(w)

    step = jax.jit(distill) if is_linen else distill
    hints = hints_of(lambda: step(jnp.eye(8), params, X))
    assert [NO_SCALE in hint for hint in hints] == [True] * bool(passes)


def test_the_teacher_of_a_student_in_float16_is_not_named():
    teacher, student = (jaxmp.load_recipe("fp16").wrap(nn.Dense(8)) for _ in range(2))
    params = teacher.init(jax.random.key(0), X)
    loss = lambda p, frozen: jnp.mean((student.apply(p, X) - teacher.apply(frozen, X)) ** 2)
    step = lambda p, frozen: jaxmp.value_and_grad(lambda p: loss(p, frozen))(p)
    (hint,) = hints_of(lambda: jax.jit(step)(params, params))
    assert NO_SCALE in hint


def test_a_loss_that_is_scaled_by_hand_does_not_warn():
    _, params, loss_fn = float16_loss()
    scale = jaxmp.DynamicLossScale()
    assert hints_of(lambda: jax.grad(lambda params: scale.scale(loss_fn(params)))(params)) == []


def test_an_error_in_a_scaled_loss_does_not_warn():
    _, params, loss_fn = float16_loss()

    def broken(params):
        raise ValueError(loss_fn(params))

    def run():
        with pytest.raises(ValueError):
            jaxmp.grad(broken, loss_scale=jaxmp.DynamicLossScale())(params)

    assert hints_of(run) == []


@pytest.mark.parametrize("scale", [None, jaxmp.StaticLossScale(8.0)])
def test_gradients_around_and_inside_of_autocast_are_checked_too(scale):
    loss_fn = lambda w: jnp.sum(X @ w)
    scaled = loss_fn if scale is None else lambda w: scale.scale(loss_fn(w))
    around = jax.grad(jaxmp.autocast(scaled, "fp16"))
    inside = jaxmp.autocast(jaxmp.grad(loss_fn, loss_scale=scale), "fp16")
    for gradient in (around, inside):
        for count in (scale is None, 0):
            assert len(hints_of(lambda: gradient(jnp.ones((8, 2))))) == count


def test_the_state_of_a_hint_causes_no_retrace():
    recipe, traces = jaxmp.load_recipe("fp16"), []
    states = [recipe.optimizer(optax.sgd(0.1)).init(jnp.ones(2)) for _ in range(2)]
    read = jax.jit(lambda state: traces.append(state) or jaxmp.get_loss_scale(state))
    scales = [read(state) for state in states]
    assert len(traces) == 1 and scales[0] == scales[1] == recipe.loss_scale


# ---------------------------------------------------------------------------
# Dropped results
# ---------------------------------------------------------------------------

PARAMS = {"w": jnp.ones(2)}


STATEMENTS = {
    "recipe.wrap(nn.Dense(2))": "model = recipe.wrap(model)",
    "recipe.wrap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))": "model = recipe.wrap(model)",
    "recipe.wrap(\n    model=nn.Dense(2)\n)": "model = recipe.wrap(model)",
    "jaxmp.autocast(jnp.sum, recipe)": "loss_fn = jaxmp.autocast(loss_fn, recipe)",
    "recipe.cast_params(PARAMS)": "params = recipe.cast_params(params)",
    "recipe.replace(master='none')": "recipe = recipe.replace(...)",
    "state.apply_gradients(grads=PARAMS)": "state = state.apply_gradients(grads=grads)",
}


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_dropped_result_is_said_with_the_line(statement):
    state = new_state(PARAMS, "fp32")
    names = globals() | {"recipe": jaxmp.load_recipe("bf16"), "state": state}
    (hint,) = hints_of(lambda: exec(compile(statement, __file__, "exec"), names))
    assert hint.endswith(f"{DROPPED}{STATEMENTS[statement]}.")
    kept = (f"kept = {statement}", f"kept = [{statement}]", f"print({statement}, file=None)")
    for code in kept:
        assert hints_of(lambda: exec(compile(code, __file__, "exec"), names)) == []


def test_functions_in_c_may_keep_a_result():
    recipe, models = jaxmp.load_recipe("bf16"), []

    def extend():
        models.extend(map(recipe.wrap, [nn.Dense(2), nn.Dense(3)]))

    assert hints_of(extend) == [] and len(models) == 2


def test_an_error_is_raised_before_a_dropped_result_is_said():
    with pytest.raises(jaxmp.JaxmpError, match="not a Flax module"):
        jaxmp.load_recipe("bf16").wrap(nn.Dense)


# ---------------------------------------------------------------------------
# Parameters in 16 bits without masters
# ---------------------------------------------------------------------------


def linen_optimizer(recipe, tx, *, wraps=True, casts=False):
    model = recipe.wrap(nn.Dense(8)) if wraps else nn.Dense(8)
    params = model.init(jax.random.key(0), X)["params"]
    params = recipe.cast_params(params) if casts else params
    return jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def nnx_optimizer(recipe, tx, *, wraps=True, casts=False):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model = recipe.wrap(model) if wraps else model
    if casts:
        nnx.update(model, recipe.cast_params(nnx.state(model, nnx.Param)))
    return jaxmp.nnx.Optimizer(model, tx)


OPTIMIZERS = pytest.mark.parametrize("make", [linen_optimizer, nnx_optimizer])


@OPTIMIZERS
@pytest.mark.parametrize("recipe", ["bf16_params", "fp16_params"])
@pytest.mark.parametrize(("wraps", "casts"), [(True, False), (True, True), (False, True)])
def test_parameters_without_masters_are_said(make, recipe, wraps, casts):
    recipe = jaxmp.load_recipe(recipe)
    run = lambda tx: hints_of(lambda: make(recipe, tx, wraps=wraps, casts=casts))
    (hint,) = run(optax.sgd(0.1))
    assert NO_MASTERS in hint
    # The fix of the message.
    assert run(recipe.optimizer(optax.sgd(0.1))) == []


@OPTIMIZERS
def test_other_optimizers_without_masters_do_not_warn(make):
    recipe = jaxmp.load_recipe("bf16_params")
    rounding = jaxmp.optim.stochastic_rounding(optax.sgd(0.1))
    assert hints_of(lambda: make(recipe, rounding, casts=True)) == []
    without = recipe.replace(master="none")
    assert hints_of(lambda: make(without, without.optimizer(optax.sgd(0.1)))) == []
    assert hints_of(lambda: make(jaxmp.load_recipe("bf16"), optax.sgd(0.1))) == []
    frozen = {"base": jnp.ones(2, jnp.bfloat16), "lora": jnp.ones(2)}
    create = jaxmp.TrainState.create
    assert hints_of(lambda: create(apply_fn=None, params=frozen, tx=optax.sgd(0.1))) == []
