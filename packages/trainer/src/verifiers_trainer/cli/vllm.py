"""``vf-vllm``: start an unmodified ``vllm serve`` with its flags and those that training needs.

    vf-vllm --model Qwen/Qwen2.5-7B-Instruct --data-parallel-size 4 --enforce-eager --host 0.0.0.0 --port 8000

Builds the command (``vllm_command``), runs it, reports when the server is up, and stops it with its
descendants.
"""

from __future__ import annotations

import signal
import sys
import urllib.error
from dataclasses import dataclass
from typing import Annotated

from verifiers.cli.common.command import Call, SmallCommand
from verifiers.cli.common.reader import raise_together
from verifiers.errors import ConfigError, RunError
from verifiers.runtime.http_clients import open_url
from verifiers.runtime.values import Range, option
from verifiers_trainer.cli.launch_processes import Child, Signals, wait_until
from verifiers_trainer.cli.vllm_command import (
    ServerCommand,
    ServerRequest,
    build,
    find_executable,
    require_device,
)

STARTUP_S = 600.0
ABOUT = """Start a vLLM server for training and evaluation.

\b
  vf-vllm --model Qwen/Qwen2.5-7B-Instruct --tensor-parallel-size 4
  vf-vllm --model MODEL --max-lora-rank 32      for training adapters of rank 32
  vf-vllm --model MODEL --dry-run               print the command only

Flags of `vllm serve` are passed through; arguments after a bare -- are not checked. Unless set, these are added:
processed log-probabilities, no sampling defaults of the model, the routes for weight updates, and LoRA updates where a
flag of LoRA is given.
"""


@dataclass(frozen=True)
class VllmSettings:
    """The flags of ``vf-vllm``."""

    model: str | None = option(None, "Hub id or folder of the model.", metavar="NAME")
    host: str = option("127.0.0.1", "Address to listen at.")
    port: Annotated[int, Range(ge=1, le=65535)] = option(8000, "Port.")
    vllm_command: str | None = option(
        None,
        "The vllm executable; default VF_VLLM, this Python's, the one on the path, or one that uv"
        " installs.",
        metavar="COMMAND",
    )
    startup_timeout: float = option(STARTUP_S, "Seconds.")
    weight_sync: bool = option(True, "Enable weight updates.", "--weight-sync/--no-weight-sync")
    lora: bool | None = option(
        None,
        "Load LoRA adapters at run time; default: where a flag such as --max-lora-rank is given.",
        "--lora/--no-lora",
    )
    dry_run: bool = option(False, "Print the command and stop.")


class _Command(SmallCommand[VllmSettings]):
    """Keeps the flags of the server."""

    __slots__ = ()

    def _read(self, argv: list[str], call: Call) -> VllmSettings:
        cut = argv.index("--") if "--" in argv else len(argv)
        problems: list[str] = []
        settings = self._parse(argv[:cut], call, problems)
        raise_together(problems)
        call.unchecked = argv[cut + 1 :]
        return settings


def serve(call: Call, settings: VllmSettings) -> None:
    """Build the command and run it until it exits. *Raises* ``ConfigError``, and ``RunError`` when
    the server fails."""
    words, model = list(call.words), settings.model
    if words and not words[0].startswith("-"):
        if model is not None:
            raise ConfigError(f"two models are named, {model} and {words[0]}: give one")
        model = words.pop(0)
    if model is None:
        raise ConfigError("give the model to serve: vf-vllm --model NAME")
    executable = find_executable(settings.vllm_command)
    request = ServerRequest(
        model,
        words,
        settings.host,
        settings.port,
        call.unchecked,
        with_updates=settings.weight_sync,
        with_lora=settings.lora,
    )
    command = build(request, executable)
    call.facts.update(command=command.words, url=command.url)
    for note in command.notes:
        call.note(f"note: {note}")
    if settings.dry_run:
        call.say(command.shell_text)
        return
    require_device(executable)
    call.note(f"vLLM {executable.version or ''} {executable.origin}: {command.shell_text}")
    _run(call, command, settings.startup_timeout)


def _run(call: Call, command: ServerCommand, startup_s: float) -> None:
    with Signals() as signals:
        child = Child("vllm", command.words, command.variables)
        try:
            if wait_until(lambda: is_up(command.url), child, signals, startup_s):
                call.note(f"ready: {command.url}/v1")
                while child.exit_code is None and not signals.received:
                    wait_until(lambda: False, child, signals, 1.0)
            elif child.exit_code is None and not signals.received:
                raise RunError(
                    f"the server did not answer {command.url}/health within {startup_s:g} s and was"
                    " stopped; its last lines are above (--startup-timeout waits longer)"
                )
            code = child.exit_code
        finally:
            child.stop()
    if signals.received:
        if signals.received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signals.received[0])
    if code:
        raise RunError(f"the server exited with code {code}; its last lines are above")


def is_up(url: str) -> bool:
    """Return whether a server responds at ``url``."""
    try:
        with open_url(f"{url}/health", 2.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


COMMAND = _Command("vf-vllm", ABOUT, "[FLAGS OF VLLM]...", VllmSettings, ("command", "url"), serve)


def main() -> None:
    """The entry point."""
    COMMAND.main()


if __name__ == "__main__":
    sys.exit(COMMAND.run(sys.argv[1:]))
