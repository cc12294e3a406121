"""Check single rollouts: how they ended, the types their hooks returned, and whether they can be
saved.

Evaluates the environment's stop conditions once more after a rollout; runs no rollout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.checks.report import Findings, error_text, method_place, place_of, raised_at
from verifiers.data.examples import Example
from verifiers.data.messages import normalize_messages
from verifiers.environments.base import Environment
from verifiers.errors import EnvironmentFault, RolloutTimeout, ScoringError
from verifiers.results.rows import json_ready, state_to_output
from verifiers.rollouts.author_code import maybe_await
from verifiers.rollouts.loop import TURN_GUARD, stop_conditions
from verifiers.rollouts.state import State
from verifiers.runtime.json import UNSERIALIZABLE, decode_row, encode_row
from verifiers.types import StopReason

HOOK = "hook-raises-or-returns-a-wrong-type"


@dataclass(frozen=True, slots=True)
class PolicyRollout:
    """A finished rollout; ``policy`` is the name of a scripted policy, or "client"."""

    policy: str
    example: Example
    state: State


async def check_rollout(
    env: Environment, rollout: PolicyRollout, findings: Findings, timeout_s: float
) -> None:
    """Report how one rollout ended, and which of its values cannot be saved."""
    state, error = rollout.state, rollout.state["error"]
    who = f"example {rollout.example.example_id}, {rollout.policy}"
    if isinstance(error, RolloutTimeout):
        _report_timeout(env, rollout, error, findings, timeout_s)
    elif isinstance(error, EnvironmentFault):
        cause = error.__cause__ or error
        hook = error.hook or "the environment"
        findings.error(
            HOOK,
            f"{error} ({who})",
            raised_at(cause, method_place(env, hook)),
            "make it handle any completion",
        )
    elif error is not None and not isinstance(error, ScoringError) and not error.scorable:
        findings.error(
            "rollout-fails",
            f"a rollout ended in {error_text(error)} ({who})",
            raised_at(error.__cause__ or error, place_of(type(env))),
            "make its dependencies available; if the model caused it, raise an error class with"
            " scorable = True",
        )
    elif hit_turn_guard(env, state):
        findings.error(
            "stop-never-reached",
            f"no stop condition held in {TURN_GUARD} turns ({who})",
            place_of(type(env)),
            "set max_turns=, or add a @vf.stop condition that holds for any completion",
        )
    for failure in dict.fromkeys(state.record.tool_errors):
        findings.note(f"called with arguments made from its schema, a tool failed: {failure}")
    if error is None or isinstance(error, ScoringError):
        await _check_types(env, state, findings)
    _check_row(state, findings)


def hit_turn_guard(env: Environment, state: State) -> bool:
    """Whether only the run's guard of ``TURN_GUARD`` turns ended the rollout."""
    return env.max_turns <= 0 and state["stop_condition"] == StopReason.MAX_TURNS


def _report_timeout(
    env: Environment,
    rollout: PolicyRollout,
    error: RolloutTimeout,
    findings: Findings,
    timeout_s: float,
) -> None:
    turns = len(rollout.state["trajectory"])
    if rollout.policy == "client" and error.waiting_for == "the model":
        findings.error(
            "rollout-fails",
            f"the model took longer than {timeout_s:g} s for a rollout of {turns} turns so far",
            "the client",
            "pass the check a larger timeout_s",
        )
        return
    hook = error.waiting_for or ""
    findings.error(
        "stop-never-reached",
        f"a rollout had not ended after {timeout_s:g} s and {turns} turns; it was waiting for"
        f" {hook}",
        method_place(env, hook) if hasattr(env, hook) else place_of(type(env)),
        "set max_turns= or timeout_seconds=, and give every wait in a hook a timeout",
    )


async def _check_types(env: Environment, state: State, findings: Findings) -> None:
    """Check return types that the loop does not validate: stop conditions, and the completion."""
    cls: Any = type(env)
    for name, condition in stop_conditions(cls):
        try:
            holds = await maybe_await(condition(env, state))
        except Exception as error:  # noqa: BLE001  it worked during the rollout; this call only checks its type
            unknown = f"the stop condition {name} cannot be evaluated after a rollout"
            findings.note(f"{unknown}: {error_text(error)}")
            continue
        if type(holds).__name__ not in ("bool", "bool_"):
            findings.error(
                HOOK,
                f"the stop condition {name} returned {holds!r}, not True or False",
                method_place(env, name),
                "return a bool on every path: None continues the rollout",
            )
    try:
        normalize_messages(state["completion"], env.message_type)
        readable = isinstance(state["completion"], list if env.message_type == "chat" else str)
    except (TypeError, ValueError, AttributeError):
        readable = False
    if not readable:
        findings.error(
            HOOK,
            f"state['completion'] is {type(state['completion']).__name__} after the rollout, not"
            " messages",
            method_place(env, "render_completion"),
            'set state["completion"] to a list of messages (text in completion mode)',
        )


def _check_row(state: State, findings: Findings) -> None:
    row = decode_row(encode_row(state_to_output(state)))
    for path, kind in _markers(row, ""):
        findings.error(
            "row-not-serialisable",
            f"after a rollout, {path} holds an object of type {kind}, which cannot be saved",
            f"state[{path.partition('.')[0]!r}]",
            "store objects under a new key of the state, not in a column of the row",
        )
    for name, value in state.items():
        is_author_key = name not in State.RESERVED and name not in state.input_columns
        if is_author_key and any(_markers(json_ready(value), "")):
            use = "hooks can use it, but it cannot be saved (state_columns)"
            findings.note(f"state[{name!r}] holds objects: {use}")


def _markers(value: object, path: str) -> Iterator[tuple[str, str]]:
    """(dotted path, type name) of each value that cannot be saved."""
    if isinstance(value, Mapping):
        if set(value) == {UNSERIALIZABLE}:
            yield path, str(value[UNSERIALIZABLE])
            return
        for name, member in value.items():
            yield from _markers(member, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from _markers(member, f"{path}.{index}")


def check_same_rollouts(
    env: Environment,
    before: Sequence[PolicyRollout],
    after: Sequence[PolicyRollout],
    findings: Findings,
) -> None:
    """Warn when the same replies to the same example give a different result the second time."""
    of_rubric = place_of(type(env.rubric))
    locations = {"completion": method_place(env, "env_response"), "stop_condition": of_rubric}
    # group rewards depend on siblings, which are not run again
    if not env.rubric.has_group_rewards:
        locations["reward"] = of_rubric
    last = before[-1].policy
    old = {r.example.example_id: r.state for r in before if r.policy == last}
    for rollout in after:
        first, second = old[rollout.example.example_id], rollout.state
        for name, location in locations.items():
            if encode_row({"v": first[name]}) != encode_row({"v": second[name]}):
                findings.warn(
                    "unseeded-randomness",
                    f"the same replies to the same example gave a different {name} the second time"
                    f" (example {rollout.example.example_id})",
                    location,
                    "draw from random.Random(…) seeded with state['example_id'], or with a column"
                    " of the row",
                )
                break
