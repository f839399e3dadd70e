"""Operations of a traced program, the registry of the checks, and the findings that they add."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from jaxmp import _core, _programs
from jaxmp._attention import MARK
from jaxmp._tools.audit._rows import ERROR as ERROR
from jaxmp._tools.audit._rows import NOTE as NOTE
from jaxmp._tools.audit._rows import WARNING as WARNING
from jaxmp._tools.audit._rows import Finding
from jaxmp._tools.fixes import _source

if TYPE_CHECKING:
    from jaxmp._tools.audit._auditor import Auditor
    from jaxmp._tools.audit._labels import ConditionalFinding

Function = TypeVar("Function", bound=Callable[..., Any])
Label = TypeVar("Label")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Check of an audit; registered when it is made.

    Args:
      id: its name in findings, such as "fp32_matmul".
      explanation: what it reports, for `docs/findings.md`.
      fix: the remedy, as code. A function may report a more specific one.
      severity: "error", "warning" or "note". A function may report a warning for a check that is an
        error.
      needs_target: "no" if the traced program shows the defect, "yes" if only a program that is
        compiled for a `target` does, or the circumstances in which a compiled program is needed.
      includes_optimizer: True if it also applies to the optimizer's operations: those that read
        values computed from gradients, and from which parameters or moments are computed.
    """

    id: str
    explanation: str
    fix: str
    severity: str = ERROR
    needs_target: str = "no"
    includes_optimizer: bool = False

    def __post_init__(self) -> None:
        if self.id in CHECKS:
            raise ValueError(f"two checks have the id {self.id!r}")
        CHECKS[self.id] = self

    def finding(
        self, message: str, fix: str = "", at: OpOccurrence | None = None, **fields: Any
    ) -> Finding:
        """Returns a finding of this check.

        Args:
          message: the defect and its consequence.
          fix: the remedy; "" for that of the check.
          at: the operation at its line.
          **fields: other fields of `Finding`.
        """
        file, line = ("", 0) if at is None else at.line
        fields = {"severity": self.severity, "file": file, "line": line} | fields
        return Finding(check=self.id, message=message, fix=fix or self.fix, **fields)

    def on_operation(
        self, *primitives: str, passes: Iterable[str] = (_programs.FORWARD,)
    ) -> Callable[[Function], Function]:
        """Registers a function `(op) -> label or None` for some primitives and passes.

        Its operands and results already have their other labels, and the operations inside of it
        were visited.
        """
        return _registration([ON[name, phase] for name in primitives for phase in passes])

    def on(self, event: str) -> Callable[[Function], Function]:
        """Registers a function for an event.

        Args:
          event: `HALF` for a function `(op, dtype) -> label or None`, `MATMUL` for one
            `(op, matmul, flops) -> None`, `PROGRAM` for `(audit) -> findings or None`, and
            `COMPILED` for `(program, audit) -> findings`.
        """
        return _registration([ON[event]])


# Id -> check, in the order of the imports in `_audit.py`. Findings of one severity are sorted by
# it, except for notes.
CHECKS: dict[str, Check] = {}

# (Primitive, pass), or another event -> functions.
ON: defaultdict[Any, list[Callable[..., Any]]] = defaultdict(list)
HALF, MATMUL, PROGRAM, COMPILED = "16 bits", "matmul", "program", "compiled program"
ALL_PASSES = _programs.FORWARD, _programs.RECOMPUTE, _programs.BACKWARD
NOT_BACKWARD = ALL_PASSES[:2]


def _registration(lists: list[list[Callable[..., Any]]]) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        for functions in lists:
            functions.append(function)
        return function

    return decorate


@dataclasses.dataclass
class PendingFinding:
    """A finding of the traced program, while operations are still being counted."""

    check: Check
    severity: str
    # The first of its operations.
    op: OpOccurrence
    message: str
    fix: str
    count: int = 0
    flops: int = 0
    # Bytes that its matmuls read and write.
    bytes: int = 0
    # Results of the operations, if they may be a part of an update; see `Auditor.updates_by`. Such
    # an operation belongs to the optimizer if parameters or state are computed from its result.
    of_updates: list[tuple[_programs.Atom, bool]] = dataclasses.field(default_factory=list)
    # FLOPs of the matmuls that it makes wide or larger; infinity for another consequence.
    harmed_flops: float = 0


