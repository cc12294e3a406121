"""Plays rollouts for a check and looks at how each went: hooks, stopping, clean-up, and what a row would hold.

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

from verifiers.checks.policies import POLICIES, ScriptedPolicy
from verifiers.checks.report import Findings, method_place, place_of, raised_at, said
from verifiers.dataset import Example
from verifiers.decorators import decorated
from verifiers.dual import maybe_await
from verifiers.encoding import UNSERIALIZABLE, decode_row, encode_row
from verifiers.environments.base import Environment
from verifiers.environments.stopping import TURN_GUARD, stop_conditions
from verifiers.errors import EnvironmentFault, RolloutTimeout, ScoringError, VerifiersError
from verifiers.hooks import named
from verifiers.messages import normalize_messages
from verifiers.rows import json_ready, state_to_output
from verifiers.run_client import client_for
from verifiers.runner import Job, Progress, RunContext, play_and_score, score_together
from verifiers.state import State

HOOK = "hook-raises-or-returns-a-wrong-type"
MARKS = ("stop", "setup", "cleanup", "teardown")


@dataclass(frozen=True, slots=True)
class Played:
    """One finished rollout; ``policy`` is the name of a scripted policy, or "client"."""

    policy: str
    example: Example
    state: State


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
                if len(played) % len(examples) or any(isinstance(p.state["error"], RolloutTimeout) for p in played):
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
            return await play_and_score(self.env, job, context)

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
            HOOK,
            f"a run with this environment stops: {said(error)}",
            raised_at(error.__cause__ or error, type(self.env).__name__),
            "correct what it names; such an error is raised before any rollout can be recorded",
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


# --- one rollout ----------------------------------------------------------------------------------------------------


async def check_rollout(env: Environment, played: Played, findings: Findings, timeout_s: float) -> None:
    """Report how one rollout ended, and what of it could not be written down."""
    state, error = played.state, played.state["error"]
    who = f"example {played.example.example_id}, {played.policy}"
    if isinstance(error, RolloutTimeout):
        _report_timeout(env, played, error, findings, timeout_s)
    elif isinstance(error, EnvironmentFault):
        cause = error.__cause__ or error
        hook = error.hook or "the environment"
        findings.error(
            HOOK,
            f"{error} ({who})",
            raised_at(cause, method_place(env, hook)),
            "make it work for whatever the model says",
        )
    elif error is not None and not isinstance(error, ScoringError) and not error.scorable:
        findings.error(
            "rollout-fails",
            f"a rollout ended in {said(error)} ({who})",
            raised_at(error.__cause__ or error, place_of(type(env))),
            "make what it needs available; if it is the model's own doing, raise an error class with scorable = True",
        )
    elif state["stop_condition"] == "max_turns_reached" and env.max_turns <= 0:
        findings.error(
            "stop-never-reached",
            f"no stop condition held in {TURN_GUARD} turns ({who})",
            place_of(type(env)),
            "give max_turns=, or a @vf.stop condition that holds whatever the model says",
        )
    if error is None:
        await _check_types(env, state, findings)
    _check_row(state, findings)


def _report_timeout(
    env: Environment, played: Played, error: RolloutTimeout, findings: Findings, timeout_s: float
) -> None:
    turns = len(played.state["trajectory"])
    if played.policy == "client" and error.waiting_for == "the model":
        findings.error(
            "rollout-fails",
            f"the model took longer than {timeout_s:g} s for a rollout of {turns} turns so far",
            "the client",
            "give the check a larger timeout_s",
        )
        return
    hook = error.waiting_for or ""
    findings.error(
        "stop-never-reached",
        f"a rollout was not over after {timeout_s:g} s and {turns} turns; it was waiting for {hook}",
        method_place(env, hook) if hasattr(env, hook) else place_of(type(env)),
        "give max_turns= or timeout_seconds=, and let no hook wait without a bound",
    )


async def _check_types(env: Environment, state: State, findings: Findings) -> None:
    """What hooks returned that the loop takes without a word: stop conditions, and the completion."""
    cls: Any = type(env)
    for name, condition, extras in stop_conditions(cls):
        try:
            holds = await maybe_await(condition(env, state, **named(env, state, extras)))
        except Exception as error:  # noqa: BLE001  it worked during the rollout; asked once more, only its type counts
            findings.note(f"the stop condition {name} cannot be asked after a rollout: {said(error)}")
            continue
        if type(holds).__name__ not in ("bool", "bool_"):
            findings.error(
                HOOK,
                f"the stop condition {name} returned {holds!r}, not True or False",
                method_place(env, name),
                "return a bool on every path: None means that the rollout goes on",
            )
    try:
        normalize_messages(state["completion"], env.message_type)
        readable = isinstance(state["completion"], list if env.message_type == "chat" else str)
    except (TypeError, ValueError, AttributeError):
        readable = False
    if not readable:
        findings.error(
            HOOK,
            f"state['completion'] is {type(state['completion']).__name__} after the rollout, not messages",
            method_place(env, "render_completion"),
            'set state["completion"] to a list of messages (text in completion mode)',
        )


def _check_row(state: State, findings: Findings) -> None:
    row = decode_row(encode_row(state_to_output(state)))
    for path, kind in _markers(row, ""):
        findings.error(
            "row-not-serialisable",
            f"after a rollout, {path} holds an object of type {kind}, which a saved row cannot",
            f"state[{path.partition('.')[0]!r}]",
            "keep objects under a key of your own in the state, not in a column of the row",
        )
    for name, value in state.items():
        is_own = name not in State.RESERVED and name not in state.input_columns
        if is_own and any(_markers(json_ready(value), "")):
            findings.note(f"state[{name!r}] holds objects: it can be used in hooks, but not saved (state_columns)")


def _markers(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(dotted path, type name) of what could not be written."""
    if isinstance(value, Mapping):
        if set(value) == {UNSERIALIZABLE}:
            yield path, str(value[UNSERIALIZABLE])
            return
        for name, member in value.items():
            yield from _markers(member, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for place, member in enumerate(value):
            yield from _markers(member, f"{path}.{place}")


def check_same_rollouts(
    env: Environment, before: Sequence[Played], after: Sequence[Played], findings: Findings
) -> None:
    """Report where the same replies to the same row led to something else the second time."""
    old = {one.example.example_id: one.state for one in before if one.policy == before[-1].policy}
    for one in after:
        first, second = old[one.example.example_id], one.state
        for name in ("completion", "stop_condition", "reward"):
            if encode_row({"v": first[name]}) != encode_row({"v": second[name]}):
                hook = "env_response" if name == "completion" else "rubric"
                findings.warn(
                    "unseeded-randomness",
                    f"the same replies to the same row gave another {name} the second time (example "
                    f"{one.example.example_id})",
                    method_place(env, hook) if hook == "env_response" else place_of(type(env.rubric)),
                    "draw from random.Random(…) seeded with state['example_id'], or with a column of the row",
                )
                break
