"""The sampler: what it draws, from which distribution, and from which random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verifiers_trainer.engines.embedded.sampling import (
    SamplingTable,
    TokenCounts,
    draw,
    pick,
    streams,
    uniforms,
)
from verifiers_trainer.engines.requests import SamplingParams

VOCABULARY = 12


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def many_draws(logits_V: torch.Tensor, n: int = 4000, counts: TokenCounts | None = None, **rules):
    """Token ids and log-probs of ``n`` rows that differ in their seed alone."""
    table = SamplingTable.build(
        [SamplingParams(max_tokens=1, seed=i, **rules) for i in range(n)], torch.device("cpu")
    )
    return draw(logits_V.expand(n, -1), table, torch.zeros(n, dtype=torch.int64), counts)[:2]


def reference(
    logits_V: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0
) -> torch.Tensor:
    """The processed distribution, written token by token."""
    probs = torch.softmax(logits_V / temperature, 0)
    keep = probs >= min_p * probs.max()
    order = probs.argsort(descending=True).tolist()
    order = [token for token in order if keep[token]][: top_k or None]
    total = sum(float(probs[token]) for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass / total >= top_p:
            break
        kept.append(token)
        mass += float(probs[token])
    mask = torch.zeros_like(probs)
    mask[kept] = 1
    return probs * mask / (probs * mask).sum()


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_draws_follow_the_processed_distribution_and_report_it(rules):
    logits_V = logits(1, seed=3)[0]
    expected = reference(logits_V, **rules)
    tokens, logprobs = many_draws(logits_V, **rules)
    torch.testing.assert_close(logprobs.exp(), expected[tokens], rtol=1e-4, atol=1e-6)
    observed = torch.bincount(tokens, minlength=VOCABULARY) / len(tokens)
    assert (observed - expected).abs().max() < 5 * (0.25 / len(tokens)) ** 0.5


def test_rules_are_per_row():
    rows = [
        SamplingParams(max_tokens=1),
        SamplingParams(max_tokens=1, top_k=1),
        SamplingParams(max_tokens=1, min_p=1.0),
    ]
    logits_BV = logits(1).expand(3, -1)
    table = SamplingTable.build(rows, torch.device("cpu"))
    tokens, logprobs, *_ = draw(logits_BV, table, torch.zeros(3, dtype=torch.int64))
    assert tokens[1] == tokens[2] == logits_BV[0].argmax()
    torch.testing.assert_close(logprobs[1:], torch.zeros(2))
    torch.testing.assert_close(logprobs[0], torch.log_softmax(logits_BV[0], 0)[tokens[0]])


def test_greedy_takes_the_best_token_and_reports_it_at_temperature_one():
    tokens, logprobs = many_draws(logits(1)[0], n=5, temperature=0.0)
    best = logits(1)[0].argmax()
    assert (tokens == best).all()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits(1)[0], 0)[best].expand(5))


def test_a_row_does_not_depend_on_its_neighbours():
    alone = [SamplingParams(max_tokens=1, seed=9, top_p=0.9)]
    crowd = [
        *alone,
        *(SamplingParams(max_tokens=1, seed=i, temperature=0.5, top_k=2) for i in range(7)),
    ]
    for counter in range(20):
        logits_BV = logits(8, seed=counter)
        single = draw(
            logits_BV[:1], SamplingTable.build(alone, torch.device("cpu")), torch.tensor([counter])
        )
        many = draw(
            logits_BV, SamplingTable.build(crowd, torch.device("cpu")), torch.full((8,), counter)
        )
        assert single.tokens[0] == many.tokens[0]


def test_penalties_count_prompt_and_output_as_defined():
    logits_V = torch.zeros(VOCABULARY)
    logits_V[0], logits_V[1], logits_V[2] = 2.0, -2.0, 1.0
    counts = TokenCounts([np.array([0, 1])], [np.array([2, 2])], VOCABULARY, "cpu")
    rules = SamplingParams(
        max_tokens=1, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25
    )
    table = SamplingTable.build([rules], torch.device("cpu"))
    penalised = counts.penalise(logits_V[None], table.penalties)[0]
    assert penalised[0] == 1.0  # divided; in the prompt only, so not subtracted from
    assert penalised[1] == -4.0  # multiplied
    assert penalised[2] == 0.5 - 0.5 - 2 * 0.25
    assert (penalised[3:] == 0).all()
    counts.add(torch.tensor([3]))
    assert counts.penalise(logits_V[None], table.penalties)[0, 3] == -0.75


def test_a_bias_is_added_before_everything_else_and_to_its_own_row_alone():
    rows = [
        SamplingParams(max_tokens=1, logit_bias=((3, 100.0), (4, -100.0))),
        SamplingParams(max_tokens=1),
    ]
    logits_BV = logits(1).expand(2, -1)
    kept = logits_BV.clone()
    drawn = draw(
        logits_BV, SamplingTable.build(rows, torch.device("cpu")), torch.zeros(2, dtype=torch.int64)
    )
    assert drawn.tokens[0] == 3
    torch.testing.assert_close(logits_BV, kept)
    torch.testing.assert_close(drawn.logprobs[1], torch.log_softmax(kept[1], 0)[drawn.tokens[1]])


def test_a_row_that_is_too_short_cannot_draw_its_ends():
    rules = [
        SamplingParams(max_tokens=9, stop_token_ids=(1, 2), min_tokens=3, seed=i)
        for i in range(400)
    ]
    logits_BV = torch.zeros(400, VOCABULARY)
    table = SamplingTable.build(rules, torch.device("cpu"))
    early, late = (draw(logits_BV, table, torch.full((400,), count)) for count in (2, 3))
    assert not torch.isin(early.tokens, torch.tensor([1, 2])).any()
    torch.testing.assert_close(
        early.logprobs, torch.full((400,), -np.log(VOCABULARY - 2), dtype=torch.float32)
    )
    assert torch.isin(late.tokens, torch.tensor([1, 2])).any()


def test_alternatives_are_of_the_distribution_drawn_from():
    rows = [SamplingParams(max_tokens=1, top_logprobs=3, top_k=2), SamplingParams(max_tokens=1)]
    drawn = draw(
        logits(2), SamplingTable.build(rows, torch.device("cpu")), torch.zeros(2, dtype=torch.int64)
    )
    best = logits(2)[0].topk(3)
    assert drawn.top_tokens[0, :2].tolist() == best.indices[:2].tolist()
    torch.testing.assert_close(drawn.top_logprobs[0, :2], torch.log_softmax(best.values[:2], 0))
    assert drawn.top_logprobs[0, 2] == -torch.inf
    assert (
        draw(
            logits(2),
            SamplingTable.build(rows[1:] * 2, torch.device("cpu")),
            torch.zeros(2, dtype=torch.int64),
        ).top_tokens
        is None
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an Apple GPU")
def test_an_apple_gpu_which_has_no_float64_draws_the_same_tokens():
    rows = [
        SamplingParams(max_tokens=1, seed=i, temperature=0.8, top_p=0.9, top_k=7) for i in range(64)
    ]
    there = draw(
        logits(64).to("mps"),
        SamplingTable.build(rows, torch.device("mps")),
        torch.zeros(64, dtype=torch.int64),
    )
    here = draw(
        logits(64),
        SamplingTable.build(rows, torch.device("cpu")),
        torch.zeros(64, dtype=torch.int64),
    )
    assert there.tokens.tolist() == here.tokens.tolist()
    torch.testing.assert_close(there.logprobs.cpu(), here.logprobs, atol=1e-5, rtol=0)


def test_a_very_rare_token_has_its_share():
    """Why ``pick`` sums in float64; the negative control in float32 rounds the token's interval to
    zero."""
    probs_BV = torch.tensor([[0.5, 0.5 - 1e-9, 1e-9]])
    u_B = torch.tensor([1 - 4e-10], dtype=torch.float64)
    assert pick(probs_BV, u_B).tolist() == [2]
    coarse = torch.searchsorted(probs_BV.cumsum(-1), u_B.float()[:, None], right=True)
    assert coarse.item() != 2


def test_a_token_without_probability_is_never_drawn():
    logits_V = torch.full((VOCABULARY,), -torch.inf)
    logits_V[[4, 7]] = 0.0
    tokens, _ = many_draws(logits_V, n=20_000)
    assert set(tokens.tolist()) == {4, 7}


def test_logits_that_are_not_numbers_give_logprobs_that_are_not():
    _, logprobs = many_draws(torch.full((VOCABULARY,), torch.nan), n=3)
    assert not torch.isfinite(logprobs).any()


def test_random_numbers_are_uniform_and_independent_of_neighbouring_seeds_and_counters():
    seeds, counters = np.meshgrid(np.arange(200), np.arange(200), indexing="ij")
    numbers = uniforms(streams(seeds.ravel().tolist()), torch.from_numpy(counters.ravel()))
    numbers = numbers.reshape(200, 200).numpy()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    histogram = np.histogram(numbers, bins=100, range=(0, 1))[0]
    # chi-square, 99 degrees of freedom, p about 1e-4
    assert ((histogram - 400) ** 2 / 400).sum() < 160
    for shifted in (numbers[1:], numbers[:, 1:]):
        near = numbers[: shifted.shape[0], : shifted.shape[1]]
        assert abs(np.corrcoef(near.ravel(), shifted.ravel())[0, 1]) < 0.02
    assert len(np.unique(numbers)) == numbers.size
