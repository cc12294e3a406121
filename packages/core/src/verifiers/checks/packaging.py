"""Whether the files that an environment opens would be in a wheel of its project.

Only for setuptools, whose wheels leave out what ``package-data`` does not name; not if a ``setup.py``,
``setup.cfg`` or ``MANIFEST.in`` may name it.
"""

from __future__ import annotations

import ast
import glob
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from verifiers.checks.report import Findings
from verifiers.environments.local_sources import PYPROJECT, read_toml, table_at
from verifiers.runtime.bounded import read_file
from verifiers.runtime.syntax import parse_python

CODE = (".py", ".pyc", ".pyi", ".toml", ".so")
ELSEWHERE = ("setup.py", "setup.cfg", "MANIFEST.in")


def check_packaging(
    loader: Callable[..., object], opened: Iterable[str], findings: Findings
) -> None:
    """Warn of each file of the loader's project that was opened and that a wheel would lack."""
    try:
        module = Path(inspect.getfile(inspect.unwrap(loader))).resolve()
    except TypeError:  # a callable without a source file
        return
    root = next((p for p in module.parents if (p / PYPROJECT).is_file()), None)
    if root is None or any((root / name).exists() for name in ELSEWHERE):
        return
    document = read_toml(root)
    backend = table_at(document, "build-system").get("build-backend", "setuptools.build_meta")
    if "project" not in document or not str(backend).startswith("setuptools"):
        return
    mentioned = _named_in_code(module, root)
    names = {file.name for file in mentioned}
    # other programs open files of the project too, above all in its virtual environment
    files = mentioned | {
        file
        for file in {Path(name).resolve() for name in opened}
        if file.name in names or (module.parent in file.parents and _is_package(module))
    }
    for file in sorted(files):
        if root not in file.parents or file.suffix in CODE or not file.is_file():
            continue
        if any(part.startswith(".") for part in file.relative_to(root).parts):
            continue
        fix = _missing(file, module, table_at(document, "tool", "setuptools"))
        if fix is not None:
            findings.warn(
                "data-file-not-in-wheel",
                f"the environment opens {file.relative_to(root)}, which a wheel of it lacks",
                str(root / PYPROJECT),
                fix,
            )


def _named_in_code(module: Path, root: Path) -> set[Path]:
    """Files that texts in the code name: what is opened at an import, which came before the check."""
    sources = sorted(module.parent.rglob("*.py")) if _is_package(module) else [module]
    texts = {
        node.value
        for source in sources
        for node in ast.walk(parse_python(read_file(source)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value
    }
    paths = [text for text in texts if len(text) < 200 and "\n" not in text and "\0" not in text]
    names = {text.rpartition("/")[2] for text in paths}
    inside = module.parent.rglob("*") if _is_package(module) else ()
    return {file for file in inside if file.name in names} | {root / text for text in paths}


def _is_package(module: Path) -> bool:
    return (module.parent / "__init__.py").is_file()


def _missing(file: Path, module: Path, setuptools: Mapping[str, object]) -> str | None:
    """How to bring ``file`` into the wheel; None if it is there."""
    folders = [p for p in file.parents if (p / "__init__.py").is_file()]
    if not folders:
        new = f"a folder {module.stem} with {module.name} as its __init__.py"
        target = module.parent if _is_package(module) else new
        return f"move it into {target}, to the code: a wheel has the files of packages alone"
    top = folders[-1].parent
    for folder in folders:
        name = ".".join(folder.relative_to(top).parts)
        if _matches(file, folder, name, setuptools.get("exclude-package-data")):
            break
        if _matches(file, folder, name, setuptools.get("package-data")):
            return None
    inside = file.relative_to(folders[0]).parent / f"*{file.suffix}"
    name = ".".join(folders[0].relative_to(top).parts)
    return f'write under [tool.setuptools.package-data]: "{name}" = ["{inside.as_posix()}"]'


def _matches(file: Path, folder: Path, name: str, patterns: object) -> bool:
    """Whether a table of package -> globs has ``file`` of the package ``name`` in ``folder``."""
    table = patterns if isinstance(patterns, dict) else {}
    listed = [*table.get(name, []), *table.get("*", []), *table.get("", [])]
    return any(
        str(file.relative_to(folder)) in glob.glob(pattern, root_dir=folder, recursive=True)
        for pattern in listed
    )
