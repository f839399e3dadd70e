"""Check of state that a step replaces even if it skips its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp import _programs
from jaxmp._programs import Frame
from jaxmp._tools.audit import _auditor, _check_state, _checks, _dataflow
from jaxmp._tools.audit._rows import Finding
from jaxmp.optim import _roles

UNGUARDED_STATE = _checks.Check(
    id="unguarded_state",
    explanation="A training step that is not finite keeps the parameters, but computes running"
    " statistics, carries or other state from values of its batch, which stay NaN.",
    fix="stats = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(new), new, old), stats, old)",
    severity=_checks.WARNING,
)
_FIX_SKIPPED = (
    "Keep the old values if the new {state} has skipped the step:\n"
    "    applied = jaxmp.get_skip_stats({state}).last_finite\n"
    "    stats = jax.tree.map(lambda new, old: jnp.where(applied, new, old), stats, old)\n"
    "Or make them a field of jaxmp.TrainState:\n"
    "    state = state.apply_gradients(grads=grads, stats=stats)"
)

# Facts of values: computed from integers of the batch, from its floats, from a test of finiteness,
# or from the argument of a number.
_NONE = frozenset[Any]()
_INDEX, _BATCH, _TEST = (frozenset({fact}) for fact in ("index", "batch", "test"))


@UNGUARDED_STATE.on(_checks.PROGRAM)
def check_carried(audit: _auditor.Auditor) -> Iterator[Finding]:
    """Reports state that a step does not guard, although it guards its parameters."""
    step, traced = _check_state.step_of(audit), audit.traced
    carried = dict(_carried(audit, step)) if step.learned else {}
    others = {n for n in carried if n not in step.learned and not step.in_optimizer[n]}
    if not others:
        return
    args = []
    for number, role in enumerate(traced.roles()):
        aval, is_input = step.avals[number], role == _roles.INPUT and number not in others
        fact = _BATCH if aval.dtype in _checks.FLOATS else _INDEX
        fact = fact if is_input and aval.size > 1 else _NONE
        args.append(frozenset({number}) if number in others else fact)
    facts = _Facts().run(traced.closed, args)
    new = {n: facts[index] for n, index in carried.items()}
    parameters = [new[n] for n in step.learned & new.keys()]
    # A scalar that no new parameter depends on is a measurement. A value that does not depend on
    # the old one is NaN for one step.
    is_state = lambda n: step.avals[n].size > 1 or n in _NONE.union(*parameters)
    damaged = [n for n in sorted(others) if new[n] >= _BATCH | {n} and is_state(n)]
    if damaged and not any(facts >= _BATCH for facts in parameters):
        message = "a step that is not finite keeps the parameters, but other state, such as"
        message += f" {step.locations[damaged[0]]}, takes values of its batch, and stays NaN."
        counters = (leaf for leaf in step.leaves if leaf.field == "last_finite")
        names = [traced.text_of(leaf.path[1:2]) for leaf in counters]
        fix = _FIX_SKIPPED.replace("{state}", names[0]) if names else ""
        fix = _check_state.FIX_NNX if traced.nnx_objects else fix
        op = audit.maker_of(audit.results[carried[damaged[0]]])
        yield UNGUARDED_STATE.finding(message, fix, op, count=len(damaged))


def _carried(audit: _auditor.Auditor, step: _check_state.TrainingStep) -> Iterator[tuple[int, int]]:
    """Yields (argument, result) of averages, and of arrays that are replaced by other values."""
    for index, (own, var) in enumerate(zip(audit.traced.replaced, audit.results, strict=True)):
        labels = audit.flow.labels(_dataflow.Update, var)
        for label in labels:
            is_own = label.number in own or label.factor == _dataflow.LARGE
            if is_own and label in step.updates.get(label.number, ()):
                yield label.number, index
        is_array = _checks.dtype_of(var) in _checks.FLOATS and var.aval.size > 1
        is_new = not labels and var not in audit.traced.variables
        if is_array and is_new and len(own) == 1:
            yield next(iter(own)), index


class _Facts(_programs.Forward):
    """For each variable, some of `_INDEX`, `_BATCH` and `_TEST`, and numbers of arguments."""

    nothing = _NONE

    def join(self, first: Any, second: Any) -> Any:
        return first | second

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        name, every = equation.primitive.name, _NONE.union(*operands)
        results = [every] * len(equation.outvars)
        if name in _programs.CONSTRUCTS:
            results = self.enter(equation, operands, frame)
        is_test = name == "is_finite" or (name == "ne" and equation.invars[0] is equation.invars[1])
        if is_test:
            return [_TEST]
        # A saturating cast also chooses by a test, but between two values of the batch.
        is_choice = name == "cond" or (
            name == "select_n" and not (operands[1] & operands[2]) >= _BATCH
        )
        if is_choice and operands[0] >= _TEST:
            # The outcome of a choice, such as whether the update was applied, is another test.
            results = [(fact - _BATCH) | _TEST for fact in results]
        if name == "gather" and operands[1] >= _INDEX:
            results = [fact | _BATCH for fact in results]
        avals = (getattr(var.aval, "dtype", None) for var in equation.outvars)
        lost = (_TEST if dtype in _checks.FLOATS else _BATCH for dtype in avals)
        return [fact - other for fact, other in zip(results, lost, strict=True)]
