"""What a recipe file may say: its keys, what each may hold, and the errors that teach both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxmp._core._dtypes import bits, canonical_dtype
from jaxmp._loss_scale import LARGEST_SCALE
from jaxmp._policies._inputs import canonical_inputs
from jaxmp._policies._op_table import OPS, Op, OpTable
from jaxmp._policies._policy import (
    ATTENTION,
    ATTENTION_FIELDS,
    FIELD_KEYS,
    MASKS,
    MATMUL_PRECISIONS,
    canonical_fields,
)
from jaxmp._policies._rules import Rule
from jaxmp._recipe_files import _toml
from jaxmp._recipe_files._fp8_table import SCALINGS, frozen, is_formats, is_products, is_width
from jaxmp.errors import JaxmpError, OpError, RecipeError, RuleError, did_you_mean

KINDS = ("auto", "none", "static", "dynamic")
PRESETS = ("torch", "deepspeed", "megatron", "keras", "tensorflow")
MASTERS = ("auto", "fp32", "packed", "none")
SKIPS = ("auto", "select", "cond", "none")

# ---------------------------------------------------------------------------
# Fields
# ---------------------------------------------------------------------------


class Field(NamedTuple):
    """What one key may hold."""

    # In words, for messages.
    allowed: str
    # A TOML literal that is allowed.
    example: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value


def module_dtype(dtype: Any) -> np.dtype:
    """A dtype that a module may store, compute in or hand on.

    Raises:
      RecipeError: for formats below 16 bits.
    """
    canonical = canonical_dtype(dtype)
    if bits(canonical) < 16:
        raise RecipeError(
            f"{canonical.name} is too narrow for a module in this version: it needs a scale, and a "
            "bare cast overflows. Use bfloat16 or float16."
        )
    return canonical


def _sum_dtype(name: str) -> str:
    dtype = canonical_dtype(name)
    if bits(dtype) < 16:
        raise RecipeError(f"{dtype.name} is too narrow to add gradients up in. Use float32.")
    return dtype.name


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_number(value: Any) -> bool:
    # False for NaN, and for integers too long for Python to print.
    return type(value) in (int, float) and -LARGEST_SCALE <= value <= LARGEST_SCALE


def _is_count(value: Any) -> bool:
    return type(value) is int and -(2**31) <= value < 2**31


def _choice(*options: str) -> Field:
    words = ", ".join(map(_toml.quoted, options))
    return Field(f"one of {words}", _toml.quoted(options[0]), lambda value: value in options)


def _category(op: Op) -> Field:
    def convert(category: Any) -> Any:
        op.check(category)
        return category

    return Field(
        f"a category: one of {', '.join(map(_toml.quoted, op.allowed))}",
        _toml.quoted(op.example),
        _is_text,
        convert,
    )


def _or_none(field: Field) -> Field:
    """A bound that may be lifted: "none" stands for Python's None."""
    return field._replace(
        allowed=f'{field.allowed}, or "none"',
        accepts=lambda value: value == "none" or field.accepts(value),
        convert=lambda value: None if value == "none" else field.convert(value),
    )


_LINE = Field("a string of one line", '"…"', _is_line)
_BOOLEAN = Field("true or false", "true", lambda value: isinstance(value, bool))
_NUMBER = Field("a number that FP32 can hold", "65536.0", _is_number, float)
_COUNT = Field("an integer", "2000", _is_count)
_DTYPE = Field("the name of a dtype", '"float32"', _is_text, module_dtype)
_SUM_DTYPE = Field("the name of a dtype", '"float32"', _is_text, _sum_dtype)


def _inputs(value: list[Any]) -> tuple[str | int, ...]:
    try:
        return canonical_inputs(value)
    except ValueError as error:
        raise RecipeError(f"{error}.") from None


def _is_window(value: Any) -> bool:
    parts = value if isinstance(value, list) else [value]
    return all(_is_count(part) and part >= 0 for part in parts) and len(parts) in (1, 2)


def _window(value: Any) -> tuple[int, int]:
    return canonical_fields({"window": value}, within="")["window"]


_ATTENTION: dict[str, Field] = {
    "implementation": _choice(*ATTENTION),
    "mask": _choice(*MASKS)._replace(example='"causal"'),
    "window": Field(
        "an integer that is not negative, or a list of two: [left, right]",
        "127",
        _is_window,
        _window,
    ),
}
assert tuple(_ATTENTION) == ATTENTION_FIELDS

_POLICY = {
    "param_dtype": _DTYPE,
    "compute_dtype": _DTYPE._replace(example='"bfloat16"'),
    "output_dtype": _DTYPE,
    "matmul": _choice(*MATMUL_PRECISIONS),
    "respect_explicit": _BOOLEAN,
    "cast_float64": _BOOLEAN,
    "keep_inputs": Field(
        "a list of argument names and positions",
        '["t", "positions"]',
        lambda value: isinstance(value, list),
        _inputs,
    ),
}

