"""Adapters that take ``verifiers`` environments to other trainers: one module per peer.

Importing a module here never imports its peer, nor torch. A peer is imported when a class or function is used; one
that is missing is an ``ImportError`` that says what to install, and one of another version than the module was
written against is warned of once. ``common`` is what they share; ``token_client`` speaks to token-in/token-out
engines.
"""
