"""What a report says of a program compiled for a GPU, as plain data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple


class _Row:
    file: str
    line: int

    @property
    def location(self) -> str:
        """`model.py:12`; "" where it is not known."""
        return f"{Path(self.file).name}:{self.line}" if self.file else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmRow(_Row):
    """The matmuls or convolutions of one module, pass, line, kernel and pair of dtypes.

    Args:
      module: the module path; "" is the root, or code outside of every module.
      phase: "forward", "backward" or "recompute".
      lhs: the dtype in which the GPU multiplies the first operand; "tf32" for FP32 operands that it
        rounds to TF32.
      rhs: the same of the second operand.
      out: the dtype of the result.
      kernel: "cublas", "cublas fp8", "cudnn", "cudnn mx", "triton" or "xla". Without the card
        there is no autotuning, and the card may pick another; the dtypes stay.
      was_fp8: the FP8 dtype that an operand had before it was cast up for this product; "" if none.
      flops: of all runs, on each device.
      count: how many kernels.
      file: the user's file; "" where it is not known.
      line: the line in it.
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
class AttentionRow(_Row):
    """The fused attention kernels of one module, pass and line.

    Args:
      module: the module path.
      phase: "forward", "backward" or "recompute".
      kernel: the custom call, such as "__cudnn$fmhaSoftmax".
      dtype: of queries, keys and values.
      shape: of the queries.
      count: how often it runs.
      file: the user's file; "" where it is not known.
      line: the line in it.
      flops: of all runs, on each device; a causal mask halves them.
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
class CollectiveRow(_Row):
    """The collectives of one module, pass, line and dtype.

    Args:
      module: the module path.
      phase: "forward", "backward" or "recompute".
      operation: "all-gather", "all-reduce", "reduce-scatter", "all-to-all" or
        "collective-permute".
      dtype: of what is sent.
      bytes: the larger of operand and result, of all runs, on each device.
      count: how many arrays are sent, in all runs; XLA may send several at once.
      file: the user's file; "" where it is not known.
      line: the line in it.
      in_matmul: True if a matmul reads the result, as of activations; the gradient of a parameter
        goes to the optimizer.
    """

    module: str
    phase: str
    operation: str
    dtype: str
    bytes: int
    count: int
    file: str = ""
    line: int = 0
    in_matmul: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """What the program needs on each device, and what its update moves.

    Args:
      arguments: bytes of all arguments.
      outputs: bytes of all results.
      aliased: bytes of results that take over the memory of donated arguments.
      temporary: bytes of everything between.
      fusions: how many fused kernels the program text has.
      parameters: numbers in the donated floating arrays outside of optimizer states.
      update_bytes: what the kernels that write donated arrays read and write; 0 without donation.
      update_floor: what they would move at least: each such array read and written once, and what
        else they read (gradients) once.
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
