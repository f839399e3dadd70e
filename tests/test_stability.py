"""What docs/questions.md promises: public names, signatures, keys, fields and checkpoints."""

import importlib
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmp
import public_api
import saved_checkpoints
from jaxmp.checkpoint import Checkpointer, load_safetensors
from sources import text_of

VERSIONS = sorted(saved_checkpoints.FOLDER.iterdir())


def test_the_public_api_is_that_of_the_committed_list():
    """After a change that CHANGELOG.md describes, write it with `python tests/public_api.py`."""
    written = public_api.FILE.read_text("utf-8").splitlines()
    now = public_api.public_api().splitlines()
    assert sorted(set(written) - set(now)) == [] and sorted(set(now) - set(written)) == []
    assert written == now


def test_there_are_few_public_names():
    assert len(public_api.public_objects()) <= 120


def test_the_leg_with_the_lowest_versions_imports_public_modules():
    line = re.search(r'python -c "import (jaxmp, .*)"', text_of("Makefile"))
    assert line and set(line[1].split(", ")) <= {*public_api.modules(), "jaxmp._tools.cli"}


@pytest.mark.parametrize("name", sorted(public_api.modules()))
def test_modules_show_no_imports(name):
    module = importlib.import_module(name)
    assert module.__all__ == sorted(module.__all__, key=lambda each: (not each.isupper(), each))
    if name in ("jaxmp", "jaxmp.typing"):
        assert dir(module) == sorted(module.__all__)


def expected_values(name):
    dtype = np.float16 if name == "fp16_params" else ml_dtypes.bfloat16
    return saved_checkpoints.VALUES.astype(dtype)


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", saved_checkpoints.RECIPES)
def test_checkpoints_of_earlier_versions_are_restored(folder, name, tmp_path):
    shutil.copytree(folder / name, tmp_path / name)
    recipe = saved_checkpoints.RECIPES[name]
    with Checkpointer(tmp_path / name) as checkpointer:
        state = checkpointer.restore(saved_checkpoints.make_state(recipe, scale=0.0), recipe=recipe)
    kernel = state.params["dense"]["kernel"]
    masters = jaxmp.get_master_params(state)["dense"]["kernel"]
    assert kernel.dtype == expected_values(name).dtype
    assert np.array_equal(masters, saved_checkpoints.VALUES) and int(state.step) == 1
    if name == "fp16_params":
        assert np.array_equal(kernel, expected_values(name))
        assert float(state.loss_scale.scale_value) == 65536


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_safetensors_of_earlier_versions_are_read(folder):
    like = {"dense": {"kernel": jax.ShapeDtypeStruct((4, 3), jnp.bfloat16)}}
    kernel = load_safetensors(folder / "params.safetensors", like)["dense"]["kernel"]
    difference = kernel.astype(np.float32) - saved_checkpoints.VALUES
    assert kernel.dtype == jnp.bfloat16 and abs(difference).max() < 2**-8
