"""Resource limits that a process sets irrevocably on itself before it runs model-written code."""

from __future__ import annotations

import resource
from typing import Any

MIB = 2**20


def lower(name: int, value: int) -> None:
    """Set the soft and the hard limit, never above the current hard limit."""
    hard = resource.getrlimit(name)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(name, (value, value))


def apply(settings: dict[str, Any], current_bytes: int) -> None:
    """Limit address space (``memory_mb`` above ``current_bytes``), file size in MB and CPU time in
    seconds."""
    if settings.get("limit_address_space", True):
        lower(resource.RLIMIT_AS, settings["memory_mb"] * MIB + current_bytes)
    lower(resource.RLIMIT_FSIZE, settings["file_mb"] * MIB)
    lower(resource.RLIMIT_CORE, 0)
    cpu_s = max(1, round(settings["cpu_s"]))
    # SIGXCPU names the cause, a second later SIGKILL
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def address_space_bytes() -> int:
    """Current address space of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
