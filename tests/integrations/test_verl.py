"""verl: what the agent loop gives for a row, against the recorded shapes. The real worker:
``tests/real``."""

import asyncio
import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

import verifiers as vf
from support.integration_envs import ScriptedTokens, right, tool_env
from support.peer_double import install
from verifiers_integrations import verl
from verifiers_integrations.common import peer_task

SAMPLING = {
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
}


class Base:
    """verl's base class, as far as it is used: the servers, the tokenizer, the lengths, how it
    renders a prompt."""

    def __init__(self, server_manager, tokenizer, rollout_config, renders=None):
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.rollout_config = rollout_config
        self._renders = renders

    async def ct_build_initial_tokens(self, messages, tools=None):
        if self._renders is not None:
            return self._renders
        text = self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


class Servers:
    """verl's servers over a scripted engine; remembers what it was asked."""

    def __init__(self, engine):
        self.engine, self.asked = engine, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        from verl.workers.rollout.replica import TokenOutput

        self.asked.append((request_id, sampling_params))
        ids, logprobs, _ = await self.engine(prompt_ids, {})
        ids = ids[: sampling_params["max_tokens"]]
        logprobs = logprobs[: sampling_params["max_tokens"]]
        return TokenOutput(
            token_ids=ids, log_probs=logprobs, extra_fields={"global_steps": 6 + len(self.asked)}
        )


@pytest.fixture(autouse=True)
def double(monkeypatch):
    install(monkeypatch, "verl", AgentLoopBase=Base)
    verl._loop_class.cache_clear()
    monkeypatch.setattr(verl, "_warned", set())


@pytest.fixture
def play(monkeypatch):
    """Plays one row of an environment through the loop: (output, servers)."""

    def played(env, engine=None, lengths=(1500, 400), sampling=SAMPLING, renders=None, **options):
        monkeypatch.setattr(verl, "environment", lambda env_id, env_args: env)
        engine = engine or ScriptedTokens()
        servers = Servers(engine)
        config = SimpleNamespace(prompt_length=lengths[0], response_length=lengths[1])
        loop = verl.VerifiersAgentLoop(
            servers, engine.tokenizer, config, renders, metrics=["right"], **options
        )
        task = peer_task(env.get_dataset()[2])
        extra = {"env_id": "e", "env_args": "{}", "task": json.dumps(task), "index": 2}
        return (
            asyncio.run(loop.run(dict(sampling), raw_prompt=task["prompt"], extra_info=extra)),
            servers,
        )

    return played


def test_the_output_has_the_sampled_ids_and_the_environments_reward(play):
    engine = ScriptedTokens()
    output, servers = play(tool_env(), engine)
    sampled = [
        token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask
    ]
    assert sampled == [*engine.made[0], *engine.made[1]]
    assert output.prompt_ids == engine.calls[0][0]
    between = [
        token
        for token, mask in zip(output.response_ids, output.response_mask, strict=True)
        if not mask
    ]
    assert "<tool_response>" in engine.tokenizer.decode(between)
    assert output.response_logprobs[0] == pytest.approx(-0.5)
    assert {
        value
        for value, mask in zip(output.response_logprobs, output.response_mask, strict=True)
        if not mask
    } == {0}
    assert (output.reward_score, output.num_turns) == (1.0, 4)
    extra = output.extra_fields
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (7, 8)
    info = {
        "right": 1.0,
        "vf_unscored": 0.0,
        "vf_error": 0.0,
        "vf_truncated": 0.0,
        "vf_overlong": 0.0,
    }
    assert extra["reward_extra_info"] == info
    (first, asked), (second, later) = servers.asked
    assert first == second, "one session, so that the prefix is cached"
    assert asked == {**SAMPLING, "max_tokens": 400}
    assert later["max_tokens"] == 400 - (len(engine.calls[1][0]) - len(engine.calls[0][0]))


def test_an_unknown_reward_is_masked_and_counted(play):
    def right(completion):
        raise ValueError("no judge")

    output, _ = play(tool_env(funcs=[right]))
    assert (output.reward_score, sum(output.response_mask)) == (0.0, 0)
    info = output.extra_fields["reward_extra_info"]
    assert (info["vf_unscored"], info["right"]) == (1.0, 0.0)


