"""One training of `tunix_training.py`, in a process of its own.

python examples/integrations/tunix_run.py SEED STEPS RECIPE [CHECKPOINTS]
"""

import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tunix.models.qwen3.model import ModelConfig, Qwen3  # pyright: ignore[reportMissingImports]
from tunix.sft.peft_trainer import (  # pyright: ignore[reportMissingImports]
    PeftTrainer,
    TrainingConfig,
    TrainingInput,
)

import jaxmp
from byte_gpt import standard_library_text

STEPS = 50


def batches(seed: int, text: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Returns the batches of a run: `input_tokens` and `input_mask`, `int32[8, 64]`."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(text) - 64, (STEPS, 8, 1))
    tokens = text[starts + np.arange(64)].astype(np.int32)
    return [{"input_tokens": row, "input_mask": np.ones_like(row)} for row in tokens]


def train(seed: int, steps: int, recipe_name: str, folder: str | None = None) -> dict[str, object]:
    """Trains with Tunix's `PeftTrainer`, and returns the losses and a digest of the parameters.

    Args:
      seed: of the parameters and batches.
      steps: number of steps at which the run ends.
      recipe_name: a recipe; "none" for Tunix without jaxmp.
      folder: directory of the checkpoints, from which a run resumes; None for no checkpoints.
    """
    config = ModelConfig(
        num_layers=2,
        vocab_size=256,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    model, tx = Qwen3(config, rngs=nnx.Rngs(seed)), optax.adamw(3e-3)
    if recipe_name != "none":
        recipe = jaxmp.load_recipe(recipe_name)
        model, tx = recipe.wrap(model), recipe.optimizer(tx)
    options = ocp.CheckpointManagerOptions(save_interval_steps=steps, max_to_keep=1)
    training = TrainingConfig(
        eval_every_n_steps=10**6,
        max_steps=steps,
        checkpoint_root_directory=folder,
        checkpointing_options=options if folder else None,
    )
    mask = jnp.tril(jnp.ones((8, 64, 64), bool))
    trainer = PeftTrainer(model, tx, training).with_gen_model_input_fn(
        lambda batch: {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": jnp.broadcast_to(jnp.arange(64), (8, 64)),
            "attention_mask": mask,
        }
    )
    data = [TrainingInput(**batch) for batch in batches(seed, standard_library_text()[0])]
    trainer.train(data[:steps])
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()
    return {"losses": [float(loss) for loss in losses], "digest": digest}


if __name__ == "__main__":
    seed, steps, recipe_name, *folder = sys.argv[1:]
    print(json.dumps(train(int(seed), int(steps), recipe_name, *folder)))
