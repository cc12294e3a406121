"""A set of runs, such as the evaluations of a night: one folder with the file that names them.

    set.json        which runs, with their settings, written first, atomically, and then never again
    run.lock        an advisory lock with the pid and host of its holder
    evals/…         the run directories

A set's id is the name of its folder: ``<outputs>/sets/<name>/<id>``. The states of its runs are
those of their directories, so that no file says of them what another one denies.

Guarantees: a folder holds one set and is written by one process at a time (``RunBusy``); the file
names run directories inside the folder only.
"""

from __future__ import annotations

import datetime
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verifiers.errors import ConfigError, RunMismatch
from verifiers.runtime.bounded import read_file
from verifiers.runtime.json import decode_row
from verifiers.storage.configurations import config_differences, fingerprint
from verifiers.storage.directory import (
    RESULTS_NAME,
    folders_removed_on_failure,
    may_hold_runs,
    pretty_json,
    read_metadata,
    run_paths,
    safe_name,
)
from verifiers.storage.files import LOCK_NAME, HeldFile, atomic_write, remove_leftovers

SET_NAME, SETS_NAME = "set.json", "sets"
PENDING, COMPLETE = "pending", "complete"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=@-]{0,99}")


class SetRun(msgspec.Struct, frozen=True):
    """A run of a set."""

    env_id: str
    model: str
    path: str
    """Its run directory, relative to the folder of the set."""
    settings: dict[str, object]
    """What it was started with, without secrets."""


class _SetFile(msgspec.Struct):
    name: str
    created: str
    """UTC, ISO 8601 with microseconds."""
    fingerprint: str
    runs: list[SetRun]


@dataclass(frozen=True, slots=True)
class RunSet:
    """A set, as its file has it."""

    path: Path
    name: str
    created: str
    fingerprint: str
    runs: tuple[SetRun, ...]

    @property
    def id(self) -> str:
        """Unique among the sets of its name and folder."""
        return self.path.name

    @property
    def label(self) -> str:
        """``name/id``."""
        return f"{self.name}/{self.id}"

    def folder(self, run: SetRun) -> Path:
        """The directory of a run."""
        return self.path / run.path

    def state(self, run: SetRun) -> str:
        """``pending`` while it has no rollouts, else the ``status`` of its directory."""
        folder = self.folder(run)
        if not (folder / RESULTS_NAME).exists():
            return PENDING
        return str((read_metadata(folder) or {}).get("status") or "running")

    @property
    def num_complete(self) -> int:
        """Runs that are complete."""
        return sum(self.state(run) == COMPLETE for run in self.runs)

    @property
    def is_complete(self) -> bool:
        """Whether every run is."""
        return self.num_complete == len(self.runs)


# --- reading --------------------------------------------------------------------------------------


def read_set(path: str | os.PathLike[str]) -> RunSet | None:
    """The set in a folder; None when it has no ``set.json``.

    *Raises* ConfigError when the file exists but is invalid.
    """
    folder = Path(os.path.abspath(path))
    file = folder / SET_NAME
    try:
        content = msgspec.convert(decode_row(read_file(file)), _SetFile)
        for run in content.runs:
            if not Path(run.path).parts or os.path.isabs(run.path) or ".." in Path(run.path).parts:
                raise ValueError(f"it names a run outside its folder, {run.path!r}")
        if len({Path(run.path) for run in content.runs}) < len(content.runs):
            raise ValueError("two of its runs have the same directory")
        if set_fingerprint([run.settings for run in content.runs]) != content.fingerprint:
            raise ValueError("its runs are not those that it began with")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"{file} cannot be read as a set of runs ({error}); restore it, or begin a new set"
            " (--new)",
            path=str(file),
        ) from error
    if Path(path).name not in ("", ".."):  # its name is the id
        folder = Path(path)
    return RunSet(folder, content.name, content.created, content.fingerprint, tuple(content.runs))


def sets_below(folder: str | os.PathLike[str]) -> list[RunSet]:
    """The sets in a folder and below it, oldest first; damaged ones and links are left out."""
    sets = []
    for path, names, files in os.walk(folder):
        if SET_NAME in files:
            try:
                run_set = read_set(path)
            except ConfigError:
                run_set = None
            if run_set is not None:
                sets.append(run_set)
                names.clear()
        if RESULTS_NAME in files:
            names.clear()
        names[:] = filter(may_hold_runs, names)
    return sorted(sets, key=_age)


def set_of(run: str | os.PathLike[str]) -> RunSet | None:
    """The set that a run directory is in; None for a single run."""
    folder = Path(os.path.abspath(run))
    for parent in itertools.islice(folder.parents, 3):
        try:
            run_set = read_set(parent)
        except ConfigError:
            return None
        if run_set is not None:
            is_named = any(run_set.folder(member) == folder for member in run_set.runs)
            return run_set if is_named else None
    return None


def newest_complete_before(run_set: RunSet) -> RunSet | None:
    """The newest complete set of the same name, beside a set and older than it."""
    older = [
        candidate
        for candidate in sets_below(run_set.path.parent)
        if candidate.name == run_set.name
        and _age(candidate) < _age(run_set)
        and candidate.is_complete
    ]
    return older[-1] if older else None


def unfinished_sets(parent: str | os.PathLike[str]) -> list[RunSet]:
    """The sets in a folder that are not complete, oldest first."""
    return [run_set for run_set in sets_below(parent) if not run_set.is_complete]


