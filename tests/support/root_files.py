"""A small root file system: the host's shell and a few programs with their libraries, and files
that the host lacks."""

import re
import shutil
import subprocess
from pathlib import Path

PROGRAMS = (
    "bash sh env cat ls mkdir rm rmdir mv cp touch chmod find tar tail readlink grep id ln echo"
    " sleep mkfifo stat dirname basename"
)
MARK = "small root 1.0"
"""Text of ``/etc/mark``, which no host has."""


def write_root(folder: Path, without=()) -> Path:
    """Write it, without some programs."""
    files = [
        Path(path)
        for name in PROGRAMS.split()
        if name not in without and (path := shutil.which(name))
    ]
    linked = subprocess.run(["ldd", *files], capture_output=True, text=True, check=True).stdout
    for name in ("usr/bin", "usr/lib", "usr/lib64", "etc", "tmp", "var"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    for file in files:
        shutil.copy(file, folder / "usr/bin" / file.name)
    for library in sorted(set(re.findall(r"(/\S+\.so\S*) \(", linked))):
        target = folder / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    (folder / "etc/mark").write_text(f"{MARK}\n")
    (folder / "etc/old").mkdir()
    (folder / "etc/old/file").write_text("old\n")
    (folder / "var/run").symlink_to("/run")
    return folder
