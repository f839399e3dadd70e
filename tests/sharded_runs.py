"""Trains the GPT of the examples on one device or several, and prints the losses as JSON.

    python tests/sharded_runs.py reference                          one device, and its groupings
    JAX_NUM_CPU_DEVICES=8 python tests/sharded_runs.py layouts      eight devices
    JAX_NUM_CPU_DEVICES=4 python tests/sharded_runs.py PORT INDEX   one of two processes
    JAX_NUM_CPU_DEVICES=8 python tests/sharded_runs.py bytes        bytes of the first device

A grouping is the run on one device with the rows of each batch in another order, and the gradients
of eight groups of rows added in FP32: the groups are those of eight devices. All runs see the same
batches.
"""

import json
import sys

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import jaxmp
import train_sharded
from byte_gpt import GPT, random_batch, standard_library_text

STEPS, BATCH_SIZE, GROUPINGS = 200, 16, 8
SMALL = GPT(layers=1, width=16, heads=2, max_length=8)
LAYOUTS = {"DP": (8, 1, 1), "FSDP": (1, 8, 1), "FSDP x TP": (1, 4, 2)}


def mesh_of(*sizes):
    types = (AxisType.Auto,) * len(sizes)
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, train_sharded.AXES, axis_types=types)


def prepare(recipe, mesh, microbatches=1):
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, STEPS), b2=0.95)
    return train_sharded.prepare(recipe, SMALL, tx, mesh, microbatches=microbatches)


def train(mesh, prepared, seed=None):
    """Returns the losses of a run; `seed` is that of the order of rows."""
    init, _, step = prepared
    text, state, losses = standard_library_text().train, init(), []
    for number in range(STEPS):
        rows = random_batch(text, BATCH_SIZE, SMALL.max_length, 0, number)
        if seed is not None:
            rows = np.random.default_rng((seed, number)).permutation(rows)
        sharding = jax.sharding.NamedSharding(mesh, train_sharded.BATCH)
        batch = jax.make_array_from_callback(rows.shape, sharding, lambda i, rows=rows: rows[i])
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


def bytes_on_first_device(tree):
    """Returns the bytes of arrays; scalars are counters and the same on all devices."""
    shards = (leaf.addressable_shards[0].data for leaf in jax.tree.leaves(tree))
    return sum(shard.nbytes for shard in shards if shard.ndim)


def live_bytes(devices):
    """Returns kind -> bytes of the first of several devices, under `bf16_params`."""
    init, _, _ = prepare("bf16_params", mesh_of(1, devices, 1))
    state = init()
    masters = bytes_on_first_device(jaxmp.get_master_params(state))
    return {
        "parameters": bytes_on_first_device(state.params),
        "masters": masters,
        "moments": bytes_on_first_device(state.opt_state) - masters,
    }


def main():
    mode, *index = sys.argv[1:]
    if index:
        train_sharded.start_processes(f"localhost:{mode}", 2, int(index[0]))
    if mode == "bytes":
        print(json.dumps({devices: live_bytes(devices) for devices in (1, 2, 4, 8)}))
        return
    losses = {}
    if mode == "reference":
        mesh = mesh_of(1, 1, 1)
        losses["one device"] = train(mesh, prepare("bf16", mesh))
        grouped = prepare("bf16", mesh, microbatches=8)
        losses |= {f"grouping {n}": train(mesh, grouped, n) for n in range(GROUPINGS)}
    else:
        layouts = ["FSDP x TP"] if index else list(LAYOUTS)
        for name in layouts:
            mesh = mesh_of(*LAYOUTS[name])
            losses[name] = train(mesh, prepare("bf16", mesh))
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
