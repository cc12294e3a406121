"""The configuration of a run: its fingerprint, and how two of them differ.

``runs.run`` assembles the configuration, ``directory`` compares it with the stored configuration.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from verifiers import compat
from verifiers.errors import ConfigError
from verifiers.runtime.json import canonical_json
from verifiers.runtime.redaction import digested, without_digest
from verifiers.storage.described import CODE

NOT_SET = "<not set>"
"""Value in ``config_differences`` of a key that one of the two configurations lacks."""

PARTS = ("client", CODE, "environment", "parser", "rubric")
"""Sections of a configuration that are compared only when both runs have them: version 0.2.0 stored
none of them, and a client without ``identity()`` has none."""
_CODE = re.compile(r"([a-z]+-\d+\.\d+):[0-9a-f]{16}")


def fingerprint(config: Mapping[str, object]) -> str:
    """SHA-256 in hex of a configuration's canonical JSON; 1 and 1.0 are equal.

    *Raises* ``ConfigError`` naming the key whose value JSON cannot hold.
    """
    return hashlib.sha256(canonical_json(frozen_config(config))).hexdigest()


def rollout_key(example_hash: str, sibling: int) -> str:
    """The key of a rollout in every run of its dataset: 32 hex digits from the hash of its row and
    the sibling."""
    return hashlib.sha256(f"{example_hash}:{sibling}".encode()).hexdigest()[:32]


def config_differences(
    stored: Mapping[str, object], present: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Dotted key -> (stored, new) for every setting that differs.

    >>> config_differences({"model": "a", "env_args": {"n": 1}}, {"model": "a", "env_args": {"n": 2}})
    {'env_args.n': (1, 2)}
    """
    before, now = dict(_leaves(frozen_config(stored))), dict(_leaves(frozen_config(present)))
    differences = {
        key: (before.get(key, NOT_SET), now.get(key, NOT_SET))
        for key in sorted(before.keys() | now.keys())
        if key not in before
        or key not in now
        or canonical_json(before[key]) != canonical_json(now[key])
    }
    for key, pair in list(differences.items()):
        # an empty value is redundant when members differ: ``tools[0].function`` was <not set>
        is_empty = NOT_SET in pair and ([] in pair or {} in pair)
        if is_empty and any(d.startswith((f"{key}[", f"{key}.")) for d in differences):
            del differences[key]
    return differences


def resume_differences(
    stored: Mapping[str, object], present: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """``config_differences`` of the comparable parts: what prevents ``given`` from resuming
    ``stored``.

    Not compared: sections of ``PARTS`` that only one of the two has, and the bytecode of functions
    across versions of Python, which compile the same source differently.

    >>> resume_differences({"model": "a"}, {"model": "a", "parser": {"class": "verifiers.Parser"}})
    {}
    """
    uncompared = uncompared_parts(stored, present)
    # 0.2.0: some in clear
    before = digested({key: value for key, value in stored.items() if key not in uncompared})
    if before.get("env_class") in compat.ENVIRONMENT_CLASSES:
        before["env_class"] = compat.ENVIRONMENT_CLASSES[before["env_class"]]
    now = {key: value for key, value in present.items() if key not in uncompared}
    differences = config_differences(before, now)
    return {
        key: pair
        for key, pair in differences.items()
        if not _is_code_of_two_pythons(key, *pair) and not _is_secret_without_digest(*pair)
    }


def changed_code(differences: Mapping[str, object]) -> list[str]:
    """What changed when code is all that differs: files, else functions by their place; empty when
    more differs.

    >>> changed_code({"code.sums.py": ("a", "b"), "rubric.funcs[0].code": ("c", "d")})
    ['sums.py']
    >>> changed_code({"code.sums.py": ("a", "b"), "model": ("m", "n")})
    []
    """
    files = [key.removeprefix(f"{CODE}.") for key in differences if key.startswith(f"{CODE}.")]
    functions = [key.removesuffix(f".{CODE}") for key in differences if key.endswith(f".{CODE}")]
    return (files or functions) if len(files) + len(functions) == len(differences) else []


def uncompared_parts(stored: Mapping[str, object], present: Mapping[str, object]) -> list[str]:
    """The sections of ``PARTS`` that only one of two configurations has."""
    return [part for part in PARTS if (part in stored) is not (part in present)]


def frozen_config(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration as JSON gives it, whole floats as integers. *Raises* ConfigError."""
    try:
        encoded = canonical_json(config)
    except TypeError:
        _raise_for_leaf(config)
        raise
    frozen: dict[str, object] = _whole_numbers(json.loads(encoded))
    return frozen


def _raise_for_leaf(config: Mapping[str, object]) -> None:
    """*Raises* ConfigError for the first setting that JSON cannot hold."""
    for key, value in _leaves(config):
        try:
            canonical_json(value)
        except TypeError as error:
            raise ConfigError(
                f"a run with {key}={value!r:.80} cannot be saved: {error}, so a later run could not"
                " be compared with it. Pass a name or a number instead, or run without saving.",
                key=key,
            ) from error


def _whole_numbers(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _whole_numbers(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(member) for member in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _leaves(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted key -> value; members of a list of mappings by index, ``tools[0].function``."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(m, Mapping) and m for m in value):
            for index, member in enumerate(value):
                yield from _leaves(member, f"{name}[{index}].")
        else:
            yield name, value


def _is_code_of_two_pythons(key: str, before: object, now: object) -> bool:
    return key.rpartition(".")[2] == CODE and is_code_of_two_pythons(before, now)


def is_code_of_two_pythons(before: object, now: object) -> bool:
    """Whether two hashes of bytecode are of two versions of Python, and say nothing."""
    if not isinstance(before, str) or not isinstance(now, str):
        return False
    matches = _CODE.fullmatch(before), _CODE.fullmatch(now)
    return matches[0] is not None and matches[1] is not None and matches[0][1] != matches[1][1]


def _is_secret_without_digest(before: object, now: object) -> bool:
    return before in (without_digest(now), now) or now == without_digest(before)
