"""Rule and PolicyMap: which policy decides for which module and parameter."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp._core._dtypes import DTYPE_NAMES, bits, canonical_dtype, is_16bit, short_name
from jaxmp._policies._inputs import inputs_text, methods_of, own_inputs
from jaxmp._policies._policy import (
    FIELD_NAMES,
    Policy,
    canonical_fields,
    get_policy,
    is_policy,
    policy_fields,
    renamed_attention,
    split_pairs,
    window_text,
)
from jaxmp._policies._recipe_names import shipped
from jaxmp.errors import PolicyError, RuleError, nearest

# ---------------------------------------------------------------------------
# Patterns
# ---------------------------------------------------------------------------

_SEGMENT_WILDCARDS = {"*": "[^/:]*", "?": "[^/:]"}


def _glob(segment: str) -> str:
    if segment == "*":
        return "[^/:]+"  # no name is empty: the root has none
    return "".join(_SEGMENT_WILDCARDS.get(char, re.escape(char)) for char in segment)


def _fix(pattern: str, problem: str, fix: str) -> RuleError:
    error = RuleError(f"Pattern {pattern!r} {problem}; write {fix!r}.")
    error.fix = fix
    return error


@functools.lru_cache(maxsize=4096)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression that a path pattern stands for; it must match a whole path.

    `a` is a alone, `a/*` its children, `a/**` a and all below, `**/a` every a, `''` the root,
    `a:kernel` one parameter; `re:` begins a regular expression.

    Raises:
      RuleError: quoting the pattern and naming a pattern that would be read.
    """
    if pattern.startswith("re:"):
        return _compile_regex(pattern)
    module, colon, parameter = pattern.partition(":")
    segments = module.split("/") if module else []
    if colon and (not parameter or ":" in parameter or "/" in parameter):
        raise _fix(pattern, "names no single parameter after ':'", _repaired(pattern))
    if not all(segments):
        problem = "has an empty path segment (paths have no leading, trailing or double '/')"
        raise _fix(pattern, problem, _repaired(pattern))
    for segment in segments:
        if "**" in segment and segment != "**":
            raise _fix(pattern, f"has '**' inside the segment {segment!r}", _repaired(pattern))
    return re.compile(_module_regex(segments) + (f":{_glob(parameter)}" if colon else ""))


