"""Pastes each fix that the audit prints into its program, and runs and audits the program again.

    python benchmarks/fixes.py                        # the plants of audit_plants.py
    python benchmarks/fixes.py my_programs/ others/   # each file defines make() -> function, *args
    python benchmarks/fixes.py --out benchmarks/results/fixes.json

A file may set RECIPE, the policies that its function is audited against. Code below a sentence such
as "At model.py:12, ..." replaces the most similar expression of that line, and other code that of
the line of the finding. The table has a row for each error: whether its fix is code or words (of a
function that is not in the table of `jaxmp/_tools/fixes/_functions.py`, or because all code that
was tried failed), whether the tool tried it, and for pasted code whether the program runs, has
lost the finding and has no new error, and how far its results are from those of the original one in
FP64, before and after: the largest error on the arguments, on these with zeros and masked elements
in their first rows, and on these scaled to 70,000, where that is finite. Statements such as
`tx = ...` are counted but not pasted, because their place is not in the audited function.
The summary counts the findings of which a function in the table is called in the line, and those of
them that have code, and the functions outside of the table that the other lines call.
The exit status is 1 if printed code does not run, leaves its finding, or increases the error.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import audit_plants
import jaxmp
from jaxmp._programs._bind import bind, runs_in_fp32
from jaxmp._programs._interpreter import Interpreter
from jaxmp._tools.fixes._rewrite import known_function
from jaxmp._tools.fixes._source import IN_FP32, Expression
from result_file import parser_of, table, write_result

_FOLDER = tempfile.TemporaryDirectory()
_EXACT = {"xla_allow_excess_precision": False}
# The error may grow by so much, relative to the results: fixes may round in another order.
_ROUNDING = 1e-2
_COLUMNS = ("program", "check", "line", "calls", "form", "trial", "runs", "removed")
_COLUMNS += ("before", "after")


class Program(NamedTuple):
    """Source of a function, and how to make it.

    name: of the file or plant.
    file: path of the source.
    recipe: policies of the audit.
    plant: name of a plant; "" for a file that defines `make`.
    """

    name: str
    file: Path
    recipe: str | None
    plant: str = ""

    def load(self, source: str) -> tuple[Any, tuple[Any, ...]]:
        """Returns the function and its arguments from a changed source."""
        # The audit reads the file later.
        file = Path(tempfile.mkdtemp(dir=_FOLDER.name)) / self.file.name
        file.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(f"{self.name}_changed", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look up their module.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        if not self.plant:
            fn, *args = module.make()
            return fn, tuple(args)
        plant = next(each for each in module.PLANTS if each.name == self.plant)
        return plant.build(module.Dtypes(plant.low, plant.low, module.F32, False))


def programs(folders: list[Path]) -> list[Program]:
    """Returns the programs of folders, or the plants without any."""
    if not folders:
        file = Path(audit_plants.__file__)
        plants = [plant for plant in audit_plants.PLANTS if plant.target is None]
        recipe = lambda plant: "bf16" if plant.low == audit_plants.BF16 else "fp16"
        return [Program(plant.name, file, recipe(plant), plant.name) for plant in plants]
    found = []
    for file in (file for folder in folders for file in sorted(folder.glob("*.py"))):
        source = file.read_text(encoding="utf-8")
        recipe = re.search(r"^RECIPE = \"(\w+)\"", source, re.MULTILINE)
        if "\ndef make(" in source:
            found.append(Program(file.stem, file, recipe[1] if recipe else None))
    return found


def rows_of(program: Program) -> list[dict[str, Any]]:
    """Returns a row for each error of a program."""
    source = program.file.read_text(encoding="utf-8")
    fn, args = program.load(source)
    errors = jaxmp.audit(fn, *args, recipe=program.recipe).errors
    together = source
    for code in dict.fromkeys(code for finding in errors for code in codes_of(finding)):
        together = pasted(together, code) or together
    return [row_of(program, source, finding, errors, together) for finding in errors]


def row_of(
    program: Program, source: str, finding: Any, errors: Any, together: str
) -> dict[str, Any]:
    """Returns the row of one error.

    Args:
      program: the program.
      source: its source.
      finding: the error.
      errors: all errors.
      together: the source with all fixes. One of them may lead to the finding of another.
    """
    row: dict[str, Any] = dict.fromkeys(_COLUMNS, "")
    row |= {"program": program.name, "check": finding.check, "line": finding.line}
    row["trial"] = finding.trial
    known, unknown = calls_in(source, str(program.file), finding)
    row["calls"] = "in table" if known else ", ".join(unknown) or "operators"
    codes = codes_of(finding)
    changed = source
    for code in codes:
        changed = "" if not changed else pasted(changed, code)
    if changed and "requires `import jax.numpy" in finding.fix:
        changed += "import jax.numpy as jnp\n"
    is_code = "code" if changed else "statement"
    words = "rejected" if "prints no code" in finding.fix else "words"
    row["form"] = is_code if codes else "statement" if is_python(finding.fix) else words
    if row["form"] != "code":
        return row
    key = lambda f: (f.check, f.line)
    try:
        fn, args = program.load(source)
        new, new_args = program.load(changed)
        before, error = errors_of(fn, new, args, changes_dtypes_only(source, changed))
        # An NNX model is an instance of the changed class.
        after = jaxmp.audit(new, *new_args, recipe=program.recipe, try_fixes=False).errors
    except Exception as error:
        return row | {"runs": f"{type(error).__name__}: {str(error)[:80]}"}
    is_left = key(finding) in set(map(key, after))
    is_new = {f.check for f in after} - {f.check for f in errors}
    if is_new:
        new, new_args = program.load(together)
        after = jaxmp.audit(new, *new_args, recipe=program.recipe, try_fixes=False).errors
        is_new &= {f.check for f in after}
    removed = "left" if is_left else f"new {', '.join(is_new)}" if is_new else "yes"
    is_random = "other numbers are drawn" in finding.fix
    numbers = {"before": "random" if is_random else f"{before:.2g}", "after": f"{error:.2g}"}
    return row | {"runs": "yes", "removed": removed} | numbers


def calls_in(source: str, file: str, finding: Any) -> tuple[list[str], list[str]]:
    """Returns the functions that the line of a finding calls: in the table, and outside of it.

    Words name the function of their finding; a line may call others.
    """
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
    named = re.search(r"`([^`]+)` computes ", finding.fix)
    here = [n for n in nodes if n.lineno <= finding.line <= (n.end_lineno or 0)]
    if named:
        here = [n for n in here if ast.unparse(n.func) == named[1]]
    known, unknown = [], []
    for node in here:
        row = known_function(Expression(node, (file, node.lineno, 0, 0, 0), []))[1]
        (unknown if row is None else known).append(called(node.func))
    return known, [name for name in dict.fromkeys(unknown) if name]


def called(function: ast.expr) -> str:
    """Returns the name of a function, `.name` for a method of an expression; "" for a result."""
    text = ast.unparse(function)
    if re.fullmatch(r"[\w.]+", text):
        return text
    return f".{function.attr}" if isinstance(function, ast.Attribute) else ""


# ---------------------------------------------------------------------------
# Paste
# ---------------------------------------------------------------------------


class Code(NamedTuple):
    """Code of a fix: its line, and True if it replaces an expression with its cast."""

    line: int
    text: str
    has_cast: bool


def codes_of(finding: Any) -> list[Code]:
    """Returns the lines of code of a fix."""
    place, has_cast, codes = finding.line, False, []
    for text in finding.fix.splitlines():
        named = re.match(r".*\bat [\w.]+:(\d+)[,:]", text, re.IGNORECASE)
        if text.startswith("    "):
            # Code that is a cast to FP32 replaces another cast.
            is_cast = has_cast or text.endswith(IN_FP32)
            codes.append(Code(place, text.strip(), is_cast))
        else:
            place, has_cast = int(named[1]) if named else finding.line, False
            # Both replace an expression that contains a cast.
            has_cast = "not round" in text or " replace " in text
    return codes


def is_python(text: str) -> bool:
    """Returns True for a fix that is one statement."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def pasted(source: str, printed: Code) -> str:
    """Returns a source in which code replaces an expression of a line; "" for a statement."""
    number, code, has_cast = printed
    lines, new = source.splitlines(), bare(code)
    if new is None:
        return ""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.expr)]
    nodes = [n for n in nodes if n.lineno == n.end_lineno == number and not is_target(n)]
    candidates = []
    for node in nodes:
        old = bare(ast.unparse(node))
        if old is not None and function_of(old) == function_of(new):
            ratio = difflib.SequenceMatcher(None, ast.unparse(old), ast.unparse(new)).ratio()
            size = len(ast.unparse(node))
            candidates.append((ratio, size if has_cast else -size, node))
    ratio, _, node = max(candidates, key=lambda row: row[:2], default=(0.0, 0, None))
    if node is None or ratio < 0.5:
        return ""
    line, text = lines[number - 1].encode(), ast.unparse(node)
    for same in sorted(nodes, key=lambda n: n.col_offset, reverse=True):
        if ast.unparse(same) == text:
            line = line[: same.col_offset] + f"({code})".encode() + line[same.end_col_offset :]
    lines[number - 1] = line.decode()
    return "\n".join(lines) + "\n"


