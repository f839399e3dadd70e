"""Finds the cause of a mismatch: the first module where programs differ by more than rounding.

*Candidates.* `_walk` pairs the operations of both programs. The serving program is run with the
operands that training has, and each pair whose results then fail the criterion is a candidate.

*Groups.* Candidates form a group if their modules are the same apart from numbers, as in the layers
of a model. Outside of modules, those of a source line do.

*Changes.* For each group, the serving program is run with a change: the operations of the group
compute in the dtypes of training. If that is not enough, the differences of the candidates are
subtracted from their results.

*Cause.* The cause is the first group whose change removes `_SHARE` of the mismatch. If no group
does, all are changed together. If that removes enough, the cause is the first group that has an
effect; otherwise there is no cause.

Only the program with more roundings can be changed to the dtypes of the other one. If that is
training, the search is repeated with the roles of the programs exchanged.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import linecache
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmp import _core, _programs
from jaxmp._tools.report import _section
from jaxmp._tools.validate import _walk

PROGRAM_NAMES = ("training", "serving")
# Part of the mismatch that a change has to remove.
_SHARE = 0.4
# Outputs that differ by less, relative to their root mean square, are equal.
_EQUAL = 1e-5
# A change that removes less has no effect.
_EFFECT = 0.05
# Groups that are tried one by one, and lines of a fix that are shown.
_MOST, _LINES = 16, 8
_FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")

Changes = Mapping[int, _walk.Change]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityCause(_section.Located):
    """First operation in which two programs differ by more than rounding explains.

    Args:
      module: path of the module, such as "block_0/attention"; "" outside of modules.
      operation: name of the primitive.
      kind: "dtype"; "arguments", if arguments or constants have other values; "operations", for
        other differences, such as another kernel.
      train, serve: the operations of both programs, with their dtypes.
      file, line, text: the path of the source file, the number of the line, and the line.
      before: mean absolute difference of the outputs of both programs, run one operation at a time.
      after: the same with the change.
      others: further modules that differ, whose changes are part of `after`.
      fix: the change, as a sentence. For a dtype, a row for each line of the source follows.
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
    others: tuple[str, ...]
    fix: str


class _Candidate(NamedTuple):
    """Pair of results that differ by more than rounding explains.

    Args:
      pair: the results.
      value: the result of serving for the operands of training.
      only: operations of training, and of serving, that the other program lacks before the pair.
      side, number: the operation that the report names: its program (0 or 1), and index.
    """

    pair: _walk.Pair
    value: _core.Array
    only: tuple[list[int], list[int]]
    side: int
    number: int


def find_cause(
    train: _programs.Traced, serve: _programs.Traced, shift: int
) -> tuple[ParityCause | None, float, set[str]]:
    """Returns the cause of a mismatch, the mismatch of both programs run by operations, and the
    operations whose functions are not compared.

    Args:
      train, serve: the programs.
      shift: number of positions by which the examples of serving are moved in the batch.
    """
    # The operations of an exported program cannot be changed.
    train_is_fixed, serve_is_fixed = (
        "call_exported" in _programs.primitives(each.closed) for each in (train, serve)
    )
    swapped = (serve, train), -shift, PROGRAM_NAMES[::-1]
    if serve_is_fixed and not train_is_fixed:
        search = _Search(*swapped)
        return *search.cause(), search.unknown
    search = _Search((train, serve), shift, PROGRAM_NAMES)
    cause, before = search.cause()
    is_done = cause is not None and cause.kind == "dtype"
    if not is_done and search.is_coarser and not train_is_fixed:
        other, _ = _Search(*swapped).cause()
        cause = other if other is not None and other.kind == "dtype" else cause
    return cause, before, search.unknown


class _Run:
    """Run of one program by operations.

    Args:
      name: its name.
      records: the results.

    `paired` are the results with a counterpart in the other program.
    """

    def __init__(self, name: str, records: list[_walk.ResultRecord]) -> None:
        self.name, self.records = name, records
        self.modules = list(_programs.modules_of(record.scopes for record in records))
        self.paired: Collection[int] = ()

    def group(self, index: int) -> str:
        """Returns the group of an operation: its module without numbers, or its line."""
        return _section.numberless(self.modules[index]) or self.records[index].location

    def where(self, index: int) -> str:
        """Returns a line with its module, such as "block_*/attention (model.py:12)"."""
        module, line = _section.numberless(self.modules[index]), self.records[index].location
        return f"{module} ({line})" if module else line

    def unpaired(self, indices: Iterable[int]) -> list[int]:
        """Returns the operations that compute or round floats, and have no counterpart."""
        computes = lambda record: _walk.is_compared(record) or _is_cast(record)
        return [n for n in indices if n not in self.paired and computes(self.records[n])]