def _compile_regex(pattern: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            # Python warns of what later versions will read in another way.
            warnings.simplefilter("error")
            return re.compile(pattern[3:])
    except (re.error, OverflowError, RecursionError, Warning) as error:
        problem = f"is not a regular expression ({error})"
        raise _fix(pattern, problem, "re:" + re.escape(pattern[3:])) from None


# What a colon may stand in without being one that matches: an escape, a set, `(?:` and its kin.
_REGEX_SYNTAX = re.compile(r"\\[^:]|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[^:)=!<>]*:")


def _repaired(pattern: str) -> str:
    """The nearest pattern that can be read."""
    module, colon, parameter = pattern.partition(":")
    segments = [
        re.sub(r"\*\*+", "*", segment) if segment != "**" else segment
        for segment in module.split("/")
        if segment
    ]
    return "/".join(segments) + colon + (re.sub("[:/]", "", parameter) or "kernel" * len(colon))


def _module_regex(segments: list[str]) -> str:
    """`**` stands for any number of segments, none included."""
    if all(segment == "**" for segment in segments):
        return "[^:]*" if segments else ""
    regex, pending = "", False  # pending: a separator is owed before the next segment
    for index, segment in enumerate(segments):
        last = index == len(segments) - 1
        if segment != "**":
            regex += ("/" if pending else "") + _glob(segment)
            pending = True
        elif last:
            regex += "(?:/[^:]+)?"
        elif pending:
            regex += "(?:/[^:/]+)*"
        elif not regex:
            regex += "(?:[^:/]+/)*"
    return regex


def module_type_names(module_type: Any) -> tuple[str, ...]:
    """Class names that a type rule may match: the class's own and its base classes'."""
    if module_type is None:
        return ()
    if isinstance(module_type, str):
        return (module_type,)
    return _mro_names(module_type)


@functools.lru_cache(maxsize=4096)
def _mro_names(module_type: type) -> tuple[str, ...]:
    return tuple(cls.__name__ for cls in module_type.__mro__ if cls is not object)


def path_string(path: str | Iterable[Any]) -> str:
    """`("block", 0)` -> `"block/0"`; strings pass."""
    return path if isinstance(path, str) else "/".join(map(str, path))


# ---------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Rule:
    """Which modules, and what a policy says of them.

    Args:
      path: a pattern over the `/`-joined module path without the root: `*` within a segment,
        `**` over segments, `re:` for a regular expression, `''` for the root, `path:name` for one
        parameter. None: any path.
      policy: the policy's fields as a string or dict, such as `"c=f32"`; or a whole policy: a
        `Policy`, `"mixed_bfloat16"` or `"bf16-true"`. The bare name of a dtype or recipe is
        refused, because `"bf16"` could mean either. None: the fields are given by keyword.
      module_type: a class, or a class name (`*` allowed), its base classes included. The rule
        covers modules of that type, not their children. None: any type.
      param_dtype, compute_dtype, output_dtype, matmul, implementation, mask, window,
        respect_explicit, cast_float64, keep_inputs: the fields of `Policy`. None: the default's; a
        rule that names a mask and no window declares a mask without a window.
      why: the reason, printed by `explain` and `jaxmp show`.
      required: refuse a model in which the rule matches nothing.
      subtree: a rule by type covers everything below those modules too.

    Raises:
      RuleError: if the rule selects nothing, says nothing, sets `param_dtype` by type, or has the
        bare name of a dtype or recipe for its policy.
      PolicyError: if a dtype or setting is unknown.

    Example:
      >>> Rule("lm_head", "o=f32", why="the loss reads FP32 logits").output_dtype
      dtype('float32')
    """

    path: str | None = None
    policy: dataclasses.InitVar[Any] = None
    module_type: Any = None
    param_dtype: Any = dataclasses.field(default=None, kw_only=True)
    compute_dtype: Any = dataclasses.field(default=None, kw_only=True)
    output_dtype: Any = dataclasses.field(default=None, kw_only=True)
    matmul: str | None = dataclasses.field(default=None, kw_only=True)
    implementation: str | None = dataclasses.field(default=None, kw_only=True)
    mask: str | None = dataclasses.field(default=None, kw_only=True)
    window: Any = dataclasses.field(default=None, kw_only=True)
    respect_explicit: bool | None = dataclasses.field(default=None, kw_only=True)
    cast_float64: bool | None = dataclasses.field(default=None, kw_only=True)
    keep_inputs: Any = dataclasses.field(default=None, kw_only=True)
    why: str = dataclasses.field(default="", kw_only=True)
    required: bool = dataclasses.field(default=True, kw_only=True)
    subtree: bool = dataclasses.field(default=False, kw_only=True)
    # The name of `implementation` in the development versions of 0.1.0.
    attention: dataclasses.InitVar[Any] = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self, policy: Any, attention: Any) -> None:
        if attention is not None:
            code = f"Rule({_repr_selector(self)}, implementation={{!r}})"
            raise renamed_attention(attention, code)
        if isinstance(self.module_type, type):
            object.__setattr__(self, "module_type", self.module_type.__name__)
        _check_kinds(self)
        given = canonical_fields(self.fields, within=f"Rule({_repr_selector(self)})")
        fields = {**_fields_of(policy, self), **given}
        for name in FIELD_NAMES:
            object.__setattr__(self, name, fields.get(name))
        _check_selector(self)
        _check_fields(self)

    @property
    def fields(self) -> dict[str, Any]:
        """The policy's fields that this rule sets."""
        return {
            name: getattr(self, name) for name in FIELD_NAMES if getattr(self, name) is not None
        }

    @property
    def addresses_parameter(self) -> bool:
        """Whether the rule is about one parameter (`path:name`), not about modules."""
        if self.path is None:
            return False
        if self.path.startswith("re:"):
            return ":" in _REGEX_SYNTAX.sub("", self.path[3:])
        return ":" in self.path

    def matches(self, path: str, module_type: Any = None, ancestors: Iterable[Any] = ()) -> bool:
        """Whether the rule is about the module at `path`, or about the parameter `path:name`.

        Args:
          path: the module path, or `module/path:name`.
          module_type: the module's class or class name, if known.
          ancestors: classes of the modules above it; rules with `subtree` look there.
        """
        if self.path is not None and not compile_pattern(self.path).fullmatch(path):
            return False
        if self.module_type is None:
            return True
        types = [module_type, *ancestors] if self.subtree else [module_type]
        pattern = re.compile(_glob(self.module_type))
        return any(pattern.fullmatch(name) for kind in types for name in module_type_names(kind))

    def __repr__(self) -> str:
        kept = ("keep_inputs", "window")
        fields = {k: v if k in kept else str(v) for k, v in self.fields.items()}
        parts = [_repr_selector(self), *(f"{k}={v!r}" for k, v in fields.items())]
        parts += [f"why={self.why!r}"] * bool(self.why) + ["required=False"] * (not self.required)
        return f"Rule({', '.join(parts + ['subtree=True'] * self.subtree)})"


