"""New code for an expression: other dtypes.

Each function returns the code and records the edit. It returns "" for an expression with a function
that is not in the table, or of another form.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp

from jaxmp._tools.fixes import _functions
from jaxmp._tools.fixes._source import Expression

_WIDE = ast.Attribute(ast.Name("jnp"), "float32")
_FP32 = "jax.numpy.float32"


# Several checks ask for the function of one expression.
@functools.lru_cache(maxsize=256)
def known_function(expression: Expression) -> tuple[str, _functions.Function | None]:
    """Returns the full name and the row of the table of the function that an expression calls."""
    node = expression.node
    if not isinstance(node, ast.Call):
        return "", None
    name = expression.name_of(node.func)
    # One of another name, as by `functools.partial`, is known by its code.
    called = map(_functions.name_of_code, () if name else expression.called)
    name = name or next(filter(None, called), "")
    if not name and isinstance(node.func, ast.Attribute):
        method = node.func.attr if _indexed(node.func) is None else f"at.{node.func.attr}"
        return method, _functions.METHODS.get(method)
    return name, _functions.FUNCTIONS.get(name)


# ---------------------------------------------------------------------------
# Dtypes
# ---------------------------------------------------------------------------


def in_fp32(expression: Expression) -> str:
    """Returns an expression that computes in FP32.

    Args:
      expression: a call or an operation, of which the first array is cast, or a cast or a
        constant, whose dtype is replaced.
    """
    return expression.replaced_by(in_wide_dtypes(expression, wide_code(expression)))


def in_wide_dtypes(expression: Expression, code: str) -> str:
    """Returns FP32 code of an expression without 16-bit numbers: `jnp.float16(1e-8)` is 0."""

    def widened(node: ast.AST) -> ast.expr | None:
        match node:
            case ast.Call(function, [ast.Constant() as number], []) if is_16bit(function):
                return number
        return None

    is_16bit = lambda function: expression.name_of(function) in _functions.DTYPES - {_FP32}
    return ast.unparse(Changed(widened).visit(parsed(code))) if code else ""


# Several checks ask for the code of one expression.
@functools.lru_cache(maxsize=256)
def wide_code(expression: Expression) -> str:
    """Returns code that computes an expression in FP32, or "" for an unknown function."""
    changed = _widened(expression)
    return "" if changed is None else ast.unparse(changed)


def narrow_code(expression: Expression, code: str, dtype: str) -> str:
    """Returns code with a cast of its result; "" for integers and pytrees."""
    row = known_function(expression)[1]
    is_array = row is None or (row.returns_arrays and not row.is_tree)
    return ast.unparse(cast(parsed(code), dtype)) if is_array else ""


def narrowed(expression: Expression, indices: Collection[int], dtype: str) -> str:
    """Returns an operation of two arrays that casts some of them to 16 bits.

    All operands of an einsum are cast, because JAX may exchange them. If the operation is a matmul,
    the edit also contains code that returns FP32 sums.

    Args:
      expression: of the operation.
      indices: 0 for the first array, 1 for the second.
      dtype: such as "bfloat16".
    """
    name = known_function(expression)[0]
    if name == "jax.numpy.einsum":
        indices = range(len(_operands(expression.node, expression)))
    code = _with_operands(expression, indices, lambda old: _in_dtype(old, dtype, expression))
    sums = _with_sums(parsed(code), name, "float32") if code else None
    return expression.replaced_by(code, "" if sums is None else ast.unparse(sums))


def with_operand(expression: Expression, index: int, code: str) -> str:
    """Returns an operation of two arrays in which code replaces one; see `narrowed`."""
    return expression.replaced_by(_with_operands(expression, [index], lambda _: parsed(code)))


def scaled(expression: Expression, sign: str, scale: float, later: Expression) -> str:
    """Returns an operation of two arrays of which the first is multiplied by a scale, or divided.

    It is an edit if `later`, which scales the result, contains it. Otherwise another line must
    change, too.
    """
    operator = ast.Mult() if sign == "*" else ast.Div()
    product = lambda first: ast.BinOp(first, operator, ast.Constant(scale))
    code, node = _with_operands(expression, [0], product), later.node
    is_whole = isinstance(node, ast.BinOp) and ast.unparse(node.left) == expression.text
    return later.replaced_by(code) if is_whole else code


def _with_operands(
    expression: Expression, indices: Collection[int], change: Callable[[ast.expr], ast.expr]
) -> str:
    """Returns an operation with changes of some of its arrays; "" without these arrays."""
    node = expression.copy()
    operands = _operands(node, expression)
    if not indices or max(indices) >= len(operands):
        return ""
    new = {operands[index]: change(operands[index]) for index in indices}
    return ast.unparse(Changed(new.get).visit(node))


class Changed(ast.NodeTransformer):
    """Replaces those nodes of a syntax tree for which a function returns another one."""

    def __init__(self, change: Callable[[Any], ast.expr | None]) -> None:
        self.change = change

    def visit(self, node: Any) -> Any:
        new = self.change(node)
        return self.generic_visit(node) if new is None else new


def _operands(node: ast.expr, expression: Expression) -> list[ast.expr]:
    """Returns the operands of an operation that computes with several; of a lookup, its table."""
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Subscript):
        return [node.value]
    if not isinstance(node, ast.Call):
        return []
    name, row = known_function(expression)
    if name == "dot" and isinstance(node.func, ast.Attribute):
        return [node.func.value, *node.args[:1]]
    if name == "jax.numpy.take":
        return node.args[:1]
    if name == "jax.numpy.where" and len(node.args) == 3:
        condition, if_true, if_false = node.args
        return [condition, if_false, if_true]
    if name == "jax.numpy.concatenate" and isinstance(node.args[0], ast.List | ast.Tuple):
        return node.args[0].elts
    is_pair = row is not None and len(row.arrays) > 1
    return _functions.arguments_of(node, name, row) if row is not None and is_pair else []


def in_dtype(expression: Expression, dtype: str) -> str:
    """Returns an expression with a result of another dtype; a cast remains a single cast."""
    return expression.replaced_by(_in_dtype(expression.copy(), dtype, expression))


def _in_dtype(node: ast.expr, dtype: str, expression: Expression) -> ast.expr:
    target = parsed(f"jnp.{dtype}")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = expression.name_of(node.func)
        if node.func.attr in _CASTS:
            return _recast(node, dtype)
        if name in _functions.DTYPES:
            return ast.Call(target, node.args, [])
        if name in _functions.CASTS and node.args:
            return ast.Call(node.func, [node.args[0], target], [])
    return cast(node, dtype)


def with_fp32_summand(expression: Expression, index: int | None) -> str:
    """Returns a sum with its constants, and one of its arrays, in FP32.

    Args:
      expression: of the sum.
      index: 0 or 1 for the array to cast; None: none.
    """

    def widened(node: ast.AST) -> ast.expr | None:
        # An array of a number and a dtype, such as `jnp.asarray(0.9, c)`.
        match node:
            case ast.Call(function, [ast.Constant() as number, _]) if (
                expression.name_of(function) in _functions.CASTS
            ):
                return ast.Call(function, [number, _WIDE], [])
        return None

    node = Changed(widened).visit(expression.copy())
    if index is not None and isinstance(node, ast.BinOp):
        side = "right" if index else "left"
        setattr(node, side, cast(getattr(node, side)))
    return expression.replaced_by(node)


def with_fp32_start(loop: Expression, number: int, count: int) -> str:
    """Returns a call of a loop whose carry starts in FP32; "" for another function.

    Args:
      loop: the call.
      number: of the carry among all carries, from the end: -1 is the last one.
      count: of all carries, with the counter and the limit of `fori_loop`.
    """
    node = loop.copy()
    position = _functions.LOOPS.get(loop.name_of(node.func)) if isinstance(node, ast.Call) else None
    if position is None:
        return ""
    passed = [*node.args[position : position + 1]]
    passed += [k.value for k in node.keywords if k.arg in ("init", "init_val")]
    starts = passed[0].elts if passed and isinstance(passed[0], ast.Tuple) else passed
    if any(isinstance(start, ast.Starred) for start in starts):
        return ""
    if len(starts) not in range(count - 2 * (position == 3), count + 1):
        # One of them is a pytree.
        trees = {start: _cast_tree(start) for start in starts if not _is_number(start)}
        if len(trees) > 1:
            return ""
        return loop.replaced_by(Changed(trees.get).visit(node))
    if len(starts) < -number:
        return ""
    old = starts[number]
    row = _functions.FUNCTIONS.get(loop.name_of(old.func)) if isinstance(old, ast.Call) else None
    if isinstance(old, ast.Call) and row is not None and row.dtype is not None:
        new = _with_wide_arguments(old, "", row)
    elif isinstance(old, ast.Call):
        new = _in_dtype(old, "float32", loop)
    else:
        new = parsed(f"jnp.float32({ast.unparse(old)})")
    return "" if new is None else loop.replaced_by(Changed({old: new}.get).visit(node))


def _widened(expression: Expression) -> ast.expr | None:
    node = expression.copy()
    if isinstance(node, ast.BinOp):
        side = "right" if isinstance(node.left, ast.Constant) or expression.second else "left"
        setattr(node, side, cast(getattr(node, side)))
        return node
    if isinstance(node, ast.UnaryOp):
        return ast.UnaryOp(node.op, cast(node.operand))
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    is_cast = isinstance(function, ast.Attribute) and function.attr in _CASTS
    name, row = known_function(expression)
    if is_cast or name in _functions.DTYPES:
        # A cast to integers reads what was rounded before.
        is_integer = is_cast and "int" in ast.unparse(node)
        return None if is_integer else _in_dtype(node, "float32", expression)
    return None if row is None else _with_wide_arguments(node, name, row)


def _with_wide_arguments(node: ast.Call, name: str, row: _functions.Function) -> ast.expr | None:
    for keyword in node.keywords:
        if keyword.arg == "dtype":
            keyword.value = _WIDE
            return node
    if row.dtype is not None:
        if 0 <= row.dtype < len(node.args):
            node.args[row.dtype] = _WIDE
        else:
            node.keywords.append(ast.keyword("dtype", _WIDE))
        return node
    if name in _functions.METHODS and isinstance(node.func, ast.Attribute):
        indexed = _indexed(node.func)
        owner = node.func if indexed is None else indexed
        owner.value = cast(owner.value)
        if indexed is not None:
            node.args[:1] = [each if _is_number(each) else cast(each) for each in node.args[:1]]
        return node
    arrays = (
        n for n in _functions.arguments_of(node, name, row) if not isinstance(n, ast.Constant)
    )
    first = next(arrays, None)
    if first is None:
        return None
    return Changed({first: (_cast_tree if row.is_tree else cast)(first)}.get).visit(node)


def _indexed(method: ast.Attribute) -> ast.Attribute | None:
    """Returns `x.at` of the method `x.at[i].add`; None for another method."""
    at = method.value.value if isinstance(method.value, ast.Subscript) else None
    return at if isinstance(at, ast.Attribute) and at.attr == "at" else None


def with_sums(expression: Expression, dtype: str) -> str:
    """Returns a matmul with another `preferred_element_type`."""
    node = _with_sums(expression.copy(), known_function(expression)[0], dtype)
    return "" if node is None else expression.replaced_by(node)


def _with_sums(node: ast.expr, name: str, dtype: str) -> ast.expr | None:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        node = ast.Call(parsed("jnp.matmul"), [node.left, node.right], [])
    elif not isinstance(node, ast.Call) or name not in _functions.MATMULS:
        return None
    option = "preferred_element_type"
    node.keywords = [k for k in node.keywords if k.arg != option]
    node.keywords.append(ast.keyword(option, parsed(f"jnp.{dtype}")))
    return node


def with_wide_layer(layer: Expression) -> str:
    """Returns the constructor of a Flax layer that returns FP32 sums.

    Args:
      layer: the constructor, or a call of what it constructs.
    """
    node = layer.copy()
    call = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Call) else node
    name = layer.name_of(call.func) if isinstance(call, ast.Call) else ""
    if name not in _functions.LAYERS:
        return ""
    argument: Any = parsed(f"f({_functions.LAYERS[name]})")
    call.keywords = [k for k in call.keywords if k.arg != argument.keywords[0].arg]
    call.keywords += argument.keywords
    # A layer of NNX was constructed before the function is traced, so that no trial can change it.
    return ast.unparse(node) if name.startswith("flax.nnx") else layer.replaced_by(node)


def with_wide_attend(expression: Expression, embedding: Expression, dtype: str) -> str:
    """Returns a matmul with FP32 sums that replaces `embed.attend(x)`.

    Args:
      expression: the call.
      embedding: the constructor of `embed`.
      dtype: of the operands.
    """
    node = expression.node
    if not isinstance(node, ast.Call) or known_function(embedding)[0] not in _functions.EMBEDDINGS:
        return ""
    operand = ast.unparse(cast(node.args[0], dtype))
    assert isinstance(node.func, ast.Attribute)
    table = f"{ast.unparse(node.func.value)}.embedding.astype(jnp.{dtype}).T"
    code = f"jnp.matmul({operand}, {table}, preferred_element_type=jnp.float32)"
    return expression.replaced_by(code)


def with_finite_numbers(expression: Expression, dtype: str) -> str:
    """Returns an expression whose constants are at most the largest number of a dtype."""
    largest = float(jnp.finfo(dtype).max)

    def limited(node: Any) -> ast.expr | None:
        is_negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
        number = node.operand if is_negative else node
        value = number.value if isinstance(number, ast.Constant) else None
        if not isinstance(value, (int, float)) or not largest < value < math.inf:
            return None
        return parsed(f"jnp.finfo(jnp.{dtype}).{'min' if is_negative else 'max'}")

    return expression.replaced_by(Changed(limited).visit(expression.copy()))


def cast(array: ast.expr, dtype: str = "float32") -> ast.expr:
    """Returns code for a cast of an array.

    It is before a bound or an epsilon, which 16 bits may round to 1 or 0, and before a square,
    which overflows early.
    """
    is_wide = dtype == "float32"
    part = _squared(array) or _before_epsilon(array) if is_wide else None
    if part is not None:
        return Changed({part: cast(part)}.get).visit(array)
    if is_wide and isinstance(array, ast.Call) and isinstance(array.func, ast.Attribute):
        function, numbers = array.func, [each.value for each in array.keywords]
        if function.attr in _CASTS:
            # A wider cast of what is already rounded would not help.
            return _recast(array, dtype)
        first, *bounds = array.args or [_WIDE]
        if function.attr in _BOUNDS and all(map(_is_number, bounds + numbers)):
            if not _is_number(first):
                return ast.Call(function, [cast(first), *bounds], array.keywords)
            if function.attr == "clip":
                method = ast.Attribute(cast(function.value), "clip")
                return ast.Call(method, array.args, array.keywords)
    return ast.Call(ast.Attribute(array, "astype"), [parsed(f"jnp.{dtype}")], [])


_BOUNDS = ("clip", "maximum", "minimum")
# The last argument of these methods and functions is the dtype of their result.
_CASTS = ("astype", "convert_element_type")


def _recast(call: ast.Call, dtype: str) -> ast.Call:
    """Returns a cast, such as `x.astype(d)` or `jnp.astype(x, d)`, to another dtype."""
    count = len(call.args) + any(keyword.arg in ("dtype", "new_dtype") for keyword in call.keywords)
    return ast.Call(call.func, [*call.args[: count - 1], parsed(f"jnp.{dtype}")], [])


def _squared(node: ast.expr) -> ast.expr | None:
    """Returns the operand of a square, such as `x ** 2`; None for another expression."""
    match node:
        case ast.Call(ast.Attribute(attr="square"), [x], []):
            return x
        case ast.BinOp(x, ast.Pow(), ast.Constant(2)):
            return x
        case ast.BinOp(x, ast.Mult(), same) if ast.unparse(x) == ast.unparse(same):
            return x
    return None


def _before_epsilon(node: ast.expr) -> ast.expr | None:
    """Returns the operand of a sum with a small number, such as `x + 1e-8`; None for others."""
    match node:
        case ast.BinOp(x, ast.Add(), ast.Constant(value) | ast.Call(_, [ast.Constant(value)], [])):
            return x if isinstance(value, float) and value < 1e-3 else None
    return None


def _is_number(node: ast.expr) -> bool:
    """Returns True for an expression of numbers, such as `1 - 1e-7`."""
    names = (ast.Name, ast.Call)
    return not any(isinstance(each, names) for each in ast.walk(node))


_CAST_TREE = "jax.tree.map(lambda x: x.astype(jnp.float32),"


def _cast_tree(tree: ast.expr) -> ast.expr:
    if ast.unparse(tree).startswith(_CAST_TREE):
        return tree
    return parsed(f"{_CAST_TREE} {ast.unparse(tree)})")


def with_split_copy(expression: Expression, spec: str, dtype: str, *, has_mesh: bool) -> str:
    """Returns a sharding constraint of an array that has another sharding before.

    Args:
      expression: a call with an array and a sharding.
      spec: code of the partition spec before.
      dtype: the dtype to which the array is cast before; "" for no cast.
      has_mesh: True if the call is inside of a mesh, so that a spec suffices. Otherwise, the new
        sharding has the mesh of the old one.
    """
    node = expression.node
    if not isinstance(node, ast.Call) or len(node.args) != 2:
        return ""
    array, sharding = node.args
    copy = cast(array, dtype) if dtype else array
    mesh = ast.unparse(ast.Attribute(sharding, "mesh"))
    split = spec if has_mesh else f"jax.sharding.NamedSharding({mesh}, {spec})"
    before = ast.Call(node.func, [copy, parsed(split)], [])
    return expression.replaced_by(ast.Call(node.func, [before, sharding], node.keywords))


def parsed(text: str) -> ast.expr:
    """Returns the syntax tree of an expression."""
    return ast.parse(text, mode="eval").body
