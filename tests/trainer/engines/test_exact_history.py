"""``history="exact"``: what was sampled stays as it is, so one conversation is one sample for any
chat template."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import verifiers as vf
from support.embedded import small_model
from support.fake_vllm import FakeVLLM
from support.integration_envs import ScriptedTokens, tool_env
from support.training import first_batch, run, small_config, small_policy, small_trainer, toy_env
from verifiers.errors import ConfigError, ModelRefused, OverlongPromptError
from verifiers.runs.plan import Job
from verifiers.runs.rollout import RunContext, generate_and_score
from verifiers.types import Message, ModelRequest, Response, ResponseTokens
from verifiers_trainer.algorithm.samples import rollout_samples
from verifiers_trainer.engines.exact.client import ExactClient
from verifiers_trainer.engines.exact.history import require_exact_history
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.trainer import RLTrainer

REASONING = """\
{%- macro calls(message) %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {{- '\\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > last.query %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content + calls(message) + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
"""Thoughts of turns before the last question are dropped, as in the templates of the Qwen3 family;
without thinking the prompt of each answer ends in an empty thought, which later prompts do not have
either."""
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}


def tokenizer_with(template=REASONING):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


class Talk(vf.MultiTurnEnv):
    """Three turns, with a question after each."""

    def env_response(self, messages, state):
        return [{"role": "user", "content": "Go on."}]


def talk(**options):
    return Talk(dataset=[{"question": "hm"}] * 4, rubric=toy_env().rubric, max_turns=3, **options)


class TokenServer:
    """A text route that takes token ids; scripted, since a tiny model says nothing that a parser
    could read."""

    def __init__(self, *said, template=REASONING, ends=True):
        self.script = list(said)
        self.engine = ScriptedTokens(
            lambda prompt: self.script[min(len(self.asked), len(self.script)) - 1]
        )
        self.engine.tokenizer = self.tokenizer = tokenizer_with(template)
        self.asked: list[ModelRequest] = []
        self.ends = ends

    async def complete(self, request: ModelRequest) -> Response:
        assert (request.message_type, request.tools, request.require_tokens) == (
            "completion",
            None,
            True,
        )
        self.asked.append(request)
        ids, logprobs, finish = await self.engine(list(request.prompt), dict(request.sampling_args))
        if not self.ends:
            ids, logprobs, finish = ids[:-1], logprobs[:-1], "length"
        tokens = ResponseTokens(
            *(np.array(a, t) for a, t in ((request.prompt, "i4"), (ids, "i4"), (logprobs, "f4")))
        )
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Response(
            Message(role="assistant", content=text), finish, tokens=tokens, id=f"r{len(self.asked)}"
        )

    def client(self, **options):
        return ExactClient(self, self.tokenizer, **{"max_seq_len": 4096, **options})

    def prompts(self):
        return [self.tokenizer.decode(request.prompt) for request in self.asked]


async def played(env, client, **sampling):
    example = next(iter(env.train_table))
    context = RunContext(
        client=client, model="m", sampling_args=sampling, require_tokens=True, seed=0
    )
    return await generate_and_score(env, Job(example, 0, 1, 0), context)


# --- with the trainer and a real engine -----------------------------------------------------------


def trainer_with(tmp_path, env=None, template=REASONING, model=None, **settings):
    settings = {
        "zero_variance": "keep",
        "max_seq_len": 256,
        "sampling_args": NO_THOUGHTS,
        **settings,
    }
    return RLTrainer(
        model or small_policy(),
        env or talk(),
        small_config(tmp_path, **settings),
        tokenizer_with(template),
    )


def samples_per_rollout(trainer):
    with trainer:
        records = [record for group in first_batch(trainer).groups for record in group.rollouts]
    assert {record.error for record in records} == {None}
    return [len(rollout_samples(record.turns, 0.0).samples) for record in records], records


def test_a_template_that_forgets_forks_and_exact_history_gives_one_sample(tmp_path):
    forked, _ = samples_per_rollout(trainer_with(tmp_path / "template"))
    assert set(forked) == {3}, "negative control: without it every turn is a sample of its own"
    samples_found, records = samples_per_rollout(trainer_with(tmp_path / "exact", history="exact"))
    assert set(samples_found) == {1}
    text = tokenizer_with().decode(records[0].turns[-1].prompt_ids)
    assert text.count("<think>\n\n</think>") == 3


def test_the_tokens_of_a_conversation_are_those_of_a_template_that_only_appends(tmp_path):
    """The same rollouts, token for token, where both ways mean the same."""
    plain = build_tiny_tokenizer().chat_template
    settings = {"deterministic": True, "sampling_args": {}, "template": plain}
    _, rendered = samples_per_rollout(trainer_with(tmp_path / "template", **settings))
    _, exact = samples_per_rollout(trainer_with(tmp_path / "exact", history="exact", **settings))
    for a, b in zip(rendered, exact, strict=True):
        cut = min((n for n, turn in enumerate(a.turns) if turn.is_truncated), default=len(a.turns))
        for mine, theirs in zip(a.turns[: cut + 1], b.turns, strict=False):
            assert mine.prompt_ids.tolist() == theirs.prompt_ids.tolist()
            assert mine.completion_ids.tolist() == theirs.completion_ids.tolist()
            assert mine.sampler_logprobs.tolist() == theirs.sampler_logprobs.tolist()


def test_training_and_the_hooks_go_by_it(tmp_path):
    trainer = trainer_with(tmp_path, history="exact", max_off_policy_steps=0)
    log = run(trainer)
    assert [step["samples/forks_per_rollout"] for step in log.steps] == [0, 0]
    assert max(step["sampler/log_ratio_abs"] for step in log.steps) < 1e-4
    with trainer:
        completion, _ = trainer.env.rollout(
            client=trainer.client,
            model=trainer.model,
            prompt=[{"role": "user", "content": "hm"}],
            answer="",
        )
        assert len(rollout_samples(trainer.client.turns_of(completion), 0.0).samples) == 1


def test_by_the_text_route_of_a_server(tmp_path):
    always = REASONING.replace("enable_thinking is defined and not enable_thinking", "true")
    settings = {"use_lora": True, "sampling_args": {}, "template": always}
    counts = {}
    for history in ("template", "exact"):
        with FakeVLLM(small_model(), tokenizer_with(always)) as server:
            trainer = trainer_with(
                tmp_path / history,
                model=small_model(),
                history=history,
                inference=server.url,
                **settings,
            )
            counts[history], _ = samples_per_rollout(trainer)
    assert (set(counts["template"]), set(counts["exact"])) == ({3}, {1})


def test_ids_that_no_token_has_are_sampled_sent_back_and_trained(tmp_path):
    """Vocabularies are padded: the head has more rows than the tokenizer has ids."""
    model, tokenizer = small_model(), tokenizer_with()
    weight = model.get_input_embeddings().weight.detach()
    model.resize_token_embeddings(len(tokenizer) + 200)
    with torch.no_grad():  # as likely as a letter each
        letters = weight[torch.arange(200) % 20 + 40]
        model.get_input_embeddings().weight[len(tokenizer) :] = letters
    exact = {"model": model, "history": "exact", "max_off_policy_steps": 0}
    log = run(trainer_with(tmp_path / "run", **exact))
    assert max(step["sampler/log_ratio_abs"] for step in log.steps) < 1e-5
    samples, records = samples_per_rollout(trainer_with(tmp_path / "records", **exact))
    assert set(samples) == {1}
    asked = [turn.prompt_ids for record in records for turn in record.turns[1:]]
    assert max(int(ids.max()) for ids in asked) >= len(tokenizer)


def test_a_template_that_forgets_is_no_warning_then(tmp_path, caplog):
    trainer_with(tmp_path, require_increasing_context=True, history="exact")
    assert "does not only append" not in caplog.text
    with pytest.raises(ConfigError, match="Or set history='exact'"):
        trainer_with(tmp_path, require_increasing_context=True)


def test_a_template_whose_turns_have_no_end_is_refused_before_anything_starts(tmp_path):
    endless = "{%- for m in messages %}{{ m.role }}: {{ m.content }}\n{%- endfor %}"
    with pytest.raises(ConfigError, match="ends each turn with a special token"):
        trainer_with(tmp_path, template=endless, history="exact")
    trainer_with(tmp_path, toy_env(), template=endless, history="exact")  # one turn never goes on
    with pytest.raises(
        ConfigError, match="history must be one of template, exact, not 'exakt', did you mean"
    ):
        small_trainer(tmp_path, history="exakt")


# --- what a conversation becomes ------------------------------------------------------------------


async def test_thoughts_stay_in_what_the_model_is_asked_with():
    server = TokenServer("<think>a</think>1", "<think>b</think>2", "<think>c</think>3")
    state = await played(talk(), server.client())
    first, second, third = server.prompts()
    assert second.startswith(
        f"{first}<think>a</think>1<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n"
    )
    assert third.startswith(f"{second}<think>b</think>2<|im_end|>\n<|im_start|>user\nGo on.")
    assert [m["content"] for m in state["completion"]][::2] == [
        f"<think>{t}</think>{n}" for t, n in ("a1", "b2", "c3")
    ]
    (sample,) = rollout_samples(state.rollout().turns, 0.0).samples
    trained = server.tokenizer.decode(sample.token_ids[sample.loss_mask])
    assert (
        trained
        == "<think>a</think>1<|im_end|><think>b</think>2<|im_end|><think>c</think>3<|im_end|>"
    )


async def test_a_turn_that_was_cut_gets_an_end_that_is_not_trained():
    server = TokenServer("1", ends=False)
    state = await played(talk(), server.client())
    (sample,) = rollout_samples(state.rollout().turns, 0.0).samples
    assert "1<|im_end|>\n<|im_start|>user" in server.prompts()[1]
    assert server.tokenizer.decode(sample.token_ids[sample.loss_mask]) == "111"


async def test_tools_are_called_and_answered():
    server = TokenServer(
        '<think>add</think><tool_call>\n{"name": "add", "arguments": {"a": 0, "b":'
        " 1}}\n</tool_call>",
        "1",
    )
    state = await played(tool_env(1), server.client())
    assert state["reward"] == 1.0
    assert state["completion"][0]["tool_calls"][0].name == "add"
    first, second = server.prompts()
    assert "<tools>" in first
    assert second.startswith(
        first + server.script[0] + "<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n"
    )
    assert len(rollout_samples(state.rollout().turns, 0.0).samples) == 1


@pytest.mark.parametrize(
    ("arguments", "is_same"),
    [('{"b":1,"a":0}', True), ('{\n  "a": 0,\n  "b": 1\n}', True), ('{"a": 0, "b": 2}', False)],
)
async def test_arguments_that_are_written_again_are_the_sampled_ones(arguments, is_same):
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 0, "b": 1}}\n</tool_call>'
    server = TokenServer(said, "1")
    client = server.client()
    asked = [{"role": "user", "content": "hm"}]
    tools = tool_env(1).tool_defs
    message = (await client.complete(ModelRequest(asked, "m", tools=tools, rollout_id="r"))).message
    again = {**message, "tool_calls": [vf.ToolCall(message.tool_calls[0].id, "add", arguments)]}
    result = {"role": "tool", "content": "1", "tool_call_id": message.tool_calls[0].id}
    await client.complete(ModelRequest([*asked, again, result], "m", tools=tools, rollout_id="r"))
    first, second = server.prompts()
    assert second.startswith(f"{first}{said}<|im_end|>") is is_same


