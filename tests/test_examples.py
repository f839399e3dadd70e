"""What people copy runs: the examples, the benchmark's rehearsal, the code in the documents."""

import dataclasses
import functools
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import typer
from flax.training.train_state import TrainState
from matplotlib.image import imread

import byte_gpt
import demo
import gpu_smoke
import jaxmp
import train_lm

ROOT = Path(__file__).parents[1]
TINY = dict(steps=6, seq_len=16, batch_size=4, layers=1, width=32, eval_every=3, eval_batches=2)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Examples hold optax without wrappers: Adam's bias correction takes `float ** int32`, and its
    schedules and `clip_by_global_norm` mix a strong float32 with other types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def tiny_run(recipe: str) -> train_lm.Run:
    return train_lm.train(recipe, **TINY)


def assert_same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# ---------------------------------------------------------------------------
# Text and model
# ---------------------------------------------------------------------------


def test_text_is_real_and_split_by_file():
    text = byte_gpt.standard_library_text()
    assert len(text.train) > 5_000_000
    assert 0.05 < len(text.held_out) / len(text.train) < 0.3
    # By the hashes of their names, json/decoder.py is to train on and json/encoder.py held out.
    for side, other, line in (
        (text.train, text.held_out, b"\nclass JSONDecoder("),
        (text.held_out, text.train, b"\nclass JSONEncoder("),
    ):
        assert line in side.tobytes()
        assert line not in other.tobytes()


def test_batches_depend_on_seed_and_step_alone():
    text = np.arange(256, dtype=np.uint8)
    batch = byte_gpt.random_batch(text, 3, 8, seed=1, step=5)
    assert batch.shape == (3, 9)
    assert batch.dtype == np.int32
    np.testing.assert_array_equal(batch, byte_gpt.random_batch(text, 3, 8, seed=1, step=5))
    assert (np.diff(batch, axis=1) == 1).all()
    for seed, step in ((2, 5), (1, 6)):
        assert (batch != byte_gpt.random_batch(text, 3, 8, seed=seed, step=step)).any()


def test_held_out_windows_reach_from_end_to_end():
    batches = byte_gpt.even_batches(np.arange(100, dtype=np.uint8), 2, 3, 8)
    assert batches.shape == (2, 3, 9)
    assert batches.min() == 0
    assert batches.max() == 99


