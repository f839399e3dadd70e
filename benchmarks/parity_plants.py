"""Counts in how many of 12 planted mismatches `jaxmp.parity` names the cause.

    python benchmarks/parity_plants.py                       # plants and equal pairs
    python benchmarks/parity_plants.py --only softmax cache  # some of them
    python benchmarks/parity_plants.py --out benchmarks/results/parity_plants_cpu.json

The model is a transformer with rotary positions, an expert layer and one table for tokens in and
out, with random weights. The serving program of each plant differs in one choice; a comment
"plant: NAME" marks its line. One module and one operation are expected of each. Before the first
run, the modules of all layers and several operations near the line were accepted. They were
narrowed to the reported ones afterwards, so that a later version cannot report another operation
unnoticed. A plant is

    right     the module and the operation are as expected
    vague     the module is, and the operation is not
    wrong     another module is named
    missed    no cause is named

The programs of an equal pair compute the same in another manner, so no cause may be named.
Requires pip install -e ".[examples]", and takes five minutes on two cores.
"""

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import export

import jaxmp
from result_file import parser_of, write_result

VOCABULARY, WIDTH, HEADS, LAYERS, EXPERTS = 128, 64, 4, 3, 4
BATCH, LENGTH = 4, 16
BF16, FP32 = jnp.bfloat16, jnp.float32

# ---------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choices:
    """Choices of a program; those of training are the defaults.

    Args:
      dtype: in which the layers compute.
      softmax: dtype of the attention's softmax.
      kernel: "plain", "scaled" (queries are scaled before the matmul) or "blocks".
      norm: "fused" for FP32, "unfused" for one operation after the other in `dtype`.
      head: dtype of the last matmul.
      cache: dtype of stored keys and values.
      fp8: the up projections in FP8, with one scale for the whole batch.
      dropout: True if dropout is on.
      offset: of the position ids.
      casts: of the table before the head.
      rope: dtype of sines and cosines.
      router: dtype of the router's logits.
      scan: True to run the layers in a loop.
    """

    dtype: Any = BF16
    softmax: Any = FP32
    kernel: str = "plain"
    norm: str = "fused"
    head: Any = FP32
    cache: Any = BF16
    fp8: bool = False
    dropout: bool = False
    offset: int = 0
    casts: tuple[Any, ...] = ()
    rope: Any = FP32
    router: Any = FP32
    scan: bool = False


class Norm(nn.Module):
    """RMS norm."""

    choices: Choices

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x with a root mean square of 1, times a scale."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        if self.choices.norm == "fused":
            wide = x.astype(FP32)
            mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
            return (wide * jax.lax.rsqrt(mean + 1e-6) * scale).astype(x.dtype)
        size = jnp.asarray(x.shape[-1], x.dtype)
        mean = jnp.sum(x * x, axis=-1, keepdims=True, dtype=x.dtype) / size  # plant: norm
        return x / jnp.sqrt(mean + jnp.asarray(1e-6, x.dtype)) * scale.astype(x.dtype)


class Linear(nn.Module):
    """Matmul without bias."""

    features: int
    choices: Choices

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the product with the kernel, in the dtype of x."""
        init = nn.initializers.normal(1.5 / x.shape[-1] ** 0.5)
        kernel = self.param("kernel", init, (x.shape[-1], self.features)).astype(x.dtype)
        if not self.choices.fp8:
            return x @ kernel
        x, scale = quantized(x.astype(FP32))
        kernel, other = quantized(kernel.astype(FP32))
        product = jnp.dot(x.astype(BF16), kernel.astype(BF16), preferred_element_type=FP32)
        return (product * scale * other).astype(self.choices.dtype)


def quantized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x in FP8 with the scale of its largest magnitude."""
    scale = jnp.max(jnp.abs(x)) / 448  # plant: fp8_scale
    return (x / scale).astype(jnp.float8_e4m3fn), scale


