"""Diagnoses the cause of a failure from measurements and from the audit of the training step.

Each function below returns `(score, Cause)` or None. The score estimates the relative error of the
gradients or of the updates that the cause explains; the causes of a report are sorted by it.
Names of recipes are not used.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from jaxmp._audit import AuditReport, Finding
from jaxmp._audit._section import abbreviate
from jaxmp._validate._probe import Measurements
from jaxmp._validate._rows import Cause, ErrorOrigin, ModuleRow, TrainingRow

# Smallest shares of elements that count as a symptom.
_UNDERFLOW, _STALLED, _FLUSHED = 0.02, 0.05, 0.01
# Difference of the size of an update that counts as a symptom.
_CHANGED = 0.05
# Error of a module's output relative to that of its predecessor that counts as growth.
_GROWTH = 3.0


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything that a diagnosis may use.

    Args:
      measurements: differences at the compared steps.
      audit: audit of the candidate's step.
      training: comparison of the whole training.
      lacks_masters: True if a parameter is stored in 16 bits and has no FP32 master.
      scale: smallest loss scale of the runs.
      gradient_budget: largest error of the gradient that passes.
      is_finite: False if a loss of the candidate is not finite.
    """

    measurements: Measurements
    audit: AuditReport
    training: TrainingRow
    lacks_masters: bool
    scale: float
    gradient_budget: float
    is_finite: bool

    @property
    def gradient_error(self) -> float:
        """Largest relative error of the gradient."""
        return max((row.error for row in self.measurements.gradients), default=0.0)

    @property
    def uses_float16(self) -> bool:
        """True if the step multiplies in float16."""
        return any("float16" in (row.lhs, row.rhs) for row in self.audit.matmuls)

    def findings(self, *checks: str) -> list[Finding]:
        """Returns the errors of some checks of the audit, the most operations first."""
        errors = [each for each in self.audit.errors if each.check in checks]
        return sorted(errors, key=lambda each: -each.count)

    def activation_error(self, modules: Iterable[str]) -> float:
        """Returns the largest error of the outputs of some modules; of all if none is known."""
        rows = self.measurements.modules
        own = [row.activation_error for row in rows if row.module in set(modules)]
        errors = [error for error in own if error is not None]
        errors = errors or [row.activation_error or 0.0 for row in rows]
        return max(errors, default=0.0)


Diagnosis = tuple[float, Cause] | None


def diagnose(evidence: Evidence) -> tuple[Cause, ...]:
    """Returns the causes that the evidence supports, the most important first.

    If there is none, and gradients were compared, the only item is the location of the error.
    """
    results = [function(evidence) for function in _DIAGNOSES]
    supported = [result for result in results if result is not None]
    supported.sort(key=lambda result: -result[0])
    causes = tuple(cause for _, cause in supported)
    return causes if causes or not evidence.measurements.gradients else (_located(evidence),)


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %" if math.isfinite(value) else "infinite"


def _location(findings: Sequence[Finding]) -> str:
    modules = abbreviate(list(dict.fromkeys(each.module for each in findings)))
    lines = list(dict.fromkeys(each.location for each in findings if each.location))
    return f"{modules} ({lines[0]})" if lines else modules


# ---------------------------------------------------------------------------
# Scale, masters, accumulation
# ---------------------------------------------------------------------------


def _underflow(evidence: Evidence) -> Diagnosis:
    share = max((row.underflow for row in evidence.measurements.gradients), default=0.0)
    is_missing = bool(evidence.findings("missing_loss_scale"))
    if share < _UNDERFLOW or not evidence.uses_float16:
        return None
    cause = "without loss scaling" if is_missing else f"with a loss scale of {evidence.scale:g}"
    return share, Cause(
        id="fp16_underflow",
        summary=f"training {cause}: {_percent(share)} of the gradient elements underflow to zero",
        evidence=(
            f"{_percent(share)} of the elements that are nonzero in the reference are zero on the "
            "same parameters and batch."
        ),
        fix="recipe = recipe.replace(loss_scale=jaxmp.DynamicLossScale())",
    )


