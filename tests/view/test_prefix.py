"""The page below a path of a proxy (JupyterHub, code servers), in a real browser."""

from __future__ import annotations

import http.server
import threading
import urllib.error
import urllib.request
from urllib.parse import quote

import pytest

PREFIX = "/user/ann/proxy/7860"


@pytest.fixture
def proxied(served):
    """The address of the page behind a proxy that knows nothing outside of its prefix."""
    requested = []

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            requested.append(self.path)
            if not self.path.startswith(f"{PREFIX}/"):
                self.send_error(404)
                return
            address = served.url.rstrip("/") + self.path.removeprefix(PREFIX)
            try:
                with urllib.request.urlopen(address, timeout=20) as answer:
                    body, kind = answer.read(), answer.headers["content-type"]
            except urllib.error.HTTPError as error:
                self.send_error(error.code)
                return
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}{PREFIX}/", requested
        server.shutdown()


def test_the_page_its_files_and_its_data_are_read_below_the_path(page, served, proxied):
    address, requested = proxied
    page.open(address)
    page.wait(lambda: len(page.texts(".body .row")) == 4)
    assert all(path.startswith(f"{PREFIX}/") for path in requested if "favicon" not in path)
    assert any("/api/runs" in path for path in requested)
    page.open(f"{address}#/run/{quote('evals/times-table--careful-7b/3fa9c1d2', safe='')}")
    page.wait(lambda: len(page.texts(".body .row")) > 0)
    assert all(path.startswith(f"{PREFIX}/") for path in requested if "favicon" not in path)
