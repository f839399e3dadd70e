"""Measures the cost of a recipe in a training step: operations, bytes, tracing and compile time.

    python benchmarks/step_counts.py                      # prints the tables
    python benchmarks/step_counts.py --out counts.json    # also writes them

The workload is a byte-level GPT (12 layers, width 256, 8 heads, 128 positions, batch 4) in Flax
Linen with AdamW, FP32 parameters and bfloat16 compute. Nothing is run: counts are those of the
lowered and the compiled program, and times are CPU seconds of tracing, lowering and compiling,
alternating between the two programs of a ratio. jmp, MPX and Flax `DynamicScale` are measured if
they are installed.
"""

import dataclasses
import functools
import gc
import importlib
import os
import platform
import re
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import dynamic_scale
from flax.training.train_state import TrainState as FlaxTrainState
from jax import lax

import jaxmp
from result_file import parser_of, write_result

LAYERS, WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 12, 256, 8, 128, 4, 256


# ---------------------------------------------------------------------------
# One model: plain, or in bfloat16 by hand
# ---------------------------------------------------------------------------


def attention_by_hand(query, key, value, mask=None, **_):
    """Computes attention with logits and softmax in FP32, and weights in bfloat16."""
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits).astype(query.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


class Block(nn.Module):
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, mask):
        by_hand = {} if self.dtype is None else {"attention_fn": attention_by_hand}
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, dtype=self.dtype, **by_hand)(h, mask=mask)
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = nn.gelu(nn.Dense(4 * WIDTH, dtype=self.dtype)(h))
        return x + nn.Dense(WIDTH, dtype=self.dtype)(h)


class GPT(nn.Module):
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(tokens)
        positions = jnp.arange(tokens.shape[1])[None]
        x = x + nn.Embed(LENGTH, WIDTH, dtype=self.dtype)(positions)
        mask = nn.make_causal_mask(tokens, dtype=bool)
        for _ in range(LAYERS):
            x = Block(self.dtype)(x, mask)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=self.dtype)(x)


TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
TX = optax.adamw(3e-4)


def loss_of(apply):
    def loss_fn(params, tokens):
        logits = apply({"params": params}, tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


@functools.cache
def init_params():
    return GPT().init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]


# ---------------------------------------------------------------------------
# The steps: (function, state)
# ---------------------------------------------------------------------------


def by_hand():
    loss_fn = loss_of(GPT(jnp.bfloat16).apply)

    def step(state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens)
        return state.apply_gradients(grads=grads), loss

    return step, FlaxTrainState.create(apply_fn=None, params=init_params(), tx=TX)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scale:
    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    consecutive: jax.Array
    at_floor: jax.Array
    last_finite: jax.Array


def by_hand_guarded():
    """Returns a hand-written step with the guard and the loss scaling of the recipe."""
    loss_fn = loss_of(GPT(jnp.bfloat16).apply)

    def step(carry, tokens):
        state, s = carry
        loss, backward = jax.vjp(lambda p: loss_fn(p, tokens), state.params)
        seed = jnp.where(jnp.isfinite(loss), s.scale, jnp.nan)
        (grads,) = backward(seed)
        grads = jax.tree.map(lambda g: g / seed, grads)
        # Of the squares, as the recipe does: a square that overflows would be a moment.
        flags = [jnp.all(lax.is_finite(g * g)) for g in jax.tree.leaves(grads)]
        finite = flags[0]
        for flag in flags[1:]:
            finite = finite & flag
        state = lax.cond(
            finite,
            lambda: state.apply_gradients(grads=grads),
            lambda: state.replace(step=state.step),
        )
        good = jnp.where(finite, s.good_steps + 1, 0)
        grow = good == 2000
        grown = s.scale * 2
        up = jnp.where(grow & jnp.isfinite(grown), jnp.minimum(grown, 2.0**24), s.scale)
        down = jnp.maximum(s.scale * 0.5, 2.0**-14)
        skipped = ~finite
        s = Scale(
            scale=jnp.where(finite, up, down),
            good_steps=jnp.where(grow, 0, good),
            skipped=s.skipped + skipped,
            consecutive=jnp.where(finite, 0, s.consecutive + 1),
            at_floor=jnp.where(finite, 0, s.at_floor + (skipped & (s.scale <= 2.0**-14))),
            last_finite=finite,
        )
        return (state, s), loss

    state = FlaxTrainState.create(apply_fn=None, params=init_params(), tx=TX)
    state = state.replace(step=jnp.zeros((), jnp.int32))
    zero = jnp.zeros((), jnp.int32)
    return step, (state, Scale(jnp.float32(2.0**16), zero, zero, zero, zero, jnp.array(True)))


