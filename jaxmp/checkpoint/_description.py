"""Description of a state: the path, dtype, shape and role of each leaf, and its master layout.

A manifest stores a description, so two states can be compared, and a migration planned, before
anything is read.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

from jaxmp._core import _trees
from jaxmp._core._dtypes import canonical_dtype
from jaxmp._core._trees import Path
from jaxmp._core._typing import PyTree
from jaxmp._loss_scale import LossScale
from jaxmp._overwritten import OVERWRITE
from jaxmp.checkpoint import _nnx_nodes
from jaxmp.errors import CheckpointError
from jaxmp.optim._master import MasterParamsState
from jaxmp.optim._skip import SkipNonfiniteState, SkipStats

# Dtypes of numbers that orbax does not write.
_NOT_WRITTEN = frozenset(
    {"uint2", "uint4", np.dtype(np.longdouble).name, np.dtype(np.clongdouble).name}
)

# Roles of leaves.
PARAMETER, MASTER, REMAINDER = "parameter", "master", "remainder"
LOSS_SCALE, FP8, COUNTER, OTHER = "loss_scale", "fp8", "counter", ""

PYTHON_NUMBERS = {f"Python {kind.__name__}": kind for kind in (bool, int, float, complex)}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a state."""

    path: str
    # NumPy's name of the dtype; JAX's for PRNG keys: "key<fry>"; "Python int" for its int.
    dtype: str
    shape: tuple[int, ...]
    role: str = OTHER

    @property
    def is_key(self) -> bool:
        """Returns True for an array of PRNG keys."""
        return self.dtype.startswith("key<")

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter that an optimizer of jaxmp trains."""

    # Path in the form of rules: "block/dense:kernel".
    path: str
    # Path of the leaf that stores it; "" if the state does not contain it.
    leaf: str
    # Short name of its storage dtype, such as "bf16".
    storage: str
    # Its path in the tree of the masters.
    inside: str
    # Path of its FP32 master or remainder; "" if it has none.
    master: str = ""


@dataclasses.dataclass(frozen=True)
class Masters:
    """State of one `master_params`."""

    path: str
    # "fp32", "packed" or "no": the name under which the masters appear in paths.
    layout: str
    parameters: tuple[Parameter, ...]


@dataclasses.dataclass(frozen=True)
class Scale:
    """A loss scale in the state."""

    path: str
    # Name of the class.
    kind: str


@dataclasses.dataclass(frozen=True)
class Description:
    """Contents of a state, without its values."""

    leaves: tuple[Leaf, ...]
    masters: tuple[Masters, ...] = ()
    scales: tuple[Scale, ...] = ()
    # Paths of the outermost transformations of jaxmp.
    optimizers: tuple[str, ...] = ()

    @property
    def by_path(self) -> dict[str, Leaf]:
        """The leaves by their paths."""
        return {leaf.path: leaf for leaf in self.leaves}

    @property
    def layout(self) -> str:
        """Master layout: "none", "fp32", "packed" or, where optimizers differ, "mixed"."""
        layouts = {masters.layout for masters in self.masters if masters.layout != "no"}
        return "mixed" if len(layouts) > 1 else next(iter(layouts), "none")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Description:
        """Undoes `dataclasses.asdict`."""
        return cls(
            tuple(Leaf(**{**row, "shape": tuple(row["shape"])}) for row in data["leaves"]),
            tuple(
                Masters(**{**row, "parameters": tuple(Parameter(**p) for p in row["parameters"])})
                for row in data["masters"]
            ),
            tuple(Scale(**row) for row in data["scales"]),
            tuple(data["optimizers"]),
        )


def join(names: Path) -> str:
    """Returns the path of a leaf as text."""
    return "/".join(names)


def is_below(path: str, prefix: str) -> bool:
    """Returns True if `path` is `prefix` or below it; everything is below ""."""
    return not prefix or path == prefix or path.startswith(f"{prefix}/")


# ---------------------------------------------------------------------------
# States
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FlatState:
    """A state as a list of leaves.

    Attributes:
      values: the leaves, in the order of `description.leaves`.
      description: path, dtype, shape and role of each leaf.
      rebuild: builds the state from a list of leaves; NNX objects are updated in place.
    """

    values: list[Any]
    description: Description
    rebuild: Callable[[list[Any]], PyTree]


def flatten_state(state: PyTree) -> FlatState:
    """Flattens and describes a state.

    Args:
      state: a pytree of arrays, PRNG keys and Python numbers, or of their shapes
        (`jax.ShapeDtypeStruct`). NNX modules and optimizers may be anywhere in it.

    Raises:
      CheckpointError: for a leaf that is none of these, and for two leaves with one path.
    """
    outer, outer_def = jax.tree_util.tree_flatten_with_path(state, is_leaf=_nnx_nodes.is_node)
    rows: list[tuple[Path, Any]] = []
    typed: list[PyTree] = []  # the state with the classes of jaxmp's optimizer states
    overwritten: set[Path] = set()
    parts: list[tuple[Any, Any, int]] = []
    for key_path, value in outer:
        names = _trees.path_names(key_path)
        if not _nnx_nodes.is_node(value):
            rows.append((names, value))
            typed.append(value)
            parts.append((None, None, 1))
            continue
        flat, treedef = jax.tree_util.tree_flatten_with_path(_nnx_nodes.pure_state(value))
        rows += [(names + _trees.path_names(inner), leaf) for inner, leaf in flat]
        typed.append(_nnx_nodes.optimizer_state(value))
        overwritten |= {names + path for path in _nnx_nodes.overwritten_paths(value)}
        parts.append((value, treedef, len(flat)))

    def rebuild(values: list[Any]) -> PyTree:
        rest = iter(values)
        result = []
        for node, treedef, count in parts:
            taken = [next(rest) for _ in range(count)]
            is_leaf = treedef is None
            result.append(
                taken[0] if is_leaf else _nnx_nodes.update(node, treedef.unflatten(taken))
            )
        return outer_def.unflatten(result)

    description = _describe(rows, outer_def.unflatten(typed), overwritten)
    return FlatState([value for _, value in rows], description, rebuild)


def _describe(rows: list[tuple[Path, Any]], typed: PyTree, overwritten: set[Path]) -> Description:
    paths = [join(names) for names, _ in rows]
    _check_unique(paths)
    dtypes = [_dtype_name(path, value) for path, (_, value) in zip(paths, rows, strict=True)]
    guards = _nodes(typed, (SkipNonfiniteState, MasterParamsState))
    outside = [
        (names, dtype)
        for (names, _), dtype in zip(rows, dtypes, strict=True)
        if not any(names[: len(guard)] == guard for guard, _ in guards)
    ]
    masters = tuple(
        _describe_masters(names, node, outside) for names, node in _nodes(typed, MasterParamsState)
    )
    scales = _nodes(typed, LossScale)
    roles: dict[str, str] = {}
    for names, _ in rows:
        if OVERWRITE in names or names in overwritten:
            roles[join(names)] = FP8
    for names, _ in scales:
        roles |= {path: LOSS_SCALE for path in paths if is_below(path, join(names))}
    counters = [join(names) for names, _ in _nodes(typed, SkipStats)]
    counters += [
        join((*names, field))
        for names, _ in _nodes(typed, MasterParamsState)
        for field in ("overflow", "fits")
    ]
    roles |= {path: COUNTER for path in paths for prefix in counters if is_below(path, prefix)}
    for row in masters:
        role = REMAINDER if row.layout == "packed" else MASTER
        roles |= {p.leaf: PARAMETER for p in row.parameters}
        roles |= {p.master: role for p in row.parameters if p.master}
    return Description(
        tuple(
            Leaf(path, dtype, tuple(np.shape(value)), roles.get(path, OTHER))
            for path, dtype, (_, value) in zip(paths, dtypes, rows, strict=True)
        ),
        masters,
        tuple(Scale(join(names), type(node).__name__) for names, node in scales),
        tuple(join(names) for names, _ in guards),
    )


def _check_unique(paths: list[str]) -> None:
    """Refuses paths that orbax cannot distinguish, because it separates names by dots."""
    flat = [path.replace("/", ".") for path in paths]
    parents = {path[:end] for path in flat for end, letter in enumerate(path) if letter == "."}
    for path, count in collections.Counter(flat).items():
        if count > 1 or path in parents:
            raise CheckpointError(
                f"Two leaves of the state have the path {path!r}, because a name contains '/' or "
                "'.', or a number and a text are used as the same key. Rename one of them."
            )


def _nodes(tree: PyTree, kinds: type | tuple[type, ...]) -> list[tuple[Path, Any]]:
    """Returns the outermost nodes of these classes with their paths."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [(_trees.path_names(path), node) for path, node in flat if isinstance(node, kinds)]


