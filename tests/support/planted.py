"""Faults between the policy that samples and the policy that is trained, planted in a run.

Those of ``CLIENT`` change what the server is asked, or what is reported of its answer, on any
engine; those of ``REPLICA`` what the embedded engine computes with; those of ``ADAPTER`` the files
that vLLM loads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import verifiers as vf
from support.training import digits, rows
from verifiers.types import AssistantMessage
from verifiers_trainer.engines.embedded import batch
from verifiers_trainer.engines.embedded import engine as embedded
from verifiers_trainer.engines.vllm.weights.lora_dir import LoraDirSync
from verifiers_trainer.run import policy_server

SYSTEM = "answer in digits"


class Twice(vf.MultiTurnEnv):
    """Asks once more; two answers are the whole rollout."""

    def env_response(self, messages: Any, state: Any, **options: Any) -> Any:
        return [{"role": "user", "content": "again"}], state


def talks(**options: Any) -> vf.MultiTurnEnv:
    """A system message, and two turns."""
    rubric = vf.Rubric(funcs=[digits])
    return Twice(dataset=rows(16), system_prompt=SYSTEM, max_turns=2, rubric=rubric, **options)


class Planted:
    """A client whose requests and answers are changed."""

    def __init__(self, client: Any, tokenizer: Any, ask: Callable, report: Callable):
        self._client, self._tokenizer, self._ask, self._report = client, tokenizer, ask, report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def complete(self, request: Any) -> Any:
        response = await self._client.complete(self._ask(request))
        prompt = [{"role": m.role, "content": m.content} for m in request.prompt]
        text = self._tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=False
        )
        ids = np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        return replace(response, tokens=self._report(response.tokens, ids))


def as_asked(request: Any) -> Any:
    return request


def as_answered(tokens: Any, asked: np.ndarray) -> Any:
    return tokens


def of_the_conversation(tokens: Any, asked: np.ndarray) -> Any:
    """What the trainer believes that the server saw."""
    return replace(tokens, prompt_ids=asked)


def colder(request: Any) -> Any:
    return replace(request, sampling_args={**request.sampling_args, "temperature": 0.9})


def without_system(request: Any) -> Any:
    return replace(request, prompt=[m for m in request.prompt if m.role != "system"])


def thinking_cut(request: Any) -> Any:
    cut = [
        AssistantMessage(m.content[len(m.content) // 2 :]) if m.role == "assistant" else m
        for m in request.prompt
    ]
    return replace(request, prompt=cut)


def second_bos(tokens: Any, asked: np.ndarray) -> Any:
    return replace(tokens, prompt_ids=np.concatenate([tokens.prompt_ids[:1], tokens.prompt_ids]))


CLIENT: Mapping[str, tuple[Callable, Callable]] = {
    "a temperature of .9 for 1": (colder, as_answered),
    "a dropped system message": (without_system, of_the_conversation),
    "a second BOS": (as_asked, second_bos),
    "a template that cuts thinking": (thinking_cut, of_the_conversation),
}


def plant_client(monkeypatch: Any, name: str) -> None:
    """Let every rollout of a run have a fault of ``CLIENT``."""
    ask, report = CLIENT[name]
    plain = policy_server.training_client
    monkeypatch.setattr(
        policy_server,
        "training_client",
        lambda engine, tokenizer, settings: Planted(
            plain(engine, tokenizer, settings), tokenizer, ask, report
        ),
    )


def stale(replica: Any) -> Any:
    """The first weights, for ever."""
    return copy.deepcopy(replica)


def of_adapter(change: Callable[[int, torch.Tensor], None]) -> Callable[[Any], Any]:
    def changed(replica: Any) -> Any:
        replica = copy.deepcopy(replica)
        with torch.no_grad():
            matrices = [p for name, p in replica.named_parameters() if "lora_B" in name]
            for number, matrix in enumerate(matrices):
                change(number, matrix)
        return replica

    return changed


def half_zero(number: int, matrix: torch.Tensor) -> None:
    if number % 2:
        matrix.zero_()


def swapped(number: int, matrix: torch.Tensor) -> None:
    matrix.copy_(matrix.flip(0))


def other_rope(replica: Any) -> Any:
    replica.model.rotary_emb.inv_freq.mul_(0.5)
    return replica


def half_precision(replica: Any) -> Any:
    return copy.deepcopy(replica).to(torch.bfloat16)


REPLICA: Mapping[str, Callable[[Any], Any]] = {
    "stale weights": stale,
    "a half-loaded adapter": of_adapter(half_zero),
    "a swapped adapter": of_adapter(swapped),
    "another rope": other_rope,
    "another dtype": half_precision,
}


def plant_replica(monkeypatch: Any, name: str) -> None:
    """Let the embedded engine of a run compute with a fault of ``REPLICA``."""
    plain = embedded.share_parameters
    monkeypatch.setattr(embedded, "share_parameters", lambda model: REPLICA[name](plain(model)))
    # which finds a copy when training begins
    monkeypatch.setattr(embedded, "shares_parameters", lambda replica, model: True)


def plant_raw(monkeypatch: Any) -> None:
    """Let the embedded engine report the log-probabilities before the temperature."""
    plain = batch.draw

    def raw(logits: Any, table: Any, counters: Any, counts: Any = None) -> Any:
        drawn = plain(logits, table, counters, counts)
        kept = torch.log_softmax(logits.float(), -1).gather(1, drawn.tokens[:, None])[:, 0]
        return drawn._replace(logprobs=kept)

    monkeypatch.setattr(batch, "draw", raw)


ADAPTER: Mapping[str, Callable[[int, torch.Tensor], None] | None] = {
    "stale weights": None,
    "a half-loaded adapter": half_zero,
    "a swapped adapter": swapped,
}


def plant_adapter(monkeypatch: Any, name: str) -> None:
    """Let every adapter that is written for vLLM be changed, or be that of the version before."""
    plain, change = LoraDirSync.prepare, ADAPTER[name]
    written: list[Any] = []

    def prepare(sync: Any, version: int) -> None:
        plain(sync, version)
        file = sync.folder / sync._current / "adapter_model.safetensors"
        tensors = load_file(file)
        written.append({key: tensor.clone() for key, tensor in tensors.items()})
        if change is None:
            tensors = written[-2] if len(written) > 1 else tensors
        else:
            for number, key in enumerate(sorted(key for key in tensors if "lora_B" in key)):
                change(number, tensors[key])
        save_file(tensors, file, metadata={"format": "pt"})

    monkeypatch.setattr(LoraDirSync, "prepare", prepare)
