"""What the rows themselves give away: answers in prompts, equal rows, contradictions, overlap of
the two sets."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from verifiers.checks.audit.answers import answer_text, question_of
from verifiers.checks.audit.panel import Answers
from verifiers.checks.report import Findings
from verifiers.data.examples import Example
from verifiers.data.images import image_parts, image_url
from verifiers.data.messages import message_text
from verifiers.environments.base import Environment

LEAK_SHARE = 0.5
GUESSABLE, GUESSED = 0.6, 0.9
"""Shares of rows with the most frequent answer that are a warning and an error."""
MIN_ROWS = 5
"""Rows below which shares say nothing."""
_SAYS_THE_ANSWER = r"\b(?:answer|solution|result|key|gold|label|target|expected)\b[\s\"'*`]*(?:is|:|=|->|\])[\s\"'*`]*"


def check_rows(
    env: Environment, train: Sequence[Example], held_out: Sequence[Example], findings: Findings
) -> None:
    """Report what needs no rollout, of both sets."""
    is_single = env.max_turns == 1 and not env.tool_defs
    for rows, which in ((train, "the training set"), (held_out, "the evaluation set")):
        if rows:
            _check_set(rows, findings, is_single, which)
    _check_overlap(train, held_out, findings, is_single)


def _check_set(rows: Sequence[Example], findings: Findings, is_single: bool, which: str) -> None:
    _check_questions(rows, findings, which)
    if len(rows) < MIN_ROWS:
        findings.note(f"{len(rows)} rows of {which}: answers and repetitions were not compared")
        return
    _check_leaks(rows, findings, which)
    _check_repeats(rows, findings, is_single, which)
    share = Answers.of(rows).share
    if is_single and share >= GUESSABLE:
        report = findings.error if share >= GUESSED else findings.warn
        report(
            "answer-is-guessable",
            f"always the same reply is right in {share:.0%} of the rows:"
            f" {Answers.of(rows).texts[0][:60]!r}",
            which,
            "balance the answers, or ask for something that cannot be guessed",
        )


def _check_questions(rows: Sequence[Example], findings: Findings, which: str) -> None:
    """Empty questions, and answers that only some rows lack."""
    blank = [example for example in rows if not question_of(example).strip()]
    if blank:
        findings.warn(
            "question-is-empty",
            f"{len(blank)} of {len(rows)} rows ask nothing (first: example {blank[0].example_id})",
            which,
            "remove them, or fill the column 'question' or 'prompt'",
        )
    without = [example for example in rows if not answer_text(example).strip()]
    if without and len(without) < len(rows):
        findings.warn(
            "answer-is-empty",
            f"{len(without)} of {len(rows)} rows have no answer (first: example"
            f" {without[0].example_id}), and the others have one",
            which,
            "remove them, or fill the column 'answer': no reply to them can be right",
        )


def _check_leaks(rows: Sequence[Example], findings: Findings, which: str) -> None:
    leaking = [example for example in rows if _leak(example)]
    if len(leaking) >= LEAK_SHARE * len(rows):
        findings.error(
            "answer-in-the-prompt",
            f"{len(leaking)} of {len(rows)} prompts give their answer away: {_leak(leaking[0])!r}"
            f" (example {leaking[0].example_id})",
            which,
            "keep the answer in the column 'answer', out of the prompt and of what the environment"
            " says",
        )


def _leak(example: Example) -> str:
    """Where a prompt names its answer, or shows it outside of the question; "" if nowhere."""
    answer = answer_text(example).strip()
    if not answer:
        return ""
    prompt = example.row["prompt"]
    question = question_of(example)
    says = _SAYS_THE_ANSWER + re.escape(answer) + r"(?!\w)"
    if (match := re.search(says, question, re.IGNORECASE)) is not None:
        return match[0]
    messages = () if isinstance(prompt, str) else prompt
    system = [message_text(m) for m in messages if m.get("role") == "system"]
    pattern = rf"(?<![\w.-]){re.escape(answer)}(?![\w-])"
    if len(answer) > 2 and any(re.search(pattern, text) for text in system):
        return f"system message with {answer[:60]}"
    return next((aside for aside in _asides(question) if re.search(pattern, aside)), "")


def _asides(question: str) -> Iterator[str]:
    """Parts of a question that are not part of what it asks: comments, and text in double
    brackets."""
    for opening, closing in (("<!--", "-->"), ("[[", "]]"), ("((", "))")):
        start = question.find(opening)
        end = question.find(closing, start)
        if 0 <= start < end:
            yield question[start : end + len(closing)]
    if (comment := re.search(r"#\s*[A-Za-z]+:", question)) is not None:
        yield question[comment.start() :]


def _row_key(example: Example, is_single: bool) -> str:
    """What makes two rows differ: their prompt; of several turns also its answer and ``info``."""
    prompt = example.row["prompt"]
    if not isinstance(prompt, str):
        texts = [[m.get("role"), message_text(m)] for m in prompt]
        prompt = json.dumps([texts, [image_url(part) for part in image_parts(prompt)]])
    key = " ".join(prompt.casefold().split())
    if is_single:
        return key
    return key + json.dumps(
        [answer_text(example), example.row["info"]], sort_keys=True, default=str
    )


def _check_repeats(
    rows: Sequence[Example], findings: Findings, is_single: bool, which: str
) -> None:
    by_prompt: dict[str, list[Example]] = defaultdict(list)
    for example in rows:
        by_prompt[_row_key(example, is_single)].append(example)
    repeated = sum(len(group) - 1 for group in by_prompt.values())
    contradicting = [g for g in by_prompt.values() if len(set(map(answer_text, g))) > 1]
    if contradicting:
        first, second, *_ = contradicting[0]
        findings.error(
            "rows-contradict-each-other",
            f"{len(contradicting)} prompts have rows with different answers: examples"
            f" {first.example_id} and {second.example_id} ask the same",
            which,
            "remove one of them, or accept both answers",
        )
    # those that contradict each other are no copies
    repeated -= sum(len(group) - 1 for group in contradicting)
    if repeated:
        findings.warn(
            "rows-are-repeated",
            f"{repeated} of {len(rows)} rows repeat an earlier one",
            which,
            "remove them: a repeated row counts once for each copy",
        )


def _check_overlap(
    train: Sequence[Example], held_out: Sequence[Example], findings: Findings, is_single: bool
) -> None:
    if not train or not held_out:
        return
    seen = {_row_key(example, is_single) for example in train}
    shared = [example for example in held_out if _row_key(example, is_single) in seen]
    if shared:
        findings.error(
            "train-and-eval-overlap",
            f"{len(shared)} of {len(held_out)} evaluation rows ask what a training row asks (first:"
            f" example {shared[0].example_id})",
            "the evaluation set",
            "split the rows, for example dataset.train_test_split(test_size=0.1, seed=0)",
        )
