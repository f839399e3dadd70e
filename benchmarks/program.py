"""Checks the programs of training steps, compiled for an H200, against limits.

    python benchmarks/program.py                        # prints the table; status 1 beyond a limit
    python benchmarks/program.py --out benchmarks/results/program_h200.json
    python benchmarks/program.py --only gpt llama       # some of the sections

Nothing is run, and no GPU is required, but XLA's GPU compiler: pip install -e ".[aot]". Sections:

    gpt, llama   the bf16 step of examples/gpt.py (124M) and of examples/llama.py (1B widths, 4
                 layers), with a loop over the layers and without: kernels and bytes over those of
                 the hand-written step with FP32 gradients, NNX over Linen, fused attention,
                 matmuls in bf16 only
    fp8          the same steps in FP8: matmuls in FP8, and bytes over bf16
    architectures
                 seven models of benchmarks/architectures.py over their hand-written forms (Llama in
                 NNX is in `llama`). The limits hold for the step as it is, or for the one whose
                 gradients of kernels and embeddings, and whose logits, are in 16 bits, as those of
                 the hand-written one; the bytes of FP32 gradients and logits are printed beside
    optimizer    bytes per parameter of AdamW in each layout, over the floor of the layout

Bytes are those that kernels read and write, without the effect of caches. Both models use one
table for tokens in and out. A separate table of input tokens costs more bytes than by hand, because
jaxmp sums its gradient in FP32 instead of bfloat16.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import jax

import architectures
import by_hand
import gpt
import jaxmp
import llama
import optimizer_bytes
from gpt_programs import Counts, count_step
from result_file import parser_of, write_result

LLAMA = dataclasses.replace(llama.SIZES["llama-3.2-1b"], layers=4, max_length=4096)
BF16 = {"bfloat16 x bfloat16"}
# Bytes and kernels over those of the hand-written step. The rotation of Llama takes two small
# kernels in each layer, for exact angles at large positions.
BYTES, KERNELS, LLAMA_KERNELS = 1.0, 1.02, 1.06
ROUNDED_BYTES, ROUNDED_KERNELS = 1.01, 1.03
LAST_LAYERS = ("lm_head", "classifier", "noise")
FUSED = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")


class Check(NamedTuple):
    """A figure and its limit: at most `limit`, or exactly `limit` if it is a text."""

    section: str
    program: str
    quantity: str
    value: float | str
    limit: float | str | None  # None: reported only

    @property
    def is_ok(self) -> bool:
        if self.limit is None:
            return True
        return self.value == self.limit if isinstance(self.limit, str) else self.value <= self.limit


def hand_counts(loss: Callable[..., jax.Array], make_step: Callable[..., Any]) -> Counts:
    """Counts the hand-written step with the arguments of an example's step."""
    _, state, tokens = make_step()
    init, step = by_hand.make_training(loss, gpt.make_optimizer())
    return count_step("bf16", "hand", step, jax.eval_shape(init, state.params["params"]), tokens)


# Section -> the example, the hand-written loss, and the limit of kernels.
EXAMPLES: dict[str, tuple[Any, Any, float]] = {
    "gpt": (gpt, by_hand.gpt_loss, KERNELS),
    "llama": (llama, by_hand.llama_loss, LLAMA_KERNELS),
}
UNROLLED = {"scanned": False, "unrolled": True}


def compare_steps(section: str, name: str, config: Any, batch: int) -> Iterator[Check]:
    """Yields the checks of the bf16 step of one example against the hand-written one."""
    module, loss, kernels = EXAMPLES[section]
    linen = count_step("bf16", "linen", *module.make_step("bf16", config, batch))
    nnx = count_step("bf16", "nnx", *module.make_nnx_step("bf16", config, batch))
    by_hand_loss = loss(config, linear=by_hand.linear_fp32)
    hand = hand_counts(by_hand_loss, lambda: module.make_step("bf16", config, batch))
    # Two kernels of a scalar each are the room of the smallest models.
    yield Check(section, name, "bytes / hand", round(linen.accessed / hand.accessed, 4), BYTES)
    yield Check(section, name, "kernels / hand", round(linen.kernels / hand.kernels, 4), kernels)
    temporary = round(linen.temporary / hand.temporary, 4)
    yield Check(section, name, "temporary memory / hand", temporary, None)
    yield Check(section, name, "bytes", linen.accessed, None)
    yield Check(section, name, "kernels", linen.kernels, None)
    pair = f"{nnx.kernels} kernels, {nnx.accessed} bytes"
    same = f"{linen.kernels} kernels, {linen.accessed} bytes"
    yield Check(section, name, "NNX", pair, same)
    attention = " ".join(f"{kernel} x{linen.attention.get(kernel, 0)}" for kernel in FUSED)
    layers = config.layers
    yield Check(section, name, "attention", attention, f"{FUSED[0]} x{layers} {FUSED[1]} x{layers}")
    yield Check(section, name, "matmuls", ", ".join(sorted(linen.matmuls)), ", ".join(BF16))


def check_gpt(model: gpt.GPT = gpt.SIZES["gpt2"], batch: int = 8) -> Iterator[Check]:
    """Yields the checks of GPT-2."""
    for name, unroll in UNROLLED.items():
        yield from compare_steps("gpt", name, model.clone(unroll=unroll), batch)


def check_llama(shape: llama.Shape = LLAMA, batch: int = 1) -> Iterator[Check]:
    """Yields the checks of Llama."""
    for name, unroll in UNROLLED.items():
        config = dataclasses.replace(shape, unroll=unroll)
        yield from compare_steps("llama", name, config, batch)


