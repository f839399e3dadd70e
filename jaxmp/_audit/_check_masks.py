"""Check of attention masks whose elements follow from shapes and constants alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxmp._attention._declared import (
    Declaration,
    check_known,
    declaration_code,
    declaration_of,
    structure_of,
)
from jaxmp._attention._layer import layer_attention
from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import WARNING, Check
from jaxmp._audit._program import OpOccurrence, is_attention
from jaxmp._audit._rows import Finding
from jaxmp._audit._trace import Traced
from jaxmp._core._compat import is_within
from jaxmp._core._jaxprs import FORWARD, Atom, Equation, Path, is_literal
from jaxmp._core._locations import module_of

DENSE_MASK = Check(
    id="dense_mask",
    severity=WARNING,
    explanation="Attention reads a mask as an array, although the mask is causal, a window or full"
    " for every input. A kernel cannot skip the masked blocks of an array.",
    fix="recipe = recipe.replace(mask='causal')",
)


class _DeclaredMask(NamedTuple):
    """Mask of a layer whose policy declares its structure."""

    names: Path
    declared: Declaration
    # `[B, N, T, S]`; None if it depends on the program's inputs.
    mask: np.ndarray | None


class _PassedMask(NamedTuple):
    """Mask that attention receives as an array."""

    op: OpOccurrence
    # None if the mask depends on the program's inputs, or has no known structure.
    actual: Declaration | None


@DENSE_MASK.on_operation("jit", "pjit")
def collect_mask(op: OpOccurrence, audit: Auditor) -> None:
    """Collects the mask of a call of attention, or of a declaration, in the forward pass."""
    mask = _mask_of(op.equation)
    if mask is None or op.location.phase != FORWARD:
        return
    elements = audit.known.value(mask)
    declared = declaration_of(str(op.equation.params.get("name", "")), "")
    if declared is not None:
        row = _DeclaredMask(op.location.names, declared, elements)
        audit.collected[_DeclaredMask].append(row)
    elif is_attention(op.equation) and mask.aval.shape[-2] > 1:
        audit.collected[_PassedMask].append((op, elements))


@DENSE_MASK.on_program
def check_masks(audit: Auditor, traced: Traced) -> Iterable[Finding]:
    """Compares masks with their declarations, and reports masks that could be declared.

    Raises:
      AttentionError: if a mask contradicts its declaration.
    """
    del traced
    declared: list[_DeclaredMask] = audit.collected[_DeclaredMask]
    _check_declared(declared, audit)
    passed = _with_structures(audit.collected[_PassedMask])
    layers = [row for row in passed if is_within(row.op.equation.source_info, layer_attention)]
    structures = {row.actual for row in layers} | {row.declared for row in declared}
    for row in passed:
        if row.actual is None:
            continue
        message = (
            f"attention reads its mask as an array, and the mask is {_structure_text(row.actual)}"
            " for every input."
        )
        if row in layers:
            path = module_of(row.op.location.names, audit.root)
            fix = _fix_declaration(row.actual, path if len(structures) > 1 else None)
        else:
            fix = _fix_argument(row.actual)
        audit.add(DENSE_MASK, row.op, message, fix)
    return ()


def _check_declared(declared: list[_DeclaredMask], audit: Auditor) -> None:
    unknown: dict[str, None] = {}
    checked = set()
    for names, declaration, mask in declared:
        path = module_of(names, audit.root)
        if mask is None:
            unknown[path or "the model"] = None
        elif (id(mask), declaration) not in checked:
            checked.add((id(mask), declaration))
            check_known(mask, Declaration(declaration.mask, declaration.window, path))
    if unknown:
        audit.notes[
            f"the declared masks of {_paths_text(list(unknown))} depend on the program's inputs and"
            " were not compared; call jaxmp.explain(model, recipe) with a batch"
        ] = None


def _with_structures(passed: list[tuple[OpOccurrence, np.ndarray | None]]) -> list[_PassedMask]:
    """Determines the structure of each mask, once for each array."""
    structures: dict[int, Declaration | None] = {}
    rows = []
    for op, elements in passed:
        if elements is not None and id(elements) not in structures:
            structures[id(elements)] = structure_of(elements)
        rows.append(_PassedMask(op, structures.get(id(elements))))
    return rows


def _mask_of(equation: Equation) -> Atom | None:
    """Returns the bool operand `[B, N, T, S]` of a jitted function, or None."""
    for var in equation.invars:
        aval = var.aval
        if not is_literal(var) and getattr(aval, "dtype", None) == np.bool_ and aval.ndim == 4:
            return var
    return None


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
