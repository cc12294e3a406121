"""The run directory: the configuration of a run, its finished rollouts, and a lock.

    config.json     the frozen configuration and its fingerprint, written first, atomically, then never again
    results.jsonl   the journal
    images          the images that its rows refer to (``storage.images``)
    results.index   of a large run: a cache, see ``results.index_file``
    metadata.json   summary, replaced atomically; ``status`` is running, complete, interrupted
                    (by a signal, or by a limit on what is spent) or failed
    run.lock        an advisory lock with the pid and host of its holder

Guarantees: a directory holds rollouts of one configuration and is written by one process at a time;
a refused directory is not changed (``RunMismatch``, ``RunBusy``, ``ConfigError``).

``runs.runner`` decides which rollouts are pending; ``results`` reads saved rollouts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NotRequired, TypedDict, cast

import msgspec

from verifiers.errors import ConfigError, RunMismatch
from verifiers.runtime.bounded import read_file
from verifiers.runtime.json import decode_row, encode_row
from verifiers.storage.configurations import (
    changed_code,
    config_differences,
    fingerprint,
    frozen_config,
    resume_differences,
    uncompared_parts,
)
from verifiers.storage.files import LOCK_NAME, HeldFile, atomic_write, remove_leftovers
from verifiers.storage.images import IMAGES_NAME
from verifiers.storage.journal import Journal
from verifiers.storage.trainings import SETTINGS_NAME

CONFIG_NAME, RESULTS_NAME, METADATA_NAME = "config.json", "results.jsonl", "metadata.json"
METRICS_NAME = "metrics.jsonl"
"""A file that a training's folder has."""
COMPLETIONS_NAME = "completions"
"""Folder of a training run with the rollouts of its steps."""
_WITHOUT_RUNS = frozenset(("node_modules", "__pycache__", "site-packages", COMPLETIONS_NAME))


# --- paths ----------------------------------------------------------------------------------------


def default_root(env_id: str) -> Path:
    """The working directory; ``./environments/<module>`` where an older version already saved runs
    of it."""
    module = env_id.rsplit("/", 1)[-1].replace("-", "_")
    folder = Path("environments", module)
    return folder if module.isidentifier() and (folder / "outputs/evals").is_dir() else Path()


def run_path(
    root: str | os.PathLike[str],
    env_id: str,
    model: str,
    fingerprint: str,
    *,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool = True,
    config: Mapping[str, object] | None = None,
    accept_changed_code: bool = False,
) -> Path:
    """The directory this run should use: ``<root>/outputs/evals/<env_id>--<model>/<run id>``.
    Creates nothing.

    The run id is the first 8 hex digits of the fingerprint, with ``-2``, ``-3``, … appended until
    the directory is free or, with ``resume``, holds an unfinished run of this fingerprint.
    ``output_dir`` replaces ``<root>/outputs``. With ``config``, an unfinished run by another
    version of this library or of Python is found by its configuration.

    *Raises* RunMismatch when an unfinished run differs in its code only, unless
    ``accept_changed_code`` continues it.
    """
    first = next(run_paths(root, env_id, model, fingerprint, output_dir))
    if resume and config is not None and not first.exists() and first.parent.is_dir():
        for older in sorted(first.parent.iterdir()):
            if older.is_dir() and _is_resumable(older, fingerprint, config):
                return older
        for older in sorted(first.parent.iterdir()):
            if differences := _differences_of_code(older, config):
                if accept_changed_code:
                    return older
                raise _code_mismatch(older, "an unfinished run", differences)
    for candidate in run_paths(root, env_id, model, fingerprint, output_dir):
        if not candidate.exists() or (resume and _is_resumable(candidate, fingerprint)):
            return candidate
    raise AssertionError("the candidates do not end")


def run_paths(
    root: str | os.PathLike[str],
    env_id: str,
    model: str,
    fingerprint: str,
    output_dir: str | os.PathLike[str] | None,
) -> Iterator[Path]:
    """The directories that a run of this fingerprint may use, in order, without an end."""
    outputs = Path(root, "outputs") if output_dir is None else Path(output_dir)
    folder = outputs / "evals" / safe_name(f"{env_id}--{model}")
    yield folder / fingerprint[:8]
    yield from (folder / f"{fingerprint[:8]}-{number}" for number in itertools.count(2))


