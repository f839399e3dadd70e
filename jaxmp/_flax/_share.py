"""Share of a model's matmul FLOPs in 16 bits or fewer, and a warning where it is low.

Classes of some packages cast their operands themselves, which the policy of a module cannot change.
Counting FLOPs needs a second trace of the model, so it is done only if a sign of such layers is
seen in the first: modules that own matrices and return float32 from 16-bit inputs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from jaxmp._autocast._trace import is_traced_by_autocast
from jaxmp._core._dtypes import FLOAT32, bits
from jaxmp._core._jaxprs import trace
from jaxmp._core._matmuls import count_flops
from jaxmp._core._typing import PyTree
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
