"""textarena: single-player games of TextArena, one independent game per rollout.

The public interface is ``load_environment``; the rules of a rollout are in ``vf.TextArenaEnv``.
"""

from __future__ import annotations

import verifiers as vf

__all__ = ["DEFAULT_GAME", "load_environment"]

DEFAULT_GAME = "GuessTheNumber-v0"
"""A game without a word list, so that it runs offline."""

SYSTEM_PROMPT = """\
You play a game. Make one move in every message{think}, in exactly this format:
{format}"""

MAX_TURNS = 50


def load_environment(
    game: str = DEFAULT_GAME,
    use_think: bool = True,
    max_turns: int = MAX_TURNS,
    num_train_examples: int = 1000,
    num_eval_examples: int = 50,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.Environment:
    """The textarena environment.

    Args:
        game: A single-player game of TextArena, such as "GuessTheNumber-v0" or "FrozenLake-v0".
        use_think: Ask for reasoning in <think> tags before the move.
        max_turns: Moves after which an unfinished game ends with reward 0.
        num_train_examples: Training games.
        num_eval_examples: Held-out games; their seeds are disjoint from those of the training games.
        seed: Games are generated from seed, seed + 1, and so on.
        system_prompt: Default: an instruction that names the tags. "" sends none.

    Raises:
        ConfigError: An invalid argument, by name; or TextArena is not installed.
    """
    if not isinstance(use_think, bool):
        raise vf.ConfigError(f"use_think must be true or false, not {use_think!r}")
    for name, value in (("max_turns", max_turns), ("num_train_examples", num_train_examples)):
        _check_whole(name, value)
    _check_whole("num_eval_examples", num_eval_examples)
    parser = vf.XMLParser(["think", "guess"] if use_think else ["guess"], answer_field="guess")
    if system_prompt is None:
        think = ", after thinking first" if use_think else ""
        system_prompt = SYSTEM_PROMPT.format(think=think, format=parser.get_format_str())
    return vf.TextArenaEnv(
        game=game,
        max_turns=max_turns,
        num_train_examples=num_train_examples,
        num_eval_examples=num_eval_examples,
        seed=seed,
        system_prompt=system_prompt,
        parser=parser,
    )


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise vf.ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
