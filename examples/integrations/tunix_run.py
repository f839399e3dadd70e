"""One training of `compare.py` with Tunix's `PeftTrainer`, in a process of its own.

python examples/integrations/tunix_run.py SEED STEPS RECIPE CHECKPOINTS
"""

import sys

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from training import BATCH, LENGTH, batches, print_result
from tunix.models.qwen3.model import ModelConfig, Qwen3  # pyright: ignore[reportMissingImports]
from tunix.sft.peft_trainer import (  # pyright: ignore[reportMissingImports]
    PeftTrainer,
    TrainingConfig,
    TrainingInput,
)

import jaxmp


def train(seed: int, steps: int, recipe_name: str, folder: str) -> None:
    """Trains a Qwen3 of two layers, and prints the losses and a digest of the parameters.

    Args:
      seed: of the parameters and batches.
      steps: number of steps at which the run ends.
      recipe_name: a recipe; "" for Tunix without jaxmp.
      folder: directory of the checkpoints, from which a run resumes; "" for no checkpoints.
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
    if recipe_name:
        recipe = jaxmp.load_recipe(recipe_name)
        model, tx = recipe.wrap(model), recipe.optimizer(tx)
    options = ocp.CheckpointManagerOptions(save_interval_steps=steps, max_to_keep=1)
    training = TrainingConfig(
        eval_every_n_steps=10**6,
        max_steps=steps,
        checkpoint_root_directory=folder or None,
        checkpointing_options=options if folder else None,
    )
    mask = jnp.tril(jnp.ones((BATCH, LENGTH, LENGTH), bool))
    trainer = PeftTrainer(model, tx, training).with_gen_model_input_fn(
        lambda batch: {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH)),
            "attention_mask": mask,
        }
    )
    trainer.train(
        [
            TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens))
            for tokens in batches(seed)[:steps]
        ]
    )
    losses = trainer.metrics_logger.get_metric_history("", "loss", "train")
    print_result(losses, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


if __name__ == "__main__":
    seed, steps, recipe_name, folder = sys.argv[1:]
    train(int(seed), int(steps), recipe_name, folder)
