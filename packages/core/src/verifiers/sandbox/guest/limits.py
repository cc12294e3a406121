"""Limits that a process sets on itself before it runs a model's code; it cannot raise them again."""

from __future__ import annotations

import resource
from typing import Any

MIB = 2**20


def bound(name: int, value: int) -> None:
    """Soft and hard, never above what there is already."""
    hard = resource.getrlimit(name)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(name, (value, value))


def hold(settings: dict[str, Any], present_bytes: int) -> None:
    """Address space (above what is there at present), file size, CPU time."""
    bound(resource.RLIMIT_AS, settings["memory_mb"] * MIB + present_bytes)
    bound(resource.RLIMIT_FSIZE, settings["file_mb"] * MIB)
    bound(resource.RLIMIT_CORE, 0)
    cpu_s = max(1, round(settings["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
