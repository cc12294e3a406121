"""Host files that are visible inside, all read-only: the interpreter, system programs and
libraries, and the requested packages. No home folder, configuration, run folder or socket.

The interpreter and the packages have fixed paths inside, the same on every host.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from verifiers.errors import ConfigError
from verifiers.sandbox import guest
from verifiers.sandbox.guest import launch
from verifiers.sandbox.host.packages import folders

PYTHON = "/opt/python"
LIBRARIES = f"{PYTHON}/lib"
PACKAGES = "/opt/packages"
INSIDE = "/opt/sandbox"
GUEST = Path(guest.__file__).parent
"""Folder of the package that runs inside, where it is named ``guest``."""
INTERPRETER = f"{PYTHON}/bin/python3"
ENVIRONMENT = {
    "PATH": f"{PYTHON}/bin:/usr/bin:/bin",
    "HOME": "/sandbox/home",
    "TMPDIR": "/tmp",
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    "PYTHONPATH": PACKAGES,
    "PYTHONDONTWRITEBYTECODE": "1",
    "MALLOC_ARENA_MAX": (
        "1"
    ),  # address space is limited, and each further arena reserves 64 MB of it
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
FILES = {
    "/etc/passwd": (
        f"root:x:0:0::/:/bin/false\nsandbox:x:{launch.UID}:{launch.UID}::/sandbox/home:/bin/bash\n"
    ),
    "/etc/group": f"root:x:0:\nsandbox:x:{launch.UID}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
"""Files that replace those of the host: path inside -> text."""
RUN_GUEST = (
    "import sys; sys.path[0] = {path!r}; from guest.{module} import main; del sys.path[0]; main()"
)
"""Python code that runs ``main`` of a module of the guest package, in folder ``path``."""
SYSTEM = (
    "/usr/bin /usr/sbin /usr/lib /usr/lib64 /usr/lib32 /usr/libexec /usr/share/zoneinfo"
    " /usr/share/terminfo /etc/ld.so.cache /etc/alternatives /etc/localtime"
).split()
IMAGE = f"{INSIDE}/image"
"""Where the outer sandbox has the root file system of ``SandboxSpec.root``."""
HOST = f"{INSIDE}/host"
"""Where the host's libraries are beside an image, for the interpreter and nothing else."""
IMAGE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": "",
}
"""Variables of the code in an image, whose programs come first, before those that the image itself
sets."""
TOP_LEVEL = "/bin /sbin /lib /lib64 /lib32".split()


@dataclass(slots=True)
class Mounts:
    """Mounts of a sandbox.

    Example: ``Mounts(visible={"/usr/bin": Path("/usr/bin")},
    hidden=["/usr/lib/python3/dist-packages"])``
    """

    visible: dict[str, Path] = field(default_factory=dict)
    """Path inside -> file or folder of the host."""
    links: dict[str, str] = field(default_factory=dict)
    """Path inside of a symbolic link -> its target."""
    hidden: list[str] = field(default_factory=list)
    """Paths below a visible folder over which an empty folder is mounted."""

    def folders(self) -> list[str]:
        """Parent folders that must exist for these paths, outermost first."""
        paths = [*self.visible, *self.links, *self.hidden]
        above = {
            str(folder) for path in paths for folder in Path(path).parents if str(folder) != "/"
        }
        return sorted(
            folder
            for folder in above
            if not any(_is_below(folder, mounted) for mounted in self.visible)
        )


