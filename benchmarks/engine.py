"""The embedded engine: tokens per second over its endpoint against padded ``generate``, and the
wait of a pause.

    python benchmarks/engine.py [--model smollm2] [--at-once 16] [--quick] [--pairs 5] [--store]

The same prompts by: ``generate`` of transformers over left-padded batches in the order of arrival,
sampling included, without log-probs, HTTP or text; the engine in the modes padded and
deterministic, over HTTP with log-probs, token ids and versions, as in training. Two kinds of load:

* equal lengths: every completion has the same number of tokens. The best case for ``generate``;
* ragged: completions of log-normal length; ``generate`` computes each batch to its longest row, and
  only what was asked for counts as a token.

``--vllm URL`` adds a running server of the same model in the same precision (``--threads`` sets
ours; the CPU time of a server is not this process's, so its figure is of wall time).

Models: a tiny one, SmolLM2-135M, and random ones of a million parameters whose layers carry a state:
convolutions (``lfm2``), linear attention (``qwen3_next``), Mamba beside attention (``falcon_h1``).

A figure is the CPU time of a mode over that of ``generate``: below 1 is faster. The pause is the
wait of ``engine.pause()`` under the ragged load, twenty times a second; its 99th percentile is the
figure.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import torch
from _measure import (
    Cost,
    Report,
    Stopwatch,
    interleaved,
    median,
    options,
    parse,
    print_table,
    ratio,
    versions,
)
from transformers import AutoConfig, AutoModelForCausalLM

from verifiers_trainer.engines.embedded.engine import EmbeddedEngine
from verifiers_trainer.policy.builtin_models import (
    build_tiny_model,
    build_tiny_tokenizer,
    load_smollm2,
)

MODES = ("padded", "deterministic")
GENERATE = "generate"
PAUSE_MS = 20.0
PAUSE_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts and the number of tokens of each completion."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def loads(vocabulary: int, num_requests: int, mean_tokens: int) -> dict[str, Load]:
    """The equal and the ragged load, over the same prompts."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(10, vocabulary) for _ in range(rng.randint(8, 48))]
        for _ in range(num_requests)
    ]
    ragged = [
        min(4 * mean_tokens, max(2, round(rng.lognormvariate(0, 0.8) * mean_tokens)))
        for _ in prompts
    ]
    return {
        "equal lengths": Load(prompts, [mean_tokens] * num_requests),
        "ragged": Load(prompts, ragged),
    }


def by_generate(model: Any, load: Load, at_once: int) -> Callable[[], Cost]:
    """``generate`` over batches of ``at_once`` in the order of arrival, each to its longest
    completion."""

    def run() -> Cost:
        with Stopwatch() as watch:
            for begin in range(0, len(load.prompts), at_once):
                part = load.prompts[begin : begin + at_once]
                lengths = load.lengths[begin : begin + at_once]
                width = max(map(len, part))
                ids = torch.tensor(
                    [[0] * (width - len(prompt)) + prompt for prompt in part], device=model.device
                )
                mask = torch.tensor(
                    [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in part]
                )
                new = max(lengths)
                model.generate(
                    ids, attention_mask=mask.to(model.device), do_sample=True, top_k=0, pad_token_id=0,
                    max_new_tokens=new, min_new_tokens=new,
                )  # fmt: skip
        return watch.cost

    return run


def by_endpoint(url: str, key: str, model: str, load: Load) -> Callable[[], Cost]:
    """All requests at once, over HTTP."""

    def run() -> Cost:
        with Stopwatch() as watch:
            tokens = asyncio.run(ask_all(url, key, model, load))
        assert tokens == load.num_tokens, f"{tokens} tokens instead of {load.num_tokens}"
        return watch.cost

    return run


async def ask_all(url: str, key: str, model: str, load: Load) -> int:
    """Send all requests; return the number of completion tokens."""
    parameters = {
        "model": model,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
        "temperature": 1.0,
    }
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=aiohttp.ClientTimeout()
    ) as http:

        async def ask(prompt: list[int], length: int) -> int:
            body = {"prompt": prompt, "max_tokens": length, **parameters}
            async with http.post(f"{url}/completions", json=body) as response:
                response.raise_for_status()
                return int((await response.json())["usage"]["completion_tokens"])

        return sum(await asyncio.gather(*map(ask, load.prompts, load.lengths)))


def served_model(url: str) -> str:
    """The name of a server's model."""
    with urllib.request.urlopen(f"{url}/models") as response:
        return str(json.load(response)["data"][0]["id"])


