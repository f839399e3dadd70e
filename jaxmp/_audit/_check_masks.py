"""Attention masks of a traced program whose elements follow from shapes and constants alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxmp._attention._declared import (
    Declaration,
    check_known,
    declaration_code,
    declaration_of,
    structure_of,
)
from jaxmp._attention._layer import layer_attention
from jaxmp._audit._checks import WARNING
from jaxmp._audit._context import OpOccurrence, PendingFindings
from jaxmp._core._compat import is_within
from jaxmp._core._jaxprs import Path, is_literal
from jaxmp._core._locations import module_of
from jaxmp._core._static_values import Known


class _Declared(NamedTuple):
    """A layer's mask that its policy declares."""

    names: Path
    declared: Declaration
    # `[B, N, T, S]`; None: it depends on the program's inputs.
    mask: np.ndarray | None


class _Passed(NamedTuple):
    """A mask that attention receives as an array, and what it is; None: nothing is known."""

    op: OpOccurrence
    actual: Declaration | None


class Masks:
    """The masks of a program. Takes its equations on the audit's walk."""

    def __init__(self) -> None:
        self.known = Known()
        self._declared: list[_Declared] = []
        self._passed: list[_Passed] = []
        self._structures: dict[int, tuple[np.ndarray, Declaration | None]] = {}

    def take(self, op: OpOccurrence, is_attention: bool) -> None:
        """Takes a jitted function of the forward pass: of attention, of a declaration, or other."""
        mask = _mask_of(op.equation)
        if mask is None:
            return
        declared = declaration_of(str(op.equation.params.get("name", "")), "")
        if declared is not None:
            self._declared.append(_Declared(op.location.names, declared, self.known.value(mask)))
        elif is_attention and mask.aval.shape[-2] > 1:
            self._passed.append(_Passed(op, self._structure(self.known.value(mask))))

    def _structure(self, mask: np.ndarray | None) -> Declaration | None:
        if mask is None:
            return None
        if id(mask) not in self._structures:
            self._structures[id(mask)] = mask, structure_of(mask)
        return self._structures[id(mask)][1]

    def check(self, root: Path) -> list[str]:
        """Compares masks with their declarations.

        Args:
          root: the scope of the model.

        Returns:
          A note if there are masks that depend on the program's inputs.

        Raises:
          AttentionError: if a mask contradicts its declaration.
        """
        unknown: dict[str, None] = {}
        checked = set()
        for names, declared, mask in self._declared:
            path = module_of(names, root)
            if mask is None:
                unknown[path or "the model"] = None
            elif (id(mask), declared) not in checked:
                checked.add((id(mask), declared))
                check_known(mask, Declaration(declared.mask, declared.window, path))
        if not unknown:
            return []
        return [
            f"the declared masks of {_some(list(unknown))} depend on the program's inputs: "
            "jaxmp.linen.explain or jaxmp.nnx.explain with a batch compares them"
        ]

    def report(self, root: Path, findings: PendingFindings) -> None:
        """Adds a finding for each array that a declaration could replace."""
        layers = [passed for passed in self._passed if _is_of_layer(passed.op)]
        checks = {passed.actual for passed in layers} | {one.declared for one in self._declared}
        for op, actual in self._passed:
            if actual is None:
                continue
            message = (
                f"attention reads its mask as an array, and it is {_words(actual)} for every input."
            )
            if any(op is passed.op for passed in layers):
                path = module_of(op.location.names, root)
                fix = _declaration_fix(actual, path if len(checks) > 1 else None)
            else:
                fix = _argument_fix(actual)
            findings.add("dense_mask", op, message, fix, severity=WARNING)


def _words(actual: Declaration) -> str:
    window = "" if actual.window is None else " with a window of {} and {}".format(*actual.window)
    return f"{actual.mask}{window}"


def _mask_of(equation: Any) -> Any:
    """The bool operand `[B, N, T, S]` of a jitted function; None if it has none."""
    for var in equation.invars:
        aval = var.aval
        if not is_literal(var) and getattr(aval, "dtype", None) == np.bool_ and aval.ndim == 4:
            return var
    return None


def _is_of_layer(op: OpOccurrence) -> bool:
    return is_within(op.equation.source_info, layer_attention)


def _some(paths: list[str]) -> str:
    more = [f"{len(paths) - 2} more layers"] if len(paths) > 2 else []
    return " and ".join([*map(repr, paths[:2]), *more])


def _declaration_fix(actual: Declaration, path: str | None) -> str:
    """How a recipe declares it for all attention layers, or for the one at `path`."""
    python, toml = declaration_code(actual, path)
    return (
        "Declare the mask in the recipe; the model stays as it is:\n"
        f"    {python}\nor in the recipe's file:\n" + "\n".join(f"    {line}" for line in toml)
    )


def _argument_fix(actual: Declaration) -> str:
    """How a call of `jaxmp.dot_product_attention` states it."""
    arguments = ["is_causal=True"] * actual.is_causal
    if actual.window is not None:
        arguments.append(f"local_window_size={actual.window}")
    stated = ", ".join(["query, key, value", *arguments])
    return f"Leave mask out:\n    jaxmp.dot_product_attention({stated})"
