"""Run another distribution's commands; if it is missing, say how to install it and exit with 2."""

from __future__ import annotations

import importlib
import sys


def vf_train() -> None:
    """``vf-train`` and ``vf-rl``."""
    _run("verifiers_trainer", "verifiers_trainer.cli.train", "vf-train")


def vf_vllm() -> None:
    """``vf-vllm``."""
    _run("verifiers_trainer", "verifiers_trainer.cli.vllm", "vf-vllm")


def vf_serve() -> None:
    """``vf-serve``."""
    _run("verifiers_trainer", "verifiers_trainer.cli.serve", "vf-serve")


def vf_verify() -> None:
    """``vf-verify``."""
    _run("verifiers_trainer", "verifiers_trainer.cli.verify", "vf-verify")


def _run(package: str, module: str, command: str) -> None:
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        from verifiers.runtime.install_lines import install_line

        line = install_line("verifiers-trainer")
        print(f"{command} needs the trainer, which is not installed: {line}", file=sys.stderr)
        raise SystemExit(2) from None
    importlib.import_module(module).main()
