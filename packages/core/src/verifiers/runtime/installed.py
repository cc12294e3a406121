"""Entry points of the installed distributions, also where the metadata of some is damaged.

A distribution that cannot be read costs its own entry points only, and is returned with the reason.
What was read is kept until a metadata file changes: asking for the times of files is faster than
reading hundreds of them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.runtime.distributions import HEAVY_NAMES, NAMES, PARTS, provided
from verifiers.runtime.install_lines import install_line

if TYPE_CHECKING:
    from importlib_metadata import Distribution, EntryPoint

_FOLDER_NAME = re.compile(r"-|\.(?:dist|egg)-info$")
_BLANK_LINE = re.compile(r"^\r?\n", re.MULTILINE)
_FILES = ("entry_points.txt", "METADATA", "PKG-INFO")
_YOUNG_NS = 50_000_000
"""A file of this age may be written once more without a change of its time: the clock of a file
system ticks."""


@dataclass(frozen=True, slots=True)
class Broken:
    """An entry point that cannot be used; ``name`` is "" when its distribution's list cannot be
    read."""

    name: str
    path: str
    """The metadata folder of the distribution."""
    reason: str


_read: dict[str, tuple[list[object], list[tuple[EntryPoint, Distribution] | Broken]]] = {}
"""By group: the state of the metadata files, and what they said."""


def entry_points(
    group: str, distributions: Iterable[object] | None = None
) -> Iterator[tuple[EntryPoint, Distribution] | Broken]:
    """The entry points of a group with their distributions (the first, for a distribution on the
    path twice), or what is broken.

    ``distributions``: those to read instead of the installed distributions.
    """
    if distributions is not None:
        return _of_each(group, distributions)
    state = _state()
    before = _read.get(group)
    if before is not None and before[0] == state:
        return iter(before[1])
    points = _installed(group)
    if state is not None:
        _read[group] = state, points
    return iter(points)


def part(name: str, label: str = "", group: str = PARTS) -> Any:
    """What another distribution provides by an entry point.

    ``label`` is what a message calls it.

    *Raises* ConfigError with the command that installs the distribution when it is not there.
    """
    value = part_or_none(name, group)
    if value is None:
        raise ConfigError(not_installed(name, label or name, group), key=name)
    return value


def part_or_none(name: str, group: str) -> Any:
    """``part``; None when no installed distribution has it.

    A distribution of this project is also found where its metadata does not say so: run from its
    source folder, or installed in place before the name was added.
    """
    from importlib.metadata import EntryPoint  # late: it imports email

    points = (entry[0] for entry in entry_points(group) if not isinstance(entry, Broken))
    values = {point.name: point.value for point in reversed([*points])}  # the first of a name
    recorded = provided(group).get(name)
    if recorded is not None and not _is_there(recorded.package):
        return None
    value = values.get(name) or (recorded.value if recorded is not None else None)
    return None if value is None else EntryPoint(name, value, group).load()


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        return False


def not_installed(name: str, label: str, group: str) -> str:
    """Say which distribution has it, and how to install that."""
    recorded = provided(group).get(name)
    if recorded is None:
        return f"{label} is in no installed distribution (entry point {name!r} of {group})"
    line = install_line(recorded.distribution, recorded.extra)
    return f"{label} is in {recorded.distribution}, which is not installed: {line}"


def public_name(name: str) -> object:
    """``vf.NAME`` of another distribution. *Raises* AttributeError that says how to install it."""
    group = NAMES if name in provided(NAMES) else HEAVY_NAMES
    try:
        return part(name, f"vf.{name}", group)
    except ConfigError as error:
        raise AttributeError(str(error)) from None


def headers(distribution: Distribution) -> Mapping[str, str]:
    """The headers of a distribution's metadata, ``Name`` and ``Version`` among them; empty if it
    has none.

    Each use of importlib's ``name``, ``version`` and ``metadata`` parses the whole file, with the
    README that it ends in: two hundred packages take a third of a second.
    """
    from email.parser import HeaderParser

    # the last: an old file of an egg
    texts = (distribution.read_text(name) for name in ("METADATA", "PKG-INFO", ""))
    text = next(filter(None, texts), "")
    pairs = HeaderParser().parsestr(_BLANK_LINE.split(text, maxsplit=1)[0]).items()
    return dict(reversed(pairs))  # the first of a name that stands there twice


def _state() -> list[object] | None:
    """What differs once an installed distribution has changed; None if that cannot be told."""
    import importlib_metadata

    state: list[object] = []
    newest = 0
    for distribution in importlib_metadata.distributions():
        path = getattr(distribution, "_path", None)
        if not isinstance(path, Path):  # in an archive, or found by an import hook
            return None
        state.append(str(path))
        for name in _FILES:
            try:
                file = os.stat(f"{path}{os.sep}{name}")
            except OSError:
                state.append(None)
            else:
                state.append((file.st_ino, file.st_size, file.st_mtime_ns))
                newest = max(newest, file.st_mtime_ns)
    return state if time.time_ns() - newest > _YOUNG_NS else None


def _installed(group: str) -> list[tuple[EntryPoint, Distribution] | Broken]:
    import importlib_metadata

    try:
        entries = list(importlib_metadata.entry_points(group=group))
    except Exception:  # noqa: BLE001  a bad distribution fails the whole list: each is read alone
        return list(_of_each(group, importlib_metadata.distributions()))
    return [_checked(entry, entry.dist) for entry in entries if entry.dist is not None]


def _of_each(
    group: str, distributions: Iterable[Any]
) -> Iterator[tuple[EntryPoint, Distribution] | Broken]:
    seen: set[str] = set()
    for distribution in distributions:
        path = _path_of(distribution)
        name = _FOLDER_NAME.split(os.path.basename(path), maxsplit=1)[0].lower().replace(".", "_")
        if name in seen:
            continue
        seen.add(name)
        try:
            entries = [entry for entry in distribution.entry_points if entry.group == group]
        except Exception as error:  # noqa: BLE001  whatever damaged metadata raises is the reason
            if group in _listed(distribution):
                yield Broken("", path, f"its entry_points.txt cannot be read: {_text(error)}")
            continue
        yield from (_checked(entry, distribution) for entry in entries)


def _checked(
    entry: EntryPoint, distribution: Distribution
) -> tuple[EntryPoint, Distribution] | Broken:
    """The entry point, or why it cannot be used."""
    path = _path_of(distribution)
    try:
        about = headers(distribution)
        if not about.get("Name") or not about.get("Version"):
            return Broken(entry.name, path, "its METADATA has no name or no version")
    except Exception as error:  # noqa: BLE001  as above
        return Broken(entry.name, path, f"its METADATA cannot be read: {_text(error)}")
    try:
        is_named = all(
            part.isidentifier() for part in f"{entry.module}.{entry.attr or 'x'}".split(".")
        )
    except Exception:  # noqa: BLE001  as above; versions of the library differ
        is_named = False
    if not is_named:
        return Broken(entry.name, path, f"its entry point {entry.value!r} is not module:function")
    return entry, distribution


def _listed(distribution: Distribution) -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except Exception:  # noqa: BLE001  as above: it declares nothing that can be read
        return ""


def _path_of(distribution: Distribution) -> str:
    return str(getattr(distribution, "_path", distribution))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
