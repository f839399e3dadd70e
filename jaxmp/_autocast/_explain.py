"""The record of an explanation: each matmul and convolution, its dtype and the reason."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxmp import _core, _programs
from jaxmp._autocast._decide import Decision
from jaxmp._autocast._resolve import AutocastConfig, ScopePolicy, path_of
from jaxmp._autocast._values import is_castable_aval
from jaxmp._core import Array
from jaxmp._core._compat import JaxprEqn

IN_RULE = "inside a custom_vjp, which runs as its author wrote it"
# Kernels. Their jaxprs compute on blocks of the operands, so the shapes inside do not give the
# FLOPs of the whole matmul.
_KERNELS = ("pallas_call", "mpmd_map", "tpu_custom_call", "mosaic_gpu_p")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutocastDecision(_core.ExplanationRow):
    """One matmul or convolution of a function under autocast.

    Args:
      path: its name scopes, joined by "/"; "" outside all scopes.
      phase: "forward", or, if the function computes a gradient, "backward" or "recompute".
      primitive: the operation, as a jaxpr prints it.
      shapes: shapes of the two operands.
      dtype: dtype of the operands, such as "bfloat16", or "int8 x float32" if they differ.
      reason: why it runs in that dtype.
      file: path of the user's source file; "" if it is not known.
      line: line number in `file`; 0 if it is not known.
      flops: floating-point operations of all executions.
      count: number of executions; the body of a while loop counts once.
    """

    path: str
    phase: str
    primitive: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: str
    reason: str
    file: str = ""
    line: int = 0
    flops: int = 0
    count: int = 1

    @property
    def is_low(self) -> bool:
        """True if both operands are floating-point and have at most 16 bits."""
        dtypes = [jnp.dtype(name) for name in self.dtype.split(" x ")]
        return all(jnp.issubdtype(d, jnp.floating) and _core.bits(d) <= 16 for d in dtypes)

    def cells(self) -> tuple[str, ...]:
        times = f"{self.count} x " if self.count > 1 else ""
        shapes = " and ".join("[" + ", ".join(map(str, shape)) + "]" for shape in self.shapes)
        location = self.path or "(no scope)"
        location += f", {self.phase}" if self.phase != _programs.FORWARD else ""
        source = f"{pathlib.Path(self.file).name}:{self.line}" if self.file else ""
        return self.dtype, location, f"{times}{self.primitive} of {shapes}", source, self.reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutocastExplanation(_core.ExplanationSection[AutocastDecision]):
    """The matmuls and convolutions of a function under autocast; `str()` prints a table.

    Attributes:
      rows: an `AutocastDecision` for each matmul, in the order of execution; equal decisions share
        a row.
      notes: operations for which the counts are incomplete or approximate.
    """

    columns: ClassVar = ("dtype", "scope", "operation", "source", "reason")
    max_printed_rows: ClassVar = 60

    @property
    def flops(self) -> int:
        """FLOPs of all matmuls and convolutions."""
        return sum(row.flops for row in self.rows)

    @property
    def low_flops(self) -> int:
        """FLOPs of the matmuls and convolutions that run in 16 bits or FP8."""
        return sum(row.flops for row in self.rows if row.is_low)

    @property
    def share(self) -> float:
        """Share of the FLOPs that runs in 16 bits or FP8, from 0 to 1; 0.0 without any FLOPs."""
        return self.low_flops / self.flops if self.flops else 0.0

    @property
    def summary(self) -> str:
        """Share of the FLOPs, and number of matmuls and convolutions, in 16 bits or FP8."""
        if not self.rows:
            return "No matmul or convolution."
        total = sum(row.count for row in self.rows)
        low = sum(row.count for row in self.rows if row.is_low)
        return (
            f"{self.share:.1%} of the matmul FLOPs run in 16 bits or FP8: {low} of {total} matmuls "
            "and convolutions."
        )


class Recorder:
    """Collector of decisions while the interpreter runs a function."""

    def __init__(self, config: AutocastConfig) -> None:
        self.config = config
        self._rows: dict[AutocastDecision, list[int]] = {}
        self._notes: dict[str, None] = {}
        self._lines = _programs.Lines()
        # Enclosing equations, the innermost first.
        self._enclosing: tuple[Any, ...] = ()
        # Number of executions, and pass, of the innermost enclosing equation.
        self._times, self._phase = 1, _programs.FORWARD

    def explanation(self) -> AutocastExplanation:
        """Returns an explanation of all recorded decisions."""
        rows = (
            dataclasses.replace(row, flops=flops, count=count)
            for row, (flops, count) in self._rows.items()
        )
        return AutocastExplanation(rows=tuple(rows), notes=tuple(self._notes))

    @contextlib.contextmanager
    def inside(self, equation: JaxprEqn) -> Iterator[None]:
        """Records the matmuls of this block as part of `equation`."""
        before = self._enclosing, self._times, self._phase
        form = _programs.form_of(equation)
        if form is _programs.Form.WHILE:
            self._notes["a loop that ends by a test is counted once"] = None
        if form is _programs.Form.BRANCH:
            self._notes["all branches of a condition are counted"] = None
        self._enclosing = (equation, *self._enclosing)
        self._times *= max((inner.times for inner in _programs.inners(equation)), default=1)
        self._phase = _programs.phase_of(str(equation.source_info.name_stack), self._phase)
        try:
            yield
        finally:
            self._enclosing, self._times, self._phase = before

    def as_recorded(self, equation: JaxprEqn, scope_path: _programs.Path, reason: str) -> None:
        """Records the matmuls of an equation that runs in the dtypes in which it was traced."""
        if equation.primitive.name in _programs.MATMULS:
            self._add(equation, scope_path, None, reason)
            return
        if equation.primitive.name in _KERNELS:
            self._notes[f"what is inside of {equation.primitive.name} is not counted"] = None
            return
        with self.inside(equation):
            for inner in _programs.inners(equation):
                for each in _programs.equations(inner.jaxpr, inside=False):
                    self.as_recorded(each, scope_path, reason)

    def equation(
        self,
        equation: JaxprEqn,
        scope_path: _programs.Path,
        decision: Decision,
        policy: ScopePolicy,
        in_fp8: Callable[..., Array] | None,
    ) -> None:
        """Records an equation if it is a matmul or contains matmuls.

        Args:
          equation: the equation that is about to run.
          scope_path: its name scopes.
          decision: the dtypes in which it runs.
          policy: the policy of its scopes.
          in_fp8: the `fp8.dot_general` that replaces the equation; None if it does not run in FP8.
        """
        name = equation.primitive.name
        if name not in _programs.MATMULS:
            if decision.as_recorded:
                self.as_recorded(equation, scope_path, self._why_opaque(name))
            return
        dtype = decision.dtype if in_fp8 is None else jnp.dtype(jnp.float8_e4m3fn)
        reason = decision.reason if in_fp8 is None else policy.reason
        if policy.uses_fp8 and in_fp8 is None and decision.result is not None:
            reason += "; not in FP8, see .fp8"
        self._add(equation, scope_path, dtype, reason)

    def _why_opaque(self, name: str) -> str:
        try:
            reason = self.config.ops.op(name).reason
        except ValueError:
            return f"inside {name}, which the op table does not list"
        return f"inside {name}: {reason}"

    def _add(self, equation: JaxprEqn, scope_path: _programs.Path, dtype: Any, reason: str) -> None:
        """Adds a matmul, whose operands are cast to `dtype`; None: they keep their dtypes."""
        product = _programs.matmul_of(equation)
        lhs, rhs = (_programs.array_aval(var) for var in equation.invars[:2])
        is_cast = lambda aval: dtype is not None and is_castable_aval(aval)
        dtypes = [dtype if is_cast(aval) else aval.dtype for aval in (lhs, rhs)]
        file, line = self._lines.of((equation, *self._enclosing))
        shown = list(dict.fromkeys(jnp.dtype(dtype).name for dtype in dtypes))
        row = AutocastDecision(
            path=path_of(scope_path),
            phase=_programs.phase_of(str(equation.source_info.name_stack), self._phase),
            primitive=equation.primitive.name,
            shapes=(lhs.shape, rhs.shape),
            dtype=" x ".join(shown),
            reason=reason,
            file=file,
            line=line,
        )
        sums = self._rows.setdefault(row, [0, 0])
        sums[0] += 0 if product.is_integer else product.flops * self._times
        sums[1] += self._times
