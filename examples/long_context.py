"""Trains a byte-level GPT on texts of increasing length until the memory is exhausted.

    python examples/long_context.py
    python examples/long_context.py --memory-limit 4 --seconds 60
    python examples/long_context.py --recipe fp32 --layers 4 --width 128 --longest 65536
    python examples/long_context.py --help

Each step reads one text of T bytes, and T doubles. The first series uses flash attention: "auto" on
a GPU, which chooses cuDNN's kernel, and "blockwise" on other devices. The second uses "xla", which
stores the logits of all pairs. On a GPU a series ends at an out-of-memory error. On other devices
it ends at --memory-limit: a step whose compiled program requires more is not run. Prints a line for
each length and draws memory and time over the length in long_context_out/long_context.png.
Install first: pip install -e ".[examples]".
"""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

import jaxmp
from byte_gpt import GPT, VOCABULARY, random_batch, standard_library_text
from command_line import Positive, RecipeName, check_divisible

GIB = 2**30

# Palette of Okabe and Ito, which is legible with every kind of color vision.
BLACK, BLUE, VERMILION = "#000000", "#0072B2", "#D55E00"

# ---------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------


class Block(nn.Module):
    """`byte_gpt.Block` with `is_causal=True` instead of an array of T x T as the mask."""

    heads: int
    attention: str  # an implementation of jaxmp.dot_product_attention

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns x_BTD after attention and a two-layer perceptron, each with a residual."""
        width = x_BTD.shape[-1]
        h_BTD = nn.LayerNorm(name="attention_norm")(x_BTD)
        attention_fn = jaxmp.attention_fn(is_causal=True, implementation=self.attention)
        attention = nn.MultiHeadDotProductAttention(
            self.heads, attention_fn=attention_fn, name="attention"
        )
        x_BTD = x_BTD + attention(h_BTD)
        h_BTD = nn.LayerNorm(name="mlp_norm")(x_BTD)
        h_BTF = nn.gelu(nn.Dense(4 * width, name="mlp_up")(h_BTD))
        return x_BTD + nn.Dense(width, name="mlp_down")(h_BTF)


class LongGPT(GPT):
    """`byte_gpt.GPT` with these blocks, and with the same parameter names."""

    attention: str = "auto"

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Returns logits_BTV for int tokens_BT, at most `max_length` long."""
        x_BTD = nn.Embed(VOCABULARY, self.width, name="token_embedding")(tokens_BT)
        positions_1T = jnp.arange(tokens_BT.shape[1])[None]
        positions = nn.Embed(self.max_length, self.width, name="position_embedding")
        x_BTD = x_BTD + jnp.broadcast_to(positions(positions_1T), x_BTD.shape)
        for layer in range(self.layers):
            x_BTD = Block(self.heads, self.attention, name=f"block_{layer}")(x_BTD)
        x_BTD = nn.LayerNorm(name="final_norm")(x_BTD)
        return nn.Dense(VOCABULARY, use_bias=False, name="lm_head")(x_BTD)


# ---------------------------------------------------------------------------
# One length
# ---------------------------------------------------------------------------


class OutOfMemoryError(Exception):
    """A step that does not fit into the memory of the device."""


@dataclasses.dataclass(frozen=True)
class Point:
    """Measurements of one length with one implementation; None: not measured."""

    length: int
    temporary: int | None  # bytes, of the compiled step
    needed: int | None  # temporary bytes, parameters and optimizer state
    seconds: float | None = None  # of a step
    loss: float | None = None  # of the last step


