"""How single rollouts of a check went: how they ended, what their hooks returned, what a saved row would hold.

Asks the environment's stop conditions once more after a rollout; plays nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.checks.report import Findings, method_place, place_of, raised_at, said
from verifiers.data.examples import Example
from verifiers.data.messages import normalize_messages
from verifiers.environments.base import Environment
from verifiers.errors import EnvironmentFault, RolloutTimeout, ScoringError
from verifiers.results.rows import json_ready, state_to_output
from verifiers.rollouts.author_code import named
from verifiers.rollouts.loop import TURN_GUARD, stop_conditions
from verifiers.rollouts.state import State
from verifiers.runtime.json import UNSERIALIZABLE, decode_row, encode_row
from verifiers.runtime.sync_async import maybe_await
from verifiers.types import StopReason

HOOK = "hook-raises-or-returns-a-wrong-type"


@dataclass(frozen=True, slots=True)
class Played:
    """One finished rollout; ``policy`` is the name of a scripted policy, or "client"."""

    policy: str
    example: Example
    state: State


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
    elif hit_turn_guard(env, state):
        findings.error(
            "stop-never-reached",
            f"no stop condition held in {TURN_GUARD} turns ({who})",
            place_of(type(env)),
            "give max_turns=, or a @vf.stop condition that holds whatever the model says",
        )
    if error is None or isinstance(error, ScoringError):
        await _check_types(env, state, findings)
    _check_row(state, findings)


def hit_turn_guard(env: Environment, state: State) -> bool:
    """Whether only the run's own bound on turns ended the rollout."""
    return env.max_turns <= 0 and state["stop_condition"] == StopReason.MAX_TURNS


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


def _markers(value: object, path: str) -> Iterator[tuple[str, str]]:
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
    names = ["completion", "stop_condition"]
    if not env.rubric.has_group_rewards:  # those were settled with the other siblings, which are not played again
        names.append("reward")
    old = {one.example.example_id: one.state for one in before if one.policy == before[-1].policy}
    for one in after:
        first, second = old[one.example.example_id], one.state
        for name in names:
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
