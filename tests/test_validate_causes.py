"""Sabotaged recipes and models fail, and the first line of the report names the sabotage."""

from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state as flax_train_state

import jaxmp
from grids import EXPENSIVE
from models_linen import Perceptron
from training_steps import new_state

# The defaults of JAX, as users of Flax and optax have them.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")

STEPS = 24
FP16, BF16, BF16_PARAMS = map(jaxmp.load_recipe, ("fp16", "bf16", "bf16_params"))


def batches(shape, steps=STEPS):
    """Returns a function from the seed to FP32 batches."""
    return lambda seed: np.random.default_rng(seed).normal(size=(steps, *shape)).astype("float32")


def first_line(report, name):
    assert str(report).split("\n")[0] == report.candidates[0].headline
    return report[name].headline


def line_of(code):
    """Returns the location of the only line of this file with some code, as in a report."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if code in line and "line_of" not in line)
    return f"({Path(__file__).name}:{number})"


def verdicts(report):
    return {candidate.name: candidate.verdict for candidate in report.candidates}


def squared_error(model, x):
    return jnp.mean((model(x).astype(jnp.float32) - jnp.sin(x[..., :4])) ** 2)


def run(model, candidates, loss_fn=squared_error, shape=(64, 8), rate=1e-3, **options):
    """Validates a training with Adam, or with the `optimizer` of the options."""
    held_out, steps = [*batches(shape, 2)(99)], [0, STEPS - 1]
    data = {"batches": batches(shape), "held_out": held_out, "optimizer": optax.adam(rate)}
    options = {"seeds": 1, "steps": STEPS, "compare_steps": steps, **data, **options}
    return jaxmp.validate(model, candidates, loss_fn=loss_fn, **options)


@EXPENSIVE
def test_bfloat16_parameters_without_masters():
    candidates = {"bare": BF16_PARAMS.replace(master="none"), "masters": BF16_PARAMS}
    report = run(Perceptron(), candidates, rate=3e-4)
    assert verdicts(report) == {"bare": "fail", "masters": "inconclusive"}
    line = first_line(report, "bare")
    assert line.startswith("bare FAILS: 16-bit parameters without FP32 masters: ")
    assert "below half a ulp" in line


class Attention(nn.Module):
    """Attention whose logits have a large common offset, as from biases of query and key."""

    is_fp32: bool

    @nn.compact
    def __call__(self, x):
        query, key, value = (nn.Dense(16, name=name)(x) for name in ("query", "key", "value"))
        logits = jnp.einsum("btd,bsd->bts", query, key)
        logits = (logits.astype(jnp.float32) if self.is_fp32 else logits) + 1000
        return nn.Dense(4, name="out")(jax.nn.softmax(logits).astype(value.dtype) @ value)


@pytest.mark.parametrize("is_fp32", [False, True])
@EXPENSIVE
def test_half_softmax_at_large_logits(is_fp32):
    report = run(Attention(is_fp32), ["bf16"], shape=(8, 8, 8), budgets=0.05)
    if is_fp32:
        assert verdicts(report) == {"bf16": "inconclusive"}
        return
    line = first_line(report, "bf16")
    # The offset is rounded before the softmax, whose own roundings are not the origin.
    where = line_of("is_fp32 else logits) + 1000")
    assert line.startswith(f"bf16 FAILS: an operation in bfloat16 in (root) {where}, which alone ")


def make_accumulation(recipe, seed):
    """Returns a run that accumulates gradients over 1,024 microbatches."""
    model = Perceptron()
    apply = recipe.wrap(model).apply
    x = 1 + batches((1024, 8), 4)(seed)
    state = new_state(model.init(jax.random.key(seed), x[0]), recipe, optax.adam(1e-2))

    def loss_fn(params, x):
        return jnp.mean((apply(params, x) - 2) ** 2)

    def step(state, x):
        loss, grads = state.value_and_grad(loss_fn, microbatches=1024)(x)
        return state.apply_gradients(grads=grads), {"loss": loss, "grads": grads}

    evaluate = lambda state: loss_fn(state.params, x[0])
    return jaxmp.TrainingRun(state=state, step=step, batches=x, evaluate=evaluate)


@EXPENSIVE
def test_bfloat16_accumulation_over_1024_microbatches():
    candidates = {"narrow": BF16.replace(accumulate_dtype="bfloat16"), "wide": BF16}
    report = jaxmp.validate(
        make_accumulation, candidates, seeds=2, steps=4, compare_steps=[0], budgets=0.2
    )
    assert verdicts(report) == {"narrow": "fail", "wide": "pass"}
    line = first_line(report, "narrow")
    where = line_of("state.value_and_grad(loss_fn, microbatches=1024)(x)")
    expected = f"gradients accumulated over microbatches in bfloat16 in (root) {where}"
    assert line.startswith(f"narrow FAILS: {expected}, which alone changes the gradient by ")


class Head(nn.Module):
    """Classifier whose weights are a multiple of an identity matrix with noise."""

    size: float

    @nn.compact
    def __call__(self, x):
        def init(key, shape, dtype=jnp.float32, **_):
            return self.size * (jnp.eye(*shape) + 0.1 * jax.random.normal(key, shape))

        return nn.Dense(16, use_bias=False, name="classes", kernel_init=init)(x)


def cross_entropy(model, x):
    logits = model(x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, x.argmax(-1)).mean()


@pytest.mark.parametrize("size", [1.0, 30.0])
@EXPENSIVE
def test_fp8_head_with_large_weights(size):
    report = run(Head(size), ["fp8"], cross_entropy, (256, 16), rate=1e-4, budgets=0.1)
    if size == 1:
        assert verdicts(report) == {"fp8": "inconclusive"}
        return
    line = first_line(report, "fp8")
    assert line.startswith("fp8 FAILS: an operation in float8_e4m3fn in classes (test_validate_")
    assert report["fp8"].causes[0].fix.startswith("jaxmp.Rule('classes', \"o=f32,matmul=default\"")
    loss, *_ = report["fp8"].checks
    assert loss.name == "held_out_loss" and abs(loss.value) < 0.05


@EXPENSIVE
def test_float16_overflow():
    report = run(Perceptron(), ["fp16"], lambda model, x: squared_error(model, 1e5 * x))
    assert "the output of hidden is not finite" in first_line(report, "fp16")


@EXPENSIVE
def test_steps_skipped_by_a_loss_scale_that_is_too_large():
    scale = jaxmp.DynamicLossScale(2.0**40, max_scale=2.0**40)
    large, static = FP16.replace(loss_scale=scale), FP16.replace(loss_scale=2.0**40)
    candidates = {"large": large, "static": static}
    report = run(Perceptron(), candidates, rate=3e-2)
    assert report["static"].headline.startswith(
        "static FAILS: 100 % of the steps were skipped with a loss scale of 1.09951e+12; "
    )
    line = first_line(report, "large")
    assert line.startswith("large FAILS: ") and " of the steps were skipped until the loss" in line
    (cause,) = (each for each in report["large"].causes if each.id == "skipped_steps")
    scale = report["large"].training.final_loss_scale[0]
    assert 2.0 <= scale < 2.0**40
    assert cause.fix == f"recipe = recipe.replace(loss_scale=jaxmp.DynamicLossScale({scale:g}))"
    remedy = {"remedy": eval(cause.fix.partition("= ")[2], {"recipe": large, "jaxmp": jaxmp})}
    report = run(Perceptron(), remedy, rate=3e-2)
    assert verdicts(report) == {"remedy": "inconclusive"} and report["remedy"].training.skipped == 0


class Edges(nn.Module):
    """Features of 4 nodes at 2,048 edges; the gradient of a node is a sum of 512 similar terms."""

    @nn.compact
    def __call__(self, x):
        nodes = nn.Dense(8)(x).astype(x.dtype)
        return nodes[jnp.arange(2048) % 4]


def test_the_gradient_of_indexing_sums_in_bfloat16():
    loss_fn = lambda model, x: jnp.square(model(x).astype(jnp.float32) - 3).mean()
    report = run(Edges(), [BF16], loss_fn, (4, 8), optimizer=optax.sgd(0.1))
    cause = f"a sum or product in bfloat16 in (root) {line_of('nodes[jnp.arange')}, which alone"
    assert f"bf16 FAILS: {cause} changes the gradient by" in first_line(report, "bf16")
    assert "Accumulate the gradient in FP32" in report["bf16"].causes[0].fix


class Waves(nn.Module):
    """Sine of angles up to 2,000, which bfloat16 rounds to multiples of 8."""

    @nn.compact
    def __call__(self, x):
        angles = 1000 * nn.Dense(16, name="angles")(x)
        return nn.Dense(4, name="out")(jnp.sin(angles))


@EXPENSIVE
def test_angles_in_bfloat16():
    report = run(Waves(), ["bf16"], shape=(64, 32))
    line = first_line(report, "bf16")
    # The input is rounded first, and angles 1,000 times as large have that error.
    assert line.startswith("bf16 FAILS: the batch is rounded to bfloat16 in (root) (test_validate")
    where = line_of("angles = 1000 * nn.Dense").strip("()")
    assert f"lines alone: {where}" in report["bf16"].causes[0].evidence


# ---------------------------------------------------------------------------
# Errors without a known cause
# ---------------------------------------------------------------------------


def make_by_hand(*, clip=lambda grads: grads, weight=1.0, rate=1e-2):
    """Validates a run with an error in the update or in a module.

    It has a softmax in 16 bits, too, which has no effect on the gradients.
    """

    def make_run(recipe, seed):
        is_reference = recipe.name == "fp32"
        model, tx = Perceptron(), optax.adam(1e-2 if is_reference else rate)
        x = batches((64, 8))(seed)
        params = model.init(jax.random.key(seed), x[0])

        def loss_fn(params, x):
            if not is_reference:
                hidden = params["params"]["hidden"]
                scaled = {**hidden, "kernel": weight * hidden["kernel"]}
                params = {"params": {**params["params"], "hidden": scaled}}
            dtype = jnp.float32 if is_reference else jnp.bfloat16
            other = 1e-6 * jax.nn.softmax(x.astype(dtype)).astype(jnp.float32).sum()
            return squared_error(lambda x: model.apply(params, x), x) + other

        def step(state, x):
            loss, grads = jax.value_and_grad(loss_fn)(state.params, x)
            received = grads if is_reference else clip(grads)
            return state.apply_gradients(grads=received), {"loss": loss, "grads": grads}

        state = flax_train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
        evaluate = lambda state: loss_fn(state.params, x[0])
        return jaxmp.TrainingRun(state=state, step=step, batches=x, evaluate=evaluate)

    return jaxmp.validate(make_run, {"hand": "bf16"}, seeds=2, steps=STEPS)


def test_an_error_in_the_update_is_located():
    """The norm of gradients that are clipped in FP16 before they are unscaled is infinite."""

    def clip(grads):
        scaled = jax.tree.map(lambda g: (g * 2.0**14).astype(jnp.float16), grads)
        clipped, _ = optax.clip_by_global_norm(1.0).update(scaled, optax.EmptyState())
        return jax.tree.map(lambda g: g.astype(jnp.float32) / 2.0**14, clipped)

    line = first_line(report := make_by_hand(clip=clip), "hand")
    where = line_of("clipped, _ = optax.clip_by_global_norm(1.0)")
    effect = "which alone changes the update by 100 %"
    expected = f"a norm or its statistics in float16 in (root) {where}, {effect}"
    assert line.startswith(f"hand FAILS: {expected}; held-out loss +")
    assert report["hand"].causes[0].id == "norm_16bit"
    assert report["hand"].gradients[0].update_ratio == 0


def test_an_error_in_a_module_is_located():
    report = make_by_hand(weight=1.5)
    line = first_line(report, "hand")
    expected = "with all operations in FP32, the output of hidden is the first to differ, by 50 %"
    assert line.startswith(f"hand FAILS: {expected}; ")
    assert report["hand"].causes[0].id == "module"


def test_a_learning_rate_is_named_in_the_first_line():
    line = first_line(make_by_hand(rate=1e-2 / 3), "hand")
    expected = "gradients agree, and the updates are 0.33 times as large as in the reference"
    assert line.startswith(f"hand FAILS: {expected}")
