"""Summarise a run from its small files: environment, model, status and reward. Reads no saved
rollouts.

``status`` is running, finished, interrupted, failed, damaged (its files are not as a run writes
them), or ended (a training run without a known number of steps). A run whose metadata says
"running" but whose process is gone is interrupted.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict, TypeVar

import msgspec

from verifiers.checks.audit.certificate import read_certificate
from verifiers.errors import ConfigError, UsageError
from verifiers.results.coverage import counts_in_metrics, coverage_lines
from verifiers.results.texts import flat, flat_settings, max_tokens_of, unknown_text
from verifiers.rollouts.values import reported
from verifiers.runtime.alive import is_alive
from verifiers.runtime.decoding import read_record
from verifiers.storage.directory import (
    CONFIG_NAME,
    METADATA_NAME,
    METRICS_NAME,
    RESULTS_NAME,
    StoredMetadata,
    read_config,
    read_metadata,
    saved_config,
)
from verifiers.storage.files import LOCK_NAME, Holder
from verifiers.storage.provenance import provenance_rows
from verifiers.storage.trainings import SETTINGS_NAME, STATE_NAME, TrainingSettings
from verifiers.view.catalog import TRAINING, Source
from verifiers.view.curves import Curves

log = logging.getLogger(__name__)
T = TypeVar("T")
LISTED = ("env_args", "sampling_args", "seed", "system_prompt", "max_turns")
"""Parts of an evaluation's configuration that the list of runs can show."""
MAX_SETTING_CHARS = 60
STATUSES = {"complete": "finished"}
"""Status in ``metadata.json`` -> displayed status, where they differ."""
QUIET_S = 60.0
"""Seconds without a write after which a run with an unknown writer counts as not running."""
MAX_HOLDERS = 65_536
"""Runs whose lock files are cached."""
DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What values of unexpected kinds lead to."""
_WATCHED = (RESULTS_NAME, METRICS_NAME, METADATA_NAME, LOCK_NAME)


def version(source: Source) -> str:
    """A token that changes when the run's files do; a few calls of ``stat``."""
    watched = _stats(str(source.folder))
    parts = [f"{stat.st_ino:x}.{stat.st_size:x}.{stat.st_mtime_ns:x}" for stat in watched.values()]
    if source.kind == TRAINING:
        parts.append(str(len(source.steps())))
    parts.append((_is_written(source, None, watched) and "w") or "")
    return "-".join(parts)


class _RunFacts(TypedDict):
    """What the list shows of a run. Unknown numbers are None."""

    env: str
    model: str
    reward: float | None
    stderr: float | None
    rollouts: int | None
    """Of a training: its newest step."""
    planned: int | None
    coverage: NotRequired[list[tuple[str, str]]]
    errors: int | None
    unscored: int | None
    metrics: Mapping[str, object]
    settings: dict[str, object]
    tokens: float | None
    cost: float | None
    success: float | None
    success_metric: NotRequired[str | None]
    pass_threshold: NotRequired[float | None]
    pass_at_k: NotRequired[object]
    pass_at_k_interval: NotRequired[object]
    pass_at_k_examples: NotRequired[object]
    unknown: NotRequired[str | None]
    """What is in no pass@k, in words."""
    curve: NotRequired[list[float]]
    status: str
    ended: NotRequired[str | None]
    """The error that ended a training."""
    date: str
    """ISO 8601."""
    changed: float
    """Seconds since the epoch."""
    seconds: float | None
    size: int
    """Bytes."""


class RunEntry(_RunFacts):
    """A run in the list."""

    id: str
    kind: str
    name: str
    path: str


class RunSettings(TypedDict):
    """The settings of a run, see `settings`."""

    config: dict[str, object]
    flat: dict[str, object]
    noted: dict[str, object]
    metadata: StoredMetadata
    provenance: list[tuple[str, str]]
    weights: dict[str, float]
    audit: str | None
    certificate: dict[str, object] | None


class _Summary(msgspec.Struct):
    """What the list shows of a training's ``summary.json``."""

    environment: str | None = None
    model: str | None = None
    steps: int | None = None


class _TrainerState(msgspec.Struct):
    """The same of a checkpoint's ``trainer_state.json``."""

    max_steps: int | None = None


