"""Registry of the checks of an audit.

A `Check` has an id, a severity, an explanation and a fix; `docs/audit.md` has a row for each. Its
decorators register the functions that search for it:

- `on_operation`: before the labels of an operation's results are known; may return a label.
- `on_result`: after that.
- `on_16_bits`: for 16-bit operations of the op table's FP32 rows; may return a label.
- `on_matmul`: for floating-point matmuls and convolutions.
- `on_program`: once, after the walk over the traced program; may return findings.
- `on_compiled`: once, for the program compiled for a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from jaxmp._audit._rows import ERROR as ERROR
from jaxmp._audit._rows import WARNING as WARNING
from jaxmp._audit._rows import Finding

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Check of an audit; registered when it is made.

    Args:
      id: its name in findings, such as "fp32_matmul".
      severity: "error" or "warning". A function may report a warning for a check that is an error.
      explanation: what it reports, for `docs/audit.md`.
      fix: the remedy, as code. A function may report a more specific one.
      needs_target: "no" if the traced program suffices, "yes" if only a compiled program shows the
        defect, or the circumstances in which a compiled program is needed.
      includes_optimizer: True if it also applies to the optimizer's operations: those that read
        values computed from gradients, and from which parameters or moments are computed.
    """

    id: str
    severity: str
    explanation: str
    fix: str
    needs_target: str = "no"
    includes_optimizer: bool = False

    def __post_init__(self) -> None:
        if self.id in CHECKS:
            raise ValueError(f"two checks have the id {self.id!r}")
        CHECKS[self.id] = self

    @property
    def documentation_row(self) -> str:
        """The row of the table in `docs/audit.md`."""
        fix = " ".join(f"`{line.strip()}`" for line in self.fix.splitlines())
        return (
            f"| `{self.id}` | {self.severity} | {self.needs_target} | {self.explanation} | {fix} |"
        )

    def finding(self, message: str, fix: str = "", **fields: Any) -> Finding:
        """Returns a finding of this check.

        Args:
          message: the defect and its consequence.
          fix: the remedy; "" for that of the check.
          **fields: other fields of `Finding`.
        """
        fields = {"severity": self.severity} | fields
        return Finding(check=self.id, message=message, fix=fix or self.fix, **fields)

    def on_operation(self, *primitives: str) -> Callable[[Function], Function]:
        """Registers a function `(op, audit) -> label or None` for some primitives."""
        return _registration(lambda function: _register(ON_OPERATION, primitives, function))

    def on_result(self, *primitives: str) -> Callable[[Function], Function]:
        """Registers a function `(op, audit) -> None` for some primitives."""
        return _registration(lambda function: _register(ON_RESULT, primitives, function))

    def on_16_bits(self, function: Function) -> Function:
        """Registers a function `(op, dtype, audit) -> label or None`."""
        ON_16_BITS.append(function)
        return function

    def on_matmul(self, function: Function) -> Function:
        """Registers a function `(op, matmul, flops, audit) -> None`."""
        ON_MATMUL.append(function)
        return function

    def on_program(self, function: Function) -> Function:
        """Registers a function `(audit, traced) -> findings or None`."""
        ON_PROGRAM.append(function)
        return function

    def on_compiled(self, function: Function) -> Function:
        """Registers a function `(program, audit) -> findings`."""
        ON_COMPILED.append(function)
        return function


# Id -> check, in the order of the imports in `jaxmp/_audit/__init__.py`. Findings of one severity
# are sorted by it.
CHECKS: dict[str, Check] = {}

# Primitive -> functions.
ON_OPERATION: dict[str, list[Callable[..., Any]]] = {}
ON_RESULT: dict[str, list[Callable[..., Any]]] = {}
ON_16_BITS: list[Callable[..., Any]] = []
ON_MATMUL: list[Callable[..., Any]] = []
ON_PROGRAM: list[Callable[..., Any]] = []
ON_COMPILED: list[Callable[..., Any]] = []


def _registration(register: Callable[[Any], None]) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        register(function)
        return function

    return decorate


def _register(
    table: dict[str, list[Callable[..., Any]]],
    primitives: tuple[str, ...],
    function: Callable[..., Any],
) -> None:
    for name in primitives:
        table.setdefault(name, []).append(function)


def documentation_table() -> str:
    """Returns the table of checks in `docs/audit.md`."""
    head = "| check | severity | needs `target=` | meaning | fix |\n|---|---|---|---|---|"
    return "\n".join([head, *(check.documentation_row for check in CHECKS.values())])
