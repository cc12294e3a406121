"""Answers and format rewards, from every form of completion, in linear time."""

import time

import pytest

from verifiers.errors import ConfigError
from verifiers.parsers import MaybeThinkParser, Parser, ThinkParser, XMLParser
from verifiers.types import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage


def said(*texts):
    return [AssistantMessage(text) for text in texts]


# --- all parsers ----------------------------------------------------------------------------------


def test_the_answer_is_in_the_last_assistant_message_whatever_follows():
    completion = [
        AssistantMessage("first"),
        AssistantMessage("second"),
        UserMessage("thanks"),
        ToolMessage("3", "c"),
    ]
    assert Parser().parse_answer(completion) == "second"


def test_text_is_parsed_and_counts_as_one_assistant_message():
    assert Parser(str.upper).parse_answer("abc") == "ABC"
    assert XMLParser(["answer"]).get_format_reward_func()("<answer>4</answer>") == 1.0


def test_no_assistant_message_means_no_answer():
    for parser in (Parser(), ThinkParser(), MaybeThinkParser(), XMLParser(["answer"])):
        assert parser.parse_answer([]) is None
        assert parser.parse_answer([UserMessage("<answer>4</answer>")]) is None


def test_content_none_reads_as_empty_text():
    completion = [AssistantMessage(None, [ToolCall("c", "f")])]
    assert Parser().parse_answer(completion) == ""
    assert XMLParser(["answer"]).parse_answer(completion) is None
    assert XMLParser(["answer"]).get_format_reward_func()(completion) == 0.0


def test_plain_dicts_and_part_lists_are_read():
    completion = [
        {"role": "assistant", "content": [{"type": "text", "text": "<answer>4</answer>"}]}
    ]
    assert XMLParser(["answer"]).parse_answer(completion) == "4"


def test_messages_by_role():
    completion = [
        SystemMessage("s"),
        UserMessage("u"),
        AssistantMessage("a"),
        ToolMessage("t", "c"),
    ]
    parser = Parser()
    assert parser.get_system_messages(completion) == [completion[0]]
    assert parser.get_user_messages(completion) == [completion[1]]
    assert parser.get_assistant_messages(completion) == [completion[2]]
    assert parser.get_tool_messages(completion) == [completion[3]]


def test_the_format_reward_function_has_its_name_and_takes_further_arguments():
    for parser in (Parser(), ThinkParser(), MaybeThinkParser(), XMLParser(["answer"])):
        function = parser.get_format_reward_func()
        assert function.__name__ == "format_reward_func"
        assert isinstance(function(completion=said("x"), state={}, answer="4"), float)


def test_subclasses_are_used_as_they_are():
    class Doubled(Parser):
        def parse(self, text):
            return text * 2

    class Shouting(XMLParser):
        def parse(self, text, strip=True, last=False):
            return super().parse(text.lower(), strip, last)

    class Constant(ThinkParser):
        def parse_answer(self, completion):
            return "42"

    assert Doubled().parse_answer(said("ab")) == "abab"
    assert Shouting(["answer"]).parse_answer(said("<ANSWER>Yes</ANSWER>")) == "yes"
    assert Constant().parse_answer([]) == "42"


# --- thinking -------------------------------------------------------------------------------------


def test_think_parser_takes_what_follows_the_last_closing_tag():
    assert ThinkParser().parse("<think>a</think> b </think> c ") == "c"
    assert ThinkParser(lambda text: text or "nothing").parse("<think>unclosed") == "nothing"


def test_maybe_think_parser_takes_the_whole_text_without_a_closing_tag():
    assert MaybeThinkParser().parse(" four ") == "four"
    assert MaybeThinkParser().parse("<think>unclosed") == "<think>unclosed"
    assert MaybeThinkParser().parse("<think>a</think> b ") == "b"
    assert MaybeThinkParser().get_format_reward_func()(said("anything")) == 1.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think>b", 1.0),
        ("\n<think>a</think>\nb", 1.0),
        ("<think></think>b", 1.0),
        ("b", 0.0),
        ("<think>a", 0.0),
        ("a</think>b", 1.0),  # the template opened the block
        ("They want <think> tags.</think>b", 0.0),
        ("<think>They want <think> tags.</think>b", 1.0),
        ("so <think>a</think>b", 0.0),
        ("<think>a</think> \n", 0.0),
        ("<think>a</think><think>b</think>c", 0.0),
        ("<think>a</think>b</think>c", 0.0),
    ],
)
def test_think_format(text, reward):
    assert ThinkParser().get_format_reward_func()(said(text)) == reward


