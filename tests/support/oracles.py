"""A perfect player for each shipped environment: what shows that its reward can reach its maximum.

``oracle(env_id, env, row)`` is a scripted model for one evaluation row. Where nothing else is said
it gives the row's answer in the format the environment asks for.
"""

import json
import re

import verifiers as vf
from verifiers.checks.policies import formatted
from verifiers.data.examples import Example
from verifiers.data.messages import message_text
from verifiers.testing import ScriptedClient

MAXIMUM = {"wordle": 2.2}
"""The most a rollout can earn, where that is not 1."""


def oracle(env_id: str, env: vf.Environment, example: Example) -> ScriptedClient:
    """Plays one row perfectly."""
    play = ORACLES.get(env_id, _answers)
    return ScriptedClient(lambda request: play(env, example, request))


def _answers(env, example, request):
    return formatted(env, example, [message_text(message) for message in request.prompt])


def _sorts(env, example, request):
    turn = sum(message["role"] == "assistant" for message in request.prompt)
    tag = "combined_alphabetical_sorted" if turn else "alphabetical_sorted"
    return f"<{tag}>\n{example.row['info']['targets'][turn]}\n</{tag}>"


def _knows_the_word(env, example, request):
    return f"<think>\nI know it.\n</think>\n<guess>\n[{example.row['answer']}]\n</guess>"


def _makes_the_calls(env, example, request):
    if request.prompt[-1]["role"] == "tool":
        return "Done."
    calls = json.loads(example.row["answer"])
    return [
        vf.ToolCall(f"call_{i}", call["name"], json.dumps(call["arguments"]))
        for i, call in enumerate(calls)
    ]


def _types_the_solution(env, example, request):
    if request.prompt[-1]["role"] == "tool":
        return "Done."
    from vf_shell_tasks import TASKS

    solution = (TASKS / example.row["task"] / "solution/solve.sh").read_text()
    return [vf.ToolCall("call_0", "bash", json.dumps({"command": solution}))]


def _is_its_own_best_judge(env, example, request):
    judged = "<score>" in message_text(request.prompt[-1])
    return "It is perfect. <score>10</score>" if judged else example.row["answer"]


def _bets_and_folds(env, example, request):
    """Kuhn poker: the first player bets, the second folds: one chip, whatever the cards."""
    return "fold" if "fold" in message_text(request.prompt[-1]) else "bet"


def _halves(env, example, request):
    """GuessTheNumber: the middle of what is left of 1 to 20."""
    low, high, tried = 1, 20, 0
    for message in request.prompt:
        text = message_text(message)
        if message["role"] == "assistant":
            tried = int(re.findall(r"\[(\d+)\]", text)[-1])
        elif tried and "higher" in text:
            low = tried + 1
        elif tried and "lower" in text:
            high = tried - 1
    return f"<think>\nThe middle.\n</think>\n<guess>\n[{(low + high) // 2}]\n</guess>"


ORACLES = {
    "alphabet-sort": _sorts,
    "wordle": _knows_the_word,
    "tool-test": _makes_the_calls,
    "kuhn-poker": _bets_and_folds,
    "self-judge": _is_its_own_best_judge,
    "textarena": _halves,
    "shell-tasks": _types_the_solution,
}
