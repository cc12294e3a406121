"""A run says what did not happen in it: planted wrong settings are named after the first rollouts,
and sound runs are silent."""

import json
import logging

import pytest

import verifiers as vf
from verifiers.results.coverage import FIRST
from verifiers.testing import ScriptedClient
from verifiers.types import AssistantMessage, Response

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(12)]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def right(completion, answer) -> float:
    return float(completion[-1].content == answer)


def read(parser, completion, answer) -> float:
    return float(parser.parse_answer(completion) == answer)


def answer_of(request):
    return str(int(request.prompt[-1].content.split()[0]) + 1)


def calling(request):
    if request.prompt[-1].role == "tool":
        return request.prompt[-1].content
    return AssistantMessage("", tool_calls=[vf.ToolCall("c", "add", {"a": 1, "b": 1})])


def cut(text):
    return lambda request: Response(AssistantMessage(text), finish_reason="length")


def single(parser=None, rubric_parser=None, func=right):
    return vf.SingleTurnEnv(
        eval_dataset=ROWS, parser=parser, rubric=vf.Rubric([func], parser=rubric_parser)
    )


def tools():
    return vf.ToolEnv(tools=[add], eval_dataset=ROWS, rubric=vf.Rubric([right]))


def judged(prompt):
    rubric = vf.JudgeRubric(
        judge_client=ScriptedClient("<score>8</score>"), judge_models=["j"], judge_prompt=prompt
    )
    return vf.SingleTurnEnv(eval_dataset=ROWS, rubric=rubric)


XML, THINK = vf.XMLParser(["answer"]), vf.ThinkParser()
BOXED = vf.Parser(vf.extract_boxed_answer)
CALLS = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=add>\n<parameter=a>1</parameter></function></tool_call>",
    "llama": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 1}}]',
    "harmony": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
    "anthropic": '<invoke name="add"><parameter name="a">1</parameter></invoke>',
    "bare json": 'I call {"name": "add", "arguments": {"a": 1, "b": 1}}.',
    "fenced json": '```json\n{"name": "add", "parameters": {"a": 1}}\n```',
}
PLANTED = {
    "cut in the answer": (single, cut("The answer is"), "cut by a limit"),
    "cut while reasoning": (single, cut(""), "cut by a limit"),
    "cut before a call": (tools, cut("I will call the"), "cut by a limit"),
    **{f"calls as {name}": (tools, text, "tool calls as text") for name, text in CALLS.items()},
    "no tag": (lambda: single(XML, XML, read), "4", "nothing for XMLParser"),
    "another tag": (lambda: single(XML, XML, read), "<result>4</result>", "nothing for XMLParser"),
    "boxed for XML": (lambda: single(XML, XML, read), r"\boxed{4}", "nothing for XMLParser"),
    "parser of the environment alone": (
        lambda: single(XML, None, read),
        "<answer>4</answer>",
        "pass parser= to the Rubric too",
    ),
    "boxed of the environment alone": (
        lambda: single(BOXED, None, read),
        r"\boxed{4}",
        "pass parser= to the Rubric too",
    ),
    "two parsers": (lambda: single(XML, THINK, read), "<answer>4</answer>", "and its rubric with"),
    "a misspelt slot": (lambda: judged("Rate {respones}."), "4", 'did you mean "response"'),
    "an unknown slot": (lambda: judged("Rate {response} by {rules}."), "4", "the slot {rules}"),
}
SOUND = {
    "right": (single, answer_of),
    "wrong": (single, "no"),
    "XML": (lambda: single(XML, XML, read), lambda r: f"<answer>{answer_of(r)}</answer>"),
    "boxed": (lambda: single(BOXED, BOXED, read), lambda r: rf"\boxed{{{answer_of(r)}}}"),
    "thinking": (lambda: single(THINK, THINK, read), lambda r: f"<think>…</think>{answer_of(r)}"),
    "a parser that no function takes": (lambda: single(BOXED), answer_of),
    "tools that are called": (tools, calling),
    "tools that are not needed": (tools, answer_of),
    "JSON that is no call": (tools, '{"name": "Ada", "arguments": "many"}'),
    "a judge": (lambda: judged("Rate {response} of {question}, {{not a slot}}."), "4"),
    "few are cut": (single, lambda r: cut("x")(r) if answer_of(r) < "2" else answer_of(r)),
    "no tools": (single, CALLS["hermes"]),
}


def warnings_of(make, reply, caplog, num_examples=-1):
    """What a run logs as warnings, and its results."""
    with caplog.at_level(logging.WARNING, logger="verifiers"):
        results = make().evaluate(ScriptedClient(reply), "m", num_examples=num_examples)
    return [record.getMessage() for record in caplog.records], results


@pytest.mark.parametrize(("make", "reply", "sentence"), PLANTED.values(), ids=PLANTED)
def test_a_wrong_setting_is_named_after_the_first_rollouts(make, reply, sentence, caplog):
    """Before the run ends: the warning is logged when ``FIRST`` rollouts are finished."""
    logged, _ = warnings_of(make, reply, caplog, num_examples=FIRST)
    assert [text for text in logged if sentence in text], logged


@pytest.mark.parametrize(("make", "reply"), SOUND.values(), ids=SOUND)
def test_a_sound_run_is_silent(make, reply, caplog):
    logged, _ = warnings_of(make, reply, caplog)
    assert logged == []


def test_a_warning_comes_once_and_early(caplog):
    seen = []
    env = single()
    with caplog.at_level(logging.WARNING, logger="verifiers"):
        env.evaluate(
            ScriptedClient(cut("x")),
            "m",
            max_concurrent=1,
            on_progress=lambda outputs, metadata: seen.append(len(caplog.records)),
        )
    assert seen == [0] * (FIRST - 1) + [1] * (len(ROWS) - FIRST + 1)


def test_counts_are_saved_and_survive_a_second_session(tmp_path):
    folder = tmp_path / "run"
    single().evaluate(ScriptedClient(cut("x")), "m", num_examples=4, results_path=folder)
    results = single().evaluate(ScriptedClient("2"), "m", results_path=folder)
    expected = {"rollouts": 12, "truncated": 4, "unparsed": None}
    expected |= {"without_calls": None, "calls_as_text": None}
    assert results.metadata.coverage == results.summary()["coverage"] == expected
    assert json.loads((folder / "metadata.json").read_text())["coverage"] == expected
    assert vf.load_results(folder).metadata.coverage == expected
