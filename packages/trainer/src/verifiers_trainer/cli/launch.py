"""Start an inference server and the trainer from one command, each on its devices, and show both
logs.

Inference gets the first ``inference.gpus`` visible devices, the trainer the next ``trainer.gpus``.
The server is started first and stopped last; when either exits, the other is stopped too, and its
last lines are repeated. ``decide`` decides whether to start a server; ``vf-vllm`` starts it.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from verifiers.errors import ConfigError, RunError
from verifiers_trainer.cli.launch_processes import Child, Signals, wait_for, wait_until
from verifiers_trainer.cli.plan import Plan
from verifiers_trainer.cli.vllm import STARTUP_S, is_up
from verifiers_trainer.cli.vllm_command import VARIABLE, as_flags
from verifiers_trainer.engines.vllm.weights.opening import INFERENCE_DEVICES

SERVER_LOG = "inference.log"
"""File in the run's folder with the lines of a server that is started."""
Print = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a run samples: ``url`` of a running server, ``launches`` to start a server, else the
    embedded engine.

    Several ``trainer_devices`` mean one process for each, also without a server.
    """

    reason: str
    url: str | None = None
    launches: bool = False
    inference_devices: tuple[str, ...] = ()
    trainer_devices: tuple[str, ...] = ()


def visible_devices(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the CUDA devices of this process, by their names in ``CUDA_VISIBLE_DEVICES``."""
    import torch

    count = torch.cuda.device_count()
    names = [
        part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()
    ]
    return tuple((names or [str(number) for number in range(count)])[:count])


def decide(
    engine: str, url: str | None, gpus: Mapping[str, int], devices: Sequence[str]
) -> Decision:
    """Decide where to sample. *Raises* ``ConfigError`` when a server is requested but cannot be
    started.

    ``gpus``: number of devices of ``inference`` and ``trainer``; default 1 each.
    """
    serving, training = gpus.get("inference") or 1, gpus.get("trainer") or 1
    without_server = tuple(devices[:training]) if training > 1 else ()
    if devices and len(devices) < training:
        raise ConfigError(f"trainer.gpus is {training}, but there are {len(devices)} devices")
    if url is not None:
        if engine == "embedded":
            raise ConfigError(
                "--engine embedded and --vllm-url exclude each other: give one of them"
            )
        return Decision("--vllm-url", url=url, trainer_devices=without_server)
    if engine == "embedded":
        return Decision("--engine embedded", trainer_devices=without_server)
    if not devices:
        if engine == "vllm" and _has_server(without_gpu=True):
            return Decision("--engine vllm, without a GPU", launches=True)
        if engine == "vllm":
            raise ConfigError(
                f"--engine vllm needs a GPU, or a CPU build of vLLM in {VARIABLE}; without them use"
                " --engine embedded"
            )
        return Decision("there is no CUDA device")
    demand = f"{serving} for inference and {training} for the trainer, of {len(devices)} devices"
    if len(devices) < serving + training:
        if engine == "vllm":
            raise ConfigError(f"--engine vllm needs more devices than there are: {demand}")
        return Decision(f"too few devices for a server: {demand}", trainer_devices=without_server)
    if engine == "auto" and not _has_server(without_gpu=False):
        return Decision(
            f"no vllm executable was found (vf-vllm --dry-run, {VARIABLE})",
            trainer_devices=without_server,
        )
    used = tuple(devices[: serving + training])
    return Decision(
        demand, launches=True, inference_devices=used[:serving], trainer_devices=used[serving:]
    )


def where(decision: Decision) -> str:
    """Describe the engine."""
    if decision.url is not None:
        return f"vLLM at {decision.url}"
    if not decision.launches:
        return "the embedded engine"
    devices_of = {"the server": decision.inference_devices, "the trainer": decision.trainer_devices}
    placement = ", ".join(
        f"{name} on {','.join(devices)}" for name, devices in devices_of.items() if devices
    )
    return "a vLLM server beside the trainer" + (f", {placement}" if placement else "")


def _has_server(without_gpu: bool) -> bool:
    if os.environ.get(VARIABLE):
        return True
    return not without_gpu and (find_spec("vllm") is not None or shutil.which("vllm") is not None)


