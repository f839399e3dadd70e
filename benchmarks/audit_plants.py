"""Plants 65 defects in small training steps and audits them, and 20 healthy steps.

    python benchmarks/audit_plants.py
    python benchmarks/audit_plants.py --out benchmarks/results/audit_plants.json

Each plant names the check that must report it, at one of the lines that end with `# planted`, and a
part of the fix that must be printed. The same function with that fix applied must lose the finding
and have no other error, and its results must be closer to FP64 (for the defects that cost time
alone, this is not measured). The programs run as they are written, without XLA's excess precision.
Plants with a target are compiled for it by XLA's GPU compiler: pip install -e ".[aot]".
Twenty of the plants are those of `audit_decisions.py`.
The healthy steps of `audit_healthy.py` must have no error.
The exit status is 1 if a plant is missed, a fix does not work, or an error is false.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jaxmp
from result_file import parser_of, write_result

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
ROWS, WIDTH, HIDDEN, CLASSES = 32, 32, 64, 64


class Dtypes(NamedTuple):
    """Dtypes of a program.

    low: of the model's matmuls.
    spot: where the defect is planted: 16 bits if it is, FP32 if its fix is applied.
    wide: of parameters and losses.
    fixed: True if the fix is applied.
    """

    low: Any
    spot: Any
    wide: Any
    fixed: bool


class Plant(NamedTuple):
    """A step with a defect.

    name: the name of its function.
    check: the check that must report it.
    fix: a part of the fix that must be printed.
    build: Dtypes -> (function, arguments).
    repeats: number of calls, of which each takes the results of the last one; 0: cost alone.
    low: "bfloat16" or "float16".
    severity: of the finding.
    target: the GPU that it is compiled for; None if the trace suffices.
    """

    name: str
    check: str
    fix: str
    build: Callable[[Dtypes], tuple[Callable[..., Any], tuple[Any, ...]]]
    repeats: int
    low: Any
    severity: str
    target: str | None

    @property
    def lines(self) -> set[int]:
        """Numbers of the lines that are planted."""
        lines, first = inspect.getsourcelines(self.build)
        return {first + n for n, line in enumerate(lines) if line.rstrip().endswith("# planted")}


PLANTS: list[Plant] = []


def plant(
    check: str,
    fix: str,
    repeats: int = 1,
    low: Any = BF16,
    severity: str = "error",
    target: str | None = None,
) -> Callable[[Any], Any]:
    def add(build: Any) -> Any:
        PLANTS.append(Plant(build.__name__, check, fix, build, repeats, low, severity, target))
        return build

    return add


# ---------------------------------------------------------------------------
# Parts of steps
# ---------------------------------------------------------------------------


def normal(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape) * scale


def parameters(dtype: Any) -> dict[str, jax.Array]:
    return {
        "w": jnp.asarray(normal(0, WIDTH, HIDDEN, scale=WIDTH**-0.5), dtype),
        "v": jnp.asarray(normal(1, HIDDEN, CLASSES, scale=HIDDEN**-0.5), dtype),
    }


def inputs(dtype: Any, rows: int = ROWS) -> jax.Array:
    return jnp.asarray(normal(2, rows, WIDTH), dtype)


def labels(rows: int = ROWS) -> jax.Array:
    return jnp.arange(rows) % CLASSES


def hidden(p: Any, x: jax.Array, low: Any) -> jax.Array:
    return jax.nn.relu(x.astype(low) @ p["w"].astype(low))


def head(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies in the dtype of `x`, and returns sums of at least FP32."""
    wide = jnp.promote_types(x.dtype, F32)
    return jnp.matmul(x, w.astype(x.dtype), preferred_element_type=wide)


def wide_dot(x: jax.Array, *args: Any, preferred_element_type: Any = None, **options: Any) -> Any:
    """Multiplies for a layer, and returns sums of at least FP32."""
    wide = jnp.promote_types(x.dtype, F32)
    return lax.dot_general(x, *args, preferred_element_type=wide, **options)


def forward(p: Any, x: jax.Array, low: Any) -> jax.Array:
    return head(hidden(p, x, low), p["v"])


def cross_entropy(logits: jax.Array, y: jax.Array, wide: Any) -> jax.Array:
    logits = logits.astype(wide)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return losses.mean()


def sgd(p: Any, grads: Any, rate: Any = 0.01) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, p, grads)


def trained(loss: Callable[..., jax.Array], d: Dtypes, *batch: Any) -> Any:
    """Returns a step of SGD on a loss, and its arguments."""

    def step(p, *batch):
        value, grads = jax.value_and_grad(loss)(p, *batch)
        return sgd(p, grads), value

    return step, (parameters(d.wide), *batch)


