"""What the tests of the adapters share: a tool environment, a scripted token engine, rows worth
telling apart."""

from __future__ import annotations

import json
from typing import Any

import verifiers as vf
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": 1}}\n</tool_call>'


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def right(completion: Any, answer: str) -> float:
    """1.0 when the last message is the answer."""
    return float(bool(completion) and completion[-1]["content"] == answer)


def tool_env(count: int = 4, funcs: Any = (right,), **parameters: Any) -> vf.ToolEnv:
    """Add one to a number with a tool, then say the sum: two turns and a tool's message between
    them."""
    rows = [{"question": f"{n} + 1", "answer": str(n + 1), "info": {"n": n}} for n in range(count)]
    rubric = vf.Rubric(funcs=list(funcs))
    return vf.ToolEnv(
        tools=[add], max_turns=3, dataset=rows, eval_dataset=rows[:2], rubric=rubric, **parameters
    )


class ScriptedTokens:
    """A token-in/token-out engine that plays ``tool_env``: calls the tool, then says what it gave.

    ``calls`` holds (prompt ids, sampling) of every call; ``say`` may replace what it says.
    """

    def __init__(self, say: Any = None):
        self.tokenizer = build_tiny_tokenizer()
        self.calls: list[tuple[list[int], dict[str, Any]]] = []
        self.made: list[list[int]] = []
        self.say = say or self.play

    async def __call__(
        self, prompt_ids: list[int], sampling: dict[str, Any]
    ) -> tuple[list[int], list[float], str]:
        self.calls.append((prompt_ids, sampling))
        text = self.say(self.tokenizer.decode(prompt_ids))
        ids = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
        self.made.append(ids)
        return ids, [-0.5 - 0.001 * index for index in range(len(ids))], "stop"

    @staticmethod
    def play(prompt: str) -> str:
        """The call first, the tool's answer afterwards."""
        if "<tool_response>" in prompt:
            return prompt.rpartition("<tool_response>\n")[2].partition("\n")[0]
        return CALL % int(prompt.rpartition("user\n")[2].split()[0])


def load_contract(folder: Any, name: str) -> dict[str, Any]:
    """The recorded names and shapes of a peer."""
    return json.loads((folder / "contracts" / f"{name}.json").read_text(encoding="utf-8"))
