"""Load environments by id or path: ``load_environment`` and ``list_environments``. Every command
finds them here.

An environment is a file or folder of the working folder (``local_sources``), an installed package
with an entry point in the group ``verifiers.environments``, or, in the historical layout, a module
named like the id that binds ``load_environment``. The local environment comes first. An unknown id
imports nothing.

This module installs nothing and uses no network; ``vf-install`` does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.environments.local_sources import (
    GROUP,
    LOADER,
    LocalSource,
    at_path,
    harbor_tasks,
    in_folder,
    module_names,
    names_in,
    normalize_name,
)
from verifiers.errors import ConfigError, EnvironmentLoadError, UnknownEnvironment, UsageError
from verifiers.rollouts.contract import LoadedFrom
from verifiers.runtime.distributions import COLLECTIONS, provided
from verifiers.runtime.importing import digests_of, names_in_namespaces
from verifiers.runtime.installed import Broken, entry_points, headers, not_installed
from verifiers.runtime.places import raised_at, short_path
from verifiers.runtime.redaction import remember_secrets
from verifiers.runtime.suggest import check_keywords, close_matches

if TYPE_CHECKING:
    from importlib_metadata import Distribution, EntryPoint

    from verifiers.environments.base import Environment

DEFAULT_ENV_DIR = "environments"
"""Folder of local environments, in the working folder."""

_logger = logging.getLogger(__name__)
_ID = re.compile(
    r"(?:(?P<owner>[A-Za-z0-9-]{1,39})/)?"
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,99})"
    r"(?:@(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]{0,99}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class EnvironmentId:
    """A parsed id: ``acme/word-game@1.2`` is ``EnvironmentId("acme", "word-game", "1.2")``."""

    owner: str | None
    name: str
    version: str | None

    @property
    def without_version(self) -> str:
        return f"{self.owner}/{self.name}" if self.owner else self.name


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    """An installed environment: ``EnvironmentInfo("word-game", "vf-word-game", "1.2", "Guess the
    word.")``."""

    id: str
    distribution: str
    version: str
    summary: str


@dataclass(frozen=True, slots=True)
class FoundEnvironment:
    """The loader of an environment: module, attribute, and the distribution of the module (None:
    not part of any)."""

    module: str
    attribute: str
    distribution: str | None
    version: str | None
    env_id: str = ""
    """The id without its version; of a path, the name of the file or folder."""
    local: LocalSource | None = None
    """The source of an environment that is not installed."""
    tasks: Path | None = None
    """The folder of Harbor's tasks, if it is one."""
    arguments: tuple[tuple[str, object], ...] = ()
    """Arguments of the loader that the id or path gives."""

    def __str__(self) -> str:
        source = f" of {self.distribution} {self.version}" if self.distribution else ""
        return (
            short_path(self.local.file) if self.local else f"{self.module}:{self.attribute}{source}"
        )


def load_environment(env_id: str, **env_args: object) -> Environment:
    """Build an environment by calling its loader with ``env_args``.

    Args:
        env_id: An id ``[owner/]name[@version]`` or the path of a file or folder,
            ``environments/sums.py``, or of a folder of Harbor's tasks. The name is a file or
            folder in ``./environments`` or the working folder, else an entry point, with or without
            a leading ``vf-``, else a module. Case and ``-``, ``_``, ``.`` make no difference; the
            owner is ignored; ``@version`` must be the installed version (``@latest``: any).
            ``v1:NAME`` is a taskset of verifiers 0.4 (``vf.TasksetEnv``).
        env_args: Arguments of the loader, by name.

    Raises: ``UnknownEnvironment`` when there is no such environment; ``ConfigError`` for arguments
    that the loader does not take; ``EnvironmentLoadError``, chained to the cause, when importing or
    building fails. A ``UsageError`` that the loader raises is not wrapped.

    Example::

        env = vf.load_environment("reverse-text")
        env = vf.load_environment("alphabet-sort", max_turns=3)
        env = vf.load_environment("environments/sums.py")
    """
    return load(env_id, env_args)


def load(
    env_id: str, env_args: Mapping[str, object], env_dir: str | os.PathLike[str] = DEFAULT_ENV_DIR
) -> Environment:
    """Build an environment as ``load_environment`` does; ``env_dir`` is the folder of local
    environments."""
    remember_secrets(env_args)
    source = find(env_id, env_dir)
    loader = import_loader(env_id, source)
    check_arguments(env_id, loader, env_args)
    env = _build(env_id, source, loader, env_args)
    if not env.env_id:
        env.env_id = source.env_id
    if not env.env_args:
        env.env_args = dict(env_args)
    env.env_version = source.version or ""
    # a worker's working folder may be another
    path_or_id = str(source.tasks or (source.local.file if source.local else env_id))
    env.source_digests = digests_of(source.local.file) if source.local else {}
    env.loaded_from, env.changes = LoadedFrom(load_environment, path_or_id, dict(env_args)), {}
    return env


def list_environments() -> list[EnvironmentInfo]:
    """List the installed environments that have an entry point, sorted by id, without importing
    them.

    Example::

        for info in vf.list_environments():
            print(info.id, info.version, info.summary)
    """
    abouts = ((entry, headers(distribution)) for entry, distribution in _entries())
    infos = (
        EnvironmentInfo(e.name, a["Name"], a["Version"], a.get("Summary", "")) for e, a in abouts
    )
    return sorted(infos, key=lambda info: (info.id, info.distribution))


def broken_environments() -> list[Broken]:
    """Declared environments whose metadata cannot be used; ``list_environments``
    leaves them out."""
    return [entry for entry in entry_points(GROUP) if isinstance(entry, Broken)]


def parse_env_id(env_id: str) -> EnvironmentId:
    """Parse an id. Raises: ``UnknownEnvironment`` unless its format is
    ``[owner/]name[@version]``."""
    match = _ID.fullmatch(env_id) if isinstance(env_id, str) else None
    if match is None:
        raise UnknownEnvironment(
            f"{env_id!r} is no environment id; ids look like name, owner/name or name@1.2, in ASCII"
            " letters, digits, '.', '_' and '-'",
            env_id=env_id,
        )
    return EnvironmentId(**match.groupdict())


def id_of(text: str) -> str:
    """The id, without its version, of an environment that is named by id or path; it need not be
    installed.

    *Raises* ``UnknownEnvironment`` for a text that is neither.
    """
    source = at_path(text) or _in_collection(text)
    return source.env_id if source is not None else parse_env_id(text).without_version


def find(env_id: str, env_dir: str | os.PathLike[str] = DEFAULT_ENV_DIR) -> FoundEnvironment:
    """Find the loader of an environment by id or path; imports nothing.

    *Raises* ``UnknownEnvironment``; ``EnvironmentLoadError`` for a source that is not Python, and
    for an id that two distributions offer.
    """
    if isinstance(env_id, str) and (tasks := harbor_tasks(env_id)) is not None:
        return FoundEnvironment(
            "verifiers", "HarborEnv", None, None, tasks.name, None, tasks, (("eval_path", tasks),)
        )
    if isinstance(env_id, str) and (source := at_path(env_id)) is not None:
        return local(source, source.env_id)
    if isinstance(env_id, str) and (in_collection := _in_collection(env_id)) is not None:
        return in_collection
    requested = parse_env_id(env_id)
    in_folders = [in_folder(Path(folder), requested.name) for folder in (env_dir, ".")]
    sources = [source for source in in_folders if source is not None]
    fitting = [s for s in sources if requested.version in (None, "latest", s.version)]
    installed = _installed(requested)
    if installed is not None and installed.distribution is None:
        # a module without metadata: the local file itself, if its folder is on the path
        installed = None if any(_is_source_of(installed, s) for s in sources) else installed
    for source in fitting:
        # another script in the working folder is not meant
        is_meant = source is in_folders[0] or source.problem() is None
        if is_meant and not (installed and _is_source_of(installed, source)):
            if installed is not None:
                _logger.warning(
                    "environment %r: %s is used, not the installed %s",
                    env_id,
                    source.file,
                    installed,
                )
            return local(source, requested.without_version)
    if installed is not None:
        return _with_version(requested, env_id, installed)
    if fitting:
        return local(fitting[0], requested.without_version)
    if sources:
        has = f"version {sources[0].version}" if sources[0].version else "no version"
        raise UnknownEnvironment(
            f"environment {requested.name!r}: {short_path(sources[0].file)} has {has}; leave"
            f" @{requested.version} out",
            env_id=env_id,
        )
    raise _unknown(requested, env_dir)


def _in_collection(text: str) -> FoundEnvironment | None:
    """The environment ``COLLECTION:NAME``, whose loader is that of the collection, called with the
    name; None for other texts. *Raises* ConfigError when the distribution is not installed."""
    collection, colon, name = text.partition(":")
    if not colon or _ID.fullmatch(name) is None:
        return None
    points = (entry[0] for entry in entry_points(COLLECTIONS) if not isinstance(entry, Broken))
    loaders = {point.name: point.value for point in points}
    if collection not in loaders:
        if collection not in provided(COLLECTIONS):
            return None
        raise ConfigError(not_installed(collection, text, COLLECTIONS), env_id=text)
    module, _, attribute = loaders[collection].partition(":")
    distribution = _distribution_of(module.partition(".")[0])
    arguments = (("name", name),)
    return FoundEnvironment(
        module, attribute, *distribution, f"{collection}-{name}", arguments=arguments
    )


def find_recorded(
    env_id: str, location: object, flag: str, env_dir: str | os.PathLike[str] = DEFAULT_ENV_DIR
) -> FoundEnvironment:
    """The installed environment that a file names which another person may have written.

    *Raises* ConfigError for an environment that is not installed: a path, or a file of the working
    folder, is code that came with the file perhaps, and the user must name it; otherwise as
    ``find``.
    """
    try:
        source = find(env_id, env_dir)
    except UsageError:
        source = None
    if source is None or source.local is not None or source.distribution is None:
        raise ConfigError(
            f"{location} names the environment {env_id!r}, which is not installed, and a saved run"
            f" does not choose which code runs: name it yourself ({flag})",
            env_id=env_id,
        )
    return source


def find_installed(requested: EnvironmentId) -> FoundEnvironment:
    """Find the loader of an installed environment, ignoring the version. Raises: as ``find``."""
    installed = _installed(requested)
    if installed is None:
        raise _unknown(requested, DEFAULT_ENV_DIR)
    return installed


def local(source: LocalSource, env_id: str) -> FoundEnvironment:
    """The loader of a local source. Raises: ``UnknownEnvironment``, ``EnvironmentLoadError`` for
    a source with a mistake."""
    if problem := source.problem():
        raise problem
    return FoundEnvironment(source.module, source.attribute, None, source.version, env_id, source)


def _installed(requested: EnvironmentId) -> FoundEnvironment | None:
    """The entry point of a name, else the module that binds the loader; None without either."""
    name = normalize_name(requested.name)
    entries = list(_entries())
    spelled = name.removeprefix("vf-") if name.startswith("vf-") else f"vf-{name}"
    for spelling in (name, spelled):
        if offers := [(e, d) for e, d in entries if normalize_name(e.name) == spelling]:
            # as declared, so that every spelling has one folder of runs and one identity
            declared = replace(requested, name=offers[0][0].name).without_version
            return _meant(requested, replace(_only(requested.name, offers), env_id=declared))
    source = _first_module(requested.name)
    return None if source is None else _in_module(source, requested)


def _first_module(name: str) -> LocalSource | None:
    """The first module on the path that the id names and that binds the loader, in the layout of
    older versions."""
    return next((source for source in _modules(name) if source.problem(star=False) is None), None)


def _in_module(source: LocalSource, requested: EnvironmentId) -> FoundEnvironment:
    return FoundEnvironment(
        source.module, LOADER, *_distribution_of(source.module), requested.without_version
    )


def _meant(requested: EnvironmentId, entry: FoundEnvironment) -> FoundEnvironment:
    """The entry point, or the module of another distribution where that has the requested version.

    *Raises* ConfigError when both are meant.
    """
    source = _first_module(requested.name)
    if source is None or source.module == entry.module:
        return entry
    module = _in_module(source, requested)
    if module.distribution in (None, entry.distribution):
        return entry
    fitting = [
        candidate
        for candidate in (entry, module)
        if requested.version in (None, "latest", candidate.version)
    ]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        return entry
    choices = " or ".join(f"{requested.name}@{candidate.version}" for candidate in fitting)
    if entry.version != module.version:
        how = f"name its version ({choices})"
    else:
        how = "uninstall one of them"
    raise ConfigError(
        f"environment {requested.name!r} is {entry} and also {module}; {how}, or pass the folder of"
        " its source",
        key="env_id",
    )


def _with_version(
    requested: EnvironmentId, env_id: str, source: FoundEnvironment
) -> FoundEnvironment:
    """``source``. Raises: ``UnknownEnvironment`` when another version is requested."""
    if requested.version not in (None, "latest", source.version):
        if source.version:
            installed = f"{source.version} is installed"
        else:
            installed = "the installed version is unknown"
        raise UnknownEnvironment(
            f"environment {requested.name!r}: version {requested.version} is requested, but"
            f" {installed}; to change it: vf-install {env_id}",
            env_id=env_id,
        )
    return source


def _unknown(requested: EnvironmentId, env_dir: str | os.PathLike[str]) -> UsageError:
    """The error for an id without an environment. What exists here is never suggested from the
    package index."""
    name = requested.name
    suggestions = close_matches(
        requested.name, [*(entry.name for entry, _ in _entries()), *names_in(Path(env_dir))]
    )
    did_you_mean = f"did you mean {' or '.join(map(repr, suggestions))}?" if suggestions else ""
    for broken in broken_environments():
        if normalize_name(broken.name).removeprefix("vf-") == normalize_name(name).removeprefix(
            "vf-"
        ):
            return EnvironmentLoadError(
                f"environment {name!r} is declared by {broken.path}, but {broken.reason};"
                " reinstall or remove that package",
                env_id=name,
            )
    for source in _modules(name):
        problem = source.problem(star=False)
        if isinstance(problem, UnknownEnvironment):
            hint = f"; {did_you_mean}" if did_you_mean else ""
            return UnknownEnvironment(
                f"no environment {name!r}: {problem}{hint}",
                **problem.facts,
                suggestions=suggestions,
            )
        if problem is not None:
            return problem
    if name in sys.stdlib_module_names:
        return UnknownEnvironment(
            f"{name!r} is a module of Python's standard library, not an environment", env_id=name
        )
    if harbor_tasks(f"./{name}") is not None:
        return UnknownEnvironment(
            f"no environment {name!r} is installed; the folder of Harbor tasks is ./{name}",
            env_id=name,
        )
    hint = f", {did_you_mean} If not," if did_you_mean else ";"
    return UnknownEnvironment(
        f"no environment {name!r} is installed{hint} install it with: vf-install"
        f" {requested.without_version}",
        env_id=name,
        suggestions=suggestions,
    )


def _modules(name: str) -> Iterator[LocalSource]:
    """The sources on the path of the modules that an id may name, outside of the standard library;
    imports nothing."""
    for module in dict.fromkeys(module_names(name)):
        if module in sys.stdlib_module_names or module in ("verifiers", "__main__"):
            continue
        if module in names_in_namespaces():  # a local file, perhaps of another folder
            continue
        if (file := _source_file(module)) is not None:
            yield LocalSource(file, module, file.parent)


def _source_file(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a finder that fails, or a module in memory without a spec
        return None
    is_source = spec is not None and spec.origin is not None and spec.origin.endswith(".py")
    return Path(spec.origin) if is_source else None  # type: ignore[union-attr, arg-type]


def _is_source_of(installed: FoundEnvironment, local: LocalSource) -> bool:
    """Whether a local source belongs to the installed environment: an editable install of its
    folder."""
    origin = _source_file(installed.module.partition(".")[0])
    if origin is None:
        return False
    origin = origin.resolve()
    return origin == local.file or (
        origin.name == "__init__.py" and local.file.is_relative_to(origin.parent)
    )


def _entries() -> Iterator[tuple[EntryPoint, Distribution]]:
    """Yield the usable entry points of the group with their distributions."""
    return (entry for entry in entry_points(GROUP) if not isinstance(entry, Broken))


def _only(name: str, offers: list[tuple[EntryPoint, Distribution]]) -> FoundEnvironment:
    source = {FoundEnvironment(e.module, e.attr or LOADER, d.name, d.version) for e, d in offers}
    if len(source) > 1:
        raise EnvironmentLoadError(
            f"environment {name!r} is offered by {' and by '.join(sorted(map(str, source)))};"
            " uninstall all but one",
            env_id=name,
        )
    return source.pop()


def _distribution_of(module: str) -> tuple[str | None, str | None]:
    """Return name and version of the distribution of a top-level module; None for a module without
    a distribution. Reads two files of each distribution; ``packages_distributions`` looks at every
    file that they installed, which takes most of a second.
    """
    import importlib_metadata

    for distribution in importlib_metadata.distributions():
        try:
            names = distribution.read_text("top_level.txt")
            record = distribution.read_text("RECORD")
            if _has_module(names or "", record or "", module):
                return distribution.name, distribution.version
        except Exception:  # noqa: BLE001  damaged metadata owns nothing
            continue
    return None, None


def _has_module(names: str, record: str, module: str) -> bool:
    """Whether a distribution's ``top_level.txt`` names the module, or, where that is empty, its
    ``RECORD`` does."""
    if listed := names.split():
        return module in listed
    return f"\n{module}/" in f"\n{record}" or f"\n{module}.py," in f"\n{record}"


def import_loader(env_id: str, source: FoundEnvironment) -> Callable[..., Any]:
    """Import the loader without calling it. Raises: ``EnvironmentLoadError``, or the loader's own
    ``UsageError``."""
    try:
        target: object = (
            source.local.load() if source.local else importlib.import_module(source.module)
        )
        for attribute in source.attribute.split("."):
            target = getattr(target, attribute)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        # raised by code of the environment; chained, and its text shown
        raise _failure(env_id, f"importing {source}", error) from error
    if not callable(target):
        raise EnvironmentLoadError(
            f"environment {env_id!r}: {source} is not a function", env_id=env_id
        )
    loader: Callable[..., object] = target
    return functools.partial(loader, **dict(source.arguments)) if source.arguments else loader


def check_arguments(
    env_id: str, loader: Callable[..., object], env_args: Mapping[str, object]
) -> None:
    """Check arguments against the signature of the loader. Raises: ``ConfigError``."""
    try:
        parameters = inspect.signature(loader).parameters.values()
    except (TypeError, ValueError):
        # a callable without a readable signature checks its own arguments
        return
    by_name = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        check_keywords(env_args, [p.name for p in by_name], f"environment {env_id!r}")
    missing = [p.name for p in by_name if p.default is p.empty and p.name not in env_args]
    if missing:
        raise ConfigError(
            f"environment {env_id!r} needs {', '.join(missing)}: load_environment({env_id!r},"
            f" {missing[0]}=...)",
            names=missing,
        )


def _build(
    env_id: str,
    source: FoundEnvironment,
    loader: Callable[..., object],
    env_args: Mapping[str, object],
) -> Environment:
    from verifiers.environments.base import Environment

    try:
        env = loader(**env_args)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        # raised by code of the environment; chained, and its text shown
        raise _failure(env_id, f"building it with {source}", error) from error
    if not isinstance(env, Environment):
        if inspect.iscoroutine(env):
            env.close()
        raise EnvironmentLoadError(
            f"environment {env_id!r}: {source} returned {type(env).__name__}, not a"
            " verifiers.Environment",
            env_id=env_id,
        )
    return env


def _failure(env_id: str, doing: str, error: BaseException) -> EnvironmentLoadError:
    # of a module that the environment imports
    if isinstance(error, SyntaxError) and error.filename:
        location, message = f"{short_path(error.filename)}:{error.lineno}", error.msg
    else:
        location, message = raised_at(error) or "", str(error) or "no message"
    at = f" ({location})" if location else ""
    return EnvironmentLoadError(
        f"environment {env_id!r}: {doing} failed: {type(error).__name__}: {message}{at}",
        env_id=env_id,
    )
