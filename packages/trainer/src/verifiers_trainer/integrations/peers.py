"""The packages that adapters were written against: loaded when used, named when missing, checked once.

Importing this module imports no peer; an adapter does so through ``Peer.load``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from importlib import metadata
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """A package an adapter was written against, for example ``Peer("trl", "trl", ("1.16.0",), "pip install trl")``."""

    package: str
    """What is imported."""
    distribution: str
    versions: tuple[str, ...]
    """Those it was run with; another one is warned of once."""
    install: str

    def load(self, module: str = "") -> Any:
        """The package, or a module in it. *Raises* ImportError that says what to install."""
        if importlib.util.find_spec(self.package) is None:
            raise ImportError(f"{self.package} is not installed: {self.install}", name=self.package)
        self._check_version()
        return importlib.import_module(f"{self.package}.{module}" if module else self.package)

    def _check_version(self) -> None:
        try:
            found = metadata.version(self.distribution)
        except metadata.PackageNotFoundError:  # a checkout on the path
            return
        if self.versions and found not in self.versions and (self.distribution, found) not in _warned:
            _warned.add((self.distribution, found))
            log.warning("%s is %s; this adapter was run with %s", self.package, found, ", ".join(self.versions))


_warned: set[tuple[str, str]] = set()
