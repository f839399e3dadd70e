"""Writes the table of chips into docs/chips.md, from jaxmp/_core/chips.toml."""

from pathlib import Path

from jaxmp._core._targets import Target, targets

PAGE = Path(__file__).with_name("chips.md")
FORMATS = {
    "FP32": "float32",
    "TF32": "tf32",
    "BF16": "bfloat16",
    "FP16": "float16",
    "FP8": "float8_e4m3fn",
}
COLUMNS = ("target", "recipes", "device", *FORMATS, "memory", "GB/s", "link, GB/s")


def row(chip: Target) -> str:
    """Returns the row of a chip: the recipes that gain speed, TFLOP/s, GB and GB/s."""
    peaks = [chip.peak.get(dtype, 0) / 1e12 for dtype in FORMATS.values()]
    names = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
    recipes = [f"`{name}`" for name, dtype in names.items() if dtype in chip.native]
    cells = (
        f"[`{chip.name}`]({chip.source})",
        ", ".join(recipes),
        chip.kind,
        *(f"{peak:,.0f}" if peak >= 100 else f"{peak:.3g}" if peak else "" for peak in peaks),
        f"{chip.memory / 1e9:,.1f}",
        f"{chip.bandwidth / 1e9:,.0f}",
        f"{chip.link / 1e9:,.0f}" if chip.link else "",
    )
    return f"| {' | '.join(cells)} |"


def replace_table(page: str) -> str:
    """Returns the page with the table of chips."""
    lines = page.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("| target |"))
    end = next(n for n in range(first, len(lines)) if not lines[n].startswith("|"))
    table = [f"| {' | '.join(COLUMNS)} |", f"|---|---|---|{'---:|' * (len(COLUMNS) - 3)}"]
    table += map(row, targets().values())
    return "\n".join([*lines[:first], *table, *lines[end:], ""])


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text("utf-8")), "utf-8")
