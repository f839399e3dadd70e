"""`jaxmp audit --script`: scripts in several styles are audited without edits."""

import re
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
import script_audits
from grids import EXPENSIVE, fast_cases
from jaxmp._core._compat import _watch_jit
from jaxmp._tools import cli
from jaxmp._tools.audit import _jitted
from jaxmp._tools.audit._jitted import defined_steps, has_backward, updates_state
from jaxmp._tools.audit._report import AuditReport
from jaxmp._tools.cli import _script
from jaxmp._tools.plan import _programs
from jaxmp.errors import AuditError, RecipeWarning
from sources import results_of, text_of

# Common part of most scripts: two weights, and 5 matmuls of 2 * 8 * 16 * 16 FLOPs with the backward
# pass.
MEASURED = "script_audits_jax_0.10.2_cpu"
MODEL = """
import jax, jax.numpy as jnp, numpy as np, optax
def loss_fn(params, x):
    return jnp.square(x @ params["a"] @ params["b"]).mean()
def first():
    return {"a": jnp.ones((16, 16)), "b": jnp.ones((16, 16))}
tx = optax.sgd(0.1)
def train_step(params, opt_state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss
x = np.ones((8, 16), np.float32)
"""
MATMUL = 2 * 8 * 16 * 16
AFTER = 'open("too_late.txt", "w").close()\n'

JIT = """
import functools, sys
assert sys.argv == ["train.py", "--config=a.py", "--lr", "3"] and __name__ == "__main__"
import helper  # beside the script
@functools.partial(jax.jit, static_argnames="scale", donate_argnums=0)
def scaled_step(params, opt_state, x, *, scale):
    return train_step(params, opt_state, x * scale)
evaluate = jax.jit(loss_fn)
params, opt_state = first(), tx.init(first())
try:
    for step in range(3):
        evaluate(params, x)
        params, opt_state, loss = scaled_step(params, opt_state, x, scale=2.0)
        open("too_late.txt", "w").close()
except BaseException:
    open("too_late.txt", "w").close()
finally:
    open("too_late.txt", "w").close()
"""

NNX = """
import optax  # which imports JAX
from flax import nnx
import jax, jax.numpy as jnp, numpy as np
class Model(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.b = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
    def __call__(self, x):
        return self.b(self.a(x))
model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3, mu_dtype=jnp.float16), wrt=nnx.Param)
metrics = nnx.metrics.Average("loss")
@nnx.jit
def train_step(model, optimizer, metrics, x):
    loss, grads = nnx.value_and_grad(lambda model, x: jnp.square(model(x)).mean())(model, x)
    metrics.update(loss=loss)
    optimizer.update(model, grads)
for _ in range(3):
    train_step(model, optimizer, metrics, np.ones((8, 16), np.float32))
    open("too_late.txt", "w").close()
"""

PMAP = """
from jax import pmap
def step(params, opt_state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    grads = jax.lax.pmean(grads, "batch")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
tx = optax.adam(1e-3, mu_dtype="float16")
p_step = pmap(step, axis_name="batch", donate_argnums=0)
copy = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * jax.local_device_count()), tree)
params, opt_state = copy(first()), copy(tx.init(first()))
while True:
    params, opt_state = p_step(params, opt_state, copy(x))
    open("too_late.txt", "w").close()
"""

ABSL = """
from absl import app, flags
flags.DEFINE_string("name", None, "a required flag")
flags.mark_flags_as_required(["name"])
def main(argv):
    assert flags.FLAGS.name == "run" and len(argv) == 1
    step = jax.jit(train_step)
    step(first(), tx.init(first()), x)
    open("too_late.txt", "w").close()
if __name__ == "__main__":
    app.run(main)
"""

