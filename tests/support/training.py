"""Small real training runs: a one-layer model, a toy environment, and an
``RLTrainer`` over both."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import verifiers as vf
from verifiers.runtime.failpoints import failpoint
from verifiers_trainer.algorithm.batch import TrainBatch
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer
from verifiers_trainer.run.metrics_files import METRICS, read_metrics
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.trainer import RLTrainer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def rows(count: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    """Questions of two to four letters."""
    order = random.Random(seed)
    return [
        {"question": "".join(order.choices(LETTERS, k=order.randint(2, 4)))} for _ in range(count)
    ]


def digits(completion: Any, **_: Any) -> float:
    """The share of the answer that is digits: about 0.09 for a model that knows nothing."""
    text = completion[-1]["content"] or ""
    return sum(c.isdigit() for c in text) / max(1, len(text))


def toy_env(reward: Any = digits, count: int = 40, **options: Any) -> vf.SingleTurnEnv:
    """Answers of digits are worth most."""
    return vf.SingleTurnEnv(
        dataset=rows(count),
        eval_dataset=rows(8, seed=1),
        rubric=vf.Rubric(funcs=[reward]),
        **options,
    )


class Pair(vf.MultiAgentEnv):
    """Two roles, each shown its own letter."""

    def observe(self, state: vf.State, role: str) -> str:
        return {"left": "l", "right": "r"}[role] * 3


def left(state: vf.State) -> float:
    return float(len(state["views"]["left"][-1].content or "") % 3)


def right(state: vf.State) -> float:
    return float(len(state["views"]["right"][-1].content or "") % 2)


def pair(**options: Any) -> vf.MultiAgentEnv:
    """Two roles of the model; the rewards depend on the lengths of their replies."""
    return Pair(
        ("left", "right"),
        dataset=[{"question": f"q{n}"} for n in range(8)],
        max_turns=2,
        rubric=vf.Rubric([left, right], weights=[1.0, 0.0]),
        **options,
    )


class Asked(vf.MultiTurnEnv):
    """A second turn whose start is a fail point, ``in_branch``, where it is that of a branch."""

    def env_response(self, messages: Any, state: vf.State) -> str:
        if state.is_branch:
            failpoint("in_branch")
        return "again"


def branched() -> vf.MultiTurnEnv:
    """Two trees of two rollouts in each group of four, which leave at the second of three turns."""
    return Asked(
        dataset=rows(),
        max_turns=3,
        rubric=vf.Rubric(funcs=[digits]),
        branching=vf.Branching(at=1, branches=2),
    )


class LetterTasks(vf.ProposerSolverEnv):
    """A proposal with a small letter asks for a reply with a digit or a capital; one with a digit
    asks for nothing."""

    def task_of(self, row: Any, text: str) -> str | None:
        if any(c.isdigit() for c in text):
            return "easy"
        return "hard" if any(c.islower() for c in text) else None

    def score(self, task: str, text: str) -> float:
        return float(task == "easy" or any(c.isdigit() or c.isupper() for c in text))


def letter_tasks(**options: Any) -> vf.ProposerSolverEnv:
    """Four attempts at each task."""
    return LetterTasks(dataset=[{"question": f"q{n}"} for n in range(8)], **options)


def small_policy(seed: int = 0) -> Any:
    """One layer of 32, about 10,000 parameters: a step takes milliseconds."""
    return build_tiny_model(seed=seed, layers=1, hidden=32, heads=2)


def small_config(folder: Path, **settings: Any) -> RLConfig:
    """Two groups of four rollouts of at most four tokens."""
    small = {
        "output_dir": str(folder),
        "batch_size": 8,
        "rollouts_per_example": 4,
        "micro_batch_size": 4,
        "max_seq_len": 64,
        "max_tokens": 4,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "use_lora": False,
        "save_strategy": "no",
        "generation_timeout": 30.0,
        "log_completions": False,
        "inference": "embedded",
        "disable_tqdm": True,
    }
    if torch.cuda.is_available():  # where bfloat16 is the default, and bounds are for float32
        small["bf16"] = False
    return RLConfig(**{**small, **settings})


def small_trainer(folder: Path, env: Any = None, model: Any = None, **settings: Any) -> RLTrainer:
    """A trainer ready to train, with nothing started."""
    options = {
        name: settings.pop(name)
        for name in ("callbacks", "optimizers", "peft_config", "eval_env")
        if name in settings
    }
    return RLTrainer(
        model if model is not None else small_policy(),
        env if env is not None else toy_env(),
        small_config(folder, **settings),
        None if isinstance(model, str) else build_tiny_tokenizer(),
        **options,
    )


class StepLog(TrainerCallback):
    """Collects the numbers of every step, with the loss as hex, and the rollouts it trained on."""

    def __init__(self) -> None:
        self.trainer: RLTrainer | None = None
        self.steps: list[dict[str, Any]] = []
        self.losses: list[str] = []

    def watch(self, trainer: RLTrainer) -> RLTrainer:
        self.trainer = trainer
        trainer.add_callback(self)
        return trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.trainer is not None
        self.steps.append(self.trainer.last_step)
        self.losses.append(self.trainer.last_step["loss"].hex())


def run(trainer: RLTrainer, **options: Any) -> StepLog:
    """Train and return what every step logged."""
    log = StepLog()
    log.watch(trainer).train(**options)
    return log


def first_batch(trainer: RLTrainer) -> TrainBatch:
    """Start engine and pipeline, and take the first batch, without training on it."""
    trainer.begin()
    assert trainer.batches is not None
    return trainer.batches.next_batch()


def weights_hash(model: Any) -> str:
    """sha256 over every parameter, bit for bit."""
    total = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        total.update(name.encode())
        total.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / METRICS)


def losses_of(folder: Path) -> list[tuple[int, str]]:
    """(step, loss as hex) of every optimizer step of a run."""
    return [(row["step"], row["loss"].hex()) for row in metrics_of(folder) if "loss" in row]


def files_hash(folder: Path, *names: str) -> dict[str, str]:
    """Size and checksum of files of a checkpoint, as its manifest gives them."""
    files = json.loads((folder / "MANIFEST.json").read_text())["files"]
    return {name: str(files[name]) for name in names}


def evaluated_by_the_policy(folder: Path) -> Path:
    """The folder of an evaluation by the tiny policy itself: 8 examples x 4 rollouts with their
    tokens."""
    with small_trainer(folder / "trainer", inference="embedded") as trainer:
        trainer.start_engine()
        toy_env(count=8).evaluate(
            trainer.client,
            trainer.client.model,
            num_examples=8,
            rollouts_per_example=4,
            results_path=str(folder / "run"),
            state_columns=["trajectory"],
            sampling_args={"temperature": 1.0, "max_tokens": 4},
        )
    return folder / "run"
