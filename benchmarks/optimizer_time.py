"""Times the optimizer step alone on one GPU, in each layout of parameters, over its byte limit.

    python benchmarks/optimizer_time.py --out optimizer_time.json
    python benchmarks/optimizer_time.py --only gpt2 llama-1.3b
    python benchmarks/optimizer_time.py --toy      # small, on any machine

The parameters have the names and shapes of the models in examples/gpt.py and examples/llama.py, and
the gradients are FP32. `unrolled` stores the layers of a model separately, which gives more and
smaller arrays, and has only the programs with clipping and check. A step is AdamW with donated
state; programs:

    jaxmp    each layout, with and without clipping by the global norm and the check for
             non-finite gradients
    optax    FP32 parameters without jaxmp, with and without clipping
    hand     optax with clipping, and a check by the norm that clipping computes

The programs of a model run in turn in each round, whose first program is another one each time;
`over_hand` is the median of the ratios of the rounds. The limit is the time in which a copy on the
same GPU moves the least bytes of the layout: benchmarks/optimizer_bytes.py counts those of the
compiled programs. Models that --out contains are not measured again.
"""

import functools
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--toy" in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import jax
import jax.numpy as jnp
import optax

import gpt
import jaxmp
import llama
from ceilings import COPIED, copy_terabytes
from gpu_record import earlier_report, environment, failure, gpu_state, rotated, write_json
from optimizer_bytes import FLOORS, RECIPES
from result_file import parser_of

MODELS = ("gpt2", "gpt2 unrolled", "llama-1.3b", "llama-3.2-3b")
SECONDS = 0.05  # of a round of one program, about


# ---------------------------------------------------------------------------
# Parameters
# ---------------------------------------------------------------------------


def shapes_of(name: str) -> Any:
    """Returns the shapes of the parameters of a model, by name."""
    size, _, layout = name.partition(" ")
    model: Any = gpt.SIZES[size] if size in gpt.SIZES else llama.Llama(llama.SIZES[size])
    init = functools.partial(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    params = dict(jax.eval_shape(init)["params"])
    if layout == "unrolled":
        blocks = params.pop("blocks")
        (layers,) = {leaf.shape[0] for leaf in jax.tree.leaves(blocks)}
        block = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), blocks)
        params |= {f"blocks_{index}": block for index in range(layers)}
    return params


@functools.partial(jax.jit, static_argnums=1)
def normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    return scale * jax.random.normal(key, shape, jnp.float32)


