"""Warnings about models that mostly ignore their 16-bit policy, or of which no layer uses FP8.

Classes of some packages cast their operands themselves, which the policy of a module cannot change.
Counting FLOPs needs a second trace of the model, so it is done only if a sign of such layers is
seen in the first: modules that own matrices and return float32 from 16-bit inputs.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from jaxmp._autocast._resolve import is_traced_by_autocast
from jaxmp._core._dtypes import FLOAT32, bits
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
from jaxmp._policies._load import PolicyMap
from jaxmp._programs._jaxprs import equations, trace
from jaxmp._programs._matmuls import MATMULS, count_flops
from jaxmp._programs._operations import new_dtype_of
from jaxmp.errors import RecipeWarning
from jaxmp.fp8._explain import recorded

# A share of FLOPs below this is reported.
_LOW = 0.5
# Share of the elements of all matrices that must belong to suspected modules for a second trace.
_SUSPECTED = 0.25


class Suspect(NamedTuple):
    """Module that seems to ignore the dtype of its policy."""

    path: str
    cls: str
    # Of the matrices that it owns.
    elements: int
    # The method that returned float32, if it is not a forward pass; otherwise "".
    method: str = ""


def returns_float32(out: PyTree) -> bool:
    """Returns True for a float32 array, or a tuple that begins with one.

    Weakly typed arrays are the results of layers with few outputs, which other modules pass on.
    """
    first = out[0] if type(out) is tuple and out else out
    is_weak = getattr(first, "weak_type", False)
    return getattr(first, "dtype", None) == FLOAT32 and not is_weak


def matrix_elements(arrays: Iterable[Any]) -> int:
    """Returns the number of elements of the arrays with two or more dimensions."""
    shapes = (array.shape for array in arrays if hasattr(array, "shape"))
    return sum(math.prod(shape) for shape in shapes if len(shape) > 1)


def are_many(suspects: Iterable[Suspect], params: PyTree) -> bool:
    """Returns True if suspected modules own so many matrices that FLOPs must be counted.

    Under autocast, which casts the operations of all modules, there is nothing to report.
    """
    if is_traced_by_autocast():
        return False
    elements = sum(suspect.elements for suspect in suspects)
    return elements >= _SUSPECTED * matrix_elements(jax.tree.leaves(params))


def low_precision_share(fn: Callable[..., Any], *args: PyTree, **kwargs: PyTree) -> float | None:
    """Returns the share of a function's matmul FLOPs in 16 bits or fewer; None without matmuls.

    Args:
      fn: any JAX function; nothing is computed.
      *args, **kwargs: its arguments, or their shapes.
    """
    args, kwargs = jax.tree.map(_shape_of, (args, kwargs))
    with recorded():
        flops = count_flops(trace(fn, args, kwargs).closed)
    low = sum(flops[pair] for pair in flops if all(bits(dtype) <= 16 for dtype in pair))
    return low / flops.total() if flops.total() else None


def _shape_of(leaf: object) -> object:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def warn_if_low(
    model: type,
    suspects: list[Suspect],
    stacklevel: int,
    fn: Callable[..., Any],
    *args: PyTree,
    **kwargs: PyTree,
) -> None:
    """Warns of a model whose matmuls mostly run in float32 under a 16-bit policy.

    Args:
      model: its class.
      suspects: modules that seem to ignore the dtype of their policy.
      stacklevel: of the user's call, counted from the caller, as in `warnings.warn`.
      fn, *args, **kwargs: a call of the model, as in `low_precision_share`.
    """
    try:
        share = low_precision_share(fn, *args, **kwargs)
    except Exception:
        # A model that cannot be traced a second time may still be trained.
        return
    if share is None or share >= _LOW:
        return
    names = ", ".join(dict.fromkeys(suspect.cls for suspect in suspects))
    first = suspects[0]
    if first.method:
        reason = (
            f"The method {first.method!r} of the module {first.path!r} multiplies by its own "
            "parameters, but its arguments are cast only in a forward pass. Declare the method as "
            f"one: Rule({first.path!r}, forward_methods=[{first.method!r}])."
        )
    else:
        reason = (
            f"Layers of the class {names}, such as {first.path!r}, cast their operands to float32, "
            "which the policy of a module does not change. Apply the same recipe to each "
            "operation: loss_fn = jaxmp.autocast(loss_fn, recipe)."
        )
    warnings.warn(
        f"{share:.0%} of the matmul FLOPs of {model.__name__} run in 16 bits or fewer. {reason}",
        RecipeWarning,
        stacklevel=stacklevel + 1,
    )


# ---------------------------------------------------------------------------
# Models without FP8
# ---------------------------------------------------------------------------

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
    has_fp8 = getattr(traits.dot, "fp8", None) is not None
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
        casts = (e for e in traced if e.primitive.name == "convert_element_type")
        to_fp8 = any("float8" in str(new_dtype_of(cast)) for cast in casts)
        return not names.isdisjoint(MATMULS) and not to_fp8
    return True
