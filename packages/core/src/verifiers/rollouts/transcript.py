"""``Transcript``: the turns of a rollout; ``branches``: the token sequences that they form.

A turn whose prompt begins with all of an earlier turn continues that turn's branch; any other turn
begins a branch, with its whole prompt. So a conversation is one branch, a template that drops
earlier thoughts, an agent that rewrites its history and a sub-agent make several, and every sampled
token is in exactly one of them, once. ``branches`` alone decides what continues what.

On disk a turn stores the index of the turn that it continues (``parent``, null for none), the
number of leading messages shared with it (``shared``) and the rest of its prompt; its tokens are
stored in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from verifiers.data.messages import saved_messages
from verifiers.errors import ScoringError
from verifiers.rollouts.declaration import values_to_save
from verifiers.rollouts.steps import TrajectoryStep, TrajectoryStepTokens
from verifiers.rollouts.turn import TURN_FIELDS, Turn
from verifiers.types import Immutable, Response

NOT_SAMPLED = -2
"""Version of a token that no policy sampled: prompts, tool results, offline text.
(-1: sampled, version unknown.)"""


class Branch(Immutable, frozen=True, eq=False):
    """A token sequence of a rollout: turns that continue each other, T tokens together.

    A prompt [1, 15], the completion [7, 2] and an environment's token 9 before the completion [2]::

        Branch(token_ids=[1, 15, 7, 2, 9, 2], sampled=[F, F, T, T, F, T],
               sampler_logprobs=[0, 0, -.1, -.7, 0, -.2], versions=[-2, -2, 4, 4, -2, 5],
               turns=((0, 2, 4), (1, 5, 6)))
    """

    token_ids: np.ndarray  # int32 [T]
    sampled: np.ndarray  # bool [T]: sampled by the model, not written by the environment
    sampler_logprobs: np.ndarray | None
    """float32 [T], nats, 0 if nothing was sampled; None when a turn has none."""
    versions: np.ndarray  # int32 [T], NOT_SAMPLED if nothing was sampled
    turns: tuple[tuple[int, int, int], ...]
    """(index among the merged turns, start, end) of each completion."""

    @property
    def num_prompt(self) -> int:
        """Tokens before the first completion."""
        return self.turns[0][1]


def branches(turns: Sequence[Turn]) -> list[Branch]:
    """Merge turns that have tokens into branches, in the order of their first turn.

    A turn continues the newest branch it can. Linear in the tokens of turns that continue the turn
    before; a prompt that continues none is compared with each branch.
    """
    chains: list[list[int]] = []
    for index, turn in enumerate(turns):
        for chain in reversed(chains):  # newest first, so that interleaved conversations match
            if turn.continues(turns[chain[-1]]):
                chain.append(index)
                break
        else:
            chains.append([index])
    return [_merged(turns, chain) for chain in chains]


def _merged(turns: Sequence[Turn], chain: Sequence[int]) -> Branch:
    token_ids = turns[chain[-1]].full_ids()  # the last turn begins with all of those before it
    size = len(token_ids)
    sampled, logprobs = np.zeros(size, bool), np.zeros(size, np.float32)
    versions = np.full(size, NOT_SAMPLED, np.int32)
    has_logprobs, spans = True, []
    for index in chain:
        turn = turns[index]
        start, end = turn.num_prompt, turn.num_tokens
        sampled[start:end], versions[start:end] = True, turn.version
        has_logprobs = has_logprobs and len(turn.sampler_logprobs) == end - start
        if has_logprobs:
            logprobs[start:end] = turn.sampler_logprobs
        spans.append((index, start, end))
    return Branch(token_ids, sampled, logprobs if has_logprobs else None, versions, tuple(spans))


class Transcript(list[Any]):
    """The turns of a rollout in the order of their calls: ``state["trajectory"]``.

    Authors may put plain dicts among them; ``turns`` makes these steps.
    """

    @property
    def turns(self) -> list[Turn]:
        """Every turn; a mapping of an author becomes a step that continues the step before."""
        for index, step in enumerate(self):
            if not isinstance(step, Turn):
                self[index] = TrajectoryStep(**step, previous=self[index - 1] if index else None)
        return self

    @property
    def trained(self) -> tuple[Turn, ...]:
        """The turns to train: they have tokens, and the environment does not leave them out."""
        return tuple(turn for turn in self.turns if turn.is_trained)

    def branches(self) -> list[Branch]:
        """The branches of the turns that have tokens."""
        return branches([turn for turn in self.turns if turn.has_tokens])

    def without_provider_objects(self) -> Transcript:
        """A copy whose responses lack the provider's objects."""
        copies = _restored(self._parts())
        for turn in copies:
            response = turn.response if isinstance(turn.response, Response) else None
            if response is not None and response.raw is not None:
                response = replace(response, raw=None)
            turn.response = response
        return copies

    def forked(self) -> Transcript:
        """Turns of their own, for a branch: they share messages and tokens with these."""
        turns = _restored(self._parts())
        for turn in turns:
            turn.extras = dict(turn.extras)
        return turns

    def to_json(self) -> list[dict[str, object]]:
        """The turns as JSON values, each message and token once."""
        written: list[dict[str, object]] = []
        # of the turns before; an author may have removed or moved some
        index_of: dict[int, int] = {}
        for index, turn in enumerate(self.turns):
            parent = index_of.get(id(turn.message_parent))
            step = {
                "parent": parent,
                "shared": 0 if parent is None else turn.num_shared_messages,
                "prompt": turn.prompt if parent is None else turn.new_prompt,
                "tokens": _tokens_to_json(turn, index_of) if turn.has_tokens else None,
                **values_to_save(TURN_FIELDS, turn),
            }
            further = dict.items(turn) if isinstance(turn, TrajectoryStep) else ()
            written.append(step | dict(further))
            index_of[id(turn)] = index
        return written

    @classmethod
    def from_json(cls, steps: Iterable[Mapping[str, Any]]) -> Transcript:
        """The turns of ``to_json``, and of versions that stored each prompt whole.

        *Raises* ValueError for an invalid pointer.
        """
        transcript = cls()
        for saved in steps:
            fields = {name: saved[name] for name in saved if name not in ("parent", "shared")}
            fields["prompt"] = saved_messages(fields.get("prompt", ""))
            hidden: dict[str, Any] = {}  # from authors, who see the reward
            for attribute, field in TURN_FIELDS.items():
                if field.name in fields:
                    value = field.saved.read(fields.pop(field.name))
                    (fields if field.key else hidden)[field.key or attribute] = value
            tokens, reward = fields.pop("tokens", None), fields.pop("reward", None)
            env_reward = hidden.pop("env_reward", None)
            if "parent" not in saved:
                previous = transcript[-1] if transcript else None
                step = TrajectoryStep(**fields, tokens=tokens, previous=previous)
            else:
                step = TrajectoryStep(**fields)
                parent, num_shared = _parent(saved, transcript)
                step.message_parent, step.num_shared_messages = parent, num_shared
                if tokens is not None:
                    _read_tokens(step, tokens, transcript)
            if reward is not None or "env_reward" in saved:
                step.env_reward = env_reward
                step.rollout_reward = reward if env_reward is None else None
            for attribute, value in hidden.items():
                setattr(step, attribute, value)
            transcript.append(step)
        return transcript

    # --- pickles keep what turns share

    def _parts(self) -> list[tuple[object, ...]]:
        parts: list[tuple[object, ...]] = []
        index_of: dict[int, int] = {}
        for index, turn in enumerate(self.turns):
            fields = dict(vars(turn), _prompt=None, _prompt_ids=None)
            links = [index_of.get(id(fields.pop(name, None))) for name in _LINKS]
            if links[0] is None and turn.num_shared:
                fields |= {"new_prompt_ids": turn.prompt_ids, "num_shared": 0}
            if links[1] is None and turn.num_shared_messages:
                fields |= {"new_prompt": turn.prompt, "num_shared_messages": 0}
            further = dict(dict.items(turn)) if isinstance(turn, TrajectoryStep) else {}
            parts.append((type(turn), fields, links, further))
            index_of[id(turn)] = index
        return parts

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (self._parts(),)


