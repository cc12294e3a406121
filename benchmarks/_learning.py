"""The learning curve of one trainer in a separate process, and the warm model that both start from.

    python _learning.py warm '{"folder": ..., "task": "reverse-text", "seed": 0, ...}'
    python _learning.py ours '{...}'
    python _learning.py trl  '{...}'                        by the interpreter of TRL's environment

Both trainers start from ``folder``/model, run the same environment through our embedded engine with one thread, and
print one JSON line: for each step the mean reward of the rollouts that were sampled for it, the tokens sampled and
trained so far, and CPU and wall seconds so far. Everything outside ``settings`` is the default of each.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

TASKS: dict[str, dict[str, Any]] = {
    "digits": {
        "arguments": {},
        "settings": {"batch_size": 16, "siblings": 4, "max_tokens": 8, "max_seq_len": 64, "learning_rate": 1e-3},
        "warm_up": {},
    },
    "reverse-text": {
        "arguments": {"unit": "word", "min_chars": 3, "max_chars": 6, "num_train_examples": 2000},
        "settings": {"batch_size": 128, "siblings": 8, "max_tokens": 12, "max_seq_len": 48, "learning_rate": 3e-4},
        "warm_up": {"target": 0.7, "max_steps": 200, "rows_per_step": 64, "learning_rate": 7e-4},
    },
    "alphabet-sort": {
        "arguments": {
            "min_turns": 1, "max_turns": 1, "min_names_per_turn": 2, "max_names_per_turn": 2, "similarity_power": 4,
        },
        "settings": {"batch_size": 64, "siblings": 8, "max_tokens": 96, "max_seq_len": 448, "learning_rate": 3e-4},
        "warm_up": {"target": 0.1, "max_steps": 250, "rows_per_step": 16, "learning_rate": 1e-3},
    },
}  # fmt: skip
"""Environments and the settings of both trainers. "digits" needs no warm-up: an untrained model samples some."""


class Curve(TrainerCallback):
    """CPU and wall seconds at the end of each step, from the start of training."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.process_time(), time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append((time.process_time() - self._start[0], time.perf_counter() - self._start[1]))


def environment(job: dict[str, Any]) -> Any:
    """The task's environment, the same in every process."""
    import verifiers as vf

    def digits(completion: Any, **_: Any) -> float:
        text = completion[-1]["content"] or ""
        return sum(letter.isdigit() for letter in text) / max(1, len(text))

    if job["task"] == "digits":
        rows = [{"question": f"Say {number}."} for number in range(64)]
        return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[digits]))
    return vf.load_environment(job["task"], **TASKS[job["task"]]["arguments"])


def config_of(job: dict[str, Any], run: Path, **others: Any) -> Any:
    from verifiers_trainer.settings.config import RLConfig

    sizes = TASKS[job["task"]]["settings"]
    return RLConfig(
        output_dir=str(run), seed=job["seed"], max_steps=job["steps"], batch_size=sizes["batch_size"],
        rollouts_per_example=sizes["siblings"], max_tokens=sizes["max_tokens"], max_seq_len=sizes["max_seq_len"],
        learning_rate=sizes["learning_rate"], use_lora=False, use_cpu=True, inference="embedded", save_strategy="no",
        **others,
    )  # fmt: skip


def warm(job: dict[str, Any], run: Path) -> dict[str, Any]:
    """Fine-tune a new model on the format of an answer, as ``vf-train quickstart`` does, and save it."""
    from verifiers_trainer.policy.builtin_models import TINY
    from verifiers_trainer.policy.loading import get_model_and_tokenizer
    from verifiers_trainer.trainer import RLTrainer

    env, settings = environment(job), TASKS[job["task"]]["warm_up"]
    model, tokenizer = get_model_and_tokenizer(TINY, model_kwargs={"seed": job["seed"]})
    outcome = {}
    if settings:
        with RLTrainer(model, env, config_of(job, run), tokenizer) as trainer:
            outcome = train_on_answers(trainer, answer_environment(job["task"], env), settings)
    model.save_pretrained(Path(job["folder"]) / "model")
    tokenizer.save_pretrained(Path(job["folder"]) / "model")
    return outcome