def test_a_byte_is_predicted_from_those_before_it():
    model = byte_gpt.GPT(layers=2, width=32, heads=2, max_length=16)
    tokens = jax.random.randint(jax.random.key(0), (1, 16), 0, 256)
    changed = tokens.at[0, 9].add(1)
    params = jax.jit(model.init)(jax.random.key(1), tokens)
    before, after = (jax.jit(model.apply)(params, x) for x in (tokens, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(axis=-1).all()


# ---------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------


class Stopped(Exception):
    """Plays the machine that is taken away."""


def test_a_stopped_run_goes_on_exactly(tmp_path, monkeypatch):
    straight = tiny_run("fp16_params")
    batch = train_lm.random_batch

    def stop_at_step_5(text, batch_size, seq_len, seed, step):
        if step == 5:
            raise Stopped
        return batch(text, batch_size, seq_len, seed, step)

    monkeypatch.setattr(train_lm, "random_batch", stop_at_step_5)
    with pytest.raises(Stopped):
        train_lm.train("fp16_params", checkpoint_dir=tmp_path, **TINY)
    monkeypatch.setattr(train_lm, "random_batch", batch)
    resumed = train_lm.train("fp16_params", checkpoint_dir=tmp_path, **TINY)

    assert list(resumed.train_losses) == [4, 5, 6]
    assert resumed.train_losses.items() <= straight.train_losses.items()
    assert resumed.held_out_losses.items() <= straight.held_out_losses.items()
    assert_same_bits(resumed.state, straight.state)

    with pytest.raises(typer.BadParameter, match="written with another recipe"):
        train_lm.train("bf16", checkpoint_dir=tmp_path, **TINY)


def test_microbatches_train_alike():
    whole = tiny_run("fp32")
    parts = train_lm.train("fp32", microbatches=2, **TINY)
    # FP32 sums in another order: about 1e-6 of a loss of 5.5 after six steps.
    assert demo.final_loss(parts) == pytest.approx(demo.final_loss(whole), rel=1e-5)


def test_the_five_lines_hold_every_recipe():
    source = inspect.getsource(train_lm.prepare)
    for line in (
        "recipe = jaxmp.load_recipe(recipe)",
        "model = recipe.wrap(model)",
        "tx = recipe.optimizer(tx)",
        "state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)",
        "return state.apply_gradients(grads=grads), loss",
    ):
        assert line in source
    assert " if " not in source


@pytest.mark.parametrize("module", [train_lm, demo, gpu_smoke])
def test_commands_in_docstrings_name_options_that_exist(module):
    entry = train_lm.train if module is train_lm else module.main
    known = {name.replace("_", "-") for name in inspect.signature(entry).parameters} | {"help"}
    commands = re.findall(r"^    python (\S+)(.*)", module.__doc__, re.MULTILINE)
    assert commands
    for script, options in commands:
        assert (ROOT / script).is_file()
        assert set(re.findall(r"--([\w-]+)", options)) <= known


# ---------------------------------------------------------------------------
# Demo
# ---------------------------------------------------------------------------


def test_demo_prints_a_table_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "train", lambda recipe, **sizes: sizes == TINY and tiny_run(recipe))
    demo.main(out=tmp_path, **TINY)
    printed = capsys.readouterr().out
    cells = {line.split()[0]: line.split() for line in printed.splitlines() if "%" in line}
    assert list(cells) == list(demo.RECIPES)
    count = sum(leaf.size for leaf in jax.tree.leaves(tiny_parameters()))
    for name, bytes_each in {"fp32": (4, 0, 8), "bf16_params": (2, 4, 8)}.items():
        assert cells[name][-3:] == [f"{count * each:,}" for each in bytes_each]
    assert [file.name for file in tmp_path.iterdir()] == ["losses.png"]
    assert imread(tmp_path / "losses.png").shape[:2] == (690, 1650)


def tiny_parameters():
    model = byte_gpt.GPT(layers=TINY["layers"], width=TINY["width"], max_length=TINY["seq_len"])
    tokens = jnp.zeros((1, TINY["seq_len"]), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


@pytest.mark.parametrize("factor", [1.006, 0.994, float("nan")])
def test_demo_fails_outside_its_budget(factor, tmp_path, monkeypatch):
    run = tiny_run("fp32")

    def pretend(recipe, **_):
        last = demo.final_loss(run) * (factor if recipe == "fp16" else 1.0)
        return dataclasses.replace(run, held_out_losses={1: last})

    monkeypatch.setattr(demo, "train", pretend)
    with pytest.raises(typer.Exit):
        demo.main(out=tmp_path, **TINY)


# ---------------------------------------------------------------------------
# Benchmark
# ---------------------------------------------------------------------------


def run_gpu_smoke(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "benchmarks/gpu_smoke.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


def test_gpu_smoke_without_gpu_says_so():
    done = run_gpu_smoke()
    assert done.returncode == 1
    assert "JAX sees no NVIDIA GPU here, only cpu" in done.stderr
    assert "python benchmarks/gpu_smoke.py --toy" in done.stderr


def test_gpu_smoke_rehearses(tmp_path):
    out = tmp_path / "smoke.json"
    done = run_gpu_smoke("--toy", "--recipes", "fp16_params", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["command"].startswith("python benchmarks/gpu_smoke.py --toy")
    assert report["versions"]["jax"] == jax.__version__
    assert report["hardware"]["platform"] == "cpu"
    (result,) = report["results"]
    speed = result["tokens_per_second"]
    assert result["recipe"] == "fp16_params"
    assert result["steps"] == gpu_smoke.TOY.steps
    assert 0 < speed["min"] <= speed["median"] <= speed["max"]
    assert result["held_out_loss"] < np.log(256)
    assert f"{result['held_out_loss']:.4f}" in done.stdout


# ---------------------------------------------------------------------------
# Documents
# ---------------------------------------------------------------------------


def python_blocks(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def readme_names() -> dict:
    """What the README's excerpts take for granted: a model, its parameters, a loss and a batch."""
    model = nn.Dense(3)
    batch = {"x": jnp.ones((4, 2)), "label": jnp.zeros(4, jnp.int32)}
    names = dict(jax=jax, jaxmp=jaxmp, optax=optax, TrainState=TrainState, model=model, batch=batch)

    def loss_fn(params, batch):
        logits = names["model"].apply({"params": params}, batch["x"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    params = model.init(jax.random.key(0), batch["x"])["params"]
    return names | dict(loss_fn=loss_fn, params=params)


def test_readme_before_and_after_both_train():
    names = readme_names()
    before, after = python_blocks("README.md")
    for block in (before, after):
        exec(block, names)
        state, loss = names["train_step"](names["state"], names["batch"])
        assert state.step == 1
        assert jnp.isfinite(loss)
    assert isinstance(names["state"], jaxmp.TrainState)


@pytest.mark.parametrize("name", ["index", "recipes", "how-it-works"])
def test_code_in_documents_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(f"docs/{name}.md")
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(block, names)


@pytest.mark.parametrize(
    "document", ["README.md", "docs/index.md", "docs/recipes.md", "docs/how-it-works.md"]
)
def test_links_lead_to_files(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert links or document == "docs/how-it-works.md"
    assert [link for link in links if not ((ROOT / document).parent / link).is_file()] == []
