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
from pathlib import Path
from typing import Any

from verifiers.checks.audit.certificate import read_certificate
from verifiers.errors import ConfigError, UsageError
from verifiers.results.coverage import counts_in_metrics, coverage_lines
from verifiers.results.texts import flat, flat_settings, max_tokens_of, unknown_text
from verifiers.rollouts.values import reported
from verifiers.runtime.alive import is_alive
from verifiers.runtime.decoding import read_json
from verifiers.storage.directory import (
    CONFIG_NAME,
    METADATA_NAME,
    METRICS_NAME,
    RESULTS_NAME,
    read_config,
    read_metadata,
)
from verifiers.storage.files import LOCK_NAME
from verifiers.storage.provenance import provenance_rows
from verifiers.view.catalog import TRAINING, Source
from verifiers.view.curves import Curves

log = logging.getLogger(__name__)
LISTED = ("env_args", "sampling_args", "seed", "system_prompt", "max_turns")
"""Parts of an evaluation's configuration that the list of runs can show."""
PASS_RATES = ("pass_at_k", "pass_at_k_interval", "pass_at_k_examples")
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


def describe(source: Source) -> dict[str, Any]:
    """The entry of a run in the list. Unknown numbers are None."""
    names = {"id": source.id, "kind": source.kind, "name": source.folder.name}
    common = names | {"path": str(source.folder)}
    try:
        return common | (_training(source) if source.kind == TRAINING else _evaluation(source))
    except (OSError, *DAMAGE) as error:
        return common | _damaged(source, error)


def _damaged(source: Source, error: Exception) -> dict[str, object]:
    """The entry of a run with other files than a run writes. *Raises* OSError if it was removed."""
    stat = os.stat(source.folder / (METRICS_NAME if source.kind == TRAINING else RESULTS_NAME))
    log.warning("%s cannot be described: %s: %s", source.folder, type(error).__name__, error)
    unknown = dict.fromkeys(
        "reward stderr rollouts planned errors unscored tokens cost success success_metric"
        " pass_threshold seconds".split()
    )
    return unknown | {
        "env": source.folder.name,
        "model": "",
        **{name: {} for name in ("metrics", "settings", *PASS_RATES)},
        "unknown": None,
        "status": "damaged",
        "date": _iso(stat.st_mtime),
        "changed": stat.st_mtime,
        "size": stat.st_size,
    }


def settings(source: Source) -> dict[str, Any]:
    """The stored ``config`` and ``metadata``, the weights of the reward functions, where the numbers
    come from as lines of a table (``provenance``), and ``certificate``, the content of an installed
    environment's, in words ``audit``. *Raises* ConfigError for damaged files."""
    with _damage_told(source):
        return _settings(source)


def weights(source: Source) -> dict[str, float]:
    """The weight of each reward function, by name. *Raises* ConfigError as ``settings``, which
    takes a hundred times as long."""
    with _damage_told(source):
        return _weights(_config(source.folder).get("config") or {})


@contextlib.contextmanager
def _damage_told(source: Source) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise ConfigError(
            f"the settings in {source.folder} are damaged ({type(error).__name__}: {error});"
            f" restore {CONFIG_NAME} and {METADATA_NAME}"
        ) from error


def _weights(config: Mapping[str, Any]) -> dict[str, float]:
    names, numbers = config.get("reward_functions") or [], config.get("reward_weights") or []
    pairs = zip(names, numbers, strict=False)
    return {name: value for name, value in pairs if isinstance(value, int | float)}


def _settings(source: Source) -> dict[str, Any]:
    stored = _config(source.folder)
    config = stored.get("config") or {}
    training = _training_facts(source.folder) if source.kind == TRAINING else {}
    facts = training.get("settings") or {}
    metadata = read_metadata(source.folder) or {}
    env_id = config.get("env_id") or training.get("env_id") or metadata.get("env_id")
    record = training.get("provenance") or metadata.get("provenance")
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
        "noted": stored.get("noted") or {},
        "metadata": metadata,
        "provenance": provenance_rows(record),
        "weights": _weights(config),
        "audit": None if certificate is None else str(certificate),
        "certificate": content,
    }


def metric_names(source: Source) -> list[str]:
    """Names of a run's metrics, for saved rollouts that do not contain them."""
    return list((read_metadata(source.folder) or {}).get("avg_metrics") or ())


def _evaluation(source: Source) -> dict[str, Any]:
    metadata = read_metadata(source.folder) or {}
    config = _config(source.folder).get("config") or {}
    stat = os.stat(f"{source.folder}/{RESULTS_NAME}")
    sizes = [metadata.get(name) for name in ("num_examples", "rollouts_per_example")]
    name_of_folder = source.folder.parent.name.partition("--")[0]
    return {
        "env": metadata.get("env_id") or config.get("env_id") or name_of_folder,
        "model": metadata.get("model") or config.get("model") or "",
        "reward": _number_or_none(metadata.get("avg_reward")),
        "stderr": _number_or_none(metadata.get("reward_stderr")),
        "rollouts": metadata.get("num_rollouts"),
        "planned": math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None,
        "coverage": list(coverage_lines(metadata.get("coverage"), max_tokens_of(metadata))),
        "errors": metadata.get("num_errors"),
        "unscored": metadata.get("num_unscored"),
        "metrics": metadata.get("avg_metrics") or {},
        "settings": _listed(config, metadata),
        "tokens": _tokens(metadata),
        "cost": _number_or_none(metadata.get("cost_usd")),
        "success": _number_or_none(metadata.get("avg_success")),
        "success_metric": metadata.get("success_metric"),
        **{name: metadata.get(name) or {} for name in PASS_RATES},
        "unknown": unknown_text(metadata) if metadata.get("pass_at_k_unknown") else None,
        "pass_threshold": metadata.get("pass_threshold"),
        "status": _status(source, metadata),
        "date": metadata.get("date") or _iso(stat.st_mtime),
        "changed": stat.st_mtime,
        "seconds": metadata.get("time"),
        "size": stat.st_size,
    }


