"""One training of `compare.py` with MaxText's `train_loop`, in a process of its own.

python examples/integrations/maxtext_run.py SEED STEPS RECIPE CHECKPOINTS
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["DECOUPLE_GCLOUD"] = "TRUE"

import maxtext.trainers.pre_train.train as maxtext_train  # pyright: ignore[reportMissingImports]
import numpy as np
from flax import nnx
from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
from maxtext.input_pipeline import (  # pyright: ignore[reportMissingImports]
    input_pipeline_interface,
)
from training import BATCH, LENGTH, STEPS, batches, print_result


def batches_of_maxtext(seed: int, first: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the batches from step `first` on, with the names that MaxText reads."""
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))
    for tokens in batches(seed, LENGTH + 1)[first:]:
        for_each = {"position": positions, "segmentation": np.ones_like(positions)}
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        yield batch | {f"{key}_{name}": array for name, array in for_each.items() for key in batch}


def train(seed: int, steps: int, recipe_name: str, folder: str) -> None:
    """Trains a Llama of two layers, and prints the losses and a digest of the parameters.

    Args:
      seed: of the parameters and batches.
      steps: number of steps at which the run ends.
      recipe_name: a recipe; "" for MaxText without jaxmp.
      folder: directory of the checkpoints, from which a run resumes; "" for no checkpoints.
    """
    with tempfile.TemporaryDirectory() as temporary:
        saved = Path(folder, "run", "checkpoints").glob("[0-9]*") if folder else ()
        first = max((int(path.name) + 1 for path in saved), default=0)
        metrics = Path(temporary, "metrics.jsonl")
        settings = {
            "run_name": "run",
            "base_output_directory": folder or temporary,
            "metrics_file": metrics,
            "hardware": "cpu",
            "skip_jax_distributed_system": True,
            "dataset_type": "synthetic",
            "enable_goodput_recording": False,
            "log_config": False,
            "enable_checkpointing": bool(folder),
            "async_checkpointing": False,
            "checkpoint_period": steps,
            "steps": steps,
            "init_weights_seed": seed,
            "learning_rate": 3e-3,
            "learning_rate_schedule_steps": STEPS,
            "base_num_decoder_layers": 2,
            "base_emb_dim": 64,
            "base_mlp_dim": 128,
            "base_num_query_heads": 4,
            "base_num_kv_heads": 2,
            "head_dim": 16,
            "vocab_size": 256,
            "max_target_length": LENGTH,
            "per_device_batch_size": BATCH,
            "attention": "dot_product",
            "dtype": "float32",
        }
        if recipe_name:
            settings["jaxmp_recipe"] = recipe_name
        base = Path(pyconfig.__file__).with_name("base.yml")
        arguments = [f"{key}={value}" for key, value in settings.items()]
        config, recorder = maxtext_train.initialize(["train", str(base), *arguments])
        input_pipeline_interface.SyntheticDataIterator = lambda *_: batches_of_maxtext(seed, first)
        state = maxtext_train.train_loop(config, recorder)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    params = nnx.to_pure_dict(nnx.filter_state(state, nnx.Param))
    print_result([line["learning/loss"] for line in lines], params)


if __name__ == "__main__":
    seed, steps, recipe_name, folder = sys.argv[1:]
    train(int(seed), int(steps), recipe_name, folder)
