"""Counts the memory traffic of an MLP in BF16 and in FP8, compiled for an H200.

    python benchmarks/fp8_program.py                        # prints the table
    python benchmarks/fp8_program.py --out fp8_program.json # also writes it
    python benchmarks/fp8_program.py --only bf16 current

The workload is the forward and backward pass, without an optimizer, of three residual blocks
`x + down(gelu(up(x)))` of widths 2048 and 8192 with 4,096 tokens, as Flax Linen modules under a
recipe. Nothing is run, and no GPU is required, but XLA's GPU compiler: pip install -e ".[aot]".
With `remat`, `nn.remat` saves the results of matmuls, and with `kernels` the quantized kernels too.
The last rows quantize in other ways, which move more bytes. The exit status is 1 if a row exceeds
its limit. Columns:

    MB         bytes that kernels other than matmuls read and write, without the effect of caches
    kernels    number of these kernels, without the branches in which only the first step of
               delayed scaling measures a tensor before it is scaled
    temporary  MB that the program allocates in addition to arguments and results, from XLA
    fp8        calls of cuBLAS with FP8 operands, of 18 matmuls
"""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxmp
from jaxmp import PolicyMap, fp8, functional
from jaxmp._core import _compat
from jaxmp._tools.audit._compile import compile_for
from jaxmp._tools.audit._hlo import Program
from jaxmp._tools.audit._hlo_kernels import accessed, kernels
from jaxmp._tools.audit._trace import trace
from jaxmp.fp8 import _dot_general, _operands, _overwritten
from result_file import parser_of, write_result

TOKENS, WIDTH, HIDDEN, BLOCKS = 4096, 2048, 8192, 3
MATMULS = 6 * BLOCKS


class Block(nn.Module):
    """Residual block of two linear layers without biases."""

    gelu: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """Returns an array of the shape of x, and nothing for each iteration of a loop."""
        hidden = nn.Dense(HIDDEN, use_bias=False, name="up")(x)
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(self.gelu(hidden)), None


