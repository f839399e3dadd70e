"""Times training steps of GPT-2 and Llama on one GPU: recipes, hand-written JAX, other libraries.

    python benchmarks/train_step.py w1                           # all programs
    python benchmarks/train_step.py w5 --arms jaxmp-bf16 jaxmp-fp8 --rounds 3
    python benchmarks/train_step.py w1 --toy                     # small, on any machine

Sizes (benchmarks/workload_sizes.py):

    w1, w2, w2b    GPT-2 with 124M and 1.5B parameters, 65,536, 16,384 and 32,768 tokens
    w1s            w1 with 16,384 tokens and a loop over the layers
    w3, w3b, w4    Llama with 1.2B parameters and lengths 4,096 and 8,192; with 1.3B and 2,048
    w5, w5b        8 of 32 layers of Llama 3 8B, lengths 4,096 and 8,192

A step is the forward and backward pass, clipping by global norm, AdamW on FP32 parameters and,
except in `plain`, the check for non-finite gradients. `hand` is benchmarks/by_hand.py; `plain` is
the same with JAX's default attention and all logits stored. benchmarks/peer_steps.py contains the
steps with Flax, qwix and Transformer Engine; benchmarks/torch_step.py times PyTorch with
the same workloads.

All programs see the same random tokens. They run in turn in each round, whose first program is
another one each time; ratios are those of one round. A program of a package that is not installed
is skipped, and one that fails does not stop the others; the results contain the reason. The exit
status is 1 if one failed for another reason than too little memory.

Names such as `jaxmp-bf16-float16` are the recipe with logits stored in that dtype; in
`jaxmp-bf16-stored`, all logits of GPT-2 are stored in bfloat16 at once, as in PyTorch.
--out FILE is written after each result, and a later run adds its rounds to it. Each result contains
clocks, power and temperature of the GPU.
"""

import functools
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if "--toy" in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
# cuBLAS adds biases and computes GELUs in its matmuls; XLA's Triton kernels do not.
os.environ.setdefault("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] += " --xla_gpu_enable_triton_gemm=false"
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import jax
import jax.numpy as jnp

import by_hand
import gpt
import llama
import peer_steps
from gpu_record import environment, failure, rotated
from result_file import parser_of
from rounds import Rounds
from workload_sizes import TOY, WORKLOADS, Sizes


class Arm(NamedTuple):
    """A program to time: `init()` and `step(state, tokens)`, which returns `(state, loss)`."""

    init: Callable[[], Any]
    step: Callable[[Any, jax.Array], tuple[Any, jax.Array]]


def model_of(size: Sizes, **loss: Any) -> Any:
    """Returns the model of examples/gpt.py, or the shape of that of examples/llama.py.

    Args:
      size: the sizes of the model.
      loss: `logits_dtype`, and for GPT-2 `loss_chunk`.
    """
    changes: dict[str, Any] = {
        name: getattr(size, name) for name in ("layers", "width", "heads", "vocabulary", "unroll")
    }
    changes |= {"max_length": size.length, **loss}
    if not size.is_llama:
        return gpt.GPT(**changes)
    for name in ("key_heads", "hidden", "tied", "rope_base"):
        changes[name] = getattr(size, name)
    return llama.Shape(**changes)


def jaxmp_arm(recipe: Any, size: Sizes, **loss: Any) -> Arm:
    """Returns the step of examples/gpt.py or examples/llama.py under a recipe."""
    training = llama.linen_training if size.is_llama else gpt.linen_training
    init, step = training(recipe, model_of(size, **loss), gpt.make_optimizer())
    return Arm(jax.jit(init), step)


def hand_arm(implementation: str | None, chunked: bool, guard: bool, size: Sizes) -> Arm:
    """Returns the hand-written step, which begins with the parameters of the examples."""
    model = model_of(size)
    loss = by_hand.llama_loss if size.is_llama else by_hand.gpt_loss
    loss_fn = loss(model, implementation, chunked)
    init, step = by_hand.make_training(loss_fn, gpt.make_optimizer(), guard)
    module = llama.Llama(model) if size.is_llama else model
    start = lambda: module.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    return Arm(jax.jit(lambda: init(start())), step)


def peer_arm(make: Callable[[Sizes], Any], size: Sizes) -> Arm:
    """Returns the step of another library."""
    init, step = make(size)
    return Arm(jax.jit(init), step)


def arms() -> dict[str, Callable[[Sizes], Arm]]:
    """Returns name -> function that makes the program."""
    on_gpu = jax.default_backend() == "gpu"
    made: dict[str, Callable[[Sizes], Arm]] = {
        "jaxmp-bf16": functools.partial(jaxmp_arm, "bf16"),
        "hand": functools.partial(hand_arm, "cudnn" if on_gpu else "xla", True, True),
        "plain": functools.partial(hand_arm, "xla", False, False),
    }
    names = ("bf16_params", "fp8", "fp8_delayed", "fp8_rowwise", "tf32", "fp32")
    made |= {f"jaxmp-{name}": functools.partial(jaxmp_arm, name) for name in names}
    for recipe in ("bf16", "fp8"):
        for dtype in ("float16", "bfloat16"):
            arm = functools.partial(jaxmp_arm, recipe, logits_dtype=dtype)
            made[f"jaxmp-{recipe}-{dtype}"] = arm
    made["jaxmp-bf16-stored"] = lambda size: jaxmp_arm(
        "bf16", size, logits_dtype="bfloat16", loss_chunk=size.tokens
    )
    return made | {
        name: functools.partial(peer_arm, make) for name, make in peer_steps.trainings().items()
    }


def time_arm(arm: Arm, tokens: list[jax.Array], steps: int, warm_up: int) -> dict[str, Any]:
    """Returns the seconds of a step, those of the first, and the losses of the steps before."""
    start = time.perf_counter()
    state, losses, first = jax.block_until_ready(arm.init()), [], 0.0
    for index in range(warm_up):
        state, loss = arm.step(state, tokens[index % len(tokens)])
        losses.append(float(loss))
        first = first or time.perf_counter() - start
    start = time.perf_counter()
    for index in range(steps):
        state, loss = arm.step(state, tokens[index % len(tokens)])
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - start) / steps
    return {"seconds": seconds, "first_seconds": first, "losses": losses}


