"""Which backend: by name, or the first of ``AUTO`` whose probe passes.

A probe really runs code, on a service too. When none passes, the answer is a refusal with what each probe said; there
is no silent fall-back to something weaker.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from verifiers.errors import ConfigError, SandboxUnavailable
from verifiers.runtime.suggest import closest
from verifiers.sandbox.protocol import SandboxBackend

BACKENDS: dict[str, str | Callable[[], SandboxBackend]] = {
    "bubblewrap": "verifiers.sandbox.backends.bubblewrap:Bubblewrap",
    "sandlock": "verifiers.sandbox.backends.sandlock:Sandlock",
    "nsjail": "verifiers.sandbox.backends.nsjail:Nsjail",
    "docker": "verifiers.sandbox.backends.engines:Docker",
    "podman": "verifiers.sandbox.backends.engines:Podman",
    "gvisor": "verifiers.sandbox.backends.gvisor:GVisor",
    "e2b": "verifiers.sandbox.backends.services:E2B",
    "modal": "verifiers.sandbox.backends.services:Modal",
    "daytona": "verifiers.sandbox.backends.services:Daytona",
    "prime-sandboxes": "verifiers.sandbox.backends.services:PrimeSandboxes",
    "prime": "verifiers.sandbox.backends.services:PrimeSandboxes",
    "unsafe_subprocess": "verifiers.sandbox.backends.unsafe_subprocess:UnsafeSubprocess",
}
"""Name -> factory, or where it is."""
AUTO: dict[str, str] = {
    "bubblewrap": "install Debian's, Fedora's or Arch's package bubblewrap",
    "sandlock": "pip install 'verifiers[sandbox]'",
}
"""What ``auto`` tries, best first, and how each is installed."""


def register(name: str, factory: Callable[[], SandboxBackend]) -> None:
    """Add a backend of your own under a name; ``sandbox="that name"`` then finds it."""
    if name in BACKENDS or name == "auto":
        raise ConfigError(f"There is a sandbox backend {name!r} already; register yours under another name")
    BACKENDS[name] = factory


async def backend_for(sandbox: str | SandboxBackend = "auto") -> SandboxBackend:
    """The backend of this name; a backend itself passes through.

    *Raises* SandboxUnavailable with what the probes said, ConfigError for an unknown name.
    """
    if not isinstance(sandbox, str):
        return sandbox
    if sandbox != "auto":
        backend = _create(sandbox)
        if not (said := await backend.available()):
            raise SandboxUnavailable(f"The sandbox {sandbox!r} does not work here: {said.reason}", names=[sandbox])
        return backend
    refusals = []
    for name, how in AUTO.items():
        backend = _create(name)
        if said := await backend.available():
            return backend
        refusals.append(f"{name}: {said.reason} ({how})")
    raise SandboxUnavailable(
        "No sandbox works here, and code that a model wrote is not run without one. "
        + "; ".join(refusals)
        + ". For code you trust there is sandbox='unsafe_subprocess', which isolates nothing",
        names=list(AUTO),
    )


def _create(name: str) -> SandboxBackend:
    if name not in BACKENDS:
        raise ConfigError(f"No sandbox backend is called {name!r}; there are {_known()}{closest(name, BACKENDS)}")
    factory = BACKENDS[name]
    if isinstance(factory, str):
        module, _, cls = factory.partition(":")
        factory = getattr(importlib.import_module(module), cls)
    assert not isinstance(factory, str)
    return factory()


def _known() -> str:
    return ", ".join(["auto", *sorted(BACKENDS)])