_LINKS = ("token_parent", "message_parent")


class UnsavedTurns(Transcript):
    """The turns of a rollout that was saved without them: reading them *raises* ScoringError, where
    an empty list would have a sum, a known 0. The library's own readers find none."""

    @property
    def turns(self) -> list[Turn]:
        return []

    def without_provider_objects(self) -> Transcript:
        return self

    def _unsaved(self, *_: object) -> Any:
        raise ScoringError(
            "the turns (state['trajectory']) were not saved, so what is computed from them is"
            ' unknown: save them with state_columns=["trajectory"] (vf-eval -C trajectory), and'
            " score that run"
        )

    __iter__ = __len__ = __bool__ = __getitem__ = __reversed__ = __contains__ = _unsaved

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return UnsavedTurns, ()


def _restored(parts: Iterable[tuple[Any, ...]]) -> Transcript:
    transcript = Transcript()
    for cls, fields, links, further in parts:
        turn = cls.__new__(cls)
        vars(turn).update(fields)
        for name, index in zip(_LINKS, links, strict=True):
            if index is not None:
                setattr(turn, name, transcript[index])
        if further:
            dict.update(turn, further)
        transcript.append(turn)
    return transcript


def _tokens_to_json(turn: Turn, index_of: Mapping[int, int]) -> dict[str, object]:
    parent = index_of.get(id(turn.token_parent))
    tokens = TrajectoryStepTokens.of(turn)
    ids = turn.prompt_ids if parent is None else turn.new_prompt_ids
    prompt = {"parent": parent, "shared": 0 if parent is None else turn.num_shared}
    names = [
        name for name in tokens if name not in ("prompt_ids", "prompt_mask", "completion_mask")
    ]
    return prompt | {"prompt_ids": ids.tolist()} | {name: tokens[name] for name in names}


def _read_tokens(
    step: TrajectoryStep, saved: Mapping[str, object], earlier: Sequence[Turn]
) -> None:
    parent, num_shared = _parent(saved, earlier)
    step["tokens"] = {name: saved[name] for name in saved if name not in ("parent", "shared")}
    step.token_parent, step.num_shared = parent, num_shared


def _parent(saved: Mapping[str, Any], earlier: Sequence[Turn]) -> tuple[Turn | None, int]:
    index = saved["parent"]
    if index is None:
        return None, 0
    if not 0 <= index < len(earlier):
        raise ValueError(f"a step continues step {index}, which does not come before it")
    return earlier[index], saved["shared"]