def pauses_ms(engine: EmbeddedEngine, load: Load) -> list[float]:
    """The wait of each pause in milliseconds while ``load`` is served and once just after, so never
    empty."""
    waits: list[float] = []
    stop = threading.Event()

    def ask_for_pauses() -> None:
        while True:
            served = stop.wait(PAUSE_EVERY_S)
            start = time.perf_counter()
            with engine.pause():
                waits.append(1e3 * (time.perf_counter() - start))
            if served:
                return

    thread = threading.Thread(target=ask_for_pauses)
    thread.start()
    asyncio.run(ask_all(engine.base_url, engine.api_key, engine.served_model, load))
    stop.set()
    thread.join()
    return waits


def p99(waits: list[float]) -> float:
    """The 99th percentile; the largest of few values."""
    return sorted(waits)[int(0.99 * len(waits))]


SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
STATES: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_ff_dim": 256},
    "qwen3_next": {
        "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        **EXPERTS,
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16},
}
"""Model types whose layers carry a state, with what their configuration needs beside ``SHAPE``."""


def load_model(name: str) -> tuple[Any, Any]:
    """(model, tokenizer)."""
    if name == "smollm2":
        return load_smollm2()
    tokenizer = build_tiny_tokenizer()
    if name == "tiny":
        return build_tiny_model(), tokenizer
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(name, vocab_size=128, **SHAPE, **ends, **STATES[name])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval(), tokenizer


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=("tiny", "smollm2", *STATES), default="tiny")
    parser.add_argument(
        "--requests", type=int, default=None, help="number of requests; 128, with --quick 8"
    )
    parser.add_argument(
        "--tokens", type=int, default=None, help="mean length of a completion; 64, with --quick 8"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=32,
        help="sequences that decode together, for every contender",
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, help="all; with --quick padded only")
    parser.add_argument(
        "--vllm",
        metavar="URL",
        help="a vLLM server of the same model, for example http://host:8000/v1",
    )
    parser.add_argument("--threads", type=int, default=None, help="of torch's kernels")
    args = parse(parser)
    if args.threads:
        torch.set_num_threads(args.threads)
    args.modes = args.modes or (MODES[:1] if args.quick else MODES)
    num_requests = args.requests or (8 if args.quick else 128)
    mean_tokens = args.tokens or (8 if args.quick else 64)
    report = Report("engine", args)
    model, tokenizer = load_model(args.model)
    print(
        f"{args.model}: {versions('torch', 'transformers')}, {torch.get_num_threads()} threads,"
        f" {model.dtype}"
    )
    engines = {
        mode: EmbeddedEngine(model, tokenizer, mode=mode, max_seq_len=512, concurrency=args.at_once)
        for mode in args.modes
    }
    for engine in engines.values():
        engine.start()
    try:
        for name, load in loads(len(tokenizer), num_requests, mean_tokens).items():
            contenders = {GENERATE: by_generate(model, load, args.at_once)}
            for mode, engine in engines.items():
                contenders[mode] = by_endpoint(
                    engine.base_url, engine.api_key, engine.served_model, load
                )
            if args.vllm:
                contenders["vllm"] = by_endpoint(args.vllm, "none", served_model(args.vllm), load)
            costs = interleaved(contenders, args.pairs)
            show(report, args, name, load, costs)
            for mode in (m for m in args.modes if name == "ragged"):
                waits = [wait for _ in range(args.pairs) for wait in pauses_ms(engines[mode], load)]
                print(
                    f"{mode}: {len(waits)} pauses, median {statistics.median(waits):.1f} ms, most"
                    f" {max(waits):.1f} ms"
                )
                report.figure(f"{args.model}, {mode}, pause", p99(waits), " ms", PAUSE_MS)
    finally:
        for engine in engines.values():
            engine.stop()
    report.close()


def show(report: Report, args: Any, name: str, load: Load, costs: dict[str, list[Cost]]) -> None:
    rows = [
        (
            contender,
            f"{load.num_tokens / median(runs, 'wall_s'):.0f}",
            f"{load.num_tokens / median(runs, 'cpu_s'):.0f}",
        )
        for contender, runs in costs.items()
    ]
    title = (
        f"{args.model}, {name}: {len(load.prompts)} requests, {load.num_tokens} tokens,"
        f" {args.at_once} at once"
    )
    print_table(title, ("", "tokens/s", "tokens/CPU s"), rows)
    for mode in args.modes:
        report.figure(
            f"{args.model}, {name}, {mode}, over generate",
            ratio(costs[mode], costs[GENERATE], "cpu_s"),
        )
        if "vllm" in costs:
            report.figure(
                f"{args.model}, {name}, {mode}, wall over vllm",
                ratio(costs[mode], costs["vllm"], "wall_s"),
            )


if __name__ == "__main__":
    main()
