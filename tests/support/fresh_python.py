"""A Python environment of a test's own, with this checkout's ``verifiers`` in it, for installers to
install into.

Made by uv in a quarter of a second and without a network: ``verifiers`` and what it needs are on
its path, and of the distributions an installer sees only ``verifiers``, without requirements.
Builds use this interpreter's setuptools.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import verifiers


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        return json.loads(self.out)

    @property
    def paragraph(self) -> str:
        """The error paragraph of ``vf-eval``, as one line."""
        assert "Traceback" not in self.err
        assert self.err.count("vf-eval: ") == 1, self.err
        return " ".join(self.err[self.err.index("vf-eval: ") :].split())


@dataclass(frozen=True, slots=True)
class FreshPython:
    """The environment; commands run in ``folder``."""

    venv: Path
    folder: Path
    variables: dict[str, str]

    @property
    def executable(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (folder,) = self.venv.glob("lib/python*/site-packages")
        return folder

    def run(self, *words: str | Path, cwd: Path | None = None, **variables: str) -> Ran:
        """``python words…``"""
        ran = subprocess.run(
            [self.executable, *words],
            cwd=cwd or self.folder,
            env={**self.variables, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    def command(
        self, name: str, *words: str | Path, cwd: Path | None = None, **variables: str
    ) -> Ran:
        """``vf-NAME words…``"""
        return self.run("-m", f"verifiers.cli.{name}", *words, cwd=cwd, **variables)


def needs_setuptools() -> None:
    """Skip the test where builds cannot work; asks the metadata, since importing setuptools changes
    the process."""
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    if int(version.partition(".")[0]) < 77:
        pytest.skip(f"needs setuptools 77 or newer; there is {version}")


def make_fresh_python(parent: Path) -> FreshPython:
    """A fresh environment and an empty working folder below ``parent``; skips the test where uv is
    missing."""
    if shutil.which("uv") is None:
        pytest.skip("needs uv")
    needs_setuptools()
    venv, folder = parent / "venv", parent / "work"
    folder.mkdir()
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, venv], check=True)
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("OPENAI_", "VF_", "UV_", "PIP_", "PYTHON"))
    }
    offline = {
        "UV_OFFLINE": "1",
        "UV_NO_BUILD_ISOLATION": "1",
        "UV_CACHE_DIR": str(parent / "cache"),
    }
    made = FreshPython(
        venv, folder, {**kept, **offline, "UV_LINK_MODE": "copy", "HF_HUB_OFFLINE": "1"}
    )
    paths = [
        Path(verifiers.__file__).parents[1],
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    ]
    (made.site_packages / "paths.pth").write_text(
        "".join(f"{path}\n" for path in dict.fromkeys(map(str, paths)))
    )
    version = importlib.metadata.version("verifiers")
    about = made.site_packages / f"verifiers-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    (about / "INSTALLER").write_text("test\n")
    (about / "RECORD").write_text(
        f"{about.name}/METADATA,,\n{about.name}/INSTALLER,,\n{about.name}/RECORD,,\n"
    )
    return made