def mounts(packages: tuple[str, ...], further: tuple[tuple[str, str], ...] = ()) -> Mounts:
    """The mounts of a sandbox with these packages, and ``further`` mounts: (path inside, path of
    the host).

    *Raises* ConfigError for a package that is not installed, and for a path of the host that does
    not exist.
    """
    result = Mounts()
    for path in SYSTEM:
        if os.path.exists(path):
            result.visible[path] = Path(path).resolve()
    for path in TOP_LEVEL:
        if os.path.islink(path):
            result.links[path] = os.readlink(path)
        elif os.path.isdir(path):
            result.visible[path] = Path(path)
    result.hidden += [str(path) for path in _installed_packages(Path("/usr/lib"))]
    _add_python(result)
    for name, installed in folders(packages).items():
        result.visible[f"{PACKAGES}/{name}"] = installed.resolve()
    result.visible[f"{INSIDE}/guest"] = GUEST
    for inside, outside in further:
        if not os.path.exists(outside):
            raise ConfigError(
                f"The sandbox is to mount {outside}, which does not exist", path=outside
            )
        result.visible[inside] = Path(outside).resolve()
    return result


def _add_python(result: Mounts) -> None:
    """The interpreter and its standard library, without installed packages."""
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    standard = Path(sysconfig.get_path("stdlib")).resolve()
    inside = f"{PYTHON}/lib/{standard.name}"
    result.visible[f"{PYTHON}/bin/{executable.name}"] = executable
    result.visible[inside] = standard
    result.hidden += [
        f"{inside}/{path.relative_to(standard)}" for path in _installed_packages(standard)
    ]
    for name in {"python", "python3"} - {executable.name}:
        result.links[f"{PYTHON}/bin/{name}"] = executable.name
    shared = _shared_library()
    if shared is not None:
        result.visible[f"{LIBRARIES}/{shared.name}"] = shared.resolve()


def variables() -> dict[str, str]:
    """The variables of the code: ``ENVIRONMENT``, and where the interpreter finds its own library
    if it has any.

    The path that is compiled into it is a path of the host; elsewhere it would load the system's
    library of that name.
    """
    return ENVIRONMENT | ({} if _shared_library() is None else {"LD_LIBRARY_PATH": LIBRARIES})


def host_libraries() -> tuple[tuple[str, str], ...]:
    """Mounts, (path inside, path of the host), of the libraries that the interpreter needs beside
    an image."""
    return tuple((f"{HOST}{folder}", folder) for folder in _library_folders())


def interpreter(has_image: bool) -> list[str]:
    """The first words of a command that runs this interpreter inside, also beside an image with
    another C library."""
    if not has_image:
        return [INTERPRETER]
    loader = next((path for path in _loaded() if path.name.startswith("ld-")), None)
    if loader is None:  # linked statically
        return [INTERPRETER]
    folders = [LIBRARIES, *(f"{HOST}{folder}" for folder in _library_folders())]
    return [f"{HOST}{loader}", "--library-path", ":".join(folders), INTERPRETER]


def _library_folders() -> list[str]:
    return sorted(
        {
            str(path.parent)
            for path in _loaded()
            if path.is_relative_to("/usr") or path.parts[1] == "lib"
        }
    )


def _loaded() -> list[Path]:
    """The shared libraries that this process has loaded, of them the loader itself."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = {Path(line.split(maxsplit=5)[-1].strip()) for line in file if ".so" in line}
    return sorted(path for path in paths if path.is_file())


def _shared_library() -> Path | None:
    """The library of an interpreter that was built as a shared library."""
    path = Path(sysconfig.get_config_var("LIBDIR") or "") / (
        sysconfig.get_config_var("INSTSONAME") or ""
    )
    return path if sysconfig.get_config_var("Py_ENABLE_SHARED") and path.is_file() else None


def _installed_packages(folder: Path) -> list[Path]:
    names = ("site-packages", "dist-packages")
    return [
        path
        for name in names
        for pattern in (name, f"python3*/{name}")
        for path in folder.glob(pattern)
    ]


def is_system(path: str) -> bool:
    """Whether every sandbox has this file of the host at the same path."""
    return any(_is_below(path, folder) for folder in (*SYSTEM, *TOP_LEVEL))


def _is_below(folder: str, parent: str) -> bool:
    return folder == parent or folder.startswith(f"{parent}/")
