"""Siblings behind one copy of their prompt: every sample is still there, and nothing that is
computed for it changes.

Source: shared_prompts.py, packing.py, logprobs.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig

from support.tiny_models import VOCABULARY, build, tiny_llama, tiny_qwen3
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.aggregation import step_weights
from verifiers_trainer.algorithm.packing import (
    PackedRow,
    Part,
    forward_arguments,
    pack,
    shared,
    shared_prompt_parts,
)
from verifiers_trainer.algorithm.samples import Sample, rollout_samples
from verifiers_trainer.distributed.batch_sharing import from_bytes, to_bytes
from verifiers_trainer.policy.forward_checks import can_share, check_packing, check_sharing
from verifiers_trainer.policy.logprobs import install_logprob_forward

WHAT = ("token_ids", "loss_mask", "sampler_logprobs", "advantages", "versions")
IN_ROW = ("token_ids", "loss_mask", "sampler_logprobs", "advantage", "version")


def make_groups(groups: list[tuple[int, list[int]]], seed: int = 0) -> list[Sample]:
    """A prompt of so many tokens, and answers of so many, for each group; some answers go on for a
    second turn."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for number, (prompt_len, answers) in enumerate(groups):
        prompt = rng.integers(3, VOCABULARY, prompt_len)
        for answer_len in answers:
            answer = rng.integers(3, VOCABULARY, answer_len)
            turns = [
                Turn(prompt, answer, -rng.uniform(0.1, 3, answer_len), int(rng.integers(0, 9)))
            ]
            if rng.random() < 0.3:
                said, more = rng.integers(3, VOCABULARY, 2), rng.integers(3, VOCABULARY, 3)
                turns.append(
                    Turn(np.concatenate([prompt, answer, said]), more, -rng.uniform(0.1, 3, 3), 9)
                )
            samples += rollout_samples(
                turns, float(rng.normal()), rollout=len(samples), group=number
            ).samples
    return samples


def samples_of(row: PackedRow) -> list[tuple[np.ndarray, ...]]:
    """The samples of a row as they were before: a shared prompt put back before each of its
    branches."""
    prompts = row.seq_ids if row.prompt_seq_ids is None else row.prompt_seq_ids
    are_shared = {
        int(back) for own_id, back in zip(row.seq_ids, prompts, strict=True) if own_id != back
    }
    samples = []
    for seq_id in dict.fromkeys(row.seq_ids.tolist()):
        if seq_id in are_shared:
            continue
        back = int(prompts[row.seq_ids == seq_id][0])
        positions = np.flatnonzero((row.seq_ids == seq_id) | (row.seq_ids == back))
        assert row.position_ids[positions].tolist() == list(range(len(positions)))
        samples.append(tuple(getattr(row, name)[positions] for name in IN_ROW))
    return samples


GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=6)), max_size=6
)


