"""The program of a command as it is on the host: what a sandbox has to hold of it so that it runs
inside as it does outside.

An interpreter brings its virtual environment, its base installation and the folders of source that
are installed in it; a console script brings the interpreter that its first line names; ``uv run``
stands for the interpreter that uv selects on the host, where it may install what is missing. All
else of the host stays invisible.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verifiers.errors import ConfigError
from verifiers.runtime.bounded import open_file, read_text, run_captured
from verifiers.runtime.decoding import decode_message
from verifiers.sandbox.host.mounts import is_system

START_S = 300.0
"""Time limit of an interpreter that is asked for its folders, and of what uv installs before."""
_ASK = (
    "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, *sys.path]))"
)
_PYTHON = re.compile(r"pythonw?[\d.]*t?")


@dataclass(frozen=True, slots=True)
class HostProgram:
    """A command as it is run, and the files and folders of the host that it needs at their own
    paths."""

    command: tuple[str, ...]
    paths: tuple[str, ...] = ()


@functools.lru_cache(maxsize=64)
def host_program(command: tuple[str, ...], folder: str) -> HostProgram:
    """The program that a command names in the working directory ``folder``.

    *Raises* ConfigError for an interpreter that does not run, and for what uv refuses.
    """
    if Path(command[0]).name == "uv" and command[1:2] == ("run",) and len(command) > 2:
        command = _without_uv(command, folder)
    program = _file(command[0], folder)
    if program is None:
        return HostProgram(command)
    paths = dict.fromkeys(_paths(program, folder))
    outermost = [path for path in paths if paths.keys().isdisjoint(map(str, Path(path).parents))]
    return HostProgram((program, *command[1:]), tuple(outermost))


def _file(word: str, folder: str) -> str | None:
    """The file of a program that a sandbox does not have by itself; None for one that it has, and
    for what is no file."""
    if os.sep in word:
        path = os.path.normpath(os.path.join(folder, word))
    elif word in ("python", "python3"):
        return None
    else:
        path = shutil.which(word) or ""
    return path if os.path.isfile(path) and not is_system(path) else None


def _paths(program: str, folder: str) -> list[str]:
    if is_interpreter(program):
        return _of_interpreter(program, folder)
    with open_file(program) as file:
        first = file.readline(4096)
    words = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    interpreter = _file(words[0], folder) if words else None
    return [program, *([] if interpreter is None else _paths(interpreter, folder))]


def _of_interpreter(program: str, folder: str) -> list[str]:
    """The folders of an interpreter: its environment, its installation also by the names under
    which links lead to it, and sources."""
    reported = _answer([program, "-I", "-c", _ASK], folder, f"{program} does not run")
    _, prefix, base, *path = reported
    names = [base]
    link = program
    while os.path.islink(link):
        link = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
        above = str(Path(link).parents[1])
        if os.path.realpath(above) == os.path.realpath(base):
            names.append(above)
    within = [prefix, *names, os.path.realpath(base)]
    sources = [
        entry
        for entry in path
        if os.path.isdir(entry) and not any(Path(entry).is_relative_to(top) for top in within)
    ]
    return [entry for entry in (*within, *sources) if entry != "/usr" and not is_system(entry)]


def _without_uv(command: tuple[str, ...], folder: str) -> tuple[str, ...]:
    """The command with the interpreter or the console script that ``uv run`` would start."""
    words = command[2:]
    number = next((n for n, word in enumerate(words) if word == "--" or _runs(words, n)), 0)
    options, (name, *arguments) = words[:number], [*words[number:], ""]
    if name == "--":
        name, *arguments = arguments
    text = " ".join(command)
    if name.startswith("-") or not name:
        raise ConfigError(
            f"the agent's command {text!r} names no Python file; write uv run OPTIONS -- COMMAND",
            key="command",
        )
    arguments.pop()
    metadata = ""
    if name.endswith(".py") and (script := Path(folder, name)).is_file():
        metadata = _requirements_in(read_text(script))
    code = f"{metadata}\n{_ASK}\n"
    python = _answer([command[0], "run", *options, "-"], folder, f"{text} failed", code)[0]
    if name.endswith(".py"):
        return (python, name, *arguments)
    if _PYTHON.fullmatch(name):
        return (python, *arguments)
    return (shutil.which(name, path=str(Path(python).parent)) or name, *arguments)


def _requirements_in(script: str) -> str:
    """The requirements that a script has in its own comments (PEP 723); "" without any."""
    lines = script.splitlines()
    start = lines.index("# /// script") if "# /// script" in lines else len(lines)
    for end, line in enumerate(lines[start + 1 :], start + 1):
        if line == "# ///":
            return "\n".join(lines[start : end + 1])
        if line != "#" and not line.startswith("# "):
            break
    return ""


def _runs(words: Sequence[str], number: int) -> bool:
    """Whether this word of uv's is what it runs, and not the interpreter that an option selects."""
    is_selected = number > 0 and words[number - 1] in ("--python", "-p")
    word = words[number]
    return not is_selected and (word.endswith(".py") or _PYTHON.fullmatch(word) is not None)


def is_interpreter(word: str) -> bool:
    """Whether a word names a Python, by its path or without."""
    return _PYTHON.fullmatch(Path(word).name) is not None


def _answer(argv: Sequence[str], folder: str, failure: str, code: str = "") -> list[str]:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(code.encode())
            file.seek(0)
            ended = run_captured(argv, START_S, cwd=folder, stdin=file)
        if ended.returncode == 0:
            answer: list[str] = decode_message(ended.stdout.splitlines()[-1])
            return answer
        why = ended.stderr.strip() or f"exit code {ended.returncode}"
    except (OSError, ValueError, IndexError) as error:
        why = str(error)
    raise ConfigError(
        f"the agent's command: {failure} on this machine: {' '.join(why.split())[-500:]}",
        key="command",
    )
