"""The policy as its own teacher, which reads the right answer, against GRPO at equal sampled tokens.

    python benchmarks/trainer_privileged.py [--tasks words sums] [--seeds 0 1 2] [--tokens 20000]
                                            [--methods grpo grpo_8 synced live] [--keep FOLDER]
                                            [--quick] [--store]

*words*: write four letters backwards; *sums*: add a number below 100 and a digit. A reply is right
or wrong, 1 or 0. The policy is a random model of two layers, which knows neither the tasks nor how
to read a hint, so all methods start from one warm model: it has learned to repeat what stands at
the end of a prompt (any answer, not that of the question), and then imitated answers to plain
prompts, beside such, until it has some of them right. Then ``grpo`` learns from rewards; ``synced``
and ``live`` from the policy with the answer at the end of its prompt (``loss="gkd"``,
``teacher="self"``), as a copy that follows it slowly, and with the weights of the moment. Each
trains until it has sampled so many tokens, in batches of 64 rollouts of 16 examples.

Printed: the share of right replies to held-out examples, sampled eight times each without a hint,
before and after; with it, before; tokens, steps, and CPU seconds of each run. One thread, one run
at a time.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from _measure import Report, options, parse

WARM = {"words": 0.25, "sums": 0.25}
"""Share of right replies at which the warm-up of a task ends."""
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"loss": "grpo", "learning_rate": 1e-3},
    "grpo_8": {"loss": "grpo", "learning_rate": 3e-4, "rollouts_per_example": 8},
    "synced": {
        **{"loss": "gkd", "teacher": "self", "learning_rate": 1e-3},
        **{"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.02},
    },
    "live": {"loss": "gkd", "teacher": "self", "learning_rate": 3e-4, "collapse": "warn"},
}
NUM_HELD_OUT = 100


def answer_at_the_end(row: Any) -> str:
    """The teacher's context."""
    return str(row["answer"])


def rows_of(task: str) -> list[dict[str, str]]:
    """All examples, the same order in every process."""
    if task == "words":
        letters = "abcdefghij"
        words = ["".join(word) for word in itertools.product(letters, repeat=4)][::7]
        rows = [{"question": word, "answer": word[::-1]} for word in words]
    else:
        rows = [
            {"question": f"{a}+{b}", "answer": str(a + b)} for a in range(100) for b in range(10)
        ]
    random.Random(0).shuffle(rows)
    return rows


def exact(completion: Any, answer: str, **_: Any) -> float:
    return float(completion[-1]["content"] == answer)


def environment(task: str) -> Any:
    import verifiers as vf

    rows = rows_of(task)
    return vf.SingleTurnEnv(
        dataset=rows[NUM_HELD_OUT:],
        eval_dataset=rows[:NUM_HELD_OUT],
        rubric=vf.Rubric([exact]),
    )


def hinted(row: Any, answer: str | None = None) -> Any:
    """The row with its answer, or another, where the trainer puts the hint."""
    from verifiers_trainer.pipeline.teacher_context import with_context

    row = row if answer is None else {**row, "answer": answer}
    return {**row, "prompt": with_context(row["prompt"], answer_at_the_end(row))}


def right(trainer: Any, task: str, rows: Any, times: int) -> float:
    """Share of right answers to the rows, sampled."""
    context = trainer.run_context()
    results = trainer.env.generate_sync(
        [row for row in rows for _ in range(times)],
        client=context.client,
        model=context.model,
        sampling_args=context.sampling_args,
        max_concurrent=1024,
        seed=1_000_003,
    )
    values = results["metrics"]["exact"]
    return sum(value == 1 for value in values) / len(values)


def config_of(folder: Path, seed: int, **settings: Any) -> Any:
    from verifiers_trainer.settings.config import RLConfig

    return RLConfig(
        **{
            "output_dir": str(folder),
            "seed": seed,
            "batch_size": 64,
            "rollouts_per_example": 4,
            "micro_batch_size": 32,
            "max_tokens": 6,
            "max_seq_len": 64,
            "max_steps": 10_000,
            "use_lora": False,
            "use_cpu": True,
            "inference": "embedded",
            "save_strategy": "no",
            "log_completions": False,
            "disable_tqdm": True,
            **settings,
        }
    )


