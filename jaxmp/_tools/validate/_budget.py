"""Budgets of a validation, and the metrics that have a verdict, with direction and scale."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from jaxmp import _core
from jaxmp._policies import _device, _resolve
from jaxmp._policies._recipe import Recipe
from jaxmp._tools.validate._rows import MAX, MIN, TWO_SIDED, MetricChoice, TrainingRecord
from jaxmp.errors import ValidationError

LOSS, TRAINING = "loss", "training_loss"
# Below this share of its initial value, a loss is compared in absolute terms.
SMALL_LOSS = 0.1
# Share of the steps at the end over which the training loss is averaged.
_LAST = 0.1
# Names of metrics with a known direction (docs/validate.md lists them), after these prefixes.
PREFIXES = ("val", "valid", "validation", "test", "eval", "dev", "held", "out", "mean", "avg")
ACCURACIES = ("accuracy", "acc", "top1", "top5", "f1", "auc", "bleu", "precision", "recall")
HIGHER = ("reward", "return", "psnr", "ssim", "r2", "iou", "exact_match", "success_rate")
LOWER = ("loss", "nll", "mse", "rmse", "mae", "cross_entropy", "perplexity", "ppl", "wer", "cer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Largest differences from the reference with which a candidate passes.

    Args:
      loss: relative increase of the held-out loss and of the final training loss, and relative
        difference of other metrics. Where ratios are meaningless, the budget is this share of a
        magnitude that the report states, such as the loss before training.
      accuracy: decrease of the held-out accuracy, as a fraction.
      gradient: relative error of the gradient of all parameters on the reference's parameters, as
        the median over the compared steps.
      skipped: share of skipped steps after the first tenth of the training.
      loss_error: relative difference of the loss on the reference's parameters and batch, as the
        median over the compared steps. A larger one has the verdict "differs".
      relative: budgets of further metrics, or other ones, by name, as shares like `loss`.
      absolute: the same, in the unit of the metric. "training_loss" is the final training loss.

    Example:
      >>> Budget(loss=0.01).gradient
      0.1
      >>> Budget(relative={"perplexity": 0.02}, absolute={"reward": 5.0}).absolute["reward"]
      5.0
    """

    loss: float = 0.005
    accuracy: float = 0.01
    gradient: float = 0.1
    skipped: float = 0.05
    loss_error: float = 0.02
    relative: Mapping[str, float] = dataclasses.field(default_factory=dict)
    absolute: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_table = field.default is dataclasses.MISSING
            numbers = value.values() if isinstance(value, Mapping) else [value]
            is_positive = all(isinstance(x, (int, float)) and 0 < x <= math.inf for x in numbers)
            if not is_positive or is_table != isinstance(value, Mapping):
                raise ValidationError(
                    f"Budget({field.name}={value!r}): a budget is a positive number, such as "
                    f"Budget({field.name}={dict(reward=0.01) if is_table else field.default})."
                )
        for name in self.relative.keys() & self.absolute.keys():
            raise ValidationError(
                f"Budget has a relative and an absolute budget of {name!r}. Pass one of them: "
                f"Budget(absolute={{{name!r}: {self.absolute[name]!r}}})."
            )


# By the narrowest format of the recipe's matmuls.
DEFAULTS: Mapping[str, Budget] = {
    "fp8": Budget(loss=0.01, gradient=0.15, loss_error=0.05),
    "16-bit": Budget(),
    "fp32": Budget(loss=0.005, gradient=0.01, loss_error=0.01),
}

BudgetsLike: TypeAlias = float | Budget | Mapping[str, float | Budget] | None


def format_of(recipe: Recipe) -> str:
    """Returns "fp8", "16-bit" or "fp32": the narrowest format in which a recipe multiplies."""
    phases = [phase.policies for phase in recipe.split_phases()]
    if any(_resolve.matmul_scaling(policies) is not None for policies in phases):
        return "fp8"
    return "16-bit" if any(map(_device.computes_in_16_bits, phases)) else "fp32"


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
                f"budgets[{name!r}] belongs to no candidate.{_core.did_you_mean(name, candidates)} "
                f"Candidates: {', '.join(map(repr, candidates))}."
            )

    def resolve(budget: float | Budget | None, recipe: Recipe) -> Budget:
        default = DEFAULTS[format_of(recipe)]
        if budget is None or isinstance(budget, Budget):
            return budget or default
        return dataclasses.replace(default, loss=budget)

    return {name: resolve(named.get(name), recipe) for name, recipe in candidates.items()}


