"""Shared parts of all commands: argument handling, output streams, interrupts, shell completion,
writing files."""