@dataclass(frozen=True, slots=True)
class _TrainingFacts:
    """The same of all files of a training."""

    env_id: str | None
    model: str | None
    max_steps: int | None
    ended: str
    """Why the last session ended, if with an error."""
    provenance: object
    """Of the last session."""
    settings: dict[str, object]


def describe(source: Source) -> RunEntry:
    """The entry of a run in the list."""
    try:
        facts = _training(source) if source.kind == TRAINING else _evaluation(source)
    except (OSError, *DAMAGE) as error:
        facts = _damaged(source, error)
    return {
        "id": source.id,
        "kind": source.kind,
        "name": source.folder.name,
        "path": str(source.folder),
        **facts,
    }


def _damaged(source: Source, error: Exception) -> _RunFacts:
    """The entry of a run with other files than a run writes. *Raises* OSError if it was removed."""
    stat = os.stat(source.folder / (METRICS_NAME if source.kind == TRAINING else RESULTS_NAME))
    log.warning("%s cannot be described: %s: %s", source.folder, type(error).__name__, error)
    return {
        "env": source.folder.name,
        "model": "",
        "reward": None,
        "stderr": None,
        "rollouts": None,
        "planned": None,
        "errors": None,
        "unscored": None,
        "metrics": {},
        "settings": {},
        "tokens": None,
        "cost": None,
        "success": None,
        "success_metric": None,
        "pass_at_k": {},
        "pass_at_k_interval": {},
        "pass_at_k_examples": {},
        "unknown": None,
        "pass_threshold": None,
        "status": "damaged",
        "date": _iso(stat.st_mtime),
        "changed": stat.st_mtime,
        "seconds": None,
        "size": stat.st_size,
    }


def settings(source: Source) -> RunSettings:
    """The stored ``config`` and ``metadata``, the weights of the reward functions, where the numbers
    come from as lines of a table (``provenance``), and ``certificate``, the content of an installed
    environment's, in words ``audit``. *Raises* ConfigError for damaged files."""
    with _damage_told(source):
        return _settings(source)


def weights(source: Source) -> dict[str, float]:
    """The weight of each reward function, by name. *Raises* ConfigError as ``settings``, which
    takes a hundred times as long."""
    with _damage_told(source):
        return _weights(_config(source.folder))


@contextlib.contextmanager
def _damage_told(source: Source) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise ConfigError(
            f"the settings in {source.folder} are damaged ({type(error).__name__}: {error});"
            f" restore {CONFIG_NAME} and {METADATA_NAME}"
        ) from error


class _Weighted(msgspec.Struct):
    """The part of a run's configuration that ``_weights`` reads."""

    reward_functions: list[str] | None = None
    reward_weights: list[object] | None = None


def _weights(config: Mapping[str, object]) -> dict[str, float]:
    weighted = msgspec.convert(config, _Weighted)
    pairs = zip(weighted.reward_functions or (), weighted.reward_weights or (), strict=False)
    return {name: value for name, value in pairs if isinstance(value, int | float)}


def _settings(source: Source) -> RunSettings:
    stored = None
    with contextlib.suppress(ConfigError):
        stored = read_config(source.folder)
    config = {} if stored is None else stored["config"]
    metadata = read_metadata(source.folder) or {}
    env_id, record, facts = config.get("env_id") or metadata.get("env_id"), None, {}
    if source.kind == TRAINING:
        training = _training_facts(source.folder)
        env_id, record, facts = env_id or training.env_id, training.provenance, training.settings
    record = record or metadata.get("provenance")
    try:
        certificate = read_certificate(str(env_id)) if env_id else None
    except UsageError:  # it is not installed here
        certificate = None
    content = None
    if certificate is not None:
        content = {**certificate.content, "is_fresh": certificate.is_fresh}
    return {
        "config": config,
        "flat": flat_settings(config | facts),
        "noted": {} if stored is None else stored.get("noted", {}),
        "metadata": metadata,
        "provenance": provenance_rows(record),
        "weights": _weights(config),
        "audit": None if certificate is None else str(certificate),
        "certificate": content,
    }


def metric_names(source: Source) -> list[str]:
    """Names of a run's metrics, for saved rollouts that do not contain them."""
    return list((read_metadata(source.folder) or {}).get("avg_metrics") or ())


