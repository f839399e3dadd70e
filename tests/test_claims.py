"""Measurements of claims about mixed precision, and the page of their results."""

import json

import numpy as np
import pytest

import claims
import claims_ablations
import claims_cost
import claims_precision
import jaxmp
from claims_precision import UPDATE, UPDATES, shares_of, sum_of_updates
from claims_result import NOT_MEASURED
from grids import EXPENSIVE

REPORT = json.loads(claims.RESULTS.read_text("utf-8"))
ROWS = {row["name"]: row for row in REPORT["rows"]}
TINY = dict(layers=1, width=32, heads=2, max_length=16)


# The example's loss uses optax directly.
pytestmark = pytest.mark.usefixtures("standard_promotion")


# ---------------------------------------------------------------------------
# Page and results
# ---------------------------------------------------------------------------


def test_the_page_shows_the_recorded_results():
    advice = "run python benchmarks/claims.py --page, which writes docs/claims.md from the results"
    assert claims.PAGE.read_text("utf-8") == claims.page(REPORT), advice


def test_the_results_contain_every_claim_as_it_is_stated():
    stated = [(claim.name, claim.claim, claim.reading) for claim in claims.CLAIMS]
    assert [(row["name"], row["claim"], row["reading"]) for row in REPORT["rows"]] == stated


# Their figures come from shapes and formats, so they are the same on every machine.
@pytest.mark.parametrize("name", ["formats", "fp32_baseline", "state_memory"])
def test_rows_that_do_not_depend_on_the_machine(name, capsys):
    advice = "run python benchmarks/claims.py --out benchmarks/results/claims_cpu.json"
    assert claims.measure([name]) == [ROWS[name]], advice
    assert ROWS[name]["finding"] in capsys.readouterr().out


@pytest.mark.parametrize("name", ["flash_memory", "activation_memory", "alignment"])
def test_rows_of_recorded_results(name):
    (row,) = claims.measure([name])
    advice = f"copy the row of python benchmarks/claims.py --only {name} --out FILE; then --page"
    assert row == ROWS[name], advice
    assert "compiled, nothing was run" in row["evidence"]


# ---------------------------------------------------------------------------
# Numerics
# ---------------------------------------------------------------------------


@EXPENSIVE
def test_powers_of_two_do_not_change_the_bits_of_gradients():
    result = claims_precision.power_of_two_scale(TINY)

    changed = {(row[0], row[1]): row[3] for row in result.table}
    assert {
        changed[recipe, scale] for recipe in ("fp32", "bf16") for scale in ("2^-8", "2^16")
    } == {"0.00%"}
    # The comparison can fail: other factors round again.
    assert all(float(changed[recipe, "1000"].rstrip("%")) > 10 for recipe in ("fp32", "bf16"))


@EXPENSIVE
def test_a_larger_scale_leaves_fewer_zeros(monkeypatch):
    monkeypatch.setattr(claims_precision, "SCALES", (2.0**-14, 1.0, 2.0**16))
    result = claims_precision.fp16_underflow(TINY, steps=2)

    for progress in ("0", "2"):
        rows = {row[1]: row for row in result.table if row[0] == progress}
        for column in (2, 5):  # outputs and parameters that become zero
            small, none, large = (
                float(rows[scale][column].rstrip("%")) for scale in ("2^-14", "2^0", "2^16")
            )
            assert small > none >= large


def test_shares_of_float16():
    smallest, normal = 2.0**-24, 2.0**-14
    values = np.array([0.0, smallest / 4, smallest, 0.9 * normal, normal, 1.0, 1e6], np.float32)
    assert shares_of(values, 1.0) == pytest.approx((1 / 6, 2 / 6, 1 / 6))
    assert shares_of(values, 4.0) == pytest.approx((0, 2 / 6, 1 / 6))


def test_a_parameter_stalls_without_masters():
    bf16, fp32 = "p=bf16,c=bf16,o=f32", np.float32(1)
    for _ in range(UPDATES):
        fp32 += np.float32(UPDATE)

    assert sum_of_updates("none", bf16, stochastic=False) == (1.0, 1.0)
    stored, master = sum_of_updates("fp32", bf16, stochastic=False)
    assert master == fp32
    assert abs(stored - fp32) <= 2.0**-8  # half the spacing of bfloat16


# ---------------------------------------------------------------------------
# Recorded results
# ---------------------------------------------------------------------------

HARDWARE = {"hardware": {"device": "NVIDIA H200"}, "date": "2026-01-01", "command": "python x.py"}


def test_speed_has_no_figure_before_a_gpu_has_measured_it(tmp_path, monkeypatch):
    monkeypatch.setattr(claims_cost, "RESULTS", tmp_path)
    for measure in (claims_cost.mixed_precision_speed, claims_cost.fp8_speed):
        result = measure()
        assert result.evidence == NOT_MEASURED and result.table == []
        assert "On a GPU: `python benchmarks/" in result.finding


