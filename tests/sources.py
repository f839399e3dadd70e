"""Functions to read files of the repository, and to load and change source code."""

import ast
import importlib.util
import itertools
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NUMBERS = itertools.count()


def text_of(*names):
    """Returns the joined texts of files of the repository."""
    return "".join((ROOT / name).read_text("utf-8") for name in names)


def results_of(name):
    """Returns the contents of `benchmarks/results/NAME.json`."""
    return json.loads(text_of(f"benchmarks/results/{name}.json"))


def load_module(source, folder):
    """Returns a new module with this source, which is written into a folder."""
    file = folder / f"planted_{next(_NUMBERS)}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_of(text):
    """Returns the code of a printed fix: the indented lines of a message."""
    return "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))


def replace_expression(source, number, is_wanted, code):
    """Returns the source in which code replaces the outermost expression of a line, in brackets.

    Args:
      source: the source.
      number: the number of the line.
      is_wanted: function that returns True for the syntax tree of the expression to replace.
      code: the new expression.
    """
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.expr))
    nodes = (n for n in nodes if n.lineno == number and not _is_target(n))
    node = next(filter(is_wanted, nodes))
    lines = source.splitlines()
    line = lines[number - 1]
    lines[number - 1] = line[: node.col_offset] + f"({code})" + line[node.end_col_offset :]
    return "\n".join(lines)


def _is_target(node):
    return isinstance(getattr(node, "ctx", None), ast.Store)


def line_of(file, text):
    """Returns the number of the only line of a file that ends with the comment `# text`."""
    lines = Path(file).read_text("utf-8").splitlines()
    (number,) = (n for n, line in enumerate(lines, start=1) if line.endswith(f"# {text}"))
    return number
