"""Check an environment's rows: they are readable, repeatable, and have the columns that the rubric
needs.

Samples at most ``MAX_ROWS`` evenly spaced rows of a set; the report notes when a set has more. Runs
no rollout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verifiers.checks.report import Findings, error_text, method_place, raised_at
from verifiers.data.examples import Example, Table
from verifiers.data.messages import message_text
from verifiers.environments.base import Environment
from verifiers.environments.group import EnvGroup
from verifiers.errors import DatasetError
from verifiers.runtime.json import canonical_json, encode_row

if TYPE_CHECKING:
    from verifiers.types import Message, Messages

MAX_ROWS = 1000
CHARS_PER_TOKEN = 4
"""Rough estimate, for prompts without a tokenizer."""


@dataclass(frozen=True, slots=True)
class Data:
    """The readable rows of the sample."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    is_repeatable: bool
    """Every sampled row is readable, and ``get_dataset`` returns the same rows again."""

    @property
    def examples(self) -> tuple[Example, ...]:
        """Examples to run: the training rows, or the held-out rows when there are none."""
        return self.train or self.held_out


def check_data(env: Environment, findings: Findings, n: int, seed: int) -> Data:
    """Read and check the rows."""
    num_errors = len(findings.errors)
    train: tuple[Example, ...] = ()
    held_out: tuple[Example, ...] = ()
    if env.train_table is not None:
        train = readable(env.train_table, "the training set", findings)
    if isinstance(env, EnvGroup):  # the rows are those of the members, which are checked in turn
        return Data(train, (), is_repeatable=True)
    if env.eval_table is env.train_table:
        _no_eval_set(env, findings)
    else:
        held_out = readable(env.eval_table, "the evaluation set", findings)
        _check_overlap(env, train, held_out, findings)
    if len(findings.errors) == num_errors:
        _check_repeatable(env, findings, n, seed)
    data = Data(train, held_out, is_repeatable=len(findings.errors) == num_errors)
    for examples, which in ((train, "the training set"), (held_out, "the evaluation set")):
        if examples:
            _check_prompts(env, examples, findings, which)
            _check_answers(env, examples, findings, which)
    return data


def first_rows(env: Environment, n: int, seed: int | None = None) -> bytes:
    """The environment's first ``n`` rows, encoded for comparison."""
    get = env.get_dataset if env.train_table is not None else env.get_eval_dataset
    rows = get(n, seed) if seed is not None else get(n)
    return b"\n".join(encode_row(dict(row)) for row in rows)


def check_same_again(env: Environment, again: Environment, findings: Findings) -> None:
    """Warn when two environments built with the same arguments have different rows."""
    for which in ("train_table", "eval_table"):
        first, second = getattr(env, which), getattr(again, which)
        try:
            differ = first is not None and (
                second is None
                or [e.hash for e in _spaced(first)] != [e.hash for e in _spaced(second)]
            )
        except Exception as error:  # noqa: BLE001  unreadable rows are already findings of the first environment
            findings.note(f"did not compare the rows of a second build: {error_text(error)}")
            return
        if differ:
            kind = "training" if which == "train_table" else "evaluation"
            findings.warn(
                "unseeded-randomness",
                f"built twice with the same arguments, the environment has different {kind} rows",
                f"the {kind} set",
                "draw them with a generator of a fixed seed: random.Random(seed),"
                " dataset.shuffle(seed=seed)",
            )


def readable(table: Table, which: str, findings: Findings) -> tuple[Example, ...]:
    """The readable rows of the sample; each kind of failure is reported once, with a count."""
    try:
        size = len(table)
    except Exception as error:  # noqa: BLE001  a dataset builder may raise anything; it is reported
        _report_unreadable(error, which, findings)
        return ()
    if not size:
        findings.error("dataset-unreadable", f"{which} is empty", which, "give it at least one row")
        return ()
    if size > MAX_ROWS:
        findings.note(f"checked {MAX_ROWS:,} of the {size:,} rows of {which}")
    examples, failures = [], []
    for position in _positions(table):
        try:
            examples.append(table[position])
        except Exception as error:  # noqa: BLE001  a row may hold anything; it is reported
            failures.append(error)
    for code in dict.fromkeys(map(_code_of, failures)):
        errors = [error for error in failures if _code_of(error) == code]
        _report_unreadable(errors[0], which, findings, len(errors))
    return tuple(examples)


