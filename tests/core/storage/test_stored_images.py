"""Images of saved rollouts: stored once by hash, durable before their row, read back as they were."""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.data.images import MAX_IMAGE_BYTES, image_hash
from verifiers.errors import JournalError
from verifiers.runtime.failpoints import armed
from verifiers.runtime.json import decode_row, encode_row
from verifiers.storage.images import (
    IMAGES_NAME,
    StoredImages,
    check_stands_alone,
    set_aside,
    stored_name,
)
from verifiers.storage.journal import Journal, read_journal
from verifiers.testing import ScriptedClient

BEGINNINGS = {"png": b"\x89PNG\r\n\x1a\n", "jpg": b"\xff\xd8\xff", "gif": b"GIF89a"}


def image(number=0, kind="png"):
    """A file with the first bytes of an image: storing looks at no others."""
    return BEGINNINGS[kind] + b"content %d" % number


def row_of(*contents, **more):
    parts = [vf.image_part(content) for content in contents]
    return {
        "prompt": [{"role": "user", "content": [{"type": "text", "text": "?"}, *parts]}],
        **more,
    }


def written(path, *rows):
    with Journal.open(path) as journal:
        for row in rows:
            journal.append_sync(row)
    return path.read_text()


def files_of(folder):
    return sorted(file.name for file in (folder / IMAGES_NAME).iterdir())


def test_rows_refer_to_images_that_are_stored_once(tmp_path):
    rows = [row_of(image(n % 2), image(2, "jpg"), key=n) for n in range(20)]
    text = written(tmp_path / "results.jsonl", *rows, rows[:3])
    assert "base64" not in text
    names = [f"{image_hash(content)}.{kind}" for content, kind in (
        (image(0), "png"), (image(1), "png"), (image(2, "jpg"), "jpg"))]  # fmt: skip
    assert files_of(tmp_path) == sorted(names)
    first = json.loads(text.partition("\n")[0])
    assert first["prompt"][0]["content"][1]["image_url"]["url"] == f"images/{names[0]}"
    back = list(read_journal(tmp_path / "results.jsonl"))
    assert back == [*rows, *rows[:3]]
    urls = [row["prompt"][0]["content"][1]["image_url"]["url"] for row in back[:4]]
    assert urls[0] is urls[2], "rows with the same image share its text"


def test_a_journal_without_images_has_no_folder_for_them(tmp_path):
    written(tmp_path / "results.jsonl", {"key": 1, "text": "data:image/png;base64,iVBORw0KGgo="})
    assert not (tmp_path / IMAGES_NAME).exists()


def test_what_would_not_come_back_as_it_was_stays_in_its_row(tmp_path):
    plain = base64.b64encode(image()).decode()
    svg = base64.b64encode(b"<svg/>").decode()
    large = base64.b64encode(image() + bytes(MAX_IMAGE_BYTES)).decode()
    urls = (
        f"data:image/jpeg;base64,{plain}",  # of another type
        f"data:image/png;base64,{plain[:8]} {plain[8:]}",
        f"data:image/png;charset=x;base64,{plain}",
        f"data:image/png;base64,{plain}\"",
        "data:image/png;base64,%%%",
        "data:image/png;base64,",
        f"data:image/svg+xml;base64,{svg}",
        f"data:image/png;base64,{large}",
        "https://host/a.png",
        "images/../../etc/passwd.png",
        "images/" + "0" * 63 + ".png",
    )  # fmt: skip
    rows = [{"part": {"image_url": {"url": url}}} for url in urls]
    texts = [{"text": vf.image_part(image())["image_url"]["url"]}, {'odd"url': "data:image/x"}]
    written(tmp_path / "results.jsonl", *rows, *texts)
    assert list(read_journal(tmp_path / "results.jsonl")) == [*rows, *texts]
    assert not (tmp_path / IMAGES_NAME).exists()


def test_texts_of_a_model_are_neither_set_aside_nor_read_as_references(tmp_path):
    reference = f"images/{image_hash(image())}.png"
    data = vf.image_part(image())["image_url"]["url"]
    texts = [f'"url":"{data}"', f'{{"url": "{reference}"}}', reference, data, f'\\"url":"{data}']
    row = row_of(image(), completion=[{"role": "assistant", "content": text} for text in texts])
    written(tmp_path / "results.jsonl", row)
    assert list(read_journal(tmp_path / "results.jsonl")) == [row]
    assert len(files_of(tmp_path)) == 1


def test_setting_aside_and_restoring_is_lossless_at_any_depth(tmp_path):
    part = vf.image_part(image())
    row = {
        "a": [[{"b": {"url": part["image_url"]["url"]}}], part],
        "image_url": part["image_url"]["url"],
        "surrogate": "\ud800",
        "source": {"path": part["image_url"]["url"]},
    }
    line, images = set_aside(encode_row(row))
    assert b"base64" not in line
    assert list(images.values()) == [image()]
    written(tmp_path / "results.jsonl", row)
    assert StoredImages(tmp_path).decode(line) == row


@pytest.mark.parametrize("damage", ["deleted", "changed", "link", "pipe", "folder"])
def test_an_image_that_is_lost_is_named_and_costs_no_other_row(tmp_path, damage, caplog):
    rows = [row_of(image(n), key=n) for n in range(3)]
    written(tmp_path / "results.jsonl", *rows)
    name = f"{image_hash(image(1))}.png"
    file = tmp_path / IMAGES_NAME / name
    file.unlink()
    if damage == "changed":
        file.write_bytes(image(7))
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(image(1))
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":
        os.mkfifo(file)
    elif damage == "folder":
        file.mkdir()
    with caplog.at_level(logging.WARNING):
        back = list(read_journal(tmp_path / "results.jsonl"))
    assert [back[0], back[2]] == [rows[0], rows[2]]
    assert back[1]["prompt"][0]["content"][1]["image_url"]["url"] == f"images/{name}"
    assert [record.getMessage().count(str(file)) for record in caplog.records] == [1]
    for row in (back[0], rows[1]):
        assert check_stands_alone(encode_row(row)) == encode_row(row)
    with pytest.raises(JournalError, match=f"lacks its image images/{name}.*restore"):
        check_stands_alone(encode_row(back[1]))


