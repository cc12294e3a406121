"""What the SDK sends and what the server answers, as JSON and as protocol buffers.

Written for the SDK 0.38.0: data of training come as protocol buffers, and their results and samples
go as such; everything else is JSON. Older SDKs send and take JSON throughout, which is read too.
Unknown fields are refused: what is ignored would train something else without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import msgspec
import numpy as np

from verifiers.errors import ModelRefused
from verifiers.runtime.decoding import decode_message
from verifiers_trainer.algorithm.datum_losses import Datum
from verifiers_trainer.tinker_server.protobuf import (
    as_bytes,
    as_double,
    as_int,
    as_ints,
    as_text,
    bytes_field,
    double_field,
    entry_of,
    fields_of,
    map_fields,
    number_field,
)

NO_LOGPROB = -99999.0
"""Of a position without log-probabilities in a table of the most likely tokens."""
_FLOAT32, _INT64 = 1, 2


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of a request."""

    type: str = ""


class ConfigBody(Body):
    """``client/config``."""

    sdk_version: str = ""


class SessionBody(Body):
    """``create_session``."""

    tags: list[str] = []
    user_metadata: dict[str, object] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Body):
    """``session_heartbeat``."""

    session_id: str


class LoraBody(Body):
    """``lora_config`` of ``create_model``."""

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(Body):
    """``optimizer_config``."""

    type: str = "adamw"


class CreateModel(Body):
    """``create_model``."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, object] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody | None = None


class LoadWeights(Body):
    """``load_weights``: into a new model (``session_id``) or one that there is (``model_id``)."""

    path: str
    optimizer: bool = True
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, object] | None = None
    optimizer_config: OptimizerBody | None = None
    weights_access_token: str | None = None


class AdamBody(Body):
    """``adam_params``."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body):
    """``optim_step``."""

    model_id: str
    adam_params: AdamBody
    seq_id: int | None = None


class SaveWeights(Body):
    """``save_weights``, ``save_weights_for_sampler`` and ``save_weights_external``."""

    model_id: str
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    age_encryption_recipients: list[str] | None = None


class ExpiryBody(Body):
    """``ttl`` of a checkpoint."""

    ttl_seconds: int | None = None


class OfModel(Body):
    """``get_info`` and ``unload_model``."""

    model_id: str


class OfPath(Body):
    """``weights_info``."""

    tinker_path: str


class CreateSampler(Body):
    """``create_sampling_session``."""

    session_id: str
    sampling_session_seq_id: int = 0
    base_model: str | None = None
    model_path: str | None = None


class OfSampler(Body):
    """``join_sampling_session``."""

    sampling_session_id: str


class Chunk(Body):
    """A part of a sequence; of those with other types nothing is read."""

    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(Body):
    """A sequence."""

    chunks: list[Chunk]

    def token_ids(self) -> np.ndarray:
        """int32 [T]. *Raises* ModelRefused for images and sound."""
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise _only_text(chunk.type)
        try:
            return np.array([t for chunk in self.chunks for t in chunk.tokens], np.int32)
        except OverflowError:
            raise ModelRefused("a token id is out of range", status=400) from None


class Sampling(Body):
    """``sampling_params``."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(Body):
    """``asample``."""

    prompt: ModelInput
    sampling_params: Sampling
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: object = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class RetrieveFuture(Body):
    """``retrieve_future`` and ``cancel_future``."""

    request_id: str
    model_id: str | None = None
    allow_metadata_only: bool = False


class Tensor(Body):
    """An array in JSON."""

    data: list[float]
    dtype: Literal["int64", "float32"] = "float32"
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def array(self) -> np.ndarray:
        """In its shape. *Raises* ModelRefused."""
        if self.sparse_crow_indices is not None:
            raise _only_dense()
        return _shaped(np.array(self.data, np.float64), self.shape)


class DatumBody(Body):
    """A datum in JSON."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, Tensor]


class LossBody(Body):
    """``forward_backward_input`` in JSON."""

    data: list[DatumBody]
    loss_fn: str
    loss_fn_config: dict[str, float] | None = None


class PassBody(Body):
    """``forward_backward`` and ``forward`` of older SDKs."""

    model_id: str
    forward_backward_input: LossBody | None = None
    forward_input: LossBody | None = None
    seq_id: int | None = None


class TrainingPass(msgspec.Struct, kw_only=True):
    """A forward pass over data, or one with gradients."""

    model_id: str = ""
    seq_id: int | None = None
    data: list[Datum] = []
    loss: str = ""
    config: dict[str, float] = {}
    forward_only: bool = False


_Kind = TypeVar("_Kind", bound=Body)


