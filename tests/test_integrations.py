"""Patches with which training frameworks train through jaxmp."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "patch", sorted((ROOT / "examples/integrations").glob("*.patch")), ids=lambda path: path.stem
)
def test_the_page_shows_the_patch(patch):
    text = patch.read_text()
    assert text in (ROOT / "docs/integrations.md").read_text()
    assert 0 < len(re.findall(r"^[+-](?![+-])", text, re.MULTILINE)) <= 30