def _evaluation(source: Source) -> _RunFacts:
    metadata = read_metadata(source.folder) or {}
    config = _config(source.folder)
    stat = os.stat(f"{source.folder}/{RESULTS_NAME}")
    num_examples, siblings = metadata.get("num_examples"), metadata.get("rollouts_per_example")
    name_of_folder = source.folder.parent.name.partition("--")[0]
    max_tokens = max_tokens_of(metadata.get("sampling_args"), metadata.get("local_model"))
    unknown, bounds = metadata.get("pass_at_k_unknown"), metadata.get("pass_at_k_bounds") or {}
    return {
        "env": metadata.get("env_id") or str(config.get("env_id") or name_of_folder),
        "model": metadata.get("model") or str(config.get("model") or ""),
        "reward": _number_or_none(metadata.get("avg_reward")),
        "stderr": _number_or_none(metadata.get("reward_stderr")),
        "rollouts": metadata.get("num_rollouts"),
        "planned": None if num_examples is None or siblings is None else num_examples * siblings,
        "coverage": list(coverage_lines(metadata.get("coverage"), max_tokens)),
        "errors": metadata.get("num_errors"),
        "unscored": metadata.get("num_unscored"),
        "metrics": metadata.get("avg_metrics") or {},
        "settings": _listed(config, metadata),
        "tokens": _tokens(metadata),
        "cost": _number_or_none(metadata.get("cost_usd")),
        "success": _number_or_none(metadata.get("avg_success")),
        "success_metric": metadata.get("success_metric"),
        "pass_at_k": metadata.get("pass_at_k") or {},
        "pass_at_k_interval": metadata.get("pass_at_k_interval") or {},
        "pass_at_k_examples": metadata.get("pass_at_k_examples") or {},
        "unknown": unknown_text(unknown, metadata.get("num_rollouts"), bounds) if unknown else None,
        "pass_threshold": metadata.get("pass_threshold"),
        "status": _status(source, metadata),
        "date": metadata.get("date") or _iso(stat.st_mtime),
        "changed": stat.st_mtime,
        "seconds": metadata.get("time"),
        "size": stat.st_size,
    }


def _listed(config: Mapping[str, object], metadata: StoredMetadata) -> dict[str, object]:
    """The settings of an evaluation that the list of runs can show, flat, long texts cut."""
    parts = {name: config.get(name, metadata.get(name)) for name in LISTED}
    parts |= {name: metadata.get(name) for name in ("num_examples", "rollouts_per_example")}
    defaults = (metadata.get("local_model") or {}).get("sampling") or {}
    sampling = parts["sampling_args"] or {}
    if not isinstance(sampling, Mapping):
        raise TypeError(f"sampling_args is {sampling!r:.40}, no object")
    parts["sampling_args"] = {**defaults, **sampling}
    listed = {}
    for name, value in flat(parts).items():
        short = name.replace("sampling_args.", "sampling.").replace("extra_body.", "")
        listed[short] = value[:MAX_SETTING_CHARS] if isinstance(value, str) else value
    return listed


def _tokens(metadata: StoredMetadata) -> float | None:
    """Tokens read and written over all rollouts; ``usage`` has the means per rollout."""
    usage, num_rollouts = reported(metadata.get("usage")), metadata.get("num_rollouts")
    means = [_number_or_none(usage.get(name)) for name in ("input_tokens", "output_tokens")]
    if num_rollouts is None or all(mean is None for mean in means):
        return None
    return num_rollouts * sum(mean or 0.0 for mean in means)


def _status(source: Source, metadata: StoredMetadata) -> str:
    is_begun = (source.folder / CONFIG_NAME).is_file()
    status = str(metadata.get("status") or ("running" if is_begun else "complete"))
    if status == "running" and not _is_written(source, None):
        return "interrupted"
    return STATUSES.get(status, status)