@contextlib.contextmanager
def convert_memory_errors() -> Iterator[None]:
    """Raises `OutOfMemoryError` if XLA reports that the memory is exhausted."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError from error


def prepare(recipe: str, model: LongGPT) -> tuple[jaxmp.TrainState, Callable[..., Any]]:
    """Returns the initial state and the jitted train step."""
    loaded = jaxmp.load_recipe(recipe)
    wrapped = loaded.wrap(model)
    tx = loaded.optimizer(optax.adamw(1e-3))
    tokens_BT = jnp.zeros((1, model.max_length), jnp.int32)
    params = jax.jit(wrapped.init)(jax.random.key(0), tokens_BT)
    state = jaxmp.TrainState.create(apply_fn=wrapped.apply, params=params, tx=tx)

    def loss_fn(params: Any, tokens_BS: jax.Array) -> jax.Array:
        logits_BTV = wrapped.apply(params, tokens_BS[:, :-1]).astype(jnp.float32)
        labels_BT = tokens_BS[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, labels_BT).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: jaxmp.TrainState, tokens_BS: jax.Array) -> Any:
        loss, grads = state.value_and_grad(loss_fn)(tokens_BS)
        return state.apply_gradients(grads=grads), loss

    return state, train_step


class Training:
    """Train step that is compiled for one text of `model.max_length` bytes."""

    def __init__(self, recipe: str, model: LongGPT) -> None:
        """Compiles the step; raises `OutOfMemoryError` if that exhausts the memory."""
        self._length = model.max_length
        with convert_memory_errors():
            self._state, step = prepare(recipe, model)
            jitted: Any = step
            tokens_BS = jax.ShapeDtypeStruct((1, self._length + 1), jnp.int32)
            self._step = jitted.lower(self._state, tokens_BS).compile()

    def point(self) -> Point:
        """Returns the memory that the compiled step requires."""
        memory = self._step.memory_analysis()
        # The step writes its new state over the old one.
        both = memory.argument_size_in_bytes + memory.output_size_in_bytes
        temporary = memory.temp_size_in_bytes
        return Point(self._length, temporary, temporary + both - memory.alias_size_in_bytes)

    def run(self, text: np.ndarray, steps: int) -> tuple[float, float]:
        """Returns the median seconds of a step, without the first one, and the last loss."""
        seconds, loss = [], jnp.float32(jnp.nan)
        with convert_memory_errors():
            for step in range(steps + 1):
                tokens_BS = jnp.asarray(random_batch(text, 1, self._length, 0, step))
                since = time.perf_counter()
                self._state, loss = self._step(self._state, tokens_BS)
                loss.block_until_ready()
                seconds.append(time.perf_counter() - since)
        return statistics.median(seconds[1:]), float(loss)


# ---------------------------------------------------------------------------
# Increasing lengths
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths at which a step fits, and the first length at which it does not."""

    fit: list[Point]
    too_long: Point | None  # None: the series ended at --longest


def lengthen(
    recipe: str,
    model: LongGPT,
    *,
    longest: int,
    steps: int,
    seconds: float,
    limit: float | None,
) -> Lengths:
    """Doubles the length until the memory is exhausted or the length exceeds `longest`.

    Args:
      recipe: name of a recipe.
      model: model with the first length; the others differ only in the length.
      longest: maximum bytes of text.
      steps: number of train steps at each length.
      seconds: a length whose steps would take longer is compiled but not run.
      limit: maximum bytes of a step; None: the memory of the device.
    """
    text = standard_library_text().train
    fit, expected = [], 0.0
    while model.max_length <= longest:
        point = Point(model.max_length, None, None)
        try:
            training = Training(recipe, model)
            point = training.point()
            if limit is not None and (point.needed or 0) > limit:
                return Lengths(fit, point)
            if expected <= seconds:
                step_seconds, loss = training.run(text, steps)
                point = dataclasses.replace(point, seconds=step_seconds, loss=loss)
                expected = (steps + 1) * step_seconds
        except OutOfMemoryError:
            return Lengths(fit, point)
        fit.append(point)
        print(f"{model.attention:>9}  {describe(point)}", flush=True)
        # The FLOPs of attention grow with the square of the length.
        expected *= 4
        model = model.clone(max_length=2 * model.max_length)
    return Lengths(fit, None)


def describe(point: Point) -> str:
    """Formats the measurements of one length."""
    if point.needed is None or point.temporary is None:
        return f"T {point.length:>8,}  not compiled: out of memory"
    line = f"T {point.length:>8,}  {point.needed / GIB:8.3f} GiB"
    line += f" ({point.temporary / GIB:.3f} temporary)"
    if point.seconds is None:
        return f"{line}  not run"
    return f"{line}  {point.seconds:8.3f} s/step  loss {point.loss:.3f}"


# ---------------------------------------------------------------------------
# Picture
# ---------------------------------------------------------------------------

STYLES = {
    "auto": dict(color=BLUE, marker="o", label="flash attention: auto"),
    "blockwise": dict(color=BLUE, marker="o", label="flash attention: blockwise"),
    "xla": dict(color=VERMILION, marker="^", label="all logits in memory: xla"),
}


