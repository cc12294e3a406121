"""``python -m verifiers_integrations.tinker @ file.toml``: a run on a Tinker service.

    TINKER_API_KEY=... python -m verifiers_integrations.tinker @ tinker.toml
    --trainer.args.max_steps 20

The file has the format of ``vf-train``: ``model``, ``[env]`` with id and args, and the fields of
``TinkerConfig`` in ``[trainer.args]``. The same command resumes a stopped run; ``--fresh`` starts a
new run. The numbers of the last step are one JSON object on stdout.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from verifiers.cli.common.reader import raise_together, store
from verifiers.environments.registry import load_environment
from verifiers.errors import VerifiersError
from verifiers.runtime.redaction import redacted_text
from verifiers.runtime.terminal import escape_control
from verifiers_integrations.tinker.settings import TinkerConfig, fields
from verifiers_trainer.cli.settings import ARGS
from verifiers_trainer.cli.sources import read_words

USAGE = (
    "python -m verifiers_integrations.tinker @ FILE.toml [--trainer.args.NAME VALUE]... [--fresh]"
)


def read(words: Sequence[str]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return (environment id, its arguments, settings) of a command line; later assignments have
    precedence.

    *Raises* ``ConfigError`` with every unknown key and its place.
    """
    assignments, problems = read_words(words)
    env: dict[str, Any] = {"id": "", "args": {}}
    of_run = []
    for entry in assignments:
        if entry.path == ("env", "id") or (entry.path[:2] == ("env", "args") and entry.path[2:]):
            store(env, entry.path[1:], entry.value)
        elif entry.path == ("model",) or (entry.path[:2] == ARGS and len(entry.path) == 3):
            of_run.append(entry)
        else:
            problems.append(f"{entry.location}: {entry.key} is not a setting of a Tinker run")
    if not env["id"]:
        problems.append("env.id is missing")
    latest = {entry.path[-1]: entry for entry in of_run}
    settings = fields().read(latest.values(), "[trainer.args]", problems)
    raise_together(problems)
    return env["id"], env["args"], settings


def train(words: Sequence[str], fresh: bool) -> None:
    """Train with the settings of a command line and print the numbers of the last step."""
    env_id, env_args, settings = read(words)
    config = TinkerConfig.of(settings)
    # late: it loads torch and transformers
    from verifiers_integrations.tinker.trainer import TinkerTrainer
    from verifiers_trainer.policy import checkpoint_files

    trainer = TinkerTrainer(load_environment(env_id, **env_args), config)
    resume = not fresh and checkpoint_files.newest_valid(config.folder) is not None
    numbers = trainer.train(resume_from_checkpoint=resume)
    summary = {
        "step": trainer.step,
        "output_dir": str(config.folder),
        "reward": numbers.get("reward/mean"),
    }
    sys.stdout.write(json.dumps(summary) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code: 0 done, 2 something to correct, 3 the run failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or {"-h", "--help"} & set(words):
        sys.stdout.write(f"usage: {USAGE}\n\n{__doc__}")
        sys.exit(0 if words else 2)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("httpx", "tinker"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        train([word for word in words if word != "--fresh"], "--fresh" in words)
    except VerifiersError as error:
        sys.stderr.write(f"{escape_control(redacted_text(str(error)))}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command resumes from the newest checkpoint\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
