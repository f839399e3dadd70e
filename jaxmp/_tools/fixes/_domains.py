"""New code for an expression: operands within the domain of a function, or a finite function.

Each function returns the code and records the edit. It returns "" for an expression with a function
that is not in the table, or of another form.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable

from jaxmp._tools.fixes import _functions, _rewrite, _source

# Bounds of an operand as code, in which `{array}` is the operand: its smallest positive normal
# number, the distance from 1 to the next larger number, and its lowest finite number.
TINY, EPS = "jnp.finfo(({array}).dtype).tiny", "jnp.finfo(({array}).dtype).eps"
LOWEST = "jnp.finfo(({array}).dtype).min"


def at_least(expression: _source.Expression, bound: str, domain: str) -> str:
    """Returns a call or power with a lower bound of its first operand.

    Args:
      expression: the call.
      bound: such as `TINY`.
      domain: the functions that may be called, a key of `DOMAINS`.
    """
    if "log1p" in expression.text.partition("(")[0]:
        bound = f"{EPS} - 1"
    change = lambda text: f"jnp.maximum({text}, {bound.format(array=text)})"
    return _bounded(expression, change, domain)


def at_most(expression: _source.Expression, bound: float, domain: str) -> str:
    """Returns a call with an upper bound of its first operand; see `at_least`."""
    return _bounded(expression, lambda text: f"jnp.minimum({text}, {bound:g})", domain)


def within(expression: _source.Expression, low: int, high: int | None) -> str:
    """Returns a call whose first operand is between two numbers, without these; None: no limit."""
    if high is None:
        least = f"{low} + {EPS}" if low else TINY
        return _bounded(expression, lambda text: f"jnp.maximum({text}, {least.format(array=text)})")
    limits = lambda eps: f"{f'{low} + ' if low else ''}{eps}, {high} - {eps}"
    change = lambda text: f"jnp.clip({text}, {limits(EPS.format(array=text))})"
    return _bounded(expression, change)


def divided(expression: _source.Expression) -> str:
    """Returns a quotient that divides by 1 where the denominator is zero.

    A root or a norm in the denominator gets a positive lower bound instead, because its derivative
    is infinite at zero.
    """
    node = expression.node
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return ""
    text = ast.unparse(node.right)
    new = f"jnp.where({text} == 0, 1, {text})"
    for call in ast.walk(node.right):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("sqrt", "norm", "std")):
            inner = _source.Expression(call, expression.place, [])
            new = text.replace(ast.unparse(call), norm(inner) or at_least(inner, TINY, "root"))
    return expression.replaced_by(ast.BinOp(node.left, node.op, _rewrite.parsed(new)))


def norm(expression: _source.Expression) -> str:
    """Returns a norm or standard deviation whose gradient is finite at zero."""
    node = expression.node
    if not isinstance(node, ast.Call):
        return ""
    name = _rewrite.known_function(expression)[0].rpartition(".")[2]
    if name == "std":
        call = expression.copy()
        call.func.attr = "var"
        square, array = ast.unparse(call), ast.unparse(call)
    elif name == "norm" and len(node.args) == 1:
        if {k.arg for k in node.keywords} - {"axis", "keepdims"}:
            return ""
        array = ast.unparse(node.args[0])
        more = "".join(f", {k.arg}={ast.unparse(k.value)}" for k in node.keywords)
        square = f"jnp.sum(jnp.square({array}){more})"
    else:
        return ""
    return expression.replaced_by(f"jnp.sqrt(jnp.maximum({square}, {TINY.format(array=array)}))")


def double_where(where: _source.Expression, inner: _source.Expression) -> str:
    """Returns a `where` whose unused branch has a finite gradient.

    Args:
      where: the call `jnp.where(condition, x, y)`.
      inner: the call or quotient whose gradient is not finite, with an operand to replace. It is
        replaced by itself if `where` reads it as a variable.
    """
    node = where.node
    if not inner.text or not isinstance(node, ast.Call) or len(node.args) != 3:
        return ""
    old, values = inner.text, _source.assigned_before(where)
    late = values.keys() - _source.assigned_before(inner).keys()
    defined = lambda n: values[n.id] if isinstance(n, ast.Name) and n.id in late else None
    condition = _rewrite.Changed(defined).visit(where.copy().args[0])
    is_first, is_second = (old in _with_values(branch, values) for branch in node.args[1:])
    if is_first == is_second:
        return ""
    safe = "jnp.where({c}, {x}, 1)" if is_first else "jnp.where({c}, 1, {x})"
    make = lambda text: safe.format(c=ast.unparse(condition), x=text)
    if isinstance(inner.node, ast.BinOp) and isinstance(inner.node.op, ast.Div):
        right = _rewrite.parsed(make(ast.unparse(inner.node.right)))
        new = ast.unparse(ast.BinOp(inner.node.left, inner.node.op, right))
    else:
        new = _bounded(_source.Expression(inner.node, inner.place, []), make)
    if new and old in where.text:
        return where.replaced_by(where.text.replace(old, new))
    return inner.replaced_by(new)


def _with_values(node: ast.expr, values: dict[str, ast.expr]) -> str:
    """Returns the code of an expression, and of the variables that it is made from."""
    nodes = [node]
    for each in nodes:
        names = (n.id for n in ast.walk(each) if isinstance(n, ast.Name))
        nodes += [values[name] for name in names if name in values and values[name] not in nodes]
    return "\n".join(map(ast.unparse, nodes))


# Functions of `jax.nn`, `flax` and SciPy -> the one that computes their logarithm.
_LOGARITHMS = {
    "sigmoid": "jax.nn.log_sigmoid",
    "expit": "jax.nn.log_sigmoid",
    "softmax": "jax.nn.log_softmax",
}


def in_one_function(expression: _source.Expression, *, in_fp32: bool = False) -> str:
    """Returns one function for steps that overflow, such as the log of a sum of exponentials.

    The code replaces the smallest expression around the given one that has such a function. The
    steps before may be lines above it, in the same function.

    Args:
      expression: the last step, or a part of it.
      in_fp32: True for a function that computes in FP32.
    """
    values = _source.assigned_before(expression)
    of_name = lambda node: values.get(node.id) if isinstance(node, ast.Name) else None
    for outer in _source.enclosing(expression):
        whole = _rewrite.Changed(of_name).visit(outer.copy()) if values else outer.node
        code = _in_one_function(outer) or _in_one_function(outer, whole)
        if code and in_fp32:
            code = _rewrite.wide_code(dataclasses.replace(outer, node=_rewrite.parsed(code)))
        if code := outer.replaced_by(code):
            return code
    return ""


def _in_one_function(expression: _source.Expression, node: ast.expr | None = None) -> str:
    name_of = lambda node: expression.name_of(node.func) if isinstance(node, ast.Call) else ""
    is_exp = lambda node: name_of(node) == "jax.numpy.exp"
    is_sum = lambda node: name_of(node) == "jax.numpy.sum"
    call = lambda function, arguments, keywords: ast.unparse(
        ast.Call(_rewrite.parsed(function), arguments, keywords)
    )
    log_of = lambda node: _LOGARITHMS.get(name_of(node).rpartition(".")[2], "")
    match node or expression.copy():
        case ast.BinOp(
            ast.Call(args=[x]) as exp, ast.Div(), ast.Call(args=[same], keywords=keywords) as total
        ) if is_exp(exp) and is_sum(total) and ast.unparse(same) == ast.unparse(exp):
            options = {keyword.arg: keyword for keyword in keywords}
            axis = options.pop("axis", None)
            others = [ast.unparse(keyword) for keyword in options.values()]
            is_softmax = others == ["keepdims=True"] or not (others or axis)
            axis = axis or ast.keyword("axis", ast.Constant(None))
            return call("jax.nn.softmax", [x], [axis]) if is_softmax else ""
        case ast.Call(args=[ast.Call(args=[x]) as exp]) as log if is_exp(exp):
            return call("jax.nn.softplus", [x], []) * (name_of(log) == "jax.numpy.log1p")
        case ast.Call(args=[inner]) as log if name_of(log) == "jax.numpy.log":
            pass
        case ast.Call(args=[ast.UnaryOp(ast.USub(), ast.Call(args=[x]) as p)]) as log if (
            name_of(log) == "jax.numpy.log1p" and log_of(p) == "jax.nn.log_sigmoid"
        ):
            return call(log_of(p), [ast.UnaryOp(ast.USub(), x)], [])
        case _:
            return ""
    match inner:
        case ast.BinOp(ast.Constant(1), ast.Add(), ast.Call(args=[x]) as exp) | ast.BinOp(
            ast.Call(args=[x]) as exp, ast.Add(), ast.Constant(1)
        ) if is_exp(exp):
            return call("jax.nn.softplus", [x], [])
        case ast.Call(args=[ast.Call(args=[x]) as exp, *more], keywords=keywords) as total if (
            is_sum(total) and is_exp(exp)
        ):
            return call("jax.scipy.special.logsumexp", [x, *more], keywords)
        case ast.Call(ast.Attribute(ast.Call(args=[x]) as exp, "sum"), more, keywords) if is_exp(
            exp
        ):
            return call("jax.scipy.special.logsumexp", [x, *more], keywords)
        case ast.Call(args=arguments, keywords=keywords) if log_of(inner):
            return call(log_of(inner), arguments, keywords)
        case ast.BinOp(ast.Constant(1), ast.Sub(), ast.Call(args=[x]) as p) if (
            log_of(p) == "jax.nn.log_sigmoid"
        ):
            return call(log_of(p), [ast.UnaryOp(ast.USub(), x)], [])
    return ""


def _bounded(expression: _source.Expression, change: Callable[[str], str], domain: str = "") -> str:
    """Returns a call of a known function, or a power, with another first operand."""
    node, (name, row) = expression.copy(), _rewrite.known_function(expression)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and domain in ("root", ""):
        node.left = _rewrite.parsed(change(ast.unparse(node.left)))
        return expression.replaced_by(node)
    if row is None or not isinstance(node, ast.Call):
        return ""
    # The logarithm of a density is that of its scale.
    is_density = name.startswith("jax.scipy.stats.") and domain == "log"
    for keyword in node.keywords if is_density else ():
        if keyword.arg == "scale":
            keyword.value = _rewrite.parsed(change(ast.unparse(keyword.value)))
            return expression.replaced_by(node)
    position = 2 if is_density else 0
    if domain and not is_density and name.rpartition(".")[2] not in _functions.DOMAINS[domain]:
        return ""
    if position < len(node.args) and not isinstance(node.args[position], ast.Starred):
        node.args[position] = _rewrite.parsed(change(ast.unparse(node.args[position])))
        return expression.replaced_by(node)
    return ""
