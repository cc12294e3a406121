"""The real agent programs with a scripted model: what each calls its shell, and the cases of
``fork_table.py``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise

import verifiers as vf
from verifiers.testing import ScriptedClient
from verifiers_agents.turns import agent_run

SHELLS = {
    "codex": ("exec_command", "cmd", {}),
    "opencode": ("bash", "command", {"description": "write"}),
    "pi": ("bash", "command", {}),
    "claude-code": ("Bash", "command", {"description": "write"}),
    "qwen-code": ("run_shell_command", "command", {"description": "write", "is_background": False}),
    "mini-swe-agent": ("bash", "command", {}),
}
"""Agent -> the tool that runs a command, its parameter, and what else it takes."""
LAST_WORDS = {
    "mini-swe-agent": vf.ToolCall(
        "c2", "bash", '{"command":"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}'
    )
}
"""Agent -> the call that ends it, where a text does not."""


def _call(name, command="echo 42 > answer.txt", number=1, separators=(",", ":")):
    tool, parameter, more = SHELLS[name]
    return vf.ToolCall(
        f"c{number}", tool, json.dumps({parameter: command, **more}, separators=separators)
    )


CASES = {
    "compact": lambda name: [_call(name)],
    "spaces, escapes": lambda name: [
        _call(name, "echo \u00e9\u20ac > a.txt", separators=(" , ", " :  "))
    ],
    "reasoning": lambda name: [
        vf.AssistantMessage(None, [_call(name)], reasoning_content="Let me think.")
    ],
    "text beside": lambda name: [vf.AssistantMessage("  I write it. \n\n", [_call(name)])],
    "two calls": lambda name: [[_call(name), _call(name, "ls", 2)]],
    "broken JSON": lambda name: [
        vf.ToolCall("c1", SHELLS[name][0], '{"' + SHELLS[name][1] + '": "ech')
    ],
    "unknown tool": lambda name: [vf.ToolCall("c1", "no_such_tool", "{}")],
    "cut answer": lambda name: [{"content": "I am about to", "finish_reason": "length"}],
}
"""What the model says before it ends -> the replies, of an agent's name."""


@dataclass(frozen=True)
class Measured:
    """How an agent gave its history back."""

    turns: int
    """Calls of the main conversation."""
    rewrites: int
    """How often the agent replaced its history, so that a sample more is trained."""
    differ: int
    """Calls whose history, as the agent sent it, is not word for word what the model was given and
    said: where samples fork that are made by comparing the histories of requests."""
    error: str | None


class Recording(vf.AgentEnv):
    """Keeps the messages of each call as the agent sent them."""

    async def get_prompt_messages(self, state):
        state.setdefault("sent", []).append(
            [dict(message) for message in agent_run(state).call.request.messages]
        )
        return await super().get_prompt_messages(state)


def play(name: str, case: str) -> Measured:
    """One rollout of an agent in one case."""
    script = CASES[case](name)

    def reply(request):
        if not request.tools:
            return "A title"
        said = sum(message["role"] == "assistant" for message in request.prompt)
        if said < len(script):
            return script[said]
        return LAST_WORDS.get(name, "I wrote the file; all is done.")

    row = {"question": "Write 42 into answer.txt.", "answer": "42"}
    env = Recording(
        agent=name, dataset=[row], score_rollouts=False, timeout_seconds=300, max_turns=6
    )
    results = env.evaluate(ScriptedClient(reply, tokens=True), "m", keep_states=True)
    (output,), (state,) = results.outputs, results.states
    pairs = [
        (sent, step)
        for sent, step in zip(state.get("sent") or (), state["trajectory"], strict=False)
        if step["extras"]["role"] == "main"
    ]
    differ = sum(
        not _begins_with(sent, [*before, *step["completion"]])
        for (before, step), (sent, _) in pairwise(pairs)
    )
    error = output.error and output.error.message
    return Measured(len(pairs), output["agent"]["rewrites"], differ, error)


def _begins_with(messages, prefix):
    return [_words(message) for message in messages[: len(prefix)]] == [
        _words(message) for message in prefix
    ]


def _words(message):
    """A message as a template renders it: its text, its reasoning, its calls with their arguments
    as they stand."""
    calls = [(call.get("function") or call) for call in message.get("tool_calls") or ()]
    return (
        message["role"],
        message.get("content") or "",
        message.get("reasoning_content") or "",
        [(call["name"], call["arguments"]) for call in calls],
    )
