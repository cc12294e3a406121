"""``vf-serve FOLDER``: offer a saved model, with or without an adapter, as an OpenAI endpoint on
this machine.

    vf-serve outputs/my-run --port 8000

Loads the model on the embedded engine of this process and serves until Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.cli.common.command import Call, Listening, SmallCommand
from verifiers.errors import ConfigError, RunError
from verifiers.runtime.notations import Variable
from verifiers.runtime.origins import is_loopback
from verifiers.runtime.values import Count, option

START_S = 120.0
POLL_S = 0.2
ABOUT = """Serve a saved model as an OpenAI endpoint: chat completions, text completions, streaming, log-probabilities.

FOLDER is what save_pretrained or a checkpoint writes, with a whole model or an adapter; for the folder of a training
run, its newest checkpoint is served. "local" is the small real model of vf-setup --local-model.

\b
  vf-serve local
  vf-serve outputs/my-run
  vf-serve outputs/my-run/checkpoint-40 --port 8001 --name policy
  vf-serve models/small --host 0.0.0.0 --api-key-var SERVE_KEY    for other machines
"""


@dataclass(frozen=True)
class ServeSettings(Listening):
    """The flags of ``vf-serve``."""

    name: str | None = option(None, "Name of the model for requests [the folder].", metavar="NAME")
    api_key_var: Variable | None = option(
        None, "Environment variable with the key that requests must send [none]."
    )
    max_seq_len: Count | None = option(
        None, "Longest conversation in tokens [the model's, at most 4096]."
    )


def serve(call: Call, settings: ServeSettings) -> None:
    """Load the model and serve it until a signal. *Raises* ``ConfigError``, and ``RunError`` when
    the engine stops."""
    if len(call.words) != 1:
        raise ConfigError("name one folder with a model: vf-serve FOLDER")
    is_local = call.words[0] == "local"
    folder = Path(call.words[0]).expanduser()
    if not is_local and not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}; vf-serve serves a saved model or the folder of a"
            " training run"
        )
    host, port = settings.host, settings.port
    key = _api_key(settings.api_key_var, host)
    call.note(f"vf-serve: loading {call.words[0]}")
    from verifiers_trainer.engines.http.loading import said_while_loading

    with said_while_loading(host, port):
        # late: torch and transformers take seconds to import
        from verifiers_trainer.engines.http.endpoint import Address
        from verifiers_trainer.policy.builtin_models import smollm2_folder
        from verifiers_trainer.policy.folder_client import folder_engine, model_folder

        path = smollm2_folder() if is_local else model_folder(str(folder))
        name = settings.name or ("local" if is_local else str(path))
        loaded = folder_engine(path, name, Address(host, port, key), settings.max_seq_len)
    stopped: list[int] = []

    def stop(number: int, _: Any) -> None:
        stopped.append(number)

    with loaded as engine:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        _report(call, engine.base_url, name, settings.api_key_var if key else None)
        while not stopped:
            time.sleep(POLL_S)
            if not engine.health():
                raise RunError("the engine stopped; its error is above")
    call.note("vf-serve: stopped")


def _api_key(variable: str | None, host: str) -> str:
    """The key of the endpoint, empty for none. *Raises* ``ConfigError`` where other machines reach
    it without a key."""
    if variable is None:
        if not is_loopback(host):
            raise ConfigError(
                f"--host {host} opens the endpoint to other machines: add --api-key-var NAME"
            )
        return ""
    if not os.environ.get(variable):
        raise ConfigError(
            f"--api-key-var {variable}: the environment variable {variable} is not set or empty"
        )
    return os.environ[variable]


def _report(call: Call, url: str, name: str, variable: str | None) -> None:
    call.answer_now(f"{name} at {url}", url=url, model=name)
    key = f" -k {variable}" if variable else ""
    call.note(f"vf-serve: vf-eval ENV -m {name} -b {url}{key}")
    call.note("vf-serve: Ctrl-C ends it")


COMMAND = SmallCommand(
    name="vf-serve",
    about=ABOUT,
    metavar="FOLDER_PATH",
    options=ServeSettings,
    keys=("url", "model"),
    action=serve,
)


def main() -> None:
    """The entry point."""
    COMMAND.main()


if __name__ == "__main__":
    sys.exit(COMMAND.run(sys.argv[1:]))
