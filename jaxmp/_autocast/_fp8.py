"""FP8 matmuls of a traced function: which equations run in FP8, and the dots that replace them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp._autocast._values import is_matmul
from jaxmp._core._jaxprs import array_aval
from jaxmp._core._programs._operations import dot_of
from jaxmp._policies._resolve import Scaling, matmul_scaling
from jaxmp._recipe_files._load import PolicyMap
from jaxmp.errors import CompositionError
from jaxmp.fp8._dot_general import dot_general
from jaxmp.fp8._explain import Fp8Explanation as Fp8Explanation
from jaxmp.fp8._explain import decide_product
from jaxmp.fp8._explain import decisions as decisions
from jaxmp.fp8._explain import explanation_of as explanation_of
from jaxmp.fp8._explain import is_explained as is_explained
from jaxmp.fp8._explain import note_unsupported as note_unsupported
from jaxmp.fp8._explain import recorded as recorded
from jaxmp.fp8._explain import warn_if_unused as warn_if_unused


def autocast_scaling(policies: PolicyMap) -> Scaling | None:
    """Returns the scaling of FP8 matmuls; None if no policy sets `matmul = "fp8"`.

    Raises:
      CompositionError: if the scaling is stateful.
    """
    scaling = matmul_scaling(policies)
    if scaling is not None and scaling.is_stateful:
        name = type(scaling).__name__
        raise CompositionError(
            f"{name} stores a state for each matmul, but a traced function has no state. Scale by "
            "the tensors themselves: autocast(fn, recipe.replace(fp8='current')), or "
            "PolicyMap(..., fp8=fp8.CurrentScaling()). Or call "
            f"fp8.dot_general(fp8.{name}()) in the function, and pass it a state."
        )
    return scaling


def fp8_matmul(
    scaling: Scaling,
    equation: JaxprEqn,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    path: str,
    kernel: int,
    why: str,
) -> Callable[..., Any] | None:
    """Returns the `fp8.dot_general` that replaces a matmul; None if it does not run in FP8.

    Args:
      scaling: the scaling of the policies.
      equation: a matmul.
      shapes: shapes of its operands.
      path: its name scopes.
      kernel: 0 or 1, the operand that is treated as the kernel.
      why: reason to exclude the matmul whatever its sizes are; "" if there is none.
    """
    if not decide_product(scaling, path, shapes, dot_of(equation), kernel, why):
        return None
    return dot_general(scaling, kernel="rhs" if kernel else "lhs")


def record_excluded(scaling: Scaling, equations: Iterable[JaxprEqn], path: str, why: str) -> None:
    """Records for `jaxmp.explain` the matmuls among equations that run in their recorded dtypes."""
    if not is_explained():
        return
    for equation in equations:
        if is_matmul(equation):
            lhs, rhs = (array_aval(var).shape for var in equation.invars)
            decide_product(scaling, path, (lhs, rhs), dot_of(equation), 1, why)