def test_a_rollout_that_failed_has_the_same_names_and_no_tokens(play, caplog):
    class Down(ScriptedTokens):
        async def __call__(self, prompt_ids, sampling):
            raise ConnectionError("no route")

    output, _ = play(tool_env(), Down())
    assert (output.reward_score, output.response_mask, len(output.response_ids)) == (0.0, [0], 1)
    info = output.extra_fields["reward_extra_info"]
    assert set(info) == {"right", "vf_unscored", "vf_error", "vf_truncated", "vf_overlong"}
    assert info["vf_error"] == 1.0
    assert "ConnectionError: no route" in caplog.text


def test_a_rollout_longer_than_the_tensors_is_masked_whole(play):
    output, _ = play(tool_env(), lengths=(1500, 60))
    assert (len(output.response_ids), sum(output.response_mask)) == (60, 0)
    assert output.extra_fields["reward_extra_info"]["vf_overlong"] == 1.0
    unmasked, _ = play(tool_env())
    assert sum(unmasked.response_mask) > 0, "negative control: with room it is trained"


def test_a_prompt_longer_than_the_tensors_is_masked(play):
    output, _ = play(tool_env(), lengths=(20, 400))
    assert (len(output.prompt_ids), sum(output.response_mask)) == (20, 0)


def test_another_rendering_of_the_prompt_names_the_first_difference(play):
    engine = ScriptedTokens()
    output, _ = play(tool_env(), engine)
    theirs = [*output.prompt_ids[:5], 9, *output.prompt_ids[6:]]
    with pytest.raises(vf.ConfigError, match="from token 5 on"):
        play(tool_env(), engine, renders=theirs)


def test_log_probabilities_are_required(play):
    with pytest.raises(vf.ConfigError, match="calculate_log_probs=True"):
        play(tool_env(), sampling={**SAMPLING, "logprobs": False})


class Forgets(vf.MultiTurnEnv):
    """Rewrites what was said, so that the second prompt does not begin with the first turn."""

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return [{**message, "content": message["content"].upper()} for message in messages]

    async def env_response(self, messages, state):
        return [{"role": "user", "content": "more"}]


def test_a_fork_is_refused_where_the_worker_takes_one_row(play):
    env = Forgets(
        max_turns=2, dataset=[{"question": "a"}] * 3, rubric=vf.Rubric(funcs=[lambda: 1.0])
    )
    with pytest.raises(vf.ConfigError, match=r"has 2 token samples.*history: exact"):
        play(env, ScriptedTokens(lambda prompt: "so it is"))
    rows, _ = play(env, ScriptedTokens(lambda prompt: "so it is"), forks="list")
    assert [row.reward_score for row in rows] == [1.0, 1.0]
    with pytest.raises(vf.ConfigError, match="forks is 'both'"):
        play(env, forks="both")


def test_the_data_and_the_loop_file(tmp_path, capsys):
    verl.main(["tool-test", str(tmp_path), "--max-samples", "3"])
    assert capsys.readouterr().out.split() == [
        str(tmp_path / name) for name in ("agent_loop.yaml", "eval.parquet", "train.parquet")
    ]
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]
    assert rows[0]["data_source"] == rows[0]["extra_info"]["env_id"] == "tool-test"
    assert json.loads(rows[0]["extra_info"]["task"])["prompt"] == rows[0]["prompt"]
    assert (
        verl.environment(rows[0]["extra_info"]["env_id"], rows[0]["extra_info"]["env_args"]).env_id
        == "tool-test"
    )
    loop = (tmp_path / "agent_loop.yaml").read_text(encoding="utf-8")
    assert "_target_: verifiers_integrations.verl.VerifiersAgentLoop" in loop
    assert '"calls_right"' in loop


def test_an_environment_without_an_id_cannot_be_exported(tmp_path):
    with pytest.raises(vf.ConfigError, match="load the environment by its id"):
        verl.export_dataset(tool_env(), tmp_path)


def test_a_rubric_that_compares_siblings_is_refused(monkeypatch):
    def longest(states):
        return [0.0 for _ in states]

    env = tool_env(funcs=[right])
    env.rubric.add_reward_func(longest)
    assert any(function.is_group for function in env.rubric.plan().functions)
    monkeypatch.setattr(verl, "load_environment", lambda env_id, **_: env)
    verl.environment.cache_clear()
    with pytest.raises(vf.ConfigError, match="compares siblings"):
        verl.environment("e", "{}")