def _masters(evidence: Evidence) -> Diagnosis:
    # Updates of zero leave parameters unchanged in every dtype.
    rows = [row for row in evidence.measurements.gradients if row.update_ratio != 0]
    share = max((row.stalled - row.reference_stalled for row in rows), default=0.0)
    if not evidence.lacks_masters or share < _STALLED:
        return None
    return share, Cause(
        id="missing_masters",
        summary=(
            f"16-bit parameters without FP32 masters: {_percent(share)} of the updates are below "
            "half a ulp"
        ),
        evidence=(
            f"A step leaves {_percent(share)} more of the parameters with a nonzero gradient "
            "unchanged than in the reference."
        ),
        fix='recipe = recipe.replace(master="fp32")',
    )


def _moments(evidence: Evidence) -> Diagnosis:
    """Finds moments in 16 bits, if updates are not finite although the gradients are."""
    findings = evidence.findings("optimizer_state_16bit")
    gradients = evidence.measurements.gradients
    if not findings or evidence.is_finite or any(row.nonfinite for row in gradients):
        return None
    return 1.8, Cause(
        id="optimizer_state_16bit",
        summary="the optimizer's moments in 16 bits underflow, and updates are not finite",
        evidence=(
            "On the reference's parameters the gradients are finite, and the losses of the "
            f"training are not. {findings[0].message}"
        ),
        fix=findings[0].fix,
    )


def _accumulator(evidence: Evidence) -> Diagnosis:
    findings = evidence.findings("accumulator_16bit")
    if not findings:
        return None
    error, forward = evidence.gradient_error, evidence.activation_error(())
    # If the outputs of the modules are as wrong as the gradients, the sum is not the cause.
    score = error if forward < error / 2 else error / 10
    return score, Cause(
        id="accumulator_16bit",
        summary="gradients are accumulated over microbatches in 16 bits",
        evidence=(
            f"The gradient has an error of {_percent(error)}, and the outputs of the modules at "
            f"most {_percent(forward)}. {findings[0].message}"
        ),
        fix=findings[0].fix,
    )


# ---------------------------------------------------------------------------
# Operations in 16 bits
# ---------------------------------------------------------------------------


def _operation(identifier: str, checks: tuple[str, ...], text: str) -> Callable[..., Diagnosis]:
    def check(evidence: Evidence) -> Diagnosis:
        findings = evidence.findings(*checks)
        if not findings:
            return None
        modules = {each.module for each in findings}
        error = evidence.activation_error(modules)
        # The gradient with respect to the input of an operation is wrong where its output is, or
        # where it overflows.
        score = min(max(error, evidence.gradient_error / 2), 2.0)
        return score, Cause(
            id=identifier,
            summary=f"{text} in {_location(findings)}",
            evidence=(
                f"The outputs of these modules have an error of {_percent(error)}, and the "
                f"gradient one of {_percent(evidence.gradient_error)}. {findings[0].message}"
            ),
            fix=findings[0].fix,
        )

    return check


_softmax = _operation("softmax_16bit", ("softmax_16bit",), "a softmax in 16 bits")
_loss = _operation("loss_16bit", ("loss_16bit",), "a loss in 16 bits")
_norm = _operation("norm_statistics_16bit", ("norm_16bit",), "normalization statistics in 16 bits")


def _reduction(evidence: Evidence) -> Diagnosis:
    """Finds sums and powers in 16 bits, which the specific checks above exclude."""
    diagnosis = _operation(
        "reduction_16bit", ("reduction_16bit", "exp_16bit", "rounded_input"), "16-bit arithmetic"
    )(evidence)
    return None if diagnosis is None else (diagnosis[0] / 2, diagnosis[1])


