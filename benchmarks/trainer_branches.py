"""Branched groups against flat ones, at equal sampled tokens: two tasks of several turns, three seeds.

    python benchmarks/trainer_branches.py [--tokens 60000] [--seeds 3] [--quick] [--store]

The policy is a random model of one layer. *Digits*: three turns, and the reward is the share of
digits in the last answer alone, so that the first two turns are noise. *Steps*: four turns, and the
reward is the mean over the turns of the share of digits in each, so that every turn counts. A flat
group is eight rollouts; a branched group is three trees of four that leave their first rollout at
turn 2 (0 is the first). Printed: the mean reward of the last fifth of the sampled tokens, which the
environment counts as they are sampled, shared ones once, and the optimizer steps in it.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _measure import Report, options, parse

import verifiers as vf

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TURN_TOKENS = 6


def digits_in(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(1, len(text))


class Turns(vf.MultiTurnEnv):
    """Answers a turn with a letter, and counts what was sampled."""

    sampled = 0

    def env_response(self, messages: Any, state: vf.State) -> str:
        return LETTERS[len(state["trajectory"])]

    def add_trajectory_step(self, state: vf.State, step: Any) -> Any:
        self.sampled += len(step.completion_ids)
        return super().add_trajectory_step(state, step)


def answers(completion: Any) -> list[str]:
    return [m["content"] or "" for m in completion if m["role"] == "assistant"]


def last_answer(completion: Any) -> float:
    return digits_in((answers(completion) or [""])[-1])


def every_answer(completion: Any) -> float:
    shares = [digits_in(text) for text in answers(completion)]
    return sum(shares) / max(1, len(shares))


TASKS = {"digits": (3, last_answer), "steps": (4, every_answer)}


def train(task: str, is_branched: bool, seed: int, tokens: int, folder: Path) -> dict[str, float]:
    """Train until so many tokens are sampled."""
    from transformers import TrainerCallback

    from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer
    from verifiers_trainer.settings.config import RLConfig
    from verifiers_trainer.trainer import RLTrainer

    max_turns, reward = TASKS[task]
    log: list[tuple[int, float]] = []

    def noted(completion: Any) -> float:
        value = reward(completion)
        log.append((env.sampled, value))
        return value

    env = Turns(
        dataset=[{"question": letter * 3} for letter in LETTERS],
        max_turns=max_turns,
        rubric=vf.Rubric(funcs=[noted]),
        branching=vf.Branching(at=2, branches=4) if is_branched else None,
    )
    group = 12 if is_branched else 8
    config = RLConfig(
        output_dir=str(folder),
        batch_size=4 * group,
        rollouts_per_example=group,
        micro_batch_size=group,
        max_seq_len=128,
        max_tokens=TURN_TOKENS,
        max_steps=100_000,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_lora=False,
        save_strategy="no",
        log_completions=False,
        inference="embedded",
        disable_tqdm=True,
        seed=seed,
        use_cpu=True,
        zero_variance="keep",
    )

    class Until(TrainerCallback):
        steps = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.steps += 1
            control.should_training_stop = env.sampled >= tokens

    until = Until()
    model = build_tiny_model(seed=seed, layers=1, hidden=32, heads=2)
    trainer = RLTrainer(model, env, config, build_tiny_tokenizer(), callbacks=[until])
    trainer.train()
    last = [value for sampled, value in log if 0.8 * tokens < sampled <= tokens]
    first = [value for sampled, value in log if sampled <= max(log[0][0], 0.1 * tokens)]
    return {"first": statistics.mean(first), "last": statistics.mean(last), "steps": until.steps}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parse(parser)
    if args.quick:
        args.tokens, args.seeds = 1500, 1
    args.pairs = args.seeds
    report = Report("trainer_branches", args)
    logging.disable(logging.WARNING)
    for task in list(TASKS)[: 1 if args.quick else None]:
        means = {}
        for is_branched in (False, True):
            rows = []
            for seed in range(args.seeds):
                with tempfile.TemporaryDirectory() as folder:
                    rows.append(train(task, is_branched, seed, args.tokens, Path(folder)))
            kind = "branched" if is_branched else "flat"
            means[kind] = statistics.mean(row["last"] for row in rows)
            lasts = ", ".join(f"{row['last']:.3f}" for row in rows)
            firsts = ", ".join(f"{row['first']:.3f}" for row in rows)
            steps = ", ".join(f"{row['steps']:.0f}" for row in rows)
            print(
                f"{task:8} {kind:9} reward of the last fifth {lasts} (first tenth {firsts}; steps"
                f" {steps})",
                flush=True,
            )
        share = means["flat"] / max(1e-9, means["branched"])
        report.figure(f"{task}, reward of flat over branched groups", share)
    report.close()


if __name__ == "__main__":
    main()
