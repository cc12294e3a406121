"""``vf-serve FOLDER``: offer a saved model, with or without an adapter, as an OpenAI endpoint on
this machine.

    vf-serve outputs/my-run --port 8000
    vf-serve local --tinker outputs/tinker --port 8000

Loads the model on the embedded engine of this process and serves until Ctrl-C or SIGTERM. With
``--tinker`` it speaks the protocol of the tinker SDK instead, with a run folder.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verifiers.cli.common.command import Call, Listening, SmallCommand
from verifiers.errors import ConfigError, RunError
from verifiers.runtime.notations import Variable
from verifiers.runtime.origins import is_loopback
from verifiers.runtime.values import Count, option
from verifiers_trainer.policy.builtin_models import SMOLLM2, is_builtin

if TYPE_CHECKING:
    from verifiers_trainer.engines.embedded.engine import EmbeddedEngine

START_S = 120.0
POLL_S = 0.2
TINKER_KEY = "tml-"
"""Beginning of the keys that the tinker SDK sends."""
ABOUT = """Serve a saved model as an OpenAI endpoint: chat completions, text completions, streaming, log-probabilities.

FOLDER is what save_pretrained or a checkpoint writes, with a whole model or an adapter; for the folder of a training
run, its newest checkpoint is served. "local" is the small real model of vf-setup --local-model, builtin:smollm2-135m,
and builtin:tiny one of random weights.

\b
  vf-serve local
  vf-serve outputs/my-run
  vf-serve outputs/my-run/checkpoint-40 --port 8001 --name policy
  vf-serve models/small --host 0.0.0.0 --api-key-var SERVE_KEY    for other machines
  vf-serve local --tinker outputs/tinker    train and sample adapters with the tinker SDK
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
    tinker: str | None = option(
        None,
        "Speak the protocol of the tinker SDK, with this run folder; FOLDER may be any model.",
        metavar="RUN_FOLDER",
    )
    concurrency: Count | None = option(
        None,
        "With --tinker: most sequences that are sampled together; 1 samples reproducibly [32].",
    )


def serve(call: Call, settings: ServeSettings) -> None:
    """Load the model and serve it until a signal. *Raises* ``ConfigError``, and ``RunError`` when
    the engine stops."""
    if len(call.words) != 1:
        raise ConfigError("name one folder with a model: vf-serve FOLDER")
    if settings.tinker is not None:
        _serve_tinker(call, settings, Path(settings.tinker).expanduser())
        return
    if settings.concurrency is not None:
        raise ConfigError("--concurrency needs --tinker RUN_FOLDER")
    model = SMOLLM2 if call.words[0] == "local" else call.words[0]
    if not is_builtin(model) and not Path(model).expanduser().is_dir():
        raise ConfigError(
            f"there is no folder {Path(model).expanduser()}; vf-serve serves a saved model, the"
            " folder of a training run, or a builtin model"
        )
    host, port = settings.host, settings.port
    key = _api_key(settings.api_key_var, host)
    call.note(f"vf-serve: loading {call.words[0]}")
    from verifiers_trainer.engines.http.loading import said_while_loading

    with said_while_loading(host, port):
        # late: torch and transformers take seconds to import
        from verifiers_trainer.engines.http.endpoint import Address
        from verifiers_trainer.policy.folder_client import folder_client, folder_engine

        client = folder_client(model)
        name = settings.name or (client.model if call.words[0] == model else call.words[0])
        address = Address(host, port, key)
        loaded = folder_engine(client.folder, name, address, settings.max_seq_len)
    with loaded as engine:
        key_var = settings.api_key_var if key else None
        _until_stopped(call, lambda: _report(call, engine, key_var), engine.health)


def _serve_tinker(call: Call, settings: ServeSettings, folder: Path) -> None:
    """Serve the protocol of the tinker SDK until a signal. *Raises* as ``serve``."""
    host, port = settings.host, settings.port
    key = _api_key(settings.api_key_var, host)
    if key and not key.startswith(TINKER_KEY):
        raise ConfigError(
            f"--api-key-var {settings.api_key_var}: the tinker SDK sends only keys that begin with"
            f" {TINKER_KEY}"
        )
    call.note(f"vf-serve: loading {call.words[0]}")
    from verifiers_trainer.engines.http.loading import said_while_loading

    with said_while_loading(host, port):
        # late: torch and transformers take seconds to import
        from verifiers_trainer.engines.http.endpoint import Address
        from verifiers_trainer.tinker_server.loading import open_service
        from verifiers_trainer.tinker_server.server import TinkerServer

        service = open_service(
            call.words[0],
            folder,
            name=settings.name,
            max_seq_len=settings.max_seq_len,
            max_rows=settings.concurrency,
        )
    server = TinkerServer(service, Address(host, port, key))
    try:
        service.start(START_S)
        server.start()
        key_var = settings.api_key_var if key else None

        def report() -> None:
            url, name = server.base_url, service.model_name
            call.answer_now(f"{name} at {url}", url=url, model=name)
            sent_key = f"${key_var}" if key_var else f"{TINKER_KEY}any"
            call.note(f"vf-serve: TINKER_BASE_URL={url} TINKER_API_KEY={sent_key} python ...")
            call.note(f"vf-serve: adapters are kept in {folder}; Ctrl-C ends it")

        _until_stopped(call, report, lambda: service.is_alive)
    finally:
        server.stop()
        service.stop()


def _until_stopped(call: Call, report: Callable[[], None], is_healthy: Callable[[], bool]) -> None:
    """Return after SIGINT or SIGTERM. *Raises* ``RunError`` when the engine stops."""
    stopped: list[int] = []

    def stop(number: int, _: object) -> None:
        stopped.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    report()
    while not stopped:
        time.sleep(POLL_S)
        if not is_healthy():
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


def _report(call: Call, engine: EmbeddedEngine, variable: str | None) -> None:
    url, names = engine.base_url, engine.models
    call.answer_now(f"{', '.join(names)} at {url}", url=url, model=", ".join(names))
    key = f" -k {variable}" if variable else ""
    if names == (engine.served_model,):
        call.note(f"vf-serve: vf-eval ENV -m {names[0]} -b {url}{key}")
    else:
        call.note(f"vf-serve: a model for each role, such as -m {names[0]} -b {url}{key}")
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
