"""Counts the false positives of `jaxmp.audit` on models and training steps of other projects.

    python benchmarks/false_positives.py                                 # installed packages
    python benchmarks/false_positives.py CHECKOUTS                       # and checkouts
    python benchmarks/false_positives.py CHECKOUTS --out errors.json

The models of docs/compatibility.md are audited as the recipe `bf16` wraps them, and, if they have a
bfloat16 option, as their authors run them. The training steps are those of `field_report.py`. Each
error must be in the list of reviewed findings (`reviewed_findings.py`). Other errors are false
positives or not yet reviewed: they are printed, and the exit status is 1. Only traces are audited;
nothing is computed except the initial parameters of small models.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

import jaxmp
from compatibility import AUTHOR, gradient
from compatibility_models import FLAX_EXAMPLES, INSTALLED, Linen, Nnx
from field_report import by_line, in_own_process, review_of, steps_in
from result_file import parser_of, table, write_result

RECIPE = "bf16"

# ---------------------------------------------------------------------------
# Audits
# ---------------------------------------------------------------------------


def audit_gradient(built: Linen | Nnx, recipe: Any) -> jaxmp.typing.AuditReport:
    """Audits the gradient of a model, forward pass included."""
    params, outputs = built.bind(recipe)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    return jaxmp.audit(gradient(outputs), shapes, recipe=RECIPE)


def ways_of(built: Linen | Nnx) -> Iterator[tuple[str, Linen | Nnx, Any]]:
    """`(way, model, recipe)`: under the recipe, and by the author's own switch."""
    yield "recipe", built, jaxmp.load_recipe(RECIPE)
    if built.typed is not None:
        yield "author", built._replace(module=built.typed(jnp.bfloat16)), AUTHOR


def models(checkouts: Path | None) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """`(model, way, findings by line)` of the models of docs/compatibility.md."""
    made = [(model, model.make) for model in INSTALLED]
    if checkouts is not None:
        folder = checkouts / "flax" / "examples"
        made += [(model, lambda make=model.make: make(folder)) for model in FLAX_EXAMPLES]
    for model, make in made:
        try:
            built = make()
        except ModuleNotFoundError as error:
            print(f"{model.name} is left out: {error}", file=sys.stderr)
            continue
        for way, typed, recipe in ways_of(built):
            roots = () if checkouts is None else ((checkouts / "flax").resolve(),)
            yield model.name, way, by_line(audit_gradient(typed, recipe).findings, *roots)


def steps(checkouts: Path) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """`(step, way, findings by line)` of the steps of docs/field-report.md."""
    for step in steps_in(checkouts):
        yield step.name, "step", in_own_process(step, checkouts, None)["findings"]


# ---------------------------------------------------------------------------
# The comparison
# ---------------------------------------------------------------------------


def compare(name: str, way: str, findings: list[dict[str, Any]]) -> dict[str, Any]:
    """Divides the errors of an audit into true ones, by the list, and false ones."""
    errors = [finding for finding in findings if finding["severity"] == "error"]
    true = [error for error in errors if review_of(error) is not None]
    return {
        "name": name,
        "way": way,
        "true": true,
        "false": [error for error in errors if error not in true],
    }


def false_positives(rows: list[dict[str, Any]]) -> list[str]:
    """A line of text for each false error."""
    return [
        f"{row['name']} ({row['way']}): {error['check']} at {error['file']}:{error['line']}, "
        f"{error['text']!r}: {error['message']}"
        for row in rows
        for error in row["false"]
    ]


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/field-report.md."""
    by_name: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_name.setdefault(row["name"], {})[row["way"]] = row

    def cell(row: dict[str, Any] | None, level: str) -> str:
        return "-" if row is None else str(len(row[level]))

    return table(
        ("model or training step", "true: recipe", "author's bf16", "step", "false"),
        (
            [
                name,
                *(cell(ways.get(way), "true") for way in ("recipe", "author", "step")),
                str(sum(len(row["false"]) for row in ways.values())),
            ]
            for name, ways in by_name.items()
        ),
    )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("checkouts", type=Path, nargs="?", help="folder of checkouts")
    args = parser.parse_args()
    audits = list(models(args.checkouts))
    audits += [] if args.checkouts is None else list(steps(args.checkouts))
    rows = [compare(*audit) for audit in audits]
    lines = false_positives(rows)
    write_result(args.out, false=len(lines), audits=rows)
    print("\n".join([markdown(rows), *lines, f"{len(rows)} audits, {len(lines)} false errors"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
