"""Read the Dockerfile of a task: ``FROM``, ``RUN``, ``COPY``, ``WORKDIR`` and ``ENV`` of a build
stage.

Promise: an instruction that cannot be honoured is refused with its name and line. ``LABEL``,
``MAINTAINER``, ``EXPOSE`` and ``CMD`` have no effect on a task. Nothing is executed here.

*Source*: https://docs.docker.com/reference/dockerfile
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from verifiers.errors import ConfigError
from verifiers.runtime.bounded import read_text
from verifiers.runtime.decoding import decode_json

NO_EFFECT = frozenset(("LABEL", "MAINTAINER", "EXPOSE", "CMD"))
_FLAG = re.compile(r"--[a-z-]+(=\S*)?\s+")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-((?:[^$}]|\$(?!\{))*))?\})")


@dataclass(frozen=True, slots=True)
class Copy:
    """Files of the build context and where each goes."""

    files: tuple[tuple[Path, str], ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A command, in the folder and with the variables of its place in the file."""

    argv: tuple[str, ...]
    workdir: str
    env: tuple[tuple[str, str], ...]
    line: int


@dataclass(slots=True)
class Dockerfile:
    """A build: the image it starts from, its steps, and the folder and variables that every command
    then has."""

    image: str = ""
    root: Path | None = None
    """The root file system of the image; None for the programs of this machine."""
    steps: list[Copy | Run] = field(default_factory=list)
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    """Every ``WORKDIR``, which Docker creates."""


def read_dockerfile(path: Path, start: Callable[[str], Dockerfile]) -> Dockerfile:
    """Read a file whose folder is the build context. ``start``: the build that begins with the
    image of a name.

    *Raises* ConfigError with the line that cannot be honoured.
    """
    build = Dockerfile()
    for number, line in _instructions(path):
        name, _, arguments = line.partition(" ")
        try:
            image = _image(build, arguments.strip()) if name.upper() == "FROM" else ""
            if not image:
                _apply(build, name.upper(), arguments.strip(), path.parent, number)
        except ConfigError as error:
            raise ConfigError(
                f"{path}, line {number}: {error}", path=str(path), line=number
            ) from error
        if image:
            build = start(image)
    if not build.image:
        raise ConfigError(f"{path} has no FROM", path=str(path))
    return build


def _instructions(path: Path) -> list[tuple[int, str]]:
    """(line number, instruction on one line): continuations joined, comments and empty lines left
    out."""
    instructions: list[tuple[int, str]] = []
    parts: list[str] = []
    for number, text in enumerate(read_text(path).split("\n"), start=1):
        stripped = text.strip()
        if re.match(r"#\s*escape\s*=", stripped) and not instructions:
            raise ConfigError(
                f"{path}, line {number}: the directive escape is not supported; use \\ to continue"
                " a line"
            )
        if not stripped or stripped.startswith("#"):
            continue
        if not parts:
            first = number
        if stripped.endswith("\\"):
            parts.append(stripped[:-1].rstrip())
            continue
        instructions.append((first, " ".join([*parts, stripped])))
        parts = []
    if parts:
        instructions.append((first, " ".join(parts)))
    return instructions


def _apply(build: Dockerfile, name: str, arguments: str, context: Path, line: int) -> None:
    if not build.image:
        raise ConfigError(f"{name} stands before FROM; only FROM can come first")
    if "<<" in arguments and name in ("RUN", "COPY"):
        raise ConfigError(
            f"a here-document in {name} is not supported; write the text to a file and COPY it"
        )
    if name == "RUN":
        if flag := _FLAG.match(arguments):
            raise ConfigError(f"RUN {flag[0].strip()} is not supported")
        argv = _json_list(arguments) or ["/bin/sh", "-c", arguments]
        build.steps.append(Run(tuple(argv), build.workdir, tuple(build.env.items()), line))
    elif name == "COPY":
        build.steps.append(_copy(build, arguments, context))
    elif name == "WORKDIR":
        build.workdir = posixpath.normpath(
            posixpath.join(build.workdir, _expanded(arguments.strip("\"'"), build.env))
        )
        build.folders.append(build.workdir)
    elif name == "ENV":
        build.env.update(_variables(arguments, build.env))
    elif name not in NO_EFFECT:
        raise ConfigError(
            f"{name} is not supported; a task's Dockerfile may use FROM, RUN, COPY, WORKDIR and ENV"
        )


def _image(build: Dockerfile, arguments: str) -> str:
    """The image of a ``FROM``."""
    words = arguments.split()
    if build.image:
        raise ConfigError("a second FROM is not supported; a task is built in one stage")
    if not words or words[0].startswith("--") or "$" in words[0]:
        raise ConfigError(f"FROM {arguments} is not supported; name an image")
    return words[0]


def _copy(build: Dockerfile, arguments: str, context: Path) -> Copy:
    if flag := _FLAG.match(arguments):
        raise ConfigError(
            f"COPY {flag[0].strip()} is not supported; RUN chmod after a plain COPY sets modes"
        )
    words = [_expanded(word, build.env) for word in _json_list(arguments) or shlex.split(arguments)]
    if len(words) < 2:
        raise ConfigError(f"COPY {arguments} names no destination")
    *patterns, destination = words
    target = posixpath.normpath(posixpath.join(build.workdir, destination))
    is_folder = destination.endswith(("/", "/.")) or destination == "." or len(patterns) > 1
    files: list[tuple[Path, str]] = []
    for pattern in patterns:
        relative = posixpath.normpath(pattern.lstrip("/") or ".")
        if relative.startswith(".."):
            raise ConfigError(f"COPY {pattern} leaves the folder environment/")
        paths = [context] if relative == "." else sorted(context.glob(relative))
        if not paths:
            raise ConfigError(f"COPY {pattern}: there is no such file in environment/")
        for path in paths:  # as Docker does: of a folder its content
            is_inside = is_folder and not path.is_dir()
            files.append((path, posixpath.join(target, path.name) if is_inside else target))
    return Copy(tuple(files))


def _json_list(text: str) -> list[str] | None:
    if not text.startswith("["):
        return None
    try:
        words = decode_json(text)
    except ValueError:
        return None
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return words
    return None


def _variables(arguments: str, env: dict[str, str]) -> dict[str, str]:
    first = arguments.split(None, 1)
    if "=" not in first[0]:  # the older form: ENV NAME the whole value
        if len(first) < 2:
            raise ConfigError(f"ENV {arguments} has no value")
        return {first[0]: _expanded(first[1], env)}
    pairs = [word.partition("=") for word in shlex.split(arguments)]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise ConfigError(f"ENV {wrong[0]} has no value; write {wrong[0]}=VALUE")
    return {name: _expanded(value, env) for name, _, value in pairs}


def _expanded(text: str, env: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda match: env.get(match[1] or match[2]) or match[3] or "", text)