def test_a_row_that_was_read_without_its_image_can_be_written_again(tmp_path):
    row = row_of(image())
    (tmp_path / "a").mkdir()
    written(tmp_path / "a/r.jsonl", row)
    for file in (tmp_path / "a" / IMAGES_NAME).iterdir():
        file.unlink()
    (lost,) = read_journal(tmp_path / "a/r.jsonl")
    (tmp_path / "b").mkdir()
    written(tmp_path / "b/r.jsonl", lost)
    assert list(read_journal(tmp_path / "b/r.jsonl")) == [lost]


def test_references_lead_to_no_other_folder(tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(image())
    name = f"{image_hash(image())}.png"
    for url in (f"images/../{name}", f"../images/{name}", "images/../secret.png", str(secret),
                f"images/{name}/../../secret.png", f"images/{name}\n", f"IMAGES/{name}",
                f"images/{'0' * 64}.svg"):  # fmt: skip
        assert stored_name(url) is None
        value = {"url": url}
        assert StoredImages(tmp_path).restored({"url": url}) == value


def test_images_are_written_into_no_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / IMAGES_NAME).symlink_to(tmp_path / "elsewhere")
    with Journal.open(tmp_path / "results.jsonl") as journal:
        with pytest.raises(JournalError, match="images is a symbolic link"):
            journal.append_sync(row_of(image()))
    assert not list((tmp_path / "elsewhere").iterdir())
    assert list(read_journal(tmp_path / "results.jsonl")) == []


def test_a_file_of_another_size_is_written_again(tmp_path):
    written(tmp_path / "results.jsonl", row_of(image()))
    (file,) = (tmp_path / IMAGES_NAME).iterdir()
    file.write_bytes(b"cut")
    written(tmp_path / "results.jsonl", row_of(image(), key=1))
    assert file.read_bytes() == image()


def test_a_full_disk_fails_the_row_and_keeps_those_before(tmp_path):
    with Journal.open(tmp_path / "results.jsonl") as journal:
        journal.append_sync(row_of(image(0)))
        with armed("atomic_write.before_rename:1:ENOSPC"):
            with pytest.raises(JournalError, match="No space"):
                journal.append_sync(row_of(image(1)))
    assert list(read_journal(tmp_path / "results.jsonl")) == [row_of(image(0))]


WRITER = """
import sys, pathlib
sys.path.insert(0, sys.argv[2])
from test_stored_images import row_of, image
from verifiers.storage.journal import Journal
with Journal.open(pathlib.Path(sys.argv[1])) as journal:
    for number in range(40):
        journal.append_sync([row_of(image(number), key=number), row_of(image(0), key=-number)])
"""


@pytest.mark.parametrize(
    "point",
    ["atomic_write.before_rename:3", "journal.before_write:4", "journal.after_write:5",
     "journal.after_fsync:6"],
)  # fmt: skip
def test_killed_at_any_point_every_row_has_its_image(tmp_path, point):
    path = tmp_path / "results.jsonl"
    writer = subprocess.run(
        [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)],
        env={**os.environ, "VF_FAILPOINT": point},
    )
    assert writer.returncode == -9
    with Journal.open(path) as journal:
        assert journal.num_recovered >= 2
    for row in read_journal(path):
        assert row == row_of(image(max(row["key"], 0)), key=row["key"])


def test_without_the_order_a_killed_run_has_rows_without_images(tmp_path, monkeypatch):
    """The negative control: rows first, images later."""
    from verifiers.storage import journal as module

    monkeypatch.setattr(module, "write_images", lambda folder, images: None)
    written(tmp_path / "results.jsonl", row_of(image()))
    (row,) = read_journal(tmp_path / "results.jsonl")
    assert row != row_of(image())
    assert decode_row(encode_row(row)) == row


def test_branches_share_turns_with_images(tmp_path):
    """A branch's row lacks what its parent has, images too; both are read back whole."""
    new = pytest.importorskip("PIL.Image", reason="the extra images is not installed").new

    class Shades(vf.MultiTurnEnv):
        def env_response(self, messages, state):
            shade = new("RGB", (8, 8), (40 * len(state["trajectory"]), 0, 0))
            return [{"role": "user", "content": [{"type": "text", "text": "?"}, shade]}]

    env = Shades(
        dataset=[{"question": "What?", "image": new("RGB", (8, 8), (1, 2, 3))}],
        max_turns=3,
        branching=vf.Branching(at=1, branches=2),
        rubric=vf.Rubric([lambda completion: float(len(completion))]),
    )
    options = {"rollouts_per_example": 4, "state_columns": ["trajectory"]}
    results = env.evaluate(
        ScriptedClient(lambda request: f"reply {len(request.prompt)}"),
        "m",
        save_results=True,
        results_path=tmp_path,
        **options,
    )
    saved = vf.load_results(tmp_path)

    def messages(output):
        turns = [(step["prompt"], step["completion"]) for step in output["trajectory"]]
        return output.prompt, output.completion, turns

    assert list(map(messages, saved.outputs)) == list(map(messages, results.outputs))
    assert len(list((tmp_path / "images").iterdir())) == 3
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert min(map(len, lines)) < 0.75 * max(map(len, lines))  # a branch lacks what it shares
