"""Run another distribution's commands; if it is missing, say how to install it and exit with 2."""

from __future__ import annotations

import sys

from verifiers.errors import ConfigError
from verifiers.runtime.distributions import COMMANDS
from verifiers.runtime.installed import part


def vf_train() -> None:
    """``vf-train`` and ``vf-rl``."""
    _run("vf-train")


def vf_vllm() -> None:
    """``vf-vllm``."""
    _run("vf-vllm")


def vf_serve() -> None:
    """``vf-serve``."""
    _run("vf-serve")


def vf_verify() -> None:
    """``vf-verify``."""
    _run("vf-verify")


def _run(command: str) -> None:
    try:
        main = part(command, command, COMMANDS)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    main()
