"""P9, P11 and the smaller figures of the trainer: head, packing, pipeline, weight sync, checkpoint.

    python benchmarks/trainer_parts.py [--part head] [--quick] [--pairs 5] [--store]

* head: growth of resident memory in the log-probability head, forward and backward, as tokens and
  vocabulary grow. It should follow the chunk (on a CPU 256 tokens, or as many as make 64 MiB) and
  not the batch. The figure is memory over the bytes of all logits, and memory with four times the
  tokens over memory before;
* packing: 10,000 samples of log-normal length into rows;
* pipeline: rollouts per second from dataset row to packed row, with a model that responds at once;
* sync: the cost of a push of weights before a server reads it, over plain writing (and flushing) of
  the same bytes: the folders of ``lora_dir`` and ``reload``. The embedded engine is inspected after
  an optimizer step: its parameters must be the trainer's; parameters that are not count as bytes
  copied. NCCL and IPC need a GPU (``gpu/weight_sync.py``);
* checkpoint: a whole checkpoint (weights, optimizer, pipeline, checksums) over plain writing and
  flushing of the same files.

Files are written to the temporary folder's disk. Writing is wall time; packing and pipeline are CPU
time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _measure import Report, Stopwatch, options, parse, print_table, versions
from _steps import memory_mb, open_ours
from trainer_step import record
from transformers import TrainerCallback

PARTS = ("head", "packing", "pipeline", "sync", "checkpoint")
CHUNK = 256
PACKING_S, ROLLOUT_MS, SYNC, CHECKPOINT = 0.5, 2.0, 2.0, 1.5


# --- the head -------------------------------------------------------------------------------------


def head_mb(num_tokens: int, vocabulary: int, width: int = 32) -> float:
    """Growth of the memory in MB in a forward and backward pass of the head."""
    import torch

    from verifiers_trainer.policy.logprobs import chunked_logprobs

    torch.manual_seed(0)
    head = torch.nn.Linear(width, vocabulary, bias=False)
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    labels = torch.randint(0, vocabulary, (num_tokens,))
    head.weight.grad, hidden.grad = torch.zeros_like(head.weight), torch.zeros_like(hidden)
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    logprobs, _ = chunked_logprobs(hidden, head, labels)
    logprobs.sum().backward()
    return memory_mb("VmHWM") - before


def head(quick: bool, report: Report) -> None:
    from verifiers_trainer.policy.logprobs import STORED_LOGITS_BYTES

    tokens, vocabularies = (512, (8_000, 16_000)) if quick else (1024, (16_000, 64_000))
    head_mb(CHUNK, 1000)  # torch's one-time allocations
    rows, memory = [], {}
    for vocabulary in vocabularies:
        for times in (1, 4):
            memory[vocabulary, times] = head_mb(times * tokens, vocabulary)
            logits = times * tokens * vocabulary * 4 / 1e6
            chunk = max(CHUNK * vocabulary * 4, STORED_LOGITS_BYTES) / 1e6
            values = (logits, chunk, memory[vocabulary, times], memory[vocabulary, times] / chunk)
            rows.append(
                [
                    f"{times * tokens} tokens, vocabulary {vocabulary}",
                    *(f"{value:.1f}" for value in values),
                ]
            )
    print_table(
        "memory of the head, forward and backward",
        ["", "all logits MB", "a chunk MB", "MB", "chunks"],
        rows,
    )
    small, large = vocabularies
    share = memory[large, 4] / (4 * tokens * large * 4 / 1e6)
    report.figure(f"P9: vocabulary {large}, memory over all logits", share, to_reach=1.0)
    for vocabulary in (large, small):
        growth = memory[vocabulary, 4] / memory[vocabulary, 1]
        report.figure(
            f"P9: vocabulary {vocabulary}, four times the tokens over before", growth, to_reach=1.2
        )


# --- packing and pipeline -------------------------------------------------------------------------


def packing(quick: bool, report: Report, pairs: int) -> None:
    import numpy as np

    from verifiers_trainer.algorithm.packing import fill, pack
    from verifiers_trainer.algorithm.samples import NOT_SAMPLED, Sample

    count = 500 if quick else 10_000
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.0, 0.8, count).astype(int), 8, 4096)
    samples, weights = [], []
    for length in lengths:
        mask = np.arange(length) >= 8 // 2
        zeros = np.zeros(length, np.float32)
        versions_T = np.where(mask, 0, NOT_SAMPLED).astype(np.int32)
        samples.append(Sample(np.ones(length, np.int32), mask, zeros, versions_T, zeros))
        weights.append(mask / length)
    seconds, copies = [], []
    for _ in range(pairs):
        with Stopwatch() as watch:
            rows_R = pack(samples, weights, max_tokens=8192)
        seconds.append(watch.cost.cpu_s)
        with Stopwatch() as copying:
            arrays = ("token_ids", "loss_mask", "sampler_logprobs", "versions", "advantages")
            joined = [
                np.concatenate([getattr(sample, name) for sample in samples]) for name in arrays
            ]
        copies.append(copying.cost.cpu_s)
        del joined
    print(
        f"packing: {count} samples, {lengths.sum()} tokens, {len(rows_R[0])} rows,"
        f" {fill(rows_R, 8192):.1%} full"
    )
    report.figure(f"packing of {count} samples, CPU", statistics.median(seconds), " s", PACKING_S)
    over = statistics.median(
        seconds_of_pack / seconds_of_copy
        for seconds_of_pack, seconds_of_copy in zip(seconds, copies, strict=True)
    )
    report.figure("packing, over joining five of the arrays", over)
    report.figure(
        "packing, row length over what rows hold in the mean",
        1 / fill(rows_R, 8192),
        to_reach=1 / 0.95,
    )


def pipeline(quick: bool, report: Report, pairs: int) -> None:
    import verifiers as vf
    from verifiers.runs.rollout import RunContext
    from verifiers.testing import ScriptedClient
    from verifiers_trainer.pipeline.pipeline import Pipeline
    from verifiers_trainer.pipeline.thread import PipelineThread
    from verifiers_trainer.settings.config import RLConfig

    def is_a(completion: Any, **_: Any) -> float:
        return float(completion[-1]["content"].startswith("a"))

    class Answers(ScriptedClient):
        """Two texts in turn, at once, with the current policy version."""

        version = 0

        async def complete(self, request: Any) -> Any:
            from dataclasses import replace

            response = await super().complete(request)
            self.requests.clear()
            return replace(
                response,
                version=self.version,
                tokens=replace(response.tokens, version=self.version),
            )

    env = vf.SingleTurnEnv(
        dataset=[{"question": f"question {number}"} for number in range(512)],
        rubric=vf.Rubric(funcs=[is_a]),
    )
    config = RLConfig(
        output_dir="unused", batch_size=64 if quick else 512, rollouts_per_example=8, max_seq_len=512, use_lora=False,
        use_cpu=True,
    )  # fmt: skip
    client = Answers(["a" * 63, "b" * 63], tokens=True)
    context = RunContext(client=client, model="m", require_tokens=True, seed=0)
    num_batches = 2 if quick else 4
    batches = PipelineThread(Pipeline(env, list(env.train_table), context, config))
    batches.start()
    costs = []
    try:
        for _ in range(pairs):
            with Stopwatch() as watch:
                for _ in range(num_batches):
                    batches.next_batch()
                    client.version += 1
                    batches.set_version(client.version)
            costs.append(watch.cost)
    finally:
        batches.close()
    count = num_batches * config.batch_size
    print(
        f"pipeline: {statistics.median(count / cost.wall_s for cost in costs):.0f} rollouts/s of"
        " wall time"
    )
    cpu_ms = statistics.median(cost.cpu_s for cost in costs) / count * 1e3
    report.figure("pipeline, CPU of a rollout", cpu_ms, " ms", ROLLOUT_MS)


# --- files ----------------------------------------------------------------------------------------


def plain_write_s(source: Path, target: Path) -> float:
    """Seconds to write and flush the files of ``source``, already read, in a new folder."""
    contents = {
        path.relative_to(source): path.read_bytes() for path in source.rglob("*") if path.is_file()
    }
    os.sync()
    start = time.perf_counter()
    target.mkdir(parents=True)
    for name, content in contents.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with (target / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def timed(work: Callable[[], Any]) -> float:
    os.sync()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def size_mb(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def compare_with_plain(
    name: str, write: Callable[[], Path], pairs: int, beside: Path
) -> tuple[list[str], float]:
    """A row of the table and the ratio: ``write`` writes and returns a folder; plain writing writes
    the same files."""
    ours_s, plain_s = [], []
    for _ in range(pairs):
        folders: list[Path] = []
        ours_s.append(timed(lambda folders=folders: folders.append(write())))
        plain_s.append(plain_write_s(folders[0], beside))
    size = size_mb(folders[0])
    over = statistics.median(
        ours_one / plain_one for ours_one, plain_one in zip(ours_s, plain_s, strict=True)
    )
    values = [
        size,
        statistics.median(ours_s),
        statistics.median(plain_s),
        size / statistics.median(ours_s),
        over,
    ]
    return [name, *(f"{value:.2f}" for value in values)], over


@contextlib.contextmanager
def run_trainer(quick: bool, lora: bool, measure: Callable[[Any, Path], None]) -> Iterator[None]:
    """Run a trainer for two steps; ``measure`` is called with it and a folder while its engine
    still runs."""

    class AfterTwoSteps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                measure(trainer, Path(folder))

    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), 64 if quick else 384, 8, 8)
        job = {
            "folder": folder, "steps": 2, "micro_batch": 8, "max_seq_len": 576, "lora": lora,
            # 60 MB, as of a model of billions
            "settings": {"save_total_limit": 1, "lora_rank": 16 if quick else 512},
        }  # fmt: skip
        with open_ours(job, Path(folder) / "run", [AfterTwoSteps()]) as trainer:
            trainer.train()
        yield


def sync(quick: bool, report: Report, pairs: int) -> None:
    import copy

    from verifiers_trainer.engines.vllm.weights import opening
    from verifiers_trainer.engines.vllm.weights.choice import Choice

    rows: list[list[str]] = []

    def files(method: str) -> Callable[[Any, Path], None]:
        def measure(trainer: Any, folder: Path) -> None:
            engine = copy.copy(trainer.engine)
            settings = copy.copy(trainer.args)
            weight_sync = _weight_sync(
                opening, Choice(method, "measured"), trainer, engine, settings
            )
            version = iter(range(1, 1000))

            def push() -> Path:
                weight_sync.prepare(number := next(version))
                (newest,) = [
                    path
                    for path in (folder / "run" / "sync").iterdir()
                    if path.name.endswith(f"-v{number}")
                ]
                return newest

            row, over = compare_with_plain(method, push, pairs, folder / "plain")
            rows.append(row)
            report.figure(f"P11: {method}, over plain writing", over, to_reach=SYNC)

        return measure

    def embedded(trainer: Any, folder: Path) -> None:
        trainer_pointers = {parameter.data_ptr() for parameter in trainer.model.parameters()}
        engine_parameters = list(trainer.engine._replica.parameters())
        copied = sum(
            p.numel() * p.element_size()
            for p in engine_parameters
            if p.data_ptr() not in trainer_pointers
        )
        report.figure("P11: embedded, bytes copied after a step", copied, " B", 0)
        report.figure(
            "P11: embedded, pause of the last step", trainer.last_step["time/pause"] * 1e3, " ms"
        )

    def send_all(trainer: Any, folder: Path) -> None:
        embedded(trainer, folder)
        files("reload")(trainer, folder)

    with run_trainer(quick, False, send_all), run_trainer(quick, True, files("lora_dir")):
        pass
    print_table("weights as files", ["", "MB", "s", "plain s", "MB/s", "over plain"], rows)


def _weight_sync(opening: Any, choice: Any, trainer: Any, engine: Any, settings: Any) -> Any:
    """The product's weight sync, with the trainer's model and no server."""
    from types import SimpleNamespace

    serving = SimpleNamespace(serving=SimpleNamespace(model="m"))
    return opening._open(choice, trainer.model, settings, [serving], 1, frozenset())


def checkpoint(quick: bool, report: Report, pairs: int) -> None:
    rows: list[list[str]] = []

    def measure(trainer: Any, folder: Path) -> None:
        def save() -> Path:
            trainer._save_checkpoint(trainer.model, None)
            return folder / "run" / "checkpoint-2"

        row, over = compare_with_plain("checkpoint", save, pairs, folder / "plain")
        rows.append(row)
        report.figure("checkpoint, over plain writing", over, to_reach=CHECKPOINT)

    with run_trainer(quick, False, measure):
        print_table("checkpoint", ["", "MB", "s", "plain s", "MB/s", "over plain"], rows)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    args = parse(parser)
    report = Report("trainer_parts", args)
    import torch

    torch.set_num_threads(1)
    print(
        versions("verifiers-trainer", "torch", "transformers", "peft"),
        "load",
        round(os.getloadavg()[0], 1),
    )
    if "head" in args.part:
        head(args.quick, report)
    for name, part in (
        ("packing", packing),
        ("pipeline", pipeline),
        ("sync", sync),
        ("checkpoint", checkpoint),
    ):
        if name in args.part:
            part(args.quick, report, args.pairs)
    report.close()


if __name__ == "__main__":
    main()