def _statistics(evidence: Evidence) -> Diagnosis:
    stored = {
        path: error
        for path, (error, is_16bit) in evidence.measurements.statistics.items()
        if is_16bit and not error < 0.001
    }
    if not stored:
        return None
    path = max(stored, key=lambda key: stored[key])
    error = stored[path]
    return min(error, 2.0) + 0.1, Cause(
        id="norm_statistics_16bit",
        summary=f"batch statistics are stored in 16 bits in {path.rpartition(':')[0] or '(root)'}",
        evidence=(
            f"{path} differs by {_percent(error)} from the reference. A running average changes "
            "by less than half a ulp per step, so 16 bits do not store it."
        ),
        fix="# Store running averages in float32:\nmean = jnp.zeros(features, jnp.float32)",
    )


# ---------------------------------------------------------------------------
# FP8 and range
# ---------------------------------------------------------------------------


def _fp8(evidence: Evidence) -> Diagnosis:
    """Finds FP8 modules whose kernel loses elements, or whose output is large at the end."""
    fp8 = evidence.measurements.fp8
    modules = {key.rpartition(":")[0] for key in fp8}
    scores: dict[str, tuple[float, str]] = {}
    for key, (flushed, _) in fp8.items():
        module, _, operand = key.rpartition(":")
        if operand.partition("#")[0] == "kernel" and flushed >= _FLUSHED:
            text = f"{_percent(flushed)} of its weights become zero in FP8"
            scores[module] = max(scores.get(module, (0.0, "")), (flushed, text))
    last = _last_module(evidence.measurements.modules, modules)
    if last is not None:
        error = (last.activation_error or 0.0) * (last.activation_rms or 0.0)
        # An absolute error e of logits changes probabilities by a factor exp(e).
        if error > 0.2:
            text = f"its outputs reach {last.activation_amax:.3g}, and their error is {error:.2g}"
            scores[last.module] = max(scores.get(last.module, (0.0, "")), (min(error, 2.0), text))
    if not scores:
        return None
    module = max(scores, key=lambda key: scores[key])
    score, text = scores[module]
    return score, Cause(
        id="fp8_weights",
        summary=f"the weights of {module!r} are too large for FP8: {text}",
        evidence=f"The gradient has an error of {_percent(evidence.gradient_error)}.",
        fix=f'jaxmp.Rule({module!r}, "o=f32,matmul=default", why="large weights")',
    )


def _last_module(rows: Sequence[ModuleRow], modules: set[str]) -> ModuleRow | None:
    """Returns the row of the last module of the forward pass, if it multiplies in FP8."""
    known = [row for row in rows if row.activation_error is not None and row.module]
    if not known:
        return None
    last = max(known, key=lambda row: row.order)
    rows = [row for row in known if row.module == last.module and row.module in modules]
    return max(rows, key=lambda row: row.activation_error or 0.0, default=None)


def _overflow(evidence: Evidence) -> Diagnosis:
    rows = evidence.measurements.modules
    broken = [row for row in rows if row.activation_error == math.inf]
    share = max((row.nonfinite for row in evidence.measurements.gradients), default=0.0)
    if evidence.is_finite and not broken and (share == 0 or evidence.training.skipped):
        return None  # gradients that overflow with the loss scale alone are skipped
    first = min(broken, key=lambda row: (row.step, row.order)).module if broken else ""
    where = f"the output of {first or '(root)'}" if broken else "a gradient or the loss"
    return (1.5 if broken else 1.0), Cause(
        id="overflow",
        summary=f"{where} is not finite",
        evidence=(
            f"{_percent(share)} of the gradient elements are not finite on the reference's "
            f"parameters; {evidence.training.skipped} steps were skipped."
        ),
        fix='recipe = jaxmp.load_recipe("bf16")  # or an FP32 rule for this module',
    )


