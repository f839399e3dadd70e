"""Phases of a recipe: their keys, one train state, switches, and the FP8 state after 16 bits."""

import functools
import pickle
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from grids import fast_cases
from jaxmp.errors import RecipeError, RuleError, ValidationError
from training_steps import new_state, nnx_step, state_step

pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")

DELAYED = jaxmp.fp8.DelayedScaling(amax_history_len=4)
FP8 = jaxmp.load_recipe("fp8").replace(fp8=DELAYED)
# FP8, bfloat16 from step 2, and FP8 again from step 4.
PHASES = [{"from_step": 2, "matmul": "default"}, {"from_step": 4, "matmul": "fp8"}]
RECIPE = FP8.replace(phases=PHASES, name="mine")
X = jax.random.normal(jax.random.key(0), (32, 32))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="head")(nn.relu(nn.Dense(64, name="body")(x)))


def loss_of(model):
    return lambda variables, x: jnp.mean((model.apply(variables, x) - jnp.flip(x, -1)) ** 2)


@functools.cache
def optimizer_of(recipe):
    return recipe.optimizer(optax.adam(1e-2))


def make_variables(seed, recipe=RECIPE):
    return recipe.phase(0).wrap(Net()).init(jax.random.key(seed), X)


def make_state(recipe=RECIPE):
    variables = make_variables(1, recipe)
    tx = optimizer_of(recipe)
    return jaxmp.TrainState.create(apply_fn=None, params=variables, tx=tx)


@jax.jit
def train_step(recipe, state, x):
    return state_step(loss_of(recipe.wrap(Net())))(state, x)


def run(state, first, last, recipe=RECIPE, batch=lambda step: X):
    losses = []
    for step in range(first, last):
        state, loss = train_step(recipe.phase(step), state, batch(step))
        losses.append(float(loss))
    return state, losses


def fp8_state(state):
    return state.params["_overwrite_with_gradient"]["body"]


@functools.cache
def uninterrupted():
    return run(make_state(), 0, 6)


# ---------------------------------------------------------------------------
# Keys
# ---------------------------------------------------------------------------

FILE = """
extends = "fp8_delayed"

[policy]
matmul = "default"

[[phases]]
from_step = 10
matmul = "fp8"
why = "after the warmup"

[[phases.rules]]
path = "body"
compute_dtype = "float32"

[[phases]]
from_step = 20
matmul = "fp8"
fprop = "high"
"""


def test_a_phase_has_the_keys_of_the_recipe_and_its_own(write):
    recipe = jaxmp.load_recipe(write(FILE, "mine.toml"))
    names = [recipe.phase(step).name for step in (0, 9, 10, 19, 20, 10**6)]
    assert names == ["mine@0", "mine@0", "mine@10", "mine@10", "mine@20", "mine@20"]
    start, fp8, high = recipe.split_phases()
    policies = [each.policies.resolve("body") for each in (start, fp8, high)]
    assert [policy.matmul for policy in policies] == ["default", "default", "fp8"]
    assert [policy.compute_dtype.name for policy in policies] == ["bfloat16", "float32", "bfloat16"]
    assert fp8.policies.resolve("other").matmul == "fp8" and high.fp8.fprop == "high"
    assert fp8.fp8.fprop == jaxmp.fp8.DelayedScaling().fprop
    # The keys of a phase do not change those of the next one, and a phase has none.
    assert fp8.phase(0) is start is recipe.phase(5) and jaxmp.load_recipe("bf16").phase(3).name
    assert jaxmp.load_recipe(write(recipe.to_toml(), "mine.toml")) == recipe
    assert jaxmp.load_recipe(write(high.to_toml(), "mine.toml")) == recipe
    assert pickle.loads(pickle.dumps(high)) == high
    rule = jaxmp.Rule("body", "c=f32")
    phases = [
        {"from_step": 10, "matmul": "fp8", "why": "after the warmup", "rules": [rule]},
        {"from_step": 20, "matmul": "fp8", "fprop": "high"},
    ]
    assert recipe.replace(phases=phases) == recipe == recipe.replace(phases=recipe.phases)
    assert recipe.replace(phases=[]).phases == () and not recipe.replace(phases=[]).policies.others


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('matmul = "fp8"', "phase 1: the phase has no from_step"),
        ("from_step = 0", "line 3.*phase 1, key 'from_step': 0 is not allowed"),
        ("from_step = 3", "phase 1: the phase changes nothing"),
        ('from_step = 3\nmatmull = "fp8"', "line 4.*Did you mean 'matmul'"),
        ('from_step = 3\nparam_dtype = "bf16"', "line 4.*unknown key 'param_dtype'"),
        ("from_step = 3\nrule = 1", r"unknown key 'rule'.*'rules'\?.*\[\[phases.rules\]\]"),
        ('from_step = 3\nfprop = "high"', "neither the recipe nor the phase has any"),
        ('from_step = 3\nmatmul = "fp8"\nfprop = "e4"', "phase 1: .*fprop must be"),
        (
            'from_step = 3\nmatmul = "fp8"\n[[phases]]\nfrom_step = 3\nmatmul = "fp8"',
            "line 6.*phase 2, key 'from_step': from_step = 3 follows from_step = 3",
        ),
        (
            'from_step = 3\n[[phases.rules]]\npath = "a"\nparam_dtype = "bf16"',
            "all phases have the same train state",
        ),
        (
            'from_step = 3\n[[phases.rules]]\npath = "a"\nc = "f32"\n[[phases]]\nfrom_step = 5\n'
            '[[phases.rules]]\npath = "a"\ncompute_dtyp = "f32"',
            "line 11.*phase 2, key 'rules.compute_dtyp'",
        ),
    ],
)
def test_wrong_phases_are_refused_with_their_line(write, lines, message):
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        jaxmp.load_recipe(write(f'extends = "bf16"\n[[phases]]\n{lines}', "mine.toml"))


