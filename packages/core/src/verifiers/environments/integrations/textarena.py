"""``TextArenaEnv``: single-player games of TextArena.

Promise: every rollout plays an independent game, dealt from its row's seed; whatever other rollouts do, the same moves
give the same game. TextArena draws from the global random generators; here they are lent to a game for each of its
moves and given back as they were. Nothing is downloaded when an environment is constructed: the game is made at the
first rollout, once, and later games are copies of it that share its word lists.

A game's dictionary may need files of NLTK, which TextArena then downloads. Games of several players are refused.
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Unpack

import numpy as np

from verifiers.environments.base import DataOptions
from verifiers.environments.integrations import extras
from verifiers.environments.integrations.episodes import episode_rows, opened, seed_of
from verifiers.environments.multi_turn import MultiTurnEnv
from verifiers.errors import ConfigError
from verifiers.parsers import Parser, XMLParser
from verifiers.parsers.parser import identity
from verifiers.rollouts.author_code import Hook
from verifiers.rollouts.decorators import cleanup
from verifiers.rollouts.state import State, TrajectoryStep
from verifiers.rubrics import Rubric
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.suggest import closest
from verifiers.runtime.sync_async import maybe_await
from verifiers.runtime.threads import call_in_thread
from verifiers.storage.identity import Free
from verifiers.types import Messages

WORD_LIST_SIZE = 1000
"""A collection of so many strings or more is a word list: games share it, and must not change it."""


def game_reward(state: State) -> float:
    """What the game says it was worth; 0.0 for a game that was not played to its end."""
    rewards = state["ta_env"].state.rewards
    return float(rewards[0]) if rewards else 0.0


class GameOptions(DataOptions, total=False):
    """Parameters of ``MultiTurnEnv`` that a game passes on as they are."""

    max_turns: int
    timeout_seconds: float | None
    max_total_completion_tokens: int


class TextArenaEnv(MultiTurnEnv):
    """A game of TextArena, for example ``TextArenaEnv("GuessTheNumber-v0")``.

    The parser's answer in the model's last message is the move; without one the move is empty, and the game's own
    rules for invalid moves apply. ``feedback_fn(text)`` makes the user message of what the game said since the last
    move (where the game shows its whole history each time, only what is new). ``rubric`` defaults to the game's own
    reward. Without a ``system_prompt`` the model is told the parser's format; ``system_prompt=""`` tells it nothing.
    Reward functions find the finished game in ``state["ta_env"]``. Further parameters are ``MultiTurnEnv``'s.

    *Raises* ConfigError when TextArena is not installed, has no such game, or a setting cannot be used; at the first
    rollout for a game that cannot be made or is for several players.
    """

    @spell_out(GameOptions, MultiTurnEnv.__init__)
    def __init__(
        self,
        game: str = "Wordle-v0",
        num_train_examples: Annotated[int, Free("how many rows; every row has a content hash")] = 1000,
        num_eval_examples: Annotated[int, Free("how many rows; every row has a content hash")] = 0,
        system_prompt: str | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        feedback_fn: Callable[[str], Any] = identity,
        seed: int = 0,
        **parameters: Unpack[GameOptions],
    ):
        registered = extras.TEXTARENA.load("TextArenaEnv").envs.registration.ENV_REGISTRY
        if game not in registered:
            raise ConfigError(f"TextArena has no game {game!r}{closest(game, registered)}", key="game")
        if parser is None:
            parser = XMLParser(["think", "guess"], answer_field="guess")
        if parameters.get("dataset") is None and parameters.get("eval_dataset") is None:
            train, evaluation = episode_rows(num_train_examples, num_eval_examples, seed)
            parameters["dataset"], parameters["eval_dataset"] = train, evaluation
        super().__init__(
            system_prompt=format_prompt(parser) if system_prompt is None else system_prompt,
            parser=parser,
            rubric=rubric if rubric is not None else Rubric([game_reward], parser=parser),
            **parameters,
        )
        if self.message_type != "chat":
            raise ConfigError('TextArenaEnv plays in chat messages; drop message_type="completion"')
        self.game, self.feedback_fn, self.seed = game, feedback_fn, seed
        self._making = threading.Lock()
        self._prototype: Any = None
        self._word_lists: dict[int, Any] = {}

    # --- one game -----------------------------------------------------------------------------------------------

    async def setup_state(self, state: State) -> None:
        """Deal the game: ``state["ta_env"]``, and its rules at the end of the prompt."""
        if self._prototype is None:
            await call_in_thread(self._make_prototype)
        game = state["ta_env"] = copy.deepcopy(self._prototype, dict(self._word_lists))
        seed = seed_of(state, self.seed)
        state["ta_random"] = _seeded(seed)
        with _lent(state):
            try:
                game.reset(num_players=1, seed=seed)
            except AssertionError as error:
                raise ConfigError(f"the game {self.game!r} is not for one player: {error}") from error
        state["prompt"] = opened(self.as_prompt(state["prompt"]), self._news(state))

    async def add_trajectory_step(self, state: State, step: TrajectoryStep) -> None:
        """Make the move of the turn, before a limit of turns can end the rollout without it."""
        await maybe_await(super().add_trajectory_step(state, step))
        move = await maybe_await(self.parser.parse_answer(step["completion"]))
        game = state["ta_env"]
        with Hook(state, f"the move in {self.game}", timing=None), _lent(state):
            done, _info = game.step("" if move is None else str(move))
            news = self._news(state)
        if done:
            news = "\n".join(filter(None, (news, game.state.game_info[0].get("reason"))))
        said = self.as_prompt([{"role": "user", "content": await maybe_await(self.feedback_fn(news))}])
        state["final_env_response" if done else "ta_feedback"] = said

    def env_response(self, messages: Messages, state: State, **_: Any) -> Messages:
        """What the game said to the last move."""
        said: Messages = state["ta_feedback"]
        return said

    @cleanup
    def forget_the_dealing(self, state: State) -> None:
        """Drop what only the playing needed."""
        for key in ("ta_random", "ta_observation", "ta_feedback"):
            state.pop(key, None)

    def _news(self, state: State) -> str:
        """What the game shows the player beyond what it showed before."""
        shown = _as_text(state["ta_env"].get_observation()[1])
        before, state["ta_observation"] = state.get("ta_observation") or "", shown
        return shown.removeprefix(before).strip()

    def _make_prototype(self) -> None:
        """Make the game the copies are of. *Raises* ConfigError when TextArena cannot."""
        with self._making:
            if self._prototype is not None:
                return
            try:
                made = extras.TEXTARENA.load("TextArenaEnv").make(self.game)
            except Exception as error:
                raise ConfigError(
                    f"the game {self.game!r} cannot be made: {type(error).__name__}: {_gist(error)} (games with a "
                    "dictionary download it; where there is no network, run `python -m nltk.downloader words "
                    "averaged_perceptron_tagger_eng` elsewhere and copy its nltk_data folder)"
                ) from error
            self._word_lists = {id(words): words for words in _word_lists(made)}
            self._prototype = made


def format_prompt(parser: Parser) -> str | None:
    """The format that a parser reads, as an instruction; None for a parser without one."""
    show = getattr(parser, "get_format_str", None)
    return f"Write every message in this format:\n{show()}" if callable(show) else None


def _gist(error: Exception) -> str:
    """The first line with words of an error's text, which NLTK frames and colours."""
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()
    return next((line.strip() for line in lines if any(map(str.isalpha, line))), "no message")