def safe_name(name: str) -> str:
    """As one path component: ``/`` becomes ``--``, no leading dot, at most 200 characters."""
    safe = re.sub(r"[^A-Za-z0-9._+=@-]", "_", name.replace("/", "--"))
    safe = f"_{safe[1:]}" if safe.startswith(".") else safe
    if len(safe) > 200:
        safe = f"{safe[:180]}-{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:16]}"
    return safe


def _is_resumable(path: Path, fingerprint: str, config: Mapping[str, object] | None = None) -> bool:
    try:
        stored = read_config(path)
    except ConfigError:
        return False
    if stored is None:  # stopped before its configuration was written: empty
        return not (path / RESULTS_NAME).exists()
    if config is None:
        is_same = stored["fingerprint"] == fingerprint
    else:
        is_same = _is_same_run(stored, fingerprint, config)
    return is_same and not is_complete(path)


def _differences_of_code(
    path: Path, config: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """``resume_differences`` with the unfinished run in ``path`` if only code differs, or {}."""
    try:
        stored = read_config(path)
    except ConfigError:
        return {}
    if stored is None or is_complete(path) or not (path / RESULTS_NAME).exists():
        return {}
    differences = resume_differences(stored["config"], frozen_config(config))
    return differences if changed_code(differences) else {}


def _code_mismatch(
    path: Path, kind: str, differences: dict[str, tuple[object, object]]
) -> RunMismatch:
    return RunMismatch(
        f"{path} holds {kind} of other code: {', '.join(changed_code(differences))} changed since,"
        " and one mean over both would mix two environments. Start a new run (--fresh,"
        " resume=False), undo the change, or continue with the present code"
        " (--accept-changed-code, accept_changed_code=True), which metadata.json records.",
        differences=differences,
        path=str(path),
    )


# --- reading --------------------------------------------------------------------------------------


def may_hold_runs(name: str) -> bool:
    """Whether a folder of this name is searched for runs."""
    return not name.startswith((".", "checkpoint-")) and name not in _WITHOUT_RUNS


def evaluations_below(folder: str | os.PathLike[str]) -> list[Path]:
    """The run directories below a folder, in the order of their paths; symbolic links are not
    followed. A run directory has no runs."""
    runs = []
    for path, names, files in os.walk(folder):
        if RESULTS_NAME in files and not os.path.samefile(path, folder):
            runs.append(Path(path))
            names.clear()
        names[:] = filter(may_hold_runs, names)
    return sorted(runs)


def trainings_below(folder: str | os.PathLike[str]) -> list[Path]:
    """The folder, if it is a training's, else those of trainings below it, by name; symbolic links
    are not followed."""
    trainings = []
    for path, names, files in os.walk(folder):
        if METRICS_NAME in files and SETTINGS_NAME in files:
            trainings.append(Path(path))
            names.clear()
        names[:] = filter(may_hold_runs, names)
    return sorted(trainings)


class StoredRun(TypedDict):
    """The content of ``config.json``."""

    fingerprint: str
    config: dict[str, object]
    """What must be equal for rollouts of the run: ``runs.description.RunDescription.config``."""
    noted: NotRequired[dict[str, object]]
    """What readers of the run are told besides; absent in runs of older versions."""


def read_config(path: str | os.PathLike[str]) -> StoredRun | None:
    """``config.json`` of a run directory, None when it has none.

    *Raises* ConfigError, which names the field, when the file exists but is invalid.
    """
    file = os.path.join(path, CONFIG_NAME)
    try:
        stored = decode_row(read_file(file))
        return msgspec.convert(stored, StoredRun)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} cannot be read as a run's configuration ({error}); restore it or choose"
            " another directory.",
            path=file,
        ) from error


def saved_config(path: str | os.PathLike[str]) -> dict[str, object]:
    """The configuration of the run in a directory; empty without one. *Raises* as ``read_config``."""
    stored = read_config(path)
    return {} if stored is None else stored["config"]


class LocalModelFacts(TypedDict, total=False):
    """What a run says of a model in its process."""

    name: str
    sampling: dict[str, object]
    """What the model samples with where the run does not say."""
    file: str
    sha256: str
    quantisation: str


