"""Calls of methods of Flax modules under a policy, common to Linen and NNX.

A module that computes in 16 bits casts its inputs. If it passes such an input unchanged, as the
same Python object, to an inner module that computes in FP32, the inner module receives the uncast
value. An input that was reshaped or indexed before is a new array in 16 bits: `keep_inputs` exempts
it from the cast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import _core, _programs
from jaxmp._core import Array, DTypeLike, PyTree
from jaxmp._flax import _casts, _labels, _missing_precision

# ---------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------


class Boundary(enum.Enum):
    """Relation of a call to its caller, which determines what is cast."""

    OUTER = enum.auto()  # another module calls a forward pass: arguments and results are cast
    AUTHOR = enum.auto()  # the same in the author's dtype: results take a stated output dtype
    INSIDE = enum.auto()  # a forward pass of the same module calls it: nothing is cast
    METHOD = enum.auto()  # not a forward pass: results are widened to the output dtype
    INNER_METHOD = enum.auto()  # the same, of which the caller or the author chooses the dtype


@dataclasses.dataclass(frozen=True, eq=False)
class MethodCall:
    """Call of a method of a module.

    Attributes:
      module, module_policy, method: the module, its policy, and the name of the method.
      caller: the enclosing call if a module calls its own method; otherwise None.
      keeps_dtype: the operands require the dtype that the author of the model chose.
      own_params: returns the parameters of a module without those of its submodules.
      is_leaf: returns True for values that are not pytrees of arrays; None if there are none.
      is_function: a transformation of Linen calls a function with the module.
      lifted: as in `split_carry`.
    """

    module: Any
    module_policy: _casts.ModulePolicy
    method: str
    caller: MethodCall | None
    keeps_dtype: bool
    own_params: Callable[[Any], list[Any]]
    is_leaf: _casts.IsLeaf = None
    is_function: bool = False
    lifted: str = ""

    @functools.cached_property
    def boundary(self) -> Boundary:
        """The relation of the call to its caller."""
        if self.is_function or (self.caller is not None and self.caller.is_forward):
            return Boundary.INSIDE
        if self.module_policy.is_forward(self.method):
            return Boundary.AUTHOR if self.keeps_dtype else Boundary.OUTER
        is_inner = self.keeps_dtype or self.caller is not None
        return Boundary.INNER_METHOD if is_inner else Boundary.METHOD

    @property
    def at_boundary(self) -> bool:
        """True if another module calls a forward pass."""
        return self.boundary in (Boundary.OUTER, Boundary.AUTHOR)

    @property
    def is_forward(self) -> bool:
        """True if the call is a part of a forward pass, whose arguments have been cast."""
        return self.at_boundary or self.boundary is Boundary.INSIDE

    def run(
        self,
        call: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        entered: contextlib.AbstractContextManager[Any],
    ) -> PyTree:
        """Calls the method with cast arguments, within `entered`, and casts its results."""
        module_policy, incoming, originals = self.module_policy, (args, kwargs), {}
        _labels.note_module(module_policy, self.method, is_forward=self.is_forward)
        if self.boundary is Boundary.OUTER:
            of_arguments = module_policy, self.method, _labels.ARGUMENT
            args, kwargs = _labels.labeled(*of_arguments, incoming, self.is_leaf)
            unrounded = _labels.unrounded(*of_arguments, incoming, self.is_leaf)
            args, kwargs, originals = cast_inputs(
                module_policy, self.method, args, kwargs, self.is_leaf, unrounded
            )
        with entered, noted(originals):
            try:
                out = call(*args, **kwargs)
            except (TypeError, ValueError, NotImplementedError) as error:
                explain_mismatch(error, module_policy, "" if self.is_forward else self.method)
                raise
            if self.at_boundary:
                own = functools.partial(self.own_params, self.module)
                _missing_precision.note_weights(module_policy, own)
        traits = module_policy.traits
        out, carry = _casts.split_carry(
            traits, self.module, self.method, out, incoming, self.lifted
        )
        if self.boundary is Boundary.OUTER:
            of_results = module_policy, self.method, _labels.RESULT
            unrounded = _labels.unrounded(*of_results, out, self.is_leaf)
            out = _casts.cast_outputs(module_policy, out, self.is_leaf, unrounded)
            out = _labels.labeled(*of_results, out, self.is_leaf)
        elif self.boundary is Boundary.AUTHOR and module_policy.resolved.casts_output:
            out = _casts.cast_outputs(module_policy, out, self.is_leaf)
        elif self.boundary is Boundary.METHOD:
            out = _casts.widen_outputs(module_policy, out, incoming, self.is_leaf)
        return carry(out)


# ---------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------

# Id of a cast array -> (the array, its original). Storing the array prevents the reuse of its id.
Originals: TypeAlias = dict[int, tuple[Array, Array]]


class _Thread(threading.local):
    def __init__(self) -> None:
        # Of the running calls that cast some of their inputs, the innermost last.
        self.calls: list[Originals] = []


_thread = _Thread()


@contextlib.contextmanager
def noted(originals: Originals) -> Iterator[None]:
    """Makes originals available to the modules that a `with` block calls."""
    _thread.calls.append(originals)
    try:
        yield
    finally:
        _thread.calls.pop()


def _original(leaf: PyTree) -> PyTree:
    """Returns the value before all casts of the enclosing calls; the leaf itself without a cast."""
    for originals in reversed(_thread.calls):
        cast, uncast = originals.get(id(leaf), (None, None))
        if cast is leaf:
            leaf = uncast
    return leaf


def cast_inputs(
    module_policy: _casts.ModulePolicy,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_leaf: _casts.IsLeaf = None,
    unrounded: frozenset[int] = frozenset(),
) -> tuple[tuple[Any, ...], dict[str, Any], Originals]:
    """Casts the arguments of a method to the module's input dtype.

    The carries of recurrent modules, and arguments in `keep_inputs`, are not cast. Arguments that
    an enclosing module cast are replaced by their originals first, if this module computes in more
    than 16 bits or lists them in `keep_inputs`.

    Args:
      module_policy: of the module.
      method: name of the method.
      args, kwargs: its arguments.
      is_leaf: as in `jax.tree.map`.
      unrounded: ids of arrays that are not cast.

    Returns:
      The new arguments; and for those that were cast to 16 bits, their originals.
    """
    # Positions below `carried`, and the argument called `carry`, are recurrent state.
    carried, carry = 0, ""
    if module_policy.traits.is_cell and method == "__call__":
        carried, carry = 1, "carry"
    elif module_policy.traits.is_rnn:
        carry = "initial_carry"
    kept, policy, originals = module_policy.kept(method), module_policy.policy, {}
    notes = _core.is_16bit(module_policy.input_dtype)
    is_wide = _core.bits(policy.compute_dtype) > 16

    def cast_leaf(leaf: Any, dtype: DTypeLike) -> Any:
        new = leaf if id(leaf) in unrounded else _cast_input(leaf, dtype)
        if notes and new is not leaf:
            originals[id(new)] = new, leaf
        return new

    def argument(value: PyTree, is_carry: bool, is_kept: bool) -> PyTree:
        if (is_kept or is_wide) and any(_thread.calls):
            value = jax.tree.map(_original, value, is_leaf=is_leaf)
        if is_carry or is_kept:
            return value
        return _casts.cast_tree(value, module_policy.input_dtype, is_leaf, cast_leaf)

    new_args = tuple(
        argument(value, index < carried, index in kept.positions)
        for index, value in enumerate(args)
    )
    new_kwargs = {
        name: argument(value, name == carry, name in kept.names) for name, value in kwargs.items()
    }
    return new_args, new_kwargs, originals


def _cast_input(leaf: Array | np.ndarray, dtype: DTypeLike) -> Array | np.ndarray:
    """Casts an argument, unless `jit` made it from a Python number, which has no dtype."""
    is_number = jnp.ndim(leaf) == 0 and getattr(leaf, "weak_type", False)
    return leaf if is_number else _core.saturating_cast(leaf, dtype)


_NOTE = "jaxmp: "
# Of a function or list outside of a model that kept an array of the search for its first call.
_KEPT = (
    f"{_NOTE}the first call of a wrapped model is traced once more, and a cached function, or a "
    "list or object that the model changes, has kept an array of that trace. Keep NumPy arrays "
    "(np.sin instead of jnp.sin), or compute what is kept in a block of "
    "jax.ensure_compile_time_eval()."
)
# JAX's messages for an operation that has no 16-bit form; the last one is that of JAX 0.10.
_NO_16BIT = re.compile("does not accept dtype|input must be|Unsupported dtype")


def explain_mismatch(
    error: Exception, module_policy: _casts.ModulePolicy, method: str = ""
) -> None:
    """Adds a note to an error of JAX that a module under a policy raises.

    It contains the module and the fixes, if two dtypes do not match, if an operation such as `lu`
    or `rfft` has no 16-bit form, or if something has kept an array of the search of a model.

    Args:
      error: raised by a method of the module.
      module_policy: that of the module.
      method: name of the method, if it is not a forward pass, so that its arguments are not cast.
    """
    policy, text = module_policy.policy, str(error)
    has_note = any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ()))
    if isinstance(error, jax.errors.UnexpectedTracerError):
        if _programs.trace.__code__.co_filename in text and not has_note:
            error.add_note(_KEPT)
        return
    is_refused = _NO_16BIT.search(text) is not None
    concerns = policy.compute_dtype.name in text and ("float32" in text or is_refused)
    if not (_core.is_16bit(policy.compute_dtype) and concerns) or has_note:
        return
    name = module_policy.resolved.path
    below, subtree = (f"{name}/*", f"{name}/**") if name else ("*", "**")
    if is_refused:
        fix = (
            "JAX has no 16-bit form of the operation. Convert its operand in the module: "
            "x.astype(jnp.float32). If it is a parameter or an argument of the module, compute the "
            f"module, without the modules below it, in float32: Rule({name!r}, 'c=f32')."
        )
    elif method:
        fix = (
            f"The method {method!r} is not a forward pass, so its arguments are not cast, but "
            "modules return 16 bits. Convert their results: self(x).astype(jnp.float32). Or "
            f"declare the method as a forward pass: Rule({name!r}, forward_methods=[{method!r}])."
        )
    else:
        fix = (
            "Another array is float32. Create the initial carry of a loop, a cache, or a cotangent "
            "for jax.vjp in the dtype of what is computed: jnp.zeros(shape, x.dtype). If modules "
            f"return the carry, they can also return float32: Rule({below!r}, 'o=f32'). Layers "
            "with few outputs return it already, "
            f"unless you write Rule({subtree!r}, fp32_outputs_below=0). Or compute this module in "
            f"float32: Rule({subtree!r}, 'c=f32')."
        )
    error.add_note(
        f"{_NOTE}this happened in {module_policy.cls.__name__}, "
        f"{f'the module {name!r}' if name else 'the root module'}, which computes in "
        f"{policy.compute_dtype} under its policy ({policy}). {fix}"
    )
