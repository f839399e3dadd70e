"""Ports of training scripts of other projects: edits, stand-ins for input pipelines, comparison.

A port does not contain code of the other project. It consists of regular expressions that match
lines of a script in a checkout, and their replacements. `load` copies the folder of the script,
applies the edits and imports the result, with stand-ins for packages that are not installed.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import itertools
import json
import math
import random
import re
import sys
import tempfile
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

RECIPES = ("bf16", "fp16", "bf16_params")
PLAIN, AUTHOR_BF16, AUTHOR_FP16 = "plain", "author_bf16", "author_fp16"
# Packages for input pipelines and logging, which `load` replaces by stand-ins.
ABSENT = (
    "clu",
    "datasets",
    "gfile",
    "grain",
    "gymnasium",
    "matplotlib",
    "sentencepiece",
    "tensorboard",
    "tensorboardX",
    "tensorflow",
    "tensorflow_datasets",
    "tensorflow_text",
    "torch",
    "torchvision",
    "tqdm",
    "wandb",
)


class Edit(NamedTuple):
    """Replacement of the only match of `pattern` in a file.

    pattern: regular expression, with `re.MULTILINE`.
    replacement: as in `re.sub`; `{recipe}` is replaced by the name of the recipe.
    """

    pattern: str
    replacement: str


Edits = Mapping[str, Sequence[Edit]]


class Losses(NamedTuple):
    """The final losses of one run of a script."""

    train: float
    heldout: float


class Port(NamedTuple):
    """A training script of another project, and the edits that apply a recipe to it.

    name: name in the table.
    checkout: folder of the project among the checkouts.
    folder: folder in the checkout that is copied and added to the path.
    edits: file in `folder` -> edits that a user of jaxmp makes; their changed lines are counted.
    run: trains and evaluates once. Its arguments are a function that imports a module of the edited
      script, and whether to enable the author's bf16 option.
    framework: Linen, NNX or functions.
    data: description of the training data.
    toy: edits for a small configuration, applied in every variant and not counted.
    author: 16-bit variants without jaxmp -> their edits. They enable the author's bf16 option if it
      is not an argument, or set `dtype` in each layer if there is no option.
    devices: number of CPU devices.
    absent: further packages to replace by stand-ins.
    """

    name: str
    checkout: str
    folder: str
    edits: Edits
    run: Callable[[Callable[[str], Any], bool], Losses]
    framework: str
    data: str
    toy: Edits = types.MappingProxyType({})
    author: Mapping[str, Edits] = types.MappingProxyType({})
    devices: int = 1
    absent: Sequence[str] = ()

    @property
    def source(self) -> str:
        """Names of the edited files, as in the table."""
        return f"{self.checkout}: {', '.join(str(Path(self.folder, path)) for path in self.edits)}"

    @property
    def variants(self) -> tuple[str, ...]:
        return (PLAIN, *self.author, *RECIPES)

    def edits_of(self, variant: str) -> Edits:
        return {PLAIN: {}, **self.author}.get(variant, self.edits)

    def digest(self, variant: str) -> str:
        """Hash of the edits of a variant, which identifies outdated measurements."""
        own = self.edits_of(variant)
        text = json.dumps([{path: list(of) for path, of in e.items()} for e in (self.toy, own)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---------------------------------------------------------------------------
# Edits
# ---------------------------------------------------------------------------


def edit(text: str, edits: Sequence[Edit], recipe: str = "") -> str:
    """Applies edits; each must match exactly once, otherwise the script has another version."""
    for pattern, replacement in edits:
        replacement = replacement.replace("{recipe}", recipe)
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"The edit {pattern!r} matches {count} places of the script, not 1.")
    return text


def lines_changed(old: str, new: str) -> int:
    """Counts added and removed lines; a line that replaces another counts once."""
    matcher = difflib.SequenceMatcher(a=old.splitlines(), b=new.splitlines(), autojunk=False)
    codes = matcher.get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in codes if tag != "equal")


def source_of(path: Path) -> str:
    """Returns the text of a Python file, or the code of a notebook without IPython magics."""
    if path.suffix != ".ipynb":
        return path.read_text("utf-8")
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return re.sub(r"^\s*[%!].*$", "", code, flags=re.MULTILINE)


def ported(port: Port, checkouts: Path, variant: str) -> dict[str, tuple[str, str]]:
    """Returns `(before, after)` of each edited file, by its path in the folder of the script."""
    root = checkouts / port.checkout / port.folder
    files = {}
    edits = port.edits_of(variant)
    for path in {**port.toy, **edits}:
        before = edit(source_of(root / path), port.toy.get(path, ()))
        files[path] = before, edit(before, edits.get(path, ()), variant)
    return files


def lines_of(port: Port, checkouts: Path) -> int:
    return sum(lines_changed(*texts) for texts in ported(port, checkouts, RECIPES[0]).values())


# ---------------------------------------------------------------------------
# Importing an edited script
# ---------------------------------------------------------------------------


class _Anything(mock.MagicMock):
    """Mock from which classes can be derived."""

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class _Absent(types.ModuleType):
    """Module of a package that is not installed; all its names are mocks."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Anything(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = frozenset(roots)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == root or name.startswith(f"{root}.") for root in self.roots):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def imports(folder: Path, absent: Sequence[str]) -> Iterator[Callable[..., Any]]:
    """Context with a function that imports modules of a folder, with stand-ins for packages.

    With `fresh=True`, a call of the function executes the module again. At the end, the modules of
    the folder and the stand-ins are removed from `sys.modules`.
    """
    finder, before = _AbsentFinder(absent), set(sys.modules)

    def module(name: str, fresh: bool = False) -> Any:
        if fresh:
            sys.modules.pop(name, None)
        return importlib.import_module(name)

    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, finder)
    try:
        yield module
    finally:
        sys.path.remove(str(folder))
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            made = sys.modules[name]
            if isinstance(made, _Absent) or str(folder) in str(getattr(made, "__file__", "")):
                del sys.modules[name]
        importlib.invalidate_caches()


