"""Older ``verifiers.utils.path_utils``: where saved runs are."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import Any

from verifiers.storage.directory import RESULTS_NAME, is_complete, read_metadata


def get_results_path(
    env_id: str, model: str, base_path: str | Path = "outputs", subdir: str = "evals"
) -> Path:
    """A new folder name for a run, ``<base_path>/evals/<env_id>--<model>/<8 hex digits>``; creates
    nothing."""
    return Path(base_path, subdir, f"{env_id}--{model.replace('/', '--')}", uuid.uuid4().hex[:8])


def get_eval_runs_dir(
    env_id: str,
    model: str,
    env_dir_path: str | Path = "./environments",
    output_dir: str | Path | None = None,
) -> Path:
    """The folder that has a folder for each run of an environment with a model."""
    return get_results_path(env_id, model, _outputs(env_id, env_dir_path, output_dir)).parent


def get_gepa_results_path(
    env_id: str,
    model: str,
    env_dir_path: str | Path = "./environments",
    output_dir: str | Path | None = None,
) -> Path:
    """A new folder name for a run of a GEPA optimizer, ``<outputs>/gepa/<env_id>--<model>/<8 hex
    digits>``."""
    return get_results_path(env_id, model, _outputs(env_id, env_dir_path, output_dir), "gepa")


def _outputs(env_id: str, env_dir_path: str | Path, output_dir: str | Path | None) -> str | Path:
    """The folder given, else that of the environment's project where it is there,
    else ``outputs``."""
    project = Path(env_dir_path, env_id.replace("-", "_"))
    return output_dir or (project / "outputs" if project.is_dir() else "outputs")


def get_eval_results_path(config: Any) -> Path:
    """A new folder name for the run of an ``EvalConfig``."""
    folder = get_eval_runs_dir(config.env_id, config.model, config.env_dir_path, config.output_dir)
    return folder / uuid.uuid4().hex[:8]


def write_temp_file(content: str, suffix: str = ".txt") -> str:
    """Write text to a new temporary file, which stays; its path."""
    with tempfile.NamedTemporaryFile("w", suffix=suffix, delete=False, encoding="utf-8") as file:
        file.write(content)
    return file.name


def is_valid_eval_results_path(path: str | Path) -> bool:
    """Whether a folder contains results and metadata of a run."""
    folder = Path(path)
    return (folder / RESULTS_NAME).is_file() and read_metadata(folder) is not None


def find_latest_incomplete_eval_results_path(
    env_id: str,
    model: str,
    num_examples: int | None = None,
    rollouts_per_example: int | None = None,
    env_dir_path: str | Path | None = None,
    output_dir: str | Path | None = None,
) -> Path | None:
    """The most recently written incomplete run of this environment and model; None without a
    run."""
    module = env_id.rsplit("/", 1)[-1].replace("-", "_")
    module_folder = Path("environments", module)
    if env_dir_path is None:
        root = module_folder if module_folder.is_dir() else Path()
    else:
        root = Path(env_dir_path, module)
    outputs = root / "outputs" if output_dir is None else Path(output_dir)
    criteria = {"env_id": env_id, "model": model, "num_examples": num_examples}
    criteria["rollouts_per_example"] = rollouts_per_example
    matches = []
    for folder in outputs.glob("evals/*/*"):
        if not is_valid_eval_results_path(folder) or is_complete(folder):
            continue
        stored = read_metadata(folder) or {}
        if all(value is None or stored.get(name) == value for name, value in criteria.items()):
            matches.append(folder)
    return max(matches, key=lambda folder: (folder / RESULTS_NAME).stat().st_mtime, default=None)
