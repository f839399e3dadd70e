"""Resolution: the policy of each module, parameter and name scope, and the rule that decides it.

`resolve_policy` is the only function that applies rules. Flax modules, autocast, the audit, FP8 and
attention layers read the `ResolvedPolicy` that it returns.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from jaxmp import _core
from jaxmp._policies._patterns import ModuleType, own_inputs, path_string
from jaxmp._policies._policy import Policy, summarized, with_fields
from jaxmp._policies._rules import Rule, override, rule_text
from jaxmp.errors import PolicyError, RuleError
from jaxmp.fp8._scaling import Scaling, as_scaling

# ---------------------------------------------------------------------------
# Policy maps
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, init=False)
class Policies:
    """Default policy and ordered rules. Only the first matching rule applies.

    Users create its subclass `PolicyMap`, which also accepts recipes.

    Args:
      default: the default policy.
      rules: rules in order of precedence.
      fp8: the FP8 scaling of modules with `matmul = "fp8"`. None: `CurrentScaling()`.

    Raises:
      RuleError: if `rules` contains another object, or a rule has a window but no declared mask.
      PolicyError: if `fp8` is not a scaling.
    """

    default: Policy
    rules: tuple[Rule, ...]
    fp8: Scaling | None
    # The policies of the other phases of the recipe; see `beside`.
    others: tuple[Policies, ...] = dataclasses.field(init=False, repr=False)
    # The policy of each rule.
    _policies: tuple[Policy, ...] = dataclasses.field(init=False, repr=False, compare=False)
    _hash: int = dataclasses.field(init=False, repr=False, compare=False)
    # Class of a module, with which its entry dies -> the other arguments of `resolve_policy`.
    _resolved: weakref.WeakKeyDictionary[type, dict[Any, ResolvedPolicy]] = dataclasses.field(
        init=False, repr=False, compare=False
    )

    def __init__(
        self, default: Policy, rules: Iterable[Rule] | Rule = (), fp8: Scaling | None = None
    ) -> None:
        if fp8 is not None and not isinstance(fp8, Scaling):
            raise PolicyError(
                f"fp8={fp8!r} is not an FP8 scaling. A PolicyMap requires an object, for example "
                "PolicyMap('p=f32,c=bf16,o=f32,matmul=fp8', fp8=jaxmp.fp8.CurrentScaling()); a "
                "recipe also accepts a name: recipe.replace(fp8='current')."
            )
        rules = checked_rules(rules)
        policies = tuple(override(default, rule) for rule in rules)
        vars(self).update(default=default, rules=rules, fp8=fp8, others=())
        vars(self).update(_policies=policies, _hash=hash((default, rules, fp8)))
        vars(self).update(_resolved=weakref.WeakKeyDictionary())

    def beside(self, others: Iterable[Policies]) -> Self:
        """Returns these policies as one of several phases, which have one train state.

        A layer that runs in FP8 with a state in another phase has this state here, too, and resets
        it in each step. It then takes its first scale of that phase from the tensor itself.
        """
        policies = dataclasses.replace(self)
        if others := tuple(others):
            vars(policies).update(others=others, _hash=hash((policies._hash, others)))
        return policies

    def __hash__(self) -> int:
        return self._hash

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        """The rules of these policies, and those of other phases."""
        phases = (self, *self.others)
        return tuple(dict.fromkeys(rule for each in phases for rule in each.rules))

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _restored, (type(self), self.default, self.rules, self.fp8, self.others)

    def resolve(
        self,
        path: str | Iterable[str | int],
        module_type: ModuleType = None,
    ) -> Policy:
        """Returns the policy of the module at `path`, or of the parameter `module/path:name`.

        A parameter takes the policy of its module unless a `path:name` rule precedes. `keep_inputs`
        of the result contains only arguments that methods of the class accept; without a class,
        only those that the deciding rule names.

        Args:
          path: `/`-joined or a tuple of names; `''` is the root.
          module_type: the module's class or class name; None: rules by type do not match.
        """
        return resolve_policy(self, path, module_type).policy


def _restored(cls: Any, *fields: Any) -> Policies:
    return cls(*fields[:-1]).beside(fields[-1])


def checked_rules(rules: Iterable[Rule] | Rule) -> tuple[Rule, ...]:
    """Returns the rules of a `PolicyMap` as a tuple.

    Raises:
      RuleError: if one of them is another object.
    """
    rules = tuple(rules) if isinstance(rules, Iterable) else (rules,)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise RuleError(
                f"{rule!r} is not a Rule; for example PolicyMap('bf16', [Rule('head', 'c=f32')])."
            )
    return rules


# ---------------------------------------------------------------------------
# The resolver
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ResolvedPolicy:
    """Policy of one module, parameter or name scope, and the rule that decides it.

    Attributes:
      policy: the policy.
      rule: the deciding rule; None: no rule matches, and the default policy applies.
      output_dtype: dtype in which the module passes its result on: the policy's `output_dtype` for
        the root or if the deciding rule names it, FP32 for a decision or a narrow layer,
        otherwise the compute dtype.
      wide_output: `output_dtype` if the deciding rule names one that is wider than the compute
        dtype, and FP32 for a decision or a narrow layer; then the module's dot emits it
        (`preferred_element_type`). Otherwise None.
      scaling: scaling of the module's FP8 dots; None: its dots do not run in FP8.
      resting: scaling with a state that the module's dots have in another phase of the recipe, if
        `scaling` is None; otherwise None.
      path: the path that was resolved.
      narrow: why a linear layer with few outputs returns FP32; "" for other modules. Its result is
        weakly typed, as a Python number is: other operands determine the dtype of an operation.
    """

    policy: Policy
    rule: Rule | None
    output_dtype: np.dtype
    wide_output: np.dtype | None
    scaling: Scaling | None
    path: str
    narrow: str = ""
    resting: Scaling | None = None

    @functools.cached_property
    def rule_names_output(self) -> bool:
        """True if the deciding rule names an output dtype."""
        return self.rule is not None and self.rule.output_dtype is not None

    @functools.cached_property
    def casts_output(self) -> bool:
        """True for the root, and for modules whose deciding rule names an output dtype."""
        return not self.path or self.rule_names_output

    @property
    def reason(self) -> str:
        """The deciding rule, or the default policy, as text."""
        if self.rule is None:
            return f"default policy {summarized(self.policy)}"
        return rule_text(self.rule)


def resolve_policy(
    policies: Policies,
    path: str | Iterable[str | int],
    module_type: ModuleType = None,
    outputs: int | None = None,
    *,
    is_decision: bool = False,
) -> ResolvedPolicy:
    """Resolves the policy of a module, a parameter (`path:name`) or a name scope.

    Args:
      policies: the default policy and the rules.
      path, module_type: as in `Policies.resolve`.
      outputs: number of outputs of a linear layer; None for other modules.
      is_decision: the result of the linear layer is compared or is that of the model. It then
        returns its FP32 sums and does not run in FP8, unless the deciding rule sets these itself:
        an output dtype, `fp32_outputs_below = 0`, or `matmul = "fp8"`.
    """
    is_class = isinstance(module_type, type)
    resolved = policies._resolved.setdefault(module_type if is_class else type(module_type), {})
    key = path, None if is_class else module_type, outputs, is_decision
    if key in resolved:
        return resolved[key]
    path = path_string(path)
    deciding, policy, owner = None, policies.default, path.partition(":")[0]
    for rule, override_policy in zip(policies.rules, policies._policies, strict=True):
        if rule.matches(path if rule.addresses_parameter else owner, module_type):
            deciding, policy = rule, override_policy
            break
    if policy.keep_inputs:
        policy = _with_own_inputs(policy, deciding, module_type)
    names_output = deciding is not None and deciding.output_dtype is not None
    bits = _core.bits
    is_wide = names_output and bits(policy.output_dtype) > bits(policy.compute_dtype)
    is_half_root = not path and _core.is_16bit(policy.output_dtype)
    narrow = "" if is_half_root else narrow_reason(policy, outputs)
    sets_fp8 = deciding is not None and deciding.matmul == "fp8"
    uses_fp8 = policy.matmul == "fp8" and (sets_fp8 or not is_decision)
    is_fixed = names_output or (deciding is not None and deciding.fp32_outputs_below == 0)
    is_widened = is_decision and not is_fixed and _core.is_16bit(policy.compute_dtype)
    returns_fp32 = narrow or (is_widened and not is_half_root)
    own_dtype = _core.FLOAT32 if returns_fp32 else policy.compute_dtype
    resolved[key] = ResolvedPolicy(
        policy=policy,
        rule=deciding,
        output_dtype=policy.output_dtype if names_output or not path else own_dtype,
        wide_output=policy.output_dtype if is_wide else _core.FLOAT32 if returns_fp32 else None,
        scaling=as_scaling(policies.fp8) if uses_fp8 else None,
        path=path,
        narrow=narrow,
        resting=_resting(policies, policy, path, module_type)
        if policies.others and not uses_fp8
        else None,
    )
    return resolved[key]


def _resting(policies: Policies, own: Policy, path: str, module_type: ModuleType) -> Scaling | None:
    """Returns the stateful scaling that a module may have in a phase; None if it has none.

    Which layers decide can differ between phases, so that layers that decide have the state, too.
    """
    pairs = [(other, resolve_policy(other, path, module_type).policy) for other in policies.others]
    pairs.append((policies, own))
    scalings = (as_scaling(each.fp8) for each, policy in pairs if policy.matmul == "fp8")
    return next((scaling for scaling in scalings if scaling.is_stateful), None)


def narrow_reason(policy: Policy, outputs: int | None) -> str:
    """Returns why a linear layer with so few outputs returns FP32; "" if it does not."""
    limit = policy.fp32_outputs_below
    if outputs is None or outputs >= limit or not _core.is_16bit(policy.compute_dtype):
        return ""
    return f"FP32 result of {outputs} output{'s' * (outputs != 1)}: fp32_outputs_below={limit}"


def resolve_first(policies: Policies, paths: Iterable[str]) -> ResolvedPolicy:
    """Resolves the first of several candidate paths for which a rule decides.

    If no rule matches any of them, the first path is resolved. The name scopes of a traced function
    have two candidate paths, because they may start with the name of the root.
    """
    candidates = [resolve_policy(policies, path) for path in paths]
    return next((each for each in candidates if each.rule is not None), candidates[0])


def matmul_scaling(policies: Policies) -> Scaling | None:
    """Returns the scaling of FP8 matmuls; None if no policy or rule sets `matmul = "fp8"`."""
    holders = (policies.default, *policies.rules)
    return as_scaling(policies.fp8) if any(each.matmul == "fp8" for each in holders) else None


def storage_dtype(policies: Policies, names: tuple[str, ...]) -> np.dtype:
    """Returns the dtype in which the policies store a parameter.

    Args:
      policies: the policies.
      names: path of the parameter in its tree, such as `("block_0", "dense", "kernel")`.
    """
    return resolve_policy(policies, _core.parameter_path(names)).policy.param_dtype


def _with_own_inputs(policy: Policy, rule: Rule | None, module_type: ModuleType) -> Policy:
    """Returns a policy whose `keep_inputs` contains only arguments of the module's methods.

    Without a class, these are the arguments that the deciding rule names.
    """
    if isinstance(module_type, type):
        names = own_inputs(module_type, policy.keep_inputs)
    else:
        names = () if rule is None else rule.keep_inputs or ()
    return with_fields(policy, keep_inputs=names)
