"""``Turn``: one model call exactly as sampled, stored as what it adds to an earlier turn.

Every turn of a conversation repeats the turns before it. A turn stores the tokens and messages
that follow the prefix it shares with an earlier turn, and composes the rest when it is read, so a
rollout grows linearly with its turns. Token ids and log-probabilities are the arrays that the
server sent; nothing is decoded and encoded again.

``transcript`` orders turns and merges them into token sequences; ``steps`` shows them to authors
as dicts.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from verifiers.data.messages import saved_messages
from verifiers.rollouts.declaration import Saved, declared
from verifiers.types import Messages, float_array

if TYPE_CHECKING:
    import numpy.typing as npt


_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


class Turn:
    """A model call. The second of a conversation, in which the environment added the token 9 and
    the policy was updated while it was generated::

        Turn(prompt_ids=[1, 15, 7, 2, 9], completion_ids=[4, 2], sampler_logprobs=[-0.1, -0.7],
             version=[4, 5])

    A turn of a server that returns no tokens has messages alone; ``has_tokens`` is False.

    *Raises* ValueError when the shapes disagree, or the prompt is empty: its first token would have
    no context.
    """

    has_tokens: bool = False
    completion_ids: np.ndarray = _NO_IDS  # int32 [C]
    sampler_logprobs: np.ndarray = _NO_LOGPROBS
    """float32 or float64 [C], nats, of the processed distribution that was sampled."""
    version: int | np.ndarray = -1
    """Policy version: one for the turn, or int [C] when weights changed while it was generated;
    -1 = unknown."""
    is_truncated: Annotated[bool, Saved()] = False
    """Whether a length limit cut the completion."""
    new_prompt_ids: np.ndarray = _NO_IDS
    """The prompt's token ids after the shared prefix, int32 [P - num_shared]."""
    token_parent: Turn | None = None
    """The earlier turn whose tokens the prompt begins with."""
    num_shared: int = 0
    """Leading prompt tokens that are the parent's prompt and completion, unchanged."""
    token_fields: dict[str, object] | None = None
    """Further keys that an author stored beside the tokens."""

    new_prompt: Messages = ""
    """The prompt's messages (or text) after the shared prefix."""
    message_parent: Turn | None = None
    num_shared_messages: int = 0
    """Leading messages (characters, in completion mode) that are the parent's conversation."""
    completion: Annotated[Messages, Saved(read=saved_messages)] = ""
    response: Annotated[Any, Saved(when="never")] = None
    """The ``Response`` without its tokens; not saved."""

    env_reward: Annotated[float | None, Saved(when="if set", key=None)] = None
    """The environment's reward of the turn; None when it gives none."""
    rollout_reward: float | None = None
    """The reward of the whole rollout, once it is scored."""
    advantage: Annotated[float | None, Saved()] = None
    extras: Annotated[dict[str, Any], Saved()]
    """What else the environment stores of the turn."""

    _prompt_ids: np.ndarray | None = None  # int32 [P]
    _prompt: Messages | None = None
    """Whole prompts, which the newest turn alone holds: the next turn is compared with them."""

    def __init__(
        self,
        prompt_ids: npt.ArrayLike,
        completion_ids: npt.ArrayLike,
        sampler_logprobs: npt.ArrayLike,
        version: int | npt.ArrayLike = -1,
        is_truncated: bool = False,
        role: str = "",
        previous: Turn | None = None,
    ):
        self.is_truncated = is_truncated
        self.extras = {"rewarded_role": role} if role else {}
        self.set_tokens(prompt_ids, completion_ids, sampler_logprobs, version, previous)
        for name in ("new_prompt_ids", "completion_ids", "sampler_logprobs"):
            if (array := getattr(self, name)).ndim != 1:
                name = name.removeprefix("new_")
                raise ValueError(
                    f"{name} of a turn must have one dimension, got shape {array.shape}"
                )
        num_sampled = len(self.completion_ids)
        if len(self.sampler_logprobs) != num_sampled:
            raise ValueError(
                f"a turn has {num_sampled} completion ids and {len(self.sampler_logprobs)}"
                " log-probabilities"
            )
        if np.shape(self.version) not in ((), (num_sampled,)):
            raise ValueError(
                f"a turn has {num_sampled} completion ids and versions of shape"
                f" {np.shape(self.version)}"
            )
        if not self.num_prompt:
            raise ValueError(
                "a turn has no prompt ids; its first token would have nothing to be conditioned on"
            )

    # --- tokens

    def set_tokens(
        self,
        prompt_ids: npt.ArrayLike,
        completion_ids: npt.ArrayLike,
        sampler_logprobs: npt.ArrayLike,
        version: int | npt.ArrayLike = -1,
        previous: Turn | None = None,
    ) -> None:
        """Store the tokens; ``previous`` is the turn whose tokens the prompt may begin with."""
        self.set_prompt_ids(np.asarray(prompt_ids, np.int32), previous)
        self.completion_ids = np.asarray(completion_ids, np.int32)
        self.sampler_logprobs = float_array(np.asarray(sampler_logprobs))
        self.set_version(version)
        self.has_tokens = True

    def set_version(self, version: int | npt.ArrayLike) -> None:
        """Store the policy version, of all tokens or of each."""
        self.version = version if type(version) is int else _version(version)

    def set_prompt_ids(self, prompt_ids: np.ndarray, previous: Turn | None = None) -> None:
        """Store the prompt, int32 [P], as what follows the prefix it shares with ``previous``."""
        num_shared = 0
        if previous is not None and previous.has_tokens:
            num_shared = _common_prefix(previous.full_ids(), prompt_ids)
            previous._prompt_ids = None
        self.token_parent, self.num_shared = previous if num_shared else None, num_shared
        self.new_prompt_ids = prompt_ids[num_shared:].copy() if num_shared else prompt_ids
        self._prompt_ids = prompt_ids if num_shared else None

    @property
    def prompt_ids(self) -> np.ndarray:
        """The whole prompt, int32 [P]."""
        if self.token_parent is None:
            return self.new_prompt_ids
        if self._prompt_ids is not None:
            return self._prompt_ids
        shared = self.token_parent.full_ids()[: self.num_shared]
        return np.concatenate([shared, self.new_prompt_ids])

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return self.num_shared + len(self.new_prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion, without composing them; 0 without tokens."""
        return self.num_prompt + len(self.completion_ids)

    def full_ids(self) -> np.ndarray:
        """Prompt and completion, int32 [P + C]; linear in the length, without recursion."""
        end = self.num_tokens
        ids: np.ndarray = np.empty(end, np.int32)
        turn = self
        if self._prompt_ids is not None:
            ids[: self.num_prompt] = self._prompt_ids
            ids[self.num_prompt :] = self.completion_ids
            return ids
        while end:  # newest first: each turn fills what follows its shared prefix
            new = np.concatenate([turn.new_prompt_ids, turn.completion_ids])
            new = new[: max(0, end - turn.num_shared)]
            ids[turn.num_shared : turn.num_shared + len(new)] = new
            end = min(end, turn.num_shared)
            if turn.token_parent is None:
                break
            turn = turn.token_parent
        return ids

    def continues(self, earlier: Turn) -> bool:
        """Whether the prompt begins with all tokens of ``earlier``."""
        if self.token_parent is earlier:  # their common prefix is known
            return self.num_shared == earlier.num_tokens
        end = earlier.num_tokens
        if self.num_prompt < end:
            return False
        prompt, start = self.prompt_ids, earlier.num_prompt
        return np.array_equal(prompt[start:end], earlier.completion_ids) and np.array_equal(
            prompt[:start], earlier.prompt_ids
        )

    # --- messages

    def set_prompt(self, prompt: Messages, previous: Turn | None = None) -> None:
        """Store the prompt's messages as what follows the prefix shared with ``previous``."""
        num_shared = 0
        if previous is not None:
            num_shared = _common_messages(previous.conversation(), prompt)
            previous._prompt = None
        self.message_parent = previous if num_shared else None
        self.num_shared_messages = num_shared
        self.new_prompt = prompt[num_shared:]
        self._prompt = prompt[:] if num_shared else None

    @property
    def prompt(self) -> Messages:
        """The whole prompt, as a new list (or text); linear in the result."""
        if self._prompt is not None or self.message_parent is None:
            prompt: Messages = (self.new_prompt if self._prompt is None else self._prompt)[:]
            return prompt
        pieces: list[Any] = [self.new_prompt]
        end, turn = self.num_shared_messages, self.message_parent
        while True:  # newest first: each turn adds what follows its own shared prefix
            start = turn.num_shared_messages
            if end > start:
                new: Any = turn.new_prompt
                pieces.append((new + turn.completion)[: end - start])
                end = start
            if not end or turn.message_parent is None:
                break
            turn = turn.message_parent
        pieces.reverse()
        is_text = isinstance(self.new_prompt, str)
        return "".join(pieces) if is_text else list(chain.from_iterable(pieces))

    @prompt.setter
    def prompt(self, messages: Messages) -> None:
        self.message_parent, self.num_shared_messages = None, 0
        self.new_prompt, self._prompt = messages, None

    def conversation(self) -> Messages:
        """Prompt and completion together, as a new list (or text)."""
        prompt: Any = self.prompt
        conversation: Messages = prompt + self.completion
        return conversation

    def settle(self) -> None:
        """Drop the copies of the whole prompt, when no turn will be compared with them."""
        self._prompt = self._prompt_ids = None

    # --- training

    @property
    def reward(self) -> Annotated[float | None, Saved()]:
        """The environment's reward of the turn, else the rollout's once it is scored."""
        return self.rollout_reward if self.env_reward is None else self.env_reward

    @reward.setter
    def reward(self, reward: float | None) -> None:
        self.env_reward = reward

    @property
    def role(self) -> str:
        """The role whose reward the turn has, where roles have rewards of their own
        (``MultiAgentEnv``); else empty."""
        role: str = self.extras.get("rewarded_role", "")
        return role

    @property
    def acting_role(self) -> str:
        """The role that took the turn, whosever reward it has; empty where there are none."""
        role: str = self.extras.get("role", self.role)
        return role

    @property
    def is_trained(self) -> bool:
        """Whether the turn has tokens, and its environment does not leave it out of training."""
        return self.has_tokens and self.extras.get("is_trained", True) is not False


TURN_FIELDS = declared(Turn)
"""The declared fields of a turn; its prompt and its tokens are stored as what they add."""


def _version(version: npt.ArrayLike) -> int | np.ndarray:
    versions = np.asarray(version)
    return versions if versions.ndim else int(versions)


def _common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the longest common prefix of two 1-D arrays."""
    n = min(len(left), len(right))
    if np.array_equal(left[:n], right[:n]):
        return n
    return int(np.argmin(left[:n] == right[:n]))


def _common_messages(before: Messages, now: Messages) -> int:
    """Length of the common prefix of two message lists or two texts."""
    if isinstance(before, str) or isinstance(now, str):
        is_prefix = isinstance(before, str) and isinstance(now, str) and now.startswith(before)
        return len(before) if is_prefix else 0
    if now[: len(before)] == before:
        return len(before)
    n = 0
    for left, right in zip(before, now, strict=False):
        if left is not right and left != right:
            break
        n += 1
    return n
