"""Turns as authors see them: ``TrajectoryStep`` and ``TrajectoryStepTokens``, dicts over a
``Turn``.

Reading and writing a key goes to the turn; keys that a turn has not are stored by the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.rollouts.turn import TURN_FIELDS, Turn
from verifiers.rollouts.views import View
from verifiers.types import Messages, Response, ResponseTokens, float_array

if TYPE_CHECKING:
    import numpy.typing as npt

_ARRAYS = ("prompt_ids", "completion_ids", "completion_logprobs")


class TrajectoryStepTokens(View):
    """The tokens of a model call, as sampled; lists when read by key.

    Keys: ``prompt_ids``, ``prompt_mask`` (all 0), ``completion_ids``, ``completion_mask`` (all 1),
    ``completion_logprobs``, ``overlong_prompt``, ``is_truncated``, ``version`` (of the policy: one
    number, or one per token of a completion during which the weights changed).

    >>> tokens = vf.TrajectoryStepTokens(prompt_ids=[1, 15], completion_ids=[7],
    ...                                  completion_logprobs=[-0.5])
    >>> tokens["prompt_ids"], tokens["completion_mask"]
    ([1, 15], [1])
    """

    turn: Turn
    NAMES = (
        "prompt_ids prompt_mask completion_ids completion_mask completion_logprobs overlong_prompt"
        " is_truncated version"
    ).split()

    def __init__(
        self,
        prompt_ids: npt.ArrayLike = (),
        completion_ids: npt.ArrayLike = (),
        completion_logprobs: npt.ArrayLike = (),
        version: int | npt.ArrayLike = -1,
        is_truncated: bool = False,
        overlong_prompt: bool = False,
        previous: TrajectoryStepTokens | None = None,
        prompt_mask: object = None,
        completion_mask: object = None,
        **fields: object,
    ):
        self._fill()
        turn = Turn.__new__(Turn)
        turn.extras, turn.is_truncated = {}, is_truncated
        before = None if previous is None else previous.turn
        turn.set_tokens(prompt_ids, completion_ids, completion_logprobs, version, before)
        if overlong_prompt or fields:
            turn.token_fields = {"overlong_prompt": overlong_prompt, **fields}
        object.__setattr__(self, "turn", turn)

    @classmethod
    def of(cls, turn: Turn) -> TrajectoryStepTokens:
        """The view of a turn's tokens."""
        view = cls.__new__(cls)
        view._fill()
        object.__setattr__(view, "turn", turn)
        return view

    def _fill(self) -> None:
        """Store a key that is never read: ``json`` writes a dict that stores none as ``{}``."""
        dict.__setitem__(self, "version", None)

    @property
    def shared(self) -> int:
        """How many leading prompt tokens are the previous step's prompt and completion."""
        return self.turn.num_shared

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the completion together, without composing them."""
        return self.turn.num_tokens

    def full_ids(self) -> np.ndarray:
        """Prompt and completion together, int32 [P + C]."""
        return self.turn.full_ids()

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(prompt ids int32 [P], completion ids int32 [C], log-probabilities float [C])."""
        return self.turn.prompt_ids, self.turn.completion_ids, self.turn.sampler_logprobs

    def names(self) -> tuple[str, ...]:
        further = (name for name in self.turn.token_fields or () if name not in self.NAMES)
        return (*self.NAMES, *further)

    def __getitem__(self, key: str) -> Any:
        return self.read(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def read(self, key: str) -> Any:
        turn, fields = self.turn, self.turn.token_fields or {}
        if key in _ARRAYS:
            return self.arrays()[_ARRAYS.index(key)].tolist()
        match key:
            case "prompt_mask":
                return [0] * turn.num_prompt
            case "completion_mask":
                return [1] * (turn.num_tokens - turn.num_prompt)
            case "version":
                return turn.version if isinstance(turn.version, int) else turn.version.tolist()
            case "overlong_prompt":
                return fields.get(key, False)
            case "is_truncated":
                return fields.get(key, turn.is_truncated)
        return fields[key]

    def write(self, key: str, value: Any) -> bool:
        match key:
            case "prompt_ids":
                self.turn.set_prompt_ids(np.asarray(value, np.int32))
            case "completion_ids":
                self.turn.completion_ids = np.asarray(value, np.int32)
            case "completion_logprobs":
                self.turn.sampler_logprobs = float_array(value)
            case "version":
                self.turn.set_version(value)
            case _:
                self.turn.token_fields = {**(self.turn.token_fields or {}), key: value}
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self:
            raise AttributeError(f"step tokens have no {name!r}")
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (TrajectoryStepTokens, dict(self))


class TrajectoryStep(Turn, View):
    """A model call: ``prompt completion response tokens reward advantage is_truncated
    trajectory_id extras``.

    Token data are in ``tokens`` only: a ``response`` with tokens is stored without them, because
    every response repeats the ids of the whole prompt.

    >>> step = vf.TrajectoryStep([vf.UserMessage("hi")], [vf.AssistantMessage("hello")])
    >>> step["completion"][0].content, step.reward
    ('hello', None)
    """

    NAMES = ("prompt", "tokens", *(field.key for field in TURN_FIELDS.values() if field.key))

    def __init__(
        self,
        prompt: Messages = "",
        completion: Messages = "",
        response: Response | None = None,
        tokens: TrajectoryStepTokens | ResponseTokens | Mapping[str, object] | None = None,
        reward: float | None = None,
        advantage: float | None = None,
        is_truncated: bool = False,
        trajectory_id: str = "",
        extras: dict[str, object] | None = None,
        previous: Turn | None = None,
        **further: object,
    ):
        dict.__init__(self, trajectory_id=trajectory_id)
        self.set_prompt(prompt, previous)
        self.completion, self.is_truncated = completion, is_truncated
        self.extras = {} if extras is None else extras
        if reward is not None:
            self.reward = reward
        if advantage is not None:
            self.advantage = advantage
        for name, value in further.items():
            self[name] = value
        if tokens is not None:
            self._take_tokens(tokens, previous)
            if isinstance(response, Response) and response.tokens is not None:
                response = replace(response, tokens=None)
        self.response = response

    @property
    def tokens(self) -> TrajectoryStepTokens | None:
        """The tokens as authors read them; None without."""
        return TrajectoryStepTokens.of(self) if self.has_tokens else None

    def _take_tokens(
        self,
        tokens: TrajectoryStepTokens | ResponseTokens | Mapping[str, object] | None,
        previous: Turn | None = None,
    ) -> None:
        if tokens is None:
            self.set_tokens((), (), ())
            self.has_tokens = False
            return
        if isinstance(tokens, ResponseTokens):
            ids = tokens.prompt_ids, tokens.completion_ids
            self.set_tokens(*ids, tokens.completion_logprobs, tokens.version, previous)
            return
        if not isinstance(tokens, TrajectoryStepTokens):
            tokens = TrajectoryStepTokens(**tokens)
        source = tokens.turn
        if source is self:
            return
        if source.token_parent is not None or previous is None:
            self.token_parent, self.num_shared = source.token_parent, source.num_shared
            self.new_prompt_ids, self._prompt_ids = source.new_prompt_ids, source._prompt_ids
        else:
            self.set_prompt_ids(source.prompt_ids, previous)
        self.completion_ids, self.sampler_logprobs = source.completion_ids, source.sampler_logprobs
        self.version, self.token_fields = source.version, source.token_fields
        self.has_tokens = True
        if source.is_truncated != self.is_truncated:
            self.token_fields = {"is_truncated": source.is_truncated, **(source.token_fields or {})}
        object.__setattr__(tokens, "turn", self)  # further writes of the author go here

    @property
    def shared(self) -> int:
        """How many leading messages (characters, in completion mode) the prompt shares."""
        return self.num_shared_messages

    def names(self) -> tuple[str, ...]:
        return self.NAMES

    def read(self, key: str) -> Any:
        if key in self.NAMES:
            return getattr(self, key)
        raise KeyError(key)

    def write(self, key: str, value: Any) -> bool:
        if key == "tokens":
            self._take_tokens(value)
        elif key in self.NAMES:
            setattr(self, key, value)
        else:
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and name in dict.keys(self):
            return dict.__getitem__(self, name)
        raise AttributeError(f"a step has no {name!r}")

    def __eq__(self, step: object) -> bool:
        return self is step or (isinstance(step, Mapping) and dict(self) == dict(step))

    __hash__ = None  # type: ignore[assignment]  # as of a dict

    def __reduce__(self) -> tuple[object, ...]:
        fields = dict(self)
        if fields["tokens"] is not None:
            fields["tokens"] = dict(fields["tokens"])
        return _rebuilt, (TrajectoryStep, fields)


def _rebuilt(cls: type, fields: Mapping[str, object]) -> object:
    return cls(**fields)