def is_target(node: ast.expr) -> bool:
    is_part = isinstance(node, (ast.Slice, ast.Starred))
    return is_part or isinstance(getattr(node, "ctx", None), ast.Store)


def bare(code: str) -> Any:
    """Returns the syntax tree of an expression without casts; None for a statement."""
    try:
        return Bare().visit(ast.parse(code, mode="eval").body)
    except SyntaxError:
        return None


def function_of(node: ast.AST) -> str:
    """Returns the function of a call, or the type of another expression."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else type(node).__name__


class Bare(ast.NodeTransformer):
    """Removes casts and what else a fix adds, so that an expression and its fix are similar."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "astype":
            return function.value
        if ast.unparse(function) == "jax.tree.map" and isinstance(node.args[0], ast.Lambda):
            return node.args[1]
        added = ("dtype", "preferred_element_type", "dot_general", "conv_general_dilated")
        node.keywords = [k for k in node.keywords if k.arg not in added]
        if ast.unparse(function) == "jnp.matmul":
            return ast.BinOp(node.args[0], ast.MatMult(), node.args[1])
        return node


# ---------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------


def wide(value: Any) -> Any:
    """Returns a floating-point array in FP64, and other values unchanged."""
    dtype = getattr(value, "dtype", None)
    is_float = dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.floating)
    return jax.lax.convert_element_type(value, np.float64) if is_float else value


