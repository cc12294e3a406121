"""Labels of a person: who may write them, where they are kept, and what reads them."""

from __future__ import annotations

import http.client
import json
from urllib.parse import quote

import pytest

import verifiers as vf
from verifiers.results.labels import LABELS_NAME, read_labels, write_label
from verifiers.testing import ScriptedClient
from verifiers.view.app import make_app
from verifiers.view.catalog import Catalog
from verifiers.view.export import export
from verifiers.view.guard import Guard
from verifiers.view.library import Library

RUN = "evals/sums--m/1"


@pytest.fixture
def sums(tmp_path):
    """Eight rollouts; the reward calls the even ones right."""
    rows = [{"question": str(n), "answer": ""} for n in range(8)]
    env = vf.SingleTurnEnv(
        dataset=rows, rubric=vf.Rubric([lambda prompt: float(int(prompt[-1].content) % 2 == 0)])
    )
    env.env_id = "sums"
    env.evaluate_sync(
        ScriptedClient("x"), "m", num_examples=-1, max_concurrent=1, results_path=tmp_path / RUN
    )
    return tmp_path


def posted(server, body, path="/api/label", **headers):
    """Status and answer of a request that writes; a header that is None is left out."""
    origin = f"http://127.0.0.1:{server.server.port}"
    token = server.ask(f"labels?run={quote(RUN)}")["token"]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Origin": origin, "Content-Type": "application/json", "X-Vf-View": token} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.server.port, timeout=20)
    connection.request(
        "POST", path, content, {name: value for name, value in sent.items() if value is not None}
    )
    answer = connection.getresponse()
    reply = answer.status, answer.read()
    connection.close()
    return reply


RIGHT = {"run": RUN, "row": 0, "label": True}


def test_a_label_is_kept_beside_the_run_and_nothing_else_changes(serve, sums):
    server = serve(sums)
    before = {path.name: path.read_bytes() for path in (sums / RUN).iterdir()}
    status, answer = posted(server, RIGHT)
    assert status == 200
    assert json.loads(answer)["labels"] == {"0": True}
    after = {path.name: path.read_bytes() for path in (sums / RUN).iterdir()}
    assert after.pop(LABELS_NAME)
    assert after == before
    posted(server, RIGHT | {"label": None})
    assert server.ask(f"labels?run={quote(RUN)}")["labels"] == {}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": None},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Content_Type": "text/plain"},
        {"X_Vf_View": "guessed"},
        {"X_Vf_View": None},
        {"X_Vf_View": "é"},
        {"Host": "evil.example"},
    ],
    ids=str,
)
def test_a_page_of_another_site_cannot_write(serve, sums, headers):
    server = serve(sums)
    status, _ = posted(server, RIGHT, **headers)
    assert status in (403, 421)
    assert not (sums / RUN / LABELS_NAME).exists()
    assert posted(server, RIGHT)[0] == 200  # negative control


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"run": "evals/sums--m/1", "row": true, "label": true}', 400),
        (b'{"run": "evals/sums--m/1", "row": 0, "label": "yes"}', 400),
        (b'{"run": "evals/sums--m/1", "row": 99, "label": true}', 404),
        (b'{"run": "../evals/sums--m/1", "row": 0, "label": true}', 404),
        (b" " * 5000, 413),
    ],
)
def test_what_is_no_label_is_refused(serve, sums, body, status):
    assert posted(serve(sums), body)[0] == status
    assert not (sums / RUN / LABELS_NAME).exists()


def test_no_link_is_followed_and_nothing_else_can_be_written(serve, sums):
    server = serve(sums)
    for path in ("/api/labels", "/api/rollout", "/", "/api/label/"):
        assert posted(server, RIGHT, path=path)[0] == 405
    victim = sums / "victim"
    victim.write_text("mine")
    (sums / RUN / LABELS_NAME).symlink_to(victim)
    assert posted(server, RIGHT)[0] == 500
    assert victim.read_text() == "mine"


def test_a_server_for_others_writes_nothing(sums):
    guard = make_app(Library(Catalog([sums])), host="0.0.0.0").build_middleware_stack()
    while not isinstance(guard, Guard):
        guard = guard.app
    assert guard.token is None


