"""What happened in one rollout: ``State``, the one mutable thing, with its turns stored once.

Every turn of a conversation repeats the turns before it. A ``TrajectoryStep`` therefore keeps only what is new after
the prefix it shares with the step before; ``step["prompt"]`` and ``tokens["prompt_ids"]`` are composed when read, so
a rollout's memory grows linearly with its turns. Token ids and log-probabilities are never re-encoded: they are the
arrays the server sent.

This module does not run rollouts (``rollout``) and does not write them to disk (``results``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from verifiers.types import AttributeDict, Messages, Response, ResponseTokens


class Timing(AttributeDict):
    """Where a rollout's time went, in milliseconds, and when it began (epoch seconds)."""

    def __init__(self, **given: float):
        fields = dict.fromkeys(
            ("setup_ms", "generation_ms", "model_ms", "env_ms", "scoring_ms", "total_ms", "overhead_ms"), 0.0
        )
        super().__init__(fields | {"start_time": 0.0} | given)


class TrajectoryStepTokens(AttributeDict):
    """The tokens of one model call, as sampled. Lists when read by key; ``arrays()`` gives them without a copy.

    Keys: ``prompt_ids``, ``prompt_mask`` (all 0), ``completion_ids``, ``completion_mask`` (all 1),
    ``completion_logprobs``, ``overlong_prompt``, ``is_truncated``, ``version``.
    """

    __slots__ = ("_previous", "_shared")
    COMPOSED = frozenset(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "completion_logprobs"))

    def __init__(
        self,
        prompt_ids: Any = (),
        completion_ids: Any = (),
        completion_logprobs: Any = (),
        version: int = -1,
        is_truncated: bool = False,
        overlong_prompt: bool = False,
        previous: TrajectoryStepTokens | None = None,
        **extra: Any,
    ):
        prompt = np.asarray(prompt_ids, np.int32)
        shared = 0 if previous is None else _common_prefix(previous.full_ids(), prompt)
        object.__setattr__(self, "_previous", previous if shared else None)
        object.__setattr__(self, "_shared", shared)
        extra.pop("prompt_mask", None), extra.pop("completion_mask", None)
        super().__init__(
            prompt_ids=prompt[shared:].copy() if shared else prompt,
            prompt_mask=None,
            completion_ids=np.asarray(completion_ids, np.int32),
            completion_mask=None,
            completion_logprobs=np.asarray(completion_logprobs, np.float32),
            overlong_prompt=overlong_prompt,
            is_truncated=is_truncated,
            version=version,
            **extra,
        )

    @property
    def shared(self) -> int:
        """How many leading prompt tokens are the previous step's prompt and completion, unchanged."""
        return self._shared

    def new_prompt_ids(self) -> np.ndarray:
        """The prompt tokens after the shared prefix, int32 [P - shared]."""
        return dict.__getitem__(self, "prompt_ids")

    def prompt_array(self) -> np.ndarray:
        """The whole prompt, int32 [P]."""
        if self._previous is None:
            return self.new_prompt_ids()
        return np.concatenate([self._previous.full_ids()[: self._shared], self.new_prompt_ids()])

    def full_ids(self) -> np.ndarray:
        """Prompt and completion together, int32 [P + C]; linear in the length, without recursion."""
        chain: list[TrajectoryStepTokens] = [self]
        while (before := chain[-1]._previous) is not None:
            chain.append(before)
        length = chain[0]._shared + len(chain[0].new_prompt_ids()) + len(dict.__getitem__(chain[0], "completion_ids"))
        ids, end = np.empty(length, np.int32), length
        for step in chain:  # from the newest back: each fills what lies beyond the prefix it shares
            own = np.concatenate([step.new_prompt_ids(), dict.__getitem__(step, "completion_ids")])
            own = own[: max(0, end - step._shared)]
            ids[step._shared : step._shared + len(own)] = own
            end = min(end, step._shared)
        return ids

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(prompt ids int32 [P], completion ids int32 [C], log-probabilities float32 [C])."""
        return (
            self.prompt_array(),
            dict.__getitem__(self, "completion_ids"),
            dict.__getitem__(self, "completion_logprobs"),
        )

    def __getitem__(self, key: str) -> Any:
        if key not in self.COMPOSED:
            return super().__getitem__(key)
        if key == "prompt_ids":
            return self.prompt_array().tolist()
        if key == "prompt_mask":
            return [0] * (self._shared + len(self.new_prompt_ids()))
        if key == "completion_mask":
            return [1] * len(dict.__getitem__(self, "completion_ids"))
        return dict.__getitem__(self, key).tolist()

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "prompt_ids":
            object.__setattr__(self, "_previous", None)
            object.__setattr__(self, "_shared", 0)
        if key in ("prompt_ids", "completion_ids"):
            value = np.asarray(value, np.int32)
        elif key == "completion_logprobs":
            value = np.asarray(value, np.float32)
        super().__setitem__(key, value)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"step tokens have no {name!r}")

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def __iter__(self) -> Iterator[str]:  # an own __iter__ makes dict(x) read through __getitem__
        return super().__iter__()

    def items(self):  # type: ignore[override]
        return [(key, self[key]) for key in self]

    def values(self):  # type: ignore[override]
        return [self[key] for key in self]

    def __reduce__(self):
        return _rebuild, (TrajectoryStepTokens, dict(self))


def _rebuild(cls: type, fields: dict[str, Any]) -> Any:
    return cls(**fields)


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the longest common prefix of two 1-D arrays."""
    n = min(len(left), len(right))
    if np.array_equal(left[:n], right[:n]):
        return n
    return int(np.argmin(left[:n] == right[:n]))


