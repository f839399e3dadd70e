"""Traces and lowers attention for an H200, forward and backward, over a grid of shapes.

    python benchmarks/attention_grid.py              # the grid, PROGRAMS and the layers
    python benchmarks/attention_grid.py --run        # runs PROGRAMS on this device
    python benchmarks/attention_grid.py --run --toy  # the same at small lengths, on any machine

Requires no GPU: the compute capability and the cuDNN version are those of the target. The grid is
written to benchmarks/results/attention_grid_jax_VERSION_h200.json, or to --out.

A case fails if its gradient raises in `jaxmp.dot_product_attention` or in its lowering; or if a
kernel is chosen, and the program has not one forward and one backward kernel. Layers are Linen and
NNX attention under the recipes bf16 and fp8.

--run compares result and gradients in bfloat16 with FP32. At most twice the errors of attention
that stores all logits are allowed, or two roundings to bfloat16. The exit status is 1 if a case
fails.
"""

import contextlib
import functools
import importlib
import itertools
import json
import platform
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jaxmp
from attention_gpu import BF16, FP32, errors, results
from jaxmp._core import _compat
from result_file import parser_of

RESULTS = Path(__file__).parent / "results"
HIDDEN = 5  # number of keys of the second sequence that a length or a bias of -inf hides
# Largest error over the largest magnitude that is always allowed: two roundings to bfloat16.
ROUNDINGS = 2 * float(jnp.finfo(BF16).eps)


class Case(NamedTuple):
    """An attention call."""

    lengths: tuple[int, int]  # queries and keys
    size: int = 64  # of a head
    mask: str = "none"
    bias: str = "none"
    heads: tuple[int, int] = (4, 4)  # of query and key
    dropout: float = 0.0

    def __str__(self) -> str:
        queries, keys = self.lengths
        sizes = f"{queries}x{keys} head {self.size} heads {self.heads[0]}:{self.heads[1]}"
        return f"{sizes}, mask {self.mask}, bias {self.bias}, dropout {self.dropout:g}"


LENGTHS = ((128, 128), (197, 197), (1023, 1023), (64, 77), (77, 64), (1, 77), (1, 1))
SIZES = (64, 72, 128, 256)
MASKS = ("none", "causal", "window", "lengths", "array", "causal array")
BIASES = ("none", "bfloat16", "float32", "-inf")
HEADS = ((4, 4), (4, 1))
GRID = (LENGTHS, SIZES, MASKS, BIASES, HEADS, (0.0, 0.1))

# Programs to run on a GPU.
PROGRAMS = {
    "class token": Case((197, 197)),
    "causal": Case((1023, 1023), mask="causal"),
    "cross attention": Case((64, 77)),
    "causal cross attention": Case((77, 64), mask="causal"),
    "one query": Case((1, 77)),
    "lengths": Case((197, 197), mask="lengths"),
    "cross attention with lengths": Case((64, 77), mask="lengths"),
    "mask": Case((197, 197), mask="array"),
    "causal and mask": Case((77, 77), mask="causal array"),
    "bias": Case((197, 197), bias="bfloat16"),
    "left padding by a bias": Case((77, 77), mask="causal", bias="-inf"),
    "mask and bias": Case((64, 77), mask="array", bias="-inf"),
    "window": Case((1023, 1023), mask="window"),
    "grouped": Case((1023, 1023), 128, mask="causal", heads=(8, 2)),
    "heads of 72": Case((197, 197), 72),
    "heads of 256": Case((197, 197), 256, mask="causal", heads=(4, 1)),
}


def cases() -> list[Case]:
    """Returns the grid; dropout, which prevents the kernel in every case, for one size."""
    grid = [Case(*values) for values in itertools.product(*GRID)]
    return [c for c in grid if not c.dropout or (c.size, c.bias, c.heads) == (64, "none", (4, 4))]


def static_of(case: Case) -> dict[str, Any]:
    """Returns the arguments of a call that are not arrays."""
    static: dict[str, Any] = {"is_causal": True} if "causal" in case.mask else {}
    if case.mask == "window":
        static["local_window_size"] = (32, 0)
    return static | ({"dropout_rate": case.dropout} if case.dropout else {})


