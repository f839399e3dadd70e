"""Results of finished runs in a directory, from which a validation that was stopped resumes.

    DIRECTORY/settings.json               what the results depend on; another validation is refused
    DIRECTORY/runs/NAME.SEED.json         a `TrainingRecord` and the `Fingerprint` of its run
    DIRECTORY/rows/NAME.json              gradient and module rows of a candidate
    DIRECTORY/reference/initial.SEED.npz  initial parameters of the reference
    DIRECTORY/reference/STEP.npz          parameters and measurements of the reference at a step

Files are replaced atomically, so a killed run leaves either a complete file or none.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp._report._plain import from_plain, to_plain
from jaxmp._validate._probe import Leaves, Measurements, Probe
from jaxmp._validate._rows import TrainingRecord
from jaxmp.errors import ValidationError

# Parts of a fingerprint in error messages.
_PARTS = {
    "step": "training step",
    "evaluation": "evaluation",
    "parameters": "initial parameters",
    "batch": "first batch",
}
# Fields of a `Probe` of the reference that are arrays by path.
_TREES = ("grads", "outputs", "updates", "changes")


class Store:
    """Results of runs, in memory and, with a directory, in files.

    Args:
      directory: the directory, which is created; None: only in memory.
      settings: JSON data of what all results depend on.

    Raises:
      ValidationError: if the directory contains results of other settings.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, settings: dict[str, Any]) -> None:
        self._directory = None if directory is None else Path(directory)
        self._files: dict[str, bytes] = {}
        self._arrays: dict[str, dict[str, np.ndarray]] = {}
        if self._directory is not None:
            if self._directory.exists() and not self._directory.is_dir():
                raise ValidationError(
                    f"directory={str(directory)!r} is a file. Pass a directory, which is created: "
                    "directory='validation'."
                )
            self._check_settings(json.loads(json.dumps(settings)))

    def _check_settings(self, settings: dict[str, Any]) -> None:
        previous = self._read("settings.json")
        if previous is None:
            self._write("settings.json", _encode(settings))
            return
        old = json.loads(previous)
        changed = sorted(key for key in {*old, *settings} if old.get(key) != settings.get(key))
        if changed:
            key = changed[0]
            raise ValidationError(
                f"{str(self._directory)!r} contains the results of another validation: its {key} "
                f"is {old.get(key)!r}, and now {settings.get(key)!r}. Use another directory, or "
                "delete this one."
            )

    # -- records ----------------------------------------------------------------------------

    def record(
        self, name: str, seed: int, fingerprint: dict[str, str | int]
    ) -> TrainingRecord | None:
        """Returns the record of a run; None if it has not finished.

        Raises:
          ValidationError: if the record was made with another step, evaluation, initial parameters
            or batches.
        """
        text = self._read(f"runs/{_slug(name)}.{seed}.json")
        if text is None:
            return None
        data = json.loads(text)
        saved = data.pop("fingerprint")
        changed = [_PARTS[key] for key in fingerprint if saved.get(key) != fingerprint[key]]
        if changed:
            raise ValidationError(
                f"The {' and the '.join(changed)} of {name!r} changed since "
                f"{str(self._directory)!r} was written (seed {seed}). Use another directory, or "
                "delete this one."
            )
        return from_plain(TrainingRecord, data)

    def save_record(self, record: TrainingRecord, fingerprint: dict[str, str | int]) -> None:
        """Saves the record of a run that has finished."""
        plain = to_plain(dataclasses.asdict(record))
        assert isinstance(plain, dict)
        path = f"runs/{_slug(record.name)}.{record.seed}.json"
        self._write(path, _encode({"fingerprint": fingerprint, **plain}))

    def measurements(self, name: str) -> Measurements | None:
        """Returns the measurements of a candidate; None if its run has not finished."""
        text = self._read(f"rows/{_slug(name)}.json")
        return None if text is None else from_plain(Measurements, json.loads(text))

    def save_measurements(self, name: str, measurements: Measurements) -> None:
        """Saves the measurements of a candidate."""
        plain = to_plain(dataclasses.asdict(measurements))
        self._write(f"rows/{_slug(name)}.json", _encode(plain))

    # -- arrays -----------------------------------------------------------------------------

    def save_initial(self, seed: int, params: Leaves) -> None:
        """Saves the initial parameters of the reference."""
        self._save_arrays(f"reference/initial.{seed}.npz", dict(params))

    def initial(self, seed: int) -> Leaves | None:
        """Returns the initial parameters of the reference by path; None if they are not saved."""
        return self._load_arrays(f"reference/initial.{seed}.npz")

    def save_step(self, step: int, params: Leaves, probe: Probe) -> None:
        """Saves parameters and measurements of the reference before a step."""
        trees = {"params": params} | {field: getattr(probe, field) for field in _TREES}
        arrays = {f"{field} {path}": x for field, tree in trees.items() for path, x in tree.items()}
        arrays["scalars"] = np.array([probe.loss, probe.stalled, probe.update])
        self._save_arrays(f"reference/{step}.npz", arrays)

    def step(self, step: int) -> tuple[Leaves, Probe] | None:
        """Returns parameters and measurements of the reference before a step; None if new."""
        arrays = self._load_arrays(f"reference/{step}.npz")
        if arrays is None:
            return None
        loss, stalled, update = map(float, arrays.pop("scalars"))
        trees: dict[str, Any] = {field: {} for field in ("params", *_TREES)}
        for key, value in arrays.items():
            field, _, path = key.partition(" ")
            trees[field][path] = value
        params = trees.pop("params")
        return params, Probe(loss=loss, stalled=stalled, update=update, **trees)

    # -- files ------------------------------------------------------------------------------

    def _save_arrays(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        if self._directory is None:
            self._arrays[name] = arrays
            return
        path = self._path(name)
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as stream:
            # Keys contain slashes, which a zip file would take for directories.
            values: Any = {str(i): _wide(value) for i, value in enumerate(arrays.values())}
            np.savez(stream, keys=np.array(list(arrays), dtype=str), **values)
        os.replace(partial, path)

    def _load_arrays(self, name: str) -> dict[str, np.ndarray] | None:
        if self._directory is None or not self._path(name).exists():
            return dict(self._arrays[name]) if name in self._arrays else None
        with np.load(self._path(name)) as arrays:
            return {str(key): arrays[str(index)] for index, key in enumerate(arrays["keys"])}

    def _write(self, name: str, data: bytes) -> None:
        self._files[name] = data
        if self._directory is not None:
            path = self._path(name)
            partial = path.with_suffix(".partial")
            partial.write_bytes(data)
            os.replace(partial, path)

    def _read(self, name: str) -> bytes | None:
        if name in self._files:
            return self._files[name]
        if self._directory is None or not self._path(name).exists():
            return None
        return self._path(name).read_bytes()

    def _path(self, name: str) -> Path:
        assert self._directory is not None
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _encode(data: object) -> bytes:
    return json.dumps(data, indent=1).encode()


def _slug(name: str) -> str:
    """Returns a file name for a name that may contain any character."""
    plain = re.sub(r"[^\w-]", "_", name)
    return plain if plain == name else f"{plain}-{zlib.crc32(name.encode()):08x}"


def _wide(array: np.ndarray) -> np.ndarray:
    """Converts the 16-bit dtypes that a file of NumPy cannot store to float32."""
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
