"""Findings of the optimizer's own operations, which are determined by data flow."""

from __future__ import annotations

from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._dataflow import Update
from jaxmp._audit._pending import PendingFinding
from jaxmp._audit._trace import Traced
from jaxmp._core._jaxprs import inners
from jaxmp._core._programs._analysis import Backward
from jaxmp._core._programs._interpreter import Frame
from jaxmp._core._programs._operations import loop_of


def checked_findings(auditor: Auditor, traced: Traced) -> list[PendingFinding]:
    """Returns the findings without those of checks that do not apply to the optimizer.

    An operation belongs to the optimizer if it reads values that were computed from gradients, and
    if updated parameters or the optimizer's state are computed from its result. Its matmuls follow
    the optimizer's precision and not the policies; a note gives their share of the FLOPs.
    """
    pending = list(auditor.findings)
    suspects = [f for f in pending if f.after_gradient and not f.check.includes_optimizer]
    if not suspects and not auditor.after_gradient:
        return pending
    is_updated = [
        any(isinstance(x, Update) and x.has_gradient for x in auditor.flow.of(var))
        for var in traced.jaxpr.outvars
    ]
    search = _Sources()
    search.run(traced.jaxpr, is_updated)
    sources = search.found
    _note_matmuls(auditor, sources)
    dropped = [f for f in suspects if not sources.isdisjoint(f.after_gradient)]
    for finding in (f for f in dropped if not f.flops):
        where = auditor.findings.text_of(finding.line)
        auditor.notes[f"{finding.check.id} at {where} is not reported in the optimizer"] = None
    ids = set(map(id, dropped))
    return [finding for finding in pending if id(finding) not in ids]


class _Sources(Backward):
    """Finds the variables at any depth that some results depend on.

    A loop depends on all that its body computes.
    """

    nothing = False

    def __init__(self) -> None:
        self.found: set[Any] = set()

    def equation(self, equation: JaxprEqn, results: list[Any], frame: Frame) -> list[Any]:
        if not any(results):
            return [False] * len(equation.invars)
        pairs = zip(equation.outvars, results, strict=True)
        self.found.update(var for var, is_needed in pairs if is_needed)
        if not inners(equation):
            return [True] * len(equation.invars)
        is_loop = loop_of(equation) is not None
        operands = self.enter(equation, [True] * len(results) if is_loop else results, frame)
        # The index of a branch.
        return [True, *operands[1:]] if equation.primitive.name == "cond" else operands

    def join(self, first: bool, second: bool) -> bool:
        return first or second


def _note_matmuls(auditor: Auditor, sources: set[Any]) -> None:
    total = sum(flops for flops, _ in auditor.matmuls.values())
    for where, rows in auditor.after_gradient.items():
        flops = sum(flops for results, flops in rows if not sources.isdisjoint(results))
        if flops:
            auditor.notes[
                f"the optimizer's matmuls at {where} ({flops / total:.1%} of the FLOPs) are not"
                " compared with the policies"
            ] = None
