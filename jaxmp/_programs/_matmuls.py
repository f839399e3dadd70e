"""Matmuls and convolutions: sizes, FLOPs and alignment."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxmp import _core
from jaxmp._core import Array, DTypeLike, _compat
from jaxmp._programs._constructs import Form, form_of, inners
from jaxmp._programs._jaxprs import Equation, array_aval, equations
from jaxmp._programs._operations import arithmetic_of, dot_of, name_of

MATMULS = (
    "dot_general",
    "conv_general_dilated",
    "ragged_dot_general",
    "scaled_matmul_wrapper",  # jax.nn.scaled_matmul
)

# Name of the functions of MX matmuls. Their operands are in FP8; an emulated one converts them.
MX_MATMUL = "mx_multiply"


_Shape: TypeAlias = Sequence[int]
# FLOPs, widths and `contracts` of a `Matmul`.
_Sizes: TypeAlias = tuple[int, dict[str, int], bool]


class Matmul(NamedTuple):
    """Matmul or convolution as a matmul [M, K] x [K, N]."""

    lhs: Any  # dtype
    rhs: Any  # dtype
    out: Any  # dtype
    flops: int
    # Role ("M", "N" or "K") -> size, for the innermost dimensions of operands and result.
    widths: dict[str, int]
    # False for an outer product, which sums nothing.
    contracts: bool

    @property
    def is_integer(self) -> bool:
        """True for integers and bools, which policies do not cast."""
        return not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in (self.lhs, self.rhs))


def is_inner_product(equation: Equation) -> bool:
    """Returns True for inner products of vectors, which Tensor Cores do not compute.

    An example is a loss that selects the logits of its labels.
    """
    if equation.primitive.name != "dot_general":
        return False
    return array_aval(equation.outvars[0]).ndim == len(dot_of(equation).batch[0])


def is_outer_product(equation: Equation) -> bool:
    """Returns True for products that sum nothing, such as positions times frequencies."""
    return equation.primitive.name == "dot_general" and terms_of(equation) == 1


def terms_of(equation: Equation) -> int:
    """Returns the number of products that each result of a `dot_general` sums."""
    shape = array_aval(equation.invars[0]).shape
    return math.prod(shape[axis] for axis in dot_of(equation).contracted[0])


def matmul_of(equation: Equation) -> Matmul:
    """Returns the matmul of an equation of `MATMULS`."""
    lhs, rhs = (var.aval for var in equation.invars[:2])
    out = equation.outvars[0].aval
    measure = _SIZES[equation.primitive.name]
    flops, widths, contracts = measure(equation.params, lhs.shape, rhs.shape, out.shape)
    options = arithmetic_of(equation)
    # An algorithm rounds FP32 operands inside of the kernel.
    dtype = None if options is None else options.rounded_dtype
    return Matmul(dtype or lhs.dtype, dtype or rhs.dtype, out.dtype, flops, widths, contracts)


def _dot(params: Mapping[str, Any], lhs: _Shape, rhs: _Shape, out: _Shape) -> _Sizes:
    (lhs_k, rhs_k), (lhs_b, rhs_b) = params["dimension_numbers"]
    left, right = _roles(len(lhs), lhs_k, lhs_b, "M"), _roles(len(rhs), rhs_k, rhs_b, "N")
    free = [role for role in (*left, *right) if role in ("M", "N")]
    sizes = {"K": _size(lhs, left, "K"), "M": _size(lhs, left, "M"), "N": _size(rhs, right, "N")}
    widths = {}
    for shape, roles in ((lhs, left), (rhs, right), (out, ["B"] * len(lhs_b) + free)):
        if roles and (role := roles[-1]) != "B":
            widths[role] = min(sizes[role], _trailing(shape, roles))
    is_vector = 1 in (sizes["M"], sizes["N"])
    return 2 * math.prod(out) * sizes["K"], {} if is_vector else widths, sizes["K"] != 1


def _roles(rank: int, contracted: Sequence[int], batch: Sequence[int], free: str) -> list[str]:
    return ["K" if axis in contracted else "B" if axis in batch else free for axis in range(rank)]


def _size(shape: _Shape, roles: list[str], role: str) -> int:
    """Returns the product of the axes with a role."""
    return math.prod(size for size, other in zip(shape, roles, strict=True) if other == role)


def _trailing(shape: _Shape, roles: list[str]) -> int:
    """Returns the product of the innermost axes with the same role."""
    start = max((n for n, role in enumerate(roles, 1) if role != roles[-1]), default=0)
    return math.prod(shape[start:])


def _ragged(params: Mapping[str, Any], lhs: _Shape, rhs: _Shape, out: _Shape) -> _Sizes:
    dims = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    inner = math.prod(lhs[axis] for axis in dims[0][0])
    return 2 * math.prod(out) * inner, {"K": inner, "N": out[-1]}, True


def _conv(params: Mapping[str, Any], lhs: _Shape, rhs: _Shape, out: _Shape) -> _Sizes:
    numbers = params["dimension_numbers"]
    features_out, features_in, *window = numbers.rhs_spec
    taps = math.prod(rhs[axis] for axis in window) * rhs[features_in]
    # The zeros of a dilated input need no multiplications.
    taps = taps / math.prod(params.get("lhs_dilation") or (1,))
    widths = {"K": rhs[features_in], "N": rhs[features_out]}
    grouped = params.get("feature_group_count", 1) > 1
    return round(2 * math.prod(out) * taps), {} if grouped else widths, True


def _scaled(params: Mapping[str, Any], lhs: _Shape, rhs: _Shape, out: _Shape) -> _Sizes:
    """Returns the sizes of [B, M, K] and [B, N, K], with scales per block along K."""
    del params
    return 2 * math.prod(out) * lhs[-1], {"K": lhs[-1], "N": rhs[-2]}, True


_SIZES = dict(zip(MATMULS, (_dot, _conv, _ragged, _scaled), strict=True))


# ---------------------------------------------------------------------------
# Fused kernels
# ---------------------------------------------------------------------------

_FUSED = re.compile(r"dot_product_attention_(fp8_)?(fwd|bwd)")


def kernel_matmuls(equation: Equation) -> list[Matmul] | None:
    """Returns the matmuls of cuDNN's attention; None for other kernels, which are not known."""
    match = _FUSED.match(equation.primitive.name)
    return None if match is None else _fused_attention(equation, backward=match[2] == "bwd")


