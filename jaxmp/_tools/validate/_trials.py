"""Repeats a compared step in FP32, and with the roundings of one source line at a time.

The errors of these repetitions are measured effects: a line whose roundings alone cause an error
of the gradient explains it, and an error that remains in FP32 is not caused by roundings.

Each array of 16 bits or in FP8 becomes an FP32 array, and the result of each operation that the
step computes in such a format is rounded to its values. The program receives the mode of each
source line, so that one compiled program measures the effect of every line. Kernels, callbacks and
other operations that the interpreter does not enter run in the dtypes of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp import _core, _programs
from jaxmp._core import Array, PyTree, _compat
from jaxmp._tools.audit._check_ops import REDUCTIONS
from jaxmp._tools.report import _section
from jaxmp._tools.validate._probe import Probe, gradient_row, make_probe, module_rows
from jaxmp._tools.validate._pure import PureRun, StepResult
from jaxmp._tools.validate._rows import GradientRow, ModuleRow

# Modes of a line: its results are FP32, are rounded to their format, or are rounded to its
# precision with the range of FP32.
EXACT, ROUNDED, WIDE_RANGE = 0, 1, 2
# Lines with modes of their own; those beyond share the last mode.
MAX_LINES = 1024


class LineOrigin(NamedTuple):
    """Source line of 16-bit operations; conversions of the batch and of integers are separate.

    Args:
      location: file and line, such as "model.py:12"; "" if it is not known.
      names: name scopes of its first operation.
      dtype: name of the 16-bit format.
      source: what it converts to 16 bits: "'x' of the batch", "the integer 'x' of the batch" or
        "integers"; "" otherwise.
    """

    location: str
    names: tuple[str, ...]
    dtype: str
    source: str


class _Inside(NamedTuple):
    """State of the run of one jaxpr.

    Args:
      location: location of the equation that contains it.
      enclosing: the enclosing equations, the innermost first.
      labels: for each argument, the name of the leaf of the batch that it is; "" otherwise.
      named: variables that are leaves of the batch, and their names.
    """

    location: _programs.Location = _programs.Location()
    enclosing: tuple[Any, ...] = ()
    labels: tuple[str, ...] = ()
    named: dict[Any, str] = MappingProxyType({})  # type: ignore[assignment]


class RoundedLines(_programs.Interpreter):
    """Step of a run with emulated 16-bit operations.

    Args:
      run: the run.

    `origins` are the lines in the order of the program, known after the step was traced.
    """

    consequence = "the roundings inside of it are not emulated"
    # The step contains its backward pass.
    drops_derivatives = True

    def __init__(self, run: PureRun) -> None:
        super().__init__()
        self.origins: list[LineOrigin] = []
        self._run = run
        self._numbers: dict[tuple[str, str, str], int] = {}
        self._lines, self._locations = _programs.Lines(), _programs.Locations()
        self._modes: Array = jnp.zeros(MAX_LINES, jnp.int32)
        self._closed, self._shape = _programs.record(run.step, run.arrays, run.first)

    @property
    def pure_run(self) -> PureRun:
        """The run whose batches are `(modes, batch)`."""
        return self._run._replace(step=self._step)

    def module(self, origin: LineOrigin) -> str:
        """Returns the path of the module of a line."""
        return _programs.module_of(origin.names, _programs.root_of(self._locations.names))

    def _step(self, arrays: PyTree, batch: PyTree) -> tuple[PyTree, StepResult]:
        self._modes, batch = batch
        paths = ["/".join(path) for path, _ in _core.leaves_with_path(batch)]
        inputs = [f"{path!r} of the batch" if path else "the batch" for path in paths]
        labels = [*[""] * len(jax.tree.leaves(arrays)), *inputs]
        args = list(map(_programs.wide, jax.tree.leaves((arrays, batch))))
        outs = self.run(self._closed, args, _programs.Start(state=_Inside(labels=tuple(labels))))
        new, result = jax.tree.unflatten(jax.tree.structure(self._shape), outs)
        new = jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), new, self._shape[0])
        return new, result

    # -- equations --------------------------------------------------------------------------

    def constant(self, array: Any) -> Any:
        return _programs.wide(array)

    def run(
        self, jaxpr: Any, args: Sequence[Any], start: _programs.Start = _programs.PROGRAM
    ) -> list[Any]:
        """Runs one jaxpr; see `Interpreter.run`."""
        state: _Inside = start.state or _Inside()
        pairs = zip(_compat.jaxpr_body(jaxpr)[0].invars, state.labels, strict=False)
        named = {var: label for var, label in pairs if label}
        return super().run(jaxpr, args, start._replace(state=state._replace(named=named)))

    def equation(
        self, equation: JaxprEqn, operands: list[Any], frame: _programs.Frame
    ) -> list[Any]:
        state: _Inside = frame.state
        name = equation.primitive.name
        labels = [
            "" if _programs.is_literal(v) else state.named.get(v, "") for v in equation.invars
        ]
        location = self._locations.of(equation, state.location)
        inside = _Inside(location, (equation, *state.enclosing), tuple(labels))
        if name in _programs.MOVES and any(labels):
            state.named.update(dict.fromkeys(equation.outvars, max(labels)))
        if not _programs.runs_in_fp32(equation):  # a construct, a kernel or a callback
            # The first operand of a branch is its index.
            is_branch = _programs.form_of(equation) is _programs.Form.BRANCH
            inside = inside._replace(labels=tuple(labels[is_branch:]))
            return self.enter(equation, operands, frame, inside)
        return self._rounded(equation, operands, inside, labels)

    def bound(self, equation: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Runs an equation in the dtypes of the step."""
        return _programs.bind_in_fp32(equation, operands)

    # -- roundings --------------------------------------------------------------------------

    def _rounded(
        self,
        equation: Any,
        operands: list[Any],
        inside: _Inside,
        labels: Sequence[str],
    ) -> list[Any]:
        """Rounds the results of an operation that computes, and registers its line.

        A sum that rounds after each term is also run in its own dtype.
        """
        name, outs = equation.primitive.name, _programs.bind_in_fp32(equation, operands)
        dtypes = [
            var.aval.dtype if _programs.is_narrow(var.aval) else None for var in equation.outvars
        ]
        if name in _programs.MOVES or not any(dtypes):
            return outs
        source = ""
        if name == "convert_element_type":
            is_integer = jnp.issubdtype(equation.invars[0].aval.dtype, jnp.integer)
            integers = f"the integer {labels[0]}" if labels[0] else "integers"
            source = integers if is_integer else labels[0]
        elif name == "iota":
            source = "integers"
        number = self._number(inside, str(next(filter(None, dtypes))), source)
        mode = self._modes[min(number, MAX_LINES - 1)]
        rounded = [
            x if dtype is None else _as_format(x, dtype, mode)
            for x, dtype in zip(outs, dtypes, strict=True)
        ]
        if name not in REDUCTIONS:
            return rounded
        own = _programs.bind_as_recorded(equation, operands)
        return [jnp.where(mode == ROUNDED, *pair) for pair in zip(own, rounded, strict=True)]

    def _number(self, inside: _Inside, dtype: str, source: str) -> int:
        """Returns the number of the line of an operation, and registers a new one."""
        location = _section.location_text(*self._lines.of(inside.enclosing))
        # Modules that share a line, such as those of a loop, are separate in FP8.
        is_line = location and not _core.is_fp8(dtype)
        key = location, "" if is_line else "/".join(inside.location.names), source
        if key not in self._numbers:
            self._numbers[key] = len(self.origins)
            self.origins.append(LineOrigin(location, inside.location.names, dtype, source))
        return self._numbers[key]


