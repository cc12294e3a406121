"""What of the host is shown inside, all of it read-only: the interpreter, the system's programs and libraries, and the
packages asked for. Nothing of a home folder, a configuration, a run or a socket.

The interpreter and the packages lie at paths of their own, the same on every host.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from verifiers.sandbox import guest
from verifiers.sandbox.host.packages import folders

PYTHON = "/opt/python"
PACKAGES = "/opt/packages"
INSIDE = "/opt/sandbox"
GUEST = Path(guest.__file__).parent
"""The package that runs inside: shown there as ``guest``."""
INTERPRETER = f"{PYTHON}/bin/python3"
SYSTEM = (
    "/usr/bin /usr/sbin /usr/lib /usr/lib64 /usr/lib32 /usr/libexec /usr/share/zoneinfo /usr/share/terminfo "
    "/etc/ld.so.cache /etc/alternatives /etc/localtime"
).split()
TOP_LEVEL = "/bin /sbin /lib /lib64 /lib32".split()


@dataclass(slots=True)
class Mounts:
    """Example: ``Mounts(shown={"/usr/bin": Path("/usr/bin")}, hidden=["/usr/lib/python3/dist-packages"])``"""

    shown: dict[str, Path] = field(default_factory=dict)
    """Place inside -> file or folder of the host."""
    links: dict[str, str] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)
    """Places inside a shown folder that are made empty."""

    def folders(self) -> list[str]:
        """Every folder above a place, outermost first."""
        places = [*self.shown, *self.links, *self.hidden]
        above = {str(folder) for place in places for folder in Path(place).parents if str(folder) != "/"}
        return sorted(folder for folder in above if not any(_is_below(folder, shown) for shown in self.shown))


def mounts(packages: tuple[str, ...]) -> Mounts:
    found = Mounts()
    for path in SYSTEM:
        if os.path.exists(path):
            found.shown[path] = Path(path).resolve()
    for path in TOP_LEVEL:
        if os.path.islink(path):
            found.links[path] = os.readlink(path)
        elif os.path.isdir(path):
            found.shown[path] = Path(path)
    found.hidden += [str(path) for path in _foreign_packages(Path("/usr/lib"))]
    _python(found)
    for name, installed in folders(packages).items():
        found.shown[f"{PACKAGES}/{name}"] = installed.resolve()
    found.shown[f"{INSIDE}/guest"] = GUEST
    return found


def _python(found: Mounts) -> None:
    """The interpreter itself, without what is installed for it."""
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    inside = f"{PYTHON}/lib/{standard.name}"
    found.shown[f"{PYTHON}/bin/{executable.name}"] = executable
    found.shown[inside] = standard
    found.hidden += [f"{inside}/{path.relative_to(standard)}" for path in _foreign_packages(standard)]
    for name in {"python", "python3"} - {executable.name}:
        found.links[f"{PYTHON}/bin/{name}"] = executable.name
    shared = Path(sysconfig.get_config_var("LIBDIR") or "") / (sysconfig.get_config_var("INSTSONAME") or "")
    if sysconfig.get_config_var("Py_ENABLE_SHARED") and shared.is_file():
        found.shown[f"{PYTHON}/lib/{shared.name}"] = shared.resolve()


def _foreign_packages(folder: Path) -> list[Path]:
    names = ("site-packages", "dist-packages")
    return [path for name in names for pattern in (name, f"python3*/{name}") for path in folder.glob(pattern)]


def _is_below(folder: str, shown: str) -> bool:
    return folder == shown or folder.startswith(f"{shown}/")
