"""A taskset of verifiers 0.4 with a tool, which its harness calls over MCP."""

from lookup_v1.taskset import Capitals

__all__ = ["Capitals"]
