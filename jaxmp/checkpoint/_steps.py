"""Steps of a training run: their directories, their metrics, and which of them are kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from jaxmp.checkpoint import _foreign
from jaxmp.checkpoint._handler import ITEM
from jaxmp.checkpoint._manifest import read_manifest
from jaxmp.errors import CheckpointError


class Steps:
    """Steps in the directory of a run; also orbax's policy for the steps to keep.

    Args:
      directory: directory of the run; each step has a subdirectory.
      keep: number of latest steps to keep; None: all.
      best_metric: name of a metric; the best step by it is kept too.
      best_mode: "min" or "max": the best value of the metric is the smallest or the largest.

    Attributes:
      metrics: step -> metrics, as far as they are known without reading a manifest.
    """

    def __init__(
        self, directory: epath.Path, keep: int | None, best_metric: str | None, best_mode: str
    ) -> None:
        self.directory = directory
        self.best_metric = best_metric
        self.metrics: dict[int, Mapping[str, float]] = {}
        self._keep, self._best_mode = keep, best_mode

    def path(self, step: int) -> epath.Path:
        """Returns the directory of a step."""
        return self.directory / str(step)

    def complete(self) -> list[int]:
        """Returns the complete steps in ascending order."""
        if not self.directory.exists():
            return []
        # Orbax renames a directory to its final name when it is complete. Object stores cannot
        # rename, so there it writes a file at the end.
        is_store = "://" in str(self.directory)
        paths = [path for path in self.directory.iterdir() if re.fullmatch(r"\d+", path.name)]
        return sorted(
            int(path.name)
            for path in paths
            if not is_store or (path / "commit_success.txt").exists()
        )

    def find(self, step: int | None) -> int | None:
        """Returns the step to read; None for a checkpoint in the directory that has no step.

        Args:
          step: the step; None: the latest.

        Raises:
          CheckpointError: if there is no such checkpoint.
        """
        steps = self.complete()
        if step is not None and step in steps:
            return step
        if step is None and steps:
            return steps[-1]
        if _foreign.find(self.directory, step) is not None:
            return step
        listed = f"the steps {', '.join(map(str, steps))}" if steps else "no step"
        missing = "a checkpoint" if step is None else f"step {step}"
        raise CheckpointError(f"{self.directory} does not contain {missing}. It has {listed}.")

    def best(self, steps: Iterable[int]) -> int | None:
        """Returns the step with the best metric, the latest among equals; None: no step has it."""
        sign = 1 if self._best_mode == "min" else -1
        name = str(self.best_metric)
        values = {step: self._metrics_of(step).get(name, math.nan) for step in steps}
        scores = {step: sign * value for step, value in values.items() if not math.isnan(value)}
        return min(scores, key=lambda step: (scores[step], -step), default=None)

    def _metrics_of(self, step: int) -> Mapping[str, float]:
        if step not in self.metrics:
            try:
                self.metrics[step] = read_manifest(self.path(step) / ITEM).metrics
            except (CheckpointError, OSError):
                self.metrics[step] = {}
        return self.metrics[step]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        """Returns for each checkpoint whether orbax keeps it: the latest steps and the best one."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        if self._keep is None:
            return [True] * len(steps)
        kept = set(sorted(steps)[-self._keep :])
        if self.best_metric is not None:
            kept.add(self.best(steps))
        return [step in kept for step in steps]