class InFp64(Interpreter):
    """Runs a program in which each floating-point value is FP64."""

    def constant(self, array: Any) -> Any:
        return wide(array)

    def bound(self, equation: Any, operands: list[Any]) -> list[Any]:
        changes: dict[str, Any] = {}
        if runs_in_fp32(equation):
            is_float = lambda x: isinstance(x, np.dtype) and jax.numpy.issubdtype(x, np.inexact)
            changes = {k: np.dtype(np.float64) for k, x in equation.params.items() if is_float(x)}
            operands = list(map(wide, operands))
        else:
            pairs = zip(operands, equation.invars, strict=True)
            operands = [
                x if var.aval.dtype == x.dtype else x.astype(var.aval.dtype) for x, var in pairs
            ]
        out = bind(equation, operands, **changes)
        return list(map(wide, out if equation.primitive.multiple_results else [out]))


def changes_dtypes_only(source: str, changed: str) -> bool:
    """Returns True for sources that differ in casts and dtypes alone."""
    trees = (Bare().visit(ast.parse(text)) for text in (source, changed))
    old, new = (re.findall(r"[\w.]+|\S", ast.unparse(tree)) for tree in trees)
    pairs = zip(old, new, strict=False)
    return len(old) == len(new) and all(b in (a, "jnp.float32") for a, b in pairs)


def errors_of(fn: Any, new: Any, args: Any, is_same: bool) -> tuple[float, float]:
    """Returns the errors of a function and of a changed one, on the arguments that differ most.

    Args:
      fn: the function.
      new: the changed one.
      args: the arguments.
      is_same: the change concerns dtypes only. In FP64, the changed function is then a reference,
        too, whose constants are not rounded to 16 bits.
    """
    rows = []
    for change in (lambda leaf: leaf, with_zeros, enlarged):
        inputs = jax.tree.map(change, args)
        results, exact = values(new, inputs), in_fp64(fn, inputs)
        error = distance(results, exact)
        if is_same and not error <= _ROUNDING:
            error = min(error, distance(results, in_fp64(new, inputs)))
        rows.append((distance(values(fn, inputs), exact), error))
    return max(rows, key=lambda row: row[1] - row[0])


