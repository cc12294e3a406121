"""The public names for type checkers and editors. At run time ``__init__.py`` imports each on first use."""

from verifiers_trainer.grpo import GRPOConfig, GRPOTrainer, grpo_defaults, lora_defaults
from verifiers_trainer.policy.loading import get_model, get_model_and_tokenizer, get_tokenizer
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.trainer import RLTrainer

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "RLConfig",
    "RLTrainer",
    "get_model",
    "get_model_and_tokenizer",
    "get_tokenizer",
    "grpo_defaults",
    "lora_defaults",
]

__version__: str
