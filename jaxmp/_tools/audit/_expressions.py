"""Fixes as code: the expression of the source that makes an operation, with its casts changed."""

from __future__ import annotations

import ast
import itertools
import linecache

import numpy as np

from jaxmp._core._dtypes import FLOAT32
from jaxmp._programs._analysis import Body
from jaxmp._programs._constructs import CALLS, inners, sub_jaxprs
from jaxmp._programs._jaxprs import (
    FORWARD,
    Atom,
    Equation,
    equations,
    is_literal,
    phase_of,
    scope_names,
)
from jaxmp._programs._locations import call_site
from jaxmp._tools.audit._checks import PendingFindings
from jaxmp._tools.audit._program import LAYOUT, PERIODIC, OpOccurrence, dtype_of, half_of, named

_MOVES = LAYOUT | named("slice gather dynamic_slice concatenate rev select_n stop_gradient pad")
# Operations that round each element of a 16-bit array.
_ELEMENTWISE = _MOVES | named(
    "add sub mul div neg exp exp2 log log1p expm1 logistic tanh pow integer_pow square sqrt rsqrt"
    " max min clamp"
)
# If 16 bits enter at more lines, the fix casts the operand alone.
_MAX_ORIGINS = 4
# Modules whose functions compute with their first argument.
_MODULES = frozenset(["jnp", "jax", "lax", "nn", "nnx", "optax", "np", "numpy", "jsp"])
# Functions that make an array of a dtype, after one or two arguments.
_MAKERS = ("jax.random.", "jnp.arange", "jnp.full", "jnp.zeros", "jnp.ones")
# Functions of two arrays.
_BINARY = frozenset(("jnp.dot", "jnp.matmul", "jnp.take", "jnp.add", "jnp.multiply", "jnp.divide"))
_WIDE = ast.Attribute(ast.Name("jnp"), "float32")