def train_on_answers(trainer: Any, answer_env: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Run supervised steps until the sampled reward reaches the target."""
    from verifiers_trainer.policy.warmup import warm_up
    from verifiers_trainer.run.evaluation import play

    rows = [example.row for example in trainer.env.train_table[:64]]
    rewards = [0.0]

    def reward() -> float:
        rewards.append(play(trainer, inputs=rows).metadata["avg_reward"])
        return rewards[-1]

    def log(step: int, loss: float, outcome: float | None) -> None:
        if outcome is not None:
            print(f"step {step}, loss {loss:.2f}, reward {outcome:.2f}", file=sys.stderr, flush=True)

    steps = warm_up(
        trainer.model, trainer.tokenizer, answer_env, reward=reward, probe_every=5, seed=trainer.args.seed, on_step=log,
        **settings,
    )  # fmt: skip
    return {"steps": steps, "reward": rewards[-1]}


def answer_environment(task: str, env: Any) -> Any:
    """An environment of rows with answers, and a parser of their format, for the warm-up."""
    import verifiers as vf

    if task == "reverse-text":
        return env
    tag = "alphabetical_sorted"
    rows = [
        {"prompt": row["prompt"], "answer": "\n" + row["answer"] + "\n"} for row in (e.row for e in env.train_table)
    ]
    return vf.SingleTurnEnv(dataset=rows, parser=vf.XMLParser([tag], answer_field=tag), rubric=vf.Rubric())


def ours(job: dict[str, Any], run: Path) -> dict[str, Any]:
    """``RLTrainer`` with its defaults: one step off-policy, groups of zero reward variance replaced."""
    from verifiers_trainer.policy.loading import get_model_and_tokenizer
    from verifiers_trainer.run.metrics_files import METRICS, read_metrics
    from verifiers_trainer.trainer import RLTrainer

    model, tokenizer = get_model_and_tokenizer(str(Path(job["folder"]) / "model"))
    curve, config = Curve(), config_of(job, run, **job.get("ours", {}))
    with RLTrainer(model, environment(job), config, tokenizer, callbacks=[curve]) as trainer:
        trainer.train()
    steps = [row for row in read_metrics(run / METRICS) if "reward/mean" in row]
    return {
        "reward": [row["reward/mean"] for row in steps],
        "sampled": [row["tokens/completion"] for row in steps],
        "trained": [row["tokens/trained"] for row in steps],
        "seconds": curve.seconds,
    }


def trl(job: dict[str, Any], run: Path) -> dict[str, Any]:
    """``GRPOTrainer`` with its defaults; its rollouts come from our environment through our bridge."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from verifiers_trainer.integrations.trl import make_rollout_func, reward_from_rollout, to_dataset

    sizes, env = TASKS[job["task"]]["settings"], environment(job)
    rollout_func = make_rollout_func(env, max_seq_len=sizes["max_seq_len"])
    source = Path(job["folder"]) / "model"
    rewards: list[float] = []
    tokens: list[int] = []

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        columns = rollout_func(prompts, trainer)
        tokens.append(sum(map(sum, columns["env_mask"])))
        return columns

    def reward(vf_reward: list[float | None], **columns: Any) -> list[float | None]:
        known = [value for value in vf_reward if value is not None]
        rewards.append(sum(known) / len(known))
        return reward_from_rollout(vf_reward=vf_reward, **columns)

    config = GRPOConfig(
        output_dir=str(run), max_steps=job["steps"], per_device_train_batch_size=sizes["batch_size"],
        gradient_accumulation_steps=1, num_generations=sizes["siblings"], max_completion_length=sizes["max_tokens"],
        learning_rate=sizes["learning_rate"], lr_scheduler_type="constant", seed=job["seed"], use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    curve = Curve()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(source), reward_funcs=reward, args=config,
        train_dataset=to_dataset(env), processing_class=AutoTokenizer.from_pretrained(source), rollout_func=rollouts,
        callbacks=[curve],
    )  # fmt: skip
    trainer.train()
    rollout_func.close()
    return {"reward": rewards, "sampled": tokens, "trained": tokens, "seconds": curve.seconds}


def main() -> None:
    import torch

    trainer, job = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = {"warm": warm, "ours": ours, "trl": trl}[trainer](job, Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