def by_recipe(**changes):
    def make():
        recipe = jaxmp.load_recipe("bf16").replace(**changes)
        model = recipe.wrap(GPT())
        loss_fn = loss_of(model.apply)

        def step(state, tokens):
            loss, grads = state.value_and_grad(loss_fn)(tokens)
            return state.apply_gradients(grads=grads), loss

        tx = recipe.optimizer(TX)
        return step, jaxmp.TrainState.create(apply_fn=None, params=init_params(), tx=tx)

    return make


def flax_dynamic_scale():
    loss_fn = loss_of(GPT(jnp.bfloat16).apply)

    def step(carry, tokens):
        state, scale = carry
        scale, finite, loss, grads = scale.value_and_grad(loss_fn)(state.params, tokens)
        new = state.apply_gradients(grads=grads)
        keep = lambda n, o: jnp.where(finite, n, o)
        new = new.replace(
            params=jax.tree.map(keep, new.params, state.params),
            opt_state=jax.tree.map(keep, new.opt_state, state.opt_state),
        )
        return (new, scale), loss

    state = FlaxTrainState.create(apply_fn=None, params=init_params(), tx=TX)
    return step, (state, dynamic_scale.DynamicScale())


def jmp_scale():
    jmp = importlib.import_module("jmp")
    loss_fn = loss_of(GPT(jnp.bfloat16).apply)

    # jmp's loss scale checks its leaves when it is unflattened, so `jit(...).lower` fails with it
    # as an argument. It is created inside the step.
    def step(carry, tokens):
        state, fields = carry
        scale = jmp.DynamicLossScale(**fields)
        scaled = lambda p: scale.scale(loss_fn(p, tokens))
        loss, grads = jax.value_and_grad(scaled)(state.params)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        new = state.apply_gradients(grads=grads)
        params, opt_state = jmp.select_tree(
            finite, (new.params, new.opt_state), (state.params, state.opt_state)
        )
        new = new.replace(params=params, opt_state=opt_state)
        after = scale.adjust(finite)
        fields = {"loss_scale": after.loss_scale, "counter": after.counter}
        return (new, fields), scale.unscale(loss)

    state = FlaxTrainState.create(apply_fn=None, params=init_params(), tx=TX)
    fields = {"loss_scale": jnp.float32(2.0**16), "counter": jnp.int32(0)}
    return step, (state, fields)


def mpx_scale():
    mpx = importlib.import_module("mpx")
    loss_fn = loss_of(GPT(jnp.bfloat16).apply)
    mpx.set_half_precision_datatype(jnp.bfloat16)

    def step(carry, tokens):
        state, scale = carry
        run = mpx.filter_value_and_grad(loss_fn, scale, use_mixed_precision=True)
        loss, scale, finite, grads = run(state.params, tokens)
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        keep = lambda n, o: jnp.where(finite, n, o)
        new = state.replace(
            step=state.step + 1,
            params=jax.tree.map(keep, params, state.params),
            opt_state=jax.tree.map(keep, opt_state, state.opt_state),
        )
        return (new, scale), loss

    state = FlaxTrainState.create(apply_fn=None, params=init_params(), tx=TX)
    scale = mpx.DynamicLossScaling(
        loss_scaling=jnp.float32(2.0**15), min_loss_scaling=jnp.float32(1), period=jnp.int32(2000)
    )
    return step, (state, scale)