def read_json(content: bytes, kind: type[_Kind]) -> _Kind:
    """The body of a request. *Raises* ModelRefused with the field that is wrong."""
    try:
        return msgspec.convert(decode_message(content), kind)
    except msgspec.ValidationError as error:
        raise ModelRefused(f"the request cannot be served: {error}", status=400) from None
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"the body cannot be read as JSON: {error}", status=400) from None


def read_pass_json(content: bytes) -> TrainingPass:
    """A training pass of an older SDK. *Raises* ModelRefused."""
    body = read_json(content, PassBody)
    loss = body.forward_backward_input or body.forward_input
    if loss is None:
        raise ModelRefused("the request has no forward_backward_input", status=400)
    return TrainingPass(
        model_id=body.model_id,
        seq_id=body.seq_id,
        data=[
            _datum(
                datum.model_input.token_ids(),
                {name: tensor.array() for name, tensor in datum.loss_fn_inputs.items()},
            )
            for datum in loss.data
        ],
        loss=loss.loss_fn,
        config=loss.loss_fn_config or {},
        forward_only=body.forward_input is not None,
    )


def read_pass(content: bytes) -> TrainingPass:
    """A training pass. *Raises* ModelRefused."""
    read = TrainingPass(data=[], config={})
    for number, value in fields_of(content):
        match number:
            case 1:
                read.model_id = as_text(value)
            case 2:
                read.seq_id = as_int(value) or None
            case 3:
                read.data.append(_read_datum(as_bytes(value)))
            case 4:
                read.loss = as_text(value)
            case 5:  # the settings that are numbers, once more in field 7
                name, encoded = entry_of_double(as_bytes(value))
                read.config[name] = encoded
            case 6:
                read.forward_only = bool(as_int(value))
            case 7:
                name, setting = entry_of(as_bytes(value))
                for kind, part in fields_of(setting):
                    if kind != 1:
                        raise ModelRefused(
                            f"the setting {name!r} of the loss is text: no loss here takes one",
                            status=400,
                        )
                    read.config[name] = as_double(part)
            case _:
                raise ModelRefused(
                    f"the request has a field {number} that is not known: use tinker 0.38",
                    status=400,
                )
    return read


def entry_of_double(content: bytes) -> tuple[str, float]:
    """(key, value) of an entry of a map from text to doubles."""
    key, value = entry_of(content)
    return key, as_double(value) if value else 0.0


def _read_datum(content: bytes) -> Datum:
    ids: list[np.ndarray] = []
    inputs: dict[str, np.ndarray] = {}
    for number, value in fields_of(content):
        if number == 1:
            ids.append(_read_chunk(as_bytes(value)))
        elif number == 2:
            name, tensor = entry_of(as_bytes(value))
            inputs[name] = _read_tensor(tensor)
        # 3 and 4 say where tokens come from, which no loss here asks for
    return _datum(np.concatenate(ids) if ids else np.empty(0, np.int32), inputs)


def _read_chunk(content: bytes) -> np.ndarray:
    for number, value in fields_of(content):
        if number != 1:
            raise _only_text("image" if number == 2 else "sound")
        for part, tokens in fields_of(as_bytes(value)):
            if part == 1:
                return _numbers(as_bytes(tokens), "<i4").astype(np.int32)
    return np.empty(0, np.int32)


def _read_tensor(content: bytes) -> np.ndarray:
    dense, dtype, shape = b"", _FLOAT32, []
    for number, value in fields_of(content):
        match number:
            case 1:
                dense = as_bytes(value)
            case 2:
                raise _only_dense()
            case 3:
                dtype = as_int(value)
            case 4:
                shape += as_ints(value)
    if dtype not in (_FLOAT32, _INT64):
        raise ModelRefused("a tensor is neither of float32 nor of int64", status=400)
    return _shaped(_numbers(dense, "<f4" if dtype == _FLOAT32 else "<i8"), shape or None)


def _numbers(content: bytes, dtype: str) -> np.ndarray:
    if len(content) % np.dtype(dtype).itemsize:
        raise ModelRefused("an array ends within a number", status=400)
    return np.frombuffer(content, dtype)


def _shaped(array: np.ndarray, shape: Sequence[int] | None) -> np.ndarray:
    if shape is None:
        return array
    try:
        return array.reshape(shape)
    except ValueError:
        raise ModelRefused(
            f"an array of {array.size} numbers has not the shape {list(shape)}", status=400
        ) from None


def _datum(token_ids: np.ndarray, inputs: dict[str, np.ndarray]) -> Datum:
    targets = inputs.pop("target_tokens", None)
    if targets is None:
        raise ModelRefused("a datum needs target_tokens in loss_fn_inputs", status=400)
    if targets.ndim != 1:
        raise ModelRefused(
            "target_tokens has several targets for a position: give one for each", status=400
        )
    if targets.size and np.abs(targets).max() >= 2**31:
        raise ModelRefused("a token id is out of range", status=400)
    return Datum(token_ids, targets.astype(np.int32), inputs)


