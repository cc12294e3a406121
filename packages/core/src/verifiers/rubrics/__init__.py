"""Rubrics: reward functions with weights, and the resulting scores of rollouts.

Each class is imported on first use: the worker processes that compare mathematics need none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verifiers.rubrics.hybrid_math_rubric import HybridMathRubric
    from verifiers.rubrics.judge_rubric import JudgeRubric
    from verifiers.rubrics.math_rubric import MathRubric
    from verifiers.rubrics.outcomes import RolloutScore, RolloutScores
    from verifiers.rubrics.rubric import Rubric
    from verifiers.rubrics.rubric_group import RubricGroup
    from verifiers.rubrics.tool_rubric import ToolRubric
    from verifiers.rubrics.values import NOT_APPLICABLE

__all__ = [
    "NOT_APPLICABLE",
    "HybridMathRubric",
    "JudgeRubric",
    "MathRubric",
    "RolloutScore",
    "RolloutScores",
    "Rubric",
    "RubricGroup",
    "ToolRubric",
]

_LAZY = {
    "HybridMathRubric": "hybrid_math_rubric",
    "JudgeRubric": "judge_rubric",
    "MathRubric": "math_rubric",
    "NOT_APPLICABLE": "values",
    "RolloutScore": "outcomes",
    "RolloutScores": "outcomes",
    "Rubric": "rubric",
    "RubricGroup": "rubric_group",
    "ToolRubric": "tool_rubric",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'verifiers.rubrics' has no attribute {name!r}")
    return getattr(importlib.import_module(f"verifiers.rubrics.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
