"""Audits training steps of other projects, compiled for an accelerator: what runs in which dtype.

    python benchmarks/field_report.py CHECKOUTS --out field.json   # all steps, for an H200
    python benchmarks/field_report.py CHECKOUTS --only nanodo --target none   # the trace alone
    python benchmarks/field_report.py --markdown field.json        # tables of docs/field-report.md

CHECKOUTS is a folder of checkouts named nanodo, flax, tunix, ... Their steps are imported from
there, unedited, and audited with the shapes of their arguments: nothing is computed and no GPU is
needed (`pip install -e ".[aot]"` has the compiler). Each step is audited in a process of its own.
Steps whose checkout is missing are left out. The projects need some small packages:

    pip install ml_collections einops
    pip install --no-deps draccus typing_inspect mypy_extensions mergedeep omegaconf \\
        antlr4-python3-runtime==4.9.3 pyyaml-include aqtp qwix "haliax>=1.4.dev404,<1.4.dev500"
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"


import jaxmp
from field_steps import STEPS, Step, project
from gpu_record import versions_of
from result_file import commit_of, parser_of, table, write_result
from reviewed_findings import REVIEWED, Reviewed

TARGET = "h200"

# ---------------------------------------------------------------------------
# Findings by source line
# ---------------------------------------------------------------------------


def source_line(file: str, line: int) -> str:
    """Returns the text of a line without surrounding blanks; "" if it does not exist."""
    try:
        return Path(file).read_text("utf-8").splitlines()[line - 1].strip()
    except (OSError, IndexError):
        return ""


def relative(file: str, roots: Iterable[Path]) -> str:
    """Returns the path of a file relative to one of several folders, or its name."""
    packages = (Path(sysconfig.get_path("purelib")), *map(Path, sys.path))
    for root in (*roots, *packages):
        if file and str(root) and Path(file).is_relative_to(root):
            return str(Path(file).relative_to(root))
    return Path(file).name


def by_line(findings: Iterable[jaxmp.typing.Finding], *roots: Path) -> list[dict[str, Any]]:
    """Returns findings, merged for each check and source line.

    Args:
      findings: of an audit.
      *roots: folders that file names are made relative to.
    """
    rows: dict[Any, dict[str, Any]] = {}
    for finding in findings:
        place = relative(finding.file, roots), finding.line
        row = rows.setdefault(
            (finding.severity, finding.check, *place),
            {
                "severity": finding.severity,
                "check": finding.check,
                "file": place[0],
                "line": place[1],
                "text": source_line(finding.file, finding.line),
                "message": finding.message,
                "modules": 0,
                "count": 0,
                "flops": 0,
            },
        )
        row["modules"] += 1
        row["count"] += finding.count
        row["flops"] += finding.flops
    return list(rows.values())


def review_of(finding: dict[str, Any]) -> Reviewed | None:
    """Returns the reviewed entry that covers a finding, or None."""
    return next((entry for entry in REVIEWED if entry.covers(finding)), None)


# ---------------------------------------------------------------------------
# Auditing
# ---------------------------------------------------------------------------


def measure(step: Step, checkouts: Path, target: str | None) -> dict[str, Any]:
    """Audits one step in this process."""
    root = (checkouts / step.checkout).resolve()
    with project(step, checkouts) as module:
        made = step.make(module)
        with made.context:
            report = jaxmp.audit(
                made.fn, *made.args, recipe=made.policies, target=target, **made.kwargs
            )
    flops: Counter[str] = Counter()
    for row in report.gemms if report.gemms else report.matmuls:
        flops[" x ".join(dict.fromkeys((row.lhs, row.rhs)))] += row.flops
    attention = Counter(row.kernel for row in report.attention)
    return {
        "checkout": step.checkout,
        "source": step.source,
        "size": step.size,
        "commit": commit_of(root),
        "policies": made.policies,
        "gpu": report.gpu,
        "flops": dict(flops.most_common()),
        "fused_attention": dict(attention),
        "memory": None
        if report.memory is None
        else {
            "arguments": report.memory.arguments,
            "results": report.memory.outputs,
            "donated": report.memory.aliased,
            "temporary": report.memory.temporary,
        },
        "findings": by_line(report.findings, root),
    }


def in_own_process(step: Step, checkouts: Path, target: str | None) -> dict[str, Any]:
    """Audits one step in a separate process, because projects have modules of the same names."""
    command = [sys.executable, __file__, str(checkouts), "--step", step.name]
    command += ["--target", target or "none"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{step.name} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def steps_in(checkouts: Path, only: str = "") -> list[Step]:
    """Steps whose checkout is there."""
    chosen = (step for step in STEPS.values() if only in step.name)
    return [step for step in chosen if (checkouts / step.checkout).exists()]


# ---------------------------------------------------------------------------
# Markdown
# ---------------------------------------------------------------------------


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def share(flops: dict[str, int], wanted: Callable[[str], bool]) -> str:
    part = sum(count for dtypes, count in flops.items() if wanted(dtypes)) / sum(flops.values())
    return f"{100 * part:.1f} %"


def is_16_bit(dtypes: str) -> bool:
    return dtypes in ("bfloat16", "float16")


def overview(report: dict[str, Any]) -> str:
    """One row for each step: dtypes of matmuls, attention kernels and memory."""

    def rows() -> Iterator[list[str]]:
        for name, entry in report["steps"].items():
            memory = entry["memory"]
            true = {review.title for review in true_findings(entry)}
            yield [
                name,
                entry["commit"],
                f"{sum(entry['flops'].values()) / 1e12:.2f}",
                share(entry["flops"], is_16_bit),
                share(entry["flops"], lambda dtypes: not is_16_bit(dtypes)),
                str(sum(entry["fused_attention"].values())),
                gigabytes(memory["arguments"]) if memory else "-",
                gigabytes(memory["temporary"]) if memory else "-",
                str(len(true)),
            ]

    header = (
        "training step",
        "commit",
        "TFLOP",
        "in 16 bits",
        "in TF32",
        "fused attention kernels",
        "arguments",
        "temporary",
        "true findings",
    )
    return table(header, rows())


def true_findings(entry: dict[str, Any]) -> list[Reviewed]:
    """The reviewed entries that the findings of a step belong to, in the order of the list."""
    errors = [row for row in entry["findings"] if row["severity"] == "error"]
    return [e for e in REVIEWED if any(e.covers(row) for row in errors)]


def details(report: dict[str, Any]) -> str:
    """A section for each step: size, dtypes, memory, and each finding with cost and change."""
    parts = []
    for name, entry in report["steps"].items():
        parts.append(f"### {name}\n\n{entry['source']}, commit {entry['commit']}.")
        parts.append(f"Audited: {entry['size']}.")
        total = sum(entry["flops"].values())
        parts.append(
            table(
                ("matmul operands", "TFLOP", "share"),
                (
                    [dtypes, f"{flops / 1e12:.3g}", f"{100 * flops / total:.1f} %"]
                    for dtypes, flops in entry["flops"].items()
                ),
            )
        )
        true = true_findings(entry)
        if not true:
            parts.append("No error.")
        lines = defaultdict(list)
        for row in entry["findings"]:
            review = review_of(row)
            if review is not None and row["severity"] == "error":
                lines[review].append(row)
        for number, review in enumerate(true, start=1):
            rows = lines[review]
            places = dict.fromkeys(f"`{row['file']}:{row['line']}`" for row in rows)
            kinds = dict.fromkeys(f"`{row['check']}`" for row in rows)
            parts.append(
                f"{number}. **{review.title}** ({', '.join(kinds)}; {', '.join(places)}, "
                f"`{rows[0]['text']}`). {review.why}.\n"
                f"   *Cost:* {review.cost}\n   *Change:* {review.change}"
            )
    return "\n\n".join(parts)


# ---------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("checkouts", type=Path, nargs="?", help="folder of checkouts")
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--target", default=TARGET, help="accelerator, or none")
    parser.add_argument("--markdown", type=Path, help="JSON file to print as Markdown")
    parser.add_argument("--step", help="audits one step and prints JSON")
    args = parser.parse_args()
    target = None if args.target == "none" else args.target
    if args.markdown:
        report = json.loads(args.markdown.read_text())
        print(f"{overview(report)}\n\n{details(report)}")
        return
    if args.checkouts is None:
        parser.error("give a folder of checkouts")
    if args.step:
        row = measure(STEPS[args.step], args.checkouts, target)
        print(json.dumps(row))
        return
    steps = {}
    if args.out and args.out.exists():
        steps = json.loads(args.out.read_text())["steps"]
    for step in steps_in(args.checkouts, args.only):
        print(step.name, file=sys.stderr, flush=True)
        steps[step.name] = in_own_process(step, args.checkouts, target)
        versions = versions_of(("jax", "jaxlib", "flax", "optax", "equinox", "haliax"))
        write_result(args.out, versions=versions, target=target, steps=steps)
    print(overview({"steps": steps}))


if __name__ == "__main__":
    main()
