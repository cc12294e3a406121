"""A step of training in an environment with tools: the model's own calls, parsed, answered, trained
token by token.

A one-layer model is first taught, by ordinary fine-tuning, to call a tool and to repeat its result.
Nothing after that is arranged: the rollouts go through the embedded engine's endpoint, and the
trainer takes what it sampled.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

import verifiers as vf
from support.embedded import fine_tuned, small_model
from support.training import first_batch, run, small_trainer
from verifiers.errors import NoLearningSignal
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

QUESTION = "sum"
TEMPERATURE = 0.9


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def said_three(completion: Any, **_: Any) -> float:
    return float((completion[-1]["content"] or "").strip() == "3")


def env() -> vf.ToolEnv:
    rows = [{"question": QUESTION, "answer": "3"}] * 8
    return vf.ToolEnv(dataset=rows, tools=[add], max_turns=3, rubric=vf.Rubric(funcs=[said_three]))


@functools.cache
def conversation() -> list[dict[str, Any]]:
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    return [
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]


def taught() -> Any:
    """A model that mostly calls the tool and says what it answered; warm enough that siblings
    differ."""
    tokenizer, model, messages = build_tiny_tokenizer(), small_model(), conversation()
    render = functools.partial(tokenizer.apply_chat_template, tools=env().oai_tools)
    examples = []
    for turn in (1, 3):
        prompt = render(messages[:turn], add_generation_prompt=True)["input_ids"]
        ids = render(messages[: turn + 1])["input_ids"]
        assert ids[: len(prompt)] == prompt
        examples.append((prompt, ids[: len(ids) - ids[::-1].index(tokenizer.eos_token_id)]))
    return fine_tuned(model, examples)


@pytest.fixture(scope="module")
def teach():
    """Models that have all learnt the same."""
    state = taught().state_dict()

    def model() -> Any:
        built = small_model()
        built.load_state_dict(state)
        return built

    return model


def trainer_of(folder, model, **settings):
    """Two groups of six rollouts; warm enough that siblings differ."""
    return small_trainer(
        folder, env(), model, batch_size=12, rollouts_per_example=6, max_seq_len=1024, max_tokens=120,
        temperature=TEMPERATURE, max_steps=1, **settings,
    )  # fmt: skip


def test_calls_results_and_answers_are_trained_exactly_as_sampled(tmp_path, teach):
    model, tokenizer = teach(), build_tiny_tokenizer()
    with trainer_of(tmp_path, model, zero_variance="keep") as trainer:
        batch = first_batch(trainer)
        records = [record for group in batch.groups for record in group.rollouts]
        called = [record for record in records if len(record.turns) > 1]
        assert len(called) >= 3, "the model does not call its tool"
        for record in called:
            first, second = record.turns[:2]
            sampled = [*first.prompt_ids.tolist(), *first.completion_ids.tolist()]
            assert second.prompt_ids[: len(sampled)].tolist() == sampled
            answered = tokenizer.decode(
                second.prompt_ids[len(sampled) :].tolist(), skip_special_tokens=False
            )
            assert "<tool_response>\n" in answered
        assert any(
            "<tool_response>\n3\n</tool_response>" in tokenizer.decode(r.turns[1].prompt_ids)
            for r in called
        )
        trained = [row.token_ids[row.loss_mask] for rows in batch.rows_R for row in rows]
        spoken = [turn.completion_ids for record in records for turn in record.turns]
        assert sorted(np.concatenate(trained).tolist()) == sorted(np.concatenate(spoken).tolist())
        for row in (row for rows in batch.rows_R for row in rows):
            assert (row_logprobs(model, row, TEMPERATURE) - torch.from_numpy(row.sampler_logprobs))[
                row.loss_mask
            ].abs().max() < 1e-3
        assert any(record.reward == 1.0 for record in records)


def row_logprobs(model: Any, row: Any, temperature: float) -> torch.Tensor:
    """Log-probs of a packed row's tokens by plain forward passes over its samples, float32 [T]."""
    parts = []
    for sample in np.unique(row.seq_ids):
        ids = torch.from_numpy(row.token_ids[row.seq_ids == sample])[None].long()
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).logits[0, :-1] / temperature, dim=-1)
        parts.append(torch.cat([torch.zeros(1), logp.gather(1, ids[0, 1:, None])[:, 0]]))
    return torch.cat(parts)


def test_a_step_moves_the_policy_and_counts_the_calls(tmp_path, teach):
    model = teach()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with trainer_of(tmp_path, model, embedded_mode="padded") as trainer:
        log = run(trainer)
    assert len(log.steps) == 1
    assert log.steps[0]["rollouts/errors"] == 0
    assert any(
        not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters()
    )


def test_without_a_parser_nothing_is_called(tmp_path, teach):
    """Negative control: the same model, its calls left as text, never gets a result."""
    settings = {"tool_call_parser": "none", "no_signal_steps": 3}
    with (
        trainer_of(tmp_path, teach(), **settings) as trainer,
        pytest.raises(NoLearningSignal) as raised,
    ):
        first_batch(trainer)
    assert set(raised.value.histogram) == {0.0}