# ---------------------------------------------------------------------------
# Before the gradient, and after the update
# ---------------------------------------------------------------------------


@plant("softmax_16bit", "jax.nn.softmax(")
def teacher_probabilities(d):
    def step(p, teacher, x):
        logits = forward(teacher, x, d.low).astype(d.spot)
        target = jax.nn.softmax(4 * logits).astype(d.wide)  # planted

        def loss(p):
            student = forward(p, x, d.low).astype(d.wide)
            return -(target * jax.nn.log_softmax(student)).sum(-1).mean()

        value, grads = jax.value_and_grad(loss)(p)
        return sgd(p, grads), value

    return step, (parameters(d.wide), parameters(d.wide), inputs(d.wide))


@plant("loss_16bit", "logits.astype(jnp.float32)")
def evaluation_after_the_update(d):
    def step(p, x, y):
        grads = jax.grad(lambda p: cross_entropy(forward(p, x, d.low), y, d.wide))(p)
        p = sgd(p, grads)
        logits = forward(p, x, d.low).astype(d.spot)
        log_p = jax.nn.log_softmax(logits)  # planted
        return p, -jnp.take_along_axis(log_p, y[:, None], 1).astype(d.wide).mean()

    return step, (parameters(d.wide), inputs(d.wide), labels())


@plant("norm_16bit", "x.astype(jnp.float32)")
def normalized_inputs(d):
    def step(p, x, y):
        x = x.astype(d.spot)
        square = jnp.mean(x * x, -1, keepdims=True)
        x = x * lax.rsqrt(square + 1e-6)  # planted
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        return sgd(p, jax.grad(loss)(p)), x.astype(d.wide)

    return step, (parameters(d.wide), inputs(d.wide), labels())


@plant("fp32_matmul", "jaxmp.load_recipe('bf16').wrap(model)", repeats=0)
def fp32_teacher(d):
    class Teacher(nnx.Module):
        def __init__(self, dtype, hidden_dtype, rngs):
            self.first = nnx.Linear(WIDTH, HIDDEN, dtype=dtype, rngs=rngs)
            self.second = nnx.Linear(HIDDEN, HIDDEN, dtype=hidden_dtype, rngs=rngs)
            self.third = nnx.Linear(HIDDEN, CLASSES, dtype=dtype, dot_general=wide_dot, rngs=rngs)

        def __call__(self, x):
            return self.third(nnx.relu(self.second(nnx.relu(self.first(x)))))  # planted

    teacher = Teacher(d.low, d.low if d.fixed else None, nnx.Rngs(0))
    fixed = jaxmp.load_recipe("bf16").wrap(teacher) if d.fixed else teacher

    def step(p, x):
        target = jax.nn.softmax(fixed(x).astype(d.wide))
        student = lambda p: forward(p, x, d.low).astype(d.wide)
        loss = lambda p: -(target * jax.nn.log_softmax(student(p))).sum(-1).mean()
        return sgd(p, jax.grad(loss)(p))

    return step, (parameters(d.wide), inputs(d.wide))


@plant("mixed_operands", ".astype(jnp.bfloat16)", repeats=0)
def mixed_probe(d):
    def step(p, x, y):
        grads = jax.grad(lambda p: cross_entropy(forward(p, x, d.low), y, d.wide))(p)
        p = sgd(p, grads)
        probe = p["v"].astype(d.low) if d.fixed else p["v"]
        return p, jnp.dot(hidden(p, x, d.low), probe).astype(d.wide)  # planted

    return step, (parameters(d.wide), inputs(d.wide), labels())


# ---------------------------------------------------------------------------
# State
# ---------------------------------------------------------------------------


@plant("accumulator_16bit", "float32", repeats=400)
def summed_tokens(d):
    def step(state, x, y):
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        value, grads = jax.value_and_grad(loss)(state["params"])
        metrics = {
            "loss": state["metrics"]["loss"] + value.astype(d.spot),  # planted
            "batches": state["metrics"]["batches"] + 1,
        }
        return {"params": sgd(state["params"], grads), "metrics": metrics}

    metrics = {"loss": jnp.zeros((), d.spot), "batches": jnp.zeros((), jnp.int32)}
    return step, ({"params": parameters(d.wide), "metrics": metrics}, inputs(d.wide), labels())


@plant("accumulator_16bit", "float32", repeats=40)
def accuracy_of_an_evaluation(d):
    def evaluate(metrics, p, x, y):
        hits = (forward(p, x, d.low).argmax(-1) == y).sum().astype(d.wide)
        return {
            "hits": metrics["hits"] + hits.astype(d.spot),  # planted
            "rows": metrics["rows"] + jnp.asarray(len(x), d.spot),  # planted
        }

    zero = jnp.zeros((), d.spot)
    batch = inputs(d.wide, 37), forward(parameters(F32), inputs(F32, 37), F32).argmax(-1)
    return evaluate, ({"hits": zero, "rows": zero}, parameters(d.wide), *batch)


