"""What runs inside a sandbox. Standard library only; nothing of verifiers is there to import."""
