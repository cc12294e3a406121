"""Reward functions that set an alarm are scored; an alarm that rings ends them."""

import asyncio
import signal
import threading
import time

import pytest

import verifiers as vf
from verifiers.runtime import alarms
from verifiers.testing import ScriptedClient

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no alarms")


@pytest.fixture(autouse=True)
def alarms_of_python(monkeypatch):
    """Each test begins with Python's own functions, and puts them back."""
    for name in ("signal", "alarm", "setitimer"):
        monkeypatch.setattr(signal, name, getattr(signal, name))
    monkeypatch.setattr(alarms, "_is_replaced", threading.Event())


def within(seconds, work):
    """As libraries of mathematics do it."""

    class TooLong(Exception):
        pass

    def ring(number, frame):
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    except TooLong:
        return 0.5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def spin():
    end = time.monotonic() + 30
    while time.monotonic() < end:
        pass
    return 0.0


def in_time(completion):
    return within(20, lambda: 1.0)


def too_late(completion):
    return within(0.05, spin)


def by_alarm(completion):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    signal.alarm(0)
    return 1.0


async def awaited(completion):
    await asyncio.sleep(0)
    return within(20, lambda: 1.0)


def rewards_of(*functions):
    env = vf.SingleTurnEnv(dataset=[{"question": "q"}], rubric=vf.Rubric(funcs=list(functions)))
    results = env.evaluate(ScriptedClient("a"), "m")
    return {name: values[0] for name, values in results["metrics"].items() if name != "num_turns"}


def test_functions_with_an_alarm_are_scored(caplog):
    rewards = rewards_of(in_time, too_late, by_alarm)

    assert {name: rewards[name] for name in ("in_time", "too_late", "by_alarm")} == {
        "in_time": 1.0,
        "too_late": 0.5,
        "by_alarm": 1.0,
    }
    said = [record for record in caplog.records if "sets an alarm" in record.getMessage()]
    assert len(said) == 1, "once, not for each function"


def test_a_coroutine_function_is_scored_in_an_event_loop_of_another_thread():
    """As in training."""
    rewards = {}
    thread = threading.Thread(target=lambda: rewards.update(rewards_of(awaited)))
    thread.start()
    thread.join(60)
    assert rewards["awaited"] == 1.0


def test_the_main_thread_keeps_the_alarms_of_the_system():
    rewards_of(by_alarm)
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGALRM, before)


def test_without_the_replacement_the_reward_is_unknown(monkeypatch):
    """Negative control."""
    monkeypatch.setattr("verifiers.rubrics.running.replace_alarms", lambda error, name: False)
    assert rewards_of(by_alarm)["by_alarm"] != 1.0


def test_another_failure_replaces_nothing():
    def wrong(completion):
        raise ValueError("no number")

    rewards_of(wrong)
    assert not alarms._is_replaced.is_set()