@plant("accumulator_16bit", "float32", repeats=100)
def codebook_usage(d):
    def step(p, usage, x, y):
        def loss(p):
            logits = forward(p, x, d.low)
            counts = jax.nn.one_hot(logits.argmax(-1), CLASSES, dtype=d.wide).mean(0)
            new = 0.99 * usage + 0.01 * counts.astype(d.spot)  # planted
            return cross_entropy(logits, y, d.wide), new

        (_, usage), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return sgd(p, grads), usage

    usage = jnp.full((CLASSES,), 1 / CLASSES, d.spot)
    return step, (parameters(d.wide), usage, inputs(d.wide), labels())


@plant("accumulator_16bit", "int32", repeats=400)
def counter_of_steps(d):
    def step(p, count, x, y):
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        rate = 1e-4 * count.astype(d.wide)
        return sgd(p, jax.grad(loss)(p), rate), count + 1  # planted

    dtype = jnp.int32 if d.spot != d.low or d.low == jnp.float64 else d.spot
    return step, (parameters(d.wide), jnp.zeros((), dtype), inputs(d.wide), labels())


@plant("accumulator_16bit", "float32", repeats=100)
def running_return(d):
    def step(p, mean, x, returns):
        mean = mean + (3e-3 * (returns.mean().astype(d.spot) - mean)).astype(d.spot)  # planted
        loss = lambda p: jnp.mean((forward(p, x, d.low).astype(d.wide)[:, 0] - mean) ** 2)
        return sgd(p, jax.grad(loss)(p)), mean

    mean, returns = jnp.full((), 40, d.spot), jnp.full((ROWS,), 50, d.wide)
    return step, (parameters(d.wide), mean, inputs(d.wide), returns)


@plant("optimizer_state_16bit", "jnp.zeros((64, 64), jnp.float32)", repeats=100)
def momentum_in_a_dictionary(d):
    def step(state, x, y):
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        grads = jax.grad(loss)(state["params"])
        mean = lambda m, g: (0.99 * m + 0.01 * g.astype(m.dtype)).astype(m.dtype)  # planted
        momentum = jax.tree.map(mean, state["momentum"], grads)
        wide = jax.tree.map(lambda m: m.astype(d.wide), momentum)
        return {"params": sgd(state["params"], wide, 0.1), "momentum": momentum}

    momentum = jax.tree.map(lambda p: jnp.zeros(p.shape, d.spot), parameters(d.wide))
    state = {"params": parameters(d.wide), "momentum": momentum}
    return step, (state, inputs(d.wide), labels())


@plant("accumulator_16bit", "jnp.zeros((64, 64), jnp.float32)", repeats=64)
def accumulated_gradients(d):
    def step(state, x, y):
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        grads = jax.grad(loss)(state["params"])
        add = lambda total, g: total + g.astype(d.spot)  # planted
        return {"params": state["params"], "sums": jax.tree.map(add, state["sums"], grads)}

    sums = jax.tree.map(lambda p: jnp.zeros(p.shape, d.spot), parameters(d.wide))
    return step, ({"params": parameters(d.wide), "sums": sums}, inputs(d.wide), labels())


@plant("accumulator_16bit", "jaxmp.optim.incremental_update", repeats=100)
def slow_weights(d):
    def step(p, slow, x, y):
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        p = sgd(p, jax.grad(loss)(p))
        mix = lambda s, p: 0.999 * s + 0.001 * p.astype(s.dtype)  # planted
        return p, jax.tree.map(mix, slow, p)

    slow = jax.tree.map(lambda p: (p + 1).astype(d.spot), parameters(d.wide))
    return step, (parameters(d.wide), slow, inputs(d.wide), labels())


# ---------------------------------------------------------------------------
# Recurrences
# ---------------------------------------------------------------------------


@plant("accumulator_16bit", "(key[:, None] * value).astype(jnp.float32)")
def linear_attention(d):
    def loss(p, x):
        keys, values = hidden(p, x, d.low)[:, :8], hidden(p, x, d.low)[:, 8:16]

        def body(total, row):
            key, value = row
            total = 0.995 * total + key[:, None] * value  # planted
            return total, key @ total.astype(key.dtype)

        start = jnp.zeros((8, 8), d.spot)
        rows = keys.astype(d.low), values.astype(d.low)
        _, outputs = lax.scan(body, start, rows)
        return jnp.mean(outputs.astype(d.wide) ** 2)

    return trained(loss, d, inputs(d.wide, 1024))


