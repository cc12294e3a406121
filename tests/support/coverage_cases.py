"""Planted wrong settings with the sentence that names each, and sound runs, of evaluations and
trainings."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from verifiers.testing import ScriptedClient
from verifiers.types import AssistantMessage, Response

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(12)]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def right(completion: Any, answer: str) -> float:
    return float(completion[-1].content == answer)


def read(parser: vf.Parser, completion: Any, answer: str) -> float:
    return float(parser.parse_answer(completion) == answer)


def failing(completion: Any) -> float:
    raise ValueError("no board")


def answer_of(request: Any) -> str:
    return str(int(request.prompt[-1].content.split()[0]) + 1)


def calling(request: Any) -> Any:
    if request.prompt[-1].role == "tool":
        return request.prompt[-1].content
    return AssistantMessage("", tool_calls=[vf.ToolCall("c", "add", {"a": 1, "b": 1})])


def cut(text: str) -> Any:
    return lambda request: Response(AssistantMessage(text), finish_reason="length")


def single(parser: Any = None, rubric_parser: Any = None, func: Any = right) -> Any:
    return vf.SingleTurnEnv(
        dataset=ROWS,
        eval_dataset=ROWS,
        parser=parser,
        rubric=vf.Rubric([func], parser=rubric_parser),
    )


def broken_tools() -> Any:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        raise RuntimeError("no network")

    return vf.ToolEnv(tools=[add], eval_dataset=ROWS, rubric=vf.Rubric([right]))


def tools() -> Any:
    return vf.ToolEnv(
        tools=[add], dataset=ROWS, eval_dataset=ROWS, rubric=vf.Rubric([right], parser=vf.Parser())
    )


def judged(prompt: str) -> Any:
    rubric = vf.JudgeRubric(
        judge_client=ScriptedClient("<score>8</score>"), judge_models=["j"], judge_prompt=prompt
    )
    return vf.SingleTurnEnv(dataset=ROWS, eval_dataset=ROWS, rubric=rubric)


def both() -> Any:
    """A group of an environment with a parser and an environment with tools."""
    return vf.EnvGroup([single(XML, XML, read), tools()], env_names=["xml", "tools"])


XML, THINK = vf.XMLParser(["answer"]), vf.ThinkParser()
PLAIN, BOXED = vf.Parser(), vf.Parser(vf.extract_boxed_answer)
STRICT = vf.Parser(lambda text: vf.extract_boxed_answer(text, strict=True))
CALLS = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=add>\n<parameter=a>1</parameter></function></tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value></tool_call>",
    "llama": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 1}}]',
    "harmony": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
    "harmony without its tokens": 'assistantcommentary to=functions.add json{"a": 1}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0",
    "anthropic": '<invoke name="add"><parameter name="a">1</parameter></invoke>',
    "python": "[add(a=1, b=1)]",
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
    "no box": (lambda: single(STRICT, STRICT, read), "4", "nothing for Parser"),
    "no tag in a group": (both, "4", "nothing for the environment's parser"),
    "a reward that fails": (lambda: single(func=failing), "4", "ValueError: no board"),
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
    "an unknown slot": (lambda: judged("Rate {response} by {rules}."), "4", "the slot {rules}"),
}
"""Name -> (the environment, its replies, what is said)."""
SOUND = {
    "right": (single, answer_of),
    "wrong": (single, "no"),
    "XML": (lambda: single(XML, XML, read), lambda r: f"<answer>{answer_of(r)}</answer>"),
    "boxed": (lambda: single(BOXED, BOXED, read), lambda r: rf"\boxed{{{answer_of(r)}}}"),
    "thinking": (lambda: single(THINK, THINK, read), lambda r: f"<think>…</think>{answer_of(r)}"),
    "a plain parser of both": (lambda: single(PLAIN, PLAIN, read), answer_of),
    "a parser that no function takes": (lambda: single(BOXED), answer_of),
    "tools that are called": (tools, calling),
    "tools that are not needed": (tools, answer_of),
    "JSON that is no call": (tools, '{"name": "Ada", "arguments": "many"}'),
    "prose of a tool": (tools, "I would add (carefully) both of them."),
    "a judge": (lambda: judged("Rate {response} of {question}, {{not a slot}}."), "4"),
    "few are cut": (single, lambda r: cut("x")(r) if answer_of(r) < "2" else answer_of(r)),
    "no tools": (single, CALLS["hermes"]),
    "a group": (both, lambda r: f"<answer>{answer_of(r)}</answer>"),
}
"""Name -> (the environment, its replies)."""
