"""The public names are a promise: sorted, frozen, each one there. Errors that callers see are of
one tree."""

import ast
import asyncio
import builtins
from pathlib import Path

import pytest

import verifiers as vf
from support.import_graph import CORE, modules
from support.small_envs import row, single_turn
from support.sources import nodes_of
from verifiers.clients import OpenAIChatCompletionsClient, RetryPolicy
from verifiers.clients.adapters import OpenAILikeClient
from verifiers.testing import Behaviour, FakeServer

FROZEN = Path(__file__).with_name("exports.txt")


def test_public_names_are_sorted_and_frozen():
    assert vf.__all__ == sorted(set(vf.__all__))
    names = FROZEN.read_text(encoding="utf-8").split()
    assert vf.__all__ == names, (
        f"new: {sorted(set(vf.__all__) - set(names))}, gone:"
        f" {sorted(set(names) - set(vf.__all__))}. A name that goes breaks somebody; a new one is a"
        f" promise. When it is meant, write it into {FROZEN.name}"
    )


def test_every_public_name_is_there_under_the_module_that_has_it():
    for name in vf.__all__:
        value = getattr(vf, name)
        home = getattr(value, "__module__", None)
        assert home is None or home.split(".")[0] in (
            "verifiers",
            "verifiers_agents",
            "typing",
            "builtins",
            "collections",
        ), name


def test_every_error_of_the_tree_is_public():
    from verifiers import errors

    tree = {
        n
        for n, v in vars(errors).items()
        if isinstance(v, type) and issubclass(v, errors.VerifiersError)
    }
    assert tree <= set(vf.__all__)


# --- errors of lower levels do not leak

FAULTS = [
    Behaviour(400, body=b'{"error": {"message": "no"}}'),
    Behaviour(
        400, body=b'{"error": {"message": "maximum context length is 10 tokens, requested 20"}}'
    ),
    Behaviour(401),
    Behaviour(404, body=b'{"error": {"message": "The model `m` does not exist"}}'),
    Behaviour(404),
    Behaviour(429, {"Retry-After": "600"}),
    Behaviour(429),
    Behaviour(500),
    Behaviour(302, {"Location": "http://127.0.0.1:1/"}),
    Behaviour(body=b""),
    Behaviour(body=b"<html>"),
    Behaviour(body=b"[]"),
    Behaviour(body=b'{"choices": []}'),
    Behaviour(body=b'{"choices": [{"message": null}]}'),
    Behaviour(body=b'{"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]}'),
    Behaviour(body=b"\xff\xfe"),
    Behaviour(garbage=b"HTTP/1.1 999 \xff\r\n\r\n"),
    Behaviour(reset=True),
    Behaviour(never=True),
]


def own_transport(url):
    return OpenAIChatCompletionsClient(
        base_url=url, timeout=0.3, retry=RetryPolicy(max_retries=1, base_s=0.01)
    )


def sdk_with_a_http_client_of_its_own(url):
    import openai

    http_client = openai.DefaultAsyncHttpxClient(timeout=0.3)
    sdk_client = openai.AsyncOpenAI(
        base_url=url, api_key="k", max_retries=0, timeout=0.3, http_client=http_client
    )
    return OpenAILikeClient(sdk_client, RetryPolicy(max_retries=1, base_s=0.01))


@pytest.mark.parametrize(
    "client_of", [own_transport, sdk_with_a_http_client_of_its_own], ids=lambda f: f.__name__
)
def test_no_error_of_a_provider_or_a_transport_leaks(client_of):
    async def outcome(fault):
        with FakeServer("x", script=lambda hit: fault) as server:
            try:
                state = await asyncio.wait_for(
                    single_turn(1).rollout(row(), client_of(server.url), "m"), 30
                )
            except vf.RunError as error:
                return error
            return state["error"] or state["stop_condition"]

    async def all_outcomes():
        return await asyncio.gather(*map(outcome, FAULTS))

    for fault, returned in zip(FAULTS, asyncio.run(all_outcomes()), strict=True):
        # str: the stop condition of a rollout without one
        of_ours = isinstance(returned, vf.ModelError | vf.RunError | str)
        assert of_ours, f"{fault} gave {returned!r}"


RAISED_AS_PROTOCOL = frozenset(
    "AttributeError KeyError IndexError TypeError ValueError NotImplementedError AssertionError"
    " StopIteration TimeoutError CancelledError RuntimeError LookupError SystemExit ImportError"
    " ModuleNotFoundError OutputLimitExceededError".split()
)
"""Builtin errors that say something to Python itself or to the caller of an internal function, and
that of Inspect's protocol of sandboxes."""
OPERATING_SYSTEM = {
    n for n, v in vars(builtins).items() if isinstance(v, type) and issubclass(v, OSError)
}


def test_what_the_sources_raise_is_of_the_tree_or_of_python():
    from verifiers import errors

    own_errors = {n for n, v in vars(errors).items() if isinstance(v, type)}
    files = {name: nodes_of(path) for name, path in modules(CORE).items()}
    own_errors |= {
        node.name
        for nodes in files.values()
        for node in nodes
        if isinstance(node, ast.ClassDef) and {ast.unparse(b) for b in node.bases} & own_errors
    }
    foreign = []
    for name, nodes in files.items():
        classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        for node in nodes:
            raised = node.exc if isinstance(node, ast.Raise) else None
            called = raised.func if isinstance(raised, ast.Call) else None
            spelt = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if (
                spelt[:1].isupper()
                and spelt not in own_errors | classes | RAISED_AS_PROTOCOL | OPERATING_SYSTEM
            ):
                foreign.append(f"{name}:{node.lineno} raises {spelt}")
    assert foreign == []
