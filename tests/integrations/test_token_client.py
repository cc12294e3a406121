"""The client over token-in/token-out engines: what the engine is asked, what the environment is
told."""

import asyncio
import logging

import pytest

import verifiers as vf
from support.integration_envs import CALL, ScriptedTokens, tool_env
from verifiers.data.text import split_reasoning
from verifiers.errors import MalformedResponse, ModelError
from verifiers.types import ModelRequest
from verifiers_integrations import token_client
from verifiers_integrations.common import export_samples, generate_group, peer_task
from verifiers_integrations.token_client import TokenClient

TOOLS = tool_env(1).tool_defs
ASK = [{"role": "user", "content": "4 + 1"}]


@pytest.fixture
def engine():
    return ScriptedTokens()


def client_of(engine, **options):
    return TokenClient(engine, engine.tokenizer, **options)


async def test_it_answers_as_an_openai_client(engine):
    client = client_of(engine)
    answer = await client.chat.completions.create(
        model="m", messages=ASK, tools=TOOLS, max_completion_tokens=9
    )
    choice = answer.choices[0]
    assert choice.message.tool_calls[0].function.name == "add"
    assert choice.finish_reason == "tool_calls"
    assert choice.token_ids == engine.made[0]
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(
        [-0.5 - 0.001 * n for n in range(len(engine.made[0]))]
    )
    assert answer.prompt_token_ids == engine.calls[0][0]
    assert answer.usage.completion_tokens == len(engine.made[0])
    assert engine.calls[0][1] == {"max_tokens": 9}
    assert (client.base_url, client.api_key) == ("http://token-client.invalid/v1", "none")
    text = await client_of(ScriptedTokens(lambda prompt: "yes")).completions.create(
        model="m", prompt="Is it?"
    )
    assert text.choices[0].text == "yes"


async def test_both_ways_of_asking_give_an_environment_the_same(engine):
    class OnlyOpenAI:
        def __init__(self, client):
            self.chat, self.base_url, self.api_key = client.chat, client.base_url, client.api_key

    env = tool_env(1)
    row = peer_task(env.get_dataset()[0])
    (direct,) = await generate_group(env, [row], client_of(engine), "m", {})
    (wrapped,) = await generate_group(env, [row], OnlyOpenAI(client_of(ScriptedTokens())), "m", {})
    assert export_samples(direct)[0].response_ids == export_samples(wrapped)[0].response_ids
    assert direct["reward"] == wrapped["reward"] == 1.0


async def test_sampling_reaches_the_engine_under_its_names_and_the_rest_is_left_out_once(
    engine, caplog, monkeypatch
):
    monkeypatch.setattr(token_client, "_warned", set())
    client = client_of(engine)
    asked = {
        "temperature": 0.7,
        "max_completion_tokens": 5,
        "modalities": ["text"],
        "top_p": None,
        "extra_body": {"top_k": 3, "return_token_ids": True, "cache_salt": "x"},
    }
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await client.complete(ModelRequest(ASK, "m", sampling_args=asked, seed=11))
    assert engine.calls[1][1] == {"temperature": 0.7, "top_k": 3, "max_tokens": 5, "seed": 11}
    assert sorted(record.args[0] for record in caplog.records) == ["cache_salt", "modalities"]


@pytest.mark.parametrize("asked", [{"n": 2}, {"stream": True}])
async def test_it_gives_one_whole_completion(engine, asked):
    with pytest.raises(vf.ConfigError, match="one whole completion"):
        await client_of(engine).complete(ModelRequest(ASK, "m", sampling_args=asked))


async def test_missing_logprobs_are_refused(engine):
    async def without(prompt_ids, sampling):
        return [5, 6], None, "stop"

    with pytest.raises(MalformedResponse, match="2 token ids and no log-probabilities"):
        await TokenClient(without, engine.tokenizer).complete(ModelRequest(ASK, "m"))


async def test_what_the_peer_raises_belongs_to_its_rollout(engine):
    async def broken(prompt_ids, sampling):
        if len(seen) == 1:
            raise RuntimeError("the worker died")
        return await engine(prompt_ids, sampling)

    seen = []

    async def counted(prompt_ids, sampling):
        seen.append(prompt_ids)
        return await broken(prompt_ids, sampling)

    with pytest.raises(ModelError, match="RuntimeError: the worker died"):
        await TokenClient(counted, engine.tokenizer).complete(ModelRequest(ASK, "m"))
    seen.clear()
    env = tool_env(1)
    row = peer_task(env.get_dataset()[0])
    rollouts = await generate_group(env, [row] * 3, TokenClient(counted, engine.tokenizer), "m", {})
    assert [rollout["error"] is None for rollout in rollouts].count(False) == 1
    assert [rollout["reward"] for rollout in rollouts].count(1.0) == 2


async def test_a_prompt_that_is_too_long_ends_the_rollout_as_truncated(engine):
    env = tool_env(1)
    (rollout,) = await generate_group(
        env, [peer_task(env.get_dataset()[0])], client_of(engine, max_seq_len=5), "m", {}
    )
    assert (rollout["is_truncated"], rollout["error"]) == (True, None)


async def test_a_blocking_engine_and_its_version(engine):
    def blocking(prompt_ids, sampling):
        return [7, engine.tokenizer.eos_token_id], [-0.1, -0.2], "length", 6

    response = await TokenClient(blocking, engine.tokenizer).complete(ModelRequest(ASK, "m"))
    assert (response.version, response.finish_reason) == (6, "length")


