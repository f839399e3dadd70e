"""audit: what runs in which dtype, and what is wrong with it, from the traced program alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxmp._audit._arguments import half_results, scale_findings, state_findings, trace
from jaxmp._audit._auditor import Auditor
from jaxmp._audit._context import Judge
from jaxmp._audit._kinds import KINDS as KINDS
from jaxmp._audit._labels import SCALED
from jaxmp._audit._make_report import make_report
from jaxmp._audit._places import Place
from jaxmp._audit._report import AuditDiff as AuditDiff
from jaxmp._audit._report import AuditReport as AuditReport
from jaxmp._audit._report import Finding as Finding
from jaxmp._ops import OpTable
from jaxmp._recipe_data import as_op_table, as_policy_map
from jaxmp.errors import AuditError


def audit(fn: Callable[..., Any], *args: Any, policies: Any = None, **kwargs: Any) -> AuditReport:
    """Reports what a function runs in which dtype, and what is wrong with that.

    The function is traced and never run: no policy is applied, nothing is computed.

    Args:
      fn: any JAX function, such as a whole train step, jitted or not.
      *args: its arguments; arrays may be `jax.ShapeDtypeStruct`. Anything that is no pytree of
        arrays is handed to `fn` as it is.
      policies: what the program is meant to follow: a recipe's name, a policy string, a `Policy`,
        a `PolicyMap` or a `Recipe`. None: an FP32 matmul is a fault where its operand was 16 bits
        before. A program names no module types, so rules by type cannot be held against it; what
        they ask for is allowed everywhere.
      **kwargs: keyword arguments of `fn`.

    Returns:
      The report: `.findings`, `.matmul_flops`, `.ok`; it prints as a table.

    Raises:
      AuditError: if `fn` is no function.
      PolicyError, RecipeError: if the policies cannot be understood.

    Example:
      >>> def attend(q, k):
      ...     return jax.nn.softmax(q @ k.T)
      >>> x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
      >>> [finding.kind for finding in audit(attend, x, x, policies="bf16").findings]
      ['half_softmax']
    """
    _check_function(fn)
    rules = None if policies is None else as_policy_map(policies)
    ops = OpTable() if policies is None else as_op_table(policies)
    traced = trace(fn, args, kwargs)
    auditor = Auditor(Judge(rules, ops))
    scales = traced.scales()
    for _, var in scales:
        auditor.flow.mark(var, SCALED)
    auditor.run(traced.jaxpr, Place(), 1)
    return make_report(
        auditor, [*half_results(traced), *state_findings(traced), *scale_findings(auditor, scales)]
    )


def _check_function(fn: Any) -> None:
    if not callable(fn):
        raise AuditError(
            f"audit({fn!r}) got {type(fn).__name__}, not a function. Give the function and its "
            "arguments apart: audit(train_step, state, batch)."
        )
    if type(fn).__name__ == "CompiledStep":
        raise AuditError(
            "audit got a step that jaxmp.nnx.compile_step made, which keeps its model to itself. "
            "Give the function and its nodes: audit(train_step, model, optimizer, batch)."
        )
