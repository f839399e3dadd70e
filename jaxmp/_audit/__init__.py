"""audit: what runs in which dtype, and what is wrong with it, as traced and as compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from jaxmp._audit._arguments import (
    half_results,
    held_arrays,
    scale_findings,
    state_findings,
    trace,
)
from jaxmp._audit._auditor import Auditor
from jaxmp._audit._check_steps import mark_arguments, step_findings
from jaxmp._audit._checks import CHECKS as CHECKS
from jaxmp._audit._compile import check_target, compile_for
from jaxmp._audit._context import PolicyContext
from jaxmp._audit._gpus import GPUS
from jaxmp._audit._labels import SCALED
from jaxmp._audit._make_report import make_report
from jaxmp._audit._report import AuditDiff as AuditDiff
from jaxmp._audit._report import AuditReport as AuditReport
from jaxmp._audit._report import Finding as Finding
from jaxmp._core import _compat
from jaxmp._core._compat import unchecked_cuda
from jaxmp._core._locations import Location
from jaxmp._recipe_files._load import as_recipe_data
from jaxmp.errors import AuditError


def audit(
    fn: Callable[..., Any],
    *args: Any,
    policies: Any = None,
    target: str | None = None,
    **kwargs: Any,
) -> AuditReport:
    """Reports what a function runs in which dtype, and what is wrong with that.

    The function is traced, with `target` also compiled, and never run: no policy is applied,
    nothing is computed.

    Args:
      fn: any JAX function, such as a whole train step, jitted or not.
      *args: its arguments; arrays may be `jax.ShapeDtypeStruct`. Anything that is no pytree of
        arrays is handed to `fn` as it is.
      policies: what the program is meant to follow: a recipe's name, a policy string, a `Policy`,
        a `PolicyMap` or a `Recipe`. None: an FP32 matmul is a error where its operand was 16 bits
        before. A program names no module types, so rules by type cannot be held against it; what
        they ask for is allowed everywhere.
      target: "a100", "h100", "h200" or "b200": the program is also compiled for that card, which
        need not be there (`pip install "jaxmp[aot]"`), and the report says what XLA made of it:
        `.gemms`, `.attention`, `.collectives`, `.memory`. A program whose arguments, or whose own
        `jit`, `shard_map` or constraints name a mesh, of devices of any kind, is compiled for as
        many cards.
      **kwargs: keyword arguments of `fn`.

    Returns:
      The report: `.findings`, `.matmul_flops`, `.ok`; it prints as a table.

    Raises:
      AuditError: if `fn` is no function, `target` is no card, or XLA cannot compile the program.
      MissingDependencyError: if there is neither the card nor XLA's compiler for it.
      PolicyError, RecipeError: if the policies cannot be understood.

    Example:
      >>> def attend(q, k):
      ...     return jax.nn.softmax(q @ k.T)
      >>> x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
      >>> [finding.check for finding in audit(attend, x, x, policies="bf16").findings]
      ['softmax_16bit']
    """
    return audit_call(fn, args, kwargs, policies=policies, target=target)


def audit_call(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, policies: Any, target: str | None
) -> AuditReport:
    """`audit`, for arguments of any name."""
    _check_function(fn)
    if target is not None:
        check_target(target)
    recipe = None if policies is None else as_recipe_data(policies)
    spelled = policies if isinstance(policies, str) else "bf16" if policies is None else ""
    text = repr(spelled) if spelled else "recipe" if hasattr(policies, "data") else "policies"
    # JAX may start its backends at any step of an audit.
    with contextlib.nullcontext() if target is None else unchecked_cuda():
        device = _compat.target() if target is None else "gpu"
        return _audit(PolicyContext(recipe, device, text), fn, args, kwargs, target)


def _audit(
    context: PolicyContext,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: str | None,
) -> AuditReport:
    card = {} if target is None else {"target": "gpu", "capability": (GPUS[target].major, 0)}
    with _compat.context(**card):
        traced = trace(fn, args, kwargs)
    auditor = Auditor(context)
    scales = traced.scales()
    for _, var in scales:
        auditor.flow.mark(var, SCALED)
    for label, var in traced.inputs():
        auditor.flow.mark(var, label)
    mark_arguments(auditor, traced)
    auditor.masks.known.bind_constants(traced.closed)
    auditor.run(traced.jaxpr, Location(), 1)
    auditor.finish(traced.jaxpr)
    others = [*half_results(traced), *state_findings(traced), *scale_findings(auditor, scales)]
    others += step_findings(auditor, traced, context.recipe, others)
    compiled = None if target is None else compile_for(target, traced)
    return make_report(auditor, others, compiled, held_arrays(traced))


def _check_function(fn: Any) -> None:
    if not callable(fn):
        raise AuditError(
            f"audit got an object of type {type(fn).__name__}, not a function. Give the function "
            "and its arguments apart: audit(train_step, state, batch)."
        )
    if type(fn).__name__ == "CompiledStep":
        raise AuditError(
            "audit got a step that jaxmp.nnx.compile_step made, which keeps its model to itself. "
            "Give the function and its nodes: audit(train_step, model, optimizer, batch)."
        )