# What each argument must be, and a rule in which it is right.
_KINDS: dict[str, tuple[Any, str, str]] = {
    "path": ((str, type(None)), "a string", "Rule('a/**', 'c=f32')"),
    "module_type": (
        (str, type(None)),
        "a class or the name of one",
        "Rule(module_type='LayerNorm', compute_dtype='f32')",
    ),
    "why": (str, "a string", "Rule('head', 'c=f32', why='the loss reads it')"),
    "required": (bool, "a bool", "Rule('head', 'c=f32', required=False)"),
    "subtree": (
        bool,
        "a bool",
        "Rule(module_type='MoE', compute_dtype='f32', subtree=True)",
    ),
}


def _check_kinds(rule: Rule) -> None:
    for name, (kind, words, right) in _KINDS.items():
        value = getattr(rule, name)
        if not isinstance(value, kind):
            raise RuleError(f"Rule({name}={value!r}): {name} must be {words}; for example {right}.")


def _check_selector(rule: Rule) -> None:
    if rule.path is None and rule.module_type is None:
        raise RuleError(
            "A rule needs a path, a module_type or both to say what it is about; "
            f"for example Rule('**', {_fields_string(rule) or 'c=f32'!r})."
        )
    if rule.path is not None:
        compile_pattern(rule.path)
    if rule.addresses_parameter and rule.module_type is not None:
        raise RuleError(
            f"Rule({_repr_selector(rule)}) names one parameter and a module type; a parameter has "
            f"no type. Leave module_type out: Rule({rule.path!r}, 'c=f32')."
        )
    if rule.subtree and rule.module_type is None:
        raise RuleError(
            f"Rule({_repr_selector(rule)}, subtree=True): subtree goes with module_type. For a "
            f"path write Rule({_below(rule.path or '')!r}, {_fields_string(rule) or 'c=f32'!r})."
        )


def _check_fields(rule: Rule) -> None:
    selector = _repr_selector(rule)
    if not rule.fields:
        raise RuleError(
            f"Rule({selector}) sets no field of the policy; for example "
            f"Rule({selector}, policy='c=f32')."
        )
    if rule.module_type is not None and rule.param_dtype is not None:
        raise RuleError(
            f"Rule({selector}) sets param_dtype by module type, but a parameter tree knows paths "
            f"only. Name the parameters by path: Rule({rule.path or '**/NAME'!r}, "
            f"'p={short_name(rule.param_dtype)}')."
        )


def _below(path: str) -> str:
    """The pattern for `path` and all below it."""
    if path.startswith("re:") or ":" in path or path.endswith("**"):
        return path
    return f"{path}/**" if path else "**"


def _fields_string(rule: Rule) -> str:
    return ",".join(f"{name}={field_text(name, value)}" for name, value in rule.fields.items())


def field_text(name: str, value: Any) -> str:
    """The value of a policy's field as a policy string writes it."""
    if name.endswith("_dtype"):
        return short_name(value)
    if name == "window":
        return window_text(value)
    return inputs_text(value) if name == "keep_inputs" else str(value).lower()


# `policy` is read once, when the rule is made; `dataclasses.replace` must not find a leftover.
Rule.policy = None  # type: ignore[assignment]


def _repr_selector(rule: Rule) -> str:
    parts = [] if rule.path is None else [repr(rule.path)]
    return ", ".join(
        parts + ([f"module_type={rule.module_type!r}"] if rule.module_type is not None else [])
    )