class TrajectoryStep(AttributeDict):
    """One model call: ``prompt completion response tokens reward advantage is_truncated trajectory_id extras``."""

    __slots__ = ("_previous", "_shared")

    def __init__(
        self,
        prompt: Messages = "",
        completion: Messages = "",
        response: Response | None = None,
        tokens: Any = None,
        reward: float | None = None,
        advantage: float | None = None,
        is_truncated: bool = False,
        trajectory_id: str = "",
        extras: dict[str, Any] | None = None,
        previous: TrajectoryStep | None = None,
        **more: Any,
    ):
        shared = 0 if previous is None else _common_messages(previous.conversation(), prompt)
        object.__setattr__(self, "_previous", previous if shared else None)
        object.__setattr__(self, "_shared", shared)
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
        return dict.__getitem__(self, "prompt")

    def conversation(self) -> Messages:
        """Prompt and completion together."""
        return self["prompt"] + self["completion"]

    def __getitem__(self, key: str) -> Any:
        if key != "prompt" or self._previous is None:
            return super().__getitem__(key)
        chain: list[TrajectoryStep] = [self]
        while (before := chain[-1]._previous) is not None:
            chain.append(before)
        prompt: Any = chain[-1].new_prompt()
        for before, step in zip(chain[:0:-1], chain[-2::-1], strict=True):
            prompt = (prompt + dict.__getitem__(before, "completion"))[: step._shared] + step.new_prompt()
        return prompt

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "prompt":
            object.__setattr__(self, "_previous", None)
            object.__setattr__(self, "_shared", 0)
        super().__setitem__(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def items(self):  # type: ignore[override]
        return [(key, self[key]) for key in self]

    def values(self):  # type: ignore[override]
        return [self[key] for key in self]

    def __reduce__(self):
        return _rebuild, (TrajectoryStep, dict(self))


def _common_messages(before: Any, now: Any) -> int:
    """Length of the common prefix of two message lists or two texts."""
    if isinstance(before, str) or isinstance(now, str):
        return len(before) if isinstance(before, str) and isinstance(now, str) and now.startswith(before) else 0
    n = 0
    for left, right in zip(before, now, strict=False):
        if left is not right and left != right:
            break
        n += 1
    return n


class InputView(MutableMapping):
    """``state["input"]``: the row's columns, live; reading and writing go to the state itself."""

    __slots__ = ("_keys", "_state")

    def __init__(self, state: State, keys: list[str]):
        self._state, self._keys = state, keys

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        return dict.__getitem__(self._state, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._keys:
            self._keys.append(key)
        dict.__setitem__(self._state, key, value)

    def __delitem__(self, key: str) -> None:
        self._keys.remove(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return repr(dict(self))


class State(dict):
    """Everything about one rollout, from its dataset row to its reward. Keys beyond the listed ones are the author's.

    The row's columns stand at the top level, and ``state["input"]`` is a live view of them. ``reward`` is None until
    scored, NaN when unknown. ``oai_tools`` and ``tool_defs`` are one list. ``id``, ``turn`` and ``responses`` are
    computed when read and cannot be assigned.

    >>> s = State(prompt=[], answer="4", example_id=3)
    >>> s["input"]["answer"], s["turn"], s["reward"]
    ('4', 0, None)
    """

    run: Any = None
    """The run this rollout belongs to (``runner.RunContext``): its limits and seeds; None outside a run."""
    waiting_for: str | None = None
    """What the rollout waits for at this moment, for progress displays and time-outs."""

    seed_key: str = ""
    """What the rollout's sampling seeds are derived from, beside the run's seed: its example and sibling."""
    attempts: int = 1
    """How often the rollout was played."""

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

    def __init__(self, *mappings: Mapping[str, Any], **fields: Any):
        given: dict[str, Any] = {}
        for mapping in mappings:
            given.update(mapping)
        given.update(fields)
        row = given.pop("input", None)
        if "oai_tools" in given:
            given["tool_defs"] = given.pop("oai_tools")
        for name in self.COMPUTED:
            given.pop(name, None)
        row = dict(row) if row is not None else {k: given[k] for k in given if k not in self._DEFAULTS}
        columns = {"prompt": [], "answer": "", "task": "default", "info": {}, "example_id": 0} | row
        super().__init__(self._DEFAULTS)
        self.update(columns)
        self.update(given)
        for key, fresh in (("trajectory", list), ("metrics", dict), ("usage", dict), ("judge_response", dict)):
            if self[key] is None:
                dict.__setitem__(self, key, fresh())
        if not isinstance(self["timing"], Timing):
            dict.__setitem__(self, "timing", Timing(**(self["timing"] or {})))
        self.input_columns = list(columns)

    def __missing__(self, key: str) -> Any:
        match key:
            case "input":
                return InputView(self, self.input_columns)
            case "oai_tools":
                return self["tool_defs"]
            case "id":
                return self["example_id"]
            case "turn":
                return len(self["trajectory"])
            case "responses":
                return [step["response"] for step in self["trajectory"]]
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self.COMPUTED:
            raise KeyError(f"state[{key!r}] is computed and cannot be assigned")
        if key == "oai_tools":
            key = "tool_defs"
        if key == "input":
            self.update(value)
            self.input_columns = list(value)
        else:
            super().__setitem__(key, value)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in ("input", "oai_tools") or key in self.COMPUTED

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def copy(self) -> dict[str, Any]:
        """A plain dict of the keys, with ``input``."""
        return {**self, "input": dict(self["input"])}

    def __reduce__(self):
        return _rebuild, (State, {**self, "input": dict(self["input"])})


def record_tokens(tokens: ResponseTokens | None, truncated: bool, previous: TrajectoryStep | None) -> Any:
    """The step tokens of a response, sharing the previous step's prefix; None when the response has none."""
    if tokens is None:
        return None
    before = previous["tokens"] if previous is not None else None
    return TrajectoryStepTokens(
        tokens.prompt_ids,
        tokens.completion_ids,
        tokens.completion_logprobs,
        version=tokens.version,
        is_truncated=truncated,
        previous=before if isinstance(before, TrajectoryStepTokens) else None,
    )