AHEAD_OF_TIME = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
assert parser.parse_args().steps == 3
shapes = jax.eval_shape(lambda: (first(), tx.init(first())))
jax.jit(train_step).lower(*shapes, jax.ShapeDtypeStruct((8, 16), jnp.float32)).compile()
open("too_late.txt", "w").close()
"""

EQUINOX = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
model = eqx.nn.MLP(16, 16, 16, 1, use_bias=False, use_final_bias=False, key=jax.random.key(0))
tx = optax.sgd(0.1)
opt_state = tx.init(eqx.filter(model, eqx.is_array))
@eqx.filter_jit
def train_step(model, opt_state, x):
    loss = lambda model, x: jnp.square(jax.vmap(model)(x)).mean()
    value, grads = eqx.filter_value_and_grad(loss)(model, x)
    updates, opt_state = tx.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, value
for _ in range(3):
    model, opt_state, loss = train_step(model, opt_state, np.ones((8, 16), np.float32))
    open("too_late.txt", "w").close()
"""

SHARD_MAP = """
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
step = jax.shard_map(train_step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(),
                     check_vma=False)
jax.jit(step)(first(), tx.init(first()), np.ones((8 * jax.device_count(), 16), np.float32))
open("too_late.txt", "w").close()
"""

THREAD = """
import threading
def train():
    jax.jit(train_step)(first(), tx.init(first()), x)
    open("too_late.txt", "w").close()
thread = threading.Thread(target=train)
thread.start()
threading.Event().wait()
"""

STYLES = {
    "jit": (MODEL + JIT, ["--config=a.py", "--lr", "3"], "scaled_step"),
    "nnx": (NNX, [], "train_step"),
    "pmap": (MODEL + PMAP, [], "step"),
    "absl": (MODEL + ABSL, ["--name", "run"], "train_step"),
    "ahead_of_time": (MODEL + AHEAD_OF_TIME, ["--steps=3"], "train_step"),
    "equinox": (EQUINOX, [], "train_step (train.py:6)"),
    "shard_map": (MODEL + SHARD_MAP, [], "train_step"),
    "thread": (MODEL + THREAD, [], "train_step"),
}

# Gradients and updates of two players are compiled separately.
TWO_PLAYERS = """
gradients = jax.jit(jax.grad(loss_fn))
@jax.jit
def apply(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
@jax.jit
def generator_step(params, x):
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss_fn)(params, x @ x.T @ x))
params, other = first(), first()
for step in range(3):
    params = apply(params, gradients(params, x))
    other = generator_step(other, x)
    if step:
        open("too_late.txt", "w").close()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Changes to an empty directory with a module for scripts to import, with one CPU device."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "helper.py").touch()
    return tmp_path


@pytest.fixture
def run(folder, capfd):
    """Runs `jaxmp audit --script train.py`; returns (exit status, output, error output)."""

    def run(text, *arguments):
        (folder / "train.py").write_text(textwrap.dedent(text))
        with pytest.raises(SystemExit) as stop:
            cli.main(["audit", "--script", "train.py", *arguments])
        return stop.value.code, *capfd.readouterr()

    return run


SLOW_STYLES = ("absl", "ahead_of_time", "thread")


@pytest.mark.parametrize(
    "style",
    [pytest.param(style, marks=[pytest.mark.slow] * (style in SLOW_STYLES)) for style in STYLES],
)
@fast_cases("jit")
def test_a_script_is_audited_without_an_edit(run, folder, style):
    text, arguments, name = STYLES[style]
    status, out, error = run(
        text, *arguments, "--recipe", "bf16", "--json", "a.json", "--fail-on", "none"
    )
    assert status == 0, error
    assert out.startswith(f"Function {name}") and "(train.py:" in out
    report = jaxmp.typing.AuditReport.from_json((folder / "a.json").read_text())
    # Two of the matmuls of a linear network are its forward pass, and three its gradient.
    devices = 2 if style in ("pmap", "shard_map") else 1
    assert report.flops == 5 * MATMUL * devices
    errors = {finding.check for finding in report.errors}
    assert "fp32_matmul" in errors
    # Optimizer states are seen through the wrappers that flatten them.
    assert ("optimizer_state_16bit" in errors) == (style in ("nnx", "pmap"))
    assert {finding.location.partition(":")[0] for finding in report.errors} <= {"train.py", ""}
    # The script does not continue after its train step.
    assert not (folder / "too_late.txt").exists()


ASKING_FINDER = """
import sys
class Finder:
    def find_spec(self, name, path, target=None):
        found = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
        return next((spec for spec in found if spec), None)
