"""The teachers of on-policy distillation: models that score the tokens that the policy sampled.

``Teacher`` is a frozen model in this process: a folder (of a model, of an adapter, or of a run,
whose newest checkpoint it is) or a name. ``EndpointTeacher`` is a server with prompt
log-probabilities, as vLLM and ``vf-serve`` have them. ``SelfTeacher`` is the policy with its present
weights, which knows more than the policy by its context (``pipeline.teacher_context``);
``reference.Reference`` is the same with a copy that follows it. All are called like the policy, and
take the place of the reference policy; ``TaskTeachers`` has one for each task. A teacher must have
the policy's vocabulary.
"""

from __future__ import annotations

import itertools
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verifiers.errors import ConfigError, EndpointUnreachable
from verifiers.runtime.bounded import MAX_FILE_BYTES, read_stream
from verifiers.runtime.decoding import MAX_REPLY_VALUES, decode_message
from verifiers.runtime.http_clients import header_value, open_url, tls_fault
from verifiers_trainer.algorithm.teacher_view import TeacherView
from verifiers_trainer.policy.folder_client import FolderClient, load_folder, model_folder
from verifiers_trainer.policy.loading import get_model_and_tokenizer
from verifiers_trainer.policy.logprobs import TeacherStates, install_logprob_forward, states_of
from verifiers_trainer.policy.reference import Reference
from verifiers_trainer.settings.fields import SELF

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from verifiers_trainer.settings.config import RLConfig

API_KEY_VAR = "VLLM_API_KEY"
CONCURRENT = 16
TIMEOUT_S = 120.0
MIN_TEXTS = 8
"""Tokens whose texts tell one tokenizer from another."""


