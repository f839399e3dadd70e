"""Locates the first value of a training step that is not finite, and reports it."""

from __future__ import annotations

import dataclasses
import functools
import linecache
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax

from jaxmp import _core, _programs
from jaxmp._tools.audit import _trace
from jaxmp._tools.fixes import _source, _trial
from jaxmp._tools.nonfinite import _causes, _measure, _record
from jaxmp._tools.nonfinite._measure import ArgumentRow, ArrayRow
from jaxmp._tools.nonfinite._walk import Argument, Operation, Origin, Variable, Walk
from jaxmp._tools.report._section import Fix, Located, Section, fix_parts, share_text
from jaxmp._tools.report._views import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonfiniteReport(Report, Located):
    """Origin of values of a training step that are not finite. Frozen; contains plain data.

    Args:
      reproduced: True if the step has results that are not finite for these arguments, or if
        all its gradients are zero and a value in the loss is not finite.
      reason: why the step was not reproduced; "" if it was.
      cause: id of the cause, such as "division_by_zero"; `docs/debugging.md` lists them. "" if no
        measurement shows a cause.
      message: the measurement that shows the cause, in one or two sentences.
      fix: the remedy: a sentence, and its code in lines that are indented by four spaces.
      expression: the expression of the source line that this code replaces; "" for other code.
      trial: "works" if the step was run with this code and is finite there, "not tried" if that was
        not possible; "" without code.
      module: the module path; "" for the root and for code outside of modules.
      primitive: the operation, as a jaxpr prints it; "" for an argument.
      phase: "forward", "backward" or "recompute" (a forward operation that the backward pass runs
        again); "" for an argument.
      file: path of the user's source file; "" if it is not known.
      line: line number in `file`; 0 if it is not known.
      text: text of this line, without indentation.
      iteration: iteration of each enclosing loop, outermost first; () outside of loops.
      device: number of the device in the mesh of a `shard_map`; None outside of one.
      index: index of the first element that is not finite, of the result or the argument.
      argument: the argument that was not finite before the step, as code; "" if an operation
        made the values.
      loss_scale: the loss scale with which the step was reproduced; None without one.
      operands: the operands of the operation.
      results: its results.
      in_fp32: its results, computed from the same operands in FP32; empty for kernels.
      arguments: all arguments that are not finite.

    Example:
      >>> report = locate_nonfinite(jax.grad(lambda x: jnp.sqrt(x).sum()), jnp.array([4.0, 0.0]))
      >>> report.cause, report.phase
      ('root_of_zero', 'backward')
    """

    _subject = "diagnosis"
    _title = "First value that is not finite"
    _command = "jaxmp locate run.py:make_step --json diagnosis.json"
    _schema: ClassVar = {"schema": "jaxmp.nonfinite", "schema_version": 1}

    reproduced: bool
    reason: str = ""
    cause: str = ""
    message: str = ""
    fix: str = ""
    expression: str = ""
    trial: str = ""
    module: str = ""
    primitive: str = ""
    phase: str = ""
    file: str = ""
    line: int = 0
    text: str = ""
    iteration: tuple[int, ...] = ()
    device: int | None = None
    index: tuple[int, ...] = ()
    argument: str = ""
    loss_scale: float | None = None
    operands: tuple[ArrayRow, ...] = ()
    results: tuple[ArrayRow, ...] = ()
    in_fp32: tuple[ArrayRow, ...] = ()
    arguments: tuple[ArgumentRow, ...] = ()

    def _sections(self, full: bool) -> list[Section]:
        others = tuple((row.name, row.role, str(list(row.index))) for row in self.arguments)
        columns = "argument that is not finite", "role", "first index"
        if not self.reproduced:
            return [Section("Not reproduced", self.reason, columns, others)]
        title = "Fix" + f" ({_trial.NOT_TRIED})" * (self.trial == _trial.NOT_TRIED)
        fixes = (Fix(title, fix_parts(self.fix)),) if self.fix else ()
        cause = self.cause.replace("_", " ") or "cause not known"
        sections = [
            Section(f"Not finite: {self.argument or self._where()}", self.text, mood="bad"),
            Section(cause.capitalize(), self.message, fixes=fixes),
        ]
        if self.operands:
            sections.insert(1, Section("Operands", "", _COLUMNS, self._array_rows()))
        if full and others:
            sections.append(Section("Arguments", "", columns, others))
        return sections

    def _where(self) -> str:
        made = f"{self.primitive} in the {self.phase} pass"
        parts = [
            made if self.primitive else "not a recorded operation",
            f"module {self.module}" if self.module else "",
            self.location,
            *(f"iteration {n}" for n in self.iteration),
            "" if self.device is None else f"device {self.device}",
            f"index {list(self.index)}" if self.index else "",
            "" if self.loss_scale is None else f"loss scale {self.loss_scale:.9g}",
        ]
        return ", ".join(filter(None, parts))

    def _array_rows(self) -> tuple[tuple[str, ...], ...]:
        named = [(str(n), row) for n, row in enumerate(self.operands)]
        named += [("result", row) for row in self.results]
        named += [("in FP32", row) for row in self.in_fp32]
        return tuple((name, *_cells(row)) for name, row in named)


