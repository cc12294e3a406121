"""Train a small model by reinforcement learning and look at its curve.

What you learn: ``RLTrainer`` from Python: settings, evaluation before and after, the history of the
run. A model of half a million parameters with random weights learns to write vowels, in seconds.
Costs about 20 seconds on one core.

    python examples/train.py
"""

import argparse
import tempfile

import verifiers as vf


def vowels(completion) -> float:
    """The share of vowels in the answer."""
    text = completion[-1].content
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


def main(steps: int = 15) -> tuple[float, float]:
    env = vf.SingleTurnEnv(
        dataset=[{"question": f"Say something, number {n}."} for n in range(64)],
        rubric=vf.Rubric(funcs=[vowels]),
    )
    with tempfile.TemporaryDirectory() as folder:
        config = vf.RLConfig(
            run_name="vowels",
            output_dir=folder,
            batch_size=64,
            rollouts_per_example=8,
            max_steps=steps,
            max_tokens=8,
            max_seq_len=64,
            learning_rate=3e-3,
            use_lora=False,
        )
        with vf.RLTrainer("builtin:tiny", env, config) as trainer:
            before = trainer.evaluate(num_examples=16)["eval_reward"]
            trainer.train()
            after = trainer.evaluate(num_examples=16)["eval_reward"]
            for row in trainer.history.rows:
                if "reward/mean" in row:
                    reward = row["reward/mean"]
                    print(f"step {row['step']:3}  reward {reward:.3f}  {'#' * int(40 * reward)}")
    print(f"evaluation: {before:.3f} -> {after:.3f}")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=15)
    main(parser.parse_args().steps)
