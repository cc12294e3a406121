"""Media types by the names that vendors know: what goes out of the clients of the three APIs."""

from __future__ import annotations

import base64
import json

import pytest

import verifiers as vf
from verifiers.clients.dialects import messages, responses
from verifiers.clients.payload import sendable
from verifiers.data.media import media_type, properly_named
from verifiers.testing import Behaviour, FakeServer
from verifiers.view.rollout import IMAGE


def encoded(data):
    return base64.b64encode(data + b"0" * 40).decode()


JPEG, PNG = encoded(b"\xff\xd8\xff\xe0"), encoded(b"\x89PNG\r\n\x1a\n")
GIF, WEBP = encoded(b"GIF89a"), encoded(b"RIFF\x00\x00\x00\x00WEBPVP8 ")
UNKNOWN = encoded(b"\x00\x01\x02\x03")

PICTURES = {
    "data:image/jpg;base64,": (JPEG, "image/jpeg"),
    "data:image/JPEG;base64,": (JPEG, "image/jpeg"),
    "data:IMAGE/PNG;base64,": (PNG, "image/png"),
    "DATA:image/png;base64,": (PNG, "image/png"),
    "data:image/jpeg;charset=utf-8;base64,": (JPEG, "image/jpeg"),
    "data:image/jpeg; base64,": (JPEG, "image/jpeg"),
    "data:image/jpeg;BASE64,": (JPEG, "image/jpeg"),
    "data:image/pjpeg;base64,": (UNKNOWN, "image/jpeg"),
    "data:image/x-png;base64,": (UNKNOWN, "image/png"),
    "data:;base64,": (PNG, "image/png"),
    "data:base64,": (JPEG, "image/jpeg"),
    "data:jpg;base64,": (UNKNOWN, "image/jpeg"),
    "data:application/octet-stream;base64,": (WEBP, "image/webp"),
    "data:image/png;name=a.gif;base64,": (GIF, "image/gif"),
    "data:image/png;base64,\n": (JPEG, "image/jpeg"),
}


def prompt_of(url):
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    return [vf.UserMessage([{"type": "text", "text": "what?"}, part])]


@pytest.mark.parametrize("head", PICTURES)
def test_a_picture_goes_out_under_the_proper_name_of_its_type(head):
    data, name = PICTURES[head]
    request = vf.ModelRequest(prompt_of(head + data), "m")
    url = f"data:{name};base64,{head.partition(',')[2]}{data}"
    (sent,) = sendable(request)
    assert sent["content"][1]["image_url"] == {"url": url, "detail": "low"}
    (block,) = [
        b for b in messages.request_body(request)["messages"][0]["content"] if "source" in b
    ]
    assert block["source"]["media_type"] == name
    (item,) = responses.request_body(request)["input"]
    assert item["content"][1]["image_url"] == url
    assert IMAGE.fullmatch(properly_named(request.prompt[0].content[1])["image_url"]["url"])
    assert request.prompt[0].content[1]["image_url"]["url"] == head + data


@pytest.mark.parametrize(
    "url",
    [
        "http://host/a.jpg",
        "https://host/a.JPG?x=data:image/jpg;base64,AAAA",
        f"data:image/png;base64,{PNG}",
        f"data:image/heic;base64,{UNKNOWN}",
    ],
)
def test_what_is_named_properly_is_the_same_object(url):
    request = vf.ModelRequest(prompt_of(url), "m")
    assert sendable(request) is request.prompt


REFUSED = [
    f"data:image/bmp;base64,{encoded(b'BM')}",
    f"data:image/svg+xml;base64,{encoded(b'<svg')}",
    f"data:image/png;base64,{encoded(b'II*' + bytes(1))}",
    "data:image/png,%89PNG",
    "data:image/png;base64",
    f"data:application/pdf;base64,{encoded(b'%PDF-1.7')}",
    f"data:text/plain;base64,{UNKNOWN}",
]


@pytest.mark.parametrize("url", REFUSED)
def test_a_picture_that_anthropic_does_not_take_is_refused_before_the_request(url):
    row = {"prompt": [dict(message) for message in prompt_of(url)], "answer": "x"}
    env = vf.SingleTurnEnv(dataset=[row], rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
    with FakeServer("ok") as server:
        config = vf.ClientConfig(client_type="anthropic_messages", api_base_url=server.url)
        with pytest.raises(vf.ConfigError, match="takes pictures of image/jpeg"):
            env.evaluate(config, "m", num_examples=1)
        assert server.count == 0


def test_a_server_that_knows_the_proper_names_alone_answers():
    def script(hit):
        (block,) = [b for b in hit.json()["messages"][0]["content"] if b["type"] == "image"]
        name = block["source"]["media_type"]
        if name not in messages.PICTURES:
            return Behaviour(400, body=json.dumps(messages.error_body(400, f"not {name!r}")))
        return None

    row = {"prompt": [dict(m) for m in prompt_of(f"data:image/jpg;base64,{JPEG}")], "answer": "x"}
    env = vf.SingleTurnEnv(dataset=[row], rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
    with FakeServer("ok", script=script) as server:
        config = vf.ClientConfig(client_type="anthropic_messages", api_base_url=server.url)
        assert env.evaluate(config, "m", num_examples=1)["reward"] == [1.0]


OTHER_PARTS = {
    "a block": (
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpg", "data": JPEG}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": JPEG}},
    ),
    "an item": (
        {"type": "input_image", "image_url": f"data:image/JPG;base64,{JPEG}"},
        {"type": "input_image", "image_url": f"data:image/jpeg;base64,{JPEG}"},
    ),
    "a sound called as a type": (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "audio/X-WAV"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ),
    "a sound called mpeg": (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "audio/mpeg; rate=1"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
    ),
    "a sound called MP3": (
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": ".MP3"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
    ),
}


@pytest.mark.parametrize(("part", "named"), OTHER_PARTS.values(), ids=OTHER_PARTS)
def test_parts_in_other_forms_are_named_properly_too(part, named):
    assert properly_named(part) == named
    assert properly_named(named) is named


def test_bytes_say_more_than_a_name_and_no_bytes_leave_the_name():
    assert media_type("image/png", JPEG) == "image/jpeg"
    assert media_type("image/avif", "not base64 %") == "image/avif"