sys.meta_path.insert(0, Finder())
"""


def test_labels_in_int64_do_not_warn(run):
    step = """
        import warnings, jax, jax.numpy as jnp, numpy as np
        warnings.simplefilter("always")
        loss_fn = lambda w, x, y: -jax.nn.log_softmax(x @ w)[jnp.arange(4), y].mean()
        jax.jit(jax.grad(loss_fn))(jnp.ones((8, 8)), np.ones((4, 8)), np.arange(4))
    """
    status, out, error = run(step)
    assert (status, error) == (0, "") and "Precision audit" in out


@EXPENSIVE
def test_finders_that_ask_the_others_do_not_ask_for_ever(run):
    status, out, error = run(ASKING_FINDER + MODEL + "jax.jit(loss_fn)(first(), x)")
    assert status == 0 and "Function loss_fn" in out, error


@EXPENSIVE
def test_gradients_that_are_compiled_apart_are_audited(run, folder):
    """By default, the train steps are audited together; `--function` names one of them."""
    _, out, _ = run(MODEL + TWO_PLAYERS, "--fail-on", "none")
    assert re.match(r"Functions generator_step \(train.py:\d+\), loss_fn \(.*\), apply \(", out)
    _, out, _ = run(MODEL + TWO_PLAYERS, "--function", "loss_fn", "--fail-on", "none")
    assert out.startswith("Function loss_fn (train.py:")
    assert not (folder / "too_late.txt").exists()
    status, _, error = run(MODEL + TWO_PLAYERS, "--function", "train_stap")
    assert status == 2 and "compiled no function 'train_stap'. It compiled gen" in error


@EXPENSIVE
def test_a_module_runs_as_after_python_m(run, folder):
    (folder / "package").mkdir()
    (folder / "package/__init__.py").touch()
    (folder / "package/train.py").write_text(
        "from . import __name__ as package\nassert package == 'package'\n" + MODEL + ABSL
    )
    status, _, error = run("")  # a script without JAX
    assert status == 2 and "Error: train.py ended, and did not import JAX." in error
    with pytest.raises(SystemExit) as stop:
        cli.main(["audit", "--script", "-m", "package.train", "--name=run", "--fail-on=none"])
    assert stop.value.code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import jax\nraise KeyError('gone')", "the script raised KeyError before its train step"),
        ("import os\nos.kill(os.getpid(), 9)", "train.py ended (status -9) before its train step"),
        ("from . import x", "(run a module of a package with --script -m train)"),
        pytest.param(
            "import jax, sys\nsys.exit('no data')",
            "the script exited with status 1 (no data) before its train step",
            marks=EXPENSIVE,
        ),
        pytest.param(
            "import jax\nprint(jax.numpy.ones(3) + 1)",
            "compiled no function with matmuls",
            marks=EXPENSIVE,
        ),
    ],
)
def test_a_script_without_a_train_step(run, text, message):
    status, out, error = run(text)
    assert status == 2 and out == "" and message in error


def test_the_traceback_of_a_script_has_the_frames_of_python(run):
    text = """
        import jax

        @jax.jit
        def step(x):
            raise KeyError("gone")

        step(1.0)
    """
    _, _, error = run(text)
    assert re.findall(r'File "(.+)", line (\d+)', error) == [("train.py", "8"), ("train.py", "6")]


@pytest.mark.slow  # The test waits for the script, most of the time without work.
def test_a_script_that_takes_too_long_is_audited_as_far_as_it_came(run):
    text = MODEL + "jax.jit(loss_fn)(first(), x)\nimport time\ntime.sleep(600)"
    status, out, _ = run(text, "--max-seconds", "20")
    assert status == 0 and "Function loss_fn" in out
    status, _, error = run("import jax\nimport time\ntime.sleep(600)", "--max-seconds", "5")
    assert status == 2 and "no function with matmuls within 5 seconds (--max-seconds)" in error


@EXPENSIVE
def test_a_script_without_gradients_prints_and_reads_options_behind_a_double_dash(run):
    text = (
        MODEL + "import sys\nassert sys.argv[1:] == ['--target', 'x', '--help']\nprint('hello')\n"
    )
    text += "jax.jit(loss_fn)(first(), x)"
    status, out, error = run(text, "--", "--target", "x", "--help")
    assert status == 0 and out.startswith("Function loss_fn (train.py:3), which takes no gradients")
    assert "hello" in error and "hello" not in out


# ---------------------------------------------------------------------------
# Scripts of other projects
# ---------------------------------------------------------------------------


@EXPENSIVE
def test_the_benchmark_runs_a_script_with_stand_ins(folder):
    text = "import tensorflow as tf, tensorflow_datasets as tfds\ntf.random.set_seed(0)\n"
    text += MODEL + "batches = tfds.load('mnist', split='train').map(None).batch(8)\n"
    text += "batch = next(batches.as_numpy_iterator())['image'].reshape(8, -1)[:, :16]\n"
    text += "jax.jit(train_step)(first(), tx.init(first()), batch)\n"
    (folder / "own").mkdir()
    (folder / "own/main.py").write_text(text)
    row = script_audits.audit(script_audits.Script("own", ["main.py"], "bf16"), folder, None)
    assert row["function"].startswith("train_step (main.py:"), row
    assert row["flops"] == 5 * MATMUL and row["errors"] == {"fp32_matmul": 5}


def test_the_page_shows_a_script_as_measured():
    measured = results_of(MEASURED)["scripts"]
    assert set(measured) == set(script_audits.SCRIPTS)
    page = text_of("docs/audit.md", "docs/measurements.md")
    lm1b = measured["lm1b"]
    assert f"{MEASURED}.json" in page and f"Function {lm1b['function']}" in page
    assert f"audit: {len(lm1b['errors'])} errors" in page
    share, flops = f"{lm1b['low_precision_share']:.1%}", f"{lm1b['flops'] / 1e9:.0f} GFLOP"
    assert f"{share} of the matmul FLOPs ({flops})" in page


# ---------------------------------------------------------------------------
# Selection of the train step
# ---------------------------------------------------------------------------

PARAMS = {"a": jnp.ones((4, 4)), "b": jnp.ones((4,))}


def decayed_loss(params, x):
    penalty = sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(params))
    return (jnp.square(x @ params["a"]).mean() + 0.1 * penalty) + params["b"].sum()


def step_with(tx):
    def step(params, opt_state, x):
        updates, opt_state = tx.update(jax.grad(decayed_loss)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step, (PARAMS, tx.init(PARAMS), jnp.ones((2, 4)))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda fn: fn])
def test_a_step_returns_updated_parameters(wrap):
    for tx in (optax.sgd(0.1), optax.MultiSteps(optax.sgd(0.1), 2)):
        step, args = step_with(tx)
        with jax.numpy_dtype_promotion("standard"):  # optax.MultiSteps
            jaxpr = jax.make_jaxpr(wrap(step))(*args)
        assert has_backward(jaxpr) and updates_state(jaxpr)


def test_a_loop_of_steps_is_a_step():
    def loop(params, x):
        tx = optax.sgd(0.1)

        def body(params, x):
            updates, _ = tx.update(jax.grad(decayed_loss)(params, x), tx.init(params))
            return optax.apply_updates(params, updates), ()

        return jax.lax.scan(body, params, x)[0]

    assert updates_state(jax.make_jaxpr(loop)(PARAMS, jnp.ones((3, 2, 4))))


@pytest.mark.parametrize(
    "fn",
    [
        jax.grad(decayed_loss),
        jax.value_and_grad(decayed_loss),
        decayed_loss,
        lambda params, x: (jax.grad(decayed_loss)(params, x), params),
    ],
)
def test_gradients_are_no_step(fn):
    assert not updates_state(jax.make_jaxpr(fn)(PARAMS, jnp.ones((2, 4))))


def test_watching_sees_calls_of_untraced_code_and_leaves_jax_as_it_was():
    calls = []
    before = jax.pmap

    def see(call):
        calls.append(call)
        return call.name == "skipped"

    def skipped(x):
        return x + 1

    def inner(x):
        return x * 2

    with _watch_jit.watch_jit(see):
        assert float(jax.jit(skipped)(3.0)) == 0
        assert float(jax.jit(lambda x: jax.jit(inner)(x) + 1)(3.0)) == 7
    names = [call.name for call in calls]
    assert "skipped" in names and "inner" not in names
    assert jax.pmap is before
    assert float(jax.jit(inner)(3.0)) == 6


# Steps whose findings depend on the line that called an operation, or on the values of arguments.
BOTH_FORMS = {
    "softmax": "fn = lambda h: jax.nn.softmax(h) @ jax.nn.softmax(h).T",
    "log_softmax": "fn = lambda h: jax.nn.log_softmax(h, axis=-1)",
    "logsumexp": "fn = lambda h: jax.nn.logsumexp(h, axis=-1)",
    "variance": "fn = lambda h: jnp.var(h, axis=-1) + jnp.std(h, axis=0)[:8]",
    "mean": "fn = lambda h: jnp.mean(h, axis=0) * jnp.linalg.norm(h, axis=0)",
    "functions": "fn = lambda h: jnp.exp(h) + jnp.log(jax.nn.sigmoid(h)) + jnp.cumsum(h, axis=0)",
    "promotion": "fn = lambda h: (h * jnp.full((1, 16), 0.5)) @ h.astype(jnp.float32).T",
    "layer_norm": """
