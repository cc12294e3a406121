"""A rollout engine as an AsyncOpenAI client, re-exported from the adapter."""

from verifiers_integrations.rllm import RolloutEngineAsyncClient

__all__ = ["RolloutEngineAsyncClient"]
