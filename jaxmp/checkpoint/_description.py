"""Description of a state: the path, dtype, shape and role of each leaf, and its master layout.

A manifest stores a description, so two states can be compared, and a migration planned, before
anything is read.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer

from jaxmp import _core
from jaxmp._core import PyTree
from jaxmp._gradients._loss_scale import LossScale
from jaxmp.checkpoint import _nnx_nodes
from jaxmp.errors import CheckpointError
from jaxmp.optim import _layout, _master, _roles, _skip

# Dtypes of numbers that orbax does not write.
_NOT_WRITTEN = frozenset(
    {"uint2", "uint4", np.dtype(np.longdouble).name, np.dtype(np.clongdouble).name}
)

# Kind of a loss scale that may be one of another library.
FOREIGN = "foreign"

PYTHON_NUMBERS = {f"Python {kind.__name__}": kind for kind in (bool, int, float, complex)}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a state."""

    path: str
    # NumPy's name of the dtype; JAX's for PRNG keys: "key<fry>"; "Python int" for its int.
    dtype: str
    shape: tuple[int, ...]
    role: str = _roles.OTHER

    @property
    def names(self) -> _core.Path:
        """The parts of `path`; a name that contains "/" is divided, too, and remains unique."""
        return tuple(self.path.split("/"))

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

    @property
    def name(self) -> str:
        """Its path in a tree of parameters: "block/dense/kernel"."""
        return self.path.replace(":", "/").lstrip("/")


@dataclasses.dataclass(frozen=True)
class Masters:
    """State of one `master_params`."""

    path: str
    # "fp32", "packed" or "no": the name under which the masters appear in paths.
    layout: str
    parameters: tuple[Parameter, ...]
    # Paths below which the parameters are stored; several if it is not known which of them.
    candidates: tuple[str, ...] = ()

    @property
    def roles(self) -> dict[str, str]:
        """The role of each master by its path."""
        role = _roles.REMAINDER if self.layout == "packed" else _roles.MASTER
        return {parameter.master: role for parameter in self.parameters if parameter.master}


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


def flatten_state(state: PyTree, *, by_values: bool = False) -> FlatState:
    """Flattens and describes a state.

    Args:
      state: a pytree of arrays, PRNG keys and Python numbers, or of their shapes
        (`jax.ShapeDtypeStruct`). NNX modules and optimizers may be anywhere in it.
      by_values: distinguish parameters from their averages by the values of the masters.

    Raises:
      CheckpointError: for a leaf that is none of these, and for two leaves with one path.
    """
    outer, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_nnx_nodes.is_node)
    nodes = [(names, value) for names, value in _named(outer) if _nnx_nodes.is_node(value)]

    def with_nodes(convert: Callable[..., PyTree], *trees: PyTree) -> PyTree:
        """Returns the state with converted NNX objects; other leaves are those of the last tree."""
        each = lambda *leaves: convert(*leaves) if _nnx_nodes.is_node(leaves[0]) else leaves[-1]
        return jax.tree.map(each, state, *trees, is_leaf=_nnx_nodes.is_node)

    arrays, treedef = jax.tree_util.tree_flatten_with_path(with_nodes(_nnx_nodes.pure_state))
    rows = _named(arrays)
    _check_values(rows, are_read=by_values)

    def rebuild(values: list[Any]) -> PyTree:
        return with_nodes(_nnx_nodes.update, treedef.unflatten(values))

    # The state with the classes of jaxmp's optimizer states.
    typed = with_nodes(_nnx_nodes.optimizer_states)
    roles = {
        "/".join(_core.path_names(leaf.path)): leaf.role
        for tree in (with_nodes(_nnx_nodes.variables), typed)
        for leaf in _roles.leaves_with_roles(tree)
        if leaf.role in (_roles.FP8, _roles.COUNTER) or isinstance(leaf.owner, LossScale)
    }
    values = {"/".join(names): value for names, value in rows} if by_values else {}
    models = {"/".join(path): "/".join(model) for path, model in _nnx_nodes.trained_models(nodes)}
    description = _describe(rows, typed, roles, values, models)
    return FlatState([value for _, value in rows], description, rebuild)


