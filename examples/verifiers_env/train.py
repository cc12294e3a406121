"""Train on a verifiers environment with rLLM, on its verl or its Tinker backend.

    python examples/verifiers_env/train.py +verifiers.env_id=owner/name +backend=tinker …

The keys below ``verifiers`` are this project's; every other key is passed to rLLM. An error prints
one line to stderr and exits with code 2.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def load_env_file(path: Path = HERE / ".env") -> None:
    """Set the environment variables of the file's ``NAME="value"`` lines that are not set."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        name, separator, value = line.partition("=")
        if separator and not name.lstrip().startswith("#"):
            os.environ.setdefault(name.removeprefix("export ").strip(), value.strip().strip("\"'"))


def run(config: Any, start: Any) -> None:
    """Load the configured environment and train on it."""
    from workflow import VerifiersWorkflow

    from verifiers_integrations.rllm import RLLM, from_config
    from verifiers_integrations.rllm_start import as_dataset

    env, sampling_args, train, held_out = from_config(config)
    trainer = RLLM.load(start.module).AgentTrainer(
        config=config,
        workflow_class=VerifiersWorkflow,
        workflow_args={"vf_env": env, "sampling_args": sampling_args},
        train_dataset=as_dataset(start, train, "train"),
        val_dataset=as_dataset(start, held_out, "test"),
        backend=start.backend,
    )
    trainer.train()


def main() -> None:
    """Compose rLLM's configuration with the arguments of the command line, and run."""
    load_env_file()
    sys.path.insert(0, str(HERE))
    try:
        from verifiers.errors import VerifiersError
        from verifiers_integrations.rllm_start import CONFIGS, start_of
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed: uv pip install -e packages/trainer")
    try:
        start = start_of(sys.argv[1:])
        import hydra
    except (ImportError, VerifiersError) as error:
        _stop(str(error))

    def start_run(config: Any) -> None:
        try:
            run(config, start)
        except (ImportError, VerifiersError) as error:
            _stop(str(error))

    sys.argv[1:] = start.words
    hydra.main(config_path=CONFIGS, config_name=start.config_name, version_base=None)(start_run)()


def _stop(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.exit(2)


if __name__ == "__main__":
    main()