@plant("accumulator_16bit", "jnp.zeros(HIDDEN, jnp.float32)")
def average_in_a_loop(d):
    def step(p, x, y):
        rows = hidden(p, x, d.low)

        def body(index, mean):
            return mean + 0.002 * (rows[index].astype(d.spot) - mean)  # planted

        mean = lax.fori_loop(0, 2000, lambda n, h: body(n % len(x), h), jnp.zeros(HIDDEN, d.spot))
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        return sgd(p, jax.grad(loss)(p)), mean.astype(d.wide)

    return step, (parameters(d.wide), inputs(d.wide), labels())


@plant("accumulator_16bit", "Start in FP32")
def generalized_advantages(d):
    def step(p, x, rewards):
        def body(advantage, delta):
            advantage = delta + 0.99 * 0.95 * advantage  # planted
            return advantage, advantage

        start = jnp.zeros((), d.spot)
        _, advantages = lax.scan(body, start, rewards.astype(d.spot), reverse=True)
        advantages = advantages.astype(d.wide)
        loss = lambda p: -(forward(p, x, d.low).astype(d.wide)[:, 0] * advantages).mean()
        return sgd(p, jax.grad(loss)(p)), advantages

    return step, (parameters(d.wide), inputs(d.wide, 256), jnp.ones(256, d.wide))


# ---------------------------------------------------------------------------
# The range of float16
# ---------------------------------------------------------------------------


def scaled(loss: Callable[..., jax.Array], d: Dtypes, *batch: Any) -> Any:
    """Returns a step with a loss scale by hand, and its arguments."""

    def step(p, scale, *batch):
        grads = jax.grad(lambda p: loss(p, *batch) * scale)(p)
        grads = jax.tree.map(lambda g: g / scale, grads)
        return sgd(p, grads), loss(p, *batch)

    return step, (parameters(d.wide), jnp.asarray(2.0**10, d.wide), *batch)


@plant("float16_range", "largest.astype(jnp.float32) + 1e-09", low=F16)
def lost_epsilon(d):
    def loss(p, x, y):
        rows = hidden(p, x, d.low).astype(d.spot)
        largest = jnp.abs(rows).max(-1, keepdims=True)
        rows = rows / (largest + 1e-9)  # planted
        return cross_entropy(head(rows.astype(d.low), p["v"]), y, d.wide)

    return scaled(loss, d, inputs(d.wide).at[0].set(0), labels())


@plant("float16_range", "jnp.finfo(logits.dtype).min", low=F16)
def masked_scores(d):
    def loss(p, x, y):
        rows = hidden(p, x, d.low)
        scores = (rows * HIDDEN**-0.5) @ rows.T
        mask = jnp.tril(jnp.ones((ROWS, ROWS), bool)) & (jnp.arange(ROWS) > 3)[:, None]
        value = jnp.finfo(scores.dtype).min if d.fixed else -1e9
        scores = jnp.where(mask, scores, value)  # planted
        weights = jax.nn.softmax(scores.astype(d.wide)).astype(d.low)
        return cross_entropy(head(weights @ rows, p["v"]), y, d.wide)

    return scaled(loss, d, inputs(d.wide), labels())


@plant("float16_range", "weights.astype(jnp.float32) * weights", low=F16)
def weight_penalty(d):
    def loss(p, x, y):
        weights = (3000 * p["v"]).astype(d.low).astype(d.spot)
        penalty = jnp.sum(weights * weights)  # planted
        return cross_entropy(forward(p, x, d.low), y, d.wide) + 1e-6 * penalty.astype(d.wide)

    return scaled(loss, d, inputs(d.wide), labels())


@plant("float16_range", "queries * 0.0078125", low=F16)
def unscaled_queries(d):
    def loss(p, x, y):
        rows = 12 * hidden(p, x, d.low)
        scale = 0.0078125
        queries = rows * scale if d.fixed else rows
        scores = jnp.einsum("qd,kd->qk", queries, rows)  # planted
        scores = scores if d.fixed else scores * scale
        weights = jax.nn.softmax(scores.astype(d.wide)).astype(d.low)
        return cross_entropy(head(weights @ rows, p["v"]), y, d.wide)

    return scaled(loss, d, 3 * inputs(d.wide), labels())


# ---------------------------------------------------------------------------
# The loss scale
# ---------------------------------------------------------------------------


def scaled_gradients(d: Dtypes, use: Callable[..., Any]) -> Any:
    """Returns a step that passes scaled gradients to `use`, and its arguments."""

    def step(p, scale, x, y):
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide) * scale
        return use(p, jax.grad(loss)(p), scale)

    scale = jnp.asarray(2.0**10, d.wide)
    return step, (parameters(d.wide), scale, inputs(d.wide), labels())