# ---------------------------------------------------------------------------
# Counting
# ---------------------------------------------------------------------------

_STABLEHLO_OP = re.compile(r"^\s*(?:%[\w:, %#]+ = )?\"?(?:stablehlo|func|chlo|mhlo)\.", re.M)
_HLO_OP = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = ", re.M)


@functools.cache
def made(make):
    """Returns a step and its state, created once."""
    step, state = make()
    return step, jax.block_until_ready(state)


@functools.cache
def caller(words):
    """Returns a caller whose Python frame is `words` words larger than the smallest."""
    names = ", ".join(f"x{index}" for index in range(words))
    body = f"    if f is None:\n        {names} = ()\n" if words else ""
    namespace = {}
    exec(f"def call(f):\n{body}    return f()\n", namespace)
    return namespace["call"]


# CPython stores frames in blocks of 16 KiB, and allocates a block when a call crosses the end of
# the current one. If repeated calls cross it, tracing takes a few percent longer. The position
# depends on the callers, so a step is timed with its frames at all positions of a block.
BLOCK_WORDS = 2048


def lower(make, place=0.0):
    """Traces and lowers a step without caches; returns it with the CPU seconds.

    `place` is the position of the first frame in a block of frames, from 0 to 1.
    """
    step, state = made(make)
    call = caller(int(place * BLOCK_WORDS))
    jax.clear_caches()
    gc.collect()
    # Disable garbage collection as timeit does, because its time depends on earlier code. Tracing
    # uses one thread; other threads still work for `make`.
    gc.disable()
    start = time.thread_time()
    jitted = jax.jit(lambda *args: step(*args), donate_argnums=0)
    lowered = call(lambda: jitted.lower(state, TOKENS))
    seconds = time.thread_time() - start
    gc.enable()
    return lowered, seconds


def count(make):
    """Returns the counts of one step."""
    lowered, _ = lower(make)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    cost = compiled.cost_analysis()
    return {
        "flops": cost["flops"],
        "bytes": cost["bytes accessed"],
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "stablehlo_ops": len(_STABLEHLO_OP.findall(lowered.as_text())),
        "hlo_ops": len(_HLO_OP.findall(compiled.as_text())),
        "compile_seconds": seconds,
    }


def timed(make, base, pairs, seconds):
    """Returns `{ratio, interval, ...}` of CPU seconds, alternating between the two programs.

    Because the speed of a shared machine varies, the ratio is the median of the ratios of adjacent
    runs. `interval` is its 95 % confidence interval from order statistics, which does not depend on
    the distribution. Many pairs of short programs make it narrow.
    """
    seconds_of = {id(make): [], id(base): []}
    for pair in range(pairs):
        for one in (make, base) if pair % 2 else (base, make):
            seconds_of[id(one)].append(seconds(one, pair / pairs))
    ours, theirs = (seconds_of[id(one)] for one in (make, base))
    ratios = sorted(our / their for our, their in zip(ours, theirs, strict=True))
    # The number of ratios below the median is binomial: half of them, plus or minus 1.96
    # deviations.
    reach = 0.98 * pairs**0.5
    low, high = int(pairs / 2 - reach), int(pairs / 2 + reach)
    return {
        "ratio": statistics.median(ratios),
        "interval": [ratios[max(0, low)], ratios[min(pairs - 1, high)]],
        "range": [ratios[0], ratios[-1]],
        "seconds": [statistics.median(ours), statistics.median(theirs)],
        "pairs": pairs,
    }


def lowering_seconds(make, place):
    return lower(make, place)[1]


def compiling_seconds(make, place):
    lowered, _ = lower(make, place)
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start


