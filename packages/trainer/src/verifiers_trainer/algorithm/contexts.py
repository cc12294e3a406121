"""What a teacher knows and the policy does not: the contexts that ``teacher_context`` names.

A context is a function of ``row`` (the columns of the example), ``group`` (the finished siblings,
rewards included) and ``rollout`` (the one that is scored), of which it takes those that its
parameters name. It returns messages, which stand before the prompt and after its system messages;
a text, which ends the prompt's last message; or nothing, and the teacher reads what the policy
read. ``pipeline.teacher_context`` makes tokens of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from verifiers.data.messages import last_text
from verifiers.rollouts.rollout import Rollout
from verifiers_trainer.algorithm.group import Group
from verifiers_trainer.algorithm.registry import Registry

CONTEXTS = Registry("teacher_context")


@CONTEXTS.register("answer")
def answer(row: Mapping[str, object]) -> str:
    """The row's ``answer``, as a text that ends the prompt; nothing without one."""
    text = str(row.get("answer") or "")
    return f"The right answer is: {text}" if text else ""


@CONTEXTS.register("sibling")
def sibling(group: Group, rollout: Rollout) -> str:
    """The reply of another rollout of the group, the one with the highest reward if that is above
    this one's, as a text that ends the prompt; nothing without one.

    Source: SDPO, arXiv 2601.20802, section 3.
    """
    scored = [each for each in group.rollouts if not math.isnan(each.reward)]
    best = max(scored, key=lambda sibling: sibling.reward, default=rollout)
    if best is rollout or best.reward <= rollout.reward:
        return ""
    reply = last_text(best.completion, "assistant") or ""
    return f"A good reply to this is: {reply}" if reply else ""
