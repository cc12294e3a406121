"""Models whose template or tokenizer is not plain ChatML: roles, named templates, tags that are
special tokens, end tokens that somebody writes."""

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the trainer")
from tokenizers import AddedToken

from verifiers_trainer.engines.exact.history import ExactHistory
from verifiers_trainer.engines.http.chat import BadRequest, ChatFormat, template_source
from verifiers_trainer.engines.http.replies import message_of
from verifiers_trainer.engines.http.tool_calls import parse_hermes, tool_call_format
from verifiers_trainer.engines.http.wire import ChatBody
from verifiers_trainer.engines.requests import Generation, GenerationRequest, SamplingParams
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

ROLES = """{%- for message in messages %}{%- if message.role in [ROLES] %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
USUAL = "'system', 'user', 'assistant', 'tool'"
CALL = '<tool_call>{"name": "look", "arguments": {"w": "a"}}</tool_call>'


def tokenizer_of(roles=USUAL):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = ROLES.replace("ROLES", roles)
    return tokenizer


def prompt_of(tokenizer, *messages):
    talk = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.decode(ChatFormat(tokenizer).prompt_ids(json.dumps(talk).encode(), None))


# --- roles


def test_a_developer_is_the_system_of_a_template_that_has_none():
    prompt = prompt_of(tokenizer_of(), ("developer", "IN CAPITALS"), ("user", "hi"))
    assert prompt.startswith("<|im_start|>system\nIN CAPITALS<|im_end|>")


def test_a_template_that_has_developers_keeps_them():
    tokenizer = tokenizer_of(USUAL + ", 'developer'")
    assert "developer\nIN CAPITALS" in prompt_of(
        tokenizer, ("developer", "IN CAPITALS"), ("user", "hi")
    )


@pytest.mark.parametrize(
    ("roles", "role"), [("'user', 'assistant'", "developer"), (USUAL, "critic")]
)
def test_a_role_that_would_vanish_is_refused_by_name(roles, role):
    with pytest.raises(BadRequest, match=f"leaves out messages of the role '{role}'"):
        prompt_of(tokenizer_of(roles), (role, "IN CAPITALS"), ("user", "hi"))


def test_the_template_alone_drops_the_message():
    """Negative control."""
    talk = [{"role": "developer", "content": "IN CAPITALS"}, {"role": "user", "content": "hi"}]
    assert "CAPITALS" not in tokenizer_of().apply_chat_template(talk, tokenize=False)


# --- named templates


def test_of_named_templates_the_one_for_tools_says_how_calls_are_written():
    tokenizer = tokenizer_of()
    tokenizer.chat_template = {
        "default": tokenizer.chat_template,
        "tool_use": '{"name": function name, "parameters": …}',
    }
    assert tool_call_format(template_source(tokenizer)) == "llama3_json"
    assert template_source(tokenizer_of()) == tokenizer_of().chat_template


# --- tags that are special tokens


def special(*tags):
    tokenizer = tokenizer_of()
    tokens = [AddedToken(tag, special=True, normalized=False) for tag in tags]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    return tokenizer


def message_from(tokenizer, text, parser=parse_hermes, **fields):
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    request = GenerationRequest("r", np.array([1], np.int32), SamplingParams(max_tokens=9))
    generation = Generation(
        request=request,
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.zeros(len(ids), np.int32),
        finish_reason="stop",
    )
    body = ChatBody(messages=b"[]", **fields)
    return message_of(generation, body, ChatFormat(tokenizer), parser, False)[0]


def test_calls_are_read_whichever_kind_of_token_the_tags_are():
    for tokenizer in (tokenizer_of(), special("<tool_call>", "</tool_call>")):
        message = message_from(tokenizer, f"Well.{CALL}")
        assert message["content"] == "Well."
        assert message["tool_calls"][0]["function"]["name"] == "look"


def test_reasoning_is_read_whichever_kind_of_token_the_tags_are():
    for tokenizer in (tokenizer_of(), special("<think>", "</think>")):
        message = message_from(
            tokenizer, "<think>so</think>yes", parser=None, separate_reasoning=True
        )
        assert (message["reasoning_content"].strip(), message["content"]) == ("so", "yes")


def test_other_special_tokens_are_left_out_as_before():
    tokenizer = special("<tool_call>", "</tool_call>", "<|other|>")
    assert message_from(tokenizer, "a<|other|>b")["content"] == "ab"
    assert ChatFormat(tokenizer_of()).special_tags == {}


def test_plain_decoding_loses_the_tags():
    """Negative control."""
    tokenizer = special("<tool_call>", "</tool_call>")
    ids = tokenizer(CALL, add_special_tokens=False)["input_ids"]
    assert "<tool_call>" not in tokenizer.decode(ids, skip_special_tokens=True)


# --- end tokens that somebody writes


@pytest.mark.parametrize("written", ["<|im_end|>", "</s>", "<|endoftext|>", "<|other|>"])
def test_a_message_that_contains_an_end_token_is_kept_whole(written):
    tokenizer = special("<|other|>", "<|endoftext|>")
    history = ExactHistory(tokenizer)
    prompt = [{"role": "user", "content": "hi"}]
    answer = {"role": "assistant", "content": "Yes."}
    ids = tokenizer("Yes.", add_special_tokens=False)["input_ids"]
    history.remember(prompt, answer, [5], ids, None)
    following = {"role": "user", "content": f"What does {written} mean?"}
    after = tokenizer.decode(history.prompt_ids([*prompt, answer, following], None, None))
    assert f"What does {written} mean?" in after


def test_a_call_whose_arguments_contain_an_end_token_is_left_as_sampled():
    tokenizer = tokenizer_of()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content +",
        "message.content + (message.tool_calls | tojson if message.tool_calls else '') +",
    )
    history = ExactHistory(tokenizer)
    prompt = [{"role": "user", "content": "hi"}]
    function = {"name": "say", "arguments": json.dumps({"text": "a<|im_end|>b"})}
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    history.remember(prompt, answer, [5], [7, 8], None)
    ids = history.prompt_ids(
        [*prompt, answer, {"role": "tool", "content": "ok", "tool_call_id": "1"}], None, None
    )
    assert "b" not in tokenizer.decode(ids[3:]).split("<|im_start|>tool")[0].replace(
        "<|im_end|>", ""
    )