from flax import linen as nn
layer = nn.LayerNorm(dtype=jnp.bfloat16)
fn = lambda h: layer.apply({"params": {"scale": jnp.ones(16), "bias": jnp.ones(16)}}, h)
""",
    "attention": """
mask = jnp.tril(jnp.ones((8, 8), bool))
fn = lambda h: jax.nn.softmax(jnp.where(mask, h @ h.T, -1e9), axis=-1) @ h
""",
    "jitted": "fn = jax.jit(lambda h: jax.checkpoint(jax.nn.softmax)(h) @ h.T)",
    "scan": "fn = lambda h: jax.lax.scan(lambda c, r: (c + jax.nn.softmax(r), r), h[0], h)[0]",
}
FORMS = """
import jax, jax.numpy as jnp, optax
{fn}
def loss_fn(w, x):
    return fn(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32).sum()
tx = optax.adam(1e-3)
@jax.jit
def step(w, opt_state, x, rate):
    updates, opt_state = tx.update(jax.grad(loss_fn)(w, x), opt_state, w)
    return w + rate * updates, opt_state
w, x = jnp.ones((16, 16)), jnp.ones((8, 16))
arguments = w, tx.init(w), x, 0.5
"""


class FinishedError(Exception):
    """Ends a watched script in this process, with its result."""


@pytest.fixture
def watch(monkeypatch):
    """Returns a function that runs a script in this process, and returns the result of a tool."""

    def finish(self):
        self.watching.__exit__(None, None, None)
        raise FinishedError(self.result())

    def watch(tool, code, **settings):
        # Other tests have left jitted steps in this process.
        own = f"({code.co_filename.rpartition('/')[2]}:"
        mine = lambda: {c: text for c, text in defined_steps().items() if own in text}
        monkeypatch.setattr(_jitted, "defined_steps", mine)
        monkeypatch.setattr(jaxmp, "load_recipe", jaxmp.load_recipe)
        watcher = _script.Watcher(tool=tool, settings=settings)
        # Scripts and optax expect this promotion.
        with jax.numpy_dtype_promotion("standard"), pytest.raises(FinishedError) as finished:
            exec(code, {})
            watcher.finish()
        return finished.value.args[0]

    monkeypatch.setattr(_script.Watcher, "finish", finish)
    monkeypatch.setattr(threading.Timer, "start", lambda self: None)
    return watch


@pytest.mark.parametrize("name", BOTH_FORMS)
def test_a_script_and_its_step_have_the_same_findings(name, tmp_path, watch):
    file, scope = str(tmp_path / f"{name}.py"), {}
    text = FORMS.format(fn=BOTH_FORMS[name])
    # Functions of JAX keep the lines of their first call.
    jax.clear_caches()
    result = watch("audit", compile(f"{text}step(*arguments)", file, "exec"), **BF16)
    jax.clear_caches()
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(text, file, "exec"), scope)
        report = jaxmp.audit(scope["step"], *scope["arguments"], recipe="bf16")
    script = AuditReport.from_json(result["report"])
    assert script.findings == report.findings
    # Flax's layer computes its statistics in FP32.
    assert bool(report.findings) == (name != "layer_norm")
    assert script.to_json() == report.to_json()


# An actor that is updated after several updates of the critic, and an average of the critic.
ACTOR = """
import functools, jax, jax.numpy as jnp
def loss(w, x):
    return jnp.square(x @ w).mean()
