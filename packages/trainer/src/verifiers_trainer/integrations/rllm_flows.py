"""rLLM's two ways to run an environment: ``VerifiersWorkflow`` and ``VerifiersAgentFlow``.

``rllm`` makes these names its own; the workflow subclasses the peer's class, so it is made when it is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from verifiers.environments.base import Environment
from verifiers_trainer.integrations import rllm
from verifiers_trainer.integrations.common import generate_group, row_of


@functools.cache
def workflow_class(base: type) -> type:
    """``VerifiersWorkflow`` on the peer's ``Workflow``."""

    class VerifiersWorkflow(base):
        """Plays one task of an environment and returns its episode.

        vf_env: the environment. sampling_args: of every model call, beside what the engine sets itself.
        max_retries: how often a rollout is played again whose failure may pass.
        """

        def __init__(
            self,
            rollout_engine: Any,
            vf_env: Environment,
            sampling_args: Mapping[str, Any] | None = None,
            max_retries: int = 0,
            **given: Any,
        ):
            super().__init__(rollout_engine=rollout_engine, **given)
            self.engine, self.vf_env = rollout_engine, vf_env
            self.sampling_args, self.max_retries = dict(sampling_args or {}), max_retries

        async def run(self, task: dict[str, Any], uid: str, **_: Any) -> Any:
            """The episode of one rollout; a failed one says so in its reason, and is not raised."""
            self.reset(task, uid)
            client = rllm.rollout_engine_client(self.engine, _model_of(self.engine), lambda: uid)
            row = row_of(task, self.vf_env.message_type)
            (rollout,) = await generate_group(
                self.vf_env, [row], client, _model_of(self.engine), self.sampling_args, self.max_retries
            )
            return rllm.to_episode(rollout, self.vf_env, task, uid)

    return VerifiersWorkflow


def _model_of(engine: Any) -> str:
    return str(getattr(engine, "model_name", None) or getattr(engine, "model", None) or "policy")


class VerifiersAgentFlow:
    """An ``AgentFlow``: plays a task through the gateway at ``config.base_url``, which keeps the tokens.

    The episode has a trajectory without steps of its own: the gateway adds those it recorded for ``session_uid``.
    """

    def __init__(self, vf_env: Environment, sampling_args: Mapping[str, Any] | None = None, max_retries: int = 0):
        self.vf_env, self.sampling_args, self.max_retries = vf_env, dict(sampling_args or {}), max_retries

    async def arun(self, task: Any, config: Any) -> Any:
        """The episode of one rollout."""
        import openai

        fields = task if isinstance(task, Mapping) else task.metadata
        row = row_of(fields, self.vf_env.message_type)
        async with openai.AsyncOpenAI(base_url=config.base_url, api_key="none") as client:
            output = await self.vf_env.run_rollout(
                row, client, config.model, sampling_args=self.sampling_args, max_retries=self.max_retries,
                state_columns=["trajectory"],
            )  # fmt: skip
        return rllm.to_episode({**output, "trajectory": []}, self.vf_env, fields, config.session_uid)