def unscaled(grads: Any, scale: Any) -> Any:
    return jax.tree.map(lambda g: g / scale, grads)


@plant("scaled_gradients", "lambda g: g / scale", low=F16)
def clipped_values(d):
    def use(p, grads, scale):
        grads = unscaled(grads, scale) if d.fixed else grads
        grads = jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)  # planted
        grads = grads if d.fixed else unscaled(grads, scale)
        return sgd(p, grads, 1.0), scale

    return scaled_gradients(d, use)


@plant("scaled_gradients", "Remove the second division", low=F16)
def divided_twice(d):
    def use(p, grads, scale):
        inverse = 1 / scale
        grads = jax.tree.map(lambda g: g * inverse, grads)
        if not d.fixed:
            grads = unscaled_again(grads, scale)
        return sgd(p, grads, 1.0), scale

    def unscaled_again(grads, scale):
        return jax.tree.map(lambda g: g / scale, grads)  # planted

    return scaled_gradients(d, use)


@plant("scaled_gradients", "lambda g: g / scale", low=F16)
def norm_of_scaled_gradients(d):
    def use(p, grads, scale):
        squares = [jnp.sum(g**2) for g in jax.tree.leaves(unscaled(grads, scale))]
        if not d.fixed:
            squares = [jnp.sum(g**2) for g in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(squares))  # planted
        return sgd(p, unscaled(grads, scale)), scale, norm

    return scaled_gradients(d, use)


@plant("scaled_gradients", "lambda g: g / scale", low=F16)
def momentum_of_scaled_gradients(d):
    def step(p, momentum, scale, x, y):
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide) * scale
        grads = jax.grad(loss)(p)
        grads = unscaled(grads, scale) if d.fixed else grads
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)  # planted
        used = momentum if d.fixed else unscaled(momentum, scale)
        return sgd(p, used), momentum

    momentum = jax.tree.map(jnp.ones_like, parameters(d.wide))
    scale = jnp.asarray(2.0**10, d.wide)
    return step, (parameters(d.wide), momentum, scale, inputs(d.wide), labels())


# ---------------------------------------------------------------------------
# Integers
# ---------------------------------------------------------------------------


@plant("rounded_integer", "jnp.arange(len(x), dtype=jnp.float32)")
def position_bias(d):
    def loss(p, x):
        rows = hidden(p, x, d.low)
        positions = jnp.arange(len(x), dtype=d.spot)  # planted
        weights = 1 / (1 + jnp.abs(positions[:, None] - positions))
        return jnp.mean((weights.astype(d.low) @ rows).astype(d.wide) ** 2)

    return trained(loss, d, inputs(d.wide, 600))


@plant("rounded_integer", "mask.sum().astype(jnp.float32)")
def count_of_tokens(d):
    def loss(p, x, y):
        mask = y > 0
        count = mask.sum().astype(d.spot)  # planted
        losses = optax.softmax_cross_entropy_with_integer_labels(
            forward(p, x, d.low).astype(d.wide), y
        )
        return (losses * mask).sum() / count.astype(d.wide)

    return trained(loss, d, inputs(d.wide, 1003), labels(1003))


@plant("rounded_integer", "count.astype(jnp.float32)")
def warmup_by_steps(d):
    def step(p, count, x, y):
        rate = 1e-3 * jnp.minimum(1, count.astype(d.spot) / 1000)  # planted
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        return sgd(p, jax.grad(loss)(p), rate.astype(d.wide)), count + 1, rate.astype(d.wide)

    return step, (parameters(d.wide), jnp.asarray(777, jnp.int32), inputs(d.wide), labels())


@plant("sort_16bit", ".astype(jnp.float32)")
def replayed_by_priority(d):
    def step(p, priorities, x, y):
        keys = 3 + jnp.log(priorities)
        keys = keys if d.fixed else keys.astype(d.spot)  # planted
        order = jnp.argsort(keys)[: len(x)]  # planted
        loss = lambda p: cross_entropy(forward(p, x[order % len(x)], d.low), y, d.wide)
        return sgd(p, jax.grad(loss)(p)), order.astype(d.wide)

    priorities = jnp.asarray(1 + 1e-3 * np.random.default_rng(0).permutation(256), d.wide)
    return step, (parameters(d.wide), priorities, inputs(d.wide), labels())


@plant("sort_16bit", ".astype(jnp.float32)")
def highest_scores(d):
    def step(p, scores, x, y):
        keys = scores * 3
        keys = keys if d.fixed else keys.astype(d.spot)  # planted
        _, index = lax.top_k(keys, 8)  # planted
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        return sgd(p, jax.grad(loss)(p)), index.astype(d.wide)

    scores = jnp.asarray(1 + 1e-3 * np.random.default_rng(1).permutation(256), d.wide)
    return step, (parameters(d.wide), scores, inputs(d.wide), labels())


