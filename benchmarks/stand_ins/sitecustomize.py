"""Stand-ins for packages and data that training scripts of other projects import.

Python runs this file at its start if its folder is on PYTHONPATH, as in
`benchmarks/script_audits.py`. It does not import JAX, because a script may set environment
variables before it imports JAX.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import sys
import types
from types import SimpleNamespace
from typing import Any
from unittest import mock

PACKAGES = frozenset(
    (
        "clu",
        "grain",
        "sentencepiece",
        "tensorboard",
        "tensorflow",
        "tensorflow_datasets",
        "tensorflow_text",
    )
)


class _Absent(types.ModuleType):
    """Module of a package that is not installed; all its names are mocks."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = mock.MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Provides packages that are not installed, and replaces the data of scripts."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        change = CHANGES.get(fullname)
        if fullname.partition(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if change is None:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next(spec for spec in found if spec is not None)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        change = CHANGES.get(module.__name__)
        if change is not None:
            change(module)


# ---------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------


def _zeros(*shape: int, dtype: str = "float32") -> Any:
    numpy = importlib.import_module("numpy")

    class Tensor(numpy.ndarray):
        """An array with the method `numpy` of TensorFlow's tensors."""

        def _numpy(self) -> Any:
            return numpy.asarray(self)

    return numpy.zeros(shape, dtype).view(Tensor)


class _Dataset:
    """The part of a `tf.data.Dataset` of images that a script reads."""

    def batch(self, batch_size: int, **kwargs: Any) -> _Dataset:
        self.batch_size = batch_size
        return self

    def as_numpy_iterator(self) -> Any:
        image = _zeros(self.batch_size, 28, 28, 1)
        yield {"image": image, "label": _zeros(self.batch_size, dtype="int32")}

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


class _Tokens:
    """A tokenizer with as many tokens as the script's configuration has by default."""

    def vocab_size(self) -> int:
        return 32_000

    GetPieceSize = vocab_size

    def pad_id(self) -> int:
        return 0

    def tokenize(self, text: str) -> Any:
        return SimpleNamespace(numpy=lambda: _zeros(4, dtype="int32"))


def _datasets(tensorflow_datasets: Any) -> None:
    splits = {name: SimpleNamespace(num_examples=1_000_000) for name in ("train", "validation")}
    builder = SimpleNamespace(info=SimpleNamespace(splits=splits))
    tensorflow_datasets.load = lambda *args, **kwargs: _Dataset()
    tensorflow_datasets.builder = lambda *args, **kwargs: builder


def _lm1b_or_imagenet(input_pipeline: Any) -> None:
    def get_datasets(n_devices: int, config: Any, **kwargs: Any) -> Any:
        sizes = n_devices * config.per_device_batch_size, config.max_target_length
        batches = itertools.repeat({"inputs": _zeros(*sizes, dtype="int32")})
        return batches, batches, batches, _Tokens()

    def create_split(builder: Any, batch_size: int, image_size: int, **kwargs: Any) -> Any:
        image = _zeros(batch_size, image_size, image_size, 3)
        return itertools.repeat({"image": image, "label": _zeros(batch_size, dtype="int32")})

    input_pipeline.get_datasets, input_pipeline.create_split = get_datasets, create_split


def _nanodo(data: Any) -> None:
    def py_batched_tfds(*, batch_size: int, context_size: int, **kwargs: Any) -> Any:
        return itertools.repeat(_zeros(batch_size, context_size, dtype="int32"))

    data.py_batched_tfds, data.get_py_tokenizer = py_batched_tfds, lambda path: _Tokens()


def _nanodo_metrics(metrics: Any) -> None:
    """Converts the mask, because the evaluation passes floats, which current JAX rejects."""
    average = metrics.Average.from_array
    metrics.Average.from_array = lambda x, mask: average(x, mask=mask > 0)


def _flax_io(io: Any) -> None:
    """Prevents Flax from using the file system functions of a mocked TensorFlow."""
    io.set_mode(io.BackendMode.DEFAULT)


CHANGES = {
    "flax.io": _flax_io,
    "tensorflow_datasets": _datasets,
    "input_pipeline": _lm1b_or_imagenet,
    "nanodo.data": _nanodo,
    "nanodo.metrics": _nanodo_metrics,
}

sys.meta_path.insert(0, _Finder())
