"""Peer packages of the adapters: imported on first use through ``Peer.load``, with a check of the
version.

Importing this module imports no peer.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from verifiers.runtime.install_lines import requirement

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """The package of a peer, for example ``Peer("trl", "trl", ("1.16.0",), lambda: "pip install
    trl")``."""

    package: str
    """Name of the imported package."""
    distribution: str
    versions: tuple[str, ...]
    """Tested versions; others log one warning. Empty: any."""
    install: Callable[[], str]
    """Returns the command that installs it."""

    def load(self, module: str = "") -> Any:
        """Import the package, or a module in it. *Raises* ImportError with the install command."""
        if importlib.util.find_spec(self.package) is None:
            raise ImportError(
                f"{self.package} is not installed: {self.install()}", name=self.package
            )
        self._check_version()
        return importlib.import_module(f"{self.package}.{module}" if module else self.package)

    def _check_version(self) -> None:
        try:
            version = metadata.version(self.distribution)
        except metadata.PackageNotFoundError:  # a checkout on the path
            return
        if (
            self.versions
            and version not in self.versions
            and (self.distribution, version) not in _warned
        ):
            _warned.add((self.distribution, version))
            log.warning(
                "%s is %s; this adapter was tested with %s",
                self.package,
                version,
                ", ".join(self.versions),
            )


_warned: set[tuple[str, str]] = set()


def beside_trainer(requirements: str) -> str:
    """Commands for a Python of its own, for peers that need other versions of libraries than the
    trainer does."""
    library = requirement("verifiers")
    adapters = " ".join(
        requirement(name) for name in ("verifiers-trainer", "verifiers-integrations")
    )
    return f"pip install {requirements} {library}; pip install --no-deps {adapters}"
