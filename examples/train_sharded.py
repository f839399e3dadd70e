"""Trains a byte-level GPT on several devices: data parallel, FSDP, and with tensor parallelism.

    python examples/train_sharded.py --mesh data=4,model=2
    python examples/train_sharded.py --mesh replica=2,data=4 --recipe bf16_params
    python examples/train_sharded.py --mesh data=8 --checkpoint-dir checkpoints
    python examples/train_sharded.py --help

The axes of the mesh, of which at least one is required; their product is the number of devices:

    replica    splits the batch; parameters are copied (replica=8 is data parallelism)
    data       splits the batch, and each array of the state along one dimension (FSDP)
    model      splits attention heads, hidden units and logits (tensor parallelism)

On a machine without accelerators the script makes as many CPU devices as the mesh has. On a cluster
that JAX detects (Slurm, Open MPI, Kubernetes, Cloud TPU), start one process per host, or as the
cluster does, with --distributed:

    srun python examples/train_sharded.py --mesh data=16,model=4 --distributed

If the processes are started in another way, such as by Ray or in two terminals of one machine, pass
the address of the first one, their number and their index. Each has a part of the devices:

    python examples/train_sharded.py --mesh data=8 --distributed \\
        --coordinator localhost:12345 --processes 2 --process-index 0    # the other one: 1

Each process reads the rows of the batch that its devices train on. Process 0 prints. If a process
dies, the others end within a minute; the same command resumes all of them from the last checkpoint.
If a process receives SIGTERM, as before the eviction from a cluster, all save a checkpoint and end.
Install first: pip install -e ".[examples]".

Shape suffixes: B batch, S positions and one more, T positions, D width.
"""

import contextlib
import functools
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.experimental.multihost_utils import reached_preemption_sync_point
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from byte_gpt import GPT, VOCABULARY, random_batch, standard_library_text
from command_line import Positive, RecipeName, Seed, check_divisible
from jaxmp.checkpoint import Checkpointer

AXES = ("replica", "data", "model")
BATCH = P(("replica", "data"))
# A process that has sent no heartbeat for so long is dead, and all others end.
HEARTBEAT_TIMEOUT_SECONDS = 60
# All processes start within this time, or those that have started end.
START_TIMEOUT_SECONDS = 300

# (layer, parameter) -> the dimension that the axis "model" splits: attention heads, hidden units of
# the perceptron, or logits. The other arrays are the same for all of its devices.
MODEL_DIMENSION = {
    **{(name, "kernel"): 1 for name in ("query", "key", "value", "mlp_up", "lm_head")},
    **{(name, "bias"): 0 for name in ("query", "key", "value", "mlp_up")},
    **{(name, "kernel"): 0 for name in ("out", "mlp_down")},
}


# ---------------------------------------------------------------------------
# Shardings
# ---------------------------------------------------------------------------


def make_mesh(sizes: dict[str, int]) -> Mesh:
    """Returns a mesh of all devices, of all processes, whose axes have the given sizes."""
    if math.prod(sizes.values()) != len(jax.devices()):
        raise typer.BadParameter(
            f"The mesh {sizes} has {math.prod(sizes.values())} devices, and JAX has "
            f"{len(jax.devices())} in {jax.process_count()} processes: {jax.devices()}. Without "
            "accelerators, the variable JAX_NUM_CPU_DEVICES sets their number for each process."
        )
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def parameter_sharding(mesh: Mesh, path: tuple[Any, ...], leaf: Any) -> NamedSharding:
    """Returns the sharding of a parameter: "model" by its name, "data" by its largest dimension."""
    split: list[str | None] = [None] * leaf.ndim
    dimension = MODEL_DIMENSION.get(tuple(key.key for key in path[-2:]))
    if dimension is not None and mesh.shape["model"] > 1:
        split[dimension] = "model"
    free = [
        n for n in range(leaf.ndim) if split[n] is None and leaf.shape[n] % mesh.shape["data"] == 0
    ]
    if free:
        split[max(free, key=lambda n: leaf.shape[n])] = "data"
    return NamedSharding(mesh, P(*split))


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