class Attention(nn.Module):
    """Causal attention with rotary positions, and with a cache for single tokens."""

    choices: Choices

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array, cache: Any = None) -> tuple[Any, Any]:
        """Returns the attention of x, and the new cache."""
        chosen = self.choices
        linear = functools.partial(Linear, choices=dataclasses.replace(chosen, fp8=False))
        split = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
        q, k, v = (split(linear(WIDTH, name=name)(x)) for name in ("query", "key", "value"))
        q, k = (rotate(y, positions, chosen.rope) for y in (q, k))
        keys, mask = (k, v), jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        if cache is not None:
            new = zip(cache, (k, v), strict=True)
            start = (0, positions[0], 0, 0)
            cache = tuple(
                jax.lax.dynamic_update_slice(old, each.astype(old.dtype), start)  # plant: cache
                for old, each in new
            )
            keys = tuple(each.astype(x.dtype) for each in cache)
            mask = jnp.arange(LENGTH)[None] <= positions[:, None]
        return linear(WIDTH, name="out")(attend(q, *keys, mask, chosen).reshape(x.shape)), cache


def rotate(x: jax.Array, positions: jax.Array, dtype: Any) -> jax.Array:
    """Returns queries or keys, rotated by their positions."""
    size = x.shape[-1] // 2
    angles = positions[:, None] * 100.0 ** (-jnp.arange(size) / size)
    sin, cos = (
        f(angles)[:, None].astype(dtype).astype(FP32) for f in (jnp.sin, jnp.cos)
    )  # plant: rope
    first, second = jnp.split(x.astype(FP32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return rotated.astype(x.dtype)


def attend(q: Any, k: Any, v: Any, mask: jax.Array, choices: Choices) -> jax.Array:
    """Returns softmax(q k) v."""
    if choices.kernel == "blocks":
        return jaxmp.dot_product_attention(
            q, k, v, is_causal=True, implementation="blockwise"
        )  # plant: kernel
    scale = q.shape[-1] ** -0.5
    if choices.kernel == "scaled":
        q, scale = q * jnp.asarray(scale, q.dtype), 1.0
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=FP32) * scale
    scores = jnp.where(mask, scores, -1e30).astype(choices.softmax)
    probabilities = jax.nn.softmax(scores).astype(q.dtype)  # plant: softmax
    return jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)


class Experts(nn.Module):
    """Perceptrons, mixed by the probabilities of a router."""

    choices: Choices

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the mixed outputs of all experts."""
        chosen = self.choices
        router = Linear(EXPERTS, dataclasses.replace(chosen, fp8=False), name="router")
        logits = router(x.astype(FP32)).astype(chosen.router).astype(FP32)  # plant: router
        weights = jax.nn.softmax(4 * logits)
        results = []
        for n in range(EXPERTS):
            hidden = nn.gelu(Linear(2 * WIDTH, chosen, name=f"up_{n}")(x))
            down = Linear(WIDTH, dataclasses.replace(chosen, fp8=False), name=f"down_{n}")
            results.append(down(hidden).astype(FP32) * weights[..., n, None])
        return sum(results).astype(x.dtype)


class Block(nn.Module):
    """A block of attention and experts."""

    choices: Choices

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array, cache: Any = None) -> tuple[Any, Any]:
        """Returns x after the block, and the new cache."""
        attention = Attention(self.choices, name="attention")
        y, cache = attention(Norm(self.choices, name="norm_1")(x), positions, cache)
        y = nn.Dropout(0.1, deterministic=not self.choices.dropout, name="dropout")(y)
        x = x + y
        return x + Experts(self.choices, name="experts")(
            Norm(self.choices, name="norm_2")(x)
        ), cache


class Model(nn.Module):
    """The model."""

    choices: Choices = Choices()

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array, caches: Any = None) -> Any:
        """Returns FP32 logits, and the new caches."""
        chosen = self.choices
        table = self.param("table", nn.initializers.normal(1.0), (VOCABULARY, WIDTH))
        with jax.named_scope("embedding"):
            x = table.astype(chosen.dtype)[tokens]
        positions = positions + chosen.offset  # plant: positions
        new = []
        if chosen.scan:
            body = lambda block, x, _: (block(x, positions)[0], None)
            axes = {"params": 0}
            scan = nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=LAYERS)
            x, _ = scan(Block(chosen, name="blocks"), x, None)
        for n in range(0 if chosen.scan else LAYERS):
            cache = None if caches is None else caches[n]
            x, cache = Block(chosen, name=f"block_{n}")(x, positions, cache)
            new.append(cache)
        x = Norm(chosen, name="final_norm")(x)
        with jax.named_scope("head"):
            for dtype in chosen.casts:
                table = table.astype(dtype)  # plant: tied_head
            logits = x.astype(chosen.head) @ (table.astype(chosen.head) / 8).T  # plant: head
        return logits.astype(FP32), new


# ---------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------


def log_probs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the log-probability of each next token."""
    every = jax.nn.log_softmax(logits[:, :-1])
    return jnp.take_along_axis(every, tokens[:, 1:, None], axis=-1)[..., 0]


