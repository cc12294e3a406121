"""Environments of several roles: ``MultiAgentEnv``, and games of two players on top of it."""

from __future__ import annotations

from verifiers.environments.multi_agent.env import MultiAgentEnv, Role
from verifiers.environments.multi_agent.games import TwoPlayerEnv

__all__ = ["MultiAgentEnv", "Role", "TwoPlayerEnv"]