def arrays_of(case: Case) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Returns query, key, value and bias, and the other arrays of a call."""
    (queries, keys), (heads, groups) = case.lengths, case.heads
    rngs = jax.random.split(jax.random.key(0), 5)
    shapes = [(2, queries, heads, case.size), *[(2, keys, groups, case.size)] * 2]
    arrays = [jax.random.normal(rng, s, BF16) for rng, s in zip(rngs, shapes, strict=False)]
    given: dict[str, jax.Array] = {}
    if case.mask == "lengths":
        given["query_seq_lengths"] = jnp.array([queries, max(queries - HIDDEN, 1)], jnp.int32)
        given["key_value_seq_lengths"] = jnp.array([keys, max(keys - HIDDEN, 1)], jnp.int32)
    if "array" in case.mask:
        given["mask"] = jax.random.bernoulli(rngs[3], 0.8, (2, 1, queries, keys))
    if case.bias == "-inf":
        # Left padding: under a causal mask, the first queries see no key at all.
        hidden = (jnp.arange(keys) < min(HIDDEN, keys - 1)) & (jnp.arange(2)[:, None] == 1)
        bias = jnp.where(hidden[:, None, None, :], -jnp.inf, 0).astype(BF16)
        arrays.append(jnp.broadcast_to(bias, (2, 1, queries, keys)))
    elif case.bias != "none":
        arrays.append(jax.random.normal(rngs[4], (1, heads, queries, keys), case.bias))
    if case.dropout:
        given["dropout_rng"] = jax.random.key(1)
    return arrays, given


def gradient_of(attention: Any) -> Any:
    """Returns a function that computes the gradients of the first arrays of `arrays_of`."""

    def loss(arrays: Any, given: Any, static: Any) -> jax.Array:
        return attention(*arrays, **given, **static).astype(FP32).sum()

    return jax.grad(loss)


# ---------------------------------------------------------------------------
# Lowering
# ---------------------------------------------------------------------------


@contextlib.contextmanager
def h200() -> Iterator[None]:
    """Traces the block for an H200 with cuDNN 9.10: JAX asks the local devices for both."""
    stablehlo = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    at_least = lambda text: tuple(map(int, text.split("."))) <= (9, 0)
    with (
        mock.patch.object(stablehlo, "check_compute_capability", at_least),
        mock.patch.object(stablehlo, "is_cuda_compute_capability_equal", "9.0".__eq__),
        mock.patch.object(stablehlo, "check_cudnn_version", lambda: 91000),
        mock.patch.object(_compat, "compute_capability", lambda: (9, 0)),
        _compat.context(target="gpu", capability=(9, 0)),
    ):
        yield


def kernels(fn: Any, *args: Any) -> Counter[str]:
    """Returns the kernels of cuDNN in a function lowered for a GPU, and how often they occur."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return Counter(re.findall(r"@__cudnn\$(fmha\w+)", text))