async def test_thoughts_are_set_apart_when_asked():
    server = TokenServer("<think>a</think>1")
    state = await played(
        talk(), server.client(), extra_body={"separate_reasoning": True, "top_k": 3}
    )
    said = state["completion"][0]
    assert (said["reasoning_content"], said["content"]) == ("a", "1")
    assert server.asked[0].sampling_args["top_k"] == 3
    assert server.asked[0].sampling_args["max_tokens"] == 4096 - len(server.asked[0].prompt)
    assert not {"separate_reasoning", "extra_body"} & server.asked[0].sampling_args.keys()
    assert server.prompts()[1].startswith(server.prompts()[0] + "<think>a</think>1<|im_end|>")


async def test_an_edited_conversation_is_rendered_in_full():
    server = TokenServer("<think>a</think>1")
    client, asked = server.client(), [{"role": "user", "content": "hm"}]
    said = (await client.complete(ModelRequest(asked, "m", rollout_id="r"))).message
    edited = [*asked, {**said, "content": "2"}, {"role": "user", "content": "again"}]
    for messages, rollout_id in ((edited, "r"), ([*asked, said, edited[-1]], "another")):
        await client.complete(ModelRequest(messages, "m", rollout_id=rollout_id))
        full = server.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert server.prompts()[-1] == full


