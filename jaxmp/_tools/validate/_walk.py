"""Runs a traced program operation by operation, and records each result.

Arrays of 16 bits and in FP8 are FP32 arrays, and the result of an operation that computes in such a
format is rounded to it, as in `validate`. So no compiler removes a rounding, and an operation can
be repeated in the dtype of another program. Loops and branches are run in Python. Operations that
no interpreter enters, such as kernels, run in their recorded dtypes, and have one record.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmp._core import _typing
from jaxmp._core._compat import _exported
from jaxmp._programs import _bind, _constructs, _interpreter, _jaxprs, _locations, _operations

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

    scopes: _jaxprs.Path
    primitive: str
    dtype: np.dtype
    line: tuple[str, int]
    makers: tuple[int, ...]
    operands: tuple[Any, ...]
    value: Any

    @property
    def location(self) -> str:
        """The line, such as "model.py:12"."""
        file, line = self.line
        return f"{os.path.basename(file)}:{line}" if file else "a line that is not known"


class Change(NamedTuple):
    """Change of one result.

    Args:
      dtype: the format to which it is rounded; None for that of the program.
      value: function of the result; None to leave it.
    """

    dtype: np.dtype | None = None
    value: Callable[[_typing.Array], _typing.Array] | None = None


class _Value(NamedTuple):
    """Array with the index of its record."""

    array: Any
    maker: int = INPUT


class _Walk(_interpreter.Interpreter):
    """Interpreter that runs a program with concrete arrays.

    Args:
      changes: index of a record -> the change of its result.

    `records` are the results in the order of execution.
    """

    consequence = "the operations inside of it are not compared"
    drops_derivatives = True

    def __init__(self, changes: Mapping[int, Change] = MappingProxyType({})) -> None:
        super().__init__()
        self.records: list[ResultRecord] = []
        self._changes = changes
        self._lines = _locations.Lines()

    def constant(self, array: Any) -> _Value:
        return _Value(_bind.wide(jnp.asarray(array)))

    def literal(self, var: Any) -> _Value:
        return self.constant(jnp.asarray(var.val, var.aval.dtype))

    def equation(
        self, equation: JaxprEqn, operands: list[Any], frame: _interpreter.Frame
    ) -> list[Any]:
        form, name = _constructs.form_of(equation), equation.primitive.name
        # The state of a run are the enclosing equations.
        inside = frame.place.of(equation), (equation, *(frame.state or ()))
        if form in (_constructs.Form.CALL, _constructs.Form.REMAT, _constructs.Form.DERIVATIVE):
            return self.run(_constructs.call_of(equation).jaxpr, operands, *inside)
        if form is _constructs.Form.BRANCH and not _constructs.cond_of(equation).by_platform:
            branches = _constructs.cond_of(equation).branches
            index = min(max(int(operands[0].array), 0), len(branches) - 1)
            return self.run(branches[index], operands[1:], *inside)
        if form is _constructs.Form.SCAN:
            return self._scanned(equation, operands, *inside)
        if form is _constructs.Form.WHILE:
            loop = _constructs.while_of(equation)
            of_test, of_body, carry = loop.split(operands)
            while bool(self.run(loop.test, [*of_test, *carry], *inside)[0].array):
                carry = self.run(loop.body, [*of_body, *carry], *inside)
            return carry
        if name == "call_exported":
            return self._exported(equation, operands, inside[0].scopes)
        self.check_known(equation)
        arrays = tuple(value.array for value in operands)
        makers = tuple(value.maker for value in operands)
        line, values = self._lines.of(inside[1]), []
        for var, x in zip(equation.outvars, _bind.bind_in_fp32(equation, [*arrays]), strict=True):
            dtype = getattr(var.aval, "dtype", np.dtype(bool))
            change = self._changes.get(len(self.records), Change())
            x = x if name in _bind.MOVES else in_stored_dtype(x, change.dtype or dtype)
            self.records.append(
                ResultRecord(inside[0].scopes, name, dtype, line, makers, arrays, x)
            )
            x = x if change.value is None else change.value(x)
            values.append(_Value(x, len(self.records) - 1))
        return values

    def _scanned(
        self, equation: JaxprEqn, operands: list[Any], place: _interpreter.Place, state: Any
    ) -> list[Any]:
        loop = _constructs.scan_of(equation)
        consts, carry, rows = loop.split(operands)
        step = -1 if loop.options["reverse"] else 1
        stacked = []
        for n in range(loop.options["length"])[::step]:
            row = [_Value(x.array[n], x.maker) for x in rows]
            results = self.run(loop.jaxpr, [*consts, *carry, *row], place, state)
            carry = results[: loop.carry]
            stacked.append(results[loop.carry :])
        if not stacked:
            empty: list[Any] = [var.aval for var in equation.outvars[loop.carry :]]
            return [*carry, *(self.constant(jnp.zeros(x.shape, x.dtype)) for x in empty)]
        columns = zip(*stacked[::step], strict=True)
        return [*carry, *(_Value(jnp.stack([x.array for x in c]), c[-1].maker) for c in columns)]

    def _exported(self, equation: JaxprEqn, operands: list[Any], scopes: _jaxprs.Path) -> list[Any]:
        """Runs an exported program, whose operations are in StableHLO, with all its results."""
        exported, first = _operations.exported_of(equation), len(self.records)
        pairs = zip(operands, exported.in_avals, strict=True)
        arrays = [jnp.asarray(x.array, aval.dtype) for x, aval in pairs]
        rows, results = _exported.values_of(exported, arrays)
        outer = [operands[n].maker for n in exported.module_kept_var_idx]
        index = lambda n: first + n if n >= 0 else INPUT
        for n, row in enumerate(rows):
            made = (outer[n],) if n < len(outer) else tuple(map(index, row.makers))
            known = tuple(_bind.wide(rows[n].value) for n in row.makers if n >= 0)
            parts = (*scopes, *row.scopes), row.name, row.value.dtype
            line = self._lines.first_own(row.frames)
            self.records.append(ResultRecord(*parts, line, made, known, _bind.wide(row.value)))
        return [_Value(_bind.wide(x), index(n)) for x, n in results]


def in_stored_dtype(x: _typing.Array, dtype: np.dtype) -> _typing.Array:
    """Returns an FP32 array rounded to the dtype in which a program stores it."""
    return _bind.rounded_to(x, dtype) if _bind.is_narrow_dtype(dtype) else x


def walk(
    closed: ClosedJaxpr,
    arrays: Sequence[Any],
    changes: Mapping[int, Change] = MappingProxyType({}),
) -> tuple[list[ResultRecord], list[_typing.Array]]:
    """Runs a program, and returns the records of its operations and its results.

    Example:
      >>> closed = jax.make_jaxpr(lambda x: jnp.exp(x) + 1)(jnp.zeros(2, jnp.bfloat16))
      >>> records, (result,) = walk(closed, [jnp.ones(2, jnp.bfloat16)])
      >>> [(record.primitive, record.dtype.name) for record in records], result.dtype.name
      ([('exp', 'bfloat16'), ('add', 'bfloat16')], 'float32')
    """
    run = _Walk(changes)
    results = run.run(closed, list(map(run.constant, arrays)))
    return run.records, [value.array for value in results]
