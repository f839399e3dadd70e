"""Checkpoints: exact round trips, migrations, damage, foreign formats, placement."""

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import warnings
import zlib
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.numpy
from flax import nnx
from flax.training import checkpoints as flax_checkpoints
from flax.training import train_state as flax_train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as orbax_v1

import checkpoint_matrix as matrix
import jaxmp
import processes
from grids import EXPENSIVE, fast_cases, pairwise
from jaxmp.checkpoint import Checkpointer, load_safetensors, save_safetensors
from jaxmp.errors import CheckpointError

FP32, PACKED = jaxmp.load_recipe("fp32"), matrix.recipe_of("packed")
BF16_PARAMS = jaxmp.load_recipe("bf16_params")


@functools.cache
def optimizer(name, master="auto", inner=optax.adam):
    return matrix.recipe_of(name).replace(master=master).optimizer(inner(1e-2))


def make_state(name="bf16_params", master="auto", seed=0, inner=optax.adam, size=4):
    """A train state with masters that do not fit their parameters."""
    keys = jax.random.split(jax.random.key(seed))
    params = {
        "dense": {"kernel": jax.random.normal(keys[0], (size, 3))},
        "norm": {"scale": jax.random.normal(keys[1], (3,))},
    }
    tx = optimizer(name, "packed" if name == "packed" else master, inner)
    return jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)


def save(directory, state, recipe=BF16_PARAMS, step=1, **options):
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(step, state, recipe=recipe, **options)
    return Checkpointer(directory)


def same(tree, expected):
    matrix.assert_same(tree, expected)
    return True


# ---------------------------------------------------------------------------
# Round trips
# ---------------------------------------------------------------------------


def full_state(seed):
    key = jax.random.key(seed)
    rng = np.random.default_rng(seed)
    return {
        "train": make_state("fp16_params", seed=seed),
        "packed": make_state("packed", seed=seed),
        "keys": jax.random.split(key, 3),
        "rbg": jax.random.key(seed, impl="rbg"),
        "raw_key": jax.random.PRNGKey(seed),
        "numpy": rng.normal(size=5),
        "empty": jnp.zeros((0, 3)),
        "fp8": jnp.asarray(rng.normal(size=(8,)), jnp.float8_e4m3fn),
        "complex": jnp.asarray([1.0 + seed * 1j]),
        "int4": jnp.asarray([seed, -seed], jnp.int4),
        "epoch": 10 + seed,
        "rate": 0.5 + seed,
        "done": bool(seed),
    }


def bits(value):
    if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
        return str(value.dtype), np.asarray(jax.random.key_data(value)).tobytes()
    return type(value).__name__, getattr(value, "dtype", None), np.asarray(value).tobytes()


@pytest.mark.parametrize("abstract", [False, True])
@fast_cases("True")
def test_every_kind_of_leaf_comes_back_exactly(abstract, tmp_path):
    state, other = full_state(1), full_state(0)
    # The state has two optimizers, each with its own recipe.
    recipe = PACKED
    with pytest.raises(CheckpointError, match=r"The state was not made with .* 'bf16_params'"):
        save(tmp_path, state, recipe)
    del state["train"], other["train"]
    checkpointer = save(tmp_path, state, recipe, metrics={"loss": 2}, extra={"epoch": [1, "a"]})
    if abstract:
        arrays = lambda leaf: isinstance(leaf, jax.Array)
        other = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if arrays(x) else x, other
        )
    restored = checkpointer.restore(other, recipe=recipe)
    assert list(map(bits, jax.tree.leaves(restored))) == list(map(bits, jax.tree.leaves(state)))
    info = checkpointer.describe()
    assert (info.step, info.recipe, info.master_layout) == (1, recipe, "packed")
    assert (info.metrics, info.extra) == ({"loss": 2.0}, {"epoch": [1, "a"]})
    assert "masters     packed" in str(info)
    assert checkpointer.verify() == info


def test_arrays_of_64_bits_are_not_narrowed(tmp_path):
    values = {"a": np.array([1 / 3])}
    checkpointer = save(tmp_path, values, FP32)
    with pytest.raises(CheckpointError, match="'a' of the state is float64") as error:
        checkpointer.restore({"a": jax.ShapeDtypeStruct((1,), np.float64)})
    fix = re.search(r"np\.zeros\(.*\)", str(error.value))[0]
    assert same(checkpointer.restore({"a": eval(fix)}), values)


def test_a_training_goes_on_with_its_loss_scale_and_counters(tmp_path):
    state = make_state("fp16_params")
    grads = jax.tree.map(lambda p: jnp.full_like(p, jnp.inf, jnp.float32), state.params)
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam
        state = state.apply_gradients(grads=grads)
    checkpointer = save(tmp_path, state, "fp16_params")
    restored = checkpointer.restore(make_state("fp16_params", seed=1), recipe="fp16_params")
    assert jaxmp.get_loss_scale(restored).scale_value == 2.0**15
    assert jaxmp.get_skip_stats(restored).total == 1
    assert same(restored, state)


def test_saved_arrays_may_be_donated_and_changed_at_once(tmp_path):
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    array, numbers = jnp.arange(2.0**17), np.arange(4)
    expected = np.array(array)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": array, "n": numbers}, recipe="fp32")
        double(array)
        numbers[:] = 0
        restored = checkpointer.restore({"a": jnp.zeros(2**17), "n": np.zeros(4, np.int64)})
    np.testing.assert_array_equal(restored["a"], expected)
    np.testing.assert_array_equal(restored["n"], np.arange(4))


def test_nnx_objects_are_updated_in_place(tmp_path):
    state = matrix.Nnx.make("bf16_params")
    checkpointer = save(tmp_path, {"nodes": state, "rngs": nnx.Rngs(3)})
    fresh, rngs = matrix.Nnx.make("bf16_params", seed=5), nnx.Rngs(4)
    restored = checkpointer.restore({"nodes": fresh, "rngs": rngs}, recipe=BF16_PARAMS)
    assert restored["nodes"][0] is fresh[0] and restored["rngs"] is rngs
    assert same(matrix.Nnx.arrays(fresh), matrix.Nnx.arrays(state))
    assert jnp.array_equal(rngs(), nnx.Rngs(3)())


# ---------------------------------------------------------------------------
# Migration
# ---------------------------------------------------------------------------

# Each recipe once as source and once as target; benchmarks/checkpoint_matrix.py runs all pairs.
_NAMES = ["bf16_params", "packed", "fp8_delayed", "fp16_params", "bf16", "fp8", "fp32", "fp16"]
PAIRS = [
    ("linen" if i % 2 else "nnx", source, target)
    for i, (source, target) in enumerate(zip(_NAMES, [*_NAMES[1:], _NAMES[0]], strict=True))
] + [("linen", "fp8_delayed", "packed"), *(("nnx", name, name) for name in _NAMES[1:3])]


@pytest.mark.parametrize(("framework", "source", "target"), PAIRS)
@fast_cases("linen-fp16_params-bf16")
def test_migrated_states_train_as_their_reference(framework, source, target, tmp_path):
    with jax.numpy_dtype_promotion("standard"):
        state = matrix.save_trained(framework, source, str(tmp_path))
        outcome = matrix.check_pair(framework, source, target, str(tmp_path), state)
    if (source, target) == ("bf16_params", "packed"):
        line = "bfloat16 + FP32 master -> bfloat16 + packed master: FP32 value preserved"
        assert f"4 x parameter: {line} bit for bit" in outcome
    if (source, target) == ("fp8_delayed", "packed"):
        assert re.search(r"\d+ x leaf of FP8 scaling: dropped", outcome)
    if source == target:
        assert outcome == "exact"
    elif target == "fp8_delayed":
        assert "leaf of FP8 scaling: created, calibrated in the first step" in outcome
    if (source, target) == ("fp8_delayed", "fp16_params"):
        assert "loss scale: created at 65536" in outcome


