"""autocast: runs a traced function again, each operation in the dtype that suits it.

The rules per operation stand in the op table; here is how they are carried out:

* a value that no operation has computed yet (an argument, a constant, what is merely reshaped from
  one) has no say in the dtype of a sum: it is cast to that of the other operand. Otherwise every
  bias would turn its layer's result into FP32;
* neither has a scalar beside an array, as in torch;
* what only FP32 operations read is not rounded on the way to them: in `exp(x - max)` and
  `sum((x - y) * z)` the arithmetic between is FP32 too;
* one cast per value and target dtype in each jaxpr.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmp._autocast._interpreter import Interpreter
from jaxmp._autocast._record import AutocastDecision as AutocastDecision
from jaxmp._autocast._record import AutocastExplanation as AutocastExplanation
from jaxmp._autocast._record import Record
from jaxmp._autocast._regions import FULL_PRECISION
from jaxmp._autocast._trace import rules_for, trace


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """What is traced in this block computes in FP32 under `autocast`, whatever the policies say.

    It is a name scope, so it holds in the backward pass too, and costs nothing without `autocast`.

    Example:
      >>> def f(x):
      ...     with full_precision():
      ...         return x @ x.T
      >>> autocast(f, "p=f32,c=bf16,o=f32")(jnp.ones((2, 3))).dtype
      dtype('float32')
    """
    with jax.named_scope(FULL_PRECISION):
        yield


def autocast(fn: Callable[..., Any], policies: Any, *, ops: Any = None) -> Callable[..., Any]:
    """`fn` with each operation in the dtype that suits it; the results keep their dtypes.

    Matrix products and convolutions run in the compute dtype of the module they belong to, sums,
    exponentials and their like in FP32, the rest in what reaches it. This needs no Flax: any JAX
    function will do, and code that asks for a dtype by name is reached too. Composes with `jit`,
    `grad`, `vmap`, `scan`, `checkpoint` and `shard_map`, in any order.

    Outside of `jit`, every call traces `fn` again, because what it closes over may have changed:
    put `jax.jit` around the outermost function. A `custom_vjp` function and its rules run in the
    dtypes in which they were traced. `explain_autocast` lists every matmul, its dtype and why.

    Where the policies say `matmul = "fp8"`, each `dot_general` without batch dimensions becomes
    `fp8.dot_general`: three products in FP8 under `jax.grad(autocast(fn, ...))`. Of its operands
    the kernel is the one that nothing has computed, such as an argument; the second where that
    tells nothing. `fp8.explain` lists the products, and why some stay in 16 bits.

    Args:
      fn: a pure function of arrays, in pytrees; arguments that are no arrays are handed through.
      policies: a recipe's name, a policy string, a `Policy`, a `PolicyMap` or a `Recipe`. Rules
        match the path of name scopes, such as Flax modules leave. `param_dtype` says nothing here.
      ops: changes to the recipe's op table, such as `{"exp": "low"}`; None: none.

    Returns:
      A function of the same arguments. Its results have the dtypes that `fn` gives them, or the
      output dtype of a rule for the root, `Rule("", "o=bf16")`.

    Raises:
      RuleError: if a required rule names a module type, which a traced function does not know; from
        the returned function, if a required rule matches none of the scopes of `fn`.
      PolicyError: if `fn` is no function; if a policy names a float8 dtype, or makes no sense.
      CompositionError: if FP8 products are to be scaled with a state, as by `fp8.DelayedScaling`;
        from the returned function, on a GPU without FP8 products.
      OpError: if `ops` names an operation or a category that does not exist.

    The idea of one list of operations per dtype is that of torch.autocast and TensorFlow's
    auto_mixed_precision; the lists are jaxmp's own.

    Example:
      >>> def loss(w, x):
      ...     return jnp.log(jnp.exp(x @ w).sum())
      >>> half = autocast(loss, "p=f32,c=bf16,o=f32")
      >>> half(jnp.ones((3, 4)), jnp.ones((2, 3))).dtype
      dtype('float32')
    """
    rules = rules_for(fn, policies, ops, "autocast")

    @functools.wraps(fn)
    def autocast_fn(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fn, args, kwargs)
        interpreter = Interpreter(rules, traced.in_custom_vjp)
        return traced.results(interpreter.function(traced.closed, traced.arrays))

    return autocast_fn


def explain_autocast(
    fn: Callable[..., Any], policies: Any, *, ops: Any = None
) -> Callable[..., AutocastExplanation]:
    """Lists each matmul and convolution that `autocast` finds, its dtype, and the reason.

    Nothing is computed. Explain the function that you would give to `autocast`: `loss_fn` for
    `jax.grad(autocast(loss_fn, ...))`, whose backward matmuls run in the dtypes of the forward
    ones, and `jax.grad(loss_fn)` for `autocast(jax.grad(loss_fn), ...)`.

    Args:
      fn: a pure function of arrays, as for `autocast`.
      policies: as for `autocast`.
      ops: as for `autocast`.

    Returns:
      A function of the arguments of `fn`, which may be `jax.ShapeDtypeStruct`. It returns an
      `AutocastExplanation`: `.rows`, `.share` of the FLOPs in 16 bits; `str()` prints a table.

    Raises:
      PolicyError, RuleError, CompositionError, OpError: as `autocast`.

    Example:
      >>> def model(w, x):
      ...     with jax.named_scope("head"):
      ...         return x @ w
      >>> explanation = explain_autocast(model, "bf16")(jnp.ones((3, 4)), jnp.ones((2, 3)))
      >>> print(explanation)  # doctest: +ELLIPSIS
      100.0% of the matmul FLOPs run in 16 bits or FP8: 1 of 1 matmuls and convolutions.
        bfloat16  head  dot_general of [2, 3] and [3, 4] ... default policy p=f32,c=bf16,o=f32
      >>> explanation.rows[0].dtype
      'bfloat16'
    """
    rules = rules_for(fn, policies, ops, "explain_autocast")

    @functools.wraps(fn)
    def explain(*args: Any, **kwargs: Any) -> AutocastExplanation:
        traced = trace(fn, args, kwargs)
        record = Record(rules)
        interpreter = Interpreter(rules, traced.in_custom_vjp, record)
        run = lambda *arrays: interpreter.function(traced.closed, list(arrays))
        jax.make_jaxpr(run)(*traced.arrays)
        return record.explanation()

    return explain
