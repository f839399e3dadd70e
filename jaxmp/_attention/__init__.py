"""Dot-product attention: cuDNN's fused kernel where it fits, the same numbers elsewhere.

`_arguments` checks, `_choice` chooses and says why, `_cudnn`, `_blockwise` and `_plain`
compute, `_flax` stands where Flax's attention function would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

from jaxmp._attention._arguments import (
    Arguments,
    Settings,
    arguments,
    as_array,
    check_implementation,
)
from jaxmp._attention._blockwise import blockwise_attention
from jaxmp._attention._choice import ASKED as ASKED
from jaxmp._attention._choice import AttentionExplanation as AttentionExplanation
from jaxmp._attention._choice import Blocker as Blocker
from jaxmp._attention._choice import choose, log_once
from jaxmp._attention._cudnn import cudnn_attention
from jaxmp._attention._plain import xla_attention
from jaxmp._core._compat import target
from jaxmp._policies._policy import get_policy

_RUN: dict[str, Callable[[Arguments], Any]] = {
    "cudnn": cudnn_attention,
    "blockwise": blockwise_attention,
    "xla": xla_attention,
}


@overload
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
    return_residual: Literal[False] = False,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    policy: Any = None,
) -> jax.Array: ...


@overload
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
    return_residual: Literal[True],
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    policy: Any = None,
) -> tuple[jax.Array, jax.Array]: ...


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
    policy: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`softmax(scale * q k^T + bias) v`, logits and softmax in FP32 whatever the operands' dtype.

    Takes what `jax.nn.dot_product_attention` takes, and returns what it returns, except for queries
    that see no key (below). Arguments may be lists or NumPy arrays as well.

    B is the batch, T and S the positions of queries and keys, N and K their heads, H and V the
    sizes of a head.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`; float16, bfloat16, float32 or float64.
      key: `[B, S, K, H]` or `[S, K, H]`, of the same dtype. N is a multiple of K: each key head
        serves N / K query heads in a row (grouped-query and multi-query attention).
      value: `[B, S, K, V]` or `[S, K, V]`, of the same dtype.
      bias: added to the scaled logits; real numbers, broadcastable to `[B, N, T, S]`.
      mask: bool, broadcastable to `[B, N, T, S]`; False hides a key from a query.
      is_causal: position t sees keys 0 to t, counted from the start of both.
      scale: of the logits, a number or an array of one element; None: `H ** -0.5`. "xla" multiplies
        the logits by a traced array, the others the query, in the query's dtype.
      query_seq_lengths: integers `[B]`; queries from there on give zero.
      key_value_seq_lengths: integers `[B]`; keys from there on are seen by no query.
      local_window_size: `(left, right)`: position t sees keys `t - left` to `t + right`; one
        number stands for both. With `is_causal`, right is 0.
      implementation: None or "auto" takes cuDNN's fused kernel where it can serve, else "xla",
        which holds the logits of all pairs, while they are small, else "blockwise", whose memory
        grows linearly with T and S. "cudnn", "blockwise" or "xla" asks for one.
      return_residual: return the log-sum-exp of each query's logits too.
      dropout_rate: probability that a weight is dropped.
      dropout_rng: key of the dropout; which weights it drops differs between implementations.
      policy: anything `get_policy` takes: the operands are cast to its compute dtype, the result to
        its output dtype. None: as they are.

    Returns:
      `[B, T, N, V]`, or `[T, N, V]`, in the operands' dtype. A query that sees no key gives zero
      and hands back a gradient of zero.
      With `return_residual`, a pair of that and the log-sum-exp `[B, T, N]`, or `[T, N]`, in the
      same dtype, as in JAX: computed in FP32, without a gradient, and -0.7 times the largest number
      of FP32 for a query that sees no key. `policy="c=bf16,o=f32"` returns it in FP32, except
      from "cudnn", which JAX rounds.

    Raises:
      AttentionError: if arguments do not fit together, or an implementation that is asked for
        cannot serve them: naming the argument that blocks it, and the change that would unblock.
      PolicyError: if `policy` is none.

    Example:
      >>> q = jnp.ones((2, 6, 4, 8), jnp.bfloat16)
      >>> k = v = jnp.ones((2, 6, 2, 8), jnp.bfloat16)
      >>> dot_product_attention(q, k, v, is_causal=True).shape
      (2, 6, 4, 8)

    Every product reads its operands in their own dtype and adds up in FP32. The gradient of the
    logits alone is multiplied in FP32 where no Tensor Core would do it (on no GPU) and no `policy`
    asks for the compute dtype. "cudnn" and "blockwise" have a gradient of their own and no
    forward-mode derivative; "xla" has all. Sources: FlashAttention-2, arXiv:2307.08691; grouped
    queries, arXiv:2305.13245.
    """
    query_array = as_array(query)
    implementation = check_implementation(implementation)
    given = arguments(
        query_array,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        scale=scale,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        policy=policy,
        # Who names a policy, or has Tensor Cores, wants every product in the compute dtype.
        wide_gradients=policy is None and target() != "gpu",
        return_residual=return_residual,
    )
    result = run(given, implementation)
    out, residual = result if given.settings.residual else (result, None)
    dtype = given.query.dtype if policy is None else get_policy(policy).output_dtype
    leading = query_array.shape[:-1]
    out = out.reshape(*leading, out.shape[-1]).astype(dtype)
    return out if residual is None else (out, residual.reshape(leading).astype(dtype))


