"""Trajectories of saved rollouts: without provider objects in memory, each message and token id once on disk.

In memory a step keeps its ``Response``, which the file does not have.

On disk a step stores the index of the step that its prompt continues (``parent``, null for none) and the number of
leading messages shared with it (``shared``); ``prompt`` holds the rest, and likewise for token ids. Reading returns
``TrajectoryStep``s with whole prompts. Linear in the turns, in bytes and in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verifiers.data.messages import normalize_messages
from verifiers.rollouts.state import TrajectoryStep, TrajectoryStepTokens
from verifiers.types import Response

_LINKS = ("parent", "shared")


def public_steps(trajectory: Sequence[Any]) -> list[TrajectoryStep]:
    """Copies of the steps; a ``response`` only where it is a ``Response``, without the provider's object."""
    return _relinked(_as_steps(trajectory))


def pack(trajectory: Sequence[Any]) -> list[dict[str, Any]]:
    """The steps as JSON values with parent pointers."""
    steps = _as_steps(trajectory)
    step_index = {id(step): i for i, step in enumerate(steps)}
    token_index = {id(step["tokens"]): i for i, step in enumerate(steps) if step["tokens"] is not None}
    return [_packed_step(step, step_index, token_index) for step in steps]


def unpack(packed: Sequence[Mapping[str, Any]]) -> list[TrajectoryStep]:
    """The steps of ``pack``; steps of other versions, without pointers, are read unchanged.

    *Raises* ValueError for an invalid pointer.
    """
    steps: list[TrajectoryStep] = []
    for packed_step in packed:
        fields = {name: value for name, value in packed_step.items() if name not in _LINKS}
        for name in ("prompt", "completion"):
            if isinstance(fields.get(name), list):
                fields[name] = normalize_messages(fields[name])
        tokens = fields.get("tokens")
        if "parent" not in packed_step:
            previous = steps[-1] if steps else None
            fields["tokens"] = _read_tokens(tokens, previous)
            steps.append(TrajectoryStep(**fields, previous=previous))
            continue
        if tokens is not None:
            token_fields = {name: value for name, value in tokens.items() if name not in _LINKS}
            parent = _parent(tokens, [step["tokens"] for step in steps])
            fields["tokens"] = _linked(TrajectoryStepTokens(**token_fields), parent, tokens["shared"])
        steps.append(_linked(TrajectoryStep(**fields), _parent(packed_step, steps), packed_step["shared"]))
    return steps


def _as_steps(trajectory: Sequence[Any]) -> list[TrajectoryStep]:
    """Convert plain dicts of authors to steps that continue the one before."""
    steps: list[TrajectoryStep] = []
    for step in trajectory:
        previous = steps[-1] if steps else None
        if not isinstance(step, TrajectoryStep):
            step = TrajectoryStep(**{**step, "tokens": _read_tokens(step.get("tokens"), previous)}, previous=previous)
        steps.append(step)
    return steps


def _read_tokens(
    tokens: TrajectoryStepTokens | Mapping[str, Any] | None, previous: TrajectoryStep | None
) -> TrajectoryStepTokens | None:
    if tokens is None or isinstance(tokens, TrajectoryStepTokens):
        return tokens
    before = previous["tokens"] if previous is not None else None
    return TrajectoryStepTokens(**tokens, previous=before if isinstance(before, TrajectoryStepTokens) else None)


def _relinked(steps: Sequence[TrajectoryStep]) -> list[TrajectoryStep]:
    copies: dict[int, TrajectoryStep] = {}
    for step in steps:
        fields = dict(dict.items(step))
        fields["response"] = _public_response(fields["response"])
        copy = TrajectoryStep(**fields)
        parent = copies.get(id(step._previous))
        if parent is None and step.shared:
            dict.__setitem__(copy, "prompt", step["prompt"])
        copies[id(step)] = copy if parent is None else _linked(copy, parent, step.shared)
    return [copies[id(step)] for step in steps]


def _public_response(response: object) -> Response | None:
    if not isinstance(response, Response):
        return None
    return response if response.raw is None else replace(response, raw=None)


def _packed_step(step: TrajectoryStep, steps: Mapping[int, int], token_sets: Mapping[int, int]) -> dict[str, Any]:
    parent = steps.get(id(step._previous))
    packed = {"parent": parent, "shared": step.shared if parent is not None else 0, **dict(dict.items(step))}
    packed.pop("response", None)
    packed["prompt"] = step.new_prompt() if parent is not None else step["prompt"]
    if isinstance(step["tokens"], TrajectoryStepTokens):
        packed["tokens"] = _packed_tokens(step["tokens"], token_sets)
    return packed


def _packed_tokens(tokens: TrajectoryStepTokens, token_sets: Mapping[int, int]) -> dict[str, Any]:
    parent = token_sets.get(id(tokens._previous))
    prompt_ids = tokens.prompt_array() if parent is None else tokens.new_prompt_ids()
    rest = {name: value for name, value in dict.items(tokens) if name not in TrajectoryStepTokens.COMPOSED}
    return {
        "parent": parent,
        "shared": 0 if parent is None else tokens.shared,
        "prompt_ids": prompt_ids.tolist(),
        "completion_ids": tokens["completion_ids"],
        "completion_logprobs": tokens["completion_logprobs"],
        **rest,
    }


def _parent(pointers: Mapping[str, Any], earlier: Sequence[Any]) -> Any:
    index = pointers["parent"]
    if index is None:
        return None
    if not 0 <= index < len(earlier):
        raise ValueError(f"a step continues step {index}, which does not come before it")
    return earlier[index]


def _linked(step: object, parent: object, shared: int) -> Any:
    object.__setattr__(step, "_previous", parent)
    object.__setattr__(step, "_shared", shared if parent is not None else 0)
    return step