def _dtype_name(path: str, value: object) -> str:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        kind = type(value).__name__
        if kind == "int" and not -(2**63) <= value < 2**63:  # pyright: ignore[reportOperatorIssue]
            raise CheckpointError(
                f"Leaf {path!r} of the state is {value}, which is not a 64-bit integer. Store it "
                f"as text in extra: save(step, state, extra={{{path!r}: str(value)}}, ...)."
            )
        if f"Python {kind}" in PYTHON_NUMBERS:
            return f"Python {kind}"
        raise CheckpointError(
            f"Leaf {path!r} of the state is of type {kind}. A checkpoint contains arrays, PRNG "
            "keys and numbers. Pass other data, such as the position in the data, as extra={...}."
        )
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return str(dtype)
    name = np.dtype(dtype).name
    is_number = jax.numpy.issubdtype(dtype, np.number) or name == "bool"
    if not is_number or name in _NOT_WRITTEN:
        raise CheckpointError(
            f"Leaf {path!r} of the state is an array of {name}, which orbax does not write. "
            "Convert it to another dtype, or pass it as text or numbers in extra={...}."
        )
    return name


def _describe_masters(
    names: Path, node: MasterParamsState, outside: list[tuple[Path, str]]
) -> Masters:
    layout = node.layout
    root = _find_parameters(names, layout.storage, outside)
    collections_ = _trees.has_collections(node.masters)
    flat, _ = jax.tree_util.tree_flatten_with_path(
        node.masters, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )
    inside_of: dict[str, Path] = {}
    for key_path, _ in flat:
        inside = _trees.path_names(key_path)
        stripped = _trees.strip_collection(inside) if collections_ else inside
        inside_of[_trees.parameter_path(stripped)] = inside
    return Masters(
        join(names),
        layout.key.removesuffix("_masters"),
        tuple(
            Parameter(
                path,
                root.get(path, ""),
                storage,
                join(inside_of[path]),
                join((*names, layout.key, *inside_of[path])) if layout.has_master(i) else "",
            )
            for i, (path, storage) in enumerate(layout.storage)
            if storage
        ),
    )


