"""`jaxmp.plan`: arguments, the search for the largest batch, rooflines, the cache, the command."""

import dataclasses
import json
import re
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

import jaxmp
from gpu_compiler import needs_compiler
from jaxmp._core._targets import get_target, with_links
from jaxmp._tools.audit._compile import Compiled
from jaxmp._tools.audit._hlo import Program as Hlo
from jaxmp._tools.audit._hlo_stats import read_program
from jaxmp._tools.audit._rows import Finding
from jaxmp._tools.plan import _programs
from jaxmp._tools.plan._bound import MEASURED, cost_of, error_of, shares_of
from jaxmp._tools.plan._programs import Candidate, relative
from jaxmp._tools.plan._report import PlanChoice, PlanRow, recommend
from jaxmp.errors import AuditError, JaxmpError, RecipeWarning, TargetError
from jaxmp.typing import AuditReport, PlanReport
from sources import results_of


def make_step(recipe, batch_size=2):
    """Returns a step of one matmul in the dtype of the recipe."""
    dtype = jaxmp.load_recipe(recipe).policies.default.compute_dtype

    def step(w, x):
        return jax.grad(lambda w: jnp.sum(jnp.dot(x.astype(dtype), w.astype(dtype)) ** 2))(w)

    w = jax.ShapeDtypeStruct((4096, 8192), jnp.float32)
    return jax.jit(step), w, jax.ShapeDtypeStruct((2048 * batch_size, 4096), jnp.float32)


# ---------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------


def never(recipe):
    raise AssertionError("nothing is computed before the arguments are checked")


