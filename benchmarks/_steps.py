"""The cost of optimizer steps on recorded rollouts, for one trainer in a separate process.

    python _steps.py ours '{"folder": ..., "steps": 3, "micro_batch": 8, ...}'
    python _steps.py trl  '{...}'                           by the interpreter of TRL's environment

``folder`` holds ``model`` (with a tokenizer) and ``rollouts.json`` (``record``). Both trainers take
the same rollouts, optimizer and learning rate, sample nothing, and print one JSON line: CPU and
wall seconds of every step, from the end of one to the end of the next, the growth of resident
memory from the start of training to its peak, and the numbers of computed and of real tokens.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

LEARNING_RATE = 1e-5


class Meter(TrainerCallback):
    """Costs of the steps and tokens of the forward passes that train."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []
        self.computed = self.real = 0
        self.start_mb = 0.0

    def watch(self, model: Any) -> None:
        """Count the tokens that ``model`` is called with, while gradients are enabled."""
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        import torch

        if not torch.is_grad_enabled():
            return
        mask = keywords.get("attention_mask")
        self.computed += keywords["input_ids"].numel()
        self.real += keywords["input_ids"].numel() if mask is None else int(mask.sum())

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self.start_mb = memory_mb("VmRSS")
        self._mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._mark()

    def _mark(self) -> None:
        self.ends.append((time.process_time(), time.perf_counter()))

    def result(self) -> dict[str, Any]:
        """The numbers to print."""
        pairs = list(zip(self.ends, self.ends[1:], strict=False))
        return {
            "cpu_s": [end[0] - begin[0] for begin, end in pairs],
            "wall_s": [end[1] - begin[1] for begin, end in pairs],
            "growth_mb": memory_mb("VmHWM") - self.start_mb,
            "computed": self.computed / len(pairs),
            "real": self.real / len(pairs),
        }


def memory_mb(name: str) -> float:
    """A field of this process's memory (``VmRSS``, or ``VmHWM``, its peak) in megabytes."""
    with open("/proc/self/status") as file:
        (kilobytes,) = (line.split()[1] for line in file if line.startswith(f"{name}:"))
    return int(kilobytes) * 1024 / 1e6


def open_ours(job: dict[str, Any], run: Path, callbacks: list[TrainerCallback]) -> Any:
    """An ``RLTrainer`` whose ``get_batch`` returns the recorded groups, so that nothing is
    generated."""
    import verifiers as vf
    from verifiers.rollouts.rollout import Rollout
    from verifiers.rollouts.turn import Turn
    from verifiers_trainer.algorithm.batch import Group
    from verifiers_trainer.policy.loading import get_model_and_tokenizer
    from verifiers_trainer.settings.config import RLConfig
    from verifiers_trainer.trainer import RLTrainer

    recorded = json.loads((Path(job["folder"]) / "rollouts.json").read_text())
    model, tokenizer = get_model_and_tokenizer(str(Path(job["folder"]) / "model"))

    def record(
        prompt_ids: list[int], completion_ids: list[int], logprobs: list[float], reward: float
    ) -> Rollout:
        turn = Turn(prompt_ids, completion_ids, logprobs, version=0)  # type: ignore[arg-type]
        return Rollout((turn,), reward)

    class Recorded(RLTrainer):
        def get_batch(self, epoch: int = 0, step: int = 0) -> list[Group]:
            return [
                Group(
                    number,
                    number,
                    tuple(
                        record(rollouts["prompt_ids"], *sibling) for sibling in rollouts["siblings"]
                    ),
                )
                for number, rollouts in enumerate(recorded)
            ]

    siblings = len(recorded[0]["siblings"])
    config = RLConfig(
        output_dir=str(run), batch_size=len(recorded) * siblings, rollouts_per_example=siblings,
        micro_batch_size=job["micro_batch"], max_seq_len=job["max_seq_len"], max_steps=job["steps"],
        learning_rate=LEARNING_RATE, use_lora=job.get("lora", False), use_cpu=True, inference="embedded",
        save_strategy="no", **job.get("settings", {}),
    )  # fmt: skip
    # generates nothing
    env = vf.SingleTurnEnv(dataset=[{"question": "g"}], rubric=vf.Rubric(funcs=[lambda: 0.0]))
    return Recorded(model, env, config, tokenizer, callbacks=callbacks)


def ours(job: dict[str, Any], run: Path) -> Meter:
    """Steps of ``RLTrainer``."""
    meter = Meter()
    with open_ours(job, run, [meter]) as trainer:
        meter.watch(trainer.model)
        trainer.train()
    return meter


def trl(job: dict[str, Any], run: Path) -> Meter:
    """Steps of TRL's ``GRPOTrainer``, whose ``rollout_func`` returns the recorded ids at once."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    recorded = json.loads((Path(job["folder"]) / "rollouts.json").read_text())
    source = Path(job["folder"]) / "model"
    siblings = len(recorded[0]["siblings"])
    count = len(recorded) * siblings

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        next_sibling: dict[int, int] = {}
        columns: dict[str, list[Any]] = {
            name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "recorded")
        }
        for prompt in prompts:
            number = int(prompt)
            sibling = recorded[number]["siblings"][next_sibling.setdefault(number, 0)]
            next_sibling[number] += 1
            for name, value in zip(
                columns, (recorded[number]["prompt_ids"], *sibling), strict=True
            ):
                columns[name].append(value)
        return columns

    def reward(completions: list[Any], recorded: list[float], **_: Any) -> list[float]:
        return recorded

    micro = job["micro_batch"]
    config = GRPOConfig(
        output_dir=str(run), max_steps=job["steps"], per_device_train_batch_size=micro,
        gradient_accumulation_steps=count // micro, num_generations=siblings,
        max_completion_length=job["max_seq_len"], learning_rate=LEARNING_RATE, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    meter = Meter()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(source), reward_funcs=reward, args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(len(recorded))]}),
        processing_class=AutoTokenizer.from_pretrained(source), rollout_func=rollouts, callbacks=[meter],
    )  # fmt: skip
    meter.watch(trainer.model)
    trainer.train()
    return meter


def main() -> None:
    import torch

    os.environ["TQDM_DISABLE"] = "1"
    trainer, job = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(job["threads"])
    with tempfile.TemporaryDirectory() as folder:
        meter = {"ours": ours, "trl": trl}[trainer](job, Path(folder))
    print(json.dumps(meter.result()))


if __name__ == "__main__":
    main()
