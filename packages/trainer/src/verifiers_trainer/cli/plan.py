"""Plan a run before its model is loaded: settings, environment, folder, checkpoint to resume from.

All problems are reported in one ``ConfigError``: keys and types (``settings``), ranges and
combinations (``RLConfig``), arguments of the environment (its loader), the output folder. Writes
nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verifiers.cli.common.reader import Assignment, raise_together
from verifiers.environments.base import Environment
from verifiers.environments.registry import load_environment
from verifiers.errors import ConfigError, UsageError
from verifiers.results import load_results
from verifiers_trainer.algorithm.registry import importing_nothing
from verifiers_trainer.cli.settings import TrainSettings, read_settings, to_toml
from verifiers_trainer.cli.sources import read_words
from verifiers_trainer.pipeline.mixture import joined
from verifiers_trainer.policy import adapters, checkpoint_files
from verifiers_trainer.settings.config import RLConfig

FOLDER_FLAGS = ("--output-dir", "--resume")
"""Options that set the folder of the run; they are not settings."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that can be started."""

    settings: TrainSettings
    config: RLConfig
    env: Environment
    checkpoint: Path | None
    """The checkpoint to resume from; None = start a new run."""

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir or "outputs")

    @property
    def resolved(self) -> RLConfig:
        """The settings with derived values."""
        config = self.config.private_copy()
        config.problems(config.world_size)
        adapters.adopt_settings(self.settings.model, config)
        return config

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run; of saved runs by epochs, at most as many."""
        table = self.env.train_table if self.env.train_table is not None else self.env.eval_table
        config = self.resolved
        if not config.saved_runs or not config.counts_epochs:
            return config.steps_for(len(table))
        runs = [config.saved_runs] if isinstance(config.saved_runs, str) else config.saved_runs
        rollouts = sum(len(load_results(run)) for run in runs)  # those that are left out count too
        return config.steps_for(rollouts, math.ceil(rollouts / config.batch_size))

    @property
    def first_step(self) -> int:
        """Optimizer step of the checkpoint; 0 without a checkpoint."""
        return step_of(self.checkpoint) if self.checkpoint else 0


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint; 0 for other names."""
    number = folder.name.removeprefix(checkpoint_files.PREFIX)
    return int(number) if number.isdigit() else 0


def make_plan(
    words: Sequence[str],
    output_dir: str | None = None,
    resume: str | None = None,
    fresh: bool = False,
) -> Plan:
    """Return the plan of a command line.

    ``resume`` is None (from a checkpoint if there is any), "" (there must be a checkpoint) or a
    path; ``fresh`` never resumes. *Raises* ``ConfigError`` with every problem, ``CheckpointError``
    for a checkpoint that cannot be used.
    """
    settings, config, problems = _read(words, output_dir, resume, fresh)
    env = None
    if settings.env_id:
        location = settings.locations.get("env.id", "[env]")
        env = _collect(problems, location, lambda: _load(settings))
    raise_together(problems)
    assert config is not None
    assert env is not None
    return Plan(
        settings,
        config,
        env,
        None if fresh else _starting_point(Path(config.output_dir or ""), resume),
    )


def printed_settings(
    words: Sequence[str], output_dir: str | None, resume: str | None, fresh: bool
) -> str:
    """All settings of a command line as TOML. Runs no code that they name: an environment, a loss.
    *Raises* as ``make_plan``."""
    with importing_nothing():
        settings, config, problems = _read(words, output_dir, resume, fresh)
        raise_together(problems)
        assert config is not None
        return to_toml(settings, config)


def _read(
    words: Sequence[str], output_dir: str | None, resume: str | None, fresh: bool
) -> tuple[TrainSettings, RLConfig | None, list[str]]:
    """(the settings, the configuration if it can be made, every problem)."""
    assignments, problems = read_words(words)
    if fresh and resume is not None:
        problems.append("--fresh and --resume exclude each other: give one of them")
    folder_argument = output_dir
    if resume and not output_dir:
        is_checkpoint = Path(resume).name.startswith(checkpoint_files.PREFIX)
        folder_argument = str(Path(resume).parent if is_checkpoint else Path(resume))
    if folder_argument:
        flag = FOLDER_FLAGS[0 if output_dir else 1]
        assignments.append(Assignment(("trainer", "args", "output_dir"), folder_argument, flag))
    _use_one_device()
    settings, setting_problems = read_settings(assignments, torch.cuda.device_count())
    problems += setting_problems
    config = _collect(
        problems, "[trainer.args]", lambda: _config_class(settings)(**settings.config)
    )
    if config is not None:
        problems += map(settings.at, config.private_copy().problems(config.world_size))
        problems += _folder_problems(Path(config.output_dir))
    return settings, config, problems


def _load(settings: TrainSettings) -> Environment:
    """Load the environment, or the group of several."""
    members = [load_environment(table.id, **table.args) for table in settings.environments]
    for table, env in zip(settings.environments, members, strict=True):
        if table.branching is not None:
            env.set_kwargs(branching=table.branching)
    if not settings.mixture:
        return members[0]
    return joined(members, [table.name for table in settings.mixture])


def _config_class(settings: TrainSettings) -> type[RLConfig]:
    if settings.algorithm == "rl":
        return RLConfig
    from verifiers_trainer.grpo import GRPOConfig

    return GRPOConfig


def _use_one_device() -> None:
    """Hide all CUDA devices but the first: transformers would copy the model to each and split
    batches."""
    if torch.cuda.device_count() > 1 and "LOCAL_RANK" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[
            0
        ]


def _collect(problems: list[str], location: str, make: Callable[[], object]) -> Any:
    """Return ``make()``; None, with the error appended to ``problems``, when the settings are
    invalid."""
    try:
        return make()
    except (UsageError, ValueError, TypeError, ImportError) as error:
        problems.append(f"{location}: {error}")
        return None


def _folder_problems(folder: Path) -> list[str]:
    """Return why a folder cannot be written, without writing to it."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        return [f"cannot write to {folder}: {nearest} is a file; choose another --output-dir"]
    if not os.access(nearest, os.W_OK | os.X_OK):
        return [
            f"cannot write to {folder}: no permission to write in {nearest}; choose another"
            " --output-dir"
        ]
    return []


# --- resuming -------------------------------------------------------------------------------------


def _starting_point(folder: Path, resume: str | None) -> Path | None:
    if resume and Path(resume).name.startswith(checkpoint_files.PREFIX):
        checkpoint_files.verify(Path(resume))
        return Path(resume)
    newest = checkpoint_files.newest_valid(folder)
    if newest is None and resume is not None:
        raise ConfigError(f"{resume or folder} holds no valid checkpoint to resume from")
    if newest is None and (damaged := checkpoint_files.steps_in(folder)):
        raise ConfigError(
            f"none of the {len(damaged)} checkpoint(s) in {folder} is valid; --fresh moves them "
            "aside and starts a new run"
        )
    return newest
