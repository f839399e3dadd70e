"""Fixes of operations in 16 bits: of the expression, and of those that round its operands."""

from __future__ import annotations

import ast
import functools
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxmp import _core, _programs
from jaxmp._tools.audit import _checks, _dataflow
from jaxmp._tools.audit._checks import OpOccurrence
from jaxmp._tools.fixes import _functions, _rewrite, _source

_MOVES = _checks.LAYOUT | _core.named(
    "slice gather dynamic_slice concatenate rev select_n stop_gradient pad"
)
# Operations that round each element of a 16-bit array.
_ELEMENTWISE = _MOVES | _core.named(
    "add sub mul div neg exp exp2 log log1p expm1 logistic tanh pow integer_pow square sqrt rsqrt"
    " max min clamp"
)
# Primitives between a user's cast and the matmul that reads it.
_BEFORE_MATMUL = _core.named("reshape broadcast_in_dim squeeze expand_dims transpose mul div")
_LOGS = _core.named("log log1p log2")
# Operations of a norm: the sum of elementwise results.
SUMS = _ELEMENTWISE | _core.named("reduce_sum")
# Functions whose results are probabilities, of which a difference cancels.
_PROBABILITIES = ("softmax", "sigmoid")
# If 16 bits enter at more other expressions, the fix casts the operand alone.
_MAX_ORIGINS = 4


def fix_operation(
    op: OpOccurrence,
    back: str = "",
    through: frozenset[str] = _ELEMENTWISE,
    operand: OpOccurrence | None = None,
) -> str:
    """Returns the fix of an operation in 16 bits.

    A cast of its operand does not help if the operand was rounded before. The fix then changes the
    casts, the constants and the first operations of the elementwise computation.

    Args:
      op: the operation.
      back: the dtype of the result; "" for FP32.
      through: the primitives that compute the operand from what was rounded.
      operand: the operation to compute in FP32 if no code is known for what was rounded.

    Returns:
      Sentences and code, words alone if the function is not known, or "" without source code.
    """
    own = op.expression
    if not _rewrite.wide_code(own):
        return in_words(op)
    back = "" if _is_widened(op) or _is_read_exactly(op, _rewrite.known_function(own)[0]) else back
    lines, wide = _at_origins(_rounded_by(op, through), op, own)
    if operand is not None and not lines and wide == _rewrite.wide_code(own):
        lines, wide = _at_origins([operand], op, own)
    if lines and back and "dtype=" not in own.text:
        wide = own.text
    wide = _rewrite.in_wide_dtypes(own, wide)
    dtype = _checks.half_of((*op.operands, *op.equation.outvars))
    narrowed = lambda code: "" if dtype is None else _rewrite.narrow_code(own, code, dtype.name)
    narrow, alone = narrowed(wide), _rewrite.wide_code(own) if lines else ""
    code, other = (narrow, wide) if back and narrow else (wide, narrow)
    alone = narrowed(alone) if alone and back and narrow else alone
    code = own.replaced_by(code, other, alone)
    function = _rewrite.known_function(own)[0]
    short = function if ".tree" in function else function.rpartition(".")[2]
    name = short or op.name.replace("convert_element_type", "the value")
    sentence = f"Compute {_widened_calls(code) or name} in FP32"
    if function.startswith("jax.random."):
        sentence += ", by which other numbers are drawn"
    return "\n".join([*lines, *([f"{sentence}:\n    {code}"] if code else [])])


# Many findings have the same code.
@functools.lru_cache(maxsize=256)
def _widened_calls(code: str) -> str:
    """Returns the names of the functions whose operands some code casts to FP32."""
    names = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            operands = (n for n in node.args if not isinstance(n, ast.Lambda))
            arrays = owner, *(ast.unparse(_first_operand(operand)) for operand in operands)
            if any(text.endswith(_source.IN_FP32) for text in arrays):
                names[name] = None
    return " and ".join(names)


def _first_operand(node: ast.expr) -> ast.expr:
    return _first_operand(node.left) if isinstance(node, ast.BinOp) else node


def fix_expression(sentence: str, op: OpOccurrence) -> str:
    """Returns the fix that computes an expression in FP32, or that of `in_words`.

    Args:
      sentence: what the code does.
      op: the operation of the expression.
    """
    code = _rewrite.in_fp32(op.expression)
    return f"{sentence}:\n    {code}" if code else in_words(op)