def test_think_format_is_the_mean_over_assistant_messages_and_zero_without():
    reward = ThinkParser().get_format_reward_func()
    assert reward([*said("<think>a</think>b", "c"), UserMessage("u")]) == 0.5
    assert reward([UserMessage("u")]) == 0.0


def test_reasoning_content_counts_as_a_closed_think_block():
    answered = [AssistantMessage("four", reasoning_content="2 + 2 <think>")]
    silent = [AssistantMessage("", reasoning_content="2 + 2")]
    for parser in (ThinkParser(), MaybeThinkParser()):
        assert parser.parse_answer(answered) == "four"
    assert ThinkParser().get_format_reward_func()(answered) == 1.0
    assert ThinkParser().get_format_reward_func()(silent) == 0.0
    # negative control: without it there is no answer
    assert ThinkParser().parse_answer(said("four")) == ""


# --- XML ------------------------------------------------------------------------------------------


def test_fields_are_attributes_and_absent_ones_are_none():
    parsed = XMLParser(["reasoning", ("answer", "code")]).parse(
        "<reasoning> a </reasoning><code>x</code>"
    )
    assert (parsed.reasoning, parsed.answer, parsed.code) == ("a", None, "x")


def test_first_occurrence_or_last():
    text = "<answer> 1 </answer><answer> 2 </answer>"
    parser = XMLParser(["answer"])
    assert parser.parse(text).answer == "1"
    assert parser.parse(text, last=True).answer == "2"
    assert parser.parse(text, strip=False).answer == " 1 "
    assert parser.parse("<answer></answer>").answer == ""


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("I use <answer> tags. <answer>5</answer>", "tags. <answer>5"),
        ("<answer>5</answer> done </answer>", "5"),
        ("<answer>5</answer> wait <answer>6", "5"),
        ("<answer>5", None),
        ("5</answer>", None),
        ("</answer><answer>", None),
    ],
)
def test_the_last_occurrence_of_untidy_tags(text, last):
    assert XMLParser(["answer"]).parse(text, last=True).answer == last


def test_the_newest_message_that_has_the_answer_field_is_read_and_extract_fn_applied():  # fault 8
    parser = XMLParser(["think", "guess"], answer_field="guess", extract_fn=str.upper)
    completion = said(
        "<guess>abc</guess>", "<guess>old</guess><guess>crane</guess>", "no guess here"
    )
    assert parser.parse_answer(completion) == "OLD"
    assert parser.parse_answer("<guess>old</guess><guess>crane</guess>") == "CRANE"
    assert parser.parse_answer("<guess>slate</guess>") == "SLATE"
    assert parser.parse_answer(said("none")) is None


def test_tag_names_are_literal():  # fault 8: unescaped tags were patterns
    assert XMLParser(["a.c"]).parse("<abc>1</abc>").__dict__ == {"a.c": None}
    assert XMLParser(["a.c"]).parse("<a.c>1</a.c>").__dict__ == {"a.c": "1"}
    assert XMLParser(["("]).parse("<(>1</(>").__dict__ == {"(": "1"}


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<reasoning>a</reasoning><answer>b</answer>", 1.0),
        ("\n<reasoning>\na\n</reasoning>\n<answer>\nb\n</answer>\n", 1.0),
        ("plain text", 0.0),
        ("<reasoning>unclosed", 0.4),
        ("", 0.0),
        ("so: <reasoning>a</reasoning><answer>b</answer>", 0.8),
        ("<reasoning>a</reasoning><answer>b</answer> done", 0.8),
        ("<answer>b</answer>", 0.6),
        ("<reasoning>a</reasoning> b", 0.6),
    ],
)
def test_xml_format(text, reward):
    assert XMLParser(["reasoning", "answer"]).get_format_reward_func()(said(text)) == pytest.approx(
        reward
    )


def test_xml_format_accepts_any_alternative_and_is_a_mean():
    reward = XMLParser([("reasoning", "think"), "answer"]).get_format_reward_func()
    assert reward(said("<think>a</think><answer>b</answer>")) == 1.0
    assert reward(said("<think>a</think><answer>b</answer>", "plain")) == 0.5
    assert reward([UserMessage("<answer>b</answer>")]) == 0.0


def test_xml_format_counts_reasoning_content_as_the_think_field():
    completion = [AssistantMessage("<answer>b</answer>", reasoning_content="hm")]
    assert XMLParser(["think", "answer"]).get_format_reward_func()(completion) == 1.0
    assert XMLParser(["answer"]).get_format_reward_func()(completion) == 1.0
    assert XMLParser(["think", "answer"]).get_format_reward_func()(
        said("<answer>b</answer>")
    ) == pytest.approx(0.6)


