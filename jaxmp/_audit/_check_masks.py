"""Check of attention masks whose elements follow from shapes and constants alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxmp._attention._declared import (
    Declaration,
    declaration_code,
    declared_masks,
    mask_operand,
    structure_of,
)
from jaxmp._attention._layer import layer_attention
from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import WARNING, Check
from jaxmp._audit._program import OpOccurrence, is_attention
from jaxmp._audit._trace import Traced
from jaxmp._core._compat import is_within
from jaxmp._core._jaxprs import FORWARD
from jaxmp._core._locations import module_of
from jaxmp._core._static_values import Scope

DENSE_MASK = Check(
    id="dense_mask",
    severity=WARNING,
    explanation="Attention reads a mask as an array, although the mask is causal, a window or full"
    " for every input. A kernel cannot skip the masked blocks of an array.",
    fix="recipe = recipe.replace(mask='causal')",
)


class _PassedMask(NamedTuple):
    """Mask that attention receives as an array."""

    op: OpOccurrence
    # None if the mask depends on the program's inputs.
    elements: np.ndarray | None


@DENSE_MASK.on_operation("jit")
def collect_mask(op: OpOccurrence, audit: Auditor) -> None:
    """Collects the mask of a call of attention in the forward pass."""
    if not is_attention(op.equation) or op.location.phase != FORWARD:
        return
    mask = mask_operand(op.equation)
    if mask is not None and mask.aval.shape[-2] > 1:
        audit.collected[_PassedMask].append(_PassedMask(op, audit.known.value(mask)))


@DENSE_MASK.on_program
def check_masks(audit: Auditor, traced: Traced) -> None:
    """Compares masks with their declarations, and reports masks that could be declared.

    Raises:
      AttentionError: if a mask contradicts its declaration.
    """
    declared = declared_masks(Scope(traced.closed))
    unknown = dict.fromkeys(mask.path or "the model" for mask, is_known in declared if not is_known)
    if unknown:
        audit.notes[
            f"the declared masks of {_paths_text(list(unknown))} depend on the program's inputs and"
            " were not compared; call jaxmp.explain(model, recipe) with a batch"
        ] = None
    passed = _with_structures(audit.collected[_PassedMask])
    in_layer = lambda op: is_within(op.equation.source_info, layer_attention)
    structures = {actual for op, actual in passed if in_layer(op)} | {mask for mask, _ in declared}
    for op, actual in passed:
        if actual is None:
            continue
        message = (
            f"attention reads its mask as an array, and the mask is {_structure_text(actual)}"
            " for every input."
        )
        path = module_of(op.location.names, audit.root) if len(structures) > 1 else None
        fix = _fix_declaration(actual, path) if in_layer(op) else _fix_argument(actual)
        audit.add(DENSE_MASK, op, message, fix)


def _with_structures(passed: list[_PassedMask]) -> list[tuple[OpOccurrence, Declaration | None]]:
    """Determines the structure of each mask, once for each array; None if it is not known."""
    structures: dict[int, Declaration | None] = {}
    for _, elements in passed:
        if elements is not None and id(elements) not in structures:
            structures[id(elements)] = structure_of(elements)
    return [(op, structures.get(id(elements))) for op, elements in passed]


# ---------------------------------------------------------------------------
# Texts
# ---------------------------------------------------------------------------


def _structure_text(actual: Declaration) -> str:
    window = "" if actual.window is None else " with a window of {} and {}".format(*actual.window)
    return f"{actual.mask}{window}"


def _paths_text(paths: list[str]) -> str:
    more = [f"{len(paths) - 2} more layers"] if len(paths) > 2 else []
    return " and ".join([*map(repr, paths[:2]), *more])


def _fix_declaration(actual: Declaration, path: str | None) -> str:
    """Returns the declaration in a recipe, for all attention layers or for the one at `path`."""
    python, toml = declaration_code(actual, path)
    if path is not None:
        rules = f"policies = jaxmp.PolicyMap(recipe, [{python}])"
        python = f"{rules}; recipe = recipe.replace(policies=policies)"
    return (
        "Declare the mask in the recipe; the model is not edited:\n"
        f"    {python}\nOr in the recipe file:\n" + "\n".join(f"    {line}" for line in toml)
    )


def _fix_argument(actual: Declaration) -> str:
    """Returns the declaration in a call of `jaxmp.dot_product_attention`."""
    arguments = ["query, key, value"] + ["is_causal=True"] * actual.is_causal
    if actual.window is not None:
        arguments.append(f"local_window_size={actual.window}")
    return f"Replace the argument mask:\n    jaxmp.dot_product_attention({', '.join(arguments)})"