def _as_format(x: Array, dtype: np.dtype, mode: Array) -> Array:
    """Returns FP32 values rounded to a format, as far as the mode demands."""
    wide = jnp.where(mode == WIDE_RANGE, lax.reduce_precision(x, 8, jnp.finfo(dtype).nmant), x)
    return jnp.where(mode == ROUNDED, _programs.rounded_to(x, dtype), wide)


# ---------------------------------------------------------------------------
# Trials
# ---------------------------------------------------------------------------


# Errors that 16-bit recipes have without a fault, by the field of a `GradientRow`.
FLOORS = {"error": 0.03, "loss_error": 0.005, "update_error": 0.05}
# Part of an error that has to vanish, or to remain, for a line to be its cause.
SHARE = 0.5


class LineTrial(NamedTuple):
    """Errors of a step in which only one source line rounds."""

    origin: LineOrigin
    module: str
    row: GradientRow


class Trial(NamedTuple):
    """Errors of a step, compared with the reference on its parameters and batch.

    Args:
      rounded: with all roundings.
      exact: without roundings.
      wide_range: with roundings to the precision of each format, in the range of FP32.
      modules: outputs and gradients of the modules without roundings.
      lines: each line alone; empty if roundings do not explain an error.
      uses_float16: True if operations are computed in float16.
    """

    rounded: GradientRow
    exact: GradientRow
    wide_range: GradientRow
    modules: Sequence[ModuleRow]
    lines: Sequence[LineTrial]
    uses_float16: bool

    def explained(self, field: str) -> float:
        """Returns an error that vanishes without roundings; 0 for one that remains or is small."""
        before, after = finite(self.rounded, field), finite(self.exact, field)
        # The repetition begins with the initial state of the optimizer.
        is_comparable = field != "update_error" or self.rounded.step == 0
        return before if after < SHARE * before and is_comparable else 0.0


