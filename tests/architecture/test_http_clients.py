"""HTTP clients of ours are made by ``runtime.http_clients``, so that one rule about proxies, redirects
and keys holds for all."""

import ast

import pytest

from architecture.test_native_code import name_of, product_files

MAKERS = (
    "ClientSession",
    "urlopen",
    "build_opener",
    "AsyncClient",
    "HTTPConnection",
    "urlretrieve",
)


def makers(source: str) -> list[str]:
    """Calls that make a client."""
    calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
    return [call for call in calls if call.rpartition(".")[2] in MAKERS]


def test_no_other_file_makes_a_client():
    clients = {
        name_of(path): calls
        for path in product_files()
        if (calls := makers(path.read_text(encoding="utf-8")))
    }
    assert set(clients) == {"verifiers/runtime/http_clients.py"}, "use open_session or open_url"


@pytest.mark.parametrize(
    "source", ["aiohttp.ClientSession()", "urllib.request.urlopen(u)", "httpx.AsyncClient(x=1)"]
)
def test_negative_control_a_client_is_found(source):
    assert len(makers(source)) == 1
