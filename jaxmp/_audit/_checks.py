"""The checks of findings: what each means, how to mend it, and whether it is an error."""

from __future__ import annotations

from typing import NamedTuple

ERROR, WARNING = "error", "warning"


class Check(NamedTuple):
    """One check of finding."""

    # The gravest severity that a finding of this check has.
    severity: str
    explanation: str
    fix: str
    # "no": found in the traced program; "yes": only with `target=`; else when it is needed.
    target: str = "no"


CHECKS: dict[str, Check] = {
    "fp32_matmul": Check(
        ERROR,
        "a matmul or convolution reads FP32 where the policies say 16 bits; without policies:"
        " reads FP32 that was cast up from 16 bits",
        "jaxmp.load_recipe('bf16').wrap(model), or jaxmp.autocast(fn, 'bf16') for functions and"
        " for layers that cast their operands themselves",
    ),
    "off_policy_matmul": Check(
        ERROR,
        "a matmul or convolution reads another 16-bit dtype than the policies say, or 16 bits"
        " where they say FP32",
        "remove casts by hand, and wrap the model or use jaxmp.autocast",
    ),
    "mixed_operands": Check(
        ERROR,
        "the operands of a matmul or convolution have two dtypes, so that it runs in the wider one",
        "y.astype(x.dtype) on the wider operand",
    ),
    "implicit_promotion": Check(
        ERROR,
        "a 16-bit array meets FP32 (or float64) in an operation without a cast, and the wide"
        " result is multiplied in FP32, promotes other 16-bit arrays, or is returned; a warning"
        " where a residual stream was FP32 from its start. What is cast back before that, as in"
        " norms, FP32 softmax and losses, is no finding",
        "cast the wide operand, or use a Python number in its place",
    ),
    "softmax_16bit": Check(
        ERROR,
        "a softmax in 16 bits",
        "jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)",
    ),
    "loss_16bit": Check(
        ERROR,
        "a log-softmax, a log-sum-exp or a scalar result in 16 bits",
        "logits = logits.astype(jnp.float32) before the loss",
    ),
    "norm_16bit": Check(
        ERROR,
        "the statistics of a normalisation in 16 bits",
        "x = x.astype(jnp.float32) before mean and variance; cast the result",
    ),
    "reduction_16bit": Check(
        ERROR,
        "a sum, product or running sum in 16 bits; the sums of a backward pass, which JAX"
        " itself makes for what was broadcast or gathered forwards, are warnings",
        "sum in FP32, and cast the result",
    ),
    "exp_16bit": Check(
        ERROR,
        "an exponential, logarithm, power or trigonometric function in 16 bits in the forward"
        " pass; small whole powers, and exponentials of at most 0 as in ELU and softplus, are"
        " warnings",
        "x = x.astype(jnp.float32) before it, or jaxmp.autocast",
    ),
    "rounded_input": Check(
        ERROR,
        "an FP32 argument is rounded to 16 bits before a sine or cosine is taken of it: a time"
        " step of 257 becomes 256 in bfloat16",
        "keep the argument in FP32, or compute the module in FP32: keep_inputs, compute_dtype",
    ),
    "misaligned_matmul": Check(
        ERROR,
        "a size of a matmul is no multiple of 16 bytes (8 numbers in 16 bits, 4 in FP32, 16 in"
        " FP8); a warning where padding costs more than a quarter, or the matmul is under 1% of all"
        " FLOPs",
        "round the width up",
    ),
    "not_fp8": Check(
        WARNING,
        "a linear layer multiplies in 16 bits where the policies say FP8: its sizes are no"
        " multiples of 16, it is too narrow to gain, or FP8 does not reach it",
        "min_width = 0 under [fp8] takes narrow layers too",
    ),
    "unfused_attention": Check(
        WARNING,
        "attention that is no fused kernel: two matmuls and a softmax, or jaxmp's own where it"
        " says what keeps cuDNN's kernel from it",
        "call the fused kernel",
    ),
    "dense_mask": Check(
        WARNING,
        "attention reads a mask as an array although the mask is causal, a window or full for every"
        " input, so that no kernel skips what it hides",
        "recipe.replace(mask='causal')",
    ),
    "optimizer_state_16bit": Check(
        ERROR,
        "the optimizer's moments or accumulators are stored in 16 bits: those of optax states,"
        " and arrays that a step averages gradients in",
        "leave out mu_dtype and its like, or make the optimizer with recipe.optimizer(tx),"
        " which keeps FP32 masters",
    ),
    "unused_loss_scale": Check(
        ERROR,
        "a dynamic loss scale is among the arguments, and no gradient was computed with it",
        "take gradients with state.value_and_grad(loss_fn)",
    ),
    "missing_loss_scale": Check(
        ERROR,
        "a training step multiplies in float16 in its backward pass, and no loss scale reaches it",
        "tx = jaxmp.load_recipe('fp16').optimizer(tx), and loss, grads ="
        " state.value_and_grad(loss_fn)(batch)",
    ),
    "missing_master": Check(
        ERROR,
        "a training step adds its updates to parameters in 16 bits, and no FP32 master keeps"
        " what is rounded away",
        "tx = jaxmp.load_recipe('bf16_params').optimizer(tx)",
    ),
    "accumulator_16bit": Check(
        ERROR,
        "gradients are accumulated in 16 bits, over microbatches or steps, or parameters averaged",
        "total = jnp.zeros(p.shape, jnp.float32); total + grads.astype(jnp.float32)",
    ),
    "fp32_gemm": Check(
        ERROR,
        "the GPU multiplies in FP32 or TF32 where the policies say 16 bits, although the traced"
        " program does not",
        "keep the operands in 16 bits up to the product",
        "yes",
    ),
    "fp8_fallback": Check(
        ERROR,
        "operands pass through FP8 and are multiplied in a wider dtype",
        "hand FP8 operands to jax.lax.dot_general, on a card that multiplies FP8 (H100 or later)",
        "yes",
    ),
    "fp32_all_gather": Check(
        ERROR,
        "devices gather an array in FP32 where the policies say 16 bits",
        "cast the shard, and gather the result",
        "yes",
    ),
    "all_reduce_16bit": Check(
        ERROR,
        "gradients of parameters are summed over devices in 16 bits where the recipe says FP32;"
        " without policies, and for activations, a warning",
        "jax.lax.pmean(grads.astype(jnp.float32), axis_name)",
        "under `jit` with shardings; not for `shard_map` and `pmap`",
    ),
    "undonated_state": Check(
        WARNING,
        "no result takes over the memory of an argument, so that the state exists twice",
        "jax.jit(train_step, donate_argnums=0)",
        "yes",
    ),
    "unused_rule": Check(
        ERROR,
        "a required rule decided for no module that the program names",
        "mend its path, or let it match nothing: required=False",
    ),
}
