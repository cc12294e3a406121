"""The workflow of this example: the adapter's own."""

from verifiers_trainer.integrations.rllm import VerifiersWorkflow

__all__ = ["VerifiersWorkflow"]
