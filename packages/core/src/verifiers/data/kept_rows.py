"""The file of ``vf-audit --keep``: the training rows of an environment that a model solves
sometimes.

JSON lines: each row with its ``example_hash``, its ``pass_rate``, and under ``audit`` the
environment, its arguments and the model. `read_kept_rows` is the only reader.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from verifiers.data.examples import Table
from verifiers.errors import ConfigError
from verifiers.runtime.bounded import MAX_ROW_BYTES, read_file
from verifiers.runtime.decoding import decode_json

AUDIT, EXAMPLE_HASH = "audit", "example_hash"


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The content hashes of the rows, and the environment of their profile (None: not named)."""

    path: str
    hashes: frozenset[str]
    env_id: str | None
    env_args: Mapping[str, object]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of what is kept, for the identity of a run."""
        return hashlib.sha256("".join(sorted(self.hashes)).encode()).hexdigest()[:16]

    def of(
        self, table: Table, env_id: str, env_args: Mapping[str, object] | None, key: str
    ) -> Table:
        """The rows of ``table`` that the file lists; ``env_args`` is None if nothing says how it
        was built.

        *Raises* ConfigError for the profile of another environment or of other arguments, and for
        rows that the table does not have.
        """
        again = f"profile it with vf-audit {env_id or 'ENV'} -m MODEL --keep {self.path}"
        profiled, name = self.env_id, env_id or "this environment"
        if profiled is not None and env_id and profiled != env_id:
            raise ConfigError(
                f"{key}={self.path!r} lists rows of {profiled}, not of {name}; {again}", key=key
            )
        if profiled is not None and env_args is not None:
            before, now = json.dumps(self.env_args), json.dumps(dict(env_args), default=str)
            if json.loads(before) != json.loads(now):
                raise ConfigError(
                    f"{key}={self.path!r} was written for {name} with the arguments {before}, and"
                    f" these are {now}; {again}",
                    key=key,
                )
        rows = table.only(self.hashes)
        if not len(rows):
            raise ConfigError(
                f"{key}={self.path!r} lists no training row of {name}; {again}", key=key
            )
        if missing := len(self.hashes) - len({example.hash for example in rows}):
            raise ConfigError(
                f"{key}={self.path!r}: {missing} of its {len(self.hashes)} rows are no training"
                f" rows of {name}, whose data have changed; {again}",
                key=key,
            )
        return rows


def read_kept_rows(path: str | os.PathLike[str], key: str) -> KeptRows:
    """Read the file that the setting ``key`` names. *Raises* ConfigError for another kind."""
    try:
        raw = filter(bytes.strip, read_file(path, MAX_ROW_BYTES).split(b"\n"))
        lines = list(map(decode_json, raw))
        hashes = frozenset(str(line[EXAMPLE_HASH]) for line in lines)
        audit = lines[0].get(AUDIT) if lines else None
        env_id, env_args = (audit["environment"], audit["env_args"]) if audit else (None, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{key}={os.fspath(path)!r} cannot be read: {type(error).__name__}: {error}; write it"
            " with vf-audit ENV -m MODEL --keep FILE",
            key=key,
        ) from error
    return KeptRows(os.fspath(path), hashes, env_id, env_args)
