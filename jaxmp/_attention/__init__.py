"""Dot-product attention by the fused kernel of cuDNN, or by equivalent implementations.

`_arguments` checks the arguments and `_choice` chooses an implementation among `_cudnn`,
`_blockwise` and `_plain`. `_layer` computes the attention of Flax layers.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jaxmp._attention._arguments import AttentionArguments, arguments, check_implementation
from jaxmp._attention._blockwise import blockwise_attention
from jaxmp._attention._choice import ASKED as ASKED
from jaxmp._attention._choice import AttentionExplanation as AttentionExplanation
from jaxmp._attention._choice import Blocker as Blocker
from jaxmp._attention._choice import choose_implementation, log_once
from jaxmp._attention._cudnn import cudnn_attention
from jaxmp._attention._plain import xla_attention
from jaxmp._core import _compat
from jaxmp._policies import _policy

_RUN: dict[str, Callable[[AttentionArguments], Any]] = {
    "cudnn": cudnn_attention,
    "blockwise": blockwise_attention,
    "xla": xla_attention,
}


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    policy: _policy.PolicyLike | None = None,
) -> Any:
    """Computes `softmax(scale * q k^T + bias) v` with logits and softmax in FP32.

    Arguments and result are those of `jax.nn.dot_product_attention`, except for queries that see no
    key (below). Arguments may also be lists or NumPy arrays.

    B is the batch, T and S are the positions of queries and keys, N and K their heads, H and V the
    sizes of a head.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`; float16, bfloat16, float32 or float64.
      key: `[B, S, K, H]` or `[S, K, H]`, of the same dtype. N is a multiple of K: N / K consecutive
        query heads share a key head (grouped-query and multi-query attention).
      value: `[B, S, K, V]` or `[S, K, V]`, of the same dtype.
      bias: added to the scaled logits; real numbers, broadcastable to `[B, N, T, S]`.
      mask: bool, broadcastable to `[B, N, T, S]`; False hides a key from a query.
      is_causal: position t sees keys 0 to t, counted from the start of both.
      scale: factor of the logits, a number or an array of one element; None: `H ** -0.5`. "xla"
        multiplies the logits by a traced array; the others multiply the query, in its dtype.
      query_seq_lengths: integers `[B]`; the results of later queries are zero.
      key_value_seq_lengths: integers `[B]`; no query sees later keys.
      local_window_size: `(left, right)`: position t sees keys `t - left` to `t + right`; a single
        number means both. With `is_causal`, right is 0.
      implementation: None or "auto" chooses cuDNN's fused kernel if it supports the call; otherwise
        "xla", which stores the logits of all pairs, if they are small; otherwise "blockwise", whose
        memory is linear in T and S. "cudnn", "blockwise" or "xla" requests one of them.
      return_residual: also return the log-sum-exp of each query's logits.
      dropout_rate: probability that a weight is dropped.
      dropout_rng: PRNG key of the dropout; the dropped weights differ between implementations.
      policy: a policy, as in `get_policy`: operands are cast to its compute dtype, and the result
        to its output dtype. None: no casts.

    Returns:
      `[B, T, N, V]`, or `[T, N, V]`, in the operands' dtype. The result of a query that sees no key
      is zero, and so is its gradient. With `return_residual`, a pair of the result and the
      log-sum-exp `[B, T, N]`, or `[T, N]`, in the same dtype, as in JAX. The log-sum-exp is
      computed in FP32 without a gradient; for a query that sees no key, it is -0.7 times the
      largest FP32 number. `policy="c=bf16,o=f32"` returns it in FP32, except from "cudnn", where
      JAX rounds it.

    Raises:
      AttentionError: if arguments contradict each other, or the requested implementation does not
        support them; the message names the argument and the change that makes it possible.
      PolicyError: if `policy` is not a policy.

    Example:
      >>> q = jnp.ones((2, 6, 4, 8), jnp.bfloat16)
      >>> k = v = jnp.ones((2, 6, 2, 8), jnp.bfloat16)
      >>> dot_product_attention(q, k, v, is_causal=True).shape
      (2, 6, 4, 8)

    All matmuls accumulate in FP32 and read their operands in the dtype of the arguments. Only the
    gradient of the logits is multiplied in FP32, unless the target is a GPU or TPU, whose matrix
    units could not compute this, or a `policy` sets the compute dtype. "cudnn" and
    "blockwise" define a gradient and support no forward-mode derivative; "xla" supports all.
    Sources: FlashAttention-2, arXiv:2307.08691; grouped queries, arXiv:2305.13245.
    """
    query = jnp.asarray(query)
    call = locals()
    implementation = check_implementation(call.pop("implementation"))
    # With a policy, or on the matrix units of GPUs and TPUs, all matmuls use the compute dtype.
    args = arguments(**call, wide_gradients=policy is None and _compat.target() == "cpu")
    result = run_attention(args, implementation)
    out, residual = result if args.settings.residual else (result, None)
    dtype = args.query.dtype if policy is None else _policy.get_policy(policy).output_dtype
    leading = query.shape[:-1]
    out = out.reshape(*leading, out.shape[-1]).astype(dtype)
    return out if residual is None else (out, residual.reshape(leading).astype(dtype))


# The choices of the calls that a block traces.
_record: contextvars.ContextVar[list[AttentionExplanation] | None] = contextvars.ContextVar(
    "jaxmp_attention_record", default=None
)


def recorded_choices() -> contextlib.AbstractContextManager[list[AttentionExplanation]]:
    """Records the choices of a block, for `jaxmp.explain`."""
    return _compat.assigned(_record, [])


def run_attention(args: AttentionArguments, implementation: str) -> Any:
    """Computes attention with the chosen implementation, whose name appears in the program.

    Returns:
      `[B, T, N, V]`; with `settings.residual`, a pair of that and the log-sum-exp `[B, T, N]`.
    """
    choice = choose_implementation(args, implementation)
    record, implementation = _record.get(), choice.implementation
    if record is None:
        log_once(choice)
    else:
        record.append(choice)
        # A fused kernel may not be present where it is only explained.
        implementation = "xla" if implementation == "cudnn" else implementation
    because = choice.rows[0].argument if choice.rows else ""
    name = f"{MARK}_{implementation}" + f"_{because}" * bool(because)
    _choices.setdefault(name, {})[_operands_of(jax.tree.leaves(args))] = choice
    return _compiled(implementation, name)(args)


# Prefix of the name of the jitted function, which appears in jaxprs and compiled programs.
MARK = "jaxmp_attention"


# Name of the jitted function -> operands -> latest choice. An audit, which has only the name and
# the operands, reads the reasons here. There is one entry per shape.
_choices: dict[str, dict[tuple[str, ...], AttentionExplanation]] = {}


def choice_of(name: str, operands: Iterable[Any]) -> AttentionExplanation | None:
    """Returns the choice behind an attention call in a traced program; None if it is unknown.

    Args:
      name: name of the jitted function, which begins with `MARK`.
      operands: types of the operands. Under `vmap` they differ from those of the original call, and
        the choice is unknown.
    """
    return _choices.get(name, {}).get(_operands_of(operands))


def implementation_of(name: str) -> tuple[str, str]:
    """Returns the implementation in the name of a jitted function, and the kernel's first blocker.

    Args:
      name: a name such as "jaxmp_attention_xla_device".
    """
    implementation, _, blocker = name.removeprefix(f"{MARK}_").partition("_")
    return implementation, blocker


def _operands_of(operands: Iterable[Any]) -> tuple[str, ...]:
    return tuple(sorted(f"{array.dtype}{list(array.shape)}" for array in operands))


@functools.cache
def _compiled(implementation: str, name: str) -> Callable[..., Any]:
    """Returns a jitted function, so that layers of the same shapes share one trace."""

    def attention(args: AttentionArguments) -> Any:
        return _on_automatic_axes(_RUN[implementation], args)(args)

    attention.__name__ = name
    return jax.jit(attention)


def _on_automatic_axes(
    compute: Callable[[AttentionArguments], Any], args: AttentionArguments
) -> Callable[..., Any]:
    """Returns a function that makes explicit mesh axes automatic for the operands.

    On explicit axes, JAX refuses operands whose shardings differ. The result has the sharding of
    the query; a head size that differs from that of the query is not split.
    """
    sharding = jax.typeof(args.query).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return compute
    mesh, spec = sharding.mesh, sharding.spec
    is_alike = args.value.shape[-1] == args.query.shape[-1]
    out = NamedSharding(mesh, spec if is_alike else PartitionSpec(*spec[:3]))
    residual = NamedSharding(mesh, PartitionSpec(*spec[:3]))
    shardings: Any = (out, residual) if args.settings.residual else out
    return jax.sharding.auto_axes(compute, out_sharding=shardings)
