"""Python in fenced blocks of a reply: which text is code, what a model is told, and when the
rollout ends."""

import shutil

import pytest

import verifiers as vf
from verifiers.clients.protocol import shows_tools
from verifiers.environments.code_blocks import (
    BLOCKS_PROMPT,
    BLOCKS_REMINDER,
    NOT_CLOSED,
    Blocks,
    code_blocks,
    with_reminder,
)
from verifiers.testing import ScriptedClient

BACKENDS = [
    "unsafe_subprocess",
    pytest.param(
        "bubblewrap",
        marks=pytest.mark.skipif(
            shutil.which("bwrap") is None, reason="bubblewrap is not installed"
        ),
    ),
]


def block(code, language="python"):
    return f"```{language}\n{code}\n```"


class Knows(ScriptedClient):
    """A scripted client that says whether its model is shown tools."""

    shown = False

    async def shows_tools(self):
        return self.shown


def make(**parameters):
    defaults = {
        "sandbox": "unsafe_subprocess",
        "pip_install_packages": "",
        "code_from": "blocks",
    } | parameters
    return vf.PythonEnv(**{"dataset": [{"question": "Do it.", "answer": ""}]} | defaults)


def play(*replies, client=ScriptedClient, **parameters):
    client = client([*replies, "done"])
    results = make(**parameters).evaluate(client, "m")
    results.client = client
    return results


def told(results):
    return [m["content"] for m in results["completions"][0] if m["role"] == "user"]


# --- which text is a block ------------------------------------------------------------------------


SAYS_THE_TAG = "x = 1\nprint('</think>')\nx"


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\nx\n```", "x"),
        ("so:\n```py\nx\ny\n```\nthat is it", "x\ny"),
        ("```Python\nx\n```", "x"),
        ("``` python title=a.py\nx\n```  ", "x"),
        ("```python\r\nx\r\n```\r\n", "x"),
        ("   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''"),
        (f"{block('a')}\nand\n{block('b', 'text')}\n{block('c')}", "a\nc"),
        ("```python\n```", ""),
        # none of these is one
        ("", None),
        ("x = 1", None),
        ("`python x`", None),
        ("write ```python\nx\n```", None),
        ("    ```python\n    x\n    ```", None),
        ("``python\nx\n``", None),
        ("~~~python\nx\n~~~", None),
        (block("x", ""), None),
        (block("x", "bash"), None),
        (block("x", "pythonic"), None),
        (block("x", "python-console"), None),
        (block("x", "pycon"), None),
        (block("x", "python3"), "x"),
        (block("x", "Python3.12"), "x"),
        (block("x", "py3 title=a.py"), "x"),
        (block("x", "ipython3"), "x"),
        (block("x", "{python}"), "x"),
        (block("x", "{.python .number}"), "x"),
        ("```text\n```python\nx\n```", None),
        (f"<think>\n{block('x')}\n</think>\nIt is 4.", None),
        (f"<think>\n{block('x')}\n</think>\n{block('y')}", "y"),
        (f"\n<think>\n{block('x')}\nHmm", None),
        (f"I <think> so.\n{block('x')}", "x"),
        (block(SAYS_THE_TAG), SAYS_THE_TAG),
        (f"<think>\n{block(SAYS_THE_TAG)}\n</think>\n{block(SAYS_THE_TAG)}", SAYS_THE_TAG),
        (f"<think>hm</think>\n{block('x')}\nIt ends at </think>.", "x"),
        (f"<think>a</think>\n<think>\n{block('x')}</think>\n{block('y')}", "y"),
        (f"I draft\n```python\nx\n</think>\n{block('y')}", "y"),  # the template opened the thought
        (f"{block('x')}\n</think>\n{block('y')}", "y"),
    ],
)
def test_the_blocks_of_a_reply(reply, code):
    assert code_blocks(reply) == Blocks(code)


def test_cut_at_the_last_tag_of_all_the_code_before_it_would_be_lost():
    """Negative control."""
    _, _, after_tag = block(SAYS_THE_TAG).rpartition("</think>")
    assert code_blocks(after_tag) == Blocks()


def test_a_block_that_is_not_closed_is_whole_only_when_the_model_stopped_there():
    blocks = code_blocks("```python\nx = 1")
    assert (blocks, blocks.cell(is_truncated=False), blocks.cell(is_truncated=True)) == (
        Blocks(None, "x = 1"),
        "x = 1",
        None,
    )
    two = code_blocks(f"{block('a')}\n```python\nb")
    assert (two.cell(is_truncated=False), two.cell(is_truncated=True)) == ("a\nb", "a")
    assert blocks
    assert not code_blocks("```text\nx")
    assert code_blocks("```python\nx\n``").cell(is_truncated=False) == "x\n``"


