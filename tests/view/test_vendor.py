"""The libraries that draw Markdown and formulas are the files that their script copied."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "packages/core/src/verifiers/view/static/vendor"
RECORD = json.loads((FOLDER / "versions.json").read_text())


@pytest.fixture(scope="module")
def pinned():
    namespace: dict[str, object] = {"__file__": str(ROOT / "packages/core/vendor_view.py")}
    exec((ROOT / "packages/core/vendor_view.py").read_text(), namespace)
    return namespace["PINNED"]


def differing(changed: str = "") -> list[str]:
    """The files that are not those of the record; ``changed`` is read with a byte more."""
    recorded = {name: digest for entry in RECORD for name, digest in entry["sha256"].items()}
    files = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*.*")}
    del files["versions.json"]
    found = {}
    for name, path in files.items():
        content = path.read_bytes() + (b"!" if name == changed else b"")
        found[name] = hashlib.sha256(content).hexdigest()
    return sorted(name for name, _ in recorded.items() ^ found.items())


def test_every_file_is_as_it_was_copied():
    assert differing() == []
    assert set(differing("katex.min.js")) == {"katex.min.js"}  # negative control


def test_the_record_says_the_pinned_versions_with_checksums_and_licences(pinned):
    assert {entry["package"]: entry["version"] for entry in RECORD} == pinned
    for entry in RECORD:
        assert entry["integrity"].startswith("sha512-")
        assert (FOLDER / f"LICENSE-{entry['package']}.txt").stat().st_size > 500


def test_what_the_styles_name_is_here_and_nothing_else_is_named():
    addresses = re.findall(r"url\(([^)]+)\)", (FOLDER / "katex.min.css").read_text())
    assert sorted(addresses) == sorted(f"fonts/{path.name}" for path in FOLDER.glob("fonts/*"))
    for path in FOLDER.glob("*.js"):
        assert "sourceMappingURL" not in path.read_text()
