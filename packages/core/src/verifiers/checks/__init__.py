"""``check_environment``: everything that is wrong with an environment, in one report.

    report = vf.check_environment("reverse-text")
    assert report.ok, report

It builds the environment twice, reads its rows, and plays a few of them with scripted models that say nothing, plain
text, an echo, and the row's answer in the expected format (so no key and no model is needed; tools are really called).
What it found has a code, a place and a fix. It changes nothing and writes nothing; the environment's own hooks and
tools do what they do.

What it does not do: it cannot tell whether a task is worth learning, and what no scripted reply leads to is not seen.
"""

from __future__ import annotations

from collections.abc import Callable

from verifiers.checks.data import Data, check_data, check_same_again, fingerprint, first_rows
from verifiers.checks.loading import Loaded, load
from verifiers.checks.outcomes import HOOK, check_rollout, check_same_rollouts
from verifiers.checks.playing import Player, check_marks
from verifiers.checks.report import CheckReport, Finding, Findings, raised_at, running_at, said
from verifiers.checks.rubrics import check_format_rewards, check_functions, check_rewards, check_scoring
from verifiers.checks.watched import Hanging, run_watched
from verifiers.clients import client_and_model
from verifiers.clients.protocol import ClientLike, ModelLike
from verifiers.environments.base import Environment
from verifiers.environments.group import EnvGroup
from verifiers.errors import ConfigError

__all__ = ["CheckReport", "Finding", "a_check_environment", "check_environment"]

LEAST_HOLD_S = 2.0
"""For less than this, holding the event loop is not taken for a hook that never returns."""


def check_environment(
    env_or_id: Environment | str | Callable[[], Environment],
    *,
    n: int = 3,
    client: ClientLike | None = None,
    seed: int = 0,
    timeout_s: float = 60.0,
    model: ModelLike | None = None,
) -> CheckReport:
    """Everything wrong with an environment: an id, an ``Environment``, or a function that returns one. Blocks.

    ``n`` examples, chosen by ``seed``, are played by each of four scripted models, or once with ``client`` (and
    ``model``). ``timeout_s`` bounds each rollout in seconds. An environment that is given as an object is not closed.

    Raises ``UnknownEnvironment`` for an id that leads nowhere, ``ConfigError`` for arguments or a client that cannot
    be used; everything else is in the report.

    >>> report = vf.check_environment(vf.SingleTurnEnv(dataset=[{"question": "1 + 1", "answer": "2"}]), n=1)
    >>> report.ok, [finding.code for finding in report.errors]
    (True, [])
    """
    check = _begin(env_or_id, n, client, seed, timeout_s, model)
    hold_s = max(timeout_s, LEAST_HOLD_S)
    try:
        run_watched(check.run, lambda: check.is_playing, hold_s)
    except Hanging as hanging:
        check.findings.error(
            "stop-never-reached",
            f"a hook held the event loop for {hold_s:g} s; the rest was not checked",
            running_at(hanging.frame, check.loaded.name),
            "make the hook a coroutine that awaits, and bound what it waits for",
        )
    return check.findings.report(check.loaded.name)


async def a_check_environment(
    env_or_id: Environment | str | Callable[[], Environment],
    *,
    n: int = 3,
    client: ClientLike | None = None,
    seed: int = 0,
    timeout_s: float = 60.0,
    model: ModelLike | None = None,
) -> CheckReport:
    """``check_environment`` as a coroutine, in the caller's event loop.

    A hook that never gives the loop back hangs this one; the blocking form reports it.
    """
    check = _begin(env_or_id, n, client, seed, timeout_s, model)
    await check.run()
    return check.findings.report(check.loaded.name)


def _begin(
    env_or_id: Environment | str | Callable[[], Environment],
    n: int,
    client: ClientLike | None,
    seed: int,
    timeout_s: float,
    model: ModelLike | None,
) -> _Check:
    """Check the arguments and build the environment, on the caller's thread: a constructor may need the main one."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigError(f"n is {n!r}; it must be a whole number, at least 1", key="n")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ConfigError(f"timeout_s is {timeout_s!r}; it must be a positive number of seconds", key="timeout_s")
    if client is not None:
        client_and_model(client, model)
    findings = Findings()
    return _Check(load(env_or_id, findings), findings, n, client, seed, timeout_s, model)


class _Check:
    """One check, after the environment was built."""

    def __init__(
        self,
        loaded: Loaded,
        findings: Findings,
        n: int,
        client: ClientLike | None,
        seed: int,
        timeout_s: float,
        model: ModelLike | None,
    ):
        self.loaded, self.findings = loaded, findings
        self.n, self.client, self.seed, self.timeout_s, self.model = n, client, seed, timeout_s, model
        self.is_playing = False

    async def run(self) -> None:
        env, again = self.loaded.env, self.loaded.again
        if env is None:
            return
        try:
            if again is not None:
                check_same_again(env, again, self.findings)
            await self._check(env)
        finally:
            if self.loaded.is_own:
                await self._close()

    async def _check(self, env: Environment) -> None:
        data = check_data(env, self.findings, self.n, self.seed)
        check_marks(env, self.findings)
        if isinstance(env, EnvGroup):
            whole = self.findings.member
            for name, member in zip(env.env_names, env.envs, strict=True):
                self.findings.member = f"{whole}member {name!r}: "
                await self._check(member)
            self.findings.member = whole
            return
        broken = check_functions(env, data.to_play, self.findings)
        if data.to_play:
            await self._play(env, data, broken)

    async def _play(self, env: Environment, data: Data, broken: set[str]) -> None:
        step = max(1, len(data.to_play) // self.n)
        examples = data.to_play[self.seed % step :: step][: self.n]
        before = self._rows(env, data)
        player = Player(env, self.findings, self.timeout_s, self.seed, self.client, self.model)
        self.is_playing = True
        played = await player.play(examples)
        self.is_playing = False
        for one in played:
            await check_rollout(env, one, self.findings, self.timeout_s)
            check_scoring(env, one.state, broken, self.findings)
        states = [one.state for one in played]
        check_rewards(env, states, self.client is None, self.findings)
        check_format_rewards(env, [one.state for one in played if one.policy == "plain text"], self.findings)
        comparable = not any(state["error"] for state in states) and not any(map(player.had_no_end, played))
        if played and comparable and self.client is None:
            check_same_rollouts(env, played, await player.again(played), self.findings)
        if self._rows(env, data) != before:
            self.findings.error(
                "row-changed-by-a-rollout",
                "after the rollouts, rows of the dataset are not what they were before",
                type(env).__name__,
                "change the state of the rollout, which has a copy of its row, and nothing that rollouts share",
            )

    def _rows(self, env: Environment, data: Data) -> tuple[list[str], bytes]:
        """The rows as they are at this moment, to compare."""
        return fingerprint(data.to_play), first_rows(env, self.n) if data.is_repeatable else b""

    async def _close(self) -> None:
        for env in (self.loaded.env, self.loaded.again):
            try:
                if env is not None:
                    await env.aclose()
            except Exception as error:  # noqa: BLE001  an author's teardown may raise anything; it is reported
                self.findings.error(
                    HOOK,
                    f"closing the environment raised {said(error)}",
                    raised_at(error, type(env).__name__),
                    "@teardown handlers must not raise, also when no rollout was played",
                )
