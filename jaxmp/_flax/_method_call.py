"""Calls of methods of Flax modules under a policy, common to Linen and NNX.

A module that computes in 16 bits casts its inputs. If it passes such an input unchanged, as the
same Python object, to an inner module that computes in FP32, the inner module receives the uncast
value. An input that was reshaped or indexed before is a new array in 16 bits: `keep_inputs` exempts
it from the cast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax

from jaxmp import _core, _programs
from jaxmp._core import Array, DTypeLike, PyTree
from jaxmp._flax import _casts, _labels, _missing_precision
from jaxmp._policies import _device
from jaxmp.fp8 import _explain

# ---------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------


# A bound method of a module.
Method: TypeAlias = Callable[..., PyTree]
# Positional and keyword arguments of a call.
CallArguments: TypeAlias = tuple[tuple[PyTree, ...], dict[str, PyTree]]
# Id of a cast array -> (the array, its original). Storing the array prevents the reuse of its id.
Originals: TypeAlias = dict[int, tuple[Array, Array]]


@dataclasses.dataclass(eq=False)
class MethodCall:
    """Call of a method of a module of Linen or NNX.

    Attributes:
      module, module_policy, method: the module, its policy, and the name of the method.
      own_params: returns the parameters of a module without those of its submodules.
      keeps_dtype: the operands require the dtype that the author of the model chose.
      is_function: a transformation of Linen calls a function with the module.
      lifted: the transformation of Linen whose body is called, such as "scan(block)".
      caller: the enclosing call if a module calls its own method; otherwise None.
      originals: of the arguments that were cast to 16 bits.
      is_forward: the call is a part of a forward pass, whose arguments have been cast.
      at_boundary: another module calls a forward pass.
      is_cast: the arguments and results are cast to the dtypes of the policy.
    """

    module: Any
    module_policy: _casts.ModulePolicy
    method: str
    own_params: Callable[[Any], list[Any]]
    keeps_dtype: bool = False
    is_function: bool = False
    lifted: str = ""
    caller: MethodCall | None = dataclasses.field(init=False)
    originals: Originals = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        caller = next((call for call in reversed(running()) if not call.is_function), None)
        is_own = caller is not None and caller.module_policy is self.module_policy
        self.caller = caller if is_own else None
        is_in_forward = self.caller is not None and self.caller.is_forward
        # Otherwise a forward pass of the same module makes the call, and nothing is cast.
        is_outer = not (self.is_function or is_in_forward)
        self.is_forward = not is_outer or self.module_policy.method(self.method).is_forward
        self.at_boundary = self.is_forward and is_outer
        self.is_cast = self.at_boundary and not self.keeps_dtype

    def run(
        self,
        call: Method,
        incoming: CallArguments,
        scope: contextlib.AbstractContextManager[Any] | None = None,
    ) -> PyTree:
        """Calls the method with cast arguments, within `scope`, and casts its results."""
        module_policy, (args, kwargs) = self.module_policy, incoming
        if labeling := _labels.labeling():
            labeling.note_module(module_policy, self.method, is_forward=self.is_forward)
        if self.is_cast:
            args, kwargs = self._cast_inputs(incoming)
        with scope or contextlib.nullcontext(), self._running():
            try:
                out = call(*args, **kwargs)
            except (AssertionError, TypeError, ValueError, NotImplementedError) as error:
                explain_mismatch(error, module_policy, "" if self.is_forward else self.method)
                raise
            if _explain.is_recording() and self.at_boundary:
                _missing_precision.note_weights(module_policy, self.own_params(self.module))
        return self._cast_beside_carry(incoming, out)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Runs a block as this call, in the matmul precision of its policy."""
        stack = _thread.calls
        if not stack:
            _thread.precision = jax.config.jax_default_matmul_precision  # pyright: ignore
        outer = stack[-1].module_policy.policy if stack else None
        policy = self.module_policy.policy
        stack.append(self)
        try:
            with _device.precision_scope(policy, outer, _thread.precision):
                yield
        finally:
            stack.pop()

    def _cast_inputs(self, incoming: CallArguments) -> CallArguments:
        """Casts the arguments to the module's input dtype.

        The carries of recurrent modules, and arguments in `keep_inputs`, are not cast. Arguments
        that an enclosing module cast are replaced by their originals first, if this module computes
        in more than 16 bits or lists them in `keep_inputs`.
        """
        module_policy = self.module_policy
        method = module_policy.method(self.method)
        owner = _labels.label_owner(module_policy.resolved.path, self.method, _labels.ARGUMENT)
        args, kwargs = incoming = _labels.labeled(owner, incoming)
        unrounded = _labels.unrounded(owner, incoming)
        is_noted = _core.is_16bit(module_policy.input_dtype)

        def cast_leaf(leaf: Any, dtype: DTypeLike) -> Any:
            # `jit` makes arrays from Python numbers, which have no dtype.
            is_number = leaf.ndim == 0 and getattr(leaf, "weak_type", False)
            if is_number or id(leaf) in unrounded:
                return _core.weakly_typed(leaf) if unrounded.get(id(leaf)) else leaf
            new = _core.saturating_cast(leaf, dtype)
            if is_noted and new is not leaf:
                self.originals[id(new)] = new, leaf
            return new

        def cast_argument(key: int | str, value: PyTree) -> PyTree:
            if module_policy.is_wide or key in method.kept:
                value = jax.tree.map(_original, value, is_leaf=_casts.is_opaque)
            if key in method.kept or key in method.carried:
                return value
            return _casts.cast_tree(value, module_policy.input_dtype, cast_leaf)

        cast_args = tuple(map(cast_argument, itertools.count(), args))
        return cast_args, {name: cast_argument(name, value) for name, value in kwargs.items()}

    def _cast_beside_carry(self, incoming: CallArguments, out: PyTree) -> PyTree:
        """Casts results as `_cast_results` does, except the carry of a loop or recurrent module.

        A loop requires that its carry keeps its dtypes, and a recurrent state keeps its precision.
        """
        (args, kwargs), traits = incoming, self.module_policy.traits
        cast = functools.partial(self._cast_results, incoming)
        if "while_loop(" in self.lifted and args:
            return _casts.cast_like(out, args[0])
        if type(out) is not tuple or len(out) != 2:
            return cast(out)
        if "scan(" in self.lifted or (traits.is_cell and self.method == "__call__"):
            carry = args[0] if args else kwargs.get("carry")
            return _casts.cast_like(out[0], carry), cast(out[1])
        if traits.is_rnn and self._returns_carry(kwargs):
            return out[0], cast(out[1])
        return cast(out)

    def _returns_carry(self, kwargs: dict[str, Any]) -> bool:
        option = kwargs.get("return_carry")
        return self.module.return_carry if option is None else option

    def _cast_results(self, incoming: CallArguments, out: PyTree) -> PyTree:
        """Casts results of the method, which received `incoming` before any cast."""
        module_policy = self.module_policy
        if self.is_cast:
            owner = _labels.label_owner(module_policy.resolved.path, self.method, _labels.RESULT)
            unrounded = _labels.unrounded(owner, out)
            return _labels.labeled(owner, _casts.cast_outputs(module_policy, out, unrounded))
        if self.at_boundary and module_policy.resolved.casts_output:
            return _casts.cast_outputs(module_policy, out)
        # The caller of the same module, or the author, chooses the dtype of other methods.
        if not (self.is_forward or self.keeps_dtype or self.caller):
            return _casts.widen_outputs(module_policy, out, incoming)
        return out


