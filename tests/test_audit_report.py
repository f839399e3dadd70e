"""The report of an audit: short by default, readable in 80 columns, and with units."""

import dataclasses
import io
import json
import re

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import jaxmp
from byte_gpt import GPT
from jaxmp._tools.audit._report import report_sections
from jaxmp._tools.audit._rows import (
    AttentionRow,
    CollectiveRow,
    Finding,
    GemmRow,
    MatmulRow,
    MemoryRow,
)
from jaxmp._tools.report._section import fix_parts, text_lines
from language_models import byte_gpt_step

LAYERS = [f"decoder/layer_{n}/attention/query_projection" for n in range(12)]
LONG_CODE = (
    "recipe = recipe.replace(rules=[Rule('**/query_projection', 'c=f32')] + " + "x" * 60 + ")"
)
ERRORS = (
    *(
        Finding(
            check="misaligned_matmul",
            module=layer,
            primitive="dot_general",
            file="transformer_model.py",
            line=123,
            message="the width 500 is not a multiple of 8 elements, so that the matmul is padded.",
            fix="Round the width up:\n    nn.Dense(504)",
            flops=10**9,
        )
        for layer in LAYERS
    ),
    Finding(
        check="implicit_promotion",
        module="head",
        primitive="mul",
        file="transformer_model.py",
        line=77,
        message="bfloat16 meets an FP32 constant of " + "a_very_long_name_" * 5,
        fix=f"State it in the recipe:\n    if True:\n        {LONG_CODE}\nor cast the operand.",
    ),
    Finding(
        check="unused_loss_scale",
        message="the dynamic loss scale at [0].loss_scale is not used.",
        fix="loss, grads = state.value_and_grad(loss_fn)(batch)",
    ),
)
WARNINGS = (
    Finding(
        check="reduction_16bit",
        severity="warning",
        primitive="add",
        message="a sum",
        fix="add in FP32",
    ),
)
ROW = {"phase": "forward", "lhs": "bfloat16", "rhs": "bfloat16"}
REPORT = jaxmp.typing.AuditReport(
    policies="p=f32,c=bf16,o=f32",
    equations=12345,
    gpu="NVIDIA H200 141GB HBM3e (no such GPU on this machine)",
    findings=(*ERRORS, *WARNINGS),
    matmuls=tuple(
        MatmulRow(module=layer, phase=phase, lhs=dtype, rhs=dtype, flops=flops, count=3)
        for layer in LAYERS
        for phase, dtype, flops in [
            ("forward", "bfloat16", 7 * 10**9),
            ("recompute", "bfloat16", 7 * 10**9),
            ("backward", "float32", 10**4),
        ]
    ),
    gemms=tuple(
        GemmRow(module=n, out="float32", kernel="cublas", was_fp8="", flops=10**9, count=2, **ROW)
        for n in LAYERS
    ),
    memory=MemoryRow(
        arguments=10**9,
        outputs=10**9,
        aliased=10**9,
        temporary=3 * 10**8,
        parameters=10**6,
        update_bytes=26 * 10**6,
        update_floor=26 * 10**6,
    ),
    attention=(
        AttentionRow(
            module="a",
            phase="forward",
            kernel="__cudnn$fmha",
            dtype="float16",
            shape=(1,),
            count=2,
            flops=4 * 10**9,
        ),
    ),
    collectives=tuple(
        CollectiveRow(
            module=layer,
            phase="backward",
            operation="reduce-scatter",
            dtype="float32",
            bytes=4 * 10**6,
            count=12,
            file="transformer_model.py",
            line=5,
        )
        for layer in LAYERS
    ),
    notes=("pallas_call at model.py:3",),
)
SHORT = ["Precision audit", "Errors", "Fixes", "Matmuls by operand dtype"]
SHORT += ["Matmuls in the compiled program", "Memory"]
FULL = [*SHORT, "Warnings", "Suggestions", "Matmuls by module"]
FULL += ["Compiled matmuls by module", "Collectives", "Notes"]
WIDTHS = [60, 80, 100, 140]
HEALTHY = dataclasses.replace(REPORT, findings=())


