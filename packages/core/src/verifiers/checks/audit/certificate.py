"""Certificates: the result of an audit, stored as ``audit.json`` beside an environment's code.

A certificate holds the hash of the package's files. It is stale when they have changed since;
``vf-install --list`` shows both. Reading a certificate imports nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.checks.audit.report import MANY_ROWS, NOT_REPEATABLE, AuditReport, Paid
from verifiers.environments import registry
from verifiers.environments.base import Environment
from verifiers.environments.registry import FoundEnvironment
from verifiers.errors import ConfigError, UsageError
from verifiers.runtime.bounded import open_file
from verifiers.runtime.decoding import read_json
from verifiers.storage.files import atomic_write

NAME = "audit.json"
SCHEMA = 1
_SKIPPED = ("__pycache__", NAME)


@dataclass(frozen=True, slots=True)
class Certificate:
    """A stored audit: ``Certificate("gsm8k", True, True, "2026-11-23", 0.0, {…})``."""

    environment: str
    ok: bool
    is_fresh: bool
    """Whether the files are those that were audited."""
    date: str
    non_solution_reward: float
    """What the best non-solution earned; NaN if no reward is known without a model."""
    content: Mapping[str, Any]

    def __str__(self) -> str:
        if not self.is_fresh:
            return f"audit of {self.date} is stale: the package has changed"
        if math.isnan(self.non_solution_reward):
            return f"audited {self.date}: the rows; its reward needs a judge"
        errors = ", ".join(self.content.get("errors") or ["?"])
        verdict = "passed" if self.ok else f"FAILED: {errors}"
        return f"audit {verdict} {self.date}, best non-solution {self.non_solution_reward:.3g}"


def content_hash(folder: Path) -> str:
    """SHA-256 over the names and bytes of a package's files, but caches and the certificate."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not any(part in _SKIPPED for part in file.relative_to(folder).parts):
            digest.update(
                f"{file.relative_to(folder).as_posix()}\0{file.stat().st_size}\0".encode()
            )
            with open_file(file) as content:
                while chunk := content.read(2**20):
                    digest.update(chunk)
    return digest.hexdigest()


def folder_of(source: FoundEnvironment) -> Path | None:
    """The folder of an environment's package; None for a single file. Imports nothing."""
    if source.local is not None:
        return source.local.file.parent if source.local.file.name == "__init__.py" else None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(source.module.partition(".")[0])
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


def read_certificate(env_id: str) -> Certificate | None:
    """The certificate of an environment, by id or path, or None. *Raises* as ``registry.find``."""
    folder = folder_of(registry.find(env_id))
    return None if folder is None else certificate_in(folder)


def certificate_in(folder: Path) -> Certificate | None:
    """The certificate in a package's folder; None when there is none, or it cannot be read."""
    try:
        content = read_json(folder / NAME)
        best = content.get("best_non_solution") or {}
        return Certificate(
            content["environment"],
            bool(content["ok"]),
            content["content"] == content_hash(folder),
            content["date"],
            float(best.get("reward", math.nan)),
            content,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def non_solution_reward(env: Environment) -> float | None:
    """What the best non-solution earns in an environment, where that is known: the line under a
    learning curve.

    ``env.non_solution_reward``, else that of a fresh certificate when the environment was loaded
    without arguments.
    """
    if env.non_solution_reward is not None:
        return env.non_solution_reward
    certificate = _certificate_of(env)
    if certificate is None:
        return None
    reward = certificate.non_solution_reward
    return None if math.isnan(reward) else reward


def paid_non_solutions(env: Environment) -> list[str]:
    """Names of the non-solutions that a fresh certificate of the environment lists as paid in full
    in at least ``MANY_ROWS`` of the rows, without needing the answer; empty without one."""
    certificate = _certificate_of(env)
    return [
        paid["name"]
        for paid in (() if certificate is None else certificate.content.get("non_solutions") or ())
        if (paid["paid_though_wrong"] or 0.0) >= MANY_ROWS and not paid["needs_the_answer"]
    ]


def _certificate_of(env: Environment) -> Certificate | None:
    """The fresh certificate of an environment that was loaded without arguments, and not changed
    since; else None."""
    if env.loaded_from is None or env.loaded_from.env_args or env.changes:
        return None
    try:
        certificate = read_certificate(env.loaded_from.env_id)
    except UsageError:  # it was loaded from another folder, or has been removed since
        return None
    return certificate if certificate is not None and certificate.is_fresh else None


def write_certificate(report: AuditReport, env_id: str) -> Path:
    """Store a report beside the code of its environment; return the file.

    *Raises* ConfigError for an environment that is no package.
    """
    import verifiers

    source = registry.find(env_id)
    folder = folder_of(source)
    if folder is None:
        raise ConfigError(
            f"{env_id} is a single file; a certificate is stored in the folder of a package",
            key="env",
        )
    best, oracle = report.best_non_solution, report.oracle
    errors = [finding.code for finding in report.errors]
    content = {
        "schema": SCHEMA,
        "environment": source.env_id or env_id,
        "package": source.distribution,
        "version": source.version,
        "content": content_hash(folder),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "verifiers": verifiers.__version__,
        "ok": report.ok,
        "errors": errors,
        "warnings": [finding.code for finding in report.warnings],
        "success_metric": report.success_metric,
        "solution_reward": None if oracle is None else _rounded(oracle.reward),
        "best_non_solution": None if best is None else _best(best),
        "num_rows": report.num_rows,
        "num_rollouts": report.num_rollouts,
        "seconds": round(report.seconds, 1),
        "is_repeatable": None if oracle is None else NOT_REPEATABLE not in errors,
        "findings": [
            {"kind": kind, "code": finding.code, "message": finding.message, "fix": finding.fix}
            for kind, findings in (("error", report.errors), ("warning", report.warnings))
            for finding in findings
        ],
        "notes": list(report.notes),
        "oracle": None if oracle is None else _earned(oracle),
        "non_solutions": [_earned(paid) for paid in report.non_solutions],
        "profile": [
            {"example": row.example_id, "solved": row.num_solved, "rollouts": row.num_rollouts}
            for row in report.profile
        ],
    }
    atomic_write(folder / NAME, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    return folder / NAME


def _best(paid: Paid) -> dict[str, object]:
    return {name: _earned(paid)[name] for name in ("name", "reward", "solved")}


def _earned(paid: Paid) -> dict[str, object]:
    return {
        "name": paid.name,
        "family": paid.family,
        "reward": _rounded(paid.reward),
        "solved": _rounded(paid.success),
        "paid_though_wrong": _rounded(paid.share_wrong_paid),
        "needs_the_answer": not paid.is_policy,
    }


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)
