"""Images in rows, in messages and in the answers of tools: all become content parts."""

from __future__ import annotations

import io
import os

import pytest

import verifiers as vf
from verifiers.data.examples import Table
from verifiers.data.images import image_bytes, image_url
from verifiers.data.messages import normalize_chat
from verifiers.data.row_format import RowFormat, format_row
from verifiers.environments.tool_answers import as_answer
from verifiers.testing import FakeServer

Image = pytest.importorskip("PIL.Image", reason="the extra images is not installed")


def file_of(color="red"):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(file, "JPEG")
    return file.getvalue()


CONTENT = file_of()
PICTURE = Image.open(io.BytesIO(CONTENT))
PART = vf.image_part(PICTURE)
TEXT = {"type": "text", "text": "?"}


def prompt_of(row, **settings):
    (example,) = Table.of([row], **settings)
    assert format_row(example.row, RowFormat()) == example.row
    return example.row["prompt"]


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def test_a_column_of_images_is_part_of_the_question():
    assert prompt_of({"question": "?", "image": PICTURE}) == user(PART, TEXT)
    with_system = prompt_of({"question": "?", "images": [PICTURE] * 2}, system_prompt="Look.")
    assert with_system == [vf.SystemMessage("Look."), *user(PART, PART, TEXT)]
    assert prompt_of({"prompt": user("?"), "images": [PICTURE]}) == user(PART, TEXT)
    places = user({"type": "image"}, "?", {"type": "image", "text": None})
    row = {"prompt": places, "image": PICTURE, "images": [{"bytes": CONTENT, "path": None}]}
    assert prompt_of(row) == user(PART, TEXT, vf.image_part(CONTENT))
    # a prompt that has its images is complete
    assert prompt_of({"prompt": user(PART, "?"), "image": PICTURE}) == user(PART, TEXT)
    assert prompt_of({"question": "?", "image": "a text"}) == [vf.UserMessage("?")]


@pytest.mark.parametrize("is_list", [False, True])
def test_an_image_column_of_datasets_keeps_the_bytes_of_its_files(is_list):
    import datasets

    cell = {"bytes": CONTENT, "path": None}
    name, value, feature = ("image", cell, datasets.Image())
    if is_list:
        name, value, feature = "images", [cell] * 2, datasets.List(datasets.Image())
    rows = datasets.Dataset.from_dict({"question": ["?"], name: [value]}).cast_column(name, feature)
    (example,) = Table.of(rows)
    parts = example.row["prompt"][0]["content"]
    assert [image_bytes(part) for part in parts[:-1]] == [CONTENT] * (1 + is_list)
    assert len(example.hash) == 64
    assert rows[0][name] != value, "the caller's dataset still decodes"


