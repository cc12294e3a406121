"""Checks of an environment's rows: can they be read, do they stay the same, do they hold what the rubric wants.

At most ``MAX_ROWS`` rows of a set are looked at, evenly spaced; the report says when that was not all of them. This
module plays nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.checks.report import Findings, method_place, raised_at, said
from verifiers.data.examples import Example, Table
from verifiers.data.messages import message_text
from verifiers.environments.base import Environment
from verifiers.environments.group import EnvGroup
from verifiers.errors import DatasetError
from verifiers.runtime.json import canonical_json, encode_row

MAX_ROWS = 1000
CHARS_PER_TOKEN = 4
"""Rough, for prompts that no tokenizer has counted."""


@dataclass(frozen=True, slots=True)
class Data:
    """The readable rows that were looked at."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    is_repeatable: bool
    """Every row that was looked at could be read, and ``get_dataset`` gives the same rows again."""

    @property
    def to_play(self) -> tuple[Example, ...]:
        """Training rows, or held-out rows where there are no others."""
        return self.train or self.held_out


def check_data(env: Environment, findings: Findings, n: int, seed: int) -> Data:
    """Read the rows and check them."""
    num_errors = len(findings.errors)
    train = _readable(env.train_table, "the training set", findings) if env.train_table is not None else ()
    if isinstance(env, EnvGroup):  # its rows are those of its members, which are checked one by one
        return Data(train, (), is_repeatable=True)
    held_out: tuple[Example, ...] = ()
    if env.eval_table is env.train_table:
        _no_eval_set(env, findings)
    else:
        held_out = _readable(env.eval_table, "the evaluation set", findings)
        _check_overlap(env, train, held_out, findings)
    if len(findings.errors) == num_errors:
        _check_repeatable(env, findings, n, seed)
    data = Data(train, held_out, is_repeatable=len(findings.errors) == num_errors)
    if data.to_play:
        _check_prompts(env, data.to_play, findings)
        _check_answers(env, data.to_play, findings)
    return data


def first_rows(env: Environment, n: int, seed: int | None = None) -> bytes:
    """What the environment hands out as its first ``n`` rows, as bytes that compare."""
    get = env.get_dataset if env.train_table is not None else env.get_eval_dataset
    rows = get(n, seed) if seed is not None else get(n)
    return b"\n".join(encode_row(dict(row)) for row in rows)


def check_same_again(env: Environment, again: Environment, findings: Findings) -> None:
    """Whether an environment that was built twice has the same rows both times."""
    for which in ("train_table", "eval_table"):
        one, other = getattr(env, which), getattr(again, which)
        try:
            differ = one is not None and (
                other is None or [e.hash for e in _spaced(one)] != [e.hash for e in _spaced(other)]
            )
        except Exception as error:  # noqa: BLE001  rows that cannot be read are findings of the first environment
            findings.note(f"whether the rows are the same when built again was not checked: {said(error)}")
            return
        if differ:
            kind = "training" if which == "train_table" else "evaluation"
            findings.warn(
                "unseeded-randomness",
                f"built twice with the same arguments, the environment has different {kind} rows",
                f"the {kind} set",
                "draw them with a generator of a fixed seed: random.Random(seed), dataset.shuffle(seed=seed)",
            )


def _readable(table: Table, which: str, findings: Findings) -> tuple[Example, ...]:
    """The rows that can be read; what cannot is reported with the number of rows it concerns."""
    try:
        size = len(table)
    except Exception as error:  # noqa: BLE001  a dataset builder may raise anything; it is reported
        _report_unreadable(error, which, findings)
        return ()
    if not size:
        findings.error("dataset-unreadable", f"{which} is empty", which, "give it at least one row")
        return ()
    if size > MAX_ROWS:
        findings.note(f"{MAX_ROWS:,} of the {size:,} rows of {which} were looked at")
    examples, failures = [], []
    for position in _positions(table):
        try:
            examples.append(table[position])
        except Exception as error:  # noqa: BLE001  a row may hold anything; it is reported
            failures.append(error)
    for code in dict.fromkeys(map(_code_of, failures)):
        own = [error for error in failures if _code_of(error) == code]
        _report_unreadable(own[0], which, findings, len(own))
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
    "no-prompt-question": "give rows a column 'prompt' or 'question', or name the column: question_key='…'",
    "row-not-serialisable": "keep text, numbers, lists and dicts in rows, and build objects from them in setup_state",
    "dataset-unreadable": "give dataset= rows that can be read; see the docstring of Environment for what it takes",
}