def full(choices: Choices = Choices()) -> Callable[..., jax.Array]:
    """Returns a program that computes all positions at once."""

    def run(params: Any, tokens: jax.Array) -> jax.Array:
        rngs = {"dropout": jax.random.key(0)} if choices.dropout else None
        positions = jnp.arange(tokens.shape[1])
        logits, _ = Model(choices).apply(params, tokens, positions, rngs=rngs)
        return log_probs(logits, tokens)

    return run


def decode(choices: Choices = Choices()) -> Callable[..., jax.Array]:
    """Returns a program that computes one position after the other, with a cache."""

    def run(params: Any, tokens: jax.Array) -> jax.Array:
        shape = (tokens.shape[0], LENGTH, HEADS, WIDTH // HEADS)
        caches = [(jnp.zeros(shape, choices.cache),) * 2] * LAYERS

        def step(caches: Any, row: Any) -> Any:
            token, position = row
            logits, caches = Model(choices).apply(params, token[:, None], position[None], caches)
            return caches, logits[:, 0]

        _, logits = jax.lax.scan(step, caches, (tokens.T, jnp.arange(tokens.shape[1])))
        return log_probs(jnp.swapaxes(logits, 0, 1), tokens)

    return run


def exported(program: Callable[..., jax.Array], *batch: Any) -> Any:
    """Returns an exported program."""
    return export.export(jax.jit(program))(*batch)


def rounded_export(program: Callable[..., jax.Array], params: Any, tokens: jax.Array) -> Any:
    """Returns an exported program in which the weights are rounded to bfloat16."""
    rounded = jax.tree.map(lambda x: x.astype(BF16).astype(FP32), params)
    return exported(lambda tokens: program(rounded, tokens), tokens)


class Pair(NamedTuple):
    """Two programs, and the expected cause.

    Args:
      train, serve: functions of the batch that make the programs.
      module: path of the module; "" for an equal pair.
      operation: name of the operation; "" for an equal pair.
      options: further arguments of `parity`.
    """

    train: Callable[..., Any]
    serve: Callable[..., Any]
    module: str = ""
    operation: str = ""
    options: Mapping[str, Any] = MappingProxyType({})


def plant(module: str, operation: str, train: dict[str, Any] | None = None, **serve: Any) -> Pair:
    """Returns the pair of two full passes."""
    first, second = Choices(**(train or {})), Choices(**(train or {}) | serve)
    return Pair(lambda *_: full(first), lambda *_: full(second), module, operation)


WIDE = {"dtype": FP32, "cache": FP32}
ATTENTION = "block_0/attention"
PLANTS = {
    "softmax": plant(ATTENTION, "sub", softmax=BF16),
    "kernel": plant(ATTENTION, "mul", kernel="blocks"),
    "norm": plant("block_0/norm_1", "reduce_sum", norm="unfused"),
    "head": plant("head", "dot_general", head=BF16),
    "cache": Pair(
        lambda *_: full(Choices(**WIDE)),
        lambda *_: decode(Choices(dtype=FP32, cache=BF16)),
        ATTENTION,
        "convert_element_type",
    ),
    "fp8_scale": Pair(
        lambda *_: full(Choices(fp8=True)),
        lambda *_: full(Choices(fp8=True)),
        "block_0/experts/up_0",
        "reduce_max",
        {"batch_size": 1},
    ),
    "dropout": plant("block_0/dropout", "div", dropout=True),
    "positions": plant(ATTENTION, "mul", offset=1),
    "tied_head": plant("head", "convert_element_type", WIDE, casts=(BF16, FP32)),
    "rope": plant(ATTENTION, "convert_element_type", WIDE, rope=BF16),
    "router": plant("block_0/experts", "convert_element_type", router=BF16),
    "export": Pair(
        lambda *_: full(Choices(**WIDE)),
        lambda *batch: rounded_export(full(Choices(**WIDE)), *batch),
        "embedding",
        "gather",
        {"tokens_only": True},
    ),
}
SAME = Choices()
EQUAL = {
    "same": Pair(lambda *_: full(), lambda *_: jax.jit(full())),
    "batch_size": Pair(lambda *_: full(), lambda *_: full(), options={"batch_size": 1}),
    "shift": Pair(lambda *_: full(), lambda *_: full(), options={"shift": 1}),
    "decode": Pair(lambda *_: full(), lambda *_: decode()),
    "kernel_fp32": plant("", "", WIDE, kernel="blocks"),
    "scaled": plant("", "", kernel="scaled"),
    "exported": Pair(lambda *_: full(), lambda *batch: exported(full(), *batch)),
    "remat": Pair(lambda *_: full(), lambda *_: jax.checkpoint(full())),
}


@functools.cache
def batches() -> list[tuple[Any, jax.Array]]:
    """Returns two batches of the same parameters."""
    tokens = jax.random.randint(jax.random.key(1), (2, BATCH, LENGTH), 0, VOCABULARY)
    params = jax.jit(Model().init)(jax.random.key(0), tokens[0], jnp.arange(LENGTH))
    return [(params, each) for each in tokens]


def measure(name: str) -> dict[str, Any]:
    """Returns the result of a plant or of an equal pair."""
    pair, data = (PLANTS | EQUAL)[name], batches()
    train, serve, options = pair.train(*data[0]), pair.serve(*data[0]), dict(pair.options)
    if options.pop("tokens_only", False):
        train = functools.partial(train, data[0][0])
        data = [tokens for _, tokens in data]
    start = time.perf_counter()
    report = jaxmp.parity(train, serve, data, **options)
    seconds = time.perf_counter() - start
    cause = report.cause
    return {
        "name": name,
        "outcome": outcome(pair, cause and (cause.module, cause.operation)),
        "module": cause and cause.module,
        "operation": cause and cause.operation,
        "kind": cause and cause.kind,
        "line": cause and f"{Path(cause.file).name}:{cause.line}",
        "text": cause and cause.text,
        "train": cause and cause.train,
        "serve": cause and cause.serve,
        "others": cause and list(cause.others),
        "fix": cause and cause.fix,
        "before": cause.before if cause else report.by_operations,
        "after": cause and cause.after,
        "difference": report.rows[0].difference,
        "in_band": report.rows[0].band,
        "seconds": round(seconds, 1),
    }


def outcome(pair: Pair, cause: tuple[str, str] | None) -> str:
    """Returns "right", "vague", "wrong" or "missed"; for an equal pair, "none" or "wrong"."""
    if not pair.operation:
        return "none" if cause is None else "wrong"
    if cause is None:
        return "missed"
    module, operation = cause
    if module != pair.module:
        return "wrong"
    return "right" if operation == pair.operation else "vague"


def main() -> None:
    """Measures all pairs, and prints and writes the results."""
    args = parser_of(__doc__, PLANTS | EQUAL).parse_args()
    rows = []
    for name in args.only:
        rows.append(measure(name))
        row = rows[-1]
        where = f"{row['operation']} in {row['module']} ({row['line']}), {row['kind']}"
        change = f"{row['before']:.3g} -> {row['after']}"
        print(f"{name:12} {row['outcome']:7} {row['seconds']:6} s  {where}: {change}", flush=True)
    counts = Counter(row["outcome"] for row in rows)
    print(dict(counts))
    write_result(args.out, counts=dict(counts), pairs=rows)


if __name__ == "__main__":
    main()
