"""Agent programs as environments: the gateway between an agent and its model, and ``AgentEnv``."""

from __future__ import annotations

from verifiers_agents.agent import Agent
from verifiers_agents.env import AgentEnv, model_gateway

__all__ = ["Agent", "AgentEnv", "model_gateway"]
