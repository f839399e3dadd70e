"""Scripts of `benchmarks/`: what they import from the package exists, and every result has one."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.glob("*.py"))


def names_of(tree):
    """Yields (module, name) of each import from jaxmp, and of each attribute such as `jaxmp.x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxmp"):
            yield from ((node.module, alias.name) for alias in node.names)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jaxmp":
            yield "jaxmp", node.attr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_imports_what_exists(script):
    for module, name in sorted(set(names_of(ast.parse(script.read_text("utf-8"))))):
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")


def test_every_result_names_a_script():
    names = {path.name for path in SCRIPTS} | {"plan_llama.py"}
    for file in (BENCHMARKS / "results").glob("*.json"):
        report = json.loads(file.read_text("utf-8"))
        report = report if isinstance(report, dict) else report[0]
        command = report.get("command", "")
        assert not command or set(re.findall(r"\w+\.py", command)) & names, file.name


def test_every_script_is_imported_or_cited():
    folders = ("docs", "tests", "benchmarks", "policies", "examples")
    files = [file for folder in folders for file in (BENCHMARKS.parent / folder).glob("*.[mp][dy]")]
    texts = {file: file.read_text("utf-8") for file in [*files, BENCHMARKS.parent / "README.md"]}
    for script in SCRIPTS:
        word = re.compile(rf"\b{script.stem}\b")
        assert any(word.search(text) for file, text in texts.items() if file != script), script.name
