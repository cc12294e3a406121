"""The features of vLLM server versions.

The table lists the first release with each feature; a release that is not listed has those of the
newest before it.
"""

from __future__ import annotations

import re

from packaging.version import InvalidVersion, Version

PAUSE = "pause"
"""``POST /pause`` and ``/resume``."""
PAUSE_KEEP = "pause_keep"
"""``/pause?mode=keep``: requests in flight wait and continue."""
WEIGHT_TRANSFER = "weight_transfer"
"""``/init_weight_transfer_engine`` and ``/update_weights``."""
IPC = "ipc"
"""The weight-transfer backend that shares CUDA memory of one device."""
UPDATE_BRACKETS = "update_brackets"
"""``/start_weight_update`` and ``/finish_weight_update`` around ``/update_weights``."""
WEIGHT_LABEL = "weight_label"
"""``/update_weight_version`` and ``/weight_info``: a server reports the label of its weights."""
NCCL_ID = "nccl_id"
"""``nccl_unique_id_b64``: a sender needs no import of vllm."""
WEIGHT_SPANS = "weight_spans"
"""``return_weight_versions`` on the OpenAI routes: which weights sampled a completion."""

OLDEST = "0.11"
"""The first release whose responses carry token ids."""
FIRST: dict[str, str] = {
    PAUSE: "0.12",
    PAUSE_KEEP: "0.16",
    WEIGHT_TRANSFER: "0.16",
    IPC: "0.17",
    UPDATE_BRACKETS: "0.21",
    WEIGHT_LABEL: "0.27",
    NCCL_ID: "0.30",
    WEIGHT_SPANS: "0.33",
}
"""Feature -> the first release that has it."""

_NUMBER = re.compile(r"(?<!\d)\d+\.\d+(?:\.\d+)?")


def parse_version(text: str) -> Version | None:
    """The release in the response of ``/version``; None for a development build.

    >>> parse_version("0.32.0+cpu"), parse_version("0.0.0.dev12"), parse_version("main")
    (<Version('0.32.0')>, None, None)
    """
    match = _NUMBER.search(text)
    try:
        version = Version(match[0]) if match else None
    except InvalidVersion:
        return None
    return version if version and version > Version("0.0.0") else None


def features_of(version: Version | None) -> frozenset[str]:
    """The features of a server of ``version``; None means the newest.

    >>> sorted(features_of(Version("0.16.0")))
    ['pause', 'pause_keep', 'weight_transfer']
    """
    return frozenset(
        name for name, first in FIRST.items() if version is None or version >= Version(first)
    )
