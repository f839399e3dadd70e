"""Parameters that the user replaces become the new masters, in every loop and recipe."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from grids import EXPENSIVE, fast_cases
from jaxmp.errors import CompositionError, RecipeWarning
from jaxmp.optim import set_master_params
from training_steps import new_state

RECIPES = {
    "bf16": jaxmp.load_recipe("bf16"),
    "bf16_params": jaxmp.load_recipe("bf16_params"),
    "fp16_params": jaxmp.load_recipe("fp16_params"),
    "bf16_packed": jaxmp.load_recipe("bf16_params").replace(master="packed"),
}
# Neither value is one of 16 bits.
START = {
    "kernel": np.linspace(0.51, 1.53, 8, dtype=np.float32).reshape(2, 4),
    "bias": np.full(4, 0.3, np.float32),
}
FP32 = jax.tree.map(lambda leaf: leaf * np.float32(-2.7), START)

# Each takes the stored parameters and the recipe, and returns other ones.
WAYS = {
    "pretrained weights in 16 bits": lambda params, recipe: recipe.cast_params(FP32),
    "pretrained weights in FP32": lambda params, recipe: jax.tree.map(jnp.asarray, FP32),
    "arrays of NumPy": lambda params, recipe: FP32,
    "one layer in FP32": lambda params, recipe: params | {"bias": jnp.asarray(FP32["bias"])},
    "a reset layer": lambda params, recipe: params | {"bias": jnp.zeros_like(params["bias"])},
    "one element": lambda params, recipe: params | {"kernel": params["kernel"].at[0, 1].set(5)},
    "clipped weights": lambda params, recipe: jax.tree.map(
        lambda p: jnp.clip(p, -0.8, 0.8), params
    ),
    "a pruning mask": lambda params, recipe: (
        params | {"kernel": jnp.where(jnp.array([[False, True] * 2] * 2), params["kernel"], 0)}
    ),
    "negated and pruned": lambda params, recipe: params | {"kernel": params["kernel"] * -0.0},
    "an average": lambda params, recipe: jax.tree.map(
        lambda p, f: 0.5 * p.astype(jnp.float32) + 0.5 * f, params, FP32
    ),
    "a tree map": lambda params, recipe: jax.tree.map(lambda p: p * 0.5, params),
}


class Linen:
    """A `TrainState`."""

    def __init__(self, recipe, inner):
        self.state = new_state(START, recipe, inner)

    @property
    def params(self):
        return self.state.params

    def set(self, params):
        self.state = self.state.replace(params=params)

    def step(self, grads):
        self.state = self.state.apply_gradients(grads=grads)

    def masters(self):
        return jaxmp.get_master_params(self.state)

    def optimizer_state(self):
        return self.state.opt_state


@jax.jit
def replace_and_step(state, params, grads):
    return state.replace(params=params).apply_gradients(grads=grads)


class JittedLinen(Linen):
    """A `TrainState` whose parameters are replaced in the compiled step."""

    def set(self, params):
        self.new = params

    def step(self, grads):
        self.state = replace_and_step(self.state, self.new, grads)
        self.new = self.state.params


class Nnx:
    """A module of NNX with its optimizer."""

    def __init__(self, recipe, inner):
        self.model = recipe.wrap(nnx.Linear(2, 4, rngs=nnx.Rngs(0)))
        nnx.update(self.model, jax.tree.map(jnp.asarray, START))
        self.optimizer = jaxmp.nnx.Optimizer(self.model, recipe.optimizer(inner))

    @property
    def params(self):
        return dict(nnx.as_pure(nnx.state(self.model, nnx.Param)))

    def set(self, params):
        nnx.update(self.model, jax.tree.map(jnp.asarray, params))

    def step(self, grads):
        update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
        update(self.model, self.optimizer, nnx.State(jax.tree.map(nnx.Param, grads)))

    def masters(self):
        return dict(jaxmp.optim._find.replace_by_masters(self.params, self.optimizer_state()))

    def optimizer_state(self):
        return nnx.as_pure(self.optimizer.opt_state)


class Optax:
    """A plain loop with `optax.apply_updates`."""

    def __init__(self, recipe, inner):
        self.tx = recipe.optimizer(inner)
        self.opt_state = self.tx.init(START)
        self.params = recipe.cast_params(START)

    def set(self, params):
        self.params, self.opt_state = set_master_params(params, self.opt_state)

    def step(self, grads):
        update = jax.jit(self.tx.update)
        updates, self.opt_state = update(grads, self.opt_state, self.params)
        self.params = optax.apply_updates(self.params, updates)

    def masters(self):
        return jaxmp.optim._find.replace_by_masters(self.params, self.opt_state)

    def optimizer_state(self):
        return self.opt_state


LOOPS = {"Linen": Linen, "jitted Linen": JittedLinen, "NNX": Nnx, "optax": Optax}


def gradients(value):
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value, jnp.float32), START)


def moments(loop):
    return dict(optax.tree.get(loop.optimizer_state(), "trace"))


def dtype_of(leaf):
    return leaf.dtype


def expected(old, masters, new):
    """Returns the masters after a replacement: FP32 exactly, 16 bits by value where they differ."""

    def leaf(before, master, after):
        after = np.asarray(after)
        if after.dtype == np.float32:
            return after
        return np.where(np.asarray(before) == after, master, after.astype(np.float32))

    return jax.tree.map(leaf, old, masters, new)


@fast_cases("optax-bf16_packed", "NNX-bf16_packed", "Linen-bf16_params", "jitted Linen-bf16_packed")
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", LOOPS)
def test_replaced_parameters_are_the_new_masters(kind, name):
    recipe = RECIPES[name]
    for way, replace in WAYS.items():
        loop = LOOPS[kind](recipe, optax.sgd(2.0**-12, momentum=0.5))
        loop.set(loop.params)
        loop.step(gradients(1.0))
        before = jax.tree.map(np.array, moments(loop))
        old, masters = jax.tree.map(np.asarray, (loop.params, loop.masters()))
        new = replace(loop.params, recipe)
        wanted = expected(old, masters, new)
        loop.set(new)
        # A skipped step changes neither the parameters nor the moments, and loses no replacement.
        loop.step(gradients(jnp.nan))
        jax.tree.map(np.testing.assert_array_equal, moments(loop), before)
        remainders = name == "bf16_packed" and "Linen" not in kind
        # Half a unit in the last place of bfloat16, if the old remainder is added to a new value.
        compare = functools.partial(
            np.testing.assert_allclose, rtol=2.0**-8 if remainders else 0, atol=0, err_msg=way
        )
        jax.tree.map(compare, loop.masters(), wanted)

        exact = loop.masters()
        # The next step starts from them, with the old moments.
        loop.step(gradients(0.0))
        after = jax.tree.map(lambda m, b: m - np.float32(2.0**-12) * 0.5 * b, exact, before)
        jax.tree.map(np.testing.assert_array_equal, loop.masters(), after)
        if name != "bf16_packed":
            stored = recipe.cast_params(loop.masters())
            jax.tree.map(np.testing.assert_array_equal, loop.params, stored)
        assert jax.tree.map(dtype_of, loop.params) == jax.tree.map(dtype_of, old)


def test_the_values_of_a_variable_can_be_assigned():
    loop = Nnx(RECIPES["bf16_params"], optax.sgd(1e-3))
    loop.model.kernel[...] = jnp.full((2, 4), 5.0, jnp.bfloat16)
    loop.step(gradients(0.0))
    assert (loop.model.kernel[...] == 5).all() and (loop.masters()["kernel"] == 5).all()
    assert (loop.masters()["bias"] == START["bias"]).all()


def test_nan_and_negative_zero_are_compared_by_their_bits():
    full = {"w": jnp.array([jnp.nan, 0.0, 1.001])}
    state = new_state(full, RECIPES["bf16_params"], optax.sgd(0.0))
    step = jax.jit(lambda state: state.apply_gradients(grads={"w": jnp.zeros(3)}))
    np.testing.assert_array_equal(jaxmp.get_master_params(step(state))["w"], full["w"])
    state = state.replace(params={"w": jnp.array([jnp.nan, -0.0, 1.0], jnp.bfloat16)})
    masters = np.asarray(jaxmp.get_master_params(step(state))["w"])
    assert np.isnan(masters[0]) and np.signbit(masters[1]) and masters[2] == np.float32(1.001)


def test_a_state_in_a_scan_keeps_its_dtypes_and_follows_each_replacement():
    state = Linen(RECIPES["bf16_params"], optax.sgd(1e-3)).state

    def body(state, _):
        clipped = jax.tree.map(lambda p: jnp.clip(p, 0, 0.5), jaxmp.get_master_params(state))
        return state.replace(params=clipped).apply_gradients(grads=gradients(-1.0)), None

    state, _ = jax.lax.scan(body, state, length=3)
    np.testing.assert_allclose(jaxmp.get_master_params(state)["kernel"], 0.501, rtol=1e-6)
    assert state.params["kernel"].dtype == jnp.bfloat16


def test_sharded_states_take_arrays_of_the_host():
    mesh = jax.make_mesh((2,), ("data",))
    for recipe in RECIPES.values():
        state = Linen(recipe, optax.sgd(1e-3)).state
        places = {"kernel": NamedSharding(mesh, P(None, "data")), "bias": NamedSharding(mesh, P())}
        state = jax.device_put(state, jaxmp.state_shardings(state, places))
        before = jax.tree.map(lambda leaf: leaf.sharding, state)
        state = state.replace(params=FP32)
        step = jax.jit(lambda state: state.apply_gradients(grads=gradients(0.0)))
        jax.tree.map(np.testing.assert_array_equal, jaxmp.get_master_params(step(state)), FP32)
        for leaf, place in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
            assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


@pytest.mark.parametrize("name", RECIPES)
def test_arrays_made_from_python_numbers_do_not_retrace_the_step(name):
    state = Linen(RECIPES[name], optax.sgd(1e-3)).state
    step = jax.jit(lambda state: state.apply_gradients(grads=gradients(0.0)))
    state = step(jax.tree.map(jnp.asarray, state))
    filled = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.7), START)
    step(step(state.replace(params=filled)))
    assert step._cache_size() <= 1


def test_masters_stay_where_they_are():
    """Masters are split although the parameters are not (ZeRO-1), or in the memory of the host."""
    mesh = jax.make_mesh((2,), ("data",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "data"))
    for place in (split, whole.with_memory_kind("pinned_host")):
        state = Linen(RECIPES["bf16_params"], optax.sgd(1e-3)).state
        state = jax.device_put(state, whole)
        move = lambda leaf, place=place: jax.device_put(leaf, place) if leaf.ndim == 2 else leaf
        state = state.replace(opt_state=jax.tree.map(move, state.opt_state))
        state = state.replace(params=FP32)
        masters = jaxmp.get_master_params(state)
        assert masters["kernel"].sharding.is_equivalent_to(place, 2)
        assert masters["kernel"].sharding.memory_kind == place.memory_kind
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(masters), FP32)
        jaxmp.check(state)
        if place is split:
            grads = jax.device_put(gradients(0.0), {"kernel": split, "bias": whole})
            state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
            jax.tree.map(np.testing.assert_array_equal, jaxmp.get_master_params(state), FP32)


def test_donating_the_state_keeps_the_arrays_of_the_caller():
    pretrained = jax.tree.map(jnp.asarray, FP32)
    for name in ("bf16_params", "fp16_params", "bf16_packed"):
        state = Linen(RECIPES[name], optax.sgd(1e-3)).state.replace(params=pretrained)
        step = jax.jit(lambda state: state.apply_gradients(grads=gradients(0.0)), donate_argnums=0)
        step(state)
        jax.tree.map(np.testing.assert_array_equal, pretrained, FP32)


def test_averages_follow():
    state = Linen(RECIPES["bf16_params"], optax.sgd(1e-3)).state
    average = jaxmp.optim.fp32_copy(state)
    state.params["kernel"] = jnp.full((2, 4), 5.0, jnp.bfloat16)  # without state.replace
    average = jaxmp.optim.incremental_update(state, average, step_size=0.5)
    np.testing.assert_allclose(average["kernel"], (START["kernel"] + 5) / 2, rtol=1e-6)


def test_other_values_of_params_pass_through_replace():
    state = Linen(RECIPES["bf16_params"], optax.sgd(1e-3)).state
    for params in (None, {"other": jnp.ones(3)}, jax.tree.map(lambda _: P(), START)):
        assert state.replace(params=params).params is params
    both = state.replace(params=FP32, opt_state=state.opt_state)
    assert both.params is FP32 and both.opt_state is state.opt_state

    class Subclass(jaxmp.TrainState):
        extra: int = 0

    state = Subclass.create(apply_fn=None, params=START, tx=state.tx, extra=1)
    new = state.replace(params=FP32, extra=2)
    np.testing.assert_array_equal(jaxmp.get_master_params(new)["bias"], FP32["bias"])
    assert isinstance(new, Subclass) and new.extra == 2


def test_a_plain_loop_with_fp32_parameters_names_the_call_that_sets_both():
    loop = Optax(RECIPES["bf16_params"], optax.sgd(1e-3))
    with pytest.raises(CompositionError, match=r"jaxmp.optim.set_master_params\(params, opt_state"):
        loop.tx.update(gradients(0.0), loop.opt_state, FP32)


@pytest.mark.usefixtures("standard_promotion")
def test_a_skipped_step_restores_the_masters_of_parameters_that_the_forward_pass_wrote():
    loop = Nnx(RECIPES["bf16_params"], optax.sgd(1e-3))
    before = jax.tree.map(np.asarray, (loop.params, loop.masters()))

    def loss_fn(model, factor):
        model.kernel[...] = (model.kernel[...] * 0.5).astype(jnp.bfloat16)
        return jnp.sum(model(jnp.ones((1, 2)))) * factor

    for factor in (np.float32(np.nan), np.float32(1)):
        _, grads = loop.optimizer.value_and_grad(loss_fn)(loop.model, factor)
        loop.optimizer.update(loop.model, grads)
        if factor != factor:
            after = (loop.params, loop.masters())
            jax.tree.map(np.testing.assert_array_equal, after, before)
    np.testing.assert_allclose(loop.masters()["kernel"], before[0]["kernel"] * 0.5, atol=0.0021)


# ---------------------------------------------------------------------------
# Comparisons on the host
# ---------------------------------------------------------------------------

DIFFERS = r"'?:?kernel'? differs from the FP32 masters"


@pytest.mark.parametrize("kind", ["Linen", "NNX"])
def test_check_and_save_compare_parameters_with_their_masters(kind, tmp_path):
    checkpoint = pytest.importorskip("jaxmp.checkpoint")
    recipe = RECIPES["bf16_params"]
    loop = LOOPS[kind](recipe, optax.sgd(1e-3))
    whole = loop.state if kind == "Linen" else loop.optimizer
    saved = loop.state if kind == "Linen" else (loop.model, loop.optimizer)
    jaxmp.check(whole)
    new = jnp.full((2, 4), 5.0, jnp.bfloat16)
    if kind == "Linen":
        whole.params["kernel"] = new  # without state.replace
    else:
        loop.model.kernel[...] = new
    with pytest.warns(RecipeWarning, match=DIFFERS):
        jaxmp.check({"train": whole})
    checkpointer = checkpoint.Checkpointer(tmp_path)
    with pytest.warns(RecipeWarning, match=DIFFERS):
        checkpointer.save(1, saved, recipe=recipe)
    checkpointer.wait()
    # What is restored are the values of the parameters, also by another recipe.
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), START)
    if kind == "Linen":
        full = checkpointer.restore(shapes, only="params")
        assert (full["kernel"] == 5).all() and (full["bias"] == START["bias"]).all()
    loop.step(gradients(0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jaxmp.check(loop.state if kind == "Linen" else loop.optimizer)
    checkpointer.close()


@EXPENSIVE
@pytest.mark.usefixtures("standard_promotion")
def test_the_cost_is_one_read_of_the_stored_parameters():
    """Shows on the CPU that a step without replacement keeps every bit for many steps."""
    for name in ("bf16_params", "fp16_params"):
        loop = Linen(RECIPES[name], optax.adam(1e-3))
        step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
        plain, opt_state = jax.tree.map(jnp.asarray, START), None
        inner = optax.adam(1e-3)
        opt_state = inner.init(plain)
        for number in range(50):
            grads = gradients(float(np.sin(number)))
            loop.state = step(loop.state, grads)
            updates, opt_state = jax.jit(inner.update)(grads, opt_state, plain)
            plain = optax.apply_updates(plain, updates)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-6), loop.masters(), plain
        )