def fix_cast(op: OpOccurrence) -> str:
    """Returns the fix that does not round a value."""
    if _is_shared(op):
        array = op.operands[0].aval.str_short()
        return f"At {op.where}, do not round {array} to 16 bits with the other arrays."
    sentence = f"At {op.where}, do not round to 16 bits"
    return fix_expression(sentence, op) or f"{sentence}."


def without_rounding(op: OpOccurrence, code: str) -> list[str]:
    """Returns the line of a fix with code that does not round a value; none without code."""
    return [f"At {op.where}, do not round to 16 bits:\n    {code}"] if code else []


def fix_sums(sentence: str, op: OpOccurrence, dtype: str) -> str:
    """Returns the fix of a matmul whose sums have another dtype."""
    own, argument = op.expression, f"preferred_element_type=jnp.{dtype}"
    code = _rewrite.with_sums(own, dtype) if own.text else f"jnp.matmul(x, w, {argument})"
    if code:
        return f"{sentence}:\n    {code}"
    if is_in_flax(op):
        return _fix_layer(sentence, op, own)
    return f"{sentence}: set {argument} in the matmul that `{own.text}` computes."


def fix_wide(sentence: str, op: OpOccurrence, indices: list[int], dtype: str) -> str:
    """Returns the fix that casts operands, in words if its code is not known.

    The operands of a library's function follow the policies.
    """
    own = op.expression
    code = _rewrite.narrowed(own, indices, dtype)
    operands = " and ".join(op.operands[index].aval.str_short() for index in indices)
    if code:
        return f"{sentence}:\n    {code}"
    if own.text and not op.is_own_call:
        return f"Apply the policies to it:\n    {apply_code(op)}"
    where = f" of `{own.text}`" if own.text else ""
    return f"{sentence}, {operands}{where}, to {dtype}."


def fix_casts(op: OpOccurrence) -> str:
    """Returns the fix of a matmul with an operand that the user's code casts to FP32, or "".

    The operand without a cast, such as an FP32 parameter, is cast to 16 bits, too.
    """
    casts = [_own_cast(var, op) for var in op.operands[:2]]
    dtypes = [_checks.dtype_of(cast.operands[0]).name for cast in casts if cast is not None]
    if not dtypes:
        return ""
    own, dtype, lines, here = op.expression, dtypes[0], list[str](), list[int]()
    site = _programs.call_site(op.equation)
    for index, cast in enumerate(casts):
        # The call of the matmul promotes an operand that is in 16 bits.
        is_promoted = cast is not None and _programs.call_site(cast.equation) == site
        expression = _source.UNKNOWN if cast is None else cast.expression
        # The cast may be a part of the matmul.
        is_inside = own.contains(expression) and bool(_rewrite.narrowed(own, [0, 1], dtype))
        if cast is None or not expression.text or is_inside:
            here += [] if is_promoted else [index]
        elif not is_promoted and (code := _rewrite.in_dtype(expression, dtype)):
            lines.append(f"At {cast.where}, replace {expression.text} by:\n    {code}")
    if here and not op.is_own_call:
        # The operands of a library's layer follow the policies.
        return ""
    both = "operands" if len(here) == 2 else "wide operand" if lines else "other operand"
    more = [fix_wide(f"Cast the {both}", op, here, dtype)] if here else []
    return "\n".join(dict.fromkeys(lines + more))


def _own_cast(var: _programs.Atom, op: OpOccurrence) -> OpOccurrence | None:
    """Returns the cast from 16 bits in the user's code that an operand comes from."""
    cast = op.made_by(var, _BEFORE_MATMUL)
    if cast is None or cast.name != "convert_element_type" or not _checks.half_of(cast.operands):
        return None
    return cast if cast.is_own_call else None


def is_in_flax(op: OpOccurrence, package: str = "flax") -> bool:
    """Returns True for an operation that Flax's own code computes."""
    site = _programs.call_site(op.equation)
    return site is not None and f"/{package}/" in site[0].co_filename.replace("\\", "/")


def apply_code(op: OpOccurrence) -> str:
    """Returns code that applies the policies to an operation: to a model of Flax, or a function.

    `wrap` does not reach the functions of Flax that the user's code calls.
    """
    function, _ = _rewrite.known_function(op.expression)
    is_of_layer = op.is_within("/flax/") and not function.startswith("flax.")
    return op.audit.context.wrap_code if is_of_layer else op.audit.context.autocast_code


