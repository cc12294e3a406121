"""Train on a verifiers environment with rLLM, on its verl or its Tinker backend.

    python examples/verifiers_env/train.py +verifiers.env_id=owner/name +backend=tinker …

The keys below ``verifiers`` are this project's; every other key is rLLM's own and passed on as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONFIGS = {"verl": "agent_ppo_trainer", "tinker": "tinker_rl_trainer"}
"""Backend -> the name of rLLM's configuration it starts from."""


def load_env_file(path: Path = HERE / ".env") -> None:
    """Put the ``NAME="value"`` lines of the file into the environment, unless they are set there."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        name, found, value = line.partition("=")
        if found and not name.lstrip().startswith("#"):
            os.environ.setdefault(name.strip(), value.strip().strip("\"'"))


def backend_of(words: list[str]) -> str:
    """The backend that the command line asks for."""
    given = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("backend=")]
    return given[-1] if given else "verl"


def run(config) -> None:
    """Load the environment that the configuration names, and train on it."""
    from rllm.data.dataset import Dataset
    from rllm.trainer.unified_trainer import AgentTrainer
    from workflow import VerifiersWorkflow

    from verifiers_trainer.integrations.rllm import from_config

    env, sampling_args, train, held_out = from_config(config)
    trainer = AgentTrainer(
        config=config,
        workflow_class=VerifiersWorkflow,
        workflow_args={"vf_env": env, "sampling_args": sampling_args},
        train_dataset=Dataset(train),
        val_dataset=Dataset(held_out),
        backend=config.get("backend", "verl"),
    )
    trainer.train()


def main() -> None:
    """Compose rLLM's configuration with the words of the command line, and run."""
    import hydra

    load_env_file()
    sys.path.insert(0, str(HERE))
    name = CONFIGS[backend_of(sys.argv[1:])]
    hydra.main(config_path="pkg://rllm.trainer.config", config_name=name, version_base=None)(run)()


if __name__ == "__main__":
    main()
