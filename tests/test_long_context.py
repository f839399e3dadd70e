"""The long-context example and the attention benchmarks: figures and stopping conditions."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.image import imread

import attention_gpu
import attention_memory
import byte_gpt
import jaxmp
import long_context
from grids import EXPENSIVE
from jaxmp._core import _compat
from jaxmp._core._targets import get_target
from long_context import GIB, LongGPT, OutOfMemoryError, Point
from processes import run_script
from sources import ROOT, results_of

TINY = dict(recipe="fp32", first=512, steps=1, seconds=60.0, layers=1, width=16, heads=2)


# Adam's bias correction in optax computes `float ** int32`.
pytestmark = pytest.mark.usefixtures("standard_promotion")


# ---------------------------------------------------------------------------
# Example
# ---------------------------------------------------------------------------


@EXPENSIVE
@pytest.mark.parametrize("attention", ["blockwise", "xla"])
def test_stated_causality_computes_what_the_mask_does(attention):
    sizes = dict(layers=1, width=32, heads=2, max_length=24)
    masked, stated = byte_gpt.GPT(**sizes), LongGPT(**sizes, attention=attention)
    tokens = jax.random.randint(jax.random.key(0), (2, 24), 0, 256)
    params = jax.jit(masked.init)(jax.random.key(1), tokens)
    expected = jax.jit(masked.apply)(params, tokens)
    # One tree of parameters; FP32 sums in another order.
    np.testing.assert_allclose(jax.jit(stated.apply)(params, tokens), expected, atol=2e-5)


@pytest.mark.slow
def test_flash_goes_on_where_the_logits_of_all_pairs_do_not_fit(tmp_path, capsys):
    limit = 24 * 2**20
    runs = long_context.main(**TINY, longest=1024, memory_limit=limit / GIB, out=tmp_path)
    flash, xla = runs["blockwise"], runs["xla"]
    assert [point.length for point in flash.fit] == [512, 1024]
    assert flash.too_long is None
    # A step that does not fit is not run; the steps that run are the same training.
    assert [point.length for point in xla.fit] == [512]
    assert xla.too_long.length == 1024
    assert xla.too_long.needed > limit >= max(p.needed for p in (*flash.fit, *xla.fit))
    assert xla.too_long.seconds is None
    # Twice the text: nearly four times the memory where the logits of all pairs are most of it.
    assert xla.too_long.temporary > 3 * xla.fit[-1].temporary
    assert flash.fit[1].temporary < 2.2 * flash.fit[0].temporary
    assert all(point.seconds > 0 for point in (*flash.fit, *xla.fit))
    # FP32 sums in another order, two steps of Adam.
    assert flash.fit[0].loss == pytest.approx(xla.fit[0].loss, rel=1e-4)
    assert (tmp_path / "long_context.png").is_file()


class Recorded:
    """Simulated training: the memory doubles with the length, and a step takes one second."""

    ran: list[int]

    def __init__(self, recipe, model):
        self.length = model.max_length

    def point(self):
        return Point(self.length, self.length, self.length)

    def run(self, text, steps):
        self.ran.append(self.length)
        if self.length == 64:
            raise OutOfMemoryError
        return 1.0, 2.0


def lengthen(monkeypatch, **options):
    monkeypatch.setattr(long_context, "Training", Recorded)
    Recorded.ran = []
    options = {"longest": 128, "steps": 1, "seconds": 1e9, "limit": None} | options
    return long_context.lengthen("fp32", LongGPT(max_length=8), **options)


@EXPENSIVE
def test_lines_and_picture_of_two_kinds_of_attention(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(long_context, "Training", Recorded)
    Recorded.ran = []
    limit = 20 / GIB
    options = dict(first=8, seconds=11, memory_limit=limit, out=tmp_path)
    runs = long_context.main(**options, longest=16)
    assert runs["blockwise"].too_long is None
    assert Recorded.ran == [8, 8]  # three steps of four seconds are more than 11 at T = 16
    printed = capsys.readouterr().out
    assert "blockwise  ended at --longest" in printed
    runs = long_context.main(**options, longest=99)
    assert runs["xla"].too_long == Point(32, 32, 32)
    assert "xla  over the limit of 1.86265e-08 GiB: T       32" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["long_context.png"]
    assert imread(tmp_path / "long_context.png").shape[:2] == (506, 1210)


def test_a_device_without_memory_ends_it(monkeypatch):
    found = lengthen(monkeypatch)
    assert [point.length for point in found.fit] == [8, 16, 32]
    assert found.too_long == Point(64, 64, 64)
    assert long_context.describe_end(found, None).startswith("out of memory: T       64")


def test_what_is_over_the_limit_or_would_take_too_long_is_not_run(monkeypatch):
    assert lengthen(monkeypatch, limit=31).too_long == Point(32, 32, 32)
    assert Recorded.ran == [8, 16]
    # Two steps of a second at T = 8, so 8 seconds are expected at 16 and 32 at 32.
    found = lengthen(monkeypatch, seconds=7, longest=32)
    assert Recorded.ran == [8]
    assert [point.seconds for point in found.fit] == [1.0, None, None]


def test_only_the_end_of_memory_is_the_end_of_memory():
    with pytest.raises(OutOfMemoryError), long_context.convert_memory_errors():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte")
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"),
        long_context.convert_memory_errors(),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


# ---------------------------------------------------------------------------
# Benchmarks
# ---------------------------------------------------------------------------


@EXPENSIVE
def test_blocks_take_memory_linear_in_the_length():
    def temporary(implementation, length):
        query = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
        row = attention_memory.taken(implementation, query, "cpu")
        assert row["ran"] == implementation
        return row["temp_bytes"]

    once, twice = (temporary("blockwise", length) for length in (16384, 32768))
    # Linear, and what a pair of blocks needs; 4 if it were all pairs.
    assert 1.5 < twice / once < 2.05
    assert temporary("xla", 16384) > 10 * once


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("numbers", "error", {"out": 0.021}),
            "padded: error of out is 2.10e-02, allowed 2.00e-02",
        ),
        (("numbers", "error", {"out": float("nan")}), "padded: error of out is nan"),
        (("numbers", "ran", "xla"), "padded: xla was used, not cudnn"),
        (("masks", "finite", False), "mask keys, T 192: gradients are not finite"),
        (("speed", "ran", "blockwise"), "T 2048: blockwise was used, not cudnn"),
    ],
)
def test_what_is_wrong_is_a_failure(change, message):
    error = {"out": 0.02}
    report = {
        "numbers": [
            {"case": "padded", "ran": "cudnn", "error": error, "error_of_xla": {"out": 0.01}}
        ],
        "masks": [{"mask": "keys", "length": 192, "way": "jaxmp", "finite": True}],
        "speed": [{"length": 2048, "ran": "cudnn"}],
    }
    assert attention_gpu.failures(report, "cudnn", "cudnn") == []
    section, key, value = change
    report[section][0][key] = value
    (found,) = attention_gpu.failures(report, "cudnn", "cudnn")
    assert found.startswith(message)


def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="JAX sees no NVIDIA GPU here"):
        attention_gpu.main(longest=None, rounds=None, toy=False, out=None)


def test_the_h200_holds_nothing_of_all_pairs():
    rows = results_of("attention_memory_h200_compiled")["rows"]
    fixed = [row for row in rows if row["layout"] == "fixed" and row["implementation"] == "auto"]
    assert [row["length"] for row in fixed] == list(attention_memory.LENGTHS)
    assert {row["ran"] for row in fixed} == {"cudnn"}
    sizes = [row["temp_bytes"] for row in fixed]
    assert max(sizes) <= 1.01 * min(sizes)
    by_way = {
        name: [row for row in rows if row["implementation"] == name and row["length"] >= 4096]
        for name in ("blockwise", "xla")
    }
    memory = get_target("h200").memory
    for blocks, pairs in zip(by_way["blockwise"], by_way["xla"], strict=True):
        # A block has 1/128 of the memory, and the pass that reads it keeps a few of its size. It
        # reads operands and sums again, and the pairs that are not causal once.
        assert blocks["temp_bytes"] < memory / 30
        assert blocks["accessed"] < 1.2 * pairs["accessed"]


def test_blocks_follow_the_memory_of_a_gpu():
    def blocks(**context):
        shape = jax.ShapeDtypeStruct((16, 1024, 12, 64), jnp.bfloat16)
        attend = functools.partial(jaxmp.dot_product_attention, implementation="blockwise")
        with _compat.context(**context):
            program = str(jax.make_jaxpr(attend)(shape, shape, shape))
        return int(re.search(r"f32\[16,12,1,(\d+),\1\]", program)[1])

    assert blocks(target="cpu") == blocks(target="tpu", chip=get_target("v5e")) == 256
    assert blocks(target="gpu", chip=get_target("h200")) == 1024
    assert blocks(target="gpu", chip=get_target("l4")) == 256


@pytest.mark.slow
def test_the_rehearsal_on_a_gpu_measures_all_three(tmp_path):
    out = tmp_path / "attention.json"
    ran = run_script("benchmarks/attention_gpu.py", "--toy", "--out", out, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(out.read_text())
    assert {row["case"] for row in report["numbers"]} == set(attention_gpu.cases(64))
    assert {row["way"] for row in report["masks"]} == {"jaxmp", "jax.nn, xla"}
    assert {row["pass"] for row in report["speed"]} == set(attention_gpu.PASSES)
    assert report["versions"]["jax"] == jax.__version__
