"""Training steps that the GPU benchmarks time: models, batches and their matmul FLOPs."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import gpt
import llama

# No loop over the layers where the program compiles fast without one.
_GPT2 = gpt.SIZES["gpt2"].clone(unroll=True)
_LLAMA_8B = dataclasses.replace(llama.SIZES["llama-3-8b"], layers=8, unroll=True)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, `gpt.GPT` or `llama.Shape`, and the batch of one step."""

    model: Any
    batch: int
    length: int

    @property
    def is_llama(self) -> bool:
        return isinstance(self.model, llama.Shape)

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def vocabulary(self) -> int:
        """Rows of the token table."""
        return self.model.vocabulary if self.is_llama else gpt.padded(self.model.vocabulary)

    @property
    def flops(self) -> int:
        """FLOPs of the matmuls of a step, forward and backward; half of causal attention."""
        m = self.model
        if self.is_llama:
            layer = m.width * (m.qkv_size + m.width + 3 * m.hidden)
        else:
            layer = 12 * m.width**2
        linear = 6 * self.tokens * (m.layers * layer + self.vocabulary * m.width)
        return linear + 6 * m.layers * self.tokens * self.length * m.width


def _workload(model: Any, batch: int, length: int) -> Workload:
    change = {"max_length": length}
    is_llama = isinstance(model, llama.Shape)
    return Workload(
        dataclasses.replace(model, **change) if is_llama else model.clone(**change), batch, length
    )


WORKLOADS = {
    "w1": _workload(_GPT2, 64, 1024),
    "w2": _workload(gpt.SIZES["gpt2-xl"], 16, 1024),
    "w2b": _workload(gpt.SIZES["gpt2-xl"], 32, 1024),
    "w3": _workload(llama.SIZES["llama-3.2-1b"], 4, 4096),
    "w3b": _workload(llama.SIZES["llama-3.2-1b"], 2, 8192),
    "w4": _workload(llama.SIZES["llama-1.3b"], 8, 2048),
    "w5": _workload(_LLAMA_8B, 4, 4096),
    "w5b": _workload(_LLAMA_8B, 2, 8192),
}
_TOY_GPT = gpt.GPT(layers=2, width=64, heads=4, vocabulary=250)
_TOY_LLAMA = llama.Shape(2, 64, 4, 2, 96, 128)
TOY = {
    name: _workload(_TOY_LLAMA if size.is_llama else _TOY_GPT, 2, 32)
    for name, size in WORKLOADS.items()
}
