"""Counts the bytes that an optimizer step reads and writes, in the program compiled for an H200.

    python benchmarks/optimizer_bytes.py                     # prints the table
    python benchmarks/optimizer_bytes.py --out bytes.json    # also writes it

No GPU is required, but XLA's GPU compiler: pip install -e ".[aot]". The program is not run. The
bytes are those of the operands and results of every kernel, without the effect of caches. The step
is AdamW with donated state, and with gradients in FP32 or bfloat16.
"""

import itertools
import math
import os
import platform

if __name__ == "__main__":  # optimizer_time.py imports this module on a GPU
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax

import jaxmp
from jaxmp._core import _compat
from jaxmp._tools.audit._compile import compile_for
from jaxmp._tools.audit._hlo import Program
from jaxmp._tools.audit._hlo_kernels import accessed, kernels
from jaxmp._tools.audit._trace import trace
from result_file import parser_of, write_result

# The leaves of GPT-2 small with one layer, with vectors beside matrices. XLA decides for each leaf
# how to fuse its update, and matrices of equal sizes alone hide updates that it splits.
WIDTH = 768
SHAPES = [
    *[(50304, WIDTH), (1024, WIDTH), (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)],
    *[(WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,), (WIDTH,)],
]

# Minimum with FP32 gradients: read the gradient, and read and write everything else (AdamW: two
# FP32 moments). The 16-bit parameters are read too, because the user may have replaced them.
FLOORS = {"fp32 parameters": 28, "bf16 + FP32 masters": 32, "bf16, packed": 28}
GRADIENTS = {"FP32": jnp.float32, "bf16": jnp.bfloat16}
RECIPES = {
    "fp32 parameters": jaxmp.load_recipe("bf16"),
    "bf16 + FP32 masters": jaxmp.load_recipe("bf16_params"),
    "bf16, packed": jaxmp.load_recipe("bf16_params").replace(master="packed"),
}


def count(tx, dtype, shapes=SHAPES):
    """Returns bytes per parameter, passes over the gradients, and temporary bytes per parameter."""
    params = {f"w{i}": jax.ShapeDtypeStruct(s, jnp.float32) for i, s in enumerate(shapes)}
    create = lambda p: jaxmp.TrainState.create(apply_fn=None, params=p, tx=tx)
    grads = {name: jax.ShapeDtypeStruct(leaf.shape, dtype) for name, leaf in params.items()}
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0)
    with _compat.context(target="gpu"):
        traced = trace(step, (jax.eval_shape(create, params), grads), {})
    compiled = compile_for("h200", traced)
    program = Program(compiled.text)
    parameters = sum(math.prod(shape) for shape in shapes)
    arguments = [argument for _, argument in sorted(program.entry.parameters.items())]
    gradients = {argument.name: argument for argument in arguments[-len(shapes) :]}
    moved = read = 0
    for each in kernels(program):
        moved += accessed(program, each)
        operands = (gradients[n] for n in each.instruction.operands if n in gradients)
        read += sum(shape.bytes for operand in operands for shape in operand.shapes)
    return {
        "bytes_per_parameter": round(moved / parameters, 2),
        "passes_over_gradients": round(read / parameters / jnp.dtype(dtype).itemsize, 2),
        "temp_bytes_per_parameter": round(compiled.memory.temp_size_in_bytes / parameters, 2),
    }


COMBINATIONS = list(itertools.product(RECIPES, (False, True), ("none", "auto"), GRADIENTS))


def measure(combinations=COMBINATIONS, shapes=SHAPES):
    """Returns a row of settings, floor and counts for each of these combinations."""
    rows = []
    for storage, clip, skip, gradients in combinations:
        inner = optax.adamw(1e-3)
        inner = optax.chain(optax.clip_by_global_norm(1.0), inner) if clip else inner
        dtype = GRADIENTS[gradients]
        size = jnp.dtype(dtype).itemsize
        counts = count(RECIPES[storage].replace(skip=skip).optimizer(inner), dtype, shapes)
        settings = {"storage": storage, "clip": clip, "skip": skip, "gradients": gradients}
        floor = {"gradient_bytes": size, "floor": FLOORS[storage] - 4 + size}
        rows.append({**settings, **floor, **counts})
    return rows


def main():
    options = parser_of(__doc__).parse_args()
    rows = measure()
    print(f"cross-compiled for an H200 on {platform.machine()}; jax {jax.__version__}")
    print(
        f"{'stored as':22}{'gradients':11}{'clip':6}{'guard':7}{'B/param':>8}{'floor':>7}"
        f"{'passes':>8}{'temp':>6}"
    )
    for row in rows:
        print(
            f"{row['storage']:22}{row['gradients']:11}{'yes' if row['clip'] else 'no':6}"
            f"{row['skip']:7}{row['bytes_per_parameter']:8.2f}{row['floor']:7}"
            f"{row['passes_over_gradients']:8.2f}{row['temp_bytes_per_parameter']:6.2f}"
        )
    target = "NVIDIA H200 (compiled without one, nothing was run)"
    write_result(options.out, target=target, floors=FLOORS, rows=rows)


if __name__ == "__main__":
    main()