def open_teacher(
    config: RLConfig, policy: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> AnyTeacher | TaskTeachers:
    """The teacher of these settings, or those of the tasks. *Raises* ConfigError for another
    vocabulary, or no model."""

    def opened(name: str) -> AnyTeacher:
        if name == SELF:
            steps = config.ref_model_sync_steps
            alpha = config.ref_model_mixup_alpha
            if config.sync_ref_model and config.is_given("sync_ref_model"):
                return Reference(policy, sync_steps=steps, alpha=alpha)
            return SelfTeacher(policy)
        if is_url(name):
            return EndpointTeacher(name, tokenizer)
        return Teacher.open(name, tokenizer, config.device)

    teachers = config.teachers
    members = {name: opened(name) for name in dict.fromkeys(teachers.values())}
    if isinstance(config.teacher, str):
        return members[config.teacher]
    return TaskTeachers({task: members[name] for task, name in teachers.items()})


def _difference(theirs: Mapping[str, int], ours: Mapping[str, int]) -> str:
    """Where two vocabularies differ first; empty if they are equal.

    >>> _difference({"a": 0, "b": 1}, {"a": 0, "c": 1})
    "token 1 is 'b' there and 'c' here"
    """
    if theirs == ours:
        return ""
    their_texts, our_texts = ({token: text for text, token in v.items()} for v in (theirs, ours))
    for token in sorted(their_texts.keys() & our_texts.keys()):
        if their_texts[token] != our_texts[token]:
            return f"token {token} is {their_texts[token]!r} there and {our_texts[token]!r} here"
    return f"{len(theirs)} tokens there and {len(ours)} here"


def is_url(teacher: str) -> bool:
    """Whether a teacher is an endpoint."""
    return teacher.startswith(("http://", "https://"))


class _Frozen:
    """The methods of ``Reference`` for what is in no checkpoint and does not follow the policy step
    by step."""

    def after_step(self, step: int) -> None:
        """No-op: a teacher does not follow the policy."""

    def state(self, *, keep: bool = True) -> dict[str, Tensor]:
        return {}

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """No-op: its files are its own."""

    def load(self, folder: Path) -> None:
        """No-op: its files are its own."""


class _InProcess(_Frozen):
    """A teacher that is a model in this process."""

    model: nn.Module

    def __call__(self, **arguments: Tensor) -> object:
        """Run the forward, without gradient."""
        with torch.no_grad():
            return self.model(**arguments)

    def states(
        self, view: TeacherView, device: torch.device | str, top_k: int | None
    ) -> TeacherStates:
        """Its whole distributions; see ``logprobs.states_of``."""
        return states_of(self.model, view, device, top_k=top_k)


class Teacher(_InProcess):
    """A model in this process, with the log-probability forward installed."""

    model: PreTrainedModel

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
        if difference := _difference(its_tokenizer.get_vocab(), tokenizer.get_vocab()):
            raise ConfigError(
                f"the teacher {name} has another vocabulary than the policy ({difference}): it"
                " cannot score the policy's tokens; take a teacher with the policy's tokenizer, or"
                " imitate its answers with loss='sft'"
            )
        return cls(model.to(device), identity)


class SelfTeacher(_InProcess):
    """The policy itself, with the weights of the moment at which it is called (of a model with an
    adapter: with the adapter)."""

    identity = SELF

    def __init__(self, policy: nn.Module):
        self.model = policy


class EndpointTeacher(_Frozen):
    """A server whose completions have ``prompt_logprobs``: ``http://HOST:PORT/v1``, with the model
    it serves first.

    The key is read from ``VLLM_API_KEY``. *Raises*, when called, ``EndpointUnreachable`` when a
    request fails, and ConfigError when the response has no log-probabilities of the prompt, and
    where it says that the tokens are other texts than those of ``tokenizer``.
    """

    identity = None

    def __init__(self, url: str, tokenizer: PreTrainedTokenizerBase | None = None):
        self.url = url.rstrip("/")
        self._model: str | None = None
        self._unchecked = tokenizer
        """The tokenizer, until the texts of ``MIN_TEXTS`` tokens are compared."""

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

    def states(
        self, view: TeacherView, device: torch.device | str, top_k: int | None
    ) -> TeacherStates:
        """Raise ConfigError: a server does not return whole distributions."""
        raise ConfigError(
            f"the teacher {self.url} scores sampled tokens alone: set loss='distill', or give the"
            " teacher's folder",
            key="teacher",
        )

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
        entries = [entry and entry[str(t)] for t, entry in zip(ids, scored, strict=True)]
        if (tokenizer := self._unchecked) is not None and len(ids) > MIN_TEXTS:
            self._unchecked = None
            self._require_same_texts(ids, entries, tokenizer)
        return torch.tensor([0.0 if entry is None else entry["logprob"] for entry in entries])

    def _require_same_texts(
        self,
        ids: Sequence[int],
        entries: Sequence[Mapping[str, object] | None],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Raise ConfigError where most tokens are other texts to the server: servers differ in the
        spaces around a token and in special ones, and other tokenizers in all."""
        pairs = [
            (token, str(tokenizer.decode([token])), str(entry["decoded_token"]))
            for token, entry in zip(ids, entries, strict=True)
            if entry is not None and entry.get("decoded_token") is not None
        ]
        different = [pair for pair in pairs if pair[1].strip() != pair[2].strip()]
        if 2 * len(different) > len(pairs):
            token, ours, theirs = different[0]
            raise ConfigError(
                f"the teacher {self.url} has another vocabulary than the policy (token {token} is"
                f" {theirs!r} there and {ours!r} here): it cannot score the policy's tokens; take a"
                " teacher with the policy's tokenizer, or imitate its answers with loss='sft'"
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


AnyTeacher = Teacher | SelfTeacher | Reference | EndpointTeacher
"""A teacher of any kind."""


class TaskTeachers:
    """A teacher for each task: a row's ``task`` says which."""

    def __init__(self, by_task: Mapping[str, AnyTeacher]):
        self.by_task = dict(by_task)

    @property
    def members(self) -> list[AnyTeacher]:
        """The teachers in the order of the tasks, which numbers them."""
        return list(self.by_task.values())

    @property
    def identity(self) -> dict[str, object]:
        """Must match when a training is resumed."""
        return {task: teacher.identity for task, teacher in self.by_task.items()}

    def _reference(self) -> Reference | None:
        """The copy that follows the policy, if any: the tasks that it teaches share it."""
        return next((m for m in self.members if isinstance(m, Reference)), None)

    def after_step(self, step: int) -> None:
        if (reference := self._reference()) is not None:
            reference.after_step(step)

    def state(self, *, keep: bool = True) -> dict[str, Tensor]:
        reference = self._reference()
        return {} if reference is None else reference.state(keep=keep)

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        if (reference := self._reference()) is not None:
            reference.save(folder, state)

    def load(self, folder: Path) -> None:
        if (reference := self._reference()) is not None:
            reference.load(folder)


def members_of(reference: AnyTeacher | TaskTeachers | None) -> list[AnyTeacher]:
    """The teachers by their numbers in a row; that one for one of a training without tasks."""
    if reference is None:
        return []
    return reference.members if isinstance(reference, TaskTeachers) else [reference]