def _check_values(rows: list[tuple[_core.Path, Any]], *, are_read: bool) -> None:
    """Refuses traced arrays, and to read the values of deleted ones."""
    for names, value in rows:
        if isinstance(value, Tracer):
            raise CheckpointError(
                f"Leaf {'/'.join(names)!r} of the state is traced, because save or restore was "
                "called inside of a function that jax.jit compiles. Call it outside: "
                "state = train_step(state, batch); checkpointer.save(step, state, recipe=recipe)."
            )
        if are_read and isinstance(value, jax.Array) and value.is_deleted():
            raise CheckpointError(
                f"Leaf {'/'.join(names)!r} of the state was deleted, because it was donated to a "
                "compiled function. Save the state that the function returned: "
                "state = train_step(state, batch); checkpointer.save(step, state, recipe=recipe)."
            )


def _named(flat: list[tuple[Any, Any]]) -> list[tuple[_core.Path, Any]]:
    """Returns names instead of key paths.

    The field `value` of a box is omitted, but not that of a node with other leaves, such as the
    state of the line search of `optax.lbfgs`.
    """
    paths = [_core.path_names(key_path) for key_path, _ in flat]
    parents = {path[:end] for path in paths for end in range(1, len(path))}
    return [
        ((*path, _core.path_names(key_path[-1:])[0]) if path in parents else path, leaf)
        for path, (key_path, leaf) in zip(paths, flat, strict=True)
    ]