@given(groups=GROUPS, room=st.integers(0, 60), world=st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_every_sample_is_whole_behind_its_prompt(groups, room, world):
    samples = make_groups(groups)
    weights = step_weights(samples, "sequence_mean").weights
    rows_R = pack(samples, weights, max_tokens=30 + room, world=world, share_prompts=True)
    assert len({len(rows) for rows in rows_R}) == 1
    seen: list[int] = []
    for row in (row for rows in rows_R for row in rows if not row.is_filler):
        assert row.num_tokens <= 30 + room
        for index, arrays in zip(row.sample_indices, samples_of(row), strict=True):
            seen.append(int(index))
            for name, array in zip(WHAT, arrays, strict=True):
                np.testing.assert_array_equal(array, getattr(samples[index], name))
    assert sorted(seen) == list(range(len(samples)))
    weighed = sum(float(row.weight.sum()) for rows in rows_R for row in rows)
    assert weighed == pytest.approx(sum(float(weight.sum()) for weight in weights), abs=1e-5)


def test_only_equal_prompts_of_one_group_are_shared():
    samples = make_groups([(4, [2, 3]), (4, [2])])
    same_prompt = rollout_samples(
        [Turn(samples[0].token_ids[:4], [5], [-1.0], 0)], 1.0, group=1
    ).samples
    parts = shared_prompt_parts([*samples, *same_prompt], range(len(samples) + 1), max_tokens=100)
    assert sorted(part.members for part in parts) == [(1, 0), (2,), (3,)]
    assert [part.prompt for part in parts if len(part.members) > 1] == [4]


def test_a_part_that_would_be_too_large_begins_again_with_the_prompt():
    samples = make_groups([(10, [4] * 6)], seed=3)
    lengths = [sample.num_tokens for sample in samples]
    parts = shared_prompt_parts(samples, range(6), max_tokens=22)
    assert len(parts) > 1
    for part in parts:
        assert part.size == (10 if part.prompt else 0) + sum(
            lengths[i] - (10 if part.prompt else 0) for i in part.members
        )
        assert part.size <= 22
    assert Part((0,), 0, lengths[0]) in shared_prompt_parts(samples, [0], max_tokens=1)


def test_how_much_is_saved_is_told():
    samples = make_groups([(50, [5] * 8)], seed=2)
    weights = step_weights(samples, "token_mean").weights
    assert shared(pack(samples, weights, max_tokens=600), samples, weights) == 0
    assert (
        shared(pack(samples, weights, max_tokens=600, share_prompts=True), samples, weights) > 0.7
    )


def loss_and_gradient(model, rows_R, with_prompts: bool = True) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    total = 0.0
    for row in rows_R[0]:
        tensors = row.to_tensors()
        arguments = forward_arguments(tensors)
        if not with_prompts:
            arguments = {name: value for name, value in arguments.items() if "seq_ids" not in name}
        loss = (model(**arguments).logprobs * tensors["advantage"] * tensors["weight"]).sum()
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_the_gradient_is_that_of_samples_that_stand_alone(make, recompute):
    model = make()
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    install_logprob_forward(model)
    model.train()
    samples = make_groups([(9, [3, 1, 6]), (5, [2, 2, 2, 2]), (7, [4])])
    weights = step_weights(samples, "token_mean").weights
    loss, gradient = loss_and_gradient(model, pack(samples, weights, max_tokens=40, packing=False))
    rows_R = pack(samples, weights, max_tokens=40, share_prompts=True)
    ours, same = loss_and_gradient(model, rows_R)
    assert any(row.prompt_seq_ids is not None for row in rows_R[0])
    assert ours == pytest.approx(loss, rel=1e-5)
    assert (same - gradient).norm() / gradient.norm() < 1e-5
    # branches that see each other: another gradient
    wrong, other_gradient = loss_and_gradient(model, rows_R, with_prompts=False)
    assert (other_gradient - gradient).norm() / gradient.norm() > 1e-2
    assert abs(wrong - loss) > 1e-4


def test_a_model_whose_layers_need_another_mask_does_not_share():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    window = build(
        MistralConfig(vocab_size=VOCABULARY, **sizes, num_key_value_heads=2, sliding_window=4)
    )
    assert check_packing(window).ok
    assert not can_share(window)
    assert not check_sharing(window).ok
    assert not check_sharing(tiny_llama(attention="eager")).ok
    assert check_sharing(tiny_llama()).ok
    assert check_sharing(tiny_llama().bfloat16()).ok


def test_shared_rows_travel_between_ranks():
    samples = make_groups([(9, [3, 1, 6])])
    (rows,) = pack(
        samples, step_weights(samples, "token_mean").weights, max_tokens=60, share_prompts=True
    )
    (back,) = from_bytes(to_bytes(rows))
    np.testing.assert_array_equal(back.prompt_seq_ids, rows[0].prompt_seq_ids)
    assert back.num_tokens == rows[0].num_tokens