def _fields_of(policy: Any, rule: Rule) -> dict[str, Any]:
    if policy is None:
        return {}
    if isinstance(policy, Mapping):
        return policy_fields(list(policy.items()), repr(policy))
    if isinstance(policy, str) and "=" in policy:
        return policy_fields(split_pairs(policy), policy)
    _refuse_bare_name(policy, rule)
    full = get_policy(policy)
    return {name: getattr(full, name) for name in FIELD_NAMES}


def _refuse_bare_name(policy: Any, rule: Rule) -> None:
    """Refuses a dtype or the name of a recipe: `Rule("head", "bf16")` could mean either."""
    where = f"Rule({_repr_selector(rule)})"
    name = policy.strip().lower() if isinstance(policy, str) else None
    if name in DTYPE_NAMES or (name is None and not is_policy(policy)):
        dtype = canonical_dtype(policy, within=where)
        short = short_name(dtype)
        raise RuleError(
            f"{where}: policy {policy!r} is ambiguous. Use 'c={short}' to compute in {dtype.name}, "
            f"or 'p={short},c={short},o={short}' to set all three dtypes."
        )
    if name in shipped():
        raise RuleError(
            f"{where}: policy {policy!r} is the name of a recipe, and a rule sets the fields of a "
            "policy. Use 'c=bf16' to compute in bfloat16, 'p=bf16,c=bf16,o=bf16' to set all three "
            "dtypes, or 'matmul=tf32' to set the precision of matmuls."
        )


def _merged(default: Policy, rule: Rule) -> Policy:
    """The rule's fields; what it leaves out comes from the default.

    A rule that asks for FP32 is not about FP8: it would be an island whose matmuls have 3 bits of
    mantissa. It gets FP8 only if it says so itself.
    """
    fields = rule.fields
    if rule.mask is not None and rule.window is None:
        fields["window"] = None  # that of the default describes another mask
    policy = dataclasses.replace(default, **fields)
    islands = rule.compute_dtype is not None and bits(policy.compute_dtype) > 16
    if islands and rule.matmul is None and policy.matmul == "fp8":
        return dataclasses.replace(policy, matmul="default")
    return policy


def _check_window(default: Policy, rule: Rule) -> None:
    """Refuses a rule whose window describes a mask that nothing declares."""
    if rule.window is not None:
        try:
            _merged(default, rule)
        except PolicyError as error:
            raise RuleError(f"{rule!r}: {error}") from None


def _with_own_inputs(policy: Policy, named: Any, module_type: Any) -> Policy:
    """`policy`, whose `keep_inputs` lists arguments that a module of this type has.

    Args:
      policy: of a module, with the default's `keep_inputs` or those of its rule.
      named: those of its rule; None: it names none.
      module_type: a class; of another type only the arguments that a rule names are known.
    """
    if not policy.keep_inputs:
        return policy
    if isinstance(module_type, type):
        kept = own_inputs(module_type, policy.keep_inputs)
    else:
        kept = named or ()
    return dataclasses.replace(policy, keep_inputs=kept)


# ---------------------------------------------------------------------------
# Maps
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Decision:
    """Which rule decided for one path."""

    path: str
    module_type: str
    policy: Policy
    # Place of the rule in the map; None: no rule matched, the default decided.
    rule: int | None
    why: str


