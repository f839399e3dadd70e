"""Writes small checkpoints of this version, which all later versions must restore.

    python tests/saved_checkpoints.py

It writes to tests/checkpoints/VERSION/. Run it once for each release, and never change the
checkpoints of an earlier one.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from jaxmp.checkpoint import Checkpointer, save_safetensors

FOLDER = Path(__file__).parent / "checkpoints"
# A dynamic loss scale with FP32 masters, and packed masters.
RECIPES = {
    "fp16_params": jaxmp.load_recipe("fp16_params"),
    "packed": jaxmp.load_recipe("bf16_params").replace(master="packed"),
}
# FP32 has 16 bits more than the parameters store.
VALUES = np.linspace(-2, 2, 12, dtype=np.float32).reshape(4, 3) / 3


def make_state(recipe: jaxmp.Recipe, scale: float = 1.0) -> jaxmp.TrainState:
    """Returns a state after one step with gradients of zero."""
    params = {"dense": {"kernel": jnp.asarray(scale * VALUES)}}
    tx = recipe.optimizer(optax.sgd(1e-3, momentum=0.9))
    state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
    return state.apply_gradients(grads=jax.tree.map(jnp.zeros_like, params))


def write(folder: Path) -> None:
    """Writes a checkpoint for each recipe, and one file of safetensors."""
    for name, recipe in RECIPES.items():
        with Checkpointer(folder / name) as checkpointer:
            checkpointer.save(1, make_state(recipe), recipe=recipe)
    # Orbax writes the path of this machine into these files, and does not read it.
    for file in folder.rglob("commit_success.txt"):
        file.write_text(file.read_text("utf-8").replace(f"{FOLDER}/", ""), "utf-8")
    save_safetensors(folder / "params.safetensors", make_state(RECIPES["packed"]).params)


if __name__ == "__main__":
    write(FOLDER / jaxmp.__version__)
