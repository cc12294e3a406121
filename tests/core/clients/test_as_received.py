"""What a server wrote goes back to it as it was: servers that refuse, or lose, anything else."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

import verifiers as vf
from verifiers.clients.payload import sendable
from verifiers.testing import Behaviour, FakeServer


def look(word: str) -> str:
    """Look up."""
    return {"a": "alpha", "b": "beta"}.get(word, "?")


def done(completion) -> float:
    return float(completion[-1]["content"] == "done")


def call(arguments='{"word": "a"}', call_id="c1", **further):
    function = {"name": "look", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function, **further}


def chat(message, reason="stop"):
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    return Behaviour(body=json.dumps({"choices": [choice], "usage": {}}))


def refusal(text, status=400):
    return Behaviour(status, body=json.dumps({"error": {"message": text}}))


def played(script, client_type="openai_chat_completions", num_rows=1, env=vf.ToolEnv, **settings):
    """(results, bodies of the requests) of an environment with a tool."""
    rows = [{"question": f"q{i}", "answer": "x"} for i in range(num_rows)]
    rubric = vf.Rubric(funcs=[done])
    with FakeServer("-", script=script) as server:
        config = vf.ClientConfig(client_type=client_type, api_base_url=server.url, max_retries=0)
        environment = env(tools=[look], dataset=rows, rubric=rubric)
        results = environment.evaluate(
            config, "m", num_examples=num_rows, max_concurrent=1, **settings
        )
        return results, server.requests


def in_two_turns(message, refused=lambda sent: None):
    def script(hit):
        sent = hit.json()["messages"]
        if (text := refused(sent)) is not None:
            return text if isinstance(text, Behaviour) else refusal(text)
        if any(entry["role"] == "tool" for entry in sent):
            return chat({"content": "done"})
        return chat(message, "tool_calls")

    return script


THINKING = [
    {"type": "thinking", "thinking": [{"type": "text", "text": "I look up a."}]},
    {"type": "text", "text": "Wait."},
]
DETAILS = [{"type": "reasoning.encrypted", "data": "AAAA"}]
AS_WRITTEN = {
    "reasoning": {"content": None, "reasoning": "I look."},
    "reasoning_content": {"content": None, "reasoning_content": "I look."},
    "both names": {"content": None, "reasoning": "I look.", "reasoning_content": "I look."},
    "reasoning that is empty": {"content": "", "reasoning_content": ""},
    "reasoning with details": {"content": "", "reasoning": "r", "reasoning_details": DETAILS},
    "reasoning that is an object": {"content": None, "reasoning": {"text": "r"}},
    "text beside calls": {"content": "Wait.", "reasoning": "I look."},
    "content that is empty": {"content": ""},
    "content of spaces": {"content": "\n\n"},
    "thinking parts": {"content": THINKING},
    "text parts": {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    "thinking as text": {"content": [{"type": "thinking", "thinking": "t"}, THINKING[1]]},
    "a refusal that is empty": {"content": None, "refusal": ""},
    "a number and false": {"content": None, "score": 0, "is_final": False},
}


@pytest.mark.parametrize("message", AS_WRITTEN.values(), ids=AS_WRITTEN)
def test_a_message_goes_back_as_the_server_wrote_it(message):
    results, bodies = played(in_two_turns({**message, "tool_calls": [call()]}))
    assert (results["reward"], results["errors"]) == ([1.0], [None])
    sent = bodies[1]["messages"][1]
    assert {name: sent.get(name) for name in message} == message


CALLS = {
    "an object": {"function": {"name": "look", "arguments": {"word": "a"}}},
    "an index": {"index": 0},
    "an index and a signature": {"index": 0, "extra_content": {"google": {"s": "A"}}},
    "a field in the function": {"function": {**call()["function"], "provider": "p"}},
    "a type": {"type": "tool"},
}


@pytest.mark.parametrize("fields", CALLS.values(), ids=CALLS)
def test_a_call_goes_back_as_the_server_wrote_it(fields):
    results, bodies = played(in_two_turns({"content": None, "tool_calls": [call() | fields]}))
    assert (results["reward"], results["errors"]) == ([1.0], [None])
    (sent,) = bodies[1]["messages"][1]["tool_calls"]
    assert {name: sent.get(name) for name in fields} == fields
    assert bodies[1]["messages"][2]["content"] == "alpha"


def test_an_author_reads_reasoning_under_one_name_and_the_record_keeps_both():
    results, _ = played(
        in_two_turns({"content": THINKING, "tool_calls": [call()]}), state_columns=["trajectory"]
    )
    message = results["completion"][0][0]
    assert (message.content, message.reasoning_content) == ("Wait.", "I look up a.")
    assert message.received["content"] == THINKING
    step = json.loads(json.dumps(results.outputs[0]["trajectory"], default=dict))[0]
    assert step["extras"]["received"]["content"] == THINKING
    assert "received" not in results["states"][0]["trajectory"][1]["extras"]


def test_what_a_message_received_survives_copies_and_processes():
    results, _ = played(in_two_turns({"content": THINKING, "tool_calls": [call()]}))
    message = results["completion"][0][0]
    for again in (copy.copy(message), copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
        assert again == message
        assert again.received == message.received
    assert vf.AssistantMessage("a").received is None


def test_a_message_that_an_author_changed_is_sent_as_changed():
    class Shorter(vf.ToolEnv):
        async def env_response(self, messages, state, **kwargs):
            answers = await super().env_response(messages, state, **kwargs)
            messages[-1]["content"] = "changed"
            del messages[-1]["reasoning_content"]
            return answers

    _, bodies = played(in_two_turns({"content": THINKING, "tool_calls": [call()]}), env=Shorter)
    sent = bodies[1]["messages"][1]
    assert sent["content"] == "changed"
    assert "I look" not in json.dumps(sent)


def test_messages_that_an_author_built_anew_name_reasoning_as_the_endpoint_does():
    class Anew(vf.ToolEnv):
        async def get_prompt_messages(self, state):
            return [dict(message) for message in await super().get_prompt_messages(state)]

    for name in ("reasoning", "reasoning_content"):
        message = {"content": None, name: "I look.", "tool_calls": [call()]}
        _, bodies = played(in_two_turns(message), env=Anew)
        assert bodies[1]["messages"][1][name] == "I look."


# --- ids of calls ---------------------------------------------------------------------------------


IDS = [
    ("c", "c"),
    ("", ""),
    (None, None),
    ("", "c"),
    ("c", ""),
    (" ", " "),
    ("c", "c", "c"),
    (1, 1),
]


def chat_calls(ids):
    calls = [call(json.dumps({"word": word}), i) for i, word in zip(ids, "abz", strict=False)]
    return json.dumps(
        {
            "choices": [
                {"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}
            ]
        }
    )


def messages_calls(ids):
    blocks = [
        {"type": "tool_use", "id": call_id, "name": "look", "input": {"word": word}}
        for call_id, word in zip(ids, "abz", strict=False)
    ]
    return json.dumps({"content": blocks, "stop_reason": "tool_use"})


def responses_calls(ids):
    items = [
        {
            "type": "function_call",
            "call_id": call_id,
            "name": "look",
            "arguments": json.dumps({"word": word}),
        }
        for call_id, word in zip(ids, "abz", strict=False)
    ]
    return json.dumps({"status": "completed", "output": items})


def chat_sent(body):
    sent = body["messages"]
    made = [made["id"] for made in sent[1]["tool_calls"]]
    return made, [(m["tool_call_id"], m["content"]) for m in sent[2:]]


def messages_sent(body):
    _, made, answered = body["messages"]
    ids = [block["id"] for block in made["content"]]
    return ids, [(block["tool_use_id"], block["content"]) for block in answered["content"]]


def responses_sent(body):
    items = body["input"][1:]
    made = [item["call_id"] for item in items if item["type"] == "function_call"]
    answered = [item for item in items if item["type"] == "function_call_output"]
    return made, [(item["call_id"], item["output"]) for item in answered]


DIALECTS = {
    "openai_chat_completions": (
        chat_calls,
        chat_sent,
        {"choices": [{"message": {"content": "done"}, "finish_reason": "stop"}]},
    ),
    "anthropic_messages": (
        messages_calls,
        messages_sent,
        {"content": [{"type": "text", "text": "done"}], "stop_reason": "end_turn"},
    ),
    "openai_responses": (
        responses_calls,
        responses_sent,
        {
            "status": "completed",
            "output": [{"type": "message", "content": [{"type": "output_text", "text": "done"}]}],
        },
    ),
}


@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize("kind", DIALECTS)
def test_equal_and_empty_ids_become_ids_of_their_own(kind, ids):
    write, read, end = DIALECTS[kind]
    replies = iter([write(ids), json.dumps(end)])
    results, bodies = played(lambda hit: Behaviour(body=next(replies)), kind)
    assert (results["reward"], results["errors"]) == ([1.0], [None])
    made, answered = read(bodies[1])
    assert len(set(made)) == len(ids)
    assert all(isinstance(call_id, str) and call_id.strip() for call_id in made)
    assert answered == list(zip(made, ["alpha", "beta", "?"], strict=False))
    received = results["states"][0]["trajectory"][0]["extras"]["received"]
    parts = received["tool_calls"] if isinstance(received, dict) else received
    assert [part.get("call_id", part.get("id")) for part in parts] == list(ids)


def test_ids_of_their_own_are_those_of_the_reply():
    """Negative control: nothing is renamed where there is no need."""
    results, bodies = played(
        in_two_turns({"content": None, "tool_calls": [call(call_id="call_0"), call(call_id="1")]})
    )
    assert [made["id"] for made in bodies[1]["messages"][1]["tool_calls"]] == ["call_0", "1"]
    assert results["states"][0]["trajectory"][0]["extras"] == {}


# --- concessions ----------------------------------------------------------------------------------


def has_null(sent):
    return any(message.get("content") is None for message in sent)


def has_parts(sent):
    return any(isinstance(message.get("content"), list) for message in sent)


def has_objects(sent):
    calls = [made for message in sent for made in message.get("tool_calls") or ()]
    return any(isinstance(made["function"]["arguments"], dict) for made in calls)


def has_index(sent):
    return any("index" in made for message in sent for made in message.get("tool_calls") or ())


PYDANTIC = {
    "detail": [
        {
            "type": "string_type",
            "loc": ["body", "messages", 1, "content"],
            "msg": "Input should be a valid string",
        }
    ]
}
CONCESSIONS = {
    "Ollama": (has_null, refusal("invalid message content type: <nil>")),
    "pydantic": (has_null, Behaviour(422, body=json.dumps(PYDANTIC))),
    "OpenAI": (
        has_null,
        refusal("Invalid type for 'messages[1].content': expected a string, but got null instead."),
    ),
    "serde": (has_null, refusal("messages[1]: missing field `content` at line 1", 422)),
    "jsonschema": (has_null, refusal("'content' is a required property - 'messages.1'")),
    "a template": (has_null, refusal('can only concatenate str (not "NoneType") to str', 500)),
    "llama.cpp": (has_null, refusal("Expected 'content' to be a string, got null", 500)),
    "must not be empty": (has_null, refusal("messages.1.content must not be empty")),
    "text alone": (has_parts, refusal("messages[1].content: expected a string")),
    "text alone of pydantic": (has_parts, Behaviour(422, body=json.dumps(PYDANTIC))),
    "arguments as text": (
        has_objects,
        refusal("messages.1.tool_calls.0.function.arguments: Input should be a valid string", 422),
    ),
    "no index": (has_index, refusal("messages[1].tool_calls[0].index: Extra inputs", 422)),
}


@pytest.mark.parametrize(("refused", "reply"), CONCESSIONS.values(), ids=CONCESSIONS)
def test_what_an_endpoint_refuses_is_adapted_from_then_on(refused, reply):
    content = THINKING if refused is has_parts else None
    arguments = {"word": "a"} if refused is has_objects else '{"word": "a"}'
    further = {"index": 0} if refused is has_index else {}
    script = in_two_turns(
        {"content": content, "tool_calls": [call(arguments, **further)]},
        lambda sent: reply if refused(sent) else None,
    )
    results, bodies = played(script, num_rows=3)
    assert (results["reward"], results["errors"]) == ([1.0] * 3, [None] * 3)
    num_refused = sum(refused(body["messages"]) for body in bodies)
    assert 1 <= num_refused <= 2
    assert not any(refused(body["messages"]) for body in bodies[5:])


def test_a_refusal_of_something_else_is_an_error_at_once():
    """Negative control, beside a message in the form in which it was written."""
    refused = lambda sent: "temperature must be at most 1" if len(sent) > 1 else None  # noqa: E731
    results, bodies = played(
        in_two_turns({"content": None, "reasoning": "r", "tool_calls": [call()]}, refused)
    )
    assert results["errors"][0]["error"] == "ModelRefused"
    assert len(bodies) == 2


def test_a_concession_is_of_one_model():
    def script(hit):
        body = hit.json()
        name = {"old": "max_tokens", "new": "max_completion_tokens"}[body["model"]]
        if name not in body:
            (sent,) = {"max_tokens", "max_completion_tokens"} & body.keys()
            text = f"Unsupported parameter: '{sent}'. Use '{name}' instead."
            return refusal(text)
        return chat({"content": "ok"})

    with FakeServer("-", script=script) as server:
        client = vf.OpenAIChatCompletionsClient(base_url=server.url, max_retries=0)
        env = vf.SingleTurnEnv(
            dataset=[{"question": "q", "answer": "x"}], rubric=vf.Rubric(funcs=[lambda: 1.0])
        )
        for model in ("new", "old", "new", "old"):
            results = env.evaluate(client, model, sampling_args={"max_tokens": 5})
            assert results["errors"] == [None]
        assert server.count == 5  # one refusal


@pytest.mark.parametrize("message_type", ["chat", "completion"])
def test_either_name_of_the_limit_gives_way_to_the_other(message_type):
    """Also where the older name is the first choice: text completions, and clients of SDKs."""
    for wanted in ("max_tokens", "max_completion_tokens"):

        def script(hit, wanted=wanted):
            body = hit.json()
            if wanted not in body:
                return refusal("Unrecognized request argument supplied: " + " ".join(body))
            if message_type == "chat":
                return chat({"content": "ok"})
            return Behaviour(body='{"choices": [{"text": "ok", "finish_reason": "stop"}]}')

        with FakeServer("-", script=script) as server:
            env = vf.SingleTurnEnv(
                dataset=[{"prompt": "q", "answer": "x"}],
                message_type=message_type,
                rubric=vf.Rubric(funcs=[lambda: 1.0]),
            )
            config = vf.ClientConfig(api_base_url=server.url, max_retries=0)
            results = env.evaluate(config, "m", sampling_args={"max_tokens": 5})
            assert results["errors"] == [None]


def test_a_message_in_the_form_of_another_api_is_sent_in_this_ones():
    message = vf.AssistantMessage("a")
    message.keep_received([{"type": "text", "text": "a"}])
    request = vf.ModelRequest([vf.UserMessage("q"), message], "m")
    assert sendable(request) is request.prompt


# --- blocks and items -----------------------------------------------------------------------------


BLOCKS = {
    "thinking without a signature": {"type": "thinking", "thinking": "I look."},
    "thinking with an empty signature": {"type": "thinking", "thinking": "t", "signature": ""},
    "thinking that is signed": {"type": "thinking", "thinking": "t", "signature": "S"},
    "an empty thought that is signed": {"type": "thinking", "thinking": "", "signature": "S"},
    "text with citations": {"type": "text", "text": "a", "citations": [{"cited_text": "b"}]},
    "a block that nobody knows": {"type": "server_note", "note": {"k": 1}},
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_block_goes_back_as_the_server_wrote_it(block):
    made = {"type": "tool_use", "id": "c1", "name": "look", "input": {"word": "a"}, "caller": {}}
    reply = {"content": [block, made], "stop_reason": "tool_use"}
    replies = iter([json.dumps(reply), json.dumps(DIALECTS["anthropic_messages"][2])])
    results, bodies = played(lambda hit: Behaviour(body=next(replies)), "anthropic_messages")
    assert results["reward"] == [1.0]
    assert bodies[1]["messages"][1]["content"] == [block, made]


OPEN_REASONING = {
    "type": "reasoning",
    "id": "rs_9",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "I look."}],
}
ITEMS = {
    "open reasoning": OPEN_REASONING,
    "reasoning with a status": OPEN_REASONING | {"status": "completed"},
    "encrypted reasoning": {
        "type": "reasoning",
        "id": "rs_9",
        "summary": [],
        "encrypted_content": "AAAA",
    },
    "a message with its id": {
        "type": "message",
        "id": "msg_9",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
    },
}


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_an_item_goes_back_as_the_server_wrote_it(item):
    made = {
        "type": "function_call",
        "id": "fc_9",
        "call_id": "c1",
        "name": "look",
        "arguments": '{"word":"a"}',
        "status": "completed",
    }
    reply = {"status": "completed", "output": [item, made]}
    replies = iter([json.dumps(reply), json.dumps(DIALECTS["openai_responses"][2])])
    results, bodies = played(lambda hit: Behaviour(body=next(replies)), "openai_responses")
    assert results["reward"] == [1.0]
    assert bodies[1]["input"][1:3] == [item, made]
