"""Pairs the operations of two programs, and compares their results for equal operands.

The serving program is run with the results of the training program: each result that has a
counterpart is recorded, and then replaced by it. So a difference is that of one operation, or of
the operations without a counterpart before it, and earlier differences do not add to it.

*Criterion.* Both results are rounded to the coarser of their two dtypes. Rounding explains the rest
if its root mean square is at most half of that of a rounding to this dtype, `eps / sqrt(24)` of the
values, since results of equal operations differ in the last bit of a few elements; for FP32, if it
is at most 1e-5 of the values, or of the norm of the sums. A sum in another order stays below both
(Higham 2002, Accuracy and Stability of Numerical Algorithms, section 4.2: the error of a sum of n
terms grows as sqrt(n) units of roundoff), and TF32 or a 16-bit operand is above.
"""

from __future__ import annotations

import collections
import difflib
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp._core import _typing
from jaxmp._programs import _bind, _locations
from jaxmp._tools.validate._walk import INPUT, ResultRecord, in_stored_dtype

# Operations that only move elements or change their type.
MOVES = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "pad", "reshape"}
    | {"optimization_barrier", "rev", "slice", "split", "squeeze", "stop_gradient", "transpose"}
    | {"concatenate", "dynamic_slice", "dynamic_update_slice"}
    | {"constant", "parameter"}  # of exported programs
)
_SUMS = ("dot_general", "reduce_sum", "conv_general_dilated", "cumsum", "add_any")
# Relative differences of FP32 results that the order of sums explains.
_FP32 = 1e-5
# Part of the root mean square of a rounding that is left unexplained.
_HALF = 0.5
# Larger elements are masks, unless all are.
_MASKED = 1e4


class Pair(NamedTuple):
    """A result of training, and those of serving that contain it.

    train: index of its record.
    serve: indices of the records of serving, which are parts of it along `axis`.
    axis: the axis.
    """

    train: int
    serve: tuple[int, ...]
    axis: int

    def join(self, values: Sequence[_typing.Array]) -> _typing.Array:
        """Returns the value of serving in the shape of that of training."""
        return values[0] if len(values) == 1 else jnp.concatenate(values, self.axis)

    def split(self, value: _typing.Array) -> Sequence[_typing.Array]:
        """Returns the parts of a value of training for each record of serving."""
        return [value] if len(self.serve) == 1 else jnp.split(value, len(self.serve), self.axis)


def is_compared(record: ResultRecord) -> bool:
    """Returns True for a floating-point result that an operation computes."""
    is_float = jnp.issubdtype(record.dtype, jnp.floating)
    return is_float and record.primitive not in MOVES and record.value.size > 0


def modules(records: Sequence[ResultRecord]) -> list[str]:
    """Returns the module path of each record."""
    names = {r.scopes[:n]: None for r in records for n in range(len(r.scopes) + 1)}
    root = _locations.root_of(names)
    return [_locations.module_of(record.scopes, root) for record in records]


def pairs_of(train: Sequence[ResultRecord], serve: Sequence[ResultRecord]) -> list[Pair]:
    """Pairs records by their modules, operations and shapes, in the order of execution.

    If serving repeats each operation for parts of the batch or for single tokens, the repetitions
    are joined. Modules do not count if their names differ.
    """
    best: list[Pair] = []
    for with_modules in (True, False):
        labels = [_labels(records, with_modules) for records in (train, serve)]
        counts = [collections.Counter(label.values()) for label in labels]
        common = counts[0].keys() & counts[1].keys()
        ratios = collections.Counter(counts[1][key] / counts[0][key] for key in common)
        is_repeated = bool(ratios) and max(ratios, key=lambda r: (ratios[r], -r)) > 1
        pairs = (_repeated if is_repeated else _sequence)((train, serve), labels)
        best = max(best, pairs, key=len)
        if 2 * len(best) > len(labels[0]):
            break
    return best


# Index of a record -> its module without numbers, and its operation.
_Labels = dict[int, tuple[str, str]]


