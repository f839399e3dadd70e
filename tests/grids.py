"""Subsets of grids of test cases."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

# Marks of the cases of a grid beyond the subset that CI runs.
REST = (pytest.mark.slow, pytest.mark.exhaustive)
# Mark of tests that compile large programs, or many, and whose behaviour cheaper tests guard too.
EXPENSIVE = pytest.mark.expensive


def fast_cases(*ids: str) -> pytest.MarkDecorator:
    """Returns a mark for a parametrized test, whose other cases become `EXPENSIVE`.

    Args:
      *ids: the cases that stay in the fast suite, as pytest prints them in brackets.
    """
    return pytest.mark.fast_cases(*ids)


def mark_expensive_cases(items: Sequence[pytest.Item], is_complete: bool) -> None:
    """Adds `EXPENSIVE` to the cases of tests with the mark `fast_cases` that it does not name.

    Args:
      items: the collected tests.
      is_complete: True if all cases of each test are among them.

    Raises:
      pytest.UsageError: if a mark names a case that does not exist.
    """
    missing = {}
    for item in items:
        mark = item.get_closest_marker("fast_cases")
        if mark is None:
            continue
        test, _, case = item.nodeid.removesuffix("]").partition("[")
        missing.setdefault(test, set(mark.args)).discard(case)
        if case not in mark.args:
            item.add_marker(EXPENSIVE)
    stale = [f"{test}[{case}]" for test, cases in missing.items() for case in sorted(cases)]
    if is_complete and stale:
        raise pytest.UsageError(f"fast_cases names cases that do not exist: {', '.join(stale)}")


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
    return _subset(parameters, 2)


def each_value(*parameters: Iterable[Any]) -> list[Any]:
    """Returns a whole grid for `pytest.mark.parametrize`, of which the fast suite runs few cases.

    In the fast cases every value of each parameter occurs. The others have the marks `REST`.

    Args:
      *parameters: the values of each parameter.

    Example:
      >>> [(case.values, len(case.marks)) for case in each_value("ab", [0, 1])]
      [(('a', 0), 0), (('a', 1), 2), (('b', 0), 2), (('b', 1), 0)]
    """
    values = [tuple(parameter) for parameter in parameters]
    fast = _subset([range(len(row)) for row in values], 1)
    return [
        pytest.param(
            *(row[i] for row, i in zip(values, case, strict=True)),
            marks=[] if case in fast else REST,
        )
        for case in _indices(values)
    ]


def _indices(values: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(row)) for row in values)))


def _subset(parameters: Iterable[Iterable[Any]], strength: int) -> list[tuple[Any, ...]]:
    """Returns cases in which the values of each `strength` parameters occur in all combinations."""
    values = [tuple(parameter) for parameter in parameters]
    grid = _indices(values)
    covered = {case: set(itertools.combinations(enumerate(case), strength)) for case in grid}
    missing = set().union(*covered.values())
    used: Counter[tuple[int, int]] = Counter()
    uses = lambda case: sum(used[value] for value in enumerate(case))
    cases = []
    while missing:
        most = max(len(covered[case] & missing) for case in grid)
        best = [case for case in grid if len(covered[case] & missing) == most]
        # Single values are distributed evenly; for pairs, the first case leads to a small subset.
        case = best[0] if strength > 1 else min(best, key=uses)
        missing -= covered[case]
        used.update(enumerate(case))
        cases.append(case)
    return [tuple(row[i] for row, i in zip(values, case, strict=True)) for case in sorted(cases)]
