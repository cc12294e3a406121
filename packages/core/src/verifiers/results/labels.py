"""A person's labels of the rollouts of an evaluation, right or wrong, in ``labels.jsonl`` beside
them.

``vf-view`` appends to it; loading the evaluation gives each labelled rollout the column ``label``,
which ``results.agreement("label")`` and ``vf-compare RUN --labels label`` compare with a judge. The
newest label of a rollout counts, and only while its completion is that which was read.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping
from pathlib import Path

from verifiers.errors import ConfigError
from verifiers.runtime.bounded import MAX_FILE_BYTES, TooLong, lines_of, open_file
from verifiers.runtime.decoding import decode_json
from verifiers.runtime.json import encode_row
from verifiers.storage.files import append_lines

LABELS_NAME, LABEL = "labels.jsonl", "label"


def write_label(folder: Path, row: Mapping[str, object], label: bool | None) -> None:
    """Append the label of a saved rollout, None to take it back; it is on disk afterwards.

    *Raises* ConfigError for a rollout without a ``rollout_key``; OSError, also when the file is a
    symbolic link.
    """
    key = row.get("rollout_key")
    if not isinstance(key, str):
        raise ConfigError(
            "this rollout was saved by another version, without a key that a label could name"
        )
    line = {
        "rollout_key": key,
        "example_id": row.get("example_id"),
        "sibling": row.get("sibling"),
        "completion": completion_hash(row.get("completion")),
        LABEL: label,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    append_lines(folder / LABELS_NAME, encode_row(line) + b"\n")


def read_labels(folder: Path) -> dict[str, tuple[str, bool]]:
    """``rollout_key`` -> (hash of the completion, label); lines that are no labels are skipped.

    *Raises* ConfigError for a file that cannot be read.
    """
    labels: dict[str, tuple[str, bool]] = {}
    try:
        with open_file(folder / LABELS_NAME) as file:
            for raw in lines_of(file, MAX_FILE_BYTES):
                try:
                    line = decode_json(raw)
                    key, digest, label = line["rollout_key"], line["completion"], line[LABEL]
                except (ValueError, KeyError, TypeError):  # unfinished, or another program's line
                    continue
                if label is None and isinstance(key, str):
                    labels.pop(key, None)
                elif isinstance(label, bool) and isinstance(key, str):
                    labels[key] = str(digest), label
    except FileNotFoundError:
        pass
    except (OSError, TooLong) as error:
        raise ConfigError(f"the labels of the run cannot be read: {error}") from error
    return labels


def completion_hash(completion: object) -> str:
    """16 hexadecimal digits of the SHA-256 of a completion as it is saved."""
    return hashlib.sha256(encode_row({"completion": completion})).hexdigest()[:16]