def _as_text(observation: Any) -> str:
    """An observation of the game: text as its wrappers made it, or the messages of a game without wrappers."""
    return observation if isinstance(observation, str) else "\n".join(message for _, message, _ in observation or ())


def _word_lists(game: object, depth: int = 4) -> Iterator[Any]:
    """The word lists among the attributes of a game, its wrappers and its helpers."""
    for value in list(getattr(game, "__dict__", {}).values()):
        if isinstance(value, list | tuple | set | frozenset):
            if len(value) >= WORD_LIST_SIZE and all(isinstance(word, str) for word in value):
                yield value
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
            yield from _word_lists(value, depth - 1)


# --- the random generators --------------------------------------------------------------------------------------


def _seeded(seed: int) -> tuple[Any, Any]:
    """States of the two global generators as they are after seeding them."""
    return random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()


@contextlib.contextmanager
def _lent(state: State) -> Iterator[None]:
    """Run a block with the game's own random generators in the place of the global ones."""
    lenders = random.getstate(), np.random.get_state()
    own = state["ta_random"]
    random.setstate(own[0])
    np.random.set_state(own[1])
    try:
        yield
    finally:
        state["ta_random"] = random.getstate(), np.random.get_state()
        random.setstate(lenders[0])
        np.random.set_state(lenders[1])
