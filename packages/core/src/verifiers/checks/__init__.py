"""``check_environment``: report every problem of an environment at once.

    report = vf.check_environment("reverse-text")
    assert report.ok, report

Builds the environment twice, reads its rows, and runs rollouts of a few examples with scripted
models that reply with the empty string, plain text, an echo, and the example's answer in the
expected format. Needs no key and no model; tools are really called. Each finding has a code, a
place and a fix. The check itself changes and writes nothing; the environment's hooks and tools have
their usual side effects.

Limits: it cannot judge whether a task is worth learning, and it covers only code paths that a
scripted reply reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verifiers.checks.audit import AuditReport, a_audit_environment, audit_environment
from verifiers.checks.data import Data, check_data, check_same_again, fingerprint, first_rows
from verifiers.checks.loading import Loaded, load
from verifiers.checks.outcomes import HOOK, check_rollout, check_same_rollouts
from verifiers.checks.packaging import check_packaging
from verifiers.checks.playing import RolloutRunner, check_marks
from verifiers.checks.report import (
    CheckReport,
    Finding,
    Findings,
    error_text,
    raised_at,
    running_at,
)
from verifiers.checks.rubrics import (
    check_format_rewards,
    check_functions,
    check_rewards,
    check_scoring,
)
from verifiers.checks.side_effects import Watch
from verifiers.checks.watched import Hanging, run_watched
from verifiers.clients import client_and_model
from verifiers.clients.protocol import ClientLike, ModelLike
from verifiers.environments.base import Environment
from verifiers.environments.group import EnvGroup
from verifiers.errors import ConfigError

__all__ = [
    "AuditReport",
    "CheckReport",
    "Finding",
    "a_audit_environment",
    "a_check_environment",
    "audit_environment",
    "check_environment",
]

LEAST_HOLD_S = 2.0
"""Shortest block of the event loop, in seconds, that is reported as a hook that never returns."""


def check_environment(
    env_or_id: Environment | str | Callable[[], Environment],
    *,
    n: int = 3,
    client: ClientLike | None = None,
    seed: int = 0,
    timeout_s: float = 60.0,
    model: ModelLike | None = None,
) -> CheckReport:
    """Check an environment: an id, an ``Environment``, or a function that returns an environment.
    Blocks.

    Args:
        env_or_id: An id, an ``Environment``, or a function that returns an environment. An
            environment passed as an object is not closed.
        n: Examples that are run, with four scripted models, or once with ``client``.
        client: Client of a model to run them with.
        seed: Chooses the examples.
        timeout_s: Time limit of each rollout, in seconds.
        model: Name of the model, with ``client``.

    Raises ``UnknownEnvironment`` for an unknown id, ``ConfigError`` for invalid arguments or an
    unusable client; every other problem is in the report.

    >>> report = vf.check_environment(vf.SingleTurnEnv(dataset=[{"question": "1 + 1", "answer": "2"}]), n=1)
    >>> report.ok, [finding.code for finding in report.errors]
    (True, [])
    """
    check = _begin(env_or_id, n, client, seed, timeout_s, model)
    hold_s = max(timeout_s, LEAST_HOLD_S)
    try:
        run_watched(check.run, lambda: check.is_running, hold_s)
    except Hanging as hanging:
        check.findings.error(
            "stop-never-reached",
            f"a hook blocked the event loop for {hold_s:g} s; the rest was not checked",
            running_at(hanging.frame, check.loaded.name),
            "make the hook a coroutine that awaits, and give each wait a timeout",
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

    A hook that blocks the event loop blocks this call too; only ``check_environment`` detects and
    reports it.
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
    """Check the arguments and build the environment on the caller's thread: a constructor may need
    the main thread."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigError(f"n is {n!r}; it must be a whole number, at least 1", key="n")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise ConfigError(
            f"timeout_s is {timeout_s!r}; it must be a positive number of seconds", key="timeout_s"
        )
    if client is not None:
        client_and_model(client, model)
    findings = Findings()
    return _Check(load(env_or_id, findings), findings, n, client, seed, timeout_s, model)


@dataclass(slots=True)
class _Check:
    """The check of an environment that has been built."""

    loaded: Loaded
    findings: Findings
    n: int
    client: ClientLike | None
    seed: int
    timeout_s: float
    model: ModelLike | None
    is_running: bool = False

    async def run(self) -> None:
        env, again = self.loaded.env, self.loaded.again
        if env is None:
            return
        try:
            with Watch() as watch:
                if again is not None:
                    check_same_again(env, again, self.findings)
                await self._check(env)
            if self.loaded.loader is not None:
                opened = (*self.loaded.opened, *watch.opened)
                check_packaging(self.loaded.loader, opened, self.findings)
        finally:
            if self.loaded.is_built_here:
                await self._close()

    async def _check(self, env: Environment) -> None:
        data = check_data(env, self.findings, self.n, self.seed)
        check_marks(env, self.findings)
        if isinstance(env, EnvGroup):
            for name, member in zip(env.env_names, env.envs, strict=True):
                with self.findings.of_member(name):
                    await self._check(member)
            return
        broken = check_functions(env, data.examples, self.findings)
        if data.examples:
            await self._run_rollouts(env, data, broken)

    async def _run_rollouts(self, env: Environment, data: Data, broken: set[str]) -> None:
        step = max(1, len(data.examples) // self.n)
        examples = data.examples[self.seed % step :: step][: self.n]
        before = self._rows(env, data)
        runner = RolloutRunner(
            env, self.findings, self.timeout_s, self.seed, self.client, self.model
        )
        self.is_running = True
        rollouts = await runner.run(examples)
        self.is_running = False
        for rollout in rollouts:
            await check_rollout(env, rollout, self.findings, self.timeout_s)
            check_scoring(env, rollout.state, broken, self.findings)
        states = [rollout.state for rollout in rollouts]
        check_rewards(env, states, self.client is None, self.findings)
        plain = [rollout.state for rollout in rollouts if rollout.policy == "plain text"]
        check_format_rewards(env, plain, self.findings)
        failed = any(state["error"] for state in states) or any(map(runner.had_no_end, rollouts))
        if rollouts and not failed and self.client is None:
            check_same_rollouts(env, rollouts, await runner.again(rollouts), self.findings)
        if self._rows(env, data) != before:
            self.findings.error(
                "row-changed-by-a-rollout",
                "rollouts changed rows of the dataset",
                type(env).__name__,
                "change the state of the rollout, which has its own copy of the row, never objects"
                " that rollouts share",
            )

    def _rows(self, env: Environment, data: Data) -> tuple[list[str], bytes]:
        """Snapshot of the rows, for comparison."""
        return fingerprint(data.examples), first_rows(env, self.n) if data.is_repeatable else b""

    async def _close(self) -> None:
        for env in (self.loaded.env, self.loaded.again):
            try:
                if env is not None:
                    await env.aclose()
            except Exception as error:  # noqa: BLE001  an author's teardown may raise anything; it is reported
                self.findings.error(
                    HOOK,
                    f"closing the environment raised {error_text(error)}",
                    raised_at(error, type(env).__name__),
                    "@teardown handlers must not raise, even when no rollout was run",
                )
