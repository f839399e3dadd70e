"""Draws which gradients of a training step float16 loses, without and with a loss scale.

    python examples/gradient_histogram.py
    python examples/gradient_histogram.py --out demo_out --steps 300

Trains a byte-level GPT in FP32 on the source code of Python's standard library, measures one step
with `jaxmp.with_stats`, and writes OUT/gradients_fp16.png.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import optax
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import jaxmp
from command_line import Positive, check_divisible
from train_lm import GPT, prepare, random_batch, standard_library_text

BLUE, VERMILION, GRAY = "#0072B2", "#D55E00", "#EEEEEE"
# Exponents of float16: the largest that rounds to zero, and those of its normal numbers.
ZERO, NORMAL, LARGEST = -25, -14, 15


def measure(model: GPT, steps: int, batch_size: int) -> np.ndarray:
    """Returns the number of gradient elements at each of the 256 exponents of FP32.

    The gradients are those of the parameters, and those of the outputs of matmuls. The latter count
    once for each of the two matmuls of the backward pass that read them.
    """
    text = standard_library_text().train
    state, train_step, _ = prepare("fp32", model, optax.adamw(3e-3))
    batches = [random_batch(text, batch_size, model.max_length, 0, i) for i in range(steps + 1)]
    for batch in batches[:-1]:
        state, _ = train_step(state, batch)
    tensors = jaxmp.with_stats(train_step)(state, batches[-1]).tensors
    gradients = [*tensors["gradients"].values()]
    gradients += [x for name, x in tensors["operands"].items() if ":output_grad" in name]
    return np.sum(
        [np.asarray(x.exponents).reshape(-1, 256, 3).sum((0, 2)) for x in gradients], axis=0
    )


def draw(axes: Axes, counts: np.ndarray, scale: int) -> None:
    """Draws the share of the elements at each exponent after multiplication by 2**scale."""
    exponents = np.arange(1, 255) - 127 + scale  # row 0 counts zeros, row 255 infinities
    share = 100 * counts[1:255] / counts[1:255].sum()
    lost = exponents <= ZERO
    axes.axvspan(NORMAL - 0.5, LARGEST + 0.5, color=GRAY, linewidth=0)
    axes.bar(exponents, share, color=np.where(lost, VERMILION, BLUE))
    axes.set(xlim=(-60, 20), xlabel="exponent of the element", ylabel="share of the elements (%)")
    over = share[exponents > LARGEST].sum()
    axes.set_title(
        f"Loss scale 2**{scale}: {share[lost].sum():.1f} % become zero, {over:.1f} % overflow",
        fontsize=11,
    )


def main(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the picture.")] = Path(
        "demo_out"
    ),
    steps: Positive = 100,
    seq_len: Positive = 64,
    batch_size: Positive = 16,
    layers: Positive = 2,
    width: Positive = 128,
) -> None:
    """Draws which gradients of a training step float16 loses."""
    check_divisible("--width", width, "the number of heads,", GPT.heads)
    counts = measure(GPT(layers, width, max_length=seq_len), steps, batch_size)
    figure = Figure(figsize=(11, 3.4), dpi=110, layout="constrained")
    for axes, scale in zip(figure.subplots(1, 2, sharey=True), (0, 16), strict=True):
        draw(axes, counts, scale)
    figure.suptitle("Gradients in float16; gray: numbers with full precision", fontsize=13)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "gradients_fp16.png")
    print(f"Histograms: {out / 'gradients_fp16.png'}")


if __name__ == "__main__":
    typer.run(main)
