"""Findings of the audit in code of other projects that were reviewed by hand and are true.

An entry names the source lines by a part of their text, so that it holds for other versions of a
file, too. True means: the program does this at that line, and it costs accuracy or time that the
change saves. Some are mistakes, others choices of the author that have a cheaper equivalent.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Reviewed(NamedTuple):
    """A true finding.

    title: what happens, in a few words.
    checks: the checks that find it, such as "softmax_16bit".
    lines: `(end of the file's path, part of the line's text)`; "" is any line of the file.
    """

    title: str
    checks: tuple[str, ...]
    lines: tuple[tuple[str, str], ...]

    def covers(self, finding: dict[str, Any]) -> bool:
        """Returns True if a finding, as `false_positives.by_line` gives it, is this one."""
        return finding["check"] in self.checks and any(
            finding["file"].endswith(file) and text in finding["text"] for file, text in self.lines
        )


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

REVIEWED = (
    Reviewed(
        "The output projection multiplies in TF32, and its result is rounded to float16",
        ("fp32_matmul", "fp32_gemm"),
        (("examples/wmt/models.py", "output_embed.attend("),),
    ),
    Reviewed(
        "The softmax of attention is computed in 16 bits",
        ("softmax_16bit",),
        (
            ("examples/lm1b/models.py", "nn.MultiHeadDotProductAttention("),
            ("examples/wmt/models.py", "nn.MultiHeadDotProductAttention("),
            ("examples/nlp_seq/models.py", "nn.MultiHeadDotProductAttention("),
        ),
    ),
    Reviewed(
        "The softmax of attention is computed in bfloat16",
        ("softmax_16bit",),
        (("examples/gemma/modules.py", "probs = jax.nn.softmax(padded_logits"),),
    ),
    Reviewed(
        "Attention multiplies in FP32",
        ("fp32_matmul", "mixed_operands"),
        _ATTENTION,
    ),
    Reviewed(
        "Linear layers multiply in FP32",
        ("fp32_matmul",),
        (("gpt2/modeling_flax_gpt2.py", "y = lax.dot_general(inputs, kernel"),),
    ),
    Reviewed(
        "The softmax of attention is computed in bfloat16",
        ("softmax_16bit",),
        _ATTENTION,
    ),
    Reviewed(
        "The class token widens the activations",
        ("implicit_promotion",),
        (("vit/modeling_flax_vit.py", "jnp.concatenate((cls_tokens, embeddings)"),),
    ),
    Reviewed(
        "The norm of a convolution's kernel is taken in bfloat16",
        ("norm_16bit",),
        (("wav2vec2/modeling_flax_wav2vec2.py", "jnp.linalg.norm(self.weight_v"),),
    ),
    Reviewed(
        "255 frames",
        ("misaligned_matmul",),
        tuple(pair for pair in _ATTENTION if "wav2vec2" in pair[0]),
    ),
    Reviewed(
        "Sums and exponentials of the state decay are taken in bfloat16",
        ("reduction_16bit", "exp_16bit"),
        (("mamba2_jax/modeling.py", ""),),
    ),
    Reviewed(
        "An input projection of 148 columns",
        ("misaligned_matmul",),
        (("mamba2_jax/modeling.py", "self.in_proj(hidden_states)"),),
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
        ),
    ),
    Reviewed(
        "The last layer multiplies in FP32",
        ("fp32_matmul",),
        (("examples/nlp_seq/models.py", "logits = nn.Dense("),),
    ),
    Reviewed(
        "Random samples are drawn from bfloat16 logits",
        ("exp_16bit",),
        (("examples/seq2seq/models.py", "jax.random.categorical("),),
    ),
    Reviewed(
        "The softmax of attention is computed in bfloat16",
        ("softmax_16bit",),
        (("examples/sst2/models.py", "nn.softmax(scores"),),
    ),
    Reviewed(
        "Deviations of a latent distribution are taken in bfloat16",
        ("exp_16bit",),
        (
            ("examples/vae/models.py", "jnp.exp(0.5 * logvar)"),
            ("examples/nnx_toy_examples/05_vae.py", "jnp.exp(self.linear_std(x))"),
            ("examples/nnx_toy_examples/05_vae.py", "jnp.log(std**2)"),
        ),
    ),
    Reviewed(
        "A hidden layer of 500 columns",
        ("misaligned_matmul",),
        (
            ("examples/vae/models.py", "nn.Dense(500"),
            ("examples/vae/models.py", "nn.Dense(784, name='fc2')"),
        ),
    ),
)
