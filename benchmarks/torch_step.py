"""Times training steps of GPT-2 and Llama in PyTorch on one GPU; see benchmarks/train_step.py.

    python benchmarks/torch_step.py w1 --out FILE       # adds its rounds to those of train_step.py
    python benchmarks/torch_step.py w1 --toy            # small, on a CPU, without torch.compile

The models have the sizes of the workloads, FP32 parameters, autocast to bfloat16, `torch.compile`,
clipping by global norm and fused AdamW. Programs:

    torch-cudnn      scaled_dot_product_attention with cuDNN's kernel only
    torch            with the kernel that PyTorch chooses
    torch-fp8        linear layers in FP8 by torchao, if it is installed, and cuDNN's attention

With --profile, the result has the milliseconds of each kernel of one step of the first program.

The programs run in turn in each round, whose first program is another one each time, if their
states fit in the memory together. Otherwise all rounds of a program follow each other.
"""

import functools
import gc
import importlib
import importlib.util
import json
import sys
import time
import traceback
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_record import environment, failure, rotated, versions_of
from result_file import parser_of
from rounds import Rounds
from workload_sizes import TOY, WORKLOADS, Sizes

EPSILON = 1e-5


class LlamaBlock(nn.Module):
    """The block of examples/llama.py."""

    def __init__(self, size: Sizes) -> None:
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.size, head = size, size.width // size.heads
        self.attention_norm = nn.RMSNorm(size.width, EPSILON)
        self.qkv = linear(size.width, (size.heads + 2 * size.key_heads) * head)
        self.attention_out = linear(size.width, size.width)
        self.mlp_norm = nn.RMSNorm(size.width, EPSILON)
        self.mlp_gate = linear(size.width, size.hidden)
        self.mlp_up = linear(size.width, size.hidden)
        self.mlp_down = linear(size.hidden, size.width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size, (batch, length, _) = self.size, x.shape
        heads = (size.heads, size.key_heads, size.key_heads)
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, sum(heads), -1).transpose(1, 2)
        q, k, v = qkv.split(heads, dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = size.heads != size.key_heads
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.attention_out(a.transpose(1, 2).reshape(batch, length, -1))
        h = self.mlp_norm(x)
        return x + self.mlp_down(F.silu(self.mlp_gate(h)) * self.mlp_up(h))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class GPTBlock(nn.Module):
    """The block of examples/gpt.py."""

    def __init__(self, size: Sizes) -> None:
        super().__init__()
        self.size = size
        self.attention_norm = nn.LayerNorm(size.width, EPSILON)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp_norm = nn.LayerNorm(size.width, EPSILON)
        self.mlp_up = nn.Linear(size.width, 4 * size.width)
        self.mlp_down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.size.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(a.transpose(1, 2).reshape(batch, length, -1))
        h = F.gelu(self.mlp_up(self.mlp_norm(x)), approximate="tanh")
        return x + self.mlp_down(h)


class Model(nn.Module):
    """GPT-2 or Llama, which returns the mean loss.

    The choice of attention's kernel is part of what is compiled. A model that was compiled under
    another choice would otherwise be run again, because PyTorch does not check that setting.
    """

    def __init__(self, size: Sizes, backends: list[SDPBackend] | None = None) -> None:
        super().__init__()
        self.size, self.backends = size, backends
        self.token = nn.Embedding(size.vocabulary, size.width)
        block = LlamaBlock if size.is_llama else GPTBlock
        self.blocks = nn.ModuleList(block(size) for _ in range(size.layers))
        norm = nn.RMSNorm if size.is_llama else nn.LayerNorm
        self.final_norm = norm(size.width, EPSILON)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        if size.tied:
            self.head.weight = self.token.weight
        if not size.is_llama:
            self.position = nn.Embedding(size.length, size.width)
            nn.init.normal_(self.position.weight, std=0.02)
        head = size.width // size.heads
        rates = size.rope_base ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
        angles = torch.arange(size.length, dtype=torch.float64)[:, None] * rates
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.backends is None:
            return self.loss(tokens, labels)
        with sdpa_kernel(self.backends):
            return self.loss(tokens, labels)

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        if not self.size.is_llama:
            x = x + self.position.weight
        x = x.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def make_step(size: Sizes, arm: str, device: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that trains on one batch and returns the loss."""
    torch.manual_seed(0)
    is_default = arm == "torch" or device != "cuda"
    model = Model(size, None if is_default else [SDPBackend.CUDNN_ATTENTION]).to(device)
    if arm == "torch-fp8":
        importlib.import_module("torchao.float8").convert_to_float8_training(model.blocks)
    forward: Any = torch.compile(model) if device == "cuda" else model
    optimizer = torch.optim.AdamW(
        model.parameters(), 6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def refusal(arm: str) -> str | None:
    """Returns the reason why a program cannot run here; None if it can."""
    if arm == "torch-fp8" and importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    return None


def time_rounds(
    arm: str, size: Sizes, batches: list[torch.Tensor], rounds: int, steps: int
) -> Generator[dict[str, Any]]:
    """Yields a row for each round: the seconds of a step, of the first, and the first losses.

    The step is compiled in the first round only: after eight compilations of one function,
    PyTorch would run it without compiling.
    """
    device, start = batches[0].device.type, time.perf_counter()
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    step = make_step(size, arm, device)
    for index in range(rounds):
        losses, first = [], 0.0
        for batch in batches[: 1 if index else 3]:
            losses.append(float(step(batch)))
            first = first or time.perf_counter() - start
        wait()
        start = time.perf_counter()
        for number in range(steps):
            step(batches[number % len(batches)])
        wait()
        seconds = (time.perf_counter() - start) / steps
        yield {"seconds": seconds, "first_seconds": first, "losses": losses}
        start = time.perf_counter()


def profile_of(arm: str, size: Sizes, batch: torch.Tensor) -> list[dict[str, Any]]:
    """Returns the kernels of one step, the longest first."""
    step = make_step(size, arm, batch.device.type)
    for _ in range(3):
        step(batch)
    is_gpu = batch.device.type == "cuda"
    activity = (
        torch.profiler.ProfilerActivity.CUDA if is_gpu else torch.profiler.ProfilerActivity.CPU
    )
    with torch.profiler.profile(activities=[activity]) as profiler:
        float(step(batch))
    rows = [
        {
            "name": row.key,
            "calls": row.count,
            "milliseconds": (row.device_time_total if is_gpu else row.cpu_time_total) / 1e3,
        }
        for row in profiler.key_averages()
    ]
    return sorted(rows, key=lambda row: -row["milliseconds"])


ARMS = ("torch-cudnn", "torch", "torch-fp8")


def package_of(arm: str) -> dict[str, str]:
    """Returns the packages of a program with their versions, which decide what is pooled."""
    names = ("torch", "torchao") if arm == "torch-fp8" else ("torch",)
    return {"package": " ".join(f"{name} {text}" for name, text in versions_of(names).items())}


def order_of(arms: list[str], rounds: int, together: bool) -> list[str]:
    """Returns the program of each row: in rotating turns, or all rounds of one before the next."""
    if together:
        return [arm for index in range(rounds) for arm in rotated(arms, index)]
    return [arm for arm in arms for _ in range(rounds)]


def fit_together(count: int) -> bool:
    """Returns whether the states of `count` programs fit, after a round of the first."""
    if not torch.cuda.is_available():
        return True
    state, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return peak + (count - 1) * state <= 0.9 * torch.cuda.mem_get_info()[1]


def main() -> int:
    """Runs the rounds; returns 1 if no program was timed, or if one is to be repeated."""
    parser = parser_of(__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="timed steps per round")
    parser.add_argument("--toy", action="store_true", help="small sizes, on the CPU")
    parser.add_argument("--profile", action="store_true", help="one more step under the profiler")
    options = parser.parse_args()
    if not options.toy and not torch.cuda.is_available():
        sys.exit("The benchmark requires a GPU. Without one, run it with --toy at small sizes.")
    size = (TOY if options.toy else WORKLOADS)[options.workload]
    device = "cpu" if options.toy else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = True
    shape = (size.batch, size.length + 1)
    batches = [torch.randint(size.vocabulary, shape, device=device) for _ in range(4)]
    name = "cpu" if options.toy else torch.cuda.get_device_name()
    rounds = Rounds(options.out, options.workload, size, environment(name))
    arms = [arm for arm in options.arms if refusal(arm) is None]
    for arm in set(options.arms) - set(arms):
        rounds.add(arm, {"skipped": refusal(arm)})
        rounds.write()
    programs = {arm: time_rounds(arm, size, batches, options.rounds, options.steps) for arm in arms}
    left: dict[str, int] = dict.fromkeys(arms, options.rounds)
    failed = []

    def measure(arm: str) -> bool:
        try:
            row = next(programs[arm])
            left[arm] -= 1
        except Exception as error:  # too little memory is a result, and so is a missing kernel
            traceback.print_exc()
            row, left[arm] = failure(error), 0
            failed.append(row)
        rounds.add(arm, {**row, **package_of(arm)})
        rounds.write()
        if not left[arm]:
            programs[arm].close()  # frees its state
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        return "seconds" in row

    together = bool(arms) and measure(arms[0]) and fit_together(len(arms))
    for arm in order_of(arms, options.rounds, together)[1:]:
        if left[arm]:
            measure(arm)
    if options.profile and arms and not failed:
        rounds.report["profile"] = {arms[0]: profile_of(arms[0], size, batches[0])}
        rounds.write()
    print(json.dumps(rounds.summary("hand"), indent=2))
    return int(len(failed) == len(arms) or any("repeat" in row for row in failed))


if __name__ == "__main__":
    raise SystemExit(main())
