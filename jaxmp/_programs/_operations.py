"""Readers of the parameters of operations without jaxprs; see `_constructs` for those with jaxprs.

JAX does not document these parameters. A function that reads one that an operation lacks returns
the value that is named in its docstring.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jaxmp._core import as_tuple
from jaxmp._programs._jaxprs import array_aval

# First part of the name of an algorithm -> the dtype of its operands.
_ROUNDED = {"BF16": jnp.dtype(jnp.bfloat16), "F16": jnp.dtype(jnp.float16)}

# Dimensions of the two operands of a matmul.
_Sides: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class Dot(NamedTuple):
    """`dot_general`.

    contracted: the dimensions of both operands that are summed.
    batch: the dimensions of both operands that belong together and are not summed.
    """

    contracted: _Sides
    batch: _Sides


def dot_of(equation: Any) -> Dot:
    """Returns the record of a `dot_general`."""
    return Dot(*equation.params["dimension_numbers"])


def copied_shapes(equation: Any) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the copies that XLA makes of the operands of a matmul: operand, shape of the copy.

    cuDNN pads both ends of an axis alike, and puts no zeros between elements. It computes the
    gradient of the kernel of a transposed convolution from transposed operands; with two spatial
    axes, XLA exchanges them and adds no zeros. One matmul multiplies all groups of a `ragged_dot`,
    for each of which the other rows are zeros. The list is empty for other operations.
    """
    if equation.primitive.name not in ("conv_general_dilated", "ragged_dot_general"):
        return []
    params, shapes = equation.params, [array_aval(var).shape for var in equation.invars]
    if "ragged_dot_dimension_numbers" in params:
        has_groups = params["ragged_dot_dimension_numbers"].rhs_group_dimensions
        return [(n, (*shapes[2], *shapes[n])) for n in range(1 if has_groups else 2)]
    operand, _, result = params["dimension_numbers"]
    padded, is_padded = list(shapes[0]), False
    steps = params["lhs_dilation"], params["rhs_dilation"], params["padding"]
    for n, axis, step, skipped, (low, high) in zip(result[2:], operand[2:], *steps, strict=True):
        # A stride, by which the gradient of a kernel dilates the other operand, may leave out
        # elements at the upper end.
        is_padded |= step == 1 and not high <= low < high + skipped
        is_padded |= array_aval(equation.outvars[0]).shape[n] > padded[axis]
        padded[axis] = (padded[axis] - 1) * step + 1 + low + high
    is_transposed = not is_padded and max(steps[0], default=1) > 1
    if is_transposed and len(steps[0]) == 2:
        return [(n, shapes[n][::-1]) for n in range(2)]
    copies = [(0, tuple(padded)), (0, tuple(padded[::-1])), (1, shapes[1][::-1])]
    return copies if is_transposed else copies[:1] if is_padded else []


class Arithmetic(NamedTuple):
    """Options of a matmul or convolution.

    precision: that of the computation, or those of both operands; None: JAX's default; (): the
      operation has no such option.
    result_dtype: the dtype in which the author asked for the result; None: that of the operands.
    out_sharding: sharding of the result on explicit axes; None: JAX chooses it.
    """

    precision: Any
    result_dtype: Any
    out_sharding: Any

    @property
    def is_highest(self) -> bool:
        """True if the author asked for `precision=HIGHEST`."""
        return lax.Precision.HIGHEST in as_tuple(self.precision)

    @property
    def rounded_dtype(self) -> Any:
        """The 16-bit dtype to which an algorithm such as BF16_BF16_F32 rounds operands, or None."""
        algorithm = self.precision
        if isinstance(algorithm, lax.DotAlgorithm):
            parts = algorithm.lhs_component_count * algorithm.rhs_component_count
            dtype = jnp.dtype(algorithm.lhs_precision_type)
            return dtype if parts == 1 and dtype.itemsize == 2 else None
        # Those whose names end with X3, X6 or X9 multiply several parts of each operand.
        name = algorithm.name if isinstance(algorithm, lax.DotAlgorithmPreset) else ""
        return None if "_X" in name else _ROUNDED.get(name.partition("_")[0])


def arithmetic_of(equation: Any) -> Arithmetic | None:
    """Returns the options of a matmul or convolution; None for operations that have none."""
    params = equation.params
    if "preferred_element_type" not in params:
        return None
    dtype = params["preferred_element_type"]
    return Arithmetic(params.get("precision", ()), dtype, params.get("out_sharding"))