_FORMATS = Field('a format, a list of two, or "high"', '["e4m3fn", "e5m2"]', is_formats, frozen)
# Ranges are the business of the recipes of `jaxmp.fp8`.
_FP8 = {
    "scaling": _choice(*SCALINGS),
    "fprop": _FORMATS._replace(example='["e4m3fn", "e4m3fn"]'),
    "dgrad": _FORMATS._replace(example='["e5m2", "e4m3fn"]'),
    "wgrad": _FORMATS,
    "margin": _COUNT._replace(example="1"),
    "power_of_two": _BOOLEAN,
    "fast_accumulation": Field(
        'a list of products among "fprop", "dgrad", "wgrad"', '["fprop"]', is_products, frozen
    ),
    "min_width": Field('"auto" or an integer that is not negative', "2048", is_width),
    "emulate": _BOOLEAN,
    "amax_history_len": _COUNT._replace(example="1024"),
    "amax_compute": _choice("max", "most_recent"),
    "interval": _COUNT._replace(example="1"),
    "calibrate": _BOOLEAN,
    "rounding": _choice("up", "down"),
}

# Their ranges are the business of `DynamicLossScale`, which checks them when a recipe is built.
DYNAMIC = {
    "init_scale": _NUMBER,
    "growth_factor": _NUMBER._replace(example="2.0"),
    "backoff_factor": _NUMBER._replace(example="0.5"),
    "growth_interval": _COUNT,
    "min_scale": _or_none(_NUMBER._replace(example="1.0")),
    "max_scale": _or_none(_NUMBER._replace(example="16777216.0")),
    "hysteresis": _COUNT._replace(example="2"),
    "hysteresis_refill": _choice("growth", "clean"),
    "first_growth_delay": _COUNT._replace(example="1"),
}

TOP = {
    "name": Field(
        "a string of one line that is not empty",
        '"my_recipe"',
        lambda value: _is_line(value) and bool(value.strip()),
    ),
    "summary": _LINE._replace(example='"BF16 with an FP32 head"'),
    "extends": Field("a string", '"bf16"', _is_text),
}
TABLES = {
    "policy": _POLICY,
    "loss_scale": {
        "kind": _choice(*KINDS),
        "value": _NUMBER._replace(example="128.0"),
        "preset": _choice(*PRESETS),
        **DYNAMIC,
    },
    "optimizer": {"master": _choice(*MASTERS), "skip": _choice(*SKIPS)},
    "attention": _ATTENTION,
    "fp8": _FP8,
    "gradients": {"accumulate_dtype": _SUM_DTYPE, "reduce_dtype": _SUM_DTYPE},
    "ops": {name: _category(op) for name, op in OPS.items()},
}
RULE = {
    "path": Field("a string", '"**/lm_head"', _is_text),
    "module_type": Field("a string", '"LayerNorm"', _is_text),
    "subtree": _BOOLEAN,
    "required": _BOOLEAN._replace(example="false"),
    "why": Field("a string", '"the loss reads FP32 logits"', _is_text),
    **_POLICY,
    **_ATTENTION,
}


def example(table: str, key: str, literal: str = "") -> str:
    """A whole recipe file, indented, in which `key` stands where it belongs."""
    fields = {"": TOP, "rules": RULE, **TABLES}[table]
    setting = f"{key} = {literal or fields[key].example}"
    base = "fp8" if table == "fp8" else "bf16"
    lines = [] if table == "policy" or key == "extends" else [f'extends = "{base}"']
    if table == "rules":
        lines += _example_rule(key, setting)
    elif table:
        lines += [f"[{table}]", *_companions(key), setting]
    else:
        lines += [setting]
    return "\n".join(f"    {line}" for line in lines)


def _companions(key: str) -> list[str]:
    """What must stand beside a key."""
    if key == "value":
        return ['kind = "static"']
    if key in ("amax_history_len", "amax_compute", "interval", "calibrate"):
        return ['scaling = "delayed"']
    if key == "rounding":
        return ['scaling = "mx"']
    if key == "window":
        return ['mask = "causal"']
    return []


def _example_rule(key: str, setting: str) -> list[str]:
    about = 'module_type = "LayerNorm"' if key == "subtree" else 'path = "**/lm_head"'
    lines = ["[[rules]]", *[about] * (key not in ("path", "module_type")), setting]
    lines += _companions(key) if key == "window" else []
    return lines + ['output_dtype = "float32"'] * (key not in (*_POLICY, *_ATTENTION))


# ---------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------


class Setting(NamedTuple):
    """A canonical value, and the place where a file says so."""

    value: Any
    where: str


class Contents(NamedTuple):
    """What one file says, each value checked by itself."""

    top: dict[str, str]
    # (table, key) -> setting.
    settings: dict[tuple[str, str], Setting]
    rules: tuple[Rule, ...]


def read_contents(document: _toml.Document) -> Contents:
    """Checks every key and value of a file.

    Raises:
      RecipeError: with file, line, column and key, what is allowed, and an example that loads.
    """
    top = _read_top(document)
    settings = {
        (table, key): setting
        for table, fields in TABLES.items()
        for key, setting in _read_table(document, (table,), fields).items()
    }
    return Contents(top, settings, _read_rules(document))


