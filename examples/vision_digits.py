"""Trains a small CNN with BatchNorm on handwritten digits, with any recipe.

    python examples/vision_digits.py --recipe fp16
    python examples/vision_digits.py --all
    python examples/vision_digits.py --recipe my.toml --epochs 30 --width 32

The model is written in Flax NNX. With a dynamic loss scale, the example sets the first scale to
2**24 itself, so that the first steps are skipped until it has decreased. Prints a table, writes
OUT/digits_RECIPE.png, and exits with 1 if a recipe reaches less than 98 % on the test images.
Install first: pip install -e ".[examples]".

The data requires no download: scikit-learn contains 1797 images of 8x8 pixels, which are the test
images of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository, 1998.

Shape suffixes: N images, H and W their pixels, C channels, F features.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

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
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxmp
from command_line import Positive, RecipeName, Seed

# Of the 1,347 examples of an epoch.
BatchSize = Annotated[int, typer.Option(min=1, max=1347)]
GOAL_PERCENT = 98.0

# Palette of Okabe and Ito, which is legible with every kind of color vision.
BLACK, BLUE, VERMILION = "#000000", "#0072B2", "#D55E00"

# ---------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------


class Digits(NamedTuple):
    """Images and labels; a quarter of the images of each digit are test images."""

    train_images: np.ndarray  # (1347, 8, 8, 1) float32 in [0, 1]
    train_labels: np.ndarray  # (1347,) int32
    test_images: np.ndarray  # (450, 8, 8, 1)
    test_labels: np.ndarray  # (450,)


@functools.cache
def handwritten_digits() -> Digits:
    """Returns the images of scikit-learn, split into training and test images."""
    dataset = load_digits()
    images_NHW1 = (dataset.images[..., None] / 16).astype(np.float32)
    labels_N = dataset.target.astype(np.int32)
    train, test, train_labels, test_labels = train_test_split(
        images_NHW1, labels_N, test_size=0.25, stratify=labels_N, random_state=0
    )
    return Digits(train, train_labels, test, test_labels)


def shuffled_batches(
    images_NHW1: np.ndarray, labels_N: np.ndarray, batch_size: int, rng: np.random.Generator
) -> Iterator[dict[str, np.ndarray]]:
    """Yields one epoch of batches, with each image shifted by up to one pixel per direction."""
    order = rng.permutation(len(images_NHW1))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        indices = order[start : start + batch_size]
        yield {"image": _shift(images_NHW1[indices], rng), "label": labels_N[indices]}


def _shift(images_NHW1: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    count, height, width, _ = images_NHW1.shape
    padded = np.pad(images_NHW1, ((0, 0), (1, 1), (1, 1), (0, 0)))
    top, left = rng.integers(0, 3, (2, count, 1, 1))
    rows, columns = top + np.arange(height)[:, None], left + np.arange(width)
    return padded[np.arange(count)[:, None, None], rows, columns]


# ---------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------


class CNN(nnx.Module):
    """Three convolutions and two linear layers, without any dtypes."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs) -> None:
        """Makes layers: `width` channels after the first convolution, doubled after each other."""
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
    """Result of a run."""

    recipe: str
    losses: np.ndarray  # per step
    scales: np.ndarray  # loss scale after each step; 1 without a loss scale
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
    """Trains on the digits with one recipe."""
    start = time.perf_counter()
    digits = digits or handwritten_digits()
    steps = epochs * (len(digits.train_labels) // batch_size)
    schedule = optax.warmup_cosine_decay_schedule(0.0, lr, steps // 10, steps)

    recipe = shorten_growth(jaxmp.load_recipe(name))
    model = recipe.wrap(CNN(width, rngs=nnx.Rngs(seed)))
    optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.adamw(schedule)))

    step = nnx.cached_partial(nnx.jit(train_step), model, optimizer)
    rng, history, accuracies = np.random.default_rng(seed), [], []
    for _ in range(epochs):
        for batch in shuffled_batches(digits.train_images, digits.train_labels, batch_size, rng):
            history.append(step(batch))
        jaxmp.check(optimizer)  # raises if gradients overflow at the smallest loss scale
        predictions = predict(model, digits.test_images)
        accuracies.append(100 * float(np.mean(predictions == digits.test_labels)))
    losses, scales, finite = (np.array(column) for column in zip(*history, strict=True))
    seconds = time.perf_counter() - start
    return Run(name, losses, scales, ~finite, accuracies, predictions, seconds)


