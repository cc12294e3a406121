"""Tasksets of verifiers 0.4 as environments: ``TasksetEnv``."""

from __future__ import annotations

from verifiers_agents.tasksets.env import TasksetEnv, load_environment

__all__ = ["TasksetEnv", "load_environment"]