def _report_unreadable(error: BaseException, which: str, findings: Findings, count: int = 1) -> None:
    code = _code_of(error)
    more = f" ({count} rows of {which} have this)" if count > 1 else ""
    place = which if isinstance(error, DatasetError) else raised_at(error, which)
    message = str(error) if isinstance(error, DatasetError) else said(error)
    findings.error(code, message + more, place, _FIXES[code])


def _no_eval_set(env: Environment, findings: Findings) -> None:
    findings.warn(
        "eval-set-missing",
        "there is no evaluation set, so evaluate() uses the training rows",
        type(env).__name__,
        "give eval_dataset= rows that training never sees",
    )


def _check_overlap(env: Environment, train: Sequence[Example], held_out: Sequence[Example], findings: Findings) -> None:
    seen = {example.hash for example in train}
    shared = [example for example in held_out if example.hash in seen]
    if not shared:
        return
    if len(shared) == len(held_out) == len(train):
        _no_eval_set(env, findings)
        return
    findings.warn(
        "train-and-eval-overlap",
        f"{len(shared)} of {len(held_out)} evaluation rows are training rows too (first: {shared[0].example_id})",
        "the evaluation set",
        "split the rows, for example dataset.train_test_split(test_size=0.1, seed=0)",
    )


def _check_repeatable(env: Environment, findings: Findings, n: int, seed: int) -> None:
    place = method_place(env, "get_dataset")
    try:
        before, shuffled = first_rows(env, n), first_rows(env, n, seed)
        repeatable = shuffled == first_rows(env, n, seed) and before == first_rows(env, n)
    except Exception as error:  # noqa: BLE001  an author's own get_dataset may raise anything; it is reported
        findings.error(
            "hook-raises-or-returns-a-wrong-type",
            f"get_dataset(n, seed) raised {said(error)}",
            raised_at(error, place),
            "accept n=-1 and seed=None, and return a datasets.Dataset",
        )
        return
    if not repeatable:
        findings.error(
            "get-dataset-not-repeatable",
            f"get_dataset({n}, seed={seed}) gives other rows the second time, or changes what get_dataset({n}) gives",
            place,
            "shuffle a copy with the seed that is given: dataset.shuffle(seed=seed)",
        )


def _check_prompts(env: Environment, examples: Sequence[Example], findings: Findings) -> None:
    prompts = [example.row["prompt"] for example in examples]
    if env.max_seq_len is not None:
        sizes = [sum(map(len, _texts(prompt))) // CHARS_PER_TOKEN for prompt in prompts]
        if long := [size for size in sizes if size > env.max_seq_len]:
            findings.warn(
                "prompts-over-max-seq-len",
                f"{len(long)} of {len(prompts)} prompts have more than max_seq_len={env.max_seq_len} tokens (the "
                f"longest about {max(long)}, at {CHARS_PER_TOKEN} characters a token)",
                "the dataset",
                "raise max_seq_len, or leave these rows out: they end without an answer",
            )
    if env.system_prompt and env.message_type == "chat":
        twice = [prompt for prompt in prompts if _has_second_system_prompt(prompt, env.system_prompt)]
        if twice:
            findings.warn(
                "system-prompt-given-twice",
                f"{len(twice)} of {len(prompts)} prompts bring a system prompt of their own beside the environment's",
                "the dataset",
                "leave it out of the rows, or give the environment none: a row's own replaces the environment's",
            )


def _has_second_system_prompt(prompt: Any, own: str) -> bool:
    texts, roles = _texts(prompt), [message["role"] for message in prompt]
    return texts[0] != own or roles.count("system") > 1 or any(own in text for text in texts[1:])


def _texts(prompt: Any) -> list[str]:
    return [prompt] if isinstance(prompt, str) else [message_text(message) for message in prompt]


def _check_answers(env: Environment, examples: Sequence[Example], findings: Findings) -> None:
    wanting = [f.name for f in env.rubric.functions if {"answer", "answers"} & set(f.parameters.required)]
    without = sum(example.row["answer"] == "" for example in examples)
    if wanting and without:
        findings.warn(
            "no-answer-although-a-function-wants-it",
            f"{without} of {len(examples)} rows have no answer, and {', '.join(wanting)} compares with it",
            "the dataset",
            "fill the column 'answer', or name the column: answer_key='…'",
        )


def fingerprint(examples: Iterable[Example]) -> list[str]:
    """Digests of rows as they are now."""
    return [hashlib.sha256(canonical_json(example.row)).hexdigest() for example in examples]