def test_a_difference_is_refused_with_leaves_dtypes_and_the_fix(tmp_path, capsys):
    checkpointer = save(tmp_path, make_state())
    state = make_state("packed", seed=1)
    with pytest.raises(CheckpointError) as error:
        checkpointer.restore(state, recipe=PACKED)
    assert str(error.value) == textwrap.dedent("""\
        Step 1 was written under the recipe 'bf16_params' (master layout: fp32), and the state to restore has the recipe 'bf16_params' (master layout: packed).
          opt_state/inner_state/packed_masters/dense/kernel: absent in the checkpoint, int16[4,3] in the state
          opt_state/inner_state/packed_masters/norm/scale: absent in the checkpoint, int16[3] in the state
          opt_state/inner_state/fp32_masters/dense/kernel: float32[4,3] in the checkpoint, absent in the state
          opt_state/inner_state/fp32_masters/norm/scale: float32[3] in the checkpoint, absent in the state
        Convert it deliberately: restore(state, recipe=recipe, migrate=True).""")  # noqa: E501
    recipe, restore = PACKED, checkpointer.restore
    fix = re.search(r"restore\(.*\)", str(error.value))[0]
    assert capsys.readouterr().out == ""
    migrated = eval(fix, {}, {"restore": restore, "state": state, "recipe": recipe})
    assert same(jaxmp.get_master_params(migrated), jaxmp.get_master_params(make_state()))
    assert "2 x parameter" in capsys.readouterr().out


def test_another_recipe_is_refused_even_if_all_leaves_are_alike(tmp_path):
    checkpointer = save(tmp_path, make_state("bf16"), "bf16")
    state = make_state("fp32", seed=1)
    with pytest.raises(CheckpointError, match=r"'bf16' .* 'fp32' .* leaves are the same"):
        checkpointer.restore(state, recipe=FP32)
    renamed = jaxmp.load_recipe("bf16").replace(name="mine", summary="")
    assert same(checkpointer.restore(state, recipe=renamed), make_state("bf16"))
    for path, is_in_state in {"**/other": False, "**:other": False, "dense": True}.items():
        rule = jaxmp.Rule(path, compute_dtype="float32", required=False)
        changed = renamed.replace(policies=jaxmp.PolicyMap("bf16", [rule]))
        refusal = pytest.raises(CheckpointError, match="leaves are the same")
        with refusal if is_in_state else contextlib.nullcontext():
            assert same(checkpointer.restore(state, recipe=changed), make_state("bf16"))
    assert same(checkpointer.restore(state, recipe=FP32, migrate=True), make_state("bf16"))


def test_loss_of_information_must_be_asked_for(tmp_path, capsys):
    checkpointer = save(tmp_path, make_state())
    none = BF16_PARAMS.replace(master="none")
    target = make_state("bf16_params", master="none", seed=1)
    with pytest.raises(CheckpointError, match=r"the master is dropped.*migrate='lossy'"):
        checkpointer.restore(target, recipe=none, migrate=True)
    assert "the master is dropped  [loses information]" in capsys.readouterr().out
    restored = checkpointer.restore(target, recipe=none, migrate="lossy")
    assert same(restored.params, make_state().params)
    masters = jaxmp.get_master_params(make_state())
    like = {"params": jax.tree.map(jnp.zeros_like, masters)}
    assert same(checkpointer.restore(like, migrate="lossy")["params"], masters)
    with pytest.raises(CheckpointError, match=r"float32 -> bfloat16: rounded"):
        save(tmp_path / "fp32", make_state("fp32"), "fp32").restore(target, migrate=True)

    sgd = make_state(inner=optax.sgd, seed=1)
    with pytest.raises(CheckpointError, match=r"mu/dense/kernel \(float32\[4,3\]\): dropped"):
        checkpointer.restore(sgd, migrate=True)
    restored = checkpointer.restore(sgd, migrate="lossy")
    assert same(jaxmp.get_master_params(restored), masters)


