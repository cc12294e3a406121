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


def tool_policies(write: Format, answers: Answers) -> list[NonSolution]:
    """Policies that call tools without solving anything, and answer where there are none."""

    def calls(turn: Turn, *indices: int) -> list[ToolCall]:
        tools = turn.request.tools or ()
        functions = [
            tools[index % len(tools)].get("function") or tools[index % len(tools)]
            for index in (indices if tools else ())
        ]
        return [_call(function, turn.number) for function in functions]

    def each_tool_then(end: Policy) -> Policy:
        def reply(turn: Turn) -> object:
            is_left = turn.number < len(turn.request.tools or ())
            return calls(turn, turn.number) if is_left else end(turn)

        return reply

    def random_calls(turn: Turn) -> object:
        rng = random.Random(f"{turn.example.hash}{turn.number}")
        called = calls(turn, rng.randrange(99)) if turn.number < NUM_CALLS else None
        return called or write(turn, answers.another(turn))

    def all_at_once(turn: Turn) -> object:
        num_calls = 0 if turn.number else len(turn.request.tools or ())
        return calls(turn, *range(num_calls)) or write(turn, "")

    policies: dict[str, Policy] = {
        "every tool once, then an empty answer": each_tool_then(lambda turn: write(turn, "")),
        "every tool once, then what they said": each_tool_then(
            lambda turn: write(turn, "\n".join(turn.tool_texts))
        ),
        "every tool once, then another row's answer": each_tool_then(
            lambda turn: write(turn, answers.another(turn))
        ),
        "the first tool until the end": lambda turn: calls(turn, 0) or "",
        "random calls": random_calls,
        "every tool in one message": all_at_once,
    }
    return [NonSolution(name, "tools", policy) for name, policy in policies.items()]


def code_policies(examples: Sequence[Example], write: Format, solution: str) -> list[NonSolution]:
    """Attacks on a check of code: in calls of a tool that runs code, and in the reply."""
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
    return [
        NonSolution(f"{name}, {where}", "code", policy)
        for name, code in attacks.items()
        for where, policy in _policies_of(write, code).items()
    ]


def runs_code(env: Environment, examples: Sequence[Example], solution: str) -> bool:
    """Whether model-written code may decide a reward: a tool takes it, or words ask for it."""
    if any(_code_parameter(tool.get("function") or tool) for tool in env.tool_defs):
        return True
    texts = [*map(question_of, examples[:3]), env.system_prompt or "", solution]
    words = re.compile(r"```|\bdef \w+\(|\bpython\b|\bfunction\b|\bcode\b", re.IGNORECASE)
    return any(map(words.search, texts))


def _policies_of(write: Format, code: str) -> dict[str, Policy]:
    """Where a reply can hold code -> the policy that writes it there."""

    def in_tool(turn: Turn) -> object:
        for tool in turn.request.tools or () if turn.number == 0 else ():
            function = tool.get("function") or tool
            if (parameter := _code_parameter(function)) is not None:
                is_code = parameter in ("code", "source", "script")
                text = code if is_code else f"python3 - <<'EOF'\n{code}EOF\n"
                return [_call(function, 0, **{parameter: text})]
        return write(turn, "")

    return {
        "in a block": lambda turn: f"```python\n{code}```" if turn.number == 0 else "Done.",
        "in the answer's place": lambda turn: write(turn, code),
        "in a tool": in_tool,
    }


def _call(function: Mapping[str, Any], number: int, **arguments: str) -> ToolCall:
    """A call with these arguments, and others that fit the schema."""
    values = example_arguments(function.get("parameters") or {}) | arguments
    return ToolCall(f"call_{number}", function["name"], json.dumps(values))


def _code_parameter(function: Mapping[str, Any]) -> str | None:
    properties = (function.get("parameters") or {}).get("properties") or {}
    return next((name for name in CODE_PARAMETERS if name in properties), None)


def _function_names(examples: Sequence[Example], solution: str) -> list[str]:
    """Names of functions that the prompts or the solution speak of."""
    text = "\n".join([solution, *map(question_of, examples)])
    names = re.findall(r"\bdef (\w+)|`(\w+)`|\b([a-z_]\w*)\(", text)
    identifiers = dict.fromkeys(name for group in names for name in group if name.isidentifier())
    return [name for name in identifiers if name not in _NOT_NAMES][:8]
