"""Rows of a report about a program compiled for a GPU, as plain data."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxmp._audit._rows import Located


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmRow(Located):
    """Matmuls or convolutions of one module, pass, line, kernel and pair of dtypes.

    Args:
      module: the module path; "" for the root and for code outside of modules.
      phase: "forward", "backward" or "recompute".
      lhs: the dtype in which the GPU multiplies the first operand; "tf32" if it rounds FP32
        operands to TF32.
      rhs: the dtype of the second operand.
      out: the dtype of the result.
      kernel: "cublas", "cublas fp8", "cudnn", "cudnn mx", "triton" or "xla". If the GPU is not
        present, there is no autotuning, and the GPU may use another kernel of the same dtypes.
      was_fp8: the FP8 dtype that an operand had before it was cast up for this matmul; "" if none.
      flops: FLOPs of all executions, per device.
      count: number of launches in one step; a kernel in a loop is launched once per iteration.
      file: path of the user's source file; "" if it is not known.
      line: line number in `file`.
    """

    module: str
    phase: str
    lhs: str
    rhs: str
    out: str
    kernel: str
    was_fp8: str
    flops: int
    count: int
    file: str = ""
    line: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionRow(Located):
    """Fused attention kernels of one module, pass and line.

    Args:
      module: the module path.
      phase: "forward", "backward" or "recompute".
      kernel: the custom call, such as "__cudnn$fmhaSoftmax".
      dtype: of queries, keys and values.
      shape: of the queries.
      count: number of launches in one step.
      file: path of the user's source file; "" if it is not known.
      line: line number in `file`.
      flops: FLOPs of all executions, per device; a causal mask halves them.
    """

    module: str
    phase: str
    kernel: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    file: str = ""
    line: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveRow(Located):
    """Collectives of one module, pass, line and dtype.

    Args:
      module: the module path.
      phase: "forward", "backward" or "recompute".
      operation: "all-gather", "all-reduce", "reduce-scatter", "all-to-all" or
        "collective-permute".
      dtype: of the arrays that are sent.
      bytes: the larger of operand and result, of all executions, per device.
      count: number of arrays that are sent in all executions; XLA may send several at once.
      file: path of the user's source file; "" if it is not known.
      line: line number in `file`.
      content: "weight", "gradient" (of a parameter), "activation" (or its gradient), "update" (of a
        parameter, as in ZeRO-1), or "" for other arrays, such as scalars and integers.
      axes: the mesh axes over which devices send; empty if they are not known.
      read_as: for weights, the dtype to which all operations cast the result; `dtype` if one does
        not.
      is_kept: True for a weight that the backward pass reads, too, so that it is in memory until
        then.
      in_matmul: True for a weight or an activation that is gathered for a matmul.
      in_outer_loop: True inside of a loop that contains the whole backward pass, as that over
        microbatches does.
    """

    module: str
    phase: str
    operation: str
    dtype: str
    bytes: int
    count: int
    file: str = ""
    line: int = 0
    content: str = ""
    axes: tuple[str, ...] = ()
    read_as: str = ""
    is_kept: bool = False
    in_matmul: bool = False
    in_outer_loop: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Memory of a program per device, and the bytes that the optimizer update moves.

    Args:
      arguments: bytes of all arguments.
      outputs: bytes of all results.
      aliased: bytes of results that reuse the memory of donated arguments.
      temporary: bytes of temporary buffers.
      fusions: number of fused kernels in the program.
      parameters: number of elements of the donated floating-point arrays outside of optimizer
        states.
      update_bytes: bytes that the kernels that write donated arrays read and write; 0 without
        donation.
      update_floor: the minimum of `update_bytes`: each such array is read and written once, and
        other inputs, such as gradients, are read once.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    fusions: int
    parameters: int = 0
    update_bytes: int = 0
    update_floor: int = 0


class Compilation(NamedTuple):
    """Rows of one compiled program."""

    gemms: tuple[GemmRow, ...]
    attention: tuple[AttentionRow, ...]
    collectives: tuple[CollectiveRow, ...]
    memory: MemoryRow
    notes: tuple[str, ...]
