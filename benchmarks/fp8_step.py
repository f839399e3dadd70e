"""Times a complete training step in BF16 and in FP8, at the widths of GPT-2 1.5B and Llama 3 8B.

    python benchmarks/fp8_step.py                    # on the GPU of this machine
    python benchmarks/fp8_step.py --workload w2      # one of the two models
    python benchmarks/fp8_step.py --toy              # small run on any machine, writes nothing

Writes benchmarks/results/fp8_step-WORKLOAD-DEVICE.json. Requires pip install -e ".[cuda13]" (or
cuda12) and Flax. All programs use the same random tokens and run in turn. Each round starts with
another program and new states, and ratios are computed within a round. A step consists of the
forward and backward pass, clipping by global norm and AdamW with FP32 parameters. Attention uses
cuDNN, without rematerialization.
"""

import argparse
import dataclasses
import functools
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--toy" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"
# Delayed scaling of w2 takes 113 GiB as compiled for an H200, more than the usual three quarters.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen import fp8_ops

import jaxmp
from gpu_record import environment, rotated, write_json
from llama import rotary_embedding

OVERWRITE = "_overwrite_with_gradient"
RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A decoder-only language model and its batch."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    batch: int
    length: int
    # True for Llama: RMSNorm, rotary positions, a gated MLP, no biases. Otherwise as in GPT-2.
    llama: bool

    @property
    def tokens(self) -> int:
        return self.batch * self.length


WORKLOADS = {
    # GPT-2 1.5B; its vocabulary of 50257 rounded up to a multiple of 64.
    "w2": Workload(48, 1600, 25, 25, 6400, 50304, 16, 1024, llama=False),
    # Llama 3 8B, 8 of its 32 layers.
    "w5": Workload(8, 4096, 32, 8, 14336, 128256, 4, 4096, llama=True),
}
TOY = {
    "w2": Workload(2, 64, 4, 4, 256, 128, 2, 32, llama=False),
    "w5": Workload(2, 64, 4, 2, 224, 128, 2, 32, llama=True),
}


# ---------------------------------------------------------------------------
# The model, without precision settings
# ---------------------------------------------------------------------------


class Layer(nn.Module):
    """Transformer layer; `product` is the `dot_general_cls` of its linear layers."""

    size: Workload
    product: Any = None

    @nn.compact
    def __call__(self, x, _):
        size, bias = self.size, not self.size.llama
        head = size.width // size.heads
        norm = nn.RMSNorm if size.llama else nn.LayerNorm
        linear = functools.partial(
            nn.DenseGeneral, use_bias=bias, dot_general_cls=self.product, dtype=None
        )
        h = norm(name="attention_norm")(x)
        q = linear((size.heads, head), name="query")(h)
        k = linear((size.kv_heads, head), name="key")(h)
        v = linear((size.kv_heads, head), name="value")(h)
        if size.llama:
            q, k = (rotary_embedding(y, base=5e5) for y in (q, k))
        a = jaxmp.dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(size.width, axis=(-2, -1), name="out")(a)
        h = norm(name="mlp_norm")(x)
        up = linear(size.hidden, name="up")(h)
        up = nn.silu(linear(size.hidden, name="gate")(h)) * up if size.llama else nn.gelu(up)
        return x + linear(size.width, name="down")(up), None


class Decoder(nn.Module):
    """Decoder that returns logits `[batch, length, vocabulary]`; its layers are scanned."""

    size: Workload
    product: Any = None

    @nn.compact
    def __call__(self, tokens):
        size = self.size
        x = nn.Embed(size.vocabulary, size.width, name="embed")(tokens)
        if not size.llama:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            x = x + nn.Embed(size.length, size.width, name="position_embed")(positions)
        layers = nn.scan(
            Layer,
            variable_axes={"params": 0, OVERWRITE: 0},
            split_rngs={"params": True},
            length=size.layers,
        )
        x, _ = layers(size, self.product, name="layers")(x, None)
        norm = nn.RMSNorm if size.llama else nn.LayerNorm
        x = norm(name="norm")(x)
        return nn.Dense(size.vocabulary, use_bias=False, name="lm_head")(x)


# ---------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------

# In all programs, the head returns 16 bits, from which the loss computes in FP32.
HEAD = jaxmp.Rule("lm_head", "matmul=default", why="the last layer", required=False)
BASE = "p=f32,c=bf16,o=bf16"


def recipe(scaling):
    if scaling is None:
        return jaxmp.load_recipe(jaxmp.PolicyMap(BASE, [HEAD]))
    return jaxmp.load_recipe(jaxmp.PolicyMap(f"{BASE},matmul=fp8", [HEAD], fp8=scaling))