def prepare(
    recipe: Any,
    gpt: GPT,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    seed: int = 0,
    microbatches: int = 1,
) -> tuple[Callable[[], jaxmp.TrainState], Any, Callable[..., Any]]:
    """Returns the function that makes the initial state, its shardings, and the train step.

    The step is that of a single device. Shardings are those of the arguments, of the results and of
    the activations between the blocks; XLA's partitioner derives all others.
    """
    recipe = jaxmp.load_recipe(recipe)
    tx = recipe.optimizer(tx)

    def init_params() -> Any:
        # The initial parameters do not depend on the batch, which is too small for the mesh.
        tokens_BT = jnp.zeros((1, gpt.max_length), jnp.int32)
        return recipe.wrap(gpt).init(jax.random.key(seed), tokens_BT)

    # FP8 recipes have a second collection beside the parameters, which is replicated.
    params_shardings = jax.tree_util.tree_map_with_path(
        functools.partial(parameter_sharding, mesh), jax.eval_shape(init_params)["params"]
    )
    # Without this constraint XLA may gather activations in place of weights.
    rows = NamedSharding(mesh, BATCH)
    model = gpt.clone(constrain=lambda x: jax.lax.with_sharding_constraint(x, rows))
    # With the shardings, weights are gathered in the compute dtype, and again in the backward pass.
    model = recipe.wrap(model, shardings={"params": params_shardings})

    def init() -> jaxmp.TrainState:
        return jaxmp.TrainState.create(apply_fn=model.apply, params=init_params(), tx=tx)

    def loss_fn(params: Any, tokens_BS: jax.Array) -> jax.Array:
        logits_BTV = model.apply(params, tokens_BS[:, :-1])
        return jaxmp.losses.softmax_cross_entropy(logits_BTV, tokens_BS[:, 1:])

    def train_step(state: jaxmp.TrainState, tokens_BS: jax.Array) -> Any:
        loss, grads = state.value_and_grad(loss_fn, microbatches=microbatches)(tokens_BS)
        return state.apply_gradients(grads=grads), loss

    shardings = jaxmp.state_shardings(jax.eval_shape(init), {"params": params_shardings})
    step = jax.jit(
        train_step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P()))
    )
    # Each device makes its part of the state: no device has room for all of a large model.
    return jax.jit(init, out_shardings=shardings), shardings, step


def sharded_batch(
    mesh: Mesh, text: np.ndarray, batch_size: int, seq_len: int, seed: int, step: int
) -> jax.Array:
    """Returns a batch of which each process has read the rows of its devices."""

    def read(index: tuple[slice, ...]) -> np.ndarray:
        return random_batch(text, batch_size, seq_len, seed, step, index[0])

    shape = batch_size, seq_len + 1
    return jax.make_array_from_callback(shape, NamedSharding(mesh, BATCH), read)


# ---------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------


def check_processes(
    coordinator: str | None, processes: int | None, index: int | None, devices: int
) -> bool:
    """Checks the arguments that describe processes, and returns True if there are any.

    Raises:
      typer.BadParameter: if some of them are missing, or do not fit each other or the mesh.
    """
    explicit = {"--coordinator": coordinator, "--processes": processes, "--process-index": index}
    missing = [name for name, value in explicit.items() if value is None]
    if coordinator is None or processes is None or index is None:
        if len(missing) == len(explicit):
            return False
        raise typer.BadParameter(
            f"{' and '.join(missing)}: missing. Give --coordinator HOST:PORT, --processes N and "
            "--process-index I, or none of them on a cluster that JAX detects."
        )
    if not coordinator.rpartition(":")[2].isdecimal():
        raise typer.BadParameter(
            f"--coordinator {coordinator} has no port. Write --coordinator HOST:PORT, for example "
            f"--coordinator {coordinator.rstrip(':')}:12345"
        )
    if index >= processes:
        raise typer.BadParameter(
            f"--process-index {index} is not less than --processes {processes}. The first process "
            f"is 0, and the last {processes - 1}."
        )
    if devices % processes:
        raise typer.BadParameter(
            f"--processes {processes} cannot share the {devices} devices of the mesh evenly."
        )
    return True


def start_processes(coordinator: str | None, processes: int | None, index: int | None) -> None:
    """Connects the processes of a run, before the first use of a device.

    Raises:
      typer.BadParameter: if the arguments are None and JAX detects no cluster.
    """
    if coordinator is not None:
        print(
            f"Process {index} of {processes} connects to {coordinator}, and waits for the others "
            f"for up to {START_TIMEOUT_SECONDS} seconds.",
            file=sys.stderr,
            flush=True,
        )
    # The collectives of CPU devices; accelerators have their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            index,
            # Ray on Slurm: the variables of Slurm describe other processes.
            cluster_detection_method=None if coordinator is None else "deactivate",
            initialization_timeout=START_TIMEOUT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
        )
    except ValueError as error:
        raise typer.BadParameter(
            f"JAX detects no cluster here ({error}) Give --coordinator HOST:PORT, --processes N "
            "and --process-index I."
        ) from None


@contextlib.contextmanager
def ended_with_others() -> Iterator[None]:
    """Ends this process at once if a step fails because another process has ended.

    Collectives of CPU devices raise an error then. Those of GPUs wait, until JAX ends the process
    after the heartbeat timeout.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        print(
            f"Process {jax.process_index()} of {jax.process_count()} ends: "
            f"{str(error).splitlines()[0][:300]}\n"
            "If it lost a connection, another process has died, and the output of that process "
            "contains the reason. The same command resumes all from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        # A normal exit would wait for the others.
        os._exit(1)


# ---------------------------------------------------------------------------
# Command
# ---------------------------------------------------------------------------


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the sizes of "data=4,model=2".

    Raises:
      typer.BadParameter: if it is not of this form.
    """
    pairs = [part.partition("=")[::2] for part in text.replace(" ", "").split(",")]
    sizes = {axis: int(size) for axis, size in pairs if axis in AXES and size.isdecimal()}
    if len(sizes) != len(pairs) or 0 in sizes.values():
        raise typer.BadParameter(
            f"{text!r} does not name sizes of the axes {', '.join(AXES)}, each at most once and "
            "positive. Write for example --mesh data=4,model=2"
        )
    return sizes


