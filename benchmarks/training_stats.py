"""Compares the answers of `jaxmp.with_stats` with trainings, and measures its cost.

    python benchmarks/training_stats.py                     # all parts
    python benchmarks/training_stats.py --only ranks
    python benchmarks/training_stats.py --out benchmarks/results/training_stats_cpu.json

Ranks: `what_if` and `jaxmp.validate` measure the error that float16 and FP8 cause in each module,
on the same parameters and batch, after 20 steps in FP32. The figures are the rank correlation of
Spearman over the modules, of the gradients of parameters and of the outputs. The models are a
perceptron, the byte-level GPT and Llama, in which all linear layers but heads compute in FP8.

Loss scale: the suggestion from the first step in FP32, the share of the FP32 gradient of the
parameters that float16 loses with it and with other powers of two, and the steps that 100 steps in
fp16 skip with it.

Cost: equations of the traced programs of a step and of its statistics, for a GPT with 48 layers and
for a Llama with 48 layers in a scan, the CPU time for tracing both (the statistics of a jitted step
reuse its trace), and bytes of the latter's programs compiled for this CPU.
"""

from __future__ import annotations

import itertools
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import byte_gpt
import jaxmp
import llama
import vision_digits
from jaxmp import fp8
from jaxmp._programs._constructs import is_jaxpr, sub_jaxprs
from jaxmp._tools.audit._trace import trace
from jaxmp._tools.stats._with_stats import _Program
from result_file import parser_of, write_result
from train_lm import cross_entropy, prepare

STEP = 20
FORMATS = {"float16": "fp16", "float8": "fp8"}
FIELDS = {"gradients": "gradient_error", "activations": "activation_error"}

# ---------------------------------------------------------------------------
# Ranks of modules
# ---------------------------------------------------------------------------


class Perceptron(nn.Module):
    """Six hidden layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns 16 numbers for each row of 16."""
        for layer in range(6):
            x = nn.gelu(nn.Dense(64, name=f"layer_{layer}")(x))
        return nn.Dense(16, name="out")(x)