def _only_text(kind: str) -> ModelRefused:
    return ModelRefused(f"an input has a part of type {kind}: text alone is served", status=400)


def _only_dense() -> ModelRefused:
    return ModelRefused("sparse arrays are not served: send a dense one", status=400)


# --- results --------------------------------------------------------------------------------------


class Result(msgspec.Struct, tag=True):
    """What a request gave; saved with a run, so that a restart still has it."""

    def json(self) -> Mapping[str, object]:
        """As JSON."""
        raise NotImplementedError

    def protobuf(self) -> bytes | None:
        """As a protocol buffer; None for a result that goes as JSON."""
        return None


class Failed(Result):
    """A request that could not be served."""

    error: str
    category: Literal["user", "server"]

    def json(self) -> Mapping[str, object]:
        return {"error": self.error, "category": self.category}


class Plain(Result):
    """A result that is nothing but its JSON."""

    content: dict[str, object]

    def json(self) -> Mapping[str, object]:
        return self.content


class Trained(Result):
    """Of a training pass."""

    loss: float
    logprobs: list[bytes]
    """float32 [T] of each datum."""

    def json(self) -> Mapping[str, object]:
        arrays = [np.frombuffer(content, "<f4") for content in self.logprobs]
        return {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": [
                {"logprobs": {"data": a.tolist(), "dtype": "float32", "shape": [len(a)]}}
                for a in arrays
            ],
            "metrics": {"loss:sum": self.loss},
        }

    def protobuf(self) -> bytes:
        offsets = np.cumsum([0, *map(len, self.logprobs)]).astype("<i8").tobytes()
        tensor = (
            bytes_field(1, b"".join(self.logprobs))
            + bytes_field(2, offsets)
            + number_field(3, _FLOAT32)
        )
        record = (
            bytes_field(1, "ArrayRecord")
            + map_fields(2, [("logprobs", bytes_field(2, tensor))])
            + number_field(3, len(self.logprobs))
        )
        metrics = map_fields(3, [("loss:sum", double_field(2, self.loss))])
        return bytes_field(1, "ArrayRecord") + bytes_field(2, record) + metrics


class TopTokens(msgspec.Struct):
    """The most likely tokens of positions."""

    token_ids: np.ndarray
    """int32 [N, K]."""
    logprobs: np.ndarray
    """float32 [N, K]."""

    def protobuf(self) -> bytes:
        """As a message."""
        length, k = self.token_ids.shape
        return (
            bytes_field(1, self.token_ids.astype("<i4").tobytes())
            + bytes_field(2, self.logprobs.astype("<f4").tobytes())
            + number_field(3, k)
            + number_field(4, length)
        )

    def json(self) -> list[list[tuple[int, float]] | None]:
        """Of each position; None for one without."""
        pairs = zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        rows = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]
        return [None if row[0][1] == NO_LOGPROB else row for row in rows]


class SampledSequence(msgspec.Struct):
    """A sampled sequence."""

    token_ids: np.ndarray
    """int32 [T]."""
    logprobs: np.ndarray
    """float32 [T]."""
    is_stopped: bool
    """Whether it ended itself, and not by its limit."""
    top: TopTokens | None = None


class Sampled(Result):
    """Of a sampling request."""

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    """float32 [P]; NaN of the first."""
    top_of_prompt: TopTokens | None = None

    def json(self) -> Mapping[str, object]:
        sequences = [
            {
                "stop_reason": "stop" if sequence.is_stopped else "length",
                "tokens": sequence.token_ids.tolist(),
                "logprobs": sequence.logprobs.tolist(),
            }
            for sequence in self.sequences
        ]
        result: dict[str, object] = {"type": "sample", "sequences": sequences}
        if self.prompt_logprobs is not None:
            values = self.prompt_logprobs.tolist()
            result["prompt_logprobs"] = [None if value != value else value for value in values]
        if self.top_of_prompt is not None:
            result["topk_prompt_logprobs"] = self.top_of_prompt.json()
        return result

    def protobuf(self) -> bytes:
        parts = []
        for sequence in self.sequences:
            message = (
                number_field(1, 0 if sequence.is_stopped else 1)
                + bytes_field(2, sequence.token_ids.astype("<i4").tobytes())
                + bytes_field(3, sequence.logprobs.astype("<f4").tobytes())
            )
            if sequence.top is not None:
                message += bytes_field(4, sequence.top.protobuf())
            parts.append(bytes_field(1, message))
        if self.prompt_logprobs is not None:
            parts.append(bytes_field(2, self.prompt_logprobs.astype("<f4").tobytes()))
        if self.top_of_prompt is not None:
            parts.append(bytes_field(3, self.top_of_prompt.protobuf()))
        return b"".join(parts)


Saved = Failed | Plain | Trained
"""Results that a run folder keeps; samples are drawn anew."""
