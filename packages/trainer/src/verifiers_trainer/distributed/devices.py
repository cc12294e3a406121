"""What accelerators can do, from the vendors' data sheets."""

from __future__ import annotations

import re
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
    "GH200": DataSheet(989e12, 4.0e12, 96e9),
    "H100": DataSheet(989e12, 3.35e12, 80e9),
    "A100": DataSheet(312e12, 2.039e12, 80e9),
    "L40S": DataSheet(362e12, 0.864e12, 48e9),
    "L40": DataSheet(181e12, 0.864e12, 48e9),
    "A40": DataSheet(149.7e12, 0.696e12, 48e9),
    "A6000": DataSheet(154.8e12, 0.768e12, 48e9),
    "L4": DataSheet(121e12, 0.3e12, 24e9),
    "A10": DataSheet(125e12, 0.6e12, 24e9),
    "A10G": DataSheet(70e12, 0.6e12, 24e9),
    "T4": DataSheet(65e12, 0.32e12, 16e9),
    "V100": DataSheet(125e12, 0.9e12, 32e9),
    "RTX 5090": DataSheet(209.5e12, 1.792e12, 32e9),
    "RTX 5080": DataSheet(112.6e12, 0.96e12, 16e9),
    "RTX 4090": DataSheet(165.2e12, 1.008e12, 24e9),
    "RTX 4080": DataSheet(97.5e12, 0.717e12, 16e9),
    "RTX 3090 Ti": DataSheet(80e12, 1.008e12, 24e9),
    "RTX 3090": DataSheet(71e12, 0.936e12, 24e9),
    "RTX 3080": DataSheet(59.5e12, 0.76e12, 10e9),
}
"""By the words of the device's name. H100 and A100 with SXM sockets, of 80 GB; GeForce cards with
sums in float32; T4 and V100 with float16, since they have no bfloat16."""


def sheet_of(device: str) -> DataSheet | None:
    """The data sheet of a device as its driver or a person names it: ``NVIDIA A100-SXM4-80GB``,
    ``rtx3090``.

    >>> sheet_of("NVIDIA GeForce RTX 3090 Ti").flops, sheet_of("abacus")
    (80000000000000.0, None)
    """
    words = _words(device)
    if "LAPTOP" in words:
        return None  # another chip under the name of the card
    names = [name for name in DATA_SHEETS if _words(name) <= words]
    return DATA_SHEETS[max(names, key=lambda name: len(_words(name)))] if names else None


def _words(name: str) -> set[str]:
    return set(re.findall(r"TI\b|LAPTOP|[A-Z]{0,20}\d{1,9}[GS]?", name.upper().replace("RTX", " ")))