def test_speed_names_its_baselines(tmp_path, monkeypatch):
    monkeypatch.setattr(claims_cost, "RESULTS", tmp_path)
    speeds = {"fp32": 1.0, "tf32": 4.0, "bf16": 10.0}
    rows = [
        {"recipe": name, "tokens_per_second": {"median": speed}} for name, speed in speeds.items()
    ]
    (tmp_path / "gpu_smoke-nvidia-h200.json").write_text(json.dumps(HARDWARE | {"results": rows}))

    result = claims_cost.mixed_precision_speed()
    assert "2.50 times as fast as `tf32` and 10.00 times as fast as `fp32`" in result.finding
    assert result.evidence.startswith("NVIDIA H200, 2026-01-01")


def test_speed_of_fp8_and_of_attention(tmp_path, monkeypatch):
    monkeypatch.setattr(claims_cost, "RESULTS", tmp_path)
    arms = {f"jaxmp-{name}": {"rate_over_jaxmp-bf16": 1.31} for name in ("bf16", "fp8")}
    arms["jaxmp-fp8_delayed"] = {"failed": "memory"}
    rounds = HARDWARE | {"workload": "w2", "summary": arms}
    (tmp_path / "fp8_step-w2-nvidia-h200.json").write_text(json.dumps(rounds))
    row = {"pass": "forward", "causal": True, "length": 2048, "heads": [16, 16, 64]}
    row |= {name: {"median": 0.99} for name in ("jaxmp_tflops", "direct_tflops", "ratio")}
    (tmp_path / "attention_gpu-nvidia-h200.json").write_text(
        json.dumps(HARDWARE | {"speed": [row]})
    )

    assert claims_cost.fp8_speed().table == [["NVIDIA H200", "w2", "jaxmp-fp8", "1.31"]]
    assert "0.99 times the rate" in claims_cost.flash_speed().finding


def test_bytes_of_the_state_of_a_small_model():
    params = claims_cost.decoder_shapes(layers=1, width=8, hidden=16, vocabulary=4)
    count = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8 + 2 * 4 * 8 + 8
    assert claims_cost.nbytes(params) == 4 * count
    sizes = {
        "bf16": [4, 0, 8, 4],
        "bf16_params": [2, 4, 8, 4],
        "fp16": [4, 0, 8, 4],
    }
    for name, per_parameter in sizes.items():
        measured = claims_cost.state_bytes(claims_cost.jaxmp.load_recipe(name), params)
        scalars = measured["masters"] - per_parameter[1] * count  # counters and the loss scale
        assert 0 <= scalars < 100
        measured["masters"] -= scalars
        assert list(measured.values()) == [size * count for size in per_parameter]


# ---------------------------------------------------------------------------
# Ablations
# ---------------------------------------------------------------------------


def test_the_scales_are_those_of_grad_scaler():
    result = claims_ablations.grad_scaler("..x...x.")
    assert " NOT " not in result.finding
    moved = "".join(row[4][0] for row in result.table)
    assert moved == "11011101"
    # The rule is another one with another interval.
    assert claims_ablations.grad_scaler_rule("....", interval=2)[-1] == 2.0**18


@EXPENSIVE
def test_each_plant_breaks_without_fp32_and_not_under_autocast():
    for name, _, in_half, in_fp32, in_autocast in claims_ablations.without_fp32().table:
        assert in_half.endswith("not finite") or float(in_half[:-1]) > 0.2, name
        assert float(in_fp32[:-1]) < 0.02 and float(in_autocast[:-1]) < 0.02, name


@EXPENSIVE
def test_a_scale_that_changes_in_each_step_skips_steps(monkeypatch):
    scales = {
        "doubles after 1 step": jaxmp.DynamicLossScale(growth_interval=1),
        "doubles after 2,000 steps": jaxmp.DynamicLossScale(),
    }
    monkeypatch.setattr(claims_ablations, "SCALES", scales)
    _, fast, slow = claims_ablations.scale_changes(TINY, steps=20).table
    assert int(fast[2]) > 0 and int(fast[1]) > int(slow[1]) == 0


def test_int8_loses_small_values():
    values = np.array([1.0, -1.0, 2.0**-9])
    assert claims_ablations.to_int8(values)[2] == 0
    assert claims_ablations.to_e5m2(values)[2] == claims_ablations.to_e4m3(values)[2] == 2.0**-9


def test_a_misaligned_width_moves_more_bytes():
    rows = {row[0]: row for row in claims_cost.alignment().table}
    assert float(rows["500"][2]) > 1.3 * float(rows["512"][2]) > 1.3 * float(rows["504"][2])


def test_a_price_requires_the_compiler(monkeypatch):
    def plan(*args, **options):
        raise jaxmp.errors.MissingDependencyError("no compiler")

    monkeypatch.setattr(jaxmp, "plan", plan)
    result = claims_cost.cost()
    assert result.evidence == NOT_MEASURED and "extra `aot`" in result.finding
