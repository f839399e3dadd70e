"""Manifest of a checkpoint, written last and read first, and its public description."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxmp import __version__, _core
from jaxmp._core import ArrayLike
from jaxmp._policies import _load, _recipe
from jaxmp.checkpoint._description import Description, Leaf
from jaxmp.errors import CheckpointError, JaxmpError

FILE_NAME = "jaxmp_manifest.json"
# Changes with the fields below, and with those of `Description`.
FORMAT = 2
_FILE_THREADS = 8
_READ_BYTES = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Contents:
    """Fields of a manifest, and of its public description."""

    step: int
    recipe_toml: str
    metrics: Mapping[str, float]
    extra: Any
    jaxmp_version: str = __version__
    jax_version: str = jax.__version__
    nonfinite: tuple[str, ...] = ()

    @property
    def recipe(self) -> _recipe.Recipe:
        """The recipe under which the state was trained.

        Raises:
          CheckpointError: if this version of jaxmp cannot read it.
        """
        try:
            return _recipe.load_recipe(_load.parse_recipe(self.recipe_toml))
        except JaxmpError as error:
            raise CheckpointError(
                f"This version of jaxmp cannot read the recipe in the manifest: {error}"
            ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(_Contents):
    """Contents of a checkpoint, without the values of its leaves."""

    description: Description
    # Name of a data file -> its size in bytes and its CRC-32.
    files: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)

    def is_of(self, recipe: _recipe.Recipe | None) -> bool:
        """Returns True if a recipe has the settings of the manifest's one, and for None."""
        if recipe is None or self.recipe_toml == recipe.to_toml():
            return True
        return _recipe.have_same_settings(self.recipe, recipe, self.description.by_path)

    def to_text(self) -> str:
        """Returns the manifest as JSON, with a checksum of itself."""
        body = json.dumps(dataclasses.asdict(self), allow_nan=True)
        return json.dumps({"format": FORMAT, "crc32": _crc(body), "manifest": body})


def _crc(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"


def write_manifest(directory: epath.Path, manifest: Manifest) -> None:
    """Writes a manifest into the directory of a checkpoint, with the checksums of its files."""
    names = data_files(directory)
    manifest = dataclasses.replace(manifest, files=_file_checksums(directory, names))
    (directory / FILE_NAME).write_text(manifest.to_text())


def data_files(directory: epath.Path) -> list[str]:
    """Returns the names of the files below a directory, except the manifest."""
    files = sorted(folder / name for folder, _, names in directory.walk() for name in names)
    return [str(file.relative_to(directory)) for file in files if file.name != FILE_NAME]


def has_manifest(directory: epath.Path) -> bool:
    """Returns True if jaxmp wrote the checkpoint in this directory."""
    return (directory / FILE_NAME).exists()


def read_manifest(directory: epath.Path) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
      CheckpointError: if it is damaged, or has another format.
    """
    path = directory / FILE_NAME
    try:
        envelope = json.loads(path.read_text())
        version, body = envelope["format"], envelope["manifest"]
        intact = envelope["crc32"] == _crc(body)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The manifest {path} is damaged: {error}.") from error
    if version != FORMAT:
        age = "a newer" if isinstance(version, int) and version > FORMAT else "another"
        raise CheckpointError(
            f"The manifest {path} has format {version}, which {age} version of jaxmp wrote; this "
            f"one reads format {FORMAT}. Read it with the version that wrote it."
        )
    if not intact:
        raise CheckpointError(
            f"The manifest {path} was edited or damaged: its checksum does not match its text."
        )
    try:
        data = json.loads(body)
        data.pop("checksums", None)  # of leaves, in the first checkpoints of this format
        extra = data.pop("extra")  # stays as JSON has it
        return dataclasses.replace(_core.from_plain(Manifest, {**data, "extra": None}), extra=extra)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"The manifest {path} has other fields than this version of jaxmp ({__version__}) "
            f"writes: {error}. Read it with the version that wrote it."
        ) from error


def _file_checksums(directory: epath.Path, names: list[str]) -> dict[str, tuple[int, str]]:
    """Returns the size in bytes and the CRC-32 of each file; files that are missing are left out.

    Args:
      directory: the directory that `names` are relative to.
      names: paths with forward slashes.
    """
    with ThreadPoolExecutor(_FILE_THREADS) as threads:
        rows = threads.map(lambda name: _file_checksum(directory / name), names)
        return {name: row for name, row in zip(names, rows, strict=True) if row is not None}


def _file_checksum(path: epath.Path) -> tuple[int, str] | None:
    size = value = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                size += len(block)
                value = zlib.crc32(block, value)
    except FileNotFoundError:
        return None
    return size, f"{value:08x}"


def check_files(directory: epath.Path, manifest: Manifest) -> None:
    """Compares the data files in the directory of a checkpoint with their checksums.

    Raises:
      CheckpointError: naming the first file that is missing, truncated or damaged.
    """
    present = _file_checksums(directory, list(manifest.files))
    for name, (size, checksum) in manifest.files.items():
        path = directory / name
        if name not in present:
            raise CheckpointError(f"The checkpoint is incomplete: {path} is missing.")
        present_size, present_checksum = present[name]
        if present_size != size:
            raise CheckpointError(
                f"The checkpoint is damaged: {path} has {present_size:,} bytes, and {size:,} were "
                "written."
            )
        if present_checksum != checksum:
            raise CheckpointError(
                f"The checkpoint is damaged: the contents of {path} have changed since it was "
                f"written (CRC-32 {present_checksum}, written as {checksum})."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointInfo(_Contents):
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

    path: str
    master_layout: str
    leaves: tuple[Leaf, ...]
    data_bytes: int

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
    names = (field.name for field in dataclasses.fields(_Contents))
    return CheckpointInfo(
        path=str(path),
        master_layout=manifest.description.layout,
        leaves=manifest.description.leaves,
        data_bytes=sum(size for size, _ in manifest.files.values()),
        **{name: getattr(manifest, name) for name in names},
    )


# ---------------------------------------------------------------------------
# Arguments that a manifest stores
# ---------------------------------------------------------------------------


def as_step(step: ArrayLike) -> int:
    """Converts the number of a step to an integer."""
    array = np.asarray(step)
    number = array.item() if array.size == 1 else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise CheckpointError(f"step={step!r} is not the number of a step: 0, 1, 2, ...")
    return number


def as_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Converts metrics to a dict from name to float."""
    try:
        return {str(name): float(value) for name, value in (metrics or {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"metrics={metrics!r} must map names to numbers, such as {{'loss': 2.5}}: {error}."
        ) from error


def as_json(extra: object) -> Any:
    """Returns a copy of JSON data; refuses keys that JSON would convert to strings."""
    try:
        copy = json.loads(json.dumps(extra))
        _check_keys(extra)
        return copy
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"extra cannot be written as JSON: {error}. Put arrays into the state: "
            "save(step, {'train': state, 'data': arrays}, ...)."
        ) from error


def _check_keys(extra: object) -> None:
    if isinstance(extra, dict):
        for key in extra:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a string, and would become {str(key)!r}")
    if isinstance(extra, (dict, list, tuple)):
        for value in extra.values() if isinstance(extra, dict) else extra:
            _check_keys(value)