def main(arguments: list[str] | None = None) -> int:
    """Runs the rounds; returns 1 if no program ran to the end, or if one is to be repeated."""
    parser = parser_of(__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--arms", nargs="+", choices=arms(), default=list(arms()))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="timed steps per round")
    parser.add_argument("--toy", action="store_true", help="small sizes, on the CPU")
    options = parser.parse_args(arguments)
    if not options.toy and jax.default_backend() != "gpu":
        sys.exit("The benchmark requires a GPU. Without one, run it with --toy at small sizes.")
    workload = (TOY if options.toy else WORKLOADS)[options.workload]
    draw = functools.partial(jax.random.randint, minval=0, maxval=workload.vocabulary)
    shape = (workload.batch, workload.length + 1)
    tokens = [draw(jax.random.key(seed), shape, dtype=jnp.int32) for seed in range(4)]
    device = environment(jax.devices()[0].device_kind)
    rounds = Rounds(options.out, options.workload, workload, device)
    made: dict[str, Arm] = {}
    ended: dict[str, dict[str, Any]] = {}  # arms that failed or were skipped
    for index in range(options.rounds):
        for name in rotated(options.arms, index + rounds.earlier):
            if name in ended:
                continue
            if reason := peer_steps.refusal(name):
                row: dict[str, Any] = {"skipped": reason}
            else:
                row = try_arm(name, workload, made, tokens, options.steps)
            if "seconds" not in row:
                ended[name] = row
            gc.collect()
            rounds.add(name, {**row, **peer_steps.package_of(name)})
            rounds.write()
    print(json.dumps(rounds.summary("hand"), indent=2))
    return int(not made or any("repeat" in row for row in ended.values()))


def try_arm(
    name: str, size: Sizes, made: dict[str, Arm], tokens: list[jax.Array], steps: int
) -> dict[str, Any]:
    """Times an arm, and adds it to `made` in the first round; returns the error if it fails."""
    try:
        is_new = name not in made
        arm = made[name] if name in made else arms()[name](size)
        row = time_arm(arm, tokens, steps, 3 if is_new else 1)
        made[name] = arm
    except Exception as error:  # too little memory is a result, and so is another library's error
        traceback.print_exc()
        made.pop(name, None)
        return failure(error)
    return row


if __name__ == "__main__":
    raise SystemExit(main())