def _describe(
    rows: list[tuple[_core.Path, Any]],
    typed: PyTree,
    roles: dict[str, str],
    values: Mapping[str, Any],
    models: Mapping[str, str],
) -> Description:
    paths = ["/".join(names) for names, _ in rows]
    _check_unique(paths)
    dtypes = {path: _dtype_name(path, value) for path, (_, value) in zip(paths, rows, strict=True)}
    scales = _nodes(typed, LossScale)
    guards = _nodes(typed, (_skip.SkipNonfiniteState, _layout.MasterParamsState))
    optimizers = tuple("/".join(names) for names, _ in guards)
    outside = {path: dtypes[path] for path in outside_of(optimizers, paths)}
    masters = tuple(
        _describe_masters(names, node, outside, values, models)
        for names, node in _nodes(typed, _layout.MasterParamsState)
    )
    for row in masters:
        roles |= {p.leaf: _roles.PARAMETER for p in row.parameters if p.leaf} | row.roles
    return Description(
        tuple(
            Leaf(path, dtypes[path], tuple(np.shape(value)), roles.get(path, _roles.OTHER))
            for path, (_, value) in zip(paths, rows, strict=True)
        ),
        masters,
        tuple(Scale("/".join(names), type(node).__name__) for names, node in scales),
        optimizers,
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


def _nodes(tree: PyTree, kinds: type | tuple[type, ...]) -> list[tuple[_core.Path, Any]]:
    """Returns the outermost nodes of these classes with their paths."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [(_core.path_names(path), node) for path, node in flat if isinstance(node, kinds)]


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
    names: _core.Path,
    node: _layout.MasterParamsState,
    outside: Mapping[str, str],
    values: Mapping[str, Any],
    models: Mapping[str, str],
) -> Masters:
    layout = node.layout
    flat, _ = jax.tree_util.tree_flatten_with_path(
        node.masters, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )
    inside = [_core.path_names(key_path) for key_path, _ in flat]
    if isinstance(node.masters, optax.MaskedNode):
        paths = [path.replace(":", "/").lstrip("/") for path, _ in layout.storage]
        inside = [(layout.prefix + path,) for path in paths]
    parameters = tuple(
        Parameter(
            path,
            "",
            storage,
            "/".join(below),
            "/".join((*names, layout.key, *below)) if layout.has_master(i) else "",
        )
        for i, ((path, storage), below) in enumerate(zip(layout.storage, inside, strict=True))
        if storage
    )
    masters = Masters("/".join(names), layout.key.removesuffix("_masters"), parameters)
    model = next((root for path, root in models.items() if is_below(masters.path, path)), None)
    tests: list[Callable[[str], bool]] = [
        lambda root: not values or _rounds_to(node, choose_parameters(masters, root), values),
        lambda root: model in (None, root),
        lambda root: _is_beside(root, masters.path),
    ]
    roots = _candidates(masters, outside)
    for test in tests:
        # A test that excludes all candidates is ignored.
        roots = list(filter(test, roots)) or roots if len(roots) > 1 else roots
    if len(roots) == 1:
        return choose_parameters(masters, roots[0])
    return dataclasses.replace(masters, candidates=tuple(roots))


def _rounds_to(
    node: _layout.MasterParamsState, masters: Masters, values: Mapping[str, Any]
) -> bool:
    """Returns False if FP32 masters do not round to the chosen leaves, which are thus not theirs.

    A packed remainder fits any parameter.
    """
    if node.layout.master != "fp32":
        return True
    leaves = {parameter.path: parameter.leaf for parameter in masters.parameters}
    pairs = [(master, values[leaves[path]]) for _, path, master in node.values()]
    try:
        moved = [(jax.device_put(m, getattr(p, "sharding", None)), p) for m, p in pairs]
        return all(bool(_master.is_rounded(master, param)) for master, param in moved)
    except ValueError:  # arrays in memories that no operation combines
        return True


# ---------------------------------------------------------------------------
# Parameters of an optimizer
# ---------------------------------------------------------------------------


def choose_parameters(masters: Masters, root: str) -> Masters:
    """Returns masters whose parameters are those below one of the candidates."""
    parameters = tuple(
        dataclasses.replace(p, leaf="/".join(filter(None, (root, p.name))))
        for p in masters.parameters
    )
    return dataclasses.replace(masters, parameters=parameters, candidates=(root,))


def finite_leaves(description: Description) -> set[str]:
    """Returns the paths of the leaves that a healthy state has finite.

    These are parameters, masters, and arrays with the shape of a parameter, such as averages and
    moments. Scalars of an optimizer may start at infinity. If no parameters are known, these are
    all arrays except scalars.
    """
    leaves = description.by_path
    rows = [
        choose_parameters(row, row.candidates[0]) if row.candidates else row
        for row in description.masters
    ]
    stored = [p.leaf or p.master for row in rows for p in row.parameters]
    shapes = {leaves[path].shape for path in stored if path} or {
        leaf.shape for leaf in description.leaves
    }
    return {
        leaf.path
        for leaf in description.leaves
        if leaf.role in (_roles.PARAMETER, _roles.MASTER)
        or (leaf.role == _roles.OTHER and leaf.shape and leaf.shape in shapes)
    }


def outside_of(optimizers: Iterable[str], paths: Iterable[str]) -> list[str]:
    """Returns the paths of leaves that are outside of the states of optimizers."""
    return [path for path in paths if not any(is_below(path, each) for each in optimizers)]


def _candidates(masters: Masters, outside: Mapping[str, str]) -> list[str]:
    """Returns the paths below which all parameters fit."""
    wanted = {p.name: _core.canonical_dtype(p.storage).name for p in masters.parameters}
    counts: collections.Counter[str] = collections.Counter()
    for leaf, dtype in outside.items():
        names = leaf.split("/")
        for start in range(len(names) + 1):
            if wanted.get("/".join(names[start:])) == dtype:
                counts["/".join(names[:start])] += 1
    return [root for root, count in counts.items() if count == len(wanted)]


def _is_beside(root: str, optimizer: str) -> bool:
    """Returns True for `params` beside the `opt_state` that contains the optimizer."""
    names = optimizer.split("/")
    ends = [i for i, name in enumerate(names) if name == "opt_state"]
    nodes = ["/".join((*names[:end], "params")) for end in ends]
    return any(root in (node, f"{node}/params") for node in nodes)