def test_the_example_in_the_prompt_is_a_block_that_runs_to_what_it_says():
    code = code_blocks(BLOCKS_PROMPT).code
    results = play(block(code.split("\n")[0]))
    assert BLOCKS_PROMPT.endswith(told(results)[0])


def test_the_reminder_ends_the_last_user_message_and_leaves_the_row_alone():
    row = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert [m["content"] for m in with_reminder(row, "R")] == ["a", "b", "c\n\nR"]
    assert row[-1]["content"] == "c"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert with_reminder(parts, "R")[0]["content"][-1] == {"type": "text", "text": "\n\nR"}
    assert with_reminder(row[1:2], "R") == row[1:2]


# --- one rollout ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sandbox", BACKENDS)
def test_blocks_run_in_one_interpreter_and_a_reply_without_one_ends_the_rollout(sandbox):
    results = play(
        f"First\n{block('x = 6 * 7')}",
        f"{block('print(x)')}\nand then\n{block('x + 1')}",
        block("y"),
        sandbox=sandbox,
    )
    nothing, shown, wrong = told(results)
    assert (nothing, shown) == ("Output:\n(no output)", "Output:\n42\nOut[2]: 43")
    assert wrong.startswith("Output:\nTraceback (most recent call last):\n")
    assert wrong.endswith("NameError: name 'y' is not defined")
    assert results["stop_conditions"] == ["no_code_block"]
    metrics = {name: values[0] for name, values in results["metrics"].items()}
    assert (metrics["python_calls"], metrics["total_tool_calls"], metrics["tool_errors"]) == (
        3,
        3,
        1,
    )
    assert metrics["sandbox_command_execution_time"] > 0
    assert results["states"][0]["sandbox"].sandbox is None
    assert [m["role"] for m in results["completions"][0]] == ["assistant", "user"] * 3 + [
        "assistant"
    ]


def test_the_model_is_told_of_the_form_and_of_no_tool():
    results = play(system_prompt="Be brief.")
    system, user = results.client.requests[0].prompt
    assert system["content"] == f"Be brief.\n\n{BLOCKS_PROMPT}"
    assert user["content"] == f"Do it.\n\n{BLOCKS_REMINDER}"
    assert not results.client.requests[0].tools
    assert results["states"][0]["tool_defs"] == []
    silent = play(blocks_system_prompt="", blocks_reminder="").client.requests[0].prompt
    assert [message["content"] for message in silent] == ["Do it."]
    prompt = play(blocks_system_prompt="Mine.", system_prompt="Be brief.").client.requests[0].prompt
    assert prompt[0]["content"] == "Mine."


def test_in_the_form_of_tools_a_block_is_text():
    results = play(block("x"), code_from="tool")
    assert (results["stop_conditions"], results["metrics"]["python_calls"]) == (
        ["no_tools_called"],
        [0.0],
    )
    assert results.client.requests[0].tools[0]["function"]["name"] == "python"


@pytest.mark.parametrize(
    ("reply", "finish_reason", "answer", "num_errors"),
    [
        ("```python\n1 + 1", "stop", "Out[1]: 2", 0),
        ("```python\n1 + 1", "length", NOT_CLOSED, 1),
        (f"{block('1 + 1')}\n```python\n1 +", "length", f"Out[1]: 2\n{NOT_CLOSED}", 1),
        (f"{block('1 + 1')}\nand so", "length", "Out[1]: 2", 0),
    ],
)
def test_a_block_that_was_cut_off_is_not_run_and_the_model_is_told(
    reply, finish_reason, answer, num_errors
):
    first = vf.Response(vf.AssistantMessage(reply), finish_reason=finish_reason)
    results = play(first)
    assert told(results) == [f"Output:\n{answer}"]
    assert (results["metrics"]["python_calls"], results["metrics"]["tool_errors"]) == (
        [1.0],
        [float(num_errors)],
    )


def test_time_limits_long_outputs_and_turns_are_as_with_the_tool():
    slow = play(block("while True: pass"), block("2"), timeout_per_command_seconds=2)
    stopped = "Output:\n(stopped after 2 s, the time limit of one call; all variables are gone)"
    assert told(slow) == [stopped, "Output:\nOut[1]: 2"]
    (cut,) = told(play(block("'ab' * 1000"), max_tool_result_chars=100))
    assert len(cut) < 200
    assert "characters left out" in cut
    bounded = play(block("1"), block("2"), block("3"), max_turns=2)
    assert (bounded["stop_conditions"], len(told(bounded))) == (["max_turns_reached"], 1)