class PendingFindings:
    """Findings of the walk, one for each check, module and source line.

    Args:
      audit: the audit; None if only the expressions of operations are required.
    """

    def __init__(self, audit: Auditor | None) -> None:
        self.audit: Any = audit
        self.by_key: dict[tuple[object, ...], PendingFinding] = {}
        self.lines = _programs.Lines()
        # Replacements of expressions that fixes may contain.
        self.edits: list[_source.Edit] = []
        # False if no fixes are required.
        self.reads_source = True

    def remove(self, finding: PendingFinding) -> None:
        """Removes a finding."""
        self.by_key = {key: each for key, each in self.by_key.items() if each is not finding}

    def __iter__(self) -> Iterator[PendingFinding]:
        return iter(self.by_key.values())


# Floating-point dtypes that the audit compares; FP8 is not among them.
FLOATS = _core.CASTABLE | {_core.FLOAT64}


# Primitives that return the elements of their operand, or their absolute values (as the maximum in
# `jax.nn.logsumexp` does), in another layout or dtype.
LAYOUT = _core.named(
    "convert_element_type reshape broadcast_in_dim abs squeeze transpose copy expand_dims"
    " stop_gradient reduce_precision pvary"
)
CASTS = _core.named("convert_element_type")
BROADCASTS = _core.named("broadcast_in_dim reshape")
PERIODIC = _core.named("sin cos tan")


class OpOccurrence(NamedTuple):
    """An equation, its location, and the number of its executions."""

    equation: _programs.Equation
    location: _programs.Location
    times: int
    body: _programs.Body
    # The findings of the audit, which also tell the files of the user from others.
    findings: PendingFindings
    # The operation that contains it.
    outer: OpOccurrence | None = None

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    @property
    def operands(self) -> list[_programs.Atom]:
        return self.equation.invars

    @property
    def result(self) -> _programs.Atom:
        """The first result."""
        return self.equation.outvars[0]

    def sibling(self, equation: _programs.Equation) -> OpOccurrence:
        """Returns another equation of the same jaxpr."""
        return self._replace(equation=equation)

    def made_by(self, var: _programs.Atom, through: frozenset[str]) -> OpOccurrence | None:
        """Returns the operation that makes a value, before those of the named primitives."""
        maker = self.body.maker_through(var, through)
        return None if maker is None else self.sibling(maker)

    def in_body(self, equation: _programs.Equation) -> OpOccurrence:
        """Returns an equation of the body of this operation, which is a loop."""
        return self._replace(equation=equation, body=_programs.Body(self.loop.jaxpr), outer=self)

    # -- checks -----------------------------------------------------------------------------

    @property
    def audit(self) -> Auditor:
        """The audit that visits it."""
        return self.findings.audit

    def labels(self, cls: type[Label], *variables: _programs.Atom) -> list[Label]:
        """Returns the labels of one class that some values have; by default, all operands."""
        return self.audit.flow.labels(cls, *(variables or self.operands))

    @property
    def use(self) -> _programs.Use:
        """The uses of the first result in the whole program."""
        return self.audit.use_of(self.result)

    @property
    def rule_path(self) -> str:
        """The path by which rules find its module; "" for the root."""
        return self.audit.context.rule_path(self.location.names)

    def mark(self, label: object) -> None:
        """Adds a label to the first result."""
        self.audit.flow.mark(self.result, label)

    def report(self, cls: type[ConditionalFinding], harm: str) -> None:
        """Reports conditional findings about the operands; see `Auditor.report`."""
        self.audit.report(cls, self.operands, harm)

    def add(
        self, check: Check, message: str, fix: str = "", *, severity: str = "", flops: int = 0
    ) -> PendingFinding:
        """Reports the operation.

        Args:
          check: the check.
          message: the defect and its consequence.
          fix: the remedy; "" for that of the check.
          severity: "error" or "warning"; "" for that of the check.
          flops: FLOPs of the operation, if it is a matmul.

        Returns:
          The finding that the operation is counted in.
        """
        severity = severity or check.severity
        results = self.audit.updates_by(self)
        key = check.id, severity, self.location.names, self.line, *{after for _, after in results}
        finding = self.findings.by_key.get(key)
        if finding is None:
            finding = PendingFinding(check, severity, self, message, fix or check.fix)
            self.findings.by_key[key] = finding
        elif fix and fix not in finding.fix and self.is_forward:
            # Another expression of the line.
            finding.fix = _source.both(finding.fix, fix)
        finding.of_updates += results
        finding.count += 1
        finding.flops += flops
        finding.bytes += bytes_of_matmul(self) if self.name in _programs.MATMULS else 0
        return finding

    # -- properties -------------------------------------------------------------------------

    @property
    def dtype(self) -> Any:
        """The dtype of the first result; None if it has none."""
        return dtype_of(self.result)

    @property
    def rounded(self) -> np.dtype | None:
        """The 16-bit dtype of a cast from FP32; None for other operations."""
        is_cast = self.name == "convert_element_type"
        is_wide = is_cast and dtype_of(self.operands[0]) == _core.FLOAT32
        return half_of([self.result]) if is_wide else None

    @property
    def loop(self) -> _programs.Inner:
        """The body of a loop."""
        loop = _programs.loop_of(self.equation)
        assert loop is not None
        return loop

    @property
    def codes(self) -> list[CodeType]:
        """The functions whose calls made it, innermost first."""
        traceback = self.equation.source_info.traceback
        return [] if traceback is None else traceback.raw_frames()[0]

    def is_within(self, folder: str) -> bool:
        """Returns True if a function of a folder is among the calls that made it."""
        return any(folder in code.co_filename.replace("\\", "/") for code in self.codes)

    @property
    def line(self) -> tuple[str, int]:
        """(file, line) in the user's code; ("", 0) if it is not known."""
        # Differentiation moves equations out of loops, to which their tracebacks do not extend.
        readers = (e for var in self.equation.outvars for e in self.body.readers(var))
        return self.findings.lines.of((self.equation, *self.enclosing, *readers))

    @property
    def where(self) -> str:
        """The line as `model.py:12`."""
        return _source.text_of(*self.line)

    @property
    def is_own_call(self) -> bool:
        """True if the user's own code contains the call that made the equation."""
        call = _programs.call_site(self.equation)
        return call is not None and self.findings.lines.is_own(call[0].co_filename)

    @property
    def expression(self) -> _source.Expression:
        """The expression in the user's code whose call makes the equation."""
        return _source.expression_of(self)

    @property
    def is_forward(self) -> bool:
        """False in a backward pass, and in what it computes again."""
        return self.location.phase == _programs.FORWARD

    @property
    def is_backward(self) -> bool:
        return self.location.phase == _programs.BACKWARD

    @property
    def is_differentiated_again(self) -> bool:
        """True in the backward pass of an inner gradient, whose derivative is computed, too."""
        # The outer derivative is the first part of a name stack.
        stack = "".join(
            str(e.source_info.name_stack) for e in (*self.enclosing[::-1], self.equation)
        )
        return 0 <= stack.find("jvp(") < stack.find("transpose(")

    @property
    def enclosing(self) -> tuple[_programs.Equation, ...]:
        """The equations that contain it, innermost first."""
        return () if self.outer is None else (self.outer.equation, *self.outer.enclosing)

    @property
    def caller(self) -> str:
        """Name of the jitted function that contains it directly; "" if there is none."""
        return "" if self.outer is None else _programs.name_of(self.outer.equation)