def warm(task: str, seed: int, folder: Path, max_steps: int) -> dict[str, Any]:
    """A model that reads hints, and has some answers right without; saved to ``folder``."""
    import verifiers as vf
    from verifiers_trainer.pipeline.warmup import warm_up
    from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer
    from verifiers_trainer.trainer import RLTrainer

    env = environment(task)
    train = [example.row for example in env.train_table]
    rows = [example.row for example in env.eval_table]
    rng = random.Random(seed)
    any_answer = [hinted(row, rng.choice(train)["answer"]) for row in train * 3]

    def imitated(table: list[Any]) -> Any:
        rng.shuffle(table)
        return vf.SingleTurnEnv(dataset=[{k: r[k] for k in ("prompt", "answer")} for r in table])

    tokenizer = build_tiny_tokenizer()
    model = build_tiny_model(seed=seed, layers=2, hidden=64, heads=4)

    def note(step: int, loss: float, value: float | None) -> None:
        if value is not None:
            print(f"  step {step} loss {loss:.3f} right {value:.2f}", flush=True)

    phases = [
        (any_answer, 0.97, [*map(hinted, rows)]),
        ([*any_answer, *train * 3], WARM[task], rows),
    ]
    steps = []
    with RLTrainer(model, env, config_of(folder / "warm", seed), tokenizer) as trainer:
        for table, target, asked in phases:
            steps.append(
                warm_up(
                    trainer.model,
                    tokenizer,
                    imitated(table),
                    answers=lambda row: row["answer"],
                    reward=lambda asked=asked: right(trainer, task, asked, 1),
                    target=target,
                    max_steps=max_steps,
                    probe_every=10,
                    learning_rate=2e-3,
                    seed=seed,
                    on_step=note,
                )
            )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {"steps": steps}


def train(
    task: str, seed: int, method: str, tokens: int, folder: Path, **further: Any
) -> dict[str, Any]:
    """Train the warm model until so many tokens are sampled."""
    from transformers import TrainerCallback

    from verifiers_trainer.policy.loading import get_model_and_tokenizer
    from verifiers_trainer.trainer import RLTrainer

    class Until(TrainerCallback):
        sampled, steps = 0, 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.sampled += trainer.last_step["tokens/completion"]
            self.steps += 1
            control.should_training_stop = self.sampled >= tokens

    until, env = Until(), environment(task)
    model, tokenizer = get_model_and_tokenizer(str(folder / "model"))
    settings = {**METHODS[method], **further}
    if "teacher" in settings:
        settings["teacher_context"] = answer_at_the_end
    started = time.process_time()
    with tempfile.TemporaryDirectory() as run:
        trainer = RLTrainer(
            model, env, config_of(Path(run), seed, **settings), tokenizer, callbacks=[until]
        )
        with trainer:
            rows = [example.row for example in env.eval_table]
            before, with_hint = (
                right(trainer, task, rows, 8),
                right(trainer, task, [*map(hinted, rows)], 8),
            )
            trainer.train()
            after = right(trainer, task, rows, 8)
            last = trainer.last_step
    return {
        "before": before,
        "with_hint": with_hint,
        "after": after,
        "tokens": until.sampled,
        "steps": until.steps,
        "entropy": last["entropy"],
        "cpu_s": time.process_time() - started,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=WARM, default=list(WARM))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--keep", type=Path, help="a folder for the warm models, which are reused")
    args = parse(parser)
    further = {}
    if args.quick:  # of a model that knows nothing no rewards differ
        further = {"zero_variance": "keep"}
        args.tasks, args.seeds, args.tokens = args.tasks[:1], args.seeds[:1], 300
    args.pairs = len(args.seeds)
    report = Report("trainer_privileged", args)
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        for task in args.tasks:
            wrong: dict[str, list[float]] = {}
            for seed in args.seeds:
                folder = (args.keep or Path(temporary)) / f"{task}-{seed}"
                if not (folder / "model").exists():
                    steps = warm(task, seed, folder, 10 if args.quick else 2000)
                    print(f"{task} {seed} warm {json.dumps(steps)}", flush=True)
                for method in args.methods:
                    result = train(task, seed, method, args.tokens, folder, **further)
                    wrong.setdefault(method, []).append(1 - result["after"])
                    shown = {name: round(value, 3) for name, value in result.items()}
                    print(f"{task} {seed} {method} {json.dumps(shown)}", flush=True)
            if {"synced", "grpo"} <= wrong.keys():
                share = sum(wrong["synced"]) / max(1e-9, sum(wrong["grpo"]))
                report.figure(f"{task}, wrong replies of synced over grpo", share, to_reach=1.0)
    report.close()


if __name__ == "__main__":
    main()
