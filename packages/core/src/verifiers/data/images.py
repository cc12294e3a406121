"""Images in messages: content parts made of them, their bytes, and decoding within bounds.

In memory and in the record an image is a part of the OpenAI protocol with a data URL, ``{"type":
"image_url", "image_url": {"url": "data:image/png;base64,…"}}``. The bytes are those of the file it
came from: they are not encoded anew, so that their hash is that of the file.

Nothing is fetched from the network. The first bytes say the format, whatever a name says; it is one
of ``FORMATS``, so SVG, which can hold scripts, is refused. The size in bytes and in pixels is
checked before anything is decoded. Only ``decode_image`` and images of Pillow need Pillow, the
extra ``images``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard
from urllib.parse import unquote, urlsplit

from verifiers.data.media import split_data_url, type_of_content
from verifiers.errors import ConfigError
from verifiers.runtime.bounded import TooLong, read_file, size_text
from verifiers.runtime.install_lines import install_line

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {"image/png": "png", "image/jpeg": "jpg", "image/webp": "webp", "image/gif": "gif"}
"""Media types of images -> the ends of their files' names."""
MAX_IMAGE_BYTES = 20 * 2**20
"""Most bytes of an image's file."""
MAX_PIXELS = 2**25
"""Most pixels of an image, height times width; decoded, that many take 100 MB."""


def image_part(source: object, *, detail: str = "") -> dict[str, object]:
    """The content part of an image.

    Args:
        source: A path, the bytes of a file, an image of Pillow (it becomes a PNG), a cell of an
            ``Image`` column of ``datasets``, a data URL, an http(s) URL, or a part.
        detail: How closely a model should look, as OpenAI's API takes it: low, high or auto.

    *Raises* ConfigError for a file that cannot be read or is no PNG, JPEG, WebP or GIF within
    ``MAX_IMAGE_BYTES``.

    >>> vf.image_part(b"GIF89a")
    {'type': 'image_url', 'image_url': {'url': 'data:image/gif;base64,R0lGODlh'}}
    """
    image = {"url": _url_of(source)} | ({"detail": detail} if detail else {})
    return {"type": "image_url", "image_url": image}


def is_image(value: object) -> bool:
    """Whether a value is an image of Pillow, or a cell of an ``Image`` column of ``datasets`` as
    it is stored: a dict of ``bytes`` and ``path``."""
    return _is_cell(value) or _is_pillow(value)


def is_url(source: str) -> bool:
    """Whether a text is a data URL or a web address, and no path."""
    return source[:8].lower().startswith(("data:", "http://", "https://"))


def image_url(part: object) -> str | None:
    """The URL of a part that holds an image, in OpenAI's two spellings; None for another part."""
    if not isinstance(part, Mapping) or part.get("type") not in ("image_url", "input_image"):
        return None
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, Mapping) else image
    return url if isinstance(url, str) else None


def image_parts(messages: object) -> Iterator[Mapping[str, object]]:
    """The parts of messages that hold images, in their order.

    >>> [image_url(part) for part in image_parts([vf.UserMessage([vf.ImageUrlContentPart("http://host/a.png")])])]
    ['http://host/a.png']
    """
    for message in messages if isinstance(messages, Iterable) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            if image_url(part) is not None:
                yield part


def image_bytes(part: object) -> bytes:
    """The file of the image in a part.

    *Raises* ConfigError for a part without a data URL of an allowed format, as a remote image is.
    """
    url = image_url(part)
    if url is None:
        raise ConfigError("a content part without 'image_url' holds no image")
    return _content_of(url)


def image_hash(content: bytes) -> str:
    """SHA-256 of an image's file, 64 hex digits."""
    return hashlib.sha256(content).hexdigest()


def decode_image(
    content: bytes, *, max_bytes: int = MAX_IMAGE_BYTES, max_pixels: int = MAX_PIXELS
) -> Image:
    """Decode an image's file: RGB, turned as its EXIF data says, transparency on white, of an
    animation the first frame.

    *Raises* ConfigError for another format, for more bytes or pixels than allowed (its header is
    read first), for a damaged or cut file, and without Pillow.

    >>> vf.decode_image(b"no image")
    Traceback (most recent call last):
    ...
    verifiers.errors.ConfigError: an image is a file of one of PNG, JPEG, WEBP, GIF; this one is of another format
    """
    kind = _checked_type(content, max_bytes)
    pillow = _pillow()
    from PIL import ImageOps, UnidentifiedImageError

    try:
        image: Image = pillow.open(io.BytesIO(content), formats=(kind[len("image/") :].upper(),))
        _check_pixels(image, max_pixels)
        image.load()
        _check_pixels(image, max_pixels)
        return _on_white(ImageOps.exif_transpose(image))
    except ConfigError:
        raise
    except UnidentifiedImageError as error:
        raise ConfigError(f"an image ({kind}) cannot be decoded: its header is damaged") from error
    except Exception as error:  # a damaged file fails anywhere inside Pillow
        raise ConfigError(f"an image ({kind}) cannot be decoded: {error}") from error


