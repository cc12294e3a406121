"""The page of an agent's rollout: its log, files, roles and end."""

from urllib.parse import quote

import verifiers as vf
from support.browser import too_wide
from verifiers.results.rows import RolloutOutput
from verifiers.testing import ScriptedClient
from verifiers.view.rollout import page

ROW = dict.fromkeys(
    "example_id prompt completion answer task info reward advantage error is_truncated stop_condition timing "
    "token_usage tool_defs".split()
) | {"metrics": {}, "prompt": [], "completion": []}
AGENT = {"name": "codex", "version": "1.2", "ended": "agent_ended", "log": "working\n", "roles": ["side", "main"]}


def test_log_files_roles_and_end_are_shown_apart():
    steps = [{"completion": [], "extras": {"role": role}} for role in AGENT["roles"]]
    row = RolloutOutput(ROW | {"agent": AGENT, "files": {"a.txt": "1"}, "trajectory": steps, "mine": 3})
    content = page(row, {})
    assert content["agent"] == AGENT | {"files": {"a.txt": "1"}}
    assert [step["role"] for step in content["steps"]] == ["side", "main"]
    assert content["more"] == {"mine": 3}


def test_columns_of_that_name_in_another_environment_stay_columns():
    content = page(RolloutOutput(ROW | {"agent": "a player", "files": 7}), {})
    assert (content["agent"], content["more"]) == (None, {"agent": "a player", "files": 7})


class RecordsAnAgent(vf.SingleTurnEnv):
    """Records what an agent's rollout records, with lines that are longer than a screen."""

    async def setup_state(self, state):
        command = "/bin/bash -lc 'grep -rn --include=*.py " + "x" * 200 + "'"
        state["agent"] = AGENT | {"log": f"{command}\n" * 20, "roles": ["main"], "notes": ["n" * 120]}
        state["files"] = {"a/very/long/path/" + "p" * 80 + ".txt": "y" * 500}
        return state


def test_the_page_of_an_agents_rollout_is_no_wider_than_a_phone(phone, serve, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "Work."}], "answer": ""}]
    env = RecordsAnAgent(dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))
    run = tmp_path / "evals/agent--m/1"
    env.evaluate_sync(ScriptedClient(["done"]), "m", results_path=run, state_columns=["agent", "files"])
    server = serve(tmp_path / "evals")
    phone.open(server.url + "#/run/" + quote(server.ask("runs")["runs"][0]["id"], safe="") + "/0")
    phone.wait_text("grep -rn")
    phone.picture("phone-agent")
    assert too_wide(phone) == []
