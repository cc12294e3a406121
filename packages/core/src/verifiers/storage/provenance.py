"""Where the numbers of a run came from: one record for evaluations (``metadata.json``) and trainings
(``settings.json``).

``provenance`` makes it, ``provenance_rows`` says it in words. What decides whether a run may be
resumed is compared elsewhere (``configurations``, and the trainer's ``run.resume``): a record is
written and shown, and never refuses a run. It holds no secret.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import verifiers
from verifiers.runtime.distributions import distributions
from verifiers.runtime.redaction import redacted, redacted_words
from verifiers.storage.identity import EnvironmentParts
from verifiers.storage.source_code import module_name

PACKAGES = (
    "verifiers",
    *distributions(),
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "vllm",
    "openai",
    "datasets",
    "numpy",
)
"""Distributions whose versions are recorded, where they are installed."""
GIT_S = 5.0
"""Seconds that git may take to say a commit."""
MAX_EARLIER = 100
"""Earlier sessions of a run that its record keeps, the newest."""


def provenance(former: object = None, /, **facts: object) -> dict[str, Any]:
    """The record of a session of a run: ``date command folder python platform packages commit``,
    and ``facts``, without secrets.

    former: the record of the run's last session, if it is resumed; ``earlier`` then has, of every
    session before this one, what differed from this one.
    """
    block: dict[str, object] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(redacted_words(sys.orig_argv)),
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
        "commit": own_commit(),
        **redacted(facts),
    }
    if isinstance(former, Mapping):
        sessions = [{**former, **earlier} for earlier in former.get("earlier") or ()]
        sessions.append(dict(former))
        block["earlier"] = [_difference(session, block) for session in sessions[-MAX_EARLIER:]]
    return block


def _difference(session: Mapping[str, object], present: Mapping[str, object]) -> dict[str, object]:
    return {
        name: value
        for name, value in session.items()
        if name != "earlier" and value != present.get(name)
    }


@functools.cache
def versions() -> dict[str, str]:
    """The installed versions of ``PACKAGES``."""
    installed = {"verifiers": verifiers.__version__}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def own_commit() -> dict[str, object] | None:
    """The commit of this library, where it runs from a clone; see ``commit_of``."""
    return commit_of(Path(verifiers.__file__).parent, is_whole=True)


@functools.cache
def commit_of(folder: Path, is_whole: bool = False) -> dict[str, object] | None:
    """``sha`` of the git commit that a source folder is of, and ``is_clean``: whether nothing below
    it differs (``is_whole``: nothing in the whole tree).

    Read once per process. None for installed files, outside of a clone, and where git is absent.
    """
    if any(part in ("site-packages", "dist-packages") for part in folder.parts):
        return None  # they may lie in a clone of something else
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch"]
    try:
        ended = subprocess.run(
            [*command, "--", ":/" if is_whole else "."],
            cwd=folder,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = ended.stdout.splitlines()
    shas = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if not shas or shas[0] == "(initial)":
        return None
    return {"sha": shas[0], "is_clean": all(line.startswith("#") for line in lines)}


def environment_facts(env: EnvironmentParts) -> dict[str, object]:
    """``id``, ``version`` and ``commit`` of an environment, for ``provenance``: of its class, or of
    the first of its reward functions in a clone."""
    library = Path(verifiers.__file__).parent
    modules = map(module_name, (env, *env.rubric.get_reward_funcs()))
    files = [getattr(sys.modules.get(str(name)), "__file__", None) for name in modules]
    folders = [Path(file).resolve().parent for file in files if isinstance(file, str)]
    commits = (commit_of(folder) for folder in folders if not folder.is_relative_to(library))
    return {
        "id": env.env_id or type(env).__name__,
        "version": env.env_version or None,
        "commit": next(filter(None, commits), None),
    }


# --- in words -------------------------------------------------------------------------------------


def provenance_rows(block: object) -> list[tuple[str, str]]:
    """(name, text) of a record, for tables; empty without one."""
    if not isinstance(block, Mapping):
        return []
    rows = []
    for name, value in block.items():
        if name == "earlier":
            value = f"{len(value)}, of {', '.join(str(s.get('date')) for s in value)}"
            name = "earlier sessions"
        elif name == "settings" or value in (None, {}, []):
            continue
        rows.append((name.replace("_", " "), _in_words(value)))
    return rows


def _in_words(value: object) -> str:
    if isinstance(value, Mapping) and value.keys() == {"sha", "is_clean"}:
        return f"{value['sha']}{'' if value['is_clean'] else ', with changes'}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_in_words(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_words, value))
    return str(value)