def new_dtype_of(equation: Any) -> Any:
    """Returns the dtype of the result of a `convert_element_type`."""
    return equation.params["new_dtype"]


def exported_of(equation: Any) -> Any:
    """Returns the `jax.export.Exported` that a `call_exported` runs."""
    return equation.params["exported"]


def name_of(equation: Any) -> str:
    """Returns the name of a jitted function, of a kernel, or of `checkpoint_name`; else ""."""
    name = equation.params.get("name")
    return name if isinstance(name, str) else ""


def exponent_of(equation: Any) -> int:
    """Returns the exponent of an `integer_pow`; 1 for other operations."""
    return equation.params["y"] if equation.primitive.name == "integer_pow" else 1


def dimensions_of(equation: Any) -> list[int | None] | None:
    """Returns for each dimension of the result the one of the operand that it is.

    None stands for a new dimension; None instead of the list, for an operation that changes them.
    """
    name, params = equation.primitive.name, equation.params
    operand, result = (var.aval.shape for var in (equation.invars[0], equation.outvars[0]))
    if name in ("copy", "rev"):
        return list(range(len(operand)))
    if name == "transpose":
        return list(params["permutation"])
    if name == "squeeze":
        gone = {n % len(operand) for n in params["dimensions"]}
        return [n for n in range(len(operand)) if n not in gone]
    if name != "broadcast_in_dim":
        return None
    dimensions: list[int | None] = [None] * len(result)
    for n, dimension in enumerate(params["broadcast_dimensions"]):
        if operand[n] == result[dimension]:
            dimensions[dimension] = n
    return dimensions


def iota_length(equation: Any) -> int:
    """Returns the number of values of an `iota`."""
    params = equation.params
    return params["shape"][params["dimension"]]


def count_of_keys(equation: Any) -> int:
    """Returns the number of operands by which a sort compares; 1 for other operations."""
    return equation.params.get("num_keys", 1)


def is_unique(equation: Any) -> bool:
    """Returns True for a gather or scatter that reads or writes each entry at most once."""
    return equation.params["unique_indices"]


def batch_of(equation: Any) -> tuple[int, ...]:
    """Returns the dimensions of the indices of a scatter that number its separate parts."""
    return equation.params["dimension_numbers"].scatter_indices_batching_dims


def axes_of(equation: Any) -> tuple[int, ...]:
    """Returns the dimensions that a reduction, cumulation, sort or top-k combines; else ()."""
    params = equation.params
    dimension = params.get("dimension", params.get("dimensions"))
    return as_tuple(params.get("axes", params.get("axis", dimension)))


def mesh_axes_of(equation: Any) -> tuple[Any, ...]:
    """Returns the mesh axes of a collective, such as `psum` or `all_gather`."""
    return as_tuple(equation.params.get("axes", equation.params.get("axis_name")))


def window_of(equation: Any) -> int:
    """Returns the number of elements that a windowed reduction combines."""
    return math.prod(equation.params["window_dimensions"])


def sharding_of_result(equation: Any) -> Any:
    """Returns the sharding that an operation, such as a constraint, asks for; None without one."""
    return equation.params.get("sharding", equation.params.get("dst_sharding"))


def is_partial(equation: Any) -> bool:
    """Returns True for a sharding constraint that leaves some dimensions to the compiler."""
    return bool(equation.params["unconstrained_dims"])


def is_in_mesh(equation: Any) -> bool:
    """Returns True if a sharding constraint was traced where a mesh is set."""
    mesh = equation.params.get("context_mesh")
    return mesh is not None and not mesh.empty


class Jit(NamedTuple):
    """Flags of a jitted function, for each operand.

    shardings: shardings that its author asks for; None if there are none.
    donated: True for operands whose memory is reused.
    """

    shardings: tuple[Any, ...]
    donated: tuple[bool, ...]


def jit_of(equation: Any) -> Jit:
    """Returns the flags of a jitted function, and the shardings of a `shard_map`.

    Other operations have none set.
    """
    params, count = equation.params, len(equation.invars)
    divided = [NamedSharding(params["mesh"], spec) for spec in params.get("in_specs", ())]
    shardings = divided or params.get("in_shardings") or (None,) * count
    return Jit(tuple(shardings), tuple(params.get("donated_invars") or (False,) * count))


def label_of(equation: Any) -> str:
    """Returns the label of an array, which `checkpoint_name` sets by the primitive `name`."""
    return equation.params["name"]
