"""What a rollout is worth: ``Rubric``, ``RubricGroup`` and the scores they give."""

from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.rubric_group import RubricGroup
from verifiers.rubrics.scores import RolloutScore, RolloutScores

__all__ = ["RolloutScore", "RolloutScores", "Rubric", "RubricGroup"]
