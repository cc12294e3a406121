"""Plays rollouts for a check, and counts that their clean-up runs.

Every example is played by every scripted policy (siblings, scored as one group), or once with the client that was
given. Rollouts of one policy are played side by side, policies one after another; the first that does not come to an
end is the last that is tried.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verifiers.checks.outcomes import HOOK, Played, hit_turn_guard
from verifiers.checks.policies import POLICIES, ScriptedPolicy
from verifiers.checks.report import Findings, method_place, place_of, raised_at, said
from verifiers.clients.resolve import client_for
from verifiers.data.examples import Example
from verifiers.environments.base import Environment
from verifiers.errors import RolloutTimeout, UsageError, VerifiersError
from verifiers.rollouts.decorators import decorated
from verifiers.rollouts.state import State
from verifiers.runs.runner import Job, Progress, RunContext, generate_and_score, score_together

MARKS = ("stop", "setup", "cleanup", "teardown")


@dataclass(frozen=True, slots=True)
class Player:
    """How a check plays: with what client, how long, under which seed."""

    env: Environment
    findings: Findings
    timeout_s: float
    seed: int
    client: Any = None
    model: Any = None

    async def play(self, examples: Sequence[Example]) -> list[Played]:
        """Play and score ``examples``; what stops a whole run is reported, and ends the playing."""
        played: list[Played] = []
        with _counted_cleanup(self.env) as counts:
            for policy in POLICIES if self.client is None else ("client",):
                played += await self._side_by_side(policy, examples)
                if len(played) % len(examples) or any(map(self.had_no_end, played)):
                    break
        self.findings.num_rollouts += len(played)
        self._check_cleanup(counts, len(played))
        if len({p.policy for p in played}) * len(examples) == len(played):
            await self._score_groups(played)
        return played

    async def again(self, played: Sequence[Played]) -> list[Played]:
        """The rollouts of the last policy once more, for comparison."""
        last = [p for p in played if p.policy == played[-1].policy]
        replayed = await self._side_by_side(last[0].policy, [p.example for p in last])
        self.findings.num_rollouts += len(replayed)
        return replayed

    def had_no_end(self, played: Played) -> bool:
        """Whether only a bound of the check or of the run ended the rollout."""
        return isinstance(played.state["error"], RolloutTimeout) or hit_turn_guard(self.env, played.state)

    async def _side_by_side(self, policy: str, examples: Sequence[Example]) -> list[Played]:
        progress = Progress()
        tasks = [
            asyncio.ensure_future(self._one(policy, example, place, progress)) for place, example in enumerate(examples)
        ]
        done, late = await asyncio.wait(tasks, timeout=2 * self.timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for place, task in enumerate(tasks):
            if task in late:
                self._report_late(progress, place)
            elif (error := task.exception()) is not None:
                self._report_stopped(error)
        finished = [(example, task) for example, task in zip(examples, tasks, strict=True) if task in done]
        return [Played(policy, example, task.result()) for example, task in finished if task.exception() is None]

    async def _one(self, policy: str, example: Example, place: int, progress: Progress) -> State:
        scripted = self.client is None
        client = ScriptedPolicy(POLICIES[policy], self.env, example) if scripted else self.client
        async with client_for(client, self.model) as (resolved, name):
            context = RunContext(
                client=resolved,
                model=name,
                given_client=None if scripted else self.client,
                seed=self.seed,
                rollout_timeout_s=self.timeout_s,
                progress=progress,
                score=self.env.score_rollouts,
            )
            siblings = list(POLICIES) if scripted else [policy]
            job = Job(example, siblings.index(policy), len(siblings), place)
            return await generate_and_score(self.env, job, context)

    async def _score_groups(self, played: Sequence[Played]) -> None:
        groups: dict[int, list[State]] = {}
        for one in played:
            groups.setdefault(one.example.example_id, []).append(one.state)
        for states in groups.values():
            try:
                await score_together(self.env, states, RunContext(None, "", score=self.env.score_rollouts))
            except VerifiersError as error:
                self._report_stopped(error)

    # --- what went wrong around a rollout

    def _report_late(self, progress: Progress, place: int) -> None:
        state = progress.running.get(place, (0.0, None))[1]
        waiting = (state.waiting_for if state is not None else None) or "the environment"
        code = "reward-function-fails" if waiting == "scoring" else "stop-never-reached"
        self.findings.error(
            code,
            f"a rollout was not finished after {2 * self.timeout_s:g} s; it was waiting for {waiting}",
            place_of(type(self.env.rubric if waiting == "scoring" else self.env)),
            "make it answer sooner, or give the check a larger timeout_s",
        )

    def _report_stopped(self, error: BaseException) -> None:
        self.findings.error(
            HOOK if isinstance(error, UsageError) else "rollout-fails",
            f"a run with this environment stops: {said(error)}",
            raised_at(error.__cause__ or error, type(self.env).__name__),
            "correct what it names; no rollout is recorded until then",
        )

    def _check_cleanup(self, counts: Mapping[str, int], num_rollouts: int) -> None:
        for name, count in counts.items():
            if count != num_rollouts:
                self.findings.error(
                    "cleanup-not-run",
                    f"@cleanup {name} ran {count} times in {num_rollouts} rollouts; it must run once in each",
                    method_place(self.env, name),
                    "leave the loop to the environment (no rollout() of its own), or call super().rollout(…) in it",
                )


@contextmanager
def _counted_cleanup(env: Environment) -> Iterator[Counter[str]]:
    """Count the calls of the ``@cleanup`` methods of rollouts inside the block."""
    handlers = {name: handler for name, handler, options in decorated(env, "cleanup") if options.stage != "group"}
    counts: Counter[str] = Counter(dict.fromkeys(handlers, 0))

    def counting(name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(handler)
        def counted(*args: Any, **kwargs: Any) -> Any:
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
    """Report methods that override a marked one without the mark, and so are no hooks any more."""
    for kind in MARKS:
        mark = f"__vf_{kind}__"
        marked = {name for base in type(env).__mro__ for name, value in vars(base).items() if hasattr(value, mark)}
        for name in sorted(marked):
            method = getattr(type(env), name)
            if hasattr(method, mark):
                continue
            message = f"{name} overrides a method marked @{kind} without the mark, so it is never called"
            fix = f"write @vf.{kind} above it; to switch it off on purpose, keep the mark and do nothing"
            if kind == "cleanup":
                findings.error("cleanup-not-run", message, place_of(method), fix)
            else:
                findings.warn("hook-without-its-mark", message, place_of(method), fix)
