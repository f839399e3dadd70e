"""Roles of the arguments of a step: owners decide, names do not, and only arrays are counted."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
import pytest
from flax import nnx
from flax.training import dynamic_scale

import jaxmp
from grids import fast_cases
from jaxmp.checkpoint._description import flatten_state
from jaxmp.optim._roles import leaves_with_roles

# Flax's `DynamicScale` promotes implicitly.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")

NAMES = ("fp8_proj", "layer_scale", "q_age", "amax_pool")
PARAMS = {name: jnp.ones((8, 8)) for name in NAMES}
X = jnp.ones((4, 8))


def loss_fn(params, x):
    for weight in params.values():
        x = jnp.tanh(x @ weight)
    return jnp.mean(jnp.square(x))


def descend(params, x, rate):
    grads = jax.grad(loss_fn)(params, x)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def test_names_of_parameters_do_not_determine_their_role():
    kinds = jaxmp.estimate_memory(descend, PARAMS, X, 0.1).kinds
    assert (kinds["parameters"], kinds["inputs"], kinds.get("FP8 state", 0)) == (1024, 128, 0)
    tensors = jaxmp.with_stats(descend)(PARAMS, X, 0.1).tensors
    assert set(tensors["parameters"]) == {f"params['{name}']" for name in NAMES}
    assert "fp8_scales" not in tensors
    broken = jax.tree.map(lambda p: p.at[0, 0].set(jnp.nan), PARAMS)
    report = jaxmp.locate_nonfinite(descend, broken, X, 0.1)
    assert report.cause == "poisoned_parameter"
    assert [row.role for row in report.arguments] == ["parameter"] * len(NAMES)
    state = jaxmp.TrainState.create(apply_fn=None, params=PARAMS, tx=optimizer("bf16_params"))
    roles = {leaf.path: leaf.role for leaf in flatten_state(state).description.leaves}
    assert {roles[f"params/{name}"] for name in NAMES} == {"parameter"}


def optimizer(recipe, **changes):
    return jaxmp.load_recipe(recipe).replace(**changes).optimizer(optax.adam(1e-3))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="fp8_proj")(nn.BatchNorm(False, name="layer_scale")(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.fp8_proj = nnx.Linear(32, 32, rngs=rngs)
        self.layer_scale = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def roles(tree):
    """Returns the text of each path -> the role of the leaf."""
    return {jtu.keystr(leaf.path): leaf.role for leaf in leaves_with_roles(tree)}


def test_the_owners_determine_the_roles_of_linen_and_optax():
    recipe = jaxmp.load_recipe("fp8").replace(fp8="delayed")
    params = recipe.wrap(Linen()).init(jax.random.key(0), jnp.ones((16, 32)))
    statistics = params.pop("batch_stats")
    tx = optax.chain(optax.adam(1e-3), optax.ema(0.9))
    tx = jaxmp.load_recipe("bf16_params").replace(master="packed").optimizer(tx)
    state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
    own = roles((state, {"batch_stats": statistics}, dynamic_scale.DynamicScale(), X))
    by_part = {
        "[0].params['params']": "parameter",
        "[0].params['_overwrite": "fp8",
        "packed_masters": "remainder",
        ".stats.": "counter",
        "[0].mu": "moment",
        ".ema": "average",
        "[1]['batch_stats']": "batch statistics",
        "[2]": "loss_scale",
    }
    for part, role in by_part.items():
        assert {own[path] for path in own if part in path} == {role}, part
    assert own["[3]"] == ""
    assert set(roles(jaxmp.fp8.init_state()).values()) == {"fp8"}


def test_the_owners_determine_the_roles_of_nnx():
    model = jaxmp.load_recipe("fp8").replace(fp8="delayed").wrap(Net(nnx.Rngs(0)))
    nodes = model, jaxmp.nnx.EMA(model, 0.9), jaxmp.nnx.Optimizer(model, optimizer("fp16_params"))
    for tree in (nodes, (nnx.state(model), *nodes[1:])):
        own = roles(tree)
        by_end = {"bias": "parameter", "mean": "batch statistics", "fp8_age": "fp8", "key": ""}
        for end, role in by_end.items():
            paths = [path for path in own if path.startswith("[0]") and end in path]
            assert {own[path] for path in paths} == {role}, end
        assert {own[path] for path in own if path.startswith("[1]")} == {"average"}
        assert {own[path] for path in own if "fp32_masters" in path} == {"master"}
        assert own["[2].opt_state.loss_scale.scale_value.value"] == "loss_scale"


# ---------------------------------------------------------------------------
# Arguments that are not arrays
# ---------------------------------------------------------------------------


def scaled(scale, params, x):
    scale, finite, _, grads = scale.value_and_grad(loss_fn)(params, x)
    keep = lambda p, g: jnp.where(finite, p - 0.1 * g, p)
    return scale, jax.tree.map(keep, params, grads)


def counted(state, params, x):
    return state | {"step": state["step"] + 1}, descend(params, x, state["rate"])


class Dropped(eqx.Module):
    dropout: eqx.nn.Dropout
    function: object

    def __call__(self, x):
        return self.function(self.dropout(x, key=jax.random.key(0)))


PROGRAMS = {
    "rate": (lambda rate, p, x: descend(p, x, rate), 0.1),
    "jitted": (jax.jit(lambda rate, p, x: descend(p, x, rate)), 0.1),
    "function": (lambda fn, p, x: descend(p, fn(x), 0.1), jnp.sin),
    "None and text": (lambda _, p, x: descend(p, x, 0.1), [None, "text", {1, 2}]),
    "state": (counted, {"step": 0, "rate": 0.1}),
    "DynamicScale": (scaled, dynamic_scale.DynamicScale()),
    "equinox": (lambda net, p, x: descend(p, net(x), 0.1), Dropped(eqx.nn.Dropout(0.5), jnp.sin)),
}


@fast_cases("rate", "DynamicScale")
@pytest.mark.parametrize("name", PROGRAMS)
def test_python_numbers_and_functions_before_the_parameters(name):
    step, first = PROGRAMS[name]
    assert not jaxmp.audit(step, first, PARAMS, X).errors
    assert jaxmp.estimate_memory(step, first, PARAMS, X).kinds["parameters"] == 1024
    tensors = jaxmp.with_stats(step)(first, PARAMS, X).tensors
    assert len(tensors["parameters"]) == len(NAMES)
    report = jaxmp.locate_nonfinite(step, first, PARAMS, X * jnp.nan)
    assert report.cause == "bad_input" and report.argument == "x"


def test_the_count_of_a_first_state_hides_no_finding():
    def step(count, params, copy, x):
        loss = lambda copy: jnp.mean(
            jnp.square((x.astype(jnp.bfloat16) @ copy).astype(jnp.float32))
        )
        params = params - 0.01 * jax.grad(loss)(copy).astype(jnp.float32)
        return count + 1, params, params.astype(jnp.bfloat16) * 0.999

    params = PARAMS["fp8_proj"]
    for count in (jnp.int32(0), 0):
        report = jaxmp.audit(step, count, params, params.astype(jnp.bfloat16), X)
        assert [finding.check for finding in report.errors] == ["missing_master"]


def test_a_written_argument_keeps_its_place_if_others_are_added():
    def step(state, x):
        state["added"] = jnp.ones(3)
        state["w"] = state["w"] - jax.grad(lambda w: jnp.sum(x @ w))(state["w"])

    tensors = jaxmp.with_stats(step)({"first": 3.0, "w": jnp.ones((8, 8))}, X).tensors
    assert list(tensors["parameters"]) == ["state['w']"]