# ---------------------------------------------------------------------------
# Metrics
# ---------------------------------------------------------------------------


def direction_of(metric: str) -> str:
    """Returns "max" or "min" for a name of the documented lists, otherwise "two-sided".

    Example:
      >>> direction_of("val_accuracy"), direction_of("test/loss"), direction_of("recall@5")
      ('max', 'min', 'two-sided')
    """
    if is_accuracy(metric) or _plain(metric) in HIGHER:
        return MAX
    return MIN if _plain(metric) in LOWER else TWO_SIDED


def is_accuracy(metric: str) -> bool:
    """Returns True for shares of correct predictions, whose budget is `Budget.accuracy`."""
    return _plain(metric) in ACCURACIES


def _plain(metric: str) -> str:
    """Returns a name in lower case, without a prefix of `PREFIXES`."""
    name = re.sub(r"[^a-z0-9]+", "_", metric.lower())
    prefix, _, rest = name.partition("_")
    return _plain(rest) if rest and prefix in PREFIXES else name


def check_directions(metrics: Mapping[str, str]) -> dict[str, str]:
    """Returns the declared directions of metrics.

    Raises:
      ValidationError: if a direction is not "min", "max" or "two-sided".
    """
    allowed = (MIN, MAX, TWO_SIDED)
    if not isinstance(metrics, Mapping) or not all(each in allowed for each in metrics.values()):
        raise ValidationError(
            f"metrics={metrics!r}: pass the direction of each metric, 'min' if smaller values are "
            "better, 'max' or 'two-sided': metrics={'reward': 'max', 'loss': 'min'}."
        )
    return dict(metrics)


def check_metrics(
    record: TrainingRecord, directions: Mapping[str, str], budgets: Iterable[Budget]
) -> None:
    """Checks that an evaluation returns the metrics that have a direction or a tolerance.

    Raises:
      ValidationError: if it does not.
    """
    metrics = list(record.evaluations)
    for name in (*directions, *_tolerances(budgets)):
        if name not in metrics and (name != TRAINING or name in directions):
            raise ValidationError(
                f"evaluate returns no metric {name!r}, which metrics or budgets name."
                f"{_core.did_you_mean(name, metrics)} It returns {', '.join(map(repr, metrics))}."
            )


def _tolerances(budgets: Iterable[Budget]) -> list[str]:
    return [name for each in budgets for name in (*each.relative, *each.absolute)]


def choose_metrics(
    reference: Sequence[TrainingRecord],
    candidates: Sequence[TrainingRecord] = (),
    directions: Mapping[str, str] = MappingProxyType({}),
    budgets: Collection[Budget] = (),
) -> list[MetricChoice]:
    """Chooses the metrics that have a verdict, the deciding one first.

    The first declared metric decides. Without one, the held-out loss does, unless training has
    reduced it to less than 10 % of its initial value. The logarithm of such a loss depends on a few
    examples, and rounding changes it by several percent without any effect on the predictions, so
    that an accuracy decides, if there is one. The loss, all declared metrics, and those with a
    tolerance of their own have a verdict, too.

    Args:
      reference: records of the reference.
      candidates: records of all candidates.
      directions: declared directions by metric.
      budgets: budgets of all candidates.
    """
    metrics = list(reference[0].evaluations)
    absolute = {name for each in budgets for name in each.absolute}

    def choose(name: str) -> MetricChoice:
        return _choose(
            MetricChoice(name=name, direction=directions.get(name, direction_of(name))),
            f"held-out {name}",
            [np.asarray(record.evaluations[name]) for record in reference],
            [record.evaluations[name][-1] for record in candidates],
            name in absolute,
        )

    accuracies = [name for name in metrics if is_accuracy(name)]
    first = LOSS if LOSS in metrics else (accuracies or metrics)[0]
    names = [next(iter(directions), first), *([LOSS] if LOSS in metrics else []), *directions]
    deciding = choose(names[0])
    if names[0] == LOSS and deciding.scale == "absolute" and accuracies and not directions:
        names.insert(0, accuracies[0])
        reason = f"{deciding.reason} First the {accuracies[0]} decides, then the loss."
        deciding = dataclasses.replace(choose(accuracies[0]), reason=reason)
    elif LOSS not in metrics:
        reason = f"The evaluation returns no loss; {names[0]} decides. {deciding.reason}"
        deciding = dataclasses.replace(deciding, reason=reason.strip())
    names += _tolerances(budgets)
    others = [name for name in dict.fromkeys(names) if name in metrics]
    return [deciding, *(choose(name) for name in others if name != deciding.name)]


