"""Op table: the operations that run in the compute dtype of a policy, and those that stay in FP32.

`DEFAULT_OPS` contains the default rows, and an `OpTable` adds the edits of a run. Both autocast and
the audit use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jaxmp import _core
from jaxmp.errors import OpError

# ---------------------------------------------------------------------------
# Categories
# ---------------------------------------------------------------------------

# Category -> effect on floating operands. Only float16, bfloat16 and float32 are cast: integers,
# complex numbers, float64 and FP8 keep their dtype in every category.
CATEGORIES: Mapping[str, str] = MappingProxyType(
    {
        "low": "operands are cast to the compute dtype",
        "fp32": "16-bit operands are cast up, and the result is FP32",
        "widest": "operands of several dtypes are promoted to the widest of them",
        "follow": "each operand is taken in the dtype in which it arrives",
        "opaque": "operands have the dtypes in which the program was recorded",
        "inside": "the operations inside are handled one by one",
    }
)
# Categories of operations with one operand, or whose operands may have different dtypes.
ANY = ("low", "fp32", "widest", "follow", "opaque")
# Categories of operations whose operands must share a dtype, which excludes "follow".
JOINT = ("low", "fp32", "widest", "opaque")

_HINDRANCES = {
    "follow": "its operands must share a dtype.",
    "inside": "it does not contain a program.",
}


@dataclasses.dataclass(frozen=True)
class OpRule:
    """Row of the op table: a primitive, its category and the reason.

    Args:
      name: the primitive's name, as a jaxpr prints it.
      category: a key of `CATEGORIES`.
      reason: why it has that category, on one line.
      allowed: the categories to which an edit may change it. For a primitive whose parameters or
        meaning fix its dtypes, this is its category alone.

    Raises:
      OpError: if the category is unknown or not among `allowed`, or the reason is missing.

    Example:
      >>> DEFAULT_OPS["exp2"].category
      'fp32'
      >>> OpRule("my_kernel", "low", "reads bfloat16 tiles").allowed
      ('low', 'fp32', 'widest', 'follow', 'opaque')
    """

    name: str
    category: str
    reason: str
    allowed: tuple[str, ...] = ANY

    def __post_init__(self) -> None:
        self.check(self.category)
        if not self.reason.strip():
            raise OpError(
                f"{self.name!r} has no reason. Explain why it is {self.category}, such as "
                f"OpRule({self.name!r}, {self.category!r}, 'reads bfloat16 tiles')."
            )

    def check(self, category: object) -> None:
        """Checks that this operation may have a category.

        Args:
          category: the category in an edit.

        Raises:
          OpError: if not; the message contains the reason and the allowed categories.
        """
        if category in self.allowed:
            return
        if len(self.allowed) == 1:
            raise OpError(
                f"{self.name!r} cannot be {category!r}: it is always {self.category!r} "
                f"({self.reason}). Remove it, or change another operation, such as "
                "OpTable({'exp': 'low'})."
            )
        unknown = f"this category does not exist.{_core.did_you_mean(category, self.allowed)}"
        problem = _HINDRANCES.get(str(category), unknown)
        raise OpError(
            f"{self.name!r} cannot be {category!r}: {problem} Allowed: "
            f"{', '.join(map(repr, self.allowed))}; for example "
            f"OpTable({{{self.name!r}: {self.example!r}}})."
        )

    @property
    def example(self) -> str:
        """Allowed category for an example in a message; not the current one, if possible."""
        return next((c for c in self.allowed if c != self.category), self.category)


# ---------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------

# (category, allowed categories) -> names separated by blanks -> the reason of their rows.
_ROWS: Mapping[tuple[str, tuple[str, ...]], Mapping[str, str]] = {
    ("low", JOINT): {
        "dot_general": "products of 16-bit elements are exact in FP32, in which they accumulate",
        "conv_general_dilated": "a matmul over windows: exact products that accumulate in FP32",
        "ragged_dot_general": "a matmul per group, as of a mixture of experts: as dot_general",
    },
    ("fp32", ANY): {
        "exp": "an argument's error becomes a factor: exp(0.25) at 100 in bfloat16; float16"
        " overflows beyond 11.09",
        "exp2": "a power, as exp: float16 overflows from 16 on",
        "expm1": "exp(x) - 1 for small x, with precision that 16 bits do not have",
        "log": "between 4 and 8 bfloat16 has steps of 0.03: too coarse for a loss",
        "log1p": "log(1 + x) for small x, with precision that 16 bits do not have",
        "log2": "a logarithm, as log: entropies and bits per byte",
        "integer_pow": "float16 overflows from 256**2 on; means of powers are norm statistics",
        "square": "float16 overflows from 256**2 on; means of squares are norm statistics",
        "one_minus_square": "cancels near 1, its intended argument",
        "rsqrt": "a factor in norms, and a variance of 1e-6 is subnormal in float16",
        "sin cos": "an angle of 1000 has steps of 4 in bfloat16, more than half a turn: rotary"
        " positions",
        "tan": "has poles; a rounded argument near them may change the sign",
        "sinh cosh": "exponentials: float16 overflows beyond 11.8",
        "asin acos": "steep at 1: the last bfloat16 before it is an angle of 0.09",
        "asinh acosh atanh": "logarithms, as log; atanh is infinite at 1, acosh steep there",
        "erf_inv": "infinite at 1, and the last bfloat16 before it is 1 - 2**-8",
        "lgamma": "grows like x log(x), and likelihoods subtract such values",
        "digamma": "has poles at 0 and below",
        "bessel_i0e bessel_i1e": "a series whose terms cancel",
        "reduce_sum": "a running sum of ones stalls at 256 in bfloat16, at 2048 in float16",
        "reduce_prod": "16 factors of 2 overflow float16, and every step rounds",
        "cumsum": "a count stalls at 256 in bfloat16, and later entries accumulate all earlier"
        " roundings",
        "cumprod": "products overflow float16 soon, and later entries accumulate all earlier"
        " roundings",
        "cumlogsumexp": "exponentials, logarithms and sums: each of which is FP32",
        "reduce_window_sum": "average pooling: the sum of a large window stalls",
    },
    ("fp32", JOINT): {
        "pow": "the exponent multiplies the base's relative error, and float16 overflows",
        "polynomial": "Horner's rule: large terms cancel, and each step rounds",
        "polygamma zeta": "a series with poles",
        "igamma igammac igamma_grad_a regularized_incomplete_beta": "a series of many terms, for"
        " which JAX itself casts 16 bits up",
        "scatter-add": "sums all entries of one index: an embedding's gradient, over all tokens",
        "scatter-sub": "subtracts all entries of one index: a sum, as scatter-add",
        "scatter-mul": "multiplies all entries of one index: a product, as reduce_prod",
    },
    ("widest", JOINT): {
        "add sub": "one rounding, relative to its result; an FP32 operand keeps its precision",
        "mul div": "one rounding, relative to its result; an FP32 operand keeps its range",
        "add_any": "adds two gradients of one value: the more precise dtype decides",
        "rem": "a remainder has the precision of its operands",
        "atan2": "an angle between -pi and pi of two values, which must have the same scale",
        "max min clamp": "a choice: the result is one of the operands, unrounded",
        "select_n": "a choice by a bool: both branches keep their precision",
        "eq ne lt le gt ge": "a comparison without a further rounding",
        "eq_to le_to lt_to": "a comparison in total order, for sort",
        "concatenate stack": "data side by side in one array: every part keeps its precision",
        "pad": "data and its padding in one array",
        "dynamic_update_slice scatter": "overwrites entries of an array: both keep their precision",
        "scatter-min scatter-max": "a choice between an array's entries and the updates",
        "ragged_all_to_all": "moves data between devices into another array; so does its"
        " derivative",
        "select_and_scatter_add": "max pooling backwards: adds at most as many terms as windows"
        " overlap",
        "select_and_gather_add": "derivative of max pooling: a choice, nothing is added",
    },
    ("follow", ANY): {
        "abs neg sign": "exact: only the sign bit is read",
        "floor ceil round": "exact in the dtype of the operand",
        "is_finite": "exact, and reports an overflow of the actual value",
        "sqrt cbrt": "divides the exponent, and the relative error with it, by 2 or 3",
        "tanh erf erfc atan": "bounded, and flat where its argument is large; XLA computes it in"
        " FP32 and rounds once",
        "logistic": "bounded, and flat at both ends; in float16 exp overflows within it below"
        " -11.09, and at most 1.6e-5 becomes 0",
        "reduce_max reduce_min": "a choice: the result is one of the entries, unrounded",
        "argmax argmin": "an index: exact, ties go to the first in every dtype",
        "cummax cummin": "a running choice among entries, unrounded",
        "reduce_window_max reduce_window_min": "max pooling: a choice among a window's entries",
        "sort top_k approx_top_k": "reorders, exactly; keys and values may have different dtypes",
        "transpose reshape broadcast_in_dim broadcast_to squeeze rev tile": "moves data, exactly;"
        " half the bytes in 16 bits",
        "slice dynamic_slice gather split unstack": "picks data, exactly; half the bytes in 16"
        " bits",
        "copy": "the same data in another buffer",
        "device_put": "the same data on another device or in another memory",
        "sharding_constraint layout_constraint reshard relayout shard_alike": "the same data in"
        " another layout; half the traffic in 16 bits",
        "stop_gradient": "the same data, without a derivative",
        "name": "a mark for rematerialization: residuals are saved in their present dtype",
        "optimization_barrier tie": "the same data; orders the compiler's work",
        "dce_sink": "keeps a value alive without reading it",
        "xla_metadata_value": "the same data, with a note for the compiler",
        "zeros_like": "zeros are exact in every dtype",
        "ppermute all_to_all pbroadcast pbroadcast_dynamic": "moves data between devices, and its"
        " derivative does too: nothing is summed",
        "pmax pmin unreduced_pmax unreduced_pmin": "a choice among devices, unrounded",
    },
    ("opaque", ANY): {
        "psum psum_invariant unreduced_psum": "a sum over devices: its error grows with their"
        " number, so its dtype is the author's choice",
        "reduce_scatter unreduced_reduce_scatter": "a sum over devices, each keeping a part: as"
        " psum",
        "all_gather all_gather_invariant all_gather_reduced": "moves data, but its derivative is a"
        " sum over devices: as psum. Change it to follow to halve its traffic",
        "pvary preduced reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast"
        " vary_unreduced_cast_p": "moves nothing, but its derivative is a sum over devices: as"
        " psum",
    },
    ("opaque", ("opaque",)): {
        "convert_element_type bitcast_convert_type reduce_precision nextafter "
        "lu_pivots_to_permutation and or not xor reduce_and reduce_or reduce_xor shift_left "
        "shift_right_arithmetic shift_right_logical population_count clz mulhi iota empty "
        "empty2 create_token after_all iota_2x32_shape axis_index platform_index "
        "dimension_size dim_as_value shape_assertion from_edtype to_edtype random_bits "
        "random_clone random_fold_in random_seed random_split random_unwrap random_wrap "
        "threefry2x32 threefry4x32 philox2x32 philox4x32 rng_bit_generator random_gamma "
        "rng_uniform": "no floating operand, or dtypes that its parameters contain",
        "complex real imag conj fft cholesky cholesky_update eig eigh geqp3 geqrf hessenberg "
        "householder_product lu ormqr qr schur svd symmetric_product triangular_solve "
        "tridiagonal tridiagonal_solve custom_linear_solve bcoo_dot_general "
        "bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general coo_matmat coo_matvec "
        "coo_spmm coo_spmv csr_matmat csr_matvec csr_spmm csr_spmv spsolve bcoo_extract "
        "bcoo_fromdense bcoo_sort_indices bcoo_sum_duplicates bcoo_todense bcoo_transpose "
        "bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_todense csr_fromdense "
        "csr_todense todense stage": "complex values, or a routine for FP32 and FP64",
        "get swap addupdate accum_grad_in_ref new_ref empty_ref free_ref freeze create_linear "
        "pin unpin with_memory_space_constraint run_state core_map box_get box_set new_box "
        "log_extend log_read new_log": "memory of one dtype, which other operations share",
        "scaled_dot scaled_matmul scaled_matmul_wrapper reduce reduce_window "
        "select_and_scatter call_hi_primitive call_hi_primitive_linearized pallas_call "
        "mpmd_map tpu_custom_call mosaic_gpu_p ffi_call buffer_callback pure_callback "
        "io_callback dot_product_attention_fwd dot_product_attention_fwd_wrapper "
        "dot_product_attention_bwd dot_product_attention_bwd_wrapper "
        "dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper "
        "dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper cudnn_fusion "
        "custom_partitioning call_exported composite compute_on xla_metadata_call "
        "custom_vmap_call linear_call custom_jvp_call_jaxpr custom_lin remat_opt unreachable "
        "program_order all_gather_start all_gather_done all_gather_reduced_start "
        "all_to_all_start all_to_all_done pbroadcast_start pbroadcast_done ppermute_start "
        "ppermute_done psum_start psum_done psum_invariant_start reduce_scatter_start "
        "reduce_scatter_done unreduced_psum_start unreduced_reduce_scatter_start psend "
        "precv": "a kernel, foreign code, or half of an exchange, for the recorded dtypes",
        "custom_vjp_call": "its backward rule was written for the dtypes that its forward rule"
        " saves",
        "debug_callback debug_print inspect_sharding check": "shows what the program computes, as"
        " it was recorded",
    },
    ("inside", ("inside",)): {
        "jit call closed_call eval_jaxpr": "a function, with its shardings and donations",
        "scan while": "a loop, whose carry keeps its dtype from step to step",
        "cond": "branches, which return the same dtypes",
        "remat2": "a function that the backward pass recomputes in the same dtypes",
        "custom_jvp_call": "a function and its derivative, both of which are entered",
        "shard_map": "a function on each device's part",
    },
}

# Name of a primitive -> its default row. A primitive without a row is "opaque".
DEFAULT_OPS: Mapping[str, OpRule] = MappingProxyType(
    {
        name: OpRule(name, category, reason, allowed)
        for (category, allowed), reasons in _ROWS.items()
        for names, reason in reasons.items()
        for name in names.split()
    }
)


@dataclasses.dataclass(frozen=True)
class OpTable:
    """Category of each operation: the default rows with edits. Frozen and hashable.

    Args:
      edits: operation -> category, as a mapping or as pairs. Entries equal to the default are
        dropped, so that tables with the same effect compare equal.
      added: rows for user-defined primitives.

    Raises:
      OpError: if an operation is unknown, or cannot have the category.

    torch.autocast also has lists of operations, which cannot be edited; those of TensorFlow's
    auto_mixed_precision are edited by environment variables. The rows of jaxmp differ from both,
    and each contains a reason.

    Example:
      >>> table = OpTable({"exp": "low"})
      >>> table.category("exp"), table.category("dot_general"), table.category("my_kernel")
      ('low', 'low', 'opaque')
      >>> table.differs()
      {'exp': 'low'}
      >>> table.replace({"exp": "fp32"}) == OpTable()
      True
    """

    edits: Mapping[str, str] | Iterable[tuple[str, str]] = ()
    added: tuple[OpRule, ...] = ()
    _rows: Mapping[str, OpRule] = dataclasses.field(init=False, repr=False, compare=False)
    _category: Mapping[str, str] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = _with_added(self.added)
        vars(self).update(added=tuple(self.added), _rows=rows)
        edits = dict(self.edits)
        for name, category in edits.items():
            self.op(name).check(category)
        kept = {name: edits[name] for name in sorted(edits) if edits[name] != rows[name].category}
        category = {name: op.category for name, op in rows.items()} | kept
        vars(self).update(edits=tuple(kept.items()), _category=category)

    def category(self, name: str) -> str:
        """Returns the category of a primitive; "opaque" without a row."""
        return self._category.get(name, "opaque")

    def op(self, name: str) -> OpRule:
        """Returns the default row or the added row of an operation.

        Raises:
          OpError: if it is not in the table; the message lists similar names.
        """
        if name not in self._rows:
            raise unknown_op(name, self._rows)
        return self._rows[name]

    def replace(self, edits: Mapping[str, str] | OpTable) -> OpTable:
        """Returns a table with further edits.

        Args:
          edits: operation -> category, or a table, whose edits and added rows are adopted.

        Raises:
          OpError: if an operation is unknown, or cannot have the category.
        """
        if isinstance(edits, OpTable):
            added = tuple(dict.fromkeys(self.added + edits.added))
            return OpTable({**dict(self.edits), **dict(edits.edits)}, added)
        if not isinstance(edits, Mapping):
            raise OpError(
                f"{edits!r} is not a table of operations. Pass a mapping from operation to "
                "category, or an OpTable. For example OpTable().replace({'exp': 'low'})."
            )
        return OpTable({**dict(self.edits), **edits}, self.added)

    def differs(self) -> dict[str, str]:
        """Returns operation -> category for edits, sorted by name, followed by added rows."""
        return dict(self.edits) | {op.name: self._category[op.name] for op in self.added}

    def names(self, category: str) -> tuple[str, ...]:
        """Returns the sorted names of the operations in a category.

        Example:
          >>> OpTable().names("low")
          ('conv_general_dilated', 'dot_general', 'ragged_dot_general')
        """
        return tuple(sorted(name for name, other in self._category.items() if other == category))

    def __iter__(self) -> Iterator[OpRule]:
        """Iterates over the default and the added rows, sorted by name."""
        return iter(sorted(self._rows.values(), key=lambda op: op.name))

    def __reduce__(self) -> tuple[type[OpTable], tuple[Any, ...]]:
        return OpTable, (self.edits, self.added)

    def __repr__(self) -> str:
        added = f", added={self.added!r}" if self.added else ""
        return f"OpTable({dict(self.edits)!r}{added})" if self.edits or added else "OpTable()"


def _with_added(added: tuple[OpRule, ...]) -> Mapping[str, OpRule]:
    rows = dict(DEFAULT_OPS)
    for op in added:
        if op.name in rows:
            raise OpError(
                f"{op.name!r} has a row already: {rows[op.name].category}, because "
                f"{rows[op.name].reason}. Edit it, such as OpTable({{'exp': 'low'}}), or rename "
                "your primitive."
            )
        rows[op.name] = op
    return rows


def unknown_op(name: object, rows: Iterable[str]) -> OpError:
    """Returns the error for a name that a table with these rows does not have."""
    close = _core.nearest(str(name), rows)
    hint = f" Nearest: {', '.join(map(repr, close))}." if close else ""
    return OpError(
        f"{name!r} is not an operation of the table.{hint} Write names as a jaxpr prints them "
        "(jax.make_jaxpr(fn)(x)), such as OpTable({'exp': 'low'}); a matmul is 'dot_general', and "
        "a softmax consists of 'exp', 'reduce_sum' and 'div'. Your own primitives require a row: "
        f"OpTable(added=[OpRule({str(name)!r}, 'low', 'why')])."
    )
