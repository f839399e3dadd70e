"""Policy: the dtypes and settings of one module, the values that they allow, and their parser."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

import jax
import numpy as np

from jaxmp import _core
from jaxmp._core import DTypeLike
from jaxmp._policies._patterns import Names
from jaxmp._policies._toml import shipped
from jaxmp.errors import PolicyError

MATMUL_PRECISIONS = ("default", "highest", "tf32", "fp8")
ATTENTION = ("auto", "cudnn", "blockwise", "xla")
# Structures of an attention mask that a policy can declare; "array" declares none.
MASKS = ("array", "causal", "padding", "causal+padding", "full")
# Settings of attention layers: fields of a Policy, keys of a rule and of [attention].
ATTENTION_FIELDS = ("implementation", "mask", "window")

# Field -> its description, its allowed values, and a policy string with a valid value.
_CHOICES = {
    "matmul": ("matmul precision", MATMUL_PRECISIONS, "p=f32,matmul=tf32"),
    "implementation": ("implementation", ATTENTION, "p=f32,c=bf16,implementation=cudnn"),
    "mask": ("mask", MASKS, "p=f32,c=bf16,mask=causal"),
}

# ---------------------------------------------------------------------------
# Canonical form
# ---------------------------------------------------------------------------


def canonical_fields(fields: Mapping[str, Any], *, within: str) -> dict[str, Any]:
    """Checks some fields of a policy and returns them in canonical form.

    Args:
      fields: field -> value.
      within: the input that contains the values, which error messages quote.

    Raises:
      PolicyError: if a value is not valid.
    """
    where = f" in {within!r}" if within else ""
    canonical: dict[str, Any] = {}
    for name, value in fields.items():
        if name.endswith("_dtype"):
            canonical[name] = _core.canonical_dtype(value, within=within)
        elif name in _CHOICES:
            canonical[name] = _canonical_choice(name, value, where)
        elif name in ("keep_inputs", "forward_methods"):
            canonical[name] = _canonical_names(name, value, where)
        elif name == "fp32_outputs_below":
            valid = type(value) is int and value >= 0
            canonical[name] = value if valid else _canonical_width(value, where)
        elif name == "window":
            canonical[name] = None if value is None else _canonical_window(value, where)
    return canonical


def _canonical_choice(name: str, value: Any, where: str) -> str:
    description, allowed, example = _CHOICES[name]
    if value not in allowed:
        raise PolicyError(
            f"Unknown {description} {value!r}{where}.{_core.did_you_mean(value, allowed)} Allowed: "
            f"{', '.join(map(repr, allowed))}; for example {example!r}."
        )
    return value


def _canonical_names(name: str, value: Any, where: str) -> Names:
    """Converts arguments (`keep_inputs`) or methods (`forward_methods`) to a tuple of their names.

    They are a list, tuple or set, or have the form of a policy string: `"t+positions"` or `"none"`.
    Names of a set are sorted.
    """
    names = value
    if isinstance(value, str):
        names = [] if value.strip() == "none" else [part.strip() for part in value.split("+")]
    problems = ["it must be a list of names"]
    if isinstance(names, (list, tuple, set, frozenset)):
        is_name = lambda entry: isinstance(entry, str) and entry.isidentifier()
        problems = [f"{entry!r} is not a name" for entry in names if not is_name(entry)]
    if problems:
        example = {"keep_inputs": ("t", "positions"), "forward_methods": ("encode", "decode")}[name]
        raise PolicyError(
            f"{name}={value!r}{where}: {problems[0]}. Pass names, for example {name}={example!r}, "
            f"or '{name}={'+'.join(example)}' in a policy string."
        )
    return tuple(dict.fromkeys(names if isinstance(names, (list, tuple)) else sorted(names)))


def _canonical_width(value: Any, where: str) -> int:
    if not isinstance(value, str) or not value.isdecimal():
        raise PolicyError(
            f"fp32_outputs_below={value!r}{where} is not a nonnegative integer; for example "
            "'p=f32,c=bf16,o=f32,fp32_outputs_below=16', or 0 for no layer."
        )
    return int(value)


def _canonical_window(value: Any, where: str) -> tuple[int, int]:
    """Converts `127`, `"127"`, `(127, 0)`, `[127, 0]` or `"127+0"` to (left, right)."""
    parts = value.split("+") if isinstance(value, str) else value
    sizes: list[Any] = list(parts) if isinstance(parts, (tuple, list)) else [parts]
    integers = [int(n) if isinstance(n, str) and n.isdecimal() else n for n in sizes]
    valid = [n for n in integers if isinstance(n, int) and not isinstance(n, bool) and n >= 0]
    if len(valid) != len(sizes) or len(valid) not in (1, 2):
        raise PolicyError(
            f"window={value!r}{where} is neither a nonnegative integer nor a pair (left, right) of "
            "them; for example window=127 or window=(127, 0), or in a policy string "
            "'mask=causal,window=127' or 'mask=full,window=127+0'."
        )
    return valid[0], valid[-1]


# ---------------------------------------------------------------------------
# Windows of attention masks
# ---------------------------------------------------------------------------


def window_text(window: tuple[int, int]) -> str:
    """Formats a window as in a policy string.

    Example:
      >>> window_text((127, 127)), window_text((127, 0))
      ('127', '127+0')
    """
    left, right = window
    return str(left) if left == right else f"{left}+{right}"


def mask_window(mask: str, window: tuple[int, int] | None) -> tuple[int, int] | None:
    """Returns the window of a declared mask; a causal mask has no window to the right.

    Raises:
      PolicyError: if there is a window, but no declared mask.
    """
    if window is None:
        return None
    if mask == "array":
        raise PolicyError(
            f"window={window_text(window)} requires a declared mask, and mask='array' declares "
            f"none. Set both, such as mask='causal', window={window[0]}; mask='full' declares a "
            "window alone."
        )
    return (window[0], 0) if mask.startswith("causal") else window


# ---------------------------------------------------------------------------
# Pairs of keys and values
# ---------------------------------------------------------------------------


def fields_text(fields: Mapping[str, Any]) -> str:
    """Formats policy fields as a policy string, such as "compute_dtype=f32,matmul=tf32"."""
    return ",".join(f"{name}={_value_text(name, value)}" for name, value in fields.items())


def _value_text(name: str, value: Any) -> str:
    if name.endswith("_dtype"):
        return _core.short_name(value)
    if name == "window":
        return window_text(value)
    return ("+".join(value) or "none") if isinstance(value, tuple) else str(value)


def _split_pairs(text: str) -> list[tuple[str, str]]:
    """Splits `"p=f32, c=bf16"` into `[("p", "f32"), ("c", "bf16")]`.

    Raises:
      PolicyError: if a part is not a single `key=value` pair; columns start at 1.
    """
    pairs, column = [], 1
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or "=" in value or not key.strip() or not value.strip():
            raise PolicyError(
                f"{part.strip()!r} at column {column} of {text!r} is not a key=dtype pair; "
                "write pairs separated by commas, such as 'p=f32,c=bf16,o=f32'."
            )
        pairs.append((key.strip(), value.strip()))
        column += len(part) + 1
    return pairs


def read_fields(policy: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the canonical fields that a string or a dict sets.

    Args:
      policy: pairs such as `"p=f32,c=bf16"`, or a dict with the same keys: those of `FIELD_KEYS`.

    Raises:
      PolicyError: if a key is unknown or repeated, or a value is not valid.
    """
    if isinstance(policy, str):
        within, pairs = policy, _split_pairs(policy)
    else:
        within, pairs = repr(policy), [(str(key), value) for key, value in policy.items()]
    fields: dict[str, Any] = {}
    for key, value in pairs:
        field = FIELD_KEYS.get(key.lower())
        if field is None:
            raise PolicyError(
                f"Unknown key {key!r} in {within!r}.{_core.did_you_mean(key.lower(), FIELD_KEYS)} "
                "Allowed: p (param_dtype), c (compute_dtype), o (output_dtype), matmul, "
                "implementation, mask, window, keep_inputs, forward_methods, fp32_outputs_below; "
                "for example 'p=f32,c=bf16,o=f32'."
            )
        if field in fields:
            raise PolicyError(
                f"{within!r} sets {field} twice. Keep one of the two keys, as in "
                "'p=f32,c=bf16,o=f32'."
            )
        fields[field] = value
    return canonical_fields(fields, within=within)