class MaskRow(NamedTuple):
    """An attention layer whose mask is declared."""

    path: str
    # The keys and values of the declaration.
    declared: str
    # Whether the mask that the model passes was compared with it; if not, it depends on values
    # that were not passed.
    is_checked: bool

    def __str__(self) -> str:
        result = "agrees" if self.is_checked else "not checked: pass arrays instead of shapes"
        return f"{self.path or '(root)'}: {self.declared} ({result})"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Decision for each module path of a model, as `PolicyMap.explain` returns it.

    Attributes:
      rows: a `Decision` for each path: its policy, and the index and reason of the deciding rule.
      unused: the rules that decide for no path.
      low_precision_share: the share of the model's matmul FLOPs, from 0 to 1, with both operands in
        16 bits or fewer; None if it was not counted, or if the model has no matmul.
      masks: the attention layers whose masks are declared, and the result of the comparison.
    """

    rows: tuple[Decision, ...]
    unused: tuple[Rule, ...]
    low_precision_share: float | None = None
    masks: tuple[MaskRow, ...] = ()

    def __str__(self) -> str:
        header = ("path", "type", "policy", "rule", "why")
        table = [header] + [
            (
                row.path or "(root)",
                row.module_type,
                str(row.policy),
                _rule_number(row.rule),
                row.why,
            )
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in table) for column in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
        lines += [f"unused: {rule!r}" for rule in self.unused]
        lines += [f"mask of {row}" for row in self.masks]
        return "\n".join([*self.summary, *lines])

    @property
    def summary(self) -> list[str]:
        """A line about the share of FLOPs, and the remedy if it is low; empty if it is not known.

        A low share is expected where the policies or rules ask for FP32.
        """
        share = self.low_precision_share
        if share is None:
            return []
        lines = [f"{share:.1%} of the matmul FLOPs run in 16 bits or fewer."]
        if share < 0.5 and self.rows and is_16bit(self.rows[0].policy.compute_dtype):
            lines.append(
                "Layers that cast their operands themselves do not follow the recipe. Apply it to "
                "each operation: loss_fn = jaxmp.autocast(loss_fn, recipe)."
            )
        return lines


def _rule_number(rule: int | None) -> str:
    return "default" if rule is None else str(rule + 1)


# The function that reads the default of a `PolicyMap`. It reads recipe files, which need the rules
# of this module, so it is defined in a higher module and registers itself here.
_reader: list[Callable[[Any], PolicyMap]] = []


def reads_policies(fn: Callable[[Any], PolicyMap]) -> Callable[[Any], PolicyMap]:
    """Registers the function that makes a `PolicyMap` of anything that names policies."""
    _reader[:] = [fn]
    return fn


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PolicyMap:
    """A default policy and ordered rules; the first rule that matches decides alone.

    Fields that the deciding rule leaves out come from the default.

    Args:
      default: a recipe's name or file, a policy string, a `Policy`, or anything else that names
        policies. The name of a recipe means the recipe, here as in every `policies=` argument:
        `PolicyMap("bf16", rules)` has the default policy of that recipe, and its rules after
        `rules`. `PolicyMap("bfloat16")` sets all three dtypes.
      rules: rules in order of precedence.
      fp8: how modules with `matmul = "fp8"` are scaled: an object of `jaxmp.fp8` such as
        `CurrentScaling()`; None: that of the default, or `CurrentScaling()` where it has none.

    Example:
      >>> policies = PolicyMap("p=f32,c=bf16,o=f32", [Rule("head", "c=f32")])
      >>> str(policies.resolve("head"))
      'p=f32,c=f32,o=f32'
      >>> str(policies.resolve("body/dense"))
      'p=f32,c=bf16,o=f32'
    """

    default: Policy
    rules: tuple[Rule, ...] = ()
    fp8: Any = None
    _cache: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        given: Any = self.rules
        rules = tuple(given) if isinstance(given, Iterable) else (given,)
        for rule in rules:
            if not isinstance(rule, Rule):
                raise RuleError(
                    f"{rule!r} is not a Rule; for example "
                    "PolicyMap('bf16', [Rule('head', 'c=f32')])."
                )
        # A scaling is known by what it says of itself: its package stands above this module.
        if self.fp8 is not None and not hasattr(self.fp8, "is_stateful"):
            raise PolicyError(
                f"fp8={self.fp8!r} is no scaling. A PolicyMap takes an object, for example "
                "PolicyMap('p=f32,c=bf16,o=f32,matmul=fp8', fp8=jaxmp.fp8.CurrentScaling()); a "
                "recipe takes a name too: recipe.replace(fp8='current')."
            )
        if not isinstance(self.default, Policy):
            base = _reader[0](self.default)
            rules += base.rules
            object.__setattr__(self, "default", base.default)
            object.__setattr__(self, "fp8", base.fp8 if self.fp8 is None else self.fp8)
        for rule in rules:
            _check_window(self.default, rule)
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "_hash", hash((self.default, rules, self.fp8)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def names_fp8(self) -> bool:
        """Whether the default or any rule says `matmul = "fp8"`."""
        return any(holder.matmul == "fp8" for holder in (self.default, *self.rules))

    @functools.cached_property
    def restores_inputs(self) -> bool:
        """Whether some modules cast inputs to 16 bits and others receive such inputs uncast."""
        holders = (self.default, *self.rules)
        dtypes = [holder.compute_dtype for holder in holders if holder.compute_dtype is not None]
        widths = set(map(bits, dtypes))
        return min(widths) <= 16 and (
            max(widths) > 16 or any(holder.keep_inputs for holder in holders)
        )

    def __reduce__(self) -> Any:
        return PolicyMap, (self.default, self.rules, self.fp8)

    def resolve(
        self, path: str | Iterable[Any], module_type: Any = None, ancestors: tuple[Any, ...] = ()
    ) -> Policy:
        """The policy of the module at `path`, or of the parameter `module/path:name`.

        A parameter takes the policy of its module unless a `path:name` rule stands first.
        `keep_inputs` of the result lists only arguments that methods of the class have; without a
        class, only those that the deciding rule names.

        Args:
          path: `/`-joined or a tuple of names; `''` is the root.
          module_type: the module's class or class name; None: rules by type do not match.
          ancestors: classes of the modules above it, for rules with `subtree`.
        """
        return self._decide(path_string(path), module_type, ancestors)[1]

    def deciding_rule(
        self, path: str | Iterable[Any], module_type: Any = None, ancestors: tuple[Any, ...] = ()
    ) -> Rule | None:
        """The rule that decides for `path`; None where the default does."""
        index = self._decide(path_string(path), module_type, ancestors)[0]
        return None if index is None else self.rules[index]

    def _decide(
        self, path: str, module_type: Any, ancestors: tuple[Any, ...]
    ) -> tuple[int | None, Policy]:
        key = (path, module_type, ancestors)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._search(path, module_type, ancestors)
        return found

    def _search(
        self, path: str, module_type: Any, ancestors: tuple[Any, ...]
    ) -> tuple[int | None, Policy]:
        owner = path.partition(":")[0]
        for index, rule in enumerate(self.rules):
            if rule.matches(path if rule.addresses_parameter else owner, module_type, ancestors):
                policy = _merged(self.default, rule)
                return index, _with_own_inputs(policy, rule.keep_inputs, module_type)
        return None, _with_own_inputs(self.default, None, module_type)

    def storage_dtype(self, names: tuple[str, ...], dtype: Any) -> Any:
        """The dtype in which the parameter at the tree path `names`, now `dtype`, is stored."""
        from_names = f"{'/'.join(names[:-1])}:{names[-1]}" if names else ""
        return self.resolve(from_names).param_dtype

    def explain(self, paths: Iterable[Any] | Mapping[Any, Any]) -> Explanation:
        """Which rule decides for each path, and which rules decide nothing.

        Args:
          paths: module paths, or a mapping from module path to the module's class.
        """
        types = dict(_typed(paths))
        rows = []
        for path, module_type in types.items():
            owner, ancestors = _lineage(path, types)
            index, policy = self._decide(path, owner, ancestors)
            why = "" if index is None else self.rules[index].why
            name = (module_type_names(module_type) or ("",))[0]
            rows.append(Decision(path, name, policy, index, why))
        deciding = {row.rule for row in rows}
        unused = tuple(rule for index, rule in enumerate(self.rules) if index not in deciding)
        return Explanation(tuple(rows), unused)

    def explain_modules(self, paths: Mapping[str, Any]) -> Explanation:
        """`explain` for all paths of a model: a row per module, and per parameter with a rule.

        Args:
          paths: module path -> class, and `path:name` -> None for every parameter.
        """
        found = self.explain(paths)
        rows = tuple(row for row in found.rows if ":" not in row.path or self._names(row))
        return Explanation(rows, found.unused)

    def _names(self, row: Decision) -> bool:
        return row.rule is not None and self.rules[row.rule].addresses_parameter

    def unused(self, paths: Iterable[Any] | Mapping[Any, Any]) -> tuple[Rule, ...]:
        """The rules that decide for none of `paths`."""
        return self.explain(paths).unused

    def check_required(
        self, paths: Iterable[Any] | Mapping[Any, Any], rules: Iterable[Rule] | None = None
    ) -> None:
        """Refuses required rules that match none of `paths`.

        Args:
          paths: every module path and `path:name` there is, or a mapping to classes.
          rules: the rules to judge; None: all of the map's.

        Raises:
          RuleError: naming each such rule and the nearest paths or types.
        """
        typed = _typed(paths)
        for rule in self.rules if rules is None else rules:
            if rule.required and not any(
                rule.matches(path, kind)
                for path, kind in typed
                if rule.addresses_parameter == (":" in path)
            ):
                raise _matched_nothing(rule, typed)
            if rule.required and rule.keep_inputs:
                _check_inputs(rule, typed)


def named_dtypes(policies: PolicyMap) -> Iterator[tuple[str, str, np.dtype]]:
    """Who names it, as which field, which dtype: for the default policy and every rule."""
    holders: list[tuple[str, Any]] = [("the default policy", policies.default)]
    for who, holder in holders + [(repr(rule), rule) for rule in policies.rules]:
        for field in ("param_dtype", "compute_dtype", "output_dtype"):
            if getattr(holder, field) is not None:
                yield who, field, getattr(holder, field)


def check_module_dtypes(policies: PolicyMap) -> None:
    """Refuses policies that no module can follow.

    Raises:
      PolicyError: if a module would store or compute in less than 16 bits.
    """
    for who, field, dtype in named_dtypes(policies):
        if bits(dtype) < 16:
            raise PolicyError(
                f"{field}={short_name(dtype)} in {who}: a module cannot store or compute in less "
                "than 16 bits; FP8 is for single products. Keep 16 bits here, such as "
                "apply_policy(model, 'p=f32,c=bf16,o=f32')."
            )


def _check_inputs(rule: Rule, typed: list[tuple[str, Any]]) -> None:
    """Refuses argument names and positions that no module has for which the rule is made."""
    types = dict(typed)
    classes = [kind for path, kind in typed if rule.matches(path, kind, _lineage(path, types)[1])]
    if not all(isinstance(cls, type) for cls in classes):
        return
    accepted = {name for cls in classes for name in own_inputs(cls, rule.keep_inputs)}
    for name in rule.keep_inputs:
        if name not in accepted:
            raise _unknown_input(rule, name, classes)


def _unknown_input(rule: Rule, name: str | int, classes: list[type]) -> RuleError:
    calls = {cls.__name__: methods_of(cls).get("__call__") for cls in classes}
    taken = {cls: (*call.positional, *call.keyword_only) for cls, call in calls.items() if call}
    shown = "; ".join(f"{cls}({', '.join(names)})" for cls, names in list(taken.items())[:5])
    known = [other for names in taken.values() for other in names]
    close = (nearest(name, known) if isinstance(name, str) else []) or known
    what = f"position {name}" if isinstance(name, int) else repr(name)
    fix = f" Write keep_inputs=[{close[0]!r}], or" if close else ""
    return RuleError(
        f"{rule!r}: keep_inputs names {what}, and no module that the rule matches has such an "
        f"argument. They are called as {shown or 'nothing'}.{fix or ' Leave it out, or'} let the "
        "rule match nothing: required=False."
    )


def _typed(paths: Iterable[Any] | Mapping[Any, Any]) -> list[tuple[str, Any]]:
    if isinstance(paths, Mapping):
        return [(path_string(path), kind) for path, kind in paths.items()]
    return [(path_string(path), None) for path in paths]


def _lineage(path: str, types: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The class of the module that is, or owns, `path`; and those of the modules above it."""
    owner = path.partition(":")[0]
    names = owner.split("/") if owner else []
    above = ("/".join(names[:length]) for length in range(len(names)))
    return types.get(owner), tuple(types[p] for p in above if types.get(p) is not None)


def _matched_nothing(rule: Rule, typed: list[tuple[str, Any]]) -> RuleError:
    known = sorted({path for path, _ in typed if rule.addresses_parameter == (":" in path)})
    types = sorted({name for _, kind in typed for name in module_type_names(kind)})
    hints = []
    if rule.path is not None:
        close = nearest(rule.path.replace("**/", "").replace("/**", ""), known) or known[:5]
        hints.append("nearest paths: " + (", ".join(repr(path) for path in close) or "none"))
    if rule.module_type is not None:
        close = nearest(rule.module_type, types) or types[:5]
        hints.append("nearest types: " + (", ".join(close) or "none"))
    return RuleError(
        f"{rule!r} matched nothing in this model; {'; '.join(hints)}. "
        "Mend the rule, or let it match nothing: "
        f"{dataclasses.replace(rule, required=False)!r}."
    )
