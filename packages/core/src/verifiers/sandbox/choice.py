"""Find a sandbox backend: by name, or for ``"auto"`` the first of ``AUTO`` whose probe passes.

Names are looked up in ``BACKENDS`` (the built-in backends and those added with ``register``), then
among the entry points of the group ``verifiers.sandboxes`` of the installed distributions. A probe
runs code in the sandbox (or service). When no probe passes, ``SandboxUnavailable`` gives the reason
for each: there is no silent fallback to weaker isolation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from verifiers.errors import ConfigError, SandboxUnavailable
from verifiers.runtime.distributions import SANDBOXES, provided
from verifiers.runtime.install_lines import install_line
from verifiers.runtime.installed import Broken, entry_points, not_installed, part_or_none
from verifiers.runtime.suggest import closest
from verifiers.sandbox.protocol import SandboxBackend

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint

BACKENDS: dict[str, str | Callable[[], SandboxBackend]] = {
    "bubblewrap": "verifiers.sandbox.backends.bubblewrap:Bubblewrap",
    "sandlock": "verifiers.sandbox.backends.sandlock:Sandlock",
    "unsafe_subprocess": "verifiers.sandbox.backends.unsafe_subprocess:UnsafeSubprocess",
}
"""Name -> factory, or ``module:class`` that is imported on first use."""
AUTO: dict[str, Callable[[], str]] = {
    "bubblewrap": lambda: "install Debian's, Fedora's or Arch's package bubblewrap",
    "sandlock": lambda: install_line("verifiers", "sandbox"),
}
"""The backends that ``auto`` tries, best first -> how to install each."""


def register(name: str, factory: Callable[[], SandboxBackend]) -> None:
    """Register a backend under a name, for ``sandbox="NAME"``.

    *Raises* ConfigError when the name is already in use.
    """
    if name == "auto" or name in backend_names():
        raise ConfigError(f"A sandbox backend named {name!r} already exists; choose another name")
    BACKENDS[name] = factory


async def backend_for(sandbox: str | SandboxBackend = "auto") -> SandboxBackend:
    """Return the backend of this name; a backend object is returned unchanged.

    *Raises* SandboxUnavailable with the reason of each failed probe or with the package to install,
    ConfigError for an unknown name.
    """
    if not isinstance(sandbox, str):
        return sandbox
    if sandbox != "auto":
        backend = _create(sandbox)
        if not (availability := await backend.available()):
            raise SandboxUnavailable(
                f"The sandbox {sandbox!r} is not available: {availability.reason}", names=[sandbox]
            )
        return backend
    refusals = []
    for name, how in AUTO.items():
        backend = _create(name)
        if availability := await backend.available():
            return backend
        refusals.append(f"{name}: {availability.reason} ({how()})")
    raise SandboxUnavailable(
        "No sandbox is available, and model-written code is not run without one. "
        + "; ".join(refusals)
        + ". For trusted code use sandbox='unsafe_subprocess', which isolates nothing",
        names=list(AUTO),
    )


def backend_names() -> list[str]:
    """The names of all backends, sorted: built in, registered, of installed distributions, and of
    those of this project that are not installed."""
    return sorted({*BACKENDS, *provided(SANDBOXES), *_installed()})


def _create(name: str) -> SandboxBackend:
    if name in BACKENDS:
        factory = BACKENDS[name]
        if isinstance(factory, str):
            module, _, cls = factory.partition(":")
            factory = getattr(importlib.import_module(module), cls)
        assert not isinstance(factory, str)
        return factory()
    names = backend_names()
    if name not in names:
        raise ConfigError(
            f"Unknown sandbox backend {name!r}; available: auto,"
            f" {', '.join(names)}{closest(name, names)}"
        )
    factory = part_or_none(name, SANDBOXES)
    if factory is None:
        raise SandboxUnavailable(
            not_installed(name, f"The sandbox {name!r}", SANDBOXES), names=[name]
        )
    backend: SandboxBackend = factory()
    return backend


def _installed() -> dict[str, EntryPoint]:
    """Backends of other distributions. *Raises* ConfigError when two distributions provide the same
    name."""
    points: dict[str, EntryPoint] = {}
    for point, _ in (
        entry_point
        for entry_point in entry_points(SANDBOXES)
        if not isinstance(entry_point, Broken)
    ):
        if (earlier := points.setdefault(point.name, point)).value != point.value:
            raise ConfigError(
                f"Two packages have a sandbox backend {point.name!r}: {earlier.value} and"
                f" {point.value}; uninstall one"
            )
    return points
