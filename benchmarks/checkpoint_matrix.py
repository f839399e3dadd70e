"""Restores checkpoints of every recipe under every other recipe, in Linen and NNX.

    python benchmarks/checkpoint_matrix.py
    python benchmarks/checkpoint_matrix.py --framework nnx --sources bf16_params,packed

Each pair of recipes must restore exactly (the same recipe), or be refused without `migrate=True`
and then migrate with a printed plan. FP32 masters must be preserved bit for bit, and five further
steps must equal those of a reference state that is built from the same masters and moments.
The recipe "packed" is bf16_params with master="packed".

    python benchmarks/checkpoint_matrix.py --averages

Each pair of recipes, each kind of state, with an average of the parameters that is stored like them
or in FP32, before and after the model in the order of names: every FP32 value must be exact, or the
migration refused. It is refused only where the average would be rounded, or where nothing in the
checkpoint distinguishes the average from the parameters.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx

import jaxmp
from jaxmp.checkpoint import Checkpointer

FEATURES = 16
RECIPES = (*jaxmp.list_recipes(), "packed")
X, Y = np.random.default_rng(0).normal(size=(2, 8, FEATURES)).astype(np.float32)


@functools.cache
def recipe_of(name: str) -> jaxmp.Recipe:
    """The recipe of that name."""
    if name == "packed":
        return jaxmp.load_recipe("bf16_params").replace(master="packed")
    return jaxmp.load_recipe(name)


@functools.cache
def optimizer_of(name: str) -> optax.GradientTransformation:
    """Adam under a recipe; the same object each time, so that states compare equal."""
    return recipe_of(name).optimizer(optax.adamw(1e-2))


# ---------------------------------------------------------------------------
# Two frameworks
# ---------------------------------------------------------------------------


class Linen:
    """A two-layer perceptron in Linen; its state is a TrainState."""

    class Model(nn.Module):
        """Two dense layers."""

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            """Returns outputs as wide as the inputs."""
            x = nn.relu(nn.Dense(FEATURES, name="first")(x))
            return nn.Dense(FEATURES, name="second")(x)

    @staticmethod
    def make(name: str, seed: int = 0, params: Any = None) -> jaxmp.TrainState:
        """The first state, or one with these FP32 parameters."""
        model = recipe_of(name).wrap(Linen.Model())
        variables = dict(model.init(jax.random.key(seed), X))
        if params is not None:
            variables["params"] = params
        return jaxmp.TrainState.create(
            apply_fn=model.apply, params=variables, tx=optimizer_of(name)
        )

    @staticmethod
    @functools.cache
    def step(name: str) -> Callable[..., Any]:
        """The train step."""
        model = recipe_of(name).wrap(Linen.Model())

        def loss_fn(variables: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.mean((model.apply(variables, x).astype(jnp.float32) - y) ** 2)

        @jax.jit
        def train_step(state: jaxmp.TrainState) -> jaxmp.TrainState:
            _, grads = state.value_and_grad(loss_fn)(X, Y)
            return state.apply_gradients(grads=grads)

        return train_step

    @staticmethod
    def masters(state: jaxmp.TrainState) -> Any:
        """The FP32 values of the parameters."""
        return jaxmp.get_master_params(state)["params"]

    @staticmethod
    def optimizer_state(state: jaxmp.TrainState) -> Any:
        """The optimizer state."""
        return state.opt_state

    @staticmethod
    def with_optimizer_state(state: jaxmp.TrainState, opt_state: Any) -> jaxmp.TrainState:
        """The state with another optimizer state."""
        return state.replace(opt_state=opt_state)

    @staticmethod
    def arrays(state: jaxmp.TrainState) -> list[Any]:
        """All arrays."""
        return jax.tree.leaves(state)


class Nnx:
    """The same in NNX; its state is a tuple of the model and the optimizer."""

    class Model(nnx.Module):
        """Two linear layers."""

        def __init__(self, *, rngs: nnx.Rngs) -> None:
            """Makes the layers."""
            self.first = nnx.Linear(FEATURES, FEATURES, rngs=rngs)
            self.second = nnx.Linear(FEATURES, FEATURES, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            """Returns outputs as wide as the inputs."""
            return self.second(nnx.relu(self.first(x)))

    @staticmethod
    def make(name: str, seed: int = 0, params: Any = None) -> tuple[Any, Any]:
        """The first state, or one with these FP32 parameters."""
        model = recipe_of(name).wrap(Nnx.Model(rngs=nnx.Rngs(seed)))
        if params is not None:
            nnx.update(model, params)
        return model, jaxmp.nnx.Optimizer(model, optimizer_of(name))

    @staticmethod
    @functools.cache
    def step(name: str) -> Callable[..., Any]:
        """The train step, which returns the state that it updates."""

        def loss_fn(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.mean((model(x).astype(jnp.float32) - y) ** 2)

        @nnx.jit
        def train_step(model: Any, optimizer: jaxmp.nnx.Optimizer) -> None:
            _, grads = optimizer.value_and_grad(loss_fn)(model, X, Y)
            optimizer.update(model, grads)

        def run(state: tuple[Any, Any]) -> tuple[Any, Any]:
            train_step(*state)
            return state

        return run

    @staticmethod
    def masters(state: tuple[Any, Any]) -> Any:
        """The FP32 values of the parameters."""
        model, optimizer = state
        pure = Pure(nnx.as_pure(nnx.state(model, nnx.Param)), nnx.as_pure(optimizer.opt_state))
        return jaxmp.get_master_params(pure)

    @staticmethod
    def optimizer_state(state: tuple[Any, Any]) -> Any:
        """The optimizer state."""
        return nnx.as_pure(state[1].opt_state)

    @staticmethod
    def with_optimizer_state(state: tuple[Any, Any], opt_state: Any) -> tuple[Any, Any]:
        """The state with another optimizer state."""
        nnx.update(state[1].opt_state, nnx.state(opt_state))
        return state

    @staticmethod
    def arrays(state: tuple[Any, Any]) -> list[Any]:
        """All arrays but the step, which the optimizer of a new state counts from 0."""
        model, optimizer = state
        return jax.tree.leaves((nnx.as_pure(nnx.state(model)), nnx.as_pure(optimizer.opt_state)))


@dataclasses.dataclass
class Pure:
    """Parameters and optimizer state, as a train state has them."""

    params: Any
    opt_state: Any


FRAMEWORKS = {"linen": Linen, "nnx": Nnx}


# ---------------------------------------------------------------------------
# One pair
# ---------------------------------------------------------------------------


def save_trained(framework: str, source: str, directory: str) -> Any:
    """Trains three steps under a recipe, saves the state, and returns it."""
    adapter = FRAMEWORKS[framework]
    state = adapter.make(source)
    for _ in range(3):
        state = adapter.step(source)(state)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(3, state, recipe=recipe_of(source))
    return state


def check_pair(framework: str, source: str, target: str, directory: str, state: Any) -> str:
    """Restores the checkpoint of `source` under `target`; returns "exact" or the printed plan."""
    adapter = FRAMEWORKS[framework]
    checkpointer = Checkpointer(directory)
    recipe = recipe_of(target)
    outcome = "exact"
    if source == target:
        restored = checkpointer.restore(adapter.make(target, seed=1), recipe=recipe)
        assert_same(adapter.arrays(restored), adapter.arrays(state))
    else:
        with np.testing.assert_raises(jaxmp.errors.CheckpointError):
            checkpointer.restore(adapter.make(target, seed=1), recipe=recipe)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            restored = checkpointer.restore(
                adapter.make(target, seed=1), recipe=recipe, migrate=True
            )
        outcome = printed.getvalue()
        assert source in outcome or "packed" in (source, target), outcome
    assert_same(adapter.masters(restored), adapter.masters(state))
    reference = make_reference(adapter, target, state, is_same=source == target)
    assert_same(adapter.arrays(restored), adapter.arrays(reference))
    for _ in range(5):
        restored, reference = adapter.step(target)(restored), adapter.step(target)(reference)
    assert_same(adapter.arrays(restored), adapter.arrays(reference))
    return outcome


def make_reference(adapter: Any, target: str, state: Any, *, is_same: bool) -> Any:
    """A state of `target` with the masters, moments, loss scale and counters of `state`."""
    if is_same:
        return state if adapter is Linen else tuple(map(nnx.clone, state))
    masters = jax.tree.map(jnp.array, adapter.masters(state))
    reference = adapter.make(target, params=masters)
    before, after = adapter.optimizer_state(state), adapter.optimizer_state(reference)
    # The moments of the trained state, in the structure of the new one.
    moments = jax.tree.leaves(before.inner_state.inner_state)
    moments = jax.tree.structure(after.inner_state.inner_state).unflatten(moments)
    inner = dataclasses.replace(after.inner_state, inner_state=moments)
    scale = after.loss_scale
    if type(before.loss_scale) is type(scale):
        scale = before.loss_scale
    new = dataclasses.replace(after, inner_state=inner, loss_scale=scale, stats=before.stats)
    reference = adapter.with_optimizer_state(reference, jax.tree.map(jnp.array, new))
    if adapter is Linen:
        reference = reference.replace(step=state.step)
        name = "_overwrite_with_gradient"
        if name in state.params and name in reference.params:
            reference = reference.replace(params={**reference.params, name: state.params[name]})
    return reference


def assert_same(tree: Any, expected: Any) -> None:
    """Compares two trees bit for bit, dtypes included."""
    leaves, expected_leaves = jax.tree.leaves(tree), jax.tree.leaves(expected)
    assert len(leaves) == len(expected_leaves)
    for leaf, other in zip(leaves, expected_leaves, strict=True):
        assert leaf.dtype == other.dtype, (leaf.dtype, other.dtype)
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


# ---------------------------------------------------------------------------
# Averages beside the parameters
# ---------------------------------------------------------------------------

KINDS = ("train_state", "nnx", "dict")
# Names of the average before and after "model", and how it is stored.
NAMES, STORED = ("average", "target"), ("as_parameters", "fp32")


def make_with_average(recipe: str, kind: str, name: str, stored: str, seed: int) -> dict[str, Any]:
    """A state with a model, its optimizer, and an average that differs from the model."""
    if kind == "nnx":
        model, optimizer = Nnx.make(recipe, seed)
        average, _ = Nnx.make(recipe, seed + 1)
        if stored == "fp32":
            average = jaxmp.nnx.EMA(average, 0.5)
        return {"model": model, "optimizer": optimizer, name: average}
    params, average = (plain_parameters(number) for number in (seed, seed + 1))
    if stored == "as_parameters":
        average = recipe_of(recipe).cast_params(average)
    state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=optimizer_of(recipe))
    if kind == "train_state":
        return {"model": state, name: average}
    return {"model": state.params, "optimizer": state.opt_state, name: average}


def plain_parameters(seed: int) -> dict[str, Any]:
    """Two layers of random values that no 16-bit dtype represents."""
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "first": {"kernel": jax.random.normal(keys[0], (4, 3))},
        "second": {"kernel": jax.random.normal(keys[1], (3,))},
    }


def values_of(state: dict[str, Any], kind: str, name: str) -> tuple[list[Any], list[Any]]:
    """The FP32 values of the parameters, and those of the average."""
    average = state[name]
    if kind == "nnx":
        masters = Nnx.masters((state["model"], state["optimizer"]))
        params = average.params if isinstance(average, nnx.EMA) else nnx.state(average, nnx.Param)
        average = nnx.as_pure(params)
    elif kind == "train_state":
        masters = jaxmp.get_master_params(state["model"])
    else:
        masters = jaxmp.get_master_params(Pure(state["model"], state["optimizer"]))
    as_fp32 = lambda tree: [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(tree)]
    return as_fp32(masters), as_fp32(average)


def check_average(
    source: str, target: str, kind: str, name: str, stored: str, directory: str
) -> str:
    """Migrates a state with an average; returns "exact" or "refused"."""
    state = make_with_average(source, kind, name, stored, seed=0)
    expected = jax.tree.map(np.array, values_of(state, kind, name))
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(0, state, recipe=recipe_of(source))
    like = make_with_average(target, kind, name, stored, seed=5)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            restored = checkpointer.restore(like, recipe=recipe_of(target), migrate=True)
    except jaxmp.errors.CheckpointError as error:
        assert not must_be_exact(source, target, kind, stored), error
        assert "'model'" in str(error) or "rounded" in str(error) or "leaf: " in str(error), error
        return "refused"
    assert_same(values_of(restored, kind, name), expected)
    return "exact"


def must_be_exact(source: str, target: str, kind: str, stored: str) -> bool:
    """False where the average would be rounded, or cannot be distinguished."""
    before, after = (recipe_of(name).policies.default.param_dtype for name in (source, target))
    is_rounded = before != after and after != jnp.float32
    # Any 16-bit array can be the parameters of packed masters, which are remainders.
    is_ambiguous = kind == "dict" and source == "packed" and target != "packed"
    return stored == "fp32" or not (is_rounded or is_ambiguous)


def check_averages() -> int:
    """Runs all states with averages, prints a line for each pair, and returns the failures."""
    failed = 0
    forms = list(itertools.product(KINDS, NAMES, STORED))
    for source, target in itertools.product(RECIPES, RECIPES):
        outcomes = []
        for kind, name, stored in forms:
            with tempfile.TemporaryDirectory() as directory:
                try:
                    outcomes.append(check_average(source, target, kind, name, stored, directory))
                except AssertionError as error:
                    failed += 1
                    print(f"FAILED {source} -> {target}, {kind}, {name}, {stored}: {error}")
        counts = {row: outcomes.count(row) for row in ("exact", "refused")}
        print(f"{source:<12} -> {target:<12} {counts}", flush=True)
    return failed


def main(
    framework: str = "linen,nnx", sources: str = ",".join(RECIPES), averages: bool = False
) -> None:
    """Runs all pairs and prints one line for each."""
    if averages:
        raise typer.Exit(1 if check_averages() else 0)
    failed = 0
    for name in framework.split(","):
        for source in sources.split(","):
            with tempfile.TemporaryDirectory() as directory:
                state = save_trained(name, source, directory)
                for target in RECIPES:
                    try:
                        outcome = check_pair(name, source, target, directory, state)
                    except AssertionError as error:
                        failed += 1
                        outcome = f"FAILED {error}"
                    kind = "exact" if outcome == "exact" else "migrated"
                    kind = outcome if "FAILED" in outcome else kind
                    print(f"{name:<6} {source:<12} -> {target:<12} {kind}", flush=True)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
