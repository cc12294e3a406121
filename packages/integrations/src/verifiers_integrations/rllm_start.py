"""Determine how to start a run on rLLM: the installed trainer, its configuration, and its
arguments.

rLLM has two trainers: the unified trainer composes ``unified`` with ``rllm/backend=…`` and has the
settings of the run below ``rllm``; the older trainer has a configuration per backend. ``start_of``
takes arguments of the older guide for both. Written for the configurations of both; rLLM is not on
a package index. Starts nothing.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError
from verifiers_integrations.rllm import BACKENDS, RLLM

CONFIGS = "pkg://rllm.trainer.config"
"""Search path of hydra for rLLM's configurations."""
OLDER = {"verl": "agent_ppo_trainer", "tinker": "tinker_rl_trainer"}
"""Backend -> configuration of the older trainer."""
MOVED = {
    "trainer.": "rllm.trainer.",
    "sampling.": "rllm.rollout.train.",
    "algorithm.": "rllm.algorithm.",
}
"""Key prefixes of the older Tinker configuration -> prefixes of the unified configuration. Those of
verl are unchanged."""


@dataclass(frozen=True, slots=True)
class Start:
    """Arguments for hydra, and the module whose ``AgentTrainer`` runs them."""

    config_name: str
    words: tuple[str, ...]
    module: str
    backend: str

    @property
    def is_unified(self) -> bool:
        return self.module == "trainer.unified_trainer"


def start_of(words: Sequence[str], is_unified: bool | None = None) -> Start:
    """Return how the installed rLLM runs command-line arguments such as ``+backend=tinker``.

    ``is_unified``: which trainer; None detects the installed trainer. *Raises* ImportError without
    rLLM; ConfigError for a backend that the trainer does not have.
    """
    if is_unified is None:
        RLLM.load()
        is_unified = importlib.util.find_spec("rllm.trainer.unified_trainer") is not None
    backend = _backend(words)
    if is_unified:
        moved = [_rename_key(word) for word in words] if backend == "tinker" else list(words)
        return Start(
            "unified", (f"rllm/backend={backend}", *moved), "trainer.unified_trainer", backend
        )
    if backend not in OLDER:
        backends = ", ".join(OLDER)
        raise ConfigError(
            f"backend is {backend!r}; this rLLM's trainer has {backends}: install a newer one",
            key="backend",
        )
    more = () if backend == "tinker" else ("rllm.workflow.use_workflow=true",)
    return Start(OLDER[backend], (*more, *words), "trainer.agent_trainer", backend)


def _backend(words: Sequence[str]) -> str:
    values = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("backend=")]
    backend = values[-1] if values else "verl"
    if backend not in BACKENDS:
        raise ConfigError(
            f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}", key="backend"
        )
    return backend


def _rename_key(word: str) -> str:
    plus = word[: len(word) - len(word.lstrip("+"))]
    key = word[len(plus) :]
    for old, new in MOVED.items():
        if key.startswith(old):
            return plus + new + key.removeprefix(old)
    return word


def as_dataset(start: Start, tasks: Sequence[Mapping[str, object]], split: str) -> Any:
    """Convert tasks to a dataset of the trainer; the older trainer of verl reads a file, so the
    dataset is registered."""
    datasets = RLLM.load("data.dataset")
    if start.is_unified or start.backend != "verl":
        return datasets.Dataset(list(tasks))
    rows = [{**task, "info": json.dumps(task["info"])} for task in tasks]
    return datasets.DatasetRegistry.register_dataset("verifiers", rows, split)