def _skipped(evidence: Evidence) -> Diagnosis:
    """Finds steps that were skipped while the loss scale was too large."""
    training, share = evidence.training, evidence.training.skipped_share
    if not training.skipped or not evidence.is_finite:
        return None
    low, _ = training.final_loss_scale
    scale = f"until the loss scale had fallen to {low:g}"
    fix = f"recipe = recipe.replace(loss_scale=jaxmp.DynamicLossScale({low:g}))"
    if share == 1:
        scale = f"with a loss scale of {low:g}"
        fix = "recipe = recipe.replace(loss_scale=jaxmp.DynamicLossScale())"
    return share, Cause(
        id="skipped_steps",
        summary=f"{_percent(share)} of the steps were skipped {scale}",
        evidence=(
            f"{training.skipped} steps were skipped in all seeds, {training.skipped_after_warmup} "
            "of them after the first tenth of the training. In a short run, such steps delay the "
            "loss curve."
        ),
        fix=fix,
    )


_DIAGNOSES: tuple[Callable[[Evidence], Diagnosis], ...] = (
    _underflow,
    _masters,
    _moments,
    _accumulator,
    _softmax,
    _loss,
    _norm,
    _reduction,
    _statistics,
    _fp8,
    _overflow,
    _skipped,
)


# ---------------------------------------------------------------------------
# Location of an error without a known cause
# ---------------------------------------------------------------------------


def _located(evidence: Evidence) -> Cause:
    """Returns where the error arises: in the update, in a module, or after the compared steps."""
    rows, error = evidence.measurements.gradients, evidence.gradient_error
    changed = [row for row in rows if abs(row.update_ratio - 1) > _CHANGED]
    if changed and error <= evidence.gradient_budget:
        row = max(changed, key=lambda row: abs(math.log(max(row.update_ratio, 1e-30))))
        size = f"{row.update_ratio:.3g} times as large as that of the reference"
        return Cause(
            id="update",
            summary=(
                f"gradients agree (error {_percent(error)}), and the update of step {row.step} is "
                f"{size if row.update_ratio else 'zero'}"
            ),
            evidence=(
                "On the same parameters and batch, the loss and its gradient agree, so the error "
                "arises after them: in clipping, in the optimizer's state or in its arithmetic."
            ),
            fix="tx = recipe.optimizer(tx)  # FP32 moments, masters and gradient norms",
        )
    origin = find_origin(evidence.measurements.modules)
    module = origin.growth or origin.forward
    if module and error > evidence.gradient_budget:
        grows = f" and grows most in {origin.growth}" if origin.growth else ""
        return Cause(
            id="module",
            summary=f"the error first appears in the output of {origin.forward}{grows}",
            evidence=origin.text,
            fix=f'jaxmp.Rule({module!r}, "c=f32", why="its error is too large in 16 bits")',
        )
    return Cause(
        id="unknown",
        summary=f"gradients agree at the compared steps (error {_percent(error)})",
        evidence="The error accumulates over many steps, or begins after these steps.",
        fix="report = jaxmp.validate(make_run, steps=500, compare_steps=[0, 100, 200, 300, 499])",
    )


# ---------------------------------------------------------------------------
# Origin
# ---------------------------------------------------------------------------


def find_origin(modules: Sequence[ModuleRow]) -> ErrorOrigin:
    """Finds the modules in which the error first appears, grows most, and is largest."""
    steps = {row.step for row in modules}
    if not steps:
        return ErrorOrigin()
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
    name = lambda row: "" if row is None else row.module or "(root)"
    texts = []
    if first is not None:
        texts.append(
            f"The error first appears in the output of {name(first)} "
            f"({_percent(first.activation_error or 0.0)})"
        )
    if growth is not None:
        texts.append(
            f"it grows by a factor of {factor:.3g} in {name(growth)} "
            f"(to {_percent(growth.activation_error or 0.0)})"
        )
    if backward is not None:
        texts.append(
            f"the gradient with the largest error is that of {name(backward)} "
            f"({_percent(backward.gradient_error or 0.0)})"
        )
    return ErrorOrigin(
        forward=name(first),
        growth=name(growth),
        backward=name(backward),
        text="; ".join(texts) + "." if texts else "",
    )
