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
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from jaxmp._core import _dtypes
from jaxmp._core._typing import Array
from jaxmp._programs import _bind
from jaxmp._tools.parity import _align
from jaxmp._tools.parity._align import Pair
from jaxmp._tools.parity._walk import INPUT, Change, Record, walk
from jaxmp._tools.stats import _measure

# Part of the mismatch that a change has to remove.
SHARE = 0.4
# Outputs that differ by less, relative to their root mean square, are equal.
_EQUAL = 1e-5
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

    def __init__(self, train: Program, serve: Program, shift: int) -> None:
        self.serve, self.shift = serve, shift
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
        groups = self._groups()
        changes = {key: self._changes(places) for key, places in groups.items()}
        joined: dict[int, Change] = {}
        for each in changes.values():
            joined |= each
        limit = (1 - SHARE) * self.before
        together = self._with(joined) if joined else self.before
        if together > limit:
            return None, self.before
        after: dict[str, float] = {}
        for key in list(groups)[:_MOST]:
            after[key] = self._with(changes[key])
            if after[key] <= limit:
                return self._cause(groups[key], changes[key], after[key]), self.before
        first = next((k for k in after if after[k] < 0.95 * self.before), min(after, key=after.get))
        others = tuple(key for key in groups if key != first)
        return self._cause(groups[first], changes[first], together, others), self.before

    # -- candidates -----------------------------------------------------------------------------

    def _groups(self) -> dict[str, list[_Place]]:
        """Returns the candidates by module, in the order of the serving program."""
        train, serve = self.records
        pairs = sorted(_align.pairs_of(train, serve), key=lambda pair: pair.serve)
        self._paired = {p.train for p in pairs}, {n for p in pairs for n in p.serve}
        self._partner = {n: pair.train for pair in pairs for n in pair.serve}
        forced: dict[int, Change] = {}
        for pair in pairs:
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
            return _Place(pair, value, only, (side, (computed or own or only[side])[-1]))
        return _Place(pair, value, only, (1, indices[1]))

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
            if self._key(1, n) in keys and serve[n].dtype != train[partner].dtype:
                changes[n] = Change(dtype=train[partner].dtype)
        # Roundings of serving that training does not have.
        own = {_sign(r) for n, r in enumerate(train) if self._is_alone(0, n, keys)}
        new = {n for place in places for n in place.only[1]}
        for n, record in enumerate(serve):
            is_new = n in new or (self._is_alone(1, n, keys) and _sign(record) not in own)
            if is_new and _bind.is_narrow_dtype(record.dtype):
                changes[n] = Change(dtype=_dtypes.FLOAT32)
        return changes

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
        sides = [
            _text([self.records[s][n] for n in (*place.only[s], index)])
            for s, index in ((0, place.pair.train), (1, place.pair.serve[0]))
        ]
        file, line = record.line
        cause = ParityCause(
            module=module,
            operation=record.primitive,
            kind=kind,
            train=sides[0],
            serve=sides[1],
            file=file,
            line=line,
            text=linecache.getline(file, line).strip() if file else "",
            before=self.before,
            after=after,
            others=others,
        )
        return dataclasses.replace(cause, fix=self._fix(cause, changes, reason))

    def _fix(self, cause: ParityCause, changes: Mapping[int, Change], reason: str) -> str:
        where = f"{cause.module or 'the program'}" + (f" ({cause.file}:{cause.line})" * bool(cause.file))
        if cause.kind == "dtype":
            names: dict[str, list[str]] = {}
            for n, change in changes.items():
                names.setdefault(str(change.dtype), []).append(self.records[1][n].primitive)
            texts = [f"{', '.join(dict.fromkeys(v))} in {dtype}" for dtype, v in names.items()]
            dtype = next(iter(names))
            return (
                f"In the serving program, compute {'; '.join(texts)} in {where}, as in training, by "
                f"a cast of the operands:\n    x = x.astype(jnp.{dtype})"
            )
        if cause.kind == "arguments":
            return f"Run both programs with the same arrays: in {where}, {reason}."
        if cause.kind == "operations":
            return (
                f"Run the same code in both programs in {where}: training computes {cause.train}, "
                f"and serving {cause.serve}."
            )
        return f"Use the same kernel, with the same shapes, for {cause.operation} in {where}."

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
                        return f"operand {n} is rounded to {name} in {('serving', 'training')[s]}"
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
    return _Search(train, serve, shift).cause()


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
