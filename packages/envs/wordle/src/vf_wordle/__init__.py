"""wordle: find the secret word in six guesses; after each guess the environment marks its letters.

The public interface is ``load_environment``; the README describes rewards and metrics.
"""

from __future__ import annotations

from typing import Any

import verifiers as vf
from verifiers.runtime.values import Count, check_arguments
from vf_wordle.rules import GREEN, YELLOW, Game, Rules, describe, is_over, judge, replay
from vf_wordle.words import LENGTHS, draw_secrets, valid_guesses

__all__ = ["WordleEnv", "load_environment"]

DEFAULT_TRAIN_EXAMPLES = 2000

FORMAT = "<guess>\n[your guess]\n</guess>"
THINK = "<think>\nyour reasoning\n</think>\n"

SYSTEM_PROMPT = """\
You play Wordle: you find a secret English word of {length} letters in at most {guesses} guesses. After every guess \
you see its letters and below each of them a mark:
G: the letter is right and in the right place;
Y: the letter is in the word, in another place;
X: the word has no (further) such letter.
{hard}A reply that holds no word of {length} letters uses up a guess. {how} in exactly this format:
{format}"""

HARD = (
    "Every guess must use all that the marks have shown: a G letter stays in its place, a Y letter"
    " is used again.\n"
)


class WordleEnv(vf.MultiTurnEnv):
    """A secret word per row (``answer``). ``state["moves"]`` holds the evaluated moves so far."""

    def __init__(self, rules: Rules, **parameters: Any):
        super().__init__(max_turns=rules.max_guesses, **parameters)
        self.rules = rules

    def setup_state(self, state: vf.State) -> None:
        state["moves"] = []

    def add_trajectory_step(self, state: vf.State, step: vf.TrajectoryStep) -> None:
        """Evaluate the reply of this turn, before the turn limit can end the rollout."""
        super().add_trajectory_step(state, step)
        moves, answer = state["moves"], state["answer"]
        moves.append(judge(self.parser.parse_answer(step["completion"]), answer, moves, self.rules))
        if is_over(answer, moves, self.rules):
            state["final_env_response"] = self.env_response([], state)

    def env_response(self, messages: vf.Messages, state: vf.State, **_: object) -> vf.Messages:
        """The marks of the last guess and the number of remaining guesses."""
        return [vf.UserMessage(describe(state["answer"], state["moves"], self.rules))]

    @vf.stop(priority=10)
    def game_over(self, state: vf.State) -> bool:
        return state["final_env_response"] is not None


@check_arguments
def load_environment(
    num_train_examples: Count | None = None,
    num_eval_examples: Count = 20,
    use_think: bool = True,
    word_length: int = 5,
    max_guesses: Count = 6,
    hard_mode: bool = False,
    seed: int = 0,
    system_prompt: str | None = None,
) -> vf.Environment:
    """The wordle environment.

    Args:
        num_train_examples: Training games with distinct secret words. Default: 2,000, or all (words
            of four letters: 1,373).
        num_eval_examples: Held-out games; their words are never secret in training, for any seed.
        use_think: Ask for reasoning in <think> tags before the guess, and count them in the format
            reward.
        word_length: Number of letters, 4 to 8.
        max_guesses: Model replies per game, including those without a valid guess.
        hard_mode: Every guess must be consistent with all earlier marks.
        seed: Determines the words and their order; equal arguments give equal games on every
            machine.
        system_prompt: Default: the rules and the format. "" sends none.

    Raises:
        ConfigError: An invalid argument, by name.
    """
    if word_length not in LENGTHS:
        raise vf.ConfigError(
            f"word_length must be {LENGTHS.start} to {LENGTHS.stop - 1}, not {word_length}"
        )
    rules = Rules(word_length, max_guesses, hard_mode, valid_guesses(word_length))
    train = draw_secrets(
        word_length, num_train_examples, seed, held_out=False, at_most=DEFAULT_TRAIN_EXAMPLES
    )
    held_out = draw_secrets(word_length, num_eval_examples, seed, held_out=True)
    parser = vf.XMLParser(
        ["think", "guess"] if use_think else ["guess"], answer_field="guess", last=True
    )
    return WordleEnv(
        rules,
        dataset=_rows(train, rules),
        eval_dataset=_rows(held_out, rules),
        system_prompt=(_system_prompt(rules, use_think) if system_prompt is None else system_prompt)
        or None,
        parser=parser,
        rubric=_make_rubric(rules, parser),
    )


def _rows(words: list[str], rules: Rules) -> list[dict[str, str]]:
    question = (
        f"The secret word has {rules.word_length} letters. You have {rules.max_guesses} guesses."
        " What is your first?"
    )
    return [{"question": question, "answer": word} for word in words]


def _system_prompt(rules: Rules, use_think: bool) -> str:
    return SYSTEM_PROMPT.format(
        length=rules.word_length,
        guesses=rules.max_guesses,
        hard=HARD if rules.hard_mode else "",
        how=(
            "In every turn think first, then give one guess,"
            if use_think
            else "In every turn give one guess,"
        ),
        format=THINK + FORMAT if use_think else FORMAT,
    )


def _make_rubric(rules: Rules, parser: vf.Parser) -> vf.Rubric:
    """The rewards, computed from completion and answer alone, so that saved rollouts can be scored
    again.

    Coroutines run on the event loop: they take microseconds, less than a switch to a thread.
    """
    value = 1.0 / rules.word_length

    def replayed(state: vf.State) -> dict[str, Game]:
        replies = parser.get_assistant_messages(state["completion"])
        return {
            "game": replay(
                (parser.parse_answer([reply]) for reply in replies), state["answer"], rules
            )
        }

    async def correct_answer(game: Game) -> float:
        return float(game.is_solved)

    async def partial_answer(game: Game) -> float:
        marks = "" if game.is_solved else game.last_marks
        return value * marks.count(GREEN) + value / 2 * marks.count(YELLOW)

    async def length_bonus(game: Game) -> float:
        return 1.0 / len(game.moves) if game.is_solved else 0.0

    async def format_reward(completion: vf.Messages) -> float:
        return parser.format_reward(completion)

    async def invalid_guesses(game: Game) -> float:
        return float(game.num_invalid)

    rubric = vf.Rubric(
        [correct_answer, partial_answer, length_bonus], parser=parser, success="correct_answer"
    )
    rubric.add_reward_func(format_reward, weight=0.2)
    rubric.add_metric(invalid_guesses)
    rubric.add_score_object_provider(replayed)
    return rubric
