"""A client of a Tinker server, without the SDK: the bodies that the SDK 0.38.0 sends."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

import numpy as np

from verifiers_trainer.tinker_server.protobuf import bytes_field, map_fields, number_field

Answer = dict[str, object]


class Refused(Exception):
    """An answer that is none; ``status`` is its code."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


def tensor(values: Sequence[float], dtype: int) -> bytes:
    """float32 (1) or int64 (2)."""
    array = np.array(values, "<f4" if dtype == 1 else "<i8")
    return bytes_field(1, array.tobytes()) + number_field(3, dtype) + bytes_field(4, b"")


def datum(ids: Sequence[int], **inputs: Sequence[float]) -> bytes:
    """The tokens of a text, of which all but the first are targets."""
    tokens = bytes_field(1, np.array(ids[:-1], "<i4").tobytes())
    arrays = {"target_tokens": tensor(ids[1:], 2)}
    arrays |= {name: tensor(values, 1) for name, values in inputs.items()}
    fields = ((name, bytes_field(2, content)) for name, content in arrays.items())
    return bytes_field(1, bytes_field(1, tokens)) + map_fields(2, fields)


def weighted(ids: Sequence[int]) -> bytes:
    """For ``cross_entropy``, every token alike."""
    return datum(ids, weights=[1.0] * (len(ids) - 1))


class TinkerSession:
    """A session of a client; ``key`` is sent with every request."""

    def __init__(self, url: str, key: str = ""):
        self.url, self.key = url, key
        self.session_id = str(self.post("create_session", sdk_version="0")["session_id"])
        self._num_models, self._num_samplers = 0, 0
        self._sequences: dict[str, int] = {}

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[bytes, Mapping[str, str]]:
        """(body, headers) of an answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(
            f"{self.url}/api/v1/{path}",
            body,
            {"Content-Type": "application/json", "X-API-Key": self.key, **named},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.read(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            raise Refused(error.code, error.read().decode()) from None

    def get(self, path: str) -> Answer:
        answer: Answer = json.loads(self.request("GET", path)[0])
        return answer

    def post(self, path: str, /, **body: object) -> Answer:
        answer: Answer = json.loads(self.request("POST", path, json.dumps(body).encode())[0])
        return answer

    def result(self, promise: Answer) -> Answer:
        """What a request gave, as JSON."""
        while True:
            try:
                return self.post("retrieve_future", request_id=promise["request_id"])
            except Refused as refused:
                if refused.status != 408:
                    raise

    def create(self, base: str, **lora: object) -> str:
        """The id of a new model."""
        return str(self.result(self.create_promise(base, **lora))["model_id"])

    def create_promise(self, base: str, **lora: object) -> Answer:
        self._num_models += 1
        return self.post(
            "create_model",
            session_id=self.session_id,
            model_seq_id=self._num_models - 1,
            base_model=base,
            lora_config={"rank": 4, "seed": 1} | lora,
        )

    def restore(self, path: str, *, optimizer: bool = True) -> str:
        """The id of a new model that begins with a checkpoint."""
        self._num_models += 1
        number = self._num_models - 1
        promise = self.post(
            "load_weights",
            session_id=self.session_id,
            model_seq_id=number,
            path=path,
            optimizer=optimizer,
        )
        return str(self.result(promise)["model_id"])

    def next_sequence(self, model: str) -> int:
        self._sequences[model] = self._sequences.get(model, 0) + 1
        return self._sequences[model]

    def train(self, model: str, *data: bytes, loss: str = "cross_entropy") -> Answer:
        """The promise of a forward and backward pass."""
        return self.send_pass(model, self.next_sequence(model), *data, loss=loss)

    def send_pass(
        self, model: str, sequence: int, *data: bytes, loss: str = "cross_entropy"
    ) -> Answer:
        body = bytes_field(1, model) + number_field(2, sequence) + bytes_field(4, loss)
        body += b"".join(bytes_field(3, each) for each in data)
        content = self.request(
            "POST", "forward_backward", body, Content_Type="application/x-protobuf"
        )[0]
        answer: Answer = json.loads(content)
        return answer

    def step(self, model: str, learning_rate: float = 1e-2) -> Answer:
        """The promise of an optimizer step."""
        return self.post(
            "optim_step",
            model_id=model,
            seq_id=self.next_sequence(model),
            adam_params={"learning_rate": learning_rate},
        )

    def save(self, model: str, name: str | None = None, ending: str = "", **more: object) -> Answer:
        """The promise of saved weights; ``ending`` is that of the route."""
        return self.post(
            f"save_weights{ending}",
            model_id=model,
            seq_id=self.next_sequence(model),
            path=name,
            **more,
        )

    def sampler(self, model: str | None = None, **more: object) -> str:
        """The id of a sampling client of a model as it is now, or of a path or base."""
        self._num_samplers += 1
        number = self._num_samplers - 1
        if model is None:
            return str(
                self.post(
                    "create_sampling_session",
                    session_id=self.session_id,
                    sampling_session_seq_id=number,
                    **more,
                )["sampling_session_id"]
            )
        promise = self.save(model, ending="_for_sampler", sampling_session_seq_id=number, **more)
        return str(self.result(promise)["sampling_session_id"])

    def sample(
        self, sampler: str, ids: Sequence[int], max_tokens: int = 4, **more: object
    ) -> Answer:
        """The promise of samples; ``sampling_params`` may be in ``more``."""
        params = {"max_tokens": max_tokens, **more.pop("sampling_params", {})}  # type: ignore[dict-item]
        return self.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=self.next_sequence(sampler),
            prompt={"chunks": [{"tokens": list(ids)}]},
            sampling_params=params,
            **more,
        )
