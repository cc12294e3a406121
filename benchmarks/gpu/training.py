"""A GRPO run of SmolLM2-135M (or a ``--shape``) on one GPU, engine and trainer in one process, beside TRL: time,
tokens/s, MFU, memory.

    python benchmarks/gpu/training.py [--steps 8] [--lora] [--compile] [--profile]
                                      [--cache FOLDER | --trl-python PYTHON] [--no-trl]
    python benchmarks/gpu/training.py --cpu --tiny          checks that it works

Both train the same checkpoint on the same questions with the same numbers of rollouts and tokens,
rewards for digits, and generate their rollouts: TRL 1.16.0 with transformers' ``generate``, in a
separate environment created in ``--cache``. The first two steps warm up and are not counted;
``warm-up`` says how much longer than later steps they took (with ``--compile``, the seconds of
compiling). One
step is generation, scoring, backward and optimizer; ours is also shown without waiting for
generation (``train``). MFU is 6 operations per parameter and trained token (the prompt's included)
over the time of ``train`` and the device's dense bf16 peak. ``--profile`` adds the kernels of the
last step's training by their own time: which attention ran, and in which precision.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from _device import device, formatted, options, peak_flops, peak_memory_gb, policy, synchronize
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

TRL = ["trl==1.16.0", "datasets", "accelerate"]
WARM_UP = 2


def questions(count: int) -> list[str]:
    return [
        f"Write down the first {10 + number % 40} numbers and say something about each."
        for number in range(count)
    ]


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of both contenders."""
    small = {"batch_size": 8, "rollouts_per_example": 4, "max_tokens": 16}
    full = {"batch_size": 64, "rollouts_per_example": 8, "max_tokens": 512}
    return {
        **(small if args.tiny else full),
        "steps": args.steps,
        "cpu": args.cpu,
        "gradient_checkpointing": args.gradient_checkpointing,
        "questions": questions(64),
    }


class Profiler(TrainerCallback):
    """Profiles the training of one step, whose rollouts are there when ``on_step_begin`` comes."""

    def __init__(self, where: torch.device, step: int):
        device = [ProfilerActivity.CUDA] if where.type == "cuda" else []
        self.profile, self.step = profile(activities=[ProfilerActivity.CPU, *device]), step
        self.where = where

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step - 1:
            synchronize(self.where)
            self.profile.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            synchronize(self.where)
            self.profile.stop()
            column = f"self_{self.where.type}_time_total"
            table = self.profile.key_averages().table(sort_by=column, row_limit=15)
            print(table, flush=True)