# Name -> (scaling of the recipe, `dot_general` of the layers).
ARMS: dict[str, tuple[Any, Any]] = {
    "bf16": (None, None),
    "fp8 current": (jaxmp.fp8.CurrentScaling(), None),
    "fp8 delayed": (jaxmp.fp8.DelayedScaling(), None),
    "fp8 rowwise": (jaxmp.fp8.RowwiseScaling(), None),
    "flax Fp8DirectDotGeneralOp": (None, fp8_ops.Fp8DirectDotGeneralOp),
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One program to time; `fresh` creates a new state."""

    fresh: Callable[[], Any]
    step: Callable[[Any, jax.Array], tuple[Any, jax.Array]]


def make(size, scaling, product):
    chosen = recipe(scaling)
    model = chosen.wrap(Decoder(size, product))
    tx = chosen.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4)))

    def loss_fn(variables, tokens):
        logits = model.apply(variables, tokens[:, :-1])
        return jaxmp.losses.softmax_cross_entropy(logits, tokens[:, 1:]).mean()

    def init():
        tokens = jnp.zeros((1, 8), jnp.int32)
        variables = model.init(jax.random.key(0), tokens)
        return jaxmp.TrainState.create(apply_fn=None, params=variables, tx=tx)

    def step(state, tokens):
        loss, grads = state.value_and_grad(loss_fn)(tokens)
        return state.apply_gradients(grads=grads), loss

    return Arm(jax.jit(init), jax.jit(step, donate_argnums=0))


# ---------------------------------------------------------------------------
# Timing
# ---------------------------------------------------------------------------


def measure(size, rounds, steps):
    """Returns for each arm the seconds of a step, the ratio to BF16, and the last loss."""
    arms = {name: make(size, *how) for name, how in ARMS.items()}
    tokens = [
        jax.random.randint(jax.random.key(seed), (size.batch, size.length + 1), 0, size.vocabulary)
        for seed in range(4)
    ]
    found = {name: {"seconds": [], "failed": ""} for name in arms}
    for index in range(rounds):
        for name in rotated(list(arms), index):
            if found[name]["failed"]:
                continue
            try:
                seconds, loss = run(arms[name], tokens, steps)
            except jax.errors.JaxRuntimeError as error:  # out of memory is a result too
                found[name]["failed"] = str(error).splitlines()[0]
                continue
            found[name]["seconds"].append(seconds)
            found[name]["loss"] = loss
            print(f"  {name}: {1e3 * seconds:.1f} ms, loss {loss:.4f}", flush=True)
    return {name: summary(size, found["bf16"], one) for name, one in found.items()}


def run(arm, tokens, steps):
    """Returns the seconds of each step except the first two, and the last loss."""
    state = arm.fresh()
    for index in range(2):
        state, loss = arm.step(state, tokens[index])
    jax.block_until_ready(state)
    start = time.perf_counter()
    for index in range(steps):
        state, loss = arm.step(state, tokens[index % len(tokens)])
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / steps, float(loss)


def summary(size, bf16, one):
    if one["failed"] or not bf16["seconds"]:
        return {"failed": one["failed"] or "bf16 did not run"}
    ratios = [b / own for b, own in zip(bf16["seconds"], one["seconds"], strict=True)]
    seconds = statistics.median(one["seconds"])
    return {
        "ms": round(1e3 * seconds, 2),
        "tokens_per_second": round(size.tokens / seconds),
        "over_bf16": round(statistics.median(ratios), 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "loss": one["loss"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workload", choices=WORKLOADS, help="one model only")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed steps per round")
    parser.add_argument("--toy", action="store_true", help="small sizes, on the CPU")
    options = parser.parse_args()
    if not options.toy and jax.default_backend() != "gpu":
        sys.exit("The benchmark requires a GPU. Without one, run it with --toy at small sizes.")
    device = jax.devices()[0].device_kind
    sizes = TOY if options.toy else WORKLOADS
    for name in [options.workload] if options.workload else sizes:
        size = sizes[name]
        print(f"{name}: {size} on {device}, jax {jax.__version__}", flush=True)
        rows = measure(size, options.rounds, options.steps)
        for arm, row in rows.items():
            print(f"{arm:28s}", "  ".join(f"{key}={value}" for key, value in row.items()))
        if not options.toy:
            write(name, size, device, rows)


def write(name, size, device, rows):
    report = {
        "command": " ".join(["python", "benchmarks/fp8_step.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": {"device": device, "host": f"{platform.machine()}, {os.cpu_count()} CPUs"},
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "flax": flax.__version__,
            "optax": optax.__version__,
        },
        "environment": environment(device),
        "workload": dataclasses.asdict(size),
        "rows": rows,
    }
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    path = RESULTS / f"fp8_step-{name}-{slug}.json"
    write_json(path, report)
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
