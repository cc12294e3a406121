"""Hand-written problems of this package: one TOML file per topic, one table per problem.

Every second problem of a topic, by position in the file, is held out for evaluation.
"""

from __future__ import annotations

import functools
import importlib.resources
import tomllib
from typing import Any

TOPICS = (
    "algebra",
    "number_theory",
    "combinatorics",
    "geometry",
    "calculus",
    "sequences",
    "probability",
)


@functools.cache
def problems(topic: str) -> dict[str, dict[str, str]]:
    """``question`` and ``answer`` (LaTeX) of each problem of a topic, by name."""
    file = importlib.resources.files("vf_math_python") / "problems" / f"{topic}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def written_rows(held_out: bool) -> list[dict[str, object]]:
    """The training or the held-out rows, cycling through the topics."""
    halves = [list(problems(topic).items())[0 if held_out else 1 :: 2] for topic in TOPICS]
    return [
        _row(topic, *halves[index][turn])
        for turn in range(max(map(len, halves)))
        for index, topic in enumerate(TOPICS)
        if turn < len(halves[index])
    ]


def _row(topic: str, name: str, problem: dict[str, str]) -> dict[str, Any]:
    info = {"topic": topic, "name": name, "written": True, "numbers": []}
    return {"question": problem["question"], "answer": problem["answer"], "info": info}
