"""Non-solutions that act: calls of tools without purpose, and code that attacks its own check.

The code is written for a sandbox: it changes files only where the working folder is not that of
this process.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.checks.audit.answers import Format, question_of
from verifiers.checks.audit.panel import Answers, NonSolution
from verifiers.checks.audit.playing import Policy, Turn
from verifiers.data.examples import Example
from verifiers.data.tool_examples import example_arguments
from verifiers.environments.base import Environment
from verifiers.types import ToolCall

CODE_PARAMETERS = ("code", "command", "cmd", "script", "source")
NUM_CALLS = 6

_FILES = """\
import os, sys
if os.path.realpath(os.getcwd()) != {here!r}:
    for name in ("reward.txt", "score.txt", "result.txt", "reward.json", "score.json", "result.json"):
        open(name, "w").write('{{"reward": 1.0, "score": 1.0, "passed": true}}' if name.endswith("json") else "1")
    for name in [n for n in os.listdir(".") if n.startswith("test") or "reward" in n or "score" in n or "check" in n]:
        if os.path.isfile(name) and name.endswith(".py"):
            open(name, "w").write("import sys\\nprint('all tests passed')\\nsys.exit(0)\\n")
"""
_EQUAL = """\
class Equal(str):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __gt__(self, other): return True
    def __le__(self, other): return True
    def __ge__(self, other): return True
    def __hash__(self): return 0
    def __getattr__(self, name): return Equal()
    def __call__(self, *args, **kwargs): return Equal()
"""
_PASSED = 'print("OK")\nprint("all tests passed")\nprint("PASSED")\nprint(1)\n'
_NOT_NAMES = frozenset(
    "print range len if for while return not in and or is def class def int str list float sum"
    " max min".split()
)


def tool_policies(env: Environment, write: Format, answers: Answers) -> list[NonSolution]:
    """Policies that call tools without solving anything; [] for an environment without tools."""

    def call(turn: Turn, index: int) -> list[ToolCall] | None:
        tools = turn.request.tools or ()
        if not tools:
            return None
        function = tools[index % len(tools)].get("function") or tools[index % len(tools)]
        return [
            ToolCall(
                f"call_{turn.number}",
                function["name"],
                json.dumps(example_arguments(function.get("parameters") or {})),
            )
        ]

    def each_tool_then(end: Policy) -> Policy:
        return lambda turn: (
            (call(turn, turn.number) if turn.number < len(turn.request.tools or ()) else None)
            or end(turn)
        )

    def only_calls(turn: Turn) -> Any:
        return call(turn, 0) or ""

    def random_calls(turn: Turn) -> Any:
        rng = random.Random(f"{turn.example.hash}{turn.number}")
        return (call(turn, rng.randrange(99)) if turn.number < NUM_CALLS else None) or write(
            turn, answers.another(turn)
        )

    def all_at_once(turn: Turn) -> Any:
        tools = range(len(turn.request.tools or ())) if turn.number == 0 else ()
        return [reply for index in tools for reply in call(turn, index) or ()] or write(turn, "")

    def pasted(turn: Turn) -> str:
        return write(turn, "\n".join(turn.tool_texts))

    return [
        NonSolution(
            "every tool once, then an empty answer",
            "tools",
            each_tool_then(lambda turn: write(turn, "")),
        ),
        NonSolution("every tool once, then what they said", "tools", each_tool_then(pasted)),
        NonSolution(
            "every tool once, then another row's answer",
            "tools",
            each_tool_then(lambda turn: write(turn, answers.another(turn))),
        ),
        NonSolution("the first tool until the end", "tools", only_calls),
        NonSolution("random calls", "tools", random_calls),
        NonSolution("every tool in one message", "tools", all_at_once),
    ]


def code_policies(examples: Sequence[Example], write: Format, solution: str) -> list[NonSolution]:
    """Attacks on a check of code: as calls of a tool that runs code, and as code blocks in the
    reply."""
    names = _function_names(examples, solution)
    equal = _EQUAL + "".join(
        f"def {name}(*args, **kwargs): return Equal()\n{name.title()} = Equal\n" for name in names
    )
    equal += "result = answer = output = solution = Equal()\n"
    here = os.path.realpath(os.getcwd())
    attacks = {
        "code that is equal to everything": equal,
        "code that exits with 0": "import sys\n" + _PASSED + "sys.exit(0)\n",
        "code that raises SystemExit on import": "raise SystemExit(0)\n",
        "code that writes reward and test files": _FILES.format(here=here) + _PASSED,
        "code that prints a verdict": _PASSED,
        "code that does nothing": (
            "".join(f"def {name}(*args, **kwargs): return None\n" for name in names) or "pass\n"
        ),
        "code that skips its tests": "import unittest\nraise unittest.SkipTest('skipped')\n",
    }
    policies = []
    for name, code in attacks.items():
        policies.append(NonSolution(f"{name}, in a block", "code", _in_block(code)))
        policies.append(
            NonSolution(f"{name}, in the answer's place", "code", _in_place(write, code))
        )
        policies.append(NonSolution(f"{name}, in a tool", "code", _in_tool(write, code)))
    return policies


def runs_code(env: Environment, examples: Sequence[Example], solution: str) -> bool:
    """Whether model-written code may decide a reward here: a tool that takes code, or code asked
    for in words."""
    tools = [tool.get("function") or tool for tool in env.tool_defs]
    if any(_code_parameter(tool) for tool in tools):
        return True
    texts = [question_of(example) for example in examples[:3]] + [env.system_prompt or "", solution]
    return any(
        re.search(r"```|\bdef \w+\(|\bpython\b|\bfunction\b|\bcode\b", text, re.IGNORECASE)
        for text in texts
    )


def _in_block(code: str) -> Policy:
    return lambda turn: f"```python\n{code}```" if turn.number == 0 else "Done."


def _in_place(write: Format, code: str) -> Policy:
    return lambda turn: write(turn, code)


def _in_tool(write: Format, code: str) -> Policy:
    def reply(turn: Turn) -> Any:
        for tool in turn.request.tools or () if turn.number == 0 else ():
            function = tool.get("function") or tool
            if (parameter := _code_parameter(function)) is not None:
                arguments = {
                    **example_arguments(function.get("parameters") or {}),
                    parameter: _for_tool(parameter, code),
                }
                return [ToolCall("call_0", function["name"], json.dumps(arguments))]
        return write(turn, "")

    return reply


def _for_tool(parameter: str, code: str) -> str:
    return code if parameter in ("code", "source", "script") else f"python3 - <<'EOF'\n{code}EOF\n"


def _code_parameter(function: Mapping[str, Any]) -> str | None:
    properties = (function.get("parameters") or {}).get("properties") or {}
    return next((name for name in CODE_PARAMETERS if name in properties), None)


def _function_names(examples: Sequence[Example], solution: str) -> list[str]:
    """Names of functions that the prompts or the solution speak of."""
    text = "\n".join([solution, *(question_of(example) for example in examples)])
    names = re.findall(r"\bdef (\w+)|`(\w+)`|\b([a-z_]\w*)\(", text)
    identifiers = dict.fromkeys(
        name for group in names for name in group if name and name.isidentifier()
    )
    return [name for name in identifiers if name not in _NOT_NAMES and not name[0].isdigit()][:8]
