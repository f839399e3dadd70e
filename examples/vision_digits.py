"""Trains a small CNN with BatchNorm on real handwritten digits, in the precision you name.

    python examples/vision_digits.py --recipe fp16
    python examples/vision_digits.py --all
    python examples/vision_digits.py --recipe my.toml --epochs 30 --width 32

Flax NNX. Prints a table, writes OUT/digits_RECIPE.png, and exits with 1 if a recipe ends below 98 %
on the test images. Install first: pip install "jaxmp[examples]".
"""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import typer
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

import jaxmp
from digits import Digits, handwritten_digits, shuffled_batches
from options import RecipeName
from pictures import BLACK, BLUE, VERMILION, save_png

GOAL_PERCENT = 98.0


class CNN(nnx.Module):
    """Three convolutions and two linear layers, written without a thought for precision."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs) -> None:
        """`width` channels after the first convolution, twice as many after each further one."""
        channels = (1, width, 2 * width, 4 * width)
        pairs = list(itertools.pairwise(channels))
        self.convs = nnx.List(nnx.Conv(*pair, (3, 3), use_bias=False, rngs=rngs) for pair in pairs)
        self.norms = nnx.List(nnx.BatchNorm(out, momentum=0.9, rngs=rngs) for _, out in pairs)
        self.hidden = nnx.Linear(2 * 2 * channels[-1], 8 * width, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.logits = nnx.Linear(8 * width, 10, rngs=rngs)

    def __call__(self, x_NHWC: jax.Array) -> jax.Array:
        """Returns logits (N, 10) for images (N, 8, 8, 1)."""
        for layer, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x_NHWC = nnx.relu(norm(conv(x_NHWC)))
            if layer > 0:
                x_NHWC = nnx.max_pool(x_NHWC, (2, 2), strides=(2, 2))
        x_NF = nnx.relu(self.hidden(x_NHWC.reshape(len(x_NHWC), -1)))
        return self.logits(self.dropout(x_NF))


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left behind; arrays per step are in the order of the steps."""

    recipe: str
    losses: np.ndarray  # per step
    scales: np.ndarray  # loss scale after each step; 1 where the recipe has none
    skipped: np.ndarray  # bool per step
    accuracies: list[float]  # percent of the test images, after each epoch
    predictions: np.ndarray  # of the test images, after the last epoch
    seconds: float


def train(
    name: str = "fp16",
    *,
    epochs: int = 15,
    batch_size: int = 64,
    width: int = 16,
    lr: float = 3e-3,
    seed: int = 0,
    digits: Digits | None = None,
) -> Run:
    """Trains on the digits in the recipe `name`."""
    start = time.perf_counter()
    digits = digits or handwritten_digits()
    steps = epochs * (len(digits.train_labels) // batch_size)
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, steps // 10, steps)

    recipe = impatient(jaxmp.load_recipe(name))
    model = recipe.wrap(CNN(width, rngs=nnx.Rngs(seed)))
    optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.adamw(schedule)))

    step = jaxmp.nnx.compile_step(train_step, model, optimizer)
    rng, history, accuracies = np.random.default_rng(seed), [], []
    for _ in range(epochs):
        for batch in shuffled_batches(digits.train_images, digits.train_labels, batch_size, rng):
            history.append(step(batch))
        step.write_back()
        jaxmp.check(optimizer)  # raises if the loss scale sits at its floor and still overflows
        predictions = predict(model, digits.test_images)
        accuracies.append(100 * float(np.mean(predictions == digits.test_labels)))
    losses, scales, finite = (np.array(column) for column in zip(*history, strict=True))
    seconds = time.perf_counter() - start
    return Run(name, losses, scales, ~finite, accuracies, predictions, seconds)


def impatient(recipe: jaxmp.Recipe) -> jaxmp.Recipe:
    """A dynamic loss scale that shows in 300 steps what it does in 30,000.

    It starts at its ceiling, where float16 overflows, and doubles after 50 clean steps, not 2000.
    """
    if not isinstance(recipe.loss_scale, jaxmp.DynamicLossScale):
        return recipe
    return recipe.replace(loss_scale=jaxmp.DynamicLossScale(2.0**24, growth_interval=50))


def loss_fn(model: CNN, batch: dict[str, jax.Array]) -> jax.Array:
    """Mean cross-entropy, in FP32 from the logits on."""
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def train_step(model: CNN, optimizer: jaxmp.nnx.Optimizer, batch: dict[str, jax.Array]) -> Any:
    """One step; returns the loss, the loss scale after it, and whether it was applied."""
    loss, grads = optimizer.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss, optimizer.loss_scale.scale_value, jaxmp.get_skip_stats(optimizer).last_finite


def predict(model: CNN, images: np.ndarray) -> np.ndarray:
    """The likeliest digit for each image, with the running statistics and without dropout."""
    model = nnx.view(model, use_running_average=True, deterministic=True)
    return np.asarray(_logits(model, images).argmax(-1))


