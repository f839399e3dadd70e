"""Numerical rows of `claims.py`, which run on any machine.

Shape suffixes: B batch, S position and one more.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from byte_gpt import GPT, random_batch, standard_library_text
from claims_result import Result
from train_lm import cross_entropy, first_variables

RUN = "run on a CPU"

# ---------------------------------------------------------------------------
# Formats
# ---------------------------------------------------------------------------

FORMATS = {
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
}
# TF32 has the exponent of FP32 and the fraction of FP16. It exists only inside matmuls: operands
# are stored as FP32 (NVIDIA A100 white paper).
TF32_EXPONENT_BITS, TF32_FRACTION_BITS = 8, 10


def formats() -> Result:
    """Tabulates the formats from `jnp.finfo`, and casts a number beyond each maximum."""
    table = [[name, *format_row(dtype)] for name, dtype in FORMATS.items()]
    table.insert(1, ["tf32", *tf32_row()])
    columns = ["format", "bytes", "exponent, fraction bits", "smallest normal"]
    columns += ["smallest subnormal", "largest", "spacing at 1", "4 times the largest"]
    bf16, fp16 = jnp.finfo(jnp.bfloat16), jnp.finfo(jnp.float16)
    finding = (
        f"FP16 is {float(bf16.eps) / float(fp16.eps):g} times as fine as BF16 and ends at "
        f"{float(fp16.max):g}; BF16 has the range of FP32, to {float(bf16.max):.1e}."
    )
    return Result(finding, "types of ml_dtypes", columns, table)


def format_row(dtype: Any) -> list[str]:
    """Returns size, range and precision of a format that JAX can store."""
    info = jnp.finfo(dtype)
    largest = float(info.max)
    with np.errstate(over="ignore"):
        beyond = float(np.float64(4 * largest).astype(dtype))
    numbers = [float(info.smallest_normal), float(info.smallest_subnormal), largest]
    size, bits = f"{info.bits // 8}", f"{info.nexp}, {info.nmant}"
    return [size, bits, *map("{:.4g}".format, numbers), power_of_two(float(info.eps)), f"{beyond}"]


def tf32_row() -> list[str]:
    """Returns the same of TF32, from the number of its bits."""
    smallest = 2.0 ** (2 - 2 ** (TF32_EXPONENT_BITS - 1))
    spacing = 2.0**-TF32_FRACTION_BITS
    largest = (2 - spacing) * 2.0 ** (2 ** (TF32_EXPONENT_BITS - 1) - 1)
    numbers = [smallest, smallest * spacing, largest]
    bits = f"{TF32_EXPONENT_BITS}, {TF32_FRACTION_BITS}"
    return ["4", bits, *map("{:.4g}".format, numbers), power_of_two(spacing), "not stored"]


def power_of_two(value: float) -> str:
    """Returns "2^-10" for 0.0009765625, and other numbers as they are."""
    fraction, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{value:g}"


# ---------------------------------------------------------------------------
# Gradients of a byte-level GPT on real text
# ---------------------------------------------------------------------------

SIZE = dict(layers=3, width=128, heads=4, max_length=64)
BATCH, STEPS = 16, 200
# With a mean loss, 2^k times more tokens make the gradient of each output 2^k times smaller. A
# scale of 2^-8 shows that for batches of 262,144 tokens.
SCALES = (2.0**-8, 1.0, 2.0**4, 2.0**8, 2.0**12, 2.0**16, 2.0**20, 2.0**24)


def tokens(size: dict[str, int], step: int) -> np.ndarray:
    """Returns the batch of a step."""
    return random_batch(standard_library_text().train, BATCH, size["max_length"], 0, step)


def loss_of(recipe: str, size: dict[str, int]) -> Callable[..., jax.Array]:
    """Returns the loss of (variables, tokens_BS) of the GPT under a recipe."""
    model = jaxmp.load_recipe(recipe).wrap(GPT(**size))
    return lambda variables, tokens_BS: cross_entropy(
        model.apply(variables, tokens_BS[:, :-1]), tokens_BS
    )


@functools.cache
def trained(steps: int, **size: int) -> Any:
    """Returns the variables of the GPT after FP32 training, with Adam."""
    variables = first_variables(GPT(**size), 0)
    tx = optax.adam(3e-3)
    loss_fn = loss_of("fp32", size)

    @jax.jit
    def train_step(variables: Any, opt_state: Any, tokens_BS: jax.Array) -> Any:
        grads = jax.grad(loss_fn)(variables, tokens_BS)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return optax.apply_updates(variables, updates), opt_state

    opt_state = tx.init(variables)
    for step in range(steps):
        variables, opt_state = train_step(variables, opt_state, tokens(size, step))
    return variables


@functools.cache
def gradient_function(recipe: str, **size: int) -> Callable[..., Any]:
    """Returns the compiled gradients of (loss scale or None, variables, tokens_BS)."""
    loss_fn = loss_of(recipe, size)
    return jax.jit(lambda scale, *args: jaxmp.grad(loss_fn, loss_scale=scale)(*args))


def gradients(recipe: str, scale: float | None, variables: Any, size: dict[str, int]) -> np.ndarray:
    """Returns all parameter gradients as one FP32 vector, computed with a static loss scale."""
    loss_scale = None if scale is None else jaxmp.StaticLossScale(scale)
    return flat(gradient_function(recipe, **size)(loss_scale, variables, tokens(size, 0)))


def flat(tree: Any) -> np.ndarray:
    """Returns all elements of a tree as one FP32 vector."""
    return np.concatenate(
        [np.ravel(np.asarray(leaf, np.float32)) for leaf in jax.tree.leaves(tree)]
    )


def power_of_two_scale(size: dict[str, int] = SIZE) -> Result:
    """Compares the bits of scaled and unscaled gradients with those without a scale."""
    variables = first_variables(GPT(**size), 0)
    # FP16 gradients underflow without a scale. The reference is a scale at which few do.
    references = {"fp32": None, "bf16": None, "fp16": 2.0**10}
    scales = {"fp32": (2.0**-8, 2.0**16, 1000.0), "bf16": (2.0**-8, 2.0**16, 1000.0)}
    scales["fp16"] = (2.0**11, 2.0**12, 1000.0)
    table, exact = [], []
    for recipe, reference in references.items():
        expected = gradients(recipe, reference, variables, size)
        for scale in scales[recipe]:
            actual = gradients(recipe, scale, variables, size)
            changed = np.mean(actual.view(np.uint32) != expected.view(np.uint32))
            if recipe != "fp16" and scale != 1000.0:
                exact.append(changed)
            versus = "no scale" if reference is None else power_of_two(reference)
            angle = f"{degrees_between(actual, expected):.3f}"
            table.append([recipe, power_of_two(scale), versus, f"{changed:.2%}", angle])
    columns = ["recipe", "scale", "compared with", "elements with other bits", "angle in degrees"]
    finding = (
        f"{max(exact):.2%} of the elements change under the powers of two in FP32 and BF16."
        if max(exact) > 0
        else "Under powers of two, every gradient of the FP32 and BF16 recipes has the same bits "
        "as without a scale. FP16 gradients differ where they are subnormal at one of the scales."
    )
    return Result(finding, RUN, columns, table)


def degrees_between(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the angle between two vectors, accurate for small angles."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    x, y = x / np.linalg.norm(x), y / np.linalg.norm(y)
    return float(np.degrees(2 * np.arctan2(np.linalg.norm(x - y), np.linalg.norm(x + y))))


# ---------------------------------------------------------------------------
# Underflow
# ---------------------------------------------------------------------------


def fp16_underflow(size: dict[str, int] = SIZE, steps: int = STEPS) -> Result:
    """Counts the gradients that FP32 does not round to zero, and FP16 does."""
    table, without = [], {}
    for progress in (0, steps):
        variables = trained(progress, **size)
        params = flat(jax.jit(jax.grad(loss_of("fp32", size)))(variables, tokens(size, 0)))
        outputs = flat(output_gradients(variables, size))
        for scale in SCALES:
            actual = gradients("fp16", scale, variables, size)
            zero = np.mean(actual[params != 0] == 0)
            infinite = np.mean(~np.isfinite(actual))
            shares = [*shares_of(outputs, scale), zero, infinite]
            without[progress, scale] = shares
            table.append(
                [f"{progress}", power_of_two(scale), *(f"{share:.2%}" for share in shares)]
            )
    columns = ["steps", "scale", "outputs: to zero", "outputs: subnormal", "outputs: overflow"]
    columns += ["parameters: to zero", "parameters: not finite"]
    (zero, subnormal, *_), (large, *_) = (without[steps, scale] for scale in (1.0, min(SCALES)))
    finding = (
        f"After {steps} steps without a scale, {zero:.0%} of the gradients of module outputs "
        f"become zero in FP16 and {subnormal:.0%} are subnormal, with a batch of "
        f"{BATCH * size['max_length']:,} tokens; with {1 / min(SCALES):g} times more tokens, "
        f"{large:.0%} would become zero. A scale of 2^16 reduces the shares to "
        f"{without[steps, 2.0**16][0]:.2%} and {without[steps, 2.0**16][1]:.0%}."
    )
    return Result(finding, RUN, columns, table)


def shares_of(values: np.ndarray, scale: float) -> tuple[float, float, float]:
    """Returns the shares of nonzero values that become zero, subnormal and infinite in FP16."""
    values = values[values != 0] * np.float32(scale)
    with np.errstate(over="ignore"):
        cast = np.abs(values.astype(np.float16))
    subnormal = (cast > 0) & (cast < np.finfo(np.float16).smallest_normal)
    return float(np.mean(cast == 0)), float(np.mean(subnormal)), float(np.mean(np.isinf(cast)))


def output_gradients(variables: Any, size: dict[str, int]) -> dict[str, jax.Array]:
    """Returns the gradient of the loss by the output of each module, in FP32."""
    batch, loss_fn = tokens(size, 0), loss_of("fp32", size)

    def loss_with(offsets: dict[str, jax.Array], record: dict[str, Any]) -> jax.Array:
        """Returns the loss with an offset added to every output, and records the outputs."""

        def add(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
            output, path = next_fun(*args, **kwargs), "/".join(context.module.path)
            if context.method_name != "__call__" or not path:
                return output
            record[path] = jax.ShapeDtypeStruct(output.shape, output.dtype)
            return output + offsets[path] if path in offsets else output

        with nn.intercept_methods(add):
            return loss_fn(variables, batch)

    shapes: dict[str, Any] = {}
    jax.eval_shape(lambda: loss_with({}, shapes))
    zeros = {path: jnp.zeros(shape.shape, shape.dtype) for path, shape in shapes.items()}
    return jax.jit(jax.grad(lambda offsets: loss_with(offsets, {})))(zeros)


# ---------------------------------------------------------------------------
# Small updates
# ---------------------------------------------------------------------------

UPDATE, UPDATES = 1e-4, 1000


def master_weights() -> Result:
    """Adds small numbers to a parameter of 1, under every way to store it."""
    bf16, fp16 = (f"p={name},c={name},o=f32" for name in ("bf16", "f16"))
    ways = {
        "bf16, no masters": ("none", bf16, False),
        "bf16, no masters, stochastic rounding": ("none", bf16, True),
        "bf16, FP32 masters": ("fp32", bf16, False),
        "bf16, packed masters": ("packed", bf16, False),
        "fp16, no masters": ("none", fp16, False),
        "fp16, FP32 masters": ("fp32", fp16, False),
        "fp32 parameters": ("auto", "bf16", False),
    }
    expected = 1 + UPDATE * UPDATES
    ends = {name: sum_of_updates(*way) for name, way in ways.items()}
    table = [
        [name, f"{end:.6f}", f"{master:.6f}", f"{master - expected:+.6f}"]
        for name, (end, master) in ends.items()
    ]
    stalled = [name for name, (_, master) in ends.items() if master == 1.0]
    finding = (
        f"After {UPDATES:,} updates of {UPDATE:g}, the parameter is still 1 with: "
        f"{'; '.join(stalled)}. With FP32 masters it is "
        f"{ends['bf16, FP32 masters'][1]:.6f}."
    )
    columns = ["storage", "parameter", "FP32 value", f"FP32 value - {expected:g}"]
    return Result(finding, RUN, columns, table)


def sum_of_updates(master: str, policy: str, stochastic: bool) -> tuple[float, float]:
    """Returns the mean stored parameter, and the mean of its FP32 value, after all updates.

    There are 1,024 equal parameters, whose mean stochastic rounding preserves.
    """
    tx = (
        jaxmp.load_recipe(policy)
        .replace(master=master, loss_scale=jaxmp.NoLossScale())
        .optimizer(optax.sgd(UPDATE))
    )
    tx = jaxmp.optim.stochastic_rounding(tx) if stochastic else tx
    params = {"w": jnp.ones(1024, jnp.float32)}
    state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
    grads = {"w": -jnp.ones(1024, jnp.float32)}
    body = lambda _, state: state.apply_gradients(grads=grads)
    state = jax.jit(lambda state: jax.lax.fori_loop(0, UPDATES, body, state))(state)
    stored = np.asarray(state.params["w"], np.float64).mean()
    has_master = master in ("fp32", "packed")
    value = jaxmp.get_master_params(state)["w"] if has_master else state.params["w"]
    return float(stored), float(np.asarray(value, np.float64).mean())


# ---------------------------------------------------------------------------
# Precision of FP32 matmuls
# ---------------------------------------------------------------------------


def fp32_baseline() -> Result:
    """Reads the precision that programs request for a matmul of FP32 operands."""
    layer, x = nn.Dense(128), jax.ShapeDtypeStruct((128, 128), jnp.float32)
    models = {"Flax without a recipe": layer}
    models |= {f"`{name}`": jaxmp.load_recipe(name).wrap(layer) for name in ("tf32", "fp32")}
    table = []
    for name, model in models.items():
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        table.append([name, requested_precision(model.apply, variables, x)])
    names = " and ".join(f"{precision} ({name})" for name, precision in table[:2])
    finding = f"{names} permit TF32 on Tensor Cores; `fp32` requests {table[2][1]}, which does not."
    evidence = "asserted on the StableHLO program"
    return Result(finding, evidence, ["program", "precision of the matmul"], table)


def requested_precision(fn: Callable[..., Any], *args: Any) -> str:
    """Returns the precision attribute of the only matmul of a program."""
    (matmul,) = re.findall(r"stablehlo\.dot_general.*", jax.jit(fn).lower(*args).as_text())
    algorithm = re.search(r"algorithm = <(.*?)>", matmul)
    precision = re.search(r"precision = \[(\w+), \w+\]", matmul)
    return algorithm[1] if algorithm else precision[1] if precision else "DEFAULT"
