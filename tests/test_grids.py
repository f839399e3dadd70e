"""Subsets of grids of test cases."""

import doctest
import itertools

import pytest

import grids
from grids import each_value, fast_cases, mark_expensive_cases, pairwise


def test_the_example_runs():
    assert doctest.testmod(grids) == (0, 2)


@pytest.mark.parametrize("sizes", [(2, 2), (4, 3, 2), (3, 3, 3, 3), (1, 5, 2)])
def test_every_pair_occurs_in_fewer_cases_than_the_grid_has(sizes):
    axes = [[f"{name}{i}" for i in range(size)] for name, size in zip("abcd", sizes, strict=False)]
    cases = pairwise(*axes)
    for first, second in itertools.combinations(axes, 2):
        for pair in itertools.product(first, second):
            assert any(set(pair) <= set(case) for case in cases)
    assert len(cases) <= len(set(itertools.product(*axes)))
    assert len(pairwise(*[range(3)] * 4)) <= 15 < 81


def test_every_value_occurs_in_a_fast_case():
    cases = each_value("abcd", range(3))
    fast = [case.values for case in cases if not case.marks]
    assert [len(cases), len(fast)] == [12, 4]
    assert {name for name, _ in fast} == set("abcd") and {i for _, i in fast} == {0, 1, 2}


class Item:
    """A collected test, as far as `mark_expensive_cases` needs it."""

    def __init__(self, nodeid, *fast):
        self.nodeid, self.marks = nodeid, [fast_cases(*fast).mark] if fast else []

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark):
        self.marks.append(mark.mark)

    @property
    def is_expensive(self):
        return self.get_closest_marker("expensive") is not None


def test_cases_that_are_not_named_are_expensive():
    items = [Item(f"test_a.py::test_b[{case}]", "x-[0]", "y") for case in ("x-[0]", "x-[1]", "y")]
    items += [Item("test_a.py::test_c[x-[1]]"), Item("test_a.py::test_d")]
    mark_expensive_cases(items, is_complete=True)
    assert [item.is_expensive for item in items] == [False, True, False, False, False]


def test_a_named_case_that_does_not_exist_is_an_error():
    items = [Item("test_a.py::test_b[x]", "x", "y")]
    mark_expensive_cases(items, is_complete=False)
    with pytest.raises(pytest.UsageError, match=r"do not exist: test_a\.py::test_b\[y\]"):
        mark_expensive_cases(items, is_complete=True)