_COLUMNS = ("", "type", "finite range", "zero", "subnormal", "large", "nan/inf")


def _cells(row: ArrayRow) -> tuple[str, ...]:
    kind = f"{row.dtype}[{','.join(map(str, row.shape))}]"
    limits = "" if math.isnan(row.low) else f"{row.low:.4g} to {row.high:.4g}"
    shares = row.zero, row.subnormal, row.near_largest, row.nonfinite
    return kind, limits, *map(share_text, shares)


# ---------------------------------------------------------------------------
# Search
# ---------------------------------------------------------------------------


def locate_nonfinite(
    step: Callable[..., Any], *args: Any, try_fixes: bool = True, **kwargs: Any
) -> NonfiniteReport:
    """Runs a training step again, and reports the first value that is not finite, and its cause.

    The step is traced as it is: jitted, with Linen or NNX, in a `shard_map` or on sharded arrays,
    with microbatches. Its operations then run one by one, so that equal ones are compiled once, and
    it is recorded which of their results are not finite, in each iteration of a loop and on each
    device of a `shard_map`. From the results of the step, and from the gradients whose finiteness
    it checks, these values are followed back to the operation that made the first of them. Values
    that a `where` discards do not count, unless their gradient is not finite. Another run measures
    the operands of that operation. Operations that are not fused need more memory than the compiled
    step: if it is not enough, pass a part of the batch that fails.

    A step whose gradients are all zero has finite results, and is never skipped. Then the report is
    on the first value inside of the loss that is not finite, if there is one.

    Call it with the arguments of the failed step. After a skipped step, the state that the step
    returned has the same parameters and moments; a dynamic loss scale that was lowered since is
    raised again, if the step is finite with the lower one.

    Args:
      step: a function of pytrees of arrays that computes gradients. It may be jitted; it is not
        called, and its donated arguments are not deleted.
      *args: its arguments. None of them may have been donated.
      try_fixes: True to run the step again with the code of the fix. Code with which it is not
        finite at that place is not printed.
      **kwargs: its keyword arguments.

    Returns:
      The report. `reproduced` is False, with a `reason`, if the step is finite.

    Raises:
      AuditError: if `step` is not a function; if it, or a function that it calls, was jitted with
        `compiler_options`; if an argument was donated, or is a `jax.ShapeDtypeStruct`.

    Example:
      >>> def loss_fn(w, x):
      ...     return jnp.log(w * x).sum()
      >>> report = locate_nonfinite(jax.grad(loss_fn), jnp.ones(2), jnp.array([1.0, 0.0]))
      >>> report.cause, report.index
      ('log_of_zero', (1,))
    """
    _trace.check_function(step, "locate_nonfinite")
    with _core.in_mesh_of(jax.tree.leaves((args, kwargs))):
        return _located(step, args, kwargs, try_fixes)


