"""Resolves the policy and the op category of each equation from its name scopes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxmp._core._dtypes import FLOAT32, is_16bit
from jaxmp._core._jaxprs import BACKWARD, module_paths_of, phase_of, sub_jaxprs
from jaxmp._core._replay import SCATTERS
from jaxmp._policies._op_table import OpTable
from jaxmp._policies._policy import Policy
from jaxmp._policies._required import check_module_dtypes, check_required, uses_fp8
from jaxmp._policies._resolve import PolicyMap, ResolvedPolicy, resolve_first
from jaxmp.errors import CompositionError, RuleError
from jaxmp.fp8._scaling import Scaling, as_scaling

# Names that mark scopes. They are not parts of module paths.
FULL_PRECISION = "jaxmp_full_precision"
_IN_BACKWARD = "jaxmp_backward"
IN_CUSTOM_JVP = "jaxmp_custom_jvp"
IN_CUSTOM_VJP = "jaxmp_custom_vjp"
IN_JVP_RULE = "jaxmp_jvp_rule"
# Mark -> why matmuls in such a scope do not run in FP8.
_NOT_FP8 = {
    _IN_BACKWARD: (
        "a product of the backward pass, whose gradient cannot be told from its other operand: "
        "write jax.grad(autocast(f)), not autocast(jax.grad(f))"
    ),
    IN_CUSTOM_JVP: "inside a custom_jvp, whose rule must stay linear",
    IN_CUSTOM_VJP: "inside a custom_vjp, which runs as its author wrote it",
}
_MARKS = {FULL_PRECISION, IN_JVP_RULE, *_NOT_FP8}


@dataclasses.dataclass(frozen=True)
class Region:
    """Resolved policy of a scope."""

    policy: Policy
    # True inside `full_precision()`.
    full: bool
    # Output dtype of the deciding rule (not at the root), if wider than the compute dtype; or None.
    wide: np.dtype | None
    # True if the policy sets `matmul = "fp8"`.
    fp8: bool
    # Why matmuls do not run in FP8 although the policy sets it; "" if they do.
    why_not_fp8: str

    @property
    def dtype(self) -> np.dtype:
        """Compute dtype; FP32 inside `full_precision()`."""
        return FLOAT32 if self.full else self.policy.compute_dtype

    @property
    def is_full(self) -> bool:
        """True if the scope computes in FP32 or wider, so that all operations do."""
        return not is_16bit(self.dtype)


class Rules:
    """Policies and op table, with a cache of the resolved policy of each scope.

    Raises:
      RuleError: if a required rule names a module type.
      CompositionError: if the FP8 scaling is stateful.
    """

    def __init__(self, policies: PolicyMap, ops: OpTable) -> None:
        check_module_dtypes(policies)
        for rule in policies.rules:
            if rule.module_type is not None and rule.required:
                raise RuleError(
                    f"{rule!r}: autocast sees name scopes and no module types. Name the module by "
                    "its path, or let the rule match nothing: required=False."
                )
        # Scaling of FP8 matmuls; None if no policy sets `matmul = "fp8"`.
        self.fp8: Scaling | None = (
            _stateless(as_scaling(policies.fp8)) if uses_fp8(policies) else None
        )
        self.policies, self.ops = policies, ops
        self.by_path = bool(policies.rules)
        self._regions: dict[tuple[str, ...], Region] = {}
        self._categories: dict[str, str] = {}

    def category(self, equation: Any) -> str:
        """Returns the op-table category of an equation.

        Equations with inner jaxprs are "opaque", since these were traced for the recorded dtypes.
        The interpreter handles control flow and calls separately.
        """
        name = equation.primitive.name
        if name == "dot_general" and not equation.params["dimension_numbers"][0][0]:
            return "widest"  # an outer product: nothing is summed; rotary angles need FP32
        if name == "mul" and equation.invars[0] is equation.invars[1]:
            name = "square"
        if name == "scatter" and equation.params["update_jaxpr"] is not None:
            return "opaque"  # `x.at[i].apply(f)`: f was traced for its dtypes
        category = self._categories.get(name)
        if category is None:
            inner = name not in SCATTERS and sub_jaxprs(equation)
            category = "opaque" if inner else self.ops.category(name)
            self._categories[name] = category
        return category

    def check_required(self, seen: set[tuple[str, ...]]) -> None:
        """Raises RuleError if a required rule matches none of the scopes `seen`."""
        paths = {path for names in seen for path in module_paths_of(_without_marks(names))}
        parts = [path.split("/") for path in paths]
        known = {"/".join(names[:length]) for names in parts for length in range(len(names) + 1)}
        modules = [rule for rule in self.policies.rules if not rule.addresses_parameter]
        try:
            check_required(self.policies, known, modules)
        except RuleError as error:
            raise RuleError(
                f"{error} autocast goes by name scopes: Linen modules leave them, NNX modules do "
                "under jaxmp.nnx.apply_policy(model, 'f32'), any other code does in a block "
                "`with jax.named_scope(...):`."
            ) from None

    def region(self, names: tuple[str, ...]) -> Region:
        """Returns the resolved policy of the scopes `names`."""
        region = self._regions.get(names)
        if region is None:
            region = self._regions[names] = self._find_region(names)
        return region

    def why(self, names: tuple[str, ...]) -> str:
        """Returns the rule that decides at the scopes `names`, or the default policy, as text."""
        return self._resolve(names).reason

    def _resolve(self, names: tuple[str, ...]) -> ResolvedPolicy:
        return resolve_first(self.policies, module_paths_of(_without_marks(names)))

    def _find_region(self, names: tuple[str, ...]) -> Region:
        resolved = self._resolve(names)
        full = FULL_PRECISION in names
        fp8 = resolved.scaling is not None and not full
        why_not = next((_NOT_FP8[name] for name in names if name in _NOT_FP8), "") if fp8 else ""
        # The output dtype of the root is that of the whole function, not of its matmuls.
        wide = resolved.wide_output if resolved.path else None
        return Region(resolved.policy, full, wide, fp8, why_not)


def _stateless(scaling: Scaling) -> Scaling:
    if scaling.is_stateful:
        name = type(scaling).__name__
        raise CompositionError(
            f"{name} keeps a state for each product, and a traced function has no place for one. "
            "Scale by the tensors themselves: autocast(fn, recipe.replace(fp8='current')), or "
            "PolicyMap(..., fp8=fp8.CurrentScaling()). Or give the function "
            f"fp8.dot_general(fp8.{name}()) where it multiplies, and a state."
        )
    return scaling


def _without_marks(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in _MARKS)


def with_phase(names: tuple[str, ...], stack: str) -> tuple[str, ...]:
    """Returns scopes with the backward-pass mark if a name stack is in a backward pass.

    The mark is removed for equations that the backward pass recomputes.

    Args:
      names: scopes of an equation; they have the mark if an enclosing equation has it.
      stack: the equation's name stack.
    """
    outside = tuple(name for name in names if name != _IN_BACKWARD)
    before = BACKWARD if outside != names else ""
    return (*outside, _IN_BACKWARD) if phase_of(stack, before) == BACKWARD else outside


def path_of(names: tuple[str, ...]) -> str:
    """Returns scopes joined by "/", without marks."""
    return "/".join(_without_marks(names))
