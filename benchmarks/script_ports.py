"""Ports of training scripts written elsewhere: edits, stand-ins for input pipelines, comparison.

A port keeps none of the foreign code: it has regular expressions that match a line of a script in
a checkout, and what the line becomes. `load` copies the script's folder, applies the edits and
imports the result, with stand-ins for packages that are not installed.
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
# Packages for input pipelines and logging, in whose place `load` puts stand-ins.
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
    """A change of the one place in a file that matches `pattern`.

    pattern: regular expression, with `re.MULTILINE`.
    replacement: as in `re.sub`; `{recipe}` stands for the name of the recipe.
    """

    pattern: str
    replacement: str


Edits = Mapping[str, Sequence[Edit]]


class Losses(NamedTuple):
    """The final losses of one run of a script."""

    train: float
    heldout: float


class Port(NamedTuple):
    """A training script of another project, and the edits that put it under a recipe.

    name: what the table calls it.
    checkout: folder of the project among the checkouts.
    folder: folder in the checkout that is copied and put on the path.
    edits: file in `folder` -> edits that a user of jaxmp makes; their changed lines are counted.
    run: trains and evaluates once; it gets a function that imports a module of the edited script,
      and whether the author's own bf16 switch is to be on.
    framework: Linen, NNX or functions.
    data: what the script is trained on here.
    toy: edits for a small configuration, made in every variant and not counted.
    author: variants in 16 bits without jaxmp -> their edits. They turn the author's own switch on
      where no argument does, or set `dtype` in each layer where there is no switch.
    devices: how many CPU devices the script gets.
    absent: further packages that are replaced by stand-ins.
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
        """The edited files, as the table shows them."""
        return f"{self.checkout}: {', '.join(str(Path(self.folder, path)) for path in self.edits)}"

    @property
    def variants(self) -> tuple[str, ...]:
        return (PLAIN, *self.author, *RECIPES)

    def edits_of(self, variant: str) -> Edits:
        return {PLAIN: {}, **self.author}.get(variant, self.edits)

    def digest(self, variant: str) -> str:
        """Identifies the edits of a variant, so that a measurement of other edits is not taken."""
        own = self.edits_of(variant)
        text = json.dumps([{path: list(of) for path, of in e.items()} for e in (self.toy, own)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


# ---------------------------------------------------------------------------
# Edits
# ---------------------------------------------------------------------------


def edit(text: str, edits: Sequence[Edit], recipe: str = "") -> str:
    """Applies edits; each must match exactly once, or the script is not the one they are for."""
    for pattern, replacement in edits:
        replacement = replacement.replace("{recipe}", recipe)
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"The edit {pattern!r} matches {count} places of the script, not 1.")
    return text


def lines_changed(old: str, new: str) -> int:
    """Counts added and removed lines; a line in place of another counts once."""
    matcher = difflib.SequenceMatcher(a=old.splitlines(), b=new.splitlines(), autojunk=False)
    codes = matcher.get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in codes if tag != "equal")


def source_of(path: Path) -> str:
    """The text of a Python file, or the code cells of a notebook without IPython's magic lines."""
    if path.suffix != ".ipynb":
        return path.read_text("utf-8")
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return re.sub(r"^\s*[%!].*$", "", code, flags=re.MULTILINE)


def ported(port: Port, checkouts: Path, variant: str) -> dict[str, tuple[str, str]]:
    """`(before, after)` of each edited file, by its path in the folder of the script."""
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
    """A mock from which classes can be derived."""

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class _Absent(types.ModuleType):
    """A module of a package that is not installed: every name in it is a mock."""

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
    """Gives a function that imports modules of a folder, with stand-ins for packages.

    A module is executed anew at each call of the function with `fresh=True`. Afterwards the
    folder's modules and the stand-ins are forgotten.
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
    """Gives a function that imports a module of the script as `variant` has it.

    A module is executed anew at each call of the function with `fresh=True`.
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
# Running it
# ---------------------------------------------------------------------------


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Shifts every seed that a script gives to JAX, and sets NumPy's."""

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
    """A metric writer that keeps what a script reports; any other method does nothing."""

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
    """Losses of one variant for the seeds 0, 1, ..."""
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
    """Paired differences of a loss to that of a reference.

    mean, error: mean difference and its standard error over the seeds.
    relative: mean difference over the mean size of the reference.
    """

    mean: float
    error: float
    relative: float

    @property
    def close(self) -> bool:
        """Within two standard errors, or within 0.5 % of the loss."""
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
    """Scikit-learn's 1,797 handwritten digits, enlarged and shuffled.

    Args:
      size: height and width of the result in pixels, at least 24.
      noise: fraction of the labels that are drawn anew, so that no loss goes to zero.

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
    """Random sentences of a fixed Markov chain over the tokens `first` to `vocabulary - 1`.

    Args:
      count: how many; drawn from NumPy's global generator.
      length: tokens of each.
      vocabulary: number of tokens.
      first: the smallest token that appears.

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
    """Batches of rows, in an order that NumPy's global generator decides."""
    for _ in itertools.count():
        order = np.random.permutation(len(arrays[0]))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            rows = order[start : start + batch_size]
            yield tuple(array[rows] for array in arrays)
