"""Run the commands of another distribution; when it is missing, print how to install it and exit with 2."""

from __future__ import annotations

import importlib
import sys


def vf_train() -> None:
    """``vf-train`` and ``vf-rl``."""
    _run("verifiers_trainer", "verifiers_trainer.cli.train", "vf-train", "verifiers[rl]")


def vf_vllm() -> None:
    """``vf-vllm``."""
    _run("verifiers_trainer", "verifiers_trainer.cli.vllm", "vf-vllm", "verifiers[rl]")


def _run(package: str, module: str, command: str, requirement: str) -> None:
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        print(
            f"{command} needs the trainer, which is not installed: pip install '{requirement}', or in a checkout: "
            "uv sync --group train",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    importlib.import_module(module).main()
