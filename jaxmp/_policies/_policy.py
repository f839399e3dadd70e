"""Policy: the dtypes of one piece of code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np

from jaxmp._core._dtypes import DTYPE_NAMES, canonical_dtype, short_name
from jaxmp._core._trees import cast_floating
from jaxmp._policies._inputs import canonical_inputs, inputs_text
from jaxmp._policies._recipe_names import shipped
from jaxmp.errors import PolicyError, did_you_mean

T = TypeVar("T")

MATMUL_PRECISIONS = ("default", "highest", "tf32", "fp8")
ATTENTION = ("auto", "cudnn", "blockwise", "xla")
# What a declaration may state of an attention mask; "array": it is not declared.
MASKS = ("array", "causal", "padding", "causal+padding", "full")
# The settings of attention layers: fields of a Policy, keys of a rule and of [attention].
ATTENTION_FIELDS = ("implementation", "mask", "window")

# Field -> what to call it, what it may be, a policy string in which it is right.
_CHOICES = {
    "matmul": ("matmul precision", MATMUL_PRECISIONS, "p=f32,matmul=tf32"),
    "implementation": ("implementation", ATTENTION, "p=f32,c=bf16,implementation=cudnn"),
    "mask": ("mask", MASKS, "p=f32,c=bf16,mask=causal"),
}

# Every accepted key of a policy string, dict or TOML table -> field.
FIELD_KEYS = {
    **dict.fromkeys(("p", "param", "params", "param_dtype"), "param_dtype"),
    **dict.fromkeys(("c", "compute", "compute_dtype"), "compute_dtype"),
    **dict.fromkeys(("o", "out", "output", "output_dtype"), "output_dtype"),
    "matmul": "matmul",
    **{name: name for name in ATTENTION_FIELDS},
    "respect_explicit": "respect_explicit",
    "cast_float64": "cast_float64",
    "keep_inputs": "keep_inputs",
}
_MIXED = {
    f"{prefix}{name}{suffix}": dtype
    for name, dtype in (
        ("bfloat16", "bf16"),
        ("bf16", "bf16"),
        ("float16", "f16"),
        ("fp16", "f16"),
        ("f16", "f16"),
        ("16", "f16"),
    )
    for prefix, suffix in (("mixed_", ""), ("", "-mixed"))
    if (prefix, name) != ("mixed_", "16")
}
_TRUE = {
    f"{name}-true": dtype
    for name, dtype in (
        ("bf16", "bf16"),
        ("fp16", "f16"),
        ("f16", "f16"),
        ("16", "f16"),
        ("32", "f32"),
    )
}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of one piece of code. Frozen, hashable, static under `jax.jit`.

    The three dtypes may be given by position, as in `jmp.Policy`, whose place it can take:
    it has the same attributes and the same `cast_to_*` methods.

    Args:
      param_dtype: the dtype in which parameters are stored.
      compute_dtype: the dtype in which the code computes.
      output_dtype: the dtype in which results are handed on.
      matmul: precision of FP32 matmuls: "default" leaves JAX's own choice (TF32 on NVIDIA
        Tensor Cores), "tf32" asks for TF32, "highest" for full FP32; "fp8": the linear layers of
        Flax multiply in FP8, whatever the compute dtype, where their sizes allow.
      implementation: how Flax's attention layers attend, as in `dot_product_attention`: "auto"
        takes cuDNN's fused kernel where it fits, in 16 bits, and leaves FP32 layers to Flax;
        "cudnn", "blockwise" and "xla" ask for one in any dtype.
      mask: the structure of the mask that the model passes to Flax's attention layers. A declared
        structure replaces the array, so that fused kernels skip what it hides: "causal" (position
        t sees keys 0 to t), "padding" (hides the positions behind the end of each sequence),
        "causal+padding" (both) or "full" (hides nothing). "array" declares nothing.
      window: with a declared mask, the positions that it shows to the left and right of a query:
        `(left, right)`, or one integer for both; a causal mask shows none to the right. None: all.
      respect_explicit: keep the `dtype` that a model's author set on a Flax module.
      cast_float64: cast float64 arrays too; they are left alone otherwise.
      keep_inputs: names and positions of arguments that a module's boundary leaves uncast, such
        as `("t", "positions")` or `(1,)`; they apply to every method of the module that has such
        an argument, and positions count from 0 without `self`.

    Raises:
      PolicyError: if a dtype is not a floating-point format or a setting is unknown.

    Example:
      >>> policy = Policy("float32", "bfloat16", "float32")
      >>> str(policy)
      'p=f32,c=bf16,o=f32'
      >>> get_policy(str(policy)) == policy
      True
    """

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any
    matmul: str = dataclasses.field(default="default", kw_only=True)
    implementation: str = dataclasses.field(default="auto", kw_only=True)
    mask: str = dataclasses.field(default="array", kw_only=True)
    window: Any = dataclasses.field(default=None, kw_only=True)
    respect_explicit: bool = dataclasses.field(default=False, kw_only=True)
    cast_float64: bool = dataclasses.field(default=False, kw_only=True)
    keep_inputs: Any = dataclasses.field(default=(), kw_only=True)
    # The name of `implementation` in the development versions of 0.1.0.
    attention: dataclasses.InitVar[Any] = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self, attention: Any) -> None:
        if attention is not None:
            raise renamed_attention(attention, "Policy('f32', 'bf16', 'f32', implementation={!r})")
        for field, value in canonical_fields(
            {name: getattr(self, name) for name in FIELD_NAMES}, within=""
        ).items():
            object.__setattr__(self, field, value)
        object.__setattr__(self, "window", _window(self.mask, self.window))

    def cast_to_param(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `param_dtype`; all else is untouched."""
        return self._cast(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `compute_dtype`; all else is untouched."""
        return self._cast(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `output_dtype`; all else is untouched."""
        return self._cast(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> Policy:
        """The same policy with another `output_dtype`."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def _cast(self, tree: Any, dtype: np.dtype) -> Any:
        return cast_floating(tree, dtype, cast_float64=self.cast_float64)

    def __str__(self) -> str:
        text = ",".join(
            f"{key}={short_name(dtype)}"
            for key, dtype in zip(
                "pco", (self.param_dtype, self.compute_dtype, self.output_dtype), strict=True
            )
        )
        if self.matmul != "default":
            text += f",matmul={self.matmul}"
        if self.implementation != "auto":
            text += f",implementation={self.implementation}"
        if self.mask != "array":
            text += f",mask={self.mask}"
        if self.window is not None:
            text += f",window={window_text(self.window)}"
        for name in ("respect_explicit", "cast_float64"):
            if getattr(self, name):
                text += f",{name}=true"
        if self.keep_inputs:
            text += f",keep_inputs={inputs_text(self.keep_inputs)}"
        return text

    def __repr__(self) -> str:
        return f"Policy({str(self)!r})"


FIELD_NAMES = tuple(field.name for field in dataclasses.fields(Policy))


def renamed_attention(value: Any, code: str) -> PolicyError:
    """The error for `attention=`, which `implementation` replaced; `code` is the new spelling."""
    return PolicyError(
        f"attention={value!r} is now called implementation, as in the [attention] table of a "
        f"recipe. Write {code.format(value)}."
    )


def window_text(window: tuple[int, int]) -> str:
    """A window as a policy string writes it."""
    left, right = window
    return str(left) if left == right else f"{left}+{right}"


def _window(mask: str, window: tuple[int, int] | None) -> tuple[int, int] | None:
    """The window of a declared mask; a causal one has nothing to its right.

    Raises:
      PolicyError: if the mask is not declared.
    """
    if window is None:
        return None
    if mask == "array":
        shown = window_text(window)
        raise PolicyError(
            f"window={shown} belongs to a declared mask, and mask='array' declares none. Write "
            f"both, such as mask='causal', window={window[0]}; mask='full' has a window alone."
        )
    return (window[0], 0) if mask.startswith("causal") else window


def without_inputs(policy: Policy) -> Policy:
    """Returns a policy without its `keep_inputs`, which is long: for titles and error messages."""
    return dataclasses.replace(policy, keep_inputs=())


def canonical_fields(fields: Mapping[str, Any], *, within: str) -> dict[str, Any]:
    """Checks and canonicalises some of a Policy's fields; `within` is quoted in messages."""
    return {name: _canonical_field(name, value, within) for name, value in fields.items()}


def _canonical_field(name: str, value: Any, within: str) -> Any:
    where = f" in {within!r}" if within else ""
    if name.endswith("_dtype"):
        return canonical_dtype(value, within=within)
    if name in _CHOICES:
        words, allowed, example = _CHOICES[name]
        if value not in allowed:
            hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
            raise PolicyError(
                f"Unknown {words} {value!r}{where}.{hint} Allowed: "
                f"{', '.join(map(repr, allowed))}; for example {example!r}."
            )
        return value
    if name == "keep_inputs":
        try:
            return canonical_inputs(value)
        except ValueError as error:
            raise PolicyError(
                f"keep_inputs={value!r}{where}: {error}. Give argument names or positions, for "
                "example keep_inputs=('t', 'positions'), or 'keep_inputs=t+positions' in a policy "
                "string."
            ) from None
    if name == "window":
        return None if value is None else _canonical_window(value, where)
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if not isinstance(value, bool):
        raise PolicyError(
            f"{name}={value!r}{where} is neither true nor false; for example '{name}=true'."
        )
    return value


def _canonical_window(value: Any, where: str) -> tuple[int, int]:
    """`127`, `"127"`, `(127, 0)`, `[127, 0]` or `"127+0"` as (left, right)."""
    parts = value.split("+") if isinstance(value, str) else value
    sizes: list[Any] = list(parts) if isinstance(parts, (tuple, list)) else [parts]
    numbers = [int(n) if isinstance(n, str) and n.isdecimal() else n for n in sizes]
    pair = [n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
    if len(pair) != len(sizes) or len(pair) not in (1, 2):
        raise PolicyError(
            f"window={value!r}{where} is neither an integer nor a pair (left, right) of integers "
            "that are not negative; for example window=127 or window=(127, 0), in a policy string "
            "'mask=causal,window=127' or 'mask=full,window=127+0'."
        )
    return pair[0], pair[-1]


def get_policy(policy: Any) -> Policy:
    """Makes a `Policy` of anything that names one.

    Args:
      policy: a `Policy`; a `jmp.Policy`; a string of `key=dtype` pairs such as
        `"p=f32,c=bf16,o=f32"` (keys `p`, `c`, `o` or their long forms; what is missing follows
        jmp: params are float32, compute follows params, output follows compute); a name such as
        `"bf16"` (all three dtypes), `"mixed_bfloat16"` or `"bf16-mixed"` (FP32 parameters, the
        rest bfloat16), `"bf16-true"`; a dtype; or a dict with the keys of the string.

    Returns:
      The policy. `get_policy(str(p)) == p` for every policy `p`.

    Raises:
      PolicyError: quoting the whole input, what is allowed, and a fix.

    Example:
      >>> get_policy("params=float32, compute=bfloat16")
      Policy('p=f32,c=bf16,o=bf16')
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return _parse_policy(policy)
    if isinstance(policy, Mapping):
        return _from_pairs([(str(key), value) for key, value in policy.items()], repr(policy))
    if is_policy(policy):
        return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    dtype = canonical_dtype(policy)
    return Policy(dtype, dtype, dtype)


def is_policy(value: Any) -> bool:
    """Whether `value` is a `Policy`, a `jmp.Policy`, or anything else with their three dtypes."""
    return not isinstance(value, type) and all(
        hasattr(value, name) for name in ("param_dtype", "compute_dtype", "output_dtype")
    )


def _parse_policy(text: str) -> Policy:
    name = text.strip().lower()
    if name in _MIXED:
        return Policy("f32", _MIXED[name], _MIXED[name])
    if name in _TRUE or name in DTYPE_NAMES:
        dtype = canonical_dtype(_TRUE.get(name, name))
        return Policy(dtype, dtype, dtype)
    if "=" not in text:
        names = [*DTYPE_NAMES, *_MIXED, *_TRUE]
        if name.removeprefix("u").startswith("int"):
            canonical_dtype(text)
        if name in shipped():
            raise PolicyError(
                f"{text!r} is the name of a recipe, and a recipe is more than one policy. Use "
                f"jaxmp.load_recipe({name!r}), or its default policy: "
                f"jaxmp.load_recipe({name!r}).policies.default."
            )
        raise PolicyError(
            f"Unknown policy {text!r}.{did_you_mean(name, names)} Give a name such as 'bf16' or "
            "'mixed_bfloat16', or pairs such as 'p=f32,c=bf16,o=f32'."
        )
    return _from_pairs(split_pairs(text), text)


def split_pairs(text: str) -> list[tuple[str, str]]:
    """`"p=f32, c=bf16"` -> `[("p", "f32"), ("c", "bf16")]`.

    Raises:
      PolicyError: if a part is not one `key=value`; the column counts from 1.
    """
    pairs, column = [], 1
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or "=" in value or not key.strip() or not value.strip():
            raise PolicyError(
                f"{part.strip()!r} at column {column} of {text!r} is not one key=dtype pair; "
                "write pairs separated by commas, such as 'p=f32,c=bf16,o=f32'."
            )
        pairs.append((key.strip(), value.strip()))
        column += len(part) + 1
    return pairs


def policy_fields(pairs: list[tuple[str, Any]], within: str) -> dict[str, Any]:
    """Canonical fields named by `pairs`; refuses unknown and duplicate keys."""
    fields: dict[str, Any] = {}
    for key, value in pairs:
        field = FIELD_KEYS.get(key.lower())
        if field is None and key.lower() == "attention":
            raise renamed_attention(value, "'implementation={}'")
        if field is None:
            raise PolicyError(
                f"Unknown key {key!r} in {within!r}.{did_you_mean(key.lower(), FIELD_KEYS)} "
                "Allowed: p (param_dtype), c (compute_dtype), o (output_dtype), matmul, "
                "implementation, mask, window, respect_explicit, cast_float64, keep_inputs; for "
                "example 'p=f32,c=bf16,o=f32'."
            )
        if field in fields:
            raise PolicyError(
                f"{field} is given twice in {within!r}; keep one of them, "
                "such as 'p=f32,c=bf16,o=f32'."
            )
        fields[field] = _canonical_field(field, value, within)
    return fields


def _from_pairs(pairs: list[tuple[str, Any]], within: str) -> Policy:
    fields = policy_fields(pairs, within)
    param = fields.pop("param_dtype", "f32")
    compute = fields.pop("compute_dtype", param)
    output = fields.pop("output_dtype", compute)
    return Policy(param, compute, output, **fields)
