"""``FolderClient``: a saved model, with or without an adapter, evaluated on the embedded engine of
this process.

The model is loaded at the first request. A folder is what ``save_pretrained`` or a checkpoint
writes; for the folder of a training run, its newest checkpoint.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.clients.http import OpenAIChatCompletionsClient
from verifiers.clients.in_process import InProcessClient
from verifiers.clients.local import SAMPLING
from verifiers.errors import ConfigError
from verifiers.storage.described import type_name
from verifiers.storage.weights import file_sha256, weight_files, weight_hashes
from verifiers.types import ModelRequest, Response
from verifiers_trainer.policy import adapter_files
from verifiers_trainer.policy.builtin_models import builtin_folder, is_builtin

if TYPE_CHECKING:
    from verifiers_trainer.engines.embedded.engine import EmbeddedEngine
    from verifiers_trainer.engines.http.endpoint import Address

MAX_SEQ_LEN = 4096
"""Most tokens of a conversation, for models with a longer context."""
CONCURRENCY = 32
START_S = 120.0
CONFIG, ADAPTER = "config.json", "adapter_config.json"


def folder_client(folder: str) -> FolderClient:
    """The client of a model folder, of a run's newest checkpoint, or of a builtin model.

    *Raises* ``ConfigError`` when it holds no model.
    """
    return FolderClient(model_folder(folder), folder if is_builtin(folder) else None)


def model_folder(folder: str) -> Path:
    """The folder itself when it holds a model or the adapters of roles, else its newest checkpoint;
    of a builtin model's name its folder in the user's cache. *Raises* ``ConfigError`` without a
    checkpoint."""
    if is_builtin(folder):
        return builtin_folder(folder)
    path = Path(folder).expanduser()
    if _is_model(path):
        return path
    steps = [
        (int(number), step)
        for step in path.glob("checkpoint-*")
        if (number := step.name.rpartition("-")[2]).isdigit() and _is_model(step)
    ]
    if not steps:
        raise ConfigError(
            f"{folder} holds no model: it has neither {CONFIG} nor {ADAPTER}, and no checkpoint"
        )
    return max(steps)[1]


def _is_model(path: Path) -> bool:
    if (path / CONFIG).is_file() or (path / ADAPTER).is_file():
        return True
    return bool(adapter_files.role_folders(str(path)))


class FolderClient(InProcessClient):
    """The client of a model folder, which requests know as ``name`` (default: its path). The
    constructor loads nothing."""

    base_url = None
    """The model runs in this process; the port of its endpoint is no part of a run's facts."""

    def __init__(self, folder: Path, name: str | None = None):
        super().__init__()
        self.folder, self.name = folder, name
        self._engine: Any = None

    def identity(self) -> dict[str, Any]:
        """Identity of the weights: the hash of every file that decides what is sampled."""
        texts = [file for kind in ("*.json", "*.jinja") for file in self.folder.glob(kind)]
        files = sorted([*weight_files(self.folder), *filter(_matters, texts)])
        return {
            "class": type_name(type(self)),
            "files": {file.name: file_sha256(file) for file in files} | self._of_roles(),
        }

    def weights(self) -> dict[str, str]:
        """File -> hash of the weights, for the record of where numbers come from."""
        return weight_hashes(self.folder) | self._of_roles()

    def _of_roles(self) -> dict[str, str]:
        """File -> hash of the adapters of roles, where each has its own."""
        return {
            f"{folder.name}/{name}": hash_
            for folder in adapter_files.role_folders(str(self.folder)).values()
            for name, hash_ in weight_hashes(folder).items()
        }

    def __repr__(self) -> str:
        return f"FolderClient({self.model!r}, {'running' if self.is_running else 'not started'})"

    @property
    def model(self) -> str:
        """The name of the model for requests."""
        return self.name or str(self.folder)

    @property
    def local_model(self) -> FolderClient:
        """The model of this process, for the facts of a run."""
        return self

    def describe(self) -> dict[str, Any]:
        """The record of the model for a run: name, and the sampling if a request says nothing."""
        from verifiers_trainer.engines.requests import SamplingParams

        defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
        return {"name": self.model, "sampling": {name: defaults[name] for name in SAMPLING}}

    async def shows_tools(self) -> bool | None:
        """Whether the chat template shows the tools of a request; None when unknown."""
        return await (await self._running()).shows_tools()

    async def preflight(self, model: str | None = None, timeout_s: float = START_S) -> str | None:
        """Load the model. *Raises* ``ConfigError`` when it cannot be loaded."""
        await self._running()
        return None

    async def complete(self, request: ModelRequest) -> Response:
        """As ``InProcessClient.complete``; where roles have adapters, that of the role that asks.

        *Raises* ConfigError for a request of no such role.
        """
        roles = adapter_files.role_folders(str(self.folder))
        if not roles:
            return await super().complete(request)
        if request.role not in roles:
            asks = "no role asks" if request.role is None else f"{request.role!r} asks"
            raise ConfigError(
                f"{self.folder} has an adapter for each of the roles {', '.join(roles)}, and"
                f" {asks}: evaluate an environment with these roles, or name the folder of one"
                f" adapter, such as {next(iter(roles.values()))}"
            )
        response = await super().complete(replace(request, model=request.role))
        return replace(response, model=request.model)

    def _open(self) -> OpenAIChatCompletionsClient:
        engine = folder_engine(self.folder, served_model=self.model)
        engine.start(START_S)
        self._engine = engine
        return OpenAIChatCompletionsClient(
            base_url=engine.base_url, api_key=engine.api_key, tools_shown=engine.tools_shown
        )

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop()


