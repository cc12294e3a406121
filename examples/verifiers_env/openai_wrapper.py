"""A rollout engine as an AsyncOpenAI client, re-exported from the adapter."""

from verifiers_trainer.integrations.rllm import RolloutEngineAsyncClient

__all__ = ["RolloutEngineAsyncClient"]