def _find_parameters(
    node: Path, storage: tuple[tuple[str, str], ...], outside: list[tuple[Path, str]]
) -> dict[str, str]:
    """Finds the leaves that store the parameters of an optimizer.

    The optimizer state does not refer to them. They are the leaves below one path whose further
    names are those of the parameters, with their storage dtypes; of several such paths, the one
    that is nearest to the optimizer, or is called "params".

    Returns:
      Path of the parameter -> path of the leaf; empty if no path has all of them.
    """
    wanted = {path: canonical_dtype(dtype).name for path, dtype in storage if dtype}
    candidates: dict[Path, dict[str, str]] = collections.defaultdict(dict)
    for names, dtype in outside:
        for start, path in _suffixes(names):
            if wanted.get(path) == dtype:
                candidates[names[:start]][path] = join(names)
    complete = [root for root, leaves in candidates.items() if len(leaves) == len(wanted)]
    if not complete:
        return {}
    return candidates[max(complete, key=lambda root: (_shared(root, node), "params" in root[-2:]))]


def _suffixes(names: Path) -> Iterator[tuple[int, str]]:
    for start in range(len(names)):
        yield start, _trees.parameter_path(names[start:])


def _shared(first: Path, second: Path) -> int:
    """Returns the number of names that two paths share at their start."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
