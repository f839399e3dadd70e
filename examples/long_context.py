"""Trains a byte-level GPT on longer and longer texts until memory ends, with flash and without.

    python examples/long_context.py
    python examples/long_context.py --memory-limit 4 --seconds 60
    python examples/long_context.py --recipe fp32 --layers 4 --width 128 --longest 65536
    python examples/long_context.py --help

One text of T bytes a step; T doubles. First with flash attention: "auto" on a GPU, which takes
cuDNN's kernel, and "blockwise" elsewhere. Then with "xla", which holds the logits of all pairs. On
a GPU memory ends when the device says so. Elsewhere --memory-limit says so: a step that needs more,
as compiled, is never run. Prints a line for each length and draws memory and time over it, in
long_context_out/long_context.png.
Install first: pip install "jaxmp[examples]".
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator
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
from options import RecipeName
from pictures import BLACK, BLUE, VERMILION, save_png
from train_lm import prepare

GIB = 2**30

# ---------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------


class Block(nn.Module):
    """`byte_gpt.Block`, told that its attention is causal where that one reads a mask of T x T."""

    heads: int
    attention: str  # an implementation of jaxmp.dot_product_attention

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns x_BTD after attention and a two-layer perceptron, each with a residual."""
        width = x_BTD.shape[-1]
        h_BTD = nn.LayerNorm(name="attention_norm")(x_BTD)
        attention_fn = jaxmp.linen.attention_fn(is_causal=True, implementation=self.attention)
        attention = nn.MultiHeadDotProductAttention(
            self.heads, attention_fn=attention_fn, name="attention"
        )
        x_BTD = x_BTD + attention(h_BTD)
        h_BTD = nn.LayerNorm(name="mlp_norm")(x_BTD)
        h_BTF = nn.gelu(nn.Dense(4 * width, name="mlp_up")(h_BTD))
        return x_BTD + nn.Dense(width, name="mlp_down")(h_BTF)


class LongGPT(GPT):
    """`byte_gpt.GPT` of such blocks: the same parameters, of the same names."""

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


class MemoryEnds(Exception):
    """A step does not fit."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One length with one kind of attention. What did not happen is None."""

    length: int
    temporary: int | None  # bytes, of the compiled step
    needed: int | None  # likewise with parameters and optimizer state
    seconds: float | None = None  # of a step
    loss: float | None = None  # of the last step


@contextlib.contextmanager
def memory_ends() -> Iterator[None]:
    """Raises `MemoryEnds` where XLA says that the device has none left."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryEnds from error


class Training:
    """A train step compiled for one text of `model.max_length` bytes."""

    def __init__(self, recipe: str, model: LongGPT) -> None:
        """Compiles it; raises `MemoryEnds` where the device has no room even for that."""
        self._length = model.max_length
        with memory_ends():
            self._state, step, _ = prepare(recipe, model, optax.adamw(1e-3))
            jitted: Any = step
            tokens_BS = jax.ShapeDtypeStruct((1, self._length + 1), jnp.int32)
            self._step = jitted.lower(self._state, tokens_BS).compile()

    def point(self) -> Point:
        """What the compiled step needs."""
        memory = self._step.memory_analysis()
        # The step writes its new state over the old one.
        both = memory.argument_size_in_bytes + memory.output_size_in_bytes
        temporary = memory.temp_size_in_bytes
        return Point(self._length, temporary, temporary + both - memory.alias_size_in_bytes)

    def run(self, text: np.ndarray, steps: int) -> tuple[float, float]:
        """Median seconds of a step, the first left out, and the last loss; or `MemoryEnds`."""
        seconds, loss = [], jnp.float32(jnp.nan)
        with memory_ends():
            for step in range(steps + 1):
                tokens_BS = jnp.asarray(random_batch(text, 1, self._length, 0, step))
                since = time.perf_counter()
                self._state, loss = self._step(self._state, tokens_BS)
                loss.block_until_ready()
                seconds.append(time.perf_counter() - since)
        return statistics.median(seconds[1:]), float(loss)


# ---------------------------------------------------------------------------
# Longer and longer
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Lengths:
    """The lengths at which a step fits, and the first one at which it does not."""

    fit: list[Point]
    too_long: Point | None  # None: --longest came first


def lengthen(
    recipe: str,
    model: LongGPT,
    *,
    longest: int,
    steps: int,
    seconds: float,
    limit: float | None,
) -> Lengths:
    """Doubles the length, from that of `model`, until memory ends or `longest` is passed.

    Args:
      recipe: the precision.
      model: of which only the length changes.
      longest: bytes of text.
      steps: of training at each length.
      seconds: a length whose steps would take longer is compiled and not run.
      limit: bytes that a step may need; None: all that the device has.
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
        except MemoryEnds:
            return Lengths(fit, point)
        fit.append(point)
        print(f"{model.attention:>9}  {describe(point)}", flush=True)
        # The work of attention grows with the square of the length.
        expected *= 4
        model = model.clone(max_length=2 * model.max_length)
    return Lengths(fit, None)