class Mlp(nn.Module):
    """Residual blocks, each under `nn.remat` if there is a policy."""

    gelu: Any = functional.gelu
    policy: Any = None
    scanned: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of x."""
        block: Any = Block
        if self.policy is not None:
            block = nn.remat(Block, policy=self.policy, prevent_cse=not self.scanned)
        if self.scanned:
            axes, rngs = {"params": 0}, {"params": True}
            return nn.scan(block, axes, split_rngs=rngs, length=BLOCKS)(self.gelu)(x, None)[0]
        for index in range(BLOCKS):
            x, _ = block(self.gelu, name=f"block_{index}")(x)
        return x


# ---------------------------------------------------------------------------
# Variants
# ---------------------------------------------------------------------------


class Limits(NamedTuple):
    """Largest accepted MB, kernels and temporary memory relative to `bf16`."""

    megabytes: float
    kernels: int
    temporary: float


class Variant(NamedTuple):
    """A policy, the model, its limits, and a replacement of the function that quantizes."""

    policy: Any
    model: nn.Module = Mlp()
    limits: Limits | None = None
    quantize: Any = None


BF16 = "p=f32,c=bf16,o=bf16"
DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
SAVED, KERNELS = (fp8.checkpoint_policy(DOTS, kernels=kernels) for kernels in (False, True))


def fp8_policy(scaling: Any) -> PolicyMap:
    """Returns the policies that compute every linear layer in FP8."""
    return PolicyMap(f"{BF16},matmul=fp8", fp8=scaling)


def without_layout(*args: Any, **options: Any) -> Any:
    """Quantizes FP32 kernels without a constraint on the layout of their FP8 values."""
    with mock.patch.object(_compat, "row_major", lambda values: values):
        return _operands._quantize(*args, **options)


def behind_barrier(x: jax.Array, *args: Any, **options: Any) -> Any:
    """Quantizes tensors in 16 bits behind a barrier, so that XLA writes them first."""
    x = x if x.dtype == jnp.float32 else jax.lax.optimization_barrier(x)
    return _operands._quantize(x, *args, **options)


def in_front_of_barrier(*args: Any, **options: Any) -> Any:
    """Quantizes tensors in front of a barrier, so that XLA transposes FP8 values."""
    values, factor = _operands._quantize(*args, **options)
    return jax.lax.optimization_barrier(values), factor


CURRENT, DELAYED = fp8_policy(fp8.CurrentScaling()), fp8_policy(fp8.DelayedScaling())
VARIANTS = {
    "bf16": Variant(BF16, Mlp(nn.gelu)),
    "bf16, functional.gelu": Variant(BF16, limits=Limits(1820, 15, 0.8)),
    "current": Variant(CURRENT, limits=Limits(3150, 75, 0.7)),
    "delayed": Variant(DELAYED, limits=Limits(2950, 65, 0.7)),
    "delayed, calibrate=False": Variant(
        fp8_policy(fp8.DelayedScaling(calibrate=False)), limits=Limits(2950, 55, 0.7)
    ),
    "current, nn.gelu": Variant(CURRENT, Mlp(nn.gelu), Limits(3550, 75, 1.1)),
    "delayed, nn.gelu": Variant(DELAYED, Mlp(nn.gelu), Limits(3200, 65, 0.9)),
    "current, remat": Variant(CURRENT, Mlp(policy=SAVED), Limits(3800, 100, 0.7)),
    "current, remat, kernels": Variant(CURRENT, Mlp(policy=KERNELS), Limits(3400, 85, 0.7)),
    "current, loop, remat": Variant(CURRENT, Mlp(policy=SAVED, scanned=True)),
    "current, loop, remat, kernels": Variant(CURRENT, Mlp(policy=KERNELS, scanned=True)),
    "current, no layout": Variant(CURRENT, quantize=without_layout),
    "current, barrier in front": Variant(CURRENT, quantize=behind_barrier),
    "current, barrier behind": Variant(CURRENT, quantize=in_front_of_barrier),
    "current, nn.gelu, barrier in front": Variant(CURRENT, Mlp(nn.gelu), quantize=behind_barrier),
    "current, nn.gelu, barrier behind": Variant(
        CURRENT, Mlp(nn.gelu), quantize=in_front_of_barrier
    ),
}


# ---------------------------------------------------------------------------
# Counts
# ---------------------------------------------------------------------------


class Counts(NamedTuple):
    """The counts of one compiled program."""

    megabytes: float
    kernels: int
    temporary: float
    fp8: int
    other_matmuls: int


def count(variant: Variant) -> Counts:
    """Compiles a variant for the H200 and counts its kernels."""
    quantize = _operands.QUANTIZE
    if variant.quantize is not None:
        quantize = _operands.jitted_by_role(variant.quantize, "scaling", "dtype", "axes")
    with (
        _compat.context(target="gpu", capability=(9, 0)),
        mock.patch.object(_dot_general, "QUANTIZE", quantize),
    ):
        step, args = program(variant)
        traced = trace(step, args, {})
    compiled = compile_for("h200", traced)
    moved, matmuls = [], {True: 0, False: 0}
    parsed = Program(compiled.text)
    unused = set(_calibrations(parsed))
    for each in kernels(parsed):
        if each.computation.name in unused:
            continue
        target = each.instruction.attribute("custom_call_target")
        if "cublas" in target or "cudnn" in target:
            matmuls["$f8" in target] += each.times
            continue
        moved += [accessed(parsed, each)] * each.times
    return Counts(
        megabytes=round(sum(moved) / 1e6, 1),
        kernels=len(moved),
        temporary=round(compiled.memory.temp_size_in_bytes / 1e6, 1),
        fp8=matmuls[True],
        other_matmuls=matmuls[False],
    )


def _calibrations(program: Program) -> Iterator[str]:
    """Yields the branches that measure a tensor to scale it, which only the first step executes."""
    for each in program.steps():
        if each.instruction.opcode == "conditional":
            sizes = {
                name: sum(
                    shape.bytes
                    for instruction in program.computations[name].instructions.values()
                    for shape in instruction.shapes
                )
                for name in each.instruction.called
            }
            yield max(sizes, key=lambda name: sizes[name])


def program(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    """Returns the forward and backward pass of a variant, and its arguments."""
    model = jaxmp.load_recipe(variant.policy).wrap(variant.model)
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16)
    # `init` runs without policies, and a loop has one dtype for x.
    variables = jax.eval_shape(model.init, jax.random.key(0), x.update(dtype=jnp.float32))

    def step(variables: Any, x: jax.Array, gradient: jax.Array) -> Any:
        # As in jaxmp.value_and_grad, which also computes a loss.
        active = _overwritten.to_max_accumulated(_overwritten.begin_step(variables, False))
        y, backward = jax.vjp(model.apply, active, x)
        of_variables, of_x = backward(gradient)
        return y, _overwritten.finish_step(of_variables, variables), of_x

    return step, (variables, x, x)


def main() -> int:
    """Prints the table; with --out, also writes it as JSON."""
    options = parser_of(__doc__, VARIANTS).parse_args()
    print(f"{'':56}{'MB':>8}{'kernels':>9}{'temporary':>11}{'fp8':>5}")
    rows, failed = [], False
    for name in options.only:
        variant = VARIANTS[name]
        counts, limits = count(variant), variant.limits
        over = exceeded(counts, limits)
        failed |= bool(over)
        print(
            f"{name:56}{counts.megabytes:8,.0f}{counts.kernels:9}{counts.temporary:11,.0f}"
            f"{counts.fp8:5}",
            f"OVER: {', '.join(over)}" if over else "",
            flush=True,
        )
        row = {"variant": name, **counts._asdict()}
        rows.append({**row, "limits": limits and limits._asdict()})
    shape = {"tokens": TOKENS, "width": WIDTH, "hidden": HIDDEN, "blocks": BLOCKS}
    target = "NVIDIA H200 (compiled, nothing was run)"
    write_result(options.out, target=target, shape=shape, rows=rows)
    return 1 if failed else 0


# MB of temporary memory of the row `bf16`, to which the limits refer.
BF16_TEMPORARY = 369.1


def exceeded(counts: Counts, limits: Limits | None) -> list[str]:
    """Returns the counts that exceed the limits, and "matmuls" if one of them fell back."""
    if limits is None:
        return []
    largest = {
        "megabytes": limits.megabytes,
        "kernels": limits.kernels,
        "temporary": limits.temporary * BF16_TEMPORARY,
    }
    over = [name for name, limit in largest.items() if getattr(counts, name) > limit]
    fell_back = 0 < counts.fp8 < MATMULS or counts.fp8 + counts.other_matmuls != MATMULS
    return over + ["matmuls"] * fell_back


if __name__ == "__main__":
    raise SystemExit(main())