def test_wrong_uses_of_phases_are_refused():
    for step in (-1, 1.5, jnp.zeros(2)):
        with pytest.raises(RecipeError, match="nonnegative integer on the host"):
            RECIPE.phase(step)
    with pytest.raises(RecipeError, match="in front of the compiled step"):
        jax.jit(lambda step: RECIPE.phase(step).name)(3)
    with pytest.raises(RecipeError, match="is one phase of 'mine'"):
        RECIPE.phase(0).replace(master="none")
    for phases in ("fp8", {"from_step": 2}, ["fp8"]):
        with pytest.raises(RecipeError, match=r"replace\(phases=.*phases=\[{'from_step': 9000"):
            FP8.replace(phases=phases)
    uses = (
        lambda: RECIPE.wrap(Net()),
        lambda: jaxmp.PolicyMap(RECIPE, []),
        lambda: jaxmp.audit(jnp.sin, X, recipe=RECIPE),
        lambda: jaxmp.autocast(jnp.sin, RECIPE),
    )
    for use in uses:
        with pytest.raises(RecipeError, match=r"has phases.*recipe.phase\(step\)"):
            use()
    typo = {"from_step": 2, "rules": [jaxmp.Rule("boddy", "c=f32")]}
    with pytest.raises(RuleError, match="nearest paths: 'body'"):
        make_state(FP8.replace(phases=[typo]))


def test_a_float16_phase_brings_its_loss_scale_from_the_start():
    recipe = jaxmp.load_recipe("bf16").replace(phases=[{"from_step": 5, "compute_dtype": "f16"}])
    assert isinstance(recipe.phase(0).loss_scale, jaxmp.DynamicLossScale)
    with pytest.raises(RecipeError, match=r"key 'rules.c': float8_e4m3fn is too narrow"):
        recipe.replace(phases=[{"from_step": 5, "rules": [{"path": "a", "c": "f8_e4m3fn"}]}])


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


def test_a_switch_equals_one_by_hand_and_is_compiled_once_for_each_phase():
    before = train_step._cache_size()
    _, losses = uninterrupted()
    run(make_state(), 0, 6)
    assert train_step._cache_size() <= before + 3

    @functools.partial(jax.jit, static_argnums=0)
    def by_hand(uses_fp8, state, x):
        loss_fn = loss_of((FP8 if uses_fp8 else jaxmp.load_recipe("bf16")).wrap(Net()))
        # The bfloat16 model has no FP8 state.
        of_params = lambda variables, x: loss_fn({"params": variables["params"]}, x)
        return state_step(loss_fn if uses_fp8 else of_params)(state, x)

    state, expected = make_state(FP8), []
    for step in range(6):
        if step == 4:
            reset = jax.tree.map(jnp.zeros_like, state.params["_overwrite_with_gradient"])
            state = state.replace(params={**state.params, "_overwrite_with_gradient": reset})
        state, loss = by_hand(step < 2 or step >= 4, state, X)
        expected.append(float(loss))
    assert losses == expected