def curves(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields inputs and targets of a regression."""
    rng = np.random.default_rng(seed)
    while True:
        x = rng.normal(size=(64, 16)).astype(np.float32)
        yield x, np.sin(2 * x) * np.roll(x, 1, axis=1)


def squared_error(y: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the mean squared error."""
    return jnp.mean(jnp.square(y.astype(jnp.float32) - batch[1]))


def tokens(seed: int, batch_size: int = 8, length: int = 32) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields tokens without the last one, and all tokens."""
    text = byte_gpt.standard_library_text().train
    for number in itertools.count():
        batch = byte_gpt.random_batch(text, batch_size, length, seed, number)
        yield batch[:, :-1], batch


def token_loss(logits: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the mean cross-entropy of the next tokens."""
    return cross_entropy(logits, batch[1])


# Name -> model, loss of (outputs, batch), batches.
MODELS = {
    "perceptron": (Perceptron(), squared_error, curves),
    "byte GPT": (byte_gpt.GPT(2, 64, max_length=32), token_loss, tokens),
    "Llama": (
        llama.Llama(llama.Shape(2, 64, 4, 2, 176, 256, max_length=32, tied=True)),
        token_loss,
        tokens,
    ),
}


def make_run(name: str) -> Callable[[jaxmp.Recipe, int], jaxmp.TrainingRun]:
    """Returns the training of a model for `validate`."""
    model, loss, batches = MODELS[name]

    def make(recipe: jaxmp.Recipe, seed: int) -> jaxmp.TrainingRun:
        wrapped, held_out = recipe.wrap(model), next(batches(99))
        params = wrapped.init(jax.random.key(seed), held_out[0])
        tx = recipe.optimizer(optax.adam(1e-3))
        state = jaxmp.TrainState.create(apply_fn=wrapped.apply, params=params, tx=tx)
        loss_fn = lambda params, batch: loss(wrapped.apply(params, batch[0]), batch)

        def step(state: Any, batch: Any) -> Any:
            value, grads = state.value_and_grad(loss_fn)(batch)
            return state.apply_gradients(grads=grads), {"loss": value, "grads": grads}

        evaluate = lambda state: loss_fn(state.params, held_out)
        return jaxmp.TrainingRun(state=state, step=step, batches=batches(seed), evaluate=evaluate)

    return make


def fp8_everywhere() -> jaxmp.Recipe:
    """Returns the recipe fp8 with all linear layers but heads in FP8, as `what_if` assumes."""
    recipe = jaxmp.load_recipe("fp8")
    scaling = fp8.CurrentScaling(min_width=1, emulate=True)
    return recipe.replace(policies=jaxmp.PolicyMap(recipe.policies.default), fp8=scaling)


def predicted(name: str, step_number: int) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the errors by format, kind and module, at a step of a training in FP32."""
    run = make_run(name)(jaxmp.load_recipe("fp32"), 0)
    state, step, batches = run.state, jax.jit(run.step), iter(run.batches)
    for batch in itertools.islice(batches, step_number):
        state, _ = step(state, batch)
    stats = jaxmp.with_stats(run.step, what_if=tuple(FORMATS))(state, next(batches))
    return stats.report().errors


def ranks(names: tuple[str, ...] = tuple(MODELS), step: int = STEP) -> list[dict[str, Any]]:
    """Returns a row for each model, format and kind of tensor."""
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in a third of the time
    rows = []
    for name in names:
        candidates = {"fp16": "fp16", "fp8": fp8_everywhere()}
        options = dict(seeds=1, steps=step + 1, compare_steps=[step], eval_every=step + 1)
        report = jaxmp.validate(make_run(name), candidates, progress=False, **options)
        errors = predicted(name, step)
        for label, recipe in FORMATS.items():
            for kind, field in FIELDS.items():
                measured = {row.module: getattr(row, field) for row in report[recipe].modules}
                own = errors[label][kind]
                modules = [m for m, error in measured.items() if error is not None and m in own]
                pairs = [(measured[module], own[module]) for module in modules]
                row = {"model": name, "format": label, "tensors": kind}
                row |= {"modules": len(pairs), "spearman": round(spearman(pairs), 3)}
                rows.append(row | {"errors": dict(zip(modules, pairs, strict=True))})
                print(*list(row.values()), flush=True)
    return rows


def spearman(pairs: list[tuple[float, float]]) -> float:
    """Returns the rank correlation of pairs of numbers, without ties."""
    first, second = (np.argsort(np.argsort(column)) for column in zip(*pairs, strict=True))
    return float(np.corrcoef(first, second)[0, 1])


# ---------------------------------------------------------------------------
# First loss scale
# ---------------------------------------------------------------------------


def fp16(scale: float) -> jaxmp.Recipe:
    """Returns the recipe fp16 with another first loss scale."""
    return jaxmp.load_recipe("fp16").replace(loss_scale=jaxmp.DynamicLossScale(scale))


class Digits:
    """Training of `vision_digits.py`."""

    def __init__(self, recipe: jaxmp.Recipe) -> None:
        self.model = recipe.wrap(vision_digits.CNN(rngs=nnx.Rngs(0)))
        self.optimizer = jaxmp.nnx.Optimizer(self.model, recipe.optimizer(optax.adamw(3e-3)))
        self.step = vision_digits.train_step

    def batches(self) -> Iterator[Any]:
        """Yields batches of 64 images."""
        digits, rng = vision_digits.handwritten_digits(), np.random.default_rng(0)
        while True:
            yield from vision_digits.shuffled_batches(
                digits.train_images, digits.train_labels, 64, rng
            )

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """Returns the arguments of `step`."""
        return self.model, self.optimizer, batch

    def gradients(self, batch: Any) -> Any:
        """Returns the gradients of the parameters."""
        return nnx.grad(vision_digits.loss_fn)(self.model, batch)

    def train(self, count: int) -> int:
        """Trains, and returns the number of skipped steps."""
        step = nnx.cached_partial(nnx.jit(self.step), self.model, self.optimizer)
        for batch in itertools.islice(self.batches(), count):
            step(batch)
        return int(jaxmp.get_skip_stats(self.optimizer).total)


class ByteGpt:
    """Training of `train_lm.py`."""

    def __init__(self, recipe: jaxmp.Recipe) -> None:
        model = byte_gpt.GPT()
        self.state, self.step, self.loss = prepare(recipe, model, optax.adamw(1e-3))

    def batches(self) -> Iterator[Any]:
        """Yields batches of 16 texts of 64 bytes."""
        return (batch for _, batch in tokens(0, 16, 64))

    def arguments(self, batch: Any) -> tuple[Any, ...]:
        """Returns the arguments of `step`."""
        return self.state, batch

    def gradients(self, batch: Any) -> Any:
        """Returns the gradients of the parameters."""
        return jax.grad(self.loss)(self.state.params, batch)

    def train(self, count: int) -> int:
        """Trains, and returns the number of skipped steps."""
        for batch in itertools.islice(self.batches(), count):
            self.state, _ = self.step(self.state, batch)
        return int(jaxmp.get_skip_stats(self.state).total)


def lost(gradients: Any, scale: float) -> tuple[float, float]:
    """Returns the shares of nonzero elements that become zero and infinite in float16."""
    flat = np.concatenate([np.ravel(np.asarray(x)) for x in jax.tree.leaves(gradients)])
    flat = flat[flat != 0].astype(np.float32)
    with np.errstate(over="ignore"):
        narrow = (flat * np.float32(scale)).astype(np.float16)
    return float(np.mean(narrow == 0)), float(np.mean(np.isinf(narrow)))


def loss_scale(training: type[Digits | ByteGpt], count: int = 100) -> dict[str, Any]:
    """Returns the suggestion, the losses of each power of two, and the skipped steps."""
    run = training(jaxmp.load_recipe("fp32"))
    batch = next(run.batches())
    report = jaxmp.with_stats(run.step)(*run.arguments(batch)).report()
    gradients = run.gradients(batch)
    powers = {f"2**{power}": lost(gradients, 2.0**power) for power in range(-14, 25)}
    row: dict[str, Any] = {"training": training.__name__, "suggested": report.loss_scale}
    row |= {"curve": report.scales, "lost_by_power": powers}
    if report.loss_scale is not None:
        row["lost"] = sum(lost(gradients, report.loss_scale))
        row |= {"steps": count, "skipped": training(fp16(report.loss_scale)).train(count)}
    print({key: row[key] for key in row if key not in ("curve", "lost_by_power")}, flush=True)
    return row


# ---------------------------------------------------------------------------
# Cost
# ---------------------------------------------------------------------------


def byte_gpt_of(layers: int) -> tuple[Any, tuple[int, int]]:
    """Returns a small GPT, whose layers are unrolled, and the shape of its tokens."""
    return byte_gpt.GPT(layers, 64, max_length=32), (4, 33)


def llama_of(layers: int) -> tuple[Any, tuple[int, int]]:
    """Returns a Llama with 0.6 billion parameters in 48 layers, in a scan."""
    return llama.Llama(llama.Shape(layers, 1024, 16, 4, 2816, 32000, max_length=512)), (4, 513)


def step_of(model: Any, shape: tuple[int, int]) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """Returns a training step and its arguments, as shapes."""
    tx, tokens = optax.adam(1e-3), jax.ShapeDtypeStruct(shape, jnp.int32)

    def step(state: Any, batch: Any) -> Any:
        loss_fn = lambda params: cross_entropy(model.apply(params, batch[:, :-1]), batch)
        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def initial(batch: Any) -> Any:
        params = model.init(jax.random.key(0), batch[:, :-1])
        return {"params": params, "opt": tx.init(params)}

    return step, (jax.eval_shape(initial, tokens), tokens)


def count_equations(jaxpr: Any, seen: dict[int, Any]) -> int:
    """Returns the number of equations, those of a shared jaxpr once."""
    body = getattr(jaxpr, "jaxpr", jaxpr)
    if id(body) in seen:
        return 0
    seen[id(body)] = body
    inner = [each for equation in body.eqns for each in sub_jaxprs(equation) if is_jaxpr(each)]
    return len(body.eqns) + sum(count_equations(each, seen) for each in inner)


def cost(
    layers: int = 48, models: tuple[Callable[..., Any], ...] = (byte_gpt_of, llama_of)
) -> list[dict[str, Any]]:
    """Returns equations of a step and of its statistics, and the bytes of those with a scan."""
    rows = []
    for make in models:
        step, arguments = step_of(*make(layers))
        jitted = jax.jit(step)
        jax.clear_caches()
        start = time.process_time()
        jitted.trace(*arguments)
        traced = time.process_time()
        of_jitted = _Program(trace(jitted, arguments, {}))
        jax.make_jaxpr(of_jitted)(jax.tree.leaves(arguments))
        seconds = (traced - start, time.process_time() - traced)
        program = _Program(trace(step, arguments, {}))
        for name, fn, args, duration in (
            ("step", step, arguments, seconds[0]),
            ("statistics", program, (jax.tree.leaves(arguments),), seconds[1]),
        ):
            equations = count_equations(jax.make_jaxpr(fn)(*args), {})
            row = {"model": make.__name__, "layers": layers, "program": name}
            row |= {"equations": equations, "tracing_seconds": round(duration, 2)}
            if make is llama_of:
                memory = jax.jit(fn).lower(*args).compile().memory_analysis()
                sizes = ("argument", "output", "temp")
                row |= {size: getattr(memory, f"{size}_size_in_bytes") for size in sizes}
                row["bytes"] = sum(row[size] for size in sizes)
            rows.append(row)
            print(row, flush=True)
    return rows


PARTS: dict[str, Callable[[], Any]] = {
    "ranks": ranks,
    "loss_scale": lambda: [loss_scale(training) for training in (Digits, ByteGpt)],
    "cost": cost,
}


def main() -> None:
    options = parser_of(__doc__, PARTS).parse_args()
    results = {name: PARTS[name]() for name in sorted(options.only)}  # the cost first
    write_result(options.out, machine=platform.machine(), **results)


if __name__ == "__main__":
    main()
