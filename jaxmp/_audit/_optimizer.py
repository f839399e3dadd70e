"""Findings of the optimizer's own operations, which are determined by data flow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax.extend.core import Jaxpr

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._dataflow import Update
from jaxmp._audit._pending import PendingFinding
from jaxmp._audit._trace import Traced
from jaxmp._core._jaxprs import inners, is_literal


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
    updated = [
        var
        for var in traced.jaxpr.outvars
        if any(isinstance(x, Update) and x.has_gradient for x in auditor.flow.of(var))
    ]
    sources = sources_of(traced.jaxpr, updated)
    _note_matmuls(auditor, sources)
    dropped = [f for f in suspects if not sources.isdisjoint(f.after_gradient)]
    for finding in (f for f in dropped if not f.flops):
        where = auditor.findings.text_of(finding.line)
        auditor.notes[f"{finding.check.id} at {where} is not reported in the optimizer"] = None
    ids = set(map(id, dropped))
    return [finding for finding in pending if id(finding) not in ids]


def sources_of(jaxpr: Jaxpr, results: Iterable[Any]) -> set[Any]:
    """Returns the variables of a jaxpr and of its sub-jaxprs that some results depend on.

    A loop depends on all that its body computes.
    """
    sources = {var for var in results if not is_literal(var)}
    for equation in reversed(jaxpr.eqns):
        if sources.isdisjoint(equation.outvars):
            continue
        inside = inners(equation)
        is_loop = equation.primitive.name in ("scan", "while")
        if not inside or equation.primitive.name == "cond":
            read = equation.invars[:1] if inside else equation.invars
            sources.update(var for var in read if not is_literal(var))
        for inner in inside:
            pairs = zip(inner.jaxpr.outvars, inner.results, strict=True)
            read = [v for v, outer in pairs if is_loop or outer is None or outer in sources]
            within = sources_of(inner.jaxpr, read)
            operands = zip(inner.operands, inner.jaxpr.invars, strict=True)
            sources |= within | {
                outer
                for outer, var in operands
                if outer is not None and not is_literal(outer) and var in within
            }
    return sources


def _note_matmuls(auditor: Auditor, sources: set[Any]) -> None:
    total = sum(flops for flops, _ in auditor.matmuls.values())
    for where, rows in auditor.after_gradient.items():
        flops = sum(flops for results, flops in rows if not sources.isdisjoint(results))
        if flops:
            auditor.notes[
                f"the optimizer's matmuls at {where} ({flops / total:.1%} of the FLOPs) are not"
                " compared with the policies"
            ] = None
