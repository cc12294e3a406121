"""A folder on which the kernel mounts no overlay: it lies on two of them already, which is as many
as Linux stacks."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def without_overlay(folder: Path) -> Iterator[Path]:
    """An empty folder below ``folder``; skips where this user may not mount."""
    mounted: list[Path] = []

    def mount(kind: str, target: Path, *options: str) -> None:
        target.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", kind, kind, *options, target],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"this user may not mount: {done.stderr.strip()}")
        mounted.append(target)

    try:
        mount("tmpfs", base := folder / "base")
        (lower := base / "lowest").mkdir()
        for number in range(2):
            names = {name: base / f"{name}{number}" for name in ("upper", "work")}
            for mounted_folder in names.values():
                mounted_folder.mkdir()
            mount(
                "overlay",
                base / f"on{number}",
                "-o",
                f"lowerdir={lower},upperdir={names['upper']},workdir={names['work']}",
            )
            lower = base / f"on{number}"
        folder.chmod(0o755)
        base.chmod(0o755)
        yield lower
    finally:
        for mounted_folder in reversed(mounted):
            subprocess.run(["umount", "-l", mounted_folder], check=True)
