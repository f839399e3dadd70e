"""Audits of code of other projects: the procedure, and the results in the documentation."""

import subprocess

import jax
import jax.numpy as jnp
import pytest

import false_positives
import field_report
import field_steps
from arrays import shape
from field_report import by_line
from field_steps import Audited, Step
from findings import the_only
from jaxmp import audit
from reviewed_findings import REVIEWED, Reviewed
from script_ports import imports
from sources import ROOT, results_of, text_of

PAGE = text_of("docs/field-report.md")

HERE = "tests/test_field_report.py"


def findings_of(fn, *args):
    return by_line(audit(fn, *args, recipe="bf16").findings, ROOT)


# ---------------------------------------------------------------------------
# Reviewed findings
# ---------------------------------------------------------------------------


def attend(x):
    return jax.nn.softmax(x @ x.T)


def test_an_error_that_was_not_reviewed_is_false():
    row = false_positives.compare("ours", "step", findings_of(attend, shape(64, 64)))

    assert row["true"] == []
    assert {error["check"] for error in row["false"]} == {"softmax_16bit", "rounded_output"}
    (line,) = (each for each in false_positives.false_positives([row]) if "softmax_16" in each)
    assert line.startswith(f"ours (step): softmax_16bit at {HERE}:")
    assert "return jax.nn.softmax(x @ x.T)" in line


def test_a_reviewed_fault_is_true(monkeypatch):
    entry = Reviewed(
        "Softmax", ("softmax_16bit", "rounded_output"), ((HERE, "jax.nn.softmax(x"),), "", "", ""
    )
    monkeypatch.setattr(field_report, "REVIEWED", (entry,))
    row = false_positives.compare("ours", "step", findings_of(attend, shape(64, 64)))

    assert row["false"] == [] and len(row["true"]) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"check": "loss_16bit"},
        {"file": "other.py"},
        {"text": "return jax.nn.softmax(y)"},
    ],
)
def test_an_entry_covers_its_own_check_file_and_line(change):
    entry = Reviewed("Softmax", ("softmax_16bit",), ((HERE, "softmax(x"),), "", "", "")
    (finding,) = (f for f in findings_of(attend, shape(64, 64)) if f["check"] == "softmax_16bit")

    assert entry.covers(finding)
    assert not entry.covers(finding | change)


def test_notes_are_no_faults():
    findings = findings_of(lambda x: x**2, shape(64, 64, dtype=jnp.float16))

    assert [finding["severity"] for finding in findings] == ["warning"]
    assert false_positives.compare("ours", "step", findings)["false"] == []


def test_every_entry_is_complete():
    for entry in REVIEWED:
        assert entry.checks and entry.lines and all(entry._replace(checks=("x",)))
        for text in (entry.cost, entry.change):
            assert text.endswith(".")


# ---------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------


def test_a_step_of_a_checkout(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "other_model.py").write_text(
        "import absent_logger\n"
        "import jax\n"
        "class Hook(absent_logger.hooks.Base, dict): pass\n"
        "def attend(x):\n"
        "    return jax.nn.softmax(x @ x.T)\n"
    )
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "c"]):
        subprocess.run([*git, *command], check=True)

    def make(module):
        return Audited(module("other_model").attend, (shape(64, 64),), "bf16")

    step = Step("ours", "project", ".", "other_model.py", "64", make, ("absent_logger",))
    row = field_report.measure(step, tmp_path, None)

    (error,) = (each for each in row["findings"] if each["check"] == "softmax_16bit")
    assert (error["check"], error["file"], error["line"]) == ("softmax_16bit", "other_model.py", 5)
    assert row["flops"] == {"bfloat16": 2 * 64**3} and row["memory"] is None


def test_modules_of_a_project_are_forgotten(tmp_path):
    (tmp_path / "ours.py").write_text("value = 1\n")
    with imports(tmp_path, ()) as module:
        assert module("ours").value == 1
    with pytest.raises(ModuleNotFoundError), imports(tmp_path / "other", ()) as module:
        module("ours")


def test_a_script_is_run_up_to_its_step():
    def main():
        params = jax.jit(lambda: jnp.ones((4, 4)))()

        def update(x):
            return x + 1

        jax.jit(update, donate_argnums=0)(params)

    fn, options, shapes = field_steps.captured(main, "update")
    assert fn(1) == 2 and options == {"donate_argnums": 0}
    assert [leaf.shape for leaf in shapes] == [(4, 4)]


# ---------------------------------------------------------------------------
# False errors that these audits showed
# ---------------------------------------------------------------------------


def kinds_of(fn, *args):
    return [finding.check for finding in audit(fn, *args, recipe="bf16").errors]


def test_ties_of_a_maximum_are_counted_without_a_fault():
    def loss(x, w):
        logits = x @ w
        weights = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
        return (weights @ w).astype(jnp.float32).sum()

    kinds = kinds_of(jax.grad(loss, argnums=1), shape(64, 512), shape(512, 512))
    assert "reduction_16bit" not in kinds


def test_a_count_of_true_values_is_a_fault():
    def count(x):
        return jnp.cumsum((x == x[:, :1]).astype(jnp.bfloat16), axis=-1)

    assert kinds_of(count, shape(8, 512)) == ["reduction_16bit"]


def test_inner_products_of_a_loss_are_no_matmuls():
    def loss(x, w, targets):
        logits = (x @ w).astype(jnp.float32)
        picked = jnp.einsum("bv,bv->b", logits, targets)
        return (jax.nn.logsumexp(logits, -1) - picked).mean()

    targets = shape(8, 128, dtype=jnp.float32)
    assert kinds_of(loss, shape(8, 64), shape(64, 128), targets) == ["rounded_output"]


@pytest.mark.parametrize(("layers", "level"), [(8, "warning"), (1, "error")])
def test_fp32_matmuls_of_a_small_share_are_notes(layers, level):
    def model(x, w, head):
        for _ in range(layers):
            x = x @ w
        return x.astype(jnp.float32).mean(0, keepdims=True) @ head

    args = shape(256, 256), shape(256, 256), shape(256, 1600, dtype=jnp.float32)
    report = audit(model, *args, recipe="bf16")
    finding = the_only(report.findings, "fp32_matmul")
    assert finding.severity == level


def test_noise_in_one_expression():
    def sample(x, w, noise):
        return (x @ w + x * noise).astype(jnp.bfloat16) @ w

    noise = shape(64, 64, dtype=jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        assert kinds_of(sample, shape(64, 64), shape(64, 64), noise) == []


# ---------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------


def test_the_page_shows_the_results():
    report = results_of("field_report_h200")

    assert len(report["steps"]) >= 6
    assert field_report.overview(report) in PAGE
    assert field_report.details(report) in PAGE
    assert set(report["steps"]) == set(field_steps.STEPS)


def test_no_fault_of_the_results_is_false():
    steps, errors = results_of("field_report_h200"), results_of("false_positives")

    assert errors["false"] == 0 and false_positives.false_positives(errors["audits"]) == []
    assert false_positives.markdown(errors["audits"]) in PAGE
    for name, entry in steps["steps"].items():
        assert false_positives.compare(name, "step", entry["findings"])["false"] == []
