"""The user's expression that makes an operation, and the edits that replace it."""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import linecache
import re
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, NamedTuple

from jaxmp import _programs
from jaxmp._tools.fixes._functions import COMMON_NAMES

# (file, line, last line, first column, last column).
Place = tuple[str, int, int, int, int]


def is_inside(inner: Place, outer: Place) -> bool:
    """Returns True if an expression at one place is a part of the one at another."""
    file, line, end_line, start, end = inner
    other, first, last, begin, stop = outer
    return file == other and (first, begin) <= (line, start) and (end_line, end) <= (last, stop)


class Edit(NamedTuple):
    """New code for an expression. Columns are bytes, as in code objects."""

    file: str
    line: int
    end_line: int
    start: int
    end: int
    # Old and new code, as `ast.unparse` writes it. `other` is new code with a result of another
    # dtype: 16 bits if `code` returns FP32, and FP32 if it returns 16 bits; "" for none. `alone` is
    # new code for which the operands may stay rounded, as where a matmul reads them, too.
    old: str
    code: str
    other: str = ""
    alone: str = ""

    @property
    def where(self) -> str:
        """The line as reports print it, such as `model.py:12`."""
        return text_of(self.file, self.line)

    def is_at(self, file: str, line: int) -> bool:
        """Returns True if the expression contains a part of a line."""
        return self.file == file and self.line <= line <= self.end_line


def text_of(file: str, line: int) -> str:
    """Returns a line as `model.py:12`."""
    return f"{file.rpartition('/')[2]}:{line}" if file else "an unknown line"


IN_FP32 = ".astype(jnp.float32)"
IN_16_BITS = (".astype(jnp.bfloat16)", ".astype(jnp.float16)")
_JNP = re.compile(r"\bjnp\b")


@dataclasses.dataclass(frozen=True, eq=False)
class Expression:
    """An expression of the user's source; those of a file with the same code are equal.

    An expression that is not known has the text "", and no code replaces it.

    Attributes:
      node: its syntax tree.
      place: where it is.
      edits: receives the replacements.
      second: True if the first operand is a number, so that the second one is the array.
    """

    node: ast.expr
    place: Place
    edits: list[Edit]
    second: bool = False
    # The functions that it may call directly, of which one makes the operation.
    called: tuple[CodeType, ...] = ()

    @functools.cached_property
    def text(self) -> str:
        """The code."""
        return _unparsed(self.node)

    @property
    def _key(self) -> tuple[object, ...]:
        return self.place[0], self.text, self.second, self.called

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def contains(self, other: Expression) -> bool:
        """Returns True if another expression is a part of this one."""
        return is_inside(other.place, self.place)

    def copy(self) -> Any:
        """Returns a syntax tree that may be changed."""
        return ast.parse(self.text, mode="eval").body if self.text else self.node

    def replaced_by(self, new: ast.expr | str, other: str = "", alone: str = "") -> str:
        """Returns code for the expression, and records the edit; "" for no code or the same.

        Args:
          new: the code.
          other, alone: other code; see `Edit`.
        """
        code = new if isinstance(new, str) else ast.unparse(new)
        if not code or code == self.text:
            return ""
        variable = self.node.left if isinstance(self.node, ast.BinOp) else self.node
        if isinstance(getattr(variable, "ctx", None), ast.Store):
            # An augmented assignment, such as `x *= y`, becomes an assignment.
            assigned = f"{ast.unparse(variable)} = "
            values = (text.removeprefix(assigned) for text in (code, other, alone))
            code, other, alone = (text and assigned + text for text in values)
        edit = Edit(*self.place, self.text, code, other, alone)
        if edit not in self.edits:
            self.edits.append(edit)
        return code

    def name_of(self, function: ast.expr) -> str:
        """Returns the full name of a function that a library defines, such as `jax.numpy.sum`.

        Returns:
          "" for a function of the user's, and for a method.
        """
        if not all(isinstance(n, (ast.Attribute, ast.Name, ast.Load)) for n in ast.walk(function)):
            return ""
        text = _text(self.place[0])
        code = ast.unparse(function)
        # Another name, such as `self.exp`, for which the program has no frame.
        for name in (code, _aliases(text).get(code.rpartition(".")[2], "")):
            root, *attributes = name.split(".")
            module = _imports(text).get(root, COMMON_NAMES.get(root, ""))
            if module:
                return ".".join((module, *attributes))
        return ""


UNKNOWN = Expression(ast.Name(""), ("", 0, 0, 0, 0), [])