def _on_white(image: Image) -> Image:
    """RGB; an image of 16 bits keeps its upper eight."""
    pillow = _pillow()
    if image.mode.startswith("I"):
        image = image.point(lambda value: value / 256).convert("L")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    background = pillow.new("RGBA", image.size, "white")
    background.alpha_composite(image)
    return background.convert("RGB")  # type: ignore[no-any-return]


def _url_of(source: object) -> str:
    if (url := image_url(source)) is not None:
        return _url_of(url)
    if isinstance(source, str) and is_url(source) and source[:5].lower() != "data:":
        return source
    return data_url(_source_bytes(source))


def _source_bytes(source: object) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if _is_cell(source):
        if (content := source.get("bytes")) is not None:
            return bytes(content)
        return _read(source["path"])
    if _is_pillow(source):
        return _as_png(source)
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _content_of(source)
    if isinstance(source, str | os.PathLike):
        return _read(source)
    raise ConfigError(
        "an image is a path, the bytes of a file, an image of Pillow, a cell of an Image column,"
        f" a URL or a content part, not {type(source).__name__}"
    )


def data_url(content: bytes) -> str:
    """The data URL of an image's file. *Raises* ConfigError for another format, or too many bytes."""
    return f"data:{_checked_type(content)};base64,{base64.b64encode(content).decode()}"


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return read_file(local_path(path).expanduser(), MAX_IMAGE_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the image {str(path)[:200]!r} cannot be read: {reason}") from error


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path, or that of a ``file:`` URL."""
    if isinstance(path, str) and path[:5].lower() == "file:":
        path = unquote(urlsplit(path).path)
    return Path(path)


def _content_of(url: str) -> bytes:
    parsed = split_data_url(url)
    if parsed is None:
        raise ConfigError(
            f"the image at {url[:100]!r} is not here, only its address is, and addresses are not"
            " fetched: load it before the run and pass its file, vf.image_part(path)"
        )
    if len(parsed[1]) > MAX_IMAGE_BYTES * 3 // 2:
        raise _too_long(MAX_IMAGE_BYTES)
    try:
        content = base64.b64decode("".join(parsed[1].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"the data URL of an image is not base64: {error}") from error
    _checked_type(content)
    return content


def _checked_type(content: bytes, max_bytes: int = MAX_IMAGE_BYTES) -> str:
    """The media type of an image's file, one of ``FORMATS``."""
    if len(content) > max_bytes:
        raise _too_long(max_bytes)
    if (kind := type_of_content(content)) not in FORMATS:
        names = ", ".join(name[len("image/") :].upper() for name in FORMATS)
        raise ConfigError(
            f"an image is a file of one of {names}; this one is {kind or 'of another format'}"
        )
    return kind


def _too_long(max_bytes: int) -> ConfigError:
    return ConfigError(str(TooLong("an image", max_bytes)) + "; save it smaller")


def _check_pixels(image: Image, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise ConfigError(
            f"an image of {width:,} x {height:,} pixels is too large: at most {max_pixels:,} may be"
            f" decoded ({size_text(3 * max_pixels)}); save it smaller"
        )


def _as_png(image: Image) -> bytes:
    _check_pixels(image, MAX_PIXELS)
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        image = image.convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _is_cell(value: object) -> TypeGuard[Mapping[str, Any]]:
    if not isinstance(value, Mapping) or not value.keys() <= {"bytes", "path"}:
        return False
    if value.get("bytes") is not None:
        return isinstance(value["bytes"], bytes)
    # a table with a path alone may be any author's ``info``
    return "bytes" in value and isinstance(value.get("path"), str)


def _is_pillow(value: object) -> TypeGuard[Image]:
    """Pillow is asked only where it is loaded: nothing else made such an object."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            f"images are decoded by Pillow: {install_line('verifiers', 'images')}"
        ) from error
    return Image
