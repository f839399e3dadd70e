"""Ports of training scripts: tests of `benchmarks/script_ports.py` with a small script.

The script has the style of the projects that `compatibility.py --scripts` ports: a `pmap` loop in
Linen with batch statistics.
"""

import json
import re

import pytest

import compatibility
import script_ports
from compatibility_scripts import PORTS
from grids import EXPENSIVE
from script_ports import Edit, Losses, Port
from sources import results_of, text_of

SEEDS = 2

DATA = """
import numpy as np

def batches(count, size):
    weights = np.random.default_rng(0).normal(size=(8, 4))
    for _ in range(count):
        x = np.random.normal(size=(size, 8)).astype(np.float32)
        noise = np.random.gumbel(size=(size, 4))
        yield {"x": x, "label": np.argmax(x @ weights + noise, axis=-1).astype(np.int32)}
"""

LINEN = """
from typing import Any
from data import batches
from flax import linen as nn
from flax.training import train_state
import jax
import optax
import tensorflow as tf

tf.random.set_seed(0)

class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(16)(x)
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name="batch")
        return nn.Dense(4)(nn.relu(norm(x)))

class TrainState(train_state.TrainState):
    batch_stats: Any

def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["x"], train=True, mutable=["batch_stats"])
        return cross_entropy(logits, batch["label"]), new

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, new), grads = grad_fn(state.params)
    grads = jax.lax.pmean(grads, axis_name="batch")
    state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
    return state, jax.lax.pmean(loss, axis_name="batch")

def eval_step(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["x"], train=False)
    return jax.lax.pmean(cross_entropy(logits, batch["label"]), axis_name="batch")

model = Model()
apply_fn = model.apply
init = jax.jit(lambda key, x: model.init(key, x, train=False))
tx = optax.adam(2e-2)
devices = dict(axis_name="batch", in_axes=(None, 0), devices=jax.devices()[:2])
p_train_step = jax.pmap(train_step, out_axes=(None, 0), **devices)
p_eval_step = jax.pmap(eval_step, **devices)

def train():
    variables = init(jax.random.key(0), next(batches(1, 2))["x"])
    state = TrainState.create(apply_fn=apply_fn, tx=tx, **variables)
    shard = lambda batch: jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    losses = []
    for batch in batches(40, 128):
        state, loss = p_train_step(state, shard(batch))
        losses.append(loss[0])
    heldout = [p_eval_step(state, shard(batch))[0] for batch in batches(4, 128)]
    return sum(losses[-20:]) / 20, sum(heldout) / 4
"""

EDITS = (
    Edit(r"^import jax$", "import jax\nimport jaxmp\nrecipe = jaxmp.load_recipe('{recipe}')"),
    Edit(r"TrainState\(train_state.TrainState\)", "TrainState(jaxmp.TrainState)"),
    Edit(r"jax.value_and_grad\(loss_fn", "state.value_and_grad(loss_fn"),
    Edit(r"grad_fn\(state.params\)", "grad_fn()"),
    Edit(r"^    grads = jax.lax.pmean.*\n", ""),
    Edit(r"model = Model\(\)", "model = recipe.wrap(Model())"),
    Edit(r"tx = (optax.adam\(2e-2\))", r"tx = recipe.optimizer(\1, axis_name='batch')"),
)


# The scripts rely on promotion of dtypes and ranks.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")


@EXPENSIVE
def test_a_ported_script_trains_as_the_original_does(tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/data.py").write_text(DATA)
    (tmp_path / "ours/script.py").write_text(LINEN)
    port = Port(
        name="linen",
        checkout="ours",
        folder=".",
        edits={"script.py": EDITS},
        run=lambda module, author: Losses(*module("script").train()),
        framework="Linen",
        data="random",
    )
    plain = script_ports.measure(port, tmp_path, "plain", SEEDS)
    assert script_ports.lines_of(port, tmp_path) <= 10
    assert max(losses.heldout for losses in plain) < 1.1  # chance: log(4) = 1.39
    measured = script_ports.measure(port, tmp_path, "fp16", SEEDS)
    assert measured != plain
    for loss in Losses._fields:
        ours, theirs = ([getattr(run, loss) for run in runs] for runs in (measured, plain))
        assert script_ports.compare(ours, theirs).close, (loss, ours, theirs)


def test_an_edit_must_match_one_place():
    with pytest.raises(ValueError, match="matches 2 places"):
        script_ports.edit("a = 1\na = 1\n", [Edit("^a", "b")])
    with pytest.raises(ValueError, match="matches 0 places"):
        script_ports.edit("a = 1\n", [Edit("^c", "b")])


def test_lines_changed_counts_a_line_in_place_of_another_once():
    old = "a\nb\nc\nd\n"
    assert script_ports.lines_changed(old, old) == 0
    assert script_ports.lines_changed(old, "a\nB\nc\nd\n") == 1
    assert script_ports.lines_changed(old, "a\nB\nB2\nc\n") == 3
    assert script_ports.lines_changed(old, "new\n" + old) == 1


def test_a_notebook_is_its_code_without_magic_lines(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# title"]},
        {"cell_type": "code", "source": ["%%time\n", "x = 1\n", "!pip install y"]},
        {"cell_type": "code", "source": ["z = 2"]},
    ]
    (tmp_path / "n.ipynb").write_text(json.dumps({"cells": cells}))
    code = script_ports.source_of(tmp_path / "n.ipynb")
    assert re.sub(r"\n+", "\n", code).strip() == "x = 1\nz = 2"


def test_a_difference_is_close_within_two_standard_errors_or_half_a_percent():
    assert script_ports.compare([1.0, 2.0, 3.0], [1.1, 1.9, 3.05]).close
    assert script_ports.compare([1.001, 2.001, 3.001], [1.0, 2.0, 3.0]).close
    assert not script_ports.compare([1.1, 2.1, 3.1], [1.0, 2.0, 3.0]).close


# PPO samples its actions; a second set of ten seeds checks a difference that the first set showed.
SEED_COUNTS = {"PPO": 10, ("PPO", "fp16"): 20, ("PPO", "author_fp16"): 20}


def test_the_page_shows_the_scripts_as_measured():
    report = results_of("scripts_jax_0.10.2_cpu")
    assert compatibility.scripts_table(report) in text_of("docs/compatibility.md")
    for name, entry in report["scripts"].items():
        assert set(entry["variants"]) == set(PORTS[name].variants)
        for variant, measured in entry["variants"].items():
            assert measured["edits"] == PORTS[name].digest(variant)
            assert len(measured["losses"]) == SEED_COUNTS.get(
                (name, variant), SEED_COUNTS.get(name, 5)
            )