def _fused_attention(equation: Equation, *, backward: bool) -> list[Matmul]:
    params = equation.params
    query, key, value = (var.aval for var in equation.invars[:3])
    in_order = getattr(params.get("layout", 0), "value", params.get("layout", 0)) == 0
    heads, positions = (2, 1) if in_order else (1, 2)
    batch, queries, keys = query.shape[0], query.shape[positions], key.shape[positions]
    is_causal = "CAUSAL" in str(params.get("mask_type")) or bool(params.get("use_causal_mask"))
    flops = attention_flops(
        (batch, query.shape[heads], queries, keys),
        (query.shape[3], value.shape[3]),
        is_causal=is_causal,
        window=int(params.get("sliding_window_length") or 0),
        backward=backward,
    )
    widths = {"K": query.shape[3], "N": keys}
    return [Matmul(query.dtype, key.dtype, equation.outvars[0].aval.dtype, flops, widths, True)]


def attention_flops(
    logits: tuple[int, ...],
    sizes: tuple[int, int],
    *,
    is_causal: bool,
    window: int,
    backward: bool,
) -> int:
    """Returns the FLOPs of fused attention: two matmuls forward, five backward.

    The backward pass recomputes the logits. A causal mask halves the FLOPs, because the kernel
    skips masked blocks (FlashAttention-2, arXiv:2307.08691, section 4.1). A window limits the
    number of keys.

    Args:
      logits: `[B, N, T, S]`.
      sizes: of a head in queries and keys, and in values.
      is_causal: True for a causal mask.
      window: the length of the sliding window; 0 for none.
      backward: True for the backward pass.
    """
    batch, heads, queries, keys = logits
    pairs = queries * min(keys, window) if window else queries * keys // (2 if is_causal else 1)
    # Logits and the gradients of query and key; result and the gradients of value and weights.
    of_keys, of_values = (3, 2) if backward else (1, 1)
    return 2 * batch * heads * pairs * (of_keys * sizes[0] + of_values * sizes[1])


def wide_matmul(
    product: Callable[..., Array], *operands: Any, is_transposed: bool | None = None
) -> Array:
    """Computes `_core.wide_product`, also where XLA's CPU compiler has no kernel for the result.

    Args:
      product, *operands: as in `_core.wide_product`.
      is_transposed: True if the last dimension of the first operand is not summed, for which there
        is no kernel; None to trace the product.
    """

    def multiply(*arrays: Array, **dtypes: Any) -> Array:
        if dtypes and _compat.target() == "cpu":
            is_traced = is_transposed is None
            dots = equations(jax.make_jaxpr(product)(*arrays)) if is_traced else ()
            if is_transposed or any(map(transposes_lhs, dots)):
                return _core.widened_product(product, *arrays)
        return product(*arrays, **dtypes)

    return _core.wide_product(multiply, *operands)


def transposes_lhs(equation: _compat.JaxprEqn) -> bool:
    """Returns True for a `dot_general` whose first operand has a last dimension that is kept."""
    is_dot = equation.primitive.name == "dot_general"
    return is_dot and array_aval(equation.invars[0]).ndim - 1 not in dot_of(equation).contracted[0]


# ---------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------


def count_flops(jaxpr: _compat.AnyJaxpr) -> Counter[tuple[Any, Any]]:
    """Returns the FLOPs of a program's matmuls by the dtypes of their operands, without integers.

    Of the branches of a `cond`, the one with the most FLOPs counts.
    """
    counts: Counter[tuple[Any, Any]] = Counter()
    for equation in equations(jaxpr, inside=False):
        name = equation.primitive.name
        matmuls = [matmul_of(equation)] if name in MATMULS else kernel_matmuls(equation) or []
        for matmul in matmuls:
            if not matmul.is_integer:
                counts[matmul.lhs, matmul.rhs] += matmul.flops
        if matmuls or name == "pallas_call":
            continue
        inside = [_multiplied(count_flops(inner.jaxpr), inner.times) for inner in inners(equation)]
        if form_of(equation) is Form.BRANCH:
            inside = [max(inside, key=Counter.total)]
        elif name_of(equation) in (_core.WIDENED_MATMUL, MX_MATMUL):
            # Scales of an MX matmul are integers.
            dtypes = (var.aval.dtype for var in equation.invars)
            lhs, rhs = [each for each in dtypes if jnp.issubdtype(each, jnp.floating)][:2]
            inside = [Counter({(lhs, rhs): flops.total()}) for flops in inside]
        for flops in inside:
            counts.update(flops)
    return counts


def _multiplied(flops: Counter[tuple[Any, Any]], times: int) -> Counter[tuple[Any, Any]]:
    return Counter({pair: count * times for pair, count in flops.items()})


def multiple_of(dtype: DTypeLike) -> int:
    """Returns the number of elements in 16 bytes, of which sizes should be multiples."""
    return max(1, 128 // _core.bits(dtype))


def padded(size: int, multiple: int) -> int:
    """Returns `size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple
