"""Trains one model with four recipes, and compares their losses.

    python examples/demo.py
    python examples/demo.py --out demo_out --steps 500

The recipes fp32, bf16, fp16 and bf16_params start from the same weights and see the same batches.
The script prints a table and writes OUT/losses.png. It exits with 1 if a final held-out loss
differs from that of fp32 by more than 0.5 %.
"""

from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator
from rich import box
from rich.console import Console
from rich.table import Table

import jaxmp
from command_line import Positive
from train_lm import Run, train

RECIPES = ("fp32", "bf16", "fp16", "bf16_params")
TOLERANCE_PERCENT = 0.5
CPU_NOTE = (
    "The times were measured on a CPU. XLA converts 16-bit values to FP32 and back there, so that "
    "16-bit recipes are slower than FP32. The run compares accuracy and memory; a gain in speed "
    "requires a GPU or TPU."
)

# Palette of Okabe and Ito, which is legible with every kind of color vision.
# Line styles and markers distinguish the recipes in gray.
BLACK, BLUE, VERMILION, GREEN = "#000000", "#0072B2", "#D55E00", "#009E73"
STYLES = {
    "fp32": dict(color=BLACK, linestyle="-", marker="o"),
    "bf16": dict(color=BLUE, linestyle="--", marker="s"),
    "fp16": dict(color=VERMILION, linestyle="-.", marker="^"),
    "bf16_params": dict(color=GREEN, linestyle=":", marker="D"),
}


def main(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for losses.png.")] = Path(
        "demo_out"
    ),
    steps: Positive = 250,
    seq_len: Positive = 64,
    batch_size: Positive = 16,
    layers: Positive = 3,
    width: Positive = 128,
    eval_every: Positive = 25,
    eval_batches: Positive = 16,
) -> None:
    """Trains one model with four recipes, and compares their losses."""
    sizes = dict(seq_len=seq_len, batch_size=batch_size, layers=layers, width=width)
    evals = dict(eval_every=eval_every, eval_batches=eval_batches)
    runs = {name: train(name, steps=steps, **sizes, **evals) for name in RECIPES}
    Console().print(table(runs))
    if jax.default_backend() == "cpu":
        print(CPU_NOTE)
    print(f"Loss curves: {draw(runs, out / 'losses.png')}")
    over = [name for name in RECIPES if not abs(difference(runs, name)) <= TOLERANCE_PERCENT]
    if over:
        print(f"More than {TOLERANCE_PERCENT} % from fp32: {', '.join(over)}")
        raise typer.Exit(1)


def final_loss(run: Run) -> float:
    """Returns the held-out loss after the last step."""
    return list(run.held_out_losses.values())[-1]


def difference(runs: dict[str, Run], name: str) -> float:
    """Returns the difference of the final held-out loss from that of fp32, in percent."""
    return 100 * (final_loss(runs[name]) / final_loss(runs["fp32"]) - 1)


# ---------------------------------------------------------------------------
# Table
# ---------------------------------------------------------------------------


def table(runs: dict[str, Run]) -> Table:
    """Returns a table with one row per recipe: loss, skipped steps and stored bytes."""
    steps = max(runs["fp32"].train_losses)
    title = f"After {steps} steps: held-out loss; bytes of the train state"
    rows = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("recipe")
    for heading in ("loss", "vs fp32", "skipped", "params", "masters", "moments"):
        rows.add_column(heading, justify="right")
    for name, run in runs.items():
        rows.add_row(
            name,
            f"{final_loss(run):.4f}",
            f"{difference(runs, name):+.2f} %",
            str(int(jaxmp.get_skip_stats(run.state).total)),
            *(f"{size:,}" for size in stored_bytes(run.state)),
        )
    return rows


def stored_bytes(state: Any) -> tuple[int, int, int]:
    """Returns the bytes of parameters, of separate masters, and of Adam's moments."""
    masters = jax.tree.map(
        lambda param, master: None if master.dtype == param.dtype else master,
        state.params,
        jaxmp.get_master_params(state),
    )
    moments = [optax.tree.get(state.opt_state, name) for name in ("mu", "nu")]
    return _nbytes(state.params), _nbytes(masters), _nbytes(moments)


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


# ---------------------------------------------------------------------------
# Picture
# ---------------------------------------------------------------------------


def draw(runs: dict[str, Run], path: Path) -> Path:
    """Draws the differences of the losses from fp32, and the losses, and saves them as a PNG."""
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    differences, losses = figure.subplots(1, 2, width_ratios=(3, 2))
    draw_differences(differences, runs)
    draw_losses(losses, runs)
    figure.suptitle("One model and one order of batches with four recipes", fontsize=13)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def draw_losses(axes: Axes, runs: dict[str, Run]) -> None:
    """Draws training losses as thin lines, and held-out losses with markers."""
    for name, run in runs.items():
        axes.plot(*_xy(run.train_losses), color=STYLES[name]["color"], alpha=0.15, linewidth=0.8)
        axes.plot(*_xy(run.held_out_losses), **STYLES[name], markersize=4)
    axes.set(yscale="log", xlabel="step", ylabel="loss (nats per byte, log scale)")
    axes.set_title("Held-out loss (markers) over training loss (thin)", fontsize=11)
    axes.yaxis.set_major_locator(FixedLocator([1.5, 2, 2.5, 3, 4, 5, 6]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.25)


def draw_differences(axes: Axes, runs: dict[str, Run]) -> None:
    """Draws the difference of the held-out loss from fp32, with the tolerance as a band."""
    steps, reference = _xy(runs["fp32"].held_out_losses)
    axes.axhspan(-TOLERANCE_PERCENT, TOLERANCE_PERCENT, color=BLACK, alpha=0.07, linewidth=0)
    axes.annotate(
        f"tolerance of the last step: ±{TOLERANCE_PERCENT} %",
        (steps[-1], TOLERANCE_PERCENT),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )
    for name, run in runs.items():
        percent = 100 * (_xy(run.held_out_losses)[1] / reference - 1)
        axes.plot(steps, percent, **STYLES[name], markersize=4, label=name)
    axes.legend(frameon=False)
    axes.set(xlabel="step", ylabel="held-out loss over that of fp32 (%)")
    axes.set_title("Difference from fp32", fontsize=11)
    axes.grid(alpha=0.25)


def _xy(losses: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(list(losses)), np.array(list(losses.values()))


if __name__ == "__main__":
    typer.run(main)
