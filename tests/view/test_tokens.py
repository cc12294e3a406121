"""Numbers of single tokens in the text: of a real training's rollouts, and of an evaluation with
log-probabilities."""

from __future__ import annotations

import json
from urllib.parse import quote

import numpy as np
import pytest

from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.environments import SingleTurnEnv
from verifiers.rubrics import Rubric
from verifiers.testing import Behaviour, FakeServer

TEXTS = ["The", " answer", " is", " **", "4", "2", "**", "."]
LOGPROBS = [-0.1, -0.2, -0.01, -2.5, -0.7, -4.0, -0.3, -0.05]


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    """A training of four steps in which each batch is trained twice, so that ratios differ from
    one."""
    pytest.importorskip("verifiers_trainer")
    from support.training import run, small_trainer

    folder = tmp_path_factory.mktemp("trained")
    settings = {
        "max_steps": 4,
        "num_iterations": 2,
        "learning_rate": 0.05,
        "max_tokens": 12,
        "log_completions": True,
    }
    trainer = small_trainer(folder / "learner", **settings)
    run(trainer)
    trainer.recorder.record_dropped(5, trainer.newest.batch.groups, {})
    return folder


def test_tokens_of_a_trained_rollout_are_coloured_by_what_they_are_chosen_by(page, serve, learner):
    server = serve(learner)
    steps = server.ask("run?run=learner")["steps"]
    assert steps == [1, 2, 3, 4, -5]
    page.open(server.url + "#/training/learner/4/0")
    page.wait_text("log-probabilities of")
    assert page.texts("aside thead th") == ["function", "value"]  # the weights are not saved there
    saved = json.loads((learner / "learner/completions/step-4.jsonl").read_text().splitlines()[0])
    turn = saved["turn_tokens"][0]
    assert "".join(page.texts(".message.assistant .token[title]")) == "".join(turn["texts"])
    page.choose("Colour of the tokens", "ratio")
    ratios = np.exp(np.array(turn["policy_logprobs"]) - np.array(turn["completion_logprobs"]))
    assert abs(ratios - 1).max() > 0.05
    classes = page.js(
        "return [...document.querySelectorAll('.tokens .token')].map((t) => t.className)"
    )
    assert ["below" in name for name in classes] == [bool(ratio < 1) for ratio in ratios]
    titles = page.js("return [...document.querySelectorAll('.tokens .token')].map((t) => t.title)")
    assert f"advantage {saved['advantage']:.3f}" in titles[0] or saved["advantage"] == int(
        saved["advantage"]
    )
    assert all("in the loss" in title and "weight" in title for title in titles)
    page.picture("trained-tokens")
    page.press("ESCAPE", "l")  # leave the select box; the text in their place
    page.wait(lambda: page.count(".probabilities[open]") == 0)
    assert page.text(".message.assistant .prose")
    page.press("l")


def test_dropped_rollouts_and_those_without_signal_are_read(page, serve, learner):
    server = serve(learner)
    page.open(server.url + "#/training/learner?step=-5")
    page.wait_text("Rollouts dropped before step 5")
    page.wait_text("8 rollouts")
    rows = server.ask("columns?run=learner&step=1")["columns"]
    line = json.loads((learner / "learner/metrics.jsonl").read_text().splitlines()[0])
    assert np.mean(rows["reward"]) == pytest.approx(line["reward/mean"])
    assert sum(rows["trained"]) == line["rollouts/trained"]
    page.open(server.url + "#/training/learner?step=1")
    page.wait_text("Rollouts of step 1")
    assert "Trained" in page.texts(".head [role=columnheader]")
    page.picture("step-of-a-training")


def test_an_evaluation_with_log_probabilities_shows_them_without_more(page, serve, tmp_path):
    content = [
        {"token": text, "logprob": value} for text, value in zip(TEXTS, LOGPROBS, strict=True)
    ]
    answer = {
        "message": {"content": "".join(TEXTS)},
        "logprobs": {"content": content},
        "finish_reason": "stop",
    }
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [answer]}
    env = SingleTurnEnv(dataset=[{"question": "6 * 7?"}], rubric=Rubric(funcs=[lambda: 1.0]))
    with FakeServer("x", [Behaviour(body=json.dumps(body))]) as server:
        env.evaluate_sync(
            OpenAIChatCompletionsClient(base_url=server.url),
            "m",
            sampling_args={"logprobs": True},
            state_columns=["trajectory"],
            results_path=tmp_path / "evals/sums--m/1",
        )
    page.open(serve(tmp_path).url + "#/run/" + quote("evals/sums--m/1", safe="") + "/0")
    page.wait_text("log-probabilities of 8 tokens")
    assert "".join(page.texts(".tokens .token")) == "".join(TEXTS)
    names = page.js(
        "return [...document.querySelectorAll('.tokens .token')].map((t) => t.className)"
    )
    assert [int(name[7]) for name in names] == [min(8, int(-2 * value)) for value in LOGPROBS]
    page.picture("evaluated-tokens")
