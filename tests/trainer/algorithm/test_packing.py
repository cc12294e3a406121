"""Samples to rows: nothing lost, cut or padded; equal counts and nearly equal tokens per rank.
Source: packing.py."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.aggregation import step_weights
from verifiers_trainer.algorithm.packing import fill, filler_row, pack
from verifiers_trainer.algorithm.samples import NOT_SAMPLED, Sample, rollout_samples


def make_samples(lengths, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for rollout, length in enumerate(lengths):
        prompt = int(rng.integers(1, length))
        ids = rng.integers(0, 50, length)
        logprobs = -rng.uniform(0.1, 3, length - prompt)
        turn = Turn(ids[:prompt], ids[prompt:], logprobs, int(rng.integers(0, 9)))
        samples += rollout_samples(
            [turn], float(rng.normal()), rollout=rollout, temperature=0.5 + rollout % 3
        ).samples
    return samples


def weights_of(samples: list[Sample]) -> tuple[np.ndarray, ...]:
    return step_weights(samples, "sequence_mean").weights


def lognormal_lengths(count: int, limit: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(6.0, 0.8, count), 2, limit).astype(int)


@given(
    lengths=st.lists(st.integers(2, 40), min_size=0, max_size=60),
    room=st.integers(0, 60),
    world=st.integers(1, 5),
    packing=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_sample_is_whole_in_exactly_one_row(lengths, room, world, packing):
    samples = make_samples(lengths)
    weights = weights_of(samples)
    max_tokens = 40 + room
    rows_R = pack(samples, weights, max_tokens=max_tokens, world=world, packing=packing)
    assert len(rows_R) == world
    assert len({len(rows) for rows in rows_R}) == 1
    assert rows_R[0]
    seen = []
    for row in (row for rows in rows_R for row in rows):
        assert row.num_tokens <= max_tokens
        assert len(row.sample_indices) <= 1 or packing
        for s, index in enumerate(row.sample_indices):
            sample, part = samples[index], row.seq_ids == s
            seen.append(index)
            assert np.flatnonzero(part).tolist() == list(
                range(part.argmax(), part.argmax() + sample.num_tokens)
            )
            assert row.position_ids[part].tolist() == list(range(sample.num_tokens))
            assert row.token_ids[part].tolist() == sample.token_ids.tolist()
            assert row.loss_mask[part].tolist() == sample.loss_mask.tolist()
            assert not row.loss_mask[part][0]
            np.testing.assert_array_equal(row.sampler_logprobs[part], sample.sampler_logprobs)
            np.testing.assert_array_equal(row.advantage[part], sample.advantages)
            np.testing.assert_array_equal(row.version[part], sample.versions)
            np.testing.assert_array_equal(row.weight[part], weights[index].astype(np.float32))
            np.testing.assert_array_equal(
                row.inv_temperature[part], np.float32(sample.inv_temperature)
            )
        assert row.is_filler or row.num_tokens == sum(
            samples[i].num_tokens for i in row.sample_indices
        )
    assert sorted(seen) == list(range(len(samples)))


@pytest.mark.parametrize("world", [1, 2, 8])
def test_log_normal_lengths_fill_the_rows(world):
    samples = make_samples(lognormal_lengths(512, 4096))
    rows_R = pack(samples, weights_of(samples), max_tokens=4096, world=world)
    assert fill(rows_R, 4096) > 0.93  # rounding the rows up to 8 ranks costs the rest


def test_ranks_get_nearly_equal_tokens():
    samples = make_samples(lognormal_lengths(512, 2048))
    rows_R = pack(samples, weights_of(samples), max_tokens=4096, world=4)
    tokens = [sum(row.num_tokens for row in rows) for rows in rows_R]
    assert max(tokens) / min(tokens) < 1.02
    for i in range(len(rows_R[0])):  # and in every row, for ranks that wait for each other there
        sizes = [rows[i].num_tokens for rows in rows_R]
        assert max(sizes) / min(sizes) < 1.1


def test_few_samples_on_many_ranks_are_spread_and_the_rest_is_filler():
    samples = make_samples([5, 4, 3])
    rows_R = pack(samples, weights_of(samples), max_tokens=100, world=5)
    assert [len(rows) for rows in rows_R] == [1] * 5
    assert sorted(rows[0].num_tokens for rows in rows_R) == [1, 1, 3, 4, 5]
    assert sum(rows[0].is_filler for rows in rows_R) == 2


def test_a_filler_carries_no_loss():
    row = filler_row()
    assert (row.num_tokens, row.weight.tolist(), row.loss_mask.tolist()) == (1, [0.0], [False])
    assert row.inv_temperature.tolist() == [1.0]
    assert row.version.tolist() == [NOT_SAMPLED]
    assert [[r.is_filler for r in rows] for rows in pack([], [], max_tokens=8, world=2)] == [
        [True],
        [True],
    ]


def test_samples_without_weight_are_left_out():
    samples = make_samples([5, 6, 7])
    weights = list(weights_of(samples))
    weights[1] = np.zeros(6)
    ((row,),) = pack(samples, weights, max_tokens=100)
    assert sorted(row.sample_indices) == [0, 2]


def test_what_does_not_fit_is_named_with_the_fix():
    samples = make_samples([5, 9])
    with pytest.raises(
        ValueError, match="sample 1 has 9 tokens and a row holds 8; raise micro_batch_tokens"
    ):
        pack(samples, weights_of(samples), max_tokens=8)
    weights = weights_of(samples)
    with pytest.raises(ValueError, match="sample 0 has 5 tokens and 4 weights"):
        pack(samples, [weights[0][1:], weights[1]], max_tokens=16)
    samples[0].loss_mask[0] = True
    with pytest.raises(ValueError, match="sample 0 carries loss on its first token"):
        pack(samples, weights_of(samples), max_tokens=16)


def test_the_same_input_gives_the_same_rows():
    samples = make_samples(lognormal_lengths(60, 500))
    first, second = (pack(samples, weights_of(samples), max_tokens=1000, world=3) for _ in range(2))
    for rows, again in zip(first, second, strict=True):
        assert [r.sample_indices.tolist() for r in rows] == [
            r.sample_indices.tolist() for r in again
        ]


def test_rows_become_tensors_with_the_documented_types():
    samples = make_samples([4, 3])
    ((row,),) = pack(samples, weights_of(samples), max_tokens=16)
    assert [row.token_ids.dtype, row.position_ids.dtype, row.seq_ids.dtype, row.version.dtype] == [
        np.int32
    ] * 4
    assert {
        a.dtype for a in (row.sampler_logprobs, row.advantage, row.weight, row.inv_temperature)
    } == {np.dtype(np.float32)}
    tensors = row.to_tensors("cpu")
    assert "sample_indices" not in tensors
    assert "reference_logprobs" not in tensors
    assert tensors["token_ids"].dtype == tensors["seq_ids"].dtype == torch.int64
    assert tensors["loss_mask"].dtype == torch.bool
    assert tensors["weight"].dtype == torch.float32
    assert {t.shape for t in tensors.values()} == {(7,)}


def test_ten_thousand_samples_pack_quickly():
    samples = make_samples(lognormal_lengths(10_000, 4096))
    weights = weights_of(samples)
    started = time.thread_time()
    pack(samples, weights, max_tokens=4096, world=8)
    assert time.thread_time() - started < 2.0  # CPU seconds; 0.5 on a quiet machine
