"""Budgets of a validation, and the choice of the deciding metric."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from jaxmp._recipe import Recipe
from jaxmp._validate._rows import MetricChoice, TrainingRecord
from jaxmp.errors import ValidationError, did_you_mean

LOSS = "loss"
# Below this share of its initial value, a held-out loss is compared in absolute terms.
SMALL_LOSS = 0.1
# Last parts of the names of metrics that are better if larger.
_HIGHER = ("accuracy", "acc", "top1", "top5", "f1", "auc", "bleu", "precision", "recall", "score")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Largest differences from the reference with which a candidate passes.

    Args:
      loss: relative increase of the held-out loss and of the final training loss. If the held-out
        loss is too small for ratios, the budget is this share of the loss before training.
      accuracy: decrease of the held-out accuracy, as a fraction.
      gradient: relative error of the gradient of all parameters on the reference's parameters, as
        the median over the compared steps.
      skipped: share of skipped steps after the first tenth of the training.

    Example:
      >>> Budget(loss=0.01).gradient
      0.1
    """

    loss: float = 0.005
    accuracy: float = 0.01
    gradient: float = 0.1
    skipped: float = 0.05

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or not 0 < value <= math.inf:
                raise ValidationError(
                    f"Budget({field.name}={value!r}): a budget is a positive number, such as "
                    f"Budget({field.name}={field.default})."
                )


# By the narrowest format of the recipe's matmuls. Healthy gradients in 16 bits have errors of up to
# 1 % in a byte-level GPT, and of 6 % in a CNN with batch statistics (docs/validate.md).
DEFAULTS: Mapping[str, Budget] = {
    "fp8": Budget(loss=0.01, gradient=0.15),
    "16-bit": Budget(),
    "fp32": Budget(loss=0.005, gradient=0.01),
}

BudgetsLike: TypeAlias = float | Budget | Mapping[str, float | Budget] | None


def format_of(recipe: Recipe) -> str:
    """Returns "fp8", "16-bit" or "fp32": the narrowest format in which a recipe multiplies."""
    policies = [recipe.policies.default, *recipe.policies.rules]
    if any(getattr(policy, "matmul", None) == "fp8" for policy in policies):
        return "fp8"
    dtypes = {str(getattr(policy, "compute_dtype", None)) for policy in policies}
    return "16-bit" if dtypes & {"bfloat16", "float16"} else "fp32"


def resolve_budgets(budgets: BudgetsLike, candidates: Mapping[str, Recipe]) -> dict[str, Budget]:
    """Returns the budget of each candidate.

    Args:
      budgets: None for the defaults; a number for the loss of all candidates; a `Budget`; or a
        dict of numbers and `Budget`s by candidate.
      candidates: recipes by name.

    Raises:
      ValidationError: if a name is unknown or a budget is not a positive number.
    """
    named = budgets if isinstance(budgets, Mapping) else dict.fromkeys(candidates, budgets)
    for name in named:
        if name not in candidates:
            raise ValidationError(
                f"budgets[{name!r}] belongs to no candidate.{did_you_mean(name, candidates)} "
                f"Candidates: {', '.join(map(repr, candidates))}."
            )
    resolved = {}
    for name, recipe in candidates.items():
        budget, default = named.get(name), DEFAULTS[format_of(recipe)]
        if isinstance(budget, Budget):
            resolved[name] = budget
        else:
            resolved[name] = (
                default if budget is None else dataclasses.replace(default, loss=budget)
            )
    return resolved


# ---------------------------------------------------------------------------
# Metric
# ---------------------------------------------------------------------------


def is_higher_better(metric: str) -> bool:
    """Returns True for accuracies and similar metrics, by the last part of the name."""
    return metric.lower().replace("-", "_").rpartition("_")[2] in _HIGHER


def choose_metric(reference: Sequence[TrainingRecord]) -> MetricChoice:
    """Chooses the metric that decides, from the evaluations of the reference.

    A held-out loss decides by its ratio to the reference, unless training has reduced it to less
    than 10 % of its initial value. The logarithm of such a loss depends on a few examples, and
    rounding changes it by several percent without any effect on the predictions.

    Raises:
      ValidationError: if the evaluation returns no metric.
    """
    metrics = list(reference[0].evaluations)
    if not metrics:
        raise ValidationError(
            'evaluate returned no metrics. Return the held-out loss, or {"loss": ...}.'
        )
    accuracies = [metric for metric in metrics if is_higher_better(metric)]
    if LOSS not in metrics:
        name = (accuracies or metrics)[0]
        scale = "absolute" if accuracies else "relative"
        return MetricChoice(
            name=name, scale=scale, reason=f"The evaluation returns no loss; {name} decides."
        )
    first, last = initial_loss(reference), _mean(reference, LOSS, -1)
    if not last < SMALL_LOSS * first:
        return MetricChoice(
            name=LOSS, scale="relative", reason="The ratio of the held-out losses decides."
        )
    reason = (
        f"Training reduces the held-out loss from {first:.3g} to {last:.3g}, which is so small "
        "that ratios are meaningless, so absolute differences decide"
    )
    if accuracies:
        return MetricChoice(
            name=accuracies[0],
            scale="absolute",
            reason=f"{reason}: first the {accuracies[0]}, then the loss.",
        )
    return MetricChoice(name=LOSS, scale="absolute", reason=f"{reason}.")


def initial_loss(reference: Sequence[TrainingRecord]) -> float:
    """Returns the mean held-out loss before training; the first training loss without one."""
    if LOSS in reference[0].evaluations:
        return _mean(reference, LOSS, 0)
    return float(np.mean([record.losses[0] for record in reference]))


def _mean(records: Sequence[TrainingRecord], metric: str, index: int) -> float:
    return float(np.mean([record.evaluations[metric][index] for record in records]))
