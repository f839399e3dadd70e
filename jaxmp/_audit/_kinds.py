"""The kinds of findings: what each means, how to mend it, and whether it is a fault."""

from __future__ import annotations

from typing import NamedTuple

FAULT, NOTE = "fault", "note"


class Kind(NamedTuple):
    """One kind of finding."""

    # The gravest level that a finding of this kind has.
    level: str
    meaning: str
    fix: str


KINDS: dict[str, Kind] = {
    "fp32_matmul": Kind(
        FAULT,
        "a matmul or convolution reads FP32 where the policies say 16 bits; without policies: reads"
        " FP32 that was cast up from 16 bits",
        "let the module compute in the policy's dtype, or give it a rule of its own",
    ),
    "off_policy_matmul": Kind(
        FAULT,
        "a matmul or convolution reads another 16-bit dtype than the policies say, or 16 bits where"
        " they say FP32",
        "wrap the model, and remove casts by hand",
    ),
    "mixed_operands": Kind(
        FAULT,
        "the operands of a matmul or convolution have two dtypes, so that it runs in the wider one",
        "cast the wider operand",
    ),
    "silent_promotion": Kind(
        FAULT,
        "16 bits and FP32 meet in an operation that nobody told to cast, and all after it is FP32",
        "cast the FP32 operand, or use a Python number in its place",
    ),
    "half_softmax": Kind(FAULT, "a softmax in 16 bits", "take the softmax in FP32"),
    "half_loss": Kind(
        FAULT,
        "a log-softmax, a log-sum-exp or a scalar result in 16 bits",
        "cast the logits to FP32 before the loss",
    ),
    "half_norm": Kind(
        FAULT, "the statistics of a normalisation in 16 bits", "take the statistics in FP32"
    ),
    "half_reduction": Kind(
        FAULT,
        "a sum, product or running sum in 16 bits; the sums of a backward pass, which JAX itself"
        " makes for what was broadcast or gathered forwards, are notes",
        "add up in FP32, and cast the result",
    ),
    "half_exp": Kind(
        FAULT,
        "an exponential, logarithm, power or trigonometric function in 16 bits; small whole powers"
        " are notes",
        "take it in FP32, or under jaxmp.autocast",
    ),
    "rounded_input": Kind(
        FAULT,
        "an FP32 argument is rounded to 16 bits before a sine or cosine is taken of it: a time step"
        " of 257 becomes 256 in bfloat16",
        "keep the argument in FP32, or compute the module in FP32: keep_inputs, compute_dtype",
    ),
    "misaligned_matmul": Kind(
        FAULT,
        "a size of a matmul is no multiple of 16 bytes (8 numbers in 16 bits, 4 in FP32, 16 in"
        " FP8); a note where padding costs more than a quarter, or the matmul is under 1% of all"
        " FLOPs",
        "round the width up",
    ),
    "not_fp8": Kind(
        NOTE,
        "a linear layer multiplies in 16 bits where the policies say FP8: its sizes are no"
        " multiples of 16, it is too narrow to gain, or FP8 does not reach it",
        "min_width = 0 under [fp8] takes narrow layers too",
    ),
    "unfused_attention": Kind(
        NOTE,
        "attention that is no fused kernel: two matmuls and a softmax, or jaxmp's own where it says"
        " what keeps cuDNN's kernel from it",
        "call the fused kernel",
    ),
    "half_optimizer_state": Kind(
        FAULT,
        "the optimizer's moments or accumulators are stored in 16 bits",
        "leave out mu_dtype and its like, or make the optimizer with recipe.optimizer(tx), which"
        " keeps FP32 masters",
    ),
    "unused_loss_scale": Kind(
        FAULT,
        "a dynamic loss scale is among the arguments, and no gradient was computed with it",
        "take gradients with state.value_and_grad(loss_fn)",
    ),
    "fp32_gemm": Kind(
        FAULT,
        "the GPU multiplies in FP32 or TF32 where the policies say 16 bits, although the traced"
        " program does not",
        "keep the operands in 16 bits up to the product",
    ),
    "fp8_fallback": Kind(
        FAULT,
        "operands pass through FP8 and are multiplied in a wider dtype",
        "hand FP8 operands to jax.lax.dot_general, on a card that multiplies FP8 (H100 or later)",
    ),
    "fp32_all_gather": Kind(
        FAULT,
        "devices gather an array in FP32 where the policies say 16 bits",
        "cast the shard, and gather the result",
    ),
    "half_all_reduce": Kind(
        NOTE,
        "a sum over devices in 16 bits",
        "add up in FP32: jax.lax.psum(x.astype(jnp.float32), axis)",
    ),
    "undonated_state": Kind(
        NOTE,
        "no result takes over the memory of an argument, so that the state exists twice",
        "jax.jit(train_step, donate_argnums=0)",
    ),
    "unused_rule": Kind(
        FAULT,
        "a required rule decided for no module that the program names",
        "mend its path, or let it match nothing: required=False",
    ),
}
