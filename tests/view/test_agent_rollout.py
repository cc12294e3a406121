"""The page of an agent's rollout: its log, files, roles, branches and end."""

from urllib.parse import quote

import openai

import verifiers as vf
from support.browser import too_wide
from verifiers.results.rows import RolloutOutput
from verifiers.testing import ScriptedClient
from verifiers.view.rollout import page

ROW = dict.fromkeys(
    "example_id prompt completion answer task info reward advantage error is_truncated"
    " stop_condition timing token_usage tool_defs".split()
) | {"metrics": {}, "prompt": [], "completion": []}
AGENT = {
    "name": "codex",
    "version": "1.2",
    "ended": "agent_ended",
    "log": "working\n",
    "roles": ["side", "main"],
}


def test_log_files_roles_and_end_are_shown_apart():
    steps = [{"completion": [], "extras": {"role": role}} for role in AGENT["roles"]]
    row = RolloutOutput(
        ROW | {"agent": AGENT, "files": {"a.txt": "1"}, "trajectory": steps, "mine": 3}
    )
    content = page(row, {})
    assert content["agent"] == AGENT | {"files": {"a.txt": "1"}}
    assert [step["role"] for step in content["steps"]] == ["side", "main"]
    assert content["more"] == {"mine": 3}


def test_columns_of_that_name_in_another_environment_stay_columns():
    content = page(RolloutOutput(ROW | {"agent": "a player", "files": 7}), {})
    assert (content["agent"], content["more"]) == (None, {"agent": "a player", "files": 7})


TOOL = {
    "type": "function",
    "function": {"name": "task", "parameters": {"type": "object", "properties": {}}},
}
SYSTEM = {"role": "system", "content": "You work."}
LONG = "x" * 200


def reply(request):
    last = str(request.prompt[-1]["content"])
    answers = {
        "Name it.": "A title",
        "Help.": "Helped",
        "Sum up.": "The summary of it all",
        "Go on.": "All is done",
    }
    by_end = [answer for question, answer in answers.items() if last.endswith(question)]
    return (
        by_end[0] if by_end else vf.ToolCall("c1", "task", {}) if last == "Work." else "First done"
    )


async def branching(state):
    """A title, a turn that asks a helper, a turn, a summary, and a turn after the history was
    replaced by it."""
    async with (
        vf.model_gateway(state) as url,
        openai.AsyncOpenAI(base_url=url, api_key="unused") as client,
    ):

        async def ask(*messages, tools=(TOOL,)):
            more = {"tools": list(tools)} if tools else {}
            answer = await client.chat.completions.create(
                model="policy", messages=list(messages), **more
            )
            return answer.choices[0].message.model_dump(exclude_none=True)

        def user(text):
            return {"role": "user", "content": text}

        await ask(user("Name it."), tools=())
        first = [SYSTEM, user("Work.")]
        call = await ask(*first)
        helped = await ask({"role": "system", "content": "You help."}, user("Help."))
        first += [call, {"role": "tool", "tool_call_id": "c1", "content": helped["content"]}]
        first.append(await ask(*first))
        summary = await ask(*first, user("Sum up."))
        await ask(SYSTEM, user(f"{summary['content']}. Go on."))


async def fails(state):
    await branching(state)
    raise vf.AgentError(f"the log ends with: {LONG}")


class LeavesALog(vf.AgentEnv):
    def post_rollout(self, state):
        state["agent"] |= {
            "log": f"\x1b[31m/bin/bash -lc 'grep -rn\x1b[0m {LONG}'\n" * 20,
            "notes": [LONG],
        }
        state["files"] = {f"a/very/long/path/{LONG}.txt": LONG}


def recorded(folder, agent, columns=("trajectory",)):
    """Evaluate an agent on one row into a run below ``folder``."""
    env = LeavesALog(
        agent=agent,
        dataset=[{"question": "Work.", "answer": ""}],
        rubric=vf.Rubric([lambda state: 1.0]),
    )
    path = folder / f"evals/{agent.__name__}--m/{len(columns)}"
    (output,) = env.evaluate_sync(
        ScriptedClient(reply, tokens=True), "m", results_path=path, state_columns=list(columns)
    ).outputs
    return output


