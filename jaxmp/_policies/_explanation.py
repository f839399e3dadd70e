"""Explanation of the policies of a model: a row for each module path."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmp._core._dtypes import is_16bit
from jaxmp._core._explanation import ExplanationRow, Section
from jaxmp._policies._policy import Policy, with_fields
from jaxmp._policies._rules import Rule


@dataclasses.dataclass(frozen=True)
class PolicyDecision(ExplanationRow):
    """Policy of one module or parameter.

    Attributes:
      path: module path, or `module/path:name`; "" for the root.
      module_type: name of the module's class; "" if it is not known.
      policy: the resolved policy.
      rule: index of the deciding rule in `PolicyMap.rules`; None: the default policy applies.
      why: the reason of the deciding rule.
      narrow: why a linear layer with few outputs returns FP32; "" for other modules.
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


@dataclasses.dataclass(frozen=True)
class MaskRow(ExplanationRow):
    """Attention layer whose policy declares the structure of its mask.

    Attributes:
      path: module path of the layer.
      declared: keys and values of the declaration.
      is_checked: True if the mask that the model passes agrees with the declaration; False if that
        mask depends on values that were not passed.
    """

    path: str
    declared: str
    is_checked: bool

    def cells(self) -> tuple[str, ...]:
        result = "agrees" if self.is_checked else "not checked: pass arrays instead of shapes"
        return self.path or "(root)", self.declared, result

    def __str__(self) -> str:
        path, declared, result = self.cells()
        return f"{path}: {declared} ({result})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyExplanation(Section[PolicyDecision]):
    """Policies of a model's modules.

    Attributes:
      rows: a `PolicyDecision` for each path.
      paths: every path that a rule can match: modules, and `module/path:name` of parameters.
      unused: rules that decide for no path.
      low_precision_share: share of the model's matmul FLOPs, from 0 to 1, with both operands in 16
        bits or fewer; None if it was not counted, or if the model has no matmul.
      masks: attention layers with declared masks, and the result of the comparison.
    """

    columns: ClassVar = ("path", "type", "policy", "rule", "why")

    paths: tuple[str, ...] = ()
    unused: tuple[Rule, ...] = ()
    low_precision_share: float | None = None
    masks: tuple[MaskRow, ...] = ()

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
            if share < 0.5 and self.rows and is_16bit(self.rows[0].policy.compute_dtype):
                lines.append(
                    "Layers that cast their operands themselves do not follow the recipe. Apply it "
                    "to each operation: loss_fn = jaxmp.autocast(loss_fn, recipe)."
                )
        return "\n".join(lines)

    def __str__(self) -> str:
        optional = sum(not rule.required for rule in self.unused)
        unused = [f"unused: {rule!r}" for rule in self.unused if rule.required]
        unused += [f"unused: {optional} optional rule{'s' * (optional > 1)}"] * (optional > 0)
        masks = [f"mask of {row}" for row in self.masks]
        return "\n".join([super().__str__(), *unused, *masks])
