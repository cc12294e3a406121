"""HTTP clients of ours are made by ``runtime.http_clients``, so that one rule about proxies, redirects
and keys holds for all."""

import ast
from collections.abc import Iterable

import pytest

from architecture.test_native_code import name_of, product_files
from support.sources import calls_in, calls_of, nodes_in

MAKERS = (
    "ClientSession",
    "urlopen",
    "build_opener",
    "AsyncClient",
    "HTTPConnection",
    "urlretrieve",
)


def makers(calls: Iterable[ast.Call]) -> list[str]:
    """Those that make a client."""
    functions = [ast.unparse(call.func) for call in calls]
    return [name for name in functions if name.rpartition(".")[2] in MAKERS]


def test_no_other_file_makes_a_client():
    clients = {
        name_of(path): calls for path in product_files() if (calls := makers(calls_of(path)))
    }
    assert set(clients) == {"verifiers/runtime/http_clients.py"}, "use open_session or open_url"


@pytest.mark.parametrize(
    "source", ["aiohttp.ClientSession()", "urllib.request.urlopen(u)", "httpx.AsyncClient(x=1)"]
)
def test_negative_control_a_client_is_found(source):
    assert len(makers(calls_in(nodes_in(source)))) == 1
