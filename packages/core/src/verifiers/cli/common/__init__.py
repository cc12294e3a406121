"""Shared parts of commands: arguments, output, interrupts, shell completion, writing files."""
