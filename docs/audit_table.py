"""Writes the table of checks into docs/audit.md, from the registry in jaxmp/_audit/_checks.py."""

from pathlib import Path

from jaxmp._audit import _checks

PAGE = Path(__file__).with_name("audit.md")


def replace_table(page: str) -> str:
    """Returns the page with the table of the registry."""
    lines = page.splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("| ")]
    first = next(number for number in rows if lines[number].startswith("| check |"))
    end = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    return "\n".join([*lines[:first], _checks.documentation_table(), *lines[end:], ""])


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text("utf-8")), "utf-8")
