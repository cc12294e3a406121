"""What accelerators can do, from the vendors' data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataSheet:
    """An accelerator."""

    flops: float
    """Operations per second on bfloat16 matrices, dense."""
    bytes_per_s: float
    """Bandwidth of its memory."""
    memory: float
    """Bytes."""


DATA_SHEETS: Mapping[str, DataSheet] = {
    "B200": DataSheet(2250e12, 8.0e12, 180e9),
    "H200": DataSheet(989e12, 4.8e12, 141e9),
    "H100": DataSheet(989e12, 3.35e12, 80e9),
    "L40S": DataSheet(362e12, 0.864e12, 48e9),
    "A100": DataSheet(312e12, 2.039e12, 80e9),
}
"""By a part of the device's name; H100 and A100 with SXM sockets, of 80 GB."""
