"""Libraries that know nothing of masters cannot restore them into a state of another layout."""

import itertools

import jax
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxmp
from arrays import changed

LAYOUTS = {
    "no_masters": jaxmp.load_recipe("bf16"),
    "fp32_masters": jaxmp.load_recipe("bf16_params"),
    "packed_masters": jaxmp.load_recipe("bf16_params").replace(master="packed"),
}
PAIRS = list(itertools.permutations(LAYOUTS, 2))


def linen_state(layout: str, seed: int = 0) -> jaxmp.TrainState:
    params = {"dense": {"kernel": jax.random.normal(jax.random.key(seed), (4, 3))}}
    tx = LAYOUTS[layout].optimizer(optax.adam(1e-2))
    return jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)


def nnx_state(layout: str, seed: int = 0) -> dict:
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(seed))
    optimizer = jaxmp.nnx.Optimizer(model, LAYOUTS[layout].optimizer(optax.adam(1e-2)))
    return nnx.to_pure_dict(nnx.state((model, optimizer)))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Orbax checkpoints of a Linen and an NNX state in each layout."""
    directory = tmp_path_factory.mktemp("orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        for layout in LAYOUTS:
            for make in (linen_state, nnx_state):
                checkpointer.save(directory / f"{make.__name__}_{layout}", make(layout))
    return directory


@pytest.mark.parametrize("make", [linen_state, nnx_state])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_plain_orbax_names_both_layouts(source, target, make, written):
    with ocp.StandardCheckpointer() as checkpointer, pytest.raises(ValueError) as error:
        checkpointer.restore(written / f"{make.__name__}_{source}", make(target))
    # Orbax does not list the empty node of an NNX state without masters.
    shown = {source, target} - ({"no_masters"} if make is nnx_state else set())
    assert all(name in str(error.value) for name in shown)


@pytest.mark.parametrize("make", [linen_state, nnx_state])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_orbax_restores_its_own_layout_exactly(layout, make, written):
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(written / f"{make.__name__}_{layout}", make(layout, seed=1))
    assert not changed(make(layout), restored)


def test_the_layout_is_the_name_of_the_masters_in_paths():
    for layout in LAYOUTS:
        flat, _ = jax.tree_util.tree_flatten_with_path(linen_state(layout).opt_state)
        paths = [jax.tree_util.keystr(path) for path, _ in flat]
        with_masters = [path for path in paths if f".{layout}['dense']['kernel']" in path]
        assert len(with_masters) == (layout != "no_masters"), paths
