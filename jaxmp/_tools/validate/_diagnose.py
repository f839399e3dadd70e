"""Diagnoses the cause of a failure from measurements and from the audit of the training step.

Each function below returns `(score, Cause)` or None. The score is the relative error of the
gradients, the loss or the updates that the cause explains, as far as it is measured; the causes of
a report are sorted by it. Names of recipes are not used.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxmp._tools.audit import _report
from jaxmp._tools.audit._rows import Finding
from jaxmp._tools.report._section import module_text
from jaxmp._tools.validate import _rows, _train, _trials

# Smallest shares of elements that count as a symptom.
_UNDERFLOW, _STALLED = 0.02, 0.05
# Difference of the size of an update that counts as a symptom.
_CHANGED = 0.05
# Error of a module's output relative to that of its predecessor that counts as growth.
_GROWTH = 3.0
# Error of a module's output or of a loss in FP32 that sums in another order do not explain.
_DIFFERENT = 0.005
# Part of the largest effect of a line from which on an earlier line is named.
_ORIGIN = 0.8


class Trained(NamedTuple):
    """Runs of one recipe, or their steps in one of its phases, and evidence for a diagnosis.

    Args:
      records: the runs of all seeds.
      result: differences from the reference at the compared steps, and comparison of the training.
      phases: its phases.
      audits: audit of the step of each.
      lacks_masters: True if a parameter is stored in 16 bits and has no FP32 master.
      repeat: repeats a compared step without roundings.
      gradient_budget: largest error of the gradient that passes.
      trial: a compared step repeated without roundings; None if no gradients were compared.
      note: the reason why a step was not repeated.
    """

    records: list[_rows.TrainingRecord]
    result: _rows.CandidateResult
    phases: list[_train.PhaseSteps]
    audits: list[_report.AuditReport]
    lacks_masters: bool
    repeat: Callable[[int], _trials.Trial]
    gradient_budget: float = 0.0
    trial: _trials.Trial | None = None
    note: str = ""

    @property
    def scale(self) -> float:
        """Smallest loss scale of the runs."""
        return min(min(record.loss_scales) for record in self.records)

    def findings(self, *checks: str) -> list[Finding]:
        """Returns the findings of some checks of the audit: errors, then warnings, by count."""
        findings = [each for audit in self.audits for each in (*audit.errors, *audit.warnings)]
        findings = [each for each in findings if each.check in checks]
        return sorted(findings, key=lambda each: (each.severity != "error", -each.count))


Diagnosis = tuple[float, _rows.Cause] | None


def diagnose(trained: Trained, gradient_budget: float) -> tuple[_rows.Cause, ...]:
    """Returns the causes that the measurements support, the most important first.

    If there is none, and gradients were compared, the only item is the location of the error.
    """
    evidence = trained._replace(gradient_budget=gradient_budget)
    rows = evidence.result.gradients
    try:
        trial = trained.repeat(_trials.step_to_repeat(rows)) if rows else None
        evidence = evidence._replace(trial=trial)
    except (TypeError, ValueError, NotImplementedError) as error:
        # A step that cannot be emulated does not invalidate the verdict.
        note = f"The step was not repeated in FP32: {type(error).__name__}: {str(error)[:200]}"
        evidence = evidence._replace(note=note)
    # Lines whose gradients underflow, and modules whose gradients become zero, are effects of it.
    first = _underflow(evidence)
    diagnoses = [each(evidence) for each in (_masters, _overflow, _skipped)]
    diagnoses += [first or _lines(evidence), *_patterns(evidence, is_underflow=first is not None)]
    supported = list(filter(None, diagnoses))
    supported.sort(key=lambda diagnosis: -diagnosis[0])
    causes = tuple({cause.id: cause for _, cause in reversed(supported)}.values())[::-1]
    return causes if causes or not rows else (_located(evidence),)


# ---------------------------------------------------------------------------
# Loss scale and masters
# ---------------------------------------------------------------------------


def _underflow(evidence: Trained) -> Diagnosis:
    """Finds gradients that agree if float16 has the range of FP32."""
    trial = evidence.trial
    share = max((row.underflow for row in evidence.result.gradients), default=0.0)
    if trial is None or not trial.uses_float16 or share < _UNDERFLOW:
        return None
    before, after = (_trials.finite(x, "error") for x in (trial.rounded, trial.wide_range))
    if not math.isfinite(before) or not after < _trials.SHARE * before:
        return None
    is_missing = bool(evidence.findings("missing_loss_scale"))
    cause = "without loss scaling" if is_missing else f"with a loss scale of {evidence.scale:g}"
    return before + 2, _rows.Cause(
        id="fp16_underflow",
        summary=(
            f"training {cause}: {_rows.percent(share)} of the gradient elements underflow to zero"
        ),
        evidence=(
            f"The gradient has an error of {_rows.percent(before)}, and of "
            f"{_rows.percent(trial.wide_range.error)} if float16 had the range of FP32."
        ),
        fix="recipe = recipe.replace(loss_scale=jaxmp.DynamicLossScale())",
    )


def _masters(evidence: Trained) -> Diagnosis:
    # Updates of zero leave parameters unchanged in every dtype.
    rows = [row for row in evidence.result.gradients if row.update_ratio != 0]
    share = max((row.stalled - row.reference_stalled for row in rows), default=0.0)
    if not evidence.lacks_masters or share < _STALLED:
        return None
    return share, _rows.Cause(
        id="missing_masters",
        summary=(
            f"16-bit parameters without FP32 masters: {_rows.percent(share)} of the updates are "
            "below half a ulp"
        ),
        evidence=(
            f"A step leaves {_rows.percent(share)} more of the parameters with a nonzero gradient "
            "unchanged than in the reference."
        ),
        fix='recipe = recipe.replace(master="fp32")',
    )


def _overflow(evidence: Trained) -> Diagnosis:
    broken = [r for r in evidence.result.modules if r.activation_error == math.inf]
    if not broken:
        return None
    first = min(broken, key=lambda row: (row.step, row.order))
    return 1.4, _rows.Cause(
        id="overflow",
        summary=f"the output of {module_text(first.module)} is not finite",
        evidence=f"At step {first.step}, on the parameters of the reference, whose output is.",
        fix='recipe = jaxmp.load_recipe("bf16")  # or an FP32 rule for this module',
    )


def _skipped(evidence: Trained) -> Diagnosis:
    """Finds steps that were skipped while the loss scale was too large."""
    training, share = evidence.result.training, evidence.result.training.skipped_share
    is_finite = all(math.isfinite(record.losses[-1]) for record in evidence.records)
    if not training.skipped or not is_finite:
        return None
    low, _ = training.final_loss_scale
    scale = f"until the loss scale had fallen to {low:g}"
    fix = f"recipe = recipe.replace(loss_scale=jaxmp.DynamicLossScale({low:g}))"
    if share == 1:
        scale = f"with a loss scale of {low:g}"
        fix = "recipe = recipe.replace(loss_scale=jaxmp.DynamicLossScale())"
    return share, _rows.Cause(
        id="skipped_steps",
        summary=f"{_rows.percent(share)} of the steps were skipped {scale}",
        evidence=(
            f"{training.skipped} steps were skipped in all seeds, {training.skipped_after_warmup} "
            "of them after the first tenth of the training. In a short run, such steps delay the "
            "loss curve."
        ),
        fix=fix,
    )


# ---------------------------------------------------------------------------
# Roundings
# ---------------------------------------------------------------------------

# Check of the audit -> what a line with this finding computes.
_COMPUTED = {
    "softmax_16bit": "a softmax",
    "loss_16bit": "a loss",
    "norm_16bit": "a norm or its statistics",
    "accumulator_16bit": "gradients accumulated over microbatches",
    "reduction_16bit": "a sum or product",
    "exp_16bit": "an exponential",
    "rounded_input": "an angle",
}
_QUANTITIES = {"error": "gradient", "loss_error": "loss", "update_error": "update"}


def _lines(evidence: Trained) -> Diagnosis:
    """Finds the source line whose roundings alone cause an error that vanishes in FP32."""
    trial = evidence.trial
    if trial is None:
        return None
    # A loss that is not finite precedes its gradient, which may overflow by the loss scale, too.
    is_lost = not math.isfinite(trial.rounded.loss_error)
    fields = sorted(_QUANTITIES, key=lambda field: is_lost and field != "loss_error")
    for field, quantity in ((field, _QUANTITIES[field]) for field in fields):
        error = trial.explained(field)
        alone = [(_trials.finite(line.row, field), line) for line in trial.lines]
        # What is not finite counts as much as the largest finite error, and at least as 100 %.
        limit = max([1.0, *(value for value, _ in alone if math.isfinite(value))])
        top = max((min(value, limit) for value, _ in alone), default=0.0)
        if not error or top < _trials.SHARE * min(error, limit):
            continue
        # Later lines may have the effect of an earlier one, which is the origin.
        causes = [pair for pair in alone if pair[0] >= _ORIGIN * top]
        score = 0.4 if math.isinf(error) and _is_scale(evidence) else min(error, 1.5)
        (value, line), *later = causes
        effect = _effect(trial, quantity, value, line.origin.dtype)
        cause = _line_cause(evidence.findings(*_COMPUTED), trial, line, effect)
        also = ", ".join(each.origin.location or each.module for _, each in later)
        more = f" So do those of each of these lines alone: {also}." if later else ""
        return score, dataclasses.replace(cause, evidence=f"{cause.evidence}{more}")
    return None


def _is_scale(evidence: Trained) -> bool:
    """Returns True if a loss scale may be the cause of an overflow: the forward pass agrees."""
    outputs = [row.activation_error or 0.0 for row in evidence.result.modules]
    return evidence.scale > 1 and max(outputs, default=0.0) < evidence.gradient_budget


def _effect(trial: _trials.Trial, quantity: str, error: float, dtype: str) -> str:
    """Returns the effect of one line on the gradient, the loss or the update."""
    if math.isfinite(error):
        return f"changes the {quantity} by {_rows.percent(error)}"
    is_range = math.isfinite(trial.wide_range.error + trial.wide_range.update_error)
    reason = f": values are outside of the range of {dtype}" if is_range else ""
    return f"makes the {quantity} infinite or NaN{reason}"


def _line_cause(
    findings: list[Finding], trial: _trials.Trial, line: _trials.LineTrial, effect: str
) -> _rows.Cause:
    """Returns the cause of a line, with the first finding of the audit there."""
    origin = line.origin
    # A finding without a line of its own has that of the step's definition.
    own = {each.origin.location for each in trial.lines}
    is_here = lambda each: (each.location if each.location in own else "") == origin.location
    finding = next(filter(is_here, findings), None)
    module = module_text(line.module)
    where = f"{module} ({origin.location})" if origin.location else module
    computed = _COMPUTED[finding.check] if finding else "an operation"
    if finding and finding.check == "accumulator_16bit" and "gradients" not in finding.message:
        computed = "a value that the iterations of a loop update"
    text = f"{computed} in {origin.dtype}"
    if origin.source:
        finding, verb = None, "are" if origin.source == "integers" else "is"
        text = f"{origin.source} {verb} rounded to {origin.dtype}"
    return _rows.Cause(
        id="rounding" if finding is None else finding.check,
        summary=f"{text} in {where}, which alone {effect}",
        evidence=(
            f"{'' if finding is None else f'{finding.message} '}On the same parameters and batch, "
            "the error vanishes if all operations are computed in FP32, and the roundings of this "
            "line alone cause it."
        ),
        fix=_line_fix(origin, module, where) if finding is None else finding.fix,
    )


def _line_fix(origin: _trials.LineOrigin, module: str, where: str) -> str:
    """Returns code that computes a line in FP32."""
    if origin.dtype.startswith("float8"):
        return f'jaxmp.Rule({module!r}, "o=f32,matmul=default", why="its values do not fit FP8")'
    if origin.source.endswith("' of the batch"):
        kind, name, _ = origin.source.split("'")
        name = name.rpartition("/")[2]
        if kind:  # a policy casts no integers
            return f"{name} = {name}.astype(jnp.float32)  # instead of the cast in {where}"
        return f"jaxmp.Rule('', keep_inputs=[{name!r}])  # or without the cast in {where}"
    return f"x = x.astype(jnp.float32)  # before {where}"


# ---------------------------------------------------------------------------
# Patterns
# ---------------------------------------------------------------------------


def _patterns(evidence: Trained, *, is_underflow: bool) -> list[Diagnosis]:
    """Returns the forms of differences: those of states, and others at their first step.

    At later steps, the candidate's optimizer has a state of its own. Gradients that underflow are
    zero.
    """
    patterns = evidence.result.patterns
    patterns = [each for each in patterns if not (is_underflow and each.id == "zero_gradient")]
    first = min((each.step for each in patterns if each.id != "state"), default=0)
    return [
        (
            pattern.error,
            _rows.Cause(
                id=pattern.id,
                summary=pattern.text + _as_scale(pattern.factor, evidence.scale),
                evidence=f"It was measured at step {pattern.step}, on the reference's parameters.",
                fix=_FIXES[pattern.id],
            ),
        )
        for pattern in patterns
        if pattern.id == "state" or pattern.step == first
    ]


def _as_scale(factor: float, scale: float) -> str:
    """Returns the meaning of a factor that is the loss scale or its reciprocal; otherwise ""."""
    is_unit = lambda value: scale != 1 and abs(value - 1) < 0.01
    twice = ": gradients are unscaled twice" if is_unit(factor * scale) else ""
    return ": gradients are not unscaled" if is_unit(factor / scale) else twice


_STEP = "loss, grads = state.value_and_grad(loss_fn)(batch)"
_FIXES = {
    "gradient_factor": f"{_STEP}  # the mean over batches, unscaled once",
    "update_factor": "tx = recipe.optimizer(tx)  # with the same learning rate for every recipe",
    "clipping": "tx = recipe.optimizer(tx)  # with the same clipping for every recipe",
    "weight_decay": "tx = recipe.optimizer(tx)  # with the same weight decay for every recipe",
    "zero_gradient": f"{_STEP}  # a loss_fn without stop_gradient",
    "state": "average = jaxmp.optim.fp32_copy(average)  # and return each new one with the state",
}


# ---------------------------------------------------------------------------
# Location of an error without a known cause
# ---------------------------------------------------------------------------


def _located(evidence: Trained) -> _rows.Cause:
    """Returns where the error arises: in the update, in a module, or after the compared steps."""
    rows, origin = evidence.result.gradients, evidence.result.origin
    error = max((row.error for row in rows), default=0.0)
    cause = None if evidence.trial is None else _without_roundings(evidence.trial)
    if cause is not None:
        return cause
    is_changed = lambda row: abs(row.update_ratio - 1) > _CHANGED or math.isinf(row.update_error)
    changed = list(filter(is_changed, rows))
    if changed and error <= evidence.gradient_budget:
        row = max(changed, key=lambda row: row.update_error)
        size = f"{row.update_ratio:.3g} times as large as that of the reference"
        size = size if math.isfinite(row.update_ratio) else "not finite"
        findings = evidence.findings("optimizer_state_16bit")
        fix = "tx = recipe.optimizer(tx)  # FP32 moments, masters and gradient norms"
        return _rows.Cause(
            id="update",
            summary=(
                f"gradients agree (error {_rows.percent(error)}), and the update of step "
                f"{row.step} is {size if row.update_ratio else 'zero'}"
            ),
            evidence=(
                "On the same parameters and batch, the loss and its gradient agree, so the error "
                "arises after them: in the optimizer's state or in its arithmetic. "
                f"{' '.join(each.message for each in findings[:1])} {evidence.note}"
            ).strip(),
            fix=findings[0].fix if findings else fix,
        )
    module = origin.growth or origin.forward
    if module and error > evidence.gradient_budget:
        grows = f" and grows most in {origin.growth}" if origin.growth else ""
        return _rows.Cause(
            id="module",
            summary=f"the error first appears in the output of {origin.forward}{grows}",
            evidence=f"{origin.text} {evidence.note}".strip(),
            fix=f'jaxmp.Rule({module!r}, "c=f32", why="its error is too large in 16 bits")',
        )
    return _rows.Cause(
        id="unknown",
        summary=f"gradients agree at the compared steps (error {_rows.percent(error)})",
        evidence="The error accumulates over many steps, or begins after these steps.",
        fix="report = jaxmp.validate(make_run, steps=500, compare_steps=[0, 100, 200, 300, 499])",
    )


def _without_roundings(trial: _trials.Trial) -> _rows.Cause | None:
    """Returns the first difference that remains with all operations in FP32."""
    exact, modules = trial.exact, trial.modules
    outputs = [
        row for row in modules if row.order >= 0 and (row.activation_error or 0) > _DIFFERENT
    ]
    if outputs:
        first = min(outputs, key=lambda row: row.order)
        where, error = f"the output of {module_text(first.module)}", first.activation_error or 0.0
    elif exact.loss_error > _DIFFERENT:
        where, error = "the loss", exact.loss_error
    elif _trials.finite(exact, "error"):
        worst = max(modules, key=lambda row: row.gradient_error or 0.0)
        where, error = f"the gradient of {module_text(worst.module)}", worst.gradient_error or 0.0
    else:
        return None
    return _rows.Cause(
        id="module",
        summary=(
            f"with all operations in FP32, {where} is the first to differ, by "
            f"{_rows.percent(error)}"
        ),
        evidence=(
            f"At step {exact.step}, on the same parameters and batch, what precedes it agrees, so "
            "the candidate computes something else there."
        ),
        fix="# Compare the code of both runs there: the difference is not caused by 16 bits.",
    )


# ---------------------------------------------------------------------------
# Origin
# ---------------------------------------------------------------------------


def find_origin(modules: Sequence[_rows.ModuleRow]) -> _rows.ErrorOrigin:
    """Finds the modules in which the error first appears, grows most, and is largest."""
    steps = {row.step for row in modules}
    if not steps:
        return _rows.ErrorOrigin()
    rows = [row for row in modules if row.step == min(steps)]
    forward = sorted((row for row in rows if row.order >= 0), key=lambda row: row.order)
    forward = [row for row in forward if row.activation_error is not None]
    first = next((row for row in forward if row.activation_error), None)
    growth, factor = None, _GROWTH
    for before, after in itertools.pairwise(forward):
        ratio = (after.activation_error or 0.0) / max(before.activation_error or 0.0, 1e-12)
        if ratio > factor and before.activation_error:
            growth, factor = after, ratio
    trained = [row for row in rows if row.gradient_error is not None]
    backward = max(trained, key=lambda row: row.gradient_error or 0.0, default=None)
    name = lambda row: "" if row is None else module_text(row.module)
    texts = []
    if first is not None:
        size = _rows.percent(first.activation_error)
        texts.append(f"The error first appears in the output of {name(first)} ({size})")
    if growth is not None:
        size = _rows.percent(growth.activation_error)
        texts.append(f"it grows by a factor of {factor:.3g} in {name(growth)} (to {size})")
    if backward is not None:
        size = _rows.percent(backward.gradient_error)
        texts.append(f"the gradient with the largest error is that of {name(backward)} ({size})")
    return _rows.ErrorOrigin(
        forward=name(first),
        growth=name(growth),
        backward=name(backward),
        text="; ".join(texts) + "." if texts else "",
    )
