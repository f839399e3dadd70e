"""Limits of compiled steps over hand-written ones, at sizes that compile fast."""

import jax
import pytest

import architectures
import gpt
import jaxmp
import llama
import program
from gpu_compiler import needs_compiler
from grids import fast_cases

# The width of GPT-2. At 1,024 features, XLA converts the bias of each `mlp_up` in a kernel of its
# own, instead of the backward kernel that recomputes GELU. 4 texts are two chunks of the loss.
GPT = gpt.GPT(layers=6, width=768, heads=12, vocabulary=16000, max_length=512)
LLAMA = llama.Shape(4, 1024, 16, 8, 2048, 16384, 512, tied=True)


# optax and the hand-written steps promote dtypes and ranks.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")


def beyond(checks):
    return [check for check in checks if not check.is_ok]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "config"), [(program.check_llama, LLAMA), (program.check_gpt, GPT)]
)
def test_steps_of_language_models_stay_within_the_limits(check, config):
    checks = list(check(config, 4))
    assert len(checks) == 16 and not beyond(checks)


def test_a_figure_beyond_its_limit_is_reported(monkeypatch, capsys):
    checks = [
        program.Check("gpt", "scanned", "bytes / hand", 1.01, 1.0),
        program.Check("gpt", "scanned", "NNX", "2 kernels", "2 kernels"),
        program.Check("gpt", "scanned", "bytes", 10, None),
    ]
    monkeypatch.setitem(program.SECTIONS, "gpt", lambda: iter(checks))
    monkeypatch.setattr("sys.argv", ["program.py", "--only", "gpt"])
    assert program.main() == 1
    assert capsys.readouterr().out.count("BEYOND") == 1
    monkeypatch.setitem(program.SECTIONS, "gpt", lambda: iter(checks[1:]))
    assert program.main() == 0


@fast_cases("ViT, 197 tokens")
@pytest.mark.parametrize("name", architectures.CASES)
def test_hand_written_models_have_the_parameters_of_the_recipe(name):
    case = architectures.CASES[name]
    (_, state, rest, *_), (_, hand, hand_rest, *_) = (
        make(case, *recipe)
        for make, recipe in (
            (architectures.make_step, (jaxmp.load_recipe("bf16"),)),
            (architectures.make_hand_step, ()),
        )
    )
    types = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert types(state.params) == types(hand[0])
    assert types(rest) == types(hand_rest)
