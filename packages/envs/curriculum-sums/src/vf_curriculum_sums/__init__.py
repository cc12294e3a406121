"""curriculum-sums: arithmetic with a column ``difficulty``, for curriculum training. One turn, one
number.

The public interface is ``load_environment``; the README describes rewards and metrics.
"""

from __future__ import annotations

import re

import verifiers as vf
from verifiers.runtime.values import Count, Number, check_arguments
from vf_curriculum_sums.sums import LEVELS, generate_rows

__all__ = ["SYSTEM_PROMPT", "load_environment"]

SYSTEM_PROMPT = "Work out the sum. Answer with the number alone inside <answer> and </answer> tags."

SHOTS = (("12 + 7", 19), ("30 + 25", 55), ("41 + 8", 49))
"""Solved sums. Shown with the sum again before the result: a small model is right eight times as
often as after bare results."""

_MARKED = re.compile(r"[\s*$`]*+(?:\\boxed\{)?([^{}\s*$`.]*+)\}?[\s*$`.]*+")
"""A number between marks."""
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}")


@check_arguments
def load_environment(
    min_difficulty: Count = 1,
    max_difficulty: Count = 5,
    num_train_examples: Count = 1000,
    num_eval_examples: Count = 100,
    seed: int = 0,
    system_prompt: str | None = None,
    num_shots: Number = 0,
) -> vf.Environment:
    """The curriculum-sums environment.

    Args:
        min_difficulty: Easiest level, 1 to 5; rows cycle through the levels up to max_difficulty.
        max_difficulty: Hardest level.
        num_train_examples: Training sums.
        num_eval_examples: Held-out sums, disjoint from the training sums and independent of
            num_train_examples.
        seed: Determines the sums; equal arguments give equal sums on every machine.
        system_prompt: Default: an instruction that names the tags. "" sends none.
        num_shots: Solved sums before the question, 0 to 3; they are never rows.

    Raises:
        ConfigError: An invalid argument, by name.
    """
    if max_difficulty > max(LEVELS):
        raise vf.ConfigError(f"max_difficulty={max_difficulty} is above {max(LEVELS)}")
    if min_difficulty > max_difficulty:
        raise vf.ConfigError(
            f"min_difficulty={min_difficulty} is above max_difficulty={max_difficulty}"
        )
    if num_shots > len(SHOTS):
        raise vf.ConfigError(f"num_shots={num_shots} is above {len(SHOTS)}")
    shots = SHOTS[:num_shots]
    held_out, train = generate_rows(
        min_difficulty,
        max_difficulty,
        num_eval_examples,
        num_train_examples,
        seed,
        [text for text, _ in shots],
    )
    parser = vf.XMLParser(["answer"], last=True)
    return vf.SingleTurnEnv(
        dataset=train,
        eval_dataset=held_out,
        system_prompt=(SYSTEM_PROMPT if system_prompt is None else system_prompt) or None,
        few_shot=[message for text, value in shots for message in _solved(text, value)] or None,
        parser=parser,
        rubric=_make_rubric(parser),
    )


def read_number(text: str | None) -> int | None:
    """The integer that an answer consists of, optionally with commas between thousands and U+2212
    as the minus sign.

    >>> read_number(" 1,024 "), read_number("−5"), read_number("x = 3"), read_number(None)
    (1024, -5, None, None)
    """
    marked = _MARKED.fullmatch(text or "")
    written = marked[1] if marked else ""
    plain = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", written.replace("−", "-"))
    return int(plain) if _NUMBER.fullmatch(plain) else None


def _solved(text: str, value: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"What is {text}?"},
        {"role": "assistant", "content": f"{text} = {value} <answer>{value}</answer>"},
    ]


def _make_rubric(parser: vf.Parser) -> vf.Rubric:
    # Coroutines run on the event loop: they take microseconds, less than a switch to a thread.
    async def correct_answer(completion: vf.Messages, answer: str) -> float:
        return float(read_number(parser.parse_answer(completion)) == int(answer))

    async def format_reward(completion: vf.Messages) -> float:
        return parser.format_reward(completion)

    rubric = vf.Rubric([correct_answer], parser=parser)
    rubric.add_metric(format_reward)
    return rubric