def _positions(table: Table) -> range:
    return range(0, len(table), -(-len(table) // MAX_ROWS))


def _spaced(table: Table) -> list[Example]:
    return [table[position] for position in _positions(table)]


def _code_of(error: BaseException) -> str:
    text = str(error) if isinstance(error, DatasetError) else ""
    if "has neither 'prompt' nor" in text:
        return "no-prompt-question"
    return "row-not-serialisable" if "that JSON cannot" in text else "dataset-unreadable"


_FIXES = {
    "no-prompt-question": (
        "give rows a column 'prompt' or 'question', or name the column: question_key='…'"
    ),
    "row-not-serialisable": (
        "keep text, numbers, lists and dicts in rows, and build objects from them in setup_state"
    ),
    "dataset-unreadable": (
        "pass dataset= readable rows; the docstring of Environment lists the accepted types"
    ),
}


def _report_unreadable(
    error: BaseException, which: str, findings: Findings, count: int = 1
) -> None:
    code = _code_of(error)
    more = f" ({count} rows of {which} have this problem)" if count > 1 else ""
    location = which if isinstance(error, DatasetError) else raised_at(error, which)
    message = str(error) if isinstance(error, DatasetError) else error_text(error)
    findings.error(code, message + more, location, _FIXES[code])


def _no_eval_set(env: Environment, findings: Findings) -> None:
    findings.warn(
        "eval-set-missing",
        "there is no evaluation set, so evaluate() uses the training rows",
        type(env).__name__,
        "pass eval_dataset= rows that are not used for training",
    )


def _check_overlap(
    env: Environment, train: Sequence[Example], held_out: Sequence[Example], findings: Findings
) -> None:
    seen = {example.hash for example in train}
    shared = [example for example in held_out if example.hash in seen]
    if not shared:
        return
    if len(shared) == len(held_out) == len(train):
        _no_eval_set(env, findings)
        return
    findings.warn(
        "train-and-eval-overlap",
        f"{len(shared)} of {len(held_out)} evaluation rows are also training rows (first:"
        f" {shared[0].example_id})",
        "the evaluation set",
        "split the rows, for example dataset.train_test_split(test_size=0.1, seed=0)",
    )


def _check_repeatable(env: Environment, findings: Findings, n: int, seed: int) -> None:
    location = method_place(env, "get_dataset")
    try:
        before, shuffled = first_rows(env, n), first_rows(env, n, seed)
        repeatable = shuffled == first_rows(env, n, seed) and before == first_rows(env, n)
    except Exception as error:  # noqa: BLE001  an author's get_dataset may raise anything; it is reported
        findings.error(
            "hook-raises-or-returns-a-wrong-type",
            f"get_dataset(n, seed) raised {error_text(error)}",
            raised_at(error, location),
            "accept n=-1 and seed=None, and return a datasets.Dataset",
        )
        return
    if not repeatable:
        findings.error(
            "get-dataset-not-repeatable",
            f"get_dataset({n}, seed={seed}) returns other rows the second time, or changes the"
            f" result of get_dataset({n})",
            location,
            "shuffle a copy with the seed argument: dataset.shuffle(seed=seed)",
        )


def _check_prompts(
    env: Environment, examples: Sequence[Example], findings: Findings, which: str
) -> None:
    prompts = [example.row["prompt"] for example in examples]
    if env.max_seq_len is not None:
        sizes = [sum(map(len, _texts(prompt))) // CHARS_PER_TOKEN for prompt in prompts]
        if long := [size for size in sizes if size > env.max_seq_len]:
            findings.warn(
                "prompts-over-max-seq-len",
                f"{len(long)} of {len(prompts)} prompts have more than"
                f" max_seq_len={env.max_seq_len} tokens (the longest about {max(long)}, at"
                f" {CHARS_PER_TOKEN} characters a token)",
                which,
                "raise max_seq_len, or leave these rows out: their rollouts end without a"
                " completion",
            )
    system_prompt = env.system_prompt if env.message_type == "chat" else None
    if system_prompt:
        twice = [p for p in prompts if _has_second_system_prompt(p, system_prompt)]
        if twice:
            findings.warn(
                "system-prompt-given-twice",
                f"{len(twice)} of {len(prompts)} prompts contain a system prompt, and the"
                " environment has one too",
                which,
                "remove it from the rows or from the environment: a row's system prompt replaces"
                " the environment's",
            )


def _has_second_system_prompt(prompt: list[Message], system_prompt: str) -> bool:
    (first, *more), roles = _texts(prompt), [message["role"] for message in prompt]
    is_first = first == system_prompt and roles.count("system") < 2
    return not is_first or any(system_prompt in text for text in more)


def _texts(prompt: Messages) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [message_text(message) for message in prompt]


def _check_answers(
    env: Environment, examples: Sequence[Example], findings: Findings, which: str
) -> None:
    functions = [f.name for f in env.rubric.functions if {"answer", "answers"} & set(f.required)]
    without = sum(example.row["answer"] == "" for example in examples)
    if functions and without:
        findings.warn(
            "no-answer-although-a-function-wants-it",
            f"{without} of {len(examples)} rows have no answer, and {', '.join(functions)}"
            " requires it",
            which,
            "fill the column 'answer', or name the column: answer_key='…'",
        )


def fingerprint(examples: Iterable[Example]) -> list[str]:
    """SHA-256 digest of each row."""
    return [hashlib.sha256(canonical_json(example.row)).hexdigest() for example in examples]
