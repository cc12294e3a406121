"""Images that a run stores beside its rows: served by name, shown in the page and in a copy."""

from __future__ import annotations

import shutil
from urllib.parse import quote

import pytest

from support import view_runs
from support.browser import PHONE_WIDTH, too_wide
from verifiers.storage.images import IMAGES_NAME
from verifiers.view.catalog import Catalog
from verifiers.view.export import export
from verifiers.view.library import Library

LOADED = "return [...document.querySelectorAll('.message img')].map((image) => image.naturalWidth)"


@pytest.fixture
def run(tmp_path):
    return view_runs.image_run(tmp_path / "outputs")


def parts_of(served, run_id):
    page = served.ask(f"rollout?run={quote(run_id, safe='')}&row=0")
    return [part for message in page["messages"] for part in message["parts"]]


def test_an_image_is_served_by_its_name_alone(serve, run, tmp_path):
    served = serve(tmp_path / "outputs")
    (listed,) = served.ask("runs")["runs"]
    (url,) = [part["url"] for part in parts_of(served, listed["id"]) if part["type"] == "image"]
    (file,) = (run / IMAGES_NAME).iterdir()
    assert file.name in url
    status, headers, body = served.get(f"/{url}")
    assert (status, headers["content-type"]) == (200, "image/png")
    assert headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert body == file.read_bytes()
    (run / "secret.png").write_bytes(body)
    (run / IMAGES_NAME / "secret.svg").write_bytes(b"<svg/>")
    for name in ("secret.svg", "../secret.png", "..%2Fsecret.png", "%2Fetc%2Fpasswd", "", "a" * 64):
        status, _, _ = served.get(f"/{url.partition('&name=')[0]}&name={name}")
        assert status == 404, name
    assert served.get(f"/api/image?run=none&name={file.name}")[0] == 404
    file.write_bytes(b"<svg/>")
    assert served.get(f"/{url}")[0] == 500, "its content is not that of its name"


def test_an_image_that_is_gone_is_named(serve, run, tmp_path):
    served = serve(tmp_path / "outputs")
    (listed,) = served.ask("runs")["runs"]
    (file,) = (run / IMAGES_NAME).iterdir()
    file.unlink()
    texts = [part["text"] for part in parts_of(served, listed["id"]) if part["type"] == "address"]
    assert texts[0] == f"images/{file.name} was moved or deleted"


def test_a_copy_has_the_images_and_shows_them_from_the_disk(page, run, tmp_path):
    url = export(Library(Catalog([tmp_path / "outputs"])), tmp_path / "site").as_uri()
    (name,) = [file.name for file in (run / IMAGES_NAME).iterdir()]
    assert [file.name for file in (tmp_path / "site" / IMAGES_NAME).iterdir()] == [name]
    shutil.rmtree(tmp_path / "outputs")
    page.open(url + "#/run/" + quote("evals/pictures--sees/00aa11bb", safe="") + "/0")
    page.wait_text("What is on the picture?")
    page.wait(lambda: page.js(LOADED) == [48])
    page.picture("stored-image-copy")


def test_on_a_phone_an_image_is_as_wide_as_the_screen_at_most(phone, serve, run, tmp_path):
    served = serve(tmp_path / "outputs")
    (listed,) = served.ask("runs")["runs"]
    phone.open(served.url + "#/run/" + quote(listed["id"], safe="") + "/0")
    phone.wait(lambda: phone.js(LOADED) == [48])
    phone.js("document.querySelector('.message img').style.width = '3000px'")
    phone.picture("phone-stored-image")
    assert phone.js("return innerWidth") == PHONE_WIDTH
    assert too_wide(phone) == []
    assert phone.js("return document.querySelector('.message img').loading") == "lazy"