@pytest.mark.parametrize("step", [2, 3, 4])
def test_a_run_resumes_on_both_sides_of_a_switch(tmp_path, step):
    state, _ = run(make_state(), 0, step)
    with jaxmp.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(step, state, recipe=RECIPE.phase(step))
    with jaxmp.checkpoint.Checkpointer(tmp_path) as checkpointer:
        # Also by the recipe of another phase.
        restored = checkpointer.restore(make_state(), recipe=RECIPE.phase(0))
    resumed, losses = run(restored, step, 6)
    expected, all_losses = uninterrupted()
    assert losses == all_losses[step:]
    jax.tree.map(np.testing.assert_array_equal, resumed, expected)


@pytest.mark.parametrize("base", ["fp8", "bf16"])
def test_the_first_scale_after_a_bf16_phase_is_that_of_the_tensor(base):
    """Inputs grow 100 times in the bfloat16 phase: an old scale would saturate them."""
    phases = PHASES if base == "fp8" else [{"from_step": 4, "matmul": "fp8"}]
    recipe = (FP8 if base == "fp8" else jaxmp.load_recipe("bf16")).replace(
        phases=phases, fp8=DELAYED
    )
    grown = lambda step: X * (100 if step >= 3 else 1)
    state, _ = run(make_state(recipe), 0, 4, recipe, grown)
    assert not any(np.any(leaf) for name, leaf in fp8_state(state).items() if name != "fp8_uses")
    # The same step with the scale of a state that began anew.
    fresh = jax.tree.map(jnp.zeros_like, state.params["_overwrite_with_gradient"])
    fresh = state.replace(params={**state.params, "_overwrite_with_gradient": fresh})
    stale = jax.tree.map(jnp.ones_like, fresh.params["_overwrite_with_gradient"])
    stale = state.replace(params={**state.params, "_overwrite_with_gradient": stale})
    (state, losses), (_, expected), (_, saturated) = (
        run(each, 4, 5, recipe, grown) for each in (state, fresh, stale)
    )
    assert losses == expected and abs(saturated[0] / losses[0] - 1) > 0.01
    assert float(fp8_state(state)["fp8_input_amax"]) == pytest.approx(
        100 * float(jnp.abs(X).max()), rel=0.01
    )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(32)(nn.relu(nn.Dense(32)(x))), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "_overwrite_with_gradient": 0}
        scan = nn.scan(nn.remat(Block), axes, split_rngs={"params": True}, length=2)
        x, _ = scan(name="blocks")(x, None)
        shared = nn.Dense(32, name="shared")
        return nn.Dense(32, name="last")(shared(nn.relu(shared(x))))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_layers_in_scans_and_layers_that_run_twice_reset_their_states(microbatches):
    @jax.jit
    def step_fn(recipe, state, x):
        loss_fn = loss_of(recipe.wrap(Scanned()))
        return state_step(loss_fn, microbatches=microbatches)(state, x)

    phases = [{"from_step": 1, "matmul": "default"}, {"from_step": 2, "matmul": "fp8"}]
    recipe = FP8.replace(phases=phases)
    variables = jax.jit(recipe.phase(0).wrap(Scanned()).init)(jax.random.key(1), X)
    state, amaxes = new_state(variables, recipe, optax.sgd(1e-2)), []
    for step in range(3):
        state, _ = step_fn(recipe.phase(step), state, X)
        states = state.params["_overwrite_with_gradient"]
        layers = states["blocks"]["Dense_0"], states["shared"]
        newest = [layer["fp8_input_amax_history"][..., 0] for layer in layers]
        amaxes.append(np.hstack([np.atleast_1d(each) for each in newest]))
    assert (amaxes[0] > 0).all() and (amaxes[1] == 0).all() and (amaxes[2] > 0).all()


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.body, self.head = (nnx.Linear(32, 32, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        return self.head(nnx.relu(self.body(x)))


def test_nnx_models_switch_with_one_optimizer():
    traces = []

    @nnx.jit
    def step_fn(recipe, model, optimizer, x):
        traces.append(recipe.name)
        loss_fn = lambda model: jnp.mean((model(x) - x) ** 2)
        return nnx_step(loss_fn)(recipe.wrap(model), optimizer)

    model = RECIPE.phase(0).wrap(NNXNet(nnx.Rngs(0)))
    optimizer = jaxmp.nnx.Optimizer(model, RECIPE.optimizer(optax.adam(1e-2)))
    ages = []
    for step in range(6):
        step_fn(RECIPE.phase(step), model, optimizer, X)
        ages.append(
            float(nnx.state(model, jaxmp.nnx.OverwriteWithGradient)["body"]["fp8_age"][...])
        )
    assert ages == [1, 1, 0, 0, 1, 1] and traces == ["mine@0", "mine@2", "mine@4"]


# ---------------------------------------------------------------------------
# Tools
# ---------------------------------------------------------------------------

DATA = np.random.default_rng(0).normal(size=(21, 16, 32)).astype(np.float32)
MODEL = {
    "loss_fn": lambda model, x: jnp.mean((model(x) - jnp.flip(x, -1)) ** 2),
    "batches": DATA[:20],
    "optimizer": optax.adam(1e-2),
    "held_out": DATA[20:],
    "progress": False,
}
CURRENT = FP8.replace(policies="p=f32,c=bf16,o=f32,matmul=fp8", fp8="current")


@pytest.mark.parametrize(("failing", "recipe"), [("mine@0", CURRENT), ("mine@10", FP8)])
def test_validate_names_the_phase_that_fails(failing, recipe):
    phases = [{"from_step": 10, "matmul": "default"}]
    if failing == "mine@10":
        recipe = jaxmp.load_recipe("bf16").replace(policies="p=f32,c=bf16,o=f32")
        phases = [{"from_step": 10, "matmul": "fp8"}]
    budget = jaxmp.Budget(loss=0.2, gradient=0.02, loss_error=1.0)
    report = jaxmp.validate(
        Net(), {"mine": recipe.replace(phases=phases)}, steps=20, seeds=2, budgets=budget, **MODEL
    )
    verdicts = {each.name: each.verdict for each in report["mine"].phases}
    assert list(verdicts) == ["mine@0", "mine@10"]
    assert [name for name, verdict in verdicts.items() if verdict == "fail"] == [failing]
    assert not report.ok and f"in the phase {failing}" in str(report).splitlines()[0]
    assert {0, 10, 19} <= set(report.compare_steps) and 10 in report.eval_steps
    assert jaxmp.typing.ValidationReport.from_json(report.to_json()) == report


def linen_losses(seed):
    params = {**make_variables(seed), "params": Net().init(jax.random.key(seed), X)["params"]}
    state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=optimizer_of(RECIPE))
    return run(state, 0, 6, batch=lambda step: DATA[step])[1]


def nnx_losses(seed):
    @nnx.jit
    def step_fn(recipe, model, optimizer, x):
        return nnx_step(MODEL["loss_fn"])(recipe.wrap(model), optimizer, x)

    model = RECIPE.phase(0).wrap(NNXNet(nnx.Rngs(seed)))
    optimizer = jaxmp.nnx.Optimizer(model, optimizer_of(RECIPE))
    return [float(step_fn(RECIPE.phase(n), model, optimizer, DATA[n])) for n in range(6)]


FIGURES = ["gradient_error", "loss_error", "skipped_steps"]


@pytest.mark.parametrize(
    ("model", "losses_of"),
    [(Net(), linen_losses), (lambda seed: NNXNet(nnx.Rngs(seed)), nnx_losses)],
    ids=["linen", "nnx"],
)
@fast_cases("linen")
def test_validate_trains_the_phases_as_a_loop_does(model, losses_of):
    options = MODEL | {"steps": 6, "seeds": [3, 4], "eval_every": 6, "compare_steps": [0]}
    report = jaxmp.validate(model, {"mine": RECIPE}, reference_recipe="bf16", **options)
    assert [list(run.losses) for run in report.runs[2:]] == [losses_of(3), losses_of(4)]
    assert [check.name for check in report["mine"].checks[2:]] == FIGURES
    # A resumed validation trains the compared reference alone.
    again = jaxmp.validate(
        model, {"mine": RECIPE}, reference_recipe="bf16", resume=report, **options
    )
    assert again.candidates == report.candidates and again.runs[1:] == report.runs[1:]


def test_validate_refuses_phases_that_it_cannot_train():
    with pytest.raises(ValidationError, match=r"phase from step 4.*steps=5 or more") as error:
        jaxmp.validate(Net(), {"mine": RECIPE}, steps=4, **MODEL)
    names = {"recipe": RECIPE}
    exec(str(error.value).splitlines()[-1].strip(), names)
    assert [phase.from_step for phase in names["recipe"].phases] == [2, 3]
    other = lambda recipe, seed: jaxmp.TrainingRun(
        state={"params": {"w": jnp.zeros(2 + (recipe.name == "mine@2"))}},
        step=lambda state, x: (state, jnp.sum(x)),
        batches=DATA,
        evaluate=lambda state: jnp.sum(state["params"]["w"]),
    )
    with pytest.raises(ValidationError, match=r"(?s)mine@2.*another state.*one train state"):
        jaxmp.validate(other, {"mine": RECIPE}, reference_recipe="bf16", steps=6)


def test_the_audit_reads_each_phase():
    recipe = FP8.replace(
        phases=[{"from_step": 2, "rules": [jaxmp.Rule("body", "c=f32")]}], name="mine"
    )
    report = jaxmp.audit(train_step, recipe, make_state(recipe), X, recipe=recipe)
    assert report.recipe == "mine" and report.function == "train_step"
    dtypes = {row.module: row.lhs for row in report.matmuls if row.phase == "forward"}
    assert dtypes == {
        "mine@0/body": "float8_e4m3fn",
        "mine@0/head": "bfloat16",
        "mine@2/body": "float32",
        "mine@2/head": "bfloat16",
    }
    # A step that never switches has FP32 matmuls where the first phase has FP8.
    stuck = lambda recipe, state, x: train_step(recipe.phase(2), state, x)
    report = jaxmp.audit(stuck, recipe, make_state(recipe), X, recipe=recipe)
    assert {finding.module for finding in report.errors} == {"mine@0/body"}
    assert "mine@0/body" in str(report)


def test_a_plan_has_a_row_for_each_phase():
    def make_step(recipe):
        dtype = recipe.policies.default.compute_dtype
        return lambda w: jax.grad(lambda w: jnp.sum((w @ w).astype(dtype)))(w), jnp.ones((8, 8))

    phases = [{"from_step": 2, "compute_dtype": "f32"}]
    recipe = jaxmp.load_recipe("fp16").replace(phases=phases, name="mine")
    report = jaxmp.plan(make_step, recipes=[recipe], targets=["v100"], progress=False)
    assert [row.recipe for row in report.rows] == ["mine@0", "mine@2"]
    assert " --recipes mine --reference-recipe fp32" in report.choices[0].check
    last = jaxmp.plan(make_step, recipes=[recipe.phase(2)], targets=["v100"], progress=False)
    assert [row.recipe for row in last.rows] == ["mine@2"]


STEP = """
import jax, jax.numpy as jnp, optax, jaxmp, flax.linen as nn

def make_step(recipe):
    net, x = nn.Dense(16), jnp.ones((8, 16))
    state = jaxmp.TrainState.create(
        apply_fn=None, params=recipe.wrap(net).init(jax.random.key(0), x),
        tx=recipe.optimizer(optax.sgd(0.1)),
    )
    def train_step(state, x):
        loss_fn = lambda params, x: jnp.mean((recipe.wrap(net).apply(params, x) - x) ** 2)
        loss, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads=grads), loss
    return train_step, state, x
"""


@pytest.mark.parametrize("name", ["audit", "memory"])
def test_commands_read_each_phase(write, command, name):
    step, recipe = write(STEP, "step.py"), write(RECIPE.to_toml(), "mine.toml")
    code, _, error = command(name, f"{step}:make_step", "--recipe", recipe, "--json", "out.json")
    assert code == 0, error
    text = Path("out.json").read_text(encoding="utf-8")
    assert name == "memory" or all(f"mine@{n}/" in text for n in (0, 2, 4))