async def test_reasoning_is_parsed_when_asked(engine):
    engine.say = lambda prompt: "<think>one more</think>5"
    asked = ModelRequest(ASK, "m")
    parsed = (await client_of(engine, reasoning_parser=split_reasoning).complete(asked)).message
    assert (parsed.reasoning_content, parsed.content) == ("one more", "5")
    assert (await client_of(engine).complete(asked)).message.content == "<think>one more</think>5"


# --- history="exact"


FORGETFUL = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and not loop.last and '</think>' in m.content %}{{- m.content.split('</think>')[-1] }}
{%- else %}{{- m.content }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""Drops earlier reasoning, as templates of reasoning models do."""


def two_turns():
    class Again(vf.MultiTurnEnv):
        async def env_response(self, messages, state):
            return "again"

    return Again(
        dataset=[{"question": "4 + 1"}], max_turns=3, rubric=vf.Rubric(funcs=[lambda: 1.0])
    )


async def samples_with(
    history, template=FORGETFUL, say=lambda prompt: "<think>hm</think>5", **options
):
    engine = ScriptedTokens(say)
    engine.tokenizer.chat_template = template
    env = two_turns()
    client = client_of(engine, history=history, **options)
    (rollout,) = await generate_group(env, [peer_task(env.get_dataset()[0])], client, "m", {})
    return engine, export_samples(rollout)


async def test_exact_history_does_not_fork_where_the_template_forgets():
    _, rendered = await samples_with("render")
    assert len(rendered) == 3, "negative control: without it every turn forks"
    engine, (exact,) = await samples_with("exact")
    assert engine.calls[2][0][: len(engine.calls[1][0])] == engine.calls[1][0]
    text = engine.tokenizer.decode(exact.prompt_ids + exact.response_ids)
    turn = (
        "<think>hm</think>5<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        text == "<|im_start|>user\n4 +"
        f" 1<|im_end|>\n<|im_start|>assistant\n{turn * 2}<think>hm</think>5<|im_end|>"
    )


async def test_exact_history_renders_what_an_increasing_template_renders():
    plain = ScriptedTokens().tokenizer.chat_template
    _, (rendered,) = await samples_with("render", plain, lambda prompt: "5")
    _, (exact,) = await samples_with("exact", plain, lambda prompt: "5")
    assert (exact.prompt_ids, exact.response_ids) == (rendered.prompt_ids, rendered.response_ids)


async def test_exact_history_closes_a_turn_that_was_cut_without_training_its_end():
    engine = ScriptedTokens()
    end = engine.tokenizer.eos_token_id

    async def cut(prompt_ids, sampling):
        return (
            (await engine(prompt_ids, sampling))[0][:-1],
            [-0.5] * (len(engine.made[-1]) - 1),
            "length",
        )

    engine.say = lambda prompt: "5"
    client = TokenClient(cut, engine.tokenizer, history="exact")
    first = await client.complete(ModelRequest(ASK, "m", rollout_id="a"))
    after = [*ASK, first.message, {"role": "user", "content": "again"}]
    second = await client.complete(ModelRequest(after, "m", rollout_id="a"))
    assert first.tokens is not None
    kept = [*first.tokens.prompt_ids, *first.tokens.completion_ids]
    assert second.tokens.prompt_ids.tolist()[: len(kept) + 1] == [*kept, end]


async def test_exact_history_keeps_conversations_apart():
    engine = ScriptedTokens(lambda prompt: "5")
    client = client_of(engine, history="exact")
    said = (await client.complete(ModelRequest(ASK, "m", rollout_id="a"))).message
    after = [*ASK, said, {"role": "user", "content": "again"}]
    edited = [*ASK, {"role": "assistant", "content": "6"}, {"role": "user", "content": "again"}]
    for conversation, rollout_id in ((after, "b"), (edited, "a")):
        await client.complete(ModelRequest(conversation, "m", rollout_id=rollout_id))
        assert engine.calls[-1][0] == client.prompt_ids(conversation)


async def test_exact_history_with_tools():
    engine = ScriptedTokens()
    env = tool_env(1)
    client = client_of(engine, history="exact")
    (rollout,) = await generate_group(env, [peer_task(env.get_dataset()[0])], client, "m", {})
    assert rollout["reward"] == 1.0
    assert engine.calls[1][0][len(engine.calls[0][0]) :][: len(engine.made[0])] == engine.made[0]


async def test_exact_history_needs_a_template_that_ends_its_turns():
    with pytest.raises(vf.ConfigError, match="history is 'newest'"):
        client_of(ScriptedTokens(), history="newest")
    engine = ScriptedTokens(lambda prompt: "5")
    engine.tokenizer.chat_template = (
        "{%- for m in messages %}{{ m.role }}: {{ m.content }}\n{%- endfor %}"
    )
    client = client_of(engine, history="exact")
    said = (await client.complete(ModelRequest(ASK, "m"))).message
    with pytest.raises(vf.ConfigError, match="ends each turn"):
        await client.complete(ModelRequest([*ASK, said, ASK[0]], "m"))


async def test_many_at_once_keep_their_own_tokens(engine):
    env = tool_env(8)
    rows = [peer_task(env.get_dataset()[n]) for n in range(8)]
    client = client_of(engine)
    groups = await asyncio.gather(*(generate_group(env, [row], client, "m", {}) for row in rows))
    for n, (rollout,) in enumerate(groups):
        (sample,) = export_samples(rollout)
        assert engine.tokenizer.decode(sample.response_ids).startswith(CALL % n)
        assert rollout["reward"] == 1.0