def _listed(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, object]:
    """The settings of an evaluation that the list of runs can show, flat, long texts cut."""
    parts = {name: config.get(name, metadata.get(name)) for name in LISTED}
    parts |= {name: metadata.get(name) for name in ("num_examples", "rollouts_per_example")}
    defaults = (metadata.get("local_model") or {}).get("sampling") or {}
    parts["sampling_args"] = {**defaults, **(parts["sampling_args"] or {})}
    listed = {}
    for name, value in flat(parts).items():
        short = name.replace("sampling_args.", "sampling.").replace("extra_body.", "")
        listed[short] = value[:MAX_SETTING_CHARS] if isinstance(value, str) else value
    return listed


def _tokens(metadata: Mapping[str, Any]) -> float | None:
    """Tokens read and written over all rollouts; ``usage`` has the means per rollout."""
    usage, num_rollouts = reported(metadata.get("usage")), metadata.get("num_rollouts")
    means = [_number_or_none(usage.get(name)) for name in ("input_tokens", "output_tokens")]
    if not isinstance(num_rollouts, int) or all(mean is None for mean in means):
        return None
    return num_rollouts * sum(mean or 0.0 for mean in means)


def _status(source: Source, metadata: Mapping[str, object]) -> str:
    is_begun = (source.folder / CONFIG_NAME).is_file()
    status = str(metadata.get("status") or ("running" if is_begun else "complete"))
    if status == "running" and not _is_written(source, None):
        return "interrupted"
    return STATUSES.get(status, status)


def _training(source: Source) -> dict[str, Any]:
    curves = Curves(source.folder / METRICS_NAME)
    curves.read()
    last, previous = curves.last("reward/mean"), curves.last("eval_reward")
    stat = (source.folder / METRICS_NAME).stat()
    facts = _training_facts(source.folder)
    goal = facts.get("max_steps")
    if any(step == curves.step for step, _ in curves.points("solved")):
        goal = curves.step
    if _is_written(source, curves.seconds_per_step()) and not (goal and curves.step >= goal):
        status = "running"
    elif facts["ended"]:
        status = "failed"
    elif goal:
        status = "finished" if curves.step >= goal else "interrupted"
    else:
        status = "ended"
    return {
        "env": facts.get("env_id") or source.folder.name,
        "model": facts.get("model") or "",
        "reward": last if last is not None else previous,
        "stderr": None,
        "rollouts": curves.step,
        "planned": goal,
        "coverage": list(coverage_lines(counts_in_metrics(curves.lines))),
        "errors": int(curves.total("rollouts/errors")),
        "unscored": int(curves.total("reward/unscored")),
        "metrics": {},
        "settings": flat(facts.get("settings") or {}),
        "tokens": curves.total("tokens/prompt") + curves.total("tokens/completion") or None,
        "cost": None,
        "success": curves.last("reward/success"),
        "curve": curves.thumbnail("reward/mean", 40),
        "status": status,
        "ended": facts["ended"] if status == "failed" else None,
        "date": _iso(next(iter(curves.times), None) or stat.st_mtime),
        "changed": stat.st_mtime,
        "seconds": curves.seconds,
        "size": sum(entry.stat().st_size for entry in _entries(source.folder)),
    }


def _training_facts(folder: Path) -> dict[str, Any]:
    """``env_id``, ``model``, ``max_steps`` and ``settings`` from the newest file of a training run
    that has them, why it ``ended`` if with an error, and the ``provenance`` of its last session."""
    summary = _json(folder / "summary.json")
    checkpoints = folder.glob("checkpoint-*/rl_state.json")
    newest = max(checkpoints, key=lambda path: path.stat().st_mtime, default=None)
    started = _json(folder / "settings.json")
    saved = started if newest is None else _json(newest)
    state = {} if newest is None else _json(newest.parent / "trainer_state.json")
    configuration = saved.get("configuration") or {}
    return {
        "env_id": summary.get("environment") or configuration.get("env_id"),
        "model": summary.get("model") or saved.get("model"),
        "max_steps": state.get("max_steps") or summary.get("steps") or started.get("max_steps"),
        "ended": str(started.get("ended") or ""),
        "provenance": started.get("provenance"),
        **({"settings": configuration} if configuration else {}),
    }


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
        pid, host = _holder(f"{folder}/{LOCK_NAME}", lock.st_ino, lock.st_size, lock.st_mtime_ns)
        if pid is not None and host == socket.gethostname():
            return is_alive(pid)
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
def _holder(lock: str, inode: int, size: int, changed_ns: int) -> tuple[int | None, object]:
    """(pid, host) in a lock file; read again when the file changed."""
    holder = _json(lock)
    pid = holder.get("pid")
    return (pid if isinstance(pid, int) else None), holder.get("host")


def _config(folder: Path) -> dict[str, Any]:
    try:
        return read_config(folder) or {}
    except ConfigError:
        return {}


def _json(file: str | Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


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
