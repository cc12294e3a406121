"""Tasks of a few letters or digits, and tiny models that do them sometimes: a training takes seconds.

``warm`` imitates replies that the caller draws for each row (right ones, wrong ones, cheap ones), so
that a policy begins with known shares of each; ``train`` goes on from a copy of it.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import verifiers as vf

ALPHABET = "abcdef"
Row = dict[str, Any]
Reply = Callable[[Row, random.Random], str]
"""The text that the warm-up imitates for a row."""


def words(count: int, seed: int, lengths: Sequence[int] = (2, 3, 4)) -> list[Row]:
    """Words to write backwards, each once."""
    rng = random.Random(seed)
    rows: dict[str, Row] = {}
    while len(rows) < count:
        word = "".join(rng.choices(ALPHABET, k=rng.choice(lengths)))
        rows[word] = {"question": word, "answer": word[::-1]}
    return list(rows.values())


def sums(count: int, seed: int, most: int = 30) -> list[Row]:
    """Sums of two numbers up to ``most``, each once."""
    rng = random.Random(seed)
    rows: dict[str, Row] = {}
    while len(rows) < count:
        a, b = rng.randint(0, most), rng.randint(0, most)
        rows[f"{a}+{b}"] = {"question": f"{a}+{b}", "answer": str(a + b)}
    return list(rows.values())


def warm(rows: Sequence[Row], reply: Reply, seed: int, steps: int) -> tuple[Any, Any]:
    """A tiny model after ``steps`` supervised steps of 64 rows, and its tokenizer."""
    from verifiers_trainer.pipeline.warmup import warm_up
    from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer

    rng = random.Random(seed)
    env = vf.SingleTurnEnv(dataset=[dict(row) for row in rows], rubric=vf.Rubric())
    tokenizer = build_tiny_tokenizer()
    model = build_tiny_model(seed=seed, layers=2, hidden=64, heads=4)
    options: dict[str, Any] = {"reward": lambda: 0.0, "target": 1.0, "probe_every": 10**6}
    warm_up(
        model, tokenizer, env, answers=lambda row: reply(row, rng), max_steps=steps,
        learning_rate=2e-3, seed=seed, **options,
    )  # fmt: skip
    return model, tokenizer


def train(
    policy: tuple[Any, Any],
    env: vf.Environment | str,
    callbacks: Sequence[Any] = (),
    folder: Path | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` of a training from a copy of ``policy``, with held-out
    evaluations if the settings ask for them."""
    from verifiers_trainer.run.metrics_files import METRICS, read_metrics
    from verifiers_trainer.settings.config import RLConfig
    from verifiers_trainer.trainer import RLTrainer

    with tempfile.TemporaryDirectory() as temporary:
        run = folder or Path(temporary)
        values = {
            "output_dir": str(run), "batch_size": 64, "rollouts_per_example": 8, "micro_batch_size": 8,
            "max_seq_len": 64, "max_tokens": 8, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
            "use_lora": False, "use_cpu": True, "inference": "embedded", "save_strategy": "no",
            "log_completions": False, "disable_tqdm": True,
        } | settings  # fmt: skip
        model, tokenizer = policy
        trainer = RLTrainer(
            copy.deepcopy(model), env, RLConfig(**values), tokenizer, callbacks=list(callbacks)
        )
        trainer.train()
        return read_metrics(run / METRICS)
