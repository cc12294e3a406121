"""A Tinker service in a few lines: the SDK's calls in the SDK's order, and a policy that really
learns.

The policy is one row of logits over the vocabulary, whatever came before. ``forward_backward``
computes the loss of what it is given, ``optim_step`` goes down its gradient: data whose fields are
shifted, unmasked or of the wrong sign make it learn something else.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

RATE = 150.0
"""Step size on the logits, for a loss averaged over tokens."""


class TensorData:
    def __init__(self, array):
        self.array = array

    @classmethod
    def from_numpy(cls, array):
        return cls(array)

    def to_numpy(self):
        return self.array


class ModelInput:
    def __init__(self, ids):
        self.ids = ids

    @classmethod
    def from_ints(cls, ids):
        assert all(type(token) is int for token in ids), "the SDK takes plain ints"
        return cls(ids)

    def to_ints(self):
        return self.ids


class Future:
    def __init__(self, make):
        self._make = make

    def result(self):
        if isinstance(self._make, Exception):
            raise self._make
        return self._make


class Sampler:
    """Samples from the logits as they were when it was made."""

    def __init__(self, service, logits):
        self.service, self.logits = service, logits
        self.asked: list[Any] = []

    def get_tokenizer(self):
        return self.service.tokenizer

    async def sample_async(self, prompt, num_samples, sampling_params):
        await asyncio.sleep(0)
        self.service.log.append("sample")
        self.asked.append((prompt.to_ints(), sampling_params))
        logprobs = log_softmax(self.logits)
        rng = np.random.default_rng([sampling_params.seed or 0, len(prompt.to_ints())])
        tokens: list[int] = []
        while len(tokens) < sampling_params.max_tokens and (
            not tokens or tokens[-1] not in sampling_params.stop
        ):
            tokens.append(int(rng.choice(len(logprobs), p=np.exp(logprobs))))
        reason = "stop" if tokens[-1] in sampling_params.stop else "length"
        sequence = SimpleNamespace(
            tokens=tokens, logprobs=logprobs[tokens].tolist(), stop_reason=reason
        )
        return SimpleNamespace(sequences=[sequence] * num_samples)


class Training:
    def __init__(self, service, logits):
        self.service, self.logits, self.gradient = service, logits, np.zeros_like(logits)
        self.data: list[Any] = []

    def get_tokenizer(self):
        return self.service.tokenizer

    def forward_backward(self, data, loss_fn, loss_fn_config=None):
        self.service.log.append("forward_backward")
        if self.service.broken:
            return Future(RuntimeError("the service is down"))
        assert loss_fn == "importance_sampling"
        self.data, outputs = data, []
        logprobs = log_softmax(self.logits)
        for datum in data:
            fields = {name: tensor.to_numpy() for name, tensor in datum.loss_fn_inputs.items()}
            assert {len(array) for array in fields.values()} == {len(datum.model_input.to_ints())}
            now = logprobs[fields["target_tokens"]]
            weights = (
                fields["advantages"]
                * np.exp(now - fields["logprobs"])
                * (fields["advantages"] != 0)
            )
            np.add.at(self.gradient, fields["target_tokens"], weights)
            self.gradient -= weights.sum() * np.exp(logprobs)
            outputs.append({"logprobs": TensorData(now.astype(np.float32))})
        return Future(SimpleNamespace(metrics={"loss:sum": 0.0}, loss_fn_outputs=outputs))

    def optim_step(self, adam_params):
        self.service.log.append("optim_step")
        self.service.adam = adam_params
        self.logits, self.gradient = (
            self.logits + RATE * self.gradient,
            np.zeros_like(self.gradient),
        )
        return Future(SimpleNamespace(metrics=None))

    def save_weights_and_get_sampling_client(self):
        self.service.log.append("sampler")
        return Sampler(self.service, self.logits)

    def save_state(self, name):
        self.service.log.append("save_state")
        path = f"tinker://run/{len(self.service.states)}/{name}"
        self.service.states[path] = self.logits
        return Future(SimpleNamespace(path=path))


class Service:
    """Give it as ``service=``, or as the double's ``ServiceClient``: called, it is
    its own client."""

    def __init__(self):
        self.log: list[str] = []
        self.states: dict[str, np.ndarray] = {}
        self.tokenizer = build_tiny_tokenizer()
        self.made: list[dict[str, Any]] = []
        self.broken, self.adam = False, None
        self.training: Any = None

    def __call__(self, **fields):
        self.made.append(fields)
        return self

    def create_lora_training_client(self, base_model, rank=32, seed=None):
        self.log.append("create")
        self.made.append({"base_model": base_model, "rank": rank, "seed": seed})
        self.training = Training(self, np.zeros(len(self.tokenizer)))
        return self.training

    def create_training_client_from_state_with_optimizer(self, path):
        self.log.append("restore")
        if path not in self.states:
            raise KeyError(path)
        self.training = Training(self, self.states[path])
        return self.training


def log_softmax(logits):
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


REPLACED = {"ModelInput": ModelInput, "TensorData": TensorData}
"""Of the double that ``peer_double`` makes: what has methods."""
