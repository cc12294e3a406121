"""A training says what did not happen in it: planted wrong settings are named with the first batch,
whether or not it has a signal, and sound runs are silent."""

from __future__ import annotations

import logging

import pytest

import verifiers as vf
from support.coverage_cases import PLANTED, SOUND
from support.pipeline import GROUP, Policy, pipeline
from support.training import metrics_of, run, small_trainer, toy_env
from verifiers.errors import NoLearningSignal, TooManyFaults
from verifiers.view.catalog import Catalog
from verifiers.view.describe import describe
from verifiers_trainer.pipeline import saved_state
from verifiers_trainer.run.progress import closing_rows
from verifiers_trainer.run.recorder import alarms

FAILS = {"a reward that fails"}
"""What ends a training is said by its error."""


def first_batch(make, reply, **settings):
    """The first batch of a training, and its environment."""
    env = make()
    with pipeline(Policy(reply), env, max_off_policy_steps=0, **settings) as source:
        return source.next_batch(), env


@pytest.mark.parametrize(
    ("make", "reply", "sentence"),
    [case for name, case in PLANTED.items() if name not in FAILS],
    ids=[name for name in PLANTED if name not in FAILS],
)
def test_a_wrong_setting_is_named_with_the_first_batch(make, reply, sentence, caplog):
    with caplog.at_level(logging.WARNING):
        batch, env = first_batch(make, reply, zero_variance="keep")
    said = [*alarms(batch.stats, env.parser).values(), *caplog.messages]
    assert [text for text in said if sentence in text], said


@pytest.mark.parametrize(("make", "reply"), SOUND.values(), ids=SOUND)
def test_a_sound_training_is_silent(make, reply, caplog):
    with caplog.at_level(logging.WARNING):
        batch, env = first_batch(make, reply, zero_variance="keep", batch_size=6 * GROUP)
    # these replies are all right, or all wrong; and rows of so few rollouts are not full
    assert alarms(batch.stats, env.parser).keys() <= {"dead_groups", "fill"}
    assert all("without a learning signal" in text for text in caplog.messages)
    assert not any("nothing for" in text or "cut by" in text for text in caplog.messages)


def test_a_reward_that_fails_ends_the_training_with_its_cause():
    make, reply, sentence = PLANTED["a reward that fails"]
    with pytest.raises(TooManyFaults, match=sentence):
        first_batch(make, reply)


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("no tag", "rollouts/unparsed"),
        ("calls as hermes", "rollouts/calls_as_text"),
        ("cut in the answer", "rollouts/truncated"),
    ],
)
def test_a_batch_without_any_signal_is_recorded_with_what_did_not_happen(name, metric, caplog):
    """It is no step, so that no step can say so."""
    make, reply, sentence = PLANTED[name]
    kept = []
    settings = {"max_off_policy_steps": 0, "no_signal_steps": 1, "max_concurrent": 2 * GROUP}
    with pipeline(Policy(reply), make(), **settings) as source:
        source.pipeline._record_dropped = lambda step, groups, numbers: kept.append(numbers)
        with pytest.raises(NoLearningSignal, match="Correct that first") as raised:
            source.next_batch()
    sentence = sentence.replace("XMLParser", "the environment's parser")
    assert sentence in str(raised.value)
    assert any(sentence in text for text in caplog.messages)
    assert kept[0][metric] == kept[0]["rollouts/generated"] > 0


def test_what_a_parser_found_survives_a_checkpoint():
    make, reply, _ = PLANTED["no tag"]
    batch, _ = first_batch(make, reply, zero_variance="keep")
    (group, *_) = batch.groups
    copied = saved_state._group_from_json(saved_state._group_to_json(group))
    assert [rollout.is_unparsed for rollout in copied.rollouts] == [True] * GROUP


def test_metrics_log_view_and_summary_of_a_training_agree(tmp_path, caplog):
    env = toy_env(parser=vf.XMLParser(["answer"]))
    with caplog.at_level(logging.WARNING):
        training = small_trainer(tmp_path, env, max_steps=2, zero_variance="keep")
        run(training)
    lines = metrics_of(tmp_path)
    assert [line["rollouts/unparsed"] for line in lines] == [8, 8]
    assert lines[0]["alarm/truncated"] == lines[0]["alarm/unparsed"] == 1
    for sentence in ("7 of 8 rollouts were cut", "8 of 8 replies have nothing for XMLParser"):
        assert sum(sentence in text for text in caplog.messages) == 1, caplog.messages
    for shown in (
        dict(closing_rows(tmp_path, None, None, [])),
        dict(describe(next(iter(Catalog([tmp_path]).sources().values())))["coverage"]),
    ):
        assert shown["unparsed"] == "the parser found nothing in 16 of 16"
        assert shown["truncated"].endswith(" of 16")
