"""Tracing of the audited function, and the roles of its arguments."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr

from jaxmp._core._compat import jaxpr_body
from jaxmp._core._dtypes import FLOAT32
from jaxmp._core._trees import dtype_of
from jaxmp._core._typing import PyTree
from jaxmp._gradients._dynamic_loss_scale import DynamicLossScale
from jaxmp._programs._analysis import Body
from jaxmp._programs._constructs import inners
from jaxmp._programs._jaxprs import Atom
from jaxmp._programs._locations import Location
from jaxmp._tools.audit._checks import OpOccurrence
from jaxmp._tools.audit._labels import FloatInput
from jaxmp.errors import AuditError

_KeyPath = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced program with its arguments and results."""

    closed: ClosedJaxpr
    # The leaves that are arrays or their shapes, one for each input variable.
    arrays: list[Any]
    # (positional arguments, keyword arguments).
    arguments: PyTree
    # Number of a leaf among the arguments -> its variable.
    variables: dict[int, Atom]
    # (key path, abstract array) of each result.
    results: list[tuple[_KeyPath, Any]]
    # Names of the function's positional parameters; empty if they are not known.
    names: list[str]
    # Numbers of the leaves among the arguments that the function writes; their new values are
    # further results of the program, after `results`.
    written: list[int]

    @property
    def jaxpr(self) -> Any:
        """The jaxpr without its constants."""
        return jaxpr_body(self.closed)[0]

    def scales(self) -> list[tuple[str, Atom]]:
        """Returns (location among the arguments, variable) of each dynamic loss scale."""
        pairs = ((jtu.keystr(path), self.variables.get(n)) for path, n in _scales(self.arguments))
        return [(location, var) for location, var in pairs if var is not None]

    def inputs(self) -> list[tuple[FloatInput, Atom]]:
        """Returns the FP32 arguments that are not part of a model's state, and their variables."""
        inputs, number = [], 0
        for path, node in jtu.tree_flatten_with_path(self.arguments, is_leaf=_is_state)[0]:
            leaves = jtu.tree_flatten_with_path(node)[0]
            var = self.variables.get(number)
            keys = [_key(key) for key in path]
            number += len(leaves)
            if len(leaves) != 1 or leaves[0][0] or var is None or "params" in keys:
                continue
            if dtype_of(leaves[0][1]) == FLOAT32:
                # The first key distinguishes positional from keyword arguments.
                name = next((key for key in reversed(keys[1:]) if isinstance(key, str)), "")
                location = jtu.keystr(path[1:])
                inputs.append((FloatInput(name or self._parameter(keys[1:]), location), var))
        return inputs

    def optimizer_leaves(self) -> list[bool]:
        """Returns for each leaf of the arguments whether an optimizer state contains it."""
        flags: list[bool] = []
        leaves = jtu.tree_flatten_with_path(self.arguments, is_leaf=is_optax_state)[0]
        for path, node in leaves:
            is_stored = is_optax_state(node) or names_optimizer(path)
            flags += [is_stored] * len(jax.tree.leaves(node))
        return flags

    def optimizer_arrays(self) -> list[bool]:
        """Returns for each array among the arguments whether an optimizer state contains it."""
        flags = self.optimizer_leaves()
        return [flags[number] for number in self.variables]

    def may_be_weights(self) -> list[bool]:
        """Returns for each array among the arguments whether it may be a parameter.

        A step returns its parameters, or gradients of the same shapes. If no argument has the shape
        of a result, each of them may be a parameter.
        """
        shapes = {aval.shape for _, aval in self.results if aval.size > 1}
        flags = [
            aval.shape in shapes or is_stored
            for aval, is_stored in zip(self.arrays, self.optimizer_arrays(), strict=True)
        ]
        return flags if any(flags) else [True] * len(flags)

    def maker_of(self, result: Atom) -> OpOccurrence | None:
        """Returns the operation that computes a result, inside of the calls that return it."""
        jaxpr, var, op = self.jaxpr, result, None
        while var is not None:
            body = Body(jaxpr)
            maker = body.maker(var)
            if maker is None:
                break
            op, below, var = OpOccurrence(maker, Location(), 1, body, op), var, None
            for inner in inners(maker)[-1:]:
                pairs = zip(inner.results, inner.jaxpr.outvars, strict=True)
                jaxpr, var = inner.jaxpr, next((i for o, i in pairs if o is below), None)
        return op

    def _parameter(self, keys: list[Any]) -> str:
        return self.names[keys[0]] if keys and keys[0] in range(len(self.names)) else "NAME"


def check_function(fn: object, name: str) -> None:
    """Checks that an object can be traced.

    Args:
      fn: the object.
      name: the public function that received it.

    Raises:
      AuditError: with the call to write.
    """
    if isinstance(fn, (jax.stages.Compiled, jax.stages.Lowered)) or not callable(fn):
        arguments = ")(state, batch)" if name == "with_stats" else ", state, batch)"
        raise AuditError(
            f"{name} received an object of type {type(fn).__name__}, which cannot be traced. Pass"
            f" the function, and its arguments separately:\n    jaxmp.{name}(train_step{arguments}"
        )