def printed_by_rich(report, width, **options):
    console = Console(width=width, file=io.StringIO())
    console.print(report, **options)
    return console.file.getvalue()


# ---------------------------------------------------------------------------
# Contents and order
# ---------------------------------------------------------------------------

VIEWS = {
    "text": lambda report, full: report.to_text(full=full),
    "html": lambda report, full: re.sub(
        r"<wbr>|(?s:<style>.*</style>)", "", report.to_html(full=full)
    ),
    "rich": lambda report, full: printed_by_rich(report.to_rich(full=full), 80),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("full", "titles"), [(False, [*SHORT, "Details"]), (True, FULL)])
def test_every_view_has_the_sections_in_one_order(view, full, titles):
    text = VIEWS[view](REPORT, full)
    if view == "html":  # a page has no options of a command
        titles = [title for title in titles if title != "Details"]
        assert "--full" not in text
    starts = [text.index(title) for title in titles]
    assert starts == sorted(starts)
    assert ("Matmuls by module" in text) == full


def test_the_short_report_is_the_default():
    assert str(REPORT) == REPORT.to_text() == REPORT.to_text(full=False, width=80)
    assert REPORT.to_html() == REPORT.to_html(full=False) != REPORT.to_html(full=True)
    assert printed_by_rich(REPORT, 200) == printed_by_rich(REPORT.to_rich(), 200)


def test_the_verdict_is_first():
    lines = str(REPORT).splitlines()
    assert lines[0] == "Precision audit: 3 errors"
    assert lines[1].startswith(">99.9% of the matmul FLOPs (168 GFLOP) run in 16 bits or FP8.")
    assert str(HEALTHY).startswith("Precision audit: ok\n")
    assert "no floating-point matmuls" in str(jaxmp.typing.AuditReport())
    one = dataclasses.replace(REPORT, findings=ERRORS[-1:])
    assert str(one).startswith("Precision audit: 1 error\n")


def test_a_program_in_fp32_without_a_recipe_is_not_approved():
    x = jnp.ones((8, 8))
    loss_fn = lambda w, x: jnp.sum(x @ w)
    verdict = lambda fn, *args, **options: str(jaxmp.audit(fn, *args, **options)).splitlines()[0]
    assert verdict(jax.grad(loss_fn), x, x) == "Precision audit: FP32 training"
    assert verdict(loss_fn, x, x) == "Precision audit: FP32"
    assert verdict(loss_fn, x, x, recipe="fp32") == "Precision audit: ok"
    half = x.astype(jnp.bfloat16)
    assert verdict(lambda w: jnp.dot(half, w, preferred_element_type=jnp.float32), half).endswith(
        ": ok"
    )
    assert verdict(jnp.sin, x) == "Precision audit: ok"


def test_the_short_report_counts_the_warnings():
    assert "print 1 warning (reduction_16bit: 1)," in " ".join(str(REPORT).split())
    assert "warning" not in str(HEALTHY)


def test_json_has_everything_after_a_summary():
    fields = json.loads(REPORT.to_json())
    assert list(fields)[:3] == ["schema_version", "ok", "low_precision_share"]
    assert fields["ok"] is False
    assert {field.name for field in dataclasses.fields(REPORT)} < set(fields)
    order = [key for key in fields if key in ("findings", "matmuls", "gemms", "memory")]
    assert order == ["findings", "matmuls", "gemms", "memory"]
    assert jaxmp.typing.AuditReport.from_json(REPORT.to_json()) == REPORT
    old = {key: value for key, value in fields.items() if key not in ("ok", "low_precision_share")}
    assert jaxmp.typing.AuditReport.from_json(json.dumps(old)) == REPORT


def test_a_long_list_of_errors_is_cut_in_the_short_report():
    many = tuple(
        Finding(check="exp_16bit", file="a.py", line=line, message="m", fix="take it in FP32")
        for line in range(1, 31)
    )
    report = jaxmp.typing.AuditReport(findings=many)
    assert str(report).startswith("Precision audit: 30 errors\n")
    assert "The first 20; the full report has 10 more." in str(report)
    assert "a.py:20" in str(report) and "a.py:21" not in str(report)
    assert "a.py:30" in report.to_text(full=True)
    # One fix applies to all rows.
    assert str(report).count("take it in FP32") == 1