def finite(row: GradientRow, field: str) -> float:
    """Returns an error that may be infinite; 0 if it is as small as those without a fault."""
    value = getattr(row, field)
    return math.inf if math.isnan(value) else value if value > FLOORS[field] else 0.0


def step_to_repeat(rows: Sequence[GradientRow]) -> int:
    """Returns the step whose error is repeated: the first with a large error of the gradient.

    A loss that is not finite comes first. Gradients that are not finite come last, since a loss
    scale that is too large at the beginning causes them.
    """
    largest = max((row.error for row in rows if math.isfinite(row.error)), default=0.0)

    def rank(row: GradientRow) -> tuple[bool, bool, bool, int]:
        is_large = row.error >= SHARE * min(largest, 1.0)
        is_known = math.isfinite(row.error)
        return math.isfinite(row.loss_error), not is_known, not is_large, row.step

    return min(rows, key=rank).step


def repeat_step(run: PureRun, arrays: PyTree, batch: PyTree, step: int, reference: Probe) -> Trial:
    """Repeats a step.

    Args:
      run: the candidate.
      arrays: its state, with the parameters of the reference at this step.
      batch: the batch of this step.
      step: number of updates before it.
      reference: measurements of the reference.
    """
    emulation = RoundedLines(run)
    probe = make_probe(emulation.pure_run)

    def measure(modes: np.ndarray) -> Probe:
        return probe(arrays, (modes, batch))

    same = lambda mode: np.full(MAX_LINES, mode, np.int32)
    exact = measure(same(EXACT))
    rounded_row, exact_row, wide_range = (
        gradient_row(step, reference, each)
        for each in (measure(same(ROUNDED)), exact, measure(same(WIDE_RANGE)))
    )
    modules = module_rows(step, reference, exact)
    is_float16 = any(origin.dtype == "float16" for origin in emulation.origins)
    trial = Trial(rounded_row, exact_row, wide_range, modules, (), is_float16)
    if not any(map(trial.explained, FLOORS)):
        return trial
    lines = []
    for number, origin in enumerate(emulation.origins[:MAX_LINES]):
        modes = same(EXACT)
        modes[number] = ROUNDED
        row = gradient_row(step, reference, measure(modes))
        lines.append(LineTrial(origin, emulation.module(origin), row))
    return trial._replace(lines=lines)