@nnx.jit
def _logits(model: CNN, images: jax.Array) -> jax.Array:
    return model(images)


# ---------------------------------------------------------------------------
# Table and picture
# ---------------------------------------------------------------------------


def table(runs: list[Run]) -> Table:
    """One row for each recipe: how well it reads, and what its loss scale went through."""
    count = len(handwritten_digits().test_labels)
    title = f"{count} test images after {len(runs[0].losses)} steps"
    rows = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("recipe")
    for heading in ("accuracy", "last loss", "skipped", "loss scale", "seconds"):
        rows.add_column(heading, justify="right")
    for run in runs:
        rows.add_row(
            run.recipe,
            f"{run.accuracies[-1]:.2f} %",
            f"{run.losses[-1]:.4f}",
            str(run.skipped.sum()),
            f"{run.scales[-1]:g}",
            f"{run.seconds:.0f}",
        )
    return rows


def draw(run: Run, path: Path) -> Path:
    """Writes confusion matrix, learning curves and loss scale as a PNG."""
    figure = Figure(figsize=(11, 4.8), dpi=110, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.2))
    draw_confusion(left.subplots(), run.predictions)
    curves, scale = right.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    draw_curves(curves, run)
    draw_scale(scale, run)
    figure.suptitle(f"Handwritten digits in {run.recipe}: {run.accuracies[-1]:.2f} % right")
    return save_png(figure, path)


def draw_confusion(axes: Axes, predictions: np.ndarray) -> None:
    """Test images by what they are and what they were taken for; the diagonal is right."""
    matrix = np.zeros((10, 10), int)
    np.add.at(matrix, (handwritten_digits().test_labels, predictions), 1)
    axes.imshow(np.sqrt(matrix), cmap="cividis")  # the root shows the single errors too
    for (row, column), count in np.ndenumerate(matrix):
        if count:
            color = "black" if count > matrix.max() / 3 else "white"
            axes.text(column, row, str(count), ha="center", va="center", color=color, fontsize=9)
    axes.set(xticks=range(10), yticks=range(10), xlabel="taken for", ylabel="digit")
    axes.set_title("Test images", fontsize=11)


def draw_curves(axes: Axes, run: Run) -> None:
    """Loss of each step; on a second axis the test errors of each epoch."""
    steps = np.arange(1, len(run.losses) + 1)
    axes.plot(steps, run.losses, color=BLUE, linewidth=0.8, alpha=0.8)
    axes.set(yscale="log")
    axes.set_ylabel("training loss (nats)", color=BLUE)
    axes.grid(alpha=0.25)
    epochs = np.linspace(0, len(steps), len(run.accuracies) + 1)[1:]
    errors = axes.twinx()
    errors.plot(epochs, 100 - np.array(run.accuracies), color=VERMILION, marker="o", markersize=4)
    errors.axhline(100 - GOAL_PERCENT, color=VERMILION, linestyle=":", linewidth=1)
    errors.set_yscale("symlog", linthresh=1)  # down to no error at all
    errors.set_ylim(0, 100)
    errors.yaxis.set_major_formatter("{x:g}")
    errors.set_ylabel("test errors (%, circles)", color=VERMILION)
    axes.set_title(f"Learning curves; dotted: {100 - GOAL_PERCENT:g} % errors", fontsize=11)


def draw_scale(axes: Axes, run: Run) -> None:
    """The loss scale after each step, with the skipped ones as crosses."""
    steps = np.arange(1, len(run.scales) + 1)
    axes.step(steps, run.scales, where="post", color=BLACK, linewidth=1)
    axes.plot(steps[run.skipped], run.scales[run.skipped], "x", color=VERMILION)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale")
    axes.set_title(f"Loss scale; crosses: {run.skipped.sum()} skipped steps", fontsize=11)
    axes.grid(alpha=0.25)


def main(
    recipe: RecipeName = "fp16",
    every: Annotated[bool, typer.Option("--all", help="Every shipped recipe instead.")] = False,
    epochs: int = 15,
    batch_size: int = 64,
    width: Annotated[int, typer.Option(help="Channels of the first convolution.")] = 16,
    lr: Annotated[float, typer.Option(help="Peak, after warm-up and before cosine decay.")] = 3e-3,
    seed: int = 0,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("digits_out"),
) -> None:
    """Trains a small CNN with BatchNorm on real handwritten digits."""
    sizes = dict(epochs=epochs, batch_size=batch_size, width=width, lr=lr, seed=seed)
    runs = []
    for name in jaxmp.list_recipes() if every else [recipe]:
        runs.append(train(name, **sizes))
        picture = draw(runs[-1], out / f"digits_{Path(name).stem}.png")
        print(f"{name}: {runs[-1].accuracies[-1]:.2f} %, {picture}")
    Console().print(table(runs))
    below = [run.recipe for run in runs if not run.accuracies[-1] >= GOAL_PERCENT]
    if below:
        print(f"Below {GOAL_PERCENT} %: {', '.join(below)}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
