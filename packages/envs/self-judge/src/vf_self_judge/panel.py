"""A panel of judges: the evaluated model in several roles.

``PanelRubric`` is a ``JudgeRubric`` whose judges are named after their roles. Each judge's client
prepends its role to the question and sends it to the endpoint and model of the scored rollout,
which are passed in a context variable, so that rollouts can be scored concurrently.

Models overrate their own answers: this environment demonstrates judge rewards and is not a
benchmark.
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
    "accuracy": (
        "You are a strict examiner. Score only whether what the response says is true and agrees"
        " with the reference answer. A wrong statement costs most of the score, however well it is"
        " put."
    ),
    "completeness": (
        "You are a strict examiner. Score only whether the response answers the whole question and"
        " says what the reference answer says."
    ),
    "clarity": (
        "You are a strict editor. Score only whether the response is short, to the point and easy"
        " to follow. Repetition and text that does not answer the question cost most of the score."
    ),
}
"""Name of a judge -> its system message."""

_scored: ContextVar[tuple[Any, str]] = ContextVar("self_judge_scored")
"""Client and model of the scored rollout."""


@dataclass(frozen=True, slots=True)
class RoleClient:
    """A client that sends questions to the evaluated model in a role."""

    role: str

    async def complete(self, request: ModelRequest) -> Response:
        """The evaluated model's answer to the judge's question; its failures pass through."""
        client, model = _scored.get()
        role_request = replace(
            request, prompt=[SystemMessage(self.role), *request.prompt], model=model
        )
        return await as_client(client).complete(role_request)


class PanelRubric(vf.JudgeRubric):
    """Judges in the roles of ``ROLES``, each the model of the rollout they score; ``aggregation``
    combines them."""

    def __init__(self, **parameters: Any):
        clients = {name: RoleClient(role) for name, role in ROLES.items()}
        super().__init__(judge_client=clients, judge_models=list(ROLES), **parameters)

    async def judge_score(
        self, prompt: vf.Messages, completion: vf.Messages, answer: object, state: Any
    ) -> float:
        """As ``JudgeRubric``. *Raises* ScoringError when the state has no client."""
        client = state.get("client")
        if client is None:
            raise ScoringError(
                "self-judge needs the model of the rollout to judge it; name others in judge_models"
            )
        token = _scored.set((client, state["model"]))
        try:
            return await super().judge_score(prompt, completion, answer, state)
        finally:
            _scored.reset(token)
