"""Small environments for tests: rows of sums, an exact-match reward, a game of several turns that
is easy to bend."""

from __future__ import annotations

from typing import Any

import verifiers as vf


def sums(count: int) -> list[dict[str, Any]]:
    """Rows ``{"question": "0 + 1", "answer": "1"}``, all different."""
    return [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(count)]


def exact(completion: Any, answer: str) -> float:
    """1.0 when the completion is the answer."""
    return float(bool(completion) and completion[-1]["content"] == answer)


def add_one(request: Any) -> str:
    """A model that solves ``sums``."""
    return str(int(request.prompt[-1]["content"].split()[0]) + 1)


def single_turn(count: int = 3, **parameters: Any) -> vf.SingleTurnEnv:
    """``sums`` under the reward ``exact``."""
    parameters.setdefault("rubric", vf.Rubric(funcs=[exact]))
    return vf.SingleTurnEnv(dataset=sums(count), **parameters)


class Talk(vf.MultiTurnEnv):
    """Says "more" after every completion; ``max_turns`` ends it."""

    def __init__(self, count: int = 1, max_turns: int = 3, **parameters: Any):
        parameters.setdefault("dataset", sums(count))
        super().__init__(max_turns=max_turns, **parameters)

    def env_response(self, messages: Any, state: vf.State) -> Any:
        return "more"


def row(text: str = "hello", **columns: Any) -> dict[str, Any]:
    """One row with a chat prompt."""
    return {"prompt": [{"role": "user", "content": text}], "example_id": 0, **columns}