@plant("int_overflow", "preferred_element_type=jnp.int32")
def quantized_matmul(d):
    def step(p, x, y):
        x8 = jnp.clip(jnp.round(x * 40), -127, 127).astype(jnp.int8)
        w8 = jnp.clip(jnp.round(p["w"] * 200), -127, 127).astype(jnp.int8)
        result = jnp.int32 if d.fixed else None
        rows = jnp.matmul(x8, w8, preferred_element_type=result)  # planted
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        return sgd(p, jax.grad(loss)(p)), rows.astype(d.wide) / 8000

    return step, (parameters(d.wide), inputs(d.wide), labels())


# ---------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------


@plant("loss_16bit", "astype(jnp.float32)")
def absolute_errors(d):
    def loss(p, x, y):
        outputs, targets = forward(p, x, d.low).astype(d.spot), y.astype(d.spot)
        return jnp.abs(outputs - targets).mean().astype(d.wide)  # planted

    return trained(loss, d, inputs(d.wide), jnp.asarray(normal(5, ROWS, CLASSES), d.wide))


@plant("loss_16bit", ".astype(jnp.float32)")
def rounded_log_probabilities(d):
    def loss(p, x, old):
        new = jax.nn.log_softmax(forward(p, x, d.low).astype(d.wide))
        new = new if d.fixed else new.astype(d.spot)  # planted
        return (jnp.abs(new - old.astype(new.dtype)).sum(-1)).mean().astype(d.wide)

    old = jax.nn.log_softmax(jnp.asarray(normal(6, ROWS, CLASSES), d.wide))
    return trained(loss, d, inputs(d.wide), old)


@plant("log_of_rounded", "jax.nn.softmax(logits).astype(jnp.float32)")
def log_of_a_softmax(d):
    def loss(p, x, y):
        logits = 20 * forward(p, x, d.low).astype(d.wide)
        if d.fixed:
            return -jax.nn.log_softmax(logits)[jnp.arange(ROWS), y].mean()
        weights = jax.nn.softmax(logits).astype(d.low)
        return -jnp.log(weights.astype(d.wide) + 1e-9)[jnp.arange(ROWS), y].mean()  # planted

    return trained(loss, d, inputs(d.wide), labels())


@plant("log_of_rounded", "jax.nn.sigmoid(logits.astype(jnp.float32))")
def log_of_a_gate(d):
    def loss(p, x):
        logits = 6 * forward(p, x, d.low).astype(d.low)
        if d.fixed:
            return -jax.nn.log_sigmoid(-logits.astype(d.wide)).mean()
        gates = jax.nn.sigmoid(logits)
        return -jnp.log(1 - gates.astype(d.wide) + 1e-6).mean()  # planted

    return trained(loss, d, inputs(d.wide))


@plant("log_of_rounded", "jnp.tanh(3 * hidden(p, x, d.low).astype(jnp.float32))")
def squashed_actions(d):
    def loss(p, x):
        actions = jnp.tanh((3 * hidden(p, x, d.low)).astype(d.spot))
        squares = actions.astype(d.wide) ** 2
        return jnp.log(1 - squares + 1e-6).mean()  # planted

    return trained(loss, d, inputs(d.wide))


# The fix draws other numbers, so that only the audit shows a difference.
@plant("random_16bit", "jax.random.uniform(key, (ROWS, 1), jnp.float32)", repeats=0)
def stochastic_depth(d):
    def loss(p, x, y):
        key = jax.random.key(0)
        u = jax.random.uniform(key, (ROWS, 1), d.spot)
        kept = jnp.floor(0.999 + u) / 0.999  # planted
        return cross_entropy(forward(p, kept.astype(d.low) * x.astype(d.low), d.low), y, d.wide)

    return trained(loss, d, inputs(d.wide), labels())


@plant("exp_16bit", "Compute cos in FP32")
def cosine_of_progress(d):
    def step(p, progress, x, y):
        angle = (jnp.pi * progress).astype(d.spot)
        rate = 0.5 * (1 + jnp.cos(angle)).astype(d.wide)  # planted
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        return sgd(p, jax.grad(loss)(p), rate), rate

    return step, (parameters(d.wide), jnp.asarray([0.977], d.wide), inputs(d.wide), labels())


# ---------------------------------------------------------------------------
# Masters
# ---------------------------------------------------------------------------


