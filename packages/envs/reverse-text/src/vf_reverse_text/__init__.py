"""reverse-text: write a text backwards inside ``<reversed_text>`` tags. One turn, no network, no
download.

The public interface is ``load_environment``; the README describes rewards and metrics.
"""

from __future__ import annotations

from typing import Any, Literal

import verifiers as vf
from verifiers.runtime.values import Count, Number, check_arguments
from vf_reverse_text.public import PublicTexts
from vf_reverse_text.scoring import sequence_ratio
from vf_reverse_text.texts import DEFAULT_LENGTHS, generate_texts

__all__ = ["SYSTEM_PROMPT", "load_environment"]

Unit = Literal["paragraph", "sentence", "word"]

SYSTEM_PROMPT = (
    "Reverse the text the user gives you, character by character, keeping every space and"
    " punctuation mark. Answer with the reversed text inside <reversed_text> and </reversed_text>"
    " tags."
)


@check_arguments
def load_environment(
    unit: Unit = "paragraph",
    min_chars: Count | None = None,
    max_chars: Count | None = None,
    num_train_examples: Count = 1000,
    num_eval_examples: Count = 100,
    seed: int = 0,
    dataset_name: str | None = None,
    system_prompt: str | None = None,
    num_shots: Number = 0,
    autojunk: bool = False,
) -> vf.Environment:
    """The reverse-text environment.

    Args:
        unit: Kind of a generated text: "paragraph", "sentence" or "word" (one lower-case English
            word).
        min_chars: Minimum characters of a text. Default: 80, 20 or 3 by unit; no bound with a
            dataset.
        max_chars: Maximum characters of a text. Default: 180, 80 or 6 by unit; no bound with a
            dataset.
        num_train_examples: Training texts. With a dataset at most its texts beyond the held-out
            texts.
        num_eval_examples: Held-out texts, disjoint from the training texts and independent of
            num_train_examples.
        seed: Determines the texts; equal arguments give equal texts on every machine.
        dataset_name: A dataset to read instead of generating, such as
            "PrimeIntellect/Reverse-Text-RL"; loaded on first use, needs a network unless cached.
        system_prompt: Default: an instruction for paragraphs, sentences and datasets; none for
            words, so that a tiny model sees only the word. "" sends none.
        num_shots: Few-shot examples before each text, for models that do not follow the instruction
            alone. They are generated, and neither trained on nor held out.
        autojunk: Score with difflib's frequent-character heuristic, as published numbers for this
            task were.

    Raises:
        ConfigError: An invalid argument, by name.
        DatasetError: On first use of the rows, when the dataset cannot be loaded or is too small.
    """
    _check_lengths(unit, min_chars, max_chars, dataset_name)
    num_texts = num_eval_examples + num_train_examples if dataset_name is None else 0
    texts = generate_texts(unit, *_bounds(unit, min_chars, max_chars), num_texts + num_shots, seed)
    if dataset_name is None:
        train: Any = _rows(texts[num_eval_examples:num_texts])
        held_out: Any = _rows(texts[:num_eval_examples])
    else:
        public = PublicTexts(
            dataset_name, min_chars, max_chars, seed, num_train_examples, num_eval_examples
        )
        train, held_out = lambda: _rows(public.train()), lambda: _rows(public.held_out())
    if system_prompt is None and not (unit == "word" and dataset_name is None):
        system_prompt = SYSTEM_PROMPT
    parser = vf.XMLParser(["reversed_text"], answer_field="reversed_text", last=True)
    return vf.SingleTurnEnv(
        dataset=train,
        eval_dataset=held_out,
        system_prompt=system_prompt or None,
        few_shot=_shots(texts[num_texts:]),
        parser=parser,
        rubric=_make_rubric(parser, autojunk),
    )


def _make_rubric(parser: vf.Parser, autojunk: bool) -> vf.Rubric:
    def similarity(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
        return sequence_ratio(parser.parse_answer(completion) or "", answer, autojunk)

    def exact_match(completion: vf.Messages, answer: str, parser: vf.Parser) -> float:
        return float(parser.parse_answer(completion) == answer)

    def format_reward(completion: vf.Messages, parser: vf.Parser) -> float:
        return parser.get_format_reward_func()(completion)

    rubric = vf.Rubric(funcs=[similarity], parser=parser, success="exact_match")
    rubric.add_metric(exact_match)
    rubric.add_metric(format_reward)
    return rubric


def _rows(texts: list[str]) -> list[dict[str, str]]:
    return [{"question": text, "answer": text[::-1]} for text in texts]


def _shots(texts: list[str]) -> list[dict[str, str]] | None:
    """Each text and its right answer, as two messages."""
    messages = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        messages.append(
            {"role": "assistant", "content": f"<reversed_text>{text[::-1]}</reversed_text>"}
        )
    return messages or None


def _bounds(unit: str, min_chars: int | None, max_chars: int | None) -> tuple[int, int]:
    """The bounds for generated texts; an explicit bound adjusts the default of the other."""
    shortest, longest = DEFAULT_LENGTHS[unit]
    if min_chars is not None:
        shortest, longest = min_chars, max(longest, min_chars)
    if max_chars is not None:
        shortest, longest = min(shortest, max_chars) if min_chars is None else min_chars, max_chars
    return shortest, longest


def _check_lengths(
    unit: Unit, min_chars: int | None, max_chars: int | None, dataset_name: str | None
) -> None:
    if dataset_name is not None and unit != "paragraph":
        raise vf.ConfigError(
            f"unit={unit!r} shapes generated texts; leave it out when dataset_name is given"
        )
    least = 1 if dataset_name is not None else 2 if unit == "word" else 3
    for name, value in (("min_chars", min_chars), ("max_chars", max_chars)):
        if value is not None and value < least:
            raise vf.ConfigError(f"{name} must be a whole number of at least {least}, not {value}")
    if min_chars is not None and max_chars is not None and min_chars > max_chars:
        raise vf.ConfigError(f"min_chars={min_chars} is above max_chars={max_chars}")
