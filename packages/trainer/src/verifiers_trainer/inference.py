"""Opens the engine that a training run generates with, and the client that reaches it."""

from __future__ import annotations

from typing import Any

import torch

from verifiers.clients.http import OpenAIChatCompletionsClient
from verifiers.environments.base import Environment
from verifiers_trainer.config import RLConfig
from verifiers_trainer.engines.embedded import EmbeddedEngine


def open_engine(model: Any, tokenizer: Any, config: RLConfig, env: Environment) -> EmbeddedEngine:
    """The embedded engine over ``model``'s own parameters, not yet started."""
    mode: Any = "deterministic" if config.deterministic else config.embedded_mode
    if mode == "auto" and env.max_turns == 1 and config.use_cpu:
        mode = "padded"
    return EmbeddedEngine(
        model,
        tokenizer,
        mode=mode,
        max_seq_len=config.max_seq_len,
        concurrency=config.embedded_concurrency or min(config.max_concurrent, 4 * config.batch_size),
        num_blocks=config.embedded_num_blocks,
        page_size=config.embedded_page_size,
        tool_call_parser={"auto": "hermes", "none": None}.get(config.tool_call_parser, config.tool_call_parser),
        threads=config.embedded_threads,
        autocast_dtype=torch.bfloat16 if config.bf16 and mode != "continuous" else None,
    )


def policy_client(engine: EmbeddedEngine) -> OpenAIChatCompletionsClient:
    """A client of ``engine``: each of its event loops has its own connections."""
    return OpenAIChatCompletionsClient(base_url=engine.base_url, api_key=engine.api_key, max_retries=3)
