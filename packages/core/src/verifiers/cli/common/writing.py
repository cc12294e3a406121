"""Write files for the user, all or none: create new files, and replace existing files only where
that is allowed.

A new folder is written under a temporary name and renamed. Symbolic links out of the base folder
are refused.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from verifiers.errors import ConfigError
from verifiers.runtime.bounded import read_file
from verifiers.storage.files import atomic_write


def write_files(
    base: Path, folder: Path, files: Mapping[str, str], replaceable: Collection[str] = ()
) -> dict[str, str]:
    """Write the files below ``folder`` that do not exist; returns "written", "kept" or "replaced"
    for each.

    ``folder`` lies in ``base``; both are created where they are missing. ``replaceable``: files to
    replace where they exist. *Raises* ``ConfigError`` when a file would lie outside ``base``, or
    cannot be written; then nothing has changed.
    """
    _check_places(base, folder, files)
    done = {name: "kept" if os.path.lexists(folder / name) else "written" for name in files}
    done |= {name: "replaced" for name in replaceable if done.get(name) == "kept"}
    texts = {name: text for name, text in files.items() if done[name] != "kept"}
    created: list[Path] = []
    before: dict[Path, bytes] = {}
    try:
        _make_folders(base, created)
        if os.path.lexists(folder):
            _fill_in(folder, texts, created, before)
        else:
            _appear(folder, texts, created)
    except BaseException as error:
        for path, content in before.items():
            path.write_bytes(content)
        for path in reversed(created):
            _remove(path)
        if isinstance(error, OSError):
            raise ConfigError(
                f"{folder} cannot be written: {error.strerror or error}. Nothing was changed.",
                path=str(folder),
            ) from error
        raise
    return done


def _check_places(base: Path, folder: Path, files: Iterable[str]) -> None:
    """Refuse symbolic links out of ``base``, files for folders, and folders for files."""
    home = base.resolve() / folder.name
    if folder.resolve() != home:
        raise ConfigError(
            f"{folder} links to {folder.resolve()}, outside {base}; remove the link or choose"
            " another folder with --path",
            path=str(folder),
        )
    for name in files:
        path = folder / name
        if path.resolve() != home / name:
            target = path.resolve()
            raise ConfigError(f"{path} links to {target}; remove the link first", path=str(path))
        if path.is_dir():
            raise ConfigError(f"{path} is a folder; a file must be written there", path=str(path))
        for parent in path.parents:
            if parent.exists() and not parent.is_dir():
                raise ConfigError(f"{parent} is a file; a folder is needed there", path=str(parent))


def _appear(folder: Path, texts: Mapping[str, str], created: list[Path]) -> None:
    """Create a new folder: write it beside its path under a hidden name, then rename it."""
    hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    created.append(hidden)
    hidden.mkdir()
    for name, text in texts.items():
        (hidden / name).parent.mkdir(parents=True, exist_ok=True)
        (hidden / name).write_text(text, encoding="utf-8", newline="\n")
    os.rename(hidden, folder)  # fails when another process has created a non-empty folder meanwhile


def _fill_in(
    folder: Path, texts: Mapping[str, str], created: list[Path], before: dict[Path, bytes]
) -> None:
    """Add files to an existing folder: create new files exclusively, then replace the others."""
    paths = {folder / name: text for name, text in texts.items()}
    existing = [path for path in paths if path.exists()]
    for path, text in paths.items():
        if path in existing:
            continue
        _make_folders(path.parent, created)
        with path.open("x", encoding="utf-8", newline="\n") as file:
            created.append(path)
            file.write(text)
    for path in existing:
        content = read_file(path)
        atomic_write(path, paths[path].encode())
        before[path] = content


def _make_folders(folder: Path, created: list[Path]) -> None:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir()
        created.append(path)


def _remove(path: Path) -> None:
    """Remove what this call created; a folder that another process has written into stays."""
    if path.name.endswith(".tmp") and path.name.startswith("."):
        shutil.rmtree(path, ignore_errors=True)
    elif path.is_dir():
        if not any(path.iterdir()):
            path.rmdir()
    else:
        path.unlink(missing_ok=True)
