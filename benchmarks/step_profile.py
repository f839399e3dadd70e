"""Times each kernel of one training step on one GPU, and sums the times by class.

    python benchmarks/step_profile.py w1 --arms jaxmp-bf16 --out step_profile.json
    python benchmarks/step_profile.py w1 --toy            # small, on the CPU

Workloads and programs are those of benchmarks/train_step.py. A program runs five steps, and the
next one under JAX's profiler. XLA's command buffers are off, because the profiler does not name the
kernels of a CUDA graph; the milliseconds of a step without the profiler are in the result. Classes:

    matmuls of layers      weights times activations and their gradients, with what XLA fused
    attention              cuDNN's kernels
    loss matmuls           logits and the two gradients of the last layer
    loss passes            maximum, sum of exponentials, and gradient of the logits
    splits and joins       kernels that only move or cast: slices, copies, transposes
    activations, norms     with bias gradients and residual sums that are fused with them
    optimizer              clipping, finite check and AdamW
    rest                   embeddings, copies that XLA inserted, and all else
"""

import collections
import functools
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

if "--toy" in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax
import jax.numpy as jnp

import train_step
from gpu_record import environment, failure, gpu_state, write_json
from jaxmp._tools.audit._hlo import Instruction, Program
from result_file import parser_of
from workload_sizes import TOY, WORKLOADS, Sizes

STEPS = 5


class Kernel(NamedTuple):
    """All calls of one kernel in a step: its instruction in the program, and its class."""

    name: str
    instruction: str
    operation: str
    part: str
    calls: int
    milliseconds: float


# ---------------------------------------------------------------------------
# Profile
# ---------------------------------------------------------------------------


def events(folder: Path) -> list[tuple[str, str, float]]:
    """Returns the kernel, the instruction and the milliseconds of each call in a profile."""
    (file,) = folder.rglob("*.xplane.pb")
    planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    rows = []
    for line in (line for plane in gpus or planes for line in plane.lines):
        # Other lines of a GPU sum the kernels of a stream again.
        if gpus and not line.name.startswith("Stream"):
            continue
        for event in line.events:
            stats = {str(key): value for key, value in event.stats}
            if gpus or "hlo_op" in stats:
                rows.append((event.name, str(stats.get("hlo_op", "")), event.duration_ns / 1e6))
    return rows


def parts_of(text: str) -> dict[str, list[Instruction]]:
    """Returns instruction -> itself and all instructions inside it, for a compiled program."""
    program = Program(text)
    bodies = program.computations

    def parts(instruction: Instruction) -> list[Instruction]:
        inside = (bodies[name] for name in instruction.called if name in bodies)
        nested = [part for body in inside for i in body.instructions.values() for part in parts(i)]
        return [instruction, *nested]

    every = (i for body in bodies.values() for i in body.instructions.values())
    return {i.name: parts(i) for i in every if i.opcode not in ("while", "conditional", "call")}


MOVES = {"copy", "transpose", "slice", "concatenate", "bitcast", "dynamic-slice", "pad", "convert"}
MOVES |= {"fusion", "parameter", "constant", "reshape", "dynamic-update-slice", "tuple"}


def part_of(parts: list[Instruction], size: Sizes) -> str:
    """Returns the class of a kernel from its instruction and those inside it."""
    targets = " ".join(i.attribute("custom_call_target") for i in parts)
    opcodes = {i.opcode for i in parts}
    names = " ".join(i.op_name for i in parts)
    sizes = {n for i in parts for shape in i.shapes for n in shape.sizes}
    # The layers run without a loop in the workloads that fit this division.
    is_in_loop = "/while/" in names
    if "fmha" in targets:
        return "attention"
    if "gemm" in targets or "cublas" in targets or "dot" in opcodes:
        is_loss = is_in_loop or size.vocabulary in sizes
        return "loss matmuls" if is_loss else "matmuls of layers"
    if is_in_loop:
        return "loss passes"
    if parts[0].op_name and "jvp" not in parts[0].op_name:
        return "optimizer"
    if opcodes & {"scatter", "gather"} or "embedding" in names:
        return "rest"
    if opcodes <= MOVES:
        return "splits and joins"
    if "norm" in names:
        return "norms"
    if re.search("gelu|silu|swiglu|mlp|tanh|erf|logistic", names):
        return "activations"
    return "rest"


