"""A step of training where the chat template shows no tools: the model's own blocks of code, run,
answered, trained.

A one-layer model is first taught to write a block and to repeat its output. Nothing after that is
arranged: the engine knows its template, ``code_from="auto"`` asks it, and the trainer takes what
was sampled.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import verifiers as vf
from support.embedded import fine_tuned, small_model
from support.training import first_batch, small_config
from verifiers_trainer.engines.http.chat import shows_tools
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.trainer import RLTrainer

BLIND = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content +"
    " '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%"
    " endif %}"
)
QUESTION, REMINDER, CODE = "sum", "Code!", "```python\n1+2\n```"
OUTPUT = "Output:\nOut[1]: 3"


@functools.cache
def blind_tokenizer() -> Any:
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = BLIND
    return tokenizer


def said_three(completion: Any, **_: Any) -> float:
    return float((completion[-1]["content"] or "").strip() == "3")


def env(**options: Any) -> vf.PythonEnv:
    defaults = {
        "code_from": "auto",
        "blocks_system_prompt": "",
        "blocks_reminder": REMINDER,
    } | options
    rows = [{"question": QUESTION, "answer": "3"}] * 8
    rubric = vf.Rubric(funcs=[said_three])
    return vf.PythonEnv(
        "", dataset=rows, max_turns=3, rubric=rubric, sandbox="unsafe_subprocess", **defaults
    )


@pytest.fixture(scope="module")
def taught() -> Any:
    """A model that mostly writes the block and says what it printed; warm enough that siblings
    differ."""
    said = [
        ("user", f"{QUESTION}\n\n{REMINDER}"),
        ("assistant", CODE),
        ("user", OUTPUT),
        ("assistant", "3"),
    ]
    messages = [{"role": role, "content": content} for role, content in said]
    tokenizer, model = blind_tokenizer(), small_model()
    examples = []
    for turn in (1, 3):
        prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True)[
            "input_ids"
        ]
        examples.append(
            (
                prompt,
                [
                    *prompt,
                    *tokenizer(messages[turn]["content"])["input_ids"],
                    tokenizer.eos_token_id,
                ],
            )
        )
    return fine_tuned(model, examples)


def trainer_of(folder, environment, model):
    config = small_config(
        folder, batch_size=12, rollouts_per_example=6, max_seq_len=512, max_tokens=40, temperature=0.9, max_steps=1,
        zero_variance="keep",
    )  # fmt: skip
    return RLTrainer(model, environment, config, blind_tokenizer())


def test_code_runs_and_what_it_printed_carries_no_loss(tmp_path, taught):
    tokenizer = blind_tokenizer()
    with trainer_of(tmp_path, env(), taught) as trainer:
        batch = first_batch(trainer)
    records = [record for group in batch.groups for record in group.rollouts]
    ran = [record for record in records if len(record.turns) > 1]
    assert len(ran) >= 3, "the model does not write its block"
    for record in ran:
        first, second = record.turns[:2]
        sampled = [*first.prompt_ids.tolist(), *first.completion_ids.tolist()]
        assert second.prompt_ids[: len(sampled)].tolist() == sampled
        assert "user\nOutput:\n" in tokenizer.decode(second.prompt_ids[len(sampled) :].tolist())
    assert any(OUTPUT in tokenizer.decode(record.turns[1].prompt_ids) for record in ran)
    trained = [row.token_ids[row.loss_mask] for rows in batch.rows_R for row in rows]
    spoken = [turn.completion_ids for record in records for turn in record.turns]
    assert sorted(np.concatenate(trained).tolist()) == sorted(np.concatenate(spoken).tolist())
    assert any(record.reward == 1.0 for record in records)


def test_with_the_tool_alone_the_same_model_runs_nothing(tmp_path, taught, caplog):
    """Negative control, and the run says why."""
    environment = env(code_from="tool")
    with (
        trainer_of(tmp_path, environment, taught) as trainer,
        caplog.at_level("WARNING", "verifiers"),
    ):
        results = environment.evaluate(trainer.client, num_examples=2)
    assert results["metrics"]["python_calls"] == [0.0, 0.0]
    assert (
        'shows no tools, so the model does not know that it can call python; code_from="blocks"'
        in caplog.text
    )


def test_what_a_chat_template_shows():
    assert shows_tools(build_tiny_tokenizer()) is True
    assert shows_tools(blind_tokenizer()) is False
    refusing, without = build_tiny_tokenizer(), build_tiny_tokenizer()
    refusing.chat_template = "{{ raise_exception('no') }}"
    without.chat_template = None
    assert shows_tools(refusing) is None
    assert shows_tools(without) is None
