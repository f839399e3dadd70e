"""Schema of recipe files: the keys of each table, their allowed values, and the parser."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxmp import _core
from jaxmp._gradients._dynamic_loss_scale import PRESETS
from jaxmp._policies import _phases, _policy, _scaling_table, _toml
from jaxmp._policies._op_table import DEFAULT_OPS, OpRule, unknown_op
from jaxmp._policies._phases import Phase
from jaxmp._policies._rules import POSITION, Rule
from jaxmp._policies._toml import BOOLEAN, COUNT, DTYPE, NUMBER, POSITIVE, Field, Setting, choice
from jaxmp.errors import RecipeError, RuleError

MASTERS = ("auto", "fp32", "packed", "none")
MOMENT_DTYPES = ("float32", "bfloat16")

# ---------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------


def _name(text: str) -> str:
    if not text.strip():
        raise RecipeError(f"{_toml.describe(text)} is not allowed. Allowed: a name of one line.")
    return text


def _canonical(name: str) -> Callable[[Any], Any]:
    """Returns the conversion of a value of this field of a policy."""
    return lambda value: _policy.canonical_fields({name: value}, within="")[name]


def _category(op: OpRule) -> Field:
    def check(category: str) -> str:
        op.check(category)
        return category

    allowed = f"a category: one of {', '.join(map(_toml.quoted, op.allowed))}"
    return Field(allowed, _toml.quoted(op.example), convert=check)


# Keys at the top of a file.
TOP = {
    "name": Field("a name of one line", '"my_recipe"', is_line=True, convert=_name),
    "summary": Field("a string of one line", '"BF16 with an FP32 head"', is_line=True),
    "extends": Field("the name of a recipe, or the path of a file", '"bf16"'),
}

_POLICY = {
    "param_dtype": DTYPE,
    "compute_dtype": DTYPE._replace(example='"bfloat16"'),
    "output_dtype": DTYPE,
    "matmul": choice(*_policy.MATMUL_PRECISIONS),
    "keep_inputs": Field(
        "a list of argument names",
        '["t", "positions"]',
        (list,),
        convert=_canonical("keep_inputs"),
    ),
    "forward_methods": Field(
        "a list of method names",
        '["encode", "decode"]',
        (list,),
        convert=_canonical("forward_methods"),
    ),
    "fp32_outputs_below": COUNT._replace(
        allowed="a nonnegative integer", example="16", bounds=(0, 2**31 - 1)
    ),
}

_ATTENTION = {
    "implementation": choice(*_policy.ATTENTION),
    "mask": choice(*_policy.MASKS, example="causal"),
    "window": Field(
        "a nonnegative integer, or a list of two: [left, right]",
        "127",
        (int, list),
        convert=_canonical("window"),
    ),
}
assert tuple(_ATTENTION) == _policy.ATTENTION_FIELDS

_BOUND = NUMBER._replace(
    allowed='a number that FP32 can represent, or "none"', example="1.0", names={"none": None}
)
# Settings of a dynamic loss scale. `DynamicLossScale` checks their ranges when the recipe is built.
DYNAMIC = {
    "init_scale": NUMBER,
    "growth_factor": NUMBER._replace(example="2.0"),
    "backoff_factor": NUMBER._replace(example="0.5"),
    "growth_interval": COUNT,
    "min_scale": _BOUND,
    "max_scale": _BOUND._replace(example="16777216.0"),
    "hysteresis": COUNT._replace(example="2"),
    "hysteresis_refill": choice("growth", "clean"),
    "first_growth_delay": COUNT._replace(example="1"),
}

TABLES = {
    "policy": _POLICY,
    "loss_scale": {
        "kind": choice("auto", "none", "static", "dynamic"),
        "value": NUMBER._replace(example="128.0"),
        "preset": choice(*PRESETS),
        **DYNAMIC,
    },
    "optimizer": {
        "master": choice(*MASTERS),
        "skip": choice("auto", "select", "cond", "none"),
        "moment_dtype": choice(*MOMENT_DTYPES)._replace(
            names={n: d.name for n, d in _core.DTYPE_NAMES.items() if d.name in MOMENT_DTYPES}
        ),
    },
    "attention": _ATTENTION,
    _scaling_table.TABLE: _scaling_table.FIELDS,
    "gradients": {
        "accumulate_dtype": DTYPE,
        "reduce_dtype": DTYPE,
        "regather": BOOLEAN,
        "widen_params": BOOLEAN,
    },
    "ops": {name: _category(op) for name, op in DEFAULT_OPS.items()},
}

# Keys of each [[rules]].
RULE = {
    "path": Field("a string", '"**/lm_head"'),
    "module_type": Field("a string", '"LayerNorm"'),
    "required": BOOLEAN._replace(example="false"),
    "why": Field("a string", '"the loss reads FP32 logits"'),
    **{
        key: POSITIVE._replace(example=number)
        for key, number in zip(POSITION, ("1", "2", "24"), strict=True)
    },
    **_POLICY,
    **_ATTENTION,
}

# Keys of each [[phases]].
PHASE = {
    "from_step": POSITIVE._replace(example="9000"),
    **{key: _POLICY[key] for key in _phases.POLICY_KEYS},
    **{key: _scaling_table.FIELDS[key] for key in _phases.SCALING_KEYS},
    "why": Field("a string", '"the learning rate is small"'),
}

# Former keys of policies, which are false in the manifests of old checkpoints.
_FORMER = ("respect_explicit", "cast_float64")

_PHASE_EXAMPLE = '    [[phases]]\n    from_step = 9000\n    matmul = "default"'
_RULE_EXAMPLE = '    [[rules]]\n    path = "**/lm_head"\n    output_dtype = "float32"'


def fix_line(table: str, key: str, value: str = "") -> str:
    """Returns an indented TOML line that sets a key to a value, or to its example.

    Args:
      table: name of the table; "" for the top of the file.
      key: key of the table.
      value: the value as TOML text.
    """
    fields = {"": TOP, "rules": RULE, "phases": PHASE, **TABLES}[table]
    return f"    {key} = {value or fields[key].example}"


def _table_example(table: str) -> str:
    """Returns indented TOML lines: the header of a table, and its first key."""
    if table in ("rules", "phases"):
        return _RULE_EXAMPLE if table == "rules" else _PHASE_EXAMPLE
    return f"    [{table}]\n{fix_line(table, next(iter(TABLES[table])))}"


# ---------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------


# Table -> key -> setting. The table of keys at the top of a file is "".
Settings = dict[str, dict[str, Setting]]


class Contents(NamedTuple):
    """Settings, rules and phases of a file. Values have been checked, but no combinations."""

    document: _toml.Document
    settings: Settings
    rules: tuple[Rule, ...]
    phases: tuple[Phase, ...]


def read_contents(document: _toml.Document) -> Contents:
    """Checks and converts every key of a file.

    Raises:
      RecipeError: with file, line, column, key, the allowed values and a corrected TOML line.
    """
    settings: Settings = {name: {} for name in ("", *TABLES)}
    top: dict[str, Any] = {}
    for name, value in document.table.items():
        if name in TABLES:
            if not isinstance(value, dict):
                raise RecipeError(
                    f"{document.locate(name)}: {_toml.describe(value)} is not a table. Write:\n"
                    + _table_example(name)
                )
            settings[name] = _read_table(document, (name,), TABLES[name], value)
        elif name not in ("rules", "phases"):
            top[name] = value
    settings[""] = _read_table(document, (), TOP, top)
    rules = _read_rules(document, ("rules",), document.table) if "rules" in document.table else ()
    phases = _read_phases(document) if "phases" in document.table else ()
    return Contents(document, settings, rules, phases)


def _list_of_tables(
    document: _toml.Document, key: _toml.Key, table: Mapping[str, Any]
) -> list[dict[str, Any]]:
    name = str(key[-1])
    tables = table.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        example = _table_example(name)
        raise RecipeError(
            f"{document.locate(*key)}: {_toml.describe(tables)} is not a list of tables. Start "
            f"each of them with a header:\n{example}"
        )
    return tables


def _read_rules(
    document: _toml.Document, key: _toml.Key, table: Mapping[str, Any]
) -> tuple[Rule, ...]:
    tables = _list_of_tables(document, key, table)
    return tuple(_read_rule(document, (*key, n), values) for n, values in enumerate(tables))


def _read_phases(document: _toml.Document) -> tuple[Phase, ...]:
    tables = enumerate(_list_of_tables(document, ("phases",), document.table))
    phases = tuple(_read_phase(document, ("phases", n), dict(values)) for n, values in tables)
    for number, (before, after) in enumerate(itertools.pairwise(p.from_step for p in phases), 1):
        if after <= before:
            raise RecipeError(
                f"{document.locate('phases', number, 'from_step')}: from_step = {after} follows "
                f"from_step = {before}. Sort the phases: each one begins after the one before it, "
                f"such as\n    from_step = {before + 1}"
            )
    return phases


def _read_phase(document: _toml.Document, key: _toml.Key, values: dict[str, Any]) -> Phase:
    rules = _read_rules(document, (*key, "rules"), values)
    values.pop("rules", None)
    settings = _read_table(document, key, PHASE, values)
    try:
        return _phases.read_phase({k: setting.value for k, setting in settings.items()}, rules)
    except RecipeError as error:
        raise RecipeError(f"{document.locate(*key)}: {error}") from None


def _read_table(
    document: _toml.Document, table: _toml.Key, fields: Mapping[str, Field], values: dict[str, Any]
) -> dict[str, Setting]:
    """Returns key -> setting of one table, whose location in the file is `table`."""
    kind = next((str(part) for part in reversed(table) if isinstance(part, str)), "")
    settings: dict[str, Setting] = {}
    for key, value in values.items():
        # In policies and rules, `c` is short for `compute_dtype`.
        name = _policy.FIELD_KEYS.get(key, key) if kind in ("policy", "rules", "phases") else key
        if kind in ("policy", "rules") and name in _FORMER and value is False:
            continue
        if name not in fields:
            raise _unknown_key(document, (*table, key), kind)
        if name in settings:
            raise RecipeError(
                f"{document.locate(*table, key)}: {name} is set twice, by its full name and by a "
                "short form. Delete one of the two."
            )
        try:
            read = fields[name].read(value)
        except ValueError as error:
            message = str(error).removesuffix(".")
            raise RecipeError(
                f"{document.locate(*table, key)}: {message}. Write, for example:\n"
                + fix_line(kind, name)
            ) from None
        settings[name] = Setting(read, document, (*table, key))
    return settings


def _read_rule(document: _toml.Document, key: _toml.Key, values: dict[str, Any]) -> Rule:
    fields = _read_table(document, key, RULE, values)
    try:
        return Rule(**{name: setting.value for name, setting in fields.items()})
    except RuleError as error:
        path = ("path",) if str(error).startswith("Pattern ") else ()
        location = document.locate(*key, *path)
        raise RecipeError(f"{location}: {error} In TOML:\n{_RULE_EXAMPLE}") from None


def _unknown_key(document: _toml.Document, key: _toml.Key, table: str) -> RecipeError:
    """Returns the error for a key that its table does not have."""
    name, location = str(key[-1]), document.locate(*key)
    if table == "ops":
        error = unknown_op(name, DEFAULT_OPS)
        return RecipeError(f"{location}: {error} In TOML:\n{fix_line('ops', 'exp')}")
    home = next((other for other, fields in TABLES.items() if name in fields), "")
    if home and not table:
        value = document.table[name]
        text = "" if isinstance(value, dict) else _toml.describe(value)
        return RecipeError(
            f"{location}: {name!r} is a key of [{home}]. Move it there:\n    [{home}]\n"
            + fix_line(home, name, text)
        )
    top = (*TOP, *TABLES, "rules", "phases")
    phase = (*PHASE, "rules")
    allowed = {"": top, "rules": RULE, "phases": phase, **TABLES}[table]
    hint = _core.did_you_mean(name, allowed)
    nearest = hint.split("'")[1] if hint else next(iter(allowed))
    is_table = not table and nearest not in TOP
    fix = _table_example(nearest) if is_table else fix_line(table, nearest)
    return RecipeError(
        f"{location}: unknown key {name!r}.{hint} Allowed: {', '.join(allowed)}. Write, for "
        f"example:\n{fix}"
    )
