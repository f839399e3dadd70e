"""Times saving and restoring a state of 1 GB, and compares with plain orbax.

    python benchmarks/checkpoint_speed.py
    python benchmarks/checkpoint_speed.py --megabytes 256 --out speed.json

`save()` should return within 10 % of the time of a synchronous save, and `restore(verify=False)`
should take at most 1.2 times as long as plain orbax. With checksums (the default), files and leaves
are read in full. Each time is the median of alternating rounds.
"""

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import typer

import jaxmp
from jaxmp.checkpoint import Checkpointer

LEAVES = 16


def make_state(megabytes: int) -> dict[str, jax.Array]:
    """Returns float32 arrays of random bits."""
    size = megabytes * 2**20 // LEAVES // 4
    rng = np.random.default_rng(0)
    return {
        f"leaf_{i}": jnp.asarray(rng.random((size // 256, 256), np.float32)) for i in range(LEAVES)
    }


def seconds(action: Callable[[], Any]) -> float:
    """Returns the time of an action, with everything that it computes."""
    start = time.perf_counter()
    jax.block_until_ready(action())
    return time.perf_counter() - start


def one_round(state: dict[str, jax.Array], root: Path) -> dict[str, float]:
    """Times each variant once."""
    times = {}
    with ocp.StandardCheckpointer() as plain:
        times["orbax: save() returns"] = seconds(lambda: plain.save(root / "plain", state))
        times["orbax: save() and wait"] = times["orbax: save() returns"] + seconds(
            plain.wait_until_finished
        )
        times["orbax: restore"] = seconds(lambda: plain.restore(root / "plain", state))
    with Checkpointer(root / "jaxmp") as checkpointer:
        save = lambda: checkpointer.save(1, state, recipe="fp32")
        times["jaxmp: save() returns"] = seconds(save)
        times["jaxmp: save() and wait"] = times["jaxmp: save() returns"] + seconds(
            checkpointer.wait
        )
        times["jaxmp: restore(verify=False)"] = seconds(
            lambda: checkpointer.restore(state, verify=False)
        )
        times["jaxmp: restore"] = seconds(lambda: checkpointer.restore(state))
    return times


def main(
    megabytes: int = 1000,
    rounds: int = 3,
    out: Annotated[Path | None, typer.Option(help="Write the times as JSON.")] = None,
) -> None:
    """Prints the median of each time."""
    state = jax.block_until_ready(make_state(megabytes))
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        root = Path(tempfile.mkdtemp())
        try:
            row = one_round(state, root)
        finally:
            shutil.rmtree(root)
        if number:  # the first round compiles
            for name, value in row.items():
                times.setdefault(name, []).append(value)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"{name:<30} {value:7.3f} s   {megabytes / 1000 / value:6.2f} GB/s")
    share = medians["jaxmp: save() returns"] / medians["jaxmp: save() and wait"]
    print(f"save() returns after {share:.0%} of the time of a synchronous save")
    for name in ("jaxmp: restore(verify=False)", "jaxmp: restore"):
        print(f"{name}: {medians[name] / medians['orbax: restore']:.2f} times plain orbax")
    if out is not None:
        where = dict(
            device=jax.devices()[0].device_kind, jax=jax.__version__, jaxmp=jaxmp.__version__
        )
        out.write_text(json.dumps({"megabytes": megabytes, **where, "seconds": times}, indent=1))


if __name__ == "__main__":
    typer.run(main)
