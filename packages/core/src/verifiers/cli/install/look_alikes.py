"""What a package would take from the packages that are installed here: files, import names,
commands, ids, names.

A name in a package index belongs to anyone. ``vf-install`` refuses a package of the index that
writes over another package or offers its environments (``conflict``), and asks where the name alone
may deceive: it is that of a package that came from elsewhere (``other_origin``), or one letter away
from a known id (``look_alike``). All is read from metadata and file names; no code of either
package runs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import importlib_metadata

from verifiers.cli.install.installer import without_logins
from verifiers.environments.local_sources import GROUP, normalize_name
from verifiers.runtime.decoding import decode_json
from verifiers.runtime.install_lines import CORE
from verifiers.runtime.installed import Broken, entry_points, headers

if TYPE_CHECKING:
    from importlib_metadata import Distribution

SHARED = frozenset({"bin", "docs", "examples", "scripts", "test", "tests"})
"""Folders of ``site-packages`` that careless packages share; nothing imports them by name."""
_COMMANDS = ("console_scripts", "gui_scripts")
_LOOKS = str.maketrans("015i", "olsl", "-_.")
_METADATA = re.compile(r"[^/]+\.(dist-info|egg-info|data)/")
_PROGRAM = re.compile(r"(?:\.\./)*(?:bin|Scripts)/([^/]+?)(?:\.exe)?\Z")
_PACKAGES = re.compile(r"(?:^|/)(?:site|dist)-packages/(.*)")
"""A file that a wheel brings as data of the environment, and so into its packages all the same."""


def conflict(package: Distribution, installed: Iterable[Distribution]) -> str | None:
    """What ``package`` would take from another installed distribution; None when nothing.

    Files, the import names of the library and of environments, the names of commands, and the ids
    of environments.
    """
    its_name = normalize_name(package.name)
    brings = f"{package.name} {package.version} brings"
    files, ids, commands = _files(package), set(_environments(package)), _commands(package)
    modules = {_module(file).casefold(): _module(file) for file in files}  # as file systems may
    unshared = {file for file in files if file.partition("/")[0] not in SHARED}
    for distribution in installed:
        about = headers(distribution)
        name = normalize_name(about.get("Name", ""))
        if name in ("", its_name):
            continue
        owner = f"{about['Name']} {about.get('Version')}"
        theirs = _environments(distribution)
        if shared := ids & theirs.keys():
            return f"{brings} the environment {min(shared)!r}, which {owner} provides"
        protected = {module.casefold() for module in (*_library_modules(name), *theirs.values())}
        if shared := modules.keys() & protected:
            module = modules[min(shared)]
            return f"{brings} the module {module!r}, which hides or replaces that of {owner}"
        if commands and (shared := commands & _commands(distribution)):
            return f"{brings} the command {min(shared)!r}, which belongs to {owner}"
        if shared := unshared.intersection(_recorded(distribution)):
            return f"{brings} the file {min(shared)!r}, which belongs to {owner}"
    return None


def other_origin(package: Distribution) -> str | None:
    """Why the package of an index may not be the installed package of its name, which came from
    elsewhere; None else."""
    try:
        present = importlib_metadata.distribution(package.name)
        origin = decode_json(present.read_text("direct_url.json") or "{}").get("url")
    except (importlib_metadata.PackageNotFoundError, ValueError):
        return None
    if not isinstance(origin, str):
        return None
    return (
        f"{package.name} {package.version} of the package index would replace {present.name}"
        f" {present.version}, which was installed from {without_logins(origin)}"
    )


def look_alike(name: str, env_ids: Collection[str]) -> str | None:
    """The known id that ``name`` can be mistaken for; None if it is known itself, or none is
    that close.

    >>> look_alike("revers-text", ["reverse-text"]), look_alike("w0rd-game", ["word-game"])
    ('reverse-text', 'word-game')
    >>> look_alike("aime2025", ["aime2024"]), look_alike("word-game", ["word-game"])
    (None, None)
    """
    plain = normalize_name(name).removeprefix("vf-")
    by_plain_name = {normalize_name(env_id).removeprefix("vf-"): env_id for env_id in env_ids}
    if plain in by_plain_name:
        return None
    return next(
        (env_id for plain_id, env_id in by_plain_name.items() if _is_confusable(plain, plain_id)),
        None,
    )


def offered(package: Distribution) -> Sequence[str]:
    """Ids of the environments that a distribution declares, sorted, normalised, without ``vf-``."""
    return sorted(_environments(package))


# --- parts ----------------------------------------------------------------------------------------


def _environments(distribution: Distribution) -> dict[str, str]:
    """Id -> top-level module, of the environments that a distribution declares."""
    entries = (
        entry for entry in entry_points(GROUP, [distribution]) if not isinstance(entry, Broken)
    )
    return {
        normalize_name(entry.name).removeprefix("vf-"): entry.module.partition(".")[0]
        for entry, _ in entries
    }


def _commands(distribution: Distribution) -> set[str]:
    """Names of the programs that a distribution installs, by entry points or as files."""
    files = {match[1] for file in _recorded(distribution) if (match := _PROGRAM.match(file))}
    return files | {entry.name for entry in distribution.entry_points if entry.group in _COMMANDS}


def _library_modules(name: str) -> Iterator[str]:
    """The import name of ``verifiers`` and of every ``verifiers-NAME``."""
    if name == CORE or name.startswith(f"{CORE}-"):
        yield name.replace("-", "_")


def _files(distribution: Distribution) -> set[str]:
    """A distribution's files in ``site-packages``, without its metadata and compiled copies."""
    recorded = (
        match[1] if (match := _PACKAGES.search(file)) else file for file in _recorded(distribution)
    )
    return {
        file
        for file in recorded
        if file
        and not file.startswith(("../", "/"))
        and "__pycache__/" not in file
        and not _METADATA.match(file)
    }


def _recorded(distribution: Distribution) -> Iterator[str]:
    """Every file that a distribution installed."""
    lines = (distribution.read_text("RECORD") or "").splitlines()
    return (line.split(",", 1)[0].strip('"') for line in lines)


def _module(file: str) -> str:
    """The top-level module of a file in ``site-packages``; names of other files are no module's."""
    return file.partition("/")[0].split(".", 1)[0]


def _is_confusable(name: str, similar: str) -> bool:
    """Whether two names look alike or differ by a mistyped letter; digits tell names apart."""
    if name.translate(_LOOKS) == similar.translate(_LOOKS):
        return True
    if re.sub(r"\D", "", name) != re.sub(r"\D", "", similar) or min(len(name), len(similar)) < 4:
        return False
    start = _common_start(name, similar)
    rests = name[start:], similar[start:]
    end = _common_start(*(tail[::-1] for tail in rests))
    first, two = (tail[: len(tail) - end] for tail in rests)
    return max(len(first), len(two)) < 2 or (len(first) == 2 and first == two[::-1])


def _common_start(first: str, two: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, two, strict=False)))