def expression_of(op: Any) -> Expression:
    """Returns the expression in the user's code whose call makes an operation.

    Args:
      op: an operation with its enclosing equations, and the findings that receive the edits.

    Returns:
      `UNKNOWN` without source code, or if the code object of the operation contains no columns.
    """
    findings = op.findings
    # The last function, and the last one of the jaxpr inside of the equation.
    last, inner = list[CodeType](), list[CodeType]()
    for equation in (op.equation, *op.enclosing) if findings.reads_source else ():
        traceback = equation.source_info.traceback
        frames = zip(*traceback.raw_frames(), strict=True) if traceback is not None else ()
        inner = last
        for code, instruction in frames:
            if findings.lines.is_own(code.co_filename):
                place: Any = (code.co_filename, *_positions(code)[instruction // 2])
                node = _parsed(*place)
                second = len(op.equation.invars) > 1 and _programs.is_literal(op.equation.invars[0])
                if node is None:
                    return UNKNOWN
                called = *last, *inner
                return _with_owner(Expression(node, place, findings.edits, second, called))
            last = [code]
    return UNKNOWN


def _with_owner(expression: Expression) -> Expression:
    """Returns a method call with the array before its dot.

    In an expression of several lines, Python records the place of the method's name alone.
    """
    file, line, end_line, start, end = expression.place
    before = linecache.getline(file, line).encode()[:start].rstrip()
    whole = enclosing(expression) if before.endswith(b".") else ()
    return next(
        (
            e
            for e in whole
            if e.place[1:] != expression.place[1:] and e.place[2::2] == (end_line, end)
        ),
        expression,
    )


# Several findings are in one function.
@functools.lru_cache(maxsize=64)
def _positions(code: CodeType) -> list[tuple[int | None, ...]]:
    """Returns the lines and columns of all instructions, which takes long for a long function."""
    return list(code.co_positions())


def constructor_of(expression: Expression) -> Expression:
    """Returns the call whose result an expression such as `self.head(x)` calls.

    Returns:
      `UNKNOWN` unless the class, or the file outside of classes, assigns one call to that name.
    """
    function = expression.node.func if isinstance(expression.node, ast.Call) else None
    if isinstance(function, ast.Call):
        return expression
    if isinstance(function, ast.Attribute) and function.attr == "attend":
        function = function.value
    file, line = expression.place[:2]
    tree = _tree(_text(file))
    classes = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))
    inside = [n for n in classes if n.lineno <= line <= (n.end_lineno or 0)]
    name = "" if function is None else ast.unparse(function)
    calls = [
        n.value
        for n in ast.walk(inside[-1] if inside else tree)
        if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)
        if name in map(ast.unparse, n.targets)
    ]
    if len(calls) != 1:
        return UNKNOWN
    return Expression(calls[0], _place(file, calls[0]), expression.edits)


def assigned_before(expression: Expression) -> dict[str, ast.expr]:
    """Returns the values of variables that the function of an expression assigns once, above it.

    A value is still the same: it calls only functions of libraries, and its variables are
    parameters, or assigned once. A layer of Linen would have other parameters.
    """
    file, line = expression.place[:2]
    functions = (n for n in ast.walk(_tree(_text(file))) if isinstance(n, ast.FunctionDef))
    outer = [n for n in functions if n.lineno <= line <= (n.end_lineno or 0)]
    inside = list(ast.walk(outer[-1])) if outer else []
    times = collections.Counter(n.arg for n in inside if isinstance(n, ast.arg))
    names = [n for n in inside if isinstance(n, ast.Name)]
    times.update(n.id for n in names if isinstance(n.ctx, ast.Store))
    name_of = lambda call: expression.name_of(call.func).rpartition(".")[2]

    def is_same(value: ast.expr) -> bool:
        nodes = list(ast.walk(value))
        is_once = all(times[n.id] < 2 for n in nodes if isinstance(n, ast.Name))
        return is_once and all(name_of(n).islower() for n in nodes if isinstance(n, ast.Call))

    values = {}
    for node in inside:
        match node:
            case ast.Assign([ast.Name(name)], value, end_lineno=end) if (end or line) < line:
                values |= {name: value} if times[name] == 1 and is_same(value) else {}
    return values


def enclosing(expression: Expression) -> Iterator[Expression]:
    """Yields an expression and those that contain it, the smallest first."""
    yield expression
    file = expression.place[0]
    nodes = [node for node in ast.walk(_tree(_text(file))) if isinstance(node, ast.expr)]
    bare = dataclasses.replace(expression, called=())
    outer = [dataclasses.replace(bare, node=n, place=_place(file, n)) for n in nodes]
    outer = [each for each in outer if each.contains(expression)]
    yield from sorted(outer, key=lambda each: len(each.text))


def _place(file: str, node: Any) -> Place:
    return file, node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _text(file: str) -> str:
    return "".join(linecache.getlines(file))


