"""Names made from content: the fingerprint of a run's configuration, and the key of a rollout.

The promise: equal content has equal names on every machine and in every process, and two configurations that differ
have two fingerprints. What belongs into a configuration is decided by the runner, an example's hash by the dataset.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from verifiers.errors import ConfigError
from verifiers.runtime.json import canonical_json

NOT_SET = "<not set>"
"""Stands in ``differences`` for a key that one of the two configurations does not have."""


def fingerprint(config: Mapping[str, Any]) -> str:
    """SHA-256 in hex of a configuration's canonical JSON; 1 and 1.0 are one number.

    Raises: ``ConfigError`` naming the key whose value JSON cannot hold.
    """
    return hashlib.sha256(canonical_json(frozen_config(config))).hexdigest()


def rollout_key(example_hash: str, sibling: int) -> str:
    """The name of one rollout in every run of its dataset: 32 hex digits from its row's hash and its number there."""
    return hashlib.sha256(f"{example_hash}:{sibling}".encode()).hexdigest()[:32]


def config_differences(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (stored, given) for every setting that is not the same in both.

    >>> config_differences({"model": "a", "env_args": {"n": 1}}, {"model": "a", "env_args": {"n": 2}})
    {'env_args.n': (1, 2)}
    """
    before, now = dict(_leaves(frozen_config(stored))), dict(_leaves(frozen_config(given)))
    return {
        key: (before.get(key, NOT_SET), now.get(key, NOT_SET))
        for key in sorted(before.keys() | now.keys())
        if key not in before or key not in now or canonical_json(before[key]) != canonical_json(now[key])
    }


def frozen_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as JSON gives it back, whole floats as integers."""
    for key, value in _leaves(config):
        try:
            canonical_json(value)
        except TypeError as error:
            raise ConfigError(
                f"a run with {key}={value!r:.80} cannot be kept on disk: {error}, so a later run could not be compared "
                "with it. Give a name or a number instead, or run without saving.",
                key=key,
            ) from error
    frozen: dict[str, Any] = _whole_numbers(json.loads(canonical_json(config)))
    return frozen


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole_numbers(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(member) for member in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
