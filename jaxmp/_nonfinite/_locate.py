"""Locates the first value of a training step that is not finite."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu

from jaxmp._audit._trace import Traced, trace
from jaxmp._core._jaxprs import FORWARD, is_literal
from jaxmp._core._locations import Lines, module_of, root_of
from jaxmp._nonfinite._arguments import (
    ArgumentRow,
    ScaleArgument,
    bad_arguments,
    scale_of,
    unusable,
    with_scale,
)
from jaxmp._nonfinite._causes import Cause, Evidence, cause_of, cause_of_argument
from jaxmp._nonfinite._measure import measure
from jaxmp._nonfinite._record import Codes, Recorded, WideCodes, record
from jaxmp._nonfinite._report import NonfiniteReport
from jaxmp._nonfinite._walk import Argument, Operation, Origin, Variable, Walk

# Exponents of the loss scales that are tried.
_SMALLEST_EXPONENT = -24


def locate_nonfinite(step: Callable[..., Any], *args: Any, **kwargs: Any) -> NonfiniteReport:
    """Runs a training step again, and reports the first value that is not finite, and its cause.

    The step is traced as it is: jitted, with Linen or NNX, in a `shard_map` or on sharded arrays,
    with microbatches. A second program, which has the operations of the step, records which of its
    values are not finite, in each iteration of its loops and on each device of a `shard_map`. From
    the results of the step, and from the gradients whose finiteness it checks, these values are
    followed back to the operation that made the first of them. Values that a `where` discards
    do not count, unless their gradient is not finite. A third program measures the operands of that
    operation.

    Call it with the arguments of the failed step. After a skipped step, the state that the step
    returned has the same parameters and moments; a dynamic loss scale that was lowered since is
    raised again, if the step is finite with the lower one.

    Args:
      step: a function of pytrees of arrays that computes gradients. It may be jitted; it is not
        called, and its donated arguments are not deleted.
      *args: its arguments. None of them may have been donated.
      **kwargs: its keyword arguments.

    Returns:
      The report. `reproduced` is False, with a `reason`, if the step is finite.

    Raises:
      AuditError: if `step`, or a function that it calls, was jitted with `compiler_options`.

    Example:
      >>> def loss_fn(w, x):
      ...     return jnp.log(w * x).sum()
      >>> report = locate_nonfinite(jax.grad(loss_fn), jnp.ones(2), jnp.array([1.0, 0.0]))
      >>> report.cause, report.index
      ('log_of_zero', (1,))
    """
    traced = trace(step, args, kwargs)
    reason = unusable(traced)
    if reason:
        return NonfiniteReport(reproduced=False, reason=reason)
    return _Search(traced).report()


class _Search:
    """Search in one traced step."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.recorder = Codes()
        self.program = record(self.recorder, traced.closed)
        self.scale = scale_of(traced)

    def walk(self, arrays: list[Any]) -> Walk:
        side = jax.device_get(self.program(arrays))
        return Walk(Recorded(self.recorder.regions, side))

    def report(self) -> NonfiniteReport:
        arrays, scale = self.traced.arrays, self.scale
        value = None if scale is None else scale.value
        walk = self.walk(arrays)
        roots = _roots(walk)
        if not roots and scale is not None and scale.of_skipped is not None:
            value = scale.of_skipped
            arrays = with_scale(arrays, scale.number, value)
            walk = self.walk(arrays)
            roots = _roots(walk)
        bad = bad_arguments(self.traced)
        if not roots:
            return NonfiniteReport(
                reproduced=False, reason=_reason(scale), arguments=tuple(bad.values())
            )
        origin = walk.origin(roots, _unused_results(walk))
        fields: dict[str, Any] = {
            "reproduced": True,
            "loss_scale": value,
            "result": self._result(walk, roots[0]),
            "arguments": tuple(bad.values()),
        }
        if origin is None:
            message = "The step returns constants that are not finite."
            return NonfiniteReport(message=message, **fields)
        if isinstance(origin.source, Argument):
            return self._of_argument(bad[origin.source.number], fields)
        return self._of_operation(walk, origin, arrays, value, fields)

    def _of_argument(self, row: ArgumentRow, fields: dict[str, Any]) -> NonfiniteReport:
        cause = cause_of_argument(row)
        return NonfiniteReport(
            cause=cause.id,
            message=cause.message,
            fix=cause.fix,
            argument=row.name,
            index=row.index,
            **fields,
        )

    def _of_operation(
        self,
        walk: Walk,
        origin: Origin,
        arrays: list[Any],
        scale: float | None,
        fields: dict[str, Any],
    ) -> NonfiniteReport:
        shown, source = origin.shown, origin.source
        assert isinstance(shown, Operation) and isinstance(source, Operation)
        measured = measure(self.traced.closed, arrays, [source, shown])
        evidence = Evidence(
            walk,
            origin,
            *measured,
            self._overflows_in_fp32(arrays),
            None if scale is None else self.scale,
            self._passing_scale(arrays, scale),
            self.recorder.locations.names,
        )
        cause = cause_of(evidence)
        return NonfiniteReport(
            **fields,
            **self._location(cause, shown),
            index=next((row.index for row in measured[1].results if row.nonfinite), ()),
            operands=measured[1].operands,
            results=measured[1].results,
            in_fp32=measured[1].in_fp32,
        )

    def _location(self, cause: Cause, shown: Operation) -> dict[str, Any]:
        """Returns the fields of a report on the location of an operation."""
        lined = cause.operation or shown
        location = shown.region.locations[shown.index]
        file, line = Lines().of(lined.enclosing)
        repeats = shown.repeats()
        devices = [n for region, n in repeats if region.kind == "shard_map"]
        return {
            "cause": cause.id,
            "message": cause.message,
            "fix": cause.fix,
            "expression": cause.expression,
            "module": module_of(location.names, root_of(self.recorder.locations.names)),
            "primitive": shown.name,
            "phase": location.phase,
            "file": file,
            "line": line,
            "text": linecache.getline(file, line).strip() if file else "",
            "iteration": tuple(n for region, n in repeats if region.kind != "shard_map"),
            "device": devices[-1] if devices else None,
        }

    def _overflows_in_fp32(self, arrays: list[Any]) -> bool:
        """Returns True if the first origin of the step in FP32 is an overflow."""
        recorder = WideCodes()
        side = jax.device_get(record(recorder, self.traced.closed)(arrays))
        walk = Walk(Recorded(recorder.regions, side))
        roots = _roots(walk)
        origin = walk.origin(roots, _unused_results(walk)) if roots else None
        return origin is not None and walk.is_overflow(origin)

    def _passing_scale(self, arrays: list[Any], scale: float | None) -> float | None:
        """Returns the largest power of two below a loss scale with which the step is finite."""
        if scale is None or self.scale is None:
            return None
        number = self.scale.number
        passes = lambda n: not _roots(self.walk(with_scale(arrays, number, 2.0**n)))
        low, high = _SMALLEST_EXPONENT, _SMALLEST_EXPONENT
        while 2.0**high < scale:
            high += 1
        if not passes(low):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if passes(middle) else (low, middle)
        return 2.0**low

    def _result(self, walk: Walk, root: Variable) -> str:
        """Returns the name of a result of the step."""
        results = walk.recorded.root.body.outvars
        numbers = [n for n, var in enumerate(results) if var is root.var]
        if not numbers:
            return "gradients"
        number = numbers[0]
        if number < len(self.traced.results):
            return f"result{jtu.keystr(self.traced.results[number][0])}"
        return "an object that the step changes"


