"""Load environments by id: ``load_environment`` and ``list_environments``.

An environment is an installed package with an entry point in the group ``verifiers.environments``, or, in the
historical layout, a module named like the id that binds ``load_environment``. An unknown id imports nothing.

This module installs nothing and uses no network; ``vf-install`` does.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError, EnvironmentLoadError, UnknownEnvironment, UsageError
from verifiers.rollouts.contract import LoadedFrom
from verifiers.runtime.bounded import read_file
from verifiers.runtime.installed import Broken, entry_points
from verifiers.runtime.redaction import remember_secrets
from verifiers.runtime.suggest import check_keywords, close_matches

if TYPE_CHECKING:
    from importlib_metadata import Distribution, EntryPoint

    from verifiers.environments.base import Environment

GROUP = "verifiers.environments"
LOADER = "load_environment"

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
    """An installed environment: ``EnvironmentInfo("word-game", "vf-word-game", "1.2", "Guess the word.")``."""

    id: str
    distribution: str
    version: str
    summary: str


@dataclass(frozen=True, slots=True)
class Found:
    """The loader of an id: module, attribute, and the distribution of the module (None: not part of one)."""

    module: str
    attribute: str
    distribution: str | None
    version: str | None

    def __str__(self) -> str:
        source = f" of {self.distribution} {self.version}" if self.distribution else ""
        return f"{self.module}:{self.attribute}{source}"


def load_environment(env_id: str, **env_args: Any) -> Environment:
    """Build the environment of an id ``[owner/]name[@version]`` by calling its loader with ``env_args``.

    The name is an entry point, with or without a leading ``vf-``, else a module. Case and ``-``, ``_``, ``.`` make no
    difference; the owner is ignored; ``@version`` must be the installed one (``@latest``: any).

    Raises: ``UnknownEnvironment`` for an id without an installed environment; ``ConfigError`` for arguments that the
    loader does not take; ``EnvironmentLoadError``, chained to the cause, when importing or building fails. A
    ``UsageError`` that the loader raises is not wrapped.

    Example::

        env = vf.load_environment("reverse-text")
        env = vf.load_environment("alphabet-sort", max_turns=3)
    """
    requested = parse_env_id(env_id)
    source = find(requested)
    if requested.version not in (None, "latest", source.version):
        installed = f"{source.version} is installed" if source.version else "the installed version is unknown"
        raise UnknownEnvironment(
            f"environment {requested.name!r}: version {requested.version} is requested, but {installed}; to change it: "
            f"vf-install {env_id}",
            env_id=env_id,
        )
    remember_secrets(env_args)
    loader = import_loader(env_id, source)
    check_arguments(env_id, loader, env_args)
    env = _build(env_id, source, loader, env_args)
    if not env.env_id:
        env.env_id = requested.without_version
    if not env.env_args:
        env.env_args = dict(env_args)
    env.env_version = source.version or ""
    env.loaded_from, env.changes = LoadedFrom(load_environment, env_id, dict(env_args)), {}
    return env


def list_environments() -> list[EnvironmentInfo]:
    """List the installed environments that have an entry point, sorted by id, without importing them.

    Example::

        for info in vf.list_environments():
            print(info.id, info.version, info.summary)
    """
    return sorted(
        (
            EnvironmentInfo(
                entry.name, distribution.name, distribution.version, distribution.metadata.get("Summary") or ""
            )
            for entry, distribution in _entries()
        ),
        key=lambda info: (info.id, info.distribution),
    )


def broken_environments() -> list[Broken]:
    """Declared environments whose metadata cannot be used; ``list_environments`` leaves them out."""
    return [entry for entry in entry_points(GROUP) if isinstance(entry, Broken)]


def parse_env_id(env_id: str) -> EnvironmentId:
    """Parse an id. Raises: ``UnknownEnvironment`` unless its format is ``[owner/]name[@version]``."""
    match = _ID.fullmatch(env_id) if isinstance(env_id, str) else None
    if match is None:
        raise UnknownEnvironment(
            f"{env_id!r} is no environment id; ids look like name, owner/name or name@1.2, in ASCII letters, digits, "
            "'.', '_' and '-'",
            env_id=env_id,
        )
    return EnvironmentId(**match.groupdict())


def normalize_name(name: str) -> str:
    """Normalize a name for comparison: lower case, runs of ``-``, ``_`` and ``.`` as one ``-``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find(requested: EnvironmentId) -> Found:
    """Find the loader of an id, ignoring the version. Raises: ``UnknownEnvironment``, ``EnvironmentLoadError``."""
    name = normalize_name(requested.name)
    entries = list(_entries())
    other = name.removeprefix("vf-") if name.startswith("vf-") else f"vf-{name}"
    for spelling in (name, other):
        if offers := [(e, d) for e, d in entries if normalize_name(e.name) == spelling]:
            return _only(requested.name, offers)
    for module in dict.fromkeys(_module_names(requested.name)):
        if _has_loader(module):
            return Found(module, LOADER, *_distribution_of(module))
    for broken in broken_environments():
        if normalize_name(broken.name) in (name, other):
            raise EnvironmentLoadError(
                f"environment {requested.name!r} is declared by {broken.place}, but {broken.reason}; reinstall or "
                "remove that package",
                env_id=requested.name,
            )
    known = [entry.name for entry, _ in entries]
    suggestions = close_matches(requested.name, known)
    hint = f", did you mean {' or '.join(map(repr, suggestions))}? If not," if suggestions else ";"
    raise UnknownEnvironment(
        f"no environment {requested.name!r} is installed{hint} install it with: vf-install {requested.without_version}",
        env_id=requested.name,
        suggestions=suggestions,
    )


