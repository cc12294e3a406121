"""The site builds without a warning that matters, holds every page, and asks no other host for
anything."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NEEDED = ("sphinx", "myst_parser", "furo", "verifiers_trainer")


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason="needs the dependency group docs",
)
def test_the_site_builds_and_works_from_the_disk(tmp_path):
    source, site = tmp_path / "docs", tmp_path / "site"
    source.mkdir()
    for path in DOCS.rglob("*"):  # the build writes into its source; the real one stays as it is
        inside = path.relative_to(DOCS)
        if path.is_file() and not {"_site", "api", "__pycache__"} & set(inside.parts):
            (source / inside).parent.mkdir(parents=True, exist_ok=True)
            (source / inside).write_bytes(path.read_bytes())
    conf = source / "conf.py"
    conf.write_text(
        conf.read_text().replace("Path(__file__).parent.parent", f"Path({str(DOCS.parent)!r})")
    )
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(source), str(site)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    serious = [
        line
        for line in done.stderr.splitlines()
        if "/docs/" in line and "reference/api" not in line
    ]
    assert not serious, "\n".join(serious)
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).exists(), page
    assert "generate_group" in (site / "reference/api/verifiers/verifiers.html").read_text(
        encoding="utf-8"
    )
    index = (site / "index.html").read_text(encoding="utf-8")
    assert "not run:" not in (site / "getting-started.html").read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"https?://[^\"]+", index), (
        "it asks another host"
    )
