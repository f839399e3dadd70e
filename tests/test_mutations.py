"""Seeded defects: each still applies and names tests of the fast suite; the runner judges them."""

import ast
import functools
from pathlib import Path

import pytest

import mutations
from mutations import CAUGHT, MUTATIONS, STALE, SURVIVED, Mutation

TESTS = Path(__file__).parent


def test_each_defect_applies_once():
    for mutation in MUTATIONS:
        defective = mutation.applied((mutations.ROOT / mutation.file).read_text("utf-8"))
        assert defective is not None, f"{mutation.name}: the text does not occur exactly once"
        ast.parse(defective)
        assert mutation.tests, mutation.name


def test_there_are_seventy_different_defects():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 70
    assert len({(mutation.file, mutation.replace, mutation.find) for mutation in MUTATIONS}) >= 70


@functools.cache
def decorators(file: str) -> dict[str, list[str]]:
    """Returns the decorators of each function of a test file."""
    nodes = ast.parse((TESTS / file).read_text("utf-8")).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return {node.name: list(map(ast.unparse, node.decorator_list)) for node in functions}


def test_the_tests_of_defects_are_in_the_fast_suite():
    slow = ("pytest.mark.slow", "pytest.mark.expensive", "EXPENSIVE")
    for test in {test for mutation in MUTATIONS for test in mutation.tests}:
        file, _, function = test.partition("::")
        assert not [name for name in decorators(file)[function] if name.startswith(slow)], test


CODE = "def add(a, b):\n    # The sum.\n    return a + b\n"
TEST = """
import code_of_a_project

def test_add():
    assert code_of_a_project.add(2, 2) == 4

def test_nothing():
    assert True
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "code_of_a_project.py").write_text(CODE)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_add.py").write_text(TEST)
    return tmp_path


@pytest.mark.parametrize(
    ("find", "replace", "tests", "verdict"),
    [
        ("a + b", "a - b", ["test_add"], CAUGHT),
        ("a + b", "a - b", ["test_add", "test_nothing"], SURVIVED),
        ("# The sum.", "# The total.", ["test_add"], SURVIVED),
        ("a * b", "a - b", ["test_add"], STALE),
        ("add(a, b)", "add(a, b", ["test_add"], CAUGHT),
    ],
)
def test_the_runner_judges_defects(project, find, replace, tests, verdict):
    names = tuple(f"test_add.py::{test}" for test in tests)
    mutation = Mutation("a defect", "code_of_a_project.py", find, replace, names)
    assert mutations.judge(mutation, project)[0] == verdict
    assert (project / "code_of_a_project.py").read_text() == CODE


def test_a_named_test_that_does_not_exist_is_an_error(project):
    mutation = Mutation("a defect", "code_of_a_project.py", "+", "-", ("test_add.py::test_sub",))
    with pytest.raises(RuntimeError, match="test_sub"):
        mutations.judge(mutation, project)