class StoredMetadata(TypedDict, total=False):
    """The content of ``metadata.json`` that is read field by field; ``GenerateMetadata`` has all of
    it, and says what each is. What is ``object`` here is only passed on."""

    env_id: str | None
    model: str | None
    base_url: str | None
    date: str | None
    status: str | None
    fingerprint: str | None
    success_metric: str | None
    path_to_save: str | None
    time: float | None
    pass_threshold: float | None
    num_examples: int | None
    rollouts_per_example: int | None
    num_rollouts: int | None
    outside_plan: list[str] | None
    changed_code: list[str] | None
    state_columns: list[str] | None
    env_args: dict[str, object] | None
    sampling_args: dict[str, object] | None
    local_model: LocalModelFacts | None
    avg_metrics: dict[str, object] | None
    usage: dict[str, object] | None
    pass_at_k: dict[str, object] | None
    prices: dict[str, float] | None
    pass_at_k_interval: dict[str, object] | None
    pass_at_k_examples: dict[str, int] | None
    pass_at_k_unknown: int | None
    pass_at_k_bounds: dict[str, tuple[float | None, float | None]] | None
    avg_reward: float | None
    reward_stderr: float | None
    avg_success: float | None
    num_errors: int | None
    num_unscored: int | None
    cost_usd: float | None
    coverage: dict[str, int | None] | None
    provenance: object
    stopped: dict[str, object] | None


def read_metadata(path: str | os.PathLike[str]) -> StoredMetadata | None:
    """``metadata.json`` of a run directory, with its other fields too; None if absent or damaged
    (it can be recomputed)."""
    try:
        metadata = decode_row(read_file(os.path.join(path, METADATA_NAME)))
        msgspec.convert(metadata, StoredMetadata)
    except (OSError, ValueError):
        return None
    return cast(StoredMetadata, metadata)  # checked above; what it has besides is shown and stays


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Whether the ``status`` of the run in this directory is "complete"."""
    return (read_metadata(path) or {}).get("status") == "complete"


# --- writing --------------------------------------------------------------------------------------


class RunDirectory:
    """A run directory, locked by this process; opened by ``create_or_resume``, closed by
    ``close`` or ``with``.

    >>> def save(path, rows):
    ...     with RunDirectory.create_or_resume(path, {"env_id": "sums", "model": "m"}) as run:
    ...         with run.open_journal() as journal:
    ...             journal.append_sync(rows)
    ...         run.write_metadata({"status": "complete"})
    """

    def __init__(
        self,
        path: Path,
        lock: HeldFile,
        stored: StoredRun,
        resumed: bool,
        config: Mapping[str, object],
        noted: Mapping[str, object],
        changed_code: Iterable[str] = (),
    ):
        self.path = path
        self.config = stored["config"]
        """The frozen configuration, after a round trip through JSON."""
        self.fingerprint = stored["fingerprint"]
        self.resumed = resumed
        """Whether the directory already held this run."""
        self.noted_changes = config_differences(stored.get("noted") or {}, noted)
        """Dotted key -> (stored, new) for notes that differ; they do not stop the run."""
        self.uncompared = uncompared_parts(stored["config"], config) if resumed else []
        """Sections that only the stored or only the new configuration has."""
        self.changed_code = sorted(
            {*changed_code, *((read_metadata(path) or {}).get("changed_code") or ())}
        )
        """Files and functions that were changed between two sessions of the run, and accepted."""
        self._lock = lock

    @classmethod
    def create_or_resume(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, object],
        noted: Mapping[str, object] | None = None,
        *,
        accept_changed_code: bool = False,
    ) -> RunDirectory:
        """Open the directory for a run of ``config``: a new directory, or a directory that resumes
        or extends the stored run.

        ``config`` must be equal for rollouts of a run; ``noted`` is for readers (library version,
        counts, base URL). Neither may contain secrets. ``accept_changed_code`` resumes a run that
        differs in its code only.

        *Raises* RunMismatch (``differences``: key -> (stored, new)) when it holds another
        configuration, RunBusy when another process has locked it, ConfigError when it cannot be
        written or holds rollouts without a configuration.
        """
        path, noted = Path(path), noted or {}
        stored_run(path, config, accept_changed_code)
        new_run: StoredRun = {
            "fingerprint": fingerprint(config),
            "config": frozen_config(config),
            "noted": frozen_config(noted),
        }
        with folders_removed_on_failure(path):
            path.mkdir(parents=True, exist_ok=True)
            lock, stored = HeldFile(path / LOCK_NAME), None
            try:
                # again, under the lock: another process may have been first
                stored = stored_run(path, config, accept_changed_code)
                lock.write_holder()
                remove_leftovers(path)
                remove_leftovers(path / IMAGES_NAME)
                if stored is None:
                    atomic_write(path / CONFIG_NAME, pretty_json(new_run))
            except BaseException:  # release the lock and remove new files; raised again
                if stored is None and not (path / CONFIG_NAME).exists():
                    lock.path.unlink(missing_ok=True)
                lock.release()
                raise
        present = frozen_config(config)
        changed = changed_code(resume_differences(stored["config"], present)) if stored else []
        return cls(path, lock, stored or new_run, stored is not None, config, noted, changed)

    @property
    def results_file(self) -> Path:
        """Where the journal is."""
        return self.path / RESULTS_NAME

    def open_journal(
        self,
        on_row: Callable[[dict[str, object]], None] | None = None,
        checked: tuple[int, int] = (0, 0),
    ) -> Journal:
        """The run's journal, as of ``Journal.open``. Close it before the directory."""
        return Journal.open(self.results_file, on_row, checked=checked)

    def write_metadata(self, metadata: Mapping[str, object]) -> None:
        """Replace ``metadata.json`` atomically and durably. *Raises* OSError."""
        atomic_write(self.path / METADATA_NAME, pretty_json(metadata))

    def close(self) -> None:
        """Release the directory for other processes."""
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stored_run(
    path: Path, config: Mapping[str, object], accept_changed_code: bool
) -> StoredRun | None:
    """The stored run in ``path``, None without one. *Raises* RunMismatch for another config."""
    stored = read_config(path)
    if stored is None:
        if (path / RESULTS_NAME).exists():
            raise ConfigError(
                f"{path} has {RESULTS_NAME} but no {CONFIG_NAME}, so the configuration of its"
                " rollouts is unknown; choose another directory.",
                path=str(path),
            )
        return None
    if stored["fingerprint"] != fingerprint(stored["config"]):
        raise RunMismatch(
            f"{path / CONFIG_NAME} was changed since the run began: its configuration does not have"
            " its fingerprint. Restore it from a copy, or choose another directory.",
            path=str(path),
        )
    if not _is_same_run(stored, fingerprint(config), present := frozen_config(config)):
        differences = resume_differences(stored["config"], present)
        if changed_code(differences):
            if accept_changed_code:
                return stored
            raise _code_mismatch(path, "a run", differences)
        excerpts = {key: _excerpts(*pair) for key, pair in differences.items()}
        listed = "; ".join(f"{key} was {old}, now {new}" for key, (old, new) in excerpts.items())
        raise RunMismatch(
            f"{path} holds a run of another configuration: {listed}. "
            "Repeat the old settings to resume it, or choose another directory.",
            differences=differences,
            path=str(path),
        )
    return stored


