"""The example of sharded training: shardings, skipped steps, cluster detection, and processes."""

import functools
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import typer
from jax.sharding import PartitionSpec as P

import jaxmp
import train_sharded
from byte_gpt import GPT
from grids import EXPENSIVE
from processes import ROOT, free_port, results, start, stop, wait
from training_steps import state_step

SMALL = GPT(layers=1, width=32, heads=4, max_length=16)
ARGUMENTS = dict(layers=1, width=32, heads=4, seq_len=16, batch_size=8)


# The example uses optax directly.
pytestmark = pytest.mark.usefixtures("standard_promotion")


# ---------------------------------------------------------------------------
# One process
# ---------------------------------------------------------------------------


@EXPENSIVE
def test_a_run_resumes_exactly_and_prints_once(tmp_path, capsys):
    run = dict(mesh="data=2,model=2", recipe="bf16_params", print_every=2, **ARGUMENTS)
    whole = train_sharded.train(steps=4, **run)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("bf16_params: data=2,model=2 on 4 x cpu, 1 process")
    assert [line.split()[:2] for line in lines[1:3]] == [["step", "2"], ["step", "4"]]
    # The schedule depends on the number of steps, so the first part runs to the end, too.
    folder = dict(checkpoint_dir=tmp_path, checkpoint_every=2)
    train_sharded.train(steps=4, **run, **folder)
    step_4 = tmp_path / "4"
    step_4.rename(tmp_path / "last")
    assert train_sharded.train(steps=4, **run, **folder) == whole[2:]
    assert "resumed from step 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "query", "mlp_down", "norm"),
    [
        ({"replica": 4}, P(None, None, None), P(None, None), P(None)),
        ({"data": 4}, P("data", None, None), P("data", None), P("data")),
        ({"data": 2, "model": 2}, P("data", "model", None), P("model", "data"), P("data")),
        ({"model": 4}, P(None, "model", None), P("model", None), P(None)),
    ],
)
def test_arrays_are_split_over_data_and_model(sizes, query, mlp_down, norm):
    mesh = train_sharded.make_mesh(sizes)
    shapes = jax.eval_shape(SMALL.init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))
    specs = jax.tree_util.tree_map_with_path(
        lambda *args: train_sharded.parameter_sharding(mesh, *args).spec, shapes["params"]
    )
    block = specs["block_0"]
    # Axes of size 1 split nothing.
    effective = lambda spec: P(*(name if mesh.shape.get(name, 1) > 1 else None for name in spec))
    assert effective(block["attention"]["query"]["kernel"]) == query
    assert effective(block["mlp_down"]["kernel"]) == mlp_down
    assert effective(block["mlp_norm"]["scale"]) == norm


def planted_step(recipe, mesh):
    """Returns state, shardings and a step whose loss of each row is multiplied by a factor."""
    init, shardings, _ = train_sharded.prepare(recipe, SMALL, optax.adam(1e-3), mesh)

    def loss_fn(params, tokens, factors):
        logits = state.apply_fn(params, tokens[:, :-1])
        losses = jaxmp.losses.softmax_cross_entropy(logits, tokens[:, 1:], reduction="none")
        return (losses.mean(1) * factors).mean()

    state, step = init(), state_step(loss_fn)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    return state, shardings, step