def test_leaves_that_no_cast_preserves_are_refused(tmp_path):
    before = {"key": jax.random.key(0), "count": jnp.int32(300)}
    checkpointer = save(tmp_path, before)
    for changes, message in [
        ({"key": jax.random.key(0, impl="rbg")}, r"key<fry>\[\] at 'key'"),
        ({"count": jnp.float32(1)}, r"int32\[\] at 'count'"),
        ({"count": jnp.int8(1)}, "'count', 300, does not fit int8"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            checkpointer.restore(before | changes, migrate=True)


@pytest.mark.parametrize("after", [jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.bfloat16])
@pytest.mark.parametrize("before", [jnp.float8_e5m2, jnp.float8_e4m3fn])
def test_a_cast_between_formats_of_fp8_is_lossy(before, after, tmp_path):
    checkpointer = save(tmp_path, {"scaled": jnp.ones(4, before)})
    like = {"scaled": jnp.zeros(4, after)}
    if before != after and after != jnp.bfloat16:
        with pytest.raises(CheckpointError, match="migrate='lossy'"):
            checkpointer.restore(like, migrate=True)
    restored = checkpointer.restore(like, migrate="lossy")
    assert restored["scaled"].dtype == after and restored["scaled"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("source", ["fp32", "bf16_params", "packed", "fp16_params"])
def test_parameters_are_restored_without_the_rest(source, tmp_path):
    state = make_state(source)
    average = make_state("fp32", seed=1).params
    checkpointer = save(tmp_path, {"average": average, "run": state}, matrix.recipe_of(source))
    full = jaxmp.get_master_params(state)
    assert same(checkpointer.restore(jax.tree.map(jnp.zeros_like, full), only="params"), full)
    shapes = jax.eval_shape(lambda: {"params": full})
    assert same(checkpointer.restore(shapes, only="params")["params"], full)
    own = checkpointer.restore(jax.eval_shape(lambda: state.params), only="params")
    assert same(own, state.params)  # in their own dtypes: bit for bit
    other = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float16), full)
    rounded = jax.tree.map(lambda x: x.astype(jnp.float16), full)
    if source != "fp16_params":
        assert same(checkpointer.restore(other, only="params"), rounded)


def test_one_of_several_sets_of_parameters_is_restored(tmp_path):
    average = make_state("fp32", seed=1).params
    tie = tied_state("bf16_params")
    checkpointer = save(tmp_path, tie | {"average": average})
    zeros = jax.tree.map(jnp.zeros_like, average)
    with pytest.raises(CheckpointError, match=r"'model' and 'target' .* params='PATH'"):
        checkpointer.restore(zeros, only="params")
    restore = functools.partial(checkpointer.restore, zeros, only="params")
    assert same(restore(params="average"), average)
    assert same(restore(params="model"), jaxmp.get_master_params(tie["opt"]))
    with pytest.raises(CheckpointError, match=r"requires 'x/dense/kernel'.*no such leaf"):
        restore(params="x")
    with pytest.raises(CheckpointError, match=r"float32\[5,3\].*bfloat16\[4,3\]"):
        checkpointer.restore(make_state("fp32", size=5).params, only="params", params="model")
    with pytest.raises(CheckpointError, match="parameters alone, as arrays"):
        checkpointer.restore(tie, only="params")
    for options in ({"only": "weights"}, {"only": "params", "migrate": True}):
        with pytest.raises(CheckpointError, match="and 'params' without migrate"):
            checkpointer.restore(zeros, **options)


def test_the_parameters_of_an_nnx_model_are_restored_without_its_optimizer(tmp_path):
    def make(name, seed):
        recipe = matrix.recipe_of(name)
        model = recipe.wrap(BatchNormModel(nnx.Rngs(seed)))
        return model, jaxmp.nnx.Optimizer(model, optimizer(name))

    model, trained = make("bf16_params", 0)
    model.norm.mean[...] += 0.3
    checkpointer = save(tmp_path, {"model": model, "optimizer": trained})
    other, _ = make("fp32", 1)
    assert checkpointer.restore(other, only="params") is other
    assert same(nnx.as_pure(nnx.state(other, nnx.Param)), jaxmp.get_master_params(trained))
    np.testing.assert_array_equal(other.norm.mean[...], model.norm.mean[...])


class BatchNormModel(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)


# Every recipe as source, and every layout of masters as target; the script runs all pairs.
AVERAGES = pairwise(
    matrix.RECIPES,
    ["fp32", "bf16_params", "packed", "fp16_params"],
    matrix.KINDS,
    matrix.NAMES,
    matrix.STORED,
)
_FAST = [
    ("bf16_params", "fp32", "dict", "average", "as_parameters"),
    ("bf16_params", "fp32", "nnx", "average", "as_parameters"),
    ("packed", "fp32", "dict", "target", "as_parameters"),
    ("fp32", "bf16_params", "dict", "average", "fp32"),
    ("fp32", "packed", "nnx", "target", "fp32"),
    ("fp16_params", "packed", "train_state", "average", "fp32"),
]


@pytest.mark.parametrize(
    ("source", "target", "kind", "name", "stored"),
    [*_FAST, *(pytest.param(*case, marks=EXPENSIVE) for case in AVERAGES if case not in _FAST)],
)
def test_averages_are_migrated_exactly_or_refused(source, target, kind, name, stored, tmp_path):
    outcome = matrix.check_average(source, target, kind, name, stored, str(tmp_path))
    if (source, kind, stored) == ("packed", "dict", "as_parameters") and target != "packed":
        assert outcome == "refused"


def tied_state(name, seed=0):
    """A state at step 0: the target network is a copy of the parameters."""
    state = make_state(name, seed=seed)
    copy = jax.tree.map(jnp.copy, state.params)
    return {"model": state.params, "target": copy, "opt": state.opt_state}


def test_a_tie_does_not_fail_a_save_and_a_migration_names_both_candidates(tmp_path, capsys):
    state = tied_state("bf16_params")
    checkpointer = save(tmp_path / "tie", state)
    assert same(checkpointer.restore(tied_state("bf16_params", 1), recipe=BF16_PARAMS), state)
    whole = tied_state("fp32", 1)
    without_optimizer = {name: whole[name] for name in ("model", "target")}
    for like, migrate in itertools.product((without_optimizer, whole), (True, "lossy")):
        with pytest.raises(CheckpointError) as error:
            checkpointer.restore(like, recipe=FP32 if "opt" in like else None, migrate=migrate)
        assert "'model' and 'target'" in str(error.value) and "lossy" not in str(error.value)
    fixes = re.findall(r"params=(\{.*?\}|'\w+')", str(error.value))
    for params in map(eval, fixes):
        like = tied_state("fp32", 1)
        restored = checkpointer.restore(like, recipe=FP32, migrate=True, params=params)
        assert same(restored["model"], tied_state("fp32")["model"])
        assert same(
            restored["target"], jax.tree.map(lambda x: x.astype(jnp.float32), state["target"])
        )
    assert len(fixes) == 2
    declared = save(tmp_path / "declared", state, params={"opt": "model"})
    restored = declared.restore(tied_state("fp32", 1), recipe=FP32, migrate=True)
    assert same(restored["model"], tied_state("fp32")["model"])


def test_wrong_declarations_are_refused(tmp_path):
    state = tied_state("bf16_params") | {"target": make_state(seed=1).params}
    with pytest.raises(CheckpointError, match=r"leaves at 'target' are not .* at 'model' are"):
        save(tmp_path, state, params="target")
    with pytest.raises(CheckpointError, match=r"no optimizer of jaxmp at 'tx'.*'opt/inner"):
        save(tmp_path, state, params={"tx": "model"})


def test_an_optimizer_inside_of_a_module_is_migrated(tmp_path):
    class Agent(nnx.Module):
        def __init__(self, name, seed):
            self.critic, self.critic_optimizer = matrix.Nnx.make(name, seed)
            self.average = nnx.clone(self.critic)

    agent = Agent("packed", 0)
    checkpointer = save(tmp_path, agent, PACKED)
    restored = checkpointer.restore(Agent("fp32", 1), recipe=FP32, migrate=True)
    masters = matrix.Nnx.masters((restored.critic, restored.critic_optimizer))
    assert same(masters, matrix.Nnx.masters((agent.critic, agent.critic_optimizer)))


def test_lossy_is_not_advised_where_masters_would_be_lost(tmp_path):
    checkpointer = save(tmp_path, {"first": make_state(), "second": make_state(seed=1)})
    with pytest.raises(CheckpointError, match=r"masters would be lost.*tx.init") as error:
        checkpointer.restore({"first": make_state("fp32")}, recipe=FP32, migrate=True)
    assert "lossy" not in str(error.value)


@pytest.mark.parametrize("migrate", [False, True, "lossy"])
def test_another_model_or_optimizer_is_refused(migrate, tmp_path):
    state = make_state(inner=optax.sgd)
    restore = functools.partial(save(tmp_path, state).restore, migrate=migrate)
    with pytest.raises(CheckpointError, match=r"requires 'opt_state/.*count'.*no such leaf"):
        restore(make_state())
    with pytest.raises(CheckpointError, match=r"bfloat16\[4,3\] at 'params/dense/kernel'"):
        restore(make_state(inner=optax.sgd, size=5))
    names = {"dense1": {"kernel": jnp.ones((4, 3))}, "norm": {"scale": jnp.ones(3)}}
    renamed = jaxmp.TrainState.create(apply_fn=None, params=names, tx=state.tx)
    with pytest.raises(CheckpointError, match="no parameter 'dense1:kernel'") as error:
        restore(renamed)
    assert "migrate=True" not in str(error.value)
    fix = re.search(r"restore\(\{.*\)", str(error.value))[0]
    restored = eval(fix, {"restore": Checkpointer(tmp_path).restore, "jnp": jnp})
    kernel = jaxmp.get_master_params(state)["dense"]["kernel"]
    assert same(restored, {"dense": {"kernel": kernel}})


def test_float16_must_hold_the_parameters(tmp_path):
    create = functools.partial(jaxmp.TrainState.create, apply_fn=None)
    state = create(params={"w": jnp.array([70000.0])}, tx=optimizer("bf16_params"))
    like = create(params={"w": jnp.array([1.0])}, tx=optimizer("fp16_params"))
    checkpointer = save(tmp_path, state)
    with pytest.raises(CheckpointError, match="65520 or more"):
        checkpointer.restore(like, recipe="fp16_params", migrate=True)
    with pytest.raises(CheckpointError, match="65520 or more"):
        checkpointer.restore({"w": jnp.zeros(1, jnp.float16)}, only="params")


def test_an_abstract_state_gets_its_loss_scale_from_the_recipe(tmp_path):
    checkpointer = save(tmp_path, make_state())
    abstract = jax.eval_shape(lambda: make_state("fp16_params"))
    with pytest.raises(CheckpointError, match="no value for 'opt_state/loss_scale"):
        checkpointer.restore(abstract, migrate=True)
    restored = checkpointer.restore(abstract, recipe="fp16_params", migrate=True)
    assert float(jaxmp.get_loss_scale(restored).scale_value) == 65536


# ---------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------


def data_files(directory):
    root = Path(directory, "1", "state")
    # Orbax writes its marker after everything else; nothing reads what it contains.
    files = (path for path in root.rglob("*") if path.name != "commit_success.txt")
    return sorted(path for path in files if path.is_file())


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_damage_to_any_file_is_refused_by_its_name(damage, tmp_path):
    save(tmp_path / "intact", make_state())
    target = make_state(seed=1)
    names = [path.relative_to(tmp_path / "intact") for path in data_files(tmp_path / "intact")]
    assert len(names) >= 5
    for i, name in enumerate(names):
        copy = tmp_path / str(i)
        shutil.copytree(tmp_path / "intact", copy)
        damage(copy / name)
        with pytest.raises(CheckpointError) as error:
            Checkpointer(copy).restore(target, recipe=BF16_PARAMS)
        is_manifest = name.name == "jaxmp_manifest.json"
        expected = "has no manifest" if is_manifest and damage is Path.unlink else name.name
        assert expected in str(error.value)


def test_a_changed_manifest_is_refused(tmp_path):
    checkpointer = save(tmp_path, {"w": jnp.ones(2)}, "fp32")
    file = tmp_path / "1" / "state" / "jaxmp_manifest.json"
    envelope = json.loads(file.read_text())
    body = json.loads(envelope["manifest"])

    def sealed(**fields):
        text = json.dumps({key: value for key, value in fields.items() if value is not None})
        return {"manifest": text, "crc32": f"{zlib.crc32(text.encode()):08x}"}

    for changes, message in [
        ({"manifest": json.dumps({**body, "step": 7})}, "was edited or damaged"),
        (sealed(**body, future=1), "other fields than this version"),
        (sealed(**{**body, "files": None}), "other fields than this version"),
        ({"format": 99}, "format 99, which a newer version"),
        ({"format": 1}, "format 1, which another version"),
        ({"format": "a"}, "format a, which another version"),
    ]:
        file.write_text(json.dumps({**envelope, **changes}))
        for read in (checkpointer.describe, lambda: checkpointer.restore({"w": jnp.zeros(2)})):
            with pytest.raises(CheckpointError, match=message):
                read()


def test_a_copied_step_is_restored_and_not_written_to(tmp_path):
    save(tmp_path / "run", make_state(), step=3)
    shutil.copytree(tmp_path / "run" / "3", tmp_path / "best")
    for directory in (tmp_path / "best", tmp_path / "best" / "state"):
        copied = Checkpointer(directory)
        assert copied.describe().step == 3
        assert same(copied.restore(make_state(seed=1), recipe=BF16_PARAMS), make_state())
        with pytest.raises(CheckpointError, match="is a step of a run"):
            copied.save(4, make_state(), recipe=BF16_PARAMS)
    next((tmp_path / "best" / "state" / "d").iterdir()).unlink()
    with pytest.raises(CheckpointError, match=r"is missing\.$"):
        Checkpointer(tmp_path / "best").restore(make_state())


WRITER = """
import itertools, sys, jax.numpy as jnp
from jaxmp.checkpoint import Checkpointer
with Checkpointer(sys.argv[1], keep=2) as checkpointer:
    for step in itertools.count((checkpointer.latest_step() or 0) + 1):
        checkpointer.save(step, {"a": jnp.full(2**18, float(step)), "step": step}, recipe="fp32")
        print(step, flush=True)
"""


@EXPENSIVE
def test_a_killed_writer_leaves_complete_steps(tmp_path):
    rng = np.random.default_rng(0)
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            started = int(writer.stdout.readline())
            time.sleep(rng.uniform(0.0, 1.0))
            writer.send_signal(signal.SIGKILL)
        checkpointer = Checkpointer(tmp_path)
        step = checkpointer.latest_step()
        if step is None:
            assert started == 1
            continue
        like = {"a": jnp.zeros(2**18), "step": 0}
        for complete in checkpointer.all_steps():
            restored = checkpointer.restore(like, step=complete)
            assert restored["step"] == complete and (restored["a"] == complete).all()
    assert step is not None


# ---------------------------------------------------------------------------
# Checkpoints of other libraries
# ---------------------------------------------------------------------------


def flax_state(seed=0):
    """Flax's own train state in FP32, as a run without jaxmp has it."""
    params = make_state("fp32", seed=seed).params
    return flax_train_state.TrainState.create(
        apply_fn=None, params=params, tx=optax.adam(1e-2)
    ).replace(step=5)


def write_orbax(directory, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "run", state)
    return directory / "run"


def write_orbax_v1(directory, state):
    orbax_v1.save_pytree(directory / "run", state)
    return directory / "run"


def write_orbax_manager(directory, state):
    with ocp.CheckpointManager(directory) as manager:
        manager.save(5, args=ocp.args.StandardSave(state))
    return directory


def write_flax(directory, state, uses_orbax=False):
    flax.config.update("flax_use_orbax_checkpointing", uses_orbax)
    flax_checkpoints.save_checkpoint(directory, state, step=5)
    return directory


write_flax_with_orbax = functools.partial(write_flax, uses_orbax=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "write",
    [write_orbax, write_orbax_v1, write_orbax_manager, write_flax, write_flax_with_orbax],
)
def test_runs_of_flax_and_orbax_go_on_under_a_recipe(write, tmp_path, capsys):
    state = flax_state()
    grads = jax.tree.map(jnp.ones_like, state.params)
    with jax.numpy_dtype_promotion("standard"):
        state = state.apply_gradients(grads=grads)
    checkpointer = Checkpointer(write(tmp_path, state))
    like = make_state("packed", seed=1)
    with pytest.raises(CheckpointError, match=r"no manifest.*migrate=True"):
        checkpointer.restore(like, recipe=PACKED)
    restored = checkpointer.restore(like, recipe=PACKED, migrate=True)
    plan = capsys.readouterr().out
    assert "without checksums" in plan
    assert "2 x parameter: float32 -> bfloat16 + packed master: FP32 value preserved" in plan
    assert same(jaxmp.get_master_params(restored), state.params)
    assert same(restored.opt_state.inner_state.inner_state, state.opt_state)
    assert restored.step == 6 and restored.step.dtype == jnp.int32


def write_flax_bytes(directory, state):
    (directory / "run.msgpack").write_bytes(flax.serialization.to_bytes(state))
    return directory / "run.msgpack"


def write_items(directory, **items):
    with ocp.CheckpointManager(directory) as manager:
        items = {name: ocp.args.StandardSave(item) for name, item in items.items()}
        manager.save(5, args=ocp.args.Composite(**items))
    return Checkpointer(directory)


@pytest.mark.parametrize("write", [write_orbax_manager, write_flax_bytes])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_alone_of_another_program_are_restored(write, dtype, tmp_path):
    state = flax_state()
    checkpointer = Checkpointer(write(tmp_path, state))
    like = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), state.params)
    restored = checkpointer.restore(like, only="params")
    assert same(restored, jax.tree.map(lambda x: x.astype(dtype), state.params))
    moments = checkpointer.restore(like, only="params", params="opt_state/0/mu")
    assert same(moments, jax.tree.map(jnp.zeros_like, like))
    other = {**like, "head": jnp.zeros(2)}
    with pytest.raises(CheckpointError, match=r"requires 'params/head' .*no such leaf"):
        checkpointer.restore(other, only="params")


