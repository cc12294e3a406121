"""A panel of judges that are one model in several roles: the model that is being evaluated, or a named one.

``PanelRubric`` is a ``JudgeRubric`` whose judges are called after their roles. Each judge's client puts its role before
the judge's question and sends it on: to the endpoint and model of the rollout that is scored. Which rollout that is
travels in a context variable, so that many rollouts are scored side by side.

A model that judges itself is kinder than another one would be: this is a task to try judge rewards on, no measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import verifiers as vf
from verifiers.clients import as_client
from verifiers.errors import ScoringError
from verifiers.types import ModelRequest, Response, SystemMessage

ROLES: Mapping[str, str] = {
    "accuracy": "You are a strict examiner. Score only whether what the response says is true and agrees with the "
    "reference answer. A wrong statement costs most of the score, however well it is put.",
    "completeness": "You are a strict examiner. Score only whether the response answers the whole question and says "
    "what the reference answer says.",
    "clarity": "You are a strict editor. Score only whether the response is short, to the point and easy to follow. "
    "Repetition and text that does not answer the question cost most of the score.",
}
"""What each judge is told, by its name."""

_scored: ContextVar[tuple[Any, str]] = ContextVar("self_judge_scored")
"""Client and model of the rollout that is being scored."""


@dataclass(frozen=True, slots=True)
class RoleClient:
    """A client that asks the evaluated model in a role."""

    role: str

    async def complete(self, request: ModelRequest) -> Response:
        """The evaluated model's answer to the judge's question; its failures pass through."""
        client, model = _scored.get()
        asked = replace(request, prompt=[SystemMessage(self.role), *request.prompt], model=model)
        return await as_client(client).complete(asked)


class PanelRubric(vf.JudgeRubric):
    """Judges in the roles of ``ROLES``, each the model of the rollout they score; ``aggregation`` combines them."""

    def __init__(self, **parameters: Any):
        clients = {name: RoleClient(role) for name, role in ROLES.items()}
        super().__init__(judge_client=clients, judge_models=list(ROLES), **parameters)

    async def judge_score(self, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
        """As ``JudgeRubric``. *Raises* ScoringError when the state knows of no client to ask."""
        client = state.get("client")
        if client is None:
            raise ScoringError("self-judge needs the model of the rollout to judge it; name others in judge_models")
        token = _scored.set((client, state["model"]))
        try:
            return await super().judge_score(prompt, completion, answer, state)
        finally:
            _scored.reset(token)
