"""alphabet-sort: sort names by first or last name, and merge new names into the sorted list in each
turn.

The public interface is ``load_environment``; the README describes rewards and metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import verifiers as vf
from verifiers.data.text import split_reasoning
from verifiers.runtime.values import Count, Number, Positive, check_arguments
from vf_alphabet_sort.games import FIRST_TAG, LATER_TAG, Settings, generate_games
from vf_alphabet_sort.public import PublicGames
from vf_alphabet_sort.scoring import conversation_score, exact_share, format_share

__all__ = ["PRESETS", "AlphabetSortEnv", "load_environment"]

PRESETS: dict[str, tuple[Settings, float]] = {
    "easy": (Settings(min_turns=1, max_turns=2, min_names_per_turn=2, max_names_per_turn=4), 2.0),
    "normal": (Settings(min_turns=1, max_turns=3, min_names_per_turn=1, max_names_per_turn=5), 4.0),
    "hard": (Settings(min_turns=3, max_turns=5, min_names_per_turn=4, max_names_per_turn=10), 8.0),
}
"""``difficulty`` -> bounds of a game and ``similarity_power``."""


class AlphabetSortEnv(vf.MultiTurnEnv):
    """Each user turn adds names; the game ends with the reply to the last turn."""

    @vf.stop
    def all_turns_answered(self, state: vf.State) -> bool:
        return len(state["trajectory"]) >= len(state["info"]["targets"])

    def env_response(self, messages: vf.Messages, state: vf.State, **_: object) -> vf.Messages:
        """The user message with the next turn's names."""
        return [vf.UserMessage(state["info"]["follow_ups"][len(state["trajectory"]) - 1])]


@check_arguments
def load_environment(
    min_turns: Count | None = None,
    max_turns: Count | None = None,
    min_names_per_turn: Count | None = None,
    max_names_per_turn: Count | None = None,
    similarity_power: Positive | None = None,
    power_per_turn: bool = True,
    difficulty: Literal["easy", "normal", "hard"] = "normal",
    num_train_examples: Count = 1000,
    num_eval_examples: Count = 100,
    seed: int = 1337420,
    dataset_name: str | None = None,
    system_prompt: str | None = None,
    num_shots: Number = 0,
    autojunk: bool = False,
) -> vf.Environment:
    """The alphabet-sort environment.

    Args:
        min_turns: Minimum turns of a game. Default: by difficulty; 1 for "normal".
        max_turns: Maximum turns of a game. Default: by difficulty; 3 for "normal".
        min_names_per_turn: Minimum new names in a turn. Default: by difficulty; 1 for "normal".
        max_names_per_turn: Maximum new names in a turn. Default: by difficulty; 5 for "normal".
        similarity_power: Exponent of the similarity: the higher, the lower the reward of a nearly
            right list. Default: by difficulty; 4 for "normal".
        power_per_turn: Raise each turn's similarity, then average over the turns; False averages
            first.
        difficulty: Preset of the five numbers above; explicit arguments override it.
        num_train_examples: Training games. With a dataset at most its games beyond the held-out
            games.
        num_eval_examples: Held-out games; with the shipped names, their last names do not occur in
            training games.
        seed: Determines the games; equal arguments give equal games on every machine.
        dataset_name: A dataset with lists of names to read instead of the shipped names, such as
            "kalomaze/alphabetic-arxiv-authors-it1"; loaded on first use, needs a network unless
            cached.
        system_prompt: System message of every game. Default: none.
        num_shots: Few-shot games with right replies before each game, for models that do not follow
            the instruction alone. They use shipped names, and are neither trained on nor held out.
        autojunk: Score with difflib's frequent-character heuristic, as published numbers for this
            task were.

    Raises:
        ConfigError: An invalid argument, by name.
        DatasetError: On first use of the rows, when the dataset cannot be loaded or is too small.
    """
    overrides = {
        "min_turns": min_turns,
        "max_turns": max_turns,
        "min_names_per_turn": min_names_per_turn,
        "max_names_per_turn": max_names_per_turn,
    }
    preset, preset_power = PRESETS[difficulty]
    settings = _check_settings(
        replace(preset, **{name: value for name, value in overrides.items() if value is not None})
    )
    power = float(preset_power if similarity_power is None else similarity_power)
    num_games = num_train_examples if dataset_name is None else 0
    games = generate_games(settings, num_games + num_shots, seed, held_out=False)
    if dataset_name is None:
        train: Any = games[:num_games]
        held_out: Any = generate_games(settings, num_eval_examples, seed, held_out=True)
    else:
        public = PublicGames(dataset_name, settings, seed, num_train_examples, num_eval_examples)
        train, held_out = public.train, public.held_out
    return AlphabetSortEnv(
        dataset=train,
        eval_dataset=held_out,
        max_turns=settings.max_turns,
        system_prompt=system_prompt or None,
        few_shot=_shots(games[num_games:]),
        rubric=_make_rubric(power, power_per_turn, autojunk),
        oracle=_right_replies,
    )


def _make_rubric(power: float, power_per_turn: bool, autojunk: bool) -> vf.Rubric:
    # Coroutines run on the event loop: at most a few hundred microseconds each, less than a switch
    # to a thread.
    async def similarity(completion: vf.Messages, info: dict, parser: vf.Parser) -> float:
        return conversation_score(
            _replies(completion, parser), info["targets"], power, power_per_turn, autojunk
        )

    async def exact_turns(completion: vf.Messages, info: dict, parser: vf.Parser) -> float:
        return exact_share(_replies(completion, parser), info["targets"])

    async def all_exact(completion: vf.Messages, info: dict, parser: vf.Parser) -> float:
        return float(exact_share(_replies(completion, parser), info["targets"]) == 1.0)

    async def format_reward(completion: vf.Messages, info: dict, parser: vf.Parser) -> float:
        return format_share(_replies(completion, parser), info["targets"])

    rubric = vf.Rubric(funcs=[similarity], success="all_exact")
    rubric.add_metric(exact_turns)
    rubric.add_metric(all_exact)
    rubric.add_metric(format_reward)
    return rubric


def _right_replies(game: Mapping[str, Any]) -> list[str]:
    """The right reply to each turn of a game."""
    tags = [FIRST_TAG, *(LATER_TAG for _ in game["info"]["follow_ups"])]
    return [
        f"<{tag}>\n{target}\n</{tag}>"
        for tag, target in zip(tags, game["info"]["targets"], strict=True)
    ]


def _shots(games: list[dict[str, Any]]) -> list[dict[str, str]] | None:
    """The messages of each game with right replies."""
    messages = []
    for game in games:
        prompts = [game["question"], *game["info"]["follow_ups"]]
        for question, reply in zip(prompts, _right_replies(game), strict=True):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": reply})
    return messages or None


def _replies(completion: vf.Messages, parser: vf.Parser) -> list[str]:
    """The text of each assistant message after its reasoning, in order."""
    return [
        split_reasoning(parser.parse_answer([message]) or "")[1]
        for message in parser.get_assistant_messages(completion)
    ]


def _check_settings(settings: Settings) -> Settings:
    for low, high in (("min_turns", "max_turns"), ("min_names_per_turn", "max_names_per_turn")):
        if getattr(settings, low) > getattr(settings, high):
            raise vf.ConfigError(
                f"{low}={getattr(settings, low)} is above {high}={getattr(settings, high)}"
            )
    return settings