def _reason(scale: ScaleArgument | None) -> str:
    tried = "" if scale is None else f" with loss scale {scale.value:g}"
    if scale is not None and scale.of_skipped is not None:
        tried += f" and with {scale.of_skipped:g}, that of the skipped step"
    return (
        f"the step is finite for these arguments{tried}. It depends on something else: another "
        "batch or state, random numbers that are not among the arguments, a callback, or roundings "
        "that the compiler left out."
    )


def _roots(walk: Walk) -> list[Variable]:
    """Returns the results that are not finite, and gradients whose finiteness the step checks."""
    root = walk.recorded.root
    results = [Variable(root, (), var) for var in root.body.outvars if not is_literal(var)]
    regions = walk.recorded.regions.values()
    if any(location.differentiated for region in regions for location in region.locations):
        for region in regions:
            for equation, location in zip(region.body.eqns, region.locations, strict=True):
                if equation.primitive.name == "is_finite" and not location.differentiated:
                    var = equation.invars[0]
                    results += [Variable(region, at, var) for at in walk.recorded.positions(region)]
    return [result for result in results if walk.code(result)]


def _unused_results(walk: Walk) -> list[Variable]:
    """Returns values of the forward pass that are not finite and that no operation reads.

    A loss that a step does not return is such a value.
    """
    unused = []
    for region in walk.recorded.regions.values():
        read = {v for e in region.body.eqns for v in e.invars if not is_literal(v)}
        read |= {v for v in region.body.outvars if not is_literal(v)}
        for equation, location in zip(region.body.eqns, region.locations, strict=True):
            if location.phase == FORWARD and location.differentiated:
                free = [v for v in equation.outvars if v not in read]
                positions = list(walk.recorded.positions(region)) if free else []
                unused += [Variable(region, at, v) for v in free for at in positions]
    return [variable for variable in unused if walk.code(variable)]