def run(plan: Plan, decision: Decision, words: Sequence[str], echo: Print) -> tuple[int, str]:
    """Start the server, if ``decision`` launches a server, and the trainer; show their logs and
    wait for the trainer.

    Returns the exit code and the stdout of the trainer. ``words`` are the arguments of
    ``vf-train``.

    *Raises* ``ConfigError`` for a batch that is not divisible among the processes, ``RunError``
    when the server exits first.
    """
    _require_divisible(plan, decision)
    children: list[Child] = []
    with Signals() as signals, ExitStack() as files:
        try:
            url = decision.url
            if decision.launches:
                port = int(plan.settings.server_args.get("port") or _free_port())
                url, serving = f"http://127.0.0.1:{port}", _on(decision.inference_devices)
                command = server_words(plan, port, decision)
                plan.folder.mkdir(parents=True, exist_ok=True)
                log = files.enter_context(
                    (plan.folder / SERVER_LOG).open("w", encoding="utf-8", buffering=1)
                )

                def show(line: str) -> None:
                    print(line, file=log)
                    echo(f"inference | {line}")

                children.append(Child("inference", command, serving, show))
                if not wait_until(
                    lambda: is_up(f"http://127.0.0.1:{port}"), children[0], signals, STARTUP_S
                ):
                    return _not_up(children[0], signals), ""
            variables = {
                **_on(decision.trainer_devices),
                INFERENCE_DEVICES: ",".join(decision.inference_devices),
            }
            command = trainer_words(
                decision, [*words, *(("--vllm-url", url) if url else ("--engine", "embedded"))]
            )
            trainer = Child(
                "trainer",
                command,
                variables,
                lambda line: echo(f"trainer   | {line}"),
                separate_stdout=True,
            )
            children.append(trainer)
            code = _watch(children[0], trainer, signals)
            trainer.stop()
            return code, trainer.stdout
        finally:
            for child in reversed(children):
                child.stop()


def _watch(server: Child, trainer: Child, signals: Signals) -> int:
    """Wait for the trainer, which is also ``server`` without a server. *Raises* ``RunError`` when
    the server exits."""
    code = wait_for(
        trainer, signals, lambda: server is not trainer and server.exit_code is not None
    )
    if code is None:
        trainer.stop()
        raise RunError(_ended(server) + "; the trainer was stopped")
    return code


def _not_up(server: Child, signals: Signals) -> int:
    if signals.received:
        return 128 + signals.received[0]
    if server.exit_code is None:
        raise RunError(f"the inference server did not answer within {STARTUP_S:g} s")
    if server.exit_code == 2:
        raise ConfigError(_ended(server))
    raise RunError(_ended(server))


def _ended(server: Child) -> str:
    lines = "\n".join(f"  {line}" for line in server.last_lines)
    return f"the inference server exited with code {server.exit_code}; its last lines:\n{lines}"


def server_words(plan: Plan, port: int, decision: Decision) -> list[str]:
    """Return the command of the server: ``vf-vllm`` with the flags of the file and those derived
    from the training."""
    config = plan.resolved
    flags = {
        name: value
        for name, value in plan.settings.server_args.items()
        if name not in ("port", "host", "model")
    }
    flags.setdefault("max_model_len", config.max_seq_len)
    if (
        len(decision.inference_devices) > 1
        and not {"data_parallel_size", "tensor_parallel_size"} & flags.keys()
    ):
        flags["data_parallel_size"] = len(decision.inference_devices)
    if config.merge_adapter:
        raise ConfigError(
            "merge_adapter = true: a vLLM server cannot load the merged model; write it with"
            f" vf-train --export {plan.settings.model} OUT --merged, and train that"
        )
    options = ["--model", served_name(plan.settings.model), "--port", str(port)]
    if config.use_lora and config.weight_sync in ("auto", "lora_dir"):
        lag = config.max_off_policy_steps
        flags.setdefault("max_lora_rank", config.lora_rank)
        flags.setdefault("max_loras", lag + 2)
        flags.setdefault("max_cpu_loras", lag + 4)
    else:
        options.append("--no-lora")
    return [sys.executable, "-P", "-m", "verifiers_trainer.cli.vllm", *options, *as_flags(flags)]


def served_name(model: str) -> str:
    """Return a name that a server can load: the folder of a builtin model, the base of a saved
    adapter, else the name itself."""
    from verifiers_trainer.policy import adapter_files, builtin_models

    if (folder := adapter_files.adapter_folder(model)) is not None:
        model = adapter_files.read_adapter(folder)["base_model_name_or_path"]
    is_builtin = builtin_models.is_builtin(model)
    return str(builtin_models.builtin_folder(model)) if is_builtin else model


def trainer_words(decision: Decision, words: Sequence[str]) -> list[str]:
    """Return the command of the trainer, with one process per device."""
    module = ["-m", "verifiers_trainer.cli.train"]
    if (count := len(decision.trainer_devices)) > 1:
        start = ["-m", "accelerate.commands.launch", "--num_processes", str(count), "--multi_gpu"]
        return [sys.executable, *start, *module, *words]
    return [sys.executable, "-P", *module, *words]


def _on(devices: Sequence[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}


def _require_divisible(plan: Plan, decision: Decision) -> None:
    problems = plan.config.private_copy().problems(max(1, len(decision.trainer_devices)))
    if problems:
        raise ConfigError("; ".join(problems))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def apply(decision: Decision, plan: Plan, engine: str) -> None:
    """Apply the decision to the settings, unless the file configures inference."""
    config: Any = plan.config
    if decision.url is not None:
        config.inference = decision.url
    elif engine == "embedded" or config.server_url is None:
        config.inference = "embedded"