def _located(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], try_fixes: bool
) -> NonfiniteReport:
    traced = _trace.trace(step, args, kwargs)
    _measure.check_usable(traced)
    search = _Search(traced)
    report, cause = search.report(), search.cause
    places = set(search.places()) if try_fixes else set()

    def problems(_: bool) -> _trial.Problems:
        # Other values that are not finite come after those of the fix.
        after = places.intersection(_Search(_trace.trace(step, args, kwargs)).places())
        return dict.fromkeys(after, ("", None))

    while True:
        own = () if cause is None else cause.edits
        fix, edits = _trial.unified(report.fix, report.file, report.line, own)
        report = dataclasses.replace(report, fix=_source.with_names_of(report.file, fix))
        if not places or edits is None:
            # The search has run the step with the loss scale.
            state = _trial.WORKS if report.cause == "loss_scale" else _trial.NOT_TRIED
            is_code = bool(_source.codes_of(fix))
            return dataclasses.replace(report, trial=state * (try_fixes and is_code))
        (trial,) = _trial.try_edits([edits], problems, places, [places])
        if trial.state != _trial.FAILS:
            return dataclasses.replace(report, trial=trial.state)
        cause = None if cause is None else cause.otherwise
        if cause is None:
            # The sentence without its code.
            return dataclasses.replace(report, fix=fix.partition(":\n")[0] + ".", expression="")
        report = dataclasses.replace(report, fix=cause.fix, expression=cause.expression)


class _Search:
    """Search in one traced step."""

    def __init__(self, traced: _trace.Traced) -> None:
        self.traced, self.scale = traced, _measure.scale_of(traced)
        self.recorder = _record.Recorder()
        # The cause of the report, if an operation has it.
        self.cause: _causes.NonfiniteCause | None = None

    def report(self) -> NonfiniteReport:
        arrays, scale = self.traced.arrays, self.scale
        bad = _measure.bad_arguments(self.traced)
        walk, roots = self._first
        if not roots and scale is not None and scale.of_skipped is not None:
            scale = dataclasses.replace(scale, value=scale.of_skipped)
            arrays = _measure.with_scale(arrays, scale.number, scale.value)
            walk, roots = self._walk(arrays)
        value = None if scale is None else scale.value
        fields: dict[str, Any] = {"loss_scale": value, "arguments": tuple(bad.values())}
        origin = walk.origin(roots, _unused_results(walk))
        if not roots:
            is_zero = walk.are_gradients_zero()
            # The values inside of differentiated functions.
            in_loss = lambda op: op.equation.outvars if op.location.differentiated else []
            origin = walk.origin(walk.broken(in_loss), []) if is_zero else None
            reason = _reason(self.scale) + (_ZERO if is_zero else "")
            if origin is None or isinstance(origin.source, Argument):
                return NonfiniteReport(reproduced=False, reason=reason, **fields)
        if origin is None:
            message = (
                "No recorded operation made the values: they come from a constant, or from a while "
                "loop after its first 255 iterations."
            )
            return NonfiniteReport(reproduced=True, message=message, **fields)
        if isinstance(origin.source, Argument):
            row = bad[origin.source.number]
            is_first = _measure.is_first_step(self.traced)
            cause = _causes.cause_of_argument(row, is_first=is_first)
            fields |= {"argument": row.name, "index": row.index}
        else:
            source, shown = origin.source, origin.operation
            made, measured = _measure.measure(self.traced.closed, arrays, [source, shown])
            has_optimizer = any(self.traced.in_optimizer())
            evidence = _causes.NonfiniteEvidence(
                walk=walk,
                origin=origin,
                source=made,
                shown=measured,
                in_fp32=functools.cache(lambda: self._in_fp32(arrays)),
                scale=scale,
                passing_scale=lambda: self._passing_scale(arrays, scale) if roots else None,
                has_optimizer=has_optimizer,
            )
            cause = _causes.cause_of(evidence)
            self.cause = cause
            fields |= _location(walk, cause.operation or shown, shown) | vars(measured)
            fields["index"] = next((row.index for row in measured.results if row.nonfinite), ())
        return NonfiniteReport(
            reproduced=True,
            cause=cause.id,
            message=cause.message if roots else f"{_HIDDEN} {cause.message}",
            fix=cause.fix,
            expression=cause.expression,
            **fields,
        )

    def places(self) -> Iterator[tuple[str, int]]:
        """Yields the line of the first operation whose result is not finite, if there is one."""
        walk, roots = self._first
        origin = walk.origin(roots, _unused_results(walk))
        if origin is not None and isinstance(origin.source, Operation):
            yield origin.operation.op.line

    @functools.cached_property
    def _first(self) -> tuple[Walk, list[Variable]]:
        """The walk over the step with its arguments, and the values that are not finite."""
        return self._walk(self.traced.arrays)

    def _walk(self, arrays: list[Any]) -> tuple[Walk, list[Variable]]:
        walk = Walk(self.recorder, self.recorder.record(self.traced.closed, arrays))
        return walk, _roots(walk)

    def _in_fp32(self, arrays: list[Any]) -> tuple[Walk, Origin | None]:
        """Returns the walk over the step in FP32, and its first origin."""
        recorder = self.recorder
        rows = ((*e.invars, *e.outvars) for e in _programs.equations(self.traced.closed))
        if any(_programs.is_narrow(var.aval) for row in rows for var in row):
            recorder = _record.WideRecorder()
        walk = Walk(recorder, recorder.record(self.traced.closed, arrays))
        return walk, walk.origin(_roots(walk), _unused_results(walk))

    def _passing_scale(
        self, arrays: list[Any], scale: _measure.ScaleArgument | None
    ) -> float | None:
        """Returns the largest power of two below a loss scale with which the step is finite."""
        if scale is None:
            return None
        passes = lambda n: not self._walk(_measure.with_scale(arrays, scale.number, 2.0**n))[1]
        low, high = (math.ceil(math.log2(n)) for n in (scale.minimum, scale.value))
        if low >= high or not passes(low):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if passes(middle) else (low, middle)
        return 2.0**low


