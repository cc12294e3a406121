"""The ways to isolate a sandbox, one module each."""
