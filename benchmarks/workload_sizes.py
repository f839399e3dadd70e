"""Training steps that the GPU benchmarks time, as sizes: this module requires no framework."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A decoder and the batch of one step; `size` is its name in examples/gpt.py or llama.py."""

    size: str
    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int  # rows of the token table
    batch: int
    length: int
    tied: bool = True
    rope_base: float = 10000.0
    is_llama: bool = False
    unroll: bool = False  # without a loop over the layers, where this compiles fast

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def flops(self) -> int:
        """FLOPs of the matmuls of a step, forward and backward; half of causal attention."""
        head = self.width // self.heads
        attention = self.width * ((self.heads + 2 * self.key_heads) * head + self.width)
        perceptron = (3 if self.is_llama else 2) * self.width * self.hidden
        weights = self.layers * (attention + perceptron) + self.vocabulary * self.width
        return 6 * self.tokens * (weights + self.layers * self.length * self.width)


GPT2 = Sizes("gpt2", 12, 768, 12, 12, 3072, 50304, 64, 1024, unroll=True)
GPT2_XL = Sizes("gpt2-xl", 48, 1600, 25, 25, 6400, 50304, 16, 1024)
LLAMA_1B = Sizes(
    "llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, 4, 4096, rope_base=5e5, is_llama=True
)
LLAMA_13B = Sizes("llama-1.3b", 24, 2048, 16, 16, 5632, 32000, 8, 2048, tied=False, is_llama=True)
LLAMA_8B = Sizes(
    "llama-3-8b", 8, 4096, 32, 8, 14336, 128256, 4, 4096, False, 5e5, is_llama=True, unroll=True
)

WORKLOADS = {
    "w1": GPT2,
    "w1s": dataclasses.replace(GPT2, batch=16, unroll=False),
    "w2": GPT2_XL,
    "w2b": dataclasses.replace(GPT2_XL, batch=32),
    "w3": LLAMA_1B,
    "w3b": dataclasses.replace(LLAMA_1B, batch=2, length=8192),
    "w4": LLAMA_13B,
    "w5": LLAMA_8B,
    "w5b": dataclasses.replace(LLAMA_8B, batch=2, length=8192),
}
_TOY = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 256, "batch": 2, "length": 32}
TOY = {
    name: dataclasses.replace(
        size,
        key_heads=2 if size.key_heads < size.heads else 4,
        hidden=96 if size.is_llama else 256,
        **_TOY,
    )
    for name, size in WORKLOADS.items()
}
