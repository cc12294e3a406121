"""The mutable record of one rollout: ``State`` and its turns, ``TrajectoryStep``.

A state is a dict of reserved keys (``State.RESERVED``), the columns of its row, and keys that the author adds.
``state.rollout()`` freezes it as ``types.Rollout``.

Every turn of a conversation repeats the turns before it, so a step stores only what follows the prefix that it shares
with the step before; ``step["prompt"]`` and ``tokens["prompt_ids"]`` are composed on reading. A rollout's memory
therefore grows linearly with its turns. Only the newest step of a running rollout also holds its whole prompt, so that
the next turn costs only its new part. Token ids and log-probabilities are the arrays the server sent; nothing is
encoded again.

``loop`` runs rollouts; ``results`` writes them to disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers import compat
from verifiers.errors import cause_of
from verifiers.runtime.calls import Finished
from verifiers.runtime.redaction import redacted_text
from verifiers.types import AttributeDict, Messages, Response, ResponseTokens, Rollout, StopReason, Turn, float_array

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["InputView", "State", "Timing", "TrajectoryStep", "TrajectoryStepTokens", "record_tokens"]


# --- the rollout ----------------------------------------------------------------------------------------------------


class Timing(AttributeDict):
    """Where a rollout's time went, in milliseconds, and when it began (epoch seconds).

    >>> timing = vf.Timing(model_ms=12.5)
    >>> timing.model_ms, timing["total_ms"]
    (12.5, 0.0)
    """

    _ZERO = dict.fromkeys(
        ("setup_ms", "generation_ms", "model_ms", "env_ms", "scoring_ms", "total_ms", "overhead_ms", "start_time"), 0.0
    )

    def __init__(self, **times: float):
        dict.__init__(self, self._ZERO, **times)

    def __missing__(self, key: str) -> Any:
        if key in compat.TIMES:
            return compat.load(compat.SECONDS_OF)(self, compat.TIMES[key], key)
        raise KeyError(key)


class InputView(MutableMapping[str, Any]):
    """``state["input"]``: the row's columns, live; reading and writing go to the state itself.

    A column with the name of a reserved key (a dataset may have a column "reward" or "id") is stored separately and
    readable only here.
    """

    __slots__ = ("_state",)

    def __init__(self, state: State):
        self._state = state

    def __getitem__(self, key: str) -> Any:
        if key not in self._state.input_columns:
            raise KeyError(key)
        hidden = self._state.hidden_columns
        return hidden[key] if key in hidden else dict.__getitem__(self._state, key)

    def __setitem__(self, key: str, value: object) -> None:
        if key not in self._state.input_columns:
            self._state.input_columns.append(key)
        if key in State.RESERVED:
            self._state.hidden_columns[key] = value
        else:
            dict.__setitem__(self._state, key, value)

    def __delitem__(self, key: str) -> None:
        self._state.input_columns.remove(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.input_columns)

    def __len__(self) -> int:
        return len(self._state.input_columns)

    def __repr__(self) -> str:
        return repr(dict(self))


_get_item, _set_item = dict.__getitem__, dict.__setitem__
_NOT_PLAIN = frozenset(("id", "turn", "responses", "input", "timing", "oai_tools"))
"""Keys of a state that are not assigned as they are."""


class State(dict[str, Any], Finished):
    """Everything about one rollout, from its dataset row to its reward. Other keys belong to the author.

    The row's columns are at the top level, and ``state["input"]`` is a live view of them. ``reward`` is None until
    scored, NaN when unknown. ``oai_tools`` and ``tool_defs`` are one list. ``id``, ``turn`` and ``responses`` are
    computed when read and cannot be assigned.

    >>> s = State(prompt=[], answer="4", example_id=3)
    >>> s["input"]["answer"], s["turn"], s["reward"]
    ('4', 0, None)
    """

    run: Any = None
    """The run this rollout belongs to (``runner.RunContext``): its limits and seeds; None outside a run."""
    waiting_for: str | None = None
    """What the rollout currently awaits, for progress displays and time-outs."""
    turn_rewards: list[Any] | None = None
    """The environment's reward of each turn (None = none), saved before scoring fills the steps with the reward."""
    seed_key: str = ""
    """Example and sibling, from which the sampling seeds are derived together with the run's seed."""
    attempts: int = 1
    """How often the rollout was run."""
    saved_columns: tuple[str, ...] = ()
    """Keys that are saved with the rollout, beside those that the run asks for; set by the environment."""
    cleaned_up: bool = False
    """Whether the rubric's clean-up handlers have already run, in the worker that ran the rollout."""

    INPUT_FIELDS = ("prompt", "answer", "task", "info", "example_id")
    COMPUTED = frozenset(("id", "turn", "responses"))
    _DEFAULTS: Mapping[str, Any] = {
        "client": None,
        "model": "",
        "sampling_args": None,
        "tool_defs": None,
        "trajectory": None,
        "trajectory_id": "",
        "completion": None,
        "is_completed": False,
        "is_truncated": False,
        "prompt_too_long": False,
        "stop_condition": None,
        "error": None,
        "reward": None,
        "advantage": None,
        "metrics": None,
        "timing": None,
        "usage": None,
        "final_env_response": None,
        "judge_response": None,
    }
    RESERVED = COMPUTED | _DEFAULTS.keys() | {"input", "oai_tools"}
    """Reserved keys; a column of such a name is read through ``state["input"]``."""

    def __init__(self, *mappings: Mapping[str, Any], **fields: Any):
        values = fields
        if mappings:
            values = {}
            for mapping in mappings:
                values.update(mapping)
            values.update(fields)
        row = values.pop("input", None)
        if row is None:
            row = {key: value for key, value in values.items() if key not in self._DEFAULTS and key != "oai_tools"}
        if "oai_tools" in values:
            values["tool_defs"] = values.pop("oai_tools")
        columns = {"prompt": [], "answer": "", "task": "default", "info": {}, "example_id": 0, **row}
        self.input_columns = list(columns)
        """Names of the row's columns."""
        self.hidden_columns: dict[str, Any] = {}
        """Columns whose names are reserved keys."""
        if not self.RESERVED.isdisjoint(columns):
            self.hidden_columns = {key: columns.pop(key) for key in self.RESERVED.intersection(columns)}
        fresh = {"trajectory": [], "metrics": {}, "timing": Timing(), "usage": {}, "judge_response": {}}
        dict.__init__(self, {**self._DEFAULTS, **fresh, **columns, **values})
        if not self.COMPUTED.isdisjoint(values):
            for name in self.COMPUTED:
                dict.pop(self, name, None)
        self.counted: list[Response] = []
        """Responses since the newest turn whose tokens are in ``usage``."""
        for key in fresh.keys() & values.keys():
            if self[key] is None:
                dict.__setitem__(self, key, fresh[key])
        if type(timing := self["timing"]) is not Timing:
            dict.__setitem__(self, "timing", Timing(**timing))

    def __missing__(self, key: str) -> Any:
        match key:
            case "input":
                return InputView(self)
            case "oai_tools":
                return self["tool_defs"]
            case "id":
                return self["example_id"]
            case "turn":
                return len(self["trajectory"])
            case "responses":
                return [step["response"] for step in self["trajectory"]]
            case "timed_out":
                return self["stop_condition"] == StopReason.TIMEOUT
            case "usage_tracker":
                return compat.load(compat.USAGE_TRACKER)(self["usage"])
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in _NOT_PLAIN:
            _set_item(self, key, value)
        elif key == "input":
            self.input_columns, self.hidden_columns = [], {}
            InputView(self).update(value)
        elif key == "timing":
            dict.__setitem__(self, key, value if isinstance(value, Timing) else Timing(**value))
        elif key == "oai_tools":
            dict.__setitem__(self, "tool_defs", value)
        else:
            raise KeyError(f"state[{key!r}] is computed and cannot be assigned")

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in ("input", "oai_tools") or key in self.COMPUTED

    def get(self, key: str, default: object = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def update(self, *mappings: Any, **fields: Any) -> None:
        for key, value in dict(*mappings, **fields).items():
            self[key] = value

    def __ior__(self, other: Any) -> State:  # type: ignore[override,misc]  # the overloads of dict return a dict
        self.update(other)
        return self

    def setdefault(self, key: str, default: object = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def copy(self) -> dict[str, Any]:
        """A plain dict of the keys, with ``input``."""
        return {**self, "input": dict(self["input"])}

    def rollout(self) -> Rollout:
        """An immutable copy of the rollout: its turns as sampled, reward and metrics."""
        error, advantage = self["error"], self["advantage"]
        reward = math.nan if self["reward"] is None else float(self["reward"])
        turns = turns_of(self["trajectory"])
        return Rollout(
            turns=turns,
            reward=reward,
            metrics=dict(self["metrics"]),
            error=None if error is None else redacted_text(f"{type(error).__name__}: {error}"),
            cause=None if error is None else redacted_text(cause_of(error)),
            stop=self["stop_condition"],
            is_truncated=bool(self["is_truncated"]),
            text={"prompt": self["prompt"], "completion": self["completion"], "answer": self["answer"]},
            turn_rewards=self._env_turn_rewards(),
            advantage=None if advantage is None else float(advantage),
            role_rewards={turn.role: float(self["metrics"].get(turn.role, reward)) for turn in turns if turn.role},
        )

    def _env_turn_rewards(self) -> tuple[float, ...]:
        """The environment's rewards of the trained turns; empty when all are 0. Scoring fills in the rollout's."""
        steps, rewards = self["trajectory"], self.turn_rewards
        if rewards is None or len(rewards) != len(steps):  # read from a file
            filled_in = None, self["reward"]
            rewards = [None if (one := dict.get(step, "reward")) in filled_in else one for step in steps]
        if not any(rewards):
            return ()
        sampled = [reward for step, reward in zip(steps, rewards, strict=True) if is_trained(step)]
        numbers = [0.0 if reward is None or math.isnan(reward) else float(reward) for reward in sampled]
        return tuple(numbers) if any(numbers) else ()

    def __reduce__(self) -> tuple[Any, ...]:
        return State, (self.copy(),)


# --- one model call -----------------------------------------------------------------------------------------------


class TrajectoryStepTokens(AttributeDict):
    """The tokens of one model call, as sampled. Lists when read by key; ``arrays()`` gives them without a copy.

    Keys: ``prompt_ids``, ``prompt_mask`` (all 0), ``completion_ids``, ``completion_mask`` (all 1),
    ``completion_logprobs``, ``overlong_prompt``, ``is_truncated``, ``version`` (of the policy: one number, or one per
    token of a completion during which the weights changed).

    >>> tokens = vf.TrajectoryStepTokens(prompt_ids=[1, 15], completion_ids=[7], completion_logprobs=[-0.5])
    >>> tokens["prompt_ids"], tokens["completion_mask"]
    ([1, 15], [1])
    """

    __slots__ = ("_previous", "_shared", "_whole_prompt")
    _previous: Any
    _shared: int
    _whole_prompt: np.ndarray | None
    COMPOSED = frozenset(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs"))

    def __init__(
        self,
        prompt_ids: npt.ArrayLike = (),
        completion_ids: npt.ArrayLike = (),
        completion_logprobs: Any = (),
        version: int | Sequence[int] = -1,
        is_truncated: bool = False,
        overlong_prompt: bool = False,
        previous: TrajectoryStepTokens | None = None,
        **extra: object,
    ):
        prompt = np.asarray(prompt_ids, np.int32)
        shared = 0 if previous is None else _common_prefix(previous.full_ids(), prompt)
        _link(self, previous, shared, prompt)
        extra.pop("prompt_mask", None), extra.pop("completion_mask", None)
        super().__init__(
            prompt_ids=prompt[shared:].copy() if shared else prompt,
            prompt_mask=None,
            completion_ids=np.asarray(completion_ids, np.int32),
            completion_mask=None,
            completion_logprobs=float_array(completion_logprobs),
            overlong_prompt=overlong_prompt,
            is_truncated=is_truncated,
            version=version,
            **extra,
        )

    @property
    def shared(self) -> int:
        """How many leading prompt tokens are the previous step's prompt and completion, unchanged."""
        return self._shared

    @property
    def previous(self) -> TrajectoryStepTokens | None:
        """The tokens of the previous step; None when no prefix is shared with it."""
        previous: TrajectoryStepTokens | None = self._previous
        return previous

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the completion together, without composing them."""
        return self._shared + len(self.new_prompt_ids()) + len(dict.__getitem__(self, "completion_ids"))

    def new_prompt_ids(self) -> np.ndarray:
        """The prompt tokens after the shared prefix, int32 [P - shared]."""
        ids: np.ndarray = dict.__getitem__(self, "prompt_ids")
        return ids

    def prompt_array(self) -> np.ndarray:
        """The whole prompt, int32 [P]."""
        if self._whole_prompt is not None:
            return self._whole_prompt
        if self._previous is None:
            return self.new_prompt_ids()
        return np.concatenate([self._previous.full_ids()[: self._shared], self.new_prompt_ids()])

    def full_ids(self) -> np.ndarray:
        """Prompt and completion together, int32 [P + C]; linear in the length, without recursion."""
        if self._whole_prompt is not None:
            return np.concatenate([self._whole_prompt, dict.__getitem__(self, "completion_ids")])
        end = self.num_tokens
        ids, step = np.empty(end, np.int32), self
        while step is not None:  # newest first: each fills what follows its shared prefix
            new = np.concatenate([step.new_prompt_ids(), dict.__getitem__(step, "completion_ids")])
            new = new[: max(0, end - step._shared)]
            ids[step._shared : step._shared + len(new)] = new
            end, step = min(end, step._shared), step._previous
        return ids

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(prompt ids int32 [P], completion ids int32 [C], log-probabilities float64 or float32 [C])."""
        return (
            self.prompt_array(),
            dict.__getitem__(self, "completion_ids"),
            dict.__getitem__(self, "completion_logprobs"),
        )

    def __getitem__(self, key: str) -> Any:
        if key not in self.COMPOSED:
            return dict.__getitem__(self, key)
        if key == "prompt_ids":
            return self.prompt_array().tolist()
        if key == "prompt_mask":
            return [0] * (self._shared + len(self.new_prompt_ids()))
        if key == "completion_mask":
            return [1] * len(dict.__getitem__(self, "completion_ids"))
        return dict.__getitem__(self, key).tolist()

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "prompt_ids":
            _link(self, None, 0, None)
        if key in ("prompt_ids", "completion_ids"):
            value = np.asarray(value, np.int32)
        elif key == "completion_logprobs":
            value = float_array(value)
        super().__setitem__(key, value)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"step tokens have no {name!r}")

    def get(self, key: str, default: object = None) -> Any:
        return self[key] if key in self else default

    def __iter__(self) -> Iterator[str]:  # with an overridden __iter__, dict(x) reads through __getitem__
        return super().__iter__()

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (TrajectoryStepTokens, dict(self))


def _rebuild(cls: type, fields: dict[str, Any]) -> Any:
    return cls(**fields)


def _link(step: object, previous: object, shared: int, whole_prompt: object) -> None:
    """Link a step to ``previous``, sharing ``shared`` of its parts; only the newest step holds its whole prompt."""
    object.__setattr__(step, "_previous", previous if shared else None)
    object.__setattr__(step, "_shared", shared)
    object.__setattr__(step, "_whole_prompt", whole_prompt if shared else None)
    if previous is not None:
        object.__setattr__(previous, "_whole_prompt", None)


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the longest common prefix of two 1-D arrays."""
    n = min(len(left), len(right))
    if np.array_equal(left[:n], right[:n]):
        return n
    return int(np.argmin(left[:n] == right[:n]))


class TrajectoryStep(AttributeDict):
    """One model call: ``prompt completion response tokens reward advantage is_truncated trajectory_id extras``.

    Token data are stored in ``tokens`` only: a ``response`` with recorded tokens is stored without them, because every
    response repeats the ids of the whole prompt.

    >>> step = vf.TrajectoryStep([vf.UserMessage("hi")], [vf.AssistantMessage("hello")])
    >>> step["completion"][0].content, step.reward
    ('hello', None)
    """

    __slots__ = ("_previous", "_shared", "_whole_prompt")
    _previous: Any
    _shared: int
    _whole_prompt: Any

    def __init__(
        self,
        prompt: Messages = "",
        completion: Messages = "",
        response: Response | None = None,
        tokens: TrajectoryStepTokens | Mapping[str, Any] | None = None,
        reward: float | None = None,
        advantage: float | None = None,
        is_truncated: bool = False,
        trajectory_id: str = "",
        extras: dict[str, Any] | None = None,
        previous: TrajectoryStep | None = None,
        **more: object,
    ):
        shared = 0 if previous is None else _common_messages(previous.conversation(), prompt)
        _link(self, previous, shared, prompt[:])
        if isinstance(tokens, TrajectoryStepTokens) and isinstance(response, Response) and response.tokens is not None:
            response = replace(response, tokens=None)
        super().__init__(
            prompt=prompt[shared:],
            completion=completion,
            response=response,
            tokens=tokens,
            reward=reward,
            advantage=advantage,
            is_truncated=is_truncated,
            trajectory_id=trajectory_id,
            extras={} if extras is None else extras,
            **more,
        )

    @property
    def shared(self) -> int:
        """How many leading messages (characters, in completion mode) the prompt shares with the previous step."""
        return self._shared

    def new_prompt(self) -> Messages:
        """The prompt's messages after the shared prefix."""
        prompt: Messages = dict.__getitem__(self, "prompt")
        return prompt

    def conversation(self) -> Messages:
        """Prompt and completion together, as a new list (or text)."""
        conversation: Messages = self["prompt"] + dict.__getitem__(self, "completion")
        return conversation

    def settle(self) -> None:
        """Drop the copy of the whole prompt, when no step will continue this one."""
        object.__setattr__(self, "_whole_prompt", None)
        tokens = dict.__getitem__(self, "tokens")
        if isinstance(tokens, TrajectoryStepTokens):
            object.__setattr__(tokens, "_whole_prompt", None)

    def _composed(self) -> Messages:
        """Compose the prompt from the chain of steps; linear in the result."""
        new = self.new_prompt()
        pieces: list[Any] = [new]
        end, step = self._shared, self._previous
        while end:  # newest first: each adds what follows its own shared prefix
            if end > step._shared:
                pieces.append((step.new_prompt() + dict.__getitem__(step, "completion"))[: end - step._shared])
                end = step._shared
            step = step._previous
        pieces.reverse()
        return "".join(pieces) if isinstance(new, str) else list(chain.from_iterable(pieces))

    def __getitem__(self, key: str) -> Any:
        if key != "prompt":
            return dict.__getitem__(self, key)
        return self._composed() if self._whole_prompt is None else self._whole_prompt[:]

    def __setitem__(self, key: str, value: object) -> None:
        if key == "prompt":
            _link(self, None, 0, None)
        dict.__setitem__(self, key, value)

    def get(self, key: str, default: object = None) -> Any:
        return self[key] if key in self else default

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (TrajectoryStep, dict(self))


def _common_messages(before: Messages, now: Messages) -> int:
    """Length of the common prefix of two message lists or two texts."""
    if isinstance(before, str) or isinstance(now, str):
        return len(before) if isinstance(before, str) and isinstance(now, str) and now.startswith(before) else 0
    if now[: len(before)] == before:
        return len(before)
    n = 0
    for left, right in zip(before, now, strict=False):
        if left is not right and left != right:
            break
        n += 1
    return n


def record_tokens(tokens: ResponseTokens | None, truncated: bool, previous: TrajectoryStep | None) -> Any:
    """The step tokens of a response, linked to the previous step; None when the response has none."""
    if tokens is None:
        return None
    before = previous["tokens"] if previous is not None else None
    return TrajectoryStepTokens(
        tokens.prompt_ids,
        tokens.completion_ids,
        tokens.completion_logprobs,
        version=tokens.version if isinstance(tokens.version, int) else tokens.version.tolist(),
        is_truncated=truncated,
        previous=before if isinstance(before, TrajectoryStepTokens) else None,
    )


def is_trained(step: TrajectoryStep) -> bool:
    """Whether a step is a turn to train: it has tokens, and its environment does not leave it out."""
    if _get_item(step, "tokens") is None:
        return False
    return _get_item(step, "extras").get("is_trained", True) is not False


def turns_of(steps: Sequence[TrajectoryStep]) -> tuple[Turn, ...]:
    """The turns of the trained steps; linear in their tokens while each prompt continues the turn before."""
    trained = [step for step in steps if is_trained(step)]
    if len(trained) == 1:
        return (_only_turn(trained[0]),)
    turns: list[Turn] = []
    run: list[tuple[TrajectoryStepTokens, bool, int, str]] = []
    before, end, shared_of_first = None, 0, 0
    for step in trained:
        tokens = _get_item(step, "tokens")
        shared = tokens._shared if tokens._previous is before else 0
        if run and shared < end:
            turns += _continued_turns(run, shared_of_first)
            run = []
        if not run:
            shared_of_first = shared
        end = tokens.num_tokens
        role = _get_item(step, "extras").get("rewarded_role", "")
        run.append((tokens, _get_item(step, "is_truncated"), end, role))
        before = tokens
    return tuple(turns + _continued_turns(run, shared_of_first)) if run else ()


def _only_turn(step: TrajectoryStep) -> Turn:
    """The turn of a rollout that has one: ``_continued_turns`` without the search for shared tokens."""
    tokens, role = _get_item(step, "tokens"), _get_item(step, "extras").get("rewarded_role", "")
    sampled, logprobs = _get_item(tokens, "completion_ids"), _get_item(tokens, "completion_logprobs")
    version = _get_item(tokens, "version")
    if not isinstance(version, int):
        version = np.asarray(version)
    return Turn(tokens.prompt_array(), sampled, logprobs, version, _get_item(step, "is_truncated"), 0, role)


def _continued_turns(run: Sequence[tuple[TrajectoryStepTokens, bool, int, str]], num_shared: int) -> list[Turn]:
    """Turns whose prompts each begin with the whole turn before; the prompts are views of one array.

    ``run``: (tokens, whether a limit truncated the turn, end position, role) per turn; ``num_shared``: of the first
    turn.
    """
    pieces: list[np.ndarray] = []
    for tokens, *_ in run:
        pieces.append(tokens.new_prompt_ids() if pieces else tokens.prompt_array())
        pieces.append(dict.__getitem__(tokens, "completion_ids"))
    ids = np.concatenate(pieces[:-1]) if len(run) > 1 else pieces[0]
    turns = []
    for (tokens, is_truncated, end, role), sampled in zip(run, pieces[1::2], strict=True):
        logprobs, version = dict.__getitem__(tokens, "completion_logprobs"), dict.__getitem__(tokens, "version")
        if not isinstance(version, int):
            version = np.asarray(version)
        turns.append(Turn(ids[: end - len(sampled)], sampled, logprobs, version, is_truncated, num_shared, role))
        num_shared = end
    return turns