def check_split(sizes: dict[str, int], batch_size: int, width: int, heads: int) -> None:
    """Raises an error if the mesh cannot split the batch or the heads evenly."""
    rows, model = sizes.get("replica", 1) * sizes.get("data", 1), sizes.get("model", 1)
    check_divisible("--batch-size", batch_size, "replica x data =", rows)
    if heads % model or VOCABULARY % model:
        raise typer.BadParameter(
            f"--heads {heads} and the {VOCABULARY} logits are not divisible by model={model}."
        )
    check_divisible("--width", width, "--heads", heads)


def train(
    mesh: Annotated[str, typer.Option(help="Sizes of the axes replica, data and model.")],
    recipe: RecipeName = "bf16",
    distributed: Annotated[bool, typer.Option("--distributed", help="Several processes.")] = False,
    coordinator: Annotated[str | None, typer.Option(help="HOST:PORT of process 0.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes.")] = None,
    process_index: Annotated[
        int | None, typer.Option(min=0, help="Of this process, from 0.")
    ] = None,
    steps: Positive = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Of all devices together.")] = 32,
    seq_len: Positive = 64,
    layers: Positive = 3,
    width: Positive = 128,
    heads: Positive = 4,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    seed: Seed = 0,
    print_every: Positive = 10,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder, shared by all hosts, to save in and resume from."
        ),
    ] = None,
    checkpoint_every: Positive = 50,
) -> list[float]:
    """Trains a byte-level GPT on several devices and returns the losses."""
    sizes = parse_mesh(mesh)
    check_split(sizes, batch_size, width, heads)
    devices = math.prod(sizes.values())
    if check_processes(coordinator, processes, process_index, devices) and not distributed:
        raise typer.BadParameter("--coordinator requires --distributed. Add --distributed.")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", "") and (
        processes is not None or not distributed
    ):
        jax.config.update("jax_num_cpu_devices", devices // (processes or 1))
    if distributed:
        start_processes(coordinator, processes, process_index)
    say = functools.partial(print, flush=True) if jax.process_index() == 0 else lambda text: None

    device_mesh = make_mesh(sizes)
    gpt = GPT(layers=layers, width=width, heads=heads, max_length=seq_len)
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, max(1, steps // 10), max(2, steps))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    init, _, train_step = prepare(recipe, gpt, tx, device_mesh, seed=seed)
    text, losses, start = standard_library_text().train, [], time.perf_counter()
    count = jax.process_count()
    kind = jax.devices()[0].device_kind
    say(f"{recipe}: {mesh} on {devices} x {kind}, {count} process{'es' * (count > 1)}")

    saved = Checkpointer(checkpoint_dir, keep=2) if checkpoint_dir else contextlib.nullcontext()
    with ended_with_others(), saved as checkpointer:
        state, first = init(), 0
        if checkpointer is not None and (latest := checkpointer.latest_step()) is not None:
            state, first = checkpointer.restore(state, recipe=recipe), latest
            say(f"resumed from step {first} of {checkpointer.directory}")
        for step in range(first + 1, steps + 1):
            batch_BS = sharded_batch(device_mesh, text, batch_size, seq_len, seed, step)
            state, loss = train_step(state, batch_BS)
            losses.append(loss)
            if jax.default_backend() == "cpu":
                # CPU devices share a pool of threads, in which overlapping steps can block.
                loss.block_until_ready()
            if step % print_every == 0 or step == steps:
                jaxmp.check(state)  # raises if gradients overflow at the smallest loss scale
                skipped = int(jaxmp.get_skip_stats(state).total)
                say(f"step {step:>5}  loss {float(loss):.4f}  {skipped} steps skipped")
            # JAX catches SIGTERM if there are several processes; all of them stop after this step.
            stops = reached_preemption_sync_point(step)
            if checkpointer is not None and (
                step % checkpoint_every == 0 or step == steps or stops
            ):
                checkpointer.save(step, state, recipe=recipe)
            if stops:
                say(f"a process received SIGTERM; all end after step {step}")
                break
        losses = [float(loss) for loss in losses]
    tokens = len(losses) * batch_size * seq_len
    say(f"{tokens / (time.perf_counter() - start):,.0f} tokens/s, with compilation")
    return losses


if __name__ == "__main__":
    typer.run(train)
