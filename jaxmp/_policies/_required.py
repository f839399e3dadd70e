"""Checks of a policy map: dtypes of modules, rules that must match something; its explanation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from jaxmp import _core
from jaxmp._policies import _patterns
from jaxmp._policies._patterns import ModuleType
from jaxmp._policies._policy import Policy, with_fields
from jaxmp._policies._resolve import Policies, resolve_policy
from jaxmp._policies._rules import Rule
from jaxmp.errors import PolicyError, RuleError


@dataclasses.dataclass(frozen=True)
class PolicyDecision(_core.ExplanationRow):
    """Policy of one module or parameter.

    Attributes:
      path: module path, or `module/path:name`; "" for the root.
      module_type: name of the module's class; "" if it is not known.
      policy: the resolved policy.
      rule: index of the deciding rule in `PolicyMap.rules`; None: the default policy applies.
      why: the reason of the deciding rule.
      narrow: why a linear layer returns its FP32 sums, or a module does not cast an input; "" for
        other modules.
    """

    path: str
    module_type: str
    policy: Policy
    rule: int | None
    why: str
    narrow: str = ""

    def cells(self) -> tuple[str, ...]:
        number = "default" if self.rule is None else str(self.rule + 1)
        policy = str(with_fields(self.policy, fp32_outputs_below=0))
        reasons = "; ".join(filter(None, (self.why, self.narrow)))
        return self.path or "(root)", self.module_type, policy, number, reasons


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyExplanation(_core.ExplanationSection[PolicyDecision]):
    """Policies of a model's modules.

    Attributes:
      rows: a `PolicyDecision` for each path.
      paths: every path that a rule can match: modules, and `module/path:name` of parameters.
      unused: rules that decide for no path.
      low_precision_share: share of the model's matmul FLOPs, from 0 to 1, with both operands in 16
        bits or fewer; None if it was not counted, or if the model has no matmul.
    """

    columns: ClassVar = ("path", "type", "policy", "rule", "why")

    paths: tuple[str, ...] = ()
    unused: tuple[Rule, ...] = ()
    low_precision_share: float | None = None

    @property
    def summary(self) -> str:
        """Number of paths that follow a rule, the share of FLOPs, and a fix if that is low.

        A low share is expected where the policies or rules set FP32.
        """
        ruled = sum(row.rule is not None for row in self.rows)
        lines = [f"{ruled} of {len(self.rows)} paths follow a rule."]
        share = self.low_precision_share
        if share is not None:
            lines.append(f"{share:.1%} of the matmul FLOPs run in 16 bits or fewer.")
            if share < 0.5 and self.rows and _core.is_16bit(self.rows[0].policy.compute_dtype):
                lines.append(
                    "Layers that cast their operands themselves do not follow the recipe. Apply it "
                    "to each operation: loss_fn = jaxmp.autocast(loss_fn, recipe)."
                )
        return "\n".join(lines)

    def __str__(self) -> str:
        optional = sum(not rule.required for rule in self.unused)
        unused = [f"unused: {rule!r}" for rule in self.unused if rule.required]
        unused += [f"unused: {optional} optional rule{'s' * (optional > 1)}"] * (optional > 0)
        return "\n".join([super().__str__(), *unused])


# ---------------------------------------------------------------------------
# Dtypes
# ---------------------------------------------------------------------------


def named_dtypes(policies: Policies) -> Iterator[tuple[str, str, np.dtype]]:
    """Yields (owner, field, dtype) for each dtype of the default policy and of the rules."""
    owners: list[tuple[str, Policy | Rule]] = [("the default policy", policies.default)]
    owners += [(repr(rule), rule) for rule in policies.rules]
    for owner, holder in owners:
        for field in ("param_dtype", "compute_dtype", "output_dtype"):
            dtype = getattr(holder, field)
            if dtype is not None:
                yield owner, field, dtype


def check_module_dtypes(policies: Policies) -> None:
    """Checks that modules can store and compute in the dtypes of the policies.

    Raises:
      PolicyError: if a dtype has less than 16 bits.
    """
    for owner, field, dtype in named_dtypes(policies):
        if _core.bits(dtype) < 16:
            raise PolicyError(
                f"{field}={_core.short_name(dtype)} in {owner}: modules store and compute in 16 "
                "bits or more; FP8 is available for dots only (matmul=fp8). Use 16 bits here, such "
                "as load_recipe('p=f32,c=bf16,o=f32')."
            )


# ---------------------------------------------------------------------------
# Rules of a model
# ---------------------------------------------------------------------------


def explain_modules(
    policies: Policies,
    paths: Mapping[str, ModuleType],
    outputs: Mapping[str, int | None] = MappingProxyType({}),
    decisions: Mapping[str, str] = MappingProxyType({}),
    inputs: Mapping[str, str] = MappingProxyType({}),
    share: float | None = None,
) -> PolicyExplanation:
    """Explains all modules of a model, and the parameters that a `path:name` rule decides.

    Args:
      policies: the policies.
      paths: every module path and `path:name` of a model -> its class, or None.
      outputs: module path -> number of outputs of a linear layer, or None.
      decisions: path of a linear layer -> why its results are not rounded.
      inputs: path of a module -> why one of its arguments or parameters is not rounded.
      share: `PolicyExplanation.low_precision_share`.
    """
    rows, used = [], set()
    for path, module_type in paths.items():
        owner = paths.get(path.partition(":")[0])
        why = decisions.get(path, "")
        resolved = resolve_policy(policies, path, owner, outputs.get(path), is_decision=bool(why))
        not_fp8 = " without FP8" * (resolved.policy.matmul == "fp8" and resolved.scaling is None)
        is_widened = resolved.wide_output is not None and not resolved.rule_names_output
        widened = f"FP32 sums{not_fp8}: {why}" if why and is_widened else ""
        kept = f"FP32 inputs: {inputs[path]}" if path in inputs else ""
        rule = resolved.rule
        number = None if rule is None else policies.rules.index(rule)
        used.add(number)
        if ":" in path and (rule is None or not rule.addresses_parameter):
            continue
        row = PolicyDecision(
            path=path,
            module_type=(_patterns.module_type_names(module_type) or ("",))[0],
            policy=resolved.policy,
            rule=number,
            why="" if rule is None else rule.why,
            narrow=kept or resolved.narrow or widened,
        )
        rows.append(row)
    unused = tuple(rule for number, rule in enumerate(policies.rules) if number not in used)
    return PolicyExplanation(
        rows=tuple(rows), paths=tuple(paths), unused=unused, low_precision_share=share
    )


def check_required(
    policies: Policies, paths: Mapping[str, ModuleType], rules: Iterable[Rule] | None = None
) -> None:
    """Checks that each required rule matches one of `paths`.

    Args:
      policies: the policies.
      paths: every module path and `path:name` of a model -> its class, or None.
      rules: the rules to check; None: all rules of the map, and of other phases.

    Raises:
      RuleError: if a rule matches nothing, with the nearest paths or types; or if no matching
        module has an argument in its `keep_inputs`, or a method in its `forward_methods`.
    """
    for rule in policies.all_rules if rules is None else rules:
        if rule.layers is not None:
            _check_stack(rule, paths)
        if rule.required and not any(
            rule.matches(path, module_type)
            for path, module_type in paths.items()
            if rule.addresses_parameter == (":" in path)
        ):
            raise _no_match_error(rule, paths)
        if rule.required and (rule.keep_inputs or rule.forward_methods):
            _check_names(rule, paths)


def _no_match_error(rule: Rule, types: Mapping[str, ModuleType]) -> RuleError:
    paths = sorted(path for path in types if rule.addresses_parameter == (":" in path))
    names = sorted({name for item in types.values() for name in _patterns.module_type_names(item)})
    hints = []
    if rule.path is not None:
        close = _core.nearest(rule.path.replace("**/", "").replace("/**", ""), paths) or paths[:5]
        hints.append("nearest paths: " + (", ".join(map(repr, close)) or "none"))
    if rule.module_type is not None:
        close = _core.nearest(rule.module_type, names) or names[:5]
        hints.append("nearest types: " + (", ".join(close) or "none"))
    if rule.layers is not None:
        return _stack_error(rule, f"it matches no numbered layers; {'; '.join(hints)}")
    return RuleError(
        f"{rule!r} matched nothing in this model; {'; '.join(hints)}. "
        "Correct the rule, or allow it to match nothing: "
        f"{dataclasses.replace(rule, required=False)!r}."
    )


def _check_stack(rule: Rule, paths: Iterable[str]) -> None:
    """Checks that the layers of each stack are numbered from 0 to `rule.layers - 1`."""
    assert rule.path is not None
    stacks: dict[str, set[int]] = {}
    for path in paths:
        if match := _patterns.compile_pattern(rule.path).fullmatch(path):
            stacks.setdefault(path[: match.start(1)], set()).add(int(match[1]))
    for name, numbers in stacks.items():
        if numbers != set(range(len(numbers))) or len(numbers) != rule.layers:
            text = ", ".join(map(str, sorted(numbers)))
            raise _stack_error(rule, f"the layers {name!r} of the model have the numbers {text}")


def _stack_error(rule: Rule, problem: str) -> RuleError:
    ends = [f"the {name} {n}" for name in ("first", "last") if (n := getattr(rule, name))]
    return RuleError(
        f"{rule!r} does not fit this model: {problem}. Correct its path and layers, whose numbers "
        f"are 0 to {(rule.layers or 0) - 1}. Layers in a scan (nn.scan, nnx.scan, nnx.vmap) are "
        f"one module with one policy: run {' and '.join(ends)} outside of the scan, named first_0, "
        "last_0 and so on, and write Rule('re:(first|last)_.*', ...)."
    )


def _check_names(rule: Rule, types: Mapping[str, ModuleType]) -> None:
    """Checks that the arguments and methods that a rule names exist in a module that it matches."""
    matched = [cls for path, cls in types.items() if rule.matches(path, cls)]
    classes = [cls for cls in matched if isinstance(cls, type)]
    if len(classes) < len(matched):
        return
    methods = [item for cls in classes for item in _patterns.methods_of(cls).items()]
    names = rule.keep_inputs or ()
    kept = {name for cls in classes for name in _patterns.own_inputs(cls, names)}
    arguments = kept | {name for _, method in methods for name in method.names}
    known = {"keep_inputs": arguments, "forward_methods": {name for name, _ in methods}}
    for key, allowed in known.items():
        for name in getattr(rule, key) or ():
            if name not in allowed:
                close = ", ".join(_core.nearest(name, allowed) or sorted(allowed)[:5])
                raise RuleError(
                    f"{rule!r}: {key} contains {name!r}, which no module that the rule matches has;"
                    f" nearest: {close or 'none'}. Correct the name, or allow the rule to match "
                    "nothing: required=False."
                )