def test_tools_of_the_authors_own_can_stand_beside_blocks():
    def double(n: int) -> int:
        return 2 * n

    both = vf.AssistantMessage(
        block("x = 3\nx"), tool_calls=[vf.ToolCall("c1", "double", {"n": 4})]
    )
    results = play(vf.Response(both, finish_reason="tool_calls"), block("x"), tools=[double])
    assert [(m["role"], m["content"]) for m in results["completions"][0][1:3]] == [
        ("tool", "8"),
        ("user", "Output:\nOut[1]: 3"),
    ]
    metrics = results["metrics"]
    assert (metrics["double_calls"], metrics["python_calls"], metrics["total_tool_calls"]) == (
        [1.0],
        [2.0],
        [3.0],
    )
    assert results["stop_conditions"] == ["no_code_block"]


def test_a_sandbox_that_does_not_open_ends_the_rollout_in_both_forms():
    class Closed:
        name, capabilities = "closed", frozenset()

        async def available(self):
            return True, ""

        async def open(self, spec):
            raise vf.SandboxUnavailable("closed today")

    for form, reply in (
        ("blocks", block("1")),
        ("tool", vf.ToolCall("c", "python", {"code": "1"})),
    ):
        results = play(reply, sandbox=Closed(), code_from=form)
        assert isinstance(results["states"][0]["error"], vf.SandboxUnavailable), form


# --- who decides ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("shown", "form"), [(False, "blocks"), (True, "tool"), (None, "tool")])
def test_auto_asks_the_client_what_its_model_is_shown(shown, form):
    class Client(Knows):
        pass

    Client.shown = shown
    results = play(
        client=Client,
        code_from="auto",
        system_prompt="Call python.",
        blocks_system_prompt="Write blocks.",
    )
    request = results.client.requests[0]
    assert results["states"][0]["code_from"] == form
    assert request.prompt[0]["content"] == {"blocks": "Write blocks.", "tool": "Call python."}[form]
    assert bool(request.tools) == (form == "tool")
    assert BLOCKS_REMINDER in request.prompt[-1]["content"] or form == "tool"


def test_auto_with_a_client_that_says_nothing_offers_the_tool():
    results = play(code_from="auto")
    assert results["states"][0]["code_from"] == "tool"
    assert results.client.requests[0].tools


@pytest.mark.parametrize("form", ["auto", "blocks"])
def test_a_system_prompt_of_the_rows_own_stays_and_there_is_one(form):
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Of the row."},
                {"role": "user", "content": "Go."},
            ]
        }
    ]
    asked = play(client=Knows, code_from=form, dataset=rows).client.requests[0].prompt
    assert [m["content"] for m in asked] == [
        f"Of the row.\n\n{BLOCKS_PROMPT}",
        f"Go.\n\n{BLOCKS_REMINDER}",
    ]


def test_in_a_group_of_environments_each_decides_for_its_rows():
    members = [make(code_from=form, dataset=[{"question": form}] * 2) for form in ("auto", "tool")]
    results = vf.EnvGroup(members, ["a", "b"]).evaluate(Knows("x"), "m")
    assert [state["code_from"] for state in results["states"]] == ["blocks"] * 2 + ["tool"] * 2


async def test_a_group_of_clients_shows_tools_when_all_do():
    class Client(Knows):
        def __init__(self, shown):
            super().__init__("x")
            self.shown = shown

    for shown, is_shown in (
        ([True, True], True),
        ([True, False], False),
        ([True, None], None),
        ([None, False], False),
    ):
        assert (
            await shows_tools(vf.as_client([Client(client_shows) for client_shows in shown]))
            is is_shown
        )
    assert await shows_tools(ScriptedClient("x")) is None


def test_tools_that_the_model_is_not_shown_are_warned_of_once(caplog):
    env = make(code_from="tool", dataset=[{"question": "a"}, {"question": "b"}])
    with caplog.at_level("WARNING", "verifiers"):
        env.evaluate(Knows("x"), "small")
        env.evaluate(Knows("x"), "small")
    said = [
        record.getMessage() for record in caplog.records if "shows no tools" in record.getMessage()
    ]
    assert said == [
        "the chat template of small shows no tools, so the model does not know that it can call"
        ' python; code_from="blocks" (or "auto") runs the Python blocks of its replies instead'
    ]


@pytest.mark.parametrize("form", ["blocks", "auto"])
def test_no_tools_are_warned_of_where_none_are_offered(caplog, form):
    with caplog.at_level("WARNING", "verifiers"):
        play(client=Knows, code_from=form)
    assert "shows no tools" not in caplog.text


def test_every_tool_environment_warns(caplog):
    def look(where: str) -> str:
        return where

    env = vf.ToolEnv(tools=[look], dataset=[{"question": "a"}])
    with caplog.at_level("WARNING", "verifiers"):
        env.evaluate(Knows("x"), "small")
    assert "does not know that it can call look" in caplog.text


def test_arguments():
    with pytest.raises(
        vf.ConfigError, match="code_from is 'fences'; it must be one of tool, blocks, auto"
    ):
        make(code_from="fences")
    with pytest.raises(vf.ConfigError, match="pass it to load_environment"):
        make().set_kwargs(code_from="tool")