def test_a_file_is_restored_and_not_written(tmp_path):
    state = flax_state()
    checkpointer = Checkpointer(write_flax_bytes(tmp_path, state))
    restored = checkpointer.restore(make_state(seed=1), recipe=BF16_PARAMS, migrate=True)
    assert same(jaxmp.get_master_params(restored), state.params)
    with pytest.raises(CheckpointError, match=r"is a file\. Save into the directory"):
        checkpointer.save(1, state, recipe="fp32")


def test_the_items_of_a_checkpoint_are_one_state_or_contain_it(tmp_path):
    state, average = flax_state(), flax_state(seed=2).params
    like = make_state(seed=1)
    restore = lambda checkpointer, like: checkpointer.restore(
        like, recipe=BF16_PARAMS, migrate=True
    )
    checkpointer = write_items(tmp_path / "state", state=state, average=average)
    assert same(jaxmp.get_master_params(restore(checkpointer, like)), state.params)
    zeros = jax.tree.map(jnp.zeros_like, average)
    with pytest.raises(CheckpointError, match=r"'average' and 'state/params' .* params='PATH'"):
        checkpointer.restore(zeros, only="params")
    assert same(checkpointer.restore(zeros, only="params", params="average"), average)

    checkpointer = write_items(tmp_path / "parts", params=state.params, opt_state=state.opt_state)
    with pytest.raises(CheckpointError, match="requires 'step'") as error:
        restore(checkpointer, like)
    parts = eval(re.search(r"such as (\{.*\})", str(error.value))[1], {"state": like})
    assert same(jaxmp.get_master_params(restore(checkpointer, parts)["opt_state"]), state.params)


