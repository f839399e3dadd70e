"""Kills a training run at random moments, resumes it, and compares it with a run without kills.

    python examples/checkpoint_soak.py
    python examples/checkpoint_soak.py --kills 20 --processes 2
    python examples/checkpoint_soak.py --recipe fp16_params --kills 5

The run saves a checkpoint after every step, so that most kills (SIGKILL) occur while one is being
written. After each kill the same command resumes from the latest complete step; its position in the
data is in the checkpoint. At the end, parameters, masters and moments must equal those of an
uninterrupted run bit for bit. With two processes, each has one device and half of each batch.
Install first: pip install -e ".[examples]".
"""

import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmp
from command_line import Positive, RecipeName, Seed
from jaxmp.checkpoint import Checkpointer

FEATURES, BATCH = 256, 16


# ---------------------------------------------------------------------------
# The training run
# ---------------------------------------------------------------------------


def train(directory: Path, recipe: str, steps: int) -> None:
    """Trains up to step `steps`, from the latest checkpoint in `directory` if there is one."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    loaded = jaxmp.load_recipe(recipe)
    tx = loaded.optimizer(optax.adamw(1e-2))

    def first_state() -> jaxmp.TrainState:
        keys = jax.random.split(jax.random.key(0))
        params = {
            name: {"kernel": 0.1 * jax.random.normal(key, (FEATURES, FEATURES))}
            for name, key in zip(("first", "second"), keys, strict=True)
        }
        return jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)

    def loss_fn(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        x, first = loaded.policies.default.cast_to_compute((x, params["first"]["kernel"]))
        second = loaded.policies.default.cast_to_compute(params["second"]["kernel"])
        return jnp.mean((jnp.tanh(x @ first) @ second).astype(jnp.float32) - y) ** 2

    @jax.jit
    def train_step(state: jaxmp.TrainState, x: jax.Array, y: jax.Array) -> jaxmp.TrainState:
        _, grads = state.value_and_grad(loss_fn)(x, y)
        return state.apply_gradients(grads=grads)

    state = jax.jit(first_state, out_shardings=replicated)()
    with Checkpointer(directory, keep=2) as checkpointer:
        position = 0
        if (latest := checkpointer.latest_step()) is not None:
            state = checkpointer.restore(state, recipe=recipe)
            position = checkpointer.describe(latest).extra["position"]
        while position < steps:
            batch = [np.asarray(part, np.float32) for part in read_batch(position)]
            x, y = (
                jax.make_array_from_callback(part.shape, split, lambda i, part=part: part[i])
                for part in batch
            )
            state = train_step(state, x, y)
            position += 1
            extra = {"position": position}
            checkpointer.save(position, state, recipe=recipe, extra=extra)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
    print(json.dumps({"digest": digest.hexdigest()}), flush=True)


def read_batch(position: int) -> np.ndarray:
    """Returns the inputs and targets at a position in the data."""
    return np.random.default_rng(position).normal(size=(2, BATCH, FEATURES))


# ---------------------------------------------------------------------------
# Kills
# ---------------------------------------------------------------------------


def start(directory: Path, recipe: str, steps: int, processes: int) -> list[subprocess.Popen[str]]:
    """Starts the processes of a run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--recipe", recipe, "--steps", str(steps)]
    command += ["--worker", str(directory), "--processes", str(processes), "--port", str(port)]
    quiet = None if os.environ.get("SHOW_WORKERS") else subprocess.DEVNULL
    return [
        subprocess.Popen(
            [*command, "--rank", str(rank)], stdout=subprocess.PIPE, stderr=quiet, text=True
        )
        for rank in range(processes)
    ]


def run_to_the_end(directory: Path, recipe: str, steps: int, processes: int) -> str:
    """Runs without a kill; returns the digest of the last state."""
    workers = start(directory, recipe, steps, processes)
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"A worker failed; see its errors with SHOW_WORKERS=1: {outputs}")
    digests = {json.loads(output.splitlines()[-1])["digest"] for output in outputs}
    assert len(digests) == 1, digests
    return digests.pop()


def run_and_kill(directory: Path, recipe: str, steps: int, processes: int, seconds: float) -> None:
    """Kills a run so many seconds after its first new checkpoint, or lets it end."""
    before = Checkpointer(directory).latest_step()
    workers = start(directory, recipe, steps, processes)
    killed_at = None
    while any(worker.poll() is None for worker in workers):
        if killed_at is None and Checkpointer(directory).latest_step() != before:
            killed_at = time.monotonic() + seconds
        if killed_at is not None and time.monotonic() >= killed_at:
            for worker in workers:
                worker.kill()
        time.sleep(0.002)
    for worker in workers:
        worker.communicate()


def main(
    recipe: RecipeName = "bf16_params",
    kills: Positive = 3,
    processes: Positive = 1,
    steps: Annotated[int, typer.Option(min=0, help="By default 8 for each kill.")] = 0,
    seed: Seed = 0,
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
    rank: Annotated[int, typer.Option(hidden=True)] = 0,
    port: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Kills a training run at random moments and compares its result."""
    steps = steps or 8 * kills
    if worker is not None:
        if processes > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(f"localhost:{port}", processes, rank)
        train(worker, recipe, steps)
        return
    times = random.Random(seed)
    with tempfile.TemporaryDirectory() as root:
        expected = run_to_the_end(Path(root, "whole"), recipe, steps, processes)
        directory = Path(root, "killed")
        for number in range(1, kills + 1):
            run_and_kill(directory, recipe, steps, processes, times.uniform(0.0, 0.5))
            latest = Checkpointer(directory).latest_step()
            print(f"kill {number:2} of {kills}: {latest} of {steps} steps are complete", flush=True)
        digest = run_to_the_end(directory, recipe, steps, processes)
    if digest != expected:
        raise SystemExit(f"The resumed run ended at {digest}, and the whole one at {expected}.")
    print(f"{kills} kills, {processes} process(es): the last states are equal bit for bit")


if __name__ == "__main__":
    typer.run(main)