def describe(point: Point) -> str:
    """A line of figures."""
    if point.needed is None or point.temporary is None:
        return f"T {point.length:>8,}  not compiled: the device's memory ended"
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
    "xla": dict(color=VERMILION, marker="^", label="logits of all pairs: xla"),
}


def draw(runs: dict[str, Lengths], limit: float | None, title: str, path: Path) -> Path:
    """Writes memory and seconds of a step over its length as a PNG."""
    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    memory, times = figure.subplots(1, 2)
    for name, run in runs.items():
        draw_memory(memory, run, STYLES[name])
        ran = [point for point in run.fit if point.seconds is not None]
        times.plot([p.length for p in ran], [p.seconds for p in ran], **STYLES[name])
    if limit is not None:
        memory.axhline(limit / GIB, color=BLACK, linestyle="--", linewidth=1, label="memory limit")
    memory.set_title("Memory of a train step, as compiled (hollow: not run)", fontsize=11)
    memory.set(ylabel="GiB (log scale)")
    times.set_title("Time of a train step", fontsize=11)
    times.set(ylabel="seconds (log scale)")
    lengths = [p.length for run in runs.values() for p in (*run.fit, run.too_long) if p]
    for axes in (memory, times):
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="T, bytes of text in a step")
        axes.set_xlim(min(lengths) / 1.4, max(lengths) * 1.4)
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(lengths))))
        axes.xaxis.set_major_formatter(lambda length, _: short(round(length)))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="lower right")
    figure.suptitle(title, fontsize=13)
    return save_png(figure, path)


def draw_memory(axes: Axes, run: Lengths, style: dict[str, Any]) -> None:
    """A filled marker where steps were run, a hollow one where not, a cross where none fits."""
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


def short(length: int) -> str:
    """A length as it stands on an axis: 512, 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


# ---------------------------------------------------------------------------
# Command
# ---------------------------------------------------------------------------


def main(
    recipe: RecipeName = "bf16",
    first: Annotated[int, typer.Option(help="Bytes of the first text.")] = 1024,
    longest: Annotated[int, typer.Option(help="Stop here if memory has not ended.")] = 2**20,
    steps: Annotated[int, typer.Option(min=1, help="Train steps at each length.")] = 2,
    seconds: Annotated[
        float, typer.Option(help="Lengths whose steps take longer are compiled and not run.")
    ] = 15.0,
    memory_limit: Annotated[
        float | None,
        typer.Option(help="GiB that a step may need. Without it: 0.5, or all that a GPU has."),
    ] = None,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    out: Annotated[Path, typer.Option(help="Folder for long_context.png.")] = Path(
        "long_context_out"
    ),
) -> dict[str, Lengths]:
    """Trains a byte-level GPT on longer and longer texts until memory ends."""
    device = jax.devices()[0]
    if memory_limit is None and device.platform == "cpu":
        memory_limit = 0.5
    limit = None if memory_limit is None else memory_limit * GIB
    where = device.device_kind if limit is None else f"{device.device_kind}, {memory_limit:g} GiB"
    runs = {}
    for attention in ("auto" if device.platform == "gpu" else "blockwise", "xla"):
        model = LongGPT(layers, width, heads, first, attention)
        runs[attention] = lengthen(
            recipe, model, longest=longest, steps=steps, seconds=seconds, limit=limit
        )
        print(f"{attention:>9}  {why_it_ended(runs[attention], limit)}", flush=True)
    title = f"{layers} layers of width {width} in {recipe} on one {where}"
    print(f"Picture: {draw(runs, limit, title, out / 'long_context.png')}")
    return runs


def why_it_ended(run: Lengths, limit: float | None) -> str:
    """The last line of a run."""
    if run.too_long is None:
        return "memory did not end: --longest came first"
    why = "memory ended" if limit is None else f"memory ended at {limit / GIB:g} GiB"
    return f"{why}: {describe(run.too_long)}"


if __name__ == "__main__":
    typer.run(main)