@pytest.mark.parametrize("source", ["packed", "bf16_params", "bf16"])
def test_states_of_jaxmp_that_orbax_wrote_are_migrated(source, tmp_path, capsys):
    state = make_state(source)
    checkpointer = Checkpointer(write_orbax(tmp_path, state))
    restored = checkpointer.restore(make_state(seed=1), recipe=BF16_PARAMS, migrate=True)
    assert "written by orbax" in capsys.readouterr().out
    assert same(jaxmp.get_master_params(restored), jaxmp.get_master_params(state))


class NoisyModel(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        # A parameter with the name of the field that a Variable has in checkpoints.
        self.value = nnx.Param(rngs.params.normal((2,)))


def test_an_nnx_run_with_a_text_goes_on_under_a_recipe(tmp_path):
    inner = optax.sgd(1e-2, momentum=0.9)
    model = NoisyModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, inner, wrt=nnx.Param)
    with jax.numpy_dtype_promotion("standard"):
        optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    run = {"model": nnx.state(model), "optimizer": nnx.state(optimizer), "name": "first"}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(tmp_path / "run", args=ocp.args.PyTreeSave(run))

    other = BF16_PARAMS.wrap(NoisyModel(nnx.Rngs(1)))
    trained = jaxmp.nnx.Optimizer(other, BF16_PARAMS.optimizer(inner))
    like = {"model": other, "optimizer": trained}
    Checkpointer(tmp_path / "run").restore(like, recipe=BF16_PARAMS, migrate=True)
    assert same(jaxmp.get_master_params(trained), nnx.as_pure(nnx.state(model, nnx.Param)))
    moments, expected = (optax.tree.get(x.opt_state, "trace") for x in (trained, optimizer))
    assert same(nnx.as_pure(moments), nnx.as_pure(expected))
    assert jnp.array_equal(other.dropout.rngs(), model.dropout.rngs())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", [write_orbax, write_flax])
@pytest.mark.parametrize(
    ("scale", "count"),
    [
        ({"loss_scale": jnp.float32(2**13)}, 0),
        ({"loss_scale": np.float64(2**13)}, 0),
        ({"loss_scale": {"loss_scale": jnp.float32(2**13), "counter": jnp.int32(7)}}, 7),
        ({"loss_scale": {"0": jnp.float32(2**13), "1": jnp.int32(7)}}, 7),  # jax.tree.leaves
        ({"loss_scale": {"scale": jnp.float32(2**13), "fin_steps": jnp.int32(7)}}, 7),
        ({"dynamic_scale": {"scale": jnp.float32(2**13), "fin_steps": jnp.int32(7)}}, 7),
    ],
)
def test_scales_of_jmp_and_flax_are_read(scale, count, write, tmp_path):
    params, inner = {"w": jnp.ones((4, 4))}, optax.adam(1e-3)
    state = {"params": params, "opt_state": inner.init(params)}
    path = write(tmp_path, state | scale)
    recipe = jaxmp.load_recipe("fp16")
    like = {"params": params, "opt_state": recipe.optimizer(inner).init(params)}
    read = jaxmp.get_loss_scale(Checkpointer(path).restore(like, recipe=recipe, migrate=True))
    assert read == jaxmp.DynamicLossScale(2**13).with_leaves(good_steps=jnp.int32(count))
    # A recipe without a scale drops it without loss.
    like = {"params": params, "opt_state": jaxmp.load_recipe("bf16").optimizer(inner).init(params)}
    Checkpointer(path).restore(like, recipe="bf16", migrate=True)


def test_something_else_is_not_a_checkpoint(tmp_path):
    empty = Checkpointer(tmp_path / "none")
    assert (empty.latest_step(), empty.all_steps()) == (None, [])
    with pytest.raises(CheckpointError, match="does not contain a checkpoint"):
        empty.restore(make_state())
    assert not (tmp_path / "none").exists()
    (tmp_path / "checkpoint_3").write_bytes(b"\x80\x04N.")  # a pickle of None
    with pytest.raises(CheckpointError, match=r"cannot be read|is not a checkpoint"):
        Checkpointer(tmp_path).restore(make_state(), migrate=True)
    with pytest.raises(CheckpointError, match="does not contain step 4"):
        Checkpointer(tmp_path).restore(make_state(), step=4)


# ---------------------------------------------------------------------------
# Placement
# ---------------------------------------------------------------------------


