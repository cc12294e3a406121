"""Common prefixes are computed once, at any depth: every sample is still there, and nothing that is
computed for it changes.

Source: prefix_tree.py, packing.py, logprobs.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import MistralConfig

from support.tiny_models import VOCABULARY, build, tiny_llama, tiny_qwen3
from support.token_trees import edges, tree_samples
from verifiers.rollouts.turn import Turn
from verifiers_trainer.algorithm.aggregation import step_weights
from verifiers_trainer.algorithm.packing import forward_arguments, pack, shared
from verifiers_trainer.algorithm.prefix_tree import Nodes, Tree, node_ids, trees
from verifiers_trainer.algorithm.samples import Sample, rollout_samples
from verifiers_trainer.algorithm.teacher_view import teacher_views
from verifiers_trainer.distributed.batch_sharing import from_bytes, to_bytes
from verifiers_trainer.policy.forward_checks import can_share, check_packing, check_sharing
from verifiers_trainer.policy.logprobs import install_logprob_forward, states_of, visible_tokens

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


# --- packing --------------------------------------------------------------------------------------

GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=6)), max_size=6
)


@given(
    groups=GROUPS,
    forked=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 99)), max_size=2),
    room=st.integers(0, 60),
    world=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_every_sample_is_whole_in_its_row(groups, forked, room, world):
    samples = make_groups(groups)
    for depth, seed in forked:
        samples += tree_samples(depth, seed, group=100 + seed)
    weights = step_weights(samples, "sequence_mean").weights
    rows_R = pack(samples, weights, max_tokens=40 + room, world=world, share_prompts=True)
    assert len({len(rows) for rows in rows_R}) == 1
    seen: list[int] = []
    for row in (row for rows in rows_R for row in rows if not row.is_filler):
        assert row.num_computed <= 40 + room
        for number, index in enumerate(row.sample_indices.tolist()):
            seen.append(index)
            tokens = row.seq_ids == number
            assert row.position_ids[tokens].tolist() == list(range(samples[index].num_tokens))
            for name, of_sample in zip(IN_ROW, WHAT, strict=True):
                np.testing.assert_array_equal(
                    getattr(row, name)[tokens], getattr(samples[index], of_sample)
                )
        if row.node_ids is not None:  # a node stands for equal tokens after equal tokens
            prefix_of: dict[int, bytes] = {}
            for token, node in enumerate(row.node_ids.tolist()):
                start = token - row.position_ids[token]
                prefix = row.token_ids[start : token + 1].tobytes()
                assert prefix_of.setdefault(node, prefix) == prefix
    assert sorted(seen) == list(range(len(samples)))
    weighed = sum(float(row.weight.sum()) for rows in rows_R for row in rows)
    assert weighed == pytest.approx(sum(float(weight.sum()) for weight in weights), abs=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_as_many_tokens_are_computed_as_the_trie_has_edges(depth):
    for seed in range(10):
        samples = tree_samples(depth, seed)
        (row,) = pack(samples, [np.ones(s.num_tokens) for s in samples], max_tokens=9999)[0]
        assert row.num_computed == sum(sample.num_tokens for sample in samples)
        (row,) = pack(
            samples,
            [np.ones(s.num_tokens) for s in samples],
            max_tokens=9999,
            share_prompts=True,
        )[0]
        assert row.num_computed == edges(samples)


def test_a_node_sees_its_own_path_and_nothing_else():
    """Against the definition: token k is visible from q if the prefix at k begins the one at q."""
    for seed in range(20):
        samples = tree_samples(1 + seed % 5, seed) + tree_samples(2, 99 + seed, group=1)
        weights = [np.ones(sample.num_tokens) for sample in samples]
        (row,) = pack(samples, weights, max_tokens=9999, share_prompts=True)[0]
        nodes = Nodes.of(row.node_ids, row.position_ids)
        prefixes = []
        for token in nodes.token.tolist():
            start = token - int(row.position_ids[token])
            prefixes.append(tuple(row.token_ids[start : token + 1].tolist()))
        expected = [[q[: len(k)] == k for k in prefixes] for q in prefixes]
        visible = visible_tokens(torch.from_numpy(nodes.first), torch.from_numpy(nodes.last))
        assert visible.tolist() == expected
        parents = [prefixes.index(q[:-1]) if len(q) > 1 else -1 for q in prefixes]
        assert nodes.parent.tolist() == parents


def test_what_is_shared_and_what_is_not():
    rng = np.random.default_rng(0)
    prompt, another = rng.integers(3, VOCABULARY, 8), rng.integers(3, VOCABULARY, 8)
    another[:3] = prompt[:3]
    third = np.concatenate([prompt[:3], rng.integers(3, VOCABULARY, 5)])

    def sample(prompt: np.ndarray, *answer: int, group: int = 0, temperature: float = 1.0):
        turn = Turn(prompt, [*answer], [-1.0] * len(answer), 0)
        (made,) = rollout_samples([turn], 1.0, group=group, temperature=temperature).samples
        return made

    samples = [
        sample(prompt, 5, 6, 7),
        sample(prompt, 5, 9),
        sample(prompt, 5, 6, 7),  # the same tokens: nothing more to compute
        sample(prompt, 8, group=1),  # the same prompt in another group
        sample(another, 4, group=2),  # three tokens of at most eleven, a quarter
        sample(third, *range(10, 30), group=3),  # three of 28: less
        sample(prompt, 5, temperature=0.5),  # its logits are divided by another number
    ]
    parts = trees(samples, [0, 1, 2, 3, 4, 6], max_tokens=100)
    assert {frozenset(part.members) for part in parts} == {frozenset(range(5)), frozenset({6})}
    (tree,) = (part for part in parts if 0 in part.members)
    assert tree.members.index(2) == tree.members.index(0) + 1
    assert tree.size == edges(samples[:5])
    assert len(trees(samples, [0, 5], max_tokens=100)) == 2


def test_a_tree_that_would_be_too_large_begins_again_with_the_prompt():
    samples = make_groups([(10, [4] * 6)], seed=3)
    parts = trees(samples, range(6), max_tokens=22)
    assert len(parts) > 1
    for part in parts:
        assert part.size == edges([samples[i] for i in part.members]) <= 22
    alone = Tree((0,), (0,), samples[0].num_tokens)
    assert trees(samples, [0], max_tokens=1) == [alone]


def test_how_much_is_saved_is_told():
    samples = make_groups([(50, [5] * 8)], seed=2)
    weights = step_weights(samples, "token_mean").weights
    assert shared(pack(samples, weights, max_tokens=600), samples, weights) == 0
    rows_R = pack(samples, weights, max_tokens=600, share_prompts=True)
    assert shared(rows_R, samples, weights) > 0.7


def test_samples_with_nothing_in_common_have_no_nodes():
    """Then a row is what it is without sharing, and costs the same."""
    samples = [sample for seed in range(4) for sample in make_groups([(9, [5])], seed=seed)]
    weights = step_weights(samples, "token_mean").weights
    (plain,) = pack(samples, weights, max_tokens=600)[0]
    (row,) = pack(samples, weights, max_tokens=600, share_prompts=True)[0]
    assert row.node_ids is None
    assert row.num_computed == plain.num_computed == row.num_tokens


# --- the forward ----------------------------------------------------------------------------------


def outputs_and_gradient(model, samples, teacher=None, **layout):
    """Of every sample the log-probabilities, entropies and divergences, and the gradient of a loss
    of all of these."""
    model.zero_grad()
    by_sample: dict[int, torch.Tensor] = {}
    weights = step_weights(samples, "token_mean").weights
    for row in pack(samples, weights, max_tokens=layout.pop("max_tokens", 999), **layout)[0]:
        tensors = row.to_tensors()
        views = [] if teacher is None else teacher_views(row)
        states = [states_of(teacher, view, "cpu") for view in views]
        out = model(**forward_arguments(tensors, row), teachers=states, entropy_gradient=True)
        values = [out.logprobs, out.entropy]
        values += [out.reverse_kl, out.forward_kl] if teacher is not None else []
        table = torch.stack(values)
        credit = tensors["advantage"] * tensors["weight"]
        (table.sum(0) * credit + 0.1 * table.square().sum(0) * tensors["weight"]).sum().backward()
        for number, index in enumerate(row.sample_indices.tolist()):
            by_sample[index] = table.detach()[:, tensors["seq_ids"] == number]
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([by_sample[i] for i in sorted(by_sample)], 1), torch.cat(grads)


def assert_same(mine, theirs):
    assert (mine[0] - theirs[0]).abs().max() < 1e-5
    assert (mine[1] - theirs[1]).norm() / theirs[1].norm() < 1e-5


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_every_value_and_the_gradient_are_those_of_samples_alone(make, depth):
    model, teacher = make(), make(seed=5)
    for policy in (model, teacher):
        install_logprob_forward(policy)
    model.train()
    samples = tree_samples(depth, seed=depth) + tree_samples(2, seed=50 + depth, group=1)
    alone = outputs_and_gradient(model, samples, teacher, packing=False)
    assert_same(outputs_and_gradient(model, samples, teacher, share_prompts=True), alone)
    cut = outputs_and_gradient(model, samples, teacher, share_prompts=True, max_tokens=40)
    assert_same(cut, alone)


@pytest.mark.parametrize("recompute", [False, True])
def test_with_an_adapter_and_recomputed_layers_too(recompute):
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_llama(), lora)
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    install_logprob_forward(model)
    model.train()
    samples = tree_samples(3, seed=7)
    alone = outputs_and_gradient(model, samples, packing=False)
    assert_same(outputs_and_gradient(model, samples, share_prompts=True), alone)


def test_siblings_that_see_each_other_have_another_gradient(monkeypatch):
    """Negative control: with the plain causal mask instead."""
    model = tiny_llama()
    install_logprob_forward(model)
    samples = tree_samples(3, seed=7)
    alone = outputs_and_gradient(model, samples, packing=False)
    monkeypatch.setattr(
        "verifiers_trainer.policy.logprobs.visible_tokens",
        lambda first, last: torch.ones(*first.shape, first.shape[-1], dtype=torch.bool).tril(),
    )
    values, gradient = outputs_and_gradient(model, samples, share_prompts=True)
    assert (values - alone[0]).abs().max() > 1e-3
    assert (gradient - alone[1]).norm() / alone[1].norm() > 1e-2


def test_equal_samples_are_computed_once_and_each_has_its_loss():
    model = tiny_llama()
    install_logprob_forward(model)
    (sample, *_) = tree_samples(1, seed=1)
    twins = [sample, replace(sample, advantages=-2 * sample.advantages, rollout=1)]
    alone = outputs_and_gradient(model, twins, packing=False)
    assert_same(outputs_and_gradient(model, twins, share_prompts=True), alone)
    (row,) = pack(twins, [np.ones(sample.num_tokens)] * 2, max_tokens=99, share_prompts=True)[0]
    assert row.num_computed == sample.num_tokens == row.num_tokens // 2


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


@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_attention_that_would_not_apply_the_mask_takes_no_trees(attention):
    """Eager attention would add it: log-probabilities .1 nats off, without a word."""
    model = tiny_llama()
    install_logprob_forward(model)
    model.config._attn_implementation = attention
    samples = tree_samples(2)
    with pytest.raises(TypeError, match="attn_implementation='sdpa'"):
        outputs_and_gradient(model, samples, share_prompts=True)
    if attention == "eager":
        outputs_and_gradient(model, samples)  # without nodes as before


def test_rows_with_trees_travel_between_ranks():
    samples = tree_samples(3)
    (rows,) = pack(
        samples, step_weights(samples, "token_mean").weights, max_tokens=999, share_prompts=True
    )
    (back,) = from_bytes(to_bytes(rows))
    np.testing.assert_array_equal(back.node_ids, rows[0].node_ids)
    assert back.num_computed == rows[0].num_computed < back.num_tokens


def test_the_nodes_of_an_example():
    ids = node_ids([3, 4], [0, 2])
    nodes = Nodes.of(ids, np.array([0, 1, 2, 0, 1, 2, 3]))
    assert ids.tolist() == [0, 1, 2, 0, 1, 3, 4]
    assert [array.tolist() for array in (nodes.token, nodes.parent, nodes.first, nodes.last)] == [
        [0, 1, 2, 5, 6],
        [-1, 0, 1, 1, 3],
        [0, 0, 0, 1, 1],
        [1, 1, 0, 1, 1],
    ]
