"""Warns of a model under `matmul = "fp8"` of which no layer computes in FP8."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from jaxmp._core._jaxprs import equations, trace
from jaxmp._core._matmuls import MATMULS
from jaxmp._core._typing import PyTree
from jaxmp._flax._casts import ModulePolicy
from jaxmp._flax._fp8_layers import (
    UNKNOWN_DOT,
    decisions,
    is_recording,
    note_unsupported,
    warn_if_unused,
)
from jaxmp._flax._layer_table import CONV
from jaxmp._flax._share import matrix_elements
from jaxmp._recipe_files._load import PolicyMap

# Classes of models that were reported, and their policies.
_reported: set[tuple[type, PolicyMap]] = set()


def fp8_decisions(
    cls: type, policies: PolicyMap, path: tuple[str, ...]
) -> contextlib.AbstractContextManager[list[Any]]:
    """Collects the decisions on the layers that a call of a model of class `cls` runs.

    A part of a model, whose `path` is not empty, is not examined.
    """
    is_fp8 = policies.default.matmul == "fp8"
    return decisions(is_fp8 and not path and (cls, policies) not in _reported)


def note_weights(module_policy: ModulePolicy, own: Callable[[], Iterable[Any]]) -> None:
    """Records a module with a policy for FP8 and weights, `own()`, that no FP8 dot multiplies."""
    traits, cls, path = module_policy.traits, module_policy.cls, module_policy.resolved.path
    if not is_recording() or module_policy.resolved.scaling is None:
        return
    has_fp8 = traits.fp8_call is not None or getattr(traits.dot, "fp8", None) is not None
    # A layer of Flax that is wrapped alone is a part of a model.
    is_part = not path and cls.__module__.startswith("flax.")
    if not (has_fp8 or is_part or traits.is_norm or traits.embedding) and matrix_elements(own()):
        is_conv = traits.dot is CONV
        why = "FP8 has no convolutions" if is_conv else f"{cls.__name__} {UNKNOWN_DOT}"
        note_unsupported(path, why)


def warn_of_model(
    key: tuple[type, PolicyMap], rows: list[Any], stacklevel: int, call: tuple[Any, Any, Any]
) -> None:
    """Warns once of a model that has matmuls, none of which computes in FP8.

    Args:
      key: its class and policies.
      rows: the decisions of a call of the whole model.
      stacklevel: of the user's call, counted from the caller, as in `warnings.warn`.
      call: function, positional and keyword arguments of the call.
    """
    if rows and all(row.exclusion_reason for row in rows):
        _reported.add(key)
        rows = [row for row in rows if row.path or not row.k]
        if _multiplies_without_fp8(*call):
            warn_if_unused(key[0].__name__, rows, stacklevel + 1)


def _multiplies_without_fp8(fn: Callable[..., Any], args: PyTree, kwargs: Any) -> bool:
    """Traces a function again, because a layer that was jitted before records no decision."""
    # A model that cannot be traced a second time probably has matmuls.
    with contextlib.suppress(Exception):
        traced = list(equations(trace(fn, args, kwargs).closed))
        names = {equation.primitive.name for equation in traced}
        casts = (str(equation.params.get("new_dtype")) for equation in traced)
        return not names.isdisjoint(MATMULS) and not any("float8" in dtype for dtype in casts)
    return True