def test_calls_beside_the_conversation_are_shown_where_they_were_made(tmp_path):
    output = recorded(tmp_path, branching)
    assert output["agent"]["roles"] == ["side", "main", "subagent", "main", "summary", "main"]
    content = page(output, {})
    turns = [message for message in content["messages"] if message["role"] == "assistant"]
    assert [content["steps"][message["step"]]["role"] for message in turns] == ["main"] * 3
    shown = [
        (branch["role"], branch["at"], [message["role"] for message in branch["messages"]])
        for branch in content["branches"]
    ]
    assert shown == [
        ("side", 1, ["user", "assistant"]),
        ("subagent", 2, ["system", "user", "assistant"]),
        ("summary", 4, ["user", "assistant"]),
        ("rewrite", 4, ["system", "user"]),
    ]
    assert content["branches"][2]["messages"][1]["step"] == 4


async def in_parallel(state):
    """Two helpers, whose calls alternate."""
    async with (
        vf.model_gateway(state) as url,
        openai.AsyncOpenAI(base_url=url, api_key="unused") as client,
    ):

        async def ask(messages):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=[TOOL]
            )
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))

        work = [SYSTEM, {"role": "user", "content": "Work."}]
        await ask(work)
        helpers = [[{"role": "system", "content": f"You help {n}."}] for n in range(2)]
        for text in ("Look.", "Look again."):
            for messages in helpers:
                messages.append({"role": "user", "content": text})
                await ask(messages)
        work.append({"role": "tool", "tool_call_id": "c1", "content": "ok"})
        await ask(work)


def test_helpers_that_work_at_once_are_branches_of_their_own_without_repeats(tmp_path):
    content = page(recorded(tmp_path, in_parallel), {})
    shown = [[m["parts"][0]["text"] for m in b["messages"]] for b in content["branches"]]
    assert shown == [
        [f"You help {n}.", "Look.", "First done", "Look again.", "First done"] for n in range(2)
    ]
    assert [[m.get("step") for m in b["messages"]] for b in content["branches"]] == [
        [None, None, 1, None, 3],
        [None, None, 2, None, 4],
    ]


def test_a_rollout_that_was_saved_without_its_turns_has_no_branches(tmp_path):
    content = page(recorded(tmp_path, branching, ()), {})
    assert (content["branches"], len(content["agent"]["roles"])) == ([], 6)


def test_the_page_of_an_agents_rollout_shows_its_branches_and_is_no_wider_than_a_phone(
    phone, serve, tmp_path
):
    for agent in (branching, fails):
        recorded(tmp_path, agent)
    recorded(tmp_path, branching, ())
    server = serve(tmp_path / "evals")
    texts = {}
    for number, run in enumerate(server.ask("runs")["runs"]):
        phone.open(server.url + "#/run/" + quote(run["id"], safe="") + "/0")
        phone.wait_text("grep -rn")
        phone.js("document.querySelectorAll('details').forEach((one) => (one.open = true))")
        phone.picture(f"phone-agent-{number}")
        assert too_wide(phone) == [], run["id"]
        texts[run["id"].split("--")[0].removeprefix("evals/"), "/0" in run["id"]] = phone.text()
    text = texts["branching", False]
    order = [
        "side call A title",
        "turn 1",
        "subagent Helped",
        "turn 2",
        "summary The summary",
        "replaced its history",
    ]
    positions = [text.index(words) for words in order]
    assert positions == sorted(positions)
    assert "\x1b" not in text, "colours of a terminal are left out of the log"
    assert "the agent's calls beside its conversation" in texts["branching", True]
    assert "AgentError: the log ends with" in texts["fails", False].replace("\n", " ")
