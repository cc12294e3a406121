"""A GRPO run of SmolLM2-135M on one GPU, engine and trainer in one process, beside TRL: time, tokens/s, MFU,
memory.

    python benchmarks/gpu/training.py [--steps 8] [--lora] [--cache FOLDER | --trl-python PYTHON] [--no-trl]
    python benchmarks/gpu/training.py --cpu --tiny          shows that it works

Both train the same checkpoint on the same questions with the same numbers of rollouts and tokens, rewards for digits,
and generate by themselves: TRL 1.16.0 with transformers' ``generate``, in an environment of its own that is made in
``--cache``. The first two steps warm up and do not count. One step is generation, scoring, backward and optimizer;
ours is also shown without waiting for generation (``train``). MFU is 6 operations per parameter and trained token (the
prompt's count too) over the time of ``train`` and the device's dense bf16 peak.
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
from _device import device, options, peak_flops, peak_memory_gb, policy, say

TRL = ["trl==1.16.0", "datasets", "accelerate"]
WARM_UP = 2


def questions(count: int) -> list[str]:
    return [f"Write down the first {10 + number % 40} numbers and say something about each." for number in range(count)]


def plan(given: argparse.Namespace) -> dict[str, Any]:
    """What both contenders are told."""
    small = {"batch_size": 8, "rollouts_per_example": 4, "max_tokens": 16}
    full = {"batch_size": 64, "rollouts_per_example": 8, "max_tokens": 512}
    return {
        **(small if given.tiny else full),
        "steps": given.steps,
        "cpu": given.cpu,
        "gradient_checkpointing": given.gradient_checkpointing,
        "questions": questions(64),
    }


def ours(given: argparse.Namespace, told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Steps of ``RLTrainer``; the model is saved to ``folder``/model for the other contender."""
    import verifiers as vf
    from verifiers_trainer.run.metrics_files import METRICS, read_metrics
    from verifiers_trainer.settings.config import RLConfig
    from verifiers_trainer.trainer import RLTrainer

    def digits(completion: Any, **_: Any) -> float:
        text = completion[-1]["content"] or ""
        return sum(c.isdigit() for c in text) / max(1, len(text))

    where = device(given)
    model, tokenizer = policy(given, where)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    env = vf.SingleTurnEnv(
        dataset=[{"question": question} for question in told["questions"]], rubric=vf.Rubric(funcs=[digits])
    )
    config = RLConfig(
        output_dir=str(folder / "run"), batch_size=told["batch_size"], micro_batch_size=told["batch_size"],
        rollouts_per_example=told["rollouts_per_example"], max_tokens=told["max_tokens"], max_steps=told["steps"],
        max_seq_len=told["max_tokens"] + 128, learning_rate=1e-6, use_lora=given.lora, inference="embedded",
        gradient_checkpointing=told["gradient_checkpointing"], save_strategy="no", log_completions=False,
        use_cpu=given.cpu, zero_variance="keep", no_signal_steps=0,
    )  # fmt: skip
    with RLTrainer(model, env, config, tokenizer) as trainer:
        trainer.train()
    steps = read_metrics(folder / "run" / METRICS)
    counted = [step for step in steps if "time/step" in step][WARM_UP:]
    computed = [step["tokens/prompt"] + step["tokens/completion"] for step in counted]
    rates = [6 * num_parameters * n / step["time/train"] for n, step in zip(computed, counted, strict=True)]
    peak = peak_flops(where)
    return {
        "step_s": statistics.median(step["time/step"] for step in counted),
        "train_s": statistics.median(step["time/train"] for step in counted),
        "pause_s": statistics.median(step["time/pause"] for step in counted),
        "tokens_per_s": statistics.median(step["tokens/completion"] / step["time/step"] for step in counted),
        "flops": statistics.median(rates),
        "mfu": None if peak is None else statistics.median(rates) / peak,
        "memory_gb": peak_memory_gb(where),
    }


def theirs(python: Path, told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """TRL's steps, by ``_trl.py``."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("_trl.py")), json.dumps({**told, "model": str(folder / "model")})],
        capture_output=True, text=True, env=environment | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"TRL failed:\n{done.stderr[-3000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    steps = list(zip(said["step_s"], said["tokens"], strict=False))[WARM_UP:]
    return {
        "step_s": statistics.median(seconds for seconds, _ in steps),
        "tokens_per_s": statistics.median(tokens / seconds for seconds, tokens in steps),
        "memory_gb": said["memory_gb"],
    }


def trl_python(cache: Path) -> Path:
    """The interpreter of TRL's environment in ``cache``, which is made when it is not there."""
    python = cache / "trl-1.16.0" / "bin" / "python"
    if not python.exists():
        subprocess.run(["uv", "venv", "--quiet", "--python", "3.11", str(python.parents[1])], check=True)
        torch_here = f"torch=={torch.__version__.split('+')[0]}"
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", str(python), torch_here, *TRL], check=True)
    return python


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lora", action="store_true", help="train an adapter; TRL trains all in any case")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "verifiers-benchmarks")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL already")
    parser.add_argument("--no-trl", action="store_true")
    given = parser.parse_args()
    if given.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} that warm up")
    told = plan(given)
    with tempfile.TemporaryDirectory() as temporary:
        found = {"ours": ours(given, told, Path(temporary))}
        if not given.no_trl:
            found["trl"] = theirs(given.trl_python or trl_python(given.cache), told, Path(temporary))
    shape = f"{told['batch_size']} rollouts of at most {told['max_tokens']} tokens"
    where = torch.cuda.get_device_name() if not given.cpu else "CPU: the numbers mean nothing"
    print(f"{shape}, {given.steps - WARM_UP} steps, {where}")
    for name, took in found.items():
        print(
            f"  {name:5}  step {took['step_s']:.3f} s  train {say(took.get('train_s'), '.3f')} s  "
            f"pause {say(took.get('pause_s'), '.4f')} s  {took['tokens_per_s']:.0f} tokens/s  "
            f"{say(took.get('flops'), '.3g')} flop/s  MFU {say(took.get('mfu'), '.1%')}  "
            f"memory {say(took['memory_gb'], '.2f')} GB"
        )
    if "trl" in found:
        print(f"  step time over TRL's: {found['ours']['step_s'] / found['trl']['step_s']:.2f}")


if __name__ == "__main__":
    main()
