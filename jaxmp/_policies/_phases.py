"""Phases: keys of a recipe that change at a step of the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jaxmp._policies._resolve import Policies, matmul_scaling
from jaxmp._policies._rules import Rule, override
from jaxmp.errors import RecipeError
from jaxmp.fp8 import _scaling

P = TypeVar("P", bound=Policies)

# Keys of the default policy, and of the FP8 scaling, that a phase can change.
POLICY_KEYS = ("compute_dtype", "matmul")
SCALING_KEYS = tuple(_scaling.GEMMS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Keys that have other values from a step on.

    Keys that a phase omits have the values of the recipe, and not those of the phase before it.
    """

    # First step of the phase, counted from 0; at least 1.
    from_step: int
    # Values of `POLICY_KEYS`, which change the default policy as a rule for all modules does.
    policy: tuple[tuple[str, Any], ...] = ()
    # Values of `SCALING_KEYS`, which change the FP8 scaling.
    scaling: tuple[tuple[str, Any], ...] = ()
    # Rules in front of those of the recipe.
    rules: tuple[Rule, ...] = ()
    why: str = ""

    @property
    def sets_fp8(self) -> bool:
        return ("matmul", "fp8") in self.policy or any(r.matmul == "fp8" for r in self.rules)

    def settings(self) -> dict[str, object]:
        """Returns the keys of the TOML table, without the rules."""
        why = {"why": self.why} if self.why else {}
        return {"from_step": self.from_step, **dict(self.policy), **dict(self.scaling), **why}

    def apply(self, base: P) -> P:
        """Returns the policies of this phase.

        Args:
          base: the policies before the first phase.

        Raises:
          RecipeError: if the phase changes FP8 matmuls, and has none.
        """
        default, scaling = base.default, base.fp8
        if self.policy:
            default = override(default, Rule("**", **dict(self.policy)))
        if self.scaling:
            scaling = dataclasses.replace(_scaling.as_scaling(scaling), **dict(self.scaling))
        rules = (*self.rules, *base.rules)
        policies = dataclasses.replace(base, default=default, rules=rules, fp8=scaling)
        if self.scaling and matmul_scaling(policies) is None:
            raise RecipeError(
                f"The phase from step {self.from_step} sets {self.scaling[0][0]}, a format of FP8 "
                "matmuls, but neither the recipe nor the phase has any. Write in [[phases]]:\n"
                '    matmul = "fp8"'
            )
        return policies


def read_phase(values: Mapping[str, Any], rules: Iterable[Rule]) -> Phase:
    """Returns the phase that a table [[phases]] specifies, whose values have been checked.

    Raises:
      RecipeError: if it has no `from_step`, changes nothing, or changes what the train state has.
    """
    example = 'Write, for example:\n    from_step = 9000\n    matmul = "default"'
    if "from_step" not in values:
        raise RecipeError(f"the phase has no from_step, the step at which it begins. {example}")
    as_tuple = lambda value: tuple(value) if isinstance(value, list) else value
    policy, scaling = (
        tuple((key, as_tuple(values[key])) for key in keys if key in values)
        for keys in (POLICY_KEYS, SCALING_KEYS)
    )
    rules = tuple(rules)
    for rule in rules:
        if rule.param_dtype is not None:
            raise RecipeError(
                f"{rule!r} of a phase sets param_dtype, but all phases have the same train state. "
                "Set it in [[rules]] of the recipe, and delete it here."
            )
    if not policy and not scaling and not rules:
        raise RecipeError(f"the phase changes nothing. {example}")
    dataclasses.replace(_scaling.as_scaling(None), **dict(scaling))  # checks the formats
    return Phase(
        from_step=values["from_step"],
        policy=policy,
        scaling=scaling,
        rules=rules,
        why=values.get("why", ""),
    )


def policies_of_phases(policies: P, phases: Iterable[Phase]) -> list[P]:
    """Returns the policies before the first phase, and those of each phase."""
    base = dataclasses.replace(policies)
    return [base, *(phase.apply(base) for phase in phases)]


def with_phases(policies: P, phases: Sequence[Phase]) -> P:
    """Returns policies that keep the state of the FP8 layers of all phases."""
    if not phases and not policies.others:
        return policies
    first, *others = policies_of_phases(policies, phases)
    return first.beside(others)