# ---------------------------------------------------------------------------
# Fixes
# ---------------------------------------------------------------------------


def test_fixes_are_code_below_the_table():
    for width in WIDTHS:
        text = REPORT.to_text(width=width)
        table, fixes = text[text.index("\nErrors") : text.index("\nMatmuls")].split("\nFixes\n")
        assert "nn.Dense(504)" not in table and "Rule(" not in table
        # Code is never wrapped, and the indentation of its lines is kept.
        lines = fixes.splitlines()
        assert f"            {LONG_CODE}" in lines and "        if True:" in lines
        assert "        nn.Dense(504)" in lines
        assert "        loss, grads = state.value_and_grad(loss_fn)(batch)" in lines
    assert (
        "  1 (transformer_model.py:123): Round the width up:" in fixes
        and "or cast the operand." in fixes
    )


def test_other_views_mark_code_as_code():
    page = REPORT.to_html()
    assert "<pre><code>nn.Dense(504)</code></pre>" in page
    assert LONG_CODE.replace("'", "&#x27;") in page
    # The command prints without wrapping what a rich console would wrap.
    assert LONG_CODE in printed_by_rich(REPORT.to_rich(), 80, soft_wrap=True)


@pytest.mark.parametrize(
    ("fix", "parts"),
    [
        ("cast the operand", [(False, "cast the operand")]),
        ("x = f(y)", [(True, "x = f(y)")]),
        ("a\nb:\n    x = 1\n\n    y = 2", [(False, "a b:"), (True, "x = 1\n\ny = 2")]),
        (
            "a:\n    x = 1\nor:\n    y",
            [(False, "a:"), (True, "x = 1"), (False, "or:"), (True, "y")],
        ),
        ("", []),
    ],
)
def test_a_fix_is_sentences_and_code(fix, parts):
    assert list(fix_parts(fix)) == parts


# ---------------------------------------------------------------------------
# Readable at any width
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("full", [False, True])
def test_lines_fit_and_no_column_is_squeezed(width, full):
    for line in text_lines(report_sections(REPORT, full), width):
        assert len(line.text) <= width or line.role == "code", line.text
        assert line.text == line.text.rstrip()
    text = REPORT.to_text(full=full, width=width)
    for section in report_sections(REPORT, full):
        lines = text[text.index(f"{section.title}\n") :].split("\n\n")[0].splitlines()
        dashes = next((line.split() for line in lines if line.startswith("  -")), [])
        for width_, *cells in zip(map(len, dashes), section.columns, *section.rows, strict=False):
            assert width_ >= min(14, max(map(len, cells)))


def test_nothing_wraps_where_there_is_room():
    text = REPORT.to_text(width=300)
    assert (
        "decoder/layer_*/attention/query_projection (12 modules), transformer_model.py:123  "
        in text
    )


def test_a_table_that_does_not_fit_is_a_list():
    text = REPORT.to_text(full=True, width=60)
    below = text[text.index("\nCollectives") :].splitlines()[2:6]
    assert below[0].split() == ["collective", "reduce-scatter"]
    assert below[2].split() == ["bytes", "4", "MB"]


def test_rich_prints_the_lines_of_the_text():
    for width in WIDTHS:
        shown = printed_by_rich(REPORT.to_rich(full=True), width, soft_wrap=True)
        assert [line.rstrip() for line in shown.splitlines()] == REPORT.to_text(
            full=True, width=width
        ).splitlines()


def test_every_number_has_a_unit():
    for section in report_sections(REPORT, full=True):
        for row in section.rows:
            cells = zip(section.columns, row, strict=True)
            bare = [
                cell for column, cell in cells if column != "#" and re.fullmatch(r"[\d.,]+", cell)
            ]
            assert not bare, (section.title, bare)
    text = REPORT.to_text(full=True)
    for unit in ("12,345 operations", "12 GFLOP", "8 elements", "1 GB", "bytes per parameter"):
        assert unit in text