def shorten_growth(recipe: jaxmp.Recipe) -> jaxmp.Recipe:
    """Replaces a dynamic loss scale by one that changes often enough for a run of 300 steps.

    It starts at its maximum, at which float16 overflows, and doubles after 50 finite steps instead
    of 2000.
    """
    if not isinstance(recipe.loss_scale, jaxmp.DynamicLossScale):
        return recipe
    return recipe.replace(loss_scale=jaxmp.DynamicLossScale(2.0**24, growth_interval=50))


def loss_fn(model: CNN, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy, computed in FP32 from FP32 logits."""
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def train_step(model: CNN, optimizer: jaxmp.nnx.Optimizer, batch: dict[str, jax.Array]) -> Any:
    """Trains on a batch; returns the loss, the new loss scale, and True if it was applied."""
    loss, grads = optimizer.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss, optimizer.loss_scale.scale_value, jaxmp.get_skip_stats(optimizer).last_finite


def predict(model: CNN, images: np.ndarray) -> np.ndarray:
    """Returns the most probable digit of each image, with running statistics, without dropout."""
    model = nnx.view(model, use_running_average=True, deterministic=True)
    return np.asarray(_logits(model, images).argmax(-1))


@nnx.jit
def _logits(model: CNN, images: jax.Array) -> jax.Array:
    return model(images)


# ---------------------------------------------------------------------------
# Table and picture
# ---------------------------------------------------------------------------


def table(runs: list[Run]) -> Table:
    """Returns a table with one row per recipe: accuracy, loss, skipped steps and loss scale."""
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
    """Draws the test errors and the loss scale, and saves them as a PNG."""
    figure = Figure(figsize=(11, 3.4), dpi=110, layout="constrained")
    errors, scale = figure.subplots(1, 2)
    draw_errors(errors, run)
    draw_scale(scale, run)
    figure.suptitle(f"Handwritten digits in {run.recipe}: {run.accuracies[-1]:.2f} % correct")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def draw_errors(axes: Axes, run: Run) -> None:
    """Draws the share of wrong test images after each epoch."""
    epochs = np.arange(1, len(run.accuracies) + 1)
    axes.plot(epochs, 100 - np.array(run.accuracies), color=BLUE, marker="o", markersize=4)
    axes.set(xlabel="epoch", ylabel="test errors (%)", ylim=(0, None))
    axes.set_title("Wrong test images after each epoch", fontsize=11)
    axes.grid(alpha=0.25)


def draw_scale(axes: Axes, run: Run) -> None:
    """Draws the loss scale after each step, and skipped steps as crosses."""
    steps = np.arange(1, len(run.scales) + 1)
    axes.step(steps, run.scales, where="post", color=BLACK, linewidth=1)
    axes.plot(steps[run.skipped], run.scales[run.skipped], "x", color=VERMILION)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale")
    axes.set_title(f"Loss scale; crosses: {run.skipped.sum()} skipped steps", fontsize=11)
    axes.grid(alpha=0.25)


def main(
    recipe: RecipeName = "fp16",
    every: Annotated[
        bool, typer.Option("--all", help="Train with every installed recipe.")
    ] = False,
    epochs: Positive = 15,
    batch_size: BatchSize = 64,
    width: Annotated[int, typer.Option(min=1, help="Channels of the first convolution.")] = 16,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-3,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the pictures.")] = Path(
        "digits_out"
    ),
) -> None:
    """Trains a small CNN with BatchNorm on handwritten digits."""
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