@functools.partial(jax.jit, donate_argnums=0)
def critic_step(w, x):
    return w - jax.grad(loss)(w, x)
@jax.jit
def actor_step(w, x):
    return w - jax.grad(loss)(w, x)
@jax.jit
def average(mean, w):
    return mean + jnp.bfloat16(0.1) * (w.astype(jnp.bfloat16) - mean)
critic, actor, x = jnp.ones((4, 4)), jnp.ones((4, 4)), jnp.ones((4, 4))
mean = critic.astype(jnp.bfloat16)
for n in range(30):
    critic = critic_step(critic, x)
    mean = average(mean, critic)
    if n % 3 == 2:
        actor = actor_step(actor, jnp.tile(x, (9, 1)))
"""
UNUSED = """
def update(w):
    return w - jax.grad(loss)(w, w)
@jax.jit
def unused_step(w):
    return update(w)
"""
BF16 = {"recipe": "bf16", "target": None}


@pytest.mark.parametrize("unused", ["", UNUSED])
def test_every_step_that_is_called_is_audited_and_others_are_named(watch, unused):
    text = ACTOR.replace("critic, actor", f"{unused}critic, actor")
    result = watch("audit", compile(text, "actor.py" if unused else "actors.py", "exec"), **BF16)
    sentence, report = result["sentence"], AuditReport.from_json(result["report"])
    assert set(report.function.split(", ")) == {"critic_step", "actor_step", "average"}
    assert ("not reached: unused_step (actor.py:17)" in sentence) == bool(unused)
    assert report.flops == 10 * 2 * 2 * 4**3


def test_the_memory_of_a_script_is_that_of_its_largest_step(watch):
    result = watch("memory", compile(ACTOR, "memory.py", "exec"), target="v100")
    estimate = jaxmp.typing.MemoryEstimate.from_json(result["report"])
    assert estimate.function == "actor_step" and estimate.fits


DEFINED = """
import functools, equinox as eqx, jax, jax.numpy as jnp
loss = lambda w, x: jnp.square(x @ w).sum()
class Step(eqx.Module):
    def __call__(self, w, x):
        return w - jax.grad(loss)(w, x)
    def update(self, w, x):
        return w - jax.grad(loss)(w, x)
