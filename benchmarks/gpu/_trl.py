"""TRL's ``GRPOTrainer`` on the task of ``training.py``, run by the interpreter of TRL's
environment.

    python _trl.py '{"model": FOLDER, "steps": 8, ...}'

Prints one JSON line: seconds and tokens of every step, peak memory. It imports nothing of this
project.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    """The time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def main() -> None:
    job = json.loads(sys.argv[1])
    tokens: list[int] = []

    def digits(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        texts = [completion[-1]["content"] for completion in completions]
        return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in texts]

    dtype = torch.float32 if job["cpu"] else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    prompts = [[{"role": "user", "content": question}] for question in job["questions"]]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=job["steps"], per_device_train_batch_size=job["batch_size"],
            gradient_accumulation_steps=1, num_generations=job["rollouts_per_example"],
            max_completion_length=job["max_tokens"], learning_rate=1e-6, beta=0.0, bf16=not job["cpu"],
            use_cpu=job["cpu"], gradient_checkpointing=job["gradient_checkpointing"], report_to="none",
            save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        times = StepTimes()
        trainer = GRPOTrainer(
            model=model, reward_funcs=digits, args=config, train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=AutoTokenizer.from_pretrained(job["model"]), callbacks=[times],
        )  # fmt: skip
        trainer.train()
    seconds = [end - begin for begin, end in zip(times.ends, times.ends[1:], strict=False)]
    memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
    print(json.dumps({"step_s": seconds, "tokens": tokens[: len(seconds)], "memory_gb": memory}))


if __name__ == "__main__":
    main()
