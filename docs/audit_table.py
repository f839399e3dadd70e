"""Writes the table of checks of jaxmp/_tools/audit/_checks.py into docs/findings.md."""

from pathlib import Path

from jaxmp._tools.audit import _audit as _audit  # registers the checks
from jaxmp._tools.audit._checks import CHECKS, Check

PAGE = Path(__file__).with_name("findings.md")


def row(check: Check) -> str:
    """Returns the row of a check."""
    fix = " ".join(f"`{line.strip()}`" for line in check.fix.splitlines())
    cells = (f"`{check.id}`", check.severity, check.needs_target, check.explanation, fix)
    return f"| {' | '.join(cells)} |"


def replace_table(page: str) -> str:
    """Returns the page with the table of the registry."""
    lines = page.splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("| ")]
    first = next(number for number in rows if lines[number].startswith("| check |"))
    end = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    return "\n".join([*lines[: first + 2], *map(row, CHECKS.values()), *lines[end:], ""])


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text("utf-8")), "utf-8")