def with_zeros(leaf: Any) -> Any:
    """Returns an array whose first row is zero; False for masks."""
    is_array = getattr(leaf, "ndim", 0) and leaf.dtype.kind not in "iuO" and is_plain(leaf)
    return leaf.at[0].set(leaf.dtype.type(0)) if is_array else leaf


def enlarged(leaf: Any) -> Any:
    """Returns 16-bit floats whose largest number is 70,000, unless the dtype ends before."""
    if not getattr(leaf, "ndim", 0) or leaf.dtype != jax.numpy.bfloat16:
        return leaf
    return leaf * (70_000 / jax.numpy.abs(leaf).max()).astype(leaf.dtype)


def is_plain(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def in_fp64(fn: Any, args: Any) -> list[np.ndarray]:
    closed = jax.make_jaxpr(fn)(*args)
    with jax.enable_x64(True):
        arrays = [wide(leaf) for leaf in jax.tree.leaves(args)]
        return numbers(jax.jit(lambda arrays: InFp64().run(closed, arrays))(arrays))


def values(fn: Any, args: Any) -> list[np.ndarray]:
    try:
        return numbers(jax.jit(fn, compiler_options=_EXACT)(*args))
    except jax.errors.JaxRuntimeError as error:
        # With these options, XLA's CPU compiler leaves some products of bfloat16 with FP32 sums to
        # a kernel that it does not have.
        if "UNIMPLEMENTED" not in str(error):
            raise
        return numbers(jax.jit(fn)(*args))


def numbers(tree: Any) -> list[np.ndarray]:
    leaves = (np.asarray(leaf) for leaf in jax.tree.leaves(tree))
    return [leaf.astype(np.float64) for leaf in leaves]


def distance(results: list[np.ndarray], exact: list[np.ndarray]) -> float:
    """Returns the largest error of a result, relative to its largest element."""
    errors = [0.0]
    for result, reference in zip(results, exact, strict=True):
        # Where FP64 overflows, too, there is nothing to compare.
        if reference.size and np.isfinite(reference).all():
            finite = np.isfinite(result).all()
            size = np.abs(reference).max() or 1.0
            errors.append(np.nanmax(np.abs(result - reference)) / size if finite else np.inf)
    return float(max(errors))


def is_wrong(row: dict[str, Any]) -> bool:
    """Returns True for printed code that does not work."""
    if row["form"] != "code":
        return False
    if row["runs"] != "yes" or row["removed"] != "yes":
        return True
    # In FP64, the sums of integers wrap around as in the original program, and samplers draw other
    # random numbers.
    if row["check"] == "int_overflow" or row["before"] == "random":
        return False
    return float(row["after"]) > float(row["before"]) * 1.1 + _ROUNDING


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("folders", type=Path, nargs="*", help="programs; the plants without any")
    options = parser.parse_args()
    rows = []
    for program in programs(options.folders):
        own = rows_of(program)
        print(program.name, len(own), "wrong" if any(map(is_wrong, own)) else "", flush=True)
        rows += own
    print(table(_COLUMNS, ([str(row[name]) for name in _COLUMNS] for row in rows)))
    wrong = [row for row in rows if is_wrong(row)]
    forms = Counter(row["form"] for row in rows)
    not_tried = sum(row["form"] == "code" and row["trial"] == "not tried" for row in rows)
    summary = (
        f"{len(rows)} errors: {forms['code']} with code for the line, {forms['statement']} with a"
        f" statement elsewhere, {forms['rejected']} whose code failed when it was tried, and"
        f" {forms['words']} in words; {not_tried} codes are not tried, and {len(wrong)} do not"
        " work."
    )
    print(summary)
    of_table = [row for row in rows if row["calls"] == "in table"]
    of_table = [row for row in of_table if row["form"] != "statement"]
    share = lambda name, value: sum(row[name] == value for row in of_table) / max(len(of_table), 1)
    outside = {name for row in rows for name in row["calls"].split(", ")}
    outside -= {"in table", "operators"}
    coverage = (
        f"{len(of_table)} of {len(rows)} lines call a function of the table and are changed in"
        f" place: {share('form', 'code'):.0%} of them have code, {share('trial', 'not tried'):.0%}"
        f" are not tried. The others call {len(outside)} functions outside of the table."
    )
    print(coverage)
    write_result(options.out, summary=f"{summary} {coverage}", rows=rows)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
