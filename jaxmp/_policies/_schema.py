"""Schema of recipe files: the keys of each table, their allowed values, and the parser."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmp import _core
from jaxmp._gradients._dynamic_loss_scale import PRESETS
from jaxmp._policies import _phases, _policy, _scaling_table, _toml
from jaxmp._policies._op_table import DEFAULT_OPS, OpRule, unknown_op
from jaxmp._policies._phases import Phase
from jaxmp._policies._rules import Rule
from jaxmp._policies._toml import BOOLEAN, COUNT, DTYPE, NUMBER, POSITIVE, Field, Setting, choice
from jaxmp.errors import RecipeError, RuleError

MASTERS = ("auto", "fp32", "packed", "none")
MOMENT_DTYPES = ("float32", "bfloat16")

# ---------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------


def _canonical(name: str) -> Callable[[Any], Any]:
    """Returns the conversion of a value of this field of a policy."""
    return lambda value: _policy.canonical_fields({name: value}, within="")[name]


def _names(name: str, items: str, example: str) -> Field:
    return Field(f"a list of {items} names", example, (list,), convert=_canonical(name))


def _category(op: OpRule) -> Field:
    def check(category: str) -> str:
        op.check(category)
        return category

    allowed = f"a category: one of {', '.join(map(_toml.quoted, op.allowed))}"
    return Field(allowed, _toml.quoted(op.example), convert=check)


# Keys at the top of a file.
TOP = {
    "name": Field(
        "a name of one line",
        '"my_recipe"',
        check=lambda name: name.isprintable() and bool(name.strip()),
    ),
    "summary": Field("a string of one line", '"BF16 with an FP32 head"', check=str.isprintable),
    "extends": Field("the name of a recipe, or the path of a file", '"bf16"'),
}

_POLICY = {
    "param_dtype": DTYPE,
    "compute_dtype": DTYPE._replace(example='"bfloat16"'),
    "output_dtype": DTYPE,
    "matmul": choice(*_policy.MATMUL_PRECISIONS),
    "keep_inputs": _names("keep_inputs", "argument", '["t", "positions"]'),
    "forward_methods": _names("forward_methods", "method", '["encode", "decode"]'),
    "fp32_outputs_below": _toml.NATURAL._replace(example="16"),
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
    "first": POSITIVE._replace(example="1"),
    "last": POSITIVE._replace(example="2"),
    "layers": POSITIVE._replace(example="24"),
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

# Table -> its keys, except those of tables in it. The table at the top of a file is "".
FIELDS = {"": TOP, **TABLES, "rules": RULE, "phases": PHASE}
# Table -> the tables in it.
_INSIDE = {"": tuple(FIELDS)[1:], "phases": ("rules",)}

_PHASE_EXAMPLE = '    [[phases]]\n    from_step = 9000\n    matmul = "default"'
_RULE_EXAMPLE = '    [[rules]]\n    path = "**/lm_head"\n    output_dtype = "float32"'


def fix_line(table: str, key: str, value: str = "") -> str:
    """Returns an indented TOML line that sets a key to a value, or to its example.

    Args:
      table: name of the table; "" for the top of the file.
      key: key of the table.
      value: the value as TOML text.
    """
    return f"    {key} = {value or FIELDS[table][key].example}"


def _table_example(table: str, above: str = "") -> str:
    """Returns indented TOML lines: the header of a table, and its first key."""
    if table in ("rules", "phases"):
        example = _RULE_EXAMPLE if table == "rules" else _PHASE_EXAMPLE
        return example.replace("[[", f"[[{above}." if above else "[[")
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
    top = Setting(document.table, document)
    settings: Settings = {name: {} for name in ("", *TABLES)}
    for name in filter(TABLES.__contains__, document.table):
        table = top.below(name)
        if not isinstance(table.value, dict):
            raise RecipeError(
                f"{table.location}: {_toml.describe(table.value)} is not a table. Write:\n"
                + _table_example(name)
            )
        settings[name] = _read_table(table)
    settings[""] = _read_table(top)
    rules = _read_rules(top) if "rules" in document.table else ()
    phases = _read_phases(top) if "phases" in document.table else ()
    return Contents(document, settings, rules, phases)


def _list_of_tables(above: Setting, name: str) -> list[Setting]:
    if name not in above.value:
        return []
    tables = above.below(name)
    is_list = isinstance(tables.value, list)
    if not is_list or not all(isinstance(each, dict) for each in tables.value):
        raise RecipeError(
            f"{tables.location}: {_toml.describe(tables.value)} is not a list of tables. Start "
            f"each of them with a header:\n{_table_example(name, 'phases' * bool(above.key))}"
        )
    return [tables.below(number) for number in range(len(tables.value))]


def _read_rules(above: Setting) -> tuple[Rule, ...]:
    return tuple(map(_read_rule, _list_of_tables(above, "rules")))


def _read_phases(top: Setting) -> tuple[Phase, ...]:
    tables = _list_of_tables(top, "phases")
    phases = tuple(map(_read_phase, tables))
    for table, (before, after) in zip(tables[1:], itertools.pairwise(phases), strict=True):
        if after.from_step <= before.from_step:
            raise RecipeError(
                f"{table.below('from_step').location}: from_step = {after.from_step} follows "
                f"from_step = {before.from_step}. Sort the phases: each one begins after the one "
                f"before it, such as\n    from_step = {before.from_step + 1}"
            )
    return phases


def _read_phase(table: Setting) -> Phase:
    rules = _read_rules(table)
    settings = _read_table(table)
    try:
        return _phases.read_phase({k: setting.value for k, setting in settings.items()}, rules)
    except RecipeError as error:
        raise RecipeError(f"{table.location}: {error}") from None


def _read_table(table: Setting) -> dict[str, Setting]:
    """Returns key -> setting of one table, without the tables in it."""
    kind = next((part for part in reversed(table.key) if isinstance(part, str)), "")
    settings: dict[str, Setting] = {}
    inside = _INSIDE.get(kind, ())
    for key in [key for key in table.value if key not in inside]:
        # In policies and rules, `c` is short for `compute_dtype`.
        name = _policy.FIELD_KEYS.get(key, key) if kind in ("policy", "rules", "phases") else key
        setting = table.below(key)
        if kind in ("policy", "rules") and name in _FORMER and setting.value is False:
            continue
        if name not in FIELDS[kind]:
            raise _unknown_key(setting, kind)
        if name in settings:
            raise RecipeError(
                f"{setting.location}: {name} is set twice, by its full name and by a "
                "short form. Delete one of the two."
            )
        try:
            settings[name] = setting._replace(value=FIELDS[kind][name].read(setting.value))
        except ValueError as error:
            message = str(error).removesuffix(".")
            raise RecipeError(
                f"{setting.location}: {message}. Write, for example:\n{fix_line(kind, name)}"
            ) from None
    return settings


def _read_rule(table: Setting) -> Rule:
    fields = _read_table(table)
    try:
        return Rule(**{name: setting.value for name, setting in fields.items()})
    except RuleError as error:
        located = table.below("path") if str(error).startswith("Pattern ") else table
        example = _table_example("rules", "phases" * (table.key[0] == "phases"))
        raise RecipeError(f"{located.location}: {error} In TOML:\n{example}") from None


def _unknown_key(setting: Setting, table: str) -> RecipeError:
    """Returns the error for a key that its table does not have."""
    name, location = str(setting.key[-1]), setting.location
    if table == "ops":
        error = unknown_op(name, DEFAULT_OPS)
        return RecipeError(f"{location}: {error} In TOML:\n{fix_line('ops', 'exp')}")
    full = _policy.FIELD_KEYS.get(name, name)
    home = next((other for other, fields in TABLES.items() if full in fields), "")
    if home and not table:
        text = "" if isinstance(setting.value, dict) else _toml.describe(setting.value)
        return RecipeError(
            f"{location}: {name!r} is a key of [{home}]. Move it there:\n    [{home}]\n"
            + fix_line(home, full, text)
        )
    inside = _INSIDE.get(table, ())
    allowed = (*FIELDS[table], *inside)
    hint = _core.did_you_mean(name, allowed)
    nearest = hint.split("'")[1] if hint else next(iter(allowed))
    fix = _table_example(nearest, table) if nearest in inside else fix_line(table, nearest)
    return RecipeError(
        f"{location}: unknown key {name!r}.{hint} Allowed: {', '.join(allowed)}. Write, for "
        f"example:\n{fix}"
    )
