"""Trains a GAN that draws handwritten digits: two models, each with its optimizer and loss scale.

    python examples/gan.py
    python examples/gan.py --recipe bf16 --epochs 60
    python examples/gan.py --help

The models are written in Flax NNX. Each has a loss scale and skips steps independently: an overflow
in one model does not affect the other. Writes OUT/digits_gan.png: one column of images for each
requested digit, the losses and the loss scales. Install first: pip install -e ".[examples]".

Shape suffixes: B batch, Z noise, H and W pixels, a last axis of one channel.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import track
from sklearn.neighbors import KNeighborsClassifier

import jaxmp
from command_line import Positive, RecipeName, Seed
from vision_digits import BLUE, VERMILION, BatchSize, handwritten_digits, shorten_growth

NOISE = 32
DIGITS = 10

# ---------------------------------------------------------------------------
# Players
# ---------------------------------------------------------------------------


class Generator(nnx.Module):
    """Maps noise and a digit to an image, as in DCGAN (Radford et al. 2016, arXiv:1511.06434)."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        """Makes layers with `width` channels at full size."""
        self.width = width
        self.project = nnx.Linear(NOISE + DIGITS, 4 * 4 * 2 * width, rngs=rngs)
        self.project_norm = nnx.BatchNorm(2 * width, momentum=0.9, rngs=rngs)
        self.grow = nnx.ConvTranspose(2 * width, width, (4, 4), strides=(2, 2), rngs=rngs)
        self.grow_norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.paint = nnx.Conv(width, 1, (3, 3), rngs=rngs)

    def __call__(self, noise_BZ: jax.Array, labels_B: jax.Array) -> jax.Array:
        """Returns images_BHW1 with 8x8 pixels in (-1, 1) for the digits in labels_B."""
        digit = jax.nn.one_hot(labels_B, DIGITS, dtype=noise_BZ.dtype)
        x = self.project(jnp.concatenate([noise_BZ, digit], axis=-1))
        x = nnx.relu(self.project_norm(x.reshape(-1, 4, 4, 2 * self.width)))
        return jnp.tanh(self.paint(nnx.relu(self.grow_norm(self.grow(x)))))


class Discriminator(nnx.Module):
    """Distinguishes drawn images of a digit from real ones."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        """Makes layers with `width` channels at full size."""
        self.look = nnx.Conv(1 + DIGITS, width, (3, 3), rngs=rngs)
        self.shrink = nnx.Conv(width, 2 * width, (4, 4), strides=(2, 2), rngs=rngs)
        self.shrink_more = nnx.Conv(2 * width, 4 * width, (4, 4), strides=(2, 2), rngs=rngs)
        self.logits = nnx.Linear(2 * 2 * 4 * width, 1, rngs=rngs)

    def __call__(self, images_BHW1: jax.Array, labels_B: jax.Array) -> jax.Array:
        """Returns logits_B, which are positive for images that look like real ones of labels_B."""
        digit = jax.nn.one_hot(labels_B, DIGITS, dtype=images_BHW1.dtype)[:, None, None]
        planes = jnp.broadcast_to(digit, (*images_BHW1.shape[:-1], DIGITS))
        x = jnp.concatenate([images_BHW1, planes], axis=-1)
        for conv in (self.look, self.shrink, self.shrink_more):
            x = nnx.leaky_relu(conv(x), 0.2)
        return self.logits(x.reshape(len(x), -1))[:, 0]


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


class Players(NamedTuple):
    """Both models, and for each an optimizer with loss scale and skip counters."""

    generator: Generator
    discriminator: Discriminator
    generator_optimizer: jaxmp.nnx.Optimizer
    discriminator_optimizer: jaxmp.nnx.Optimizer


def make_players(recipe: Any, width: int = 32, lr: float = 1e-3, seed: int = 0) -> Players:
    """Returns new players that use one recipe."""
    recipe = shorten_growth(jaxmp.load_recipe(recipe))
    rngs = nnx.Rngs(seed)
    models = [recipe.wrap(kind(width, rngs=rngs)) for kind in (Generator, Discriminator)]
    tx = recipe.optimizer(optax.adam(lr, b1=0.5))
    return Players(*models, *(jaxmp.nnx.Optimizer(model, tx) for model in models))


class StepReport(NamedTuple):
    """Result of one step: first the value of the generator, then that of the discriminator."""

    losses: jax.Array  # (2,)
    scales: jax.Array  # (2,) loss scales after the step
    applied: jax.Array  # (2,) bool: False if that player skipped the step


def train_step(
    generator: Generator,
    discriminator: Discriminator,
    generator_optimizer: jaxmp.nnx.Optimizer,
    discriminator_optimizer: jaxmp.nnx.Optimizer,
    batch: dict[str, jax.Array],
) -> StepReport:
    """Trains both players on a batch, each against the other before the step."""
    labels_B = batch["label"]

    def generator_loss(generator: Generator) -> Any:
        drawn_BHW1 = generator(batch["noise"], labels_B)
        return -nnx.log_sigmoid(discriminator(drawn_BHW1, labels_B)).mean(), drawn_BHW1

    def discriminator_loss(discriminator: Discriminator, drawn_BHW1: jax.Array) -> jax.Array:
        real_B = discriminator(batch["image"], labels_B)
        drawn_B = discriminator(drawn_BHW1, labels_B)
        return -(nnx.log_sigmoid(real_B) + nnx.log_sigmoid(-drawn_B)).mean()

    (loss_g, drawn_BHW1), grads_g = generator_optimizer.value_and_grad(
        generator_loss, has_aux=True
    )(generator)
    loss_d, grads_d = discriminator_optimizer.value_and_grad(discriminator_loss)(
        discriminator, drawn_BHW1
    )
    generator_optimizer.update(generator, grads_g)
    discriminator_optimizer.update(discriminator, grads_d)
    optimizers = (generator_optimizer, discriminator_optimizer)
    return StepReport(
        losses=jnp.stack([loss_g, loss_d]),
        scales=jnp.stack([each.loss_scale.scale_value for each in optimizers]),
        applied=jnp.stack([jaxmp.get_skip_stats(each).last_finite for each in optimizers]),
    )


def train(
    recipe: Any = "fp16",
    *,
    epochs: int = 40,
    batch_size: int = 64,
    width: int = 32,
    lr: float = 1e-3,
    seed: int = 0,
) -> tuple[Generator, StepReport]:
    """Returns the trained generator, and the stacked reports of all steps."""
    digits, rng = handwritten_digits(), np.random.default_rng(seed)
    both = make_players(recipe, width, lr, seed)
    step = nnx.cached_partial(nnx.jit(train_step), *both)
    reports = []
    for _ in track(range(epochs), "GAN"):
        for batch in batches(digits.train_images, digits.train_labels, batch_size, rng):
            reports.append(step(batch))
    for optimizer in (both.generator_optimizer, both.discriminator_optimizer):
        jaxmp.check(optimizer)  # raises if gradients overflow at the smallest scale
    return both.generator, StepReport(*map(np.stack, zip(*reports, strict=True)))


def batches(
    images: np.ndarray, labels: np.ndarray, batch_size: int, rng: np.random.Generator
) -> Iterator[dict[str, np.ndarray]]:
    """Yields one epoch: real images in (-1, 1), their labels, and noise for drawn images."""
    order = rng.permutation(len(images))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        indices = order[start : start + batch_size]
        noise = rng.standard_normal((batch_size, NOISE), np.float32)
        yield {"image": 2 * images[indices] - 1, "label": labels[indices], "noise": noise}


@nnx.jit
def _draw(generator: Generator, noise_BZ: jax.Array, labels_B: jax.Array) -> jax.Array:
    return generator(noise_BZ, labels_B)


def draw_digits(generator: Generator, rows: int, seed: int = 1) -> np.ndarray:
    """Returns images (rows, 10, 8, 8) in (-1, 1); each row has every digit once."""
    noise = np.random.default_rng(seed).standard_normal((rows * DIGITS, NOISE), np.float32)
    generator = nnx.view(generator, use_running_average=True)
    drawn = _draw(generator, noise, np.tile(np.arange(DIGITS), rows))
    return np.asarray(drawn).reshape(rows, DIGITS, 8, 8)


def legible_percent(images: np.ndarray) -> float:
    """Returns the percentage of images (rows, 10, 8, 8) that a nearest neighbor gets right."""
    digits = handwritten_digits()
    flat = lambda x: x.reshape(-1, 64)
    reader = KNeighborsClassifier(1).fit(flat(2 * digits.train_images - 1), digits.train_labels)
    return 100 * float(np.mean(reader.predict(flat(images)) == np.tile(range(10), len(images))))


# ---------------------------------------------------------------------------
# Picture
# ---------------------------------------------------------------------------

PLAYERS = {"generator": (BLUE, "-", "x"), "discriminator": (VERMILION, "--", "+")}


def draw(images: np.ndarray, report: StepReport, title: str, path: Path) -> Path:
    """Draws digits, losses and loss scales, and saves them as a PNG."""
    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.1))
    draw_samples(left.subplots(), images)
    losses, scales = right.subplots(2, 1, sharex=True)
    draw_players(losses, report.losses)
    losses.set(ylabel="loss (nats)")
    losses.set_title("Losses", fontsize=11)
    draw_players(scales, report.scales, ~report.applied)
    scales.set_yscale("log", base=2)
    scales.set(xlabel="step", ylabel="loss scale")
    scales.set_title("Loss scales; crosses: skipped steps", fontsize=11)
    losses.legend(frameon=False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def draw_samples(axes: Axes, images: np.ndarray) -> None:
    """Draws images (rows, 10, 8, 8) with a pixel of space between them."""
    spaced = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-1)
    rows, columns, height, width = spaced.shape
    sheet = spaced.transpose(0, 2, 1, 3).reshape(rows * height, columns * width)
    axes.imshow(sheet, cmap="gray", vmin=-1, vmax=1)
    axes.set_xticks(np.arange(columns) * width + width / 2 - 0.5, range(columns))
    axes.set(yticks=[], xlabel="requested digit")
    axes.set_title("Drawn by the generator", fontsize=11)


def draw_players(axes: Axes, values: np.ndarray, skipped: np.ndarray | None = None) -> None:
    """Draws two columns of `values` per step, and `skipped` steps as crosses."""
    steps = np.arange(1, len(values) + 1)
    for column, (name, (color, line, cross)) in enumerate(PLAYERS.items()):
        axes.plot(steps, values[:, column], line, color=color, linewidth=0.9, label=name)
        if skipped is not None:
            out = skipped[:, column]
            axes.plot(steps[out], values[out, column], cross, color=color)
    axes.grid(alpha=0.25)


def main(
    recipe: RecipeName = "fp16",
    epochs: Positive = 40,
    batch_size: BatchSize = 64,
    width: Positive = 32,
    lr: float = 1e-3,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for digits_gan.png.")] = Path(
        "digits_out"
    ),
) -> None:
    """Trains a generator and a discriminator, and draws digits."""
    generator, report = train(
        recipe, epochs=epochs, batch_size=batch_size, width=width, lr=lr, seed=seed
    )
    skips = (~report.applied).sum(axis=0)
    for name, loss, scale, skipped in zip(
        PLAYERS, report.losses[-1], report.scales[-1], skips, strict=True
    ):
        print(f"{name:<14} loss {loss:.3f}, loss scale {scale:g}, {skipped} steps skipped")
    legible = legible_percent(draw_digits(generator, 50))
    print(f"{legible:.0f} % of 500 drawn digits are classified as the requested digit")
    title = f"GAN with the recipe {recipe}: two losses, optimizers and loss scales"
    print(draw(draw_digits(generator, 8), report, title, out / "digits_gan.png"))


if __name__ == "__main__":
    typer.run(main)