def explain_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    implementation: str | None = None,
    **options: Any,
) -> AttentionExplanation:
    """Which implementation `dot_product_attention` would take for these arguments, and why.

    Args:
      query, key, value, bias, mask: arrays, or shapes (`jax.ShapeDtypeStruct`).
      implementation: as in `dot_product_attention`.
      **options: its other arguments.

    Returns:
      The choice; `print` shows it with all that keeps cuDNN's kernel from serving the call.

    Raises:
      AttentionError, PolicyError: what the call itself would raise.

    Example:
      >>> q = jax.ShapeDtypeStruct((1, 8192, 16, 64), jnp.float32)
      >>> choice = explain_attention(q, q, q, is_causal=True)
      >>> choice.implementation, [blocker.argument for blocker in choice.rows]
      ('blockwise', ['device', 'policy'])
    """
    implementation = check_implementation(implementation)
    return choose(arguments(query, key, value, bias, mask, **options), implementation)


def run(given: Arguments, implementation: str) -> Any:
    """`[B, T, N, V]` by the implementation that is chosen, whose name the program will show.

    With `settings.residual`, also the log-sum-exp `[B, T, N]`.
    """
    choice = choose(given, implementation)
    log_once(choice)
    because = choice.rows[0].argument if choice.rows else ""
    arrays = {
        field: getattr(given, field)
        for field in Arguments.__dataclass_fields__
        if field != "settings" and getattr(given, field) is not None
    }
    name = f"{MARK}_{choice.implementation}" + f"_{because}" * bool(because)
    _choices.setdefault(name, {})[_operands_of(arrays.values())] = choice
    return _compiled(choice.implementation, name)(arrays, given.settings)


# How a call shows in a jaxpr, as the name of a jitted function, and in the compiled program.
MARK = "jaxmp_attention"


# Name of that function -> operands -> the choice last made for them, so that an audit, which sees
# no more than name and operands, can say why. As many as there are shapes.
_choices: dict[str, dict[tuple[str, ...], AttentionExplanation]] = {}


def choice_of(name: str, operands: Iterable[Any]) -> AttentionExplanation | None:
    """Why an attention in a traced program is the one it is; None if that is not known.

    Args:
      name: of the jitted function, which begins with `MARK`.
      operands: their types. Those of the call itself are known; of others, such as a batch of
        calls under `vmap`, only what holds for all calls of this name.
    """
    known = _choices.get(name, {})
    exact = known.get(_operands_of(operands))
    if exact is not None:
        return exact
    said = {(choice.reason, choice.rows): choice for choice in known.values()}
    return next(iter(said.values())) if len(said) == 1 else None


def implementation_of(name: str) -> tuple[str, str]:
    """The implementation that the name of a jitted function tells, and what blocks cuDNN's kernel.

    Args:
      name: such as "jaxmp_attention_xla_device".
    """
    rest = name.removeprefix(f"{MARK}_")
    found = max((one for one in _RUN if f"{rest}_".startswith(f"{one}_")), key=len, default="")
    return found, rest.removeprefix(found).removeprefix("_")


def _operands_of(operands: Iterable[Any]) -> tuple[str, ...]:
    return tuple(sorted(f"{array.dtype}{list(array.shape)}" for array in operands))


@functools.cache
def _compiled(implementation: str, name: str) -> Callable[..., Any]:
    """Traced once for all layers of the same shapes."""

    def attention(arrays: dict[str, jax.Array], settings: Settings) -> Any:
        fields = {name: arrays.get(name) for name in Arguments.__dataclass_fields__}
        return _RUN[implementation](Arguments(**{**fields, "settings": settings}))

    attention.__name__ = name
    return jax.jit(attention, static_argnums=1)