def test_parts_of_a_prompt_may_be_images_in_every_form():
    forms = [PICTURE, {"type": "image", "image": PICTURE}, {"bytes": CONTENT, "path": None},
             {"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}},
             {"type": "image_url", "image_url": PICTURE},
             {"type": "image", "image": PART["image_url"]["url"]}]  # fmt: skip
    low = vf.image_part(PICTURE, detail="low")
    expected = [PART, PART, vf.image_part(CONTENT), low, PART, PART]
    assert normalize_chat([{"role": "user", "content": forms}])[0]["content"] == expected
    assert normalize_chat([vf.UserMessage(forms)])[0]["content"] == expected
    assert normalize_chat({"role": "user", "content": PICTURE})[0]["content"] == [PART]
    normal = vf.UserMessage([TEXT, PART])
    assert normalize_chat([normal])[0] is normal


def test_files_of_rows_are_those_of_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for folder in (tmp_path, tmp_path / "work"):
        (folder / "a.jpg").write_bytes(CONTENT)
    os.symlink(tmp_path / "a.jpg", tmp_path / "work" / "link.jpg")
    part = vf.image_part(CONTENT)
    for url in ("a.jpg", str(tmp_path / "work/a.jpg"), (tmp_path / "work/a.jpg").as_uri()):
        for form in (
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image", "image": url},
        ):
            assert prompt_of({"prompt": user(form, "?")}) == user(part, TEXT)
    for url in (
        "../a.jpg",
        "link.jpg",
        "/etc/a.PNG",
        (tmp_path / "a.jpg").as_uri(),
        "file:///dev/zero",
    ):
        with pytest.raises(
            vf.DatasetError, match=r"outside of the working folder.*image_part\(path\)"
        ):
            prompt_of({"prompt": user({"type": "image_url", "image_url": {"url": url}})})
    with pytest.raises(vf.DatasetError, match=r"none.png.*No such file"):
        prompt_of({"prompt": user({"type": "image_url", "image_url": {"url": "none.png"}})})
    other = user({"type": "image_url", "image_url": {"url": "s3://bucket/a.png"}})
    assert prompt_of({"prompt": other}) == other
    # no message of a model, an agent or a tool reads a file
    messages = user({"type": "image_url", "image_url": {"url": "a.jpg"}})
    assert normalize_chat(messages) == messages


@pytest.mark.parametrize(
    ("row", "settings", "sentence"),
    [
        (
            {"question": "?", "image": PICTURE},
            {"message_type": "completion"},
            "completion mode is text",
        ),
        ({"prompt": user({"type": "image"})}, {}, "has no image.*column 'images'"),
        ({"prompt": user({"type": "image"}), "images": [PICTURE] * 2}, {}, "1 places .* 2 images"),
        (
            {"question": "?", "image": {"bytes": b"<svg/>", "path": None}},
            {},
            "'image'.*another format",
        ),
        (
            {"question": "?", "image": {"bytes": None, "path": "/none.png"}},
            {},
            "none.png.*No such file",
        ),
    ],
)
def test_what_cannot_be_a_prompt_is_said(row, settings, sentence):
    with pytest.raises(vf.DatasetError, match=f"row 0 of the dataset.*{sentence}"):
        prompt_of(row, **settings)


def test_the_answer_of_a_tool_may_be_an_image():
    for result, expected in (
        (PICTURE, [PART]),
        (PART, [PART]),
        ({"bytes": CONTENT, "path": None}, [vf.image_part(CONTENT)]),
        (["?", PICTURE, TEXT], [TEXT, PART, TEXT]),
        (["a", "b"], "['a', 'b']"),
        (TEXT, '{"type": "text", "text": "?"}'),
        ([PICTURE, 3], str([PICTURE, 3])),
    ):
        assert as_answer(result, "c")["content"] == expected
    with pytest.raises(vf.ToolCallError, match="another format"):
        as_answer({"bytes": b"<svg/>", "path": None}, "c")


@pytest.mark.parametrize("api", ["chat_completions", "responses", "messages"])
def test_a_turn_and_a_tool_send_their_images_as_the_api_takes_them(api):
    def look():
        """Look."""
        return PICTURE

    class Shows(vf.ToolEnv):
        async def env_response(self, messages, state, **kwargs):
            answers = await super().env_response(messages, state, **kwargs)
            return [*answers, {"role": "user", "content": ["and this?", PICTURE]}]

    clients = {
        "chat_completions": vf.OpenAIChatCompletionsClient,
        "responses": vf.OpenAIResponsesClient,
        "messages": vf.AnthropicMessagesClient,
    }
    env = Shows(dataset=[{"question": "?", "image": PICTURE}], tools=[look], max_turns=5)
    call = vf.AssistantMessage("", tool_calls=[vf.ToolCall("c1", "look", {})])
    with FakeServer([call, "red"]) as server:
        client = clients[api](base_url=server.url, api_key="k")
        results = env.evaluate(client, "scripted", num_examples=1, sampling_args={"max_tokens": 9})
        assert results.outputs[0]["error"] is None, results.outputs[0]["error"]
        sent = str(server.requests[-1])
    data = PART["image_url"]["url"].partition(",")[2]
    assert sent.count(data) == 3
    found = [part for message in results["completion"][0] for part in message.get("content") or ()]
    assert [image_url(part) for part in found if image_url(part)] == [PART["image_url"]["url"]] * 2
