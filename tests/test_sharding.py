"""Shardings of training states."""

import functools
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxmp
import plan_llama
import sharded_programs
from arrays import changed
from grids import EXPENSIVE
from jaxmp.errors import JaxmpError, RecipeWarning
from jaxmp.optim._shardings import state_shardings
from sharded_runs import bytes_on_first_device
from sources import results_of, text_of


def mesh_of(devices=4, model=1):
    types = (AxisType.Auto,) * 2
    chosen = jax.devices()[: devices * model]
    return jax.make_mesh((devices, model), ("data", "model"), axis_types=types, devices=chosen)


class Model(nn.Module):
    """Two layers; one is in a submodule."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name="out")(nn.tanh(nn.Dense(32, name="in")(x)))


def rows(mesh):
    def sharding(leaf):
        return NamedSharding(mesh, P("data", *(None,) * (leaf.ndim - 1)) if leaf.ndim else P())

    return sharding


def linen_state(recipe, tx, **changes):
    recipe = jaxmp.load_recipe(recipe).replace(**changes)
    model = recipe.wrap(Model())
    params = model.init(jax.random.key(0), jnp.ones((4, 16)))
    return jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=recipe.optimizer(tx))


RECIPES = [("bf16", {}), ("bf16_params", {}), ("bf16_params", {"master": "packed"}), ("fp16", {})]


@pytest.mark.parametrize(("recipe", "changes"), RECIPES)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_parameters_masters_and_moments_share_their_bytes(recipe, changes, devices):
    state = linen_state(recipe, optax.adam(1e-3), **changes)
    shardings = state_shardings(state, jax.tree.map(rows(mesh_of(devices)), state.params))
    whole = bytes_on_first_device(state)
    placed = jax.device_put(state, shardings)
    assert bytes_on_first_device(placed) * devices == whole
    scalars = [leaf for leaf in jax.tree.leaves(placed) if leaf.ndim == 0]
    assert scalars and all(leaf.sharding.is_fully_replicated for leaf in scalars)


def test_the_state_of_fp8_is_replicated():
    state = linen_state("fp8_delayed", optax.adam(1e-3))
    params = jax.tree.map(rows(mesh_of()), state.params["params"])
    shardings = state_shardings(state, {"params": params})
    specs = jax.tree.leaves(shardings.params["_overwrite_with_gradient"])
    assert specs and all(s.is_fully_replicated for s in specs)
    assert shardings.params["params"]["in"]["kernel"].spec == P("data", None)
    moments = [s for s in jax.tree.leaves(shardings.opt_state) if s.spec == P("data", None)]
    assert len(moments) == 4


def test_moments_are_split_over_one_more_axis():
    state = linen_state("bf16_params", optax.adam(1e-3))
    mesh = mesh_of(2, 2)
    columns = lambda leaf: NamedSharding(mesh, P(None, "model") if leaf.ndim == 2 else P())
    specs = jax.tree.map(columns, state.params)
    shardings = state_shardings(state, specs, optimizer="data")
    assert shardings.params == specs
    assert state_shardings(jax.eval_shape(lambda: state), specs, optimizer="data") == shardings
    counts = {}
    for sharding in jax.tree.leaves(shardings.opt_state):
        counts[sharding.spec] = counts.get(sharding.spec, 0) + 1
    scalars = counts.pop(P())
    # Masters and two moments of two kernels and two biases.
    assert counts == {P("data", "model"): 6, P("data"): 6} and scalars


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        ((8, 12), P(), P("data", None)),
        ((6, 8), P(), P(None, "data")),
        ((4, 8, 8), P("model"), P("model", "data", None)),
        ((8, 8), P(None, "data"), P(None, "data")),
        ((8, 8), P(("data", "model")), P(("data", "model"))),
        ((6, 2), P(), P()),
        ((0, 4), P(), P(None, "data")),
    ],
)
def test_moments_are_split_along_the_first_free_dimension(shape, spec, expected):
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    state = {"params": params, "mu": {"inner": params}}
    shardings = state_shardings(state, {"w": NamedSharding(mesh, spec)}, optimizer="data")
    assert shardings["params"]["w"].spec == spec
    assert shardings["mu"]["inner"]["w"].spec == expected


def test_arrays_of_other_shapes_are_replicated():
    state = linen_state("bf16", optax.adafactor(1e-3, min_dim_size_to_factor=4))
    shardings = state_shardings(state, jax.tree.map(rows(mesh_of()), state.params))
    leaves = zip(
        jax.tree.leaves(state.opt_state), jax.tree.leaves(shardings.opt_state), strict=True
    )
    for leaf, sharding in leaves:
        assert sharding.is_fully_replicated or leaf.shape in {(16, 32), (32, 16), (32,), (16,)}
    jax.device_put(state, shardings)


def test_states_of_nnx():
    recipe = jaxmp.load_recipe("bf16_params")
    model = recipe.wrap(nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
    optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.adam(1e-3)))
    state = nnx.state((model, optimizer))
    mesh = mesh_of()
    params = nnx.state(model, nnx.Param)
    shardings = state_shardings(state, {0: jax.tree.map(rows(mesh), params)}[0])
    specs = [s.spec for s in jax.tree.leaves(shardings)]
    # Kernel and bias: parameter, master and two moments.
    assert specs.count(P("data", None)) == specs.count(P("data")) == 4


def train_step(state, batch):
    loss_fn = lambda p, x: jnp.mean(jnp.square(state.apply_fn(p, x) - x))
    loss, grads = state.value_and_grad(loss_fn)(batch)
    return state.apply_gradients(grads=grads), loss


def test_a_step_keeps_the_shardings_and_is_traced_once():
    state = linen_state("bf16_params", optax.sgd(1e-2, momentum=0.9))
    mesh = mesh_of()
    shardings = state_shardings(state, jax.tree.map(rows(mesh), state.params))
    state = jax.device_put(state, shardings)
    step = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
    batch = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, P("data")))
    for _ in range(20):
        state, loss = step(state, batch)
    assert step._cache_size() <= 1 and jnp.isfinite(loss)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings


@EXPENSIVE
def test_masters_and_moments_in_host_memory_train_alike():
    mesh = mesh_of()
    batch = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, P("data")))

    def step(state, batch):
        # Copies masters and moments to the device, if they are not there.
        opt_state = jax.device_put(state.opt_state, shardings.opt_state)
        return train_step(state.replace(opt_state=opt_state), batch)

    def on_host(sharding):
        return sharding.with_memory_kind("pinned_host") if sharding.spec != P() else sharding

    runs = []
    for offload in (False, True):
        state = linen_state("bf16_params", optax.sgd(1e-2, momentum=0.9))
        shardings = state_shardings(state, jax.tree.map(rows(mesh), state.params))
        placed = shardings
        if offload:
            placed = shardings.replace(opt_state=jax.tree.map(on_host, shardings.opt_state))
        state = jax.device_put(state, placed)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(placed, None))
        for _ in range(4):
            state, loss = jitted(state, batch)
        assert jitted._cache_size() <= 1
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == placed
        runs.append((state, loss))
    masters = jax.tree.leaves(jaxmp.get_master_params(runs[1][0]))
    assert {leaf.sharding.memory_kind for leaf in masters} == {"pinned_host"}
    assert not changed(*runs)


def test_moments_of_several_models_in_one_state_cause_a_warning():
    params = {"w": jnp.ones((8, 4))}
    moments = optax.adam(1e-3).init(params)
    split = {"w": NamedSharding(mesh_of(), P("data", None))}
    state = {"params": {"g": params, "d": params}, "moments": {"g": moments, "d": moments}}
    with pytest.warns(RecipeWarning, match=r"replicates 'moments/d/0/mu/w'.*for each of them"):
        state_shardings(state, {"g": split, "d": split})
    state_shardings({"params": params, "moments": moments}, split)  # no warning


LARGE = {"dense": {"kernel": jnp.ones((64, 128)), "bias": jnp.ones(128)}, "out": jnp.ones((128, 8))}


@pytest.mark.parametrize(
    ("tx", "names", "saved"),
    [
        (optax.lbfgs(memory_size=6), ["diff_params_memory/dense/kernel"], 6 * 64 * 128 * 3),
        (optax.flatten(optax.adam(1e-3)), ["0/mu", "0/nu"], (64 * 128 + 128 + 128 * 8) * 3),
        ({"left": {"dense": {"kernel": jnp.ones((64, 64))}}}, ["left/dense/kernel"], 64 * 64 * 3),
        (optax.adafactor(1e-3), [], 0),
        (optax.adamw(1e-3), [], 0),
    ],
)
@pytest.mark.parametrize("optimizer", ["like_params", "data"])
def test_large_arrays_that_are_replicated_cause_a_warning(tx, names, saved, optimizer):
    mesh = mesh_of()
    state = {"params": LARGE, "tx": tx if isinstance(tx, dict) else tx.init(LARGE)}
    params_shardings = jax.tree.map(rows(mesh), LARGE)
    if not names:
        state_shardings(state, params_shardings, optimizer=optimizer)  # no warning
        return
    with pytest.warns(RecipeWarning) as caught:
        shardings = state_shardings(state, params_shardings, optimizer=optimizer)
    (text,) = (str(warning.message) for warning in caught)
    for name in names:
        assert f"{name}'" in text
    # Three of four parts of an FP32 array.
    assert f"{saved / 1e6:.3g} MB per device could be saved" in text
    scope = {"mesh": mesh, "P": P, "PartitionSpec": P, "NamedSharding": NamedSharding}
    scope |= {"state": state, "params_shardings": params_shardings}
    scope["state_shardings"] = functools.partial(state_shardings, optimizer=optimizer)
    exec(textwrap.dedent(text[text.index("    shardings = ") :]), scope)
    before = bytes_on_first_device(jax.device_put(state, shardings))
    after = bytes_on_first_device(jax.device_put(state, scope["shardings"]))
    assert before - after >= saved


def test_a_kernel_without_a_sharding_causes_a_warning():
    state = {"params": LARGE, "tx": optax.adam(1e-3).init(LARGE)}
    placed = jax.tree.map(rows(mesh_of()), LARGE)
    del placed["dense"]["kernel"]
    with pytest.warns(RecipeWarning, match=r"and 2 more, although(?s:.)*'params/dense/kernel': N"):
        state_shardings(state, placed)
    whole = {**placed, "dense/kernel": NamedSharding(mesh_of(), P())}
    assert state_shardings(state, whole)["tx"][0].mu["dense"]["kernel"].spec == P()  # no warning


def test_averages_beside_the_parameters_are_split_like_moments():
    params = {"w": jnp.ones((8, 4))}
    whole = {"w": NamedSharding(mesh_of(), P()).with_memory_kind("pinned_host")}
    state = {"averages": params, "params": params, "step": 0, "rate": 1e-3}
    shardings = state_shardings(state, whole, optimizer="data")
    assert shardings["params"] == whole and shardings["step"].spec == P()
    assert shardings["averages"]["w"].spec == P("data", None)
    assert shardings["averages"]["w"].memory_kind == "pinned_host"


@pytest.mark.parametrize("form", ["tuple", "dict", "nnx"])
def test_averages_beside_a_train_state_are_split_like_moments(form):
    recipe = jaxmp.load_recipe("bf16_params")
    params = {"w": jnp.ones((8, 4))}
    tx = recipe.optimizer(optax.adam(1e-3))
    train = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
    average = jaxmp.optim.fp32_copy(train)
    whole = {"w": NamedSharding(mesh_of(), P())}
    state = {"average": average, "train": train} if form == "dict" else (average, train)
    if form == "nnx":
        model = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))
        optimizer = jaxmp.nnx.Optimizer(model, tx)
        state = nnx.state((jaxmp.nnx.EMA(model, 0.9), model, optimizer))
        whole = {"kernel": whole["w"]}
    shardings = state_shardings(state, whole, optimizer="data")
    if form == "nnx":
        of_average, of_train = shardings[0]["params"]["kernel"], shardings[1]["kernel"]
    else:
        of_average, of_train = shardings.values() if form == "dict" else shardings
        of_average, of_train = of_average["w"], of_train.params["w"]
    assert of_average.spec == P("data", None) and of_train.spec == P()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mesh, p: jax.tree.map(lambda _: P("data"), p), "NamedSharding"),
        (lambda mesh, p: jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), p), "each"),
        (lambda mesh, p: {}, "no sharding"),
        (
            lambda mesh, p: {"x": NamedSharding(mesh, P()), "y": NamedSharding(mesh_of(), P())},
            r"meshes: .*'data': 5.* at 'x' and .*'data': 4.* at 'y'",
        ),
        (lambda mesh, p: {k: NamedSharding(mesh, P()) for k in "xy"}, "contains 'x', 'y', and"),
        (lambda mesh, p: {"lost": NamedSharding(mesh, P())}, "'lost'"),
        (lambda mesh, p: NamedSharding(mesh, P()), "is NamedSharding.*a tree with"),
        (lambda mesh, p: {"on": {"bias": NamedSharding(mesh, P())}}, "no such.*mean 'in/bias'"),
        (lambda mesh, p: p, r"has float32\[32\] at 'in/bias'"),
        (
            lambda mesh, p: {"in": {"bias": NamedSharding(mesh, P("data", None))}},
            r"P\('data', None\) at 'in/bias'.*\(32,\).*at most 1 entries: P\('data',\)",
        ),
        (
            lambda mesh, p: {"in": {"kernel": NamedSharding(mesh, P(None, ("data", "model")))}},
            r"\(16, 32\): 5 devices cannot share dimension 1 evenly.*P\(None, None\)",
        ),
    ],
)
def test_wrong_shardings_are_refused(change, message):
    state = linen_state("bf16", optax.sgd(0.1))
    mesh = jax.sharding.AbstractMesh((5, 1), ("data", "model"))
    with pytest.raises(JaxmpError, match=message):
        state_shardings(state, change(mesh, state.params))


def test_an_unknown_axis_is_refused():
    state = linen_state("bf16", optax.sgd(0.1))
    specs = jax.tree.map(rows(mesh_of()), state.params)
    with pytest.raises(JaxmpError, match=r"optimizer='fsdp' .* 'data', 'model'"):
        state_shardings(state, specs, optimizer="fsdp")


def test_the_page_shows_the_programs_as_measured_and_the_plan_as_compiled():
    page = text_of("docs/measurements.md")
    programs, plan = results_of("sharded_programs_h200"), results_of("plan_llama_h200")
    assert sharded_programs.table_of(programs["rows"], 8) in page
    table = [plan_llama.HEADER, *map(plan_llama.markdown, plan["rows"])]
    assert "\n".join(table) in page and f"JAX {plan['jax']}" in page
