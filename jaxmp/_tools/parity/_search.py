"""Finds the first place at which two programs differ by more than rounding explains.

A place is a *candidate* if it fails the criterion of `_align`. Candidates are grouped by modules,
without numbers. Each group has a change: its operations in the dtypes of the training program, or,
if no dtype differs, its results without the differences that were measured for equal operands. The
serving program is run with the change. The cause is the first group whose change removes `SHARE` of
the mismatch, or the first of several that do so together. Without such a group there is no cause.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxmp._core import _dtypes
from jaxmp._core._typing import Array
from jaxmp._programs import _analysis, _bind
from jaxmp._tools.parity import _align
from jaxmp._tools.parity._align import Pair
from jaxmp._tools.parity._walk import INPUT, Change, Record, walk
from jaxmp._tools.stats import _measure

# The two programs in texts.
_NAMES = ("training", "serving")
# Part of the mismatch that a change has to remove.
SHARE = 0.4
# Outputs that differ by less, relative to their root mean square, are equal.
_EQUAL = 1e-5
# A change with less effect does not count as one.
_SMALLER = 0.95
# Groups that are tried one by one.
_MOST = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityCause:
    """First place at which two programs differ by more than rounding explains.

    Args:
      module: path of the module, such as "block_0/attention"; "" outside of modules.
      operation: name of the primitive.
      kind: "dtype", "arguments" (the operands are other arguments or constants), "operations" (one
        program has operations that the other one does not have) or "kernel".
      train, serve: the operations of both programs, with their dtypes.
      file, line, text: the source line.
      before: mean absolute difference of the outputs of both programs, run one operation at a time.
      after: the same with the change.
      others: further modules that differ, whose changes are part of `after`.
      fix: the change, which was run.
    """

    module: str
    operation: str
    kind: str
    train: str
    serve: str
    file: str
    line: int
    text: str
    before: float
    after: float
    others: tuple[str, ...] = ()
    fix: str = ""


class Program(NamedTuple):
    """A traced program and its arguments."""

    closed: ClosedJaxpr
    arrays: Sequence[Any]


class _Place(NamedTuple):
    """A pair of results that differ by more than rounding explains."""

    pair: Pair
    # Results of serving for equal operands.
    value: Array
    # The operations of each program that the other one does not have.
    only: tuple[list[int], list[int]]
    # The program (0: training, 1: serving) and the index of the record to name.
    named: tuple[int, int]


class _Search:
    """Search in two programs."""

    def __init__(
        self, train: Program, serve: Program, shift: int, names: tuple[str, str] = _NAMES
    ) -> None:
        self.serve, self.shift, self.names = serve, shift, names
        # True if a result of the first program has a coarser dtype, or it has the cast of the cause.
        self.is_training_coarser = False
        first, self.outputs = walk(*train)
        second, others = walk(*serve)
        self.records = first, second
        self.modules = _align.modules(first), _align.modules(second)
        self.before = self._mismatch(others)

    def _mismatch(self, outputs: Sequence[Array]) -> float:
        """Returns the mean absolute difference from the outputs of training."""
        x, y = (_flat(each) for each in (self.outputs, outputs))
        used = ~(np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore"):
            difference = np.where(x == y, 0.0, np.abs(x - y))[used]
        return float(np.mean(difference)) if difference.size else 0.0

    def _with(self, changes: Mapping[int, Change]) -> float:
        return self._mismatch(walk(*self.serve, changes)[1])

    def cause(self) -> tuple[ParityCause | None, float]:
        """Returns the cause, and the mismatch of the programs run one operation at a time."""
        x = _flat(self.outputs)
        scale = float(np.sqrt(np.mean(np.square(x[np.isfinite(x)])))) if np.isfinite(x).any() else 0
        if self.before <= _EQUAL * scale:
            return None, self.before
        groups, joined = self._groups(), {}
        limit, after = (1 - SHARE) * self.before, {}
        for key, places in itertools.islice(groups.items(), _MOST):
            changes = self._changes(places)
            after[key] = self._with(changes)
            if after[key] <= limit:
                return self._cause(places, changes, after[key]), self.before
            joined |= changes
        together = self._with(joined) if len(after) > 1 else self.before
        if together > limit:
            return None, self.before
        first = next((key for key in after if after[key] < _SMALLER * self.before), next(iter(after)))
        others = tuple(key for key in groups if key != first)
        changes = self._changes(groups[first])
        return self._cause(groups[first], changes, together, others), self.before

    # -- candidates -----------------------------------------------------------------------------

    def _groups(self) -> dict[str, list[_Place]]:
        """Returns the candidates by module, in the order of the serving program."""
        train, serve = self.records
        pairs = sorted(_align.pairs_of(train, serve), key=lambda pair: pair.serve)
        self._paired = {p.train for p in pairs}, {n for p in pairs for n in p.serve}
        self._partner = {n: pair.train for pair in pairs for n in pair.serve}
        self._readers: dict[int, list[int]] = {}
        for n, record in enumerate(train):
            for maker in record.makers:
                self._readers.setdefault(maker, []).append(n)
        forced: dict[int, Change] = {}
        for pair in pairs:
            dtypes = train[pair.train].dtype, serve[pair.serve[0]].dtype
            self.is_training_coarser |= dtypes[0] != dtypes[1] and _align.coarser(*dtypes) == dtypes[0]
            whole = self._moved(train[pair.train].value, self.shift)
            for n, part in zip(pair.serve, _align.parts(whole, pair), strict=True):
                part = _as_stored(part, serve[n].dtype)
                forced[n] = Change(value=lambda _, part=part: part)
        local, _ = walk(*self.serve, forced)
        groups: dict[str, list[_Place]] = {}
        for pair in pairs:
            value = self._moved(_align.joined(local, pair), -self.shift)
            record = serve[pair.serve[0]]
            if not _align.is_different(train[pair.train], record, value):
                continue
            place = self._place(pair, value, local)
            side, index = place.named
            key = _align.numberless(self.modules[side][index], self.records[side][index].line)
            groups.setdefault(key, []).append(place)
        self._local = local
        return groups

    def _moved(self, value: Array, shift: int) -> Array:
        """Returns a value of all examples with its examples at other positions."""
        return jnp.roll(value, shift, 0) if shift and value.ndim else value

    def _place(self, pair: Pair, value: Array, local: Sequence[Record]) -> _Place:
        indices = pair.train, pair.serve[0]
        regions = [
            [n for n in _align.unpaired_before(records, index, paired) if _computes(records[n])]
            for records, index, paired in zip(self.records, indices, self._paired, strict=True)
        ]
        only = self._only(regions, _sign)
        if only == ([], []):
            only = self._only(regions, lambda r: (*_sign(r), *map(np.shape, r.operands)))
        first, second = (self.records[s][indices[s]] for s in (0, 1))
        if first.dtype == second.dtype and (only[0] or only[1]):
            side = 1 if only[1] else 0
            own = [n for n in only[side] if not _is_rounding(self.records[side][n])]
            computed = [n for n in own if self.records[side][n].primitive not in _bind.MOVES]
            casts = [n for n in only[side] if n not in own]
            return _Place(pair, value, only, (side, (computed or casts or own)[-1]))
        if first.dtype == second.dtype:
            # An operand that serving stores in another dtype.
            before = _align.paired_before(self.records[1], indices[1], self._paired[1])
            stored = [n for n in before if self._is_stored_coarser(n)]
            return _Place(pair, value, only, (1, max(stored, default=indices[1])))
        return _Place(pair, value, only, (1, indices[1]))

    def _is_stored_coarser(self, index: int) -> bool:
        train, serve = self.records[0][self._partner[index]].dtype, self.records[1][index].dtype
        return train != serve and _align.coarser(train, serve) == serve

    def _only(
        self, regions: Sequence[list[int]], sign: Callable[[Record], Any]
    ) -> tuple[list[int], list[int]]:
        """Returns the operations of each region whose sign the other one has less often."""
        signs = [
            collections.Counter(sign(records[n]) for n in region)
            for records, region in zip(self.records, regions, strict=True)
        ]
        first, second = (
            [n for n in region if sign(records[n]) in signs[side] - signs[1 - side]]
            for side, (records, region) in enumerate(zip(self.records, regions, strict=True))
        )
        return first, second

    # -- changes --------------------------------------------------------------------------------

    def _changes(self, places: Sequence[_Place]) -> dict[int, Change]:
        """Returns the change of the serving program that removes the differences of some places."""
        changes = self._dtypes(places)
        if changes and self._with(changes) <= (1 - SHARE) * self.before:
            return changes
        train, serve = self.records
        corrected: dict[int, Change] = {}
        for place in places:
            x, y = train[place.pair.train].value, place.value
            error = jnp.where(jnp.isfinite(x) & jnp.isfinite(y), y - x, 0)
            error = self._moved(error, self.shift)
            for n, part in zip(place.pair.serve, _align.parts(error, place.pair), strict=True):
                dtype = serve[n].dtype
                corrected[n] = Change(
                    value=lambda z, part=part, dtype=dtype: _as_stored(z - part, dtype)
                )
        return corrected

    def _dtypes(self, places: Sequence[_Place]) -> dict[int, Change]:
        """Returns the dtypes of training for the operations of the modules of some places."""
        train, serve = self.records
        keys = {self._key(*place.named) for place in places}
        changes: dict[int, Change] = {}
        for n, partner in self._partner.items():
            dtype = train[partner].dtype
            is_other = serve[n].dtype not in (dtype, self._stored_as(partner))
            is_move = serve[n].primitive in _bind.MOVES
            if is_other and not is_move and self._key(1, n) in keys:
                changes[n] = Change(dtype=dtype)
        # Roundings of serving that training does not have.
        own = {_sign(r) for n, r in enumerate(train) if self._is_alone(0, n, keys)}
        new = {n for place in places for n in place.only[1]}
        for n, record in enumerate(serve):
            is_new = n in new or (self._is_alone(1, n, keys) and _sign(record) not in own)
            if is_new and _bind.is_narrow_dtype(record.dtype):
                changes[n] = Change(dtype=_dtypes.FLOAT32)
        return changes

    def _stored_as(self, index: int) -> np.dtype | None:
        """Returns the dtype to which all readers of a result of training round it."""
        readers = [self.records[0][n] for n in self._readers.get(index, ())]
        dtypes = {record.dtype if _is_rounding(record) else None for record in readers}
        return dtypes.pop() if len(dtypes) == 1 else None

    def _is_alone(self, side: int, n: int, keys: set[str]) -> bool:
        """Returns True for an operation of some groups that has no counterpart."""
        is_paired = n in self._paired[side]
        return not is_paired and _computes(self.records[side][n]) and self._key(side, n) in keys

    def _key(self, side: int, index: int) -> str:
        return _align.numberless(self.modules[side][index], self.records[side][index].line)

    # -- texts ----------------------------------------------------------------------------------

    def _cause(
        self,
        places: Sequence[_Place],
        changes: Mapping[int, Change],
        after: float,
        others: tuple[str, ...] = (),
    ) -> ParityCause:
        place = places[0]
        side, index = place.named
        record, module = self.records[side][index], self.modules[side][index]
        kind, reason = "kernel", self._arguments(place)
        if all(change.value is None for change in changes.values()):
            kind = "dtype"
        elif reason:
            kind = "arguments"
        elif place.only[0] or place.only[1]:
            kind = "operations"
        ends = place.pair.train, place.pair.serve[0]
        if side == 1 and index in self._partner:
            ends = self._partner[index], index
        self.is_training_coarser |= any(map(_is_rounding, self._of(0, place.only[0])))
        sides = {
            name: _text(self._of(s, (*place.only[s], ends[s])))
            for s, name in enumerate(self.names)
        }
        file, line = record.line
        cause = ParityCause(
            module=module,
            operation=record.primitive,
            kind=kind,
            train=sides["training"],
            serve=sides["serving"],
            file=file,
            line=line,
            text=linecache.getline(file, line).strip() if file else "",
            before=self.before,
            after=after,
            others=others,
        )
        return dataclasses.replace(cause, fix=self._fix(cause, changes, reason))

    def _of(self, side: int, indices: Iterable[int]) -> list[Record]:
        return [self.records[side][n] for n in indices]

    def _fix(self, cause: ParityCause, changes: Mapping[int, Change], reason: str) -> str:
        """Returns the change that was run, as sentences and code."""
        where = cause.module or "the program"
        where += f" ({cause.file}:{cause.line})" if cause.file else ""
        base, changed = self.names
        if cause.kind == "arguments":
            return f"Pass the same arrays to both programs: in {where}, {reason}."
        if cause.kind == "operations":
            return (
                f"Run the same code in both programs in {where}. {base.capitalize()}: "
                f"{cause.train if base == _NAMES[0] else cause.serve}."
            )
        if cause.kind != "dtype":
            return (
                f"Use the same kernel and shapes, and the same values of the operands, for "
                f"{cause.operation} in {where}."
            )
        texts: dict[str, None] = {}
        for n, change in changes.items():
            record = self.records[1][n]
            if _is_rounding(record):
                texts[f"without the cast to {record.dtype}"] = None
            else:
                texts[f"{record.primitive} in {change.dtype}"] = None
        dtype = next(change.dtype for change in changes.values())
        return (
            f"In the {changed} program, compute {where} as in {base}: {', '.join(texts)}.\n"
            f"    x = x.astype(jnp.{dtype})  # the operands"
        )

    def _arguments(self, place: _Place) -> str:
        """Returns a text on the first operand that differs and that no operation computes."""
        train, serve = self.records[0][place.pair.train], self._local[place.pair.serve[0]]
        for n, (x, y) in enumerate(zip(train.operands, serve.operands, strict=False)):
            if not self._is_input(serve.makers[n]):
                continue
            if np.shape(x) != np.shape(y) or not jnp.issubdtype(jnp.result_type(x), jnp.number):
                continue
            if bool(jnp.array_equal(x, y)):
                continue
            for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
                for s, (a, b) in enumerate(((x, y), (y, x))):
                    if jnp.issubdtype(jnp.result_type(a), jnp.floating) and bool(
                        jnp.array_equal(_measure.rounded_to(a, name), b)
                    ):
                        return f"operand {n} is rounded to {name} in {self.names[1 - s]}"
            return f"operand {n} has other values"
        return ""

    def _is_input(self, index: int) -> bool:
        """Returns True for an argument or a constant, also if it is reshaped or cast."""
        if index == INPUT:
            return True
        record = self._local[index]
        is_move = record.primitive in _align.MOVES and index not in self._paired[1]
        return is_move and all(map(self._is_input, record.makers))


def find_cause(
    train: Program, serve: Program, shift: int = 0
) -> tuple[ParityCause | None, float]:
    """Returns the cause of a mismatch, and the mismatch of both programs run by operations.

    Args:
      train, serve: the programs.
      shift: number of positions by which the examples of serving are moved in the batch.
    """
    if not _is_exported(serve) or _is_exported(train):
        search = _Search(train, serve, shift)
        cause, before = search.cause()
        is_done = cause is not None and cause.kind == "dtype"
        if is_done or not search.is_training_coarser or _is_exported(train):
            return cause, before
        # The program that rounds more is the one to change.
        other, _ = _Search(serve, train, -shift, _NAMES[::-1]).cause()
        return (other if other is not None and other.kind == "dtype" else cause), before
    # The operations of an exported program cannot be changed: those of training are.
    return _Search(serve, train, -shift, _NAMES[::-1]).cause()


def _is_exported(program: Program) -> bool:
    return "call_exported" in _analysis.primitives(program.closed)


def _computes(record: Record) -> bool:
    """Returns True for an operation that computes or rounds floats."""
    is_float = jnp.issubdtype(record.dtype, jnp.floating)
    return is_float and (record.primitive not in _align.MOVES or _is_rounding(record))


def _is_rounding(record: Record) -> bool:
    return record.primitive == "convert_element_type" and _bind.is_narrow_dtype(record.dtype)


def _sign(record: Record) -> tuple[str, str]:
    return record.primitive, str(record.dtype)


def _text(records: Sequence[Record]) -> str:
    names = dict.fromkeys(f"{record.primitive} in {record.dtype}" for record in records)
    return ", ".join(names)


def _as_stored(x: Array, dtype: np.dtype) -> Array:
    """Returns a value rounded to the dtype in which a program stores it."""
    return _measure.rounded_to(x, dtype) if _bind.is_narrow_dtype(dtype) else x


def _flat(outputs: Sequence[Array]) -> np.ndarray:
    floats = [x for x in outputs if jnp.issubdtype(x.dtype, jnp.floating)]
    return np.concatenate([np.zeros(0), *(np.asarray(x, np.float64).ravel() for x in floats)])
