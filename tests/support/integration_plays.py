"""A scripted model for tool-test, of which some examples are answered wrongly or not at all."""

from __future__ import annotations

from typing import Any

import verifiers as vf


def plays_tool_test(env: vf.Environment, broken: Any = (), wrong: Any = ()) -> Any:
    """Makes the calls each task asks for; ``broken`` examples fail at the server, ``wrong`` ones
    call nothing right."""
    rows = {
        row["prompt"][-1]["content"]: row for row in (*env.get_eval_dataset(), *env.get_dataset())
    }

    def answer(request: Any) -> Any:
        if request.prompt[-1]["role"] == "tool":
            return "done"
        row = rows[request.prompt[-1]["content"]]
        if row["example_id"] in broken:
            raise RuntimeError("this example breaks the server")
        calls = row["info"]["calls"]
        if row["example_id"] in wrong:
            calls = [{"name": "add", "arguments": {"a": -1, "b": -1}}]
        return vf.AssistantMessage(
            "",
            tool_calls=[
                vf.ToolCall(f"c{n}", call["name"], call["arguments"])
                for n, call in enumerate(calls)
            ],
        )

    return answer