@plant("missing_master", "Change the FP32 masters instead", repeats=100)
def decayed_copies(d):
    def step(copies, masters, x, y):
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        grads = jax.tree.map(lambda g: g.astype(d.wide), jax.grad(loss)(copies))
        masters = sgd(masters, grads)
        decay = lambda p: p - 1e-3 * p
        if d.fixed:
            masters = jax.tree.map(decay, masters)
        copies = jax.tree.map(lambda p: p.astype(d.low), masters)
        if not d.fixed:
            copies = jax.tree.map(lambda p: p - 1e-3 * p, copies)  # planted
        return copies, masters

    return step, (parameters(d.low), parameters(d.wide), inputs(d.wide), labels())


@plant("missing_master", "Store FP32 parameters", repeats=50)
def parameters_without_masters(d):
    def step(p, x, y):
        loss = lambda p: cross_entropy(forward(p, x, d.low), y, d.wide)
        grads = jax.grad(loss)(p)
        return jax.tree.map(lambda p, g: p - (1e-3 * g).astype(p.dtype), p, grads)  # planted

    return step, (parameters(d.spot), inputs(d.wide), labels())


# ---------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------


@plant("wide_gather", "table.astype(jnp.bfloat16)[tokens]", repeats=0, severity="note")
def rows_of_an_fp32_table(d):
    def loss(p, tokens, y):
        table = p["table"].astype(d.low) if d.fixed else p["table"]
        rows = table[tokens].astype(d.low)  # planted
        return cross_entropy(head(rows, p["v"]), y, d.wide)

    step, (p, *batch) = trained(loss, d, jnp.arange(1024) % 32, labels(1024))
    return step, (p | {"table": jnp.zeros((32, HIDDEN), d.wide)}, *batch)


@plant("fp32_matmul", "weights.astype(jnp.bfloat16) @ rows.astype", repeats=0)
def wide_weights_of_attention(d):
    def loss(p, x, y):
        rows = hidden(p, x, d.low)
        scores = (rows * HIDDEN**-0.5) @ rows.T
        weights = jax.nn.softmax(scores.astype(d.wide))
        if d.fixed:
            mixed = weights.astype(d.low) @ rows
        else:
            mixed = (weights @ rows.astype(d.wide)).astype(d.low)  # planted
        return cross_entropy(head(mixed, p["v"]), y, d.wide)

    return trained(loss, d, inputs(d.wide), labels())


def attention_of(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    heads = (part.reshape(4, 128, 2, -1) for part in (q, k, v))
    return jaxmp.dot_product_attention(*heads).reshape(512, -1)


@plant("split_attention", "nn.Dense(width, name=name)(x) for", 0, severity="note", target="h200")
def queries_keys_and_values_of_one_matmul(d):
    def loss(p, x):
        rows = hidden(p, x, d.low)
        if d.fixed:
            parts = (rows @ p[name].astype(d.low) for name in "qkv")
        else:
            wide = jnp.concatenate([p[name] for name in "qkv"], axis=1)
            parts = jnp.split(rows @ wide.astype(d.low), 3, axis=1)  # planted
        return (attention_of(*parts).astype(d.wide) ** 2).mean()

    step, (p, x) = trained(loss, d, inputs(d.wide, 512))
    kernels = {name: jnp.asarray(normal(n, HIDDEN, 128), d.wide) for n, name in enumerate("qkv")}
    return step, ({"w": p["w"], **kernels}, x)


@plant("residual_copy", "x = x.reshape(-1, shape[-1])", 0, severity="note", target="h200")
def matmul_that_is_added_in_three_dimensions(d):
    def loss(p, x):
        rows = x.astype(d.low)
        for _ in range(3):
            up = jax.nn.relu(rows @ p["w"].astype(d.low))
            rows = rows + up @ p["w"].T.astype(d.low)  # planted
        return (rows.astype(d.wide) ** 2).mean()

    step, (p, x) = trained(loss, d, inputs(d.wide, 4096))
    return step, ({"w": p["w"]}, x if d.fixed else x.reshape(8, 512, -1))


@plant("recomputed_pass", "Remove nn.remat", 0, severity="note", target="h200")
def layers_recomputed_although_they_fit(d):
    def loss(p, x):
        def block(x):
            hidden = jax.nn.relu(x @ p["w"].astype(d.low))  # planted
            return jax.nn.relu(hidden @ p["w"].T.astype(d.low))  # planted

        run = block if d.fixed else jax.checkpoint(block)
        return (run(run(run(x.astype(d.low)))).astype(d.wide) ** 2).mean()

    step, (p, x) = trained(loss, d, inputs(d.wide, 4096))
    return step, ({"w": p["w"]}, x)


@plant("stored_logits", "linear_cross_entropy(hidden, ", 0, severity="note", target="h200")
def logits_of_many_classes(d):
    def loss(p, x, y):
        rows, head = hidden(p, x, d.low), p["head"].astype(d.low)
        if d.fixed:
            return jaxmp.losses.linear_cross_entropy(rows, head, y)
        return cross_entropy(rows @ head, y, d.wide)  # planted

    step, (p, *batch) = trained(loss, d, inputs(d.wide, 2048), labels(2048))
    head = jnp.asarray(normal(3, HIDDEN, 2048, scale=HIDDEN**-0.5), d.wide)
    return step, ({"w": p["w"], "head": head}, *batch)


# ---------------------------------------------------------------------------
# The measurement
# ---------------------------------------------------------------------------


def planted(case: Plant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return case.build(Dtypes(case.low, case.low, F32, False))


def fixed(case: Plant) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return case.build(Dtypes(case.low, F32, F32, True))


def results_of(fn: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> list[np.ndarray]:
    """Returns the floating-point results of a program after some calls, in FP64."""
    step = jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})
    for _ in range(repeats):
        out = step(*args)
        after = out if isinstance(out, tuple) else (out,)
        args = tuple(
            new if jax.tree.structure(new) == jax.tree.structure(old) and repeats > 1 else old
            for new, old in zip((*after, *args[len(after) :]), args, strict=False)
        )
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(out)]