def choose_training(
    reference: Sequence[TrainingRecord],
    candidates: Sequence[TrainingRecord],
    budgets: Collection[Budget] = (),
) -> MetricChoice:
    """Chooses the scale of the training loss, from its curve in the reference.

    Args:
      reference: records of the reference.
      candidates: records of all candidates.
      budgets: budgets of all candidates.
    """
    return _choose(
        MetricChoice(name=TRAINING),
        "training loss",
        [smooth(record.losses) for record in reference],
        [final_loss(record) for record in candidates],
        any(TRAINING in each.absolute for each in budgets),
    )


def _choose(
    choice: MetricChoice,
    label: str,
    curves: Sequence[np.ndarray],
    finals: Sequence[float],
    is_absolute: bool,
) -> MetricChoice:
    """Adds the scale of a metric, its unit and the reason, from its curves in the reference."""
    values = np.concatenate(curves)
    if choice.name != TRAINING and is_accuracy(choice.name):
        unit = 100.0 if values.max() > 1.5 else 1.0
        return dataclasses.replace(choice, scale="absolute", unit=unit)
    first, last = (float(np.mean([curve[index] for curve in curves])) for index in (0, -1))
    if min([*values, *(value for value in finals if math.isfinite(value))]) <= 0:
        low, high = np.quantile(values, (0.1, 0.9))
        unit = float(high - low) or float(np.max(np.abs(values))) or 1.0
        why = f"The {label} is not positive throughout"
        origin = "the distance between the quantiles of 10 % and 90 % of its reference values"
    elif last < SMALL_LOSS * first:
        unit, origin = first, "its initial value"
        why = (
            f"Training reduces the {label} from {first:.3g} to {last:.3g}, which is so small that "
            "ratios are meaningless"
        )
    elif is_absolute:
        unit, origin = last, "its final value in the reference"
        why = f"A budget of the {label} is absolute"
    else:
        noun = "held-out losses" if label == "held-out loss" else f"values of the {label}"
        return dataclasses.replace(choice, unit=last, reason=f"The ratio of the {noun} decides.")
    reason = f"{why}, so absolute differences decide. Budgets are shares of {unit:.3g}, {origin}."
    return dataclasses.replace(choice, scale="absolute", unit=unit, reason=reason)


def limit_of(metric: MetricChoice, budget: Budget) -> float:
    """Returns the budget of a metric in the unit of its differences."""
    if metric.name in budget.absolute:
        return budget.absolute[metric.name]
    default = budget.accuracy if is_accuracy(metric.name) else budget.loss
    share = budget.relative.get(metric.name, default)
    if metric.scale == "absolute":
        return share * metric.unit
    # The logarithm of the ratio of the worse value to the better one.
    return -math.log1p(-min(share, 1 - 1e-9)) if metric.direction == MAX else math.log1p(share)


def final_loss(record: TrainingRecord) -> float:
    """Returns the mean training loss of the last tenth of the steps."""
    last = max(1, round(_LAST * len(record.losses)))
    return float(np.mean(record.losses[-last:]))


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Returns the running mean of the losses over a twentieth of the steps."""
    width = max(1, len(losses) // 20)
    return np.convolve(np.asarray(losses, np.float64), np.ones(width) / width, mode="valid")
