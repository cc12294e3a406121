"""Train in two processes: rank 0 generates, both train. Runs on a CPU, without a network, in about
a minute.

    accelerate launch --config_file configs/accelerate/cpu2.yaml examples/train_two_ranks.py
    outputs/two-ranks

The same command resumes a stopped run, also after kill -9; with `deterministic=True` the final
weights are the same, bit for bit. With `--config_file configs/fsdp2.yaml --num_processes 2` each
process holds half of the model. On GPUs omit the config file, or use fsdp2.yaml: accelerate launch
--num_processes N examples/train_two_ranks.py.
"""

import hashlib
import sys
from pathlib import Path

import torch

import verifiers as vf

STEPS = 12


def letters(completion, answer, **_):
    """Fraction of the completion's characters that occur in the answer: nonzero for an untrained
    model."""
    text = completion[-1]["content"] or ""
    return sum(character in answer for character in text) / max(1, len(text))


def main(folder: str, steps: int = STEPS) -> None:
    torch.set_num_threads(1)
    env = vf.load_environment("reverse-text", unit="word", min_chars=3, max_chars=4)
    env.rubric.add_reward_func(letters)
    config = vf.RLConfig(
        output_dir=folder,
        batch_size=32,
        rollouts_per_example=8,
        micro_batch_size=8,
        max_seq_len=256,
        max_tokens=24,
        max_steps=steps,
        learning_rate=1e-3,
        use_lora=False,
        save_steps=2,
        log_completions=False,
        deterministic=True,
    )
    trainer = vf.RLTrainer("builtin:tiny", env, config)
    trainer.train(
        resume_from_checkpoint=bool(list(Path(folder).glob("checkpoint-*/MANIFEST.json")))
    )
    if trainer.is_world_process_zero():
        weights = b"".join(
            parameter.detach().numpy().tobytes() for parameter in trainer.whole_model.parameters()
        )
        digest = hashlib.sha256(weights).hexdigest()
        summary = (
            f"step {trainer.state.global_step}, {trainer.args.world_size} processes, weights"
            f" {digest}"
        )
        print(summary)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "outputs/two-ranks", *map(int, sys.argv[2:3]))