def check_fp8(shape: llama.Shape = LLAMA, batch: int = 1) -> Iterator[Check]:
    """Yields the figures of Llama under the FP8 recipes."""
    bf16 = count_step("bf16", "linen", *llama.make_step("bf16", shape, batch))
    delayed = jaxmp.load_recipe("fp8_delayed")
    without_branches = delayed.replace(fp8=jaxmp.fp8.DelayedScaling(calibrate=False))
    recipes = {
        "fp8": jaxmp.load_recipe("fp8"),
        "fp8_delayed": delayed,
        "fp8_delayed, calibrate=False": without_branches,
    }
    for recipe, settings in recipes.items():
        row = count_step(recipe, "linen", *llama.make_step(settings, shape, batch))
        in_fp8 = sum(flops for dtypes, flops in row.matmuls.items() if "float8" in dtypes)
        share = round(in_fp8 / sum(row.matmuls.values()), 3)
        yield Check("fp8", recipe, "FLOPs in FP8", share, None)
        dtypes = {dtype for pair in row.matmuls for dtype in pair.split(" x ")}
        wide = ", ".join(sorted(dtypes - {"bfloat16"} - {d for d in dtypes if "float8" in d}))
        yield Check("fp8", recipe, "matmuls in neither FP8 nor bf16", wide or "none", "none")
        yield Check("fp8", recipe, "bytes / bf16", round(row.accessed / bf16.accessed, 3), None)
        yield Check("fp8", recipe, "kernels / bf16", round(row.kernels / bf16.kernels, 3), None)


def check_architectures() -> Iterator[Check]:
    """Yields the checks of the models of `architectures`."""
    recipe = jaxmp.load_recipe("bf16")
    rounded = [jaxmp.Rule(f"**/{name}", "o=bf16", required=False) for name in LAST_LAYERS]
    policies = jaxmp.PolicyMap(recipe.policies.default, [*rounded, *recipe.policies.rules])
    low_gradients = recipe.replace(reduce_dtype="bfloat16")
    low = low_gradients.replace(policies=policies)
    for name, case in architectures.CASES.items():
        embeds = {"promote": architectures.NARROW} if hasattr(case.model, "promote") else {}
        counted = functools.partial(count_step, "bf16")
        full = counted("linen", *architectures.make_step(case, recipe))
        gradients = counted("linen", *architectures.make_step(case, low_gradients, **embeds))
        both = counted("linen", *architectures.make_step(case, low, **embeds))
        hand = counted("hand", *architectures.make_hand_step(case))
        against, reference = hand, "hand"
        if case.model is architectures.ResNet:
            # The two parts of the gradient of BatchNorm's input cancel, so they are added in FP32.
            wide = {"norm_input": architectures.FP32}
            against = counted("hand", *architectures.make_hand_step(case, **wide))
            reference = "hand with FP32 inputs of BatchNorm"
        check = functools.partial(Check, "architectures", name)
        # FP32 gradients of experts take fewer kernels than 16-bit ones, which XLA transposes.
        accessed = ratio(min(full.accessed, both.accessed), against.accessed)
        kernels = ratio(min(full.kernels, both.kernels), against.kernels)
        yield check(f"bytes / {reference}", accessed, ROUNDED_BYTES)
        yield check(f"kernels / {reference}", kernels, ROUNDED_KERNELS)
        yield check("bytes of FP32 gradients", full.accessed - gradients.accessed, None)
        yield check("bytes of FP32 logits", gradients.accessed - both.accessed, None)
        yield check("bytes", full.accessed, None)
        yield check("bytes of everything / hand", ratio(full.accessed, hand.accessed), None)
        yield check("kernels of everything / hand", ratio(full.kernels, hand.kernels), None)
        temporary = ratio(full.temporary, hand.temporary)
        yield check("temporary memory of everything / hand", temporary, None)


def ratio(value: int, other: int) -> float:
    """Returns a rounded ratio of counts."""
    return round(value / other, 4)


def check_optimizer() -> Iterator[Check]:
    """Yields bytes per parameter over the floor; a guard or a norm reads the gradients once."""
    for row in optimizer_bytes.measure():
        extra = row["gradient_bytes"] * (row["clip"] or row["skip"] == "auto")
        name = f"{row['storage']}, {row['gradients']} gradients"
        name += ", clipping" * row["clip"] + ", guard" * (row["skip"] == "auto")
        floor = row["floor"] + extra
        yield Check("optimizer", name, "bytes", row["bytes_per_parameter"], floor + 0.02)


SECTIONS: dict[str, Callable[[], Iterator[Check]]] = {
    "gpt": check_gpt,
    "llama": check_llama,
    "fp8": check_fp8,
    "architectures": check_architectures,
    "optimizer": check_optimizer,
}


def main() -> int:
    """Prints the checks, and returns 1 if a limit is exceeded."""
    options = parser_of(__doc__, SECTIONS).parse_args()
    checks: list[Check] = []
    for section in options.only:
        for check in SECTIONS[section]():
            checks.append(check)
            mark = "" if check.is_ok else "  BEYOND THE LIMIT"
            limit = "" if check.limit is None else f"  (limit {check.limit})"
            row = f"{check.section}, {check.program}: {check.quantity} {check.value}{limit}{mark}"
            print(row, flush=True)
    rows = [check._asdict() for check in checks]
    target = "NVIDIA H200 (compiled without one, nothing was run)"
    write_result(options.out, target=target, checks=rows)
    return 0 if all(check.is_ok for check in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
