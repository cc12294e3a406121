"""P7 and P8: time, memory and wasted tokens of an optimizer step, against TRL on the same rollouts.

    python benchmarks/trainer_step.py [--hidden 256] [--rollouts 64] [--mean 96] [--micro-batch 8]
    [--cache FOLDER]
                                      [--quick] [--pairs 5] [--store]

A model of four layers and a vocabulary of 32,000 gets recorded rollouts with completions of
log-normal length; nothing is generated. Ours gets them from ``get_batch``, TRL 1.16.0 from its
``rollout_func``. Each runs alone in a separate process with one thread, AdamW in float32, the same
micro batch (8 is the default of both), no gradient checkpointing (off by default here, on in TRL,
where it costs another forward pass), and otherwise their defaults. A pair is one process of each; a
step lasts from the end of one to the end of the next; the first is not counted.

The figures are ours over TRL's: CPU time of a step, and the growth of resident memory from the
start of training to its peak. Computed over real tokens is 1 where nothing is padded. TRL is
installed under ``--cache`` on first use (``~/.cache/verifiers-benchmarks``; some minutes, for
torch); ``--quick`` skips it where it is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _measure import Report, options, parse, print_table, versions
from _peers import TRL, child_environment, interpreter, is_installed
from peers import CACHE

LAYERS, VOCABULARY, SIBLINGS, PROMPT = 4, 32_000, 8, 24
MAX_TOKENS = 512
SIGMA = 0.8
TIME, MEMORY, PADDED = 0.7, 0.5, 1 / 0.95


def record(folder: Path, hidden: int, num_rollouts: int, mean: int) -> int:
    """Write the model and random rollouts with the model's log-probabilities; return the number of
    tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
    from verifiers_trainer.policy.logprobs import install_logprob_forward

    torch.manual_seed(0)
    tokenizer = build_tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, head_dim=64,
        max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    install_logprob_forward(model.eval())
    rng, groups, total = random.Random(0), [], 0
    for _ in range(num_rollouts // SIBLINGS):
        prompt = [rng.randrange(200, VOCABULARY) for _ in range(PROMPT)]
        siblings = []
        for _ in range(SIBLINGS):
            length = min(
                MAX_TOKENS, max(2, round(mean * rng.lognormvariate(-(SIGMA**2) / 2, SIGMA)))
            )
            completion = [rng.randrange(200, VOCABULARY) for _ in range(length - 1)] + [
                tokenizer.eos_token_id
            ]
            with torch.no_grad():
                logprobs = model(input_ids=torch.tensor([prompt + completion])).logprobs[PROMPT:]
            siblings.append((completion, logprobs.tolist(), round(rng.random(), 3)))
            total += PROMPT + length
        groups.append({"prompt_ids": prompt, "siblings": siblings})
    (folder / "rollouts.json").write_text(json.dumps(groups))
    return total


def steps_of(trainer: str, python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """The result of a separate process: medians of the steps after the first."""
    process = subprocess.run(
        [str(python), str(Path(__file__).with_name("_steps.py")), trainer, json.dumps(job)],
        env=child_environment() | {"OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise RuntimeError(f"{trainer} failed:\n{process.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result | {name: statistics.median(result[name][1:]) for name in ("cpu_s", "wall_s")}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--hidden", type=int, default=None, help="width of the model; 256, with --quick 64"
    )
    parser.add_argument("--rollouts", type=int, default=None, help="of a step; 64, with --quick 16")
    parser.add_argument(
        "--mean", type=int, default=None, help="tokens of a completion; 96, with --quick 12"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=8, help="rollouts that TRL computes together"
    )
    parser.add_argument("--steps", type=int, default=None, help="measured steps; 3, with --quick 1")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help=f"folder of TRL's environment; {CACHE}"
    )
    args = parse(parser)
    report = Report("trainer_step", args)
    pythons = {"ours": Path(sys.executable)}
    if args.quick and not is_installed(TRL, args.cache):
        print(f"{TRL}: not installed in {args.cache}, left out")
    else:
        pythons["trl"] = interpreter(TRL, args.cache)
    print(
        versions("verifiers-trainer", "torch", "transformers"),
        TRL,
        "load",
        round(os.getloadavg()[0], 1),
    )
    with tempfile.TemporaryDirectory() as folder:
        measure(args, pythons, Path(folder), report)
    report.close()


def measure(
    args: argparse.Namespace, pythons: dict[str, Path], folder: Path, report: Report
) -> None:
    hidden = args.hidden or (64 if args.quick else 256)
    count = args.rollouts or (16 if args.quick else 64)
    tokens = record(folder, hidden, count, args.mean or (12 if args.quick else 96))
    job = {
        "folder": str(folder), "steps": 1 + (args.steps or (1 if args.quick else 3)), "threads": 1,
        "micro_batch": args.micro_batch, "max_seq_len": MAX_TOKENS + 64,
    }  # fmt: skip
    rounds = [
        {name: steps_of(name, python, job) for name, python in pythons.items()}
        for _ in range(args.pairs)
    ]
    rows = []
    for trainer in pythons:
        results = [result[trainer] for result in rounds]
        numbers = [
            statistics.median(result[name] for result in results)
            for name in ("cpu_s", "wall_s", "growth_mb")
        ]
        waste = rounds[0][trainer]["computed"] / rounds[0][trainer]["real"]
        rows.append([trainer, *(f"{number:.2f}" for number in numbers), f"{waste:.2f}"])
    title = f"{count} rollouts, {tokens} tokens, {LAYERS} layers of {hidden}, {args.pairs} pairs"
    print_table(title, ["", "CPU s/step", "wall s/step", "memory MB", "computed/real"], rows)
    if "trl" in pythons:

        def over(name: str) -> float:
            return statistics.median(
                result["ours"][name] / result["trl"][name] for result in rounds
            )

        report.figure("P7: step, CPU time over TRL's", over("cpu_s"), to_reach=TIME)
        report.figure("P7: step, wall time over TRL's", over("wall_s"))
        report.figure("P7: growth of the memory over TRL's", over("growth_mb"), to_reach=MEMORY)
        report.figure(
            "P8: TRL, computed over real tokens",
            rounds[0]["trl"]["computed"] / rounds[0]["trl"]["real"],
        )
    ours = rounds[0]["ours"]
    report.figure("P8: computed over real tokens", ours["computed"] / ours["real"], to_reach=PADDED)


if __name__ == "__main__":
    main()