def test_fused_attention_is_a_row_of_the_compiled_matmuls():
    text = str(REPORT)
    assert re.search(r"bfloat16 +float32 +cublas .* 12 GFLOP +75\.0%", text)
    assert re.search(r"float16 +float16 +fused attention .* 4 GFLOP +25\.0%", text)


def test_shares_are_not_rounded_to_all_or_nothing():
    text = str(REPORT)
    assert re.search(r"bfloat16 x bfloat16 .* >99\.9%", text)
    assert re.search(r"float32 x float32 .* <0\.1%", text)


# ---------------------------------------------------------------------------
# A model of 124 million parameters
# ---------------------------------------------------------------------------


def test_a_healthy_audit_fits_one_screen():
    """Of a GPT with 12 layers and the width of GPT-2."""
    model = GPT(layers=12, width=768, heads=12, max_length=1024)
    tokens = jax.ShapeDtypeStruct((8, 1025), jnp.int32)
    report = jaxmp.audit(*byte_gpt_step("linen", "bf16", model), tokens, recipe="bf16")
    lines = str(report).splitlines()
    assert report.ok and lines[0] == "Precision audit: ok"
    assert len(lines) <= 50 and max(map(len, lines)) <= 80


# ---------------------------------------------------------------------------
# Three seeded defects
# ---------------------------------------------------------------------------

# The names are those of the fixes: fn, x, logits. Comments mark the lines for the fixes.
PLANTED = """
import flax.linen as nn, jax, jax.numpy as jnp, jaxmp
model = jaxmp.load_recipe("bf16").wrap(nn.Dense(16, name="up"))
x = jnp.ones((8, 16))
params = {"model": model.init(jax.random.key(0), x), "w": jnp.ones((16, 16))}
def fn(w, x):
    return x @ w
# fp32_matmul
def loss_fn(params, inputs):
    y = model.apply(params["model"], fn(params["w"], inputs))
    x = logits = inputs.astype(jnp.bfloat16)
    x = jax.nn.softmax(x)  # softmax_16bit
    y = y * x.astype(jnp.float32)
    # loss_16bit
    return y.mean() - jax.nn.log_softmax(logits)[:, 0].astype(jnp.float32).mean()
"""


def audit_source(source):
    names = {}
    exec(source, names)
    return jaxmp.audit(jax.grad(names["loss_fn"]), names["params"], names["x"], recipe="bf16")


def pasted(source, kind, code):
    """Returns the source in which a fix replaces the line that is marked with the check id."""
    lines = source.splitlines()
    (number,) = (n for n, line in enumerate(lines) if line.endswith(f"# {kind}"))
    line = lines[number]
    indent = line[: len(line) - len(line.lstrip())]
    assigned = "x = " if line.lstrip().startswith("x = ") else ""
    lines[number : number + 1] = [indent + assigned + part for part in code]
    return "\n".join(lines)


def printed_fixes(report):
    """Returns the number of each row -> the lines of code that are printed for it."""
    fixes, number = {}, ""
    for line in str(report).split("\nFixes\n")[1].split("\n\n")[0].splitlines():
        title = re.match(r"  (\d+)[ :]", line)
        number = title[1] if title else number
        if line.startswith(" " * 8):
            fixes.setdefault(number, []).append(line[8:])
    return fixes


def test_each_printed_fix_can_be_pasted_and_removes_its_error():
    report = audit_source(PLANTED)
    kinds = list(report.counts())
    assert kinds == ["fp32_matmul", "loss_16bit", "softmax_16bit"]
    rows = re.findall(r"^  (\d+)  (\w+)", str(report), re.MULTILINE)
    fixes = printed_fixes(report)
    source = PLANTED
    for number, kind in rows:
        source = pasted(source, kind, fixes[number])
        remaining = audit_source(source).counts()
        assert kind not in remaining
    assert audit_source(source).ok