def _training(source: Source) -> _RunFacts:
    curves = Curves(source.folder / METRICS_NAME)
    curves.read()
    last, previous = curves.last("reward/mean"), curves.last("eval_reward")
    stat = (source.folder / METRICS_NAME).stat()
    facts = _training_facts(source.folder)
    goal = facts.max_steps
    if any(step == curves.step for step, _ in curves.points("solved")):
        goal = curves.step
    if _is_written(source, curves.seconds_per_step()) and not (goal and curves.step >= goal):
        status = "running"
    elif facts.ended:
        status = "failed"
    elif goal:
        status = "finished" if curves.step >= goal else "interrupted"
    else:
        status = "ended"
    return {
        "env": facts.env_id or source.folder.name,
        "model": facts.model or "",
        "reward": last if last is not None else previous,
        "stderr": None,
        "rollouts": curves.step,
        "planned": goal,
        "coverage": list(coverage_lines(counts_in_metrics(curves.lines))),
        "errors": int(curves.total("rollouts/errors")),
        "unscored": int(curves.total("reward/unscored")),
        "metrics": {},
        "settings": flat(facts.settings),
        "tokens": curves.total("tokens/prompt") + curves.total("tokens/completion") or None,
        "cost": None,
        "success": curves.last("reward/success"),
        "curve": curves.thumbnail("reward/mean", 40),
        "status": status,
        "ended": facts.ended if status == "failed" else None,
        "date": _iso(next(iter(curves.times), None) or stat.st_mtime),
        "changed": stat.st_mtime,
        "seconds": curves.seconds,
        "size": sum(entry.stat().st_size for entry in _entries(source.folder)),
    }


def _training_facts(folder: Path) -> _TrainingFacts:
    """From the newest file of a training that has each."""
    summary = _read(folder / "summary.json", _Summary)
    checkpoints = folder.glob(f"checkpoint-*/{STATE_NAME}")
    newest = max(checkpoints, key=lambda path: path.stat().st_mtime, default=None)
    started = _read(folder / SETTINGS_NAME, TrainingSettings)
    saved, state = started, _TrainerState()
    if newest is not None:
        saved = _read(newest, TrainingSettings)
        state = _read(newest.parent / "trainer_state.json", _TrainerState)
    env_id = saved.configuration.get("env_id")
    return _TrainingFacts(
        summary.environment or (None if env_id is None else str(env_id)),
        summary.model or saved.model,
        state.max_steps or summary.steps or started.max_steps,
        started.ended or "",
        started.provenance,
        saved.configuration,
    )


def _is_written(
    source: Source,
    seconds_per_step: float | None,
    watched: Mapping[str, os.stat_result] | None = None,
) -> bool:
    """Whether a process is writing the run: its lock's process is alive on this host, or its files
    changed recently.

    ``watched``: the result of ``_stats``, if it is there already.
    """
    folder = str(source.folder)
    watched = _stats(folder) if watched is None else watched
    if (lock := watched.get(LOCK_NAME)) is not None:
        holder = _holder(f"{folder}/{LOCK_NAME}", lock.st_ino, lock.st_size, lock.st_mtime_ns)
        if holder.pid is not None and holder.host == socket.gethostname():
            return is_alive(holder.pid)
    changed = max((stat.st_mtime for stat in watched.values()), default=0.0)
    with contextlib.suppress(OSError):
        changed = max(changed, os.stat(f"{folder}/completions").st_mtime)
    return time.time() - changed < max(QUIET_S, 5 * (seconds_per_step or 0))


def _stats(folder: str) -> dict[str, os.stat_result]:
    """The files whose changes are noticed, by name. Joins texts: making paths takes longer."""
    stats = {}
    for name in _WATCHED:
        with contextlib.suppress(OSError):
            stats[name] = os.stat(f"{folder}/{name}")
    return stats


@functools.lru_cache(maxsize=MAX_HOLDERS)
def _holder(lock: str, inode: int, size: int, changed_ns: int) -> Holder:
    """Read again when the file changed."""
    return Holder.read(lock)


def _config(folder: Path) -> dict[str, object]:
    with contextlib.suppress(ConfigError):
        return saved_config(folder)
    return {}


def _read(file: str | Path, kind: type[T]) -> T:
    """What a file says; nothing if it cannot be read."""
    try:
        return read_record(file, kind)
    except (OSError, ValueError):
        return kind()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    files: list[os.DirEntry[str]] = []
    for path in (folder, folder / "completions"):
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            files += [entry for entry in entries if entry.is_file(follow_symlinks=False)]
    return files


def _number_or_none(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _iso(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