def _entries() -> Iterator[tuple[EntryPoint, Distribution]]:
    """Yield the usable entry points of the group with their distributions."""
    return (entry for entry in entry_points(GROUP) if not isinstance(entry, Broken))


def _only(name: str, offers: list[tuple[EntryPoint, Distribution]]) -> Found:
    source = {Found(e.module, e.attr or LOADER, d.name, d.version) for e, d in offers}
    if len(source) > 1:
        raise EnvironmentLoadError(
            f"environment {name!r} is offered by {' and by '.join(sorted(map(str, source)))}; uninstall all but one",
            env_id=name,
        )
    return source.pop()


def _module_names(name: str) -> Iterator[str]:
    folded = normalize_name(name)
    for spelling in (name, folded, folded.removeprefix("vf-")):
        module = re.sub(r"[-.]", "_", spelling)
        yield module
        yield f"vf_{module}"


def _has_loader(module: str) -> bool:
    """Return whether the source of a top-level module outside the standard library binds the loader."""
    if module in sys.stdlib_module_names or module in ("verifiers", "__main__"):
        return False
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a finder that fails, or a module in memory without a spec
        return False
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    try:
        tree = ast.parse(read_file(spec.origin))
    except (OSError, SyntaxError, ValueError):
        return False
    return binds_loader(tree)


def binds_loader(tree: ast.Module) -> bool:
    """Return whether importing this source would bind the loader."""
    return any(LOADER in _names_bound_by(statement) for statement in _top_level(tree.body))


def _top_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run on import, including those inside ``if``, ``try`` and ``with``."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from _top_level(handler.body)


def _names_bound_by(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name for alias in names}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
            return {name}
    return set()


def _distribution_of(module: str) -> tuple[str | None, str | None]:
    """Return name and version of the distribution of a top-level module; None for a module without one."""
    import importlib_metadata

    try:
        owners = importlib_metadata.packages_distributions().get(module)
        return (owners[0], importlib_metadata.version(owners[0])) if owners else (None, None)
    except Exception:  # noqa: BLE001  damaged metadata of any distribution: the owner stays unknown
        return None, None


def import_loader(env_id: str, source: Found) -> Callable[..., Any]:
    """Import the loader without calling it. Raises: ``EnvironmentLoadError``, or the loader's own ``UsageError``."""
    try:
        target: Any = importlib.import_module(source.module)
        for attribute in source.attribute.split("."):
            target = getattr(target, attribute)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # raised by code of the environment; chained, and its text shown
        raise _failure(env_id, f"importing {source}", error) from error
    if not callable(target):
        raise EnvironmentLoadError(f"environment {env_id!r}: {source} is not a function", env_id=env_id)
    loader: Callable[..., Any] = target
    return loader


def check_arguments(env_id: str, loader: Callable[..., Any], env_args: Mapping[str, Any]) -> None:
    """Check arguments against the signature of the loader. Raises: ``ConfigError``."""
    try:
        parameters = inspect.signature(loader).parameters.values()
    except (TypeError, ValueError):  # a callable without a readable signature checks its own arguments
        return
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        check_keywords(env_args, [p.name for p in named], f"environment {env_id!r}")
    missing = [p.name for p in named if p.default is p.empty and p.name not in env_args]
    if missing:
        raise ConfigError(
            f"environment {env_id!r} needs {', '.join(missing)}: load_environment({env_id!r}, {missing[0]}=...)",
            names=missing,
        )


def _build(env_id: str, source: Found, loader: Callable[..., Any], env_args: Mapping[str, Any]) -> Environment:
    from verifiers.environments.base import Environment

    try:
        env = loader(**env_args)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # raised by code of the environment; chained, and its text shown
        raise _failure(env_id, f"building it with {source}", error) from error
    if not isinstance(env, Environment):
        if inspect.iscoroutine(env):
            env.close()
        raise EnvironmentLoadError(
            f"environment {env_id!r}: {source} returned {type(env).__name__}, not a verifiers.Environment",
            env_id=env_id,
        )
    return env


def _failure(env_id: str, doing: str, error: BaseException) -> EnvironmentLoadError:
    message = str(error) or "no message"
    return EnvironmentLoadError(
        f"environment {env_id!r}: {doing} failed: {type(error).__name__}: {message}", env_id=env_id
    )
