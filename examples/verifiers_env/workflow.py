"""The workflow of this example, re-exported from the adapter."""

from verifiers_integrations.rllm import VerifiersWorkflow

__all__ = ["VerifiersWorkflow"]
