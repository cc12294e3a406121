"""What a training's folder says of it, for readers of any layer: ``settings.json``, written before
the first step, and ``rl_state.json`` of each checkpoint."""

from __future__ import annotations

from pathlib import Path

import msgspec

from verifiers.runtime.decoding import read_record

SETTINGS_NAME, STATE_NAME = "settings.json", "rl_state.json"


class TrainingSettings(msgspec.Struct):
    """The fields of both files that are read field by field."""

    configuration: dict[str, object] = msgspec.field(default_factory=dict)
    """What must be equal to resume."""
    model: str | None = None
    max_steps: int | None = None
    ended: str | None = None
    """The error that ended the last session."""
    provenance: dict[str, object] | None = None
    """Of the last session, see ``storage.provenance``."""

    @classmethod
    def read(cls, path: Path) -> TrainingSettings:
        """*Raises* OSError; ValueError, which names file and field."""
        return read_record(path, cls)
