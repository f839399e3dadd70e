"""Forms of differences of gradients, updates and states, on identical parameters and batch.

A form is a measured property, such as a factor that all elements have in common. It is compared at
each step, with the candidate's own optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxmp._validate._rows import GradientRow, Pattern

if TYPE_CHECKING:
    from jaxmp._validate._probe import Probe

Leaves = Mapping[str, np.ndarray]

# Error of an array that a form must leave unexplained at most, relative to what it explains.
_REST = 0.1
# Differences of updates below this are those of a healthy optimizer with its own state.
_CHANGED = 0.05
# Equal magnitudes, up to rounding; the smallest number and share of elements that are clipped.
_SAME, _CLIPPED, _CLIPPED_SHARE = 1e-3, 8, 0.01
# Share of the elements of a leaf that no longer change, if it is stored in fewer bits.
_STALLED = 0.25
# Part of a gradient's norm in a module whose gradient is zero.
_FROZEN = 1e-3
_SUBJECTS = {"gradient": "the gradients are", "update": "gradients agree, and the updates are"}
_REASONS = {"gradient": "", "update": ", as with another learning rate"}


def find_patterns(row: GradientRow, reference: Probe, candidate: Probe) -> Iterator[Pattern]:
    """Yields the forms of the differences at one step.

    Args:
      row: comparison of the gradients.
      reference: measurements of the reference.
      candidate: measurements of the candidate.
    """
    if row.nonfinite:
        return
    grads = [joined(probe.grads, reference.grads) for probe in (reference, candidate)]
    before, after = (joined(each.updates, reference.updates) for each in (reference, candidate))
    if row.error > _CHANGED:
        yield from _common(row.step, "gradient", grads[0], grads[1])
        yield from _frozen(row, reference.grads, candidate.grads)
    if not after.any():
        return  # a skipped step changes nothing
    if max(_CHANGED, 2 * row.error) < row.update_error < np.inf:
        yield from _common(row.step, "update", before, after)
        yield from _decayed(row, before, after, joined(candidate.params, reference.updates))
    # Moments and averages of parameters that do not change do not change, either.
    fixed = [path.replace(":", "/") for path, leaf in candidate.updates.items() if not leaf.any()]
    moving = {
        path: change
        for path, change in reference.changes.items()
        if not path.endswith(tuple(fixed))
    }
    yield from _stalled(row, moving, candidate.changes, candidate.dtypes)


def joined(leaves: Leaves, paths: Iterable[str]) -> np.ndarray:
    """Returns the elements of some leaves as one FP64 vector."""
    return np.concatenate([np.zeros(0), *(leaves[path].ravel() for path in paths)])


def _common(step: int, stage: str, x: np.ndarray, y: np.ndarray) -> Iterator[Pattern]:
    """Finds a factor that all elements have in common, and elements that are clipped."""
    factor = float(x @ y / (x @ x)) if x.any() else 0.0
    error = difference(x, y).error
    if y.any() and difference(factor * x, y).error < _REST * min(abs(factor - 1), 1):
        yield Pattern(
            step=step,
            id=f"{stage}_factor",
            text=(
                f"{_SUBJECTS[stage]} {factor:.2g} times as large as in the reference, in the same "
                f"direction{_REASONS[stage]}"
            ),
            error=min(error, 1.0),
            factor=factor,
        )
        return
    top = float(np.max(np.abs(y), initial=0.0))
    is_clipped = (np.abs(y) >= (1 - _SAME) * top) & (np.abs(x) > (1 + _CHANGED) * top)
    share = float(np.mean(is_clipped)) if y.size else 0.0
    rest = difference(x[~is_clipped], y[~is_clipped]).error if not is_clipped.all() else 0.0
    if top and is_clipped.sum() >= _CLIPPED and share >= _CLIPPED_SHARE and rest < _REST:
        yield Pattern(
            step=step,
            id="clipping",
            text=f"{100 * share:.3g} % of the elements of the {stage} are clipped to {top:.3g}",
            error=min(error, 1.0),
        )


def _frozen(row: GradientRow, reference: Leaves, candidate: Leaves) -> Iterator[Pattern]:
    """Finds modules whose gradient is zero, unless that of all modules is."""
    modules: dict[str, list[str]] = {}
    for path in reference:
        modules.setdefault(path.rpartition(":")[0] or "(root)", []).append(path)
    names = [
        module
        for module, paths in modules.items()
        if not joined(candidate, paths).any()
        and np.linalg.norm(joined(reference, paths)) > _FROZEN * row.norm
    ]
    if 0 < len(names) < len(modules):
        text = f"the gradient of {', '.join(names)} is zero"
        yield Pattern(step=row.step, id="zero_gradient", text=text, error=1.0)


def _decayed(
    row: GradientRow, x: np.ndarray, y: np.ndarray, params: np.ndarray
) -> Iterator[Pattern]:
    """Finds an update that differs by a multiple of the parameters."""
    factor = float((y - x) @ params / (params @ params)) if params.any() else 0.0
    if factor and difference(factor * params, y - x).error < 2 * _REST:
        yield Pattern(
            step=row.step,
            id="weight_decay",
            text=(
                f"the update differs by {factor:.2g} times the parameters, as with another weight "
                "decay"
            ),
            error=min(row.update_error, 1.0),
        )


def _stalled(
    row: GradientRow, reference: Leaves, candidate: Leaves, dtypes: Mapping[str, str]
) -> Iterator[Pattern]:
    """Finds the leaf of the state of which most elements do not change, as in the reference."""
    shares: dict[str, float] = {}
    for path, change in reference.items():
        other, moves = candidate.get(path), change != 0
        if other is not None and other.shape == change.shape and moves.any():
            shares[path] = float(np.mean(other[moves] == 0))
    limit = lambda path: _STALLED if dtypes[path] in ("bfloat16", "float16") else 1.0
    shares = {path: share for path, share in shares.items() if share >= limit(path)}
    if shares:
        path = max(shares, key=lambda key: (shares[key], candidate[key].size))
        part = "" if shares[path] == 1 else f" in {100 * shares[path]:.3g} % of its elements"
        yield Pattern(
            step=row.step,
            id="state",
            text=f"{path!r} ({dtypes[path]}) does not change{part}, as it does in the reference",
            error=min(shares[path] + row.update_error / 2, 1.5),
        )


# ---------------------------------------------------------------------------
# Differences of arrays
# ---------------------------------------------------------------------------


class Difference(NamedTuple):
    """Difference of two arrays: relative error, cosine and norm of the reference."""

    error: float
    cosine: float
    norm: float


def difference(reference: np.ndarray, candidate: np.ndarray) -> Difference:
    """Returns |candidate - reference| / |reference|, their cosine, and |reference|, in FP64.

    Example:
      >>> difference(np.array([3.0, 4.0]), np.array([3.0, 4.5])).error
      0.1
    """
    x, y = (np.asarray(a, np.float64).ravel() for a in (reference, candidate))
    norm = float(np.linalg.norm(x))
    if not np.isfinite(y).all():
        return Difference(float("inf"), float("nan"), norm)
    distance, other = float(np.linalg.norm(y - x)), float(np.linalg.norm(y))
    if norm == 0:
        return Difference(0.0 if distance == 0 else float("inf"), float(other == 0), norm)
    cosine = float(x @ y / (norm * other)) if other else 0.0
    return Difference(distance / norm, min(cosine, 1.0), norm)