def expression_of(op: OpOccurrence, findings: PendingFindings) -> ast.expr | None:
    """Returns the expression in the user's code whose call makes an operation.

    Returns:
      None without source code, or if an operation has no position in it.
    """
    for equation in (op.equation, *op.enclosing):
        traceback = equation.source_info.traceback
        frames = zip(*traceback.raw_frames(), strict=True) if traceback is not None else ()
        for code, instruction in frames:
            if findings.lines.is_own(code.co_filename):
                positions = itertools.islice(code.co_positions(), instruction // 2, None)
                return _parsed(code.co_filename, *next(positions, (None,) * 4))
    return None


def _parsed(
    file: str, line: int | None, end_line: int | None, start: int | None, end: int | None
) -> ast.expr | None:
    if line is None or end_line is None or start is None or end is None:
        return None
    lines = [linecache.getline(file, n).encode() for n in range(line, end_line + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        return ast.parse(f"({b''.join(lines).decode()})", mode="eval").body
    except (SyntaxError, ValueError):
        return None


def in_fp32(expression: ast.expr | None, back: str = "") -> str:
    """Returns an expression that computes in FP32; "" if it is not known how to change it.

    Args:
      expression: a call or an operation, of which the first array is cast, or a cast or a
        constant, whose dtype is replaced.
      back: the dtype of the result; "" for FP32.
    """
    changed = _changed(expression)
    if changed is None:
        return ""
    return ast.unparse(_cast(changed, back) if back else changed)


def narrowed(expression: ast.expr | None, index: int, dtype: str) -> str:
    """Returns an operation of two arrays with a cast of one; see `with_operand`."""
    return with_operand(expression, index, f"_.astype(jnp.{dtype})")


def with_operand(expression: ast.expr | None, index: int, code: str) -> str:
    """Returns an operation of two arrays with other code for one; "" for other expressions.

    Args:
      expression: of the operation.
      index: 0 for the first array, 1 for the second.
      code: the new operand, in which `_` is the old one.
    """

    def changed(operand: ast.expr) -> ast.expr:
        text = f"({ast.unparse(operand)})".join(code.split("_"))
        return ast.parse(text, mode="eval").body

    if isinstance(expression, ast.BinOp):
        sides = [expression.left, expression.right]
        sides[index] = changed(sides[index])
        return ast.unparse(ast.BinOp(sides[0], expression.op, sides[1]))
    if isinstance(expression, ast.Subscript) and index == 0:
        return ast.unparse(ast.Subscript(changed(expression.value), expression.slice))
    if isinstance(expression, ast.Call) and ast.unparse(expression.func) in _BINARY:
        arguments = list(expression.args)
        arguments[index] = changed(arguments[index])
        return ast.unparse(ast.Call(expression.func, arguments, expression.keywords))
    return ""


def with_split_copy(expression: ast.expr | None, spec: str, dtype: str, *, has_mesh: bool) -> str:
    """Returns a sharding constraint of an array that has another sharding before, or "".

    Args:
      expression: a call with an array and a sharding.
      spec: code of the partition spec before.
      dtype: to which the array is cast before; "" for its own.
      has_mesh: True if there is a mesh for a spec alone; otherwise it is that of the sharding.
    """
    if not isinstance(expression, ast.Call) or len(expression.args) != 2:
        return ""
    array, sharding = expression.args
    copy = _cast(array, dtype) if dtype else array
    mesh = ast.unparse(ast.Attribute(sharding, "mesh"))
    split = spec if has_mesh else f"jax.sharding.NamedSharding({mesh}, {spec})"
    before = ast.Call(expression.func, [copy, ast.parse(split, mode="eval").body], [])
    return ast.unparse(ast.Call(expression.func, [before, sharding], expression.keywords))


class _WideConstants(ast.NodeTransformer):
    """Makes arrays of a number and a dtype in FP32, such as `jnp.asarray(0.9, c)`."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        is_array = ast.unparse(node.func) in ("jnp.asarray", "jnp.array") and len(node.args) == 2
        if is_array and isinstance(node.args[0], ast.Constant):
            return ast.Call(node.func, [node.args[0], _WIDE], [])
        return node


def with_fp32_summand(expression: ast.expr | None, index: int | None) -> str:
    """Returns a sum with its constants, and one of its arrays, in FP32; "" if nothing changes.

    Args:
      expression: of the sum.
      index: 0 or 1 for the array to cast; None: none.
    """
    if expression is None:
        return ""
    before = ast.unparse(expression)
    changed = _WideConstants().visit(expression)
    after = narrowed(changed, index, "float32") if index is not None else ast.unparse(changed)
    return "" if after == before else after


def _changed(node: ast.expr | None) -> ast.expr | None:
    if isinstance(node, ast.BinOp) and not isinstance(node.left, ast.Constant):
        return ast.BinOp(_cast(node.left), node.op, node.right)
    if isinstance(node, ast.BinOp):
        return ast.BinOp(node.left, node.op, _cast(node.right))
    if not isinstance(node, ast.Call) or any(isinstance(n, ast.Starred) for n in node.args):
        return None
    function, arguments, name = node.func, node.args, ast.unparse(node.func)
    if isinstance(function, ast.Attribute) and function.attr == "astype":
        return ast.Call(function, [_WIDE], [])
    if any(k.arg == "dtype" for k in node.keywords):
        keywords = [
            ast.keyword(k.arg, _WIDE if k.arg == "dtype" else k.value) for k in node.keywords
        ]
        return ast.Call(function, arguments, keywords)
    if name.startswith(_MAKERS):
        last = 2 if name.startswith(("jax.random.", "jnp.full")) else 1
        return ast.Call(function, [*arguments[:last], _WIDE], node.keywords)
    if name.partition(".")[0] in _MODULES and arguments and _is_array(arguments[0]):
        return ast.Call(function, [_cast(arguments[0]), *arguments[1:]], node.keywords)
    if isinstance(function, ast.Attribute) and name.partition(".")[0] not in _MODULES:
        array = ast.Attribute(_cast(function.value), function.attr)
        return ast.Call(array, arguments, node.keywords)
    return None


def _is_array(argument: ast.expr) -> bool:
    """Returns False for a function, as in `jax.tree.map(jnp.add, x, y)`."""
    root = ast.unparse(argument).partition(".")[0]
    is_function = isinstance(argument, ast.Attribute) and root in _MODULES
    return not (is_function or isinstance(argument, ast.Lambda))


def _cast(array: ast.expr, dtype: str = "float32") -> ast.expr:
    function = array.func if isinstance(array, ast.Call) else None
    if dtype == "float32" and isinstance(function, ast.Attribute) and function.attr == "astype":
        # A wider cast of what is already rounded would not help.
        return ast.Call(function, [_WIDE], [])
    return ast.Call(
        ast.Attribute(array, "astype"), [ast.parse(f"jnp.{dtype}", mode="eval").body], []
    )


# ---------------------------------------------------------------------------
# Where a value is rounded
# ---------------------------------------------------------------------------


def fix_operation(op: OpOccurrence, findings: PendingFindings, back: str = "") -> str:
    """Returns the fix of an operation in 16 bits.

    A cast of its operand does not help if the operand was rounded before. The fix then changes the
    casts, the constants and the first operations of the elementwise computation.

    Args:
      op: the operation.
      findings: for the lines of the source.
      back: the dtype of the result; "" for FP32.

    Returns:
      Sentences and code, or "" without source code.
    """
    back = "" if _is_widened(op) else back
    own, origins = expression_of(op, findings), _rounded_by(op)
    lines, code = _at_origins(origins, op, in_fp32(own, back), findings)
    if lines and own is not None and back:
        code = ast.unparse(_cast(own, back))
    return "\n".join([*lines, *([f"Compute {op.name} in FP32:\n    {code}"] if code else [])])


def fix_origins(op: OpOccurrence, findings: PendingFindings) -> str:
    """Returns code for the lines at which an operand was rounded, or ""."""
    return "\n".join(_at_origins(_rounded_by(op), op, "", findings)[0])


def fix_before(
    result: OpOccurrence, origins: list[OpOccurrence], findings: PendingFindings, back: str
) -> str:
    """Returns the fix that computes some operations in FP32, and rounds the result made of them.

    Args:
      result: the operation whose result is cast back, if the user's own code has it.
      origins: the operations to compute in FP32.
      findings: for the lines of the source.
      back: the dtype of the result.

    Returns:
      Sentences and code, or "" without source code.
    """
    own = expression_of(result, findings) if findings.is_own_call(result.equation) else None
    code = "" if own is None else ast.unparse(own if _is_widened(result) else _cast(own, back))
    lines, changed = _at_origins(origins, result, code, findings)
    is_needed = code and (changed != code or (lines and not _is_widened(result)))
    last = f"Compute {result.name} in FP32:\n    {changed}"
    return "\n".join([*lines, *([last] if is_needed else [])])


def _at_origins(
    origins: list[OpOccurrence], op: OpOccurrence, code: str, findings: PendingFindings
) -> tuple[list[str], str]:
    """Returns the lines that compute operations in FP32, and `code` with those of its own line."""
    lines: dict[str, str] = {}
    for origin in origins if len(origins) <= _MAX_ORIGINS else ():
        expression = expression_of(origin, findings)
        changed = in_fp32(expression)
        is_here = findings.line_of(origin) == findings.line_of(op)
        if not changed or expression is None or (is_here and changed in code):
            continue
        if is_here and ast.unparse(expression) in code:
            code = code.replace(ast.unparse(expression), changed)
        else:
            where = findings.where(origin)
            lines[changed] = f"At {where}, do not round to 16 bits:\n    {changed}"
    code = code.replace(".astype(jnp.float32).astype(jnp.float32)", ".astype(jnp.float32)")
    return list(lines.values()), code


def _is_widened(op: OpOccurrence) -> bool:
    """Returns True if the forward pass only casts a result to FP32, or takes its sine.

    Elementwise operations of the result and of Python numbers may come before, which then compute
    in FP32 themselves. A cast of the result to 16 bits would only round it.
    """
    site, waiting = call_site(op.equation), list(op.equation.outvars)
    seen = set(waiting)
    meets_16_bits = is_cast = False
    while waiting:
        consumers = op.body.consumers.get(waiting.pop(), ())
        if None in consumers:
            return False
        readers = [e for e in consumers if _is_forward(e) and call_site(e) != site]
        if not readers:
            return False
        for reader in readers:
            name = reader.primitive.name
            is_wide = name == "convert_element_type" and dtype_of(reader.outvars[0]) == FLOAT32
            is_cast |= is_wide
            if is_wide or name in PERIODIC:
                continue
            if name not in _ELEMENTWISE:
                return False
            others = [v for v in reader.invars if not is_literal(v) and v not in seen]
            meets_16_bits |= half_of(others) is not None
            waiting += reader.outvars
            seen.update(reader.outvars)
    # A wide result would promote another 16-bit array before the cast.
    return not (meets_16_bits and is_cast)


def _rounded_by(op: OpOccurrence) -> list[OpOccurrence]:
    """Returns the operations by which 16 bits enter the elementwise computation of an operand."""
    scopes = scope_names(str(op.equation.source_info.name_stack))
    waiting = [(var, op) for var in _halves(op.equation)]
    seen: set[Atom] = set()
    origins = []
    while waiting:
        var, within = _through_calls(*waiting.pop())
        maker = within.body.maker(var)
        if maker is None or var in seen:
            continue
        seen.add(var)
        if scope_names(str(maker.source_info.name_stack)) != scopes and within is op:
            continue
        inputs, name = _halves(maker), maker.primitive.name
        is_cast = _is_rounding(maker)
        is_made = not inputs and name in ("iota", "broadcast_in_dim")
        is_entry = name not in _MOVES and not all(_is_computed(v, within.body) for v in inputs)
        is_entry &= _is_elementwise(maker)
        if is_cast or is_made or is_entry:
            origins.append(within._replace(equation=maker))
        if _is_elementwise(maker) and not is_cast:
            waiting += [(v, within) for v in inputs]
    return origins


def _through_calls(var: Atom, op: OpOccurrence) -> tuple[Atom, OpOccurrence]:
    """Returns the operand of a call such as `jnp.cumsum` in place of a parameter of its jaxpr."""
    while op.outer is not None and op.outer.name in CALLS:
        inner = inners(op.outer.equation)[0]
        pairs = zip(inner.operands, inner.jaxpr.invars, strict=True)
        operand = next((o for o, i in pairs if i is var), None)
        if operand is None:
            break
        var, op = operand, op.outer
    return var, op


def _halves(equation: Equation) -> list[Atom]:
    """Returns the 16-bit operands that are not literals."""
    return [v for v in equation.invars if not is_literal(v) and half_of([v]) is not None]


def _is_elementwise(equation: Equation) -> bool:
    """Returns True for an elementwise operation, and for a call such as that of a sigmoid."""
    inside = [e for jaxpr in sub_jaxprs(equation) for e in equations(jaxpr)]
    return all(e.primitive.name in _ELEMENTWISE for e in inside or [equation])


def _is_rounding(equation: Equation) -> bool:
    """Returns True for a cast of FP32 numbers or of integers to fewer bits."""
    is_cast = equation.primitive.name == "convert_element_type"
    return is_cast and np.dtype(dtype_of(equation.invars[0])).itemsize == 4


def _is_computed(var: Atom, body: Body) -> bool:
    """Returns True for a 16-bit result of a cast, a constant or another elementwise operation."""
    maker = body.maker(var)
    while maker is not None and maker.primitive.name in _MOVES and not _is_rounding(maker):
        if is_literal(maker.invars[0]):
            return True
        maker = body.maker(maker.invars[0])
    if maker is None:
        return False
    return _is_rounding(maker) or maker.primitive.name == "iota" or _is_elementwise(maker)


def _is_forward(equation: Equation) -> bool:
    return phase_of(str(equation.source_info.name_stack)) == FORWARD