def _age(run_set: RunSet) -> tuple[str, str]:
    return run_set.created, run_set.id


# --- the folder of a set --------------------------------------------------------------------------


def set_folder(
    outputs: str | os.PathLike[str],
    name: str,
    settings: Sequence[Mapping[str, object]],
    *,
    set_id: str | None = None,
    is_new: bool = False,
) -> Path:
    """The folder that the set of these runs uses: the newest one of the same runs, else a new one.
    Creates nothing.

    Without ``set_id`` its id is the first 8 hex digits of the fingerprint of its settings, with
    ``-2``, ``-3``, … for further sets of equal settings. *Raises* ConfigError for an id that is no
    name of a folder, or that exists where ``is_new``; RunMismatch when it holds other runs.
    """
    parent = Path(outputs, SETS_NAME, safe_name(name))
    digest = set_fingerprint(settings)
    if set_id is None:
        numbers = [0]
        if parent.is_dir():
            names = (path.name for path in parent.iterdir())
            numbers += [_number(n) for n in names if n.partition("-")[0] == digest[:8]]
        number = max(numbers) + 1 if is_new else max(*numbers, 1)
        return parent / (digest[:8] if number == 1 else f"{digest[:8]}-{number}")
    if not _ID.fullmatch(set_id):
        raise ConfigError(
            f"--set {set_id!r}: the id of a set is the name of its folder: letters, digits and"
            " ._+=@-, as in --set 2026-11-28",
            key="set",
        )
    path = parent / set_id
    if is_new and path.exists():
        raise ConfigError(
            f"--new: {path} exists; leave --new out to continue it, or take another id"
        )
    return path


def set_fingerprint(settings: Sequence[Mapping[str, object]]) -> str:
    """SHA-256 in hex of the settings of the runs, in order."""
    return fingerprint({"runs": list(settings)})


def _number(set_id: str) -> int:
    """1 for ``1f00abcd``, 2 for ``1f00abcd-2``; 0 for the id that a user chose."""
    match = re.fullmatch(r"[0-9a-f]{8}(?:-([0-9]+))?", set_id)
    return 0 if match is None else int(match[1] or 1)


def planned_set(
    path: Path, name: str, settings: Sequence[Mapping[str, object]], fingerprints: Sequence[str]
) -> RunSet:
    """The set in ``path``, or the one that is to be created there: each run with a directory of its
    own. Creates nothing.

    ``settings``: of each run, with ``env_id`` and ``model``; ``fingerprints``: of their
    configurations. *Raises* RunMismatch when the folder holds a set of other runs.
    """
    stored = read_set(path)
    digest = set_fingerprint(settings)
    if stored is not None:
        if stored.fingerprint != digest:
            raise RunMismatch(
                f"{path} is a set of other runs: {set_differences(stored, settings)}. Give another id"
                " (--set), or repeat the settings of that set to continue it",
                path=str(path),
            )
        return stored
    runs: list[SetRun] = []
    for of_run, run_fingerprint in zip(settings, fingerprints, strict=True):
        env_id, model = str(of_run["env_id"]), str(of_run["model"])
        names = {run.path for run in runs}
        paths = run_paths("", env_id, model, run_fingerprint, path)
        relative = (run_folder.relative_to(path).as_posix() for run_folder in paths)
        free = next(each for each in relative if each not in names)
        runs.append(SetRun(env_id, model, free, dict(of_run)))
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    return RunSet(path, name, created, digest, tuple(runs))


def set_differences(stored: RunSet, settings: Sequence[Mapping[str, object]]) -> str:
    """What distinguishes a stored set from the runs of a command, as text."""
    before = [run.settings for run in stored.runs]
    if len(before) != len(settings):
        return f"it has {len(before)}, and the command names {len(settings)}"
    for number, pair in enumerate(zip(before, settings, strict=True), 1):
        if differences := config_differences(*pair):
            key, (old, new) = next(iter(differences.items()))
            return f"{key} of run {number} was {old!r:.80}, now {new!r:.80}"
    return "their settings differ"


class SetDirectory:
    """The folder of a set, locked by this process; created when it does not exist."""

    def __init__(self, run_set: RunSet):
        """*Raises* RunBusy; RunMismatch when another process created other runs there; ConfigError
        when it cannot be written."""
        path = run_set.path
        content = {
            "name": run_set.name,
            "created": run_set.created,
            "fingerprint": run_set.fingerprint,
            "runs": msgspec.to_builtins(run_set.runs),
        }
        with folders_removed_on_failure(path):
            path.mkdir(parents=True, exist_ok=True)
            self._lock = HeldFile(path / LOCK_NAME)
            try:
                stored = read_set(path)
                if stored is not None and stored.fingerprint != run_set.fingerprint:
                    raise RunMismatch(f"{path} is a set of other runs", path=str(path))
                self._lock.write_holder()
                remove_leftovers(path)
                if stored is None:
                    atomic_write(path / SET_NAME, pretty_json(content))
            except BaseException:  # raised again
                if not (path / SET_NAME).exists():
                    self._lock.path.unlink(missing_ok=True)
                self._lock.release()
                raise
        self.set = stored or run_set

    def close(self) -> None:
        """Release the folder for other processes."""
        self._lock.release()
