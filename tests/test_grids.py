"""The pairwise subset of a grid."""

import doctest
import itertools

import pytest

import grids
from grids import each_value, pairwise


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