def _fix_layer(sentence: str, op: OpOccurrence, own: _source.Expression) -> str:
    """Returns the fix of a layer of Flax that returns FP32 sums, in words for a function."""
    layer, dtype = _source.constructor_of(own), _checks.half_of(op.operands)
    assert dtype is not None
    if ".attend(" in own.text:
        code = _rewrite.with_wide_attend(own, layer, dtype.name)
        return f"{sentence}:\n    {code}" if code else in_words(op)
    if code := _rewrite.with_wide_layer(layer):
        where = _source.text_of(*layer.place[:2])
        return f"At {where}, {sentence[0].lower()}{sentence[1:]}:\n    {code}"
    if _rewrite.known_function(own)[0].startswith("flax.") and layer is not own:
        return in_words(op)
    is_nnx = is_in_flax(op, "flax/nnx")
    linear, conv = ("nnx.Linear", "nnx.Conv") if is_nnx else ("linen.Dense", "linen.Conv")
    argument = _functions.LAYERS[f"flax.{conv if 'conv' in op.name else linear}"]
    return f"{sentence}: construct the layer that `{own.text}` calls with {argument}."


def in_words(op: OpOccurrence) -> str:
    """Returns the remedy of an operation whose function is not known; "" without source code."""
    own = op.expression
    if not own.text:
        return ""
    called = own.node.func if isinstance(own.node, ast.Call) else own.node
    half = next((v for v in op.operands if _checks.half_of([v]) is not None), op.operands[0])
    operand = half.aval.str_short()
    if op.name == "convert_element_type" and is_in_flax(op, "jaxmp") and not op.is_own_call:
        return (
            f"At {op.where}, the policies cast {operand} where a module receives or returns it. In"
            " a rule for the module, name an argument in `keep_inputs`, or set the output dtype to"
            " FP32. Or apply the recipe to operations, by `jaxmp.autocast`."
        )
    return (
        f"At {op.where}, `{ast.unparse(called)}` computes {op.name} of {operand}. Cast"
        " the arrays that it reads to FP32 before, and its floating-point results back after it."
    )


def fix_origins(op: OpOccurrence) -> str:
    """Returns code for the lines at which an operand was rounded, or ""."""
    return "\n".join(_at_origins(_rounded_by(op), op, _source.UNKNOWN)[0])


def fix_rounding(op: OpOccurrence) -> str:
    """Returns the fix of the roundings from which FP32 operands are computed, or ""."""
    casts, waiting = [], [(operand, op) for operand in op.operands]
    for origin in _makers(waiting):
        if _is_rounding(origin.equation) and _checks.half_of([origin.result]) is not None:
            casts.append(origin)
        elif _checks.half_of(origin.operands) is not None:
            casts += _rounded_by(origin)
        elif _is_elementwise(origin.equation):
            waiting += [(v, origin) for v in origin.operands if not _programs.is_literal(v)]
    lines = _at_origins(casts, op, _source.UNKNOWN)[0]
    return "\n".join([*lines, *map(fix_cast, filter(_is_shared, casts))])