async def test_two_ways_to_go_on_from_one_answer_both_begin_with_it():
    server = TokenServer("<think>a</think>1", "<think>b</think>2")
    client, asked = server.client(), [{"role": "user", "content": "hm"}]
    said = (await client.complete(ModelRequest(asked, "m", rollout_id="r"))).message
    for question in ("left", "right"):
        after = [*asked, said, {"role": "user", "content": question}]
        await client.complete(ModelRequest(after, "m", rollout_id="r"))
    start = server.prompts()[0] + "<think>a</think>1<|im_end|>\n<|im_start|>user\n"
    assert [prompt.startswith(start) for prompt in server.prompts()[1:]] == [True, True]


async def test_a_prompt_of_megabytes_is_overlong_without_being_tokenized_as_a_whole():
    client = TokenServer("1").client()
    asked = ModelRequest([{"role": "user", "content": "reverse: abc " * 300_000}], "m")
    began = time.monotonic()
    with pytest.raises(OverlongPromptError, match="maximum context length is"):
        await client.complete(asked)
    assert time.monotonic() - began < 2.0


async def test_what_cannot_be_asked_is_one_sentence():
    server = TokenServer("1")
    asked = ModelRequest([{"role": "user", "content": "hm"}], "m")
    with pytest.raises(OverlongPromptError, match="max_seq_len is 3"):
        await server.client(max_seq_len=3).complete(asked)
    cut = await server.client(max_seq_len=9).complete(
        replace(asked, sampling_args={"truncate_prompt_tokens": 4})
    )
    assert cut.text == "1"
    assert server.asked.pop().sampling_args["max_tokens"] == 5
    with pytest.raises(ConfigError, match="cannot force a tool call"):
        await server.client().complete(replace(asked, sampling_args={"tool_choice": "required"}))
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(ModelRefused, match="content that is not text"):
        await server.client().complete(replace(asked, prompt=picture))
    assert server.asked == []


def test_turns_that_end_otherwise_and_calls_without_words():
    """Turns that do not end in the tokenizer's end token, and templates without what is said beside
    a call."""
    tools = tool_env(1).tool_defs
    unusable = tokenizer_with(REASONING.replace("<|im_end|>", "<|im_start|>"))
    require_exact_history(unusable, tools)
    silent = tokenizer_with(
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{{- (m.tool_calls | tojson)"
        " if m.tool_calls else m.content }}{{- '<|im_end|>\\n' }}{%- endfor %}{%- if"
        " add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    require_exact_history(silent, tools)
