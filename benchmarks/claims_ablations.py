"""Rows of `claims.py` that leave out one protection, or change how often it acts.

Shape suffixes: B batch, S position and one more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from byte_gpt import GPT, even_batches, standard_library_text
from claims_precision import RUN, SIZE, flat, loss_of, power_of_two, tokens, trained
from claims_result import Result
from train_lm import first_variables

# XLA may leave out roundings to 16 bits, which these rows measure.
_EXACT = {"xla_allow_excess_precision": False}

# ---------------------------------------------------------------------------
# GradScaler
# ---------------------------------------------------------------------------

# "x" is a step whose gradients are not finite.
STEPS = "..x....xx....."
INTERVAL = 3


def grad_scaler_rule(steps: str, scale: float = 2.0**16, interval: int = INTERVAL) -> list[float]:
    """Returns the scale after each step by the rule of `torch.amp.GradScaler.update`."""
    tracker, scales = 0, []
    for step in steps:
        if step == "x":
            scale, tracker = scale * 0.5, 0
        else:
            tracker += 1
            if tracker == interval:
                scale, tracker = scale * 2.0, 0
        scales.append(scale)
    return scales


def grad_scaler(steps: str = STEPS) -> Result:
    """Trains with the preset of torch, and compares each scale with the rule of GradScaler."""
    scale = jaxmp.DynamicLossScale.preset("torch", growth_interval=INTERVAL)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = jaxmp.load_recipe("fp16").replace(loss_scale=scale).optimizer(inner)
    state = jaxmp.TrainState.create(apply_fn=None, params={"w": jnp.zeros(4)}, tx=tx)

    @jax.jit
    def train_step(state: jaxmp.TrainState, x: jax.Array) -> jaxmp.TrainState:
        _, grads = state.value_and_grad(lambda params: (params["w"] * x).sum())()
        return state.apply_gradients(grads=grads)

    table, moved = [], []
    for number, (step, expected) in enumerate(zip(steps, grad_scaler_rule(steps), strict=True)):
        before = state.params["w"]
        state = train_step(state, jnp.full(4, jnp.inf if step == "x" else 3.0))
        moved.append(float(jnp.linalg.norm(state.params["w"] - before)))
        actual = float(jaxmp.get_loss_scale(state).scale_value)
        kind = "not finite" if step == "x" else "finite"
        table.append(
            [f"{number + 1}", kind, *map(power_of_two, (expected, actual)), f"{moved[-1]:.2f}"]
        )
    same = all(row[2] == row[3] for row in table)
    applied = {row[4] for row, step in zip(table, steps, strict=True) if step == "."}
    skipped = {row[4] for row, step in zip(table, steps, strict=True) if step == "x"}
    finding = (
        f"The scale of each of {len(steps)} steps is {'' if same else 'NOT '}that of GradScaler's "
        f"rule. Clipped to 1, each finite step moves the parameters by {', '.join(applied)}, so "
        f"clipping follows unscaling; a skipped step moves them by {', '.join(skipped)}."
    )
    columns = ["step", "gradients", "scale by the rule", "scale of jaxmp", "change of parameters"]
    return Result(finding, RUN, columns, table)


# ---------------------------------------------------------------------------
# What is not in FP32
# ---------------------------------------------------------------------------


def softmax(x: jax.Array) -> jax.Array:
    exp = jnp.exp(x - x.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True, dtype=x.dtype)


def layer_norm(x: jax.Array) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True, dtype=x.dtype)
    variance = jnp.square(centered).mean(-1, keepdims=True, dtype=x.dtype)
    return centered * jax.lax.rsqrt(variance + jnp.asarray(1e-6, x.dtype))


def accumulate(x: jax.Array) -> jax.Array:
    add = lambda total, part: (total + part, None)
    return jax.lax.scan(add, jnp.zeros(x.shape[1:], x.dtype), x)[0]


def attention(x: jax.Array) -> jax.Array:
    query, key, value = x
    logits = query @ key.T / jnp.asarray(8.0, x.dtype)
    return jax.nn.softmax(logits.astype(jnp.float32)).astype(x.dtype) @ value


def plants() -> dict[str, tuple[Callable[[jax.Array], jax.Array], Any, Any]]:
    """Returns operation -> its function, its input in FP32, and the dtype in which it breaks."""
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    return {
        "softmax over 32,768 classes": (softmax, 3 * draw(0, 4, 32768), jnp.bfloat16),
        "layer norm of values around 300": (layer_norm, 300 * draw(1, 8, 1024) + 300, jnp.float16),
        "sum of 1,024 microbatches": (accumulate, 1 + 0.1 * draw(2, 1024, 64), jnp.bfloat16),
        "attention with logits beyond 65504": (attention, 120 * draw(3, 3, 64, 64), jnp.float16),
    }


def error_of(actual: Any, expected: np.ndarray) -> str:
    """Returns the relative error of an array, or the share of it that is not finite."""
    actual = np.asarray(actual, np.float64)
    if not np.isfinite(actual).all():
        return f"{np.mean(~np.isfinite(actual)):.0%} not finite"
    return f"{np.linalg.norm(actual - expected) / np.linalg.norm(expected):.2%}"


def without_fp32() -> Result:
    """Runs four operations in 16 bits, in FP32 on the same inputs, and under `autocast`."""
    table = []
    for name, (fn, x, dtype) in plants().items():
        x = x.astype(dtype)  # all ways have the same inputs
        with jax.enable_x64(True):
            expected = np.asarray(fn(jnp.asarray(np.asarray(x, np.float64))))
        wide = x.astype(jnp.float32)
        recipe = "bf16" if dtype == jnp.bfloat16 else "fp16"
        results = [
            jax.jit(fn, compiler_options=_EXACT)(x),
            jax.jit(fn, compiler_options=_EXACT)(wide),
            jax.jit(jaxmp.autocast(fn, recipe), compiler_options=_EXACT)(wide),
        ]
        table.append([name, jnp.dtype(dtype).name, *(error_of(each, expected) for each in results)])
    broken = "; ".join(f"{row[0]}: {row[2]}" for row in table)
    finding = f"Errors against FP64 of operations in 16 bits: {broken}."
    columns = ["operation", "dtype", "in 16 bits", "in FP32", "under `autocast`"]
    return Result(finding, RUN, columns, table)


# ---------------------------------------------------------------------------
# How often scales change
# ---------------------------------------------------------------------------

SMALL = dict(layers=2, width=64, heads=4, max_length=64)
SCALES: dict[str, jaxmp.DynamicLossScale | jaxmp.StaticLossScale] = {
    "static, 1": jaxmp.StaticLossScale(1.0),
    "static, 2^12": jaxmp.StaticLossScale(2.0**12),
    "static, 2^24": jaxmp.StaticLossScale(2.0**24),
    **{
        f"doubles after {interval:,} step{'s' * (interval > 1)}": jaxmp.DynamicLossScale(
            growth_interval=interval
        )
        for interval in (1, 10, 100, 2000)
    },
}


def scale_changes(size: dict[str, int] = SMALL, steps: int = 300) -> Result:
    """Trains a GPT in float16 under loss scales that change at several intervals."""
    table, losses = [], {}
    for name, scale in {"FP32, no scale": None, **SCALES}.items():
        scales, skipped, losses[name] = train_with(scale, size, steps)
        changes = sum(a != b for a, b in itertools.pairwise(scales))
        difference = losses[name] / losses["FP32, no scale"] - 1
        table.append(
            [name, f"{changes}", f"{skipped}", power_of_two(scales[-1]), f"{difference:+.2%}"]
        )
    rows = {row[0]: row for row in table}
    slow, fast = rows["doubles after 2,000 steps"], rows["doubles after 1 step"]
    finding = (
        f"In {steps} steps, a scale that doubles after 2,000 finite steps changes {slow[1]} times, "
        f"and its held-out loss differs from FP32 by {slow[4]}; one that doubles after each finite "
        f"step skips {fast[2]} steps, with {fast[4]}."
    )
    columns = ["loss scale", "changes", "skipped steps", "last scale", "held-out loss over FP32"]
    return Result(finding, RUN, columns, table)


def train_with(scale: Any, size: dict[str, int], steps: int) -> tuple[list[float], int, float]:
    """Returns the scale of each step, the number of skipped steps, and the held-out loss."""
    recipe = jaxmp.load_recipe("fp32" if scale is None else "fp16")
    recipe = recipe if scale is None else recipe.replace(loss_scale=scale)
    tx = recipe.optimizer(optax.adam(3e-3))
    state = jaxmp.TrainState.create(apply_fn=None, params=first_variables(GPT(**size), 0), tx=tx)
    loss_fn = loss_of("fp32" if scale is None else "fp16", size)

    @jax.jit
    def train_step(state: jaxmp.TrainState, tokens_BS: jax.Array) -> jaxmp.TrainState:
        _, grads = state.value_and_grad(loss_fn)(tokens_BS)
        return state.apply_gradients(grads=grads)

    scales = []
    for step in range(steps):
        scales.append(1.0 if scale is None else float(jaxmp.get_loss_scale(state).scale_value))
        state = train_step(state, tokens(size, step))
    held_out = even_batches(standard_library_text().held_out, 8, 32, size["max_length"])
    evaluate = jax.jit(loss_of("fp32", size))
    loss = float(np.mean([evaluate(state.params, batch) for batch in held_out]))
    skipped = 0 if scale is None else int(jaxmp.get_skip_stats(state).total)
    return scales, skipped, loss


# ---------------------------------------------------------------------------
# INT8
# ---------------------------------------------------------------------------


def int8_training(size: dict[str, int] = SIZE, steps: int = 200) -> Result:
    """Rounds the gradients of a GPT to 8 bits with one scale per parameter array."""
    table = []
    for progress in (0, steps):
        variables = trained(progress, **size)
        grads = jax.jit(jax.grad(loss_of("fp32", size)))(variables, tokens(size, 0))
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(grads)]
        expected = flat(leaves)
        for name, rounding in {"int8": to_int8, "e5m2": to_e5m2, "e4m3": to_e4m3}.items():
            actual = flat([rounding(leaf) for leaf in leaves])
            zero = np.mean(actual[expected != 0] == 0)
            error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
            table.append([f"{progress}", name, f"{zero:.1%}", f"{error:.1%}"])
    rows = {row[1]: row for row in table[-3:]}
    finding = (
        f"With one scale per array, {rows['int8'][2]} of the gradients of a trained GPT become "
        f"zero in INT8, and {rows['e5m2'][2]} in the FP8 format e5m2. INT8 has 255 evenly spaced "
        "values, so jaxmp has FP8 as the 8-bit format of training, and refuses INT8 as a compute "
        "dtype."
    )
    columns = ["steps", "format", "gradients that become zero", "relative error"]
    return Result(finding, RUN, columns, table)


def to_int8(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max() / 127
    return np.round(x / scale) * scale if scale else x


def to_e5m2(x: np.ndarray) -> np.ndarray:
    return _to_float8(x, jnp.float8_e5m2)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    return _to_float8(x, jnp.float8_e4m3fn)


def _to_float8(x: np.ndarray, dtype: Any) -> np.ndarray:
    scale = np.abs(x).max() / float(jnp.finfo(dtype).max)
    return (x / scale).astype(dtype).astype(np.float64) * scale if scale else x
