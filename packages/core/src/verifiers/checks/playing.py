"""Run rollouts for a check, and verify that each runs its clean-up once.

Every example is run with every scripted policy (siblings, scored as one group), or once with the
caller's client. Rollouts of a policy run concurrently, policies one after another; after the
first policy with a rollout that does not end, no further policy is run.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verifiers.checks.outcomes import HOOK, PolicyRollout, hit_turn_guard
from verifiers.checks.policies import ScriptedPolicy, policies_of
from verifiers.checks.report import Findings, error_text, method_place, place_of, raised_at
from verifiers.clients.resolve import client_for
from verifiers.data.examples import Example
from verifiers.environments.base import Environment
from verifiers.errors import RolloutTimeout, UsageError, VerifiersError
from verifiers.rollouts.author_code import decorated
from verifiers.rollouts.state import State
from verifiers.runs.plan import Job
from verifiers.runs.rollout import Progress, RunContext, generate_and_score, score_together

MARKS = ("stop", "setup", "cleanup", "teardown")


@dataclass(frozen=True, slots=True)
class RolloutRunner:
    """Runs a check's rollouts with one client (None: scripted policies), timeout and seed."""

    env: Environment
    findings: Findings
    timeout_s: float
    seed: int
    client: Any = None
    model: Any = None

    async def run(self, examples: Sequence[Example]) -> list[PolicyRollout]:
        """Run and score ``examples``; an error that would stop a run is reported, and ends this."""
        rollouts: list[PolicyRollout] = []
        with _counted_cleanup(self.env) as counts:
            for policy in policies_of(self.env) if self.client is None else ("client",):
                rollouts += await self._side_by_side(policy, examples)
                if len(rollouts) % len(examples) or any(map(self.had_no_end, rollouts)):
                    break
        self.findings.num_rollouts += len(rollouts)
        self._check_cleanup(counts, len(rollouts))
        if len({p.policy for p in rollouts}) * len(examples) == len(rollouts):
            await self._score_groups(rollouts)
        return rollouts

    async def again(self, rollouts: Sequence[PolicyRollout]) -> list[PolicyRollout]:
        """Run the rollouts of the last policy once more, for comparison."""
        last = [p for p in rollouts if p.policy == rollouts[-1].policy]
        repeats = await self._side_by_side(last[0].policy, [p.example for p in last])
        self.findings.num_rollouts += len(repeats)
        return repeats

    def had_no_end(self, rollout: PolicyRollout) -> bool:
        """Whether only a limit of the check or of the run ended the rollout."""
        return isinstance(rollout.state["error"], RolloutTimeout) or hit_turn_guard(
            self.env, rollout.state
        )

    async def _side_by_side(self, policy: str, examples: Sequence[Example]) -> list[PolicyRollout]:
        progress = Progress()
        tasks = [
            asyncio.ensure_future(self._rollout(policy, example, index, progress))
            for index, example in enumerate(examples)
        ]
        done, late = await asyncio.wait(tasks, timeout=2 * self.timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for index, task in enumerate(tasks):
            if task in late:
                self._report_late(progress, index)
            elif (error := task.exception()) is not None:
                self._report_stopped(error)
        return [
            PolicyRollout(policy, example, task.result())
            for example, task in zip(examples, tasks, strict=True)
            if task in done and task.exception() is None
        ]

    async def _rollout(
        self, policy: str, example: Example, index: int, progress: Progress
    ) -> State:
        client, siblings = self.client, [policy]
        if client is None:
            policies = policies_of(self.env)
            client, siblings = ScriptedPolicy(policies[policy], self.env, example), list(policies)
        async with client_for(client, self.model) as (resolved, name):
            context = RunContext(
                client=resolved,
                model=name,
                given_client=self.client,
                seed=self.seed,
                rollout_timeout_s=self.timeout_s,
                progress=progress,
                score=self.env.score_rollouts,
            )
            job = Job(example, siblings.index(policy), len(siblings), index)
            return await generate_and_score(self.env, job, context)

    async def _score_groups(self, rollouts: Sequence[PolicyRollout]) -> None:
        groups: dict[int, list[State]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.example.example_id, []).append(rollout.state)
        context = RunContext(None, "", score=self.env.score_rollouts)
        for states in groups.values():
            try:
                await score_together(self.env, states, context)
            except VerifiersError as error:
                self._report_stopped(error)

    # --- failures outside of a rollout's state

    def _report_late(self, progress: Progress, index: int) -> None:
        state = progress.running.get(index, (0.0, None))[1]
        waiting = (state.waiting_for if state is not None else None) or "the environment"
        code = "reward-function-fails" if waiting == "scoring" else "stop-never-reached"
        self.findings.error(
            code,
            f"a rollout was not finished after {2 * self.timeout_s:g} s; it was waiting for"
            f" {waiting}",
            place_of(type(self.env.rubric if waiting == "scoring" else self.env)),
            "make it return sooner, or pass the check a larger timeout_s",
        )

    def _report_stopped(self, error: BaseException) -> None:
        self.findings.error(
            HOOK if isinstance(error, UsageError) else "rollout-fails",
            f"a run with this environment stops: {error_text(error)}",
            raised_at(error.__cause__ or error, type(self.env).__name__),
            "correct the cause; until then no rollout is recorded",
        )

    def _check_cleanup(self, counts: Mapping[str, int], num_rollouts: int) -> None:
        for name, count in counts.items():
            if count != num_rollouts:
                self.findings.error(
                    "cleanup-not-run",
                    f"@cleanup {name} ran {count} times in {num_rollouts} rollouts; it must run"
                    " once in each",
                    method_place(self.env, name),
                    "do not override rollout(), or call super().rollout(…) in it",
                )


@contextmanager
def _counted_cleanup(env: Environment) -> Iterator[Counter[str]]:
    """Count the calls of the ``@cleanup`` methods of rollouts within the block."""
    cleanups = decorated(env, "cleanup")
    handlers = {name: handler for name, handler, options in cleanups if options.stage != "group"}
    counts: Counter[str] = Counter(dict.fromkeys(handlers, 0))

    def counting(name: str, handler: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(handler)
        def counted(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return handler(*args, **kwargs)

        return counted

    for name, handler in handlers.items():
        env.__dict__[name] = counting(name, handler)
    try:
        yield counts
    finally:
        for name in handlers:
            del env.__dict__[name]


def check_marks(env: Environment, findings: Findings) -> None:
    """Report methods that override a hook without its decorator, and so are never called."""
    members = [member for base in type(env).__mro__ for member in vars(base).items()]
    for kind in MARKS:
        mark = f"__vf_{kind}__"
        for name in sorted({name for name, value in members if hasattr(value, mark)}):
            method = getattr(type(env), name)
            if hasattr(method, mark):
                continue
            message = (
                f"{name} overrides a method decorated with @{kind} without the decorator, so it is"
                " never called"
            )
            fix = (
                f"write @vf.{kind} above it; to disable it on purpose, keep the decorator and an"
                " empty body"
            )
            if kind == "cleanup":
                findings.error("cleanup-not-run", message, place_of(method), fix)
            else:
                findings.warn("hook-without-its-mark", message, place_of(method), fix)
