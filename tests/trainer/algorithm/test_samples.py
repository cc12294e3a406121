"""Turns to samples: merged by prefix, forked otherwise, every sampled token trained once. Source:
samples.py."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.samples import (
    NOT_SAMPLED,
    is_overlong,
    rollout_samples,
)

END = 2  # also the pad token


def turn(prompt, completion, version=0, **fields) -> Turn:
    return Turn(
        prompt, completion, [-0.5 - 0.01 * i for i in range(len(completion))], version, **fields
    )


def merged(turns):
    return rollout_samples(turns, 0.0).samples


def test_turns_that_extend_each_other_become_one_sample():
    first = turn([1, 15, 9], [7, END], version=4)
    second = turn([1, 15, 9, 7, END, 30, 31], [8, 8, END], version=5)
    (sample,) = merged([first, second])
    assert sample.token_ids.tolist() == [1, 15, 9, 7, END, 30, 31, 8, 8, END]
    assert sample.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 3
    assert sample.versions.tolist() == [NOT_SAMPLED] * 3 + [4, 4] + [NOT_SAMPLED] * 2 + [5, 5, 5]
    np.testing.assert_allclose(
        sample.sampler_logprobs, [0, 0, 0, -0.5, -0.51, 0, 0, -0.5, -0.51, -0.52], rtol=1e-6
    )
    assert (sample.num_trained, sample.oldest_version) == (5, 4)
    arrays = (
        sample.token_ids,
        sample.loss_mask,
        sample.sampler_logprobs,
        sample.versions,
        sample.advantages,
    )
    assert [a.dtype for a in arrays] == [np.int32, bool, np.float32, np.int32, np.float32]


def test_a_template_that_drops_earlier_thoughts_forks():
    think, close = 40, 41
    first = turn([1, 15], [think, 50, close, 7, END])
    second = turn([1, 15, 7, END, 30], [8, END])  # the server's prompt no longer holds the thought
    samples = merged([first, second])
    assert [s.token_ids.tolist() for s in samples] == [
        [1, 15, 40, 50, 41, 7, 2],
        [1, 15, 7, 2, 30, 8, 2],
    ]
    assert [s.loss_mask.tolist() for s in samples] == [
        [False] * 2 + [True] * 5,
        [False] * 5 + [True] * 2,
    ]


def test_interleaved_conversations_find_their_own_sample():
    ada = [turn([1, 10], [3, END]), turn([1, 10, 3, END, 11], [4, END])]
    bob = [turn([1, 20], [5, END]), turn([1, 20, 5, END, 21], [6, END])]
    samples = merged([ada[0], bob[0], ada[1], bob[1]])
    assert [s.token_ids.tolist() for s in samples] == [
        [1, 10, 3, 2, 11, 4, 2],
        [1, 20, 5, 2, 21, 6, 2],
    ]


def test_a_turn_that_goes_on_without_new_prompt_tokens_merges():
    (sample,) = merged([turn([1, 5], [6, 7], is_truncated=True), turn([1, 5, 6, 7], [8, END])])
    assert sample.loss_mask.tolist() == [False, False, True, True, True, True]


def test_a_second_answer_to_the_same_prompt_forks():
    samples = merged([turn([1, 5], [6]), turn([1, 5], [7])])
    assert [s.token_ids.tolist() for s in samples] == [[1, 5, 6], [1, 5, 7]]


def test_an_end_token_equal_to_the_pad_token_is_trained():
    (sample,) = merged([turn([END, END, 5], [6, END])])
    assert sample.loss_mask.tolist() == [False, False, False, True, True]


def test_versions_may_change_inside_a_completion():
    (sample,) = merged([turn([1], [5, 6, 7], version=np.array([3, 3, 4]))])
    assert sample.versions.tolist() == [NOT_SAMPLED, 3, 3, 4]
    assert sample.oldest_version == 3


def test_turns_merge_alike_whether_they_are_linked_or_compared():
    first = turn([1, 15, 9], [7, END])
    grown = [1, 15, 9, 7, END, 30]
    diverged = [1, 15, 9, 8, END, 30]
    for previous in (None, first):
        assert len(merged([first, turn(grown, [4], previous=previous)])) == 1
        assert len(merged([first, turn(diverged, [4], previous=previous)])) == 2


def test_a_link_speaks_of_its_own_parent_only():
    first, second = turn([1, 10], [3, END]), turn([1, 20], [5, END])
    third = turn([1, 20, 5, END, 21], [6], previous=first)
    assert third.num_shared == 1
    assert [len(s.token_ids) for s in merged([first, second, third])] == [4, 6]


def test_completions_that_are_empty_carry_nothing_and_break_nothing():
    assert merged([turn([1, 5], [])]) == ()
    (sample,) = merged([turn([1, 5], []), turn([1, 5, 9], [6])])
    assert sample.loss_mask.tolist() == [False, False, False, True]


def test_environment_tokens_carry_loss_only_when_asked_for():
    turns = [turn([1, 5], [6, END]), turn([1, 5, 6, END, 30, 31], [7, END])]
    (sample,) = rollout_samples(turns, [0.5, -1.0], mask_env_responses=False).samples
    assert sample.loss_mask.tolist() == [False, False] + [True] * 6
    assert sample.versions.tolist() == [
        NOT_SAMPLED,
        NOT_SAMPLED,
        0,
        0,
        NOT_SAMPLED,
        NOT_SAMPLED,
        0,
        0,
    ]
    np.testing.assert_allclose(sample.advantages, [0, 0, 0.5, 0.5, -1, -1, -1, -1])


def test_a_rollout_gives_its_samples_one_advantage_and_one_identity():
    turns = [turn([1, 5], [6]), turn([1, 9], [7, END])]
    result = rollout_samples(turns, 0.25, rollout=3, group=1, temperature=0.5)
    assert (result.excluded, result.num_forks) == (None, 1)
    for sample in result.samples:
        np.testing.assert_allclose(sample.advantages, 0.25 * sample.loss_mask)
        assert (sample.rollout, sample.group, sample.inv_temperature) == (3, 1, 2.0)


def test_credit_per_turn_follows_the_turn_into_its_sample():
    turns = [turn([1, 5], [6]), turn([1, 9], [7]), turn([1, 9, 7, 30], [8])]
    first, second = rollout_samples(turns, [1.0, 2.0, 3.0]).samples
    assert first.advantages.tolist() == [0, 0, 1]
    assert second.advantages.tolist() == [0, 0, 2, 0, 3]
    for number in (1, 2, 4):
        with pytest.raises(ValueError, match=f"{number} advantages for 3 turns"):
            rollout_samples(turns, [1.0] * number)
    for credit_of_turn in (2.0, 2, np.float32(2.0), np.array(2.0)):
        (kept,) = rollout_samples(turns[:1], credit_of_turn).samples
        assert kept.advantages.tolist() == [0, 0, 2]


def test_a_turn_without_an_advantage_carries_no_loss():
    turns = [turn([1, 5], [6]), turn([1, 9], [7]), turn([1, 9, 7, 30], [8])]
    nan = float("nan")
    first, second = rollout_samples(turns, [nan, 2.0, nan]).samples
    assert (first.num_trained, second.num_trained) == (0, 1)
    assert second.loss_mask.tolist() == [False, False, True, False, False]
    assert [sample.advantages.sum() for sample in (first, second)] == [0.0, 2.0]
    _, environment_too = rollout_samples(turns, [1.0, nan, 3.0], mask_env_responses=False).samples
    assert environment_too.loss_mask.tolist() == [False, False, False, True, True]
    assert rollout_samples(turns, [nan] * 3).excluded == "unscored"


@pytest.mark.parametrize(
    ("fields", "advantage", "options", "reason"),
    [
        ({"is_truncated": True}, 1.0, {"mask_truncated": True}, "truncated"),
        ({"is_truncated": True}, 1.0, {}, None),
        ({}, 1.0, {"max_seq_len": 4}, "overlong"),
        ({}, 1.0, {"max_seq_len": 5}, None),
        ({}, float("nan"), {}, "unscored"),
    ],
)
def test_a_rollout_that_carries_no_loss_says_why(fields, advantage, options, reason):
    result = rollout_samples([turn([1, 5, 9], [6, END], **fields)], advantage, **options)
    assert result.excluded == reason
    assert bool(result.samples) == (reason is None)


def test_a_rollout_without_completions_is_empty():
    assert rollout_samples([turn([1], [])], 1.0).excluded == "empty"
    assert rollout_samples([], 1.0).excluded == "empty"


def test_length_and_truncation_are_told_before_samples_are_made():
    turns = [turn([1, 5], [6], is_truncated=True), turn([1, 5, 6, 9], [7])]
    assert rollout_samples(turns, 1.0, mask_truncated=True).excluded == "truncated"
    assert rollout_samples(turns[1:], 1.0, mask_truncated=True).excluded is None
    assert is_overlong(turns, 4)
    assert not is_overlong(turns, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [5], [-1.0]), "no prompt ids"),
        (([1], [5, 6], [-1.0]), "2 completion ids and 1 log-probabilities"),
        (([1], [[5]], [-1.0]), "one dimension"),
        (([1], [5, 6], [-1.0, -1.0], np.array([1])), "versions of shape"),
    ],
)
def test_a_turn_that_cannot_be_trained_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Turn(*arguments)


@st.composite
def rollouts(draw) -> list[Turn]:
    """Turns of a server whose template sometimes rewrites history, over few ids so that
    coincidences happen."""
    ids = st.integers(1, 3)
    turns, context, counter = [], draw(st.lists(ids, min_size=1, max_size=4)), 0
    for _ in range(draw(st.integers(1, 6))):
        completion = draw(st.lists(ids, max_size=4))
        # a number of its own for every token
        logprobs = [-(counter + i + 1) for i in range(len(completion))]
        counter += len(completion)
        prompt, previous = list(context), turns[-1] if turns else None
        is_linked = draw(st.booleans())
        turns.append(
            Turn(prompt, completion, logprobs, len(turns), previous=previous if is_linked else None)
        )
        context = prompt + completion + draw(st.lists(ids, max_size=3))
        if draw(st.integers(0, 3)) == 0:
            context = context[draw(st.integers(0, len(context) - 1)) :]
    return turns


@given(rollouts())
@settings(max_examples=150, deadline=None)
def test_every_sampled_token_is_trained_exactly_once_on_the_servers_ids(turns):
    samples = merged(turns)
    if samples:
        trained = np.concatenate([s.sampler_logprobs[s.loss_mask] for s in samples])
    else:
        trained = np.zeros(0)
    assert sorted(trained) == sorted(np.concatenate([t.sampler_logprobs for t in turns]))
    for t in turns:
        locations = [
            (s, np.flatnonzero(np.isin(s.sampler_logprobs, t.sampler_logprobs))) for s in samples
        ]
        locations = [(s, where) for s, where in locations if len(where)]
        assert len(locations) == (1 if len(t.completion_ids) else 0)
        for s, where in locations:
            start, end = len(t.prompt_ids), t.num_tokens
            # the position the server sampled it at
            assert where.tolist() == list(range(start, end))
            # and the context it saw
            assert s.token_ids[:end].tolist() == [*t.prompt_ids, *t.completion_ids]
            assert s.loss_mask[start:end].all()
    for s in samples:
        assert not s.loss_mask[0]
        assert not s.sampler_logprobs[~s.loss_mask].any()
        assert (s.versions[~s.loss_mask] == NOT_SAMPLED).all()


@given(rollouts())
@settings(max_examples=50, deadline=None)
def test_links_change_nothing_but_the_work(turns):
    bare = [Turn(t.prompt_ids, t.completion_ids, t.sampler_logprobs, t.version) for t in turns]
    for linked, plain in zip(merged(turns), merged(bare), strict=True):
        assert linked.token_ids.tolist() == plain.token_ids.tolist()


def growing(num_turns: int, per_turn: int = 50) -> list[Turn]:
    ids = np.arange(2 * per_turn * num_turns, dtype=np.int32)
    logprobs = np.zeros(per_turn, np.float32)
    cut = [(2 * i + 1) * per_turn for i in range(num_turns)]
    turns: list[Turn] = []
    for c in cut:
        turns.append(
            Turn(ids[:c], ids[c : c + per_turn], logprobs, 0, previous=turns[-1] if turns else None)
        )
    return turns


def test_tokens_grow_linearly_with_turns_not_quadratically():
    assert [sum(s.num_tokens for s in merged(growing(n))) for n in (10, 100)] == [1000, 10000]


def test_a_hundred_turns_merge_in_milliseconds():
    turns = growing(100)
    started = time.thread_time()
    merged(turns)
    assert time.thread_time() - started < 0.1  # CPU seconds; about 1 ms
