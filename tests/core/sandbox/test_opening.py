"""Sandboxes are opened in turns: waiting for one's turn is not in the time that a sandbox has to
open."""

import asyncio

import pytest

import verifiers as vf
from verifiers.sandbox import opening


def outcomes(count, limit_s, at_once, monkeypatch):
    """(which were opened, most that were being opened at once) of a machine that opens one in 0.1
    s, one by one."""
    monkeypatch.setattr(opening, "MAX_OPENING", at_once)
    now = most = 0

    async def run():
        machine = asyncio.Lock()

        async def open_session():
            nonlocal now, most
            async with opening.opening(limit_s):
                now += 1
                most = max(most, now)
                try:
                    async with machine:
                        await asyncio.sleep(0.1)
                finally:
                    now -= 1
            return True

        return await asyncio.gather(*(open_session() for _ in range(count)), return_exceptions=True)

    return asyncio.run(run()), most


def test_each_has_its_whole_time_however_many_there_are(monkeypatch):
    assert outcomes(12, 0.7, 2, monkeypatch) == ([True] * 12, 2)


def test_negative_control_all_at_once_take_each_others_time(monkeypatch):
    opened, most = outcomes(12, 0.7, 1000, monkeypatch)
    failed = [outcome for outcome in opened if outcome is not True]
    assert most == 12
    assert {str(outcome) for outcome in failed} == {
        "the sandbox was not open after 0.7 s (max_startup_wait_seconds)"
    }
    assert all(isinstance(outcome, vf.SandboxUnavailable) for outcome in failed)


def test_a_time_out_of_the_backend_itself_stays_its_own():
    async def run():
        async with opening.opening(60):
            raise TimeoutError("the service said so")

    with pytest.raises(TimeoutError, match="the service said so"):
        asyncio.run(run())
