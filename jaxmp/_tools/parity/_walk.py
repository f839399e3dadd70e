"""Runs a traced program operation by operation, and records each result.

Arrays of 16 bits and in FP8 are FP32 arrays, and the result of an operation that computes in such a
format is rounded to it, as in `validate`. So no compiler removes a rounding, and an operation can
be repeated in the dtype of another program. Loops and branches are run in Python. Operations that
no interpreter enters, such as kernels, run in their recorded dtypes, and have one record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmp._core._compat import _exported
from jaxmp._core._typing import Array
from jaxmp._programs import _bind, _constructs, _locations
from jaxmp._programs._constructs import Form
from jaxmp._programs._interpreter import Frame, Interpreter
from jaxmp._programs._jaxprs import Path
from jaxmp._tools.stats import _measure

# Index of the maker of an argument or a constant.
INPUT = -1


class Record(NamedTuple):
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

    scopes: Path
    primitive: str
    dtype: np.dtype
    line: tuple[str, int]
    makers: tuple[int, ...]
    operands: tuple[Any, ...]
    value: Any


class Change(NamedTuple):
    """Change of one result.

    Args:
      dtype: the format to which it is rounded; None for that of the program.
      value: function of the result; None to leave it.
    """

    dtype: np.dtype | None = None
    value: Callable[[Array], Array] | None = None


@dataclasses.dataclass(frozen=True)
class _Value:
    """Array with the index of its record."""

    array: Any
    maker: int = INPUT


class Walk(Interpreter):
    """Interpreter that runs a program with concrete arrays.

    Args:
      changes: index of a record -> the change of its result.

    `records` are the results in the order of execution.
    """

    consequence = "the operations inside of it are not compared"
    drops_derivatives = True

    def __init__(self, changes: Mapping[int, Change] = MappingProxyType({})) -> None:
        super().__init__()
        self.records: list[Record] = []
        self._changes = changes
        self._lines = _locations.Lines()
        self._enclosing: tuple[Any, ...] = ()

    def results(self, closed: ClosedJaxpr, arrays: Sequence[Any]) -> list[Array]:
        """Runs a program, and returns its results."""
        values = [_Value(_bind.wide(jnp.asarray(x))) for x in arrays]
        return [value.array for value in self.run(closed, values)]

    def constant(self, array: Any) -> _Value:
        return _Value(_bind.wide(jnp.asarray(array)))

    def literal(self, var: Any) -> _Value:
        return self.constant(jnp.asarray(var.val, var.aval.dtype))

    def array(self, value: Any) -> Any:
        return value.array if isinstance(value, _Value) else value

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        outer, self._enclosing = self._enclosing, (equation, *self._enclosing)
        try:
            rule = _RULES.get(_constructs.form_of(equation))
            inside = None if rule is None else rule(self, equation, operands, frame)
            return self._computed(equation, operands, frame) if inside is None else inside
        finally:
            self._enclosing = outer

    def _computed(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        """Runs an operation, rounds its results and records them."""
        self.check_known(equation)
        if equation.primitive.name == "call_exported":
            return self._exported(equation, operands, frame)
        arrays = list(map(self.array, operands))
        scopes, line = frame.place.of(equation).scopes, self._lines.of(self._enclosing)
        makers = tuple(value.maker for value in operands)
        values = []
        for var, x in zip(equation.outvars, _bind.bind_in_fp32(equation, arrays), strict=True):
            dtype = getattr(var.aval, "dtype", np.dtype(bool))
            name = equation.primitive.name
            values.append(
                self._recorded(x, Record(scopes, name, dtype, line, makers, (*arrays,), x))
            )
        return values

    def _recorded(self, x: Any, record: Record) -> _Value:
        change = self._changes.get(len(self.records), Change())
        dtype = change.dtype or record.dtype
        x = x if record.primitive in _bind.MOVES else as_stored(x, dtype)
        self.records.append(record._replace(value=x))
        x = x if change.value is None else change.value(x)
        return _Value(x, len(self.records) - 1)

    def _exported(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        """Runs an exported program, whose operations are in StableHLO, with all its results."""
        exported = equation.params["exported"]
        first, scopes = len(self.records), frame.place.of(equation).scopes
        arrays = [
            jnp.asarray(x.array, aval.dtype)
            for x, aval in zip(operands, exported.in_avals, strict=True)
        ]
        rows, results = _exported.values_of(exported, arrays)
        outer = [operands[n].maker for n in exported.module_kept_var_idx]
        index = lambda n: first + n if n >= 0 else INPUT
        for n, row in enumerate(rows):
            made = (outer[n],) if n < len(outer) else tuple(map(index, row.makers))
            known = tuple(_bind.wide(rows[n].value) for n in row.makers if n >= 0)
            parts = (*scopes, *row.scopes), row.name, row.value.dtype
            line = self._lines.first_own(row.frames)
            self.records.append(Record(*parts, line, made, known, _bind.wide(row.value)))
        return [_Value(_bind.wide(x), index(n)) for x, n in results]

    # -- constructs ---------------------------------------------------------------------------

    def _inline(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        return self._call(equation, operands, frame.place.of(equation), None)

    def _branch(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any] | None:
        cond = _constructs.cond_of(equation)
        if cond.by_platform:
            return None
        index = min(max(int(operands[0].array), 0), len(cond.branches) - 1)
        return self.run(cond.branches[index], operands[1:], frame.place.of(equation))

    def _scanned(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        loop, place = _constructs.scan_of(equation), frame.place.of(equation)
        consts, carry, rows = loop.split(operands)
        length = loop.options["length"]
        stacked: list[list[_Value]] = []
        order = range(length)
        for n in reversed(order) if loop.options["reverse"] else order:
            row = [_Value(x.array[n], x.maker) for x in rows]
            results = self.run(loop.jaxpr, [*consts, *carry, *row], place)
            carry = results[: loop.carry]
            stacked.append(results[loop.carry :])
        if loop.options["reverse"]:
            stacked.reverse()
        if not length:
            avals = [var.aval for var in equation.outvars[loop.carry :]]
            return [*carry, *(_Value(_bind.wide(jnp.zeros(x.shape, x.dtype))) for x in avals)]
        columns = list(zip(*stacked, strict=True))
        return [*carry, *(_Value(jnp.stack([x.array for x in c]), c[-1].maker) for c in columns)]

    def _repeated(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        loop, place = _constructs.while_of(equation), frame.place.of(equation)
        of_test, of_body, carry = loop.split(operands)
        while bool(self.run(loop.test, [*of_test, *carry], place)[0].array):
            carry = self.run(loop.body, [*of_body, *carry], place)
        return carry


_RULES: dict[Form | None, Callable[..., list[Any] | None]] = {
    **dict.fromkeys((Form.CALL, Form.REMAT, Form.DERIVATIVE), Walk._inline),
    Form.BRANCH: Walk._branch,
    Form.SCAN: Walk._scanned,
    Form.WHILE: Walk._repeated,
}


def as_stored(x: Array, dtype: np.dtype) -> Array:
    """Returns an FP32 array rounded to the dtype in which a program stores it."""
    return _measure.rounded_to(x, dtype) if _bind.is_narrow_dtype(dtype) else x


def walk(
    closed: ClosedJaxpr,
    arrays: Sequence[Any],
    changes: Mapping[int, Change] = MappingProxyType({}),
) -> tuple[list[Record], list[Array]]:
    """Runs a program, and returns the records of its operations and its results.

    Example:
      >>> closed = jax.make_jaxpr(lambda x: jnp.exp(x) + 1)(jnp.zeros(2, jnp.bfloat16))
      >>> records, (result,) = walk(closed, [jnp.ones(2, jnp.bfloat16)])
      >>> [(record.primitive, record.dtype.name) for record in records], result.dtype.name
      ([('exp', 'bfloat16'), ('add', 'bfloat16')], 'float32')
    """
    run = Walk(changes)
    results = run.results(closed, arrays)
    return run.records, results