GOOD = {"recipes": ["bf16"], "targets": ["v100"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipes": "bf16"}, "Write recipes=['bf16', 'fp8']"),
        ({"recipes": []}, "Write recipes=['bf16', 'fp8']"),
        ({"recipes": ["bf61"]}, "Did you mean 'bf16'?"),
        ({"targets": "h100"}, "targets=['h100']"),
        ({"targets": ["h10"]}, "Did you mean 'h100'?"),
        ({"batches": [8]}, "def never(recipe, batch_size=8):"),
        ({"batches": [0]}, "batches=[8, 16], or batches='largest'"),
        ({"batches": [True]}, "batches=[8, 16], or batches='largest'"),
        ({"batches": "large"}, "batches=[8, 16], or batches='largest'"),
        ({"batches": 8}, "batches=[8, 16], or batches='largest'"),
        ({"remat": [True]}, "def never(recipe, remat=False):"),
        ({"prices": {"h100": 2}}, "prices={'v100': 2.5}"),
        ({"prices": {"v100": "2"}}, "prices={'v100': 2.5}"),
        ({"prices": 2.0}, "prices={'v100': 2.5}, or --price v100=2.5."),
        ({"rates": {"v100": 2}}, "rates={'v100/bf16': 2.5}"),
        ({"hosts": 0}, "Write hosts=8, or --hosts 8"),
        ({"links": {"between": 100}}, "links={'within': 900e9, 'between': 100e9}"),
        ({"links": {"between": "100e9"}}, "links={'within': 900e9, 'between': 100e9}"),
        ({"links": 100e9}, "links={'within': 900e9, 'between': 100e9}"),
        ({"targets": [{"like": "v100", "memory": m} for m in (1e10, 2e10)]}, "'name': 'h100-64'"),
        ({"links": {"nvlink": 900e9}}, "--link within=900e9,between=100e9"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_computed(changes, message):
    with pytest.raises(JaxmpError) as error:
        jaxmp.plan(never, **(GOOD | changes))
    assert message in str(error.value)


def test_what_is_not_a_function_or_returns_no_step_is_refused():
    for make, problem in (
        ("run.py", "is not a callable object"),
        (lambda: None, "too many positional arguments"),
        (lambda recipe, size: None, "missing a required argument: 'size'"),
        (lambda *, recipe: None, "too many positional arguments"),
    ):
        message = rf"{problem}. Write\n    def make_step\(recipe\):"
        with pytest.raises(AuditError, match=message):
            jaxmp.plan(make, **GOOD)
    with pytest.raises(TypeError, match="return train_step, state, batch"):
        jaxmp.plan(lambda recipe: None, **GOOD)


def test_a_missing_compiler_is_an_error_before_anything_is_computed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None)
    for target, extra in (("h100", "aot"), ("v6e", "tpu-aot")):
        with pytest.raises(jaxmp.errors.MissingDependencyError, match=rf"\[{extra}\]"):
            jaxmp.plan(never, recipes=["bf16"], targets=[target])


# ---------------------------------------------------------------------------
# Chips for which no program can be compiled
# ---------------------------------------------------------------------------


def test_without_a_compiler_the_memory_is_estimated():
    report = jaxmp.plan(make_step, recipes=["bf16", "fp16"], targets=["v100"])
    wide, narrow = report.rows
    assert "bfloat16" in wide.lacking and narrow.lacking == ""
    assert narrow.fits and narrow.memory and narrow.bound is None
    assert "CUDA 13" in narrow.problem and "estimated" in narrow.problem
    (choice,) = report.choices
    assert choice.recipe == "fp16"
    text = str(report)
    assert "fp16" in text and "not compiled" in text
    assert PlanReport.from_json(report.to_json()) == report
    assert "<table" in report.to_html()


def make_unscaled(recipe):
    matmul = jaxmp.autocast(lambda w, x: jnp.sum(x @ w), recipe)
    return jax.grad(matmul), jnp.ones((4, 4)), jnp.ones((4, 4))


def test_a_program_without_a_loss_scale_is_not_recommended():
    with pytest.warns(RecipeWarning, match="without a loss scale"):
        warnings.simplefilter("default")  # shows a warning once
        report = jaxmp.plan(make_unscaled, recipes=["fp16", "fp32"], targets=["v100", "t4"])
    for choice, row in zip(report.choices, report.rows[::2], strict=True):
        assert choice.recipe == "fp32" and row.warning and row.warning in choice.reason


def test_equal_remarks_are_one_row_and_a_chip_without_a_program_comes_first():
    remark = "block_* (22 modules): attention is not fused"
    rows = [
        PlanRow(recipe=recipe, target=chip, fits=chip == "h100", fallbacks=(remark,))
        for chip in ("h100", "l4")
        for recipe in ("bf16", "fp8")
    ]
    rows[1] = dataclasses.replace(rows[1], lacking="a format")
    check = "jaxmp validate run.py:make_run --recipes bf16"
    choices = (
        PlanChoice(target="h100", recipe="bf16", reason="The reason.", check=check),
        PlanChoice(target="a100", recipe="bf16", reason="The reason.", check=check),
        PlanChoice(target="l4", reason="Nothing fits."),
    )
    report = PlanReport(function="make_step", rows=tuple(rows), choices=choices)
    text = report.to_text(width=200)
    assert text.splitlines()[0] == "Plan of make_step: nothing for l4"
    assert text.index("Nothing fits.") < text.index("The reason.")
    assert text.count(remark) == text.count(check) == 1
    assert re.search(rf"all +{re.escape(remark)}", text)
    assert re.search(r"fp8 \(h100\) +a format", text)
    assert report.to_html().count(remark) == 1


def test_layers_with_equal_remarks_are_one_remark():
    finding = Finding(check="not_fp8", severity="warning", primitive="", message="too narrow")
    findings = [dataclasses.replace(finding, module=f"block_{n}/mlp") for n in range(22)]
    report = dataclasses.replace(AuditReport(), findings=tuple(findings))
    assert _programs._fallbacks(report) == ("block_*/mlp (22 modules): too narrow",)


def test_command(command, write, tmp_path):
    file = write(
        "import jax, jax.numpy as jnp\n"
        "def make_step(recipe, batch_size=2, remat=False):\n"
        "    step = lambda w, x: jax.grad(lambda w: jnp.sum(x @ w))(w)\n"
        "    return step, jnp.ones((8, 8)), jnp.ones((batch_size, 8))\n",
        "run_plan.py",
    )
    plan = ["plan", f"{file}:make_step", "--recipes", "bf16,fp16", "--targets", "v100"]
    more = ["--batches", "2, 4", "--remat", "False, true", "--json", "plan.json"]
    more += ["--price", "v100=3.6", "--rate", "v100/bf16=1000"]
    code, out, _ = command(*plan, *more)
    assert code == 0 and "Plan of make_step" in out
    report = PlanReport.from_json((tmp_path / "plan.json").read_text())
    assert {(row.batch, row.remat) for row in report.rows} == {
        (size, form) for size in (2, 4) for form in ("False", "True")
    }
    # No program can be compiled for a V100.
    missing = "not compiled, or no bound; name measured tokens per second: --rate v100/fp16=39000"
    costs = {(row.cost, row.cost_from) for row in report.rows}
    assert costs == {(1000.0, "measured"), (None, f"no cost: {missing}")}
    for wrong, message in (
        (["--remat", "maybe"], "--remat false,true"),
        (["--remat", ""], "remat=[False, True]"),
        (["--price", "v100=2,v100=3"], "two numbers for v100"),
        (["--rate", "v100/bf16=x"], "is not a name and its number: write --rate h100/bf16=39000"),
        (["--batches", "many"], "batches=[8, 16]"),
    ):
        code, _, error = command(*plan, *wrong)
        assert code == 2 and message in error


def test_an_interrupted_plan_writes_the_programs_that_it_has(command, write, tmp_path):
    file = write(
        "import jax, jax.numpy as jnp\n"
        "def make_step(recipe):\n"
        "    if recipe.name == 'fp32': raise KeyboardInterrupt\n"
        "    return lambda w: w @ w, jnp.ones((8, 8))\n",
        "run_stopped.py",
    )
    plan = ["plan", f"{file}:make_step", "--targets", "v100", "--json", "plan.json"]
    code, _, error = command(*plan, "--recipes", "fp16, fp32")
    assert code == 130 and "Run the same command to go on" in error
    assert error.count("Interrupted") == 1
    report = PlanReport.from_json((tmp_path / "plan.json").read_text())
    assert [row.recipe for row in report.rows] == ["fp16"]
    assert command(*plan, "--recipes", "fp32")[0] == 130


# ---------------------------------------------------------------------------
# The largest batch
# ---------------------------------------------------------------------------

LIMIT = get_target("l4").memory * 3 // 4


@pytest.mark.parametrize(
    "memory",
    [
        lambda batch: LIMIT // 100 + batch * LIMIT // 37,
        lambda batch: batch * LIMIT // 1000 + 1,
        lambda batch: LIMIT // 3 + batch**2 * (LIMIT // 5000),
        lambda batch: LIMIT // 3 + -(-batch // 16) * LIMIT // 9,  # a multiple of 16 is padded
        lambda batch: batch * (LIMIT // 2 + 1),
        lambda batch: LIMIT + batch,  # nothing fits
    ],
)
def test_the_search_finds_what_trying_each_batch_finds(memory, monkeypatch):
    compiled = []

    def measure(self, batch):
        compiled.append(batch)
        row = PlanRow(recipe="bf16", target="l4", batch=batch, memory=memory(batch))
        return dataclasses.replace(row, fits=row.memory <= LIMIT)

    monkeypatch.setattr(Candidate, "measure", measure)
    program = Candidate(make_step, jaxmp.load_recipe("bf16"), get_target("l4"), None, None)
    fitting = [batch for batch in range(1, 2000) if memory(batch) <= LIMIT]
    row = program.largest()
    assert row.batch == max(fitting, default=1) and row.fits == bool(fitting)
    assert len(compiled) <= 16 and len(set(compiled)) == len(compiled)
    assert not row.fallbacks
    memory = lambda batch: LIMIT // 2
    assert program.largest().fallbacks == ("it fits, and larger batches were not tried",)


SIZES = (f"{name}_size_in_bytes" for name in ("argument", "output", "alias", "temp"))
NO_MEMORY = types.SimpleNamespace(**dict.fromkeys(SIZES, 0))

# ---------------------------------------------------------------------------
# Bounds
# ---------------------------------------------------------------------------


def row_of(recipe, bound, *, fits=True, moved=10, fp8=0, batch=None):
    return PlanRow(
        interval=(bound * 0.9, bound * 1.1) if bound and recipe != "bf16" else (),
        recipe=recipe,
        target="h100",
        batch=batch,
        fits=fits,
        bound=bound,
        bytes={"other": moved},
        flops={"bfloat16": 100 - fp8, "float8": fp8},
    )


def test_bounds_are_relative_to_the_baseline_per_example():
    rows = [row_of("fp16", 4.0, batch=4), row_of("bf16", None), row_of("bf16", 1.0, batch=2)]
    assert [row.bound for row in relative(rows, "bf16", {}, {})] == [2.0, None, 1.0]


def test_the_recommendation_names_bytes_and_formats():
    gains = recommend("h100", "bf16", [row_of("bf16", 1.0), row_of("fp8", 0.8, fp8=60)])
    assert gains.recipe == "fp8" and "0.80 (0.72 to 0.88) of that of bf16" in gains.reason
    assert gains.check == ("jaxmp validate run.py:make_run --recipes fp8 --reference-recipe bf16")
    assert not recommend("h100", "bf16", [row_of("bf16", 1.0), row_of("fp32", 0.8)]).check
    nothing = recommend("h100", "bf16", [row_of("bf16", 1.0), row_of("fp8", 1.2, moved=12, fp8=37)])
    assert nothing.recipe == "bf16"
    assert nothing.reason == (
        "fp8 gains nothing: it moves 12 B instead of 10 B, and computes 63% bfloat16, 37% float8."
    )
    little = recommend("h100", "bf16", [row_of("bf16", 1.0), row_of("fp8", 0.97)])
    assert little.recipe == "bf16" and "no clear gain, 0.97 (0.87 to 1.07)" in little.reason
    large = recommend("h100", "bf16", [row_of("bf16", 1.0), row_of("fp8", 0.8, fits=False)])
    assert large.recipe == "bf16" and "fp8 does not fit" in large.reason
    lacks = dataclasses.replace(row_of("fp8", 1.0), lacking="a format", warning="It lacks one.")
    other = recommend("h100", "bf16", [row_of("bf16", 1.0), lacks])
    assert other.reason == "fp8 computes in a format that the chip lacks."
    warned = dataclasses.replace(row_of("fp8", 0.5), warning="It has no loss scale.")
    other = recommend("h100", "bf16", [row_of("bf16", 1.0), warned])
    assert (other.recipe, other.reason) == ("bf16", "jaxmp warns of fp8: It has no loss scale.")
    only = recommend("h100", "bf16", [warned])
    assert only.recipe == "" and only.reason.endswith("warns of it: It has no loss scale.")
    none = recommend("h100", "bf16", [row_of("bf16", 1.0, fits=False)])
    assert none.recipe == "" and none.check == ""
    unknown = PlanRow(recipe="bf16", target="h100", memory=10, usable=60)
    reason = recommend("h100", "bf16", [unknown]).reason
    assert reason == "It is not known what fits: bf16 requires at least 10 B of 60 B."
    failed = PlanRow(recipe="bf16", target="h100", problem="the program calls Python (run.py:3)")
    reason = recommend("h100", "bf16", [failed]).reason
    assert reason == "No program was compiled: the program calls Python (run.py:3)."


def test_intervals_come_from_the_measured_ratios():
    cases = MEASURED["cases"]
    assert len(cases) >= 9 and all(case["source"] for case in cases)
    inside = 0
    for number, case in enumerate(cases):
        others = [*cases[:number], *cases[number + 1 :]]
        low, high = error_of(case["chip"], case["width"] < 4096, others)
        inside += low <= case["measured"] / case["bound"] <= high
    assert inside >= len(cases) - 1
    error = lambda chip, is_narrow=False: error_of(chip, is_narrow, cases)
    timed, narrow, other = error("h100"), error("h100", True), error("l4")
    assert timed[1] - timed[0] < narrow[1] - narrow[0] <= 0.26 and timed[1] < other[1]


def test_the_h100_reaches_the_shares_of_the_timed_h200():
    assert shares_of(get_target("h100")) == shares_of(get_target("h200"))
    assert shares_of(get_target("l4")) == MEASURED["shares"]["default"]


def test_prices_give_the_cost_of_a_billion_tokens():
    row = dataclasses.replace(row_of("bf16", 2.0), devices=8, tokens=1000)
    (bound,) = relative([row], "bf16", {"h100": 3.6}, {})
    # 500 tokens per second cost 8 x 3.6 / 3600 per second.
    assert bound.cost == pytest.approx(8 * 3.6 / 3600 / 500 * 1e9) and bound.cost_from == "bound"
    (timed,) = relative([row], "bf16", {"h100": 3.6}, {"h100/bf16": 250})
    assert timed.cost == pytest.approx(2 * bound.cost) and timed.cost_from == "measured"
    assert relative([row], "bf16", {"a100": 1}, {})[0].cost is None
    # A program without tokens, or without a number of devices, has a reason instead.
    for without in (dataclasses.replace(row, tokens=0), dataclasses.replace(row, devices=0)):
        rates = {} if without.devices else {"h100/bf16": 250}
        (row_,) = relative([without], "bf16", {"h100": 3.6}, rates)
        assert row_.cost is None and row_.cost_from.startswith("no cost: ")
        report = PlanReport(rows=(dataclasses.replace(row_, devices=1),))
        assert row_.cost_from in report.to_text(width=500)


HLO = """HloModule step, entry_computation_layout={()->()}

%body (state: (s32[], bf16[64,128])) -> (s32[], bf16[64,128]) {
  %state = (s32[], bf16[64,128]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %x = bf16[64,128]{1,0} get-tuple-element(%state), index=1
  %y = bf16[64,128]{1,0} tanh(%x)
  ROOT %new = (s32[], bf16[64,128]) tuple(%next, %y)
}

%condition (state.1: (s32[], bf16[64,128])) -> pred[] {
  %state.1 = (s32[], bf16[64,128]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(12)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (w: bf16[64,128], v: bf16[128,256]) -> bf16[64,256] {
  %w = bf16[64,128]{1,0} parameter(0)
  %v = bf16[128,256]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], bf16[64,128]) tuple(%zero, %w)
  %loop = (s32[], bf16[64,128]) while(%start), condition=%condition, body=%body
  %out = bf16[64,128]{1,0} get-tuple-element(%loop), index=1
  ROOT %dot = bf16[64,256]{1,0} dot(%out, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_loops_without_a_count_are_counted_by_their_condition():
    loop = next(s.instruction for s in Hlo(HLO).steps() if s.instruction.opcode == "while")
    assert Hlo(HLO).trips(loop) == 6
    assert Hlo(HLO.replace("s32[] constant(12)", "s32[] add(%i.1, %i.1)")).trips(loop) is None


def cost(text, chip="v6e"):
    return cost_of(Compiled(text, None, "", 1, False, {}, [], get_target(chip)), ())


def test_kernels_in_loops_count_once_per_iteration():
    counted = cost(HLO)
    assert counted.flops == {"bfloat16": 2 * 64 * 128 * 256}
    assert counted.bytes["matmuls"] == (64 * 128 + 128 * 256 + 64 * 256) * 2
    tanh, counters = 2 * 64 * 128 * 2, (4 + 4 + 4) + (4 + 4 + 1)
    assert counted.bytes["other"] == 6 * (tanh + counters)
    assert counted.kernels == 1 + 6 * 3


SUM = """HloModule step, entry_computation_layout={()->()}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (w: f32[1048576]) -> f32[1048576] {
  %w = f32[1048576]{0} parameter(0)
  ROOT %r = f32[1048576]{0} all-reduce(%w), replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""


def test_collectives_between_hosts_have_the_speed_of_the_network():
    pairs = get_target({"like": "h100", "domain": 2, "network": 10e9})
    run = lambda text, chip: cost_of(Compiled(text, None, "", 4, False, {}, [], chip), ()).bound
    sent = 2 * 4 * 2**20
    assert run(SUM, pairs) == pytest.approx(sent / (pairs.link / 2), rel=0.01)
    across = SUM.replace("{{0,1},{2,3}}", "{{0,2},{1,3}}")
    assert run(across, pairs) == pytest.approx(sent / (pairs.network / 2), rel=0.01)
    with pytest.raises(TargetError, match="--link between=100e9"):
        run(across, pairs._replace(network=0.0))
    assert run(across, pairs._replace(link=0.0)) == run(across, pairs)


def test_hosts_and_links_are_those_of_the_user():
    h100 = get_target("h100")
    compiled = Compiled(SUM, None, "", 4, False, {}, [], h100)
    one, two, four = (cost_of(compiled, (), hosts) for hosts in (None, 2, 4))
    assert (one.hosts, two.hosts) == (1, 2)
    assert one.bound == two.bound < four.bound
    sent = 2 * 4 * 2**20
    slow = compiled._replace(chip=with_links(h100, {"between": 20e9, "within": 200e9}))
    assert cost_of(slow, (), 2).bound == pytest.approx(sent / 100e9, rel=0.01)
    assert cost_of(slow, (), 4).bound == pytest.approx(sent / 10e9, rel=0.01)
    with pytest.raises(TargetError, match="4 devices cannot be divided evenly among hosts=3"):
        cost_of(compiled, (), 3)
    # A network that is not known has no speed.
    row = PlanRow(recipe="bf16", target="a10g", devices=2, links={"within": 64e9, "between": 0.0})
    text = PlanReport(rows=(row,)).to_text()
    assert text.rpartition("Links")[2].rpartition("2 devices")[2].split("\n")[0].split() == ["64"]


DOT = """HloModule step, entry_computation_layout={()->()}

ENTRY %main (w: f8e4m3fn[8192,8192], v: f8e4m3fn[8192,8192]) -> bf16[8192,8192] {
  %w = f8e4m3fn[8192,8192]{1,0} parameter(0)
  %v = f8e4m3fn[8192,8192]{1,0} parameter(1)
  ROOT %d = bf16[8192,8192]{1,0} dot(%w, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_a_kernel_takes_the_larger_of_the_times_of_flops_and_of_bytes():
    flops, size, chip = 2 * 8192**3, 4 * 8192**2, get_target("tpu7x")
    computing, memory = flops / (0.78 * chip.peak["float8_e4m3fn"]), size / (0.92 * chip.bandwidth)
    assert cost(DOT, "tpu7x").bound == pytest.approx(computing + 1e-6)
    slow = chip._replace(bandwidth=chip.bandwidth / 1000)
    moved = cost_of(Compiled(DOT, None, "", 1, False, {}, [], slow), ()).bound
    assert moved == pytest.approx(1000 * memory + 1e-6)


def test_fp8_without_units_for_it_counts_as_bfloat16():
    assert list(cost(DOT, "tpu7x").flops) == ["float8"]
    assert list(cost(DOT, "v6e").flops) == ["bfloat16"]


SPLASH = """HloModule step, entry_computation_layout={()->()}

ENTRY %main (q: bf16[2,4,256,64], k: bf16[2,4,512,64]) -> bf16[2,4,256,64] {
  %q = bf16[2,4,256,64]{3,2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %k = bf16[2,4,512,64]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  %mask = s8[1,1,1]{2,1,0} constant({...})
  %iota.1.q_sequence_ref = s32[256,128]{1,0} iota(), iota_dimension=0
  %splash_mha_dkv.20 = (bf16[2,4,256,64]{3,2,1,0}, f32[2,4,256,128]{3,2,1,0}) custom-call(%mask, \
%q, %k, %k, %iota.1.q_sequence_ref), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 256}"
}}, metadata={op_name="jit(step)/transpose(jvp())/jit(jaxmp_attention_splash)/pallas_call"}
  ROOT %out = bf16[2,4,256,64]{3,2,1,0} get-tuple-element(%splash_mha_dkv.20), index=0
}
""".replace("\\\n", "")


def test_kernels_of_tpus_are_read():
    compiled = Compiled(SPLASH, NO_MEMORY, "", 1, False, {}, [], get_target("v6e"))
    assert Hlo(SPLASH).entry.root.name == "out"
    (row,) = read_program(compiled, {}, (), [], []).attention
    assert (row.kernel, row.phase, row.dtype) == ("splash_mha_dkv", "backward", "bfloat16")
    # Four matmuls under a causal mask.
    assert row.flops == 4 * 2 * 2 * 4 * 256 * 512 * 64 // 2
    # The queries are in the memory of the chip, and are not read from HBM.
    keys, results = 2 * 2 * 4 * 512 * 64, 2 * 2 * 4 * 256 * 64 + 4 * 2 * 4 * 256 * 128
    assert cost(SPLASH).bytes["attention"] == 2 * keys + results + 1 + 4 * 256 * 128


def test_attention_has_its_own_rate():
    row = types.SimpleNamespace(
        flops=10**15, phase="forward", shape=(1, 32, 8192, 128), dtype="bfloat16"
    )
    h100 = get_target("h100")
    empty = Compiled(HLO, None, "", 1, False, {}, [], h100)
    base = cost_of(empty, ()).bound
    forward = cost_of(empty, [row]).bound - base
    backward = types.SimpleNamespace(**{**vars(row), "phase": "backward"})
    assert forward > 10**15 / h100.peak["bfloat16"]
    assert cost_of(empty, [backward]).bound - base > forward


# ---------------------------------------------------------------------------
# Compiled programs
# ---------------------------------------------------------------------------


@needs_compiler
def test_plans_for_gpus_that_are_not_present(tmp_path, monkeypatch):
    options = {"recipes": ["fp32", "bf16"], "targets": ["h100"], "cache": tmp_path}
    report = jaxmp.plan(make_step, **options)
    wide, narrow = report.rows
    assert report.baseline == "bf16" and narrow.bound == 1.0 and wide.bound > 1.0
    assert narrow.flops == {"bfloat16": 2 * 2 * 4096 * 4096 * 8192}
    assert wide.flops == {"tf32": 2 * 2 * 4096 * 4096 * 8192}
    assert narrow.fits and narrow.usable == get_target("h100").usable
    # Arguments and result, and the gradient of the product.
    assert narrow.memory >= 4 * (2 * 4096 * 8192 + 4096 * 4096)
    assert report.choices[0].recipe == "bf16"
    assert not re.search(r"second|\btime\b", json.dumps(report.to_dict()))

    # A second plan compiles nothing, also with other links.
    def compile_again(self, *args, **kwargs):
        raise AssertionError("the program is in the cache")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_again)
    assert jaxmp.plan(make_step, **options) == report
    linked = jaxmp.plan(make_step, **options, links={"within": 450e9})
    assert linked.rows[0].links == {"within": 450e9, "between": 100e9}
    with pytest.raises(AssertionError, match="in the cache"):
        jaxmp.plan(make_step, **(options | {"targets": ["h200"]}))
    for file in tmp_path.iterdir():
        file.write_bytes(b"damaged")
    with pytest.raises(AssertionError, match="in the cache"):
        jaxmp.plan(make_step, **options)


@needs_compiler
def test_a_recipe_that_a_chip_lacks_is_named():
    dot = jaxmp.fp8.dot_general("current")

    def make(recipe):
        if recipe.name == "bf16":
            return make_step(recipe)
        of_fp8 = lambda x, w: dot(x, w, (((1,), (0,)), ((), ())))
        is_wide = recipe.name == "bf16_params"
        x = jax.ShapeDtypeStruct((64, 64), jnp.float32 if is_wide else jnp.bfloat16)
        return of_fp8 if recipe.name == "fp8" else jnp.dot, x, x

    recipes = ["bf16", "fp8", "fp16", "bf16_params"]
    report = jaxmp.plan(make, recipes=recipes, targets=["a100"], cache=None)
    assert "load_recipe('bf16')" in report.rows[1].lacking and report.rows[1].bound < 1
    # Nor is a program recommended that does not follow its recipe.
    assert "bfloat16, but the policies require float16" in report.rows[2].warning
    assert "float32, but the policies require bfloat16" in report.rows[3].warning
    assert report.choices[0].recipe == "bf16"


@needs_compiler
def test_without_a_network_or_equal_hosts_the_memory_is_known_and_the_bound_is_not():
    devices = jax.sharding.Mesh(jax.devices()[:4], "data")
    rows = jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=rows)
    make = lambda recipe: (jax.jit(lambda x: x @ x), x)
    chip = {"like": "h100", "name": "pairs", "domain": 2, "network": 0}
    for options, problem in (
        ({"targets": [chip]}, "the network between those of 'pairs' is not known"),
        ({"targets": ["h100"], "hosts": 3}, "cannot be divided evenly among hosts=3"),
    ):
        report = jaxmp.plan(make, recipes=["bf16", "fp32"], cache=None, **options)
        row = report.rows[0]
        assert row.fits and row.memory >= 3 * 512 * 512 and row.devices == 4
        assert row.bound is None and problem in row.problem
        text = " ".join(str(report).split())
        assert "compiled without a bound" in text and "the memory fits" in text
        assert report.choices[0].recipe == "bf16"


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (jaxmp.errors.CompositionError, "FP8 begins with 8.9. Use another: recipe"),
        (jaxmp.errors.AuditError, "FP8 begins with 8.9"),
    ],
)
def test_a_program_that_raises_is_a_row_with_the_reason(error, problem):
    def make(recipe):
        raise error("FP8 begins with 8.9. Use another:\n    recipe")

    report = jaxmp.plan(make, recipes=["fp8"], targets=["v100"])
    assert report.rows[0].problem == problem and not report.choices[0].recipe


# ---------------------------------------------------------------------------
# Recorded results
# ---------------------------------------------------------------------------


def test_published_pairs_have_the_recorded_ratios():
    rows = results_of("plan_pairs")["rows"]
    wide = [row for row in rows if row["width"] >= 4096]
    assert len(wide) >= 4 and all(row["source"] for row in rows)
    assert all(abs(row["speed_over_bf16"] / row["published"] - 1) <= 0.15 for row in wide)
    for row in rows:
        if abs(row["published"] - 1) > 0.05:
            assert (row["speed_over_bf16"] > 1) == (row["published"] > 1)


def test_the_largest_batch_is_that_of_exhaustive_compilation():
    rows = results_of("plan_batches")["rows"]
    assert len(rows) == 2 and all(row["search"] == row["exhaustive"] > 1 for row in rows)
    assert all(row["compiled"] == row["exhaustive"] + 3 for row in rows)
