"""Write files for the user: create new ones, leave existing ones unless they may be replaced; all of them or none.

A new folder appears whole: it is written beside its place and renamed. Links that lead elsewhere are refused.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from verifiers.errors import ConfigError
from verifiers.storage.files import atomic_write


def write_files(
    base: Path, folder: Path, files: Mapping[str, str], replaceable: Collection[str] = ()
) -> dict[str, str]:
    """Write the files below ``folder`` that do not exist; the outcome of each: "written", "kept" or "replaced".

    ``folder`` lies in ``base``; both are created where they are missing. ``replaceable``: files that are replaced where
    they are there. *Raises* ``ConfigError`` when a file would lie outside ``base``, or cannot be written; nothing has
    changed.
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
                f"{folder} cannot be written: {error.strerror or error}. Nothing was changed.", path=str(folder)
            ) from error
        raise
    return done


def _check_places(base: Path, folder: Path, files: Iterable[str]) -> None:
    """Refuse links that lead elsewhere, and files where folders are needed (and the reverse)."""
    home = base.resolve() / folder.name
    if folder.resolve() != home:
        raise ConfigError(
            f"{folder} leads to {folder.resolve()}, outside {base}; remove the link or choose another folder with "
            "--path",
            path=str(folder),
        )
    for name in files:
        place = folder / name
        if place.resolve() != home / name:
            raise ConfigError(f"{place} leads to {place.resolve()}; remove the link first", path=str(place))
        if place.is_dir():
            raise ConfigError(f"{place} is a folder, and a file belongs there", path=str(place))
        for parent in place.parents:
            if parent.exists() and not parent.is_dir():
                raise ConfigError(f"{parent} is a file, and a folder belongs there", path=str(parent))


def _appear(folder: Path, texts: Mapping[str, str], created: list[Path]) -> None:
    """A folder that is not there: written beside its place under a hidden name, then renamed."""
    hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    created.append(hidden)
    hidden.mkdir()
    for name, text in texts.items():
        (hidden / name).parent.mkdir(parents=True, exist_ok=True)
        (hidden / name).write_text(text, encoding="utf-8", newline="\n")
    os.rename(hidden, folder)  # refuses a folder that came into being meanwhile, unless it is empty


def _fill_in(folder: Path, texts: Mapping[str, str], created: list[Path], before: dict[Path, bytes]) -> None:
    """Add to a folder that is there. A file is created only where there is none; replacing comes last."""
    places = {folder / name: text for name, text in texts.items()}
    there = [place for place in places if place.exists()]
    for place, text in places.items():
        if place in there:
            continue
        _make_folders(place.parent, created)
        with place.open("x", encoding="utf-8", newline="\n") as file:
            created.append(place)
            file.write(text)
    for place in there:
        content = place.read_bytes()
        atomic_write(place, places[place].encode())
        before[place] = content


def _make_folders(folder: Path, created: list[Path]) -> None:
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir()
        created.append(one)


def _remove(path: Path) -> None:
    """Take back what this call created; a folder that others have written into stays."""
    if path.name.endswith(".tmp") and path.name.startswith("."):
        shutil.rmtree(path, ignore_errors=True)
    elif path.is_dir():
        if not any(path.iterdir()):
            path.rmdir()
    else:
        path.unlink(missing_ok=True)
