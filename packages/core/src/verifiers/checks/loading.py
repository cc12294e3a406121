"""Build the environment under check twice, and detect the side effects of building it.

The first build shows that it can be built. The second, with every module imported, shows the side
effects and whether the result is repeatable. The loader and constructor of an ``Environment``
passed as an object are not checked; the report notes this.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verifiers.checks.report import Findings, error_text, place_of, raised_at
from verifiers.checks.side_effects import Watch, moved_random_state
from verifiers.environments import registry
from verifiers.environments.base import Environment
from verifiers.errors import ConfigError, UnknownEnvironment

Loader = Callable[..., Any]

_CODES = (
    (re.compile(r"two reward functions are named|two tools are called"), "duplicate-function-name"),
    (
        re.compile(r"no JSON schema can be derived|annotation of the tool|\b(the|a) tool\b"),
        "tool-schema-not-derivable",
    ),
    (
        re.compile(
            r"arguments are passed by name|has no readable signature|\(one rollout\) and|scores a"
            r" group and gets"
        ),
        "reward-parameter-that-cannot-be-injected",
    ),
)
"""Pattern in the text of a ``ConfigError`` -> code of the finding, else ``not-loadable``."""
_FIXES = {
    "duplicate-function-name": (
        "rename one of them: metrics and tools are identified by their functions' names"
    ),
    "tool-schema-not-derivable": (
        "annotate every parameter with a JSON type, or hide it: add_tool(…, args_to_skip=[…])"
    ),
    "reward-parameter-that-cannot-be-injected": (
        "declare the names that the function requires, or **kwargs"
    ),
    "not-loadable": (
        "make load_environment return a verifiers.Environment when it is called without arguments"
    ),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """The environment to check, and a second build of it (None when there is none)."""

    name: str
    env: Environment | None
    again: Environment | None = None
    is_built_here: bool = False
    """Whether the check built it, and so closes it."""
    loader: Loader | None = None
    opened: tuple[str, ...] = ()
    """Paths of the files that were opened while it was built."""


def load(env_or_id: object, findings: Findings) -> Loaded:
    """Build the environment to check. Raises ``UnknownEnvironment``; reports other failures."""
    if isinstance(env_or_id, Environment):
        findings.note(
            "the loader and the constructor were not checked: pass the environment's id instead of"
            " an object"
        )
        return Loaded(env_or_id.env_id or type(env_or_id).__name__, env_or_id)
    if isinstance(env_or_id, str):
        name, loader = env_or_id, lambda: registry.load_environment(env_or_id)
    elif callable(env_or_id):
        name, loader = getattr(env_or_id, "__qualname__", type(env_or_id).__name__), env_or_id
    else:
        raise ConfigError(
            f"check_environment takes an environment or an id, not {type(env_or_id).__name__}"
        )
    watch = Watch()
    first = _build(name, loader, findings, watch)
    if first is None:
        return Loaded(name, None)
    opened, declared = tuple(watch.opened), loader
    if isinstance(env_or_id, str):
        declared = registry.import_loader(env_or_id, registry.find(env_or_id))
    _check_annotations(declared, findings)
    watch = Watch()
    with moved_random_state():
        again = _build(name, loader, findings, watch, is_second=True)
    if watch.changed_random_state:
        findings.warn(
            "global-random-state",
            "building the environment draws from the global random generator, or seeds it",
            name,
            "use a separate generator: random.Random(seed)",
        )
    return Loaded(name, first, again, is_built_here=True, loader=declared, opened=opened)


def _build(
    name: str, loader: Loader, findings: Findings, watch: Watch, is_second: bool = False
) -> Environment | None:
    try:
        with watch:
            env = loader()
    except UnknownEnvironment:
        raise
    # an author's loader may raise anything
    except (Exception, SystemExit) as error:  # noqa: BLE001
        _report_failure(name, error, findings, is_second)
        return None
    for effect in watch.effects:
        findings.error(
            "constructor-side-effect",
            f"building the environment is not free of side effects: {effect}",
            f"{name}, {effect.removeprefix('it ')}",
            "do it at the first rollout (@vf.setup, setup_state), or pass dataset= a function that"
            " reads the data",
        )
    if not isinstance(env, Environment):
        _report_failure(name, TypeError(f"it returned {type(env).__name__}"), findings, is_second)
        return None
    return env


def _report_failure(name: str, error: BaseException, findings: Findings, is_second: bool) -> None:
    cause = error.__cause__ or error
    location = raised_at(cause, name)
    if is_second:
        findings.error(
            "constructor-side-effect",
            f"building the environment a second time in one process fails: {error_text(cause)}",
            location,
            "store per-environment state on the object, not in process globals",
        )
        return
    code = next((code for pattern, code in _CODES if pattern.search(str(error))), "not-loadable")
    fix = _FIXES[code if isinstance(error, ConfigError) else "not-loadable"]
    findings.error(code, error_text(error), location, fix)


def _check_annotations(loader: Loader, findings: Findings) -> None:
    """Warn about loader parameters without a type, by which commands convert arguments."""
    try:
        parameters = inspect.signature(loader).parameters.values()
    except (TypeError, ValueError):  # no readable signature: nothing to check
        return
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if untyped := [p.name for p in by_name if p.annotation is p.empty]:
        findings.warn(
            "argument-without-type",
            f"load_environment declares {', '.join(untyped)} without a type",
            place_of(loader),
            f"annotate it, for example {untyped[0]}: int = 0: commands convert and check arguments"
            " by their types",
        )
