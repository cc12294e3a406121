"""Bandwidth of the weight sync on one GPU: embedded, files, and a push to a vLLM server, against
copying the bytes.

    python benchmarks/gpu/weight_sync.py [--vllm http://127.0.0.1:8000 --sync ipc|reload|nccl] [--rounds 5]
    python benchmarks/gpu/weight_sync.py --cpu --tiny         checks that it works

* embedded: no bytes are copied; the wait of a pause for an update while requests are computed;
* files: the files of ``reload``, against one ``write`` of as many bytes and an ``fsync`` in the
  same folder;
* a server: ``VLLMEngine.set_version``, that is pause, transfer, resume, against a copy on the
  device (``ipc``, ``nccl``) or against the write (``reload``). It must serve the checkpoint that
  ``--save FOLDER`` writes; start it in a separate environment, with ``VLLM_SERVER_DEV_MODE=1
  VLLM_ALLOW_INSECURE_SERIALIZATION=1`` and ``--weight-transfer-config '{"backend": "ipc"}'``.

Target: at least half the bandwidth of the copy.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _device import device, options, policy, synchronize


def median_s(run: Callable[[], Any], rounds: int, where: torch.device) -> float:
    """The median time of ``run``, the device idle before and after."""
    times = []
    for _ in range(rounds + 1):
        synchronize(where)
        start = time.perf_counter()
        run()
        synchronize(where)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def show(name: str, seconds: float, num_bytes: int, against_s: float | None = None) -> None:
    line = f"  {name:32} {1e3 * seconds:9.2f} ms"
    line += f"  {num_bytes / seconds / 1e9:8.2f} GB/s" if num_bytes else "  0 bytes"
    if against_s is not None:
        line += f"  {against_s / seconds:.0%} of the copy"
    print(line)


def embedded(model: Any, tokenizer: Any, tiny: bool) -> float:
    """Seconds that a pause waits while requests are computed, at the 99th percentile."""
    from engine import loads, p99, pauses_ms

    from verifiers_trainer.engines.embedded.engine import EmbeddedEngine

    load = loads(len(tokenizer), 16 if tiny else 256, 64 if tiny else 256)["ragged"]
    with EmbeddedEngine(model, tokenizer, max_seq_len=2048, concurrency=64) as engine:
        waits = pauses_ms(engine, load)
    return p99(waits) / 1e3


def write(num_bytes: int, folder: Path) -> Callable[[], None]:
    content = os.urandom(min(num_bytes, 2**20)) * (num_bytes // 2**20 + 1)

    def run() -> None:
        with open(folder / "raw", "wb") as file:
            file.write(content[:num_bytes])
            file.flush()
            os.fsync(file.fileno())

    return run


def files(model: Any, folder: Path) -> Callable[[], None]:
    from safetensors.torch import save_file

    from verifiers_trainer.engines.vllm.weights.export import apart, exported

    def run() -> None:
        save_file(
            {name: tensor.cpu() for name, tensor in apart(exported(model)).items()},
            folder / "weights.st",
        )
        with open(folder / "weights.st", "rb") as file:
            os.fsync(file.fileno())

    return run


def push(model: Any, tokenizer: Any, args: Any, where: torch.device) -> float:
    """Seconds of one push of all weights to the server."""
    import verifiers as vf
    from verifiers_trainer.engines.inference import open_engine
    from verifiers_trainer.settings.config import RLConfig

    env = vf.SingleTurnEnv(
        dataset=[{"question": "hi"}], rubric=vf.Rubric(funcs=[lambda completion: 0.0])
    )
    with tempfile.TemporaryDirectory() as folder:
        config = RLConfig(
            output_dir=folder,
            inference=args.vllm,
            weight_sync=args.sync,
            use_lora=False,
            use_cpu=args.cpu,
        )
        engine = open_engine(model, tokenizer, config, env)
        engine.start(300.0)
        try:
            return median_s(lambda: engine.set_version(engine.version + 1), args.rounds, where)
        finally:
            engine.stop()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", metavar="URL", help="a server of the same checkpoint")
    parser.add_argument("--sync", choices=("ipc", "nccl", "reload"), default="ipc")
    parser.add_argument(
        "--save", type=Path, help="write the checkpoint here, for the server, and exit"
    )
    args = parser.parse_args()
    where = device(args)
    model, tokenizer = policy(args, where)
    if args.save:
        model.save_pretrained(args.save)
        tokenizer.save_pretrained(args.save)
        return
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    source = torch.empty(num_bytes, dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), args.rounds, where)
    print(f"{num_bytes / 1e6:.1f} MB of weights, {where}")
    show("copy on the device", copy_s, num_bytes)
    show("embedded: p99 of a pause's wait", embedded(model, tokenizer, args.tiny), 0)
    with tempfile.TemporaryDirectory() as folder:
        raw_s = median_s(write(num_bytes, Path(folder)), args.rounds, where)
        show("write", raw_s, num_bytes)
        show("files", median_s(files(model, Path(folder)), args.rounds, where), num_bytes, raw_s)
    if args.vllm:
        push_s = push(model, tokenizer, args, where)
        show(f"vLLM by {args.sync}", push_s, num_bytes, raw_s if args.sync == "reload" else copy_s)


if __name__ == "__main__":
    main()