def placed(state, count):
    mesh = Mesh(np.array(jax.devices()[:count]), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(
        lambda x: jax.device_put(x, rows if x.ndim and x.shape[0] % count == 0 else whole), state
    )


@EXPENSIVE
def test_states_move_between_meshes(tmp_path):
    most = jax.device_count()
    expected = make_state("packed", size=64)
    state = placed(expected, most)
    for step, count in enumerate((most // 2, 1, most)):
        checkpointer = save(tmp_path, state, PACKED, step=step)
        like = placed(make_state("packed", seed=1, size=64), count)
        state = checkpointer.restore(like, recipe=PACKED)
        assert same(state, expected)
        kernel = state.params["dense"]["kernel"]
        assert kernel.sharding == like.params["dense"]["kernel"].sharding
        assert len(kernel.sharding.device_set) == count


def test_sharded_parameters_are_restored_without_the_rest(tmp_path):
    checkpointer = save(tmp_path, placed(make_state(), 2))
    full = jaxmp.get_master_params(make_state())
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    restored = checkpointer.restore(jax.tree.map(abstract, placed(full, 2)), only="params")
    assert same(restored, full)
    assert restored["dense"]["kernel"].sharding.spec == PartitionSpec("data")
    assert same(checkpointer.restore(full, only="params"), full)


@EXPENSIVE
def test_a_migration_keeps_shardings(tmp_path):
    state = make_state(size=64)
    checkpointer = save(tmp_path, placed(state, 4))
    like = placed(make_state("packed", seed=1, size=64), 4)
    restored = checkpointer.restore(like, recipe=PACKED, migrate=True)
    remainders = restored.opt_state.inner_state.masters["dense"]["kernel"]
    assert remainders.dtype == jnp.int16 and len(remainders.sharding.device_set) == 4
    assert same(jaxmp.get_master_params(restored), jaxmp.get_master_params(state))


def test_scalars_that_were_not_placed_can_be_used_with_any_mesh(tmp_path):
    state = {"a": placed(jnp.arange(8.0), 4), "n": jnp.zeros((), jnp.int32)}
    restored = save(tmp_path, state, "fp32").restore(state)
    jax.jit(lambda tree: tree["a"] + tree["n"].astype(jnp.float32)[None])(restored)


# ---------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------


def test_the_latest_steps_are_kept(tmp_path):
    state = {"a": jnp.ones(2)}
    for step in range(1, 6):
        with Checkpointer(tmp_path, keep=2) as checkpointer:
            checkpointer.save(step, state, recipe="fp32", metrics={"loss": 1 / step})
    assert checkpointer.all_steps() == [4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5"]
    assert checkpointer.latest_step() == 5 and checkpointer.describe(4).metrics == {"loss": 0.25}
    with pytest.raises(CheckpointError, match=r"Step 5 exists.*rmtree") as error:
        checkpointer.save(5, state, recipe="fp32")
    eval(re.search(r"shutil.rmtree\(.*\)", str(error.value))[0])
    checkpointer.save(5, state, recipe="fp32")
    assert checkpointer.all_steps() == [4, 5]


# Some saved steps were deleted before they are saved again.
ORDERS = [
    (1, 2, 3, 4),
    (4, 3, 2, 1),
    (8, 9, 10, 5, 6, 7, 8, 9),
    (5, 1, 4, 2, 3),
    (10, 100, 20, 3),
    (3, 1, 2, 0, 7),
    (5, 6, 3, 4, 1, 2),
]


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "_".join(map(str, order)))
@fast_cases("8_9_10_5_6_7_8_9-False", "8_9_10_5_6_7_8_9-True")
def test_the_steps_that_were_saved_last_are_kept(order, reopened, tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count, step in enumerate(order, 1):
            checkpointer.save(step, {"n": step}, recipe="fp32")
            assert checkpointer.latest_step() == step
            assert checkpointer.all_steps() == sorted(order[:count][-2:])
            if reopened:
                checkpointer.close()
                checkpointer = Checkpointer(tmp_path, keep=2)
    assert checkpointer.restore({"n": 0})["n"] == Checkpointer(tmp_path).describe().step == step
    checkpointer.close()
    rollbacks = [(a, b) for a, b in itertools.pairwise(order) if b < a]
    assert len(caught) == len(rollbacks)
    for row, (a, b) in zip(caught, rollbacks, strict=True):
        assert f"rolled back: step {b} is saved after step {a}" in str(row.message)
        assert Path(row.filename) == Path(__file__)


def test_directories_that_jaxmp_did_not_write_are_kept(tmp_path):
    (tmp_path / "2025").mkdir()
    write_orbax(tmp_path, make_state()).rename(tmp_path / "1")
    (tmp_path / "3").write_text("")
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        for step in (2026, 2027):
            checkpointer.save(step, make_state(), recipe=BF16_PARAMS)
    assert checkpointer.all_steps() == [1, 2025, 2027]
    assert (tmp_path / "3").exists()


@pytest.mark.filterwarnings("ignore:.*rolled back")
def test_all_steps_of_a_rolled_back_run_are_kept_without_a_number(tmp_path):
    for step in (8, 9, 5):
        checkpointer = save(tmp_path, {"n": step}, "fp32", step)
    assert (checkpointer.all_steps(), checkpointer.latest_step()) == ([5, 8, 9], 5)
    shutil.copytree(tmp_path / "8", tmp_path / "12")  # unknown steps are the last, if they are high
    assert checkpointer.latest_step() == 12
    # The step before a damaged one is that which was saved before it.
    shutil.rmtree(tmp_path / "12")
    flip(next(path for path in (tmp_path / "5").rglob("d/*")))
    with pytest.raises(CheckpointError, match=r"restore\(state, step=9\)"):
        checkpointer.restore({"n": 0})
    assert checkpointer.restore({"n": 0}, step=9) == {"n": 9}


# ---------------------------------------------------------------------------
# Exits and writers
# ---------------------------------------------------------------------------


ENDS = {
    "end": "",
    "exit": "sys.exit(3)",
    "raise": "raise KeyError('bug')",
    "deleted": "del checkpointer",
    "interrupted": "os.kill(os.getpid(), signal.SIGINT)",
    "not_finite": "checkpointer.wait(); checkpointer.save(2, {'w': np.float32([np.inf])}, **fp32)",
}
ENDING = """
import os, signal, sys, numpy as np
from jaxmp.checkpoint import Checkpointer
signal.signal(signal.SIGINT, signal.default_int_handler)
checkpointer, fp32 = Checkpointer(sys.argv[1]), {"recipe": "fp32"}
checkpointer.save(1, {"w": np.ones(10**6, np.float32)}, **fp32)
"""


@pytest.mark.parametrize("end", ENDS)
@fast_cases("not_finite")
def test_a_step_is_completed_when_the_program_ends(end, tmp_path):
    process = processes.start(["-c", ENDING + ENDS[end], tmp_path], JAX_PLATFORMS="cpu")
    _, errors = process.communicate(timeout=60)
    expected = {"exit": 3, "raise": 1, "interrupted": -signal.SIGINT}
    assert process.returncode == expected.get(end, 0), errors
    assert Checkpointer(tmp_path).all_steps() == [1]
    Checkpointer(tmp_path).verify()
    message = "CheckpointError at exit, while step 2 was saved: Step 2 stays incomplete, because of"
    assert (message in errors) == (end == "not_finite")
    assert "jaxmp_writer" not in os.listdir(tmp_path)


@pytest.mark.parametrize("call", ["save", "wait", "close", "latest_step", "all_steps", "restore"])
def test_a_full_disk_is_said_by_the_next_call(call, tmp_path):
    resource = pytest.importorskip("resource")
    small = {"w": jnp.ones(2)}
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, small, recipe="fp32")
    checkpointer.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    large = np.random.default_rng(0).normal(size=2**15)
    try:
        checkpointer.save(2, {"w": large}, recipe="fp32")
        message = rf"(?s)Saving step 2 in {tmp_path} failed: .*File too large\. Complete steps: 1\."
        with pytest.raises(CheckpointError, match=message):
            {
                "save": lambda: checkpointer.save(3, small, recipe="fp32"),
                "restore": lambda: checkpointer.restore(small),
            }.get(call, getattr(checkpointer, call))()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpointer.all_steps() == [1]
    checkpointer.save(2, {"w": large}, recipe="fp32")
    checkpointer.close()
    assert sorted(os.listdir(tmp_path)) == ["2"]


def test_a_directory_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    checkpointer = save(tmp_path, {"w": jnp.ones(2)}, "fp32", step=4)
    (tmp_path / "jaxmp_writer").mkdir()  # as on a read-only disk, the lock cannot be written
    with pytest.raises(CheckpointError, match=r"step 5 in .*jaxmp_writer.*Complete steps: 4"):
        checkpointer.save(5, {"w": jnp.ones(2)}, recipe="fp32")
    checkpointer.restore({"w": jnp.zeros(2)}, recipe="fp32")


HOLDER = """
import sys, time, jax.numpy as jnp
from jaxmp.checkpoint import Checkpointer
checkpointer = Checkpointer(sys.argv[1])
checkpointer.save(1, {"w": jnp.ones(2)}, recipe="fp32")
checkpointer.wait()
print("saved", flush=True)
time.sleep(60)
"""


@EXPENSIVE
def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    holder = processes.start(["-c", HOLDER, tmp_path], JAX_PLATFORMS="cpu")
    try:
        assert holder.stdout.readline() == "saved\n"
        checkpointer, state = Checkpointer(tmp_path), {"w": jnp.zeros(2)}
        name = f"Process {holder.pid} on {re.escape(socket.gethostname())} .since 20"
        for _ in range(2):
            with pytest.raises(CheckpointError, match=name) as error:
                checkpointer.save(2, state, recipe="fp32")
        assert (checkpointer.restore(state)["w"] == 1).all()  # reading requires no lock
        # As after a crash of which a file system has not been told.
        eval(re.search(r"os.remove\(.*\)", str(error.value))[0])
        checkpointer.save(2, state, recipe="fp32")
        checkpointer.close()
    finally:
        holder.kill()
        processes.stop([holder])
    checkpointer.save(3, state, recipe="fp32")
    checkpointer.close()
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3"]


def test_the_next_save_names_the_step_that_a_killed_process_left(tmp_path, caplog):
    state = {"w": jnp.zeros(2)}
    save(tmp_path, state, "fp32")
    assert not caplog.messages
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    save(tmp_path, state, "fp32", step=3)
    (message,) = (row.message for row in caplog.records if row.name == "jaxmp.checkpoint")
    assert "saved step 2" in message and message.endswith("Complete steps: 1.")
    assert sorted(os.listdir(tmp_path)) == ["1", "3"]


def test_the_lock_of_a_killed_process_is_replaced(tmp_path):
    lock, state = tmp_path / "jaxmp_writer", {"w": jnp.zeros(2)}
    lock.write_text("Process 1 on elsewhere (since 2026-01-01 00:00:00)")
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, recipe="fp32")
    assert lock.read_text().startswith(f"Process {os.getpid()} on {socket.gethostname()} ")
    checkpointer.wait()
    # Another process removes the lock, locks the directory itself, and ends.
    lock.unlink()
    with lock.open("w") as file:
        file.write("Process 1 on elsewhere (since 2026-01-01 00:00:00)")
        file.flush()
        fcntl = pytest.importorskip("fcntl")
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"Process 1 on elsewhere .* saves"):
            checkpointer.save(2, state, recipe="fp32")
    checkpointer.save(2, state, recipe="fp32")
    checkpointer.close()
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_objects_of_one_process_may_save_into_one_directory(tmp_path):
    state = {"w": jnp.ones(2**16)}
    first, second = Checkpointer(tmp_path, keep=2), Checkpointer(tmp_path, keep=2)
    first.save(0, state, recipe="fp32")
    second.save(1, state, recipe="fp32")  # opens the directory while the first object saves
    second.wait()
    assert first.all_steps() == [0, 1]
    for step, checkpointer in enumerate((first, second, first), 2):
        checkpointer.save(step, state, recipe="fp32")
        assert checkpointer.all_steps() == [step - 1, step]
    first.close()
    second.save(5, state, recipe="fp32")
    second.close()
    assert sorted(os.listdir(tmp_path)) == ["4", "5"]


def deleted(state):
    jax.tree.map(lambda leaf: leaf.delete(), state)
    return state


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, s: Checkpointer("x", keep=0), "keep=0 is not"),
        (lambda c, s: c.save(-1, s, recipe="fp32"), "step=-1"),
        (lambda c, s: c.save(1.5, s, recipe="fp32"), "step=1.5"),
        (lambda c, s: c.save(jnp.arange(2), s, recipe="fp32"), "step=Array"),
        (lambda c, s: c.restore(s, step="1"), "step='1'"),
        (lambda c, s: Checkpointer("file:///x"), "directory='file:///x' is not a path"),
        (lambda c, s: Checkpointer(None), r"directory=None .*Checkpointer\('runs/first'\)"),
        (
            lambda c, s: c.save(1, s, recipe="fp32", extra={"a": {3: 1}}),
            "the key 3 is not a string",
        ),
        (
            lambda c, s: c.save(1, s, recipe="fp32", metrics={"loss": "low"}),
            "must map names to numbers",
        ),
        (lambda c, s: c.save(1, s, recipe="fp32", extra={"a": jnp.ones(2)}), "cannot be written"),
        (lambda c, s: c.save(1, {"a": "text"}, recipe="fp32"), "'a' .* is of type str"),
        (lambda c, s: c.save(1, {"a/b": 1, "a": {"b": 2}}, recipe="fp32"), "Rename one"),
        (lambda c, s: c.save(1, {}, recipe="fp32"), "contains no array"),
        (lambda c, s: c.save(1, jax.eval_shape(lambda: s), recipe="fp32"), "abstract state"),
        (lambda c, s: c.save(1, deleted(s), recipe="fp32"), "'a' of the state was deleted"),
        (lambda c, s: jax.jit(lambda s: c.save(1, s, recipe="fp32"))(s), "'a' of the .* is traced"),
        (lambda c, s: c.restore(s, migrate="yes"), "Allowed: False, True and 'lossy'"),
    ],
)
def test_wrong_arguments_are_refused(call, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        call(Checkpointer(tmp_path), {"a": jnp.ones(2)})
    assert not list(tmp_path.glob("[0-9]*"))


@pytest.mark.parametrize("name", ["lr=[0.1]", "a*b", "a?b", "[x", "a**b"])
def test_directories_that_orbax_reads_as_patterns_are_refused(name, tmp_path):
    with pytest.raises(CheckpointError, match="reads as a pattern") as error:
        Checkpointer(tmp_path / name).save(1, {"w": jnp.ones(2)}, recipe="fp32")
    assert not (tmp_path / name).exists()
    fixed = re.search(r"Checkpointer\('(.*)'\)", str(error.value))[1]
    assert save(fixed, {"w": jnp.ones(2)}, "fp32").all_steps() == [1]


@pytest.mark.parametrize("name", ["lr=]", "$HOME", "a{1}b", "a:b", "-x", "a#b", "ü", "a b", "100"])
def test_other_odd_directories_are_restored(name, tmp_path):
    checkpointer = save(tmp_path / name, {"w": jnp.arange(3)}, "fp32")
    assert same(checkpointer.restore({"w": jnp.zeros(3, int)}), {"w": jnp.arange(3)})


def test_a_step_whose_arrays_are_not_on_disk_replaces_no_other(tmp_path, monkeypatch):
    save(tmp_path, {"w": jnp.ones(2)}, "fp32")
    base = ocp.PyTreeCheckpointHandler
    monkeypatch.setattr(base, "finalize", lambda self, directory: None)  # merges nothing
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(2, {"w": jnp.ones(2)}, recipe="fp32")
    with pytest.raises(CheckpointError, match="did not write all arrays"):
        checkpointer.wait()
    monkeypatch.undo()
    assert Checkpointer(tmp_path).all_steps() == [1]
    Checkpointer(tmp_path).restore({"w": jnp.zeros(2)}, recipe="fp32")


def test_a_step_that_is_not_finite_replaces_no_other(tmp_path):
    good, bad = {"w": jnp.ones(2)}, {"v": jnp.ones(2), "w": jnp.array([1, jnp.inf])}
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (1, 2):
        checkpointer.save(step, good, recipe="fp32")
    message = r"Step \d stays incomplete, because of NaN or infinity in 'w'"
    finish = (
        checkpointer.wait,
        checkpointer.close,
        lambda: checkpointer.save(4, good, recipe="fp32"),
    )
    for call in finish:
        checkpointer.save(3, bad, recipe="fp32")
        with pytest.raises(CheckpointError, match=message):
            call()
        assert checkpointer.all_steps() == [1, 2]
    checkpointer.save(3, bad, recipe="fp32", allow_nonfinite=True)
    checkpointer.wait()
    assert {2, 3} <= set(checkpointer.all_steps())
    info = checkpointer.describe(3)
    assert info.nonfinite == ("w",) and "not finite  1 leaves, such as w" in str(info)
    checkpointer.save(4, good, recipe="fp32")
    checkpointer.close()
    assert checkpointer.all_steps() == [3, 4] and not checkpointer.describe(4).nonfinite
    restored = checkpointer.restore({"v": jnp.zeros(2), "w": jnp.zeros(2)}, step=3, recipe="fp32")
    assert np.isinf(restored["w"][1])


def poisoned(state, part):
    """Returns the state with a NaN in one of its leaves, and the path of this leaf."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    number = next(i for i, name in enumerate(names) if part in name and "kernel" in name)
    leaves = [leaf for _, leaf in flat]
    leaves[number] = leaves[number].at[0, 0].set(jnp.nan)
    return treedef.unflatten(leaves), names[number]


@pytest.mark.filterwarnings("ignore:.*differs from the FP32 masters")
@pytest.mark.parametrize("part", ["params/", "fp32_masters", "mu/", "average"])
def test_the_leaf_that_is_not_finite_is_named(part, tmp_path):
    state = {"train": make_state(), "average": make_state("fp32", seed=1).params}
    state, path = poisoned(state, part)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state, recipe=BF16_PARAMS)
    with pytest.raises(CheckpointError, match=f"infinity in '{path}'"):
        checkpointer.wait()
    # Marked steps can be migrated; parameters are made from the masters.
    checkpointer.save(1, state, recipe=BF16_PARAMS, allow_nonfinite=True)
    like = {"train": make_state("packed"), "average": make_state("fp32").params}
    checkpointer.restore(like, recipe=PACKED, migrate=True)
    assert checkpointer.describe().nonfinite == (path,)


@pytest.mark.parametrize("master", ["none", "fp32", "packed"])
@pytest.mark.parametrize("name", ["reduce_on_plateau", "lbfgs"])
def test_scalars_of_optimizers_may_be_infinite(name, master, tmp_path):
    inner = {
        "lbfgs": lambda rate: optax.lbfgs(rate, memory_size=2),
        "reduce_on_plateau": lambda rate: optax.chain(
            optax.adam(rate), optax.contrib.reduce_on_plateau()
        ),
    }[name]
    state = make_state("bf16_params", master, inner=inner)
    infinite = [x for x in jax.tree.leaves(state) if np.isinf(np.asarray(x, float)).any()]
    assert infinite and all(x.shape == () for x in infinite)
    checkpointer = save(tmp_path, state, BF16_PARAMS.replace(master=master))
    assert not checkpointer.describe().nonfinite
    assert same(checkpointer.restore(make_state("bf16_params", master, seed=1, inner=inner)), state)
    tx = optax.contrib.reduce_on_plateau()
    params = {"w": jnp.array(jnp.nan)}
    scalar = jaxmp.TrainState.create(apply_fn=None, params=params, tx=FP32.optimizer(tx))
    with pytest.raises(CheckpointError, match="infinity in 'params/w'"):
        save(tmp_path, scalar, FP32, step=2)


@pytest.mark.parametrize(
    "value",
    [2**63 - 1, -(2**63), 1 + 2j, np.array([1 + 2j, 3e300j]), np.arange(4, dtype=">f4")],
    ids=str,
)
def test_unusual_numbers_are_exact(value, tmp_path):
    like = np.zeros_like(value) if isinstance(value, np.ndarray) else type(value)()
    restored = save(tmp_path, {"v": value}, "fp32").restore({"v": like})["v"]
    np.testing.assert_array_equal(restored, value)
    assert type(restored) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        np.array(["a"]),
        np.array(["2020-01-01"], "datetime64[D]"),
        jnp.ones(2, "uint4"),
    ],
    ids=str,
)
def test_leaves_that_orbax_cannot_write_are_refused_by_name(value, tmp_path):
    with pytest.raises(CheckpointError, match=r"Leaf 'train/v' of the state is .*extra="):
        Checkpointer(tmp_path / "run").save(1, {"train": {"v": value}}, recipe="fp32")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------
# safetensors
# ---------------------------------------------------------------------------

SAFE_DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "bool"]


def test_parameters_in_safetensors_keep_their_dtypes(tmp_path):
    path = tmp_path / "params.safetensors"
    params = {name: {"w": jnp.arange(6).reshape(2, 3).astype(name)} for name in SAFE_DTYPES}
    save_safetensors(path, params, {"recipe": "bf16_params"})
    assert same(load_safetensors(path), params)
    assert same(load_safetensors(path, jax.tree.map(jnp.zeros_like, params)), params)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"recipe": "bf16_params"}
        tensor = file.get_tensor("bfloat16.w")
    assert tensor.dtype == ml_dtypes.bfloat16 and same(tensor, params["bfloat16"]["w"])


def test_safetensors_with_a_name_that_continues_another_are_not_nested(tmp_path):
    path = tmp_path / "params.safetensors"
    arrays = {"a": np.ones(2), "a-b": np.ones(1), "a.b": np.zeros(2)}
    safetensors.numpy.save_file(arrays, path)
    with pytest.raises(CheckpointError, match="has a parameter 'a'") as error:
        load_safetensors(path)
    assert same(eval(re.search(r"safetensors\.numpy.*\)", str(error.value))[0]), arrays)
    assert same(load_safetensors(path, arrays), arrays)


def test_safetensors_of_64_bits_are_not_narrowed(tmp_path):
    path = tmp_path / "x.safetensors"
    arrays = {"v": np.array([2**62 + 1, 2**33]), "w": np.array([1e-300, np.pi]), "s": np.array(0.1)}
    save_safetensors(path, arrays)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    for loaded in (load_safetensors(path, like) for like in (None, arrays, shapes)):
        for name, array in arrays.items():
            assert loaded[name].dtype == array.dtype
            np.testing.assert_array_equal(loaded[name], array)
            loaded[name][...] = 0  # a copy, not the file
    np.testing.assert_array_equal(load_safetensors(path)["v"], arrays["v"])


def test_safetensors_in_several_files_are_read_by_their_index(tmp_path):
    parts = {
        "one.safetensors": {"a.w": np.arange(3.0)},
        "two.safetensors": {"b.w": np.ones((2, 2))},
    }
    for file, arrays in parts.items():
        save_safetensors(tmp_path / file, {k: v.astype(np.float32) for k, v in arrays.items()})
    index = tmp_path / "model.safetensors.index.json"
    weights = {name: file for file, arrays in parts.items() for name in arrays}
    index.write_text(json.dumps({"metadata": {"total_size": 28}, "weight_map": weights}))
    loaded = load_safetensors(index)
    np.testing.assert_array_equal(loaded["a"]["w"], np.arange(3))
    assert loaded["b"]["w"].shape == (2, 2)
    index.write_text(json.dumps({"weight_map": {**weights, "c.w": "two.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'c.w' in two.safetensors"):
        load_safetensors(index)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        load_safetensors(index)


def test_safetensors_are_never_cast(tmp_path):
    path = tmp_path / "params.safetensors"
    save_safetensors(path, {"w": jnp.ones(2, jnp.bfloat16)})
    for message, call, *args in [
        (r"'w' is bfloat16.*float32.*Nothing is cast", load_safetensors, {"w": jnp.ones(2)}),
        ("no parameter 'v'", load_safetensors, {"v": jnp.ones(2)}),
        ("such as 'w'", load_safetensors, {}),
        ("'w' is int4, which safetensors", save_safetensors, {"w": jnp.ones(2, jnp.int4)}),
        (r"'w' cannot .*random\.key_data", save_safetensors, {"w": jax.random.key(0)}),
        # Other programs could not read a file with such metadata.
        ("must map strings to strings", save_safetensors, {"w": jnp.ones(2)}, {"step": 1}),
        ("Rename the parameter '__m", save_safetensors, {"__metadata__": jnp.ones(2)}),
        ("have the name 'a.b'", save_safetensors, {"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)}),
    ]:
        with pytest.raises(CheckpointError, match=message):
            call(path, *args)
    with pytest.raises(CheckpointError, match=r"none.*os\.makedirs") as error:
        save_safetensors(tmp_path / "none" / "w", {"w": jnp.ones(2)})
    exec(re.search(r"os\.makedirs\(.*\)", str(error.value))[0])
    save_safetensors(tmp_path / "none" / "w", {"w": jnp.ones(2)})
    with pytest.raises(CheckpointError, match=r"cannot be read: .*No such file"):
        load_safetensors(tmp_path / "missing")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="the data of 'w' is truncated"):
        load_safetensors(path)
    path.write_bytes(b"\xff" * 8)
    with pytest.raises(CheckpointError, match="not an intact safetensors file"):
        load_safetensors(path)


def test_safetensors_update_nnx_modules(tmp_path):
    path = tmp_path / "model.safetensors"
    model, other = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(1))
    save_safetensors(path, model)
    assert load_safetensors(path, other) is other
    assert same(other.kernel[...], model.kernel[...])


# ---------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------


def test_commands_show_and_verify(tmp_path, command):
    run = tmp_path / "run"
    save(run, make_state(), step=1, extra={"epoch": 4})
    code, shown, _ = command("checkpoint", "show", run, "--leaves")
    assert code == 0 and "recipe      bf16_params" in shown and "params/dense/kernel" in shown
    code, shown, _ = command("checkpoint", "show", run / "1", "--json", "-")
    assert code == 0 and json.loads(shown)["extra"] == {"epoch": 4}

    code, shown, _ = command("checkpoint", "verify", run, "--json", "-")
    assert code == 0 and json.loads(shown)["intact"] is True
    flip(next(path for path in data_files(run) if path.parent.name == "d"))
    code, _, error = command("checkpoint", "verify", run)
    assert code == 2 and "have changed since it was written" in error