def _parsed(
    file: str, line: int | None, end_line: int | None, start: int | None, end: int | None
) -> ast.expr | None:
    if line is None or end_line is None or start is None or end is None:
        return None
    lines = [linecache.getline(file, n).encode() for n in range(line, end_line + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return _parsed_text(b"".join(lines).decode().strip())


# Several operations come from one expression.
@functools.lru_cache(maxsize=256)
def _parsed_text(text: str) -> ast.expr | None:
    """Returns an expression, which is `x * y` for the statement `x *= y`; None for another text."""
    for code in (f"({text})", text) if text else ():
        with contextlib.suppress(SyntaxError, ValueError):
            match ast.parse(code).body:
                case [ast.Expr(node)]:
                    return node
                case [ast.AugAssign(target, operator, value)]:
                    return ast.BinOp(target, operator, value)
    return None


# Each node is that of `_parsed_text`, which is never changed.
_unparsed = functools.lru_cache(maxsize=256)(ast.unparse)


# Findings of a report are in few files.
@functools.lru_cache(maxsize=16)
def _tree(text: str) -> ast.Module:
    """Returns the syntax tree of a file; an empty one if it is not Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


# Findings of a report are in few files.
@functools.lru_cache(maxsize=16)
def _imports(text: str) -> dict[str, str]:
    """Returns the names that a file imports from libraries, with their full names.

    A name that the file defines itself has the full name "".
    """
    return dict(pair for node in ast.walk(_tree(text)) for pair in _names(node))


def _names(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        for name in node.names:
            root = name.name if name.asname else name.name.partition(".")[0]
            yield name.asname or root, root
    elif isinstance(node, ast.ImportFrom) and not node.level:
        for name in node.names:
            yield name.asname or name.name, f"{node.module}.{name.name}"
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name, ""


# Findings of a report are in few files.
@functools.lru_cache(maxsize=16)
def _aliases(text: str) -> dict[str, str]:
    """Returns the variables and attributes to which a file assigns one function of a library."""
    values = collections.defaultdict[str, set[str]](set)
    for node in ast.walk(_tree(text)):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = node.value
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "staticmethod":
                value = value.args[0]
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                values[ast.unparse(target).rpartition(".")[2]].add(ast.unparse(value))
    names = {name: next(iter(texts)) for name, texts in values.items() if len(texts) == 1}
    return {name: text for name, text in names.items() if text.replace(".", "").isidentifier()}


def with_names_of(file: str, code: str, unknown: str = "") -> str:
    """Returns code or a fix with the name that a file has for `jax.numpy`, such as `np`.

    Args:
      file: path of the file.
      code: the code or fix.
      unknown: code for a file without a name; "" for a sentence on the import.
    """
    text = _text(file)
    if not text or _JNP.search(text):
        return code
    imports = _imports(text)
    names = [name for name, module in imports.items() if module == "jax.numpy"]
    names += ["jax.numpy"] * (imports.get("jax") == "jax") + [unknown] * bool(unknown)
    if names or not any(map(_JNP.search, codes_of(code))):
        return _JNP.sub((*names, "jnp")[0], code)
    return f"{code}\nThe code requires `import jax.numpy as jnp`."


def with_inner(code: str, old: str, new: str) -> str:
    """Returns code with an expression replaced by one in FP32, which needs no cast after it."""
    for text, changed in ((f"({old}){IN_FP32}", f"({new})"), (old + IN_FP32, new)):
        code = code.replace(text, changed)
    tree = ast.parse(code.replace(old, new).replace(2 * IN_FP32, IN_FP32))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        operands = "".join(map(ast.unparse, (call.func, *call.args[:1])))
        is_wide = operands.rfind(IN_FP32) > max(map(operands.rfind, IN_16_BITS))
        # A sum with a dtype, such as `jnp.sum(x, dtype=d)`, adds in it.
        for keyword in call.keywords if is_wide else ():
            if keyword.arg == "dtype":
                keyword.value = ast.Attribute(ast.Name("jnp"), "float32")
    return ast.unparse(tree)


def both(first: str, second: str) -> str:
    """Returns the fix that contains two fixes, unless one of them contains the other."""
    codes = [codes_of(fix) for fix in (first, second)]
    if not codes[1] or all(any(new in old for old in codes[0]) for new in codes[1]):
        return first
    if all(any(old in new for new in codes[1]) for old in codes[0]):
        return second
    return f"{first}\n{second}"


def without_repetition(fixes: Iterable[str]) -> str:
    """Returns several fixes as one, which contains each sentence once with all code below it."""
    codes: dict[str, list[str]] = {}
    below, is_new = list[str](), True
    for line in "\n".join(fixes).splitlines():
        if codes and (not line or line.startswith("    ")):
            below += [line] * (is_new or line not in below)
        else:
            is_new, below = line not in codes, codes.setdefault(line, [])
    return "\n".join(line for sentence, below in codes.items() for line in (sentence, *below))


def codes_of(fix: str) -> list[str]:
    """Returns the lines of code of a fix."""
    return [line.strip() for line in fix.splitlines() if line.startswith("    ")]