def _at_origins(
    origins: list[OpOccurrence], op: OpOccurrence, own: _source.Expression
) -> tuple[list[str], str]:
    """Returns the lines that compute operations in FP32, and code for an expression.

    Args:
      origins: the operations that round.
      op: the operation that reads their results.
      own: its expression, whose code contains the origins inside of it; if it is not known, no code
        is returned.
    """
    code, parts = _rewrite.wide_code(own), list[tuple[_source.Expression, str]]()
    expressions = [origin.expression for origin in origins]
    outside = {each.place for each in expressions if not own.contains(each)}
    is_few = len(outside) <= _MAX_ORIGINS
    for origin, expression in zip(origins, expressions, strict=True) if is_few else ():
        sites = [_programs.call_site(each.equation) or (None,) for each in (origin, op)]
        # A function that runs for other shapes as a whole, such as a norm, may change.
        is_whole = sites[0][0] is sites[1][0] and _is_shared(op)
        if (_is_shared(origin) and not is_whole) or not _dataflow.is_forward(origin.equation):
            continue
        changed = _rewrite.in_fp32(expression)
        is_here = origin.line == op.line
        # The zeros that a function adds to are a part of it.
        is_own = expression.place == own.place
        if not changed or is_own or (is_here and changed in code):
            continue
        if is_here and expression.text in code:
            # With an operand in FP32, the function computes in FP32 without a cast, unless its own
            # text casts the operand.
            is_cast = re.search(re.escape(expression.text) + r"\)?\.astype\(", own.text)
            is_unchanged = code == _rewrite.wide_code(own) and expression.text in own.text
            code = own.text if is_unchanged and not is_cast else code
            code = _source.with_inner(code, expression.text, changed)
            continue
        if any(expression.place == other.place for other, _ in parts):
            continue
        for n, (outer, text) in enumerate(parts):
            is_done = outer.contains(expression) and changed in text
            if is_done or (outer.place[:2] == expression.place[:2] and expression.text in text):
                text = _source.with_inner(text, expression.text, changed)
                parts[n] = outer, outer.replaced_by(text)
                break
        else:
            parts.append((expression, changed))
    where = [_source.text_of(*expression.place[:2]) for expression, _ in parts]
    counts = Counter((place, text) for place, (_, text) in zip(where, parts, strict=True))
    times = lambda count: f", {count} times in the line" if count > 1 else ""
    lines = [
        f"At {place}, do not round to 16 bits{times(count)}:\n    {text}"
        for (place, text), count in counts.items()
    ]
    return lines, code


def _is_shared(op: OpOccurrence) -> bool:
    """Returns True if the code of an operation makes arrays of other shapes, too.

    A cast of all parameters does. Other code for it would change all of them.
    """
    return len(shapes_by_source(op.body).get(call_and_type(op.equation), ())) > 1


def call_and_type(equation: _programs.Equation, name: str = "") -> tuple[Any, str, Any]:
    """Returns the user's call that makes an equation, its primitive or `name`, and its dtype."""
    (result, *_) = equation.outvars
    return _programs.call_site(equation), name or equation.primitive.name, _checks.dtype_of(result)


# Each finding in a jaxpr reads all of its shapes. They die with the jaxpr.
_shapes: weakref.WeakKeyDictionary[_programs.Body, dict[tuple[Any, str, Any], set[Any]]]
_shapes = weakref.WeakKeyDictionary()


def shapes_by_source(body: _programs.Body) -> dict[tuple[Any, str, Any], set[tuple[int, ...]]]:
    """Returns the shapes of the results in the forward pass of a jaxpr, by their source."""
    if body not in _shapes:
        shapes = _shapes[body] = defaultdict(set)
        for equation in _programs.equations(body.jaxpr, inside=False):
            if equation.outvars and _dataflow.is_forward(equation):
                shapes[call_and_type(equation)].add(getattr(equation.outvars[0].aval, "shape", ()))
    return _shapes[body]


def _is_read_exactly(op: OpOccurrence, function: str) -> bool:
    """Returns True for a loss, a result that a logarithm reads, and probabilities of a difference.

    A cast of the result to 16 bits would round what is summed, or what these magnify.
    """
    if function.startswith("optax."):
        return True
    exact = _LOGS | _core.named("sub") if function.endswith(_PROBABILITIES) else _LOGS
    site, waiting = _programs.call_site(op.equation), [(v, op) for v in op.equation.outvars]
    names = set[str]()
    for var, within in _dataflow.walked(waiting):
        for reader, inside in _dataflow.readers_of(var, within):
            name = reader.primitive.name
            if name in _programs.MATMULS:
                return False
            is_own = _programs.call_site(reader) == site
            if not is_own and _dataflow.is_forward(reader):
                names.add(name)
            # A loss sums or averages what it reads.
            if is_own or (name in _ELEMENTWISE - exact) or name in _programs.CALLS:
                waiting += [(v, inside) for v in reader.outvars]
    return bool(names & exact)


