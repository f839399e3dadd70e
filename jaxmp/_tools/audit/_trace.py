"""Tracing of a function for its arguments, with their roles."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr

from jaxmp import _core, _programs
from jaxmp._core import _compat
from jaxmp._tools.audit._labels import FloatInput
from jaxmp._tools.fixes._functions import positional_names
from jaxmp._tools.report import _section
from jaxmp.errors import AuditError
from jaxmp.optim import _roles


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced program with its arguments and results. Numbers of arguments count their arrays."""

    closed: ClosedJaxpr
    # The arrays among the arguments or their shapes, one for each input variable.
    leaves: list[_roles.StateLeaf]
    # Their positions among all leaves of the arguments.
    positions: list[int]
    # (positional arguments, keyword arguments).
    arguments: _core.PyTree
    # (key path, abstract array) of each result.
    results: list[tuple[_roles.KeyPath, Any]]
    # Names of the function's positional parameters; empty if they are not known.
    names: list[str]
    # Numbers of the arguments that the function writes; their new values are further results of
    # the program, after `results`.
    written: list[int]

    @property
    def jaxpr(self) -> Any:
        """The jaxpr without its constants."""
        return _compat.jaxpr_body(self.closed)[0]

    @functools.cached_property
    def replaced(self) -> list[set[int]]:
        """For each result, the numbers of the arguments of the same key, or the written one."""
        keys = [leaf.path[2:] for leaf in self.leaves]
        numbers = _section.grouped(range(len(keys)), keys.__getitem__)
        numbers.pop((), None)
        own = [{*numbers.get(p, ()), *numbers.get(p[1:], ())} for p, _ in self.results]
        return own + [{number} for number in self.written]

    @functools.cached_property
    def nnx_objects(self) -> tuple[Any, ...]:
        """The arguments that are objects of Flax NNX or of `jaxmp.nnx`."""
        names = lambda value: " ".join(cls.__module__ for cls in type(value).__mro__)
        values = [*self.arguments[0], *self.arguments[1].values()]
        return tuple(v for v in values if re.search(r"\b(flax|jaxmp)\.nnx\b", names(v)))

    def module_paths(self) -> frozenset[str]:
        """Returns the paths of modules of Flax NNX among the arguments, and of their parts."""
        if not self.nnx_objects:
            return frozenset()
        modules = sys.modules["flax.nnx"].iter_modules(self.nnx_objects)
        paths = [tuple(map(str, path[1:])) for path, _ in modules]
        paths += [tuple(_core.path_names(leaf.path)[2:]) for leaf in self.leaves]
        return frozenset("/".join(p[: n + 1]) for p in paths for n in range(len(p)))

    @property
    def variables(self) -> Sequence[_programs.Atom]:
        """The variable of each array."""
        return self.jaxpr.invars

    @property
    def arrays(self) -> list[Any]:
        """The arrays among the arguments, or their shapes."""
        return [leaf.value for leaf in self.leaves]

    def texts(self) -> list[str]:
        """Returns each array as code, such as `batch['x']`."""
        return [self.text_of(leaf.path[1:]) for leaf in self.leaves]

    def text_of(self, path: _roles.KeyPath) -> str:
        """Returns an argument, or a part of it, as code."""
        first, *rest = path
        position = getattr(first, "idx", None)
        if position is None:
            name = str(getattr(first, "key", first))
        else:
            name = self.names[position] if position < len(self.names) else f"args[{position}]"
        return name + jtu.keystr(tuple(rest))

    def rule_path(self, number: int) -> str:
        """Returns the path by which rules address a parameter."""
        names = _core.path_names(self.leaves[number].path)[2:]
        start = len(names) - names[::-1].index(_core.PARAMS) if _core.PARAMS in names else 0
        return _core.parameter_path(names[start:])

    def scales(self) -> list[int]:
        """Returns the number of the value of each loss scale of jaxmp or Flax."""
        is_scale = lambda leaf: leaf.role == _roles.LOSS_SCALE and leaf.field.startswith("scale")
        return [number for number, leaf in enumerate(self.leaves) if is_scale(leaf)]

    def dynamic_scales(self) -> list[tuple[_roles.StateLeaf, _programs.Atom]]:
        """Returns (value among the arguments, variable) of each dynamic loss scale."""
        leaves = [(self.leaves[n], self.variables[n]) for n in self.scales()]
        return [(leaf, var) for leaf, var in leaves if hasattr(leaf.owner, "backoff_factor")]

    def gradients_with(self, leaf: _roles.StateLeaf) -> str:
        """Returns code for gradients with the loss scale of an argument that contains a leaf."""
        has_method = lambda node: hasattr(node, "value_and_grad")
        nodes = jtu.tree_flatten_with_path(self.arguments, is_leaf=has_method)[0]
        for path, node in nodes:
            if has_method(node) and leaf.path[: len(path)] == path:
                name = self.text_of(path[1:])
                call = f"loss, grads = {name}.value_and_grad(loss_fn)"
                # The loss scale of Flax has no parameters, and returns the next one.
                is_of_flax = node is leaf.owner
                return f"{name}, is_finite, {call}(params)" if is_of_flax else f"{call}(batch)"
        scale = f"jaxmp.get_loss_scale({self.text_of(leaf.path[1:2])})"
        return f"loss, grads = jaxmp.value_and_grad(loss_fn, loss_scale={scale})(params)"

    def inputs(self) -> list[tuple[FloatInput, _programs.Atom]]:
        """Returns the FP32 and int32 arguments that are no model's state, and their variables."""
        nodes = jtu.tree_flatten_with_path(self.arguments, is_leaf=_is_state)[0]
        outside = {path for path, _ in nodes}
        inputs = []
        for leaf, var in zip(self.leaves, self.variables, strict=True):
            is_input = leaf.path in outside and leaf.role == _roles.OTHER
            # Checks of integers follow scalars, such as steps.
            dtypes = ("float32", "int32") if var.aval.size > 1 else ("float32",)
            if is_input and str(_core.dtype_of(leaf.value)) in dtypes:
                # The first key distinguishes positional from keyword arguments.
                inputs.append((FloatInput(jtu.keystr(leaf.path[1:])), var))
        return inputs

    def in_optimizer(self) -> list[bool]:
        """Returns for each array whether the state of an optimizer contains it."""
        return [leaf.in_optimizer for leaf in self.leaves]

    def may_be_weights(self) -> list[bool]:
        """Returns for each array whether it may be a parameter, or belong to an optimizer's state.

        A step returns or writes its parameters, or gradients of the same shapes, under the same
        names or without names. If no argument has such a result, those with the shape of a result
        may be parameters, and if there are none, all may be.
        """
        known = {(_name(path), aval.shape) for path, aval in self.results if aval.size > 1}
        shapes = {shape for _, shape in known}
        rows = [(_name(leaf.path[2:]), leaf.value.shape) for leaf in self.leaves]
        is_named = [not known.isdisjoint([(name, shape), ("", shape)]) for name, shape in rows]
        is_returned = is_named if any(is_named) else [shape in shapes for _, shape in rows]
        is_owned = lambda leaf: leaf.in_optimizer or leaf.role == _roles.PARAMETER
        flags = [
            is_owned(leaf) or returned or number in self.written
            for number, (leaf, returned) in enumerate(zip(self.leaves, is_returned, strict=True))
        ]
        return flags if any(flags) else [True] * len(flags)

    def roles(self) -> list[str]:
        """Returns the role of each array; one that no class or collection owns is a parameter if
        it may be one, and otherwise an input.
        """
        is_float = lambda array: jnp.issubdtype(array.dtype, jnp.inexact)
        return [
            leaf.role or (_roles.PARAMETER if flag and is_float(leaf.value) else _roles.INPUT)
            for leaf, flag in zip(self.leaves, self.may_be_weights(), strict=True)
        ]


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

    Args:
      fn: the function.
      args, kwargs: its arguments.

    Raises:
      AuditError: if `fn`, or a function that it calls, was jitted with `compiler_options`, or
        changes an NNX object that is not among its arguments.
    """
    leaves = _roles.leaves_with_roles((args, kwargs))
    numbers = [n for n, leaf in enumerate(leaves) if _is_number_of_state(fn, leaf)]
    try:
        if numbers:
            # A function may require such a number while it is traced, as that of its layers.
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                return _trace(fn, args, kwargs, leaves, numbers)
        return _trace(fn, args, kwargs, leaves, [])
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


def _is_number_of_state(fn: Callable[..., Any], leaf: _roles.StateLeaf) -> bool:
    """Returns True for a Python number that is an array inside of the function, or after one step.

    These are all arguments of a jitted function, counters such as `step=0` of a first train state,
    and numbers in states of optimizers and loss scales.
    """
    is_number = isinstance(leaf.value, (bool, int, float, complex))
    is_count = type(leaf.value) is int and len(leaf.path) > 2
    is_state = is_count or leaf.role not in (_roles.OTHER, _roles.PARAMETER)
    return is_number and (is_state or isinstance(fn, jax.stages.Wrapped))


def _trace(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: list[_roles.StateLeaf],
    numbers: list[int],
) -> Traced:
    """Traces a function for the arrays among its arguments, and for some numbers among them."""
    structure = jax.tree.structure((args, kwargs))
    positions = [n for n, leaf in enumerate(leaves) if is_array(leaf.value) or n in numbers]
    as_array = lambda x: value_of(x) if is_array(x) else jnp.asarray(x)
    own = [leaves[n]._replace(value=as_array(leaves[n].value)) for n in positions]
    results: list[tuple[_roles.KeyPath, Any]] = []
    written: list[int] = []

    def run(*arrays: jax.Array) -> list[jax.Array]:
        filled = [leaf.value for leaf in leaves]
        for position, array in zip(positions, arrays, strict=True):
            is_ref = isinstance(filled[position], jax.Ref)
            filled[position] = jax.new_ref(array) if is_ref else array
        args, kwargs = structure.unflatten(filled)
        out = jtu.tree_flatten_with_path(fn(*args, **kwargs))[0]
        results[:] = [(path, jax.typeof(leaf)) for path, leaf in out if is_array(leaf)]
        # A function may write into its arguments, such as an NNX model or a reference, and return
        # nothing. A compiler would remove the computation of such values, so they are returned,
        # too.
        after = dict(jtu.tree_flatten_with_path((args, kwargs))[0])
        new = {n: value_of(after.get(leaf.path, arrays[n])) for n, leaf in enumerate(own)}
        new = {n: x for n, x in new.items() if is_array(x) and x is not arrays[n]}
        written[:] = new
        return [leaf for _, leaf in out if is_array(leaf)] + list(new.values())

    closed, _ = _programs.record(run, *(leaf.value for leaf in own))
    if any(isinstance(array, jax.Ref) for array in closed.consts):
        raise AuditError(
            "the function uses a reference to an array (jax.new_ref) that is not among its"
            " arguments, and each run could change what it refers to. Pass it as an argument:\n"
            "    jaxmp.audit(train_step, state, batch, reference)"
        )
    return Traced(closed, own, positions, (args, kwargs), results, positional_names(fn), written)


def value_of(leaf: Any) -> Any:
    """Returns the array to which a leaf refers now; the leaf, if it is not a reference."""
    return leaf[...] if isinstance(leaf, jax.Ref) else leaf


def is_array(leaf: object) -> bool:
    """Returns True for an array, its shape, or a reference to it."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _name(path: _roles.KeyPath) -> str:
    """Returns the last key of a path; "" if it is the number of an element."""
    name = _core.path_names(path)[-1:]
    return "" if not name or name[0].isdigit() else name[0]


def _is_state(node: object) -> bool:
    """Returns True for a state of optax, Flax or jaxmp, such as a train state or an NNX module."""
    packages = (cls.__module__.partition(".")[0] for cls in type(node).__mro__)
    return any(package in ("flax", "optax", "jaxmp") for package in packages)
