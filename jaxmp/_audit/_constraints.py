"""Sharding constraints by which a program gathers its weights, and their fix."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._dataflow import From
from jaxmp._audit._expressions import expression_of, with_split_copy
from jaxmp._audit._gpu_rows import CollectiveRow
from jaxmp._audit._hlo_collectives import axis_names
from jaxmp._audit._program import OpOccurrence, half_of
from jaxmp._audit._trace import Traced
from jaxmp._core._locations import module_of
from jaxmp._core._programs._operations import is_in_mesh, sharding_of_result


class Constraint(NamedTuple):
    """Sharding constraint of the forward pass, and the arguments of which it has elements."""

    op: OpOccurrence
    arguments: tuple[int, ...]


def constraint_of(op: OpOccurrence, audit: Auditor) -> Constraint:
    labels = audit.flow.of(op.equation.invars[0])
    return Constraint(op, tuple(label.number for label in labels if isinstance(label, From)))


def gather_of(row: CollectiveRow, audit: Auditor) -> Constraint | None:
    """Returns the constraint by which devices gather a weight; None if it is not known.

    XLA names many gathers after the arguments, without a line. Then the constraint has the same
    module and number of elements.
    """
    gathers = [
        each
        for each in audit.collected[Constraint]
        if module_of(each.op.location.names, audit.root) == row.module
        and (not row.file or audit.findings.line_of(each.op) == (row.file, row.line))
        and _split_of(each, audit) is not None
    ]
    elements = row.bytes // row.count // (8 if row.dtype == "float64" else 4)
    difference = lambda each: abs(each.op.equation.invars[0].aval.size - elements)
    return min(gathers, key=difference, default=None)


def fix_of_gather(gather: Constraint, dtype: str, audit: Auditor) -> str:
    """Returns the constraint with a 16-bit copy of the weight that is still split, or "".

    The code also runs for the other constraints of its line, which must be of weights that are
    split in the same way.
    """
    line = audit.findings.line_of(gather.op)
    same = [c for c in audit.collected[Constraint] if audit.findings.line_of(c.op) == line]
    if len({_split_of(constraint, audit) for constraint in same}) > 1:
        return ""
    spec = ", ".join(map(repr, _split_of(gather, audit) or ()))
    is_cast = half_of(gather.op.equation.invars) is not None
    return with_split_copy(
        expression_of(gather.op, audit.findings),
        f"jax.sharding.PartitionSpec({spec})",
        "" if is_cast else dtype,
        has_mesh=is_in_mesh(gather.op.equation),
    )


def _split_of(constraint: Constraint, audit: Auditor) -> PartitionSpec | None:
    """Returns the spec of the argument that a constraint gathers; None if it gathers none."""
    (operand,), result = constraint.op.equation.invars, sharding_of_result(constraint.op.equation)
    leaves = jax.tree.leaves(audit.collected[Traced][-1].arguments)
    for number in constraint.arguments:
        spec = getattr(getattr(leaves[number], "sharding", None), "spec", None)
        if spec is not None and leaves[number].shape == operand.aval.shape:
            kept = axis_names(getattr(result, "spec", ()))
            return None if axis_names(spec) <= kept else spec
    return None
