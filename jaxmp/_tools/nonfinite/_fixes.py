"""Fixes as code: the user's expression with operands that are kept in the domain of a function."""

from __future__ import annotations

import ast
from collections.abc import Callable

# Functions of one array -> the smallest operand that has a finite result and derivative, for the
# dtype of the operand.
TINY, EPS = "jnp.finfo(({array}).dtype).tiny", "jnp.finfo(({array}).dtype).eps"
_MODULES = ("jnp.", "jax.", "lax.", "nn.", "nnx.", "np.", "numpy.")


def at_least(expression: ast.expr | None, bound: str) -> str:
    """Returns a call or power with a lower bound of its first operand; "" for other expressions.

    Args:
      expression: such as `jnp.log(x)` or `x ** 0.5`.
      bound: the bound as code, in which `{array}` is the operand.
    """
    return _replaced(expression, lambda text: f"jnp.maximum({text}, {bound.format(array=text)})")


def at_most(expression: ast.expr | None, bound: float) -> str:
    """Returns a call with an upper bound of its first operand; "" for other expressions."""
    return _replaced(expression, lambda text: f"jnp.minimum({text}, {bound:g})")


def divided(expression: ast.expr | None) -> str:
    """Returns a quotient with 1 in place of denominators of zero; "" for other expressions.

    If the denominator contains a root or a norm, these are kept positive instead: their derivative
    is infinite at zero.
    """
    if not isinstance(expression, ast.BinOp) or not isinstance(expression.op, ast.Div):
        return ""
    text = ast.unparse(expression.right)
    new = f"jnp.where({text} == 0, 1, {text})"
    for call in ast.walk(expression.right):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("sqrt", "norm")):
            new = text.replace(ast.unparse(call), norm(call) or at_least(call, TINY))
    return ast.unparse(ast.BinOp(expression.left, expression.op, _parsed(new)))


def norm(expression: ast.expr | None) -> str:
    """Returns a norm whose gradient is finite at zero; "" for other expressions."""
    if not isinstance(expression, ast.Call) or not _function(expression).endswith("norm"):
        return ""
    if len(expression.args) != 1 or {k.arg for k in expression.keywords} - {"axis", "keepdims"}:
        return ""
    array = ast.unparse(expression.args[0])
    more = "".join(f", {k.arg}={ast.unparse(k.value)}" for k in expression.keywords)
    bound = TINY.format(array=array)
    return f"jnp.sqrt(jnp.maximum(jnp.sum(jnp.square({array}){more}), {bound}))"


def in_fp32(expression: ast.expr | None) -> str:
    """Returns a conversion, operation or call in FP32; "" for other expressions."""
    wide = lambda node: _parsed(f"({ast.unparse(node)}).astype(jnp.float32)")
    if isinstance(expression, ast.BinOp):
        sides = [
            node if isinstance(node, ast.Constant) else wide(node)
            for node in (expression.left, expression.right)
        ]
        return ast.unparse(ast.BinOp(sides[0], expression.op, sides[1]))
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        if expression.func.attr == "astype":
            return ast.unparse(wide(expression.func.value))
        if _is_function_of_arrays(expression):
            arguments = [
                node if isinstance(node, (ast.Constant, ast.Starred)) else wide(node)
                for node in expression.args
            ]
            return ast.unparse(_call(expression, arguments))
    return ""


def double_where(where: ast.expr | None, inner: ast.expr | None) -> tuple[str, bool]:
    """Returns a `where` whose unused branch has a finite gradient.

    Args:
      where: the call `jnp.where(condition, x, y)`.
      inner: the call or quotient whose gradient is not finite, with an operand to replace.

    Returns:
      The code, and True if it replaces `where`; False if it replaces `inner`; "" if the
      expressions have other forms.
    """
    if not isinstance(where, ast.Call) or len(where.args) != 3 or inner is None:
        return "", True
    condition, *branches = map(ast.unparse, where.args)
    old = ast.unparse(inner)
    is_first = old in branches[0] and old not in branches[1]
    safe = "jnp.where({c}, {x}, 1)" if is_first else "jnp.where({c}, 1, {x})"
    make = lambda text: safe.format(c=condition, x=text)
    if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div):
        right = _parsed(make(ast.unparse(inner.right)))
        new = ast.unparse(ast.BinOp(inner.left, inner.op, right))
    else:
        new = _replaced(inner, make)
    text = ast.unparse(where)
    return (text.replace(old, new), True) if new and old in text else (new, False)


def log_sigmoid(expression: ast.expr | None) -> str:
    """Returns the logarithm of a sigmoid as one function; "" for other expressions."""
    inner = expression.args[:1] if isinstance(expression, ast.Call) else []
    for call in inner:
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("nn.sigmoid"):
            return f"jax.nn.log_sigmoid({ast.unparse(call.args[0])})"
    return ""


def _replaced(expression: ast.expr | None, change: Callable[[str], str]) -> str:
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Pow):
        left = _parsed(change(ast.unparse(expression.left)))
        return ast.unparse(ast.BinOp(left, expression.op, expression.right))
    if not isinstance(expression, ast.Call) or not expression.args:
        return ""
    if isinstance(expression.args[0], ast.Starred) or not _is_function_of_arrays(expression):
        return ""
    first = _parsed(change(ast.unparse(expression.args[0])))
    return ast.unparse(_call(expression, [first, *expression.args[1:]]))


def _is_function_of_arrays(call: ast.Call) -> bool:
    return _function(call).startswith(_MODULES)


def _function(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _call(call: ast.Call, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(call.func, arguments, call.keywords)


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
