"""The results of a run: statistics, saving, loading, and conversion to training data."""

from verifiers.results.loading import load_results
from verifiers.results.outputs import GenerateOutputs, make_dataset
from verifiers.results.processing import (
    ProcessedOutputs,
    export_trajectories,
    process_env_results,
    process_env_results_vllm,
)
from verifiers.results.rows import fill_advantages
from verifiers.results.run_metadata import GenerateMetadata
from verifiers.results.sample import print_prompt_completions_sample

__all__ = [
    "GenerateMetadata",
    "GenerateOutputs",
    "ProcessedOutputs",
    "export_trajectories",
    "fill_advantages",
    "load_results",
    "make_dataset",
    "print_prompt_completions_sample",
    "process_env_results",
    "process_env_results_vllm",
]