def test_format_and_parse_are_inverse():
    parser = XMLParser(["reasoning", ("answer", "code")])
    text = parser.format(reasoning="a\nb", code="x = 1")
    parsed = parser.parse(text)
    assert (parsed.reasoning, parsed.answer) == ("a\nb", "x = 1")
    assert parser.get_format_reward_func()(said(text)) == 1.0


def test_format_names_what_is_missing_or_unknown():
    parser = XMLParser(["reasoning", ("answer", "code")])
    with pytest.raises(ValueError, match="'answer' or 'code'"):
        parser.format(reasoning="a")
    with pytest.raises(ValueError, match="'other'"):
        parser.format(reasoning="a", answer="b", other="c")


def test_fields_and_format_text():
    parser = XMLParser(["reasoning", ("answer", "code")])
    assert parser.get_fields() == ["reasoning", "answer"]
    assert "<[ answer | code ]>" in parser.get_format_str()


@pytest.mark.parametrize("fields", [["a", "a"], ["a", ("b", "a")], [()], [""]])
def test_fields_that_cannot_be_told_apart_are_refused(fields):
    with pytest.raises(ConfigError):
        XMLParser(fields)


@pytest.mark.parametrize("fields", [[3], [("a", None)], "answer"])
def test_field_names_are_strings(fields):
    with pytest.raises(TypeError):
        XMLParser(fields)


BOMBS = ["<a>", "</a>", "<a><b>", "<think>", "</think>", "<", "<a></a>", "\\boxed{", "a " * 9]


@pytest.mark.parametrize("unit", BOMBS)
def test_a_megabyte_of_tags_is_parsed_in_linear_time(unit):
    bomb = said(unit * (1_000_000 // len(unit)))
    started = time.thread_time()
    for parser in (
        XMLParser(["a", ("b", "c")], answer_field="a"),
        ThinkParser(),
        MaybeThinkParser(),
    ):
        parser.parse_answer(bomb)
        parser.get_format_reward_func()(bomb)
    assert time.thread_time() - started < 1.0


# --- reasoning in the text ------------------------------------------------------------------------

DRAFTS = [
    "<think>perhaps <answer>3</answer>? no</think>",
    "<think>It goes into <answer> tags.</think>\n",
    "<think>The form is <answer>...</answer>.</think>",
    "perhaps <answer>3</answer>? no\n</think>\n\n",
    "<think>a</think>\n<think><answer>3</answer></think>",
]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("form", [str, said])
@pytest.mark.parametrize("fields", [["answer"], ["think", "answer"]])
def test_the_answer_is_read_after_the_reasoning(draft, form, fields):
    parser = XMLParser(fields)
    assert parser.parse_answer(form(f"{draft}<answer>4</answer>")) == "4"
    assert parser.parse(f"{draft}<answer>4</answer>").answer == "4"
    assert parser.parse_answer(form(draft)) is None
    assert parser.get_format_reward_func()(form(f"{draft}<answer>4</answer>")) == 1.0


def test_reasoning_that_is_cut_has_no_answer_and_text_before_a_late_thought_has():
    parser = XMLParser(["think", "answer"])
    assert parser.parse_answer(said("<think>perhaps <answer>3</answer>? or")) is None
    assert parser.parse_answer(said("<answer>4</answer><think>sure?</think>")) == "4"
    assert parser.parse("<think>a <think> b</think><answer>4</answer>").think == "a <think> b"


def test_a_parser_takes_the_last_answer_of_a_message_if_it_is_told_to():
    two = said("<answer>12</answer> wait <answer>15</answer>")
    assert XMLParser(["answer"], last=True).parse_answer(two) == "15"
    assert XMLParser(["answer"]).parse_answer(two) == "12"  # as older versions did


@pytest.mark.parametrize("tag", ["аnswer", "ａnswer", "𝐚nswer", "answеr", "anſwer", "Answer"])
def test_a_tag_in_letters_that_look_alike_is_no_tag(tag):
    parser = XMLParser(["answer"])
    text = f"<{tag}>4</{tag}>"
    assert parser.parse_answer(text) is None
    message = [{"role": "assistant", "content": text}]
    assert parser.parse_answer(message) is None
    assert parser.format_reward(message) == 0.0
    assert parser.parse_answer(f"{text}<answer>5</answer>") == "5"  # negative control