def lower(case: Case) -> str:
    """Lowers a case; returns the kernels or the reasons against one, or how it fails.

    Returns:
      "cudnn: FORWARD + BACKWARD", "xla: ARGUMENT ..." with the arguments that block the kernel, or
      a text that begins with "FAILED".
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        static = static_of(case)
        shapes, arrays = jax.eval_shape(lambda: arrays_of(case))
        try:
            choice = jaxmp.explain(jaxmp.dot_product_attention)(
                *shapes, **arrays, **static
            ).attention[0]
            attend = functools.partial(jaxmp.dot_product_attention, **static)
            forward = kernels(lambda shapes, arrays: attend(*shapes, **arrays), shapes, arrays)
            grad = functools.partial(gradient_of(jaxmp.dot_product_attention), static=static)
            backward = kernels(grad, shapes, arrays)
        except Exception as error:
            return f"FAILED: {type(error).__name__}: {error}"
    blocked = " ".join(blocker.argument for blocker in choice.rows)
    if choice.implementation != "cudnn":
        is_right = not forward and not backward and blocked
        return f"{choice.implementation}: {blocked}" if is_right else f"FAILED: {choice}"
    (name,) = forward
    is_right = backward == {name: 1, f"{name}Backward": 1} and forward == {name: 1}
    text = f"cudnn: {name} + {name}Backward"
    return text if is_right else f"FAILED: {dict(forward)}, {dict(backward)}"


LAYERS = (
    ("linen", "nnx"),
    ("bf16", "fp8"),
    ((197, 197), (1023, 1023), (64, 77)),
    ("none", "causal"),
)


def lower_layer(framework: str, recipe: str, lengths: tuple[int, int], mask: str) -> str:
    """Lowers the gradients of an attention layer of Flax in training, as `lower` does.

    Args:
      framework: "linen" or "nnx".
      recipe: name of a recipe.
      lengths: numbers of queries and keys.
      mask: "none", or "causal" for a mask array.
    """
    queries, keys = (jnp.zeros((2, length, 256), FP32) for length in lengths)
    given = {}
    if mask == "causal":
        rows, columns = jnp.arange(lengths[0])[:, None], jnp.arange(lengths[1])[None, :]
        given["mask"] = (columns <= rows)[None, None]
    wrap = jaxmp.load_recipe(recipe).wrap
    if framework == "linen":
        layer = wrap(nn.MultiHeadDotProductAttention(num_heads=4))
        state = jax.eval_shape(layer.init, jax.random.key(0), queries, keys)
        fn = lambda params, rest, q, k: layer.apply({**rest, "params": params}, q, k, **given).sum()
        params = state["params"]
        state = {name: value for name, value in state.items() if name != "params"}
    else:
        make = lambda: wrap(nnx.MultiHeadAttention(4, 256, decode=False, rngs=nnx.Rngs(0)))
        graph, params, state = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
        fn = lambda params, rest, q, k: nnx.merge(graph, params, rest)(q, k, **given).sum()
    names = kernels(jax.grad(fn, allow_int=True), params, state, queries, keys)
    name = "fmhaScaleBiasSoftmax" if mask == "causal" else "fmhaSoftmax"
    is_right = names == {name: 1, f"{name}Backward": 1}
    return f"cudnn: {name} + {name}Backward" if is_right else f"FAILED: {dict(names)}"


def write_grid(out: Path) -> list[str]:
    """Lowers the grid and the layers, compiles the programs, and returns the failures."""
    with h200():
        rows = {str(case): lower(case) for case in cases()}
        names = itertools.product(*LAYERS)
        layers = {" ".join(map(str, layer)): lower_layer(*layer) for layer in names}
        lowered = {name: lower(case) for name, case in PROGRAMS.items()}
    versions = {
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
    }
    every = {**rows, **layers, **lowered}
    failed = [f"{name}: {row}" for name, row in every.items() if row.startswith("FAILED")]
    report = {
        "command": "python benchmarks/attention_grid.py",
        "target": "H200, compute capability 9.0, cuDNN 9.10; not run",
        "versions": versions,
        "failures": failed,
        "counts": dict(Counter(rows.values()).most_common()),
        "layers": layers,
        "programs": {name: f"{PROGRAMS[name]}; {row}" for name, row in lowered.items()},
        "cases": rows,
    }
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return failed


# ---------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------


def run_program(case: Case, is_gpu: bool) -> dict[str, Any]:
    """Runs a program, and compares result and gradients with FP32."""
    arrays, given = arrays_of(case)
    given: dict[str, Any] = {**given, **static_of(case)}
    d_out = jax.random.normal(jax.random.key(2), arrays[0].shape, BF16)
    exact = results("xla", FP32, arrays, d_out, given)
    whole = results("xla", BF16, arrays, d_out, given)
    found = results("auto" if is_gpu else "blockwise", BF16, arrays, d_out, given)
    ran = jaxmp.explain(jaxmp.dot_product_attention)(*arrays, **given).attention[0].implementation
    parts = ("out", "query", "key", "value", "bias")[: len(arrays) + 1]
    error, allowed = errors(parts, found, exact), errors(parts, whole, exact)
    limits = {part: max(2 * allowed[part], ROUNDINGS) for part in parts}
    # Also where an error is NaN.
    wrong = [part for part in parts if not error[part] <= limits[part]]
    wrong += ["implementation"] if is_gpu and ran != "cudnn" else []
    return {"ran": ran, "error": error, "error_of_xla": allowed, "wrong": wrong}


def run(out: Path | None, toy: bool) -> list[str]:
    """Runs all programs on this device, and returns those that are wrong."""
    is_gpu = jax.default_backend() == "gpu"
    if not is_gpu and not toy:
        raise SystemExit("JAX sees no GPU. For a small run on any machine, add --toy.")
    rows = {}
    for name, case in PROGRAMS.items():
        queries, keys = case.lengths
        # Odd lengths stay odd.
        small = (queries // 16 * 2 + queries % 2, keys // 16 * 2 + keys % 2)
        case = case._replace(lengths=small, size=min(case.size, 72)) if toy else case
        rows[name] = run_program(case, is_gpu)
        print(name, json.dumps(rows[name]), flush=True)
        if out is not None:
            device = jax.devices()[0].device_kind
            report = {"device": device, "jax": jax.__version__, "programs": rows}
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return [f"{name}: {row['wrong']}" for name, row in rows.items() if row["wrong"]]


def main() -> int:
    """Writes the grid, or runs the programs; returns 1 if a case fails."""
    parser = parser_of(__doc__)
    parser.add_argument("--run", action="store_true", help="run the programs on this device")
    parser.add_argument("--toy", action="store_true", help="with --run: small sizes, any machine")
    options = parser.parse_args()
    name = f"attention_grid_jax_{jax.__version__}_h200.json"
    failed = (
        run(options.out, options.toy) if options.run else write_grid(options.out or RESULTS / name)
    )
    print("\n".join(failed) or "no case fails")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