def _location(walk: Walk, lined: Operation, shown: Operation) -> dict[str, Any]:
    """Returns the fields of a report on the location of an operation, and on another one's line."""
    file, line = lined.op.line
    repeats = [(region.is_on_devices, n) for region, n in shown.repeats()]
    return {
        "module": walk.module(shown),
        "primitive": shown.op.name,
        "phase": shown.op.location.phase,
        "file": file,
        "line": line,
        "text": linecache.getline(file, line).strip() if file else "",
        "iteration": tuple(n for is_device, n in repeats if not is_device),
        "device": next((n for is_device, n in repeats if is_device), None),
    }


# The gradients of a step are zero: without a value that is not finite, and with one.
_ZERO = (
    " All its gradients are zero: the loss does not depend on the parameters, or they are too small"
    " for their format (jaxmp.with_stats shows their magnitudes)."
)
_HIDDEN = (
    "The results are finite, and all gradients are zero, so that no step is skipped and nothing is "
    "trained; this value in the loss is not finite."
)


def _reason(scale: _measure.ScaleArgument | None) -> str:
    tried = "" if scale is None else f" with loss scale {scale.value:.9g}"
    if scale is not None and scale.of_skipped is not None:
        tried += f" and with {scale.of_skipped:.9g}, that of the skipped step"
    return (
        f"The step is finite for these arguments{tried}. The values may come from another batch or "
        "state, random numbers that are not among the arguments, a callback, or roundings that the "
        "compiler left out."
    )


def _roots(walk: Walk) -> list[Variable]:
    """Returns the results that are not finite, and gradients whose finiteness the step checks."""
    root = walk.regions[()]
    has_gradient = any(op.location.differentiated for _, op in walk.operations())
    results = [
        Variable(root, (), var) for var in root.body.outvars if not _programs.is_literal(var)
    ]
    is_check = lambda op: op.name == "is_finite" and not op.location.differentiated
    checked = lambda op: op.operands[:1] if has_gradient and is_check(op) else []
    return [*filter(walk.code, results), *walk.broken(checked)]


def _unused_results(walk: Walk) -> list[Variable]:
    """Returns values of the forward pass that are not finite and that no operation reads.

    A loss that a step does not return is such a value.
    """
    is_inside = lambda op: op.is_forward and op.location.differentiated
    unread = lambda op: [v for v in op.equation.outvars if v not in op.body.consumers]
    return walk.broken(lambda op: unread(op) if is_inside(op) else [])
