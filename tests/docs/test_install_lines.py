"""The install lines of the pages on other programs bring what their code imports, from this clone
alone."""

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs/integrations").glob("*.md"))
LINE = re.compile(r"pip install [^`\n]*-e '?packages/[^`\n]*")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_install_lines_bring_the_adapters_and_the_core_of_this_clone(page):
    lines = " ".join(LINE.findall(page.read_text()))
    if lines:
        assert "packages/core" in lines
        assert "packages/integrations" in lines
