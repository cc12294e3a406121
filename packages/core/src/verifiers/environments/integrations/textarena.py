"""``TextArenaEnv``: single-player games of TextArena.

Promise: every rollout has an independent game, initialized from the seed of its row; the same moves
give the same game, regardless of other rollouts. TextArena draws from the global random generators;
each move sets them to the state of the game and restores them afterwards. The constructor downloads
nothing: the first rollout creates the game once, and later games are copies that share its word
lists.

The dictionary of a game may need files of NLTK, which TextArena then downloads. Multi-player games
are refused.
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Unpack

import numpy as np

from verifiers.environments.integrations import extras
from verifiers.environments.integrations.episodes import add_rows, opened, seed_of
from verifiers.environments.keywords import DataOptions
from verifiers.environments.multi_turn import MultiTurnEnv
from verifiers.errors import ConfigError
from verifiers.parsers import Parser, XMLParser
from verifiers.parsers.parser import identity
from verifiers.rollouts.author_code import Hook, cleanup, maybe_await
from verifiers.rollouts.state import State, TrajectoryStep
from verifiers.rubrics import Rubric
from verifiers.runtime.signatures import spell_out
from verifiers.runtime.suggest import closest
from verifiers.runtime.worker_threads import call_in_thread
from verifiers.storage.identity import Free
from verifiers.types import Messages

WORD_LIST_SIZE = 1000
"""Minimum number of strings of a word list, which games share and must not change."""


def game_reward(state: State) -> float:
    """Return the reward of the game; 0.0 for an unfinished game."""
    rewards = state["ta_env"].state.rewards
    return float(rewards[0]) if rewards else 0.0


class GameOptions(DataOptions, total=False):
    """Parameters of ``MultiTurnEnv`` that ``TextArenaEnv`` passes on unchanged."""

    max_turns: int
    timeout_seconds: float | None
    max_total_completion_tokens: int


class TextArenaEnv(MultiTurnEnv):
    """A single-player game of TextArena, for example ``TextArenaEnv("GuessTheNumber-v0")``.

    Args:
        game: Id of a single-player game.
        num_train_examples: Rows to train on.
        num_eval_examples: Rows to evaluate on.
        system_prompt: Default: a description of the format of the parser; ``""`` sets none.
        parser: Reads the move out of the last message of the model.
        rubric: Default: the reward of the game.
        feedback_fn: Function from the output of the game since the last move (only the new part,
            where the game repeats its history) to the user message.
        seed: Seed of the rows.

    The move is the answer that the parser reads in the last message of the model; without an answer
    the move is empty, and the rules of the game for invalid moves apply. Reward functions read the
    finished game from ``state["ta_env"]``. A game counts as won at a reward of 1
    (``pass_threshold``): many games pay part of it for coming close, and some for wrong moves.
    Further parameters are those of ``MultiTurnEnv``.

    *Raises* ConfigError when TextArena is not installed, the game is unknown, or a setting is
    invalid; at the first rollout for a game that cannot be created or is for several players.
    """

    @spell_out(GameOptions, MultiTurnEnv.__init__)
    def __init__(
        self,
        game: str = "Wordle-v0",
        num_train_examples: Annotated[
            int, Free("how many rows; every row has a content hash")
        ] = 1000,
        num_eval_examples: Annotated[int, Free("how many rows; every row has a content hash")] = 0,
        system_prompt: str | None = None,
        parser: Parser | None = None,
        rubric: Rubric | None = None,
        feedback_fn: Callable[[str], object] = identity,
        seed: int = 0,
        **parameters: Unpack[GameOptions],
    ):
        registered = extras.TEXTARENA.load("TextArenaEnv").envs.registration.ENV_REGISTRY
        if game not in registered:
            raise ConfigError(
                f"TextArena has no game {game!r}{closest(game, registered)}", key="game"
            )
        if parser is None:
            parser = XMLParser(["think", "guess"], answer_field="guess")
        add_rows(parameters, num_train_examples, num_eval_examples, seed)
        parameters.setdefault("pass_threshold", 1.0)
        super().__init__(
            system_prompt=format_prompt(parser) if system_prompt is None else system_prompt,
            parser=parser,
            rubric=rubric if rubric is not None else Rubric([game_reward], parser=parser),
            **parameters,
        )
        if self.message_type != "chat":
            raise ConfigError('TextArenaEnv needs chat messages; drop message_type="completion"')
        self.game, self.feedback_fn, self.seed = game, feedback_fn, seed
        self._prototype_lock = threading.Lock()
        self._prototype: Any = None
        self._word_lists: dict[int, object] = {}

    # --- one game ---------------------------------------------------------------------------------

    async def setup_state(self, state: State) -> None:
        """Create the game ``state["ta_env"]``, and append its first observation to the prompt."""
        if self._prototype is None:
            await call_in_thread(self._make_prototype)
        game = state["ta_env"] = copy.deepcopy(self._prototype, dict(self._word_lists))
        seed = seed_of(state, self.seed)
        numpy_state = np.random.RandomState(seed % 2**32).get_state()
        state["ta_random"] = random.Random(seed).getstate(), numpy_state
        with _game_generators(state):
            try:
                game.reset(num_players=1, seed=seed)
            except AssertionError as error:
                raise ConfigError(
                    f"the game {self.game!r} is not for one player: {error}"
                ) from error
        state["prompt"] = opened(self.as_prompt(state["prompt"]), self._new_text(state))

    async def add_trajectory_step(self, state: State, step: TrajectoryStep) -> None:
        """Make the move of the turn here, before a turn limit can end the rollout."""
        await maybe_await(super().add_trajectory_step(state, step))
        move = await maybe_await(self.parser.parse_answer(step["completion"]))
        game = state["ta_env"]
        with Hook(state, f"the move in {self.game}", timing=None), _game_generators(state):
            done, _info = game.step("" if move is None else str(move))
            news = self._new_text(state)
        if done:
            news = "\n".join(filter(None, (news, game.state.game_info[0].get("reason"))))
        feedback = self.as_prompt(
            [{"role": "user", "content": await maybe_await(self.feedback_fn(news))}]
        )
        state["final_env_response" if done else "ta_feedback"] = feedback

    def env_response(self, messages: Messages, state: State, **_: object) -> Messages:
        """Return the feedback of the game to the last move."""
        feedback: Messages = state["ta_feedback"]
        return feedback

    @cleanup
    def forget_the_dealing(self, state: State) -> None:
        """Drop the keys that only a running game needs."""
        for key in ("ta_random", "ta_observation", "ta_feedback"):
            state.pop(key, None)

    def _new_text(self, state: State) -> str:
        """Return the part of the observation that is new since the last observation."""
        observation = _as_text(state["ta_env"].get_observation()[1])
        before, state["ta_observation"] = state.get("ta_observation") or "", observation
        return observation.removeprefix(before).strip()

    def _make_prototype(self) -> None:
        """Create the game that rollouts copy. *Raises* ConfigError when TextArena fails."""
        with self._prototype_lock:
            if self._prototype is not None:
                return
            try:
                game = extras.TEXTARENA.load("TextArenaEnv").make(self.game)
            except Exception as error:
                raise ConfigError(
                    f"the game {self.game!r} cannot be created: {type(error).__name__}:"
                    f" {_gist(error)} (games with a dictionary download it; where there is no"
                    " network, run `python -m nltk.downloader words"
                    " averaged_perceptron_tagger_eng` elsewhere and copy its nltk_data folder)"
                ) from error
            self._word_lists = {id(words): words for words in _word_lists(game)}
            self._prototype = game


def format_prompt(parser: Parser) -> str | None:
    """Return an instruction with the format of a parser; None for a parser without a format."""
    show = getattr(parser, "get_format_str", None)
    return f"Write every message in this format:\n{show()}" if callable(show) else None


def _gist(error: Exception) -> str:
    """Return the first line of an error with letters in it: NLTK frames and colours
    its messages."""
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()
    return next((line.strip() for line in lines if any(map(str.isalpha, line))), "no message")


def _as_text(observation: str | Iterable[tuple[int, str, object]] | None) -> str:
    """Return an observation as text: that of the wrappers, or the joined messages of a game without
    wrappers."""
    if isinstance(observation, str):
        return observation
    return "\n".join(message for _, message, _ in observation or ())


def _word_lists(game: object, depth: int = 4) -> Iterator[object]:
    """Yield the word lists among the attributes of a game, its wrappers and its helpers."""
    for value in list(getattr(game, "__dict__", {}).values()):
        if isinstance(value, list | tuple | set | frozenset):
            if len(value) >= WORD_LIST_SIZE and all(isinstance(word, str) for word in value):
                yield value
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type):
            yield from _word_lists(value, depth - 1)


# --- the random generators ------------------------------------------------------------------------


@contextlib.contextmanager
def _game_generators(state: State) -> Iterator[None]:
    """Run a block with the global generators set to the state of the game, and restore them."""
    before = random.getstate(), np.random.get_state()
    python_state, numpy_state = state["ta_random"]
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    try:
        yield
    finally:
        state["ta_random"] = random.getstate(), np.random.get_state()
        random.setstate(before[0])
        np.random.set_state(before[1])
