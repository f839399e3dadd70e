"""Counts the bytes that an optimizer step reads and writes, in the program compiled for an H200.

    python benchmarks/optimizer_bytes.py                     # prints the table
    python benchmarks/optimizer_bytes.py --out bytes.json    # also writes it

No GPU is required: XLA's GPU compiler runs on any machine with its packages (Python >= 3.12): pip
install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cublas nvidia-cudnn-cu13 nvidia-cuda-nvrtc The
program is not run. The bytes are those of the operands and results of every kernel, without the
effect of caches. The step is AdamW with donated state, and with gradients in FP32 or bfloat16.
"""

import argparse
import itertools
import math
import os
import platform
import re
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import jaxmp
from jaxmp._core import _compat
from result_file import write_result

# Published properties of the GPU, in XLA's text format.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 pcie_bandwidth: 34359738368
  ecc_enabled: true name: "NVIDIA H200 141GB HBM3e" driver_version: "13.0.0"
  runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200 141GB HBM3e"
"""

# The leaves of GPT-2 small with one layer, with vectors beside matrices. XLA decides for each leaf
# how to fuse its update, and matrices of equal sizes alone hide updates that it splits.
WIDTH = 768
SHAPES = [
    *[(50304, WIDTH), (1024, WIDTH), (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)],
    *[(WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,), (WIDTH,)],
]

# Minimum with FP32 gradients: read the gradient, and read and write everything else (AdamW: two
# FP32 moments). FP32 masters make the 16-bit parameters write-only.
FLOORS = {"fp32 parameters": 28, "bf16 + FP32 masters": 30, "bf16, packed": 28}
GRADIENTS = {"FP32": jnp.float32, "bf16": jnp.bfloat16}
RECIPES = {
    "fp32 parameters": jaxmp.load_recipe("bf16"),
    "bf16 + FP32 masters": jaxmp.load_recipe("bf16_params"),
    "bf16, packed": jaxmp.load_recipe("bf16_params").replace(master="packed"),
}


def compile_for_h200(tx, dtype, shapes):
    """Compiles one `apply_gradients` for parameters of these shapes."""
    topology = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1")
    placed = SingleDeviceSharding(topology.devices[0])
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)
    params = {f"w{i}": jax.ShapeDtypeStruct(s, jnp.float32) for i, s in enumerate(shapes)}
    create = lambda p: jaxmp.TrainState.create(apply_fn=None, params=p, tx=tx)
    grads = {name: jax.ShapeDtypeStruct(leaf.shape, dtype) for name, leaf in params.items()}
    state, grads = jax.tree.map(place, (jax.eval_shape(create, params), grads))
    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0)
    with _compat.context(target="gpu"):
        return step.trace(state, grads).lower(lowering_platforms=("cuda",)).compile()


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)[,\s]", re.M)
_ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
_KERNELS = {"fusion", "copy", "custom-call", "reduce"}


def kernels(text):
    """Returns [(bytes of the result, names of the operands)] of all kernels, and bytes by name."""
    entry = re.sub(r"/\*.*?\*/", "", text[text.index("\nENTRY") :])
    sizes, found = {}, []
    for name, shape, opcode, operands in _INSTRUCTION.findall(entry):
        sizes[name] = sum(_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(shape))
        if opcode in _KERNELS:
            found.append((sizes[name], re.findall(r"%([\w.-]+)", operands)))
    return found, sizes


def _bytes(dtype, dims):
    width = 1 if dtype == "pred" else int(re.sub(r"\D", "", dtype)) // 8
    return width * math.prod(int(d) for d in dims.split(",") if d)


def count(tx, dtype, shapes=SHAPES):
    """Returns bytes per parameter, passes over the gradients, and temporary bytes per parameter."""
    program = compile_for_h200(tx, dtype, shapes)
    parameters = sum(math.prod(shape) for shape in shapes)
    found, sizes = kernels(program.as_text())
    moved = sum(result + sum(sizes[name] for name in names) for result, names in found)
    read = sum(sizes[name] for _, names in found for name in names if name.startswith("grads_"))
    return {
        "bytes_per_parameter": round(moved / parameters, 2),
        "passes_over_gradients": round(read / parameters / jnp.dtype(dtype).itemsize, 2),
        "temp_bytes_per_parameter": round(
            program.memory_analysis().temp_size_in_bytes / parameters, 2
        ),
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args()
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
