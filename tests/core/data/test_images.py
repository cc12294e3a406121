"""Images: content parts of every source, their bytes unchanged, decoding within bounds."""

from __future__ import annotations

import base64
import io
import struct
import sys
import zlib

import pytest

import verifiers as vf
from verifiers.data.images import (
    FORMATS,
    MAX_IMAGE_BYTES,
    image_bytes,
    image_hash,
    image_parts,
    image_url,
    is_image,
)

Image = pytest.importorskip("PIL.Image", reason="the extra images is not installed")
RED = (200, 0, 0)


def file_of(kind="PNG", size=(5, 4), mode="RGB", color=RED, **saving):
    file = io.BytesIO()
    Image.new(mode, size, color).save(file, kind, **saving)
    return file.getvalue()


def png_of_size(width, height):
    """A PNG that announces a size that it does not have, with the right checksum."""
    content = bytearray(file_of())
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


def sources(folder):
    content = file_of()
    path = folder / "a picture.png"
    path.write_bytes(content)
    yield content, content
    yield bytearray(content), content
    yield path, content
    yield str(path), content
    yield path.as_uri(), content
    yield {"bytes": content, "path": None}, content
    yield {"bytes": content, "path": "elsewhere.jpg"}, content
    yield {"bytes": None, "path": str(path)}, content
    yield vf.image_part(content), content
    yield vf.ImageUrlContentPart(vf.image_part(content)["image_url"]["url"]), content
    text = base64.b64encode(content).decode()
    # what a name says does not count
    yield f"data:image/JPG;charset=x;base64,{text[:9]}\n{text[9:]}", content


def test_the_part_of_every_source_has_the_bytes_of_the_file(tmp_path):
    for source, content in sources(tmp_path):
        part = vf.image_part(source)
        assert image_bytes(part) == content
        assert part["image_url"]["url"].startswith("data:image/png;base64,")
        assert vf.image_part(part) == part
    assert vf.image_part(content, detail="low")["image_url"]["detail"] == "low"
    assert image_hash(content) == image_hash(image_bytes(vf.image_part(tmp_path / "a picture.png")))


def test_an_image_of_pillow_becomes_a_png_with_its_pixels():
    for mode, color in (("RGB", RED), ("L", 7), ("CMYK", (0, 255, 255, 0)), ("F", 5.0)):
        image = Image.new(mode, (3, 2), color)
        assert is_image(image)
        content = image_bytes(vf.image_part(image))
        assert content == image_bytes(vf.image_part(image))
        assert vf.decode_image(content).tobytes() == image.convert("RGB").tobytes()


def test_an_image_column_of_datasets_is_a_source():
    import datasets

    content = file_of("JPEG")
    rows = datasets.Dataset.from_dict({"image": [{"bytes": content, "path": None}]}).cast_column(
        "image", datasets.Image()
    )
    stored = rows.cast_column("image", datasets.Image(decode=False))[0]["image"]
    assert is_image(stored)
    assert image_bytes(vf.image_part(stored)) == content
    decoded = rows[0]["image"]
    shown = vf.decode_image(image_bytes(vf.image_part(decoded)))
    assert shown.tobytes() == vf.decode_image(content).tobytes()


def test_what_only_looks_like_an_image_is_none():
    for value in ("a.png", b"\x89PNG", {}, {"path": 3}, {"bytes": "text"}, None, {"url": "a"}):
        assert not is_image(value)
    assert not is_image({"bytes": b"", "path": "a", "more": 1})
    assert image_url({"type": "text", "text": "a"}) is None
    assert image_url({"type": "image_url", "image_url": {"url": 3}}) is None
    assert image_url({"type": "input_image", "image_url": "data:"}) == "data:"


def test_parts_of_messages_come_in_their_order():
    parts = [vf.image_part(file_of(color=(number, 0, 0))) for number in range(3)]
    text = {"type": "text", "text": "?"}
    messages = [
        vf.SystemMessage("Look."),
        vf.UserMessage([parts[0], text, parts[1]]),
        vf.ToolMessage([parts[2]], "c1"),
    ]
    assert list(image_parts(messages)) == parts
    assert list(image_parts("text")) == list(image_parts(None)) == []


