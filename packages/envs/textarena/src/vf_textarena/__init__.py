"""textarena: single-player games of TextArena, one independent game per rollout.

The public interface is ``load_environment``; the rules of a rollout are in ``vf.TextArenaEnv``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping

import verifiers as vf
from verifiers.runtime.values import Count, check_arguments

__all__ = ["DEFAULT_GAME", "load_environment"]

DEFAULT_GAME = "GuessTheNumber-v0"
"""A game without a word list, so that it runs offline."""

SYSTEM_PROMPT = """\
You play a game. Make one move in every message{think}, in exactly this format:
{format}"""

MAX_TURNS = 50


@check_arguments
def load_environment(
    game: str = DEFAULT_GAME,
    use_think: bool = True,
    max_turns: Count = MAX_TURNS,
    num_train_examples: Count = 1000,
    num_eval_examples: Count = 50,
    seed: int = 0,
    system_prompt: str | None = None,
    strict: bool = False,
) -> vf.Environment:
    """The textarena environment.

    Args:
        game: A single-player game of TextArena, such as "GuessTheNumber-v0" or "FrozenLake-v0".
        use_think: Ask for reasoning in <think> tags before the move.
        max_turns: Moves after which an unfinished game ends with reward 0.
        num_train_examples: Training games.
        num_eval_examples: Held-out games; their seeds are disjoint from those of the training
            games.
        seed: Games are generated from seed, seed + 1, and so on.
        system_prompt: Default: an instruction that names the tags. "" sends none.
        strict: Pay 1 for a game that was won and 0 for any other, instead of the game's own reward.

    Raises:
        ConfigError: An invalid argument, by name; or TextArena is not installed.
    """
    parser = vf.XMLParser(
        ["think", "guess"] if use_think else ["guess"], answer_field="guess", last=True
    )
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
        rubric=_strict_rubric(parser) if strict else None,
        oracle=functools.partial(_halving, parser) if game == DEFAULT_GAME else None,
    )


def _strict_rubric(parser: vf.Parser) -> vf.Rubric:
    from verifiers.environments.integrations.textarena import game_reward

    def game_won(state: vf.State) -> float:
        return float(game_reward(state) >= 1.0)

    rubric = vf.Rubric([game_won], parser=parser)
    rubric.add_metric(game_reward)
    return rubric


def _halving(parser: vf.XMLParser, row: Mapping[str, object]) -> Callable[[vf.ModelRequest], str]:
    """Plays the default game by halving the numbers that are left."""

    def reply(request: vf.ModelRequest) -> str:
        low, high, tried = 1, 20, 0
        for message in request.prompt:
            if message["role"] == "assistant":
                tried = int(re.findall(r"\[(\d+)\]", message["content"])[-1])
            elif tried and "higher" in message["content"]:
                low = tried + 1
            elif tried and "lower" in message["content"]:
                high = tried - 1
        return parser.format(**{name: f"[{(low + high) // 2}]" for name in parser.get_fields()})

    return reply
