"""The plan of training Llama on many GPUs: shardings, bytes, and compiled collectives."""

import jax
import pytest
from typer.testing import CliRunner

import llama
import plan_llama
from gpu_compiler import needs_compiler
from grids import EXPENSIVE

# The example uses optax directly.
pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.parametrize(("size", "gpus", "model"), [("llama-3-8b", 8, 1), ("llama-3-70b", 64, 8)])
def test_the_state_is_split_over_all_devices(size, gpus, model):
    _, state, tokens_BS = plan_llama.make_step("bf16_params", size, gpus, model)
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    # Scales of norms are whole.
    assert plan_llama.bytes_per_device(state.params) * gpus == pytest.approx(2 * count, rel=2e-3)
    assert plan_llama.bytes_per_device(state.opt_state) * gpus == pytest.approx(
        12 * count, rel=2e-3
    )
    assert tokens_BS.sharding.shard_shape(tokens_BS.shape) == (1, 8193)
    kernel = state.params["params"]["blocks"]["mlp_down"]["kernel"]
    layers, hidden, width = kernel.shape
    local = (layers, hidden // gpus, width) if model == 1 else (layers, hidden // 8, width // 8)
    assert kernel.sharding.shard_shape(kernel.shape) == local


@needs_compiler
@EXPENSIVE
def test_gradients_of_all_weights_are_summed_once_in_fp32(monkeypatch):
    shape = llama.Shape(3, 256, 4, 2, 512, 1024, 512)
    monkeypatch.setitem(llama.SIZES, "small", shape)
    row = plan_llama.plan("small", "bf16_params", 4, 1, 2)
    batch = 4 * 2 * (shape.max_length + 1)
    assert row["arguments"] - row["parameters"] - row["optimizer"] == pytest.approx(batch, abs=64)
    _, state, _ = plan_llama.make_step("bf16_params", "small", 4)
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    blocks = sum(leaf.size for leaf in jax.tree.leaves(state.params["params"]["blocks"]))
    assert row["sums"]["float32"] == pytest.approx(4 * count, rel=0.1)
    # In bytes: kernels of the blocks for both passes, and both tables once.
    gathered = 2 * (2 * blocks + count - blocks)
    assert row["gathers"] == {"bfloat16": pytest.approx(gathered, rel=0.2)}
    assert row["errors"] == [] and row["cpu_seconds"] > 0


def test_sizes_that_do_not_fit_are_refused():
    for options, message in (
        (["--size", "gpt2"], "--size gpt2 is none of"),
        (["--gpus", "12", "--model", "8"], "does not divide --gpus 12"),
        (["--gpus", "12", "--model", "2"], "makes 6 groups, which cannot split the width"),
        (["--out", "missing/plan.json"], "the folder missing does not exist"),
        (["--recipe", "fp61"], "Did you mean 'fp16'?"),
    ):
        app = plan_llama.typer.Typer()
        app.command()(plan_llama.main)
        ran = CliRunner().invoke(app, options)
        text = " ".join(ran.output.replace("│", " ").split())
        assert ran.exit_code == 2 and message in text
