"""Promise: what a model, a dataset or a server names or writes stays data: no path leads out, no
escape is obeyed."""

from __future__ import annotations

import json

import pytest

import verifiers as vf
from support.eval_command import rows_on_disk
from verifiers.testing import FakeServer

ENVIRONMENT = """
import verifiers as vf

def look(place: str) -> str:
    '''Look somewhere.'''
    return f"nothing in {place}"

def load_environment():
    rows = [{"question": "say 1", "answer": "1", "id": "../../../row", "example_id": "../../../example",
             "task": "../../../task", "info": {"path": "../../../info"}}]
    return vf.ToolEnv(eval_dataset=rows, tools=[look], max_turns=3)
"""
ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e"


def hostile(request):
    """Calls tools whose names are paths and escapes, then answers with escapes."""
    if request.prompt[-1]["role"] == "user":
        calls = [
            vf.ToolCall(f"id{n}", name, "{}") for n, name in enumerate(("../../../tool", ESCAPES))
        ]
        return vf.AssistantMessage(f"wait {ESCAPES}", tool_calls=calls)
    return f"done {ESCAPES}"


@pytest.mark.parametrize(
    "model", ["../../../model", "/etc/model", "a/../../b", "..", f"m{ESCAPES}"], ids=ascii
)
def test_names_of_models_rows_and_tools_make_no_path_and_no_escape_reaches_the_terminal(
    vf_eval, eval_folder, model
):
    (eval_folder / "toy.py").write_text(ENVIRONMENT)
    outside = sorted(eval_folder.parent.iterdir())
    with FakeServer(hostile, models=[model]) as server:
        ran = vf_eval(
            "toy", "-b", server.url, "-m", model, "-n", "1", "-r", "1", "--export", "parquet"
        )
    assert ran.code in (0, 3), ran.err  # nothing scores it: no reward function
    assert not {"\x1b", "\x07", "\u202e"} & {*ran.out, *ran.err}
    (row,) = rows_on_disk(eval_folder)
    assert "../../../tool" in json.dumps(row["completion"])
    assert sorted(eval_folder.parent.iterdir()) == outside
    runs = eval_folder / "outputs/evals"
    for path in eval_folder.rglob("*"):
        assert path.resolve().is_relative_to(eval_folder)
        if path.suffix in (".jsonl", ".parquet"):
            assert path.is_relative_to(runs)
            assert len(path.relative_to(runs).parts) == 3


def test_joined_as_they_come_such_names_lead_out(tmp_path):
    """Negative control."""
    inside = tmp_path / "outputs/evals/toy"
    inside.mkdir(parents=True)
    assert not (inside / "../../../model").resolve().is_relative_to(tmp_path / "outputs")
    assert (inside / "/etc/model").parts[:2] == ("/", "etc")