def draw(shapes: Any, scale: float) -> Any:
    """Returns random FP32 arrays of these shapes."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    arrays = [normal(key, leaf.shape, scale) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, arrays)


# ---------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------

# Makes the state of parameters, and the jitted step (state, gradients) -> state.
Program = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]


def optimizer(clip: bool) -> optax.GradientTransformation:
    adamw = optax.adamw(1e-3, weight_decay=0.1, mask=gpt.matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw) if clip else adamw


def jaxmp_program(layout: str, clip: bool, skip: str) -> Program:
    """Returns a step of `jaxmp.TrainState`."""
    tx = RECIPES[layout].replace(skip=skip).optimizer(optimizer(clip))

    def init(params: Any) -> Any:
        return jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)

    update = lambda state, grads: state.apply_gradients(grads=grads)
    return jax.jit(init), jax.jit(update, donate_argnums=0)


def optax_program(clip: bool, guard: bool) -> Program:
    """Returns a step with optax alone; `guard` skips gradients whose norm is not finite."""
    tx = optimizer(clip)

    def update(state: Any, grads: Any) -> Any:
        params, opt_state = state
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        if not guard:
            return new
        finite = jnp.isfinite(optax.tree.norm(grads))
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)

    init = lambda params: (params, tx.init(params))
    return jax.jit(init, donate_argnums=0), jax.jit(update, donate_argnums=0)


def programs(all_settings: bool) -> dict[str, tuple[Program, int]]:
    """Returns name -> (program, the least bytes per parameter that it reads and writes).

    Args:
      all_settings: whether also without clipping and without the check.
    """
    made, both = {}, (False, True) if all_settings else (True,)
    for clip in both:
        suffix = ", clipping" if clip else ""
        made[f"optax{suffix}"] = optax_program(clip, False), 28 + 4 * clip
    made["hand"] = optax_program(True, True), 32
    checks = ("none", "auto") if all_settings else ("auto",)
    for layout, clip, skip in itertools.product(RECIPES, both, checks):
        # The norm and the check are one pass over the gradients.
        count = FLOORS[layout] + 4 * (clip or skip == "auto")
        settings = (", clipping" if clip else "") + (", check" if skip == "auto" else "")
        made[f"jaxmp, {layout}{settings}"] = jaxmp_program(layout, clip, skip), count
    return made


def seconds_of(program: Program, shapes: Any, grads: Any, seconds: float) -> float:
    """Returns the seconds of an update, from as many as take about `seconds`."""
    init, step = program
    state = jax.block_until_ready(step(init(draw(shapes, 0.02)), grads))
    start = time.perf_counter()
    state = jax.block_until_ready(step(state, grads))
    repeats = max(3, round(seconds / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(repeats):
        state = step(state, grads)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / repeats


def measure(name: str, rounds: int, rate: float, seconds: float = SECONDS) -> dict[str, Any]:
    """Returns a row for each program of a model.

    Args:
      name: one of MODELS.
      rounds: number of times of each program.
      rate: bytes per second of a copy.
      seconds: approximate duration of a program in a round.
    """
    shapes = shapes_of(name)
    leaves = jax.tree.leaves(shapes)
    parameters = sum(leaf.size for leaf in leaves)
    seconds_by_program: dict[str, list[float]] = {}
    failed: dict[str, dict[str, Any]] = {}
    made = programs(all_settings=name not in ("tiny", "gpt2 unrolled"))
    grads = jax.block_until_ready(draw(shapes, 1e-3))
    for index in range(rounds):
        for program in rotated(list(made), index):
            if program in failed:
                continue
            try:
                taken = seconds_of(made[program][0], shapes, grads, seconds)
            except Exception as error:  # too little memory is a result
                failed[program] = failure(error)
            else:
                seconds_by_program.setdefault(program, []).append(taken)
            gc.collect()
    rows = []
    for program, (_, count) in made.items():
        row: dict[str, Any] = {"program": program, "bytes": count}
        if program in failed:
            rows.append(row | failed[program])
            continue
        times, limit = seconds_by_program[program], parameters * count / rate
        median = statistics.median(times)
        row |= {
            "milliseconds": round(1e3 * median, 3),
            "range": [round(1e3 * min(times), 3), round(1e3 * max(times), 3)],
            "over_limit": round(median / limit, 3),
        }
        if "hand" not in failed:
            hand = seconds_by_program["hand"]
            ratios = [own / other for own, other in zip(times, hand, strict=True)]
            row["over_hand"] = round(statistics.median(ratios), 3)
        rows.append(row)
    return {
        "model": name,
        "parameters": parameters,
        "arrays": len(leaves),
        "rounds": rounds,
        "copy_terabytes_per_second": rate / 1e12,
        "gpu": gpu_state(),
        "rows": rows,
    }


def main() -> int:
    """Prints and writes the rows of each model; returns 1 if a program is to be repeated."""
    parser = parser_of(__doc__, MODELS)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    if not options.toy and jax.default_backend() != "gpu":
        sys.exit("The benchmark requires a GPU. Without one, run it with --toy at small sizes.")
    report: dict[str, Any] = {"environment": environment(jax.devices()[0].device_kind)}
    earlier = earlier_report(options.out, report["environment"]).get("models", [])
    models = report["models"] = [model for model in earlier if not is_to_repeat(model)]
    for name in ("tiny",) if options.toy else options.only:
        if name in {row["model"] for row in models}:
            continue
        rate = copy_terabytes(2**20 if options.toy else COPIED) * 1e12
        toy = {"rounds": 2, "seconds": 0.001} if options.toy else {"rounds": 7}
        models.append(measure(name, rate=rate, **toy))
        print(json.dumps(models[-1], indent=2), flush=True)
        write_json(options.out, report)
    return int(any(map(is_to_repeat, models)))


def is_to_repeat(model: dict[str, Any]) -> bool:
    return any("repeat" in row for row in model["rows"])


if __name__ == "__main__":
    raise SystemExit(main())
