"""The client of a model object: ``env.rollout(model=model, …)`` samples from it, without a server
or a trainer; and that of a folder with a saved model, or of a builtin model.

The embedded engine starts with the first call and computes with the model's own parameters; it ends
with the model. The tokenizer is that of ``model.name_or_path``. Torch is imported for models alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from verifiers.clients.protocol import Client
from verifiers.errors import ConfigError
from verifiers_trainer.policy.builtin_models import is_builtin
from verifiers_trainer.policy.folder_client import folder_client

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

    from verifiers_trainer.engines.embedded.engine import EmbeddedEngine

MAX_SEQ_LEN, CONCURRENCY = 8192, 64
"""Longest conversation in tokens, where the model allows as many, and the rollouts that decode
together."""
HELD = "_verifiers_engine"
"""Attribute of the model that holds its engine."""


class _Held:
    """Keeps the engine and its client with the model; a copy of the model starts without."""

    def __init__(self, engine: EmbeddedEngine | None = None, client: Client | None = None):
        self.engine, self.client = engine, client

    def __deepcopy__(self, memo: object) -> _Held:
        return _Held()

    def __reduce__(self) -> tuple[object, ...]:
        return _Held, ()


def client_of(model: object) -> Client | None:
    """The client of a model object, of the ``Path`` of a folder, or of the name of a builtin model;
    None for an object that is no causal language model of transformers.

    Raises ``ConfigError`` when its tokenizer cannot be loaded, or the folder holds no model.
    """
    if isinstance(model, Path) or is_builtin(model):
        return folder_client(str(model))
    if not _is_causal_lm(model):
        return None
    from verifiers_trainer.engines.embedded.engine import EmbeddedEngine
    from verifiers_trainer.engines.inference import policy_client
    from verifiers_trainer.policy.loading import get_tokenizer

    held = model.__dict__.get(HELD)
    if held is None or held.client is None:
        if not (name := str(getattr(model, "name_or_path", "") or "")):
            raise ConfigError(
                "the model object has no name_or_path to load its tokenizer from: set it, or pass"
                " client="
            )
        tokenizer, settings = get_tokenizer(name), model.config.get_text_config()
        limit = getattr(settings, "max_position_embeddings", None) or MAX_SEQ_LEN
        engine = EmbeddedEngine(
            model, tokenizer, max_seq_len=min(limit, MAX_SEQ_LEN), concurrency=CONCURRENCY
        )
        engine.start()
        held = model.__dict__[HELD] = _Held(engine, policy_client(engine))
    return held.client


def _is_causal_lm(model: object) -> TypeGuard[PreTrainedModel]:
    torch = sys.modules.get("torch")  # a model has imported it
    return torch is not None and isinstance(model, torch.nn.Module) and hasattr(model, "generate")
