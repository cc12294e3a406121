"""Select and open the inference engine of a training run, and its client."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verifiers.clients.http import OpenAIChatCompletionsClient
from verifiers.clients.protocol import Client
from verifiers.environments.base import Environment
from verifiers.runtime.bounded import MAX_OUTPUT_BYTES, read_stream
from verifiers.runtime.decoding import decode_message
from verifiers.runtime.http_clients import open_url
from verifiers_trainer.engines.embedded.engine import EmbeddedEngine
from verifiers_trainer.engines.exact.client import ExactClient
from verifiers_trainer.engines.role_client import RoleClient
from verifiers_trainer.engines.vllm.engine import VLLMEngine
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.settings.sampling import unreshaped

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from verifiers_trainer.engines.http.chat import Tokenizer

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Seconds that ``inference="auto"`` waits for a server at the default address."""
UNUSABLE = (OSError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of a response that is not a vLLM server's."""


def open_engine(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: RLConfig, env: Environment
) -> EmbeddedEngine | VLLMEngine:
    """The engine of ``config.inference``, not yet started: vLLM servers, or the embedded engine
    over ``model``.

    Logs the engine and the reason.
    """
    url, reason = choose_engine(model, config)
    if url is None:
        log.info("inference: the embedded engine (%s)", reason)
        mode: Any = "deterministic" if config.deterministic else config.embedded_mode
        return EmbeddedEngine(
            model,
            tokenizer,
            mode=mode,
            max_seq_len=config.max_seq_len,
            concurrency=config.embedded_concurrency
            or min(config.max_concurrent, 4 * config.batch_size),
            max_batch_tokens=config.embedded_max_batch_tokens,
            tool_call_parser=config.tool_call_parser,
            threads=config.embedded_threads,
            # a gradient and AdamW's two moments of each trained weight
            reserved_bytes=3 * sum(p.nbytes for p in model.parameters() if p.requires_grad),
            autocast_dtype=torch.bfloat16
            if config.bf16
            else torch.float16
            if config.fp16
            else None,
        )
    from verifiers_trainer.engines.vllm.weights.opening import open_sync

    log.info("inference: vLLM at %s (%s)", url, reason)
    return VLLMEngine(
        url,
        model,
        tokenizer,
        lambda servers, run, features, version: open_sync(
            model, config, servers, run, features, version
        ),
        in_chat=env.message_type == "chat",
        sampling={"return_weight_versions": True, **unreshaped(config.sampling())},
        sync_timeout_s=config.sync_timeout,
        sync_every=config.sync_every,
    )


def choose_engine(model: object, config: RLConfig) -> tuple[str | None, str]:
    """(URL of the servers or None for the embedded engine, reason)."""
    if config.server_url is not None:
        return config.server_url, "as configured"
    if config.inference == "embedded":
        return None, "as configured"
    if config.lora_per_role:
        return None, "it computes rows with adapters of their own"
    if config.deterministic:
        return None, "deterministic runs need it"
    default = f"http://127.0.0.1:{config.vllm_server_port}"
    if (served := _model_served_at(default)) is None:
        return None, f"no server answers at {default}"
    trained = str(getattr(model, "name_or_path", "") or "")
    if not trained or Path(served).name != Path(trained).name:
        return None, f"the server at {default} serves {served!r}, not {trained!r}"
    if (label := _weights_of_a_run(default)) is not None:
        log.warning(
            "the server at %s serves the same model, but has the weights of another run (%s), so it"
            " is not used; if that run has ended, set inference=%r",
            default,
            label,
            default,
        )
        return None, f"the server at {default} belongs to another run"
    return default, "it serves the same model"


def _model_served_at(url: str) -> str | None:
    """The first model of a vLLM server at ``url``; None without a model."""
    try:
        _ask(f"{url}/version")
        return str(_ask(f"{url}/v1/models")["data"][0]["id"])
    except UNUSABLE:
        return None


def _weights_of_a_run(url: str) -> str | None:
    """The adapter or weight version that a training run pushed to the server; None without any."""
    try:
        adapters = [
            str(entry["id"]) for entry in _ask(f"{url}/v1/models")["data"] if entry.get("parent")
        ]
        if ours := [name for name in adapters if name.startswith("policy-")]:
            return ours[-1]
        label = str(_ask(f"{url}/weight_info").get("weight_version"))
    except UNUSABLE:  # older servers have no labels
        return None
    return f"version {label}" if label.isdigit() else None


def _ask(address: str) -> Any:
    with open_url(address, LOOK_S) as answer:
        return decode_message(read_stream(answer, MAX_OUTPUT_BYTES, address))


def training_client(
    engine: EmbeddedEngine | VLLMEngine, tokenizer: Tokenizer, config: RLConfig
) -> Client:
    """The client of rollouts: that of ``policy_client``, or a client that sends token ids
    (``history="exact"``)."""
    client = policy_client(engine)
    if config.history == "template":
        return client
    return ExactClient(
        client, tokenizer, config.max_seq_len, config.tool_call_parser, engine.processing
    )


def policy_client(engine: EmbeddedEngine | VLLMEngine) -> Client:
    """A client of ``engine``, with separate connections for each event loop."""
    if isinstance(engine, VLLMEngine):
        return engine.open_client()
    client = OpenAIChatCompletionsClient(
        base_url=engine.base_url,
        api_key=engine.api_key,
        max_retries=3,
        tools_shown=engine.tools_shown,
    )
    return client if engine.models == (engine.served_model,) else RoleClient(client)