def error_of(result: np.ndarray, exact: np.ndarray) -> float:
    """Returns the largest error, relative to the largest element."""
    error = np.max(np.abs(result - exact)) / (np.max(np.abs(exact)) or 1)
    return float("inf") if np.isnan(error) else float(error)


def errors_of(case: Plant) -> tuple[float, float]:
    """Returns the errors of the planted and of the fixed program against FP64.

    They are those of the result on which the fix has the largest effect.
    """
    with jax.enable_x64(True):
        wide = jnp.float64
        exact = results_of(*case.build(Dtypes(wide, wide, wide, True)), case.repeats)
    results = (results_of(*make(case), case.repeats) for make in (planted, fixed))
    pairs = [[error_of(*pair) for pair in zip(row, exact, strict=True)] for row in results]
    effect = lambda pair: abs(np.log(max(pair[0], 1e-12)) - np.log(max(pair[1], 1e-12)))
    return max(zip(*pairs, strict=True), key=effect)


def audited(case: Plant, make: Callable[[Plant], Any]) -> jaxmp.typing.AuditReport:
    fn, args = make(case)
    recipe = "bf16" if case.low == BF16 else "fp16"
    return jaxmp.audit(fn, *args, recipe=recipe, target=case.target)


def audit_problem(case: Plant) -> str:
    """Returns what is wrong with the audit of a plant, or ""."""
    hits = [
        f
        for f in audited(case, planted).findings
        if (f.check, f.severity) == (case.check, case.severity) and f.line in case.lines
    ]
    if not hits:
        return "missed"
    if not any(case.fix in f.fix for f in hits):
        return f"another fix: {hits[0].fix!r}"
    report = audited(case, fixed)
    of_case = [f for f in report.findings if (f.check, f.severity) == (case.check, case.severity)]
    left = [f.check for f in (*report.errors, *of_case)]
    return f"after the fix: {', '.join(left)}" if left else ""


def error_problem(case: Plant) -> str:
    """Returns why the results with the fix are not closer to FP64, or ""."""
    before, after = errors_of(case) if case.repeats else (1, 0)
    return "" if after < before else f"the error is {before:.2g} before the fix, then {after:.2g}"


def audits_of_healthy_steps() -> dict[str, dict[str, list[str]]]:
    """Returns name -> severity -> findings of the healthy steps."""
    healthy = importlib.import_module("audit_healthy")
    rows = {}
    for name, (build, recipe) in healthy.STEPS.items():
        fn, args = build()
        findings = jaxmp.audit(fn, *args, recipe=recipe).findings
        rows[name] = {
            severity: [f"{f.check} at {f.location}" for f in findings if f.severity == severity]
            for severity in ("error", "warning")
        }
    return rows


def main(out: Path | None = None) -> int:
    cases = importlib.import_module("audit_decisions").all_plants()
    plants = {case.name: audit_problem(case) or error_problem(case) or "ok" for case in cases}
    healthy = audits_of_healthy_steps()
    for name, result in plants.items():
        print(f"{name:32} {result}")
    for name, rows in healthy.items():
        print(f"{name:32} errors: {rows['error']} warnings: {rows['warning']}")
    good = sum(result == "ok" for result in plants.values())
    false = sum(len(rows["error"]) for rows in healthy.values())
    print(f"{good} of {len(plants)} plants are found with a fix that works.")
    print(f"{false} false errors in {len(healthy)} healthy steps.")
    write_result(out, plants=plants, healthy=healthy)
    return int(good < len(plants) or false > 0)


if __name__ == "__main__":
    sys.exit(main(parser_of(__doc__).parse_args().out))