# A recipe computes weight gradients in FP32, by hand they are rounded to bfloat16. The loss
# function is traced and run again for that, and a CPU converts the operands of these matmuls.
SAME_STEP = {
    "flops": 1.0005,
    "bytes": 1.10,
    "stablehlo_ops": 1.02,
    "hlo_ops": 1.03,
    "trace_lower": 1.25,
}
LIMITS = {
    "a": SAME_STEP,
    "b": SAME_STEP,
    "c": {"stablehlo_ops": 1.20, "hlo_ops": 1.5, "compile": 1.5},
}
GUARDED = {"loss_scale": jaxmp.DynamicLossScale()}
COMPARISONS = [
    ("a", 'recipe bf16, skip="none"', by_recipe(skip="none"), "hand-written bf16 step", by_hand),
    (
        "b",
        "recipe bf16 + dynamic scale",
        by_recipe(**GUARDED),
        "hand-written, same guard",
        by_hand_guarded,
    ),
    ("c", "recipe bf16 + dynamic scale", by_recipe(**GUARDED), "hand-written bf16 step", by_hand),
    ("c", "hand-written, same guard", by_hand_guarded, "hand-written bf16 step", by_hand),
    ("c", "Flax DynamicScale", flax_dynamic_scale, "hand-written bf16 step", by_hand),
    ("c", "jmp DynamicLossScale", jmp_scale, "hand-written bf16 step", by_hand),
    ("c", "MPX", mpx_scale, "hand-written bf16 step", by_hand),
]


def compare(limits, make, base, pairs, counted):
    """Returns the ratios of one comparison: {metric: ratio, or result of `timed`}."""
    for one in (make, base):
        counted.setdefault(one, None)
        counted[one] = counted[one] or count(one)
    ratios = {
        key: counted[make][key] / counted[base][key]
        for key in ("flops", "bytes", "temp_bytes", "stablehlo_ops", "hlo_ops")
    }
    if "trace_lower" in limits:
        ratios["trace_lower"] = timed(make, base, pairs, lowering_seconds)
    if "compile" in limits:
        ratios["compile"] = timed(make, base, max(2, pairs // 4), compiling_seconds)
    return ratios


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=12, help="alternations for each time ratio")
    parser.add_argument("--only", default="abc", help="some of the comparisons, such as ab")
    options = parser.parse_args()
    workload = f"GPT {LAYERS}x{WIDTH}, B{BATCH} T{LENGTH}, AdamW, bf16"
    print(f"{workload}; JAX {jax.__version__}, {jax.default_backend()}")
    rows, counted, failed = [], {}, False
    for kind, name, make, base_name, base in COMPARISONS:
        if kind not in options.only:
            continue
        try:
            ratios = compare(LIMITS[kind], make, base, options.pairs, counted)
        except ModuleNotFoundError as error:
            print(f"({kind}) {name}: {error.name} is not installed")
            continue
        ours = name.startswith("recipe")
        print(f"\n({kind}) {name} / {base_name}")
        for metric, value in ratios.items():
            ratio = value["ratio"] if isinstance(value, dict) else value
            limit = LIMITS[kind].get(metric) if ours else None
            over = limit is not None and ratio > limit
            failed |= over
            text = f"{ratio:.3f}"
            if isinstance(value, dict):
                text += " ({:.3f} to {:.3f}; {} pairs)".format(*value["interval"], value["pairs"])
            mark = "" if limit is None else f"  limit {limit:g}{'  OVER' if over else ''}"
            print(f"    {metric:14s} {text}{mark}")
        rows.append({"kind": kind, "program": name, "base": base_name, "ratios": ratios})
        write_result(
            options.out,
            workload=workload,
            hardware={"machine": platform.machine(), "cpus": os.cpu_count()},
            counts={
                make.__name__: counts for make, counts in counted.items() if make.__name__ != "make"
            },
            comparisons=rows,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
