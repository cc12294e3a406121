"""``vf-install`` and ``vf-setup``: find, install and list environments; write starter files."""

from __future__ import annotations

import importlib


def __getattr__(name: str) -> object:
    """A name of ``command``: until 0.2.0 that module had the path of this package."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("verifiers.cli.install.command"), name)