def _is_widened(op: OpOccurrence) -> bool:
    """Returns True if the forward pass only casts a result to FP32, or takes its sine.

    Elementwise operations of the result and of Python numbers may come before, which then compute
    in FP32 themselves. A cast of the result to 16 bits would only round it.
    """
    site, waiting = _programs.call_site(op.equation), list(op.equation.outvars)
    seen = set(waiting)
    meets_16_bits = is_cast = False
    while waiting:
        consumers = op.body.consumers.get(waiting.pop(), ())
        if None in consumers:
            return False
        forward = filter(_dataflow.is_forward, filter(None, consumers))
        readers = [op.sibling(e) for e in forward if _programs.call_site(e) != site]
        if not readers:
            return False
        for reader in readers:
            is_wide = reader.name == "convert_element_type" and reader.dtype == _core.FLOAT32
            is_cast |= is_wide
            if is_wide or reader.name in _checks.PERIODIC:
                continue
            if reader.name not in _ELEMENTWISE:
                return False
            others = [v for v in reader.operands if not _programs.is_literal(v) and v not in seen]
            meets_16_bits |= _checks.half_of(others) is not None
            waiting += reader.equation.outvars
            seen.update(reader.equation.outvars)
    # A wide result would promote another 16-bit array before the cast.
    return not (meets_16_bits and is_cast)


def _rounded_by(op: OpOccurrence, through: frozenset[str] = _ELEMENTWISE) -> list[OpOccurrence]:
    """Returns the operations by which 16 bits enter the elementwise computation of an operand."""
    scopes = _programs.scope_names(str(op.equation.source_info.name_stack))
    waiting = [(var, op) for var in _halves(op.equation)]
    origins = []
    for origin in _makers(waiting):
        maker, is_here = origin.equation, origin.body is op.body
        if is_here and _programs.scope_names(str(maker.source_info.name_stack)) != scopes:
            continue
        inputs, name = _halves(maker), maker.primitive.name
        is_cast, is_elementwise = _is_rounding(maker), _is_elementwise(maker, through)
        is_made = not inputs and name in ("iota", "broadcast_in_dim")
        is_made &= _checks.half_of(maker.outvars) is not None
        is_entry = name not in _MOVES and not all(_is_computed(v, origin.body) for v in inputs)
        if is_cast or is_made or (is_entry and is_elementwise and inputs):
            origins.append(origin)
        if through is SUMS and is_elementwise:
            # A sum that computes in FP32 reads squares in 16 bits.
            waiting += [(v, origin) for v in maker.invars if not _programs.is_literal(v)]
        elif is_elementwise and not is_cast:
            waiting += [(v, origin) for v in inputs]
    return origins


def _makers(waiting: list[_dataflow.Value]) -> Iterator[OpOccurrence]:
    """Yields the operations that make values; see `_dataflow.walked`."""
    for var, within in _dataflow.walked(waiting):
        if (maker := within.body.maker(var)) is not None:
            yield within.sibling(maker)


def _halves(equation: _programs.Equation) -> list[_programs.Atom]:
    """Returns the 16-bit operands that are not literals."""
    variables = (var for var in equation.invars if not _programs.is_literal(var))
    return [var for var in variables if _checks.half_of([var]) is not None]


def _is_elementwise(equation: _programs.Equation, names: frozenset[str] = _ELEMENTWISE) -> bool:
    """Returns True for an elementwise operation, and for a call such as that of a sigmoid."""
    inside = [*_programs.equations_inside(equation)] or [equation]
    return all(e.primitive.name in names for e in inside)


def _is_rounding(equation: _programs.Equation) -> bool:
    """Returns True for operations that round.

    These are casts of FP32 numbers or of integers to fewer bits, and reductions that cast their
    result, such as `jnp.var`.
    """
    if equation.primitive.name in _programs.CALLS:
        sizes = [getattr(v.aval, "size", 0) for v in (*equation.outvars, *equation.invars)]
        inside = _programs.equations_inside(equation)
        return max(sizes) > sizes[0] and any(map(_is_rounding, inside))
    is_cast = equation.primitive.name == "convert_element_type"
    return is_cast and np.dtype(_checks.dtype_of(equation.invars[0])).itemsize == 4


def _is_computed(var: _programs.Atom, body: _programs.Body) -> bool:
    """Returns True for a 16-bit result of a cast, a constant or another elementwise operation."""
    maker = body.maker(var)
    while maker is not None and maker.primitive.name in _MOVES and not _is_rounding(maker):
        var = maker.invars[0]
        maker = body.maker(var)
    if maker is None:
        return _programs.is_literal(var)
    return _is_rounding(maker) or maker.primitive.name == "iota" or _is_elementwise(maker)
