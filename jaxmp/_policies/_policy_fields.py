"""Fields of a policy: keys, allowed values, and conversion to canonical form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmp._core._dtypes import canonical_dtype
from jaxmp._core._messages import did_you_mean
from jaxmp._policies._inputs import Names, canonical_inputs
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

# Key of a policy string, dict or TOML table -> field.
FIELD_KEYS = {
    **dict.fromkeys(("p", "param", "params", "param_dtype"), "param_dtype"),
    **dict.fromkeys(("c", "compute", "compute_dtype"), "compute_dtype"),
    **dict.fromkeys(("o", "out", "output", "output_dtype"), "output_dtype"),
    "matmul": "matmul",
    **{name: name for name in ATTENTION_FIELDS},
    "respect_explicit": "respect_explicit",
    "cast_float64": "cast_float64",
    "keep_inputs": "keep_inputs",
    "forward_methods": "forward_methods",
    "fp32_outputs_below": "fp32_outputs_below",
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
            canonical[name] = canonical_dtype(value, within=within)
        elif name in _CHOICES:
            canonical[name] = _canonical_choice(name, value, where)
        elif name in ("keep_inputs", "forward_methods"):
            canonical[name] = _canonical_names(name, value, where)
        elif name == "fp32_outputs_below":
            valid = type(value) is int and value >= 0
            canonical[name] = value if valid else _canonical_width(value, where)
        elif name == "window":
            canonical[name] = None if value is None else _canonical_window(value, where)
        else:
            canonical[name] = _canonical_flag(name, value, where)
    return canonical


def _canonical_choice(name: str, value: Any, where: str) -> str:
    description, allowed, example = _CHOICES[name]
    if value not in allowed:
        hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise PolicyError(
            f"Unknown {description} {value!r}{where}.{hint} Allowed: "
            f"{', '.join(map(repr, allowed))}; for example {example!r}."
        )
    return value


def _canonical_names(name: str, value: object, where: str) -> Names:
    """Converts a list of arguments (`keep_inputs`) or methods (`forward_methods`) to a tuple."""
    kinds, example = {
        "keep_inputs": ("argument names or positions", ("t", "positions")),
        "forward_methods": ("method names", ("encode", "decode")),
    }[name]
    try:
        names = canonical_inputs(value)
        positions = [entry for entry in names if isinstance(entry, int)]
        if name == "forward_methods" and positions:
            raise ValueError(f"{positions[0]} is not the name of a method")
    except ValueError as error:
        raise PolicyError(
            f"{name}={value!r}{where}: {error}. Pass {kinds}, for example {name}={example!r}, or "
            f"'{name}={'+'.join(example)}' in a policy string."
        ) from None
    return names


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


def _canonical_flag(name: str, value: object, where: str) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if not isinstance(value, bool):
        raise PolicyError(
            f"{name}={value!r}{where} is neither true nor false; for example '{name}=true'."
        )
    return value


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


def split_pairs(text: str) -> list[tuple[str, str]]:
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


def policy_fields(pairs: list[tuple[str, Any]], within: str) -> dict[str, Any]:
    """Returns the canonical fields of (key, value) pairs.

    Args:
      pairs: keys of `FIELD_KEYS`, and values.
      within: the input that contains the pairs, which error messages quote.

    Raises:
      PolicyError: if a key is unknown or repeated, or a value is not valid.
    """
    fields: dict[str, Any] = {}
    for key, value in pairs:
        field = FIELD_KEYS.get(key.lower())
        if field is None:
            raise PolicyError(
                f"Unknown key {key!r} in {within!r}.{did_you_mean(key.lower(), FIELD_KEYS)} "
                "Allowed: p (param_dtype), c (compute_dtype), o (output_dtype), matmul, "
                "implementation, mask, window, respect_explicit, cast_float64, keep_inputs, "
                "forward_methods, fp32_outputs_below; for example 'p=f32,c=bf16,o=f32'."
            )
        if field in fields:
            raise PolicyError(
                f"{within!r} sets {field} twice. Keep one of the two keys, as in "
                "'p=f32,c=bf16,o=f32'."
            )
        fields[field] = value
    return canonical_fields(fields, within=within)