def check_arguments(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks that a function takes the arguments, before it is called.

    Raises:
      AuditError: with the call to write.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise AuditError(
            f"audit passes its arguments on to the function, which does not take them: {error}. The"
            " recipe and the chip are recipe= and target=:\n"
            "    jaxmp.audit(train_step, state, batch, recipe='bf16', target='h200')"
        ) from error


def trace(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Traces a function for arguments of these shapes and dtypes; nothing is computed.

    Raises:
      AuditError: if `fn`, or a function that it calls, was jitted with `compiler_options`, or
        changes an NNX object that is not among its arguments.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    positions = [number for number, leaf in enumerate(leaves) if is_array(leaf)]
    results: list[tuple[_KeyPath, Any]] = []
    numbers: list[int] = []

    def run(*arrays: jax.Array) -> list[jax.Array]:
        filled = list(leaves)
        for position, array in zip(positions, arrays, strict=True):
            filled[position] = array
        args, kwargs = structure.unflatten(filled)
        out = jtu.tree_flatten_with_path(fn(*args, **kwargs))[0]
        results[:] = [(path, jax.typeof(leaf)) for path, leaf in out if is_array(leaf)]
        # A function may write into its arguments, such as an NNX model, and return nothing. A
        # compiler would remove the computation of such values, so they are returned, too.
        after = jax.tree.leaves((args, kwargs))
        before = {id(leaf) for leaf in filled}
        written = {n: x for n, x in enumerate(after) if is_array(x) and id(x) not in before}
        numbers[:] = written
        return [leaf for _, leaf in out if is_array(leaf)] + list(written.values())

    arrays = [leaves[n] for n in positions]
    try:
        closed = jax.make_jaxpr(run)(*arrays)
    except Exception as error:
        # Flax, which has this error, is an optional dependency.
        if type(error).__name__ == "TraceContextError":
            raise AuditError(
                f"the traced function changes an NNX object that is not among its arguments "
                f"({error}). Pass the model and the optimizer as arguments:\n"
                "    jaxmp.audit(train_step, model, optimizer, batch)"
            ) from error
        if not isinstance(error, ValueError) or "compiler_options" not in str(error):
            raise
        raise AuditError(
            "the audited function was jitted with compiler_options=..., and JAX cannot trace it as "
            "a part of another program, as the audit does. Audit the function without them; "
            "the audit compiles with its own options:\n    jaxmp.audit(jax.jit(train_step), ...)"
        ) from error
    variables = dict(zip(positions, jaxpr_body(closed)[0].invars, strict=True))
    return Traced(closed, arrays, (args, kwargs), variables, results, _parameters(fn), numbers)


def _parameters(fn: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _key(key: object) -> Any:
    """Returns the dict key, attribute name or index of one step of a key path."""
    return next(
        (getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)), str(key)
    )


def is_array(leaf: object) -> bool:
    """Returns True for an array or its shape."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


# ---------------------------------------------------------------------------
# Roles of arguments
# ---------------------------------------------------------------------------


def argument_text(location: str) -> str:
    """Returns `opt_state[0].mu['w']` for the key path `[0][1].opt_state[0].mu['w']`."""
    return location.removeprefix("[0]").removeprefix("[1]") or f"argument {location}"


def is_optax_state(node: object) -> bool:
    """Returns True for a state of an optax transformation."""
    return isinstance(node, tuple) and type(node).__module__.startswith("optax.")


def names_optimizer(path: _KeyPath) -> bool:
    """Returns True for a key path with a field such as `opt_state`."""
    return any(getattr(key, "name", None) in ("opt_state", "optimizer_state") for key in path)


def _is_state(node: object) -> bool:
    """Returns True for a state of optax, Flax or jaxmp, such as a train state or an NNX module."""
    packages = (cls.__module__.partition(".")[0] for cls in type(node).__mro__)
    return any(package in ("flax", "optax", "jaxmp") for package in packages)


def _scales(tree: PyTree) -> list[tuple[_KeyPath, int]]:
    """Returns (path, leaf number of its value) of each dynamic loss scale of jaxmp or Flax."""
    scales, number = [], 0
    for path, node in jtu.tree_flatten_with_path(tree, is_leaf=_is_scale)[0]:
        names = [jtu.keystr(below) for below, _ in jtu.tree_flatten_with_path(node)[0]]
        if _is_scale(node):
            offset = next(n for n, name in enumerate(names) if name.startswith(".scale"))
            scales.append((path, number + offset))
        number += len(names)
    return scales


def _is_scale(node: object) -> bool:
    cls = type(node)
    is_flax = (cls.__module__, cls.__name__) == ("flax.training.dynamic_scale", "DynamicScale")
    return isinstance(node, DynamicLossScale) or is_flax
