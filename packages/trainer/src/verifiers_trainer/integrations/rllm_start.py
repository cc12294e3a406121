"""How a run on rLLM starts: which of its two trainers is there, from which configuration, with which words.

rLLM's trainer was rewritten: the unified one composes ``unified`` with ``rllm/backend=…`` and has the run's settings
below ``rllm``; the older one has a configuration per backend. ``start_of`` takes the older guide's words for both.
Written after the configurations of both; rLLM is on no package index. It starts nothing itself.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError
from verifiers_trainer.integrations.rllm import BACKENDS, RLLM

CONFIGS = "pkg://rllm.trainer.config"
"""Where hydra finds rLLM's configurations."""
OLDER = {"verl": "agent_ppo_trainer", "tinker": "tinker_rl_trainer"}
"""Backend -> configuration of the older trainer."""
MOVED = {"trainer.": "rllm.trainer.", "sampling.": "rllm.rollout.train.", "algorithm.": "rllm.algorithm."}
"""Beginnings of keys of the older Tinker configuration -> where the unified one has them. verl keeps its own names."""


@dataclass(frozen=True, slots=True)
class Start:
    """What to hand to hydra, and the module whose ``AgentTrainer`` runs it."""

    config_name: str
    words: tuple[str, ...]
    module: str
    backend: str

    @property
    def is_unified(self) -> bool:
        return self.module == "trainer.unified_trainer"


def start_of(words: Sequence[str], is_unified: bool | None = None) -> Start:
    """How the installed rLLM runs these words of a command line, ``+backend=tinker trainer.total_epochs=2`` and so on.

    ``is_unified`` None looks which trainer is installed. *Raises* ImportError without rLLM; ConfigError for a backend
    that trainer does not have.
    """
    if is_unified is None:
        RLLM.load()
        is_unified = importlib.util.find_spec("rllm.trainer.unified_trainer") is not None
    backend = _backend(words)
    if is_unified:
        moved = [_moved(word) for word in words] if backend == "tinker" else list(words)
        return Start("unified", (f"rllm/backend={backend}", *moved), "trainer.unified_trainer", backend)
    if backend not in OLDER:
        known = ", ".join(OLDER)
        raise ConfigError(
            f"backend is {backend!r}; this rLLM's trainer has {known}: install a newer one", key="backend"
        )
    more = () if backend == "tinker" else ("rllm.workflow.use_workflow=true",)
    return Start(OLDER[backend], (*more, *words), "trainer.agent_trainer", backend)


def _backend(words: Sequence[str]) -> str:
    given = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("backend=")]
    backend = given[-1] if given else "verl"
    if backend not in BACKENDS:
        raise ConfigError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}", key="backend")
    return backend


def _moved(word: str) -> str:
    plus = word[: len(word) - len(word.lstrip("+"))]
    key = word[len(plus) :]
    for old, new in MOVED.items():
        if key.startswith(old):
            return plus + new + key.removeprefix(old)
    return word


def as_dataset(start: Start, tasks: Sequence[dict[str, Any]], split: str) -> Any:
    """Tasks as the dataset that trainer takes; verl's older one reads them from a file, so they are registered."""
    datasets = RLLM.load("data.dataset")
    if start.is_unified or start.backend != "verl":
        return datasets.Dataset(list(tasks))
    rows = [{**task, "info": json.dumps(task["info"])} for task in tasks]
    return datasets.DatasetRegistry.register_dataset("verifiers", rows, split)
