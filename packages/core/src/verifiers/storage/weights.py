"""Which files of a model folder are its weights, and their hashes."""

from __future__ import annotations

import functools
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verifiers.runtime.bounded import open_file

_WEIGHTS = re.compile(r".*\.(safetensors|gguf|bin|pt|pth)")
_STATE = re.compile(
    r"(optimizer|scheduler|scaler|rng|rng_state|reference|batch|training_args)([_.-].*)?"
)
"""Files of a trainer beside the weights: they decide nothing that is sampled."""
_BLOB = re.compile(r"[0-9a-f]{64}")
MAX_THREADS = 8


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a model folder, by name; none of a trainer's state."""
    return sorted(
        file
        for file in folder.iterdir()
        if _WEIGHTS.fullmatch(file.name) and not _STATE.fullmatch(file.name) and file.is_file()
    )


def weight_hashes(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 in hex of each file of weights; about a second per 2 GB and thread."""
    files = weight_files(folder)
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        return dict(zip([file.name for file in files], pool.map(file_sha256, files), strict=True))


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hex, computed once per version of the file; what the cache of the
    Hugging Face hub names by its hash is not read."""
    target = path.resolve()
    if target.parent.name == "blobs" and _BLOB.fullmatch(target.name):
        return target.name
    stat = target.stat()
    return _sha256(target, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=256)
def _sha256(path: Path, mtime_ns: int, size_bytes: int) -> str:
    with open_file(path) as file:  # in pieces: a file of weights may be larger than the memory
        return hashlib.file_digest(file, "sha256").hexdigest()
