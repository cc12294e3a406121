"""Rows of different adapters decode together, each as if it were alone."""

from __future__ import annotations

import queue
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from verifiers_trainer.engines.embedded.engine import share_parameters
from verifiers_trainer.engines.embedded.padded import PaddedGenerator
from verifiers_trainer.engines.embedded.static import StaticGenerator
from verifiers_trainer.engines.lora import LoraWeights, LowRank
from verifiers_trainer.engines.requests import GenerationRequest, SamplingParams
from verifiers_trainer.policy.builtin_models import build_tiny_model

MODEL = build_tiny_model(seed=1)
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head")


def adapter(seed, version):
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name in LAYERS:
        outputs, inputs = MODEL.get_submodule(name).weight.shape
        layers[name] = LowRank(
            torch.randn(4, inputs, generator=generator) / 8,
            torch.randn(outputs, 4, generator=generator) / 8,
        )
    return LoraWeights(layers, 0.5, version)


ADAPTERS = [adapter(1, 11), adapter(2, 22), None]


@contextmanager
def generator(max_rows):
    finished = queue.Queue()
    loop = PaddedGenerator(
        share_parameters(MODEL),
        decode=lambda ids: "",
        version=lambda: 7,
        max_rows=max_rows,
        kv_bytes=2**28,
        max_batch_tokens=1024,
    )
    loop.start(lambda generations: [finished.put(each) for each in generations], 10)

    def generate(requests):
        for request in requests:
            loop.submit(request)
        done = {}
        while len(done) < len(requests):
            generation = finished.get(timeout=30)
            done[generation.request.request_id] = generation
        return done

    try:
        yield generate
    finally:
        loop.stop()


def requests(prompts):
    return [
        GenerationRequest(
            f"{number}-{index}",
            np.array(prompt, np.int32),
            SamplingParams(max_tokens=8, seed=index, prompt_logprobs=1),
            adapter=each,
        )
        for index, prompt in enumerate(prompts)
        for number, each in enumerate(ADAPTERS)
    ]


def effective(row):
    """The tiny model with an adapter in its weights."""
    model = build_tiny_model(seed=1)
    # a tied head would change the embeddings too
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        for name, layer in (row.layers if row else {}).items():
            model.get_submodule(name).weight += row.scale * layer.b_OR @ layer.a_RI
    return model.eval()


@pytest.mark.parametrize(
    "prompts",
    [
        [[5, 9, 3, 8], [7, 2]],
        # a common beginning, which is computed once for rows of one adapter alone
        [[*range(2, 40), 5], [*range(2, 40), 9, 4]],
        # equal prompts
        [[5, 9, 3, 8], [5, 9, 3, 8]],
    ],
)
def test_rows_of_a_batch_are_computed_with_their_own_adapter(prompts):
    with generator(max_rows=16) as generate:
        done = generate(requests(prompts))
    for number, each in enumerate(ADAPTERS):
        model = effective(each)
        for index, prompt in enumerate(prompts):
            generation = done[f"{number}-{index}"]
            assert generation.error is None
            ids = torch.tensor([[*prompt, *generation.token_ids.tolist()]])
            with torch.no_grad():
                logp = model(ids).logits[0, :-1].log_softmax(-1)
            logp = logp.gather(-1, ids[0, 1:, None])[:, 0].numpy()
            assert generation.logprobs == pytest.approx(logp[len(prompt) - 1 :], abs=1e-4)
            assert generation.prompt_logprobs.logprobs == pytest.approx(
                logp[: len(prompt) - 1], abs=1e-4
            )
            expected = 7 if each is None else each.version
            assert set(generation.versions.tolist()) == {expected}
    # the control: the adapters differ by more than the tolerance
    first = [done[f"{number}-0"].prompt_logprobs.logprobs for number in range(3)]
    assert np.abs(first[0] - first[1]).max() > 1e-2
    assert np.abs(first[0] - first[2]).max() > 1e-2


def test_a_loop_without_adapters_keeps_the_layers_of_the_model():
    plain = GenerationRequest("a", np.array([5, 9], np.int32), SamplingParams(max_tokens=4, seed=3))
    with generator(max_rows=4) as generate:
        before = generate([plain])["a"]
        generate(requests([[7, 2]]))
        after = generate([plain])["a"]
    assert before.token_ids.tolist() == after.token_ids.tolist()
    assert before.logprobs.tolist() == after.logprobs.tolist()


def test_slots_take_no_adapter():
    loop = StaticGenerator(
        share_parameters(MODEL),
        max_seq_len=32,
        capture=None,
        is_ahead=False,
        decode=lambda ids: "",
        version=lambda: 0,
        max_rows=2,
        kv_bytes=2**26,
        max_batch_tokens=64,
    )
    with pytest.raises(ValueError, match="mode padded"):
        loop.submit(requests([[5]])[0])