class _Thread(threading.local):
    def __init__(self) -> None:
        # The running calls, the innermost last, and the matmul precision outside of them.
        self.calls: list[MethodCall] = []
        self.precision: str | None = None


_thread = _Thread()


def running() -> list[MethodCall]:
    """Returns the calls that this thread is running, the innermost last."""
    return _thread.calls


def _original(leaf: PyTree) -> PyTree:
    """Returns the value before all casts of the enclosing calls; the leaf itself without a cast."""
    for call in reversed(running()):
        cast, uncast = call.originals.get(id(leaf), (None, None))
        if cast is leaf:
            leaf = uncast
    return leaf


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------

_NOTE = "jaxmp: "
# Of a function or list outside of a model that kept an array of the search for its first call.
_KEPT = (
    f"{_NOTE}the first call of a wrapped model is traced once more, and a cached function, or a "
    "list or object that the model changes, has kept an array of that trace. Keep NumPy arrays "
    "(np.sin instead of jnp.sin), or compute what is kept in a block of "
    "jax.ensure_compile_time_eval()."
)
# JAX's messages for an operation that has no 16-bit form; the last one is that of JAX 0.10.
_NO_16BIT = re.compile(
    "does not accept dtype|input must be|float16 is not supported|Unsupported dtype"
)


def lacks_16bit_form(error: Exception) -> bool:
    """Returns True if JAX raised an error because an operation, such as `fft`, refuses 16 bits."""
    return _NO_16BIT.search(str(error)) is not None


def explain_mismatch(
    error: Exception, module_policy: _casts.ModulePolicy, method: str = ""
) -> None:
    """Adds a note to an error that a module under a policy raises.

    It contains the module and the fixes, if two dtypes do not match, if an operation such as `lu`
    or `rfft` has no 16-bit form, if the module asserts another dtype, or if something has kept an
    array of the search of a model.

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
    is_refused, is_assertion = lacks_16bit_form(error), isinstance(error, AssertionError)
    concerns = policy.compute_dtype.name in text and ("float32" in text or is_refused)
    if is_assertion:
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        concerns = concerns or "dtype" in f"{text}{line}"
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
    elif is_assertion:
        fix = (
            "If the module has an argument for its dtype, give it that of the policy: "
            f"dtype=jnp.{policy.compute_dtype}. Or compute this module in float32: "
            f"Rule({subtree!r}, 'c=f32')."
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
            "for jax.vjp in the dtype of what is computed: jnp.zeros(shape, x.dtype). Cast a "
            "constant, such as a filter: array.astype(x.dtype). If modules return the carry, they "
            f"can also return float32: Rule({below!r}, 'o=f32'). Layers with few outputs do, "
            f"unless you write Rule({subtree!r}, fp32_outputs_below=0). Or compute this module in "
            f"float32: Rule({subtree!r}, 'c=f32')."
        )
    error.add_note(
        f"{_NOTE}this happened in {module_policy.cls.__name__}, "
        f"{f'the module {name!r}' if name else 'the root module'}, which computes in "
        f"{policy.compute_dtype} under its policy ({policy}). {fix}"
    )