def values(state):
    """Returns path -> the values on each device."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(path): [np.asarray(shard.data) for shard in leaf.addressable_shards]
        for path, leaf in leaves
    }


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "model": 2},
        pytest.param({"data": 4}, marks=pytest.mark.slow),
        pytest.param({"replica": 4}, marks=pytest.mark.slow),
    ],
)
@EXPENSIVE
def test_all_devices_skip_what_overflows_on_one(sizes):
    mesh = train_sharded.make_mesh(sizes)
    state, shardings, step = planted_step("fp16_params", mesh)
    text = np.arange(256, dtype=np.uint8)
    rows = jax.sharding.NamedSharding(mesh, train_sharded.BATCH)
    for number in range(1, 54):
        planted, compared = number in (5, 50, 51), number in (4, 5, 6, 50, 51)
        arrays, before = jax.tree.leaves(state), values(state) if compared else {}
        tokens = train_sharded.sharded_batch(mesh, text, 8, 16, 0, number)
        factors = np.ones(8, np.float32)
        factors[-1] = np.inf if planted else 1.0  # of a row on the last devices
        scale = jaxmp.get_loss_scale(state).scale_value.item()
        skipped = jaxmp.get_skip_stats(state).total.item()
        state, _ = step(state, tokens, jax.device_put(factors, rows))

        assert jaxmp.get_loss_scale(state).scale_value == (scale / 2 if planted else scale)
        assert jaxmp.get_skip_stats(state).total == skipped + planted
        if number in (1, 2, 3, 20):  # NumPy views of the arrays would prevent their donation
            assert all(array.is_deleted() for array in arrays if array.ndim)
        if not compared:
            continue
        after = values(state)
        is_counter = lambda path: ".stats." in path or ".loss_scale." in path
        is_equal = lambda path: all(map(np.array_equal, before[path], after[path]))
        assert all(is_equal(path) for path in before if not is_counter(path)) == planted
        # Scale and counters are the same on all devices.
        for path in filter(is_counter, after):
            assert len({array.tobytes() for array in after[path]}) == 1
    assert step._cache_size() <= 1
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings


def explicit(coordinator, processes, process_index):
    return dict(coordinator=coordinator, processes=processes, process_index=process_index)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(mesh="fsdp=4"), "'fsdp=4' does not name sizes of the axes replica, data, model"),
        (dict(mesh="data=2,data=2"), "each at most once"),
        (dict(mesh="data=0"), "positive"),
        (dict(mesh="data=3"), "--batch-size 8 is not divisible by replica x data = 3"),
        (dict(mesh="model=3"), "--heads 4 and the 256 logits are not divisible by model=3"),
        (dict(mesh="data=2", width=30), "--width 30 is not divisible by --heads 4"),
        (dict(mesh="data=2", **explicit("h:1", 2, 0)), "--coordinator requires --distributed"),
        (dict(mesh="data=2", **explicit("h", 2, 0)), "h has no port.*--coordinator h:12345"),
        (dict(mesh="data=2", **explicit("h:1", 2, 2)), "2 is not less than.*the last 1"),
        (dict(mesh="data=2", **explicit("h:1", 3, 0)), "3 cannot share the 2 devices"),
        (dict(mesh="data=2"), r"has 2 devices, and JAX has 4 in 1 processes.*JAX_NUM_CPU_DEVICES"),
        (
            dict(mesh="data=4", distributed=True, processes=2),
            "--coordinator and --process-index: missing",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(typer.BadParameter, match=message):
        train_sharded.train(steps=1, **{**ARGUMENTS, **arguments})


# ---------------------------------------------------------------------------
# Clusters
# ---------------------------------------------------------------------------

CONNECT = """
import jax, train_sharded
train_sharded.start_processes({})
print(jax.process_index(), "of", jax.process_count(), "with", len(jax.devices()), flush=True)
"""


def on_slurm(index, count, port):
    return {
        "SLURM_JOB_ID": "1234",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
        "JAX_COORDINATOR_PORT": str(port),
    }


@EXPENSIVE
def test_the_processes_of_slurm_connect():
    port, script = free_port(), CONNECT.format("None, None, None")
    processes = [start(["-c", script], **on_slurm(index, 2, port)) for index in range(2)]
    assert results(processes) == ["0 of 2 with 8", "1 of 2 with 8"]


@EXPENSIVE
def test_explicit_processes_ignore_slurm():
    port = free_port()
    script = CONNECT.format(f"'localhost:{port}', 1, 0")
    assert results([start(["-c", script], **on_slurm(3, 7, port))]) == ["0 of 1 with 4"]


OF_ALL_PROCESSES = """
import sys, jax, jax.numpy as jnp, numpy as np, optax, pytest, jaxmp, train_sharded
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
train_sharded.start_processes(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
mesh = jax.make_mesh((jax.device_count(),), ("data",))

def place(x, *spec):
    x, sharding = np.asarray(x, np.float32), NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

def step(state, x):
    loss, grads = state.value_and_grad(lambda w: jnp.log(x @ w).mean())()
    return state.apply_gradients(grads=grads), loss

x = np.ones((16, 4))
tx = jaxmp.load_recipe("bf16_params").optimizer(optax.adam(1e-3))
state = jaxmp.TrainState.create(apply_fn=None, params=place(np.ones((4, 1))), tx=tx)
loss = jax.jit(step)(state, place(x, "data"))[1]
x[9] = 0
zero = jaxmp.locate_nonfinite(step, state, place(x, "data"))
x[11, 2] = np.inf
(row,) = jaxmp.locate_nonfinite(step, state, place(x, "data")).arguments
with pytest.raises(jaxmp.errors.ValidationError, match="arrays of several hosts"):
    jaxmp.parity(jnp.sin, jnp.sin, [place(x, "data")])
batches = multihost_utils.process_allgather([place(x[:8], "data")], tiled=True)
assert jaxmp.parity(jnp.sin, jnp.sin, batches).rows[0].band == 1
print(round(float(loss), 4), zero.cause, zero.index, row.index, row.value, row.count)
"""


@EXPENSIVE
def test_arrays_of_several_processes_make_a_state_and_are_located():
    port = free_port()
    processes = [start(["-c", OF_ALL_PROCESSES, port, index]) for index in range(2)]
    assert results(processes) == ["1.3863 log_of_zero (9, 0) (11, 2) inf 1"] * 2


# Answers of the Kubernetes API about a job of two pods.
KUBERNETES = """
import builtins, io
from types import SimpleNamespace as Object

real_open = builtins.open
secrets = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
builtins.open = lambda f, *args, **options: (
    io.StringIO("research") if f == secrets else real_open(f, *args, **options)
)
pod = Object(
    metadata=Object(
        name="train-0",
        labels={"job-name": "train"},
        owner_references=[Object(controller=True, kind="Job")],
    ),
    spec=Object(subdomain="jaxpods"),
)
job = Object(metadata=Object(name="train", labels={}), spec=Object(parallelism=2))
core = Object(list_namespaced_pod=lambda namespace, field_selector: Object(items=[pod]))
batch = Object(read_namespaced_job=lambda name, namespace: {"train": job}[name])
config = Object(load_incluster_config=lambda: None)
client = Object(
    CoreV1Api=lambda: core,
    BatchV1Api=lambda: batch,
    exceptions=Object(ApiException=type("ApiException", (Exception,), {})),
)
"""


@EXPENSIVE
def test_the_pods_of_kubernetes_connect(tmp_path):
    (tmp_path / "kubernetes.py").write_text(KUBERNETES)
    variables = {
        "PYTHONPATH": str(tmp_path),
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "HOSTNAME": "localhost",
        # The name of the first pod, train-0.jaxpods, has no address here.
        "JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}",
    }
    script = CONNECT.format("None, None, None")
    processes = [start(["-c", script], **variables, JOB_COMPLETION_INDEX=str(i)) for i in range(2)]
    assert results(processes) == ["0 of 2 with 8", "1 of 2 with 8"]


@EXPENSIVE
def test_without_a_cluster_the_arguments_are_named():
    process = start([ROOT / "examples/train_sharded.py", "--mesh", "data=4", "--distributed"])
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 2
    text = " ".join(errors.replace("│", " ").split())
    assert "JAX detects no cluster here" in text and "--process-index I" in text


# ---------------------------------------------------------------------------
# Several processes
# ---------------------------------------------------------------------------


def start_training(port, count, *more):
    small = ("--layers", 1, "--width", 32, "--seq-len", 16, "--batch-size", 8, "--print-every", 5)
    command = [ROOT / "examples/train_sharded.py", "--mesh", "data=4,model=2", "--distributed"]
    command += ["--coordinator", f"localhost:{port}", "--processes", count, *small, *more]
    # Without the number of devices that conftest.py sets.
    start_one = functools.partial(start, XLA_FLAGS="")
    return [start_one([*command, "--process-index", index]) for index in range(count)]


@pytest.mark.slow
def test_one_and_four_processes_print_the_same_losses():
    printed = {}
    for count in (1, 4):
        outputs = wait(start_training(free_port(), count, "--steps", 10))
        losses = lambda text: [line for line in text.splitlines() if line.startswith("step ")]
        first, *others = map(losses, outputs)
        assert not any(others)  # only process 0 prints
        printed[count] = first
    assert len(printed[1]) == 2  # of steps 5 and 10
    assert printed[1] == printed[4]


def start_saving(folder):
    """Starts two processes, and waits until they have saved a checkpoint."""
    options = ("--steps", 100_000, "--checkpoint-dir", folder, "--checkpoint-every", 20)
    processes = start_training(free_port(), 2, *options)
    end = time.monotonic() + 600
    try:
        while not (folder / "20").exists() and time.monotonic() < end:
            assert all(process.poll() is None for process in processes)
            time.sleep(0.1)
    except BaseException:
        stop(processes)
        raise
    return processes


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_a_process_ends_the_others(victim, tmp_path):
    processes = start_saving(tmp_path)
    survivor = processes[1 - victim]
    try:
        processes[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        _, errors = survivor.communicate(timeout=2 * train_sharded.HEARTBEAT_TIMEOUT_SECONDS)
        assert time.monotonic() - killed < train_sharded.HEARTBEAT_TIMEOUT_SECONDS
    finally:
        stop(processes)
    # The second message is that of JAX, which noticed first.
    assert "another process has died" in errors or "another task died" in errors
    assert survivor.returncode != 0


@pytest.mark.slow
def test_all_processes_save_and_end_if_one_receives_sigterm(tmp_path):
    processes = start_saving(tmp_path)
    processes[1].terminate()
    printed, _ = wait(processes)
    steps = [int(folder.name) for folder in tmp_path.iterdir() if folder.name.isdecimal()]
    assert f"a process received SIGTERM; all end after step {max(steps)}" in printed
