"""Metrics of the difference of two programs' outputs, in FP64 on the host.

Frameworks for reinforcement learning measure the same quantities of sampled tokens: NeMo RL the
mean of exp(|difference|) (`token_mult_prob_error`) and KL divergences, verl and TRL the KL
divergence with its K1 and K3 estimators and the largest ratio, MaxText a band of the ratio.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

LOG_PROBS, LOGITS, OUTPUTS = "log_probs", "logits", "outputs"
KINDS = (LOG_PROBS, LOGITS, OUTPUTS)
# Bands of the ratio of serving and training, by the name of the field of a row.
BANDS = {"band": (0.999, 1.002), "within_1": (0.99, 1.01), "within_5": (0.95, 1.05)}
# Rows of a table of positions.
_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityRow:
    """Difference of the outputs of some positions.

    Args:
      positions: first and last position, such as "0-15"; "all".
      count: compared values; for logits, distributions.
      band: share of the values whose ratio of serving and training is in 0.999 to 1.002.
      within_1: the same for 0.99 to 1.01.
      within_5: the same for 0.95 to 1.05.
      difference: mean absolute difference, of log-probabilities in nats.
      mult_error: mean of exp(absolute difference); 0 for outputs that are not log-probabilities.
      kl: KL(serving || training) in nats; 0 for other outputs. It is exact for logits. For tokens
        that serving has sampled, it is the K3 estimate, as in verl: the mean of
        ratio - 1 - log(ratio), with the ratio of training and serving.
      largest: the ratio that is farthest from 1.
    """

    positions: str
    count: int
    band: float
    within_1: float
    within_5: float
    difference: float
    mult_error: float
    kl: float
    largest: float


def rows_of(train: np.ndarray, serve: np.ndarray, kind: str) -> list[ParityRow]:
    """Returns the differences of all positions, and then those of ranges of positions.

    Args:
      train, serve: outputs `[..., position]`; logits `[..., position, vocabulary]`. Values that are
        NaN in both are left out.
      kind: "log_probs", "logits" or "outputs".
    """
    x, y = (np.asarray(each, np.float64) for each in (train, serve))
    if kind == LOGITS:
        x, y = _log_softmax(x), _log_softmax(y)
    axis = x.ndim - 1 - (kind == LOGITS)
    length = x.shape[axis] if axis > 0 or (axis == 0 and kind != OUTPUTS) else 0
    parts = [("all", x, y)]
    edges = sorted({round(n * length / _ROWS) for n in range(_ROWS + 1)}) if length > 1 else []
    for start, stop in itertools.pairwise(edges):
        label = f"{start}-{stop - 1}" if stop - start > 1 else str(start)
        part = range(start, stop)
        parts.append((label, np.take(x, part, axis), np.take(y, part, axis)))
    return [_row(label, a, b, kind) for label, a, b in parts]


def _row(label: str, x: np.ndarray, y: np.ndarray, kind: str) -> ParityRow:
    used = ~(np.isnan(x) & np.isnan(y))
    # Shares and means are those of tokens that the serving program samples.
    weights = np.exp(y) if kind == LOGITS else used.astype(np.float64)
    used &= weights > 0
    count = int(np.prod(x.shape[:-1])) if kind == LOGITS else int(used.sum())
    x, y, weights = x[used], y[used], weights[used]
    mean = lambda z: float(np.sum(weights * z) / weights.sum()) if z.size else 0.0
    with np.errstate(all="ignore"):
        difference = np.where(x == y, 0.0, y - x)
        ratio = np.where(x == y, 1.0, y / x) if kind == OUTPUTS else np.exp(difference)
        distance = np.where(ratio > 0, np.abs(np.log(ratio)), np.inf)
        estimate = difference + (0 if kind == LOGITS else np.expm1(-difference))
    is_log = kind != OUTPUTS
    return ParityRow(
        positions=label,
        count=count,
        **{name: mean((low <= ratio) & (ratio <= high)) for name, (low, high) in BANDS.items()},
        difference=mean(np.abs(difference)),
        mult_error=mean(np.exp(np.abs(difference))) if is_log else 0.0,
        kl=max(mean(estimate), 0.0) if is_log else 0.0,
        largest=float(ratio[np.argmax(distance)]) if ratio.size else 1.0,
    )


def _log_softmax(x: np.ndarray) -> np.ndarray:
    top = np.max(x, axis=-1, keepdims=True)
    return x - top - np.log(np.sum(np.exp(x - top), axis=-1, keepdims=True))
