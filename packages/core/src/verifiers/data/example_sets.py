"""``load_example_dataset``: public datasets by a short name, and a generated set that needs no
network.

A dataset is fetched through ``datasets`` from the repository of its authors, and its columns become
``question`` and ``answer``. A failed fetch raises an error; no other data are substituted.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from verifiers.data.text import extract_boxed_answer, extract_hash_answer, strip_non_numeric
from verifiers.errors import ConfigError, DatasetError
from verifiers.runtime.suggest import closest

if TYPE_CHECKING:
    from datasets import Dataset

ARITHMETIC_SPLITS = {"test": 200, "train": 2000}
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HubSet:
    """The repository of a dataset, and the mapping of its columns."""

    repository: str
    split: str
    """Default split."""
    question: Callable[[Row], str]
    answer: Callable[[Row], str]
    configs: tuple[str | None, ...] = (None,)
    """Joined in this order."""
    keep: Callable[[Row], bool] = lambda row: True
    """Predicate of the rows to include."""


def load_example_dataset(
    name: str = "gsm8k", split: str | None = None, n: int | None = None, seed: int = 0
) -> Dataset:
    """Load a ``datasets.Dataset`` with the columns ``question``, ``answer`` and ``task``
    (``name``).

    ``"arithmetic"`` is generated and works offline; the other names are fetched. ``n`` rows (all,
    if there are fewer) are taken after a shuffle by ``seed``, in the order of ``datasets``; without
    ``n`` the published order is kept.

    Raises: ``ConfigError`` for an unknown name or split; ``DatasetError`` when the dataset cannot
    be fetched or its columns have changed.

    >>> rows = vf.load_example_dataset("arithmetic", split="test")
    >>> rows[0]["question"], rows[0]["answer"]
    ('What is 649 - 16 - 35?', '598')
    """
    if name == "arithmetic":
        rows = arithmetic_rows(split or "train")
    elif name in HUB_SETS:
        rows = _fetched(name, HUB_SETS[name], split)
    else:
        names = ("arithmetic", *HUB_SETS)
        hint = closest(name, names) or ";"
        raise ConfigError(
            f"there is no example dataset {name!r}{hint} the names are: {', '.join(names)}"
        )
    if n is not None:
        rows = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))[: max(n, 0)]]
    import datasets

    text = datasets.Value("string")
    columns = {column: [row[column] for row in rows] for column in ("question", "answer", "task")}
    return datasets.Dataset.from_dict(
        columns, features=datasets.Features(dict.fromkeys(columns, text))
    )


def get_preprocess_fn(name: str) -> Callable[[Row], dict[str, str]]:
    """Return the function that makes ``question`` and ``answer`` of a published row of an example
    dataset.

    *Raises* ConfigError for an unknown name.

    >>> get_preprocess_fn("gsm8k")({"question": "6 * 7?", "answer": "6 * 7 = 42\\n#### 42"})
    {'question': '6 * 7?', 'answer': '42'}
    """
    if name not in HUB_SETS:
        raise ConfigError(
            f"there is no example dataset {name!r}; the names are: {', '.join(HUB_SETS)}"
        )
    hub = HUB_SETS[name]
    return lambda row: {"question": hub.question(row), "answer": hub.answer(row)}


def arithmetic_rows(split: str = "train") -> list[dict[str, str]]:
    """Generate the rows of a split: sums, differences and products. Deterministic; the splits are
    disjoint.

    >>> arithmetic_rows("test")[0]
    {'question': 'What is 649 - 16 - 35?', 'answer': '598', 'task': 'arithmetic'}
    """
    if split not in ARITHMETIC_SPLITS:
        raise ConfigError(
            f"'arithmetic' has the splits {', '.join(ARITHMETIC_SPLITS)}; it has no split {split!r}"
        )
    generator = random.Random("arithmetic")
    rows: dict[str, str] = {}
    while len(rows) < sum(ARITHMETIC_SPLITS.values()):
        question, answer = _problem(generator)
        rows[question] = answer
    pairs, num_test = list(rows.items()), ARITHMETIC_SPLITS["test"]
    selected = pairs[:num_test] if split == "test" else pairs[num_test:]
    return [{"question": q, "answer": answer, "task": "arithmetic"} for q, answer in selected]


def _problem(generator: random.Random) -> tuple[str, str]:
    sign = generator.choice("+-*")
    bounds = (99, 12, 9) if sign == "*" else (999, 999, 99)
    numbers = [generator.randint(2, bound) for bound in bounds[: generator.choice((2, 2, 3))]]
    value = functools.reduce(OPERATIONS[sign], numbers)
    return f"What is {f' {sign} '.join(map(str, numbers))}?", str(value)


def _fetched(name: str, hub: HubSet, split: str | None) -> list[dict[str, str]]:
    import datasets

    try:
        split = split or hub.split
        parts = [datasets.load_dataset(hub.repository, c, split=split) for c in hub.configs]
    except Exception as error:
        # network, hub, cache, gate, unknown split: chained, and its text shown
        raise DatasetError(
            f"cannot load {name!r} ({hub.repository}, split {split!r}):"
            f" {type(error).__name__}: {error}. Without a network, use"
            " load_example_dataset('arithmetic')"
        ) from error
    try:
        return [
            {"question": hub.question(row), "answer": hub.answer(row), "task": name}
            for row in itertools.chain.from_iterable(parts)
            if hub.keep(row)
        ]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DatasetError(
            f"{name!r} ({hub.repository}) has unexpected rows ({type(error).__name__}: {error});"
            f" its columns are: {', '.join(parts[0].column_names)}"
        ) from error


# --- column mappings ------------------------------------------------------------------------------


def _text(column: str) -> Callable[[Row], str]:
    return lambda row: str(row[column])


def _with_choices(question: str, options: Sequence[str]) -> str:
    """The wording of older versions: evaluated numbers depend on it."""
    listed = (f"\n{chr(65 + i)}: {option}" for i, option in enumerate(options))
    return f"Question: {question}\n" + "".join(listed)


def _open_book_question(row: Row) -> str:
    choices = zip(row["choices"]["label"], row["choices"]["text"], strict=True)
    options = "\n".join(f"{label}. {text}" for label, text in choices)
    return f"Question: {row['question_stem']}\n\nChoices:\n{options}"


def _gpqa_options(row: Row) -> list[str]:
    """Return the four options, shuffled by a seed derived from the question; the source lists the
    correct option first."""
    options = [row["Correct Answer"], *(row[f"Incorrect Answer {n}"] for n in (1, 2, 3))]
    random.Random(row["Question"]).shuffle(options)
    return options


def _gpqa(config: str) -> HubSet:
    return HubSet(
        "Idavidrein/gpqa",
        "train",
        lambda row: _with_choices(row["Question"], _gpqa_options(row)),
        lambda row: chr(65 + _gpqa_options(row).index(row["Correct Answer"])),
        (config,),
    )


def _open_rs(*levels: str) -> HubSet:
    return HubSet(
        "knoveleng/open-rs",
        "train",
        _text("problem"),
        _text("answer"),
        keep=lambda row: not levels or str(row["level"]).lower() in levels,
    )


PYTHON_TASK = "Solve the following coding problem using the programming language python:"
HUB_SETS: dict[str, HubSet] = {
    "aime2024": HubSet(
        "HuggingFaceH4/aime_2024", "train", _text("problem"), lambda row: str(int(row["answer"]))
    ),
    "aime2025": HubSet(
        "opencompass/AIME2025",
        "test",
        _text("question"),
        lambda row: strip_non_numeric(str(row["answer"])),
        ("AIME2025-I", "AIME2025-II"),
    ),
    "amc2023": HubSet("knoveleng/AMC-23", "train", _text("problem"), _text("answer")),
    "gpqa_diamond": _gpqa("gpqa_diamond"),
    "gpqa_main": _gpqa("gpqa_main"),
    "gsm8k": HubSet(
        "openai/gsm8k",
        "test",
        _text("question"),
        lambda row: extract_hash_answer(row["answer"]),
        ("main",),
    ),
    "math": HubSet(
        "chiayewken/competition_math",
        "train",
        _text("problem"),
        lambda row: extract_boxed_answer(row["solution"]),
    ),
    "math500": HubSet("HuggingFaceH4/MATH-500", "test", _text("problem"), _text("answer")),
    "mmlu": HubSet(
        "cais/mmlu",
        "dev",
        lambda row: _with_choices(row["question"], row["choices"]),
        lambda row: chr(65 + int(row["answer"])),
        ("all",),
    ),
    "mmlu_pro": HubSet(
        "TIGER-Lab/MMLU-Pro",
        "validation",
        lambda row: _with_choices(row["question"], row["options"]),
        _text("answer"),
    ),
    "openbookqa": HubSet(
        "allenai/openbookqa", "train", _open_book_question, _text("answerKey"), ("main",)
    ),
    "openrs": _open_rs(),
    "openrs_easy": _open_rs("easy"),
    "openrs_hard": _open_rs("hard"),
    "prime_code": HubSet(
        "PrimeIntellect/verifiable-coding-problems",
        "train",
        _text("prompt"),
        _text("verification_info"),
        keep=lambda row: str(row["prompt"]).startswith(PYTHON_TASK),
    ),
}
