"""Right answers and how to write them: the oracle of an environment, and the format that its rubric
reads.

The oracle is the environment's own (``Environment.oracle``), else each row's ``answer`` in the
format in which it earns most. A panel of non-solutions is written in that same format, so that it
fails for what it says and not for its form.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verifiers.checks.audit.playing import Player, Policy, Trial, Turn
from verifiers.checks.policies import formatted, oracle_reply
from verifiers.data.examples import Example
from verifiers.data.messages import message_text
from verifiers.environments.base import Environment
from verifiers.parsers import ThinkParser, XMLParser
from verifiers.testing.replies import to_message

PROBED = 3
"""Rows on which the formats are compared."""
LONG_CHARS = 5
"""Characters from which an answer with something around it is still that answer."""

Format = Callable[[Turn, str], str]
"""A text in the answer's place -> a whole reply."""


@dataclass(frozen=True, slots=True)
class Oracle:
    """What solves the rows of an environment."""

    source: str
    """"oracle" (the environment's own), "answer" (the row's), or "" without a right answer."""
    policy: Policy | None
    write: Format
    """The format in which a right answer earns most."""
    format_name: str


def answer_text(example: Example) -> str:
    """The row's ``answer`` as text."""
    answer = example.row["answer"]
    return (
        answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    )


async def find_oracle(player: Player, examples: Sequence[Example]) -> Oracle:
    """The oracle of an environment; plays each format on a few rows. *Raises* as a run does."""
    has_answers = any(answer_text(example) for example in examples)
    best: tuple[float, str, Format] | None = None
    for name, write in _formats(player.env).items() if has_answers else ():
        trials = await player.play(_answering(write), examples[:PROBED])
        rewards = [trial.reward for trial in trials if not math.isnan(trial.reward)]
        reward = sum(rewards) / len(rewards) if rewards else -math.inf
        if best is None or reward > best[0] + 1e-9:
            best = reward, name, write
    name, write = best[1:] if best is not None else ("as asked", as_asked(player.env))
    oracle = player.env.oracle
    if oracle is not None:
        policy: Policy = lambda t: oracle_reply(oracle(t.example.row), t.request, t.number)  # noqa: E731
        return Oracle("oracle", policy, write, name)
    if has_answers:
        return Oracle("answer", _answering(write), write, name)
    return Oracle("", None, write, name)


def solution_texts(env: Environment, example: Example) -> tuple[str, ...]:
    """The texts of a right solution, one for each turn, as far as known without playing."""
    replies = env.oracle(example.row) if env.oracle is not None else answer_text(example)
    if callable(replies):
        return (answer_text(example),)
    parts = replies if isinstance(replies, list | tuple) else [replies]
    return tuple(message_text(to_message(part)[0]) for part in parts)


def is_solution(env: Environment, trial: Trial, slots: Sequence[str]) -> bool:
    """Whether a non-solution happened to solve the row; ``slots``: texts in the answer's place."""
    answer = answer_text(trial.example)
    expected = solution_texts(env, trial.example)
    if len(expected) > 1 or (len(expected) == 1 and not answer):
        spoken = slots if len(slots) == len(expected) else trial.replies
        together = zip(spoken, trial.replies, expected, strict=False)
        if len(spoken) == len(expected) and all(
            is_same(text, right, trial.example) or is_same(reply, right, trial.example)
            for text, reply, right in together
        ):
            return True
        if len(expected) > 1:
            return False
    return bool(answer) and any(is_same(slot, answer, trial.example) for slot in slots)


def is_same(text: str, answer: str, example: Example) -> bool:
    """Whether two answers are the same: numbers by value, texts apart from white space and outer
    punctuation.

    Case counts only where it is the task: where the question has the answer in another case. A long
    answer with less
    than as much around it is the same: a graded reward pays it nearly in full, and rightly so.
    """
    plain, plain_answer = bare(text), bare(answer)
    if not plain_answer:
        return plain == plain_answer
    if (number := _number(plain)) is not None and (right := _number(plain_answer)) is not None:
        return math.isclose(number, right, rel_tol=1e-9)
    question = bare(question_of(example))
    if plain_answer.casefold() in question.casefold() and plain_answer not in question:
        return plain == plain_answer
    is_long = len(plain_answer) >= LONG_CHARS and len(plain) < 2 * len(plain_answer)
    if is_long and plain_answer in plain:
        return True
    return plain.casefold() == plain_answer.casefold()


def question_of(example: Example) -> str:
    """The last user message of the row's prompt."""
    prompt = example.row["prompt"]
    if isinstance(prompt, str):
        return prompt
    return next((message_text(m) for m in reversed(prompt) if m.get("role") == "user"), "")


def bare(text: str) -> str:
    """A text as answers are compared: without white space and outer punctuation."""
    return "".join(text.split()).strip(string.punctuation.replace("-", "").replace("+", ""))


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


# --- formats --------------------------------------------------------------------------------------


def _answering(write: Format) -> Policy:
    return lambda turn: write(turn, answer_text(turn.example))


def _formats(env: Environment) -> dict[str, Format]:
    """Name -> format, the most specific first: of equal formats the first is kept."""
    formats: dict[str, Format] = {"as asked": as_asked(env)}
    if isinstance(env.parser, XMLParser):
        formats["answer field"] = _xml(env.parser)
    formats["in the shot"] = _as_in_shots
    formats["boxed"] = lambda _, text: rf"\boxed{{{text}}}"
    formats["answer tag"] = lambda _, text: f"<answer>{text}</answer>"
    formats["plain"] = lambda _, text: text
    formats["#### line"] = lambda _, text: f"#### {text}"
    if isinstance(env.parser, ThinkParser):
        for name, write in list(formats.items())[1:]:
            formats[f"{name} after thinking"] = _after_thinking(write)
    return formats


def as_asked(env: Environment) -> Format:
    """The format of the parser, else the tags or the box that the prompt mentions."""

    def write(turn: Turn, text: str) -> str:
        row = {**turn.example.row, "answer": text}
        example = Example(turn.example.example_id, turn.example.hash, row)
        prompt = turn.request.prompt
        if isinstance(prompt, str):
            texts = [prompt]
        else:
            texts = [message_text(m) for m in prompt if m.get("role") != "assistant"]
        return formatted(env, example, texts)

    return write


def _xml(parser: XMLParser) -> Format:
    placeholders = {name: "…" for name in parser.get_fields()}
    return lambda _, text: parser.format(**{**placeholders, parser.answer_field: text})


def _after_thinking(write: Format) -> Format:
    return lambda turn, text: f"<think>\nI know this.\n</think>\n\n{write(turn, text)}"


def _as_in_shots(turn: Turn, text: str) -> str:
    """The last solved example of the prompt with the number or word at its end replaced; the text
    alone without an end."""
    prompt = turn.request.prompt
    earlier = () if isinstance(prompt, str) else prompt[:-1]
    shots = [message_text(m) for m in earlier if m.get("role") == "assistant"]
    if turn.number or not shots:
        return text
    if tag := re.search(r"<(\w+)>[^<]*</\1>\s*$", shots[-1]):
        return f"<{tag[1]}>{text}</{tag[1]}>"
    shot = shots[-1].rstrip()
    closing = re.search(r"</\w+>$", shot)
    body = shot[: closing.start()] if closing else shot.rstrip(".}")
    last_word = body.split()[-1:]
    if not last_word or "{" not in shot:
        return text
    return body.removesuffix(last_word[0]) + text + shot[len(body) :]
