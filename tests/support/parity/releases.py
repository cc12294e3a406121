"""The published releases in virtual environments of their own, and what the scripts give there.

    python tests/support/parity/releases.py            compare with published.json
    python tests/support/parity/releases.py --write    write it

Each environment lies in the user's cache and is built once, by uv, from the wheel of the release.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
STORED = HERE / "published.json"
RELEASES = {"0.1.5": "0.1.5.post0", "0.1.9": "0.1.9.post3", "0.1.12": "0.1.12", "0.1.14": "0.1.14"}
"""Name in the table -> version of the wheel."""


def interpreter(release: str) -> Path:
    """The Python of an environment with one release; built when it is not there."""
    base = Path(os.environ.get("VF_TEST_CACHE") or Path.home() / ".cache") / "verifiers-tests"
    folder = base / f"published-{RELEASES[release]}"
    if not folder.exists():
        making = folder.with_suffix(".making")
        shutil.rmtree(making, ignore_errors=True)
        subprocess.run(
            ["uv", "venv", "--quiet", "--relocatable", "--python", sys.executable, str(making)],
            check=True,
        )
        install = ["uv", "pip", "install", "--quiet", "--python", str(making / "bin" / "python")]
        subprocess.run([*install, f"verifiers=={RELEASES[release]}", "math-verify"], check=True)
        making.rename(folder)
    return folder / "bin" / "python"


def values(release: str) -> dict:
    """What every script gives under a release, by the name of the script."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "values.json")
        command = [str(interpreter(release)), "-W", "ignore", str(HERE / "play.py"), str(file)]
        variables = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        subprocess.run(
            command, check=True, cwd=folder, env=variables, capture_output=True, timeout=600
        )
        return json.loads(file.read_text(encoding="utf-8"))


def main(write: bool) -> int:
    """Compare every release with the stored values, or store them; the number of differing scripts
    as exit status."""
    by_release = {release: values(release) for release in RELEASES}
    scripts = sorted({name for by_script in by_release.values() for name in by_script})
    table = {
        name: {
            release: by_release[release][name]
            for release in RELEASES
            if name in by_release[release]
        }
        for name in scripts
    }
    if write:
        STORED.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    different = [name for name in sorted({*table, *stored}) if table.get(name) != stored.get(name)]
    for name in different:
        print(f"{name}: stored {stored.get(name)}, found {table.get(name)}")
    return min(len(different), 100)


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
