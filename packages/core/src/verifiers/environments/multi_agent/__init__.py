"""Environments of several roles: ``MultiAgentEnv``; on it games of two players, proposed tasks,
simulated users."""

from __future__ import annotations

from verifiers.environments.multi_agent.env import MultiAgentEnv, Role
from verifiers.environments.multi_agent.games import TwoPlayerEnv
from verifiers.environments.multi_agent.proposer import ProposerSolverEnv
from verifiers.environments.multi_agent.simulated_user import SimulatedUserEnv

__all__ = ["MultiAgentEnv", "ProposerSolverEnv", "Role", "SimulatedUserEnv", "TwoPlayerEnv"]
