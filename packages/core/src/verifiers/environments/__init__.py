"""The environments an author builds on."""

from verifiers.environments.base import Environment
from verifiers.environments.multi_turn import MultiTurnEnv
from verifiers.environments.single_turn import SingleTurnEnv

__all__ = ["Environment", "MultiTurnEnv", "SingleTurnEnv"]
