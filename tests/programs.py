"""What a traced program does: its equations, their dtypes, and the modules that emitted them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


def equations(jaxpr: Any, outer: Any = None) -> Iterator[Any]:
    """Every equation of a jaxpr, those of its sub-jaxprs included, each with its whole scope.

    Equations of a sub-jaxpr name the scopes inside of it alone: `outer` are those around it.
    """
    for equation in jaxpr.eqns:
        source = equation.source_info
        scopes = source.name_stack if outer is None else outer + source.name_stack
        yield equation.replace(source_info=source.replace(name_stack=scopes))
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, scopes)


def trace(fn: Callable[..., Any], *args: Any) -> list[Any]:
    return list(equations(jax.make_jaxpr(fn)(*args).jaxpr))


def module_path(equation: Any) -> str:
    """The modules that emitted an equation, within the scopes that Flax and autodiff leave."""
    return str(equation.source_info.name_stack)


def dtypes(equation: Any) -> tuple[str, ...]:
    """`("bfloat16", "bfloat16", "float32")`: operands, then the result."""
    return tuple(str(v.aval.dtype) for v in (*equation.invars[:2], equation.outvars[0]))


def products(traced: list[Any]) -> list[Any]:
    return [e for e in traced if e.primitive.name in ("dot_general", "conv_general_dilated")]


def named(traced: list[Any], *primitives: str) -> list[Any]:
    return [e for e in traced if e.primitive.name in primitives]


def leaf_dtypes(tree: Any) -> Any:
    """The tree with the name of its dtype in every leaf's place."""
    return jax.tree.map(lambda leaf: str(leaf.dtype), tree)


def relative_error(value: Any, reference: Any) -> float:
    """|value - reference| / |reference| in the 2-norm, over all leaves."""
    flat = [
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (value, reference)
    ]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))
