"""Tokens per second of the embedded engine on one GPU, over HTTP with log-probabilities: slots with
CUDA graphs, the padded loop, and ``generate`` of transformers on the same card.

    python benchmarks/gpu/decoding.py [--requests 64,256] [--tokens 128]
    python benchmarks/gpu/decoding.py --cpu --tiny            checks that it works

All requests arrive at once; the first of the rounds warms up (captures its graphs) and is not
counted. ``difference`` is that of the sampled log-probabilities from a forward pass of the model,
in the mean over the tokens of one request, in nats.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import torch
from _device import device, options, policy
from engine import ask_all, by_generate, loads
from weight_sync import median_s

from verifiers_trainer.engines.embedded.engine import EmbeddedEngine


def rate(mode: Any, model: Any, tokenizer: Any, load: Any, rounds: int) -> tuple[float, float]:
    """(tokens per second, difference of the log-probabilities)."""
    requests = len(load.prompts)
    with EmbeddedEngine(
        model, tokenizer, mode=mode, max_seq_len=1024, concurrency=requests
    ) as engine:
        assert engine.mode == mode, engine.mode
        url, key, name = engine.base_url, engine.api_key, engine.served_model
        seconds = median_s(lambda: asyncio.run(ask_all(url, key, name, load)), rounds, model.device)
        return load.num_tokens / seconds, difference(engine, model, load.prompts[0])


@torch.no_grad()
def difference(engine: EmbeddedEngine, model: Any, prompt: list[int]) -> float:
    body = {
        "model": engine.served_model, "prompt": prompt, "max_tokens": 64, "logprobs": 0,
        "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{engine.base_url}/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {engine.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        choice = json.load(response)["choices"][0]
    ids = torch.tensor([[*prompt, *choice["token_ids"]]], device=model.device)
    logp = torch.log_softmax(model(ids, use_cache=False).logits[0].float(), -1)
    expected = logp[:-1].gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0].cpu()
    return float((expected - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().mean())


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--requests", default="64,256", help="several: with commas")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.tiny:
        args.requests, args.tokens, args.rounds = "4,8", 16, 1
    model, tokenizer = policy(args, device(args))
    for requests in map(int, args.requests.split(",")):
        load = loads(len(tokenizer), requests, args.tokens)["equal lengths"]
        for mode in ("static", "padded"):
            tokens_per_s, apart = rate(mode, model, tokenizer, load, args.rounds)
            print(
                f"{requests} requests  {mode:8} {tokens_per_s:9.0f} tokens/s  difference {apart:.2g}"
            )
        seconds = median_s(by_generate(model, load, requests), args.rounds, model.device)
        print(f"{requests} requests  generate {load.num_tokens / seconds:9.0f} tokens/s")


if __name__ == "__main__":
    main()