def test_decoding_gives_rgb_on_white_and_turned():
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        image = vf.decode_image(file_of(kind))
        assert image.mode == "RGB"
        assert image.size == (5, 4)
        assert all(abs(a - b) < 9 for a, b in zip(image.getpixel((2, 2)), RED, strict=True))
    assert vf.decode_image(file_of(mode="RGBA", color=(*RED, 0))).getpixel((0, 0)) == (255,) * 3
    indexed = vf.decode_image(file_of(mode="P", color=0, transparency=0))
    assert indexed.getpixel((0, 0)) == (255,) * 3
    assert vf.decode_image(file_of(mode="I;16", color=256 * 99)).getpixel((0, 0)) == (99,) * 3
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert vf.decode_image(file_of("JPEG", exif=exif)).size == (4, 5)


def test_of_an_animation_the_first_frame_is_decoded():
    file = io.BytesIO()
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert vf.decode_image(file.getvalue()).getpixel((0, 0)) == (255, 0, 0)


def test_size_is_checked_in_the_header_before_anything_is_decoded():
    for size in ((2**20, 2**20), (9000, 9000), (2**31 - 1, 1)):
        with pytest.raises(vf.ConfigError, match=r"an image .*(pixels|decoded)"):
            vf.decode_image(png_of_size(*size))
    with pytest.raises(vf.ConfigError, match=r"5 x 4 pixels is too large: at most 19"):
        vf.decode_image(file_of(), max_pixels=19)
    assert vf.decode_image(file_of(), max_pixels=20).size == (5, 4)
    with pytest.raises(vf.ConfigError, match="longer than 10 bytes"):
        vf.decode_image(file_of(), max_bytes=10)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_damaged_or_cut_file_is_one_sentence(kind):
    content = file_of(kind, (64, 64))
    for damaged in (content[:16], content[: len(content) // 2], content[:12] + b"\xff" * 80):
        with pytest.raises(
            vf.ConfigError, match=f"image/{kind.lower()}. cannot be decoded: "
        ) as error:
            vf.decode_image(damaged)
        assert "\n" not in str(error.value)
        assert " at 0x" not in str(error.value)


def test_other_formats_are_refused_by_name():
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'><script/></svg>"
    for content, name in (
        (svg, "another format"),
        (b"", "another"),
        (file_of("TIFF"), "image/tiff"),
    ):
        for use in (vf.image_part, vf.decode_image):
            with pytest.raises(vf.ConfigError, match=f"one of PNG, JPEG, WEBP, GIF.*{name}"):
                use(content)
    url = "data:image/png;base64," + base64.b64encode(svg).decode()
    with pytest.raises(vf.ConfigError, match="another format"):
        vf.image_part(url)
    assert set(FORMATS.values()) == {"png", "jpg", "webp", "gif"}


def test_sources_that_cannot_be_read_are_named(tmp_path):
    large = tmp_path / "large.png"
    with open(large, "wb") as file:
        file.truncate(MAX_IMAGE_BYTES + 1)
    for source, sentence in (
        (tmp_path / "none.png", "none.png.* cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        ("/dev/zero", "no regular file"),
        (large, "longer than 20 MiB"),
        ("data:image/png;base64,%%%", "not base64"),
        ("data:image/png;base64," + "A" * (MAX_IMAGE_BYTES * 2), "longer than 20 MiB"),
        (7, "not int"),
    ):
        with pytest.raises(vf.ConfigError, match=sentence):
            vf.image_part(source)


def test_a_remote_image_is_passed_on_but_its_bytes_are_not_fetched():
    part = vf.image_part("https://host/a.png")
    assert part == {"type": "image_url", "image_url": {"url": "https://host/a.png"}}
    with pytest.raises(vf.ConfigError, match=r"host/a.png.*not fetched.*vf.image_part\(path\)"):
        image_bytes(part)
    with pytest.raises(vf.ConfigError, match="holds no image"):
        image_bytes({"type": "text", "text": "a"})


def test_without_pillow_the_sentence_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    part = vf.image_part(CONTENT)
    assert image_bytes(part) == CONTENT
    with pytest.raises(vf.ConfigError, match=r"decoded by Pillow: .*images"):
        vf.decode_image(CONTENT)


CONTENT = file_of()
