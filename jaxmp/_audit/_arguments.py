"""Tracing, and judges of what goes in and comes out: optimizer state, loss scales, results."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import CHECKS, ERROR, WARNING
from jaxmp._audit._labels import FloatInput
from jaxmp._audit._report import Finding
from jaxmp._core._compat import jaxpr_body
from jaxmp._core._dtypes import FLOAT32, FLOATS_16BIT
from jaxmp._core._jaxprs import inners
from jaxmp._core._locations import Lines
from jaxmp._core._trees import dtype_of
from jaxmp._loss_scale import DynamicLossScale

_FIX_MOMENTS = (
    "Leave out mu_dtype and similar arguments, and let jaxmp keep FP32 masters:\n"
    "    tx = recipe.optimizer(tx)"
)
# In the path of a leaf of an optimizer state, as optax names it.
_FIRST_MOMENT = re.compile(r"\.mu\b")

# ---------------------------------------------------------------------------
# Tracing
# ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced program, and the trees that it takes and returns."""

    closed: Any
    # The leaves that are arrays or their shapes, one for each variable that comes in.
    arrays: list[Any]
    arguments: Any
    # Leaf number among the arguments -> the variable that it became.
    variables: dict[int, Any]
    # (key path, array) of each result.
    results: list[tuple[Any, Any]]
    # The names of the function's positional parameters, as far as they are known.
    names: list[str]

    @property
    def jaxpr(self) -> Any:
        """The program without its constants."""
        return jaxpr_body(self.closed)[0]

    def scales(self) -> list[tuple[str, Any]]:
        """(where it stands, its variable) of each dynamic loss scale that is an array."""
        locations = (
            (jtu.keystr(path), self.variables.get(n)) for path, n in _scales(self.arguments)
        )
        return [(location, var) for location, var in locations if var is not None]

    def inputs(self) -> list[tuple[FloatInput, Any]]:
        """Returns (FP32 argument, its variable) for arguments outside of any model's state."""
        found, number = [], 0
        for path, node in jtu.tree_flatten_with_path(self.arguments, is_leaf=_is_state)[0]:
            leaves = jtu.tree_flatten_with_path(node)[0]
            var = self.variables.get(number)
            keys = [_key(key) for key in path]
            number += len(leaves)
            if len(leaves) != 1 or leaves[0][0] or var is None or "params" in keys:
                continue
            if dtype_of(leaves[0][1]) == FLOAT32:
                # The first key tells positional arguments from those by keyword.
                name = next((key for key in reversed(keys[1:]) if isinstance(key, str)), "")
                location = jtu.keystr(path[1:])
                found.append((FloatInput(name or self._named(keys[1:]), location), var))
        return found

    def _named(self, keys: list[Any]) -> str:
        return self.names[keys[0]] if keys and keys[0] in range(len(self.names)) else "NAME"


