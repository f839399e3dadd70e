"""Describes the settings of a recipe in sentences, as titled sections of labelled rows."""

from __future__ import annotations

from jaxmp._core._dtypes import is_16bit
from jaxmp._loss_scale import DynamicLossScale
from jaxmp._policies._op_table import CATEGORIES, OpTable
from jaxmp._policies._required import named_dtypes
from jaxmp._policies._resolve import PolicyMap, matmul_scaling
from jaxmp._policies._rules import Rule, rule_text
from jaxmp._recipe import Recipe
from jaxmp.cli._output import Rows

# (title, rows below it).
Sections = list[tuple[str, Rows]]

# ---------------------------------------------------------------------------
# Values of settings
# ---------------------------------------------------------------------------

_ATTENTION = {
    "auto": "the fused kernel of cuDNN, or of JAX on TPUs, if it supports the call, otherwise block"
    " by block, or with all logits at once if these are small; layers in FP32 use Flax's own"
    " attention",
    "cudnn": "the fused kernel of cuDNN, or an error",
    "splash": "JAX's splash attention for TPUs, or an error",
    "blockwise": "block by block; memory grows linearly with the sequence length",
    "xla": "two matmuls and a softmax; all logits are in memory at once",
}
_MASK = {
    "array": "array: attention layers use the mask that the model passes",
    "causal": "causal: declared; position t attends to keys 0 to t",
    "padding": "padding: declared; positions after the end of each sequence are masked",
    "causal+padding": "causal+padding: declared; position t attends to keys 0 to t of its sequence",
    "full": "full: declared; no position is masked",
}
_MATMUL = {
    "default": "JAX's default for FP32 operands, which is TF32 on NVIDIA Tensor Cores",
    "tf32": "FP32 operands are rounded to TF32 (10 mantissa bits) and accumulated in FP32",
    "highest": "FP32 operands keep all their bits",
    "fp8": "linear layers multiply in FP8 if their sizes allow it",
}
_REGATHER = {
    True: "gathered for the forward pass, and again for the backward pass",
    False: "gathered for the forward pass, and kept until the backward pass",
}
_SKIP = {
    "auto": "select for GPU and TPU, lax.cond for CPU",
    "select": "the new state is computed and then selected element by element",
    "cond": "the optimizer runs inside a lax.cond, only if the step is applied",
    "none": "no step is skipped: a non-finite gradient reaches the parameters",
}
_MASTER = {
    "fp32": "FP32 masters in the optimizer state, 4 more bytes each",
    "packed": "the 16 bits of FP32 that bfloat16 drops in the optimizer state, 2 more bytes each",
    "none": "no masters: updates smaller than half a step of the stored dtype are lost",
}
_ALWAYS_FP32 = [
    (
        "norm statistics",
        "means of squares cancel; Flax's norms compute statistics, scale and bias in FP32",
    ),
    ("batch statistics", "running averages stall with 8 mantissa bits: they are never cast"),
    (
        "attention softmax",
        "Flax's attention computes logits, mask and softmax in FP32: float16 logits overflow above"
        " 65504",
    ),
    (
        "loss",
        "value_and_grad computes the loss in FP32 and seeds its gradient with the loss scale",
    ),
    ("unscaled gradients", "gradients are unscaled, clipped and passed to the optimizer in FP32"),
    (
        "optimizer state",
        "second moments underflow in 16 bits: moments belong to the FP32 masters",
    ),
    (
        "elsewhere",
        "this applies to Flax's own modules, to jaxmp's gradients and optimizers, and to modules"
        " with an FP32 rule. A raw jax.nn.softmax runs in the dtype of its argument; autocast"
        " changes that",
    ),
]

# ---------------------------------------------------------------------------
# Sections
# ---------------------------------------------------------------------------


def recipe_sections(recipe: Recipe) -> Sections:
    """Returns the sections that `jaxmp show` prints."""
    rules = [(str(n), rule_lines(rule)) for n, rule in enumerate(recipe.policies.rules, start=1)]
    return [
        ("Policy (modules that no rule matches)", _policy_rows(recipe.policies)),
        ("Rules (only the first matching rule applies)", rules or [("none", "")]),
        ("Loss scale", _loss_scale_rows(recipe)),
        ("Optimizer", _optimizer_rows(recipe)),
        ("In FP32 under every recipe, unless a rule overrides it", _ALWAYS_FP32),
        ("Operations (autocast)", _op_rows(recipe.ops)),
    ]


def op_sections(table: OpTable) -> Sections:
    """Returns one section for each category of operations."""
    return [
        (
            f"{category}: {meaning}",
            [(name, _op_text(table, name)) for name in table.names(category)],
        )
        for category, meaning in CATEGORIES.items()
    ]


def rule_lines(rule: Rule) -> str:
    """Returns a rule as code, and its reason on a second line."""
    code = rule_text(rule, with_reason=False)
    return f"{code}\n{rule.why}" if rule.why else code


