"""Who may ask the server, for what, and with which rules the answer comes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from urllib.parse import quote

import pytest

from support import view_runs
from verifiers.errors import ConfigError
from verifiers.runtime.origins import allowed_hosts
from verifiers.view.app import make_app, static_files
from verifiers.view.catalog import Catalog
from verifiers.view.guard import Guard
from verifiers.view.library import Library
from verifiers.view.server import Server

CAREFUL = "evals/times-table--careful-7b/3fa9c1d2"


async def asked(app, path, headers, query=""):
    """Status of an ASGI application's answer."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(),
        "query_string": query.encode(), "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers],
        "scheme": "http", "http_version": "1.1", "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2),
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil.example:8080",
        "",
        "[::1",
        "127.0.0.1@evil",
    ],
)
def test_a_name_that_is_not_this_machine_is_refused(served, host):
    assert served.get("/api/runs", Host=host)[0] == 421
    assert served.get("/", Host=host)[0] == 421


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:81", "[::1]:9"])
def test_the_names_of_this_machine_are_let_in(served, host):
    assert served.get("/api/runs", Host=host)[0] == 200


async def test_without_the_guard_any_name_reads_the_runs(runs):
    """Negative control: the application behind the guard answers to the name of a
    rebinding site."""
    app = make_app(Library(Catalog([runs])))
    evil = [("host", "evil.example")]
    assert await asked(app, "/api/runs", evil) == 421
    assert await asked(app.router, "/api/runs", evil) == 200


async def test_two_hosts_are_refused(runs):
    app = make_app(Library(Catalog([runs])))
    assert await asked(app, "/api/runs", [("host", "localhost"), ("host", "evil.example")]) == 421
    assert await asked(app, "/api/runs", []) == 421


@pytest.mark.parametrize(
    ("path", "site", "mode", "target", "status"),
    [
        ("/api/runs", "cross-site", "no-cors", "script", 403),
        ("/api/runs", "same-site", "cors", "empty", 403),
        ("/", "cross-site", "navigate", "iframe", 403),
        ("/", "cross-site", "navigate", "document", 200),
        ("/api/runs", "same-origin", "cors", "empty", 200),
    ],
)
def test_another_sites_page_is_refused_and_a_followed_link_is_not(
    served, path, site, mode, target, status
):
    headers = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": mode, "Sec_Fetch_Dest": target}
    assert served.get(path, **headers)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_the_server_only_reads(served, method):
    assert served.get("/api/runs", method)[0] == 405


def test_every_answer_carries_the_policy(served):
    for path in "/ /static/app.js /api/runs /nowhere /api/nothing /api/run?run=none".split():
        _, headers, _ = served.get(path)
        parts = headers["content-security-policy"].split(";")
        policy = dict(part.strip().split(" ", 1) for part in parts)
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["img-src"] == "'self' data:"
        assert policy["font-src"] == "'self'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


FORBIDDEN = "innerHTML outerHTML insertAdjacentHTML document.write eval( srcdoc".split()
FORBIDDEN += ["new Function"]


def test_the_pages_files_hold_no_inline_script_and_no_address_of_another_site():
    page = static_files()["index.html"].decode()
    assert re.findall(r"<script.*", page) == [
        '<script defer src="static/vendor/markdown-it.min.js"></script>',
        '<script defer src="static/vendor/katex.min.js"></script>',
        '<script type="module" src="static/app.js"></script>',
    ]
    assert "style=" not in page
    for name, content in static_files().items():
        if name.endswith(".woff2"):
            continue
        text = content.decode()
        if name.endswith(".txt"):  # a licence
            continue
        for unknown_host in ("http://${e.url}", "http://${i}"):  # markdown-it finds links, here off
            text = text.replace(unknown_host, "")
        for namespace in ("2000/svg", "1998/Math/MathML"):
            text = text.replace(f"http://www.w3.org/{namespace}", "")
        assert "http://" not in text and "https://" not in text, name  # noqa: PT018
        if name.endswith(".js"):
            for forbidden in FORBIDDEN:
                assert forbidden not in text, name


# --- only the runs below the folder ---------------------------------------------------------------


