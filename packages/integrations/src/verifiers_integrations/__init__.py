"""Adapters between ``verifiers`` and its peers, other trainers, Inspect and OpenEnv: one module per
peer.

Importing a module imports neither its peer nor torch. A peer is imported on first use of a class or
function; a missing peer raises an ``ImportError`` with the install command, and an untested version
logs one warning. ``common`` has the shared code; ``token_client`` is a client of token-in/token-out
engines.
"""
