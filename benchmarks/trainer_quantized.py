"""LoRA on a base in four bits beside LoRA on the same base in full: what a real model learns, and
the memory of the base.

    python benchmarks/trainer_quantized.py [--seeds 3] [--steps 24] [--keep FOLDER] [--quick] [--store]

SmolLM2-135M-Instruct learns to reply to the sum of two digits with the number alone, in float32,
with `quantize = "nf4"` and without, from the same seeds, one process after another: the mean reward
of replies to all 100 sums, sampled, before and after. Bytes are those of the parameters and of what their four
bits need beside them. `--pairs` is not used.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _measure import Report, options, parse, print_table, result_of_job, versions

BASES = {"full": None, "nf4": "nf4"}
INSTRUCTION = "Reply with the number alone."


def train(job: dict[str, Any]) -> dict[str, Any]:
    """One training: the reward before and after, and the bytes of the base."""
    import torch

    import verifiers as vf

    torch.set_num_threads(1)

    def is_sum(completion: Any, answer: str, **_: Any) -> float:
        """A half for the share of the reply that is digits, a half for the right first number."""
        reply = "".join(completion[-1]["content"].split())
        digits = sum(character.isdigit() for character in reply) / max(1, len(reply))
        numbers = re.findall(r"\d+", completion[-1]["content"])
        return digits / 2 + (numbers[:1] == [answer]) / 2

    sums = [
        {"question": f"What is {a} + {b}?", "answer": str(a + b)}
        for a in range(10)
        for b in range(10)
    ]
    env = vf.SingleTurnEnv(
        dataset=sums,
        eval_dataset=sums[: job["evaluated"]],
        system_prompt=INSTRUCTION,
        rubric=vf.Rubric([is_sum]),
    )
    config = vf.RLConfig(
        output_dir=job["folder"],
        recipe="best_of_group",
        batch_size=64,
        rollouts_per_example=8,
        updates_per_batch=4,
        max_steps=job["steps"],
        max_tokens=8,
        max_seq_len=96,
        learning_rate=5e-4,
        lora_rank=16,
        quantize=job["quantize"],
        seed=job["seed"],
        eval_strategy="steps",
        eval_steps=job["steps"],
        eval_on_start=True,
        eval_num_examples=job["evaluated"],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = vf.RLTrainer("builtin:smollm2-135m", env, config)
    base = [p for name, p in trainer.model.named_parameters() if "lora_" not in name]
    scales = [p.quant_state.as_dict(packed=True) for p in base if hasattr(p, "quant_state")]
    tensors = [*base, *(tensor for state in scales for tensor in state.values())]
    trainer.train()
    lines = trainer.history.rows
    rewards = [line["eval_reward"] for line in lines if line.get("eval_reward") is not None]
    steps = [line for line in lines if "loss" in line]
    return {
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        "before": rewards[0],
        "after": rewards[-1],
        "gap": max(line["sampler/log_ratio_abs"] or 0.0 for line in steps),
        "train_s": sum(line["time/train"] for line in steps),
        "curve": [line["reward/mean"] for line in steps if line["batch/step"] == 1],
    }


def result_of(folder: Path, base: str, seed: int, args: Any) -> dict[str, Any]:
    """The result of one training in a process of its own, kept in ``folder``."""
    job = {
        "folder": str(folder / f"{base}-{seed}"),
        "quantize": BASES[base],
        "seed": seed,
        "steps": args.steps,
        "evaluated": 4 if args.quick else 100,
    }
    return result_of_job(__file__, job, folder / f"{base}-{seed}.json")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps, eight to a batch")
    parser.add_argument("--keep", type=Path, help="a folder for the results, which are reused")
    parser.add_argument("--job", type=json.loads, help="one training, as the script starts it")
    args = parse(parser)
    if args.job:
        print(json.dumps(train(args.job)))
        return
    if args.quick:
        args.seeds, args.steps = 1, 4
    args.pairs = args.seeds
    report = Report("trainer_quantized", args)
    print(versions("bitsandbytes", "peft", "torch"), "load", round(os.getloadavg()[0], 1))
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        results = {
            (base, seed): result_of(folder, base, seed, args)
            for seed in range(args.seeds)
            for base in BASES
        }
    header = ["base", "seed", "before", "after", "|log π - log μ|", "s of training"]
    rows = [
        [base, f"{seed}", f"{r['before']:.2f}", f"{r['after']:.2f}", f"{r['gap']:.1e}",
         f"{r['train_s']:.0f}"]
        for (base, seed), r in results.items()
    ]  # fmt: skip
    print_table(f"reward, {args.steps} updates", header, rows)

    def mean(base: str, value: str) -> float:
        return statistics.fmean(results[base, seed][value] for seed in range(args.seeds))

    report.figure(
        "reward lost by nf4 after training", mean("full", "after") - mean("nf4", "after"), ""
    )
    report.figure(
        "bytes of nf4 over float32", mean("nf4", "bytes") / mean("full", "bytes"), to_reach=0.35
    )
    report.close()


if __name__ == "__main__":
    main()
