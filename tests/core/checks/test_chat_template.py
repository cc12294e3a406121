"""``check_increasing_context``: templates that only append pass, those that rewrite are shown
where."""

import pytest

from verifiers.checks.chat_template import AROUND, check_increasing_context
from verifiers.errors import ConfigError
from verifiers.testing import ByteTokenizer

CONVERSATIONS = ("plain", "think", "tools", "think and tools")
THINKING = [
    {"role": "user", "content": "number one?"},
    {"role": "assistant", "content": "<think>hm, one</think>1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
]
QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": QUERY}}


class Template(ByteTokenizer):
    """A byte tokenizer whose ``rewrite(text, prompt)`` has the last word on what is rendered."""

    def __init__(self, rewrite):
        super().__init__()
        self.rewrite = rewrite
        self.seen = []

    def apply_chat_template(
        self, conversation, tools=None, add_generation_prompt=False, tokenize=True, **_
    ):
        self.seen.append((conversation, tools))
        rendered = super().apply_chat_template(
            conversation, tools, add_generation_prompt, tokenize=False
        )
        text = self.rewrite(rendered, add_generation_prompt)
        return self.encode(text) if tokenize else text


def test_a_template_that_only_appends_passes():
    report = check_increasing_context(ByteTokenizer())

    assert report.ok
    assert report.checked == CONVERSATIONS
    assert report.first_difference is None
    assert report.advice == ""


def test_a_template_that_drops_earlier_thinking_fails_where_there_is_some():
    report = check_increasing_context(ByteTokenizer(keep_reasoning=False))

    assert not report.ok
    assert [difference.conversation for difference in report.differences] == [
        "think",
        "think and tools",
    ]
    assert "<think>" in report.advice
    assert "plain: ok" in str(report)
    assert "think: differs" in str(report)


def test_the_first_difference_names_turn_position_and_both_windows():
    first = check_increasing_context(ByteTokenizer(keep_reasoning=False), THINKING).first_difference

    before = ByteTokenizer().apply_chat_template(THINKING[:1], add_generation_prompt=True)
    assert (first.conversation, first.turn, first.part, first.position) == (
        "given",
        1,
        "answer",
        len(before),
    )
    assert first.before.text.endswith("?<|end|><|assistant|><think>h")
    assert first.after.text.endswith("?<|end|><|assistant|>1<|end|><|user|>two?<|end|>")
    assert len(first.before.ids) == 2 * AROUND
    assert first.before.ids[:AROUND] == first.after.ids[:AROUND] == tuple(before[-AROUND:])
    assert first.before.ids[AROUND] != first.after.ids[AROUND]
    assert f"token {first.position}" in str(first)


def test_a_generation_prompt_that_is_not_kept_is_told_apart():
    def opens_thinking(text, prompt):
        return text + "<think>" if prompt else text

    report = check_increasing_context(Template(opens_thinking))

    assert report.first_difference.part == "generation prompt"
    assert "add_generation_prompt" in report.advice


def test_a_template_that_rewrites_older_turns_is_told_apart():
    def forgets(text, prompt):
        return text.replace("2 + 2", "…") if "3 + 3" in text else text

    first = check_increasing_context(Template(forgets)).first_difference

    assert (first.conversation, first.turn, first.part) == ("plain", 1, "conversation")


def test_a_template_that_trims_answers_fails_for_a_conversation_where_it_matters():
    spaced = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "  1"}]
    trims = Template(lambda text, prompt: text.replace("<|assistant|>  ", "<|assistant|>"))

    assert check_increasing_context(trims).ok
    assert check_increasing_context(trims, spaced).first_difference.part == "answer"
    assert check_increasing_context(ByteTokenizer(), spaced).ok


def test_the_given_tools_are_rendered_and_called_with_arguments_that_fit():
    template = Template(lambda text, prompt: text)
    report = check_increasing_context(template, tools=[SEARCH])

    calls = [
        m["tool_calls"][0]["function"] for c, _ in template.seen for m in c if m.get("tool_calls")
    ]
    assert report.ok
    assert calls[0] == {"name": "search", "arguments": {"query": "x"}}
    assert all(tools == [SEARCH] for _, tools in template.seen)


def test_tool_calls_of_a_given_conversation_reach_the_template_as_objects():
    template = Template(lambda text, prompt: text)
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "search", "arguments": '{"query": "a"}'},
    }
    conversation = [
        {"role": "user", "content": "find a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
        {"role": "assistant", "content": "done"},
    ]

    assert check_increasing_context(template, conversation, [SEARCH]).ok
    seen = next(m for c, _ in template.seen for m in c if m.get("tool_calls"))
    assert seen["tool_calls"][0]["function"]["arguments"] == {"query": "a"}
    assert conversation[1]["tool_calls"][0] is call


@pytest.mark.parametrize(
    "form",
    [lambda ids: {"input_ids": ids}, lambda ids: [ids], lambda ids: {"input_ids": [ids]}],
    ids=("mapping", "nested", "both"),
)
def test_ids_are_read_from_any_container(form):
    class Wrapping(ByteTokenizer):
        def apply_chat_template(self, conversation, **options):
            return form(super().apply_chat_template(conversation, **options))

    assert check_increasing_context(Wrapping()).ok
    assert not check_increasing_context(Wrapping(keep_reasoning=False)).ok


def test_a_conversation_that_the_template_refuses_is_named_and_not_counted():
    def no_tools(text, prompt):
        if "<|tool|>" in text:
            raise ValueError("roles must alternate")
        return text

    report = check_increasing_context(Template(no_tools))

    assert report.ok
    assert report.checked == ("plain", "think")
    assert report.refused[0] == ("tools", "ValueError: roles must alternate")
    assert "roles must alternate" in str(report)


def test_what_cannot_be_checked_is_the_callers_mistake():
    def refuses(text, prompt):
        raise ValueError("no template")

    with pytest.raises(ConfigError, match="apply_chat_template"):
        check_increasing_context(object())
    with pytest.raises(ConfigError, match="no template"):
        check_increasing_context(Template(refuses))
    with pytest.raises(ConfigError, match="assistant"):
        check_increasing_context(ByteTokenizer(), [{"role": "user", "content": "one?"}])
