"""Runs a matmul in the dtypes of a decision: with a wide result, or in FP8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax import lax

from jaxmp import _core, _programs
from jaxmp._autocast._decide import Decision
from jaxmp._autocast._resolve import IN_CUSTOM_VJP, AutocastConfig, ScopePolicy, path_of
from jaxmp._autocast._values import Value, is_matmul, kernel_of
from jaxmp._core import Array, DTypeLike, _compat
from jaxmp._policies._device import matmul_precision
from jaxmp.fp8 import _explain as fp8_explain
from jaxmp.fp8._dot_general import dot_general


def multiply(
    equation: _compat.JaxprEqn,
    arrays: list[Array],
    decision: Decision,
    policy: ScopePolicy,
    in_fp8: Callable[..., Array] | None,
) -> Array:
    """Returns the result of a matmul or convolution.

    Args:
      equation: the equation.
      arrays: its operands, in `decision.dtype`.
      decision: its dtypes.
      policy: the policy of its scopes.
      in_fp8: the `fp8.dot_general` that replaces it; None: it runs in `decision.dtype`.
    """
    options, dtype, wide = _programs.arithmetic_of(equation), decision.dtype, decision.result
    if options is None:
        out = _programs.bind(equation, arrays)
        return out if wide == dtype else _core.cast(out, wide)
    if in_fp8 is not None:
        dot = tuple(_programs.dot_of(equation))
        return in_fp8(*arrays, dot, options.precision, wide, out_sharding=options.out_sharding)
    changes: dict[str, Any] = {"preferred_element_type": dtype}
    precision = matmul_precision(policy.policy, None)
    if not _core.is_16bit(dtype) and options.precision is None and precision is not None:
        changes["precision"] = (lax.Precision(precision),) * 2
    if wide == dtype:
        return _programs.bind(equation, arrays, **changes)

    def matmul(*operands: Array, preferred_element_type: DTypeLike = dtype) -> Array:
        return _programs.bind(equation, [*operands], preferred_element_type=preferred_element_type)

    is_transposed = _programs.transposes_lhs(equation)
    operands = arrays[0], arrays[1], wide, *arrays[2:]
    return _programs.wide_matmul(matmul, *operands, is_transposed=is_transposed)


def fp8_product(
    config: AutocastConfig,
    equation: _compat.JaxprEqn,
    values: Sequence[Value],
    scope_path: _programs.Path,
    why: str,
) -> Callable[..., Array] | None:
    """Returns the `fp8.dot_general` that replaces a matmul; None if it does not run in FP8.

    `why` is the reason why it stays in 16 bits or FP32, or "".
    """
    if not is_matmul(equation):
        if config.category(equation) == "low":
            reason = why or f"FP8 has no {equation.primitive.name}"
            fp8_explain.note_unsupported(path_of(scope_path), reason)
        return None
    kernel = kernel_of(values)
    if not _decide_fp8(config, equation, scope_path, kernel, why):
        return None
    assert config.scaling is not None
    return dot_general(config.scaling, kernel="rhs" if kernel else "lhs")


def matmuls_inside(equation: _compat.JaxprEqn) -> Iterator[_compat.JaxprEqn]:
    """Yields the matmuls of an equation that runs as its author wrote it."""
    return filter(is_matmul, (equation, *_programs.equations_inside(equation)))


def explain_products_inside(
    config: AutocastConfig, equation: _compat.JaxprEqn, scope_path: _programs.Path
) -> None:
    """Records for `explain` the matmuls of an equation that runs as its author wrote it."""
    for each in matmuls_inside(equation):
        _decide_fp8(config, each, (*scope_path, IN_CUSTOM_VJP), 1, "")


def _decide_fp8(
    config: AutocastConfig,
    equation: _compat.JaxprEqn,
    scope_path: _programs.Path,
    kernel: int,
    why: str,
) -> bool:
    """Decides if a `dot_general` runs in FP8, and records it; see `fp8_product`.

    `kernel` is 0 or 1, the operand that is treated as the kernel.
    """
    assert config.scaling is not None
    shapes = [_programs.array_aval(var).shape for var in equation.invars]
    dot = _programs.dot_of(equation)
    sizes = lambda axes: math.prod(shapes[kernel][axis] for axis in axes)
    k, batch_size = sizes(dot.contracted[kernel]), sizes(dot.batch[kernel])
    n = math.prod(shapes[kernel]) // max(k * batch_size, 1)
    why = why or config.scope_policy(scope_path).exclusion_reason
    if dot.batch[kernel]:
        why = why or "batch dimensions: two activations, as in attention, or a kernel for each"
    tokens = math.prod(shapes[1 - kernel]) // max(k, 1)
    return fp8_explain.decide(config.scaling, path_of(scope_path), k, n, why, tokens)
