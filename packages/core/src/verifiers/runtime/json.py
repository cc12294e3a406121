"""JSON encoding: rows that always encode, and one canonical encoding for hashes.

``encode_row`` never fails. Its bytes are ASCII (a lone surrogate, U+0085, U+2028 or NUL from a
model survives a round trip, and no reader takes a character for a line end); NaN and infinity
become ``null``; objects with ``tolist()`` (numpy, torch, ``array``) become numbers, paths become
text; a value that JSON cannot represent, or that is nested too deeply to be read again, becomes the
marker ``{"__unserializable__": "<type>"}``.

``canonical_json`` is strict, because different values must have different hashes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from verifiers.runtime.decoding import MAX_DEPTH, check_depth, decode_json

UNSERIALIZABLE = "__unserializable__"
"""The only key of the marker for a value that JSON cannot represent; its value is the name of the
type."""


def encode_row(row: Mapping[str, object]) -> bytes:
    """A JSON object as ASCII bytes without a line end, for any value.

    >>> encode_row({"a": float("nan"), "b": "\\u2028", "c": object()})
    b'{"a":null,"b":"\\\\u2028","c":{"__unserializable__":"object"}}'
    """
    try:
        encoded = _ENCODER.encode(row)
        if encoded.isascii() and not _may_be_deep(encoded):
            return encoded
        decoded = _DECODER.decode(encoded)
        check_depth(decoded)
        return encoded if encoded.isascii() else _ASCII.encode(decoded).encode("ascii")
    except Exception:  # noqa: BLE001  lone surrogates, odd keys, cycles, objects that raise: encode column by column
        columns = (
            f"{_ASCII.encode(str(name))}:{_encode_column(value)}" for name, value in row.items()
        )
        return ("{" + ",".join(columns) + "}").encode("ascii")


def decode_row(encoded: bytes) -> dict[str, Any]:
    """The row of a JSON object. *Raises* ValueError when the bytes are not a JSON object, or an
    object that is nested too deeply."""
    try:
        row = _DECODER.decode(encoded)
        if _may_be_deep(encoded):
            check_depth(row)
    except (msgspec.DecodeError, RecursionError):  # lone surrogates, which ``json`` accepts
        row = decode_json(encoded)
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    return row


def canonical_json(value: object) -> bytes:
    """The canonical bytes of a JSON value, for hashes: keys sorted, no spaces, UTF-8; NaN and
    infinity are ``null``.

    Numbers are written as msgspec writes them (``1.0``, ``0.00001``, ``1e16``), which tests pin. A
    value with a lone surrogate, which UTF-8 cannot encode, is written in ASCII.

    *Raises* TypeError for a value that JSON cannot represent: a marker would give different values
    the same hash.

    >>> canonical_json({"b": 1, "a": ["é", {3, 1, 2}]}).decode()
    '{"a":["é",[1,2,3]],"b":1}'
    """
    try:
        return _CANONICAL.encode(value)
    except (TypeError, UnicodeEncodeError):
        # non-string keys, lone surrogates; other causes are raised again
        plain = msgspec.to_builtins(value, str_keys=True, order="sorted", enc_hook=_plain)
    try:
        return _CANONICAL.encode(plain)
    except UnicodeEncodeError:
        return _SURROGATES.encode(_json_ready(plain)).encode("ascii")


def in_utf8(value: object) -> Any:
    r"""A JSON value whose lone surrogates, which UTF-8 cannot encode, are the text of their escapes.

    >>> in_utf8({"a": ["b\ud800", "é"]})
    {'a': ['b\\ud800', 'é']}
    """
    try:
        _ENCODER.encode(value)
        return value
    except UnicodeEncodeError:
        pass
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {in_utf8(key): in_utf8(member) for key, member in value.items()}
    members: Any = value
    return [in_utf8(member) for member in members]


def _may_be_deep(encoded: bytes) -> bool:
    """Whether there are enough brackets; those within texts count, so that it is quick."""
    return encoded.count(b"[") + encoded.count(b"{") > MAX_DEPTH


def _plain(value: object) -> Any:
    """A builtin equivalent of a value that msgspec cannot encode. *Raises* TypeError when there is
    none."""
    if isinstance(value, str):  # a subclass; its overrides are ignored
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, PurePath):
        return value.as_posix()
    for name in ("tolist", "model_dump"):  # arrays and their scalars; pydantic objects
        convert = getattr(type(value), name, None)
        if callable(convert) and type(plain := convert(value)) is not type(value):
            return plain
    raise TypeError(f"JSON cannot represent a {type(value).__name__}")


def _plain_or_marker(value: object) -> object:
    try:
        return _plain(value)
    except Exception:  # noqa: BLE001  objects may raise anything; the marker records the type
        return _marker(value)


def _marker(value: object) -> dict[str, str]:
    return {UNSERIALIZABLE: type(value).__name__}


def _encode_column(value: object) -> str:
    try:
        ready = _json_ready(value)
        check_depth([ready])  # below the row
        return _ASCII.encode(ready)
    except Exception:  # noqa: BLE001  cycles, too deep nesting, objects that raise; the marker records the type
        return _ASCII.encode(_marker(value))


def _json_ready(value: object) -> object:
    """The value in types that the standard encoder accepts, non-finite numbers as None."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else str(key): _json_ready(member)
            for key, member in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_json_ready(member) for member in value]
    return _json_ready(msgspec.to_builtins(value, str_keys=True, enc_hook=_plain_or_marker))


_ENCODER = msgspec.json.Encoder(enc_hook=_plain_or_marker)
_CANONICAL = msgspec.json.Encoder(enc_hook=_plain, order="sorted")
_DECODER = msgspec.json.Decoder()
_ASCII = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
_SURROGATES = json.JSONEncoder(
    ensure_ascii=True, allow_nan=False, separators=(",", ":"), sort_keys=True
)
