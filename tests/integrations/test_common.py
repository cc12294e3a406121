"""What every adapter stands on: token samples, unknown rewards, rows, offline groups, missing
peers."""

import json
import logging
import math
import subprocess
import sys

import numpy as np
import pytest

import verifiers as vf
from support.integration_envs import ScriptedTokens, tool_env
from verifiers.testing import ScriptedClient
from verifiers_integrations import common
from verifiers_integrations.common import (
    TokenClient,
    export_samples,
    generate_group,
    group_worth,
    limit,
    offline_groups,
    peer_task,
    row_of,
    worth,
)
from verifiers_integrations.peers import Peer, beside_trainer
from verifiers_integrations.trajectories import read_trajectories, write_trajectories
from verifiers_trainer.algorithm.samples import rollout_samples

ADAPTERS = ["common", "token_client", "offline", "peers", "trl", "prime_rl", "rllm"]
CORE_ADAPTERS = ["inspect", "inspect_task", "trajectories"]


@pytest.fixture
def engine():
    return ScriptedTokens()


async def play(engine, env=None, count=2, **options):
    env = env or tool_env()
    client = TokenClient(engine, engine.tokenizer, **options)
    return await generate_group(
        env, [peer_task(env.get_dataset()[0])] * count, client, "m", {"max_tokens": 64}
    )


async def test_the_samples_are_the_ids_that_were_sampled(engine):
    (rollout,) = await play(engine, count=1)
    (sample,) = export_samples(rollout)
    first, second = engine.made
    sampled = [
        token for token, mine in zip(sample.response_ids, sample.response_mask, strict=True) if mine
    ]
    assert sampled == first + second
    assert sample.prompt_ids + sample.response_ids == engine.calls[1][0] + second
    assert {
        value for value, mine in zip(sample.logprobs, sample.response_mask, strict=True) if not mine
    } == {0.0}
    assert (rollout["reward"], sample.is_last, sample.temperature) == (1.0, True, 1.0)
    assert 0 in sample.response_mask


async def test_a_history_that_changes_forks_and_the_last_row_is_marked(engine):
    class Forgets(vf.MultiTurnEnv):
        async def get_prompt_messages(self, state):
            asked = await super().get_prompt_messages(state)
            if not state["trajectory"]:
                return asked
            return [asked[0], {"role": "user", "content": "7 again"}]

        async def env_response(self, messages, state):
            return "and now?"

    env = Forgets(
        dataset=[{"question": "3 + 1"}], max_turns=2, rubric=vf.Rubric(funcs=[lambda: 1.0])
    )
    (rollout,) = await play(engine, env, 1)
    samples = export_samples(rollout, temperature=0.7)
    assert [sample.is_last for sample in samples] == [False, True]
    assert [sample.response_ids for sample in samples] == engine.made
    assert samples[0].temperature == 0.7


async def test_a_masked_sample_keeps_its_tokens_and_trains_none(engine):
    (rollout,) = await play(engine, count=1)
    (sample,) = export_samples(rollout)
    masked = sample.masked()
    assert masked.response_ids == sample.response_ids
    assert sum(sample.response_mask) > 0 == sum(masked.response_mask)
    assert not any(masked.logprobs)


# --- unknown rewards


def rollout(reward, error=None):
    return {"reward": reward, "error": error}


def test_an_unknown_reward_among_siblings_is_their_mean_and_masked():
    first, second, third = group_worth([rollout(1.0), rollout(math.nan), rollout(0.0)])
    assert (second.reward, second.is_masked, second.is_unscored) == (0.5, True, True)
    assert [worth_of_rollout.is_masked for worth_of_rollout in (first, third)] == [False, False]
    assert second.metrics == {"vf_unscored": 1.0}
    mean = sum(worth_of_rollout.reward for worth_of_rollout in (first, second, third)) / 3
    assert mean == 0.5, "the peer's own baseline is that of the known rewards"
    assert sum([1.0, 0.0, 0.0]) / 3 != 0.5, "negative control: 0 for the unknown one moves it"


def test_an_unknown_reward_alone_is_zero_and_masked():
    assert worth(rollout(None)) == common.Worth(0.0, True, True)
    assert group_worth([rollout(math.nan)] * 2)[0].reward == 0.0


def test_an_error_masks_a_rollout_whose_reward_is_known():
    assert worth(rollout(0.25, {"error": "ToolError"})) == common.Worth(0.25, True, False)


# --- rows


def test_a_row_goes_to_a_peer_and_comes_back():
    env = tool_env()
    task = peer_task(env.get_dataset()[2])
    assert json.loads(json.dumps(task)) == task
    assert (task["answer"], task["example_id"], task["info"]) == ("3", 2, {"n": 2})
    assert row_of(task)["prompt"][-1].content == "2 + 1"
    assert row_of({"prompt": task["prompt"], "example_id": 5})["info"] == {}
    with pytest.raises(vf.ConfigError, match="example_id"):
        row_of({"prompt": task["prompt"]})