class _Search:
    """Search in two programs, of which the second one is changed.

    Args:
      programs: the programs.
      shift: number of positions by which the second one moves examples.
      names: of the programs.
    """

    def __init__(
        self,
        programs: tuple[_programs.Traced, _programs.Traced],
        shift: int,
        names: tuple[str, ...],
    ) -> None:
        self.changed, self.shift = programs[1], shift
        walks = [_walk.walk(each.closed, each.arrays) for each in programs]
        (first, self.outputs, unknown), (second, others, more) = walks
        self.unknown = unknown | more
        self.runs = _Run(names[0], first), _Run(names[1], second)
        self.before = self._mismatch(others)
        # True if the first program rounds more.
        self.is_coarser = False

    def _mismatch(self, outputs: Sequence[_core.Array]) -> float:
        """Returns the mean absolute difference from the outputs of the first program."""
        x, y = (_flat(each) for each in (self.outputs, outputs))
        used = ~((np.isnan(x) & np.isnan(y)) | (x == y))
        with np.errstate(invalid="ignore"):
            return float(np.sum(np.abs(x - y)[used]) / max(x.size, 1))

    def _run_with(self, changes: Changes) -> tuple[list[_walk.ResultRecord], float]:
        """Returns the results of the second program with changes, and the mismatch."""
        records, outputs, _ = _walk.walk(self.changed.closed, self.changed.arrays, changes)
        return records, self._mismatch(outputs)

    def cause(self) -> tuple[ParityCause | None, float]:
        """Returns the cause, and the mismatch."""
        x = _flat(self.outputs)
        x, limit = x[np.isfinite(x)], (1 - _SHARE) * self.before
        if not x.size or self.before <= _EQUAL * np.sqrt(np.mean(np.square(x))):
            return None, self.before
        groups, tried = self._groups(), []
        for candidates in itertools.islice(groups.values(), _MOST):
            changes, after = self._change(candidates)
            if after <= limit:
                return self._cause(candidates, changes, after, ()), self.before
            tried.append((after > (1 - _EFFECT) * self.before, candidates))
        changes, after = self._change([each for group in groups.values() for each in group])
        if after > limit:
            return None, self.before
        _, candidates = min(tried, key=lambda row: row[0])
        others = tuple(key for key, group in groups.items() if group is not candidates)
        return self._cause(candidates, changes, after, others), self.before

    # -- candidates -----------------------------------------------------------------------------

    def _groups(self) -> dict[str, list[_Candidate]]:
        """Returns the candidates of each group, in the order of the second program."""
        train, serve = (run.records for run in self.runs)
        pairs = sorted(_walk.pairs_of(train, serve), key=lambda pair: pair.serve)
        self._partner = {n: pair.train for pair in pairs for n in pair.serve}
        self.runs[0].paired, self.runs[1].paired = {p.train for p in pairs}, self._partner.keys()
        self._readers: dict[int, list[_walk.ResultRecord]] = {}
        for record in train:
            for maker in record.makers:
                self._readers.setdefault(maker, []).append(record)
        self.is_coarser = any(self._coarser(n) == 0 for n in self._partner)
        forced: dict[int, _walk.Change] = {}
        for pair in pairs:
            whole = self._moved(train[pair.train].value, self.shift)
            for n, part in zip(pair.serve, pair.split(whole), strict=True):
                part = _programs.rounded_to(part, serve[n].dtype)
                forced[n] = _walk.Change(value=lambda _, part=part: part)
        self._local, _ = self._run_with(forced)
        candidates = []
        for pair in pairs:
            value = self._moved(pair.join([self._local[n].value for n in pair.serve]), -self.shift)
            if _walk.is_different(train[pair.train], serve[pair.serve[0]], value):
                candidates.append(self._candidate(pair, value))
        return _section.grouped(candidates, lambda each: self.runs[each.side].group(each.number))

    def _moved(self, value: _core.Array, shift: int) -> _core.Array:
        """Returns a value with its examples at other positions of the batch."""
        return jnp.roll(value, shift, 0) if shift and value.ndim else value

    def _coarser(self, index: int) -> int | None:
        """Returns the program (0 or 1) in which a paired result has the coarser dtype."""
        train, serve = self.runs
        dtypes = train.records[self._partner[index]].dtype, serve.records[index].dtype
        return None if dtypes[0] == dtypes[1] else dtypes.index(_walk.coarser(*dtypes))

    def _candidate(self, pair: _walk.Pair, value: _core.Array) -> _Candidate:
        """Returns a candidate with the operation that explains its difference best.

        This is the pair itself if its dtypes differ; otherwise an operation that only one program
        has before it; otherwise the last one before it that the second program rounds more.
        """
        ends = list(zip(self.runs, (pair.train, pair.serve[0]), strict=True))
        nearest = [_walk.before(run.records, end, run.paired) for run, end in ends]
        unpaired = [run.unpaired(near) for run, near in zip(self.runs, nearest, strict=True)]
        only = self._only(unpaired, _sign)
        if not any(only):
            # Reductions of other numbers of elements, such as over another batch.
            reductions = [
                [n for n in indices if _changes_shape(run.records[n])]
                for run, indices in zip(self.runs, unpaired, strict=True)
            ]
            only = self._only(reductions, lambda r: (*_sign(r), *map(np.shape, r.operands)))
        side, index = 1, pair.serve[0]
        if self._coarser(index) is None:
            if any(only):
                side = 1 if only[1] else 0
                records = self.runs[side].records
                index = max(only[side], key=lambda n: (_rank(records[n]), n))
            else:
                rounded = (n for n in nearest[1] if n in self._partner and self._coarser(n) == 1)
                index = max(rounded, default=index)
        return _Candidate(pair, value, only, side, index)

    def _only(
        self, indices: Sequence[list[int]], sign: Callable[[_walk.ResultRecord], Any]
    ) -> tuple[list[int], list[int]]:
        """Returns the operations of each program whose sign the other program has less often.

        Args:
          indices: the operations of each program that are compared.
          sign: returns what equal operations have in common.
        """
        pairs = zip(self.runs, indices, strict=True)
        signs = [[sign(run.records[n]) for n in each] for run, each in pairs]
        train, serve = map(collections.Counter, signs)
        first, second = (
            [n for n, own in zip(indices[side], signs[side], strict=True) if own in more]
            for side, more in ((0, train - serve), (1, serve - train))
        )
        return first, second

    # -- changes --------------------------------------------------------------------------------

    def _change(self, candidates: Sequence[_Candidate]) -> tuple[Changes, float]:
        """Returns the change of some candidates, and the mismatch with it."""
        changes = self._dtypes(candidates)
        after = self._run_with(changes)[1] if changes else self.before
        if after <= (1 - _SHARE) * self.before:
            return changes, after
        corrected: dict[int, _walk.Change] = {}
        for pair, y, *_ in candidates:
            x = self.runs[0].records[pair.train].value
            error = self._moved(jnp.where(jnp.isfinite(x) & jnp.isfinite(y), y - x, 0), self.shift)
            for n, part in zip(pair.serve, pair.split(error), strict=True):
                dtype = self.runs[1].records[n].dtype
                corrected[n] = _walk.Change(
                    value=lambda z, part=part, dtype=dtype: _programs.rounded_to(z - part, dtype)
                )
        return corrected, self._run_with(corrected)[1]

    def _dtypes(self, candidates: Sequence[_Candidate]) -> Changes:
        """Returns the change of the operations in the candidates' groups to the first dtypes."""
        groups = {self.runs[each.side].group(each.number) for each in candidates}
        (train, serve), own = (run.records for run in self.runs), self.runs[1]
        new = {n for candidate in candidates for n in candidate.only[1]}
        # Roundings of the second program that the first one does not have.
        alone = [
            [n for n in run.unpaired(range(len(run.records))) if run.group(n) in groups]
            for run in self.runs
        ]
        known = {_sign(train[n]) for n in alone[0]}
        extra = (n for n in alone[1] if _sign(serve[n]) not in known)
        changes = {
            n: _walk.Change(dtype=_core.FLOAT32)
            for n in sorted({*new, *extra})
            if _programs.is_narrow_dtype(serve[n].dtype)
        }
        for n, partner in self._partner.items():
            if serve[n].primitive in _programs.MOVES or own.group(n) not in groups:
                continue
            # If the first program rounds its result next, the dtype of the second one is right.
            next_dtypes = {r.dtype if _is_cast(r) else None for r in self._readers.get(partner, ())}
            if serve[n].dtype != train[partner].dtype and next_dtypes != {serve[n].dtype}:
                changes[n] = _walk.Change(dtype=train[partner].dtype)
        return changes

    # -- texts ----------------------------------------------------------------------------------

    def _cause(
        self,
        candidates: Sequence[_Candidate],
        changes: Changes,
        after: float,
        others: tuple[str, ...],
    ) -> ParityCause:
        candidate = candidates[0]
        own, index = self.runs[candidate.side], candidate.number
        file, line = own.records[index].line
        self.is_coarser |= any(_is_cast(self.runs[0].records[n]) for n in candidate.only[0])
        ends = candidate.pair.train, candidate.pair.serve[0]
        if candidate.side == 1 and index in self._partner:
            ends = self._partner[index], index
        texts = {}
        for run, numbers, end in zip(self.runs, candidate.only, ends, strict=True):
            records = [run.records[n] for n in (*numbers, end)]
            operations = dict.fromkeys(f"{each.primitive} in {each.dtype}" for each in records)
            texts[run.name] = ", ".join(operations)
        kind, fix = self._fix(candidate, changes)
        return ParityCause(
            module=own.modules[index],
            operation=own.records[index].primitive,
            kind=kind,
            train=texts["training"],
            serve=texts["serving"],
            file=file,
            line=line,
            text=linecache.getline(file, line).strip() if file else "",
            before=self.before,
            after=after,
            others=others,
            fix=fix,
        )

    def _fix(self, candidate: _Candidate, changes: Changes) -> tuple[str, str]:
        """Returns the kind of a cause, and the change as text."""
        where = self.runs[candidate.side].where(candidate.number)
        reason = "" if any(candidate.only) else self._arguments(candidate)
        if any(change.value is not None for change in changes.values()):
            if reason:
                return "arguments", f"Pass the same values to {where} in both programs: {reason}."
            return "operations", f"Use the same operations and values in both programs: {where}."
        rows: dict[tuple[str, str], dict[str, None]] = {}
        dtype, (train, serve) = _core.FLOAT32, self.runs
        for n, change in sorted(changes.items()):
            record = serve.records[n]
            name, text = record.primitive, f" in {change.dtype} instead of {record.dtype}"
            if _is_cast(record):
                name, text = "no cast", f" to {record.dtype}"
            else:
                dtype = change.dtype
            rows.setdefault((serve.where(n), text), {})[name] = None
        lines = [f"    {where}: {', '.join(names)}{text}" for (where, text), names in rows.items()]
        more = [f"    and {len(lines) - _LINES} more lines"] if len(lines) > _LINES else []
        sentence = (
            f"Compute these lines of the {serve.name} program in the dtypes of {train.name}. "
            f"Cast the operands, as in x.astype(jnp.{dtype}), or set "
            "the dtype of the module:"
        )
        return "dtype", "\n".join([sentence, *lines[:_LINES], *more])

    def _arguments(self, candidate: _Candidate) -> str:
        """Returns a text on the first argument or constant that differs; "" if there is none."""
        train = self.runs[0].records[candidate.pair.train]
        serve = self._local[candidate.pair.serve[0]]
        for n, (x, y) in enumerate(zip(train.operands, serve.operands, strict=False)):
            is_same = jnp.shape(x) != jnp.shape(y) or bool(jnp.array_equal(x, y))
            if is_same or not self._is_input(serve.makers[n]):
                continue
            for name in _FORMATS if jnp.issubdtype(x.dtype, jnp.floating) else ():
                for run, a, b in zip(self.runs, (y, x), (x, y), strict=True):
                    if jnp.array_equal(_programs.rounded_to(a, name), b):
                        return f"operand {n} is rounded to {name} in {run.name}"
            return f"operand {n} has other values"
        return ""

    def _is_input(self, index: int) -> bool:
        """Returns True for an argument or a constant, also if it is reshaped."""
        if index == _walk.INPUT:
            return True
        is_move = index not in self._partner and self._local[index].primitive in _walk.MOVES
        return is_move and all(map(self._is_input, self._local[index].makers))


def _changes_shape(record: _walk.ResultRecord) -> bool:
    """Returns True if operands and result do not all have the same shape."""
    return len({*map(np.shape, (*record.operands, record.value))}) > 1


def _rank(record: _walk.ResultRecord) -> int:
    """Returns the preference to report an operation: first one that computes, then a cast."""
    return 1 if _is_cast(record) else 2 * (record.primitive not in _programs.MOVES)


def _is_cast(record: _walk.ResultRecord) -> bool:
    """Returns True for a conversion to 16 bits or FP8."""
    return record.primitive == "convert_element_type" and _programs.is_narrow_dtype(record.dtype)


def _sign(record: _walk.ResultRecord) -> tuple[str, str]:
    return record.primitive, str(record.dtype)


def _flat(outputs: Sequence[_core.Array]) -> np.ndarray:
    floats = [x for x in outputs if jnp.issubdtype(x.dtype, jnp.floating)]
    return np.concatenate([np.zeros(0), *(np.asarray(x, np.float64).ravel() for x in floats)])
