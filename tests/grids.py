"""Pairwise subsets of grids of test cases."""

import itertools
from collections.abc import Iterable
from typing import Any


def pairwise(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns a subset of a grid in which every pair of values of two parameters occurs.

    Most defects depend on the values of at most two parameters, and the subset grows with the
    product of the two longest parameters instead of the product of all. The choice is greedy and
    the same in every run.

    Args:
      *parameters: the values of each parameter.

    Returns:
      The cases: tuples with a value of each parameter.

    Example:
      >>> pairwise("ab", "xy", [0, 1])
      [('a', 'x', 0), ('a', 'y', 1), ('b', 'x', 1), ('b', 'y', 0)]
    """
    values = [tuple(parameter) for parameter in parameters]
    grid = list(itertools.product(*(range(len(row)) for row in values)))
    missing = set().union(*map(_pairs, grid)) if grid else set()
    cases = []
    while missing:
        case = max(grid, key=lambda case: len(_pairs(case) & missing))
        missing -= _pairs(case)
        cases.append(case)
    return [tuple(row[i] for row, i in zip(values, case, strict=True)) for case in sorted(cases)]


def _pairs(case: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(case), 2))