def _is_same_run(stored: StoredRun, new_fingerprint: str, new_config: Mapping[str, object]) -> bool:
    """Whether a run of ``new_config`` may resume a stored run, older ones by what they stored."""
    if stored["fingerprint"] == new_fingerprint:
        return True
    is_untouched = bool(stored["fingerprint"] == fingerprint(stored["config"]))
    return is_untouched and not resume_differences(stored["config"], new_config)


def _excerpts(old: object, new: object) -> tuple[str, str]:
    """Two values in at most 80 characters each; long texts from before their first difference."""
    if isinstance(old, str) and isinstance(new, str):
        pairs = enumerate(zip(old, new, strict=False))
        first = next((index for index, (a, b) in pairs if a != b), min(len(old), len(new)))
        if first > 60:
            old, new = (f"…{text[first - 20 :]}" for text in (old, new))
    return f"{old!r:.80}", f"{new!r:.80}"


@contextlib.contextmanager
def folders_removed_on_failure(path: Path) -> Iterator[None]:
    """On failure, remove the folders created since, and convert ``OSError`` to ``ConfigError``."""
    missing_folders: list[Path] = []
    try:
        path_up = (path.absolute(), *path.absolute().parents)
        missing_folders = [folder for folder in path_up if not folder.exists()]
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):  # a folder that is no longer empty stays
            for folder in missing_folders:
                folder.rmdir()
        if not isinstance(error, OSError):
            raise
        raise ConfigError(
            f"results cannot be saved in {path}: {error.strerror or error}. Choose a writable"
            " directory (results_path, --output-dir).",
            path=str(path),
        ) from error


def pretty_json(content: Mapping[str, object]) -> bytes:
    """An object as indented JSON."""
    return json.dumps(decode_row(encode_row(content)), indent=2).encode() + b"\n"
