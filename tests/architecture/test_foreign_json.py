"""JSON of peers, programs and models is decoded by ``runtime.decoding``, which bounds it.

A decoder of its own is left to what this project wrote, and to flags of the user.
"""

import ast
from collections.abc import Iterable

import pytest

from architecture.test_native_code import name_of, product_files
from support.sources import nodes_in, nodes_of

DECODERS = {"json.loads", "json.load", "msgspec.json.decode", "json.JSONDecoder"}
GUARDED = {
    "verifiers/clients/payload.py",
    "verifiers/clients/reply.py",
    "verifiers_trainer/engines/http/wire.py",
}
"""Decode into types, or more strictly, after ``check_values``."""
USERS = {
    "verifiers/checks/audit/__init__.py",
    "verifiers/cli/audit.py",
    "verifiers/runtime/notations.py",
    "verifiers/cli/serve_env.py",
    "verifiers_integrations/common.py",
    "verifiers_integrations/parquet.py",
    "verifiers_integrations/skyrl.py",
    "verifiers_integrations/tinker/cookbook.py",
    "verifiers_integrations/verl.py",
}
"""Flags of the user."""
OURS = {
    "verifiers/data/kept_rows.py",  # what it encoded itself
    "verifiers/storage/configurations.py",
    "verifiers/testing/scripted.py",
    "verifiers/checks/chat_template.py",
    "verifiers/cli/install/installed.py",
    "verifiers/cli/install/setup.py",
    "verifiers/clients/local.py",
    "verifiers/data/tool_schema.py",  # the decoder, whose call is after ``check_values``
    "verifiers/runtime/decoding.py",
    "verifiers/runtime/distributions.py",  # a file of this package
    "verifiers/runtime/processes.py",
    "verifiers/sandbox/host/sandlock_supervisor.py",
    "verifiers/sandbox/host/session.py",
    "verifiers/sandbox/host/zygotes.py",
    "verifiers/testing/connection.py",
    "verifiers/testing/server.py",
    "verifiers_agents/inside.py",
    "verifiers_agents/tasksets/bridge.py",  # runs in another Python, which has no ``decoding``
    "verifiers_sandboxes/container.py",
    "verifiers_trainer/cli/session.py",
    "verifiers_trainer/cli/vllm_command.py",
    "verifiers_trainer/distributed/ranks.py",
    "verifiers_trainer/engines/http/tool_calls.py",  # a completion of our engine
    *(
        f"verifiers/sandbox/guest/{name}.py"
        for name in ("frames", "init", "launch", "session", "worker", "zygote")
    ),
}
"""What this project wrote, most of it messages between its processes, of a few kilobytes."""


def decoders(nodes: Iterable[ast.AST]) -> list[str]:
    """Uses of a decoder, and calls of ``json()`` of an answer or a request."""
    return sorted(ast.unparse(node) for node in nodes if is_decoder(node))


def is_decoder(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in DECODERS
    match node:
        case ast.Await(value=ast.Call(func=ast.Attribute(attr="json"))):
            return True
    return False


def test_no_other_file_decodes_json_by_itself():
    allowed = GUARDED | USERS | OURS
    decoders_found = {
        name_of(path): uses
        for path in product_files()
        if "envs" not in path.parts and (uses := decoders(nodes_of(path)))
    }
    assert {name: decoders_found[name] for name in decoders_found.keys() - allowed} == {}, (
        "decode it with verifiers.runtime.decoding.decode_message"
    )


def test_files_that_decode_into_types_bound_the_values_before():
    for path in product_files():
        if name_of(path) in GUARDED:
            assert "check_values(" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "source",
    ["json.loads(body)", "x(type=json.loads)", "msgspec.json.decode(b)", "(await r.json())['a']"],
)
def test_negative_control_a_decoder_is_found(source):
    source = f"async def f():\n    {source}"
    assert len(decoders(nodes_in(source))) == 1
