"""Optimizer moments in bfloat16: their rounding, their states, and recipes that store them."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmp
from gpu_compiler import needs_compiler
from grids import EXPENSIVE
from jaxmp._tools.audit._compile import compile_for
from jaxmp._tools.audit._hlo import Program
from jaxmp._tools.audit._hlo_kernels import accessed, kernels
from jaxmp._tools.audit._trace import trace
from jaxmp.errors import CheckpointError, CompositionError, RecipeError, RecipeWarning
from jaxmp.optim import _moments, moment_dtype
from jaxmp.optim._apply import apply_update
from moment_optimizers import PARAMS, X, loss_fn, train
from training_steps import new_state, nnx_step

pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")

RECIPE = jaxmp.load_recipe("bf16").replace(moment_dtype="bfloat16")
SPLIT = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec("data"))

# Optimizer -> number of moments of two parameters that are stored in 16 bits.
OPTIMIZERS = {
    "adam": (optax.adam, 4),
    "adamw": (optax.adamw, 4),
    "adamax": (optax.adamax, 4),
    "adabelief": (optax.adabelief, 4),
    "adadelta": (optax.adadelta, 4),
    "adafactor": (optax.adafactor, 0),
    "adagrad": (optax.adagrad, 0),
    "adan": (optax.adan, 6),
    "amsgrad": (optax.amsgrad, 4),
    "lamb": (optax.lamb, 4),
    "lars": (optax.lars, 2),
    "lion": (optax.lion, 2),
    "nadam": (optax.nadam, 4),
    "novograd": (optax.novograd, 2),
    "radam": (optax.radam, 4),
    "rmsprop": (optax.rmsprop, 2),
    "rprop": (optax.rprop, 0),
    "sgd": (functools.partial(optax.sgd, momentum=0.9), 2),
    "sm3": (optax.sm3, 0),
    "yogi": (optax.yogi, 4),
    "acprop": (optax.contrib.acprop, 4),
    "ademamix": (optax.contrib.ademamix, 6),
    "adopt": (optax.contrib.adopt, 4),
    "momo_adam": (optax.contrib.momo_adam, 4),
    "muon": (optax.contrib.muon, 3),
    "prodigy": (optax.contrib.prodigy, 4),
    "schedule_free_adamw": (optax.contrib.schedule_free_adamw, 2),
    "simplified_ademamix": (optax.contrib.simplified_ademamix, 4),
}


@EXPENSIVE
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_optax_train_with_16_bit_moments(name):
    make, count = OPTIMIZERS[name]
    _, _, expected = train(make(1e-3))
    _, state, losses = train(moment_dtype(make(1e-3)))
    assert sum(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state)) == count
    # Rounded moments change a step by less than 1 % in the mean.
    np.testing.assert_allclose(losses[-1] - losses[0], expected[-1] - expected[0], rtol=0.05)


def test_a_scalar_parameter_has_16_bit_moments():
    params, gradients = jnp.ones(()), jnp.full((), 0.1)
    tx = moment_dtype(optax.adam(1e-2))
    _, state = jax.jit(tx.update)(gradients, tx.init(params), params)
    second_moment = optax.tree.get(state, "nu")
    assert second_moment.dtype == jnp.bfloat16
    np.testing.assert_allclose(second_moment, 0.001 * 0.1**2, rtol=2**-7)  # of bfloat16


@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_second_moments_neither_stall_nor_drift(b2, monkeypatch):
    """Gradients shrink tenfold: an average that is rounded to nearest remains too large."""

    def mean_step(tx):
        zeros = jnp.zeros(512)

        def step(state, number):
            size = jnp.where(number < 1000, 1.0, 0.1)
            grads = size * jax.random.normal(jax.random.fold_in(jax.random.key(0), number), (512,))
            updates, state = tx.update(grads, state, zeros)
            return state, jnp.mean(jnp.abs(updates))

        run = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(7000))[1][-500:].mean())
        return float(run(tx.init(zeros)))

    inner = optax.scale_by_adam(b2=b2)
    exact = mean_step(inner)
    assert mean_step(moment_dtype(inner)) == pytest.approx(exact, rel=0.02)
    if b2 == 0.999:
        nearest = {"mu": "nearest", "nu": "nearest"}
        monkeypatch.setitem(_moments._FIELDS, "ScaleByAdamState", nearest)
        assert mean_step(moment_dtype(inner)) < 0.7 * exact


def test_rounded_second_moments_have_no_bias_and_uncorrelated_errors():
    """Values over six decades; the errors of steps, arrays and neighbors are independent."""
    scales = np.repeat(10.0 ** np.arange(-6, 0), 2**14).astype(np.float32)
    squares = jnp.asarray(scales * np.linspace(1, 2, len(scales), dtype=np.float32))
    squares = squares.reshape(-1, 2**7)
    tx = moment_dtype(optax.scale_by_rms(decay=0.0, eps=1e-30))
    grads = {"a": jnp.sqrt(squares), "b": jnp.sqrt(squares)}
    state, errors = tx.init(grads), {}
    for step in range(2):
        _, state = tx.update(grads, state)
        for name, rounded in state.inner_state.nu.items():
            exact = np.asarray(grads[name] ** 2, np.float64)
            errors[step, name] = (np.asarray(rounded, np.float64) / exact - 1).ravel()
    for error in errors.values():
        # A rounding has a standard deviation of 0.2 % or less, and its mean one of 0.2 % / 2**7.
        assert np.abs(error.reshape(6, -1).mean(axis=1)).max() < 4 * 0.002 / 2**7
    first, later, beside = errors[0, "a"], errors[1, "a"], errors[0, "b"]
    pairs = [(first, later), (first, beside), (later, beside)]
    pairs += [(first, np.roll(first, 1)), (first, np.roll(first, 2**7))]
    assert max(abs(np.corrcoef(*pair)[0, 1]) for pair in pairs) < 4 / len(scales) ** 0.5


def test_the_rounding_does_not_depend_on_the_sharding():
    tx = moment_dtype(optax.adam(1e-3, b2=0.999))
    grads = jax.tree.map(lambda p: p + 0.1, PARAMS)
    states = []
    for place in (lambda tree: tree, lambda tree: jax.device_put(tree, SPLIT)):
        params = place(PARAMS)
        state = tx.init(params)
        for _ in range(3):
            _, state = jax.jit(tx.update)(place(grads), state, params)
        states.append(jax.tree.map(np.asarray, state))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_a_recipe_stores_moments_and_skips_steps():
    recipe = jaxmp.load_recipe("bf16_params").replace(moment_dtype="bfloat16")
    state = make_state(recipe, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    moments = find_moments(state)
    adam = moments.inner_state[1][0]
    assert {leaf.dtype for leaf in jax.tree.leaves((adam.mu, adam.nu))} == {jnp.dtype(jnp.bfloat16)}
    assert {p.dtype for p in jax.tree.leaves(jaxmp.get_master_params(state))} == {
        jnp.dtype(jnp.float32)
    }
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    applied = step(state, jax.tree.map(jnp.ones_like, PARAMS))
    skipped = step(applied, jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), PARAMS))
    kept, before = map(find_moments, (skipped, applied))
    assert before.count == 1
    jax.tree.map(np.testing.assert_array_equal, kept, before)
    report = jaxmp.audit(step, state, PARAMS, recipe=recipe)
    assert "optimizer_state_16bit" not in {finding.check for finding in report.findings}


def test_wrong_uses_are_refused():
    with pytest.raises(CompositionError, match="squares of small gradients"):
        moment_dtype(optax.adam(1e-3), jnp.float16)
    for dtype in ("float16", "int8", "float8_e4m3fn", "fp4"):
        with pytest.raises(CompositionError, match=f"{dtype}.* moment_dtype .*'bfloat16'"):
            moment_dtype(optax.adam(1e-3), dtype)
        with pytest.raises(RecipeError, match=f"moment_dtype='{dtype}'.*Allowed.*bfloat16"):
            jaxmp.load_recipe("bf16").replace(moment_dtype=dtype)
    assert moment_dtype(optax.adam(1e-3), "bf16").init(PARAMS).inner_state[0].mu["b"].itemsize == 2
    with pytest.raises(CompositionError, match="Put it inside"):
        moment_dtype(jaxmp.load_recipe("bf16").optimizer(optax.adam(1e-3))).init(PARAMS)
    for inner in (1e-3, optax.adam):
        with pytest.raises(CompositionError, match="is not an optax transformation"):
            moment_dtype(inner)
    inner = optax.adam(1e-3)
    assert moment_dtype(inner, jnp.float32).init(PARAMS)[0].mu["w"].dtype == jnp.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moment_dtype(optax.chain(optax.clip(1.0), optax.lion(1e-3))).init(PARAMS)


@jax.tree_util.register_pytree_node_class
class OwnState:
    def __init__(self, average):
        self.average = average

    def tree_flatten(self):
        return (self.average,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def momentum(make):
    init = lambda params: make(jax.tree.map(jnp.zeros_like, params))
    return optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))


@pytest.mark.parametrize("wrap", ["recipe", "function"])
def test_a_warning_names_states_that_stay_in_fp32(wrap):
    in_dict = momentum(lambda zeros: {"average": zeros})
    unknown = {
        "DoGState": optax.contrib.dog(),
        "OwnState": momentum(OwnState),
        r"state\['average'\]\['b'\], state\['average'\]\['w'\]": in_dict,
        r"state\['b'\]": momentum(lambda zeros: zeros),
        r"state\[1\]\['average'\]": optax.chain(optax.adam(1e-3), in_dict),
        r"state.inner_opt_state\['average'\]": optax.MultiSteps(in_dict, 2),
        r"state.base_optimizer_state\['average'\]": optax.contrib.schedule_free(in_dict, 1e-3),
    }
    make = RECIPE.optimizer if wrap == "recipe" else moment_dtype
    for states, inner in unknown.items():
        with pytest.warns(RecipeWarning, match=f"does not know the states {states}"):
            state = make(inner).init(PARAMS)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim} >= {"float32"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(momentum(lambda zeros: {"count": jnp.zeros(3, jnp.int32)})).init(PARAMS)


def moved_bytes(tx, param_dtype=jnp.float32, grad_dtype=jnp.float32):
    """Compiles a step for an H200: bytes and temporary bytes per parameter, and kernels."""
    params = {n: jax.ShapeDtypeStruct((1024, 1024), param_dtype) for n in "ab"}
    grads = jax.tree.map(lambda p: p.update(dtype=grad_dtype), params)

    def step(params, state, grads):
        result = apply_update(tx, grads, state, params)
        return result.params, result.opt_state

    state = jax.eval_shape(tx.init, params)
    traced = trace(jax.jit(step, donate_argnums=(0, 1)), (params, state, grads), {})
    compiled = compile_for("h200", traced)
    program = Program(compiled.text)
    steps = list(kernels(program))
    moved = sum(accessed(program, each) for each in steps) / 2**21
    return moved, compiled.memory.temp_size_in_bytes / 2**21, len(steps)


@needs_compiler
def test_adamw_moves_20_bytes_per_parameter():
    adamw = optax.adamw(1e-3)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    for inner, expected in ((adamw, (28, 20)), (clipped, (32, 24))):
        (wide, _, count), (narrow, _, more) = moved_bytes(inner), moved_bytes(moment_dtype(inner))
        assert (wide, narrow) == pytest.approx(expected, abs=0.2) and more <= count + 3


# Read twice: gradients. Read and written: 16-bit parameters, masters, moments. `cond` has a second
# branch for a skipped step, which reads and writes parameters and masters; its clipping reads the
# gradients once more.
COND = {"skip": "cond", "master": "packed"}
BYTES = {
    "fp32_gradients": ({}, jnp.float32, 2 * 4 + 4 + 8 + 8),
    "bf16_gradients": ({}, jnp.bfloat16, 2 * 2 + 4 + 8 + 8),
    "clipped": ({}, jnp.bfloat16, 2 * 2 + 4 + 8 + 8),
    "packed": ({"master": "packed"}, jnp.bfloat16, 2 * 2 + 4 + 4 + 8),
    "packed_clipped": ({"master": "packed"}, jnp.bfloat16, 2 * 2 + 4 + 4 + 8),
    "cond": ({"skip": "cond"}, jnp.float32, 2 * 4 + 4 + 8 + 8 + 12),
    "cond_packed": (COND, jnp.bfloat16, 2 * 2 + 4 + 4 + 8 + 8),
    "cond_packed_clipped": (COND, jnp.bfloat16, 3 * 2 + 4 + 4 + 8 + 8),
}


@needs_compiler
@pytest.mark.parametrize("name", BYTES)
def test_recipes_with_16_bit_parameters_move_no_more_bytes_than_they_must(name):
    changes, grad_dtype, expected = BYTES[name]
    changes = {"skip": "select", "moment_dtype": "bfloat16", **changes}
    clip = [optax.clip_by_global_norm(1.0)] * ("clipped" in name)
    inner = optax.chain(*clip, optax.adamw(1e-3))
    tx = jaxmp.load_recipe("bf16_params").replace(**changes).optimizer(inner)
    moved, temporary, _ = moved_bytes(tx, jnp.bfloat16, grad_dtype)
    assert moved == pytest.approx(expected, abs=0.2) and temporary < 0.05


def make_state(recipe, inner=None):
    params = recipe.cast_params(PARAMS)
    return new_state(params, recipe, optax.adamw(1e-3) if inner is None else inner)


def test_checkpoints_migrate_both_ways_and_name_the_lossy_one(tmp_path):
    wide = jaxmp.load_recipe("bf16_params")
    narrow = wide.replace(moment_dtype="bfloat16")
    step = jax.jit(lambda state: state.apply_gradients(grads=PARAMS))
    for name, recipe in (("wide", wide), ("narrow", narrow)):
        with jaxmp.checkpoint.Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.save(1, step(step(make_state(recipe))), recipe=recipe)
    with jaxmp.checkpoint.Checkpointer(tmp_path / "wide") as checkpointer:
        with pytest.raises(CheckpointError, match="loses information: 4 x leaf: float32 -> bf"):
            checkpointer.restore(make_state(narrow), recipe=narrow, migrate=True)
        state = checkpointer.restore(make_state(narrow), recipe=narrow, migrate="lossy")
    assert find_moments(state).count == 0
    with jaxmp.checkpoint.Checkpointer(tmp_path / "narrow") as checkpointer:
        resumed = checkpointer.restore(make_state(narrow), recipe=narrow)
        state = checkpointer.restore(make_state(wide), recipe=wide, migrate=True)
    assert state.opt_state.inner_state.inner_state[0].nu["w"].dtype == jnp.float32
    expected = step(step(step(make_state(narrow))))
    leaves = map(jax.tree.leaves, (step(resumed), expected))
    jax.tree.map(np.testing.assert_array_equal, *leaves)


def find_moments(state):
    is_moment = lambda node: isinstance(node, _moments.MomentState)
    (node,) = filter(is_moment, jax.tree.leaves(state, is_leaf=is_moment))
    return node


@pytest.mark.parametrize("wrap", ["multi_steps", "partition"])
def test_moments_work_inside_wrappers(wrap):
    inner = optax.adamw(1e-2)
    if wrap == "multi_steps":
        inner = optax.MultiSteps(inner, 2)
    else:
        inner = optax.partition({"a": inner, "b": optax.sgd(0.1)}, {"w": "a", "b": "b"})
    state = make_state(RECIPE, inner)
    step = jax.jit(lambda state: state.apply_gradients(grads=jax.grad(loss_fn)(state.params)))
    before = float(loss_fn(state.params))
    for _ in range(20):
        state = step(state)
    assert step._cache_size() <= 1 and float(loss_fn(state.params)) < 0.95 * before
    assert np.dtype(jnp.bfloat16) in {m.dtype for m in jax.tree.leaves(find_moments(state))}


def test_nnx_optimizers_store_16_bit_moments():
    model = RECIPE.wrap(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    optimizer = jaxmp.nnx.Optimizer(model, RECIPE.optimizer(optax.adamw(1e-2)))

    step = nnx.jit(nnx_step(lambda model: jnp.mean((model(X) - 1) ** 2)))
    losses = [float(step(model, optimizer)) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(nnx.state(optimizer))]
    assert dtypes.count(jnp.bfloat16) == 4
