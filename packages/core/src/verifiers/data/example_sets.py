"""``load_example_dataset``: public datasets by a short name, and a generated set that needs no
network.

A dataset is fetched through ``datasets`` from the repository of its authors, and its columns become
``question`` and ``answer``. A failed fetch raises an error; no other data are substituted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verifiers.data.text import extract_boxed_answer, extract_hash_answer, strip_non_numeric
from verifiers.errors import ConfigError, DatasetError
from verifiers.runtime.suggest import closest

ARITHMETIC_SPLITS = {"test": 200, "train": 2000}
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HubSet:
    """The repository of a dataset, and the mapping of its columns."""

    repository: str
    configs: tuple[str | None, ...]
    """Joined in this order."""
    split: str
    """Default split."""
    question: Callable[[Row], str]
    answer: Callable[[Row], str]
    keep: Callable[[Row], bool] | None = None
    """Predicate of the rows to include; None for all."""


def load_example_dataset(
    name: str = "gsm8k", split: str | None = None, n: int | None = None, seed: int = 0
) -> Any:
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
    num_test = ARITHMETIC_SPLITS["test"]
    selected = list(rows.items())[:num_test] if split == "test" else list(rows.items())[num_test:]
    return [
        {"question": question, "answer": answer, "task": "arithmetic"}
        for question, answer in selected
    ]


def _problem(generator: random.Random) -> tuple[str, str]:
    operator = generator.choice("+-*")
    bounds = (99, 12, 9) if operator == "*" else (999, 999, 99)
    numbers = [generator.randint(2, bound) for bound in bounds[: generator.choice((2, 2, 3))]]
    value = numbers[0]
    for number in numbers[1:]:
        value = (
            value + number
            if operator == "+"
            else value - number
            if operator == "-"
            else value * number
        )
    return f"What is {f' {operator} '.join(map(str, numbers))}?", str(value)


def _fetched(name: str, hub: HubSet, split: str | None) -> list[dict[str, str]]:
    import datasets

    try:
        parts = [
            datasets.load_dataset(hub.repository, config, split=split or hub.split)
            for config in hub.configs
        ]
    except Exception as error:
        # network, hub, cache, gate, unknown split: chained, and its text shown
        raise DatasetError(
            f"cannot load {name!r} ({hub.repository}, split {split or hub.split!r}):"
            f" {type(error).__name__}: {error}. Without a network, use"
            " load_example_dataset('arithmetic')"
        ) from error
    try:
        return [
            {"question": hub.question(row), "answer": hub.answer(row), "task": name}
            for row in (row for part in parts for row in part)
            if hub.keep is None or hub.keep(row)
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
    return f"Question: {question}\n" + "".join(
        f"\n{chr(65 + i)}: {option}" for i, option in enumerate(options)
    )


def _gpqa_options(row: Row) -> list[str]:
    """Return the four options, shuffled by a seed derived from the question; the source lists the
    correct option first."""
    options = [
        row[key]
        for key in (
            "Correct Answer",
            "Incorrect Answer 1",
            "Incorrect Answer 2",
            "Incorrect Answer 3",
        )
    ]
    random.Random(row["Question"]).shuffle(options)
    return options


def _gpqa(config: str) -> HubSet:
    return HubSet(
        "Idavidrein/gpqa",
        (config,),
        "train",
        lambda row: _with_choices(row["Question"], _gpqa_options(row)),
        lambda row: chr(65 + _gpqa_options(row).index(row["Correct Answer"])),
    )


def _open_rs(level: str | None) -> HubSet:
    keep = None if level is None else (lambda row: str(row["level"]).lower() == level)
    return HubSet("knoveleng/open-rs", (None,), "train", _text("problem"), _text("answer"), keep)


PYTHON_TASK = "Solve the following coding problem using the programming language python:"
HUB_SETS: dict[str, HubSet] = {
    "aime2024": HubSet(
        "HuggingFaceH4/aime_2024",
        (None,),
        "train",
        _text("problem"),
        lambda row: str(int(row["answer"])),
    ),
    "aime2025": HubSet(
        "opencompass/AIME2025",
        ("AIME2025-I", "AIME2025-II"),
        "test",
        _text("question"),
        lambda row: strip_non_numeric(str(row["answer"])),
    ),
    "amc2023": HubSet("knoveleng/AMC-23", (None,), "train", _text("problem"), _text("answer")),
    "gpqa_diamond": _gpqa("gpqa_diamond"),
    "gpqa_main": _gpqa("gpqa_main"),
    "gsm8k": HubSet(
        "openai/gsm8k",
        ("main",),
        "test",
        _text("question"),
        lambda row: extract_hash_answer(row["answer"]),
    ),
    "math": HubSet(
        "chiayewken/competition_math",
        (None,),
        "train",
        _text("problem"),
        lambda row: extract_boxed_answer(row["solution"]),
    ),
    "math500": HubSet("HuggingFaceH4/MATH-500", (None,), "test", _text("problem"), _text("answer")),
    "mmlu": HubSet(
        "cais/mmlu",
        ("all",),
        "dev",
        lambda row: _with_choices(row["question"], row["choices"]),
        lambda row: chr(65 + int(row["answer"])),
    ),
    "mmlu_pro": HubSet(
        "TIGER-Lab/MMLU-Pro",
        (None,),
        "validation",
        lambda row: _with_choices(row["question"], row["options"]),
        _text("answer"),
    ),
    "openbookqa": HubSet(
        "allenai/openbookqa",
        ("main",),
        "train",
        lambda row: (
            f"Question: {row['question_stem']}\n\nChoices:\n"
            + "\n".join(
                f"{label}. {text}"
                for label, text in zip(row["choices"]["label"], row["choices"]["text"], strict=True)
            )
        ),
        _text("answerKey"),
    ),
    "openrs": _open_rs(None),
    "openrs_easy": _open_rs("easy"),
    "openrs_hard": _open_rs("hard"),
    "prime_code": HubSet(
        "PrimeIntellect/verifiable-coding-problems",
        (None,),
        "train",
        _text("prompt"),
        _text("verification_info"),
        lambda row: str(row["prompt"]).startswith(PYTHON_TASK),
    ),
}
