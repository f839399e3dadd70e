"""Functions to read the equations of a traced program, their dtypes and their modules."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


def equations(jaxpr: Any, outer: Any = None) -> Iterator[Any]:
    """Yields every equation of a jaxpr and of its sub-jaxprs, with its complete name scope.

    Equations of a sub-jaxpr contain only the scopes inside of it; `outer` is the scope around it.
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


def with_own_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with a rule for its gradient, which is that of `fn`."""
    wrapped = jax.custom_vjp(fn)
    wrapped.defvjp(lambda *args: jax.vjp(fn, *args), lambda vjp, above: vjp(above))
    return wrapped


def with_own_tangent(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with a rule for its tangent, which is that of `fn`."""
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return wrapped


def module_path(equation: Any) -> str:
    """Returns the module path of an equation, from the name scopes of Flax and autodiff."""
    return str(equation.source_info.name_stack)


def dtypes(equation: Any) -> tuple[str, ...]:
    """Returns the dtypes of operands and result, as `("bfloat16", "bfloat16", "float32")`."""
    return tuple(str(v.aval.dtype) for v in (*equation.invars[:2], equation.outvars[0]))


def products(traced: list[Any]) -> list[Any]:
    return [e for e in traced if e.primitive.name in ("dot_general", "conv_general_dilated")]


def operands(fn: Callable[..., Any], *args: Any) -> list[tuple[str, ...]]:
    """Returns the operand dtypes of every matmul and convolution, in order."""
    return [dtypes(equation)[:2] for equation in products(trace(fn, *args))]


def named(traced: list[Any], *primitives: str) -> list[Any]:
    return [e for e in traced if e.primitive.name in primitives]


def leaf_dtypes(tree: Any) -> Any:
    """Returns a tree with the name of the dtype of each leaf."""
    return jax.tree.map(lambda leaf: str(leaf.dtype), tree)


def relative_error(value: Any, reference: Any) -> float:
    """Returns |value - reference| / |reference| in the 2-norm, over all leaves."""
    flat = [
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (value, reference)
    ]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))
