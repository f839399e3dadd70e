"""Limits of compiled steps over hand-written ones, at sizes that compile fast."""

import pytest

import gpt
import llama
import program
from gpu_compiler import needs_compiler

# With 1,024 features, the loss takes chunks of 1,024 rows, as the hand-written step does; 4 texts
# are two chunks.
GPT = gpt.GPT(layers=6, width=1024, heads=16, vocabulary=16000, max_length=512)
LLAMA = llama.Shape(4, 1024, 16, 8, 2048, 16384, 512, tied=True)


# optax and the hand-written steps promote dtypes and ranks.
pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")


def beyond(checks):
    return [check for check in checks if not check.is_ok]


@needs_compiler
@pytest.mark.slow
def test_the_step_of_llama_stays_within_the_limits():
    checks = list(program.check_llama(LLAMA, 4))
    assert len(checks) == 16 and not beyond(checks)


@needs_compiler
@pytest.mark.slow
def test_the_step_of_gpt_2_stays_within_the_limits():
    checks = list(program.check_gpt(GPT, 4))
    # At this width, the unrolled program has 1.031 times the kernels of the hand-written one. The
    # limit is for GPT-2 itself, whose recorded program has 1.001 times as many.
    small = [check for check in beyond(checks) if check.quantity == "kernels / hand"]
    assert len(checks) == 16 and beyond(checks) == small
    assert all(check.value <= 1.04 for check in small)


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