def test_labels_are_read_by_the_results_and_count_for_what_was_read(sums):
    rows = [json.loads(line) for line in (sums / RUN / "results.jsonl").read_text().splitlines()]
    by_id = {row["example_id"]: row for row in rows}
    assert "label" not in vf.load_results(sums / RUN).outputs[0]
    for n, label in ((0, True), (1, False), (2, False), (3, False), (4, True), (5, True)):
        write_label(sums / RUN, by_id[n], label)
    write_label(sums / RUN, by_id[5], None)
    write_label(sums / RUN, by_id[6] | {"completion": "another answer"}, False)
    with (sums / RUN / LABELS_NAME).open("ab") as file:
        file.write(b'{"unfinished')
    results = vf.load_results(sums / RUN)
    labels = [output["label"] for output in results.outputs]
    assert labels == [True, False, False, False, True, None, None, None]
    measured = results.agreement("label")
    counts = measured.true_yes, measured.false_yes, measured.true_no, measured.false_no
    assert counts == (2, 1, 2, 0)
    assert measured.kappa == pytest.approx(8 / 13)  # by hand: observed 4/5, by chance 12/25
    shown = Library(Catalog([sums])).labels(RUN)["agreement"]
    assert shown["kappa"] == pytest.approx(measured.kappa)
    assert len(read_labels(sums / RUN)) == 6


def test_a_reader_labels_by_keys_and_sees_the_agreement(page, serve, sums):
    server = serve(sums)
    page.open(server.url + "#/run/" + quote(RUN, safe="") + "/0")
    page.wait_text("right")
    for key in ("y", "n", "n"):  # right, wrong, wrong of rollouts 0, 1, 2
        page.press(key)
        page.wait(lambda: page.count(".labelled [aria-pressed=true]") == 1)
        page.press("j")
        page.wait(lambda: page.count(".labelled [aria-pressed=false]") == 2)
    assert server.ask(f"labels?run={quote(RUN)}")["labels"] == {"0": True, "1": False, "2": False}
    page.picture("labelled")
    page.press("u")
    page.wait_text("Cohen's kappa")
    assert "labelled\n3\n67% as the reward says" in page.text(".cards")
    assert "Label" in page.texts(".head [role=columnheader]")
    page.find("input.wide").send_keys("label = 0")
    page.press("TAB")
    page.wait_text("2 rollouts")
    page.picture("labels")


def test_a_copy_shows_the_labels_and_takes_none(page, sums, tmp_path_factory):
    rows = {
        row["example_id"]: row
        for row in map(json.loads, (sums / RUN / "results.jsonl").read_text().splitlines())
    }
    for n, label in ((0, True), (1, False), (2, False)):
        write_label(sums / RUN, rows[n], label)
    url = export(Library(Catalog([sums])), tmp_path_factory.mktemp("copy") / "site").as_uri()
    page.open(url + "#/run/" + quote(RUN, safe=""))
    page.wait_text("Cohen's kappa")
    assert "labelled\n3\n67% as the reward says" in page.text(".cards")
    page.find("input.wide").send_keys("label = 0")
    page.press("TAB")
    page.wait_text("2 rollouts")
    for row, said in ((0, "labelled right"), (2, "labelled wrong"), (3, "")):
        page.open(url + "#/run/" + quote(RUN, safe="") + f"/{row}")
        page.wait(lambda said=said: page.text(".labelled") == said)
        assert page.count(".labelled button") == 0
    page.press("y")
    assert page.text(".labelled") == ""
    assert len(read_labels(sums / RUN)) == 3
    page.open(url + "#/run/" + quote(RUN, safe="") + "/2")
    page.wait_text("labelled wrong")
    page.picture("labelled-copy")


def test_a_label_after_one_that_a_full_disk_tore_is_kept(serve, sums):
    server, file = serve(sums), sums / RUN / LABELS_NAME
    posted(server, RIGHT)
    posted(server, RIGHT | {"row": 1, "label": False})
    file.write_bytes(file.read_bytes()[:-20])
    posted(server, RIGHT | {"row": 2})
    assert server.ask(f"labels?run={quote(RUN)}")["labels"] == {"0": True, "2": True}
    assert [label for _, label in read_labels(sums / RUN).values()] == [True, True]