def dtype_of(var: _programs.Atom) -> Any:
    """Returns the dtype of a variable; None if it has none."""
    return getattr(var.aval, "dtype", None)


def stagnation(dtype: np.dtype) -> int:
    """Returns the number of equal terms after which a sequential sum stops growing.

    Integers beyond it are not distinct.
    """
    return 2 ** (jnp.finfo(dtype).nmant + 1)


def bytes_of_matmul(op: OpOccurrence) -> int:
    """Returns the bytes that all executions of a matmul read and write."""
    avals = [var.aval for var in (*op.operands[:2], *op.equation.outvars)]
    return op.times * sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


def half_of(variables: Iterable[_programs.Atom]) -> np.dtype | None:
    """Returns the first 16-bit floating-point dtype among variables, or None."""
    for var in variables:
        dtype = dtype_of(var)
        if dtype in _core.FLOATS_16BIT:
            return dtype
    return None


def is_attention(equation: _programs.Equation) -> bool:
    """Returns True for a call of jaxmp's own attention, in any implementation."""
    return _programs.name_of(equation).startswith(f"{MARK}_")


def is_internal_matmul(op: OpOccurrence, matmul: _programs.Matmul) -> bool:
    """Returns True for matmuls that jaxmp's attention computes in FP32 from 16-bit operands.

    On devices without Tensor Cores it multiplies the gradient of the logits in FP32.
    """
    calls = (equation for equation in op.enclosing if is_attention(equation))
    return _core.FLOAT32 in (matmul.lhs, matmul.rhs) and any(
        half_of(equation.invars) is not None for equation in calls
    )