def _labels(records: Sequence[ResultRecord], with_modules: bool) -> _Labels:
    paths = modules(records) if with_modules else [""] * len(records)
    return {
        n: (re.sub(r"_?\d+", "", path), record.primitive)
        for n, (path, record) in enumerate(zip(paths, records, strict=True))
        if is_compared(record)
    }


def _sequence(programs: Sequence[Sequence[ResultRecord]], labels: Sequence[_Labels]) -> list[Pair]:
    """Pairs the longest common sequences of operations."""
    keys = [
        [(*key, records[n].value.shape) for n, key in label.items()]
        for label, records in zip(labels, programs, strict=True)
    ]
    first, second = map(list, labels)
    blocks = difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    return [
        Pair(first[block.a + n], (second[block.b + n],), 0)
        for block in blocks
        for n in range(block.size)
    ]


def _repeated(programs: Sequence[Sequence[ResultRecord]], labels: Sequence[_Labels]) -> list[Pair]:
    """Pairs each operation with all its repetitions."""
    groups: list[dict[Any, list[int]]] = [{}, {}]
    for group, label in zip(groups, labels, strict=True):
        for n, key in label.items():
            group.setdefault(key, []).append(n)
    pairs = []
    for key, own in groups[0].items():
        others = groups[1].get(key, [])
        for n, index in enumerate(own if len(others) % len(own) == 0 else ()):
            parts = tuple(others[n :: len(own)])
            shapes = [programs[1][part].value.shape for part in parts]
            axis = _axis(programs[0][index].value.shape, shapes)
            if axis is not None:
                pairs.append(Pair(index, parts, axis))
    return pairs


def _axis(whole: tuple[int, ...], parts: list[tuple[int, ...]]) -> int | None:
    """Returns the axis along which parts have the shape of the whole together."""
    if not parts or any(part != parts[0] or len(part) != len(whole) for part in parts):
        return None
    scaled = lambda axis: (*parts[0][:axis], len(parts) * parts[0][axis], *parts[0][axis + 1 :])
    return next((axis for axis in range(len(whole)) if scaled(axis) == whole), None)


# ---------------------------------------------------------------------------
# Differences
# ---------------------------------------------------------------------------


def coarser(first: np.dtype, second: np.dtype) -> np.dtype:
    """Returns the dtype with fewer bits of precision."""
    return max(first, second, key=lambda dtype: float(jnp.finfo(dtype).eps))


def is_different(train: ResultRecord, serve: ResultRecord, value: _typing.Array) -> bool:
    """Returns True if rounding does not explain the difference of two results.

    Args:
      train: the record of training.
      serve: a record of serving.
      value: the value of serving, in the shape of that of training.
    """
    dtype = coarser(train.dtype, serve.dtype)
    x, y = (np.asarray(in_stored_dtype(each, dtype), np.float64) for each in (train.value, value))
    finite = np.isfinite(x) & np.isfinite(y)
    if not (finite | (x == y) | (np.isnan(x) & np.isnan(y))).all():
        return True
    small = finite & (np.abs(x) < _MASKED)
    small = small if small.any() else finite
    x, y = x[small], y[small]
    norm = lambda z: math.sqrt(np.mean(np.square(z))) if z.size else 0.0
    distance, scale = norm(y - x), norm(x)
    if _bind.is_narrow_dtype(dtype):
        return distance > _HALF * float(jnp.finfo(dtype).eps) / math.sqrt(24) * scale
    if train.primitive in _SUMS and train.operands:
        sizes = [np.size(each) for each in train.operands]
        terms = math.sqrt(math.prod(sizes) / max(train.value.size, 1))
        sums = math.prod(norm(np.asarray(each, np.float64)) for each in train.operands)
        scale = max(scale, sums * math.sqrt(terms))
    return distance > _FP32 * scale


def before(records: Sequence[ResultRecord], index: int, paired: Collection[int]) -> list[int]:
    """Returns the operations before a record up to the nearest ones with a counterpart."""
    waiting, seen = list(records[index].makers), set()
    while waiting:
        n = waiting.pop()
        if n != INPUT and n not in seen:
            seen.add(n)
            waiting += () if n in paired else records[n].makers
    return sorted(seen)
