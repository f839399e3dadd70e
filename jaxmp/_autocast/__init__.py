"""Automatic mixed precision: traces a function and runs each operation in a dtype chosen for it.

The op table assigns a category to each operation. The interpreter applies it with these rules:

* Arguments and constants are weakly typed: in a binary operation they take the dtype of the other
  operand. Otherwise, an FP32 bias would promote the 16-bit output of its layer. Values computed
  from them are also weakly typed until a matmul, an FP32 operation or an explicit cast.
* Scalars next to arrays are also weakly typed, as in torch.
* An intermediate value that only FP32 operations consume is not rounded to 16 bits: in
  `exp(x - max)` and `sum((x - y) * z)` the subtraction and the multiplication run in FP32 too.
* A matmul that a softmax, a choice or a loss reads returns its FP32 sums, and a value is not
  rounded where a later operation decides or magnifies the rounding.
* Each value is cast at most once to each dtype within a jaxpr.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import jax

from jaxmp import _core, _programs
from jaxmp._autocast._explain import AutocastExplanation, Recorder
from jaxmp._autocast._flax_objects import Writing
from jaxmp._autocast._replay import Autocast
from jaxmp._autocast._resolve import make_config, trace
from jaxmp._core import _compat
from jaxmp._policies import _device, _load
from jaxmp._policies._op_table import OpTable
from jaxmp.fp8 import _explain

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Makes the operations traced in a `with` block compute in FP32 under `autocast`.

    It overrides all policies. It is implemented as a name scope, so it also applies to the backward
    pass of these operations, and it has no effect without `autocast`.

    Example:
      >>> def f(x):
      ...     with full_precision():
      ...         return x @ x.T
      >>> autocast(f, "p=f32,c=bf16,o=f32")(jnp.ones((2, 3))).dtype
      dtype('float32')
    """
    with jax.named_scope(_programs.FULL_PRECISION):
        yield


def autocast(
    fn: Callable[P, R], recipe: _load.RecipeLike, *, ops: Mapping[str, str] | OpTable | None = None
) -> Callable[P, R]:
    """Returns `fn` with each operation in a dtype chosen for it; the results keep their dtypes.

    Matmuls and convolutions run in the compute dtype of their module. Reductions, exponentials and
    other operations that lose accuracy in 16 bits run in FP32. All other operations run in the
    dtype of their operands. `fn` can be any JAX function, with or without Flax; code that sets
    dtypes explicitly is covered too. Composes with `jit`, `grad`, `vmap`, `scan`, `checkpoint` and
    `shard_map`, in any order.

    Apply `jax.jit` to the outermost function. Outside `jit`, each call traces `fn` again, because
    values in its closure may have changed. A `custom_vjp` function and its rules run in the dtypes
    in which they were traced. `jaxmp.explain` lists every matmul with its dtype and the reason.
    References that `fn` makes (`jax.new_ref`) become values, whose uses decide dtypes, too. Those
    of the caller keep their dtype, and FP32 ones receive the FP32 sums of matmuls.

    If a policy sets `matmul = "fp8"`, each `dot_general` without batch dimensions becomes an
    `fp8.dot_general`, which runs three matmuls in FP8 under `jax.grad(autocast(fn, ...))`. If only
    one operand is an argument, or is computed from arguments without a matmul, an FP32 operation or
    a cast, it is the kernel; otherwise the second operand is. `jaxmp.explain` lists these
    matmuls, and why some stay in 16 bits.

    Args:
      fn: a function of pytrees of arrays. Arguments that are not arrays are passed unchanged. What
        it writes to Flax NNX objects in its arguments is written to those of the caller.
      recipe: a recipe's name, a policy string, a `Policy`, a `PolicyMap` or a `Recipe`. Rules
        match the paths of name scopes, such as those of Flax modules. `param_dtype` has no effect.
      ops: changes to the op table of the recipe, such as `{"exp": "low"}`; None for no changes.

    Returns:
      A function of the same arguments. Its results have the same dtypes as those of `fn`, or the
      output dtype of a rule for the root, `Rule("", "o=bf16")`.

    Raises:
      RuleError: if a required rule names a module type, because a traced function contains no
        module types; from the returned function, if a required rule matches no scope of `fn`.
      PolicyError: if `fn` is not a function; if a policy names a float8 dtype or is not valid.
      CompositionError: if the FP8 scaling is stateful, as `fp8.DelayedScaling` is; from the
        returned function, on a GPU without FP8 matmuls.
      OpError: if `ops` names an operation or a category that does not exist.

    Like torch.autocast and TensorFlow's auto_mixed_precision, it assigns each operation to a list
    for one dtype; the contents of the lists differ.

    Example:
      >>> def loss(w, x):
      ...     return jnp.log(jnp.exp(x @ w).sum())
      >>> half = autocast(loss, "p=f32,c=bf16,o=f32")
      >>> half(jnp.ones((3, 4)), jnp.ones((2, 3))).dtype
      dtype('float32')
    """
    config = make_config(fn, recipe, ops, "autocast")
    mark = _core.Mark()

    @functools.wraps(fn)
    def autocast_fn(*args: P.args, **kwargs: P.kwargs) -> R:
        _device.check_training(config.policies, lambda: (args, kwargs), mark)
        with _explain.decisions(config.policies.default.matmul == "fp8") as record:
            writing = Writing(fn, args, kwargs)
            with _compat.assigned(_device._hints.scaled_losses, []) as scaled:
                traced, in_custom_vjp = trace(writing, writing.arguments, {})
            interpreter = Autocast(config, in_custom_vjp, lists_calls=_explain.is_explained())
            arrays = interpreter.function(traced.closed, traced.arrays, writing.count)
        name = f"autocast({getattr(fn, '__name__', 'fn')}, ...)"
        if text := _explain.unused_text(name, record.rows) or interpreter.uncast_text(name):
            _core.warn_user(text)
        if scaled:
            _device._hints.note_scaled((args, kwargs))
        elif interpreter.has_backward:
            _device.check_inner_gradient(config.policies, mark)
        out, values = traced.results(arrays)
        return writing.write(out, values)

    return _core.warn_if_dropped(autocast_fn, "loss_fn = jaxmp.autocast(loss_fn, recipe)")


def explain_operations(
    fn: Callable[..., Any], recipe: _load.RecipeLike, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AutocastExplanation:
    """Lists each matmul and convolution of a function under `autocast`, its dtype and the reason.

    Raises:
      PolicyError, RuleError, CompositionError, OpError: as `autocast`.
    """
    config = make_config(fn, recipe, None, "explain")
    traced, in_custom_vjp = trace(fn, args, kwargs)
    record = Recorder(config)
    interpreter = Autocast(config, in_custom_vjp, record)
    run = lambda *arrays: interpreter.function(traced.closed, list(arrays))
    jax.make_jaxpr(run)(*traced.arrays)
    return record.explanation()