def folder_engine(
    folder: Path, served_model: str, address: Address | None = None, max_seq_len: int | None = None
) -> EmbeddedEngine:
    """The engine of a model folder, not started. *Raises* ``ConfigError`` if it has no model."""
    from verifiers_trainer.engines.embedded.engine import EmbeddedEngine

    model, tokenizer = load_folder(folder, with_roles=True)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or MAX_SEQ_LEN
    return EmbeddedEngine(
        model,
        tokenizer,
        max_seq_len=min(limit, MAX_SEQ_LEN) if max_seq_len is None else max_seq_len,
        concurrency=CONCURRENCY,
        served_model=served_model,
        address=address,
    )


def load_folder(
    folder: Path, dtype: str | None = None, *, with_roles: bool = False
) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder, an adapter merged unless its base is in four bits;
    ``with_roles``: or the adapters of roles, around their base, where the folder has these.
    ``dtype`` replaces the device's, "auto" by that of the files. *Raises* ``ConfigError``."""
    import torch

    from verifiers_trainer.policy import adapters, quantization
    from verifiers_trainer.policy.loading import get_model, get_tokenizer, without_progress_bars

    if not with_roles:
        adapter_files.require_one_model(str(folder))
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    kwargs = {} if dtype is None else {"dtype": dtype}
    model: Any
    with nullcontext() if sys.stderr.isatty() else without_progress_bars():
        if (folder / ADAPTER).is_file():
            model = adapters.load_adapter(folder, model_kwargs=kwargs)
            if not quantization.is_quantized(model):
                model = adapters.merge(model)
        elif with_roles and (roles := adapter_files.role_folders(str(folder))):
            model = adapters.load_role_adapters(roles, model_kwargs=kwargs)
        else:
            model = get_model(str(folder), model_kwargs=kwargs)
    return model.to(device).eval(), get_tokenizer(adapter_files.tokenizer_source(folder))


def _matters(file: Path) -> bool:
    """Whether a file decides what is sampled; a checkpoint's others are the trainer's state."""
    return file.suffix != ".json" or any(w in file.name for w in ("config", "token", "vocab"))