def trace(fn: Callable[..., Any], args: Any, kwargs: Any) -> Traced:
    """The program that `fn` is for arguments of these shapes and dtypes; nothing is computed."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    positions = [number for number, leaf in enumerate(leaves) if _is_array(leaf)]
    results: list[tuple[Any, Any]] = []

    def flat(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for position, array in zip(positions, arrays, strict=True):
            filled[position] = array
        args, kwargs = structure.unflatten(filled)
        out = jtu.tree_flatten_with_path(fn(*args, **kwargs))[0]
        results[:] = [(path, jax.typeof(leaf)) for path, leaf in out if _is_array(leaf)]
        # A function may write into what it is given, such as an NNX model, and return nothing: a
        # compiler would leave out all that leads there.
        after = jax.tree.leaves((args, kwargs))
        before = {id(leaf) for leaf in filled}
        written = [leaf for leaf in after if _is_array(leaf) and id(leaf) not in before]
        return [leaf for _, leaf in out if _is_array(leaf)] + written

    arrays = [leaves[n] for n in positions]
    closed = jax.make_jaxpr(flat)(*arrays)
    variables = dict(zip(positions, jaxpr_body(closed)[0].invars, strict=True))
    return Traced(closed, arrays, (args, kwargs), variables, results, _parameters(fn))


def _parameters(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _key(key: Any) -> Any:
    """A dict's key, an attribute's name or an index, of one step of a path."""
    return next(
        (getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)), str(key)
    )


def _is_state(node: Any) -> bool:
    """Whether a node holds parameters or other state: of optax, a train state or an NNX object."""
    modules = (cls.__module__.partition(".")[0] for cls in type(node).__mro__)
    return any(module in ("flax", "optax", "jaxmp") for module in modules)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


# ---------------------------------------------------------------------------
# Loss scales
# ---------------------------------------------------------------------------


def scale_findings(auditor: Auditor, scales: list[tuple[str, Any]]) -> list[Finding]:
    """Dynamic loss scales that no backward pass depends on; none where there is no such pass."""
    if not scales or not auditor.has_backward or auditor.flow.scale_used:
        return []
    check = "unused_loss_scale"
    return [
        Finding(
            check=check,
            message=f"the dynamic loss scale at {location} scales no loss: gradients underflow as"
            " if there were none.",
            fix="loss, grads = state.value_and_grad(loss_fn)(batch)",
        )
        for location, _ in scales
    ]


def _scales(tree: Any) -> list[tuple[Any, int]]:
    """(path, leaf number of the scale itself) of each dynamic loss scale, jaxmp's and Flax's."""
    found, number = [], 0
    for path, node in jtu.tree_flatten_with_path(tree, is_leaf=_is_scale)[0]:
        names = [jtu.keystr(below) for below, _ in jtu.tree_flatten_with_path(node)[0]]
        if _is_scale(node):
            offset = next(n for n, name in enumerate(names) if name.startswith(".scale"))
            found.append((path, number + offset))
        number += len(names)
    return found


def _is_scale(node: Any) -> bool:
    cls = type(node)
    flax = (cls.__module__, cls.__name__) == ("flax.training.dynamic_scale", "DynamicScale")
    return isinstance(node, DynamicLossScale) or flax


# ---------------------------------------------------------------------------
# Optimizer state, results
# ---------------------------------------------------------------------------


def state_findings(traced: Traced) -> list[Finding]:
    """Optimizer states with 16-bit leaves; one finding for each state and dtype."""
    # (path of the state, dtype) -> the paths of its leaves, and their numbers.
    found: dict[tuple[Any, str], list[tuple[str, int]]] = {}
    number = 0
    for path, node in jtu.tree_flatten_with_path(traced.arguments, is_leaf=_is_optax_state)[0]:
        judged = _is_optax_state(node) or _names_optimizer(path)
        holder = path if _is_optax_state(node) else ()
        for below, leaf in jtu.tree_flatten_with_path(node)[0]:
            dtype = dtype_of(leaf)
            if judged and dtype is not None and dtype in FLOATS_16BIT:
                where = jtu.keystr((*path, *below)), number
                found.setdefault((holder, dtype.name), []).append(where)
            number += 1
    check = "optimizer_state_16bit"
    findings = []
    for (_, dtype), locations in found.items():
        file, line = _first_use(traced, locations[0][1])
        message = (
            f"{len(locations)} arrays are {dtype}, such as {short(locations[0][0])}: small updates"
            " are rounded away, second moments underflow."
        )
        # Each step adds a tenth of the gradient to a first moment, which bfloat16's 8 bits hold.
        is_first = dtype == "bfloat16" and all(_FIRST_MOMENT.search(text) for text, _ in locations)
        if is_first:
            message = (
                f"{len(locations)} first moments are bfloat16, such as {short(locations[0][0])}, as"
                " mu_dtype asks; second moments are not."
            )
        findings.append(
            Finding(
                check=check,
                severity=WARNING if is_first else ERROR,
                file=file,
                line=line,
                message=message,
                fix=_FIX_MOMENTS,
                count=len(locations),
            )
        )
    return findings


def _first_use(traced: Traced, number: int) -> tuple[str, int]:
    """The user's own line that leads to where an argument is first read; ("", 0) if none does.

    Args:
      traced: the program.
      number: of the leaf among its arguments.
    """
    jaxpr, var = traced.jaxpr, traced.variables.get(number)
    enclosing: list[Any] = []
    while var is not None:
        reader = next((e for e in jaxpr.eqns if any(operand is var for operand in e.invars)), None)
        if reader is None:
            break
        enclosing.insert(0, reader)
        given = [
            (inner.jaxpr, inside)
            for inner in inners(reader)
            for outside, inside in zip(inner.operands, inner.jaxpr.invars, strict=True)
            if outside is var
        ]
        jaxpr, var = given[0] if given else (jaxpr, None)
    return Lines().of(enclosing)


def held_arrays(traced: Traced) -> list[bool]:
    """For each array among the arguments: whether an optimizer state or a loss scale holds it."""
    flags = in_optimizer(traced)
    return [flags[number] for number in traced.variables]


def in_optimizer(traced: Traced) -> list[bool]:
    """For each leaf of the arguments: whether an optimizer state or a loss scale holds it."""
    flags: list[bool] = []
    for path, node in jtu.tree_flatten_with_path(traced.arguments, is_leaf=_is_optax_state)[0]:
        held = _is_optax_state(node) or _names_optimizer(path)
        flags += [held] * len(jax.tree.leaves(node))
    return flags


def short(location: str) -> str:
    """`[0][1].opt_state[0].mu['w']` without what says that it is an argument."""
    return location.removeprefix("[0]").removeprefix("[1]")


def _is_optax_state(node: Any) -> bool:
    return isinstance(node, tuple) and type(node).__module__.startswith("optax.")


def _names_optimizer(path: Any) -> bool:
    return any(getattr(key, "name", None) in ("opt_state", "optimizer_state") for key in path)


def half_results(traced: Traced) -> list[Finding]:
    """Scalars in 16 bits that are returned by themselves or in tuples: losses."""
    check = "loss_16bit"
    return [
        Finding(
            check=check,
            message=f"result{jtu.keystr(path)} is a scalar of {aval.dtype.name}.",
            fix=CHECKS[check].fix,
        )
        for path, aval in traced.results
        if aval.shape == ()
        and aval.dtype in FLOATS_16BIT
        and all(isinstance(key, jtu.SequenceKey) for key in path)
    ]