def scaled_step(rate, w, x):
    return w - rate * jax.grad(loss)(w, x)
x = jnp.ones((1, 4, 4))
jax.eval_shape(jax.grad(loss), x[0], x[0])
"""
# Expression that makes a step -> the name and the line of the user's function.
DEFINED_BY = {
    "jax.jit(Step())": "Step (step.py:5)",
    "eqx.filter_jit(Step())": "Step (step.py:5)",
    "eqx.filter_jit(Step().update)": "update (step.py:7)",
    "eqx.filter_jit(functools.partial(scaled_step, 0.1))": "scaled_step (step.py:9)",
    "eqx.filter_pmap(Step().update)": "update (step.py:7)",
}


@pytest.mark.parametrize("step", DEFINED_BY)
def test_a_step_has_the_name_and_line_of_the_function_of_the_user(watch, step):
    x = "x, x" if "pmap" in step else "x[0], x[0]"
    result = watch("memory", compile(f"{DEFINED}({step})({x})", "step.py", "exec"), target=None)
    assert result["sentence"].startswith(f"Function {DEFINED_BY[step]}")
    estimate = jaxmp.typing.MemoryEstimate.from_json(result["report"])
    assert estimate.function == DEFINED_BY[step].partition(" ")[0]


def test_a_script_runs_until_its_step_has_failed(watch):
    text = ACTOR.replace("critic_step(critic, x)", "critic_step(critic, x / (n != 4))")
    result = watch("locate", compile(text, "locate.py", "exec"))
    report = jaxmp.typing.NonfiniteReport.from_json(result["report"])
    assert report.reproduced and report.argument == "x", result


def test_a_state_that_no_step_has_written_comes_from_its_initialization(watch):
    text = "import jax, jax.numpy as jnp\nstep = jax.jit(jax.grad(lambda w: (w @ w).sum()))\n"
    text += "step(jnp.ones((2, 2)) / 0)"
    result = watch("locate", compile(text, "first.py", "exec"))
    report = jaxmp.typing.NonfiniteReport.from_json(result["report"])
    assert report.message.startswith("Before the first step, elements of the parameter w")
    line = report.fix.rpartition("\n")[2].strip()
    with pytest.raises(FloatingPointError):
        exec(f"import jax\n{line}\n{text}")
    jax.config.update("jax_debug_infs", False)


PLANNED = """
import jax, jax.numpy as jnp, jaxmp
autocast = jaxmp.autocast(lambda w, x: x @ w, jaxmp.load_recipe(jaxmp.load_recipe("bf16")))
step = jax.jit(lambda w, x: w - jax.grad(lambda w: autocast(w, x).sum())(w))
step(jnp.ones((4, 4)), jnp.ones((4, 4)))
"""


def test_a_plan_replaces_the_recipe_of_a_script(watch, monkeypatch):
    settings = {"recipe": "fp16", "targets": ["v100"], "cache": None, "hosts": None, "links": {}}
    with pytest.warns(RecipeWarning, match="without a loss scale"):
        result = watch("plan", compile(PLANNED, "plan.py", "exec"), **settings)
    (row,) = jaxmp.typing.PlanReport.from_json(result["report"]).rows
    assert (row.recipe, row.fits, row.lacking, row.bound) == ("fp16", True, "", None)
    assert "without a loss scale" in row.warning
    monkeypatch.setattr(_programs.Candidate, "_estimated", lambda *made: {"warning": "no casts"})
    plan = watch("plan", compile(PLANNED, "plan.py", "exec"), **settings | {"recipe": "bf16"})
    assert "no casts" in plan["report"]
    other = PLANNED.replace('jaxmp.load_recipe(jaxmp.load_recipe("bf16"))', '"bf16"')
    with pytest.raises(
        AuditError, match=r"does not call jaxmp\.load_recipe, [^:]*:\n    def make_step"
    ):
        watch("plan", compile(other, "other.py", "exec"), **settings)
