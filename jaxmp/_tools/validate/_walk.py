"""Runs traced programs operation by operation, and pairs and compares their results.

Arrays of 16 bits and in FP8 are FP32 arrays, and the result of an operation that computes in such a
format is rounded to it, as in `validate`. So no compiler removes a rounding, and an operation can
be repeated in the dtype of another program. Loops and branches are run in Python. Operations that
no interpreter enters, such as kernels, run in their recorded dtypes, and have one record.

*Pairs.* The serving program is run with the results of the training program: each result that has a
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
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmp import _core, _programs
from jaxmp._core._compat import _exported
from jaxmp._programs import Frame, Start
from jaxmp._tools.report import _section

# Index of the maker of an argument or a constant.
INPUT = -1


class ResultRecord(NamedTuple):
    """One result of an operation that ran.

    Args:
      scopes: name scopes.
      primitive: name of the operation.
      dtype: dtype of the result in the program.
      line: (file, line) of the user's code; ("", 0) if it is not known.
      makers: for each operand, the index of the record that made it, or `INPUT`.
      operands: the operands; empty if they are not known.
      value: the result; in FP32 if it has 16 bits or FP8.
    """

    scopes: _programs.Path
    primitive: str
    dtype: np.dtype
    line: tuple[str, int]
    makers: tuple[int, ...]
    operands: tuple[Any, ...]
    value: Any

    @property
    def location(self) -> str:
        """The line, such as "model.py:12"."""
        return _section.location_text(*self.line) or "a line that is not known"


class Change(NamedTuple):
    """Change of one result.

    Args:
      dtype: the format to which it is rounded; None for that of the program.
      value: function of the result; None to leave it.
    """

    dtype: np.dtype | None = None
    value: Callable[[_core.Array], _core.Array] | None = None


class _Value(NamedTuple):
    """Array with the index of its record."""

    array: Any
    maker: int = INPUT


class _Walk(_programs.Interpreter):
    """Interpreter that runs a program with concrete arrays.

    Args:
      changes: index of a record -> the change of its result.

    `records` are the results in the order of execution.
    """

    consequence = "the operations inside of it are not compared"

    def __init__(self, changes: Mapping[int, Change] = MappingProxyType({})) -> None:
        super().__init__()
        self.records: list[ResultRecord] = []
        self._changes = changes
        self._lines = _programs.Lines()

    def constant(self, array: Any) -> _Value:
        return _Value(_programs.wide(jnp.asarray(array)))

    def literal(self, var: Any) -> _Value:
        return self.constant(jnp.asarray(var.val, var.aval.dtype))

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        form, name = _programs.form_of(equation), equation.primitive.name
        # The state of a run are the enclosing equations.
        inside = Start(frame.place.of(equation), (equation, *(frame.state or ())))
        if form in (_programs.Form.CALL, _programs.Form.REMAT, _programs.Form.DERIVATIVE):
            return self.run(_programs.call_of(equation).jaxpr, operands, inside)
        if form is _programs.Form.BRANCH:
            branches = _programs.cond_of(equation).branches
            index = min(max(int(operands[0].array), 0), len(branches) - 1)
            return self.run(branches[index], operands[1:], inside)
        if form is _programs.Form.SCAN:
            return self._scanned(equation, operands, inside)
        if form is _programs.Form.WHILE:
            test, loop = _programs.inners(equation)
            of_body, carry, _ = loop.split(operands)
            of_test = operands[: len(operands) - len(loop.indices)]
            while bool(self.run(test.recorded, [*of_test, *carry], inside)[0].array):
                carry = self.run(loop.recorded, [*of_body, *carry], inside)
            return carry
        if name == "call_exported":
            return self._exported(equation, operands, inside.place.names)
        self.check_known(equation)
        arrays = tuple(value.array for value in operands)
        makers = tuple(value.maker for value in operands)
        line, values = self._lines.of(inside.state), []
        for var, x in zip(
            equation.outvars, _programs.bind_in_fp32(equation, [*arrays]), strict=True
        ):
            dtype = getattr(var.aval, "dtype", np.dtype(bool))
            change = self._changes.get(len(self.records), Change())
            x = x if name in _programs.MOVES else _programs.rounded_to(x, change.dtype or dtype)
            self.records.append(
                ResultRecord(inside.place.names, name, dtype, line, makers, arrays, x)
            )
            x = x if change.value is None else change.value(x)
            values.append(_Value(x, len(self.records) - 1))
        return values

    def _scanned(self, equation: JaxprEqn, operands: list[Any], inside: Start) -> list[Any]:
        (loop,) = _programs.inners(equation)
        consts, carry, rows = loop.split(operands)
        stacked = []
        for n in range(loop.times)[:: loop.step]:
            row = [_Value(x.array[n], x.maker) for x in rows]
            results = self.run(loop.recorded, [*consts, *carry, *row], inside)
            carry = results[: len(carry)]
            stacked.append(results[len(carry) :])
        if not stacked:
            empty: list[Any] = [var.aval for var in equation.outvars[len(carry) :]]
            return [*carry, *(self.constant(jnp.zeros(x.shape, x.dtype)) for x in empty)]
        columns = zip(*stacked[:: loop.step], strict=True)
        return [*carry, *(_Value(jnp.stack([x.array for x in c]), c[-1].maker) for c in columns)]

    def _exported(
        self, equation: JaxprEqn, operands: list[Any], scopes: _programs.Path
    ) -> list[Any]:
        """Runs an exported program, whose operations are in StableHLO, with all its results."""
        exported, first = _programs.exported_of(equation), len(self.records)
        pairs = zip(operands, exported.in_avals, strict=True)
        arrays = [jnp.asarray(x.array, aval.dtype) for x, aval in pairs]
        rows, results = _exported.values_of(exported, arrays)
        outer = [operands[n].maker for n in exported.module_kept_var_idx]
        index = lambda n: first + n if n >= 0 else INPUT
        for n, row in enumerate(rows):
            made = (outer[n],) if n < len(outer) else tuple(map(index, row.makers))
            known = tuple(_programs.wide(rows[n].value) for n in row.makers if n >= 0)
            parts = (*scopes, *row.scopes), row.name, row.value.dtype
            line = self._lines.first_own(row.frames)
            self.records.append(ResultRecord(*parts, line, made, known, _programs.wide(row.value)))
        return [_Value(_programs.wide(x), index(n)) for x, n in results]


def walk(
    closed: ClosedJaxpr,
    arrays: Sequence[Any],
    changes: Mapping[int, Change] = MappingProxyType({}),
) -> tuple[list[ResultRecord], list[_core.Array], set[str]]:
    """Runs a program. Returns the records of its operations, its results, and unknown operations.

    Example:
      >>> closed = jax.make_jaxpr(lambda x: jnp.exp(x) + 1)(jnp.zeros(2, jnp.bfloat16))
      >>> records, (result,), _ = walk(closed, [jnp.ones(2, jnp.bfloat16)])
      >>> [(record.primitive, record.dtype.name) for record in records], result.dtype.name
      ([('exp', 'bfloat16'), ('add', 'bfloat16')], 'float32')
    """
    run = _Walk(changes)
    results = run.run(closed, list(map(run.constant, arrays)))
    return run.records, [value.array for value in results], run.unknown


# ---------------------------------------------------------------------------
# Pairs
# ---------------------------------------------------------------------------


# Operations that only move elements or change their type; the last two are of exported programs.
MOVES = _core.named(
    "broadcast_in_dim convert_element_type copy copy_p expand_dims pad reshape"
    " optimization_barrier rev slice split squeeze stop_gradient transpose concatenate"
    " dynamic_slice dynamic_update_slice constant parameter"
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

    def join(self, values: Sequence[_core.Array]) -> _core.Array:
        """Returns the value of serving in the shape of that of training."""
        return values[0] if len(values) == 1 else jnp.concatenate(values, self.axis)

    def split(self, value: _core.Array) -> Sequence[_core.Array]:
        """Returns the parts of a value of training for each record of serving."""
        return [value] if len(self.serve) == 1 else jnp.split(value, len(self.serve), self.axis)


def is_compared(record: ResultRecord) -> bool:
    """Returns True for a floating-point result that an operation computes."""
    is_float = jnp.issubdtype(record.dtype, jnp.floating)
    return is_float and record.primitive not in MOVES and record.value.size > 0


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
    scopes = (record.scopes if with_modules else () for record in records)
    return {
        n: (re.sub(r"_?\d+", "", path), record.primitive)
        for n, (path, record) in enumerate(zip(_programs.modules_of(scopes), records, strict=True))
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
    groups = [_section.grouped(label, label.__getitem__) for label in labels]
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


def is_different(train: ResultRecord, serve: ResultRecord, value: _core.Array) -> bool:
    """Returns True if rounding does not explain the difference of two results.

    Args:
      train: the record of training.
      serve: a record of serving.
      value: the value of serving, in the shape of that of training.
    """
    dtype = coarser(train.dtype, serve.dtype)
    rounded = (_programs.rounded_to(each, dtype) for each in (train.value, value))
    x, y = (np.asarray(each, np.float64) for each in rounded)
    finite = np.isfinite(x) & np.isfinite(y)
    if not (finite | (x == y) | (np.isnan(x) & np.isnan(y))).all():
        return True
    small = finite & (np.abs(x) < _MASKED)
    small = small if small.any() else finite
    x, y = x[small], y[small]
    norm = lambda z: math.sqrt(np.mean(np.square(z))) if z.size else 0.0
    distance, scale = norm(y - x), norm(x)
    if _programs.is_narrow_dtype(dtype):
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
