"""Rules: a path pattern or module type, and the policy fields that it overrides."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxmp import _core
from jaxmp._core import DTypeLike
from jaxmp._policies import _patterns, _policy
from jaxmp._policies._patterns import ModuleType, Names
from jaxmp._policies._policy import FIELD_NAMES, Policy, PolicyLike
from jaxmp._policies._toml import shipped
from jaxmp.errors import PolicyError, RuleError

# Arguments that select layers of a numbered stack.
POSITION = ("first", "last", "layers")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Rule:
    """Selects modules or a parameter, and overrides fields of their policy.

    Args:
      path: pattern of the `/`-joined module path without the root. `*` matches within a segment,
        `**` across segments, `#` matches a number, `re:` starts a regular expression, `''` is the
        root, and `path:name` addresses one parameter. None: any path.
      policy: the fields to override, as a string or dict such as `"c=f32"`; or a whole policy: a
        `Policy` or a `jmp.Policy`. The bare name of a dtype or recipe is
        refused, because `"bf16"` could mean either. None: the fields are passed by keyword.
      module_type: a class, or a class name (`*` allowed); base classes match too. The rule applies
        to modules of that type, not to their children. None: any type.
      param_dtype, compute_dtype, output_dtype, matmul, implementation: fields of `Policy`. None:
        the default policy's value.
      mask, window: likewise. A rule with a mask and without a window declares no window.
      keep_inputs, forward_methods, fp32_outputs_below: likewise. A rule with
        `fp32_outputs_below=0` rounds the results of all its linear layers, also of a last one.
      first, last: the rule applies to so many layers at the start and at the end of a numbered
        stack, whose number is `#` in the path, like `num_layers_at_start_in_bf16` and
        `num_layers_at_end_in_bf16` of Megatron-LM (`first_last_layers_bf16`). None: none at this
        end.
      layers: number of layers in the stack, which `first` and `last` require. A model with another
        number is refused by `init`, `explain` and, in NNX, `wrap`.
      why: the reason, which `explain` and `jaxmp show` print.
      required: refuse a model in which the rule matches nothing.

    Raises:
      RuleError: if the rule selects nothing, overrides nothing, sets `param_dtype` by type, if its
        policy is the bare name of a dtype or recipe, or if `first`, `last`, `layers` and `#` do not
        belong together.
      PolicyError: if a dtype or setting is not valid.

    Example:
      >>> Rule("lm_head", "o=f32", why="the loss reads FP32 logits").output_dtype
      dtype('float32')
      >>> ends = Rule("block_#/**", first=1, last=2, layers=24, matmul="default")
      >>> [n for n in range(24) if ends.matches(f"block_{n}/mlp")]
      [0, 22, 23]
    """

    path: str | None
    module_type: str | None
    param_dtype: np.dtype | None
    compute_dtype: np.dtype | None
    output_dtype: np.dtype | None
    matmul: str | None
    implementation: str | None
    mask: str | None
    window: tuple[int, int] | None
    keep_inputs: Names | None
    forward_methods: tuple[str, ...] | None
    fp32_outputs_below: int | None
    first: int | None
    last: int | None
    layers: int | None
    why: str
    required: bool

    def __init__(
        self,
        path: str | None = None,
        policy: PolicyLike | None = None,
        module_type: type | str | None = None,
        *,
        param_dtype: DTypeLike | None = None,
        compute_dtype: DTypeLike | None = None,
        output_dtype: DTypeLike | None = None,
        matmul: str | None = None,
        implementation: str | None = None,
        mask: str | None = None,
        window: int | str | tuple[int, int] | None = None,
        keep_inputs: str | Iterable[str] | None = None,
        forward_methods: str | Iterable[str] | None = None,
        fp32_outputs_below: int | None = None,
        first: int | None = None,
        last: int | None = None,
        layers: int | None = None,
        why: str = "",
        required: bool = True,
    ) -> None:
        arguments = locals()
        if isinstance(module_type, type):
            module_type = module_type.__name__
        selector = {"path": path, "module_type": module_type}
        flags = {"why": why, "required": required, "first": first, "last": last, "layers": layers}
        for name, value in (selector | flags).items():
            _check_type(name, value)
            object.__setattr__(self, name, value)
        code = f"Rule({_selector_code(self)})"
        named = {k: arguments[k] for k in FIELD_NAMES if arguments[k] is not None}
        keywords = _policy.canonical_fields(named, within=code)
        fields = {**_policy_fields(policy, code), **keywords}
        vars(self).update({name: fields.get(name) for name in FIELD_NAMES})
        _check_selector(self)
        _check_fields(self)

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """Policy fields that the rule overrides, by name."""
        values = vars(self)
        return {name: values[name] for name in FIELD_NAMES if values[name] is not None}

    @functools.cached_property
    def addresses_parameter(self) -> bool:
        """True for a rule about one parameter, and False for a rule about modules."""
        return self.path is not None and _patterns.names_parameter(self.path)

    def matches(self, path: str, module_type: ModuleType = None) -> bool:
        """Returns True if the rule applies to the module or parameter at `path`.

        Args:
          path: the module path, or `module/path:name`.
          module_type: the module's class or class name, if known.
        """
        if self.path is not None:
            match = _patterns.compile_pattern(self.path).fullmatch(path)
            if not match:
                return False
            inner = range(self.first or 0, (self.layers or 0) - (self.last or 0))
            if self.layers is not None and int(match[1]) in inner:
                return False
        if self.module_type is None:
            return True
        pattern = _patterns.compile_type_pattern(self.module_type)
        return any(pattern.fullmatch(name) for name in _patterns.module_type_names(module_type))

    def __repr__(self) -> str:
        return rule_text(self)


# ---------------------------------------------------------------------------
# Formatting
# ---------------------------------------------------------------------------


def rule_text(rule: Rule, *, with_reason: bool = True) -> str:
    """Formats a rule as the code that creates it; `repr`, messages and reports use this form.

    Args:
      rule: the rule.
      with_reason: include `why`.

    Example:
      >>> rule_text(Rule("lm_head", "o=f32", why="the loss reads it"), with_reason=False)
      "Rule('lm_head', output_dtype='float32')"
    """
    quoted = (str, np.dtype)
    values = {k: str(v) if isinstance(v, quoted) else v for k, v in rule.fields.items()}
    parts = [_selector_code(rule), *(f"{name}={value!r}" for name, value in values.items())]
    parts += [f"why={rule.why!r}"] * (bool(rule.why) and with_reason)
    parts += ["required=False"] * (not rule.required)
    return f"Rule({', '.join(parts)})"


def _selector_code(rule: Rule) -> str:
    parts = [] if rule.path is None else [repr(rule.path)]
    for name in ("module_type", *POSITION):
        value = getattr(rule, name)
        parts += [] if value is None else [f"{name}={value!r}"]
    return ", ".join(parts)


# ---------------------------------------------------------------------------
# The fields of a default policy that a rule overrides
# ---------------------------------------------------------------------------


def override(default: Policy, rule: Rule) -> Policy:
    """Returns a policy with the fields of a rule; the fields that it omits come from `default`.

    A rule that names an output dtype applies it to layers with few outputs too. A rule that sets an
    FP32 compute dtype also disables FP8, unless it sets `matmul` itself:
    otherwise its matmuls would have 3 bits of mantissa.

    Raises:
      RuleError: if the rule has a window, and neither it nor the default declares a mask.
    """
    fields = dict(rule.fields)
    if rule.mask is not None and rule.window is None:
        fields["window"] = None  # the default's window belongs to another mask
    if rule.output_dtype is not None:
        fields.setdefault("fp32_outputs_below", 0)
    try:
        policy = dataclasses.replace(default, **fields)
    except PolicyError as error:
        raise RuleError(f"{rule!r}: {error}") from None
    is_wide = rule.compute_dtype is not None and _core.bits(policy.compute_dtype) > 16
    if is_wide and rule.matmul is None and policy.matmul == "fp8":
        return dataclasses.replace(policy, matmul="default")
    return policy


# ---------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------


def _check_type(name: str, value: object) -> None:
    required = bool if name == "required" else int if name in POSITION else str
    is_absent = value is None and name in ("path", "module_type", *POSITION)
    is_bool = required is int and isinstance(value, bool)
    if (not isinstance(value, required) or is_bool) and not is_absent:
        example = "'head', module_type='Dense', output_dtype='f32', why='the loss', required=False"
        if name in POSITION:
            example = "'block_#/**', first=1, last=2, layers=24, matmul='default'"
        raise RuleError(
            f"Rule({name}={value!r}): {name} must be of type {required.__name__}; for example "
            f"Rule({example})."
        )


def _policy_fields(policy: PolicyLike | None, code: str) -> dict[str, Any]:
    """Returns the canonical fields of the `policy` argument of `Rule`."""
    if policy is None:
        return {}
    if isinstance(policy, Mapping) or (isinstance(policy, str) and "=" in policy):
        return _policy.read_fields(policy)
    _refuse_bare_name(policy, code)
    whole = _policy.get_policy(policy)
    return {name: getattr(whole, name) for name in FIELD_NAMES}


def _refuse_bare_name(policy: PolicyLike, code: str) -> None:
    """Refuses the name of a dtype or a recipe: `Rule("head", "bf16")` could mean either."""
    name = policy.strip().lower() if isinstance(policy, str) else None
    if name in _core.DTYPE_NAMES or (name is None and not _policy.is_policy(policy)):
        dtype = _core.canonical_dtype(policy, within=code)
        short = _core.short_name(dtype)
        raise RuleError(
            f"{code}: policy {policy!r} is ambiguous. Use 'c={short}' to compute in {dtype.name}, "
            f"or 'p={short},c={short},o={short}' to set all three dtypes."
        )
    if name in shipped():
        raise RuleError(
            f"{code}: policy {policy!r} is the name of a recipe, and a rule sets the fields of a "
            "policy. Use 'c=bf16' to compute in bfloat16, 'p=bf16,c=bf16,o=bf16' to set all three "
            "dtypes, or 'matmul=tf32' to set the precision of matmuls."
        )


def _check_selector(rule: Rule) -> None:
    fields = _policy.fields_text(rule.fields) or "c=f32"
    if rule.path is None and rule.module_type is None:
        raise RuleError(
            f"A rule requires a path, a module_type or both; for example Rule('**', {fields!r})."
        )
    if rule.path is not None:
        _patterns.compile_pattern(rule.path)
    _check_position(rule)
    if rule.addresses_parameter and rule.module_type is not None:
        raise RuleError(
            f"Rule({_selector_code(rule)}) contains both a parameter and a module type, but "
            "parameters have no module type. Remove module_type: "
            f"Rule({rule.path!r}, 'c=f32')."
        )


def _check_position(rule: Rule) -> None:
    """Checks that `first`, `last` and `layers` belong to one `#` in the path."""
    first, last, layers = (getattr(rule, name) for name in POSITION)
    if first is last is layers is None:
        return
    numbers = 0 if (rule.path or "re:").startswith("re:") else (rule.path or "").count("#")
    ends = [n for n in (first, last) if n is not None]
    problems = {
        "the path must contain one '#', the number of a layer": numbers != 1,
        "first or last must be a positive number of layers": not ends or min(ends) < 1,
        "layers, the number of all layers of the stack, is missing": layers is None,
        f"first and last are {sum(ends)} layers, and layers = {layers}": sum(ends) > (layers or 0),
    }
    if any(problems.values()):
        problem = next(text for text, applies in problems.items() if applies)
        raise RuleError(
            f"Rule({_selector_code(rule)}): {problem}. Write, for example, "
            "Rule('block_#/**', first=1, last=2, layers=24, matmul='default')."
        )


def _check_fields(rule: Rule) -> None:
    selector = _selector_code(rule)
    if not rule.fields:
        raise RuleError(
            f"Rule({selector}) sets no field of the policy; for example "
            f"Rule({selector}, policy='c=f32')."
        )
    if rule.module_type is not None and rule.param_dtype is not None:
        raise RuleError(
            f"Rule({selector}) sets param_dtype by module type, but parameter trees contain only "
            f"paths. Select the parameters by path: Rule({rule.path or '**/NAME'!r}, "
            f"'p={_core.short_name(rule.param_dtype)}')."
        )
