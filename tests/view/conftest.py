"""A folder of runs, servers over folders, and one browser for all tests of the page."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import browser, view_runs
from verifiers.view.catalog import Catalog
from verifiers.view.library import Library
from verifiers.view.server import Server
from verifiers.view.tokens import pieces_of


class Served:
    """A running server and a client that says exactly what it is told to."""

    def __init__(self, server: Server):
        self.server = server
        self.url = server.url

    def get(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body); ``Host`` is right unless given; ``_`` in a header's name is
        ``-``."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=20)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host=True)
            for name, value in ({"Host": f"127.0.0.1:{self.server.port}"} | headers).items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def ask(self, path: str) -> Any:
        """The JSON of an answer."""
        status, _, body = self.get(f"/api/{path}")
        assert status == 200, body
        return json.loads(body)


@contextlib.contextmanager
def serving(folder: Path, tokenizer: str | None = None) -> Iterator[Served]:
    """A server over a folder, in a thread."""
    library = Library(Catalog([folder]), pieces_of(tokenizer) if tokenizer else None)
    server = Server(library)
    open_ = threading.Event()
    thread = threading.Thread(target=server.run, args=(open_.set,), daemon=True)
    thread.start()
    assert open_.wait(20)
    try:
        yield Served(server)
    finally:
        server.stop()
        thread.join(10)


@pytest.fixture
def serve():
    """``serve(folder)`` as often as a test likes."""
    with contextlib.ExitStack() as stack:
        yield lambda folder, **more: stack.enter_context(serving(folder, **more))


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """Evaluations of two models on one environment, one with a picture, and a training."""
    folder = tmp_path_factory.mktemp("runs")
    view_runs.tool_run(folder)
    view_runs.tool_run(folder, "careless-1b", skill=0.3, seed=3)
    view_runs.image_run(folder)
    view_runs.training(folder / "learner", num_steps=30)
    return folder


@pytest.fixture(scope="session")
def served(runs) -> Iterator[Served]:
    """A server over ``runs``."""
    with serving(runs) as server:
        yield server


@pytest.fixture(scope="session")
def browser_window() -> Iterator[browser.Page]:
    yield from browser.pages()


@pytest.fixture
def page(browser_window, serve) -> Iterator[browser.Page]:
    """The browser; a test fails when the page complained in its console. It leaves the page before
    servers end."""
    browser_window.complaints()
    yield browser_window
    complaints = browser_window.complaints()
    browser_window.leave()
    assert complaints == []


@pytest.fixture
def phone(page) -> Iterator[browser.Page]:
    """The browser with the screen of a phone."""
    screen = {"width": browser.PHONE_WIDTH, "height": 844, "deviceScaleFactor": 2, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    page.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
    yield page
    page.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": False})
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