def draw(runs: dict[str, Lengths], limit: float | None, title: str, path: Path) -> Path:
    """Draws memory and time of a step over its length, and saves them as a PNG."""
    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    memory, times = figure.subplots(1, 2)
    for name, run in runs.items():
        draw_memory(memory, run, STYLES[name])
        ran = [point for point in run.fit if point.seconds is not None]
        times.plot([p.length for p in ran], [p.seconds for p in ran], **STYLES[name])
    if limit is not None:
        memory.axhline(limit / GIB, color=BLACK, linestyle="--", linewidth=1, label="memory limit")
    memory.set_title("Memory of a compiled train step (hollow: not run)", fontsize=11)
    memory.set(ylabel="GiB (log scale)")
    times.set_title("Time of a train step", fontsize=11)
    times.set(ylabel="seconds (log scale)")
    lengths = [p.length for run in runs.values() for p in (*run.fit, run.too_long) if p]
    for axes in (memory, times):
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="T, bytes of text in a step")
        axes.set_xlim(min(lengths) / 1.4, max(lengths) * 1.4)
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(lengths))))
        axes.xaxis.set_major_formatter(lambda length, _: format_length(round(length)))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="lower right")
    figure.suptitle(title, fontsize=13)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def draw_memory(axes: Axes, run: Lengths, style: dict[str, Any]) -> None:
    """Draws a filled marker for a length that ran, a hollow one otherwise, and a final cross."""
    points = [point for point in (*run.fit, run.too_long) if point and point.needed]
    lengths = [point.length for point in points]
    sizes = [(point.needed or 0) / GIB for point in points]
    ran = [point.seconds is not None for point in points]
    color, marker = style["color"], style["marker"]
    axes.plot(lengths, sizes, color=color, linewidth=1.5)
    for length, size, point, filled in zip(lengths, sizes, points, ran, strict=True):
        end = point is run.too_long
        face = color if filled else "white"
        options = dict(color=color, markerfacecolor=face, markersize=9 if end else 6)
        axes.plot([length], [size], marker="X" if end else marker, **options)
    axes.plot([], [], **style)


def format_length(length: int) -> str:
    """Formats a length for an axis: 512, 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


# ---------------------------------------------------------------------------
# Command
# ---------------------------------------------------------------------------


def main(
    recipe: RecipeName = "bf16",
    first: Annotated[int, typer.Option(min=1, help="Bytes of the first text.")] = 1024,
    longest: Annotated[int, typer.Option(min=1, help="Maximum bytes of a text.")] = 2**20,
    steps: Annotated[int, typer.Option(min=1, help="Train steps at each length.")] = 2,
    seconds: Annotated[
        float, typer.Option(help="Lengths whose steps take longer are compiled but not run.")
    ] = 15.0,
    memory_limit: Annotated[
        float | None,
        typer.Option(help="Maximum GiB of a step. Default: 0.5, or the memory of the GPU."),
    ] = None,
    layers: Positive = 2,
    width: Positive = 64,
    heads: Positive = 4,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for long_context.png.")] = Path(
        "long_context_out"
    ),
) -> dict[str, Lengths]:
    """Trains a byte-level GPT on texts of increasing length until the memory is exhausted."""
    check_divisible("--width", width, "--heads", heads)
    if first > longest:
        raise typer.BadParameter(f"--first {first} is longer than --longest {longest}.")
    device = jax.devices()[0]
    if memory_limit is None and device.platform == "cpu":
        memory_limit = 0.5
    limit = None if memory_limit is None else memory_limit * GIB
    hardware = (
        device.device_kind if limit is None else f"{device.device_kind}, {memory_limit:g} GiB"
    )
    runs = {}
    for attention in ("auto" if device.platform == "gpu" else "blockwise", "xla"):
        model = LongGPT(layers, width, heads, first, attention=attention)
        runs[attention] = lengthen(
            recipe, model, longest=longest, steps=steps, seconds=seconds, limit=limit
        )
        print(f"{attention:>9}  {describe_end(runs[attention], limit)}", flush=True)
    title = f"{layers} layers of width {width} with {recipe} on one {hardware}"
    print(f"Picture: {draw(runs, limit, title, out / 'long_context.png')}")
    return runs


def describe_end(run: Lengths, limit: float | None) -> str:
    """Formats the reason for which a series ended."""
    if run.too_long is None:
        return "ended at --longest"
    reason = "out of memory" if limit is None else f"over the limit of {limit / GIB:g} GiB"
    return f"{reason}: {describe(run.too_long)}"


if __name__ == "__main__":
    typer.run(main)