def summed(rows: list[tuple[str, str, float]], text: str, size: Sizes) -> list[Kernel]:
    """Returns the kernels of a profile, the longest first."""
    parts, calls = parts_of(text), collections.defaultdict(list)
    for kernel, instruction, milliseconds in rows:
        calls[kernel, instruction].append(milliseconds)
    kernels = []
    for (kernel, name), times in calls.items():
        inside = parts.get(name, [])
        operation = next((i.op_name for i in inside if i.op_name), "")
        part = part_of(inside, size) if inside else "rest"
        kernels.append(Kernel(kernel, name, operation, part, len(times), sum(times)))
    return sorted(kernels, key=lambda row: -row.milliseconds)


def by_class(kernels: list[Kernel]) -> dict[str, dict[str, float]]:
    """Returns class -> kernels and milliseconds, the longest first."""
    sums: dict[str, list[float]] = {}
    for row in kernels:
        total = sums.setdefault(row.part, [0, 0.0])
        total[0] += row.calls
        total[1] += row.milliseconds
    longest = sorted(sums.items(), key=lambda item: -item[1][1])
    return {name: {"kernels": int(n), "milliseconds": round(t, 3)} for name, (n, t) in longest}


def profile(name: str, size: Sizes, tokens: list[jax.Array]) -> dict[str, Any]:
    """Returns the kernels of one step of a program."""
    arm = train_step.arms()[name](size)
    state = jax.block_until_ready(arm.init())
    step: Any = arm.step
    step = step.lower(state, tokens[0]).compile()
    compiled = train_step.Arm(lambda: state, step)
    timed = train_step.time_arm(compiled, tokens, STEPS, 1)
    state = jax.block_until_ready(arm.init())
    state, _ = step(state, tokens[0])
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.block_until_ready(state)
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(step(state, tokens[1]))
        kernels = summed(events(Path(folder)), step.as_text(), size)
    return {
        "milliseconds": round(1e3 * timed["seconds"], 3),
        "milliseconds_of_kernels": round(sum(row.milliseconds for row in kernels), 3),
        "classes": by_class(kernels),
        "gpu": gpu_state(),
        "kernels": [{**row._asdict(), "milliseconds": round(row[-1], 4)} for row in kernels],
    }


def main() -> int:
    """Prints the times of the classes; returns 1 if a program failed."""
    parser = parser_of(__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--arms", nargs="+", default=["jaxmp-bf16"])
    parser.add_argument("--toy", action="store_true", help="small sizes, on the CPU")
    options = parser.parse_args()
    if not options.toy and jax.default_backend() != "gpu":
        sys.exit("The benchmark requires a GPU. Without one, run it with --toy at small sizes.")
    size = (TOY if options.toy else WORKLOADS)[options.workload]
    shape = size.batch, size.length + 1
    draw = functools.partial(jax.random.randint, minval=0, maxval=size.vocabulary)
    tokens = [draw(jax.random.key(seed), shape, dtype=jnp.int32) for seed in (0, 1)]
    device = environment(jax.devices()[0].device_kind)
    report: dict[str, Any] = {"environment": device, "workload": options.workload}
    report["programs"] = programs = {}
    for name in options.arms:
        try:
            programs[name] = profile(name, size, tokens)
        except Exception as error:  # the other programs are still of use
            programs[name] = failure(error)
        shown = {key: value for key, value in programs[name].items() if key != "kernels"}
        print(name, json.dumps(shown, indent=2), flush=True)
        write_json(options.out, report)
    return int(any("failed" in row for row in programs.values()))


if __name__ == "__main__":
    raise SystemExit(main())
