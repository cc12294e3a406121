"""A rollout engine as an AsyncOpenAI client: the adapter's own."""

from verifiers_trainer.integrations.rllm import RolloutEngineAsyncClient

__all__ = ["RolloutEngineAsyncClient"]