@pytest.fixture
def beside(tmp_path, runs):
    """A folder of runs with another one beside it, and links that lead there."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    shutil.copytree(runs / CAREFUL, inside / "mine")
    shutil.copytree(runs / CAREFUL, outside / "secret")
    (inside / "link").symlink_to(outside / "secret")
    (inside / "files").mkdir()
    (inside / "files" / "results.jsonl").symlink_to(outside / "secret" / "results.jsonl")
    return tmp_path


WAYS_OUT = [
    "../outside/secret",
    "mine/../../outside/secret",
    "..%2Foutside%2Fsecret",
    "/etc",
    "link",
    "files",
    "link/",
    "mine/.",
    "",
    "..",
]


@pytest.mark.parametrize("run", WAYS_OUT)
@pytest.mark.parametrize(
    "question", ["run", "columns", "rollout", "search", "metrics", "previews", "version"]
)
def test_no_name_leads_out_of_the_folder(serve, beside, question, run):
    server = serve(beside / "inside")
    assert server.get(f"/api/{question}?run={quote(run, safe='')}&row=0&rows=0&text=a")[0] == 404
    assert server.get(f"/api/{question}?run=mine&row=0&rows=0&text=a")[0] == (
        404 if question == "metrics" else 200
    )


def test_the_files_are_there_for_who_would_join_or_follow(beside):
    """Negative control: joining the names, or following the links, reads them."""
    inside = beside / "inside"
    for way in ("../outside/secret", "mine/../../outside/secret", "link", "files"):
        assert (inside / way / "results.jsonl").read_bytes()
    assert set(Catalog([inside]).sources()) == {"mine"}
    assert {"link", "mine"} < {entry.name for entry in os.scandir(inside) if entry.is_dir()}


def test_a_folder_that_becomes_a_link_is_refused_although_it_was_found(beside):
    catalog = Catalog([beside / "inside"])
    assert catalog.rows_file("mine").is_file()
    shutil.rmtree(beside / "inside" / "mine")
    (beside / "inside" / "mine").symlink_to(beside / "outside" / "secret")
    with pytest.raises(LookupError):
        catalog.rows_file("mine")


@pytest.mark.parametrize(
    "path",
    [
        "/static/..%2fapp.py",
        "/static/../app.py",
        "/..%2f..%2fetc/passwd",
        "/static/%2e%2e/guard.py",
        "/app.py",
    ],
)
def test_only_the_pages_own_files_are_served(served, path):
    status, _, body = served.get(path)
    assert status == 404
    assert b"import" not in body


def test_a_step_is_a_number(served):
    assert served.get("/api/columns?run=learner&step=../metrics")[0] == 400
    assert served.get("/api/columns?run=learner&step=999")[0] == 404
    assert served.ask("columns?run=learner&step=3")["total"] == 4


# --- where it listens -----------------------------------------------------------------------------


def test_other_machines_are_let_in_only_when_that_is_said(runs):
    library = Library(Catalog([runs]))
    with pytest.raises(ConfigError, match="--allow-remote"):
        Server(library, host="0.0.0.0")
    assert Server(library)._socket.getsockname()[0] == "127.0.0.1"
    opened = Server(library, host="0.0.0.0", allow_remote=True)
    opened._socket.close()


async def test_a_server_for_all_takes_addresses_and_its_own_name_and_no_other(runs):
    guarded = make_app(Library(Catalog([runs])), host="0.0.0.0")
    assert await asked(guarded, "/api/runs", [("host", "192.0.2.7:80")]) == 200
    assert await asked(guarded, "/api/runs", [("host", "evil.example")]) == 421
    local = make_app(Library(Catalog([runs])))
    assert await asked(local, "/api/runs", [("host", "192.0.2.7:80")]) == 421


def test_a_lone_surrogate_of_a_model_survives_the_way(serve, tmp_path):
    row = view_runs.plain_row(1, __import__("random").Random(0))
    row["completion"][0]["content"] = "half \ud83d a smile"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.jsonl").write_text(json.dumps(row) + "\n")
    answer = serve(tmp_path).ask("rollout?run=run&row=0")
    assert answer["messages"][1]["parts"][0]["text"] == "half \ud83d a smile"


def test_the_guard_passes_other_traffic_on():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(Guard(app, hosts=allowed_hosts("127.0.0.1"))({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]


# --- what is kept in memory -----------------------------------------------------------------------


def test_an_evaluation_has_no_steps_and_keeps_one_index(runs):
    library = Library(Catalog([runs]))
    library.columns(CAREFUL)
    for step in range(8):
        with pytest.raises(LookupError, match="is an evaluation, which has no steps"):
            library.columns(CAREFUL, step)
    assert list(library._indexes) == [(CAREFUL, None)]


def test_the_rows_of_all_indexes_together_are_bounded(runs, monkeypatch):
    library = Library(Catalog([runs]))
    steps = library.run("learner")["steps"]
    monkeypatch.setattr("verifiers.view.library.MAX_INDEXED_ROWS", 10)
    for step in steps[:6]:
        assert library.columns("learner", step)["total"] == 4
    assert sum(map(len, library._indexes.values())) <= 12
    assert ("learner", steps[5]) in library._indexes
    monkeypatch.setattr("verifiers.view.library.MAX_INDEXED_ROWS", 10**9)  # negative control
    for step in steps[:6]:
        library.columns("learner", step)
    assert sum(map(len, library._indexes.values())) == 24
