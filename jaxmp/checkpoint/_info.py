"""Description of a checkpoint, without the values of its leaves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from etils import epath

from jaxmp._recipe import Recipe
from jaxmp.checkpoint._description import Leaf
from jaxmp.checkpoint._manifest import Manifest, parse_recipe


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """Contents of a checkpoint, without the values of its leaves.

    Attributes:
      step: the step.
      path: the directory.
      recipe_toml: the recipe under which the state was trained, as the text of a TOML file.
      master_layout: "none", "fp32", "packed" or, where several optimizers differ, "mixed".
      leaves: the arrays: `path`, `dtype`, `shape` and `role`.
      metrics: the metrics that were passed to `save`.
      extra: the further data that was passed to `save`, such as the position in the data.
      jaxmp_version: version of jaxmp that wrote it.
      jax_version: version of JAX that wrote it.
      data_bytes: size of the data files.
      nonfinite: paths of parameters, masters, averages and moments with NaN or infinity, which were
        saved with `allow_nonfinite=True`.
    """

    step: int
    path: str
    recipe_toml: str
    master_layout: str
    leaves: tuple[Leaf, ...]
    metrics: Mapping[str, float]
    extra: Any
    jaxmp_version: str
    jax_version: str
    data_bytes: int
    nonfinite: tuple[str, ...]

    @property
    def recipe(self) -> Recipe:
        """The recipe under which the state was trained."""
        return parse_recipe(self.recipe_toml)

    def __str__(self) -> str:
        metrics = ", ".join(f"{name} {value:g}" for name, value in self.metrics.items())
        rows = {
            "step": self.step,
            "recipe": self.recipe.name,
            "masters": self.master_layout,
            "leaves": f"{len(self.leaves)} ({self.data_bytes / 1e6:,.1f} MB)",
            "metrics": metrics or "none",
            "extra": json.dumps(self.extra),
            "written by": f"jaxmp {self.jaxmp_version}, JAX {self.jax_version}",
        }
        if self.nonfinite:
            rows["not finite"] = f"{len(self.nonfinite)} leaves, such as {self.nonfinite[0]}"
        return "\n".join(f"{name:<11} {value}" for name, value in rows.items())


def describe_manifest(path: epath.Path, manifest: Manifest) -> CheckpointInfo:
    """Returns the description of the checkpoint in the directory `path`."""
    names = {field.name for field in dataclasses.fields(CheckpointInfo)}
    return CheckpointInfo(
        path=str(path),
        master_layout=manifest.description.layout,
        leaves=manifest.description.leaves,
        data_bytes=sum(size for size, _ in manifest.files.values()),
        **{name: value for name, value in vars(manifest).items() if name in names},
    )