def ours(args: argparse.Namespace, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Steps of ``RLTrainer``; the model is saved to ``folder``/model for the other contender."""
    import verifiers as vf
    from verifiers_trainer.run.metrics_files import METRICS, read_metrics
    from verifiers_trainer.settings.config import RLConfig
    from verifiers_trainer.trainer import RLTrainer

    def digits(completion: Any, **_: Any) -> float:
        text = completion[-1]["content"] or ""
        return sum(c.isdigit() for c in text) / max(1, len(text))

    where = device(args)
    model, tokenizer = policy(args, where)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    env = vf.SingleTurnEnv(
        dataset=[{"question": question} for question in job["questions"]],
        rubric=vf.Rubric(funcs=[digits]),
    )
    config = RLConfig(
        output_dir=str(folder / "run"), batch_size=job["batch_size"], micro_batch_size=job["batch_size"],
        rollouts_per_example=job["rollouts_per_example"], max_tokens=job["max_tokens"], max_steps=job["steps"],
        max_seq_len=job["max_tokens"] + 128, learning_rate=1e-6, use_lora=args.lora, inference="embedded",
        gradient_checkpointing=job["gradient_checkpointing"], save_strategy="no", log_completions=False,
        use_cpu=args.cpu, zero_variance="keep", torch_compile=args.compile,
    )  # fmt: skip
    profiler = Profiler(where, job["steps"] if args.profile else 0)
    with RLTrainer(model, env, config, tokenizer, callbacks=[profiler]) as trainer:
        trainer.train()
    steps = read_metrics(folder / "run" / METRICS)
    all_steps = [step for step in steps if "time/step" in step]
    measured_steps = all_steps[WARM_UP:]
    computed = [step["tokens/prompt"] + step["tokens/completion"] for step in measured_steps]
    rates = [
        6 * num_parameters * n / step["time/train"]
        for n, step in zip(computed, measured_steps, strict=True)
    ]
    peak = peak_flops(where)
    train_s = statistics.median(step["time/train"] for step in measured_steps)
    return {
        "step_s": statistics.median(step["time/step"] for step in measured_steps),
        "train_s": train_s,
        "warm_up_s": sum(step["time/train"] - train_s for step in all_steps[:WARM_UP]),
        "pause_s": statistics.median(step["time/pause"] for step in measured_steps),
        "tokens_per_s": statistics.median(
            step["tokens/completion"] / step["time/step"] for step in measured_steps
        ),
        "flops": statistics.median(rates),
        "mfu": None if peak is None else statistics.median(rates) / peak,
        "memory_gb": peak_memory_gb(where),
    }


def theirs(python: Path, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run TRL's steps by ``_trl.py``."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    process = subprocess.run(
        [str(python), str(Path(__file__).with_name("_trl.py")), json.dumps({**job, "model": str(folder / "model")})],
        capture_output=True, text=True, env=environment | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if process.returncode:
        raise SystemExit(f"TRL failed:\n{process.stderr[-3000:]}")
    output = json.loads(process.stdout.splitlines()[-1])
    steps = list(zip(output["step_s"], output["tokens"], strict=False))[WARM_UP:]
    return {
        "step_s": statistics.median(seconds for seconds, _ in steps),
        "tokens_per_s": statistics.median(tokens / seconds for seconds, tokens in steps),
        "memory_gb": output["memory_gb"],
    }


def trl_python(cache: Path) -> Path:
    """The interpreter of TRL's environment in ``cache``, created when it does not exist."""
    python = cache / "trl-1.16.0" / "bin" / "python"
    if not python.exists():
        subprocess.run(
            ["uv", "venv", "--quiet", "--python", "3.11", str(python.parents[1])], check=True
        )
        torch_version = f"torch=={torch.__version__.split('+')[0]}"
        subprocess.run(
            ["uv", "pip", "install", "--quiet", "--python", str(python), torch_version, *TRL],
            check=True,
        )
    return python


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--lora", action="store_true", help="train an adapter; TRL always trains all weights"
    )
    parser.add_argument("--compile", action="store_true", help="compile our layers")
    parser.add_argument("--profile", action="store_true", help="show the last step's kernels")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "verifiers-benchmarks"
    )
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL installed")
    parser.add_argument("--no-trl", action="store_true")
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} that warm up")
    job = plan(args)
    with tempfile.TemporaryDirectory() as temporary:
        results = {"ours": ours(args, job, Path(temporary))}
        if not args.no_trl:
            results["trl"] = theirs(args.trl_python or trl_python(args.cache), job, Path(temporary))
    shape = f"{job['batch_size']} rollouts of at most {job['max_tokens']} tokens"
    where = torch.cuda.get_device_name() if not args.cpu else "CPU: the numbers mean nothing"
    print(f"{shape}, {args.steps - WARM_UP} steps, {where}")
    for name, result in results.items():
        print(
            f"  {name:5}  step {result['step_s']:.3f} s  train"
            f" {formatted(result.get('train_s'), '.3f')} s  warm-up"
            f" {formatted(result.get('warm_up_s'), '.1f')} s  pause"
            f" {formatted(result.get('pause_s'), '.4f')} s  {result['tokens_per_s']:.0f} tokens/s "
            f" {formatted(result.get('flops'), '.3g')} flop/s  MFU"
            f" {formatted(result.get('mfu'), '.1%')}  memory"
            f" {formatted(result['memory_gb'], '.2f')} GB"
        )
    if "trl" in results:
        print(f"  step time over TRL's: {results['ours']['step_s'] / results['trl']['step_s']:.2f}")


if __name__ == "__main__":
    main()
