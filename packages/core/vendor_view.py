"""Copy the pinned libraries of ``vf-view``'s page out of npm into ``src/verifiers/view/static/vendor``.

The page draws Markdown by markdown-it and formulas by KaTeX, without a network. To take another
version, change it in ``PINNED`` and run ``python packages/core/vendor_view.py``; it needs npm. The
licences are copied too, those of what markdown-it's bundle contains included. ``versions.json``
records each package with npm's checksum, and the sha256 of each file; a test compares them.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent / "src/verifiers/view/static/vendor"
RECORD = "versions.json"
PINNED = {
    "markdown-it": "15.0.3",
    "katex": "0.19.1",
    # what markdown-it's bundle contains; their licences alone are copied
    "entities": "8.1.0",
    "linkify-it": "6.1.0",
    "mdurl": "2.1.0",
    "punycode.js": "2.3.1",
    "uc.micro": "3.0.0",
}
FILES = {
    "markdown-it": {"dist/browser/markdown-it.umd.min.js": "markdown-it.min.js"},
    "katex": {"dist/katex.min.js": "katex.min.js", "dist/katex.min.css": "katex.min.css"},
}
"""Package -> its file -> the name of the copy. KaTeX's fonts are copied as woff2 alone."""
_OTHER_FONTS = re.compile(rb",url\([^)]+\) format\(\"(?:woff|truetype)\"\)")
_SOURCE_MAP = re.compile(rb"\n?//# sourceMappingURL=\S+\s*$")


def main() -> None:
    """Replace the folder."""
    record = []
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary) / "vendor"
        (new / "fonts").mkdir(parents=True)
        for package, version in PINNED.items():
            record.append(_copy(package, version, Path(temporary), new))
        (new / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.copytree(new, FOLDER)


def _copy(package: str, version: str, temporary: Path, new: Path) -> dict[str, object]:
    """Copy the files of a package; returns its entry in the record."""
    pack = ["npm", "pack", "--json", "--pack-destination", str(temporary), f"{package}@{version}"]
    (about,) = json.loads(subprocess.run(pack, check=True, capture_output=True).stdout)
    members = _members(temporary / about["filename"])
    licence = next(name for name in members if name.upper().startswith("LICENSE"))
    copies = {licence: f"LICENSE-{package}.txt", **FILES.get(package, {})}
    if package == "katex":
        fonts = [name for name in members if name.endswith(".woff2")]
        copies |= {name: f"fonts/{Path(name).name}" for name in fonts}
    hashes = {}
    for source, target in sorted(copies.items(), key=lambda pair: pair[1]):
        content = _SOURCE_MAP.sub(b"\n", _OTHER_FONTS.sub(b"", members[source]))
        (new / target).write_bytes(content)
        hashes[target] = hashlib.sha256(content).hexdigest()
    about_licence = json.loads(members["package.json"])["license"]
    return {
        "package": package,
        "version": version,
        "licence": about_licence,
        "integrity": about["integrity"],
        "sha256": hashes,
    }


def _members(archive: Path) -> dict[str, bytes]:
    """The files of an npm package, by their path."""
    members = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and (file := tar.extractfile(member)) is not None:
                members[member.name.split("/", 1)[1]] = file.read()
    return members


if __name__ == "__main__":
    main()