@contextlib.contextmanager
def load(port: Port, checkouts: Path, variant: str) -> Iterator[Callable[..., Any]]:
    """Context with a function that imports a module of the script as edited for `variant`.

    With `fresh=True`, a call of the function executes the module again.
    """
    root = checkouts / port.checkout / port.folder
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for file in root.rglob("*.py"):
            target = copy / file.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
        for path, (_, text) in ported(port, checkouts, variant).items():
            (copy / path).with_suffix(".py").write_text(text, "utf-8")
        with imports(copy, (*ABSENT, *port.absent)) as module:
            yield module


# ---------------------------------------------------------------------------
# Running a script
# ---------------------------------------------------------------------------


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context that shifts every seed that a script passes to JAX, and sets NumPy's seed."""

    def shifted(make: Callable[..., Any]) -> Callable[..., Any]:
        def key(number: Any = 0, *args: Any, **kwargs: Any) -> Any:
            fixed = isinstance(number, (int, np.integer))
            return make(int(number) + 1000 * seed if fixed else number, *args, **kwargs)

        return key

    np.random.seed(seed)
    random.seed(seed)
    with (
        mock.patch.object(jax.random, "key", shifted(jax.random.key)),
        mock.patch.object(jax.random, "PRNGKey", shifted(jax.random.PRNGKey)),
    ):
        yield


class Recorder:
    """Metric writer that stores what a script reports; all other methods do nothing."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        for name, value in scalars.items():
            self.scalar(name, value, step)

    def scalar(self, name: str, value: Any, step: int) -> None:
        self.values[name].append(float(value))

    def mean(self, name: str, last: int) -> float:
        return float(np.mean(self.values[name][-last:]))

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def measure(port: Port, checkouts: Path, variant: str, seeds: int) -> list[Losses]:
    """Returns the losses of one variant for the seeds 0, 1, ..."""
    losses = []
    with load(port, checkouts, variant) as module:
        for seed in range(seeds):
            with seeded(seed), contextlib.redirect_stdout(sys.stderr):
                losses.append(Losses(*map(float, port.run(module, variant == AUTHOR_BF16))))
    return losses


# ---------------------------------------------------------------------------
# Comparison
# ---------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Paired differences of a loss from a reference.

    mean, error: mean difference and its standard error over the seeds.
    relative: mean difference over the mean magnitude of the reference.
    """

    mean: float
    error: float
    relative: float

    @property
    def close(self) -> bool:
        """True if the difference is within two standard errors or within 0.5 % of the loss."""
        return abs(self.mean) <= 2 * self.error or abs(self.relative) <= 0.005


def compare(losses: Sequence[float], reference: Sequence[float]) -> Comparison:
    """Compares runs of the same seeds."""
    differences = np.subtract(losses, reference)
    error = np.std(differences, ddof=1) / math.sqrt(len(differences))
    mean = float(np.mean(differences))
    return Comparison(mean, float(error), mean / float(np.mean(np.abs(reference))))


# ---------------------------------------------------------------------------
# Data in the shapes that the scripts expect
# ---------------------------------------------------------------------------


def digits(size: int, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Returns the 1,797 handwritten digits of scikit-learn, enlarged and shuffled.

    Args:
      size: height and width of the result in pixels, at least 24.
      noise: fraction of random labels, so that the loss does not converge to zero.

    Returns:
      Images from 0 to 1, (1797, size, size, 1), and labels, (1797,).
    """
    datasets = importlib.import_module("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    generator = np.random.default_rng(0)
    order = generator.permutation(len(images))
    times = size // 8
    images = np.kron(images[order].reshape(-1, 8, 8) / 16, np.ones((1, times, times)))
    rest = size - 8 * times
    images = np.pad(images, ((0, 0), (rest // 2, rest - rest // 2), (rest // 2, rest - rest // 2)))
    labels = labels[order]
    drawn = generator.integers(0, 10, len(labels))
    labels = np.where(generator.random(len(labels)) < noise, drawn, labels)
    return images[..., None].astype(np.float32), labels.astype(np.int32)


def sentences(count: int, length: int, vocabulary: int, first: int = 1) -> np.ndarray:
    """Returns random sentences of a fixed Markov chain over the tokens `first` to `vocabulary - 1`.

    Args:
      count: number of sentences, drawn from NumPy's global generator.
      length: number of tokens per sentence.
      vocabulary: number of tokens in the vocabulary.
      first: the smallest token.

    Returns:
      int32 tokens, (count, length).
    """
    generator = np.random.default_rng(0)
    tokens = vocabulary - first
    chain = generator.dirichlet(np.full(tokens, 0.1), size=tokens).cumsum(axis=1)
    text = np.empty((count, length), np.int32)
    state = np.random.randint(0, tokens, count)
    for position in range(length):
        text[:, position] = state + first
        drawn = np.random.random(count)[:, None] > chain[state]
        state = np.minimum(drawn.sum(axis=1), tokens - 1)
    return text


def cycle(arrays: Sequence[np.ndarray], batch_size: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields batches of rows, in the random order of NumPy's global generator."""
    for _ in itertools.count():
        order = np.random.permutation(len(arrays[0]))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            rows = order[start : start + batch_size]
            yield tuple(array[rows] for array in arrays)
