"""Errors as data: short whatever they quote, of exceptions of every class."""

import time

import pytest

import verifiers as vf
from verifiers.rollouts.error_info import MAX_MESSAGE_CHARS, MAX_TRACEBACK_CHARS, error_chain
from verifiers.testing import ScriptedClient


class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


def raised(error):
    try:
        raise error
    except Exception as caught:  # noqa: BLE001  any
        return caught


@pytest.mark.parametrize("part", ["a.", "://", "eyJ-", "authorization ", "key="])
def test_an_error_that_quotes_a_long_reply_is_short_and_takes_no_time(part):
    error = raised(ValueError(f"illegal move: {part * (1_000_000 // len(part))}"))
    started = time.process_time()
    info = vf.ErrorInfo.of(error)
    assert time.process_time() - started < 0.3
    assert len(info.message) < MAX_MESSAGE_CHARS + 100
    assert len(info.error_chain_repr) < MAX_MESSAGE_CHARS + 100
    assert len(info.traceback) < MAX_TRACEBACK_CHARS + 100
    assert len(vf.ErrorInfo.of(f"ValueError: {part * 100_000}").message) < MAX_MESSAGE_CHARS + 100


def test_an_exception_without_a_text_is_an_error_all_the_same():
    info = vf.ErrorInfo.of(raised(Mute()))
    assert info.message == "its message cannot be shown: ValueError"
    assert info.error_chain_repr.startswith("Mute(")


def test_a_long_chain_takes_no_time():
    error = ValueError("first")
    for i in range(20_000):
        following = ValueError(str(i))
        following.__cause__ = error
        error = following
    started = time.process_time()
    assert len(error_chain(error)) == 20_001
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("place", ["hook", "reward", "tool"])
def test_such_an_exception_costs_its_rollout_wherever_it_is_raised(place):
    def act() -> str:
        """Act."""
        raise Mute

    class Game(vf.ToolEnv):
        async def env_response(self, messages, state, **kw):
            if place == "hook" and state["prompt"][-1]["content"] == "q0":
                raise Mute
            return await super().env_response(messages, state, **kw)

    def reward(prompt) -> float:
        if place == "reward" and prompt[-1]["content"] == "q0":
            raise Mute
        return 1.0

    env = Game(
        tools=[act],
        dataset=[{"question": f"q{i}", "answer": ""} for i in range(3)],
        rubric=vf.Rubric([reward]),
    )

    def reply(request):
        has_called = request.prompt[-1]["role"] == "tool"
        return "Done." if has_called else [vf.ToolCall("c1", "act", {})]

    results = env.evaluate(ScriptedClient(reply), "m")
    failed = [error is not None for error in results["errors"]]
    assert failed == ([False] * 3 if place == "tool" else [True, False, False])