def test_limit_takes_the_head_of_both_sets():
    env = tool_env(4)
    train, held_out = limit(env, 3)
    assert [task["example_id"] for task in train] == [0, 1, 2]
    assert len(held_out) == 2
    assert len(limit(env, None)[0]) == 4
    with pytest.raises(vf.ConfigError, match="max_samples is 0"):
        limit(env, 0)


# --- the file of trajectories


async def test_trajectories_go_through_a_file_to_groups_unchanged(engine, tmp_path):
    env = tool_env(2)
    client = TokenClient(engine, engine.tokenizer)
    results = await env.evaluate(
        client, "m", num_examples=2, rollouts_per_example=2, state_columns=["trajectory"]
    )
    path = tmp_path / "t.jsonl"
    assert write_trajectories(results, path) == 4
    groups = offline_groups(path)
    assert [len(group.rollouts) for group in groups] == [2, 2]
    for group, outputs in zip(groups, (results.outputs[:2], results.outputs[2:]), strict=True):
        for record, output in zip(group.rollouts, outputs, strict=True):
            again, direct = _merged(record.turns), _merged(common.record_of(output).turns)
            for name in ("token_ids", "loss_mask", "sampler_logprobs"):
                np.testing.assert_array_equal(getattr(again, name), getattr(direct, name))
            assert record.reward == output["reward"]


def _merged(turns):
    (sample,) = rollout_samples(turns, 0.0).samples
    return sample


def test_a_run_directory_is_exported_too(tmp_path):
    tool_env(1).evaluate(
        ScriptedClient("3", tokens=True),
        "m",
        results_path=tmp_path / "run",
        state_columns=["trajectory"],
    )
    assert write_trajectories(tmp_path / "run", tmp_path / "t.jsonl") == 1
    assert read_trajectories(tmp_path / "t.jsonl")[0].reward == 0.0


def test_an_unknown_reward_stays_unknown_through_the_file(tmp_path):
    def broken(completion):
        raise KeyError("x")

    results = tool_env(1, funcs=[broken]).evaluate(
        ScriptedClient("3", tokens=True), "m", state_columns=["trajectory"]
    )
    write_trajectories(results, tmp_path / "t.jsonl")
    assert '"reward":null' in (tmp_path / "t.jsonl").read_text().replace(" ", "")
    assert math.isnan(read_trajectories(tmp_path / "t.jsonl")[0].reward)
    assert math.isnan(offline_groups(tmp_path / "t.jsonl")[0].rollouts[0].reward)


GOOD = {
    "prompt_ids": [1],
    "completion_ids": [2, 3],
    "completion_mask": [1, 1],
    "logprobs": [-1.0, -2.0],
    "versions": [0, 0],
    "reward": 1.0,
    "advantage": 0.0,
    "example_id": 0,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"completion_mask": [1]}, "completion_mask has 1 entries for 2"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"completion_ids": "abc"}, "no trajectory"),
        ({"reward": "high"}, "no trajectory"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, change, message):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n")
    if message is None:
        assert len(read_trajectories(path)) == 2
        return
    with pytest.raises(vf.DatasetError, match=rf"t\.jsonl:2: .*{message}"):
        read_trajectories(path)


def test_rows_without_logprobs_are_no_offline_groups(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD | {"logprobs": None}) + "\n")
    assert read_trajectories(path)[0].logprobs is None
    with pytest.raises(vf.ConfigError, match="no logprobs"):
        offline_groups(path)


# --- peers


def test_a_missing_peer_says_what_to_install():
    with pytest.raises(
        ImportError, match=r"no_such_peer is not installed: pip install no-such-peer$"
    ):
        Peer("no_such_peer", "no-such-peer", (), lambda: "pip install no-such-peer").load()


def test_a_peer_of_other_versions_is_installed_beside_the_trainer():
    line = beside_trainer("verl==0.9.1")
    assert line.startswith("pip install verl==0.9.1 -e ")
    assert "packages/core; pip install --no-deps -e " in line
    assert "packages/trainer -e " in line
    assert line.endswith("packages/integrations")


def test_another_version_is_warned_of_once(caplog):
    peer = Peer("openai", "openai", ("0.0.1",), lambda: "pip install openai")
    with caplog.at_level(logging.WARNING):
        assert peer.load("types").__name__ == "openai.types"
        peer.load()
    assert [record.message.split(";")[1] for record in caplog.records] == [
        " this adapter was tested with 0.0.1"
    ]


def test_importing_an_adapter_imports_no_peer_and_no_torch():
    modules = [f"verifiers_integrations.{name}" for name in ADAPTERS]
    modules += [f"verifiers_integrations.{name}" for name in CORE_ADAPTERS]
    code = (
        f"import importlib, sys\nfor name in {modules}:"
        " importlib.import_module(name)\nprint(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "verifiers_integrations.common" in loaded
    assert not {"torch", "transformers", "trl", "rllm", "inspect_ai", "prime_rl"} & set(loaded)
