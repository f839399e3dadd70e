"""Context of an audit's checks: enclosing equations, policies and pending findings."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from jaxmp._audit._checks import CHECKS, ERROR
from jaxmp._core._dtypes import FLOAT32, FLOATS_16BIT
from jaxmp._core._jaxprs import Path, consumers, is_literal, module_paths_of
from jaxmp._core._locations import FULL_PRECISION, Lines, Location, call_site
from jaxmp._policies._op_table import OpTable
from jaxmp._policies._resolve import ResolvedPolicy, resolve_first
from jaxmp._recipe_files._load import RecipeData


def named(words: str) -> frozenset[str]:
    """The names of primitives, which are separated by blanks."""
    return frozenset(words.split())


class Body:
    """One jaxpr, and who makes and who reads its variables."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr

    @functools.cached_property
    def consumers(self) -> dict[Any, list[Any]]:
        """Variable -> the equations that read it; None stands for the jaxpr's result."""
        return consumers(self.jaxpr)

    @functools.cached_property
    def producers(self) -> dict[Any, Any]:
        """Variable -> the equation that makes it."""
        return {var: equation for equation in self.jaxpr.eqns for var in equation.outvars}

    @functools.cached_property
    def positions(self) -> dict[Any, int]:
        """Variable -> the number of the equation that makes it."""
        return {var: n for n, equation in enumerate(self.jaxpr.eqns) for var in equation.outvars}

    def readers(self, var: Any) -> list[Any]:
        """The equations that read a variable."""
        return [reader for reader in self.consumers.get(var, ()) if reader is not None]

    def maker(self, var: Any) -> Any:
        """The equation that makes a variable; None for an argument or a constant."""
        return None if is_literal(var) else self.producers.get(var)


class OpOccurrence(NamedTuple):
    """An equation, and where and how often it runs."""

    equation: Any
    location: Location
    times: int
    body: Body
    # The equations around it, the innermost first.
    enclosing: tuple[Any, ...]

    @property
    def name(self) -> str:
        return self.equation.primitive.name


# ---------------------------------------------------------------------------
# Policies
# ---------------------------------------------------------------------------


class PolicyContext:
    """What policies say of a place."""

    def __init__(
        self, recipe: RecipeData | None, target: str = "cpu", text: str = "'bf16'"
    ) -> None:
        self.recipe = recipe
        self.policies = None if recipe is None else recipe.policies
        self.ops = OpTable() if recipe is None else recipe.ops
        # The check of device that the program is traced for.
        self.target = target
        # The policies as a user writes them in code: "'bf16'", "recipe" or "policies".
        self.text = text
        self._wanted: dict[Path, frozenset[Any]] = {}

    def wanted(self, location: Location) -> frozenset[Any]:
        """The dtypes in which matmuls at a place may compute; empty without policies.

        A program names no module types: what a rule by type asks for is allowed wherever a
        rule behind it, or the default, decides by path.
        """
        found = self._wanted.get(location.names)
        if found is None:
            found = self._wanted[location.names] = self._search(location.names)
        return found

    def _search(self, names: Path) -> frozenset[Any]:
        if self.policies is None:
            return frozenset()
        if FULL_PRECISION in names:
            return frozenset({FLOAT32})
        resolved = self.resolve(names)
        wanted = {resolved.policy.compute_dtype}
        for other in self.policies.rules:
            if other is resolved.rule:
                break
            if other.module_type is not None and other.compute_dtype is not None:
                wanted.add(other.compute_dtype)
        return frozenset(wanted)

    @property
    def wrap_code(self) -> str:
        """Code that applies the policies to a model."""
        if self.text == "policies":
            return "model = jaxmp.linen.apply_policy(model, policies)"
        recipe = self.text if self.text == "recipe" else f"jaxmp.load_recipe({self.text})"
        return f"model = {recipe}.wrap(model)"

    @property
    def autocast_code(self) -> str:
        """Code that applies the policies to a function."""
        return f"fn = jaxmp.autocast(fn, {self.text})"

    @property
    def wants_wide_reduces(self) -> bool:
        """True if the policies say that gradients are summed over devices in FP32."""
        return self.recipe is not None and self.recipe.reduce_dtype == "float32"

    def wants_fp8(self, location: Location) -> bool:
        """Whether the policies say that linear layers at a location multiply in FP8."""
        if self.policies is None or FULL_PRECISION in location.names:
            return False
        return self.resolve(location.names).scaling is not None

    def resolve(self, names: Path) -> ResolvedPolicy:
        """Resolves the policy of name scopes."""
        assert self.policies is not None
        return resolve_first(self.policies, module_paths_of(names))


# ---------------------------------------------------------------------------
# Findings, while they are being counted
# ---------------------------------------------------------------------------


@dataclasses.dataclass
class PendingFinding:
    """A finding whose module path and severity are not settled yet."""

    check: str
    severity: str
    names: Path
    primitive: str
    line: tuple[str, int]
    message: str
    fix: str
    count: int = 0
    flops: int = 0
    # Dropped where the program has a backward pass: it is the optimizer's.
    outside: bool = False
    # FLOPs of the products to which a promotion does harm, and whether it does any other.
    harmed_flops: int = 0
    has_other_harm: bool = False

    def add_harm(self, flops: int | None) -> None:
        """Counts harm to a product of that many FLOPs; None is harm of another check."""
        self.harmed_flops += flops or 0
        self.has_other_harm |= flops is None


# Findings about gradients after the backward pass, outside of every module.
_OF_STEPS = frozenset({"accumulator_16bit", "all_reduce_16bit"})


class PendingFindings:
    """Findings, one for each check, module and line."""

    def __init__(self) -> None:
        self._found: dict[Any, PendingFinding] = {}
        self._lines = Lines()

    def add(
        self,
        check: str,
        op: OpOccurrence,
        message: str,
        fix: str = "",
        *,
        severity: str = ERROR,
        flops: int = 0,
    ) -> PendingFinding:
        """Counts one operation, and returns the finding that it is part of."""
        line = self._lines.of((op.equation, *op.enclosing))
        outside = op.location.is_outside and check not in _OF_STEPS
        key = check, severity, op.location.names, line, outside
        finding = self._found.get(key)
        if finding is None:
            names, fix = op.location.names, fix or CHECKS[check].fix
            finding = PendingFinding(
                check, severity, names, op.name, line, message, fix, outside=outside
            )
            self._found[key] = finding
        finding.count += 1
        finding.flops += flops
        return finding

    def line_of(self, op: OpOccurrence) -> tuple[str, int]:
        """The user's own line of an operation."""
        return self._lines.of((op.equation, *op.enclosing))

    def is_own_call(self, equation: Any) -> bool:
        """Returns True if the call that made an equation is written in the user's own code."""
        call = call_site(equation)
        return call is not None and self._lines.is_own(call[0].co_filename)

    def __iter__(self) -> Any:
        return iter(self._found.values())


# ---------------------------------------------------------------------------
# Dtypes
# ---------------------------------------------------------------------------


def dtype_of(var: Any) -> Any:
    """The dtype of a variable; None where it has none."""
    return getattr(var.aval, "dtype", None)


def half_of(variables: Any) -> np.dtype | None:
    """The 16-bit floating dtype among some variables, if any."""
    for var in variables:
        dtype = dtype_of(var)
        if dtype in FLOATS_16BIT:
            return dtype
    return None
