"""The teacher of on-policy distillation: a frozen model that scores the tokens that the policy
sampled.

``Teacher`` is a model in this process: a folder (of a model, of an adapter, or of a run, whose
newest checkpoint it is) or a name. ``EndpointTeacher`` is a server with prompt log-probabilities,
as vLLM and ``vf-serve`` have them. Both are called like the policy, and take the place of the
reference policy. A teacher must have the policy's vocabulary.
"""

from __future__ import annotations

import itertools
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verifiers.errors import ConfigError, EndpointUnreachable
from verifiers.runtime.bounded import MAX_FILE_BYTES, read_stream
from verifiers.runtime.decoding import MAX_REPLY_VALUES, decode_message
from verifiers.runtime.http_clients import header_value, open_url, tls_fault
from verifiers_trainer.policy.folder_client import FolderClient, load_folder, model_folder
from verifiers_trainer.policy.loading import get_model_and_tokenizer
from verifiers_trainer.policy.logprobs import install_logprob_forward

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

API_KEY_VAR = "VLLM_API_KEY"
CONCURRENT = 16
TIMEOUT_S = 120.0


def open_teacher(config: Any, tokenizer: PreTrainedTokenizerBase) -> Teacher | EndpointTeacher:
    """The teacher of these settings. *Raises* ConfigError for another vocabulary, or no model."""
    if is_url(config.teacher):
        return EndpointTeacher(config.teacher)
    return Teacher.open(config.teacher, tokenizer, config.device)


def is_url(teacher: str) -> bool:
    """Whether a teacher is an endpoint."""
    return teacher.startswith(("http://", "https://"))


class _Frozen:
    """The methods of ``Reference`` for a model that never changes and is in no checkpoint."""

    def after_step(self, step: int) -> None:
        """No-op: a teacher does not follow the policy."""

    def state(self, *, keep: bool = True) -> dict[str, Tensor]:
        return {}

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """No-op: its files are its own."""

    def load(self, folder: Path) -> None:
        """No-op: its files are its own."""


class Teacher(_Frozen):
    """A model in this process, with the log-probability forward installed."""

    def __init__(self, model: PreTrainedModel, identity: object):
        self.model, self.identity = model.eval().requires_grad_(False), identity
        """``identity`` must match when a training is resumed."""
        install_logprob_forward(model)

    @classmethod
    def open(
        cls, name: str, tokenizer: PreTrainedTokenizerBase, device: torch.device | str
    ) -> Teacher:
        """Load a folder or a named model. *Raises* ConfigError when it has another vocabulary than
        ``tokenizer``."""
        if Path(name).expanduser().is_dir():
            folder = model_folder(name)
            model, its_tokenizer = load_folder(folder)
            identity: Any = FolderClient(folder).identity()["files"]
        else:
            model, its_tokenizer = get_model_and_tokenizer(name)
            identity = name
        if its_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"the teacher {name} has another vocabulary than the policy ({len(its_tokenizer)}"
                f" and {len(tokenizer)} tokens): it cannot score the policy's tokens; take a"
                " teacher with the policy's tokenizer, or imitate its answers with loss='sft'"
            )
        return cls(model.to(device), identity)

    def __call__(self, **arguments: Tensor) -> object:
        """Run the forward, without gradient."""
        with torch.no_grad():
            return self.model(**arguments)


class EndpointTeacher(_Frozen):
    """A server whose completions have ``prompt_logprobs``: ``http://HOST:PORT/v1``, with the model
    it serves first.

    The key is read from ``VLLM_API_KEY``. *Raises*, when called, ``EndpointUnreachable`` when a
    request fails, and ConfigError when the response has no log-probabilities of the prompt.
    """

    identity = None

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._model: str | None = None

    def __call__(self, **arguments: Tensor) -> object:
        """Score a packed row, each of its samples by a request. Raises ConfigError for images."""
        if "images" in arguments:
            raise ConfigError(
                "a teacher at an address is sent token ids, without images: name a folder or a"
                " repository as the teacher"
            )
        ids = arguments["input_ids"].reshape(-1).cpu()
        starts = (arguments["position_ids"].reshape(-1).cpu() == 0).nonzero().flatten().tolist()
        bounds = itertools.pairwise([*starts, len(ids)])
        with ThreadPoolExecutor(CONCURRENT) as pool:
            scores = pool.map(self._score, [ids[start:end].tolist() for start, end in bounds])
            logprobs = torch.cat([*scores])
        return SimpleNamespace(logprobs=logprobs.to(arguments["input_ids"].device))

    def _score(self, ids: list[int]) -> Tensor:
        """float32 [T], nats; 0 for the first token, which nothing predicts."""
        if len(ids) < 2:
            return torch.zeros(len(ids))
        self._model = self._model or self._request("models")["data"][0]["id"]
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        (choice,) = self._request("completions", body)["choices"]
        scored = choice.get("prompt_logprobs")
        if not scored or len(scored) != len(ids):
            raise ConfigError(
                f"the teacher {self.url} returned no log-probabilities of the prompt"
                " (prompt_logprobs): take a vLLM server, vf-serve, or the teacher's folder"
            )
        pairs = zip(ids, scored, strict=True)
        return torch.tensor(
            [0.0 if entry is None else entry[str(token)]["logprob"] for token, entry in pairs]
        )

    def _request(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        key = header_value(os.environ.get(API_KEY_VAR, "EMPTY"), API_KEY_VAR)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, headers)
        try:
            with open_url(request, TIMEOUT_S) as response:
                return decode_message(read_stream(response, MAX_FILE_BYTES, path), MAX_REPLY_VALUES)
        except (OSError, ValueError) as error:
            detail = ""
            if isinstance(error, urllib.error.HTTPError):
                detail = error.read(300).decode(errors="replace")
            raise EndpointUnreachable(
                f"the teacher {self.url}/{path} failed: {tls_fault(error) or error} {detail}".rstrip()
            ) from error
