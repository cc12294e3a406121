"""Media types of pictures and sounds in messages, by the names that vendors know.

Datasets and programs name them as files are named (``image/jpg``), in capitals, with parameters, or
wrongly; the first bytes of a picture say which type it has. Nothing is decoded but these bytes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

_NAMES = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/jpe": "image/jpeg",
    "image/jfif": "image/jpeg",
    "image/x-png": "image/png",
    "image/apng": "image/png",
    "image/x-webp": "image/webp",
    "image/x-ms-bmp": "image/bmp",
    "image/x-bmp": "image/bmp",
    "image/tif": "image/tiff",
    "image/svg": "image/svg+xml",
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "png": "image/png",
    "gif": "image/gif",
    "webp": "image/webp",
}
"""Other names -> registered ones (https://www.iana.org/assignments/media-types)."""
_BEGINNINGS = (
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"%PDF-", "application/pdf"),
)
_SOUNDS = {"wave": "wav", "x-wav": "wav", "vnd.wave": "wav", "mpeg": "mp3", "mpga": "mp3"}


def media_type(name: str, data: str = "") -> str:
    """Return the registered name of a media type: that of the first bytes of ``data`` (base64)
    where they are known, else of the name it came with.

    >>> media_type("image/JPG"), media_type("image/png; charset=binary"), media_type("", "/9j/4AAQ")
    ('image/jpeg', 'image/png', 'image/jpeg')
    """
    try:
        first = base64.b64decode("".join(data[:64].split())[:32])
    except (binascii.Error, ValueError):
        first = b""
    if kind := type_of_content(first):
        return kind
    plain = name.partition(";")[0].strip().lower()
    return _NAMES.get(plain, plain)


def type_of_content(content: bytes) -> str:
    """The registered name of the type that the first bytes of a file say; "" for another file.

    >>> type_of_content(b"GIF89a"), type_of_content(b"<svg>")
    ('image/gif', '')
    """
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for first, kind in _BEGINNINGS if content.startswith(first)), "")


def split_data_url(url: str) -> tuple[str, str] | None:
    """(media type, base64) of a data URL, None for another address or other data.

    >>> split_data_url("data:image/jpg;base64,/9j/4AAQ"), split_data_url("http://host/a.png")
    (('image/jpeg', '/9j/4AAQ'), None)
    """
    head, comma, data = url.partition(",")
    words = [word.strip() for word in head[len("data:") :].split(";")]
    if not comma or head[:5].lower() != "data:" or words[-1].lower() != "base64":
        return None
    return media_type(words[0] if len(words) > 1 else "", data), data


def properly_named(part: object) -> object:
    """Return a content part with the registered name of its media type; the same object where it
    has that."""
    if not isinstance(part, Mapping):
        return part
    kind = part.get("type")
    if kind == "image_url" and isinstance(part.get("image_url"), Mapping):
        image = part["image_url"]
        if (url := _named_url(image.get("url"))) != image.get("url"):
            return {**part, "image_url": {**image, "url": url}}
    elif kind in ("image_url", "input_image") and isinstance(part.get("image_url"), str):
        if (url := _named_url(part["image_url"])) != part["image_url"]:
            return {**part, "image_url": url}
    elif kind == "image" and isinstance(source := part.get("source"), Mapping):
        if source.get("type") == "base64":
            name = media_type(str(source.get("media_type") or ""), str(source.get("data") or ""))
            if name != source.get("media_type"):
                return {**part, "source": {**source, "media_type": name}}
    elif kind == "input_audio" and isinstance(audio := part.get("input_audio"), Mapping):
        plain = str(audio.get("format") or "").partition(";")[0].strip().lower()
        plain = plain.removeprefix("audio/").removeprefix(".")
        name = _SOUNDS.get(plain, plain)
        if name != audio.get("format"):
            return {**part, "input_audio": {**audio, "format": name}}
    return part


def _named_url(url: object) -> object:
    if not isinstance(url, str) or url[:5].lower() != "data:":
        return url
    if (media := split_data_url(url)) is None:
        return url
    return f"data:{media[0]};base64,{media[1]}"