T = TypeVar("T")

# ---------------------------------------------------------------------------
# Policy
# ---------------------------------------------------------------------------


class PolicyDtypes(Protocol):
    """Object with the three dtypes of a policy, such as `jmp.Policy`."""

    @property
    def param_dtype(self) -> Any: ...
    @property
    def compute_dtype(self) -> Any: ...
    @property
    def output_dtype(self) -> Any: ...


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Policy:
    """Dtypes of one module. Frozen and hashable; a static value under `jax.jit`.

    A `Policy` can replace a `jmp.Policy`: its three dtypes can be passed by position, and it has
    the same attributes and `cast_to_*` methods.

    Args:
      param_dtype: dtype in which parameters are stored.
      compute_dtype: dtype in which the module computes.
      output_dtype: dtype of the results.
      matmul: precision of FP32 matmuls. "default": JAX's default (TF32 on NVIDIA Tensor Cores);
        "tf32": TF32; "highest": full FP32. "fp8": linear layers of Flax multiply in FP8, for any
        compute dtype, if their sizes allow it.
      implementation: implementation of Flax's attention layers, as in `dot_product_attention`.
        "auto": the fused kernel of cuDNN where it applies, in 16 bits; FP32 layers use Flax's own.
        "cudnn", "blockwise", "xla": this implementation in any dtype.
      mask: structure of the mask that the model passes to Flax's attention layers. A declared
        structure replaces the array, so that fused kernels skip the hidden positions. "causal":
        position t attends to keys 0 to t. "padding": positions after the end of each sequence are
        hidden. "causal+padding": both. "full": nothing is hidden. "array": nothing is declared.
      window: for a declared mask, the number of visible positions to the left and right of a query:
        `(left, right)`, or one integer for both; a causal mask has none to the right. None: all.
      keep_inputs: names of arguments that are not cast at a module's boundary, such as
        `("t", "positions")`. They apply to every method of the module with such an argument, also
        if it is passed by position.
      forward_methods: names of methods that are forward passes like `__call__`, such as
        `("encode", "decode")`: their arguments and results are cast. The other methods of a user's
        class receive and return arrays as they are.
      fp32_outputs_below: linear layers with fewer outputs than this, such as the head of a critic,
        return the FP32 sums of their 16-bit matmul, weakly typed: an operation with a 16-bit array
        still runs in 16 bits. 0: no layer. An output dtype that a rule names precedes. The
        projections of Flax's attention layers do not count as heads.

    Raises:
      PolicyError: if a dtype is not a floating-point format, or a setting is not valid.

    Example:
      >>> policy = Policy("float32", "bfloat16", "float32")
      >>> str(policy)
      'p=f32,c=bf16,o=f32'
      >>> get_policy(str(policy)) == policy
      True
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype
    matmul: str
    implementation: str
    mask: str
    window: tuple[int, int] | None
    keep_inputs: Names
    forward_methods: tuple[str, ...]
    fp32_outputs_below: int

    def __init__(
        self,
        param_dtype: DTypeLike,
        compute_dtype: DTypeLike,
        output_dtype: DTypeLike,
        *,
        matmul: str = "default",
        implementation: str = "auto",
        mask: str = "array",
        window: int | str | tuple[int, int] | None = None,
        keep_inputs: str | Iterable[str] = (),
        forward_methods: str | Iterable[str] = (),
        fp32_outputs_below: int = 0,
    ) -> None:
        arguments = locals()
        fields = canonical_fields({name: arguments[name] for name in FIELD_NAMES}, within="")
        fields["window"] = mask_window(fields["mask"], fields["window"])
        vars(self).update(fields)

    def cast_to_param(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `param_dtype`; other leaves are unchanged."""
        return _core.cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `compute_dtype`; other leaves are unchanged."""
        return _core.cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Casts the floating arrays of `tree` to `output_dtype`; other leaves are unchanged."""
        return _core.cast_floating(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> Policy:
        """Returns the policy with another `output_dtype`."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        dtypes = {"p": self.param_dtype, "c": self.compute_dtype, "o": self.output_dtype}
        parts = [f"{key}={_core.short_name(dtype)}" for key, dtype in dtypes.items()]
        others = {name: getattr(self, name) for name in FIELD_NAMES[len(dtypes) :]}
        changed = {k: v for k, v in others.items() if v != getattr(_PLAIN, k)}
        return ",".join([*parts, *filter(None, [fields_text(changed)])])

    def __repr__(self) -> str:
        return f"Policy({str(self)!r})"


FIELD_NAMES = tuple(field.name for field in dataclasses.fields(Policy))
# Key of a policy string, dict or TOML table -> field.
FIELD_KEYS = {
    **{name: name for name in FIELD_NAMES},
    **dict.fromkeys(("p", "param", "params"), "param_dtype"),
    **dict.fromkeys(("c", "compute"), "compute_dtype"),
    **dict.fromkeys(("o", "out", "output"), "output_dtype"),
}
# Its settings besides the dtypes are those that the text of a policy leaves out.
_PLAIN = Policy("float32", "float32", "float32")

# Arguments that `get_policy` accepts.
PolicyLike: TypeAlias = Policy | PolicyDtypes | Mapping[str, Any] | DTypeLike


def with_fields(policy: Policy, **fields: Any) -> Policy:
    """Returns a policy with other, canonical fields, which are not checked again."""
    changed = object.__new__(Policy)
    vars(changed).update(vars(policy), **fields)
    return changed


def summarized(policy: Policy) -> Policy:
    """Returns a policy without the settings of all modules that make titles and messages long."""
    return with_fields(policy, keep_inputs=(), fp32_outputs_below=0)


# ---------------------------------------------------------------------------
# Parsing
# ---------------------------------------------------------------------------


def get_policy(policy: PolicyLike) -> Policy:
    """Converts the specification of a policy to a `Policy`.

    Args:
      policy: one of

        * a `Policy` or a `jmp.Policy`;
        * a string of `key=dtype` pairs such as `"p=f32,c=bf16,o=f32"`, with the keys `p`, `c` and
          `o` or their long forms. Defaults follow jmp: params are float32, compute follows params,
          and output follows compute;
        * the name of a dtype such as `"bfloat16"`, for all three dtypes, but not the name of a
          recipe, such as `"bf16"`;
        * a dtype;
        * a dict with the keys of the string.

    Returns:
      The policy. `get_policy(str(p)) == p` for every policy `p`.

    Raises:
      PolicyError: with the whole input, the allowed values and a fix.

    Example:
      >>> get_policy("params=float32, compute=bfloat16")
      Policy('p=f32,c=bf16,o=bf16')
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        _check_name(policy)
    if isinstance(policy, Mapping) or (isinstance(policy, str) and "=" in policy):
        return complete_policy(read_fields(policy))
    if is_policy(policy):
        return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    dtype = _core.canonical_dtype(policy)
    return Policy(dtype, dtype, dtype)


def is_policy(value: object) -> TypeGuard[PolicyDtypes]:
    """Returns True for an object with the three dtypes of a policy, such as a `jmp.Policy`."""
    return not isinstance(value, type) and all(
        hasattr(value, name) for name in ("param_dtype", "compute_dtype", "output_dtype")
    )


def _check_name(text: str) -> None:
    """Refuses the names of recipes, and unknown names."""
    name = text.strip().lower()
    dtype = _core.DTYPE_NAMES.get(name)
    if name in shipped():
        for_all = "" if dtype is None else f", or {dtype.name!r} for all three dtypes"
        raise PolicyError(
            f"{text!r} is the name of a recipe, which contains more than one policy. Use "
            f"jaxmp.load_recipe({name!r}), or its default policy: "
            f"jaxmp.load_recipe({name!r}).policies.default{for_all}."
        )
    # `canonical_dtype` refuses integers.
    if dtype is None and "=" not in text and not name.removeprefix("u").startswith("int"):
        raise PolicyError(
            f"Unknown policy {text!r}.{_core.did_you_mean(name, _core.DTYPE_NAMES)} Use the name "
            "of a dtype, such as 'bfloat16', or pairs such as 'p=f32,c=bf16,o=f32'."
        )


def complete_policy(fields: Mapping[str, Any]) -> Policy:
    """Returns the policy with some fields set.

    As in jmp, parameters are float32 by default, the compute dtype follows the parameters, and the
    output dtype follows the compute dtype.
    """
    param_dtype = fields.get("param_dtype", "f32")
    compute_dtype = fields.get("compute_dtype", param_dtype)
    dtypes = {"param_dtype": param_dtype, "compute_dtype": compute_dtype}
    return Policy(**{"output_dtype": compute_dtype, **dtypes, **fields})