def _read_top(document: _toml.Document) -> dict[str, str]:
    for key, value in document.table.items():
        if key not in (*TOP, *TABLES, "rules"):
            raise _unknown_key(document, (key,))
        if key in TABLES and not isinstance(value, dict):
            raise RecipeError(
                f"{document.where(key)}: {shown(value)} is not a table. For example:\n"
                + example(key, next(iter(TABLES[key])))
            )
    return {
        key: _read_value(document, (key,), field, document.table[key])
        for key, field in TOP.items()
        if key in document.table
    }


def _read_rules(document: _toml.Document) -> tuple[Rule, ...]:
    rules = document.table.get("rules", [])
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise RecipeError(
            f"{document.where('rules')}: {shown(rules)} is not a list of tables. Begin each rule "
            "with [[rules]]. For example:\n" + example("rules", "path")
        )
    return tuple(_read_rule(document, index) for index in range(len(rules)))


def _read_rule(document: _toml.Document, index: int) -> Rule:
    fields = _read_table(document, ("rules", index), RULE)
    try:
        return Rule(**{name: setting.value for name, setting in fields.items()})
    except RuleError as error:
        key = ("rules", index, "path") if error.fix else ("rules", index)
        literal = _toml.quoted(error.fix) if error.fix else ""
        raise RecipeError(
            f"{document.where(*key)}: {error} In TOML:\n{example('rules', 'path', literal)}"
        ) from None


def _read_table(
    document: _toml.Document, table: _toml.Key, fields: Mapping[str, Field]
) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for key, value in _at(document.table, table).items():
        where = (*table, key)
        name = _field_name(where)
        if name not in fields:
            raise _unknown_key(document, where)
        if name in settings:
            raise RecipeError(
                f"{document.where(*where)}: {name} is given twice, by its name and by a short "
                f"form; delete one. For example:\n{example(str(table[0]), name)}"
            )
        read = _read_value(document, where, fields[name], value)
        settings[name] = Setting(read, document.where(*where))
    return settings


def _at(table: Any, key: _toml.Key) -> dict[str, Any]:
    for part in key:
        table = table[part] if isinstance(part, int) else table.get(part, {})
    return table


def _field_name(key: _toml.Key) -> str:
    """The field that a key means: `c` is `compute_dtype` where policies are given."""
    word = str(key[-1])
    return FIELD_KEYS.get(word, word) if key[0] in ("policy", "rules") else word


def _read_value(document: _toml.Document, key: _toml.Key, field: Field, value: Any) -> Any:
    table, name = str(key[0]) if len(key) > 1 else "", _field_name(key)
    if not field.accepts(value):
        hint = did_you_mean(value, field.allowed.split('"')[1::2]) if _is_text(value) else ""
        raise RecipeError(
            f"{document.where(*key)}: {shown(value)} is not allowed.{hint} Allowed: "
            f"{field.allowed}. For example:\n{example(table, name)}"
        )
    try:
        return field.convert(value)
    except JaxmpError as error:
        raise RecipeError(
            f"{document.where(*key)}: {error} In TOML:\n{example(table, name)}"
        ) from None


def _unknown_key(document: _toml.Document, key: _toml.Key) -> RecipeError:
    word, table = str(key[-1]), str(key[0]) if len(key) > 1 else ""
    allowed: Iterable[str] = {"": (*TOP, *TABLES, "rules"), "rules": RULE, **TABLES}[table]
    if table == "ops":
        return _unknown_op(document, key)
    if table == "rules" and word == "attention":
        return RecipeError(
            f"{document.where(*key)}: 'attention' is now called 'implementation', as in "
            "[attention]. For example:\n" + example("rules", "implementation", '"xla"')
        )
    home = next((name for name, fields in TABLES.items() if word in fields), "")
    if home and not table:
        hint, shown_key = f" It belongs into [{home}].", (home, word)
    else:
        hint, shown_key = did_you_mean(word, allowed), (table or "policy", "")
    first = next(iter({"rules": RULE, **TABLES}[shown_key[0]]))
    return RecipeError(
        f"{document.where(*key)}: {word!r} is not known here.{hint} Allowed: "
        f"{', '.join(allowed)}. For example:\n{example(shown_key[0], shown_key[1] or first)}"
    )


def _unknown_op(document: _toml.Document, key: _toml.Key) -> RecipeError:
    try:
        OpTable().op(str(key[-1]))
    except OpError as error:
        return RecipeError(f"{document.where(*key)}: {error} In TOML:\n{example('ops', error.fix)}")
    raise AssertionError(key)


def shown(value: Any) -> str:
    """`value` as TOML would write it, as far as it can be written on a line."""
    if value is None:
        return '"none"'
    try:
        return _toml.literal(value)
    except ValueError:  # an integer of more digits than Python prints
        return f"a number of {value.bit_length()} bits"
