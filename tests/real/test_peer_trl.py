"""The real TRL: two optimizer steps of its ``GRPOTrainer`` on our rollouts, on a CPU with a tiny
model.

Run by ``python3 tests/real/peers.py trl``.
"""

import pytest

pytest.importorskip("trl", reason="trl is not installed: python3 tests/real/peers.py trl")

import torch
from trl import GRPOConfig, GRPOTrainer

import verifiers as vf
from support.peer_double import differences
from verifiers_integrations.trl import (
    as_reward_func,
    make_rollout_func,
    reward_from_rollout,
    to_dataset,
)
from verifiers_trainer.policy.builtin_models import build_tiny_model, build_tiny_tokenizer

pytestmark = pytest.mark.real

SIBLINGS = 4


class Watched(GRPOTrainer):
    """Keeps what TRL computes its loss from."""

    def compute_loss(self, model, inputs, *args, **keywords):
        self.inputs = [*getattr(self, "inputs", []), inputs]
        return super().compute_loss(model, inputs, *args, **keywords)


class Talk(vf.MultiTurnEnv):
    """Two turns; the environment says "more" in between."""

    async def env_response(self, messages, state):
        return [{"role": "user", "content": "more"}]


def characters(completion):
    """Differs between siblings; fails, so that the reward is unknown, for about half of them."""
    count = sum(ord(letter) for message in completion for letter in message["content"] or "")
    if count % 2 == 0:
        raise ValueError("no judge")
    return (count % 7) / 7


def config(folder, **settings):
    settings = {
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": SIBLINGS,
        **settings,
    }
    return GRPOConfig(
        output_dir=str(folder), max_completion_length=8, use_cpu=True, bf16=False, report_to=[], logging_steps=1,
        save_strategy="no", learning_rate=1e-2, **settings,
    )  # fmt: skip


@pytest.fixture
def parts():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return build_tiny_model(layers=1, hidden=64, heads=2), build_tiny_tokenizer()


class Recorder:
    """A rollout function that keeps what it returned."""

    def __init__(self, inner):
        self.inner, self.made = inner, []

    def __call__(self, prompts, trainer):
        self.made.append(self.inner(prompts, trainer))
        return self.made[-1]


def train(env, parts, folder, **settings):
    model, tokenizer = parts
    rollouts = Recorder(
        make_rollout_func(env, max_seq_len=512, history=settings.pop("history", "render"))
    )
    trainer = Watched(
        model=model, processing_class=tokenizer, args=config(folder, **settings), train_dataset=to_dataset(env),
        rollout_func=rollouts, reward_funcs=reward_from_rollout,
    )  # fmt: skip
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    moved = max(
        float((value - before[name]).abs().max()) for name, value in model.state_dict().items()
    )
    rollouts.inner.close()
    return trainer, rollouts.made, moved, rollouts.inner.dropped


def test_the_peer_has_what_was_recorded():
    assert differences("trl") == []


@pytest.mark.parametrize("history", ["render", "exact"])
def test_two_steps_train_the_sampled_tokens(parts, tmp_path, history):
    rows = [{"question": f"say {n}"} for n in range(4)]
    env = Talk(dataset=rows, max_turns=2, rubric=vf.Rubric(funcs=[characters]))
    trainer, made, moved, dropped = train(env, parts, tmp_path, history=history)
    assert not (dropped and history == "exact"), "exact histories never fork"
    assert (trainer.state.global_step, moved > 0) == (2, True)
    unknown = 0
    for fields, inputs in zip(made, trainer.inputs, strict=True):
        order = [_find(inputs, ids) for ids in fields["completion_ids"]]
        assert sorted(order) == list(range(8)), (
            "every rollout is in the batch once, with its own ids"
        )
        for at, (ids, mask, logprobs) in enumerate(
            zip(fields["completion_ids"], fields["env_mask"], fields["logprobs"], strict=True)
        ):
            assert len(ids) == len(mask) == len(logprobs)
            assert 0 in mask or dropped, (
                "the environment's tokens carry no loss, unless the rollout forked"
            )
            seen = (
                inputs["completion_mask"][order[at]]
                * inputs.get("tool_mask", torch.ones(1))[order[at]]
            )
            assert seen[: len(ids)].tolist() == mask
            used = inputs["sampling_per_token_logps"][order[at]][: len(ids)]
            torch.testing.assert_close(used, torch.tensor(logprobs))
        unknown += _check_advantages(fields, inputs, order)
    assert unknown > 0, "the test has to see an unknown reward"


def _find(inputs, ids):
    (at,) = [n for n, row in enumerate(inputs["completion_ids"].tolist()) if row[: len(ids)] == ids]
    return at


def _check_advantages(fields, inputs, order):
    """Advantages are those of a baseline without the unknown rewards, which have none; how many
    were unknown."""
    unknown = 0
    advantages = inputs["advantages"].flatten()[torch.tensor(order)]
    for start in range(0, 8, SIBLINGS):
        rewards = fields["vf_reward"][start : start + SIBLINGS]
        values = torch.tensor([reward for reward in rewards if reward is not None])
        unknown += len(rewards) - len(values)
        if len(values) > 1:
            wanted = iter((values - values.mean()) / (values.std() + 1e-4))
            expected = torch.tensor([0.0 if reward is None else next(wanted) for reward in rewards])
            torch.testing.assert_close(
                advantages[start : start + SIBLINGS], expected, atol=1e-4, rtol=1e-4
            )
            if len(values) < len(rewards):
                zeros = torch.tensor([reward or 0.0 for reward in rewards])
                as_zero = (zeros - zeros.mean()) / (zeros.std() + 1e-4)
                assert not torch.allclose(as_zero, expected, atol=1e-2), (
                    "negative control: zeros move the baseline"
                )
    return unknown


def test_the_sampled_logprobs_are_those_of_the_model(parts, tmp_path):
    env = vf.load_environment("reverse-text")
    model, tokenizer = parts
    rollouts = Recorder(make_rollout_func(env))
    trainer = Watched(
        model=model, processing_class=tokenizer, args=config(tmp_path, max_steps=1, temperature=0.7),
        train_dataset=to_dataset(env, max_samples=8), rollout_func=rollouts, reward_funcs=reward_from_rollout,
    )  # fmt: skip
    untrained = build_tiny_model(layers=1, hidden=64, heads=2)
    trainer.train()
    fields = rollouts.made[0]
    for prompt, completion, logprobs in zip(
        fields["prompt_ids"], fields["completion_ids"], fields["logprobs"], strict=True
    ):
        with torch.no_grad():
            logits = (
                untrained(torch.tensor([prompt + completion]))
                .logits[0, len(prompt) - 1 : -1]
                .float()
                / 0.7
            )
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=1e-4)
    rollouts.inner.close()


def test_its_own_completions_are_scored_by_a_single_turn_environment(parts, tmp_path):
    model, tokenizer = parts
    env = vf.SingleTurnEnv(
        dataset=[{"question": f"say {n}"} for n in range(4)], rubric=vf.Rubric(funcs=[characters])
    )
    trainer = Watched(
        model=model, processing_class=tokenizer, args=config(tmp_path), train_dataset=to_dataset(env),
        reward_funcs=as_reward_func(env),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(entry.get("reward", 0) > 0 for entry in trainer.state.log_history)
