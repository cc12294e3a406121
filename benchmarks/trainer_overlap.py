"""P10: how much of generation and training happens at the same time, one step off-policy.

    python benchmarks/trainer_overlap.py [--case "as long as training"] [--quick] [--pairs 5]
    [--store]

Whole runs of ``RLTrainer``: pipeline, packing, forward, backward, optimizer, metrics. Only the
completions are
scripted: each arrives after a fixed time, as from a server on another machine, so that generation
takes no core from training. A pair is a synchronous run (``max_off_policy_steps=0``), whose steps
show the time of generation and training alone, and a run one step off-policy. The time of a
completion is set from a first synchronous run: generation then takes half as long as training, as
long, or twice as long. As long is the hardest case: neither side has slack.

The figure is the time of a step over the longer of the two: 1 is perfect, and without any overlap
it would be 2 where both take as long. Wall times vary on a busy machine; within a pair both runs
are affected alike.
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _measure import Report, options, parse, print_table, versions

from verifiers.testing import ScriptedClient
from verifiers.types import ModelRequest, Response

CASES = {
    "half as long as training": 0.5,
    "as long as training": 1.0,
    "twice as long as training": 2.0,
}
OVERLAPPED = 1.15
WARM_UP = 2
SIBLINGS = 8


class LatencyEngine:
    """A stand-in engine with a version and a pause; its client responds after a delay."""

    shares_weights, tools_shown = False, None
    base_url, api_key, served_model = "http://127.0.0.1:9/v1", "none", "scripted"

    def __init__(self) -> None:
        self.version = 0

    def set_version(self, version: int) -> None:
        self.version = version

    def start(self, deadline_s: float) -> None:
        """Do nothing: there is no server."""

    def stop(self) -> None:
        """Do nothing: there is no server."""

    def check_shared(self) -> None:
        """Do nothing: there are no weights."""

    def pause(self) -> AbstractContextManager[None]:
        return nullcontext()


class LatencyClient(ScriptedClient):
    """Two different texts of ``num_tokens`` tokens in turn, after ``delay_s``, with the engine's
    version."""

    def __init__(self, engine: LatencyEngine, num_tokens: int, delay_s: float):
        self.engine = engine
        super().__init__(
            [letter * (num_tokens - 1) for letter in "ab"], tokens=True, delay_s=delay_s
        )

    async def complete(self, request: ModelRequest) -> Response:
        version = self.engine.version
        response = await super().complete(request)
        self.requests.clear()
        assert response.tokens is not None
        return replace(response, version=version, tokens=replace(response.tokens, version=version))


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the model and of a step."""

    hidden: int
    rollouts: int
    tokens: int
    steps: int


@dataclass(frozen=True, slots=True)
class Times:
    """Medians over the steps of a run, in seconds; ``training`` is the step without the wait for
    rollouts."""

    step: float
    generation: float
    training: float


def run(size: Size, lag: int, delay_s: float) -> Times:
    """Run a training; the first steps are not counted."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import verifiers as vf
    from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
    from verifiers_trainer.run.metrics_files import METRICS, read_metrics
    from verifiers_trainer.settings.config import RLConfig
    from verifiers_trainer.trainer import RLTrainer

    def is_a(completion: Any, **_: Any) -> float:
        return float(completion[-1]["content"].startswith("a"))

    class Scripted(RLTrainer):
        def start_engine(self) -> None:
            self.server.engine = self.server.engine or LatencyEngine()

        def run_context(self, sampling_args: Any = None) -> Any:
            client = LatencyClient(self.engine, size.tokens, delay_s)
            return replace(super().run_context(sampling_args), client=client)

        def begin(self) -> None:
            super().begin()
            self.checks_sampler = False  # scripted log-probabilities are not the model's

    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = build_tiny_tokenizer()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=512, hidden_size=size.hidden, intermediate_size=3 * size.hidden, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=4, head_dim=size.hidden // 4, tie_word_embeddings=True,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
    rows = [{"question": f"question {number}"} for number in range(64)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[is_a]))
    with tempfile.TemporaryDirectory() as folder:
        config = RLConfig(
            output_dir=folder, batch_size=size.rollouts, rollouts_per_example=SIBLINGS, max_steps=size.steps + WARM_UP,
            max_seq_len=size.tokens + 128, max_tokens=size.tokens, max_off_policy_steps=lag, learning_rate=1e-6,
            use_lora=False, use_cpu=True, inference="embedded", save_strategy="no", micro_batch_size=8,
        )  # fmt: skip
        with Scripted(model, env, config, tokenizer) as trainer:
            trainer.train()
        steps = [row for row in read_metrics(Path(folder) / METRICS) if "time/step" in row][
            WARM_UP:
        ]
    return Times(
        statistics.median(row["time/step"] for row in steps),
        statistics.median(row["time/wait_generation"] for row in steps),
        statistics.median(row["time/step"] - row["time/wait_generation"] for row in steps),
    )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--case", choices=CASES, default=None, help="one case only")
    args = parse(parser)
    size = Size(64, 16, 16, 2) if args.quick else Size(192, 64, 64, 8)
    cases = [args.case] if args.case else ["as long as training"] if args.quick else list(CASES)
    report = Report("trainer_overlap", args)
    # hide warnings about the scripted log-probabilities
    logging.getLogger("verifiers_trainer").setLevel(logging.ERROR)
    print(
        versions("verifiers-trainer", "torch", "transformers"), "load", round(os.getloadavg()[0], 1)
    )
    training = run(size, 0, 0.0).training
    rows = []
    for case in cases:
        rounds = []
        for _ in range(args.pairs):
            alone = run(size, 0, CASES[case] * training)
            rounds.append((alone, run(size, 1, CASES[case] * training)))
            training = alone.training
        over = [both.step / max(alone.generation, alone.training) for alone, both in rounds]
        without = [alone.step / max(alone.generation, alone.training) for alone, _ in rounds]
        medians = [
            statistics.median(alone.generation for alone, _ in rounds),
            statistics.median(alone.training for alone, _ in rounds),
            statistics.median(alone.step for alone, _ in rounds),
            statistics.median(both.step for _, both in rounds),
        ]
        rows.append([case, *(f"{value:.3f}" for value in medians)])
        report.figure(f"{case}, synchronous, step over the longer", statistics.median(without))
        report.figure(f"{case}, step over the longer", statistics.median(over), to_reach=OVERLAPPED)
    title = (
        f"{size.rollouts} rollouts of {size.tokens} tokens, {size.steps} steps, {args.pairs} pairs"
    )
    print_table(
        title, ["generation takes", "alone s", "training s", "in turn s", "overlapped s"], rows
    )
    report.close()


if __name__ == "__main__":
    main()
