"""Python code where everything is installed but some packages of the project."""

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import verifiers


def without(folder: Path, *packages: str) -> Callable[..., str]:
    """A function that runs code with arguments and returns what it printed."""
    site = folder / "site-packages"
    site.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not any(package in path.name for package in packages):
            (site / path.name).symlink_to(path)
    core = Path(verifiers.__file__).parents[1]

    def run(code: str, *arguments: str, folder: str | Path = "") -> str:
        path = ":".join(map(str, [*filter(None, [folder]), site, core]))
        ended = subprocess.run(
            [sys.executable, "-S", "-c", code, *arguments],
            env={"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    return run
