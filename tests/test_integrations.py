"""Patches with which training frameworks train through jaxmp."""

import re

import pytest

from sources import ROOT, text_of


@pytest.mark.parametrize(
    "patch", sorted((ROOT / "examples/integrations").glob("*.patch")), ids=lambda path: path.stem
)
def test_the_page_shows_the_patch(patch):
    text = patch.read_text()
    assert text in text_of("docs/integrations.md")
    assert 0 < len(re.findall(r"^[+-](?![+-])", text, re.MULTILINE)) <= 30
