"""Environments of several roles: ``MultiAgentEnv``, and on top of it games of two players, and proposed tasks."""

from __future__ import annotations

from verifiers.environments.multi_agent.env import MultiAgentEnv, Role
from verifiers.environments.multi_agent.games import TwoPlayerEnv
from verifiers.environments.multi_agent.proposer import ProposerSolverEnv

__all__ = ["MultiAgentEnv", "ProposerSolverEnv", "Role", "TwoPlayerEnv"]