def _policy_rows(policies: PolicyMap) -> Rows:
    policy, window = policies.default, ""
    if policy.window is not None:
        window = f", within {policy.window[0]} positions to the left and {policy.window[1]} right"
    explicit = "kept" if policy.respect_explicit else "overridden"
    return [
        ("stored", f"{policy.param_dtype.name}: parameters in the train state"),
        (
            "computed",
            f"{policy.compute_dtype.name}: operands inside modules, and values between them;"
            " matmuls accumulate in FP32",
        ),
        ("output", f"{policy.output_dtype.name}: results of the whole model"),
        ("matmul", f"{policy.matmul}: {_MATMUL[policy.matmul]}"),
        *_scaling_rows(policies),
        ("attention", f"{policy.implementation}: {_ATTENTION[policy.implementation]}"),
        ("mask", f"{_MASK[policy.mask]}{window}"),
        ("explicit dtypes", f"{explicit}, if the author of the model sets dtype on a Flax module"),
        ("float64 arrays", "cast like all others" if policy.cast_float64 else "not cast"),
        (
            "inputs kept",
            f"{', '.join(map(str, policy.keep_inputs)) or 'none'}: arguments of modules that are"
            " not cast",
        ),
        (
            "forward passes",
            f"{', '.join(('__call__', *policy.forward_methods))}: methods whose arguments and"
            " results are cast",
        ),
    ]


def _scaling_rows(policies: PolicyMap) -> Rows:
    scaling = matmul_scaling(policies)
    if scaling is None:
        return []
    emulation = "a CPU emulates it: it rounds to FP8 and multiplies in a wider dtype"
    return [("FP8", f"{scaling.kind} scaling; {emulation}")]


def _loss_scale_rows(recipe: Recipe) -> Rows:
    data = recipe.data.loss_scale
    if data.kind == "none":
        dtypes = {dtype.name for _, _, dtype in named_dtypes(recipe.policies)}
        reason = (
            "float16 gradients below 6e-8 become 0"
            if "float16" in dtypes
            else "bfloat16 and float32 have the range that gradients require"
        )
        return [("none", f"gradients are not scaled; {reason}")]
    if data.kind == "static":
        value = dict(data.arguments)["value"]
        return [("static", f"gradients are scaled by {value:g} at every step")]
    scale = recipe.loss_scale
    assert isinstance(scale, DynamicLossScale)
    restart = "at each growth" if scale.hysteresis_refill == "growth" else "at each finite step"
    tolerance = (
        "at every overflow"
        if scale.hysteresis == 1
        else f"from overflow {scale.hysteresis} on; the count restarts {restart}"
    )
    delay = scale.first_growth_delay
    return [
        ("dynamic", f"the rule of {data.preset or 'jaxmp'}; a step that overflows is skipped"),
        ("start", _power(float(scale.scale_value))),
        (
            "growth",
            f"times {scale.growth_factor:g} after {scale.growth_interval} consecutive finite steps"
            + (f", not counting the first {delay}" if delay else ""),
        ),
        ("backoff", f"times {scale.backoff_factor:g} {tolerance}"),
        ("bounds", f"from {_power(scale.floor)} to {_power(scale.ceiling)}"),
        ("unscaling", "in FP32, by the scale of the same step, before clipping and weight decay"),
    ]


def _power(value: float) -> str:
    """Formats a number, and the power of two that it is: `65536 (2**16)`."""
    mantissa, exponent = value.hex().split("p")
    power = f" (2**{int(exponent)})" if mantissa == "0x1.0000000000000" else ""
    return f"{value:.10g}{power}"


def _optimizer_rows(recipe: Recipe) -> Rows:
    stored = {d for _, field, d in named_dtypes(recipe.policies) if field == "param_dtype"}
    dtypes = sorted(dtype.name for dtype in stored if is_16bit(dtype))
    master = "fp32" if recipe.master == "auto" else recipe.master
    masters = (
        f"parameters stored in {' and '.join(dtypes)} have {_MASTER[master]}"
        if dtypes
        else "parameters stored in float32 are their own masters"
    )
    skipped = "a step with a non-finite loss or gradient changes only loss scale and counters"
    return [
        ("masters", f"{recipe.master}: {masters}"),
        ("skipped steps", _SKIP["none"] if recipe.skip == "none" else skipped),
        ("skip", f"{recipe.skip}: {_SKIP[recipe.skip]}"),
        ("microbatches", f"gradients are summed in {recipe.accumulate_dtype}"),
        (
            "devices",
            f"gradients are summed in {recipe.reduce_dtype}, under jit with shardings and over the"
            " optimizer's axis_name (pmap, vmap, shard_map)",
        ),
        ("split weights", _REGATHER[recipe.regather]),
    ]


def _op_rows(table: OpTable) -> Rows:
    """Returns the number of operations in each category, and those that the recipe changed."""
    counts = [
        (category, f"{len(table.names(category))} operations; {meaning}")
        for category, meaning in CATEGORIES.items()
    ]
    changed = [
        (name, f"{category}, changed from {table.op(name).category}: {table.op(name).reason}")
        for name, category in table.differs().items()
    ]
    return [*counts, *(changed or [("changed", "none: this is the default table")])]


def _op_text(table: OpTable, name: str) -> str:
    op = table.op(name)
    is_changed = table.category(name) != op.category
    return f"changed from {op.category}: {op.reason}" if is_changed else op.reason
