"""Masters, skipped steps and their composition, as optax transformations."""

import contextlib
import functools
import re

import flax.jax_utils
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxmp
from arrays import changed, same_bits
from grids import EXPENSIVE, fast_cases
from jaxmp import optim
from jaxmp._core._trees import all_finite
from jaxmp.errors import CompositionError, MasterOverflowError, RecipeWarning
from jaxmp.optim._rounding import pack, unpack
from jaxmp.optim._skip import skip_nonfinite
from relaxed import relaxed
from training_steps import new_state, state_step, with_small_scale

BF16 = jaxmp.PolicyMap("p=bf16,c=bf16,o=f32")
FP16 = jaxmp.PolicyMap("p=f16,c=f16,o=f32")
FP32 = jaxmp.PolicyMap("p=f32,c=bf16,o=f32")


def toy_params(dtype=jnp.float32):
    return {"dense": {"kernel": jnp.ones((4, 3), dtype) / 3, "bias": jnp.zeros(3, dtype)}}


def plain_step(tx):
    """Returns a step of a plain loop of optax, of parameters, a state and gradients."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        with jax.numpy_dtype_promotion("standard"):  # optax.apply_updates adds bf16 and f32
            return optax.apply_updates(params, updates), state

    return step


def adversarial(step, shape):
    """Returns huge, tiny, zero, subnormal and sign-alternating gradients in turn."""
    kinds = jnp.array([1e30, 1e-30, 0.0, 1e-41, 1e-3, 3e38, 1.0], jnp.float32)
    sign = np.where(np.arange(np.prod(shape)) % 2, 1, -1).reshape(shape).astype(np.float32)
    turn = jnp.where(step % 2 == 0, 1.0, -1.0).astype(jnp.float32)
    return kinds[step % kinds.size] * turn * sign


# ---------------------------------------------------------------------------
# Masters
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(("policies", "form"), [(BF16, "fp32"), (BF16, "packed"), (FP16, "fp32")])
@pytest.mark.parametrize("inner", [optax.adam(1e-2), optax.sgd(1e-3, momentum=0.9)])
@fast_cases("inner0-policies0-fp32", "inner1-policies1-packed")
def test_params_are_cast_masters_for_a_thousand_adversarial_steps(policies, form, inner):
    stored = policies.default.param_dtype
    state = new_state(toy_params(), policies, relaxed(inner), master=form)
    cast = (lambda m: pack(m)[0]) if form == "packed" else (lambda m: m.astype(stored))

    def step(state, index):
        state = state.apply_gradients(
            grads=jax.tree.map(lambda p: adversarial(index, p.shape), state.params)
        )
        masters = jaxmp.get_master_params(state)
        as_bits = lambda p: jax.lax.bitcast_convert_type(p, jnp.uint16)
        same = jax.tree.map(lambda m, p: as_bits(cast(m)) == as_bits(p), masters, state.params)
        return state, (jax.tree.map(jnp.all, same), all_finite(masters))

    state, (same, finite) = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(1000)))(state)
    assert all(bool(jnp.all(leaf)) for leaf in jax.tree.leaves((same, finite)))
    assert int(state.step) + int(jaxmp.get_skip_stats(state).total) == 1000


def test_both_forms_train_the_same_masters_as_fp32_parameters():
    """Masters receive FP32 gradients and parameters, and follow the FP32 trajectory exactly."""
    grads = [jax.tree.map(lambda p: jnp.cos(p + i), toy_params()) for i in range(50)]
    final = {}
    for name, policies, form in [
        ("plain", FP32, "auto"),
        ("fp32", BF16, "fp32"),
        ("packed", BF16, "packed"),
    ]:
        state = new_state(toy_params(), policies, relaxed(optax.adamw(1e-2)), master=form)
        step = jax.jit(lambda state, g: state.apply_gradients(grads=g))
        for g in grads:
            state = step(state, g)
        final[name] = jaxmp.get_master_params(state)
    # Equal up to how XLA contracts a * b + c in three different programs: one FP32 ulp per step.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    for name in ("fp32", "packed"):
        jax.tree.map(close, final[name], final["plain"])


@pytest.mark.parametrize("form", ["fp32", "packed"])
def test_plain_optax_loop_lands_on_the_cast_master(form):
    params = toy_params()
    tx = jaxmp.load_recipe(BF16).replace(master=form).optimizer(relaxed(optax.adam(1e-2)))
    state = tx.init(params)
    params = optim._master.cast_params(params, BF16, form)

    step = jax.jit(plain_step(tx))
    for i in range(100):
        params, state = step(
            params, state, jax.tree.map(lambda p: jnp.cos(p.astype(jnp.float32) + i), params)
        )
        held = state.inner_state.masters
        masters = held if form == "fp32" else jax.tree.map(unpack, params, held)
        cast = jax.tree.map(
            lambda m: m.astype(jnp.bfloat16) if form == "fp32" else pack(m)[0], masters
        )
        assert not changed(cast, params), i
    assert step._cache_size() <= 1


def test_moments_are_fp32_whatever_the_parameters_are():
    for form in ("fp32", "packed", "none"):
        tx = jaxmp.load_recipe(BF16).replace(master=form).optimizer(optax.adam(1e-2))
        state = tx.init(toy_params())
        adam = optax.tree.get(state, "mu"), optax.tree.get(state, "nu")
        assert {leaf.dtype for leaf in jax.tree.leaves(adam)} == {np.dtype("float32")}


def test_fp32_parameters_have_no_second_copy_and_none_means_no_masters():
    for policies, form in ((FP32, "auto"), (BF16, "none")):
        recipe = jaxmp.load_recipe(policies).replace(master=form)
        state = recipe.optimizer(optax.sgd(0.1)).init(toy_params())
        assert not jax.tree.leaves(optax.tree.get(state, "masters"))


@pytest.mark.parametrize(
    ("recipe", "form", "inner"),
    [
        ("fp32", "auto", optax.adam(1e-2)),
        ("bf16", "auto", optax.partition({"a": optax.adam(1e-2)}, {"dense": "a"})),
        ("fp16_params", "auto", optax.MultiSteps(optax.sgd(1.0, momentum=0.9), 2)),
        ("bf16_params", "packed", optax.sgd(1.0, momentum=0.9)),
        ("bf16_params", "none", optax.lion(1e-2)),
    ],
)
def test_optax_maps_over_the_states_that_are_like_the_parameters(recipe, form, inner):
    tx = jaxmp.load_recipe(recipe).replace(master=form).optimizer(relaxed(inner))
    params = jaxmp.load_recipe(recipe).cast_params(toy_params())
    state = tx.init(toy_params())
    names = {"dense": {"kernel": "kernel", "bias": "bias"}}
    is_named = jax.tree.leaves(optax.tree.map_params(tx, lambda leaf, name: name, state, names))
    assert [leaf for leaf in is_named if isinstance(leaf, str)] == [
        "kernel" if leaf.shape == (4, 3) else "bias" for leaf in jax.tree.leaves(state) if leaf.ndim
    ]
    same = optax.tree.map_params(tx, lambda leaf, _: leaf, state, params)
    assert jax.tree.structure(same) == jax.tree.structure(state)
    new = jax.eval_shape(tx.update, jax.tree.map(jnp.ones_like, toy_params()), same, params)[1]
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_optax_maps_over_masters_of_some_parameters_as_over_masked_ones():
    policies = jaxmp.PolicyMap("p=bf16,c=bf16,o=f32", [jaxmp.Rule("dense:bias", "p=f32")])
    tx = optim.master_params(optax.sgd(0.1), recipe=policies)
    state, names = tx.init(toy_params()), {"dense": {"kernel": "kernel", "bias": "bias"}}
    is_masked = lambda leaf: isinstance(leaf, optax.MaskedNode)
    named = lambda leaf, name: leaf if is_masked(leaf) else name
    mapped = optax.tree.map_params(tx, named, state, names, is_leaf=is_masked)
    assert mapped.masters == {"dense": {"kernel": "kernel", "bias": optax.MaskedNode()}}


def test_optax_reads_and_sets_fields_of_the_inner_state():
    inner = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    state = jaxmp.load_recipe("bf16_params").optimizer(inner).init(toy_params())
    new = optax.tree.set(state, learning_rate=jnp.float32(0.5))
    assert optax.tree.get(new, "learning_rate") == 0.5
    assert changed(state, new) == [".inner_state.inner_state.hyperparams['learning_rate']"]
    with pytest.raises(AttributeError, match="has no attribute 'hyperparams'") as error:
        _ = state.hyperparams
    suggested = lambda error: eval(str(error.value).splitlines()[-1], names)
    names = {"optax": optax, "opt_state": state}
    assert suggested(error)["learning_rate"] == jnp.float32(0.1)
    # Several states have a count.
    with pytest.raises(AttributeError, match="has no attribute 'count'") as error:
        _ = state.count
    assert len(suggested(error)) > 1 and not hasattr(state, "mu")


@pytest.mark.parametrize("recipe", ["bf16_params", "fp16_params"])
def test_masters_of_parameters_that_were_drawn_in_16_bits_are_named(recipe):
    recipe = jaxmp.load_recipe(recipe)
    dtype = recipe.policies.default.param_dtype
    init = recipe.optimizer(optax.sgd(0.1)).init
    for draw in (jax.nn.initializers.lecun_normal(), jax.nn.initializers.uniform()):
        kernel = lambda dtype, draw=draw: {
            "dense": {"kernel": draw(jax.random.key(0), (128, 128), dtype)}
        }
        with pytest.warns(RecipeWarning, match=r"dense:kernel.*different values") as warned:
            init(kernel(dtype))
        assert warned[0].filename == __file__
        init(kernel(jnp.float32))  # the fix
        init(recipe.cast_params(kernel(jnp.float32)))  # as the parameters of a trained model
        jax.jit(init)(kernel(dtype))  # traced values are unknown
    init({"scale": jnp.ones((128, 128), dtype)})


def test_a_master_that_does_not_fit_skips_the_step_and_check_names_it():
    params = {"a": {"w": jnp.full((2,), 60000.0)}, "b": jnp.ones(2)}
    for skip in ("cond", "select"):
        state = new_state(params, FP16, optax.sgd(1.0), skip=skip)
        grads = {"a": {"w": jnp.array([0.0, -6000.0])}, "b": jnp.ones(2)}
        new = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
        assert all("stats" in path or "loss_scale" in path for path in changed(state, new))
        stats = jaxmp.get_skip_stats(new)
        assert int(stats.total) == 1 and not bool(stats.last_finite)
        with pytest.raises(MasterOverflowError, match=r"'a:w'.*Rule\('a:w', 'p=f32'\)"):
            jaxmp.check(new)
        jaxmp.check(new.apply_gradients(grads=jax.tree.map(jnp.zeros_like, grads)))


def test_packed_is_refused_for_float16_with_a_fix_that_works():
    tx = optim.master_params(optax.sgd(0.1), recipe=FP16, master="packed")
    with pytest.raises(CompositionError, match="dense:bias") as error:
        tx.init(toy_params())
    rule = re.search(r"Rule\(.*\)", str(error.value)).group()
    mended = jaxmp.PolicyMap(
        FP16.default, [eval(rule, {"Rule": jaxmp.Rule}), jaxmp.Rule("**", "p=bf16")]
    )
    optim.master_params(optax.sgd(0.1), recipe=mended, master="packed").init(toy_params())


def test_uncast_parameters_are_refused_in_a_plain_loop():
    tx, params = jaxmp.load_recipe(BF16).optimizer(optax.sgd(0.1)), toy_params()
    with pytest.raises(CompositionError, match=r"recipe.cast_params\(params\)"):
        tx.update(params, tx.init(params), params)


def test_an_unknown_master_is_refused_with_the_menu():
    with pytest.raises(CompositionError, match=r"fp64.*Allowed.*auto"):
        optim.master_params(optax.sgd(0.1), recipe=FP32, master="fp64")


# ---------------------------------------------------------------------------
# The guard
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("skip", ["cond", "select"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@fast_cases("nan-cond", "inf-cond", "-inf-select")
def test_a_nonfinite_gradient_changes_only_scale_and_counters(skip, bad):
    schedule = optax.linear_schedule(1e-2, 0, 9)
    tx = mixed(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), skip=skip)
    params = optim._master.cast_params(toy_params(), BF16)
    state = tx.init(toy_params())
    grads = jax.tree.map(lambda p: jnp.ones(p.shape), params)
    _, state = tx.update(grads, state, params)
    grads["dense"]["bias"] = grads["dense"]["bias"].at[1].set(bad)
    for update in (tx.update, jax.jit(tx.update)):
        updates, new = update(grads, state, params)
        assert all(not np.any(u) for u in jax.tree.leaves(updates))
        paths = changed(state, new)
        assert paths and all(".loss_scale" in p or ".stats" in p for p in paths)
        assert float(new.loss_scale.scale_value) == 2.0**15


@pytest.mark.parametrize("skip", ["cond", "select"])
def test_counters(skip):
    tx = skip_nonfinite(
        optax.sgd(0.1), skip=skip, loss_scale=jaxmp.DynamicLossScale(init_scale=4.0, min_scale=2.0)
    )
    state = tx.init(jnp.ones(2))
    good, bad = jnp.ones(2), jnp.array([1.0, jnp.nan])
    seen = []
    for grads in (bad, bad, bad, good, bad):
        _, state = tx.update(grads, state)
        stats = jaxmp.get_skip_stats(state)
        counters = stats.total, stats.consecutive, stats.at_floor, stats.last_finite
        seen.append(tuple(map(int, counters)))
    assert seen == [(1, 1, 0, 0), (2, 2, 1, 0), (3, 3, 2, 0), (3, 0, 0, 1), (4, 1, 1, 0)]


@pytest.mark.parametrize(
    "around",
    [
        jaxmp.load_recipe(FP32).optimizer,
        skip_nonfinite,
        optim.master_params,
    ],
    ids=["recipe", "skip_nonfinite", "master_params"],
)
def test_sixteen_bit_gradients_reach_the_inner_transformation_in_fp32(around):
    seen = []
    tx = around(optax.stateless(lambda g, p: seen.append(jax.tree.leaves(g)[0].dtype) or g))
    params = toy_params()
    tx.update(jax.tree.map(lambda p: p.astype(jnp.float16), params), tx.init(params), params)
    assert set(seen) == {np.dtype("float32")}


def test_auto_skip_asks_for_the_compile_target():
    tx = skip_nonfinite(optax.sgd(0.1))
    state = tx.init(jnp.ones(2))
    jaxpr = lambda: str(jax.make_jaxpr(tx.update)(jnp.ones(2), state))
    assert "cond[" in jaxpr()
    with jaxmp._core._compat.context(target="gpu"):
        assert "cond[" not in jaxpr()


# ---------------------------------------------------------------------------
# Composition
# ---------------------------------------------------------------------------


def quadratic(params):
    return sum(jnp.sum(p.astype(jnp.float32) ** 2) for p in jax.tree.leaves(params))


MIXED = jaxmp.load_recipe(BF16).replace(loss_scale="dynamic")


def mixed(inner=None, **changes):
    inner = relaxed(optax.adamw(1e-2) if inner is None else inner)
    return MIXED.replace(**changes).optimizer(inner)


COMPOSITIONS = {
    "plain": lambda: mixed(),
    "chain": lambda: optax.chain(optax.identity(), mixed()),
    "chain inside": lambda: mixed(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))),
    "inject_hyperparams inside": lambda: mixed(
        optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2)
    ),
    "inject_hyperparams outside": lambda: relaxed(
        optax.inject_hyperparams(lambda learning_rate: mixed(optax.sgd(learning_rate)))(
            learning_rate=1e-2
        )
    ),
    "masked": lambda: optax.masked(mixed(), {"dense": {"kernel": True, "bias": True}}),
    "partition inside": lambda: mixed(
        optax.partition(
            {"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, {"dense": {"kernel": "a", "bias": "b"}}
        )
    ),
    "MultiSteps inside": lambda: mixed(
        optax.MultiSteps(relaxed(optax.adamw(1e-2)), 2).gradient_transformation()
    ),
    "stochastic rounding": lambda: optim.stochastic_rounding(mixed(master="none")),
    "packed": lambda: mixed(master="packed"),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
@fast_cases(
    *("chain", "inject_hyperparams inside", "partition inside", "stochastic rounding"),
    "packed",
)
def test_compositions_train_skip_and_keep_their_types(name):
    tx = COMPOSITIONS[name]()
    state = jaxmp.TrainState.create(apply_fn=None, params=toy_params(), tx=tx)
    types = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state)
    before = float(quadratic(state.params))

    step = jax.jit(state_step(lambda p, x: quadratic(p) * x))
    for _ in range(6):
        state, _ = step(state, jnp.float32(1.0))
    assert float(quadratic(state.params)) < before
    skipped, _ = step(state, jnp.float32(jnp.inf))
    counters = re.compile(r"loss_scale|stats|\.key")
    assert all(counters.search(path) for path in changed(state, skipped))
    assert int(jaxmp.get_skip_stats(skipped).total) == 1
    assert float(jaxmp.get_loss_scale(skipped).scale_value) == 2.0**15
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), skipped) == types
    assert step._cache_size() <= 1


@pytest.mark.parametrize(
    ("wrap", "fix"),
    [
        (lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(), "optax.MultiSteps(inner"),
        (lambda tx: optax.apply_if_finite(tx, 3), "recipe.optimizer(inner)"),
        (lambda tx: optax.chain(tx, optax.scale(0.5)), "recipe.optimizer(optax.chain(inner"),
        (lambda tx: optax.chain(optax.chain(tx, optax.scale(0.5))), "optax.chain(inner"),
        (
            lambda tx: optax.partition(
                {"a": tx, "b": mixed()}, {"dense": {"kernel": "a", "bias": "b"}}
            ),
            "recipe.optimizer(optax.partition(",
        ),
        (lambda tx: optax.named_chain(("a", tx), ("b", optax.scale(0.5))), "optax.chain(inner"),
        (lambda tx: optim.stochastic_rounding(tx), "StochasticRoundingState"),
        (lambda tx: optax.contrib.schedule_free(tx, 1.0), "ScheduleFreeState"),
        (jaxmp.load_recipe(BF16).optimizer, "recipe.optimizer(inner)"),
    ],
)
def test_what_would_break_silently_is_refused(wrap, fix):
    with pytest.raises(CompositionError, match=re.escape(fix)):
        jaxmp.TrainState.create(apply_fn=None, params=toy_params(), tx=wrap(mixed()))


def nan_to_num(updates, params):
    del params
    return jax.tree.map(jnp.nan_to_num, updates)


def in_groups(one, other):
    return optax.partition({"a": one, "b": other}, {"a": "a", "b": "b"})


def after(first):
    return lambda tx: optax.chain(first, tx)


RECIPE = jaxmp.load_recipe("fp16")
SGD = optax.sgd(0.5)
# Wrapper -> what a plain optax loop does with it, and what a train state does.
OUTSIDE = {
    "MultiSteps": (lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(), "raises", False),
    "apply_if_finite": (lambda tx: optax.apply_if_finite(tx, 3), "raises", False),
    "zero_nans": (after(optax.zero_nans()), "raises", True),
    "zero_nans, named": (
        lambda tx: optax.named_chain(("a", optax.zero_nans()), ("b", tx)),
        "raises",
        True,
    ),
    "apply_if_finite in front": (after(optax.apply_if_finite(optax.identity(), 3)), "raises", True),
    "trace": (after(optax.trace(0.9)), "raises", True),
    "trace after": (lambda tx: optax.chain(tx, optax.trace(0.9)), "raises", True),
    "partition": (lambda tx: in_groups(tx, SGD), "raises", True),
    "masked": (
        lambda tx: optax.chain(
            optax.masked(tx, {"a": True, "b": False}), optax.masked(SGD, {"a": False, "b": True})
        ),
        "raises",
        True,
    ),
    "nan_to_num": (after(optax.stateless(nan_to_num)), "warns", True),
    "clip": (after(optax.clip(1.0)), "warns", True),
    "clip_by_global_norm": (after(optax.clip_by_global_norm(1.0)), "warns", True),
    "frozen": (lambda tx: in_groups(tx, optax.set_to_zero()), "trains", True),
    "scale after": (lambda tx: optax.chain(tx, optax.scale(0.5)), "trains", True),
    "inject_hyperparams": (
        lambda tx: optax.inject_hyperparams(lambda rate: RECIPE.optimizer(optax.sgd(rate)))(0.5),
        "trains",
        True,
    ),
    "flatten": (optax.flatten, "trains", False),
    "lookahead": (lambda tx: optax.lookahead(tx, 5, 0.5), "trains", True),
}


def outside_params(name):
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    return optax.LookaheadParams.init_synced(params) if name == "lookahead" else params


@pytest.mark.parametrize("name", OUTSIDE)
def test_wrappers_in_a_plain_loop_train_right_or_are_named(name):
    wrap, outcome, _ = OUTSIDE[name]
    tx, params = relaxed(wrap(RECIPE.optimizer(SGD))), outside_params(name)
    state, step = tx.init(params), plain_step(tx)
    calls = (
        lambda: jaxmp.get_loss_scale(state),
        lambda: jaxmp.check({"params": params, "opt_state": state}),
        lambda: jaxmp.audit(step, params, state, {"a": jnp.ones(2), "b": jnp.ones(2)}),
    )
    fix = r"recipe.optimizer\(optax\.\w+|recipe.optimizer\(inner\)"
    checks = {
        "raises": lambda: pytest.raises(CompositionError, match=fix),
        "warns": lambda: pytest.warns(RecipeWarning, match=fix),
    }
    for call in calls:
        with checks.get(outcome, contextlib.nullcontext)():
            call()
    if outcome == "trains":
        grads = {"a": jnp.ones(2), "b": jnp.ones(2)}
        moved, state = step(params, state, grads)
        kept, state = step(moved, state, grads | {"a": jnp.array([1.0, jnp.inf])})
        assert not changed(moved, kept)
        assert float(jaxmp.get_loss_scale(state).scale_value) == 2.0**15
        again, state = step(kept, state, grads)
        assert changed(kept, again)


@pytest.mark.parametrize("name", OUTSIDE)
def test_wrappers_in_a_train_state_train_right_or_are_refused(name):
    """The state reads the gradients before any wrapper, also those that another group has."""
    wrap, _, is_allowed = OUTSIDE[name]
    tx, params = relaxed(wrap(RECIPE.optimizer(SGD))), outside_params(name)
    create = lambda: jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
    if not is_allowed:
        with pytest.raises(CompositionError, match=r"recipe\.optimizer"):
            create()
        return
    grads = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = create().apply_gradients(grads=grads)
    for bad in (jnp.inf, jnp.nan):
        for group in "ab":
            planted = grads | {group: jnp.array([1.0, bad])}
            skipped = state.apply_gradients(grads=planted)
            moved = changed(state, skipped)
            assert moved and all("loss_scale" in p or "stats" in p for p in moved)
            assert float(skipped.loss_scale.scale_value) == 2.0**15
            assert jax.tree.structure(skipped) == jax.tree.structure(state)
    jaxmp.check(skipped)
    assert changed(skipped.params, skipped.apply_gradients(grads=grads).params)


def test_states_of_several_optimizers_are_checked_one_by_one():
    params = {"w": jnp.ones(2)}
    first, second = (mixed(optax.sgd(0.5)).init(params) for _ in range(2))
    jaxmp.check((first, second))
    jaxmp.check({"generator": (params, first), "discriminator": optax.adam(0.1).init(params)})
    wrapped = optax.apply_if_finite(mixed(), 3).init(params)
    with pytest.raises(CompositionError, match="apply_if_finite"):
        jaxmp.check((first, wrapped))
    # A train state was checked when it was created.
    tx = optax.chain(optax.trace(0.9), mixed(optax.sgd(0.5), policies=FP32))
    state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
    jaxmp.check([state, first])
    jaxmp.check((optax.LookaheadParams.init_synced(params), first))


def test_state_around_the_guard_is_restored_on_a_skip():
    """Otherwise, momentum outside of the guard would keep the NaN permanently."""
    after = optax.trace(0.9), optax.scale(0.5)  # allowed for FP32 parameters
    tx = optax.chain(optax.trace(0.9), mixed(optax.sgd(0.5), policies=FP32), *after)
    state = jaxmp.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    state = state.apply_gradients(grads={"w": jnp.ones(2)})
    np.testing.assert_allclose(state.params["w"], 0.75)
    skipped = state.apply_gradients(grads={"w": jnp.array([1.0, jnp.nan])})
    assert all("loss_scale" in p or "stats" in p for p in changed(state, skipped))


# ---------------------------------------------------------------------------
# Access to the state
# ---------------------------------------------------------------------------


def test_master_params_are_those_of_a_bare_state_or_fp32_parameters():
    state = jaxmp.TrainState.create(apply_fn=None, params=toy_params(), tx=mixed(policies=FP32))
    assert not changed(state.params, jaxmp.get_master_params(state))
    bare = jaxmp.get_master_params(mixed().init(toy_params()))
    assert bare["dense"]["kernel"].dtype == jnp.float32
    for bare, message in [
        (state.opt_state, r"get_master_params\(train_state\)"),
        (mixed(master="packed").init(toy_params()), "only the remainders"),
    ]:
        with pytest.raises(jaxmp.JaxmpError, match=message):
            jaxmp.get_master_params(bare)


def test_a_state_without_a_scale_says_how_to_get_one():
    with pytest.raises(jaxmp.JaxmpError, match=r"recipe.optimizer\(inner\)"):
        jaxmp.get_loss_scale(optax.adam(1e-3).init(toy_params()))


# ---------------------------------------------------------------------------
# Stochastic rounding
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("value", [1.0 + 2.0**-12, 3.1e-5, -7.7e-6, 123.4567])
def test_stochastic_rounding_is_unbiased_and_lands_on_neighbours(dtype, value):
    value = np.float32(value)
    count = 200_000
    rounded = optim._rounding.round_stochastically(jax.random.key(1), jnp.full(count, value), dtype)
    rounded = np.asarray(rounded.astype(jnp.float32), np.float64)
    lower, upper = sorted({*rounded.tolist()})[0], sorted({*rounded.tolist()})[-1]
    assert lower <= value <= upper and len({*rounded.tolist()}) <= 2
    spacing = upper - lower
    # Four standard errors of the mean of a Bernoulli variable.
    assert abs(rounded.mean() - float(value)) <= 4 * 0.5 * spacing / np.sqrt(count)


@given(st.floats(width=16, allow_nan=False, allow_infinity=False))
@settings(max_examples=40)
def test_stochastic_rounding_keeps_what_fits(value):
    kept = optim._rounding.round_stochastically(
        jax.random.key(3), jnp.full(8, value, jnp.float32), jnp.float16
    )
    assert same_bits(kept, jnp.full(8, value, jnp.float16))


@pytest.mark.parametrize(("dtype", "beyond"), [(jnp.float16, 65520), (jnp.bfloat16, 3.3961e38)])
def test_stochastic_rounding_overflows_where_rounding_to_nearest_does(dtype, beyond):
    largest = float(jnp.finfo(dtype).max)
    limit = np.float32(beyond)  # the middle between it and the next power of two
    values = np.float32([largest, (largest + beyond) / 2, np.nextafter(limit, 0), limit, np.inf])
    values = np.float32([values, -values])[..., None]
    values = jnp.broadcast_to(values, (2, 5, 1000))
    rounded = optim._rounding.round_stochastically(jax.random.key(0), values, dtype)
    assert same_bits(rounded, values.astype(dtype))
    assert jnp.isfinite(rounded).all((0, 2)).tolist()[:2] == [True, True]


def test_stochastic_rounding_learns_where_rounding_to_nearest_stalls():
    params = {"w": jnp.ones(4096, jnp.bfloat16)}
    tx = optim.stochastic_rounding(optax.sgd(1e-3), seed=7)
    state = tx.init(params)

    step = jax.jit(plain_step(tx))
    for _ in range(100):
        params, state = step(params, state, {"w": jnp.ones(4096)})
    mean = float(params["w"].astype(jnp.float32).mean())
    assert abs(mean - 0.9) < 2e-3


def test_stochastic_rounding_is_a_function_of_its_state():
    params = {"w": jnp.ones(64, jnp.bfloat16)}
    grads = {"w": jnp.ones(64)}
    tx = optim.stochastic_rounding(optax.sgd(1e-3), seed=1)
    state = tx.init(params)
    first, after = tx.update(grads, state, params)
    again, _ = tx.update(grads, state, params)
    later, _ = tx.update(grads, after, params)
    assert not changed(first, again) and changed(first, later)


# ---------------------------------------------------------------------------
# Several devices
# ---------------------------------------------------------------------------


def sum_of_squares(params, batch):
    return jnp.mean((params["w"].astype(jnp.float32)[None] - batch) ** 2)


def mesh_of_four():
    return Mesh(np.array(jax.devices()[:4]), ("d",), axis_types=(AxisType.Auto,))


def by_shard_map(step, state, batch, check_vma):
    mapped = jax.shard_map(
        step,
        mesh=mesh_of_four(),
        in_specs=(P(), P("d")),
        out_specs=(P(), P()),
        check_vma=check_vma,
    )
    return jax.jit(mapped)(state, batch)


def by_pmap(step, state, batch):
    """Runs a step under `pmap`, as the imagenet and lm1b examples of Flax do."""
    devices = jax.devices()[:4]
    parts = batch.reshape(4, -1, *batch.shape[1:])
    replicated = flax.jax_utils.replicate(state, devices)
    out = jax.pmap(step, axis_name="d", devices=devices)(replicated, parts)
    return flax.jax_utils.unreplicate(out)


def by_vmap(step, state, batch):
    parts = batch.reshape(4, -1, *batch.shape[1:])
    out = jax.vmap(step, in_axes=(None, 0), axis_name="d")(state, parts)
    return jax.tree.map(lambda x: x[0], out)


MAPPED = {
    "pmap": by_pmap,
    "vmap": by_vmap,
    "shard_map": lambda *args: by_shard_map(*args, check_vma=True),
    "shard_map without vma": lambda *args: by_shard_map(*args, check_vma=False),
}


@pytest.mark.parametrize("how", MAPPED)
@pytest.mark.parametrize("recipe", ["fp16_params", "bf16"])
@fast_cases("bf16-vmap", "fp16_params-shard_map")
def test_an_optimizer_with_an_axis_averages_over_it_once(how, recipe):
    """`init` runs outside of the mapped function; only the optimizer has `axis_name`."""
    recipe, params = with_small_scale(recipe), {"w": jnp.linspace(-1.0, 1.0, 3)}
    create = lambda axis: new_state(params, recipe, relaxed(optax.adam(0.1)), axis_name=axis)

    def step(state, batch):
        loss, grads = state.value_and_grad(sum_of_squares)(batch)
        return state.apply_gradients(grads=grads), (loss, grads)

    batch = jax.random.normal(jax.random.key(0), (8, 3))
    whole, (loss, grads) = jax.jit(step)(create(None), batch)
    state, (mean_loss, mean_grads) = MAPPED[how](step, create("d"), batch)
    np.testing.assert_allclose(mean_loss, loss, rtol=1e-6)
    # FP16 parameters round their gradient of each part to FP16.
    rtol = 1e-5 if recipe.name == "bf16" else 1e-3
    np.testing.assert_allclose(mean_grads["w"], grads["w"], rtol=rtol, atol=1e-7)
    np.testing.assert_allclose(
        jaxmp.get_master_params(state)["w"],
        jaxmp.get_master_params(whole)["w"],
        rtol=rtol,
        atol=1e-6,
    )
    skipped, _ = MAPPED[how](step, create("d"), batch.at[5].set(jnp.inf))
    assert int(skipped.step) == 0 and int(jaxmp.get_skip_stats(skipped).total) == 1
    jaxmp.check(state)


@EXPENSIVE
def test_an_nnx_optimizer_with_an_axis_averages_over_it():
    recipe = jaxmp.load_recipe("bf16")
    tx = recipe.optimizer(optax.sgd(0.1), axis_name="d")

    def step(x):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        optimizer = jaxmp.nnx.Optimizer(model, tx)
        with pytest.raises(CompositionError, match=r"axis_name='e'.*axis_name='d'"):
            optimizer.value_and_grad(lambda m, x: m(x).mean(), axis_name="e")(model, x)
        loss, grads = optimizer.value_and_grad(lambda m, x: m(x).mean())(model, x)
        optimizer.update(model, grads)
        return loss, grads["kernel"][...], optimizer.step[...]

    x = jax.random.normal(jax.random.key(0), (4, 2, 3)).at[1, 0, 0].set(7.0)
    losses, grads, steps = jax.vmap(step, axis_name="d")(x)
    np.testing.assert_allclose(grads[1], x.mean((0, 1))[:, None], rtol=1e-6)
    assert len(set(losses.tolist())) == 1 and steps.tolist() == [1] * 4
    steps = jax.vmap(step, axis_name="d")(x.at[1].set(jnp.nan))[2]
    assert steps.tolist() == [0] * 4


def test_a_value_and_grad_with_another_axis_is_refused():
    create = lambda **axis: new_state({"w": jnp.ones(3)}, "bf16", **axis)
    with pytest.raises(CompositionError, match=r"axis_name='d'.*axis_name=None.*optimizer\(inner"):
        create().value_and_grad(sum_of_squares, axis_name="d")
    with pytest.raises(CompositionError, match=r"axis_name='e'.*axis_name='d'"):
        create(axis_name="d").value_and_grad(sum_of_squares, axis_name="e")
    create(axis_name="d").value_and_grad(sum_of_squares, axis_name=("d",))
    # In a state without jaxmp's optimizer, `axis_name` can only be passed to value_and_grad.
    plain = jaxmp.TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1))
    plain.value_and_grad(sum_of_squares, axis_name="d")


def test_a_step_outside_of_the_mapped_function_is_explained():
    params = {"w": jnp.ones(3)}
    state = new_state(params, "bf16", axis_name="d")
    message = r"axis_name='d'.*jax.pmap\(train_step, axis_name='d'\)"
    with pytest.raises(CompositionError, match=message):
        state.apply_gradients(grads=params)
    with pytest.raises(CompositionError, match=message):
        state.value_and_grad(sum_of_squares)(jnp.ones((2, 3)))


@pytest.mark.parametrize("skip", ["cond", "select"])
def test_parameters_sharded_by_shard_map_train_and_skip_together(skip):
    def one(w, grad):
        state = new_state({"w": w}, FP16, optax.sgd(1.0), axis_name="d", skip=skip)
        new = state.apply_gradients(grads={"w": grad})
        return new.params["w"], new.step

    options = {"mesh": mesh_of_four(), "in_specs": (P("d"), P("d")), "out_specs": (P("d"), P())}
    sharded = jax.jit(jax.shard_map(one, **options))
    w = jnp.full(8, 2.0)
    moved, step = sharded(w, jnp.ones(8))
    assert int(step) == 1 and set(moved.tolist()) == {1.0}
    kept, step = sharded(w.at[7].set(65000.0), jnp.ones(8).at[7].set(-1000.0))
    assert int(step) == 0 and kept[0] == 2.0


def test_a_stored_value_that_never_fit_is_named_at_once():
    state = new_state({"w": jnp.full(2, 70000.0)}, FP16, optax.sgd(1.0))
    with pytest.raises(MasterOverflowError, match="':w'"):
        jaxmp.check(state)


@pytest.mark.parametrize("skip", ["select", "cond"])
@pytest.mark.parametrize("master", ["fp32", "packed"])
def test_bfloat16_masters_saturate_and_check_names_them_in_the_next_step(master, skip):
    params = {"a": {"v": jnp.ones(2), "w": jnp.full(2, 3.38e38)}}
    state = new_state(params, BF16, optax.sgd(1e20), master=master, skip=skip)
    grads = lambda value: {"a": {"v": jnp.zeros(2), "w": jnp.full(2, value)}}
    state = state.apply_gradients(grads=grads(-3e18))
    assert bool(all_finite(state.params)) and int(state.step) == 1
    jaxmp.check(state)
    # Such a parameter usually makes the next gradients infinite.
    for value in (jnp.inf, jnp.inf, 0.0):
        state = state.apply_gradients(grads=grads(value))
        with pytest.raises(MasterOverflowError, match=r"'a:w'.*saturated"):
            jaxmp.check(state)
    assert int(state.step) == 2
    state = state.apply_gradients(grads=grads(1e18)).apply_gradients(grads=grads(0.0))
    jaxmp.check(state)


def test_the_update_has_no_check_of_new_bfloat16_masters():
    """XLA:GPU would write these masters to memory in FP32, for the check and for the parameters."""
    state = new_state({"w": jnp.ones(7)}, BF16, optax.sgd(0.5), skip="none")
    step = lambda state, grads: state.apply_gradients(grads=grads).params
    jaxpr = jax.make_jaxpr(step)(state, {"w": jnp.ones(7)}).jaxpr
    (clamp,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "clamp"]
    readers = [eqn.primitive.name for eqn in jaxpr.eqns if clamp.invars[1] in eqn.invars]
    assert readers == ["clamp"]


def test_check_reads_ensembles_and_explains_itself_under_jit():
    params = jax.tree.map(lambda p: jnp.stack([p, p]), toy_params())
    states = jax.vmap(lambda p: new_state(p, MIXED))(params)
    jaxmp.check(states)
    with pytest.raises(jaxmp.JaxmpError, match="on the host"):
        jax.jit(lambda s: jaxmp.check(s))(states)


def test_paths_that_collide_are_refused():
    params = {"a": {"b": {"c": jnp.ones(2)}}, "a/b": {"c": jnp.ones(2)}}
    with pytest.raises(CompositionError, match="'a/b:c'"):
        mixed().init(params)


def test_donation_takes_nothing_of_the_callers():
    """Covers an array in the hyper-parameters, and parameters that the inner state stores."""
    rate = jnp.float32(0.1)
    keeps = optax.GradientTransformation(
        lambda params: {"anchor": params}, lambda u, s, params=None: (u, s)
    )
    inner = optax.chain(optax.inject_hyperparams(optax.sgd)(learning_rate=rate), keeps)
    params = toy_params()
    for policies in (BF16, BF16, FP32, FP32):
        tx = mixed(inner, policies=policies)
        state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
        grads = jax.tree.map(jnp.ones_like, params)
        jax.jit(lambda s, g: s.apply_gradients(grads=g), donate_argnums=0)(state, grads)
    assert float(rate) == np.float32(0.1)


@pytest.mark.parametrize(
    "tx",
    [
        jaxmp.load_recipe("bf16").optimizer(optax.adamw(1e-3)),
        optim.master_params(optax.adamw(1e-3), recipe="bf16"),
    ],
    ids=["recipe", "master_params"],
)
def test_the_state_of_fp8_scaling_is_no_parameter(tx):
    state = {"_overwrite_with_gradient": {"w": jnp.zeros(())}}
    variables = {"params": {"w": jnp.ones(2)}, **state}
    with pytest.raises(CompositionError, match=r"TrainState.create\(params=variables"):
        tx.init(variables)
    tx.init(variables["params"])
