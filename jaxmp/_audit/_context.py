"""Policies that the operations of a program are checked against."""

from __future__ import annotations

from typing import Any

from jaxmp._core._dtypes import FLOAT32
from jaxmp._core._jaxprs import Path, module_paths_of
from jaxmp._core._locations import FULL_PRECISION, Location
from jaxmp._policies._op_table import OpTable
from jaxmp._policies._resolve import ResolvedPolicy, resolve_first
from jaxmp._recipe_files._load import RecipeData


class PolicyContext:
    """Policies that a program is checked against, and the dtypes that they allow."""

    def __init__(
        self, recipe: RecipeData | None, target: str = "cpu", text: str = "'bf16'"
    ) -> None:
        self.recipe = recipe
        self.policies = None if recipe is None else recipe.policies
        self.ops = OpTable() if recipe is None else recipe.ops
        # Type of device that the program is traced for.
        self.target = target
        # The policies in the user's code: "'bf16'", "recipe" or "policies".
        self.text = text
        self._allowed: dict[Path, frozenset[Any]] = {}

    def allowed_dtypes(self, location: Location) -> frozenset[Any]:
        """Returns the dtypes in which matmuls at a location may compute; empty without policies.

        A program contains no module types. The dtype of a rule by type is allowed wherever a later
        rule or the default policy applies by path.
        """
        allowed = self._allowed.get(location.names)
        if allowed is None:
            allowed = self._allowed[location.names] = self._search(location.names)
        return allowed

    def _search(self, names: Path) -> frozenset[Any]:
        if self.policies is None:
            return frozenset()
        if FULL_PRECISION in names:
            return frozenset({FLOAT32})
        resolved = self.resolve(names)
        dtypes = {resolved.policy.compute_dtype}
        for other in self.policies.rules:
            if other is resolved.rule:
                break
            if other.module_type is not None and other.compute_dtype is not None:
                dtypes.add(other.compute_dtype)
        return frozenset(dtypes)

    @property
    def wrap_code(self) -> str:
        """Returns code that applies the policies to a model."""
        if self.text == "policies":
            return "model = jaxmp.load_recipe(policies).wrap(model)"
        recipe = self.text if self.text == "recipe" else f"jaxmp.load_recipe({self.text})"
        return f"model = {recipe}.wrap(model)"

    @property
    def autocast_code(self) -> str:
        """Returns code that applies the policies to a function."""
        return f"fn = jaxmp.autocast(fn, {self.text})"

    @property
    def loss_code(self) -> str:
        """Returns code that applies the policies to a loss function."""
        return f"loss_fn = jaxmp.autocast(loss_fn, {self.text})"

    @property
    def requires_fp32_reductions(self) -> bool:
        """True if the recipe requires sums of gradients over devices in FP32."""
        return self.recipe is not None and self.recipe.reduce_dtype == "float32"

    def requires_fp8(self, location: Location) -> bool:
        """Returns True if the policies require FP8 matmuls in linear layers at a location."""
        if self.policies is None or FULL_PRECISION in location.names:
            return False
        return self.resolve(location.names).scaling is not None

    def resolve(self, names: Path) -> ResolvedPolicy:
        """Resolves the policy of name scopes."""
        assert self.policies is not None
        return resolve_first(self.policies, module_paths_of(names))
