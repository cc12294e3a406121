"""The keywords of ``evaluate`` and ``generate``: options, sampling arguments by name, older
spellings, refusals."""

from dataclasses import FrozenInstanceError

import pytest

import verifiers as vf
from support.small_envs import add_one, single_turn
from verifiers.runs.options import RunOptions, count, parse
from verifiers.testing import ScriptedClient


def evaluate(env=None, **options):
    return (env or single_turn()).evaluate(ScriptedClient(add_one), "m", **options)


def test_sampling_arguments_may_be_given_by_name():
    options, sampling = parse(
        single_turn(), {"temperature": 0.5, "max_new_tokens": 9, "max_retries": 2}
    )
    assert sampling == {"temperature": 0.5, "max_tokens": 9}
    assert options == RunOptions(max_retries=2)


def test_named_sampling_arguments_win_over_the_dict():
    client = ScriptedClient("1")
    single_turn(1).evaluate(
        client, "m", sampling_args={"temperature": 1.0, "top_p": 0.9}, temperature=0.25
    )
    sent = client.requests[0].sampling_args
    assert (sent["temperature"], sent["top_p"], sent["n"]) == (0.25, 0.9, 1)


def test_the_call_wins_over_the_environments_sampling_args():
    client = ScriptedClient("1")
    single_turn(1, sampling_args={"temperature": 1.0, "top_k": 5}).evaluate(
        client, "m", temperature=0.5
    )
    assert client.requests[0].sampling_args == {
        "n": 1,
        "extra_body": {},
        "temperature": 0.5,
        "top_k": 5,
    }


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_concurent": 4}, "did you mean 'max_concurrent'"),
        ({"temprature": 1}, "temprature"),
        ({"resum": True, "colour": 3}, "'resum'.*'colour'"),
        ({"max_concurrent": 0}, "max_concurrent must be .*not 0"),
        ({"max_concurrent": "8"}, "max_concurrent must be .*not '8'"),
        ({"max_concurrent": True}, "max_concurrent must be .*not True"),
        ({"max_concurrent_scoring": 0}, "max_concurrent_scoring must be .*not 0"),
        ({"max_retries": -1}, "max_retries must be .*not -1"),
        ({"rollout_timeout_s": 0}, "rollout_timeout_s must be .*not 0"),
        ({"rollout_timeout_s": float("nan")}, "rollout_timeout_s"),
        ({"abort_after": 1.5}, "abort_after"),
        ({"seed": "x"}, "seed must be .*not 'x'"),
        ({"state_columns": "trajectory"}, r"\['trajectory'\]"),
        ({"push_to_hub": True}, "hub_name"),
        ({"max_tokens": 5, "max_new_tokens": 5}, "older name"),
        ({"max_concurrent": 2, "max_concurrent_requests": 2}, "older name"),
        ({"sampling_args": {"n": 4}}, "rollouts_per_example"),
        ({"num_examples": 0}, "num_examples must be .*not 0"),
        ({"rollouts_per_example": 0}, "rollouts_per_example must be .*not 0"),
        ({"rollouts_per_example": 2, "num_generations": 3}, "given twice"),
        ({"n_samples": 5}, "n_samples"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_first_request(options, told):
    client = ScriptedClient("1")
    with pytest.raises(vf.ConfigError, match=told):
        single_turn().evaluate(client, "m", **options)
    assert client.requests == []


def test_defaults_pass_every_check():
    """Negative control of the refusals."""
    assert len(evaluate()) == 3


@pytest.mark.parametrize("older", ["num_generations", "group_size", "rollouts_per_example"])
def test_the_number_of_siblings_by_every_name(older):
    assert len(evaluate(**{older: 2})) == 6
    assert len(single_turn().generate(None, ScriptedClient(add_one), "m", **{older: 2})) == 6


@pytest.mark.parametrize("older", ["num_samples", "n_samples"])
def test_the_number_of_samples_by_every_name(older):
    results = single_turn().generate(None, ScriptedClient(add_one), "m", **{older: 4})
    assert results["example_ids"] == [0, 0, 1, 2]


def test_counts_that_contradict_each_other_are_refused():
    env, client = single_turn(), ScriptedClient("1")
    with pytest.raises(vf.ConfigError, match="give one of them"):
        env.generate(None, client, "m", n_samples=4, rollouts_per_example=2)
    with pytest.raises(vf.ConfigError, match="not both"):
        env.generate([{"question": "q"}], client, "m", n_samples=4)
    with pytest.raises(vf.ConfigError, match="num_examples"):
        env.generate(None, client, "m", num_examples=4)


def test_the_environment_gives_defaults():
    env = single_turn(rollouts_per_example=2, max_concurrent=1)
    client = ScriptedClient(add_one, delay_s=0.001)
    assert len(env.evaluate(client, "m")) == 6
    assert client.max_in_flight == 1
    assert len(env.evaluate(client, "m", rollouts_per_example=1, max_concurrent=3)) == 3
    assert client.max_in_flight == 3


def test_options_of_older_callers_change_nothing():
    assert len(evaluate(save_every=10, use_tqdm=True, batch_size=4)) == 3


def test_options_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        RunOptions().seed = 3


def test_count_reads_one_name():
    assert count({}, "n_samples", None) is None
    assert count({"group_size": 3}, "rollouts_per_example", None) == 3
    with pytest.raises(vf.ConfigError):
        count({}, "n_samples", 2.0)
