"""Findings of the audit in code of other projects that were reviewed by hand and are true.

An entry names the source lines by a part of their text, so that it holds for other versions of a
file, too. True means: the program does this at that line, and it costs accuracy or time that the
change saves. Some are mistakes, others choices of the author that have a cheaper equivalent; the
text says so where the source shows it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Reviewed(NamedTuple):
    """A true finding.

    title: what happens, in a few words.
    checks: the checks that find it, such as "softmax_16bit".
    lines: `(end of the file's path, part of the line's text)`; "" is any line of the file.
    why: what the source shows.
    cost: of leaving it.
    change: what we would change.
    """

    title: str
    checks: tuple[str, ...]
    lines: tuple[tuple[str, str], ...]
    why: str
    cost: str
    change: str

    def covers(self, finding: dict[str, Any]) -> bool:
        """Returns True if a finding, as `field_report.by_line` gives it, is this one."""
        return finding["check"] in self.checks and any(
            finding["file"].endswith(file) and text in finding["text"] for file, text in self.lines
        )


_SOFTMAX_COST = (
    "Attention weights and their sums have 8 bits in bfloat16, 11 in float16. In FP32 the softmax "
    "is elementwise work inside of a fusion, so 16 bits save little time."
)

# ---------------------------------------------------------------------------
# Training steps
# ---------------------------------------------------------------------------

STEPS = (
    Reviewed(
        "The output projection multiplies in TF32",
        ("fp32_matmul", "fp32_gemm"),
        (("nanodo/model.py", "self.embed.attend("),),
        "The last activations are cast to FP32 on purpose and the embedding has no `dtype`, so the "
        "product with the table and both of its gradients have FP32 operands",
        "The share of FLOPs in TF32 in the table. Tensor Cores of an H200 multiply TF32 at half "
        "the rate of bfloat16 (NVIDIA's data sheet), and the operands have twice the bytes.",
        "Multiply in bfloat16 and keep FP32 logits: `jnp.einsum('bld,vd->blv', y, "
        "self.embed.embedding.astype(cfg.dtype), preferred_element_type=jnp.float32)`.",
    ),
    Reviewed(
        "The output projection multiplies in TF32, and its result is rounded to float16",
        ("fp32_matmul", "fp32_gemm"),
        (("examples/wmt/models.py", "output_embed.attend("),),
        "The decoder casts its result to FP32 for the product with the shared embedding, and "
        "`Transformer.decode` then returns `logits.astype(self.config.dtype)`: the precision that "
        "the FP32 product paid for is rounded away before the loss",
        "The share of FLOPs in TF32 in the table, without FP32 logits in return.",
        "Return the FP32 logits from `decode`, and multiply in 16 bits with "
        "`preferred_element_type=jnp.float32`.",
    ),
    Reviewed(
        "The loss is computed in 16 bits",
        ("loss_16bit", "implicit_promotion"),
        (
            ("examples/lm1b/train.py", "nn.log_softmax(logits)"),
            ("examples/wmt/train.py", "nn.log_softmax(logits)"),
            ("examples/gemma/train.py", "nnx.log_softmax(logits)"),
        ),
        "The model returns logits in its compute dtype, and the cross entropy takes "
        "`log_softmax` over the whole vocabulary in it. The one-hot targets are FP32, so the loss "
        "is FP32 only after the rounding",
        "A log-probability between 2 and 4 is rounded to a multiple of 0.016 in bfloat16 (0.002 in "
        "float16), and so are the sums over the vocabulary of the backward pass.",
        "`logits = logits.astype(jnp.float32)` at the start of `compute_weighted_cross_entropy`.",
    ),
    Reviewed(
        "The softmax of attention is computed in 16 bits",
        ("softmax_16bit",),
        (
            ("examples/lm1b/models.py", "nn.MultiHeadDotProductAttention("),
            ("examples/wmt/models.py", "nn.MultiHeadDotProductAttention("),
            ("examples/nlp_seq/models.py", "nn.MultiHeadDotProductAttention("),
            ("big_vision/models/vit.py", "nn.MultiHeadDotProductAttention("),
        ),
        "`nn.MultiHeadDotProductAttention(dtype=...)` takes the softmax in that dtype, too, unless "
        "it is told otherwise",
        _SOFTMAX_COST,
        "`attention_fn=jaxmp.attention_fn()` in the call.",
    ),
    Reviewed(
        "The softmax of attention is computed in bfloat16",
        ("softmax_16bit",),
        (("examples/gemma/modules.py", "probs = jax.nn.softmax(padded_logits"),),
        "The line casts the weights to `key_proj.dtype` after the softmax, as if this had been in "
        "FP32; the logits come from an einsum of bfloat16 operands and are bfloat16",
        _SOFTMAX_COST,
        "`jax.nn.softmax(padded_logits.astype(jnp.float32), axis=-1).astype(key_proj.dtype)`.",
    ),
    Reviewed(
        "Parameters and Adam's moments are bfloat16, without FP32 masters",
        ("missing_master", "optimizer_state_16bit"),
        (("tunix/sft/peft_trainer.py", "optimizer.update(model, "),),
        "With a model in bfloat16, as `dtype=jnp.bfloat16` loads it, `nnx.Optimizer` updates the "
        "bfloat16 values directly, and a comment of the trainer says that moments follow "
        "their dtype. Gradient accumulation is in FP32, with a comment on rounding; the update is "
        "not",
        "A step that is smaller than `2**-9` of a parameter is lost: at a learning rate of 1e-5 "
        "that is every parameter above 0.005 or so. The second moment with b2 = 0.999 changes by "
        "at most 0.1 % in a step where it decays, less than bfloat16 resolves.",
        "Keep FP32 masters in the optimizer state (`jaxmp.load_recipe('bf16_params')"
        ".optimizer(tx)`), which takes 4 bytes for each parameter and lets moments be FP32; or "
        "round stochastically.",
    ),
    Reviewed(
        "Blockwise attention keeps its running sums in bfloat16",
        ("softmax_16bit", "reduction_16bit", "exp_16bit"),
        (("levanter/models/flash_attention.py", ""),),
        "`o`, `sumexp_i`, `max_i`, `dQ`, `dK` and `dV` are made in `q.dtype`, and one block after "
        "another is added to them in the loops. FlashAttention (arXiv:2205.14135) keeps these in "
        "FP32",
        "Attention weights and their sums have 8 bits, and so has the log-sum-exp that the "
        "backward pass reads: for a value of 10 the recomputed weights are off by up to 3 %. The "
        "1,024 tokens here are a single block; with more, each block adds a rounding of `2**-9` to "
        "the result and to the gradients.",
        "Make the accumulators with `jnp.float32` and cast `o`, `dQ`, `dK` and `dV` after the "
        "loops; or use `jax.nn.dot_product_attention(implementation='cudnn')` on a GPU.",
    ),
    Reviewed(
        "A product of the attention's backward pass has an FP32 operand",
        ("mixed_operands", "fp32_gemm"),
        (("levanter/models/flash_attention.py", ""),),
        "`L_i`, the log-sum-exp, is stored in FP32, so that `attn_ij - L_i` promotes `p_ij`; the "
        "gradient of the values multiplies it with `dO_i` in bfloat16",
        "This product and its share in the table run in TF32.",
        "`p_ij = p_ij.astype(dO_i.dtype)` before the product.",
    ),
    Reviewed(
        "Statistics of LayerNorm are rounded to bfloat16",
        ("norm_16bit",),
        (
            ("levanter/models/gpt2.py", "self.ln_1(x)"),
            ("levanter/models/gpt2.py", "self.ln_2(x)"),
            ("levanter/models/gpt2.py", "self.ln_f(x)"),
        ),
        "Haliax's `LayerNorm` takes mean and variance of a bfloat16 array, which come back in "
        "bfloat16, and `rsqrt` of the sum with `eps` in bfloat16; Flax takes all of these in FP32",
        "Mean and inverse deviation have 8 bits: each normalized row is scaled by a factor that "
        "is wrong by up to 0.4 %.",
        "In Haliax: `x = x.astype(jnp.float32)` at the start of `LayerNorm.__call__`; its cast "
        "back to `dtype` is there already.",
    ),
    Reviewed(
        "The vocabulary is not a multiple of 8",
        ("misaligned_matmul",),
        (("levanter/models/loss.py", "hax.dot(pred_embeddings, pred_lm_head"),),
        "The tokenizer has 50,257 entries, and `round_axis_for_partitioning` rounds up to the "
        "number of devices only",
        "Rows of logits and of the head begin at addresses that are not multiples of 16 bytes, so "
        "the three products with the vocabulary use slower kernels (NVIDIA, Matrix "
        "Multiplication Background User's Guide).",
        "Round the vocabulary up to a multiple of 64 or 128, here 50,304.",
    ),
    Reviewed(
        "The softmax of attention is computed in bfloat16",
        ("softmax_16bit",),
        (
            ("maxtext/layers/attention_op.py", "jnp.exp(logits - local_max)"),
            ("maxtext/layers/attention_op.py", "jnp.sum(local_exps_combined"),
        ),
        "With `attention=dot_product` the default `float32_logits: false` leaves the logits in "
        "bfloat16; `local_exps` and their sum are bfloat16, too",
        _SOFTMAX_COST,
        "`float32_logits: true` as the default of `base.yml`, or `attention=cudnn_flash_te` on a "
        "GPU, whose kernel takes the softmax in FP32.",
    ),
)

# ---------------------------------------------------------------------------
# Models of docs/compatibility.md
# ---------------------------------------------------------------------------

_HUGGING_FACE = (
    "bert/modeling_flax_bert.py",
    "gpt2/modeling_flax_gpt2.py",
    "llama/modeling_flax_llama.py",
    "vit/modeling_flax_vit.py",
    "whisper/modeling_flax_whisper.py",
    "wav2vec2/modeling_flax_wav2vec2.py",
)
_ATTENTION = (
    *((file, "attn_weights = dot_product_attention_weights(") for file in _HUGGING_FACE),
    *((file, 'jnp.einsum("...hqk,...khd->...qhd"') for file in _HUGGING_FACE),
)

_CLASSIFIERS = ("bert", "vit", "resnet")
_LANGUAGE_MODELS = ("gpt2", "llama", "whisper", "wav2vec2")

MODELS = (
    Reviewed(
        "Attention multiplies in FP32",
        ("fp32_matmul", "mixed_operands"),
        _ATTENTION,
        "`dot_product_attention_weights(..., dtype=self.dtype)` casts to a field of the layer that "
        "is FP32 unless the model is made with `dtype=jnp.bfloat16`; in Llama, "
        "`attention_softmax_in_fp32` casts queries and keys, not only the softmax",
        "The products of attention run in TF32.",
        "`dtype=jnp.bfloat16` for the model, or `jaxmp.autocast` around the loss.",
    ),
    Reviewed(
        "Linear layers multiply in FP32",
        ("fp32_matmul",),
        (("gpt2/modeling_flax_gpt2.py", "y = lax.dot_general(inputs, kernel"),),
        "`FlaxConv1D` casts its operands to its own `dtype`, which a recipe leaves alone",
        "All linear layers run in TF32.",
        "`dtype=jnp.bfloat16` for the model, or `jaxmp.autocast` around the loss.",
    ),
    Reviewed(
        "The softmax of attention is computed in bfloat16",
        ("softmax_16bit",),
        _ATTENTION,
        "Flax's function takes the softmax in its `dtype` argument",
        _SOFTMAX_COST,
        "`attention_fn=jaxmp.attention_fn()` in the call.",
    ),
    Reviewed(
        "The model returns its logits in bfloat16",
        ("rounded_output",),
        (
            *((f"{name}/modeling_flax_{name}.py", "self.classifier(") for name in _CLASSIFIERS),
            *((f"{name}/modeling_flax_{name}.py", "lm_head") for name in _LANGUAGE_MODELS),
            ("mamba2_jax/modeling.py", "logits = hidden_states @ self.backbone.embedder"),
        ),
        "The last layer has the `dtype` of the model (in Mamba-2, a matmul that a recipe does "
        "not reach), and the loss casts its rounded results to FP32",
        "Logits around 300 have steps of 2; those around 10 have steps of 1/16.",
        "Return the FP32 sums: a recipe does so for Flax layers, and `jaxmp.autocast` for matmuls.",
    ),
    Reviewed(
        "The class token widens the activations",
        ("implicit_promotion",),
        (("vit/modeling_flax_vit.py", "jnp.concatenate((cls_tokens, embeddings)"),),
        "`cls_token` is an FP32 parameter, and the patch embeddings beside it are bfloat16",
        "The residual stream of the whole encoder is FP32 and takes twice the bytes.",
        "`cls_tokens.astype(embeddings.dtype)`.",
    ),
    Reviewed(
        "The norm of a convolution's kernel is taken in bfloat16",
        ("norm_16bit",),
        (("wav2vec2/modeling_flax_wav2vec2.py", "jnp.linalg.norm(self.weight_v"),),
        "Weight normalization runs on the cast parameters",
        "The scale of each kernel has 8 bits.",
        "Take the norm of the FP32 parameter, and cast the normalized kernel.",
    ),
    Reviewed(
        "255 frames",
        ("misaligned_matmul",),
        tuple(pair for pair in _ATTENTION if "wav2vec2" in pair[0]),
        "The 2,048 samples of our input become 255 frames, the length of attention's rows",
        "Rows that begin at odd addresses.",
        "Pad the audio so that the number of frames is a multiple of 8.",
    ),
    Reviewed(
        "Sums and exponentials of the state decay are taken in bfloat16",
        ("reduction_16bit", "exp_16bit"),
        (("mamba2_jax/modeling.py", ""),),
        "`softplus`, `cumsum` and `exp` of the step sizes follow the dtype of the input",
        "Errors of the logarithmic decay are exponentiated: a sum of 30 is rounded to a multiple "
        "of 0.125, so that its exponential is off by up to 6 %.",
        "Cast `dt` and `A` to FP32 before `softplus`, and the result of the scan back.",
    ),
    Reviewed(
        "An input projection of 148 columns",
        ("misaligned_matmul",),
        (("mamba2_jax/modeling.py", "self.in_proj(hidden_states)"),),
        "The sizes of our small configuration add up to 148",
        "Padding of 2.7 %, or slower kernels.",
        "Choose sizes that add up to a multiple of 8.",
    ),
    Reviewed(
        "Sums over edges and degrees are taken in bfloat16",
        ("reduction_16bit", "exp_16bit", "norm_16bit"),
        (
            ("jraphx/nn/norm/batch_norm.py", "jnp.sqrt(var + self.eps)"),
            ("jraphx/nn/norm/layer_norm.py", "jnp.sqrt(var + self.eps)"),
            ("jraphx/nn/conv/gcn_conv.py", ""),
            ("jraphx/utils/scatter.py", ""),
            ("jraphx/utils/scatter_softmax.py", ""),
            ("jraph/_src/utils.py", "return jax.ops.segment_sum("),
        ),
        "The package's own layers compute in the dtype of their input",
        "The degree of a node with more than 256 edges is wrong, and statistics have 8 bits.",
        "Cast to FP32 before sums over edges and statistics, and the results back.",
    ),
    Reviewed(
        "The last layer multiplies in FP32",
        ("fp32_matmul",),
        (("examples/nlp_seq/models.py", "logits = nn.Dense("),),
        "This layer alone has no `dtype`",
        "The products with the vocabulary run in TF32.",
        "`dtype=config.dtype` for the layer, and a cast of the logits to FP32.",
    ),
    Reviewed(
        "Random samples are drawn from bfloat16 logits",
        ("exp_16bit",),
        (("examples/seq2seq/models.py", "jax.random.categorical("),),
        "The noise that `jax.random.categorical` adds has the dtype of the logits",
        "Gumbel noise of 8 bits: rare tokens are drawn too often or never.",
        "`jax.random.categorical(key, logits.astype(jnp.float32))`.",
    ),
    Reviewed(
        "The softmax of attention is computed in bfloat16",
        ("softmax_16bit",),
        (("examples/sst2/models.py", "nn.softmax(scores"),),
        "The scores come from a bfloat16 layer",
        _SOFTMAX_COST,
        "`nn.softmax(scores.astype(jnp.float32), axis=-1)`.",
    ),
    Reviewed(
        "Deviations of a latent distribution are taken in bfloat16",
        ("exp_16bit",),
        (
            ("examples/vae/models.py", "jnp.exp(0.5 * logvar)"),
            ("examples/nnx_toy_examples/05_vae.py", "jnp.exp(self.linear_std(x))"),
            ("examples/nnx_toy_examples/05_vae.py", "jnp.log(std**2)"),
        ),
        "The layer before is bfloat16 under the recipe",
        "An exponential multiplies the rounding of its argument, and the KL loss takes a logarithm "
        "of the result.",
        "Cast the layer's result to FP32.",
    ),
    Reviewed(
        "A hidden layer of 500 columns",
        ("misaligned_matmul",),
        (
            ("examples/vae/models.py", "nn.Dense(500"),
            ("examples/vae/models.py", "nn.Dense(784, name='fc2')"),
        ),
        "500 is not a multiple of 8",
        "Slower kernels, or padding of 0.8 %.",
        "512 columns.",
    ),
)

REVIEWED = (*STEPS, *MODELS)
